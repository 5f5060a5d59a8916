"""Functions with derivatives of their own, for programs written at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Dirty(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(a)
        return a.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5
