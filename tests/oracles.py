"""Brute force for small graphs: slow, plain, and sharing no code with what it checks.

``least_time`` and ``least_budget`` search all schedules that ``planner.simulate`` calls valid. ``naive_peak`` replays a
schedule by keeping a list of every copy of every storage. Good for graphs of up to six or seven ops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from graphs.ir import Graph
from planner.schedule import Compute, Free, Schedule

# A state of the search: which evictable values are in memory, and which ops have run at least once. Whatever else decides
# what may come next (order of first runs, of random draws, of effects) follows from the second.
State = tuple[frozenset[int], frozenset[int]]


def least_time(graph: Graph, budget_bytes: int, *, keep_order: bool) -> tuple[int, Schedule] | None:
    """Least time of any valid schedule whose peak is at most ``budget_bytes``, and one such schedule; None if there is none.

    keep_order  first runs of ops are in graph order; runs after the first may come anywhere

    Uniform-cost search. Two facts keep it small without losing any optimum: frees cost nothing and can always wait until
    an op would not fit, and having more in memory never hurts, so only inclusion-minimal sets of frees are tried.
    """
    return _search(graph, budget_bytes, keep_order=keep_order, timed=True)


def least_budget(graph: Graph, keep_order: bool) -> int:
    """Smallest budget for which a valid schedule exists (``keep_order`` as in ``least_time``)."""
    low = graph.resident_bytes
    high = low + sum(value.size_bytes for value in graph.values) + sum(op.workspace_bytes for op in graph.ops)
    high += max((sum(graph.values[v].size_bytes for v in op.outputs) for op in graph.ops), default=0)
    while low < high:
        middle = (low + high) // 2
        if _search(graph, middle, keep_order=keep_order, timed=False) is None:
            low = middle + 1
        else:
            high = middle
    return low


def naive_peak(graph: Graph, schedule: Schedule) -> int:
    """Peak of a valid schedule, by listing every copy of every storage at every moment."""
    copies = sorted(graph.resident)

    def held(more: list[int], workspace_bytes: int) -> int:
        return sum(graph.values[v].size_bytes for v in copies + more) + workspace_bytes

    moments = [held([], 0)]
    for step in schedule:
        if isinstance(step, Free):
            copies.remove(step.value)
            moments.append(held([], 0))
            continue
        op = graph.ops[step.op]
        moments.append(held(list(op.outputs), op.workspace_bytes))
        for v in op.outputs:
            if v in copies:
                copies.remove(v)
            copies.append(v)
        moments.append(held([], 0))
    return max(moments)


def naive_time(graph: Graph, schedule: Schedule) -> int:
    """Time of a schedule: every run counts."""
    return sum(graph.ops[step.op].time_ns for step in schedule if isinstance(step, Compute))


def _search(graph: Graph, budget_bytes: int, *, keep_order: bool, timed: bool) -> tuple[int, Schedule] | None:
    if graph.resident_bytes > budget_bytes:
        return None
    wanted = graph.outputs - graph.resident
    everything = frozenset(range(len(graph.ops)))
    start: State = (frozenset(), frozenset())
    best = {start: 0}
    came_from: dict[State, tuple[State, Schedule]] = {}
    queue: list[tuple[int, int, State]] = [(0, 0, start)]
    pushed = 0
    closed: set[State] = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in closed:
            continue
        closed.add(state)
        present, ran = state
        if ran == everything and wanted <= present:
            steps: list[Schedule] = []
            while state in came_from:
                state, how = came_from[state]
                steps.append(how)
            schedule = tuple(step for how in reversed(steps) for step in how)
            return naive_time(graph, schedule), schedule
        for i in everything:
            if not _may_run(graph, i, state, keep_order=keep_order):
                continue
            op = graph.ops[i]
            for freed in _frees(graph, i, present, budget_bytes):
                after: State = ((present - freed) | frozenset(op.outputs), ran | {i})
                reached = cost + (op.time_ns if timed else 0)
                if after not in closed and reached < best.get(after, reached + 1):
                    best[after] = reached
                    came_from[after] = (state, (*(Free(v) for v in sorted(freed)), Compute(i)))
                    pushed += 1
                    heapq.heappush(queue, (reached, pushed, after))
    return None


def _may_run(graph: Graph, i: int, state: State, *, keep_order: bool) -> bool:
    present, ran = state
    op = graph.ops[i]
    if any(v not in present and v not in graph.resident for v in op.inputs):
        return False
    if i in ran:
        return not op.effect
    if keep_order and len(ran) != i:
        return False
    later = [graph.ops[j] for j in ran if j > i]
    return not (op.random and any(o.random for o in later)) and not (op.effect and any(o.effect for o in later))


def _frees(graph: Graph, i: int, present: frozenset[int], budget_bytes: int) -> Iterator[frozenset[int]]:
    """Every inclusion-minimal set of values to free so that op ``i`` fits in the budget."""
    op = graph.ops[i]
    sizes = {v: graph.values[v].size_bytes for v in present}
    during = graph.resident_bytes + sum(sizes.values()) + op.workspace_bytes
    excess = during + sum(graph.values[v].size_bytes for v in op.outputs) - budget_bytes
    if excess <= 0:
        yield frozenset()
        return
    candidates = sorted((v for v in present if v not in op.inputs and sizes[v]), key=lambda v: -sizes[v])

    def extend(at: int, chosen: tuple[int, ...], missing: int) -> Iterator[frozenset[int]]:
        if missing <= 0:
            # Sizes fall along ``chosen``, so the set is minimal if it fails without its smallest member, the last one.
            yield frozenset(chosen)
            return
        for k in range(at, len(candidates)):
            yield from extend(k + 1, (*chosen, candidates[k]), missing - sizes[candidates[k]])

    yield from extend(0, (), excess)
