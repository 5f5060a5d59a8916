"""States, nodes and the heap of ``planner.stages.exhaustive``, compiled by numba when first asked; the machine code is cached.

A set of values is a row of words of 62 bits, which leaves the sign alone. Bits are numbered from the largest value to the
smallest, so that what is freed for an op is chosen in that order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.process.compiled import njit
from planner.process.flat import Flags, Ints

BITS = 62
GO_ON, FOUND, NONE, FULL = range(4)  # how ``advance`` ends
# Places in ``counts``: nodes that have ever been there; those free again; those in the heap; states; nodes pushed; the least
# extra time that is left; the last mark; nodes looked at; the state at the end.
COUNTS = range(9)
USED, SPARE, OPEN, STATES, PUSHED, LEAST, MARK, LOOKED, END = COUNTS
TIE = 44  # bits for the number of a node among those pushed


class Problem(NamedTuple):
    """The graph and its budget, and scratch.

    reads, makes  of each op, sets of values; resident ones are in none
    wanted        after so many first executions, what those to come read of what is made before, or is to be there at the end
    useful        … and what that may be made from again
    size          of each value, descending
    producer      of each value
    time_ns, workspace, once  of each op; the last: whether it may not run again
    later_ns      what re-runs after the first execution of each op cost at least, whatever is in memory then
    room_bytes    beside what is resident
    marks         of each op, the last ``MARK`` under which it was met
    """

    reads: Ints
    makes: Ints
    wanted: Ints
    useful: Ints
    size: Ints
    producer: Ints
    time_ns: Ints
    workspace: Ints
    once: Flags
    later_ns: Ints
    room_bytes: int
    counts: Ints
    marks: Ints
    lost: Ints
    seen: Ints
    todo: Ints
    some: Ints
    present: Ints


class Nodes(NamedTuple):
    """What is to be looked at: an op runs next in a state, and some values have gone for it.

    sets      values in memory while it runs
    least_ns  extra time of any schedule from here, with what is paid; ``ties`` tell equal ones apart
    paid_ns   extra time so far, the op included
    over      bytes by which it still needs more than there is room for
    firsts    how many first executions there have been, the op included
    states, ops, begins  the state before; the op, -1 for none; the first value that may still go
    heap, spare          numbers of nodes: those to be looked at, and those that are free
    """

    sets: Ints
    least_ns: Ints
    ties: Ints
    paid_ns: Ints
    over: Ints
    firsts: Ints
    states: Ints
    ops: Ints
    begins: Ints
    heap: Ints
    spare: Ints


class States(NamedTuple):
    """What has been looked at: how many first executions there have been, and the values in memory.

    before, ops  the state from which it was reached at the least cost so far, and the op between
    slots        its place in the hash ``table``
    """

    sets: Ints
    firsts: Ints
    paid_ns: Ints
    before: Ints
    ops: Ints
    slots: Ints
    table: Ints


@njit
def index_of(word: int, bit: int) -> int:
    """The number of a value from its word and its bit there."""
    return word * BITS + int(math.log2(bit))


@njit
def bytes_of(p: Problem, values: Ints) -> int:
    """Bytes of a set."""
    total = 0
    for w in range(values.size):
        rest = values[w]
        while rest:
            bit = rest & -rest
            rest ^= bit
            total += p.size[index_of(w, bit)]
    return total


@njit
def owed_ns(p: Problem, firsts: int, present: Ints) -> int:
    """What re-runs cost at least from here on; -1 where something cannot be made again.

    Up to each first execution to come, all that is missing for it and those before has to be made again, by ops that have run;
    and after it ``later_ns`` is due.
    """
    p.counts[MARK] += 1
    mark, words, ops = p.counts[MARK], present.size, p.time_ns.size
    least_ns = p.later_ns[firsts] if firsts < ops else 0
    total_ns, is_any = 0, False
    for w in range(words):
        p.seen[w] = present[w]
        p.lost[w] = p.wanted[firsts, w] & ~present[w]
        is_any = is_any or p.lost[w] != 0
    if not is_any:
        return least_ns
    for u in range(firsts, ops + 1):
        is_any = False
        for w in range(words):
            asked = p.lost[w] & ~p.seen[w]
            if u < ops:
                asked &= p.reads[u, w]
            p.todo[w] = asked
            p.seen[w] |= asked
            is_any = is_any or asked != 0
        if not is_any:
            continue
        w = 0
        while w < words:
            rest = p.todo[w]
            if rest == 0:
                w += 1
                continue
            bit = rest & -rest
            p.todo[w] = rest ^ bit
            v = p.producer[index_of(w, bit)]
            if p.marks[v] == mark:
                continue
            p.marks[v] = mark
            if p.once[v]:
                return -1
            total_ns += p.time_ns[v]
            back = w
            for k in range(words):
                more = p.reads[v, k] & ~p.seen[k]
                if more:
                    p.todo[k] |= more
                    p.seen[k] |= more
                    back = min(back, k)
            w = back
        least_ns = max(least_ns, total_ns + (p.later_ns[u] if u < ops else 0))
    return least_ns


@njit
def slot_of(s: States, firsts: int, values: Ints) -> int:
    """The place of a state in the table, or the free one where it would go."""
    code = firsts
    for w in range(values.size):
        code = (code * 1_000_003 ^ (values[w] & 0x7FFFFFFF)) & 0xFFFFFFFFFF
        code = (code * 1_000_003 ^ (values[w] >> 31)) & 0xFFFFFFFFFF
    last = s.table.size - 1
    at = (code ^ (code >> 17)) & last
    while True:
        i = s.table[at]
        if i < 0:
            return at
        if s.firsts[i] == firsts:
            is_same = True
            for w in range(values.size):
                is_same = is_same and s.sets[i, w] == values[w]
            if is_same:
                return at
        at = (at + 1) & last


@njit
def rehash(s: States, count: int) -> None:
    """Enter the first ``count`` states in an empty table."""
    for i in range(count):
        at = slot_of(s, s.firsts[i], s.sets[i])
        s.table[at] = i
        s.slots[i] = at


@njit
def is_before(n: Nodes, a: int, b: int) -> bool:
    """Whether one node is looked at before another."""
    least: bool = n.least_ns[a] < n.least_ns[b] or (n.least_ns[a] == n.least_ns[b] and n.ties[a] < n.ties[b])
    return least


@njit
def push(
    p: Problem,
    n: Nodes,
    values: Ints,
    least_ns: int,
    paid_ns: int,
    over: int,
    firsts: int,
    state: int,
    op: int,
    begin: int,
) -> None:
    """Put a node into the heap. Of those with the same least time, what has come further goes first, then the last one."""
    c = p.counts
    if c[SPARE] > 0:
        c[SPARE] -= 1
        i = n.spare[c[SPARE]]
    else:
        i = c[USED]
        c[USED] += 1
    n.sets[i] = values
    n.least_ns[i], n.paid_ns[i], n.over[i] = least_ns, paid_ns, over
    n.firsts[i], n.states[i], n.ops[i], n.begins[i] = firsts, state, op, begin
    c[PUSHED] += 1
    n.ties[i] = -(firsts << TIE) - c[PUSHED]
    at = c[OPEN]
    c[OPEN] += 1
    while at > 0:
        up = (at - 1) >> 1
        if not is_before(n, i, n.heap[up]):
            break
        n.heap[at] = n.heap[up]
        at = up
    n.heap[at] = i


@njit
def consider(
    p: Problem,
    n: Nodes,
    values: Ints,
    least_ns: int,
    paid_ns: int,
    below_ns: int,
    over: int,
    firsts: int,
    state: int,
    op: int,
    begin: int,
) -> None:
    """Push what comes of a node that takes ``least_ns``, where it matters."""
    owed = owed_ns(p, firsts, values)
    if owed >= 0 and paid_ns + owed < below_ns:
        push(p, n, values, max(least_ns, paid_ns + owed), paid_ns, over, firsts, state, op, begin)


@njit
def pop(p: Problem, n: Nodes) -> int:
    """Take the first node off the heap; it stays as it is until the next push."""
    c = p.counts
    top: int = n.heap[0]
    c[OPEN] -= 1
    size = c[OPEN]
    if size:
        i, at = n.heap[size], 0
        while 2 * at + 1 < size:
            down = 2 * at + 1
            if down + 1 < size and is_before(n, n.heap[down + 1], n.heap[down]):
                down += 1
            if not is_before(n, n.heap[down], i):
                break
            n.heap[at] = n.heap[down]
            at = down
        n.heap[at] = i
    n.spare[c[SPARE]] = top
    c[SPARE] += 1
    return top


@njit
def free_one(p: Problem, n: Nodes, node: int, below_ns: int) -> None:
    """Push what comes of a node that needs more room: one more value goes, from the largest on.

    None goes without which there would be room as well, and none that leaves too little to go after it.
    """
    op, firsts, begin, over = n.ops[node], n.firsts[node], n.begins[node], n.over[node]
    least_ns, paid_ns, state = n.least_ns[node], n.paid_ns[node], n.states[node]
    words = p.some.size
    for w in range(words):
        p.some[w] = p.present[w] & ~p.reads[op, w] & ~p.makes[op, w]
    first = begin // BITS
    for w in range(min(first, words)):
        p.some[w] = 0
    if first < words:
        p.some[first] &= -1 << (begin - first * BITS)
    rest = bytes_of(p, p.some)
    last = p.size[begin - 1] if begin else -1  # the smallest that has gone
    for w in range(first, words):
        while p.some[w]:
            bit = p.some[w] & -p.some[w]
            p.some[w] ^= bit
            x = index_of(w, bit)
            size = p.size[x]
            if size == 0 or rest < over:
                return
            rest -= size
            if (begin and last <= size - over) or rest < over - size:
                continue
            p.present[w] ^= bit
            consider(p, n, p.present, least_ns, paid_ns, below_ns, over - size, firsts, state, op, x + 1)
            p.present[w] ^= bit


@njit
def run_ops(p: Problem, n: Nodes, state: int, firsts: int, least_ns: int, paid_ns: int, below_ns: int) -> None:
    """Push what comes of a state: the next first execution, and each op again that makes something missing of use."""
    held, words, ops = bytes_of(p, p.present), p.some.size, p.time_ns.size
    for v in range(min(firsts + 1, ops)):
        is_first = v == firsts
        if p.once[v] and not is_first:
            continue
        may_run, is_of_use = True, is_first
        for w in range(words):
            may_run = may_run and not p.reads[v, w] & ~p.present[w]
            is_of_use = is_of_use or (p.makes[v, w] & ~p.present[w] & p.useful[firsts, w]) != 0
        if not (may_run and is_of_use):
            continue
        for w in range(words):
            p.some[w] = p.makes[v, w] & ~p.present[w]
        over = held + bytes_of(p, p.some) + p.workspace[v] - p.room_bytes
        for w in range(words):
            p.some[w] |= p.present[w]
        then, paid = (firsts + 1, paid_ns) if is_first else (firsts, paid_ns + p.time_ns[v])
        consider(p, n, p.some, least_ns, paid, below_ns, over, then, state, v, 0)


@njit
def advance(p: Problem, n: Nodes, s: States, below_ns: int, looks: int) -> int:
    """Look at so many nodes, those with the least time first; how it ended. Where it FOUND a way to the end, ``END`` is there.

    below_ns  extra time from which on nothing matters
    """
    c, words, ops = p.counts, p.some.size, p.time_ns.size
    for _ in range(looks):
        if c[OPEN] == 0:
            return NONE
        if c[OPEN] + p.size.size + ops + 2 > n.ops.size or c[STATES] + 1 > s.ops.size:
            return FULL
        i = pop(p, n)
        c[LOOKED] += 1
        least_ns, paid_ns, firsts = n.least_ns[i], n.paid_ns[i], n.firsts[i]
        c[LEAST] = max(c[LEAST], least_ns)
        p.present[:] = n.sets[i]
        if n.over[i] > 0:
            free_one(p, n, i, below_ns)
            continue
        for w in range(words):
            p.present[w] &= p.useful[firsts, w]
        at = slot_of(s, firsts, p.present)
        state = s.table[at]
        if state < 0:
            state = c[STATES]
            c[STATES] += 1
            s.table[at] = state
            s.sets[state], s.firsts[state], s.slots[state] = p.present, firsts, at
        elif s.paid_ns[state] <= paid_ns:
            continue
        s.paid_ns[state], s.before[state], s.ops[state] = paid_ns, n.states[i], n.ops[i]
        if firsts == ops:
            is_done = True
            for w in range(words):
                is_done = is_done and not p.wanted[ops, w] & ~p.present[w]
            if is_done:
                c[END] = state
                return FOUND
        run_ops(p, n, state, firsts, least_ns, paid_ns, below_ns)
    return GO_ON
