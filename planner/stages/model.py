"""The rematerialization MILP with stages between a few events, and the way from its solution to a sequence.

Ops are numbered in the order of their first executions; the last op is an end that reads the graph's outputs
(``with_end``). Event j is the first execution of an op t_j or, between two of these, the last re-run of an op before the event
that is next when this one is put there: that splits a stage in which ops only run again, at a moment when something is known to
be in memory. Others may be put around it later. Where the op does not run again there, the event is the moment right after the
one that was before it. Stage j is what happens after event j and before event j + 1; the last one goes to the end. ``first use``
means: by an op that runs for the first time in the stage or at its end.

    K[j, x] ∈ {0, 1}   value x is in memory when the op of event j has just run, its inputs not yet freed
    R[j, v] ∈ {0, 1}   op v runs again in stage j
    M[j]    ∈ {0, 1}   the op u_j of event j runs again there; M = 0 in the rows below for what is not such an event

    minimise   Σ time(v) · R[j, v] + Σ time(u_j) · M[j]
    memory     Σ_x bytes(x) · K[j, x] + workspace(t_j) + resident ≤ budget      each j; workspace(u_j) · M[j] for a re-run
               outputs of the op that nothing needs any more, and tiny ones, count as its workspace
    running    K[j, x] = 1                              inputs and outputs x of t_j; K[j, x] ≥ M[j] for those of u_j
    first use  K[j, x] + R[j, prod(x)] ≥ 1              x made before stage j
    re-use     K[j, x] + R[j, prod(x)] ≥ R[j, v]        x an input of v
    carry      K[j, x] + R[j, prod(x)] + M[j+1] ≥ K[j+1, x]      x made before stage j; M[j+1] only where u_{j+1} = prod(x)
    last       R[j, v] = 0                              after the last re-run of v, until the event that was next
    nothing    R[i, u_j] ≤ M[j];  M[i] ≤ M[j]           stages i from the event on that was before j; re-runs i put before j

This is Checkmate's MILP (Jain et al., MLSys 2020, eq. 9), for values instead of ops, with most stages and memory rows left
out, and with others inside of its stages. Every schedule that fits, with this order of first executions, satisfies all rows (but
those of values that only pass on, see below; then a solution that is no dearer does), so the optimum bounds its extra time from
below, for any events, and however often an op runs again between two first executions. (Checkmate's own rows for memory there
hold where every op runs again at most once, in op order.)

Its relaxation needs rows on several stages in a row as well, and so does whoever solves it (``planner.stages.spans``).

What cannot matter has no variable: an op with an effect has no R; a value that nothing after event j can need, not even through
re-runs, no K. Values that are tiny even all together count as kept for free (the bound stays a bound). Where all events are first
executions, K is 0 for a value that is kept only to make something no larger from it alone: keep that instead (``_passing``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphs.ir import Graph, Op
from planner.solvers.milp import Answer, Milp

SCALE = 1e6  # times and bytes are divided so that totals are about this; HiGHS works to an absolute 1e-6
# 0-1 variables up to which CP-SAT (``planner.solvers.pseudo_boolean``) is faster than HiGHS: where no event is a re-run, where
# some are
SAT_VARIABLES, SAT_RERUNS = 2_000, 4_000
# Share of the budget that all values without variables may take together: where the last bit of a bound counts, and at most.
TINY, MOST_TINY = 1e-5, 1e-3


class Event(NamedTuple):
    """The first execution of an op or, between two of these, the last re-run of one.

    at     op t runs for the first time at t; between t and t + 1 ops only run again
    again  the op whose last run before ``until`` this is; -1 for a first execution
    until  where the event is that came next when a re-run was put halfway between that and the one before
    """

    at: float
    again: int = -1
    until: float = math.inf

    @property
    def done(self) -> int:
        """The last op that has run for the first time."""
        return int(self.at)

    @property
    def is_rerun(self) -> bool:
        return self.again >= 0

    @property
    def since(self) -> float:
        """Where the event is that came right before a re-run when that was put there."""
        return 2 * self.at - self.until

    @property
    def op(self) -> int:
        """The op that runs."""
        return self.again if self.is_rerun else self.done


def with_end(graph: Graph) -> Graph:
    """The graph with one more op: the end, which takes no time and reads every output that is not resident."""
    wanted = tuple(x for x in sorted(graph.outputs) if graph.producer[x] >= 0)
    names = {op.name for op in graph.ops}
    name = next(name for name in ("end", *(f"end_{i}" for i in range(len(names)))) if name not in names)
    return replace(graph, ops=(*graph.ops, Op(name, wanted, (), 0)))


@dataclass(frozen=True, slots=True)
class StageModel:
    """The MILP of one set of events.

    keep, rerun  for each stage, the variable number of each value's K and of each op's R
    happens      for each event, that of its M; -1 for a first execution
    memory       the number of each event's memory row
    spans        from stage to stage, those that have variables (``planner.stages.spans``)
    tiny         values without variables because of their size
    unit_ns      nanoseconds per unit of cost
    """

    graph: Graph
    events: tuple[Event, ...]
    milp: Milp
    keep: tuple[dict[int, int], ...]
    rerun: tuple[dict[int, int], ...]
    happens: tuple[int, ...]
    memory: list[int]
    spans: set[tuple[int, int]]
    tiny: frozenset[int]
    unit_ns: float

    def refines(self, other: StageModel) -> bool:
        """Whether no solution costs less than the other model's optimum, as there are only more events and more values.

        With stages taken together and values left out, a solution of this model is one of the other, and costs no more there.
        """
        return set(self.events) >= set(other.events) and self.tiny <= other.tiny

    @property
    def is_for_sat(self) -> bool:
        """Whether CP-SAT solves it faster than HiGHS."""
        return sum(self.milp.integer) <= (SAT_RERUNS if max(self.happens) >= 0 else SAT_VARIABLES)

    def kept(self, values: Sequence[float]) -> list[frozenset[int]]:
        """For each event, what a solution has in memory."""
        return [frozenset(x for x, k in keep.items() if values[k] > 0.5) for keep in self.keep]

    def happening(self, values: Sequence[float]) -> list[bool]:
        """For each event, whether its op runs in a solution."""
        return [m < 0 or values[m] > 0.5 for m in self.happens]

    def bound_ns(self, answer: Answer) -> int | None:
        """Proved least time, rounded so that it stays a bound; None where nothing was proved."""
        return proved_ns(self.graph, answer.bound, self.unit_ns)


def stage_model(graph: Graph, budget_bytes: int, events: Sequence[Event], *, tiny_share: float = TINY) -> StageModel:
    """Build the MILP of a graph with an end, for stages between ``events`` (ascending). With a re-run between t and t + 1, the
    first executions of these are events too.

    tiny_share  of the budget, what all values without variables may take together
    """
    milp = Milp()
    producer = graph.producer
    size = [value.size_bytes for value in graph.values]
    unit_ns = unit_of((op.time_ns for op in graph.ops), graph.keep_all_time_ns)
    unit_bytes = unit_of(size, budget_bytes)
    tiny = tiny_values(graph, tiny_share * budget_bytes)
    needed_after = {t: _needed(graph, t, tiny) for t in {event.done for event in events}}
    needed = [needed_after[event.done] for event in events]
    ops = [graph.ops[event.op] for event in events]
    running = [{x for x in (*op.inputs, *op.outputs) if producer[x] >= 0} for op in ops]

    # Variables, with the running rows of first executions as lower bounds of K.
    passing = {} if any(event.is_rerun for event in events) else _passing(graph)
    keep = tuple(
        {
            x: milp.binary(
                lower=float(x in running[j] and not event.is_rerun), upper=float(passing.get(x, event.done) >= event.done)
            )
            for x in sorted(needed[j])
        }
        for j, event in enumerate(events)
    )
    rerun = tuple(
        {
            v: milp.binary(cost=graph.ops[v].time_ns / unit_ns, upper=float(v not in over))
            for v in sorted({producer[x] for x in need})
            if not graph.ops[v].effect
        }
        for need, over in zip(needed, _over(events), strict=True)
    )
    happens = tuple(milp.binary(cost=op.time_ns / unit_ns) if e.is_rerun else -1 for e, op in zip(events, ops, strict=True))
    model = StageModel(graph, tuple(events), milp, keep, rerun, happens, [], set(), tiny, unit_ns)

    for j, event in enumerate(events):
        room_bytes = budget_bytes - graph.resident_bytes
        # What is dead as soon as it is made has no variable, but is there.
        extra_bytes = ops[j].workspace_bytes + sum(size[x] for x in running[j] - needed[j])
        terms = [(k, size[x] / unit_bytes) for x, k in keep[j].items()]
        if event.is_rerun:
            terms += [(happens[j], extra_bytes / unit_bytes)] if extra_bytes else []
            _last_rerun(model, j, running[j] & needed[j])
        else:
            room_bytes -= extra_bytes
        model.memory.append(len(milp.row_lower))
        milp.at_most(room_bytes / unit_bytes, terms)
        use_and_carry(model, j, j, rerun[j])
    return model


def _last_rerun(model: StageModel, j: int, running: Iterable[int]) -> None:
    """The rows running and nothing of an event that is a re-run."""
    event, happens, milp = model.events[j], model.happens, model.milp
    for x in sorted(running):
        milp.at_least(0.0, [model.keep[j][x]], [happens[j]])
    for earlier, m, rerun in zip(model.events[:j], happens, model.rerun, strict=False):
        if event.since <= earlier.at and event.again in rerun:
            milp.at_least(0.0, [happens[j]], [rerun[event.again]])
        if earlier.is_rerun and earlier.until == event.at:
            milp.at_least(0.0, [happens[j]], [m])
        if earlier.again == event.again and event.at < earlier.until:
            milp.upper[happens[j]] = 0.0  # that was the last one


def _over(events: Sequence[Event]) -> list[set[int]]:
    """For each stage, the ops that have had their last run before an event that is not yet reached."""
    ends = [*(event.at for event in events[1:]), math.inf]
    return [{e.again for e in events[: j + 1] if e.is_rerun and end <= e.until} for j, end in enumerate(ends)]


def use_and_carry(model: StageModel, i: int, j: int, again: Mapping[int, int]) -> None:
    """First use, re-use and carry of the stages ``i`` to ``j`` taken as one. First use implies the rest.

    again  variables of ops: whether they run again in some of these stages
    """
    graph, milp, keep = model.graph, model.milp, model.keep[i]
    is_last = j + 1 == len(model.events)
    until = len(graph.ops) - 1 if is_last else model.events[j + 1].done
    have = {x: [k] if (r := again.get(graph.producer[x])) is None else [k, r] for x, k in keep.items()}
    used = {x for u in range(model.events[i].done + 1, until + 1) for x in graph.ops[u].inputs if x in keep}
    for x in sorted(used):
        milp.at_least(1.0, have[x])
    for v, run in again.items():
        for x in graph.ops[v].inputs:
            if x in keep and x not in used:
                milp.at_least(0.0, have[x], [run])
    if not is_last:
        last = model.events[j + 1].again
        for x, later in model.keep[j + 1].items():
            if x in keep and x not in used:
                milp.at_least(0.0, [*have[x], model.happens[j + 1]] if graph.producer[x] == last else have[x], [later])


@dataclass(frozen=True, slots=True)
class Walk:
    """The sequence of ops that a solution stands for, without the end.

    stages  for each run, the number of the event at which it happens, or which comes next
    """

    runs: list[int]
    stages: list[int]


def walk(model: StageModel, values: Sequence[float]) -> Walk:
    """The sequence of ops that a solution stands for: each lost op again just before it is needed.

    After event j exactly what the solution keeps counts as present. Before an op runs, it re-runs what is missing, inputs first,
    in op order; before an event also what is kept after it. Whether that fits the budget is for ``simulate`` to say.
    """
    graph, producer, events = model.graph, model.graph.producer, model.events
    present = set(graph.resident)
    # What cannot be made again stays, though half a variable (of a relaxation) may say that it does not.
    stays = {x for op in graph.ops if op.effect for x in op.outputs}
    runs: list[int] = []
    stages: list[int] = []

    def run(v: int) -> None:
        runs.append(v)
        stages.append(stage)
        present.update(graph.ops[v].outputs)

    def make(wanted: Iterable[int]) -> None:
        missing: set[int] = set()
        todo = [producer[x] for x in wanted if x not in present]
        while todo:
            v = todo.pop()
            if v not in missing:
                missing.add(v)
                todo.extend(producer[x] for x in graph.ops[v].inputs if x not in present)
        for v in sorted(missing):  # inputs are made by ops before
            run(v)

    stage = 0
    kept, happening = model.kept(values), model.happening(values)
    for i, op in enumerate(graph.ops):
        while stage < len(events) and events[stage].at <= i:
            at = graph.ops[events[stage].op] if happening[stage] else None
            held = {*graph.resident, *kept[stage], *model.tiny, *stays}
            if at is None:
                make(kept[stage])
            else:
                make({*at.inputs, *kept[stage].difference(at.outputs)})
                run(events[stage].op)
                held.update(at.inputs, at.outputs)
            present.intersection_update(held)
            stage += 1
        if not stage or events[stage - 1] != Event(i):
            make(op.inputs)
            run(i)
    return Walk(runs[:-1], stages[:-1])


def _passing(graph: Graph) -> dict[int, int]:
    """Values that need not be kept once their only reader has run for the first time, with that reader.

    It reads nothing else that is not resident, and what it makes takes no more bytes. So wherever a solution keeps the value
    and runs the reader again later, it may as well run the reader when the value is made again, and keep what that makes
    instead: no more bytes between, and the same runs or fewer.
    """
    size = [value.size_bytes for value in graph.values]
    passing = {}
    for x, v in enumerate(graph.producer):
        if v < 0 or len(graph.consumers[x]) != 1:
            continue
        u = graph.consumers[x][0]
        reader = graph.ops[u]
        fed = all(graph.producer[y] in (v, -1) for y in reader.inputs)
        if fed and reader.outputs and not reader.effect and sum(size[y] for y in reader.outputs) <= size[x]:
            passing[x] = u
    return passing


def _needed(graph: Graph, t: int, tiny: frozenset[int]) -> set[int]:
    """Values made by op ``t`` or before that something after it can need, be it through any number of re-runs."""
    producer = graph.producer
    need: set[int] = set()
    todo = [x for i in range(t + 1, len(graph.ops)) for x in graph.ops[i].inputs if 0 <= producer[x] <= t]
    while todo:
        x = todo.pop()
        if x not in need and x not in tiny:
            need.add(x)
            if not graph.ops[producer[x]].effect:
                todo.extend(y for y in graph.ops[producer[x]].inputs if producer[y] >= 0)
    return need


def proved_ns(graph: Graph, bound: float, unit_ns: float, free: float = 0.0) -> int | None:
    """Least time of a schedule by what a model's cost is at least, ``free`` of which is not paid; None for no such bound."""
    if not math.isfinite(bound):
        return None
    grain = _grain(op.time_ns for op in graph.ops)
    # Leave room for the solver's tolerances; then round up, since times of schedules are multiples of the grain.
    extra_ns = (bound - free - 1e-3 - 1e-6 * abs(bound)) * unit_ns
    return graph.keep_all_time_ns + max(0, math.ceil(extra_ns / grain) * grain)


def tiny_values(graph: Graph, room: float) -> frozenset[int]:
    """The smallest values, as many as fit together in ``room`` bytes."""
    tiny = []
    for size, x in sorted((value.size_bytes, x) for x, value in enumerate(graph.values) if x not in graph.resident):
        room -= size
        if room < 0:
            break
        tiny.append(x)
    return frozenset(tiny)


def _grain(numbers: Iterable[int]) -> int:
    """Greatest common divisor, 1 where there is nothing to divide."""
    return max(1, math.gcd(*numbers))


def unit_of(numbers: Iterable[int], total: int) -> float:
    """What to divide ``numbers`` by: their grain where that leaves small integers (good for the solver), else total / SCALE."""
    grain = _grain(numbers)
    return grain if total / grain <= 10 * SCALE else total / SCALE
