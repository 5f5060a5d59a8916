"""What ``pad_packed_sequence`` calls, in operators that a block sees. [torch]"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def pad_packed(
    data: Tensor, batch_sizes: Sequence[int], batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The same as ``torch._VF._pad_packed_sequence``, which writes to a tensor past the dispatcher.

    data         rows of all steps, one step after the other: (sum of batch_sizes, ...)
    batch_sizes  how many sequences there are at each step; never rising
    Returns them padded, (steps, sequences, ...) or with the first two the other way round, and the length of each on the CPU.
    Raises RuntimeError where ``total_length`` is less than there are steps; 0 and less ask for no more than that.
    """
    steps, sequences = len(batch_sizes), batch_sizes[0]
    if 0 < total_length < steps:
        raise RuntimeError(
            f"Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {steps}"
        )
    shape = max(total_length, steps), sequences, *data.shape[1:]
    padded = torch.full(shape, padding_value, dtype=data.dtype, layout=data.layout, device=data.device)
    lengths: list[int] = []  # of the shortest first
    step = row = 0
    left = sequences
    for size, run in itertools.groupby(batch_sizes):
        lengths += [step] * (left - size)
        count = sum(1 for _ in run)
        rows = data[row : row + count * size]
        padded[step : step + count, :size].copy_(rows.view(count, size, *data.shape[1:]))
        step, row, left = step + count, row + count * size, size
    lengths += [step] * left
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths[::-1])
