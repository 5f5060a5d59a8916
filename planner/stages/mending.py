"""Annealing in graph order between a search's other steps: of its best schedule, and of solutions that hold too much.

List walks decide by when a value is read next, and end where no single drop of theirs helps; annealing moves single runs by
chance, and ends elsewhere. So each goes on from what the other has found. Graphs without a backward pass have list walks that
anneal on their own (``planner.walks.annealed_walks``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.process.clock import now_s
from planner.schedule import computes, in_graph_order, put_in_graph_order
from planner.stages.order_search import Ended, anneal_on
from planner.stages.search import StageSearch
from planner.walks.annealing import LAST, MEND, Round

# Moves of one annealing, and ops of the walks after it: at most, and for each op of the graph. Share of the time left that a turn
# of them takes at most; what share of a schedule's time is much.
MOVES, MOVES_PER_OP, WORK, WORK_PER_OP, SHARE, MUCH = 1_000_000, 2_500, 500_000, 1_250, 0.15, 0.03
# And for a dear schedule: rounds, of which the first mostly ends lower, but holding too much; ops of the first walks, which are
# along sequences with at most so many runs times ops of the graph, and of the others; share of the time left; what share of the
# way to the bound is much, for annealing and for annealing and walks by turns; so many turns in a row that find less end it.
DEAR: tuple[Round, ...] = ((1.0, 0.05, 0.005, 100.0, 10_000.0), (1.0, 0.05, 0.005, 500.0, 10_000.0))
FIRST_WORK, LONG, DEAR_WORK, DEAR_SHARE, MUCH_ANNEALED, MUCH_TURNED, IDLE = 300_000, 5_000_000, 100_000, 0.5, 0.1, 0.03, 2
WALK_SHARE = 0.3  # of that time, for walks that may come to nothing


def shorten(search: StageSearch) -> None:
    """Anneal the best schedule, and walk along what comes of that, by turns, while it gets much cheaper."""
    until = now_s() + SHARE * search.left_s
    while search.best is not None and search.time_ns is not None:
        before_ns = search.time_ns
        ended = _anneal(search, list(computes(search.best)), LAST, _moves(search), until)
        if ended is None:
            return
        _walk(search, ended.runs, _work(search), until)
        if search.time_ns > (1 - MUCH) * before_ns:
            return


def shorten_dear(search: StageSearch) -> None:
    """Make a best schedule cheaper that costs several times the least, as those do that pebbling finds.

    Where annealing and walks get to from there depends on which comes first, and on chance. So both are tried from the same
    start, before the best of what they find is annealed while that makes it much cheaper, and walked along, by turns.
    """
    until = now_s() + DEAR_SHARE * search.left_s
    if search.best is None:
        return
    start = list(computes(search.best))
    ended = _anneal(search, start, LAST, MOVES, until)
    if ended is not None and len(ended.runs) * len(search.graph.ops) <= LONG:
        _walk(search, ended.runs, FIRST_WORK, _some_time(until))
    goes_on, idle = _anneal_dear(search, start, until), 0
    while goes_on and idle < IDLE:
        before_ns, annealed_ns = search.distance_ns, math.inf
        while goes_on and search.distance_ns <= (1 - MUCH_ANNEALED) * annealed_ns:
            annealed_ns = search.distance_ns
            goes_on = _anneal_dear(search, list(computes(search.best)), until)
        if goes_on:
            _walk(search, list(computes(search.best)), DEAR_WORK, until)
        idle = 0 if search.distance_ns <= (1 - MUCH_TURNED) * before_ns else idle + 1


def _anneal_dear(search: StageSearch, runs: Sequence[int], until: float) -> bool:
    """Anneal, and let walks fit what nearly does; whether there is time left."""
    for round_ in DEAR:
        ended = _anneal(search, runs, round_, MOVES, until)
        if ended is None:
            return False
        if ended.nearly:
            _walk(search, ended.nearly, 0, _some_time(until))
    return True


def _some_time(until: float) -> float:
    """When a walk is to end that may come to nothing."""
    now = now_s()
    return now + WALK_SHARE * (until - now)


def mend(search: StageSearch, runs: Sequence[int]) -> None:
    """Anneal from a sequence in graph order that may hold too much, at some temperatures while that helps, and walk along it."""
    until = now_s() + SHARE * search.left_s
    for round_ in MEND:
        before_ns = search.time_ns
        ended = _anneal(search, runs, round_, _moves(search), until)
        if ended is None:
            return
        _walk(search, ended.runs, _work(search), until)
        if search.time_ns == before_ns:
            return


def _anneal(search: StageSearch, runs: Sequence[int], round_: Round, moves: int, until: float) -> Ended | None:
    """Where it ends; None where the search is done, or there is no time left."""
    left_s = until - now_s()
    if search.done():
        return None
    if left_s <= 0:
        search.tell_cut_short(True)
        return None
    search.annealings += 1
    return anneal_on(search, runs, search.seed + search.annealings, left_s, moves, (round_,), keep_order=True)


def _walk(search: StageSearch, runs: Sequence[int], work: int, until: float) -> None:
    """Walk along a sequence, in graph order if it has another, with so much work."""
    if in_graph_order(runs):
        search.follow(runs, work, until)
    else:
        for waits in (True, False):
            if waits or search.elsewhere:
                search.follow(put_in_graph_order(search.graph, runs, waits=waits), work, until)
    search.tell_cut_short(now_s() >= until)


def _moves(search: StageSearch) -> int:
    return min(MOVES, MOVES_PER_OP * len(search.graph.ops))


def _work(search: StageSearch) -> int:
    return min(WORK, WORK_PER_OP * len(search.graph.ops))
