"""Plans for captured training steps and published instances at several budgets; one result row each.

    python -m belady.bench_plans --out benchmarks/plans.jsonl --data DIR

DIR holds ``checkmate_instances/*.json``; without it those are left out. Rows that are in the file already are not made
again, so an interrupted run goes on where it stopped. Nothing is executed: costs are the roofline's, sizes those below.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphs.ir import Graph
from planner.budget import resolve_budget
from planner.plan import solve, with_costs
from planner.schedule import keep_all
from planner.simulate import simulate

from .rows import append_row, read_rows

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Sizes at which activations are most of the bytes, as where people need to save memory.
WORKLOADS: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 64, "size": 224},
    "gpt2": {"batch": 16, "seq": 512},
}
# The published budgets, GB of 2^30 bytes (Checkmate's MILP, 12 threads, 24 hours).
INSTANCES = {"vgg16_176": (10, 9, 8), "unet_11": (10, 9, 8), "resnet50_184": (10, 9, 8, 7)}


@dataclass(frozen=True)
class Case:
    """One graph and its budgets (shares of the keep-all peak, or bytes)."""

    graph: Graph
    budgets: tuple[float | int, ...]


def cases(only: Sequence[str], data: str | None) -> Iterator[Case]:
    """The graphs asked for, made one at a time."""
    from graphs.capture import capture
    from graphs.importers import load_checkmate
    from graphs.workloads import build

    for name, sizes in WORKLOADS.items():
        if not only or name in only:
            model, inputs, loss = build(name, **dict[str, Any](sizes))
            label = "-".join([name, *(f"{size}{number}" for size, number in sizes.items())])
            yield Case(with_costs(capture(model, inputs, loss=loss, name=label), "roofline").graph, SHARES)
    for name, gigabytes in INSTANCES.items():
        if data is not None and (not only or name in only):
            graph = load_checkmate(Path(data) / "checkmate_instances" / f"{name}.json")
            yield Case(replace(graph, name=name), tuple(gb * 2**30 for gb in gigabytes))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/plans.jsonl", help="rows are added to this file")
    parser.add_argument("--data", default=os.environ.get("BELADY_DATA"), help="folder of the published instances")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one workload or instance; several times")
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S")
    arguments = parser.parse_args(argv)
    done = read_rows(arguments.out) if Path(arguments.out).exists() else []
    made = {(row["graph"], row["budget_bytes"]) for row in done}
    for case in cases(arguments.only, arguments.data):
        peak_bytes = simulate(case.graph, keep_all(case.graph)).peak_bytes
        for budget in case.budgets:
            budget_bytes = resolve_budget(budget, peak_bytes)
            if (case.graph.name, budget_bytes) not in made:
                plan = solve(case.graph, budget_bytes, gap=arguments.gap, time_limit_s=arguments.time_limit)
                row: dict[str, Any] = {**plan.row(), "ops": len(case.graph.ops)}
                append_row(arguments.out, row)
                overhead = "-" if plan.overhead is None else f"{plan.overhead:.3%}"
                gap = "-" if plan.gap is None else f"{plan.gap:.3%}"
                share = f"{budget_bytes / peak_bytes:.1%}"
                told = f"{case.graph.name:<28} {share:>6} {plan.status:<10} {overhead:>9} {gap:>8} {plan.wall_s:6.1f} s"
                print(told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
