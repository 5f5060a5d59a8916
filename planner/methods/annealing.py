"""FastSA: simulated annealing on sequences, which may also reorder ops; no proof, but seconds on any graph.

Source: Imanishi, Xu, Takagi, Wang, Castillo, "A fast heuristic to optimize time-space tradeoff for large models" (NeurIPS 2023).
The moves are in ``planner.walks.annealing``. Left out: fusing cheap chains of ops before (the paper's node groups).
"""

from __future__ import annotations

from collections.abc import Callable

from graphs.errors import check_positive
from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, computes, keep_all
from planner.walks.annealing import Annealer, anneal

METHOD = "annealing"


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    moves: int = 8_000_000,
    keep_order: bool = False,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule that annealing meets; ``bound_ns`` is the keep-all time, so it is OPTIMAL only without re-runs.

    moves         moves to try, a tenth more where nothing fits after them; what would take longer than the time limit cools
                  faster, and is then not repeatable
    keep_order    first executions stay in the order they begin in (that of the graph, or of ``start``)
    gap           stop when (time - bound) / time is at most this
    time_limit_s  stop after this long; Ctrl-C stops at once. Either way the best schedule so far is returned
    start         a schedule to begin with instead of keeping everything
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where a better schedule was found

    Unless the time limit matters, the same arguments give the same plan. Raises InputError for a number of moves below 1.
    """
    check_positive(moves=moves)
    search = Incumbent(graph, budget_bytes, gap, time_limit_s, progress)
    if not search.hopeless():
        try:
            search.offer(keep_all(graph), "keep all")
            if start is not None:
                search.offer(start, "start")
            if not search.closed():
                ops = range(len(graph.ops)) if start is None else list(computes(start))
                anneal(search, Annealer(graph, ops, budget_bytes, seed, keep_order=keep_order), moves)
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan(METHOD, seed=seed)
