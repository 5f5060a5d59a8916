"""List walk: a schedule that fits a budget, in about a millisecond, with no proof of anything.

Ops run for the first time in graph order under the true budget. What an op misses is run again first, inputs before
readers. Where room is needed, the present value goes that has the least score

    weight · time to make it and its missing ancestors again / (bytes · (ops until its next first-run reader) ^ far)

and of those chosen, the ones that turn out not to be needed stay. Values that no first run reads any more go at once. This is
offline eviction with the next use known, as in Belady's rule, scored as DTR scores (Kirisame et al., ICLR 2021). Weights
let others steer it: values that a MILP keeps at its events, or what a search over weights found.

The loop is compiled by numba when it is first called; the machine code is cached on disk.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from graphs.ir import Graph

REMAKE_LIMIT = 300  # ancestors counted in a score at most; beyond, a value is dear enough anyway

# (op, values to have in memory when that op runs for the first time), ops ascending
Hold = Sequence[tuple[int, Collection[int]]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Walked:
    """What came of a walk.

    runs     the ops in the order they ran, repeats included, within the budget
    time_ns  of these runs; where the walk got stuck, of those before the op that could not run
    reached  how many ops ran for the first time; one more than the graph has ops where the outputs are all there at the end
    extra_ns for each op, the time of the re-runs its first run called for (and for the outputs at the end)
    """

    runs: Ints
    time_ns: float
    reached: int
    extra_ns: Floats


class ListWalk:
    """Walks one graph under one budget; call it once for each set of weights."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        count = len(graph.ops)
        made = [producer >= 0 for producer in graph.producer]
        size = np.array([value.size_bytes for value in graph.values], np.int64)
        # The end is one more op, which reads the graph's outputs.
        inputs = [tuple(v for v in op.inputs if made[v]) for op in graph.ops]
        inputs.append(tuple(v for v in sorted(graph.outputs) if made[v]))
        outputs = [op.outputs for op in graph.ops]
        readers: list[list[int]] = [[] for _ in graph.values]
        for i, values in enumerate(inputs):
            for v in values:
                readers[v].append(i)
        needs = [op.workspace_bytes + sum(graph.values[v].size_bytes for v in op.outputs) for op in graph.ops]
        again = [math.inf if op.effect else float(op.time_ns) for op in graph.ops]
        self._room = budget_bytes - graph.resident_bytes
        self._count = count
        self._graph: tuple[Any, ...] = (
            np.array(graph.producer, np.int64),
            size,
            *_rows(inputs),
            *_rows([*outputs, ()]),
            np.array([*needs, 0], np.int64),
            np.array([*(float(op.time_ns) for op in graph.ops), 0.0]),
            np.array([*again, 0.0]),
            *_rows(readers),
        )
        self._plain = np.ones(len(graph.values))

    def __call__(
        self,
        *,
        weights: Floats | None = None,
        hold: Hold = (),
        grip: float = 1.0,
        far: float = 1.0,
        run_limit: int | None = None,
    ) -> Walked:
        """One walk, complete or stuck (see Walked; ``complete`` tells).

        weights     one factor per value for its score (default: all 1); an infinite one is never dropped while it is needed
        hold, grip  until an op of ``hold`` has run for the first time, the scores of its values count ``grip`` times
        far         how much a far next use counts: 0 not at all, 1 as in the formula
        run_limit   give up after this many runs in all (default: ten per op)
        """
        limit = 10 * self._count if run_limit is None else run_limit
        runs = np.empty(limit + 1, np.int64)
        extra_ns = np.zeros(self._count + 1)
        hold_at = np.array([t for t, _ in hold], np.int64)
        hold_rows, hold_values = _rows([tuple(values) for _, values in hold])
        ran, reached, time_ns = _walk(  # type: ignore[call-arg]  # numba types its functions as taking none
            self._room,
            *self._graph,
            self._plain if weights is None else weights,
            hold_at,
            hold_rows,
            hold_values,
            grip,
            far,
            runs,
            extra_ns,
        )
        return Walked(runs[:ran], time_ns, reached, extra_ns)

    def complete(self, walked: Walked) -> bool:
        """Did the walk come to its end, all outputs there?"""
        return walked.reached > self._count


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists of numbers as one array and where each list begins in it (and the last one ends)."""
    begins = np.zeros(len(lists) + 1, np.int64)
    begins[1:] = np.cumsum([len(numbers) for numbers in lists], dtype=np.int64)
    return begins, np.array([number for numbers in lists for number in numbers], np.int64)


@numba.njit(cache=True)
def _remake_time(v, producer, in_rows, inputs, again, present, seen, stamp, todo):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Time to run the maker of ``v`` and its missing ancestors; infinite through an op with an effect."""
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
    return total


@numba.njit(cache=True)
def _drop(v, present, inside, place, inside_count):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Take a value from the present ones; how many are left."""
    last = inside[inside_count - 1]
    inside[place[v]] = last
    place[last] = place[v]
    present[v] = False
    return inside_count - 1


@numba.njit(cache=True)
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
    reader_rows,
    readers,
    weights,
    hold_at,
    hold_rows,
    hold_values,
    grip,
    far,
    runs,
    extra_ns,
):
    """The walk of the module's docstring. Returns how many runs it wrote, how many ops it reached, and the time."""
    count, value_count = needs.size - 1, size.size
    present = np.zeros(value_count, np.bool_)
    locked = np.zeros(value_count, np.int64)  # how many ops on the stack read the value
    upcoming = reader_rows[:-1].copy()  # where the next first-run reader of each value stands
    gripped = np.zeros(value_count, np.bool_)
    held, ran, total = 0, 0, 0.0
    inside = np.empty(value_count, np.int64)  # the present values, in no order, and where each stands there
    place = np.full(value_count, -1, np.int64)
    inside_count = 0
    stack = np.empty(count + 2, np.int64)
    seen, todo, stamp = np.zeros(count + 1, np.int64), np.empty(count + 1, np.int64), 0
    score, candidates = np.empty(value_count), np.empty(value_count, np.int64)
    gone = np.empty(value_count, np.int64)
    event = -1

    for i in range(count + 1):
        time_before = total
        if hold_at.size and (event < 0 or (event < hold_at.size and hold_at[event] < i)):
            if event >= 0:
                for a in range(hold_rows[event], hold_rows[event + 1]):
                    gripped[hold_values[a]] = False
            event = max(event, 0)
            while event < hold_at.size and hold_at[event] < i:
                event += 1
            if event < hold_at.size:
                for a in range(hold_rows[event], hold_rows[event + 1]):
                    gripped[hold_values[a]] = True
        stack[0] = i
        depth = 1
        for a in range(in_rows[i], in_rows[i + 1]):
            locked[inputs[a]] += 1
        while depth > 0:
            at = stack[depth - 1]
            maker = count
            for a in range(in_rows[at], in_rows[at + 1]):
                if not present[inputs[a]]:
                    maker = min(maker, producer[inputs[a]])
            if maker < count:
                if again[maker] == np.inf:  # it ran before and may not run again
                    return ran, i, time_before
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
                gone_count = 0
                for last_resort in (False, True):
                    if excess <= 0:
                        break
                    candidate_count = 0
                    for k in range(inside_count):
                        v = inside[k]
                        if size[v] == 0 or (locked[v] > 0) != last_resort or weights[v] == np.inf:
                            continue
                        if last_resort:
                            read = False
                            for a in range(in_rows[at], in_rows[at + 1]):
                                read = read or inputs[a] == v
                            if read:
                                continue
                        if upcoming[v] < reader_rows[v + 1]:
                            stamp += 1
                            remake = _remake_time(v, producer, in_rows, inputs, again, present, seen, stamp, todo)
                            until = max(1.0, float(readers[upcoming[v]] - i))
                            score[candidate_count] = remake * weights[v] / (size[v] * until**far)
                            if gripped[v]:
                                score[candidate_count] *= grip
                        else:
                            score[candidate_count] = 0.0
                        candidates[candidate_count] = v
                        candidate_count += 1
                    while excess > 0 and candidate_count > 0:
                        least = 0
                        for k in range(1, candidate_count):
                            if score[k] < score[least] or (score[k] == score[least] and candidates[k] < candidates[least]):
                                least = k
                        if score[least] == np.inf:  # nothing left that could be made again
                            break
                        v = candidates[least]
                        candidate_count -= 1
                        candidates[least], score[least] = candidates[candidate_count], score[candidate_count]
                        gone[gone_count] = v
                        gone_count += 1
                        excess -= size[v]
                if excess > 0:
                    return ran, i, time_before
                for k in range(gone_count - 1, -1, -1):
                    v = gone[k]
                    if excess + size[v] <= 0:
                        excess += size[v]
                        continue
                    held -= size[v]
                    inside_count = _drop(v, present, inside, place, inside_count)

            if ran >= runs.size:
                return ran, i, time_before
            depth -= 1
            if at < count:
                runs[ran] = at
                ran += 1
                total += first[at]
            for a in range(in_rows[at], in_rows[at + 1]):
                locked[inputs[a]] -= 1
                if depth == 0:
                    upcoming[inputs[a]] += 1
            for a in range(out_rows[at], out_rows[at + 1]):
                v = outputs[a]
                if not present[v]:
                    present[v] = True
                    held += size[v]
                    place[v] = inside_count
                    inside[inside_count] = v
                    inside_count += 1
            for side in range(2):
                rows, values = (in_rows, inputs) if side == 0 else (out_rows, outputs)
                for a in range(rows[at], rows[at + 1]):
                    v = values[a]
                    if present[v] and upcoming[v] == reader_rows[v + 1] and locked[v] == 0:
                        held -= size[v]
                        inside_count = _drop(v, present, inside, place, inside_count)
        extra_ns[i] = total - time_before - first[i]
    return ran, count + 1, total
