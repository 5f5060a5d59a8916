"""List walk: a schedule that fits the budget, in about a second on a thousand ops, with no proof of anything.

Ops run for the first time in graph order under the true budget. What an op misses is run again first, inputs before
readers. Where room is needed, the present value goes that has the least

    time to make it and its missing ancestors again / (bytes * ops until its next first-run reader)

Values that no first run reads any more go at once. Values to hold on to (say, what a MILP keeps at its events) weigh more.
This is offline eviction with the next use known, as in Belady's rule, weighed as DTR's heuristic weighs (Kirisame et al.,
ICLR 2021).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from graphs.ir import Graph
from planner.schedule import Schedule, with_frees
from planner.simulate import simulate

Hold = Sequence[tuple[int, Collection[int]]]  # (op, values to have in memory when it runs for the first time), ops ascending


class _Walk:
    """State of one walk. Ids of values and ops as in the graph; resident values are left out everywhere."""

    def __init__(self, graph: Graph, budget_bytes: int, hold: Hold, weight: float, run_limit: int) -> None:
        self.graph = graph
        self.room = budget_bytes - graph.resident_bytes
        self.hold = [(t, frozenset(values)) for t, values in reversed(hold)]  # next event last
        self.weight = weight
        self.run_limit = run_limit
        self.size = [value.size_bytes for value in graph.values]
        self.inputs = [tuple(v for v in op.inputs if graph.producer[v] >= 0) for op in graph.ops]
        self.outputs = [op.outputs for op in graph.ops]
        self.needs = [op.workspace_bytes + sum(self.size[v] for v in op.outputs) for op in graph.ops]
        self.time = [op.time_ns for op in graph.ops]
        # The end is one more op, which reads the graph's outputs.
        wanted = tuple(v for v in sorted(graph.outputs) if graph.producer[v] >= 0)
        self.inputs.append(wanted)
        self.outputs.append(())
        self.needs.append(0)
        self.time.append(0)
        self.pending = [list(reversed(readers)) for readers in graph.consumers]  # first runs still to come, next one last
        for v in wanted:
            self.pending[v].insert(0, len(graph.ops))
        self.present: set[int] = set()
        self.held = 0
        self.locked: dict[int, int] = {}  # values that ops on the stack read
        self.remake: dict[int, float] = {}  # cached time to make a value and its missing ancestors again
        self.now = 0
        self.runs: list[int] = []

    def first_run(self, i: int) -> bool:
        """Run op ``i`` and all it misses; False where there is no room."""
        self.now = i
        while self.hold and self.hold[-1][0] < i:
            self.hold.pop()
        self.held_on = self.hold[-1][1] if self.hold else frozenset()
        stack = [i]
        self._lock(i)
        while stack:
            at = stack[-1]
            missing = [v for v in self.inputs[at] if v not in self.present]
            if missing:
                maker = min(self.graph.producer[v] for v in missing)
                if self.graph.ops[maker].effect or len(stack) > len(self.time) or maker in stack:
                    return False
                stack.append(maker)
                self._lock(maker)
                continue
            if len(self.runs) >= self.run_limit or not self._make_room(at):
                return False
            stack.pop()
            self._run(at, first=not stack)
        return True

    def _lock(self, i: int) -> None:
        for v in self.inputs[i]:
            self.locked[v] = self.locked.get(v, 0) + 1

    def _run(self, i: int, *, first: bool) -> None:
        self.runs.append(i)
        for v in self.inputs[i]:
            if self.locked[v] == 1:
                del self.locked[v]
            else:
                self.locked[v] -= 1
            if first:
                self.pending[v].pop()
        for v in self.outputs[i]:
            if v not in self.present:
                self.present.add(v)
                self.held += self.size[v]
                self._forget(v)
        for v in (*self.inputs[i], *self.outputs[i]):
            if v in self.present and v not in self.locked and i < len(self.graph.ops) and self._distance(v) == math.inf:
                self._drop(v)

    def _distance(self, v: int) -> float:
        """Ops until the next first-run reader; infinite where there is none."""
        return max(1, self.pending[v][-1] - self.now) if self.pending[v] else math.inf

    def _make_room(self, i: int) -> bool:
        """Drop values until op ``i`` fits: an old copy of its own outputs first, then the cheapest by score."""
        excess = self.held + self.needs[i] - self.room
        if excess <= 0:
            return True
        reads = self.inputs[i]
        for v in self.outputs[i]:
            if v in self.present:
                excess -= self.size[v]
                self._drop(v)
        if excess <= 0:
            return True
        free_to_go = [v for v in self.present if v not in self.locked and self.size[v]]
        for candidates in (free_to_go, [v for v in self.locked if v in self.present and v not in reads and self.size[v]]):
            for v in sorted(candidates, key=lambda v: (self._score(v), v)):
                excess -= self.size[v]
                self._drop(v)
                if excess <= 0:
                    return True
        return False

    def _drop(self, v: int) -> None:
        self.present.remove(v)
        self.held -= self.size[v]
        self._forget(v)

    def _score(self, v: int) -> float:
        score = self._remake_time(v) / (self.size[v] * self._distance(v))
        return score * self.weight if v in self.held_on else score

    def _remake_time(self, v: int) -> float:
        known = self.remake.get(v)
        if known is not None:
            return known
        total = 0.0
        ops = {self.graph.producer[v]}
        todo = list(ops)
        while todo:
            i = todo.pop()
            total += math.inf if self.graph.ops[i].effect else self.time[i]
            for u in self.inputs[i]:
                if u not in self.present and (p := self.graph.producer[u]) not in ops:
                    ops.add(p)
                    todo.append(p)
        self.remake[v] = total
        return total

    def _forget(self, v: int) -> None:
        """``v`` came or went: the cached times of present values whose missing ancestors include it are out of date."""
        self.remake.pop(v, None)
        seen = {v}
        todo = [v]
        while todo:
            for i in self.graph.consumers[todo.pop()]:
                if i > self.now:
                    break
                for u in self.outputs[i]:
                    if u not in seen:
                        seen.add(u)
                        if u in self.present:
                            self.remake.pop(u, None)
                        else:
                            todo.append(u)


def repair(
    graph: Graph, budget_bytes: int, *, hold: Hold = (), weight: float = 1.0, run_limit: int | None = None
) -> Schedule | None:
    """A schedule within ``budget_bytes`` with the graph's order of first executions, or None where the walk gets stuck.

    hold, weight  until an op of ``hold`` has run for the first time, the scores of its values count ``weight`` times
    run_limit     give up after this many runs in all (default: ten per op)
    """
    walk = _Walk(graph, budget_bytes, hold, weight, run_limit or 10 * len(graph.ops))
    if not all(walk.first_run(i) for i in range(len(graph.ops) + 1)):
        return None
    return fitting(graph, budget_bytes, walk.runs[:-1])


def fitting(graph: Graph, budget_bytes: int, runs: Sequence[int]) -> Schedule | None:
    """The sequence with its earliest frees where that fits the budget, else None."""
    schedule = with_frees(graph, runs)
    return schedule if simulate(graph, schedule).peak_bytes <= budget_bytes else None
