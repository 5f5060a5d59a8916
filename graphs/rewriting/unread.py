"""What an operator of the backward is given but does not read is not kept for it. [torch]

Autograd saves what it hands to a kernel, also where the kernel looks at no more than its layout: the input of a batch norm in
evaluation or of a convolution, where the weight is frozen, and what is pooled or padded. (Bhatia and Dangel, *Lowering PyTorch's
Memory Consumption for Selective Differentiation*, 2024, do so with layers of their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphs.rewriting.nodes import storages_of, tensors_of
from graphs.rewriting.rewrites import backward_call, remove_dead
from graphs.torch_private.names import OpOverload, tree_leaves
from graphs.torch_private.tensors import extent, storage_key

aten = torch.ops.aten

BACKWARD = "is_backward", "must_be_in_backward"  # how the tracer tags its nodes
GRADIENT, DATA = 0, 1  # where these stand among the arguments of all of these


def _frozen_weight(args: tuple[Any, ...]) -> bool:
    """The gradient of a convolution's input takes its weight alone. (What oneDNN makes of the data beside the gradient of a bias
    is thrown away.)"""
    return not args[10][1]


def _constant_scale(args: tuple[Any, ...]) -> bool:
    """A batch norm by running statistics multiplies by constants, if its weight is frozen."""
    return not args[7] and not args[9][1]


def _always(args: tuple[Any, ...]) -> bool:
    return True


# Operators, and whether by its arguments one does not read its data.
UNREAD: dict[OpOverload[..., Any], Callable[[tuple[Any, ...]], bool]] = {
    aten.convolution_backward.default: _frozen_weight,
    aten.native_batch_norm_backward.default: _constant_scale,
    aten.avg_pool2d_backward.default: _always,
    aten.avg_pool3d_backward.default: _always,
    aten._adaptive_avg_pool2d_backward.default: _always,
    aten._adaptive_avg_pool3d_backward.default: _always,
    aten.max_pool2d_with_indices_backward.default: _always,
    aten.max_pool3d_with_indices_backward.default: _always,
    aten.adaptive_max_pool2d_backward.default: _always,
    aten.adaptive_max_pool3d_backward.default: _always,
    aten.reflection_pad1d_backward.default: _always,
    aten.reflection_pad2d_backward.default: _always,
    aten.reflection_pad3d_backward.default: _always,
    aten.replication_pad1d_backward.default: _always,
    aten.replication_pad2d_backward.default: _always,
    aten.replication_pad3d_backward.default: _always,
}


def let_go_of_unread(graph: fx.Graph) -> None:
    """Give operators of the backward that do not read their data something else laid out like it, so that nothing keeps it.

    Not where another operator of the backward reads the data, as then it is there, nor where it is a placeholder or a result,
    which always are.
    """
    backward = [node for node in graph.nodes if node.op == "call_function" and node.meta.get("partitioner_tag") in BACKWARD]
    unread = {node for node in backward if node.target in UNREAD and UNREAD[node.target](node.args)}
    there = {storage_key(t) for node in backward if not _is_view(node) for t in _read(node, but=DATA if node in unread else None)}
    there |= storages_of((*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes))
    elements: dict[torch.dtype, fx.Node] = {}
    changed = False
    for node in backward:
        if node in unread and storage_key(_given(node, DATA).meta["val"]) not in there:
            node.update_arg(DATA, _in_gradient(node) or _expanded(node, elements) or _empty(node))
            changed = True
    if changed:
        remove_dead(graph)  # views of the data


def _given(node: fx.Node, at: int) -> fx.Node:
    return cast(fx.Node, node.args[at])


def _in_gradient(node: fx.Node) -> fx.Node | None:
    """The memory of the gradient that a call is given, seen as its data is laid out; None where that is too small.

    Kernels choose what they do by layouts, and the slower ones for what is not dense add up in another order.
    """
    given = _given(node, GRADIENT)
    gradient, data = given.meta["val"], _given(node, DATA).meta["val"]
    if (gradient.dtype, gradient.shape, gradient.stride()) == (data.dtype, data.shape, data.stride()):
        return given
    room = extent(gradient.shape, gradient.stride())  # there is no more to it under vmap
    # Inductor of torch 2.11 lets it begin at the beginning of the storage.
    if gradient.dtype != data.dtype or gradient.storage_offset() or extent(data.shape, data.stride()) > room:
        return None
    return backward_call(node, aten.as_strided.default, (given, list(data.shape), list(data.stride())), {})


def _expanded(node: fx.Node, elements: dict[torch.dtype, fx.Node]) -> fx.Node | None:
    """One element, expanded to the shape of the data; None where the kernel would copy that or take it for another layout.

    elements  for each dtype, once it is made
    """
    data = _given(node, DATA).meta["val"]
    # Convolutions would copy it, pooling would on CUDA, and batch norms would take the way for what is not dense.
    reads_shape = node.target not in (aten.convolution_backward.default, aten.native_batch_norm_backward.default)
    if not reads_shape or data.device.type != "cpu" or data.stride() != torch.empty(data.shape, device="meta").stride():
        return None
    if data.dtype not in elements:
        with data.fake_mode:  # Inductor has no kernel of its own for ``zeros``
            one = backward_call(node, aten.full.default, ([1], 0), {"dtype": data.dtype, "device": data.device})
        elements[data.dtype] = one
    return backward_call(node, aten.expand.default, (elements[data.dtype], list(data.shape)), {})


def _empty(node: fx.Node) -> fx.Node:
    """Memory for this call alone, laid out as the data."""
    data = _given(node, DATA).meta["val"]
    layout = {"dtype": data.dtype, "device": data.device}
    with data.fake_mode:
        return backward_call(node, aten.empty_strided.default, (list(data.shape), list(data.stride())), layout)


def _is_view(node: fx.Node) -> bool:
    """Whether a call makes no memory of its own: who reads what it returns is asked instead."""
    given = storages_of(node.all_input_nodes)
    made = tensors_of(node)
    return bool(made) and all(storage_key(t) in given for t in made)


def _read(node: fx.Node, *, but: int | None) -> Iterator[Tensor]:
    """The tensors a call is given, but for one argument."""
    args = [argument for at, argument in enumerate(node.args) if at != but]
    for each in tree_leaves((args, dict(node.kwargs))):
        if isinstance(each, fx.Node):
            yield from tensors_of(each)
