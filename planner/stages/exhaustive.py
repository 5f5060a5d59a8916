"""A* over what is in memory: the optimum for the graph's order of first executions, for small graphs.

A state is how many ops have run for the first time, and the values in memory. From there some op runs whose inputs are there: the
next first execution, or one again; what is freed for it is chosen value by value. What is still to be paid at least: each op that
makes something missing which a later first execution reads, or an output, runs again, and so does what makes its own missing
inputs. That never exceeds what is paid in fact, and an execution lowers it by no more than it costs, so states come in the order
of the least time that any schedule through them can take (Hart, Nilsson, Raphael, 1968): a bound for all schedules at any time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from graphs.ir import Graph


@dataclass(frozen=True, slots=True)
class Searched:
    """What came of a search.

    bound_ns  proved: no schedule in graph order takes less; infinite where none fits
    runs      the ops of the cheapest schedule; None where none takes less than was asked for, or the search has been stopped
    """

    bound_ns: float
    runs: list[int] | None


def cheapest(
    graph: Graph,
    budget_bytes: int,
    *,
    below_ns: float = math.inf,
    states: int = 1_000_000,
    deadline: float = math.inf,
    proves: Callable[[int], None] | None = None,
) -> Searched:
    """The cheapest schedule in graph order, or a bound.

    below_ns  only schedules that take less time matter; the bound is this where there are none
    states    to look at and to come, at most. A million takes about 150 MB and ten seconds
    deadline  as ``time.perf_counter`` tells it
    proves    called with the bound, each time that it has risen
    """
    return _Search(graph, budget_bytes).run(below_ns, states, deadline, proves)


class _Search:
    """Sets of values are the bits of integers; resident values are in none of them."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self._graph = graph
        self._room_bytes = budget_bytes - graph.resident_bytes
        self._size = [value.size_bytes for value in graph.values]
        self._reads = [_bits(x for x in op.inputs if graph.producer[x] >= 0) for op in graph.ops]
        self._makes = [_bits(op.outputs) for op in graph.ops]
        outputs = _bits(x for x in graph.outputs if graph.producer[x] >= 0)
        # After so many first executions: what those to come read, or has to be there at the end; and what may ever be of use
        self._wanted, self._useful = [outputs], [self._all_before(outputs)]
        for t in reversed(range(len(graph.ops))):
            self._wanted.append((self._wanted[-1] | self._reads[t]) & ~self._makes[t])
            self._useful.append(self._all_before(self._wanted[-1]))
        self._wanted.reverse()
        self._useful.reverse()

    def _all_before(self, values: int) -> int:
        """These values, and all that they may be made from again."""
        producer, found, todo = self._graph.producer, 0, values
        while todo:
            x = todo.bit_length() - 1
            todo ^= 1 << x
            found |= 1 << x
            op = producer[x]
            if not self._graph.ops[op].effect:
                todo |= self._reads[op] & ~found
        return found

    def _bytes(self, values: int) -> int:
        return sum(self._size[x] for x in _members(values))

    def _owed_ns(self, t: int, present: int) -> float:
        """What re-runs cost at least from here on; infinite where something cannot be made again."""
        ops, producer = self._graph.ops, self._graph.producer
        todo, seen, owed_ns, ran = self._wanted[t] & ~present, present, 0.0, 0
        while todo:
            x = todo.bit_length() - 1
            todo ^= 1 << x
            seen |= 1 << x
            op = producer[x]
            if ran >> op & 1:
                continue
            ran |= 1 << op
            if ops[op].effect:
                return math.inf
            owed_ns += ops[op].time_ns
            todo |= self._reads[op] & ~seen
        return owed_ns

    def _frees(self, present: int, op: int, begin: int) -> Iterator[int]:
        """Values that may go while an op runs, from a number on: freed in this order, no set of them comes up twice."""
        stays = self._reads[op] | self._makes[op]
        return (x for x in _members(present & ~stays & (-1 << begin)) if self._size[x])

    def _runs(self, t: int, present: int) -> Iterator[int]:
        """Ops that may run: those that have before and make something of use again, and the first one that has not."""
        missing = self._useful[t] & ~present
        for v, op in enumerate(self._graph.ops[:t]):
            if self._makes[v] & missing and not op.effect and not self._reads[v] & ~present:
                yield v
        if t < len(self._graph.ops) and not self._reads[t] & ~present:
            yield t

    def run(self, below_ns: float, states: int, deadline: float, proves: Callable[[int], None] | None) -> Searched:
        ops = self._graph.ops
        base_ns = self._graph.keep_all_time_ns
        below_ns, bound_ns = below_ns - base_ns, 0.0
        before, between = [-1], [-1]  # of each state, the one that it comes from, and the op that ran between
        best: dict[tuple[int, int], int] = {}  # the least extra time of first executions so far and values in memory
        # What comes, by the extra time that it takes at least: minus the first executions so far, extra time so far, values in
        # memory, the state before, the op that runs from there, and the first value that may still be freed for it.
        heap: list[tuple[float, int, int, int, int, int, int]] = [(0.0, 0, 0, 0, 0, -1, 0)]
        for looked_at in itertools.count(1):
            if not heap:
                return Searched(base_ns + below_ns, None)
            if len(best) + len(heap) > states or (looked_at % 1024 == 0 and time.perf_counter() >= deadline):
                return Searched(base_ns + bound_ns, None)
            least_ns, t, paid_ns, present, state, op, begin = heapq.heappop(heap)
            t = -t
            if least_ns > bound_ns:
                bound_ns = least_ns
                if proves is not None:
                    proves(int(base_ns + bound_ns))
            if op >= 0 and self._bytes(present) + ops[op].workspace_bytes > self._room_bytes:
                for x in self._frees(present, op, begin):
                    fewer = present ^ 1 << x
                    least_ns = paid_ns + self._owed_ns(t, fewer)
                    if least_ns < below_ns:
                        heapq.heappush(heap, (least_ns, -t, paid_ns, fewer, state, op, x + 1))
                continue
            present &= self._useful[t]
            if best.get((t, present), math.inf) <= paid_ns:
                continue
            best[t, present] = paid_ns
            if op >= 0:
                before.append(state)
                between.append(op)
                state = len(before) - 1
            if t == len(ops) and not self._wanted[t] & ~present:
                return Searched(base_ns + least_ns, _path(before, between, state))
            for v in self._runs(t, present):
                after, then = present | self._makes[v], t + (v == t)
                paid = paid_ns + (0 if v == t else ops[v].time_ns)
                least_ns = paid + self._owed_ns(then, after)
                if least_ns < below_ns:
                    heapq.heappush(heap, (least_ns, -then, paid, after, state, v, 0))
        raise AssertionError("unreachable")


def _path(before: list[int], between: list[int], state: int) -> list[int]:
    """The ops that lead to a state."""
    runs = []
    while state:
        runs.append(between[state])
        state = before[state]
    return runs[::-1]


def _bits(values: Iterable[int]) -> int:
    mask = 0
    for x in values:
        mask |= 1 << x
    return mask


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
