"""A solver's thread goes first where it has Python to run."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from graphs.synthetic import random_training
from planner import keep_all, simulate
from planner.process import turns
from planner.solvers.milp import Milp
from planner.walks.walk_search import WalkSearch


def test_others_wait_until_it_is_done_also_where_it_fails() -> None:
    order = []
    begun = threading.Event()

    def go_first() -> None:
        with pytest.raises(ValueError, match="on purpose"), turns.first():
            begun.set()
            time.sleep(0.2)
            order.append("first")
            raise ValueError("on purpose")

    thread = threading.Thread(target=go_first)
    thread.start()
    begun.wait()
    turns.give_way()
    order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_walks_wait_at_every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(40, 1)
    walks = WalkSearch(graph, int(0.75 * simulate(graph, keep_all(graph)).peak_bytes), seed=0)
    walks.start()
    waits, moves = [0], [0]
    move = walks._move

    def counted(*arguments: Any) -> Any:
        moves[0] += 1
        return move(*arguments)

    monkeypatch.setattr(walks, "_move", counted)
    monkeypatch.setattr(turns, "give_way", lambda: waits.__setitem__(0, waits[0] + 1))
    walks.improve(100_000)
    assert waits[0] >= moves[0] > 10


def test_what_comes_between_two_solves_of_a_relaxation_goes_first() -> None:
    milp = Milp()
    x, y = milp.binary(cost=1.0), milp.binary(cost=2.0)
    milp.at_least(1.0, [x, y])
    taken = []

    def more(values: list[float]) -> bool:
        taken.append(turns._turn.locked())
        if len(taken) == 1:
            milp.at_least(1.0, [y])
        return len(taken) == 1

    assert milp.relax(time_limit_s=10.0, more=more).cost == pytest.approx(2.0)
    assert taken == [True, True] and not turns._turn.locked()
