"""Budgets in small steps: plans that are monotone over all of them, and the smallest budget, found and proved.

    python -m belady.bench_grid

For each workload, ``planner.min_budget``, then ``planner.plans`` at every half percent of the keep-all peak from there to 100 %.
The file is written when all is done. Nothing is executed: costs are the roofline's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.progress import Progress

from graphs.ir import Graph
from planner.frontier import plans
from planner.result import Plan

from .bench_least import least_of
from .bench_whole import bench_workloads
from .rows import finished
from .sweep import Row

WORKLOADS = ("vgg16", "gpt2")
STEP = 0.005  # of the keep-all peak
GAP, TIME_LIMIT_S = 0.005, 20.0  # of each budget


def rows_of(
    graph: Graph, progress: Progress | None = None, *, step: float = STEP, time_limit_s: float = TIME_LIMIT_S
) -> Iterator[Row]:
    """A row for each budget, the largest first, then one with what ``min_budget`` says."""
    least = least_of(graph)
    peak_bytes = least["keep_all_peak_bytes"]
    count = int((1 - least["works_bytes"] / peak_bytes) / step)
    budgets = [round((1 - i * step) * peak_bytes) for i in range(count + 1)]
    shown = Progress(disable=True) if progress is None else progress
    task = shown.add_task(graph.name, total=len(budgets))

    def done(plan: Plan) -> None:
        finished(plan)
        shown.advance(task)

    for plan in plans(graph, budgets, gap=GAP, time_limit_s=time_limit_s, done=done):
        yield {**finished(plan).row(), "ops": len(graph.ops)}
    yield least


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    return bench_workloads("bench_grid", __doc__, WORKLOADS, rows_of, argv)


if __name__ == "__main__":
    sys.exit(main())
