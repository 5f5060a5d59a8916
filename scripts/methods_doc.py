"""Draws ``docs/methods.md`` (between its markers) and ``docs/methods.png`` from rows of the methods benchmark.

    python -m belady.methods_doc

``--check`` changes nothing and exits with 2 where the page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib import pyplot as plt

from planner.result import Status

from .page import END, latest, page_of_rows, percent, table
from .plots import COLOURS, MARKERS, save
from .sweep import ONLINE, REFUSED, Row

BEGIN = "<!-- results: drawn by scripts/methods_doc.py -->"
OURS = "cutting_stages"
BEST = "online:best"


@dataclass(frozen=True)
class Cells:
    """Rows of the benchmark, the last of each cell, and our bound on each graph and budget.

    bounds  (graph, budget in bytes) -> ns; the best of all ``bound_ns``, each of which holds for every schedule with the
            graph's order of first executions
    """

    rows: tuple[Row, ...]
    bounds: dict[tuple[str, int], int]

    @property
    def methods(self) -> list[str]:
        """Planners by name, ours first, then the online rules in the order of the rows."""
        names = dict.fromkeys(row["method"] for row in self.rows)
        return sorted(names, key=lambda name: (name.startswith(ONLINE), name != OURS, "" if name.startswith(ONLINE) else name))

    def of(self, method: str) -> list[Row]:
        """The rows of a method."""
        return [row for row in self.rows if row["method"] == method]

    def over(self, row: Row) -> float | None:
        """Time / our bound - 1; None without a schedule or a bound. Below 0: another order of first executions is better."""
        bound_ns = self.bounds.get((row["fingerprint"], row["budget_bytes"]))
        return None if row["time_ns"] is None or not bound_ns else row["time_ns"] / bound_ns - 1


def cells(rows: Iterable[Row]) -> Cells:
    """The last row of each cell, and the bounds that all rows together prove."""
    found = latest(rows)
    bounds: dict[tuple[str, int], int] = {}
    for row in found:
        where = row["fingerprint"], row["budget_bytes"]
        bounds[where] = max(row["bound_ns"] or 0, row["keep_all_time_ns"], bounds.get(where, 0))
    return Cells(tuple(found), bounds)


# ------------------------------------------------------------------------------------------------------- tables


def summary(found: Cells) -> str:
    """One line a method: how often it found a schedule, how dear it is, how long it took."""
    lines = []
    for method in found.methods:
        rows = found.of(method)
        planned = [row for row in rows if row["time_ns"] is not None]
        over = [ratio for row in planned if (ratio := found.over(row)) is not None]
        seconds = [row["found_s"] for row in planned if row["found_s"] is not None]
        lines.append(
            (
                f"`{method}`",
                f"{len(planned)} of {len(rows)}",
                str(sum(row["status"] == REFUSED for row in rows) or "-"),
                percent(median(over) if over else None),
                percent(max(over, default=None)),
                str(sum(ratio <= 0.01 for ratio in over)),
                "-" if not seconds else f"{median(seconds):.2g}",
                f"{median(row['wall_s'] for row in rows):.2g}",
            )
        )
    header = ("method", "schedules", "refused", "over bound, median", "worst", "within 1 %", "seconds to it, median", "in all")
    return table(header, lines)


def by_graph(found: Cells) -> str:
    """A table for each graph: methods down, budgets across; random graphs of one size together, as medians."""
    families: dict[str, list[Row]] = {}
    for row in found.rows:
        families.setdefault(re.sub(r"_seed\d+$", "", row["graph"]), []).append(row)
    parts = []
    for family, rows in families.items():
        shares = sorted({_share(row) for row in rows}, reverse=True)
        count = len({row["fingerprint"] for row in rows})
        sizes = sorted({row["ops"] for row in rows})
        lines = [
            (
                f"`{method}`",
                *(_cell(found, [row for row in rows if row["method"] == method and _share(row) == share]) for share in shares),
            )
            for method in found.methods
            if any(row["method"] == method for row in rows)
        ]
        said = f"### {family}\n\n{sizes[0]} ops" + (f", {count} random graphs: medians of what was found" if count > 1 else "")
        parts.append(f"{said}\n\n{table(('method', *(f'{share} %' for share in shares)), lines)}")
    return "\n\n".join(parts)


def _share(row: Row) -> int:
    share: float = row["budget_fraction"]
    return round(100 * share)


def _cell(found: Cells, rows: Sequence[Row]) -> str:
    """Cost over our bound, and the seconds to it."""
    over = [ratio for row in rows if (ratio := found.over(row)) is not None]
    if not over:
        kinds = {row["status"] for row in rows}
        return "-" if not kinds else kinds.pop().lower() if len(kinds) == 1 else "none"
    told = f"{percent(median(over))} ({median(row['found_s'] for row in rows if row['found_s'] is not None):.2g} s)"
    return told if len(over) == len(rows) else f"{told}, {len(over)} of {len(rows)}"


# ------------------------------------------------------------------------------------------------------- figure


def draw(found: Cells, path: str) -> None:
    """Two profiles, a line a method: the share of all cells with a schedule this close to our bound, or found this soon.

    Of the online rules only the best of all is drawn. Only cells count for which some method found a schedule.
    """
    methods = [method for method in found.methods if not method.startswith(ONLINE) or method == BEST]
    solvable = {(row["fingerprint"], row["budget_bytes"]) for row in found.rows if row["time_ns"] is not None}
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)

    def over_percent(row: Row) -> float | None:
        over = found.over(row)
        return None if over is None else max(100 * over, 0.01)

    def seconds(row: Row) -> float | None:
        return None if row["found_s"] is None else max(row["found_s"], 0.01)

    panels: tuple[tuple[Any, Callable[[Row], float | None], str], ...] = (
        (axes[0], over_percent, "time over our bound (%; 0.01 or less)"),
        (axes[1], seconds, "seconds until found (0.01 or less)"),
    )
    for panel, measure, label in panels:
        for number, method in enumerate(methods):
            points = sorted(value for row in found.of(method) if (value := measure(row)) is not None)
            if not points:
                continue
            heights = [100 * (at + 1) / len(solvable) for at in range(len(points))]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]}
            dashes = "--" if method == BEST else "-"
            panel.step(points, heights, where="post", label=method, linestyle=dashes, markersize=3, linewidth=1.3, **style)
        panel.set_xscale("log")
        panel.set(xlabel=label)
        panel.grid(alpha=0.3)
    axes[0].set(ylabel="share of graphs and budgets (%)", ylim=(0, 102))
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


# --------------------------------------------------------------------------------------------------------- page


def results(found: Cells, picture: str) -> str:
    """What stands between the markers."""
    limits = sorted({row["options"]["time_limit_s"] for row in found.rows if "time_limit_s" in row["options"]})
    limit = " or ".join(f"{limit_s:g}" for limit_s in limits)
    graphs = len({row["fingerprint"] for row in found.rows})
    proved = sum(row["status"] == Status.OPTIMAL for row in found.of(OURS))
    return "\n\n".join(
        (
            BEGIN,
            f"{len(found.rows)} cells on {graphs} graphs, a time limit of {limit} seconds, one thread; our "
            f"bound is attained, within the asked gap, in {proved} of {len(found.of(OURS))}.",
            f"![Share of cells with a schedule close to the bound, and found soon]({picture})",
            summary(found),
            by_graph(found),
            END,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the section and the figure, or check the section; return the exit code."""
    return page_of_rows(
        argv,
        name="methods",
        description=__doc__,
        begin=BEGIN,
        having=("ops", "found_s", "wall_s"),
        results=lambda rows, picture: results(cells(rows), picture),
        draw=lambda rows, path: draw(cells(rows), path),
    )


if __name__ == "__main__":
    sys.exit(main())
