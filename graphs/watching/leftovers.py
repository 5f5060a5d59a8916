"""Tensors that a step leaves beside its loss: a planned step does not make them, and must not seem to. [torch]"""

from __future__ import annotations

import contextlib
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphs.errors import InputError
from graphs.torch_private.patching import ABSENT

_DEPTH = 5  # of containers and objects inside of each other


class NotMade:
    """Stands where plain PyTorch's forward would have left a tensor: whoever uses it is told.

    It is no tensor for ``isinstance`` either: PyTorch would look for one inside of it, and crash.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def what(self) -> str:
        """What messages call it."""
        return self._what

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

    holder   a container, an object, a class or a variable of a function, from which ``keys`` lead to the place: keys of dicts,
             names of attributes
    keys     with the last one that of the place itself; where that is in a list, set or deque, those that lead to this
    kinds    of what lies at each key on the way, the list, set or deque included
    mark     what is put there
    indices  in a list or deque: entries that each step gives a tensor
    grows    whether each step adds to it: 1 at its end, -1 at its front, 0 not at all
    """

    holder: Any
    keys: tuple[Any, ...]
    kinds: tuple[type, ...]
    mark: NotMade
    indices: tuple[int, ...] = ()
    grows: int = 0

    @property
    def place(self) -> Hashable:
        """The same for what is the same place."""
        return id(self.holder), self.keys, len(self.kinds)

    @property
    def _is_listed(self) -> bool:
        return len(self.keys) == len(self.kinds)

    def container(self, *, made: bool = False) -> Any:
        """What it is in now; None where the program has put something else on the way. ``made``: what is missing is made."""
        at = self.holder
        for key, kind in zip(self.keys, self.kinds, strict=False):
            inside = value_at(at, key)
            makes = kind in _MADE_EMPTY or (is_a(at, defaultdict) and at.default_factory is kind)
            if inside is ABSENT and made and makes:  # the program empties what it is in before each step
                put(at, key, inside := kind())
            if type(inside) is not kind:
                return None
            at = inside
        return at

    def after_step(self) -> None:
        """Have it say that a planned step has made none."""
        container = self.container(made=True)
        if container is not None:
            self._mark(container)

    def _mark(self, container: Any) -> None:
        if not self._is_listed:
            put(container, self.keys[-1], self.mark)
            return
        for i in self.indices:
            put(container, i, self.mark)
        if self.grows and not any(type(entry) is NotMade for entry in self._newest(container)):  # one is enough
            add(container, self.mark, front=self.grows < 0)

    def _newest(self, container: Any) -> Iterable[Any]:
        if is_a(container, set):
            return _listed(container)
        return [container[0 if self.grows < 0 else -1]] if len(container) else []

    @contextlib.contextmanager
    def shown(self, there: bool) -> Iterator[None]:
        """With the mark there for a while, or without."""
        container = self.container()
        if container is None:
            yield
            return
        before = _listed(container) if self._is_listed else value_at(container, self.keys[-1])
        if there:
            self._mark(container)
        elif self._is_listed:
            fill(container, [entry for entry in _listed(container) if type(entry) is not NotMade])
        elif before is not ABSENT:
            put(container, self.keys[-1], NotMade(""))
        try:
            yield
        finally:
            if self._is_listed:
                fill(container, before)
            elif before is ABSENT:
                if value_at(container, self.keys[-1]) is not ABSENT:
                    take(container, self.keys[-1])
            else:
                put(container, self.keys[-1], before)


GROWING = list, set, deque
FIXED = tuple, frozenset
_MADE_EMPTY = (dict, *GROWING)


def is_a(one: object, *kinds: type) -> bool:
    """Whether something is of one of these classes; ``isinstance`` asks the object, which may do anything."""
    return issubclass(type(one), kinds)


# What a container's own class does beside is no matter here: it may check what it is given.


def add(container: Any, entry: object, *, front: bool = False) -> None:
    """Add to a list, set or deque."""
    if is_a(container, set):
        set.add(container, entry)
    elif is_a(container, list):
        list.insert(container, 0 if front else len(container), entry)
    else:
        (deque.appendleft if front else deque.append)(container, entry)


def _listed(container: Any) -> list[Any]:
    return list(set.__iter__(container) if is_a(container, set) else container)


def fill(container: Any, entries: Sequence[Any]) -> None:
    """Have a list, set or deque hold just these."""
    kind: Any = next(each for each in GROWING if is_a(container, each))
    kind.clear(container)
    (set.update if kind is set else kind.extend)(container, entries)


def value_at(holder: Any, key: Any) -> Any:
    """An entry or an attribute; ABSENT where there is none."""
    if is_a(holder, dict):
        return dict.get(holder, key, ABSENT)
    if is_a(holder, list, deque):
        return holder[key] if key < len(holder) else ABSENT
    return attributes_of(holder).get(key, ABSENT)


def attributes_of(holder: Any) -> Mapping[str, Any]:
    """The attributes of an object, those in slots among them, of a class, or of a variable of a function (``cell_contents``)."""
    if is_a(holder, types.CellType):
        try:
            return {"cell_contents": holder.cell_contents}
        except ValueError:  # nothing yet
            return {}
    try:
        found = object.__getattribute__(holder, "__dict__") if not is_a(holder, type) else vars(holder)
    except AttributeError:
        found = {}
    slots = {
        name: member
        for kind in type(holder).__mro__
        if "__slots__" in vars(kind)
        for name, member in vars(kind).items()
        if is_a(member, types.MemberDescriptorType)
    }
    if not slots:
        return found if is_a(found, Mapping) else {}
    values = {name: _slot(member, holder) for name, member in slots.items()}
    return {**{name: value for name, value in values.items() if value is not ABSENT}, **found}


def _slot(member: types.MemberDescriptorType, holder: Any) -> Any:
    try:
        return member.__get__(holder)
    except AttributeError:
        return ABSENT


def put(holder: Any, key: Any, value: object) -> None:
    """Have something this entry or attribute."""
    if is_a(holder, dict):
        (OrderedDict if is_a(holder, OrderedDict) else dict).__setitem__(holder, key, value)
    elif is_a(holder, list, deque):
        kind: Any = list if is_a(holder, list) else deque
        if key < len(holder):
            kind.__setitem__(holder, key, value)
        else:
            add(holder, value)
    elif is_a(holder, type):
        type.__setattr__(holder, key, value)
    elif is_a(holder, types.CellType):
        holder.cell_contents = value
    else:
        object.__setattr__(holder, key, value)


def take(holder: Any, key: Any) -> None:
    """Have something no such entry or attribute."""
    if is_a(holder, dict):
        (OrderedDict if is_a(holder, OrderedDict) else dict).__delitem__(holder, key)
    elif is_a(holder, type):
        type.__delattr__(holder, key)
    elif is_a(holder, types.CellType):
        del holder.cell_contents
    else:
        object.__delattr__(holder, key)


def leftovers_in(holder: Any, key: str, box: Any, before: Sequence[Any], name: str, *, once: bool) -> list[Leftover]:
    """Of a container of the model's, its attribute ``key``, that held ``before`` (``content_of``) before a call, and now more or
    others. ``once``: there is one such call, so that what is in it may be there to be filled by each."""
    known = set(map(id, before))
    kinds = (type(box),)
    if is_a(box, dict):
        new = [entry for entry, value in box.items() if id(value) not in known and holds_tensor(value)]
        found = [Leftover(holder, (key, entry), kinds, NotMade(f"{name}[{entry!r}]")) for entry in new]
        if once:
            values = [box[entry] for entry in new]
            pairs = zip(found, values, strict=True)
            return [each for one, v in pairs for each in ([one] if is_a(v, Tensor, *FIXED, list) else deeper(one, v))]
        return found
    entries = list(box)
    at = [i for i, entry in enumerate(entries) if id(entry) not in known and holds_tensor(entry)]
    if not at:
        return []
    stays = is_a(box, set) or (len(before) <= len(entries) and all(map(operator.is_, before, entries)))
    indices = () if stays else tuple(at)
    return [Leftover(holder, (key,), kinds, NotMade(f"an entry of {name}"), indices, grows=int(stays))]


def deeper(leftover: Leftover, value: Any) -> list[Leftover]:
    """Where the tensors lie in something that is at the place of a leftover and stays there from call to call."""
    keys, kinds, name = leftover.keys, (*leftover.kinds, type(value)), leftover.mark.what
    if is_a(value, *GROWING):
        return [Leftover(leftover.holder, keys, kinds, NotMade(f"an entry of {name}"), grows=1)]
    found = []
    for key, inside in list((value if is_a(value, dict) else attributes_of(value)).items()):
        if not holds_tensor(inside):
            continue
        mark = NotMade(f"{name}[{key!r}]" if is_a(value, dict) else f"{name}.{key}")
        one = Leftover(leftover.holder, (*keys, key), kinds, mark)
        found += [one] if is_a(inside, Tensor, tuple) else deeper(one, inside)
    return found


_WITHOUT = str, bytes, int, float, nn.Module, type, types.FunctionType, types.ModuleType


def holds_tensor(value: object, depth: int = _DEPTH) -> bool:
    """Whether something is a tensor, or has one in it however it is nested."""
    if isinstance(value, Tensor):
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
    return any(holds_tensor(each, depth - 1) for each in list(inside))
