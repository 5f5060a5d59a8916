"""Sequences of different lengths, packed and unpacked in a trace. [torch]

PyTorch reads lengths and batch sizes past the dispatcher, where a trace has no data. What it knows of them is handed to the
kernels; rows are gathered and scattered by their places, which writes each once instead of all of them at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from graphs.as_eager import cudnn_recurrent
from graphs.torch_private.kernels import below_autograd, differentiated_by, in_parts
from graphs.torch_private.names import DynamicOutputShapeException, no_dispatch

aten = torch.ops.aten

SizesIn = Callable[[Tensor], Tensor | None]


class _Pack(torch.autograd.Function):
    """Rows of a padded tensor of shape (steps, sequences, ...)."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, step: Tensor, sequence: Tensor) -> Tensor:
        ctx.save_for_backward(step, sequence)
        ctx.shape = padded.shape
        with below_autograd():
            return padded[step, sequence]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        step, sequence = ctx.saved_tensors
        return _Pad.apply(grad, step, sequence, ctx.shape[:2], 0.0), None, None  # type: ignore[no-untyped-call]


class _Pad(torch.autograd.Function):
    """Rows in their places of a tensor of shape (steps, sequences, ...)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: Tensor, sequence: Tensor, shape: tuple[int, int], padding: float) -> Tensor:
        ctx.save_for_backward(step, sequence)
        with below_autograd():
            return rows.new_full((*shape, *rows.shape[1:]), padding).index_put((step, sequence), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Pack.apply(grad, *ctx.saved_tensors), None, None, None, None  # type: ignore[no-untyped-call]


def _places(steps: int, lengths: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its step and its sequence; how many sequences there are at each step."""
    with no_dispatch(), below_autograd():
        padded = torch.arange(steps * len(lengths)).view(steps, len(lengths))
        rows, batch_sizes = aten._pack_padded_sequence.default(padded, lengths, False)
        found = (rows // len(lengths)).to(device), (rows % len(lengths)).to(device), batch_sizes
    step, sequence, batch_sizes = map(aten.lift_fresh.default, found)
    return step, sequence, batch_sizes


def _packed(sizes_in: SizesIn, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """``aten::_pack_padded_sequence``."""
    padded = input.transpose(0, 1) if batch_first else input
    if padded.shape[1] != len(lengths):
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)} (batch_size={padded.shape[1]})"
        )
    step, sequence, batch_sizes = _places(len(padded), _known(sizes_in, lengths), input.device)
    return _Pack.apply(padded, step, sequence), batch_sizes  # type: ignore[no-untyped-call]


def _padded(
    sizes_in: SizesIn, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """``aten::_pad_packed_sequence``."""
    known = _known(sizes_in, batch_sizes)
    with no_dispatch():
        padded, lengths = in_parts(aten._pad_packed_sequence.default, torch.empty(len(data)), known, False, 0.0, total_length)
    steps, sequences = padded.shape
    step, sequence, _ = _places(steps, lengths, data.device)
    padded = _Pad.apply(data, step, sequence, (steps, sequences), padding_value)  # type: ignore[no-untyped-call]
    return padded.transpose(0, 1) if batch_first else padded, aten.lift_fresh.default(lengths)


def _recurrent(name: str, sizes_in: SizesIn, data: Tensor, batch_sizes: Tensor, *args: Any) -> Any:
    """``aten::NAME.data``."""
    known = _known(sizes_in, batch_sizes)
    if cudnn_recurrent.computes_in(data) is not None:
        with no_dispatch():
            sizes = known.tolist()
        hx, params, has_biases, num_layers, dropout, train, bidirectional = args
        options = has_biases, num_layers, dropout, train, bidirectional, False
        return cudnn_recurrent.recurrent(name, data, hx, params, *options, sizes)
    return in_parts(getattr(aten, name).data, data, known, *args)


def _known(sizes_in: SizesIn, sizes: Tensor) -> Tensor:
    known = sizes_in(sizes)
    if known is None:
        raise DynamicOutputShapeException(aten._pack_padded_sequence.default)
    return known


def packed_traced(sizes_in: SizesIn) -> AbstractContextManager[None]:
    """Let packing, unpacking and recurrent layers of what is packed be traced inside, where ``sizes_in`` knows what is in a
    tensor of lengths or batch sizes."""
    return differentiated_by(
        {
            aten._pack_padded_sequence.default: functools.partial(_packed, sizes_in),
            aten._pad_packed_sequence.default: functools.partial(_padded, sizes_in),
            **{getattr(aten, name).data: functools.partial(_recurrent, name, sizes_in) for name in cudnn_recurrent.MODES},
        }
    )
