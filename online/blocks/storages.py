"""What the storages of the program hold: by storage, by number in the engine, and by what it was made from. [torch]"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import UntypedStorage

from online.blocks.recipes import Content, Known, Notice, Recipe
from online.blocks.record import enter
from online.blocks.regions import Regions
from online.engines.growing import GrowingEngine

T = TypeVar("T")


def _done(waiting: list[T], i: int, one: T) -> None:
    """One of those waiting has been dealt with, and goes only now: after Ctrl-C it is dealt with again. Others may have come
    behind it, or another thread been faster."""
    if i < len(waiting) and waiting[i] is one:
        del waiting[i]


def _places(bits: int) -> Iterator[int]:
    """Which bits are set; few are, of many."""
    while bits:
        last = bits & -bits
        yield last.bit_length() - 1
        bits ^= last


class Storages:
    """The contents of the block's storages, and what the program has dropped without the engine knowing yet.

    by_key  contents by the key of the storage of the program that holds them
    given   of those made outside, by the memory they are in
    met     numbers of those
    died    notices of storages the program has dropped; their contents are then in ``dead``
    dead    numbers of contents of such storages
    unread  contents nobody needs any more
    """

    def __init__(self, engine: GrowingEngine) -> None:
        self._engine = engine
        self.by_key: dict[int, Content] = {}
        self.given = Regions()
        self.met: set[int] = set()
        self.died: list[Notice] = []
        self.dead: list[int] = []
        self.unread: list[Known] = []
        self._of_number: list[Known | None] = []  # of each storage of the engine
        self._recipes: list[weakref.ref[Recipe] | None] = []  # of each op of the engine
        self._readers: defaultdict[int, list[int]] = defaultdict(list)  # of each storage of the engine; see readers
        self._ops_seen = 0

    def add(self, s: int, size_bytes: int, recipe: Recipe | None, storage: UntypedStorage) -> Content:
        """What has come to be at a storage of the program."""
        content = Content(s, size_bytes, recipe)
        known = Known(content, self.unread.append)
        known.number = s
        if s == len(self._of_number):
            self._of_number.append(known)
        else:
            enter(self._of_number, s, known)
        if recipe is not None:
            recipe.makes.append(known)
        content.at = notice = Notice(storage, self.died.append)
        notice.key, notice.known = storage._cdata, known
        self.by_key[notice.key] = content
        return content

    def at_number(self, s: int) -> Content | None:
        """The content of that number, if somebody still needs it."""
        known = self._of_number[s] if s < len(self._of_number) else None
        return None if known is None else known()

    def set_recipe(self, op: int, recipe: Recipe | None) -> None:
        """How an op that has run runs again; None: it cannot."""
        enter(self._recipes, op, None if recipe is None else weakref.ref(recipe))

    def recipe(self, op: int) -> Recipe | None:
        """How an op runs again, if that is known and somebody still needs it."""
        known = self._recipes[op] if op < len(self._recipes) else None
        return known() if known is not None else None

    def forget(self) -> None:
        """Storages the program has dropped since hold nothing any more."""
        died = self.died
        while died:
            i = len(died) - 1
            notice = died[i]
            content = notice.known()
            if content is not None and content.at is notice:
                self.dead.append(content.number)
                content.at = None
                if self.by_key.get(notice.key) is content:
                    del self.by_key[notice.key]
            _done(died, i, notice)

    def bury(self) -> None:
        """Tell the engine what the program has dropped since."""
        engine, dead, unread = self._engine, self.dead, self.unread
        self.forget()
        while dead:
            i = len(dead) - 1
            number = dead[i]
            engine.drop(number)
            _done(dead, i, number)
        while unread:
            i = len(unread) - 1
            known = unread[i]
            engine.discard(known.number)
            _done(unread, i, known)

    def disown(self, content: Content) -> None:
        """Nobody knows whether a content has been written over. What lies there is the program's; where something is to be made
        again from the content, that is made again, too."""
        notice = content.at
        if notice is None or not self._engine.resident[content.number]:
            return
        content.at = None
        if self.by_key.get(notice.key) is content:
            del self.by_key[notice.key]
        self._engine.drop(content.number)

    def made_from(self, *contents: Content) -> dict[Content, None]:
        """They, and all that can be made again only from what they hold now."""
        found = dict.fromkeys(contents)
        stack = list(contents)
        while stack:
            for other in self._made_of(stack.pop()):
                if other not in found:
                    found[other] = None
                    stack.append(other)
        return found

    def alive_from(self, contents: Iterable[Content]) -> dict[Content, frozenset[Content]]:
        """For each content what the program has of all that can be made again only from what it holds now."""
        alive: list[Content] = []
        found: dict[Content, int] = {}  # a bit for each of those
        asked = list(contents)
        stack = asked.copy()
        while stack:
            content = stack[-1]
            made = [] if content in found else self._made_of(content)
            if missing := [other for other in made if other not in found]:
                stack += missing
                continue
            stack.pop()
            if content not in found:
                bits = 0
                for other in made:
                    bits |= found[other]
                if content.at is not None and content.made_by is not None:
                    bits |= 1 << len(alive)
                    alive.append(content)
                found[content] = bits
        several = {found[content] for content in asked}
        sets = {bits: frozenset(map(alive.__getitem__, _places(bits))) for bits in several}
        return {content: sets[found[content]] for content in asked}

    def _made_of(self, content: Content) -> list[Content]:
        """What somebody still needs of what ops made that have read it since it was last fixed."""
        recipes = [self.recipe(op) for op in self._readers_of(content)]
        made = [known() for recipe in recipes if recipe is not None for known in recipe.makes]
        return [other for other in made if other is not None]

    def _readers_of(self, content: Content) -> list[int]:
        """The ops that have read it since it was last fixed. Found when asked for: most blocks never write to what stays."""
        engine, readers = self._engine, self._readers
        for op in range(self._ops_seen, engine.ops):
            for s in engine.inputs(op):
                readers[s].append(op)
        self._ops_seen = engine.ops
        return readers.get(content.number, [])

    def add_reader(self, op: int) -> None:
        """An op reads its inputs, although they have been fixed since it was declared."""
        for s in self._engine.inputs(op):
            self._readers[s].append(op)

    def fix(self, content: Content) -> None:
        """It cannot be made again from now on, and what has read it is not asked for any more."""
        content.made_by = None
        self._readers.pop(content.number, None)

    def clear(self) -> None:
        """At the end of the block: the program's storages are its own."""
        self.by_key.clear()
        self.given.clear()
