"""Simulated annealing on sequences of ops, whose order is free: after FastSA, with another objective.

Source: Imanishi, Xu, Takagi, Wang, Castillo, "A fast heuristic to optimize time-space tradeoff for large models" (NeurIPS 2023):
the state, a row of slots, each an op or empty, and the moves: add a run of an op, remove one, shift one.

Theirs weighs time with the peak; this one minimises

    time + price · sum over runs of the bytes beyond the budget

which sees every run that is too large, not only the largest. The price rises while the temperature falls: first orders of ops are
told apart by what they hold too much, then re-runs take what is left.

There are a few empty slots between ops instead of the paper's 2^20 in all, so that what a move changes is a short stretch of an
array; when places get crowded, ops are spread anew. Adding aims at gaps between two reads of a value, where it can help, and
shifting at slots from which the run serves the same reads, so that few moves are tried in vain. The moves are in
``planner.walks.annealing_moves``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.process.flat import Ints, begins, reads_and_makes
from planner.process.loading import TINY, load_once
from planner.schedule import with_frees

CHUNK = 5_000  # moves between two looks at the clock
LOOKS = 20  # a round at the result
# Share of the moves; temperature at the beginning and the end, in mean times of an op; price at the beginning and the end, in
# mean times of an op for a run that takes twice the budget.
Round = tuple[float, float, float, float, float]
_HOT = (0.25, 3.0, 0.02, 5.0, 500.0)
ROUNDS = (_HOT, _HOT, _HOT, (0.25, 0.5, 0.005, 30.0, 500.0))
# One of these at a time is for going on from a sequence that is good already: no temperature is right for all graphs.
COOLER = tuple((1.0, hot, 0.005, price, 500.0) for price in (30.0, 10.0, 60.0) for hot in (3.0, 1.0, 0.3, 0.1))
MEND = tuple((1.0, hot, 0.005, 30.0, 500.0) for hot in (0.3, 1.0, 0.1))  # and for one that holds too much
MISSED = (5.0, 0.02, 100.0, 1_000.0)  # temperatures and prices of a round after one that found nothing
LAST: Round = (0.1, 0.05, 0.005, 500.0, 10_000.0)  # where nothing fits after all of them, as often as not by little
SPREAD = 4  # slots per op after spreading
SPARE = 6  # runs of an op that can be added before ops are spread anew
FULL = 0.6  # share of occupied slots at which they are
CROWDED = 0.5  # … and share of the moves that found no empty slot


class Annealer:
    """A sequence under annealing. Repeats exactly for the same calls and seed.

    best, best_ns  the cheapest sequence met that fits, None before; its time
    """

    def __init__(self, graph: Graph, ops: Sequence[int], budget_bytes: int, seed: int, *, keep_order: bool) -> None:
        """``ops`` must be a valid sequence; ``keep_order`` leaves the first run of every op where it is among the others."""
        load_once(_anneal_once)
        flat = reads_and_makes(graph)
        *_, producer, size = flat
        # Draws and effects keep their order, so first runs of such ops stay; the latter never run again.
        fixed = np.array([keep_order or op.random or op.effect for op in graph.ops], np.bool_)
        again = [v for v, op in enumerate(graph.ops) if not op.effect and any(size[x] for x in op.outputs)]
        self._budget_bytes = budget_bytes
        self._base = graph.resident_bytes - budget_bytes
        self._wanted = np.array([x for x in sorted(graph.outputs) if producer[x] >= 0], np.int64)
        self._graph = (
            *flat,
            np.array([op.time_ns for op in graph.ops], np.int64),
            np.array([op.workspace_bytes for op in graph.ops], np.int64),
            fixed,
            np.flatnonzero(~fixed),
            np.array(again, np.int64),
        )
        self._unit_ns = max(1, graph.keep_all_time_ns) / max(1, len(graph.ops))
        self._random, self._draws = np.random.default_rng(seed), np.empty(0)
        self.best: list[int] | None = None
        self.best_ns = np.iinfo(np.int64).max
        self.spread(ops)

    @property
    def sequence(self) -> list[int]:
        """The ops in the order they run."""
        return _ops_of(self._state.slot)

    @property
    def peak_bytes(self) -> int:
        """Of the current sequence."""
        occupied = self._state.memory[self._state.slot >= 0]
        return int(occupied.max(initial=self._base)) + self._budget_bytes

    @property
    def time_ns(self) -> int:
        """Of the current sequence."""
        return int(self._state.totals[self._moves.TIME])

    @property
    def excess_bytes(self) -> int:
        """Of the current sequence: the sum over its runs of what they hold beyond the budget."""
        return int(self._state.totals[self._moves.EXCESS])

    def spread(self, ops: Sequence[int]) -> None:
        """Begin (anew) with this sequence, evenly spread over the slots."""
        from planner.walks import annealing_moves  # imports numba, which takes time: where nothing is annealed, it is not needed

        self._moves = annealing_moves
        in_rows, inputs, out_rows, _, producer, *_ = self._graph
        sequence, slots = np.array(ops, np.int64), max(16, SPREAD * len(ops))
        most_runs = np.bincount(sequence, minlength=in_rows.size - 1) + SPARE
        most_reads = np.ones(producer.size, np.int64)
        np.add.at(most_reads, inputs, np.repeat(most_runs, np.diff(in_rows)))
        run_rows, read_rows = begins(most_runs), begins(most_reads)
        changes = 4 * int((np.diff(in_rows) + np.diff(out_rows)).max(initial=0)) + 8
        self._state = annealing_moves.State(
            *self._graph,
            np.empty(slots, np.int64),
            np.empty(slots, np.int64),
            run_rows,
            np.empty(most_runs.size, np.int64),
            np.empty(run_rows[-1], np.int64),
            read_rows,
            np.empty(most_reads.size, np.int64),
            np.empty(read_rows[-1], np.int64),
            np.empty(most_runs.size, np.int64),
            np.empty(most_runs.size, np.int64),
            np.empty(slots, np.int64),
            np.empty(changes, np.int64),
            np.empty(changes, np.int64),
            np.array([0, 0, self.best_ns, 0, 0, 0]),
        )
        annealing_moves.fill(self._state, sequence, SPREAD, self._wanted, self._base)
        self._take_best()

    def anneal(self, moves: int, hot: float, cold: float, price: float, dear: float) -> None:
        """Try ``moves`` moves while the temperature falls and the price rises, geometrically.

        hot, cold    temperature at the beginning and the end, in mean times of an op
        price, dear  price at the beginning and the end, in mean times of an op for a run that takes twice the budget (less what
                     is resident)
        """
        per_byte_ns = self._unit_ns / max(1, -self._base)
        heats, prices = (hot * self._unit_ns, cold * self._unit_ns), (price * per_byte_ns, dear * per_byte_ns)
        missing = moves * self._moves.DRAWS - self._draws.size
        if missing > 0:
            self._draws = np.concatenate((self._draws, self._random.random(missing)))
        self._draws = self._draws[self._moves.anneal(self._state, self._draws, moves, *heats, *prices) :]
        self._take_best()
        names, totals, slot = self._moves, self._state.totals, self._state.slot
        crowded = totals[names.FULL] > 0 or totals[names.CROWDED] > CROWDED * moves
        totals[names.CROWDED] = 0
        if crowded or np.count_nonzero(slot >= 0) > FULL * slot.size:
            self.spread(self.sequence)

    def _take_best(self) -> None:
        found_ns = int(self._state.totals[self._moves.BEST])
        if found_ns < self.best_ns:
            self.best, self.best_ns = _ops_of(self._state.best), found_ns


def _anneal_once() -> None:
    Annealer(TINY, [0], 1, 0, keep_order=True).anneal(1, 1.0, 1.0, 1.0, 1.0)


def _ops_of(slot: Ints) -> list[int]:
    ops: list[int] = slot[slot >= 0].tolist()
    return ops


def useful(graph: Graph, ops: Sequence[int]) -> list[int]:
    """The sequence without repeats that nothing reads."""
    first: set[int] = set()
    again = []
    for v in ops:
        again.append(v in first)
        first.add(v)
    needed = set(graph.outputs)
    kept = []
    for v, repeat in zip(reversed(ops), reversed(again), strict=True):
        op = graph.ops[v]
        if not repeat or not needed.isdisjoint(op.outputs):
            kept.append(v)
            needed.difference_update(op.outputs)
            needed.update(op.inputs)
    return kept[::-1]


def anneal(search: Incumbent, annealer: Annealer, moves: int, rounds: Sequence[Round] = ROUNDS) -> None:
    """Rounds of annealing, each from the best sequence so far, until the search is done; the best is offered at the end.

    moves  in all, and a tenth more where nothing fits after them
    """
    tried = 0
    total = sum(share for share, *_ in (rounds if annealer.best is not None else (*rounds, LAST)))
    try:
        for number, (share, *falling) in enumerate((*rounds, LAST), start=1):
            is_last = number > len(rounds)
            if annealer.best is not None:
                if is_last:
                    break
                annealer.spread(annealer.best)
            elif number > 1 and not is_last:
                falling = list(MISSED)
            hot, cold, price, dear = falling
            done, looked = 0.0, 0.0  # of this round
            before = 0
            round_began = now_s()
            round_s, round_moves = share / total * search.time_limit_s, max(CHUNK, int(share * moves))
            while done < 1:
                before += CHUNK
                clock_share = (now_s() - round_began) / round_s if round_s else 1.0
                search.tell_cut_short(clock_share > before / round_moves)  # cooled by the clock
                next_ = min(1.0, max(before / round_moves, clock_share))
                annealer.anneal(
                    CHUNK,
                    hot * (cold / hot) ** done,
                    hot * (cold / hot) ** next_,
                    price * (dear / price) ** done,
                    price * (dear / price) ** next_,
                )
                done = next_
                tried += CHUNK
                least = search.notes.get("smallest_peak_bytes", annealer.peak_bytes)
                search.notes["smallest_peak_bytes"] = min(least, annealer.peak_bytes)
                if done >= looked or annealer.best_ns <= (1 + search.gap) * search.searched_ns:
                    looked = done + 1 / LOOKS
                    _offer(search, annealer, f"round {number}")
                if search.done():
                    return
    finally:
        search.notes["moves"] = tried
        _offer(search, annealer, "annealing")
    if search.best is None:
        search.notes["stopped"] = "annealing found no schedule that fits"


def _offer(search: Incumbent, annealer: Annealer, phase: str) -> None:
    """Offer the best sequence where it is news."""
    if annealer.best is not None and search.wants(search.budget_bytes, annealer.best_ns):
        search.offer(with_frees(search.graph, useful(search.graph, annealer.best)), phase)
