"""Search among orders: what it finds fits, is cheaper than annealing's, and does not depend on the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from graphs.ir import Graph
from graphs.synthetic import random_layered
from planner import keep_all, simulate
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.schedule import computes, first_runs, with_frees
from planner.stages import order_search
from planner.stages.order_search import Ended, anneal_on, search_orders
from planner.walks.walk_search import WalkSearch


def at(graph: Graph, share: float, *, gap: float = 0.001) -> Incumbent:
    return Incumbent(graph, int(share * simulate(graph, keep_all(graph)).peak_bytes), gap)


def soon() -> float:
    return now_s() + 60.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_search, "MOVES", 500_000)
    monkeypatch.setattr(order_search, "MORE_MOVES", 100_000)
    monkeypatch.setattr(order_search, "IDLE", 2)


@pytest.mark.usefixtures("short")
def test_it_fits_where_annealing_does_not() -> None:
    graph = random_layered("RL2", 4)
    annealed, search = at(graph, 0.7), at(graph, 0.7)
    ended = anneal_on(annealed, range(len(graph.ops)), 0, 60.0, 500_000)
    assert annealed.best is None and ended.excess_bytes > 0
    search_orders(search, 0, soon(), anew=True)
    assert search.best is not None and search.time_ns is not None
    trace = simulate(graph, search.best)
    assert trace.peak_bytes <= search.budget_bytes and trace.time_ns == search.time_ns < 1.1 * graph.keep_all_time_ns
    assert "cut_short" not in search.notes

    again = at(graph, 0.7)
    search_orders(again, 0, soon(), anew=True)
    assert again.best == search.best

    # From there on, it only gets cheaper; from elsewhere too.
    before_ns = search.time_ns
    search_orders(search, 7, soon(), anew=False)
    assert search.time_ns <= before_ns


@pytest.mark.usefixtures("short")
def test_it_takes_cheaper_re_runs_than_annealing_finds() -> None:
    graph = random_layered("RL2", 6)
    annealed, search = at(graph, 0.7), at(graph, 0.7)
    anneal_on(annealed, range(len(graph.ops)), 0, 60.0, 500_000)
    search_orders(search, 0, soon(), anew=True)
    assert annealed.time_ns is not None and search.time_ns is not None
    assert search.time_ns - graph.keep_all_time_ns < 0.8 * (annealed.time_ns - graph.keep_all_time_ns)


def test_it_stops_where_no_order_can_be_cheaper() -> None:
    graph = random_layered("RL1", 0)
    search = at(graph, 0.9)
    search_orders(search, 0, soon(), anew=True)
    assert search.time_ns == graph.keep_all_time_ns


def test_the_clock_ends_it() -> None:
    graph = random_layered("RL3", 0)
    search = at(graph, 0.7)
    began = time.perf_counter()
    search_orders(search, 0, began + 1.0, anew=True)
    assert time.perf_counter() - began < 3.0
    assert search.notes["cut_short"]


def last_first(graph: Graph) -> list[int]:
    """Of the ops that can run the last one, each time: another order than the graph's."""
    left, order = list(reversed(range(len(graph.ops)))), list[int]()
    while left:
        order.append(next(v for v in left if all(graph.producer[x] in (-1, *order) for x in graph.ops[v].inputs)))
        left.remove(order[-1])
    assert order != sorted(order)
    return order


def test_what_is_over_the_budget_is_mended_by_list_walks_in_its_own_order() -> None:
    graph = random_layered("RL1", 8)
    whole, order = simulate(graph, keep_all(graph)), last_first(graph)
    peak_bytes = simulate(graph, with_frees(graph, order)).peak_bytes
    search = Incumbent(graph, int(0.95 * peak_bytes), 0.0)
    over = Ended(peak_bytes - search.budget_bytes, whole.time_ns, order)
    ended = order_search._mended(search, over, 0, math.inf)
    assert ended.excess_bytes == 0
    assert first_runs(ended.runs) == order and len(ended.runs) > len(order)
    assert search.best is not None and list(computes(search.best)) == ended.runs

    hopeless = Incumbent(graph, 1, 0.0)
    assert order_search._mended(hopeless, over, 0, math.inf) is over and hopeless.best is None


def test_interrupted_while_walks_mend_it_keeps_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered("RL1", 8)
    order = last_first(graph)
    search = Incumbent(graph, int(0.95 * simulate(graph, with_frees(graph, order)).peak_bytes), 0.0)
    settle = WalkSearch._settle

    def interrupted(self: WalkSearch, *arguments: Any) -> Any:
        lead = settle(self, *arguments)
        if self.runs is not None:
            raise KeyboardInterrupt
        return lead

    monkeypatch.setattr(WalkSearch, "_settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        order_search._mended(search, Ended(1, graph.keep_all_time_ns, order), 0, math.inf)
    assert search.best is not None


def test_the_stage_model_plans_for_less_until_something_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered("RL1", 0)
    kept, other = list(range(len(graph.ops))), last_first(graph)
    ended = iter([Ended(2, graph.keep_all_time_ns, kept), Ended(1, graph.keep_all_time_ns, other)] + [Ended(0, 9**12, kept)] * 9)
    shares: list[tuple[float, ...]] = []

    def walks(_: Graph, order: list[int], budget_bytes: int, of: tuple[float, ...], deadline: float) -> Iterator[list[int]]:
        shares.append(of)
        return iter(())

    monkeypatch.setattr(order_search, "IDLE", 2)
    monkeypatch.setattr(order_search, "_walks", walks)
    monkeypatch.setattr(order_search, "anneal_on", lambda *_, **__: next(ended))
    monkeypatch.setattr(order_search, "_mended", lambda _, ended, *__: ended)
    search_orders(at(graph, 0.5), 0, soon(), anew=True)
    over, over_too, fits = shares
    assert over == over_too and over[0] < 1.0
    assert fits[0] == 1.0 and sorted(over) != sorted(fits)


@pytest.mark.usefixtures("short")
def test_interrupted_it_keeps_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered("RL2", 6)
    search = at(graph, 0.7)
    whole, calls = order_search.anneal, []

    def interrupted(found: Incumbent, *arguments: Any) -> None:
        calls.append(whole(found, *arguments))
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(order_search, "anneal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search_orders(search, 0, soon(), anew=True)
    assert search.best is not None and simulate(graph, search.best).peak_bytes <= search.budget_bytes
