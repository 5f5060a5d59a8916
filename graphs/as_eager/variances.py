"""PyTorch's loss of Gaussians looks at its variances, which a trace cannot; there the step does so when it runs. [torch]"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.torch_private.patching import patched

aten = torch.ops.aten


class _Torch:
    """The torch that the loss sees: ``any``, by which it looks for negative variances, leaves that to the step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def any(self, negative: Tensor) -> bool:
        aten._assert_async.msg(~torch.any(negative), "var has negative entry/entries")
        return False


@contextlib.contextmanager
def variances_checked_later() -> Iterator[None]:
    """Let ``gaussian_nll_loss`` be traced inside."""
    original: Any = F.gaussian_nll_loss
    seen = {**original.__globals__, "torch": _Torch()}
    traced = FunctionType(original.__code__, seen, original.__name__, original.__defaults__)
    seen[original.__name__] = traced  # it calls itself from within torch-function modes
    with patched(F, "gaussian_nll_loss", traced):
        yield
