"""The moves of annealing, compiled by numba when they are first made; the machine code is cached on disk.

A move is measured before it is made, from what it changes: a few ranges of slots, on each of which it takes or frees some bytes.
So a rejected move, and most are rejected, has written nothing.

Random numbers come in an array. Of a generator among its arguments, numba would ask more in Python at each call, where Ctrl-C
crashes the process.

Memory of a slot is held less the budget, so that what is over the budget is positive, and of an empty slot less HOLE besides, so
that it is never over. A copy of a value is there from the run that makes it to its last read before the next making.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.process.compiled import njit
from planner.process.flat import Flags, Floats, Ints

HOLE = 1 << 60
EXCESS, TIME, BEST, SEVERAL, CROWDED, FULL = range(6)  # entries of ``totals``
DRAWS = 7  # random numbers that a move takes at most
ADD, REMOVE = 0.15, 0.3  # shares of the moves: below the first one adds, below the second one removes, else one shifts


class State(NamedTuple):
    """The graph and a sequence of its ops, flat.

    in_rows, inputs      op v reads inputs[in_rows[v] : in_rows[v + 1]], resident values left out
    out_rows, outputs    the same for what it makes
    producer, size       of each value; its size is 0 where it is resident
    op_time, workspace   of each op
    fixed                ops whose first run stays where it is
    free, again          ops that are not; ops that may be worth a second run
    slot                 the op in each slot, -1 where it is empty
    memory               of each slot, see above
    run_rows, run_count  op v runs in slots runs[run_rows[v] : run_rows[v] + run_count[v]], in order; the row has room for more
    read_rows, read_count  the same for ``reads``: the slots in which value x is read; a graph's output in the one behind the last
    several, place       ops with more than one run, in no order, and where each stands there
    best                 ``slot`` where it last was the cheapest so far that fits
    at, change           scratch: from slot at[i] on, a move takes change[i] bytes more
    totals               over all slots the bytes beyond the budget; time of the runs; that of ``best``; how many ``several`` are;
                         how many moves found no empty slot; how many no room in the row
    """

    in_rows: Ints
    inputs: Ints
    out_rows: Ints
    outputs: Ints
    producer: Ints
    size: Ints
    op_time: Ints
    workspace: Ints
    fixed: Flags
    free: Ints
    again: Ints
    slot: Ints
    memory: Ints
    run_rows: Ints
    run_count: Ints
    runs: Ints
    read_rows: Ints
    read_count: Ints
    reads: Ints
    several: Ints
    place: Ints
    best: Ints
    at: Ints
    change: Ints
    totals: Ints


@njit
def anneal(s: State, draws: Floats, moves: int, hot: float, cold: float, price: float, dear: float) -> int:
    """Try ``moves`` moves; how many of the draws, random numbers in [0, 1), they took: DRAWS a move at most.

    A move that makes time + price · excess dearer by d is made with probability exp(-d / heat). The heat goes geometrically from
    ``hot`` to ``cold`` (ns), the price from ``price`` to ``dear`` (ns for a byte over the budget in one slot).
    """
    # One long function, and each array a variable of its own: handing all of them on would take longer than a move.
    in_rows, inputs, out_rows, outputs, producer, size = s.in_rows, s.inputs, s.out_rows, s.outputs, s.producer, s.size
    op_time, workspace, fixed, free, again = s.op_time, s.workspace, s.fixed, s.free, s.again
    slot, memory, several, place, best, at, change = s.slot, s.memory, s.several, s.place, s.best, s.at, s.change
    run_rows, run_count, runs = s.run_rows, s.run_count, s.runs
    read_rows, read_count, reads = s.read_rows, s.read_count, s.reads
    excess, time, best_time, several_count = s.totals[EXCESS], s.totals[TIME], s.totals[BEST], s.totals[SEVERAL]
    end = slot.size + 1  # behind every read
    cooling, rise = (cold / hot) ** (1 / moves), (dear / price) ** (1 / moves)
    heat, drawn = hot, 0
    for _ in range(moves):
        heat *= cooling
        price *= rise
        slack, kind = -heat * math.log(1 - draws[drawn]), draws[drawn + 1]
        drawn += 2
        n = 0

        if kind < ADD:  # run some op again in a gap between two reads of what it makes
            if again.size == 0:
                continue
            v = again[int(draws[drawn] * again.size)]
            x = outputs[out_rows[v] + int(draws[drawn + 1] * (out_rows[v + 1] - out_rows[v]))]
            drawn += 2
            if op_time[v] > slack + price * excess or read_count[x] == 0:
                continue
            row, count = run_rows[v], run_count[v]
            if row + count == run_rows[v + 1]:
                s.totals[FULL] += 1
                continue
            i = int(draws[drawn] * read_count[x])
            drawn += 1
            k = _before(runs, row, count, reads[read_rows[x] + i])
            low, high = _last(reads, read_rows[x], i, runs[row + k - 1]), reads[read_rows[x] + i]
            t, drawn = _empty(draws, drawn, slot, low, high)
            if t < 0:
                s.totals[CROWDED] += 1
                continue
            if t < _readable(v, in_rows, inputs, producer, run_rows, runs):
                continue
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                n = _reach(
                    u, t, 1, size[u], producer, run_rows, run_count, runs, read_rows, read_count, reads, end, at, change, n
                )
            here = HOLE + workspace[v]
            until = runs[row + k] if k < count else end
            for a in range(out_rows[v], out_rows[v + 1]):
                y = outputs[a]
                i = _before(reads, read_rows[y], read_count[y], t)
                if i < read_count[y] and reads[read_rows[y] + i] < until:
                    n = _note(at, change, n, _last(reads, read_rows[y], i, runs[row + k - 1]) + 1, t, -size[y])
                else:
                    here += size[y]
            more = _excess(memory, at, change, n) + max(0, memory[t] + _change_at(at, change, n, t) + here)
            if op_time[v] + price * more > slack:
                continue
            memory[t] += here
            slot[t] = v
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                _insert(reads, read_rows[u], read_count[u], t)
                read_count[u] += 1
            _insert(runs, row, count, t)
            run_count[v] += 1
            if count == 1:
                place[v] = several_count
                several[several_count] = v
                several_count += 1
            time += op_time[v]

        elif kind < REMOVE:  # drop some run of an op that runs several times
            if several_count == 0:
                continue
            v = several[int(draws[drawn] * several_count)]
            row, count = run_rows[v], run_count[v]
            k = int(draws[drawn + 1] * count)
            drawn += 2
            t = runs[row + k]
            if k == 0 and (fixed[v] or _is_read(v, runs[row + 1], out_rows, outputs, read_rows, read_count, reads)):
                continue
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                n = _reach(
                    u, t, -1, size[u], producer, run_rows, run_count, runs, read_rows, read_count, reads, end, at, change, n
                )
            here = HOLE + workspace[v]
            until = runs[row + k + 1] if k < count - 1 else end
            for a in range(out_rows[v], out_rows[v + 1]):
                y = outputs[a]
                i = _before(reads, read_rows[y], read_count[y], t)
                if i < read_count[y] and reads[read_rows[y] + i] < until:
                    n = _note(at, change, n, _last(reads, read_rows[y], i, runs[row + k - 1]) + 1, t, size[y])
                else:
                    here += size[y]
            more = _excess(memory, at, change, n) - max(0, memory[t] + _change_at(at, change, n, t))  # the slot will be empty
            if price * more - op_time[v] > slack:
                continue
            memory[t] -= here
            slot[t] = -1
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                _delete(reads, read_rows[u], read_count[u], t)
                read_count[u] -= 1
            _delete(runs, row, count, t)
            run_count[v] -= 1
            if count == 2:
                several_count -= 1
                last = several[several_count]
                several[place[v]] = last
                place[last] = place[v]
            time -= op_time[v]

        else:  # shift some run to another slot from which it serves the same reads
            choices = free.size + several_count
            if choices == 0:
                continue
            choice = int(draws[drawn] * choices)
            v = free[choice] if choice < free.size else several[choice - free.size]
            row, count = run_rows[v], run_count[v]
            k = int(draws[drawn + 1] * count)
            drawn += 2
            if k == 0 and fixed[v]:
                continue
            t = runs[row + k]
            low = _readable(v, in_rows, inputs, producer, run_rows, runs)
            if k > 0:
                low = max(low, runs[row + k - 1])
            until = runs[row + k + 1] if k < count - 1 else end
            high = min(until, slot.size)
            served, here = 0, HOLE + workspace[v]  # bytes that its reads need, and that only the run itself does
            for a in range(out_rows[v], out_rows[v + 1]):
                y = outputs[a]
                i = _before(reads, read_rows[y], read_count[y], t)
                if i < read_count[y] and reads[read_rows[y] + i] < until:
                    high = min(high, reads[read_rows[y] + i])
                    served += size[y]
                else:
                    here += size[y]
                if k > 0:
                    low = _last(reads, read_rows[y], i, low)
            to, drawn = _empty(draws, drawn, slot, low, high)
            if to < 0:
                s.totals[CROWDED] += 1
                continue
            n = _note(at, change, n, min(t, to), max(t, to), served if to < t else -served)
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                j = _before(runs, run_rows[producer[u]], run_count[producer[u]], t)
                if j != _before(runs, run_rows[producer[u]], run_count[producer[u]], to):  # it will read another copy
                    n = _reach(
                        u, t, -1, size[u], producer, run_rows, run_count, runs, read_rows, read_count, reads, end, at, change, n
                    )
                    n = _reach(
                        u, to, 1, size[u], producer, run_rows, run_count, runs, read_rows, read_count, reads, end, at, change, n
                    )
                    continue
                first = read_rows[u]
                made, gone = runs[run_rows[producer[u]] + j - 1], end
                if j < run_count[producer[u]]:
                    gone = runs[run_rows[producer[u]] + j]
                i = _before(reads, first, read_count[u], max(t, to))
                later = i if t < to else i + 1
                if later < read_count[u] and reads[first + later] < gone:
                    continue
                if t < to:
                    n = _note(at, change, n, reads[first + i - 1] + 1, to + 1, size[u])
                else:
                    n = _note(at, change, n, max(to, _last(reads, first, i, made)) + 1, t + 1, -size[u])
            more = _excess(memory, at, change, n) - max(0, memory[t] + _change_at(at, change, n, t))
            more += max(0, memory[to] + _change_at(at, change, n, to) + here)
            if price * more > slack:
                continue
            memory[t] -= here
            memory[to] += here
            slot[t] = -1
            slot[to] = v
            for a in range(in_rows[v], in_rows[v + 1]):
                u = inputs[a]
                _delete(reads, read_rows[u], read_count[u], t)
                _insert(reads, read_rows[u], read_count[u] - 1, to)
            runs[row + k] = to

        _apply(memory, at, change, n)
        excess += more
        if excess == 0 and time < best_time:
            best_time = time
            best[:] = slot
    s.totals[EXCESS], s.totals[TIME], s.totals[BEST], s.totals[SEVERAL] = excess, time, best_time, several_count
    return drawn


@njit
def _empty(draws: Floats, drawn: int, slot: Ints, low: int, high: int) -> tuple[int, int]:
    """An empty slot between two others, -1 where two tries find none; how many draws are taken now."""
    room = high - low - 1
    if room > 0:
        for _ in range(2):
            t = low + 1 + int(draws[drawn] * room)
            drawn += 1
            if slot[t] < 0:
                return t, drawn
    return -1, drawn


@njit
def _readable(v: int, in_rows: Ints, inputs: Ints, producer: Ints, run_rows: Ints, runs: Ints) -> int:
    """The slot by which all that ``v`` reads has been made."""
    low = -1
    for a in range(in_rows[v], in_rows[v + 1]):
        low = max(low, runs[run_rows[producer[inputs[a]]]])
    return low


@njit
def _is_read(v: int, until: int, out_rows: Ints, outputs: Ints, read_rows: Ints, read_count: Ints, reads: Ints) -> bool:
    """Whether something that ``v`` makes is read before slot ``until``."""
    for a in range(out_rows[v], out_rows[v + 1]):
        y = outputs[a]
        if read_count[y] > 0 and reads[read_rows[y]] < until:
            return True
    return False


@njit
def _last(reads: Ints, row: int, i: int, made: int) -> int:
    """The last of a row's first ``i`` reads, or ``made`` where they are before it: where that copy ends if no more reads it."""
    return max(made, reads[row + i - 1]) if i > 0 else made


@njit
def _reach(
    u: int,
    t: int,
    sign: int,
    size: int,
    producer: Ints,
    run_rows: Ints,
    run_count: Ints,
    runs: Ints,
    read_rows: Ints,
    read_count: Ints,
    reads: Ints,
    end: int,
    at: Ints,
    change: Ints,
    n: int,
) -> int:
    """Note what a read of ``u`` in slot ``t`` takes that is to be (sign 1), or (-1) is there and is to go."""
    row, p = read_rows[u], producer[u]
    i = _before(reads, row, read_count[u], t)
    j = _before(runs, run_rows[p], run_count[p], t)
    later = i if sign > 0 else i + 1
    gone = runs[run_rows[p] + j] if j < run_count[p] else end
    if later < read_count[u] and reads[row + later] < gone:
        return n
    return _note(at, change, n, _last(reads, row, i, runs[run_rows[p] + j - 1]) + 1, t + 1, sign * size)


@njit
def _note(at: Ints, change: Ints, n: int, begin: int, end: int, size: int) -> int:
    """Note ``size`` more bytes from slot ``begin`` to before ``end`` among the ``n`` changes, which are in order; how many."""
    if begin >= end or size == 0:
        return n
    for t, more in ((begin, size), (end, -size)):
        i = n
        while i > 0 and at[i - 1] > t:
            at[i], change[i] = at[i - 1], change[i - 1]
            i -= 1
        at[i], change[i] = t, more
        n += 1
    return n


@njit
def _excess(memory: Ints, at: Ints, change: Ints, n: int) -> int:
    """How much more the slots are over the budget by the changes."""
    excess = more = 0
    for i in range(n - 1):
        more += change[i]
        if more != 0:
            stretch = memory[at[i] : at[i + 1]]
            for t in range(stretch.size):  # from 0 on, or it would not become vector instructions
                excess += max(0, stretch[t] + more) - max(0, stretch[t])
    return excess


@njit
def _change_at(at: Ints, change: Ints, n: int, t: int) -> int:
    """How many bytes more slot ``t`` holds by the changes."""
    more = 0
    for i in range(n):
        if at[i] > t:
            break
        more += change[i]
    return more


@njit
def _apply(memory: Ints, at: Ints, change: Ints, n: int) -> None:
    """Make the changes."""
    more = 0
    for i in range(n - 1):
        more += change[i]
        if more != 0:
            stretch = memory[at[i] : at[i + 1]]
            for t in range(stretch.size):
                stretch[t] += more


@njit
def _before(numbers: Ints, begin: int, count: int, t: int) -> int:
    """How many of a row's ``count`` numbers, which are in order, are below ``t``."""
    low, high = begin, begin + count
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < t:
            low = middle + 1
        else:
            high = middle
    return low - begin


@njit
def _insert(numbers: Ints, begin: int, count: int, t: int) -> None:
    """Put ``t`` into a row of ``count`` numbers."""
    i = begin + count
    while i > begin and numbers[i - 1] > t:
        numbers[i] = numbers[i - 1]
        i -= 1
    numbers[i] = t


@njit
def _delete(numbers: Ints, begin: int, count: int, t: int) -> None:
    """Take ``t`` out of a row of ``count`` numbers."""
    for i in range(begin + _before(numbers, begin, count, t), begin + count - 1):
        numbers[i] = numbers[i + 1]


@njit
def fill(s: State, ops: Ints, spread: int, wanted: Ints, base: int) -> None:
    """Lay a sequence out with ``spread`` slots for each op; the arrays are as made, the rows have room.

    wanted  the graph's outputs
    base    bytes that are always there, less the budget
    """
    s.slot[:] = -1
    s.run_count[:] = 0
    s.read_count[:] = 0
    s.totals[TIME] = s.totals[SEVERAL] = s.totals[CROWDED] = s.totals[FULL] = s.totals[EXCESS] = 0
    for i in range(ops.size):
        v, t = ops[i], i * spread + spread // 2
        s.slot[t] = v
        s.totals[TIME] += s.op_time[v]
        s.runs[s.run_rows[v] + s.run_count[v]] = t
        s.run_count[v] += 1
        if s.run_count[v] == 2:
            s.place[v] = s.totals[SEVERAL]
            s.several[s.place[v]] = v
            s.totals[SEVERAL] += 1
        for a in range(s.in_rows[v], s.in_rows[v + 1]):
            u = s.inputs[a]
            s.reads[s.read_rows[u] + s.read_count[u]] = t
            s.read_count[u] += 1
    for x in wanted:
        s.reads[s.read_rows[x] + s.read_count[x]] = s.slot.size
        s.read_count[x] += 1
    more = np.zeros(s.slot.size + 2, np.int64)  # than in the slot before
    for v in range(s.op_time.size):
        for k in range(s.run_count[v]):
            t = s.runs[s.run_rows[v] + k]
            more[t] += s.workspace[v]
            more[t + 1] -= s.workspace[v]
            until = s.runs[s.run_rows[v] + k + 1] if k < s.run_count[v] - 1 else s.slot.size + 1
            for a in range(s.out_rows[v], s.out_rows[v + 1]):
                y = s.outputs[a]
                more[t] += s.size[y]
                more[_last(s.reads, s.read_rows[y], _before(s.reads, s.read_rows[y], s.read_count[y], until), t) + 1] -= s.size[y]
    held = base
    for t in range(s.slot.size):
        held += more[t]
        s.memory[t] = held if s.slot[t] >= 0 else held - HOLE
        s.totals[EXCESS] += max(0, s.memory[t])
    if s.totals[EXCESS] == 0 and s.totals[TIME] < s.totals[BEST]:
        s.totals[BEST] = s.totals[TIME]
        s.best[:] = s.slot
