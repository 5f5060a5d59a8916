"""Compiled searches find and count what those in plain Python do, and are what is written."""

from __future__ import annotations

import random
import statistics
from array import array
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from numba.extending import is_jitted

from graphs.ir import Graph
from graphs.program import program_of
from graphs.synthetic import random_training
from online import heuristics, run
from online.engines import compiled_searches
from online.engines.compiled_searches import BLOCK, MOST_NS, Compiled, Net, median_stale, select
from online.engines.engine import Counters
from online.heuristics import HEURISTICS
from online.neighborhood import Exact, Relations
from online.replay import replay_log

NEVER = 1 << 62
COMPILED = tuple(name for name, it in vars(compiled_searches).items() if is_jitted(it))
RULES = [name for name, rule in HEURISTICS.items() if not rule.random]
CHANGED = ["demand+reclaim", "dtr_eq+counted+yield", "dtr+next_use", "demand+next_use", "lru+skip_small", "demand+ignore"]
CHANGED += [
    "dtr+banish",
    "dtr_eq+banish",
    "demand+banish",
    "demand+counted+banish",
    "dtr+caching",
    "local+arena",
    "coop",
    "coop_e_star",
    "dte",
    "coop+banish",
    "coop+reclaim",
]


def begun(after: int) -> ExitStack:
    """Searches are done by compiled code after so much work."""
    stack = ExitStack()
    stack.enter_context(patch.object(heuristics, "WORTH_LOADING", after))
    stack.enter_context(patch.object(heuristics, "LOADED_ALREADY", 1))
    return stack


def decided(graph: Graph, share: float, rule: str, *, after: int) -> tuple[tuple[int, ...], Counters]:
    """What a run does and counts that searches by compiled code after so much work."""
    with begun(after):
        done = run(graph, share, heuristic=rule)
    return done.steps, replace(done.counters, search_s=0.0)


@pytest.mark.parametrize("rule", [*RULES, *CHANGED])
def test_a_run_is_the_same(rule: str) -> None:
    for seed, layers, share in ((1, 8, 0.85), (2, 20, 0.7), (3, 40, 0.6)):
        graph = random_training(layers, seed)
        written = decided(graph, share, rule, after=NEVER)
        for after in (-1, 40, 1_000):  # from the first search on, and from some later one on
            assert decided(graph, share, rule, after=after) == written


@pytest.mark.parametrize("rule", ["demand", "dtr", "dtr_eq", "msps", "lru", "coop", "coop_e_star", "dte"])
def test_the_compiled_search_is_the_written_one(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_training(15, 5)
    compiled = decided(graph, 0.6, rule, after=-1)
    for name in COMPILED:
        monkeypatch.setattr(compiled_searches, name, getattr(compiled_searches, name).py_func)
    assert decided(graph, 0.6, rule, after=-1) == compiled


@pytest.mark.parametrize("rule", ["dtr", "coop_e_star", "e_star"])
@pytest.mark.parametrize("release", ["ignore", "eager"])
def test_a_replay_that_counts_what_an_op_waits_for_is_the_same(rule: str, release: str) -> None:
    """As the authors' simulator does (``Exact.awaiting``)."""
    awaited = set[bool]()

    def awaiting(compiled: Compiled, net: Net) -> AbstractContextManager[None]:
        awaited.add(isinstance(compiled._neighborhood, Exact) and bool(compiled._neighborhood.counting))
        return as_before(compiled, net)

    as_before = Compiled.awaited
    for seed in range(6):
        graph = random_training(20, seed)
        coarse = tuple(replace(value, size_bytes=512 * value.size_bytes) for value in graph.values)  # as arenas hand out
        program = program_of(replace(graph, values=coarse))
        found = []
        for after in (NEVER, -1, 200):
            with begun(after), patch.object(Compiled, "awaited", awaiting):
                done = replay_log(program, 0.7, heuristic=rule, release=release, thrash_limit=100.0)
            found.append((done.steps, done.status, replace(done.counters, search_s=0.0)))
        assert found[1] == found[0] and found[2] == found[0], seed
    assert True in awaited


@pytest.mark.parametrize("rule", ["demand", "dtr", "dtr_eq", "coop", "dte"])
def test_costs_that_floats_do_not_hold_are_summed_in_python(rule: str) -> None:
    graph = random_training(20, 2)
    factor = 3 * MOST_NS // graph.keep_all_time_ns  # passed in the middle of the run
    graph = replace(graph, ops=tuple(replace(op, time_ns=op.time_ns * factor + i) for i, op in enumerate(graph.ops)))
    assert graph.keep_all_time_ns > MOST_NS
    assert decided(graph, 0.6, rule, after=-1) == decided(graph, 0.6, rule, after=NEVER)


def test_storages_and_links_may_be_added() -> None:
    relations = Relations()
    compiled = Compiled(relations, None)
    draw = random.Random(0)
    edges: set[tuple[int, int]] = set()
    for s in range(40):
        relations.add()
        compiled.grow(s + 1)
        for dep in {draw.randrange(s) for _ in range(2 * bool(s))}:
            relations.link(s, dep)
            edges.add((s, dep))
        if s % 5 == 3:
            relations.made_together([s - 2, s - 1, s])
        siblings = [relations.siblings.get(t, []) for t in range(s + 1)]
        compiled.net.evicted[s] = relations.evicted[s] = s % 3 == 1
        for half, lists in enumerate((relations.deps, relations.dependents, siblings)):
            net = compiled.up_to_date()
            for t, wanted in enumerate(lists):
                found, link = [], net.first[half, t]
                while link >= 0:
                    found.append(net.to[half, link])
                    link = net.next[half, link]
                assert found == wanted
    assert sum(map(len, relations.deps)) == len(edges) > 40


@pytest.mark.parametrize("median", [median_stale, median_stale.py_func], ids=["compiled", "written"])  # type: ignore[attr-defined]
def test_the_median_moves_on(median: object) -> None:
    draw = random.Random(1)
    pool = Compiled(Relations(), None)
    for count in (1, 2, 7, BLOCK + 3, 3 * BLOCK):
        columns = np.zeros((8, count))
        slots = pool.slots(columns, array("q", [0] * count), array("q", [0] * count))
        accessed, barrier = columns[3], columns[4]
        for now in range(1, 400):
            for _ in range(draw.choice([1, 1, count])):
                at = draw.randrange(count)
                accessed[at] = draw.choice([now, now // 10, accessed[at]])
                barrier[at] = draw.choice([0.0, 0.0, np.inf])
            barrier[draw.randrange(count)] = 0.0
            wanted = statistics.median((now - accessed[barrier == 0.0]).tolist())
            assert median(slots, count, float(now)) == wanted  # type: ignore[operator]


@pytest.mark.parametrize("function", [select, select.py_func], ids=["compiled", "written"])  # type: ignore[attr-defined]
def test_a_number_is_put_where_it_belongs(function: object) -> None:
    draw = random.Random(2)
    for _ in range(300):
        numbers = np.array([float(draw.randint(0, draw.choice([2, 50]))) for _ in range(draw.randint(1, 40))])
        at = draw.randrange(numbers.size)
        wanted = sorted(numbers)[at]
        function(numbers, at)  # type: ignore[operator]
        assert numbers[at] == wanted and (numbers[:at] <= wanted).all() and (numbers[at:] >= wanted).all()
