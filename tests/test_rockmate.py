"""Rockmate: blocks solved exactly, alike ones once, against Rotor, brute force and bounds; real models."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from graphs import Graph, InputError, Op, Value
from graphs.capture import capture
from graphs.costs import roofline
from graphs.importers import load_checkmate
from graphs.importers.checkmate import COST_UNIT_NS
from graphs.synthetic import chain, random_training
from graphs.workloads import build
from planner import Plan, Status, keep_all, simulate, solve
from planner.chains.chain import (
    Chain,
    Stage,
    chain_of_blocks,
    forward_count,
    held_throughout,
    left_for,
    separators,
    small_crossing,
)
from planner.chains.chain_dp import Way
from planner.methods.rockmate import solve as rockmate
from planner.methods.rotor import solve as rotor
from planner.process.clock import now_s
from planner.schedule import with_frees
from planner.stages.block_chain import block_schedule
from planner.stages.blocks import Block, BlockSolver, blocks
from tests.chains import random_chain, shared_among_layers
from tests.clock import stopwatch
from tests.models import MODELS, graph_of
from tests.oracles import least_budget, least_time
from tests.strategies import random_graph

UNIT_CHAIN = [(3, 45), (4, 26), (5, 22), (6, 21), (7, 20), (8, 19), (9, 18), (10, 17)]  # budget, runs: 8 layers


def solver(peaks: int = 4, saves: int = 6) -> BlockSolver:
    return BlockSolver(10**12, peaks, saves, math.inf, seed=0)


@pytest.mark.parametrize(("budget", "runs"), UNIT_CHAIN)
def test_unit_chain_of_eight_layers(budget: int, runs: int) -> None:
    assert solve(chain(8), budget, method="rockmate").time_ns == runs


@pytest.mark.parametrize(
    ("name", "gigabytes", "cost", "above"),
    [
        ("vgg16_176", 10, 250_600, 0.0),
        ("vgg16_176", 9, 251_383, 0.0),
        ("vgg16_176", 8, 255_828, 0.0),
        ("resnet50_184", 10, 108_048, 0.04),
        ("resnet50_184", 8, 110_154, 0.05),
    ],
)
def test_published_instances(data: Path, name: str, gigabytes: int, cost: int, above: float) -> None:
    """VGG16 is a chain of short blocks: Rockmate finds the published optima. On ResNet-50 it stays a little above them."""
    graph = load_checkmate(data / "checkmate_instances" / f"{name}.json")
    found = rockmate(graph, gigabytes * 2**30, peaks=3, saves=4)
    assert found.time_ns is not None
    assert cost <= found.time_ns // COST_UNIT_NS <= (1 + above) * cost


def test_never_worse_than_rotor_on_chains() -> None:
    """Rotor's one way to run a stage, saving all, is among Rockmate's."""
    cases = 0
    for seed in range(12):
        graph = random_chain(8, seed)
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.6, 0.75, 0.9):
            plain, found = rotor(graph, int(share * peak)), rockmate(graph, int(share * peak))
            if plain.time_ns is not None:
                assert found.time_ns is not None and found.time_ns <= plain.time_ns, seed
                cases += 1
    assert cases > 15


def test_never_below_brute_force() -> None:
    """Random ops, effects, several outputs, values nobody reads; the second half of the ops taken for the backward pass."""
    solved = 0
    for seed in range(60):
        graph = random_graph(seed, max_ops=7, random=seed % 2 == 0, effect=seed % 3 == 0)
        half = len(graph.ops) // 2
        graph = replace(graph, ops=tuple(replace(op, backward=i >= half) for i, op in enumerate(graph.ops)))
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for budget in (peak, peak - 1, peak - 3):
            found, best = rockmate(graph, budget, peaks=2, saves=3), least_time(graph, budget, keep_order=False)
            if found.time_ns is not None:
                assert best is not None and best[0] <= found.time_ns, seed
                solved += 1
            else:
                assert found.status is Status.INFEASIBLE or found.notes["needs_bytes"] > budget
            assert best is None or found.status is not Status.INFEASIBLE
    assert solved > 60


def test_never_below_the_bound_of_cutting_stages() -> None:
    solved = 0
    for seed in range(5):
        graph = random_training(8, seed)
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.75, 0.9):
            ours = solve(graph, int(share * peak), gap=0.0, time_limit_s=0.5)
            found = rockmate(graph, int(share * peak), peaks=3, saves=3)
            if found.time_ns is not None:
                assert ours.bound_ns is not None and found.time_ns >= ours.bound_ns
                assert found.peak_bytes is not None and found.peak_bytes <= found.budget_bytes
                solved += 1
    assert solved >= 5


def test_stages_run_one_after_the_other_are_the_graph() -> None:
    """Every op is in one stage, and the stages forward, then backward from the last, are a valid order of the ops."""
    for graph in [*(random_training(9, seed) for seed in range(20)), *map(graph_of, MODELS)]:
        for carried, most_ops in itertools.product((frozenset[int](), small_crossing(graph)), (math.inf, 3)):
            chain_ = chain_of_blocks(graph, carried=carried, most_ops=most_ops)
            for before, stage in itertools.pairwise(chain_.stages):
                assert {graph.producer[v] for v in stage.inputs} <= set(before.forward)
            forward = [i for stage in chain_.stages for i in stage.forward]
            backward = [i for stage in reversed(chain_.stages) for i in stage.backward]
            assert forward == list(range(forward_count(graph)))
            assert sorted(forward + backward) == list(range(len(graph.ops)))
            trace = simulate(graph, with_frees(graph, forward + backward))
            assert trace.time_ns == graph.keep_all_time_ns


def test_what_all_layers_share_takes_no_time_for_each_pair_of_them() -> None:
    graph = shared_among_layers(12_000)
    taken_s = stopwatch()
    carried = small_crossing(graph)
    assert len(chain_of_blocks(graph, carried=carried).stages) == 12_000
    assert taken_s() < 4


def test_what_is_carried_crosses_a_cut() -> None:
    for graph in [*(random_training(9, seed) for seed in range(20)), *map(graph_of, MODELS)]:
        small = small_crossing(graph, 0.2)
        cuts = [at for at, _ in separators(graph, carried=small)]
        count = forward_count(graph)
        for v in small:
            last = max(c for c in graph.consumers[v] if c < count)
            assert any(graph.producer[v] <= at < last for at in cuts)


@cache
def few_ways(name: str) -> Plan:
    """What two peaks and two sizes of what is saved lead to in 90 % of the memory."""
    graph = graph_of(name)
    peak = simulate(graph, keep_all(graph)).peak_bytes
    return rockmate(graph, int(0.9 * peak), peaks=2, saves=2, time_limit_s=20)


def test_a_recurrent_network_is_cut_into_its_steps() -> None:
    """Its state is several values, so no op separates one step from the next."""
    model, inputs, loss = build("lstm", batch=512, seq=12, depth=1)
    graph = roofline(capture(model, inputs, loss=loss)).graph
    assert max(len(stage.forward) for stage in chain_of_blocks(graph).stages) > 0.9 * forward_count(graph)
    chain_ = chain_of_blocks(graph, most_ops=40)
    assert len(chain_.stages) > 12
    assert max(len(stage.forward) for stage in chain_.stages) < 20
    budget_bytes = int(0.6 * simulate(graph, keep_all(graph)).peak_bytes)
    schedule = block_schedule(graph, budget_bytes, time_limit_s=10, seed=0, peaks=3, saves=3).schedule
    assert schedule is not None
    trace = simulate(graph, schedule)
    assert trace.peak_bytes <= budget_bytes and trace.time_ns < 1.35 * graph.keep_all_time_ns


def test_a_block_is_what_happens_in_it() -> None:
    """Time and peak of a stage's own graph are those of the stage with everything around it taken away."""
    graph = random_training(8, 3)
    chain_ = chain_of_blocks(graph)
    left = left_for(chain_)
    assert len(chain_.stages) > 3
    for at, block in enumerate(blocks(chain_)):
        stage = chain_.stages[at]
        assert [i for i in block.ops if i >= 0] == [*stage.forward, *stage.backward]
        assert block.graph.keep_all_time_ns == sum(graph.ops[i].time_ns for i in (*stage.forward, *stage.backward))
        stop = block.graph.ops[block.stop]
        output = chain_.stages[at + 1].inputs if at + 1 < len(chain_.stages) else frozenset()
        assert len(stop.inputs) == len(output - held_throughout(chain_)) or not output
        sent = sum(graph.values[v].size_bytes for v in left[at] if any(c in stage.backward for c in graph.consumers[v]))
        assert sum(block.graph.values[v].size_bytes for v in stop.outputs) == sent


def one_block(graph: Graph) -> Block:
    """The whole graph as one stage."""
    count = forward_count(graph)
    stage = Stage(tuple(range(count)), tuple(range(count, len(graph.ops))), frozenset())
    (block,) = blocks(Chain(graph, (stage,), frozenset()))
    return block


def test_blocks_are_solved_exactly() -> None:
    """With one budget, the peak, a block's least time is that of brute force where Checkmate's space has the optimum."""
    equal = cases = 0
    for seed in range(30):
        block = one_block(random_chain(3, seed, plain=seed % 2 == 0))
        low = least_budget(block.graph, keep_order=True)
        for budget in range(low - 1, simulate(block.graph, keep_all(block.graph)).peak_bytes + 1, 2):
            best = least_time(block.graph, budget, keep_order=True)
            runs, exact = solver().least(block, budget, 10**9, now_s() + 10)
            if runs is None:
                continue
            trace = simulate(block.graph, with_frees(block.graph, runs))
            assert best is not None and trace.peak_bytes <= budget and trace.time_ns >= best[0]
            equal += exact and trace.time_ns == best[0]
            cases += 1
    assert cases > 30 and equal > 0.9 * cases


def test_holding_less_at_the_stop_takes_more_time() -> None:
    block = max(blocks(chain_of_blocks(graph_of("resnet50"))), key=lambda block: len(block.graph.ops))
    whole = simulate(block.graph, keep_all(block.graph))
    sizes = [block.graph.values[v].size_bytes for v in block.graph.ops[block.stop].inputs]
    times = []
    for share in (1.0, 0.5, 0.1):
        saved = sum(sizes) + int(share * (whole.peak_bytes - sum(sizes)))
        runs, exact = solver().least(block, 2 * whole.peak_bytes, saved, now_s() + 20)
        assert exact and runs is not None
        trace = simulate(block.graph, with_frees(block.graph, runs))
        times.append(trace.time_ns)
        at = runs.index(block.stop)
        held = {v for i in runs[:at] for v in block.graph.ops[i].outputs} & needed(block.graph, runs[at + 1 :])
        assert sum(block.graph.values[v].size_bytes for v in held) <= saved
    assert times == sorted(times) and times[-1] > times[0] == block.graph.keep_all_time_ns


def needed(graph: Graph, runs: list[int]) -> set[int]:
    """What these ops read before they make it."""
    wanted: set[int] = set()
    for i in reversed(runs):
        wanted -= set(graph.ops[i].outputs)
        wanted |= set(graph.ops[i].inputs)
    return wanted


def test_alike_blocks_are_solved_once() -> None:
    for name in ("gpt2", "resnet50"):
        found = few_ways(name)
        assert found.notes["distinct"] < 0.7 * found.notes["stages"]
    problems = blocks(chain_of_blocks(chain(30)))
    assert len({block.graph.fingerprint() for block in problems}) == 3


def test_a_way_is_split_at_the_stop() -> None:
    block = blocks(chain_of_blocks(chain(4)))[2]
    assert [block.graph.ops[i].name for i in range(len(block.ops))] == ["forward_2", "stop", "backward_1"]
    assert block.split([0, 1, 0, 2]) == Way((2,), (2, 7))


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str) -> None:
    graph = graph_of(name)
    whole = simulate(graph, keep_all(graph)).peak_bytes
    found = solve(graph, int(0.85 * whole), method="rockmate", time_limit_s=8, peaks=2, saves=3)
    assert found.overhead is not None and 0 < found.overhead < 0.2
    assert found.bound_ns == graph.keep_all_time_ns
    assert solve(graph, whole, method="rockmate", time_limit_s=0).status is Status.OPTIMAL


def test_few_slots_come_to_an_end() -> None:
    """Where so few units are all the memory there is, the least memory is not sought any finer."""
    ops = (Op("a", (0,), (1,), 1), Op("b", (1,), (2,), 1), Op("c", (0,), (3, 4), 1, workspace_bytes=1))
    values = tuple(Value(str(x), size) for x, size in enumerate((0, 9, 0, 0, 6)))
    graph = Graph("few", ops, values, frozenset({0}), frozenset({1, 4}))
    for slots in range(1, 6):
        assert solve(graph, 15, method="rockmate", slots=slots).status is Status.UNKNOWN


def test_few_slots_still_say_what_is_needed() -> None:
    """Rounded up to so few units, what is held together is more than all the memory there is."""
    ops = (
        Op("a", (0,), (2,), 6),
        Op("b", (1,), (3, 4, 5), 7, random=True, effect=True),
        Op("c", (4,), (6, 7, 8), 2, random=True),
        Op("d", (3, 8), (9,), 5, effect=True, backward=True),
        Op("e", (2, 8), (10,), 2, effect=True, backward=True),
    )
    values = tuple(Value(str(x), size) for x, size in enumerate((5, 3, 2, 7, 1, 9, 7, 0, 0, 1, 1)))
    graph = Graph("few", ops, values, frozenset({0, 1}), frozenset({4, 9, 10}))
    for slots in range(1, 6):
        found = solve(graph, 26, method="rockmate", slots=slots)
        assert found.schedule is not None or found.notes["needs_bytes"] > 26


def test_an_interruption_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockSolver, "ways", interrupted)
    found = solve(chain(8), 6, method="rockmate")
    assert found.status is Status.UNKNOWN and found.notes["stopped"] == "interrupted"


def test_no_block_is_solved_where_keeping_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(*_: object) -> None:
        raise AssertionError("blocks may take all the time there is")

    monkeypatch.setattr(BlockSolver, "ways", solved)
    graph = chain(8)
    found = solve(graph, simulate(graph, keep_all(graph)).peak_bytes, method="rockmate")
    assert found.status is Status.OPTIMAL and found.notes["found_by"] == "keep all"


def test_more_ways_make_better_schedules() -> None:
    """Without time to solve blocks there is only the way that saves all: Rotor on blocks."""
    more = few_ways("resnet50")
    one = rockmate(graph_of("resnet50"), more.budget_bytes, time_limit_s=0)
    assert one.notes["solved"] == 0 and one.notes["ways"] == one.notes["stages"]
    assert one.time_ns is not None and more.time_ns is not None and more.time_ns < one.time_ns


def test_says_how_many_bytes_it_needs() -> None:
    graph = graph_of("vgg16")
    found = rockmate(graph, int(0.6 * simulate(graph, keep_all(graph)).peak_bytes), peaks=2, saves=2)
    needs = found.notes["needs_bytes"]
    assert found.status is Status.UNKNOWN and f"{needs:,} bytes" in found.notes["stopped"]
    assert rockmate(graph, int(1.001 * needs), peaks=2, saves=2).schedule is not None


def test_values_that_every_block_reads_do_not_hide_the_blocks() -> None:
    graph = shared_mask(chain(8, size_bytes=1000))
    assert len(chain_of_blocks(graph).stages) < 4
    carried = small_crossing(graph)
    assert carried == {len(graph.values) - 1}
    assert len(chain_of_blocks(graph, carried=carried).stages) >= 8
    found = rockmate(graph, 6010)
    assert found.time_ns is not None and found.time_ns <= 24


def test_a_graph_without_a_backward_pass_is_one_way() -> None:
    graph = replace(chain(3), ops=tuple(replace(op, backward=False) for op in chain(3).ops))
    assert rockmate(graph, 100).time_ns == graph.keep_all_time_ns


@pytest.mark.parametrize("option", ["peaks", "saves", "slots"])
def test_refuses_options_that_are_no_number(option: str) -> None:
    with pytest.raises(InputError, match=f"{option} must be a positive integer, not 0"):
        solve(chain(3), 5, method="rockmate", **{option: 0})


def shared_mask(graph: Graph) -> Graph:
    """A small value made first and read by every forward op after."""
    mask = len(graph.values)
    first = replace(graph.ops[0], outputs=(0, mask))
    ops = [replace(op, inputs=(*op.inputs, mask)) if op.kind == "forward" else op for op in graph.ops[1:]]
    return replace(graph, ops=(first, *ops), values=(*graph.values, replace(graph.values[0], size_bytes=1)))


def test_blocks_of_thousands_of_ops_keep_the_time_limit() -> None:
    graph = random_training(1500, seed=1)  # some 3,400 ops in 10 blocks
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    began = time.process_time()
    notes = block_schedule(graph, budget_bytes, time_limit_s=1, seed=0).notes
    assert notes["stages"] == 10
    assert time.process_time() - began < 6


def test_what_the_clock_cut_short_is_said() -> None:
    graph = random_training(40, seed=2)
    budget_bytes = int(0.6 * simulate(graph, keep_all(graph)).peak_bytes)
    assert solve(graph, budget_bytes, method="rockmate", time_limit_s=0).notes["cut_short"]
    small = random_training(5, seed=2)
    budget_bytes = int(0.8 * simulate(small, keep_all(small)).peak_bytes)
    assert "cut_short" not in solve(small, budget_bytes, method="rockmate").notes


@pytest.mark.parametrize("method", ["rockmate", "rotor"])
def test_a_chain_too_long_for_the_dynamic_program_has_no_schedule(method: str) -> None:
    graph = chain(5000)
    found = solve(graph, 4500, method=method, time_limit_s=1)
    assert found.status is Status.UNKNOWN
    assert "too long" in found.notes["stopped"]
