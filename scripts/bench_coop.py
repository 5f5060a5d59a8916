"""Coop against DTR under address budgets, with and without each part of Coop; result rows, and the table drawn from them.

    python -m belady.bench_coop --out benchmarks/coop.jsonl
    python -m belady.bench_coop --out benchmarks/coop.jsonl --table

Captured steps at the sizes the workloads have by default, costs from the roofline. Every rule drops a released value again once
the rebuild that needed it is done (``+reclaim``, which is Coop's eager release), so that eager release is not what differs. For
every graph and rule: one row at each of SHARES, and one (``smallest``) at the least share of the keep-all peak, in steps of 2 %,
at which the run completes: all steps are tried from below, as more memory may fail where less did. Rules that are in the file
already are not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from graphs.ir import Graph
from online.runtime import Run, run
from planner.bounds import least_bytes
from planner.budget import resolve_budget
from planner.schedule import keep_all
from planner.simulate import simulate

from .output import ended
from .rows import RowFile, read_rows
from .steps import step_graph

WORKLOADS = ("resnet50", "unet", "gpt2", "lstm")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
STEPS = tuple(percent / 100 for percent in range(10, 100, 2))
RULES = {
    "DTR, bytes": "dtr",
    "DTR, caching allocator": "dtr+caching",
    "DTR, arena": "dtr+arena",
    "Coop": "coop",
    "Coop - partitioning": "coop+arena",
    "Coop - in place": "coop+coop_moving",
    "Coop - window": "dte+coop",
    "DTE": "dte+arena_moving",
    "DTR": "dtr+arena_moving",
    "Coop - partitioning, exact e*": "coop_e_star+arena",
}

ENTRIES = ("graph", "label", "share", "smallest", "overhead", "run_status")  # of every row


def row_of(done: Run, label: str, share: float, *, smallest: bool) -> dict[str, Any]:
    """The usual row, with what the run did to the address space and what its searches cost."""
    counters = asdict(done.counters)
    return {
        **done.row(),
        "label": label,
        "share": share,
        "smallest": smallest,
        "run_status": str(done.status),
        "ops": len(done.graph.ops),
        **{key: counters[key] for key in ("evictions", "searches", "evaluations", "inspected", "search_s")},
        **(asdict(done.addresses) if done.addresses else {}),
    }


def rows(graph: Graph, label: str) -> Iterator[dict[str, Any]]:
    """All rows of one graph and rule."""
    heuristic = RULES[label] + "+reclaim"
    peak_bytes, least = simulate(graph, keep_all(graph)).peak_bytes, least_bytes(graph)
    for share in SHARES:
        if resolve_budget(share, peak_bytes) >= least:
            yield row_of(run(graph, share, heuristic=heuristic), label, share, smallest=False)
    for share in STEPS:
        if resolve_budget(share, peak_bytes) >= least:
            done = run(graph, share, heuristic=heuristic)
            if done.completed:
                yield row_of(done, label, share, smallest=True)
                return


def table(done: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each graph and rule the least share, overheads, and means over the shares at which runs completed."""
    head = ["graph", "rule", "least", *(f"{share:.0%}" for share in SHARES), "fragmentation", "as published", "evaluations"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for graph in dict.fromkeys(row["graph"] for row in done):
        for label in RULES:
            mine = [row for row in done if (row["graph"], row["label"]) == (graph, label)]
            if not mine:
                continue
            least = next((f"{row['share']:.0%}" for row in mine if row["smallest"]), "-")
            at = {row["share"]: row for row in mine if not row["smallest"]}
            cells = [_overhead(at.get(share)) for share in SHARES]
            forms = {"fragmentation": "{:.1%}", "frag_published": "{:.1%}", "evaluations": "{:,.0f}"}
            means = [_mean(at, key, form) for key, form in forms.items()]
            lines.append(f"| {graph} | {label} | {least} | " + " | ".join([*cells, *means]) + " |")
    return "\n".join(lines)


def _overhead(row: dict[str, Any] | None) -> str:
    if row is None:
        return "infeasible"
    return f"{row['overhead']:.1%}" if row["overhead"] is not None else row["run_status"].replace("_", " ").lower()


def _mean(at: dict[float, dict[str, Any]], key: str, form: str) -> str:
    found = [row[key] for row in at.values() if row["overhead"] is not None and row.get(key) is not None]
    return form.format(sum(found) / len(found)) if found else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows or print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/coop.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], choices=WORKLOADS, help="one workload; several times")
    parser.add_argument("--table", action="store_true", help="print the table of the rows that are there")
    arguments = parser.parse_args(argv)

    def work() -> int:
        if arguments.table:
            print(table(read_rows(arguments.out, ENTRIES)))
            return 0
        with closing(RowFile(arguments.out, ENTRIES)) as file:
            made = {(row["graph"], row["label"]) for row in file.rows}
            for name in arguments.only or WORKLOADS:
                missing = [label for label in RULES if (name, label) not in made]
                if not missing:
                    continue
                graph = step_graph(name)
                for label in missing:
                    for row in list(rows(graph, label)):  # all or none
                        file.append(row)
                    print(f"{name}: {label}", flush=True)
        return 0

    return ended("bench_coop", work)


if __name__ == "__main__":
    sys.exit(main())
