"""Forward, loss and backward traced as one graph. [torch]"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import collect_metadata_analysis, graph_capture_wrappers
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
from torch.fx._symbolic_trace import _proxyable_classes
from torch.fx.experimental import proxy_tensor
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CachingTorchDispatchMode

from graphs.torch_private.kernels import eager_kernels
from graphs.torch_private.patching import patched
from graphs.torch_private.stand_ins import quiet_stand_ins


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
        stack.enter_context(eager_kernels())
        stack.enter_context(casts_kept())
        stack.enter_context(_generators_let_in())
        stack.enter_context(_unread_kept(is_kept))
        # Parameters that the forward changes would be cloned before, so that they are no leaves; nothing is written in the graph.
        stack.enter_context(patched(graph_capture_wrappers, "maybe_to_fresh_input", _not_cloned))
        stack.enter_context(quiet_stand_ins())
        # The tracer has autograd warn which call of the forward an error in the backward belongs to, beside the error.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Error detected in ")
        module = aot_export_joint_with_descriptors(stack, _Body(body, state), tuple(inputs)).graph_module
        traced()
    _drop_tokens(module.graph)
    _drop_tangents_of_changes(module.graph)
    sources = tuple(_source(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder"))
    results = tuple(_result(desc) for desc in module.graph.output_node().meta.pop("desc"))
    module.graph.set_codegen(CodeGen())
    return Joint(module, sources, results)


_fresh: Any = graph_capture_wrappers.maybe_to_fresh_input


def _not_cloned(index: int, argument: Any, metadata: Any) -> Any:
    known = metadata.input_info[index]
    return argument if known.mutates_data and not known.mutates_metadata else _fresh(index, argument, metadata)


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


def _drop_tangents_of_changes(graph: fx.Graph) -> None:
    """Give parameters that the forward changes the gradient that autograd gives a leaf, whose changes have none.

    The tracer takes their new content for a further result of the step: it has a tangent, which comes first in the sum that is
    the gradient.
    """
    output = graph.output_node()
    for tangent in graph.find_nodes(op="placeholder"):
        desc = tangent.meta["desc"]
        if not isinstance(desc, TangentAOTInput) or not isinstance(desc.output, InputMutationAOTOutput):
            continue
        for user in list(tangent.users):
            if user is output:  # nobody reads the parameter after the change
                entries = cast(Sequence[fx.Node | None], output.args[0])
                output.args = ([None if entry is tangent else entry for entry in entries],)
            elif user.target is torch.ops.aten.add.Tensor and len(user.all_input_nodes) == 2 and not user.kwargs:
                user.replace_all_uses_with(next(node for node in user.all_input_nodes if node is not tangent))
                graph.erase_node(user)
            else:
                raise NotImplementedError(f"the gradient of a parameter's change goes through {user.target}")
        graph.erase_node(tangent)


@contextlib.contextmanager
def selective_checkpoints_off() -> Iterator[None]:
    """Let selective checkpoints keep nothing on the side: a trace has everything, and a plan chooses what is kept."""

    def dispatch(mode: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    with patched(_CachingTorchDispatchMode, "__torch_dispatch__", dispatch):
        yield


@contextlib.contextmanager
def casts_kept() -> Iterator[None]:
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
