"""A Milp over zeros and ones, minimised by CP-SAT: faster than HiGHS on models of up to a few thousand variables.

CP-SAT wants integers. Where coefficients are none, they are scaled and rounded so that every solution stays one: a row may
become weaker by a thousandth of its unit for each of its variables, and the bound stays a bound.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ortools.sat.python import cp_model

from planner.process.clock import now_s
from planner.solvers import cp_sat
from planner.solvers.milp import Answer, Milp, Outcome

SCALE = 1000  # of rows and costs whose coefficients are not whole
_OUTCOMES = {cp_sat.Outcome.SOLVED: Outcome.SOLVED, cp_sat.Outcome.STOPPED: Outcome.STOPPED}


def minimise(
    milp: Milp,
    *,
    time_limit_s: float,
    gap: float = 0.0,
    cutoff: float = math.inf,
    floor: float = 0.0,
    effort: float = math.inf,
    seed: int = 0,
    meanwhile: Callable[[threading.Event], None] | None = None,
    at_once: Callable[[list[int]], None] | None = None,
) -> Answer:
    """As ``Milp.minimise``, for costs of 0 and more; ``effort`` and ``at_once`` as in ``cp_sat.minimise``.

    floor  no solution costs less, which need not be proved again

    Fractions are taken for zeros and ones. That must lose no solution, as where they are no more than auxiliaries of the
    integer variables.
    """
    deadline = now_s() + time_limit_s
    scale = _scale(milp.cost)
    model = _model(milp, scale, cutoff, floor)
    answer = cp_sat.minimise(
        model,
        [model.get_int_var_from_proto_index(x) for x in range(len(milp.cost))],
        deadline=deadline,
        absolute_gap=math.floor(gap * scale),
        linearization_level=2,
        effort=effort,
        seed=seed,
        meanwhile=meanwhile,
        at_once=at_once,
    )
    if answer.outcome is cp_sat.Outcome.INFEASIBLE:
        if cutoff < math.inf:
            return Answer(Outcome.CUT_OFF, None, math.inf, cutoff)
        return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
    values = None if answer.values is None else [float(x) for x in answer.values]
    cost = math.inf if values is None else milp.cost_of(values)
    bound = -math.inf if answer.bound is None else min(answer.bound / scale, cutoff)
    return Answer(_OUTCOMES[answer.outcome], values, cost, bound)


def _model(milp: Milp, scale: int, cutoff: float, floor: float) -> cp_model.CpModel:
    """The model in CP-SAT's terms, as a proto: variable i of the Milp is variable i there."""
    model = cp_model.CpModel()
    proto = model.proto
    for lower, upper in zip(milp.lower, milp.upper, strict=True):
        proto.variables.add().domain.extend([math.ceil(lower), math.floor(upper)])
    rows: list[list[tuple[int, float]]] = [[] for _ in milp.row_lower]
    for row, x, a in milp.entries:
        rows[row].append((x, a))
    for lower, upper, terms in zip(milp.row_lower, milp.row_upper, rows, strict=True):
        if upper == math.inf and all(abs(a) == 1 for _, a in terms) and lower == 1 - sum(a < 0 for _, a in terms):
            proto.constraints.add().bool_or.literals.extend([x if a > 0 else -x - 1 for x, a in terms])
            continue
        if lower > -math.inf:
            _at_most(proto, -lower, [(x, -a) for x, a in terms])
        if upper < math.inf:
            _at_most(proto, upper, terms)
    costs = [(x, c) for x, c in enumerate(milp.cost) if c]
    proto.objective.vars.extend([x for x, _ in costs])
    proto.objective.coeffs.extend([_whole(c, scale) for _, c in costs])
    least = math.ceil(floor * scale - 1e-9 * floor)
    if scale > 1:
        least -= len(costs)  # each rounded down
    if least > 0:
        proto.objective.domain.extend([least, 2**62])
    if cutoff < math.inf:
        _at_most(proto, cutoff, costs)
    return model


def _at_most(proto: Any, right: float, terms: Sequence[tuple[int, float]]) -> None:
    """Σ coefficient · x ≤ right, weakened where it has to be rounded."""
    scale = _scale([a for _, a in terms])
    linear = proto.constraints.add().linear
    linear.vars.extend([x for x, _ in terms])
    linear.coeffs.extend([_whole(a, scale) for _, a in terms])
    linear.domain.extend([-(2**62), _whole(right, scale)])


def _scale(numbers: Sequence[float]) -> int:
    return 1 if all(abs(a - round(a)) <= 1e-9 * abs(a) for a in numbers) else SCALE


def _whole(number: float, scale: int) -> int:
    """Rounded down, but for what is a whole number save for rounding."""
    return math.floor(number * scale + 1e-9 * max(1.0, abs(number)))
