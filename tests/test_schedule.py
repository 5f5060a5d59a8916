"""Schedules: frees where they belong, codes in files."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import Graph, InvalidSchedule, Op, Value
from planner.schedule import (
    Compute,
    Free,
    Schedule,
    Step,
    computes,
    from_json,
    in_graph_order,
    keep_all,
    put_in_graph_order,
    to_json,
    with_frees,
)
from planner.simulate import simulate
from tests.oracles import naive_peak
from tests.strategies import graphs, random_graph, sequences


@pytest.fixture
def ladder() -> Graph:
    """a -> b -> c, then d reads b and c, e reads a and d; ten bytes each."""
    ops = (
        Op("a", (), (0,), 1),
        Op("b", (0,), (1,), 1),
        Op("c", (1,), (2,), 1),
        Op("d", (1, 2), (3,), 1),
        Op("e", (0, 3), (4,), 1),
    )
    return Graph("ladder", ops, tuple(Value(name, 10) for name in "abcde"), frozenset(), frozenset({4}))


def test_keep_all_frees_after_the_last_use(ladder: Graph) -> None:
    assert keep_all(ladder) == (
        Compute(0), Compute(1), Compute(2), Compute(3), Free(1), Free(2), Compute(4), Free(0), Free(3),
    )  # fmt: skip


def test_a_copy_goes_after_the_last_read_before_its_next_making(ladder: Graph) -> None:
    # a is made twice: the first copy serves b, the second e
    assert with_frees(ladder, [0, 1, 2, 3, 0, 4]) == (
        Compute(0), Compute(1), Free(0), Compute(2), Compute(3), Free(1), Free(2), Compute(0), Compute(4), Free(0), Free(3),
    )  # fmt: skip


def test_a_copy_nobody_reads_goes_at_once(ladder: Graph) -> None:
    assert with_frees(ladder, [0, 0, 1])[:3] == (Compute(0), Free(0), Compute(0))


def test_outputs_and_residents_stay() -> None:
    ops = (Op("a", (0,), (1, 2), 1), Op("b", (1,), (3,), 1))
    graph = Graph("g", ops, tuple(Value(name, 1) for name in "pxyz"), frozenset({0}), frozenset({0, 1, 3}))
    # y is read by nobody; the output x is kept although b is its last reader
    assert keep_all(graph) == (Compute(0), Free(2), Compute(1))
    # of an output made twice, the first copy goes once nobody reads it
    assert with_frees(graph, [0, 1, 0]) == (Compute(0), Free(2), Compute(1), Free(1), Compute(0), Free(2))


def test_computes_lists_ops_in_order(ladder: Graph) -> None:
    assert list(computes(with_frees(ladder, [0, 1, 2, 3, 0, 4]))) == [0, 1, 2, 3, 0, 4]


@given(st.data())
def test_with_frees_is_valid_and_nothing_can_go_earlier(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    ops = data.draw(sequences(graph))
    schedule = with_frees(graph, ops)
    simulate(graph, schedule)  # raises where it is not valid
    assert list(computes(schedule)) == ops
    for at, step in enumerate(schedule):
        # What a free could pass on its way to an earlier place is another free of the same moment; past a Compute it breaks.
        before = at
        while before and isinstance(schedule[before - 1], Free):
            before -= 1
        if isinstance(step, Free):
            earlier = (*schedule[: before - 1], step, *schedule[before - 1 : at], *schedule[at + 1 :])
            with pytest.raises(InvalidSchedule):
                simulate(graph, earlier)


@pytest.mark.parametrize("seed", range(60))
def test_with_frees_is_the_least_memory_for_its_sequence(seed: int) -> None:
    """Against every other valid choice of frees for the same small sequence."""
    graph = random_graph(seed, max_ops=4)
    ops = [*range(len(graph.ops)), seed % len(graph.ops)]
    ours = simulate(graph, with_frees(graph, ops)).peak_bytes
    evictable = [v for v in range(len(graph.values)) if v not in graph.resident and graph.values[v].size_bytes][:5]
    others = 0
    for choice in product(range(len(ops) + 1), repeat=len(evictable)):
        # choice[k]: the place after which evictable[k] is freed once more (len(ops): never)
        steps: list[Step] = []
        for at, i in enumerate(ops):
            steps.append(Compute(i))
            steps += [Free(v) for v, place in zip(evictable, choice, strict=True) if place == at]
        try:
            peak = simulate(graph, tuple(steps)).peak_bytes
        except InvalidSchedule:
            continue
        others += 1
        assert ours <= peak
    assert others


@given(st.data())
def test_codes_round_trip(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = with_frees(graph, data.draw(sequences(graph)))
    assert from_json(to_json(schedule)) == schedule


def test_codes_are_ops_and_values_below_zero() -> None:
    schedule: Schedule = (Compute(0), Compute(3), Free(0), Free(3))
    assert to_json(schedule) == [0, 3, -1, -4]


@pytest.mark.parametrize("code", [1.0, "1", None, True, [1]])
def test_damaged_codes_are_refused(code: object) -> None:
    with pytest.raises(InvalidSchedule, match="step 1: expected an integer, found"):
        from_json([0, code])


@pytest.mark.parametrize("codes", [None, 5])
def test_what_is_no_list_of_codes_is_refused(codes: object) -> None:
    with pytest.raises(InvalidSchedule, match="a schedule is a list of integers, not a"):
        from_json(codes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_keep_all_peak_is_the_naive_one(seed: int) -> None:
    graph = random_graph(seed, random=True, effect=True)
    schedule = keep_all(graph)
    trace = simulate(graph, schedule)
    assert trace.peak_bytes == naive_peak(graph, schedule)
    assert trace.time_ns == graph.keep_all_time_ns


def test_runs_are_put_in_graph_order() -> None:
    plain = Graph("plain", tuple(Op(f"op{v}", (), (v,), 1) for v in range(6)), (Value("x", 1),) * 6, frozenset(), frozenset({5}))
    put = partial(put_in_graph_order, plain)
    assert put([]) == []
    assert put([0, 1, 0, 2, 2]) == [0, 1, 0, 2, 2]
    assert put([2, 0, 2, 1, 3, 2]) == [0, 1, 2, 3, 2]  # too early: waits
    assert put([2, 0, 2, 1, 3, 2], waits=False) == [0, 1, 2, 0, 2, 1, 3, 2]
    assert put([0, 2, 3, 4, 0, 1]) == [0, 1, 2, 3, 4, 0, 1]  # too late: runs before as well
    assert put([4, 0, 2, 3, 0, 1]) == [0, 1, 2, 3, 0, 1, 4]
    ops = tuple(replace(op, effect=v == 1) for v, op in enumerate(plain.ops))
    assert put_in_graph_order(replace(plain, ops=ops), [0, 2, 3, 4, 0, 1]) == [0, 1, 2, 3, 4, 0]
    for seed in range(50):
        runs = [0, 1, 2, 3, 4, 5, *random.Random(seed).choices(range(6), k=10)]
        random.Random(seed).shuffle(runs)
        ordered = put(runs)
        assert in_graph_order(ordered) and set(ordered) == set(runs)
        assert put(ordered) == ordered
        rest = iter(put(runs, waits=False))
        assert all(v in rest for v in runs)  # they are among them, in their order


def test_a_valid_sequence_is_valid_in_graph_order() -> None:
    """Whichever order it had: inputs are there, as every value is kept till its last use."""
    moved = 0
    for seed in range(200):
        graph = random_graph(seed, effect=seed % 2 == 0)
        rng = random.Random(seed)
        runs: list[int] = []
        made: set[int] = set(graph.resident)
        while len(set(runs)) < len(graph.ops):
            ready = [v for v, op in enumerate(graph.ops) if made.issuperset(op.inputs) and not (op.effect and v in runs)]
            v = rng.choice(ready)
            runs.append(v)
            made.update(graph.ops[v].outputs)
        ordered = put_in_graph_order(graph, runs)
        simulate(graph, with_frees(graph, ordered))  # raises where an input is missing
        moved += ordered != runs
    assert moved > 100
