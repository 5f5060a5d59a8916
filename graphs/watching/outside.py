"""Where tensors of a trace have been left outside of what a model has as attributes: names and containers of the program. [torch]

A hook that keeps an activation in a dict, a loss that notes its terms, a list of auxiliary losses: after the trace tensors of it
lie there that nobody can use. What refers to them is followed upwards to something that has a name, so that the place is found
again where the program has put another container there.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphs.watching.leftovers import Leftover, NotMade, attributes_of

_UP = 6  # containers inside of each other
_WALKS = 100  # through all objects there are, some 20 ms each
_TOGETHER = 16  # tensors looked for in one of them
_GROWING = list, set, deque
_FIXED = tuple, frozenset
_LIBRARIES = {"torch", "functools", "weakref", "numpy", "graphs"}  # what lies there is theirs

_Found = tuple[Any, tuple[Hashable, ...], tuple[type, ...], str]  # holder, keys, kinds (see Leftover), and a name for messages


@dataclass(frozen=True, slots=True)
class _Edge:
    """What refers to something, and by which key; None: as an entry of what has no keys, or as its attributes."""

    at: Any
    key: Hashable


def left_outside(made: Iterable[weakref.ref[Tensor]]) -> list[Leftover]:
    """The places where tensors lie that a trace, which has ended, has made."""
    made = list(made)
    if all(one() is None for one in made):
        return []
    gc.collect()  # what waits for it lies nowhere
    return _Search([tensor for one in made if (tensor := one()) is not None]).places()


class _Search:
    """Follows references upwards. No name here is an object's attribute for long: it would be found as well."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._walks = 0
        self._above: dict[int, list[_Edge]] = {}
        self._own = {id(tensors), id(self._above)}
        self._found: dict[Hashable, Leftover] = {}

    def places(self) -> list[Leftover]:
        """All of them, each once."""
        while self._tensors and self._walks < _WALKS:
            some = self._tensors[:_TOGETHER]
            self._own.add(id(some))
            seen = {id(one) for one in some}
            for edge in self._referring(*some):
                self._note(edge)
                inside = edge.at.values() if isinstance(edge.at, dict) else edge.at if isinstance(edge.at, _GROWING) else ()
                seen.update(map(id, inside))
            rest = [one for one in self._tensors if id(one) not in seen]
            self._own.add(id(rest))
            self._tensors = rest
        return list(self._found.values())

    def _referring(self, *children: Any) -> list[_Edge]:
        """What of the program refers to some of these, and by which keys."""
        self._walks += 1
        self._own.add(id(children))
        ids = {id(child) for child in children}
        edges: list[_Edge] = []
        self._own.add(id(edges))
        for one in gc.get_referrers(*children):
            if id(one) in self._own or isinstance(one, types.FrameType | types.FunctionType | _Search):
                continue
            if isinstance(one, dict):
                edges += [_Edge(one, key) for key, value in list(one.items()) if id(value) in ids]
            elif isinstance(one, _GROWING + _FIXED):
                edges.append(_Edge(one, None))
            else:
                found = attributes_of(one)
                edges += [_Edge(one, key) for key, value in list(found.items()) if id(value) in ids]
                if id(found) in ids or (isinstance(one, type) and any(_is_of_class(child, one) for child in children)):
                    edges.append(_Edge(one, None))  # the dict is that of its attributes
        return edges

    def _parents(self, one: Any) -> list[_Edge]:
        if id(one) not in self._above:
            self._above[id(one)] = self._referring(one) if self._walks < _WALKS else []
        return self._above[id(one)]

    def _note(self, edge: _Edge, up: int = 0) -> bool:
        """A tensor, or something with one in it, lies there. Whether that is a place of the program's."""
        at, key = edge.at, edge.key
        if isinstance(at, _FIXED):
            noted = [self._note(above, up + 1) for above in (self._parents(at) if up < _UP else ())]
            return any(noted)
        where = self._container(at, up)
        if where is None:
            return False
        if isinstance(where, list):  # an entry of something that grows, or whose entries stay
            noted = [self._note(above, up + 1) for above in where]
            if any(noted):
                return True
            where = at, (), (), _kind_of(at)
        holder, keys, kinds, name = where
        if isinstance(at, _GROWING):
            leftover = Leftover(holder, keys, kinds, NotMade(f"an entry of {name}"), grows=True)
        else:
            leftover = Leftover(holder, (*keys, key), kinds, NotMade(_within(name, at if keys else holder, key)))
        self._found.setdefault(leftover.place, leftover)
        return True

    def _container(self, at: Any, up: int) -> _Found | list[_Edge] | None:
        """How a container or an object is found again; what it is an entry of; None: it is no matter of the program's."""
        if isinstance(at, nn.Module | type | types.CellType | Tensor):
            return None if isinstance(at, type) and _is_library(at.__module__) else (at, (), (), _named(at))
        if _is_library(type(at).__module__):
            return None
        edges = self._parents(at) if up < _UP else []
        for edge in edges:
            if edge.key is None and not isinstance(edge.at, _GROWING + _FIXED):  # a dict of attributes: names are what they are
                if isinstance(edge.at, types.ModuleType):
                    return None if _is_library(edge.at.__name__) else (at, (), (), "")
                return self._container(edge.at, up + 1)
        for edge in edges:
            if edge.key is not None and not isinstance(edge.at, types.ModuleType):
                found = self._container(edge.at, up + 1)
                if isinstance(found, tuple):
                    holder, keys, kinds, name = found
                    name = _within(name, edge.at if keys else holder, edge.key)
                    return holder, (*keys, edge.key), (*kinds, type(at)), name
        return [edge for edge in edges if isinstance(edge.at, _GROWING + _FIXED)] or (at, (), (), _kind_of(at))


def _is_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _is_of_class(attributes: Any, kind: type) -> bool:
    """Whether a dict is that of a class, which shows it as another object."""
    return type(attributes) is dict and len(attributes) == len(vars(kind)) and all(key in attributes for key in vars(kind))


def _kind_of(container: Any) -> str:
    return f"a {type(container).__name__} that the step fills"


def _named(one: Any) -> str:
    return "a variable" if isinstance(one, types.CellType) else one.__name__ if isinstance(one, type) else type(one).__name__


def _within(name: str, at: Any, key: Hashable) -> str:
    """What messages call an entry or an attribute."""
    if not name:  # a global name
        return str(key)
    if isinstance(at, types.CellType):
        return f"{name} of the step"
    return f"{name}[{key!r}]" if isinstance(at, dict) else f"{name}.{key}"
