"""Draws ``docs/online.md`` (between its markers) and ``docs/online.png`` from rows of the online benchmark.

    python -m belady.online_doc

``--check`` changes nothing and exits with 2 where the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .page import END, page_of_rows, table
from .plots import draw_panels
from .sweep import ONLINE, Row, proved

BEGIN = "<!-- results: drawn by scripts/online_doc.py -->"
DTR, OURS, TOLD = ONLINE + "dtr", ONLINE + "demand", ONLINE + "demand+next_use"


def by_graph(rows: Sequence[Row]) -> str:
    """A table a graph: h_DTR, our rule, the best of all online rules and its name, next uses known, planner and bound."""
    parts = []
    bounds = proved(rows)
    for name in dict.fromkeys(row["graph"] for row in rows):
        mine = [row for row in rows if row["graph"] == name]
        lines = []
        for budget_bytes in sorted({row["budget_bytes"] for row in mine}, reverse=True):
            at = {row["method"]: row for row in mine if row["budget_bytes"] == budget_bytes}
            any_row = next(iter(at.values()))
            online = [row for m, row in at.items() if m.startswith(ONLINE) and "next_use" not in m and row["time_ns"] is not None]
            best = min(online, key=lambda row: row["time_ns"], default=None)
            plans = [row for m, row in at.items() if not m.startswith(ONLINE)]
            plan = min((row for row in plans if row["time_ns"] is not None), key=lambda row: row["time_ns"], default=None)
            bound_ns, base = bounds.get(any_row["fingerprint"], {}).get(budget_bytes), any_row["keep_all_time_ns"]
            lines.append(
                (
                    f"{any_row['budget_fraction']:.0%}",
                    _cell(at.get(DTR)),
                    _cell(at.get(OURS)),
                    "-" if best is None else f"{_cell(best)} `{best['method'].removeprefix(ONLINE)}`",
                    _cell(at.get(TOLD)),
                    _cell(plan) if plan is not None else "-" if not plans else plans[0]["status"].lower(),
                    "-" if not bound_ns or not base else f"{bound_ns / base - 1:.1%}",
                )
            )
        header = ("budget", "h_DTR", "`demand`", "best online rule", "next uses known", "planner", "proved bound")
        parts.append(f"### {name}\n\n{mine[0]['ops']} ops\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """How often our rule is better than h_DTR, equal, or worse, a line a graph; what did not complete is worse than any run."""
    lines = []
    for name in dict.fromkeys(row["graph"] for row in rows):
        of = {(row["method"], row["budget_bytes"]): row["time_ns"] for row in rows if row["graph"] == name}
        pairs = [
            (of[OURS, budget], time_ns) for (method, budget), time_ns in of.items() if method == DTR and (OURS, budget) in of
        ]
        ordered = [(float("inf") if a is None else a, float("inf") if b is None else b) for a, b in pairs]
        better, worse = sum(a < b for a, b in ordered), sum(a > b for a, b in ordered)
        done = f"{sum(a is not None for a, _ in pairs)} / {sum(b is not None for _, b in pairs)}"
        lines.append((name, str(len(pairs)), str(better), str(len(pairs) - better - worse), str(worse), done))
    return table(("graph", "budgets", "`demand` better", "equal", "h_DTR better", "completed, `demand` / h_DTR"), lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["overhead"] is not None:
        return f"{row['overhead']:.1%}"
    words = {"OUT_OF_MEMORY": "OOM", "THRASHED": "thrashes"}
    return words.get(row["notes"].get("status", ""), str(row["status"]).lower())


def draw(rows: Sequence[Row], path: str) -> None:
    """Overhead against budget, a panel a graph, the proved bound as ground."""
    shown = [DTR, OURS, *dict.fromkeys(row["method"] for row in rows if not row["method"].startswith(ONLINE))]
    names = dict.fromkeys(row["graph"] for row in rows)
    draw_panels(
        [[row for row in rows if row["graph"] == name and row["method"] in shown] for name in names], shown, path, most_across=4
    )


def results(rows: Sequence[Row], picture: str) -> str:
    """What stands between the markers."""
    told = "" if any(not row["method"].startswith(ONLINE) for row in rows) else "The planner has not been run yet.\n\n"
    image = f"![Overhead against budget]({picture})"
    return f"{BEGIN}\n\n{told}{image}\n\n{summary(rows)}\n\n{by_graph(rows)}\n\n{END}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the section and the figure, or check the section; return the exit code."""
    return page_of_rows(argv, name="online", description=__doc__, begin=BEGIN, having=("ops",), results=results, draw=draw)


if __name__ == "__main__":
    sys.exit(main())
