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


ORDINARY = frozenset({Tensor, nn.Parameter})  # classes of tensors that are made of no others and handle no functions


def modules_in(module: nn.Module) -> list[nn.Module]:
    """It and all in it, each once, in the order of ``module.modules()``, which takes several times as long."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None or part in found:
            continue
        if type(part).named_modules is not nn.Module.named_modules:  # a planned module: what is in its model
            found |= dict.fromkeys(each for _, each in part.named_modules())
            continue
        found[part] = None
        if part._modules:
            stack += [*part._modules.values()][::-1]
    return list(found)


def parameters_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """As ``module.parameters()``, but one of several modules may come several times."""
    return _held(module, "_parameters", ("parameters", "named_parameters"))


def _held(module: nn.Module, where: str, names: tuple[str, str]) -> Iterator[Any]:
    kind = type(module)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in (*names, "_named_members", "modules")):
        yield from getattr(module, names[0])()  # the class has its own idea of that
        return
    for part in modules_in(module):
        for tensor in getattr(part, where).values():
            if tensor is not None:
                yield tensor


def tensors_in(holding: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Tensors of a module, of the state of an optimizer, of containers of these; in place of one made of others, those.

    Those without memory are left out: on the device "meta", or of a tracer that knows no data. ``within``: ids of the containers
    this is in, as one may be in itself.
    """
    if type(holding) in ORDINARY:
        if not holding.is_meta:
            yield holding
    elif isinstance(holding, Tensor):
        if is_traceable_wrapper_subclass(holding):
            for name in holding.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(holding, name))
        elif not (takes_calls_apart(type(holding)) or is_lazy(holding) or holding.is_meta or isinstance(holding, FakeTensor)):
            yield holding
    elif isinstance(holding, nn.Module):
        for tensor in (*parameters_in(holding), *_held(holding, "_buffers", ("buffers", "named_buffers"))):
            yield from tensors_in(tensor)
    elif isinstance(holding, torch.optim.Optimizer):
        yield from tensors_in(holding.state)
    elif isinstance(holding, Iterable) and not isinstance(holding, str | bytes) and id(holding) not in within:
        for entry in holding.values() if isinstance(holding, Mapping) else holding:
            yield from tensors_in(entry, (*within, id(holding)))
