"""What a solution of the stage model overlooks: the events at which the sequence that it stands for takes too much memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping

from graphs.ir import Graph
from planner.schedule import Compute, Schedule, keep_all, with_frees
from planner.simulate import simulate
from planner.stages.model import Event, StageModel, Walk

LARGE = 2.0  # times the budget, what a stage holds that asks for two events at first
PASSED = 2 / 3  # share of its overflow that is before the second


def missing(
    model: StageModel,
    graph: Graph,
    found: Walk,
    budget_bytes: int,
    most: int,
    *,
    large: float = LARGE,
    reruns_last: bool = False,
) -> tuple[list[Event], list[Event]]:
    """New events for the worst overflows of a walk along a solution, each in a stage of its own.

    Each overflow happens before or at some first execution w, and asks for the first of these that is not there yet: an event at
    w; where it happens before, in a re-run, one at w - 1; then that re-run, which splits its stage. A large overflow may only
    move to the ops after w, so it asks for a second one, where most of the stage's overflow is past. Comes with which events are
    such second ones.

    graph  that of the walk, without the end
    most   first executions at most, fewer by one for each re-run; re-runs are not limited
    large  times the budget, what is held in an overflow that is large
    reruns_last  none as long as a first execution is asked for
    """
    schedule = with_frees(graph, found.runs)
    steps = [s for s, step in enumerate(schedule) if isinstance(step, Compute)]
    memory_bytes, next_first = simulate(graph, schedule).memory_bytes, next_first_runs(graph, schedule)
    held_bytes, coming = [memory_bytes[s] for s in steps], [next_first[s] for s in steps]
    over = sorted((r for r, held in enumerate(held_bytes) if held > budget_bytes), key=lambda r: -held_bytes[r])
    events, first_runs, seconds, reruns = model.events, list[Event](), list[Event](), list[Event]()
    stages: set[int] = set()
    for r in over:
        v, w, stage = found.runs[r], coming[r], found.stages[r]
        if stage in stages:
            continue
        wanted = next((t for t in (Event(w), Event(w - 1)) if t not in (*events, *first_runs)), None)
        if wanted is not None and (v != w or wanted.at == w):
            stages.add(stage)
            first_runs.append(wanted)
            if held_bytes[r] > large * budget_bytes:
                inside = (q for q in reversed(over) if found.stages[q] == stage)  # the most of an op comes last
                later = Event(_passed({coming[q]: held_bytes[q] - budget_bytes for q in inside}))
                if later not in (*events, *first_runs):
                    first_runs.append(later)
                    seconds.append(later)
        elif v != w and events[stage].again == v and found.stages[r + 1 : r + 2] != [stage]:
            continue  # an event already; what is over are values too small to count
        elif v != w and (rerun := _before(events[stage - 1], events[stage], v)) is not None:
            stages.add(stage)
            reruns.append(rerun)
    if reruns_last and first_runs:
        reruns = []
    first_runs = first_runs[: max(0, most - len(reruns))]
    return [*first_runs, *reruns], [t for t in seconds if t in first_runs]


def _before(begin: Event, end: Event, v: int) -> Event | None:
    """The last re-run of an op between two events; None where there is no number left between them."""
    at = (begin.at + end.at) / 2
    return Event(at, v, end.at) if begin.at < at < end.at else None


def _passed(excess_bytes: Mapping[int, int]) -> int:
    """The op by which a share PASSED of the excess is past."""
    ops = sorted(excess_bytes)
    sums = list(itertools.accumulate(excess_bytes[w] for w in ops))
    return ops[bisect_left(sums, PASSED * sums[-1])]


def tightest(graph: Graph) -> Event:
    """The first event: the first execution at or next after which most is held if everything is kept."""
    whole = keep_all(graph)
    return Event(next_first_runs(graph, whole)[simulate(graph, whole).peak_step])


def next_first_runs(graph: Graph, schedule: Schedule) -> list[int]:
    """For each step, the op that runs for the first time there or next after it; the number after the last op where none does."""
    seen: set[int] = set()
    first = []
    for step in schedule:
        first.append(isinstance(step, Compute) and step.op not in seen)
        if isinstance(step, Compute):
            seen.add(step.op)
    coming, following = len(graph.ops), []
    for step, is_first in zip(reversed(schedule), reversed(first), strict=True):
        if is_first and isinstance(step, Compute):
            coming = step.op
        following.append(coming)
    return following[::-1]
