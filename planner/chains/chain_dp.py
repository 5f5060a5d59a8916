"""Rotor's dynamic program over a chain of stages, with any number of ways to run each stage.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal re-materialization strategies for heterogeneous chains" (TOMS
2024); several ways a stage as in Rockmate (Zhao et al., ICML 2023). Stages 0 … n-1; the last one holds the loss.

    x_i     bytes that stage i reads from stage i-1
    C(m,i,j)  least time to run the stages i … j forward and backward, given x_i and everything that the backward passes
            after j leave for earlier ones (live_j), with m bytes to spend on all else and on live_j

    (a) run the stages i … k-1 forward and keep only x_i and x_k:   Σ f + C(m − x_k, k, j) + C(m, i, k−1)
    (b) run stage i in way o, which saves s bytes for its backward:   f_o + C(m − s, i+1, j) + b_o
    (c) i = j: run the stage forward and backward in way o

Two things are finer than published. What is counted comes from the ops themselves, op by op, and the x_i are counted no longer
than they are needed: a *pinned* x_i is held outside of m until the stages are done, a *loose* one is inside of m and goes when
stage i has read it last. And the runs before the loss, the first ones (j = n−1), make everything; later ones make only what
somebody needs.

The least time is that of all *persistent* schedules of these ways: what is kept stays until its own backward pass.
Bytes are counted in units, rounded up, so a schedule never needs more than the DP says.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.chains.chain import Chain, Stage, forward_count, held_throughout, left_for
from planner.process.clock import now_s
from planner.schedule import Schedule, keep_all, with_frees
from planner.simulate import simulate

SLOTS = 500  # memory units of a budget, as published

EXACT = 2**53  # ns; the tables' doubles hold longer times but roughly

LARGEST = 60_000_000  # entries of a table, 8 bytes each


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stage: its ops before and after the later stages run."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Running a stage forward, keeping its input (pinned) or not (loose; the input is counted), and nothing else."""

    ops: tuple[int, ...]
    time_ns: int
    pinned_bytes: int
    loose_bytes: int
    possible: bool  # whether these ops may run: no op with an outside effect runs again


@dataclass(frozen=True, slots=True)
class _Saved:
    """A way with the later stages in between, or (``both``) with nothing in between. All peaks without ``live``."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    time_ns: int
    reads_input: bool  # after the later stages have run
    saves_output: bool
    saved_bytes: int  # without the stage's input, and without its output where that is not needed
    pinned_bytes: tuple[int, int]  # peak forward (without live_j), peak backward (with live_i)
    loose_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Alone:
    """A way with nothing between forward and backward. Peaks include what is live."""

    ops: tuple[int, ...]
    time_ns: int
    pinned_bytes: int
    loose_bytes: int


@dataclass(frozen=True, slots=True)
class _Link:
    """All that the DP asks about a stage; index 0: first runs, 1: later ones."""

    input_bytes: int
    live_bytes: int
    plain: tuple[_Plain, _Plain]
    saved: tuple[tuple[_Saved, ...], tuple[_Saved, ...]]
    alone: tuple[_Alone, ...]

    def varied(self, factor: Callable[[], float]) -> _Link:
        """With each way's time, and that of running forward, times a factor of its own."""
        forward = factor()
        first, later = (replace(plain, time_ns=round(forward * plain.time_ns)) for plain in self.plain)
        saved, again = (tuple(replace(way, time_ns=round(factor() * way.time_ns)) for way in ways) for ways in self.saved)
        alone = tuple(replace(way, time_ns=round(factor() * way.time_ns)) for way in self.alone)
        return replace(self, plain=(first, later), saved=(saved, again), alone=alone)


class ChainProgram:
    """The dynamic program of one chain with the ways to run each of its stages."""

    def __init__(self, chain: Chain, ways: Sequence[Sequence[Way]]) -> None:
        graph = chain.graph
        self.graph = graph
        always = held_throughout(chain)
        self.fixed_bytes = graph.resident_bytes + sum(graph.values[v].size_bytes for v in always)
        self._free = always | graph.resident
        self._size = [0 if v in self._free else value.size_bytes for v, value in enumerate(graph.values)]
        self._forward_count = forward_count(graph)
        live = left_for(chain)
        self._links = [
            self._link(stage, after, ways[at], live[at], live[at - 1] if at else live[-1], at == len(chain.stages) - 1)
            for at, (stage, after) in enumerate(
                zip(chain.stages, [*(s.inputs for s in chain.stages[1:]), frozenset[int]()], strict=True)
            )
        ]

    def __len__(self) -> int:
        return len(self._links)

    @property
    def grain_bytes(self) -> int:
        """Greatest common divisor of everything the DP takes from memory: units of this size round nothing."""
        parts = [link.input_bytes for link in self._links]
        parts += [way.saved_bytes for link in self._links for ways in link.saved for way in ways]
        return max(1, math.gcd(*parts))

    def tables(self, room_bytes: int, unit_bytes: int, *, more: int = 0, deadline: float = math.inf) -> Tables:
        """Solve for the budget ``fixed_bytes + room_bytes``, and all that are some units less or up to ``more`` units more.

        Raises TimeoutError where that is not done by ``deadline`` (of ``planner.process.clock.now_s``).
        """
        return Tables(self._links, room_bytes // unit_bytes + more, unit_bytes, room_bytes % unit_bytes, deadline)

    def varied(self, share: float, seed: int) -> ChainProgram:
        """The program with times that are up to this share longer, by chance: of schedules that take about as long, its tables
        have others. Their times are then not to be trusted."""
        draw = random.Random(seed)
        other = copy.copy(self)
        other._links = [link.varied(lambda: 1 + share * draw.random()) for link in self._links]
        return other

    def shorter_and_shorter(
        self, budget_bytes: int, most_bytes: int, less_ns: float, *, slots: int = SLOTS, deadline: float = math.inf
    ) -> Iterator[list[int]]:
        """Sequences of the least time for a budget, and for larger ones up to another, each by at least so much shorter than the
        one before.

        Raises TimeoutError where the tables are not done by ``deadline``.
        """
        room_bytes = most_bytes - self.fixed_bytes
        unit_bytes = max(1, -(-room_bytes // min(slots, _most_slots(len(self)))))
        tables = self.tables(room_bytes, unit_bytes, deadline=deadline)
        last_ns = math.inf
        for units in reversed(tables.steps()):
            time_ns = tables.time_ns(units)
            assert time_ns is not None, "a step of the tables without a schedule"
            if self.fixed_bytes + units * unit_bytes >= budget_bytes and time_ns <= last_ns - less_ns:
                last_ns = time_ns
                yield tables.ops(units)

    def _link(
        self,
        stage: Stage,
        output: frozenset[int],
        ways: Sequence[Way],
        live: frozenset[int],
        later: frozenset[int],
        last: bool,
    ) -> _Link:
        size = self._size
        live_bytes = sum(size[v] for v in live)
        again = self._needed(stage.forward, output)
        plain = [
            _Plain(
                ops,
                self._time(ops),
                self._peak(ops, stage.inputs, output, stage.inputs),
                self._peak(ops, stage.inputs, output),
                first or not self._effect(ops),
            )
            for first, ops in ((True, stage.forward), (False, again))
        ]
        saved: list[list[_Saved]] = [[], []]
        alone: list[_Alone] = []
        for way in ways:
            wanted = self._wanted(way.backward, later)
            both = (*way.forward, *way.backward)
            if not last:
                both = self._needed(both, later)
            if last or not self._effect(both):
                alone.append(
                    _Alone(
                        both,
                        self._time(both),
                        self._peak(both, stage.inputs | live, later, stage.inputs),
                        self._peak(both, stage.inputs | live, later),
                    )
                )
            for later_run in (0, 1):
                forward = way.forward if not later_run else self._needed(way.forward, wanted | output)
                if later_run and self._effect(forward):
                    continue
                made = {v for i in forward for v in self.graph.ops[i].outputs}
                kept = frozenset(v for v in wanted if v in made)
                reads_input = bool(wanted & stage.inputs)
                saves_output = bool(kept & output)
                if saves_output:
                    kept |= output
                held = kept | output | (stage.inputs if reads_input else frozenset())
                start = live | kept | (stage.inputs if reads_input else frozenset())
                saved[later_run].append(
                    _Saved(
                        forward,
                        way.backward,
                        self._time(forward) + self._time(way.backward),
                        reads_input,
                        saves_output,
                        sum(size[v] for v in kept),
                        (
                            self._peak(forward, stage.inputs, held, stage.inputs),
                            self._peak(way.backward, start, later, stage.inputs),
                        ),
                        (self._peak(forward, stage.inputs, held), self._peak(way.backward, start, later)),
                    )
                )
        return _Link(
            sum(size[v] for v in stage.inputs),
            live_bytes,
            (plain[0], plain[1]),
            (tuple(saved[0]), tuple(saved[1])),
            tuple(alone),
        )

    def _effect(self, ops: Iterable[int]) -> bool:
        """Whether forward ops among these have an outside effect, so that they may not run again."""
        return any(self.graph.ops[i].effect and i < self._forward_count for i in ops)

    def _time(self, ops: Iterable[int]) -> int:
        return sum(self.graph.ops[i].time_ns for i in ops)

    def _wanted(self, ops: Sequence[int], end: Collection[int]) -> frozenset[int]:
        """What has to be there for these ops to run and ``end`` to be there after."""
        wanted = set(end)
        for i in reversed(ops):
            wanted.difference_update(self.graph.ops[i].outputs)
            wanted.update(self.graph.ops[i].inputs)
        return frozenset(wanted)

    def _needed(self, ops: Sequence[int], end: Collection[int]) -> tuple[int, ...]:
        """The runs among ``ops`` that ``end`` cannot do without, and those of the backward pass, which has no others of them."""
        wanted = set(end)
        runs: list[int] = []
        for i in reversed(ops):
            op = self.graph.ops[i]
            if wanted.isdisjoint(op.outputs) and i < self._forward_count:
                continue
            runs.append(i)
            wanted.difference_update(op.outputs)
            wanted.update(op.inputs)
        return tuple(reversed(runs))

    def _peak(
        self, ops: Sequence[int], start: Collection[int], end: Collection[int], outside: Collection[int] = frozenset()
    ) -> int:
        """Most bytes while the ops run, every value freed as early as ``end`` allows; ``outside`` is not counted."""
        size = self._size
        wanted = set(end)
        frees: list[list[int]] = []  # what is not wanted any more after each op, last op first
        for i in reversed(ops):
            op = self.graph.ops[i]
            frees.append([v for v in (*op.inputs, *op.outputs) if v not in wanted])
            wanted.difference_update(op.outputs)
            wanted.update(op.inputs)
        present = wanted.intersection(start)
        peak = held = sum(size[v] for v in present if v not in outside)
        for i, gone in zip(ops, reversed(frees), strict=True):
            op = self.graph.ops[i]
            peak = max(peak, held + op.workspace_bytes + sum(size[v] for v in op.outputs))
            made = [v for v in op.outputs if v not in present]
            present.update(made)
            held += sum(size[v] for v in made if v not in outside)
            lost = [v for v in gone if v in present]
            present.difference_update(lost)
            held -= sum(size[v] for v in lost if v not in outside)
        return peak


class Tables:
    """C(m, i, j) for all m up to a limit, and the schedules behind it. m units are ``m * unit_bytes + spare_bytes`` bytes."""

    def __init__(self, links: Sequence[_Link], units: int, unit_bytes: int, spare_bytes: int, deadline: float) -> None:
        self._unit_bytes = unit_bytes
        self._spare_bytes = spare_bytes
        self._links = links
        self._units = units
        count = len(links)
        shape = (2, count, count, max(0, units + 1))  # loose (0 or 1), i, j, m
        _check_clock(deadline)  # making the tables takes seconds, too
        self._times = np.full(shape, np.inf)
        if units >= 0:
            for i in range(count - 1, -1, -1):
                for j in range(i, count):
                    _check_clock(deadline)
                    for loose in (0, 1):
                        self._solve(loose, i, j)

    def least_units(self) -> int | None:
        """Fewest units with which there is a schedule; None where these tables have none."""
        found = np.flatnonzero(np.isfinite(self._times[0, 0, -1]))
        return int(found[0]) if len(found) else None

    def time_ns(self, units: int) -> int | None:
        """Least time with so many units; None where there is no schedule."""
        if units < 0:
            return None
        time_ns = self._times[0, 0, -1, min(units, self._units)]
        return int(time_ns) if np.isfinite(time_ns) else None

    def steps(self) -> list[int]:
        """The units at which the least time changes, most first: one for each schedule worth a look."""
        top = self._times[0, 0, -1]
        change = [m for m in range(len(top)) if math.isfinite(top[m]) and (m == 0 or top[m] < top[m - 1])]
        return change[::-1]

    def ops(self, units: int) -> list[int]:
        """The ops of a schedule of the least time, in order. Only where ``time_ns`` is not None."""
        runs: list[int] = []
        # A stack instead of recursion: states to take apart, and ops to put out.
        stack: list[_Part] = [(0, 0, len(self._links) - 1, min(units, self._units))]
        while stack:
            part = stack.pop()
            if isinstance(part, _Ops):
                runs.extend(part.ops)
            else:
                stack.extend(reversed(self._choice(*part)))
        return runs

    def _taken(self, bytes_: int) -> int:
        """Units that holding so many bytes takes from those to spend."""
        return -(-bytes_ // self._unit_bytes)

    def _there(self, bytes_: int) -> int:
        """Units that there must be for so many bytes to be in memory."""
        return max(0, -(-(bytes_ - self._spare_bytes) // self._unit_bytes))

    def _splits(self, loose: int, i: int, j: int) -> tuple[int, list[tuple[int, int]]]:
        """For (a): units taken by a loose input, and for k = i+1, … what must be there (units) and the time up to k."""
        later_run = 0 if j == len(self._links) - 1 else 1
        live = self._links[j].live_bytes
        held = self._links[i].input_bytes if loose else 0
        peak = held + self._links[i].plain[later_run].pinned_bytes
        time_ns = 0
        splits: list[tuple[int, int]] = []
        for at in range(i, j):
            plain = self._links[at].plain[later_run]
            if not plain.possible:
                break
            if at > i:
                peak = max(peak, held + plain.loose_bytes)
            time_ns += plain.time_ns
            splits.append((self._there(live + peak), time_ns))
        return self._taken(held), splits

    def _saving(self, loose: int, i: int, j: int) -> Iterator[tuple[int, int, _Saved]]:
        """For (b): units that must be there, units taken, the way."""
        later_run = 0 if j == len(self._links) - 1 else 1
        link, live = self._links[i], self._links[j].live_bytes
        for way in link.saved[later_run]:
            ahead, back = way.loose_bytes if loose else way.pinned_bytes
            taken = self._taken(way.saved_bytes + (link.input_bytes if loose and way.reads_input else 0))
            yield max(self._there(live + ahead), self._there(back), taken), taken, way

    def _ending(self, loose: int, i: int) -> Iterator[tuple[int, _Alone]]:
        """For (c): units that must be there, the way."""
        for alone in self._links[i].alone:
            yield self._there(alone.loose_bytes if loose else alone.pinned_bytes), alone

    def _solve(self, loose: int, i: int, j: int) -> None:
        times, end = self._times, self._units + 1
        best = times[loose, i, j]
        if i == j:
            for need, alone in self._ending(loose, i):
                np.minimum(best[need:], alone.time_ns, out=best[need:])
            return
        taken, splits = self._splits(loose, i, j)
        if splits and taken < end:
            k = i + len(splits)
            total = times[1, i + 1 : k + 1, j, : end - taken] + times[loose, i, i:k, taken:]
            total += np.array([time_ns for _, time_ns in splits], dtype=float)[:, None]
            needs = np.array([need for need, _ in splits])
            total[np.arange(taken, end)[None, :] < needs[:, None]] = np.inf
            np.minimum(best[taken:], total.min(axis=0), out=best[taken:])
        for need, taken, way in self._saving(loose, i, j):
            if need < end:
                inner = times[int(not way.saves_output), i + 1, j, need - taken : end - taken]
                np.minimum(best[need:], inner + way.time_ns, out=best[need:])

    def _choice(self, loose: int, i: int, j: int, units: int) -> list[_Part]:
        """What the least time of a state is made of: ops, and further states."""
        times, least = self._times, self._times[loose, i, j, units]
        if i == j:
            return next([_Ops(way.ops)] for need, way in self._ending(loose, i) if need <= units and way.time_ns == least)
        for need, taken, way in self._saving(loose, i, j):
            inner = int(not way.saves_output)
            if need <= units and times[inner, i + 1, j, units - taken] + way.time_ns == least:
                return [_Ops(way.forward), (inner, i + 1, j, units - taken), _Ops(way.backward)]
        later_run = 0 if j == len(self._links) - 1 else 1
        taken, splits = self._splits(loose, i, j)
        for k, (need, time_ns) in enumerate(splits, start=i + 1):
            if max(need, taken) <= units and times[1, k, j, units - taken] + times[loose, i, k - 1, units] + time_ns == least:
                run = tuple(op for link in self._links[i:k] for op in link.plain[later_run].ops)
                return [_Ops(run), (1, k, j, units - taken), (loose, i, k - 1, units)]
        raise AssertionError("a state of the chain program without a way to go on")


def _check_clock(deadline: float) -> None:
    if now_s() > deadline:
        raise TimeoutError("out of time in the chain program")


@dataclass(frozen=True, slots=True)
class _Ops:
    ops: tuple[int, ...]


_Part = _Ops | tuple[int, int, int, int]  # ops to put out, or a state (loose, i, j, m)


def too_long(stages: int) -> dict[str, Any] | None:
    """The notes on a chain of so many stages that not even one unit has room in a table; None for shorter ones."""
    if _most_slots(stages):
        return None
    return {"stages": stages, "stopped": f"a chain of {stages:,} stages is too long for the dynamic program"}


def _most_slots(stages: int) -> int:
    return int(0.5 * LARGEST) // (2 * stages**2)


def solve_chain(
    program: ChainProgram, budget_bytes: int, slots: int = SLOTS, *, time_limit_s: float = math.inf
) -> tuple[Schedule | None, dict[str, Any]]:
    """The cheapest schedule that the tables give and that fits, with notes on what is proved; None where none fits.

    Rounding up forbids schedules that fit, and so does counting throughout what the forward pass makes for good. So the tables go
    on to some units more than the budget, and the first schedule that ``simulate`` lets pass, from the most units down, is taken.

    Where the keep-all schedule fits, it is returned; where time runs out, or with so many thousand stages that not even one unit
    has room in a table, nothing.

    Notes: ``unit_bytes``; ``persistent_bound_ns`` where the tables are exact; without a schedule ``stopped``, which says how many
    bytes the program needs, and ``needs_bytes``.
    """
    graph = program.graph
    whole = keep_all(graph)
    whole_bytes = simulate(graph, whole).peak_bytes
    if whole_bytes <= budget_bytes:  # a chain's stages may run their ops in an order that takes more
        return whole, {"stages": len(program), "found_by": "keep all", "persistent_bound_ns": graph.keep_all_time_ns}
    count = len(program)
    if (notes := too_long(count)) is not None:
        return None, notes
    slots = min(slots, _most_slots(count))
    held_bytes = program.fixed_bytes - graph.resident_bytes
    room = budget_bytes - program.fixed_bytes
    most = max(0, min(room, whole_bytes - graph.resident_bytes))
    unit_bytes = max(1, -(-most // slots))
    rounded = program.grain_bytes < unit_bytes
    if not rounded:
        unit_bytes = program.grain_bytes
    notes = {"stages": count, "unit_bytes": unit_bytes}
    more = -(-held_bytes // unit_bytes) + (count if rounded else 0)
    deadline = now_s() + time_limit_s
    try:
        tables = program.tables(most, unit_bytes, more=min(more, slots), deadline=deadline)
    except TimeoutError:
        notes["stopped"] = "time limit"
        return None, notes
    if not rounded and not held_bytes and (proved := tables.time_ns(most // unit_bytes)) is not None and proved < EXACT:
        notes["persistent_bound_ns"] = proved
    for units in tables.steps():
        schedule = with_frees(graph, tables.ops(units))
        if simulate(graph, schedule).peak_bytes <= budget_bytes:
            return schedule, notes
    try:
        smallest = _smallest(program, slots, deadline)
    except TimeoutError:
        notes["stopped"] = "time limit"
        return None, notes
    needs = simulate(graph, smallest).peak_bytes
    if needs <= budget_bytes:
        return smallest, notes
    notes["needs_bytes"] = needs
    notes["stopped"] = f"the smallest schedule of the chain program needs {needs:,} bytes"
    return None, notes


def _smallest(program: ChainProgram, slots: int, deadline: float) -> Schedule:
    """The schedule for the least memory that the tables know."""
    graph = program.graph
    most = sum(value.size_bytes for value in graph.values) + max((op.workspace_bytes for op in graph.ops), default=0)
    while True:
        unit_bytes = max(program.grain_bytes, -(-most // slots), 1)
        tables = program.tables(most, unit_bytes, deadline=deadline)
        units = tables.least_units()
        if units is None:  # rounding up took more than all the memory there is
            assert unit_bytes > program.grain_bytes, "a chain program without a schedule in all the memory there is"
            slots *= 2
            continue
        enough = (units + 1) * unit_bytes
        if units * 3 > slots or unit_bytes <= program.grain_bytes or enough >= most:
            return with_frees(graph, tables.ops(units))
        most = enough
