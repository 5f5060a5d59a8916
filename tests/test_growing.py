"""The engine that is told of ops as they come decides as the one that is told of all beforehand."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from online import heuristics
from online.engines.engine import Engine, Option, OutOfMemory
from online.engines.growing import GrowingEngine
from online.heuristics import HEURISTICS


@pytest.mark.parametrize("heuristic", ["dtr", "dtr_eq", "lru", "demand"])
@pytest.mark.parametrize("extra", ["", "reclaim", "counted"])
@pytest.mark.parametrize("compiled", [False, True])
@given(seed=st.integers(0, 2**32))
@example(seed=8)  # in this one and the next two an op waits and holds nothing but what never goes
@example(seed=22)
@example(seed=108)
@settings(max_examples=30)
def test_it_decides_as_the_engine_does(heuristic: str, extra: str, compiled: bool, seed: int) -> None:
    with patch.object(heuristics, "WORTH_LOADING", -1 if compiled else 1 << 62):
        decides_as_the_engine_does(heuristic, extra, seed)


def decides_as_the_engine_does(heuristic: str, extra: str, seed: int) -> None:
    draw = random.Random(seed)
    budget_bytes = draw.randint(6, 60)
    reclaim, options = extra == "reclaim", [Option.COUNTED] if extra == "counted" else []
    plain = Engine(budget_bytes, HEURISTICS[heuristic], reclaim=reclaim, options=[Option.YIELD, *options])
    plain._lazy = False
    plain.pool._written_only = True
    grown = GrowingEngine(budget_bytes, HEURISTICS[heuristic], thrash_limit=float("inf"), reclaim=reclaim, options=options)
    held = plain.add_storage(3, pinned=True)
    plain.preload(held)
    assert grown.holds(3) == held
    tensors: list[int] = []  # of the plain engine, by storage
    alive: list[int] = []
    at_once = 0
    for op in range(40):
        reads = draw.choices(alive, k=draw.randint(0, 2)) if alive else []
        sizes = tuple(draw.randint(0, 4) for _ in range(draw.choice([1, 1, 1, 2])))
        time_ns, workspace_bytes = draw.randint(0, 5), draw.choice([0, 0, 2])
        makes = [plain.add_storage(size) for size in sizes]
        assert plain.add_op([tensors[s - 1] for s in reads], makes, time_ns, workspace_bytes)[0] == op
        tensors += [len(tensors) + at for at in range(len(sizes))]
        numbers = (held, *reads)  # what is held is read, too, and nothing depends on it
        try:
            plain.call(op)
        except OutOfMemory as error:
            with pytest.raises(OutOfMemory) as caught:
                grown.call(grown.declare(numbers, sizes, workspace_bytes, time_ns))
            assert (caught.value.op, caught.value.asked_bytes) == (error.op, error.asked_bytes)
            return
        if grown.fits(numbers, sum(sizes) + workspace_bytes):
            at_once += 1
            assert grown.ran(numbers, sizes, workspace_bytes, time_ns) == op
        else:
            assert grown.declare(numbers, sizes, workspace_bytes, time_ns) == op
            grown.call(op)
        assert grown.outputs(op) == tuple(makes) and grown.inputs(op) == numbers and grown.cost(op) == (time_ns, workspace_bytes)
        alive += makes
        for s in [s for s in alive if draw.random() < 0.2]:
            alive.remove(s)
            plain.drop(s)
            grown.drop(s)
        assert grown.steps == plain.steps
        assert (grown.used_bytes, grown.peak_bytes, grown.clock) == (plain.used_bytes, plain.peak_bytes, plain.clock)
        assert replace(grown.counters, search_s=0.0) == replace(plain.counters, search_s=0.0)
    assert at_once


def test_recomputation_is_limited_by_what_first_runs_took() -> None:
    engine = GrowingEngine(2, HEURISTICS["lru"], thrash_limit=3.0)
    first = engine.ran((), (1,), 0, 5)
    assert first == 0 and engine.outputs(first) == (0,)
    engine.call(engine.declare((0,), (1,), 0, 5))
    engine.call(engine.declare((1,), (1,), 0, 5))  # 0 goes
    assert not engine.resident[0]
    engine.bring(0)
    assert engine.limit_ns == 2 * 15 and engine.resident[0]
    engine.lift()
    engine.bring(1)
    assert engine.limit_ns == engine.budget_bytes == float("inf")


def test_what_is_held_and_kept_stays_so_where_an_op_fails() -> None:
    engine = GrowingEngine(4, HEURISTICS["demand"], thrash_limit=10.0)
    for _ in range(4):
        engine.ran((), (1,), 0, 5)
    engine.hold(0)
    engine.keep_until_dropped(1)
    engine.call(engine.declare((2,), (1,), 0, 5))  # 3 goes
    with pytest.raises(OutOfMemory):
        engine.call(engine.declare((2, 3, 4), (3,), 0, 5))
    engine.give_up()
    assert not engine._planned and not any(engine._pending)
    assert [s for s in range(engine.ops) if engine._locks[s]] == [0, 1]
    engine.call(engine.declare((), (2,), 0, 5))  # all goes that is neither held nor kept
    assert [s for s in range(5) if engine.resident[s]] == [0, 1]
    engine.let_go(0)
    engine.drop(1)
    engine.call(engine.declare((), (2,), 0, 5))
    assert not engine.resident[0] and not engine.resident[1]
