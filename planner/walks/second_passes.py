"""Second passes: gradients that there is no room to keep beside the backward pass are made again together, after it.

Gradients of weights are outputs: once made, they stay to the end. Near the least budget, what early layers need for themselves
leaves no room for those of all late ones. Lost one by one, each takes a forward and a backward of its own to make again; lost
together, the ones that are made first need a single forward, and a backward that ends where the last of them is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphs.ir import Graph
from planner.schedule import makers

MATTERS = 0.2  # of the room that a budget leaves beside what is resident: gradients of less are not worth a second pass
SHARES = (0.5, 0.3, 0.7, 0.9, 0.4, 0.6, 0.8, 0.2)  # of their bytes, in the order in which they are tried
LONGEST = 0.9  # of the keep-all time: a second pass that takes more is the whole step again


def second_passes(graph: Graph, budget_bytes: int) -> Iterator[list[int]]:
    """Runs in graph order, and after them all that it takes to make again the gradients that are made first; none where
    gradients take little of the budget."""
    gradients = sorted((x for x in graph.outputs if _is_gradient(graph, x)), key=lambda x: graph.producer[x])
    total_bytes = sum(graph.values[x].size_bytes for x in gradients)
    if total_bytes <= MATTERS * (budget_bytes - graph.resident_bytes):
        return
    made_once = {x for op in graph.ops if op.effect for x in op.outputs}
    tried: set[int] = set()
    for share in SHARES:
        lost, lost_bytes = 0, 0
        while lost_bytes < share * total_bytes:
            lost_bytes += graph.values[gradients[lost]].size_bytes
            lost += 1
        if lost not in tried:
            tried.add(lost)
            again = makers(graph, gradients[:lost], graph.resident | made_once)
            if sum(graph.ops[v].time_ns for v in again) <= LONGEST * graph.keep_all_time_ns:
                yield [*range(len(graph.ops)), *again]


def _is_gradient(graph: Graph, value: int) -> bool:
    return graph.producer[value] >= 0 and graph.ops[graph.producer[value]].backward
