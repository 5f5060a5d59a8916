"""Walks and annealing together: they fit, keep the graph order, find more than walks alone, and repeat."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from graphs import Graph
from graphs.synthetic import random_layered, random_training
from planner import keep_all, simulate
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.schedule import in_graph_order, with_frees
from planner.walks import annealed_walks
from planner.walks.annealed_walks import AnnealedWalks
from planner.walks.annealing import Annealer, Round
from planner.walks.walk_search import WalkSearch
from tests.clock import stopwatch

WORK = 1_000_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealed_walks, "LONG_MOVES", 400_000)
    monkeypatch.setattr(annealed_walks, "SHORT_MOVES", 50_000)


def layered(seed: int) -> tuple[Graph, int]:
    graph = random_layered("RL1", seed)
    return graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)


def time_of(walks: WalkSearch, graph: Graph, budget_bytes: int) -> float:
    """Of what was found, which is what it is said to be."""
    if walks.runs is None:
        return float("inf")
    runs = walks.runs.tolist()
    trace = simulate(graph, with_frees(graph, runs))
    assert trace.peak_bytes <= budget_bytes and trace.time_ns == walks.time_ns and in_graph_order(runs)
    return trace.time_ns


def test_they_find_more_than_walks_alone() -> None:
    better = worse = 0
    for seed in range(4):
        graph, budget_bytes = layered(seed)
        times = []
        for kind in (AnnealedWalks, WalkSearch):
            walks = kind(graph, budget_bytes, seed=0)
            walks.start()
            walks.improve(2 * WORK)
            times.append(time_of(walks, graph, budget_bytes))
        better += times[0] < times[1]
        worse += times[0] > times[1]
    assert better >= 3 and worse <= 1


def test_annealing_mends_a_sequence_that_holds_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the graph, without re-runs; walks along it find less, or nothing."""
    monkeypatch.setattr(annealed_walks, "MEND_MOVES", 400_000)
    better = 0
    for seed in range(4):
        graph, budget_bytes = layered(seed)
        times = []
        for kind in (AnnealedWalks, WalkSearch):
            walks = kind(graph, budget_bytes, seed=0)
            walks.follow(range(len(graph.ops)), 1_200_000)
            times.append(time_of(walks, graph, budget_bytes))
        better += times[0] < times[1]
    assert better >= 3


@pytest.mark.parametrize("kind", [AnnealedWalks, WalkSearch])
def test_the_same_again_is_the_same_and_what_goes_apart_goes_its_own_way(kind: type[WalkSearch]) -> None:
    graph, budget_bytes = layered(3)
    if kind is WalkSearch:
        graph = random_training(40, 1)
        budget_bytes = int(0.75 * simulate(graph, keep_all(graph)).peak_bytes)
    times = []
    for others in (0, 1):
        walks = kind(graph, budget_bytes, seed=1)
        walks.improve(WORK)
        walks.follow(range(len(graph.ops)))
        before_ns = walks.time_ns
        for _ in range(others):
            other = walks.apart(seed=2)
            other.go_on(WORK)
            assert walks.time_ns == before_ns and not walks.hurried
        walks.improve(WORK)
        times.append(time_of(walks, graph, budget_bytes))
        for _ in range(others):
            best_ns = min(walks.time_ns, time_of(other, graph, budget_bytes))
            walks.join(other)
            assert time_of(walks, graph, budget_bytes) == best_ns
    assert times[0] == times[1] < float("inf")


def test_what_goes_apart_does_not_draw_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = layered(3)
    seeds = []

    def noted(graph: Graph, ops: Sequence[int], budget_bytes: int, seed: int, *, keep_order: bool) -> Annealer:
        seeds.append(seed)
        return Annealer(graph, ops, budget_bytes, seed, keep_order=keep_order)

    monkeypatch.setattr(annealed_walks, "Annealer", noted)
    monkeypatch.setattr(annealed_walks, "LONG_MOVES", 200_000)
    walks = AnnealedWalks(graph, budget_bytes, seed=1)
    other = walks.apart(seed=1_000)
    other.go_on(600_000)
    apart = len(seeds)
    walks.improve(600_000)
    assert 0 < apart < len(seeds) == len(set(seeds))


def test_what_goes_on_begins_with_what_the_last_sequence_led_to(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(40, 1)
    walks = WalkSearch(graph, int(0.75 * simulate(graph, keep_all(graph)).peak_bytes), seed=0)
    walks.start()
    walks.follow(range(len(graph.ops)), 1_000)
    grow, grown = walks._grow, []

    def noted(start: Any, work: int, deadline: float) -> Any:
        grown.append((start, work))
        return grow(start, work, deadline)

    monkeypatch.setattr(walks, "_grow", noted)
    followed = walks._followed
    walks.go_on(WORK)
    assert followed is not None and grown[0] == (followed, WORK // 2)


def test_changes_end_where_they_are_told_to_stop() -> None:
    graph, budget_bytes = layered(3)
    walks = WalkSearch(graph, budget_bytes, seed=1)
    walks.start()
    walks.follow(range(len(graph.ops)))
    walks.stop = threading.Event()
    walks.stop.set()
    taken_s = stopwatch()
    walks.go_on(10**12)
    assert taken_s() < 2


def test_the_deadline_is_kept_and_haste_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealed_walks, "LONG_MOVES", 40_000_000)
    graph, budget_bytes = layered(1)
    walks = AnnealedWalks(graph, budget_bytes, seed=0)
    walks.improve(200_000)  # compiled code is loaded
    taken_s = stopwatch()
    walks._owed_moves = 40_000_000
    walks.improve(200_000, deadline=now_s() + 0.5)
    assert taken_s() < 2
    assert walks.hurried


def test_an_interruption_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = layered(0)
    walks = AnnealedWalks(graph, budget_bytes, seed=0)
    whole = annealed_walks.anneal

    def until_ctrl_c(found: Incumbent, annealer: Annealer, moves: int, rounds: Sequence[Round]) -> None:
        whole(found, annealer, moves, rounds)
        raise KeyboardInterrupt

    monkeypatch.setattr(annealed_walks, "anneal", until_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        walks.improve(WORK)
    assert time_of(walks, graph, budget_bytes) < float("inf")
