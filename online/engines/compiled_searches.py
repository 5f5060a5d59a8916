"""Searches of a pool and walks through its relations, compiled by numba: what is chosen and counted is as in plain Python.

``online.heuristics`` and ``online.neighborhood`` say what each means. These are for many storages, or many searches: a search
takes time per storage in memory, but a hundredth of what it takes there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np

from online.allocators import FREE
from online.neighborhood import MOST_NS, Demand, Exact, Neighborhood, Producers, Relations, UnionFind
from planner.process.compiled import njit
from planner.process.flat import Flags, Floats, Ints, rows
from planner.process.loading import load_once

BLOCK = 128  # slots whose least score is known
NEAR = 64  # accesses on either side of the median among which the next one is looked for first
MOST_CLOCK_NS = 2**46  # below, 64 bits hold what a division on the way to a price leaves, and 16 bits more
FITS = 2**61
WHOLE = 2**32  # a price of 1
LOCAL, WALKS, DEMAND, COMPONENTS, PRODUCERS = range(5)  # what numerators are: c0 alone or 1, or what ``neighborhood`` has
DEPS, DEPENDENTS, SIBLINGS = range(3)  # kinds of links, the halves of e* first


class Net(NamedTuple):
    """``Relations``, flat, and scratch.

    evicted, dropped, cost_ns  of each storage
    awaited_ns                 what its sum counts of what an op waits to make (see ``Exact``); 0 between searches
    first, last                of each kind and storage: its links in order, -1 for none
    to, next                   of each kind and link: the storage it leads to, and the link after it
    seen, walk                 walk in which a storage was seen last; number of the last walk
    stack, found               scratch: of a walk; what it found, or two numbers for each storage
    visits                     storages met in walks so far
    """

    evicted: Flags
    dropped: Flags
    cost_ns: Ints
    awaited_ns: Ints
    first: Ints
    last: Ints
    to: Ints
    next: Ints
    seen: Ints
    walk: Ints
    stack: Ints
    found: Ints
    visits: Ints


class Slots(NamedTuple):
    """The columns of a ``Pool``, and scratch.

    lowest    least score of each block of slots
    bracket   accesses between which the median was when it was last looked for
    between   scratch: the accesses between
    """

    numerator: Floats
    local: Floats
    size: Floats
    accessed: Floats
    barrier: Floats
    ordered: Floats
    weight: Floats
    score: Floats
    storage: Ints
    exact_at: Ints
    lowest: Floats
    bracket: Floats
    between: Floats


class Forest(NamedTuple):
    """What ``UnionFind`` knows, and in which walk a root was seen last."""

    node: Ints
    parent: Ints
    sum: Ints
    seen: Ints


class Compiled:
    """The flat copy of some relations, kept up to date by those who change them, and what is compiled for it.

    neighborhood  which sums count; None: none
    """

    def __init__(self, relations: Relations, neighborhood: Neighborhood | None) -> None:
        load_once(_search_once)
        self._relations, self._neighborhood = relations, neighborhood
        self._dependents = False
        self._kind = LOCAL
        if isinstance(neighborhood, Exact):
            self._kind, self._dependents = WALKS, neighborhood.descendants
        elif isinstance(neighborhood, Demand):
            self._kind = DEMAND
        elif isinstance(neighborhood, UnionFind):
            self._kind = PRODUCERS if isinstance(neighborhood, Producers) else COMPONENTS
        count = len(relations.deps)
        relations.fresh = [], []
        first, last, to, after = [], [], [], []
        siblings = [relations.siblings.get(s, []) for s in range(count)]
        self._links = max(sum(map(len, relations.deps)), sum(map(len, siblings)))
        for edges in (relations.deps, relations.dependents, siblings):
            begins, ends = rows(edges)
            ends = np.append(ends, np.zeros(self._links - ends.size, np.int64))
            some = begins[1:] > begins[:-1]
            first.append(np.where(some, begins[:-1], -1))
            last.append(np.where(some, begins[1:] - 1, -1))
            following = np.arange(1, ends.size + 1)
            following[last[-1][some]] = -1
            to.append(ends)
            after.append(following)
        self._costs_ns = sum(relations.cost_ns)
        self.net = Net(
            np.array(relations.evicted, np.bool_),
            np.array(relations.dropped, np.bool_),
            np.array(relations.cost_ns, np.int64),
            np.zeros(count, np.int64),
            np.array(first, np.int64),
            np.array(last, np.int64),
            np.array(to, np.int64),
            np.array(after, np.int64),
            np.zeros(count, np.int64),
            np.zeros(1, np.int64),
            np.empty(count, np.int64),
            np.empty(2 * count, np.int64),
            np.zeros(1, np.int64),
        )
        self._no_forest = Forest(*[np.zeros(1, np.int64)] * 4)
        self._seen = np.zeros(1, np.int64)

    @property
    def is_exact(self) -> bool:
        """Whether the copy has all that counts, and numbers that floats hold."""
        return self._most_ns < MOST_NS and not self._relations.unlinked

    @property
    def visits(self) -> int:
        """Storages met here so far, as ``Neighborhood.visits`` counts them."""
        return int(self.net.visits[0])

    def costlier(self, s: int, time_ns: int) -> None:
        """c0 of ``s`` has grown."""
        self._costs_ns += time_ns
        if self._costs_ns < MOST_NS:
            self.net.cost_ns[s] += time_ns

    def grow(self, storages: int) -> None:
        """There are as many storages from now on."""
        net, more = self.net, storages - self.net.cost_ns.size
        if more > 0:
            more = max(more, storages // 2)
            none = np.full((3, more), -1)
            self.net = net._replace(
                evicted=_longer(net.evicted, more),
                dropped=_longer(net.dropped, more),
                cost_ns=_longer(net.cost_ns, more),
                awaited_ns=_longer(net.awaited_ns, more),
                first=np.concatenate((net.first, none), axis=1),
                last=np.concatenate((net.last, none), axis=1),
                seen=_longer(net.seen, more),
                stack=_longer(net.stack, more),
                found=_longer(net.found, 2 * more),
            )

    def up_to_date(self) -> Net:
        """The relations as they are now."""
        for siblings, fresh in enumerate(self._relations.fresh or ()):
            if fresh:
                count = len(fresh) // 2
                if self._links + count > self.net.to.shape[1]:
                    none = np.full((3, self._links + count), -1)
                    to, after = np.concatenate((self.net.to, none), axis=1), np.concatenate((self.net.next, none), axis=1)
                    self.net = self.net._replace(to=to, next=after)
                link(self.net, np.array(fresh, np.int64), self._links, bool(siblings))
                self._links += count
                fresh.clear()
        return self.net

    def around(self, s: int) -> list[int]:
        """As ``Demand.around``."""
        net = self.up_to_date()
        above, _ = reached(net, s, DEPS, 0)
        count, _ = reached(net, s, DEPENDENTS, above)
        return net.found[:count].tolist()  # type: ignore[no-any-return]

    def above(self, s: int, *, in_memory: bool) -> tuple[list[int], int]:
        """Storages in memory that are reached from ``s`` through evicted ones, against the arrows, if wanted; cost of these."""
        net = self.up_to_date()
        count, cost_ns = reached(net, s, DEPS, 0)
        return net.found[: count if in_memory else 0].tolist(), int(cost_ns)

    def slots(self, columns: Iterable[Floats], storage: array[int], exact_at: array[int]) -> Slots:
        """Those of a pool: its columns as ``Slots`` has them."""
        count = len(storage)
        lowest, bracket, between = np.empty(count // BLOCK + 1), np.array([-math.inf, math.inf]), np.empty(count)
        numerator, local, size, accessed, barrier, ordered, weight, score = columns
        return Slots(
            numerator, local, size, accessed, barrier, ordered, weight, score,
            np.frombuffer(storage, np.int64), np.frombuffer(exact_at, np.int64), lowest, bracket, between,
        )  # fmt: skip

    def pick(
        self, slots: Slots, used: int, now: float, changes: int, members: int, staleness: bool, capped: bool, oldest: bool,
        sized: bool,
    ) -> tuple[int, int]:  # fmt: skip
        """``Pool.pick``: a slot and how many scores a scan would have computed."""
        net, forest = self.up_to_date(), self._forest()
        with self.awaited(net):
            return cheapest(
                slots, net, forest, used, now, changes, self._kind, self._dependents, members, staleness, capped, oldest, sized
            )

    def window(
        self, slots: Slots, used: int, clock: int, owners: Ints, sizes: Ints, need: int, staleness: bool
    ) -> tuple[int, int] | None:
        """The cheapest window of pieces as ``cheapest_window`` has it, at ``Pool.prices``; (0, 0) where no run is large enough.

        None: prices or their sums may need more than 64 bits, or are not known here.
        """
        net, terms = self.up_to_date(), 3 * self._links + owners.size + 1
        if clock >= MOST_CLOCK_NS or self._most_ns * terms >= FITS or self._kind == DEMAND:
            return None
        forest = self._forest()
        with self.awaited(net):
            price(slots, net, forest, used, clock, self._kind, self._dependents, staleness, owners)
        return cheapest_run(net, owners, sizes, need)

    @property
    def _most_ns(self) -> int:
        """What no sum exceeds."""
        return self._costs_ns + (self._neighborhood.awaited_ns if isinstance(self._neighborhood, Exact) else 0)

    @contextmanager
    def awaited(self, net: Net) -> Iterator[None]:
        """Sums count what is awaited, those that do."""
        if not isinstance(self._neighborhood, Exact) or not self._neighborhood.counting:
            yield
            return
        counting = list(self._neighborhood.counting)
        try:
            net.awaited_ns[counting] = self._neighborhood.awaited_ns
            yield
        finally:
            net.awaited_ns[counting] = 0

    def _forest(self) -> Forest:
        """That of a ``UnionFind``, shared; it must be gone before that goes on."""
        if not isinstance(self._neighborhood, UnionFind):
            return self._no_forest
        node, parent, sums = (np.frombuffer(column, np.int64) for column in self._neighborhood.flat())
        if self._seen.size < parent.size:
            self._seen = np.zeros(2 * parent.size, np.int64)
        return Forest(node, parent, sums, self._seen)


Column = TypeVar("Column", Ints, Flags)


def _search_once() -> None:
    relations = Relations()
    relations.add(2)
    tiny = Compiled(relations, Demand(relations))
    relations.link(1, 0)
    tiny.around(1)
    tiny.above(1, in_memory=True)
    slots = tiny.slots(np.zeros((8, 1)), array("q", [0]), array("q", [0]))
    tiny.pick(slots, 1, 1.0, 1, 1, True, True, True, True)
    other = Compiled(relations, None)
    other.window(slots, 1, 1, np.zeros(1, np.int64), np.ones(1, np.int64), 1, True)


def _longer(column: Column, more: int) -> Column:
    return np.concatenate((column, np.zeros(more, column.dtype)))


@njit
def link(net: Net, fresh: Ints, at: int, siblings: bool) -> None:
    """Add links, two storages for each, from number ``at`` on: one and what it is computed from, or one and a sibling of it."""
    for a in range(0, fresh.size, 2):
        for kind in range(SIBLINGS, SIBLINGS + 1) if siblings else range(SIBLINGS):
            s, t = fresh[a], fresh[a + 1]
            if kind == DEPENDENTS:
                s, t = t, s
            net.to[kind, at] = t
            net.next[kind, at] = -1
            if net.last[kind, s] >= 0:
                net.next[kind, net.last[kind, s]] = at
            else:
                net.first[kind, s] = at
            net.last[kind, s] = at
        at += 1


@njit
def reached(net: Net, s: int, half: int, count: int) -> tuple[int, int]:
    """Walk from ``s`` through evicted storages. Those in memory go into ``found``, from ``count`` on.

    How many are there then, and what the evicted ones cost.
    """
    cost_ns = 0
    net.walk[0] += 1
    walk = net.walk[0]
    net.stack[0] = s
    depth = 1
    while depth:
        depth -= 1
        e = net.first[half, net.stack[depth]]
        while e >= 0:
            u = net.to[half, e]
            e = net.next[half, e]
            if net.seen[u] != walk:
                net.seen[u] = walk
                net.visits[0] += 1
                if net.evicted[u]:
                    cost_ns += net.cost_ns[u]
                    net.stack[depth] = u
                    depth += 1
                else:
                    net.found[count] = u
                    count += 1
    return count, cost_ns


@njit
def walked(net: Net, s: int, dependents: bool, enough: float) -> tuple[int, bool]:
    """``Exact.cost_ns``; ``dependents``: both halves count."""
    total = net.awaited_ns[s]
    for half in range(2 if dependents else 1):
        net.walk[0] += 1
        walk = net.walk[0]
        net.stack[0] = s
        depth = 1
        while depth:
            depth -= 1
            e = net.first[half, net.stack[depth]]
            while e >= 0:
                u = net.to[half, e]
                e = net.next[half, e]
                if net.evicted[u] and net.seen[u] != walk:
                    net.seen[u] = walk
                    net.visits[0] += 1
                    total += net.cost_ns[u]
                    net.stack[depth] = u
                    depth += 1
            if total > enough:
                return total, False
    return total, True


@njit
def demanded(net: Net, s: int) -> float:
    """``Demand.cost_ns``."""
    wanting = 0 if net.dropped[s] else 1
    net.walk[0] += 1
    walk = net.walk[0]
    net.stack[0] = s
    depth = 1
    while depth:
        depth -= 1
        e = net.first[DEPENDENTS, net.stack[depth]]
        while e >= 0:
            u = net.to[DEPENDENTS, e]
            e = net.next[DEPENDENTS, e]
            if net.evicted[u] and net.seen[u] != walk:
                net.seen[u] = walk
                net.visits[0] += 1
                if net.dropped[u]:
                    net.stack[depth] = u
                    depth += 1
                else:
                    wanting += 1
    if not wanting:
        return 0.0
    twice = 2 * net.cost_ns[s]
    net.walk[0] += 1
    walk = net.walk[0]
    net.stack[0] = s
    depth = 1
    while depth:
        depth -= 1
        e = net.first[DEPS, net.stack[depth]]
        while e >= 0:
            u = net.to[DEPS, e]
            e = net.next[DEPS, e]
            if net.evicted[u] and net.seen[u] != walk:
                net.seen[u] = walk
                net.visits[0] += 1
                twice += 2 * net.cost_ns[u] if net.dropped[u] else net.cost_ns[u]
                net.stack[depth] = u
                depth += 1
    return float(max(1, twice)) * float(wanting + 1)


@njit
def components(net: Net, forest: Forest, s: int) -> int:
    """``UnionFind.cost_ns``."""
    total = 0
    net.walk[0] += 1
    for half in range(2):
        e = net.first[half, s]
        while e >= 0:
            net.visits[0] += 1
            u = net.to[half, e]
            e = net.next[half, e]
            if net.evicted[u]:
                root = find(net, forest, forest.node[u])
                if forest.seen[root] != net.walk[0]:
                    forest.seen[root] = net.walk[0]
                    total += forest.sum[root]
    return total


@njit
def produced(net: Net, forest: Forest, s: int) -> int:
    """``Producers.cost_ns``."""
    total = 0
    for kind in range(DEPS, SIBLINGS + 1, SIBLINGS - DEPS):
        e = net.first[kind, s]
        while e >= 0:
            net.visits[0] += 1
            u = net.to[kind, e]
            e = net.next[kind, e]
            if net.evicted[u]:
                total += max(forest.sum[find(net, forest, forest.node[u])], net.cost_ns[u])
    return total


@njit
def find(net: Net, forest: Forest, node: int) -> int:
    """``UnionFind._find``."""
    while forest.parent[node] != node:
        forest.parent[node] = forest.parent[forest.parent[node]]  # halve the path
        node = forest.parent[node]
        net.visits[0] += 1
    return node


@njit
def cheapest(
    slots: Slots, net: Net, forest: Forest, used: int, now: float, changes: int, kind: int, dependents: bool, members: int,
    staleness: bool, capped: bool, oldest: bool, sized: bool,
) -> tuple[int, int]:  # fmt: skip
    """``Pool.pick``: the slot, and how many scores a scan would have computed.

    used        slots that may hold something
    dependents  what is below counts, too, in sums over e*
    oldest      of equals these go
    """
    cap = median_stale(slots, used, now) if capped else math.inf
    size, accessed, weight, score = slots.size, slots.accessed, slots.weight, slots.score
    for i in range(used):
        below = 1.0
        if staleness:
            below = min(now - accessed[i], cap)
        if sized:
            below *= size[i]
        weight[i] = below
        priced = slots.barrier[i] == 0.0 and below != 0.0
        score[i] = slots.numerator[i] / (below if below != 0.0 else 1.0) if priced else math.inf
        if not score[i] < math.inf:  # 0 / 0, among others
            score[i] = math.inf
    blocks = (used + BLOCK - 1) // BLOCK
    for b in range(blocks):
        settle(slots, b, used)
    while True:
        lowest = math.inf
        for b in range(blocks):
            lowest = min(lowest, slots.lowest[b])
        chosen = -1
        if lowest == 0.0:  # the first of these goes if it is 0 indeed, whatever the others are
            chosen = first_of(slots, used, lowest)
        if kind == LOCAL or lowest == math.inf:
            break
        if not refined(slots, net, forest, used, changes, kind, dependents, lowest, chosen):
            break
    if chosen >= 0:
        earlier = 0
        for i in range(used):
            if slots.barrier[i] == 0.0 and slots.ordered[i] <= slots.ordered[chosen]:
                earlier += 1
        return chosen, min(earlier, members)
    return last_of(slots, used, lowest, oldest and lowest < math.inf), members


@njit
def settle(slots: Slots, b: int, used: int) -> None:
    """Find the least score of a block."""
    lowest = math.inf
    for i in range(b * BLOCK, min(used, (b + 1) * BLOCK)):
        lowest = min(lowest, slots.score[i])
    slots.lowest[b] = lowest


@njit
def refined(
    slots: Slots, net: Net, forest: Forest, used: int, changes: int, kind: int, dependents: bool, lowest: float, chosen: int
) -> bool:
    """``Pool._refine`` for bounds that stand at the minimum, if some do; ``chosen``: for it alone, unless that is -1."""
    count, between = 0, slots.between  # scratch for numbers of slots, too
    for b in range((used + BLOCK - 1) // BLOCK):
        if slots.lowest[b] == lowest:
            for i in range(b * BLOCK, min(used, (b + 1) * BLOCK)):
                if slots.score[i] == lowest and slots.exact_at[i] != changes and (chosen < 0 or chosen == i):
                    between[count] = i
                    count += 1
                    slots.score[i] = math.inf
            settle(slots, b, used)
    if not count:
        return False
    rival = math.inf
    for b in range((used + BLOCK - 1) // BLOCK):
        rival = min(rival, slots.lowest[b])
    for a in range(count):
        i = int(between[a])
        local, below = slots.local[i], slots.weight[i]
        most = rival * below
        if slots.numerator[i] > most:
            most = slots.numerator[i]
        # Twice as far as needed, so that bounds refined again and again do not walk the same storages too often.
        enough = 2.0 * most - local
        exact = True
        if kind == WALKS:
            total, exact = walked(net, slots.storage[i], dependents, enough)
            above_line = local + total
        elif kind == DEMAND:
            above_line = local + demanded(net, slots.storage[i])
        elif kind == PRODUCERS:
            above_line = local + produced(net, forest, slots.storage[i])
        else:
            above_line = local + components(net, forest, slots.storage[i])
        if exact:
            slots.exact_at[i] = changes
        slots.numerator[i] = above_line
        slots.score[i] = above_line / below
        b = i // BLOCK
        slots.lowest[b] = min(slots.lowest[b], slots.score[i])
    return True


@njit
def first_of(slots: Slots, used: int, lowest: float) -> int:
    """Of the slots with this score, the one whose storage joined first."""
    chosen = -1
    for b in range((used + BLOCK - 1) // BLOCK):
        if slots.lowest[b] == lowest:
            for i in range(b * BLOCK, min(used, (b + 1) * BLOCK)):
                if slots.score[i] == lowest and (chosen < 0 or slots.ordered[i] < slots.ordered[chosen]):
                    chosen = i
    return chosen


@njit
def last_of(slots: Slots, used: int, lowest: float, oldest: bool) -> int:
    """Of the members with this score, the one that joined last; of the ``oldest`` ones, if that is asked."""
    chosen = -1
    for b in range((used + BLOCK - 1) // BLOCK):
        if slots.lowest[b] == lowest:
            for i in range(b * BLOCK, min(used, (b + 1) * BLOCK)):
                if slots.score[i] != lowest or slots.barrier[i] != 0.0:
                    continue
                if chosen >= 0 and oldest and slots.accessed[i] != slots.accessed[chosen]:
                    if slots.accessed[i] < slots.accessed[chosen]:
                        chosen = i
                elif chosen < 0 or slots.ordered[i] > slots.ordered[chosen]:
                    chosen = i
    return chosen


@njit
def median_stale(slots: Slots, used: int, now: float) -> float:
    """The median of the staleness of all members. From one search to the next it is an access or two further."""
    between = slots.between
    while True:
        low, high = slots.bracket
        members = before = count = 0
        for i in range(used):
            if slots.barrier[i] == 0.0:
                members += 1
                if slots.accessed[i] < low:
                    before += 1
                elif slots.accessed[i] <= high:
                    between[count] = slots.accessed[i]
                    count += 1
        middle = members // 2 - before  # of an even number, the later one
        if middle < count and middle >= 1 - members % 2:
            break
        slots.bracket[0], slots.bracket[1] = -math.inf, math.inf
    select(between[:count], middle)
    later = earlier = between[middle]
    if not members % 2:
        earlier = between[0]
        for i in range(1, middle):
            earlier = max(earlier, between[i])
    left, right = max(0, middle - NEAR), min(count - 1, middle + NEAR)
    select(between[:middle], left)
    select(between[middle:count], right - middle)
    slots.bracket[0], slots.bracket[1] = between[left], between[right]
    return float((now - later) + (now - earlier)) / 2


@njit
def select(numbers: Floats, at: int) -> None:
    """Put the number that belongs at ``at`` there, what is not larger left of it, what is not smaller right of it (Hoare)."""
    start, stop = 0, numbers.size
    while stop - start > 1:
        pivot = numbers[(start + stop) // 2]
        left, right = start, stop - 1
        while left <= right:
            while numbers[left] < pivot:
                left += 1
            while numbers[right] > pivot:
                right -= 1
            if left <= right:
                numbers[left], numbers[right] = numbers[right], numbers[left]
                left += 1
                right -= 1
        if at <= right:
            stop = right + 1
        elif at >= left:
            start = left
        else:
            return


@njit
def price(
    slots: Slots, net: Net, forest: Forest, used: int, clock: int, kind: int, dependents: bool, staleness: bool, owners: Ints
) -> None:
    """The score of each member, as ``Pool.prices`` has it, in two parts in ``found``: whole ones, and units of 1 / WHOLE.

    For other owners the first is -1.
    """
    for s in owners:
        if s >= 0:
            net.found[2 * s] = -1
    for i in range(used):
        if slots.barrier[i] != 0.0:
            continue
        s = slots.storage[i]
        cost_ns = int(slots.local[i])
        if kind == WALKS:
            cost_ns += walked(net, s, dependents, math.inf)[0]
        elif kind == PRODUCERS:
            cost_ns += produced(net, forest, s)
        elif kind == COMPONENTS:
            cost_ns += components(net, forest, s)
        below = max(1, clock - int(slots.accessed[i])) if staleness else 1
        left = (cost_ns % below) << 16  # WHOLE at once might not fit
        net.found[2 * s] = cost_ns // below
        net.found[2 * s + 1] = (left // below << 16) + ((left % below << 16) // below)


@njit
def cheapest_run(net: Net, owners: Ints, sizes: Ints, need: int) -> tuple[int, int]:
    """``cheapest_window`` of pieces at the prices in ``found``; (0, 0): none."""
    lowest, lowest_part = -1, 0
    first = behind = size = whole = part = start = 0
    for end in range(owners.size):
        s = owners[end]
        if s >= 0 and net.found[2 * s] >= 0:
            whole += net.found[2 * s]
            part += net.found[2 * s + 1]
        elif s != FREE:
            start, size, whole, part = end + 1, 0, 0, 0
            continue
        size += sizes[end]
        while size - sizes[start] >= need:
            size -= sizes[start]
            s = owners[start]
            if s >= 0:
                whole -= net.found[2 * s]
                part -= net.found[2 * s + 1]
            start += 1
        if size >= need:
            now, now_part = whole + part // WHOLE, part % WHOLE
            if lowest < 0 or now < lowest or (now == lowest and now_part < lowest_part):
                first, behind, lowest, lowest_part = start, end + 1, now, now_part
    return first, behind
