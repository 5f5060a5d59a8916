"""Bounds on schedules in any order of first executions, against brute force over all of them."""

from __future__ import annotations

import itertools
import math

import pytest

from graphs.ir import Graph, Op, Value
from planner.methods.cutting_stages import solve
from planner.result import Status
from planner.schedule import keep_all
from planner.simulate import simulate
from planner.stages.any_order import any_order_model, in_a_row
from planner.stages.model import with_end
from tests.oracles import least_time
from tests.strategies import random_budget, random_graph


def proved(graph: Graph, budget_bytes: int, events: list[int], *, whole: bool = True) -> float:
    """What a model with these events proves, by its optimum or (not ``whole``) its relaxation; infinite if it has no solution."""
    model = any_order_model(with_end(graph), budget_bytes, events)
    answer = model.milp.minimise(time_limit_s=10) if whole else model.milp.relax(time_limit_s=10)
    bound_ns = model.bound_ns(answer)
    return math.inf if bound_ns is None else bound_ns


def rows_of(graph: Graph) -> list[list[int]]:
    """All sets of up to three ops that come one after the other in every order."""
    ops = range(len(graph.ops))
    sets = (list(row) for n in (1, 2, 3) for row in itertools.combinations(ops, n))
    return [row for row in sets if in_a_row(graph, row) == row]


def test_no_events_prove_more_than_the_optimum_of_all_orders() -> None:
    tried = attained = beyond = 0
    for seed in range(250):
        graph = random_graph(seed, max_ops=6, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed, keep_order=False)
        best = least_time(graph, budget_bytes, keep_order=False)
        if best is None or best[0] == graph.keep_all_time_ns:
            continue
        tried += 1
        bounds = [proved(graph, budget_bytes, row) for row in rows_of(graph)]
        assert max(bounds) <= best[0], seed
        beyond += max(bounds) > graph.keep_all_time_ns
        attained += max(bounds) == best[0]
        for t in range(len(graph.ops)):
            assert proved(graph, budget_bytes, [t], whole=False) <= best[0], (seed, t)
    assert tried >= 60 and beyond >= 0.8 * tried and attained >= 0.5 * tried


def test_no_plan_claims_more_of_all_orders_than_brute_force_finds() -> None:
    bites = 0
    for seed in range(400, 520):
        graph = random_graph(seed, max_ops=6, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed, keep_order=seed % 2 == 0)
        best = least_time(graph, budget_bytes, keep_order=False)
        found = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
        if best is None:
            assert found.schedule is None, seed
            continue
        assert found.status is not Status.INFEASIBLE and found.any_order_bound_ns is not None, seed
        assert found.any_order_bound_ns <= best[0], seed
        assert found.bound_ns is not None and found.any_order_bound_ns <= found.bound_ns, seed
        bites += found.any_order_bound_ns > graph.keep_all_time_ns
    assert bites >= 30


def test_more_events_prove_no_less() -> None:
    for seed in range(60):
        graph = random_graph(seed, max_ops=6)
        budget_bytes = random_budget(graph, seed, keep_order=False)
        for row in rows_of(graph):
            if len(row) == 3:
                whole = proved(graph, budget_bytes, row)
                assert all(proved(graph, budget_bytes, list(some)) <= whole for some in itertools.combinations(row, 2)), (
                    seed,
                    row,
                )


def two_towers() -> Graph:
    """Two chains that nobody has to run in turns: a small and a large value each, and outputs of both."""
    values = tuple(Value(name, size) for name, size in (("a", 2), ("b", 6), ("c", 1), ("d", 2), ("e", 6), ("f", 1), ("end", 0)))
    ops = (
        Op("a", (), (0,), 5),
        Op("b", (0,), (1,), 1),
        Op("d", (), (3,), 5),
        Op("e", (3,), (4,), 1),
        Op("c", (0, 1), (2,), 1, backward=True),
        Op("f", (3, 4), (5,), 1, backward=True),
        Op("end", (2, 5), (6,), 1, backward=True),
    )
    return Graph("towers", ops, values, frozenset(), frozenset({2, 5, 6}))


def test_what_graph_order_costs_is_not_taken_for_what_all_orders_do() -> None:
    """In graph order both large values are there before either is read; one tower after the other needs nothing again."""
    graph = two_towers()
    in_order, free = (least_time(graph, 11, keep_order=kept) for kept in (True, False))
    assert in_order is not None and free is not None
    assert in_order[0] > free[0] == graph.keep_all_time_ns
    found = solve(graph, 11, gap=0.0)
    assert found.any_order_bound_ns == graph.keep_all_time_ns
    assert found.time_ns == found.bound_ns == in_order[0] and found.status is Status.OPTIMAL
    assert found.gap == 0.0 and found.any_order_gap == pytest.approx(1 - free[0] / in_order[0])
    assert solve(graph, 11, gap=0.0, any_order=True).time_ns == free[0]


def test_ops_that_may_wait_are_not_paid_for_twice() -> None:
    """A gradient of weights is made at once or later; with an event in between, its one run is in either stage."""
    values = tuple(Value(name, size) for name, size in (("x", 4), ("y", 1), ("w", 4), ("g", 1)))
    ops = (
        Op("x", (), (0,), 3),
        Op("y", (0,), (1,), 1),
        Op("w", (0, 1), (2,), 1, backward=True),
        Op("g", (1,), (3,), 1, backward=True),
    )
    graph = Graph("waits", ops, values, frozenset(), frozenset({2, 3}))
    for budget_bytes in range(9, 16):
        best = least_time(graph, budget_bytes, keep_order=False)
        assert best is not None and best[0] == graph.keep_all_time_ns == 6
        assert all(proved(graph, budget_bytes, [t]) == 6 for t in range(4)), budget_bytes


def test_events_are_in_a_row_only_where_each_needs_the_one_before() -> None:
    graph = two_towers()
    assert in_a_row(graph, [0, 1, 4, 6]) == [0, 1, 4, 6]
    assert in_a_row(graph, [4, 2, 0, 5]) == [0, 4]
    assert in_a_row(graph, [6, 3, 3]) == [3, 6]


def test_plans_of_a_chain_are_proved_for_all_orders() -> None:
    """A chain has one order, so what holds in graph order holds in all."""
    layers = 12
    values = tuple(Value(f"v{i}", 4 if i < layers else 2) for i in range(2 * layers))
    forward = [Op(f"f{i}", (i - 1,) if i else (), (i,), 3) for i in range(layers)]
    back = [
        Op(f"b{i}", ((layers - 1 - i), *((layers + i - 1,) if i else ())), (layers + i,), 3, backward=True) for i in range(layers)
    ]
    graph = Graph("chain", (*forward, *back), values, frozenset(), frozenset({2 * layers - 1}))
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    found = solve(graph, int(0.7 * peak_bytes), gap=0.0)
    assert found.status is Status.OPTIMAL and found.overhead is not None and found.overhead > 0
    assert found.any_order_bound_ns == found.time_ns


def test_a_budget_that_keeps_all_is_proved_for_all_orders() -> None:
    graph = two_towers()
    found = solve(graph, 100)
    assert found.any_order_bound_ns == found.bound_ns == found.time_ns == graph.keep_all_time_ns
