"""Local search for graphs without a backward pass: list walks and annealing, each going on from what the other found.

List walks decide by when a value is read next, which says little in such graphs, so annealing (in graph order) finds what they do
not. It ends in other places for other draws, so it begins anew again and again. In between it goes on a few short times from the
cheapest sequence known, which may be one that only walks come by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.process.clock import now_s
from planner.walks.annealing import COOLER, MEND, ROUNDS, Annealer, Round, anneal, useful
from planner.walks.walk_search import WalkSearch

WALKS = 8  # one of so many parts of the work is for walks: on wide graphs an op takes them as long as so many moves
LONG_MOVES = 8_000_000  # of an annealing that begins anew; they count as as much work. More of them find more than longer ones
SHORT_MOVES = 1_000_000  # and of those in between
MEND_MOVES = 4_000_000  # and of one from a sequence that does not fit


class AnnealedWalks(WalkSearch):
    """A walk search that anneals, too; it is ``hurried`` where the clock cools that faster."""

    def __init__(self, graph: Graph, budget_bytes: int, seed: int) -> None:
        super().__init__(graph, budget_bytes, seed)
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seed = seed
        self._annealed = self._short_runs = self._mended = self._owed_moves = 0

    def apart(self, seed: int) -> WalkSearch:
        """As for walks alone."""
        other = super().apart(seed)
        assert isinstance(other, AnnealedWalks)
        other._seed = seed
        return other

    def improve(self, work: int, *, deadline: float = math.inf) -> None:
        """As for walks alone; annealing does its part of the work when there is enough for once."""
        super().improve(work // WALKS, deadline=deadline)
        self._owed_moves += work
        while now_s() < deadline:
            best = self.runs if self._short_runs < len(COOLER) else None
            moves = LONG_MOVES if best is None else SHORT_MOVES
            if self._owed_moves < moves:
                break
            self._owed_moves -= moves
            if best is None:
                self._short_runs = 0
                self._anneal(range(self._ops), moves, ROUNDS, deadline)
            else:
                self._anneal(best.tolist(), moves, (COOLER[self._short_runs],), deadline)
                self._short_runs += 1

    def follow(self, runs: Sequence[int], work: int = 0, *, held: bool = False, deadline: float = math.inf) -> None:
        """As for walks alone; annealing does its part of the work, from the same sequence."""
        super().follow(runs, work // WALKS, held=held, deadline=deadline)
        for _ in range(work // MEND_MOVES):
            if now_s() < deadline:
                self._anneal(runs, MEND_MOVES, (MEND[self._mended % len(MEND)],), deadline)
                self._mended += 1

    def go_on(self, work: int, *, deadline: float = math.inf) -> None:
        """Improve alone: a sequence that does not fit is for annealing to mend."""
        self.improve(work, deadline=deadline)

    def _anneal(self, ops: Sequence[int], moves: int, rounds: Sequence[Round], deadline: float) -> None:
        self._annealed += 1
        annealer = Annealer(self._graph, ops, self._budget_bytes, self._seed + self._annealed, keep_order=True)
        found = Incumbent(self._graph, self._budget_bytes, gap=0.0, time_limit_s=deadline - now_s())
        try:
            anneal(found, annealer, moves, rounds)
        finally:  # on Ctrl-C too
            self.hurried |= "cut_short" in found.notes
            if annealer.best is not None and annealer.best_ns < self.time_ns:
                super().follow(useful(self._graph, annealer.best))
