"""Cutting stages: Checkmate's optimum from the few stages that bind, with a certificate. This project's own method.

Memory is tight around a few moments. A MILP with stages at those events only (``stage_model``) bounds from below every
schedule that keeps the graph's order of first executions, and its solution, walked, usually is a schedule that attains the
bound. Where the walk overflows the budget, the overflow says which event was missing; each round adds some. Meanwhile list
walks that hold on to what the MILP keeps (``repair``) find schedules that do fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.list_walk import ListWalk
from planner.milp import Outcome
from planner.result import Plan
from planner.schedule import Compute, Schedule, keep_all, with_frees
from planner.simulate import Trace, simulate
from planner.stage_model import stage_model, walk

METHOD = "cutting_stages"
SHRINK = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # budgets of the one-event MILPs that guide list walks
GRIPS = (1.0, 10.0, 100.0, 1000.0)  # how much more a list walk values what the MILP keeps
GUIDE_AFTER = 2  # rounds
SOLVER_SHARE = 0.1  # of the asked gap may be lost inside the solver; the walk needs the rest
NEW_EVENTS = 2  # events added a round at most


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule found, and a bound on all schedules that keep the graph's order of first executions.

    gap           stop when (time - bound) / time is at most this
    time_limit_s  stop after this long; Ctrl-C stops at once. Either way the best schedule and bound so far are returned
    start         a schedule to begin with; its order of first executions may be another
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: unknown yet)

    The status is INFEASIBLE where no schedule fits at all, or (``notes["infeasible"]`` says so) none with this order.
    """
    search = _Search(graph, budget_bytes, gap, time.perf_counter() + time_limit_s, seed, progress)
    began = time.perf_counter()
    try:
        _run(search, start)
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
    return Plan.of(
        graph,
        budget_bytes,
        search.best,
        method=METHOD,
        seed=seed,
        wall_s=time.perf_counter() - began,
        bound_ns=search.bound_ns,
        gap=gap,
        infeasible="infeasible" in search.notes,
        notes=search.notes,
    )


def _run(search: _Search, start: Schedule | None) -> None:
    """The method, step by step."""
    graph = search.graph
    if least_bytes(graph) > search.budget_bytes:
        search.notes["infeasible"] = "no schedule in any order fits: the least bytes of an op or of the outputs exceed the budget"
        return
    whole = keep_all(graph)
    search.offer(whole, "keep all")
    search.offer(start, "start")
    _rounds(search, _next_first_run(graph, whole, simulate(graph, whole).peak_step))


def _rounds(search: _Search, tightest: int) -> None:
    """Solve for the events so far, walk the solution, add the events where it overflows; until closed or none is left to add.

    Most often the tightest event alone closes it. Where it does not, list walks guided by the solutions find schedules.
    """
    graph = search.graph
    list_walk = ListWalk(graph, search.budget_bytes)
    events = [tightest]
    rounds = 0
    while not search.closed:
        model = stage_model(graph, search.budget_bytes, events)
        answer = model.milp.minimise(
            time_limit_s=search.left_s,
            gap=SOLVER_SHARE * search.gap_cost(model.unit_ns),
            cutoff=search.cutoff(model.unit_ns),
            seed=search.seed,
        )
        rounds += 1
        search.notes["events"] = len(events)
        if answer.outcome is Outcome.INFEASIBLE:
            search.notes["infeasible"] = "no schedule with this order of first executions fits"
            return
        search.raise_bound(model.bound_ns(answer))
        if answer.values is None:
            break
        kept = model.kept(answer)
        schedule = with_frees(graph, walk(graph, events, kept))
        trace = simulate(graph, schedule)
        search.offer(schedule, "walk")
        if search.closed:
            return
        _list_walks(search, list_walk, events, kept)
        if rounds == GUIDE_AFTER:
            _guide(search, list_walk, tightest)
        new = _events_to_add(graph, schedule, trace, search.budget_bytes, events)
        if not new:
            search.notes["stopped"] = "no event left to add"
            return
        events = sorted((*events, *new))
    if not search.closed:
        search.notes["stopped"] = "time limit"


def _guide(search: _Search, list_walk: ListWalk, event: int) -> None:
    """More schedules: one-event MILPs at shrunk budgets say what list walks under the true budget should hold on to."""
    for share in SHRINK:
        if search.closed:
            return
        model = stage_model(search.graph, int(share * search.budget_bytes), [event])
        answer = model.milp.minimise(time_limit_s=min(2.0, search.left_s), gap=search.gap_cost(model.unit_ns), seed=search.seed)
        if answer.values is None:
            return
        _list_walks(search, list_walk, [event], model.kept(answer))


def _list_walks(search: _Search, list_walk: ListWalk, events: Sequence[int], kept: Sequence[frozenset[int]]) -> None:
    for grip in GRIPS:
        if search.closed:
            return
        runs = list_walk(hold=list(zip(events, kept, strict=True)), grip=grip)
        search.offer(None if runs is None else with_frees(search.graph, runs), "list walk")


def _events_to_add(graph: Graph, schedule: Schedule, trace: Trace, budget_bytes: int, events: Sequence[int]) -> list[int]:
    """First executions next after the worst overflows, each in another stage; or just before, where that is an event already."""
    over = sorted((s for s, held in enumerate(trace.memory_bytes) if held > budget_bytes), key=lambda s: -trace.memory_bytes[s])
    new: list[int] = []
    hit: set[int] = set()
    for s in over:
        after = _next_first_run(graph, schedule, s)
        stage = sum(t < after for t in events)
        if stage in hit:
            continue
        fresh = [t for t in (after, after - 1) if t >= 0 and t not in events]
        if fresh:
            hit.add(stage)
            new.append(fresh[0])
            if len(new) == NEW_EVENTS:
                break
    return new


def _next_first_run(graph: Graph, schedule: Schedule, at: int) -> int:
    """The op that runs for the first time at step ``at`` or next after it; the last op where none does."""
    seen: set[int] = set()
    for s, step in enumerate(schedule):
        if isinstance(step, Compute) and step.op not in seen:
            seen.add(step.op)
            if s >= at:
                return step.op
    return len(graph.ops) - 1


@dataclass
class _Search:
    """What is known so far: the best schedule, the best bound, and when to stop."""

    graph: Graph
    budget_bytes: int
    gap: float
    deadline: float
    seed: int
    progress: Callable[..., None] | None
    best: Schedule | None = None
    time_ns: int | None = None
    bound_ns: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound_ns = self.graph.keep_all_time_ns

    @property
    def left_s(self) -> float:
        return max(0.01, self.deadline - time.perf_counter())

    @property
    def closed(self) -> bool:
        """Proved within the gap, or out of time."""
        if self.time_ns is not None and self.time_ns - self.bound_ns <= self.gap * self.time_ns:
            return True
        return time.perf_counter() >= self.deadline

    def offer(self, schedule: Schedule | None, phase: str) -> None:
        """Keep a schedule that fits and is the cheapest so far."""
        if schedule is None:
            return
        trace = simulate(self.graph, schedule)
        if trace.peak_bytes <= self.budget_bytes and (self.time_ns is None or trace.time_ns < self.time_ns):
            self.best, self.time_ns = schedule, trace.time_ns
            self.notes["found_by"] = phase
            self._report(phase)

    def raise_bound(self, bound_ns: int | None) -> None:
        if bound_ns is not None and bound_ns > self.bound_ns:
            self.bound_ns = bound_ns if self.time_ns is None else min(bound_ns, self.time_ns)
            self._report("bound")

    def gap_cost(self, unit_ns: float) -> float:
        """The asked gap as extra time in a model's units."""
        return self.gap * (self.time_ns or self.graph.keep_all_time_ns) / unit_ns

    def cutoff(self, unit_ns: float) -> float:
        """Extra time from which on a bound closes the gap: nothing above needs to be told apart."""
        if self.time_ns is None:
            return float("inf")
        # Halfway into the gap, so that rounding the bound down still closes it.
        return ((1 - 0.5 * self.gap) * self.time_ns - self.graph.keep_all_time_ns) / unit_ns + 0.01

    def _report(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(time_ns=self.time_ns, bound_ns=self.bound_ns, phase=phase)
