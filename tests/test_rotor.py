"""Rotor: against every persistent schedule, brute force, published optima; refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from graphs import Graph, InputError, Op, Value
from graphs.synthetic import chain, linear_network, random_training
from planner import Status, keep_all, simulate, solve
from planner.chains.chain import Stage, chain_of_ops
from planner.chains.chain_dp import ChainProgram, Tables, Way
from planner.methods.rockmate import solve as rockmate
from planner.methods.rotor import solve as rotor
from planner.process.clock import now_s
from planner.process.pauses import rare_collections
from planner.schedule import with_frees
from tests.chains import random_chain
from tests.clock import stopwatch
from tests.oracles import least_budget, least_time

UNIT_CHAIN = [(3, 45), (4, 26), (5, 22), (6, 21), (7, 20), (8, 19), (9, 18), (10, 17)]  # budget, runs: 8 layers


@pytest.mark.parametrize(("budget", "runs"), UNIT_CHAIN)
def test_unit_chain_of_eight_layers(budget: int, runs: int) -> None:
    found = solve(chain(8), budget, method="rotor")
    assert found.time_ns == runs == found.notes["persistent_bound_ns"]
    assert found.bound_ns == 17
    assert found.status is (Status.OPTIMAL if runs == 17 else Status.FEASIBLE)


@pytest.mark.parametrize("build", [chain, linear_network])
@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_unit_chains_against_brute_force(build: object, layers: int) -> None:
    """On chains of equal layers keeping a checkpoint until its backward op costs nothing: the spaces coincide."""
    graph = chain(layers) if build is chain else linear_network(layers)
    for budget in range(2, layers + 4):
        best = least_time(graph, budget, keep_order=False)
        assert rotor(graph, budget).time_ns == (best and best[0]), budget


def persistent(graph: Graph) -> Iterator[list[int]]:
    """Every persistent schedule of a chain, as its sequence of ops, by the definition."""
    stages = chain_of_ops(graph).stages
    last = len(stages) - 1

    def reads(stage: Stage) -> bool:
        made = {v for i in stage.forward for v in graph.ops[i].outputs}
        return any(made & set(graph.ops[i].inputs) for i in stage.backward)

    def forward(low: int, high: int) -> tuple[int, ...]:
        return tuple(i for stage in stages[low:high] for i in stage.forward)

    @cache
    def schedules(low: int, high: int) -> tuple[tuple[int, ...], ...]:
        if low == high:
            again = forward(low, low + 1) if low == last or reads(stages[low]) else ()
            return (again + stages[low].backward,)
        found = [forward(low, low + 1) + inner + stages[low].backward for inner in schedules(low + 1, high)]
        for k in range(low + 1, high + 1):
            found += [forward(low, k) + tail + head for tail in schedules(k, high) for head in schedules(low, k - 1)]
        return tuple(dict.fromkeys(found))

    yield from map(list, schedules(0, last))


@pytest.mark.parametrize("seed", range(60))
def test_least_of_all_persistent_schedules(seed: int) -> None:
    """With nothing rounded, the dynamic program finds what listing every persistent schedule finds."""
    graph = random_chain(2 + seed % 3, seed, plain=seed % 2 == 0)
    measured = [simulate(graph, with_frees(graph, ops)) for ops in persistent(graph)]
    peaks = sorted({trace.peak_bytes for trace in measured})
    for budget in {bytes_ + more for bytes_ in peaks for more in (-1, 0)}:
        best = min((trace.time_ns for trace in measured if trace.peak_bytes <= budget), default=None)
        assert rotor(graph, budget).time_ns == best, budget


def test_never_below_brute_force_and_often_equal() -> None:
    """Brute force also drops a saved value and makes it again, which persistent schedules do not: there it can be cheaper."""
    equal = cases = 0
    for seed in range(40):
        graph = random_chain(2 + seed % 2, seed, plain=seed % 4 == 0)
        low, high = least_budget(graph, keep_order=True), simulate(graph, keep_all(graph)).peak_bytes
        for budget in range(low, high + 1):
            best = least_time(graph, budget, keep_order=True)
            found = rotor(graph, budget)
            assert best is not None and found.status is not Status.INFEASIBLE
            if found.time_ns is not None:
                assert found.time_ns >= best[0] >= (found.bound_ns or 0)
                equal += found.time_ns == best[0]
            cases += 1
    assert cases > 100 and equal > 0.6 * cases


def test_never_below_the_bound_of_cutting_stages() -> None:
    closer = 0
    for seed in range(8):
        graph = random_chain(8, seed, plain=seed % 2 == 0)
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.6, 0.75, 0.9):
            ours = solve(graph, int(share * peak), gap=0.0, time_limit_s=1)
            found = rotor(graph, int(share * peak))
            if found.time_ns is not None:
                assert ours.bound_ns is not None and found.time_ns >= ours.bound_ns
                assert ours.status is not Status.INFEASIBLE
                closer += ours.time_ns is not None and found.time_ns <= 1.2 * ours.time_ns
    assert closer >= 12


@pytest.mark.parametrize("slots", [5, 17, 100])
def test_rounding_keeps_the_budget(slots: int) -> None:
    solved = 0
    for seed in range(12):
        graph = scaled(random_chain(12, seed), seed)
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.5, 0.6, 0.8):
            budget = int(share * peak)
            found = rotor(graph, budget, slots=slots)
            assert "persistent_bound_ns" not in found.notes
            if found.schedule is None:
                assert found.status is Status.INFEASIBLE or found.notes["needs_bytes"] > budget
                continue
            solved += 1
            assert found.peak_bytes is not None and found.peak_bytes <= budget
            assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes
    assert solved > 10


def test_the_program_never_needs_more_than_it_says() -> None:
    """Any number of units gives a schedule that simulates to no more than the bytes of those units."""
    for seed in range(10):
        graph = scaled(random_chain(10, seed), seed)
        stages = chain_of_ops(graph)
        program = ChainProgram(stages, [[Way(stage.forward, stage.backward)] for stage in stages.stages])
        room = simulate(graph, keep_all(graph)).peak_bytes - program.fixed_bytes
        for unit in (1_000, 37_003):
            tables = program.tables(room, unit)
            for units in tables.steps():
                ops = tables.ops(units)
                trace = simulate(graph, with_frees(graph, ops))
                assert trace.peak_bytes <= program.fixed_bytes + units * unit + room % unit
                assert trace.time_ns == sum(graph.ops[i].time_ns for i in ops) == tables.time_ns(units)


def test_more_memory_never_takes_longer() -> None:
    graph = random_chain(10, 3, plain=True)
    peak = simulate(graph, keep_all(graph)).peak_bytes
    times = [found.time_ns for budget in range(peak + 2) if (found := rotor(graph, budget)).time_ns is not None]
    assert times == sorted(times, reverse=True) and times[-1] == graph.keep_all_time_ns


def test_says_how_many_bytes_it_needs() -> None:
    graph = random_chain(3, 0, plain=True)  # 13 bytes suffice, but not for a persistent schedule
    found = rotor(graph, 13)
    assert found.status is Status.UNKNOWN and found.notes["needs_bytes"] == 14
    assert "14 bytes" in found.notes["stopped"]
    assert rotor(graph, 14).schedule is not None
    assert rotor(chain(8), 2).status is Status.INFEASIBLE


def test_random_ops_beside_the_chain_belong_to_their_reader() -> None:
    graph = with_masks(chain(6))
    found = rotor(graph, 6)
    assert found.schedule is not None and simulate(graph, found.schedule).recomputed_ops


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (random_training(6, 0), "op 4 (forward_5): it reads an output of op 1 (forward_2)"),
        (replace(chain(3), ops=tuple(replace(op, backward=False) for op in chain(3).ops)), "no backward pass"),
    ],
)
def test_refuses_what_is_no_chain(graph: Graph, words: str) -> None:
    with pytest.raises(InputError) as error:
        rotor(graph, 10**9)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_effects_happen_once() -> None:
    """No schedule runs the third op again, so that cheaper ones are out of reach; nor does it run two effects out of order."""
    graph = chain(5)
    ops = (*graph.ops[:2], replace(graph.ops[2], effect=True), *graph.ops[3:])
    graph = replace(graph, ops=ops)
    for budget in range(3, 9):
        best, found = least_time(graph, budget, keep_order=True), rotor(graph, budget)
        assert found.time_ns == (best and best[0]), budget


def test_what_nobody_reads_runs_beside_the_backward_pass() -> None:
    """An op without outputs that is not marked as backward but comes after it has begun, in all budgets that a chain can meet."""
    graph = chain(8)
    at = next(i for i, op in enumerate(graph.ops) if op.backward) + 1
    for effect in (False, True):
        ops = (*graph.ops[:at], Op("unread", (), (), 1, effect=effect), *graph.ops[at:])
        odd = replace(graph, ops=ops)
        for budget in range(4, 12):
            for method in (rotor, rockmate):
                plan, plain = method(odd, budget), method(graph, budget)
                assert plan.time_ns == (plain.time_ns and plain.time_ns + 1), (budget, method)


def test_refuses_a_graph_that_is_all_backward() -> None:
    graph = replace(chain(3), ops=tuple(replace(op, backward=True) for op in chain(3).ops))
    with pytest.raises(InputError, match="no forward pass"):
        rotor(graph, 10)


def test_refuses_a_backward_op_that_needs_an_activation_too_long() -> None:
    graph = chain(4)
    late = replace(graph.ops[-1], inputs=(*graph.ops[-1].inputs, 3))
    with pytest.raises(InputError, match=r"op 8 \(backward_0\): it needs an output of op 3 \(forward_3\)"):
        rotor(replace(graph, ops=(*graph.ops[:-1], late)), 10)


def late_backward() -> Graph:
    """Its last backward op could run before the other; the stages, run backward one after the other, hold more."""
    ops = (
        Op("f0", (0,), (1, 2, 3), 2),
        Op("f1", (3,), (4,), 1),
        Op("f2", (4,), (5,), 0),
        Op("b2", (2,), (6,), 8, workspace_bytes=2, backward=True),
        Op("b0", (3,), (7,), 0, backward=True),
    )
    values = tuple(Value(str(x), size) for x, size in enumerate((3, 4, 1, 1, 5, 0, 8, 6)))
    return Graph("late", ops, values, frozenset({0}), frozenset({7}))


@pytest.mark.parametrize("method", ["rotor", "revolve", "rockmate"])
def test_keeping_all_is_not_missed(method: str) -> None:
    graph = late_backward()
    budget_bytes = simulate(graph, keep_all(graph)).peak_bytes
    assert solve(graph, budget_bytes, method=method).status is Status.OPTIMAL


@pytest.mark.parametrize("method", ["rotor", "rockmate"])
def test_chains_too_long_for_the_time_limit_are_given_up(method: str) -> None:
    graph = chain(400)
    began = time.perf_counter()
    found = solve(graph, 40, method=method, time_limit_s=0.5)
    assert found.status is Status.UNKNOWN and found.notes["stopped"] == "time limit"
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("method", ["rotor", "rockmate"])
def test_nothing_is_made_for_a_chain_too_long_for_tables(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> None:
        raise AssertionError("making the links takes seconds")

    monkeypatch.setattr(ChainProgram, "__init__", made)
    found = solve(chain(4_000), 400, method=method, time_limit_s=0)
    assert found.status is Status.UNKNOWN and found.notes["stopped"].endswith("too long for the dynamic program")


def test_no_table_is_made_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(8)
    cut = chain_of_ops(graph)
    program = ChainProgram(cut, [[Way(stage.forward, stage.backward)] for stage in cut.stages])
    monkeypatch.setattr("numpy.full", lambda *_: pytest.fail("a large table takes seconds"))
    with pytest.raises(TimeoutError):
        program.tables(6, 1, deadline=now_s())


def test_a_chain_too_long_for_tables_may_keep_all() -> None:
    graph = chain(10_000)
    assert solve(graph, simulate(graph, keep_all(graph)).peak_bytes, method="rotor").status is Status.OPTIMAL


def test_long_chains_are_cut_up_soon() -> None:
    graph = chain(10_000)
    with rare_collections(full=False):  # as whatever plans does; a full one goes through what all tests before have left
        taken_s = stopwatch()
        assert len(chain_of_ops(graph).stages) == 10_001
        assert taken_s() < 1


@pytest.mark.parametrize("slots", [0, -1, 1.5, True])
def test_refuses_slots_that_are_no_number(slots: object) -> None:
    with pytest.raises(InputError, match="slots must be"):
        solve(chain(3), 5, method="rotor", slots=slots)


def scaled(graph: Graph, seed: int) -> Graph:
    """The same graph with sizes in the thousands that have no common divisor."""
    rng = Random(seed)
    return replace(graph, values=tuple(Value(v.name, v.size_bytes * 10_007 + rng.randrange(997)) for v in graph.values))


def with_masks(graph: Graph) -> Graph:
    """A random op before every second forward op, read by it and by nobody else."""
    values, ops = list(graph.values), list[Op]()
    for i, op in enumerate(graph.ops):
        if op.kind == "forward" and i % 2:
            values.append(Value(f"mask_{i}", 1))
            ops.append(Op(f"draw_{i}", (), (len(values) - 1,), 1, random=True))
            op = replace(op, inputs=(*op.inputs, len(values) - 1))
        ops.append(op)
    return replace(graph, ops=tuple(ops), values=tuple(values))


def test_an_interruption_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tables, "_solve", interrupted)
    found = rotor(chain(8), 6)
    assert found.status is Status.UNKNOWN and found.notes["stopped"] == "interrupted"
