"""What torch.compile hands to a backend, compiled in two parts: forward and backward. [torch]"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, ParamAOTInput, PlainAOTInput
from torch._ops import OpOverload

from graphs.torch_private.joint import casts_kept
from graphs.torch_private.kernels import eager_kernels
from graphs.torch_private.names import FakeTensor, tree_leaves
from graphs.torch_private.patching import patched
from graphs.torch_private.tensors import storage_key

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
    from torch._functorch.partitioners import default_partition
    from torch._inductor import config as inductor

    def split(
        joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if "desc" not in joint.graph.output_node().meta:  # a region that is one op of the plan
            return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        return _split(joint, num_fwd_outputs, partition)

    def compile_one(graph: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        run = compiler(graph)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(writes_in_graph: bool) -> Any:
        return aot_autograd(
            fw_compiler=compile_one, bw_compiler=compile_one, partition_fn=split, keep_inference_input_mutations=writes_in_graph
        )

    _inline_regions(module)
    assigned = module.graph.find_nodes(op="call_function", target=torch.Tensor.set_)
    for node in assigned:
        node.target = _set
    if assigned:
        module.recompile()
    # The backward stays outside of the autocast region, as in a training loop.
    wanted: dict[str, Any] = {"backward_pass_autocast": "off"} if hasattr(config, "backward_pass_autocast") else {}
    # Beside a backward, checkpoints dissolve in a plan. Without one this would refuse to draw inside of them (torch 2.13).
    if hasattr(config, "remat_using_tags_for_fwd_loss_bwd_graph"):
        wanted["remat_using_tags_for_fwd_loss_bwd_graph"] = False
    if torch.__version__.startswith("2.12."):  # lays out gradients like their outputs, expanded ones too, where it cannot write
        wanted["guess_tangent_strides_as_outputs"] = False
    # Draws that nobody reads move the generator in eager execution; without the last one they are dead code.
    with eager_kernels(), casts_kept(), _nothing_donated(), config.patch(wanted), inductor.patch(fallback_random=True):
        compiled: Callable[..., Any]
        try:  # inputs are written in the graph, since ``tensor.data = ...`` can be nowhere else
            compiled = backend(True)(module, examples)
        except _OutputLost:
            compiled = backend(False)(module, examples)
    return compiled


def _inline_regions(module: fx.GraphModule) -> None:
    """Put the ops of regions (``torch.compiler.nested_compile_region``) in place of their calls: a plan is of ops. Regions that
    hold more than ops, such as branches, stay."""
    graph = module.graph
    calls = graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    for node in calls:
        name, _, *operands = cast(tuple[Any, ...], node.args)
        region = cast(fx.GraphModule, getattr(module, name.target))
        _inline_regions(region)
        if region.graph.find_nodes(op="get_attr"):
            continue
        inputs = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            outputs = cast(tuple[Any, ...], graph.graph_copy(region.graph, inputs))
        for user in list(node.users):  # ``operator.getitem``
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not name.users:
            graph.erase_node(name)
    if calls:
        module.recompile()


def _set(tensor: Tensor, content: Tensor) -> Tensor:
    """What ``tensor.data = content`` is traced as up to torch 2.13, but unseen by autograd, as that is. A leaf would lose the
    gradients of its uses before, and stand-ins are leaves (``casts_kept``)."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD):
        return tensor.set_(content)  # type: ignore[call-overload,no-any-return]


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def compile_fused(
    module: fx.GraphModule, examples: Sequence[Any], partition: Partition, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """``compile_partitioned`` with Inductor's operators, kernels and ``options``: both graphs are fused, and ordered anew."""
    from torch._functorch import config
    from torch._inductor import custom_graph_pass
    from torch._inductor.compile_fx import compile_fx

    _inline_regions(module)

    class Partitioner(custom_graph_pass.CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            _view_what_is_read(gm)
            _check_memories(gm)
            try:
                return _split(gm, options["num_fwd_outputs"], partition)
            except _OutputLost:
                raise NotImplementedError(
                    f"the traced graph returns an input that it writes to, which takes the place of another output; {_AS_EAGER}"
                ) from None

        def uuid(self) -> str:
            return __name__

        def __reduce__(self) -> tuple[Any, ...]:  # as a part of a cache's key
            return str, (self.uuid(),)

    # Forward and backward may come from Inductor's cache, which looks at their code. That of AOTAutograd looks at what they are
    # made from, where it cannot see that another plan is wanted.
    with config.patch(enable_autograd_cache=False):
        compiled = compile_fx(module, examples, config_patches={**options, "custom_partitioner_fn": Partitioner()})
    return cast(Callable[..., Any], compiled)


def put_after(module: fx.GraphModule, after: Mapping[fx.Node, fx.Node], in_memory: OpOverload[..., Any]) -> None:
    """Have Inductor run calls of a graph after others that stand before them.

    after      which after which
    in_memory  an operator that returns its argument, which gets memory by that: what Inductor computes wherever it is read would
               not wait
    """
    from torch._inductor import lowering
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    for key in DispatchKey.Autograd, DispatchKey.CompositeExplicitAutograd:
        if key not in control_deps.py_kernels:  # on torch 2.11 it cannot run, which Inductor has it do on stand-ins
            control_deps.py_impl(key)(_called)
    if in_memory not in lowering.lowerings:
        lowering.register_lowering(in_memory, type_promotion_kind=None)(_realized)
    waits: dict[fx.Node, fx.Node] = {}
    for node, other in after.items():
        waits[node] = other
        value = node.meta["val"]
        if isinstance(value, Tensor):
            with module.graph.inserting_after(node):
                held = module.graph.call_function(in_memory, (node,))
            held.meta = dict(node.meta)
            for user in [user for user in node.users if user is not held]:
                user.replace_input_with(node, held)
            waits[held] = other
    preserve_node_ordering(module.graph, {node: OrderedSet([other]) for node, other in waits.items()})
    module.recompile()


def _called(after: Any, call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def _realized(buffer: Any) -> Any:
    buffer.realize()
    return buffer


def inductor_options() -> frozenset[str]:
    """Names of the options that Inductor takes."""
    from torch._inductor import list_options

    return frozenset(list_options())


def passed_over() -> tuple[type[Exception], ...]:
    """What a backend may not raise where a graph must not run without it: Dynamo then runs that as it is, with a warning."""
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    return exceptions_allowed_to_be_fallback


def _split(joint: fx.GraphModule, forward_outputs: int, partition: Partition) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of what AOTAutograd has traced, each with its writes to inputs at its end."""
    _check_outputs(joint, forward_outputs)
    _tell_tangents_apart(joint)
    writes = _take_writes(joint, forward_outputs)
    early = [write for write in writes if not write.in_backward]
    late = [write for write in writes if write.in_backward]
    forward, backward = partition(joint, forward_outputs + len(early))
    _put_writes(forward, early, forward_outputs)
    _put_writes(backward, late, len(_entries(backward)) - 2 * len(late))
    return forward, backward


_AS_EAGER = "only with kernels of eager execution can it be planned"


def _view_what_is_read(joint: fx.GraphModule) -> None:
    """Have views lie where what they are views of lies.

    Inductor removes copies that it takes for needless, among them those of inputs that the graph writes to; views of them go on
    to say that they lie in the copy.
    """
    made_again: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.target is operator.getitem:
            elsewhere = node.args[0] in made_again
        else:
            lies_at = set(map(storage_key, _tensors(node)))
            is_view = isinstance(node.target, OpOverload) and any(_views(each) for each in node.target._schema.returns)
            given = {storage_key(tensor) for each in node.all_input_nodes for tensor in _tensors(each)}
            elsewhere = is_view and not lies_at <= given
        if elsewhere:
            _make_again(node)
            made_again.add(node)


def _views(returned: torch.Argument) -> bool:
    """Whether an operator's output lies in an input that it does not write to."""
    return returned.alias_info is not None and not returned.alias_info.is_write


def _tensors(node: fx.Node) -> list[Tensor]:
    return [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]


def _make_again(node: fx.Node) -> None:
    """Have a traced call make what it makes of what its arguments are now."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    with cast(FakeTensor, _tensors(node)[0]).fake_mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _check_memories(joint: fx.GraphModule) -> None:
    """Refuse inputs that are given the memory of other inputs, in which Inductor (up to torch 2.14) leaves wrong content."""
    inputs = {storage_key(node.meta["val"]) for node in joint.graph.find_nodes(op="placeholder") if _is_tensor(node)}
    for node in joint.graph.nodes:
        if node.target in _WRITES and node.target is not torch.ops.aten.copy_.default:
            content = node.args[1]
            if _is_tensor(content) and storage_key(content.meta["val"]) in inputs:
                raise NotImplementedError(f"the traced graph gives {node.args[0].name} the memory of another input; {_AS_EAGER}")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


class _OutputLost(Exception):
    """Something else is in the place of an output of a joint graph."""


def _check_outputs(joint: fx.GraphModule, forward_outputs: int) -> None:
    """Raise _OutputLost where an output is lost, which is a mistake of AOTAutograd's (all releases up to 2.13 have it).

    An output that is an input the graph writes to is put into the outputs as that input, at its place among what the function
    returns. But inputs that are written to behind the graph come first there, so it takes the place of another output.
    """
    descs = joint.graph.output_node().meta["desc"][:forward_outputs]
    if any(isinstance(desc, InputMutationAOTOutput) for desc in descs):
        written = {node.args[0] for node in joint.graph.nodes if node.target in _WRITES}
        if not written.isdisjoint(entry for entry in _entries(joint)[:forward_outputs] if isinstance(entry, fx.Node)):
            raise _OutputLost


def _tell_tangents_apart(joint: fx.GraphModule) -> None:
    """Give the gradients that come from outside memory of their own: that of an output which is a part of an input (``chunk``)
    is traced as a view of that input."""
    known: set[int] = set()
    views: set[fx.Node] = set()  # such gradients and views of them, which are made again, with the storages they had
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            if node.name.startswith("tangents") and storage_key(value) in known:
                with cast(FakeTensor, value).fake_mode, torch.no_grad():
                    node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                views.add(node)
            known.add(storage_key(value))
        elif node.op == "call_function" and not views.isdisjoint(node.all_input_nodes):
            made = _tensors(node)
            if made and all(storage_key(each) in known for each in made):
                _make_again(node)
                views.add(node)


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


def backward_is_traced_again() -> bool:
    """Whether the backward of what is compiled becomes part of another graph (compiled autograd), ordered anew."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


@contextlib.contextmanager
def activation_memory_budget(ratio: float) -> Iterator[None]:
    """What is compiled inside may save this share (0 to 1) of the activations: the compiler's own recomputation."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=ratio):
        yield
