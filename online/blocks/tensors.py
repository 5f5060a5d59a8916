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


def tensors_in(holding: Any) -> Iterator[Tensor]:
    """Tensors of a module, of the state of an optimizer, of containers of these; in place of one made of others, those.

    Those without memory are left out: on the device "meta", or of a tracer that knows no data.
    """
    if isinstance(holding, Tensor):
        if is_traceable_wrapper_subclass(holding):
            for name in holding.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(holding, name))
        elif not (takes_calls_apart(type(holding)) or is_lazy(holding) or holding.is_meta or isinstance(holding, FakeTensor)):
            yield holding
    elif isinstance(holding, nn.Module):
        for tensor in (*holding.parameters(), *holding.buffers()):
            yield from tensors_in(tensor)
    elif isinstance(holding, torch.optim.Optimizer):
        yield from tensors_in(holding.state)
    elif isinstance(holding, Mapping):
        yield from tensors_in(holding.values())
    elif isinstance(holding, Iterable) and not isinstance(holding, str | bytes):
        for entry in holding:
            yield from tensors_in(entry)
