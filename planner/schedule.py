"""A Schedule: what runs and what is freed, in time order. Nothing else; everything else follows from it.

An op that occurs again is a rematerialization. What a Schedule means, and what makes one valid, is ``planner.simulate``.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from graphs.errors import InvalidSchedule, a_kind, quoted
from graphs.ir import Graph, check_graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run op number ``op``: all its outputs are in memory afterwards."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop value number ``value`` from memory."""

    value: int


Step = Compute | Free
Schedule = tuple[Step, ...]


def check_steps(schedule: object) -> None:
    """Refuse what is no Schedule of any graph. Raises InvalidSchedule saying what is not."""
    if not isinstance(schedule, Iterable):
        raise InvalidSchedule(
            f"a schedule is a tuple of Compute and Free (that of a Plan or a Run is its .schedule), not {a_kind(schedule)}"
        )
    for at, step in enumerate(schedule):
        number = step.op if isinstance(step, Compute) else step.value if isinstance(step, Free) else None
        if not isinstance(number, Integral):
            raise InvalidSchedule(
                f"step {at}: expected Compute or Free with the number of an op or a value, found {quoted(step)}"
            )


def computes(schedule: Schedule) -> Iterator[int]:
    """The ops a schedule runs, in order, repeats included."""
    return (step.op for step in schedule if isinstance(step, Compute))


def with_frees(graph: Graph, ops: Sequence[int]) -> Schedule:
    """Run ``ops`` in this order and free every value as early as that order allows.

    A read is served by the latest run of the op that makes the value, so a copy can go right after the last read before
    its next making. Graph outputs stay after their last making. This is the least memory for the given sequence.
    """
    # Backward sweep: `needed` holds the values some later step reads from the copy that is current at this point.
    needed = {v for v in graph.outputs if graph.producer[v] >= 0}
    frees: list[list[int]] = [[] for _ in ops]
    for at in range(len(ops) - 1, -1, -1):
        op = graph.ops[ops[at]]
        frees[at] = [v for v in (*op.inputs, *op.outputs) if v not in needed and v not in graph.resident]
        needed.difference_update(op.outputs)
        needed.update(v for v in op.inputs if v not in graph.resident)
    steps: list[Step] = []
    for at, i in enumerate(ops):
        steps.append(Compute(i))
        steps.extend(Free(v) for v in frees[at])
    return tuple(steps)


def keep_all(graph: Graph) -> Schedule:
    """Every op once, in graph order, every value freed after its last use: what plain execution does."""
    check_graph(graph, "keep_all")
    return with_frees(graph, range(len(graph.ops)))


def early_values(graph: Graph) -> set[int]:
    """What a forward gives back (loss, new buffers): every output made before the backward; none in a graph without one."""
    if not any(op.backward for op in graph.ops):
        return set()
    return {v for v in graph.outputs if graph.producer[v] >= 0 and not graph.ops[graph.producer[v]].backward}


def hold_early(graph: Graph, schedule: Schedule) -> Schedule:
    """Keep what a forward gives back from when it is first made."""
    early = early_values(graph)
    return tuple(step for step in schedule if not (isinstance(step, Free) and step.value in early))


def to_json(schedule: Schedule) -> list[int]:
    """One integer a step: ``op`` for Compute, ``-1 - value`` for Free."""
    return [step.op if isinstance(step, Compute) else -1 - step.value for step in schedule]


def from_json(codes: Iterable[object]) -> Schedule:
    """Inverse of ``to_json``. Raises InvalidSchedule on anything that is no list of integers."""
    if not isinstance(codes, Iterable):
        raise InvalidSchedule(f"a schedule is a list of integers, not {a_kind(codes)}")
    steps: list[Step] = []
    for at, code in enumerate(codes):
        if not isinstance(code, int) or isinstance(code, bool):
            raise InvalidSchedule(f"step {at}: expected an integer, found {quoted(code)}")
        steps.append(Compute(code) if code >= 0 else Free(-1 - code))
    return tuple(steps)


def first_runs(runs: Iterable[int]) -> list[int]:
    """The ops in the order in which they run for the first time."""
    return list(dict.fromkeys(runs))


def in_graph_order(runs: Iterable[int]) -> bool:
    """Whether ops run for the first time in the order of their numbers."""
    firsts = first_runs(runs)
    return firsts == sorted(firsts)


def makers(graph: Graph, wanted: Iterable[int], present: Collection[int]) -> list[int]:
    """The ops that make these values from what is present, in graph order."""
    ops: set[int] = set()
    todo = list(wanted)
    while todo:
        x = todo.pop()
        op = graph.producer[x]
        if x not in present and op not in ops:
            ops.add(op)
            todo.extend(graph.ops[op].inputs)
    return sorted(ops)


def renumbered(schedule: Schedule, number: Sequence[int] | Mapping[int, int]) -> Schedule:
    """The schedule for a graph in which op ``v`` is op ``number[v]``."""
    return tuple(Compute(number[step.op]) if isinstance(step, Compute) else step for step in schedule)


def put_in_graph_order(graph: Graph, runs: Iterable[int], *, waits: bool = True) -> list[int]:
    """The runs with first ones in graph order, for the time and memory it takes; whether inputs are there is as it was.

    As many first runs as can be stay where they are. An op that comes before its turn waits until then; one that comes after it
    runs when it is its turn, too, or, if it has an effect, only then.

    waits  whether ops that are early do. Otherwise all that comes before one runs before it, too: dear, but little more is held
    """
    runs = list(runs)
    staying = _longest_increasing(first_runs(runs)) if waits else set(runs)
    ordered: list[int] = []
    coming = 0
    for v in runs:
        if v < coming:
            if not graph.ops[v].effect:
                ordered.append(v)
        elif v in staying:
            ordered.extend(range(coming, v + 1))
            coming = v + 1
    ordered.extend(range(coming, max(runs, default=-1) + 1))
    return ordered


def _longest_increasing(numbers: Iterable[int]) -> set[int]:
    """The members of a longest increasing subsequence (Fredman, 1975)."""
    ends: list[int] = []  # of subsequences of each length, the least one
    before: dict[int, int | None] = {}
    for number in numbers:
        at = bisect.bisect_left(ends, number)
        before[number] = ends[at - 1] if at else None
        ends[at : at + 1] = [number]
    found = set[int]()
    last = ends[-1] if ends else None
    while last is not None:
        found.add(last)
        last = before[last]
    return found
