"""Keep everything until its last use: plain execution. Least time; fits only where the budget is its peak or more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graphs.ir import Graph
from planner.bounds import least_bytes
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
    began = time.perf_counter()
    schedule = keep_all(graph)
    fits = simulate(graph, schedule).peak_bytes <= budget_bytes
    notes: dict[str, Any] = {}
    if not fits:
        least = least_bytes(graph)
        if least > budget_bytes:
            notes["infeasible"] = f"no schedule in any order fits: {least:,} bytes are needed"
        else:
            notes["stopped"] = "keeping everything does not fit the budget"
    return Plan.of(
        graph,
        budget_bytes,
        schedule if fits else None,
        method="keep_all",
        seed=seed,
        wall_s=time.perf_counter() - began,
        bound_ns=graph.keep_all_time_ns,
        gap=gap,
        infeasible="infeasible" in notes,
        notes=notes,
    )
