"""Chen's rules: published figures, the square-root bound, bounds never beaten, real models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from graphs import Graph, InputError, Value
from graphs.importers import load_checkmate
from graphs.synthetic import chain, linear_network, random_training
from planner import Status, keep_all, simulate, solve
from planner.chains.chain import forward_count, separators
from planner.chains.checkpoints import Trials, candidates_of, every_root, runs
from planner.methods.chen_greedy import solve as chen_greedy
from planner.methods.chen_sqrt import solve as chen_sqrt
from planner.schedule import Compute, with_frees
from tests.chains import vgg19
from tests.models import MODELS, graph_of
from tests.oracles import least_time
from tests.strategies import random_graph

GB = 2**30
METHODS = pytest.mark.parametrize("method", ["chen_sqrt", "chen_greedy"])
KINDS = pytest.mark.parametrize("kind", ["articulation", "linearized"])


@KINDS
def test_square_root_on_vgg19(kind: str) -> None:
    """Published by Checkmate's authors: 72.513 GFLOP, with more bytes than exact liveness needs."""
    found = solve(vgg19(), 69_447_584, method="chen_sqrt", candidates=kind)
    assert found.time_ns is not None and round(found.time_ns / 1e9, 3) == 72.513


@pytest.mark.parametrize(
    ("name", "gigabytes", "percent"),
    [
        ("unet_11", 10, 20.5),
        ("unet_11", 8, 21.7),
        ("unet_11", 7, 25.7),
        ("unet_11", 6, 63.0),
        ("resnet50_184", 10, 14.74),
        ("resnet50_184", 9, 21.5),
        ("resnet50_184", 6, 26.0),
    ],
)
def test_greedy_is_no_worse_than_an_earlier_sweep(data: Path, name: str, gigabytes: int, percent: float) -> None:
    """Overheads that a coarser sweep over 40 values of b gave, on the authors' instances of Checkmate's MILP."""
    graph = load_checkmate(data / "checkmate_instances" / f"{name}.json")
    found = chen_greedy(graph, gigabytes * GB)
    assert found.overhead is not None and 0 < 100 * found.overhead <= percent


@pytest.mark.parametrize("layers", [16, 25, 50, 100, 200])
def test_square_root_memory(layers: int) -> None:
    """√n checkpoints, one segment of √n layers, a few more for what runs: at most 2 √n + 3 values, and one more forward pass."""
    for graph in (chain(layers), linear_network(layers)):
        found = chen_sqrt(graph, 10**9, candidates="articulation")
        assert found.peak_bytes is not None and found.time_ns is not None
        assert found.peak_bytes <= 2 * math.sqrt(layers) + 3
        assert graph.keep_all_time_ns < found.time_ns <= graph.keep_all_time_ns + layers


def test_articulation_points_are_those_of_the_undirected_graph() -> None:
    """Where all ops lie between the first and the last, separators are articulation points between two placeholders."""
    found = 0
    for seed in range(40):
        graph = random_training(10, seed, skip_share=0.4)
        count = forward_count(graph)
        plain = nx.Graph([("first", 0), ("last", count - 1)])
        for i in range(count):
            plain.add_edges_from((graph.producer[v], i) for v in graph.ops[i].inputs if graph.producer[v] >= 0)
        points = set(nx.articulation_points(plain))
        ours = {op for _, op in separators(graph)}
        assert ours == points - {"first", "last", count - 1}, seed
        assert candidates_of(graph, "articulation") == sorted(ours)
        found += len(ours)
    assert found > 100


def test_after_a_separator_nothing_before_it_is_needed() -> None:
    for seed in range(20):
        graph = random_training(8, seed)
        for at, op in separators(graph):
            for i in range(at + 1, forward_count(graph)):
                assert all(
                    graph.producer[v] < 0 or graph.producer[v] > at or graph.producer[v] == op for v in graph.ops[i].inputs
                )


def test_no_checkpoint_is_keeping_all_and_every_checkpoint_too() -> None:
    graph = random_training(8, 1)
    once = list(range(len(graph.ops)))
    assert runs(graph, ()) == once == runs(graph, range(forward_count(graph)))


def test_segments_run_again_as_a_whole() -> None:
    """Six layers, checkpoints after the second and the fourth: the middle segment's other value runs again, then the first's."""
    graph = chain(6)
    again = [i for i in runs(graph, {1, 3}) if runs(graph, {1, 3}).count(i) > 1]
    assert sorted(set(again)) == [0, 2]
    assert runs(graph, {1, 3})[:7] == list(range(7))


def test_every_root() -> None:
    assert list(every_root(chain(9), "linearized")) == [2, 5, 8]  # ten forward ops with the loss
    assert list(every_root(chain(2), "articulation")) == [0, 1]


@METHODS
@KINDS
def test_valid_and_within_the_budget_on_random_training_graphs(method: str, kind: str) -> None:
    solved = 0
    for seed in range(25):
        graph = random_training(9, seed)
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.6, 0.8, 1.0):
            budget = int(share * peak)
            found = solve(graph, budget, method=method, candidates=kind)
            assert found.bound_ns == graph.keep_all_time_ns
            if found.schedule is None:
                assert found.status is Status.INFEASIBLE or found.notes["needs_bytes"] > budget
                assert solve(
                    graph, found.notes.get("needs_bytes", peak), method=method, candidates=kind
                ).schedule is not None or (found.status is Status.INFEASIBLE)
                continue
            solved += 1
            assert found.peak_bytes is not None and found.peak_bytes <= budget
    assert solved >= 20


@METHODS
def test_never_below_brute_force(method: str) -> None:
    """Random ops, effects, several outputs, values nobody reads; the second half of the ops taken for the backward pass."""
    solved = 0
    for seed in range(120):
        graph = halved(random_graph(seed, max_ops=7, random=seed % 2 == 0, effect=seed % 3 == 0))
        peak = simulate(graph, keep_all(graph)).peak_bytes
        for budget in (peak, peak - 1, peak - 3):
            found, best = solve(graph, budget, method=method), least_time(graph, budget, keep_order=True)
            if found.time_ns is not None:
                assert best is not None and best[0] <= found.time_ns, seed
                solved += 1
            assert best is None or found.status is not Status.INFEASIBLE
    assert solved > 60


@METHODS
@pytest.mark.parametrize("name", MODELS)
def test_real_models(method: str, name: str) -> None:
    graph = graph_of(name)
    whole = simulate(graph, keep_all(graph))
    found = solve(graph, whole.peak_bytes * 2, method=method)  # the square-root rule may need more than keeping all
    assert found.peak_bytes is not None and found.time_ns is not None and found.time_ns >= whole.time_ns
    saved = solve(graph, int(0.95 * whole.peak_bytes), method=method)
    if saved.schedule is None:
        assert saved.notes["needs_bytes"] > saved.budget_bytes and f"{saved.notes['needs_bytes']:,}" in saved.notes["stopped"]
    else:
        assert saved.peak_bytes is not None and saved.peak_bytes <= saved.budget_bytes


def test_greedy_saves_memory_on_deep_models() -> None:
    for name in ("resnet50", "vgg16", "mlp"):
        graph = graph_of(name)
        whole = simulate(graph, keep_all(graph)).peak_bytes
        found = chen_greedy(graph, int(0.9 * whole))
        assert found.overhead is not None and 0 <= found.overhead < 0.5


def test_effects_run_once_and_buffers_stay() -> None:
    """An op with an effect and an updated buffer inside a segment that runs again."""
    graph = chain(6)
    values = (*graph.values, Value("buffer", 1), Value("told", 1))
    ops = list(graph.ops)
    ops[0] = replace(ops[0], outputs=(0, 13))
    ops[2] = replace(ops[2], outputs=(2, 14), effect=True)
    graph = replace(graph, ops=tuple(ops), values=values, outputs=graph.outputs | {13})
    schedule = with_frees(graph, runs(graph, {3}))
    trace = simulate(graph, schedule)
    assert set(trace.recomputed) == {0, 1} and 2 not in trace.recomputed
    assert sum(step == Compute(2) for step in schedule) == 1


def test_an_interruption_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(9)
    take, taken = Trials.take, [0]

    def interrupted(trials: Trials, checkpoints: Iterable[int]) -> bool:
        taken[0] += 1
        if taken[0] == 9:
            raise KeyboardInterrupt
        return take(trials, checkpoints)

    monkeypatch.setattr(Trials, "take", interrupted)
    found = solve(graph, 12, method="chen_greedy")
    assert found.notes["stopped"] == "interrupted" and found.schedule is not None


@pytest.mark.parametrize(("method", "at"), [("chen_greedy", 3), ("chen_sqrt", 2)])
def test_an_interruption_is_said_where_nothing_fits(method: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take, taken = Trials.take, [0]

    def interrupted(trials: Trials, checkpoints: Iterable[int]) -> bool:
        taken[0] += 1
        if taken[0] == at:
            raise KeyboardInterrupt
        return take(trials, checkpoints)

    monkeypatch.setattr(Trials, "take", interrupted)
    found = solve(chain(9), 4, method=method)
    assert found.status is Status.UNKNOWN and found.notes["stopped"] == "interrupted"


@METHODS
def test_a_sequence_is_measured_only_where_there_is_time_to(method: str) -> None:
    graph = chain(20_000)  # tenths of a second to measure; on graphs that are no chain it was seconds beyond the limit
    budget_bytes = simulate(graph, keep_all(graph)).peak_bytes // 2
    assert solve(graph, budget_bytes, method=method, time_limit_s=5).schedule is not None
    found = solve(graph, budget_bytes, method=method, time_limit_s=0)
    assert found.status is Status.UNKNOWN and found.notes["stopped"] == "time limit"


def test_one_b_instead_of_the_sweep() -> None:
    graph = chain(12)
    found = chen_greedy(graph, 10**6, b_bytes=2, candidates="linearized")
    assert found.notes["checkpoints"] == 4 and found.notes["tried"] == 1
    assert chen_greedy(graph, 10**6).notes["tried"] > 3


def test_a_graph_without_a_backward_pass_is_kept() -> None:
    graph = replace(chain(3), ops=tuple(replace(op, backward=False) for op in chain(3).ops))
    for method in (chen_sqrt, chen_greedy):
        assert method(graph, 100).time_ns == graph.keep_all_time_ns


@METHODS
def test_refuses_unknown_candidates(method: str) -> None:
    with pytest.raises(InputError, match="'articulation', 'linearized' or 'both', not 'all'"):
        solve(chain(3), 10, method=method, candidates="all")
    with pytest.raises(InputError, match="b_bytes must be an integer of at least 0, not -1"):
        solve(chain(3), 10, method="chen_greedy", b_bytes=-1)


def halved(graph: Graph) -> Graph:
    """The same graph with its second half marked as backward."""
    half = len(graph.ops) // 2
    return replace(graph, ops=tuple(replace(op, backward=i >= half) for i, op in enumerate(graph.ops)))
