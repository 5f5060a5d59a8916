"""Second passes: gradients that do not fit beside the backward pass are made again together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphs.ir import Graph, Op, Value
from planner.methods.cutting_stages import solve
from planner.schedule import keep_all, with_frees
from planner.simulate import simulate
from planner.stages.search import StageSearch
from planner.walks.second_passes import LONGEST, second_passes
from planner.walks.walk_search import WalkSearch


def narrowing(layers: int, *, effect: int = -1) -> Graph:
    """A step of layers whose activations become smaller and whose weights become larger, as in a convolutional network."""
    activation = [2 * (layers - i) for i in range(layers)]
    weight = [2 * (i + 1) for i in range(layers)]
    # Values: activations, their gradients from the last on, gradients of weights from the last on.
    values = [Value(f"x{i}", activation[i]) for i in range(layers)]
    ops = [Op(f"forward{i}", (i - 1,) if i else (), (i,), 2, effect=i == effect) for i in range(layers)]
    gradient = -1
    for i in reversed(range(layers)):
        below = (i - 1,) if i else ()
        made = len(values)
        values += [Value(f"g{i}", activation[i]), Value(f"w{i}", weight[i])]
        ops.append(Op(f"backward{i}", (i, *((gradient,) if gradient >= 0 else ())), (made,), 2, backward=True))
        ops.append(Op(f"weight{i}", (made, *below), (made + 1,), 2, backward=True))
        gradient = made
    outputs = frozenset(v for v, value in enumerate(values) if value.name.startswith("w"))
    return Graph("narrowing", tuple(ops), tuple(values), frozenset(), outputs)


def test_they_are_the_step_and_then_what_makes_the_first_gradients_again() -> None:
    graph = narrowing(8)
    passes = list(second_passes(graph, 80))
    assert len(passes) >= 4
    again = [runs[len(graph.ops) :] for runs in passes]
    assert all(runs[: len(graph.ops)] == list(range(len(graph.ops))) for runs in passes)
    for few, more in zip(sorted(again, key=len), sorted(again, key=len)[1:], strict=False):
        assert set(few) < set(more)
    for runs in again:
        assert runs == sorted(runs)
        assert {graph.producer[x] for v in runs for x in graph.ops[v].inputs} <= set(runs)
        made = {x for v in runs for x in graph.ops[v].outputs}
        assert made & graph.outputs and not graph.outputs <= made
        assert sum(graph.ops[v].time_ns for v in runs) <= LONGEST * graph.keep_all_time_ns


def test_what_acts_on_the_world_does_not_run_again() -> None:
    graph = narrowing(8, effect=2)
    for runs in second_passes(graph, 80):
        assert runs.count(2) == 1 and runs.count(3) == 2
        assert simulate(graph, with_frees(graph, runs)).time_ns > graph.keep_all_time_ns


def test_there_are_none_where_gradients_take_little() -> None:
    graph = narrowing(8)
    gradients = sum(graph.values[x].size_bytes for x in graph.outputs)
    assert not list(second_passes(graph, 5 * gradients)) and list(second_passes(graph, 5 * gradients - 1))
    assert not list(second_passes(replace(graph, outputs=frozenset()), 10))


@pytest.mark.parametrize(("layers", "gain"), [(12, 0.3), (30, 0.2)])
def test_walks_find_more_with_them(layers: int, gain: float) -> None:
    graph = narrowing(layers)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    plain, twice = (WalkSearch(graph, budget_bytes, seed=0) for _ in range(2))
    plain.start()
    for runs in second_passes(graph, budget_bytes):
        twice.follow(runs, held=True)
    assert plain.runs is not None and twice.runs is not None
    done = simulate(graph, with_frees(graph, twice.runs.tolist()))
    assert done.peak_bytes <= budget_bytes and done.time_ns == twice.time_ns
    assert twice.time_ns < plain.time_ns - gain * graph.keep_all_time_ns


def test_they_are_asked_where_nothing_fits_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    pass_again = StageSearch.pass_again
    monkeypatch.setattr(StageSearch, "pass_again", lambda search: asked.append(search.best) or pass_again(search))
    graph = narrowing(40)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for share, expected in ((0.99, []), (0.655, [None])):
        asked.clear()
        found = solve(graph, int(share * peak_bytes), time_limit_s=4.0)
        assert found.peak_bytes is not None and found.peak_bytes <= share * peak_bytes
        assert asked == expected


def test_what_they_find_is_offered() -> None:
    graph = narrowing(30)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    search = StageSearch(graph, budget_bytes, 0.005, 10.0, None, seed=0)
    search.pass_again()
    assert search.best is not None and search.notes["found_by"] == "list walk"
    assert simulate(graph, search.best).peak_bytes <= budget_bytes
    cut = StageSearch(graph, budget_bytes, 0.005, 0.0, None, seed=0)
    cut.pass_again()
    assert cut.notes["cut_short"]
