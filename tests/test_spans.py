"""Rows on spans: the relaxation with those that its solutions break is the one with all of them; they hold for whole numbers."""

from __future__ import annotations

from random import Random

import pytest

from graphs.ir import Graph
from graphs.synthetic import random_training
from planner.schedule import keep_all
from planner.simulate import simulate
from planner.solvers.milp import Outcome
from planner.stages import spans
from planner.stages.model import Event, StageModel, stage_model, with_end
from planner.stages.spans import SpanRow, relax


def tight_model(seed: int, events: int, reruns: int = 0) -> StageModel:
    """With so many re-runs, one put before the other, between two more first executions."""
    graph: Graph = random_training(8, seed)
    draw = Random(seed)
    budget_bytes = int(draw.uniform(0.5, 0.8) * simulate(graph, keep_all(graph)).peak_bytes)
    chosen = {Event(t) for t in draw.sample(range(len(graph.ops)), events)}
    if reruns:
        w = draw.randrange(len(graph.ops) // 2, len(graph.ops))
        chosen |= {Event(w - 1), Event(w)}
        chosen |= {Event(w - 0.5**k, draw.randrange(w), w) for k in range(1, reruns + 1)}
    return stage_model(with_end(graph), budget_bytes, sorted(chosen))


def test_rows_that_solutions_break_give_the_relaxation_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stronger = 0
    for seed in range(40):
        everything, _ = relax(tight_model(seed, 5), time_limit_s=20.0)
        model = tight_model(seed, 5)
        bare = model.milp.relax(time_limit_s=20.0)
        with monkeypatch.context() as patched:
            patched.setattr(spans, "FEW_VARIABLES", -1)
            patched.setattr(spans, "PATIENCE", 1_000)
            found, binding = relax(model, time_limit_s=20.0)
        assert found.outcome is everything.outcome
        if found.outcome is Outcome.SOLVED:
            assert found.cost == pytest.approx(everything.cost, rel=2 * spans.BROKEN, abs=1e-3)
            assert found.bound <= everything.cost + 1e-6 * abs(everything.cost) + 1e-6
            stronger += found.cost > bare.cost * (1 + 1e-6)
            assert not model.spans and (not binding or found.cost >= bare.cost)
    assert stronger >= 5


@pytest.mark.parametrize("reruns", [0, 3])
def test_rows_hold_for_whole_numbers_and_for_other_events(reruns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "FEW_VARIABLES", -1)
    carried = named = 0
    for seed in range(12):
        if len(tight_model(seed, 6, reruns).milp.cost) > 300:
            continue  # seconds each
        rows: list[SpanRow] = relax(tight_model(seed, 5, reruns), time_limit_s=20.0)[1]
        named += any(event.is_rerun for row in rows for event in (row.start, *(e for run in row.runs for e in run[1:])))
        for events, more in ((5, reruns), (5, reruns + 1), (6, reruns)):
            plain, given = tight_model(seed, events, more), tight_model(seed, events, more)
            before = len(given.milp.row_lower)
            spans.Spans(given).add(rows)
            carried += (events, more) != (5, reruns) and len(given.milp.row_lower) > before
            one, other = (model.milp.minimise(time_limit_s=20.0) for model in (plain, given))
            assert one.outcome is other.outcome
            if one.outcome is Outcome.SOLVED:
                assert other.cost == pytest.approx(one.cost)
    assert carried > 0
    assert named > 0 or not reruns


def test_all_paths_hold_whatever_ops_cost() -> None:
    """Paths that are short at random; re-runs that are paid for make solutions use events that they would avoid."""
    used = 0
    for seed in range(50):
        plain, given = tight_model(seed, 4, 3), tight_model(seed, 4, 3)
        if len(plain.milp.cost) > 245:
            continue  # seconds each
        draw = Random(seed)
        for x, cost in enumerate(plain.milp.cost):
            if cost > 0:
                paid = x in plain.happens and draw.random() < 0.7
                plain.milp.cost[x] = given.milp.cost[x] = -draw.random() if paid else draw.random()
        rows = spans.Spans(given)
        for _ in range(10):
            rows.add(rows.broken([draw.choice((0.0, 0.2, 1.0)) * draw.random() for _ in given.milp.cost]))
        one, other = (model.milp.minimise(time_limit_s=20.0) for model in (plain, given))
        assert one.outcome is other.outcome
        if one.values is not None:
            assert other.cost == pytest.approx(one.cost, abs=1e-6), seed
            used += sum(plain.happening(one.values)) > sum(not event.is_rerun for event in plain.events)
    assert used >= 10
