"""The subcommand ``info``: what there is to know of a graph, and what a saved plan says."""

from __future__ import annotations

import argparse
import sys

from graphs.errors import InputError
from graphs.serialize import save_graph, to_text
from planner.bounds import least_bytes
from planner.budget import format_bytes
from planner.frontier import min_budget
from planner.least.smallest import smallest_known
from planner.live import smallest_line
from planner.result import load_plan, saved_row
from planner.schedule import keep_all
from planner.simulate import simulate

from .entry import DONE
from .output import computing
from .results import give_rows, has_table, tell_halves, tell_interrupted, tell_written
from .rows import make_folder
from .tables import print_facts
from .workload import OF_MODELS, Loaded, is_plan_file

PLAN_FACTS = (
    "graph", "device", "costs", "ops", "fingerprint", "method", "seed", "status", "budget_bytes", "budget_fraction", "time_ns",
    "keep_all_time_ns", "overhead", "bound_ns", "restricted_bound_ns", "any_order_bound_ns", "gap", "peak_bytes",
    "recomputed_ops", "wall_s",
)  # fmt: skip


def info_command(arguments: argparse.Namespace) -> int:
    """What there is to know of a graph or of a saved plan; the exit code."""
    return _of_plan(arguments) if arguments.plan or is_plan_file(arguments.workload) else _of_graph(arguments)


def _of_graph(arguments: argparse.Namespace) -> int:
    """What a graph needs when it keeps all, and the smallest budgets."""
    with computing() as status:
        graph = Loaded(arguments, status).graph
        status("measuring the graph")
        trace = simulate(graph, keep_all(graph))
        if arguments.min_budget is not None:
            smallest = min_budget(graph, time_limit_s=arguments.min_budget, progress=smallest_line(status))
            proved_bytes, works_bytes, interrupted = smallest.proved_bytes, smallest.works_bytes, smallest.interrupted
        else:
            proved_bytes, works_bytes, interrupted = least_bytes(graph), smallest_known(graph)[0], False
        row = {
            "graph": graph.name,
            "device": graph.device or None,
            "costs": graph.costs or None,
            "ops": len(graph.ops),
            "backward_ops": sum(op.backward for op in graph.ops),
            "random_ops": sum(op.random for op in graph.ops),
            "values": len(graph.values),
            "keep_all_time_ns": trace.time_ns,
            "keep_all_peak_bytes": trace.peak_bytes,
            "resident_bytes": graph.resident_bytes,
            "output_bytes": sum(graph.values[v].size_bytes for v in graph.outputs),
            "proved_minimum_bytes": proved_bytes,
            "smallest_known_bytes": works_bytes,
            "fingerprint": graph.fingerprint(),
        }
    if has_table(arguments):
        print_facts(row, trace.peak_bytes)
        print(_smallest_told(works_bytes, proved_bytes, arguments.min_budget))
    if arguments.save_graph == "-":
        sys.stdout.write(to_text(graph))
    elif arguments.save_graph:
        make_folder(arguments.save_graph)
        save_graph(graph, arguments.save_graph)
    tell_written(arguments, "graph", arguments.save_graph)
    give_rows(arguments, [row])
    return tell_interrupted() if interrupted else DONE


def _smallest_told(works_bytes: int, proved_bytes: int, searched_s: float | None) -> str:
    """How small a budget can be, in a sentence."""
    works, proved = (f"{number:,} bytes ({format_bytes(number)})" for number in (works_bytes, proved_bytes))
    if works_bytes == proved_bytes:
        return f"The smallest budget is {works}: a schedule needs no more, and it is proved that none needs less."
    more = "--min-budget 30 searches for longer" if searched_s is None else "a longer --min-budget may tell"
    return (
        f"The smallest budget known to work is {works}; it is proved that every schedule needs at least {proved}. "
        f"What is between them may work or not: {more}."
    )


def _of_plan(arguments: argparse.Namespace) -> int:
    """What a saved plan says of itself; with its graph, what is found anew."""
    path = arguments.plan or arguments.workload
    for option in ("save_graph", "min_budget", *(() if arguments.plan else OF_MODELS)):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} has no meaning for the saved plan {path}")
    found, valid = saved_row(path), None  # a damaged file is told before a model is built
    if arguments.plan:
        with computing() as status:
            plan = load_plan(path, Loaded(arguments, status).target)
        found |= plan.row() | {"ops": len(plan.graph.ops)}
        valid = None if plan.schedule is None else True
    row = {key: found[key] for key in PLAN_FACTS} | {"valid": valid}
    if has_table(arguments):
        print_facts(row, 0)
        if arguments.plan:
            print(f"The plan is valid for {row['graph']}; its time and peak are simulated." if valid else "There is no schedule.")
        else:
            print(
                f"This is what the file says; belady info WORKLOAD --plan {path} checks it against its graph, which is not in it."
            )
    give_rows(arguments, [row | {"notes": found["notes"]}])
    tell_halves(row["budget_bytes"], found["notes"])
    return DONE
