"""FastSA: simulated annealing on sequences, which may also reorder ops; no proof, but seconds on any graph.

Source: Imanishi, Xu, Takagi, Wang, Castillo, "A fast heuristic to optimize time-space tradeoff for large models" (NeurIPS 2023).
The moves are in ``planner.annealing``. Left out: fusing cheap chains of ops before (the paper's node groups).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from graphs.errors import check_positive
from graphs.ir import Graph
from planner.annealing import Annealer, useful
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, computes, keep_all, with_frees

METHOD = "annealing"
CHUNK = 500  # moves between two looks at the clock and the result
# Rounds: share of the moves, and start temperature as a share of f times the number of ops. One op of n changes f by about 1/n;
# the paper's start of f/1000 is too cold for graphs of a few hundred ops whose times differ.
ROUNDS = ((0.5, 5.0), (0.25, 1.5), (0.25, 0.5))
COLD = 1e-4  # end temperature, in the same unit
HEAVIER = 4  # after a round that missed the budget, being over it weighs this many times as much


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    moves: int = 2_000_000,
    keep_order: bool = False,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule that annealing meets; ``bound_ns`` is the keep-all time, so it is OPTIMAL only without re-runs.

    moves         moves to try in all; what would take longer than the time limit cools faster, and is then not repeatable
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
                _anneal(search, Annealer(graph, ops, budget_bytes, seed, keep_order=keep_order), moves)
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan(METHOD, seed=seed)


def _anneal(search: Incumbent, annealer: Annealer, moves: int) -> None:
    """Some rounds of annealing, each from the best schedule so far, each less hot."""
    n = len(search.graph.ops)
    tried = 0
    for number, (share, hot) in enumerate(ROUNDS, start=1):
        done = 0.0  # of this round
        round_began = time.perf_counter()
        round_s = share * search.time_limit_s
        round_moves = max(CHUNK, int(share * moves))
        before = 0
        while done < 1:
            heat = hot * (COLD / hot) ** done
            before += CHUNK
            clock = time.perf_counter()
            done = max(before / round_moves, (clock - round_began) / round_s if round_s else 1.0)
            annealer.anneal(CHUNK, heat / n, hot * (COLD / hot) ** min(1.0, done) / n)
            tried += CHUNK
            search.notes["moves"] = tried
            _take(search, annealer, f"round {number}")
            if search.done():
                return
        if annealer.peak_bytes > search.budget_bytes:
            annealer.weight *= HEAVIER
        if search.best is not None:
            annealer.spread(list(computes(search.best)))
    if search.best is None:
        search.notes["stopped"] = "annealing found no schedule that fits"


def _take(search: Incumbent, annealer: Annealer, phase: str) -> None:
    """Offer the current sequence where it is news; note the least peak met."""
    least = search.notes.get("smallest_peak_bytes", annealer.peak_bytes)
    search.notes["smallest_peak_bytes"] = min(least, annealer.peak_bytes)
    if search.wants(annealer.peak_bytes, annealer.time_ns):
        search.offer(with_frees(search.graph, useful(search.graph, annealer.sequence)), phase)
