"""Tensors of a trace that a forward has put where the program would find them later, outside of the model's attributes. [torch]

A forward that fills a cache does not do the same in every call, so its capture is refused; what it has cached would break the
model itself. So would what it leaves without reading it, a note of its activations (``graphs.watching.outside``). Looked at: what
functions remember (``functools.lru_cache``), names and containers in the Python modules in which the classes of the model, its
hooks and its loss are defined, variables of functions around these, attributes of the classes, and plain objects among those of
the model.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Set
from typing import Any

from torch import nn

from graphs.torch_private.names import FunctionalTensor
from graphs.watching.leftovers import attributes_of, fill, is_a, put, take

_BOXES = dict, list, deque, OrderedDict, defaultdict
_DEPTH = 3  # of containers and objects inside of each other
_MANY = 1_000  # entries of one container that are looked into
_LEVELS = 3  # a function, its dict, an entry, what it returned
_LIBRARIES = frozenset({"builtins", "collections", "enum", "functools", "numpy", "torch", "types", "typing", "weakref"})
_Remembering = type(functools.lru_cache(lambda: None))
# How often functions of libraries had been asked when nothing traced was left in them; others may clear what they remember.
_looked_at: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()


class Caches:
    """What is in the places that the forward of ``body`` may fill, before it is traced."""

    def __init__(self, body: nn.Module) -> None:
        self._before = [(box, list(box) if is_a(box, list, deque) else _entries(box)) for box in _boxes(body)]
        self._functions: list[Any] = []
        self._modules = 0  # that were imported when these were looked for

    def own(self) -> list[int]:
        """Ids of what this holds of the program's."""
        return [id(before) for _, before in self._before]

    def lengths(self) -> dict[int, int]:
        """How many entries lists and deques had, by id."""
        return {id(box): len(before) for box, before in self._before if isinstance(before, list)}

    def forget_traced(self, known: Set[int] = frozenset()) -> None:
        """Put back entries that are tensors of a trace, which has ended. ``known``: ids of others that hold such."""
        for box, before in self._before:
            if isinstance(before, list):
                if _are_traced(box, known):
                    fill(box, before)
                continue
            now = _entries(box)
            if _are_traced(now.values(), known):
                for key in [key for key, value in now.items() if _are_traced([value], known)]:
                    put(box, key, before[key]) if key in before else take(box, key)
        if self._modules != len(sys.modules):  # else there are no others: looking through all objects takes long
            self._functions = [one for one in gc.get_referrers(_Remembering) if type(one) is _Remembering]
            self._modules = len(sys.modules)
        libraries = [one for one in self._functions if _is_library(one.__module__ or "")]
        unasked = {id(one) for one in libraries if one.cache_info() == _looked_at.get(one)}  # since they were looked at
        functions = [one for one in self._functions if id(one) not in unasked]
        if _remember_traced(functions, known):
            for function in functions:
                if _remember_traced([function], known):
                    function.cache_clear()
        _looked_at.update((one, one.cache_info()) for one in libraries)


def _remember_traced(functions: list[Any], known: Set[int]) -> bool:
    """Whether tensors of a trace are among what they have returned, or were given."""
    held = functions
    own = {id(getattr(function, "__wrapped__", None)) for function in functions}  # which have all names of their modules
    for _ in range(_LEVELS):
        inside = gc.get_referents(*(one for one in held if not is_a(one, nn.Module)))
        held = list({id(one): one for one in inside if id(one) not in own}.values())  # all functions refer to their type
        if _are_traced(held, known):
            return True
    return False


def _entries(box: Any) -> dict[Any, Any]:
    return dict(box if is_a(box, dict) else attributes_of(box))


def _boxes(body: nn.Module) -> Iterator[Any]:
    """Dicts, lists and deques, those in which plain objects have their attributes among them; classes, variables of functions."""
    kinds = {kind for part in body.modules() for kind in type(part).__mro__ if not _is_library(kind.__module__)}
    loss = getattr(body, "loss", None)
    functions = {each for kind in kinds for each in vars(kind).values() if isinstance(each, types.FunctionType)}
    hooks = [hook for part in body.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    functions |= {each for each in map(_function, (loss, *hooks)) if each is not None and not _is_library(each.__module__ or "")}
    names = {kind.__module__ for kind in kinds} | {getattr(loss, "__module__", None) or "builtins"}
    spaces = [vars(sys.modules[name]) for name in names if not _is_library(name) and name in sys.modules]
    spaces += [function.__globals__ for function in functions]
    cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
    yield from kinds
    yield from cells.values()
    unique = {id(space): space for space in spaces}
    yield from unique.values()
    owned = [value for space in unique.values() for value in list(space.values())]
    todo: list[tuple[Any, int]] = [(value, 1) for value in owned if type(value) in _BOXES]
    todo += [(value, 1) for cell in cells.values() for value in attributes_of(cell).values()]
    todo += [(value, 0) for each in (loss, *hooks) for value in _held_by(each)]
    todo += [(value, 1) for part in body.modules() for key, value in vars(part).items() if not key.startswith("_")]
    seen: set[int] = set(unique)
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        inside: Iterable[Any] = ()
        if type(value) in _BOXES:
            yield value
            if isinstance(value, dict):
                inside = value.values() if len(value) <= _MANY else ()
            else:
                inside = list(value)[-_MANY:]  # before them there is data
        elif type(value) is types.SimpleNamespace or not (is_a(value, nn.Module, type) or _is_library(type(value).__module__)):
            yield value
            inside = attributes_of(value).values()
        todo += [(one, depth + 1) for one in list(inside)]


def _function(one: object) -> types.FunctionType | None:
    """The function of what can be called."""
    while isinstance(one, functools.partial | types.MethodType):
        one = one.func if isinstance(one, functools.partial) else one.__func__
    return one if isinstance(one, types.FunctionType) else None


def _held_by(one: object) -> list[Any]:
    """Objects that what can be called has with it: that of a method, arguments, itself."""
    if isinstance(one, types.FunctionType):
        return [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    if isinstance(one, functools.partial):
        return [*one.args, *one.keywords.values(), *_held_by(one.func)]
    return [one.__self__] if isinstance(one, types.MethodType) else [one]


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _are_traced(values: Collection[Any], known: Set[int]) -> bool:
    """Whether one of these is a tensor of a trace, is known to hold some, or is a tuple or list with such a one."""
    seen: set[int] = set()  # a list may be in itself
    while values:
        if id(FunctionalTensor) in map(id, map(type, values)) or not known.isdisjoint(map(id, values)):
            return True
        listed = [value for value in values if is_a(value, tuple, list) and id(value) not in seen]
        seen.update(map(id, listed))
        values = [one for several in listed for one in several]
    return False
