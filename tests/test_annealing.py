"""Annealing: its bookkeeping against the ruler, its schedules against brute force and known optima, and its promises."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphs import Graph
from graphs.errors import InputError
from graphs.synthetic import chain, random_layered, random_training
from planner import Plan, Status, keep_all, simulate, solve
from planner.bounds import least_bytes
from planner.incumbent import Incumbent
from planner.least.smallest import smallest_known
from planner.schedule import Compute, computes, with_frees
from planner.walks import annealing, annealing_moves
from planner.walks.annealing import SPARE, Annealer
from tests.clock import stopwatch
from tests.interruption import interrupted
from tests.oracles import least_time
from tests.strategies import random_budget, random_graph

COMPILED = ("anneal", "fill", "_empty", "_readable", "_is_read", "_last", "_reach", "_note", "_excess", "_change_at", "_apply")
COMPILED += ("_before", "_insert", "_delete")


def anneal(graph: Graph, budget_bytes: int, **options: object) -> Plan:
    """A short run; whatever is returned fits, by the ruler."""
    found = solve(graph, budget_bytes, method="annealing", **({"moves": 60_000, "gap": 0.0} | options))
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= budget_bytes
    return found


def peak(graph: Graph) -> int:
    return simulate(graph, keep_all(graph)).peak_bytes


def excess_bytes(graph: Graph, ops: list[int], budget_bytes: int) -> int:
    """Over all runs, what they hold beyond the budget."""
    schedule = with_frees(graph, ops)
    held = simulate(graph, schedule).memory_bytes
    return sum(max(0, held[s] - budget_bytes) for s, step in enumerate(schedule) if isinstance(step, Compute))


@pytest.mark.parametrize("keep_order", [False, True])
def test_its_peak_time_and_excess_are_those_of_the_ruler_after_any_moves(keep_order: bool) -> None:
    """So hot that most moves are taken; with draws and effects, the sequence stays valid, and as good as begun with anew."""
    repeats = reordered = 0
    for seed in range(30):
        graph = random_training(6, seed) if seed % 2 else random_graph(seed, max_ops=9, random=True, effect=True)
        budget_bytes = int(0.8 * peak(graph))
        annealer = Annealer(graph, range(len(graph.ops)), budget_bytes, seed, keep_order=keep_order)
        for _ in range(6):
            annealer.anneal(150, 1, 1, 1, 1)
            for _ in range(2):
                trace = simulate(graph, with_frees(graph, annealer.sequence))
                assert (trace.peak_bytes, trace.time_ns) == (annealer.peak_bytes, annealer.time_ns), seed
                assert annealer.excess_bytes == excess_bytes(graph, annealer.sequence, budget_bytes)
                annealer.spread(annealer.sequence)
        repeats += trace.recomputed_ops > 0
        firsts = list(dict.fromkeys(annealer.sequence))
        reordered += firsts != sorted(firsts)
        if annealer.best is not None:
            trace = simulate(graph, with_frees(graph, annealer.best))
            assert trace.peak_bytes <= budget_bytes and trace.time_ns == annealer.best_ns
    assert repeats >= 15
    assert reordered == 0 if keep_order else reordered >= 10


@pytest.mark.parametrize("keep_order", [False, True])
def test_single_moves_keep_the_accounts(keep_order: bool) -> None:
    """One move at a time in a graph with several outputs an op, so that a wrong one cannot hide behind the next."""
    graph = random_training(7, 3)
    budget_bytes = int(0.7 * peak(graph))
    annealer = Annealer(graph, range(len(graph.ops)), budget_bytes, 0, keep_order=keep_order)
    changed = 0
    for _ in range(400):
        before = annealer.sequence
        annealer.anneal(1, 1, 1, 1, 1)
        if annealer.sequence != before:
            changed += 1
            trace = simulate(graph, with_frees(graph, annealer.sequence))
            assert (trace.peak_bytes, trace.time_ns) == (annealer.peak_bytes, annealer.time_ns)
            assert annealer.excess_bytes == excess_bytes(graph, annealer.sequence, budget_bytes)
    assert changed >= 50


def test_compiled_or_not_the_moves_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered("RL1", 0)
    budget_bytes = int(0.7 * peak(graph))

    def annealed() -> tuple[list[int], list[int] | None, int]:
        annealer = Annealer(graph, range(len(graph.ops)), budget_bytes, 5, keep_order=False)
        annealer.anneal(3_000, 1, 0.1, 5, 100)
        return annealer.sequence, annealer.best, annealer.excess_bytes

    compiled = annealed()
    for name in COMPILED:
        monkeypatch.setattr(annealing_moves, name, getattr(annealing_moves, name).py_func)
    assert annealed() == compiled
    assert compiled[0] != list(range(len(graph.ops)))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="sends itself signals")
def test_an_interruption_between_moves_is_raised_and_crashes_nothing() -> None:
    """In a process of its own: compiled code that is handed a random generator ends it with a segmentation fault."""
    script = """
import signal

from graphs.synthetic import random_layered
from planner.walks.annealing import Annealer

graph = random_layered("RL1", 0)
annealer = Annealer(graph, range(len(graph.ops)), 1_000, 0, keep_order=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
raised = 0
for turn in range(2_000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + turn % 50 * 1e-5)
        for _ in range(2_000):
            annealer.anneal(20, 1, 1, 1, 1)
    except KeyboardInterrupt:
        raised += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(raised)
"""
    root = Path(__file__).resolve().parents[1]
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 1_000


def test_an_op_that_runs_often_gets_room_for_more() -> None:
    """Very hot: re-runs are added until rows are full, ops spread anew, and all goes on."""
    graph = random_training(6, 1)
    annealer = Annealer(graph, range(len(graph.ops)), peak(graph), 0, keep_order=False)
    for _ in range(40):
        annealer.anneal(500, 1e6, 1e6, 1, 1)
    most = max(annealer.sequence.count(v) for v in range(len(graph.ops)))
    assert most > 1 + SPARE
    assert simulate(graph, with_frees(graph, annealer.sequence)).peak_bytes == annealer.peak_bytes


@pytest.mark.parametrize("keep_order", [False, True])
def test_never_better_than_brute_force_and_mostly_as_good(keep_order: bool) -> None:
    optimal = found_any = 0
    for seed in range(20):
        graph = random_graph(seed, max_ops=6, random=seed % 2 == 0, effect=seed % 3 == 0)
        budget_bytes = random_budget(graph, seed)
        best = least_time(graph, budget_bytes, keep_order=keep_order)
        found = anneal(graph, budget_bytes, keep_order=keep_order, moves=6_000)
        assert best is not None and found.status is not Status.INFEASIBLE
        if found.time_ns is not None:
            assert found.time_ns >= best[0], seed
            assert found.status is (Status.OPTIMAL if found.time_ns == graph.keep_all_time_ns else Status.FEASIBLE)
            found_any += 1
            optimal += found.time_ns == best[0]
    assert found_any >= 15
    assert optimal >= 0.9 * found_any


@pytest.mark.parametrize(("budget", "runs"), [(10, 17), (9, 18), (8, 19), (7, 20), (6, 21)])
def test_unit_chain_of_eight_layers(budget: int, runs: int) -> None:
    """No reordering helps a chain, so the optima are Checkmate's; annealing reaches the loose ones."""
    found = anneal(chain(8), budget)
    assert found.time_ns == runs


def test_reordering_brings_random_layered_graphs_to_four_fifths() -> None:
    """Published for RL1 at 80 % of the peak: no re-run at all (its order is random, and bad); graphs like it take hardly any."""
    overheads = []
    for seed in range(3):
        graph = random_layered("RL1", seed)
        overhead = anneal(graph, int(0.8 * peak(graph)), moves=120_000).overhead
        assert overhead is not None
        overheads.append(overhead)
    assert overheads.count(0.0) >= 2 and max(overheads) < 0.02


def test_a_small_overhead_at_seven_tenths_of_a_random_layered_graph() -> None:
    """Published for RL1 at 70 %: 2.1 to 2.2 % more time."""
    graph = random_layered("RL1", 0)
    found = anneal(graph, int(0.7 * peak(graph)), moves=120_000)
    assert found.overhead is not None and found.overhead < 0.03


def test_with_the_graphs_order_it_is_no_better_than_the_proven_optimum() -> None:
    """Started from the annealed schedule, Moccasin improves on it by a hundredth at most (at 90 %, as published for RL1)."""
    graph = random_layered("RL1", 1)
    budget_bytes = int(0.9 * peak(graph))
    annealed = anneal(graph, budget_bytes, keep_order=True, moves=100_000)
    assert annealed.schedule is not None and annealed.overhead is not None
    exact = solve(graph, budget_bytes, method="moccasin", workers=1, gap=0.0, copies=3, start=annealed.schedule, time_limit_s=20)
    assert exact.overhead is not None and "phase_1_s" not in exact.notes  # the annealed schedule is one of its space
    assert exact.overhead <= annealed.overhead <= exact.overhead + 0.01


def test_a_start_is_followed_and_never_made_worse() -> None:
    graph = random_training(12, 5)
    works, schedule = smallest_known(graph)
    first = anneal(graph, works, start=schedule)
    assert first.time_ns is not None and first.time_ns <= simulate(graph, schedule).time_ns
    again = anneal(graph, works, start=first.schedule, time_limit_s=0)
    assert again.time_ns == first.time_ns


def test_same_seed_same_plan_and_seeds_differ() -> None:
    graph = random_layered("RL1", 2)
    budget_bytes = int(0.72 * peak(graph))
    found = [anneal(graph, budget_bytes, seed=seed, time_limit_s=1e6).schedule for seed in (3, 3, 4)]
    assert found[0] is not None and found[0] == found[1] != found[2]


def test_a_budget_below_any_op_is_infeasible_and_a_miss_is_not() -> None:
    graph = random_training(8, 1)
    low = least_bytes(graph)
    assert anneal(graph, low - 1).status is Status.INFEASIBLE
    unit = chain(8)
    missed = anneal(unit, 3, moves=500)
    assert missed.status is Status.UNKNOWN and missed.schedule is None
    assert missed.notes["stopped"] == "annealing found no schedule that fits"
    assert missed.notes["smallest_peak_bytes"] > 3


@pytest.mark.parametrize("limit_s", [0, 0.5, 1])
def test_the_time_limit_is_kept(limit_s: float) -> None:
    graph = random_layered("RL4", 0)
    taken_s = stopwatch()
    found = anneal(graph, int(0.7 * peak(graph)), moves=10**9, time_limit_s=limit_s)
    assert taken_s() <= 1.1 * limit_s + 1
    assert found.notes["stopped"]


def test_progress_tells_every_better_schedule() -> None:
    graph = random_layered("RL1", 0)
    told: list[dict[str, object]] = []
    found = anneal(graph, int(0.7 * peak(graph)), moves=60_000, progress=lambda **now: told.append(now))
    assert told and all(now.keys() == {"time_ns", "bound_ns", "phase"} for now in told)
    times = [now["time_ns"] for now in told]
    assert times == sorted(times, reverse=True) and times[-1] == found.time_ns  # type: ignore[type-var]


def test_ops_that_draw_or_act_keep_their_order() -> None:
    for seed in range(10):
        graph = random_graph(seed, max_ops=12, random=True, effect=True)
        found = anneal(graph, peak(graph) - 1, moves=5_000)
        if found.schedule is not None:
            ops = list(computes(found.schedule))
            assert all(ops.count(v) == 1 for v, op in enumerate(graph.ops) if op.effect)


@pytest.mark.parametrize("moves", [0, True, 1.5])
def test_a_number_of_moves_that_is_none_is_refused(moves: object) -> None:
    with pytest.raises(InputError, match="moves"):
        anneal(chain(2), 10, moves=moves)


def test_interrupting_returns_what_was_found() -> None:
    script = (
        "from graphs.synthetic import random_layered\nfrom planner import keep_all, simulate, solve\n"
        "graph = random_layered('RL1', 0)\nbudget = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)\n"
        "solve(graph, budget, method='annealing', gap=0.0, moves=1)\n"  # compiles, which may take a while
        "print('ready', flush=True)\n"
        "found = solve(graph, budget, method='annealing', gap=0.0, moves=10**9, time_limit_s=100)\n"
        "print(found.notes['stopped'], found.wall_s < 20)\n"
    )
    assert interrupted(script, after_s=2) == "interrupted True"


def test_what_is_over_by_little_at_the_end_is_fitted_by_a_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = ((1.0, 0.5, 0.005, 3.0, 3.0),)  # at this price some excess is worth its while
    lasts = (annealing.LAST, (0.1, 0.05, 0.005, 1e-3, 1e-3))
    for seed in (0, 3, 4):
        graph = random_layered("RL1", seed)
        found = []
        for last in lasts:
            monkeypatch.setattr(annealing, "LAST", last)
            search = Incumbent(graph, int(0.8 * peak(graph)), gap=0.0)
            annealer = Annealer(graph, range(len(graph.ops)), search.budget_bytes, 0, keep_order=True)
            annealing.anneal(search, annealer, 1_000_000, cheap)
            found.append(search.time_ns)
        assert found[0] is not None and found[1] is None, seed
