"""Tensors that a step leaves beside its loss: a planned step does not make them, and must not seem to. [torch]"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphs.errors import InputError
from graphs.torch_private.patching import ABSENT

_DEPTH = 5  # of containers and objects inside of each other
GROWING = list, set, deque  # what a step adds to


class NotMade:
    """Stands where plain PyTorch's forward would have left a tensor: whoever uses it is told.

    It is no tensor for ``isinstance`` either: PyTorch would look for one inside of it, and crash.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}, which a planned step does not make>"

    def __reduce__(self) -> tuple[Any, ...]:
        return NotMade, (self._what,)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise InputError(
            f"{self._what} is a tensor that a plain forward leaves there, and a planned step gives its loss alone: "
            f"add what depends on it to the loss inside of the step, or call the plain model for it"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying, pickling and printing ask
            raise AttributeError(name)
        self._refuse()

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        pending = [*args, *(kwargs or {}).values()]
        for given in pending:
            if type(given) is cls:
                given._refuse()
            elif isinstance(given, list | tuple):
                pending += given
        return NotImplemented


_BINARY = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"
_UNARY = "neg", "pos", "abs", "bool", "float", "int", "index", "array", "len", "iter", "round", "format"
_OTHER = "lt", "le", "gt", "ge", "eq", "ne", "getitem", "setitem", "contains"
for _name in (*_BINARY, *(f"{side}{name}" for name in _BINARY for side in "ri"), *_UNARY, *_OTHER):
    setattr(NotMade, f"__{_name}__", NotMade._refuse)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A place where a plain step leaves a tensor, without having read what was there.

    holder  a dict, an object or a class, from which ``keys`` lead to the place: keys of dicts, names of attributes
    kinds   of what lies on the way: at each key but the last or, where the place is a container that grows, at each
    grows   whether the place is a list, set or deque to which each step adds
    renews  whether each step fills it anew instead
    mark    what is put there
    """

    holder: Any
    keys: tuple[Any, ...]
    kinds: tuple[type, ...]
    mark: NotMade
    grows: bool = False
    renews: bool = False

    @property
    def place(self) -> Hashable:
        """The same for what is the same place."""
        return id(self.holder), self.keys, self.grows

    def container(self) -> Any:
        """What it is in now; None where the program has put something else on the way."""
        at = self.holder
        for key, kind in zip(self.keys, self.kinds, strict=False):
            inside = value_at(at, key)
            if inside is ABSENT and kind in _MADE_EMPTY:  # the program has emptied what it is in, as it may before each step
                put(at, key, inside := kind())
            if type(inside) is not kind:
                return None
            at = inside
        return at

    def after_step(self) -> None:
        """Have it say that a planned step has made none."""
        container = self.container()
        if container is None:
            return
        if not self.grows:
            put(container, self.keys[-1], self.mark)
        elif self.renews:
            container.clear()
            _add(container, self.mark)
        elif not any(type(entry) is NotMade for entry in (container if isinstance(container, set) else list(container)[-1:])):
            _add(container, self.mark)  # one is enough

    def forget(self, is_traced: Callable[[object], bool]) -> None:
        """After a trace, take out what it has put there. ``is_traced``: whether something is a tensor of a trace."""
        container = self.container()
        if container is None:
            return
        if self.grows:
            stay = [entry for entry in container if not holds(entry, is_traced)]
            if len(stay) < len(container):
                container.clear()
                container.update(stay) if isinstance(container, set) else container.extend(stay)
        elif holds(value_at(container, self.keys[-1]), is_traced):
            if type(container) is dict and self.kinds:
                take(container, self.keys[-1])
            else:  # a name, which is there even where what it stood for is not known
                put(container, self.keys[-1], self.mark)


_MADE_EMPTY = dict, list, set, deque


def _add(container: Any, mark: NotMade) -> None:
    container.add(mark) if isinstance(container, set) else container.append(mark)


def value_at(holder: Any, key: Any) -> Any:
    """An entry of a dict or an attribute of an object; ABSENT where there is none."""
    if isinstance(holder, defaultdict):
        return holder[key]
    return (holder if isinstance(holder, dict) else attributes_of(holder)).get(key, ABSENT)


def attributes_of(holder: Any) -> Mapping[str, Any]:
    """The attributes of an object, a class or a variable of a function (``cell_contents``)."""
    if isinstance(holder, types.CellType):
        try:
            return {"cell_contents": holder.cell_contents}
        except ValueError:  # nothing yet
            return {}
    found = getattr(holder, "__dict__", None)
    return found if isinstance(found, Mapping) else {}


def put(holder: Any, key: Any, value: object) -> None:
    """Have a dict this entry, or an object this attribute."""
    if isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, type | types.CellType):
        setattr(holder, key, value)
    else:
        vars(holder)[key] = value


def take(holder: Any, key: Any) -> None:
    """Have a dict no such entry, or an object no such attribute."""
    if isinstance(holder, dict):
        del holder[key]
    elif isinstance(holder, type):
        delattr(holder, key)
    elif isinstance(holder, types.CellType):
        del holder.cell_contents
    else:
        del vars(holder)[key]


def leftovers_in(holder: Any, key: str, box: Any, before: Sequence[Any], name: str) -> list[Leftover]:
    """Of a container of the model's, its attribute ``key``, that held ``before`` (``content_of``) before a call, and now more or
    others."""
    known = set(map(id, before))
    kind = type(box)
    if isinstance(box, dict):
        new = [entry for entry, value in box.items() if id(value) not in known and holds(value, is_tensor)]
        return [Leftover(holder, (key, entry), (kind,), NotMade(f"{name}[{entry!r}]")) for entry in new]
    entries = list(box)
    if not any(id(entry) not in known and holds(entry, is_tensor) for entry in entries):
        return []
    stays = known <= set(map(id, entries)) if isinstance(box, set) else all(map(_is, before, entries[: len(before)]))
    renews = not stays or len(entries) < len(before)
    return [Leftover(holder, (key,), (kind,), NotMade(f"an entry of {name}"), grows=True, renews=renews)]


def _is(a: object, b: object) -> bool:
    return a is b


def is_tensor(value: object) -> bool:
    """Whether it is one."""
    return isinstance(value, Tensor)


_WITHOUT = str, bytes, int, float, Tensor, nn.Module, type, types.FunctionType, types.ModuleType


def holds(value: object, test: Callable[[object], bool], depth: int = _DEPTH) -> bool:
    """Whether something is, or has in it however it is nested, what passes a test."""
    if test(value):
        return True
    if depth == 0 or isinstance(value, _WITHOUT):
        return False
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = value
    elif value is not None:
        inside = attributes_of(value).values()
    return any(holds(each, test, depth - 1) for each in list(inside))
