"""Twremat's sequences: a tree decomposition halves the graph again and again, then the budget is spent to undo recomputation.

Source: Kumar, Purohit, Svitkina, Vee and Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019).

1. A tree decomposition (min-fill) of the graph of ops, balanced: each bag taken as the root of what is left of the tree
   leaves parts of at most half the ops, so there are at most floor(log2 n) + 1 levels of bags, each a separator.
2. ``remat``: the ops of a bag run in graph order; what one reads from the parts below is made by recursion just before and
   forgotten right after. With w the width and d the most ops that one op reads from, no moment needs more than
   (w + 1 + d) values a level, plus the graph's outputs.
3. Budget passes: replay the sequence, freeing only what the budget forces out (cheapest to make per byte first), and skip
   every run whose outputs are still there; drop the runs that this leaves without readers; repeat.

This is the published algorithm, and what is tried first. Two variants hold more or less of what is shared, and are tried after
it: the tree cut at a level (the parts there run whole in graph order and forget nothing; cut at the root is keep-all), and the
outputs asked for one after the other (ops that nobody reads from count as outputs: every op has to run).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import networkx as nx
from networkx.algorithms.approximation.treewidth import min_fill_in_heuristic, treewidth_decomp

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.schedule import Compute, Schedule, with_frees

PASSES = 6  # as published
MAX_RUNS = 1_000_000  # a longer sequence is not written out (wide bags over many levels: the length can be exponential in levels)

CHUNK = 1_000  # runs of a pass between two looks at the clock


def halve(search: Incumbent, seed: int = 0, *, variants: bool = True) -> None:
    """Offer the published sequence, then its variants from the root down, each with its budget passes. May raise TimeoutError.

    Notes: ``width`` of the decomposition, ``levels`` of the balanced tree, ``needs_bytes`` (least peak of any sequence written
    out), ``too_long`` (what was not).
    """
    graph, budget_bytes = search.graph, search.budget_bytes
    if search.done():
        return
    tree = decompose(graph, seed=seed, deadline=search.deadline)
    search.notes |= {"width": tree.width, "levels": tree.levels}
    cuts = (None, *range(tree.levels - 1))
    for cut, together in itertools.product(cuts, (True, False)) if variants else [(None, True)]:
        phase = ("uncut" if cut is None else f"cut at level {cut}") + ("" if together else ", outputs one by one")
        runs = remat(graph, tree, cut=cut, together=together, max_runs=MAX_RUNS, deadline=search.deadline)
        if runs is None:
            search.notes.setdefault("too_long", []).append(phase)
            continue
        runs = without_dead(graph, runs)
        for passes in range(PASSES + 1):
            if not search.in_time(runs):
                break
            peak_bytes = _offer(search, with_frees(graph, runs), phase)
            if search.done():
                return
            if passes == PASSES or (passes and peak_bytes > budget_bytes):
                break
            before = len(runs)
            runs = without_dead(graph, forward_pass(graph, runs, budget_bytes, deadline=search.deadline))
            if len(runs) == before:
                break


def _offer(search: Incumbent, schedule: Schedule, phase: str) -> int:
    """Offer a schedule of the method's own; its peak, of which the least is noted."""
    peak_bytes = search.offer(schedule, phase).peak_bytes
    search.notes["needs_bytes"] = min(peak_bytes, search.notes.get("needs_bytes", peak_bytes))
    return peak_bytes


# ---------------------------------------------------------------------------------------------- the decomposition


@dataclass(frozen=True, eq=False)
class Part:
    """A node of the balanced tree: a bag, less what the bags above it hold, and the parts it separates.

    level     0 at the top
    ops       the separator: ops of the bag, ascending
    within    every op of this node and below
    children  the parts that ``ops`` separates
    """

    level: int
    ops: tuple[int, ...]
    within: frozenset[int]
    children: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Tree:
    """A balanced tree decomposition of a graph's ops.

    parts   at the top; each op is in one of them
    width   most ops in a bag - 1
    levels  of parts
    """

    parts: tuple[Part, ...]
    width: int
    levels: int


_Call = tuple[Part, tuple[int, ...]]  # a part, and ops of it whose outputs are wanted


def decompose(graph: Graph, *, seed: int = 0, deadline: float = inf) -> Tree:
    """Min-fill tree decomposition of the undirected graph in which two ops are joined where one reads from the other, balanced.

    At every level the bag is the root that leaves the smallest largest part: none has more than half of the ops.

    deadline  as ``planner.process.clock.now_s`` tells it: raises TimeoutError where ops are left to eliminate then
    """

    def least_fill(left: dict[int, set[int]]) -> int | None:
        if now_s() >= deadline:
            raise TimeoutError
        chosen: int | None = min_fill_in_heuristic(left)
        return chosen

    vertices = list(range(len(graph.ops)))
    if seed:
        Random(seed).shuffle(vertices)
    joined = nx.Graph()
    joined.add_nodes_from(vertices)
    joined.add_edges_from((graph.producer[v], i) for i, op in enumerate(graph.ops) for v in op.inputs if graph.producer[v] >= 0)
    if not vertices:
        return Tree((), 0, 0)
    width, bags = treewidth_decomp(joined, least_fill)
    order = sorted(bags, key=sorted)  # bags are sets: an order that does not depend on hashing
    number = {bag: b for b, bag in enumerate(order)}
    parts = _balanced(order, [sorted(number[other] for other in bags[bag]) for bag in order])
    levels, below = 0, parts
    while below:
        levels, below = levels + 1, tuple(child for part in below for child in part.children)
    return Tree(parts, width, levels)


def _balanced(bags: Sequence[frozenset[int]], neighbours: Sequence[Sequence[int]]) -> tuple[Part, ...]:
    """The parts at the top: one, but for ops that nothing joins where a bag in between is used up."""
    gone = [False] * len(bags)  # taken as separators, or used up: all their ops are in bags above

    def component(first: int) -> list[tuple[int, int]]:
        """(bag, the bag it was reached from) for all bags still connected to ``first``, parents first."""
        found = [(first, -1)]
        for b, came in found:
            found.extend((c, b) for c in neighbours[b] if c != came and not gone[c])
        return found

    def parts(firsts: Sequence[int], taken: frozenset[int], level: int) -> tuple[Part, ...]:
        """The parts of what is connected to any of ``firsts``, less the ops taken."""
        reached = [b for first in firsts for b, _ in component(first)]
        for b in reached:
            gone[b] = bags[b] <= taken
        made = []
        for b in reached:
            if not gone[b]:
                made.append(part(component(b), taken, level))
        return tuple(made)

    def part(within: list[tuple[int, int]], taken: frozenset[int], level: int) -> Part:
        # An op weighs 1, in its topmost bag: what is below a bag then weighs the ops that are nowhere else.
        left: set[int] = set()
        below: dict[int, int] = {}
        for b, _ in within:
            own = bags[b] - taken - left
            below[b] = len(own)
            left |= own
        largest = dict.fromkeys(below, 0)  # the largest part that each bag as separator leaves
        for b, came in reversed(within):
            largest[b] = max(largest[b], len(left) - below[b])
            if came >= 0:
                below[came] += below[b]
                largest[came] = max(largest[came], below[b])
        centroid = min(largest, key=lambda b: (largest[b], b))
        gone[centroid] = True
        ops = bags[centroid] - taken
        children = parts([c for c in neighbours[centroid] if not gone[c]], taken | ops, level + 1)
        return Part(level, tuple(sorted(ops)), frozenset(left), children)

    return parts([0], frozenset(), 0)


# ------------------------------------------------------------------------------------------------- the sequence


def remat(
    graph: Graph,
    tree: Tree,
    *,
    cut: int | None = None,
    together: bool = True,
    max_runs: int = MAX_RUNS,
    deadline: float = inf,
) -> list[int] | None:
    """The ops in the order they run, each at least once; ``with_frees`` says what is forgotten when.

    cut       level at which parts run whole, in graph order (None: no cut)
    together  ask for all outputs at once; else one after the other, which holds less and runs more
    max_runs  None is returned where the sequence has more runs
    deadline  as ``planner.process.clock.now_s`` tells it: raises TimeoutError where there is more to write then

    Random ops, and ops with an effect, run for the first time in graph order, the latter only once.
    """
    writer = _Writer(graph, tree, cut, deadline)
    # Every op has to run, so ops that nobody reads from are wanted too; what they make is forgotten at once.
    wanted = [
        i
        for i, op in enumerate(graph.ops)
        if not any(graph.consumers[v] for v in op.outputs) or not graph.outputs.isdisjoint(op.outputs)
    ]
    calls = [wanted] if together else [[i] for i in wanted]
    if sum(map(writer.length, calls)) > max_runs:
        return None
    runs = [i for call in calls for i in writer.write(call)]

    # Ops that must keep an order are asked for one after the other first, as far as the sequence has them in another.
    early = [[i] for i in range(_disorder(graph, runs) + 1) if graph.ops[i].random or graph.ops[i].effect]
    if sum(map(writer.length, early)) + len(runs) > max_runs:
        return None
    runs = [*(i for call in early for i in writer.write(call)), *runs]
    once: set[int] = set()
    kept = []
    for i in runs:
        if graph.ops[i].effect:
            if i in once:
                continue
            once.add(i)
        kept.append(i)
    return kept


def _disorder(graph: Graph, runs: Sequence[int]) -> int:
    """The last random op, or op with an effect, whose first run comes after that of a later one of its kind; or -1."""
    last = -1
    for flagged in ([op.random for op in graph.ops], [op.effect for op in graph.ops]):
        latest = -1
        for i in dict.fromkeys(runs):
            if flagged[i]:
                if i < latest:
                    last = max(last, i)
                latest = max(latest, i)
    return last


class _Writer:
    """Writes the sequences of ``remat``; those asked for again are remembered."""

    def __init__(self, graph: Graph, tree: Tree, cut: int | None, deadline: float) -> None:
        self._deadline = deadline
        self._reads = [tuple(sorted({graph.producer[v] for v in op.inputs} - {-1})) for op in graph.ops]
        self._cut = inf if cut is None else cut
        self._parts: list[list[Part]] = [[] for _ in graph.ops]  # those an op lies in, by level
        todo = list(tree.parts)
        while todo:
            part = todo.pop()
            for i in part.within:
                self._parts[i].append(part)
            todo.extend(part.children)
        self._tasks: dict[_Call, list[int | _Call]] = {}
        self._lengths: dict[_Call, int] = {}
        self._written: dict[_Call, list[int]] = {}

    def length(self, wanted: Iterable[int]) -> int:
        """Runs in ``write(wanted)``."""
        return sum(map(self._length, self._calls(wanted, 0)))

    def write(self, wanted: Iterable[int]) -> list[int]:
        """Runs after which the outputs of these ops are there."""
        return [i for call in self._calls(wanted, 0) for i in self._write(call)]

    def _length(self, call: _Call) -> int:
        if call not in self._lengths:
            self._lengths[call] = sum(1 if isinstance(task, int) else self._length(task) for task in self._expand(call))
        return self._lengths[call]

    def _write(self, call: _Call) -> list[int]:
        if call not in self._written:
            runs: list[int] = []
            for task in self._expand(call):
                if isinstance(task, int):
                    runs.append(task)
                else:
                    runs.extend(self._write(task))
            self._written[call] = runs
        return self._written[call]

    def _expand(self, call: _Call) -> list[int | _Call]:
        """What makes the outputs wanted, in order: ops of the separator to run, and calls into the parts below it."""
        if call in self._tasks:
            return self._tasks[call]
        if now_s() >= self._deadline:
            raise TimeoutError
        part, wanted = call
        target = self._needed(part, wanted)
        tasks: list[int | _Call]
        if part.level >= self._cut:
            tasks = list[int | _Call](target)
        else:
            tasks = []
            own = set(part.ops)
            for i in target:
                if i in own:
                    tasks.extend(self._calls((p for p in self._reads[i] if p in part.within), part.level + 1))
                    tasks.append(i)
            tasks.extend(self._calls(wanted, part.level + 1))
        self._tasks[call] = tasks
        return tasks

    def _needed(self, part: Part, wanted: Iterable[int]) -> list[int]:
        """Ops of the part that ``wanted`` needs, ascending. What they read from elsewhere, the bags above hold."""
        found = set(wanted)
        todo = list(found)
        while todo:
            for p in self._reads[todo.pop()]:
                if p in part.within and p not in found:
                    found.add(p)
                    todo.append(p)
        return sorted(found)

    def _calls(self, wanted: Iterable[int], level: int) -> list[_Call]:
        """One call for each part of this level that holds any of ``wanted``, ascending."""
        inside: dict[Part, list[int]] = {}
        for i in wanted:
            if len(self._parts[i]) > level:
                inside.setdefault(self._parts[i][level], []).append(i)
        return [(part, tuple(ops)) for part, ops in inside.items()]


# ------------------------------------------------------------------------------------------------ the budget passes


def without_dead(graph: Graph, runs: Sequence[int]) -> list[int]:
    """The runs less those whose outputs nobody reads before they are made again (the backward pass of the paper).

    An op keeps its only run, and a random op its first.
    """
    count = [0] * len(graph.ops)
    first: dict[int, int] = {}
    for at, i in enumerate(runs):
        count[i] += 1
        first.setdefault(i, at)
    needed = set(graph.outputs)
    kept = []
    for at in range(len(runs) - 1, -1, -1):
        i = runs[at]
        op = graph.ops[i]
        if needed.isdisjoint(op.outputs) and count[i] > 1 and not (op.random and first[i] == at):
            count[i] -= 1
            continue
        kept.append(i)
        needed.difference_update(op.outputs)
        needed.update(op.inputs)
    kept.reverse()
    return kept


def forward_pass(graph: Graph, runs: Sequence[int], budget_bytes: int, *, deadline: float = inf) -> list[int]:
    """The runs less those whose outputs are still there when values are dropped only for want of room.

    Values that the sequence is done with stay as leftovers until a run needs their bytes; then go first those never read
    again, then those of least time per byte. Where the sequence fits the budget as it is, what is returned does.

    deadline  as for ``remat``
    """
    size = [value.size_bytes for value in graph.values]
    frees: list[list[int]] = []  # after each run
    reads_left = [0] * len(graph.values)  # of any copy
    for step in with_frees(graph, runs):
        if isinstance(step, Compute):
            frees.append([])
            for v in graph.ops[step.op].inputs:
                reads_left[v] += 1
        else:
            frees[-1].append(step.value)

    present: set[int] = set()
    leftover: dict[int, float] = {}  # what is present though the sequence has freed it -> its key
    queue: list[tuple[float, int]] = []  # leftovers with bytes, smallest key first; some entries are outdated
    held = graph.resident_bytes
    ran = [False] * len(graph.ops)
    kept = []
    for at, i in enumerate(runs):
        if not at % CHUNK and now_s() >= deadline:
            raise TimeoutError
        op = graph.ops[i]
        freed = frees[at]
        if ran[i] and all(v in present or v in freed for v in op.outputs):  # an output freed at once is read by nobody
            for v in op.outputs:
                leftover.pop(v, None)
        else:
            for v in op.outputs:  # an old copy; a leftover, since the sequence makes a new one
                if v in present:
                    present.remove(v)
                    held -= size[v]
                    del leftover[v]
            made_bytes = sum(size[v] for v in op.outputs)
            excess = held + made_bytes + op.workspace_bytes - budget_bytes
            while excess > 0 and queue:
                key, v = heapq.heappop(queue)
                if leftover.get(v) == key:
                    del leftover[v]
                    present.remove(v)
                    held -= size[v]
                    excess -= size[v]
            kept.append(i)
            ran[i] = True
            present.update(op.outputs)
            held += made_bytes
        for v in op.inputs:
            reads_left[v] -= 1
        for v in freed:
            if v in present:
                maker = graph.ops[graph.producer[v]]
                leftover[v] = key = 0.0 if not reads_left[v] else maker.time_ns / size[v] if size[v] else inf
                if size[v]:
                    heapq.heappush(queue, (key, v))
    return kept
