"""Twremat: schedules of provably little memory from a tree decomposition, then the budget spent to undo recomputation.

Source: Kumar, Purohit, Svitkina, Vee and Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019). The algorithm
is in ``planner.walks.halving``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, keep_all
from planner.walks import halving

METHOD = "twremat"


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    variants: bool = True,
) -> Plan:
    """The cheapest schedule among the published one and its variants; UNKNOWN where none of them fits.

    gap           stop when (time - keep-all time) / time is at most this; the keep-all time is the only bound there is
    time_limit_s  stop after this long with the best so far; a tree decomposition that takes longer leads to none
    seed          0: vertices as good as each other are eliminated in graph order; others: in an order drawn from the seed
    start         a schedule to begin with
    progress      called as ``progress(time_ns=..., bound_ns=..., phase=...)`` where a better schedule was found
    variants      False: the published algorithm alone

    Notes: ``width`` of the decomposition, ``levels`` of the balanced tree, ``found_by`` (the variant), ``needs_bytes`` (least
    peak of any sequence written out) and, without a schedule, ``stopped`` with the reason. Random ops and ops with an effect
    keep their order, and the latter run once: their outputs stay until their last reader, beside what is guaranteed.
    """
    search = Incumbent(graph, budget_bytes, gap, time_limit_s, progress)
    if not search.hopeless():
        try:
            search.offer(keep_all(graph), "keep all")
            if start is not None:
                search.offer(start, "start")
            halving.halve(search, seed, variants=variants)
        except TimeoutError:
            search.out_of_time()
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
        if search.best is None:
            _give_reason(search.notes)
    return search.plan(METHOD, seed=seed)


def _give_reason(notes: dict[str, Any]) -> None:
    """Say in the notes why there is no schedule, unless an interruption is why."""
    if notes.get("stopped") == "interrupted":
        return
    said = [notes["stopped"]] if "stopped" in notes else []
    if "needs_bytes" in notes:
        said.append(f"its smallest sequence, of a decomposition of width {notes['width']}, needs {notes['needs_bytes']:,} bytes")
    if "too_long" in notes:
        said.append(f"longer than {halving.MAX_RUNS:,} runs and not written out: {', '.join(notes['too_long'])}")
    notes["stopped"] = "; ".join(said)
