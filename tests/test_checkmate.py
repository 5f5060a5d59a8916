"""Checkmate's MILP: published optima, brute force over its space, and what solvers say against what they proved."""

import heapq
import math
import os
import subprocess
import sys
from pathlib import Path

import pulp
import pytest

from graphs import Graph, Op, Value
from graphs.errors import InputError
from graphs.importers import load_checkmate
from graphs.synthetic import chain, random_training
from planner import Status, keep_all, simulate, solve
from planner.least.pebbling import fitting
from planner.methods.checkmate_model import Form, checkmate_model, held_of, own_runs, start_values, walk
from planner.schedule import Compute, Schedule, computes, with_frees
from planner.solvers.milp import Milp, Outcome
from planner.solvers.mip_solvers import (
    _Pulp,
    cbc_bound,
    cbc_outcome,
    highs_solution,
    logged_bound,
    minimise,
)
from tests.chains import vgg19
from tests.clock import stopwatch
from tests.oracles import _frees
from tests.strategies import random_budget, random_graph

GB = 2**30
UNIT_NS = 10_000  # published costs are in units of 10 µs
CHAIN_8 = {3: 45, 4: 26, 5: 22, 6: 21, 7: 20, 8: 19, 9: 18, 10: 17}
CHAIN_8_LP = {
    "paper": {3: 23, 4: 22, 5: 21, 6: 20, 7: 19, 8: 18.111, 9: 17.444, 10: 17},
    "strong": {3: 24, 4: 23, 5: 22, 6: 21, 7: 20, 8: 19, 9: 18, 10: 17},
}


def least_time_in_space(graph: Graph, budget_bytes: int) -> int | None:
    """Brute force over Checkmate's space: between two first executions ops run again at most once, in graph order.

    A state is what is in memory, how many ops have run for the first time, and the last op that ran since then.
    """
    count, wanted = len(graph.ops), graph.outputs - graph.resident
    start: tuple[frozenset[int], int, int] = (frozenset(), 0, -1)
    best = {start: 0}
    queue = [(0, 0, start)]
    pushed = 0
    closed = set()
    while queue and graph.resident_bytes <= budget_bytes:
        cost, _, state = heapq.heappop(queue)
        if state in closed:
            continue
        closed.add(state)
        present, t, last = state
        if t == count and wanted <= present:
            return cost
        for i in range(last + 1, min(t + 1, count)):
            op = graph.ops[i]
            if (op.effect and i < t) or any(x not in present and x not in graph.resident for x in op.inputs):
                continue
            for freed in _frees(graph, i, present, budget_bytes):
                after = ((present - freed) | frozenset(op.outputs), t + (i == t), -1 if i == t else i)
                reached = cost + op.time_ns
                if reached < best.get(after, reached + 1):
                    best[after] = reached
                    pushed += 1
                    heapq.heappush(queue, (reached, pushed, after))
    return None


def in_space(graph: Graph, schedule: Schedule) -> bool:
    """Whether a schedule lies in Checkmate's space, read off its runs."""
    first, last = 0, -1
    for i in computes(schedule):
        if not last < i <= first:
            return False
        first, last = (first + 1, -1) if i == first else (first, i)
    return True


# Published and known optima


@pytest.mark.parametrize("budget", CHAIN_8)
def test_unit_chain(budget: int) -> None:
    graph = chain(8)
    found = solve(graph, budget, method="checkmate", gap=0.0)
    assert found.time_ns == CHAIN_8[budget]
    assert found.restricted_bound_ns == (CHAIN_8[budget] if budget < 10 else None)
    assert found.bound_ns == 17
    assert found.status is (Status.OPTIMAL if budget == 10 else Status.FEASIBLE)
    assert found.schedule is not None and in_space(graph, found.schedule)


@pytest.mark.parametrize("solver", ["highs", "scip"])
@pytest.mark.parametrize("budget", [3, 5, 6])
def test_unit_chain_by_other_solvers(budget: int, solver: str) -> None:
    found = solve(chain(8), budget, method="checkmate", gap=0.0, solver=solver)
    assert (found.time_ns, found.restricted_bound_ns) == (CHAIN_8[budget], CHAIN_8[budget])
    assert found.notes["solver"] == solver


@pytest.mark.parametrize("budget", [3, 5, 7])
def test_unit_chain_in_the_published_form(budget: int) -> None:
    found = solve(chain(6), budget, method="checkmate", gap=0.0, form="paper")
    assert found.time_ns == solve(chain(6), budget, method="checkmate", gap=0.0).time_ns == found.restricted_bound_ns


@pytest.mark.parametrize("budget", CHAIN_8)
def test_unit_chain_needs_no_gradient_twice(budget: int) -> None:
    found = solve(chain(8), budget, method="checkmate", gap=0.0, recompute_backward=False)
    assert found.time_ns == CHAIN_8[budget]
    assert found.restricted_bound_ns is None  # what is proved holds for fewer schedules than Checkmate's
    if budget < 10:
        assert found.notes["bound_without_recomputed_backward_ns"] == CHAIN_8[budget]


@pytest.mark.parametrize("budget", CHAIN_8)
def test_lp_bounds_of_the_unit_chain(budget: int) -> None:
    """The published form's LP is the reference's to three decimals; the strong one's is at least the reference's strong one."""

    def bound(form: Form, presolve: bool) -> float:
        model = checkmate_model(chain(8), budget, form=form, presolve=presolve, integer=False)
        return 17 + minimise(model.milp, time_limit_s=60).bound * model.unit_ns

    assert bound("paper", False) == pytest.approx(CHAIN_8_LP["paper"][budget], abs=6e-4)
    for presolve in (False, True):
        assert CHAIN_8_LP["strong"][budget] - 1e-6 <= bound("strong", presolve) <= CHAIN_8[budget] + 1e-6


def test_vgg19() -> None:
    graph = vgg19()
    assert len(graph.ops) == 51 and sum(len(op.inputs) for op in graph.ops) == 99
    assert graph.keep_all_time_ns == 58_896_187_392
    assert simulate(graph, keep_all(graph)).peak_bytes == 66_633_728
    found = solve(graph, 51_380_224, method="checkmate", gap=0.0)
    assert found.time_ns == found.restricted_bound_ns == 58_982_891_520
    assert solve(graph, 69_447_584, method="checkmate").time_ns == 58_896_187_392


def instance(data: Path, name: str) -> Graph:
    return load_checkmate(data / "checkmate_instances" / f"{name}.json")


@pytest.mark.slow
def test_vgg16_solved(data: Path) -> None:
    graph = instance(data, "vgg16_176")
    found = solve(graph, 10 * GB, method="checkmate", gap=1e-4, time_limit_s=120)
    assert found.time_ns is not None and found.restricted_bound_ns is not None
    assert found.restricted_bound_ns <= 250_600 * UNIT_NS <= found.time_ns <= 1.0001 * found.restricted_bound_ns
    assert solve(graph, 7 * GB // 2, method="checkmate").status is Status.INFEASIBLE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gigabytes", "optimum"),
    [("vgg16_176", 9, 251_383), ("vgg16_176", 8, 255_828), ("unet_11", 10, 192_792), ("unet_11", 9, 193_682)],
)
def test_published_instances(data: Path, name: str, gigabytes: int, optimum: int) -> None:
    """The optimum of each is a solution of the model, at its cost, and no LP is above it.

    Cutting stages proves these optima for every schedule with this order of first executions, so none of the space beats them.
    """
    graph = instance(data, name)
    known = solve(graph, gigabytes * GB, gap=0.0, time_limit_s=60)
    assert known.schedule is not None
    assert known.bound_ns == known.time_ns == optimum * UNIT_NS
    model = checkmate_model(graph, gigabytes * GB)
    values = start_values(model, known.schedule)
    assert values is not None
    cost_ns = model.unit_ns * sum(c * v for c, v in zip(model.milp.cost, values, strict=True))
    assert graph.keep_all_time_ns + cost_ns == pytest.approx(optimum * UNIT_NS, abs=1)
    relaxed = checkmate_model(graph, gigabytes * GB, integer=False)
    bound_ns = relaxed.bound_ns(minimise(relaxed.milp, time_limit_s=60).bound)
    assert bound_ns is not None and graph.keep_all_time_ns < bound_ns <= optimum * UNIT_NS


# Brute force


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 100, 50)], ids=lambda r: f"from{r.start}")
def test_agrees_with_brute_force(seeds: range) -> None:
    """Several outputs, workspace, effects, random ops, budgets down to one byte below the least."""
    solved = refused = 0
    for seed in seeds:
        graph = random_graph(seed, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed) - (seed % 7 == 0)
        best = least_time_in_space(graph, budget_bytes)
        found = solve(graph, budget_bytes, method="checkmate", gap=0.0)
        assert found.time_ns == best, seed
        if best is None:
            assert found.notes.get("stopped", found.notes.get("infeasible")), seed
            refused += 1
        elif best > graph.keep_all_time_ns:
            assert found.restricted_bound_ns == best, seed
            assert found.schedule is not None and in_space(graph, found.schedule), seed
            solved += 1
    assert solved >= 8 and refused >= 3


@pytest.mark.parametrize("form", ["strong", "paper"])
@pytest.mark.parametrize("presolve", [True, False])
def test_forms_and_reductions_change_nothing(form: Form, presolve: bool) -> None:
    for seed in range(500, 540):
        graph = random_graph(seed, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed)
        best = least_time_in_space(graph, budget_bytes)
        model = checkmate_model(graph, budget_bytes, form=form, presolve=presolve)
        answer = minimise(model.milp, time_limit_s=30)
        if best is None:
            assert answer.outcome is Outcome.INFEASIBLE, seed
            continue
        assert answer.outcome is Outcome.SOLVED and answer.values is not None
        assert round(graph.keep_all_time_ns + answer.cost * model.unit_ns) == best, seed
        runs = walk(model, model.held(answer.values))
        assert runs is not None
        for sequence in (runs, own_runs(model, answer.values)):  # Algorithm 2's least R, and the solver's own
            trace = simulate(graph, with_frees(graph, sequence))
            assert (trace.time_ns, trace.peak_bytes <= budget_bytes) == (best, True), seed


def test_a_larger_budget_never_costs_more() -> None:
    for seed in range(700, 715):
        graph = random_graph(seed)
        least = random_budget(graph, seed)
        times = [solve(graph, least + more, method="checkmate", gap=0.0).time_ns for more in range(0, 8, 2)]
        known = [t for t in times if t is not None]
        assert times[len(times) - len(known) :] == sorted(known, reverse=True), seed


def test_what_the_model_frees_is_what_the_sequence_frees() -> None:
    """U is no less than what ``simulate`` finds at the same op; each value is freed at most once a stage (Theorem 4.1)."""
    graph = chain(8)
    model = checkmate_model(graph, 5)
    answer = minimise(model.milp, time_limit_s=60)
    assert answer.values is not None
    values = answer.values
    for t, x in {(t, x) for t, x, _ in model.free}:
        assert sum(values[f] for (t_, x_, _), f in model.free.items() if (t_, x_) == (t, x)) <= 1 + 1e-6
    schedule = with_frees(graph, own_runs(model, values))
    trace, t = simulate(graph, schedule), 0
    for step, held_bytes in zip(schedule, trace.memory_bytes, strict=True):
        if isinstance(step, Compute):
            if step.op == t:
                t += 1
            elif (t, step.op) in model.used:
                assert held_bytes <= values[model.used[t, step.op]] * model.unit_bytes + 1e-6


# Against the other methods


def test_agrees_with_cutting_stages() -> None:
    """Its stages-only bound holds for all schedules with this order, and where its plan lies in the space both are optimal."""
    same = 0
    for seed in range(900, 960):
        graph = random_training(3, seed) if seed % 2 else random_graph(seed)
        budget_bytes = random_budget(graph, seed) if seed % 2 == 0 else int(0.85 * simulate(graph, keep_all(graph)).peak_bytes)
        cut = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
        found = solve(graph, budget_bytes, method="checkmate", gap=0.0)
        if found.time_ns is None:
            continue
        assert cut.bound_ns is not None and cut.bound_ns <= found.time_ns, seed
        if cut.time_ns == cut.bound_ns and cut.schedule is not None and in_space(graph, cut.schedule):
            assert found.time_ns == cut.time_ns, seed
            same += 1
    assert same >= 25


# What solvers say


def test_infeasible_is_not_stopped() -> None:
    """A budget that an op alone exceeds is infeasible; one that no schedule of the space fits is not known to be."""
    graph = chain(8)
    assert solve(graph, 2, method="checkmate").status is Status.INFEASIBLE
    refused = 0
    for seed in range(1500):
        graph = random_graph(seed, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed) - 1
        if least_time_in_space(graph, budget_bytes) is None and refused < 5:
            found = solve(graph, budget_bytes, method="checkmate")
            if found.status is Status.UNKNOWN:
                assert found.notes["stopped"] == "no schedule in Checkmate's space fits"
                refused += 1
        if refused == 5:
            break
    assert refused == 5


@pytest.mark.parametrize("solver", ["cbc", "highs", "scip"])
def test_time_limit_without_a_schedule(solver: str) -> None:
    graph = random_training(60, 1)
    budget_bytes = int(0.4 * simulate(graph, keep_all(graph)).peak_bytes)
    taken_s = stopwatch()
    found = solve(graph, budget_bytes, method="checkmate", solver=solver, time_limit_s=2.0)
    assert taken_s() <= 2.0 * 1.1 + 1.0
    assert found.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert found.notes["stopped"].startswith("time limit")


def test_models_too_large_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.methods.checkmate_model.COEFFICIENTS", 1000)
    for method in ("checkmate", "checkmate_lp"):
        found = solve(chain(12), 5, method=method)
        assert found.status is Status.UNKNOWN
        assert found.notes["stopped"].startswith("the model is too large: 1,000 coefficients by stage ")


@pytest.mark.parametrize("method", ["checkmate", "checkmate_lp"])
def test_stages_too_many_to_list_are_not_listed(method: str) -> None:
    graph = chain(12_000)
    taken_s = stopwatch()
    found = solve(graph, 100, method=method)
    assert found.notes["stopped"] == "the model is too large: 10,000,000 values that some stage can hold"
    late = solve(graph, 100, method=method, time_limit_s=0.1)
    assert late.notes["stopped"] == "time limit"
    assert taken_s() < 10


def test_all_values_of_all_stages_are_counted_without_presolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.methods.checkmate_model.COEFFICIENTS", 1000)
    found = solve(chain(50), 5, method="checkmate", presolve=False)
    assert found.notes["stopped"] == "the model is too large: 1,000 values that some stage can hold"


def test_time_limit_keeps_the_start() -> None:
    graph = random_training(40, 1)
    budget_bytes = int(0.5 * simulate(graph, keep_all(graph)).peak_bytes)
    start = next(fitting(graph, budget_bytes))
    found = solve(graph, budget_bytes, method="checkmate", time_limit_s=1.5, start=start)
    assert found.time_ns is not None and found.time_ns <= simulate(graph, start).time_ns
    assert found.notes["stopped"] == "time limit"
    assert found.bound_ns == graph.keep_all_time_ns


def test_start_is_the_solvers_first_solution() -> None:
    """Stopped at once, every solver that takes a start has it."""
    graph, budget = chain(8), 4
    known = solve(graph, budget, method="checkmate", gap=0.0)
    model = checkmate_model(graph, budget)
    assert known.schedule is not None
    values = start_values(model, known.schedule)
    assert values is not None
    for solver in ("cbc", "highs", "scip"):
        answer = minimise(model.milp, solver=solver, time_limit_s=30, start=values, gap=3.5)
        assert answer.values is not None and answer.bound <= 26 - 17 <= answer.cost <= 9 + 3.5


def test_start_of_another_order_is_kept_beside() -> None:
    """Two independent ops swapped: not in the space, but a schedule all the same."""
    ops = (Op("a", (), (0,), 5), Op("b", (), (1,), 5), Op("c", (0,), (2,), 5), Op("d", (1, 2), (3,), 5), Op("e", (0, 3), (4,), 5))
    graph = Graph("swap", ops, tuple(Value(op.name, 1) for op in ops), frozenset(), frozenset({4}))
    start = with_frees(graph, [1, 0, 2, 0, 3, 0, 4])
    peak = simulate(graph, start).peak_bytes
    found = solve(graph, peak, method="checkmate", start=start, gap=0.0)
    assert found.time_ns is not None and found.time_ns <= simulate(graph, start).time_ns
    if simulate(graph, keep_all(graph)).peak_bytes > peak:
        assert "not in Checkmate's space" in found.notes["start"]
    model = checkmate_model(graph, peak)
    assert held_of(model, [1, 0, 2, 3, 4]) is None


def test_gap_is_reported_as_proved() -> None:
    """With a wide gap the solver stops early; the bound it leaves is still below the optimum, and the gap as asked."""
    for budget in (3, 4, 5, 6):
        found = solve(chain(8), budget, method="checkmate", gap=0.2)
        assert found.time_ns is not None and found.restricted_bound_ns is not None
        assert found.restricted_bound_ns <= CHAIN_8[budget] <= found.time_ns
        assert found.time_ns - found.restricted_bound_ns <= 0.2 * found.time_ns


@pytest.mark.parametrize(
    ("status", "log", "outcome", "has_values"),
    [
        ("Optimal - objective value 9.00000000", "Result - Optimal solution found", Outcome.SOLVED, True),
        ("Optimal - objective value 9.00000000", "Result - Stopped on time limit", Outcome.STOPPED, True),
        ("Stopped on time - objective value 12.00000000", "Result - Stopped on time limit", Outcome.STOPPED, True),
        ("Stopped on time (no integer solution - continuous used) - objective value 6.0", "", Outcome.STOPPED, False),
        ("Infeasible - objective value 0.00000000", "Problem is infeasible", Outcome.INFEASIBLE, False),
        ("Integer infeasible - objective value 0.00000000", "", Outcome.INFEASIBLE, False),
        ("Infeasible - objective value 0.00000000", "Result - Stopped on time limit", Outcome.STOPPED, False),
    ],
)
def test_status_words_of_cbc(status: str, log: str, outcome: Outcome, has_values: bool) -> None:
    assert cbc_outcome(status, log) == (outcome, has_values)


def test_unknown_words_of_cbc_are_refused() -> None:
    with pytest.raises(AssertionError, match="Perhaps"):
        cbc_outcome("Perhaps optimal", "")


def test_bounds_are_read_from_logs() -> None:
    log = (
        "Continuous objective value is 6.5 - 0.02 seconds\n"
        "Cbc0010I After 0 nodes, 1 on tree, 1e+50 best solution, best possible 7.25 (1.00 seconds)\n"
        "Cbc0005I Partial search - best objective 12 (best possible 8.125), took 99 iterations\n"
    )
    assert cbc_bound(log) == pytest.approx(8.124)
    assert cbc_bound("... best possible 31 (1.00 seconds)") == 31
    assert cbc_bound("Cbc0010I ... best possible 1.92288e+05 (9 seconds)") == 192_287
    assert cbc_bound("Cbc0010I ... best possible -1e+50 (0.1 seconds)") == cbc_bound("") == -math.inf
    highs = [
        "         0       0         0   0.00%   -1531.84       inf                  inf        0      0      0      1222     0s",
        " B       3       1         2  50.00%   -1520.5         -1517              0.23%       10      9      2      1238     0s",
    ]
    assert logged_bound(highs) == -1520.5
    scip = "p 0.0s|     1 |     0 |     0 |     - |   locks|   0 | 200 |  10 |  10 |   0 |  0 |   0 |   0 |"
    assert logged_bound([f"{scip} 1.108500e+04 | 2.14e+04 | 41.99%| unknown"]) == pytest.approx(11085 - 0.01)
    assert logged_bound(["nothing"]) == -math.inf


def test_cut_off_solution_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "improving.sol"
    assert highs_solution(path, 2) is None
    path.write_text("Objective 3\n# Columns 2\n 1\n 0\nObjective 2\n# Columns 2\n 0\n")
    assert highs_solution(path, 2) == [1.0, 0.0]


def test_highs_false_infeasible_is_checked() -> None:
    """HiGHS's presolve calls this model infeasible, though keep-all is a solution of it; asked again without, it is not."""
    graph = random_graph(859, effect=False)
    model = checkmate_model(graph, 19, form="paper", presolve=False)
    assert start_values(model, keep_all(graph)) is not None
    answer = minimise(model.milp, solver="highs", time_limit_s=30)
    assert answer.outcome is Outcome.SOLVED and answer.cost == pytest.approx(0)
    for cutoff in (math.inf, 1.0):
        own = model.milp.minimise(time_limit_s=30, cutoff=cutoff)
        assert own.outcome is Outcome.SOLVED and own.cost == pytest.approx(0)
    assert model.milp.minimise(time_limit_s=0.0).outcome is Outcome.STOPPED  # no time to ask again


@pytest.mark.parametrize("solver", ["cbc", "highs", "scip"])
@pytest.mark.parametrize(("factor", "odd"), [(10**11, 0), (10**8, 1)])
def test_one_byte_less_than_keeping_all(solver: str, factor: int, odd: int) -> None:
    """A solver works to a millionth; a budget one byte short of keep-all looks the same to it, and takes one more run."""
    unit = chain(4)
    values = tuple(Value(value.name, value.size_bytes * factor + odd * (x % 2)) for x, value in enumerate(unit.values))
    graph = Graph("large", unit.ops, values, unit.resident, unit.outputs)
    budget_bytes = simulate(graph, keep_all(graph)).peak_bytes - 1
    found = solve(graph, budget_bytes, method="checkmate", gap=0.0, solver=solver)
    assert found.time_ns == 10 and found.restricted_bound_ns in (9, 10)
    assert found.restricted_bound_ns == 10 or odd  # sizes with a common divisor are counted in it


def test_cbc_false_infeasible_is_checked() -> None:
    """CBC's preprocessing calls this model infeasible, as its sizes differ by a 10^8th; asked again without, it is not."""
    million = 10**6
    sizes = (50 * million, 60 * million, 30 * million, 30 * million + 1, 10 * million + 2, 10 * million + 1, 1, 0, 20 * million)
    values = tuple(Value(str(x), size) for x, size in enumerate((*sizes, 50 * million + 2, 20 * million)))
    ops = (
        Op("a", (0,), (2, 3, 4), 10**8),
        Op("b", (4,), (5,), 700),
        Op("c", (0, 5), (6,), 20_000, workspace_bytes=50 * million),
        Op("d", (5, 6), (7, 8), 0, workspace_bytes=40 * million),
        Op("e", (5, 8), (9,), 8 * 10**12, workspace_bytes=40 * million),
        Op("f", (2, 8), (10,), 6 * 10**12),
    )
    graph = Graph("odd", ops, values, frozenset({0, 1}), frozenset({2, 5, 10}))
    found = solve(graph, 260_000_002, method="checkmate", gap=0.0, form="paper")
    assert found.time_ns == least_time_in_space(graph, 260_000_002) == graph.keep_all_time_ns + 10**8


@pytest.mark.parametrize("form", ["strong", "paper"])
@pytest.mark.parametrize("solver", ["cbc", "highs", "scip"])
def test_solvers_lose_no_optimum(solver: str, form: Form) -> None:
    """With sizes in fractions of a unit, CBC cut off the only solution that runs no more than the third op again."""
    million = 10**6
    sizes = (1, 5 * million + 37, 3 * million + 22, 2 * million + 14, 3 * million + 21, 3, 9 * million + 64)
    sizes += (5 * million + 35, 3 * million + 21, 5 * million + 36, million + 7, million + 10, 2 * million + 15)
    ops = (
        Op("a", (0,), (1, 2, 3), 34, workspace_bytes=million + 7),
        Op("b", (0,), (4, 5), 0, effect=True),
        Op("c", (1, 3), (6,), 1),
        Op("d", (1, 2, 4, 6), (7, 8), 6, effect=True),
        Op("e", (7,), (9, 10, 11), 20),
        Op("f", (1, 2, 3, 4, 6, 8, 9, 11), (12,), 35),
    )
    graph = Graph("tight", ops, tuple(Value(str(x), size) for x, size in enumerate(sizes)), frozenset({0}), frozenset({9, 12}))
    found = solve(graph, 33_000_241, method="checkmate", gap=0.0, solver=solver, form=form)
    best = least_time_in_space(graph, 33_000_241)
    assert found.time_ns == found.restricted_bound_ns == best == graph.keep_all_time_ns + 1


def test_a_solver_in_trouble_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """What OR-Tools raises where HiGHS ends with "unknown" is the end of that solve, and the plan says so."""
    from ortools.math_opt.core.python import solver
    from pybind11_abseil.status import Status as Word
    from pybind11_abseil.status import StatusCode, StatusNotOk

    def trouble(*_: object) -> None:
        raise StatusNotOk(Word(StatusCode.INTERNAL, "HighsModelStatus was Unknown"))

    monkeypatch.setattr(solver, "solve", trouble)
    for method in ("checkmate", "checkmate_lp"):
        found = solve(chain(8), 5, method=method, solver="highs")
        assert found.status is Status.UNKNOWN
        assert "highs gives up" in found.notes["stopped"]


def knapsack() -> Milp:
    """Least cost 7: the variables 1 and 2."""
    milp = Milp()
    items = [milp.binary(cost) for cost in (5.0, 3.0, 4.0)]
    loose = milp.number(10.0)
    milp.at_least(2.0, items)
    milp.equal(1.5, [(loose, 1.0), (items[0], -1.0)])
    milp.at_most(1.0, [(items[0], 1.0), (items[1], 1.0)])
    return milp


@pytest.mark.parametrize("solver", ["cbc", "highs", "scip"])
def test_rows_of_every_kind(solver: str) -> None:
    answer = minimise(knapsack(), solver=solver, time_limit_s=10)
    assert answer.outcome is Outcome.SOLVED and answer.stopped is None
    assert answer.values == pytest.approx([0, 1, 1, 1.5])
    assert answer.cost == answer.bound == pytest.approx(7)


def test_any_solver_of_pulp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The road that Gurobi and the rest take, walked with the CBC in PuLP under PuLP's own hands."""
    monkeypatch.setenv("PATH", str(Path(pulp.PULP_CBC_CMD.pulp_cbc_path).parent), prepend=os.pathsep)
    answer = _Pulp(knapsack(), "COIN_CMD", 10.0, 0.0, [0.0, 1.0, 1.0, 1.5], 0).solve()
    assert answer.outcome is Outcome.SOLVED and answer.cost == answer.bound == pytest.approx(7)
    impossible = knapsack()
    impossible.at_least(3.0, [0, 1, 2])
    assert _Pulp(impossible, "COIN_CMD", 10.0, 0.0, None, 0).solve().outcome is Outcome.INFEASIBLE


def test_not_solved_does_not_hide_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """PuLP calls it "Not Solved" when Gurobi meets its time limit with a solution in hand, "Optimal" when CBC does."""
    numbers = [0.0, 1.0, 1.0, 1.5]

    def stopped(_solver: pulp.COIN_CMD, problem: pulp.LpProblem) -> int:
        problem.assignVarsVals({f"x{i}": number for i, number in enumerate(numbers)})
        problem.assignStatus(pulp.LpStatusNotSolved)
        return pulp.LpStatusNotSolved

    monkeypatch.setattr(pulp.COIN_CMD, "actualSolve", stopped)
    answer = _Pulp(knapsack(), "COIN_CMD", 10.0, 0.0, None, 0).solve()
    assert (answer.outcome, answer.values, answer.cost) == (Outcome.STOPPED, numbers, 7.0)
    assert answer.bound == -math.inf and answer.stopped == "time limit"
    numbers[1] = 0.0  # breaks a row
    answer = _Pulp(knapsack(), "COIN_CMD", 10.0, 0.0, None, 0).solve()
    assert answer.values is None and answer.stopped is not None and "gives no solution" in answer.stopped


def test_a_solver_that_refuses_a_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_solver: pulp.COIN_CMD, _problem: pulp.LpProblem) -> int:
        raise RuntimeError("Model too large for size-limited license")

    monkeypatch.setattr(pulp.COIN_CMD, "actualSolve", refuse)
    with pytest.raises(InputError, match=r"'COIN_CMD' refused a model of 4 variables and 3 rows: Model too large"):
        _Pulp(knapsack(), "COIN_CMD", 10.0, 0.0, None, 0).solve()


@pytest.mark.parametrize(("solver", "name"), [("gurobi", "GUROBI"), ("cplex", "CPLEX_PY"), ("SCIP_PY", "SCIP_PY")])
def test_licensed_solvers(solver: str, name: str) -> None:
    if not pulp.getSolver(name, msg=False).available():
        pytest.skip(f"{name} is not installed or has no licence here")
    known = solve(chain(8), 5, method="checkmate", gap=0.0, solver=solver)
    assert (known.time_ns, known.restricted_bound_ns) == (22, 22)
    assert solve(chain(8), 5, method="checkmate", solver=solver, start=known.schedule).time_ns == 22


@pytest.mark.parametrize(
    ("solver", "words"), [("gurobbi", "unknown solver 'gurobbi'"), ("FSCIP_CMD", "not installed or has no licence")]
)
def test_solvers_that_cannot_run(solver: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        solve(chain(3), 3, method="checkmate", solver=solver)


def test_unknown_form() -> None:
    with pytest.raises(InputError, match="unknown form 'weak'"):
        solve(chain(3), 3, method="checkmate", form="weak")


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C while CBC works: what is known comes back at once, and no CBC stays behind."""
    program = """
import threading, os, signal, sys
from graphs.synthetic import random_training
from planner import solve, simulate, keep_all
from planner.least.pebbling import fitting
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent that ignores Ctrl-C must not pass that on
graph = random_training(40, 1)
budget = int(0.5 * simulate(graph, keep_all(graph)).peak_bytes)
start = next(fitting(graph, budget))
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
found = solve(graph, budget, method="checkmate", start=start, time_limit_s=100)
print(found.status, found.notes["stopped"], found.wall_s < 20)
children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
print(len(children))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["FEASIBLE interrupted True", "0"], done.stderr
