"""The evicted neighbourhood e* of DTR: what rebuilding a storage would drag in, and what waits for it.

Source: Kirisame et al., ICLR 2021, sections 2 and 4.1, appendix C.2. With E the evicted storages, e*(S) is the part of E
that is reached from S against the arrows (ancestors) through members of E only, and the part that is reached along them
(descendants). Heuristics ask for the sum of the costs over e*(S).

An eviction can only raise such a sum, so a sum once computed stays a lower bound until something is rebuilt. ``Pool`` (in
``online.heuristics``) lives on that: it asks for exact sums only where a lower bound does not already rule a storage out.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from online.engines.compiled_searches import Compiled

UNKNOWN_LOSS = 1 << 62  # more ns than any sum
MOST_NS = 2**51  # of all costs together: below, floats hold every sum that compiled searches make


class Relations:
    """Which storage is computed from which, what each costs, and which are evicted now. Storages are numbered from 0.

    deps[s]        storages read by the ops that make the views of s; neither s itself nor what is never evicted
    dependents[s]  its transpose: only what has been computed already
    cost_ns[s]     c0: sum of the times of the ops that made a view of s
    evicted[s]     computed at least once, and not in memory now
    dropped[s]     the program holds no reference to it any more: it is read again in rebuilds only
    siblings[s]    storages made by an op that makes a view of s, without s; no entry where there are none
    fresh          links since a flat copy was brought up to date, and pairs of siblings since then: both storages of each, one
                   after the other; None without a copy
    unlinked       whether some storage was taken out of the relations
    """

    def __init__(self) -> None:
        self.deps: list[list[int]] = []
        self.dependents: list[list[int]] = []
        self.cost_ns: list[int] = []
        self.evicted: list[bool] = []
        self.dropped: list[bool] = []
        self.siblings: dict[int, list[int]] = {}
        self.fresh: tuple[list[int], list[int]] | None = None
        self.unlinked = False

    def add(self, count: int = 1) -> int:
        """New storages, not related to any other yet: the number of the first."""
        first = len(self.deps)
        self.deps += [[] for _ in range(count)]
        self.dependents += [[] for _ in range(count)]
        self.cost_ns += [0] * count
        self.evicted += [False] * count
        self.dropped += [False] * count
        return first

    def link(self, s: int, dep: int) -> None:
        """Storage ``s`` is computed from storage ``dep``."""
        if s != dep and dep not in self.deps[s]:
            self.deps[s].append(dep)
            self.dependents[dep].append(s)
            if self.fresh is not None:
                self.fresh[0].extend((s, dep))

    def made_together(self, storages: Collection[int]) -> None:
        """One op has made views of all of these."""
        for s in storages:
            others = [other for other in storages if other != s]
            self.siblings.setdefault(s, []).extend(others)
            if self.fresh is not None:
                self.fresh[1].extend([t for other in others for t in (s, other)])

    def unlink(self, s: int) -> None:
        """Take ``s`` out of the relations of all others."""
        self.unlinked = True
        for dep in self.deps[s]:
            self.dependents[dep].remove(s)
        for dependent in self.dependents[s]:
            self.deps[dependent].remove(s)
        self.deps[s], self.dependents[s] = [], []


class Neighborhood(Protocol):
    """Sums over the evicted neighbourhood, kept up to date through evictions and rebuilds.

    visits    storages looked at, counted as metadata accesses
    compiled  what walks faster where there is much to walk; None: nothing
    """

    visits: int
    compiled: Compiled | None

    def evicted(self, s: int) -> None:
        """``s`` has just been evicted."""

    def restored(self, s: int) -> tuple[list[int], int]:
        """``s`` has just been rebuilt.

        Returns storages whose sums may have fallen by any amount, and the most by which any other sum has fallen.
        """

    def cost_ns(self, s: int, enough: float) -> tuple[int, bool]:
        """Sum for the resident storage ``s``, and True; or False and a lower bound above ``enough``."""


class _Walks:
    """Walks through the relations, each with marks of its own.

    visits    storages met in all of them
    compiled  see ``Neighborhood``
    """

    def __init__(self, relations: Relations) -> None:
        self.relations = relations
        self.visits = 0
        self.compiled: Compiled | None = None
        self._seen: list[int] = []  # walk in which a storage was seen last
        self._walk = 0

    def _new_walk(self) -> tuple[list[int], int]:
        missing = len(self.relations.deps) - len(self._seen)
        if missing:
            self._seen.extend([0] * missing)
        self._walk += 1
        return self._seen, self._walk


class Exact(_Walks):
    """e* by walking through the evicted storages.

    awaited_ns, counting    what is awaited costs so much, and these storages in memory have sums that count it
    ancestors, descendants  which halves count. They are summed apart: where views make the relations cyclic, a storage in
                            both halves counts twice, as in the authors' simulator.

    To that simulator, what an op called for the first time will make is out of memory like anything evicted while the op waits
    for what it reads. But it keeps sums, and makes one anew only where something within its reach is rebuilt, so sums from before
    the call do not count it. ``awaiting`` does the same. (By the paper e* holds what has been computed once, so none should.)
    """

    def __init__(self, relations: Relations, *, ancestors: bool = True, descendants: bool = True) -> None:
        super().__init__(relations)
        self._halves = [relations.deps] * ancestors + [relations.dependents] * descendants
        self.descendants = descendants
        self.awaited_ns = 0
        self.counting: set[int] = set()
        self._awaited_reads: list[int] = []

    def awaiting(self, reads: list[int], cost_ns: int) -> set[int]:
        """An op that reads ``reads`` waits to make what will cost ``cost_ns`` in all; nothing, once it has run.

        Returns storages whose sums have fallen.
        """
        fallen = self.counting
        self._awaited_reads, self.awaited_ns, self.counting = reads, cost_ns, set()
        return fallen

    def evicted(self, s: int) -> None:
        """No sum is kept; what reaches ``s`` counts what it has counted."""
        if s in self.counting:
            self.counting.remove(s)
            self.counting.update(self._from(self.relations.deps[s]))

    def restored(self, s: int) -> tuple[list[int], int]:
        """A storage below ``s`` loses at most ``s`` and what is above it; one above ``s`` can lose everything below ``s``."""
        suspects, above_ns = self._above(s)
        if self._awaited_reads:
            anew = {s, *suspects}
            self.counting = (self.counting - anew) | anew.intersection(self._from(self._awaited_reads))
        return suspects, self.relations.cost_ns[s] + above_ns

    def _above(self, s: int) -> tuple[list[int], int]:
        """Storages in memory whose lower halves reach ``s``, where these count; and what the evicted ones above it cost."""
        if self.compiled is not None:
            return self.compiled.above(s, in_memory=self.descendants)
        relations, evicted = self.relations, self.relations.evicted
        seen, walk = self._new_walk()
        above_ns = 0
        found = []
        stack = [s]
        while stack:
            for u in relations.deps[stack.pop()]:
                if seen[u] != walk:
                    seen[u] = walk
                    self.visits += 1
                    if evicted[u]:
                        above_ns += relations.cost_ns[u]
                        stack.append(u)
                    elif self.descendants:
                        found.append(u)
        return found, above_ns

    def cost_ns(self, s: int, enough: float) -> tuple[int, bool]:
        """See ``Neighborhood``."""
        cost, evicted = self.relations.cost_ns, self.relations.evicted
        total = self.awaited_ns if s in self.counting else 0
        visits = 0
        for edges in self._halves:
            seen, walk = self._new_walk()
            stack = [s]
            while stack:
                for u in edges[stack.pop()]:
                    if evicted[u] and seen[u] != walk:
                        seen[u] = walk
                        visits += 1
                        total += cost[u]
                        stack.append(u)
                if total > enough:
                    self.visits += visits
                    return total, False
        self.visits += visits
        return total, True

    def _from(self, reads: list[int]) -> list[int]:
        """Storages in memory that are reached from what reads ``reads``, against the arrows."""
        relations, evicted = self.relations, self.relations.evicted
        seen, walk = self._new_walk()
        found = []
        stack = [reads]
        while stack:
            for u in stack.pop():
                if seen[u] != walk:
                    seen[u] = walk
                    self.visits += 1
                    if evicted[u]:
                        stack.append(relations.deps[u])
                    else:
                        found.append(u)
        return found


class Demand(_Walks):
    """What losing a storage costs those that want it. Not from the DTR paper.

    n is the number of wanted values that would be rebuilt through S: S itself unless the program has dropped it, and the nearest
    evicted ones below it that are not dropped, reached through evicted and dropped ones only. If each rebuild stood alone, losing
    S would cost (c0(S) + sum over the ancestor half of e*) * n. If all shared what they make, it would cost S and its dropped
    ancestors once: the wanted ones are rebuilt for their own sake. Half of both extremes, in every part:

        (c0(S) + sum over dropped ancestors + 1/2 sum over wanted ancestors) * (n + 1) / 2        0 where n is 0

    So a dropped storage that no evicted value needs is worth nothing, and nothing else is: the sum counts at least half a
    nanosecond, as times may be 0.
    """

    def evicted(self, s: int) -> None:
        """Costs and numbers can only have grown."""

    def restored(self, s: int) -> tuple[list[int], int]:
        """All that is in memory and is reached through evicted storages may be worth less."""
        return self.around(s), 0

    def around(self, s: int) -> list[int]:
        """Storages in memory that are reached from ``s`` through evicted ones, against the arrows and along them."""
        if self.compiled is not None:
            return self.compiled.around(s)
        relations, evicted = self.relations, self.relations.evicted
        found: list[int] = []
        for edges in (relations.deps, relations.dependents):
            seen, walk = self._new_walk()
            stack = [s]
            while stack:
                for u in edges[stack.pop()]:
                    if seen[u] != walk:
                        seen[u] = walk
                        self.visits += 1
                        (stack if evicted[u] else found).append(u)
        return found

    def cost_ns(self, s: int, enough: float) -> tuple[int, bool]:
        """The whole product, c0 included, times 4 so that it is whole; always exact."""
        relations = self.relations
        evicted, dropped, dependents, deps, cost = (
            relations.evicted, relations.dropped, relations.dependents, relations.deps, relations.cost_ns,
        )  # fmt: skip
        wanting = 0 if dropped[s] else 1
        visits = 0
        seen, walk = self._new_walk()
        stack = [s]
        while stack:
            for u in dependents[stack.pop()]:
                if evicted[u] and seen[u] != walk:
                    seen[u] = walk
                    visits += 1
                    if dropped[u]:
                        stack.append(u)
                    else:
                        wanting += 1
        if wanting:
            twice = 2 * cost[s]
            seen, walk = self._new_walk()
            stack = [s]
            while stack:
                for u in deps[stack.pop()]:
                    if evicted[u] and seen[u] != walk:
                        seen[u] = walk
                        visits += 1
                        twice += 2 * cost[u] if dropped[u] else cost[u]
                        stack.append(u)
            self.visits += visits
            return max(1, twice) * (wanting + 1), True  # what is wanted must not go before what is dead
        self.visits += visits
        return 0, True


class UnionFind:
    """The estimate of h_DTR^eq: directions forgotten, evicted storages in components with a running sum of their costs.

    A rebuilt storage takes its cost out of its component and leaves it. The component is not split, so storages connected
    only through it stay together.
    """

    def __init__(self, relations: Relations) -> None:
        self.relations = relations
        self.visits = 0
        self.compiled: Compiled | None = None
        self._node: list[int] | array[int] = []  # of each storage; -1 while it is not evicted
        self._parent: list[int] | array[int] = []
        self._sum: list[int] | array[int] = []  # of a component, at its root

    def evicted(self, s: int) -> None:
        """A new node, united with the components of all evicted neighbours."""
        relations = self.relations
        missing = len(relations.deps) - len(self._node)
        if missing:
            self._node.extend([-1] * missing)
        root = len(self._parent)
        self._node[s] = root
        self._parent.append(root)
        self._sum.append(relations.cost_ns[s])
        evicted, parent = relations.evicted, self._parent
        for edges in self._edges(s):
            for u in edges:
                if evicted[u] and u != s:
                    other = self._find(self._node[u])
                    if other != root:
                        # Numbers of nodes grow with time: the older root keeps the component, as it is larger as a rule.
                        root, other = (root, other) if root < other else (other, root)
                        parent[other] = root
                        self._sum[root] += self._sum[other]

    def restored(self, s: int) -> tuple[list[int], int]:
        """Direct neighbours may lose a whole component; whoever touches the component elsewhere loses the cost of ``s``."""
        relations = self.relations
        self._sum[self._find(self._node[s])] -= relations.cost_ns[s]
        # Only the reference goes: the node may be the root of the others.
        self._node[s] = -1
        neighbours = relations.deps[s] + relations.dependents[s]
        self.visits += len(neighbours)
        return [u for u in neighbours if not relations.evicted[u]], relations.cost_ns[s]

    def cost_ns(self, s: int, enough: float) -> tuple[int, bool]:
        """Sum over the distinct components among the evicted neighbours; always exact."""
        relations, evicted = self.relations, self.relations.evicted
        roots = {self._find(self._node[u]) for u in relations.deps[s] if evicted[u]}
        roots.update([self._find(self._node[u]) for u in relations.dependents[s] if evicted[u]])
        self.visits += len(relations.deps[s]) + len(relations.dependents[s])
        return sum([self._sum[root] for root in roots]), True

    def flat(self) -> tuple[array[int], array[int], array[int]]:
        """``_node``, ``_parent`` and ``_sum``, which are arrays from now on: no sum may need more than 63 bits."""
        missing = len(self.relations.deps) - len(self._node)
        self._node.extend([-1] * missing)
        if not isinstance(self._node, array):
            self._node, self._parent, self._sum = array("q", self._node), array("q", self._parent), array("q", self._sum)
        return self._node, self._parent, self._sum  # type: ignore[return-value]

    def unflatten(self) -> None:
        """Undo ``flat``: sums may be of any size again."""
        self._node, self._parent, self._sum = list(self._node), list(self._parent), list(self._sum)

    def _edges(self, s: int) -> tuple[list[int], list[int]]:
        """Whose components ``s`` joins when it is evicted."""
        return self.relations.deps[s], self.relations.dependents[s]

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]  # halve the path
            self.visits += 1
        return node


class Producers(UnionFind):
    """The estimate of Coop: components as above, but only the inputs and outputs of the op that makes a storage are asked.

    Every evicted one of them adds the cost of its component, or its own where that is more; two in one component count twice.
    """

    def cost_ns(self, s: int, enough: float) -> tuple[int, bool]:
        """See ``Neighborhood``; always exact."""
        cost, evicted = self.relations.cost_ns, self.relations.evicted
        total = 0
        for edges in self._edges(s):
            self.visits += len(edges)
            for u in edges:
                if evicted[u]:
                    total += max(self._sum[self._find(self._node[u])], cost[u])
        return total, True

    def restored(self, s: int) -> tuple[list[int], int]:
        """Where the component counted several times for one storage, it can lose several times what it lost."""
        super().restored(s)
        return [], UNKNOWN_LOSS

    def _edges(self, s: int) -> tuple[list[int], list[int]]:
        return self.relations.deps[s], self.relations.siblings.get(s, [])


def fits_compiled(relations: Relations, neighborhood: Neighborhood | None) -> bool:
    """Whether a flat copy has all that counts, and costs are such that floats hold their sums."""
    awaited_ns = neighborhood.awaited_ns if isinstance(neighborhood, Exact) else 0
    return sum(relations.cost_ns) + awaited_ns < MOST_NS and not relations.unlinked
