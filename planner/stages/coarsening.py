"""A coarser graph: ops in a row that lose little by running only together are one op.

A schedule of it is one of the graph, with the same time, the same order of first executions and no higher peak. Dear decisions
(which layers or time steps run again, and when) take a few steps of a search there instead of dozens. It bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphs.ir import Graph, Op
from planner.process.clock import now_s

MOST_OPS = 20  # in a row that are looked at as one


@dataclass(frozen=True, slots=True)
class Coarse:
    """A graph, and what it is coarser than.

    graph   its values are those of the finer one that are resident, or wanted beyond the op of it that makes them, numbered anew
    starts  its op i stands for the ops starts[i] … starts[i + 1] - 1 of the finer one, in their order
    """

    graph: Graph
    starts: tuple[int, ...]

    def expand(self, runs: Iterable[int]) -> list[int]:
        """The runs in the finer graph that runs in this one stand for."""
        return [v for i in runs for v in range(self.starts[i], self.starts[i + 1])]


def coarsen(graph: Graph, lost_ns: float, extra_bytes: float, *, deadline: float = math.inf) -> Coarse:
    """As few ops as rows of up to ``MOST_OPS`` give, and of such ways the one that loses least.

    None reaches from the forward into the backward pass; what has an effect stays alone.

    lost_ns      what an op may take more than that part of it which one of its outputs needs, where its others are there
    extra_bytes  what its inputs, outputs and workspace may be more than what its parts, one after the other, need at once
    deadline     as ``planner.process.clock.now_s`` tells it; ops that are looked at later stay alone
    """
    count = len(graph.ops)
    last = [readers[-1] if readers else -1 for readers in graph.consumers]
    for x in graph.outputs:
        last[x] = count
    # Up to each op: the fewest ops, what they lose at the least, and where the last of them starts.
    best: list[tuple[float, float, int]] = [(0, 0.0, 0), *([(math.inf, math.inf, 0)] * count)]
    for start in range(count):
        fewest, lost_before, _ = best[start]
        most_ops = MOST_OPS if now_s() < deadline else 1
        for row in _rows(graph, last, start, most_ops, lost_ns):
            if fewest + 1 > best[row.end][0]:
                continue
            lost = row.lost_ns()
            if row.end == start + 1 or (lost <= lost_ns and row.extra_bytes() <= extra_bytes):
                best[row.end] = min(best[row.end], (fewest + 1, lost_before + lost, start))
    starts = [count]
    while starts[-1]:
        starts.append(best[starts[-1]][2])
    starts.reverse()
    return Coarse(_merged(graph, last, starts), tuple(starts))


def _rows(graph: Graph, last: Sequence[int], start: int, most_ops: int, lost_ns: float) -> Iterator[_Row]:
    """The row of one op, and longer ones as far as there may be some that lose no more."""
    row = _Row(graph, last, start)
    first = graph.ops[start]
    least_ns = math.inf  # what an output needs at most, however long the row becomes
    for end in range(start + 1, min(len(graph.ops), start + most_ops) + 1):
        op = graph.ops[end - 1]
        if end > start + 1 and (op.effect or first.effect or op.backward != first.backward):
            return
        row.add(op)
        if any(last[x] >= start + most_ops for x in op.outputs):
            least_ns = min(least_ns, row.needed_ns(end - 1))
        if end > start + 1 and row.time_ns - least_ns > lost_ns:
            return
        yield row


class _Row:
    """Ops ``start`` … ``end`` - 1 of a graph, to which the next ones can be added.

    last    for each value of the graph, the last op that reads it; one beyond all ops where it is an output, -1 where none does
    maker   for each value made in the row, the op
    inputs  what is made before the row, or resident, and read in it
    """

    def __init__(self, graph: Graph, last: Sequence[int], start: int) -> None:
        self.graph, self.last, self.start, self.end = graph, last, start, start
        self.time_ns = 0
        self.maker: dict[int, int] = {}
        self.inputs: dict[int, None] = {}

    def add(self, op: Op) -> None:
        """Add the next op."""
        self.inputs.update((x, None) for x in op.inputs if x not in self.maker)
        self.maker.update((x, self.end) for x in op.outputs)
        self.time_ns += op.time_ns
        self.end += 1

    @property
    def outputs(self) -> list[int]:
        """What is made in the row and wanted beyond it."""
        return [x for x in self.maker if self.last[x] >= self.end]

    def lost_ns(self) -> int:
        """What the row takes more than those of its ops that one of its outputs needs where its others are there; the most."""
        outputs = set(self.outputs)
        return max((self.time_ns - self.needed_ns(i, outputs) for i in {self.maker[x] for x in outputs}), default=0)

    def needed_ns(self, op: int, there: Collection[int] = ()) -> int:
        """Time of an op of the row with those in it that it needs."""
        needed, todo, time_ns = {op}, [op], 0
        while todo:
            i = todo.pop()
            time_ns += self.graph.ops[i].time_ns
            for x in self.graph.ops[i].inputs:
                maker = self.maker.get(x)
                if maker is not None and maker not in needed and x not in there:
                    needed.add(maker)
                    todo.append(maker)
        return time_ns

    def extra_bytes(self) -> int:
        """What it needs more where all that it reads is there until it is done."""
        read = {x for x in self.inputs if self.graph.producer[x] >= 0}
        return sum(self.graph.values[x].size_bytes for x in read) + self.held_bytes() - self.held_bytes(read)

    def held_bytes(self, read: Collection[int] = ()) -> int:
        """The most at once of what it makes, with workspaces, and of what it has ``read``, which goes after its last reader."""
        values, last = self.graph.values, self.last
        held = sum(values[x].size_bytes for x in read)
        most = 0
        for i in range(self.start, self.end):
            op = self.graph.ops[i]
            held += sum(values[x].size_bytes for x in op.outputs)
            most = max(most, held + op.workspace_bytes)
            gone = (x for x in (*op.inputs, *op.outputs) if last[x] <= i and (x in self.maker or x in read))
            held -= sum(values[x].size_bytes for x in gone)
        return most


def _merged(graph: Graph, last: Sequence[int], starts: Sequence[int]) -> Graph:
    """The graph of these rows."""
    rows = [_Row(graph, last, start) for start in starts[:-1]]
    for row, end in zip(rows, starts[1:], strict=True):
        for op in graph.ops[row.start : end]:
            row.add(op)
    wanted = sorted(graph.resident.union(*(row.outputs for row in rows)))
    number = {x: at for at, x in enumerate(wanted)}
    ops = []
    for row in rows:
        parts = graph.ops[row.start : row.end]
        ops.append(
            Op(
                name=parts[0].name,
                inputs=tuple(number[x] for x in row.inputs),
                outputs=tuple(number[x] for x in row.outputs),
                time_ns=row.time_ns,
                workspace_bytes=row.held_bytes() - sum(graph.values[x].size_bytes for x in row.outputs),
                kind=parts[0].kind,
                random=any(op.random for op in parts),
                effect=parts[0].effect,
                backward=parts[0].backward,
            )
        )
    return Graph(
        graph.name,
        tuple(ops),
        tuple(graph.values[x] for x in wanted),
        frozenset(number[x] for x in graph.resident),
        frozenset(number[x] for x in graph.outputs),
        graph.device,
    )
