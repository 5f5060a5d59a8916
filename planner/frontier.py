"""Many budgets at once: plans that are monotone and share work, and the smallest budget that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graphs.errors import InputError, quoted
from graphs.ir import Graph
from planner.bounds import least_bytes
from planner.budget import format_bytes, listed, resolve_budget
from planner.least.pebbling import least_peak
from planner.least.smallest import smaller_and_smaller
from planner.live import on_terminal, shown, smallest_line
from planner.plan import check_numbers, check_options, checked_method, graph_of, solve, step_of
from planner.process.clock import now_s
from planner.result import Plan, Status
from planner.schedule import Schedule, computes, in_graph_order, keep_all
from planner.simulate import simulate

if TYPE_CHECKING:
    from torch import nn

    from graphs.capture import Step


def plans(
    model: nn.Module | Step | Graph,
    budgets: Sequence[int | float | str] | int | float | str,
    *,
    method: str = "cutting_stages",
    gap: float = 0.005,
    time_limit_s: float = 60.0,
    seed: int = 0,
    done: Callable[[Plan], None] | None = None,
    **options: Any,
) -> list[Plan]:
    """A plan for each budget, in the order asked for; a larger budget never costs more time.

    Nor has it a larger bound, unless the plan for a smaller one has another order of first executions than the graph.

    model, budgets  as for ``plan``, of the latter several or one; further options: its inputs, loss, costs, device, autocast and
                    progress, and those of the method
    time_limit_s    for each budget
    done            called with each plan as it is found, smallest budget first

    The schedules are those of ``solve``: unlike ``plan``, which then looks for another, this takes one that is too tight for two
    halves (``Plan.module``) where it costs least, or a larger budget could cost more than a smaller one.

    Budgets are solved from the smallest up, each starting from the plan before, which fits it too. A bound proved for a budget
    holds for all smaller ones: these are handed down at the end. Nothing is raised for a budget that cannot be had: its Plan
    has no schedule, and its status says what is known. Ctrl-C ends the budget that is being solved with its best so far, and
    the rest without solving: a plan for a smaller budget stands in for each.
    """
    budgets = listed(budgets, "plans")
    capture = {name: options.pop(name) for name in ("inputs", "loss", "costs", "device", "autocast") if name in options}
    checked_method(method, {"gap": gap, "time_limit_s": time_limit_s, "seed": seed} | options)  # before a model is captured
    if done is not None and not callable(done):
        raise InputError(f"done must be a function that takes a Plan, not {quoted(done)}")
    target = step_of(model, **capture)
    graph = target if isinstance(target, Graph) else target.graph
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    wanted = [resolve_budget(budget, peak_bytes) for budget in budgets]
    if not wanted:
        raise InputError("plans needs at least one budget")
    found: dict[int, Plan] = {}
    start: Schedule | None = options.pop("start", None)
    best: Schedule | None = None
    interrupted = False
    progress, ascending = options.pop("progress", None), sorted(set(wanted))
    for number, budget_bytes in enumerate(ascending, start=1):
        within = partial(
            solve,
            graph,
            budget_bytes,
            method=method,
            gap=gap,
            seed=seed,
            start=_cheapest(graph, budget_bytes, best, start),
            **options,
        )
        what = f"{method} in {format_bytes(budget_bytes)} ({number} of {len(ascending)})"
        try:
            with shown(progress, what, graph) as told:
                one = within(time_limit_s=0.0 if interrupted else time_limit_s, progress=told)
        except KeyboardInterrupt:  # between two methods' runs, which take note of it themselves
            interrupted = True
            one = within(time_limit_s=0.0)
        if interrupted and one.notes.get("stopped") == "time limit":
            one = replace(one, notes={**one.notes, "stopped": "interrupted"})
        interrupted = interrupted or one.interrupted
        one = _cheaper(one, best, gap)
        best = one.schedule or best
        found[budget_bytes] = one
        if done is not None:
            done(one if isinstance(target, Graph) else replace(one, step=target))
    bound_ns = any_order_ns = 0
    for budget_bytes in sorted(found, reverse=True):
        one = found[budget_bytes]
        bound_ns = max(bound_ns, one.bound_ns or 0)
        any_order_ns = max(any_order_ns, one.any_order_bound_ns or 0)
        if one.schedule is not None and one.time_ns is not None:
            any_order_ns = min(any_order_ns, one.time_ns)
            is_ordered = in_graph_order(computes(one.schedule))  # bounds but those of all orders hold for no other
            if is_ordered:
                bound_ns = min(bound_ns, one.time_ns)
            proved_ns = bound_ns if is_ordered else max(any_order_ns, one.bound_ns or 0)
            found[budget_bytes] = _again(one, one.schedule, proved_ns, gap, any_order_ns)
        else:
            found[budget_bytes] = replace(one, bound_ns=bound_ns, any_order_bound_ns=any_order_ns or None)
    return [found[b] if isinstance(target, Graph) else replace(found[b], step=target) for b in wanted]


def _cheapest(graph: Graph, budget_bytes: int, best: Schedule | None, start: Schedule | None) -> Schedule | None:
    """Of the last plan's schedule and the caller's the one that takes less, if the latter fits."""
    if best is None or start is None:
        return best or start
    trace = simulate(graph, start)
    return start if trace.peak_bytes <= budget_bytes and trace.time_ns < simulate(graph, best).time_ns else best


def _cheaper(one: Plan, other: Schedule | None, gap: float) -> Plan:
    """The plan with a schedule of a smaller budget, where the method did not start from it and found nothing as cheap."""
    if other is None or (one.time_ns is not None and one.time_ns <= simulate(one.graph, other).time_ns):
        return one
    return _again(one, other, one.bound_ns or 0, gap, one.any_order_bound_ns)


def _again(one: Plan, schedule: Schedule, bound_ns: int, gap: float, any_order_bound_ns: int | None) -> Plan:
    return Plan.of(
        one.graph,
        one.budget_bytes,
        schedule,
        method=one.method,
        seed=one.seed,
        wall_s=one.wall_s,
        bound_ns=bound_ns,
        restricted_bound_ns=one.restricted_bound_ns,
        any_order_bound_ns=any_order_bound_ns or None,
        gap=gap,
        notes=one.notes,
    )


@dataclass(frozen=True)
class MinBudget:
    """How small a budget can be.

    works_bytes   the peak of ``schedule``: this budget works
    proved_bytes  no schedule fits in less, in whatever order
    interrupted   whether Ctrl-C ended the search
    """

    works_bytes: int
    schedule: Schedule = field(repr=False)
    proved_bytes: int
    interrupted: bool = False


def min_budget(
    target: Step | Graph,
    *,
    time_limit_s: float = 30.0,
    within: float = 0.01,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> MinBudget:
    """The smallest budget with a schedule in hand, and a proved minimum that holds for schedules in any order.

    A backward search (``planner.least.pebbling``) proves the minimum, and often comes with a schedule that attains it. Else list
    walks and such searches find a budget that works, and budgets are bisected between that and what nothing was found for. The
    schedule may be a dear one: a plan for that budget looks for a cheaper one.

    time_limit_s  for all of it: at most a third for what is proved, half for walks and searches, a tenth for each solve. Ctrl-C
                  stops at once. Either way the best so far is returned
    within        stop where two budgets are this close, relatively
    progress      called with what works and what is proved to be needed, in bytes, as either changes (default: a line on a
                  terminal)

    Raises InputError for what is neither Step nor Graph, and for a limit, a ``within`` or a ``progress`` that is none.
    """
    if progress is None:
        with on_terminal() as show:
            return min_budget(target, time_limit_s=time_limit_s, within=within, seed=seed, progress=smallest_line(show))
    graph = graph_of(target, "min_budget")
    if isinstance(within, bool) or not isinstance(within, int | float) or not 0 <= within < 1:
        raise InputError(f"within must be at least 0 and below 1 (0.01 is one per cent), not {within!r}")
    check_options({"time_limit_s": time_limit_s, "seed": seed, "progress": progress})
    check_numbers(graph)
    deadline = now_s() + time_limit_s
    schedule = keep_all(graph)
    works, proved = simulate(graph, schedule).peak_bytes, least_bytes(graph)
    interrupted = False

    def take(found: Schedule) -> None:
        nonlocal works, schedule
        works, schedule = simulate(graph, found).peak_bytes, found
        progress(works, proved)

    def prove(needed_bytes: int) -> None:
        nonlocal proved
        proved = max(proved, needed_bytes)
        progress(works, proved)

    try:
        progress(works, proved)
        needed_bytes, attained = least_peak(graph, time_limit_s=time_limit_s / 3, proves=prove)
        prove(needed_bytes)
        if attained is not None:
            take(attained)
            return MinBudget(works, schedule, proved)
        for _, known in smaller_and_smaller(graph, time_limit_s=time_limit_s / 2, proved_bytes=proved):
            take(known)
        missed = proved - 1  # nothing was found for this budget
        while works - missed > max(1, within * works) and not interrupted and now_s() < deadline:
            middle = (works + missed) // 2
            limit_s = max(0.1, min(0.1 * time_limit_s, deadline - now_s()))
            found = solve(graph, middle, gap=0.99, time_limit_s=limit_s, seed=seed)
            if found.schedule is not None:
                take(found.schedule)
            else:
                missed = middle
                if found.status is Status.INFEASIBLE:
                    prove(middle + 1)
            interrupted = found.interrupted
    except KeyboardInterrupt:
        interrupted = True
    return MinBudget(works, schedule, proved, interrupted)
