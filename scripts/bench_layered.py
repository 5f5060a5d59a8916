"""Random layered graphs, ten of each kind, in a free order and in their own; one result row for each budget.

    python -m belady.bench_layered --out benchmarks/layered.jsonl

The graphs are those of ``graphs.synthetic.random_layered`` with the seeds 0 to 9; budgets are shares of the keep-all peak in
the order they come in, which is random. In their own order another is taken where nothing fits in it; in a free one there is less
time than FastSA took for its graphs of the same kinds. Rows that are in the file already are not made again, so an interrupted
run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from graphs.ir import Graph
from graphs.synthetic import random_layered
from planner.budget import resolve_budget
from planner.plan import solve
from planner.schedule import computes, in_graph_order, keep_all
from planner.simulate import simulate

from .output import ended
from .rows import RowFile, finished
from .sweep import Row

KINDS = ("RL1", "RL2", "RL3", "RL4")
SEEDS = 10
SHARES = (0.9, 0.8, 0.7)
ORDERS = ("free", "kept")
KEPT_LIMIT_S, FREE_LIMIT_S = 57.0, {"RL1": 10.0, "RL2": 12.0, "RL3": 18.0, "RL4": 30.0}
GAP = {"free": 0.001, "kept": 0.005}


def row_of(graph: Graph, share: float, order: str, *, time_limit_s: float) -> Row:
    """Plan for one budget.

    Beside what every row has: ``ops``; ``order``, what was asked for; ``order_kept``, whether ops run for the first time in graph
    order (None without a schedule); ``cpu_s`` of this process, which says more than ``wall_s`` where others compute, too.
    """
    budget_bytes = resolve_budget(share, simulate(graph, keep_all(graph)).peak_bytes)
    began = time.process_time()
    plan = finished(solve(graph, budget_bytes, gap=GAP[order], time_limit_s=time_limit_s, any_order=order == "free"))
    cpu_s = time.process_time() - began
    kept = None if plan.schedule is None else in_graph_order(computes(plan.schedule))
    return {**plan.row(), "ops": len(graph.ops), "order": order, "order_kept": kept, "cpu_s": cpu_s}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/layered.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="one kind of graph; several times")
    parser.add_argument("--order", action="append", choices=ORDERS, help="one of both; several times")
    parser.add_argument("--share", type=float, action="append", choices=SHARES, help="one budget; several times")
    parser.add_argument("--time-limit", type=float, metavar="S", help="for each budget (default: 10 to 57)")
    arguments = parser.parse_args(argv)

    def work() -> int:
        with closing(RowFile(arguments.out, ("graph", "order", "budget_bytes"))) as file:
            made = {(row["graph"], row["order"], row["budget_bytes"]) for row in file.rows}
            for order in arguments.order or ORDERS:
                for kind in arguments.kind or KINDS:
                    limit_s = FREE_LIMIT_S[kind] if order == "free" else KEPT_LIMIT_S
                    if arguments.time_limit is not None:
                        limit_s = arguments.time_limit
                    for graph in (random_layered(kind, seed) for seed in range(SEEDS)):
                        peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
                        for share in arguments.share or SHARES:
                            if (graph.name, order, resolve_budget(share, peak_bytes)) not in made:
                                row = row_of(graph, share, order, time_limit_s=limit_s)
                                file.append(row)
                                print(_line(row), flush=True)
        return 0

    return ended("bench_layered", work)


def _line(row: Row) -> str:
    """One row for people."""
    overhead = "-" if row["overhead"] is None else f"{row['overhead']:.3%}"
    gap = "-" if row["gap"] is None else f"{row['gap']:.3%}"
    kept = {None: "", True: "", False: "reordered"}[row["order_kept"]]
    share = f"{row['budget_fraction']:.0%}"
    return f"{row['graph']:<12} {row['order']} {share:>4} {overhead:>9} {gap:>8} {row['wall_s']:6.1f} s {kept}"


if __name__ == "__main__":
    sys.exit(main())
