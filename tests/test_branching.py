"""Branch and bound on relaxations: bounds hold, and are far above the relaxation's where a few large values decide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from random import Random

import pytest

from graphs import Graph
from graphs.capture import capture
from graphs.synthetic import random_training
from graphs.workloads import build
from planner import keep_all, simulate
from planner.on_demand import sat_minimise
from planner.plan import with_costs
from planner.process.clock import now_s
from planner.solvers.milp import Answer, Left, Outcome
from planner.stages import solving
from planner.stages.branching import Branching, Told
from planner.stages.events import tightest
from planner.stages.model import Event, StageModel, stage_model, with_end
from planner.stages.search import StageSearch


def branching_of(model: StageModel, told: Told | None = None) -> Branching:
    return Branching(model, [], Left(), {} if told is None else told)


def go_on(branching: Branching, solves: int, cutoff: float = math.inf) -> None:
    branching.go_on(solves, cutoff=cutoff, deadline=now_s() + 60.0)


def models(count: int) -> Iterator[StageModel]:
    """Of random training steps: the tightest op, and two ops in a row with the last re-run of another one between them."""
    rng = Random(0)
    for seed in range(count):
        graph = random_training(5 + seed % 4, seed)
        budget_bytes = int((0.4 + 0.1 * (seed % 3)) * simulate(graph, keep_all(graph)).peak_bytes)
        t = rng.randrange(len(graph.ops) // 2, len(graph.ops))
        events = {tightest(graph), Event(t - 1), Event(t - 0.5, rng.randrange(t), float(t)), Event(t)}
        yield stage_model(with_end(graph), budget_bytes, sorted(events))


def test_bounds_are_between_the_relaxation_and_the_optimum() -> None:
    exact = raised = 0
    for model in models(250):
        optimum = sat_minimise()(model.milp, time_limit_s=20)
        if optimum.outcome is Outcome.INFEASIBLE:
            continue
        relaxed = model.milp.relax(time_limit_s=20)
        branching, last = branching_of(model), -math.inf
        for solves in (1, 10, 100):
            go_on(branching, solves)
            bound = branching.answer.bound
            assert max(last, relaxed.bound - 1e-6) <= bound <= optimum.cost + 1e-6
            last = bound
        raised += last > relaxed.bound + 1e-6
        exact += last > optimum.cost - 1e-3
        values = branching.answer.values
        assert values is not None and all(-1e-6 <= x <= 1 + 1e-6 for x in values)
    assert raised > 10 and exact > 10


def test_a_model_without_a_solution_has_no_node_left() -> None:
    graph = random_training(8, 2)
    model = stage_model(with_end(graph), max(value.size_bytes for value in graph.values), [tightest(graph)])
    assert model.milp.minimise(time_limit_s=10).outcome is Outcome.INFEASIBLE
    branching = branching_of(model)
    go_on(branching, 10)
    assert branching.answer.values is None and branching.answer.outcome is not Outcome.SOLVED


@cache
def small_resnet() -> Graph:
    """131 ops. At 0.4 of its peak the gradients fit beside the ops of its first block, and nothing else does."""
    model, inputs, loss = build("resnet50", depth=14, device="meta")
    return with_costs(capture(model, inputs, loss=loss), "roofline").graph


def test_a_few_large_values_decide() -> None:
    """What the first block's last activation is when its gradient is made: kept, or made again, with room for nothing else."""
    graph = small_resnet()
    budget_bytes = int(0.4 * simulate(graph, keep_all(graph)).peak_bytes)
    at = next(i for i, op in enumerate(graph.ops) if op.name == "threshold_backward_9")
    add = next(i for i, op in enumerate(graph.ops) if op.name == "add_5")
    events = [Event(at - 1), Event(at - 0.5, add, float(at)), Event(at)]

    def overhead(bound_ns: int | None) -> float:
        assert bound_ns is not None
        return bound_ns / graph.keep_all_time_ns - 1

    model = stage_model(with_end(graph), budget_bytes, events, tiny_share=1e-3)
    assert overhead(model.bound_ns(model.milp.relax(time_limit_s=20))) < 0.15
    told: Told = {}
    branching = branching_of(model, told)
    go_on(branching, 100)
    assert overhead(model.bound_ns(branching.answer)) > 0.45 and told

    # It repeats; and as more is told which variables matter, no fewer relaxations come as far.
    again = branching_of(stage_model(with_end(graph), budget_bytes, events, tiny_share=1e-3))
    go_on(again, 100)
    assert again.answer == branching.answer


def test_it_stops_at_the_cutoff_and_where_nobody_waits() -> None:
    graph = small_resnet()
    budget_bytes = int(0.4 * simulate(graph, keep_all(graph)).peak_bytes)
    model = stage_model(with_end(graph), budget_bytes, [tightest(graph)], tiny_share=1e-3)
    branching = branching_of(model)
    go_on(branching, 1)
    root = branching.answer.bound
    go_on(branching, 1_000, cutoff=root * 1.001)
    assert root * 1.001 <= branching.answer.bound and branching.solves < 200
    left = Left()
    left.set()
    stopped = Branching(model, [], left, {})
    stopped.go_on(50, cutoff=math.inf, deadline=now_s() + 60.0)
    assert stopped.solves <= 1 and stopped.answer.bound == -math.inf


def test_a_round_takes_the_lowest_node_where_that_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_resnet()
    budget_bytes = int(0.4 * simulate(graph, keep_all(graph)).peak_bytes)
    at = next(i for i, op in enumerate(graph.ops) if op.name == "threshold_backward_9")
    add = next(i for i, op in enumerate(graph.ops) if op.name == "add_5")

    monkeypatch.setattr(solving, "BRANCH_SOLVES", 60)

    def round_of(share: float) -> tuple[StageSearch, Answer | None]:
        search = StageSearch(graph, budget_bytes, gap=0.001, time_limit_s=60.0, seed=0)
        search.time_ns = int(1.633 * search.base)  # of the best schedule known
        search.raise_bound(int(1.137 * search.base), restricted=False)  # what the relaxation of these events proves
        monkeypatch.setattr(solving, "BRANCH_RISE", share)
        events = [Event(at - 1), Event(at - 0.5, add, float(at)), Event(at)]
        model = stage_model(with_end(graph), budget_bytes, events, tiny_share=1e-3)
        answer, rows = solving.solve_branching(search, model, [], range(len(graph.ops)), aim=0.001)
        assert (len(rows) > 0) == (answer is not None) == search.branches
        return search, answer

    search, answer = round_of(0.02)
    assert answer is not None and answer.values is not None and search.bound_ns > 1.45 * search.base
    given_up, nothing = round_of(1.1)  # more than there is to the best schedule
    assert nothing is None and given_up.bound_ns > 1.137 * search.base  # what was proved counts all the same
