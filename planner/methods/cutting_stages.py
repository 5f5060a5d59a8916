"""Cutting stages: Checkmate's optimum from the few stages that bind, with a certificate. This project's own method.

Memory is tight around a few moments. A MILP with stages at those events only (``planner.stage_model``) bounds from below
every schedule that keeps the graph's order of first executions, and its solution, walked, often is a schedule that attains
the bound. Where the walk overflows the budget, the overflow says which event was missing, or which cut for what happens between
two (``planner.stage_cuts``); each round adds some. Where the relaxation's solution is nearly whole, it serves as well.
Meanwhile list walks along that walk, and a search among them (``planner.walk_search``), find schedules that do fit, and so does
a chain of blocks (``planner.block_chain``). Where any order will do, or nothing fits in the graph's, others are searched
(``planner.order_search``); where the best schedule has another order than the graph, all of this is done for that.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from graphs.ir import Graph
from planner.annealing import LAST
from planner.block_chain import block_schedule, is_chain
from planner.exhaustive import cheapest
from planner.incumbent import Incumbent
from planner.loading import annealed_walks, sat_minimise, walk_search
from planner.milp import Answer, Outcome
from planner.order_search import anneal_on, search_orders
from planner.pebbling import fitting, least_peak
from planner.result import Plan
from planner.schedule import Schedule, computes, first_runs, in_graph_order, keep_all, put_in_graph_order, renumbered, with_frees
from planner.spans import SpanRow, add_spans, relax
from planner.stage_cuts import LARGE, fitting_walk, missing, tightest
from planner.stage_model import TINY, StageCut, StageModel, stage_model, walk, with_end

if TYPE_CHECKING:
    from planner.walk_search import WalkSearch

METHOD = "cutting_stages"
SHRINK = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # budgets of the one-event MILPs that list walks follow
IDLE_GUIDES = 2  # so many of them in a row that help no further are the last ones
# Events added a round at most, fewer by one for each cut; after a relaxation that raised the bound by this share of its distance
# to the incumbent more, up to so many variables, and those whose rows are slack go.
NEW_PER_ROUND, STEEP, NEW_RELAXED, RELAXED_VARIABLES, SLACK = 2, 0.03, 4, 8_000, 1e-9
# Ops that list walks run while a MILP is solved: about what it takes as long as, which grows with its variables, faster than they
# do (without a backward pass much faster), but at first (easy budgets) and at most (hard ones) so many:
WORK, WORK_VARIABLES, FIRST_WORK, MORE_WORK, MOST_WORK = 100_000, 1_000, 400_000, 4, 25_000_000
ANNEALED = 2  # times as much, up to as many times the most, where most of it is annealing's
RELAXED_WORK, ANNEALED_RELAXED = 2_000, 12_000  # while its relaxation is solved, which takes longer with its variables cubed
# Each relaxation may take this share of the time left. So many in a row that raise the bound by less than this share of its
# distance to the incumbent, and a MILP is solved.
RELAX_SHARE, STALLED, CLIMB = 0.6, 2, 0.005
LEAST_RISE = 0.001  # and new rows on spans that raise it by less are the last ones
# Nearness to a whole number; the share of variables that are not which a solution may have, and in models with so many whole ones
# where a relaxation has raised the bound by this share of its distance; of the keep-all time
WHOLE, PARTS, MOST_PARTS, MANY_VARIABLES, MUCH_CLIMB, FAR_AWAY = 0.01, 0.02, 0.1, 4_000, 0.1, 0.05
BEYOND_WORK = 100_000  # between two looks at the clock where a MILP takes longer
# Blocks are tried after so many rounds, before a large MILP where the bound is this share of the keep-all time away, or at once
# where it is FAR_AWAY or nothing fits so far, for this share of the time that is left.
BLOCKS_ROUND, BLOCKS_DISTANCE, BLOCKS_SHARE, FINE_GRID, BLOCKS_WORK = 3, 0.02, 0.15, {"peaks": 12, "saves": 8}, 4_000_000
# Sets of values to visit, and share of the time left, at most, where nothing fits so far; moves, and ops of walks, for making
# that cheaper at a time, and what is much.
PEBBLE_STATES, PEBBLE_SHARE, PEBBLE_MOVES, PEBBLE_WORK, MUCH = 4_000, 0.15, 1_000_000, 500_000, 0.03
# Of the time that is left at most: annealing, for graphs without a backward pass, on which list walks do poorly, or in any order
# where nothing fits so far; search among all orders, where any will do.
ANNEAL_SHARE, ORDERS_SHARE = 0.4, 0.75
WALKS_SHARE = 0.2  # of the time left, for their first list walks
LAST_S = 0.5  # for list walks where there was no time to look for anything
SMALL_OPS, FEW_STATES, MOST_STATES = 40, 50_000, 6_000_000  # of graphs to look through, early and in the end
IDLE_ROUNDS = 4  # stop after as many searches in a row that found nothing
FIRST_SHARE = 0.4  # of the time for the first MILP at most, so that some is left for walks even where nothing comes of it
NODES = 2_000  # branch-and-bound nodes of one MILP at most
CHEAP_ROUNDS, CHEAP_VARIABLES = 3, 1_500  # what is this small is solved more exactly than asked:
EXACT = 0.02  # to this share of the asked gap, where that takes
FINEST = 1e-9  # nor is any MILP solved more exactly than to this share of the keep-all time
CHEAP_EFFORT = 0.5  # no more than about so many seconds' work
COARSE, SAT_COARSE = 0.25, 0.1  # and what is not, first to this share of the distance between bound and incumbent
# Share of the budget that values without variables take at first, per gap, and at most, as it is where the bound is FAR_AWAY
TINY_GAP, MOST_TINY = 0.1, 1e-3


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.001,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    any_order: bool = False,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule found, and a bound on all schedules that keep the graph's order of first executions.

    gap           stop when (time - bound) / time is at most this; small graphs are solved more exactly where that is cheap
    time_limit_s  stop after this long; Ctrl-C stops at once. Either way the best schedule and bound so far are returned
    start         a schedule to begin with; its order of first executions may be another
    any_order     search among all orders of first executions too, in graphs without a backward pass first; without, a schedule
                  in another order is taken only where it is the start, or none in graph order is known. From one that is taken
                  the search goes on, through other orders too
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: not known)

    The status is INFEASIBLE only where no schedule in any order fits; where none with this order does and none in another is
    found, it is UNKNOWN and ``notes["stopped"]`` says so. A schedule in another order has the keep-all time as its bound;
    ``restricted_bound_ns`` is then what is proved about its own order, and ``notes["order_bound_ns"]`` what is about the graph's.
    Unless the time limit struck (``notes["stopped"]``, or ``notes["cut_short"]`` for a part of the search), the same arguments
    give the same plan.
    """
    search = _Search(graph, budget_bytes, gap, time_limit_s, progress, seed=seed, any_order=any_order)
    try:
        _run(search, start)
        _go_on(search)
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
        search.take_walk()  # what the part under way has found
    search.tell_cut_short("stopped" not in search.notes and time.perf_counter() >= search.deadline)
    if search.best is None and "infeasible" not in search.notes:  # no time for more
        search.begin_walks(time.perf_counter() + LAST_S)
    bound_ns = search.bound_ns
    if search.best is not None and search.time_ns is not None:
        if in_graph_order(computes(search.best)):
            bound_ns = min(bound_ns, search.time_ns)  # above it by the solver's rounding at most
        else:  # what holds for all orders is the keep-all time
            search.notes.setdefault("order", "first executions are not in graph order")
            search.notes["order_bound_ns"], bound_ns = bound_ns, graph.keep_all_time_ns
    if search.order_of_best != search.solved_order:
        search.restricted_bound_ns = None
    return search.plan(METHOD, seed=seed, bound_ns=bound_ns)


def _run(search: _Search, start: Schedule | None) -> None:
    """The method, step by step."""
    graph = search.graph
    if search.hopeless():
        return
    search.offer(keep_all(graph), "keep all")
    if start is not None:
        search.offer(start, "start")
    if search.any_order and not search.trained and not search.done():
        _reorder(search, ORDERS_SHARE, anew=True)
    if search.done():
        return
    if _rounds(search) and not _exhaust(search, MOST_STATES, search.gap):
        _search_on(search)


def _reorder(search: _Search, share: float, *, anew: bool = False) -> None:
    """Search among all orders, for a share of the time left; list walks go on from what that finds in graph order.

    Where nothing fits, what is least over the budget has an order to solve for, for the same share of what is left then.

    anew  not from the best schedule on
    """
    search.reordered = True
    runs = search_orders(search, search.seed, time.perf_counter() + share * search.left_s, anew=anew)
    search.follow(runs)
    if search.best is None and not in_graph_order(runs) and not search.done():
        _solve_in(search, with_frees(search.graph, runs), share * search.left_s)


def _elsewhere(search: _Search) -> None:
    """Where nothing fits so far: try other orders, once."""
    if search.best is None and not search.nested and not search.reordered and not search.done():
        _reorder(search, ANNEAL_SHARE, anew=True)


def _go_on(search: _Search) -> None:
    """Where the best schedule has another order of first executions: solve for that one, and look for a better one from there.

    Training steps come in a good order, so theirs is solved first, and others are searched in the time that is left.
    """
    if search.any_order and not search.reordered and search.best is not None and not search.exhausted():
        _reorder(search, ORDERS_SHARE, anew=True)
    while search.best is not None and not search.exhausted():
        if search.order_of_best == search.solved_order or not search.elsewhere:
            break
        _solve_in(search, search.best, search.left_s)
        if not search.exhausted():
            _reorder(search, ORDERS_SHARE)


def _solve_in(search: _Search, start: Schedule, time_limit_s: float) -> None:
    """Solve for the order of first executions of a schedule, which need not fit."""
    order = first_runs(computes(start))
    graph = search.graph.in_order(order)
    inner = _Search(graph, search.budget_bytes, search.gap, time_limit_s, search.progress, seed=search.seed, nested=True)
    try:
        _run(inner, renumbered(start, {v: i for i, v in enumerate(order)}))
    finally:
        inner.take_walk()  # on Ctrl-C, what the part under way has found
        proved_ns = min(inner.bound_ns, inner.time_ns or inner.bound_ns)
        search.solved_order, search.restricted_bound_ns = order, proved_ns if proved_ns > search.base else None
        search.tell_cut_short("cut_short" in inner.notes or inner.notes.get("stopped") == "time limit")
        if inner.best is not None:
            search.offer(renumbered(inner.best, order), f"{inner.notes['found_by']}, in another order")
            search.notes.update({key: inner.notes[key] for key in ("events", "cuts", "rounds") if key in inner.notes})


def _rounds(search: _Search) -> bool:
    """Solve for the events so far, walk the solution, add what it overflows; until closed (False) or nothing is left to add."""
    graph, closed_graph = search.graph, with_end(search.graph)
    first = tightest(graph)
    events, cuts = [first], list[StageCut]()
    finest_ns = max(EXACT * search.gap, FINEST) * search.base
    sequence: list[int] = []
    rows: list[SpanRow] = []
    refined = 0
    large, seconds = LARGE, list[int]()  # what overflow asks for second events; those of the round before
    near_share = max(TINY, min(MOST_TINY, TINY_GAP * search.gap))
    for round_ in itertools.count(1):
        is_far = search.distance_ns > FAR_AWAY * search.base
        tiny_share = MOST_TINY if is_far and near_share > TINY else near_share
        model = stage_model(closed_graph, search.budget_bytes, events, cuts, tiny_share=tiny_share)
        cheap = round_ <= CHEAP_ROUNDS and len(model.milp.cost) <= CHEAP_VARIABLES
        aim = EXACT * search.gap if cheap else search.gap
        tolerance_ns = finest_ns
        if round_ > 1 and not cheap:
            coarse = SAT_COARSE if model.milp.is_for_sat else COARSE
            tolerance_ns = max(finest_ns, coarse * search.distance_ns * 0.1**refined)
        search.notes.update(events=len(events), cuts=len(cuts), rounds=round_)
        answer, rows = _relax(search, model, rows, sequence, finest_ns) if round_ > 1 and not refined else (None, rows)
        if search.done(aim):
            return False
        relaxed = answer is not None
        if answer is None:
            if round_ > 1 and not cheap and search.distance_ns > BLOCKS_DISTANCE * search.base:
                _blocks(search)  # a MILP may take long
            add_spans(model)
            effort = CHEAP_EFFORT if search.closed() or (cheap and not refined) else math.inf
            answer = _minimise(search, model, tolerance_ns, aim, sequence, _work(search, model, round_), effort)
        if answer.outcome is Outcome.INFEASIBLE:
            _none_in_order(search, ask=round_ == 1)
            return False
        search.raise_bound(model.bound_ns(answer), restricted=False)
        if answer.values is not None:
            sequence = fitting_walk(model, answer, graph, search.budget_bytes)
            schedule = with_frees(graph, sequence)
            search.offer(schedule, "walk")
        if search.done(aim):
            return False
        if round_ == BLOCKS_ROUND:
            _blocks(search)
            if _exhaust(search, FEW_STATES, EXACT * search.gap):
                return False
        if round_ == 1 and not search.elsewhere:
            guide = None if answer.values is None else partial(_guide, search, closed_graph, first)
            if not _first_schedules(search, guide):
                return False
        if answer.values is None:
            return not search.done()
        search.follow(sequence)
        if search.done(aim):
            return False

        gone, most = [], NEW_PER_ROUND
        if search.stalled:  # two events at once raise the bound no more than one would
            gone, large = seconds, math.inf
        elif relaxed and search.climbed > STEEP:
            gone = _idle(model, answer)
            most = NEW_RELAXED if len(model.milp.cost) <= RELAXED_VARIABLES else NEW_PER_ROUND
        more_events, seconds, more_cuts = missing(model, answer, graph, schedule, search.budget_bytes, cuts, most, large=large)
        gone = [t for t in gone if all(cut.w != t for cut in (*cuts, *more_cuts))]
        events = sorted({*events, *more_events}.difference(gone)) or events
        cuts = [cut for cut in (*cuts, *more_cuts) if cut.w in events]
        if more_events or more_cuts:
            refined = 0
        elif relaxed:
            search.stalled = STALLED
        elif tiny_share > TINY:
            near_share = TINY
        elif tolerance_ns > finest_ns or answer.outcome is Outcome.STOPPED:
            refined += 1
        else:
            return True
    raise AssertionError("unreachable")


def _none_in_order(search: _Search, *, ask: bool) -> None:
    """No schedule in graph order fits, which the notes then say; others are tried.

    ask  whether it is not known yet that there may be one in another order
    """
    if _is_only_order(search.graph):
        search.notes["infeasible"] = "no schedule fits, and no other order of first executions is valid"
        return
    if ask and search.best is None and not search.nested and not _pebble(search):
        return
    _elsewhere(search)
    if search.best is None:
        search.notes["stopped"] = "no schedule with this order of first executions fits"
    else:
        search.notes["order"] = "first executions are not in graph order, in which no schedule fits"


def _exhaust(search: _Search, states: int, aim: float) -> bool:
    """Look through the schedules of a small graph in its order, through so many states at most, for what closes the gap to
    ``aim``; whether that is all there is."""
    if len(search.graph.ops) > SMALL_OPS or search.done():
        return False
    found = cheapest(
        search.graph,
        search.budget_bytes,
        below_ns=math.inf if search.time_ns is None else (1 - aim) * search.time_ns,
        states=states,
        deadline=search.deadline,
        proves=partial(search.raise_bound, restricted=False),
    )
    search.tell_cut_short(time.perf_counter() >= search.deadline)
    if found.runs is not None:
        search.offer(with_frees(search.graph, found.runs), "A*")
    if math.isinf(found.bound_ns):
        _none_in_order(search, ask=False)
        return True
    search.raise_bound(math.ceil(found.bound_ns), restricted=False)
    return search.closed(aim)


def _first_schedules(search: _Search, guide: Callable[[float], None] | None) -> bool:
    """Look for schedules that fit by all means but MILPs; False where it turns out that there are none."""
    if not search.trained and not search.nested and not search.done():
        ended = anneal_on(search, range(len(search.graph.ops)), search.seed, ANNEAL_SHARE * search.left_s, keep_order=True)
        search.follow(ended.runs)
    until = search.deadline if search.trained else time.perf_counter() + WALKS_SHARE * search.left_s
    search.begin_walks(until)
    if search.best is not None:
        search.follow(list(computes(search.best)))
    if guide is not None and not search.nested:
        guide(until)
    if search.time_ns is not None and search.distance_ns > FAR_AWAY * search.base:
        _blocks(search)
    search.tell_cut_short(time.perf_counter() >= until)
    if search.time_ns is None and not _pebble(search):
        return False
    _elsewhere(search)
    return True


def _is_only_order(graph: Graph) -> bool:
    """Whether each op reads something that the one before it makes, so that no other order of first executions is valid."""
    return all(any(graph.producer[x] == v - 1 for x in op.inputs) for v, op in enumerate(graph.ops) if v > 0)


def _blocks(search: _Search, *, scarce: bool = False) -> None:
    """Try a chain of blocks, once; where next to nothing fits, with more ways to run a block, and in any order."""
    if search.chained or search.done() or not is_chain(search.graph):
        return
    search.chained = True
    grid = FINE_GRID if scarce else {}
    share_s = BLOCKS_SHARE * search.left_s
    schedule, told = block_schedule(search.graph, search.budget_bytes, time_limit_s=share_s, seed=search.seed, **grid)
    search.tell_cut_short("cut_short" in told or told.get("stopped") == "time limit")
    if schedule is not None:
        if scarce or search.any_order:
            search.offer(schedule, "blocks")
        # Blocks make some gradients of weights early and put others off; in graph order some do not fit.
        ordered = put_in_graph_order(search.graph, computes(schedule))
        search.offer(with_frees(search.graph, ordered), "blocks")
        search.follow(ordered, BLOCKS_WORK)


def _pebble(search: _Search) -> bool:
    """Nothing fits so far: walk backwards from the end, for how little any schedule needs, and for schedules, which are dear.

    False where any needs more than the budget. In between, graphs without a backward pass try other orders: theirs is poor.
    """
    until = time.perf_counter() + PEBBLE_SHARE * search.left_s
    proved_bytes, schedule = least_peak(search.graph, states=PEBBLE_STATES, time_limit_s=until - time.perf_counter())
    search.tell_cut_short(time.perf_counter() >= until)
    if proved_bytes > search.budget_bytes:
        search.notes["infeasible"] = "no schedule in any order fits, however the ops are arranged"
        search.notes["least_bytes"] = proved_bytes
        return False
    if not search.trained:
        _elsewhere(search)
    if search.time_ns is None:
        until = time.perf_counter() + PEBBLE_SHARE * search.left_s
        for found in fitting(search.graph, search.budget_bytes, time_limit_s=until - time.perf_counter()):
            search.offer(found, "pebbling")
        search.tell_cut_short(time.perf_counter() >= until)
        if search.time_ns is None and schedule is not None:
            search.offer(schedule, "pebbling")
        _shorten(search)
        _blocks(search, scarce=True)
    return True


def _shorten(search: _Search) -> None:
    """Anneal the best schedule, which is a dear one, and walk along what comes of that, by turns, while it gets much cheaper."""
    until = time.perf_counter() + PEBBLE_SHARE * search.left_s
    for turn in itertools.count(1):
        if search.best is None or search.time_ns is None or search.done():
            return
        before_ns, left_s = search.time_ns, until - time.perf_counter()
        if left_s <= 0:
            search.tell_cut_short(True)
            return
        ended = anneal_on(search, list(computes(search.best)), search.seed + turn, left_s, PEBBLE_MOVES, (LAST,), keep_order=True)
        for waits in (True, False):
            if waits or search.elsewhere:
                search.follow(put_in_graph_order(search.graph, ended.runs, waits=waits), PEBBLE_WORK, until)
        if search.time_ns > (1 - MUCH) * before_ns:
            return


def _guide(search: _Search, closed_graph: Graph, event: int, until: float) -> None:
    """Early schedules: list walks along what one-event MILPs at shrunk budgets would do, until some in a row are no better.

    None begins after ``until``.
    """
    idle = 0
    for share in SHRINK:
        before_ns = search.time_ns
        model = stage_model(closed_graph, int(share * search.budget_bytes), [event])
        answer = model.milp.minimise(
            time_limit_s=search.left_s, gap=0.002 * search.base / model.unit_ns, node_limit=50, seed=search.seed
        )
        if answer.values is None or search.done() or time.perf_counter() >= until:
            return
        search.follow(walk(model, model.kept(answer)))
        idle = idle + 1 if search.time_ns is not None and search.time_ns == before_ns else 0
        if idle == IDLE_GUIDES:
            return


def _search_on(search: _Search) -> None:
    """No event left to add, or the MILP too hard: search among list walks until they find nothing for long."""
    idle = 0
    while idle < IDLE_ROUNDS and not search.done():
        before = search.walks.time_ns
        search.walks.improve(MOST_WORK, deadline=search.deadline)
        search.take_walk()
        idle = 0 if search.walks.time_ns < before else idle + 1


def _work(search: _Search, model: StageModel, round_: int) -> int:
    """How many ops list walks may run while the MILP is solved."""
    if round_ == 1:
        return 0
    work: int = min(FIRST_WORK * MORE_WORK ** (round_ - 2), MOST_WORK)
    usual = int(WORK * (len(model.milp.cost) / WORK_VARIABLES) ** 2)
    return min(work, usual) if search.trained else max(work, ANNEALED * min(usual, MOST_WORK))


def _relax(
    search: _Search, model: StageModel, rows: list[SpanRow], latest: Sequence[int], finest_ns: float
) -> tuple[Answer | None, list[SpanRow]]:
    """Solve without asking for integers, and raise the bound; None where the MILP is to be solved. Comes with rows on spans that
    bind, for the next model.

    It takes a tenth of the MILP's time. Where most of its solution is whole, or the bound is far away, events for what that
    overflows, rounded, raise the bound as well. That nothing fits is for the MILP to say.
    """
    if not search.relaxes or search.stalled == STALLED or model.milp.is_for_sat:
        search.stalled = 0
        return None, rows
    before_ns = search.searched_ns
    until = time.perf_counter() + RELAX_SHARE * search.left_s
    work = (RELAXED_WORK if search.trained else ANNEALED_RELAXED) * (len(model.milp.cost) / WORK_VARIABLES) ** 3
    least_rise = max(finest_ns, LEAST_RISE * search.distance_ns) / model.unit_ns

    def solve(**limits: Any) -> Answer:
        nonlocal rows
        answer, rows = relax(model, rows, least_rise=least_rise, **limits)
        return answer

    answer = _alongside(search, solve, latest, min(int(work), MOST_WORK), until, limited=False)
    search.raise_bound(model.bound_ns(answer), restricted=False)
    search.climbed = (search.searched_ns - before_ns) / max(1.0, search.distance_ns)
    search.stalled = 0 if search.climbed > CLIMB else search.stalled + 1
    if answer.values is None:
        search.relaxes = False
        return None, rows
    between = sum(min(x, 1 - x) > WHOLE for x, integer in zip(answer.values, model.milp.integer, strict=True) if integer)
    share = 0.0 if search.distance_ns > FAR_AWAY * search.base else between / sum(model.milp.integer)
    search.relaxes = share <= MOST_PARTS
    most = MOST_PARTS if search.climbed > MUCH_CLIMB and sum(model.milp.integer) > MANY_VARIABLES else PARTS
    return answer if share <= most else None, rows


def _idle(model: StageModel, answer: Answer) -> list[int]:
    """Events whose memory rows do not bind a relaxation: without them its optimum is the same."""
    duals = answer.duals or []
    return [t for t, row in zip(model.events, model.memory, strict=True) if row < len(duals) and abs(duals[row]) < SLACK]


def _minimise(
    search: _Search, model: StageModel, tolerance_ns: float, aim: float, latest: Sequence[int], work: int, effort: float
) -> Answer:
    """Solve the MILP to a tolerance; costs from which on the gap is closed to ``aim`` need not be told apart.

    effort  of CP-SAT at most, if that finds a solution
    """
    cutoff = math.inf
    if search.time_ns is not None:
        cutoff = ((1 - aim) * search.time_ns - search.base) / model.unit_ns
        cutoff += 0.01 + 2e-6 * abs(cutoff)  # what ``bound_ns`` takes off for tolerances
    minimise, limited = partial(model.milp.minimise, node_limit=NODES), True
    if model.milp.is_for_sat:
        limited = effort < math.inf
        minimise = partial(sat_minimise(), model.milp, effort=effort)
    share = 1.0 if work else FIRST_SHARE
    until = time.perf_counter() + share * search.left_s
    solve = partial(minimise, gap=tolerance_ns / model.unit_ns, cutoff=cutoff, seed=search.seed)
    answer = _alongside(search, solve, latest, work, until, limited=limited)
    if answer.outcome is Outcome.STOPPED and answer.values is None and effort < math.inf and not search.done():
        return _minimise(search, model, tolerance_ns, aim, latest, 0, math.inf)
    return answer


def _alongside(
    search: _Search, solve: Callable[..., Answer], latest: Sequence[int], work: int, until: float, *, limited: bool
) -> Answer:
    """Solve, and meanwhile improve list walks with so much work, half of it spent on those along the ``latest`` solution.

    Where the solver takes longer, they go on, but what comes of that counts only if the clock or Ctrl-C ends the solve: how far
    they get depends on the machine.

    limited  whether it has another limit than the clock
    """
    beyond: WalkSearch | None = None

    def walk_on(solved: threading.Event) -> None:
        nonlocal beyond
        search.walks.follow(latest, work // 2, deadline=search.deadline)
        search.walks.improve(work // 2, deadline=search.deadline)
        search.take_walk()
        beyond = search.walks.copy()
        while not solved.is_set() and time.perf_counter() < until:
            beyond.improve(BEYOND_WORK, deadline=search.deadline)

    try:
        answer = solve(time_limit_s=until - time.perf_counter(), meanwhile=walk_on if work else None)
    except KeyboardInterrupt:
        if beyond is not None:
            search.walks = beyond
        raise
    # What has no other limit was stopped by the clock; CP-SAT stops some milliseconds before its time is up.
    struck = answer.outcome is Outcome.STOPPED and (not limited or time.perf_counter() >= until)
    search.tell_cut_short(struck)
    if beyond is not None and (struck or time.perf_counter() >= search.deadline):
        search.walks = beyond
        search.take_walk()
    return answer


@dataclass(kw_only=True)
class _Search(Incumbent):
    """What is known so far, and the list walks."""

    seed: int
    any_order: bool = False
    nested: bool = False  # in another order than that of the graph that is asked about, which annealing has ended in
    begun: bool = field(default=False, init=False)
    reordered: bool = field(default=False, init=False)  # whether other orders have been searched
    chained: bool = field(default=False, init=False)
    relaxes: bool = field(default=True, init=False)  # whether relaxations are worth their time
    stalled: int = field(default=0, init=False)  # how many of them in a row have hardly raised the bound
    climbed: float = field(default=0.0, init=False)  # how far the last one raised it, as a share of what is left to the incumbent
    # What ``restricted_bound_ns`` is of, where that is not the graph's order.
    solved_order: list[int] = field(default_factory=list, init=False)

    @cached_property
    def walks(self) -> WalkSearch:
        """The list walks, with annealing in graphs without a backward pass.

        Made when first asked for: many budgets need none, and their compiled code takes time to load.
        """
        search = walk_search() if self.trained else annealed_walks()
        return search(self.graph, self.budget_bytes, self.seed)

    @cached_property
    def trained(self) -> bool:
        """Whether the graph has a backward pass."""
        return any(op.backward for op in self.graph.ops)

    @property
    def base(self) -> int:
        return self.graph.keep_all_time_ns

    @property
    def left_s(self) -> float:
        return max(0.01, self.deadline - time.perf_counter())

    @property
    def order_of_best(self) -> list[int]:
        """First executions of the best schedule."""
        return [] if self.best is None else first_runs(computes(self.best))

    @property
    def elsewhere(self) -> bool:
        """Whether the best schedule has another order of first executions than the graph."""
        return not in_graph_order(self.order_of_best)

    @property
    def distance_ns(self) -> float:
        """From the best bound to the best schedule; without a schedule, 1 % of the keep-all time."""
        return 0.01 * self.base if self.time_ns is None else self.time_ns - self.searched_ns

    def begin_walks(self, deadline: float) -> None:
        """Walk along the graph order, once."""
        if not self.begun:
            self.walks.start(deadline=deadline)
            self.begun = True
            self.take_walk()

    def follow(self, sequence: Sequence[int], work: int = 0, until: float = math.inf) -> None:
        """Let list walks begin from a sequence with first executions in graph order: of others nothing is proved."""
        if in_graph_order(sequence):
            self.walks.follow(sequence, work, deadline=min(until, self.deadline))
            self.take_walk()

    def take_walk(self) -> None:
        """Offer the best list walk, where it is news."""
        if "walks" not in self.__dict__:  # none so far, and none are made for that
            return
        if self.walks.runs is not None and self.wants(self.budget_bytes, self.walks.time_ns):
            self.offer(with_frees(self.graph, self.walks.runs.tolist()), "list walk")
        self.tell_cut_short(self.walks.hurried)
