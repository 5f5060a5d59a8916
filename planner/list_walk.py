"""List walk: a schedule that fits a budget, in milliseconds, with no proof of anything.

Ops run for the first time in graph order under the true budget. What an op misses is run again first, inputs before
readers. Where room is needed, the present value goes that has the least score

    time to make it and its missing ancestors again · weight / (bytes · ops until its next first-run reader)

Values that no first run reads any more go at once. This is offline eviction with the next use known, as in Belady's rule,
scored as DTR scores (Kirisame et al., ICLR 2021). Weights let others steer it: values that a MILP keeps at its events, or
what a search over weights found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from graphs.ir import Graph

REMAKE_LIMIT = 300  # ancestors counted in a score at most; beyond, a value is dear enough anyway

# (op, values to have in memory when that op runs for the first time), ops ascending
Hold = Sequence[tuple[int, Collection[int]]]


class ListWalk:
    """Walks one graph under one budget; call it once for each set of weights."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self._count = len(graph.ops)
        self._room = budget_bytes - graph.resident_bytes
        self._producer = graph.producer
        self._size = [value.size_bytes for value in graph.values]
        self._inputs = [tuple(v for v in op.inputs if graph.producer[v] >= 0) for op in graph.ops]
        self._outputs = [op.outputs for op in graph.ops]
        self._needs = [op.workspace_bytes + sum(self._size[v] for v in op.outputs) for op in graph.ops]
        self._time = [math.inf if op.effect else op.time_ns for op in graph.ops]  # of a re-run
        # The end is one more op, which reads the graph's outputs.
        self._inputs.append(tuple(v for v in sorted(graph.outputs) if graph.producer[v] >= 0))
        self._outputs.append(())
        self._needs.append(0)
        self._time.append(0)
        self._first_readers: list[list[int]] = [[] for _ in graph.values]  # descending: the next one is last
        for i in range(self._count, -1, -1):
            for v in self._inputs[i]:
                self._first_readers[v].append(i)

    def __call__(
        self, *, weights: Sequence[float] | None = None, hold: Hold = (), grip: float = 1.0, run_limit: int | None = None
    ) -> list[int] | None:
        """The ops in the order they run, repeats included, within the budget; None where the walk gets stuck.

        weights     one factor per value for its score (default: all 1)
        hold, grip  until an op of ``hold`` has run for the first time, the scores of its values count ``grip`` times
        run_limit   give up after this many runs in all (default: ten per op)
        """
        self._weights = weights
        self._grip = grip
        self._run_limit = 10 * self._count if run_limit is None else run_limit
        self._pending = [list(readers) for readers in self._first_readers]
        self._present: set[int] = set()
        self._held = 0
        self._locked: dict[int, int] = {}  # values that ops on the stack read, with how many do
        self._runs: list[int] = []
        events = [(t, frozenset(values)) for t, values in reversed(hold)]
        for i in range(self._count + 1):
            while events and events[-1][0] < i:
                events.pop()
            self._gripped = events[-1][1] if events else frozenset()
            if not self._first_run(i):
                return None
        return self._runs[:-1]

    def _first_run(self, i: int) -> bool:
        """Run op ``i`` and all it misses; False where there is no room."""
        self._now = i
        stack = [i]
        self._lock(i)
        while stack:
            at = stack[-1]
            missing = [v for v in self._inputs[at] if v not in self._present]
            if missing:
                maker = min(self._producer[v] for v in missing)
                if self._time[maker] == math.inf:
                    return False
                stack.append(maker)
                self._lock(maker)
                continue
            if len(self._runs) > self._run_limit or not self._make_room(at):
                return False
            stack.pop()
            self._run(at, first=not stack)
        return True

    def _lock(self, i: int) -> None:
        for v in self._inputs[i]:
            self._locked[v] = self._locked.get(v, 0) + 1

    def _run(self, i: int, *, first: bool) -> None:
        self._runs.append(i)
        for v in self._inputs[i]:
            if self._locked[v] == 1:
                del self._locked[v]
            else:
                self._locked[v] -= 1
            if first:
                self._pending[v].pop()
        for v in self._outputs[i]:
            if v not in self._present:
                self._present.add(v)
                self._held += self._size[v]
        for v in (*self._inputs[i], *self._outputs[i]):
            if not self._pending[v] and v not in self._locked and v in self._present:
                self._drop(v)

    def _make_room(self, i: int) -> bool:
        """Drop values until op ``i`` fits: old copies of its outputs, then by score; locked ones last, to be made again."""
        excess = self._held + self._needs[i] - self._room
        if excess <= 0:
            return True
        for v in self._outputs[i]:
            if v in self._present:
                excess -= self._size[v]
                self._drop(v)
        reads = self._inputs[i]
        for last_resort in (False, True):
            if excess <= 0:
                return True
            scores = sorted(
                (self._score(v), v)
                for v in self._present
                if (v in self._locked) == last_resort and self._size[v] and not (last_resort and v in reads)
            )
            for _, v in scores:
                excess -= self._size[v]
                self._drop(v)
                if excess <= 0:
                    return True
        return excess <= 0

    def _drop(self, v: int) -> None:
        self._present.remove(v)
        self._held -= self._size[v]

    def _score(self, v: int) -> float:
        until = max(1, self._pending[v][-1] - self._now) if self._pending[v] else math.inf
        score = self._remake_time(v) / (self._size[v] * until)
        if self._weights is not None:
            score *= self._weights[v]
        return score * self._grip if v in self._gripped else score

    def _remake_time(self, v: int) -> float:
        """Time to run the maker of ``v`` and its missing ancestors; infinite through an op with an effect."""
        total: float = 0
        ops = {self._producer[v]}
        todo = list(ops)
        while todo:
            i = todo.pop()
            total += self._time[i]
            for u in self._inputs[i]:
                if u not in self._present:
                    p = self._producer[u]
                    if p not in ops and len(ops) < REMAKE_LIMIT:
                        ops.add(p)
                        todo.append(p)
        return total
