"""Local search over the weights that steer list walks: finds cheap schedules where no proof is near."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphs.ir import Graph
from planner.list_walk import Floats, Hold, Ints, ListWalk, Walked

GRIPS = (10.0, 100.0, 1000.0)  # how much more a walk values what a guide says to hold
FAR = (0.5, 1.0, 2.0)  # exponents of the distance to the next use that are tried at the start
BACKWARD = (1.0, 30.0)  # factors of what the backward pass makes: by then most of what it came from is gone


OVERHEAD = 300  # work of starting a walk, in ops run
STAY = 0.4  # chance to blame a missed value itself and not what it was made from
LIMIT = 1e100  # of a weight, either way


@dataclass(frozen=True, slots=True)
class _Lead:
    """A way to steer, and the walk it gave."""

    weights: Floats
    hold: Hold
    grip: float
    walked: Walked

    @property
    def merit(self) -> tuple[int, float]:
        """Less is better: a walk that gets further, then one that takes less time."""
        return -self.walked.reached, self.walked.time_ns


class WeightSearch:
    """Keeps the best walk for each exponent ``far`` and changes the weights it came from.

    Repeats exactly for the same calls and seed.

    runs     the cheapest sequence found, None before one is
    time_ns  of that sequence; infinite before
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int) -> None:
        self._walk = ListWalk(graph, budget_bytes)
        self._ops = len(graph.ops)
        self._random = np.random.default_rng(seed)
        self._made_by = [np.array(op.outputs, np.int64) for op in graph.ops]
        self._producer = graph.producer
        made = [producer >= 0 for producer in graph.producer]
        self._read_by = [[v for v in op.inputs if made[v]] for op in graph.ops]
        self._read_by.append([v for v in sorted(graph.outputs) if made[v]])
        self._is_output = np.array([v in graph.outputs for v in range(len(graph.values))], bool)
        self._is_backward = np.array([p >= 0 and graph.ops[p].backward for p in graph.producer], bool)
        self._leads: dict[float, _Lead] = {}
        self.runs: Ints | None = None
        self.time_ns = math.inf

    def start(self) -> None:
        """The plain walks: graph outputs held once they are made; then like anything else, for what comes to its end so."""
        for held in (math.inf, 1.0):
            for weights in self._plain(held):
                for far in FAR:
                    self._try(weights, (), 1.0, far, only_complete=held < math.inf)

    def guide(self, hold: Hold) -> None:
        """Walk while holding on to ``hold``, from plain weights and from the best of each exponent."""
        plain = next(self._plain(math.inf))
        for far, lead in list(self._leads.items()):
            for weights in (plain, lead.weights):
                for grip in GRIPS:
                    self._try(weights, hold, grip, far)

    def improve(self, work: int) -> None:
        """Try changed weights, the exponents in turn, until about ``work`` ops have run (in walks, not in the world)."""
        while True:
            for far, lead in list(self._leads.items()):
                work -= self._try(self._changed(lead), lead.hold, lead.grip, far)
                if work <= 0:
                    return

    def _plain(self, held: float) -> Iterator[Floats]:
        for factor in BACKWARD if self._is_backward.any() else (1.0,):
            yield np.where(self._is_output, held, np.where(self._is_backward, factor, 1.0))

    def _changed(self, lead: _Lead) -> Floats:
        """Weights near the best: something that is missed dearly made dearer to lose, or noise over a stretch of ops."""
        rng, weights = self._random, lead.weights.copy()
        if rng.random() < 0.5 and (missed := self._missed(lead)) is not None:
            weights[missed] *= math.exp(rng.uniform(0, 5))
        else:
            at, spread = rng.integers(self._ops), rng.choice((0.3, 1.0, 3.0))
            for values in self._made_by[at : at + 2 ** rng.integers(6)]:
                weights[values] *= math.exp(spread * rng.standard_normal())
        np.clip(weights, 1 / LIMIT, LIMIT, out=weights, where=np.isfinite(weights))
        return weights

    def _missed(self, lead: _Lead) -> int | None:
        """A value that was missed: one that some op read, or that was read to make that one again, and so on upwards.

        The op is the one at which the walk got stuck, else one that called for re-runs, the dearer the likelier.
        """
        rng, walked = self._random, lead.walked
        op = walked.reached
        if op > self._ops:
            total_ns = np.cumsum(walked.extra_ns)
            if total_ns[-1] == 0:
                return None
            op = int(np.searchsorted(total_ns, rng.random() * total_ns[-1], side="right"))
        while read := self._read_by[op]:
            v = read[rng.integers(len(read))]
            if math.isfinite(lead.weights[v]) and rng.random() < STAY:
                return v
            op = self._producer[v]
        return None

    def _try(self, weights: Floats, hold: Hold, grip: float, far: float, *, only_complete: bool = False) -> int:
        """Walk once and keep what is no worse than the lead. Returns how many ops ran."""
        limit = 3 * self._ops + 100 if self.runs is None else 2 * self.runs.size
        walked = self._walk(weights=weights, hold=hold, grip=grip, far=far, run_limit=limit)
        tried = _Lead(weights, hold, grip, walked)
        complete = self._walk.complete(walked)
        if far not in self._leads or (tried.merit <= self._leads[far].merit and (complete or not only_complete)):
            self._leads[far] = tried
        if complete and walked.time_ns < self.time_ns:
            self.runs, self.time_ns = walked.runs, walked.time_ns
        return int(walked.runs.size) + OVERHEAD
