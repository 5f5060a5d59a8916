"""``plan``: from a model (or a graph) and a budget to a schedule and its proof."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from numbers import Integral
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from graphs.devices import DEVICES
from graphs.errors import InfeasibleBudget, InputError, NoScheduleFound, a_kind
from graphs.ir import Graph, check_graph
from planner.bounds import least_bytes
from planner.budget import format_bytes, is_share, resolve_budget
from planner.early import in_halves, with_early_kept
from planner.least.smallest import smaller_and_smaller
from planner.live import shown
from planner.methods import Solve
from planner.methods import method as method_named
from planner.process.clock import now_s
from planner.process.pauses import rare_collections
from planner.result import OTHER_ORDER, Plan, Status
from planner.schedule import Compute, Free, Schedule, computes, first_runs, in_graph_order, keep_all
from planner.simulate import simulate

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graphs.capture import Step

log = logging.getLogger("belady")
METHOD = "cutting_stages"
COSTS = ("auto", "roofline", "measured")
MOST = 2**62  # bytes, or ns, of a graph in all
MESSAGE_S, MESSAGE_SHARE = 10.0, 0.05  # at most, to find out what an error message says; share of the time limit beyond it
# At least, to make a plan fit its halves: this share of the time limit, or so many seconds, but no more than a quarter of it; and
# until when the smallest budget known is looked for: so much beyond it.
LATE_SHARE, LATE_S, LATEST_SHARE, LATEST_S = 0.08, 0.5, 0.1, 0.8
_KINDS: dict[str, type] = {"bool": bool, "int": int, "str": str}  # of options, by their annotation


def plan(
    model: nn.Module | Step | Graph,
    budget: int | float | str,
    *,
    inputs: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    costs: str = "auto",
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    method: str = METHOD,
    gap: float = 0.005,
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> Plan:
    """The cheapest schedule found for a budget, and a proof of how far from optimal it can be at most.

    model         an ``nn.Module`` (its training step is captured first), or a Step or Graph captured before
    budget        bytes (int, "6GiB") or a share of the keep-all peak (float in (0, 1]); counts everything the step holds
    inputs, loss  see ``graphs.capture.capture``; as the device and autocast only for a module
    costs         for a module, or a Step that has none yet (``capture`` gives none): "roofline" (modelled; needs no device),
                  "measured" (every distinct op timed on the device, with what it allocates beside its outputs), "auto":
                  measured on CUDA, where workspace counts, else roofline; or the name of a device ("h100",
                  ``graphs.devices.DEVICES``) for its roofline
    gap           stop when (time - bound) / time is at most this
    time_limit_s  stop after this long with the best found so far; where a step's plan must be made to fit its two halves
                  (``Plan.module``), up to a tenth more
    start         a schedule to start from, say the one of an online run
    progress      called while solving (see the method; default: a line on a terminal, with plan, bound and gap so far)
    options       further options of the method

    Raises InfeasibleBudget where no schedule can fit, NoScheduleFound where none was found though none was ruled out,
    CaptureError where the model cannot be captured, InputError for anything else that cannot be used. Logs a warning (logger
    "belady") where a step's plan is too tight to train with (``Plan.module``); its notes then have ``halves``.
    """
    is_share(budget)  # what cannot be used is refused before the model is captured, which may take long
    checked_method(method, {"gap": gap, "time_limit_s": time_limit_s, "seed": seed, "progress": progress} | options)
    target = step_of(model, inputs=inputs, loss=loss, costs=costs, device=device, autocast=autocast)
    graph, copied_bytes = target if isinstance(target, Graph) else target.graph, copied_bytes_of(target)
    budget_bytes = resolve_budget(budget, simulate(graph, keep_all(graph)).peak_bytes)
    with shown(progress, f"{method} in {format_bytes(budget_bytes)}", graph) as told:
        found = plan_halves(
            graph,
            budget_bytes,
            copied_bytes=copied_bytes,
            method=method,
            gap=gap,
            time_limit_s=time_limit_s,
            seed=seed,
            start=start,
            progress=told,
            **options,
        )
    if "halves" in found.notes:
        log.warning("the plan of %s in %s bytes %s", graph.name, f"{budget_bytes:,}", found.notes["halves"])
    return found if isinstance(target, Graph) else replace(found, step=target)


def plan_halves(
    graph: Graph,
    budget_bytes: int,
    *,
    copied_bytes: int | None = 0,
    method: str = METHOD,
    gap: float = 0.005,
    time_limit_s: float = 60.0,
    **options: Any,
) -> Plan:
    """``solve_halves``, whose plan has a schedule: raises InfeasibleBudget or NoScheduleFound where there is none."""
    found = solve_halves(
        graph, budget_bytes, copied_bytes=copied_bytes, method=method, gap=gap, time_limit_s=time_limit_s, **options
    )
    if found.status is Status.INFEASIBLE:
        raise infeasible(graph, budget_bytes, found, time_limit_s=time_limit_s - found.wall_s, copied_bytes=copied_bytes)
    if found.status is Status.UNKNOWN:
        interrupted = found.interrupted
        more_s = 0.0 if interrupted else (1 + MESSAGE_SHARE) * time_limit_s - found.wall_s
        works_bytes = _smallest(graph, more_s, copied_bytes).works_bytes
        raise NoScheduleFound(
            f"{method} found no schedule of {graph.name} in {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) within "
            f"{found.wall_s:.1f} s ({found.notes.get('stopped', 'nothing else to try')}), but did not rule one out; "
            f"{works_bytes:,} bytes are known to work",
            works_bytes=None if interrupted else works_bytes,
        )
    return found


def solve(graph: Graph, budget_bytes: int, *, method: str = METHOD, **options: object) -> Plan:
    """Run one method on a graph and return its Plan whatever its status.

    budget_bytes  whole bytes; shares and units are for ``plan``
    options       the method's own, with its own defaults (``cutting_stages`` ends within a gap of 0.001)

    Raises InputError for unknown names and options.
    """
    check_graph(graph, "solve")
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, Integral) or budget_bytes < 0:
        raise InputError(f"solve takes a budget in whole bytes, not {budget_bytes!r}; shares and units are for plan")
    run = checked_method(method, options)
    check_numbers(graph)
    if (start := options.get("start")) is not None:
        if not isinstance(start, tuple | list) or not all(_is_step(step) for step in start):
            given = a_kind(start) + " of other things" * isinstance(start, tuple | list)
            raise InputError(
                f"start must be a schedule, a tuple of Compute and Free (that of a Plan or a Run is its .schedule), not {given}"
            )
        options["start"] = schedule = tuple(start)
        simulate(graph, schedule)  # an unusable start is the caller's mistake: say so before solving
    with rare_collections(full=False):
        return run(graph, int(budget_bytes), **options)


def checked_method(method: str, options: Mapping[str, object]) -> Solve:
    """The method of that name. Raises InputError where there is none, or where it cannot use these options."""
    run = method_named(method)
    known = inspect.signature(run).parameters
    for name in options:
        if name not in known:
            offered = ", ".join(list(known)[2:])
            raise InputError(f"method {method} has no option {name!r}; it has: {offered}")
    check_options(options)
    for name, given in options.items():
        kind = _KINDS.get(str(known[name].annotation))
        if kind is not None and type(given) is not kind:
            raise InputError(f"{name} must be {a_kind(kind())}, not {given!r}")
    return run


def _is_step(step: object) -> bool:
    """Whether it is a step of a schedule, for an op or value by its number."""
    return (isinstance(step, Compute) and type(step.op) is int) or (isinstance(step, Free) and type(step.value) is int)


def solve_halves(
    graph: Graph,
    budget_bytes: int,
    *,
    copied_bytes: int | None = 0,
    method: str = METHOD,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    **options: Any,
) -> Plan:
    """``solve`` for the graph of a training step that will run in two halves (``Plan.module``): what the forward gives back, the
    loss and new buffers, is there when the backward begins, stays from when it is first made, and fits in the budget.

    Most schedules are so, or become so without a byte more. One that drops the loss or a new buffer, to make it again in the
    backward with the rest of its op, may not; then the rest of the time (at least a twelfth of the limit) goes into the graph in
    which they count throughout, from that schedule on. What was proved without that stays proved. Where that finds nothing, the
    smallest schedule known is tried (found before a tenth of the limit and a second have passed beyond it). Should it be too
    large, the plan is ``solve``'s own: one that runs as one piece, without a module. Its notes say so (``halves``), and how many
    bytes are known to be enough (``halves_bytes``).

    copied_bytes  needed beside the schedule in the second half, see ``planner.execution.halves.copied_bytes``; None: it runs as
                  one piece
    """
    found = solve(graph, budget_bytes, method=method, gap=gap, time_limit_s=time_limit_s, **options)
    if copied_bytes is None or found.schedule is None:
        return found
    one_piece = found.schedule
    schedule, needs_bytes = in_halves(graph, one_piece, copied_bytes)
    notes, wall_s = found.notes, found.wall_s
    if needs_bytes is None or needs_bytes > budget_bytes:
        if found.interrupted:
            return _in_one_piece(found, needs_bytes or _smallest(graph, 0.0, copied_bytes).works_bytes)
        tried = []
        if options.get("start") is not None:
            tried = [in_halves(graph, tuple(options["start"]), copied_bytes)]
        in_hand = [*tried, *([(schedule, needs_bytes)] if method == METHOD else [])]  # what is a little too large it makes fit
        if in_hand:  # a backward that begins too early is of no use
            usable = [(bytes_, held) for held, bytes_ in in_hand if bytes_ is not None]
            options["start"] = min(usable, key=itemgetter(0))[1] if usable else None
        left_s = max(time_limit_s - wall_s, LATE_SHARE * time_limit_s, min(LATE_S, time_limit_s / 4))
        kept = with_early_kept(graph, copied_bytes)
        again = solve(kept, budget_bytes, method=method, gap=gap, time_limit_s=left_s, **options)
        wall_s += again.wall_s
        if again.schedule is not None:
            tried.append(in_halves(graph, again.schedule, copied_bytes))
        fitting = [s for s, bytes_ in tried if bytes_ is not None and bytes_ <= budget_bytes]
        notes = {**(found if again.schedule is None else again).notes, "one_piece_time_ns": found.time_ns}
        if "cut_short" in found.notes or found.notes.get("stopped") == "time limit":  # so it depends on the clock
            notes["cut_short"] = True
        if not fitting:
            began = now_s()
            left_s = 0.0 if again.interrupted else max(0.0, (1 + LATEST_SHARE) * time_limit_s + LATEST_S - wall_s)
            known = _smallest(graph, left_s, copied_bytes)
            wall_s += now_s() - began
            stopped = {"stopped": "interrupted"} if again.interrupted or known.interrupted else {}
            if known.works_bytes > budget_bytes or method != METHOD:  # a published method's plan is what that method finds
                found = replace(found, wall_s=wall_s, notes=found.notes | stopped)
                return _in_one_piece(found, known.works_bytes, f" for {METHOD}" * (method != METHOD))
            fitting, notes = [known.schedule], notes | stopped | {"found_by": "the smallest known"}
        schedule = min(fitting, key=lambda other: simulate(graph, other).time_ns)
        notes = {key: note for key, note in notes.items() if key not in ("order", "order_bound_ns")}  # those of the other graph
        if not in_graph_order(computes(schedule)):
            notes["order"] = OTHER_ORDER
            if (order_bound_ns := found.notes.get("order_bound_ns", found.bound_ns)) is not None:
                notes["order_bound_ns"] = order_bound_ns
    any_order_bound_ns = found.any_order_bound_ns or graph.keep_all_time_ns
    return Plan.of(
        graph,
        budget_bytes,
        schedule,
        method=found.method,
        seed=found.seed,
        wall_s=wall_s,
        bound_ns=found.bound_ns if in_graph_order(computes(schedule)) else any_order_bound_ns,
        restricted_bound_ns=found.restricted_bound_ns if _same_order(one_piece, schedule) else None,
        any_order_bound_ns=found.any_order_bound_ns,
        gap=gap,
        notes=notes,
    )


def _in_one_piece(found: Plan, enough_bytes: int, whose: str = "") -> Plan:
    """A plan too large for its halves, with a note that says so, and how many bytes are known to be enough."""
    halves = (
        "runs as one piece only, without a module, whose call keeps the loss and the new buffers until its end; "
        f"plan for {enough_bytes:,} bytes, which are known to be enough{whose}"
    )
    return replace(found, notes=found.notes | {"halves": halves, "halves_bytes": enough_bytes})


def _same_order(one: Schedule, other: Schedule) -> bool:
    """Whether ops run for the first time in the same order."""
    return first_runs(computes(one)) == first_runs(computes(other))


def check_numbers(graph: Graph) -> None:
    """Refuse bytes and times that 64-bit integers cannot hold with room to spare. Raises InputError."""
    total_bytes = sum(value.size_bytes for value in graph.values) + sum(op.workspace_bytes for op in graph.ops)
    check_sums(graph.name, total_bytes, graph.keep_all_time_ns)


def check_sums(name: str, total_bytes: int, total_ns: int) -> None:
    """The same, of sums."""
    for what, total, unit in (("bytes", total_bytes, "bytes"), ("times", total_ns, "ns")):
        if total >= MOST:
            raise InputError(f"{name}: its {what} add up to 2^{total.bit_length() - 1} {unit} or more; below 2^62 is needed")


def check_options(options: Mapping[str, object]) -> None:
    """Refuse what no method can use: a gap outside of [0, 1), a time limit that is no time, a seed solvers cannot take."""

    def number(name: str) -> float:
        given = options[name]
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise InputError(f"{name} must be a number, not {given!r}")
        return given

    progress = options.get("progress")
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be a function or None, not {progress!r}")
    if "gap" in options and not 0 <= number("gap") < 1:
        raise InputError(f"gap must be at least 0 and below 1 (0.01 is one per cent), not {options['gap']!r}")
    if "time_limit_s" in options and not 0 <= number("time_limit_s") <= 1e7:
        raise InputError(f"time_limit_s must be between 0 and 10,000,000 seconds, not {options['time_limit_s']!r}")
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed must be an integer from 0 to 2147483647, not {seed!r}")


def infeasible(
    graph: Graph,
    budget_bytes: int,
    plan: Plan | None = None,
    *,
    time_limit_s: float = MESSAGE_S,
    copied_bytes: int | None = None,
) -> InfeasibleBudget:
    """The error for a budget that is proved too small: what is proved, and what is known to work.

    plan          of status INFEASIBLE: where its proof is for one order of first executions, the message says so
    time_limit_s  to find out what works, besides keeping everything
    copied_bytes  as for ``solve_halves``: what works is then what works in halves
    """
    known = plan.notes.get("least_bytes", 0) if plan is not None else 0
    proved, works = max(known, least_bytes(graph)), _smallest(graph, time_limit_s, copied_bytes).works_bytes
    reason = f": {plan.notes.get('infeasible')}" if plan is not None and proved <= budget_bytes else ""
    proved = max(proved, budget_bytes + 1)  # where only the planner's own proof says so
    asked = f"{budget_bytes:,} bytes ({format_bytes(budget_bytes)})"
    whole = "; an int is bytes, the whole keep-all peak is 1.0" if budget_bytes == 1 else ""
    return InfeasibleBudget(
        f"{graph.name} cannot run in {asked}{reason}; every schedule needs at least "
        f"{proved:,} bytes, and the smallest budget known to work is {works:,} ({format_bytes(works)}){whole}",
        budget_bytes=budget_bytes,
        proved_bytes=proved,
        works_bytes=works,
    )


class _Smallest(NamedTuple):
    """The smallest budget known to work, its schedule, and whether Ctrl-C ended the search for it."""

    works_bytes: int
    schedule: Schedule
    interrupted: bool = False


def _smallest(graph: Graph, time_limit_s: float, copied_bytes: int | None = None) -> _Smallest:
    """At least keeping everything works, if there is no time for more, and on Ctrl-C.

    copied_bytes  as for ``solve_halves``: what works in halves; None: as one piece
    """
    schedule, works_bytes = in_halves(graph, keep_all(graph), copied_bytes)
    assert works_bytes is not None  # it is in graph order
    if time_limit_s <= 0:
        return _Smallest(works_bytes, schedule)
    interrupted = True
    with suppress(KeyboardInterrupt):
        found_so_far = smaller_and_smaller(with_early_kept(graph, copied_bytes), time_limit_s=min(MESSAGE_S, time_limit_s))
        for _, found in islice(found_so_far, 1, None):  # the first keeps all
            held, needs_bytes = in_halves(graph, found, copied_bytes)
            if needs_bytes is not None and needs_bytes < works_bytes:
                works_bytes, schedule = needs_bytes, held
        interrupted = False
    return _Smallest(works_bytes, schedule, interrupted)


def step_of(
    model: nn.Module | Step | Graph,
    *,
    inputs: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    costs: str = "auto",
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
) -> Step | Graph:
    """Capture a module and price its ops, or those of a Step that has no costs; others, and a Graph, are taken as they are.
    Raises InputError for options it has no use for."""
    _check_costs(costs)
    if not isinstance(model, Graph):
        from graphs.capture import Step, capture

        if isinstance(model, Plan):
            raise InputError("expected a torch.nn.Module, a captured Step or a Graph, not a Plan; its .step or .graph is one")
        if not isinstance(model, Step):
            return with_costs(capture(model, inputs, loss=loss, device=device, autocast=autocast), costs)
    for name, option in {"inputs": inputs, "loss": loss, "device": device, "autocast": autocast}.items():
        if option is not None:
            raise InputError(f"{name}= has no meaning for {a_kind(model)}, which is captured; it is for a model")
    if costs != "auto" and (isinstance(model, Graph) or is_priced(model)):
        raise InputError(f"costs= has no meaning for {a_kind(model)}, whose ops have costs; it is for a model or a Step without")
    return model if isinstance(model, Graph) else priced(model, costs)


def copied_bytes_of(target: Step | Graph) -> int | None:
    """What ``solve_halves`` has to know of a step; None for a Graph, which nothing will train with."""
    if isinstance(target, Graph):
        return None
    from planner.execution.halves import copied_bytes

    return copied_bytes(target)


def graph_of(target: Step | Graph, what: str) -> Graph:
    """The graph of a Step or Graph. Raises InputError for anything else; ``what`` names the function that was called."""
    return target if isinstance(target, Graph) else priced(captured(target, what)).graph


def captured(target: object, what: str) -> Step:
    """A captured step, as it is. Raises InputError for anything else; ``what`` names the function that takes it or a Graph."""
    from graphs.capture import Step

    if isinstance(target, Step):
        return target
    raise InputError(
        f"{what} takes a captured Step or a Graph, not {a_kind(target)}; capture(model, inputs, loss=...) makes a Step, and "
        f"plan(model, ...).step is one"
    )


def is_priced(step: Step) -> bool:
    """Whether ops have costs: after ``capture`` none has any."""
    return step.graph.costs != "" or step.graph.keep_all_time_ns > 0


def priced(step: Step, costs: str = "auto") -> Step:
    """A step whose ops have costs: where none has any, these, which are as for ``plan``."""
    return step if is_priced(step) else with_costs(step, costs)


def with_costs(step: Step, costs: str, *, progress: Callable[[int, int], None] | None = None) -> Step:
    """The step with its ops priced for the device it is on.

    costs     "roofline": modelled from FLOPs and bytes; "measured": every distinct op timed there, once (cached on disk), and
              its workspace measured; "auto": measured on CUDA, else roofline; the roofline of a device: its name
    progress  called with how many ops are timed and how many there are (default: a bar on a terminal)
    """
    _check_costs(costs)
    if costs == "auto":
        costs = "measured" if step.device.type == "cuda" else "roofline"
    if costs == "roofline" or costs in DEVICES:
        from graphs.costs import roofline

        return roofline(step, costs) if costs in DEVICES else roofline(step)
    from graphs.profile import measured

    return measured(step, progress=progress)


def _check_costs(costs: str) -> None:
    if costs not in COSTS and costs not in DEVICES:
        raise InputError(f"unknown costs {costs!r}; there are: {', '.join(COSTS)}, and the devices {', '.join(DEVICES)}")
