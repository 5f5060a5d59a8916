"""Figures. Overhead against budget with the proved bound as ground nobody can enter; memory over time for one budget."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from graphs.errors import InputError
from graphs.files import write_whole
from planner.budget import format_bytes, format_share, share_of
from planner.schedule import Compute, Schedule, keep_all
from planner.simulate import simulate

from .output import printable
from .rows import make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from graphs.ir import Graph
    from online.compare import Comparison

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
MARKERS = "os^DvP*X<>h"  # as many as have no factor in common with the colours: no two of 77 curves look alike
DASHES = ["-", "--", ":", "-."]  # one for each time round the colours
SECONDS_FROM_MS = 10_000
MEASURED_HIGHEST = 100  # of figures of measured steps, in per cent
HIGHEST = 200  # overhead in per cent, of a figure: what takes three times as long is no alternative


def draw_overhead(axes: Axes, rows: Sequence[dict[str, Any]], methods: Sequence[str] = ()) -> None:
    """Overhead (%) against budget (share of the keep-all peak), one line a method, from result rows of one graph.

    methods  fixes the colours, where several figures are to have the same (default: by order in the rows)
    """
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    bounds: dict[float, float] = {}
    for row in sorted(rows, key=lambda row: row["budget_bytes"]):
        share, base = _share(row), row["keep_all_time_ns"]
        overhead = float("nan") if row["overhead"] is None else 100 * row["overhead"]  # nothing there: the line is broken
        lines[row["method"]].append((share, overhead))
        if row["bound_ns"] is not None and base:
            bounds[share] = max(bounds.get(share, 0.0), 100 * (row["bound_ns"] / base - 1))
    bounds.setdefault(1.0, 0.0)
    shares = sorted(bounds)
    left = min([*shares, *map(_share, rows)]) - 0.03
    # What is proved for a budget holds for every smaller one, and for nothing between it and the next larger: steps.
    for smaller, larger in reversed(list(pairwise(shares))):
        bounds[smaller] = max(bounds[smaller], bounds[larger])
    ground = [bounds[shares[0]], *(bounds[share] for share in shares)]
    axes.fill_between([left, *shares], ground, color="0.85", step="pre", linewidth=0, label="proved impossible in this order")
    refused = [_share(row) for row in rows if row["status"] == "INFEASIBLE"]
    if refused:
        axes.axvspan(left, max(refused), color="0.7", linewidth=0, label="proved: no schedule fits")
    lines.pop("keep_all", None)
    axes.plot([1.0], [0.0], "k*", markersize=9, label="keep everything", clip_on=False, zorder=5)
    order = list(methods or lines)
    for method, points in sorted(lines.items(), key=lambda line: order.index(line[0])):
        number = order.index(method)
        style = look(number) | {"marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        whole = [] if any(share == 1 for share, _ in points) else [(1.0, 0.0)]
        axes.plot(*zip(*sorted([*points, *whole]), strict=True), label=label_of(method), **style)
    axes.set(xlabel="budget / keep-all peak", ylabel="overhead (%)", xlim=(left, 1.02))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _share(row: Mapping[str, Any]) -> float:
    """Of the keep-all peak; a graph without bytes has no shares."""
    share: float | None = row["budget_fraction"]
    return 1.0 if share is None else share


def look(number: int) -> dict[str, Any]:
    """Colour and dashes of a curve."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def label_of(method: str) -> str:
    """A method as legends have it."""
    return method.removeprefix("online:") + (" (online)" if method.startswith("online:") else "")


def draw_memory(axes: Axes, graph: Graph, schedules: dict[str, Schedule], budget_bytes: int, methods: Sequence[str]) -> None:
    """Bytes in memory while each op runs, against time, one line a schedule, by method.

    methods  fixes the colours, as for ``draw_overhead``
    """
    largest = 0.0
    drawn = []
    for method, schedule in schedules.items():
        trace = simulate(graph, schedule)
        times, held, now = [0.0], [float(graph.resident_bytes)], 0.0
        for step, memory in zip(schedule, trace.memory_bytes, strict=True):
            if isinstance(step, Compute):
                now += graph.ops[step.op].time_ns / 1e6
                times.append(now)
                held.append(float(memory))
        drawn.append((method, times, held))
        largest = max(largest, *held)
    unit, power = next(((u, p) for u, p in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if largest >= 2**p), ("bytes", 0))
    slow = max(times[-1] for _, times, _ in drawn) >= SECONDS_FROM_MS
    for method, times, held in drawn:
        style = {"color": "0.6"} if method == "keep_all" else look(methods.index(method))
        label = "keep everything, over time" if method == "keep_all" else label_of(method)
        shown = [at / 1e3 for at in times] if slow else times
        axes.plot(shown, [h / 2**power for h in held], label=label, linewidth=1, drawstyle="steps", **style)
    axes.axhline(budget_bytes / 2**power, color="k", linestyle="--", linewidth=1, label="budget")
    resident = "parameters, buffers, inputs"
    axes.axhspan(0, graph.resident_bytes / 2**power, color="0.93", linewidth=0, label=resident)
    axes.set(xlabel=f"time ({'s' if slow else 'ms'})", ylabel=f"memory ({unit})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Both figures side by side; memory over time for the smallest budget that has a plan."""
    graph = comparison.graph
    planned = [block for block in comparison.blocks if block.plan.schedule is not None]
    rows = comparison.rows()
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "keep_all"))
    figure, axes = plt.subplots(1, 2 if planned else 1, figsize=(12 if planned else 6, 5), squeeze=False, layout="constrained")
    draw_overhead(axes[0][0], rows, methods)
    _entitle(axes[0][0], graph.name)
    _cut_off(axes[0][0])
    if planned:
        block = min(planned, key=lambda b: b.budget_bytes)
        assert block.plan.schedule is not None
        schedules = {"keep_all": keep_all(graph)}
        schedules |= {block.plan.method: block.plan.schedule} if block.plan.method != "keep_all" else {}
        schedules |= {f"online:{run.rule}": run.schedule for run in block.runs if run.completed}
        draw_memory(axes[0][1], graph, schedules, block.budget_bytes, methods)
        share = share_of(block.budget_bytes, comparison.keep_all.budget_bytes)
        where = format_bytes(block.budget_bytes) if share is None else f"{format_share(share)} of the keep-all peak"
        _entitle(axes[0][1], f"{graph.name} in {where}")
    _name_below(figure, axes.flat)
    save(figure, path)


def draw_sweep(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Overhead against budget, a panel for each graph."""
    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        panels[row["fingerprint"]].append(row)
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "keep_all"))
    methods.sort(key=lambda method: method.startswith("online:"))  # planners first, each kind as it was asked for
    draw_panels(list(panels.values()), methods, path)


def draw_panels(panels: Sequence[Sequence[dict[str, Any]]], methods: Sequence[str], path: str, *, most_across: int = 3) -> None:
    """Overhead against budget for several graphs, each given by its rows, with one legend for all. What is beyond HIGHEST is cut
    off.

    methods  in the order of their colours
    """
    across = min(most_across, len(panels))
    down = -(-len(panels) // across)
    width, height = 18 / most_across, 12 / most_across
    figure, grid = plt.subplots(down, across, figsize=(width * across, height * down + 0.5), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, of_graph in zip(grid.flat, panels, strict=False):
        draw_overhead(axes, of_graph, methods)
        _entitle(axes, of_graph[0]["graph"])
        _cut_off(axes)
    _name_below(figure, grid.flat[: len(panels)])
    save(figure, path)


def draw_measured(
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]], methods: Sequence[str], path: str
) -> None:
    """Measured overhead against measured peak (share of plain PyTorch's) in points, a panel for each title, with one legend.

    panels   title, and the points of each method: (share, overhead)
    methods  in the order of their colours
    """
    across = min(4, len(panels))
    figure, grid = plt.subplots(
        -(-len(panels) // across),
        across,
        figsize=(4.5 * across, 3.5 * -(-len(panels) // across) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, curves) in zip(grid.flat, panels, strict=False):
        for number, method in enumerate(methods):
            points = [(share, 100 * overhead) for share, overhead in curves.get(method, ())]
            style: dict[str, Any] = look(number) | {"marker": MARKERS[number % len(MARKERS)], "markersize": 5}
            if len(points) < 2 or method.startswith(("checkpoint", "selective", "torch_remat")):
                style["linestyle"] = "none"
            if points:
                axes.plot(*zip(*points, strict=True), label=label_of(method), **style)
        axes.set(xlabel="measured peak / plain PyTorch's", ylabel="measured overhead (%)")
        axes.set_ylim(-5, MEASURED_HIGHEST)
        axes.grid(alpha=0.3)
        _entitle(axes, title)
    _name_below(figure, grid.flat[: len(panels)])
    save(figure, path)


def _cut_off(axes: Axes) -> None:
    """Show no overheads beyond HIGHEST."""
    if axes.get_ylim()[1] > HIGHEST:
        axes.set_ylim(top=HIGHEST)


def _name_below(figure: Any, panels: Iterable[Axes]) -> None:
    """One legend for all panels, below them, where it covers nothing: each name once, with the look of its first panel."""
    names: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            names.setdefault(label, handle)
    order = sorted(names, key=lambda name: not isinstance(names[name], Line2D))  # what is no curve comes last
    figure.legend([names[name] for name in order], order, loc="outside lower center", ncols=min(4, len(names)), frameon=False)


def _entitle(axes: Axes, title: str) -> None:
    """Write a title as it is: a dollar sign in a name begins no formula, and what cannot be printed is escaped."""
    axes.set_title(printable(title), parse_math=False)


def writable(path: str) -> None:
    """Raises InputError where no figure can have this name: the ending chooses the format."""
    formats = plt.figure().canvas.get_supported_filetypes()
    plt.close()
    if Path(path).suffix.removeprefix(".") not in formats:
        raise InputError(f"cannot draw to {path}: its name must end in one of {', '.join(sorted(formats))}")


def save(figure: Any, path: str) -> None:
    """Write a figure; the ending of the name chooses the format. Raises InputError where it cannot be written."""
    picture = io.BytesIO()
    try:
        writable(path)
        figure.savefig(picture, dpi=130, bbox_inches="tight", format=Path(path).suffix[1:])
    finally:
        plt.close(figure)
    make_folder(path)
    write_whole(path, picture.getvalue())
