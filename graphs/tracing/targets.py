"""Targets of a CTC loss that a mask chooses from padded labels: they stay padded. [torch]

``labels.masked_select(labels >= 0)`` has a shape that depends on data. The loss takes labels of shape (batch, longest) as well,
and computes the same from them; so what a mask chooses is not made until something else than that loss asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphs.torch_private.names import tree_map_only
from graphs.tracing.answers import ask

_CHOOSE: Any = (torch.masked_select, Tensor.masked_select, Tensor.__getitem__)
_LOSSES: Any = (functional.ctc_loss, torch.ctc_loss)


class PaddedTargets(TorchFunctionMode):
    """Inside of it, a mask chooses labels only where that is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CHOOSE and kwargs.keys() <= {"mask"} and _are_labels(*args, **kwargs):
            return _Chosen(*args, **kwargs)
        return func(*args, **kwargs)


def _are_labels(labels: Any, mask: Any) -> bool:
    return (
        all(isinstance(each, Tensor) and not isinstance(each, _Chosen) for each in (labels, mask))
        and (labels.dtype, mask.dtype) == (torch.long, torch.bool)
        and labels.dim() == 2
        and labels.shape == mask.shape
    )


class _Chosen(Tensor):
    """What a mask chooses of labels, both of shape (batch, longest): in a row for whoever asks."""

    _labels: Tensor
    _mask: Tensor
    _made: Tensor | None

    @staticmethod
    def __new__(cls, labels: Tensor, mask: Tensor) -> _Chosen:
        make: Callable[..., _Chosen] = cast(Any, Tensor)._make_wrapper_subclass
        chosen = make(cls, (0,), dtype=labels.dtype, device=labels.device)
        chosen._labels, chosen._mask = labels.clone(), mask.clone()  # either may be written to before it is asked for
        chosen._made = None
        return chosen

    def in_a_row(self) -> Tensor:
        if self._made is None:
            self._made = self._labels.masked_select(self._mask)
        return self._made

    def padded_to(self, lengths: Tensor) -> Tensor | None:
        """Of shape (batch, longest), as many in each row as ``lengths`` says; None where that does not say so."""
        rows, longest = self._labels.shape
        if self._made is not None or lengths.shape != (rows,):  # it may have been written to
            return None
        chosen = self._mask.sum(1)
        ask((lengths.to(chosen.device) == chosen).all(), [True])
        places = torch.where(self._mask, self._mask.cumsum(1) - 1, longest)
        return self._labels.new_zeros(rows, longest + 1).scatter(1, places, self._labels)[:, :longest]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _LOSSES and len(args) >= 4 and isinstance(args[1], _Chosen) and isinstance(args[3], Tensor):
            log_probs, targets, _, lengths, *_ = args
            padded = targets.padded_to(lengths) if log_probs.dim() == 3 else None
            if padded is not None:
                return func(log_probs, padded, *args[2:], **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Where classes of tensors are not asked."""
        args, kwargs = tree_map_only(_Chosen, _Chosen.in_a_row, (args, kwargs or {}))
        return func(*args, **kwargs)
