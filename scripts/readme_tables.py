"""Draws the README's results and ``docs/plans.md`` from committed rows; ``--check`` says whether they are up to date.

python -m belady.readme_tables
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from planner.budget import format_bytes
from planner.result import gap_of

from .gpu_doc import of_rows
from .gpu_doc import summary as on_gpu
from .output import ended
from .page import END, ROOT, parser_of, percent, publish, table, with_section
from .rows import read_rows
from .sweep import Row

BEGIN = "<!-- results: drawn by scripts/readme_tables.py -->"
CLOSE = 0.01
PLANS = """# Plans, budget by budget

Drawn from `benchmarks/plans.jsonl` by `python -m belady.readme_tables`; made by `python -m belady.bench_plans`. The gap holds for
every schedule with the graph's order of first executions or, where the plan has another one, for all; "gap, any order" holds for
all. So does INFEASIBLE; UNKNOWN: nothing found in time, which is 19 s for captured steps of ordinary size, 114 s for `log_lstm`
and 57 s for all others.

`vgg16_176`, `unet_11` and `resnet50_184` are published instances of Checkmate's MILP; `log_*` are operator logs of the DTR
authors; RL1 to RL4 are random layered graphs, planned in their own order and in any (`--any-order`); the others are captured
training steps with modelled op times. Budgets are shares of the keep-all peak.

"""
OTHERS = """

# Networks that are no workloads

Small networks of published kinds that the planner was not tuned on, 19 s for each budget (`benchmarks/others.jsonl`, made by
`python -m belady.bench_others`).

"""
GRID = """

# Budgets in small steps

Every half percent of the keep-all peak, from all of it down to the smallest budget that works (`benchmarks/grid.jsonl`, made by
`python -m belady.bench_grid`); seconds for all budgets and for the smallest one.

"""

LEAST = """

# Smallest budgets

How little works, and how little is proved to be needed in any order, as shares of the keep-all peak (`benchmarks/least.jsonl`,
made by `python -m belady.bench_least`; costs are the roofline's). The overhead is that of a plan for that very budget, 20 s,
which does not begin from the schedule that came with it; -: no other one found.

"""

LAYERED = """
# Random layered graphs

Ten of each kind (`benchmarks/layered.jsonl`, made by `python -m belady.bench_layered`), budgets as shares of the keep-all peak in
the order they come in, which is random. Free: in any order, with the keep-all time as the bound (`any_order`). Kept: in their own
order, or in another where nothing fits in that. Seconds: median / most.

"""


def executed(rows: Sequence[Row]) -> str:
    """What one training step took, each way, under each budget."""
    return table(
        ("graph", "budget", "method", "overhead", "bound", "planned peak", "measured peak", "difference to plain PyTorch"),
        (
            (
                row["graph"],
                f"{row['budget_fraction']:.0%} ({format_bytes(row['budget_bytes'])})",
                row["method"],
                percent(row["overhead"]),
                percent(None if row["bound_ns"] is None else row["bound_ns"] / row["keep_all_time_ns"] - 1),
                size(row["peak_bytes"]),
                size(row["measured_peak_bytes"]),
                "-" if row["max_grad_error"] is None else f"{row['max_grad_error']:g}",
            )
            for row in rows
        ),
    )


def planned(rows: Sequence[Row]) -> str:
    """Plans of every graph at every budget, with what was proved."""
    return table(
        ("graph", "ops", "budget", "status", "overhead", "gap", "gap, any order", "seconds"),
        (
            (
                row["graph"],
                str(row["ops"]),
                f"{row['budget_fraction']:.0%} ({format_bytes(row['budget_bytes'])})",
                row["status"],
                percent(row["overhead"]),
                percent(row["gap"]),
                percent(_of_all(row)),
                f"{row['wall_s']:.1f}",
            )
            for row in rows
        ),
    )


def _of_all(row: Row) -> float | None:
    """The gap to what is proved of schedules in any order; older rows do not say."""
    return gap_of(row["time_ns"], row.get("any_order_bound_ns"))


def summarised(rows: Sequence[Row]) -> str:
    """One line for each graph: how many of its budgets were settled how well, and how long that took."""
    lines = []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        mine = [row for row in rows if row["graph"] == graph]
        found = [row for row in mine if row["time_ns"] is not None]
        ruled_out = sum(row["status"] == "INFEASIBLE" for row in mine)
        close = sum(row["gap"] is not None and row["gap"] <= CLOSE for row in found)
        gaps = [row["gap"] for row in found if row["gap"] is not None]
        lines.append(
            (
                graph,
                str(mine[0]["ops"]),
                str(len(mine)),
                f"{close} + {ruled_out}",
                percent(max(gaps, default=None)),
                str(sum((gap := _of_all(row)) is not None and gap <= CLOSE for row in found)),
                str(len(mine) - len(found) - ruled_out),
                f"{median(row['wall_s'] for row in mine):.1f} / {max(row['wall_s'] for row in mine):.1f}",
            )
        )
    settled = f"settled: gap ≤ {CLOSE:.0%}".replace("%", " %") + " + proved infeasible"
    of_all = f"gap ≤ {CLOSE:.0%} in any order".replace("%", " %")
    header = ("graph", "ops", "budgets", settled, "largest gap", of_all, "nothing found", "seconds, median / most")
    return table(header, lines)


def stepped(rows: Sequence[Row]) -> str:
    """One line for each graph of the fine grid: its budgets, whether more bytes never cost more time, and its smallest budget."""
    lines = []
    for least in (row for row in rows if "works_bytes" in row):
        mine = sorted(
            (row for row in rows if row["graph"] == least["graph"] and row is not least), key=lambda r: -r["budget_bytes"]
        )
        times_ns = [row["time_ns"] for row in mine]
        lines.append(
            (
                least["graph"],
                str(least["ops"]),
                str(len(mine)),
                "yes" if None not in times_ns and times_ns == sorted(times_ns) else "no",
                f"{sum(row['gap'] <= CLOSE for row in mine)}, {percent(max(row['gap'] for row in mine))}",
                f"{percent(least['works_bytes'] / least['keep_all_peak_bytes'])} ({format_bytes(least['works_bytes'])})",
                f"{percent(least['proved_bytes'] / least['keep_all_peak_bytes'])} ({format_bytes(least['proved_bytes'])})",
                f"{sum(row['wall_s'] for row in mine):.0f} + {least['least_wall_s']:.0f}",
            )
        )
    close = f"gap ≤ {CLOSE:.0%}, largest".replace("%", " %")
    header = ("graph", "ops", "budgets", "monotone", close, "smallest budget that works", "proved needed, any order", "seconds")
    return table(header, lines)


def smallest(rows: Sequence[Row]) -> str:
    """One line for each workload."""
    header = ("graph", "ops", "works", "proved needed", "apart", "seconds", "overhead there")
    return table(
        header,
        (
            (
                row["graph"],
                str(row["ops"]),
                f"{percent(row['works_bytes'] / row['keep_all_peak_bytes'])} ({format_bytes(row['works_bytes'])})",
                percent(row["proved_bytes"] / row["keep_all_peak_bytes"]),
                percent(1 - row["proved_bytes"] / row["works_bytes"]),
                f"{row['least_wall_s']:.1f}",
                percent(row["overhead"]),
            )
            for row in rows
        ),
    )


def layered(rows: Sequence[Row]) -> str:
    """One line for each kind of graph, order and budget."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kind = row["graph"].partition("_")[0]
        groups.setdefault((row["order"], kind, f"{row['budget_fraction']:.0%}".replace("%", " %")), []).append(row)
    lines = []
    for (order, kind, budget), mine in sorted(groups.items(), key=lambda group: (*group[0][:2], -group[1][0]["budget_fraction"])):
        found = [row for row in mine if row["time_ns"] is not None]
        overheads, gaps = sorted(row["overhead"] for row in found), sorted(row["gap"] for row in found)
        reordered = sum(not row["order_kept"] for row in found)
        lines.append(
            (
                kind,
                str(mine[0]["ops"]),
                order,
                budget,
                f"{len(found)} of {len(mine)}" + (f", {reordered} in another order" if order == "kept" and reordered else ""),
                middle_and_most(overheads),
                middle_and_most(gaps),
                f"{median(row['wall_s'] for row in mine):.1f} / {max(row['wall_s'] for row in mine):.1f}",
            )
        )
    header = ("graphs", "ops", "order", "budget", "found", "overhead, median / most", "gap, median / most", "seconds")
    return table(header, lines)


HOSTED = {  # what a row of the host's table shows beside plain PyTorch
    "with a plan": ("planned", None),
    "dispatch mode that does nothing": ("dispatch_mode", None),
    "`online.run`, `dtr_eq`": ("online.run", 1.0),
    "`online.budget`": ("online.budget", 1.0),
    "at 80 %": ("online.budget", 0.8),
}


def hosted(rows: Sequence[Row]) -> str:
    """One line for each model: a step of plain PyTorch in ms, and how many times that the others take."""
    lines = []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        of_graph = [row for row in rows if row["graph"] == graph and row["heuristic"] != "lru"]
        mine = {(row["method"], row["budget_fraction"]): row for row in of_graph}
        plain = mine["eager", None]
        line = [graph, str(plain["ops"]), f"{plain['measured_time_ns'] / 1e6:.1f} ms"]
        for key in HOSTED.values():
            row = mine[key]
            if "extra_ns_per_execution" not in row:
                line.append("-")  # not possible
                continue
            extra_us = row["extra_ns_per_execution"] / 1e3
            line.append(f"{row['measured_time_ns'] / plain['measured_time_ns']:.2f} times, {extra_us:+.0f} µs an op")
        lines.append(line)
    return table(("model", "ops", "plain PyTorch", *HOSTED), lines)


def compiled(rows: Sequence[Row]) -> str:
    """One line for each model: peak and time of a compiled step, of the leanest that the compiler finds, and with plans."""

    def cell(row: Row) -> str:
        if row["status"] != "MEASURED":
            return "infeasible" if row["status"] == "InfeasibleBudget" else "-"
        asked, found = row["budget_bytes"], row["measured_peak_bytes"]
        over = f" (> {format_bytes(asked)})" if asked is not None and found > asked else ""
        return f"{size(found)}{over}, {row['measured_time_ns'] / 1e6:.0f} ms"

    shares = sorted({row["budget_fraction"] for row in rows if row["method"] == "planned"}, reverse=True)
    lines = []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        mine = [row for row in rows if row["graph"] == graph]
        whole, *own = (row for row in mine if row["method"] == "inductor")
        plans = {row["budget_fraction"]: row for row in mine if row["method"] == "planned"}
        leanest = min(own, key=lambda row: int(row["measured_peak_bytes"]))
        lines.append((graph, *map(cell, (whole, leanest, *(plans[share] for share in shares)))))
    asked = [f"plan for {share:.0%}".replace("%", " %") for share in shares]
    return table(("model", "`torch.compile`", "its own budget, least peak", *asked), lines)


def middle_and_most(shares: Sequence[float]) -> str:
    """ "1.23 % / 4.56 %", or a dash."""
    return f"{percent(median(shares))} / {percent(max(shares))}" if shares else "-"


def size(size_bytes: int | None) -> str:
    """Bytes for people, or a dash."""
    return "-" if size_bytes is None else format_bytes(size_bytes)


def results() -> str:
    """The README's section, from the rows in ``benchmarks/``."""
    steps = [row for name in ("resnet50", "gpt2") for row in read_rows(ROOT / "benchmarks" / f"diff_{name}_cpu.jsonl")]
    plans = read_rows(ROOT / "benchmarks" / "plans.jsonl")
    return "\n\n".join(
        (
            BEGIN,
            "One training step on a CPU, planned and online, executed and measured (`benchmarks/diff_*_cpu.jsonl`; op times are "
            "modelled for that device, bytes are measured):",
            executed(steps),
            "Plans, and what is proved about them, under several budgets each, two cores "
            "(`benchmarks/plans.jsonl`; every budget is in `docs/plans.md`):",
            summarised(plans),
            "One training step on an NVIDIA H200, measured (`benchmarks/gpu.jsonl`; every budget and rival is in `docs/gpu.md`). "
            "Budgets are shares of the keep-all peak, overheads are over plain PyTorch:",
            on_gpu(of_rows(read_rows(ROOT / "benchmarks" / "gpu.jsonl"))),
            "What a step takes on the host, one thread, processor time (`benchmarks/eager_cpu.jsonl`). Straight-line code has "
            "less to do than autograd; deciding in Python takes longer than a small op, as these are but for the last model's:",
            hosted(read_rows(ROOT / "benchmarks" / "eager_cpu.jsonl")),
            "One training step compiled by Inductor on a CPU, two threads (`benchmarks/inductor_cpu.jsonl`, made by "
            "`python -m belady.bench_inductor`): measured peak and time with nothing asked, for the least peak among ratios of "
            "the compiler's memory budget, and with plans for shares of the first peak (times here vary by a third from run to "
            "run; -: no plan found):",
            compiled(read_rows(ROOT / "benchmarks" / "inductor_cpu.jsonl")),
            END,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the section, or check it; return the exit code."""
    check = parser_of(__doc__).parse_args(argv).check
    readme, plans = ROOT / "README.md", ROOT / "docs" / "plans.md"

    def work() -> int:
        page = PLANS + planned(read_rows(ROOT / "benchmarks" / "plans.jsonl"))
        others = read_rows(ROOT / "benchmarks" / "others.jsonl")
        page += OTHERS + summarised(others) + "\n\n" + planned(others) + "\n"
        page += GRID + stepped(read_rows(ROOT / "benchmarks" / "grid.jsonl")) + "\n"
        page += LEAST + smallest(read_rows(ROOT / "benchmarks" / "least.jsonl")) + "\n"
        page += LAYERED + layered(read_rows(ROOT / "benchmarks" / "layered.jsonl")) + "\n"
        return publish({readme: with_section(readme, BEGIN, results()), plans: page}, check=check)

    return ended("readme_tables", work)


if __name__ == "__main__":
    sys.exit(main())
