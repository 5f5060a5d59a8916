"""Operators of our own, which traces hold where PyTorch has none. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("belady", "DEF")  # type: ignore[no-untyped-call]


def define_operator(
    schema: str, function: Callable[..., Any], stand_in: Callable[..., Any], *, tags: Sequence[torch.Tag] = ()
) -> None:
    """Define ``belady::NAME``, of a schema that begins with its name: ``function`` runs on any device, below autograd, and
    ``stand_in`` on tensors without data."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"belady::{name}", stand_in, lib=_library)


define_operator("in_memory(Tensor data) -> Tensor", torch.clone, torch.empty_like)
IN_MEMORY = torch.ops.belady.in_memory.default
