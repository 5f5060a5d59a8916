"""Rows on spans: the relaxation with those that its solutions break is the one with all of them; they hold for whole numbers."""

from __future__ import annotations

from random import Random

import pytest

from graphs.ir import Graph
from graphs.synthetic import random_training
from planner import spans
from planner.milp import Outcome
from planner.schedule import keep_all
from planner.simulate import simulate
from planner.spans import SpanRow, relax
from planner.stage_model import StageModel, stage_model, with_end


def tight_model(seed: int, events: int) -> StageModel:
    graph: Graph = random_training(8, seed)
    draw = Random(seed)
    budget_bytes = int(draw.uniform(0.5, 0.8) * simulate(graph, keep_all(graph)).peak_bytes)
    return stage_model(with_end(graph), budget_bytes, sorted(draw.sample(range(len(graph.ops)), events)))


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


def test_rows_hold_for_whole_numbers_and_for_other_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "FEW_VARIABLES", -1)
    carried = 0
    for seed in range(12):
        rows: list[SpanRow] = relax(tight_model(seed, 5), time_limit_s=20.0)[1]
        for events in (5, 6):
            plain, given = tight_model(seed, events), tight_model(seed, events)
            before = len(given.milp.row_lower)
            spans._Spans(given).add(rows)
            carried += events > 5 and len(given.milp.row_lower) > before
            one, other = (model.milp.minimise(time_limit_s=20.0) for model in (plain, given))
            assert one.outcome is other.outcome
            if one.outcome is Outcome.SOLVED:
                assert other.cost == pytest.approx(one.cost)
    assert carried > 0
