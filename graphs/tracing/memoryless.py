"""A model on the meta device, to be planned without its memory: as if it were on the CPU. [torch]"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from graphs.errors import CaptureError
from graphs.torch_private.names import FakeTensor, FakeTensorMode, tree_map_only
from graphs.torch_private.stand_ins import has_memory, of_the_cpu, on_meta
from graphs.tracing.body import check_hooks
from graphs.tracing.inputs import Inputs, Loss, plain


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer is on the meta device."""
    return any(on_meta(tensor) for tensor in _state(model))


def runs(model: nn.Module) -> bool:
    """Whether there is data behind all parameters and buffers."""
    return all(map(has_memory, _state(model)))


def as_on_cpu(
    model: nn.Module, loss: Loss | None, inputs: Inputs | None, device: torch.device | str | None, *, gradient_hooks: bool
) -> tuple[nn.Module, Loss | None, Inputs | None]:
    """Copies of the model and of a loss that is a module, and the inputs, in which fake tensors of the CPU stand for those on the
    meta device. Parameters and buffers with data are not copied.

    Raises CaptureError where the model cannot be copied, where its parameters have hooks (unless ``gradient_hooks``), and for
    CUDA: which kernels a GPU runs cannot be known without it.
    """
    who = type(model).__name__
    if str(device).startswith("cuda"):
        raise CaptureError(
            f"{who} is on the meta device, for which a step is captured as the CPU runs it, not {device}; op times of a GPU can "
            f'be modelled: costs="h100"'
        )
    if torch.get_default_device().type == "meta":
        raise CaptureError(
            f"{who} cannot be captured while meta is the default device, on which its forward would make tensors; capture it "
            f"after the block (with torch.device)"
        )
    modes = [tensor.fake_mode for tensor in _state(model) if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    for name, parameter in () if gradient_hooks else model.named_parameters():
        check_hooks(name, parameter)
    try:
        own = {id(t): of_the_cpu(mode, t) if on_meta(t) and not is_lazy(t) else t for t in _state(model)}
        for tensor in _state(loss) if isinstance(loss, nn.Module) else ():
            own.setdefault(id(tensor), tensor)
        with _Copies():
            model, loss = copy.deepcopy((model, loss), cast(dict[int, Any], own))
    except Exception as error:  # modules may hold anything
        raise CaptureError(f"{who} is on the meta device, and cannot be copied to be captured: {error}") from error
    if is_on_meta(model) and not any(map(is_lazy, _state(model))):
        raise CaptureError(f"{who} is on the meta device, and its copy, to be captured, still is (has it a __deepcopy__?)")
    moved = None if inputs is None else plain(inputs)
    return model, loss, tree_map_only(Tensor, lambda tensor: of_the_cpu(mode, tensor) if on_meta(tensor) else tensor, moved)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What fails within is said to be of a copy without data."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(
            f"{error}. The model is on the meta device, so that what is captured is a copy of it: closures and other objects "
            f"that refer to the model itself do not reach the copy, and the content of buffers and inputs there is not known"
        ) from error


def check_constant(name: str, tensor: Tensor) -> None:
    """Raises CaptureError for a constant of a step that has neither data nor a size of its own."""
    if on_meta(tensor):
        raise CaptureError(
            f"{name}: the step uses a tensor of shape {tuple(tensor.shape)} on the meta device that is neither parameter nor "
            f"buffer of the model, nor an input; make it on the CPU, or a part of the model"
        )


class _Copies(TorchFunctionMode):
    """Tensors that are neither parameters nor buffers stay as they are: they may be there for nothing, and are refused where a
    trace comes upon one that has no data."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _state(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
