"""Replay of the DTR authors' operator logs, views and mutations included, by the rules of their simulator."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from graphs.errors import InputError, a_kind
from graphs.importers.dtr_program import read_program
from graphs.program import Program
from online.allocators import ARENAS, AddressUse, new_allocator
from online.engines.engine import Counters, Engine, Option, Release
from online.runtime import RUNS_PER_OP, Failure, RunStatus, Spelled, check_thrash_limit, default_allocator, play
from planner.budget import resolve_budget
from planner.plan import check_options, check_sums


@dataclass(frozen=True)
class Replay:
    """What one replay did.

    time_ns        time of all ops that ran, repeats included, until the end or until it stopped
    base_time_ns   time of running every op once
    peak_bytes     most bytes in memory at any moment
    steps          what happened: the number of a call, or ``-1 - storage`` for one that left memory
    addresses      what the replay did to the address space; None for the allocator "bytes"
    """

    program: Program = field(repr=False)
    budget_bytes: int
    heuristic: str
    status: RunStatus
    time_ns: int
    base_time_ns: int
    peak_bytes: int
    counters: Counters
    failure: Failure | None
    steps: tuple[int, ...] = field(repr=False)
    addresses: AddressUse | None = None

    @property
    def slowdown(self) -> float:
        """Time / base time: what the DTR paper calls overhead; 1 for a log that takes no time."""
        return self.time_ns / self.base_time_ns if self.base_time_ns else 1.0


def replay_log(
    log: Program | str | os.PathLike[str],
    budget: int | float | str,
    *,
    heuristic: str = "dtr",
    allocator: str | None = None,
    release: Release | str = Release.EAGER,
    reclaim: bool = False,
    options: Collection[Option | str] = (),
    thrash_limit: float = 2.0,
    seed: int = 0,
) -> Replay:
    """Replay an operator log (a file, or one read before) under a budget.

    budget   bytes, or a share of ``baseline_peak_bytes``, rounded down
    further  as in ``online.run``, but here a run is stopped as in the paper when its time passes twice the base time,
             or after a thousand runs per call

    Constants count against the budget from where the log makes them and are never evicted. Raises InputError for what cannot
    be used; a replay that runs out of memory or thrashes is returned with its status.
    """
    check_options({"seed": seed})
    check_thrash_limit(thrash_limit)
    program = log if isinstance(log, Program) else read_program(log)
    base_time_ns = program.base_time_ns
    check_sums(program.name, sum(program.size_bytes) + sum(call.workspace_bytes for call in program.calls), base_time_ns)
    budget_bytes = resolve_budget(budget, baseline_peak_bytes(program))
    asked = Spelled.of(heuristic, allocator, release, reclaim, options)
    evict = asked.rule
    allocator = default_allocator(evict) if asked.allocator is None else asked.allocator
    if allocator in ARENAS and not ARENAS[allocator].in_place:
        raise InputError(f"the allocator {allocator} moves residents between steps, and a log has no residents")
    engine = Engine(
        budget_bytes,
        evict,
        seed=seed,
        release=asked.release,
        reclaim=asked.reclaim,
        options=asked.options,
        awaiting=True,
        limit_ns=(thrash_limit - 1) * base_time_ns,
        limit_runs=RUNS_PER_OP * len(program.calls),
        allocator=new_allocator(allocator, budget_bytes, program),
    )
    status, failure = play(engine, program)
    return Replay(
        program, budget_bytes, asked.heuristic, status, engine.clock - 1, base_time_ns, engine.peak_bytes, engine.counters,
        failure, tuple(engine.steps), engine.allocator.use if engine.allocator else None,
    )  # fmt: skip


def baseline_peak_bytes(program: Program) -> int:
    """Peak without a budget, where every storage goes at the moment its last reference goes, constants too (appendix D.2).

    Raises InputError for what is no Program.
    """
    if not isinstance(program, Program):
        raise InputError(f"baseline_peak_bytes takes a Program (graphs.importers.read_program), not {a_kind(program)}")
    used = peak = sum(program.size_bytes[s] for s in program.resident)
    there = set(program.resident)
    for event in program.events:
        if event < 0:
            used -= program.size_bytes[-1 - event]
            continue
        call = program.calls[event]
        new = set(call.makes) - there
        there |= new
        used += sum(program.size_bytes[s] for s in new)
        peak = max(peak, used + call.workspace_bytes)
    return peak
