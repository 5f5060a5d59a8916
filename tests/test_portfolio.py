"""The best of all online rules: which one won, and its plan."""

from __future__ import annotations

import pytest

from graphs.errors import InfeasibleBudget, InputError
from graphs.ir import Graph
from graphs.synthetic import random_training
from online import HEURISTICS, best_run, run
from planner.bounds import least_bytes
from planner.result import Status
from planner.schedule import keep_all
from planner.simulate import simulate


def between(graph: Graph, share: float) -> int:
    """A budget between the least that any schedule needs and the keep-all peak."""
    low = least_bytes(graph)
    return int(low + share * (simulate(graph, keep_all(graph)).peak_bytes - low))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_is_the_least_of_each(seed: int) -> None:
    graph = random_training(14, seed)
    budget_bytes = between(graph, 0.6)
    alone = {rule: run(graph, budget_bytes, heuristic=rule) for rule in HEURISTICS}
    found = best_run(graph, budget_bytes)
    times = {rule: run_.time_ns for rule, run_ in alone.items() if run_.time_ns is not None}
    assert times
    plan = found.plan()
    assert plan.method == "online:best"
    assert plan.time_ns == min(times.values())
    assert plan.notes["rule"] == min(times, key=lambda rule: times[rule])  # the first of equals
    assert {rule: time for rule, time in plan.notes["rules"].items() if not isinstance(time, str)} == times
    assert found.best is not None and found.best.schedule == plan.schedule
    assert plan.wall_s >= found.best.wall_s
    assert found.row()["time_ns"] == plan.time_ns
    assert found.row()["status"] == "FEASIBLE"


def test_rules_can_differ_in_who_wins() -> None:
    winners = set()
    for seed in range(12):
        graph = random_training(14, seed)
        plan = best_run(graph, between(graph, 0.5), rules=("lru", "size", "dtr+reclaim")).plan()
        winners.add(plan.notes["rule"])
    assert len(winners - {None}) > 1


def test_nothing_completed_is_unknown_and_says_why() -> None:
    graph = random_training(14, 0)
    found = best_run(graph, least_bytes(graph), rules=("lru", "size"))
    assert found.best is None
    plan = found.plan()
    assert plan.status is Status.UNKNOWN
    assert plan.notes["rule"] is None
    assert set(plan.notes["rules"]) == {"lru", "size"}
    assert all(why in ("OUT_OF_MEMORY", "THRASHED") for why in plan.notes["rules"].values())


def test_bad_input() -> None:
    graph = random_training(5, 0)
    with pytest.raises(InfeasibleBudget):
        best_run(graph, least_bytes(graph) - 1)
    with pytest.raises(InputError, match="rules"):
        best_run(graph, 0.9, rules="dtr")
    with pytest.raises(InputError, match="rules"):
        best_run(graph, 0.9, rules=())
    for none in (iter(()), 5, None):
        with pytest.raises(InputError, match="rules must be one or more names"):
            best_run(graph, 0.9, rules=none)  # type: ignore[arg-type]
    assert len(best_run(graph, 0.9, rules=iter(("lru", "size"))).runs) == 2  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nonsense"):
        best_run(graph, 0.9, rules=("nonsense",))
