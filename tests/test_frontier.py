"""Many budgets at once are monotone; the smallest budget is between what is proved and what works."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from graphs.errors import InfeasibleBudget, InputError
from graphs.synthetic import Layered, chain, random_layered, random_training
from planner import min_budget, plan, plans, solve
from planner.bounds import least_bytes
from planner.least.smallest import smallest_known
from planner.result import Plan, Status
from planner.schedule import keep_all
from planner.simulate import simulate
from tests.interruption import interrupted


@pytest.mark.parametrize("layers", [4, 8])
def test_a_chain_runs_in_as_little_as_pebbling_says(layers: int) -> None:
    graph = chain(layers)
    found = min_budget(graph, time_limit_s=10)
    assert found.proved_bytes == found.works_bytes == simulate(graph, found.schedule).peak_bytes


def test_the_smallest_budget_works_and_less_than_proved_does_not() -> None:
    graph = random_training(10, seed=3)
    found = min_budget(graph, time_limit_s=10)
    assert least_bytes(graph) <= found.proved_bytes <= found.works_bytes <= simulate(graph, keep_all(graph)).peak_bytes
    assert simulate(graph, found.schedule).peak_bytes == found.works_bytes


def test_looking_for_what_works_keeps_a_limit_in_large_graphs() -> None:
    graph = random_layered(Layered(5000, 0.3), seed=1)  # a full search takes more than ten seconds
    keep_all_bytes = simulate(graph, keep_all(graph)).peak_bytes
    smallest_known(chain(3))  # loads what is compiled

    began = time.process_time()
    works, schedule = smallest_known(graph, time_limit_s=0.2)
    assert time.process_time() - began < 3
    assert least_bytes(graph) <= works == simulate(graph, schedule).peak_bytes <= keep_all_bytes
    assert smallest_known(graph, time_limit_s=0)[0] == keep_all_bytes

    began = time.process_time()
    with pytest.raises(InfeasibleBudget, match="smallest budget known to work") as refused:
        plan(graph, 1, time_limit_s=0.2)
    assert refused.value.proved_bytes == least_bytes(graph) <= refused.value.works_bytes <= keep_all_bytes
    found = min_budget(graph, time_limit_s=1)
    assert time.process_time() - began < 5
    assert least_bytes(graph) <= found.proved_bytes <= found.works_bytes == simulate(graph, found.schedule).peak_bytes


@pytest.mark.parametrize("after_s", [1.0, 3.0])
def test_interrupting_min_budget_returns_the_best_so_far(after_s: float) -> None:
    script = (
        "from graphs.synthetic import Layered, chain, random_layered\n"
        "from planner import keep_all, min_budget, simulate\nfrom planner.bounds import least_bytes\n"
        "from planner.least.smallest import smallest_known\n"
        "graph = random_layered(Layered(5000, 0.3), seed=1)\nsmallest_known(chain(3))\nprint('ready', flush=True)\n"
        "found = min_budget(graph, time_limit_s=100)\n"
        "works = found.works_bytes == simulate(graph, found.schedule).peak_bytes\n"
        "print(found.interrupted, works, least_bytes(graph) <= found.proved_bytes <= found.works_bytes)\n"
    )
    assert interrupted(script, after_s=after_s) == "True True True"


def test_plans_are_monotone_in_time_and_bound_and_come_in_the_order_asked_for() -> None:
    graph = random_training(16, seed=5)
    shares = [0.6, 1.0, 0.7, 0.8, 0.75, 0.9, 0.01]
    told: list[Plan] = []
    found = plans(graph, shares, time_limit_s=2, done=told.append)
    assert [plan.budget_bytes for plan in told] == sorted(plan.budget_bytes for plan in found)
    assert found[-1].status is Status.INFEASIBLE
    solved = sorted((plan for plan in found if plan.time_ns is not None), key=lambda plan: plan.budget_bytes)
    assert len(solved) >= 5
    times, bounds = [plan.time_ns for plan in solved], [plan.bound_ns for plan in solved]
    assert times == sorted(times, key=lambda t: -(t or 0))
    assert bounds == sorted(bounds, key=lambda b: -(b or 0))
    for one in solved:
        assert one.schedule is not None and simulate(graph, one.schedule).peak_bytes <= one.budget_bytes
    assert found[1].time_ns == graph.keep_all_time_ns


def test_a_budget_without_a_schedule_has_the_bound_of_larger_ones() -> None:
    graph = chain(4)
    too_small, small = plans(graph, [1, 4], gap=0.0, time_limit_s=5)
    assert too_small.schedule is None and too_small.bound_ns is not None and small.bound_ns is not None
    assert too_small.bound_ns >= small.bound_ns > graph.keep_all_time_ns


def test_interrupting_plans_leaves_a_plan_for_every_budget_and_says_so() -> None:
    script = (
        "from graphs.synthetic import random_training\nfrom planner import plans\n"
        "from planner.least.smallest import smallest_known\n"
        "graph, shares = random_training(24, seed=1), [0.5, 0.6, 0.7, 0.8, 1.0]\n"
        "smallest_known(graph)\nprint('ready', flush=True)\n"
        "found = plans(graph, shares, gap=0.0, time_limit_s=8)\n"
        "stopped = [plan.notes.get('stopped') for plan in found]\n"
        "print(len(found), stopped[0], 'time limit' in stopped, found[-1].overhead)\n"
    )
    assert interrupted(script, after_s=1.5) == "5 interrupted False 0.0"


def test_plans_wants_a_budget() -> None:
    with pytest.raises(InputError, match="at least one budget"):
        plans(chain(3), [])
    with pytest.raises(InputError, match="a list of budgets, not None"):
        plans(chain(3), None)  # type: ignore[arg-type]
    assert [one.budget_bytes for one in plans(chain(3), "3B")] == [3]
    assert [one.budget_bytes for one in plans(chain(3), np.int64(3))] == [3]
    for whole in (1.0, np.float32(1), [np.float32(1)], np.ones(1, np.float32)):
        assert [one.budget_bytes for one in plans(chain(3), whole)] == [5]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="budget True: give bytes"):
        plans(chain(3), True)


def test_min_budget_wants_a_graph_and_a_share() -> None:
    with pytest.raises(InputError, match=r"min_budget takes a captured Step or a Graph, not a list"):
        min_budget([])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="progress must be a function or None, not 5"):
        min_budget(chain(3), progress=5)  # type: ignore[arg-type]
    for within in (-0.1, 1.0, math.nan, "1 %", None):
        with pytest.raises(InputError, match="within must be at least 0 and below 1"):
            min_budget(chain(3), within=within)  # type: ignore[arg-type]


def test_interrupted_between_two_budgets_it_keeps_the_plans_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def interrupted_once(*arguments: Any, **options: Any) -> Plan:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return solve(*arguments, **options)

    monkeypatch.setattr("planner.frontier.solve", interrupted_once)
    found = plans(chain(8), [6, 7, 8], method="chen_greedy")
    assert len(found) == 3 and calls == 4
    assert found[0].time_ns is not None and all(one.time_ns is not None and one.time_ns <= found[0].time_ns for one in found)
