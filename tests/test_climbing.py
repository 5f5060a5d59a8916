"""Relaxations beside the search for schedules: their bounds hold, what is told repeats, and they can be left."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from graphs.ir import Graph
from graphs.synthetic import chain, random_training
from planner.methods import cutting_stages
from planner.methods.cutting_stages import solve
from planner.schedule import keep_all
from planner.simulate import simulate
from planner.solvers.milp import Answer, Left, Outcome
from planner.stages import climbing, mending
from planner.stages.climbing import Climb, Reached
from planner.stages.events import halfway, tightest
from planner.stages.model import Event, Walk, stage_model, walk, with_end
from planner.stages.search import StageSearch
from planner.stages.spans import relax
from tests.oracles import least_time
from tests.strategies import budget_range, random_graph

DEEP = chain(32), 6  # at which the best schedule is far from any bound
SMALL = chain(20), 5  # which takes a tenth of the time; A* would close it


@pytest.fixture(autouse=True)
def of_graphs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "SMALL_OPS", 0)


@pytest.fixture
def of_small_ones_far_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they take part in the search for that graph, between short annealings."""
    monkeypatch.setattr(cutting_stages, "FEW_LOOKS", 0)
    monkeypatch.setattr("planner.stages.search.FAR_AWAY", 0.001)
    monkeypatch.setattr(mending, "MOVES", 50_000)


def climb_of(graph: Graph, budget_bytes: int, time_limit_s: float = 60.0) -> Climb:
    search = StageSearch(graph, budget_bytes, 0.0, time_limit_s, None, seed=0)
    return Climb(search=search, closed_graph=with_end(graph), events=[tightest(graph)])


def all_of(climb: Climb) -> list[Reached]:
    """What all relaxations come to."""

    def others() -> None:
        while not climb.is_over(math.inf):
            time.sleep(0.01)
        climb.by(climb.reached[-1].work)

    climb.beside(others)
    return climb.reached


def test_it_proves_no_more_than_there_is() -> None:
    rose = 0
    for seed in range(150):
        graph = random_graph(seed)
        low, high = budget_range(graph, keep_order=True)
        budget_bytes = (2 * low + high) // 3
        found = least_time(graph, budget_bytes, keep_order=True)
        assert found is not None
        least_ns = found[0]
        reached = all_of(climb_of(graph, budget_bytes))
        bounds = [at.bound_ns for at in reached]
        assert bounds == sorted(bounds) and bounds[-1] <= least_ns
        rose += bounds[-1] > graph.keep_all_time_ns
    assert rose >= 20


def test_it_comes_to_more_than_one_event_does() -> None:
    climb = climb_of(*SMALL)
    reached = all_of(climb)
    assert reached[-1].bound_ns >= 63 > reached[1].bound_ns
    assert climb.search.bound_ns == reached[-1].bound_ns
    assert all(len(later.events) > len(sooner.events) for sooner, later in pairwise(reached[:6]))


def test_what_it_is_told_repeats_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (6_000.0, 12_000.0, 20_000.0)

    def told(delay_s: float) -> list[Reached]:
        climb, found = climb_of(*SMALL), list[Reached]()

        def others() -> None:
            for work in counts:
                found.append(climb.by(work))
                time.sleep(delay_s)

        found.append(climb.beside(others))
        return found

    sooner = told(0.0)
    assert len({at.bound_ns for at in sooner}) >= 2 and all(at.work <= work for at, work in zip(sooner, counts, strict=False))
    assert sooner[-1] == sooner[-2]  # not what it has come to since
    assert told(0.3) == sooner
    whole = climbing.relax

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return whole(*arguments, **options)

    monkeypatch.setattr(climbing, "relax", slow)
    assert told(0.0) == sooner


@pytest.mark.usefixtures("of_small_ones_far_or_not")
def test_plans_repeat_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, delays = climbing.relax, [0.0, 0.2]

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(delays[0])
        return whole(*arguments, **options)

    monkeypatch.setattr(climbing, "relax", slow)
    plans = []
    while delays:
        plans.append(solve(*SMALL, gap=0.1, time_limit_s=60))
        delays.pop(0)
    first, second = plans
    assert first.notes["relaxations"] >= 5 and "stopped" not in first.notes and "cut_short" not in first.notes
    assert first.schedule == second.schedule and first.bound_ns == second.bound_ns


def test_the_clock_ends_it_and_its_last_bound_counts() -> None:
    climb = climb_of(*DEEP, time_limit_s=1.5)
    began = time.perf_counter()

    def others() -> None:
        climb.by(1.0)
        while not climb.search.done():
            time.sleep(0.01)

    reached = climb.beside(others)
    assert time.perf_counter() - began < 2.5
    assert reached == climb.reached[-1] and climb.search.bound_ns == reached.bound_ns > climb.reached[1].bound_ns


def test_ctrl_c_keeps_what_is_proved() -> None:
    climb = climb_of(*SMALL)

    def others() -> None:
        climb.by(15_000.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        climb.beside(others)
    assert climb.search.bound_ns >= climb.reached[climb._solved(15_000.0)].bound_ns > climb.reached[1].bound_ns


def test_what_goes_wrong_on_its_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(climbing, "relax", broken)
    climb = climb_of(*DEEP)
    with pytest.raises(ZeroDivisionError):
        climb.beside(lambda: climb.by(1e9) and None)


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_nothing_comes_of_takes_its_time_all_the_same(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has failed already when that is asked, or has not yet."""
    whole, calls = climbing.relax, list[int]()

    def broken(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) < 4:
            return whole(*arguments, **options)
        time.sleep(0.0 if fails else 0.5)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf), []

    monkeypatch.setattr(climbing, "relax", broken)
    climb, over = climb_of(*DEEP), list[bool]()

    def others() -> None:
        for work in (10_000.0, 12_000.0, 14_000.0):
            climb.by(work)
            time.sleep(0.2 if fails else 0.0)
            over.append(climb.is_over(work))

    reached = climb.beside(others)
    assert over == [False, False, True] and reached.bound_ns == climb.reached[3].bound_ns


def test_no_relaxation_is_begun_that_does_not_fit_the_time() -> None:
    climb = climb_of(*DEEP)
    climb._s_per_work = 1.0
    reached = all_of(climb)
    assert len(reached) == 1 and reached[0].is_last and "cut_short" in climb.search.notes


def test_near_the_end_there_are_fewer_events(monkeypatch: pytest.MonkeyPatch) -> None:
    climb = climb_of(*DEEP)
    asked = list[float]()

    def has_time(_: Climb, work: float, times: float) -> bool:
        asked.append(times)
        return times <= 1.5

    monkeypatch.setattr(Climb, "_has_time", has_time)
    reached = all_of(climb)
    assert max(asked) > 1.5
    assert all(len(later.events) <= 1.5 * len(sooner.events) for sooner, later in pairwise(reached))


def test_it_is_for_large_training_steps_far_from_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = DEEP
    climb = climb_of(graph, budget_bytes)
    assert climb.is_wanted  # no schedule so far
    climb.search.time_ns, climb.search.best = graph.keep_all_time_ns + 1, keep_all(graph)
    assert not climb.is_wanted
    climb.search.time_ns = 2 * graph.keep_all_time_ns
    assert climb.is_wanted
    monkeypatch.setattr(climbing, "SMALL_OPS", len(graph.ops))
    assert not climb.is_wanted
    monkeypatch.setattr(climbing, "SMALL_OPS", len(graph.ops) - 1)
    assert climb.is_wanted
    climb.search.nested = True
    assert not climb.is_wanted


@pytest.mark.usefixtures("of_small_ones_far_or_not")
def test_the_search_goes_on_from_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, reached = list[tuple[Event, ...]](), list[Reached]()
    whole, beside = cutting_stages.solve_relaxed, Climb.beside

    def noted(search: Any, model: Any, *arguments: Any) -> Any:
        solved.append(model.events)
        whole(search, model, *arguments)
        raise KeyboardInterrupt  # that is all to be seen

    def climbed(climb: Climb, others: Any) -> Reached:
        reached.append(beside(climb, others))
        return reached[-1]

    monkeypatch.setattr(cutting_stages, "solve_relaxed", noted)
    monkeypatch.setattr(Climb, "beside", climbed)
    plan = solve(*SMALL, gap=0.0, time_limit_s=60)
    assert len(reached) == 1 and len(reached[0].events) > 8
    assert solved[0] == tuple(reached[0].events)
    assert plan.time_ns == 70 and plan.bound_ns >= 63


def test_a_solve_that_is_left_ends() -> None:
    """One of minutes, which looks at nothing else."""
    graph = random_training(120, 0)
    budget_bytes = int(0.5 * simulate(graph, keep_all(graph)).peak_bytes)
    events = [Event(t) for t in range(120, len(graph.ops), 4)]
    left, answers = Left(), []

    def solving() -> None:
        model = stage_model(with_end(graph), budget_bytes, events)
        answers.append(relax(model, time_limit_s=600.0, left=left)[0])

    thread = threading.Thread(target=solving)
    thread.start()
    time.sleep(2.0)
    assert thread.is_alive()
    left.set()
    thread.join(5.0)
    assert not thread.is_alive() and len(answers) == 1


def test_a_solve_that_has_been_left_comes_to_nothing() -> None:
    graph, budget_bytes = DEEP
    left = Left()
    left.set()
    model = stage_model(with_end(graph), budget_bytes, [Event(36), Event(40), Event(48)])
    answer, _ = relax(model, time_limit_s=10.0, left=left)
    assert answer.outcome is Outcome.STOPPED and answer.values is None


def overflowing(budget_bytes: int) -> tuple[Graph, Walk, Any]:
    graph = chain(20)
    model = stage_model(with_end(graph), budget_bytes, [tightest(graph)])
    answer, _ = relax(model, time_limit_s=10.0)
    assert answer.values is not None
    return graph, walk(model, answer.values), model


def test_the_event_is_near_the_middle_of_what_overflows() -> None:
    graph, found, model = overflowing(5)
    (event,) = halfway(model, graph, found, 5, 4)
    held = simulate(graph, cutting_stages.with_frees(graph, found.runs)).memory_bytes
    assert max(held) > 5
    middle = (model.events[0].at + len(graph.ops)) / 2
    assert abs(event.at - middle) <= len(graph.ops) / 4 and event not in model.events


def test_where_it_is_tightest_is_where_much_has_to_be() -> None:
    """Of the ops near the middle, the one with a workspace."""
    graph, found, model = overflowing(5)
    (plain,) = halfway(model, graph, found, 5, 4)
    other = plain.done + 2
    ops = tuple(replace(op, workspace_bytes=9) if v == other else op for v, op in enumerate(graph.ops))
    wide = replace(graph, ops=ops)
    model = stage_model(with_end(wide), 15, [tightest(graph)])
    assert halfway(model, wide, found, 5, 4) == [Event(other)]


def test_no_more_events_than_asked_for() -> None:
    graph = chain(24)
    model = stage_model(with_end(graph), 5, [Event(26), Event(32), Event(40)])
    answer, _ = relax(model, time_limit_s=10.0)
    assert answer.values is not None
    found = walk(model, answer.values)
    several = halfway(model, graph, found, 5, 9)
    assert len(several) >= 2 and halfway(model, graph, found, 5, 1) == several[:1]
    assert not halfway(model, graph, found, 1_000, 9)
