"""The evicted neighbourhood against plain set searches, and the bounds that caching relies on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from online.neighborhood import Exact, Neighborhood, Relations, UnionFind

Moves = list[int]


def relations_of(edges: list[tuple[int, int]], cost_ns: list[int]) -> Relations:
    """Storages with these costs; an edge (s, dep) says that s is computed from dep."""
    relations = Relations()
    for cost in cost_ns:
        relations.cost_ns[relations.add()] = cost
    for s, dep in edges:
        relations.link(s, dep)
    return relations


def reached(edges: list[list[int]], relations: Relations, s: int) -> set[int]:
    """Evicted storages reached from ``s`` through evicted ones."""
    found: set[int] = set()
    while more := {u for v in found | {s} for u in edges[v] if relations.evicted[u]} - found:
        found |= more
    return found


def exact_sum(relations: Relations, s: int, *, ancestors: bool = True, descendants: bool = True) -> int:
    halves = [relations.deps] * ancestors + [relations.dependents] * descendants
    return sum(relations.cost_ns[u] for edges in halves for u in reached(edges, relations, s))


class Components:
    """The union-find estimate with plain sets: a component is a pair (members, sum); members may have left."""

    def __init__(self, relations: Relations) -> None:
        self.relations = relations
        self.components: list[tuple[set[int], int]] = []

    def evicted(self, s: int) -> None:
        near = {u for u in self.relations.deps[s] + self.relations.dependents[s] if self.relations.evicted[u]} - {s}
        merged = [c for c in self.components if c[0] & near]
        self.components = [c for c in self.components if not c[0] & near]
        members = {s}.union(*(c[0] for c in merged))
        self.components.append((members, self.relations.cost_ns[s] + sum(c[1] for c in merged)))

    def restored(self, s: int) -> None:
        at = next(i for i, c in enumerate(self.components) if s in c[0])
        members, total = self.components[at]
        self.components[at] = (members - {s}, total - self.relations.cost_ns[s])

    def sum(self, s: int) -> int:
        near = {u for u in self.relations.deps[s] + self.relations.dependents[s] if self.relations.evicted[u]}
        return sum(total for members, total in self.components if members & near)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int], Moves]:
    """Storages, relations (cycles among them, as views make) and storages to evict or restore, in order."""
    n = draw(st.integers(2, 9))
    storage = st.integers(0, n - 1)
    edges = [(s, draw(st.integers(0, s - 1))) for s in range(1, n) for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        dep = draw(st.integers(1, n - 1))
        edges.append((draw(st.integers(0, dep - 1)), dep))
    costs = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    return edges, costs, draw(st.lists(storage, min_size=1, max_size=30))


def test_the_neighbourhood_of_a_skip_network() -> None:
    # 0 -> 1 -> 2 -> 3 -> 4 and 1 -> 4, costs 1, 2, 4, 8, 16. Evicted: 1 and 4.
    relations = relations_of([(1, 0), (2, 1), (3, 2), (4, 3), (4, 1)], [1, 2, 4, 8, 16])
    relations.evicted[1] = relations.evicted[4] = True
    near = Exact(relations)
    # 0: descendants 1 and, through 1, 4. 2: ancestor 1; its child 3 is there, so not 4. 3: descendant 4; parent 2 is there.
    assert [near.cost_ns(s, math.inf) for s in (0, 2, 3)] == [(18, True), (2, True), (16, True)]
    assert Exact(relations, descendants=False).cost_ns(0, math.inf) == (0, True)
    # Without directions 1 and 4 are one component, and all three touch it.
    estimate = UnionFind(relations_of([(1, 0), (2, 1), (3, 2), (4, 3), (4, 1)], [1, 2, 4, 8, 16]))
    for s in (1, 4):
        estimate.relations.evicted[s] = True
        estimate.evicted(s)
    assert [estimate.cost_ns(s, math.inf)[0] for s in (0, 2, 3)] == [18, 18, 18]
    # When 1 is rebuilt its cost goes; when only 1 connected two storages, they would stay together.
    estimate.relations.evicted[1] = False
    assert estimate.restored(1) == ([0, 2], 2)
    assert [estimate.cost_ns(s, math.inf)[0] for s in (0, 1, 2, 3)] == [0, 16, 0, 16]


def test_phantom_connections_stay() -> None:
    # 0 -> 1 -> 2 -> 3, all of cost 1: evict 1, 2, 3, rebuild 2. Storages 1 and 3 stay in one component of sum 2.
    relations = relations_of([(1, 0), (2, 1), (3, 2)], [1, 1, 1, 1])
    estimate = UnionFind(relations)
    for s in (1, 2, 3):
        relations.evicted[s] = True
        estimate.evicted(s)
    relations.evicted[2] = False
    estimate.restored(2)
    assert estimate.cost_ns(2, math.inf) == (2, True)  # one component, counted once, though both neighbours are in it
    assert estimate.cost_ns(0, math.inf) == (2, True)  # exact would be 1
    assert Exact(relations).cost_ns(0, math.inf) == (1, True)


@given(histories(), st.sampled_from([(True, True), (True, False)]), st.integers(0, 60))
@settings(max_examples=300)
def test_exact_sums_agree_with_a_plain_search(
    history: tuple[list[tuple[int, int]], list[int], Moves], halves: tuple[bool, bool], enough: int
) -> None:
    edges, costs, moves = history
    relations = relations_of(edges, costs)
    ancestors, descendants = halves
    near = Exact(relations, ancestors=ancestors, descendants=descendants)
    for s in moves:
        relations.evicted[s] = not relations.evicted[s]
        (near.evicted if relations.evicted[s] else near.restored)(s)
        for u in range(len(costs)):
            if not relations.evicted[u]:
                wanted = exact_sum(relations, u, ancestors=ancestors, descendants=descendants)
                assert near.cost_ns(u, math.inf) == (wanted, True)
                bound, exact = near.cost_ns(u, enough)
                assert bound == wanted if exact else enough < bound <= wanted


@given(histories())
@settings(max_examples=300)
def test_union_find_agrees_with_plain_sets(history: tuple[list[tuple[int, int]], list[int], Moves]) -> None:
    edges, costs, moves = history
    relations = relations_of(edges, costs)
    near, plain = UnionFind(relations), Components(relations)
    for s in moves:
        relations.evicted[s] = not relations.evicted[s]
        for follower in (near, plain):
            (follower.evicted if relations.evicted[s] else follower.restored)(s)
        for u in range(len(costs)):
            if not relations.evicted[u]:
                assert near.cost_ns(u, math.inf) == (plain.sum(u), True)


@pytest.mark.parametrize("make", [Exact, lambda relations: Exact(relations, descendants=False), UnionFind])
@given(history=histories())
@settings(max_examples=200)
def test_what_restored_says_keeps_old_sums_lower_bounds(
    make: Callable[[Relations], Neighborhood], history: tuple[list[tuple[int, int]], list[int], Moves]
) -> None:
    edges, costs, moves = history
    relations = relations_of(edges, costs)
    near = make(relations)
    bounds = [0] * len(costs)
    for at, s in enumerate(moves):
        relations.evicted[s] = not relations.evicted[s]
        if relations.evicted[s]:
            near.evicted(s)
        else:
            suspects, loss = near.restored(s)
            bounds = [0 if u in suspects else max(0, bound - loss) for u, bound in enumerate(bounds)]
            bounds[s] = 0
        for u in range(len(costs)):
            if not relations.evicted[u]:
                found, _ = near.cost_ns(u, math.inf)
                assert bounds[u] <= found
                if at % 2:  # refresh some of the time, so that bounds of several ages are checked
                    bounds[u] = found
