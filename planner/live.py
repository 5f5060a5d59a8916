"""What a search has found so far, in a line on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from graphs.ir import Graph
from planner.budget import format_bytes


def line_of(what: str, graph: Graph, show: Callable[[str], None]) -> Callable[..., None]:
    """A ``progress`` for any method: shows ``what`` at once, and each time what is known with it.

    Overhead and bound are shares of the keep-all time; the gap is what is not proved, as a share of the plan's time.
    """
    base_ns = graph.keep_all_time_ns

    def progress(*, time_ns: int | None, bound_ns: int | None, **_: object) -> None:
        if base_ns:
            known = ["no plan yet" if time_ns is None else f"overhead {time_ns / base_ns - 1:.2%}"]
            if bound_ns is not None:
                least_ns = bound_ns if time_ns is None else min(bound_ns, time_ns)  # above it by rounding at most
                known.append(f"bound {least_ns / base_ns - 1:.2%}")
                if time_ns:
                    known.append(f"gap {1 - least_ns / time_ns:.2%}")
            show(f"{what}: {', '.join(known)}")

    show(what)
    return progress


def smallest_line(show: Callable[[str], None]) -> Callable[[int, int], None]:
    """A ``progress`` for ``min_budget``."""

    def progress(works_bytes: int, proved_bytes: int) -> None:
        show(f"smallest budget: {format_bytes(works_bytes)} works, {format_bytes(proved_bytes)} is needed at least")

    return progress


@contextlib.contextmanager
def shown(progress: Callable[..., None] | None, what: str, graph: Graph) -> Iterator[Callable[..., None] | None]:
    """The ``progress`` that is given, or else one that shows a line on a terminal; None where there is none."""
    if progress is not None or not _is_terminal():
        yield progress
        return
    with on_terminal(what) as show:
        yield line_of(what, graph, show)


@contextlib.contextmanager
def on_terminal(text: str = "") -> Iterator[Callable[[str], None]]:
    """A line on standard error where that is a terminal, with the time since it began; silence elsewhere. Gone in the end."""
    if not _is_terminal():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    in_one_line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = SpinnerColumn(), in_one_line, TimeElapsedColumn()
    # What is printed meanwhile goes above the line, but never from one stream into another.
    same = sys.stdout is sys.stderr
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=same) as bar:
        task = bar.add_task(text)
        yield lambda now: bar.update(task, description=now)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False
