"""Twremat: the tree, the published guarantee, and schedules that are valid, fit and never beat a bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings

from graphs.ir import Graph, Op, Value
from graphs.synthetic import chain, linear_network, random_layered, random_training
from planner.bounds import least_bytes
from planner.methods.twremat import solve
from planner.process.clock import now_s
from planner.process.pauses import rare_collections
from planner.result import Status
from planner.schedule import Compute, computes, keep_all, with_frees
from planner.simulate import simulate
from planner.walks import halving
from planner.walks.halving import Part, decompose, forward_pass, remat, without_dead
from tests.clock import stopwatch
from tests.oracles import least_time
from tests.strategies import graphs, graphs_and_budgets, random_budget, random_graph


def unit_graph(reads: list[set[int]], name: str = "unit") -> Graph:
    """Op i makes value i from the values ``reads[i]``; all sizes and times 1; the last value is the output."""
    ops = tuple(Op(f"op{i}", tuple(sorted(found)), (i,), 1) for i, found in enumerate(reads))
    return Graph(name, ops, tuple(Value(op.name, 1) for op in ops), frozenset(), frozenset({len(ops) - 1}))


def path(n: int) -> Graph:
    return unit_graph([{i - 1} if i else set() for i in range(n)], f"path_{n}")


def binary_tree(levels: int) -> Graph:
    """A complete tree summed towards its root, level by level: keep-all needs all leaves at once."""
    reads: list[set[int]] = [set() for _ in range(2 ** (levels - 1))]
    row = list(range(len(reads)))
    while len(row) > 1:
        row_ = []
        for a, b in zip(row[::2], row[1::2], strict=True):
            row_.append(len(reads))
            reads.append({a, b})
        row = row_
    return unit_graph(reads, f"binary_tree_{levels}")


def random_tree(n: int, seed: int) -> Graph:
    """Every op is read by one later op nearby."""
    rng = Random(seed)
    reads: list[set[int]] = [set() for _ in range(n)]
    for i in range(n - 1):
        min((reads[j] for j in range(i + 1, min(n, i + 8))), key=lambda found: (len(found) >= 3, rng.random())).add(i)
    return unit_graph(reads, f"tree_{n}_{seed}")


def partial_k_tree(n: int, k: int, seed: int) -> Graph:
    """Each op reads up to k ops of one clique of those before it: treewidth at most k."""
    rng = Random(seed)
    cliques = [list(range(k))]
    reads: list[set[int]] = [set(rng.sample(range(i), rng.randint(0, i))) for i in range(k)]
    for i in range(k, n):
        clique = rng.choice(cliques[-6:])
        reads.append(set(rng.sample(clique, rng.randint(1, k))))
        cliques.append([*rng.sample(clique, k - 1), i])
    return unit_graph(reads, f"k_tree_{n}_{k}_{seed}")


UNIT = {
    graph.name: graph
    for graph in (
        path(1),
        path(100),
        binary_tree(9),
        *(random_tree(200, seed) for seed in range(5)),
        *(partial_k_tree(150, k, seed) for k in (2, 3, 4) for seed in range(4)),
        chain(128),
        linear_network(100),
    )
}


@pytest.mark.parametrize("graph", UNIT.values(), ids=UNIT)
def test_unit_graphs_stay_within_the_published_guarantee(graph: Graph) -> None:
    n = len(graph.ops)
    tree = decompose(graph)
    most_read = max(len(op.inputs) for op in graph.ops)
    ends = sum(not readers for readers in graph.consumers)
    assert tree.levels <= math.floor(math.log2(n)) + 1
    guarantee = (tree.width + 1 + most_read) * tree.levels + 1
    for together in (True, False):
        runs = remat(graph, tree, together=together)
        assert runs is not None
        asked_at_once = ends if together else 1  # ops nobody reads are asked for too
        assert simulate(graph, with_frees(graph, runs)).peak_bytes <= guarantee + asked_at_once


def test_the_guarantee_is_logarithmic_where_keep_all_is_linear() -> None:
    # Width 2, two inputs, 11 levels: at most (2 + 1 + 2) * 11 + 2 values of the 1,025 that a chain of 512 layers has.
    graph = chain(512)
    assert decompose(graph).width == 2
    assert simulate(graph, keep_all(graph)).peak_bytes == 514
    found = solve(graph, 57, variants=False)
    assert found.status is Status.FEASIBLE
    assert found.peak_bytes is not None
    assert found.peak_bytes <= 57


@pytest.mark.parametrize(("graph", "width"), [(path(50), 1), (random_tree(80, 3), 1), (chain(20), 2)], ids=lambda x: str(x)[:20])
def test_known_widths(graph: Graph, width: int) -> None:
    assert decompose(graph).width == width


def parts_of(parts: tuple[Part, ...], above: tuple[Part, ...] = ()) -> Iterator[tuple[Part, tuple[Part, ...]]]:
    """Every part with the parts above it, the topmost first."""
    for part in parts:
        yield part, above
        yield from parts_of(part.children, (*above, part))


@pytest.mark.parametrize("seed", range(30))
def test_the_tree_separates(seed: int) -> None:
    graph = random_graph(seed, max_ops=30) if seed % 3 else random_layered("RL1", seed)
    tree = decompose(graph, seed=seed % 4)
    home: dict[int, tuple[Part, ...]] = {}
    for part, above in parts_of(tree.parts):
        assert 1 <= len(part.ops) <= tree.width + 1
        assert part.level == len(above)
        assert part.within == {*part.ops, *(i for child in part.children for i in child.within)}
        for child in part.children:
            assert len(child.within) <= len(part.within) // 2
        for i in part.ops:
            assert i not in home
            home[i] = (*above, part)
    assert sorted(home) == list(range(len(graph.ops)))
    for i, op in enumerate(graph.ops):
        for v in op.inputs:
            p = graph.producer[v]
            if p >= 0:  # of two joined ops, one is in the other's part or in one above it
                assert home[p][-1] in home[i] or home[i][-1] in home[p]


@settings(max_examples=150)
@given(graphs(max_ops=9, random=True, effect=True))
def test_every_sequence_is_valid(graph: Graph) -> None:
    tree = decompose(graph)
    for cut in (None, *range(tree.levels)):
        for together in (True, False):
            runs = remat(graph, tree, cut=cut, together=together)
            assert runs is not None
            simulate(graph, with_frees(graph, runs))
            if cut == 0 and together:
                assert len(runs) == len(graph.ops)


def test_random_ops_keep_their_order_where_the_tree_would_not() -> None:
    # Two branches into a sum; the tree asks for the later branch first, unless the draws forbid it.
    turned = 0
    for seed in range(40):
        plain = random_graph(seed, max_ops=25)
        rng = Random(seed)
        ops = tuple(
            Op(op.name, op.inputs, op.outputs, op.time_ns, op.workspace_bytes, random=rng.random() < 0.5) for op in plain.ops
        )
        graph = Graph(plain.name, ops, plain.values, plain.resident, plain.outputs)
        tree = decompose(graph)
        marked = [i for i, op in enumerate(ops) if op.random]
        unmarked = remat(plain, tree)
        runs = remat(graph, tree)
        assert unmarked is not None and runs is not None
        turned += [i for i in dict.fromkeys(unmarked) if i in marked] != marked
        assert [i for i in dict.fromkeys(runs) if i in marked] == marked
    assert turned  # or this tests nothing


@settings(max_examples=60)
@given(graphs_and_budgets(keep_order=True, max_ops=9, random=True, effect=True))
def test_passes_only_shorten_and_keep_to_the_budget(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    runs = remat(graph, decompose(graph))
    assert runs is not None
    before = simulate(graph, with_frees(graph, runs))
    pruned = without_dead(graph, runs)
    after = simulate(graph, with_frees(graph, pruned))
    assert after.peak_bytes <= before.peak_bytes
    assert after.time_ns <= before.time_ns
    budget_bytes = max(budget_bytes, after.peak_bytes)
    passed = simulate(graph, with_frees(graph, forward_pass(graph, pruned, budget_bytes)))
    assert passed.peak_bytes <= budget_bytes
    assert passed.time_ns <= after.time_ns
    # With room for everything nothing runs twice.
    roomy = forward_pass(graph, pruned, 10**9)
    assert len(roomy) == len(graph.ops)


def test_the_budget_passes_pay() -> None:
    # The sequence of a chain of 64 layers fits 40 values; with 40 allowed, less is run again than with what it needs.
    graph = chain(64)
    runs = remat(graph, decompose(graph))
    assert runs is not None
    peak_bytes = simulate(graph, with_frees(graph, runs)).peak_bytes
    tight, loose = solve(graph, peak_bytes), solve(graph, 40)
    assert peak_bytes < 40
    assert loose.time_ns is not None and tight.time_ns is not None
    assert loose.time_ns < tight.time_ns <= len(runs)


@settings(max_examples=120)
@given(graphs_and_budgets(keep_order=False, random=True, effect=True))
def test_plans_are_honest_and_never_beat_the_optimum(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    found = solve(graph, budget_bytes)
    best = least_time(graph, budget_bytes, keep_order=False)
    assert best is not None
    assert found.status is not Status.INFEASIBLE
    if found.schedule is None:
        assert found.status is Status.UNKNOWN
        assert "bytes" in found.notes["stopped"]
        assert found.notes["needs_bytes"] > budget_bytes
    else:
        assert found.time_ns is not None
        assert found.time_ns >= best[0] >= graph.keep_all_time_ns == found.bound_ns


def test_most_small_budgets_are_met() -> None:
    # So that the test above is about schedules, not about excuses.
    cases = [(graph, random_budget(graph, seed)) for seed in range(60) for graph in [random_graph(seed, max_ops=8)]]
    assert sum(solve(*case).schedule is not None for case in cases) > 30


def test_variants_never_lose_to_the_published_algorithm() -> None:
    better = 0
    for seed in range(8):
        graph = random_training(12, seed)
        peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
        for share in (0.6, 0.75, 0.9):
            alone, tried = (solve(graph, int(share * peak_bytes), variants=variants) for variants in (False, True))
            if alone.time_ns is not None:
                assert tried.time_ns is not None
                assert tried.time_ns <= alone.time_ns
            better += tried.time_ns != alone.time_ns
    assert better


def test_keep_all_is_found_where_it_fits() -> None:
    graph = random_layered("RL1", 0)
    found = solve(graph, simulate(graph, keep_all(graph)).peak_bytes)
    assert found.status is Status.OPTIMAL
    assert found.time_ns == graph.keep_all_time_ns


def test_the_same_arguments_give_the_same_plan_and_a_seed_may_change_it() -> None:
    graph = random_training(30, 1)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    assert solve(graph, budget_bytes).schedule == solve(graph, budget_bytes).schedule
    assert len({solve(graph, budget_bytes, seed=seed).schedule for seed in range(6)}) > 1


def test_a_start_is_kept_unless_beaten_and_progress_is_told() -> None:
    graph = chain(16)
    told: list[int] = []
    found = solve(graph, 12, progress=lambda *, time_ns, bound_ns, phase: told.append(time_ns))
    assert told
    assert all(later < earlier for earlier, later in pairwise(told))
    assert told[-1] == found.time_ns
    again = solve(graph, 12, start=found.schedule, time_limit_s=0)
    assert again.schedule == found.schedule
    assert again.notes["found_by"] == "start"


@pytest.mark.parametrize("variants", [True, False])
def test_what_keeps_all_is_there_from_the_start(variants: bool) -> None:
    """No tree, no time and no gap needed: the published sequence alone may take more than keep-all."""
    for seed in range(40):
        graph = random_graph(seed)
        for time_limit_s in (0, 60):
            budget_bytes = simulate(graph, keep_all(graph)).peak_bytes
            found = solve(graph, budget_bytes, gap=0.1, time_limit_s=time_limit_s, variants=variants)
            assert (found.status, found.time_ns) == (Status.OPTIMAL, graph.keep_all_time_ns), seed


def test_no_time_is_said() -> None:
    found = solve(chain(16), 12, time_limit_s=0)
    assert found.status is Status.UNKNOWN
    assert found.notes["stopped"] == "time limit"


def test_a_decomposition_that_takes_too_long_is_left() -> None:
    graph = unit_graph([{i - 1, i // 2} if i > 1 else set() for i in range(2000)])
    taken_s = stopwatch()
    found = solve(graph, int(0.9 * simulate(graph, keep_all(graph)).peak_bytes), time_limit_s=0.1)
    assert taken_s() <= 0.1 * 1.1 + 1.0
    assert found.status is Status.UNKNOWN
    assert found.notes["stopped"] == "time limit"


def test_what_no_schedule_fits_is_infeasible() -> None:
    graph = chain(4)
    assert solve(graph, least_bytes(graph) - 1).status is Status.INFEASIBLE


def test_too_long_a_sequence_is_said_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halving, "MAX_RUNS", 40)
    graph = chain(16)
    assert remat(graph, decompose(graph), max_runs=40) is None
    found = solve(graph, 8, variants=False)
    assert found.status is Status.UNKNOWN
    assert "40 runs" in found.notes["stopped"]


def branches(n: int) -> Graph:
    """Branches of two ops from one op to a sum, which as many outputs read: made one by one, each takes a run of all."""
    reads: list[set[int]] = [set(), *({0} for _ in range(n)), *({1 + i} for i in range(n)), set(range(1 + n, 1 + 2 * n))]
    graph = unit_graph([*reads, *({1 + 2 * n, 1 + i} for i in range(n))], f"branches_{n}")
    return Graph(graph.name, graph.ops, graph.values, graph.resident, frozenset(range(2 + 2 * n, 2 + 3 * n)))


def test_long_sequences_keep_the_time_limit() -> None:
    graph = branches(250)
    taken_s = stopwatch()
    tree = decompose(graph)
    time_limit_s = 2 * taken_s() + 0.5
    with rare_collections(full=False):  # as whatever plans does; a full one goes through what all tests before have left
        taken_s = stopwatch()
        found = solve(graph, 310, time_limit_s=time_limit_s)
        assert taken_s() <= 1.1 * time_limit_s + 1
    assert found.notes["stopped"].startswith("time limit")
    runs = remat(graph, tree, together=False)
    assert runs is not None and len(runs) > 100_000
    with pytest.raises(TimeoutError):
        forward_pass(graph, runs, 310, deadline=now_s())
    with pytest.raises(TimeoutError):
        remat(graph, tree, deadline=now_s())


def test_an_interruption_keeps_what_was_found() -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    found = solve(chain(16), 12, progress=interrupt)
    assert found.status is Status.FEASIBLE
    assert found.notes["stopped"] == "interrupted"


def test_an_effect_runs_once_and_its_output_stays() -> None:
    # 0 -> effect 1 -> 2 ... 9, the end reads the effect's output too.
    ops = [Op("start", (), (0,), 1), Op("effect", (0,), (1,), 1, effect=True)]
    ops += [Op(f"op{i}", (i - 1,), (i,), 1) for i in range(2, 10)]
    ops.append(Op("end", (1, 5, 9), (10,), 1))
    graph = Graph("effect", tuple(ops), tuple(Value(f"v{i}", 1) for i in range(11)), frozenset(), frozenset({10}))
    found = solve(graph, 5)
    assert found.schedule is not None
    assert list(computes(found.schedule)).count(1) == 1
    assert Compute(1) in found.schedule
