"""Cutting stages: against brute force, against published optima, and its promises about time and interruption."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner.least.smallest
import planner.stages.events
import planner.stages.model
from graphs import Graph, Op, Value
from graphs.capture import capture
from graphs.importers import load_checkmate
from graphs.synthetic import chain, random_layered, random_training
from planner import Plan, Status, keep_all, plan, simulate, solve
from planner.bounds import least_bytes
from planner.least.pebbling import fitting, least_peak
from planner.least.smallest import smallest_known
from planner.methods import cutting_stages
from planner.plan import with_costs
from planner.process.clock import now_s
from planner.schedule import Schedule, computes, first_runs, with_frees
from planner.solvers import pseudo_boolean
from planner.solvers.milp import Answer, Milp, Outcome
from planner.stages import first_schedules, mending, order_search
from planner.stages import search as stage_search
from planner.stages import solving as stage_solving
from planner.stages.block_chain import BlockSchedule
from planner.stages.events import tightest
from planner.stages.exhaustive import cheapest
from planner.stages.first_schedules import try_blocks
from planner.stages.model import Event, stage_model, walk, with_end
from planner.stages.search import StageSearch
from planner.stages.solving import Asked
from planner.walks.annealed_walks import AnnealedWalks
from planner.walks.walk_search import WalkSearch
from tests.chains import shared_among_layers
from tests.clock import stopwatch
from tests.interruption import interrupted
from tests.oracles import least_budget, least_time
from tests.strategies import random_budget, random_graph

GB = 2**30
UNIT_NS = 10_000  # published costs are in units of 10 µs


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 200, 40)], ids=lambda r: f"from{r.start}")
def test_never_wrong_against_brute_force(seeds: range) -> None:
    """bound <= optimum <= plan for the graph's order; infeasible only where brute force finds nothing."""
    proved = 0
    for seed in seeds:
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        best = least_time(graph, budget_bytes, keep_order=True)
        found = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
        assert found.bound_ns is not None
        if found.schedule is not None and (best is None or "order" in found.notes):  # in another order
            best_of_all = least_time(graph, budget_bytes, keep_order=False)
            assert best_of_all is not None and found.time_ns is not None, seed
            assert found.bound_ns <= best_of_all[0] <= found.time_ns, seed
            proved += 1
            continue
        if best is None:
            assert found.status in (Status.INFEASIBLE, Status.UNKNOWN), seed
            continue
        assert found.status is not Status.INFEASIBLE, seed
        assert found.bound_ns <= best[0], seed
        if found.time_ns is not None:
            assert best[0] <= found.time_ns, seed
            proved += found.status is Status.OPTIMAL and found.time_ns == best[0]
    assert proved >= 0.9 * len(seeds)


def test_a_proved_optimum_is_the_brute_force_optimum() -> None:
    checked = 0
    for seed in range(300, 400):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        found = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
        if found.status is Status.OPTIMAL and found.restricted_bound_ns is None:
            best = least_time(graph, budget_bytes, keep_order=True)
            assert best is not None and best[0] == found.time_ns, seed
            checked += 1
    assert checked >= 80


@pytest.mark.parametrize(("seed", "budget"), [(6084, 16), (6168, 16), (6297, 29), (6070, 17), (5205, 30), (5385, 19)])
def test_nothing_is_claimed_that_another_schedule_disproves(seed: int, budget: int) -> None:
    """Graphs whose optimum lies outside of Checkmate's space, and graphs that fit in another order only."""
    graph = random_graph(seed, max_ops=6, random=seed % 2 == 0, effect=seed % 5 == 0)
    found = solve(graph, budget, gap=0.0, time_limit_s=5)
    free, kept = least_time(graph, budget, keep_order=False), least_time(graph, budget, keep_order=True)
    assert free is not None and found.status is not Status.INFEASIBLE
    if kept is None:
        assert found.time_ns is not None and found.time_ns >= free[0]
        assert found.notes["order"].endswith("in which no schedule fits") and "stopped" not in found.notes
        assert found.status is not Status.OPTIMAL or found.time_ns == free[0]
    else:
        assert found.status is not Status.OPTIMAL or found.time_ns == kept[0]


def test_below_the_least_budget_nothing_is_found() -> None:
    refused = 0
    for seed in range(60):
        graph = random_graph(seed)
        budget_bytes = least_budget(graph, keep_order=False) - 1
        assert budget_bytes >= least_bytes(graph) - 1
        status = solve(graph, budget_bytes, time_limit_s=2).status
        assert status in (Status.INFEASIBLE, Status.UNKNOWN), seed
        refused += status is Status.INFEASIBLE
    assert refused >= 40


def test_what_the_only_order_rules_out_is_infeasible() -> None:
    """What the first op makes cannot be made again and is read last, so it is there beside all the rest."""
    values = tuple(Value(name, size) for name, size in (("a", 10), ("b", 1), ("c", 10), ("d", 0)))
    ops = (
        Op("first", (), (0,), 1, effect=True),
        Op("second", (0,), (1,), 1),
        Op("third", (1,), (2,), 1),
        Op("last", (0, 2), (3,), 1),
    )
    graph = Graph("only", ops, values, frozenset(), frozenset({3}))
    assert least_bytes(graph) <= 20
    assert solve(graph, 20).status is Status.INFEASIBLE
    assert solve(graph, 21).status is Status.OPTIMAL
    free = replace(graph, ops=(ops[0], ops[1], replace(ops[2], inputs=()), ops[3]))  # the third op could come first
    assert solve(free, 20).status is not Status.INFEASIBLE


def test_what_is_known_to_work_is_never_called_infeasible() -> None:
    for seed in range(30, 35):
        graph = random_training(6, seed)
        works, schedule = smallest_known(graph)
        assert simulate(graph, schedule).peak_bytes == works >= least_bytes(graph)
        # Seed 32 fits only outside of Checkmate's space.
        assert solve(graph, works, time_limit_s=1).status is not Status.INFEASIBLE
        assert solve(graph, works, start=schedule, time_limit_s=0.2).status in (Status.OPTIMAL, Status.FEASIBLE)


def test_what_is_known_to_work_is_found_where_its_search_finds_nothing_for_that_budget() -> None:
    """The schedule was found for a larger budget."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True)
            self.norm = nn.LayerNorm(32)
            self.rest = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x + self.attention(x, x, x)[0])
            return torch.as_tensor(x + self.rest(x))

    model = nn.Sequential(*(Block() for _ in range(4)))
    graph = with_costs(capture(model, (torch.randn(4, 20, 32),), loss=lambda y: y.square().mean()), "roofline").graph
    works, _ = smallest_known(graph)
    assert next(fitting(graph, works), None) is None
    found = solve(graph, works, gap=0.9, time_limit_s=20)
    assert found.schedule is not None


def test_where_a_star_finds_nothing_in_graph_order_whatever_is_known_to_work_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    anneal_briefly(monkeypatch)
    # Rounding leaves the stage model of such sizes a solution, so that it is A* that says that nothing in graph order fits.
    unit = 2**50
    sizes = (unit - 1, unit - 1, unit, unit, unit - 2, unit, unit - 1, unit - 2, unit + 2)
    ops = (
        Op("draw", (), (1, 2, 3), 8, random=True),
        Op("tell", (2,), (4,), 7, unit, effect=True),
        Op("draw again", (1, 0, 3), (5,), 9, random=True),
        Op("end", (1, 3, 5), (6, 7, 8), 786_983),
    )
    values = tuple(Value(f"v{v}", size) for v, size in enumerate(sizes))
    graph = Graph("drawn", ops, values, frozenset({0}), frozenset({0, 3, 4, 7}))
    budget_bytes = least_budget(graph, keep_order=True) - 1
    best = least_time(graph, budget_bytes, keep_order=False)
    assert best is not None
    assert solve(graph, budget_bytes, time_limit_s=20).time_ns == best[0]


@pytest.mark.parametrize(("budget", "runs"), [(10, 17), (9, 18), (8, 19), (7, 20), (6, 21), (5, 22)])
def test_unit_chain_of_eight_layers(budget: int, runs: int) -> None:
    graph = chain(8)
    unit_bytes, unit_ns = graph.values[0].size_bytes, graph.ops[0].time_ns
    assert plan(graph, budget * unit_bytes, gap=0.0).time_ns == runs * unit_ns


PUBLISHED = [
    ("vgg16_176", 10, 250_600),
    ("vgg16_176", 9, 251_383),
    ("vgg16_176", 8, 255_828),
    ("unet_11", 10, 192_792),
    ("unet_11", 9, 193_682),
    ("unet_11", 8, 194_811),
    ("resnet50_184", 10, 108_048),
    ("resnet50_184", 9, 109_042),
    ("resnet50_184", 8, 110_154),
    ("resnet50_184", 7, 111_580),
]


@pytest.mark.parametrize(("name", "gigabytes", "cost"), PUBLISHED)
def test_published_instances_at_their_solved_budgets(data: Path, name: str, gigabytes: int, cost: int) -> None:
    graph = load_checkmate(data / "checkmate_instances" / f"{name}.json")
    found = solve(graph, gigabytes * GB, gap=1e-5, time_limit_s=60)
    assert found.time_ns is not None and found.gap is not None
    assert found.time_ns <= 1.0001 * cost * UNIT_NS
    assert found.gap <= 1e-4
    assert found.status is Status.OPTIMAL or found.gap > 1e-5


def test_vgg16_in_seven_gigabytes_is_refused(data: Path) -> None:
    graph = load_checkmate(data / "checkmate_instances" / "vgg16_176.json")
    assert solve(graph, 7 * GB).status is Status.INFEASIBLE


def anneal_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annealing takes as long in small graphs as in large ones; for what is no matter of how long, a part of it will do."""
    monkeypatch.setattr(cutting_stages, "anneal_on", partial(order_search.anneal_on, moves=100_000))
    monkeypatch.setattr(order_search, "MOVES", 100_000)
    monkeypatch.setattr(mending, "MOVES", 50_000)


def solve_by_sat(monkeypatch: pytest.MonkeyPatch, variables: int) -> None:
    """MILPs up to that size, HiGHS the others."""
    monkeypatch.setattr(planner.stages.model, "SAT_VARIABLES", variables)
    monkeypatch.setattr(planner.stages.model, "SAT_RERUNS", variables)


def coarser_first(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Solve a coarser graph before any MILP but the first one's; the sizes of those graphs."""
    sizes: list[int] = []
    nested = cutting_stages._run_nested

    def counted(search: StageSearch, inner: StageSearch, *start: Any) -> None:
        sizes.append(len(inner.graph.ops))
        nested(search, inner, *start)

    for name, value in {"COARSE_DISTANCE": -1.0, "HALF": 1.0, "CHEAP_VARIABLES": 0}.items():
        monkeypatch.setattr(cutting_stages, name, value)
    monkeypatch.setattr(stage_search, "LOST", 0.1)
    monkeypatch.setattr(stage_search, "EXTRA", 0.1)
    monkeypatch.setattr(cutting_stages, "_run_nested", counted)
    solve_by_sat(monkeypatch, 0)
    return sizes


# The case of most rounds is among the even ones, and takes long where CP-SAT solves nothing or models are solved as a whole.
EVEN_CASES = ["passing", "re-runs", "first efforts"]
PARTS = [*EVEN_CASES, "CP-SAT", "HiGHS", "blocks", "relaxations", "whole ones only", "small values"]


@pytest.mark.parametrize("part", PARTS)
def test_without_some_part_the_optimum_is_the_same(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "passing":
        monkeypatch.setattr(planner.stages.model, "_passing", lambda graph: {})
    elif part == "re-runs":  # as events
        monkeypatch.setattr(planner.stages.events, "_before", lambda *_: None)
    elif part == "blocks":
        monkeypatch.setattr(first_schedules, "is_chain", lambda graph: False)
    elif part == "first efforts":  # they find nothing
        monkeypatch.setattr(cutting_stages, "CHEAP_EFFORT", 0.0)
    elif part == "small values":
        monkeypatch.setattr(cutting_stages, "TINY_GAP", math.inf)
        monkeypatch.setattr(cutting_stages, "MOST_TINY", 0.5)
    else:
        solve_by_sat(monkeypatch, 10**9 if part == "HiGHS" else 0)
    if part == "relaxations":
        monkeypatch.setattr(cutting_stages, "solve_relaxed", lambda search, model, rows, *_: (None, rows))
    elif part == "whole ones only":
        monkeypatch.setattr(stage_solving, "PARTS", 1.0)
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)  # else A* closes most of these in the first round
    anneal_briefly(monkeypatch)
    checked, proved, in_rounds = optima(gap=1e-9 if part == "small values" else 0.0, odd=part not in EVEN_CASES)
    assert checked >= 24
    assert in_rounds >= 8 or part == "re-runs"
    assert proved == checked or part == "re-runs"


@cache
def small_cases() -> list[tuple[Graph, int, int | None]]:
    """Small graphs with budgets, and the least times by brute force."""
    cases = []
    for seed in range(30):
        graph = random_graph(seed, effect=seed % 3 == 0)
        cases.append((graph, random_budget(graph, seed)))
    for seed in range(60):  # some of these take several rounds
        graph = random_training(4, seed)
        cases.append((graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)))
    least = [least_time(graph, budget_bytes, keep_order=True) for graph, budget_bytes in cases]
    return [(graph, budget_bytes, best and best[0]) for (graph, budget_bytes), best in zip(cases, least, strict=True)]


def optima(*, odd: bool, gap: float = 0.0) -> tuple[int, int, int]:
    """Solve half of those graphs: how many optima are found, are proved, and took more than one round."""
    checked = proved = in_rounds = 0
    for graph, budget_bytes, best_ns in small_cases()[odd::2]:
        if best_ns is None:
            continue
        found = solve(graph, budget_bytes, gap=gap, time_limit_s=60)  # far more than any takes
        if "order" not in found.notes:
            assert found.bound_ns is not None and found.time_ns is not None, graph.name
            assert found.bound_ns <= best_ns <= found.time_ns, graph.name
            checked += found.time_ns == best_ns
            proved += found.bound_ns == best_ns
            in_rounds += found.time_ns == best_ns and found.notes["rounds"] > 1 if "rounds" in found.notes else 0
    return checked, proved, in_rounds


def test_small_graphs_are_looked_through_before_anything_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("not needed")

    monkeypatch.setattr(cutting_stages, "_first_schedules", unwanted)
    looked_through = 0
    for seed in range(60):
        graph = random_training(4, seed)
        found = solve(graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.0)
        looked_through += found.notes.get("found_by") == "A*"
        assert found.status in (Status.OPTIMAL, Status.INFEASIBLE, Status.UNKNOWN)
    assert looked_through >= 8


def test_with_a_coarser_graph_first_the_optimum_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)
    anneal_briefly(monkeypatch)
    monkeypatch.setattr(cutting_stages, "COARSE_WORK", 100_000)
    sizes = coarser_first(monkeypatch)
    checked, proved, _ = optima(odd=True)
    assert checked >= 20 and proved >= 20
    assert len(sizes) >= 8


def test_what_a_chain_of_blocks_has_proved_to_be_the_least_is_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(12, 0)
    whole = keep_all(graph)
    monkeypatch.setattr(first_schedules, "is_chain", lambda graph: True)
    monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: BlockSchedule(whole, {}))
    monkeypatch.setattr(StageSearch, "follow", lambda *_: pytest.fail("there is nothing to gain"))
    search = StageSearch(graph, simulate(graph, whole).peak_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    try_blocks(search)
    assert search.closed()


def test_a_walk_that_there_is_no_time_to_replay_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an op with thousands of outputs runs again and again, that is a tenth of a second for a compiled walk, and many
    seconds for freeing and simulating."""
    ops = (Op("split", (), tuple(range(4_000)), 1), Op("read", tuple(range(4_000)), (4_000,), 1))
    graph = Graph("split", ops, (Value("part", 1),) * 4_001, frozenset(), frozenset({4_000}))
    runs = np.array([0] * 500 + [1])

    def start(self: WalkSearch, **_: object) -> None:
        self.runs, self.time_ns = runs, float(len(runs))

    monkeypatch.setattr(WalkSearch, "start", start)
    for time_limit_s, fits in ((0.3, False), (100.0, True)):
        search = StageSearch(graph, 5_000, gap=0.0, time_limit_s=time_limit_s, seed=0)
        search.walks.start()
        search.take_walk()
        assert (search.best is not None) == fits == ("cut_short" not in search.notes)
    asked = list[int]()
    monkeypatch.setattr(planner.least.smallest, "simulate", lambda g, s: asked.append(len(s)) or simulate(g, s))
    smallest_known(graph, time_limit_s=0.5)
    assert asked and max(asked) < 10_000


def test_the_time_limit_is_kept_with_a_coarser_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(150, 1)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    sizes = coarser_first(monkeypatch)
    found = solve(graph, budget_bytes, gap=0.0, time_limit_s=3.0)
    assert sizes and found.wall_s <= 4.3 and found.notes["stopped"] == "time limit"


def test_relaxations_find_events_before_any_milp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(30, 1)
    budget_bytes = int(0.75 * simulate(graph, keep_all(graph)).peak_bytes)
    exact = solve(graph, budget_bytes, gap=0.0, time_limit_s=2)
    assert exact.bound_ns is not None and exact.time_ns is not None
    sizes: list[int] = []
    whole = Milp.relax

    def relax(milp: Milp, **options: Any) -> Answer:
        sizes.append(len(milp.cost))
        if len(set(sizes)) > 4:
            raise KeyboardInterrupt  # that is all to be seen
        return whole(milp, **options)

    def no_more(*_: object, **__: object) -> Answer:
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)

    solve_by_sat(monkeypatch, 0)
    monkeypatch.setattr(stage_solving, "PARTS", 1.0)
    monkeypatch.setattr(Milp, "relax", relax)
    first = Milp.minimise
    monkeypatch.setattr(Milp, "minimise", lambda milp, **options: no_more() if sizes else first(milp, **options))
    found = solve(graph, budget_bytes, gap=0.0, time_limit_s=6)
    assert len(set(sizes)) >= 2 and sizes[0] < sizes[-1]
    assert found.bound_ns is not None and found.time_ns is not None
    assert graph.keep_all_time_ns < found.bound_ns <= exact.time_ns
    assert exact.bound_ns <= found.time_ns


@pytest.mark.parametrize("helps", [True, False])
def test_second_events_stay_where_they_raise_the_bound(helps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    whole = cutting_stages.solve_relaxed

    def relax(search: Any, *arguments: Any) -> Any:
        answer = whole(search, *arguments)
        search.stalled, search.climbed = 0 if helps else 1, 0.0
        asked.append(arguments[0].events)
        if len(asked) == 3:
            raise KeyboardInterrupt  # that is all to be seen
        return answer

    solve_by_sat(monkeypatch, 0)
    monkeypatch.setattr(stage_solving, "PARTS", 1.0)
    monkeypatch.setattr(stage_solving, "MOST_PARTS", 1.0)
    monkeypatch.setattr(cutting_stages, "solve_relaxed", relax)
    solve(chain(40), 8, gap=0.0, time_limit_s=20)
    gone = set(asked[0]).difference(*asked[1:])
    assert len(asked[0]) == 3 and len(asked) > 1
    assert gone == (set() if helps else {max(asked[0])})


def test_that_nothing_fits_is_not_for_a_relaxation_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(20, 1)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    solve_by_sat(monkeypatch, 0)
    asked = []

    def relax(milp: Milp, **_: object) -> Answer:
        asked.append(milp)
        return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)

    monkeypatch.setattr(Milp, "relax", relax)
    found = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
    assert len(asked) > 1  # those for any order among them
    monkeypatch.setattr(cutting_stages, "prove_in_any_order", lambda *_, **__: None)
    asked.clear()
    again = solve(graph, budget_bytes, gap=0.0, time_limit_s=5)
    assert len(asked) == 1
    for one in (found, again):
        assert one.time_ns is not None
        assert "infeasible" not in one.notes and one.notes.get("stopped") in (None, "time limit")


def test_what_only_passes_on_need_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that one op reads alone, to make no more bytes of them: the optimum is the same where they are never kept."""
    fewer = 0
    for seed in range(60):
        graph = with_end(random_passing(seed))
        draw = Random(seed)
        budget_bytes = int(draw.uniform(0.4, 0.9) * simulate(graph, keep_all(graph)).peak_bytes)
        events = [Event(t) for t in sorted(draw.sample(range(len(graph.ops) - 1), 3))]
        costs = []
        for off in (False, True):
            with monkeypatch.context() as patched:
                if off:
                    patched.setattr(planner.stages.model, "_passing", lambda graph: {})
                model = stage_model(graph, budget_bytes, events)
                answer = model.milp.minimise(time_limit_s=20.0)
                costs.append((answer.outcome, pytest.approx(answer.cost)))
                fewer += not off and min(model.milp.upper) == 0
        assert costs[0] == costs[1], seed
    assert fewer >= 40


def random_passing(seed: int) -> Graph:
    """A random training graph in which every other forward value goes through one more op that makes something no larger."""
    draw = Random(seed)
    base = random_training(draw.randint(3, 6), seed)
    values, ops = list(base.values), []
    for op in base.ops:
        x = op.outputs[0] if op.outputs else None
        if x is None or x in base.outputs or draw.random() < 0.5:
            ops.append(op)
            continue
        raw = len(values)
        values.append(Value(f"raw_{raw}", values[x].size_bytes + draw.choice((0, 1))))
        ops.append(replace(op, name=f"{op.name}_raw", outputs=(raw, *op.outputs[1:])))
        ops.append(Op(f"{op.name}_pass", (raw,), (x,), draw.randint(1, 9), backward=op.backward))
    return replace(base, values=tuple(values), ops=tuple(ops))


def test_the_bound_grows_with_the_events_and_shrinks_with_the_budget() -> None:
    graph = random_training(12, 3)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    middle = len(graph.ops) // 2

    def bound_ns(share: float, events: list[int]) -> int:
        model = stage_model(graph, int(share * peak_bytes), [Event(t) for t in events])
        bound = model.bound_ns(model.milp.minimise(time_limit_s=10))
        assert bound is not None
        return bound

    assert bound_ns(0.8, [middle]) <= bound_ns(0.8, [middle - 2, middle]) <= bound_ns(0.8, [middle - 2, middle, middle + 3])
    assert bound_ns(0.9, [middle]) <= bound_ns(0.8, [middle]) <= bound_ns(0.7, [middle])


def test_same_seed_same_plan() -> None:
    graph = random_training(20, 1)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    assert solve(graph, budget_bytes).schedule == solve(graph, budget_bytes).schedule


def test_a_start_is_never_made_worse() -> None:
    graph = random_training(20, 2)
    budget_bytes = int(0.6 * simulate(graph, keep_all(graph)).peak_bytes)
    first = solve(graph, budget_bytes, gap=0.0, time_limit_s=10)
    assert first.time_ns is not None
    again = solve(graph, budget_bytes, start=first.schedule, time_limit_s=0.001)
    assert again.time_ns is not None and again.time_ns <= first.time_ns


def tight() -> tuple[Graph, int]:
    """A random layered graph whose bound does not close in a minute."""
    graph = random_layered("RL2", 0)
    return graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)


def test_the_time_limit_is_kept() -> None:
    graph, budget_bytes = tight()
    taken_s = stopwatch()
    found = solve(graph, budget_bytes, gap=0.0, time_limit_s=3)
    assert taken_s() <= 3 * 1.1 + 1
    assert max(found.bound_ns or 0, found.notes.get("order_bound_ns", 0)) > graph.keep_all_time_ns


def test_a_ladder_has_a_schedule_where_walks_find_none() -> None:
    """A U-Net of single ops: its skip connections span the whole graph, so walks make the same things again and again."""
    n = 100
    reads: list[tuple[int, ...]] = [(), *((i,) for i in range(n))]  # down
    reads += [(n + i, n - 1 - i) for i in range(n)]  # up
    reads.append((2 * n,))
    skips = {}
    for i in reversed(range(n)):  # up again, backwards
        top = len(reads) - 1
        reads += [(top, n + i), (top, n - 1 - i)]
        skips[n - 1 - i] = top + 1
    for i in reversed(range(n)):
        top = len(reads) - 1
        reads += [(top, i), (top + 1, skips[i])]
    ops = [Op(f"op{v}", read, (v,), 10, backward=v > 2 * n) for v, read in enumerate(reads)]
    graph = Graph("ladder", tuple(ops), (Value("v", 1),) * len(ops), frozenset(), frozenset({len(ops) - 1}))
    budget_bytes = simulate(graph, keep_all(graph)).peak_bytes // 3
    found = solve(graph, budget_bytes, time_limit_s=8.0)
    halved = solve(graph, budget_bytes, method="twremat")
    assert found.time_ns is not None and halved.time_ns is not None and found.time_ns <= halved.time_ns


def test_where_there_is_no_time_to_search_the_square_root_rule_will_do() -> None:
    graph = chain(6000)
    took_s = stopwatch()
    found = solve(graph, 250, time_limit_s=0.1)
    assert took_s() <= 0.1 + 1.0
    assert found.status == "FEASIBLE" and found.notes["stopped"] == "time limit"
    assert found.peak_bytes is not None and found.peak_bytes <= 250


def test_the_time_limit_is_kept_where_nothing_fits_and_layers_share_much() -> None:
    for layers, time_limit_s in ((30, 0.3), (6_000, 2)):  # the first one loads what searches are made of
        graph = shared_among_layers(layers)
        least, most = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes
        taken_s = stopwatch()
        solve(graph, int(least + 0.03 * (most - least)), time_limit_s=time_limit_s)
    assert taken_s() <= 2 * 1.1 + 1


def test_progress_tells_times_bounds_and_phases() -> None:
    graph = random_training(20, 1)
    told: list[dict[str, object]] = []
    found = solve(graph, int(0.6 * simulate(graph, keep_all(graph)).peak_bytes), progress=lambda **now: told.append(now))
    assert told and told[-1]["bound_ns"] == found.bound_ns
    assert all(now.keys() == {"time_ns", "bound_ns", "phase"} for now in told)


def test_interrupting_returns_what_was_found() -> None:
    script = (
        "from graphs.synthetic import random_layered\nfrom planner import keep_all, simulate, solve\n"
        "graph, ready = random_layered('RL2', 0), []\n"
        "def progress(bound_ns, **_):\n"
        "    if bound_ns > graph.keep_all_time_ns and not ready:\n"
        "        ready.append(print('ready', flush=True))\n"
        "budget = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)\n"
        "found = solve(graph, budget, gap=0.0, time_limit_s=100, progress=progress)\n"
        "print(found.notes['stopped'], max(found.bound_ns, found.notes.get('order_bound_ns', 0)) > graph.keep_all_time_ns)\n"
    )
    assert interrupted(script, after_s=0.5) == "interrupted True"


class Working(threading.Event):
    """Says so many times that the solver works, then that it is done, or it interrupts."""

    def __init__(self, times: int, *, interrupts: bool = False) -> None:
        super().__init__()
        self.times, self.interrupts = times, interrupts

    def is_set(self) -> bool:
        self.times -= 1
        if self.times < 0 and self.interrupts:
            raise KeyboardInterrupt
        return self.times < 0


def beside(monkeypatch: pytest.MonkeyPatch, search: StageSearch, solved: threading.Event) -> None:
    """Walks beside a MILP that is solved without a solution."""

    def minimise(milp: Milp, *, meanwhile: Callable[[threading.Event], None], **rest: Any) -> Answer:
        meanwhile(solved)
        return Answer(Outcome.CUT_OFF, None, math.inf, 0.0)

    monkeypatch.setattr(pseudo_boolean, "minimise", minimise)
    graph = search.graph
    model = stage_model(with_end(graph), search.budget_bytes, [Event(len(graph.ops) // 2)])
    stage_solving.solve_whole(search, model, Asked(0.0, 0.0, math.inf, 0), range(len(graph.ops)), 1_000)


def walking() -> StageSearch:
    graph = random_training(80, 2)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    search = StageSearch(graph, budget_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    search.begin_walks(search.deadline)
    return search


def test_what_walks_find_beyond_a_milp_is_kept_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    search = walking()
    before_ns = search.time_ns
    with pytest.raises(KeyboardInterrupt):
        beside(monkeypatch, search, Working(2_000, interrupts=True))
    search.notes["stopped"] = "interrupted"
    search.take_last()
    assert search.time_ns is not None and before_ns is not None and search.time_ns < before_ns


def test_walks_beyond_a_milp_follow_its_solutions_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    search, followed = walking(), list[list[int]]()
    values = list[float]()

    def minimise(
        milp: Milp, *, meanwhile: Callable[[threading.Event], None], at_once: Callable[[list[int]], None], **rest: Any
    ) -> Answer:
        if not values:
            answer = whole(milp, time_limit_s=20.0)
            assert answer.values is not None
            values.extend(answer.values)
        at_once([0] * len(values))
        at_once([round(x) for x in values])
        meanwhile(Working(3))
        return Answer(Outcome.CUT_OFF, None, math.inf, 0.0)

    whole = pseudo_boolean.minimise
    monkeypatch.setattr(pseudo_boolean, "minimise", minimise)
    graph = search.graph
    model = stage_model(with_end(graph), search.budget_bytes, [Event(len(graph.ops) // 2)])
    search.beyond = search.walks.apart(1)
    monkeypatch.setattr(search.beyond, "follow", lambda runs, **_: followed.append(list(runs)))
    stage_solving.solve_whole(search, model, Asked(0.0, 0.0, math.inf, 0), range(len(graph.ops)), 1_000)
    assert followed == [walk(model, values).runs]  # the best alone
    assert followed[0] != list(range(len(graph.ops)))


def test_what_walks_find_beyond_milps_counts_where_the_clock_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search, times_ns = walking(), list[float]()
    for _ in range(3):
        beside(monkeypatch, search, Working(500))
        assert search.beyond is not None
        times_ns.append(search.beyond.time_ns)
    alone = walking()
    for _ in range(3):
        beside(monkeypatch, alone, Working(0))
    assert alone.beyond is not None
    search.take_last()
    assert alone.time_ns == search.time_ns and search.time_ns is not None  # until then, as if it had not been
    assert search.time_ns > times_ns[0] > times_ns[-1]  # which goes on from what it had
    search.notes["stopped"] = "time limit"
    search.take_last()
    assert search.time_ns == times_ns[-1]


def test_ctrl_c_while_the_last_walks_are_taken_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(8, 3)
    take, taken = StageSearch.take_last, [0]

    def disturbed(search: StageSearch) -> None:
        taken[0] += 1
        if taken[0] == 1:
            raise KeyboardInterrupt
        take(search)

    monkeypatch.setattr(StageSearch, "take_last", disturbed)
    found = solve(graph, int(0.9 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.01, time_limit_s=20)
    assert taken == [2] and found.schedule is not None and found.notes["stopped"] == "interrupted"


def test_cp_sat_out_of_time_is_noted_even_a_little_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def minimise(milp: Milp, **rest: Any) -> Answer:
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)

    monkeypatch.setattr(pseudo_boolean, "minimise", minimise)
    graph = random_training(8, 3)
    budget_bytes = int(0.9 * simulate(graph, keep_all(graph)).peak_bytes)
    assert solve(graph, budget_bytes, gap=0.0, time_limit_s=1).notes["cut_short"]


def test_cp_sat_is_told_what_is_proved_about_models_with_fewer_events(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    whole = pseudo_boolean.minimise

    def minimise(milp: Milp, *, floor: float = 0.0, **options: Any) -> Answer:
        nonlocal told
        if floor > 0:
            told += 1
            assert whole(milp, time_limit_s=20.0).cost >= floor - 1e-6
            if told % 3 == 0:
                raise KeyboardInterrupt  # enough of this graph
        return whole(milp, floor=floor, **options)

    monkeypatch.setattr(pseudo_boolean, "minimise", minimise)
    monkeypatch.setattr(cutting_stages, "SMALL_OPS", 0)  # no A*
    for seed in range(2):
        graph = random_training(14, seed)
        solve(graph, int(0.6 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.0, time_limit_s=10)
    assert told >= 5


def test_nothing_is_known_of_a_model_once_events_have_gone() -> None:
    search = walking()
    graph = with_end(search.graph)
    round_ = cutting_stages._Round(search, graph, [Event(60), Event(100)])
    known_ns = []
    for events in ([60, 100], [60, 80, 100], [60, 100], [60, 100, 120]):
        round_.events = [Event(t) for t in events]
        round_.next_model()
        known_ns.append(round_.floor_ns - search.base)
        round_.prove(search.base + len(known_ns))
    assert known_ns == [-search.base, 1, -search.base, 3]
    assert search.searched_ns == search.base + 4


def test_a_better_order_is_measured_against_what_holds_for_all_orders() -> None:
    graph = random_layered("RL1", seed=0)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    reordered = solve(graph, budget_bytes, method="annealing", moves=300_000, time_limit_s=20).schedule
    found = solve(graph, budget_bytes, time_limit_s=4, start=reordered)
    assert found.schedule is not None and found.time_ns is not None and found.bound_ns is not None
    assert found.notes["order_bound_ns"] >= 0.99 * found.time_ns
    assert found.time_ns > found.bound_ns == graph.keep_all_time_ns
    assert first_runs(computes(found.schedule)) != list(range(len(graph.ops)))


def test_any_order_is_cheaper_where_the_given_one_is_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    anneal_briefly(monkeypatch)
    graph = random_layered("RL1", seed=0)
    budget_bytes = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)
    kept = solve(graph, budget_bytes, time_limit_s=20)
    free = solve(graph, budget_bytes, time_limit_s=20, any_order=True)
    assert kept.time_ns is not None
    assert free.time_ns is not None
    assert free.schedule is not None
    assert free.time_ns < kept.bound_ns <= kept.time_ns  # type: ignore[operator]  # cheaper than any schedule in graph order
    assert free.bound_ns == graph.keep_all_time_ns
    assert "order" in free.notes
    assert simulate(graph, free.schedule).peak_bytes <= budget_bytes


def test_a_training_step_is_solved_in_its_own_order_before_others_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs as much in another order is not worth losing the proof for."""
    solved = []

    def searched(search: Any, *_: Any, **__: Any) -> list[int]:
        solved.append(search.closed())
        return list(computes(search.best))

    monkeypatch.setattr(cutting_stages, "search_orders", searched)
    for seed, expected in ((0, [True]), (1, [])):  # nothing fits in the second, in whatever order
        graph = random_training(5, seed)
        solved.clear()
        found = solve(graph, int(0.85 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.01, time_limit_s=10, any_order=True)
        assert solved == expected
        assert found.status is (Status.OPTIMAL if expected else Status.INFEASIBLE)


def test_other_orders_of_a_training_step_are_searched_where_its_own_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(5, 0)
    budget_bytes = int(0.85 * simulate(graph, keep_all(graph)).peak_bytes)
    began: list[float] = []

    def rounds(search: StageSearch) -> bool:
        began.append(search.left_s)
        search.begin_walks(search.deadline)
        while not search.out_of_time():
            pass
        return False

    def searched(search: StageSearch, *_: Any, **__: Any) -> list[int]:
        assert search.best is not None
        began.append(search.left_s)
        return list(computes(search.best))

    monkeypatch.setattr(cutting_stages, "_rounds", rounds)
    monkeypatch.setattr(cutting_stages, "search_orders", searched)
    found = solve(graph, budget_bytes, time_limit_s=1.0, any_order=True)
    assert began == pytest.approx([0.5, 0.5], abs=0.15)
    assert found.notes["cut_short"] and found.status is Status.FEASIBLE


def test_where_nothing_fits_a_training_steps_own_order_has_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    monkeypatch.setattr(cutting_stages, "_rounds", lambda search: left.append(search.left_s))
    graph = random_training(40, 738)
    assert solve(graph, 1419, time_limit_s=20, any_order=True).status is not Status.FEASIBLE
    assert left and left[0] > 15


@cache
def annealed_elsewhere() -> tuple[Graph, int, Plan]:
    """A graph, a budget, and what annealing finds for it, in another order."""
    graph = random_layered("RL1", seed=8)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    return graph, budget_bytes, solve(graph, budget_bytes, method="annealing", moves=300_000, time_limit_s=20, seed=1)


def test_what_has_another_order_is_solved_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_search, "MORE_MOVES", 50_000)
    graph, budget_bytes, annealed = annealed_elsewhere()
    found = solve(graph, budget_bytes, gap=0.02, time_limit_s=20, start=annealed.schedule)
    assert found.schedule is not None and found.time_ns is not None and annealed.time_ns is not None
    order = first_runs(computes(found.schedule))
    assert order != list(range(len(graph.ops))) and found.bound_ns == graph.keep_all_time_ns
    assert simulate(graph, found.schedule).peak_bytes <= budget_bytes
    # Its own order is solved within the gap; the same graph numbered so has that bound too.
    assert found.restricted_bound_ns is not None
    assert graph.keep_all_time_ns < found.restricted_bound_ns <= found.time_ns < annealed.time_ns
    assert found.time_ns - found.restricted_bound_ns <= 0.02 * found.time_ns
    renumbered = solve(graph.in_order(order), budget_bytes, gap=0.0, time_limit_s=1)
    assert renumbered.time_ns is None or renumbered.time_ns >= found.restricted_bound_ns


def test_the_order_of_what_almost_fits_is_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes, annealed = annealed_elsewhere()
    assert annealed.schedule is not None
    order = first_runs(computes(annealed.schedule))
    assert simulate(graph, with_frees(graph, order)).peak_bytes > budget_bytes
    monkeypatch.setattr(cutting_stages, "search_orders", lambda *_, **__: order)
    found = solve(graph, budget_bytes, gap=0.02, time_limit_s=20, any_order=True)
    assert found.schedule is not None and first_runs(computes(found.schedule)) == order
    assert simulate(graph, found.schedule).peak_bytes <= budget_bytes
    assert found.restricted_bound_ns is not None and found.restricted_bound_ns > graph.keep_all_time_ns


@pytest.mark.parametrize(
    "quiet, graph, budget_bytes",
    [(0, chain(40), 29), (1, chain(40), 29), (2, random_training(12, 2), 700), (20, random_training(12, 5), 783)],
)
def test_a_progress_that_ever_raises_loses_nothing(
    quiet: int, graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []

    def progress(time_ns: int | None, **_: object) -> None:
        told.append(time_ns)
        if len(told) > quiet:
            raise KeyboardInterrupt

    anneal_briefly(monkeypatch)
    found = solve(graph, budget_bytes, progress=progress)
    assert found.notes["stopped"] == "interrupted" and len(told) == quiet + 1
    assert found.time_ns is not None and all(found.time_ns <= time_ns for time_ns in told if time_ns is not None)


def test_interrupted_in_another_order_it_keeps_what_was_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes, annealed = annealed_elsewhere()
    assert annealed.schedule is not None and annealed.time_ns is not None
    whole = cutting_stages._run

    def interrupted_there(search: Any, start: Any) -> None:
        whole(search, start)
        if search.graph != graph:
            raise KeyboardInterrupt

    monkeypatch.setattr(cutting_stages, "_run", interrupted_there)
    found = solve(graph, budget_bytes, gap=0.02, time_limit_s=20, start=annealed.schedule)
    assert found.time_ns is not None and found.time_ns < annealed.time_ns
    assert found.notes["stopped"] == "interrupted" and found.notes["found_by"].endswith("in another order")


def test_interrupted_in_another_order_it_keeps_what_walks_had_just_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes, annealed = annealed_elsewhere()
    assert annealed.schedule is not None and annealed.time_ns is not None
    whole, walked_ns = cutting_stages._run, []

    def interrupted_there(search: Any, start: Any) -> None:
        if search.graph == graph:
            whole(search, start)
            return
        search.offer(start, "start")
        search.begin_walks(search.deadline)
        search.walks.follow(list(computes(start)), 4_000_000)
        walked_ns.append(search.walks.time_ns)
        raise KeyboardInterrupt

    monkeypatch.setattr(cutting_stages, "_run", interrupted_there)
    found = solve(graph, budget_bytes, gap=0.02, time_limit_s=20, start=annealed.schedule)
    assert [found.time_ns] == walked_ns and walked_ns[0] < annealed.time_ns


def test_interrupted_beside_another_order_it_keeps_what_walks_had_just_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered("RL1", seed=3)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    start = solve(graph, int(0.7 * peak_bytes), gap=0.1, time_limit_s=20, any_order=True)
    assert start.schedule is not None and start.time_ns is not None
    improve, walked_ns = AnnealedWalks.improve, []

    def interrupted(self: AnnealedWalks, *arguments: Any, **options: Any) -> None:
        improve(self, *arguments, **options)
        if self.time_ns < start.time_ns:
            walked_ns.append(self.time_ns)
            raise KeyboardInterrupt

    monkeypatch.setattr(AnnealedWalks, "improve", interrupted)
    found = solve(graph, int(0.85 * peak_bytes), gap=0.0, time_limit_s=20, start=start.schedule)
    assert walked_ns and found.time_ns == min(walked_ns) and found.notes["stopped"] == "interrupted"


def test_interrupted_in_a_coarser_graph_it_keeps_what_was_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(40, 3)
    budget_bytes = int(0.75 * simulate(graph, keep_all(graph)).peak_bytes)
    sizes, nested, inner_ns = coarser_first(monkeypatch), cutting_stages._run_nested, list[int]()

    def interrupted_there(search: StageSearch, inner: StageSearch, *start: Any) -> None:
        assert inner.searched_ns == search.searched_ns > graph.keep_all_time_ns
        search.best = search.time_ns = None  # so that what is found there is news
        nested(search, inner, *start)
        assert inner.time_ns is not None
        inner_ns.append(inner.time_ns)
        raise KeyboardInterrupt

    monkeypatch.setattr(cutting_stages, "_run_nested", interrupted_there)
    told: dict[str, int | None] = {}

    def progress(time_ns: int | None, phase: str, **_: object) -> None:
        told[phase] = time_ns

    found = solve(graph, budget_bytes, gap=0.0, time_limit_s=10, progress=progress)
    assert len(inner_ns) == 1 and sizes[0] < len(graph.ops)
    assert found.notes["stopped"] == "interrupted" and found.schedule is not None
    assert found.time_ns is not None and found.time_ns <= inner_ns[0] and found.peak_bytes <= budget_bytes
    assert told["coarser graph"] == inner_ns[0] and any(phase.endswith(", in a coarser graph") for phase in told)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_coarser_graph_is_asked_only_where_something_may_fit_in_order(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    search, asked = walking(), list[str]()
    assert search.trained
    monkeypatch.setattr(cutting_stages, "prove_least", lambda _: None)
    monkeypatch.setattr(cutting_stages, "_solve_coarser", lambda *_: asked.append("coarser graph"))
    monkeypatch.setattr(cutting_stages, "try_halves", lambda *_: asked.append("halves"))
    monkeypatch.setattr(cutting_stages, "_change_until_one_fits", lambda *_: asked.append("changes"))
    monkeypatch.setattr(cutting_stages, "pebble", lambda *_: asked.append("pebbling"))
    search.time_ns = None
    assert cutting_stages._scrape(search, in_order=in_order)
    assert asked == ["halves", *["coarser graph", "changes"] * in_order, "pebbling"]


def test_blocks_in_another_order_count_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    values = tuple(Value(name, 1) for name in "abc")
    graph = Graph(
        "two", (Op("a", (), (0,), 1), Op("b", (), (1,), 1), Op("c", (0, 1), (2,), 1)), values, frozenset(), frozenset({2})
    )
    ordered, other = with_frees(graph, [0, 1, 0, 2]), with_frees(graph, [1, 0, 2])
    monkeypatch.setattr(first_schedules, "is_chain", lambda graph: True)
    monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: BlockSchedule(other, {}))
    for known, any_order, taken in ((False, False, True), (True, False, False), (True, True, True)):
        search = StageSearch(graph, 3, 0.0, 60.0, None, seed=0, any_order=any_order)
        if known:
            search.offer(ordered, "start")
        try_blocks(search, scarce=not known)
        assert search.time_ns == 3
        assert search.notes["found_by"] == "blocks"  # in graph order, if not in theirs
        assert (search.best == other) is taken


@pytest.mark.parametrize("known", [False, True])
def test_blocks_that_are_dearer_than_what_is_known_are_not_improved(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(12, 0)
    runs = range(len(graph.ops))
    dear = with_frees(graph, [0, *runs])
    monkeypatch.setattr(first_schedules, "is_chain", lambda graph: True)
    monkeypatch.setattr(first_schedules, "block_schedule", lambda *_, **__: BlockSchedule(dear, {}))
    improved, followed = list[int](), list[int]()
    monkeypatch.setattr(WalkSearch, "improve", lambda _, work, deadline: improved.append(work))
    monkeypatch.setattr(StageSearch, "follow", lambda _, runs, work=0: followed.append(work))
    monkeypatch.setattr(StageSearch, "done", lambda *_: False)
    search = StageSearch(graph, simulate(graph, dear).peak_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    if known:
        search.offer(with_frees(graph, runs), "start")
    try_blocks(search)
    half = first_schedules.WORK_PER_OP * len(graph.ops) // 2
    assert followed == ([0] if known else [0, half])
    assert improved == ([] if known else [half])


@pytest.mark.parametrize("large", [True, False])
def test_blocks_are_tried_before_a_large_milp_where_the_bound_is_far(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)  # else A* closes it
    blocks: list[None] = []
    milps: list[tuple[bool, bool]] = []  # those after the first: the bound is far away, blocks were tried
    minimise = cutting_stages.solve_whole

    def noted(search: StageSearch, *arguments: Any) -> Answer:
        if search.notes["rounds"] > 1:
            milps.append((search.distance_ns > 0.02 * search.base, bool(blocks)))
        blocks.clear()
        return minimise(search, *arguments)

    monkeypatch.setattr(cutting_stages, "solve_whole", noted)
    monkeypatch.setattr(cutting_stages, "try_blocks", lambda _: blocks.append(None))
    monkeypatch.setattr(cutting_stages, "BLOCKS_ROUND", 0)  # not by that
    monkeypatch.setattr(stage_search, "FAR_AWAY", math.inf)  # nor at once
    monkeypatch.setattr(cutting_stages, "CHEAP_ROUNDS", 0 if large else 99)
    for seed in (0, 4):
        graph = random_training(12, seed)
        solve(graph, int(0.7 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.0, time_limit_s=20)
    assert set(milps) == {(True, large), (False, False)}


@pytest.mark.parametrize("far", [True, False])
def test_blocks_are_tried_at_once_where_the_first_walks_are_far_off(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)  # else A* closes it
    rounds: list[int] = []
    monkeypatch.setattr(cutting_stages, "try_blocks", lambda search: rounds.append(search.notes["rounds"]))
    monkeypatch.setattr(stage_search, "FAR_AWAY", 0.0 if far else math.inf)
    graph = random_training(12, 0)
    solve(graph, int(0.7 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.0, time_limit_s=20)
    assert (min(rounds) == 1) is far


def test_walks_follow_smaller_budgets_until_that_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)  # else A* closes it
    asked: list[int] = []
    whole = first_schedules.stage_model

    def noted(graph: Graph, budget_bytes: int, events: list[int]) -> Any:
        asked.append(budget_bytes)
        return whole(graph, budget_bytes, events)

    monkeypatch.setattr(first_schedules, "stage_model", noted)
    monkeypatch.setattr(StageSearch, "follow", lambda *_: None)
    graph = random_training(12, 0)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    solve(graph, budget_bytes, gap=0.0, time_limit_s=20)
    assert asked == [int(share * budget_bytes) for share in first_schedules.SHRINK[: first_schedules.IDLE_GUIDES]]


def test_a_guide_takes_no_longer_than_guides_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of an unrolled network of 1,400 ops took all of the time there was, with nothing to show for it."""
    limits_s: list[float] = []

    def minimise(milp: Milp, *, time_limit_s: float, **_: Any) -> Answer:
        limits_s.append(time_limit_s)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)

    monkeypatch.setattr(Milp, "minimise", minimise)
    search = walking()
    first_schedules.follow_guides(search, with_end(search.graph), tightest(search.graph), now_s() + 2.0)
    assert len(limits_s) == 1 and 0 < limits_s[0] <= 2.0 < search.left_s


@pytest.mark.parametrize(("seed", "budget_bytes"), [(3, 975), (7, 1069)])
def test_walks_that_get_stuck_are_changed_until_one_fits(seed: int, budget_bytes: int) -> None:
    graph = random_training(20 if seed == 3 else 30, seed)
    search = StageSearch(graph, budget_bytes, gap=0.0, time_limit_s=60.0, seed=0)
    search.begin_walks(search.deadline)
    assert search.best is None
    cutting_stages._change_until_one_fits(search)
    assert search.time_ns is not None and search.notes["found_by"] == "list walk"
    assert "cut_short" not in search.notes


def test_where_no_walk_fits_changes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(12, 0)
    search = StageSearch(graph, least_bytes(graph) - 1, gap=0.0, time_limit_s=600.0, seed=0)
    search.begin_walks(search.deadline)
    changes: list[int] = []
    monkeypatch.setattr(type(search.walks), "improve", lambda _, work, deadline: changes.append(work))
    cutting_stages._change_until_one_fits(search)
    assert search.best is None and sum(changes) == cutting_stages.FIT_WORK


def test_a_start_that_exceeds_the_budget_is_made_to_fit() -> None:
    graph = random_training(12, 0)
    start = keep_all(graph)
    search = StageSearch(graph, int(0.8 * simulate(graph, start).peak_bytes), gap=0.0, time_limit_s=60.0, seed=0)
    assert cutting_stages._begin(search, start)
    assert search.time_ns is not None and search.notes["found_by"] == "list walk" and not search.begun


def test_graph_order_is_come_back_to_where_another_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 s, five had gone into the order of a schedule in two passes, and the rest into nothing."""
    graph = random_training(12, 0)
    ran: list[bool] = []

    def run(search: StageSearch, start: Schedule | None) -> None:
        assert start is None and not search.leaves and search.passes is None
        search.pass_again()
        cutting_stages._by_all_means(search)
        ran.append(search.passes is None)

    def leave(search: StageSearch, start: Schedule | None) -> bool:
        search.leaves = True
        return False

    monkeypatch.setattr(cutting_stages, "_run_for_a_share", leave)
    monkeypatch.setattr(cutting_stages, "_go_on", lambda search: None)
    monkeypatch.setattr(cutting_stages, "_run", run)
    solve(graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes), gap=0.0, time_limit_s=20)
    assert ran == [True]


def without_backward(nested: bool) -> StageSearch:
    graph = random_layered("RL1", seed=0)
    assert not any(op.backward for op in graph.ops)
    budget_bytes = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)
    return StageSearch(graph, budget_bytes, gap=0.0, time_limit_s=60.0, seed=0, nested=nested)


@pytest.mark.parametrize("nested", [False, True])
def test_a_search_in_the_order_of_another_neither_anneals_nor_is_guided(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    search, asked = without_backward(nested), list[str]()

    def annealed(search: StageSearch, runs: range, *_: Any, **__: Any) -> order_search.Ended:
        asked.append("annealing")
        return order_search.Ended(1, search.base, list(runs))

    monkeypatch.setattr(cutting_stages, "anneal_on", annealed)
    monkeypatch.setattr(search, "begin_walks", lambda _: None)
    monkeypatch.setattr(search, "follow", lambda *_: None)
    cutting_stages._first_schedules(search, lambda _: asked.append("guide"))
    assert asked == ([] if nested else ["annealing", "guide"])


def test_the_smallest_budget_is_told_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither walks nor short searches for small peaks find anything, nor prove that there is nothing."""
    monkeypatch.setattr(first_schedules, "PEBBLE_STATES", 1_000)  # as four times as many in graphs that take longer
    graph = random_training(12, 8)
    least_bytes, schedule = least_peak(graph, states=400_000, time_limit_s=60)
    assert schedule is not None and simulate(graph, schedule).peak_bytes == least_bytes
    assert least_peak(graph, states=first_schedules.PEBBLE_STATES)[0] < least_bytes
    assert next(fitting(graph, least_bytes), None) is None
    blocks: list[bool] = []
    with monkeypatch.context() as patched:
        patched.setattr(first_schedules, "try_blocks", lambda _, scarce: blocks.append(scarce))
        too_little = solve(graph, least_bytes - 1, gap=0.9, time_limit_s=60)
    assert not blocks  # nothing is looked for any more
    anneal_briefly(monkeypatch)
    assert too_little.status is Status.INFEASIBLE and too_little.notes["least_bytes"] == least_bytes
    assert solve(graph, least_bytes, gap=0.9, time_limit_s=60).peak_bytes == least_bytes


def test_other_orders_are_tried_once_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    search, asked = without_backward(False), list[bool]()

    def orders(search: StageSearch, *_: Any, anew: bool) -> list[int]:
        asked.append(anew)
        return list(range(len(search.graph.ops)))

    monkeypatch.setattr(cutting_stages, "search_orders", orders)
    monkeypatch.setattr(search, "follow", lambda *_: None)
    for _ in range(2):
        cutting_stages._elsewhere(search)
    assert search.best is None and asked == [True]
    cutting_stages._elsewhere(without_backward(True))  # which is in another order already
    assert asked == [True]


@pytest.mark.parametrize("budget_bytes", [3, 4, 5, 6])
@pytest.mark.parametrize("gap", [0.0, 0.005, 0.009, 0.01, 0.03])
def test_that_nothing_is_cheaper_by_the_gap_closes_it(gap: float, budget_bytes: int) -> None:
    """(1 - 0.009) · 21,000 is 20,811 but for rounding, which is further from 21,000 than 0.009 · 21,000."""
    graph = chain(5, time_ns=1000)
    best = cheapest(graph, budget_bytes).runs
    assert best is not None
    search = StageSearch(graph, budget_bytes, gap, 60.0, None, seed=0, any_order=False)
    search.offer(with_frees(graph, best), "known")
    assert cutting_stages._exhaust(search, cutting_stages.MOST_LOOKS, gap) and search.closed()
