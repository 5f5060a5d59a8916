"""List walk: make a sequence of runs fit a budget, in about a millisecond, with no proof of anything.

A walk follows a *route*: the ops in graph order, or a better sequence whose memory does not fit. What a run misses is run
again first, inputs before readers. Where room is needed, the present value goes that has the least score

    weight · time to make it and its missing ancestors again / (bytes · (runs until its next read)^far)

and of those chosen, the ones that turn out not to be needed stay. What the route makes again before it reads it goes before
anything else, so a route that fits is followed as it is; where there was room to keep the value after all, the route's re-run is
left out. What the route reads no more goes at once. This is offline eviction with the next use known, as in Belady's rule,
scored as DTR scores (Kirisame et al., ICLR 2021). The result is a route again: following it once more often saves more.

A walk may begin anywhere along a route that fits, with weights and left-out runs up to a position; it ends where all that the
route has in memory is there again, so that a change in one place costs little to try.

The loop is compiled by numba when it is first called; the machine code is cached on disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.ir import Graph
from planner.process.clock import now_s
from planner.process.compiled import untyped
from planner.process.flat import Flags, Floats, Ints, rows
from planner.process.loading import TINY, load_once

REMAKE_LIMIT = 300  # ancestors counted in a score at most; beyond, a value is dear enough anyway
MOST_RUNS = 5  # for each run of a route; a walk that makes more is stuck
MOST_STEPS = 100_000_000  # values and ancestors looked at, a second or two: nothing can interrupt a walk, so that is all it gets
STEPS_PER_S, LEAST_S = 50_000_000, 0.02  # about as many; and time for the walk that begins when time is up
MANY, SPARE = 2_000, 256  # where more are present, whole walks empty a share of the room at once: all are looked at for that
LEAST_NS = 1e-9  # what an op of no time counts in a score: were it nothing, no factor would tell such values apart
NEVER = -1  # in place of a next use; odd, as it is no read
SOON = 1e-200  # factor of a score where the route makes the value again anyway; any weight in use is between 1e-100 and 1e100


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A sequence of runs, and where along it values are read and made.

    runs            ops, repeats included; the last one is the end, which reads the graph's outputs
    first_at        for each op, where it runs for the first time
    use_rows, uses  for value v, uses[use_rows[v] : use_rows[v + 1]]: 2 · position of each read, 2 · position + 1 of each making
    time_ns         at position i, the time of the runs before; one entry more than runs
    repeats_ns      the same, for those runs that are repeats
    """

    runs: Ints
    first_at: Ints
    use_rows: Ints
    uses: Ints
    time_ns: Floats
    repeats_ns: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Walked:
    """What came of a walk.

    runs     the sequence in full: the route's up to where the walk began, the walk's, the route's from where it ended
    time_ns  of these runs; where the walk got stuck, of those before
    stuck    position in ``runs`` of the run that could not be made; their number where there is none: within the budget, then
    work     how many ops ran
    """

    runs: Ints
    time_ns: float
    stuck: int
    work: int

    @property
    def complete(self) -> bool:
        """Did the walk come to its end, all outputs there?"""
        return self.stuck == self.runs.size


class ListWalk:
    """Walks in one graph under one budget."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        load_once(_walk_once)
        count = len(graph.ops)
        made = [producer >= 0 for producer in graph.producer]
        # The end is one more op, which reads the graph's outputs.
        inputs = [tuple(dict.fromkeys(v for v in op.inputs if made[v])) for op in graph.ops]
        inputs.append(tuple(v for v in sorted(graph.outputs) if made[v]))
        outputs = [*(op.outputs for op in graph.ops), ()]
        self.in_rows, self.inputs = rows(inputs)
        self.out_rows, self.outputs = rows(outputs)
        needs = [op.workspace_bytes + sum(graph.values[v].size_bytes for v in op.outputs) for op in graph.ops]
        again = [math.inf if op.effect else max(float(op.time_ns), LEAST_NS) for op in graph.ops]
        self.op_time_ns = np.array([*(float(op.time_ns) for op in graph.ops), 0.0])
        self.end = count
        self._touched = np.diff(self.in_rows) + np.diff(self.out_rows)  # how many values each op reads and makes
        self._graph: tuple[Any, ...] = (
            budget_bytes - graph.resident_bytes,
            np.array(graph.producer, np.int64),
            np.array([value.size_bytes for value in graph.values], np.int64),
            self.in_rows,
            self.inputs,
            self.out_rows,
            self.outputs,
            np.array([*needs, 0], np.int64),
            self.op_time_ns,
            np.array([*again, 0.0]),
        )
        self._plain = np.ones(len(graph.values))

    def route(self, runs: Sequence[int] | Ints) -> Route:
        """A route from a sequence of runs, with or without the end."""
        whole = np.asarray(runs, np.int64)
        if not whole.size or whole[-1] != self.end:
            whole = np.append(whole, self.end)
        first_at = np.full(self.end + 1, whole.size, np.int64)
        use_rows = np.zeros(self._plain.size + 1, np.int64)
        uses = np.empty(int(self._touched[whole].sum()), np.int64)
        _places(whole, self.in_rows, self.inputs, self.out_rows, self.outputs, first_at, use_rows, uses)
        time_ns = self.op_time_ns[whole]
        repeats_ns = time_ns.copy()
        repeats_ns[first_at[first_at < whole.size]] = 0.0
        sums = (np.concatenate(([0.0], np.cumsum(times))) for times in (time_ns, repeats_ns))
        return Route(whole, first_at, use_rows, uses, *sums)

    def follow(
        self,
        route: Route,
        *,
        far: float = 1.0,
        weights: Floats | None = None,
        left_out: Flags | None = None,
        begin: int = 0,
        until: int | None = None,
        slack_ns: float = math.inf,
        deadline: float = math.inf,
    ) -> Walked:
        """Walk along a route.

        far       how much a far next read counts: 0, 0.5, 1 or 2
        weights   one factor per value for its score (default: all 1)
        left_out  for each position, whether to leave out its run, which must be a repeat between begin and until
        begin     position to begin at, with what the route has in memory there. If not the first one, the route must fit, and
                  the walk ends as soon as nothing changes any more; else it goes on to the end
        until     weights count before this position (default: the end of the route)
        slack_ns  give up, as stuck, where the walk is later than the route by more than this and what it can still leave out
        deadline  of ``planner.process.clock.now_s``; a walk that would take longer, or some seconds, is stuck
        """
        most_steps = MOST_STEPS
        if deadline < math.inf:
            most_steps = int(min(most_steps, STEPS_PER_S * max(LEAST_S, deadline - now_s())))
        runs = np.empty(int(1.5 * (route.runs.size - begin)) + 50 if begin else MOST_RUNS * route.runs.size, np.int64)
        ran, at, time_ns, stuck, work = _walk(
            *self._graph,
            route.runs,
            route.first_at,
            route.use_rows,
            route.uses,
            route.time_ns,
            route.repeats_ns,
            begin,
            route.runs.size if until is None else min(until, route.runs.size),
            np.zeros(route.runs.size, np.bool_) if left_out is None else left_out,
            self._plain if weights is None else weights,
            far,
            slack_ns,
            most_steps,
            runs,
        )
        whole = np.concatenate((route.runs[:begin], runs[:ran], route.runs[min(at, route.runs.size - 1) :]))
        time_ns += route.time_ns[begin]
        if stuck:
            return Walked(whole, time_ns, begin + ran, work)
        return Walked(whole, time_ns + route.time_ns[-1] - route.time_ns[at], whole.size, work)


def _walk_once() -> None:
    tiny = ListWalk(TINY, 1)
    tiny.follow(tiny.route([0]))


@untyped
def _places(runs, in_rows, inputs, out_rows, outputs, first_at, use_rows, uses):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Fill in first_at (all of them beyond the end), use_rows (zeros) and uses of a route.

    Compiled code that returns arrays runs Python to make them, and Ctrl-C that comes there is a SystemError.
    """
    for i in range(runs.size - 1, -1, -1):
        op = runs[i]
        first_at[op] = i
        for a in range(in_rows[op], in_rows[op + 1]):
            use_rows[inputs[a] + 1] += 1
        for a in range(out_rows[op], out_rows[op + 1]):
            use_rows[outputs[a] + 1] += 1
    for v in range(use_rows.size - 1):
        use_rows[v + 1] += use_rows[v]
    free = use_rows[:-1].copy()
    for i in range(runs.size):
        op = runs[i]
        for a in range(in_rows[op], in_rows[op + 1]):
            uses[free[inputs[a]]] = 2 * i
            free[inputs[a]] += 1
        for a in range(out_rows[op], out_rows[op + 1]):
            uses[free[outputs[a]]] = 2 * i + 1
            free[outputs[a]] += 1


@untyped
def _remake_time(v, producer, in_rows, inputs, again, present, seen, stamp, todo):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Time to run the maker of ``v`` and its missing ancestors, infinite through an op with an effect; and how many they are."""
    total = 0.0
    todo[0] = producer[v]
    seen[producer[v]] = stamp
    count = waiting = 1
    while waiting > 0:
        waiting -= 1
        i = todo[waiting]
        total += again[i]
        for a in range(in_rows[i], in_rows[i + 1]):
            u = inputs[a]
            if not present[u]:
                p = producer[u]
                if seen[p] != stamp and count < REMAKE_LIMIT:
                    seen[p] = stamp
                    count += 1
                    todo[waiting] = p
                    waiting += 1
    return total, count


@untyped
def _drop(v, present, inside, place, inside_count):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Take ``v`` out of the present values; how many are left."""
    inside_count -= 1
    present[v] = False
    inside[place[v]] = inside[inside_count]
    place[inside[inside_count]] = place[v]
    return inside_count


@untyped
def _sift(k, count, score, candidates):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Move entry ``k`` of a heap down to its place: the least score is at the top, of equal ones that of the lower value."""
    moved_score, moved = score[k], candidates[k]
    while 2 * k + 1 < count:
        child = 2 * k + 1
        if child + 1 < count and (
            score[child + 1] < score[child] or (score[child + 1] == score[child] and candidates[child + 1] < candidates[child])
        ):
            child += 1
        if moved_score < score[child] or (moved_score == score[child] and moved < candidates[child]):
            break
        score[k], candidates[k] = score[child], candidates[child]
        k = child
    score[k], candidates[k] = moved_score, moved


@untyped
def _after(k, end, uses, left_out):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The next of a value's uses, from ``k`` on, that is not left out."""
    while k < end and left_out[uses[k] // 2]:
        k += 1
    return k


@untyped
def _pass(v, upcoming, coming, use_rows, uses, left_out):  # type: ignore[no-untyped-def]  # pragma: no cover
    """A use of ``v`` is past: note where the next one stands, and what it is."""
    end = use_rows[v + 1]
    k = _after(upcoming[v] + 1, end, uses, left_out)
    upcoming[v] = k
    coming[v] = uses[k] if k < end else NEVER


@untyped
def use_from(v, at, use_rows, uses):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Index in ``uses`` of a value's first use that is not less than ``at``; the end of its row where there is none."""
    return use_rows[v] + np.searchsorted(uses[use_rows[v] : use_rows[v + 1]], at)


@untyped
def is_read(k, end, uses):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Whether use ``k`` is there and a read: the value is then wanted in memory."""
    return k < end and uses[k] % 2 == 0


@untyped
def _power(base, far):  # type: ignore[no-untyped-def]  # pragma: no cover
    """``base`` to one of the exponents in use, fast."""
    if far == 0.0:
        return 1.0
    if far == 0.5:
        return np.sqrt(base)
    return base if far == 1.0 else base * base


@untyped
def _walk(  # type: ignore[no-untyped-def]  # pragma: no cover
    room,
    producer,
    size,
    in_rows,
    inputs,
    out_rows,
    outputs,
    needs,
    first,
    again,
    route,
    first_at,
    use_rows,
    uses,
    time_ns,
    repeats_ns,
    begin,
    until,
    left_out,
    weights,
    far,
    slack_ns,
    most_steps,
    runs,
):
    """The walk of the module's docstring.

    Returns how many runs it wrote, the position along the route that it came to, their time, whether it got stuck there, and
    how many runs it made in all.
    """
    count, value_count = needs.size - 1, size.size
    present = np.zeros(value_count, np.bool_)
    locked = np.zeros(value_count, np.int64)  # how many ops on the stack read the value
    upcoming = np.empty(value_count, np.int64)  # where the next use of each value stands
    coming = np.empty(value_count, np.int64)  # that use, or NEVER; an even one is a read
    again_ns = np.zeros(value_count)  # time to run the maker of each value again
    inside = np.empty(value_count, np.int64)  # the present values, in no order, and where each stands there
    place = np.full(value_count, -1, np.int64)
    held, ran, total, inside_count = 0, 0, 0.0, 0
    absent = 0  # values that the route has in memory here and the walk has not
    for v in range(value_count):
        k, end = use_rows[v], use_rows[v + 1]
        while k < end and uses[k] < 2 * begin:
            k += 1
        was_made, k_left = k > use_rows[v], _after(k, end, uses, left_out)
        if was_made and is_read(k, end, uses) and k_left < end:
            present[v] = True
            held += size[v]
            place[v], inside[inside_count] = inside_count, v
            inside_count += 1
        elif was_made and is_read(k_left, end, uses):
            absent += 1
        upcoming[v] = k_left
        coming[v] = uses[k_left] if k_left < end else NEVER
        if producer[v] >= 0:
            again_ns[v] = again[producer[v]]
    stack = np.empty(count + 2, np.int64)
    seen, todo, stamp, steps = np.zeros(count + 1, np.int64), np.empty(count + 1, np.int64), 0, 0
    score, candidates = np.empty(value_count), np.empty(value_count, np.int64)  # a heap
    rate = np.empty(value_count)  # of each value in it, where the score is without what missing ancestors add; else 0
    gone = np.empty(value_count, np.int64)

    for i in range(begin, route.size):
        if begin > 0 and i >= until and absent == 0:
            return ran, i, total, False, ran
        late_ns = total - (time_ns[i] - time_ns[begin])
        if late_ns > slack_ns + max(0.0, repeats_ns[until] - repeats_ns[i]):
            return ran, i, total, True, ran
        if left_out[i]:
            continue
        target = route[i]
        useless = first_at[target] < i
        for a in range(out_rows[target], out_rows[target + 1]):
            v = outputs[a]
            end = use_rows[v + 1]
            useless = useless and (present[v] or not is_read(_after(upcoming[v] + 1, end, uses, left_out), end, uses))
        if useless:
            for side in range(2):
                rows, values = (in_rows, inputs) if side == 0 else (out_rows, outputs)
                for a in range(rows[target], rows[target + 1]):
                    v = values[a]
                    was_wanted = coming[v] % 2 == 0
                    _pass(v, upcoming, coming, use_rows, uses, left_out)
                    if not present[v]:
                        absent += int(coming[v] % 2 == 0) - int(was_wanted)
                    elif coming[v] == NEVER:
                        held -= size[v]
                        inside_count = _drop(v, present, inside, place, inside_count)
            continue

        ran_before, total_before = ran, total
        stack[0] = target
        depth = 1
        for a in range(in_rows[target], in_rows[target + 1]):
            locked[inputs[a]] += 1
        while depth > 0:
            at = stack[depth - 1]
            maker = count
            for a in range(in_rows[at], in_rows[at + 1]):
                if not present[inputs[a]]:
                    maker = min(maker, producer[inputs[a]])
            if maker < count:
                width = in_rows[at + 1] - in_rows[at]
                steps += width if width > MANY else 0
                # It ran before and may not run again, or values displace each other, or that takes too long.
                if again[maker] == np.inf or depth > count or steps > most_steps:
                    return ran_before, i, total_before, True, ran
                stack[depth] = maker
                depth += 1
                for a in range(in_rows[maker], in_rows[maker + 1]):
                    locked[inputs[a]] += 1
                continue

            # Make room: old copies of the outputs go first, then by score; locked values last, to be made again.
            excess = held + needs[at] - room
            if excess > 0:
                for a in range(out_rows[at], out_rows[at + 1]):
                    v = outputs[a]
                    if present[v]:
                        excess -= size[v]
                        held -= size[v]
                        inside_count = _drop(v, present, inside, place, inside_count)
                        absent += coming[v] % 2 == 0
                gone_count, spare = 0, room // SPARE if inside_count > MANY and begin == 0 else 0
                for last_resort in (False, True):
                    if excess <= 0:
                        break
                    if last_resort:
                        spare = 0
                    candidate_count = 0
                    steps += inside_count
                    if last_resort:  # what the op itself reads is marked, to stay
                        for a in range(in_rows[at], in_rows[at + 1]):
                            locked[inputs[a]] = -abs(locked[inputs[a]])
                    for k in range(inside_count):
                        v = inside[k]
                        if size[v] == 0 or locked[v] < 0 or (locked[v] > 0) != last_resort:
                            continue
                        rate[v] = score[candidate_count] = 0.0
                        use = coming[v]
                        if use != NEVER:
                            per_ns = 1.0 / (size[v] * _power(max(1.0, float(use // 2 - i)), far))
                            if i < until:
                                per_ns *= weights[v]
                            if use % 2 == 1:
                                per_ns *= SOON
                            # At least this; what the missing ancestors add is looked up only where it can matter.
                            rate[v] = per_ns
                            score[candidate_count] = per_ns * again_ns[v]
                        candidates[candidate_count] = v
                        candidate_count += 1
                    if last_resort:
                        for a in range(in_rows[at], in_rows[at + 1]):
                            locked[inputs[a]] = abs(locked[inputs[a]])
                    for k in range(candidate_count // 2 - 1, -1, -1):
                        _sift(k, candidate_count, score, candidates)
                    while excess > -spare and candidate_count > 0:
                        if score[0] == np.inf or steps > most_steps:  # nothing left to make again, or too much asked
                            break
                        v = candidates[0]
                        if rate[v] > 0.0:
                            stamp += 1
                            remake, looked_at = _remake_time(v, producer, in_rows, inputs, again, present, seen, stamp, todo)
                            steps += looked_at
                            score[0], rate[v] = rate[v] * remake, 0.0
                            _sift(0, candidate_count, score, candidates)
                            continue
                        if excess <= 0 and excess - size[v] < -spare:
                            break
                        candidate_count -= 1
                        score[0], candidates[0] = score[candidate_count], candidates[candidate_count]
                        _sift(0, candidate_count, score, candidates)
                        gone[gone_count] = v
                        gone_count += 1
                        excess -= size[v]
                if excess > 0 or steps > most_steps:
                    return ran_before, i, total_before, True, ran
                for k in range(gone_count - 1, -1, -1):
                    v = gone[k]
                    if excess + size[v] <= -spare:
                        excess += size[v]
                        continue
                    held -= size[v]
                    inside_count = _drop(v, present, inside, place, inside_count)
                    absent += coming[v] % 2 == 0

            if ran >= runs.size:
                return ran_before, i, total_before, True, ran
            depth -= 1
            if at < count:
                runs[ran] = at
                ran += 1
                total += first[at]
            for a in range(in_rows[at], in_rows[at + 1]):
                v = inputs[a]
                locked[v] -= 1
                if depth == 0:
                    _pass(v, upcoming, coming, use_rows, uses, left_out)
            for a in range(out_rows[at], out_rows[at + 1]):
                v = outputs[a]
                if not present[v]:
                    absent -= coming[v] % 2 == 0
                    present[v] = True
                    held += size[v]
                    place[v], inside[inside_count] = inside_count, v
                    inside_count += 1
                if depth == 0:
                    _pass(v, upcoming, coming, use_rows, uses, left_out)
            for side in range(2):
                rows, values = (in_rows, inputs) if side == 0 else (out_rows, outputs)
                for a in range(rows[at], rows[at + 1]):
                    v = values[a]
                    if present[v] and coming[v] == NEVER and locked[v] == 0:
                        held -= size[v]
                        inside_count = _drop(v, present, inside, place, inside_count)
    return ran, route.size, total, False, ran
