"""Constraint programs, minimised by CP-SAT of OR-Tools, with limits and interrupts that hold.

The solver runs on a thread of its own; the caller's thread waits, passes solutions and bounds on as they come, and stops the
search on Ctrl-C or at the deadline.
"""

from __future__ import annotations

import enum
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from planner.process.clock import now_s
from planner.process.waiting import Done, begin
from planner.solvers.milp import GRACE_S, GRACE_SHARE, leave_behind


class Outcome(enum.Enum):
    """What came of a solve."""

    SOLVED = "solved"  # a solution, proved within the asked gap
    STOPPED = "stopped"  # out of time; a solution may be there
    INFEASIBLE = "infeasible"  # proved: no solution


_OUTCOMES = {
    cp_model.OPTIMAL: Outcome.SOLVED,
    cp_model.FEASIBLE: Outcome.STOPPED,
    cp_model.UNKNOWN: Outcome.STOPPED,
    cp_model.INFEASIBLE: Outcome.INFEASIBLE,
}  # MODEL_INVALID is a bug of ours and raises


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a solve.

    values  of the watched variables in the best solution, None where none was found
    cost    of that solution, None without
    bound   no solution costs less; None where nothing was proved
    """

    outcome: Outcome
    values: list[int] | None
    cost: int | None
    bound: int | None


def minimise(
    model: cp_model.CpModel,
    watch: Sequence[cp_model.IntVar],
    *,
    deadline: float,
    gap: float = 0.0,
    absolute_gap: int = 0,
    linearization_level: int = 1,
    effort: float = math.inf,
    workers: int = 1,
    seed: int = 0,
    on_solution: Callable[[list[int]], None] | None = None,
    on_bound: Callable[[int], None] | None = None,
    meanwhile: Callable[[threading.Event], None] | None = None,
    at_once: Callable[[list[int]], None] | None = None,
) -> Answer:
    """Solve a model whose objective is an integer at least 0 in every solution.

    watch         the variables whose values are wanted
    deadline      of ``planner.process.clock.now_s``
    gap           stop when (cost - bound) / cost is at most this; the outcome is then SOLVED too
    absolute_gap  or when cost - bound is at most this
    linearization_level  how much of the model the linear relaxation holds, 0 to 2
    effort        stop after so much work (about as many seconds): a limit that does not depend on the machine
    workers       threads; with one, the same model and seed give the same answer unless the deadline strikes
    on_solution   called with the watched values of each better solution, on the caller's thread
    on_bound      called with each better bound, on the caller's thread
    meanwhile     called once, on the caller's thread, while CP-SAT works, with the event that says it is done; the answer comes
                      when both are
    at_once       called with the watched values of each better solution while ``meanwhile`` is under way too, on CP-SAT's thread

    KeyboardInterrupt stops the search and is raised again once the solutions found have been passed on.
    """
    if error := model.validate():
        raise AssertionError(f"CP-SAT refuses the model: {error}")
    given_s = max(0.0, deadline - now_s())
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = given_s
    solver.parameters.relative_gap_limit = gap
    solver.parameters.absolute_gap_limit = absolute_gap
    solver.parameters.linearization_level = linearization_level
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False  # Python's handler is to see it
    news: queue.SimpleQueue[tuple[list[int], int] | int] = queue.SimpleQueue()
    solver.best_bound_callback = lambda bound: news.put(_whole(bound))
    search = _Search(solver, model, watch, news, at_once)
    best: tuple[list[int], int] | None = None
    proved: int | None = None

    def pass_on() -> None:
        nonlocal best, proved
        while not news.empty():
            item = news.get()
            if isinstance(item, int):
                if proved is None or item > proved:
                    proved = item
                    if on_bound is not None:
                        on_bound(item)
            elif best is None or item[1] < best[1]:
                best = item
                if on_solution is not None:
                    on_solution(item[0])

    late = deadline + GRACE_SHARE * given_s + GRACE_S
    try:
        begin(search.run, ())
        if meanwhile is not None:
            meanwhile(search.done)
        while not search.done.wait(0.02 if search.young else 0.1) and now_s() < late:
            if now_s() > deadline:
                solver.stop_search()
            pass_on()
    except BaseException:  # Ctrl-C above all; whatever it is, no solver may be left alone
        late = now_s() + GRACE_S
        try:
            while not search.done.wait(0.02) and now_s() < late:
                solver.stop_search()
        finally:  # on a second Ctrl-C too
            if not search.done.is_set():
                search.leave_behind()
        pass_on()
        raise
    if not search.done.is_set():  # it is deep in presolve and has not looked at the clock
        search.leave_behind()
        pass_on()
        return Answer(Outcome.STOPPED, best[0] if best else None, best[1] if best else None, proved)
    if search.error is not None:
        raise search.error
    outcome = _OUTCOMES.get(search.status)
    if outcome is None:
        raise AssertionError(f"CP-SAT ended with {search.status}")
    if outcome is not Outcome.INFEASIBLE:  # without a solution, what the solver calls its bound may be the 0 it began with
        news.put(_whole(solver.best_objective_bound))
    pass_on()
    return Answer(outcome, best[0] if best else None, best[1] if best else None, proved)


def _whole(number: float) -> int:
    """Objectives are whole numbers below 2**53, so only rounding in the last place can have made them otherwise."""
    return max(0, round(number))


class _Search(cp_model.CpSolverSolutionCallback):
    """One solve and what it reports, on the solver's side."""

    def __init__(
        self,
        solver: cp_model.CpSolver,
        model: cp_model.CpModel,
        watch: Sequence[cp_model.IntVar],
        news: queue.SimpleQueue[Any],
        at_once: Callable[[list[int]], None] | None,
    ) -> None:
        super().__init__()
        self._at_once = at_once
        self._solver, self._model, self._watch, self._news = solver, model, watch, news
        self._began = now_s()
        self.status: Any = None
        self.error: BaseException | None = None
        self.done = Done()

    @property
    def young(self) -> bool:
        return now_s() - self._began < 0.5

    def run(self) -> None:
        try:
            self.status = self._solver.solve(self._model, self)
        except BaseException as error:  # handed to the caller
            self.error = error
        finally:
            self.done.set()

    def leave_behind(self) -> None:
        """The caller leaves. An interpreter that ended before the solver did would abort, so it is stopped, and waited for."""

        def stop() -> None:
            while not self.done.wait(0.1):  # again and again: told before it has begun, the solver does not listen
                self._solver.stop_search()

        leave_behind(self.done)
        begin(stop, ())

    def on_solution_callback(self) -> None:
        values = [self.value(x) for x in self._watch]
        self._news.put((values, round(self.objective_value)))
        if self._at_once is not None:
            self._at_once(values)
