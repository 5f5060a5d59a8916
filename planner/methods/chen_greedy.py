"""Chen's greedy rule: a checkpoint whenever the forward values since the last one exceed b bytes (Chen et al. 2016).

For general graphs, and with b swept, as in Checkmate (Jain et al., MLSys 2020, appendix B): the forward ops are walked in graph
order, their output bytes summed up, and a candidate at which the sum exceeds b becomes a checkpoint and sets the sum to 0. The
rule knows sizes, but no times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphs.errors import InputError
from graphs.ir import Graph
from planner.chains.chain import forward_count
from planner.chains.checkpoints import Trials, candidates_of, every_root, kinds, runs
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.result import Plan
from planner.schedule import Schedule, with_frees
from planner.simulate import simulate

SWEEP = [r / 100 for r in range(301)]  # b over the activation bytes of the linearized square-root schedule


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    candidates: str = "both",
    b_bytes: int | None = None,
) -> Plan:
    """The cheapest schedule of the sweep that fits; ``bound_ns`` is the keep-all time.

    time_limit_s  stop the sweep after this long; Ctrl-C stops it at once. Either way the best so far is returned
    candidates    what may be a checkpoint: "articulation" (ops on which all later ones depend), "linearized" (every forward op),
                  or "both"
    b_bytes       one b instead of the sweep over 301 values from 0 to 3 r, with r the activation bytes of the linearized
                  square-root schedule
    """
    search = Incumbent(graph, budget_bytes, gap, time_limit_s)
    notes = search.notes
    trials = Trials(search)
    asked = kinds(candidates)
    if b_bytes is not None and (isinstance(b_bytes, bool) or not isinstance(b_bytes, int) or b_bytes < 0):
        raise InputError(f"b_bytes must be an integer of at least 0, not {b_bytes!r}")
    if not search.hopeless():
        try:
            limits = _sweep(search) if b_bytes is None else [b_bytes]
            for kind in asked:
                allowed = frozenset(candidates_of(graph, kind))
                for limit in limits:
                    if trials.take(_checkpoints(graph, allowed, limit)):
                        notes.update(candidates=kind, b_bytes=limit)
                    if now_s() > search.deadline:
                        notes["stopped"] = "time limit"
                        break
        except KeyboardInterrupt:
            notes["stopped"] = "interrupted"
        notes["tried"] = trials.count
        search.best = trials.schedule
        if search.best is not None:
            notes["checkpoints"] = len(trials.checkpoints)
        elif trials.needs_bytes is not None:
            notes["needs_bytes"] = trials.needs_bytes
            smallest = f"the smallest of {trials.count} greedy schedules needs {trials.needs_bytes:,} bytes"
            if notes.get("stopped") != "interrupted":  # which callers go by
                notes["stopped"] = f"{notes['stopped']}; {smallest}" if "stopped" in notes else smallest
    return search.plan("chen_greedy", seed=seed)


def _sweep(search: Incumbent) -> Sequence[int]:
    """The values of b, in bytes; none where there is no time for the square-root schedule."""
    graph = search.graph
    sequence = runs(graph, set(every_root(graph, "linearized")))
    if not search.in_time(sequence):
        return []
    activation_bytes = simulate(graph, with_frees(graph, sequence)).peak_bytes - graph.resident_bytes
    return sorted({int(share * activation_bytes) for share in SWEEP})


def _checkpoints(graph: Graph, allowed: frozenset[int], limit_bytes: int) -> Iterator[int]:
    """The candidates at which more than the limit has come together since the last checkpoint."""
    since = 0
    for i in range(forward_count(graph)):
        since += sum(graph.values[v].size_bytes for v in graph.ops[i].outputs)
        if i in allowed and since > limit_bytes:
            yield i
            since = 0
