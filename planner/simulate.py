"""``simulate``: the only definition of peak and time. Planners, the online runtime, executors and plots ask it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphs.errors import InvalidSchedule
from graphs.ir import Graph, check_graph
from planner.schedule import Compute, Schedule, check_steps


@dataclass(frozen=True, slots=True)
class Trace:
    """What a schedule costs.

    time_ns        sum of the times of all runs, repeats included
    peak_bytes     most bytes in memory at any moment
    peak_step      first step at which that happens
    memory_bytes   for each step, bytes in memory during it: for a Compute while the op runs, for a Free after it
    recomputed     for each op run more than once, how many extra runs
    """

    time_ns: int
    peak_bytes: int
    peak_step: int
    memory_bytes: tuple[int, ...] = field(repr=False)
    recomputed: dict[int, int]

    @property
    def recomputed_ops(self) -> int:
        """Extra runs in all."""
        return sum(self.recomputed.values())


def simulate(graph: Graph, schedule: Schedule) -> Trace:
    """Replay a schedule and measure it.

    Memory at any moment is the bytes of all resident values plus those of all values present. While an op runs, its
    inputs, **all** its outputs and its workspace are in memory together. An output that is still present when its op runs
    again exists twice until the op is done; then one copy is dropped. Views cost nothing. Random ops repeat their
    first draw.

    Valid is a schedule that
      1. names ops and values of this graph;
      2. runs an op only when all its inputs are present;
      3. frees only what is present, and nothing resident;
      4. runs every random op for the first time in graph order, so that draws are the same as without a schedule;
      5. runs an op with an outside effect at most once, those ops in graph order;
      6. runs every op at least once (so no schedule takes less than ``graph.keep_all_time_ns``, and draws are those of the
         whole graph) and has every graph output present at the end.

    Raises InvalidSchedule naming the step and the rule broken.
    """
    check_graph(graph, "simulate")
    if isinstance(schedule, Iterator):
        schedule = tuple(schedule)
    try:
        return _replayed(graph, schedule)
    except (AttributeError, IndexError, TypeError):  # looking at each step beforehand would take as long as all else
        check_steps(schedule)
        raise


def _replayed(graph: Graph, schedule: Schedule) -> Trace:
    sizes = [value.size_bytes for value in graph.values]
    present = set(graph.resident)
    held = graph.resident_bytes
    peak, peak_step, time_ns = held, 0, 0
    memory: list[int] = []
    runs = [0] * len(graph.ops)
    last_random = last_effect = -1

    for at, step in enumerate(schedule):
        if isinstance(step, Compute):
            if not 0 <= step.op < len(graph.ops):
                raise InvalidSchedule(f"step {at}: there is no op {step.op}; ops are numbered 0 to {len(graph.ops) - 1}")
            op = graph.ops[step.op]
            for v in op.inputs:
                if v not in present:
                    raise InvalidSchedule(f"step {at}: {op.name} reads {_named(graph, v)}, which is not in memory")
            if not runs[step.op] and op.random:
                if step.op < last_random:
                    later = graph.ops[last_random].name
                    raise InvalidSchedule(
                        f"step {at}: {op.name} draws random numbers after {later}, which comes later in the graph"
                    )
                last_random = step.op
            if op.effect:
                if runs[step.op]:
                    raise InvalidSchedule(f"step {at}: {op.name} has an outside effect and must not run twice")
                if step.op < last_effect:
                    later = graph.ops[last_effect].name
                    raise InvalidSchedule(f"step {at}: {op.name} acts after {later}, which comes later in the graph")
                last_effect = step.op
            runs[step.op] += 1
            time_ns += op.time_ns
            during = held + op.workspace_bytes
            for v in op.outputs:
                during += sizes[v]
                if v not in present:
                    present.add(v)
                    held += sizes[v]
            if during > peak:
                peak, peak_step = during, at
            memory.append(during)
        else:
            v = step.value
            if not 0 <= v < len(sizes):
                raise InvalidSchedule(f"step {at}: there is no value {v}; values are numbered 0 to {len(sizes) - 1}")
            if v in graph.resident:
                raise InvalidSchedule(f"step {at}: frees {_named(graph, v)}, which is resident")
            if v not in present:
                raise InvalidSchedule(f"step {at}: frees {_named(graph, v)}, which is not in memory")
            present.remove(v)
            held -= sizes[v]
            memory.append(held)

    for v in sorted(graph.outputs):
        if v not in present:
            raise InvalidSchedule(f"at the end {_named(graph, v)} is not in memory, but it is an output of the graph")
    for i, op in enumerate(graph.ops):
        if not runs[i]:
            raise InvalidSchedule(f"at the end {op.name} has not run; every op must run at least once")
    recomputed = {i: count - 1 for i, count in enumerate(runs) if count > 1}
    return Trace(time_ns, peak, peak_step, tuple(memory), recomputed)


def _named(graph: Graph, v: int) -> str:
    return f"value {v} ({graph.values[v].name})"
