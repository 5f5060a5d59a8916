"""Online rules against the proved optimum on operator logs and captured steps; result rows.

    python -m belady.bench_online --data DIR            every row; DIR has the operator logs (default: BELADY_DATA)
    python -m belady.bench_online --method none         online rows only
    python -m belady.bench_online --rule none           then the planner's

Graphs: the operator logs of the DTR authors that are in DIR, as graphs (views and mutations resolved), and captured training
steps at the sizes the workloads have by default, priced by the roofline. Budgets: 0.9 ... 0.1 of the keep-all peak with every
value released after its last read, where any schedule can fit. Rules and planner get the same graph, bytes and releases. Rows
are as in ``bench_methods``; those that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.budget import resolve_budget
from planner.schedule import keep_all
from planner.simulate import simulate

from .bench_methods import GUARD_BYTES, SLACK_S, Case, cells_of, isolated, row_of
from .output import ended
from .rows import RowFile
from .steps import step_graph
from .sweep import ONLINE, Cell, Row, chosen, key_of, methods_of, rules_of

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LOGS = ("unet", "resnet32", "transformer", "lstm")
WORKLOADS = ("mlp", "resnet50", "vgg16", "unet", "mobilenet_v2", "vit", "bert", "gpt2", "llama", "lstm")
RULES = ("dtr", "dtr_eq", "local", "lru", "size", "msps", "dtr+reclaim", "dtr+counted", "demand", "demand+next_use")
PLANNER = "cutting_stages"


def graph_names(asked: Sequence[str]) -> list[str]:
    """Names of graphs; all of them where none is asked for. Raises InputError for an unknown one."""
    return chosen("graph", asked, [*(f"log_{name}" for name in LOGS), *WORKLOADS])


def cases(names: Sequence[str], data: str | None) -> Iterator[Case]:
    """The graphs, made one at a time, each with the budgets that some schedule may fit, the largest first."""
    for name in names:
        if name.startswith("log_") and data is None:
            print(f"{name} is left out: --data is not given", file=sys.stderr)
            continue
        graph = replace(_graph(name, data), name=name)
        peak_bytes, least = simulate(graph, keep_all(graph)).peak_bytes, least_bytes(graph)
        budgets = (resolve_budget(share, peak_bytes) for share in SHARES)
        yield Case(graph, tuple(budget_bytes for budget_bytes in budgets if budget_bytes >= least))


def _graph(name: str, data: str | None) -> Graph:
    if name.startswith("log_"):
        from graphs.importers import load_dtr_log

        return load_dtr_log(Path(data or "") / "dtr_logs" / f"{name.removeprefix('log_')}.log.gz")
    return step_graph(name)


def _row(graph: Graph, cell: Cell, wall_limit_s: float) -> Row:
    """A planner in a process of its own, which may end in any way; a rule here, as a process takes longer to start than it."""
    if cell.method.startswith(ONLINE):
        return row_of(graph, cell)
    return isolated(graph, cell, guard_bytes=GUARD_BYTES, wall_limit_s=wall_limit_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/online.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--data", default=os.environ.get("BELADY_DATA"), help="folder of the operator logs")
    parser.add_argument("--graph", action="append", default=[], metavar="NAME", help="one graph; several times (default: all)")
    parser.add_argument("--rule", action="append", default=[], metavar="NAME", help="likewise an online rule; none")
    parser.add_argument("--method", action="append", default=[], metavar="NAME", help=f"a planner; none (default: {PLANNER})")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="a method to run although it has rows")
    parser.add_argument(
        "--gap", type=float, default=0.001, help="stop when proved within this share of the optimum (default: 0.001)"
    )
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="of the planner, a budget (default: 10)")
    arguments = parser.parse_args(argv)

    def work() -> int:
        rules, methods = rules_of(arguments.rule or RULES), methods_of(arguments.method or [PLANNER])
        names = graph_names(arguments.graph)
        with closing(RowFile(arguments.out, ("graph", "method"))) as file:
            made = {key_of(row) for row in file.rows if row["method"] not in arguments.again}
            for case in cases(names, arguments.data):
                for cell in cells_of(case, [*rules, *methods], gap=arguments.gap, time_limit_s=arguments.time_limit, seed=0):
                    if cell.key not in made:
                        file.append(_row(case.graph, cell, 2 * arguments.time_limit + SLACK_S))
                print(case.graph.name, flush=True)
        return 0

    return ended("bench_online", work)


if __name__ == "__main__":
    sys.exit(main())
