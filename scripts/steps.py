"""Captured steps for benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from graphs.ir import Graph

from .output import ended
from .rows import write_rows

if TYPE_CHECKING:
    from graphs.workloads import Built

RowsOf = Callable[[Graph, Progress], Iterable[dict[str, Any]]]


def step_name(workload: str, sizes: Mapping[str, int | None]) -> str:
    """What rows and files call a workload with the sizes that are asked for: "gpt2-depth96", as ``graphs.workloads.build`` knows
    it."""
    return "-".join([workload, *(f"{size}{number}" for size, number in sizes.items() if number is not None)])


def step_graph(name: str) -> Graph:
    """The training step of a workload, whose name may have sizes ("gpt2-depth96"), with the roofline's costs."""
    from graphs.workloads import build  # torch takes time to load, and some do without

    return graph_of(name, build(name))


def graph_of(name: str, built: Built) -> Graph:
    """The training step of a model, its inputs and its loss, with the roofline's costs."""
    from graphs.capture import capture
    from planner.plan import with_costs

    model, inputs, loss = built
    return with_costs(capture(model, inputs, loss=loss, name=name), "roofline").graph


def bench_models(
    program: str,
    about: str | None,
    file: str,
    models: Iterable[str],
    rows_of: Callable[[str], Iterable[dict[str, Any]]],
    argv: Sequence[str] | None,
) -> int:
    """The command line of a benchmark of models of its own: write their rows to ``file``, when all is done; the exit code.

    No bar shows how far it is: it would be drawn by a thread, whose time is counted.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=file, help=f"the file, written whole; - for standard output (default: {file})")
    parser.add_argument("--only", action="append", choices=list(models), help="one model; several times")
    arguments = parser.parse_args(argv)

    def work() -> int:
        found: list[dict[str, Any]] = []
        for name in arguments.only or models:
            print(name, file=sys.stderr, flush=True)
            found += rows_of(name)
        write_rows(arguments.out, found)
        return 0

    return ended(program, work, goes_on=False)


def bench_workloads(
    program: str, about: str | None, workloads: Sequence[str], rows_of: RowsOf, argv: Sequence[str] | None
) -> int:
    """The command line of a benchmark of whole workloads: write their rows, when all is done; the exit code.

    program  its name: the file is that without ``bench_``, if no other is asked for
    rows_of  the rows of a step; may show how far it is
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = f"benchmarks/{program.removeprefix('bench_')}.jsonl"
    parser.add_argument("--out", default=default, help=f"the file, written whole (default: {default})")
    parser.add_argument("--only", action="append", choices=workloads, help="one workload; several times")
    arguments = parser.parse_args(argv)

    def work() -> int:
        with Progress(transient=True) as progress:
            names = progress.track(arguments.only or workloads, description="workloads")
            found = [row for name in names for row in rows_of(step_graph(name), progress)]
        write_rows(arguments.out, found)
        return 0

    return ended(program, work, goes_on=False)
