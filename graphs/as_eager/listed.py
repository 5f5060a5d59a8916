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
    """Let ``torch.tensor`` and ``torch.as_tensor`` be traced inside for lists with tensors of one element.

    Not under another name (``from torch import tensor``): a torch-function mode, which sees all, has code choose other ways.
    """

    def traced(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            made = _made_of(data, *args, **kwargs) if isinstance(data, list | tuple) else None
            return original(data, *args, **kwargs) if made is None else made

        return make

    with patched(torch, "tensor", traced(torch.tensor)), patched(torch, "as_tensor", traced(torch.as_tensor)):
        yield


def _made_of(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> Tensor | None:
    """None where eager execution would make none, or there is no tensor of a trace among the elements."""
    leaves = list(_leaves(data))
    if not any(isinstance(leaf, FunctionalTensor) for leaf in leaves):
        return None
    types = [leaf.dtype if isinstance(leaf, Tensor) else torch.tensor(leaf).dtype for leaf in leaves]
    wanted = dtype or functools.reduce(torch.promote_types, types)
    # Eager execution refuses numbers that are too large for a smaller type.
    fits = all(torch.promote_types(leaf.dtype, wanted) == wanted for leaf in leaves if isinstance(leaf, Tensor))
    if pin_memory or not fits or any(isinstance(leaf, Tensor) and leaf.numel() != 1 for leaf in leaves):
        return None
    return _stacked(data, wanted, torch.device(device or torch.get_default_device())).requires_grad_(requires_grad)


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, list | tuple):
        for each in data:
            yield from _leaves(each)
    else:
        yield data


def _stacked(data: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(each, dtype, device) for each in data])
    if isinstance(data, Tensor):
        return data.detach().reshape(()).to(device, dtype)
    return torch.tensor(data, dtype=dtype, device=device)
