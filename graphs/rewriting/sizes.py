"""How large the storages are that kernels make and allocators give out. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from graphs.rewriting.nodes import tensors_of
from graphs.torch_private.tensors import storage_bytes

aten = torch.ops.aten

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


def unasked_bytes(node: fx.Node) -> int:
    """Bytes of what a kernel returns unasked: oneDNN makes the gradient of a convolution's weight with that of its bias."""
    if node.target is not aten.convolution_backward.default:
        return 0
    weight: Tensor = node.args[2].meta["val"]  # type: ignore[union-attr]
    mask = cast(Sequence[bool], node.args[10])
    return storage_bytes(torch.empty_like(weight)) if weight.device.type == "cpu" and mask[2] and not mask[1] else 0


def cuda_bytes(size_bytes: int) -> int:
    """What the CUDA caching allocator gives out for so many bytes: granules of 512."""
    return -(-size_bytes // 512) * 512
