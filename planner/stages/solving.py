"""Solving a stage model, relaxed or whole, while list walks are improved on another core."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from planner.on_demand import sat_minimise
from planner.process.clock import now_s
from planner.solvers.milp import Answer, Left, Outcome, run_apart
from planner.stages.branching import Branching
from planner.stages.model import Event, StageModel, walk
from planner.stages.search import StageSearch
from planner.stages.spans import SpanRow, relax

# Ops that list walks run while a MILP is solved: about what it takes as long as, which grows with its variables, faster than they
# do (without a backward pass much faster), but at first (easy budgets) and at most (hard ones) so many:
WORK, WORK_VARIABLES, FIRST_WORK, MORE_WORK, MOST_WORK = 100_000, 1_000, 400_000, 4, 25_000_000
ANNEALED = 2  # times as much, up to as many times the most, where most of it is annealing's
RELAXED_WORK, ANNEALED_RELAXED = 2_000, 12_000  # while its relaxation is solved, which takes longer with its variables cubed
# Each relaxation may take this share of the time left. So many in a row that raise the bound by less than this share of its
# distance to the incumbent, and a MILP is solved.
RELAX_SHARE, STALLED, CLIMB = 0.6, 2, 0.005
LEAST_RISE = 0.001  # and new rows on spans that raise it by less are the last ones
# Nearness to a whole number; the share of variables that are not which a solution may have, and in models with so many whole ones
# where a relaxation has raised the bound by this share of its distance
WHOLE, PARTS, MOST_PARTS, MANY_VARIABLES, MUCH_CLIMB = 0.01, 0.02, 0.1, 4_000, 0.1
SLACK = 1e-9  # a dual value of a row that does not bind
FIRST_SHARE = 0.4  # of the time for the first MILP at most, so that some is left for walks even where nothing comes of it
NODES = 2_000  # branch-and-bound nodes of one MILP at most
# Branch and bound on a relaxation: relaxations at first, and where those raise the bound by this share of its distance to the
# incumbent, in models of WORK_VARIABLES or fewer; what each takes as long as in ops of list walks; the share of the time left.
FIRST_SOLVES, BRANCH_RISE, BRANCH_SOLVES, SOLVE_WORK, BRANCH_SHARE = 60, 0.02, 400, 4_000, 0.3


def work_beside(search: StageSearch, model: StageModel, round_: int) -> int:
    """How many ops list walks may run while the MILP is solved."""
    if round_ == 1:
        return 0
    work: int = min(FIRST_WORK * MORE_WORK ** (round_ - 2), MOST_WORK)
    usual = int(WORK * (len(model.milp.cost) / WORK_VARIABLES) ** 2)
    return min(work, usual) if search.trained else max(work, ANNEALED * min(usual, MOST_WORK))


def solve_relaxed(
    search: StageSearch, model: StageModel, rows: list[SpanRow], latest: Sequence[int], finest_ns: float
) -> tuple[Answer | None, list[SpanRow]]:
    """Solve without asking for integers, and raise the bound; None where the MILP is to be solved. Comes with rows on spans that
    bind, for the next model.

    It takes a tenth of the MILP's time. Where most of its solution is whole, or the bound is far away, events for what that
    overflows, rounded, raise the bound as well. That nothing fits is for the MILP to say.
    """
    if not search.relaxes or search.stalled == STALLED or model.is_for_sat:
        search.stalled = 0
        return None, rows
    before_ns = search.searched_ns
    until = now_s() + RELAX_SHARE * search.left_s
    work = (RELAXED_WORK if search.trained else ANNEALED_RELAXED) * (len(model.milp.cost) / WORK_VARIABLES) ** 3
    least_rise = max(finest_ns, LEAST_RISE * search.distance_ns) / model.unit_ns

    def solve(**limits: Any) -> Answer:
        nonlocal rows
        answer, rows = relax(model, rows, least_rise=least_rise, **limits)
        return answer

    answer = _alongside(search, solve, latest, min(int(work), MOST_WORK), until, limited=False)
    search.raise_bound(model.bound_ns(answer), restricted=False)
    search.climbed = (search.searched_ns - before_ns) / max(1.0, search.distance_ns)
    search.stalled = 0 if search.climbed > CLIMB else search.stalled + 1
    if answer.values is None:
        search.relaxes = False
        return None, rows
    between = sum(min(x, 1 - x) > WHOLE for x, integer in zip(answer.values, model.milp.integer, strict=True) if integer)
    share = 0.0 if search.is_far else between / sum(model.milp.integer)
    search.relaxes = share <= MOST_PARTS
    most = MOST_PARTS if search.climbed > MUCH_CLIMB and sum(model.milp.integer) > MANY_VARIABLES else PARTS
    return answer if share <= most else None, rows


def solve_branching(
    search: StageSearch, model: StageModel, rows: list[SpanRow], latest: Sequence[int], aim: float
) -> tuple[Answer | None, list[SpanRow]]:
    """Branch on the relaxation of a small model where the bound is far away, and raise it; None where the first nodes raise it by
    little, and the MILP is to be solved.

    The answer is the node that has the bound, which is no whole solution. Comes with rows on spans for the next model.
    """
    if not (search.branches and search.is_far and search.trained and model.is_for_sat):
        return None, rows
    before_ns, cutoff = search.searched_ns, _cutoff(search, model, aim)
    least_rise_ns = BRANCH_RISE * search.distance_ns
    solves = int(BRANCH_SOLVES * min(1.0, WORK_VARIABLES / len(model.milp.cost)))
    found = rows

    def solve(time_limit_s: float, meanwhile: Callable[[threading.Event], None] | None) -> Answer:
        deadline = now_s() + time_limit_s

        def branch(left: Left) -> Answer:
            nonlocal found
            branching = Branching(model, rows, left, search.told)
            branching.go_on(FIRST_SOLVES, cutoff=cutoff, deadline=deadline)
            if (model.bound_ns(branching.answer) or 0) - before_ns > least_rise_ns:
                branching.go_on(solves, cutoff=cutoff, deadline=deadline)
            found = branching.rows()
            return branching.answer

        answer = run_apart(branch, time_limit_s, meanwhile)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf) if answer is None else answer

    until = now_s() + BRANCH_SHARE * search.left_s
    work = int(SOLVE_WORK * FIRST_SOLVES * (len(model.milp.cost) / WORK_VARIABLES) ** 2)
    answer = _alongside(search, solve, latest, min(work, MOST_WORK), until, limited=True)
    search.raise_bound(model.bound_ns(answer), restricted=False)
    search.branches = answer.values is not None and search.searched_ns - before_ns > least_rise_ns
    return (answer, found) if search.branches else (None, rows)


def idle_events(model: StageModel, answer: Answer) -> list[Event]:
    """Events whose memory rows do not bind a relaxation: without them its optimum is the same."""
    duals = answer.duals or []
    return [t for t, row in zip(model.events, model.memory, strict=True) if row < len(duals) and abs(duals[row]) < SLACK]


class Asked(NamedTuple):
    """What is asked of the solution of a MILP.

    tolerance_ns  what it may cost more than the least
    aim           costs from which on the gap is closed to this need not be told apart
    effort        of CP-SAT at most, if that finds a solution
    floor_ns      no solution takes less time (see ``StageModel.refines``)
    """

    tolerance_ns: float
    aim: float
    effort: float
    floor_ns: int


def solve_whole(search: StageSearch, model: StageModel, asked: Asked, latest: Sequence[int], work: int) -> Answer:
    """Solve the MILP, and meanwhile improve list walks with so much work."""
    cutoff = _cutoff(search, model, asked.aim)
    minimise, limited = partial(model.milp.minimise, node_limit=NODES), True
    better: SimpleQueue[list[int]] = SimpleQueue()
    if model.is_for_sat:
        limited = asked.effort < math.inf
        floor = max(0, asked.floor_ns - search.base) / model.unit_ns
        minimise = partial(sat_minimise(), model.milp, floor=floor, effort=asked.effort, at_once=better.put)
    share = 1.0 if work else FIRST_SHARE
    until = now_s() + share * search.left_s
    solve = partial(minimise, gap=asked.tolerance_ns / model.unit_ns, cutoff=cutoff, seed=search.seed)

    def more() -> Sequence[int] | None:
        """The walk along the best solution since the last one."""
        values = None
        while not better.empty():
            values = better.get()
        return None if values is None else walk(model, values).runs

    answer = _alongside(search, solve, latest, work, until, limited=limited, more=more)
    if answer.outcome is Outcome.STOPPED and answer.values is None and asked.effort < math.inf and not search.done():
        return solve_whole(search, model, asked._replace(effort=math.inf), latest, 0)
    return answer


def _cutoff(search: StageSearch, model: StageModel, aim: float) -> float:
    """Costs from which on the gap is closed to this need not be told apart."""
    if search.time_ns is None:
        return math.inf
    cutoff = ((1 - aim) * search.time_ns - search.base) / model.unit_ns
    return cutoff + 0.01 + 2e-6 * abs(cutoff)  # what ``bound_ns`` takes off for tolerances


def _alongside(
    search: StageSearch,
    solve: Callable[..., Answer],
    latest: Sequence[int],
    work: int,
    until: float,
    *,
    limited: bool,
    more: Callable[[], Sequence[int] | None] = lambda: None,
) -> Answer:
    """Solve, and meanwhile improve list walks with so much work, half of it spent on those along the ``latest`` solution.

    Where the solver takes longer, others go on from there (``StageSearch.beyond``).

    limited  whether it has another limit than the clock
    more     another sequence to follow, from a solution on the way
    """

    def walk_on(solved: threading.Event) -> None:
        search.walks.follow(latest, work // 2, deadline=search.deadline)
        search.walks.improve(work // 2, deadline=search.deadline)
        search.take_walk()
        search.walk_beyond(solved, until, more)

    answer = solve(time_limit_s=until - now_s(), meanwhile=walk_on if work else None)
    # What has no other limit was stopped by the clock; CP-SAT stops some milliseconds before its time is up.
    struck = answer.outcome is Outcome.STOPPED and (not limited or now_s() >= until)
    search.tell_cut_short(struck)
    if struck or now_s() >= search.deadline:
        search.take_beyond()
    return answer
