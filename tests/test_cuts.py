"""Minimum cuts against all sets of values of small graphs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from random import Random

import pytest

from graphs.ir import Graph, Op, Value
from planner.least.cuts import MinCuts
from tests.strategies import random_graph


def passed(graph: Graph, sources: Collection[int], cut: Collection[int]) -> set[int]:
    """Values on paths from the outputs of source ops that end before the cut."""
    found: set[int] = set()
    for i, op in enumerate(graph.ops):
        if i in sources or found & set(op.inputs):
            found |= set(op.outputs) - set(cut)
    return found


def subsets(values: Collection[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(values) + 1):
        yield from itertools.combinations(sorted(values), count)


def cases(seeds: int, *, least_size: int) -> Iterator[tuple[Graph, set[int], set[int], set[int]]]:
    """Graphs, sources, targets and free values."""
    for seed in range(seeds):
        graph, random = random_graph(seed), Random(seed)
        graph = replace(graph, values=tuple(Value(v.name, max(least_size, v.size_bytes)) for v in graph.values))
        values, ops = range(len(graph.values)), range(len(graph.ops))
        if len(values) > 10:
            continue
        for _ in range(3):
            sources = {i for i in ops if random.random() < 0.5}
            targets = {x for x in values if random.random() < 0.4}
            free = {x for x in values if random.random() < 0.15}
            yield graph, sources, targets, free


@pytest.mark.parametrize("late", [False, True])
def test_no_set_of_values_that_separates_is_smaller(late: bool) -> None:
    cuts = frees = ends = none = 0
    for graph, sources, targets, free in cases(80, least_size=0):
        size = [v.size_bytes for v in graph.values]
        made = {x for x, producer in enumerate(graph.producer) if producer >= 0}
        total, found = MinCuts(graph).cut(sources, targets, free, late=late)
        assert not passed(graph, sources, found | free) & targets
        assert found <= made - free
        assert total == sum(size[x] for x in found)
        separating = [set(s) for s in subsets(made - free) if not passed(graph, sources, {*s, *free}) & targets]
        assert total == min(sum(size[x] for x in s) for s in separating)
        large = {x for x in found if size[x]}
        assert len(found - large) == min(len(s - large) for s in separating if {x for x in s if size[x]} == large)
        cuts += total > 0
        frees += not free.isdisjoint(targets)
        ends += not found.isdisjoint(targets)
        none += not sources
    assert min(cuts, frees, ends, none) >= 3


def test_early_and_late_cuts_are_the_closest_to_their_ends() -> None:
    several = 0
    for graph, sources, targets, free in cases(80, least_size=1):
        cuts = MinCuts(graph)
        total, early = cuts.cut(sources, targets, free)
        _, late = cuts.cut(sources, targets, free, late=True)
        made = {x for x, producer in enumerate(graph.producer) if producer >= 0}
        for values in subsets(made - free):
            if sum(graph.values[x].size_bytes for x in values) == total:
                before = passed(graph, sources, {*values, *free})
                if not before & targets:
                    assert passed(graph, sources, early | free) <= before <= passed(graph, sources, late | free)
        several += early != late
    assert several >= 8


def test_a_chain_is_cut_where_it_is_thinnest() -> None:
    """Sizes 5 2 4 2 0 7 in a row."""
    sizes = (5, 2, 4, 2, 0, 7)
    ops = tuple(Op(f"op{i}", (i - 1,) if i else (), (i,), 1) for i in range(6))
    cuts = MinCuts(Graph("chain", ops, tuple(Value(f"x{i}", s) for i, s in enumerate(sizes)), frozenset(), frozenset({5})))
    assert cuts.cut({0}, {5}) == (0, {4})
    assert cuts.cut({0}, {3}) == (2, {1})
    assert cuts.cut({0}, {3}, late=True) == (2, {3})
    assert cuts.cut({0, 2}, {3}) == (2, {3})  # behind the last source
    assert cuts.cut({0}, {3}, {2}) == cuts.cut({4}, {3}) == cuts.cut((), {3}) == cuts.cut({0}, ()) == (0, set())
    assert cuts.cut({5}, {5}) == (7, {5})
    assert cuts.cut({5}, {5}, {5}) == (0, set())


def test_values_that_are_always_there_and_graphs_without_ops() -> None:
    graph = Graph("one", (Op("op", (0,), (1,), 1),), (Value("r", 3), Value("x", 2)), frozenset({0}), frozenset({1}))
    assert MinCuts(graph).cut({0}, {0}) == (0, set())
    assert MinCuts(graph).cut({0}, {0, 1}, {0}) == (2, {1})
    assert MinCuts(Graph("none", (), (Value("r", 3),), frozenset({0}), frozenset({0}))).cut((), {0}) == (0, set())


def test_as_many_bytes_as_a_graph_can_have() -> None:
    """Below 2^62, of which each op that reads the first ones could let all through."""
    large, readers = 1 << 60, 20
    ops = (
        Op("first", (), (0, 1), 1),
        *(Op(f"op{i}", (0, 1), (2 + i,), 1) for i in range(readers)),
        Op("last", tuple(range(2, 2 + readers)), (2 + readers,), 1),
    )
    middle = tuple(Value(f"x{i}", large // 16) for i in range(readers))
    values = (Value("a", large // 2), Value("b", large // 2), *middle, Value("y", large - 1))
    cuts = MinCuts(Graph("large", ops, values, frozenset(), frozenset({2 + readers})))
    assert sum(v.size_bytes for v in values) > 0.8 * 2**62
    assert cuts.cut({0}, {2 + readers}) == (large - 1, {2 + readers})
    assert cuts.cut({0}, range(2, 2 + readers)) == (large, {0, 1})
    every = range(2 + readers)
    assert cuts.cut(every, range(3 + readers)) == (sum(v.size_bytes for v in values), set(range(3 + readers)))
    assert cuts.cut(every, range(2, 2 + readers)) == (large // 16 * readers, set(range(2, 2 + readers)))
