"""Annealing between a search's other steps: it finds what fits and is cheaper, repeats, and is asked only where it may help."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from graphs.synthetic import random_layered, random_training
from planner import keep_all, simulate
from planner.least.pebbling import fitting
from planner.methods import cutting_stages
from planner.schedule import computes, in_graph_order, with_frees
from planner.stages import mending
from planner.stages.mending import mend, shorten, shorten_dear
from planner.stages.search import StageSearch


def walking(seed: int = 0, share: float = 0.55) -> StageSearch:
    """A search whose list walks have begun, and no more."""
    graph = random_training(80, 2)
    budget_bytes = int(share * simulate(graph, keep_all(graph)).peak_bytes)
    search = StageSearch(graph, budget_bytes, gap=0.0, time_limit_s=60.0, seed=seed)
    search.begin_walks(search.deadline)
    return search


def found(search: StageSearch) -> tuple[int, list[int]]:
    assert search.best is not None and search.time_ns is not None
    trace = simulate(search.graph, search.best)
    assert trace.peak_bytes <= search.budget_bytes and trace.time_ns == search.time_ns
    runs = list(computes(search.best))
    assert in_graph_order(runs)
    return search.time_ns, runs


def test_the_best_schedule_gets_cheaper_where_walks_alone_stop() -> None:
    search = walking()
    before_ns, _ = found(search)
    shorten(search)
    assert found(search)[0] < before_ns


def test_a_sequence_that_holds_too_much_leads_to_schedules_that_fit() -> None:
    search = walking()
    search.best = search.time_ns = None
    mend(search, range(len(search.graph.ops)))
    mended_ns, _ = found(search)
    assert mended_ns >= search.base


def pebbled(seed: int = 0) -> StageSearch:
    """A search with what pebbling has found, which takes four times the keep-all time."""
    graph = random_training(80, 5)
    budget_bytes = int(0.45 * simulate(graph, keep_all(graph)).peak_bytes)
    search = StageSearch(graph, budget_bytes, gap=0.0, time_limit_s=60.0, seed=seed)
    search.offer(next(fitting(graph, budget_bytes)), "pebbling")
    return search


def test_a_dear_schedule_gets_much_cheaper() -> None:
    search = pebbled()
    dear_ns, _ = found(search)
    assert dear_ns > 4 * search.base
    shorten_dear(search)
    assert found(search)[0] < 1.6 * search.base
    usual = pebbled()
    shorten(usual)
    assert found(search)[0] < found(usual)[0]


def test_walks_fit_what_is_nearly_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annealing from a schedule that fits may end lower with too much in memory."""
    monkeypatch.setattr(mending, "MOVES", 300_000)
    search = pebbled()
    before_ns, runs = found(search)
    ended = mending._anneal(search, runs, mending.DEAR[0], mending.MOVES, search.deadline)
    assert ended is not None and ended.excess_bytes == 0
    nearly = simulate(search.graph, with_frees(search.graph, ended.nearly))
    assert nearly.peak_bytes > search.budget_bytes and nearly.time_ns < ended.time_ns <= before_ns
    annealed_ns, _ = found(search)
    mending._walk(search, ended.nearly, 0, search.deadline)
    assert found(search)[0] < annealed_ns

    followed = list[tuple[list[int], int]]()
    monkeypatch.setattr(mending, "_walk", lambda search, runs, work, until: followed.append((list(runs), work)))
    shorten_dear(pebbled())
    peaks = [simulate(search.graph, with_frees(search.graph, runs)).peak_bytes for runs, work in followed if not work]
    assert max(peaks) > search.budget_bytes


def test_without_a_schedule_nothing_is_shortened() -> None:
    search = walking()
    search.best = search.time_ns = None
    shorten(search)
    shorten_dear(search)
    assert search.best is None and search.annealings == 0


def shortened_and_mended(seed: int) -> StageSearch:
    search = walking(seed)
    shorten(search)
    mend(search, range(len(search.graph.ops)))
    return search


def shortened_dear(seed: int) -> StageSearch:
    search = pebbled(seed)
    shorten_dear(search)
    return search


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("searched", [shortened_and_mended, shortened_dear])
def test_it_repeats(searched: Callable[[int], StageSearch], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "MOVES", 100_000)
    ends = []
    for _ in range(2):
        search = searched(seed)
        assert "cut_short" not in search.notes
        ends.append(found(search))
    assert ends[0] == ends[1]


def test_what_the_clock_takes_from_a_walk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "WALK_SHARE", 0.0)
    monkeypatch.setattr(mending, "MOVES", 50_000)
    assert "cut_short" in shortened_dear(0).notes


def test_without_time_nothing_is_annealed(monkeypatch: pytest.MonkeyPatch) -> None:
    search = walking()
    monkeypatch.setattr(mending, "SHARE", 0.0)
    before = found(search)
    shorten(search)
    mend(search, range(len(search.graph.ops)))
    assert found(search) == before and search.annealings == 0 and "cut_short" in search.notes


@pytest.mark.parametrize(("has_backward", "is_far"), [(True, True), (True, False), (False, True)])
def test_rounds_ask_for_it_in_training_steps_far_from_their_bound(
    has_backward: bool, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def ask(name: str, does: Any) -> Any:
        def asking(search: StageSearch, *runs: Any) -> None:
            assert search.is_far and search.trained
            asked.append(name)
            does(search, *runs)
            if len(set(asked)) == 2:
                raise KeyboardInterrupt  # that is all to be seen

        return asking

    monkeypatch.setattr(cutting_stages, "shorten", ask("shorten", shorten))
    monkeypatch.setattr(cutting_stages, "mend", ask("mend", mend))
    monkeypatch.setattr(mending, "MOVES", 100_000)
    monkeypatch.setattr("planner.stages.search.FAR_AWAY", 0.001 if is_far else 10.0)
    graph = random_training(80, 2) if has_backward else random_layered("RL1", seed=0)
    budget_bytes = int(0.6 * simulate(graph, keep_all(graph)).peak_bytes)
    began = time.perf_counter()
    plan = cutting_stages.solve(graph, budget_bytes, gap=0.0, time_limit_s=6 if has_backward and is_far else 3)
    assert time.perf_counter() - began < 8
    assert plan.peak_bytes is None or plan.peak_bytes <= budget_bytes
    assert set(asked) == ({"shorten", "mend"} if has_backward and is_far else set())


@pytest.mark.parametrize("blocks_miss", [False, True])
def test_a_dear_schedule_that_owes_nothing_to_blocks_is_not_all(blocks_miss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dear, asked = pebbled().best, list[str]()
    assert dear is not None

    def chain_of_blocks(search: StageSearch, *, scarce: bool = False) -> None:
        asked.append("more ways" if scarce else "blocks")
        search.blocks_miss = blocks_miss
        search.offer(dear, "list walk")

    monkeypatch.setattr(cutting_stages, "try_blocks", chain_of_blocks)
    monkeypatch.setattr(cutting_stages, "repeats", lambda _: True)
    monkeypatch.setattr(cutting_stages, "_solve_coarser", lambda *_: bool(asked.append("coarser graph")))
    search = pebbled()
    search.best = search.time_ns = None
    assert cutting_stages._scrape(search, in_order=True)
    assert asked == ["coarser graph", "blocks", *["more ways"] * blocks_miss]
