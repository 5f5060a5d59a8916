"""What stands in for the CTC loss in a trace, where PyTorch has nothing that does. [torch]

Its kernel keeps a table as wide as the longest target of the batch. Lengths that are plain numbers say how wide that is; of
lengths in tensors a trace knows only that no target is longer than what the targets are padded to, so that much is planned for.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.errors import CaptureError
from graphs.torch_private.names import FakeTensorMode
from graphs.torch_private.patching import patched
from graphs.torch_private.stand_ins import stand_ins_by

aten = torch.ops.aten
_FORWARDS = aten._ctc_loss.default, aten._ctc_loss.Tensor
CTC_BACKWARDS = aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor


class TargetsInARow(CaptureError):
    """The targets of a CTC loss stand one after the other, and nobody knows how long the longest is."""


@contextlib.contextmanager
def ctc_traced(*, of_one_in_a_row: bool) -> Iterator[None]:
    """Let the CTC loss and its backward be traced inside.

    Raises TargetsInARow; with ``of_one_in_a_row`` not for a batch of one, whose target is as long as there are some.
    """
    original = torch.ctc_loss

    def ctc_loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        numbers = not any(isinstance(lengths, Tensor) for lengths in (input_lengths, target_lengths))
        return (_by_numbers if numbers else original)(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    with patched(torch, "ctc_loss", ctc_loss), stand_ins_by(functools.partial(_call, of_one_in_a_row)):
        yield


def _call(of_one_in_a_row: bool, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
    if func in _FORWARDS:
        log_probs, targets, _, target_lengths = args[:4]
        steps, batch, _ = log_probs.shape
        table = batch, steps, 2 * _longest(targets, target_lengths, of_one_in_a_row) + 1
        with mode:
            return log_probs.new_empty(batch), log_probs.new_empty(table)
    if func in CTC_BACKWARDS:
        with mode:
            return args[1].new_empty(args[1].shape)
    return plain()


def _longest(targets: Tensor, lengths: Any, of_one_in_a_row: bool) -> int:
    if not isinstance(lengths, Tensor):
        return max(lengths, default=0)
    if targets.dim() == 1 and not (of_one_in_a_row and lengths.numel() == 1):
        raise TargetsInARow(
            "the CTC loss takes memory by the longest target, which nobody knows beforehand where targets stand one after the "
            "other and their lengths in a tensor; give targets padded, of shape (batch, longest), or all lengths as numbers"
        )
    return targets.shape[-1]


def _by_numbers(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """What PyTorch's own does, which fills a tensor with the lengths where no trace sees it."""
    if log_probs.device.type == "cpu" and log_probs.dtype != torch.double and torch.is_autocast_enabled("cpu"):
        log_probs = log_probs.float()  # as autocast does for the loss as a whole, on CPU only
    batched = log_probs.dim() == 3
    batch = log_probs if batched else log_probs.unsqueeze(1)
    targets = targets.to(log_probs.device, torch.long)
    losses: Tensor = aten._ctc_loss.default(batch, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
    if reduction == 1:
        lengths = torch.tensor([max(1, n) for n in target_lengths], dtype=losses.dtype, device=losses.device)
        return (losses / lengths).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)
