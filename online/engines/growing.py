"""The engine where the program is not known beforehand: storages and ops are declared as they come, and mostly run at once.

Nothing makes views here, so a tensor and its storage have the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from online.engines.engine import Engine, Option
from online.heuristics import Heuristic

_BLOCK = 256  # storages whose entries are made together


class GrowingEngine(Engine):
    """An ``Engine`` to which storages and ops are added while it runs, and whose waiting ops yield (``Option.YIELD``).

    An op must not read a storage that the program has dropped. So first runs leave nothing to reclaim, and run at once where
    they can, whatever happens to what a rebuild has read.

    options       further ones
    kept          storages that stay in memory until the program drops them
    thrash_limit  stop when all runs take this many times what the first runs took until then
    """

    __slots__ = ("_declared", "_held", "kept", "thrash_limit")

    def __init__(
        self,
        budget_bytes: int | None,
        heuristic: Heuristic,
        *,
        thrash_limit: float,
        seed: int = 0,
        reclaim: bool = False,
        options: Collection[Option] = (),
    ) -> None:
        super().__init__(budget_bytes, heuristic, seed=seed, reclaim=reclaim, options=(Option.YIELD, *options))
        self._at_once = True
        self._lazy = False  # what the program drops is gone with its bytes, whatever the rule
        self.kept: set[int] = set()
        self._held: Counter[int] = Counter()
        self.thrash_limit = thrash_limit
        self._declared = 0

    def _grow(self) -> None:
        first = len(self.size_bytes)
        numbers = range(first, first + _BLOCK)
        for column in (self.size_bytes, self._weight, self._locks, self._pending):
            column += [0] * _BLOCK
        for flags in (self.resident, self._pinned, self._defined):
            flags += [False] * _BLOCK
        self._storage += numbers
        self._views += [(t,) for t in numbers]
        self._producer += [-1] * _BLOCK
        self.pool.add(_BLOCK)
        self.relations.add(_BLOCK)

    def _new_storages(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """New storages of these sizes, and the tensors of those numbers."""
        first = self._declared
        self._declared = first + len(sizes)
        while self._declared > len(self.size_bytes):
            self._grow()
        self.size_bytes[first : self._declared] = self._weight[first : self._declared] = sizes
        return tuple(range(first, self._declared))

    def declare(self, reads: tuple[int, ...], sizes: tuple[int, ...], workspace_bytes: int, time_ns: int = 0) -> int:
        """A new op that makes new storages of these sizes: its number."""
        op, makes = len(self._inputs), self._new_storages(sizes)
        for s in makes:
            self._producer[s] = op
        self._inputs.append(reads)
        self._reads.append(reads)
        self._outputs.append(makes)
        self._makes.append(makes)
        self._time_ns.append(time_ns)
        self._made_bytes.append(sum(sizes))
        self._workspace_bytes.append(workspace_bytes)
        return op

    def holds(self, size_bytes: int) -> int:
        """A new storage that is there from the start and never goes: its number."""
        (s,) = self._new_storages((size_bytes,))
        self._pinned[s] = self._defined[s] = True
        self.kept.add(s)
        self.preload(s)
        return s

    def fits(self, reads: tuple[int, ...], made_bytes: int) -> bool:
        """Whether all of these are in memory and so many bytes fit beside what is: then an op can run at once."""
        if self._at_once and self.used_bytes + made_bytes <= self.budget_bytes:
            defined = self._defined
            for s in reads:
                if not defined[s]:
                    break
            else:
                return True
        return False

    def ran(self, reads: tuple[int, ...], sizes: tuple[int, ...], workspace_bytes: int, time_ns: int) -> int:
        """An op has run that fitted: its number."""
        op = self.declare(reads, sizes, workspace_bytes, time_ns)
        self._called = op
        self._ran_at_once(op, self.used_bytes + self._made_bytes[op] + workspace_bytes)
        return op

    def lift(self) -> None:
        """From now on without a budget, and without a limit of time: each op is run again once at the most."""
        self.budget_bytes = self.thrash_limit = self.limit_ns = float("inf")
        self.reclaim = False

    def _materialize(self, op: int, wanted: int, *, first: bool) -> None:
        if self.thrash_limit < float("inf"):
            self.limit_ns = (self.thrash_limit - 1) * (self.clock - 1 - self._counters.recomputed_ns)
        super()._materialize(op, wanted, first=first)

    def accessed(self, s: int) -> bool:
        """A storage is read; whether it is in memory."""
        self.pool.touch(s, self.clock)
        return self._defined[s]

    def bring(self, s: int) -> None:
        """Have a storage in memory now. Raises OutOfMemory."""
        if not self.accessed(s):
            self._materialize(self._producer[s], s, first=False)

    def keep_until_dropped(self, s: int) -> None:
        """Have a storage in memory until the program drops it. Raises OutOfMemory."""
        self.bring(s)
        self._lock(s)
        self.kept.add(s)

    def keep_no_longer(self, s: int) -> None:
        """What was kept may be evicted again."""
        if s in self.kept:
            self.kept.discard(s)
            if not self._pinned[s]:
                self._unlock(s)

    def hold(self, s: int) -> None:
        """Have a storage in memory until ``let_go``. Raises OutOfMemory."""
        self.bring(s)
        self._lock(s)
        self._held[s] += 1

    def let_go(self, s: int) -> None:
        """Undo one ``hold``. What was held may have been written over since, and be gone."""
        self._held[s] -= 1
        if self.resident[s]:
            self._unlock(s)
        else:
            self._locks[s] -= 1

    def drop(self, s: int) -> None:
        """The program holds no reference to storage ``s`` any more; what was kept is not kept any more."""
        self.keep_no_longer(s)
        super().drop(s)
        if self.pool.compiled is not None:
            self.pool.compiled.net.dropped[s] = True

    def discard(self, s: int) -> None:
        """Nothing will read storage ``s`` again."""
        if self.resident[s] and not self._locks[s] and not self._pinned[s]:
            self._counters.released += 1
            self._evict(s)

    def took(self, op: int, time_ns: int) -> None:
        """The time of an op that is running for the first time."""
        self._time_ns[op] = time_ns

    def needed(self, op: int, workspace_bytes: int) -> int:
        """An op that is running for the first time takes so much workspace, if not more: bytes in memory with it."""
        if workspace_bytes > self._workspace_bytes[op]:
            self._workspace_bytes[op] = workspace_bytes
        asked = self.used_bytes + self._made_bytes[op] + self._workspace_bytes[op]
        if asked > self.peak_bytes:
            self.peak_bytes = asked
        return asked

    @property
    def ops(self) -> int:
        """How many have been declared."""
        return len(self._inputs)

    def inputs(self, op: int) -> tuple[int, ...]:
        """What it reads, repeats included."""
        return self._inputs[op]

    def outputs(self, op: int) -> tuple[int, ...]:
        """What it makes."""
        return self._makes[op]

    def cost(self, op: int) -> tuple[int, int]:
        """Time and workspace of an op."""
        return self._time_ns[op], self._workspace_bytes[op]

    def give_up(self) -> None:
        """After an op that failed: none is under way any more, so ops hold nothing and no rebuild is planned."""
        for s, count in enumerate(self._locks):
            usual = self._held.get(s, 0)
            if s in self.kept and not self._pinned[s]:
                usual += 1
            if count > usual:
                self._locks[s] = usual
                if not usual and self.resident[s] and not self._pinned[s]:
                    self.pool.join(s)
        self._planned.clear()
        for s, count in enumerate(self._pending):
            if count:
                self._pending[s] = 0
                self.pool.spare(s, False)
