"""Give one Milp to any solver: CBC and others through PuLP, HiGHS and SCIP through OR-Tools.

What a solver says of itself is not taken at its word: statuses are read from each solver's own words, a bound is only what it
has proved (a time limit or a gap proves less than "Optimal" sounds), and what cannot be read counts as not known.
The solve runs on a thread of its own, so that a time limit holds and Ctrl-C is answered whatever the solver does.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from graphs.errors import InputError
from planner.process.clock import now_s
from planner.process.waiting import Done, begin
from planner.solvers.milp import Milp, Outcome, leave_behind, limited

# Names of our own for what PuLP has under several, in the order in which they are tried.
PULP_NAMES = {
    "cplex": ("CPLEX_PY", "CPLEX_CMD"),
    "glpk": ("GLPK_CMD", "PYGLPK"),
    "gurobi": ("GUROBI", "GUROBI_CMD"),
    "mosek": ("MOSEK",),
    "xpress": ("XPRESS_PY", "XPRESS"),
}
CBC = ("cbc", "PULP_CBC_CMD", "COIN_CMD")
MATH_OPT = {"highs": "SOLVER_TYPE_HIGHS", "scip": "SOLVER_TYPE_GSCIP"}
CBC_SEED = 1_234_567  # stands for a seed of 0, which CBC takes for the time of day
DEFAULT_GAP = 1e-4  # relative, of a solver that cannot be told another
GRACE_S, GRACE_SHARE = 0.15, 0.03  # how much longer than its limit a solver may take before it is told to stop
LOOSE = 1e-4  # the tolerance to which other solvers' solutions are checked; theirs is between 1e-6 and 1e-5 in their own scaling
STOP_S = 0.3  # how long it then has to end


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a solve.

    outcome  SOLVED (a solution, proved within the asked gap), STOPPED (a solution may be there) or INFEASIBLE (proved)
    values   one per variable, None where no solution was found
    cost     of ``values``, infinite without
    bound    no solution costs less (-inf where nothing was proved)
    stopped  why it ended before its proof was done; None where it did not. On Ctrl-C "interrupted", whatever was done by then
    """

    outcome: Outcome
    values: list[float] | None = None
    cost: float = math.inf
    bound: float = -math.inf
    stopped: str | None = None


def minimise(
    milp: Milp,
    *,
    solver: str = "cbc",
    time_limit_s: float,
    gap: float = 0.0,
    start: Sequence[float] | None = None,
    seed: int = 0,
) -> Answer:
    """Solve with any solver; with no integer variables, the LP.

    solver        "cbc", "highs", "scip"; "gurobi", "cplex", "xpress", "mosek", "glpk" where installed and licensed; or PuLP's own
                  name of any solver
    time_limit_s  kept within 3 % + 1 s; the best solution and bound until then are returned, and on Ctrl-C too
    gap           stop when cost - bound is at most this (absolute)
    start         a solution to begin with, one number per variable
    seed          for solvers that can be given one

    Raises InputError where there is no such solver, or where it cannot run here.
    """
    run = _backend(milp, solver, max(0.01, time_limit_s), gap, start, seed)
    answers: list[Answer] = []
    errors: list[BaseException] = []
    done = Done()

    def work() -> None:
        try:
            answers.append(run.solve())
        except BaseException as error:  # handed to the caller below
            errors.append(error)
        finally:
            done.set()

    stopped = None
    try:
        try:
            begin(work, ())
            if not done.wait((1 + GRACE_SHARE) * time_limit_s + GRACE_S):
                stopped = "time limit"
        except KeyboardInterrupt:
            stopped = "interrupted"
        if stopped:
            run.stop()
            done.wait(STOP_S)
        if errors:
            raise errors[0]
        if answers:
            answer = answers[0]
            is_so = stopped == "interrupted" or answer.stopped
            return replace(answer, stopped=stopped) if stopped and is_so else answer
        return replace(run.so_far(), stopped=stopped)
    finally:
        run.close()
        if not done.is_set():
            leave_behind(done)


class _Run(Protocol):
    """One solve. ``stop`` asks it to end soon, ``so_far`` is what it has; ``close`` ends what can be ended and cleans up."""

    def solve(self) -> Answer: ...
    def stop(self) -> None: ...
    def so_far(self) -> Answer: ...
    def close(self) -> None: ...


def check_solver(solver: str) -> None:
    """Raises InputError where there is no such solver, or where it cannot run here."""
    if not isinstance(solver, str):
        raise InputError(f"solver must be the name of one, not {solver!r}")
    if solver in CBC:
        _cbc_path()
    elif solver not in MATH_OPT:
        _pulp_name(solver)


def _backend(milp: Milp, solver: str, time_limit_s: float, gap: float, start: Sequence[float] | None, seed: int) -> _Run:
    if solver in MATH_OPT:
        return _MathOpt(milp, MATH_OPT[solver], time_limit_s, gap, start, seed)
    if solver in CBC:
        return _Cbc(milp, time_limit_s, gap, start, seed)
    return _Pulp(milp, _pulp_name(solver), time_limit_s, gap, start, seed)


def _pulp_name(solver: str) -> str:
    """The name of a PuLP solver that can run here. Raises InputError with what to do where there is none."""
    import pulp

    names = PULP_NAMES.get(solver, (solver,))
    if names[0] not in pulp.listSolvers():
        known = ", ".join(sorted({"cbc", *MATH_OPT, *PULP_NAMES}))
        raise InputError(f"unknown solver {solver!r}; there are: {known}, and PuLP's own names: {', '.join(pulp.listSolvers())}")
    for name in names:
        if pulp.getSolver(name, msg=False).available():
            return name
    raise InputError(
        f"the solver {solver!r} is not installed or has no licence here (PuLP cannot run {' or '.join(names)}); install it, or "
        "use one that comes along: cbc, highs, scip"
    )


class _Cbc:
    """CBC as PuLP ships it, run on an MPS file. Its log and not its status word says what it proved."""

    def __init__(self, milp: Milp, time_limit_s: float, gap: float, start: Sequence[float] | None, seed: int) -> None:
        self._milp, self._time_limit_s, self._gap, self._start, self._seed = milp, time_limit_s, gap, start, seed
        self._folder = tempfile.TemporaryDirectory(prefix="cbc-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._path = _cbc_path()

    def solve(self) -> Answer:
        began = now_s()
        folder = Path(self._folder.name)
        write_mps(self._milp, folder / "model.mps")
        command = [self._path, "model.mps", "-timeMode", "elapsed", "-ratio", "0", "-allow", repr(self._gap)]
        seed = str(self._seed or CBC_SEED)
        command += ["-randomSeed", seed, "-randomCbcSeed", seed]
        if self._start is not None:
            write_start(self._milp, self._start, folder / "start.sol")
            command += ["-mips", "start.sol"]
        answer = self._once(command, began)
        if answer.outcome is Outcome.INFEASIBLE and any(self._milp.integer):
            # CBC's preprocessing has called feasible models infeasible, so its word is asked for again without.
            if now_s() - began >= self._time_limit_s:
                return Answer(Outcome.STOPPED, stopped="time limit")
            answer = self._once([*command, "-preprocess", "off", "-presolve", "off"], began)
        return answer

    def _once(self, command: list[str], began: float) -> Answer:
        folder = Path(self._folder.name)
        left_s = max(0.01, self._time_limit_s - (now_s() - began))
        solve = "-solve" if any(self._milp.integer) else "-initialSolve"
        command = [*command, "-sec", f"{left_s:.3f}", solve, "-solution", "solution.txt"]
        (folder / "solution.txt").unlink(missing_ok=True)
        with open(folder / "log.txt", "wb") as log:
            # In a process group of its own: Ctrl-C in a terminal is for us to pass on, once.
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            if self._closed:  # while it was being started
                self._process.kill()
            code = self._process.wait()
        if code and code != -signal.SIGKILL:
            raise AssertionError(f"CBC ended with code {code}: {self._log()[-500:]}")
        return self._read()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self._closed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def so_far(self) -> Answer:
        return Answer(Outcome.STOPPED, bound=cbc_bound(self._log()))

    def _log(self) -> str:
        path = Path(self._folder.name, "log.txt")
        return path.read_text(errors="replace") if path.exists() else ""

    def _read(self) -> Answer:
        path, log = Path(self._folder.name, "solution.txt"), self._log()
        if not path.exists():  # killed, or stopped before it had begun
            return Answer(Outcome.STOPPED, bound=cbc_bound(log), stopped="time limit")
        with open(path) as lines:
            status = next(lines, "").strip()
            outcome, has_values = cbc_outcome(status, log)
            if outcome is Outcome.INFEASIBLE:
                return Answer(outcome, bound=math.inf)
            values = [0.0] * len(self._milp.cost)
            if has_values:
                for line in lines:
                    parts = line.replace("**", "").split()
                    values[int(parts[1][1:])] = float(parts[2])
        bound = cbc_bound(log)
        if not has_values:
            return Answer(Outcome.STOPPED, bound=bound, stopped="time limit")
        cost = self._milp.cost_of(values)
        if outcome is Outcome.SOLVED:
            return Answer(outcome, values, cost, max(bound, cost - self._gap))
        return Answer(outcome, values, cost, min(bound, cost), "time limit")


def _cbc_path() -> str:
    """CBC's path: the binary in PuLP, or where PuLP has none any more, the one that it would find."""
    import pulp

    if "PULP_CBC_CMD" in pulp.listSolvers():
        path = str(pulp.PULP_CBC_CMD.pulp_cbc_path)
        if os.access(path, os.X_OK):
            return path
    command = pulp.COIN_CMD(msg=False)
    if not command.available():
        raise InputError(
            "PuLP ships no CBC for this machine and none is installed; use solver='highs' or 'scip', which come along"
        )
    return str(command.path)


def cbc_outcome(status: str, log: str) -> tuple[Outcome, bool]:
    """What the first line of CBC's solution file means, and whether a solution follows.

    "Stopped on time - objective value ..." comes with a solution, "Stopped on time (no integer solution - continuous used)"
    with one of the relaxation only. "Infeasible" is a proof only where no limit was met, and "Optimal" holds within the gap.
    Raises AssertionError for words that are not known.
    """
    limit_met = "Stopped on time" in log or "Exiting on maximum time" in log or "stopped on time" in log
    if status.startswith("Optimal"):
        return (Outcome.STOPPED if limit_met else Outcome.SOLVED), True
    if status.startswith(("Infeasible", "Integer infeasible")):
        return (Outcome.STOPPED, False) if limit_met else (Outcome.INFEASIBLE, False)
    if status.startswith("Stopped"):
        return Outcome.STOPPED, "objective value" in status and "continuous used" not in status and "no integer" not in status
    raise AssertionError(f"CBC's solution file begins with {status!r}")


def cbc_bound(log: str) -> float:
    """The best bound in CBC's log, -inf where there is none; what may have been rounded up in print is lowered."""
    found = [_at_least(number) for number in _CBC_BOUND.findall(log)]
    return max((b for b in found if abs(b) < 1e49), default=-math.inf)


def _at_least(text: str) -> float:
    """The least number that is printed so: six digits or three decimals may be all that was printed, fewer are the number."""
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    cut = decimals >= 3 or sum(c.isdigit() for c in mantissa) >= 6
    return float(text) - (10.0 ** (int(exponent or 0) - decimals) if cut else 0.0)


_NUMBER = r"(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
_CBC_BOUND = re.compile(rf"(?:best possible |^Lower bound: +|^Continuous objective value is ){_NUMBER}", re.MULTILINE)


class _MathOpt:
    """HiGHS and SCIP through OR-Tools, which can end neither (its interrupter makes SCIP print errors on standard error).

    HiGHS writes solutions to a file as it finds them; of an interrupted SCIP only the bound in its log is left.
    """

    def __init__(self, milp: Milp, kind: str, time_limit_s: float, gap: float, start: Sequence[float] | None, seed: int) -> None:
        self._milp, self._kind, self._time_limit_s, self._gap, self._start, self._seed = (
            milp, kind, time_limit_s, gap, start, seed,
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="highs-", ignore_cleanup_errors=True)
        self._log: list[str] = []

    def solve(self) -> Answer:
        from ortools.math_opt import result_pb2

        began = now_s()
        result = self._once(self._time_limit_s, presolve=True)
        infeasible = (
            result_pb2.TERMINATION_REASON_INFEASIBLE,
            result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,  # never unbounded: every variable has bounds
        )
        left_s = self._time_limit_s - (now_s() - began)
        if isinstance(result, Answer):
            return result
        if result.termination.reason in infeasible and self._kind == MATH_OPT["highs"]:
            # HiGHS's presolve has called feasible models infeasible, so its word is asked for again without presolve.
            if left_s <= 0:
                return Answer(Outcome.STOPPED, stopped="time limit")
            result = self._once(left_s, presolve=False)
            if isinstance(result, Answer):
                return result
        reason = result.termination.reason
        if reason in infeasible:
            return Answer(Outcome.INFEASIBLE, bound=math.inf)
        if reason not in (
            result_pb2.TERMINATION_REASON_OPTIMAL,
            result_pb2.TERMINATION_REASON_FEASIBLE,
            result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND,
        ):
            raise AssertionError(f"{self._kind} ended with {result.termination}")
        bound = result.termination.objective_bounds.dual_bound
        outcome, stopped = Outcome.SOLVED, None
        if reason != result_pb2.TERMINATION_REASON_OPTIMAL:
            outcome, stopped = Outcome.STOPPED, "time limit"
        if not result.solutions:
            return Answer(outcome, bound=bound, stopped=stopped)
        values = list(result.solutions[0].primal_solution.variable_values.values)
        return Answer(outcome, values, self._milp.cost_of(values), bound, stopped)

    def _once(self, time_limit_s: float, *, presolve: bool) -> Any:
        """The solver's own result, or an Answer where it gives up."""
        from ortools.math_opt import callback_pb2, model_parameters_pb2, parameters_pb2
        from ortools.math_opt.core.python import solver
        from pybind11_abseil.status import StatusNotOk  # comes with OR-Tools

        parameters = limited(time_limit_s)
        parameters.absolute_gap_tolerance = self._gap
        parameters.relative_gap_tolerance = 0.0
        parameters.random_seed = self._seed
        if not presolve:
            parameters.presolve = parameters_pb2.EMPHASIS_OFF
        if self._kind == MATH_OPT["highs"]:
            parameters.highs.string_options["mip_improving_solution_file"] = self._improving
            parameters.highs.bool_options["mip_improving_solution_save"] = True
        model_parameters = model_parameters_pb2.ModelSolveParametersProto()
        if self._start is not None:
            hint = model_parameters.solution_hints.add()
            hint.variable_values.ids.extend(range(len(self._start)))
            hint.variable_values.values.extend(self._start)
        try:
            return solver.solve(
                self._milp.proto(),
                getattr(parameters_pb2, self._kind),
                parameters_pb2.SolverInitializerProto(),
                parameters,
                model_parameters,
                self._log.extend,
                callback_pb2.CallbackRegistrationProto(),
                None,
                None,
            )
        except StatusNotOk as error:  # numerical trouble: the solver ended without a word on the model
            name = next(name for name, kind in MATH_OPT.items() if kind == self._kind)
            return replace(self.so_far(), stopped=f"{name} gives up: {error}")

    @property
    def _improving(self) -> str:
        return str(Path(self._folder.name, "improving.sol"))

    def stop(self) -> None:
        """It ends at its own time limit."""

    def close(self) -> None:
        self._folder.cleanup()

    def so_far(self) -> Answer:
        bound = logged_bound(self._log)
        values = highs_solution(Path(self._improving), len(self._milp.cost))
        return Answer(Outcome.STOPPED, values, math.inf if values is None else self._milp.cost_of(values), bound)


def logged_bound(log: Sequence[str]) -> float:
    """The best bound in the tables that HiGHS and SCIP log, -inf where there is none; lowered as for CBC."""
    best = -math.inf
    for line in log:
        if match := _HIGHS_ROW.match(line) or _SCIP_ROW.match(line):
            best = max(best, _at_least(match[1]))
    return best


_HIGHS_ROW = re.compile(rf"^ ?[A-Za-z]? +\d+ +\d+ +\d+ +[\d.]+% +{_NUMBER} ")
_SCIP_ROW = re.compile(rf"^.{{1,2}}? *[\d.]+s\|.*\| *{_NUMBER} *\|[^|]*\|[^|]*\|[^|]*$")


def highs_solution(path: Path, count: int) -> list[float] | None:
    """The last whole solution in the file that HiGHS writes improving ones to."""
    if not path.exists():
        return None
    for block in reversed(path.read_text().split("# Columns ")[1:]):
        lines = block.split("\n")
        numbers = lines[1 : count + 1]
        if len(numbers) == count and len(lines) > count + 1:  # the line after the last number is there: nothing was cut off
            return [float(number) for number in numbers]
    return None


_NATIVE_BOUNDS: dict[str, Callable[[Any], float]] = {
    "CPLEX_PY": lambda model: model.solution.MIP.get_best_objective(),
    "GUROBI": lambda model: model.ObjBound,
    "SCIP_PY": lambda model: model.getDualbound(),
}


class _Pulp:
    """Any other solver of PuLP's. Where PuLP hides the bound, only "Optimal" before the time limit proves one, less the gap.

    PuLP says "Not Solved" of a solver that a limit stopped, even where a solution is there; so the rows say what is one.
    """

    def __init__(self, milp: Milp, name: str, time_limit_s: float, gap: float, start: Sequence[float] | None, seed: int) -> None:
        self._milp, self._name, self._time_limit_s, self._gap, self._start = milp, name, time_limit_s, gap, start

    def solve(self) -> Answer:
        import pulp

        began = now_s()
        with tempfile.TemporaryDirectory(prefix="pulp-") as folder:
            path = Path(folder, "model.mps")
            write_mps(self._milp, path)
            variables, problem = pulp.LpProblem.fromMPS(str(path))
        if self._start is not None:
            for i, value in enumerate(self._start):
                variables[f"x{i}"].setInitialValue(round(value) if self._milp.integer[i] else value, check=False)
        asked = {
            "timeLimit": max(1.0, self._time_limit_s - (now_s() - began)),
            "gapAbs": self._gap,
            "gapRel": 0.0,
            "warmStart": self._start is not None,
        }
        known = inspect.signature(type(pulp.getSolver(self._name, msg=False)).__init__).parameters
        options = {key: value for key, value in asked.items() if key in known}
        try:
            problem.solve(pulp.getSolver(self._name, msg=False, **options))
        except Exception as error:  # of whatever kind the solver's own package raises: no licence for this size, say
            size = f"{len(self._milp.cost):,} variables and {len(self._milp.row_lower):,} rows"
            raise InputError(f"the solver {self._name!r} refused a model of {size}: {error}; use another one") from error
        in_time = now_s() - began < 0.95 * self._time_limit_s
        if problem.status == pulp.LpStatusInfeasible and in_time:  # its sol_status says so of "Not Solved" too
            return Answer(Outcome.INFEASIBLE, bound=math.inf)
        solved = in_time and problem.sol_status == pulp.LpSolutionOptimal
        bound = self._native_bound(problem) if any(self._milp.integer) else -math.inf
        values = [variables[f"x{i}"].varValue for i in range(len(self._milp.cost))]
        if None in values or not satisfies(self._milp, values, LOOSE):
            said = f"{pulp.LpStatus[problem.status]} ({pulp.LpSolution[problem.sol_status]})"
            return Answer(Outcome.STOPPED, bound=bound, stopped=f"{self._name} says {said} and gives no solution")
        cost = self._milp.cost_of(values)
        if solved:
            given = 0.0 if "gapRel" in options else DEFAULT_GAP
            return Answer(Outcome.SOLVED, values, cost, max(bound, cost - max(self._gap, given * abs(cost))))
        return Answer(Outcome.STOPPED, values, cost, min(bound, cost), "time limit")

    def _native_bound(self, problem: Any) -> float:
        """The bound from the solver's own Python model, where PuLP leaves it and it has one."""
        read = _NATIVE_BOUNDS.get(self._name)
        bound = float(read(problem.solverModel)) if read is not None else -math.inf
        return bound if abs(bound) < 1e20 else -math.inf

    def stop(self) -> None:
        """PuLP offers no way; the solver ends at its own time limit."""

    def close(self) -> None:
        """Nothing of its own is left."""

    def so_far(self) -> Answer:
        return Answer(Outcome.STOPPED)


def satisfies(milp: Milp, values: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Whether all rows and bounds hold, to a tolerance (relative for what is above 1)."""
    sums = [0.0] * len(milp.row_lower)
    for row, x, a in milp.entries:
        sums[row] += a * values[x]

    def between(low: float, value: float, high: float) -> bool:
        slack = tolerance * max(1.0, abs(value))
        return low - slack <= value <= high + slack

    return all(map(between, milp.row_lower, sums, milp.row_upper)) and all(map(between, milp.lower, values, milp.upper))


def write_mps(milp: Milp, path: Path) -> None:
    """Write a Milp as free MPS: columns x0, x1, ..., rows r0, r1, ..."""
    columns: list[list[str]] = [[] for _ in milp.cost]
    for row, x, a in milp.entries:
        columns[x].append(f" x{x} r{row} {a!r}\n")
    with open(path, "w") as out:
        out.write("NAME milp\nROWS\n N cost\n")
        sides = list(zip(milp.row_lower, milp.row_upper, strict=True))
        for r, (low, high) in enumerate(sides):
            assert low == high or math.isinf(low) or math.isinf(high), f"row {r} is a range"
            out.write(f" {'E' if low == high else 'G' if math.isinf(high) else 'L'} r{r}\n")
        out.write("COLUMNS\n")
        integer = False
        for x, lines in enumerate(columns):
            if milp.integer[x] != integer:
                integer = milp.integer[x]
                out.write(f" M{x} 'MARKER' '{'INTORG' if integer else 'INTEND'}'\n")
            out.write(f" x{x} cost {float(milp.cost[x])!r}\n")
            out.writelines(lines)
        if integer:
            out.write(" M 'MARKER' 'INTEND'\n")
        out.write("RHS\n")
        for r, (low, high) in enumerate(sides):
            if right := high if math.isinf(low) else low:
                out.write(f" RHS r{r} {float(right)!r}\n")
        out.write("BOUNDS\n")
        for x, (low, high) in enumerate(zip(milp.lower, milp.upper, strict=True)):
            if low:
                out.write(f" LO BND x{x} {float(low)!r}\n")
            out.write(f" UP BND x{x} {float(high)!r}\n")
        out.write("ENDATA\n")


def write_start(milp: Milp, values: Sequence[float], path: Path) -> None:
    """Write a solution in the way CBC reads one to start from: the integer variables, the others follow."""
    with open(path, "w") as out:
        out.write("Stopped on time - objective value 0\n")
        for x, value in enumerate(values):
            if milp.integer[x]:
                out.write(f"{x} x{x} {round(value)} 0\n")
