"""Rockmate: a chain of blocks, each solved exactly for a few budgets, combined by a dynamic program (Zhao et al., ICML 2023).

The forward pass is cut at its separators. For each distinct block the least time is found on a grid of two budgets: the peak
inside the block, and the bytes held between its forward and its backward pass. Blocks that are alike are solved once. Rotor's
dynamic program then chooses for every block in which of these ways to run it, and when to run it again as a whole.

A block that is most of the graph is as hard as the whole graph; where its MILP does not finish in time, a list walk stands in.
"""

from __future__ import annotations

from collections.abc import Callable

from graphs.errors import check_positive
from graphs.ir import Graph
from planner.chains.chain_dp import SLOTS
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, keep_all
from planner.stages.block_chain import block_schedule


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    peaks: int = 4,
    saves: int = 6,
    slots: int = SLOTS,
) -> Plan:
    """The cheapest schedule that blocks and dynamic program give; ``bound_ns`` is the keep-all time.

    time_limit_s  for the blocks' MILPs; the dynamic program comes on top, and may take as long again, and a second. Ctrl-C ends
                  all; there is no schedule before the end
    peaks, saves  budgets for each block: of its peak, and of what it holds between forward and backward pass
    slots         memory units of the dynamic program at most
    """
    check_positive(peaks=peaks, saves=saves, slots=slots)
    search = Incumbent(graph, budget_bytes, gap, time_limit_s)
    if not search.hopeless():
        try:
            search.offer(keep_all(graph), "keep all")  # nothing takes less, and blocks may take long
            if search.best is None:
                search.best, search.notes, _ = block_schedule(
                    graph, budget_bytes, time_limit_s=time_limit_s, seed=seed, peaks=peaks, saves=saves, slots=slots
                )
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan("rockmate", seed=seed)
