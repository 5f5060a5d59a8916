"""Where the results of a subcommand go: standard output for people or for one of them, and files; and what is said of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graphs.errors import InputError
from planner.result import Plan

from .entry import INTERRUPTED
from .output import printable, tell
from .rows import make_folder, write_rows
from .tables import print_rows

FILES = ("json", "out", "plot", "save_graph")  # options that name a file to be written


def has_table(arguments: argparse.Namespace) -> bool:
    """Whether standard output is for people, and not for what an option sends there."""
    return all(getattr(arguments, option, None) != "-" for option in FILES)


def tell_written(arguments: argparse.Namespace, what: str, path: str | None) -> None:
    """Say, where standard output is for people, what was written to a file, if anything was."""
    if path and has_table(arguments):
        print(f"{what} written to {printable(path)}")


def give_rows(arguments: argparse.Namespace, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows where ``--json`` asks for them."""
    if arguments.json:
        write_rows(arguments.json, rows)
        tell_written(arguments, "rows", arguments.json)


def save_plan(plan: Plan, path: str | None, unwritten: list[InputError]) -> None:
    """Save a plan that has a schedule; before it is executed, which may fail. ``unwritten``: what ``give_plan`` says last."""
    if plan.schedule is not None and path and path != "-":
        with _told_later(unwritten):
            make_folder(path)
            plan.save(path)


def give_plan(arguments: argparse.Namespace, plan: Plan, row: dict[str, Any], unwritten: list[InputError]) -> None:
    """Print the row of a plan, and write what is asked for.

    Raises InputError at the end for what cannot be written, when all that was found is printed.
    """
    if has_table(arguments):
        print_rows(plan.graph, [row])
    if plan.schedule is not None and not unwritten:
        if arguments.out == "-":
            sys.stdout.write(plan.to_text())
        tell_written(arguments, "plan", arguments.out)
    with _told_later(unwritten):
        give_rows(arguments, [row])
    tell_halves(plan.budget_bytes, plan.notes)
    if unwritten:
        raise unwritten[0]


def tell_halves(budget_bytes: int, notes: Mapping[str, Any]) -> None:
    """Say where a plan is too tight to train with."""
    if "halves" in notes:
        tell(f"the plan for {budget_bytes:,} bytes {notes['halves']}")


def tell_dearer(plan: Plan) -> None:
    """Say where a plan has a cheaper one that nothing could train with."""
    whole_ns = plan.notes.get("one_piece_time_ns")
    if whole_ns is not None and plan.time_ns is not None and whole_ns < plan.time_ns and plan.graph.keep_all_time_ns:
        overhead = whole_ns / plan.graph.keep_all_time_ns - 1
        tell(
            f"the plan for {plan.budget_bytes:,} bytes is for a forward and a backward that are called one after the other; "
            f"in one piece, as online runs are, an overhead of {overhead:.2%} would do"
        )


def tell_interrupted() -> int:
    """Say that what there is was found before Ctrl-C came; the exit code."""
    tell("interrupted; this is what was found until then")
    return INTERRUPTED


@contextmanager
def _told_later(unwritten: list[InputError]) -> Iterator[None]:
    """Note that a file could not be written, and go on: what was found is printed first."""
    try:
        yield
    except InputError as error:
        unwritten.append(error)
