"""The smallest peak of any schedule in any order, from below and from above, by walking backwards from the end.

A set S of values is to be in memory at once. Whatever the schedule, some op p was the last to make a member of S. While it
ran, its inputs, its outputs and the rest of S were there; before it, the set (S minus its outputs) plus its inputs was. So

    least(S) = min over p of max(bytes(S, inputs and outputs of p) + workspace(p), least(S minus outputs(p) plus inputs(p)))

with least(∅) = the resident bytes, and least(the graph's outputs) bounds the peak of every schedule: this is black pebbling
with weights (Sethi, 1975). A bottleneck-shortest-path search from the outputs visits the sets in order of their peak, so
wherever it stops, the peak it has come to is proved. Where it arrives at ∅, its path backwards is a sequence with that peak.

Any set has a bound of its own, from the last runs of all that makes its members (``together_bytes``); without it, the search
tries all ways to put off what has to come. And the search begins at the peak that ``last_runs`` proves, for it says little about
what lies apart in a schedule, such as a large op and what others need later. What an op reads has to be there at once, too, so
least(its inputs) is a bound as well, and mostly found in a few steps (``_Backwards.before_ops``): where two large values are read
together, each made from another large one, three of them are in memory while the later one is made.

A subset needs no more than the set. So where a member can be made again from the other ones within the peak already paid, by
running its missing ancestors in op order, that is what its last making may be, and nothing else needs to be tried: sets shrink
to what is hard to come by. With the peak paid in advance, a budget, the same search finds schedules where next to nothing fits
(``fitting``). They make everything again for each use; so the way is gone once more, keeping things while there is room, and
where there is none, dropping all that can be. What comes of that is still dear; annealing and list walks go on from there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs.errors import InvalidSchedule
from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.on_demand import last_runs_peak
from planner.process.clock import now_s
from planner.process.flat import Flags, begins
from planner.process.loading import TINY, load_once, undisturbed
from planner.schedule import Schedule, early_values, keep_all, put_in_graph_order, with_frees
from planner.simulate import simulate

if TYPE_CHECKING:
    from planner.least.pebbling_sets import Sets

STATES, FIT_STATES = 20_000, 2_000
LAST_RUNS_SHARE = 1 / 3  # of the time, for last runs and cuts at most
# Of what is left, for what ops read: sets to visit for each, of ops that need this share of what is proved.
READS_SHARE, READS_STATES, READS_MUCH = 1 / 3, 20, 0.05
SMALL_SHARE = 0.01  # of the budget, what all values together that are too small to be worth making again may take
CHUNK = 2_000_000  # ops to look at between two looks at the clock; some ten milliseconds
MOST_RUNS = 200  # of an op on average: beyond, a sequence is of no use,
LONGEST = 200_000  # and of a large graph with more runs in all, as these take seconds to look at


def least_peak(
    graph: Graph, *, states: int = STATES, time_limit_s: float = 60.0, proves: Callable[[int], None] | None = None
) -> tuple[int, Schedule | None]:
    """Bytes that every schedule needs, whatever its order, and a schedule with that very peak where the search found one.

    states  sets to visit at most, half of them in each of two searches: more of them, a better bound. Time and memory are in
            proportion
    proves  called with what is proved, each time that it is more
    """
    deadline = now_s() + time_limit_s
    proved = least_bytes(graph)
    if now_s() >= deadline:
        return proved, None
    proved = last_runs_peak()(graph, proved, now_s() + LAST_RUNS_SHARE * time_limit_s, proves)
    search = _Backwards(graph)
    proved = search.before_ops(proved, now_s() + READS_SHARE * (deadline - now_s()), proves)
    for latest in (False, True):
        proved, path = search.run(proved, max(1, states // 2), deadline, latest=latest, proves=proves)
        if path is not None:
            return proved, search.schedule(path, proved, deadline)
    return proved, None


def reads_peak(graph: Graph, level_bytes: int, deadline: float) -> int:
    """Bytes that every schedule needs for what some op reads, if that is more than the level; the level, where nothing is proved
    beyond it. With a budget as the level, more than the budget says that nothing fits.

    deadline  of ``now_s``, looked at between sets
    """
    return _Backwards(graph).before_ops(level_bytes, deadline)


def fitting(graph: Graph, budget_bytes: int, *, states: int = FIT_STATES, time_limit_s: float = 10.0) -> Iterator[Schedule]:
    """Schedules within a budget, often where nothing else finds one. They may be dear; that there is none is no proof.

    states  sets to visit at most, in each of a few searches; the first are for schedules in graph order
    """
    deadline = now_s() + time_limit_s
    whole = keep_all(graph)
    if simulate(graph, whole).peak_bytes <= budget_bytes:
        yield whole
        return
    if now_s() >= deadline or least_bytes(graph) > budget_bytes:
        return
    search = _Backwards(graph)
    small = search.small(SMALL_SHARE * budget_bytes)
    found = False
    for in_order, stays in itertools.product((True, False), (search.early, search.early | small)):
        if now_s() >= deadline or (found and not in_order):
            return
        _, path = search.run(
            budget_bytes, states, deadline, latest=in_order, only_latest=in_order, most_bytes=budget_bytes, stays=stays
        )
        if path is not None:
            schedule = search.schedule(search.lazily(path, budget_bytes, stays, deadline), budget_bytes, deadline)
            if schedule is not None:
                found = True
                yield schedule


@dataclass(frozen=True, slots=True)
class _Visited:
    """A set, shrunk, as bits; what was dropped from it to shrink; the one after it in time, and the op between."""

    members: bytes
    dropped: tuple[int, ...]
    after: int
    op: int


class _Backwards:
    """Searches in one graph.

    early  outputs that a forward gives back: where they stay, they are made before anything is that a backward makes
    """

    def __init__(self, graph: Graph) -> None:
        load_once(_search_once)
        self._graph = graph
        self._kernels: Any = undisturbed(_kernels)
        self._sets: Sets = self._kernels.sets_of(graph)
        self._outputs = np.zeros(len(graph.values), np.bool_)
        self._outputs[[x for x in graph.outputs if graph.producer[x] >= 0]] = True
        self._is_backward = np.array([p >= 0 and graph.ops[p].backward for p in graph.producer], np.bool_)
        self.early = np.zeros_like(self._outputs)
        self.early[list(early_values(graph))] = True

    def small(self, total_bytes: float) -> Flags:
        """The smallest values, which together take no more than so many bytes."""
        order = np.argsort(self._sets.size, kind="stable")
        few = np.zeros(order.size, np.bool_)
        few[order[np.cumsum(self._sets.size[order]) <= total_bytes]] = True
        return few

    def before_ops(self, level_bytes: int, deadline: float, proves: Callable[[int], None] | None = None) -> int:
        """The highest peak come to from what an op reads, of those that need most first; the level, where none is higher."""
        sets = self._sets
        read_bytes, made_bytes = begins(sets.size[sets.inputs])[sets.in_rows], begins(sets.size[sets.outputs])[sets.out_rows]
        needs = np.diff(read_bytes) + np.diff(made_bytes) + sets.workspace
        for op in np.argsort(-needs, kind="stable").tolist():
            if needs[op] < READS_MUCH * level_bytes or now_s() >= deadline:
                break
            reads = np.zeros_like(self._outputs)
            reads[sets.inputs[sets.in_rows[op] : sets.in_rows[op + 1]]] = True
            proved_bytes, _ = self.run(level_bytes, READS_STATES, deadline, wanted=reads, latest=False)
            if proved_bytes > level_bytes and proves is not None:
                proves(proved_bytes)
            level_bytes = proved_bytes
        return level_bytes

    def run(
        self,
        level_bytes: int,
        states: int,
        deadline: float,
        *,
        latest: bool,
        wanted: Flags | None = None,
        only_latest: bool = False,
        most_bytes: int | None = None,
        stays: Flags | None = None,
        proves: Callable[[int], None] | None = None,
    ) -> tuple[int, list[_Visited] | None]:
        """The peak come to, and the path to ∅ where it has arrived there.

        level_bytes       paid in advance
        wanted            the set to begin with (default: the outputs)
        latest            of sets with the same peak, go on with that before the latest op; else with the smallest
        only_latest       no other op, which mostly leads to graph order
        most_bytes        no set with a higher peak
        stays             values that are not dropped
        proves            as in ``least_peak``
        """
        sets, kernels, resident = self._sets, self._kernels, self._graph.resident_bytes
        wanted = self._outputs if wanted is None else wanted
        stays = np.zeros_like(self._outputs) if stays is None else stays
        makes_early = {self._graph.producer[x] for x in np.flatnonzero(self.early & stays).tolist()}
        visited: list[_Visited] = []
        seen: set[bytes] = set()
        heap: list[tuple[int, int, int, int]] = [(level_bytes, 0, -1, -1)]
        count = 0
        while heap and len(visited) < states and now_s() < deadline:
            peak, _, after, op = heapq.heappop(heap)
            if peak > level_bytes:
                level_bytes = peak
                if proves is not None:
                    proves(peak)
            present = wanted.copy() if op < 0 else self._before(self._members(visited[after]), op)
            if (together := resident + self._kernels.together_bytes(sets, present)) > level_bytes:
                if most_bytes is None or together <= most_bytes:
                    count += 1
                    heapq.heappush(heap, (together, -count, after, op))
                continue
            dropped = self._shrink(present, level_bytes - resident, stays, deadline)
            if dropped is None:
                return level_bytes, None
            members = np.packbits(present).tobytes()
            if members in seen:
                continue
            seen.add(members)
            visited.append(_Visited(members, tuple(dropped), after, op))
            if not present.any():
                return level_bytes, self._path(visited)
            makers = kernels.last_makers(sets, present, int(sets.shrinking[-1]))
            ops, needs, adds = sets.ops[:makers], sets.needs[:makers] + resident, sets.adds[:makers]
            order = np.arange(makers) if latest else np.lexsort((ops, -adds))  # the newest goes first
            too_late = makes_early if (present & self._is_backward).any() else ()
            for i in order[-1:] if only_latest else order:
                if (most_bytes is None or needs[i] <= most_bytes) and int(ops[i]) not in too_late:
                    count += 1
                    heapq.heappush(heap, (max(level_bytes, int(needs[i])), -count, len(visited) - 1, int(ops[i])))
        return max(level_bytes, heap[0][0]) if heap else level_bytes, None

    def _members(self, state: _Visited) -> Flags:
        return np.unpackbits(np.frombuffer(state.members, np.uint8), count=self._outputs.size).astype(np.bool_)

    def _before(self, present: Flags, op: int) -> Flags:
        """What is in memory before an op that makes members last."""
        before, sets = present.copy(), self._sets
        before[sets.outputs[sets.out_rows[op] : sets.out_rows[op + 1]]] = False
        before[sets.inputs[sets.in_rows[op] : sets.in_rows[op + 1]]] = True
        return before

    def lazily(self, path: Sequence[_Visited], budget_bytes: int, stays: Flags, deadline: float) -> list[_Visited]:
        """The same path, but with what can be dropped kept until there is no room for it, and then all dropped at once.

        Each step is the path's next one, or the making of something that the path has dropped already, whichever op is later. It
        may be gone where what is held then can shrink to no more than the path holds there, so that all that the path does from
        there on can still be done. That is looked at for several steps at once, twice as many each time.
        """
        room_bytes = budget_bytes - self._graph.resident_bytes
        wanted = [self._members(state) for state in reversed(path)]  # in the order of the search, as below
        ops = [state.op for state in reversed(path)][1:]
        present, at, stride = self._outputs.copy(), 0, 1
        visited = [_Visited(np.packbits(present).tobytes(), (), -1, -1)]
        while present.any() and now_s() < deadline:
            steps: list[tuple[int, Flags]] = []
            ahead, reached = present, at
            while len(steps) < stride and ahead.any():
                latest = int(self._sets.producer[ahead].max())
                hard = int(self._sets.producer[wanted[reached]].max(initial=-1))
                on_path = reached < len(ops) and latest <= max(ops[reached], hard)
                op = ops[reached] if on_path else latest
                before = self._before(ahead, op)
                if self._needs(ahead, before, op) > room_bytes:
                    break
                steps.append((op, before))
                ahead, reached = before, reached + on_path
            shrunk = ahead.copy()
            if steps and self._shrink(shrunk, room_bytes, stays, deadline) is None:
                break
            if steps and not (shrunk & ~wanted[reached]).any():
                for op, members in steps:
                    visited.append(_Visited(np.packbits(members).tobytes(), (), len(visited) - 1, op))
                present, at, stride = ahead, reached, 2 * stride
            elif len(steps) > 1:
                stride = len(steps) // 2
            else:
                rest = present.copy()
                dropped = self._shrink(rest, room_bytes, stays, deadline)
                if not dropped:  # no time; or what is left has shrunk in another order than on the path
                    break
                present = rest
                last = visited[-1]
                visited[-1] = _Visited(np.packbits(present).tobytes(), (*last.dropped, *dropped), last.after, last.op)
        return list(path) if present.any() else self._path(visited)

    def _needs(self, after: Flags, before: Flags, op: int) -> int:
        """Bytes in memory while an op runs, beside what is resident."""
        touched = before | after
        touched[list(self._graph.ops[op].outputs)] = True
        return int(self._sets.size[touched].sum()) + int(self._sets.workspace[op])

    def _shrink(self, present: Flags, most_bytes: int, stays: Flags, deadline: float) -> list[int] | None:
        """Drop from a set what can be dropped, and return that; None where it took too long."""
        sets = self._sets
        sets.shrinking[:] = sets.outputs.size, 0, 0, int(sets.size[present].sum())
        while not self._kernels.shrink(sets, present, most_bytes, stays, CHUNK):
            if now_s() >= deadline:
                return None
        dropped: list[int] = sets.dropped[: sets.shrinking[1]].tolist()
        return dropped

    def _path(self, visited: Sequence[_Visited]) -> list[_Visited]:
        path = [visited[-1]]
        while path[-1].after >= 0:
            path.append(visited[path[-1].after])
        return path

    def schedule(self, path: Sequence[_Visited], peak_bytes: int, deadline: float) -> Schedule | None:
        """The path as a schedule; None where it is too long, needs more for what nobody reads, or breaks the order of draws.

        After the deadline a short one is looked at once.
        """
        graph, runs, is_first = self._graph, list[int](), True
        most_runs = min(MOST_RUNS * len(graph.ops), max(LONGEST, 2 * len(graph.ops)))
        for state in path:
            self._again(self._members(state), state.dropped[::-1], peak_bytes, runs)
            if state.op >= 0:
                runs.append(state.op)
            if len(runs) > (most_runs if now_s() < deadline else 2 * len(graph.ops)):
                return None
        for whole in (runs,) if len(set(runs)) == len(graph.ops) else (self._beside(runs), self._ahead(runs)):
            for sequence in (put_in_graph_order(graph, whole), put_in_graph_order(graph, whole, waits=False), whole):
                if not is_first and now_s() >= deadline:
                    return None
                is_first = False
                schedule = with_frees(graph, sequence)
                try:
                    if simulate(graph, schedule).peak_bytes <= peak_bytes:
                        return schedule
                except InvalidSchedule:
                    continue
        return None

    def _beside(self, runs: Sequence[int]) -> list[int]:
        """The runs and, each as soon as its inputs have been made, the ops that no output needs."""
        ran = set(runs)
        rest = [v for v in range(len(self._graph.ops)) if v not in ran]
        waits = {v: {self._graph.producer[x] for x in self._graph.ops[v].inputs} - {-1} for v in rest}
        readers: dict[int, list[int]] = {}
        for v in rest:
            for u in waits[v]:
                readers.setdefault(u, []).append(v)
        whole: list[int] = []
        made: set[int] = set()
        ready = [v for v in rest if not waits[v]]  # a heap: ascending

        def run(u: int) -> None:
            whole.append(u)
            if u not in made:
                made.add(u)
                for v in readers.get(u, ()):
                    waits[v].discard(u)
                    if not waits[v]:
                        heapq.heappush(ready, v)

        while ready:
            run(heapq.heappop(ready))
        for coming in runs:
            run(coming)
            while ready:
                run(heapq.heappop(ready))
        return whole

    def _ahead(self, runs: Sequence[int]) -> list[int]:
        """The same, but with these ops first, each after its ancestors, when nothing else is there."""
        ran = set(runs)
        parts: list[list[int]] = [list(runs)]
        for v in range(len(self._graph.ops) - 1, -1, -1):
            if v not in ran:
                parts.append(self._made_from_nothing(v))
                ran.update(parts[-1])
        return [v for part in reversed(parts) for v in part]

    def _made_from_nothing(self, op: int) -> list[int]:
        """An op after its ancestors."""
        sets = self._sets
        reads = sets.inputs[sets.in_rows[op] : sets.in_rows[op + 1]]
        self._kernels.again_bytes(sets, np.zeros_like(self._outputs), reads, 0, True)  # for the ops alone
        return [*sorted(sets.ops[: sets.counted[0]].tolist()), op]

    def _again(self, present: Flags, values: Sequence[int], peak_bytes: int, runs: list[int]) -> None:
        """Make values from those that are present, as many together as there is room for."""
        sets, several = self._sets, np.array(values, np.int64)
        if not several.size:
            return
        room_bytes = peak_bytes - self._graph.resident_bytes - int(sets.size[present].sum())
        if self._kernels.again_bytes(sets, present, several, room_bytes, True) < 0 and len(values) > 1:
            self._again(present, values[: len(values) // 2], peak_bytes, runs)
            self._again(present, values[len(values) // 2 :], peak_bytes, runs)
            return
        runs.extend(sorted(sets.ops[: sets.counted[0]].tolist()))
        present[several] = True


def _kernels() -> Any:
    from planner.least import pebbling_sets  # imports numba, which takes time

    return pebbling_sets


def _search_once() -> None:
    search = _Backwards(TINY)  # which asks for this again, in vain
    search._kernels.last_makers(search._sets, search._outputs, 1)
    _, path = search.run(0, 2, float("inf"), latest=True)
    assert path is not None
    search.schedule(search.lazily(path, 1, search.early, float("inf")), 1, float("inf"))
    search._again(np.zeros(1, np.bool_), [0], 1, [])
