"""Rotor: chains of unequal layers, by exact dynamic programming over memory (Beaumont et al., TOMS 2024).

The graph has to be a chain of ops (``planner.chains.chain.chain_of_ops``). Each stage is recorded for its backward pass or run
again later; among all schedules in which what is kept stays until its own backward pass (persistent schedules), and with sizes
rounded up to the memory unit, the one found takes the least time. That is no bound for other schedules: on chains of unequal
layers dropping something early and making it again can be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable

from graphs.errors import check_positive
from graphs.ir import Graph
from planner.chains.chain import chain_of_ops
from planner.chains.chain_dp import SLOTS, ChainProgram, Way, solve_chain, too_long
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule, keep_all


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    slots: int = SLOTS,
) -> Plan:
    """The cheapest persistent schedule of a chain; ``bound_ns`` is the keep-all time, the only bound on schedules of all kinds.

    time_limit_s  give up after this long, as on Ctrl-C: there is no schedule before the end, and time grows with the cube of the
                  stages
    slots         memory units of the budget at most; where the sizes' common divisor gives fewer units, nothing is rounded, and
                  ``notes["persistent_bound_ns"]`` is the least time of all persistent schedules

    Schedules that the rounding forbids but that fit are found too, where a budget of up to one unit more a stage gives them.
    Raises InputError naming the op where the graph is not a chain.
    """
    check_positive(slots=slots)
    search = Incumbent(graph, budget_bytes, gap, time_limit_s)
    chain = chain_of_ops(graph)
    if not search.hopeless():
        try:
            told = too_long(len(chain.stages))
            if told is None:
                program = ChainProgram(chain, [[Way(stage.forward, stage.backward)] for stage in chain.stages])
                left_s = search.deadline - now_s()
                search.best, search.notes = solve_chain(program, budget_bytes, slots, time_limit_s=left_s)
            elif search.offer(keep_all(graph), "keep all").peak_bytes > budget_bytes:
                search.notes = told
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan("rotor", seed=seed)
