"""Simulated annealing on sequences of ops, whose order is free: FastSA's state, moves and objective.

Source: Imanishi, Xu, Takagi, Wang, Castillo, "A fast heuristic to optimize time-space tradeoff for large models" (NeurIPS 2023).

The state is a row of slots, each an op or empty. A copy of a value is live from the slot that makes it to its last read before
the next making; a graph's output is read once more behind the last slot. Memory of a slot is the bytes of what is live there,
plus workspace. A move changes it on a few ranges of slots; adding and removing an op are inverse, so a rejected move is undone.

    f = max(1, peak / budget)^w · time        less time once within the budget, both before

The paper has w = 1. Its best state is then over the budget wherever 1 % less memory takes more than 1 % more time;
a higher w helps there.

Moves: add a run of an op, remove one, shift one. There are a few empty slots between ops instead of the paper's 2^20 in all, so
that the memory of all fits a short array, where numpy adds a range and takes the maximum faster than a segment tree in Python;
when a place gets crowded, ops are spread anew. Adding aims at gaps between two reads of a value, where it can help, and shifting
at slots where the op may go, so that few moves are tried in vain.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from random import Random

import numpy as np

from graphs.ir import Graph
from planner.incumbent import Incumbent
from planner.schedule import computes, with_frees

CHUNK = 500  # moves between two looks at the clock and the result
# Rounds: share of the moves, and start temperature as a share of f times the number of ops. One op of n changes f by about 1/n;
# the paper's start of f/1000 is too cold for graphs of a few hundred ops whose times differ.
ROUNDS = ((0.5, 5.0), (0.25, 1.5), (0.25, 0.5))
COLD = 1e-4  # end temperature, in the same unit
HEAVIER = 4  # after a round that missed the budget, being over it weighs this many times as much
SPREAD = 4  # slots per op after spreading
FULL = 0.6  # share of occupied slots at which ops are spread anew
CROWDED = 200  # … or so many moves that found no empty slot


class Annealer:
    """A sequence under annealing.

    peak_bytes, time_ns  of the current sequence
    weight               w of the objective, which may be changed between calls of ``anneal``
    """

    def __init__(self, graph: Graph, ops: Sequence[int], budget_bytes: int, seed: int, *, keep_order: bool) -> None:
        """``ops`` must be a valid sequence; ``keep_order`` leaves the first run of every op where it is among the others."""
        size = [0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)]
        self._budget = budget_bytes
        self.weight = 1
        self._random = Random(seed)
        self._resident_bytes = graph.resident_bytes
        self._producer = graph.producer
        self._time = [op.time_ns for op in graph.ops]
        self._space = [op.workspace_bytes for op in graph.ops]
        self._inputs = [tuple((x, size[x]) for x in op.inputs if graph.producer[x] >= 0) for op in graph.ops]
        self._outputs = [tuple((x, size[x]) for x in op.outputs) for op in graph.ops]
        self._wanted = [x for x in sorted(graph.outputs) if graph.producer[x] >= 0]
        # Draws and effects keep their order, so first runs of such ops stay; the latter never run again.
        self._fixed = [keep_order or op.random or op.effect for op in graph.ops]
        self._again = [v for v, op in enumerate(graph.ops) if not op.effect and any(size[x] for x in op.outputs)]
        self.spread(ops)

    @property
    def sequence(self) -> list[int]:
        """The ops in the order they run."""
        return [v for _, v in sorted((t, v) for v, runs in enumerate(self._runs) for t in runs)]

    def spread(self, ops: Sequence[int]) -> None:
        """Begin (anew) with this sequence, evenly spread over the slots."""
        self._slots = max(16, SPREAD * len(ops))
        self._at = [-1] * self._slots
        self._runs: list[list[int]] = [[] for _ in self._time]
        self._reads: list[list[int]] = [[] for _ in self._producer]
        self._crowded = 0
        for x in self._wanted:
            self._reads[x].append(self._slots)
        for place, v in enumerate(ops):
            self._at[place * SPREAD + SPREAD // 2] = v
            self._runs[v].append(place * SPREAD + SPREAD // 2)
        self._count = len(ops)
        for v, inputs in enumerate(self._inputs):
            for x, _ in inputs:
                self._reads[x].extend(self._runs[v])
        memory = np.zeros(self._slots + 2, dtype=np.int64)  # differences
        for v, runs in enumerate(self._runs):
            for t in runs:
                memory[t] += self._space[v]
                memory[t + 1] -= self._space[v]
            for x, size in self._outputs[v]:
                reads = self._reads[x]
                reads.sort()
                for t, until in zip(runs, [*runs[1:], self._slots + 1], strict=True):
                    i = bisect_left(reads, until)
                    memory[t] += size
                    memory[max(t, reads[i - 1] if i else -1) + 1] -= size
        self._memory = self._resident_bytes + np.cumsum(memory)[:-1]
        self.peak_bytes = int(self._memory.max())
        self.time_ns = sum(self._time[v] for v in ops)
        self._several = [v for v, runs in enumerate(self._runs) if len(runs) > 1]

    def anneal(self, moves: int, hot: float, cold: float) -> None:
        """Try ``moves`` moves while the temperature (a share of f) falls geometrically from ``hot`` to ``cold``."""
        draw = self._random.random
        log = math.log
        cooling = (cold / hot) ** (1 / max(1, moves)) if hot > 0 else 1.0
        heat = hot
        add, remove, shift = self._try_add, self._try_remove, self._try_shift
        for _ in range(moves):
            value = self._value(self.peak_bytes, self.time_ns)
            limit = value * (1 - heat * log(1 - draw()))
            kind = draw()
            if kind < 0.3:
                add(limit)
            elif kind < 0.6:
                remove(limit)
            else:
                shift(limit)
            heat *= cooling
        if self._crowded > CROWDED or self._count > FULL * self._slots:
            self.spread(self.sequence)

    def _value(self, peak_bytes: int, time_ns: int) -> float:
        """The objective f."""
        return time_ns if peak_bytes <= self._budget else time_ns * (peak_bytes / self._budget) ** self.weight

    def _try_add(self, limit: float) -> None:
        """Run some op again in a gap between two reads of what it makes."""
        draw = self._random.random
        if not self._again:
            return
        v = self._again[int(draw() * len(self._again))]
        time_ns = self.time_ns + self._time[v]
        if time_ns > limit:
            return
        outputs = self._outputs[v]
        reads = self._reads[outputs[int(draw() * len(outputs))][0]]
        if not reads:
            return
        i = int(draw() * len(reads))
        runs = self._runs[v]
        last = runs[bisect_left(runs, reads[i]) - 1]
        t = self._empty(max(last, reads[i - 1] if i else -1), min(reads[i], self._slots))
        if t < 0 or (self._fixed[v] and t < runs[0]):
            return
        for x, _ in self._inputs[v]:
            if self._runs[self._producer[x]][0] > t:
                return
        self._add(v, t)
        peak_bytes = int(self._memory.max())
        if self._value(peak_bytes, time_ns) > limit:
            self._remove(v, t)
            return
        self.peak_bytes, self.time_ns = peak_bytes, time_ns
        self._at[t] = v
        self._count += 1
        if len(runs) == 2:
            self._several.append(v)

    def _try_remove(self, limit: float) -> None:
        """Drop some run of an op that runs several times."""
        draw = self._random.random
        if not self._several:
            return
        place = int(draw() * len(self._several))
        v = self._several[place]
        runs = self._runs[v]
        t = runs[int(draw() * len(runs))]
        if not self._may_go(v, t):
            return
        self._remove(v, t)
        time_ns = self.time_ns - self._time[v]
        peak_bytes = int(self._memory.max())
        if self._value(peak_bytes, time_ns) > limit:
            self._add(v, t)
            return
        self.peak_bytes, self.time_ns = peak_bytes, time_ns
        self._at[t] = -1
        self._count -= 1
        if len(runs) == 1:
            self._several[place] = self._several[-1]
            self._several.pop()

    def _try_shift(self, limit: float) -> None:
        """Move some run to another slot, after its inputs were made and, where nothing else serves them, before its readers."""
        draw = self._random.random
        v = int(draw() * len(self._runs))
        runs = self._runs[v]
        t = runs[int(draw() * len(runs))]
        low = -1
        for x, _ in self._inputs[v]:
            first = self._runs[self._producer[x]][0]
            if first > low:
                low = first
        high = self._slots
        if t == runs[0]:
            if self._fixed[v]:
                return
            for x, _ in self._outputs[v]:
                reads = self._reads[x]
                if reads and reads[0] < high:
                    high = reads[0]
        elif self._fixed[v]:
            low = max(low, runs[0])
        to = self._empty(low, high)
        if to < 0:
            return
        self._add(v, to)
        if not self._may_go(v, t):
            self._remove(v, to)
            return
        self._remove(v, t)
        peak_bytes = int(self._memory.max())
        if self._value(peak_bytes, self.time_ns) > limit:
            self._add(v, t)
            self._remove(v, to)
            return
        self.peak_bytes = peak_bytes
        self._at[t] = -1
        self._at[to] = v

    def _empty(self, low: int, high: int) -> int:
        """An empty slot between two others, -1 where a few tries find none."""
        room = high - low - 1
        if room > 0:
            draw = self._random.random
            at = self._at
            for _ in range(4):
                t = low + 1 + int(draw() * room)
                if at[t] < 0:
                    return t
        self._crowded += 1
        return -1

    def _may_go(self, v: int, t: int) -> bool:
        """Whether what the run of ``v`` in slot ``t`` makes is made before, too, or not read before it is made again."""
        runs = self._runs[v]
        if t != runs[0]:
            return True
        if self._fixed[v] or len(runs) == 1:
            return False
        return all(not (reads := self._reads[x]) or reads[0] > runs[1] for x, _ in self._outputs[v])

    def _add(self, v: int, t: int) -> None:
        """Put a run into slot ``t``."""
        self._charge(v, t, 1)
        for x, _ in self._inputs[v]:
            insort(self._reads[x], t)
        insort(self._runs[v], t)

    def _remove(self, v: int, t: int) -> None:
        """Inverse of ``_add``."""
        runs = self._runs[v]
        del runs[bisect_left(runs, t)]
        for x, _ in self._inputs[v]:
            reads = self._reads[x]
            del reads[bisect_left(reads, t)]
        self._charge(v, t, -1)

    def _charge(self, v: int, t: int, sign: int) -> None:
        """Add to the memory what a run in slot ``t``, not among the others, takes, or (sign -1) take it off again.

        Reads reach up to it; gaps before the next read of what it makes are freed.
        """
        memory, all_reads, all_runs, producer = self._memory, self._reads, self._runs, self._producer
        for x, size in self._inputs[v]:
            if size:
                reads = all_reads[x]
                i = bisect_left(reads, t)
                makes = all_runs[producer[x]]
                j = bisect_left(makes, t)
                if i == len(reads) or (j < len(makes) and reads[i] > makes[j]):
                    end = makes[j - 1]
                    if i and reads[i - 1] > end:
                        end = reads[i - 1]
                    reached = memory[end + 1 : t + 1]  # a view: added to in place without being stored again
                    reached += sign * size
        runs = all_runs[v]
        k = bisect_left(runs, t)
        here = self._space[v]
        for x, size in self._outputs[v]:
            if size:
                reads = all_reads[x]
                i = bisect_right(reads, t)
                if i < len(reads) and (k == len(runs) or reads[i] < runs[k]):
                    end = runs[k - 1]
                    if i and reads[i - 1] > end:
                        end = reads[i - 1]
                    freed = memory[end + 1 : t]
                    freed -= sign * size
                else:
                    here += size
        if here:
            memory[t] += sign * here


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


def anneal(search: Incumbent, annealer: Annealer, moves: int) -> None:
    """Some rounds of annealing, each from the best schedule so far, each less hot, until the search is done."""
    n = len(search.graph.ops)
    tried = 0
    for number, (share, hot) in enumerate(ROUNDS, start=1):
        done = 0.0  # of this round
        round_began = time.perf_counter()
        round_s = share * search.time_limit_s
        round_moves = max(CHUNK, int(share * moves))
        before = 0
        while done < 1:
            heat = hot * (COLD / hot) ** done
            before += CHUNK
            clock = time.perf_counter()
            done = max(before / round_moves, (clock - round_began) / round_s if round_s else 1.0)
            annealer.anneal(CHUNK, heat / n, hot * (COLD / hot) ** min(1.0, done) / n)
            tried += CHUNK
            search.notes["moves"] = tried
            _take(search, annealer, f"round {number}")
            if search.done():
                return
        if annealer.peak_bytes > search.budget_bytes:
            annealer.weight *= HEAVIER
        if search.best is not None:
            annealer.spread(list(computes(search.best)))
    if search.best is None:
        search.notes["stopped"] = "annealing found no schedule that fits"


def _take(search: Incumbent, annealer: Annealer, phase: str) -> None:
    """Offer the current sequence where it is news; note the least peak met."""
    least = search.notes.get("smallest_peak_bytes", annealer.peak_bytes)
    search.notes["smallest_peak_bytes"] = min(least, annealer.peak_bytes)
    if search.wants(annealer.peak_bytes, annealer.time_ns):
        search.offer(with_frees(search.graph, useful(search.graph, annealer.sequence)), phase)
