"""A model, its loss and its inputs become one traced graph; the model stays as it is. [torch]"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from graphs.ctc import ctc_traced
from graphs.draws_in_place import draws_laid_out
from graphs.errors import CaptureError
from graphs.inputs import Arguments, Loss, check_tensor
from graphs.layouts import kernels_layouts
from graphs.leaks import Caches
from graphs.products import products_traced
from graphs.rewriting.nodes import calls_foreign
from graphs.rewriting.rewrites import read_sources_directly
from graphs.torch_private.joint import Joint, as_if_compiling, selective_checkpoints_off, trace_joint
from graphs.torch_private.names import (
    DATA_DEPENDENT,
    LOOKS_FOR_CAUSAL,
    OpOverload,
    TorchDispatchMode,
    TreeSpec,
    no_dispatch,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from graphs.torch_private.running import around_backwards, holding
from graphs.torch_private.stand_ins import to_fake
from graphs.variances import variances_checked_later
from graphs.watch import Watch, generators_kept, seeding_refused, written_elsewhere

aten = torch.ops.aten
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def state_of(model: nn.Module, loss: Loss | None, *, gradient_hooks: bool = False) -> dict[str, Tensor]:
    """Distinct parameters and buffers of a model under their first names. Raises CaptureError where they cannot be captured.

    gradient_hooks  whether parameters may have some
    """
    who = type(model).__name__
    for wrapper, inner in (
        (nn.DataParallel, "module"),
        (nn.parallel.DistributedDataParallel, "module"),
        (nn.Module, "_orig_mod"),
    ):
        if isinstance(model, wrapper) and hasattr(model, inner):  # the last are compiled modules
            raise CaptureError(f"{who} wraps another module; capture that one (.{inner})")
    for name, part in model.named_modules():
        if getattr(part, "runs_a_plan", False):
            raise CaptureError(f"{name or who} is a planned module; plan with the model that it was made of (.step.model)")
        if isinstance(part, torch.jit.ScriptModule):  # its calls change with how often it ran, and its dicts are none
            raise CaptureError(f"{name or who} is TorchScript, which cannot be captured; use the module that it was made of")
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(f"{name or who} has a backward hook, which a captured step would not call; remove it")
        if isinstance(part, _BATCH_NORMS) and part.momentum is None and part.training and part.track_running_stats:
            raise CaptureError(
                f"{name or who} averages its statistics over all steps so far (momentum=None), so that each step computes with "
                f"another number; give it a momentum"
            )
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in state.items():
        check_tensor(name, tensor)
        if not gradient_hooks and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise CaptureError(
                f"{name} has a gradient hook, which a captured step would not call; remove it (a planned module calls those that "
                f"are set once it is there)"
            )
    if not any(tensor.requires_grad for tensor in state.values()):
        raise CaptureError(f"no parameter of {who} requires a gradient, so there is nothing to train")
    if isinstance(loss, nn.Module):
        own = {id(tensor) for tensor in state.values()}
        if any(p.requires_grad and id(p) not in own for p in loss.parameters()):
            raise CaptureError(f"the loss {type(loss).__name__} has parameters of its own; make it a part of the model")
    return state


def device_of(model: nn.Module, state: Mapping[str, Tensor], device: torch.device | str | None) -> torch.device:
    """The one device the state is on. Raises CaptureError where there are several, or another one is asked for."""
    who = type(model).__name__
    try:
        asked = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise CaptureError(f"there is no device {device!r}; give 'cpu', 'cuda' or 'cuda:0'") from error
    if asked is not None and asked.type == "cuda" and not torch.cuda.is_available():
        raise CaptureError("no CUDA device is available; capture on cpu")
    homes = {tensor.device: name for name, tensor in state.items()}
    if len(homes) > 1:
        places = ", ".join(f"{name} on {home}" for home, name in homes.items())
        raise CaptureError(f"{who} is spread over several devices ({places}); move it to one")
    where = next(iter(homes))
    if asked is not None and (asked.type != where.type or asked.index not in (None, where.index)):
        raise CaptureError(f"{who} is on {where}, not on {asked}; move it there first: model.to({str(asked)!r})")
    return where


class Body(nn.Module):
    """Model and loss in one module, so that parameters of the model that the loss also reads are swapped with it.

    split  shares the inputs out between the two
    """

    def __init__(self, model: nn.Module, loss: Loss | None, split: Callable[[Any], Arguments]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.split = split

    def forward(self, inputs: Any) -> Tensor:
        given = self.split(inputs)
        output = self.model(*given.args, **given.kwargs)
        if self.loss is not None:
            return _scalar(
                self.loss(output, *given.targets, **given.named_targets),
                f"the loss {getattr(self.loss, '__name__', type(self.loss).__name__)}",
            )
        if isinstance(output, Mapping):
            output = output.get("loss", output)
        elif isinstance(output, tuple | list) and output:
            output = output[0]
        elif not isinstance(output, Tensor):
            output = getattr(output, "loss", output)
        return _scalar(output, type(self.model).__name__)


def _scalar(output: object, who: str) -> Tensor:
    """Check what should be a loss."""
    if not isinstance(output, Tensor):
        raise CaptureError(
            f"{who} returns a {type(output).__name__}, not a loss; give loss=, or the inputs (labels) it needs for one"
        )
    if output.numel() != 1:
        raise CaptureError(f"{who} returns a tensor of shape {tuple(output.shape)}, but a loss is one number; give loss=")
    if not output.is_floating_point():
        raise CaptureError(f"{who} returns a number of dtype {output.dtype}, which has no gradient")
    if not output.requires_grad:
        raise CaptureError(f"what {who} returns does not depend on any parameter that requires a gradient")
    return output


def region_of(autocast: torch.dtype | None, where: torch.device) -> torch.dtype | None:
    """Dtype of the autocast region to trace in: the one asked for, else that of the region around the caller, if any."""
    if autocast is None:
        return torch.get_autocast_dtype(where.type) if torch.is_autocast_enabled(where.type) else None
    if autocast not in (torch.bfloat16, torch.float16):
        raise CaptureError(f"autocast={autocast!r}: give torch.bfloat16 or torch.float16")
    return autocast


def trace(
    name: str,
    body: Body,
    state: Mapping[str, Tensor],
    leaves: list[Any],
    spec: TreeSpec,
    where: torch.device,
    autocast: torch.dtype | None,
) -> tuple[Joint, Watch]:
    """Trace forward, loss and backward of ``body`` on the inputs with these leaves; ``state`` is that of its model.

    Nothing is changed: not the model, whatever its forward assigns, and no generator; but for what any first call sets up (see
    ``graphs.watch``). Raises CaptureError.
    """
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    watch, caches = Watch(name, body), Caches(body)
    assigned: set[str] = set()  # buffers the forward gives other tensors; it may read the old ones, so these are kept apart
    held: dict[str, Tensor] = {}  # what the model holds during the latest call and its backward
    in_call = False
    here = threading.get_ident()
    constants: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def run(state_now: list[Tensor], tensors_now: list[Tensor]) -> Tensor:
        nonlocal held, in_call
        filled = list(leaves)
        for i, tensor in zip(slots, tensors_now, strict=True):
            filled[i] = tensor
        given = {f"model.{key}": tensor for key, tensor in zip(state, state_now, strict=True)}
        held = given
        passed = {key: tensor.clone() if key in assigned else tensor for key, tensor in given.items()}
        after = dict(passed)
        # The backward stays outside of the region, as it does in a training loop.
        region = contextlib.nullcontext() if autocast is None else torch.autocast(where.type, dtype=autocast)
        in_call = True
        try:
            with region, constants(), watch.call():
                loss = torch.func.functional_call(body, after, (tree_unflatten(filled, spec),))
        finally:
            in_call = False
        assert isinstance(loss, Tensor)
        for key in given:
            if after[key] is not passed[key]:
                _assigned(name, key.removeprefix("model."), given[key], after[key])
                assigned.add(key)
        return loss

    @contextlib.contextmanager
    def backward() -> Iterator[None]:
        """Around each pass of autograd: that of the step, in which hooks and functions of somebody's own find in the model what
        the forward found there, and others inside of it or of a forward."""
        nonlocal in_call
        if threading.get_ident() != here:  # somebody else trains meanwhile
            yield
            return
        gradients = {key: tensor.grad for key, tensor in held.items() if tensor.is_leaf}
        if in_call:
            yield
        else:
            in_call, now = True, dict(held)
            try:
                with watch.backward(), holding(body, now):
                    yield
            finally:
                in_call = False
            for key, tensor in held.items():
                if now[key] is not tensor:
                    raise CaptureError(written_late(name, key.removeprefix("model.")))
        for key, gradient in gradients.items():
            if held[key].is_leaf and held[key].grad is not gradient:
                raise CaptureError(
                    f"{name} calls backward in its forward or in a backward of its own, which adds to the gradient of "
                    f"{key.removeprefix('model.')} where a captured step would not see it; use torch.autograd.grad, and return "
                    f"what belongs to a parameter from the backward"
                )

    def attempt(known: bool = False) -> tuple[Joint, Watch]:
        nonlocal watch, constants
        watch = Watch(name, body)
        constants = _Constants if known else contextlib.nullcontext
        with (
            _plain_context(where),
            _untouched(watch, where),
            ctc_traced(),
            products_traced(),
            variances_checked_later(),
            kernels_layouts(),
            draws_laid_out(),
            selective_checkpoints_off(),
            around_backwards(backward),
            seeding_refused(name, where) as look_at_generators,
        ):
            fakes = to_fake([*state.values(), *(leaves[i].detach() for i in slots)])
            try:
                joint = trace_joint(run, fakes[: len(state)], fakes[len(state) :], look_at_generators, calls_foreign)
            except Exception as error:
                kept = watch.explain() if _reads_an_earlier_call(error) else None  # before its containers are put back
                caches.forget_traced()
                kept = kept or watch.explain()
                if kept is None or isinstance(error, CaptureError):
                    raise
                raise CaptureError(kept) from error
        watch.settle()
        if assigned:
            read_sources_directly(joint.module.graph)
        return joint, watch

    failed: Exception | None = None  # where it is not by the data
    try:
        with contextlib.suppress(*DATA_DEPENDENT):
            return attempt()
        with contextlib.suppress(*DATA_DEPENDENT):
            return attempt(known=True)
    except CaptureError:
        raise
    except Exception as error:
        failed = error
    try:
        # Libraries then leave out shortcuts for which they look at the data, and kernels whose fakes refuse what they take.
        with as_if_compiling():
            return attempt(known=True)
    except Exception as error:
        if failed is None and isinstance(error, CaptureError):
            raise
        failed = failed or error
    raise _refusal(name, failed) from failed


def _refusal(name: str, error: Exception) -> CaptureError:
    """What to say where a trace fails."""
    if any(frame.name == LOOKS_FOR_CAUSAL for frame in traceback.extract_tb(error.__traceback__)):
        return CaptureError(
            f"{name} gives a mask to PyTorch's transformer layers, which look into it to see whether it is causal"
            f"{_place(error)}; say so in that call (is_causal=, for the mask of a target tgt_is_causal=): True where it is, else "
            f"False"
        )
    if isinstance(error, DATA_DEPENDENT):
        if any(frame.filename.endswith("distributions/distribution.py") for frame in traceback.extract_tb(error.__traceback__)):
            remedy = (
                "give the distribution validate_args=False, so that it does not look at its arguments (StudentT and others hand "
                "this on to none they are made of: call torch.distributions.Distribution.set_default_validate_args(False))"
            )
        elif "aten.equal" in str(error) and "istft" in _place(error):
            remedy = "give istft a window that is made in the forward (torch.hann_window), since it checks what that sums up to"
        else:
            remedy = (
                "rewrite that part with torch.where or masks of fixed shape, or train without a plan, in a block of online.budget"
            )
        return CaptureError(
            f"{name} branches on data, or has shapes that depend on it ({_first_line(error)}{_place(error)}); {remedy}"
        )
    if isinstance(error, SyntaxError) and "aten.random.from(" in (error.text or ""):  # ``from`` is a keyword
        return CaptureError(f"{name} calls random_ with two bounds, which PyTorch's tracer cannot write down; call torch.randint")
    if "entirely functional graph" in str(error):
        return CaptureError(written_elsewhere(name))
    if "ViewBaseAOTInput" in str(error) or "non-differentiable view input mutations" in str(error):
        return CaptureError(
            f"{name} changes a tensor in its forward whose memory another buffer, parameter or input has too; give each its own"
        )
    if _reads_an_earlier_call(error):
        return CaptureError(
            f"{name} does not do the same in every call (it reads a tensor that an earlier call has made{_place(error)}), as a "
            f"captured step would; where the first call fills a cache, run the model once before"
        )
    targets = isinstance(error, TypeError) and "forward() takes" in str(error)
    remedy = "; where the last inputs are targets, give the loss that takes them as loss=" if targets else ""
    return CaptureError(f"{name} cannot be traced: {told(error)}{remedy}")


def _reads_an_earlier_call(error: Exception) -> bool:
    """Whether a call reads a tensor that an earlier one has made. From torch 2.13 on it can, and the calls are seen to differ."""
    return "in tensor_tracker" in str(error)


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes beside the trace what depends on no input, such as positions, so that a model may branch on it."""

    supports_higher_order_operators = True
    LIMIT = 1 << 20  # elements; larger tensors are no counters or masks to ask about

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten.lift_fresh.default:  # a literal tensor
            result = func(*args, **kwargs)
            self._real[result] = read[0]
            return result
        known = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded not in func.tags
        known = known and all(tensor in self._real for tensor in read)
        if known and func is aten._local_scalar_dense.default:
            with no_dispatch():
                return self._real[read[0]].item()
        if known and func is aten.equal.default:  # as istft compares what its window sums up to
            with no_dispatch():
                return torch.equal(*(self._real[tensor] for tensor in read))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if known and all(tensor.numel() <= self.LIMIT for tensor in made):
            args, kwargs = tree_map_only(Tensor, self._real.__getitem__, (args, kwargs))
            with no_dispatch(), torch.no_grad():
                real = tree_leaves(func(*args, **kwargs))
            self._real.update(zip(made, (leaf for leaf in real if isinstance(leaf, Tensor)), strict=True))
        elif isinstance(func, OpOverload) and func._schema.is_mutable and any(tensor in self._real for tensor in read):
            self._real.clear()  # something known was written to, and who shares its memory is not recorded
        return result


def told(error: Exception) -> str:
    """An error of somebody else's code, in one line: what it is, and where it comes from."""
    return f"{type(error).__name__}: {_first_line(error)}{_place(error)}"


def _place(error: Exception) -> str:
    """Where in the model or its libraries an error comes from, for a message."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*ours, "<frozen")):  # the last are imports
            return f", at {frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}: {frame.line}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _assigned(name: str, key: str, before: Tensor, after: object) -> None:
    """A forward that assigns a buffer anew means the same as one that writes into it."""
    same = isinstance(after, Tensor) and (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device)
    if isinstance(before, nn.Parameter) or not same or not isinstance(after, Tensor):
        raise CaptureError(f"{name} replaces {key} in its forward by something else; write into it in place")
    with torch.no_grad():
        before.copy_(after)


def written_late(name: str, what: str) -> str:
    """What to say where a backward writes to what a step has from before it."""
    return (
        f"{name} changes {what} in its backward (in a hook or a function of its own), and a captured step changes buffers in its "
        f"forward only; change it there, or outside of the step"
    )


@contextlib.contextmanager
def _plain_context(where: torch.device) -> Iterator[None]:
    """Gradients on, autocast off."""
    ambient = torch.is_autocast_enabled(where.type)
    torch.set_autocast_enabled(where.type, False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_enabled(where.type, ambient)


@contextlib.contextmanager
def _untouched(watch: Watch, where: torch.device) -> Iterator[None]:
    """Undo what a traced forward leaves behind: attributes of modules, and draws from the random generators."""
    with generators_kept(), torch.random.fork_rng([where] if where.type == "cuda" else []):
        try:
            yield
        finally:
            watch.undo()
