"""Values that lie between ops and other values, in the fewest bytes: minimum cuts of a graph, by OR-Tools' maximum flows.

A network has an arc for each value, as wide as the value is large, from what makes it to what reads it; flow begins at the
source ops and ends behind the target values. The most that flows is the least that holds it up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from graphs.ir import Graph
from planner.process.flat import Flags, Ints, reads_and_makes


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut and a maximum flow.

    total    of the costs of ``values``, and of what flows
    values   that separate, in op order; those without cost may include some that need not be there
    passing  how much flows through each value of the graph
    """

    total: int
    values: Ints
    passing: Ints


class MinCuts:
    """Of one graph, one after the other."""

    def __init__(self, graph: Graph) -> None:
        in_rows, inputs, out_rows, outputs, self._producer, self._size = reads_and_makes(graph)
        self._ops, self._values = len(graph.ops), len(graph.values)
        # Nodes: the ops; of each value one for what flows into it, and then one for what flows out.
        op, value = np.arange(self._ops), self._ops + 2 * np.arange(self._values)
        self._source = self._ops + 2 * self._values
        self._sink = self._source + 1
        self._into, self._out = value, value + 1
        self._made = outputs  # resident values are on no path
        self._tails = np.concatenate((value[outputs], self._out[inputs], np.repeat(op, np.diff(out_rows)))).astype(np.int32)
        self._heads = np.concatenate((self._out[outputs], np.repeat(op, np.diff(in_rows)), value[outputs])).astype(np.int32)

    def cut(
        self, sources: Collection[int], targets: Collection[int], free: Collection[int] = (), *, late: bool = False
    ) -> tuple[int, frozenset[int]]:
        """The least bytes, and values of so many, that lie on all paths from the outputs of source ops to target values.

        Both ends may be cut. Resident values are on no path. Of values without bytes there are as few as will do.

        free  values that separate, too, cost nothing, and are not among those returned
        late  of several cuts, the one closest to the targets; else that closest to the sources
        """
        is_source = np.zeros(self._ops, np.bool_)
        is_source[list(sources)] = True
        ends, costs = np.array(list(targets), np.int64), self._size.copy()
        costs[list(free)] = 0
        found = self.least(is_source, ends, costs, late=late)
        values = np.setdiff1d(found.values, list(free))
        large = values[self._size[values] > 0]
        if large.size < values.size:
            costs = np.where(self._size > 0, self._values + 1, 1)
            costs[[*free, *large.tolist()]] = 0
            fewest = self.least(is_source, ends, costs, late=late).values
            values = np.concatenate((large, fewest[costs[fewest] > 0]))
        return found.total, frozenset(values.tolist())

    def least(self, is_source: Flags, targets: Ints, costs: Ints, *, late: bool = False) -> Cut:
        """The cut of least cost, for any costs of values whose sum is below 2^62."""
        made = self._made
        node = np.arange(self._sink + 1, dtype=np.int32)
        node[: self._ops][is_source] = self._source  # one node all of them
        node[self._out[targets]] = self._sink
        tails, heads = node[self._tails], node[self._heads]
        widths = np.full(tails.size, int(costs[made].sum()) + 1)  # more than can flow
        widths[: made.size] = costs[made]
        kept = (tails != heads) & (heads != self._source) & (tails != self._sink)
        tails, heads, passing = tails[kept], heads[kept], np.zeros(self._values, np.int64)
        if not ((tails == self._source).any() and (heads == self._sink).any()):
            return Cut(0, np.zeros(0, np.int64), passing)
        solver = SimpleMaxFlow()
        arcs = solver.add_arcs_with_capacity(tails, heads, widths[kept])
        status = solver.solve(self._source, self._sink)
        assert status == SimpleMaxFlow.OPTIMAL, status
        is_there = np.zeros(self._sink + 1, np.bool_)  # on the sink's side, or the source's
        is_there[solver.get_sink_side_min_cut() if late else solver.get_source_side_min_cut()] = True
        is_there = is_there[node]
        flowing = made[kept[: made.size]]
        passing[flowing] = solver.flows(arcs[: flowing.size])
        return Cut(solver.optimal_flow(), made[is_there[self._into[made]] != is_there[self._out[made]]], passing)
