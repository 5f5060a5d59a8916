"""The rematerialization MILP with stages at a few events t_1 < … < t_k, and the way from its solution to a sequence.

Ops are numbered in the order of their first executions. Stage j is what happens after t_j's first execution and up to
t_{j+1}'s (stage k: to the end). ``first use`` below means: by an op that runs for the first time in the stage.

    K[j, x] ∈ {0, 1}   value x is in memory when t_j has just run, its inputs not yet freed
    R[j, v] ∈ {0, 1}   op v ≤ t_j runs again in stage j

    minimise   Σ time(v) · R[j, v]
    memory     Σ_x bytes(x) · K[j, x] + workspace(t_j) + resident ≤ budget      each j
    running    K[j, x] = 1                          inputs and outputs x of t_j
    first use  K[j, x] + R[j, prod(x)] ≥ 1          x made by t_j or before
    re-use     K[j, x] + R[j, prod(x)] ≥ R[j, v]    x an input of v
    carry      K[j, x] + R[j, prod(x)] ≥ K[j+1, x]  x made by t_j or before
    outputs    K[k, x] + R[k, prod(x)] ≥ 1          x an output of the graph

This is Checkmate's MILP (Jain et al., MLSys 2020, eq. 9), for values instead of ops and with most stages left out: every
schedule with this order of first executions satisfies all rows, so the optimum is a lower bound on its extra time, for
any events. An op with an effect has no R. A value that nothing from t_j on can need, not even through re-runs, has no K.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphs.ir import Graph
from planner.milp import Answer, Milp

# Times and bytes are divided so that whole problems are about this size; HiGHS works to an absolute 1e-6.
SCALE = 1e6


@dataclass(frozen=True, slots=True)
class StageModel:
    """The MILP of one set of events. Row and variable counts follow from what can matter in each stage.

    keep, rerun  for each stage, the variable number of each value's K and of each op's R
    unit_ns      nanoseconds per unit of cost
    """

    graph: Graph
    events: tuple[int, ...]
    milp: Milp
    keep: tuple[dict[int, int], ...]
    rerun: tuple[dict[int, int], ...]
    unit_ns: float

    def kept(self, answer: Answer) -> list[frozenset[int]]:
        """For each stage, the values its solution keeps in memory."""
        assert answer.values is not None
        values = answer.values
        return [frozenset(x for x, k in keep.items() if values[k] > 0.5) for keep in self.keep]

    def bound_ns(self, answer: Answer) -> int | None:
        """Proved least time of any schedule with this order, rounded to stay a bound; None where nothing was proved."""
        if not math.isfinite(answer.bound):
            return None
        grain = _grain(op.time_ns for op in self.graph.ops)
        # Leave room for the solver's tolerances; then round up, since times of schedules are multiples of the grain.
        extra_ns = (answer.bound - 1e-3 - 1e-6 * abs(answer.bound)) * self.unit_ns
        return self.graph.keep_all_time_ns + max(0, math.ceil(extra_ns / grain) * grain)


def stage_model(graph: Graph, budget_bytes: int, events: Sequence[int]) -> StageModel:
    """Build the MILP for stages at ``events`` (ascending op numbers)."""
    milp = Milp()
    producer = graph.producer
    size = [value.size_bytes for value in graph.values]
    unit_ns = _unit((op.time_ns for op in graph.ops), graph.keep_all_time_ns)
    unit_bytes = _unit(size, budget_bytes)
    wanted = [x for x in graph.outputs if producer[x] >= 0]
    needed = [_needed(graph, t) for t in events]
    running = [frozenset(x for x in (*graph.ops[t].inputs, *graph.ops[t].outputs) if producer[x] >= 0) for t in events]

    # Variables, with the running rows as lower bounds of K.
    keep = tuple({x: milp.binary(lower=float(x in now)) for x in sorted(need)} for need, now in zip(needed, running, strict=True))
    rerun = tuple(
        {
            v: milp.binary(cost=graph.ops[v].time_ns / unit_ns)
            for v in sorted({producer[x] for x in need})
            if not graph.ops[v].effect
        }
        for need in needed
    )

    for j, t in enumerate(events):

        def held(x: int, j: int = j) -> list[int]:
            again = rerun[j].get(producer[x])
            return [keep[j][x]] if again is None else [keep[j][x], again]

        # Memory. What runs at t_j and is dead afterwards has no variable, but is there.
        fixed = graph.resident_bytes + graph.ops[t].workspace_bytes + sum(size[x] for x in running[j] - needed[j])
        milp.at_most((budget_bytes - fixed) / unit_bytes, [(k, size[x] / unit_bytes) for x, k in keep[j].items() if size[x]])

        # First use and outputs.
        is_last = j + 1 == len(events)
        until = len(graph.ops) - 1 if is_last else events[j + 1]
        used = {x for i in range(t + 1, until + 1) for x in graph.ops[i].inputs if 0 <= producer[x] <= t}
        if is_last:
            used.update(x for x in wanted if producer[x] <= t)
        for x in sorted(used):
            milp.at_least(1.0, held(x))

        # Re-use and carry, where first use does not imply them.
        for v, again in rerun[j].items():
            for x in graph.ops[v].inputs:
                if producer[x] >= 0 and x not in used:
                    milp.at_least(0.0, held(x), [again])
        if not is_last:
            for x, later in keep[j + 1].items():
                if producer[x] <= t and x not in used:
                    milp.at_least(0.0, held(x), [later])
    return StageModel(graph, tuple(events), milp, keep, rerun, unit_ns)


def walk(graph: Graph, events: Sequence[int], kept: Sequence[frozenset[int]]) -> list[int]:
    """The sequence of ops that a solution stands for: each lost op again just before it is needed.

    Entering stage j exactly ``kept[j]`` counts as present. Before an op runs, it re-runs what is missing, inputs first, in op
    order; before event t_{j+1} also what ``kept[j + 1]`` wants. Whether that fits the budget is for ``simulate`` to say.
    """
    producer = graph.producer
    present = set(graph.resident)
    runs: list[int] = []

    def make(values: Sequence[int]) -> None:
        missing: set[int] = set()
        todo = [producer[x] for x in values if x not in present]
        while todo:
            v = todo.pop()
            if v not in missing:
                missing.add(v)
                todo.extend(producer[x] for x in graph.ops[v].inputs if x not in present)
        for v in sorted(missing):
            runs.append(v)
            present.update(graph.ops[v].outputs)

    stage_after = {t: j for j, t in enumerate(events)}
    for i, op in enumerate(graph.ops):
        make(op.inputs)
        j = stage_after.get(i)
        if j is not None:
            make([x for x in sorted(kept[j]) if producer[x] < i])
        runs.append(i)
        if j is not None:
            present = set(graph.resident | kept[j])
            present.update(op.inputs)
        present.update(op.outputs)
    make(sorted(graph.outputs))
    return runs


def _needed(graph: Graph, t: int) -> set[int]:
    """Values made by op ``t`` or before that something after it can need, be it through any number of re-runs."""
    producer = graph.producer
    need: set[int] = set()
    todo = [x for i in range(t + 1, len(graph.ops)) for x in graph.ops[i].inputs if 0 <= producer[x] <= t]
    todo.extend(x for x in graph.outputs if 0 <= producer[x] <= t)
    while todo:
        x = todo.pop()
        if x not in need:
            need.add(x)
            if not graph.ops[producer[x]].effect:
                todo.extend(y for y in graph.ops[producer[x]].inputs if producer[y] >= 0)
    return need


def _grain(numbers: Iterable[int]) -> int:
    """Greatest common divisor, 1 where there is nothing to divide."""
    return max(1, math.gcd(*numbers))


def _unit(numbers: Iterable[int], total: int) -> float:
    """What to divide ``numbers`` by: their grain where that leaves small integers (good for the solver), else total / SCALE."""
    grain = _grain(numbers)
    return grain if total / grain <= 10 * SCALE else total / SCALE
