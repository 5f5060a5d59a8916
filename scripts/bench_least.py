"""The smallest budget of every workload: found, proved, and what a plan costs there.

    python -m belady.bench_least

For each workload, ``planner.min_budget``, then a plan for the budget that works. The file is written when all is done. Nothing is
executed: costs are the roofline's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.progress import track

from graphs.ir import Graph
from graphs.workloads import WORKLOADS
from planner.frontier import min_budget
from planner.plan import solve
from planner.schedule import keep_all
from planner.simulate import simulate

from .output import ended
from .rows import write_rows
from .steps import step_graph
from .sweep import Row

TIME_LIMIT_S = 20.0  # of the plan


def least_of(graph: Graph) -> Row:
    """What ``min_budget`` says of a graph, and how long it took."""
    began = time.perf_counter()
    least = min_budget(graph)
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
    return {**solve(graph, least["works_bytes"], time_limit_s=time_limit_s).row(), **least}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/least.jsonl", help="the file, written whole")
    parser.add_argument("--only", action="append", choices=sorted(WORKLOADS), help="one workload; several times")
    arguments = parser.parse_args(argv)

    def work() -> int:
        found: list[Row] = []
        for name in track(arguments.only or sorted(WORKLOADS), description="workloads", transient=True):
            found.append(row_of(step_graph(name)))
        write_rows(arguments.out, found)
        return 0

    return ended("bench_least", work)


if __name__ == "__main__":
    sys.exit(main())
