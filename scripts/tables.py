"""Tables on standard output, for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from graphs.ir import Graph
from planner.budget import format_bytes, format_share
from planner.result import Status, gap_of

from .output import printable

if TYPE_CHECKING:
    from online.compare import Comparison


def print_comparison(comparison: Comparison) -> None:
    """Its rows, and where each online run and the plan differ."""
    print_rows(comparison.graph, comparison.rows())
    console = _console()
    for block in comparison.blocks:
        for difference in block.differences:
            if difference.extra_ns:
                console.print()
                lines = map(printable, str(difference).split("\n"))
                console.print("\n".join(lines), highlight=False, soft_wrap=True)


def print_rows(graph: Graph, rows: Sequence[dict[str, Any]]) -> None:
    """One table: a line a row, a rule between budgets; measured columns only where something was measured.

    Under "any order" stands the gap to what is proved of all schedules, under "gap" that to the bound for the plan's order.
    """
    measured = any(row["measured_time_ns"] is not None for row in rows)
    title = f"{printable(graph.name)}: {len(graph.ops)} ops, keep-all {graph.keep_all_time_ns / 1e6:.3f} ms"
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    of_all = any(row.get("any_order_bound_ns") is not None for row in rows)
    columns = ["budget", "method", "status", "overhead", "bound", "gap", *(["any order"] if of_all else [])]
    columns += ["peak", "recomputed", "wall s"]
    columns += ["step ms", "measured peak", "grad error"] if measured else []
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if 0 < number < 3 else "right", no_wrap=True)
    base = graph.keep_all_time_ns
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [
            f"{_cell(row['budget_fraction'], format_share)} {format_bytes(row['budget_bytes'])}",
            row["method"],
            row["status"],
            _cell(row["overhead"], "{:.2%}"),
            _cell(row["bound_ns"] / base - 1 if row["bound_ns"] is not None and base else None, "{:.2%}"),
            _cell(row["gap"], "{:.2%}"),
            *([_cell(gap_of(row["time_ns"], row.get("any_order_bound_ns")), "{:.2%}")] if of_all else []),
            _cell(row["peak_bytes"], format_bytes),
            _cell(row["recomputed_ops"], "{}"),
            _cell(row["wall_s"], "{:.2f}"),
        ]
        if measured:
            cells += [
                _cell(row["measured_time_ns"], lambda ns: f"{ns / 1e6:.1f}"),
                _cell(row["measured_peak_bytes"], format_bytes),
                _cell(row["max_grad_error"], "{:.3g}"),
            ]
        table.add_row(*cells, end_section=following is not None and following["budget_bytes"] != row["budget_bytes"])
    _print_whole(table)


def print_sweep(graph: Graph, rows: Sequence[dict[str, Any]], ground: Mapping[int, int]) -> None:
    """Overhead by budget (down) and method (across), with what is proved. ``ground``: the best bound for each budget."""
    title = f"{printable(graph.name)}: {len(graph.ops)} ops, keep-all {graph.keep_all_time_ns / 1e6:.3f} ms; overhead"
    table = Table(header_style="bold", box=None)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for column in ("budget", "proved", *methods):
        table.add_column(column, justify="right", no_wrap=True)
    base = graph.keep_all_time_ns
    by_budget: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_budget.setdefault(row["budget_bytes"], {})[row["method"]] = row
    for budget_bytes, at in by_budget.items():
        share = _cell(next(iter(at.values()))["budget_fraction"], format_share)
        bound = ground[budget_bytes] / base - 1 if budget_bytes in ground and base else None
        infeasible_ = any(row["status"] == Status.INFEASIBLE for row in at.values())
        cells = [f"{share} {format_bytes(budget_bytes)}", "infeasible" if infeasible_ else _cell(bound, "{:.2%}")]
        for method in methods:
            row = at.get(method, {"status": "", "overhead": None, "notes": {}})
            how = str(row["notes"].get("status", row["status"]))  # an online run says how it ended
            cells.append(how.lower().replace("_", " ") if row["overhead"] is None else f"{row['overhead']:.2%}")
        table.add_row(*cells)
    _console().print(title, style="italic", highlight=False, soft_wrap=True)
    _print_whole(table)


def print_facts(row: dict[str, Any], whole_bytes: int) -> None:
    """A line an entry, with what people read more easily. ``whole_bytes``: of the keep-all peak; 0: no shares."""
    table = Table(box=None, show_header=False)
    for key, cell in row.items():
        read = share = ""
        text = f"{cell:,}" if type(cell) is int else printable(_cell(cell, "{:.4g}" if isinstance(cell, float) else "{}"))
        if cell is not None and key.endswith("_bytes"):
            read = format_bytes(cell)
            share = f"{cell / whole_bytes:.1%} of the keep-all peak" if whole_bytes else ""
        elif cell is not None and key.endswith("_ns"):
            read = f"{cell / 1e6:,.3f} ms"
        elif isinstance(cell, float) and not key.endswith("_s"):
            read = f"{cell:.2%}" if cell < 100 else format_share(cell)
        table.add_row(key, text, read, share)
    _print_whole(table)


def print_workloads(rows: Sequence[dict[str, Any]]) -> None:
    """A line each, with all that its row has."""
    table = Table(box=None, header_style="bold")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row.values()))
    _console().print(table)


def _console(width: int | None = None) -> Console:
    """Standard output, as wide as the terminal where none is given; names are written as they are."""
    width = width if width is not None or sys.stdout.isatty() else 160
    height = None if width is None else 25  # a terminal that can do nothing is else taken to be 80 wide whatever is asked
    return Console(width=width, height=height, markup=False, emoji=False)


def _print_whole(table: Table) -> None:
    """Print a table as wide as it needs to be: a terminal that is narrower wraps its lines, and no number is cut short."""
    console = _console()
    wanted = Measurement.get(console, console.options.update(max_width=1 << 14), table).maximum
    _console(max(console.width, wanted)).print(table)


def _cell(number: Any, form: str | Callable[[Any], str]) -> str:
    if number is None:
        return "-"
    return form.format(number) if isinstance(form, str) else form(number)
