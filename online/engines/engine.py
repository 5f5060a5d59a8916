"""The DTR engine: computes, evicts, rebuilds, pins and releases. It knows no policy, no addresses and no torch.

Source: Kirisame et al., ICLR 2021, sections 2 and appendix C; where the paper is silent, the authors' simulator.

Ops read and make *tensors*; a tensor is one view of one *storage*, and storages are what memory is counted in and what is
evicted. Which storage goes is asked of ``victims``, by the scores of a ``Pool``; whether bytes in a row are there is asked of an
``Allocator``, if one is given; what a computation or an eviction does for real is told to a ``Driver``. Both a Graph (no views)
and an operator log drive the same engine.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from graphs.program import Call, Program
from online.allocators import HELD, Allocator, Block
from online.engines.victims import victims
from online.heuristics import Heuristic, Pool
from online.neighborhood import Relations

_Waiting = tuple[
    int, int, bool, list[int], int
]  # op, output it is run for, whether for the first time, what was missing, next of it
_YIELDED = -1  # in the place of the last of these


class Release(enum.StrEnum):
    """What happens when the program drops its last reference to a storage (appendix C.3 and D.2)."""

    EAGER = "eager"  # evict it at once; it can be rebuilt as an ancestor of something else
    IGNORE = "ignore"  # nothing
    BANISH = "banish"  # free it for good once none of its dependents is evicted, and pin those


class Option(enum.StrEnum):
    """What the paper's algorithm does not have (the first three), or its prototype alone has (the others)."""

    COUNTED = "counted"  # as ``reclaim``, but what the rebuild under way will read again stays
    YIELD = "yield"  # where nothing can be evicted, ops that wait for a rebuild let go of what they hold, each once
    NEXT_USE = "next_use"  # staleness is the time until the next use instead: not online, the program must be known
    SKIP_SMALL = "skip_small"  # storages below 1 % of the mean size are never evicted to make room
    SAMPLE = "sample"  # each search scores about 2 sqrt(n) of n storages, at random


class Driver(Protocol):
    """What really happens; the engine decides."""

    def compute(self, op: int) -> None:
        """Run ``op``: everything it reads is there, and there is room for what it makes."""

    def free(self, storage: int) -> None:
        """Drop ``storage``."""


@dataclass(slots=True)
class Counters:
    """What a run did.

    executions       ops run, repeats included
    recomputations   ops run again, and recomputed_ns: their time
    evictions        storages evicted to make room; released: storages evicted because the program dropped them
    searches         choices of what to evict: one storage each, or one range of addresses
    evaluations      scores computed for them, as by a scan of the pool each time
    inspected        pieces of address space looked at for them
    visits           storages looked at to keep neighbourhood sums
    deepest          most ops under way at a time: one waits for its inputs, one of which waits for its own, ...
    search_s         wall time spent choosing what to evict
    """

    executions: int = 0
    recomputations: int = 0
    recomputed_ns: int = 0
    evictions: int = 0
    released: int = 0
    searches: int = 0
    evaluations: int = 0
    inspected: int = 0
    visits: int = 0
    deepest: int = 0
    search_s: float = 0.0

    @property
    def metadata_accesses(self) -> int:
        """Scores computed and storages looked at for them: what figure 12 of the paper counts.

        Sums over e* are not kept up to date here, as in the authors' simulator, but computed where a bound does not do: so
        there are fewer visits. What costs h_DTR^local is the same, as it visits nothing.
        """
        return self.evaluations + self.visits


class OutOfMemory(Exception):
    """Nothing is left to evict and an op still does not fit.

    op            its number; -1: something that is there from the start does not fit
    asked_bytes   bytes in use if it had run
    held          storages in memory that must not be evicted
    short_bytes   with an allocator: the block that could not be had
    """

    def __init__(self, op: int, asked_bytes: int, held: list[int], short_bytes: int | None = None) -> None:
        super().__init__(op, asked_bytes, held, short_bytes)
        self.op = op
        self.asked_bytes = asked_bytes
        self.held = held
        self.short_bytes = short_bytes


class Thrashed(Exception):
    """The time spent on recomputation has passed the limit."""


class Engine:
    """Memory under a budget. Declare storages and ops, then ``call`` ops and ``drop`` storages in program order.

    budget_bytes  None: unlimited
    allocator     a new one; what fits is then what finds its blocks in it. None: what fits in the budget, byte for byte
    limit_ns      most time that recomputation may take in all; limit_runs: most recomputations in all; None: no limit
    reclaim       evict a dropped storage again as soon as the rebuild that needed it is done with it, and never keep a dropped
                  sibling of a rebuilt storage (not in the paper)
    options       see ``Option``
    awaiting      rules that sum over e* count what an op waits to make, as the authors' simulator does (see ``Exact``)

    used_bytes, peak_bytes, clock  bytes in memory now, the most so far, and the sum of the times of all ops run so far
    program_clock                  sum of the times of first runs so far
    resident                       of each storage, whether it is in memory now
    steps                          what happened, in time order: ``op``, or ``-1 - storage`` for one that left memory
    """

    # With more than 30 attributes an instance without slots loses CPython's fast access to them.
    __slots__ = (
        "_at_once", "_awaiting", "_banished", "_banishing", "_called", "_counters", "_counts", "_defined", "_dropped",
        "_inputs", "_lazy", "_locks", "_made_bytes", "_makes", "_outputs", "_pending", "_pinned", "_planned", "_producer",
        "_reads", "_storage", "_time_ns", "_uses", "_victims", "_views", "_weight", "_workspace_bytes", "allocator",
        "budget_bytes", "by_program", "clock", "driver", "limit_ns", "limit_runs", "next_use", "peak_bytes", "pool",
        "program_clock", "reclaim", "relations", "release", "resident", "size_bytes", "steps", "used_bytes", "yields",
    )  # fmt: skip

    def __init__(
        self,
        budget_bytes: int | None,
        heuristic: Heuristic,
        *,
        seed: int = 0,
        release: Release = Release.EAGER,
        reclaim: bool = False,
        options: Collection[Option] = (),
        awaiting: bool = False,
        limit_ns: float | None = None,
        limit_runs: int | None = None,
        allocator: Allocator | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.budget_bytes = float("inf") if budget_bytes is None else budget_bytes
        self.release = release
        self.reclaim = reclaim or Option.COUNTED in options
        self.by_program = heuristic.by_program
        self.next_use = Option.NEXT_USE in options
        self.yields = Option.YIELD in options
        self.limit_ns = float("inf") if limit_ns is None else limit_ns
        self.limit_runs = float("inf") if limit_runs is None else limit_runs
        self.allocator = allocator
        self.driver = driver
        self._counters = Counters()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.clock = 1
        self.program_clock = 1
        self.steps: list[int] = []
        self.relations = Relations()
        self.resident: list[bool] = []
        self.size_bytes: list[int] = []  # of each storage, like the four below the pool
        self.pool = Pool(
            heuristic,
            self.relations,
            self.size_bytes,
            seed=seed,
            next_use=self.next_use,
            skip_small=Option.SKIP_SMALL in options,
            sample=Option.SAMPLE in options,
        )
        self._victims = victims(heuristic, self.pool, allocator)
        self._views: list[tuple[int, ...]] = []  # tensors
        self._locks: list[int] = []
        self._pinned: list[bool] = []
        self._dropped = self.relations.dropped
        self._storage: list[int] = []  # of each tensor, like the three below
        self._weight: list[int] = []  # bytes a tensor adds: 0 for a view
        self._defined: list[bool] = []
        self._producer: list[int] = []
        self._inputs: list[tuple[int, ...]] = []  # tensors of each op, like the next; the five below are of each op too
        self._outputs: list[tuple[int, ...]] = []
        self._reads: list[tuple[int, ...]] = []  # the storages of these tensors
        self._makes: list[tuple[int, ...]] = []
        self._time_ns: list[int] = []
        self._made_bytes: list[int] = []
        self._workspace_bytes: list[int] = []
        self._awaiting = awaiting and heuristic.cost == "neighborhood"
        self._at_once = allocator is None and not self._awaiting and not self.reclaim  # see _ran_at_once
        self._banishing: set[int] = set()  # dropped, and waiting until what is made from them is there
        self._banished: set[int] = set()
        self._lazy = heuristic.cost == "demand"  # what is dropped goes first by its score, once room is needed
        self._counts = self._lazy or Option.COUNTED in options
        self._planned: set[int] = set()  # ops that the rebuild under way will run
        self._pending: list[int] = []  # how often they read each storage
        self._called = -1  # op of the last call
        self._uses: list[list[int]] = []  # of each storage, where next uses count: when it will be read, latest first

    @property
    def counters(self) -> Counters:
        """Counts so far."""
        inspected = self.allocator.inspected if self.allocator else 0
        return replace(self._counters, evaluations=self.pool.evaluations, visits=self.pool.visits, inspected=inspected)

    # Declarations

    def add_storage(self, size_bytes: int, *, pinned: bool = False) -> int:
        """A new storage; ``pinned``: once in memory it is never evicted."""
        self.size_bytes.append(size_bytes)
        self._views.append(())
        self.resident.append(False)
        self._locks.append(0)
        self._pinned.append(pinned)
        self._pending.append(0)
        self.pool.add()
        return self.relations.add()

    def add_op(self, inputs: Sequence[int], makes: Iterable[int], time_ns: int, workspace_bytes: int = 0) -> tuple[int, range]:
        """A new op: its number, and the numbers of the tensors it makes.

        inputs  tensors, in argument order, repeats included
        makes   storages, in output order; a storage made by an earlier op stands for a view of it
        """
        op, storage = len(self._inputs), self._storage
        first, made_bytes = len(storage), 0
        makes = tuple(makes)
        for s in makes:
            weight = 0 if self._views[s] else self.size_bytes[s]
            made_bytes += weight
            self._weight.append(weight)
            self._views[s] += (len(storage),)
            storage.append(s)
            self._defined.append(False)
            self._producer.append(op)
        outputs = range(first, len(storage))
        self._inputs.append(tuple(inputs))
        self._outputs.append(tuple(outputs))
        self._reads.append(tuple([storage[t] for t in inputs]))
        self._makes.append(makes)
        self._time_ns.append(time_ns)
        self._made_bytes.append(made_bytes)
        self._workspace_bytes.append(workspace_bytes)
        return op, outputs

    def _declare(self, like: Engine) -> None:
        """On a new engine, all that another one has declared and nothing more."""
        count = len(like.size_bytes)
        self.resident += [False] * count
        self._locks += [0] * count
        self._pending += [0] * count
        self._defined += [False] * len(like._storage)
        self.pool.add(count)
        self.relations.add(count)
        for name in ("size_bytes", "_views", "_pinned", "_storage", "_weight", "_producer", "_inputs", "_outputs", "_reads"):
            getattr(self, name).extend(getattr(like, name))
        for name in ("_makes", "_time_ns", "_made_bytes", "_workspace_bytes"):
            getattr(self, name).extend(getattr(like, name))

    def preload(self, s: int) -> None:
        """Pinned storage ``s`` is in memory from the start. Raises OutOfMemory, of no op, where an allocator has no room."""
        if self.allocator is not None and not self.allocator.preload(s, self.size_bytes[s]):
            raise self._out_of_memory(-1, self.used_bytes + self.size_bytes[s])
        self.resident[s] = True
        self.used_bytes += self.size_bytes[s]
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    # The program

    def call(self, op: int) -> None:
        """Run ``op`` for the first time. Raises OutOfMemory or Thrashed."""
        self._called = op
        asked = self.used_bytes + self._made_bytes[op] + self._workspace_bytes[op]
        if asked <= self.budget_bytes and self._at_once:
            defined = self._defined
            for t in self._inputs[op]:
                if not defined[t]:
                    break
            else:  # nothing can go meanwhile, so nothing is held
                if self.driver is not None:
                    self.driver.compute(op)
                self._ran_at_once(op, asked)
                return
        outputs = self._outputs[op]
        if self._awaiting:
            made = {s for t, s in zip(outputs, self._makes[op], strict=True) if self._views[s][0] == t}
            self.pool.awaiting(list(self._reads[op]), self._time_ns[op] * len(made))
        self._materialize(op, outputs[0] if outputs else -1, first=True)
        self.program_clock += self._time_ns[op]
        clock = self.program_clock if self.by_program else self.clock
        for s in self._makes[op]:
            self.pool.touch(s, clock)

    def _ran_at_once(self, op: int, asked: int) -> None:
        """``op`` has run for the first time, with all it reads there and room for all it makes, ``asked`` bytes with it."""
        if asked > self.peak_bytes:
            self.peak_bytes = asked
        self.steps.append(op)
        self._counters.executions += 1
        if not self._counters.deepest:
            self._counters.deepest = 1
        pool, before = self.pool, self.program_clock if self.by_program else self.clock
        time_ns = self._time_ns[op]
        self.clock += time_ns
        self.program_clock += time_ns
        self.used_bytes = asked - self._workspace_bytes[op]
        for t in self._outputs[op]:
            self._defined[t] = True
        self._relate(op)
        makes = self._makes[op]
        for s in makes if len(makes) < 2 else dict.fromkeys((*makes[1:], makes[0])):  # the first joins the pool last
            if not self.resident[s]:
                self.resident[s] = True
                self._arrive(s)
        pool.read(self._reads[op], before)
        after = self.program_clock if self.by_program else self.clock
        for s in makes:
            pool.touch(s, after)

    def drop(self, s: int) -> None:
        """The program holds no reference to storage ``s`` any more."""
        self._dropped[s] = True
        if self._lazy:
            self.pool.dropped(s)
        at_once = self.release is not Release.IGNORE and (self.pool.skips(s) if self._lazy else self.release is Release.EAGER)
        if at_once and self.resident[s] and not self._pinned[s]:
            self._counters.released += 1
            self._evict(s)
        if self.release is Release.BANISH:
            self._banish(s)

    def keep(self, tensors: Iterable[int]) -> None:
        """The program ends: have all of these in memory together, in this order. Raises OutOfMemory or Thrashed."""
        for t in tensors:
            if not self._defined[t]:
                self._materialize(self._producer[t], t, first=False)
            self._lock(self._storage[t])

    def play(self, program: Program, declared: Engine | None = None) -> None:
        """Declare what ``program`` declares, under the same numbers, and do what it does. For a new engine.

        declared  another engine that has declared it, and nothing else: then it need not be gone through again

        Raises OutOfMemory or Thrashed.
        """
        if declared is None:
            self.declare_program(program)
        else:
            self._declare(declared)
        for s in program.resident:
            self.preload(s)
        if self.next_use:
            self._uses = uses_of(program, self._storage)
        call, drop = self.call, self.drop
        for event in program.events:
            if event >= 0:
                if self.next_use:
                    self._look_ahead(program.calls[event])
                call(event)
            else:
                drop(-1 - event)
        self.keep(program.kept)

    def declare_program(self, program: Program) -> None:
        """All storages and ops of a program."""
        for s, size_bytes in enumerate(program.size_bytes):
            self.add_storage(size_bytes, pinned=s in program.pinned or s in program.resident)
        for call in program.calls:
            self.add_op(call.inputs, call.makes, call.time_ns, call.workspace_bytes)

    # The algorithm

    def _materialize(self, op: int, wanted: int, *, first: bool) -> None:
        """Run ``op`` for its output ``wanted``, rebuilding what it reads; pending ops wait on a stack of our own."""
        defined, storage = self._defined, self._storage
        pending: list[_Waiting] = []
        yielded: set[int] = set()  # depths of the stack whose op has yielded
        missing, at = self._queue(op, first), 0
        while True:
            while at < len(missing):
                t = missing[at]
                if defined[t]:
                    self._lock(storage[t])
                    at += 1
                    continue
                pending.append((op, wanted, first, missing, at))
                op, wanted, first = self._producer[t], t, False
                missing, at = self._queue(op, first), 0
            if len(pending) >= self._counters.deepest:
                self._counters.deepest = len(pending) + 1
            try:
                self._execute(op, wanted, first)
            except OutOfMemory:
                if not self.yields or not self._yield(pending, yielded):
                    raise
                continue
            yielded.discard(len(pending))
            if not pending:
                return
            op, wanted, first, missing, at = pending.pop()
            if at == _YIELDED:
                missing, at = self._queue(op, first), 0

    def _yield(self, pending: list[_Waiting], yielded: set[int]) -> bool:
        """Let an op that waits let go of what it holds: the longest waiting of those that hold what can go; whether one did.

        It gathers its inputs anew when its turn comes, and does not yield again: so two inputs that do not fit together are not
        rebuilt in turns for ever.
        """
        for depth, (op, wanted, first, missing, at) in enumerate(pending):
            held = list(self._reads[op])
            for t in missing[at:]:
                held.remove(self._storage[t])
            if depth not in yielded and not all(self._pinned[s] for s in held):
                for s in held:
                    self._unlock(s)
                pending[depth] = op, wanted, first, [], _YIELDED
                yielded.add(depth)
                return True
        return False

    def _queue(self, op: int, first: bool) -> list[int]:
        """Note the accesses of ``op``, lock what it reads and is there, and return what is not."""
        clock, pool = self.program_clock if self.by_program else self.clock, self.pool
        accessed = first or not self.by_program
        missing = []
        for t, s in zip(self._inputs[op], self._reads[op], strict=True):
            if accessed:
                pool.touch(s, clock)
            if self._defined[t]:
                self._lock(s)
            else:
                missing.append(t)
        if missing and self._counts:
            self._plan(op)
        return missing

    def _plan(self, op: int) -> None:
        """Count how often the rebuild of what ``op`` reads will read each storage, before it begins.

        What is evicted again before its last read is planned again when it is found missing.
        """
        planned, pending = self._planned, self._pending
        stack = [] if op in planned else [op]
        stack += [producer for t in self._inputs[op] if not self._defined[t] and (producer := self._producer[t]) not in planned]
        while stack:
            op = stack.pop()
            if op in planned:
                continue
            planned.add(op)
            for t, s in zip(self._inputs[op], self._reads[op], strict=True):
                pending[s] += 1
                if pending[s] == 1:
                    self.pool.spare(s, True)
                if not self._defined[t]:
                    stack.append(self._producer[t])

    def _look_ahead(self, call: Call) -> None:
        """``call`` is next: whatever it reads or makes is used again at its next use after that."""
        self.pool.now += max(1, call.time_ns)
        for s in (*(self._storage[t] for t in call.inputs), *call.makes):
            coming = self._uses[s]
            while coming and coming[-1] < self.pool.now:
                coming.pop()
            self.pool.due(s, coming[-1] if coming else float("inf"))

    def _execute(self, op: int, wanted: int, first: bool) -> None:
        """Make room and run ``op``; everything it reads is there and locked."""
        workspace_bytes, allocator = self._workspace_bytes[op], self.allocator
        asked = self.used_bytes + self._made_bytes[op] + workspace_bytes
        if asked > self.budget_bytes if allocator is None else not allocator.take(self._blocks(op)):
            asked = self._make_room(op)
        if self.driver is not None:
            self.driver.compute(op)
        if asked > self.peak_bytes:
            self.peak_bytes = asked
        self.steps.append(op)
        self._counters.executions += 1
        time_ns = self._time_ns[op]
        self.clock += time_ns
        self.used_bytes = asked - workspace_bytes
        fresh = []
        spare: list[int] | None = None
        for t in self._outputs[op]:
            if self._defined[t]:  # the second copy goes
                self.used_bytes -= self._weight[t]
                spare = [*spare, self._storage[t]] if spare else [self._storage[t]]
                continue
            self._defined[t] = True
            s = self._storage[t]
            if not self.resident[s]:
                self.resident[s] = True
                fresh.append(s)
        if allocator is not None:
            allocator.settle(spare or ())
        if first:
            if self._awaiting:
                self.pool.awaiting([], 0)
            self._relate(op)
        asked_for = self._storage[wanted] if wanted >= 0 else -1
        if len(fresh) > 1 and asked_for in fresh:  # it joins the pool last
            fresh.remove(asked_for)
            fresh.append(asked_for)
        for s in fresh:
            self._arrive(s)
        planned = op in self._planned
        self._planned.discard(op)
        for s in self._reads[op]:
            self._unlock(s)
            if planned:
                self._pending[s] -= 1
                if not self._pending[s]:
                    self.pool.spare(s, False)
            if self.reclaim and s != asked_for:
                self._reclaim(s)
        if self.reclaim:
            for s in fresh:
                if s != asked_for:
                    self._reclaim(s)
        if not first:
            self._counters.recomputations += 1
            self._counters.recomputed_ns += time_ns
            if self._counters.recomputed_ns > self.limit_ns or self._counters.recomputations > self.limit_runs:
                raise Thrashed

    def _relate(self, op: int) -> None:
        """After its first run: what ``op`` made depends on what it read, and has cost its time."""
        relations, pinned, time_ns = self.relations, self._pinned, self._time_ns[op]
        ever = self.release is Release.BANISH  # what is pinned can go
        makes: Collection[int] = self._makes[op]
        if len(makes) > 1:
            makes = dict.fromkeys(makes)
        reads = [s for s in self._reads[op] if ever or not pinned[s]]
        for s in makes:
            relations.cost_ns[s] += time_ns
            self.pool.costlier(s, time_ns)
            for dep in reads:
                relations.link(s, dep)
        if len(makes) > 1:
            relations.made_together(makes)

    def _arrive(self, s: int) -> None:
        """Storage ``s`` has come into memory."""
        if self._banished and s in self._banished:  # made along with what the op ran again for; nothing can read it
            self._remove(s)
            return
        rebuilt = self.relations.evicted[s]
        if rebuilt:
            self.relations.evicted[s] = False
            self.pool.restored(s)
        if not self._pinned[s]:
            self.pool.enter(s)
        if rebuilt and self._banishing:
            for dep in self._banishing.intersection(self.relations.deps[s]):
                self._banish(dep)

    def _lock(self, s: int) -> None:
        if not self._locks[s] and not self._pinned[s]:
            self.pool.leave(s)
        self._locks[s] += 1

    def _unlock(self, s: int) -> None:
        self._locks[s] -= 1
        if not self._locks[s] and not self._pinned[s]:
            self.pool.join(s)

    def _reclaim(self, s: int) -> None:
        """Evict ``s`` if the program has dropped it, nothing holds it, and the rebuild under way is known not to read it."""
        if self._dropped[s] and not self._locks[s] and not self._pending[s] and self.resident[s] and not self._pinned[s]:
            self._evict(s)
            self._counters.released += 1

    def _make_room(self, op: int) -> int:
        """Evict until ``op`` fits; the bytes in use while it runs."""
        counters = self._counters
        while True:
            self.pool.hasten()
            start = time.perf_counter()
            # By the program, what was accessed last is as old as the call under way is long.
            chosen = self._victims(self.program_clock + max(1, self._time_ns[self._called]) if self.by_program else self.clock)
            counters.search_s += time.perf_counter() - start
            counters.searches += 1
            if not chosen:
                raise self._out_of_memory(op, self.used_bytes + self._made_bytes[op] + self._workspace_bytes[op])
            for s in chosen:
                self._evict(s)
            counters.evictions += len(chosen)
            asked = self.used_bytes + self._made_bytes[op] + self._workspace_bytes[op]
            if asked <= self.budget_bytes if self.allocator is None else self.allocator.take(self._blocks(op)):
                return asked

    def _blocks(self, op: int) -> list[Block]:
        """What ``op`` asks of the allocator: a block for each new storage or second copy, and one for its workspace."""
        time_ns = self._time_ns[op]
        blocks = [(self._storage[t], self._weight[t], time_ns) for t in self._outputs[op] if self._weight[t]]
        if self._workspace_bytes[op]:
            blocks.append((HELD, self._workspace_bytes[op], 0))
        return blocks

    def _out_of_memory(self, op: int, asked_bytes: int) -> OutOfMemory:
        held = [s for s, there in enumerate(self.resident) if there and (self._pinned[s] or self._locks[s])]
        return OutOfMemory(op, asked_bytes, held, self.allocator.short if self.allocator else None)

    def _evict(self, s: int) -> None:
        self._remove(s)
        self.pool.leave_memory(s)
        self.relations.evicted[s] = True
        self.pool.evicted(s)

    def _remove(self, s: int) -> None:
        """Take ``s`` and its views out of memory."""
        self.resident[s] = False
        for t in self._views[s]:
            self._defined[t] = False
        self.used_bytes -= self.size_bytes[s]
        self.steps.append(-1 - s)
        if self.allocator is not None:
            self.allocator.free(s)
        if self.driver is not None:
            self.driver.free(s)

    def _banish(self, s: int) -> None:
        """Free ``s`` for good, unless something made from it is evicted; then wait until that is rebuilt."""
        relations = self.relations
        if any(relations.evicted[dependent] for dependent in relations.dependents[s]):
            self._banishing.add(s)
            return
        self._banishing.discard(s)
        for dependent in relations.dependents[s]:
            if not self._pinned[dependent]:  # it cannot be rebuilt any more
                self._pinned[dependent] = True
                self.pool.leave_memory(dependent)
        if self.resident[s]:
            self._remove(s)
            if not self._pinned[s]:
                self.pool.leave_memory(s)
        elif relations.evicted[s]:
            relations.evicted[s] = False
            self.pool.restored(s)
        relations.unlink(s)
        self.pool.unlinked()
        self._banished.add(s)
        self._pinned[s] = True  # out of the pool for good, even if the op that runs now still holds it


def uses_of(program: Program, storage: Sequence[int]) -> list[list[int]]:
    """Of each storage, when calls begin that read it, and the end where it is kept; latest first, in ns of first runs.

    storage  of each tensor. A call takes at least 1 ns here, so that no two begin at once.
    """
    uses: list[list[int]] = [[] for _ in program.size_bytes]
    at = 0
    for event in program.events:
        if event >= 0:
            call = program.calls[event]
            for t in call.inputs:
                uses[storage[t]].append(at)
            at += max(1, call.time_ns)
    for t in program.kept:
        uses[storage[t]].append(at)
    return [times[::-1] for times in uses]
