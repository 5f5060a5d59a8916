"""``best_run``: every online rule on one graph under one budget, and the cheapest of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphs.errors import InputError, quoted
from graphs.ir import Graph
from online.heuristics import HEURISTICS
from online.runtime import Run, run
from planner.result import Plan

if TYPE_CHECKING:
    from graphs.capture import Step

METHOD = "online:best"


@dataclass(frozen=True)
class Portfolio:
    """One run for each rule, same graph and budget.

    runs  in the order of the rules; those that stopped are here too
    """

    runs: tuple[Run, ...]

    @property
    def best(self) -> Run | None:
        """The run of least time, the first of equals; None where none completed."""
        return min((run_ for run_ in self.runs if run_.completed), key=lambda run_: run_.time_ns or 0, default=None)

    def plan(self) -> Plan:
        """The best run's schedule as a Plan, UNKNOWN where none completed. Its method is ``online:best``.

        ``notes``: ``rule`` is the one that won (None: none), ``rules`` has the time of each in ns, or why it stopped.
        ``wall_s`` is that of all runs together: what it takes to know which is best.
        """
        best = self.best
        notes: dict[str, Any] = {
            "rule": best.rule if best is not None else None,
            "rules": {run_.rule: run_.time_ns if run_.completed else str(run_.status) for run_ in self.runs},
        }
        shown = self.runs[0] if best is None else best
        plan = shown.plan()
        return replace(plan, method=METHOD, wall_s=sum(run_.wall_s for run_ in self.runs), notes=plan.notes | notes)

    def row(self) -> dict[str, Any]:
        """The result row of ``plan()``."""
        return self.plan().row()


def best_run(
    target: Graph | Step, budget: int | float | str, *, rules: Sequence[str] = tuple(HEURISTICS), seed: int = 0, **options: Any
) -> Portfolio:
    """Run every rule (simulated) under one budget; ``.best`` is the cheapest run and ``.plan()`` its Plan.

    rules    names as ``run`` takes them ("dtr", "dtr+reclaim"); default: every rule that decides by bytes
    options  of ``run``, the same for all

    Raises what ``run`` raises: InfeasibleBudget where no schedule at all fits, InputError for what cannot be used.
    """
    names = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else ()
    if not names:
        raise InputError(f"rules must be one or more names of online rules, not {quoted(rules)}")
    return Portfolio(tuple(run(target, budget, heuristic=rule, seed=seed, **options) for rule in names))
