"""What a solution of the stage model overlooks: events, and cuts, as what it re-runs in a stage may not fit in any order.

``_Stage`` takes from a solution what is known about the re-runs of a stage, each fact of a kind that ``StageCut`` lists. Whatever
the schedule does, some order is that of the last runs of these ops in the stage, and at each of them the facts say what is in
memory at least. Where no order fits, the facts cannot all hold: the cut.
The fewer facts the stronger, so those are dropped without which nothing fits either (a deletion filter).
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphs.ir import Graph
from planner.milp import Answer
from planner.schedule import Compute, Schedule, keep_all, with_frees
from planner.simulate import simulate
from planner.stage_model import StageCut, StageModel, walk

LARGE = 2.0  # times the budget, what a stage holds that asks for two events at first
PASSED = 2 / 3  # share of its overflow that is before the second
MOST_RUNS = 12  # re-runs that are looked at together; of more, those that take most
MOST_STATES = 3_000  # sets of them at most; where that does not tell, there is no cut


@dataclass(frozen=True, slots=True)
class _Facts:
    """As in ``StageCut``."""

    runs: frozenset[int]
    ends: frozenset[int]
    stays: frozenset[int]
    once: frozenset[int]
    absent: frozenset[int]

    def without(self, kind: str, one: int) -> _Facts:
        return replace(self, **{kind: getattr(self, kind) - {one}})


def broken_cut(model: StageModel, answer: Answer, w: int, budget_bytes: int) -> StageCut | None:
    """The cut that a solution breaks in the stage that ends with event ``w``, not the first one; None where none is found."""
    return _Stage(model, answer, w, budget_bytes).cut()


def fitting_walk(model: StageModel, answer: Answer, graph: Graph, budget_bytes: int) -> list[int]:
    """The sequence that a solution stands for; where re-runs in op order do not fit, in an order that does as far as is known.

    graph  that of the sequence, without the end
    """
    kept = model.kept(answer)
    sequence = walk(model, kept)
    if simulate(graph, with_frees(graph, sequence)).peak_bytes > budget_bytes:
        orders = {w: _Stage(model, answer, w, budget_bytes).order() for w in model.events[1:]}
        if any(len(order) > 1 for order in orders.values()):
            return walk(model, kept, orders)
    return sequence


def missing(
    model: StageModel,
    answer: Answer,
    graph: Graph,
    schedule: Schedule,
    budget_bytes: int,
    cuts: Collection[StageCut],
    most: int,
    *,
    large: float = LARGE,
) -> tuple[list[int], list[int], list[StageCut]]:
    """New events and cuts for the worst overflows of a schedule that walks along a solution, each in a stage of its own.

    An overflow in a re-run asks for a cut. Where none is found, or in a first execution, it asks for an event at w, the first
    execution at or next after it; if that is there, for one at w - 1. A large overflow may only move to the ops after w, so it
    asks for a second one, where most of the stage's overflow is past. Between events and cuts are told those that are second.

    graph  that of the schedule, without the end
    most   events at most, fewer by one for each cut
    large  times the budget, what is held in an overflow that is large
    """
    held_bytes = simulate(graph, schedule).memory_bytes
    over = [s for s, held in enumerate(held_bytes) if held > budget_bytes and isinstance(schedule[s], Compute)]
    over.sort(key=lambda s: -held_bytes[s])
    events, coming = model.events, next_first_runs(graph, schedule)
    more_events: list[int] = []
    seconds: list[int] = []
    more_cuts: list[StageCut] = []
    stages: set[int] = set()
    for s in over:
        step = schedule[s]
        assert isinstance(step, Compute)
        w = coming[s]
        stage = bisect_left(events, w)
        if stage in stages:
            continue
        if step.op != w and 0 < stage < len(events):
            cut = broken_cut(model, answer, events[stage], budget_bytes)
            if cut is not None and cut not in cuts:
                stages.add(stage)
                more_cuts.append(cut)
                continue
        wanted = [t for t in (w, w - 1) if t not in events]
        if wanted and (step.op != w or wanted[0] == w):
            stages.add(stage)
            more_events.append(wanted[0])
            if held_bytes[s] > large * budget_bytes:
                inside = (r for r in reversed(over) if bisect_left(events, coming[r]) == stage)  # the most of an op comes last
                later = _passed({coming[r]: held_bytes[r] - budget_bytes for r in inside})
                if later not in (*events, wanted[0]):
                    more_events.append(later)
                    seconds.append(later)
    more_events = more_events[: max(0, most - len(more_cuts))]
    return more_events, [t for t in seconds if t in more_events], more_cuts


def _passed(excess_bytes: Mapping[int, int]) -> int:
    """The op by which a share PASSED of the excess is past."""
    ops = sorted(excess_bytes)
    sums = list(itertools.accumulate(excess_bytes[w] for w in ops))
    return ops[bisect_left(sums, PASSED * sums[-1])]


def tightest(graph: Graph) -> int:
    """Where the first event goes: the first execution at or next after which most is held if everything is kept."""
    whole = keep_all(graph)
    return next_first_runs(graph, whole)[simulate(graph, whole).peak_step]


def next_first_runs(graph: Graph, schedule: Schedule) -> list[int]:
    """For each step, the op that runs for the first time there or next after it; the number after the last op where none does."""
    seen: set[int] = set()
    first = []
    for step in schedule:
        first.append(isinstance(step, Compute) and step.op not in seen)
        if isinstance(step, Compute):
            seen.add(step.op)
    coming, following = len(graph.ops), []
    for step, is_first in zip(reversed(schedule), reversed(first), strict=True):
        if is_first and isinstance(step, Compute):
            coming = step.op
        following.append(coming)
    return following[::-1]


class _Stage:
    """The stage that ends with an event, as a solution has it.

    carried  values that it has in memory all the stage long
    """

    def __init__(self, model: StageModel, answer: Answer, w: int, budget_bytes: int) -> None:
        assert answer.values is not None
        values, graph = answer.values, model.graph
        j = model.events.index(w) - 1
        keep, after, rerun, twice = model.keep[j], model.keep[j + 1], model.rerun[j], model.twice[j]
        self.graph, self.w = graph, w
        self.size = [value.size_bytes for value in graph.values]
        self.counted = frozenset(keep)  # values too small to count, and resident ones, are not
        again = frozenset(v for v, r in rerun.items() if values[r] > 0.5)
        wanted = {x for x in graph.ops[w].inputs if x in keep} | {x for x in keep if x in after and values[after[x]] > 0.5}
        self.carried = frozenset(x for x in wanted if graph.producer[x] not in again)
        self.room_bytes = budget_bytes - graph.resident_bytes - sum(self.size[x] for x in self.carried)
        self.all_runs = len(again) <= MOST_RUNS
        runs = again if self.all_runs else frozenset(sorted(again, key=lambda v: (-self._weight(v, wanted), v))[:MOST_RUNS])
        made = {x for v in runs for x in graph.ops[v].outputs if x in keep}
        read = {x for v in runs for x in graph.ops[v].inputs if x in keep}
        self.facts = _Facts(
            runs,
            frozenset(made & wanted),
            frozenset(graph.producer[x] for x in read - self.carried) - again,
            frozenset(v for v in runs if v not in twice or values[twice[v]] < 0.5),
            frozenset(x for x in made & read if values[keep[x]] < 0.5),
        )

    def _weight(self, v: int, wanted: Collection[int]) -> int:
        """Bytes that say how much a re-run matters: what it needs in memory, and what of that has to stay."""
        op = self.graph.ops[v]
        needs = sum(self.size[x] for x in {*op.inputs, *op.outputs} if x not in self.carried) + op.workspace_bytes
        return needs + 2 * sum(self.size[x] for x in op.outputs if x in wanted)

    def fits(self, facts: _Facts) -> bool:
        """Whether some order of last runs may fit."""
        return _Jobs(self, facts).order(self.room_bytes) is not None

    def order(self) -> list[int]:
        """An order of its re-runs that may fit; empty where there is none, or there are too many to look at."""
        return _Jobs(self, self.facts).order(self.room_bytes) or [] if self.all_runs else []

    def cut(self) -> StageCut | None:
        """The cut that the solution breaks, if one is found."""
        facts = self.facts
        if not facts.runs or self.fits(facts):
            return None
        for kind in ("absent", "once", "stays"):
            without = replace(facts, **{kind: frozenset()})
            if getattr(facts, kind) and not self.fits(without):
                facts = without
        for v in sorted(facts.runs, key=lambda v: (self._weight(v, facts.ends), v)):
            makes = frozenset(self.graph.ops[v].outputs)
            fewer = _Facts(facts.runs - {v}, facts.ends - makes, facts.stays, facts.once - {v}, facts.absent - makes)
            if fewer.runs and not self.fits(fewer):
                facts = fewer
        for kind in ("absent", "once", "stays", "ends"):
            for one in sorted(getattr(facts, kind)):
                fewer = facts.without(kind, one)
                if not self.fits(fewer):
                    facts = fewer
        return self._cut(facts)

    def _cut(self, facts: _Facts) -> StageCut:
        touched = {x for v in facts.runs for x in (*self.graph.ops[v].inputs, *self.graph.ops[v].outputs)}
        return StageCut(
            self.w,
            tuple(sorted(facts.runs)),
            tuple(sorted(facts.ends)),
            tuple(sorted(facts.stays)),
            tuple(sorted(facts.once)),
            tuple(sorted(facts.absent)),
            _Jobs(self, facts).least_peak_bytes(),
            frozenset(touched - self.carried),
        )


class _Jobs:
    """Ops that run for the last time in a stage, in an order to be found. Sets of values and of ops are the bits of integers."""

    def __init__(self, stage: _Stage, facts: _Facts) -> None:
        graph = stage.graph
        self.runs = sorted(facts.runs)
        bit: dict[int, int] = {}
        self._bytes: list[int] = []

        def bits(values: Iterable[int]) -> int:
            mask = 0
            for x in values:
                if x not in bit:
                    bit[x] = len(bit)
                    self._bytes.append(stage.size[x])
                mask |= 1 << bit[x]
            return mask

        reads = [[x for x in graph.ops[v].inputs if x in stage.counted and x not in stage.carried] for v in self.runs]
        makes = [graph.ops[v].outputs for v in self.runs]
        self._needs = [bits((*r, *m)) for r, m in zip(reads, makes, strict=True)]
        self._workspace_bytes = [graph.ops[v].workspace_bytes for v in self.runs]
        self._leaves = [bits(x for x in m if x in facts.ends) for m in makes]  # from the last run on
        self._awaits = [bits(x for x in r if graph.producer[x] in facts.stays) for r in reads]  # until the last run
        self._between: list[tuple[int, int, int]] = []  # from a run on, a value, until the last of these
        self._first = [0] * len(self.runs)  # what has to run before
        for i, v in enumerate(self.runs):
            for x in makes[i] if v in facts.once else ():
                readers = sum(1 << k for k, r in enumerate(reads) if x in r)
                if readers:
                    self._between.append((i, bits((x,)), readers))
                if x in facts.absent:
                    for k in _members(readers):
                        self._first[k] |= 1 << i

    def _present(self, done: int) -> int:
        """What is in memory when these jobs have run and the others not, whatever runs next."""
        present = 0
        for i, (leaves, awaits) in enumerate(zip(self._leaves, self._awaits, strict=True)):
            present |= leaves if done >> i & 1 else awaits
        for i, x, readers in self._between:
            if done >> i & 1 and readers & ~done:
                present |= x
        return present

    def _peaks(self, done: int) -> Iterator[tuple[int, int]]:
        """Each job that can be next, after a set of jobs, and the bytes in memory while it runs."""
        present = self._present(done)
        for i, needs in enumerate(self._needs):
            if not done >> i & 1 and not self._first[i] & ~done:
                yield i, sum(self._bytes[x] for x in _members(present | needs)) + self._workspace_bytes[i]

    def order(self, room_bytes: int) -> list[int] | None:
        """An order that fits, or one to go on with where that is not known after MOST_STATES sets; None: there is none."""
        everything = (1 << len(self.runs)) - 1
        seen = {0}
        stack: list[tuple[int, list[int]]] = [(0, [])]
        while stack:
            done, order = stack.pop()
            if done == everything or len(seen) > MOST_STATES:
                return order
            coming = sorted(((peak, i) for i, peak in self._peaks(done) if peak <= room_bytes), reverse=True)
            for _, i in coming:  # that with the least peak is tried first
                after = done | 1 << i
                if after not in seen:
                    seen.add(after)
                    stack.append((after, [*order, self.runs[i]]))
        return None

    def least_peak_bytes(self) -> int:
        """The least peak of all orders."""
        everything = (1 << len(self.runs)) - 1
        seen: set[int] = set()
        heap = [(0, 0)]
        while True:
            peak_bytes, done = heapq.heappop(heap)
            if done == everything:
                return peak_bytes
            if done not in seen:
                seen.add(done)
                for i, peak in self._peaks(done):
                    heapq.heappush(heap, (max(peak_bytes, peak), done | 1 << i))


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
