"""The subcommands that plan, run, compare and sweep, and the list of workloads: each returns its exit code."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphs.collection import WORKLOADS
from graphs.errors import InfeasibleBudget, InputError, NoScheduleFound
from graphs.ir import Graph
from online.compare import compare
from online.heuristics import DEFAULT_RULE
from online.runtime import Run, run
from planner.budget import format_bytes, resolve_budget
from planner.live import line_of, on_terminal
from planner.plan import check_options, copied_bytes_of, infeasible, solve_halves
from planner.result import Plan, Status
from planner.schedule import keep_all
from planner.simulate import simulate

from .arguments import solver_options
from .entry import BAD_INPUT, DONE, INTERRUPTED, NOTHING_FOUND
from .output import computing, progress_bar, tell
from .results import give_plan, give_rows, has_table, save_plan, tell_dearer, tell_halves, tell_interrupted, tell_written
from .rows import RowFile, read_rows
from .tables import print_comparison, print_sweep, print_workloads
from .workload import Loaded, graphs_of

if TYPE_CHECKING:
    from online.trial import Trial, Trials

WAY_OUT_S, WAY_OUT_SHARE = 2.0, 0.01  # to find a budget in which an online run completes; to within this share


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare the optimum with online rules."""
    with computing() as status:
        loaded = Loaded(arguments, status)
        comparison = compare(
            loaded.target,
            arguments.budget,
            heuristics=arguments.heuristic or [DEFAULT_RULE],
            method=arguments.method,
            execute=arguments.execute,
            inputs=loaded.inputs,
            splits=arguments.split,
            progress=status,
            **solver_options(arguments),
        )
    if has_table(arguments):  # before anything is written, which may fail
        print_comparison(comparison)
    for block in comparison.blocks:
        tell_dearer(block.plan)
    give_rows(arguments, comparison.rows())
    if arguments.plot:
        from .plots import draw_comparison

        with on_terminal("drawing"):
            draw_comparison(comparison, arguments.plot)
        tell_written(arguments, "picture", arguments.plot)
    statuses = {block.plan.status for block in comparison.blocks}
    for block in comparison.blocks:
        if block.plan.status is Status.INFEASIBLE:
            tell(_too_small(block.plan, None, arguments.time_limit - block.plan.wall_s))
        for found in block.runs:
            if not found.completed:
                tell(_unfinished(found))
        tell_halves(block.plan.budget_bytes, block.plan.notes)
    if comparison.interrupted:
        return tell_interrupted()
    return BAD_INPUT if Status.INFEASIBLE in statuses else NOTHING_FOUND if Status.UNKNOWN in statuses else DONE


def plan_command(arguments: argparse.Namespace) -> int:
    """Find the optimal schedule for a budget."""
    with computing() as status:
        loaded = Loaded(arguments, status)
        graph = loaded.graph
        budget_bytes = resolve_budget(arguments.budget, _peak_bytes(graph))
        copied_bytes = copied_bytes_of(loaded.target)
        plan = solve_halves(
            graph,
            budget_bytes,
            copied_bytes=copied_bytes,
            method=arguments.method,
            progress=line_of(f"{arguments.method} in {format_bytes(budget_bytes)}", graph, status),
            **solver_options(arguments),
        )
        row, interrupted = plan.row(), plan.interrupted
        unwritten: list[InputError] = []
        save_plan(plan, arguments.out, unwritten)
        if plan.schedule is not None and arguments.execute and "halves" not in plan.notes and not interrupted:
            status("executing")
            measured = _measured(loaded, arguments.seed, lambda trials: trials.planned(replace(plan, step=loaded.step)))
            interrupted = measured is None
            row |= measured or {}
    give_plan(arguments, plan, row, unwritten)
    return tell_interrupted() if interrupted else _outcome(plan, copied_bytes, arguments.time_limit - plan.wall_s)


def run_command(arguments: argparse.Namespace) -> int:
    """Run an online rule under a budget."""
    with computing() as status:
        loaded = Loaded(arguments, status)
        graph = loaded.graph
        budget_bytes = resolve_budget(arguments.budget, _peak_bytes(graph))
        status(f"online {arguments.heuristic} in {format_bytes(budget_bytes)}")
        found = run(graph, budget_bytes, heuristic=arguments.heuristic, seed=arguments.seed)
        plan = found.plan()
        row, interrupted = plan.row(), False
        unwritten: list[InputError] = []
        save_plan(plan, arguments.out, unwritten)
        if found.completed and arguments.execute:
            status("executing")
            measured = _measured(loaded, arguments.seed, lambda trials: trials.online(budget_bytes, arguments.heuristic))
            interrupted = measured is None
            row |= measured or {}
        if not found.completed:
            status("looking for a budget in which it completes")
            enough_bytes = _enough(found)
    give_plan(arguments, plan, row, unwritten)
    if not found.completed:
        raise NoScheduleFound(f"{_unfinished(found)}; {_way_out(enough_bytes)}")
    return tell_interrupted() if interrupted else DONE


def sweep_command(arguments: argparse.Namespace) -> int:
    """All graphs under all budgets with all methods and rules, in parallel."""
    from . import sweep

    if arguments.jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {arguments.jobs}")
    methods = sweep.methods_of(arguments.method or ["cutting_stages"])
    rules = sweep.rules_of(arguments.rule or [DEFAULT_RULE])
    sweep.budgets_of(arguments.budget, 1)  # what cannot be used is refused before a model is built
    check_options(solver_options(arguments))
    graphs: dict[str, Graph] = {}
    budgets: dict[str, list[int]] = {}
    named: dict[str, str] = {}
    again: list[tuple[str, str, Graph]] = []
    with computing() as status:
        for name, graph in zip(dict.fromkeys(arguments.workload), graphs_of(arguments, status), strict=True):
            fingerprint = graph.fingerprint()
            if fingerprint in graphs:  # whose rows could not be told apart, nor do they differ
                again.append((name, named[fingerprint], graphs[fingerprint]))
                continue
            named[fingerprint], graphs[fingerprint] = name, graph
            budgets[fingerprint] = sweep.budgets_of(arguments.budget, _peak_bytes(graph))
    for name, first, graph in again:
        tell(f"{name} is the same graph as {first}, in ops, bytes and times: the rows of {graph.name} are for both")
    cells = sweep.cells_of(budgets, methods, rules, **solver_options(arguments))
    if not cells:
        raise InputError("there is nothing to do: --method none and --rule none")
    file = RowFile(arguments.out) if arguments.out else None
    if file is not None and file.repaired:
        tell(f"the last line of {file.path} was not whole and is cut off")
    found = list(file.rows) if file is not None else []
    made = {sweep.key_of(row) for row in found if not (arguments.retry and row.get("status") == sweep.FAILED)}
    missing = [cell for cell in cells if cell.key not in made]
    interrupted = False
    unwritten: InputError | None = None  # told after the table
    try:
        with progress_bar() as bar, closing(sweep.work(graphs, missing, arguments.jobs)) as work:
            task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
            for cell, row in work:
                found.append(row)
                if file is not None:
                    found[-1] = file.append(row)
                bar.update(task, advance=1, description=f"{graphs[cell.fingerprint].name} {cell.method}")
    except InputError as error:
        unwritten = error
    except KeyboardInterrupt:
        interrupted = True
        if file is not None:  # it may have come between a row's way to the file and to the list
            with suppress(InputError):
                found = read_rows(file.path)
    settled = sweep.settle(found)
    if file is not None:
        others = [row for row in found if sweep.key_of(row) is None]
        if not interrupted and unwritten is None:
            try:
                file.keep([*others, *settled])
            except InputError as error:
                unwritten = error
        file.close()
    by_key = {sweep.key_of(row): row for row in settled}
    places = {fingerprint: place for place, fingerprint in enumerate(graphs)}
    cells.sort(key=lambda cell: (places[cell.fingerprint], -cell.budget_bytes))  # methods stay in the order asked for
    rows = [by_key[cell.key] for cell in cells if cell.key in by_key]
    if has_table(arguments):
        ground = sweep.proved_of_all(rows)
        for fingerprint, graph in graphs.items():
            if of_graph := [row for row in rows if row["fingerprint"] == fingerprint]:
                print_sweep(graph, of_graph, ground[fingerprint])
    if rows:  # interrupted before the first, there is nothing to write or to draw
        if unwritten is None:
            tell_written(arguments, "rows", arguments.out)
        give_rows(arguments, rows)
        if arguments.plot:
            from .plots import draw_sweep

            with on_terminal("drawing"):
                draw_sweep(rows, arguments.plot)
            tell_written(arguments, "picture", arguments.plot)
    failed = [row for row in rows if row["status"] == sweep.FAILED]
    for row in failed:
        tell(f"{row['graph']}, {row['method']}, {row['budget_bytes']:,} bytes: {row.get('reason')}")
    if interrupted:
        more = f"; {len(cells) - len(rows)} of {len(cells)} rows are missing, the same command goes on" if arguments.out else ""
        tell(f"interrupted{more}")
        return INTERRUPTED
    if unwritten is not None:
        raise unwritten
    return NOTHING_FOUND if failed else DONE


def workloads_command(arguments: argparse.Namespace) -> int:
    """List the models that come with the program."""
    rows = [workload.row() for workload in WORKLOADS.values()]
    if has_table(arguments):
        print_workloads(rows)
    give_rows(arguments, rows)
    return DONE


def _peak_bytes(graph: Graph) -> int:
    """What budgets are shares of: the keep-all peak."""
    return simulate(graph, keep_all(graph)).peak_bytes


def _measured(loaded: Loaded, seed: int, trial: Callable[[Trials], Trial]) -> dict[str, Any] | None:
    """The measured entries of a result row; None where Ctrl-C came."""
    from online.trial import Trials

    try:
        return trial(Trials(loaded.executable(), loaded.inputs, seed=seed)).row()
    except KeyboardInterrupt:
        return None


def _too_small(plan: Plan, copied_bytes: int | None, left_s: float) -> InfeasibleBudget:
    """What helps where a budget is too small. ``left_s`` of the time limit is left to find it."""
    with on_terminal(f"{format_bytes(plan.budget_bytes)} cannot be; looking for a budget that works"):
        return infeasible(plan.graph, plan.budget_bytes, plan, time_limit_s=left_s, copied_bytes=copied_bytes)


def _outcome(plan: Plan, copied_bytes: int | None, left_s: float) -> int:
    """The exit code. Raises InfeasibleBudget or NoScheduleFound, for which ``left_s`` of the time limit is left."""
    if plan.status is Status.INFEASIBLE:
        raise _too_small(plan, copied_bytes, left_s)
    if plan.status is Status.UNKNOWN:
        stopped = plan.notes.get("stopped")
        reason = "" if stopped is None else f" ({stopped})"
        longer = "a longer --time-limit" if stopped == "time limit" else "a larger --budget"
        raise NoScheduleFound(
            f"{plan.method} found no schedule of {plan.graph.name} in {plan.budget_bytes:,} bytes within {plan.wall_s:.1f} s"
            f"{reason}, but did not rule one out; try {longer} or another --method"
        )
    return DONE


def _enough(stopped: Run) -> int | None:
    """A budget in which the rule of a run that stopped completes, little above the smallest such; None where none was found."""

    def completes(budget_bytes: int) -> bool:
        return run(stopped.graph, budget_bytes, heuristic=stopped.rule, seed=stopped.seed).completed

    enough, missed = None, stopped.budget_bytes
    whole, deadline = _peak_bytes(stopped.graph), time.perf_counter() + WAY_OUT_S
    with suppress(KeyboardInterrupt):
        if missed < whole and completes(whole):
            enough = whole
            while enough - missed > max(1, WAY_OUT_SHARE * enough) and time.perf_counter() < deadline:
                middle = (enough + missed) // 2
                if completes(middle):
                    enough = middle
                else:
                    missed = middle
    return enough


def _way_out(enough_bytes: int | None) -> str:
    """What helps where an online run stopped."""
    larger = "a larger --budget"
    if enough_bytes is not None:
        larger = f"--budget {enough_bytes} ({format_bytes(enough_bytes)}), which is enough for it,"
    return f"try {larger} or belady plan for these bytes; belady info --min-budget tells the least that any schedule needs"


def _unfinished(stopped: Run) -> str:
    """Why an online run stopped."""
    why = f"ran out of memory at {stopped.failure.op}: {stopped.failure}" if stopped.failure else "recomputed without end"
    return f"online {stopped.rule} in {stopped.budget_bytes:,} bytes ({format_bytes(stopped.budget_bytes)}) {why}"
