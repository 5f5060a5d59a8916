"""A* over what is in memory: the optimum for the graph's order of first executions, for small graphs.

A state is how many ops have run for the first time, and the values in memory. From there some op runs whose inputs are there: the
next first execution, or one again; what is freed for it is chosen value by value. What is still to be paid at least: each op that
makes something missing which a later first execution reads, or an output, runs again, and so does what makes its own missing
inputs. That never exceeds what is paid in fact, and an execution lowers it by no more than it costs, so states come in the order
of the least time that any schedule through them can take (Hart, Nilsson, Raphael, 1968): a bound for all schedules at any time.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
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
        made = _bits(x for x, v in enumerate(graph.producer) if v >= 0)
        for t in reversed(range(len(graph.ops))):
            made &= ~self._makes[t]
            self._wanted.append((self._wanted[-1] | self._reads[t]) & ~self._makes[t])
            self._useful.append(self._all_before(self._wanted[-1]))
        self._wanted.reverse()
        self._useful.reverse()

    def _all_before(self, values: int) -> int:
        """These values, and all that they can be made from again."""
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

    def run(self, below_ns: float, states: int, deadline: float, proves: Callable[[int], None] | None) -> Searched:
        ops = self._graph.ops
        count, base_ns = len(ops), self._graph.keep_all_time_ns
        below_ns -= base_ns
        bound_ns = 0.0
        # Where a state comes from: the one before, and the op between.
        before, between = [-1], [-1]
        # Extra time at least, first executions to come, extra time so far, values, state, op to run, next value to free for it
        heap: list[tuple[float, int, int, int, int, int, int]] = [(0.0, count, 0, 0, 0, -1, 0)]
        best: dict[tuple[int, int], int] = {}
        while heap:
            least_ns, to_come, paid_ns, present, state, op, free_from = heapq.heappop(heap)
            t = count - to_come
            if op >= 0:
                held = self._bytes(present) + ops[op].workspace_bytes
                if held > self._room_bytes:
                    stays = self._reads[op] | self._makes[op]
                    for x in _members(present & ~stays):
                        if x >= free_from:
                            fewer = present & ~(1 << x)
                            owed_ns = paid_ns + self._owed_ns(t, fewer)
                            if owed_ns < below_ns:
                                heapq.heappush(heap, (owed_ns, to_come, paid_ns, fewer, state, op, x + 1))
                    continue
                before.append(state)
                between.append(op)
                state = len(before) - 1
            if least_ns > bound_ns:
                bound_ns = least_ns
                if proves is not None:
                    proves(int(base_ns + bound_ns))
            present &= self._useful[t]
            if best.get((t, present), math.inf) <= paid_ns:
                continue
            best[t, present] = paid_ns
            if not to_come and not self._wanted[t] & ~present:
                return Searched(base_ns + least_ns, self._path(before, between, state))
            if len(best) + len(heap) >= states or (len(best) % 1024 == 0 and time.perf_counter() >= deadline):
                return Searched(base_ns + bound_ns, None)
            for v in range(min(t + 1, count)):
                if self._reads[v] & ~present:
                    continue
                if v < t and (ops[v].effect or not self._makes[v] & self._useful[t] & ~present):
                    continue
                after = present | self._makes[v]
                paid = paid_ns + (ops[v].time_ns if v < t else 0)
                least = paid + self._owed_ns(t + (v == t), after)
                if least < below_ns:
                    heapq.heappush(heap, (least, to_come - (v == t), paid, after, state, v, 0))
        return Searched(base_ns + below_ns, None)

    @staticmethod
    def _path(before: list[int], between: list[int], state: int) -> list[int]:
        runs = []
        while state:
            runs.append(between[state])
            state = before[state]
        return runs[::-1]


def _bits(values: Iterator[int] | tuple[int, ...]) -> int:
    mask = 0
    for x in values:
        mask |= 1 << x
    return mask


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
