"""Draws ``docs/gpu.md`` (between its markers) and ``docs/gpu.png`` from rows of the GPU check.

    python -m belady.gpu_doc

``--check`` changes nothing and exits with 2 where the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from graphs.errors import InputError
from planner.budget import format_bytes

from .gpu_check import BACKED, BACKEND, BOTH_COMPILED, COMPILED, ENTRIES, INTERPOSED, MATCHED, ONLINE, PLANNED, WHOLE
from .output import ended
from .page import END, ROOT, parser_of, percent, publish, table, with_section
from .plots import draw_measured
from .rows import read_rows
from .sweep import Row

BEGIN = "<!-- results: drawn by scripts/gpu_doc.py -->"
PLAN, GRAPHED = PLANNED


class Measured:
    """The rows of one workload on one device, the last of each cell.

    plain_ns  the fastest measurement of plain PyTorch there: overheads are over this one, which flatters no other
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.name: str = rows[0]["graph"]
        self.device: str = rows[0]["device"]
        self._rows = {(row["method"], row["share"]): row for row in rows}
        self.plain_ns: int = min(row["measured_eager_time_ns"] for row in rows if row.get("measured_eager_time_ns"))
        self.plain_bytes: int = next(row for row in rows if _is_plain(row))["measured_peak_bytes"]

    def row(self, method: str, share: float | None = None) -> Row | None:
        return self._rows.get((method, share))

    def budget_bytes(self, share: float) -> int | None:
        """What a share of the keep-all peak comes to, which is not plain PyTorch's measured peak."""
        rows = (self.row(method, share) for method in (*PLANNED, *ONLINE, INTERPOSED))
        return next((row["budget_bytes"] for row in rows if row is not None and row["budget_bytes"] is not None), None)

    @property
    def shares(self) -> list[float]:
        """Budgets below the keep-all peak."""
        return sorted({share for _, share in self._rows if share is not None and share < 1}, reverse=True)

    def overhead(self, time_ns: int) -> float:
        """Over plain PyTorch."""
        return time_ns / self.plain_ns - 1

    def points(self, method: str) -> list[tuple[int, int]]:
        """Peaks and times measured for a method, of whatever budget."""
        rows = [row for (of, _), row in self._rows.items() if of == method or (method == PLAN and of in MATCHED)]
        if method == COMPILED:
            return sorted({(peak, time_ns) for row in rows for _, peak, time_ns in row.get("measured_sweep", ())})
        return sorted((row["measured_peak_bytes"], row["measured_time_ns"]) for row in rows if row["measured_time_ns"])

    def is_worth_it(self, method: str, point: tuple[int, int]) -> bool:
        """Whether a peak is no higher than plain PyTorch's, and nothing else of the method is as good in peak and time."""
        others = (other for other in self.points(method) if other != point)
        beaten = any(peak <= point[0] and time_ns <= point[1] for peak, time_ns in others)
        return point[0] <= self.plain_bytes and not beaten

    def within(self, peak_bytes: int, rival: str) -> tuple[int, int] | None:
        """Peak and time of the fastest plan measured whose peak is at most this one; compiled plans for compiled rivals only."""
        plans = self.points(PLAN) + (self.points(BOTH_COMPILED) if rival == COMPILED else [])
        return min((point for point in plans if point[0] <= peak_bytes), key=lambda point: point[1], default=None)


def of_rows(rows: Iterable[Row]) -> list[Measured]:
    """By workload and device, in the order of the file; what was never measured is left out."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["graph"] is not None:
            groups.setdefault((row["graph"], row["device"]), []).append(row)
    return [Measured(mine) for mine in groups.values() if any(_is_plain(row) for row in mine)]


def _check_one_backend(rows: Iterable[Row], path: str) -> None:
    """Refuse compiled steps of several backends, which would stand beside each other as if of one. Raises InputError."""
    backends = sorted({row.get("measured_backend", BACKEND) for row in rows if row["method"] in BACKED})
    if len(backends) > 1:
        raise InputError(f"{path} has compiled steps of several backends ({', '.join(backends)}); keep those of one in a file")


def _is_plain(row: Row) -> bool:
    return (row["method"], row["status"]) == ("eager", "MEASURED")


def summary(found: Sequence[Measured], shares: Sequence[float] = (0.7, 0.5, 0.3)) -> str:
    """One line for each workload: overheads planned, measured, and as a CUDA graph; and the plan for a checkpoint's peak."""
    lines = []
    for each in found:
        line = [each.name, f"{each.plain_ns / 1e6:.1f} ms, {format_bytes(each.plain_bytes)}"]
        for share in shares:
            plan, graphed = each.row(PLAN, share), each.row(GRAPHED, share)
            if plan is None or plan["measured_time_ns"] is None:
                line.append(_words(plan))
                continue
            parts = [plan["overhead"], each.overhead(plan["measured_time_ns"])]
            parts.append(each.overhead(graphed["measured_time_ns"]) if graphed is not None else None)
            line.append(" / ".join(map(percent, parts)))
        rival = next(iter(each.points("checkpoint:1")), None)
        same = each.within(rival[0], "checkpoint:1") if rival is not None else None
        if rival is None or same is None:
            line.append("-")
        else:
            overheads = f"{percent(each.overhead(rival[1]))} → {percent(each.overhead(same[1]))}"
            line.append(f"{overheads} ({format_bytes(rival[0])})")
        lines.append(line)
    header = [f"{share:.0%}: planned / measured / as CUDA graph".replace("%", " %") for share in shares]
    return table(("step", "plain PyTorch", *header, "every block checkpointed → plan of the same peak"), lines)


def worst(found: Sequence[Measured]) -> str:
    """What was promised, as far as the rows go: peaks above plans and budgets, overheads beside planned ones, rivals that win."""
    apart, graphed_apart, above, graphed_above, broken, planned = 0.0, 0.0, 0, 0, 0, 0
    for each in found:
        for share in (*each.shares, 1.0):
            for method in PLANNED:
                row = each.row(method, share)
                if row is None or row["measured_time_ns"] is None:
                    continue
                planned += 1
                further = abs(each.overhead(row["measured_time_ns"]) - row["overhead"])
                more = row["measured_peak_bytes"] - row["peak_bytes"]
                if method == PLAN:
                    apart, above = max(apart, further), max(above, more)
                    broken += row["measured_peak_bytes"] > row["budget_bytes"]
                else:
                    graphed_apart, graphed_above = max(graphed_apart, further), max(graphed_above, more)
    rivals = [(each, method, point) for each in found for method in (*WHOLE[1:], COMPILED) for point in each.points(method)]
    good = [(each, method, point) for each, method, point in rivals if each.is_worth_it(method, point)]
    fair = [(time_ns, plan) for each, method, (peak, time_ns) in good if (plan := each.within(peak, method)) is not None]
    slower = sum(plan[1] > time_ns for time_ns, plan in fair)
    points, graphed_points = (f"{100 * share:.2f} points" for share in (apart, graphed_apart))
    return "\n".join(
        (
            f"- {planned} planned steps ran. Their measured and planned overheads are at most {points} apart, those of CUDA "
            f"graphs {graphed_points}.",
            f"- Measured peaks are at most {above:,} bytes above the planned ones, and {broken} are above the budget; those of "
            f"CUDA graphs are at most {graphed_above:,} bytes above the planned ones.",
            f"- {len(fair)} checkpointed or compiled steps have a plan beside them that takes no more memory; of these plans "
            f"{slower} took longer. {len(rivals) - len(good)} others do not count: they take more memory than plain PyTorch, or "
            f"another measurement of the same rival takes no more memory and no more time.",
        )
    )


def budgets(each: Measured) -> str:
    """One line for each budget: the plan, and what was decided online."""
    lines = []
    for share in each.shares:
        plan, graphed = each.row(PLAN, share), each.row(GRAPHED, share)
        asked_bytes = each.budget_bytes(share)
        line = [f"{share:.0%}".replace("%", " %") + (f" ({format_bytes(asked_bytes)})" if asked_bytes is not None else "")]
        if plan is None or plan["measured_time_ns"] is None:
            line += [_words(plan), "-", "-", "-"]
        else:
            line += [
                f"{percent(plan['overhead'])} (gap {percent(plan['gap'])})",
                percent(each.overhead(plan["measured_time_ns"])),
            ]
            line.append(percent(each.overhead(graphed["measured_time_ns"])) if graphed is not None else "-")
            line.append(f"{plan['peak_bytes']:,} / {plan['measured_peak_bytes']:,}")
        for method in (*ONLINE, INTERPOSED):
            row = each.row(method, share)
            line.append(
                _words(row) if row is None or row["measured_time_ns"] is None else percent(each.overhead(row["measured_time_ns"]))
            )
        lines.append(line)
    names = [f"`{method.removeprefix('online:')}`" for method in (*ONLINE, INTERPOSED)]
    return table(("budget", "planned", "measured", "as CUDA graph", "peak, planned / measured, bytes", *names), lines)


def rivals(each: Measured) -> str:
    """One line for each rival: its peak and overhead, and those of the fastest plan measured that takes no more."""
    lines = []
    for method in (*WHOLE[1:], COMPILED):
        for peak_bytes, time_ns in each.points(method):
            plan = each.within(peak_bytes, method)
            mine = ("-", "-") if plan is None else (format_bytes(plan[0]), percent(each.overhead(plan[1])))
            lines.append((f"`{method}`", format_bytes(peak_bytes), percent(each.overhead(time_ns)), *mine))
    return table(("rival", "measured peak", "overhead", "peak of the plan", "overhead of the plan"), lines)


def _words(row: Row | None) -> str:
    if row is None:
        return "-"
    reason = str(row["reason"] or "")
    known = {"OUT_OF_MEMORY": "out of memory", "THRASHED": "thrashes", "BudgetExceeded": "out of memory"}
    return next((words for word, words in known.items() if reason.startswith(word)), str(row["status"]).lower())


def draw(found: Sequence[Measured], path: str) -> None:
    """Measured overhead against measured peak, a panel a workload."""
    methods = (PLAN, GRAPHED, "online:dtr", "online:dtr_eq", "online:coop", INTERPOSED, *WHOLE[1:], COMPILED)
    panels = []
    for each in found:
        curves = {m: [(peak / each.plain_bytes, each.overhead(time_ns)) for peak, time_ns in each.points(m)] for m in methods}
        panels.append((f"{each.name}, {format_bytes(each.plain_bytes)}", curves))
    draw_measured(panels, methods, path)


def results(found: Sequence[Measured], picture: str) -> str:
    """What stands between the markers."""
    parts = [BEGIN]
    for device in dict.fromkeys(each.device for each in found):
        mine = [each for each in found if each.device == device]
        parts += [f"## {device}", f"![Overhead against peak]({picture})", worst(mine)]
        for each in mine:
            parts += [f"### {each.name}", f"Plain PyTorch: {each.plain_ns / 1e6:.2f} ms, {format_bytes(each.plain_bytes)}"]
            parts += [budgets(each), rivals(each)]
    return "\n\n".join((*parts, END))


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the section and the figure, or check the section; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default=str(ROOT / "benchmarks" / "gpu.jsonl"), help="rows of the GPU check")
    parser.add_argument("--page", default=str(ROOT / "docs" / "gpu.md"), help="page with the markers")
    arguments = parser.parse_args(argv)
    page = Path(arguments.page)
    picture = page.with_suffix(".png")

    def work() -> int:
        rows = read_rows(arguments.rows, ENTRIES)
        _check_one_backend(rows, arguments.rows)
        found = of_rows(rows)
        if not found:  # nothing to put in place of what is on the page
            raise InputError(f"{arguments.rows} holds no measured steps of gpu_check")
        code = publish({page: with_section(page, BEGIN, results(found, picture.name))}, check=arguments.check)
        if not arguments.check:
            draw(found, str(picture))
        return code

    return ended("gpu_doc", work)


if __name__ == "__main__":
    sys.exit(main())
