"""The operator calls of a traced forward, written down to be compared with those of another one. [torch]"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.torch_private.names import OpOverload, TorchDispatchMode, no_dispatch, tree_leaves
from graphs.torch_private.tensors import is_functional

OF_THE_MODEL = "only those of the model may change in a step, so make the loss a part of the model, which then returns it"


def written_elsewhere(name: str) -> str:
    """What to say where a step writes to memory that is there before and after it, but is none of its model's."""
    return (
        f"{name} changes a tensor in place that is neither parameter nor buffer of the model; make it one with register_buffer "
        f"(buffers of a loss: {OF_THE_MODEL})"
    )


def written(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator call and its arguments; tensors by the order in which they appear, real ones by content, and
    generators themselves."""

    supports_higher_order_operators = True
    LIMIT = 1 << 20  # elements; larger tensors are data, not something made up in a forward

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.made: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # no id is given twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.made.append((func, *map(self._sign, tree_leaves((args, kwargs)))))
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._number(leaf)
        return result

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Out of the way for a while; no other mode may have been entered since."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Let the tensors go."""
        self._alive.clear()

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def _check_writes(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write into memory that is there before and after the step, before it is done."""
        if any(type(tensor) in (Tensor, nn.Parameter) for tensor in written(func, args, kwargs)):
            raise CaptureError(written_elsewhere(self.name))

    def _sign(self, leaf: object) -> object:
        if isinstance(leaf, torch.Generator):
            return leaf
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, bool | int | float | complex | str | None) else type(leaf).__name__
        new = id(leaf) not in self._numbers
        number = self._number(leaf)
        real = type(leaf) is Tensor and not is_functional(leaf)
        if new and real and leaf.device.type == "cpu" and leaf.numel() <= self.LIMIT:
            with no_dispatch():
                return number, leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return number
