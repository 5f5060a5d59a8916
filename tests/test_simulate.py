"""``simulate``: peak and time by hand, each rule broken once, and against naive and exhaustive oracles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import Graph, InvalidSchedule, Op, Value
from graphs.synthetic import chain
from planner.schedule import Compute, Free, Schedule, keep_all, with_frees
from planner.simulate import simulate
from tests.oracles import least_budget, least_time, naive_peak, naive_time
from tests.strategies import graphs, graphs_and_budgets, random_budget, random_graph, sequences


@pytest.fixture
def small() -> Graph:
    """p is resident (100). a: p -> x (10), y (20), workspace 5; b: x -> z (40); c: y, z -> w (1)."""
    ops = (Op("a", (0,), (1, 2), 7, workspace_bytes=5), Op("b", (1,), (3,), 11), Op("c", (2, 3), (4,), 13))
    values = (Value("p", 100), Value("x", 10), Value("y", 20), Value("z", 40), Value("w", 1))
    return Graph("small", ops, values, frozenset({0}), frozenset({4}))


def test_memory_step_by_step(small: Graph) -> None:
    trace = simulate(small, (Compute(0), Compute(1), Free(1), Compute(2), Free(2), Free(3)))
    #       a: 100 + x 10 + y 20 + workspace 5 = 135
    #       b: 130 + z 40 = 170; without x 160; c: 161; without y 141; without z 101
    assert trace.memory_bytes == (135, 170, 160, 161, 141, 101)
    assert (trace.peak_bytes, trace.peak_step) == (170, 1)
    assert trace.time_ns == 31
    assert trace.recomputed == {} and trace.recomputed_ops == 0


def test_an_output_still_there_exists_twice_while_its_op_runs_again(small: Graph) -> None:
    # a is run again to make y while x is still there: x and y 30 + second x and y 30 + workspace 5
    trace = simulate(small, (Compute(0), Compute(0), Compute(1), Compute(2)))
    assert trace.memory_bytes == (135, 165, 170, 171)
    # with y freed before, only x exists twice: x 10 + second x 10 + y 20 + workspace 5
    trace = simulate(small, (Compute(0), Free(2), Compute(0), Compute(1), Compute(2)))
    assert trace.memory_bytes == (135, 110, 145, 170, 171)
    assert trace.time_ns == 38 and trace.recomputed == {0: 1}


def test_all_outputs_count_also_those_nobody_needs(small: Graph) -> None:
    # y is thrown away and made again with x: the rerun costs both
    trace = simulate(small, (Compute(0), Free(2), Compute(1), Free(1), Compute(0), Compute(2)))
    assert trace.memory_bytes == (135, 110, 150, 140, 175, 171)
    assert (trace.peak_bytes, trace.peak_step) == (175, 4)


def test_recomputed_counts_extra_runs(small: Graph) -> None:
    trace = simulate(small, (Compute(0), Compute(1), Compute(0), Compute(0), Compute(1), Compute(2)))
    assert trace.recomputed == {0: 2, 1: 1} and trace.recomputed_ops == 3
    assert trace.time_ns == 3 * 7 + 2 * 11 + 13


def test_residents_alone_are_a_peak() -> None:
    graph = Graph("still", (), (Value("p", 5),), frozenset({0}), frozenset({0}))
    trace = simulate(graph, ())
    assert (trace.peak_bytes, trace.time_ns, trace.memory_bytes) == (5, 0, ())


WHOLE: Schedule = (Compute(0), Compute(1), Compute(2))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((*WHOLE, Compute(3)), r"step 3: there is no op 3; ops are numbered 0 to 2"),
        ((Compute(-1),), r"step 0: there is no op -1"),
        ((*WHOLE, Free(5)), r"step 3: there is no value 5; values are numbered 0 to 4"),
        ((*WHOLE, Free(-1)), r"step 3: there is no value -1"),
        ((Compute(1), *WHOLE), r"step 0: b reads value 1 \(x\), which is not in memory"),
        ((Compute(0), Free(1), Compute(1), Compute(2)), r"step 2: b reads value 1 \(x\), which is not in memory"),
        ((*WHOLE, Free(0)), r"step 3: frees value 0 \(p\), which is resident"),
        ((*WHOLE, Free(1), Free(1)), r"step 4: frees value 1 \(x\), which is not in memory"),
        ((Compute(0), Free(3), Compute(1), Compute(2)), r"step 1: frees value 3 \(z\), which is not in memory"),
        ((*WHOLE, Free(4)), r"at the end value 4 \(w\) is not in memory, but it is an output of the graph"),
    ],
)
def test_each_rule_broken_once(small: Graph, schedule: Schedule, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        simulate(small, schedule)


def test_the_steps_of_an_iterator_are_checked_like_others(small: Graph) -> None:
    assert simulate(small, iter(WHOLE)) == simulate(small, WHOLE)  # type: ignore[arg-type]
    with pytest.raises(InvalidSchedule, match=r"step 1: expected Compute or Free with the number .*, found 5"):
        simulate(small, iter((*WHOLE[:1], 5)))  # type: ignore[arg-type]


def flagged(*flags: str) -> Graph:
    """One independent op for each flag ("random", "effect" or ""), no outputs."""
    ops = tuple(Op(f"op{i}", (), (i,), 1, random=flag == "random", effect=flag == "effect") for i, flag in enumerate(flags))
    return Graph("flagged", ops, tuple(Value(f"v{i}", 1) for i in range(len(ops))), frozenset(), frozenset())


def test_every_op_must_run() -> None:
    with pytest.raises(InvalidSchedule, match="at the end op1 has not run; every op must run at least once"):
        simulate(flagged("", "", ""), (Compute(0), Compute(2)))


def test_random_ops_first_run_in_graph_order() -> None:
    graph = flagged("random", "", "random")
    assert simulate(graph, (Compute(1), Compute(0), Compute(2))).time_ns == 3
    with pytest.raises(InvalidSchedule, match="step 1: op0 draws random numbers after op2, which comes later in the graph"):
        simulate(graph, (Compute(2), Compute(0), Compute(1)))


def test_random_ops_run_again_at_any_time() -> None:
    graph = flagged("random", "random")
    assert simulate(graph, (Compute(0), Compute(1), Compute(0), Compute(1), Compute(0))).recomputed == {0: 2, 1: 1}


def test_a_random_op_run_again_does_not_move_the_order_back() -> None:
    graph = flagged("random", "random", "random")
    with pytest.raises(InvalidSchedule, match="step 3: op1 draws random numbers after op2"):
        simulate(graph, (Compute(0), Compute(2), Compute(0), Compute(1)))


def test_effects_run_once() -> None:
    with pytest.raises(InvalidSchedule, match="step 1: op0 has an outside effect and must not run twice"):
        simulate(flagged("effect", ""), (Compute(0), Compute(0), Compute(1)))


def test_effects_run_in_graph_order() -> None:
    graph = flagged("effect", "", "effect")
    assert simulate(graph, (Compute(1), Compute(0), Compute(2))).time_ns == 3
    with pytest.raises(InvalidSchedule, match="step 1: op0 acts after op2, which comes later in the graph"):
        simulate(graph, (Compute(2), Compute(0), Compute(1)))


def test_effects_and_random_ops_do_not_order_each_other() -> None:
    assert simulate(flagged("effect", "random"), (Compute(1), Compute(0))).time_ns == 2


@given(st.data())
def test_agrees_with_the_naive_replay(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = list(with_frees(graph, data.draw(sequences(graph))))
    # Leave out some frees: still valid, and copies now exist twice.
    kept = [step for step in schedule if isinstance(step, Compute) or data.draw(st.booleans())]
    try:
        trace = simulate(graph, tuple(kept))
    except InvalidSchedule as error:
        raise AssertionError(f"leaving out frees broke a schedule: {error}") from error
    assert trace.peak_bytes == naive_peak(graph, tuple(kept)) == max(trace.memory_bytes)
    assert trace.memory_bytes.index(trace.peak_bytes) == trace.peak_step
    assert trace.time_ns == naive_time(graph, tuple(kept))
    assert trace.recomputed_ops == sum(isinstance(step, Compute) for step in kept) - len(graph.ops)


@given(graphs_and_budgets(keep_order=True, random=True, effect=True))
def test_the_best_schedules_of_brute_force_are_valid(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    for keep_order in (True, False):
        found = least_time(graph, budget_bytes, keep_order=keep_order)
        assert found is not None
        trace = simulate(graph, found[1])
        assert (trace.time_ns, trace.peak_bytes <= budget_bytes) == (found[0], True)
        assert trace.time_ns >= graph.keep_all_time_ns


@pytest.mark.parametrize("keep_order", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_brute_force_agrees_with_trying_every_sequence(seed: int, keep_order: bool) -> None:
    """All op sequences of up to seven runs, each with its earliest frees."""
    graph = random_graph(seed, max_ops=3, random=seed % 2 == 0, effect=seed % 3 == 0)
    tried: list[tuple[int, int]] = []  # peak and time
    for length in range(len(graph.ops), 8):
        for ops in product(range(len(graph.ops)), repeat=length):
            if keep_order and list(dict.fromkeys(ops)) != list(range(len(graph.ops))):
                continue
            try:
                trace = simulate(graph, with_frees(graph, ops))
            except InvalidSchedule:
                continue
            tried.append((trace.peak_bytes, trace.time_ns))
    assert min(tried)[0] == least_budget(graph, keep_order)
    for budget_bytes in sorted({peak for peak, _ in tried}):
        found = least_time(graph, budget_bytes, keep_order=keep_order)
        assert found is not None and found[0] == min(time for peak, time in tried if peak <= budget_bytes)
    assert least_time(graph, min(tried)[0] - 1, keep_order=keep_order) is None


def test_brute_force_meets_budgets_that_bite() -> None:
    """The generators do what they are for: in a good share of cases recomputation is forced, in some a new order is better."""
    forced = reordered = 0
    for seed in range(150):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        kept, free = (least_time(graph, budget_bytes, keep_order=keep) for keep in (True, False))
        assert kept is not None and free is not None and free[0] <= kept[0]
        forced += kept[0] > graph.keep_all_time_ns
        reordered += free[0] < kept[0]
        assert least_time(graph, least_budget(graph, False) - 1, keep_order=False) is None
    assert forced >= 40 and reordered >= 15


@pytest.mark.parametrize("seed", range(40))
def test_more_bytes_never_cost_more_time(seed: int) -> None:
    graph = random_graph(seed)
    low, high = least_budget(graph, True), simulate(graph, keep_all(graph)).peak_bytes
    times = [least_time(graph, budget, keep_order=True) for budget in range(low, high + 1)]
    found = [time[0] for time in times if time is not None]
    assert len(found) == len(times)
    assert found == sorted(found, reverse=True)
    assert found[-1] == graph.keep_all_time_ns


@pytest.mark.parametrize(
    ("flags", "reordering_helps"),
    [({}, True), ({"random": True}, False), ({"effect": True}, False)],
)
def test_brute_force_respects_the_order_of_draws_and_effects(flags: dict[str, bool], reordering_helps: bool) -> None:
    # a (size 1), b (size 5), c reads b, d reads a and c: with b and c before a 5 bytes do, with a first a and b need 6
    ops = (Op("a", (), (0,), 1), Op("b", (), (1,), 1), Op("c", (1,), (2,), 1), Op("d", (0, 2), (3,), 1))
    values = (Value("a", 1), Value("b", 5), Value("c", 0), Value("d", 0))
    graph = Graph("order", ops, values, frozenset(), frozenset({3}))
    graph = replace(graph, ops=tuple(replace(op, **flags) if op.name in "ab" else op for op in ops))
    found = least_time(graph, 5, keep_order=False)
    assert least_budget(graph, False) == (6 if "effect" in flags else 5)
    # a random op may run again: a, b, c, a, d
    assert (None if found is None else found[0]) == (4 if reordering_helps else 5 if "random" in flags else None)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (None, r"a schedule is a tuple of Compute and Free .*, not a NoneType"),
        ([0, 1], r"step 0: expected Compute or Free with the number of an op or a value, found 0"),
        ((Compute(0), "free"), r"step 1: expected Compute or Free .*, found 'free'"),
        ((Compute("op0"),), r"step 0: expected .*, found Compute\(op='op0'\)"),
        ((Compute(0.0),), r"step 0: expected .*, found Compute\(op=0.0\)"),
        ((Compute(0), Free([1])), r"step 1: expected .*, found Free\(value=\[1\]\)"),
        (([0] * 1000,), r"step 0: expected .*, found \[0, 0.{70,80}\.\.\.$"),
    ],
)
def test_what_is_no_schedule_is_told(schedule: object, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        simulate(chain(2), schedule)  # type: ignore[arg-type]
