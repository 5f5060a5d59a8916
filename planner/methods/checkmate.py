"""Checkmate's MILP (Jain et al., MLSys 2020): the optimum of its space by a general solver, as a baseline.

The model is ``planner.checkmate_model``; any solver of ``planner.mip_solvers`` takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphs.errors import InputError
from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.checkmate_model import (
    FORMS,
    CheckmateModel,
    Form,
    Stopped,
    checkmate_model,
    own_runs,
    start_values,
    walk,
)
from planner.milp import Outcome
from planner.mip_solvers import check_solver, minimise
from planner.result import Plan
from planner.schedule import Schedule, keep_all, with_frees
from planner.simulate import simulate

METHOD = "checkmate"
TRIES = 4  # solves of a budget, where solutions exceed it by less than the solver can tell
BLUR = 1e-6  # what that is about, as a share of the free bytes


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
    form: Form = "strong",
    presolve: bool = True,
    recompute_backward: bool = True,
) -> Plan:
    """The cheapest schedule of Checkmate's space: between two first executions every op runs again at most once, in graph order.

    gap                 stop when the solver has proved that no schedule of the space takes less than (1 - gap) of the one found
    time_limit_s        stop after this long; Ctrl-C stops at once. Either way the best schedule and bound so far are returned
    start               a schedule to begin with. The solver starts from it where it is in the space; else it is kept beside
    progress            called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: not known)
    solver              "cbc" (through PuLP), "highs" or "scip" (through OR-Tools), "gurobi", "cplex", ... where installed and
                        licensed, or PuLP's own name of any solver
    form                "strong", or "paper": as published, with binary F; the same optimum, slower
    presolve            leave out of the model what cannot matter; the optimum is the same
    recompute_backward  False: no backward op runs twice, which most heuristics assume; fewer schedules, a smaller model

    What the solver proves holds for the space alone and is ``restricted_bound_ns``; ``bound_ns``, for every schedule, is the
    keep-all time. So the status is OPTIMAL only where nothing need run again, INFEASIBLE only where no schedule in any order
    fits, and UNKNOWN with ``notes["stopped"]`` where no schedule of the space does.
    Raises InputError where the solver is unknown or cannot run here.
    """
    began = time.perf_counter()
    if form not in FORMS:
        raise InputError(f"unknown form {form!r}; there are: {', '.join(FORMS)}")
    check_solver(solver)
    search = _Search(graph, budget_bytes, began + time_limit_s, progress)
    try:
        if _needs_solver(search, start):
            withheld = 0  # bytes
            for _ in range(TRIES):  # once, unless the solver cannot tell a schedule that fits from one that does not
                model = checkmate_model(
                    graph,
                    budget_bytes - withheld,
                    form=form,
                    presolve=presolve,
                    recompute_backward=recompute_backward,
                    deadline=search.deadline,
                )
                search.notes.update(solver=solver, variables=len(model.milp.cost), rows=len(model.milp.row_lower))
                excess = _solve(search, model, solver, gap, seed, whole_space=recompute_backward, first=not withheld)
                if not excess:
                    break
                withheld = max(10 * withheld, 2 * excess, int(BLUR * (budget_bytes - graph.resident_bytes)))
    except Stopped as error:
        search.notes["stopped"] = str(error)
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
    return Plan.of(
        graph,
        budget_bytes,
        search.best,
        method=METHOD,
        seed=seed,
        wall_s=time.perf_counter() - began,
        bound_ns=graph.keep_all_time_ns,
        restricted_bound_ns=search.restricted_bound_ns,
        gap=gap,
        infeasible="infeasible" in search.notes,
        notes=search.notes,
    )


def _needs_solver(search: _Search, start: Schedule | None) -> bool:
    """Settle what needs no model; offer the start."""
    if least_bytes(search.graph) > search.budget_bytes:
        search.notes["infeasible"] = "no schedule in any order fits: an op alone, or the outputs together, exceed the budget"
        return False
    if search.offer(keep_all(search.graph), "keep all"):
        return False
    if start is not None and not search.offer(start, "start"):
        search.notes["start"] = "exceeds the budget: not used"
    return True


def _solve(search: _Search, model: CheckmateModel, solver: str, gap: float, seed: int, *, whole_space: bool, first: bool) -> int:
    """Give the model to the solver and take what comes of it; the bytes that its solution lacks, where it is
    worth to try again with less; 0 else.

    first  the model is of all of the budget; only then what is proved holds for it
    """
    graph = search.graph
    begin = None if search.best is None else start_values(model, search.best)
    if first and search.best is not None and begin is None:
        search.notes["start"] = "not in Checkmate's space: kept, but the solver begins without it"
    answer = minimise(
        model.milp,
        solver=solver,
        time_limit_s=search.deadline - time.perf_counter(),
        gap=gap * graph.keep_all_time_ns / model.unit_ns,
        start=begin,
        seed=seed,
    )
    if answer.stopped:
        search.notes["stopped"] = answer.stopped
    if answer.outcome is Outcome.INFEASIBLE:
        if begin is not None:
            search.notes["stopped"] = f"{solver} calls a model infeasible that has a solution: its word is not used"
        elif first:
            search.notes["stopped"] = "no schedule in Checkmate's space fits"
            if not whole_space:
                search.notes["stopped"] += " where no backward op runs twice"
        return 0
    time_ns, excess = None, 0
    if answer.values is not None:
        peaks: list[int] = []
        for runs in (walk(model, model.held(answer.values)), own_runs(model, answer.values)):
            schedule = None if runs is None else with_frees(graph, runs)
            if schedule is None:
                continue
            trace = simulate(graph, schedule)
            peaks.append(trace.peak_bytes)
            if search.offer(schedule, solver):
                time_ns = trace.time_ns
                break
        else:
            excess = min(peaks) - search.budget_bytes
            search.notes["rejected"] = search.notes.get("rejected", 0) + 1
            if search.best is None and not answer.stopped:
                search.notes["stopped"] = (
                    f"{solver} finds schedules that need {excess:,} bytes more: it cannot tell the difference"
                )
    if time_ns is not None and not answer.stopped:
        search.notes.pop("stopped", None)
    if answer.stopped:
        excess = 0  # there is no time to try again
    if not first:
        return excess
    bound_ns = model.bound_ns(answer.bound)
    if bound_ns is not None and whole_space:
        # Time of a schedule in the space caps it: that one is then optimal, whatever rounding may say.
        search.restricted_bound_ns = bound_ns if time_ns is None else min(bound_ns, time_ns)
        search.report("bound")
    elif bound_ns is not None:
        search.notes["bound_without_recomputed_backward_ns"] = bound_ns
    return excess


@dataclass
class _Search:
    """What is known so far."""

    graph: Graph
    budget_bytes: int
    deadline: float
    progress: Callable[..., None] | None
    best: Schedule | None = None
    time_ns: int | None = None
    restricted_bound_ns: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def offer(self, schedule: Schedule, phase: str) -> bool:
        """Keep a schedule that fits and is the cheapest so far; whether it fits."""
        trace = simulate(self.graph, schedule)
        if trace.peak_bytes > self.budget_bytes:
            return False
        if self.time_ns is None or trace.time_ns < self.time_ns:
            self.best, self.time_ns = schedule, trace.time_ns
            self.notes["found_by"] = phase
            self.report(phase)
        return True

    def report(self, phase: str) -> None:
        if self.progress is not None:
            bound_ns = max(self.graph.keep_all_time_ns, self.restricted_bound_ns or 0)
            self.progress(time_ns=self.time_ns, bound_ns=bound_ns, phase=phase)
