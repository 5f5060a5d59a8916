"""Keep everything until its last use: plain execution. Least time; fits only where the budget is its peak or more."""

from __future__ import annotations

from collections.abc import Callable

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, keep_all
from planner.simulate import simulate


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 0.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The keep-all schedule where it fits (then optimal: no schedule takes less). Nothing else is tried: else it is UNKNOWN,
    or INFEASIBLE where an op alone, or the outputs together, exceed the budget.
    """
    search = Incumbent(graph, budget_bytes, gap)
    schedule = keep_all(graph)
    if simulate(graph, schedule).peak_bytes <= budget_bytes:
        search.best = schedule
    elif not search.hopeless():
        search.notes["stopped"] = "keeping everything does not fit the budget"
    return search.plan("keep_all", seed=seed)
