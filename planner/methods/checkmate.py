"""Checkmate's MILP (Jain et al., MLSys 2020): the optimum of its space by a general solver, as a baseline.

The model is ``planner.methods.checkmate_model``; any solver of ``planner.solvers.mip_solvers`` takes it.
"""

from __future__ import annotations

from collections.abc import Callable

from graphs.errors import InputError
from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.methods.checkmate_model import (
    FORMS,
    CheckmateModel,
    Form,
    Stopped,
    checkmate_model,
    own_runs,
    start_values,
    walk,
)
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule, keep_all, with_frees
from planner.solvers.milp import Outcome
from planner.solvers.mip_solvers import check_solver, minimise

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
    if form not in FORMS:
        raise InputError(f"unknown form {form!r}; there are: {', '.join(FORMS)}")
    check_solver(solver)
    search = Incumbent(graph, budget_bytes, gap, time_limit_s, progress)
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
                excess = _solve(search, model, solver, seed, whole_space=recompute_backward, first=not withheld)
                if not excess:
                    break
                withheld = max(10 * withheld, 2 * excess, int(BLUR * (budget_bytes - graph.resident_bytes)))
    except Stopped as error:
        search.notes["stopped"] = str(error)
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
    return search.plan(METHOD, seed=seed)


def _needs_solver(search: Incumbent, start: Schedule | None) -> bool:
    """Settle what needs no model; offer the start."""
    if search.hopeless():
        return False
    search.offer(keep_all(search.graph), "keep all")
    if search.best is not None:
        return False
    if start is not None and search.offer(start, "start").peak_bytes > search.budget_bytes:
        search.notes["start"] = "exceeds the budget: not used"
    return True


def _solve(search: Incumbent, model: CheckmateModel, solver: str, seed: int, *, whole_space: bool, first: bool) -> int:
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
        time_limit_s=search.deadline - now_s(),
        gap=search.gap * graph.keep_all_time_ns / model.unit_ns,
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
            trace = search.offer(schedule, solver)
            peaks.append(trace.peak_bytes)
            if trace.peak_bytes <= search.budget_bytes:
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
        search.raise_bound(bound_ns if time_ns is None else min(bound_ns, time_ns), restricted=True)
    elif bound_ns is not None:
        search.notes["bound_without_recomputed_backward_ns"] = bound_ns
    return excess
