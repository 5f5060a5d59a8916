"""Relaxations one after the other, on a solver's thread, while the bound is far below the best schedule.

Then many events are missing, and whatever looks for schedules meanwhile takes as long. So both go on beside each other, each with
a count of the work that it has done, in ops of list walks, which follows from sizes and not from the clock. What the search for
schedules is told at some count is what relaxations have come to by the same one; where they are later than that, it waits. Only
near the time limit does the clock say how many events are worth while.

Where more events raise the bound no more, or there is no time for them, the last relaxation is branched on
(``planner.stages.branching``), and what its lowest node overflows says which events are next.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphs.ir import Graph
from planner.process import turns
from planner.process.clock import now_s
from planner.solvers.milp import Left, run_apart
from planner.stages.branching import Branching
from planner.stages.events import halfway, missing
from planner.stages.model import MOST_TINY, Event, stage_model, walk
from planner.stages.search import SMALL_OPS, StageSearch
from planner.stages.solving import WORK_VARIABLES, idle_events
from planner.stages.spans import SpanRow, relax

# Events added at a time. Where the bound has just risen by this share of what is left, those whose rows are slack go.
NEW, STEEP = 4, 0.03
# What a relaxation takes as long as, in ops of list walks: so many, and so many times the square of its variables, in thousands.
LEAST_WORK, WORK = 2_000, 10_000
# Those that raise the bound by less than this share of what is left are the last ones once they have taken this share of all, and
# so much.
CLIMB, IDLE_SHARE, IDLE_WORK = 0.005, 0.5, 200_000
BRANCH_RISE = 0.001  # for so many of a branch and bound as take as long as one
LEAST_RISE = 0.01  # and rows on spans that raise it by less than this share, within one
HURRY = 0.8  # a relaxation that should take more than this share of the time left has fewer new events
UNKNOWN = 0.25  # share of the keep-all time that the bound may be away where there is no schedule
# Relaxations of a branch and bound that take as long as one from the beginning; how many times in a row they may raise the bound
# by hardly anything, on one model and on several; first executions added after each.
BRANCH, IDLE_BRANCHES, NEW_BRANCHED = 10, 3, 2
WAIT_S = 0.02


class Reached(NamedTuple):
    """What there is once some relaxations have been solved.

    work      by then
    bound_ns  the best of theirs
    sequence  the walk along the last solution, rounded; empty before the first
    events    for the next one, and rows of the last that bind
    is_last   whether there is no time for another one
    """

    work: float
    bound_ns: int
    sequence: Sequence[int]
    events: list[Event]
    rows: list[SpanRow]
    is_last: bool = False


@dataclass(kw_only=True)
class Climb:
    """The relaxations of one search.

    events   to begin with
    reached  before the first of them, after it, after the second, ...
    hurried  whether the clock has chosen events
    """

    search: StageSearch
    closed_graph: Graph
    events: list[Event]
    reached: list[Reached] = field(init=False)
    hurried: bool = field(default=False, init=False)
    _ends_at: float = field(default=0.0, init=False)  # work by the end of the relaxation under way; infinite after the last
    _awaited: tuple[float, threading.Event] = field(default_factory=lambda: (0.0, threading.Event()), init=False)
    _distance_ns: float = field(default=0.0, init=False)  # to the best schedule when it began
    _s_per_work: float = field(default=0.0, init=False)  # of the last one; the first one is begun in any case
    _last: tuple[list[Event], list[SpanRow]] | None = field(default=None, init=False)  # of the last one, if it was solved
    _has_branched: bool = field(default=False, init=False)
    _idle: int = field(default=0, init=False)  # how many times in a row that has hardly raised the bound
    _rose_at: float = field(default=0.0, init=False)  # work by the end of the last one that raised the bound by much

    def __post_init__(self) -> None:
        self.reached = [Reached(0.0, self.search.searched_ns, (), self.events, [])]

    @property
    def is_wanted(self) -> bool:
        """Whether this is a large training step without a schedule so far, or with a bound far from it.

        In small ones MILPs of few events and A* prove more.
        """
        search = self.search
        is_large = search.trained and not search.nested and len(search.graph.ops) > SMALL_OPS
        return is_large and (search.is_far or search.best is None) and not search.done()

    def beside(self, others: Callable[[], None]) -> Reached:
        """Relax until ``others`` are done. What it has come to by when they last asked; where the clock ends them, at all."""
        search, left = self.search, Left()
        self._distance_ns = search.distance_ns if search.best is not None else UNKNOWN * search.base
        has_ended = False

        def meanwhile(_: threading.Event) -> None:
            others()
            left.set()

        try:
            run_apart(self._relaxations, search.left_s, meanwhile, left)
            has_ended = now_s() < search.deadline
        finally:
            count = self._solved(self._awaited[0] if has_ended else math.inf)
            told = self.reached[count]
            search.raise_bound(told.bound_ns, restricted=False)
            search.tell_cut_short(self.hurried)
            search.notes.update(events=len(told.events), relaxations=count)
        return told

    def by(self, work: float) -> Reached:
        """What the relaxations that end by then have come to; waits for those."""
        settled = threading.Event()
        self._awaited = work, settled  # first: the other thread sets it from now on
        if self._ends_at <= work and self.search.walks.runs is not None:
            self.search.walk_beyond(settled, self.search.deadline, lambda: None)
        while self._ends_at <= work and now_s() < self.search.deadline:
            time.sleep(WAIT_S)
        told = self.reached[self._solved(work)]
        self.search.raise_bound(told.bound_ns, restricted=False)
        return told

    def is_over(self, work: float) -> bool:
        """Whether the last relaxation ends by then."""
        return math.isinf(self._ends_at) and self.reached[-1].work <= work

    def _solved(self, work: float) -> int:
        """How many relaxations end by then."""
        return sum(reached.work <= work for reached in list(self.reached)) - 1

    def _goes_on_until(self, work: float) -> None:
        """On the solver's thread: the relaxation under way ends there; say so where what was asked for is known by that."""
        self._ends_at = work
        awaited, settled = self._awaited
        if work > awaited:
            settled.set()

    def _relaxations(self, left: Left) -> None:
        """All of them, on the solver's thread."""
        try:
            while not left.is_set() and (self._relax(left) or self._branch(left)):
                pass
        finally:
            if self._ends_at > self.reached[-1].work:  # nothing came of the last one, which took its time
                self.reached.append(self.reached[-1]._replace(work=self._ends_at))
            self._goes_on_until(math.inf)

    def _relax(self, left: Left) -> bool:
        """The next one; whether another one is to follow."""
        search, last = self.search, self.reached[-1]
        with turns.first():
            model = stage_model(self.closed_graph, search.budget_bytes, last.events, tiny_share=MOST_TINY)
        work = LEAST_WORK + WORK * (len(model.milp.cost) / WORK_VARIABLES) ** 2
        if self._s_per_work * work > search.left_s:
            self.reached[-1], self.hurried = last._replace(is_last=True), True
            return False
        self._goes_on_until(last.work + work)
        began = now_s()
        least_rise = LEAST_RISE * self._distance_ns / model.unit_ns
        answer, rows = relax(model, last.rows, time_limit_s=search.left_s, least_rise=least_rise, left=left)
        self._s_per_work = (now_s() - began) / work
        self._last = None if answer.values is None else (last.events, rows)
        if answer.values is None:
            return False
        with turns.first():
            bound_ns = max(last.bound_ns, model.bound_ns(answer) or 0)
            climbed = (bound_ns - last.bound_ns) / max(1.0, self._distance_ns)
            if climbed > CLIMB:
                self._rose_at = self._ends_at
            found = walk(model, answer.values)
            wanted = halfway(model, search.graph, found, search.budget_bytes, NEW) if not self._has_branched else []
            more = list(wanted)
            gone = idle_events(model, answer) if climbed > STEEP else []
            while more and not self._has_time(work, len({*last.events, *more}.difference(gone)) / len(last.events)):
                more.pop()
            events = sorted({*last.events, *more}.difference(gone)) or last.events
            is_last = bool(wanted) and not more
            self.reached.append(Reached(self._ends_at, bound_ns, found.runs, events, rows, is_last))
        return bool(more) and self._ends_at - self._rose_at <= IDLE_SHARE * self._ends_at + IDLE_WORK

    def _branch(self, left: Left) -> bool:
        """Branch on the last one, for as long as that raises the bound; whether another one is to follow, with events that the
        lowest node asks for."""
        search = self.search
        if left.is_set() or self._last is None or now_s() >= search.deadline:
            return False
        events, rows = self._last
        with turns.first():
            model = stage_model(self.closed_graph, search.budget_bytes, events, tiny_share=MOST_TINY)
        branching = Branching(model, rows, left, search.told)
        cutoff = (self.reached[0].bound_ns - search.base + self._distance_ns) / model.unit_ns
        work = LEAST_WORK + WORK * (len(model.milp.cost) / WORK_VARIABLES) ** 2
        before_ns, idle = self.reached[-1].bound_ns, 0
        while idle < IDLE_BRANCHES and not (left.is_set() or branching.is_stuck or now_s() >= search.deadline):
            last = self.reached[-1]
            self._goes_on_until(last.work + work)
            branching.go_on(BRANCH, cutoff=cutoff, deadline=search.deadline)
            with turns.first():
                bound_ns = max(last.bound_ns, model.bound_ns(branching.answer) or 0)
            idle = 0 if bound_ns - last.bound_ns > BRANCH_RISE * self._distance_ns else idle + 1
            self.reached.append(last._replace(work=self._ends_at, bound_ns=bound_ns))
        last, answer, self._has_branched = self.reached[-1], branching.answer, True
        self._idle = 0 if last.bound_ns - before_ns > CLIMB * self._distance_ns else self._idle + 1
        if answer.values is None or self._idle == IDLE_BRANCHES or last.is_last or left.is_set():
            return False
        self._goes_on_until(last.work + LEAST_WORK)
        with turns.first():
            found = walk(model, answer.values)
            more, _ = missing(model, search.graph, found, search.budget_bytes, NEW_BRANCHED, by_need=True)
        events = sorted({*events, *more})
        self.reached.append(last._replace(work=self._ends_at, sequence=found.runs, events=events, rows=rows))
        return bool(more)

    def _has_time(self, work: float, times: float) -> bool:
        """Whether there is time for a relaxation of so many times the events; only where there is not, the clock has a say."""
        fits = self._s_per_work * work * times**3 <= HURRY * self.search.left_s
        self.hurried |= not fits
        return fits
