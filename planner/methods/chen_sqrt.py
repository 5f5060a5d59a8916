"""Chen's square-root rule: a checkpoint at every k-th of n candidates, k = √n (Chen et al. 2016).

The candidates on general graphs are those of Checkmate (Jain et al., MLSys 2020, appendix B). On a chain of n equal layers the
rule takes memory for about 2 √n of them and one more forward pass. It knows neither sizes nor times nor the budget: one schedule
for each kind of candidates.
"""

from __future__ import annotations

from collections.abc import Callable

from graphs.ir import Graph
from planner.chains.checkpoints import Trials, every_root, kinds
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    candidates: str = "both",
) -> Plan:
    """The square-root schedule, where it fits; ``bound_ns`` is the keep-all time.

    time_limit_s  a schedule that takes longer to measure is left out
    candidates    what may be a checkpoint: "articulation" (ops on which all later ones depend), "linearized" (every forward op),
                  or "both": the cheaper of the two that fit
    """
    search = Incumbent(graph, budget_bytes, gap, time_limit_s)
    trials = Trials(search)
    asked = kinds(candidates)
    if not search.hopeless():
        try:
            for kind in asked:
                if trials.take(every_root(graph, kind)):
                    search.notes["candidates"] = kind
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
        search.best = trials.schedule
        if search.best is not None:
            search.notes["checkpoints"] = len(trials.checkpoints)
        elif "stopped" not in search.notes and trials.needs_bytes is not None:
            search.notes["needs_bytes"] = trials.needs_bytes
            search.notes["stopped"] = f"the square-root rule needs {trials.needs_bytes:,} bytes"
    return search.plan("chen_sqrt", seed=seed)
