"""Chains of blocks for larger budgets, along which list walks find schedules that fit."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import pytest

from graphs import Graph
from graphs.capture import capture
from graphs.costs import roofline
from graphs.synthetic import random_layered, random_training
from graphs.workloads import build
from planner import keep_all, simulate, solve
from planner.chains.chain import chain_of_ops
from planner.chains.chain_dp import ChainProgram, Way
from planner.methods import cutting_stages
from planner.schedule import with_frees
from planner.stages import first_schedules
from planner.stages.block_chain import BlockSchedule, block_schedule, repeats
from planner.stages.first_schedules import try_blocks
from planner.stages.search import StageSearch
from planner.walks.walk_search import WalkSearch
from tests.chains import random_chain


@pytest.fixture(scope="module")
def recurrent() -> Graph:
    """A step of an LSTM, whose blocks are its time steps."""
    model, inputs, loss = build("lstm", batch=512, seq=16, depth=1)
    return roofline(capture(model, inputs, loss=loss)).graph


@pytest.fixture(scope="module")
def blocks(recurrent: Graph) -> BlockSchedule:
    """Of that, in half of the memory."""
    return block_schedule(recurrent, half_of(recurrent), time_limit_s=30, seed=0)


def half_of(graph: Graph) -> int:
    return simulate(graph, keep_all(graph)).peak_bytes // 2


def program_of(graph: Graph) -> ChainProgram:
    stages = chain_of_ops(graph)
    return ChainProgram(stages, [[Way(stage.forward, stage.backward)] for stage in stages.stages])


@pytest.mark.parametrize("seed", range(6))
def test_each_sequence_is_shorter_than_the_one_before(seed: int) -> None:
    graph = random_chain(12, seed)
    program = program_of(graph)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    budget_bytes, less_ns = int(0.6 * peak_bytes), 0.01 * graph.keep_all_time_ns
    traces = [simulate(graph, with_frees(graph, runs)) for runs in program.shorter_and_shorter(budget_bytes, peak_bytes, less_ns)]
    assert len(traces) > 1
    assert all(later.time_ns <= trace.time_ns - less_ns for trace, later in pairwise(traces))
    assert all(trace.peak_bytes <= peak_bytes for trace in traces)
    least = solve(graph, budget_bytes, method="rotor").time_ns
    assert least is None or traces[0].time_ns <= least


def test_there_is_none_where_no_larger_budget_fits_either_and_no_time_is_said() -> None:
    program = program_of(random_chain(12, 0))
    for most_bytes in (program.fixed_bytes, 0):
        assert not list(program.shorter_and_shorter(0, most_bytes, 0.0))
    with pytest.raises(TimeoutError):
        next(program.shorter_and_shorter(0, 10**9, 0.0, deadline=time.perf_counter() - 1))


def test_varied_times_lead_to_other_schedules_that_keep_their_bytes(recurrent: Graph, blocks: BlockSchedule) -> None:
    budget_bytes, program = half_of(recurrent), blocks.program
    assert program is not None
    found = []
    for seed in (1, 2, 1):
        room_bytes = budget_bytes - program.fixed_bytes
        tables = program.varied(0.02, seed).tables(room_bytes, max(1, room_bytes // 500))
        found.append(tables.ops(tables.steps()[0]))
        assert simulate(recurrent, with_frees(recurrent, found[-1])).peak_bytes <= budget_bytes
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("known", [None, "dear", "cheap"])
def test_walks_begin_from_larger_chains_where_blocks_lead(
    recurrent: Graph, blocks: BlockSchedule, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = half_of(recurrent)
    assert blocks.schedule is not None
    if known:
        monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: blocks)
    search = StageSearch(recurrent, budget_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    larger: list[int] = []
    shorter = ChainProgram.shorter_and_shorter

    def ask(chain: ChainProgram, *sizes: Any, **limits: Any) -> Any:
        larger.append(sizes[1])
        return shorter(chain, *sizes, **limits)

    monkeypatch.setattr(ChainProgram, "shorter_and_shorter", ask)
    monkeypatch.setattr(WalkSearch, "improve", lambda *_, **__: None)
    if known:
        search.time_ns = (100 if known == "dear" else 1) * recurrent.keep_all_time_ns
    try_blocks(search)
    if known == "cheap":
        assert not larger
        return
    assert all(most_bytes > budget_bytes for most_bytes in larger) and len(larger) > 1
    assert search.best is not None and simulate(recurrent, search.best).peak_bytes <= budget_bytes
    found_ns, blocks_ns = (simulate(recurrent, schedule).time_ns for schedule in (search.best, blocks.schedule))
    assert found_ns - search.base < 0.97 * (blocks_ns - search.base)


def test_walks_fit_larger_chains_where_blocks_do_not(
    recurrent: Graph, blocks: BlockSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = half_of(recurrent)
    monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: blocks._replace(schedule=None))
    monkeypatch.setattr(WalkSearch, "improve", lambda *_, **__: None)
    search = StageSearch(recurrent, budget_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    try_blocks(search)
    assert search.best is not None and simulate(recurrent, search.best).peak_bytes <= budget_bytes
    assert search.notes["found_by"] == "list walk"


def test_tables_that_the_clock_ends_are_none(recurrent: Graph, blocks: BlockSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes = half_of(recurrent)
    monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: blocks)
    monkeypatch.setattr(first_schedules, "LARGER_SHARE", 0.0)
    monkeypatch.setattr(WalkSearch, "improve", lambda *_, **__: None)
    search = StageSearch(recurrent, budget_bytes, gap=0.0, time_limit_s=30.0, seed=0)
    try_blocks(search)
    assert search.best is not None and search.notes["cut_short"]


def test_blocks_are_tried_again_with_more_ways_only_where_none_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(12, 0)
    grids: list[int] = []

    def none_fits(*_: Any, peaks: int = 4, **__: Any) -> BlockSchedule:
        grids.append(peaks)
        return BlockSchedule(None, {})

    monkeypatch.setattr(first_schedules, "is_chain", lambda graph: True)
    monkeypatch.setattr(first_schedules, "block_schedule", none_fits)
    search = StageSearch(graph, 1, gap=0.0, time_limit_s=math.inf, seed=0)
    for scarce in (False, False, True):
        try_blocks(search, scarce=scarce)
    assert grids == [4, first_schedules.FINE_GRID["peaks"]]
    search.blocks_miss = False
    try_blocks(search, scarce=True)
    assert len(grids) == 2


def test_blocks_come_first_where_they_are_alike(recurrent: Graph) -> None:
    assert repeats(recurrent)
    for others in (random_training(60, 0), random_chain(40, 0), random_layered("RL1", 0)):
        assert not repeats(others)


@pytest.mark.parametrize("alike", [True, False])
def test_blocks_that_are_alike_are_tried_between_a_coarser_graph_and_pebbling(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_training(12, 0)
    search = StageSearch(graph, simulate(graph, keep_all(graph)).peak_bytes - 1, gap=0.0, time_limit_s=60.0, seed=0)
    asked: list[str] = []
    monkeypatch.setattr(cutting_stages, "prove_least", lambda _: None)
    monkeypatch.setattr(cutting_stages, "repeats", lambda _: alike)
    monkeypatch.setattr(cutting_stages, "_solve_coarser", lambda *_: asked.append("coarser graph"))
    monkeypatch.setattr(cutting_stages, "pebble", lambda *_: asked.append("pebbling"))
    monkeypatch.setattr(cutting_stages, "try_blocks", lambda _: asked.append("blocks"))
    monkeypatch.setattr(cutting_stages, "try_halves", lambda _: asked.append("halves"))
    monkeypatch.setattr(cutting_stages, "_change_until_one_fits", lambda _: asked.append("changes"))
    assert cutting_stages._scrape(search, in_order=True)
    assert asked == ["halves", "coarser graph", *["blocks"] * alike, "changes", "pebbling"]
