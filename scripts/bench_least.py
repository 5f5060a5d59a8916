"""The smallest budget of every workload: found, proved, and what a plan costs there.

    python -m belady.bench_least

For each workload, ``planner.min_budget``, then a plan for the budget that works. The file is written when all is done. Nothing is
executed: costs are the roofline's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from graphs.collection import WORKLOADS
from graphs.ir import Graph
from planner.frontier import min_budget
from planner.plan import solve
from planner.schedule import keep_all
from planner.simulate import simulate

from .bench_whole import bench_workloads
from .rows import finished
from .sweep import Row

TIME_LIMIT_S = 20.0  # of the plan


def least_of(graph: Graph) -> Row:
    """What ``min_budget`` says of a graph, and how long it took. Raises KeyboardInterrupt where Ctrl-C ended it."""
    began = time.perf_counter()
    least = min_budget(graph)
    if least.interrupted:
        raise KeyboardInterrupt
    return {
        "graph": graph.name,
        "ops": len(graph.ops),
        "keep_all_peak_bytes": simulate(graph, keep_all(graph)).peak_bytes,
        "works_bytes": least.works_bytes,
        "proved_bytes": least.proved_bytes,
        "least_wall_s": time.perf_counter() - began,
    }


def row_of(graph: Graph, *, time_limit_s: float = TIME_LIMIT_S) -> Row:
    """The row of the plan for the smallest budget, beside what is said of that."""
    least = least_of(graph)
    return {**finished(solve(graph, least["works_bytes"], time_limit_s=time_limit_s)).row(), **least}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    return bench_workloads("bench_least", __doc__, sorted(WORKLOADS), lambda graph, _: [row_of(graph)], argv)


if __name__ == "__main__":
    sys.exit(main())
