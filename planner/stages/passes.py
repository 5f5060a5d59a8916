"""Schedules in several passes, where not all outputs fit beside what makes them.

Gradients of weights are outputs: once made, they stay to the end. Where there is no room for all of them beside the largest ops,
those must have run for the last time before the rest of the gradients is made. So there is a moment between two passes, after
which only ops run that fit beside all outputs, and what is in memory then separates the others from the outputs. A minimum cut
(``planner.least.cuts``) is the least that can be in memory: gradients that are small or hard to make and, in place of the others,
the few activations that they can be made from. What comes before is the same problem again, with that for outputs.

In graph order, gradients that a later pass makes run for the first time in the first one, in vain. So these schedules are as the
passes want them, in another order of first executions; list walks make of them what graph order allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from graphs.ir import Graph, Op, Value
from planner.least.pebbling import fitting
from planner.on_demand import min_cuts, walk_search
from planner.process.clock import now_s
from planner.schedule import computes, in_graph_order, makers, put_in_graph_order

# Of the room beside what is resident, what the passes are cut for: with less, what is between them is less, and dearer to go on
# from; single ops that fit beside all that is to be there may still not be all that is needed at a time.
SHARES = (0.95, 0.8, 0.9, 0.7, 1.0)
MOST = 20  # passes


def in_passes(graph: Graph, budget_bytes: int, *, deadline: float) -> Iterator[list[int]]:
    """Runs in two passes and more that fit the budget, each op among them, in an order of first executions of their own."""
    tried = set[tuple[frozenset[int], ...]]()
    room_bytes = budget_bytes - graph.resident_bytes
    for share in SHARES:
        if now_s() >= deadline:
            return
        held = _between(graph, graph.resident_bytes + int(share * room_bytes))
        if len(held) > 1 and tuple(held) not in tried:
            tried.add(tuple(held))
            runs = _runs(graph, held, budget_bytes, deadline)
            if runs is not None and _draws_in_order(graph, runs):
                yield runs


def _draws_in_order(graph: Graph, runs: list[int]) -> bool:
    """Whether random numbers are drawn, and the outside world acted on, in graph order, as ``planner.simulate`` asks for."""
    return all(
        in_graph_order(v for v in runs if ops[v]) for ops in ([op.random for op in graph.ops], [op.effect for op in graph.ops])
    )


def _between(graph: Graph, budget_bytes: int) -> list[frozenset[int]]:
    """What is in memory when each pass ends, from the first one to the last, which makes the outputs."""
    cuts = min_cuts()(graph)
    size = np.array([value.size_bytes for value in graph.values], np.int64)
    touched = [[x for x in (*op.inputs, *op.outputs) if graph.producer[x] >= 0] for op in graph.ops]
    needs = [graph.resident_bytes + op.workspace_bytes + int(size[xs].sum()) for op, xs in zip(graph.ops, touched, strict=True)]
    once = {v for v, op in enumerate(graph.ops) if op.effect}
    held = [frozenset(x for x in graph.outputs if graph.producer[x] >= 0)]
    while len(held) < MOST:
        held_bytes = int(size[list(held[-1])].sum())
        large = {
            v
            for v, (need, xs) in enumerate(zip(needs, touched, strict=True))
            if need + held_bytes - sum(int(size[x]) for x in xs if x in held[-1]) > budget_bytes
        }
        least_bytes, values = cuts.cut(large | once, held[-1], late=True) if large else (held_bytes, held[-1])
        if least_bytes >= held_bytes:
            break
        held.append(values)
    return held[::-1]


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass does.

    graph  its ops; the first one, if what is held at its begin is not nothing, gives that and cannot be repeated
    ops    the number in the whole graph of each of these; -1 for the first one then
    """

    graph: Graph
    ops: list[int]


def _runs(graph: Graph, held: list[frozenset[int]], budget_bytes: int, deadline: float) -> list[int] | None:
    """All passes, one after the other; None where one does not fit."""
    ends = list(itertools.pairwise((frozenset[int](), *held)))
    ops_of = [makers(graph, after, graph.resident | before) for before, after in ends]
    rest = set(range(len(graph.ops))).difference(*ops_of)  # what no output needs runs in the first pass
    ops_of[0] = sorted({*ops_of[0], *rest, *makers(graph, [x for v in rest for x in graph.ops[v].inputs], graph.resident)})
    runs: list[int] = []
    for (before, after), ops in zip(ends, ops_of, strict=True):
        part = _pass(graph, ops, before, after)
        fitted = _fitted(part.graph, budget_bytes, deadline)
        if fitted is None:
            return None
        runs += [part.ops[v] for v in fitted if part.ops[v] >= 0]
    return runs


def _pass(graph: Graph, ops: list[int], before: Collection[int], after: Collection[int]) -> _Pass:
    """Some ops alone, with what is held at their begin, and what is to be at their end."""
    number: dict[int, int] = {}
    values: list[Value] = []

    def numbered(x: int) -> int:
        if x not in number:
            number[x] = len(values)
            values.append(graph.values[x])
        return number[x]

    def copied(x: int) -> int:
        values.append(graph.values[x])
        return len(values) - 1

    resident = frozenset(map(numbered, sorted(graph.resident)))
    given = [Op("given", (), tuple(map(numbered, sorted(before))), 0, effect=True)] if before else []
    part = [
        replace(
            graph.ops[v],
            name=str(v),
            inputs=tuple(map(numbered, graph.ops[v].inputs)),
            outputs=tuple(copied(x) if x in before else numbered(x) for x in graph.ops[v].outputs),
        )
        for v in ops
    ]
    outputs = frozenset(number[x] for x in after)
    return _Pass(Graph(graph.name, (*given, *part), tuple(values), resident, outputs), [-1] * len(given) + ops)


def _fitted(graph: Graph, budget_bytes: int, deadline: float) -> list[int] | None:
    """Runs of a pass that fit; by list walks or, where they get stuck, by pebbling."""
    walks = walk_search()(graph, budget_bytes, seed=0)
    walks.start(deadline=deadline)
    if walks.runs is None:
        schedule = next(fitting(graph, budget_bytes, time_limit_s=deadline - now_s()), None)
        if schedule is None:
            return None
        found = list(computes(schedule))
        walks.follow(put_in_graph_order(graph, found), deadline=deadline)
        if walks.runs is None:
            return found
    return [int(v) for v in walks.runs]
