"""Checkmate's approximation (Jain et al., MLSys 2020, section 5): the LP relaxation, and its checkpoints rounded in two phases.

Phase 1 rounds the held values S of the LP, phase 2 runs the least that these checkpoints ask for (Algorithm 2). What is rounded
may exceed the budget, so the LP is solved for (1 - allowance) of it and the schedule is tested against all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Literal

from graphs.errors import InputError
from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.methods.checkmate_model import CheckmateModel, Held, Stopped, checkmate_model, out_of_time, walk
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule, keep_all, with_frees
from planner.solvers.milp import Outcome
from planner.solvers.mip_solvers import check_solver, minimise

METHOD = "checkmate_lp"
ROUNDINGS = ("both", "deterministic", "randomized")
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GRID = (0.1, 0.05, 0.2, 0.3, 0.4)  # allowances tried after none, the published one first
REFINEMENTS = 2  # rounds of trying the middles between the best allowance and its neighbours

Rounding = Literal["both", "deterministic", "randomized"]


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    solver: str = "cbc",
    rounding: Rounding = "both",
    draws: int = 20,
    allowances: Sequence[float] | None = None,
) -> Plan:
    """The cheapest schedule that fits among the roundings of the LP relaxation of Checkmate's MILP.

    gap           stop when (time - LP bound) / time is at most this
    time_limit_s  stop after this long; Ctrl-C stops at once. Either way the best schedule and bound so far are returned
    seed          of the random draws, and of the solver
    start         a schedule that competes with the roundings
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: not known)
    solver        for the LPs; as in ``checkmate``
    rounding      "deterministic": hold what S says above a threshold, 0.1, 0.2, ... 0.9; "randomized": hold each value with
                  probability S, ``draws`` times; "both"
    allowances    shares of the bytes beyond the resident ones to withhold from the LP, each tried; default: none, the paper's
                  0.1, a few others up to 0.4, then some between the best one and its neighbours

    The LP without an allowance bounds Checkmate's space: its optimum is ``restricted_bound_ns``. ``bound_ns``, for every
    schedule, is the keep-all time. Unless the time limit struck (``notes["stopped"]``), the same arguments give the same plan.
    Raises InputError where an option cannot be used.
    """
    if rounding not in ROUNDINGS:
        raise InputError(f"unknown rounding {rounding!r}; there are: {', '.join(ROUNDINGS)}")
    if draws < 0:
        raise InputError(f"draws must be at least 0, not {draws!r}")
    if allowances is not None and not (isinstance(allowances, Sequence) and all(map(_share, allowances))):
        raise InputError(f"allowances must be shares of the budget, at least 0 and below 1, not {allowances!r}")
    check_solver(solver)
    search = _Search(graph, budget_bytes, gap, time_limit_s, progress, seed=seed, solver=solver, rounding=rounding, draws=draws)
    try:
        _run(search, start, allowances)
        if search.best is None and "infeasible" not in search.notes:
            search.notes.setdefault("stopped", "no rounding fits")
    except Stopped as error:
        search.notes["stopped"] = str(error)
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
    return search.plan(METHOD, seed=seed)


def _share(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < 1


def _run(search: _Search, start: Schedule | None, allowances: Sequence[float] | None) -> None:
    """The method, step by step."""
    if search.hopeless():
        return
    search.offer(keep_all(search.graph), "keep all")
    if search.best is not None:
        return
    if start is not None:
        search.offer(start, "start")
    if not search.attempt(0.0):  # for the bound, whatever the allowances
        search.notes["stopped"] = "no schedule in Checkmate's space fits"
        return
    if allowances is not None:
        for allowance in allowances:
            if not search.closed():
                search.attempt(allowance)
        return
    for allowance in GRID:
        if not search.closed():
            search.attempt(allowance)
    for _ in range(REFINEMENTS):
        for allowance in search.beside_best():
            if not search.closed():
                search.attempt(allowance)


@dataclass(kw_only=True)
class _Search(Incumbent):
    """What is known so far, also of the allowances."""

    seed: int
    solver: str
    rounding: Rounding
    draws: int
    tried: dict[float, int | None] = field(default_factory=dict)  # allowance -> least time of its roundings that fit
    too_much: float = 1.0  # the LP has no solution for this allowance

    def __post_init__(self) -> None:
        super().__post_init__()
        self.notes.update(roundings=0, roundings_that_fit=0)

    def attempt(self, allowance: float) -> bool:
        """Solve the LP with that share of the free bytes withheld and round it; False where it has no solution.

        Raises Stopped where the time limit strikes.
        """
        if allowance >= self.too_much:
            return False
        withheld = int(allowance * (self.budget_bytes - self.graph.resident_bytes))
        model = checkmate_model(self.graph, self.budget_bytes - withheld, integer=False, deadline=self.deadline)
        left_s = self.deadline - now_s()
        answer = minimise(model.milp, solver=self.solver, time_limit_s=left_s, seed=self.seed)
        if not withheld:
            self.raise_bound(model.bound_ns(answer.bound), restricted=True)
        if answer.stopped == "interrupted":
            raise KeyboardInterrupt
        if answer.outcome is Outcome.INFEASIBLE:
            self.too_much = allowance
            return False
        if answer.values is None:
            raise Stopped(answer.stopped or "time limit")
        self.tried.setdefault(allowance, None)
        for name, held in self._roundings(model, answer.values):
            out_of_time(self.deadline)
            time_ns = self._try(model, held, f"{name}, allowance {allowance:.4g}")
            best_ns = self.tried[allowance]
            if time_ns is not None and (best_ns is None or time_ns < best_ns):
                self.tried[allowance] = time_ns
        return True

    def beside_best(self) -> list[float]:
        """The middles between the allowance with the cheapest rounding and those next to it."""
        done = sorted(self.tried)
        fitting = [a for a in done if self.tried[a] is not None]
        if not fitting:
            return []
        at = done.index(min(fitting, key=lambda a: (self.tried[a] or 0, a)))
        return [(a + b) / 2 for a, b in pairwise([*done, self.too_much][max(0, at - 1) : at + 2])]

    def _roundings(self, model: CheckmateModel, values: Sequence[float]) -> Iterator[tuple[str, Held]]:
        """Phase 1, with a name for each. What an op with an outside effect made is held whatever S says: it cannot run again."""
        ops, producer = self.graph.ops, self.graph.producer
        sure = [{x for x in hold if ops[producer[x]].effect} for hold in model.hold]

        def rounded(chosen: Callable[[float], bool]) -> Held:
            return [held | always for held, always in zip(model.held(values, chosen), sure, strict=True)]

        if self.rounding != "randomized":
            for threshold in THRESHOLDS:
                yield f"threshold {threshold}", rounded(threshold.__le__)
        if self.rounding != "deterministic":
            random = Random(self.seed)
            for draw in range(self.draws):
                yield f"draw {draw}", rounded(lambda s: random.random() < s)

    def _try(self, model: CheckmateModel, held: Held, phase: str) -> int | None:
        """Phase 2: run what the checkpoints ask for; the time where that fits."""
        self.notes["roundings"] += 1
        runs = walk(model, held)
        if runs is None:
            return None
        trace = self.offer(with_frees(self.graph, runs), phase)
        if trace.peak_bytes > self.budget_bytes:
            return None
        self.notes["roundings_that_fit"] += 1
        return trace.time_ns
