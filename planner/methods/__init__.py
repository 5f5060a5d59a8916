"""The planning methods: one file each, one function each, ``solve(graph, budget_bytes, ...) -> Plan``.

Beside them the formulations of two: ``checkmate_model``, for Checkmate whole and relaxed, and Moccasin's ``retention``.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from graphs.errors import InputError, quoted
from graphs.ir import Graph
from planner.process.loading import undisturbed
from planner.result import Plan

METHODS = {
    "annealing": "planner.methods.annealing",
    "checkmate": "planner.methods.checkmate",
    "checkmate_lp": "planner.methods.checkmate_lp",
    "chen_greedy": "planner.methods.chen_greedy",
    "chen_sqrt": "planner.methods.chen_sqrt",
    "cutting_stages": "planner.methods.cutting_stages",
    "keep_all": "planner.methods.keep_all",
    "moccasin": "planner.methods.moccasin",
    "revolve": "planner.methods.revolve",
    "rockmate": "planner.methods.rockmate",
    "rotor": "planner.methods.rotor",
    "twremat": "planner.methods.twremat",
}


class Solve(Protocol):
    """What every method's ``solve`` looks like. Options common to all: gap, time_limit_s, seed, start, progress.

    Methods that build their schedules by rule or table (keep_all, the Chen rules, Revolve, Rotor, Rockmate) take no notice of
    ``start`` and ``progress``.
    """

    def __call__(self, graph: Graph, budget_bytes: int, **options: object) -> Plan: ...


def method(name: str) -> Solve:
    """The ``solve`` of a method by name, imported when first asked for. Raises InputError for an unknown name."""
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(f"unknown method {quoted(name)}; there are: {', '.join(sorted(METHODS))}")
    return cast(Solve, undisturbed(lambda: importlib.import_module(METHODS[name])).solve)
