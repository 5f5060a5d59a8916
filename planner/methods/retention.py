"""The retention-interval model of Moccasin as a constraint program, and the way between sequences and its solutions.

Source: Bartan, Li, Teague, Lott, Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023), the
variant that keeps the input order of first executions; here for graphs whose ops make several values and need workspace.

Ops are numbered in the order of their first executions, 0 ... n - 1; the last one is an end that reads the graph's outputs
(``with_end``). Stage s is what happens after the first execution of op s - 1 and up to that of op s: there any op k < s runs
again at most once, in op order. So a run is a pair (k, s) with k <= s, the first execution is (k, k), and runs are ordered by

    time(k, s) = n s + k                "affine" numbering: a re-run starts at the affine expression n Q + k of its stage Q
    time(k, s) = s (s + 1) / 2 + k      "triangular" numbering, the authors': re-runs start in a set of times with holes

    A[v, i]     ∈ {0, 1}   op v runs an i-th time (A[v, 0] = 1), i < copies of v
    S[v, i]                when; S[v, 0] = time(v, v)
    E[x, i]                end of the i-th retention interval [S[v, i], E[x, i]) of value x, made by v
    X[x, w, i, j] ∈ {0, 1} the j-th run of w reads the i-th copy of x

    minimise   Σ time(v) · A[v, i]          (or, first, the footprint above the budget)
    order      A[v, i] → A[v, i - 1];  A[v, i] → E[x, i - 1] ≤ S[v, i]
    coverage   A[w, j] → ∨_i X[x, w, i, j];  X → A[v, i];  X → S[v, i] + 1 ≤ S[w, j];  X → S[w, j] + 1 ≤ E[x, i]
               or, as the authors have it, a reservoir for each x and run j of w: the copies alive, less one while w runs
    memory     cumulative: bytes(x) over [S[v, i], E[x, i]), workspace and unread outputs of v over [S[v, i], S[v, i] + 1);
               capacity: the footprint

What cannot matter has no variable: a re-run in a stage after the last op that depends on it; a second run of an op with an
effect, or of one whose outputs nobody reads or have no bytes; a value of no bytes (kept for free).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ortools.sat.python import cp_model

from graphs.ir import Graph
from planner.process.clock import now_s
from planner.schedule import with_frees
from planner.simulate import simulate

Numbering = Literal["affine", "triangular"]
Coverage = Literal["clauses", "reservoirs"]
Lengths = Literal["any", "logarithmic"]

LARGEST = 2**60  # bytes (in units) times event times must stay below this for CP-SAT's 64-bit integers
EXACT = 2**50  # objectives, footprint or time (in units), must stay below this for its doubles
LENGTHS_PER_OP = 5  # logarithmically spaced interval lengths in the authors' encoding, for each op


def last_stages(graph: Graph) -> list[int]:
    """For each op, the last stage in which running it again can serve anything; the op's own number where none can."""
    last = list(range(len(graph.ops)))
    for v in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[v]
        if op.effect or not any(graph.values[x].size_bytes for x in op.outputs):
            continue
        for x in op.outputs:
            for w in graph.consumers[x]:
                last[v] = max(last[v], last[w])
    return last


def staged(graph: Graph, ops: Sequence[int]) -> list[list[int]] | None:
    """For each op the stages it runs in, its own first, when ``ops`` is put in stages; None where its first executions are in
    another order than the graph's.

    Within a stage re-runs are sorted and run once, and those that serve nothing are left out, so memory may change.
    """
    stages: list[set[int]] = [set() for _ in graph.ops]
    done = 0
    for v in ops:
        if v == done:
            done += 1
        elif v > done:
            return None
        else:
            stages[done].add(v)
    runs: list[list[int]] = [[] for _ in graph.ops]
    needed: set[int] = set()
    for s in range(len(graph.ops) - 1, -1, -1):
        for v in (s, *sorted(stages[s], reverse=True)):
            op = graph.ops[v]
            if v == s or not needed.isdisjoint(op.outputs):
                runs[v].append(s)
                needed.difference_update(op.outputs)
                needed.update(op.inputs)
    return [found[::-1] for found in runs]


def sequence(runs: Sequence[Sequence[int]]) -> list[int]:
    """The ops in the order they run; inverse of ``staged``."""
    return [v for _, v in sorted((s, v) for v, stages in enumerate(runs) for s in stages)]


@dataclass(slots=True)
class _Run:
    """The i-th run of an op: whether, in which stage, when, and until when each of its outputs is kept."""

    present: cp_model.IntVar | None  # None: always
    stage: cp_model.IntVar | None  # the variable of its stage (affine) or of its time (triangular); None: first execution
    start: cp_model.LinearExpr | int
    ends: dict[int, cp_model.IntVar]
    lengths: dict[int, cp_model.IntVar]


class RetentionModel:
    """The constraint program of a graph with an end, for a budget.

    copies    for each op, how many times it may run
    complete  the limit on copies excludes nothing: the space is all of Checkmate's
    exact     a schedule of that space fits the budget just where the model says so; not where byte counts were rounded (up),
              or interval lengths are "logarithmic"
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        *,
        copies: int | None = 2,
        numbering: Numbering = "affine",
        coverage: Coverage = "clauses",
        lengths: Lengths = "any",
        deadline: float = math.inf,
    ) -> None:
        """Raises TimeoutError where the model is not built by ``deadline`` (of ``planner.process.clock.now_s``)."""
        self.graph = graph
        self.model = cp_model.CpModel()
        self._deadline = deadline
        self._numbering, self._logarithmic = numbering, lengths == "logarithmic"
        n = len(graph.ops)
        self._last = last_stages(graph)
        full = [last - v + 1 for v, last in enumerate(self._last)]
        self.copies = full if copies is None else [min(copies, most) for most in full]
        self.complete = self.copies == full
        self._first_time = [self._time(v, v) for v in range(n)]
        self._horizon = self._time(n - 1, n - 1) + 1
        if self._logarithmic:
            self._horizon += self._horizon // 10
        self._scale(budget_bytes)
        self._length_domain = self._lengths() if self._logarithmic else cp_model.Domain(1, self._horizon)

        self.runs = [self._runs(v) for v in range(n)]
        self._reads: dict[tuple[int, int, int, int], cp_model.IntVar] = {}
        for x in self._kept:
            for w in graph.consumers[x]:
                for j in range(len(self.runs[w])):
                    self._cover(x, w, j, reservoir=coverage == "reservoirs")
            self._check_time()
        self._memory()
        weights = [(run.present, op.time_ns // self.unit_ns) for v, op in enumerate(graph.ops) for run in self.runs[v]]
        base = sum(op.time_ns // self.unit_ns for op in graph.ops)
        self._base = base
        self._cost = base + cp_model.LinearExpr.weighted_sum(
            [p for p, _ in weights if p is not None], [c for p, c in weights if p is not None]
        )
        #: the variables a solution is read from, in the order ``read`` expects
        self.watch: list[cp_model.IntVar] = [
            y for runs in self.runs for run in runs for y in (run.present, run.stage) if y is not None
        ]

    def _time(self, k: int, s: int) -> int:
        return len(self.graph.ops) * s + k if self._numbering == "affine" else s * (s + 1) // 2 + k

    def _check_time(self) -> None:
        if now_s() > self._deadline:
            raise TimeoutError("out of time while building the model")

    def _scale(self, budget_bytes: int) -> None:
        """Bytes and times in units: exact wherever the numbers then fit, else bytes rounded up (a schedule that fits in
        units fits) and times rounded down (a bound in units is a bound)."""
        graph = self.graph
        held = [0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)]
        spaces = [op.workspace_bytes for op in graph.ops]
        most = sum(self.copies[v] * (spaces[v] + sum(held[x] for x in op.outputs)) for v, op in enumerate(graph.ops))
        grain = max(1, math.gcd(*held, *spaces))
        self.unit_bytes = max(grain, -(-most * self._horizon // LARGEST), -(-most // EXACT))
        self.exact = self.unit_bytes == grain and not self._logarithmic
        self.size = [-(-size // self.unit_bytes) for size in held]
        self.workspace = [-(-space // self.unit_bytes) for space in spaces]
        self.capacity = (budget_bytes - graph.resident_bytes) // self.unit_bytes
        self._kept = [x for x, size in enumerate(self.size) if size and graph.consumers[x]]
        total = sum(self.copies[v] * op.time_ns for v, op in enumerate(graph.ops))
        self.unit_ns = max(1, math.gcd(*(op.time_ns for op in graph.ops)), -(-total // EXACT))

    def _lengths(self) -> cp_model.Domain:
        """About 5 n logarithmically spaced lengths from 1 to the horizon, as the authors have them."""
        count = LENGTHS_PER_OP * len(self.graph.ops)
        power = math.log(self._horizon) / max(1, count - 1)
        return cp_model.Domain.FromValues(sorted({round(math.exp(power * at)) for at in range(count)} | {1, self._horizon}))

    def _runs(self, v: int) -> list[_Run]:
        """Variables of all runs of op ``v``, and the order among them."""
        self._check_time()
        model, op = self.model, self.graph.ops[v]
        outputs = [x for x in op.outputs if self.size[x] and self.graph.consumers[x]]
        start = self._first_time[v]
        first = _Run(None, None, start, {}, {})
        for x in outputs:
            ends = cp_model.Domain.FromFlatIntervals([start + length for length in self._length_domain.flattened_intervals()])
            ends = ends.intersection_with(cp_model.Domain(start + 1, self._until(x)))
            first.ends[x] = model.new_int_var_from_domain(ends, f"end_{x}_0")
        runs = [first]
        for i in range(1, self.copies[v]):
            present = model.new_bool_var(f"present_{v}_{i}")
            again = self._rerun(v, i, present, outputs)
            if i > 1:
                model.add_implication(present, _literal(runs[-1].present))
            for x in outputs:
                model.add(runs[-1].ends[x] <= again.start).only_enforce_if(present)
            runs.append(again)
        return runs

    def _until(self, x: int) -> int:
        """Nothing reads ``x`` after the last run of any reader (every copy is there while its maker runs, though); the authors'
        lengths may end later than needed."""
        if self._logarithmic:
            return self._horizon
        ops = (self.graph.producer[x], *self.graph.consumers[x])
        return max(self._time(w, self._last[w]) for w in ops) + 1

    def _rerun(self, v: int, i: int, present: cp_model.IntVar, outputs: Sequence[int]) -> _Run:
        model, last = self.model, self._last[v]
        start: cp_model.LinearExpr
        if self._numbering == "affine":
            stage = model.new_int_var(v + 1, last, f"stage_{v}_{i}")
            start = len(self.graph.ops) * stage + v
        else:
            times = cp_model.Domain.FromValues([self._time(v, s) for s in range(v + 1, last + 1)])
            start = stage = model.new_int_var_from_domain(times, f"start_{v}_{i}")
        run = _Run(present, stage, start, {}, {})
        for x in outputs:
            run.ends[x] = model.new_int_var(1, self._until(x), f"end_{x}_{i}")
            run.lengths[x] = model.new_int_var_from_domain(self._length_domain, f"length_{x}_{i}")
        return run

    def _cover(self, x: int, w: int, j: int, *, reservoir: bool) -> None:
        """The j-th run of ``w``, where there is one, reads some copy of ``x``."""
        model, use = self.model, self.runs[w][j]
        makes = self.runs[self.graph.producer[x]]
        if reservoir:
            times: list[cp_model.LinearExprT] = [use.start, use.start + 1]
            changes = [-1, 1]
            actives: list[cp_model.LiteralT] = [_literal(use.present)] * 2
            for make in makes:
                times += [make.start + 1, make.ends[x]]
                changes += [1, -1]
                actives += [_literal(make.present)] * 2
            model.add_reservoir_constraint_with_active(times, changes, actives, 0, len(makes) + 1)
            return
        choices: list[cp_model.LiteralT] = []
        for i, make in enumerate(makes):
            reads = model.new_bool_var(f"reads_{x}_{w}_{i}_{j}")
            self._reads[x, w, i, j] = reads
            if make.present is not None:
                model.add_implication(reads, make.present)
                model.add(make.start + 1 <= use.start).only_enforce_if(reads)
            model.add(use.start + 1 <= make.ends[x]).only_enforce_if(reads)
            choices.append(reads)
        if use.present is not None:
            choices.append(~use.present)
        model.add_bool_or(choices)

    def _memory(self) -> None:
        """One cumulative constraint over all intervals; its capacity is the footprint, at most that of keeping all."""
        model, graph = self.model, self.graph
        intervals: list[cp_model.IntervalVar] = []
        demands: list[int] = []
        for v, op in enumerate(graph.ops):
            unread = self.workspace[v] + sum(self.size[x] for x in op.outputs if not graph.consumers[x])
            for i, run in enumerate(self.runs[v]):
                if unread:
                    name = f"inside_{v}_{i}"
                    if run.present is None:
                        intervals.append(model.new_fixed_size_interval_var(run.start, 1, name))
                    else:
                        intervals.append(model.new_optional_fixed_size_interval_var(run.start, 1, run.present, name))
                    demands.append(unread)
                for x, end in run.ends.items():
                    name = f"kept_{x}_{i}"
                    if run.present is None:
                        intervals.append(model.new_interval_var(run.start, end - run.start, end, name))
                    else:
                        intervals.append(model.new_optional_interval_var(run.start, run.lengths[x], end, run.present, name))
                    demands.append(self.size[x])
        most = max(self.capacity, self._footprint_units([[v] for v in range(len(graph.ops))]))
        if self._logarithmic:
            most = max(most, sum(demands))  # late ends: keeping all may take more than it does
        self._footprint = model.new_int_var(0, most, "footprint")
        self._above = model.new_int_var(self.capacity, most, "footprint_or_capacity")
        model.add_cumulative(intervals, demands, self._footprint)
        model.add(self._above >= self._footprint)

    def aim_at_peak(self) -> None:
        """Phase 1: minimise max(footprint, budget), in units."""
        self.model.minimize(self._above)

    def aim_at_time(self) -> None:
        """Phase 2: within the budget, minimise the time."""
        self.model.add(self._footprint <= self.capacity)
        self.model.minimize(self._cost)

    def bound_ns(self, cost: int) -> int:
        """Nanoseconds that every schedule of the space takes at least, from a bound on phase 2's objective."""
        return self.graph.keep_all_time_ns + max(0, cost - self._base) * self.unit_ns

    def bytes_of(self, footprint: int) -> int:
        """Peak that goes with a footprint, in bytes."""
        return self.graph.resident_bytes + footprint * self.unit_bytes

    def outside_ns(self) -> int | None:
        """What a schedule of Checkmate's space outside of the limit on copies takes at least; None where there is none.

        In such a schedule some op runs once more than it may here.
        """
        full = [last - v + 1 for v, last in enumerate(self._last)]
        extra = [c * op.time_ns for c, f, op in zip(self.copies, full, self.graph.ops, strict=True) if c < f]
        return self.graph.keep_all_time_ns + min(extra) if extra else None

    def read(self, values: Sequence[int]) -> list[list[int]]:
        """For each op the stages it runs in, from the values of ``watch``; runs that serve nothing are left out."""
        runs: list[list[int]] = []
        at = 0
        for v, own in enumerate(self.runs):
            stages = [v]
            for _ in own[1:]:
                present, place = values[at], values[at + 1]
                at += 2
                if present:
                    stages.append(place if self._numbering == "affine" else _triangular_stage(place - v))
            runs.append(stages)
        found = staged(self.graph, sequence(runs))
        assert found is not None
        return found

    def hint(self, runs: Sequence[Sequence[int]]) -> bool:
        """Hint every variable from the stages each op runs in; False (and no hint) where an op runs too often for that."""
        if any(len(stages) > most for stages, most in zip(runs, self.copies, strict=True)):
            return False
        model, graph = self.model, self.graph
        model.clear_hints()  # type: ignore[no-untyped-call]
        when = [[self._time(v, s) for s in stages] for v, stages in enumerate(runs)]
        end = {x: [at + 1 for at in when[graph.producer[x]]] for x in self._kept}
        served: dict[tuple[int, int, int], int] = {}
        for w, stages in enumerate(when):
            for x in graph.ops[w].inputs:
                if x in end:
                    makes = when[graph.producer[x]]
                    for j, at in enumerate(stages):
                        i = max(i for i, made in enumerate(makes) if made < at)
                        end[x][i] = max(end[x][i], at + 1)
                        served[x, w, j] = i
        for v, own in enumerate(self.runs):
            for i, run in enumerate(own):
                used = i < len(runs[v])
                if run.present is not None and run.stage is not None:
                    stage = runs[v][i] if used else v + 1
                    start = self._time(v, stage)
                    model.add_hint(run.present, used)
                    model.add_hint(run.stage, stage if self._numbering == "affine" else start)
                else:
                    start = self._first_time[v]
                for x, variable in run.ends.items():
                    length = self._allowed(end[x][i] - start) if used else 1
                    model.add_hint(variable, start + length)
                    if x in run.lengths:
                        model.add_hint(run.lengths[x], length)
        for (x, w, i, j), reads in self._reads.items():
            model.add_hint(reads, j < len(runs[w]) and served[x, w, j] == i)
        footprint = self._footprint_units(runs)
        model.add_hint(self._footprint, footprint)
        model.add_hint(self._above, max(footprint, self.capacity))
        return True

    def _allowed(self, length: int) -> int:
        """The least length of the domain that is long enough."""
        if not self._logarithmic:
            return length
        bounds = self._length_domain.flattened_intervals()
        return next(int(max(low, length)) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if length <= high)

    def _footprint_units(self, runs: Sequence[Sequence[int]]) -> int:
        """Peak of a sequence in units, without resident values."""
        graph = self.graph
        ops = (replace(op, workspace_bytes=w) for op, w in zip(graph.ops, self.workspace, strict=True))
        values = (replace(value, size_bytes=size) for value, size in zip(graph.values, self.size, strict=True))
        scaled = replace(graph, ops=tuple(ops), values=tuple(values))
        return simulate(scaled, with_frees(scaled, sequence(runs))).peak_bytes


def _literal(present: cp_model.IntVar | None) -> cp_model.LiteralT:
    return True if present is None else present


def _triangular_stage(first: int) -> int:
    """s of s (s + 1) / 2."""
    return (math.isqrt(8 * first + 1) - 1) // 2
