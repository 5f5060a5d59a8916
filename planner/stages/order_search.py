"""Search among orders of first executions: annealing and the stage model by turns.

Annealing moves one run at a time. So it finds good orders, but where only many re-runs at once make room, it finds dear ones or
none. The relaxed stage model (``planner.stages.model``) of the order in which annealing ends chooses re-runs all at once; its
solution, walked, is a few percent over the budget and costs little more than the bound. Annealing goes on from there, cool and in
any order; then the stage model has another order to choose re-runs for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.on_demand import walk_search
from planner.process.clock import now_s
from planner.schedule import computes, first_runs, in_graph_order, with_frees
from planner.stages.events import missing, tightest
from planner.stages.model import stage_model, walk, with_end
from planner.stages.spans import SpanRow, relax
from planner.walks.annealing import MEND, ROUNDS, Annealer, Round, anneal, useful

MOVES, MORE_MOVES = 8_000_000, 500_000  # of the first annealing; of one from a walk: many short ones find more than few long ones
EVENTS, NEW_EVENTS = 5, 2  # of a stage model whose solution is walked, at least; added at a time, at most
TINY_SHARE = 1e-3  # of the budget, for values without variables
LEAST_RISE = 1e-4  # of the keep-all time: rows on spans that raise the relaxation's cost by less are the last ones
# Shares of the budget for which the stage model chooses re-runs, in turn while the order stays: less leaves less to mend, which
# counts most until something fits.
SHARES, FITTING_SHARES = (1.0, 0.98, 0.96), (0.98, 0.95, 1.0)
IDLE = 12  # turns in a row that find nothing cheaper


class Ended(NamedTuple):
    """Where annealing ended.

    excess_bytes, time_ns, runs  of the cheapest sequence that fits, else of the last one; the first is what its runs hold beyond
                                 the budget, all added up
    nearly                       the last one, where it is cheaper than what fits
    """

    excess_bytes: int
    time_ns: int
    runs: list[int]
    nearly: Sequence[int] = ()


def anneal_on(
    search: Incumbent,
    runs: Sequence[int],
    seed: int,
    time_limit_s: float,
    moves: int = MOVES,
    rounds: Sequence[Round] = ROUNDS,
    *,
    keep_order: bool = False,
) -> Ended:
    """Anneal from a sequence on, in the graph's order of first executions or in any, and offer what fits."""
    annealer = Annealer(search.graph, runs, search.budget_bytes, seed, keep_order=keep_order)
    found = Incumbent(search.graph, search.budget_bytes, search.gap, time_limit_s)
    try:
        anneal(found, annealer, moves, rounds)
    finally:  # on Ctrl-C too
        search.tell_cut_short("cut_short" in found.notes)
        if found.best is not None:
            is_other = not in_graph_order(computes(found.best))
            search.offer(found.best, "annealing, in another order" if is_other else "annealing")
    if found.best is None or found.time_ns is None:
        return Ended(annealer.excess_bytes, annealer.time_ns, useful(search.graph, annealer.sequence))
    nearly = useful(search.graph, annealer.sequence) if annealer.time_ns < found.time_ns else ()
    return Ended(0, found.time_ns, list(computes(found.best)), nearly)


def search_orders(search: Incumbent, seed: int, deadline: float, *, anew: bool) -> list[int]:
    """Offer cheaper and cheaper schedules in whatever order, until some turns in a row find nothing.

    deadline  as ``planner.process.clock.now_s`` tells it
    anew      first anneal from the graph's order on; without, there must be a schedule, from which it goes on

    Returns the best sequence; where nothing fits, the one that is least over the budget.
    """
    graph = search.graph
    best = anneal_on(search, range(len(graph.ops)), seed, deadline - now_s(), MOVES) if anew else None
    if search.best is not None and search.time_ns is not None:
        best = Ended(0, search.time_ns, list(computes(search.best)))
    assert best is not None
    order: list[int] = []
    walks: Iterator[list[int]] = iter(())
    idle = 0
    for turn in itertools.count(1):
        if search.exhausted() or idle == IDLE or now_s() >= deadline:
            break
        if first_runs(best.runs) != order:
            order = first_runs(best.runs)
            walks = _walks(graph, order, search.budget_bytes, FITTING_SHARES if best.excess_bytes else SHARES, deadline)
        start = next(walks, best.runs)
        ended = anneal_on(search, start, seed + turn, deadline - now_s(), MORE_MOVES, (MEND[turn % len(MEND)],))
        if ended.excess_bytes:
            ended = _mended(search, ended, seed, deadline)
        is_better = (ended.excess_bytes, ended.time_ns) < (best.excess_bytes, best.time_ns)
        best, idle = (ended, 0) if is_better else (best, idle + 1)
    search.tell_cut_short(now_s() >= deadline)
    return best.runs


def _walks(
    graph: Graph, order: Sequence[int], budget_bytes: int, shares: Sequence[float], deadline: float
) -> Iterator[list[int]]:
    """Walks along relaxed solutions for one order, in ops of the graph; each for a share of the budget."""
    ordered = graph.in_order(order)
    closed = with_end(ordered)
    first = tightest(ordered)
    for share in shares:
        target_bytes = int(share * budget_bytes)
        events, rows, found = [first], list[SpanRow](), list[int]()
        while now_s() < deadline:
            model = stage_model(closed, target_bytes, events, tiny_share=TINY_SHARE)
            answer, rows = relax(
                model,
                rows,
                time_limit_s=deadline - now_s(),
                least_rise=LEAST_RISE * graph.keep_all_time_ns / model.unit_ns,
            )
            if answer.values is None:
                break
            walked = walk(model, answer.values)
            found = walked.runs
            if len(events) >= EVENTS:
                break
            more, _ = missing(model, ordered, walked, target_bytes, NEW_EVENTS, reruns_last=True)
            if not more:
                break
            events = sorted((*events, *more))
        if found:
            yield [order[v] for v in found]


def _mended(search: Incumbent, ended: Ended, seed: int, deadline: float) -> Ended:
    """What list walks make of a sequence that is over the budget: one that fits, if they can."""
    order = first_runs(ended.runs)
    place = {v: i for i, v in enumerate(order)}
    walks = walk_search()(search.graph.in_order(order), search.budget_bytes, seed)
    try:
        walks.follow([place[v] for v in ended.runs], deadline=deadline)
    finally:  # on Ctrl-C too
        search.tell_cut_short(walks.hurried)
        if walks.runs is not None:
            ended = Ended(0, int(walks.time_ns), [order[v] for v in walks.runs.tolist()])
            search.offer(with_frees(search.graph, ended.runs), "list walk, in another order")
    return ended
