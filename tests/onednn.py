"""PyTorch with and without the kernels of oneDNN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def onednn_as(enabled: bool) -> Iterator[None]:
    """Take kernels of oneDNN, or none. ``torch.backends.mkldnn.flags`` sets more than that, and warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
