"""Draws written into memory that is laid out otherwise than contiguous draw as the kernels do. [torch]

A trace makes a write into a result, in memory of its own. Some kernels draw in another order there: ``bernoulli_`` in that of the
memory, but its result has contiguous memory; ``normal_`` otherwise into contiguous memory than into a part of a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs.rewriting.operators import define_operator
from graphs.torch_private.stand_ins import calls_replaced

_KINDS: dict[Any, str] = {torch.ops.aten.bernoulli_.float: "bernoulli", torch.ops.aten.normal_.default: "normal"}


def drawn_into(
    kind: str,
    size: list[int],
    stride: list[int],
    of: list[float],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Draws of ``bernoulli_`` or ``normal_`` with the parameters ``of``, in memory of that layout: ``belady::drawn_into``."""
    memory = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if kind == "bernoulli":
        return memory.bernoulli_(*of, generator=generator)
    return memory.normal_(*of, generator=generator)


def _fake(kind: str, size: list[int], stride: list[int], of: list[float], **options: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=options["dtype"], device=options["device"])


define_operator(
    "drawn_into(str kind, int[] size, int[] stride, float[] of, *, Generator? generator=None, ScalarType dtype, Device device) "
    "-> Tensor",
    drawn_into,
    _fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)


@contextlib.contextmanager
def draws_laid_out() -> Iterator[None]:
    """Trace such draws into memory that is not contiguous as draws of their own, which are then copied there."""
    with calls_replaced(_instead):
        yield


def _instead(func: Any, args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
    if func is torch.ops.aten.rrelu_with_noise.default and not args[0].is_contiguous():
        # Its result is contiguous, but in the form that writes no noise it is laid out like the input.
        return lambda: func(args[0].contiguous(), *args[1:], **kwargs)
    if func not in _KINDS or args[0].is_contiguous():
        return None
    memory: Tensor = args[0]
    defaults = [0.5] if func is torch.ops.aten.bernoulli_.float else [0.0, 1.0]
    of = [*args[1:], *defaults[len(args) - 1 :]]
    names = ["p"] if len(defaults) == 1 else ["mean", "std"]
    of = [kwargs.get(name, value) for name, value in zip(names, of, strict=True)]

    def draw() -> Tensor:
        drawn = torch.ops.belady.drawn_into(
            _KINDS[func],
            list(memory.shape),
            list(memory.stride()),
            of,
            generator=kwargs.get("generator"),
            dtype=memory.dtype,
            device=memory.device,
        )
        return memory.copy_(drawn)

    return draw
