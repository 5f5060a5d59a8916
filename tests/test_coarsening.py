"""Coarser graphs: whose schedules are the graph's, and which ops they may merge."""

import math
from itertools import pairwise
from random import Random

import pytest

from graphs import Graph, Op, Value
from graphs.synthetic import random_training
from planner import keep_all, simulate
from planner.schedule import computes, first_runs, with_frees
from planner.stages.coarsening import Coarse, coarsen
from tests.strategies import random_graph, sequence


def some_graphs() -> list[Graph]:
    graphs = [random_graph(seed, max_ops=9, random=seed % 3 == 1, effect=seed % 3 == 2) for seed in range(150)]
    return [*graphs, *(random_training(12, seed) for seed in range(20))]


def parts(coarse: Coarse) -> list[range]:
    return [range(*pair) for pair in pairwise(coarse.starts)]


@pytest.mark.parametrize("share", [0.1, 0.5, math.inf])
def test_a_schedule_of_the_coarser_graph_is_one_of_the_graph(share: float) -> None:
    fewer = cheaper_in_memory = 0
    for seed, graph in enumerate(some_graphs()):
        peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
        coarse = coarsen(graph, share * graph.keep_all_time_ns, share * peak_bytes)
        assert [v for part in parts(coarse) for v in part] == list(range(len(graph.ops)))
        fewer += len(coarse.graph.ops) < len(graph.ops)
        for draw in range(4):
            runs = sequence(coarse.graph, Random(f"{seed} {draw}").randint, max_repeats=4)
            there = simulate(coarse.graph, with_frees(coarse.graph, runs))
            expanded = coarse.expand(runs)
            here = simulate(graph, with_frees(graph, expanded))
            assert here.time_ns == there.time_ns and here.peak_bytes <= there.peak_bytes
            assert first_runs(expanded) == list(range(len(graph.ops)))
            cheaper_in_memory += here.peak_bytes < there.peak_bytes
    assert fewer >= 50 and cheaper_in_memory >= 20


def needed_ns(graph: Graph, part: range, x: int, there: set[int]) -> int:
    """What making x takes, of the ops of a part, where some of what they make is there; by following every input."""

    def needs(v: int) -> set[int]:
        makers = {graph.producer[y] for y in graph.ops[v].inputs if y not in there} & set(part)
        return {v}.union(*(needs(u) for u in makers))

    return sum(graph.ops[v].time_ns for v in needs(graph.producer[x]))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_no_op_loses_more_than_it_may(share: float) -> None:
    merged = 0
    for graph in some_graphs():
        lost_ns = share * graph.keep_all_time_ns
        coarse = coarsen(graph, lost_ns, math.inf)
        for part in parts(coarse):
            made = {x for v in part for x in graph.ops[v].outputs}
            wanted = {x for x in made if x in graph.outputs or any(u not in part for u in graph.consumers[x])}
            time_ns = sum(graph.ops[v].time_ns for v in part)
            if len(part) > 1:
                merged += 1
                assert all(time_ns - needed_ns(graph, part, x, wanted - {x}) <= lost_ns for x in wanted)
                assert not any(graph.ops[v].effect for v in part)
                assert len({graph.ops[v].backward for v in part}) == 1
    assert merged >= 20


def needed_bytes(graph: Graph, part: range, *, all_inputs: bool) -> int:
    """The most that is held of what a part reads and makes; all that it reads to its end, or each to its last use."""
    made = {x for v in part for x in graph.ops[v].outputs}
    read = {x for v in part for x in graph.ops[v].inputs if graph.producer[x] >= 0} - made

    def is_there(x: int, v: int) -> bool:
        if x in read and all_inputs:
            return True
        later = x in graph.outputs or any(u >= v for u in graph.consumers[x])
        return graph.producer[x] == v or (later and (x in read or graph.producer[x] < v))

    return max(
        graph.ops[v].workspace_bytes + sum(graph.values[x].size_bytes for x in made | read if is_there(x, v)) for v in part
    )


@pytest.mark.parametrize("extra_bytes", [0, 3])
def test_no_op_needs_more_bytes_than_it_may(extra_bytes: int) -> None:
    merged = more = 0
    for graph in some_graphs():
        for part in parts(coarsen(graph, math.inf, extra_bytes)):
            extra = needed_bytes(graph, part, all_inputs=True) - needed_bytes(graph, part, all_inputs=False)
            merged += len(part) > 1
            more += extra > 0
            assert len(part) == 1 or extra <= extra_bytes
    assert merged >= 100 and (more >= 10) == (extra_bytes > 0)


def test_random_ops_keep_their_order() -> None:
    ops = tuple(Op(name, (), (v,), 1, random=name != "plain") for v, name in enumerate(("draw", "plain", "again")))
    graph = Graph("draws", ops, tuple(Value(f"v{v}", 1) for v in range(3)), frozenset(), frozenset({0, 1, 2}))
    assert [op.random for op in coarsen(graph, 1, 1).graph.ops] == [True, True]


def test_of_equally_few_ops_the_least_are_lost() -> None:
    """Two of the three can be one: with ops of 1 and 2 ns 2 are lost, with those of 2 and 10 ns 10."""
    ops = tuple(Op(f"op{v}", (), (v,), time_ns) for v, time_ns in enumerate((1, 2, 10)))
    graph = Graph("three", ops, tuple(Value(f"v{v}", 1) for v in range(3)), frozenset(), frozenset({0, 1, 2}))
    assert coarsen(graph, 10, 1).starts == (0, 2, 3)
    assert coarsen(graph.in_order([2, 1, 0]), 10, 1).starts == (0, 1, 3)


def test_out_of_time_ops_stay_alone() -> None:
    graph = random_training(12, 0)
    assert len(coarsen(graph, math.inf, math.inf).graph.ops) < len(graph.ops)
    assert len(coarsen(graph, math.inf, math.inf, deadline=0.0).graph.ops) == len(graph.ops)


def test_what_is_only_on_the_way_is_merged_and_what_is_cheap_to_make_again_is_not() -> None:
    """Two products are added and passed through gates, which the backward pass reads; what is made of those is cheap."""
    sizes = {"x": 1, "a": 4, "b": 4, "sum": 4, "in": 1, "out": 1, "state": 1, "grad": 1}
    number = {name: v for v, name in enumerate(sizes)}

    def op(name: str, reads: str, makes: str, time_ns: int, *, backward: bool = False) -> Op:
        return Op(name, tuple(number[x] for x in reads.split()), (number[makes],), time_ns, backward=backward)

    ops = (
        op("mm_a", "x", "a", 100),
        op("mm_b", "x", "b", 100),
        op("add", "a b", "sum", 10),
        op("gate_in", "sum", "in", 1),
        op("gate_out", "sum", "out", 1),
        op("mul", "in out", "state", 1),
        op("back", "in out state", "grad", 200, backward=True),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    graph = Graph("cell", ops, values, frozenset({number["x"]}), frozenset({number["grad"]}))
    coarse = coarsen(graph, 5, 100)
    assert parts(coarse) == [range(5), range(5, 6), range(6, 7)]
    assert [op.time_ns for op in coarse.graph.ops] == [212, 1, 200]
    assert [value.name for value in coarse.graph.values] == ["x", "in", "out", "state", "grad"]
    assert coarse.graph.ops[0].workspace_bytes == 10  # a, b and sum, less in and out
    assert parts(coarsen(graph, 5, 0))[0] == range(5)  # x is resident, so nothing is held longer
    assert list(computes(keep_all(coarse.graph))) == [0, 1, 2] and coarse.expand([0, 1, 0, 2]) == [*range(6), *range(5), 6]


def test_an_empty_graph_and_a_single_op_are_as_coarse_as_can_be() -> None:
    empty = Graph("empty", (), (), frozenset(), frozenset())
    assert coarsen(empty, 1, 1) == Coarse(empty, (0,))
    one = Graph("one", (Op("a", (), (0,), 5, 3, effect=True),), (Value("x", 2),), frozenset(), frozenset({0}))
    assert coarsen(one, 1, 1) == Coarse(one, (0, 1))
