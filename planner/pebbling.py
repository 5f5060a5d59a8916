"""The smallest peak of any schedule in any order, bounded from below by walking backwards from the end.

A set S of values is to be in memory at once. Whatever the schedule, some op p was the last to make a member of S. While it
ran, its inputs, its outputs and the rest of S were there; before it, the set (S minus its outputs) plus its inputs was. So

    least(S) = min over p of max(bytes(S, inputs and outputs of p) + workspace(p), least(S minus outputs(p) plus inputs(p)))

with least(∅) = the resident bytes, and least(the graph's outputs) bounds the peak of every schedule: this is black pebbling
with weights (Sethi, 1975). A bottleneck-shortest-path search from the outputs visits the sets in order of their peak, so
wherever it stops, the peak it has come to is proved. Where it arrives at ∅, its path backwards is a sequence with that peak.

Where some p makes a member of S from members of S within the peak already paid, its set is a subset of S and nothing else
needs to be tried.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator

from graphs.errors import InvalidSchedule
from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.schedule import Schedule, with_frees
from planner.simulate import simulate

STATES = 20_000


def least_peak(graph: Graph, *, states: int = STATES, time_limit_s: float = 60.0) -> tuple[int, Schedule | None]:
    """Bytes that every schedule needs, whatever its order, and a schedule with that very peak where the search found one.

    states  sets to visit at most: more of them, a better bound. Time and memory are in proportion
    """
    deadline = time.perf_counter() + time_limit_s
    size = [0 if v in graph.resident else value.size_bytes for v, value in enumerate(graph.values)]
    producer = graph.producer

    def mask(values: Iterable[int]) -> int:
        return sum(1 << v for v in set(values) if producer[v] >= 0)

    inputs, outputs = [mask(op.inputs) for op in graph.ops], [mask(op.outputs) for op in graph.ops]
    fixed = [graph.resident_bytes + op.workspace_bytes for op in graph.ops]
    goal = mask(graph.outputs)
    came_from: dict[int, tuple[int, int]] = {goal: (0, -1)}  # set: the set it came from, by which op
    # Ties go to the newest set, so that a path to the end is found early where there is one.
    heap = [(least_bytes(graph), 0, goal)]
    proved = heap[0][0]
    for _ in range(states):
        peak, _, present = heapq.heappop(heap)
        proved = max(proved, peak)
        if not present:
            return proved, _schedule(graph, came_from, proved)
        if time.perf_counter() > deadline:
            break
        held = sum(size[v] for v in _members(present))
        steps: list[tuple[int, int, int]] = []
        for p in {producer[v] for v in _members(present)}:
            more = (inputs[p] | outputs[p]) & ~present
            needed = fixed[p] + held + sum(size[v] for v in _members(more))
            before = (present & ~outputs[p]) | inputs[p]
            if needed <= peak and not before & ~present:
                steps = [(peak, p, before)]
                break
            steps.append((max(peak, needed), p, before))
        for level, p, before in steps:
            if before not in came_from:
                came_from[before] = present, p
                heapq.heappush(heap, (level, -len(came_from), before))
    return max(proved, heap[0][0]) if heap else proved, None


def _members(values: int) -> Iterator[int]:
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest


def _schedule(graph: Graph, came_from: dict[int, tuple[int, int]], peak_bytes: int) -> Schedule | None:
    """The path as a schedule; None where it leaves out an op, or breaks the order of draws and effects."""
    runs = []
    present, op = came_from[0]
    while op >= 0:
        runs.append(op)
        present, op = came_from[present]
    schedule = with_frees(graph, runs)
    try:
        return schedule if simulate(graph, schedule).peak_bytes <= peak_bytes else None
    except InvalidSchedule:
        return None
