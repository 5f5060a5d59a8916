"""What was written to in place is read in the layout it has. [torch]

A trace makes a write into a result, which kernels lay out without gaps. Between the rows of what is written there may be some:
the gates of recurrent cells lie side by side. Kernels then go row by row, and compute what is left of each otherwise than whole
vectors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphs.rewriting.operators import define_operator
from graphs.torch_private.stand_ins import values_laid_out

aten = torch.ops.aten


def laid_out(source: Tensor, stride: list[int]) -> Tensor:
    """A copy in memory of that layout: ``belady::laid_out``."""
    return _fake(source, stride).copy_(source)


def _fake(source: Tensor, stride: list[int]) -> Tensor:
    return torch.empty_strided(source.shape, stride, dtype=source.dtype, device=source.device)


define_operator("laid_out(Tensor source, int[] stride) -> Tensor", laid_out, _fake)

# Each number is rounded once, or is only moved, whatever the layout is.
_ALIKE = {
    aten.abs,
    aten.add,
    aten.add_,
    aten.cat,
    aten.clone,
    aten.copy_,
    aten.div,
    aten.div_,
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.mul,
    aten.mul_,
    aten.neg,
    aten.neg_,
    aten.relu,
    aten.relu_,
    aten.sigmoid_backward,
    aten.stack,
    aten.sub,
    aten.sub_,
    aten.unsafe_split,
    aten.where,
    aten.zero_,
}
_VECTORS = 64  # numbers that kernels of the CPU take at a time, or a divisor of it
_GRAIN = 32_768  # numbers up to which one thread computes them all: at::internal::GRAIN_SIZE


def writes_laid_out() -> contextlib.AbstractContextManager[None]:
    """Trace reads of what was written to in place as reads of memory of its layout, where kernels may round otherwise in
    another."""
    return values_laid_out(_lay_out)


def _lay_out(func: Any, kwargs: Mapping[str, Any], tensor: Tensor, value: Tensor) -> Tensor | None:
    if not value.is_floating_point() and not value.is_complex():
        return None
    packet = getattr(func, "overloadpacket", None)
    if getattr(func, "namespace", None) != "aten" or func.is_view or (packet in _ALIKE and kwargs.get("alpha", 1) == 1):
        return None
    if torch.Tag.pointwise in func.tags and (value.device.type != "cpu" or _in_whole_vectors(tensor)):
        return None
    laid: Tensor = torch.ops.belady.laid_out(value, tensor.stride())
    return laid


def _in_whole_vectors(tensor: Tensor) -> bool:
    """Whether the rows of a tensor, and what each thread computes of them, leave nothing over."""
    row = 1
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if n > 1 and stride != row:
            break
        row *= n
    threads = 1 if tensor.numel() <= _GRAIN else torch.get_num_threads()
    return row % _VECTORS == 0 and math.prod(tensor.shape) % (_VECTORS * threads) == 0
