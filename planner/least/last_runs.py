"""What every schedule needs while the last of some ops runs.

Let A be any set of ops. In any schedule, some op b of A is the last of them to run. While b runs for the last time, its inputs,
its outputs and its workspace are there, and no op of A runs after it. So each path from A, over values and ops, to an output of
the graph goes through a value that is there then: the output is there in the end, and what is not there has to be made by ops
that are yet to run, back to where one of A would be. Hence no schedule has a smaller peak than

    min over b in A of f(b, A) = resident bytes + workspace(b) + bytes(inputs and outputs of b)
                                 + the least bytes of values that, with those of b, cut all paths from A to the outputs

whatever A is. Leaving ops out of A makes f(b, A) no larger. So the A for which that is most is found by peeling, from all ops:
those that need no more than some level are taken away, over and over. Either some are left that all need more, which is proved
then, and the level rises; or none is, and no A proves more than the level.

Few of the cuts have to be computed, as each says something about all ops: what separates A while b runs does so for any other op
of A, and what flows past the values of another op flows still when those cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphs.ir import Graph
from planner.least.cuts import MinCuts
from planner.process.clock import now_s
from planner.process.flat import Ints, begins, reads_and_makes

STEP = 5000  # the level rises by one part in so many, at least
IDLE = 1000  # cuts in a row that prove no more, after which there is little to come


def last_runs_peak(graph: Graph, proved_bytes: int, deadline: float, proves: Callable[[int], None] | None = None) -> int:
    """Bytes that every schedule needs, whatever its order: those that are proved already, or more.

    deadline  of ``now_s``, looked at between cuts
    proves    called with what is proved, each time that it is more
    """
    in_rows, inputs, out_rows, made, _, size = reads_and_makes(graph)
    outputs = np.array([x for x in graph.outputs if graph.producer[x] >= 0], np.int64)

    def of_op(amounts: Ints) -> Ints:
        """The sums over what each op reads and makes."""
        return np.diff(begins(amounts[inputs])[in_rows]) + np.diff(begins(amounts[made])[out_rows])

    def with_all(values: Ints) -> Ints:
        """What is needed while each op runs and these values are there too."""
        there = np.zeros_like(size)
        there[values] = size[values]
        return needs + int(there.sum()) - of_op(there)

    needs = of_op(size) + np.array([op.workspace_bytes for op in graph.ops], np.int64) + graph.resident_bytes
    cuts, left = MinCuts(graph), np.ones(len(graph.ops), np.bool_)
    least, most = needs, with_all(outputs)  # bounds of f(b, A)
    is_new = True  # A has become smaller since the last cut
    level_bytes, idle = proved_bytes, 0
    while idle < IDLE and now_s() < deadline:
        if (left & (most <= level_bytes)).any():
            left &= most > level_bytes
            least, is_new = needs, True
        if not left.any():
            break
        open_ops = np.flatnonzero(left & (least <= level_bytes))
        if not open_ops.size:
            proved_bytes = int(least[left].min())
            level_bytes, idle = proved_bytes + proved_bytes // STEP, 0
            if proves is not None:
                proves(proved_bytes)
            continue
        costs, free = size.copy(), np.zeros(0, np.int64)
        if not is_new:  # else one cut in which no op runs, which decides most of them
            op = open_ops[np.argmin(most[open_ops])]
            free = np.concatenate((inputs[in_rows[op] : in_rows[op + 1]], made[out_rows[op] : out_rows[op + 1]]))
            costs[free] = 0
        is_new, idle = False, idle + 1
        cut = cuts.least(left, outputs, costs)
        most = np.minimum(most, with_all(np.concatenate((cut.values, free))))
        least = np.maximum(least, needs + cut.total - of_op(cut.passing))
    return proved_bytes
