"""Ctrl-C while a thread is waited for, at every moment."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from ortools.sat.python import cp_model

from planner.process import waiting
from planner.process.clock import now_s
from planner.process.loading import undisturbed
from planner.process.waiting import Done, begin
from planner.solvers import cp_sat, milp

FILES = threading.__file__, waiting.__file__


class Interrupts:
    """Ctrl-C before the n-th line of this thread that runs in these files, and before the next but ``apart``."""

    def __init__(self, at: int, apart: int) -> None:
        self.left = {at, at + apart}
        self.line = -1

    def __enter__(self) -> "Interrupts":
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.line += event == "line"
        if event == "line" and self.line in self.left:
            self.left.discard(self.line)
            if not self.left:
                sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


def satisfied() -> None:
    model = cp_model.CpModel()
    x = model.new_bool_var("x")
    model.minimize(x)
    cp_sat.minimise(model, [x], deadline=now_s() + 10)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.perf_counter() + 10
    while milp.solving() and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not milp.solving()


@pytest.mark.parametrize("apart", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(
    "wait",
    [lambda: milp.run_apart(lambda left: time.sleep(0.01), 1.0), lambda: undisturbed(lambda: time.sleep(0.01)), satisfied],
    ids=["milp", "loading", "cp_sat"],
)
def test_an_interruption_is_never_another_error(wait: Callable[[], object], apart: int) -> None:
    for at in range(1_000):
        with Interrupts(at, apart) as interrupts:
            try:
                wait()
            except KeyboardInterrupt:
                continue
        assert interrupts.line < at
        break
    assert 0 < at < 500


def test_an_event_is_waited_for_and_set_once() -> None:
    done = Done()
    assert not done.wait(0.0) and not done.wait(0.01) and not done.is_set()
    begin(done.set, ())
    assert done.wait() and done.wait(0.0) and done.is_set()
    done.set()
    several = [threading.Thread(target=done.wait) for _ in range(3)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(5)
        assert not thread.is_alive()
