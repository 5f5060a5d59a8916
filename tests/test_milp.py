"""The MILP solver's own manners; what it proves is tested with the methods that use it."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.milp import Left, Milp, Outcome, Relaxation, _matrix


def knapsack(count: int = 30) -> Milp:
    """Costs to keep and weights that do not fit together."""
    milp = Milp()
    drop = [milp.binary(cost=1.0 + 7 * i % 11) for i in range(count)]
    milp.at_most(-3.0 * count, [(x, -(5.0 + 3 * i % 7)) for i, x in enumerate(drop)])
    return milp


def test_something_else_runs_meanwhile_and_changes_nothing() -> None:
    alone = knapsack().minimise(time_limit_s=20.0)
    threads: list[str] = []

    def note(done: threading.Event) -> None:
        threads.append(threading.current_thread().name)
        assert done.wait(20.0)

    together = knapsack().minimise(time_limit_s=20.0, meanwhile=note)
    assert threads == [threading.main_thread().name]
    assert alone.outcome is Outcome.SOLVED
    assert together == alone


def test_what_fails_meanwhile_reaches_the_caller() -> None:
    def fail(done: threading.Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        knapsack().minimise(time_limit_s=20.0, meanwhile=fail)


def test_a_relaxation_bounds_from_below() -> None:
    """Against the optimum with integers, and against HiGHS for the relaxation itself."""
    rng = random.Random(3)
    strict = 0
    for _ in range(40):
        milp = Milp()
        xs = [milp.binary(cost=float(rng.randint(1, 9))) for _ in range(8)]
        for _ in range(12):
            milp.at_least(1.0, rng.sample(xs, 2))
        milp.at_most(rng.choice((8.5, 11.5)), [(x, float(rng.randint(1, 3))) for x in xs])
        whole, relaxed = milp.minimise(time_limit_s=10), milp.relax(time_limit_s=10)
        if relaxed.outcome is Outcome.INFEASIBLE:
            assert whole.outcome is Outcome.INFEASIBLE
            continue
        assert relaxed.outcome is Outcome.SOLVED and relaxed.values is not None
        assert relaxed.bound <= whole.cost + 1e-9
        assert relaxed.bound == pytest.approx(relaxed.cost, abs=1e-6)
        strict += relaxed.bound < whole.cost - 1e-6
    assert strict


def test_a_relaxation_with_variables_fixed_is_the_same_from_any_basis() -> None:
    """Against the relaxation of the Milp with the same bounds, from the beginning; rows come in between."""
    rng, infeasible = random.Random(1), 0
    for _ in range(30):
        milp = Milp()
        xs = [milp.binary(cost=float(rng.randint(1, 9))) for _ in range(8)]
        for _ in range(12):
            milp.at_least(1.0, rng.sample(xs, 2))
        milp.at_most(11.5, [(x, float(rng.randint(1, 3))) for x in xs])
        relaxation = Relaxation(milp, Left())
        for at in range(8):
            fixed = {x: float(rng.randint(0, 1)) for x in rng.sample(xs, rng.randint(0, 3))}
            if at == 4:
                milp.at_least(1.0, [0, 1])
            found = relaxation.solve(fixed, time_limit_s=10)
            lower = [fixed.get(x, low) for x, low in enumerate(milp.lower)]
            upper = [fixed.get(x, high) for x, high in enumerate(milp.upper)]
            anew = replace(milp, lower=lower, upper=upper).relax(time_limit_s=10)
            assert found.outcome is anew.outcome
            if found.outcome is Outcome.INFEASIBLE:
                infeasible += 1
                continue
            assert found.cost == pytest.approx(anew.cost, abs=1e-6) and found.bound == pytest.approx(found.cost, abs=1e-6)
    assert infeasible > 10


def test_a_bound_from_duals_holds_for_any_duals() -> None:
    milp = Milp()
    x, y = milp.binary(cost=3.0), milp.binary(cost=2.0, lower=0.5)
    milp.at_least(1.0, [x, y])
    milp.at_most(1.5, [(x, 1.0), (y, 1.0)])
    optimum, matrix = 2.0, _matrix(milp.entries)
    rng = np.random.default_rng(0)
    best = max(milp._dual_bound(rng.uniform(-4, 4, 2), matrix) for _ in range(2_000))
    assert optimum - 0.1 < best <= optimum
    assert milp._dual_bound(np.zeros(2), matrix) == 1.0  # what the bounds of the variables cost


def test_a_relaxation_that_is_out_of_time_claims_nothing() -> None:
    milp = Milp()
    rng = random.Random(0)
    xs = [milp.binary(cost=rng.random()) for _ in range(2_000)]
    for _ in range(2_000):
        milp.at_least(1.0, rng.sample(xs, 20))
    answer = milp.relax(time_limit_s=0.001)
    assert answer.outcome is Outcome.STOPPED and answer.values is None and answer.bound == -math.inf
