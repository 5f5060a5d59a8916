"""Scores by hand, and the pool against a plain scan."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from online import heuristics
from online.heuristics import HEURISTICS, Heuristic, Pool, ablation
from online.neighborhood import Relations
from tests.test_neighborhood import Components, exact_sum

SCORED = {name: h for name, h in (HEURISTICS | ablation()).items() if not h.random}


def test_scores() -> None:
    # c0 = 6 ns, sum over e* = 18 ns, 4 bytes, untouched for 3 ns
    scores = {name: HEURISTICS[name].score(6, 18, 4, 3) for name in ("dtr", "dtr_eq", "local", "lru", "size", "msps", "e_star")}
    assert scores == {
        "dtr": 24 / 12,
        "dtr_eq": 24 / 12,
        "local": 24 / 12,  # the caller gives the sum that the rule asks for: 0 for this one
        "lru": 1 / 3,
        "size": 1 / 4,
        "msps": 24 / 4,
        "e_star": 24 / 4,
    }
    assert HEURISTICS["dtr"].score(6, 18, 0, 3) == math.inf  # nothing to gain
    assert HEURISTICS["dtr"].score(6, 18, 4, 0) == math.inf  # touched just now


def test_the_ablation_has_sixteen_members_one_of_them_random() -> None:
    rules = ablation()
    assert len(set(rules.values())) == len(rules) == 16
    assert [name for name, rule in rules.items() if rule.random] == ["none"]
    assert rules["e_star/size/staleness"] == HEURISTICS["dtr"]
    assert rules["eq/size/staleness"] == HEURISTICS["dtr_eq"]
    assert rules["none/staleness"] == HEURISTICS["lru"]


def demand(relations: Relations, s: int) -> int:
    """4 * (c0 + cost of the evicted ancestors, of wanted ones half) * (1 + n) / 2.

    n: the wanted among s and what is evicted and depends on it through dropped ones. Where n is not 0, costs are at least 1/2.
    """
    below: set[int] = set()
    layer = {s}
    while layer:
        layer = {u for t in layer for u in relations.dependents[t] if relations.evicted[u]} - below
        below |= layer
        layer = {u for u in layer if relations.dropped[u]}
    wanting = sum(not relations.dropped[u] for u in below) + (not relations.dropped[s])
    above: set[int] = set()
    layer = {s}
    while layer:
        layer = {u for t in layer for u in relations.deps[t] if relations.evicted[u]} - above
        above |= layer
    ancestors = sum(relations.cost_ns[u] * (1 if relations.dropped[u] else 0.5) for u in above)
    return int(4 * max(0.5, relations.cost_ns[s] + ancestors) * (1 + wanting) / 2) if wanting else 0


@dataclass
class Scan:
    """The pool as the authors' simulator has it: a list in joining order, every score computed anew."""

    rule: Heuristic
    relations: Relations
    size_bytes: list[int]
    estimate: Components = field(init=False)
    members: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    evaluations: int = 0

    def __post_init__(self) -> None:
        self.estimate = Components(self.relations)

    def score(self, s: int, clock: int, cap: float) -> float:
        near = {
            "neighborhood": lambda: exact_sum(self.relations, s),
            "ancestors": lambda: exact_sum(self.relations, s, descendants=False),
            "union_find": lambda: self.estimate.sum(s),
            "demand": lambda: demand(self.relations, s),
        }.get(self.rule.cost, lambda: 0)()
        return self.rule.score(self.relations.cost_ns[s], near, self.size_bytes[s], min(cap, self.stale(s, clock)))

    def stale(self, s: int, clock: int) -> int:
        return clock - self.last.get(s, 0)

    def pick(self, clock: int) -> int:
        best, lowest = -1, math.inf
        oldest = 0
        cap = statistics.median([self.stale(s, clock) for s in self.members]) if self.rule.capped else math.inf
        for s in self.members:
            self.evaluations += 1
            score = self.score(s, clock, cap)
            stale = self.stale(s, clock) if self.rule.capped and score < math.inf else 0
            if score < lowest or (
                score == lowest and stale >= oldest
            ):  # the last of equals; where staleness is capped, of the oldest
                best, lowest, oldest = s, score, stale
                if score == 0:  # good enough: the scan ends
                    break
        return best


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SCORED)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_the_pool_picks_what_a_scan_picks(name: str, compiled: bool, seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 24)
    top = draw.choice([1, 4, 1000])  # small numbers make ties, zeros and infinities
    costs = [draw.randint(0, top) for _ in range(n)]
    sizes = [draw.randint(0, top) for _ in range(n)]
    edges = [(s, draw.randint(max(0, s - 4), s - 1)) for s in range(1, n) for _ in range(draw.randint(0, 2))]
    kinds = ["evict", "evict", "rebuild", "rebuild", "hold", "touch", "view", "drop"]
    moves = [(draw.choice(kinds), draw.randrange(n), draw.randint(0, top)) for _ in range(100)]
    relations = Relations()
    pool = Pool(SCORED[name], relations, sizes)
    scan = Scan(SCORED[name], relations, sizes)
    for cost in costs:
        relations.cost_ns[relations.add()] = cost
        pool.add()
    for s, dep in edges:
        relations.link(s, dep)
    for s in range(len(costs)):
        pool.enter(s)
        scan.members.append(s)
    clock = 1
    begins = draw.randrange(60) if compiled else len(moves)
    for at, (what, s, passed) in enumerate(moves):
        clock += passed
        if at == begins:
            with patch.object(heuristics, "WORTH_LOADING", -1):
                pool.hasten()
            assert pool.compiled is not None
        if what == "evict" and scan.members:
            victim = pool.pick(clock)
            assert victim == scan.pick(clock)
            assert pool.evaluations == scan.evaluations
            scan.members.remove(victim)
            pool.leave_memory(victim)
            relations.evicted[victim] = True
            pool.evicted(victim)
            scan.estimate.evicted(victim)
        elif what == "rebuild" and relations.evicted[s]:
            relations.evicted[s] = False
            pool.restored(s)
            scan.estimate.restored(s)
            pool.enter(s)
            scan.members.append(s)
        elif what == "hold" and s in scan.members:  # an op locks it and lets go
            pool.leave(s)
            scan.members.remove(s)
            assert len(pool) == len(scan.members)
            pool.join(s)
            scan.members.append(s)
        elif what == "touch":
            pool.touch(s, clock)
            scan.last[s] = clock
        elif what == "drop":
            relations.dropped[s] = True
            pool.dropped(s)
        elif what == "view" and not relations.evicted[s]:
            relations.cost_ns[s] += passed
            pool.costlier(s, passed)


def test_ties_go_to_the_latest_and_zeros_to_the_first() -> None:
    relations = Relations()
    pool = Pool(HEURISTICS["local"], relations, [2, 2, 2, 2])
    for cost in (5, 5, 0, 0):
        relations.cost_ns[relations.add()] = cost
        pool.add()
    for s in (0, 1):
        pool.enter(s)
    assert pool.pick(10) == 1  # 0 and 1 score alike; 1 joined later
    pool.leave(0)
    pool.join(0)
    assert pool.pick(10) == 0  # now 0 did
    assert pool.evaluations == 4
    for s in (2, 3):
        pool.enter(s)
    assert pool.pick(10) == 2  # both score 0, and a scan stops at the first: it has looked at 1, 0 and 2
    assert pool.evaluations == 7


def test_storages_that_gain_nothing_go_last_but_go() -> None:
    relations = Relations()
    pool = Pool(HEURISTICS["dtr"], relations, [0, 8])
    for _ in range(2):
        relations.cost_ns[relations.add()] = 7
        pool.add()
        pool.enter(len(relations.deps) - 1)
    assert pool.pick(3) == 1  # 0 has no bytes: infinite
    pool.leave_memory(1)
    assert pool.pick(3) == 0
    assert len(pool) == 1


def test_the_random_rule_repeats_with_its_seed_and_reaches_every_member() -> None:
    def choices(seed: int) -> list[int]:
        relations = Relations()
        pool = Pool(HEURISTICS["random"], relations, [1] * 5, seed=seed)
        for s in range(5):
            relations.add()
            pool.add()
            if s != 3:
                pool.enter(s)
        return [pool.pick(1) for _ in range(60)]

    assert choices(1) == choices(1) != choices(2)
    assert set(choices(1)) == {0, 1, 2, 4}


def test_the_random_rule_repeats_in_whatever_order_tensors_die() -> None:
    def choices(dying: list[int]) -> list[int]:
        relations = Relations()
        pool = Pool(HEURISTICS["random"], relations, [1] * 8, seed=1)
        for s in range(8):
            relations.add()
            pool.add()
            if s == 5:
                for t in dying:
                    pool.leave_memory(t)
            pool.enter(s)
        return [pool.pick(1) for _ in range(60)]

    assert choices([1, 2, 4]) == choices([4, 1, 2]) == choices([2, 4, 1])
    assert set(choices([1, 2, 4])) == {0, 3, 5, 6, 7}


def test_many_storages() -> None:
    n = 1000  # more than the arrays start with
    relations = Relations()
    pool = Pool(HEURISTICS["lru"], relations, [1] * n)
    for s in range(n):
        relations.add()
        pool.add()
        pool.touch(s, n - s)
        pool.enter(s)
    for s in reversed(range(n)):
        assert pool.pick(n + 1) == s
        pool.leave_memory(s)
    assert len(pool) == 0


def test_what_nobody_wants_is_worth_nothing_until_somebody_does() -> None:
    # 0 -> 1 -> 2, all in memory, 1 dropped: it goes first. With 2 evicted, 1 would be read for it, and 0 counts for itself alone.
    relations = Relations()
    pool = Pool(HEURISTICS["demand"], relations, [1, 1, 1])
    for s, cost in enumerate((10, 10, 30)):
        relations.cost_ns[relations.add()] = cost
        pool.add()
        if s:
            relations.link(s, s - 1)
    for s in range(3):
        pool.enter(s)
    relations.dropped[1] = True
    pool.dropped(1)
    assert pool.pick(5) == 1
    pool.leave_memory(2)
    relations.evicted[2] = True
    pool.evicted(2)
    pool.touch(0, 3)  # half as stale as 1
    assert pool.pick(5) == 1
    pool.touch(1, 4)
    assert pool.pick(5) == 0
    pool.spare(0, True)  # a rebuild will read it
    assert pool.pick(5) == 1


def test_a_next_use_takes_the_place_of_staleness() -> None:
    relations = Relations()
    pool = Pool(HEURISTICS["lru"], relations, [1, 1, 1], next_use=True)
    for s in range(3):
        relations.add()
        pool.add()
        pool.enter(s)
        pool.touch(s, s)
    for s, at in enumerate((40.0, 90.0, 60.0)):
        pool.due(s, at)
    pool.now = 30
    assert pool.pick(100) == 1  # used last
    pool.due(1, 31.0)
    assert pool.pick(100) == 2
    pool.due(0, math.inf)
    assert pool.pick(100) == 0  # never again


def test_a_search_may_look_at_some_only() -> None:
    n = 400
    relations = Relations()
    pool = Pool(HEURISTICS["local"], relations, [8] * n, sample=True, seed=1)
    for s in range(n):
        relations.cost_ns[relations.add()] = 1 + (s * 37) % n
        pool.add()
        pool.enter(s)
    victims = [pool.pick(10) for _ in range(200)]
    looked_at = pool.evaluations / 200
    assert 1.5 * math.sqrt(n) < looked_at < 2.5 * math.sqrt(n)  # n / mean of 1 .. sqrt(n)
    costs = sorted(relations.cost_ns[s] for s in victims)
    assert len(set(victims)) > 20 and costs[100] <= n / 20  # not the least, but among the least


def test_small_storages_may_be_skipped() -> None:
    relations = Relations()
    sizes = [1000, 5, 1000, 11]
    pool = Pool(HEURISTICS["size"], relations, sizes, skip_small=True)
    for s in range(4):
        relations.add()
        pool.add()
        pool.enter(s)
    assert len(pool) == 3 and 1 not in pool.members() and 3 in pool.members()  # 1 % of 502.5 and of 504
    pool.leave(1)
    pool.join(1)
    assert 1 not in pool.members()
    pool.leave_memory(1)
    assert len(pool) == 3
