"""Chen's square-root rule: a checkpoint at every k-th of n candidates, k = √n (Chen et al. 2016).

The candidates on general graphs are those of Checkmate (Jain et al., MLSys 2020, appendix B). On a chain of n equal layers the
rule takes memory for about 2 √n of them and one more forward pass. It knows neither sizes nor times nor the budget: one schedule
for each kind of candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.checkpoints import Trials, every_root, kinds
from planner.result import Plan
from planner.schedule import Schedule


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 0.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    candidates: str = "both",
) -> Plan:
    """The square-root schedule, where it fits; ``bound_ns`` is the keep-all time.

    candidates  what may be a checkpoint: "articulation" (ops on which all later ones depend), "linearized" (every forward op), or
                "both": the cheaper of the two that fit
    """
    began = time.perf_counter()
    notes: dict[str, Any] = {}
    trials = Trials(graph, budget_bytes)
    asked = kinds(candidates)
    if (least := least_bytes(graph)) > budget_bytes:
        notes["infeasible"] = f"no schedule in any order fits: {least:,} bytes are needed"
    else:
        for kind in asked:
            if trials.take(every_root(graph, kind)):
                notes["candidates"] = kind
        if trials.schedule is None:
            notes["needs_bytes"] = trials.needs_bytes
            notes["stopped"] = f"the square-root rule needs {trials.needs_bytes:,} bytes"
        else:
            notes["checkpoints"] = len(trials.checkpoints)
    return Plan.of(
        graph,
        budget_bytes,
        trials.schedule,
        method="chen_sqrt",
        seed=seed,
        wall_s=time.perf_counter() - began,
        bound_ns=graph.keep_all_time_ns,
        gap=gap,
        infeasible="infeasible" in notes,
        notes=notes,
    )
