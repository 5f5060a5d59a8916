"""Rewrites of a traced step: it computes what eager execution computes, with the memory eager takes, and nothing else. [torch]"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphs.torch_private.kernels import takes_cudnn_batch_norm
from graphs.torch_private.names import OpOverload, is_operator, tree_leaves
from graphs.torch_private.tensors import storage_bytes, storage_key

aten = torch.ops.aten


def tensors_of(node: fx.Node) -> list[Tensor]:
    """All (fake) tensors a node holds."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The entries of the output node."""
    return list(cast(Sequence[fx.Node], graph.output_node().args[0]))


def attribute(node: fx.Node) -> Any:
    """What a ``get_attr`` node stands for."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_random(node: fx.Node) -> bool:
    """Whether a call may draw random numbers; a call of a higher-order operator does where its subgraph does."""
    if calls_foreign(node):
        return bool(tensors_of(node))  # else it acts on the outside world, and runs once
    if not isinstance(node.target, OpOverload):
        subgraphs = [attribute(n) for n in node.all_input_nodes if n.op == "get_attr"]
        return any(is_random(n) for sub in subgraphs for n in sub.graph.nodes if n.op == "call_function")
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

    One that is an output stays, since an output has memory of its own.
    """
    returned = set(graph.output_node().all_input_nodes)
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.all_input_nodes[0]
        if source.op == "placeholder" and not node.kwargs and node not in returned:
            if source.meta["val"].stride() != node.meta["val"].stride():
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
    which round otherwise.

    Without running statistics there is no such functional operator; PyTorch's own kernels stay.
    """
    reserves: dict[int, fx.Node] = {}  # by storage of the mean that was saved: what the forward hands to the backward beside it
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        data, weight, bias, mean, var, training, momentum, eps = node.args
        given: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in (data, weight, bias, mean, var, eps)]
        if not training or not takes_cudnn_batch_norm(*given):
            continue
        old = node.meta["val"]
        with graph.inserting_after(node):
            call = graph.call_function(
                aten._batch_norm_with_update_functional.default, (data, weight, bias, mean, var, momentum, eps)
            )
        reserve = _value(call.target, call.args, {})[3]
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
_library = torch.library.Library("belady", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "bernoulli(int[] size, int[] stride, float p, float divisor, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


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


_library.impl("bernoulli", bernoulli, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("belady::bernoulli", _bernoulli_fake, lib=_library)


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


def _insert(at: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
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


def same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two strides place the elements alike: strides of dimensions of one element do not count."""
    return 0 in shape or all(a == b for n, a, b in zip(shape, strides, others, strict=True) if n != 1)


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
    resident = {storage_key(t) for node in graph.find_nodes(op="placeholder") for t in tensors_of(node)}
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
                laid = node if in_order else _insert(where, aten.permute.default, (node, order), {})
                made = _insert(where, aten.clone.default, (laid,), {"memory_format": torch.contiguous_format})
                back = [order.index(d) for d in range(len(order))]
                nodes[at] = made if in_order else _insert(where, aten.permute.default, (made, back), {})
                continue
        taken.setdefault(key, []).append((start, stop))
    graph.output_node().args = (tuple(nodes),)


# Where the tracer and the kernels disagree about bytes. Found by comparing every storage of a run with the trace.
_LOSSES = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
_KEEP_BASE = (
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.col2im.default,
)
_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_WINDOWS = tuple(getattr(aten, f"{kind}_window") for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser"))


def real_bytes(node: fx.Node, index: int, tensor: Tensor, held_bytes: Callable[[fx.Node], int]) -> int:
    """Bytes of the storage a kernel makes for output ``index`` of ``node``, where ``tensor`` is its fake.

    held_bytes  of the storage of an argument
    """
    size = storage_bytes(tensor)
    arguments: list[Tensor] = [t for n in node.all_input_nodes for t in tensors_of(n)]
    if node.target in _LOSSES and not tensor.dim():  # the number keeps the memory of all losses before their mean
        return max(size, *(t.numel() * tensor.element_size() for t in arguments))
    if node.target in _KEEP_BASE:  # clones the whole storage behind its first argument
        return max(size, held_bytes(node.all_input_nodes[0]))
    if node.target in _NORMS and index and tensor.device.type == "cpu":  # in mixed precision the statistics are fp32
        return max(size, *(tensor.numel() * t.element_size() for t in arguments))
    if node.target in _BAGS and tensor.device.type == "cpu" and size:  # made with a last entry that is cut off
        longer = index == 1 or (index == 2 and node.args[7:8] == (True,))
        return size + longer * tensor.element_size()
    if getattr(node.target, "overloadpacket", None) in _WINDOWS and tensor.numel() > 1 and node.args[1:2] != (False,):
        return size + tensor.element_size()  # periodic ones likewise
    return size


def cuda_bytes(size_bytes: int) -> int:
    """What the CUDA caching allocator gives out for so many bytes: granules of 512."""
    return -(-size_bytes // 512) * 512
