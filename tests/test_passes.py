"""Schedules in several passes, for budgets in which not all gradients fit beside what makes them."""

from __future__ import annotations

import pytest

from planner.methods import cutting_stages
from planner.methods.cutting_stages import solve
from planner.process.clock import now_s
from planner.result import Status
from planner.schedule import in_graph_order, keep_all, with_frees
from planner.simulate import simulate
from planner.stages.passes import in_passes
from planner.stages.search import StageSearch
from tests.oracles import least_budget
from tests.strategies import random_graph
from tests.test_second_passes import narrowing


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_they_fit_and_make_late_gradients_in_a_pass_of_their_own(share: float) -> None:
    graph = narrowing(16)
    budget_bytes = int(share * simulate(graph, keep_all(graph)).peak_bytes)
    found = list(in_passes(graph, budget_bytes, deadline=now_s() + 30))
    assert found
    for runs in found:
        trace = simulate(graph, with_frees(graph, runs))
        assert trace.peak_bytes <= budget_bytes and set(runs) == set(range(len(graph.ops)))
        assert trace.time_ns > graph.keep_all_time_ns
    assert any(not in_graph_order(runs) for runs in found)


def test_what_acts_on_the_world_runs_once() -> None:
    for effect in (2, 9):
        graph = narrowing(16, effect=effect)
        budget_bytes = int(0.9 * simulate(graph, keep_all(graph)).peak_bytes)
        found = list(in_passes(graph, budget_bytes, deadline=now_s() + 30))
        assert found and all(runs.count(effect) == 1 for runs in found)


def test_on_random_graphs_they_are_valid() -> None:
    tried = 0
    for seed in range(300):
        graph = random_graph(seed, max_ops=9, random=seed % 2 == 0, effect=seed % 3 == 0)
        whole, least = simulate(graph, keep_all(graph)).peak_bytes, least_budget(graph, keep_order=False) if seed < 60 else 0
        for budget_bytes in {whole - 1, (whole + least) // 2, least}:
            for runs in in_passes(graph, budget_bytes, deadline=now_s() + 5):
                tried += 1
                assert simulate(graph, with_frees(graph, runs)).peak_bytes <= budget_bytes, (seed, budget_bytes)
    assert tried >= 20


def test_there_are_none_where_one_pass_will_do_and_none_after_the_deadline() -> None:
    graph = narrowing(16)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    assert not list(in_passes(graph, 2 * peak_bytes, deadline=now_s() + 30))
    assert not list(in_passes(graph, int(0.8 * peak_bytes), deadline=now_s()))


def test_a_plan_leaves_graph_order_where_passes_are_cheaper_than_anything_in_it() -> None:
    graph = narrowing(30)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    found = solve(graph, budget_bytes, time_limit_s=30)
    assert found.time_ns is not None and found.time_ns < found.notes["order_bound_ns"]
    assert found.notes["order"] == "first executions are not in graph order"
    assert found.status is Status.OPTIMAL and found.bound_ns == found.any_order_bound_ns
    assert solve(graph, budget_bytes, time_limit_s=30).schedule == found.schedule


@pytest.mark.parametrize("layers", [12, 20, 30])
def test_what_passes_have_found_is_not_lost_where_the_search_is_interrupted(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = narrowing(layers)
    budget_bytes = int(0.66 * simulate(graph, keep_all(graph)).peak_bytes)
    walk_in_passes, in_hand = cutting_stages._walk_in_passes, []

    def interrupted(search: StageSearch) -> None:
        walk_in_passes(search)
        assert search.passes is not None and search.time_ns is not None
        in_hand.append((search.passes[0].time_ns, search.time_ns))
        raise KeyboardInterrupt

    monkeypatch.setattr(cutting_stages, "_walk_in_passes", interrupted)
    found = solve(graph, budget_bytes, time_limit_s=20)
    ((passes_ns, order_ns),) = in_hand
    assert passes_ns < order_ns and found.interrupted
    assert found.time_ns == passes_ns and found.bound_ns == found.any_order_bound_ns


def test_a_proof_in_graph_order_is_none_against_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = narrowing(30)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)

    def close(search: StageSearch) -> None:
        if not search.nested:
            search.raise_bound(search.time_ns, restricted=False)

    monkeypatch.setattr(cutting_stages, "shorten", close)
    found = solve(graph, budget_bytes, time_limit_s=30)
    assert found.time_ns is not None and found.time_ns < found.notes["order_bound_ns"]
