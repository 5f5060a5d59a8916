"""Every private torch name the project uses, behind names of our own: what may change between releases changes here. [torch]"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
import torch._decomp  # registers the replacements that _eager_kernels takes away
from torch import Tensor, UntypedStorage, fx, nn
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import _proxyable_classes
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import CodeGen, _BoxedCodeGen
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.checkpoint import _CachingTorchDispatchMode

from graphs.patching import patched

__all__ = [
    "DATA_DEPENDENT",
    "LOOKS_FOR_CAUSAL",
    "ONE_TRACE_AT_A_TIME",
    "REPLACES_IN_PLACE",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "Joint",
    "OpOverload",
    "SameTensors",
    "TorchDispatchMode",
    "TreeSpec",
    "activation_memory_budget",
    "around_backwards",
    "around_packing",
    "as_if_compiling",
    "changed_inputs",
    "compile_partitioned",
    "copy_all",
    "current_stream",
    "end_failed_capture",
    "holding",
    "in_backward",
    "in_forward_mode",
    "in_no_tensor",
    "is_active",
    "is_functorch_wrapped",
    "is_operator",
    "is_traceable_wrapper_subclass",
    "is_unwatched",
    "is_zero_stand_in",
    "kept_from_compiler",
    "keystr",
    "negated_view",
    "no_dispatch",
    "onednn_as",
    "onednn_enabled",
    "parameter_inputs",
    "quiet_stand_ins",
    "really",
    "replace_content",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "selective_checkpoints_off",
    "stand_ins_by",
    "storage_bytes",
    "storage_key",
    "takes_cudnn_batch_norm",
    "to_fake",
    "trace_joint",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unwrapped",
    "without_autocast",
    "without_torch_function",
]

BoxedCodeGen = _BoxedCodeGen  # forward(list): takes its inputs out of the list, so that they too can be freed

# What tracing raises where a shape or a branch depends on the content of a tensor.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


LOOKS_FOR_CAUSAL = "_detect_is_causal_mask"  # the function of nn.Transformer and its parts that compares a mask with a causal one


# A trace changes what all threads use, attributes of torch among it, so that of another thread waits. The lock is the compiler's
# own, which holds it when it calls a backend and takes it for parts of some traces (torch.cond): a second lock could tie a knot.
ONE_TRACE_AT_A_TIME = compile_lock


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor, fake ones included; valid as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> range:
    """Addresses from the first to the last element of a tensor; none for one without data."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return range(0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage of a tensor."""
    return tensor.untyped_storage().nbytes()


def in_no_tensor(storage: UntypedStorage) -> bool:
    """Whether no tensor lies in a storage any more."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1  # what Python has of it


class SameTensors:
    """Whether tensors are like those remembered: class, shape, strides, dtype, device, ``requires_grad``. One call for all.

    A false alarm is possible (under a dispatch mode, say), so what differs is for others to find out.
    """

    def __init__(self) -> None:
        self._guards: Any = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """From now on these; they are not kept alive."""
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def match(self, tensors: Sequence[object]) -> bool:
        """Whether as many tensors, in the same order, are like those remembered."""
        return self._guards is not None and bool(self._guards.check(*tensors))


def copy_all(targets: list[Tensor], contents: list[Tensor]) -> None:
    """``target.copy_(content)`` for each pair; none may overlap another."""
    torch._foreach_copy_(targets, contents)


def to_fake(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Stand-ins without data, all of one fake mode (that of the tensors, where they are fake already); static shapes."""
    tensors = list(tensors)
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)  # real constants of the model are let in
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]


REPLACES_IN_PLACE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # from torch 2.12 on


def replace_content(storage: UntypedStorage, content: UntypedStorage) -> None:
    """Give an empty storage the memory of another one, which is empty afterwards. All tensors on it see the content.

    Before torch 2.12 the content is copied, and both are in memory for a moment (not ``REPLACES_IN_PLACE``).
    """
    if REPLACES_IN_PLACE:
        storage._swap_data_ptr_(content)  # type: ignore[attr-defined]  # missing in torch's own stubs
    else:
        storage.resize_(content.nbytes())
        storage.copy_(content)
        content.resize_(0)


def kept_from_compiler(function: FunctionType) -> bool:
    """Have the compiler leave a function alone, and whatever it calls, at no cost to its calls. Whether that could be done."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # it came with torch 2.7
        return False
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return True


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
def holding(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Have a module hold other parameters and buffers for a while, as ``torch.func.functional_call`` does for one call. What is
    assigned in their place meanwhile is in ``tensors`` afterwards."""
    with _reparametrize_module(module, tensors, tie_weights=True):
        yield


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


def is_active(mode: TorchDispatchMode) -> bool:
    """Whether a mode sees the operators of this thread."""
    return mode in _get_current_dispatch_mode_stack()


def refusal_to_capture() -> str | None:
    """Why no step can be captured now, where an active dispatch mode has an attribute ``refuses_capture`` that says so."""
    return next((mode.refuses_capture for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "refuses_capture")), None)


def takes_cudnn_batch_norm(
    data: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float
) -> bool:
    """Whether eager execution gives these (fake) tensors to cuDNN's batch norm, in training."""
    if data.device.type != "cuda" or weight is None or bias is None:
        return False
    backend: Any = torch._C._select_batch_norm_backend(data, weight, bias, mean, var, True, eps)
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Run operators as eager execution does, on real tensors, while a compiler traces: it has stand-ins made by then, and looks
    for replacements at each call."""
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():
        yield


without_autocast = torch._C._DisableAutocast  # a context: operators run in the types they are given


without_torch_function = torch._C.DisableTorchFunction  # a context: torch-function modes and subclasses see nothing


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for another one inside of ``torch.func.grad``, ``vmap`` and the like; it has no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """What a tensor stands for inside of ``torch.func.grad``, ``vmap`` and the like; itself elsewhere."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def in_forward_mode() -> bool:
    """Whether there may be tensors with tangents (``torch.autograd.forward_ad``)."""
    return forward_ad._current_level >= 0


def negated_view(tensor: Tensor) -> Tensor:
    """A view that reads as the negative: what ``imag`` of a conjugate view is."""
    return torch._neg_view(tensor)


def is_zero_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor stands for zeros without having any memory, as forward-mode derivatives do."""
    return tensor._is_zerotensor()


def is_operator(target: object) -> bool:
    """Whether an FX call target is a torch operator, a higher-order one included (and not a Python function)."""
    return isinstance(target, OpOverload | HigherOrderOperator)


@dataclass(frozen=True, slots=True)
class Joint:
    """Forward, loss and backward as one flat functional graph.

    module   the graph, with the plain calling convention: one argument a placeholder, one flat list of outputs. Nodes that act
             on the outside world although they return a tensor have ``meta["effect"]``; those of the backward have
             ``meta["partitioner_tag"] == "is_backward"``
    sources  for each placeholder: ("state", i), ("input", i) or ("tangent", 0)
    results  for each output: ("loss", 0), ("gradient", i) of state i, ("state", i) or ("input", i): its new content, or
             None where there is nothing
    """

    module: fx.GraphModule
    sources: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int] | None, ...]


class _Body(nn.Module):
    """Gives the tracer a module whose parameters and buffers are exactly ``state``, each once."""

    def __init__(self, body: Callable[[list[Tensor], list[Tensor]], Tensor], state: Sequence[Tensor]) -> None:
        super().__init__()
        self.body = body
        self.names = [f"state{i}" for i in range(len(state))]
        for name, tensor in zip(self.names, state, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body([getattr(self, name) for name in self.names], list(inputs))


def trace_joint(
    body: Callable[[list[Tensor], list[Tensor]], Tensor],
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    traced: Callable[[], None],
    is_kept: Callable[[fx.Node], bool],
) -> Joint:
    """Trace ``loss = body(state, inputs)`` and its gradients, without decompositions and without running a kernel.

    state    fake parameters and buffers, all distinct; gradients are those of the parameters that require one
    inputs   fake tensors
    traced   called when all is traced, before the tracer puts the generators back
    is_kept  which calls stay though nobody reads them, beside those that PyTorch knows to draw or to act

    Raises whatever ``body`` and the tracer raise.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_eager_kernels())
        stack.enter_context(_casts_kept())
        stack.enter_context(_generators_let_in())
        stack.enter_context(_unread_kept(is_kept))
        # Recurrent layers are traced as their cells: the fused oneDNN layer does not tell how much memory it takes.
        stack.enter_context(onednn_as(False))
        stack.enter_context(_quiet("torch._subclasses.fake_tensor"))
        # The tracer has autograd warn which call of the forward an error in the backward belongs to, beside the error.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Error detected in ")
        module = aot_export_joint_with_descriptors(stack, _Body(body, state), tuple(inputs)).graph_module
        traced()
    _drop_tokens(module.graph)
    sources = tuple(_source(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder"))
    results = tuple(_result(desc) for desc in module.graph.output_node().meta.pop("desc"))
    module.graph.set_codegen(CodeGen())
    return Joint(module, sources, results)


Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


def compile_partitioned(
    module: fx.GraphModule,
    examples: Sequence[Any],
    partition: Partition,
    compiler: Callable[[fx.GraphModule], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile what torch.compile hands to a backend, with the kernels of eager execution.

    partition  (functional joint graph, number of outputs of its forward) -> forward and backward graph. Placeholders of the
               joint graph are named ``primals_...`` and ``tangents_...``. The forward takes all primals and returns its
               outputs, then what is saved; the backward takes what is saved, then all tangents
    compiler   makes a function that takes the list of its inputs and empties it out of a graph without gradients
    """
    from torch._dynamo.backends.common import aot_autograd  # here, since importing the compiler takes seconds
    from torch._functorch import config
    from torch._inductor import config as inductor

    def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        writes = _take_writes(joint, num_fwd_outputs)
        early = [write for write in writes if not write.in_backward]
        late = [write for write in writes if write.in_backward]
        forward, backward = partition(joint, num_fwd_outputs + len(early))
        _put_writes(forward, early, num_fwd_outputs)
        _put_writes(backward, late, len(_entries(backward)) - 2 * len(late))
        return forward, backward

    def compile_one(graph: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        run = compiler(graph)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    # Inputs are written in the graph, since ``tensor.data = ...`` can be nowhere else.
    backend = aot_autograd(
        fw_compiler=compile_one, bw_compiler=compile_one, partition_fn=split, keep_inference_input_mutations=True
    )
    # The backward stays outside of the autocast region, as in a training loop.
    wanted: dict[str, Any] = {"backward_pass_autocast": "off"} if hasattr(config, "backward_pass_autocast") else {}
    if torch.__version__.startswith("2.12."):  # lays out gradients like their outputs, expanded ones too, where it cannot write
        wanted["guess_tangent_strides_as_outputs"] = False
    # Draws that nobody reads move the generator in eager execution; without the last one they are dead code.
    with _eager_kernels(), _casts_kept(), _nothing_donated(), config.patch(wanted), inductor.patch(fallback_random=True):
        compiled: Callable[..., Any] = backend(module, examples)
    return compiled


@contextlib.contextmanager
def _nothing_donated() -> Iterator[None]:
    """Let a backward run twice (``retain_graph``): none of ours overwrites what is saved.

    The compiler refuses that where it has found tensors a backward might overwrite, and also where it was told not to look.
    """
    from torch._functorch._aot_autograd import graph_compile

    with patched(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_, **__: []):
        yield


def _entries(module: fx.GraphModule) -> list[Any]:
    """Of the output node."""
    return [*cast(Sequence[Any], module.graph.output_node().args[0])]


@dataclass(frozen=True, slots=True)
class _Write:
    """An input that gets new content by ``target(input, content)``.

    source  name of its placeholder
    """

    source: str
    target: OpOverload[..., Any]
    in_backward: bool


_WRITES = {torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor}  # target(input, content)
if hasattr(torch.ops.aten, "shallow_copy_data_"):  # what ``tensor.data = ...`` becomes from torch 2.14 on
    _WRITES.add(torch.ops.aten.shallow_copy_data_.default)
_UNDECLARED = {torch.ops.inductor.resize_storage_bytes_.default}  # writes, though the schema does not say so


def _take_writes(joint: fx.GraphModule, forward_outputs: int) -> list[_Write]:
    """Turn the writes to inputs, which stand behind all that is computed, into outputs: the new content as a last output of the
    forward, or as one of the backward with the input itself behind it, which the backward needs for that."""
    graph = joint.graph
    output = graph.output_node()
    entries, descs = _entries(joint), [*output.meta["desc"]]
    writes: list[_Write] = []
    early: list[tuple[Any, Any]] = []
    late: list[Any] = []
    for node in list(graph.nodes):
        if node.target not in _WRITES:
            if isinstance(node.target, OpOverload) and (node.target._schema.is_mutable or node.target in _UNDECLARED):
                raise NotImplementedError(f"the traced graph changes a tensor by {node.target}")
            continue
        source, content = node.args
        in_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        writes.append(_Write(source.name, node.target, in_backward))
        if in_backward:
            late += [content, source]
        else:
            early.append((content, InputMutationAOTOutput(mutated_input=source.meta["desc"])))
        graph.erase_node(node)
    entries[forward_outputs:forward_outputs] = [content for content, _ in early]
    descs[forward_outputs:forward_outputs] = [desc for _, desc in early]
    output.args = ([*entries, *late],)
    output.meta["desc"] = [*descs, *(None for _ in late)]
    return writes


def _put_writes(module: fx.GraphModule, writes: Sequence[_Write], at: int) -> None:
    """Write to the inputs again, at the end of a graph, with the outputs from number ``at`` on; those are none afterwards."""
    if not writes:
        return
    output = module.graph.output_node()
    entries = _entries(module)
    in_backward = writes[0].in_backward
    count = (1 + in_backward) * len(writes)
    contents = entries[at : at + count : 1 + in_backward]
    sources = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    with module.graph.inserting_before(output):
        # An input that takes the memory of another one may do so after that one has been given other memory: views keep it.
        contents = [
            module.graph.call_function(torch.ops.aten.detach.default, (content,)) if content.op == "placeholder" else content
            for content in contents
        ]
        for write, content in zip(writes, contents, strict=True):
            node = module.graph.call_function(write.target, (sources[write.source], content))
            node.meta["val"] = sources[write.source].meta["val"]
    output.args = ([*entries[:at], *entries[at + count :]],)
    module.recompile()


def changed_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Placeholders of a graph for ``compile_partitioned`` that get new content, from outputs of the forward, after it."""
    descs = joint.graph.output_node().meta.get("desc", ())
    changed = [desc.mutated_input for desc in descs if isinstance(desc, InputMutationAOTOutput)]
    return [node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed]


def parameter_inputs(joint: fx.GraphModule, examples: Sequence[Any]) -> list[fx.Node]:
    """Placeholders of a graph for ``compile_partitioned`` that are parameters, or other leaves that require a gradient."""

    def is_parameter(desc: object) -> bool:
        example = examples[desc.idx] if isinstance(desc, PlainAOTInput) else None
        if isinstance(example, Tensor):
            return isinstance(example, nn.Parameter) or (example.is_leaf and example.requires_grad)
        return isinstance(desc, ParamAOTInput)

    return [node for node in joint.graph.find_nodes(op="placeholder") if is_parameter(node.meta.get("desc"))]


def is_unwatched(node: fx.Node) -> bool:
    """Whether what a node holds, of a graph for ``compile_partitioned``, may change between forward and backward: a custom
    backward takes it from an attribute instead of the tensors that autograd saves. Such tensors come last among those saved."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _source(desc: Any) -> tuple[str, int]:
    if isinstance(desc, ParamAOTInput | BufferAOTInput):
        return "state", int(desc.target.removeprefix("state"))
    if isinstance(desc, PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, TangentAOTInput):
        return "tangent", 0
    raise NotImplementedError(f"the traced graph has an input of the kind {type(desc).__name__}")


def _result(desc: Any) -> tuple[str, int] | None:
    if desc is None or _is_token(desc):
        return None
    if isinstance(desc, PlainAOTOutput):
        return "loss", 0
    if isinstance(desc, GradAOTOutput):
        return "gradient", _source(desc.grad_of)[1]
    if isinstance(desc, InputMutationAOTOutput):
        return _source(desc.mutated_input)
    raise NotImplementedError(f"the traced graph has an output of the kind {type(desc).__name__}")


def _is_token(desc: object) -> bool:
    return "Token" in type(desc).__name__


def _drop_tokens(graph: fx.Graph) -> None:
    """Turn operators with effects, which tokens keep in order, into plain calls: the order of a graph is its list."""
    for node in graph.find_nodes(op="call_function", target=with_effects):
        token, target, *args = node.args
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), node.kwargs)
        returned = node.meta["val"][1:]
        call.meta = {**node.meta, "val": returned[0] if len(returned) == 1 else returned, "effect": True}
        for item in list(node.users):
            index = item.args[1]
            if index and len(returned) > 1:
                item.args = (call, index - 1)
                continue
            item.replace_all_uses_with(call if index else token)
            graph.erase_node(item)
        graph.erase_node(node)
    tokens = [node for node in graph.find_nodes(op="placeholder") if _is_token(node.meta["desc"])]
    output = graph.output_node()
    entries = cast(Sequence[fx.Node | None], output.args[0])
    output.args = ([None if node in tokens else node for node in entries],)
    for node in tokens:
        graph.erase_node(node)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true. Checks of data that libraries then leave to the compiler
    (``torch._check_tensor_all``) become operators, which check at run time."""

    def check_when_run(error: type[Exception], condition: Tensor, message: Callable[[], object] | None = None) -> None:
        torch._assert_async(condition.all(), "a check of data failed" if message is None else str(message()))

    with patched(torch.compiler, "_is_compiling_flag", True), patched(torch, "_check_tensor_all_with", check_when_run):
        yield


@contextlib.contextmanager
def selective_checkpoints_off() -> Iterator[None]:
    """Let selective checkpoints keep nothing on the side: a trace has everything, and a plan chooses what is kept."""

    def dispatch(mode: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    with patched(_CachingTorchDispatchMode, "__torch_dispatch__", dispatch):
        yield


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep back what a logger of torch writes beside the exception it raises."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def quiet_stand_ins() -> Iterator[None]:
    """Keep back what fake tensors log where an operator cannot run on them."""
    with _quiet("torch._subclasses.fake_tensor"):
        yield


@contextlib.contextmanager
def calls_replaced(call: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Have what is traced inside run ``call(operator, args, kwargs)`` in place of an operator call, where that returns a function
    without arguments, before the tracer makes writes into results."""
    original: Any = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = call(func, args, kwargs or {})
        if instead is None:
            return original(mode, func, types, args, kwargs)
        with mode:
            return instead()

    with patched(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


@contextlib.contextmanager
def stand_ins_by(call: Callable[[FakeTensorMode, Any, Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have ``call(mode, operator, args, kwargs, plain)`` return what calls on fake tensors give; ``plain()`` does without it.

    It does not see the calls that a stand-in makes in turn, nor those it makes itself.
    """
    original: Any = FakeTensorMode.__torch_dispatch__
    inside = False

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal inside
        plain = functools.partial(original, mode, func, types, args, kwargs or {})
        if inside:
            return plain()
        inside = True
        try:
            return call(mode, func, args, kwargs or {}, plain)
        finally:
            inside = False

    with patched(FakeTensorMode, "__torch_dispatch__", dispatch):
        yield


def onednn_enabled() -> bool:
    """Whether kernels of oneDNN are taken."""
    return torch._C._get_mkldnn_enabled()


@contextlib.contextmanager
def onednn_as(enabled: bool) -> Iterator[None]:
    """Take kernels of oneDNN, or none."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


_AUTOGRAD_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager execution runs.

    For about forty operators (dropout, upsampling, recurrent layers, one_hot) the tracer has replacements in Python, which differ
    from eager in rounding and in memory. They are taken away while the trace lasts. Those of batch norm stay: they are what makes
    its running statistics outputs of the graph.
    """
    taken: list[tuple[OpOverload[..., Any], Any, Any]] = []
    try:
        for op in _replaced_operators():
            taken += [(op, key, op.py_kernels.pop(key)) for key in _AUTOGRAD_KEYS if key in op.py_kernels]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def differentiated_by(functions: Mapping[OpOverload[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Have these functions, which autograd can differentiate, traced in place of operators."""
    key = torch._C.DispatchKey.Autograd
    _replaced_operators()  # which these are none of
    before = {op: op.py_kernels.get(key) for op in functions}
    try:
        for op, function in functions.items():
            op.py_kernels[key] = function
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernel in before.items():
            if kernel is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def below_autograd() -> contextlib.AbstractContextManager[object]:
    """Call operators themselves, past autograd, inside."""
    return torch._C._AutoDispatchBelowAutograd()


def with_autograd() -> contextlib.AbstractContextManager[object]:
    """Differentiate what is called inside, within operators too, which are called past autograd."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set().add(keys.ADInplaceOrView), excluded)


@functools.cache
def _replaced_operators() -> tuple[OpOverload[..., Any], ...]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "batch_norm" not in name)
    overloads = (getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in cast(Any, p).overloads())
    return tuple(op for op in overloads if any(key in op.py_kernels for key in _AUTOGRAD_KEYS))


@contextlib.contextmanager
def _casts_kept() -> Iterator[None]:
    """Let regions of autocast keep their casts of parameters, as in eager execution, which adds up the gradients of all uses of a
    cast before it casts them back.

    The tracer turns that off. It is also for leaves of autograd only, and the tracer's stand-ins of leaves have a history.
    """
    mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]

    def mirror_leaf(tensor: Tensor, stand_in: Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf:
            stand_in.requires_grad_()
        else:
            mirror(tensor, stand_in)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch, "_mirror_autograd_meta_to", mirror_leaf))
        for owner in (proxy_tensor, collect_metadata_analysis):
            if hasattr(owner, "disable_autocast_cache"):
                stack.enter_context(patched(owner, "disable_autocast_cache", contextlib.nullcontext))
        yield


@contextlib.contextmanager
def _unread_kept(is_kept: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Have these calls left alone where what nobody reads is taken out of a graph."""
    original: Any = fx.Node.is_impure

    def is_impure(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
        return bool(original(node, *args, **kwargs)) or (node.op == "call_function" and is_kept(node))

    with patched(fx.Node, "is_impure", is_impure):
        yield


@contextlib.contextmanager
def _generators_let_in() -> Iterator[None]:
    """Let calls be traced that draw from a generator they are given: before torch 2.13 a tracer has no place for one."""
    before = dict(_proxyable_classes)
    _proxyable_classes[torch.Generator] = None  # becomes an attribute of the graph
    try:
        yield
    finally:
        _proxyable_classes.clear()
        _proxyable_classes.update(before)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Give up the memory of a CUDA graph whose capture could not be ended; PyTorch would take it to be under way, and keep the
    memory for good. Nothing where the capture has ended."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it has ended
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


@contextlib.contextmanager
def activation_memory_budget(ratio: float) -> Iterator[None]:
    """What is compiled inside may save this share (0 to 1) of the activations: the compiler's own recomputation."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=ratio):
        yield
