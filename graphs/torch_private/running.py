"""What runs in this thread, and what is to be done around it: backwards, hooks, callbacks, modes, streams. [torch]"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphs.torch_private.names import tree_leaves
from graphs.torch_private.patching import patched

F = TypeVar("F", bound=Callable[..., Any])


def kept_from_compiler(function: FunctionType) -> bool:
    """Have the compiler leave a function alone, and whatever it calls, at no cost to its calls. Whether that could be done."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # it came with torch 2.7
        return False
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return True


def hooks_of_all_modules() -> list[object]:
    """Hooks that the program has registered for the calls of all modules there are; torch's own and those of a block under a
    budget change no numbers."""
    return [hook for hooks in _GLOBAL_HOOKS for hook in hooks.values() if not _is_our_own(hook)]


def _is_our_own(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("torch", "online")


_GLOBAL_HOOKS: list[Mapping[int, object]] = [
    getattr(torch.nn.modules.module, f"_global_{name}_hooks") for name in ("forward_pre", "forward", "backward_pre", "backward")
]


def left_to_run(function: F) -> F:
    """Have the compiler run a function as it is, wherever it meets a call of it, and whatever that calls; at no cost to calls."""
    kept_from_compiler(cast(FunctionType, function))
    cast(Any, function)._torchdynamo_disable = True  # what torch.compiler.disable leaves on its wrapper
    return function


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` for tensors that have nothing to do with ``torch.func``: they are not looked through for any that
    have, which takes as long as some ops where they are many."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


@functools.cache
def order_of_leaves(count: int) -> tuple[int, ...]:
    """In which order autograd hands gradients on that one function returns for so many leaves: its queue is a heap, which gives
    what is equal back in an order of its own. Places among what the function returns, the first one handed on first."""
    order: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.zeros((), device="cpu", requires_grad=True) for _ in range(count)]
        for i, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(functools.partial(_note, order, i))  # type: ignore[no-untyped-call]
        if leaves:
            cast(Tensor, _Fan.apply(*leaves)).backward()  # type: ignore[no-untyped-call]
    return tuple(order)


def _note(order: list[int], i: int, leaf: Tensor) -> None:
    order.append(i)


class _Fan(torch.autograd.Function):
    """A function of many leaves."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros((), device="cpu") for _ in range(ctx.count))


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def around_backwards(inside: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Enter ``inside()`` around each backward pass: while ``Tensor.backward`` runs, a torch-function mode steps aside, and
    would not see what hooks and custom functions do."""
    original: Any = vars(torch.autograd)["_engine_run_backward"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return original(*args, **kwargs)

    with patched(torch.autograd, "_engine_run_backward", run):
        yield


def current_stream() -> int:
    """The CUDA stream that the work of this thread goes to; 0 is the default one, and where CUDA is not in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if in_use else 0


@contextlib.contextmanager
def holding(module: nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """Have a module hold other parameters and buffers for a while, under all of their names. What is assigned in their place
    meanwhile is in ``tensors`` afterwards; None where it is not the same under all names of one tensor.

    ``torch.func.functional_call`` loses the parameters of a module that is in two places: it changes them twice, and puts back
    what it found the second time.
    """
    places: dict[int, list[str]] = {}  # of each tensor
    for path, part in module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            places.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
    known = {name: found for found in places.values() for name in found if name in tensors}
    once = {place: tensors[name] for name, found in known.items() for place in found}
    with _reparametrize_module(module, once):
        yield
    for name, found in known.items():
        now = {id(once[place]): once[place] for place in found}
        tensors[name] = now.popitem()[1] if len(now) == 1 else None


@contextlib.contextmanager
def around_packing(inside: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Enter ``inside()`` around each call of the pack hooks that are set now (``torch.autograd.graph.saved_tensors_hooks``) and
    of those set meanwhile: autograd calls them from within the operators, where a torch-function mode steps aside."""
    engine: Any = torch._C._autograd

    def push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        def packed(tensor: Tensor) -> Any:
            with inside():
                return pack(tensor)

        engine._push_saved_tensors_default_hooks(packed, unpack)

    now = engine._top_saved_tensors_default_hooks(True)
    with patched(torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda hooks: push(hooks.pack_hook, hooks.unpack_hook)):
        if now is not None:
            push(*now)
        try:
            yield
        finally:
            if now is not None:
                engine._pop_saved_tensors_default_hooks()


@contextlib.contextmanager
def called_back_here(wanted: Callable[[], bool]) -> Iterator[None]:
    """Where ``wanted()``, have what a thread asks to be done after a collective done by that thread, which waits for it. Else a
    thread of the collective's own does it. What the program completes by itself (``torch.futures.Future``) is not waited for."""
    future: Any = torch._C.Future

    def waiting(original: Any) -> Any:
        def add(self: Any, callback: Any) -> Any:
            if type(self) is future and wanted():
                with contextlib.suppress(Exception):  # the callback is the one to be told
                    self.wait()
            return original(self, callback)

        return add

    with patched(future, "then", waiting(future.then)), patched(future, "add_done_callback", waiting(future.add_done_callback)):
        yield


@contextlib.contextmanager
def before_fused(refuse: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``refuse(what, instead)`` before code runs in which PyTorch has fused operators, or may have by now: its kernels read
    and write tensors past the dispatcher. That is what Inductor has compiled, and TorchScript where a fuser is on."""

    def refusing(original: Any, *words: str, where: Callable[[Any, Any], bool] = lambda args, kwargs: True) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if where(args, kwargs):
                refuse(*words)
            return original(self, *args, **kwargs)

        return call

    compiled = "code compiled by Inductor", "have the forward in the block too, where it is not compiled"
    scripted = "TorchScript that PyTorch may fuse", "start the program with PYTORCH_JIT=0 to have it run as Python"
    with contextlib.ExitStack() as stack:
        inductor = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        if inductor is not None:  # else nothing has been compiled yet
            stack.enter_context(patched(inductor, "__call__", refusing(inductor.__call__, *compiled)))
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            stack.enter_context(patched(kind, "__call__", refusing(kind.__call__, *scripted, where=_may_be_fused)))
        yield


def _may_be_fused(*given: Any) -> bool:
    """Whether a fuser of TorchScript is on for what a function is given."""
    if torch._C._jit_llga_enabled():
        return True
    if not torch._C._jit_texpr_fuser_enabled():
        return False
    on_gpu = torch._C._jit_can_fuse_on_gpu() and any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(given))
    return on_gpu or torch._C._jit_can_fuse_on_cpu()


def is_active(mode: TorchDispatchMode) -> bool:
    """Whether a mode sees the operators of this thread."""
    return mode in _get_current_dispatch_mode_stack()


def refusal_to_capture() -> str | None:
    """Why no step can be captured now, where an active dispatch mode has an attribute ``refuses_capture`` that says so."""
    return next((mode.refuses_capture for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "refuses_capture")), None)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Give up the memory of a CUDA graph whose capture could not be ended; PyTorch would take it to be under way, and keep the
    memory for good. Nothing where the capture has ended."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it has ended
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
