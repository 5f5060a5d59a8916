"""Moccasin: against brute force in its own space, published optima, its variants against each other, and its promises."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from graphs import Graph, Op, Value
from graphs.errors import InputError
from graphs.importers import load_checkmate
from graphs.synthetic import chain, random_layered, random_training
from planner import Plan, Status, keep_all, simulate, solve
from planner.bounds import least_bytes
from planner.methods.retention import RetentionModel, last_stages, sequence, staged
from planner.schedule import with_frees
from planner.solvers import cp_sat
from planner.solvers.milp import solving
from planner.stages.model import with_end
from tests.chains import vgg, vgg19
from tests.clock import stopwatch
from tests.interruption import interrupted
from tests.oracles import least_budget, least_time
from tests.strategies import random_budget, random_graph

UNIT_NS = 10_000  # published costs are in units of 10 µs
NOTHING_FITS = "no schedule in the searched space fits"


def moccasin(graph: Graph, budget_bytes: int, **options: object) -> Plan:
    """One worker, so that runs repeat; proved to the end unless asked otherwise. Whatever is returned fits, by the ruler."""
    found = solve(graph, budget_bytes, method="moccasin", **({"workers": 1, "gap": 0.0, "time_limit_s": 30.0} | options))
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= budget_bytes
    return found


def least_staged_time(graph: Graph, budget_bytes: int, copies: int | None) -> int | None:
    """Least time in Moccasin's space by trying all of it: every choice of stages for the re-runs of every op."""
    n = len(graph.ops)
    choices = []
    for v, op in enumerate(graph.ops):
        later = range(v + 1, n + 1)
        most = 0 if op.effect else len(later) if copies is None else copies - 1
        choices.append([c for count in range(min(most, len(later)) + 1) for c in itertools.combinations(later, count)])
    best: int | None = None
    for again in itertools.product(*choices):
        time_ns = sum(op.time_ns * (1 + len(stages)) for op, stages in zip(graph.ops, again, strict=True))
        if best is None or time_ns < best:
            runs = sorted((s, v) for v, stages in enumerate(again) for s in (v, *stages))
            if simulate(graph, with_frees(graph, [v for _, v in runs])).peak_bytes <= budget_bytes:
                best = time_ns
    return best


@pytest.mark.parametrize(("copies", "max_ops", "seeds"), [(2, 5, range(40)), (3, 5, range(100, 115)), (None, 5, range(200, 210))])
def test_equals_brute_force_in_its_space(copies: int | None, max_ops: int, seeds: range) -> None:
    rerun = refused = 0
    for seed in seeds:
        graph = random_graph(seed, max_ops=max_ops, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = max(0, random_budget(graph, seed) - (seed % 4 == 0))
        least = least_staged_time(graph, budget_bytes, copies)
        found = moccasin(graph, budget_bytes, copies=copies)
        assert found.time_ns == least, seed
        if found.status is Status.UNKNOWN:
            assert found.notes["stopped"] == NOTHING_FITS, seed
            refused += 1
        elif least is None:
            assert found.status is Status.INFEASIBLE and least_bytes(graph) > budget_bytes, seed
        elif least > graph.keep_all_time_ns:
            assert found.notes["space_bound_ns"] == least and "proved" in found.notes, seed
            rerun += 1
    assert rerun >= 0.1 * len(seeds)
    assert refused >= (copies == 2)


@pytest.mark.parametrize("copies", [1, 2, 3, None])
def test_never_claims_what_another_schedule_disproves(copies: int | None) -> None:
    """Against all schedules with the graph's order, and against all of Checkmate's space for the restricted bound."""
    agreed = bounds = 0
    for seed in range(400, 420):
        graph = random_graph(seed, max_ops=5)
        budget_bytes = random_budget(graph, seed)
        found = moccasin(graph, budget_bytes, copies=copies)
        best = least_time(graph, budget_bytes, keep_order=True)
        assert best is not None
        assert found.status is not Status.INFEASIBLE
        assert found.time_ns is None or found.time_ns >= best[0], seed
        agreed += found.time_ns == best[0]
        assert found.bound_ns is not None and found.bound_ns <= best[0]
        if found.restricted_bound_ns is not None:
            unlimited = moccasin(graph, budget_bytes, copies=None).time_ns
            assert unlimited is None or found.restricted_bound_ns <= unlimited, seed
            bounds += found.restricted_bound_ns > graph.keep_all_time_ns
    assert agreed >= {1: 1, 2: 14, 3: 16, None: 18}[copies]
    assert bounds >= 4


def test_below_the_least_budget_of_any_order_it_is_infeasible_or_says_why_not() -> None:
    refused = 0
    for seed in range(20):
        graph = random_graph(seed, max_ops=5)
        found = moccasin(graph, least_budget(graph, keep_order=False) - 1, copies=None)
        assert found.schedule is None
        if found.status is Status.INFEASIBLE:
            refused += 1
        else:
            assert found.notes["stopped"] == NOTHING_FITS
            assert found.notes["space_least_bytes"] >= least_budget(graph, keep_order=False)
    assert 10 <= refused < 20


def test_the_least_budget_of_the_space_is_just_enough() -> None:
    for seed in range(15):
        graph = random_graph(seed, max_ops=5)
        low = least_budget(graph, keep_order=True)
        found = moccasin(graph, low - 1, copies=2)
        if least_bytes := found.notes.get("space_least_bytes"):
            assert moccasin(graph, least_bytes).schedule is not None, seed
            assert moccasin(graph, least_bytes - 1).schedule is None, seed


# Golden values ------------------------------------------------------------------------------------------------------------------

CHAIN_8 = {10: 17, 9: 18, 8: 19, 7: 20, 6: 21, 5: 22, 4: 26}  # Checkmate's optima


@pytest.mark.parametrize(("budget", "runs"), CHAIN_8.items())
def test_unit_chain_of_eight_layers(budget: int, runs: int) -> None:
    """Two runs an op reach Checkmate's optimum from budget 5 up; budget 4 takes three."""
    graph = chain(8)
    needs = 3 if budget == 4 else 2
    found = moccasin(graph, budget, copies=needs)
    assert found.time_ns == runs == found.notes.get("space_bound_ns", runs)
    if needs > 2:
        fewer = moccasin(graph, budget, copies=2)
        assert fewer.schedule is None and fewer.status is Status.UNKNOWN and fewer.notes["stopped"] == NOTHING_FITS


def test_unit_chain_in_the_least_budget() -> None:
    """In three units, every backward op runs the forward again from the start: 9 + 3 + 2 + 1 for four layers."""
    graph = chain(4)
    assert moccasin(graph, 3, copies=None).time_ns == 15
    assert moccasin(graph, 3, copies=3).notes["stopped"] == NOTHING_FITS
    assert moccasin(graph, 2, copies=None).status is Status.INFEASIBLE


@pytest.mark.parametrize(
    ("name", "depths", "size", "peak_bytes"),
    [("VGG16", (2, 2, 3, 3, 3), (45, 87), 15_825_108_992), ("VGG19", (2, 2, 4, 4, 4), (51, 99), 17_058_234_368)],
)
def test_peaks_of_published_graphs(name: str, depths: tuple[int, ...], size: tuple[int, int], peak_bytes: int) -> None:
    """Nodes, edges and peak without re-runs that the authors' files of Checkmate's graphs have, at batch 256."""
    graph = vgg(name, depths, batch=256)
    assert (len(graph.ops), sum(len(op.inputs) for op in graph.ops)) == size
    assert simulate(graph, keep_all(graph)).peak_bytes == peak_bytes


def test_three_runs_an_op_reach_the_optimum_of_vgg19() -> None:
    """Its published optimum in 51,380,224 bytes, 58.98289152 GFLOP, and 80 % of the peak at batch 256, where Checkmate agrees."""
    found = moccasin(vgg19(), 51_380_224, copies=3)
    assert found.time_ns == found.notes["space_bound_ns"] == 58_982_891_520
    graph = vgg("VGG19", (2, 2, 4, 4, 4), batch=256)
    budget_bytes = -(-8 * 17_058_234_368 // 10)
    exact = solve(graph, budget_bytes, method="checkmate", gap=0.0)
    assert moccasin(graph, budget_bytes, copies=2).time_ns == exact.time_ns == exact.restricted_bound_ns


PUBLISHED = [
    ("vgg16_176", 10, 250_600),
    ("vgg16_176", 9, 251_383),
    ("vgg16_176", 8, 255_828),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gigabytes", "cost"), PUBLISHED)
def test_published_instances(data: Path, name: str, gigabytes: int, cost: int) -> None:
    """Published optima of Checkmate's MILP: never beaten in its space, and reached with a few runs an op."""
    graph = load_checkmate(data / "checkmate_instances" / f"{name}.json")
    found = moccasin(graph, gigabytes * 2**30, copies=3, gap=1e-5, time_limit_s=60)
    assert found.time_ns is not None and "proved" in found.notes
    assert cost * UNIT_NS <= 1.0001 * found.time_ns
    assert found.time_ns <= 1.0001 * cost * UNIT_NS


# Options and their spaces -------------------------------------------------------------------------------------------------------


def training(layers: int, seed: int, share: float) -> tuple[Graph, int]:
    """A small training step and a budget between the least conceivable and the keep-all peak."""
    graph = random_training(layers, seed)
    low, high = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes
    return graph, low + int(share * (high - low))


def test_fewer_runs_an_op_only_cost_more() -> None:
    strictly = 0
    cases = [(graph := random_graph(seed), random_budget(graph, seed)) for seed in range(10)]
    cases += [(chain(4, backward_time_ns=3), budget) for budget in (3, 4, 5)]
    for graph, budget_bytes in cases:
        found = [moccasin(graph, budget_bytes, copies=copies) for copies in (1, 2, 3, None)]
        assert all("proved" in p.notes or p.status is Status.OPTIMAL or p.notes["stopped"] == NOTHING_FITS for p in found)
        times = [float("inf") if p.time_ns is None else p.time_ns for p in found]
        assert times == sorted(times, reverse=True), (graph.name, times)
        strictly += times[1] > times[-1]
        bounds = [p.restricted_bound_ns or 0 for p in found]
        assert all(bound <= times[-1] for bound in bounds), graph.name
    assert strictly >= 2


@pytest.mark.parametrize("numbering", ["affine", "triangular"])
@pytest.mark.parametrize("coverage", ["clauses", "reservoirs"])
def test_encodings_of_the_same_space_agree(numbering: str, coverage: str) -> None:
    rerun = 0
    for seed in range(4):
        graph, budget_bytes = training(5, seed, 0.4)
        plain = moccasin(graph, budget_bytes)
        other = moccasin(graph, budget_bytes, numbering=numbering, coverage=coverage)
        assert plain.time_ns == other.time_ns, seed
        assert plain.notes.get("space_least_bytes") == other.notes.get("space_least_bytes"), seed
        assert plain.restricted_bound_ns == other.restricted_bound_ns, seed
        rerun += "proved" in plain.notes
    assert rerun >= 2


def test_the_published_encoding_costs_no_less_and_claims_no_bound() -> None:
    """Interval lengths from a coarse choice end late: schedules are lost, so nothing is proved about Checkmate's space."""
    for seed in range(3):
        graph, budget_bytes = training(5, seed, 0.4)
        plain = moccasin(graph, budget_bytes)
        other = moccasin(graph, budget_bytes, numbering="triangular", coverage="reservoirs", lengths="logarithmic")
        assert other.restricted_bound_ns is None and "space_least_bytes" not in other.notes
        if other.time_ns is not None:
            assert plain.time_ns is not None and plain.time_ns <= other.time_ns, seed


def test_the_published_encoding_finds_the_optimum_of_a_chain() -> None:
    found = moccasin(chain(8), 7, numbering="triangular", coverage="reservoirs", lengths="logarithmic")
    assert found.time_ns == CHAIN_8[7]
    assert "rounded" in found.notes["space"]


def test_several_outputs_workspace_and_resident_bytes_all_count() -> None:
    """a makes x (4) and y (3) with 2 of workspace; b makes 5 from y, once; c makes 1 from x; the end needs both.

    Resident 10. Keep all: at b, x + y + 5 = 12. Without x at b: 3 + 5 = 8; then a again: 5 + x + y + 2 = 14, more than 12. So
    22 is the least peak, with or without re-runs.
    """
    ops = (
        Op("a", (0,), (1, 2), 3, workspace_bytes=2),
        Op("b", (2,), (3,), 1, effect=True),
        Op("c", (1,), (4,), 1),
    )
    values = tuple(Value(name, size) for name, size in (("r", 10), ("x", 4), ("y", 3), ("b", 5), ("c", 1)))
    graph = Graph("several", ops, values, frozenset({0}), frozenset({3, 4}))
    assert moccasin(graph, 22).time_ns == 5
    refused = moccasin(graph, 21)
    assert refused.schedule is None and refused.notes["space_least_bytes"] == 22


def test_an_op_with_an_effect_runs_once() -> None:
    """Without the effect, running op 1 again is what fits; with it, nothing does."""
    values = tuple(Value(f"v{i}", size) for i, size in enumerate((1, 8, 8, 1, 1)))
    refused = 0
    for effect in (False, True):
        ops = (
            Op("in", (), (0,), 1),
            Op("wide", (0,), (1,), 1, effect=effect),
            Op("other", (0,), (2,), 1),
            Op("squeeze", (2,), (3,), 1),
            Op("last", (1, 3), (4,), 1),
        )
        graph = Graph("effect", ops, values, frozenset(), frozenset({4}))
        found = moccasin(graph, 12)
        assert found.time_ns == (None if effect else 6)
        refused += found.status is Status.UNKNOWN
    assert refused == 1


def test_last_stages_end_with_the_last_op_that_depends_on_a_run() -> None:
    graph = with_end(chain(2))  # forward 0, 1, loss 2, backward 3 (reads 1), 4 (reads 0), end 5
    assert last_stages(graph) == [5, 5, 5, 5, 5, 5]
    ops = (Op("a", (), (0,), 1), Op("b", (0,), (1,), 1, effect=True), Op("c", (1,), (2,), 1), Op("d", (1,), (3,), 1))
    values = (Value("0", 1), Value("1", 1), Value("2", 0), Value("3", 1))
    # a serves b only, which runs once; b itself never again; c has no bytes; d serves the end
    assert last_stages(with_end(Graph("g", ops, values, frozenset(), frozenset({2, 3})))) == [1, 1, 2, 4, 4]


def test_staging_sorts_drops_repeats_and_what_serves_nothing() -> None:
    graph = with_end(chain(2))
    # Before op 3, ops 1 and 0 run again: sorted, once each. Before op 4, op 1 runs again for nothing.
    runs = staged(graph, [0, 1, 2, 1, 0, 1, 3, 0, 1, 4, 5])
    assert runs == [[0, 3, 4], [1, 3], [2], [3], [4], [5]]
    assert sequence(runs) == [0, 1, 2, 0, 1, 3, 0, 4, 5]
    assert staged(graph, [0, 2, 1, 3, 4, 5]) is None


# Numbers ------------------------------------------------------------------------------------------------------------------------


def test_sizes_beyond_64_bits_are_rounded_so_that_the_budget_holds_and_nothing_is_claimed() -> None:
    graph, budget_bytes = training(6, 0, 0.4)
    plain = moccasin(graph, budget_bytes)
    factor = 10**15 + 7  # a step of petabytes
    values = tuple(Value(value.name, value.size_bytes * factor + 1) for value in graph.values)
    ops = tuple(Op(op.name, op.inputs, op.outputs, op.time_ns, op.workspace_bytes * factor) for op in graph.ops)
    large = Graph("large", ops, values, graph.resident, graph.outputs)
    found = moccasin(large, (budget_bytes + 2) * factor)
    assert found.schedule is not None and plain.schedule is not None
    assert found.restricted_bound_ns is None
    assert "rounded" in found.notes["space"]


def test_footprints_too_large_for_doubles_are_rounded_too() -> None:
    """The footprint is an objective, and CP-SAT tells objectives as doubles: a byte too much would not show."""
    unit = chain(2)
    sizes = (3 * 10**15 + 5, 3 * 10**15 + 5, 3 * 10**15 + 8, 3 * 10**15 + 7, 10**15 + 4)
    values = tuple(Value(str(x), size) for x, size in enumerate(sizes))
    graph = Graph("large", unit.ops, values, unit.resident, unit.outputs)
    found = moccasin(graph, simulate(graph, keep_all(graph)).peak_bytes - 1)
    assert found.time_ns is None or found.time_ns > graph.keep_all_time_ns
    assert "rounded" in found.notes["space"] and "space_least_bytes" not in found.notes


def test_times_too_large_for_doubles_keep_a_valid_bound() -> None:
    graph, budget_bytes = training(6, 0, 0.4)
    plain = moccasin(graph, budget_bytes)
    factor = 10**14
    times = [op.time_ns * factor + i for i, op in enumerate(graph.ops)]
    large = graph.with_costs(times)
    found = moccasin(large, budget_bytes)
    assert found.time_ns is not None and plain.time_ns is not None
    assert found.time_ns // factor in (plain.time_ns, plain.time_ns + 1)
    assert plain.time_ns * factor * (1 - 1e-9) <= found.notes["space_bound_ns"] <= found.time_ns


def test_units_divide_what_they_can() -> None:
    graph, budget_bytes = training(5, 1, 0.5)
    values = tuple(Value(value.name, value.size_bytes * 512) for value in graph.values)
    ops = tuple(Op(o.name, o.inputs, o.outputs, o.time_ns * 1000, o.workspace_bytes * 512) for o in graph.ops)
    model = RetentionModel(with_end(Graph("u", ops, values, graph.resident, graph.outputs)), budget_bytes * 512 + 511)
    assert model.unit_bytes % 512 == 0 and model.unit_ns % 1000 == 0 and model.exact


def test_graphs_that_take_no_time_or_hold_nothing() -> None:
    graph, budget_bytes = training(4, 0, 0.5)
    assert moccasin(graph.with_costs([0] * len(graph.ops)), budget_bytes).time_ns in (0, None)
    nothing = Graph("nothing", (), (), frozenset(), frozenset())
    assert moccasin(nothing, 1).status is Status.OPTIMAL


# Promises -----------------------------------------------------------------------------------------------------------------------


def test_a_start_is_never_made_worse_and_replaces_phase_1() -> None:
    graph, budget_bytes = training(10, 2, 0.4)
    first = moccasin(graph, budget_bytes, time_limit_s=10)
    assert first.time_ns is not None and "phase_1_s" in first.notes
    again = moccasin(graph, budget_bytes, start=first.schedule)
    assert again.time_ns == first.time_ns and again.notes["found_by"] == "start"
    assert "phase_1_s" not in again.notes and "proved" in again.notes
    assert moccasin(graph, budget_bytes, start=first.schedule, time_limit_s=0).time_ns == first.time_ns


def test_a_start_in_another_order_or_with_too_many_runs_is_kept_but_not_followed() -> None:
    values = tuple(Value(str(i), 1) for i in range(3))
    graph = Graph(
        "two", (Op("a", (), (0,), 1), Op("b", (), (1,), 1), Op("c", (0, 1), (2,), 1)), values, frozenset(), frozenset({2})
    )
    found = moccasin(graph, 3, start=with_frees(graph, [1, 0, 2]))
    assert found.time_ns == 3
    start = moccasin(chain(4), 3, copies=None).schedule
    found = moccasin(chain(4), 3, copies=2, start=start)
    assert found.time_ns == 15 and found.notes["stopped"] == NOTHING_FITS


def test_one_worker_and_the_same_seed_give_the_same_plan() -> None:
    graph, budget_bytes = training(10, 3, 0.5)
    found = [moccasin(graph, budget_bytes, seed=seed) for seed in (7, 7)]
    assert found[0].schedule == found[1].schedule and found[0].time_ns is not None


def test_several_workers_find_the_same_time() -> None:
    graph, budget_bytes = training(8, 4, 0.5)
    assert moccasin(graph, budget_bytes, workers=2).time_ns == moccasin(graph, budget_bytes).time_ns is not None


def tight() -> tuple[Graph, int]:
    """A random layered graph that is not solved in a minute."""
    graph = random_layered("RL2", 0)
    return graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)


@pytest.mark.parametrize("numbering", ["affine", "triangular"])
@pytest.mark.parametrize("limit_s", [0, 0.2, 2])
def test_the_time_limit_is_kept_over_both_phases(numbering: str, limit_s: float) -> None:
    graph, budget_bytes = tight()
    taken_s = stopwatch()
    found = moccasin(graph, budget_bytes, numbering=numbering, time_limit_s=limit_s)
    assert taken_s() <= 1.1 * limit_s + 1
    assert found.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert found.notes["stopped"] == "time limit"


def test_a_limit_is_not_called_infeasible() -> None:
    graph, budget_bytes = tight()
    stopped = moccasin(graph, budget_bytes, time_limit_s=0.5)
    assert stopped.status is Status.UNKNOWN and stopped.notes["stopped"] == "time limit"
    assert "space_least_bytes" not in stopped.notes
    too_small = moccasin(graph, least_bytes(graph) - 1, time_limit_s=0.5)
    assert too_small.status is Status.INFEASIBLE


def test_a_gap_is_no_proof_of_the_optimum() -> None:
    """CP-SAT reports OPTIMAL within its gap; the bound must not be raised to the time."""
    loose = 0
    for seed in range(3):
        graph, budget_bytes = training(6, seed, 0.4)
        exact, rough = moccasin(graph, budget_bytes), moccasin(graph, budget_bytes, gap=0.5)
        if exact.time_ns is None or rough.time_ns is None:
            continue
        assert rough.notes["space_bound_ns"] <= exact.time_ns <= rough.time_ns
        loose += rough.notes["space_bound_ns"] < exact.time_ns
    assert loose >= 1


def test_progress_tells_times_bounds_and_phases() -> None:
    graph, budget_bytes = training(10, 1, 0.4)
    told: list[dict[str, object]] = []
    found = moccasin(graph, budget_bytes, progress=lambda **now: told.append(now))
    assert told and all(now.keys() == {"time_ns", "bound_ns", "phase"} for now in told)
    assert told[-1]["time_ns"] == found.time_ns and told[-1]["bound_ns"] == found.notes["space_bound_ns"]
    assert {now["phase"] for now in told} >= {"phase 1", "phase 2", "bound"}


def test_interrupting_returns_what_was_found() -> None:
    script = (
        "from graphs.synthetic import random_layered\nfrom planner import keep_all, simulate, solve\n"
        "graph = random_layered('RL2', 0)\nbudget = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)\n"
        "start = solve(graph, budget, method='annealing', moves=200_000, time_limit_s=20).schedule\nprint('ready', flush=True)\n"
        "found = solve(graph, budget, method='moccasin', workers=1, start=start, gap=0.0, time_limit_s=100)\n"
        "print(found.notes['stopped'], found.status, found.wall_s < 10)\n"
    )
    assert interrupted(script, after_s=2) == "interrupted FEASIBLE True"


def test_a_solver_left_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep in presolve CP-SAT does not stop at once; an interpreter that ended before it would abort."""
    solver = cp_model.CpSolver
    solve_in_time, told = solver.solve, []

    def deaf(self: cp_model.CpSolver, *given: object) -> object:
        time.sleep(2)
        return solve_in_time(self, *given)

    monkeypatch.setattr(solver, "solve", deaf)
    monkeypatch.setattr(solver, "stop_search", lambda self: told.append(self))
    monkeypatch.setattr(cp_sat, "GRACE_S", 0.1)
    found = moccasin(chain(4), 4, time_limit_s=0.5)
    assert found.notes["stopped"] == "time limit" and found.wall_s < 2
    assert solving()  # the interpreter would wait
    heard = len(told)
    deadline = time.perf_counter() + 20
    while solving() and time.perf_counter() < deadline:
        time.sleep(0.1)
    assert not solving() and len(told) > heard  # told again, in case it had not begun


@pytest.mark.parametrize(
    "options",
    [
        {"copies": 0},
        {"copies": True},
        {"workers": 0},
        {"workers": 10**6},
        {"numbering": "square"},
        {"coverage": "none"},
        {"lengths": "short"},
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        moccasin(chain(2), 10, **options)
