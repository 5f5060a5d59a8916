"""What a search for a schedule knows so far: the incumbent, bounds, and notes on how it went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule
from planner.simulate import Trace, simulate

REPLAY_WORK = 400_000  # a second, by a slow machine: runs, and values that they read and make, of a sequence freed and simulated
REPLAY_S = 0.5  # beyond the time limit, for the last one


def is_replayable(graph: Graph, runs: Iterable[int], deadline: float) -> bool:
    """Whether there is time to free and simulate a sequence, which cannot be stopped, by ``deadline`` or hardly later."""
    widths = [1 + len(op.inputs) + len(op.outputs) for op in graph.ops]
    return sum(map(widths.__getitem__, runs)) <= _replayable_work(deadline)


def _replayable_work(deadline: float) -> float:
    return REPLAY_WORK * (deadline - now_s() + REPLAY_S)


@dataclass
class Incumbent:
    """The cheapest schedule so far under a budget, what is proved, and what the Plan will say; its clock runs from the start.

    gap                            asked, for (time - bound) / time
    progress                       called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where something changed
    best, time_ns                  the schedule and its time, None before one that fits is offered
    bound_ns, restricted_bound_ns  as in Plan; the first is the keep-all time at least
    any_order_bound_ns             as in Plan; the keep-all time at least
    searched_ns                    no schedule of the searched space takes less: the bound that ``closed`` goes by
    notes                          those of the Plan
    """

    graph: Graph
    budget_bytes: int
    gap: float
    time_limit_s: float = math.inf
    progress: Callable[..., None] | None = None
    best: Schedule | None = field(default=None, init=False)
    time_ns: int | None = field(default=None, init=False)
    restricted_bound_ns: int | None = field(default=None, init=False)
    notes: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.began = now_s()
        self.deadline = self.began + self.time_limit_s
        self.bound_ns = self.searched_ns = self.any_order_bound_ns = self.graph.keep_all_time_ns

    def hopeless(self) -> bool:
        """Whether no schedule fits, in whatever order (see ``least_bytes``); the notes then say so."""
        least = least_bytes(self.graph)
        if least > self.budget_bytes:
            self.notes["infeasible"] = f"no schedule in any order fits: {least:,} bytes are needed"
        return least > self.budget_bytes

    def offer(self, schedule: Schedule, phase: str) -> Trace:
        """Keep a schedule where it fits and is the cheapest so far; ``notes["found_by"]`` is then the phase."""
        trace = simulate(self.graph, schedule)
        if self.wants(trace.peak_bytes, trace.time_ns):
            self.best, self.time_ns = schedule, trace.time_ns
            self.notes["found_by"] = phase
            self.report(phase)
        return trace

    def wants(self, peak_bytes: int, time_ns: float) -> bool:
        """Whether a schedule with this peak and time would be kept."""
        return peak_bytes <= self.budget_bytes and (self.time_ns is None or time_ns < self.time_ns)

    def raise_bound(self, bound_ns: int | None, *, restricted: bool) -> None:
        """Note a proved bound, on schedules with the graph's order of first executions or (restricted) of Checkmate's space."""
        if bound_ns is None:
            return
        if restricted:
            self.restricted_bound_ns = max(bound_ns, self.restricted_bound_ns or 0)
        else:
            self.bound_ns = max(bound_ns, self.bound_ns)
        self.searched_ns = max(bound_ns, self.searched_ns)
        self.report("bound")

    def raise_any_order_bound(self, bound_ns: int | None) -> None:
        """Note a proved bound on all schedules, in whatever order."""
        if bound_ns is not None and bound_ns > self.any_order_bound_ns:
            self.any_order_bound_ns = bound_ns
            self.raise_bound(bound_ns, restricted=False)

    @property
    def shown_bound_ns(self) -> int:
        """The bound that ``progress`` is told."""
        return self.searched_ns

    def report(self, phase: str, time_ns: int | None = None, bound_ns: int | None = None) -> None:
        """Tell ``progress``. One that raises is told no more, so that what is found meanwhile can still be taken.

        time_ns   of a schedule that will be offered, where it may be less than that of the cheapest so far
        bound_ns  instead of ``shown_bound_ns``
        """
        if self.progress is not None:
            least_ns = min((ns for ns in (self.time_ns, time_ns) if ns is not None), default=None)
            try:
                self.progress(time_ns=least_ns, bound_ns=self.shown_bound_ns if bound_ns is None else bound_ns, phase=phase)
            except BaseException:
                self.progress = None
                raise

    def closed(self, gap: float | None = None) -> bool:
        """Whether the incumbent is proved within the gap (default: the one asked for) in the searched space."""
        return self.time_ns is not None and self.time_ns - self.searched_ns <= (self.gap if gap is None else gap) * self.time_ns

    def closed_in_any_order(self) -> bool:
        """Whether the incumbent is proved within the gap asked for among all schedules, in whatever order."""
        return self.time_ns is not None and self.time_ns - self.any_order_bound_ns <= self.gap * self.time_ns

    def done(self, gap: float | None = None) -> bool:
        """Whether it is closed or out of time, which the notes then say."""
        return self.closed(gap) or self.out_of_time()

    def out_of_time(self) -> bool:
        """Whether the time limit has struck, which the notes then say."""
        if now_s() < self.deadline:
            return False
        self.notes["stopped"] = "time limit"
        return True

    def in_time(self, runs: Iterable[int]) -> bool:
        """Whether there is time to free and simulate a sequence; if not, the notes say so."""
        if self.is_replayable(runs):
            return True
        self.notes["stopped"] = "time limit"
        return False

    def is_replayable(self, runs: Iterable[int]) -> bool:
        """Whether there is time to free and simulate a sequence, which cannot be stopped."""
        return is_replayable(self.graph, runs, self.deadline)

    def replayable_work(self) -> float:
        """What there is time to free and simulate: runs, and values that they read and make."""
        return _replayable_work(self.deadline)

    def exhausted(self) -> bool:
        """Whether no order can be much better than the best one, or time is up, which the notes then say."""
        return self.closed_in_any_order() or self.out_of_time()

    def tell_cut_short(self, is_so: bool) -> None:
        """Note that the clock ended some part of the search, so that it may not repeat."""
        if is_so:
            self.notes["cut_short"] = True

    def plan(self, method: str, *, seed: int, bound_ns: int | None = None) -> Plan:
        """The Plan at the end: for the incumbent, with the notes; INFEASIBLE where ``notes["infeasible"]`` says why.

        bound_ns  instead of ``self.bound_ns``
        """
        return Plan.of(
            self.graph,
            self.budget_bytes,
            self.best,
            method=method,
            seed=seed,
            wall_s=now_s() - self.began,
            bound_ns=self.bound_ns if bound_ns is None else bound_ns,
            restricted_bound_ns=self.restricted_bound_ns,
            any_order_bound_ns=self.any_order_bound_ns,
            gap=self.gap,
            infeasible="infeasible" in self.notes,
            notes=self.notes,
        )
