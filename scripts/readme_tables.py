"""Draws the README's results from committed rows; ``--check`` says whether it is up to date.

python -m belady.readme_tables
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphs.files import write_whole
from planner.budget import format_bytes

from .rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: drawn by scripts/readme_tables.py -->", "<!-- end of results -->"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def executed(rows: Sequence[dict[str, Any]]) -> str:
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


def planned(rows: Sequence[dict[str, Any]]) -> str:
    """Plans of every graph at every budget, with what was proved."""
    return table(
        ("graph", "ops", "budget", "overhead", "gap", "seconds"),
        (
            (
                row["graph"],
                str(row["ops"]),
                f"{row['budget_fraction']:.0%}",
                percent(row["overhead"]),
                percent(row["gap"]),
                f"{row['wall_s']:.1f}",
            )
            for row in rows
        ),
    )


def percent(share: float | None) -> str:
    """ "1.23 %", or a dash."""
    return "-" if share is None else f"{share:.2%}".replace("%", " %")


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
            "Plans and what is proved about them, two cores (`benchmarks/plans.jsonl`):",
            planned(plans),
            END,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the section, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 2 where the README is out of date")
    arguments = parser.parse_args(argv)
    readme = (ROOT / "README.md").read_text()
    before, _, rest = readme.partition(BEGIN)
    fresh = before + results() + rest.partition(END)[2]
    if arguments.check:
        return 0 if fresh == readme else 2
    write_whole(ROOT / "README.md", fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
