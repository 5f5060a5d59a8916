"""Local search over the weights that steer list walks: finds cheap schedules where no proof is near."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from graphs.ir import Graph
from planner.list_walk import Hold, ListWalk

GRIPS = (10.0, 100.0, 1000.0)  # how much more a walk values what a guide says to hold


class WeightSearch:
    """Keeps the cheapest walk so far and changes the weights it came from. Repeats exactly for the same calls and seed.

    runs     the cheapest sequence found, None before one is
    time_ns  of that sequence; infinite before
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int) -> None:
        self._walk = ListWalk(graph, budget_bytes)
        self._graph = graph
        self._time = [op.time_ns for op in graph.ops]
        self._random = random.Random(seed)
        self._weights = [1.0] * len(graph.values)
        self._hold: Hold = ()
        self._grip = 1.0
        self.runs: list[int] | None = None
        self.time_ns: float = math.inf

    def start(self) -> None:
        """The plain walk, nothing held."""
        self._try([1.0] * len(self._graph.values), (), 1.0)

    def guide(self, hold: Hold) -> None:
        """Walk while holding on to ``hold``, with plain weights and with the best so far."""
        plain = [1.0] * len(self._graph.values)
        for weights in [plain] if self._weights == plain else [plain, self._weights]:
            for grip in GRIPS:
                self._try(weights, hold, grip)

    def improve(self, work: int) -> None:
        """Try changed weights until about ``work`` ops have run (in walks, not in the world)."""
        while work > 0 and self.runs is not None:
            work -= self._try(self._changed(self.runs), self._hold, self._grip)

    def _changed(self, runs: Sequence[int]) -> list[float]:
        """Weights near the best: an op that runs again made dearer to lose, or noise over a stretch of ops."""
        rng = self._random
        weights = list(self._weights)
        again = [i for i, count in Counter(runs).items() if count > 1]
        if again and rng.random() < 0.5:
            stretch, factors = [rng.choice(again)], [math.exp(rng.uniform(0, 4))]
        else:
            at = rng.randrange(len(self._time))
            stretch = list(range(at, min(len(self._time), at + 2 ** rng.randrange(6))))
            spread = rng.choice((0.3, 1.0, 3.0))
            factors = [math.exp(rng.gauss(0, spread)) for _ in stretch]
        for i, factor in zip(stretch, factors, strict=True):
            for v in self._graph.ops[i].outputs:
                weights[v] *= factor
        return weights

    def _try(self, weights: list[float], hold: Hold, grip: float) -> int:
        """Walk once and keep what is no worse. Returns the number of ops the walk ran."""
        limit = 10 * len(self._time) if self.runs is None else 2 * len(self.runs)
        runs = self._walk(weights=weights, hold=hold, grip=grip, run_limit=limit)
        if runs is None:
            return limit
        time_ns = sum(map(self._time.__getitem__, runs))
        if time_ns <= self.time_ns:
            self.runs, self.time_ns = runs, time_ns
            self._weights, self._hold, self._grip = weights, hold, grip
        return len(runs)
