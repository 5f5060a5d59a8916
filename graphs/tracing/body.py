"""Model and loss as they are traced, and what they have to be for that. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.tracing.inputs import Arguments, Loss, check_tensor

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def state_of(model: nn.Module, loss: Loss | None, *, gradient_hooks: bool = False) -> dict[str, Tensor]:
    """Distinct parameters and buffers of a model under their first names. Raises CaptureError where they cannot be captured.

    gradient_hooks  whether parameters may have some
    """
    who = type(model).__name__
    for wrapper, inner in (
        (nn.DataParallel, "module"),
        (nn.parallel.DistributedDataParallel, "module"),
        (nn.Module, "_orig_mod"),
    ):
        if isinstance(model, wrapper) and hasattr(model, inner):  # the last are compiled modules
            raise CaptureError(f"{who} wraps another module; capture that one (.{inner})")
    for name, part in model.named_modules():
        if getattr(type(part), "_runs_a_plan", False):
            raise CaptureError(f"{name or who} is a planned module; plan with the model that it was made of (.step.model)")
        if isinstance(part, torch.jit.ScriptModule):  # its calls change with how often it ran, and its dicts are none
            raise CaptureError(f"{name or who} is TorchScript, which cannot be captured; use the module that it was made of")
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(f"{name or who} has a backward hook, which a captured step would not call; remove it")
        if isinstance(part, _BATCH_NORMS) and part.momentum is None and part.training and part.track_running_stats:
            raise CaptureError(
                f"{name or who} averages its statistics over all steps so far (momentum=None), so that each step computes with "
                f"another number; give it a momentum"
            )
    state = dict[str, Tensor](model.named_parameters())
    parameters = {id(parameter) for parameter in state.values()}
    state |= {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in parameters}
    for name, tensor in state.items():
        check_tensor(name, tensor)
        if not gradient_hooks:
            check_hooks(name, tensor)
    if not any(tensor.requires_grad for tensor in state.values()):
        raise CaptureError(f"no parameter of {who} requires a gradient, so there is nothing to train")
    if isinstance(loss, nn.Module):
        own = {id(tensor) for tensor in state.values()}
        if any(p.requires_grad and id(p) not in own for p in loss.parameters()):
            raise CaptureError(f"the loss {type(loss).__name__} has parameters of its own; make it a part of the model")
    return state


def check_hooks(name: str, tensor: Tensor) -> None:
    """Raises CaptureError for a parameter with hooks."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{name} has a gradient hook, which a captured step would not call; remove it (a planned module calls those that are "
            f"set once it is there)"
        )


def device_of(model: nn.Module, state: Mapping[str, Tensor], device: torch.device | str | None) -> torch.device:
    """The one device the state is on. Raises CaptureError where there are several, or another one is asked for."""
    who = type(model).__name__
    try:
        asked = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise CaptureError(f"there is no device {device!r}; give 'cpu', 'cuda' or 'cuda:0'") from error
    if asked is not None and asked.type == "cuda" and not torch.cuda.is_available():
        raise CaptureError("no CUDA device is available; capture on cpu")
    homes = {tensor.device: name for name, tensor in state.items()}
    if len(homes) > 1:
        places = ", ".join(f"{name} on {home}" for home, name in homes.items())
        raise CaptureError(f"{who} is spread over several devices ({places}); move it to one")
    where = next(iter(homes))
    if asked is not None and (asked.type != where.type or asked.index not in (None, where.index)):
        raise CaptureError(f"{who} is on {where}, not on {asked}; move it there first: model.to({str(asked)!r})")
    return where


class Body(nn.Module):
    """Model and loss in one module, so that parameters of the model that the loss also reads are swapped with it.

    split  shares the inputs out between the two
    """

    def __init__(self, model: nn.Module, loss: Loss | None, split: Callable[[Any], Arguments]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.split = split

    def forward(self, inputs: Any) -> Tensor:
        given = self.split(inputs)
        output = self.model(*given.args, **given.kwargs)
        if self.loss is not None:
            return _scalar(
                self.loss(output, *given.targets, **given.named_targets),
                f"the loss {getattr(self.loss, '__name__', type(self.loss).__name__)}",
            )
        if isinstance(output, Mapping):
            output = output.get("loss", output)
        elif isinstance(output, tuple | list) and output:
            named = getattr(output, "loss", None)  # of a named tuple
            output = named if isinstance(named, Tensor) else output[0]
        elif not isinstance(output, Tensor):
            output = getattr(output, "loss", output)
        return _scalar(output, type(self.model).__name__)


def _scalar(output: object, who: str) -> Tensor:
    """Check what should be a loss."""
    if not isinstance(output, Tensor):
        raise CaptureError(
            f"{who} returns a {type(output).__name__}, not a loss; give loss=, or the inputs (labels) it needs for one"
        )
    if output.numel() != 1:
        raise CaptureError(f"{who} returns a tensor of shape {tuple(output.shape)}, but a loss is one number; give loss=")
    if not output.is_floating_point():
        raise CaptureError(f"{who} returns a number of dtype {output.dtype}, which has no gradient")
    if not output.requires_grad:
        raise CaptureError(f"what {who} returns does not depend on any parameter that requires a gradient")
    return output


def region_of(autocast: torch.dtype | None, where: torch.device) -> torch.dtype | None:
    """Dtype of the autocast region to trace in: the one asked for, else that of the region around the caller, if any."""
    if autocast is None:
        return torch.get_autocast_dtype(where.type) if torch.is_autocast_enabled(where.type) else None
    if autocast not in (torch.bfloat16, torch.float16):
        raise CaptureError(f"autocast={autocast!r}: give torch.bfloat16 or torch.float16")
    return autocast
