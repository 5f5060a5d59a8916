"""Real arguments for a call of a captured step, to time it alone: made up, but such that kernels do their usual work. [torch]

Numbers are drawn from [0.1, 1), which every operator can take (roots, logarithms, probabilities). Integers are drawn where they
are indices and their range is known, are as long as can be where they are lengths, which say how much work there is, and else 0.
Pivots exchange no rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graphs.rewriting.nodes import attribute, reads_seed_on_host
from graphs.torch_private.names import OpOverload, tree_leaves, tree_map_only
from graphs.torch_private.tensors import storage_bytes, storage_key

Fill = Callable[[Tensor, torch.Generator], object]  # writes integers to a flat tensor
Named = Mapping[str, Any]  # arguments by the names of the operator's schema, tensors by their fakes


def arguments_of(node: fx.Node, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real tensors in the place of the fake ones, which share storages where those do."""
    generators: dict[torch.device, torch.Generator] = {}
    fills, on_host, pivots = _fills(node), _on_host(node), node.target in READ_PIVOTS
    storages: dict[int, torch.UntypedStorage] = {}

    def real(fake: Tensor, where: torch.device, fill: Fill | None) -> Tensor:
        key = storage_key(fake)
        if key not in storages:
            if where not in generators:
                generators[where] = torch.Generator(where).manual_seed(0)
            size = storage_bytes(fake) // fake.element_size()
            content = torch.empty(size, dtype=fake.dtype, device=where)
            storages[key] = _filled(content, generators[where]).untyped_storage()
        empty = torch.empty(0, dtype=fake.dtype, device=where)
        tensor = empty.set_(storages[key], int(fake.storage_offset()), fake.shape, fake.stride())
        once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # without repeated elements
        if pivots and tensor.dtype == torch.int32:  # counted from 1: kernels write past the matrix where one is 0
            once.copy_(torch.arange(1, once.shape[-1] + 1, device=where))
        elif fill is not None and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            flat = torch.empty(once.numel(), dtype=fake.dtype, device=where)
            fill(flat, generators[where])
            once.copy_(flat.view(once.shape))
        return tensor

    def value(argument: fx.Node) -> Any:
        if argument.op == "get_attr":  # subgraph of a higher-order operator
            return attribute(argument)
        where = torch.device("cpu") if argument in on_host else device
        return tree_map_only(Tensor, functools.partial(real, where=where, fill=fills.get(argument)), argument.meta["val"])

    return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)


def _filled(content: Tensor, generator: torch.Generator) -> Tensor:
    if content.is_complex():
        torch.view_as_real(content).uniform_(0.1, 1, generator=generator)
    elif content.dtype == torch.bool:
        content.bernoulli_(0.5, generator=generator)
    elif content.is_floating_point() and content.element_size() > 1:
        content.uniform_(0.1, 1, generator=generator)
    else:  # 8-bit floats cannot be drawn
        content.zero_()
    return content


# What integers are.


def _below(limit: int) -> Fill:
    """Any index from 0 to below this."""

    def fill(content: Tensor, generator: torch.Generator) -> object:
        return content.random_(0, max(1, min(limit, torch.iinfo(content.dtype).max)), generator=generator)

    return fill


def _all(number: int) -> Fill:
    return lambda content, _: content.fill_(number)


def _parts(total: int, count: int) -> Fill:
    """In each row of ``count`` integers, equal parts that add up to ``total``."""

    def fill(content: Tensor, _: torch.Generator) -> object:
        if content.numel() < count:  # one for all of them
            return content.fill_(total // count)
        ends = torch.arange(1, count + 1) * total // max(1, count)
        return content.copy_(ends.diff(prepend=ends.new_zeros(1)).repeat(content.numel() // max(1, count)))

    return fill


def _starts(total: int, parts: int) -> Fill:
    """Where each of so many equal parts begins; where there is one more integer, its end."""
    return lambda content, _: content.copy_(torch.arange(content.numel()) * total // max(1, parts))


def _along(given: Named) -> dict[str, Fill]:
    """Indices along a dimension of the first tensor; without one, valid whichever dimension is indexed."""
    source: Tensor = given["self"]
    dim = given.get("dim")
    shape = source.shape or (1,)
    limit = int(shape[dim]) if isinstance(dim, int) else int(min(shape))
    return dict.fromkeys(("index", "indices"), _below(limit))


def _anywhere(given: Named) -> dict[str, Fill]:
    return {"index": _below(given["self"].numel())}


def _bags(given: Named) -> dict[str, Fill]:
    bags = given["offsets"].numel() - bool(given.get("include_last_offset"))
    count = given["indices"].numel()
    return {"indices": _below(int(given["weight"].shape[0])), "offsets": _starts(count, bags)}


def _bags_backward(given: Named) -> dict[str, Fill]:
    bags, count = int(given["grad"].shape[0]), given["indices"].numel()
    return {
        "indices": _below(int(given["num_weights"])),
        "offsets": _starts(count, bags),
        "offset2bag": _below(bags),
        "bag_size": _all(max(1, count // max(1, bags))),
    }


def _ctc(given: Named) -> dict[str, Fill]:
    (steps, *_, classes), longest = map(int, given["log_probs"].shape), int(given["targets"].shape[-1])
    return {"input_lengths": _all(steps), "target_lengths": _all(longest), "targets": _below(classes)}


def _segments(given: Named) -> dict[str, Fill]:
    data, lengths, axis = given["data"], given.get("lengths"), given.get("axis") or 0
    return {} if lengths is None else {"lengths": _parts(int(data.shape[axis]), int(lengths.shape[-1]))}


def _repeats(given: Named) -> dict[str, Fill]:
    total, source, count = given.get("output_size"), given.get("self"), given["repeats"].numel()
    if source is not None and count == 1:
        count = source.numel() if given.get("dim") is None else source.shape[given["dim"]]
    return {} if total is None else {"repeats": _parts(int(total), int(count))}


_ALONG = (
    "index", "index_put", "index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather", "scatter",
    "scatter_add", "scatter_reduce", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate",
)  # fmt: skip

# By operator; what is not named is 0.
_INTEGERS: Mapping[str, Callable[[Named], dict[str, Fill]]] = {
    **dict.fromkeys(_ALONG, _along),
    "take": _anywhere,
    "put": _anywhere,
    "embedding": lambda given: {"indices": _below(int(given["weight"].shape[0]))},
    "embedding_dense_backward": lambda given: {"indices": _below(int(given["num_weights"]))},
    "embedding_renorm": lambda given: {"indices": _below(int(given["self"].shape[0]))},
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
    "_embedding_bag_backward": _bags_backward,
    "_embedding_bag_dense_backward": _bags_backward,
    "_ctc_loss": _ctc,
    "_ctc_loss_backward": _ctc,
    "segment_reduce": _segments,
    "_segment_reduce_backward": _segments,
    "repeat_interleave": _repeats,
}


def _fills(node: fx.Node) -> dict[fx.Node, Fill]:
    """How the integers of a call's arguments are filled."""
    if not isinstance(node.target, OpOverload):
        return {}
    schema = node.target._schema
    fills_of = _INTEGERS.get(schema.name.removeprefix("aten::"))
    if fills_of is None:
        return {}
    given: dict[str, Any] = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(
        node.kwargs
    )
    fakes = fx.map_arg(given, lambda argument: argument.meta["val"])
    return {
        each: fill for name, fill in fills_of(fakes).items() for each in tree_leaves(given.get(name)) if isinstance(each, fx.Node)
    }


READ_PIVOTS = frozenset(
    {torch.ops.aten.linalg_lu_solve.default, torch.ops.aten.lu_unpack.default, torch.ops.aten.linalg_ldl_solve.default}
)


def _on_host(node: fx.Node) -> list[fx.Node]:
    """Arguments that lie on the host although their fakes do not say so: seed and offset of what reads them there."""
    if not isinstance(node.target, OpOverload) or not reads_seed_on_host(node.target):
        return []
    named = zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)
    given = [argument for name, argument in (*named, *node.kwargs.items()) if name in ("philox_seed", "philox_offset")]
    return [argument for argument in given if isinstance(argument, fx.Node)]
