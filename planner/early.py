"""What a training step in two halves keeps: what its forward gives back, the loss and new buffers, from when it is first made."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

from graphs.ir import Graph, Value
from planner.schedule import Compute, Schedule, computes, early_values, hold_early, in_graph_order
from planner.simulate import simulate


def in_halves(graph: Graph, schedule: Schedule, copied_bytes: int | None = 0) -> tuple[Schedule, int | None]:
    """The schedule with what its forward gives back kept, and what it needs then; None where its backward begins before all of
    that is made.

    copied_bytes  needed beside it from the end of the forward on, see ``planner.execution.halves.copied_bytes``; None: it runs as
                  one piece
    """
    if copied_bytes is None:
        return schedule, simulate(graph, schedule).peak_bytes
    held = hold_early(graph, schedule)
    begins = next((at for at, step in enumerate(held) if isinstance(step, Compute) and graph.ops[step.op].backward), len(held))
    if not in_graph_order(computes(held)):
        made = set(computes(held[:begins]))
        if any(graph.producer[v] not in made for v in early_values(graph)):
            return held, None
    trace = simulate(graph, held)
    late_bytes = max(trace.memory_bytes[max(begins - 1, 0) :], default=graph.resident_bytes)
    return held, max(trace.peak_bytes, late_bytes + copied_bytes)


def with_early_kept(graph: Graph, copied_bytes: int | None = 0) -> Graph:
    """A graph of the same ops and values, so that its schedules are schedules of this graph. There what the forward gives back is
    made before the backward begins, and takes its bytes from the start to the end, once more in an op that makes more than that.

    So what fits there fits in halves, though a little less may do: nothing is there before it is made. ``copied_bytes`` as above.
    """
    early = early_values(graph)
    if copied_bytes is None or not (early or copied_bytes):
        return graph
    sizes = [value.size_bytes for value in graph.values]
    kept = Value("kept", copied_bytes + sum(sizes[v] for v in early))
    values = [replace(value, size_bytes=0) if v in early else value for v, value in enumerate(graph.values)]
    ops = []
    ancestors: list[int] = []  # of each op, as bits
    for op in graph.ops:
        makers = {graph.producer[v] for v in op.inputs} - {-1}
        ancestors.append(functools.reduce(operator.or_, (ancestors[p] | 1 << p for p in makers), 0))
        inputs = op.inputs
        if op.backward and not any(graph.ops[p].backward for p in makers):  # a backward may begin here
            inputs += tuple(sorted(v for v in early.difference(inputs) if not ancestors[-1] >> graph.producer[v] & 1))
        made = [v for v in op.outputs if v in early]
        again_bytes = sum(sizes[v] for v in made) if len(made) < len(op.outputs) else 0  # else it need not run again
        ops.append(replace(op, inputs=inputs, workspace_bytes=op.workspace_bytes + again_bytes))
    return replace(graph, ops=tuple(ops), values=(*values, kept), resident=graph.resident | {len(values)})
