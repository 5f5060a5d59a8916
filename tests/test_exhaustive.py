"""A* over what is in memory finds what brute force finds, and stops with a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from graphs.ir import Graph
from graphs.synthetic import chain, random_training
from planner import keep_all, plan, simulate, solve
from planner.methods import cutting_stages
from planner.schedule import in_graph_order, with_frees
from planner.stages import events as stage_events
from planner.stages import exhaustive, exhaustive_states
from planner.stages.exhaustive import Exhaustive, Searched, cheapest
from planner.stages.search import StageSearch
from tests.oracles import least_time
from tests.strategies import random_budget, random_graph

COMPILED = (
    "index_of",
    "bytes_of",
    "owed_ns",
    "slot_of",
    "rehash",
    "is_before",
    "push",
    "consider",
    "pop",
    "free_one",
    "run_ops",
    "advance",
)


def deep(layers: int, seed: int, share: float = 0.75) -> tuple[Graph, int]:
    """A random training step, and a budget."""
    graph = random_training(layers, seed)
    return graph, int(share * simulate(graph, keep_all(graph)).peak_bytes)


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
        stopped = cheapest(graph, budget_bytes, looks=10, proves=proved.append)
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


def test_what_is_compiled_does_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(graph, random_budget(graph, seed)) for seed in range(20) for graph in [random_graph(seed, effect=True)]]
    cases += [deep(4, seed) for seed in range(5)]

    def found() -> list[Searched]:
        return [cheapest(graph, budget_bytes, looks=2_000) for graph, budget_bytes in cases]

    compiled = found()
    for name in COMPILED:
        monkeypatch.setattr(exhaustive_states, name, getattr(exhaustive_states, name).py_func)
    with np.errstate(all="raise"):
        assert found() == compiled


def test_it_goes_on_where_it_was_stopped() -> None:
    stopped = 0
    for seed in range(2, 8):
        graph, budget_bytes = deep(8, seed)
        whole, search = cheapest(graph, budget_bytes), Exhaustive(graph, budget_bytes)
        found, bounds = search.go_on(looks=7), [0.0]
        while found.runs is None and math.isfinite(found.bound_ns):
            stopped += 1
            bounds.append(found.bound_ns)
            assert search.bound_ns == found.bound_ns <= whole.bound_ns
            found = search.go_on(looks=53)
        assert found == whole and bounds == sorted(bounds), seed
    assert stopped > 20


def test_room_for_nodes_and_states_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = deep(12, 0)
    found = cheapest(graph, budget_bytes)
    assert found.runs is not None
    monkeypatch.setattr(exhaustive, "ROOM", 2)
    assert cheapest(graph, budget_bytes) == found
    monkeypatch.setattr(exhaustive, "MOST_BYTES", 20_000)
    left = cheapest(graph, budget_bytes)
    assert left.runs is None and graph.keep_all_time_ns <= left.bound_ns <= found.bound_ns


def test_half_of_the_memory_of_a_small_network_is_solved_at_once() -> None:
    """Stage models have left 8 % open there after 20 seconds."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    batch = torch.randn(2048, 256), torch.randint(0, 10, (2048,))
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    found = plan(model, 0.5, inputs=batch, loss=nn.CrossEntropyLoss(), time_limit_s=20.0)
    assert found.status == "OPTIMAL" and found.notes["found_by"] == "A*"
    assert found.overhead is not None and found.overhead > 1.0


@pytest.mark.parametrize("budget_bytes", [3, 4, 5])
def test_years_are_not_infinite(budget_bytes: int) -> None:
    """What counts as never must not be met by a graph whose ops take that long."""
    moments, years = (solve(chain(5, time_ns=time_ns), budget_bytes, gap=0.0, time_limit_s=5.0) for time_ns in (1, 1 << 57))
    assert moments.status == "OPTIMAL" and years.schedule is not None
    assert years.overhead == pytest.approx(moments.overhead)


def test_it_keeps_up_until_something_else_has_proved_twice_as_much() -> None:
    graph, budget_bytes = deep(12, 0)
    search = StageSearch(graph, budget_bytes, 0.0, 60.0, None, seed=0)
    assert not search.exhaustive_keeps_up  # it has not been asked
    cutting_stages._exhaust(search, 20_000, 0.0)
    proved_ns = search.searched_ns - search.base
    assert search.exhaustive_keeps_up and proved_ns > 0
    search.raise_bound(search.base + 2 * proved_ns, restricted=False)
    assert search.exhaustive_keeps_up
    search.raise_bound(search.base + 2 * proved_ns + 1, restricted=False)
    assert not search.exhaustive_keeps_up
