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
NEAR = 1 / 4  # share of an overflow's ops on either side of its middle that are near it


def missing(
    model: StageModel,
    graph: Graph,
    found: Walk,
    budget_bytes: int,
    most: int,
    *,
    large: float = LARGE,
    reruns_last: bool = False,
    by_need: bool = False,
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
    by_need  whether re-runs count more for what they read and make themselves, which another way cannot do without
    """
    held_bytes, coming = _held(graph, found)

    def weight(r: int) -> int:
        op = graph.ops[found.runs[r]]
        needs = op.workspace_bytes + sum(graph.values[x].size_bytes for x in {*op.inputs, *op.outputs} - graph.resident)
        return held_bytes[r] + (needs if by_need and found.runs[r] != coming[r] else 0)

    over = sorted((r for r, held in enumerate(held_bytes) if held > budget_bytes), key=lambda r: -weight(r))
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


def halfway(model: StageModel, graph: Graph, found: Walk, budget_bytes: int, most: int) -> list[Event]:
    """For each stage that overflows, the worst first, the first execution near the middle of the overflow that is tightest there.

    Where a relaxation overflows throughout, the worst op of a stage is often the first one, which has all re-runs of the stage
    before it: an event there moves the overflow on by an op or two, one in the middle halves it. Tight is where much is held, and
    much of it has to be.

    graph  that of the walk, without the end
    most   so many at most
    """
    held_at: dict[int, dict[int, int]] = {}  # by stage, the most bytes at or before each first execution
    for held_bytes, w, stage in zip(*_held(graph, found), found.stages, strict=True):
        if held_bytes > budget_bytes and Event(w) not in model.events:
            held = held_at.setdefault(stage, {})
            held[w] = max(held.get(w, 0), held_bytes)
    due_bytes = _due(model.graph)
    events = []
    for held in sorted(held_at.values(), key=lambda held: -max(held.values())):
        middle, reach = (min(held) + max(held)) / 2, max(1.0, NEAR * (max(held) - min(held)))
        near = [w for w in held if abs(w - middle) <= reach] or list(held)
        events.append(Event(max(near, key=lambda w: (held[w] + due_bytes[w], -w))))
    return events[:most]


def _due(graph: Graph) -> list[int]:
    """For each op, the bytes that it takes, and of what the backward pass has made before it and reads after it: that is dear to
    make again."""
    size = [0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)]
    last = [readers[-1] if readers else -1 for readers in graph.consumers]
    is_late = [v >= 0 and graph.ops[v].backward for v in graph.producer]
    due, across = [], 0
    for w, op in enumerate(graph.ops):
        across -= sum(size[x] for x in op.inputs if is_late[x] and last[x] == w)
        stays = sum(size[x] for x in op.inputs if is_late[x] and last[x] > w)  # in ``across`` already
        due.append(op.workspace_bytes + across - stays + sum(size[x] for x in (*op.inputs, *op.outputs)))
        across += sum(size[x] for x in op.outputs if is_late[x] and last[x] > w)
    return due


def _held(graph: Graph, found: Walk) -> tuple[list[int], list[int]]:
    """For each run of a walk, the bytes in memory, and the op that runs for the first time there or next after it."""
    schedule = with_frees(graph, found.runs)
    steps = [s for s, step in enumerate(schedule) if isinstance(step, Compute)]
    memory_bytes, next_first = simulate(graph, schedule).memory_bytes, next_first_runs(graph, schedule)
    return [memory_bytes[s] for s in steps], [next_first[s] for s in steps]


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
