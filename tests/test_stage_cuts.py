"""Cuts for what happens inside of a stage: never wrong, as strong as they say, and followed by walks that fit."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from graphs.ir import Graph, Op, Value
from graphs.synthetic import chain
from planner import pseudo_boolean, stage_cuts
from planner.milp import Answer, Outcome
from planner.schedule import with_frees
from planner.simulate import simulate
from planner.stage_cuts import broken_cut, fitting_walk, missing, next_first_runs
from planner.stage_model import StageCut, StageModel, stage_model, walk, with_end
from tests.oracles import least_time
from tests.strategies import budget_range, random_graph


def solved(model: StageModel) -> Answer:
    return pseudo_boolean.minimise(model.milp, time_limit_s=20.0)


def cut_until_none_is_broken(graph: Graph, budget_bytes: int, events: list[int]) -> tuple[StageModel, Answer, list[StageCut]]:
    """The last model, its solution, and all cuts in it."""
    closed, cuts = with_end(graph), list[StageCut]()
    while True:
        model = stage_model(closed, budget_bytes, events, cuts)
        answer = solved(model)
        found = [] if answer.values is None else [broken_cut(model, answer, w, budget_bytes) for w in events[1:]]
        more = [cut for cut in found if cut is not None]
        assert not set(more) & set(cuts), "a solution breaks a cut that is in the model"
        if not more:
            return model, answer, cuts
        cuts += more


@pytest.mark.parametrize("every", [True, False], ids=["every-op-an-event", "some"])
def test_cuts_never_rule_out_an_optimum(every: bool) -> None:
    """With cuts the bound is no lower than without, and never above brute force's optimum."""
    with_cuts = attained = raised = 0
    for seed in range(800):
        graph = random_graph(seed, max_ops=7, random=seed % 7 == 0, effect=seed % 5 == 0)
        draw = Random(seed)
        low, high = budget_range(graph, keep_order=True)
        budget_bytes = draw.randint(low, max(low, (2 * low + high) // 3))
        ops = range(len(graph.ops))
        events = list(ops) if every else sorted(draw.sample(ops, draw.randint(1, len(ops))))
        model, answer, cuts = cut_until_none_is_broken(graph, budget_bytes, events)
        if not cuts:
            continue
        with_cuts += 1
        best = least_time(graph, budget_bytes, keep_order=True)
        if answer.outcome is Outcome.INFEASIBLE or best is None:
            assert best is None, seed
            continue
        bound_ns = model.bound_ns(answer)
        plain = stage_model(with_end(graph), budget_bytes, events)
        plain_ns = plain.bound_ns(solved(plain))
        assert bound_ns is not None and plain_ns is not None
        assert plain_ns <= bound_ns <= best[0], seed
        raised += bound_ns > plain_ns
        trace = simulate(graph, with_frees(graph, fitting_walk(model, answer, graph, budget_bytes)))
        attained += trace.peak_bytes <= budget_bytes and trace.time_ns == best[0]
    assert with_cuts >= (50 if every else 20)
    assert raised >= with_cuts / 3
    assert not every or attained >= with_cuts / 2


def two_heavy_reruns() -> Graph:
    """a and b are made from x by ops that need much, and are read again when y has come and gone, which leaves room for x."""
    values = (Value("x", 2), Value("a", 3), Value("b", 3), Value("y", 10), Value("z", 1), Value("last", 1))
    ops = (
        Op("x", (), (0,), 1),
        Op("a", (0,), (1,), 1, workspace_bytes=4),
        Op("b", (0,), (2,), 1, workspace_bytes=6),
        Op("y", (), (3,), 1),
        Op("z", (3,), (4,), 1),
        Op("last", (1, 2, 4), (5,), 1),
    )
    return Graph("two", ops, values, frozenset(), frozenset({5}))


# With z there, b first: x 2 + b 3 + workspace 6 + z 1, then x 2 + b 3 + a 3 + workspace 4 + z 1 = 13. a first: 15 bytes.
LEAST_BYTES = 13


def test_a_peak_is_the_least_of_all_orders() -> None:
    graph = two_heavy_reruns()
    closed = with_end(graph)
    model = stage_model(closed, LEAST_BYTES, [4, 5])
    assert broken_cut(model, solved(model), 5, LEAST_BYTES) is None
    tight = stage_model(closed, LEAST_BYTES - 1, [4, 5])
    cut = broken_cut(tight, solved(tight), 5, LEAST_BYTES - 1)
    assert cut is not None and set(cut.runs) == {1, 2}
    peaks = []
    for order in itertools.permutations(cut.runs):
        left, most = 0, 0
        for v in order:
            made = graph.values[graph.ops[v].outputs[0]].size_bytes
            most = max(most, graph.values[0].size_bytes + left + made + graph.ops[v].workspace_bytes)
            left += made
        peaks.append(most)
    assert cut.peak_bytes == min(peaks) == LEAST_BYTES - 1  # z does not count, as it stays all the stage long


def test_a_cut_says_nothing_where_its_stage_has_no_beginning() -> None:
    """The events before it may go, where their rows are slack."""
    closed = with_end(two_heavy_reruns())
    model = stage_model(closed, LEAST_BYTES - 1, [4, 5])
    cut = broken_cut(model, solved(model), 5, LEAST_BYTES - 1)
    assert cut is not None
    with_cut = solved(stage_model(closed, LEAST_BYTES - 1, [5], [cut]))
    assert with_cut == solved(stage_model(closed, LEAST_BYTES - 1, [5]))
    with_cut = solved(stage_model(closed, LEAST_BYTES - 1, [5, 6], [cut]))
    assert with_cut.bound == solved(stage_model(closed, LEAST_BYTES - 1, [5, 6])).bound


def test_the_walk_takes_the_order_that_fits() -> None:
    graph = two_heavy_reruns()
    model = stage_model(with_end(graph), LEAST_BYTES, [4, 5])
    sequence = fitting_walk(model, solved(model), graph, LEAST_BYTES)
    assert sequence == [0, 1, 2, 3, 4, 2, 1, 5]
    assert simulate(graph, with_frees(graph, sequence)).peak_bytes == LEAST_BYTES


def test_walks_keep_what_only_an_effect_made() -> None:
    """Though a half solution keeps nothing at all."""
    read_again = 0
    for seed in range(50):
        graph = random_graph(seed, max_ops=9, effect=True)
        closed = with_end(graph)
        events = range(1, len(graph.ops))
        model = stage_model(closed, graph.resident_bytes + 1, events)
        sequence = walk(model, [frozenset()] * len(events))
        once = [v for v, op in enumerate(graph.ops) if op.effect]
        assert all(sequence.count(v) == 1 for v in once), seed
        read_again += any(len(graph.consumers[x]) > 1 for v in once for x in graph.ops[v].outputs)
    assert read_again >= 10


def test_a_large_overflow_asks_for_an_event_where_most_of_it_is_past() -> None:
    graph = chain(40)
    closed = with_end(graph)
    for budget_bytes, is_large in ((8, True), (30, False)):
        model = stage_model(closed, budget_bytes, [40])
        answer = solved(model)
        schedule = with_frees(graph, fitting_walk(model, answer, graph, budget_bytes))
        held_bytes, coming = simulate(graph, schedule).memory_bytes, next_first_runs(graph, schedule)
        assert (max(held_bytes) > 2 * budget_bytes) == is_large
        events, seconds, _ = missing(model, answer, graph, schedule, budget_bytes, [], 2)
        assert len(events) == 1 + is_large and seconds == events[1:]
        assert missing(model, answer, graph, schedule, budget_bytes, [], 1)[0] == events[:1]
        if is_large:
            worst = {w: max(h for h, u in zip(held_bytes, coming, strict=True) if u == w) - budget_bytes for w in set(coming)}
            untils = (events[1] - 1, events[1], len(graph.ops))
            past = [sum(max(0, e) for w, e in worst.items() if w <= until) for until in untils]
            assert past[0] < 2 / 3 * past[2] <= past[1]


@pytest.mark.parametrize("budget_bytes", [LEAST_BYTES, LEAST_BYTES - 1])
def test_overflows_ask_for_events_and_cuts_until_it_fits_or_cannot(budget_bytes: int) -> None:
    graph = two_heavy_reruns()
    closed = with_end(graph)
    events, cuts = [0], list[StageCut]()
    while True:
        model = stage_model(closed, budget_bytes, events, cuts)
        answer = solved(model)
        if answer.values is None:
            break
        schedule = with_frees(graph, fitting_walk(model, answer, graph, budget_bytes))
        more_events, _, more_cuts = missing(model, answer, graph, schedule, budget_bytes, cuts, 2)
        if not more_events and not more_cuts:
            break
        events = sorted((*events, *more_events))
        cuts += more_cuts
    if budget_bytes == LEAST_BYTES:
        assert answer.values is not None and simulate(graph, schedule).peak_bytes == budget_bytes
    else:
        assert answer.outcome is Outcome.INFEASIBLE and cuts
        assert least_time(graph, budget_bytes, keep_order=True) is None


def test_of_many_reruns_those_that_take_most_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_cuts, "MOST_RUNS", 2)
    graph = two_heavy_reruns()
    model = stage_model(with_end(graph), LEAST_BYTES - 1, [4, 5])
    cut = broken_cut(model, solved(model), 5, LEAST_BYTES - 1)
    assert cut is not None and cut.runs == (1, 2)
