"""List walks fit their budget, do as their weights say, and do what their source says, compiled or not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from graphs.ir import Graph
from graphs.synthetic import linear_network, random_training
from planner import list_walk
from planner.bounds import smallest_known
from planner.list_walk import ListWalk
from planner.schedule import keep_all, with_frees
from planner.simulate import simulate
from planner.weight_search import WeightSearch
from tests.strategies import random_budget, random_graph


def weights_of(graph: Graph, seed: int) -> list_walk.Floats:
    return np.exp(np.random.default_rng(seed).normal(size=len(graph.values)) * 3)


@pytest.mark.parametrize("far", [0.0, 0.5, 1.0, 2.0])
def test_a_complete_walk_fits_its_budget_and_knows_its_time(far: float) -> None:
    complete = 0
    for seed in range(150):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        walk = ListWalk(graph, budget_bytes)
        walked = walk(weights=weights_of(graph, seed), far=far)
        first_runs = list(dict.fromkeys(walked.runs.tolist()))
        assert first_runs == sorted(first_runs)
        if not walk.complete(walked):
            continue
        complete += 1
        trace = simulate(graph, with_frees(graph, walked.runs.tolist()))
        assert trace.peak_bytes <= budget_bytes
        assert trace.time_ns == walked.time_ns == graph.keep_all_time_ns + walked.extra_ns.sum()
    assert complete >= 75


def test_the_compiled_walk_is_the_written_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(graph, random_budget(graph, seed), seed) for seed in range(60) for graph in [random_graph(seed)]]

    def walks() -> list[tuple[list[int], float, int]]:
        found = []
        for graph, budget_bytes, seed in cases:
            hold = [(len(graph.ops) // 2, range(len(graph.values)))]
            walked = ListWalk(graph, budget_bytes)(weights=weights_of(graph, seed), hold=hold, grip=10.0, far=0.5)
            found.append((walked.runs.tolist(), walked.time_ns, walked.reached))
        return found

    compiled = walks()
    monkeypatch.setattr(list_walk, "_walk", list_walk._walk.py_func)
    monkeypatch.setattr(list_walk, "_remake_time", list_walk._remake_time.py_func)
    assert walks() == compiled


def test_what_has_an_infinite_weight_is_never_made_twice() -> None:
    graph = linear_network(12)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    walk = ListWalk(graph, int(0.6 * peak_bytes))
    again = [i for i, count in enumerate(np.bincount(walk().runs)) if count > 1]
    assert again
    for i in again:
        weights = np.ones(len(graph.values))
        weights[list(graph.ops[i].outputs)] = math.inf
        walked = walk(weights=weights)
        assert np.bincount(walked.runs)[i] == 1


def test_a_hold_keeps_values_until_its_op_ran() -> None:
    graph = linear_network(12)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    walk = ListWalk(graph, int(0.6 * peak_bytes))
    last = len(graph.ops) - 1
    again = [i for i, count in enumerate(np.bincount(walk().runs)) if count > 1]
    held = graph.ops[again[0]].outputs
    assert np.bincount(walk(hold=[(last, held)], grip=1e9).runs)[again[0]] == 1


def test_a_search_only_gets_better_and_repeats() -> None:
    graph = random_training(60, seed=0)
    works, _ = smallest_known(graph)
    budget_bytes = (4 * works + simulate(graph, keep_all(graph)).peak_bytes) // 5

    def search() -> list[float]:
        walks = WeightSearch(graph, budget_bytes, seed=3)
        times = [walks.time_ns]
        walks.start()
        times.append(walks.time_ns)
        for _ in range(3):
            walks.improve(20_000)
            times.append(walks.time_ns)
        assert walks.runs is not None
        assert simulate(graph, with_frees(graph, walks.runs.tolist())).time_ns == walks.time_ns
        return times

    times = search()
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[1] < times[0] == math.inf
    assert search() == times
