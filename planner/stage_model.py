"""The rematerialization MILP with stages at a few events t_1 < … < t_k, and the way from its solution to a sequence.

Ops are numbered in the order of their first executions; the last op is an end that reads the graph's outputs
(``with_end``). Stage j is what happens after t_j's first execution and up to t_{j+1}'s (stage k: to the end). ``first
use`` means: by an op that runs for the first time in the stage.

    K[j, x] ∈ {0, 1}   value x is in memory when t_j has just run, its inputs not yet freed
    R[j, v] ∈ {0, 1}   op v ≤ t_j runs again in stage j
    C[j, x] ∈ [0, 1]   value x stays in memory all the stage long
    A[j, v] ∈ {0, 1}   op v runs at least twice in stage j (where a cut says something about it); costs time(v) once more

    minimise   Σ time(v) · R[j, v]
    memory     Σ_x bytes(x) · K[j, x] + workspace(t_j) + resident ≤ budget      each j
    running    K[j, x] = 1                          inputs and outputs x of t_j
    first use  K[j, x] + R[j, prod(x)] ≥ 1          x made by t_j or before
    re-use     K[j, x] + R[j, prod(x)] ≥ R[j, v]    x an input of v
    carry      K[j, x] + R[j, prod(x)] ≥ K[j+1, x]  x made by t_j or before
    cuts       Σ bytes(x) · C[j, x] + peak · Y + resident ≤ budget     over x that ``peak`` does not count, see ``StageCut``
               Y ≥ 1 − the number of facts that do not hold
               C[j, x] ≥ K[j+1, x] − R[j, prod(x)];  C[j, x] ≥ 1 − R[j, prod(x)] where t_{j+1} reads x

This is Checkmate's MILP (Jain et al., MLSys 2020, eq. 9), for values instead of ops, with most stages and memory rows left
out, and with cuts for what happens between events. Every schedule with this order of first executions satisfies all rows, so
the optimum bounds its extra time from below, for any events and cuts. (Checkmate's own rows for memory between two first
executions hold where every op runs again at most once there, in op order.)

Its relaxation needs rows on several stages in a row as well, and so does whoever solves it (``planner.spans``).

What cannot matter has no variable: an op with an effect has no R; a value that nothing after t_j can need, not even through
re-runs, no K. Values that are tiny even all together count as kept for free (the bound stays a bound). Where there are no
cuts, K is 0 for a value that is kept only to make something no larger from it alone: keep that instead (``_passing``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphs.ir import Graph, Op
from planner.milp import Answer, Milp

SCALE = 1e6  # times and bytes are divided so that totals are about this; HiGHS works to an absolute 1e-6
TINY = 1e-5  # share of the budget that all values without variables may take together where the last bit of a bound counts


@dataclass(frozen=True, slots=True)
class StageCut:
    """Facts about the stage that ends with the first execution of op ``w``, and how much memory they take in any order.

    runs    ops that run again in the stage, at least once each
    ends    what they make that is in memory when w has run; what w reads is in any case
    stays   ops that do not run again in the stage, so what they made is there until the last of ``runs`` that reads it
    once    of ``runs``: not twice
    absent  what these make that is not in memory when the stage begins
    peak_bytes  the least peak of ``counted`` values and of workspace, over all orders in which ``runs`` can run for the last time
    counted     their inputs and outputs, but for what stays in memory all the stage long, where the cut was found
    """

    w: int
    runs: tuple[int, ...]
    ends: tuple[int, ...]
    stays: tuple[int, ...]
    once: tuple[int, ...]
    absent: tuple[int, ...]
    peak_bytes: int
    counted: frozenset[int]


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
    twice        and of the A of ops that cuts say something about
    memory       the number of each event's memory row
    spans        from stage to stage, those that have variables (``planner.spans``)
    tiny         values without variables because of their size
    unit_ns      nanoseconds per unit of cost
    """

    graph: Graph
    events: tuple[int, ...]
    milp: Milp
    keep: tuple[dict[int, int], ...]
    rerun: tuple[dict[int, int], ...]
    twice: tuple[dict[int, int], ...]
    memory: list[int]
    spans: set[tuple[int, int]]
    tiny: frozenset[int]
    unit_ns: float

    def kept(self, answer: Answer) -> list[frozenset[int]]:
        """For each stage, the values its solution keeps in memory."""
        assert answer.values is not None
        values = answer.values
        return [frozenset(x for x, k in keep.items() if values[k] > 0.5) for keep in self.keep]

    def bound_ns(self, answer: Answer) -> int | None:
        """Proved least time, rounded so that it stays a bound; None where nothing was proved."""
        if not math.isfinite(answer.bound):
            return None
        grain = _grain(op.time_ns for op in self.graph.ops)
        # Leave room for the solver's tolerances; then round up, since times of schedules are multiples of the grain.
        extra_ns = (answer.bound - 1e-3 - 1e-6 * abs(answer.bound)) * self.unit_ns
        return self.graph.keep_all_time_ns + max(0, math.ceil(extra_ns / grain) * grain)


def stage_model(
    graph: Graph, budget_bytes: int, events: Sequence[int], cuts: Sequence[StageCut] = (), *, tiny_share: float = TINY
) -> StageModel:
    """Build the MILP of a graph with an end, for stages at ``events`` (ascending), and with ``cuts``, each at one of them;
    at the first one, where no stage ends, they say nothing.

    tiny_share  of the budget, what all values without variables may take together
    """
    milp = Milp()
    producer = graph.producer
    size = [value.size_bytes for value in graph.values]
    unit_ns = _unit((op.time_ns for op in graph.ops), graph.keep_all_time_ns)
    unit_bytes = _unit(size, budget_bytes)
    tiny = _tiny(graph, tiny_share * budget_bytes)
    needed = [_needed(graph, t, tiny) for t in events]
    running = [{x for x in (*graph.ops[t].inputs, *graph.ops[t].outputs) if producer[x] >= 0} for t in events]

    # Variables, with the running rows as lower bounds of K.
    passing = {} if cuts else _passing(graph)
    keep = tuple(
        {x: milp.binary(lower=float(x in running[j]), upper=float(passing.get(x, t) >= t)) for x in sorted(needed[j])}
        for j, t in enumerate(events)
    )
    rerun = tuple(
        {v: milp.binary(cost=graph.ops[v].time_ns / unit_ns) for v in makers if not graph.ops[v].effect}
        for makers in (sorted({producer[x] for x in need}) for need in needed)
    )
    twice: tuple[dict[int, int], ...] = tuple({} for _ in events)
    model = StageModel(graph, tuple(events), milp, keep, rerun, twice, [], set(), tiny, unit_ns)

    for j, t in enumerate(events):
        # What runs at t_j and is dead afterwards has no variable, but is there.
        dead = sum(size[x] for x in running[j] - needed[j])
        fixed = graph.resident_bytes + graph.ops[t].workspace_bytes + dead
        model.memory.append(len(milp.row_lower))
        milp.at_most((budget_bytes - fixed) / unit_bytes, [(k, size[x] / unit_bytes) for x, k in keep[j].items()])
        use_and_carry(model, j, j, rerun[j])
    for w in sorted({cut.w for cut in cuts if cut.w != events[0]}):
        _cut(model, w, [cut for cut in cuts if cut.w == w], budget_bytes, unit_bytes)
    return model


def use_and_carry(model: StageModel, i: int, j: int, again: Mapping[int, int]) -> None:
    """First use, re-use and carry of the stages ``i`` to ``j`` taken as one. First use implies the rest.

    again  variables of ops: whether they run again in some of these stages
    """
    graph, milp, keep = model.graph, model.milp, model.keep[i]
    is_last = j + 1 == len(model.events)
    until = len(graph.ops) - 1 if is_last else model.events[j + 1]
    have = {x: [k] if (r := again.get(graph.producer[x])) is None else [k, r] for x, k in keep.items()}
    used = {x for u in range(model.events[i] + 1, until + 1) for x in graph.ops[u].inputs if x in keep}
    for x in sorted(used):
        milp.at_least(1.0, have[x])
    for v, run in again.items():
        for x in graph.ops[v].inputs:
            if x in keep and x not in used:
                milp.at_least(0.0, have[x], [run])
    if not is_last:
        for x, later in model.keep[j + 1].items():
            if x in keep and x not in used:
                milp.at_least(0.0, have[x], [later])


def _cut(model: StageModel, w: int, cuts: Sequence[StageCut], budget_bytes: int, unit_bytes: float) -> None:
    """The cuts for the stage that ends with the first execution of ``w``."""
    graph, milp = model.graph, model.milp
    j = model.events.index(w) - 1
    keep, rerun, after = model.keep[j], model.rerun[j], model.keep[j + 1]
    reads = set(graph.ops[w].inputs)
    stays = {}  # C; where x is neither kept nor read at the end, it would be 0
    for x in keep:
        if x in after or x in reads:
            stays[x] = milp.fraction()
            remade = [rerun[graph.producer[x]]] if graph.producer[x] in rerun else []
            milp.at_least(float(x in reads), [stays[x], *remade], [] if x in reads else [after[x]])
    twice = model.twice[j]
    for v in sorted({v for cut in cuts for v in cut.once}):
        twice[v] = milp.binary(cost=graph.ops[v].time_ns / model.unit_ns)
    for cut in cuts:
        if not set(cut.runs).issubset(rerun):
            continue
        hold = [*(rerun[v] for v in cut.runs), *(after[x] for x in cut.ends if x not in reads)]
        fail = [
            *(rerun[v] for v in cut.stays if v in rerun),
            *(twice[v] for v in cut.once),
            *(keep[x] for x in cut.absent if x in keep),
        ]
        all_hold = hold[0]
        if len(hold) + len(fail) > 1:
            all_hold = milp.fraction()
            milp.at_least(1.0 - len(hold), [all_hold, *fail], hold)
        terms = [(c, graph.values[x].size_bytes / unit_bytes) for x, c in stays.items() if x not in cut.counted]
        milp.at_most((budget_bytes - graph.resident_bytes) / unit_bytes, [(all_hold, cut.peak_bytes / unit_bytes), *terms])


def walk(model: StageModel, kept: Sequence[frozenset[int]], orders: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """The sequence of ops that a solution stands for: each lost op again just before it is needed. Without the end.

    Entering stage j exactly ``kept[j]`` counts as present. Before an op runs, it re-runs what is missing, inputs first, in op
    order; before event t_{j+1} also what ``kept[j + 1]`` wants. Whether that fits the budget is for ``simulate`` to say.

    orders  before which ops to run which re-runs in another order, as far as their inputs allow
    """
    graph, producer = model.graph, model.graph.producer
    present = set(graph.resident)
    # What cannot be made again stays, though half a variable (of a relaxation) may say that it does not.
    stays = {x for op in graph.ops if op.effect for x in op.outputs}
    runs: list[int] = []

    def make(values: Iterable[int], first: Sequence[int] = ()) -> None:
        missing: set[int] = set()
        todo = [producer[x] for x in values if x not in present]
        while todo:
            v = todo.pop()
            if v not in missing:
                missing.add(v)
                todo.extend(producer[x] for x in graph.ops[v].inputs if x not in present)
        todo = [*sorted(missing.difference(first), reverse=True), *(v for v in reversed(first) if v in missing)]
        while todo:
            v = todo.pop()
            if v in missing:
                before = [producer[x] for x in graph.ops[v].inputs if producer[x] in missing]
                if before:
                    todo += [v, *sorted(before, reverse=True)]
                    continue
                missing.discard(v)
                runs.append(v)
                present.update(graph.ops[v].outputs)

    stage_after = {t: j for j, t in enumerate(model.events)}
    for i, op in enumerate(graph.ops):
        j = stage_after.get(i)
        first = () if orders is None else orders.get(i, ())
        make(op.inputs if j is None else {*op.inputs, *(x for x in kept[j] if producer[x] < i)}, first)
        runs.append(i)
        if j is not None:
            present.intersection_update({*graph.resident, *kept[j], *model.tiny, *op.inputs, *stays})
        present.update(op.outputs)
    return runs[:-1]


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
        fed = all(y in graph.ops[v].outputs or graph.producer[y] < 0 for y in reader.inputs)
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


def _tiny(graph: Graph, room: float) -> frozenset[int]:
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


def _unit(numbers: Iterable[int], total: int) -> float:
    """What to divide ``numbers`` by: their grain where that leaves small integers (good for the solver), else total / SCALE."""
    grain = _grain(numbers)
    return grain if total / grain <= 10 * SCALE else total / SCALE
