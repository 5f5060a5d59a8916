"""The garbage collector during runs and searches: rare, and as before afterwards."""

from __future__ import annotations

import gc
import sys

import pytest

from graphs.ir import Graph
from graphs.synthetic import chain
from planner import Plan, solve
from planner.methods import method as method_named
from planner.process.pauses import NEW_OBJECTS, rare_collections


def test_collections_are_rare_until_the_last_search_ends() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), rare_collections():
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        other = rare_collections()
        other.__enter__()  # of another thread, say
        raise ZeroDivisionError
    assert gc.get_threshold()[0] == NEW_OBJECTS
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_full_collections_stay_away_until_the_last_that_cannot_have_them_ends() -> None:
    before = gc.get_threshold()
    with rare_collections():
        with rare_collections(full=False), rare_collections():
            assert gc.get_threshold()[:2] == (NEW_OBJECTS, before[1]) and gc.get_threshold()[2] > 1_000_000
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
    assert gc.get_threshold() == before


@pytest.mark.parametrize("number", [0, 10 * NEW_OBJECTS])
def test_who_wants_fewer_collections_still_gets_them(number: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(number)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == number
        assert gc.get_threshold()[0] == number
    finally:
        gc.set_threshold(*before)


def test_a_search_collects_rarely_and_never_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def method(graph: Graph, budget_bytes: int) -> Plan:
        seen.append(gc.get_threshold())
        return whole(graph, budget_bytes)

    module = sys.modules["planner.plan"]  # ``planner.plan`` is the function
    whole = method_named("keep_all")
    monkeypatch.setattr(module, "method_named", lambda _: method)
    solve(chain(3), 10**9)
    ((youngest, _, old),) = seen
    assert youngest == NEW_OBJECTS and old > 1_000_000
