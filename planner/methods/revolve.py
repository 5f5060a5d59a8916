"""Revolve: chains of equal layers, by binomial checkpointing (Griewank and Walther, ACM TOMS 2000, Algorithm 799).

With s slots for checkpoints, the one of the chain's input included, and at most r forward runs of any step, chains of up to
C(s+r, s) steps can be reversed; l steps with C(s+r-1, s) < l <= C(s+r, s) take r l - C(s+r, s+1) forward runs at least. The
schedule runs j steps forward, keeps what they made, reverses the tail with one slot less, then the head; j makes the sum of both
least.

The graph has to be a chain of ops (``planner.chains.chain.chain_of_ops``). Where its layers are equal the result is optimal among
all schedules. Where they are not, the schedule for equal ones is used as it is, as Checkmate's authors did for their baseline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from graphs.errors import InputError
from graphs.ir import Graph
from planner.chains.chain import Chain, chain_of_ops
from planner.incumbent import Incumbent
from planner.result import Plan
from planner.schedule import Schedule, keep_all, with_frees
from planner.simulate import simulate

MAX_RUNS = 5_000_000  # a longer sequence is not written out: few checkpoints for many steps take that many


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The schedule for the most checkpoints that fit.

    On a chain of equal layers (``equal_layers``) no schedule in any order takes less, so ``bound_ns`` is its time. A gradient
    made twice helps nothing there, since each making needs the whole chain behind it, and keeping a checkpoint until its own
    backward op costs nothing (Aupy, Herrmann, Hovland, Robert, SIAM J. Sci. Comput. 2016). Elsewhere ``bound_ns`` is the keep-all
    time. The number of checkpoints is bisected: more of them take more memory and less time.

    time_limit_s  stop the bisection after this long; Ctrl-C stops it at once. Either way the best so far is returned

    Raises InputError naming the op where the graph is not a chain, or where a forward op may not run twice.
    """
    search = Incumbent(graph, budget_bytes, gap, time_limit_s)
    chain = chain_of_ops(graph)
    for stage in chain.stages:
        for i in stage.forward:
            if graph.ops[i].effect:
                raise InputError(
                    f"{graph.name}: op {i} ({graph.ops[i].name}) has an outside effect and cannot run again, as Revolve would "
                    "have it; method rotor takes such chains"
                )
    search.notes["stages"] = len(chain.stages)
    if not search.hopeless():
        try:
            if search.offer(keep_all(graph), "keep all").peak_bytes > budget_bytes:
                _bisect(search, chain)
        except KeyboardInterrupt:
            search.notes["stopped"] = "interrupted"
    return search.plan("revolve", seed=seed)


def _bisect(search: Incumbent, chain: Chain) -> None:
    """Take the schedule for the most checkpoints that fit."""
    graph, notes = search.graph, search.notes
    steps = len(chain.stages)
    fits, fails = 0, steps + 1  # numbers of slots
    while fails - fits > 1:
        slots = (fits + fails) // 2 if fits or fails <= steps else steps  # all of them first
        replayable = search.replayable_work()  # each run is some of it
        runs = _ops(chain, slots, max_runs=min(MAX_RUNS, replayable))
        if runs is None and replayable < MAX_RUNS:
            notes["stopped"] = "time limit"
        elif runs is None:
            notes["stopped"] = f"the sequence for {slots} checkpoints has more than {MAX_RUNS:,} runs and is not written out"
        if runs is None or not search.in_time(runs):
            break
        tried = with_frees(graph, runs)
        trace = simulate(graph, tried)
        if trace.peak_bytes <= search.budget_bytes:
            fits, search.best, search.time_ns = slots, tried, trace.time_ns
            notes["slots"] = slots
        else:
            fails, notes["needs_bytes"] = slots, trace.peak_bytes
    if search.best is None:
        if "stopped" not in notes:
            notes["stopped"] = f"its smallest schedule, with one checkpoint, needs {notes['needs_bytes']:,} bytes"
        return
    notes.pop("needs_bytes", None)
    if fails - fits == 1 and equal_layers(chain):
        assert search.time_ns is not None
        search.bound_ns = search.time_ns


@functools.cache
def forward_runs(steps: int, slots: int) -> int:
    """Least forward runs that reverse a chain of so many equal steps, the last step's own run not counted.

    slots  checkpoints that can be kept, the chain's input among them, >= 1
    """
    r = _repeats(steps, slots)
    return r * steps - math.comb(slots + r, slots + 1)


@functools.cache
def first_jump(steps: int, slots: int) -> int:
    """The fewest steps to run forward before the next checkpoint so that the rest takes the least forward runs.

    slots  at least 2. The best jumps are those that leave neither part more steps than its share of the runs reverses.
    """
    r = _repeats(steps, slots)
    head = math.comb(slots + r - 2, slots) if r >= 2 else 0
    return max(1, head, steps - math.comb(slots - 1 + r, slots - 1))


def _repeats(steps: int, slots: int) -> int:
    """How often a step has to run forward at most."""
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r


def equal_layers(chain: Chain) -> bool:
    """Whether the chain is one for which Revolve is proved optimal: Checkmate's training chain with equal sizes and times.

    The last stage's backward op has to read the loss that its forward op makes: with nothing to hold between the two, the last
    steps have a slot more, and schedules cheaper than Revolve's exist (``linear_network`` of ``graphs.synthetic`` is one).
    """
    graph, last = chain.graph, len(chain.stages) - 1
    ops = graph.ops
    sizes = {value.size_bytes for v, value in enumerate(graph.values) if v not in graph.resident}
    times = {ops[stage.forward[0]].time_ns for stage in chain.stages[:-1]}
    if len(sizes) != 1 or len(times) > 1 or any(op.workspace_bytes or len(op.outputs) != 1 for op in ops):
        return False
    if any(not ops[graph.producer[v]].backward for v in graph.outputs - graph.resident):
        return False
    gradient: set[int] = set()  # what the backward op before has made
    for at, stage in reversed(list(enumerate(chain.stages))):
        if len(stage.forward) != 1 or len(stage.backward) > 1 or (at and not stage.backward):
            return False
        for i in stage.backward:
            wanted = set(ops[stage.forward[0]].outputs) if at == last else gradient
            if set(ops[i].inputs) - graph.resident != wanted | stage.inputs:
                return False
            gradient = set(ops[i].outputs)
    return graph.outputs - graph.resident == gradient


def _ops(chain: Chain, slots: int, *, max_runs: float) -> list[int] | None:
    """The ops of the schedule: forward runs of whole stages, and backward passes from the last stage to the first. None where
    there are more than ``max_runs``.
    """
    graph = chain.graph
    runs: list[int] = []
    # Entries: (first stage, last stage, slots, whether the last stage is the chain's last and has not run yet). The first
    # stage's input is kept and has one of the slots.
    stack = [(0, len(chain.stages) - 1, slots, True)]
    while stack:
        if len(runs) > max_runs:
            return None
        low, high, left, fresh = stack.pop()
        if low == high:
            stage = chain.stages[low]
            made = {v for i in stage.forward for v in graph.ops[i].outputs}
            if fresh or any(made & set(graph.ops[i].inputs) for i in stage.backward):
                runs.extend(stage.forward)
            runs.extend(stage.backward)
            continue
        length = high - low + 1
        if left == 1:
            jump = length - 1
        else:
            jump = first_jump(length, left)
        middle = low + jump
        runs.extend(i for stage in chain.stages[low:middle] for i in stage.forward)
        stack.append((low, middle - 1, left, False))
        stack.append((middle, high, max(1, left - 1), fresh))
    return runs
