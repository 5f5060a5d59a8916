"""A* over what is in memory finds what brute force finds, and stops with a bound."""

from __future__ import annotations

import math

import pytest

from graphs.synthetic import random_training
from planner import keep_all, simulate, solve
from planner.methods import cutting_stages
from planner.schedule import in_graph_order, with_frees
from planner.stages import events as stage_events
from planner.stages.exhaustive import cheapest
from tests.oracles import least_time
from tests.strategies import random_budget, random_graph


@pytest.mark.parametrize("effect", [False, True])
def test_it_is_the_optimum_in_graph_order(effect: bool) -> None:
    fitting = 0
    for seed in range(200):
        graph = random_graph(seed, effect=effect)
        budget_bytes = random_budget(graph, seed)
        best, found = least_time(graph, budget_bytes, keep_order=True), cheapest(graph, budget_bytes)
        assert (found.runs is None) == (best is None) == math.isinf(found.bound_ns), seed
        if best is not None and found.runs is not None:
            trace = simulate(graph, with_frees(graph, found.runs))
            assert trace.time_ns == best[0] == found.bound_ns, seed
            assert trace.peak_bytes <= budget_bytes and in_graph_order(found.runs), seed
            fitting += best[0] > graph.keep_all_time_ns
    assert fitting >= 10


def test_where_nothing_is_cheaper_the_bound_says_so() -> None:
    checked = 0
    for seed in range(40):
        graph = random_training(4, seed)
        budget_bytes = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)
        best = least_time(graph, budget_bytes, keep_order=True)
        if best is None or best[0] == graph.keep_all_time_ns:
            continue
        assert cheapest(graph, budget_bytes, below_ns=best[0]).bound_ns == best[0]
        assert cheapest(graph, budget_bytes, below_ns=best[0] + 1).bound_ns == best[0]
        proved: list[int] = []
        stopped = cheapest(graph, budget_bytes, states=10, proves=proved.append)
        assert stopped.runs is None and graph.keep_all_time_ns <= stopped.bound_ns <= best[0]
        assert proved == sorted(set(proved)) and (not proved or proved[-1] == stopped.bound_ns)
        checked += 1
    assert checked >= 5


def test_a_small_graph_is_closed_by_either_of_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(4, 36)  # much memory is needed by re-runs between two first executions
    budget_bytes = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)
    best = least_time(graph, budget_bytes, keep_order=True)
    assert best is not None

    def bound_ns(time_limit_s: float) -> int | None:
        found = solve(graph, budget_bytes, gap=0.0, time_limit_s=time_limit_s)
        assert found.time_ns == best[0] or found.bound_ns != best[0]
        return found.bound_ns

    with monkeypatch.context() as without_events:
        without_events.setattr(stage_events, "_before", lambda *_: None)
        assert bound_ns(20.0) == best[0]
    monkeypatch.setattr(cutting_stages, "SMALL_OPS", 0)
    assert bound_ns(20.0) == best[0]
    monkeypatch.setattr(stage_events, "_before", lambda *_: None)
    left_ns = bound_ns(1.0)
    assert left_ns is not None and left_ns < best[0]
