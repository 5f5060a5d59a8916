"""Allocators and the choice of what to evict by addresses: golden values, brute force, and runs under address budgets."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphs.errors import InputError
from graphs.importers.dtr_program import read_program
from graphs.ir import Graph, Op, Value
from graphs.program import program_of
from online import RunStatus, replay_log, run
from online.allocators import ALLOCATORS, FAR, FREE, HELD, Allocator, Arena, CachingAllocator, cheap_below
from online.engines.engine import Engine, OutOfMemory, Release, Thrashed
from online.engines.victims import Window, WithHoles, cheapest_window, victims
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS, Heuristic, Pool
from online.neighborhood import Producers, Relations
from planner.bounds import least_bytes
from planner.schedule import Compute, Free, from_json, keep_all
from planner.simulate import simulate
from tests.strategies import graphs, random_graph

MIB = 1 << 20
Row = list[tuple[int, int | None]]  # bytes and price of pieces, None for one that must stay


# The window


def brute_window(pieces: Row, need: int) -> int | None:
    """Price of the cheapest sufficient window, by trying every one."""
    prices = []
    for start in range(len(pieces)):
        for end in range(start + 1, len(pieces) + 1):
            window = pieces[start:end]
            if all(price is not None for _, price in window) and sum(size for size, _ in window) >= need:
                prices.append(sum(price for _, price in window if price is not None))
    return min(prices, default=None)


# A4[3] .2 B4[1] #W6 C8[9] D4[2] E4[2]
EXAMPLE: Row = [(4, 3), (2, 0), (4, 1), (6, None), (8, 9), (4, 2), (4, 2)]


def test_the_worked_example() -> None:
    assert cheapest_window(EXAMPLE, 8) == (0, 3)  # {A, ., B} costs 4 as {D, E} does, and ends first
    assert cheapest_window(EXAMPLE[4:], 8) == (1, 3)
    assert cheapest_window(EXAMPLE, 6) == (1, 3)  # {., B} for 1
    assert cheapest_window(EXAMPLE, 16) == (4, 7)
    assert cheapest_window(EXAMPLE, 17) is None


def test_dtr_on_the_worked_example() -> None:
    # By h / m: B (1/4), then E and D (2/4 each, the last that joined first). 12 bytes are gone before 8 in a row are free.
    relations = Relations()
    sizes = [4, 4, 6, 8, 4, 4]
    pool = Pool(HEURISTICS["local"], relations, sizes)
    arena = Arena(32, layout=dict(enumerate((0, 6, 10, 16, 24, 28))), grain_bytes=1, debug=True)
    for s, price in enumerate((3, 1, 0, 9, 2, 2)):
        relations.add()
        relations.cost_ns[s] = price
        pool.add()
        assert arena.preload(s, sizes[s])
        if s != 2:  # W must stay
            pool.enter(s)
    assert not arena.take([(6, 8, 1)])
    window = Window(pool, arena)
    assert window(1) == [0, 1]  # A and B
    gone = []
    while not arena.take([(6, 8, 1)]):
        gone.append(pool.pick(1))
        arena.free(gone[-1])
        pool.leave_memory(gone[-1])
    assert gone == [1, 5, 4]
    assert [(p.offset, p.size) for p in arena.pieces() if p.owner == FREE] == [(4, 6)]  # B's hole stays a hole
    # Free bytes of 32: 2 + 12 once room was made, 8 less after the request has its block.
    assert (arena.use.fragmentation, arena.use.frag_published) == (6 / 32, 14 / 32)


def random_row(random: Random) -> Row:
    return [
        (random.randint(1, 9), random.choice((None, 0, 0, *range(1, 8)) if random.random() < 0.6 else range(9)))
        for _ in range(random.randint(1, 12))
    ]


def test_the_window_is_the_cheapest_of_all() -> None:
    random = Random(1)
    feasible = at_the_end = 0
    for _ in range(20_000):
        row = random_row(random)
        need = random.randint(1, 30)
        found, lowest = cheapest_window(row, need), brute_window(row, need)
        assert (found is None) == (lowest is None)
        if found is not None:
            window = row[slice(*found)]
            assert sum(size for size, _ in window) >= need
            assert sum(price for _, price in window if price is not None) == lowest
            feasible += 1
            at_the_end += found[1] == len(row)
    assert feasible > 8_000 and at_the_end > 800  # a loop that stops at the last piece would be caught


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.none() | st.integers(0, 1 << 90)), max_size=9), st.integers(1, 1 << 42))
@settings(max_examples=500)
def test_large_numbers_lose_nothing(row: Row, need: int) -> None:
    found, lowest = cheapest_window(row, need), brute_window(row, need)
    assert (None if found is None else sum(price or 0 for _, price in row[slice(*found)])) == lowest


def test_prices_are_exact_and_finite() -> None:
    relations = Relations()
    sizes = [3, 0, 7]
    for _ in sizes:
        relations.add()
    relations.cost_ns[:] = [10**12 + 1, 5, 7]
    for name, heuristic in (HEURISTICS | ADDRESS_HEURISTICS).items():
        pool = Pool(heuristic, relations, sizes)
        for s, clock in enumerate((10, 20, 100)):
            pool.add()
            pool.touch(s, clock)
            pool.enter(s)
        pool.leave(1)
        prices = pool.prices(100)  # storage 2 was touched at this very moment
        assert prices.keys() == {0, 2}, name
        for s, stale in ((0, 90), (2, 1)):
            cost = {"none": 1, "demand": 4 * relations.cost_ns[s]}.get(heuristic.cost, relations.cost_ns[s])
            below = (sizes[s] if heuristic.size else 1) * (stale if heuristic.staleness else 1)
            assert prices[s] == Fraction(cost << 32, below) // 1
        assert pool.evaluations == 2


def test_a_window_leaves_pinned_and_held_pieces_alone() -> None:
    relations = Relations()
    pool = Pool(ADDRESS_HEURISTICS["coop"], relations, [2] * 4)
    arena = Arena(8, grain_bytes=1, debug=True)
    for s in range(4):
        relations.add()
        relations.cost_ns[s] = 1
        pool.add()
        assert arena.preload(s, 2)
        pool.enter(s)
    window = Window(pool, arena)
    assert not arena.take([(9, 4, 1)])
    assert window(5) == [0, 1]
    pool.leave(1)
    assert window(5) == [2, 3]
    pool.leave_memory(2)  # pinned from now on
    assert window(5) == []
    assert arena.inspected == 12


def test_holes_count_for_those_beside_them() -> None:
    arena = Arena(10, layout={0: 1, 1: 4, 2: 6}, grain_bytes=1, debug=True)
    relations = Relations()
    pool = Pool(ADDRESS_HEURISTICS["dte"], relations, [2, 2, 2])
    for s in range(3):
        relations.add()
        relations.cost_ns[s] = 60
        pool.add()
        assert arena.preload(s, 2)
        pool.enter(s)
    # .1 0: 2 .1 1: 2 2: 2 .2
    assert [arena.size_with_holes(s) for s in range(4)] == [4, 3, 4, 0]
    assert WithHoles(pool, arena)(11) == [2]  # 60 / 4, as 0, which joined earlier
    pool.leave(2)
    assert WithHoles(pool, arena)(11) == [0]
    assert arena.inspected == 3 * (3 + 2)


@pytest.mark.parametrize("name", ["coop", "dte"])
def test_rules_that_need_addresses_say_so(name: str) -> None:
    with pytest.raises(InputError, match="addresses"):
        victims(ADDRESS_HEURISTICS[name], Pool(ADDRESS_HEURISTICS[name], Relations(), []), None)
    with pytest.raises(InputError, match="addresses"):
        run(random_graph(1), 1.0, heuristic=f"{name}+bytes")


@pytest.mark.parametrize("name", ADDRESS_HEURISTICS)
def test_what_is_there_from_the_start_may_not_fit_in_blocks(name: str) -> None:
    nothing_runs = Graph("inputs", (), (Value("x", 5),), frozenset({0}), frozenset({0}))
    found = run(nothing_runs, 5, heuristic=name)
    assert found.status is RunStatus.OUT_OF_MEMORY and found.failure is not None
    assert (found.failure.op, found.failure.asked_bytes) == ("the start", 5)
    assert run(nothing_runs, 512, heuristic=name).completed


def test_a_window_needs_an_arena() -> None:
    with pytest.raises(InputError, match="one arena"):
        run(random_graph(1), 1.0, heuristic="coop", allocator="caching")


# The estimate of Coop


def test_producers_are_asked_and_consumers_are_not() -> None:
    # 0 -> 1 -> {2, 3} by one op; 2 -> 4. Costs 1, 10, 100, 100, 1000.
    relations = Relations()
    for cost_ns in (1, 10, 100, 100, 1000):
        relations.cost_ns[relations.add()] = cost_ns
    for s, dep in ((1, 0), (2, 1), (3, 1), (4, 2)):
        relations.link(s, dep)
    relations.siblings |= {2: [3], 3: [2]}
    classes = Producers(relations)

    def evict(s: int) -> None:
        relations.evicted[s] = True
        classes.evicted(s)

    def restore(s: int) -> None:
        relations.evicted[s] = False
        classes.restored(s)

    def price(s: int) -> int:
        total, exact = classes.cost_ns(s, 0.0)
        assert exact
        return total

    evict(4)
    assert [price(s) for s in range(4)] == [0, 0, 0, 0]  # nobody's producer reads or makes 4
    evict(1)
    assert [price(s) for s in (0, 2, 3)] == [0, 10, 10]
    evict(3)  # joins 1, which its producer read
    assert price(2) == 110 + 110  # 1 and 3 are in one class and count twice
    restore(4)
    assert price(4) == 0
    evict(2)  # joins 1 and 3
    assert price(4) == 210
    restore(1)  # its 10 ns leave the class; 2 and 3 stay together
    assert [price(s) for s in (1, 4)] == [0, 200]
    restore(2)
    assert [price(s) for s in (2, 4)] == [100, 0]


def test_lower_bounds_hold_for_the_estimate_of_coop() -> None:
    # The pool picks by lower bounds that it refines; the plain minimum must be the same.
    checked = 0
    for seed in range(40):
        graph = random_graph(seed, max_ops=25)
        low, high = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes
        plain = _Plain(Heuristic("producers", size=True, staleness=True), low + (high - low) // 3)
        with contextlib.suppress(OutOfMemory):
            plain.play(program_of(graph))
        checked += plain.checked
    assert checked > 60


class _Plain(Engine):
    """Holds every choice against scores computed one by one."""

    def __init__(self, heuristic: Heuristic, budget_bytes: int) -> None:
        super().__init__(budget_bytes, heuristic, limit_runs=500)
        self.checked = 0
        choose = self._victims

        def checking(clock: int) -> list[int]:
            members, scores = self.pool.members(), {}
            for s in members:
                assert self.pool.neighborhood is not None
                total = self.pool.neighborhood.cost_ns(s, float("inf"))[0]
                scores[s] = heuristic.score(self.relations.cost_ns[s], total, self.size_bytes[s], clock - self.pool._last[s])
            chosen = choose(clock)
            for s in chosen:
                assert scores[s] == min(scores.values())
                self.checked += 1
            return chosen

        self._victims = checking


# The arena


class ArenaMachine(RuleBasedStateMachine):
    """Random requests against a map of bytes, every invariant checked after each."""

    @initialize(size=st.integers(0, 60), grain=st.sampled_from([1, 4]), cheap=st.none() | st.just(1.0))
    def begin(self, size: int, grain: int, cheap: float | None) -> None:
        self.arena = Arena(size, cheap_below=cheap, grain_bytes=grain, debug=True)
        self.size, self.grain, self.cheap = size // grain * grain, grain, cheap
        self.owner = [FREE] * self.size  # of each byte
        self.touched: set[int] = set()
        self.next = 0
        self.short = False
        self.before: list[int] = []

    def holes(self) -> list[tuple[int, int]]:
        """Start and end of each free run."""
        found, at = [], 0
        while at < self.size:
            end = at
            while end < self.size and self.owner[end] == FREE:
                end += 1
            if end > at:
                found.append((at, end))
            at = end + 1
        return found

    def give(self, storage: int, size_bytes: int, density: float) -> bool:
        """Best fit, on the map."""
        size = -(-size_bytes // self.grain) * self.grain
        fitting = [hole for hole in self.holes() if hole[1] - hole[0] >= size]
        if not fitting:
            return False
        right = self.cheap is not None and density < self.cheap
        smallest = min(end - start for start, end in fitting)
        same = [hole for hole in fitting if hole[1] - hole[0] == smallest]
        start = same[-1][1] - size if right else same[0][0]
        self.owner[start : start + size] = [storage] * size
        self.touched.update(range(start, start + size))
        return True

    @precondition(lambda self: not self.short)
    @rule(sizes=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 40)), min_size=1, max_size=3), workspace=st.integers(0, 12))
    def take(self, sizes: list[tuple[int, int]], workspace: int) -> None:
        blocks = [(self.next + at, size, time_ns) for at, (size, time_ns) in enumerate(sizes)]
        blocks += [(HELD, workspace, 0)] * (workspace > 0)
        self.next += len(sizes)
        given = [s for s, size, time_ns in blocks if self.short or self.give(s, size, time_ns / size) or self._stop()]
        assert self.arena.take(blocks) == (not self.short)
        if self.short:  # nobody evicts: all that has been given goes back
            self.short = False
            kept = given[: len(self.arena._taken)]
            self.arena.settle([s for s in kept if s != HELD])
            self.drop(kept)
        else:
            self.arena.settle()
            self.drop([HELD])

    def _stop(self) -> bool:
        self.short = True
        return False

    def drop(self, storages: list[int]) -> None:
        """Make the bytes of these free on the map."""
        self.owner = [FREE if s in storages else s for s in self.owner]

    @precondition(lambda self: any(s >= 0 for s in self.owner))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted({s for s in self.owner if s >= 0})))
        self.arena.free(s)
        self.drop([s])

    @precondition(lambda self: any(s >= 0 for s in self.owner))
    @rule(data=st.data())
    def window(self, data: st.DataObject) -> None:
        there = sorted({s for s in self.owner if s >= 0})
        price = {s: data.draw(st.none() | st.integers(0, 9)) for s in there} | {FREE: 0}
        need = data.draw(st.integers(1, self.size))
        pieces = list(self.arena.pieces())
        found = cheapest_window([(p.size, price[p.owner]) for p in pieces], need)
        if found is None:
            runs = "".join("x" if price[s] is None else "." for s in self.owner).split("x")
            assert max(map(len, runs)) < need  # never out of memory where a window exists
        else:
            for piece in pieces[slice(*found)]:
                if piece.owner != FREE:
                    self.drop([piece.owner])
                    self.arena.free(piece.owner)
            assert max(end - start for start, end in self.holes()) >= need
            assert self.arena.take([(HELD, need, 0)])
            self.give(HELD, need, 0)
            self.arena.settle()
            self.drop([HELD])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "arena"):
            return
        pieces = list(self.arena.pieces()) if self.size else []
        assert [s for p in pieces for s in [p.owner] * p.size] == self.owner
        assert self.arena.handed_bytes == sum(s != FREE for s in self.owner)
        assert self.arena.reserved_bytes == len(self.touched)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=25)


def test_expensive_from_the_left_cheap_from_the_right() -> None:
    arena = Arena(100, cheap_below=2.0, grain_bytes=10, debug=True)
    assert arena.take([(0, 10, 20), (1, 10, 19), (2, 25, 75), (HELD, 5, 0)])  # the workspace is cheap
    assert [(p.owner, p.offset, p.size) for p in arena.pieces()] == [
        (HELD, 0, 10), (HELD, 10, 30), (FREE, 40, 40), (HELD, 80, 10), (HELD, 90, 10)
    ]  # fmt: skip
    arena.settle([2])  # a second copy
    assert [(p.owner, p.offset) for p in arena.pieces()] == [(0, 0), (FREE, 10), (1, 90)]
    assert arena.reserved_bytes == 60 and arena.handed_bytes == 20


def test_a_request_of_no_bytes_takes_no_piece() -> None:
    arena = Arena(512, debug=True)
    assert arena.preload(0, 0)
    arena.free(0)
    assert arena.handed_bytes == 0
    empty = Arena(511, debug=True)
    assert empty.budget_bytes == 0
    assert not empty.preload(0, 1)


def test_sizes_are_rounded_to_512() -> None:
    arena = Arena(1535, debug=True)
    assert arena.take([(0, 1, 1), (1, 512, 1)])
    assert (arena.budget_bytes, arena.handed_bytes) == (1024, 1024)
    assert not arena.take([(0, 1, 1), (1, 512, 1), (2, 513, 1)]) and arena.short == 1024


def test_writing_anew_scatters() -> None:
    arena = Arena(100, grain_bytes=1, debug=True)
    for s, size in enumerate((20, 10, 5)):
        assert arena.preload(s, size)
    assert arena.take([(7, 15, 1), (8, 30, 1)])
    arena.settle()
    # 0: [0, 20) 1: [20, 30) 2: [30, 35) 7: [35, 50) 8: gone. 0 is written to [50, 70); 1 to its old place, [0, 10); 2 to 1's.
    # 0: [0, 20) 1: [20, 30) 2: [30, 35) 7: [35, 50), the rest is free. 0 goes to [50, 70). 1 goes to [0, 10), the smaller hole;
    # 2 then finds [10, 30) and [70, 100) and takes the former.
    assert arena.rewritten([0, 1, 2], beside=[7]) == {0: 50, 1: 0, 2: 10}
    assert [(p.owner, p.offset) for p in arena.pieces()] == [(1, 0), (2, 10), (FREE, 15), (7, 35), (0, 50), (FREE, 70)]
    full = Arena(30, grain_bytes=1, debug=True)
    for s, size in enumerate((20, 10)):
        assert full.preload(s, size)
    assert full.rewritten([0, 1]) == {0: 0, 1: 20}  # no room for second copies


def test_partitioning_cuts_at_a_quarter_of_the_bytes() -> None:
    ops = (Op("a", (), (0,), 10), Op("b", (0,), (1, 2), 6), Op("c", (1,), (3,), 40), Op("d", (), (4,), 9))
    values = (Value("", 100), Value("", 20), Value("", 60), Value("", 40), Value("", 0))
    # ns per byte: 0.1 for 100 bytes of 220, 0.1 for 60, 0.3 for 20, 1 for 40
    assert cheap_below(program_of(Graph("g", ops, values, frozenset(), frozenset({3})))) == 0.1
    heavy = replace(values[3], size_bytes=460)  # 0.087 for 460 of 640
    assert cheap_below(program_of(Graph("g", ops, (*values[:3], heavy, values[4]), frozenset(), frozenset({3})))) == 40 / 460
    large = replace(values[1], size_bytes=500)  # 0.012 for 500 of 700
    assert cheap_below(program_of(Graph("g", ops, (values[0], large, *values[2:]), frozenset(), frozenset({3})))) == 6 / 500
    heavier = replace(values[3], size_bytes=20)  # 2 for 20, 0.3 for 500, 0.1 for 160: a quarter of the 680 bytes is 170
    longer = replace(ops[1], time_ns=150)
    costly = Graph(
        "g", (ops[0], longer, *ops[2:]), (values[0], large, values[2], heavier, values[4]), frozenset(), frozenset({3})
    )
    assert cheap_below(program_of(costly)) == 0.3
    assert cheap_below(program_of(Graph("g", ops[:0], (), frozenset(), frozenset()))) == 0


# The caching allocator


def cached(budget_mib: float) -> CachingAllocator:
    return CachingAllocator(int(budget_mib * MIB), debug=True)


def test_segments_are_those_of_pytorch() -> None:
    # c10/cuda/CUDACachingAllocator: 2 MiB for up to 1 MiB, 20 MiB below 10 MiB, else rounded up to 2 MiB.
    for size, segment in (
        (1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB - 511, 10), (10 * MIB, 10), (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ):  # fmt: skip
        allocator = cached(100)
        assert allocator.preload(0, size)
        assert allocator.reserved_bytes == segment * MIB, size


def test_blocks_are_split_where_enough_is_left() -> None:
    allocator = cached(100)
    assert allocator.take([(0, MIB - 512, 1), (1, MIB, 1), (2, 512, 1)])  # one small segment: all 2 MiB are used
    allocator.settle()
    assert allocator.reserved_bytes == allocator.handed_bytes == 2 * MIB
    # 19 of 20 MiB: the 1 MiB left over is not more than 1 MiB, so the block is not split.
    assert allocator.take([(3, 9 * MIB, 1), (4, 9 * MIB, 1)])
    allocator.settle()
    assert allocator.handed_bytes == (2 + 9 + 9) * MIB
    allocator.free(4)
    allocator.free(3)
    assert allocator.preload(5, 19 * MIB)
    assert allocator.handed_bytes == (2 + 20) * MIB


def test_freed_blocks_serve_best_fit_and_merge() -> None:
    allocator = cached(40)
    assert allocator.take([(s, size * MIB, 1) for s, size in enumerate((4, 3, 5, 8))])  # one segment of 20 MiB, full
    allocator.settle()
    allocator.free(0)
    allocator.free(2)
    assert allocator.size_with_holes(1) == 12 * MIB
    assert allocator.preload(4, 4 * MIB)  # where 0 was: the smaller of two
    allocator.free(1)
    assert allocator.preload(5, 8 * MIB)  # 1's and 2's blocks in one
    assert allocator.reserved_bytes == 20 * MIB


def test_small_and_large_requests_share_no_segment() -> None:
    allocator = cached(21)
    assert allocator.preload(0, 2 * MIB)
    assert not allocator.preload(1, 512)  # 18 MiB are free in the large segment, but 2 MiB more cannot be reserved
    assert allocator.take([(1, 18 * MIB, 1)])


def test_idle_segments_go_when_memory_is_short() -> None:
    allocator = cached(40)
    assert allocator.take([(0, 12 * MIB, 1), (1, 12 * MIB, 1), (2, 12 * MIB, 1)])
    allocator.settle()
    allocator.free(0)
    allocator.free(2)
    assert not allocator.take([(3, 30 * MIB, 1)])  # segment 1 is in use; the other two have been given back
    allocator.free(1)
    assert allocator.take([(3, 30 * MIB, 1)])
    allocator.settle()
    assert allocator.reserved_bytes == 36 * MIB
    assert allocator.use.shortages == 1
    assert allocator.use.frag_published == 1.0
    assert allocator.use.fragmentation == 0.25


class CachingMachine(RuleBasedStateMachine):
    """Random requests, every invariant checked after each; blocks never overlap, and what fits is never refused."""

    @initialize(budget_mib=st.integers(2, 64))
    def begin(self, budget_mib: int) -> None:
        self.allocator = cached(budget_mib)
        self.there: dict[int, int] = {}
        self.next = 0

    @rule(size=st.sampled_from([1, 700, MIB // 2, MIB, MIB + 1, 5 * MIB, 11 * MIB, 21 * MIB]) | st.integers(1, 30 * MIB))
    def take(self, size: int) -> None:
        fits = self.allocator.take([(self.next, size, 1)])
        if fits:
            self.there[self.next] = size
        else:
            free = self.allocator._small if size <= MIB else self.allocator._large
            assert all(piece.size < size for piece in free)
            used = {piece.offset >> FAR for piece in self.allocator._piece.values()}
            reserved = sum(self.allocator._segments[number][1] for number in used)
            segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            assert reserved + segment > self.allocator.budget_bytes
        self.allocator.settle()
        self.next += 1

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted(self.there)))
        del self.there[s]
        self.allocator.free(s)

    @invariant()
    def blocks_are_apart(self) -> None:
        if not hasattr(self, "allocator"):
            return
        pieces = self.allocator._piece
        assert pieces.keys() == self.there.keys()
        spans = sorted((piece.offset, piece.offset + piece.size) for piece in pieces.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(pieces[s].size >= size for s, size in self.there.items())
        assert sum(self.there.values()) <= self.allocator.handed_bytes <= self.allocator.reserved_bytes
        assert self.allocator.reserved_bytes <= self.allocator.budget_bytes


TestCaching = CachingMachine.TestCase
TestCaching.settings = settings(max_examples=60, stateful_step_count=30)


# Runs under address budgets


class Watch:
    """A driver that keeps its own map of who lies where, and objects where two overlap or something leaves the arena."""

    def __init__(self, graph: Graph, allocator: Allocator) -> None:
        self.graph, self.allocator, self.there = graph, allocator, set(graph.resident)

    def compute(self, op: int) -> None:
        self.there.update(self.graph.ops[op].outputs)
        spans = [(p.offset, p.offset + p.size) for _, p in self.allocator._taken]
        sized = {s: piece for s, piece in self.allocator._piece.items() if s in self.there}
        assert sized.keys() == self.allocator._piece.keys()
        spans += [(p.offset, p.offset + p.size) for p in sized.values()]
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "two storages overlap"
        assert all(sized[s].size >= self.graph.values[s].size_bytes for s in sized)
        used = sum(end - start for start, end in spans)
        step = self.graph.ops[op]
        needed = sum(self.graph.values[v].size_bytes for v in step.outputs) + step.workspace_bytes
        assert sum(p.size for _, p in self.allocator._taken) >= needed
        assert used <= self.allocator.reserved_bytes <= self.allocator.budget_bytes
        if isinstance(self.allocator, Arena):
            assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= self.allocator.budget_bytes)

    def free(self, storage: int) -> None:
        self.there.remove(storage)


RULES = {"dtr": HEURISTICS["dtr"], "lru": HEURISTICS["lru"]} | ADDRESS_HEURISTICS


@given(
    graphs(max_ops=10, effect=True),
    st.sampled_from([("arena", h) for h in RULES] + [("coop", h) for h in RULES] + [("caching", "dtr"), ("caching", "dte")]),
    st.sampled_from(["eager", "ignore", "banish"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=500)
def test_no_run_leaves_its_addresses(
    graph: Graph, how: tuple[str, str], release: str, reclaim: bool, data: st.DataObject
) -> None:
    name, heuristic = how
    scale = 3 * MIB if name == "caching" else 1
    values = tuple(replace(v, size_bytes=v.size_bytes * scale) for v in graph.values)
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes * scale) for op in graph.ops)
    graph = Graph("scaled", ops, values, graph.resident, graph.outputs)
    low, high = least_bytes(graph), 2 * simulate(graph, keep_all(graph)).peak_bytes
    budget_bytes = max(1, data.draw(st.integers(low, max(low, high))))
    program = program_of(graph)
    if name == "caching":
        allocator: Allocator = CachingAllocator(budget_bytes, debug=True)
    else:
        cheap = cheap_below(program) if name == "coop" else None
        allocator = Arena(budget_bytes, cheap_below=cheap, grain_bytes=1, debug=True)
    engine = Engine(
        budget_bytes, RULES[heuristic], release=Release(release), reclaim=reclaim, limit_runs=300, allocator=allocator,
        driver=Watch(graph, allocator),
    )  # fmt: skip
    try:
        engine.play(program)
    except Thrashed:
        return
    except OutOfMemory as error:
        # Nothing else could have gone: no run of pieces without something held is as long as the block asked for.
        if isinstance(allocator, Arena):
            stays = [p.owner == HELD or p.owner in error.held for p in allocator.pieces()]
            row: Row = [(p.size, None if s else 0) for p, s in zip(allocator.pieces(), stays, strict=True)]
            assert brute_window(row, error.short_bytes or 0) is None
        return
    trace = simulate(graph, from_json(engine.steps))  # raises where the schedule is not valid
    assert (trace.time_ns, trace.peak_bytes) == (engine.clock - 1, engine.peak_bytes)
    assert trace.peak_bytes <= allocator.reserved_bytes <= budget_bytes
    use = allocator.use
    assert (use.shortages == 0) == (use.fragmentation is None) == (engine.counters.searches == 0)
    if use.fragmentation is not None and use.frag_published is not None:
        assert 0 <= use.fragmentation < use.frag_published <= 1


def scaled(graph: Graph, factor: int = 512) -> Graph:
    """The same graph, so large that rounding to 512 bytes changes nothing."""
    values = tuple(replace(v, size_bytes=v.size_bytes * factor) for v in graph.values)
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes * factor) for op in graph.ops)
    return Graph(graph.name, ops, values, graph.resident, graph.outputs)


def test_a_window_makes_room_where_single_victims_leave_holes() -> None:
    # a b c d fill the arena, 2 units each; `big` asks for 4 in a row. Cost / (size * staleness) by then: a 1 / (2 * 81),
    # b 30 / (2 * 51), c 1 / (2 * 50), d infinite. DTR takes a, then c, which lies elsewhere, then b. The cheapest window is
    # {a, b}.
    names = zip("abcd", (1, 30, 1, 50), strict=True)
    ops = (
        *(Op(name, (), (v,), time_ns) for v, (name, time_ns) in enumerate(names)),
        Op("big", (), (4,), 1),
        Op("last", (0, 1, 2, 3), (5,), 1),
    )
    values = tuple(Value(name, size * 512) for name, size in zip("abcdef", (2, 2, 2, 2, 4, 0), strict=True))
    graph = Graph("holes", ops, values, frozenset(), frozenset({5}))
    start = (Compute(0), Compute(1), Compute(2), Compute(3))
    bytes_, arena, coop = (run(graph, 4096, heuristic=rule) for rule in ("dtr", "dtr+arena", "coop+arena"))
    assert bytes_.schedule[:7] == (*start, Free(0), Free(2), Compute(4))
    assert arena.schedule[:8] == (*start, Free(0), Free(2), Free(1), Compute(4))
    assert coop.schedule[:7] == (*start, Free(0), Free(1), Compute(4))
    assert (bytes_.time_ns, arena.time_ns, coop.time_ns) == (84 + 2, 84 + 32, 84 + 31)
    # `big` was the only shortage: of 8 units, 6 and 4 were free, 4 of which it took.
    assert arena.addresses is not None and coop.addresses is not None
    assert (arena.addresses.shortages, arena.addresses.frag_published, arena.addresses.fragmentation) == (1, 6 / 8, 2 / 8)
    assert (coop.addresses.shortages, coop.addresses.frag_published, coop.addresses.fragmentation) == (1, 4 / 8, 0)
    assert (arena.counters.searches, arena.counters.evaluations) == (3, 4 + 3 + 2)
    assert (coop.counters.searches, coop.counters.evaluations, coop.counters.inspected) == (1, 4, 4)


def test_the_default_allocator_goes_with_the_rule() -> None:
    graph = scaled(random_graph(3, max_ops=20))
    for heuristic, allocator in (("dtr", "bytes"), ("dte", "arena"), ("coop", "coop"), ("coop_e_star", "coop")):
        done = run(graph, 1.0, heuristic=heuristic)
        assert (done.allocator, done.rule) == (allocator, heuristic)
        assert (done.addresses is None) == (allocator == "bytes")


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_rules_name_their_allocator(allocator: str) -> None:
    graph = scaled(random_graph(3, max_ops=20), 1 << 22)
    spelt = run(graph, 1 << 30, heuristic="dtr", allocator=allocator, reclaim=True)
    named = run(graph, 1 << 30, heuristic=spelt.rule)
    assert spelt.rule == "dtr" + f"+{allocator}" * (allocator != "bytes") + "+reclaim"
    assert (named.rule, named.allocator, named.schedule, named.addresses) == (
        spelt.rule, spelt.allocator, spelt.schedule, spelt.addresses
    )  # fmt: skip
    assert named.row()["method"] == f"online:{spelt.rule}"


def test_unknown_allocators_are_named() -> None:
    with pytest.raises(InputError, match="unknown allocator 'slab'; there are: bytes, caching, coop, "):
        run(random_graph(1), 1.0, allocator="slab")


def test_without_pressure_every_allocator_keeps_all() -> None:
    for seed in range(20):
        graph = scaled(random_graph(seed, max_ops=12), MIB)
        for allocator in ALLOCATORS:
            done = run(graph, 1 << 40, heuristic="dtr", allocator=allocator)
            assert done.schedule == keep_all(graph)
            if done.addresses is not None:
                assert done.addresses.shortages == 0
                assert done.peak_bytes is not None and done.addresses.reserved_bytes >= done.peak_bytes


def test_address_runs_say_what_was_short() -> None:
    # x lies behind a, which goes. It must stay, as f reads it; 2 units are free on either side, and f asks for 3.
    ops = (Op("a", (), (0,), 1), Op("x", (0,), (1,), 1), Op("f", (1,), (2,), 1), Op("g", (1, 2), (3,), 1))
    values = tuple(Value(name, size * 512) for name, size in zip("axfg", (2, 1, 3, 0), strict=True))
    graph = Graph("middle", ops, values, frozenset(), frozenset({3}))
    assert run(graph, 5 * 512).completed
    for heuristic in ("dtr+arena", "coop+arena"):
        done = run(graph, 5 * 512, heuristic=heuristic)
        assert done.status is RunStatus.OUT_OF_MEMORY
        assert done.failure is not None
        assert (done.failure.op, done.failure.short_bytes, done.failure.held) == ("f", 3 * 512, (("x", 512),))
        assert done.plan().notes["allocator"] == "arena"
        assert run(graph, 6 * 512, heuristic=heuristic).completed


def test_residents_that_do_not_fit_when_rounded() -> None:
    values = (*(Value(f"w{v}", 1) for v in range(3)), Value("y", 1))
    graph = Graph("small", (Op("f", (0, 1, 2), (3,), 1),), values, frozenset(range(3)), frozenset({3}))
    done = run(graph, 1024, heuristic="coop")
    assert done.failure is not None
    assert (done.failure.op, done.failure.short_bytes) == ("the start", 512)
    assert run(graph, 2048, heuristic="coop").completed


def test_logs_replay_in_address_budgets(data: Path) -> None:
    program = read_program(data / "dtr_logs" / "resnet32.log.gz")
    plain = replay_log(program, 0.5)
    for heuristic, allocator in (("dtr", "arena"), ("dtr", "caching"), ("coop", None)):
        done = replay_log(program, 0.5, heuristic=heuristic, allocator=allocator)
        assert done.status is RunStatus.COMPLETED
        assert done.addresses is not None
        assert done.peak_bytes <= done.addresses.reserved_bytes <= done.budget_bytes == plain.budget_bytes
        assert done.addresses.shortages > 0
    assert plain.addresses is None
    with pytest.raises(InputError, match="a log has no residents"):
        replay_log(program, 0.5, allocator="coop_moving")


# The ablation

ABLATION = {
    "Coop": "coop",
    "- partitioning": "coop+arena",
    "- in place": "coop+coop_moving",
    "- window": "dte+coop",
    "DTE": "dte+arena_moving",
    "DTR": "dtr+arena_moving",
}


def test_each_part_of_coop_can_be_left_out() -> None:
    # On graphs under budgets that bite, every row of the ablation completes on some and differs from Coop on some.
    completed: dict[str, int] = defaultdict(int)
    differs: dict[str, int] = defaultdict(int)
    for seed in range(40):
        graph = scaled(random_graph(seed, max_ops=40))
        low, high = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes
        budget_bytes = (low + high) // 2
        found = {name: run(graph, budget_bytes, heuristic=rule, thrash_limit=100) for name, rule in ABLATION.items()}
        for name, done in found.items():
            completed[name] += done.completed
            differs[name] += done.schedule != found["Coop"].schedule
            assert done.addresses is not None and done.addresses.reserved_bytes <= budget_bytes
    assert min(completed[name] for name in ABLATION) > 10, completed
    assert min(differs[name] for name in ABLATION if name != "Coop") > 5, differs
