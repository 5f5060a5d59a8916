"""Figures. Overhead against budget with the proved bound as ground nobody can enter; memory over time for one budget."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from graphs.errors import InputError
from graphs.files import write_whole
from planner.budget import format_bytes
from planner.schedule import Compute, Schedule, keep_all
from planner.simulate import simulate

from .rows import make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from graphs.ir import Graph
    from online.compare import Comparison

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
MARKERS = "os^Dvx+"
HIGHEST = 200  # overhead in per cent, of a sweep's figure: what takes three times as long is no alternative


def draw_overhead(axes: Axes, rows: Sequence[dict[str, Any]], methods: Sequence[str] = ()) -> None:
    """Overhead (%) against budget (share of the keep-all peak), one line a method, from result rows of one graph.

    methods  fixes the colours, where several figures are to have the same (default: by order in the rows)
    """
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    bounds: dict[float, float] = {}
    for row in sorted(rows, key=lambda row: row["budget_bytes"]):
        share, base = row["budget_fraction"] or 1.0, row["keep_all_time_ns"]  # a graph without bytes has no shares
        overhead = float("nan") if row["overhead"] is None else 100 * row["overhead"]  # nothing there: the line is broken
        lines[row["method"]].append((share, overhead))
        if row["bound_ns"] is not None and base:
            bounds[share] = max(bounds.get(share, 0.0), 100 * (row["bound_ns"] / base - 1))
    bounds.setdefault(1.0, 0.0)
    shares = sorted(bounds)
    left = min([*shares, *(row["budget_fraction"] or 1.0 for row in rows)]) - 0.03
    # What is proved for a budget holds for every smaller one, and for nothing between it and the next larger: steps.
    for smaller, larger in reversed(list(pairwise(shares))):
        bounds[smaller] = max(bounds[smaller], bounds[larger])
    ground = [bounds[shares[0]], *(bounds[share] for share in shares)]
    axes.fill_between([left, *shares], ground, color="0.85", step="pre", linewidth=0, label="proved impossible in this order")
    refused = [row["budget_fraction"] or 1.0 for row in rows if row["status"] == "INFEASIBLE"]
    if refused:
        axes.axvspan(left, max(refused), color="0.7", linewidth=0, label="proved: no schedule fits")
    lines.pop("keep_all", None)
    axes.plot([1.0], [0.0], "k*", markersize=9, label="keep everything", clip_on=False, zorder=5)
    order = list(methods or lines)
    for method, points in sorted(lines.items(), key=lambda line: order.index(line[0])):
        number = order.index(method)
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        label = method.removeprefix("online:") + (" (online)" if method.startswith("online:") else "")
        whole = [] if any(share == 1 for share, _ in points) else [(1.0, 0.0)]
        axes.plot(*zip(*sorted([*points, *whole]), strict=True), label=label, **style)  # type: ignore[arg-type]
    axes.set(xlabel="budget / keep-all peak", ylabel="overhead (%)", xlim=(left, 1.02))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_memory(axes: Axes, graph: Graph, schedules: dict[str, Schedule], budget_bytes: int) -> None:
    """Bytes in memory while each op runs, against time, one line a schedule."""
    for number, (name, schedule) in enumerate(schedules.items()):
        trace = simulate(graph, schedule)
        times, held, now = [0.0], [float(graph.resident_bytes)], 0.0
        for step, memory in zip(schedule, trace.memory_bytes, strict=True):
            if isinstance(step, Compute):
                now += graph.ops[step.op].time_ns / 1e6
                times.append(now)
                held.append(float(memory))
        colour = "0.6" if name == "keep everything" else COLOURS[(number - 1) % len(COLOURS)]
        axes.plot(times, [h / 2**20 for h in held], label=name, color=colour, linewidth=1, drawstyle="steps")
    axes.axhline(budget_bytes / 2**20, color="k", linestyle="--", linewidth=1, label="budget")
    axes.axhspan(0, graph.resident_bytes / 2**20, color="0.93", linewidth=0)
    axes.set(xlabel="time (ms)", ylabel="memory (MiB)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower center", ncols=2)


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Both figures side by side; memory over time for the smallest budget that has a plan."""
    graph = comparison.graph
    planned = [block for block in comparison.blocks if block.plan.schedule is not None]
    figure, axes = plt.subplots(1, 2 if planned else 1, figsize=(12 if planned else 6, 4.5), squeeze=False)
    draw_overhead(axes[0][0], comparison.rows())
    _entitle(axes[0][0], graph.name)
    if planned:
        block = min(planned, key=lambda b: b.budget_bytes)
        assert block.plan.schedule is not None
        schedules = {"keep everything": keep_all(graph), block.plan.method: block.plan.schedule}
        schedules |= {f"{run.rule} (online)": run.schedule for run in block.runs if run.completed}
        draw_memory(axes[0][1], graph, schedules, block.budget_bytes)
        whole = comparison.keep_all.budget_bytes
        share = f"{block.budget_bytes / whole:.0%} of the keep-all peak" if whole else format_bytes(block.budget_bytes)
        _entitle(axes[0][1], f"{graph.name} in {share}")
    save(figure, path)


def draw_sweep(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Overhead against budget, a panel for each graph. Overheads beyond HIGHEST are cut off."""
    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        panels[row["fingerprint"]].append(row)
    draw_panels(list(panels.values()), sorted({row["method"] for row in rows} - {"keep_all"}), path)


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
    names: dict[str, Any] = {}
    for axes, of_graph in zip(grid.flat, panels, strict=False):
        draw_overhead(axes, of_graph, methods)
        _entitle(axes, of_graph[0]["graph"])
        if axes.get_ylim()[1] > HIGHEST:
            axes.set_ylim(top=HIGHEST)
        axes.get_legend().remove()
        handles, labels = axes.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
    figure.legend(list(names.values()), list(names), loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    save(figure, path)


def _entitle(axes: Axes, title: str) -> None:
    """Write a title as it is: a dollar sign in a name begins no formula, and what cannot be encoded is escaped."""
    axes.set_title(title.encode("utf-8", "backslashreplace").decode("utf-8"), parse_math=False)


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
