"""Grouped matrix products of other types than bfloat16, which PyTorch computes and has no stand-ins for. [torch]"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs.torch_private.kernels import like_grouped_product
from graphs.torch_private.names import FakeTensorMode
from graphs.torch_private.stand_ins import stand_ins_by

aten = torch.ops.aten


@contextlib.contextmanager
def grouped_products_traced() -> Iterator[None]:
    """Let mixtures of experts be traced inside in any type."""
    with stand_ins_by(_call):
        yield


def _call(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
    if func is not aten._grouped_mm.default:
        return plain()

    def product(
        a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Any:
        if a.dtype is torch.bfloat16 or a.dtype is not b.dtype or bias is not None or a.shape[-1] != b.shape[-2]:
            return plain()
        with mode:
            return like_grouped_product(a, b, offs, out_dtype)

    return product(*args, **kwargs)
