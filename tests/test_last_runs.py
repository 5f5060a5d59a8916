"""What is needed while the last of some ops runs, against brute force, and where it is more than what else is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from graphs.ir import Graph, Op, Value
from graphs.synthetic import chain, random_training
from planner.bounds import least_bytes
from planner.least import last_runs, pebbling
from planner.least.cuts import Cut, MinCuts
from planner.least.last_runs import last_runs_peak
from planner.least.pebbling import least_peak
from planner.methods import cutting_stages
from planner.methods.cutting_stages import solve
from planner.process.clock import now_s
from planner.result import Status
from planner.schedule import keep_all
from planner.simulate import simulate
from tests.oracles import least_budget
from tests.strategies import random_graph
from tests.test_cuts import subsets


def needed(graph: Graph, cuts: MinCuts, ops: tuple[int, ...], last: int) -> int:
    """While the last of some ops runs."""
    touched = {*graph.ops[last].inputs, *graph.ops[last].outputs} - graph.resident
    beside, _ = cuts.cut(set(ops) - {last}, graph.outputs, touched)
    held_bytes = sum(graph.values[x].size_bytes for x in touched)
    return graph.resident_bytes + graph.ops[last].workspace_bytes + held_bytes + beside


def towers(length: int) -> Graph:
    """Two chains with large ops at their beginnings, both of whose ends are outputs."""
    values: list[Value] = []
    ops: list[Op] = []
    ends = []
    for tower in "ab":
        for i in range(length):
            values.append(Value(f"{tower}{i}", 10 + (i + ord(tower)) % 3))
            inputs = (len(values) - 2,) if i else ()
            ops.append(Op(f"{tower}{i}", inputs, (len(values) - 1,), 1, workspace_bytes=100 if 0 < i < length // 2 else 0))
        ends.append(len(values) - 1)
    return Graph("towers", tuple(ops), tuple(values), frozenset(), frozenset(ends))


def test_no_schedule_in_any_order_needs_less() -> None:
    more = 0
    for seed in range(300):
        graph = random_graph(seed, random=seed % 3 == 1, effect=seed % 3 == 2)
        proved = last_runs_peak(graph, 0, math.inf)
        assert proved <= least_budget(graph, keep_order=False), seed
        more += proved > least_bytes(graph)
    assert more >= 10


def test_it_is_the_most_that_any_ops_need_for_their_last_run() -> None:
    higher = 0
    for seed in range(120):
        graph = random_graph(seed, max_ops=7)
        cuts = MinCuts(graph)
        sets = (s for s in subsets(range(len(graph.ops))) if s)
        best = max(min(needed(graph, cuts, ops, last) for last in ops) for ops in sets)
        assert last_runs_peak(graph, 0, math.inf) == best, seed
        higher += best > least_bytes(graph)
    assert higher >= 10


def test_it_is_what_peeling_with_a_cut_for_each_op_comes_to() -> None:
    higher = 0
    for seed in range(10):
        graph = random_training(12, seed=seed)
        cuts, left, level = MinCuts(graph), tuple(range(len(graph.ops))), 0
        while left:
            needs = [needed(graph, cuts, left, op) for op in left]
            level = max(level, min(needs))
            left = tuple(op for op, need in zip(left, needs, strict=True) if need > level)
        assert last_runs_peak(graph, 0, math.inf) == level, seed
        higher += level > least_bytes(graph)
    assert higher >= 5


def test_few_cuts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each op and level would be thousands."""
    cuts = 0
    least = MinCuts.least

    def counted(*args: Any, **options: Any) -> Cut:
        nonlocal cuts
        cuts += 1
        return least(*args, **options)

    monkeypatch.setattr(MinCuts, "least", counted)
    told: list[int] = []
    graph = random_training(100, seed=1)
    last_runs_peak(graph, 0, math.inf, told.append)
    assert len(told) >= 50
    assert len(told) < cuts < len(graph.ops)


def test_the_numbers_of_ops_and_values_say_nothing() -> None:
    graph = random_training(40, seed=3)
    proved = last_runs_peak(graph, 0, math.inf)
    assert proved > least_bytes(graph)
    for seed in range(5):
        assert last_runs_peak(_renumbered(graph, seed), 0, math.inf) == proved


def _renumbered(graph: Graph, seed: int) -> Graph:
    random, ids = Random(seed), list(range(len(graph.values)))
    random.shuffle(ids)
    there, ops, waiting = set(graph.resident), [], list(graph.ops)
    while waiting:
        op = random.choice([op for op in waiting if there.issuperset(op.inputs)])
        waiting.remove(op)
        there.update(op.outputs)
        ops.append(replace(op, inputs=tuple(ids[x] for x in op.inputs), outputs=tuple(ids[x] for x in op.outputs)))
    values = [graph.values[x] for x in sorted(range(len(ids)), key=ids.__getitem__)]
    return Graph(
        "renumbered",
        tuple(ops),
        tuple(values),
        frozenset(ids[x] for x in graph.resident),
        frozenset(ids[x] for x in graph.outputs),
    )


def test_of_two_towers_one_is_there_while_the_other_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest op needs 123 bytes for itself, and there are 10 beside, for what is left of the other tower."""
    graph = towers(30)
    assert least_bytes(graph) == 123
    proved = last_runs_peak(graph, 123, math.inf)
    assert proved == 133 == least_peak(towers(12), states=200)[0] <= simulate(graph, keep_all(graph)).peak_bytes
    told: list[int] = []
    assert least_peak(graph, states=2, proves=told.append)[0] == told[-1] == proved
    with monkeypatch.context() as patch:
        patch.setattr(pebbling, "LAST_RUNS_SHARE", 0)
        assert least_peak(graph, states=200)[0] < proved


def test_a_plan_is_refused_before_any_search_for_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing can be found")

    graph = towers(12)
    for name in ("_first_schedules", "_look_further"):
        monkeypatch.setattr(cutting_stages, name, never)
    refused = solve(graph, 132, time_limit_s=20)
    assert refused.status is Status.INFEASIBLE and refused.notes["least_bytes"] == 133
    assert solve(graph, 133, time_limit_s=20).peak_bytes == 133


def test_what_is_proved_rises_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, known = random_training(40, seed=3), least_bytes(random_training(40, seed=3))
    told: list[int] = []
    proved = last_runs_peak(graph, known, math.inf, told.append)
    assert told == sorted(set(told)) and told[0] > known and told[-1] == proved
    assert last_runs_peak(graph, proved + 1, math.inf, told.append) == proved + 1 != told[-1]
    assert last_runs_peak(graph, known, now_s()) == known
    reached = set()
    for looks in range(1, 200):
        monkeypatch.setattr(last_runs, "now_s", itertools.count().__next__)
        reached.add(last_runs_peak(graph, known, looks))
    assert {known, proved} < reached and max(reached) == proved
    monkeypatch.setattr(last_runs, "now_s", now_s)
    monkeypatch.setattr(last_runs, "IDLE", 3)
    assert known < last_runs_peak(graph, known, math.inf) < proved


def test_larger_steps_prove_hardly_less(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(40, seed=3)
    graph = replace(graph, values=tuple(Value(v.name, v.size_bytes << 20) for v in graph.values))
    bounds = []
    for step in (1 << 62, 10_000, 100):
        monkeypatch.setattr(last_runs, "STEP", step)
        bounds.append(last_runs_peak(graph, 0, math.inf))
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] >= bounds[0] - bounds[0] // 100


@pytest.mark.parametrize(
    "graph",
    [
        Graph("none", (), (Value("r", 3),), frozenset({0}), frozenset({0})),
        Graph("no outputs", (Op("op", (), (0,), 1),), (Value("x", 3),), frozenset(), frozenset()),
        chain(1),
    ],
    ids=lambda graph: graph.name,
)
def test_graphs_with_next_to_nothing(graph: Graph) -> None:
    assert last_runs_peak(graph, 0, math.inf) in (0, least_bytes(graph))


def test_a_budget_below_is_infeasible() -> None:
    plan = solve(towers(30), 132, time_limit_s=10)
    assert plan.status is Status.INFEASIBLE
    assert plan.notes["least_bytes"] == 133
