"""Mixed-integer linear programs, minimised by the HiGHS inside OR-Tools, and their relaxations, by its GLOP.

A Milp is a few plain lists; ``minimise`` hands them over in one piece, which takes milliseconds for 100,000 coefficients.
The solve runs on a thread of its own, so that Ctrl-C reaches the caller at once; the interpreter does not end before that
thread does.
"""

from __future__ import annotations

import atexit
import enum
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from planner.process import turns
from planner.process.clock import now_s
from planner.process.waiting import Done, begin

T = TypeVar("T")
Matrix = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]  # rows, columns, coefficients

GRACE_SHARE, GRACE_S = 0.05, 0.5  # a solve that much later than its time limit is left behind
GIVES_WAY = 1e-6  # of all that rows lack at most: what is less may be the solver's tolerance


class Outcome(enum.Enum):
    """What came of a solve."""

    SOLVED = "solved"  # a solution, proved within the asked gap or below the cutoff
    STOPPED = "stopped"  # out of time or nodes; a solution may be there
    CUT_OFF = "cut off"  # proved: no solution below the cutoff
    INFEASIBLE = "infeasible"  # proved: no solution at all


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a solve.

    values  one per variable, None where no solution was found
    cost    of ``values``, infinite without
    bound   no solution costs less (-inf where nothing was proved)
    duals   of a relaxation, one per row that it had
    """

    outcome: Outcome
    values: list[float] | None
    cost: float
    bound: float
    duals: list[float] | None = None


@dataclass(slots=True)
class Milp:
    """minimise cost · x  subject to  lower ≤ x ≤ upper, row_lower ≤ A x ≤ row_upper, some x integer."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)  # row, variable, coefficient

    def binary(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0) -> int:
        """A new 0-1 variable; its number."""
        return self._variable(cost, lower, upper, integer=True)

    def fraction(self) -> int:
        """A new free-of-charge variable in [0, 1]; its number."""
        return self._variable(0.0, 0.0, integer=False)

    def number(self, upper: float) -> int:
        """A new free-of-charge variable in [0, ``upper``]; its number."""
        return self._variable(0.0, 0.0, upper, integer=False)

    def _variable(self, cost: float, lower: float, upper: float = 1.0, *, integer: bool) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def equal(self, right: float, terms: Sequence[tuple[int, float]]) -> None:
        """Σ coefficient · x = right, each variable named once."""
        self.at_most(right, terms)
        self.row_lower[-1] = right

    def at_least(self, right: float, plus: Sequence[int], minus: Sequence[int] = ()) -> None:
        """Σ plus − Σ minus ≥ right."""
        row = len(self.row_lower)
        self.row_lower.append(right)
        self.row_upper.append(math.inf)
        self.entries.extend((row, x, 1.0) for x in plus)
        self.entries.extend((row, x, -1.0) for x in minus)

    def at_most(self, right: float, terms: Sequence[tuple[int, float]]) -> None:
        """Σ coefficient · x ≤ right, each variable named once."""
        row = len(self.row_lower)
        self.row_lower.append(-math.inf)
        self.row_upper.append(right)
        self.entries.extend((row, x, a) for x, a in terms)

    def cost_of(self, values: Sequence[float]) -> float:
        """cost · values"""
        return sum(c * x for c, x in zip(self.cost, values, strict=True))

    def minimise(
        self,
        *,
        time_limit_s: float,
        gap: float = 0.0,
        cutoff: float = math.inf,
        node_limit: int | None = None,
        seed: int = 0,
        meanwhile: Callable[[threading.Event], None] | None = None,
    ) -> Answer:
        """Solve with HiGHS.

        gap         stop when cost - bound is at most this (absolute)
        cutoff      only solutions below this matter; proving that there is none ends the solve with CUT_OFF
        node_limit  stop after this many branch-and-bound nodes: a limit that does not depend on the machine
        meanwhile   called once, while HiGHS works on a thread of its own, with the event that says it is done; the answer
                    comes when both are
        """
        proto = self.proto()
        began = now_s()
        parameters = _parameters(time_limit_s, gap, cutoff, node_limit, seed)
        result = run_apart(partial(_highs, proto, parameters), time_limit_s, meanwhile)
        if _infeasible(result):
            # HiGHS's presolve has called feasible models infeasible, so its word is asked for again without presolve.
            left_s = time_limit_s - (now_s() - began)
            again = _parameters(left_s, gap, cutoff, node_limit, seed, presolve=False)
            result = run_apart(partial(_highs, proto, again), left_s) if left_s > 0 else None
        if result is None:
            return Answer(Outcome.STOPPED, None, math.inf, -math.inf)
        return self._answer(result, cutoff)

    def relax(
        self,
        *,
        time_limit_s: float,
        more: Callable[[list[float]], bool] | None = None,
        meanwhile: Callable[[threading.Event], None] | None = None,
        left: Left | None = None,
    ) -> Answer:
        """Solve without asking for integers, with GLOP; on these models it is faster than HiGHS by up to a factor of seven.

        more  called with the solution, on the solver's thread; may add rows, and says whether to solve again, from that solution
              on. The last solution that was found in time counts
        left  for a caller that is itself on a solver's thread, which this is then done on: set where nobody waits any more

        The bound is that of the duals, made feasible, so it holds whatever the solver's tolerances; INFEASIBLE is its word alone.
        ``meanwhile`` as above.
        """
        solve = partial(self._relax, now_s() + time_limit_s, more)
        answer = run_apart(solve, time_limit_s, meanwhile) if left is None else solve(left)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf) if answer is None else answer

    def _relax(self, deadline: float, more: Callable[[list[float]], bool] | None, left: Left) -> Answer:
        from ortools.math_opt import result_pb2

        with turns.first():
            glop = _glop(self)
        answer = Answer(Outcome.STOPPED, None, math.inf, -math.inf)
        interrupter = _interrupter()
        left.then(interrupter.interrupt)
        while True:
            result = _solved(glop, deadline - now_s(), interrupter, goes_on=more is not None)
            if _infeasible(result):
                return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
            if result.termination.reason != result_pb2.TERMINATION_REASON_OPTIMAL:
                return answer
            with turns.first():
                answer = self._relaxed(result.solutions[0])
                rows, entries = len(self.row_lower), len(self.entries)
                assert answer.values is not None
                if more is None or now_s() >= deadline or left.is_set() or not more(answer.values):
                    return answer
                added = self._added(rows, entries)
            glop.update(added)

    def _relaxed(self, solution: Any, matrix: Matrix | None = None) -> Answer:
        values = list(solution.primal_solution.variable_values.values)
        duals = np.zeros(len(self.row_lower))
        duals[list(solution.dual_solution.dual_values.ids)] = list(solution.dual_solution.dual_values.values)
        cost = self.cost_of(values)
        bound = self._dual_bound(duals, _matrix(self.entries) if matrix is None else matrix)
        return Answer(Outcome.SOLVED, values, cost, min(bound, cost), duals.tolist())

    def _dual_bound(self, duals: npt.NDArray[np.float64], matrix: Matrix) -> float:
        """Least value of the Lagrangian over the bounds of the variables: a lower bound for any duals."""
        sides = np.where(duals > 0, self.row_lower, self.row_upper)
        is_finite = np.isfinite(sides)
        duals, sides = np.where(is_finite, duals, 0.0), np.where(is_finite, sides, 0.0)
        rows, columns, coefficients = matrix
        reduced = np.array(self.cost) - np.bincount(columns, duals[rows] * coefficients, len(self.cost))
        at = np.where(reduced > 0, self.lower, self.upper)
        return float((duals * sides).sum() + (reduced * at).sum())

    def proto(self) -> Any:
        """The model as OR-Tools takes it."""
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto()
        count = len(self.cost)
        proto.variables.ids.extend(range(count))
        proto.variables.lower_bounds.extend(self.lower)
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend(self.integer)
        proto.objective.linear_coefficients.ids.extend(range(count))
        proto.objective.linear_coefficients.values.extend(self.cost)
        self._write_rows(proto.linear_constraints, proto.linear_constraint_matrix, 0, 0)
        return proto

    def _added(self, rows: int, entries: int) -> Any:
        """What is there beyond so many rows and entries, as OR-Tools takes it."""
        from ortools.math_opt import model_update_pb2

        update = model_update_pb2.ModelUpdateProto()
        self._write_rows(update.new_linear_constraints, update.linear_constraint_matrix_updates, rows, entries)
        return update

    def _write_rows(self, sides: Any, matrix: Any, first_row: int, first_entry: int) -> None:
        sides.ids.extend(range(first_row, len(self.row_lower)))
        sides.lower_bounds.extend(self.row_lower[first_row:])
        sides.upper_bounds.extend(self.row_upper[first_row:])
        added = self.entries[first_entry:]
        rows, columns, coefficients = zip(*sorted(added), strict=True) if added else ((), (), ())
        matrix.row_ids.extend(rows)
        matrix.column_ids.extend(columns)
        matrix.coefficients.extend(coefficients)

    def _answer(self, result: Any, cutoff: float) -> Answer:
        from ortools.math_opt import result_pb2

        reason = result.termination.reason
        if _infeasible(result):
            # A cutoff makes the solver call the rest of the problem infeasible.
            if cutoff < math.inf:
                return Answer(Outcome.CUT_OFF, None, math.inf, cutoff)
            return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
        if reason not in (
            result_pb2.TERMINATION_REASON_OPTIMAL,
            result_pb2.TERMINATION_REASON_FEASIBLE,
            result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND,
        ):
            raise AssertionError(f"HiGHS ended with {result.termination}")
        values, cost = None, math.inf
        if result.solutions:
            values = list(result.solutions[0].primal_solution.variable_values.values)
            cost = self.cost_of(values)
        # Below a cutoff the search is complete; above it the solver may have pruned what it should not have.
        bound = min(result.termination.objective_bounds.dual_bound, cutoff)
        if reason != result_pb2.TERMINATION_REASON_OPTIMAL:
            return Answer(Outcome.STOPPED, values, cost, bound)
        return Answer(Outcome.CUT_OFF if bound >= cutoff else Outcome.SOLVED, values, cost, bound)


def _matrix(entries: Sequence[tuple[int, int, float]]) -> Matrix:
    rows, columns, coefficients = zip(*entries, strict=True) if entries else ((), (), ())
    return np.array(rows, np.int64), np.array(columns, np.int64), np.array(coefficients, np.float64)


class Relaxation:
    """The relaxation of a Milp with some of its variables fixed, now these and now others: GLOP goes on from its last basis.

    Rows that are added to the Milp meanwhile count from the next solve on; variables are not to be added. To be used on a
    solver's thread, as ``Milp.relax`` with ``left``.
    """

    def __init__(self, milp: Milp, left: Left) -> None:
        # What it becomes by fixing variables; of the rows there is only one list.
        self._milp = replace(milp, lower=list(milp.lower), upper=list(milp.upper), integer=[False] * len(milp.cost))
        self._own = milp.lower, milp.upper
        self._handed_over = len(milp.row_lower), len(milp.entries)
        self._matrix = _matrix(milp.entries)
        self._glop = _glop(self._milp)
        self._fixed: dict[int, float] = {}
        self._interrupter = _interrupter()
        left.then(self._interrupter.interrupt)

    def solve(self, fixed: Mapping[int, float], *, time_limit_s: float) -> Answer:
        """The optimum with some variables at these values, and a bound that holds by its duals; INFEASIBLE is proved as well."""
        from ortools.math_opt import result_pb2

        until = now_s() + time_limit_s
        with turns.first():
            self._hand_over(fixed)
        result = _solved(self._glop, time_limit_s, self._interrupter)
        with turns.first():
            if result.termination.reason == result_pb2.TERMINATION_REASON_OPTIMAL:
                return self._milp._relaxed(result.solutions[0], self._matrix)
            gives = self._giving_way() if _infeasible(result) else None
        if gives is not None:
            # GLOP gives no reason; the duals of the least share by which all rows have to give way are one.
            result = _solved(_glop(gives), until - now_s(), self._interrupter)
            if result.termination.reason == result_pb2.TERMINATION_REASON_OPTIMAL:
                with turns.first():
                    if gives._relaxed(result.solutions[0]).bound > GIVES_WAY:
                        return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)

    def _hand_over(self, fixed: Mapping[int, float]) -> None:
        """Rows that are new, and what is fixed now and was not, or no more."""
        from ortools.math_opt import model_update_pb2

        milp, now = self._milp, (len(self._milp.row_lower), len(self._milp.entries))
        if now != self._handed_over:
            self._glop.update(milp._added(*self._handed_over))
            added = _matrix(milp.entries[self._handed_over[1] :])
            rows, columns, coefficients = (np.concatenate(parts) for parts in zip(self._matrix, added, strict=True))
            self._matrix = rows, columns, coefficients
            self._handed_over = now
        changed = sorted(x for x in fixed.keys() | self._fixed.keys() if fixed.get(x) != self._fixed.get(x))
        self._fixed = dict(fixed)
        if changed:
            update = model_update_pb2.ModelUpdateProto()
            changes = update.variable_updates
            for sides, mine, own in zip(
                (changes.lower_bounds, changes.upper_bounds), (milp.lower, milp.upper), self._own, strict=True
            ):
                for x in changed:
                    mine[x] = fixed.get(x, own[x])
                sides.ids.extend(changed)
                sides.values.extend([mine[x] for x in changed])
            self._glop.update(update)

    def _giving_way(self) -> Milp:
        """All rows as they are with one more variable at 0, and satisfied with it at 1; that variable is to be least."""
        milp = self._milp
        gives = Milp([*([0.0] * len(milp.cost)), 1.0], [*milp.lower, 0.0], [*milp.upper, 1.0], [False] * (len(milp.cost) + 1))
        gives.row_lower, gives.row_upper, gives.entries = milp.row_lower, milp.row_upper, list(milp.entries)
        least, most = [0.0] * len(milp.row_lower), [0.0] * len(milp.row_lower)
        for row, x, a in milp.entries:
            low, high = sorted((a * milp.lower[x], a * milp.upper[x]))
            least[row] += low
            most[row] += high
        for row, (low, high) in enumerate(zip(milp.row_lower, milp.row_upper, strict=True)):
            if least[row] < low:
                gives.entries.append((row, len(milp.cost), low - least[row]))
            elif most[row] > high:
                gives.entries.append((row, len(milp.cost), high - most[row]))
        return gives


def _glop(milp: Milp) -> Any:
    """GLOP with the relaxation of a Milp in it."""
    from ortools.math_opt import parameters_pb2
    from ortools.math_opt.core.python import solver

    proto = milp.proto()
    proto.variables.integers[:] = [False] * len(milp.cost)
    return solver.new(parameters_pb2.SOLVER_TYPE_GLOP, proto, parameters_pb2.SolverInitializerProto())


def _solved(glop: Any, time_limit_s: float, interrupter: Any, *, goes_on: bool = True) -> Any:
    """What GLOP says. ``goes_on``: whether from one solve to the next, as new rows and other bounds leave the duals feasible, and
    the solver's own preprocessing would begin anew."""
    from ortools.math_opt import callback_pb2, model_parameters_pb2

    parameters = limited(time_limit_s)
    if goes_on:
        parameters.glop.use_dual_simplex = True
        parameters.glop.use_preprocessing = False
    start, registration = model_parameters_pb2.ModelSolveParametersProto(), callback_pb2.CallbackRegistrationProto()
    return glop.solve(parameters, start, None, registration, None, interrupter)


def _infeasible(result: Any) -> bool:
    """Whether this is what HiGHS says."""
    from ortools.math_opt import result_pb2

    return result is not None and result.termination.reason in (
        result_pb2.TERMINATION_REASON_INFEASIBLE,
        result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,  # never unbounded: every variable has bounds
    )


def limited(time_limit_s: float) -> Any:
    """Parameters of a solve that may take so long."""
    from ortools.math_opt import parameters_pb2

    parameters = parameters_pb2.SolveParametersProto()
    parameters.time_limit.FromNanoseconds(max(1, int(time_limit_s * 1e9)))
    return parameters


def _parameters(
    time_limit_s: float, gap: float, cutoff: float, node_limit: int | None, seed: int, *, presolve: bool = True
) -> Any:
    from ortools.math_opt import parameters_pb2

    parameters = limited(time_limit_s)
    parameters.absolute_gap_tolerance = gap
    parameters.relative_gap_tolerance = 0.0
    parameters.random_seed = seed
    if not presolve:
        parameters.presolve = parameters_pb2.EMPHASIS_OFF
    if node_limit is not None:
        parameters.highs.int_options["mip_max_nodes"] = node_limit
    if cutoff < math.inf:
        parameters.highs.double_options["objective_bound"] = cutoff
    return parameters


_left_behind: set[threading.Event] = set()  # each set when its solve is over


def leave_behind(done: threading.Event) -> None:
    """Remember a solve that goes on after its caller has left, for ``solving`` and for the end of the interpreter."""
    _left_behind.add(done)


def solving() -> bool:
    """Whether a solve whose caller has left is still running. HiGHS cannot be stopped; it ends at its time limit."""
    return not all(done.is_set() for done in _left_behind)


@atexit.register
def _wait() -> None:
    """A thread that comes back from HiGHS while the interpreter is being torn down would abort the process."""
    for done in _left_behind:
        done.wait()


def _highs(proto: Any, parameters: Any, left: Left) -> Any:
    """What HiGHS says of a model; None where it gives up over its numerics."""
    # Imported here because Ctrl-C only reaches the main thread: in the middle of it, it would end in an ImportError.
    from ortools.math_opt import callback_pb2, model_parameters_pb2, parameters_pb2
    from ortools.math_opt.core.python import solver

    return solver.solve(
        proto,
        parameters_pb2.SOLVER_TYPE_HIGHS,
        parameters_pb2.SolverInitializerProto(),
        parameters,
        model_parameters_pb2.ModelSolveParametersProto(),
        None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )


def _interrupter() -> Any:
    """What stops GLOP. HiGHS has nothing of the kind."""
    try:
        from ortools.util.python.pybind_solve_interrupter import PySolveInterrupter
    except ImportError:  # OR-Tools up to 9.14
        from ortools.math_opt.core.python import solver

        return solver.SolveInterrupter()
    return PySolveInterrupter()


class Left:
    """Whether nobody waits for a solve any more. No lock that Ctrl-C could leave taken."""

    def __init__(self) -> None:
        self._is_set = False
        self._then: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        """Whether that is so."""
        return self._is_set

    def then(self, call: Callable[[], object]) -> None:
        """Call this when it is set, or now; perhaps more than once."""
        self._then.append(call)
        if self._is_set:
            call()

    def set(self) -> None:
        """Say so."""
        self._is_set = True
        for call in list(self._then):
            call()


def run_apart(
    solve: Callable[[Left], T],
    time_limit_s: float,
    meanwhile: Callable[[threading.Event], None] | None = None,
    left: Left | None = None,
) -> T | None:
    """Solve on a daemon thread, and ``meanwhile`` on the caller's. ``solve`` gets the event that says its caller has left.

    It is left behind on Ctrl-C, and where the solver does not look at its clock (in presolve, say). None then, and where it
    gives up over its numerics.
    """
    late = now_s() + (1 + GRACE_SHARE) * time_limit_s + GRACE_S
    results: list[T] = []
    errors: list[BaseException] = []
    done, left = Done(), left or Left()

    def work() -> None:
        try:
            results.append(solve(left))
        except BaseException as error:  # handed to the caller below
            errors.append(error)
        finally:
            done.set()

    try:
        begin(work, ())
        if meanwhile is not None:
            meanwhile(done)
        while not done.wait(0.1):
            if now_s() > late:
                left.set()
                leave_behind(done)
                return None
    except BaseException:
        left.set()
        leave_behind(done)
        raise
    if errors:
        from pybind11_abseil.status import StatusNotOk

        if isinstance(errors[0], StatusNotOk):
            return None
        raise errors[0]
    return results[0]
