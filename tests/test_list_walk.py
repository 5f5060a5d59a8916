"""List walks fit their budget, follow their routes, do as their weights say, and do what their source says, compiled or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numba.extending import is_jitted

from graphs.ir import Graph, Op, Value
from graphs.synthetic import chain, linear_network, random_training
from planner.least.smallest import smallest_known
from planner.process.clock import now_s
from planner.process.flat import Floats
from planner.schedule import keep_all, with_frees
from planner.simulate import simulate
from planner.walks import list_walk, walk_search
from planner.walks.list_walk import ListWalk, Route, Walked
from planner.walks.walk_search import LEADS, WalkSearch, _wanted_since
from tests.clock import stopwatch
from tests.strategies import random_budget, random_graph

COMPILED = ("_walk", "_remake_time", "_drop", "_sift", "_after", "is_read", "_power", "_places")


def weights_of(graph: Graph, seed: int) -> Floats:
    return np.exp(np.random.default_rng(seed).normal(size=len(graph.values)) * 3)


def check(graph: Graph, budget_bytes: int, walked: Walked) -> None:
    """What a complete walk says of itself is so."""
    runs = walked.runs[:-1].tolist()
    assert walked.runs[-1] == len(graph.ops)
    trace = simulate(graph, with_frees(graph, runs))
    assert trace.peak_bytes <= budget_bytes
    assert trace.time_ns == walked.time_ns


@pytest.mark.parametrize("far", [0.0, 0.5, 1.0, 2.0])
def test_a_complete_walk_fits_its_budget_and_knows_its_time(far: float) -> None:
    complete = 0
    for seed in range(150):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        walk = ListWalk(graph, budget_bytes)
        walked = walk.follow(walk.route(range(len(graph.ops))), weights=weights_of(graph, seed), far=far)
        first_runs = list(dict.fromkeys(walked.runs[: walked.stuck].tolist()))
        assert first_runs == sorted(first_runs)
        if walked.complete:
            complete += 1
            check(graph, budget_bytes, walked)
    assert complete >= 75


def test_a_route_that_fits_is_followed_at_no_more_cost() -> None:
    followed = 0
    for seed in range(150):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        walk = ListWalk(graph, budget_bytes)
        first = walk.follow(walk.route(range(len(graph.ops))), weights=weights_of(graph, seed))
        if first.complete:
            followed += 1
            for far in (0.0, 1.0):
                again = walk.follow(walk.route(first.runs), far=far, weights=weights_of(graph, seed + 1))
                assert again.complete
                assert again.time_ns <= first.time_ns
                check(graph, budget_bytes, again)
    assert followed >= 75


def test_changes_along_the_way_leave_a_schedule_that_fits() -> None:
    tried = changed = early = 0
    for seed in range(150):
        graph = random_graph(seed)
        budget_bytes = random_budget(graph, seed)
        walk = ListWalk(graph, budget_bytes)
        first = walk.follow(walk.route(range(len(graph.ops))))
        if not first.complete:
            continue
        route = walk.route(first.runs)
        rng = np.random.default_rng(seed)
        is_repeat = np.ones(route.runs.size, bool)
        is_repeat[route.first_at] = False
        for _ in range(10):
            begin, length = (int(n) for n in rng.integers(1, route.runs.size, 2))
            left_out = is_repeat & (rng.random(route.runs.size) < 0.3)
            left_out[:begin] = left_out[begin + length :] = False
            walked = walk.follow(
                route, weights=weights_of(graph, seed), left_out=left_out, begin=begin, until=begin + length, far=0.5
            )
            assert walked.runs[:begin].tolist() == route.runs[:begin].tolist()
            if walked.complete:
                tried += 1
                changed += walked.runs.tolist() != route.runs.tolist()
                early += walked.work < walked.runs.size - begin - 1
                check(graph, budget_bytes, walked)
    assert tried > 500
    assert changed > 30
    assert early > 30


def test_a_walk_that_is_late_beyond_recovery_is_given_up() -> None:
    given_up = early = 0
    for seed in range(10):
        graph = random_training(40, seed=seed)
        walk = ListWalk(graph, int(0.7 * simulate(graph, keep_all(graph)).peak_bytes))
        first = walk.follow(walk.route(range(len(graph.ops))))
        if not first.complete:
            continue
        route = walk.route(first.runs)
        is_repeat = np.ones(route.runs.size, bool)
        is_repeat[route.first_at] = False
        for draw, at in enumerate(np.flatnonzero(is_repeat)):
            weights, left_out = weights_of(graph, draw), is_repeat & (np.arange(route.runs.size) == at)
            change = {"weights": weights, "left_out": left_out, "begin": max(1, int(at) - 20)}
            whole = walk.follow(route, **change)
            some = walk.follow(route, **change, slack_ns=0.0)
            if some.complete:
                assert some.runs.tolist() == whole.runs.tolist()
            elif whole.complete:
                given_up += 1
                early += some.work < whole.work
                assert whole.time_ns > first.time_ns
    assert early == given_up > 5


def test_a_rerun_that_the_room_makes_useless_is_left_out() -> None:
    graph = linear_network(6)
    count = len(graph.ops)
    runs = [*range(count // 2), 0, 1, 2, *range(count // 2, count)]
    whole = simulate(graph, keep_all(graph)).peak_bytes
    walk = ListWalk(graph, whole)
    assert walk.follow(walk.route(runs)).runs.tolist() == [*range(count), count]


def test_the_compiled_walk_is_the_written_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(graph, random_budget(graph, seed), seed) for seed in range(60) for graph in [random_graph(seed)]]

    def walks() -> list[tuple[list[int], float, int, int]]:
        found = []
        for graph, budget_bytes, seed in cases:
            walk = ListWalk(graph, budget_bytes)
            walked = walk.follow(walk.route(range(len(graph.ops))), weights=weights_of(graph, seed), far=0.5)
            found.append((walked.runs.tolist(), walked.time_ns, walked.stuck, walked.work))
            if walked.complete:
                again = walk.follow(walk.route(walked.runs), weights=weights_of(graph, seed + 1), begin=2, until=9)
                found.append((again.runs.tolist(), again.time_ns, again.stuck, again.work))
        return found

    compiled = walks()
    for name in COMPILED:
        monkeypatch.setattr(list_walk, name, getattr(list_walk, name).py_func)
    assert walks() == compiled


@pytest.mark.parametrize("seed", [2734, 3658, 10894])
def test_a_route_that_fits_stays_so_where_ops_take_no_time(seed: int) -> None:
    graph = random_graph(seed, max_ops=9, random=True)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    followed = 0
    for budget_bytes in range(peak_bytes):
        walk = ListWalk(graph, budget_bytes)
        for draw in range(10):
            first = walk.follow(walk.route(range(len(graph.ops))), weights=weights_of(graph, draw))
            if first.complete:
                followed += 1
                again = walk.follow(walk.route(first.runs), weights=weights_of(graph, draw + 1))
                assert again.complete
                assert again.time_ns <= first.time_ns
    assert followed


def test_a_walk_that_takes_too_long_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = linear_network(12)
    walk = ListWalk(graph, simulate(graph, keep_all(graph)).peak_bytes // 2)
    route = walk.route(range(len(graph.ops)))
    assert walk.follow(route).complete
    assert walk.follow(route, deadline=0.0).complete  # so much is always granted
    monkeypatch.setattr(list_walk, "LEAST_S", 0.0)
    assert not walk.follow(route, deadline=0.0).complete
    monkeypatch.setattr(list_walk, "MOST_STEPS", 3)
    assert not walk.follow(route).complete


def test_an_op_that_reads_many_values_takes_no_longer_than_it_may() -> None:
    """One op makes 20,000 values, each is made into another, and one op reads all of these: some have to be made again for it."""
    n = 20_000
    ops = [Op("make", (), tuple(range(n)), 5), *(Op(f"turn{i}", (i,), (n + i,), 1) for i in range(n))]
    ops.append(Op("join", tuple(range(n, 2 * n)), (2 * n,), 3))
    values = (*[Value("x", 3)] * n, *[Value("y", 2)] * n, Value("z", 1))
    walk = ListWalk(Graph("fan", tuple(ops), values, frozenset(), frozenset({2 * n})), 3 * n)
    route = walk.route(range(len(ops)))
    walk.follow(route, deadline=0.0)  # loads the code
    took_s = stopwatch()
    walk.follow(route, deadline=now_s() + 0.5)
    assert took_s() < 1.5


def test_what_is_dear_is_not_made_twice() -> None:
    graph = linear_network(12)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    walk = ListWalk(graph, int(0.6 * peak_bytes))
    route = walk.route(range(len(graph.ops)))
    again = [i for i, count in enumerate(np.bincount(walk.follow(route).runs)) if count > 1]
    assert again
    for i in again:
        weights = np.ones(len(graph.values))
        weights[list(graph.ops[i].outputs)] = 1e50
        assert np.bincount(walk.follow(route, weights=weights).runs)[i] == 1


def test_a_search_only_gets_better_and_repeats() -> None:
    graph = random_training(60, seed=0)
    works, _ = smallest_known(graph)
    budget_bytes = (4 * works + simulate(graph, keep_all(graph)).peak_bytes) // 5

    def search() -> list[float]:
        walks = WalkSearch(graph, budget_bytes, seed=3)
        times = [walks.time_ns]
        walks.start()
        times.append(walks.time_ns)
        for _ in range(3):
            walks.improve(20_000)
            times.append(walks.time_ns)
        assert walks.runs is not None
        trace = simulate(graph, with_frees(graph, walks.runs.tolist()))
        assert trace.time_ns == walks.time_ns
        assert trace.peak_bytes <= budget_bytes
        return times

    times = search()
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[1] < times[0] == math.inf
    assert search() == times


def test_a_search_goes_on_from_a_sequence_that_does_not_fit() -> None:
    graph = random_training(60, seed=1)
    whole = simulate(graph, keep_all(graph)).peak_bytes
    walks = WalkSearch(graph, int(0.8 * whole), seed=0)
    walks.follow(range(len(graph.ops)))
    assert walks.runs is not None
    trace = simulate(graph, with_frees(graph, walks.runs.tolist()))
    assert trace.peak_bytes <= 0.8 * whole < whole


def test_a_search_in_too_little_memory_finds_nothing_and_says_so() -> None:
    graph = linear_network(12)
    walks = WalkSearch(graph, graph.resident_bytes + 1, seed=0)
    walks.start()
    walks.improve(5_000)
    assert walks.runs is None
    assert walks.time_ns == math.inf


def test_a_search_past_its_deadline_begins_one_walk_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(60, seed=0)
    budget_bytes = int(0.7 * simulate(graph, keep_all(graph)).peak_bytes)
    begun: list[Route] = []
    follow = ListWalk.follow

    def counted(self: ListWalk, route: Route, **given: Any) -> Walked:
        begun.append(route)
        return follow(self, route, **given)

    monkeypatch.setattr(ListWalk, "follow", counted)
    walks = WalkSearch(graph, budget_bytes, seed=0)
    walks.start(deadline=0.0)
    assert len(begun) == 1
    assert walks.runs is not None
    walks.follow(walks.runs.tolist(), deadline=0.0)
    walks.improve(10_000, deadline=0.0)
    assert len(begun) == 1


def test_a_search_with_time_for_one_walk_holds_gradients() -> None:
    graph = random_training(200, seed=7)
    walks = WalkSearch(graph, simulate(graph, keep_all(graph)).peak_bytes // 2, seed=0)
    walks.start(deadline=0.0)
    assert walks.runs is not None


def test_a_search_may_end_with_the_first_walk_that_fits() -> None:
    graph = random_training(40, seed=1)
    walks = WalkSearch(graph, int(0.7 * simulate(graph, keep_all(graph)).peak_bytes), seed=0)
    walks.start(one=True)
    assert walks.runs is not None and len(walks._leads) == 1
    first_ns = walks.time_ns
    walks.start()
    assert walks.time_ns < first_ns


def test_a_search_with_nothing_to_change_changes_nothing() -> None:
    bare = Graph("bare", (Op("small", (), (), 1), Op("large", (), (), 1, workspace_bytes=9)), (), frozenset(), frozenset())
    first = linear_network(2)
    for graph, budget_bytes in ((bare, 8), (first, 0)):  # no value at all; not even the first op fits
        walks = WalkSearch(graph, budget_bytes, seed=0)
        walks.start()
        walks.improve(5_000)
        assert walks.runs is None


def test_crossed_leads_fit_and_cost_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: list[Walked] = []
    follow = ListWalk.follow

    def kept(self: ListWalk, route: Route, **given: Any) -> Walked:
        crossed.append(follow(self, route, **given))
        return crossed[-1]

    complete = short = better = 0
    for seed in range(12):
        graph = random_training(40, seed=seed)
        budget_bytes = int(0.68 * simulate(graph, keep_all(graph)).peak_bytes)
        walks = WalkSearch(graph, budget_bytes, seed=seed)
        walks.start()
        assert 2 <= len(walks._leads) <= LEADS
        before_ns = walks.time_ns
        with monkeypatch.context() as patch:
            patch.setattr(ListWalk, "follow", kept)
            crossed.clear()
            work = walks._cross(30_000, math.inf)
        assert crossed and (work >= 30_000 or len(walks._leads) == 1)
        for walked in crossed:
            if walked.complete:
                check(graph, budget_bytes, walked)
                complete += 1
                short += 2 * walked.work < walked.runs.size
        better += walks.time_ns < before_ns
    assert complete > 200
    assert short > 50  # they began in the middle or ended there
    assert better > 6


def test_no_two_leads_are_alike_and_the_best_stays() -> None:
    for seed in range(6):
        graph = random_training(40, seed=seed)
        walks = WalkSearch(graph, int(0.68 * simulate(graph, keep_all(graph)).peak_bytes), seed=seed)
        walks.start()
        for _ in range(4):
            walks.improve(20_000)
            leads = walks._leads
            assert leads[0].time_ns == walks.time_ns == min(lead.time_ns for lead in leads)
            assert not any(walks._are_alike(one, other) for i, one in enumerate(leads) for other in leads[:i])


@pytest.mark.parametrize("function", [_wanted_since, _wanted_since.py_func], ids=["compiled", "written"])
def test_what_another_route_wants_is_wanted_since_its_last_use(function: Any) -> None:
    def wanted(runs: list[int], at: int, graph: Graph) -> dict[int, int]:
        """Values that are read from ``at`` on before they are made again, and their last use before."""
        found = {}
        for v in range(len(graph.values)):
            uses = [i for i, op in enumerate(runs) if v in graph.ops[op].inputs or v in graph.ops[op].outputs]
            before, after = [i for i in uses if i < at], [i for i in uses if i >= at]
            if before and after and v not in graph.ops[runs[after[0]]].outputs:
                found[v] = before[-1]
        return found

    earlier = 0
    for seed in range(20):
        graph = random_training(8, seed=seed)
        walk = ListWalk(graph, 10**12)
        rng = np.random.default_rng(seed)
        old = list(range(len(graph.ops)))
        at = int(rng.integers(1, len(old)))
        new = old[:at] + rng.choice(at, min(at, 4), replace=False).tolist() + old[at:]
        one, other = walk.route(new), walk.route(old)
        before = wanted(old, at, graph)
        held = {v for v, producer in enumerate(graph.producer) if producer < 0} | graph.outputs  # the end reads those in both
        news = [since for v, since in wanted(new, at, graph).items() if v not in before and v not in held]
        assert function(at, one.use_rows, one.uses, other.use_rows, other.uses) == min([at, *news])
        earlier += min([at, *news]) < at
    assert earlier > 10


def test_compiled_code_returns_no_arrays() -> None:
    """It would run Python to make them, where Ctrl-C becomes a SystemError."""
    graph = random_training(10, 1)
    search = WalkSearch(graph, int(0.8 * simulate(graph, keep_all(graph)).peak_bytes), 0)
    search.start()
    search.improve(1000)
    dispatchers = [one for module in (list_walk, walk_search) for one in vars(module).values() if is_jitted(one)]
    returned = [str(signature.return_type) for one in dispatchers for signature in one.nopython_signatures]
    assert len(returned) > 2 and not [kind for kind in returned if "array" in kind]


def test_where_many_values_are_present_room_is_made_for_more_than_one_op_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(3600, size_bytes=10)
    budget_bytes = 24_000
    walk = ListWalk(graph, budget_bytes)
    route = walk.route(range(len(graph.ops)))
    monkeypatch.setattr(list_walk, "MOST_STEPS", 1_400_000)  # to look at 2,400 values before each op would take twice that
    walked = walk.follow(route)
    assert walked.complete
    check(graph, budget_bytes, walked)
    assert walked.time_ns <= graph.keep_all_time_ns + 1_220  # 1,200 layers do not fit, and the room made at a time is for 9
