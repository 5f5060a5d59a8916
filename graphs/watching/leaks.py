"""Tensors of a trace that a forward has put where the model would find them later: caches outside of its modules. [torch]

A forward that fills such a cache does not do the same in every call, so its capture is refused; what it has cached would break
the model itself. Looked at: what functions remember (``functools.lru_cache``), containers in the Python modules in which the
classes of the model and its loss are defined, and plain objects among its attributes.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphs.torch_private.names import FunctionalTensor

_DEPTH = 3  # of containers and objects inside of each other
_LEVELS = 3  # a function, its dict, an entry, what it returned
_LIBRARIES = frozenset({"builtins", "collections", "enum", "functools", "numpy", "torch", "types", "typing", "weakref"})
_Remembering = type(functools.lru_cache(lambda: None))


class Caches:
    """What is in the caches that the forward of ``body`` may fill, before it is traced."""

    def __init__(self, body: nn.Module) -> None:
        self._before = [(box, box.copy()) for box in _boxes(body)]
        self._functions: list[Any] = []
        self._modules = 0  # that were imported when these were looked for

    def forget_traced(self) -> None:
        """Put back entries that are tensors of a trace, which has ended."""
        for box, before in self._before:
            if isinstance(box, list):
                if any(map(_is_traced, box)):
                    box[:] = before
                continue
            for key in [key for key, value in box.items() if _is_traced(value)]:
                del box[key]
                if key in before:
                    box[key] = before[key]
        if self._modules != len(sys.modules):  # else there are no others: looking through all objects takes long
            self._functions = [one for one in gc.get_objects() if type(one) is _Remembering]
            self._modules = len(sys.modules)
        for function in self._functions:
            held: list[Any] = [function]
            for _ in range(_LEVELS):
                held = [one for value in held for one in gc.get_referents(value) if not isinstance(value, nn.Module)]
                if any(map(_is_traced, held)):
                    function.cache_clear()
                    break


def _boxes(body: nn.Module) -> Iterator[Any]:
    """Dicts and lists, those in which plain objects have their attributes among them."""
    kinds = {kind for part in body.modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds if not _is_library(kind.__module__)}
    names.add(getattr(getattr(body, "loss", None), "__module__", None) or "builtins")
    owned = (value for name in sorted(names - _LIBRARIES) if name in sys.modules for value in vars(sys.modules[name]).values())
    todo: list[tuple[Any, int]] = [(value, 1) for value in owned if type(value) in (dict, list)]
    todo += [(value, 1) for part in body.modules() for key, value in vars(part).items() if not key.startswith("_")]
    seen: set[int] = set()
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        inside: Iterable[Any] = ()
        if type(value) in (dict, list):
            yield value
            inside = value if type(value) is list else value.values()
        elif not isinstance(value, nn.Module | type) and not _is_library(type(value).__module__):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                yield attributes
                inside = attributes.values()
        todo += [(one, depth + 1) for one in list(inside)]


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_traced(value: object) -> bool:
    """Whether it is a tensor of a trace, or a tuple or list with one."""
    return any(map(_is_traced, value)) if isinstance(value, tuple | list) else type(value) is FunctionalTensor
