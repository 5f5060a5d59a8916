"""CP-SAT on models of zeros and ones: the same optimum as HiGHS, and a bound wherever it stops."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest

from planner.solvers import pseudo_boolean
from planner.solvers.milp import Milp, Outcome


def covering(seed: int, *, whole: bool, count: int = 14) -> Milp:
    """Sets to choose so that every row has one, within a weight; some of the costs, weights and rows of each kind."""
    draw = random.Random(seed)
    milp = Milp()
    number = draw.randint if whole else draw.uniform
    chosen = [milp.binary(cost=float(number(1, 9)), lower=float(draw.random() < 0.1)) for _ in range(count)]
    shut = milp.binary(upper=0.0)
    for _ in range(count):
        plus = draw.sample(chosen, 3)
        minus = [x for x in draw.sample(chosen, 1) if x not in plus]
        milp.at_least(1.0 - len(minus), [*plus, shut], minus)
    milp.at_most(draw.uniform(0.1, 0.6) * 5 * count, [(x, float(number(1, 9))) for x in chosen])
    return milp


@pytest.mark.parametrize("whole", [True, False])
def test_the_optimum_is_that_of_highs(whole: bool) -> None:
    outcomes = set()
    for seed in range(60):
        milp = covering(seed, whole=whole)
        one, other = milp.minimise(time_limit_s=20.0), pseudo_boolean.minimise(milp, time_limit_s=20.0)
        assert one.outcome is other.outcome, seed
        outcomes.add(one.outcome)
        if one.values is not None:
            assert other.values is not None
            assert other.cost == pytest.approx(one.cost, abs=0.02), seed  # fractions are rounded down to thousandths
            assert other.bound <= one.cost + 1e-9, seed
            assert other.bound >= one.cost - 0.02, seed
    assert outcomes == {Outcome.SOLVED, Outcome.INFEASIBLE}


def test_a_cutoff_is_proved_or_undercut() -> None:
    milp = covering(2, whole=False)
    best = pseudo_boolean.minimise(milp, time_limit_s=20.0).cost
    below = pseudo_boolean.minimise(milp, time_limit_s=20.0, cutoff=best - 0.1)
    assert (below.outcome, below.values, below.bound) == (Outcome.CUT_OFF, None, best - 0.1)
    above = pseudo_boolean.minimise(milp, time_limit_s=20.0, cutoff=best + 0.1)
    assert above.outcome is Outcome.SOLVED and above.cost == pytest.approx(best)


def hard() -> Milp:
    """A covering that nobody solves in seconds."""
    draw, milp = random.Random(0), Milp()
    chosen = [milp.binary(draw.uniform(1, 2)) for _ in range(400)]
    for _ in range(400):
        milp.at_least(3, draw.sample(chosen, 20))
    return milp


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_known_of_cheap_solutions_is_not_proved_again(whole: bool) -> None:
    milp = covering(2, whole=whole)
    best = pseudo_boolean.minimise(milp, time_limit_s=20.0)
    for floor in (best.cost / 2, best.bound, best.cost):
        again = pseudo_boolean.minimise(milp, time_limit_s=20.0, floor=floor)
        assert again.outcome is Outcome.SOLVED and again.cost == pytest.approx(best.cost)
        assert floor - 0.02 <= again.bound <= best.cost + 1e-9
    dearer = pseudo_boolean.minimise(milp, time_limit_s=20.0, floor=best.cost + 0.5)
    assert dearer.cost >= best.cost + 0.5 - 0.02 and dearer.bound >= best.cost + 0.5 - 0.02
    soon = pseudo_boolean.minimise(hard(), time_limit_s=20.0, effort=1.0)
    assert soon.outcome is Outcome.STOPPED and soon.cost - soon.bound > 0.05 * soon.cost
    known = pseudo_boolean.minimise(hard(), time_limit_s=20.0, effort=1.0, gap=0.05 * soon.cost, floor=0.97 * soon.cost)
    assert known.outcome is Outcome.SOLVED


def test_a_gap_is_enough() -> None:
    milp = covering(3, whole=True)
    best = pseudo_boolean.minimise(milp, time_limit_s=20.0).cost
    rough = pseudo_boolean.minimise(milp, time_limit_s=20.0, gap=best)
    assert rough.outcome is Outcome.SOLVED
    assert rough.bound <= best <= rough.cost


def test_out_of_time_there_is_a_bound_and_a_solution() -> None:
    began = time.monotonic()
    found = pseudo_boolean.minimise(hard(), time_limit_s=2.0)
    assert time.monotonic() - began < 6
    assert found.outcome is Outcome.STOPPED
    assert found.values is not None and 0 < found.bound < found.cost < math.inf


def test_something_else_runs_meanwhile() -> None:
    threads: list[str] = []

    def note(done: threading.Event) -> None:
        threads.append(threading.current_thread().name)
        assert done.wait(20.0)

    milp = covering(2, whole=True)
    assert pseudo_boolean.minimise(milp, time_limit_s=20.0, meanwhile=note) == pseudo_boolean.minimise(milp, time_limit_s=20.0)
    assert threads == [threading.main_thread().name]


def test_solutions_come_at_once_while_something_else_runs() -> None:
    found, at_once = list[list[int]](), list[bool]()
    milp = hard()

    def wait(done: threading.Event) -> None:
        while not found and not done.wait(0.01):
            pass
        at_once.append(not done.is_set())
        done.wait(30.0)

    for limit_s in (1.0, 16.0):  # the second where a busy machine has not come to a first solution
        answer = pseudo_boolean.minimise(milp, time_limit_s=limit_s, meanwhile=wait, at_once=found.append)
        if found:
            break
    costs = [milp.cost_of(values) for values in found]
    assert at_once[-1] and costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(answer.cost)


def test_ctrl_c_meanwhile_stops_the_solver() -> None:
    def interrupt(done: threading.Event) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pseudo_boolean.minimise(hard(), time_limit_s=60.0, meanwhile=interrupt)
    assert time.monotonic() - began < 10


def test_an_effort_ends_a_solve_and_repeats() -> None:
    began = time.monotonic()
    one, other = (pseudo_boolean.minimise(hard(), time_limit_s=100.0, effort=0.3) for _ in range(2))
    assert time.monotonic() - began < 60
    assert one.outcome is Outcome.STOPPED
    assert one == other
