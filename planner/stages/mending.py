"""Annealing in graph order between a search's other steps: of its best schedule, and of solutions that hold too much.

List walks decide by when a value is read next, and end where no single drop of theirs helps; annealing moves single runs by
chance, and ends elsewhere. So each goes on from what the other has found. Graphs without a backward pass have list walks that
anneal on their own (``planner.walks.annealed_walks``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from planner.schedule import computes, put_in_graph_order
from planner.stages.order_search import anneal_on
from planner.stages.search import StageSearch
from planner.walks.annealing import LAST, MEND, Round

# Moves of one annealing, and ops of the walks after it: at most, and for each op of the graph. Share of the time left that a turn
# of them takes at most; what is much.
MOVES, MOVES_PER_OP, WORK, WORK_PER_OP, SHARE, MUCH = 1_000_000, 2_500, 500_000, 1_250, 0.15, 0.03


def shorten(search: StageSearch, *, at_length: bool = False) -> None:
    """Anneal the best schedule, and walk along what comes of that, by turns, while it gets much cheaper.

    at_length  take all the work there may be, however small the graph
    """
    until = time.perf_counter() + SHARE * search.left_s
    while search.best is not None and search.time_ns is not None and not search.done():
        before_ns = search.time_ns
        if not _anneal(search, list(computes(search.best)), LAST, until, at_length=at_length):
            return
        if search.time_ns > (1 - MUCH) * before_ns:
            return


def mend(search: StageSearch, runs: Sequence[int]) -> None:
    """Anneal from a sequence in graph order that may hold too much, at some temperatures while that helps, and walk along it."""
    until = time.perf_counter() + SHARE * search.left_s
    for round_ in MEND:
        before_ns = search.time_ns
        if search.done() or not _anneal(search, runs, round_, until) or search.time_ns == before_ns:
            return


def _anneal(search: StageSearch, runs: Sequence[int], round_: Round, until: float, *, at_length: bool = False) -> bool:
    """Once; False where there is no time left for it."""
    ops = len(search.graph.ops)
    moves, work = (MOVES, WORK) if at_length else (min(MOVES, MOVES_PER_OP * ops), min(WORK, WORK_PER_OP * ops))
    left_s = until - time.perf_counter()
    if left_s <= 0:
        search.tell_cut_short(True)
        return False
    search.annealings += 1
    ended = anneal_on(search, runs, search.seed + search.annealings, left_s, moves, (round_,), keep_order=True)
    for waits in (True, False):
        if waits or search.elsewhere:
            search.follow(put_in_graph_order(search.graph, ended.runs, waits=waits), work, until)
    return True
