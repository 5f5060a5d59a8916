"""A* over what is in memory: the optimum for the graph's order of first executions, for small graphs.

A state is how many ops have run for the first time, and the values in memory. From there some op runs whose inputs are there: the
next first execution, or one again. Where it needs room, values go for it, no more of them than it takes: whatever is kept for
longer does no harm. What is still to be paid at least:

    h(t, S) = max over first executions u to come, and the end:  owed(t, S, u) + later(u)

``owed``: each op that makes something missing which is read up to u (at the end: an output) runs again, and so does what makes
its own missing inputs. ``later(u)``: what re-runs after the first execution of u cost at least, whatever is in memory then. So
states come in the order of the least time that any schedule through them can take (Hart, Nilsson, Raphael, 1968): a bound at any
time.

What is due after u is found by the same search, begun there with everything in memory that can be of use, from the last u to the
first (tables of such bounds are called pattern databases: Culberson and Schaeffer, 1998). Each is easy when those after it are
known; where one takes too long, how far it came is a bound all the same. After them the whole graph is searched for as long as
all of them took, and if that does not end it, all that is not settled is gone through again with more time. As paths may now meet
a state at a higher price first, it is looked at again when it turns out cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs.ir import Graph
from planner.process.clock import now_s
from planner.process.flat import Ints
from planner.process.loading import TINY, load_once, undisturbed

if TYPE_CHECKING:
    from planner.stages.exhaustive_states import Nodes, Problem, States

FIRST_LOOKS = 2_000  # nodes to look at for what is due after a first execution,
MORE_LOOKS = 10  # and so many times as many in the next pass
ROOM = 1 << 13  # nodes and states to begin with
TABLE = 4  # places in the hash table for each state
_NEVER = 1 << 60  # extra time that no schedule takes,
LONGEST_NS = 1 << 50  # of a graph that takes less: what is paid and owed stays within 64 bits
CHUNK = 20_000  # nodes between two looks at the clock; some 50 ms
MOST_BYTES = 1 << 30  # of nodes and states


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
    looks: int = 3_000_000,
    deadline: float = math.inf,
    proves: Callable[[int], None] | None = None,
) -> Searched:
    """The cheapest schedule in graph order, or a bound; see ``Exhaustive.go_on``."""
    return Exhaustive(graph, budget_bytes).go_on(below_ns=below_ns, looks=looks, deadline=deadline, proves=proves)


class Exhaustive:
    """The search, which can go on where it was stopped."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        load_once(_search_once)
        self._kernels: Any = undisturbed(_kernels)
        self._ops, self._base_ns = len(graph.ops), graph.keep_all_time_ns
        self._problem = _problem(graph, budget_bytes, self._kernels)
        self._made = np.zeros((self._ops + 1, self._problem.some.size), np.int64)  # by so many first executions
        np.bitwise_or.accumulate(self._problem.makes, out=self._made[1:])
        self._nodes, self._states = self._room_for_nodes(ROOM), self._room_for_states(ROOM)
        self._bound_ns = 0  # proved, beyond keeping all
        self._is_settled = np.zeros(self._ops, np.bool_)  # whether what is due after a first execution is known exactly
        self._most, self._asked = FIRST_LOOKS, 1  # nodes for each first execution in this pass, and of how many that is
        self._at = self._ops  # the first execution from which it searches, -1 for the whole graph
        self._is_full = False
        self._begin_next()

    @property
    def bound_ns(self) -> int:
        """What it has proved so far."""
        return self._base_ns + self._bound_ns

    def go_on(
        self,
        *,
        below_ns: float = math.inf,
        looks: int,
        deadline: float = math.inf,
        proves: Callable[[int], None] | None = None,
    ) -> Searched:
        """Search on.

        below_ns  only schedules that take less time matter; the bound is this where there are none. No more than before
        looks     nodes to look at, at most. A million takes about three seconds; all that is kept takes a gigabyte at most
        deadline  as ``planner.process.clock.now_s`` tells it
        proves    called with the bound, each time that it has risen
        """
        kernels, counts = self._kernels, self._problem.counts
        below = min(_NEVER, below_ns - self._base_ns)
        while looks > 0 and not self._is_full and now_s() < deadline:
            most = self._most if self._at >= 0 else self._asked * self._most
            before = int(counts[kernels.LOOKED])
            ended = kernels.advance(self._problem, self._nodes, self._states, math.ceil(below), min(CHUNK, looks, most - before))
            looks -= int(counts[kernels.LOOKED]) - before
            if ended == kernels.NONE:  # from here on everything costs as much
                return Searched(self._base_ns + below if below < _NEVER else math.inf, None)
            self._prove(int(counts[kernels.LEAST]), proves)
            if ended == kernels.FOUND and self._at < 0:
                return Searched(self._base_ns + self._bound_ns, self._path())
            if ended == kernels.FULL and self._grow():
                continue
            if ended == kernels.FULL and self._at < 0:
                self._is_full = True
            elif ended != kernels.GO_ON or counts[kernels.LOOKED] >= most:
                self._end(is_exact=ended == kernels.FOUND)
        return Searched(self._base_ns + self._bound_ns, None)

    def _prove(self, extra_ns: int, proves: Callable[[int], None] | None) -> None:
        if extra_ns > self._bound_ns:
            self._bound_ns = extra_ns
            if proves is not None:
                proves(self._base_ns + extra_ns)

    def _end(self, *, is_exact: bool) -> None:
        """Note what has come of the search that is under way, and begin the next one."""
        if self._at >= 0:
            self._is_settled[self._at] = is_exact
            self._problem.later_ns[self._at] = max(self._problem.later_ns[self._at], self._problem.counts[self._kernels.LEAST])
        else:
            self._at, self._asked = self._ops, 1
            self._most *= MORE_LOOKS
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the search from the next first execution, backwards, that needs one; after those that of the whole graph."""
        problem, kernels = self._problem, self._kernels
        while self._at > 0:
            self._at -= 1
            u = self._at
            after = problem.later_ns[u + 1] if u + 1 < self._ops else 0
            problem.later_ns[u] = max(problem.later_ns[u], after)
            everything = (problem.useful[u + 1] & self._made[u + 1]) | problem.reads[u] | problem.makes[u]
            over = kernels.bytes_of(problem, everything) + problem.workspace[u] - problem.room_bytes
            if over <= 0:  # all of it fits, so that this is no more than what is due after the next one
                self._is_settled[u] = u + 1 == self._ops or self._is_settled[u + 1]
            if over > 0 and not self._is_settled[u]:
                self._asked += 1
                self._clear()
                kernels.push(problem, self._nodes, everything, problem.later_ns[u], 0, over, u + 1, -1, u, 0)
                return
        self._at = -1
        self._clear()
        nothing = np.zeros(problem.some.size, np.int64)
        kernels.push(problem, self._nodes, nothing, problem.later_ns[0] if self._ops else 0, 0, 0, 0, -1, -1, 0)

    def _clear(self) -> None:
        """Forget nodes and states."""
        counts, kernels = self._problem.counts, self._kernels
        self._states.table[self._states.slots[: counts[kernels.STATES]]] = -1
        counts[: kernels.MARK] = 0
        counts[kernels.LOOKED] = 0

    def _room_for_nodes(self, count: int) -> Nodes:
        """Empty arrays."""
        kind = self._kernels.Nodes
        sets = np.empty((count, self._problem.some.size), np.int64)
        return kind(sets, *(np.empty(count, np.int64) for _ in kind._fields[1:]))  # type: ignore[no-any-return]

    def _room_for_states(self, count: int) -> States:
        """Empty arrays, and a table that is never more than a quarter full."""
        kind = self._kernels.States
        sets = np.empty((count, self._problem.some.size), np.int64)
        columns = (np.empty(count, np.int64) for _ in kind._fields[1:-1])
        return kind(sets, *columns, np.full(TABLE * count, -1, np.int64))  # type: ignore[no-any-return]

    def _grow(self) -> bool:
        """Twice the room for nodes, or for states, where that is not too much."""
        nodes, states, words = self._nodes, self._states, self._problem.some.size
        count = int(self._problem.counts[self._kernels.STATES])
        if count + 1 > states.ops.size:
            room = 2 * states.ops.size
            if 8 * room * (words + len(states) - 2 + TABLE) > MOST_BYTES // 2:
                return False
            self._states = self._room_for_states(room)
            for old, new in zip(states[:-1], self._states[:-1], strict=True):
                new[: old.shape[0]] = old
            self._kernels.rehash(self._states, count)
        else:
            room = 2 * nodes.ops.size
            if 8 * room * (words + len(nodes) - 1) > MOST_BYTES // 2:
                return False
            self._nodes = self._room_for_nodes(room)
            for old, new in zip(nodes, self._nodes, strict=True):
                new[: old.shape[0]] = old
        return True

    def _path(self) -> list[int]:
        """The ops that lead to the end."""
        runs, state = list[int](), int(self._problem.counts[self._kernels.END])
        while self._states.before[state] >= 0:
            runs.append(int(self._states.ops[state]))
            state = int(self._states.before[state])
        return runs[::-1]


def _problem(graph: Graph, budget_bytes: int, kernels: Any) -> Problem:
    """The graph as sets of bits."""
    producer, ops = graph.producer, graph.ops
    values = sorted((x for x in range(len(graph.values)) if producer[x] >= 0), key=lambda x: -graph.values[x].size_bytes)
    number = {x: at for at, x in enumerate(values)}
    bits: int = kernels.BITS
    words = max(1, -(-len(values) // bits))

    def word_rows(sets: Sequence[Iterable[int]]) -> Ints:
        found = np.zeros((len(sets), words), np.int64)
        for row, members in zip(found, sets, strict=True):
            for x in members:
                if x in number:
                    row[number[x] // bits] |= 1 << number[x] % bits
        return found

    wanted = [{x for x in graph.outputs if producer[x] >= 0}]
    for op in reversed(ops):
        wanted.append(wanted[-1].union(x for x in op.inputs if producer[x] >= 0).difference(op.outputs))
    wanted.reverse()
    scratch = (np.zeros(words, np.int64) for _ in range(5))
    return kernels.Problem(  # type: ignore[no-any-return]
        word_rows([op.inputs for op in ops]),
        word_rows([op.outputs for op in ops]),
        word_rows(wanted),
        word_rows([_all_before(graph, some) for some in wanted]),
        np.array([graph.values[x].size_bytes for x in values], np.int64),
        np.array([producer[x] for x in values], np.int64),
        np.array([op.time_ns for op in ops], np.int64),
        np.array([op.workspace_bytes for op in ops], np.int64),
        np.array([op.effect for op in ops], np.bool_),
        np.zeros(len(ops), np.int64),
        budget_bytes - graph.resident_bytes,
        np.zeros(len(kernels.COUNTS), np.int64),
        np.zeros(len(ops), np.int64),
        *scratch,
    )


def _all_before(graph: Graph, values: Iterable[int]) -> set[int]:
    """These values, and all that they may be made from again."""
    found, todo = set[int](), list(values)
    while todo:
        x = todo.pop()
        op = graph.ops[graph.producer[x]]
        if x not in found:
            found.add(x)
            if not op.effect:
                todo.extend(y for y in op.inputs if graph.producer[y] >= 0)
    return found


def _search_once() -> None:
    cheapest(TINY, 1)


def _kernels() -> Any:
    from planner.stages import exhaustive_states  # imports numba, which takes time

    return exhaustive_states
