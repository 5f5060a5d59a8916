"""Every planning method and online rule on the same graphs under the same budgets, one result row each.

    python -m belady.bench_methods --out benchmarks/methods.jsonl --data DIR

Graphs: random layered graphs of the Moccasin paper (Gagrani et al., NeurIPS 2022), instances of Checkmate's MILP (DIR holds
``checkmate_instances/*.json``; without it those are left out) and captured training steps, priced by the roofline. Every
cell, one method on one graph under one budget, runs alone in a process of its own, with the same time limit and one thread.
A process that takes more memory than allowed, or far more time than its limit, is ended; its row says so, as do those of
methods that refuse a graph. Cells whose rows are in the file already are not run again, so an interrupted run goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import inspect
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphs.errors import BeladyError, InputError
from graphs.ir import Graph
from graphs.synthetic import PRESETS, random_layered
from online.heuristics import HEURISTICS
from online.portfolio import METHOD as BEST
from online.portfolio import best_run
from online.runtime import run
from planner.bounds import least_bytes
from planner.budget import format_bytes
from planner.methods import METHODS
from planner.methods import method as method_named
from planner.plan import check_options, solve
from planner.result import Plan, Status
from planner.schedule import keep_all
from planner.simulate import simulate

from .output import ended
from .rows import RowFile
from .steps import step_graph, step_name
from .sweep import FAILED, ONLINE, REFUSED, Cell, Row, chosen, failed_row, key_of, start_quietly

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the keep-all peak
LAYERED_SHARES = (0.9, 0.8)  # as published
# The published budgets, GB of 2^30 bytes.
INSTANCES = {"vgg16_176": (10, 9, 8), "unet_11": (10, 9, 8), "resnet50_184": (10, 9, 8, 7)}
# (small, as published or like it): sizes at which activations are most of the bytes.
WORKLOADS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "resnet50": ({"batch": 32, "size": 128}, {"batch": 256, "size": 224}),
    "vgg16": ({"batch": 32, "size": 128}, {"batch": 256, "size": 224}),
    "unet": ({"batch": 8, "size": 128}, {"batch": 32, "size": 416}),
    "gpt2": ({"batch": 8, "seq": 256, "depth": 4}, {"batch": 16, "seq": 512, "depth": 12}),
}
SLACK_S = 30.0  # a process is ended when it has taken this much more than twice the time limit
GUARD_BYTES = 6 * 2**30
_NOTHING: Row = {"found": [], "found_s": None, "cpu_s": None, "rss_bytes": None}  # of a cell without a result


@dataclass(frozen=True)
class Case:
    """A graph, and its budgets in bytes."""

    graph: Graph
    budgets: tuple[int, ...]


# ------------------------------------------------------------------------------------------------ what is run


def cases(names: Sequence[str], *, seeds: int = 1, large: bool = False, data: str | None = None) -> Iterator[Case]:
    """The graphs asked for, made one at a time, each with those of its budgets that some schedule may fit.

    names  of ``graph_names``; seeds: layered graphs a preset; large: captured steps at the published sizes
    """
    for name in names:
        if name in PRESETS:
            for seed in range(seeds):
                yield _with_shares(random_layered(name, seed), LAYERED_SHARES, up=True)
        elif name in INSTANCES:
            if data is not None:
                from graphs.importers import load_checkmate

                graph = load_checkmate(Path(data) / "checkmate_instances" / f"{name}.json")
                yield Case(replace(graph, name=name), tuple(gigabytes * 2**30 for gigabytes in INSTANCES[name]))
        else:
            yield _with_shares(step_graph(step_name(name, WORKLOADS[name][large])), SHARES)


def graph_names(asked: Sequence[str]) -> list[str]:
    """Names of graphs; all of them where none is asked for. Raises InputError for an unknown one."""
    return chosen("graph", asked, [*PRESETS, *INSTANCES, *WORKLOADS])


def method_names(asked: Sequence[str]) -> list[str]:
    """Planning methods, online rules behind ``online:``, and the best of these; all of them where none is asked for.

    Raises InputError for an unknown one.
    """
    return chosen("method", asked, [*sorted(METHODS), *(ONLINE + rule for rule in HEURISTICS), BEST])


def _with_shares(graph: Graph, shares: Sequence[float], *, up: bool = False) -> Case:
    """Shares of the keep-all peak in whole bytes, rounded up as the Moccasin paper does, or down."""
    peak_bytes, least = simulate(graph, keep_all(graph)).peak_bytes, least_bytes(graph)
    budgets = (math.ceil(share * peak_bytes) if up else int(share * peak_bytes) for share in shares)
    return Case(graph, tuple(budget_bytes for budget_bytes in budgets if budget_bytes >= least))


# ------------------------------------------------------------------------------------------------------ one cell


def row_of(graph: Graph, cell: Cell) -> Row:
    """Run a cell in this process: its row, whatever comes of it.

    The row is that of ``Plan.row`` with ``fingerprint, ops, options, reason, notes``, and what it took:
    ``found`` (seconds and time in ns of each better schedule that the method told of), ``found_s`` (seconds until the one that
    was returned), ``cpu_s`` and ``rss_bytes`` (largest resident set of the process).
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    found: list[tuple[float, int]] = []

    def progress(*, time_ns: int | None = None, **_: object) -> None:
        if time_ns is not None and (not found or time_ns < found[-1][1]):
            found.append((time.perf_counter() - began, time_ns))

    try:
        plan = _plan(graph, cell, progress)
    except Exception as error:  # a cell that fails is a row that says so; the others go on
        mine = isinstance(error, BeladyError)
        reason = str(error) if mine else f"{type(error).__name__}: {error}"
        row = failed_row(graph, cell, reason, time.perf_counter() - began, status=REFUSED if mine else FAILED) | _NOTHING
    else:
        row = plan.row() | {"method": cell.method, "fingerprint": cell.fingerprint, "options": dict(cell.options)}
        row |= {"reason": _reason(plan), "notes": plan.notes}
        # A schedule that the method did not tell of was in hand only when it returned.
        told = [at for at, time_ns in found if plan.time_ns is not None and time_ns <= plan.time_ns]
        row["found_s"] = None if plan.schedule is None else told[0] if told else plan.wall_s
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = {"cpu_s": time.process_time() - cpu_began, "rss_bytes": usage.ru_maxrss * 1024}
    return row | {"ops": len(graph.ops), "found": found, **spent}


def _plan(graph: Graph, cell: Cell, progress: Callable[..., None]) -> Plan:
    if cell.method == BEST:
        return best_run(graph, cell.budget_bytes, seed=cell.seed).plan()
    if cell.method.startswith(ONLINE):
        return run(graph, cell.budget_bytes, heuristic=cell.method.removeprefix(ONLINE), seed=cell.seed).plan()
    options = {**cell.options, "seed": cell.seed, "progress": progress}
    if "workers" in inspect.signature(method_named(cell.method)).parameters:
        options["workers"] = 1
    return solve(graph, cell.budget_bytes, method=cell.method, **options)


def _reason(plan: Plan) -> str | None:
    """Why a plan has no schedule."""
    if plan.schedule is not None:
        return None
    kinds = ("infeasible",) if plan.status is Status.INFEASIBLE else ("stopped", "reason", "status")
    return next((str(plan.notes[kind]) for kind in kinds if plan.notes.get(kind)), "nothing found, nothing ruled out")


def isolated(graph: Graph, cell: Cell, *, guard_bytes: int, wall_limit_s: float) -> Row:
    """``row_of`` in a process of its own, which may take ``guard_bytes`` of address space and ``wall_limit_s`` seconds.

    The process has one thread, ignores Ctrl-C, and is gone, with all it started, when this returns.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, graph, cell, guard_bytes), daemon=True)
    began = time.perf_counter()
    try:
        start_quietly(process)
    finally:
        theirs.close()
    try:
        if not ours.poll(wall_limit_s):
            reason = f"ended after {wall_limit_s:g} s: its time limit did not stop it"
        else:
            try:
                row: Row = ours.recv()
            except EOFError:
                _kill(process)  # it is dead; what it started may not be
                code = process.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                reason = f"its process ended with {how}; it may take {format_bytes(guard_bytes)}"
            else:
                return row
        return failed_row(graph, cell, reason, time.perf_counter() - began) | _NOTHING | {"ops": len(graph.ops)}
    finally:
        ours.close()
        _kill(process)


def _serve(line: Connection, graph: Graph, cell: Cell, guard_bytes: int) -> None:
    """The life of a process: one row."""
    os.setpgid(0, 0)  # solvers may start programs of their own; ``_kill`` ends them too
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what solvers print
    resource.setrlimit(resource.RLIMIT_AS, (guard_bytes, guard_bytes))
    line.send(row_of(graph, cell))


def _kill(process: Any) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if process.pid is not None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


# ----------------------------------------------------------------------------------------------------- all cells


def cells_of(case: Case, methods: Sequence[str], *, gap: float, time_limit_s: float, seed: int) -> list[Cell]:
    """The cells of a graph: for each budget, the largest first, every method."""
    options = {"gap": gap, "time_limit_s": time_limit_s}
    check_options({**options, "seed": seed})
    fingerprint = case.graph.fingerprint()
    return [
        Cell(fingerprint, name, budget_bytes, seed, {} if name.startswith(ONLINE) else options)
        for budget_bytes in case.budgets
        for name in methods
    ]


def bench(
    path: str,
    found: Iterator[Case],
    methods: Sequence[str],
    *,
    gap: float,
    time_limit_s: float,
    seed: int,
    guard_bytes: int = GUARD_BYTES,
    again: Sequence[str] = (),
) -> int:
    """Run the cells that have no row in the file yet; how many were run.

    again  methods that are run although they have rows; readers go by the last row of a cell
    """
    file = RowFile(path, ("graph", "method"))
    try:
        made = {key_of(row) for row in file.rows if row["method"] not in again}
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        count = 0
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            for case in found:
                cells = cells_of(case, methods, gap=gap, time_limit_s=time_limit_s, seed=seed)
                task = bar.add_task(case.graph.name, total=len(cells))
                for cell in cells:
                    bar.update(task, description=f"{case.graph.name} {format_bytes(cell.budget_bytes)} {cell.method}")
                    if cell.key not in made:
                        row = isolated(case.graph, cell, guard_bytes=guard_bytes, wall_limit_s=2 * time_limit_s + SLACK_S)
                        file.append(row)
                        count += 1
                        bar.console.print(_line(row), highlight=False, markup=False, soft_wrap=True)
                    bar.advance(task)
                bar.update(task, description=case.graph.name)
        return count
    finally:
        file.close()


def _line(row: Row) -> str:
    """One row for people."""
    overhead = "-" if row["overhead"] is None else f"{row['overhead']:.3%}"
    share = f"{row['budget_fraction']:.1%}"
    told = f"{row['graph']:<28} {share:>6} {row['method']:<16} {row['status']:<10} {overhead:>10} {row['wall_s']:6.1f} s"
    return told if row["reason"] is None else f"{told}  {row['reason']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/methods.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--data", default=os.environ.get("BELADY_DATA"), help="folder of the published instances")
    parser.add_argument("--graph", action="append", default=[], metavar="NAME", help="one graph; several times (default: all)")
    parser.add_argument("--method", action="append", default=[], metavar="NAME", help="likewise a method or online:RULE")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="a method to run although it has rows")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="random layered graphs of each size (default: 1)")
    parser.add_argument("--large", action="store_true", help="captured steps at the published sizes")
    parser.add_argument(
        "--gap", type=float, default=0.001, help="stop when proved within this share of the optimum (default: 0.001)"
    )
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S", help="of each cell (default: 30)")
    parser.add_argument("--memory-gib", type=float, default=GUARD_BYTES / 2**30, help="a cell may take (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the methods")
    arguments = parser.parse_args(argv)

    def work() -> int:
        if arguments.seeds < 1:
            raise InputError(f"--seeds must be at least 1, not {arguments.seeds}")
        if not arguments.memory_gib > 0:
            raise InputError(f"--memory-gib must be above 0, not {arguments.memory_gib}")
        if arguments.data is None and (asked := [name for name in arguments.graph if name in INSTANCES]):
            raise InputError(f"{asked[0]} is a published instance: name the folder with --data or in BELADY_DATA")
        bench(
            arguments.out,
            cases(graph_names(arguments.graph), seeds=arguments.seeds, large=arguments.large, data=arguments.data),
            method_names(arguments.method),
            gap=arguments.gap,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            guard_bytes=int(arguments.memory_gib * 2**30),
            again=arguments.again,
        )
        return 0

    return ended("bench_methods", work)


if __name__ == "__main__":
    sys.exit(main())
