"""The MILP solver's own manners; what it proves is tested with the methods that use it."""

from __future__ import annotations

import threading

import pytest

from planner.milp import Milp, Outcome


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
