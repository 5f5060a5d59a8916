"""Moccasin: retention intervals by constraint programming, in two phases.

Source: Bartan, Li, Teague, Lott, Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023); the
model is ``planner.methods.retention``. Phase 1 looks for any schedule within the budget, starting from keeping everything; phase
2 starts from what that found and minimises time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from graphs.errors import InputError, check_positive
from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.methods.retention import Coverage, Lengths, Numbering, RetentionModel, sequence, staged
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule, computes, keep_all, with_frees
from planner.simulate import simulate
from planner.solvers import cp_sat
from planner.solvers.cp_sat import Outcome
from planner.stages.model import with_end

METHOD = "moccasin"
MOST_WORKERS = 10_000  # CP-SAT's own limit
CHOICES = {
    "numbering": ("affine", "triangular"),
    "coverage": ("clauses", "reservoirs"),
    "lengths": ("any", "logarithmic"),
}


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    copies: int | None = 2,
    numbering: Numbering = "affine",
    coverage: Coverage = "clauses",
    lengths: Lengths = "any",
    workers: int | None = None,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule in which no op runs more than ``copies`` times, as far as CP-SAT gets.

    copies        runs of an op at most, C in the paper, where 2 is used throughout; None: no limit
    numbering     of events: "affine" (quick to solve), or "triangular", as published
    coverage      every read is served by "clauses", or by "reservoirs", as published
    lengths       intervals are of "any" length, or of a "logarithmic" choice, as published (which loses schedules)
    workers       threads (None: one per core this process may use); with one, the same arguments give the same plan unless the
                  time limit strikes
    gap           stop when (time - bound) / time is at most this, for the bound in the searched space
    time_limit_s  for both phases together; Ctrl-C stops at once. Either way the best schedule so far is returned
    start         a schedule to begin with; where it keeps the graph's order of first executions, its runs also guide the search
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: not known); the
                  bound is that of the searched space

    The searched space (``notes["space"]``): first executions in graph order; between two of them each op again at most once, in
    graph order; at most ``copies`` runs of an op. Bounds: ``notes["space_bound_ns"]`` holds for the space;
    ``restricted_bound_ns`` for any number of runs (it counts what one more run of some op takes at least); ``bound_ns`` is the
    keep-all time, since Moccasin proves nothing about schedules outside of Checkmate's space. So OPTIMAL is rare, and
    ``notes["proved"]`` says where the schedule is optimal in the space (within the gap). Where no schedule of the space fits,
    the status is UNKNOWN and ``notes["stopped"]`` says so; INFEASIBLE is kept for budgets that no schedule fits.

    Raises InputError for options that cannot be used.
    """
    _check(copies, workers, numbering=numbering, coverage=coverage, lengths=lengths)
    search = _Search(graph, budget_bytes, gap, time_limit_s, progress)
    search.notes.update(copies=copies, numbering=numbering, coverage=coverage, lengths=lengths)
    if not search.hopeless():
        search.offer(keep_all(graph), "keep all")
        if start is not None:
            search.offer(start, "start")
        try:
            if search.time_ns is None or search.time_ns > graph.keep_all_time_ns:
                model = RetentionModel(
                    with_end(graph), budget_bytes, copies=copies, numbering=numbering, coverage=coverage, lengths=lengths,
                    deadline=search.deadline,
                )  # fmt: skip
                limits = {"deadline": search.deadline, "workers": workers or _cores(), "seed": seed}
                _phases(search, model, start, limits)
        except TimeoutError:
            search.notes["stopped"] = "time limit"
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan(METHOD, seed=seed)


def _check(copies: int | None, workers: int | None, **given: str) -> None:
    check_positive(**{name: number for name, number in (("copies", copies), ("workers", workers)) if number is not None})
    if workers is not None and workers > MOST_WORKERS:
        raise InputError(f"workers must be at most {MOST_WORKERS:,}, not {workers:,}")
    for name, choice in given.items():
        if choice not in CHOICES[name]:
            raise InputError(f"{name} must be one of {', '.join(CHOICES[name])}, not {choice!r}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _phases(search: _Search, model: RetentionModel, start: Schedule | None, limits: dict[str, Any]) -> None:
    """Phase 1, unless ``start`` does its work, then phase 2."""
    most = "any number of" if model.complete else f"at most {search.notes['copies']}"
    search.notes["space"] = (
        f"first executions in graph order, between two of them each op again at most once, in graph order; {most} runs of an op"
    ) + ("" if model.exact else "; memory rounded up, so some of these are lost")
    last = len(model.graph.ops) - 1
    runs = None if start is None else staged(model.graph, [*computes(start), last])
    if runs is None or not search.fits(runs) or not model.hint(runs):
        runs = _phase_1(search, model, limits)
    if runs is not None:
        model.hint(runs)
        _phase_2(search, model, limits)


def _phase_1(search: _Search, model: RetentionModel, limits: dict[str, Any]) -> list[list[int]] | None:
    """Any schedule of the space within the budget; None where there is none or none was found, which the notes then say."""
    began = now_s()
    found: list[list[list[int]]] = []
    model.hint([[v] for v in range(len(model.graph.ops))])
    model.aim_at_peak()
    answer = cp_sat.minimise(model.model, model.watch, **limits, on_solution=lambda values: found.append(model.read(values)))
    search.notes["phase_1_s"] = now_s() - began
    # The solution that ends the phase fits in the model's own count, and the ruler never counts more.
    if answer.values is not None and answer.cost == max(0, model.capacity):
        search.take(found[-1], "phase 1")
        return found[-1]
    if answer.outcome is Outcome.STOPPED:
        search.notes["stopped"] = "time limit"
    else:
        search.notes["stopped"] = "no schedule in the searched space fits"
        if model.exact:
            assert answer.bound is not None
            search.notes["space_least_bytes"] = model.bytes_of(answer.bound)
            search.raise_restricted(model.outside_ns())
    if found:
        search.notes["smallest_peak_bytes"] = search.peak_bytes(found[-1])
    return None


def _phase_2(search: _Search, model: RetentionModel, limits: dict[str, Any]) -> None:
    """The least time within the budget."""
    began = now_s()
    model.aim_at_time()

    def on_bound(cost: int) -> None:
        search.raise_searched(model.bound_ns(cost))
        if model.exact:
            outside_ns = model.outside_ns()
            search.raise_restricted(search.searched_ns if outside_ns is None else min(search.searched_ns, outside_ns))

    answer = cp_sat.minimise(
        model.model,
        model.watch,
        **limits,
        gap=search.gap,
        on_solution=lambda values: search.take(model.read(values), "phase 2"),
        on_bound=on_bound,
    )
    search.notes["phase_2_s"] = now_s() - began
    assert answer.outcome is not Outcome.INFEASIBLE, "phase 2 found no schedule though it was given one"
    if answer.outcome is Outcome.STOPPED:
        search.notes["stopped"] = "time limit"
    else:
        search.notes["proved"] = "optimal in the searched space" + (f", within a gap of {search.gap}" if search.gap else "")


class _Search(Incumbent):
    """What is known so far, offered as runs in stages."""

    def _schedule(self, runs: Sequence[Sequence[int]]) -> Schedule:
        """The schedule of runs in stages; the last op is the end, which is none of the graph's."""
        return with_frees(self.graph, sequence(runs)[:-1])

    def peak_bytes(self, runs: Sequence[Sequence[int]]) -> int:
        return simulate(self.graph, self._schedule(runs)).peak_bytes

    def fits(self, runs: Sequence[Sequence[int]]) -> bool:
        return self.peak_bytes(runs) <= self.budget_bytes

    def take(self, runs: Sequence[Sequence[int]], phase: str) -> None:
        """A solution of the model, which fits."""
        assert self.fits(runs), f"{phase}: a solution of the model exceeds the budget"
        self.offer(self._schedule(runs), phase)

    def raise_searched(self, bound_ns: int) -> None:
        """Note a bound of the searched space."""
        if bound_ns > self.searched_ns or "space_bound_ns" not in self.notes:
            self.searched_ns = self.notes["space_bound_ns"] = max(bound_ns, self.searched_ns)
            self.report("bound")

    def raise_restricted(self, bound_ns: int | None) -> None:
        """Note a bound of Checkmate's space, which is larger than the searched one."""
        if bound_ns is not None:
            self.restricted_bound_ns = max(bound_ns, self.restricted_bound_ns or 0)
