"""Cutting stages: Checkmate's optimum from the few stages that bind, with a certificate. This project's own method.

Memory is tight around a few moments. A MILP with stages at those events only (``planner.stages.model``) bounds from below
every schedule that keeps the graph's order of first executions, and its solution, walked, often is a schedule that attains
the bound. Where the walk overflows the budget, the overflow says which event was missing (``planner.stages.events``): a first
execution, or a re-run that splits a stage. Each round adds some. Where the relaxation's solution is nearly whole, it will do.
While the bound is far below the best schedule, relaxations with more and more events run beside all that looks for schedules
(``planner.stages.climbing``), and are branched on (``planner.stages.branching``).

Meanwhile list walks along that walk, and a search among them (``planner.walks.walk_search``), find schedules that do fit, and
so do a chain of blocks (``planner.stages.block_chain``) and the same method on a coarser graph (``planner.stages.coarsening``),
and where nothing does, Twremat's sequences (``planner.walks.halving``) and pebbling (``planner.least``).
Where any order will do, or nothing fits in the graph's, others are searched (``planner.stages.order_search``). Where not all
gradients fit beside what makes them, schedules in several passes (``planner.stages.passes``) are tried, in orders of their own.
Where the best schedule has another order than the graph, all of this is done for that. What holds for all orders is proved by
events that come one after the other in any (``planner.stages.any_order``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from graphs.ir import Graph
from planner.on_demand import walk_search
from planner.process.clock import now_s
from planner.result import OTHER_ORDER, Plan
from planner.schedule import Schedule, computes, first_runs, in_graph_order, keep_all, put_in_graph_order, renumbered, with_frees
from planner.solvers.milp import Answer, Outcome
from planner.stages.any_order import prove_in_any_order
from planner.stages.block_chain import repeats
from planner.stages.climbing import Climb, Reached
from planner.stages.events import LARGE, missing, tightest
from planner.stages.exhaustive import LONGEST_NS
from planner.stages.first_schedules import follow_guides, is_ruled_out, pebble, prove_least, take_roots, try_blocks, try_halves
from planner.stages.mending import mend, shorten
from planner.stages.model import MOST_TINY, TINY, Event, StageModel, Walk, stage_model, walk, with_end
from planner.stages.order_search import anneal_on, search_orders
from planner.stages.passes import in_passes
from planner.stages.search import SMALL_OPS, StageSearch
from planner.stages.solving import (
    MOST_WORK,
    STALLED,
    Asked,
    idle_events,
    solve_branching,
    solve_relaxed,
    solve_whole,
    work_beside,
)
from planner.stages.spans import SpanRow, add_spans

METHOD = "cutting_stages"
# First executions added a round at most, fewer by one for each re-run; after a relaxation that raised the bound by this share of
# its distance to the incumbent more, up to so many variables, and those whose rows are slack go.
NEW_PER_ROUND, STEEP, NEW_RELAXED, RELAXED_VARIABLES = 2, 0.03, 4, 8_000
# Blocks are tried after so many rounds, before a large MILP where the bound is this share of the keep-all time away, or at once
# where it is far away or nothing fits so far.
BLOCKS_ROUND, BLOCKS_DISTANCE = 3, 0.02
# A coarser graph of half of the ops is solved before a MILP too large for CP-SAT where the bound is this share of the keep-all
# time away, and where nothing fits so far; before a MILP of so many variables that nothing may come of it, one of this share of
# the ops. It takes this share of the time left; and work for list walks along its schedule.
COARSE_DISTANCE, HALF, FEWER, HOPELESS_VARIABLES, COARSE_SHARE, COARSE_WORK = 0.01, 0.5, 0.8, 10_000, 0.5, 2_000_000
# Of the time that is left at most: annealing, for graphs without a backward pass, on which list walks do poorly, or in any order
# where nothing fits so far; search among all orders, where any will do; graph order before that, in training steps.
ANNEAL_SHARE, ORDERS_SHARE, OWN_SHARE = 0.4, 0.75, 0.5
# Of the time left, for schedules in passes, and to solve for the order of one; ops of walks after which that is decided, and the
# share of the overhead in graph order that its own has to have come to.
PASSES_SHARE, PASSES_ORDER_SHARE, PASSES_WORK, PASSES_WIN = 0.1, 0.3, 600_000, 0.8
# Of the time left, for first list walks without a backward pass; in training steps for the next ones where those fit nothing.
WALKS_SHARE, GUIDES_SHARE = 0.2, 0.3
# Changes of walks that do not fit, in search of one that does: ops run in all at least, and as many times the graph; between two
# looks at what came of it, and once one fits; by which share of the overhead it then has to fall; and the share of the time left.
FIT_WORK, FIT_TIMES, FIT_TURN, FITS_TURN, FITS_BETTER, FIT_SHARE = 400_000, 1_500, 100_000, 300_000, 0.02, 0.5
# While the bound is far away: how many ops of list walks take as long as the first look for schedules, the same where none fits
# so far, a coarser graph, and any other turn; and how many are run in that one along the last solution, and along others.
FIRST_WORK, SCRAPE_WORK, COARSER_WORK, TURN_WORK, TURN_WALKS = 1_800_000, 4_000_000, 2_000_000, 1_800_000, 300_000
LAST_S = 0.5  # for list walks, and for Chen's rule, where there was no time to find anything
# Nodes of A* in small graphs: after the first model; before each MILP that may take long, twice as many as so far, while it keeps
# up; and in the end all that there is time for, in graphs of so few ops in any case.
FEW_OPS, FEW_LOOKS, MOST_LOOKS = 40, 60_000, 1_000_000_000
IDLE_ROUNDS = 4  # stop after as many searches in a row that found nothing
CHEAP_ROUNDS, CHEAP_VARIABLES = 3, 1_500  # what is this small is solved more exactly than asked:
EXACT = 0.02  # to this share of the asked gap, where that takes
FINEST = 1e-9  # nor is any MILP solved more exactly than to this share of the keep-all time
CHEAP_EFFORT = 0.5  # no more than about so many seconds' work
COARSE, SAT_COARSE = 0.25, 0.1  # and what is not, first to this share of the distance between bound and incumbent
TINY_GAP = 0.1  # share of the budget that values without variables take at first, per gap


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
    start         a schedule to begin with; its order of first executions may be another, and where it exceeds the budget, walks
                  along it are to begin with
    any_order     search among all orders of first executions too, in graphs without a backward pass first; without, a schedule
                  in another order is taken only where it is the start, none in graph order is known, or one in several passes is
                  much cheaper than those. From one that is taken the search goes on, through other orders too
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where one of them changed (None: not known); the
                  bound falls to that of any order where a schedule in another order is the best so far

    The status is INFEASIBLE only where no schedule in any order fits; where none with this order does and none in another is
    found, it is UNKNOWN and ``notes["stopped"]`` says so. A schedule in another order has ``any_order_bound_ns`` as its bound;
    ``restricted_bound_ns`` is then what is proved about its own order, and ``notes["order_bound_ns"]`` what is about the graph's.
    Unless the time limit struck (``notes["stopped"]``, or ``notes["cut_short"]`` for a part of the search), the same arguments
    give the same plan.
    """
    search = StageSearch(graph, budget_bytes, gap, time_limit_s, progress, seed=seed, any_order=any_order)
    try:
        has_more = _run_for_a_share(search, start)
        _go_on(search)
        if search.leaves and not search.exhausted():
            _come_back(search)
        if has_more and not search.elsewhere:
            _search_on(search)
        if has_more and not search.closed_in_any_order():
            search.notes.setdefault("stopped", "time limit")
        if "infeasible" not in search.notes:
            prove_in_any_order(search, search.events)
        search.take_last()
    except KeyboardInterrupt:
        search.notes["stopped"] = "interrupted"
        search.take_last()
    search.tell_cut_short("stopped" not in search.notes and now_s() >= search.deadline)
    in_hand = _much_cheaper_in_passes(search)  # there was no time to solve for its order
    if in_hand is not None:
        search.offer(in_hand, "list walk, in another order")
    if search.best is None and "infeasible" not in search.notes:  # no time for more
        until = now_s() + LAST_S
        try:
            search.begin_walks(until)
            take_roots(search, until)
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
            search.take_walk()
    bound_ns = search.bound_ns
    if search.best is not None and search.time_ns is not None:
        if in_graph_order(computes(search.best)):
            bound_ns = min(bound_ns, search.time_ns)  # above it by the solver's rounding at most
        else:
            search.notes.setdefault("order", OTHER_ORDER)
            search.notes["order_bound_ns"], bound_ns = bound_ns, search.any_order_bound_ns
    if search.order_of_best != search.solved_order:
        search.restricted_bound_ns = None
    return search.plan(METHOD, seed=seed, bound_ns=bound_ns)


def _run(search: StageSearch, start: Schedule | None) -> None:
    """The method, step by step."""
    if not _begin(search, start):
        return
    if search.any_order and not search.trained:
        _reorder(search, ORDERS_SHARE, anew=True)
    if search.done():
        return
    if _rounds(search):
        has_last_word = search.exhaustive_keeps_up or len(search.graph.ops) <= FEW_OPS
        if not (has_last_word and _exhaust(search, MOST_LOOKS, search.gap)):
            _search_on(search)


def _begin(search: StageSearch, start: Schedule | None) -> bool:
    """Offer what is there without a search; whether one is needed, and may find something."""
    if search.hopeless():
        return False
    search.offer(keep_all(search.graph), "keep all")
    if start is not None:
        search.offer(start, "start")
        if search.best is None:
            search.follow(put_in_graph_order(search.graph, computes(start)))
    return not search.done()


def _run_for_a_share(search: StageSearch, start: Schedule | None) -> bool:
    """The method, for a share of the time in a training step where any order will do and walks find a schedule; whether that has
    ended it."""
    is_shared = search.any_order and search.trained
    if is_shared and _begin(search, start):
        search.begin_walks(search.deadline)
    if not is_shared or search.best is None or search.done():
        _run(search, start)
        return False
    deadline = search.deadline
    search.deadline = now_s() + OWN_SHARE * search.left_s
    try:
        _run(search, start)
    finally:
        search.deadline = deadline
    if search.notes.get("stopped") != "time limit" or now_s() >= deadline:
        return False
    del search.notes["stopped"]
    search.tell_cut_short(True)
    return True


def _reorder(search: StageSearch, share: float, *, anew: bool = False) -> None:
    """Search among all orders, for a share of the time left; list walks go on from what that finds in graph order.

    Where nothing fits, what is least over the budget has an order to solve for, for the same share of what is left then.

    anew  not from the best schedule on
    """
    search.reordered = True
    runs = search_orders(search, search.seed, now_s() + share * search.left_s, anew=anew)
    search.follow(runs)
    if search.best is None and not in_graph_order(runs) and not search.done():
        _solve_in(search, with_frees(search.graph, runs), share * search.left_s)


def _elsewhere(search: StageSearch) -> None:
    """Where nothing fits so far: try other orders, once."""
    if search.best is None and not search.nested and not search.reordered and not search.done():
        _reorder(search, ANNEAL_SHARE, anew=True)


def _go_on(search: StageSearch) -> None:
    """Where the best schedule has another order of first executions: solve for that one, and look for a better one from there.

    Training steps come in a good order, so theirs is solved first, and others are searched in the time that is left: half of it.
    """
    if search.any_order and not search.reordered and search.best is not None and not search.exhausted():
        _reorder(search, ORDERS_SHARE, anew=True)
    while search.best is not None and search.elsewhere and not search.exhausted():
        before_ns = search.time_ns
        if search.order_of_best != search.solved_order:
            _solve_in(search, search.best, search.left_s)
        if not search.exhausted():
            _reorder(search, ORDERS_SHARE)
        if search.time_ns == before_ns:
            break


def _come_back(search: StageSearch) -> None:
    """Search in graph order after all, where its own order leaves a schedule in several passes no better and there is time."""
    search.leaves, search.passes, search.passed = False, None, True
    if not search.done():
        _run(search, None)


def _solve_in(search: StageSearch, start: Schedule, time_limit_s: float) -> None:
    """Solve for the order of first executions of a schedule, which need not fit."""
    order = first_runs(computes(start))
    graph = search.graph.in_order(order)

    def tell(time_ns: int | None, phase: str, **_: object) -> None:  # its bound holds for no other order
        search.report(f"{phase}, in another order", time_ns, None if time_ns is None else search.any_order_bound_ns)

    inner = StageSearch(graph, search.budget_bytes, search.gap, time_limit_s, tell, seed=search.seed, nested=True)
    try:
        _run_nested(search, inner, renumbered(start, {v: i for i, v in enumerate(order)}))
    finally:
        proved_ns = min(inner.bound_ns, inner.time_ns or inner.bound_ns)
        search.solved_order, search.restricted_bound_ns = order, proved_ns if proved_ns > search.base else None
        if inner.best is not None:
            search.offer(renumbered(inner.best, order), f"{inner.notes['found_by']}, in another order")
            search.notes.update({key: inner.notes[key] for key in ("events", "rounds") if key in inner.notes})


def _run_nested(search: StageSearch, inner: StageSearch, start: Schedule | None = None) -> None:
    """The method within another search; what it has found counts however it ends."""
    try:
        _run(inner, start)
    except KeyboardInterrupt:
        inner.notes["stopped"] = "interrupted"
        raise
    finally:
        inner.take_last()
        search.tell_cut_short("cut_short" in inner.notes or inner.notes.get("stopped") == "time limit")


def _before_long(search: StageSearch, model: StageModel) -> None:
    """Look for a better schedule by other means before a MILP that may take long."""
    if search.distance_ns > BLOCKS_DISTANCE * search.base:
        try_blocks(search)
    if search.distance_ns > COARSE_DISTANCE * search.base and not model.is_for_sat:
        _solve_coarser(search, FEWER if len(model.milp.cost) > HOPELESS_VARIABLES else HALF)


def _solve_coarser(search: StageSearch, fewer: float) -> bool:
    """Solve a coarser graph, once, for a schedule that list walks go on from; whether it has done so now.

    fewer  share of the ops that it may have at most
    """
    if search.coarsened or search.nested or search.done() or len(search.coarser.graph.ops) > fewer * len(search.graph.ops):
        return False
    search.coarsened = True
    graph, time_limit_s = search.coarser.graph, COARSE_SHARE * search.left_s

    def tell(time_ns: int | None, **_: object) -> None:  # its bound does not hold for the finer graph
        search.report("coarser graph", time_ns)

    inner = StageSearch(graph, search.budget_bytes, search.gap, time_limit_s, tell, seed=search.seed, nested=True)
    inner.raise_bound(search.searched_ns, restricted=False)  # its schedules are schedules of the finer graph
    try:
        _run_nested(search, inner)
    finally:
        if inner.best is not None:
            runs = put_in_graph_order(search.graph, search.coarser.expand(computes(inner.best)))
            search.offer(with_frees(search.graph, runs), f"{inner.notes['found_by']}, in a coarser graph")
    if inner.best is not None:
        search.follow(runs, COARSE_WORK)
    return True


def _rounds(search: StageSearch) -> bool:
    """Solve for the events so far, walk the solution, add what it overflows; until closed (False) or nothing is left to add."""
    graph = search.graph
    round_ = _Round(search, with_end(graph), [tightest(graph)])
    sequence: list[int] = []
    rows: list[SpanRow] = []
    while True:
        model = round_.next_model()
        answer, rows = solve_relaxed(search, model, rows, sequence, round_.finest_ns) if round_.may_relax else (None, rows)
        if search.done(round_.asked.aim):
            return False
        relaxed = answer is not None
        if answer is None:
            if round_.is_dear:
                if search.exhaustive_keeps_up and _exhaust(search, 2 * search.looks, search.gap):
                    return False
                _before_long(search, model)
                if search.done(round_.asked.aim):
                    return False
                answer, rows = solve_branching(search, model, rows, sequence, round_.asked.aim)
                if search.done(round_.asked.aim):
                    return False
            if answer is None:
                add_spans(model)
                work = work_beside(search, model, round_.number)
                answer = solve_whole(search, model, round_.asked, sequence, work)
        if answer.outcome is Outcome.INFEASIBLE:
            _none_in_order(search)
            return False
        round_.prove(model.bound_ns(answer))
        if answer.values is not None:
            found = walk(model, answer.values)
            sequence = found.runs
            search.offer(with_frees(graph, sequence), "walk")
        if search.done(round_.asked.aim):
            return False
        if round_.number == BLOCKS_ROUND:
            try_blocks(search)
        if round_.number == 1 and _exhaust(search, FEW_LOOKS, EXACT * search.gap):
            return False
        if round_.number == 1 and search.best is None and is_ruled_out(search):
            return False
        if round_.number == 1 and not search.elsewhere:
            guide = None if answer.values is None else partial(follow_guides, search, round_.closed_graph, round_.events[0])
            _first_schedules(search, guide)
            reached = _look_further(search, round_)
            if "infeasible" in search.notes or search.leaves:
                return False
            if reached is not None and not search.is_near:
                sequence, rows, round_.events = list(reached.sequence) or sequence, reached.rows, reached.events
                if search.done():
                    return False
                if reached.is_last:
                    return True
                continue
        if answer.values is None:
            return not search.done()
        search.follow(sequence)
        if search.is_far and search.trained:
            shorten(search)
            mend(search, sequence)
        if search.done(round_.asked.aim):
            return False
        if not round_.refine(model, answer, found, relaxed=relaxed):
            return True


@dataclass
class _Round:
    """The stage model of a round, and how exactly it is to be solved."""

    search: StageSearch
    closed_graph: Graph
    events: list[Event]
    number: int = 0
    refined: int = 0  # how many times in a row nothing but a finer tolerance was left
    large: float = LARGE  # what overflow asks for second events
    seconds: list[Event] = field(default_factory=list)  # those of the round before
    floor_ns: int = 0  # proved for the models so far that the present one refines
    latest: StageModel | None = None

    def __post_init__(self) -> None:
        self.finest_ns = max(EXACT * self.search.gap, FINEST) * self.search.base
        self.near_share = max(TINY, min(MOST_TINY, TINY_GAP * self.search.gap))

    def next_model(self) -> StageModel:
        """The model of the next round; sets what is to be known of it."""
        search = self.search
        self.number += 1
        search.notes.update(events=len(self.events), rounds=self.number)
        search.events = [event.op for event in self.events if not event.is_rerun]
        self.tiny_share = MOST_TINY if search.is_far and self.near_share > TINY else self.near_share
        model = stage_model(self.closed_graph, search.budget_bytes, self.events, tiny_share=self.tiny_share)
        if self.latest is not None and not model.refines(self.latest):
            self.floor_ns = 0
        self.latest = model
        is_cheap = self.number <= CHEAP_ROUNDS and len(model.milp.cost) <= CHEAP_VARIABLES
        self.is_dear = self.number > 1 and not is_cheap
        self.may_relax = self.number > 1 and not self.refined
        tolerance_ns = self.finest_ns
        if self.is_dear:
            coarse = SAT_COARSE if model.is_for_sat else COARSE
            tolerance_ns = max(tolerance_ns, coarse * search.distance_ns * 0.1**self.refined)
        self.asked = Asked(
            tolerance_ns,
            aim=EXACT * search.gap if is_cheap else search.gap,
            effort=CHEAP_EFFORT if search.closed() or (is_cheap and not self.refined) else math.inf,
            floor_ns=self.floor_ns,
        )
        return model

    def prove(self, bound_ns: int | None) -> None:
        """Note a bound that the model gives."""
        self.search.raise_bound(bound_ns, restricted=False)
        self.floor_ns = max(self.floor_ns, bound_ns or 0)

    def refine(self, model: StageModel, answer: Answer, found: Walk, *, relaxed: bool) -> bool:
        """Add what the walk of the solution overflows, or else ask for a more exact one; False where neither is left."""
        search, gone, most = self.search, list[Event](), NEW_PER_ROUND
        if search.stalled:  # two events at once raise the bound no more than one would
            gone, self.large = self.seconds, math.inf
        elif relaxed and search.climbed > STEEP:
            gone = idle_events(model, answer)
            most = NEW_RELAXED if len(model.milp.cost) <= RELAXED_VARIABLES else NEW_PER_ROUND
        # Relaxations overflow everywhere, and without a backward pass models with re-runs as events are the hardest to solve.
        last = relaxed or not search.trained
        by_need = search.trained and search.is_far
        more, self.seconds = missing(
            model, search.graph, found, search.budget_bytes, most, large=self.large, reruns_last=last, by_need=by_need
        )
        events = {*self.events, *more}
        # Re-runs stay, and so do the first executions around them.
        stay = {t for event in events if event.is_rerun for t in (event.done, event.done + 1)}
        self.events = sorted(events.difference(t for t in gone if t.done not in stay)) or self.events
        if more:
            self.refined = 0
        elif relaxed:
            search.stalled = STALLED
        elif self.tiny_share > TINY:
            self.near_share = TINY
        elif self.asked.tolerance_ns > self.finest_ns or answer.outcome is Outcome.STOPPED:
            self.refined += 1
        else:
            return False
        return True


def _none_in_order(search: StageSearch) -> None:
    """No schedule in graph order fits, which the notes then say; others are tried."""
    if _is_only_order(search.graph):
        search.notes["infeasible"] = "no schedule fits, and no other order of first executions is valid"
        return
    is_asked = search.least_bytes > 0  # whether any may fit: what was tried then is not tried again
    if search.best is None and not is_asked and not search.nested and not _scrape(search, in_order=False):
        return
    _elsewhere(search)
    if search.best is None:
        search.notes["stopped"] = "no schedule with this order of first executions fits"
    else:
        search.notes["order"] = f"{OTHER_ORDER}, in which no schedule fits"


def _exhaust(search: StageSearch, looks: int, aim: float) -> bool:
    """Look through the schedules of a small graph in its order, at so many nodes at most, for what closes the gap to ``aim``;
    whether that is all there is."""
    if len(search.graph.ops) > SMALL_OPS or search.base >= LONGEST_NS or search.done():
        return False
    search.looks += looks
    found = search.exhaustive.go_on(
        below_ns=math.inf if search.time_ns is None else search.time_ns - math.floor(aim * search.time_ns),
        looks=looks,
        deadline=search.deadline,
        proves=partial(search.raise_bound, restricted=False),
    )
    search.tell_cut_short(now_s() >= search.deadline)
    if found.runs is not None:
        search.offer(with_frees(search.graph, found.runs), "A*")
    if math.isinf(found.bound_ns):
        _none_in_order(search)
        return True
    search.raise_bound(math.ceil(found.bound_ns), restricted=False)
    return search.closed(aim)


def _first_schedules(search: StageSearch, guide: Callable[[float], None] | None) -> None:
    """Look for schedules that fit by quick means."""
    if not search.trained and not search.nested and not search.done():
        ended = anneal_on(search, range(len(search.graph.ops)), search.seed, ANNEAL_SHARE * search.left_s, keep_order=True)
        search.follow(ended.runs)
    until = search.deadline if search.trained else now_s() + WALKS_SHARE * search.left_s
    search.begin_walks(until)
    if search.best is not None:
        search.follow(list(computes(search.best)))
    elif search.trained:
        until = now_s() + GUIDES_SHARE * search.left_s
    if guide is not None and not search.nested:
        guide(until)
    search.tell_cut_short(now_s() >= until)


def _look_further(search: StageSearch, round_: _Round) -> Reached | None:
    """Look for schedules by all means but MILPs where none fits or the best is far from the bound.

    In a training step there are relaxations beside that; what they have come to, None where there were none.
    """
    prove_in_any_order(search)
    climb = Climb(search=search, closed_graph=round_.closed_graph, events=round_.events)
    if not climb.is_wanted:
        _by_all_means(search)
        return None
    work = FIRST_WORK if search.best is not None else SCRAPE_WORK

    def others() -> None:
        _by_all_means(search)
        _go_on_beside(search, climb, work)

    try:
        return climb.beside(others)
    finally:
        if now_s() >= search.deadline:
            search.take_beyond()


def _by_all_means(search: StageSearch) -> None:
    """Look for better schedules where the best one is far from the bound, and for any where there is none."""
    if search.trained and (search.best is None or search.is_far):
        search.pass_again()
        if not (search.nested or search.passed or search.done()):
            _walk_in_passes(search)
    if search.is_far:
        if search.trained:
            shorten(search)
        try_blocks(search)
    if search.best is None and not _scrape(search, in_order=True):
        return
    _solve_in_passes(search)
    _elsewhere(search)


def _walk_in_passes(search: StageSearch) -> None:
    """Let list walks begin from schedules in several passes, in graph order and in an order of their own."""
    until = now_s() + PASSES_SHARE * search.left_s
    for runs in in_passes(search.graph, search.budget_bytes, deadline=until):
        search.walks.follow(put_in_graph_order(search.graph, runs), held=True, deadline=until)
        order = first_runs(runs)
        number = {v: i for i, v in enumerate(order)}
        walks = walk_search()(search.graph.in_order(order), search.budget_bytes, search.seed)
        walks.follow([number[v] for v in runs], deadline=until)
        if walks.runs is not None and (search.passes is None or walks.time_ns < search.passes[0].time_ns):
            search.passes = walks, order
    search.tell_cut_short(now_s() >= until)
    search.take_walk()


def _much_cheaper_in_passes(search: StageSearch) -> Schedule | None:
    """The cheapest schedule in several passes, in its own order, where it is much cheaper than all others."""
    if search.passes is None:
        return None
    walks, order = search.passes
    assert walks.runs is not None
    if search.time_ns is not None and walks.time_ns - search.base > PASSES_WIN * (search.time_ns - search.base):
        return None
    return with_frees(search.graph, [order[v] for v in walks.runs])


def _solve_in_passes(search: StageSearch) -> None:
    """Solve for the order of a schedule in several passes, if walks make that much cheaper than all in graph order."""
    if search.passes is None or search.out_of_time():
        return
    search.passes[0].improve(PASSES_WORK, deadline=search.deadline)
    schedule = _much_cheaper_in_passes(search)
    if schedule is not None and not search.out_of_time():
        _solve_in(search, schedule, PASSES_ORDER_SHARE * search.left_s)
        search.leaves = search.best is not None and search.elsewhere


def _go_on_beside(search: StageSearch, climb: Climb, work: int) -> None:
    """Walks and annealing along what relaxations come to, until the bound is near.

    work  which has been done beside them so far
    """
    if search.best is None:
        climb.by(work)  # what is proved by then counts all the same
    while not (search.is_near or search.leaves or search.done()):
        reached = climb.by(work)
        if search.is_near or search.done():
            return
        is_over = climb.is_over(work)
        if _solve_coarser(search, HALF):
            work += COARSER_WORK
            continue
        if reached.sequence:
            search.follow(reached.sequence, TURN_WALKS)
        search.walks.improve(TURN_WALKS, deadline=search.deadline)
        search.take_walk()
        shorten(search)
        if reached.sequence:
            mend(search, reached.sequence)
        if is_over:
            return
        work += TURN_WORK


def _scrape(search: StageSearch, *, in_order: bool) -> bool:
    """Nothing fits so far: find anything that does; False where nothing can.

    Graphs without a backward pass try other orders before they pebble: theirs is poor.

    in_order  whether something may fit in graph order
    """
    least = prove_least(search)
    if "infeasible" in search.notes:
        return False
    if not search.trained:
        _elsewhere(search)
    if search.time_ns is None and not search.done():
        try_halves(search)
    if in_order and search.is_poor and not search.done():
        _solve_coarser(search, HALF)
    if search.time_ns is None and not search.done() and repeats(search.graph):
        try_blocks(search)
    if search.time_ns is None and search.trained and in_order and not search.nested:
        _change_until_one_fits(search)
    if search.time_ns is None:
        pebble(search, least)
    elif search.is_poor:
        try_blocks(search, scarce=True)
    return "infeasible" not in search.notes


def _change_until_one_fits(search: StageSearch) -> None:
    """Change list walks that get stuck, those that got furthest first, until one comes to its end; and then while it gets cheaper
    fast."""
    until = now_s() + FIT_SHARE * search.left_s
    work = max(FIT_WORK, FIT_TIMES * len(search.graph.ops))
    while math.isinf(search.walks.time_ns) and work > 0 and now_s() < until:
        search.walks.improve(FIT_TURN, deadline=until)
        work -= FIT_TURN
    falls = not math.isinf(search.walks.time_ns)
    while falls and now_s() < until:
        before_ns = search.walks.time_ns
        search.walks.improve(FITS_TURN, deadline=until)
        falls = before_ns - search.walks.time_ns > FITS_BETTER * (before_ns - search.base)
    search.tell_cut_short(now_s() >= until)
    search.take_walk()


def _is_only_order(graph: Graph) -> bool:
    """Whether each op reads something that the one before it makes, so that no other order of first executions is valid."""
    return all(any(graph.producer[x] == v - 1 for x in op.inputs) for v, op in enumerate(graph.ops) if v > 0)


def _search_on(search: StageSearch) -> None:
    """No event left to add, or the MILP too hard: search among list walks until they find nothing for long."""
    idle = 0
    while idle < IDLE_ROUNDS and not search.done():
        before = search.walks.time_ns
        search.walks.improve(MOST_WORK, deadline=search.deadline)
        search.take_walk()
        idle = 0 if search.walks.time_ns < before else idle + 1
