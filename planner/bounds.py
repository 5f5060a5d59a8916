"""How small a budget can be: a proved minimum, and the smallest peak of any schedule in hand."""

from __future__ import annotations

import time

from graphs.ir import Graph
from planner.loading import walk_search
from planner.schedule import Schedule, keep_all, with_frees
from planner.simulate import simulate


def least_bytes(graph: Graph) -> int:
    """No valid schedule of this graph, in whatever order, has a smaller peak.

    Resident values are always there. While an op runs, so are its inputs, its outputs and its workspace; every op runs.
    At the end all graph outputs are there together.
    """
    size = [0 if v in graph.resident else value.size_bytes for v, value in enumerate(graph.values)]
    at_op = (op.workspace_bytes + sum(size[v] for v in (*op.inputs, *op.outputs)) for op in graph.ops)
    at_end = sum(size[v] for v in graph.outputs)
    return graph.resident_bytes + max(at_end, max(at_op, default=0))


def smallest_known(graph: Graph, *, time_limit_s: float = 10.0) -> tuple[int, Schedule]:
    """Smallest peak of the schedules that list walks find, and that schedule.

    A walk search is started at budgets bisected between ``least_bytes`` and the keep-all peak, to within 0.5 %.

    time_limit_s  for all of it, and one walk more; only keeping all is known where it is 0
    """
    deadline = time.perf_counter() + time_limit_s
    best = keep_all(graph)
    works = simulate(graph, best).peak_bytes
    fails = least_bytes(graph) - 1
    while works - fails > max(1, works // 200) and time.perf_counter() < deadline:
        middle = (works + fails) // 2
        walks = walk_search()(graph, middle, seed=0)
        walks.start(deadline=deadline)
        if walks.runs is None:
            fails = middle
        else:
            best = with_frees(graph, walks.runs.tolist())
            works = simulate(graph, best).peak_bytes
    return works, best
