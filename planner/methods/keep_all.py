"""Keep everything until its last use: plain execution. Least time; fits only where the budget is its peak or more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graphs.ir import Graph
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
    """The keep-all schedule where it fits (then optimal: no schedule takes less), else UNKNOWN: nothing else is tried."""
    began = time.perf_counter()
    schedule = keep_all(graph)
    fits = simulate(graph, schedule).peak_bytes <= budget_bytes
    notes: dict[str, Any] = {} if fits else {"reason": "keeping everything does not fit the budget"}
    return Plan.of(
        graph,
        budget_bytes,
        schedule if fits else None,
        method="keep_all",
        seed=seed,
        wall_s=time.perf_counter() - began,
        bound_ns=graph.keep_all_time_ns,
        gap=gap,
        notes=notes,
    )
