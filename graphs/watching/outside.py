"""Where tensors of a trace have been left outside of what a model has as attributes: names and containers of the program. [torch]

A hook that keeps an activation in a dict, a loss that notes its terms, a list of auxiliary losses: after the trace tensors of it
lie there that nobody can use. What refers to them is followed up to something that was there before the trace, and from there to
a name, so that the place is found again where the program has put another container there.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphs.watching.leftovers import FIXED, GROWING, Leftover, NotMade, attributes_of, fill, is_a, put

_UP = 5  # containers inside of each other
_FEW = 64  # things that gc.get_referrers compares each reference with; more of them take as long each
_TOGETHER = 1_000  # objects that are looked at together for what they refer to
_FROZEN = 5_000  # objects; Python 3.12 itself freezes some hundreds when it starts
_LISTED = GROWING + FIXED
_BOXES = (dict, *GROWING)
_NAMED = nn.Module, Tensor, type, types.CellType, types.ModuleType, types.FunctionType  # not looked for any further up
_MOST_NAMES = 200
_LIBRARIES = {"torch", "functools", "weakref", "graphs", "planner", "online"}  # what lies in objects of these is theirs
_SKIPPED = types.FrameType, types.GeneratorType, types.BuiltinFunctionType


class Since:
    """What has come to be during a trace. Python's collector leaves alone meanwhile what was there before.

    made    the tensors of the trace
    before_last  how many of them there were when the last call of the forward began; None: there was one
    backward     how many when the latest backward began; None: there was none
    born    ids of objects that came to be in the last call, or later; born_before: in those before
    """

    def __init__(self, made: list[weakref.ref[Tensor]]) -> None:
        self.made = made
        self.before_last: int | None = None
        self.backward: int | None = None
        self.born: set[int] = set()
        self.born_before: set[int] = set()
        self._calls = 0
        self._freezes = gc.get_freeze_count() < _FROZEN  # else the program has frozen what it has, and nothing can be told apart

    def __enter__(self) -> Since:
        if self._freezes:
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def thaw(self) -> None:
        """Python's collector goes through everything again."""
        if self._freezes:
            self._freezes = False
            gc.unfreeze()

    def call(self) -> None:
        """A call of the forward begins."""
        self._calls += 1
        if self._calls > 1:
            self.before_last = len(self.made)
            self.born_before = self._now()
            if self._freezes:
                gc.freeze()

    def end(self) -> None:
        """The trace has ended."""
        self.born = self._now()
        self.thaw()

    def alive(self) -> list[tuple[int, Tensor]]:
        """The tensors that are still there, with their numbers."""
        return [(i, tensor) for i, one in enumerate(self.made) if (tensor := one()) is not None]

    def _now(self) -> set[int]:
        """Ids of what has come to be so far; not looked for where no tensor has stayed."""
        if not self._collected() or not self._freezes:
            return set()
        return set(map(id, gc.get_objects()))

    def _collected(self) -> bool:
        """Whether tensors stay when all garbage is collected: it lies nowhere. Cheap while what was there before is frozen."""
        if self.alive():
            gc.collect()
        return bool(self.alive())


@dataclass(frozen=True, slots=True)
class _Edge:
    """What refers to something, and by which key; None: as an entry of what has no keys, or as its attributes."""

    at: Any
    key: Hashable


@dataclass(frozen=True, slots=True)
class Left:
    """What a trace has left.

    leftovers  the places, each once
    traced     ids of its tensors, and of what it has made to hold them
    slots      where these lie in what was there before
    doubtful   ids of containers that may have been there before: Python's collector does not see all of them
    """

    leftovers: list[Leftover]
    traced: set[int]
    slots: list[_Edge]
    doubtful: set[int]

    def take_out(self) -> None:
        """Leave nothing of it in what was there before."""
        for slot in self.slots:
            at, key = slot.at, slot.key
            if is_a(at, *GROWING):
                stay = [entry for entry in at if id(entry) not in self.traced]
                if len(stay) < len(at):
                    fill(at, stay)
            elif id(_entry(at, key)) in self.traced:  # what was there is not known
                put(at, key, NotMade(_within(_named(at), at, key)))


def left_outside(since: Since, own: Collection[int], lengths: Mapping[int, int]) -> Left:
    """Where tensors of the trace lie.

    own      ids of containers that are not the program's
    lengths  of lists before the trace, by id, as far as they are known
    """
    if not since.alive():
        return Left([], set(), [], set())
    return _Search(since, own, lengths).left()


class _Search:
    """Follows references upwards, for many things at a time.

    _traced  what is, or was made to hold, tensors of the trace: by id, whether all of these are of calls before the last one
    """

    def __init__(self, since: Since, own: Collection[int], lengths: Mapping[int, int]) -> None:
        self._born, self._born_before = since.born, since.born_before
        self._own = {*own, id(self._born), id(self._born_before)}
        self._lengths = lengths
        self._traced: dict[int, bool] = {}
        self._keep: list[Any] = []  # no id is given twice
        self._edges: dict[int, list[_Edge]] = {}  # by id: what refers to what has been looked for
        self._own |= {id(self._traced), id(self._keep)}
        self._alone: set[int] = set()  # ids of tensors that were made in the backward, of which there is one
        self._slots: list[_Edge] = []  # where traced things lie in what was there before
        last = 0 if since.before_last is None else since.before_last
        self._tensors: list[Tensor] = []
        self._own.add(id(self._tensors))
        for number, tensor in since.alive():
            self._tensors.append(tensor)
            self._traced[id(tensor)] = number < last
            if since.before_last is None or (since.backward is not None and number >= since.backward):
                self._alone.add(id(tensor))

    def left(self) -> Left:
        """All of it."""
        level: list[Any] = self._tensors
        for _ in range(_UP):
            level = self._above(level)
            if not level:
                break
        found: dict[Hashable, Leftover] = {}
        containers = {id(slot.at): slot.at for slot in self._slots}
        self._own.add(id(containers))
        names = _Names(self._referring, [one for one in containers.values() if not _has_name(one)])
        slots = [self._of_owner(slot, names) for slot in self._slots]
        for slot in {(id(slot.at), slot.key): slot for slot in slots}.values():
            leftover = self._leftover(slot, names)
            if leftover is not None:
                found.setdefault(leftover.place, leftover)
        return Left(
            list(found.values()), set(self._traced), slots, {id(slot.at) for slot in slots} & (self._born | self._born_before)
        )

    def _above(self, level: list[Any]) -> list[Any]:
        """Note where these lie; what the trace has put them in, which lies somewhere itself."""
        found = self._referring(level)
        boxes = {id(slot.at): slot.at for slot, _ in found if not _has_name(slot.at) and not _is_theirs(slot.at)}
        self._own.add(id(boxes))
        made = self._made_for_objects(list(boxes.values()))
        higher: dict[int, Any] = {}
        for slot, child in found:
            at = slot.at
            if _is_theirs(at):
                continue
            if id(at) in made or self._is_new(at, child):
                self._traced[id(at)] = self._traced[child] and self._traced.get(id(at), True)
                if child in self._alone:
                    self._alone.add(id(at))
                higher[id(at)] = at
            else:
                self._slots.append(slot)
        self._keep += higher.values()
        return list(higher.values())

    def _made_for_objects(self, boxes: list[Any]) -> set[int]:
        """Of containers, the ids of those that are the attributes of objects that the trace has made."""
        return {
            child
            for edge, child in self._referring(boxes)
            if edge.key is None and id(edge.at) in self._born | self._born_before and not is_a(edge.at, *_LISTED)
        }

    def _is_new(self, at: Any, child: int) -> bool:
        """Whether what has come to refer to something traced was made for it. Python's collector does not see a dict before there
        is something to collect in it, so that of an earlier call, or of the one backward, it may have been there."""
        if is_a(at, *FIXED):
            return True
        if is_a(at, dict) and (self._traced[child] or child in self._alone):
            return False
        return id(at) in (self._born_before if self._traced[child] else self._born)

    def _referring(self, children: Sequence[Any]) -> list[tuple[_Edge, int]]:
        """What of the program refers to some of these, by which keys; with the id of what is referred to."""
        unknown = [child for child in children if id(child) not in self._edges]
        self._own |= {id(children), id(unknown)}
        if unknown:
            self._look_for(unknown)
        return [(edge, id(child)) for child in children for edge in self._edges[id(child)]]

    def _look_for(self, children: list[Any]) -> None:
        """Walk through all objects there are."""
        edges: dict[int, list[_Edge]] = {id(child): [] for child in children}
        self._keep += children
        for one in referrers_of(children):
            kind = type(one)
            if id(one) in self._own or issubclass(kind, _SKIPPED) or kind in (_Edge, _Search, _Names, Leftover):
                continue
            if issubclass(kind, dict):
                inside = list(dict.items(one))
            elif issubclass(kind, _LISTED):
                inside = [(None, value) for value in list(one)]
            else:
                attributes = attributes_of(one)
                inside = list(attributes.items())  # and of the dict that holds them
                inside += [(None, child) for child in children if child is attributes or _is_of_class(child, one)]
            for key, value in inside:
                if id(value) in edges:
                    edges[id(value)].append(_Edge(one, key))
        self._edges.update(edges)

    def _of_owner(self, slot: _Edge, names: _Names) -> _Edge:
        """Of the dict of an object's, or a class's, attributes that object, or class."""
        owner = names.owner(slot.at)
        return slot if owner is None else _Edge(owner, slot.key)

    def _leftover(self, slot: _Edge, names: _Names) -> Leftover | None:
        at = slot.at
        holder, keys, kinds, name = names.of(at)
        if holder is at and not is_a(at, *_NAMED, dict) and id(at) in self._born | self._born_before:
            return None  # made by the trace, and found nowhere
        if not is_a(at, *GROWING):
            if self._traced.get(id(_entry(at, slot.key)), True):  # an earlier call has put it there, and the last one did not
                return None
            if is_a(holder, nn.Module) and not keys:
                name = type(holder).__name__
            return Leftover(holder, (*keys, slot.key), kinds, NotMade(_within(name, at if keys else holder, slot.key)))
        mark = NotMade(f"an entry of {name}")
        if is_a(at, set):
            return Leftover(holder, keys, kinds, mark, grows=1)
        entries = list(at)
        traced = [i for i, entry in enumerate(entries) if id(entry) in self._traced]
        if len(entries) == self._lengths.get(id(at), -1) and not (is_a(at, deque) and at.maxlen == len(entries)):
            return Leftover(holder, keys, kinds, mark, indices=tuple(traced))
        latest = [i for i in traced if not self._traced[id(entries[i])]]
        grows = 1 if not latest or latest[-1] == len(entries) - 1 else -1 if latest[0] == 0 else 0
        if len(latest) < len(traced):  # those of an earlier call are still there
            return Leftover(holder, keys, kinds, mark, grows=grows or 1)
        alone = any(id(entries[i]) in self._alone for i in traced)
        if grows and alone and len(traced) < len(entries):
            return Leftover(holder, keys, kinds, mark, grows=grows)
        # Each call gives these entries a tensor, or fills the list anew; of one call alone that cannot be told from growing.
        return Leftover(holder, keys, kinds, mark, indices=tuple(traced), grows=grows if alone else 0)


class _Names:
    """How containers and objects are found again: by what was there before and refers to them.

    referring  looks for what refers to some things
    """

    def __init__(self, referring: Any, things: list[Any]) -> None:
        self._above: dict[int, list[_Edge]] = defaultdict(list)
        level = things
        for _ in range(_UP):
            for edge, child in referring(level):
                self._above[child].append(edge)
            level = self._over(level)
            if not level or all(map(self._is_named, things)):
                break

    def _over(self, level: list[Any]) -> list[Any]:
        """What may lead to a name of these, and has not been looked for."""
        edges = [edge for one in level for edge in self._above[id(one)] if not _is_theirs(edge.at)]
        higher = {id(e.at): e.at for e in edges if id(e.at) not in self._above and not is_a(e.at, *_NAMED, *_LISTED)}
        return list(higher.values())[:_MOST_NAMES]

    def _is_named(self, at: Any) -> bool:
        """Whether it is known how it is found again from something that has a name of its own."""
        return _has_name(self.of(at)[0])

    def owner(self, at: Any, *, modules: bool = False) -> Any:
        """The object or class whose attributes a dict has; None: it is none, or that of a Python module."""
        module = _module_of(at)
        if module is not None:
            return module if modules else None
        for edge in self._above.get(id(at), []) if is_a(at, dict) else ():
            if edge.key is None and not is_a(edge.at, *_LISTED) and (modules or not is_a(edge.at, types.ModuleType)):
                return edge.at
        return None

    def of(self, at: Any, up: int = _UP) -> tuple[Any, tuple[Hashable, ...], tuple[type, ...], str]:
        """Holder, keys and kinds, as a Leftover has them, and what messages call it."""
        edges = self._above.get(id(at), [])
        owner = self.owner(at, modules=True)
        if is_a(owner, types.ModuleType):
            return at, (), (), ""
        if owner is not None:  # a dict of attributes
            return self.of(owner, up - 1) if up else (owner, (), (), _named(owner))
        is_listed = any(is_a(edge.at, *_LISTED) for edge in edges)
        for edge in edges if up and not is_a(at, *_NAMED) else ():
            if edge.key is None or _is_theirs(edge.at):
                continue
            holder, keys, kinds, name = self.of(edge.at, up - 1)
            has_name = bool(keys) or not is_a(holder, dict) or not name
            # An entry of a list may have another name for a while, that of a loop.
            if not has_name or (is_listed and not is_a(at, *_BOXES) and not keys and (is_a(holder, types.CellType) or not name)):
                continue
            return holder, (*keys, edge.key), (*kinds, type(at)), _within(name, edge.at if keys else holder, edge.key)
        if is_a(at, *_BOXES):
            return at, (), (), f"a {type(at).__name__} that the step fills"
        return at, (), (), _named(at)


def referrers_of(things: list[Any]) -> list[Any]:
    """What refers to some of these, of all that Python's collector sees."""
    if len(things) <= _FEW:
        return gc.get_referrers(*things)
    wanted, found, objects = set(map(id, things)), list[Any](), gc.get_objects()
    for i in range(0, len(objects), _TOGETHER):
        some = objects[i : i + _TOGETHER]
        if not wanted.isdisjoint(map(id, gc.get_referents(*some))):
            found += [one for one in some if not wanted.isdisjoint(map(id, gc.get_referents(one)))]
    return found


def _entry(at: Any, key: Hashable) -> Any:
    return dict.get(at, key) if is_a(at, dict) else attributes_of(at).get(str(key))


def _is_theirs(at: Any) -> bool:
    """Whether it is an object that is no matter of the program's."""
    if is_a(at, type):
        return str(at.__module__).partition(".")[0] in _LIBRARIES
    return not is_a(at, nn.Module, Tensor) and str(type(at).__module__).partition(".")[0] in _LIBRARIES


def _is_of_class(attributes: Any, one: Any) -> bool:
    """Whether a dict is that of a class, which shows it as another object."""
    if type(attributes) is not dict or not issubclass(type(one), type):
        return False
    return len(attributes) == len(vars(one)) and all(key in attributes for key in vars(one))


def _has_name(at: Any) -> bool:
    return is_a(at, *_NAMED) or _module_of(at) is not None


def _module_of(at: Any) -> types.ModuleType | None:
    """The Python module of which a dict has the names."""
    module = sys.modules.get(name) if is_a(at, dict) and type(name := dict.get(at, "__name__")) is str else None
    return module if is_a(module, types.ModuleType) and vars(module) is at else None


def _named(one: Any) -> str:
    return "a variable" if is_a(one, types.CellType) else one.__name__ if is_a(one, type) else type(one).__name__


def _within(name: str, at: Any, key: Hashable) -> str:
    """What messages call an entry or an attribute."""
    if not name:  # a global name
        return str(key)
    if is_a(at, types.CellType):
        return f"{name} of the step"
    return f"{name}[{key!r}]" if is_a(at, dict) else f"{name}.{key}"
