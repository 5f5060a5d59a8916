"""Searches backwards from the end: what no schedule goes below, and schedules where next to nothing fits."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from graphs.ir import Graph, Op, Value
from graphs.synthetic import Layered, chain, random_layered, random_training
from planner import min_budget
from planner.bounds import least_bytes
from planner.least import pebbling, smallest
from planner.least.last_runs import last_runs_peak
from planner.least.pebbling import fitting, least_peak, reads_peak
from planner.least.pebbling_sets import again_bytes, last_makers, sets_of, shrink, together_bytes
from planner.least.smallest import smaller_and_smaller, smallest_known
from planner.methods import cutting_stages
from planner.methods.cutting_stages import solve
from planner.result import Status
from planner.schedule import Schedule, computes, keep_all, with_frees
from planner.simulate import simulate
from planner.stages import first_schedules, mending, order_search
from planner.stages.search import StageSearch
from planner.walks.walk_search import WalkSearch
from tests.models import graph_of
from tests.oracles import least_budget
from tests.strategies import random_graph


def _cheapest(graph: Graph, budget_bytes: int, *, time_limit_s: float = 10.0) -> Schedule | None:
    found = fitting(graph, budget_bytes, time_limit_s=time_limit_s)
    return min(found, key=lambda schedule: simulate(graph, schedule).time_ns, default=None)


def test_no_schedule_in_any_order_beats_the_proved_peak() -> None:
    attained = better = 0
    for seed in range(150):
        graph = random_graph(seed)
        least = least_budget(graph, keep_order=False)
        proved, schedule = least_peak(graph)
        assert least_bytes(graph) <= proved <= least, seed
        better += proved > least_bytes(graph)
        if schedule is not None:
            assert simulate(graph, schedule).peak_bytes == proved == least, seed
            attained += 1
    assert attained >= 140
    assert better >= 10


def test_no_set_is_there_at_once_in_fewer_bytes_than_are_proved_for_it() -> None:
    higher = 0
    for seed in range(150):
        graph = random_graph(seed)
        made = np.array([producer >= 0 for producer in graph.producer])
        for others in range(3):
            some = made & (np.random.default_rng((seed, others)).random(made.size) < 0.3)
            wanted = replace(graph, outputs=frozenset(np.flatnonzero(some).tolist()))
            proved = graph.resident_bytes + together_bytes(sets_of(wanted), some)
            assert proved <= least_budget(wanted, keep_order=False), (seed, others)
            higher += proved > least_bytes(wanted)
    assert higher >= 20


def test_what_needs_most_beside_what_stays_is_seen_at_once() -> None:
    """Of two sums of gradients, one is there while the other is added to, however often all else runs."""
    values, ops, sums = [Value("g", 1)], [Op("g0", (), (0,), 1)], [-1, -1]
    for step in range(20):
        gradient = len(values) - 1 if step else 0
        for which in range(2):
            values += [Value(f"part{which}", 4), Value(f"sum{which}", 4)]
            part = len(values) - 2
            ops.append(Op(f"part{which} {step}", (gradient,), (part,), 1))
            ops.append(Op(f"sum{which} {step}", (part, *(() if sums[which] < 0 else (sums[which],))), (part + 1,), 1))
            sums[which] = part + 1
        values.append(Value("g", 1))
        ops.append(Op(f"g{step + 1}", (gradient,), (len(values) - 1,), 1))
    graph = Graph("two sums", tuple(ops), tuple(values), frozenset(), frozenset(sums))
    assert least_bytes(graph) == 12
    for states in (2, 200):
        proved, _ = least_peak(graph, states=states)
        assert 16 <= proved <= simulate(graph, keep_all(graph)).peak_bytes


def test_draws_and_effects_keep_their_order() -> None:
    attained = 0
    for seed in range(100):
        graph = random_graph(seed, random=True, effect=True)
        least = least_budget(graph, keep_order=False)
        proved, schedule = least_peak(graph)
        assert proved <= least, seed
        for found in (schedule, _cheapest(graph, least)):
            if found is not None:
                assert simulate(graph, found).peak_bytes <= least, seed  # which checks the order, too
                attained += 1
    assert attained >= 120


def test_a_search_that_stops_early_still_proves_something() -> None:
    graph = random_training(12, seed=1)
    full, _ = least_peak(graph)
    bounds = [least_peak(graph, states=states)[0] for states in (2, 10, 100, 1000)]
    assert bounds == sorted(bounds)
    assert least_bytes(graph) <= bounds[0] and bounds[-1] <= full


def test_schedules_fit_at_the_least_budget_and_none_below() -> None:
    found = 0
    for seed in range(150):
        graph = random_graph(seed)
        least = least_budget(graph, keep_order=False)
        assert _cheapest(graph, least - 1) is None, seed
        schedule = _cheapest(graph, least)
        if schedule is not None:
            assert simulate(graph, schedule).peak_bytes <= least, seed
            found += 1
    assert found >= 140


def test_more_room_makes_a_chain_cheaper() -> None:
    graph = chain(60)
    times = []
    for budget_bytes in (3, 5, 9, 17, 33, 121):
        schedule = _cheapest(graph, budget_bytes)
        assert schedule is not None
        assert simulate(graph, schedule).peak_bytes <= budget_bytes
        times.append(simulate(graph, schedule).time_ns)
    assert times == sorted(times, reverse=True)
    assert times[0] > 10 * graph.keep_all_time_ns  # all of the chain again for each of its layers
    assert times[2] < times[0] / 3
    assert times[-1] == graph.keep_all_time_ns


def test_what_no_output_needs_runs_too() -> None:
    """The side branch of two large values fits only when nothing else is there."""
    values = (*(Value(f"x{i}", 3) for i in range(4)), Value("a", 5), Value("b", 5))
    ops = (
        Op("x0", (), (0,), 1),
        Op("a", (), (4,), 1),
        Op("x1", (0,), (1,), 1),
        Op("b", (4,), (5,), 1),
        Op("x2", (1,), (2,), 1),
        Op("x3", (2, 0), (3,), 1),
    )
    graph = Graph("side branch", ops, values, frozenset(), frozenset({3}))
    assert least_budget(graph, keep_order=False) == 10
    schedule = _cheapest(graph, 10)
    assert schedule is not None
    assert simulate(graph, schedule).peak_bytes == 10


@pytest.mark.parametrize("outputs", ["none", "the last"])
def test_side_branches_that_nobody_reads_cost_little(outputs: str) -> None:
    values = tuple(Value(f"{name}{i}", 1) for i in range(100) for name in "xy")
    ops = tuple(
        Op(f"{name}{i}", inputs, (2 * i + k,), 1)
        for i in range(100)
        for k, (name, inputs) in enumerate((("x", (2 * i - 2,) if i else ()), ("y", (2 * i,))))
    )
    graph = Graph("ladder", ops, values, frozenset(), frozenset() if outputs == "none" else frozenset({0, 198}))
    least, schedule = least_peak(graph)
    assert schedule is not None
    assert simulate(graph, schedule).peak_bytes == least == 2
    assert simulate(graph, schedule).time_ns <= 2 * graph.keep_all_time_ns


def test_interrupting_loses_nothing_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = pebbling._Backwards.run, 0

    def second_interrupted(search: pebbling._Backwards, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return run(search, *args, **options)

    graph = random_training(40, seed=0)
    works_bytes, schedule = smallest_known(graph, time_limit_s=5)
    proved_bytes, _ = least_peak(graph)
    monkeypatch.setattr(pebbling._Backwards, "run", second_interrupted)
    least = min_budget(graph)
    assert least.interrupted and least_bytes(graph) < least.proved_bytes <= proved_bytes

    def interrupted(graph: Graph, budget_bytes: int, **_: float) -> Iterator[Schedule]:
        yield schedule
        raise KeyboardInterrupt

    monkeypatch.setattr(pebbling._Backwards, "run", run)
    monkeypatch.setattr(first_schedules, "fitting", interrupted)
    monkeypatch.setattr(StageSearch, "pass_again", lambda _: None)  # finds some, too, as do
    monkeypatch.setattr(cutting_stages, "in_passes", lambda *_, **__: iter(()))
    plan = solve(graph, works_bytes, time_limit_s=20)
    assert plan.status is Status.FEASIBLE
    assert (plan.notes["stopped"], plan.notes["found_by"]) == ("interrupted", "pebbling")


def test_plans_where_the_graph_order_is_proved_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws and effects leave annealing no way to another order, and list walks none in this one."""
    monkeypatch.setattr(cutting_stages, "anneal_on", partial(order_search.anneal_on, moves=100_000))
    monkeypatch.setattr(order_search, "MOVES", 100_000)
    for seed, budget_bytes, status in ((5047, 20, Status.FEASIBLE), (5038, 34, Status.INFEASIBLE)):
        graph = random_graph(seed, max_ops=6, random=True, effect=True)
        plan = solve(graph, budget_bytes)
        assert plan.status in (status, Status.OPTIMAL if status is Status.FEASIBLE else status)


def test_what_is_said_to_take_so_much_does() -> None:
    """Of random sets: making a value again from what is there, by hand and compiled."""
    rng = np.random.default_rng(0)
    checked = 0
    for seed in range(60):
        graph = random_training(8, seed=seed)
        sets = sets_of(graph)
        present = rng.random(len(graph.values)) < 0.4
        present[list(graph.resident)] = False  # always there, and never a member
        for x in np.flatnonzero(~present).tolist():
            if graph.producer[x] < 0:
                continue
            peak = again_bytes(sets, present, np.array([x]), 1 << 40, False)
            assert again_bytes(sets, present, np.array([x]), int(peak) - 1, True) == -1
            assert again_bytes(sets, present, np.array([x]), int(peak) - 1, False) == -1
            assert again_bytes(sets, present, np.array([x]), int(peak), True) == peak
            again = sorted(sets.ops[: sets.counted[0]].tolist())
            wanted = {v: i for i, v in enumerate(again)}
            here = frozenset(np.flatnonzero(present).tolist()) | graph.resident
            made = {y for v in again for y in graph.ops[v].outputs}
            new = [y in made and not present[y] for y in range(len(graph.values))]  # not: made again, but there already
            sizes = tuple(Value(v.name, v.size_bytes if new[y] else 0) for y, v in enumerate(graph.values))
            reads = {v: tuple(y for y in graph.ops[v].inputs if y not in here) for v in again}
            part = Graph(
                "part",
                tuple(Op(graph.ops[v].name, reads[v], graph.ops[v].outputs, 1, graph.ops[v].workspace_bytes) for v in wanted),
                sizes,
                frozenset(range(len(sizes))) - made,
                frozenset({x}),
            )
            assert simulate(part, with_frees(part, range(len(again)))).peak_bytes == peak, (seed, x)
            checked += 1
    assert checked > 300


def test_wherever_the_clock_stops_it_what_it_has_proved_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pebbling, "CHUNK", 1)
    stopped = attained = 0
    for seed in range(20):
        graph = random_graph(seed)
        least = least_budget(graph, keep_order=False)
        for looks in range(1, 60, 3):
            monkeypatch.setattr(pebbling, "now_s", itertools.count().__next__)
            proved, schedule = least_peak(graph, time_limit_s=looks)
            assert proved <= least
            assert schedule is None or simulate(graph, schedule).peak_bytes == proved
            stopped += schedule is None
            attained += schedule is not None
    assert stopped > 50 and attained > 50


def test_long_sequences_are_left_and_all_but_short_ones_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(20, seed=1)
    budget_bytes = int(1.05 * smallest_known(graph, time_limit_s=3)[0])
    search = pebbling._Backwards(graph)
    _, path = search.run(budget_bytes, 2000, math.inf, latest=True, only_latest=True, most_bytes=budget_bytes, stays=search.early)
    assert path is not None
    schedule = search.schedule(path, budget_bytes, math.inf)
    assert schedule is not None and len(list(computes(schedule))) > 2 * len(graph.ops)
    assert search.schedule(path, budget_bytes, 0.0) is None
    monkeypatch.setattr(pebbling, "LONGEST", 0)
    assert search.schedule(path, budget_bytes, math.inf) is None


@pytest.mark.parametrize("work", [1, 1000])
def test_sets_shrink_to_what_cannot_be_made_again_within_the_room(work: int) -> None:
    graph = chain(10)
    sets = sets_of(graph)

    def shrunk(members: set[int], most_bytes: int, stays: Sequence[int] = ()) -> set[int]:
        present = np.zeros(len(graph.values), np.bool_)
        present[list(members)] = True
        staying = np.zeros(len(graph.values), np.bool_)
        staying[list(stays)] = True
        sets.shrinking[:] = sets.outputs.size, 0, 0, len(members)
        pieces = 0
        while not shrink(sets, present, most_bytes, staying, work):
            pieces += 1
        assert pieces > 2 or work > 1
        _, dropped, _, held_bytes = sets.shrinking
        left = set(np.flatnonzero(present).tolist())
        assert held_bytes == len(left)
        assert left | set(sets.dropped[:dropped].tolist()) == members
        return left

    assert shrunk({3}, 2) == set()
    assert shrunk({3}, 1) == {3}  # its input and it take two bytes together
    assert shrunk({2, 3}, 2) == set()  # the second from the first, then that
    assert shrunk({1, 3}, 2) == {1, 3}
    assert shrunk({1, 3}, 3) == set()
    assert shrunk({3}, 2, stays=[3]) == {3}


def test_what_may_have_been_made_last() -> None:
    graph = chain(10)
    sets = sets_of(graph)
    present = np.zeros(len(graph.values), np.bool_)
    present[[3, 6]] = True
    assert last_makers(sets, present, 2) == 2
    assert sets.ops[:2].tolist() == [3, 6]
    assert sets.needs[:2].tolist() == [3, 3]
    assert sets.adds[:2].tolist() == [0, 0]
    present[5] = True
    assert last_makers(sets, present, 3) == 3
    assert sets.needs[:3].tolist() == [4, 4, 3]
    assert sets.adds[:3].tolist() == [0, 0, -1]


def test_a_time_limit_ends_a_search() -> None:
    graph = random_layered(Layered(2000, 0.3), seed=1)
    _cheapest(chain(3), 3)  # loads what is compiled
    began = time.process_time()
    assert _cheapest(graph, least_bytes(graph), time_limit_s=0.2) is None
    least_peak(graph, time_limit_s=0.2)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_found_where_list_walks_find_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "MOVES", 100_000)  # what is found need not be cheap
    graph = random_training(30, seed=seed)
    works_bytes, schedule = smallest_known(graph, time_limit_s=5)
    assert simulate(graph, schedule).peak_bytes == works_bytes
    walks = WalkSearch(graph, works_bytes, 0)
    walks.start()
    assert walks.runs is None
    limits_s = (3, 20)  # the second for a busy machine
    assert any(
        solve(graph, works_bytes, time_limit_s=limit_s).status in (Status.FEASIBLE, Status.OPTIMAL) for limit_s in limits_s
    )


@pytest.mark.parametrize("many_ops", [smallest.MANY_OPS, 0])
def test_smaller_and_smaller_peaks(many_ops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallest, "MANY_OPS", many_ops)
    graph = random_training(40, seed=0)
    found = list(smaller_and_smaller(graph, time_limit_s=5))
    peaks = [works_bytes for works_bytes, _ in found]
    assert peaks[0] == simulate(graph, keep_all(graph)).peak_bytes
    assert len(peaks) >= 3 and peaks == sorted(set(peaks), reverse=True)
    assert all(simulate(graph, schedule).peak_bytes == works_bytes for works_bytes, schedule in found)


def test_as_many_sets_as_ops_are_visited_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(40, seed=0)
    monkeypatch.setattr(smallest, "STATES", 1)
    works_bytes, _ = smallest_known(graph, time_limit_s=5)
    monkeypatch.setattr(smallest, "fitting", lambda *_, **__: iter(()))
    assert works_bytes < smallest_known(graph, time_limit_s=5)[0]


def test_what_a_forward_gives_back_is_made_before_the_backward() -> None:
    """Without that rule, statistics of batch norms are what comes last here."""
    graph = graph_of("resnet50")
    given_back = {graph.producer[x] for x in graph.outputs if not graph.ops[graph.producer[x]].backward}
    assert len(given_back) > 50
    found = 0
    for schedule in fitting(graph, int(0.35 * simulate(graph, keep_all(graph)).peak_bytes)):
        runs = list(computes(schedule))
        begun = next(at for at, v in enumerate(runs) if graph.ops[v].backward)
        assert given_back <= set(runs[:begun])
        found += 1
    assert found


def test_what_an_op_reads_is_there_at_once_in_no_fewer_bytes_than_are_proved() -> None:
    higher = 0
    for seed in range(200):
        graph = random_graph(seed, random=seed % 3 == 0, effect=seed % 2 == 0)
        least, known = least_budget(graph, keep_order=False), last_runs_peak(graph, least_bytes(graph), math.inf)
        proved = reads_peak(graph, 0, math.inf)
        assert proved <= least, seed
        assert reads_peak(graph, known, math.inf) <= least, seed
        higher += proved > known
        assert reads_peak(graph, least, math.inf) == least, seed
    assert higher >= 5


def two_read_together(steps: int) -> Graph:
    """A loss reads two values of 4 bytes, each made by steps from another one; beside that a chain of small ops."""
    values, ops = [Value("x", 1)], [Op("x", (), (0,), 1)]
    ends = []
    for _ in range(2):
        before = 0
        for _ in range(steps):
            ops.append(Op(f"step{len(ops)}", (before,), (len(values),), 1))
            before = len(values)
            values.append(Value("a", 4))
        ends.append(before)
    ops.append(Op("loss", tuple(ends), (len(values),), 1))
    values.append(Value("loss", 1))
    for _ in range(30):
        ops.append(Op(f"after{len(ops)}", (len(values) - 1,), (len(values),), 1))
        values.append(Value("small", 1))
    return Graph("two read together", tuple(ops), tuple(values), frozenset(), frozenset({len(values) - 1}))


def test_two_large_values_read_together_need_a_third_while_the_later_one_is_made() -> None:
    graph = two_read_together(3)
    assert least_bytes(graph) == last_runs_peak(graph, 0, math.inf) == 9
    told: list[int] = []
    assert least_peak(graph, states=2, proves=told.append)[0] == told[-1] == 12
    assert reads_peak(graph, 0, math.inf) == reads_peak(graph, 11, math.inf) == 12
    assert reads_peak(graph, 9, 0.0) == 9  # no time
    for budget_bytes, status in ((11, Status.INFEASIBLE), (12, Status.OPTIMAL)):
        assert solve(graph, budget_bytes, time_limit_s=20).status is status
