"""Plans for captured training steps, published instances, operator logs and random graphs; one result row for each budget.

    python -m belady.bench_plans --out benchmarks/plans.jsonl --data DIR

DIR holds ``checkmate_instances/*.json`` and ``dtr_logs/*.log.gz``; without it those are left out. Rows that are in the file
already are not made again, so an interrupted run goes on where it stopped. Nothing is executed: costs of captured steps are the
roofline's, sizes those below.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from graphs.errors import InputError
from graphs.ir import Graph
from planner.budget import resolve_budget
from planner.plan import solve
from planner.result import Plan
from planner.schedule import keep_all
from planner.simulate import simulate

from .output import ended
from .rows import RowFile, finished
from .steps import step_graph
from .sweep import chosen

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
DEEP_SHARES = (0.7, 0.5, 0.3)
LAYERED_SHARES = (0.9, 0.8, 0.7)
# The default sizes of every workload, sizes at which activations are most of the bytes, and very deep ones.
STEPS = {
    **dict.fromkeys(("mlp", "vgg16", "resnet50", "mobilenet_v2", "unet", "vit", "bert", "gpt2", "llama", "lstm"), SHARES),
    **dict.fromkeys(("resnet50-batch64-size224", "gpt2-batch16-seq512"), SHARES),
    **dict.fromkeys(("gpt2-depth96", "llama-depth64"), DEEP_SHARES),
}
# The published budgets, GB of 2^30 bytes (Checkmate's MILP, 12 threads, 24 hours).
INSTANCES = {"vgg16_176": (10, 9, 8), "unet_11": (10, 9, 8, 7, 6, 5), "resnet50_184": (10, 9, 8, 7, 6, 5)}
LOGS = ("resnet32", "unet", "transformer", "lstm")
LAYERED = ("RL1", "RL2", "RL3", "RL4")
# A twentieth less than 20 and 60 s, which leaves room for what passes a time limit: for each budget of captured steps of ordinary
# size, and of anything else.
STEP_LIMIT_S, LIMIT_S = 19.0, 57.0
LONG = 5_000  # ops; logs of more get twice as long


@dataclass(frozen=True)
class Case:
    """One graph, its budgets (shares of the keep-all peak, or bytes), and how long and how exactly each is solved."""

    graph: Graph
    budgets: tuple[float | int, ...]
    time_limit_s: float
    gap: float = 0.005
    any_order: bool = False


def labels(only: Sequence[str], data: str | None) -> list[str]:
    """Names of what is asked for, all where nothing is. Raises InputError for one that is unknown, or needs data."""
    published = [*INSTANCES, *(f"log_{name}" for name in LOGS)]
    found = chosen("graph", only, [*published, *STEPS, *(label for name in LAYERED for label in (name, f"{name}-any-order"))])
    if data is None and (asked := [name for name in only if name in published]):
        raise InputError(f"{asked[0]} is published: name the folder with --data or in BELADY_DATA")
    return found


def cases(wanted: Collection[str], data: str | None) -> Iterator[Case]:
    """The graphs of these labels, made one at a time; without data those that need none."""
    from graphs.importers import load_checkmate, load_dtr_log
    from graphs.synthetic import random_layered

    if data is not None:
        for name, gigabytes in INSTANCES.items():
            if name in wanted:
                graph = load_checkmate(Path(data) / "checkmate_instances" / f"{name}.json")
                yield Case(replace(graph, name=name), tuple(gb * 2**30 for gb in gigabytes), LIMIT_S, 1e-5)
    for name, shares in STEPS.items():
        if name in wanted:
            yield Case(step_graph(name), shares, LIMIT_S if shares == DEEP_SHARES else STEP_LIMIT_S)
    if data is not None:
        for name in LOGS:
            if f"log_{name}" in wanted:
                graph = load_dtr_log(Path(data) / "dtr_logs" / f"{name}.log.gz")
                yield Case(replace(graph, name=f"log_{name}"), SHARES, LIMIT_S if len(graph.ops) < LONG else 2 * LIMIT_S)
    for name in LAYERED:
        for label, any_order in ((name, False), (f"{name}-any-order", True)):
            if label in wanted:
                yield Case(replace(random_layered(name, seed=0), name=label), LAYERED_SHARES, LIMIT_S, any_order=any_order)


def solve_all(path: str, wanted: Iterable[Case], time_limit_s: float | None = None) -> None:
    """Add a row for every case and budget that has none in the file yet.

    time_limit_s  for each budget; None: that of its case
    """
    with closing(RowFile(path, ("graph", "budget_bytes", "ops"))) as file:
        made = {(row["graph"], row["budget_bytes"]) for row in file.rows}
        for case in wanted:
            peak_bytes = simulate(case.graph, keep_all(case.graph)).peak_bytes
            for budget in case.budgets:
                budget_bytes = resolve_budget(budget, peak_bytes)
                if (case.graph.name, budget_bytes) not in made:
                    limit_s = case.time_limit_s if time_limit_s is None else time_limit_s
                    plan = solve(case.graph, budget_bytes, gap=case.gap, time_limit_s=limit_s, any_order=case.any_order)
                    finished(plan)
                    file.append({**plan.row(), "ops": len(case.graph.ops)})
                    print(_line(plan, budget_bytes / peak_bytes), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/plans.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--data", default=os.environ.get("BELADY_DATA"), help="folder of the published instances")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one workload or instance; several times")
    parser.add_argument("--time-limit", type=float, metavar="S", help="for each budget (default: 19 to 114, by graph)")
    arguments = parser.parse_args(argv)

    def work() -> int:
        solve_all(arguments.out, cases(labels(arguments.only, arguments.data), arguments.data), arguments.time_limit)
        return 0

    return ended("bench_plans", work)


def _line(plan: Plan, share: float) -> str:
    """One row for people."""
    overhead = "-" if plan.overhead is None else f"{plan.overhead:.3%}"
    gap = "-" if plan.gap is None else f"{plan.gap:.3%}"
    return f"{plan.graph.name:<28} {share:>6.1%} {plan.status:<10} {overhead:>9} {gap:>8} {plan.wall_s:6.1f} s"


if __name__ == "__main__":
    sys.exit(main())
