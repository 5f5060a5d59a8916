"""What FX nodes and operators are: their tensors, draws, effects. [torch]"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphs.torch_private.names import OpOverload, is_operator, tree_leaves
from graphs.torch_private.tensors import storage_key


def tensors_of(node: fx.Node) -> list[Tensor]:
    """All (fake) tensors a node holds."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """Which storages the tensors of some nodes lie in."""
    return {storage_key(tensor) for node in nodes for tensor in tensors_of(node)}


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The entries of the output node."""
    return list(cast(Sequence[fx.Node], graph.output_node().args[0]))


def attribute(node: fx.Node) -> Any:
    """What a ``get_attr`` node stands for."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """What a call of a higher-order operator is given to run; none for others."""
    return [each for n in node.all_input_nodes if n.op == "get_attr" and isinstance(each := attribute(n), fx.GraphModule)]


def calls_in(module: fx.GraphModule) -> list[fx.Node]:
    """Its calls of functions, in order."""
    return [node for node in module.graph.nodes if node.op == "call_function"]


# Their offset is one into the storage, wherever what they are given begins.
_OFFSET_ARGUMENT = {torch.ops.aten.as_strided.default: 3, torch.ops.aten.as_strided_scatter.default: 4}


def offset_named(node: fx.Node) -> Any:
    """Where in the storage a call of ``as_strided`` or its scatter begins, if it says so; None for others."""
    at = _OFFSET_ARGUMENT.get(cast(Any, node.target))
    return None if at is None else (node.args[at:] or (node.kwargs.get("storage_offset"),))[0]


def leave_out_offset(node: fx.Node) -> None:
    """Have a call of ``as_strided`` or its scatter begin where what it is given does."""
    node.args = node.args[: _OFFSET_ARGUMENT[cast(Any, node.target)]]
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "storage_offset"}


def read_by_place(graph: fx.Graph) -> list[int]:
    """The indices of placeholders in whose storages something is read from a given place on, wherever they begin themselves."""
    strided = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    storages = storages_of(node for node in strided if offset_named(node) is not None)
    placeholders = graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(placeholders) if any(storage_key(t) in storages for t in tensors_of(node))]


def is_random(node: fx.Node) -> bool:
    """Whether a call may draw random numbers; a call of a higher-order operator does where its subgraph does."""
    if calls_foreign(node):
        return bool(tensors_of(node))  # else it acts on the outside world, and runs once
    if not isinstance(node.target, OpOverload):
        return any(is_random(call) for sub in subgraphs_of(node) for call in calls_in(sub))
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":  # attention carries the tag even where nothing is dropped
            given = node.args[i] if len(node.args) > i else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def calls_foreign(call: fx.Node) -> bool:
    """Whether the operator of a call is foreign, or one that a higher-order operator is given: what writes to its arguments is
    called so."""
    return any(isinstance(each, OpOverload) and is_foreign(each) for each in (call.target, *call.args))


def is_foreign(operator: OpOverload) -> bool:
    """Whether an operator is none of PyTorch's own nor of ours: it may draw, on the host as well, or act on the outside
    world without a tag that says so (``custom_op`` sets none)."""
    return operator.namespace not in ("aten", "prims", "belady")


def reads_seed_on_host(operator: OpOverload) -> bool:
    """Whether an operator reads seed and offset on the host, outside of CUDA graphs, although fakes have them on the device, an
    address of which would end the process: the backward of memory-efficient attention."""
    return operator._schema.name.endswith("_efficient_attention_backward")


def running_statistics(operator: OpOverload) -> tuple[int, ...]:
    """Where running statistics stand among the arguments of an operator; most schemas do not say where they are written to."""
    names = [argument.name for argument in operator._schema.arguments]
    return tuple(names.index(name) for name in ("running_mean", "running_var") if name in names)


def is_effect(node: fx.Node) -> bool:
    """Whether a call acts on the outside world: known to the tracer to do so, or an operator that returns no tensor."""
    return bool(node.meta.get("effect")) or (is_operator(node.target) and not tensors_of(node))
