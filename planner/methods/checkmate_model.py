"""Checkmate's MILP (Jain et al., MLSys 2020, arXiv 1910.02653), for values, and the way from checkpoints to a schedule.

Stage t is what happens after op t - 1 ran for the first time and up to op t's first run, its last step ("frontier advancing",
eq. 8): every earlier op may run again once in it, in op order. Ops are numbered from 0; prod(x) is the op that makes value x.

    S[t, x] ∈ {0, 1}     value x is held into stage t: a checkpoint                    prod(x) < t
    R[t, i] ∈ {0, 1}     op i runs again in stage t                                    i < t; R[t, t] = 1 needs no variable
    F[t, x, k] ∈ [0, 1]  value x is freed in stage t right after op k                  k reads x, k < t
    U[t, k] ≥ 0          bytes of values in memory in stage t while op k runs, if it does

    minimise   Σ time(i) · R[t, i]                       beyond the keep-all time
    inputs     R[t, prod(x)] + S[t, x] ≥ R[t, k]         (1b)  x an input of k
    held       S[t, x] ≤ R[t-1, prod(x)] + S[t-1, x]     (1c)
    memory     U[t, k] = U[t, k'] - Σ_x bytes(x) · F[t, x, k'] + bytes made by k · R[t, k]    (3, 4)  k' the slot before k
               where before the first slot stands Σ_x bytes(x) · S[t, x]                      (2)
               U[t, k] + workspace(k) · R[t, k] + resident ≤ budget

The hazards say when F may be 1. As published (``form="paper"``), with F binary and h the number of reasons not to free:

    h = 1 - R[t, k] + S[t+1, x] + Σ R[t, j]   over later readers j of x;   κ = the most h can be
    1 - F ≤ h  (7b),    κ · (1 - F) ≥ h  (7c)

Stronger and smaller (``form="strong"``): F continuous, each reason a row of its own, summed where only one F can be 1:

    F[t, x, k] ≤ R[t, k];   Σ_{k < j} F[t, x, k] ≤ 1 - R[t, j];   Σ_k F[t, x, k] ≤ 1 - S[t+1, x]
    Σ_k F[t, x, k] + S[t+1, x] ≤ S[t, x] + R[t, prod(x)]          what leaves was there; contains (1c)
    S[t, x] + R[t, prod(x)] ≤ 1                                   what is made again need not be held

With R and S whole the largest F these allow is the published one, and a larger F only lowers U, so the same checkpoints fit.

Beyond the paper: an op with several outputs runs as a whole, and outputs that nothing needs go right after it (F[t, x, prod(x)]);
workspace; an op with an outside effect runs once; a graph whose outputs are not all made by its last op gets a last op that
reads them.

Reductions (``presolve``), none of which loses an optimum:
    dead columns   S[t, x] and R[t, i] only where something from op t on can need them, be it through re-runs
    early stages   as long as all that can still be needed fits, holding it is best: such stages have no variables
    roomy stages   where all that may be in memory in a stage fits, it has no F and U
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from graphs.ir import Graph
from planner.process.clock import now_s
from planner.schedule import Compute, Schedule, computes, with_frees
from planner.solvers.milp import Milp
from planner.solvers.mip_solvers import satisfies
from planner.stages.model import with_end

Form = Literal["strong", "paper"]
FORMS = ("strong", "paper")

SCALE = 1e6  # times are divided so that the total is about this; solvers work to an absolute 1e-6
UNITS = 10_000_000  # the most units of bytes in a budget; of ten times as many, solvers have cut off optima

COEFFICIENTS = 10_000_000  # of a model at most: some 8 GB with what solvers make of it, and far beyond what any has solved

Held = Sequence[Set[int]]  # for each stage, the values held into it


class Stopped(Exception):
    """The work cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckmateModel:
    """The MILP of one graph and budget.

    graph    with an end, where the original needed one
    count    how many ops the original has
    needed   for each stage, the values that something from it on can need
    first    stages before this one have no variables: all that is needed is held into them
    hold     for each stage, the variable number of each value's S
    rerun    for each stage, that of each op's R, ops ascending
    free     (t, x, k) -> variable number of F
    used     (t, k) -> variable number of U, k < t; room is its most, in units of bytes, which sizes are rounded down to
    unit_ns  nanoseconds per unit of cost
    """

    graph: Graph
    count: int
    milp: Milp
    needed: tuple[frozenset[int], ...]
    first: int
    hold: tuple[dict[int, int], ...]
    rerun: tuple[dict[int, int], ...]
    free: dict[tuple[int, int, int], int]
    used: dict[tuple[int, int], int]
    room: int
    unit_bytes: int
    unit_ns: float

    def bound_ns(self, bound: float) -> int | None:
        """Least time in Checkmate's space, given a proved least cost, rounded so that it stays a bound; None without one."""
        if not math.isfinite(bound):
            return None
        grain = _grain(op.time_ns for op in self.graph.ops)
        # Leave room for the solver's tolerances; then round up, since times of schedules are multiples of the grain.
        extra_ns = (bound - 1e-3 - 1e-6 * abs(bound)) * self.unit_ns
        return self.graph.keep_all_time_ns + max(0, math.ceil(extra_ns / grain) * grain)

    def held(self, values: Sequence[float], chosen: Callable[[float], bool] = lambda s: s > 0.5) -> Held:
        """For each stage, the values held into it by a solution: those of whose S ``chosen`` says so."""
        return [
            need if t < self.first else {x for x, s in hold.items() if chosen(values[s])}
            for t, (need, hold) in enumerate(zip(self.needed, self.hold, strict=True))
        ]


def checkmate_model(
    graph: Graph,
    budget_bytes: int,
    *,
    form: Form = "strong",
    presolve: bool = True,
    recompute_backward: bool = True,
    integer: bool = True,
    deadline: float = math.inf,
) -> CheckmateModel:
    """Build the MILP.

    form                "strong" or "paper", see above
    presolve            leave out what cannot matter; the optimum is the same
    recompute_backward  False: backward ops run once, so what they make is held until its last use
    integer             False: the LP relaxation
    deadline            of ``planner.process.clock.now_s``; raises Stopped when it passes, and where the model gets too large
    """
    count = len(graph.ops)
    if not graph.outputs <= graph.resident | set(graph.ops[-1].outputs):
        graph = with_end(graph)
    may = [not op.effect and (recompute_backward or not op.backward) for op in graph.ops]
    size = [0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)]
    # What is in memory is always a multiple of this, so less than one more is no room.
    grain = _grain((*size, *(op.workspace_bytes for op in graph.ops)))
    room_bytes = (budget_bytes - graph.resident_bytes) // grain * grain
    # Solvers cut off optima, and call feasible models infeasible, where rows on memory have coefficients that are not whole. What
    # is rounded down fits no worse; a solution that exceeds the budget for it is for the caller to see.
    unit_bytes = grain * max(1, -(-room_bytes // (grain * UNITS)))
    units = [x // unit_bytes for x in size]
    unit_ns = _unit((op.time_ns for op in graph.ops), graph.keep_all_time_ns)
    needed = _needed(graph, may, deadline) if presolve else _made_before(graph, deadline)
    first = _first_tight(graph, needed, room_bytes, size) if presolve else 0

    milp = Milp()
    hold: list[dict[int, int]] = []
    rerun: list[dict[int, int]] = []
    for t, need in enumerate(needed):
        out_of_time(deadline)
        stage = sorted(need) if t >= first else []
        makers = sorted({graph.producer[x] for x in stage} if presolve else set(range(t)))
        hold.append({x: milp.binary() if integer else milp.fraction() for x in stage})
        rerun.append({i: _rerun(milp, graph.ops[i].time_ns / unit_ns, integer=integer) for i in makers if may[i]})
    model = CheckmateModel(
        graph, count, milp, needed, first, tuple(hold), tuple(rerun), {}, {}, room_bytes // unit_bytes, unit_bytes, unit_ns
    )
    for t in range(first, len(graph.ops)):
        out_of_time(deadline)
        _inputs(model, t)
        roomy = presolve and _stage_bytes(graph, needed[t], size, rerun[t], t) <= room_bytes
        if roomy or form == "paper":
            _held(model, t)
        if len(milp.entries) > COEFFICIENTS:
            raise Stopped(f"the model is too large: {COEFFICIENTS:,} coefficients by stage {t} of {len(graph.ops)}")
        if not roomy:
            _hazards(model, t, units, strong=form == "strong", integer=integer)
            _memory(model, t, units)
    return model


def out_of_time(deadline: float) -> None:
    """Raise Stopped where the deadline has passed."""
    if now_s() > deadline:
        raise Stopped("time limit")


def _rerun(milp: Milp, cost: float, *, integer: bool) -> int:
    if integer:
        return milp.binary(cost=cost)
    r = milp.fraction()
    milp.cost[r] = cost
    return r


def _inputs(model: CheckmateModel, t: int) -> None:
    """(1b) What an op reads is held or made again; op t itself runs for sure."""
    hold, rerun, milp = model.hold[t], model.rerun[t], model.milp
    for x in model.graph.ops[t].inputs:
        if x in hold:
            milp.at_least(1.0, _there(model, t, x))
    for i, r in rerun.items():
        for x in model.graph.ops[i].inputs:
            if x in hold:
                milp.at_least(0.0, _there(model, t, x), [r])


def _held(model: CheckmateModel, t: int) -> None:
    """(1c) Into stage t + 1 only what was held into stage t or made in it."""
    if t + 1 < len(model.graph.ops):
        for x, later in model.hold[t + 1].items():
            if model.graph.producer[x] < t:
                model.milp.at_least(0.0, _there(model, t, x), [later])


def _there(model: CheckmateModel, t: int, x: int) -> list[int]:
    """S[t, x] and, where it exists, R[t, prod(x)]."""
    again = model.rerun[t].get(model.graph.producer[x])
    return [model.hold[t][x]] if again is None else [model.hold[t][x], again]


def _hazards(model: CheckmateModel, t: int, size: Sequence[int], *, strong: bool, integer: bool) -> None:
    """When value x may be freed in stage t right after op k."""
    graph, hold, rerun, milp = model.graph, model.hold[t], model.rerun[t], model.milp
    after = model.hold[t + 1] if t + 1 < len(graph.ops) else {}
    for x, s in hold.items():
        p = graph.producer[x]
        readers = [k for k in graph.consumers[x] if k in rerun]
        # Made only because another output of its op is needed, x may go right away.
        if p in rerun and sum(y in hold for y in graph.ops[p].outputs) > 1:
            readers.insert(0, p)
        read_last = t in graph.consumers[x]
        frees: list[int] = []
        if size[x] and not (strong and read_last):  # what op t reads stays until it ran, and then nothing runs any more
            for k in readers:
                f = milp.binary() if integer and not strong else milp.fraction()
                model.free[t, x, k] = f
                frees.append(f)
        kept = [after[x]] if x in after else []
        if not strong:
            for at, f in enumerate(frees):
                hazards = [*kept, *(rerun[j] for j in readers[at + 1 :])]
                _published(milp, f, rerun[readers[at]], hazards, sure=int(read_last))
            continue
        for at, f in enumerate(frees):
            r = rerun[readers[at]]
            milp.at_least(0.0, [r], [f])
            if at and readers[at] != p:
                milp.at_least(-1.0, [], [*frees[:at], r])
        if frees:
            milp.at_least(-1.0, [], [*frees, *kept])
        if frees or kept:
            milp.at_least(0.0, _there(model, t, x), [*frees, *kept])
        if p in rerun:
            milp.at_least(-1.0, [], [s, rerun[p]])


def _published(milp: Milp, f: int, run: int, hazards: Sequence[int], *, sure: int) -> None:
    """(7b) and (7c): h = 1 - R[t, k] + Σ hazards + ``sure``, the last being R[t, t] where op t reads the value."""
    most = 1 + len(hazards) + sure
    milp.at_least(-float(sure), [f, *hazards], [run])
    milp.at_most(most - 1.0 - sure, [(f, float(most)), (run, -1.0), *((h, 1.0) for h in hazards)])


def _memory(model: CheckmateModel, t: int, size: Sequence[int]) -> None:
    """(2), (3), (4) and the budget, at every op that may run in stage t; sizes in units."""
    graph, hold, milp = model.graph, model.hold[t], model.milp
    before = [(s, float(size[x])) for x, s in hold.items() if size[x]]
    for k, r in model.rerun[t].items():
        op = graph.ops[k]
        made = float(sum(size[x] for x in op.outputs if x in hold))
        besides = op.workspace_bytes // model.unit_bytes + sum(size[x] for x in op.outputs if x not in hold)  # what nothing needs
        u = milp.number(model.room)
        model.used[t, k] = u
        milp.equal(0.0, [(u, -1.0), *before, (r, made)] if made else [(u, -1.0), *before])
        if besides:
            milp.at_most(model.room, [(u, 1.0), (r, float(besides))])
        before = [(u, 1.0)]
        for x in (*op.inputs, *op.outputs):
            if (f := model.free.get((t, x, k))) is not None:
                before.append((f, -float(size[x])))
    op = graph.ops[t]
    own = op.workspace_bytes // model.unit_bytes + sum(size[x] for x in op.outputs)
    milp.at_most(model.room - own, before)


def walk(model: CheckmateModel, held: Held) -> list[int] | None:
    """The ops in the order they run when exactly ``held`` is held: the least R for these S (Algorithm 2, phase 2).

    In stage t everything is run again that op t reads, or that is held into stage t + 1, and is not there; and so on for what
    that reads. Each such run is forced, so no schedule with these checkpoints takes less. None where what is missing cannot be
    made again.
    """
    graph, producer = model.graph, model.graph.producer
    runs: list[int] = []
    for t, op in enumerate(graph.ops):
        present = held[t]
        want = list(op.inputs)
        if t + 1 < len(graph.ops):
            want.extend(x for x in held[t + 1] if producer[x] < t)
        again: set[int] = set()
        while want:
            x = want.pop()
            p = producer[x]
            if p >= 0 and x not in present and p not in again:
                if graph.ops[p].effect:
                    return None
                again.add(p)
                want.extend(graph.ops[p].inputs)
        runs.extend(sorted(again))
        runs.append(t)
    return [i for i in runs if i < model.count]


def own_runs(model: CheckmateModel, values: Sequence[float]) -> list[int]:
    """The ops in the order a solution's own R run them, needless runs included."""
    runs: list[int] = []
    for t, rerun in enumerate(model.rerun):
        runs.extend(i for i, r in rerun.items() if values[r] > 0.5)
        runs.append(t)
    return [i for i in runs if i < model.count]


def start_values(model: CheckmateModel, schedule: Schedule) -> list[float] | None:
    """A solution of the model that holds what ``schedule`` holds, to start a solver from; None where there is none."""
    held = held_of(model, list(computes(schedule)))
    if held is not None and (runs := walk(model, held)) is not None:
        held = held_of(model, runs)  # without what was held for runs that turned out to be needless
    return None if held is None else values_of(model, held)


def held_of(model: CheckmateModel, runs: Sequence[int]) -> Held | None:
    """What a sequence of ops holds into each stage; None where they do not run for the first time in graph order."""
    graph = model.graph
    held: list[set[int]] = []
    present: set[int] = set()
    begins = True  # a stage begins: op t - 1 has run for the first time
    for step in with_frees(graph, [*runs, *range(model.count, len(graph.ops))]):
        if isinstance(step, Compute):
            if begins:
                held.append(set(present))
            t = len(held) - 1
            if step.op > t:
                return None
            begins = step.op == t
            present.update(graph.ops[step.op].outputs)
        else:
            present.discard(step.value)
    return held[: len(graph.ops)]


def values_of(model: CheckmateModel, held: Held) -> list[float] | None:
    """The solution with these checkpoints and the least R, one number per variable; None where it breaks a row."""
    graph = model.graph
    values = [0.0] * len(model.milp.cost)
    for t in range(model.first, len(graph.ops)):
        for x in held[t]:
            if x in model.hold[t]:
                values[model.hold[t][x]] = 1.0
    runs = walk(model, held)
    if runs is None:
        return None
    t = 0
    for i in [*runs, *range(model.count, len(graph.ops))]:
        if i == t:
            t += 1
        elif i in model.rerun[t]:
            values[model.rerun[t][i]] = 1.0
        elif t >= model.first:
            return None
    # Free each value after its last reader in the stage, where it is not held on.
    for (t, x, k), f in model.free.items():
        held_on = t + 1 < len(graph.ops) and x in held[t + 1]
        if values[model.rerun[t][k]] and not held_on and t not in graph.consumers[x]:
            later = (j for j in graph.consumers[x] if j > k and j in model.rerun[t])
            values[f] = float(not any(values[model.rerun[t][j]] for j in later))
    size = [0 if x in graph.resident else value.size_bytes // model.unit_bytes for x, value in enumerate(graph.values)]
    for t in range(model.first, len(graph.ops)):
        hold = model.hold[t]
        held_bytes = float(sum(size[x] for x in hold if x in held[t]))
        for k, r in model.rerun[t].items():
            if (t, k) not in model.used:
                break
            held_bytes += values[r] * sum(size[x] for x in graph.ops[k].outputs if x in hold)
            values[model.used[t, k]] = held_bytes
            touched = (*graph.ops[k].inputs, *graph.ops[k].outputs)
            held_bytes -= sum(size[x] * values[model.free[t, x, k]] for x in touched if (t, x, k) in model.free)
    return values if satisfies(model.milp, values) else None


def _needed(graph: Graph, may: Sequence[bool], deadline: float) -> tuple[frozenset[int], ...]:
    """For each stage t, the values made before op t that op t or a later one can need, be it through re-runs."""
    producer = graph.producer
    needed: list[frozenset[int]] = []
    need: set[int] = set()
    total = 0
    for t in range(len(graph.ops) - 1, -1, -1):
        # Made by op t itself, a value is not there before it; what its re-runs would read, op t reads too.
        need.difference_update(graph.ops[t].outputs)
        todo = [x for x in graph.ops[t].inputs if producer[x] >= 0]
        while todo:
            x = todo.pop()
            if x not in need:
                need.add(x)
                if may[producer[x]]:
                    todo.extend(y for y in graph.ops[producer[x]].inputs if producer[y] >= 0)
        needed.append(frozenset(need))
        total = _counted(total, need, deadline)
    return tuple(reversed(needed))


def _made_before(graph: Graph, deadline: float) -> tuple[frozenset[int], ...]:
    """For each stage t, all values made before op t."""
    made = [frozenset[int]()]
    total = 0
    for op in graph.ops[:-1]:
        made.append(made[-1] | set(op.outputs))
        total = _counted(total, made[-1], deadline)
    return tuple(made)


def _counted(total: int, values: Set[int], deadline: float) -> int:
    """With one more stage's values: grown with the square of the ops, they alone can take more memory than there is."""
    out_of_time(deadline)
    if total + len(values) > COEFFICIENTS:
        raise Stopped(f"the model is too large: {COEFFICIENTS:,} values that some stage can hold")
    return total + len(values)


def _first_tight(graph: Graph, needed: Sequence[frozenset[int]], room_bytes: int, size: Sequence[int]) -> int:
    """The first stage in which not all that can be needed fits; at most the last one."""
    for t, op in enumerate(graph.ops):
        besides = op.workspace_bytes + sum(size[x] for x in op.outputs)
        if sum(size[x] for x in needed[t]) + besides > room_bytes:
            return t
    return len(graph.ops) - 1


def _stage_bytes(graph: Graph, need: Set[int], size: Sequence[int], reruns: Iterable[int], t: int) -> int:
    """The most that can be in memory in stage t, where nothing held is made again."""
    at_op = (graph.ops[k].workspace_bytes + sum(size[x] for x in graph.ops[k].outputs if x not in need) for k in (*reruns, t))
    return sum(size[x] for x in need) + max(at_op)


def _grain(numbers: Iterable[int]) -> int:
    """Greatest common divisor, 1 where there is nothing to divide."""
    return max(1, math.gcd(*numbers))


def _unit(numbers: Iterable[int], total: int) -> float:
    """What to divide ``numbers`` by: their grain where that leaves small integers (good for solvers), else total / SCALE."""
    grain = _grain(numbers)
    return grain if total / grain <= 10 * SCALE else total / SCALE
