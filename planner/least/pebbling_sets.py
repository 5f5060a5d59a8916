"""Sets of values and what is made last of them, compiled by numba when first asked; the machine code is cached on disk.

A set is an array of flags, one for each value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphs.ir import Graph
from planner.process.compiled import njit
from planner.process.flat import Flags, Ints, reads_and_makes

SCANNED = 8  # the ops between two in op order that take as long to go over as one of them to sort in


class Sets(NamedTuple):
    """The graph, flat, and scratch.

    in_rows, inputs    op v reads inputs[in_rows[v] : in_rows[v + 1]], resident values left out
    out_rows, outputs  the same for what it makes
    producer, size     of each value; its size is 0 where it is resident
    workspace          of each op
    once               ops that may not run again
    dropped            values that ``shrink`` has dropped, in the order in which it did
    shrinking          where ``shrink`` is: how many of ``outputs`` it has still to look at, values dropped, how many of them
                       before it looked at the last of these, bytes held
    ops, needs, adds   what ``last_makers`` found; ``ops`` also what ``again_bytes`` did
    counted            how many these are; how much work that was
    asked, todo        scratch of ``again_bytes``: which ops run; those whose inputs are not looked at yet, then all in op order
    until, there       … and of each value, the last of them that reads it; whether it is there
    """

    in_rows: Ints
    inputs: Ints
    out_rows: Ints
    outputs: Ints
    producer: Ints
    size: Ints
    workspace: Ints
    once: Flags
    dropped: Ints
    shrinking: Ints
    ops: Ints
    needs: Ints
    adds: Ints
    counted: Ints
    asked: Flags
    todo: Ints
    until: Ints
    there: Flags


def sets_of(graph: Graph) -> Sets:
    """A graph's."""
    ops, values = len(graph.ops), len(graph.values)
    return Sets(
        *reads_and_makes(graph),
        np.array([op.workspace_bytes for op in graph.ops], np.int64),
        np.array([op.effect for op in graph.ops], np.bool_),
        np.empty(values, np.int64),
        np.zeros(4, np.int64),
        np.empty(ops, np.int64),
        np.empty(ops, np.int64),
        np.empty(ops, np.int64),
        np.zeros(2, np.int64),
        np.zeros(ops, np.bool_),
        np.empty(ops, np.int64),
        np.zeros(values, np.int64),
        np.zeros(values, np.bool_),
    )


@njit
def again_bytes(s: Sets, present: Flags, values: Ints, room_bytes: int, needs_ops: bool) -> int:
    """Peak, beside what is present, of making values that are not by their missing ancestors in op order; -1 if that is too much.

    The ops are left in ``s.ops``, in no order, their number in ``s.counted``; without ``needs_ops`` only as many of them as show
    that it is too much.
    """
    if not ask_ancestors(s, present, values, room_bytes, needs_ops):
        return -1
    runs = put_in_order(s)
    last = s.todo[runs - 1] if runs else -1
    for b in range(runs):
        v = s.todo[b]
        s.asked[v] = False
        for a in range(s.out_rows[v], s.out_rows[v + 1]):
            s.until[s.outputs[a]] = -1
        for a in range(s.in_rows[v], s.in_rows[v + 1]):
            s.until[s.inputs[a]] = v
    for x in values:
        s.until[x] = last + 1
    held_bytes = peak_bytes = 0
    for b in range(runs):
        v = s.todo[b]
        here_bytes = held_bytes + s.workspace[v]
        for a in range(s.out_rows[v], s.out_rows[v + 1]):
            y = s.outputs[a]
            if not present[y]:
                here_bytes += s.size[y]
                if s.until[y] > v:
                    s.there[y] = True
                    held_bytes += s.size[y]
        peak_bytes = max(peak_bytes, here_bytes)
        for a in range(s.in_rows[v], s.in_rows[v + 1]):
            y = s.inputs[a]
            if s.there[y] and s.until[y] == v:
                s.there[y] = False
                held_bytes -= s.size[y]
    for x in values:
        s.there[x] = False
    return peak_bytes if peak_bytes <= room_bytes else -1


@njit
def ask_ancestors(s: Sets, present: Flags, values: Ints, room_bytes: int, needs_ops: bool) -> bool:
    """Mark the ops that ``again_bytes`` is about in ``s.asked``, and leave them in ``s.ops``; whether each may run again and has
    room for itself. Where not, no marks are left."""
    count, runs, possible = 0, 0, True
    for x in values:
        v = s.producer[x]
        if not s.asked[v]:
            s.asked[v] = True
            s.todo[count] = v
            count += 1
    while count and (possible or needs_ops):
        count -= 1
        v = s.todo[count]
        s.ops[runs] = v
        runs += 1
        alone_bytes = s.workspace[v]
        for a in range(s.out_rows[v], s.out_rows[v + 1]):
            if not present[s.outputs[a]]:
                alone_bytes += s.size[s.outputs[a]]
        possible = possible and not s.once[v] and alone_bytes <= room_bytes
        for a in range(s.in_rows[v], s.in_rows[v + 1]):
            y = s.inputs[a]
            p = s.producer[y]
            if not present[y] and not s.asked[p]:
                s.asked[p] = True
                s.todo[count] = p
                count += 1
    s.counted[0], s.counted[1] = runs, runs
    if not possible:
        for a in range(count):
            s.asked[s.todo[a]] = False
        for a in range(runs):
            s.asked[s.ops[a]] = False
    return possible


@njit
def put_in_order(s: Sets) -> int:
    """Put the ops that are asked for into ``s.todo``, in op order; their number."""
    runs: int = s.counted[0]
    few = s.ops[:runs]
    if not runs or SCANNED * runs < few.max() - few.min():
        s.todo[:runs] = np.sort(few)
        return runs
    count = 0
    for v in range(few.min(), few.max() + 1):
        if s.asked[v]:
            s.todo[count] = v
            count += 1
    s.counted[1] += few.max() - few.min()
    return runs


@njit
def shrink(s: Sets, present: Flags, most_bytes: int, stays: Flags, work: int) -> bool:
    """Drop what can be made again from the rest within ``most_bytes``, until nothing can; whether it has come to that.

    ``s.shrinking`` says where it begins and, where it has stopped, where it is.

    stays  what is not dropped
    work   ops to look at before it stops
    """
    at, count, before, held_bytes = s.shrinking
    one = np.empty(1, np.int64)
    while work > 0 and (at or count > before):
        if not at:
            at, before = s.outputs.size, count
        at -= 1
        x = s.outputs[at]
        work -= 1
        if not present[x] or stays[x]:
            continue
        present[x] = False
        one[0] = x
        can = again_bytes(s, present, one, most_bytes - held_bytes + s.size[x], False) >= 0
        work -= s.counted[1]
        if can:
            held_bytes -= s.size[x]
            s.dropped[count] = x
            count += 1
        else:
            present[x] = True
    s.shrinking[:] = np.array((at, count, before, held_bytes))
    return not at and count == before


@njit
def together_bytes(s: Sets, present: Flags) -> int:
    """No schedule gets by with less, beside what is resident, to have all of a set in memory at once.

    Take the last runs of the ops that make its members. While the i-th of them runs, what the ones before it have made is there,
    and the op's own inputs, outputs and workspace. In the order in which the most of that is least, ops that need much beside the
    members that they make come first (Liu, 1987, for the children of a node).
    """
    makers = last_makers(s, present, 0)
    order = np.argsort(-s.needs[:makers])
    made_bytes = most_bytes = 0
    for i in order:
        v = s.ops[i]
        for a in range(s.out_rows[v], s.out_rows[v + 1]):
            if present[s.outputs[a]]:
                made_bytes += s.size[s.outputs[a]]
        most_bytes = max(most_bytes, made_bytes + s.needs[i])
    return most_bytes


@njit
def last_makers(s: Sets, present: Flags, held_bytes: int) -> int:
    """The ops that may have made a member last; their number.

    Of each, ``needs`` is what is in memory while it runs, ``adds`` how much more that is before it than after.
    """
    count = 0
    for v in range(s.workspace.size):
        made, more, read = 0, s.workspace[v], 0
        some = False
        for a in range(s.out_rows[v], s.out_rows[v + 1]):
            x = s.outputs[a]
            some = some or present[x]
            if present[x]:
                made += s.size[x]
            else:
                more += s.size[x]
        if not some:
            continue
        for a in range(s.in_rows[v], s.in_rows[v + 1]):
            x = s.inputs[a]
            if not present[x]:
                read += s.size[x]
        s.ops[count], s.needs[count], s.adds[count] = v, held_bytes + more + read, read - made
        count += 1
    return count
