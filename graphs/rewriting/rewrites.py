"""Rewrites of a traced step: it computes what eager execution computes, with the memory eager takes, and nothing else. [torch]"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphs.rewriting.nodes import (
    attribute,
    is_effect,
    is_random,
    leave_out_offset,
    offset_named,
    outputs_of,
    storages_of,
    tensors_of,
)
from graphs.rewriting.operators import define_operator
from graphs.torch_private.kernels import takes_cudnn_batch_norm
from graphs.torch_private.names import OpOverload
from graphs.torch_private.tensors import storage_bytes, storage_key

aten = torch.ops.aten


def lift_constants(module: fx.GraphModule) -> list[tuple[fx.Node, Tensor]]:
    """Turn the ``get_attr`` nodes of tensors into placeholders behind the others; the new nodes and their tensors."""
    lifted: dict[str, tuple[fx.Node, Tensor]] = {}
    body = next(node for node in module.graph.nodes if node.op != "placeholder")
    for node in module.graph.find_nodes(op="get_attr"):
        tensor, target = attribute(node), str(node.target)
        if not isinstance(tensor, Tensor):
            continue
        if target not in lifted:
            with module.graph.inserting_before(body):
                placeholder = module.graph.placeholder(target.replace(".", "_"))
            placeholder.meta["val"] = node.meta["val"]
            lifted[target] = placeholder, tensor
        node.replace_all_uses_with(lifted[target][0])
        if node is body:
            body = node.next
        module.graph.erase_node(node)
    for target in lifted:
        delattr(module, target)
    return list(lifted.values())


def read_sources_directly(graph: fx.Graph) -> None:
    """Take the copies of placeholders away that tracing puts before a buffer is replaced: nothing is written in this graph.

    One that is an output stays, since an output has memory of its own, and so does one with views, which lie in its memory.
    """
    returned = set(graph.output_node().all_input_nodes)
    lying = Counter(storage_key(tensor) for node in graph.nodes for tensor in tensors_of(node))
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.all_input_nodes[0]
        if source.op == "placeholder" and not node.kwargs and node not in returned:
            if source.meta["val"].stride() != node.meta["val"].stride() or lying[storage_key(node.meta["val"])] > 1:
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def remove_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, profiler marks, and second ``getitem`` nodes of one tensor. Random draws and effects stay."""
    for node in reversed(graph.nodes):
        profiling = isinstance(node.target, OpOverload) and node.target.namespace == "profiler"
        acts = node.op == "call_function" and not profiling and (is_random(node) or is_effect(node))
        if node.op in ("get_attr", "call_function") and not node.users and not acts:
            graph.erase_node(node)
    items: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.layout == torch.strided:  # some operators return one tensor twice
            what = (node.args[0], storage_key(value), value.shape, value.stride(), value.storage_offset())
        else:
            what = node.args
        first = items.setdefault(what, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def fold_conjugates(graph: fx.Graph) -> None:
    """Replace conjugates of numbers by numbers: autograd asks for that of 1j in 1j * x, as of a tensor."""
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        if not node.all_input_nodes:
            number = cast(complex, node.args[0]).conjugate()
            for user in list(node.users):
                user.args = tuple(number if argument is node else argument for argument in user.args)
            graph.erase_node(node)


def leave_out_own_offsets(graph: fx.Graph) -> None:
    """Let ``as_strided`` and its scatter begin where what they are given does, at 0, without naming the place.

    In a backward with ``is_grads_batched=True``, a place in the storage is one of the first gradient.
    """
    given_by_caller = storages_of(graph.find_nodes(op="placeholder"))
    for target in (aten.as_strided.default, aten.as_strided_scatter.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = cast(fx.Node, node.args[0]).meta["val"]
            if offset_named(node) == source.storage_offset() == 0 and storage_key(source) not in given_by_caller:
                leave_out_offset(node)


# Backward operators of batch norm: where the running statistics stand among the arguments, and the flag of training (None: they
# are for training only).
_BATCH_NORM_BACKWARD: dict[OpOverload[..., Any], tuple[tuple[int, int], int | None]] = {
    aten.native_batch_norm_backward.default: ((3, 4), 7),
    aten.batch_norm_backward.default: ((3, 4), 7),
    aten.cudnn_batch_norm_backward.default: ((3, 4), None),
}


def drop_unread_statistics(graph: fx.Graph) -> None:
    """Take the running statistics away from the backward of batch norm in training: the kernels get them, but do not read them,
    so a later forward may change them before."""
    for target, (places, flag) in _BATCH_NORM_BACKWARD.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if flag is None or node.args[flag] is True:
                node.args = tuple(None if i in places else argument for i, argument in enumerate(node.args))


def choose_batch_norm(graph: fx.Graph) -> None:
    """Let batch norm in training take cuDNN's kernels where eager execution does. The tracer puts PyTorch's own in their place,
    which round otherwise."""
    with_statistics, without = aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
    reserves: dict[int, fx.Node] = {}  # by storage of the mean that was saved: what the forward hands to the backward beside it
    for node in [each for target in (with_statistics, without) for each in graph.find_nodes(op="call_function", target=target)]:
        data, weight, bias, *statistics, training, momentum, eps = node.args
        given: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:3]]
        mean, var = [node.meta["val"] for node in cast(Any, statistics)] or (given[1], given[1])
        if not training or not takes_cudnn_batch_norm(given[0], given[1], given[2], mean, var, cast(float, eps)):
            continue
        old = node.meta["val"]
        functional = aten._batch_norm_with_update_functional.default
        with graph.inserting_after(node):
            if statistics:
                call = graph.call_function(functional, (data, weight, bias, *statistics, momentum, eps))
            else:
                call = graph.call_function(aten.cudnn_batch_norm.default, (data, weight, bias, None, None, True, momentum, eps))
        reserve = _value(functional, (data, weight, bias, *(statistics or (weight, weight)), momentum, eps), {})[3]
        call.meta = {**node.meta, "val": (*old[:3], reserve, *old[3:])}
        with graph.inserting_after(call):
            item = reserves[storage_key(old[1])] = graph.call_function(operator.getitem, (call, 3))
        item.meta = {**node.meta, "val": reserve}
        for each in list(node.users):
            index = cast(int, each.args[1])
            each.args = (call, index + (index > 2))
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        *first, training, eps, mask = node.args
        saved = first[5]
        if training and saved is not None and storage_key(saved.meta["val"]) in reserves:
            with graph.inserting_before(node):
                call = graph.call_function(
                    aten.batch_norm_backward.default, (*first, True, eps, mask, reserves[storage_key(saved.meta["val"])])
                )
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)


# Dropout draws its mask in place, into memory laid out like its input. The functional operator draws into contiguous memory,
# where the same generator gives another mask. This operator is the draw as eager does it, in one piece and with no input.


def bernoulli(
    size: list[int], stride: list[int], p: float, divisor: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Ones with probability ``p``, else zeros, divided by ``divisor``: what ``belady::bernoulli`` runs."""
    drawn = torch.empty_strided(size, stride, dtype=dtype, device=device).bernoulli_(p)
    return drawn if divisor == 1 else drawn.div_(divisor)


def _bernoulli_fake(
    size: list[int], stride: list[int], p: float, divisor: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


define_operator(
    "bernoulli(int[] size, int[] stride, float p, float divisor, *, ScalarType dtype, Device device) -> Tensor",
    bernoulli,
    _bernoulli_fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)


def fuse_bernoulli(graph: fx.Graph) -> None:
    """Replace draws into fresh memory, and their scaling where there is one, by ``belady::bernoulli``."""
    fresh = (aten.empty_like.default, aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default)
    for draw in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        memory, p = draw.args
        if memory.target not in fresh or len(memory.users) > 1 or draw.kwargs:
            continue
        last, divisor = draw, 1.0
        scaling = next(iter(draw.users), None)
        if scaling is not None and len(draw.users) == 1 and scaling.target == aten.div.Scalar:
            last, divisor = scaling, float(scaling.args[1])
        like = memory.meta["val"]
        with graph.inserting_before(last):
            fused = graph.call_function(
                torch.ops.belady.bernoulli.default,
                (list(like.shape), list(like.stride()), p, divisor),
                {"dtype": like.dtype, "device": like.device},
            )
        fused.meta = {**draw.meta, "val": like}
        last.replace_all_uses_with(fused)
        for node in dict.fromkeys((last, draw, memory)):
            graph.erase_node(node)


def settle_draws(graph: fx.Graph) -> None:
    """Take away the copies of draws into all of fresh memory, and scale these draws in place where they are scaled."""
    for draw in graph.find_nodes(op="call_function", target=torch.ops.belady.drawn_into.default):
        copy = next(iter(draw.users), None)
        if copy is None or copy.target != aten.copy.default or copy.args[1] is not draw:
            continue
        memory, made = copy.meta["val"], draw.meta["val"]
        if memory.stride() != made.stride() or storage_bytes(memory) != storage_bytes(made):
            continue
        copy.replace_all_uses_with(draw)
        graph.erase_node(copy)
        kind, size, stride, of = draw.args
        scaling = next(iter(draw.users), None)
        scaled = scaling is not None and len(draw.users) == 1 and scaling.target == aten.div.Scalar
        if scaling is None or not scaled or kind != "bernoulli" or draw.kwargs.get("generator") is not None:
            continue
        options = {key: draw.kwargs[key] for key in ("dtype", "device")}
        with graph.inserting_before(scaling):
            given = size, stride, *of, float(scaling.args[1])
            fused = graph.call_function(torch.ops.belady.bernoulli.default, given, options)
        fused.meta = dict(draw.meta)
        scaling.replace_all_uses_with(fused)
        graph.erase_node(scaling)
        graph.erase_node(draw)
    remove_dead(graph)  # the memory


def backward_call(at: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """A new call of the backward before node ``at``."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(target, args, dict(kwargs))
    node.meta = {"val": _value(target, node.args, node.kwargs), "partitioner_tag": "is_backward"}
    return node


def _value(target: Any, args: Any, kwargs: Any) -> Any:
    """The fake result of a call."""
    args, kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    with torch.no_grad():
        return target(*args, **kwargs)


def gradient_order(parameter: Tensor) -> list[int]:
    """The dimensions in the order in which autograd lays out a gradient, the one whose neighbours are next to each other last:
    as in the parameter where that has neither gaps nor overlaps in memory, else as they are."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    dense = not parameter.is_contiguous() and parameter.permute(order).is_contiguous()
    return order if dense else list(range(parameter.dim()))


def own_gradients(graph: fx.Graph, parameter_of: Mapping[int, Tensor]) -> None:
    """Copy gradients that are laid out otherwise than autograd wants those of their parameter, or share elements with another
    result or an input.

    Autograd makes the same copies when it fills ``.grad``.

    parameter_of  the (real) parameter of each output that is a gradient
    """
    resident = storages_of(graph.find_nodes(op="placeholder"))
    taken: dict[int, list[tuple[int, int]]] = {}
    nodes = outputs_of(graph)
    for at, node in enumerate(nodes):
        value: Tensor = node.meta["val"]
        key, start = storage_key(value), int(value.storage_offset())
        stop = start + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        if at in parameter_of:
            order = gradient_order(parameter_of[at])
            shared = key in resident or any(start < b and a < stop for a, b in taken.get(key, ()))
            if shared or not value.permute(order).is_contiguous():
                where = graph.output_node() if node.op == "placeholder" else node.next
                in_order = order == sorted(order)
                laid = node if in_order else backward_call(where, aten.permute.default, (node, order), {})
                made = backward_call(where, aten.clone.default, (laid,), {"memory_format": torch.contiguous_format})
                back = [order.index(d) for d in range(len(order))]
                nodes[at] = made if in_order else backward_call(where, aten.permute.default, (made, back), {})
                continue
        taken.setdefault(key, []).append((start, stop))
    graph.output_node().args = (tuple(nodes),)
