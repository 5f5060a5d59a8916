"""How small a budget can be: the smallest peak of any schedule in hand. What is proved is in ``bounds`` and ``pebbling``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.incumbent import is_replayable
from planner.least.pebbling import fitting
from planner.on_demand import walk_search
from planner.process.clock import now_s
from planner.schedule import Schedule, keep_all, with_frees
from planner.simulate import simulate

LARGER = (0.001, 0.002, 0.005, 0.01, 0.02)  # by these shares
CLOSE = 0.005  # budgets are bisected to within this share
MANY_OPS = 10_000  # with more, walks take tenths of a second and more each: a second one is for the next budget
STATES = 500  # of a search for one of these budgets, and no fewer than there are ops: about as many are on its path


def smallest_known(graph: Graph, *, time_limit_s: float = 10.0) -> tuple[int, Schedule]:
    """The last of ``smaller_and_smaller``."""
    *_, last = smaller_and_smaller(graph, time_limit_s=time_limit_s)
    return last


def smaller_and_smaller(graph: Graph, *, time_limit_s: float, proved_bytes: int | None = None) -> Iterator[tuple[int, Schedule]]:
    """Schedules with smaller and smaller peaks, and these: keep all, what list walks find, what searches backwards find.

    Budgets are bisected between the smallest peak so far and what is proved to be too little, to within 0.5 %. In large graphs
    the first walk that fits a budget will do.

    time_limit_s  for all of it, half of it at most for walks, and one walk more; only keeping all is known where it is 0
    proved_bytes  no schedule needs less (default: ``least_bytes``)
    """
    began = now_s()
    whole = keep_all(graph)
    works = simulate(graph, whole).peak_bytes
    yield works, whole
    proved_bytes = least_bytes(graph) if proved_bytes is None else proved_bytes
    for find, deadline in ((_walked, began + time_limit_s / 2), (_pebbled, began + time_limit_s)):
        fails = proved_bytes - 1
        while works - fails > max(1, CLOSE * works) and now_s() < deadline:
            middle = (works + fails) // 2
            schedule = find(graph, middle, deadline)
            if schedule is None:
                fails = middle
            else:
                works = simulate(graph, schedule).peak_bytes
                yield works, schedule


def fitting_next_to(graph: Graph, budget_bytes: int, *, time_limit_s: float, proved_bytes: int | None = None) -> Schedule | None:
    """A schedule that fits, of those that ``smaller_and_smaller`` comes across and those for slightly larger budgets; None: none.

    What a search finds for one budget may fit a smaller one for which it finds nothing.
    """
    deadline = now_s() + time_limit_s
    for peak_bytes, schedule in smaller_and_smaller(graph, time_limit_s=time_limit_s, proved_bytes=proved_bytes):
        if peak_bytes <= budget_bytes:
            return schedule
    for share, find in itertools.product(LARGER, (_walked, _pebbled)):
        if now_s() >= deadline:
            break
        found = find(graph, int((1 + share) * budget_bytes), deadline)
        if found is not None and simulate(graph, found).peak_bytes <= budget_bytes:
            return found
    return None


def _walked(graph: Graph, budget_bytes: int, deadline: float) -> Schedule | None:
    walks, large = walk_search()(graph, budget_bytes, seed=0), len(graph.ops) > MANY_OPS
    walks.start(deadline=deadline, one=large)
    runs = None if walks.runs is None else walks.runs.tolist()
    return None if runs is None or not is_replayable(graph, runs, deadline) else with_frees(graph, runs)


def _pebbled(graph: Graph, budget_bytes: int, deadline: float) -> Schedule | None:
    return next(fitting(graph, budget_bytes, states=max(STATES, len(graph.ops)), time_limit_s=deadline - now_s()), None)
