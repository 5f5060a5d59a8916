"""The tensors in what a program holds. [torch]"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from graphs.torch_private.names import (
    FakeTensor,
    is_traceable_wrapper_subclass,
)


def takes_calls_apart(kind: type[Tensor]) -> bool:
    """Whether tensors of a class have no bytes of their own, and make other calls out of those they get."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


_ORDINARY = frozenset({Tensor, nn.Parameter})  # classes of tensors that are made of no others


def modules_in(module: nn.Module) -> list[nn.Module]:
    """It and all in it, each once, in the order of ``module.modules()``, which takes several times as long."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is not None and part not in found:
            found[part] = None
            if part._modules:
                stack += [*part._modules.values()][::-1]
    return list(found)


def tensors_in(holding: Any) -> Iterator[Tensor]:
    """Tensors of a module, of the state of an optimizer, of containers of these; in place of one made of others, those.

    Those without memory are left out: on the device "meta", or of a tracer that knows no data.
    """
    if type(holding) in _ORDINARY:
        if not holding.is_meta:
            yield holding
    elif isinstance(holding, Tensor):
        if is_traceable_wrapper_subclass(holding):
            for name in holding.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(holding, name))
        elif not (takes_calls_apart(type(holding)) or is_lazy(holding) or holding.is_meta or isinstance(holding, FakeTensor)):
            yield holding
    elif isinstance(holding, nn.Module):
        parts = modules_in(holding)
        for held in ("_parameters", "_buffers"):
            for part in parts:
                for tensor in getattr(part, held).values():
                    if tensor is not None:
                        yield from tensors_in(tensor)
    elif isinstance(holding, torch.optim.Optimizer):
        yield from tensors_in(holding.state)
    elif isinstance(holding, Mapping):
        yield from tensors_in(holding.values())
    elif isinstance(holding, Iterable) and not isinstance(holding, str | bytes):
        for entry in holding:
            yield from tensors_in(entry)
