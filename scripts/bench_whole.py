"""Benchmarks whose file is written when all is done: their command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from graphs.files import check_writable
from graphs.ir import Graph

from .output import ended
from .rows import put_in_place, read_rows, write_rows
from .steps import step_graph

Rows = Iterable[dict[str, Any]]


def bench_models(
    program: str, about: str | None, file: str, models: Iterable[str], rows_of: Callable[[str], Rows], argv: Sequence[str] | None
) -> int:
    """The command line of a benchmark of models of its own, whose names are those of the graphs of its rows; the exit code.

    No bar shows how far it is: it would be drawn by a thread, whose time is counted.
    """

    def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            print(name, file=sys.stderr, flush=True)
            yield from rows_of(name)

    return _bench(program, about, file, list(models), rows, argv)


def bench_workloads(
    program: str,
    about: str | None,
    workloads: Sequence[str],
    rows_of: Callable[[Graph, Progress], Rows],
    argv: Sequence[str] | None,
) -> int:
    """The command line of a benchmark of whole workloads; the exit code.

    program  its name: the file is that without ``bench_``, if no other is asked for
    rows_of  the rows of a step; may show how far it is
    """

    def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
        with Progress(transient=True) as progress:
            for name in progress.track(names, description="workloads"):
                yield from rows_of(step_graph(name), progress)

    return _bench(program, about, f"benchmarks/{program.removeprefix('bench_')}.jsonl", workloads, rows, argv)


def _bench(
    program: str,
    about: str | None,
    file: str,
    names: Sequence[str],
    rows_of: Callable[[Sequence[str]], Rows],
    argv: Sequence[str] | None,
) -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=file, help=f"the file, written whole; - for standard output (default: {file})")
    parser.add_argument(
        "--only", action="append", choices=names, help="make the rows of this one, and leave others in the file; several times"
    )
    arguments = parser.parse_args(argv)
    out: str = arguments.out

    def others() -> list[dict[str, Any]]:
        return read_rows(out, ("graph",)) if arguments.only and out != "-" and Path(out).exists() else []

    def work() -> int:
        if out != "-":  # before an hour is spent on what cannot be written
            check_writable(out)
        others()
        found = list(rows_of(list(dict.fromkeys(arguments.only or names))))
        write_rows(out, put_in_place(others(), found))
        return 0

    return ended(program, work, goes_on=False)
