"""Schedules to begin with: walks along small stage models, a chain of blocks, and what pebbling finds where little fits."""

from __future__ import annotations

import math

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.chains.chain_dp import ChainProgram
from planner.chains.checkpoints import KINDS, every_root, runs
from planner.incumbent import Incumbent, is_replayable
from planner.least.pebbling import fitting, least_peak, reads_peak
from planner.least.smallest import fitting_next_to
from planner.on_demand import halve, last_runs_peak
from planner.process.clock import now_s
from planner.schedule import Schedule, computes, put_in_graph_order, with_frees
from planner.stages.block_chain import block_schedule, is_chain
from planner.stages.mending import shorten_dear
from planner.stages.model import Event, stage_model, walk
from planner.stages.search import StageSearch

SHRINK = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # budgets of the one-event MILPs that list walks follow
IDLE_GUIDES = 2  # so many of them in a row that help no further are the last ones
# Of the time left, for a chain of blocks; where nothing fits so far, and for more ways to run each where next to nothing does.
BLOCKS_SHARE, SCARCE_SHARE, FINE_GRID = 0.15, 0.3, {"peaks": 12, "saves": 8}
# Its schedules for budgets up to this share larger, each shorter than the last by this share of the keep-all time: ops of walks
# along each; share by which times vary in later passes over them; so many passes in a row that find nothing better are the last
# ones; and the share of the time left for all.
LARGER, SHORTER, LARGER_WORK, VARIED, IDLE_VARIED, LARGER_SHARE = 0.12, 0.004, 50_000, 0.02, 2, 0.15
BLOCKS_WORK, WORK_PER_OP = 4_000_000, 8_000  # ops of walks along what comes of it at most, and for each op of the graph
HALVES_SHARE = 0.25  # of the time left, for Twremat where nothing fits so far
# Sets of values to visit, and share of the time left, at most, where nothing fits so far.
PEBBLE_STATES, PEBBLE_SHARE = 1_000, 0.15
# Where still nothing does, and this share of the budget is proved to be needed: such sets, and the share of the time; bytes that
# all of them may take, and that one takes besides its bits.
CLOSE, MORE_STATES, MORE_SHARE, STATES_BYTES, STATE_BYTES = 0.9, 1_000_000, 0.3, 1 << 30, 1_000


def try_blocks(search: StageSearch, *, scarce: bool = False) -> None:
    """Try a chain of blocks, once; where next to nothing fits, with more ways to run a block, and in any order.

    scarce  once more, where the first time nothing of it fitted
    """
    is_again = search.chained and not (scarce and search.blocks_miss)
    if is_again or search.done() or not is_chain(search.graph):
        return
    search.chained = True
    grid = FINE_GRID if scarce else {}
    share_s = (SCARCE_SHARE if scarce or search.time_ns is None else BLOCKS_SHARE) * search.left_s
    schedule, told, program = block_schedule(search.graph, search.budget_bytes, time_limit_s=share_s, seed=search.seed, **grid)
    search.tell_cut_short("cut_short" in told or told.get("stopped") == "time limit")
    before_ns = search.time_ns
    search.blocks_miss = schedule is None
    if schedule is not None:
        if scarce or search.any_order:
            search.offer(schedule, "blocks")
        # Blocks make some gradients of weights early and put others off; in graph order some do not fit.
        ordered = put_in_graph_order(search.graph, computes(schedule))
        search.offer(with_frees(search.graph, ordered), "blocks")
        if not search.done():
            search.follow(ordered)
    # Where walks have found better, chains for larger budgets lead to nothing better either.
    if program is not None and not search.done() and _is_cheaper(search, before_ns):
        _follow_larger(search, program)
    if not search.is_poor and not search.done() and _is_cheaper(search, before_ns):
        assert search.best is not None
        work = min(BLOCKS_WORK, WORK_PER_OP * len(search.graph.ops))
        search.follow(list(computes(search.best)), work // 2)
        search.walks.improve(work // 2, deadline=search.deadline)
        search.take_walk()


def _is_cheaper(search: StageSearch, than_ns: int | None) -> bool:
    """Whether the best schedule takes less than the best one before; also where there was none."""
    return than_ns is None or (search.time_ns is not None and search.time_ns < than_ns)


def _follow_larger(search: StageSearch, program: ChainProgram) -> None:
    """Let list walks begin from what a chain gives for larger budgets: that takes less time, and a walk mostly makes it fit for
    less than the chain asks. What takes as long by its count leads to walks that do not, so others of those are tried as well.
    """
    until = now_s() + LARGER_SHARE * search.left_s
    most_bytes = int((1 + LARGER) * search.budget_bytes)
    passes = idle = 0
    while idle < IDLE_VARIED and not search.done():
        before_ns = search.walks.time_ns
        chain = program.varied(VARIED, search.seed + passes) if passes else program
        try:
            for runs in chain.shorter_and_shorter(search.budget_bytes, most_bytes, SHORTER * search.base, deadline=until):
                search.follow(put_in_graph_order(search.graph, runs), LARGER_WORK, until)
        except TimeoutError:
            break
        passes += 1
        if math.isinf(search.walks.time_ns):
            break
        idle = 0 if search.walks.time_ns < before_ns else idle + 1
    search.tell_cut_short(now_s() >= until)


def is_ruled_out(search: StageSearch) -> bool:
    """Whether last runs and cuts, or what ops read, prove in a moment that nothing fits in any order; ``notes["infeasible"]``
    then says so."""
    until = now_s() + PEBBLE_SHARE * search.left_s
    needed_bytes = last_runs_peak()(search.graph, least_bytes(search.graph), until)
    if needed_bytes <= search.budget_bytes:
        needed_bytes = reads_peak(search.graph, search.budget_bytes, until)
    search.tell_cut_short(now_s() >= until)
    if needed_bytes > search.budget_bytes:
        _tell_infeasible(search, needed_bytes)
    return "infeasible" in search.notes


def _tell_infeasible(search: StageSearch, needed_bytes: int) -> None:
    search.notes["infeasible"] = "no schedule in any order fits, however the ops are arranged"
    search.notes["least_bytes"] = needed_bytes


def prove_least(search: StageSearch, *, longer: bool = False) -> Schedule | None:
    """Walk backwards from the end, for how little any schedule needs: a schedule with that peak, where the walk gets so far.

    Where any needs more than the budget, ``notes["infeasible"]`` says so.
    """
    until = now_s() + (MORE_SHARE if longer else PEBBLE_SHARE) * search.left_s
    states = PEBBLE_STATES
    if longer:
        states = min(MORE_STATES, STATES_BYTES // (STATE_BYTES + len(search.graph.values) // 8))
    search.least_bytes, schedule = least_peak(search.graph, states=states, time_limit_s=until - now_s())
    search.tell_cut_short(now_s() >= until)
    if search.least_bytes > search.budget_bytes:
        _tell_infeasible(search, search.least_bytes)
    return schedule


def pebble(search: StageSearch, least: Schedule | None) -> None:
    """Walk backwards for schedules that fit, which are dear, and make them cheaper; ``least`` is offered where there are none.

    Where there is none at all, the ways to the smallest budget are tried; and where the budget is close to what is proved to be
    needed, a longer walk is made for the proof that there cannot be any, or for the least one.
    """
    until = now_s() + PEBBLE_SHARE * search.left_s
    for found in fitting(search.graph, search.budget_bytes, time_limit_s=until - now_s()):
        search.offer(found, "pebbling")
    search.tell_cut_short(now_s() >= until)
    if search.time_ns is None and least is None and not search.nested and not search.done():
        _from_smallest(search)
    is_close = search.least_bytes >= CLOSE * search.budget_bytes
    if search.time_ns is None and least is None and is_close and not search.nested:
        least = prove_least(search, longer=True)
        if "infeasible" in search.notes:
            return
    if search.time_ns is None and least is not None:
        search.offer(least, "pebbling")
    shorten_dear(search)
    try_blocks(search, scarce=True)


def _from_smallest(search: StageSearch) -> None:
    """Offer what ``min_budget`` would come across, so that what it says works does."""
    share_s = PEBBLE_SHARE * search.left_s
    until = now_s() + share_s
    found = fitting_next_to(search.graph, search.budget_bytes, time_limit_s=share_s, proved_bytes=search.least_bytes or None)
    search.tell_cut_short(now_s() >= until)
    if found is not None:
        search.offer(found, "smaller and smaller budgets")


def follow_guides(search: StageSearch, closed_graph: Graph, event: Event, until: float) -> None:
    """Early schedules: list walks along what one-event MILPs at shrunk budgets would do, until some in a row are no better.

    None takes longer than ``until``.
    """
    idle = 0
    for share in SHRINK:
        before_ns = search.time_ns
        model = stage_model(closed_graph, int(share * search.budget_bytes), [event])
        answer = model.milp.minimise(
            time_limit_s=max(0.0, until - now_s()), gap=0.002 * search.base / model.unit_ns, node_limit=50, seed=search.seed
        )
        if answer.values is None or search.done() or now_s() >= until:
            return
        search.follow(walk(model, answer.values).runs)
        idle = idle + 1 if search.time_ns is not None and search.time_ns == before_ns else 0
        if idle == IDLE_GUIDES:
            return


def try_halves(search: StageSearch) -> None:
    """Let list walks begin from what Twremat finds, which halves the graph again and again."""
    found = Incumbent(search.graph, search.budget_bytes, search.gap, HALVES_SHARE * search.left_s)
    try:
        halve()(found)
    except TimeoutError:
        search.tell_cut_short(True)
    if found.best is not None:
        search.offer(found.best, "twremat")
        search.follow(put_in_graph_order(search.graph, list(computes(found.best))))


def take_roots(search: StageSearch, until: float) -> None:
    """Offer what Chen's square-root rule gives, which takes a moment: the last resort where nothing has been found in time."""
    for kind in KINDS:
        if search.best is None and is_replayable(search.graph, range(len(search.graph.ops)), until):
            sequence = runs(search.graph, set(every_root(search.graph, kind)))
            if is_replayable(search.graph, sequence, until):
                search.offer(with_frees(search.graph, sequence), "square-root rule")
