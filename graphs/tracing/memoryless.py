"""A model on the meta device, to be planned without its memory: as if it were on the CPU. [torch]"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from graphs.errors import CaptureError
from graphs.torch_private.names import FakeTensorMode, tree_map_only
from graphs.torch_private.stand_ins import has_memory, of_the_cpu, on_meta
from graphs.tracing.inputs import Inputs, Loss


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer is on the meta device."""
    return any(on_meta(tensor) for tensor in _state(model))


def runs(model: nn.Module) -> bool:
    """Whether there is data behind all parameters and buffers."""
    return all(map(has_memory, _state(model)))


def as_on_cpu(
    model: nn.Module, loss: Loss | None, inputs: Inputs | None, device: torch.device | str | None
) -> tuple[nn.Module, Loss | None, Inputs | None]:
    """Copies of the model and of a loss that is a module, and the inputs, in which fake tensors of the CPU stand for those on the
    meta device. Other tensors are not copied. Raises CaptureError where something else in the model cannot be copied, and for
    another ``device``: which kernels a GPU runs cannot be known without it."""
    if device is not None and str(device) != "cpu":
        raise CaptureError(
            f"{type(model).__name__} is on the meta device, for which a step is captured as the CPU runs it, not {device}; "
            'op times of a GPU can be modelled: costs="h100"'
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    who = type(model).__name__
    try:
        own = {id(t): of_the_cpu(mode, t) if on_meta(t) and not is_lazy(t) else t for t in _state(model)}
        for tensor in _state(loss) if isinstance(loss, nn.Module) else ():
            if on_meta(tensor) and id(tensor) not in own:
                raise ValueError("the loss has a tensor of its own there, whose data is part of the step; make it on the CPU")
            own.setdefault(id(tensor), tensor)
        with _Copies():
            model, loss = copy.deepcopy((model, loss), cast(dict[int, Any], own))
    except Exception as error:  # modules may hold anything
        raise CaptureError(f"{who} is on the meta device, and cannot be copied to be captured: {error}") from error
    moved = tree_map_only(Tensor, lambda tensor: of_the_cpu(mode, tensor) if on_meta(tensor) else tensor, inputs)
    return model, loss, moved


class _Copies(TorchFunctionMode):
    """What becomes of tensors that are neither parameters nor buffers: a trace takes them for constants, whose data it needs."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        if on_meta(args[0]):
            raise ValueError(
                f"it holds a tensor of shape {tuple(args[0].shape)} that is neither parameter nor buffer; make it a buffer, or "
                f"make it on the CPU"
            )
        return args[0]


def _state(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
