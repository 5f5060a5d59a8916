"""A tensor made of a list with tensors in it, as in ``torch.tensor([x.max(), 0])``, in a trace. [torch]

PyTorch takes their numbers out one by one, past the dispatcher, where a trace has no data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs.torch_private.names import FunctionalTensor
from graphs.torch_private.patching import patched


@contextlib.contextmanager
def lists_traced() -> Iterator[None]:
    """Let ``torch.tensor`` be traced inside for lists with tensors of one element."""
    original = torch.tensor

    @functools.wraps(original)
    def tensor(data: Any, **options: Any) -> Tensor:
        leaves = list(_leaves(data))
        if not any(isinstance(leaf, FunctionalTensor) for leaf in leaves) or isinstance(data, Tensor):
            return original(data, **options)
        types = [leaf.dtype if isinstance(leaf, Tensor) else original(leaf).dtype for leaf in leaves]
        dtype = options.get("dtype") or functools.reduce(torch.promote_types, types)
        # Eager execution refuses numbers that are too large for a smaller type.
        fits = all(torch.promote_types(leaf.dtype, dtype) == dtype for leaf in leaves if isinstance(leaf, Tensor))
        if not fits or any(isinstance(leaf, Tensor) and leaf.numel() != 1 for leaf in leaves):
            return original(data, **options)
        device = torch.device(options.get("device") or torch.get_default_device())
        made = _stacked(data, lambda number: original(number, dtype=dtype, device=device), dtype, device)
        return made.requires_grad_(options.get("requires_grad", False))

    with patched(torch, "tensor", tensor):
        yield


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, list | tuple):
        for each in data:
            yield from _leaves(each)
    else:
        yield data


def _stacked(data: Any, of_number: Callable[[Any], Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(each, of_number, dtype, device) for each in data])
    if isinstance(data, Tensor):
        return data.detach().reshape(()).to(device, dtype)
    return of_number(data)
