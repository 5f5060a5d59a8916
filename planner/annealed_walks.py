"""Local search for graphs without a backward pass: list walks and annealing, each going on from what the other found.

List walks decide by when a value is read next, which says little in such graphs, so annealing (in graph order) finds what they do
not. It ends in other places for other draws, so it begins anew again and again, and in between a few short times with the
cheapest sequence known, which may be one that only walks come by.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from graphs.ir import Graph
from planner.annealing import Annealer, anneal, useful
from planner.incumbent import Incumbent
from planner.walk_search import WalkSearch

LONG_MOVES = 8_000_000  # of an annealing that begins anew; they count as as much work. More of them find more than longer ones
SHORT_RUNS, SHORT_MOVES = 8, 1_000_000  # and of so many in between


class AnnealedWalks(WalkSearch):
    """A walk search half of whose work is annealing, which is ``hurried`` where the clock cools it faster."""

    def __init__(self, graph: Graph, budget_bytes: int, seed: int) -> None:
        super().__init__(graph, budget_bytes, seed)
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seed = seed
        self._annealed = self._short_runs = self._owed_moves = 0

    def improve(self, work: int, *, deadline: float = math.inf) -> None:
        """As for walks alone. Half of the work is annealing's, which does it when there is enough for once."""
        super().improve(work // 2, deadline=deadline)
        self._owed_moves += work - work // 2
        while time.perf_counter() < deadline:
            best = self.runs if self._short_runs < SHORT_RUNS else None
            moves = LONG_MOVES if best is None else SHORT_MOVES
            if self._owed_moves < moves:
                break
            self._owed_moves -= moves
            self._short_runs = 0 if best is None else self._short_runs + 1
            self._anneal(range(self._ops) if best is None else best.tolist(), moves, deadline)

    def _anneal(self, ops: Sequence[int], moves: int, deadline: float) -> None:
        self._annealed += 1
        annealer = Annealer(self._graph, ops, self._budget_bytes, self._seed + self._annealed, keep_order=True)
        found = Incumbent(self._graph, self._budget_bytes, gap=0.0, time_limit_s=deadline - time.perf_counter())
        try:
            anneal(found, annealer, moves)
        finally:  # on Ctrl-C too
            self.hurried |= "cut_short" in found.notes
            if annealer.best is not None and annealer.best_ns < self.time_ns:
                self.follow(useful(self._graph, annealer.best))
