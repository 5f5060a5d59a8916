"""Local search over list walks: cheap schedules where no proof is near.

A lead is a route that a walk has followed until nothing changed any more. Each move follows it again from some place on, up to
some other, with a change: re-runs left out and what they made dearer to lose; a value that waits long for its next read
cheaper to lose; or noise on the weights of a stretch of ops. Leads that go different ways are crossed: what one does in some
stages takes the place of what another does there. Routes come from the graph order, and from whoever has a sequence whose memory
need not fit: a MILP's solution, a chain of blocks, an online run.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphs.ir import Graph
from planner.process import turns
from planner.process.clock import now_s
from planner.process.compiled import untyped
from planner.process.flat import Flags, Floats, Ints
from planner.process.loading import load_once
from planner.walks.list_walk import ListWalk, Route, Walked, is_read, use_from

FAR = (0.0, 0.5, 1.0, 2.0)  # exponents of the distance to the next read
BACKWARD = (30.0, 1.0)  # factors of what the backward pass makes: by then most of what it came from is gone
HELD = 1e50  # factor of the graph's outputs where they are to be made once
LEADS = 12  # kept at a time
ALIKE = 0.003  # what differs from another by less than this share of its time beyond keep-all is kept only if it is the best
SLICE = 50_000  # work that a lead gets at least when it is its turn
CROSSES = 0.3  # share of the work that goes into crossing leads
ROUNDS = 20  # how often a route is followed at most until nothing changes
HEAT = 0.015  # mean excess that a move may have over its lead, as a share of the lead's time beyond keep-all
OVERHEAD = 200  # work of a move beside its runs, in runs
MOST = 7  # moves take on up to 2**MOST ops or re-runs


@dataclass(frozen=True, eq=False)
class _Lead:
    """A sequence that walks lead to."""

    route: Route
    stuck: int  # as in Walked
    reached: int  # how many ops, the end among them, run for the first time before
    time_ns: float

    @property
    def complete(self) -> bool:
        return self.stuck == self.route.runs.size

    @cached_property
    def repeats(self) -> Ints:
        """Where runs before ``stuck`` are repeats."""
        is_repeat = np.ones(self.route.runs.size + 1, bool)
        is_repeat[self.route.first_at] = False
        return np.flatnonzero(is_repeat[: self.stuck])

    @property
    def merit(self) -> tuple[int, float]:
        """Less is better: a walk that gets further, then one that takes less time."""
        return -self.reached, self.time_ns


class WalkSearch:
    """Keeps the best leads and changes them.

    Repeats exactly for the same calls and seed.

    runs     the cheapest sequence found, None before one fits
    time_ns  of that sequence; infinite before
    hurried  whether the clock made it search otherwise (not: less) than without one
    stop     where it is set, changes end as they do at a deadline
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int) -> None:
        load_once(_compile)
        self._walk = ListWalk(graph, budget_bytes)
        self._ops = len(graph.ops)
        self._values = len(graph.values)
        self._keep_all_ns = float(graph.keep_all_time_ns)
        self._random = np.random.default_rng(seed)
        self._producer = graph.producer
        self._is_output = np.array([v in graph.outputs for v in range(self._values)], bool)
        self._is_backward = np.array([p >= 0 and graph.ops[p].backward for p in graph.producer], bool)
        self._leads: list[_Lead] = []
        self._followed: _Lead | None = None  # what the last sequence led to
        self.runs: Ints | None = None
        self.time_ns = math.inf
        self.hurried = False
        self.stop: threading.Event | None = None

    def apart(self, seed: int) -> WalkSearch:
        """One that goes on from here by itself, with draws of its own."""
        other = copy.copy(self)
        other._leads = list(self._leads)
        other._random = np.random.default_rng(seed)
        return other

    def join(self, other: WalkSearch) -> None:
        """Take over what another search of the same graph and budget has found."""
        for lead in other._leads:
            self._take(lead)
        self._followed = other._followed
        self.hurried |= other.hurried

    def start(self, *, deadline: float = math.inf, one: bool = False) -> None:
        """Follow the graph order, with the graph's outputs held once they are made or not.

        deadline  as ``planner.process.clock.now_s`` tells it; only the first walk begins after it
        one       whether the first walk that fits ends it, as it is
        """
        plain = self._walk.route(range(self._ops))
        for held in (HELD, 1.0):
            for factor in BACKWARD if self._is_backward.any() else (1.0,):
                weights = np.where(self._is_output, held, np.where(self._is_backward, factor, 1.0))
                for far in FAR[1:]:
                    if not self._leads or now_s() < deadline:
                        walked = self._walk.follow(plain, far=far, weights=weights, deadline=deadline)
                        self._settle(walked, far, -math.inf if one else deadline)
                        if one and walked.complete:
                            return

    def follow(self, runs: Sequence[int], work: int = 0, *, held: bool = False, deadline: float = math.inf) -> None:
        """Follow a sequence that holds every op, first ones in graph order (crosses rely on one order); its memory need not fit.

        work      for changes of what this leads to, before it is compared with older leads, on which more was spent
        held      whether the graph's outputs stay once they are made, but for those that the sequence makes again
        deadline  as ``planner.process.clock.now_s`` tells it; no walk begins after it
        """
        route = self._walk.route(runs)
        weights = np.where(self._is_output, HELD, 1.0) if held else None
        found = []
        for far in FAR:
            if now_s() < deadline:
                walked = self._walk.follow(route, far=far, weights=weights, deadline=deadline)
                found.append(self._settle(walked, far, deadline))
        if found:
            self._followed = self._grow(min(found, key=lambda lead: lead.merit), work, deadline)

    def improve(self, work: int, *, deadline: float = math.inf) -> None:
        """Try changes of the leads, and cross them, until about ``work`` ops have run (in walks, not in the world), or the clock
        says so.

        deadline  as ``planner.process.clock.now_s`` tells it; a search that it ends does not repeat
        """
        work -= self._cross(int(CROSSES * work), deadline)
        turns = self._random.permutation(len(self._leads))[: max(1, work // SLICE)]
        for lead in [self._leads[at] for at in turns]:
            self._grow(lead, work // len(turns), deadline)

    def go_on(self, work: int, *, deadline: float = math.inf) -> None:
        """Half of the work goes into what the last sequence led to, though it may still be worse than all leads."""
        if self._followed is not None:
            self._followed = self._grow(self._followed, work // 2, deadline)
        self.improve(work - work // 2, deadline=deadline)

    def _over(self, deadline: float) -> bool:
        """Whether changes end here; else the place to wait for a solver's thread."""
        turns.give_way()
        return now_s() >= deadline or (self.stop is not None and self.stop.is_set())

    def _settle(self, walked: Walked, far: float, deadline: float) -> _Lead:
        """Follow a walk's own route again until that changes nothing, and take it for a lead."""
        for _ in range(ROUNDS):
            turns.give_way()
            if not walked.complete or now_s() >= deadline:
                break
            again = self._walk.follow(self._walk.route(walked.runs), far=far, deadline=deadline)
            if not again.complete or again.time_ns >= walked.time_ns:
                break
            walked = again
        lead = self._lead(walked)
        self._take(lead)
        return lead

    def _lead(self, walked: Walked) -> _Lead:
        route = self._walk.route(walked.runs)
        return _Lead(route, walked.stuck, int((route.first_at < walked.stuck).sum()), walked.time_ns)

    def _take(self, lead: _Lead, instead: _Lead | None = None) -> None:
        """Keep a lead where it is among the best and there is none like it; one that is better than all takes their place."""
        others = [other for other in self._leads if other is not instead]
        like = [other for other in others if self._are_alike(lead, other)]
        if like and any(other.merit <= lead.merit for other in others):
            return
        kept = [lead, *(other for other in others if other not in like)]
        self._leads = sorted(kept, key=lambda one: one.merit)[:LEADS]
        if lead.complete and lead.time_ns < self.time_ns:
            self.runs, self.time_ns = lead.route.runs[:-1], lead.time_ns

    def _are_alike(self, one: _Lead, other: _Lead) -> bool:
        """Whether two leads differ so little in time that they are likely to go the same way."""
        if not (one.complete and other.complete):
            return one.merit == other.merit
        return abs(one.time_ns - other.time_ns) <= ALIKE * (other.time_ns - self._keep_all_ns)

    def _cross(self, most: int, deadline: float) -> int:
        """Do in some stages of a lead what another does there, and keep what is better than the first; the work that this took.

        A stage is an op's first run and the re-runs before it. What the other's stages read and the lead has dropped is kept
        since its last use, so the walk begins there, and it ends where the lead's own stages have all they need.
        """
        rng, work = self._random, 0
        while work < most and not self._over(deadline):
            complete = [lead for lead in self._leads if lead.complete]
            if len(complete) < 2:
                break
            work += OVERHEAD
            lead, other = (complete[at] for at in rng.choice(len(complete), 2, replace=False))
            mine, theirs = lead.route, other.route
            since = int(rng.integers(self._ops))
            last = min(self._ops - 1, since + int(self._ops ** rng.random()))
            begin, end = mine.first_at[since] + 1, mine.first_at[last] + 1
            stages = theirs.runs[theirs.first_at[since] + 1 : theirs.first_at[last] + 1]
            if np.array_equal(mine.runs[begin:end], stages):
                continue
            route = self._walk.route(np.concatenate((mine.runs[:begin], stages, mine.runs[end:])))
            walked = self._walk.follow(
                route,
                far=FAR[rng.integers(len(FAR))],
                begin=int(_wanted_since(begin, route.use_rows, route.uses, mine.use_rows, mine.uses)),
                until=begin + stages.size,
                slack_ns=lead.time_ns - route.time_ns[-1],
                deadline=deadline,
            )
            work += walked.work
            if walked.complete and walked.time_ns < lead.time_ns:
                self._take(self._lead(walked), instead=lead)
        return work

    def _grow(self, start: _Lead, work: int, deadline: float) -> _Lead:
        """Change a lead for so much work, and keep the best of what comes of it instead; that best."""
        if not start.stuck or not self._values:  # there is nothing to change
            return start
        best = lead = start
        rng = self._random
        heat_ns = HEAT * (start.time_ns - self._keep_all_ns) if start.complete else 0.0
        try:
            while work > 0 and not self._over(deadline):
                slack_ns = heat_ns * rng.exponential()
                walked = self._move(lead, slack_ns, deadline)
                work -= OVERHEAD
                if walked is None:
                    continue
                work -= walked.work
                if lead.complete and (not walked.complete or walked.time_ns - slack_ns > lead.time_ns):
                    continue
                found = self._lead(walked)
                if (-found.reached, found.time_ns - slack_ns) <= lead.merit:
                    lead = found
                    if lead.merit < best.merit:
                        best = lead
        finally:  # on Ctrl-C too
            if best is not start:
                self._take(best, instead=start)
        return best

    def _move(self, lead: _Lead, slack_ns: float, deadline: float) -> Walked | None:
        rng = self._random
        far = FAR[rng.integers(len(FAR))]
        weights, left_out = np.ones(self._values), None
        kind = rng.integers(3)
        if kind == 0:
            change = self._hold(lead, weights)
            if change is None:
                return None
            begin, until, left_out = change
        elif kind == 1:
            window = self._let_go(lead, weights)
            if window is None:
                return None
            begin, until = window
        else:
            begin, until = self._shake(lead, weights)
        if not lead.complete:
            begin, slack_ns = 0, math.inf  # what the route has in memory further on is known only where it fits
        return self._walk.follow(
            lead.route,
            far=far,
            weights=weights,
            left_out=left_out,
            begin=begin,
            until=until,
            slack_ns=slack_ns,
            deadline=deadline,
        )

    def _hold(self, lead: _Lead, weights: Floats) -> tuple[int, int, Flags] | None:
        """Leave out some re-runs, dear ones likelier, and make what they made dearer to lose since its last use."""
        rng, route = self._random, lead.route
        again = lead.repeats
        if not again.size:
            return None
        dear_ns = np.cumsum(self._walk.op_time_ns[route.runs[again]] + 1)
        at = int(np.searchsorted(dear_ns, rng.random() * dear_ns[-1]))
        length = 2 ** int(rng.integers(MOST))
        begin = max(0, at - int(rng.integers(length)))
        chosen = again[begin : begin + length]
        if rng.random() < 0.3:
            chosen = chosen[rng.random(chosen.size) < 0.5]
            if not chosen.size:
                return None
        left_out = np.zeros(route.runs.size, np.bool_)
        left_out[chosen] = True
        factor = math.exp(rng.uniform(0, 8))
        walk = self._walk
        since = _dearer(chosen, factor, weights, route.runs, walk.out_rows, walk.outputs, route.use_rows, route.uses)
        return since, int(chosen[-1]) + 1, left_out

    def _let_go(self, lead: _Lead, weights: Floats) -> tuple[int, int] | None:
        """Make a value cheaper to lose from one use to its next read, and perhaps what was made next to it."""
        rng, route = self._random, lead.route
        for _ in range(20):
            v = int(rng.integers(self._values))
            uses = route.uses[route.use_rows[v] : route.use_rows[v + 1]]
            if uses.size >= 2:
                k = int(rng.integers(uses.size - 1))
                begin, until = int(uses[k]) // 2, int(uses[k + 1]) // 2 + 1
                if uses[k + 1] % 2 == 0 and until - begin > 4 and begin < lead.stuck:
                    break
        else:
            return None
        factor = math.exp(-rng.uniform(0, 8))
        weights[v] = factor
        if rng.random() < 0.7:
            weights[self._made_from(self._producer[v], 2 ** int(rng.integers(MOST - 1)))] = factor
        return begin, until

    def _shake(self, lead: _Lead, weights: Floats) -> tuple[int, int]:
        """Noise on the weights of what a stretch of ops makes, over some stretch of the route."""
        rng = self._random
        made = self._made_from(int(rng.integers(self._ops)), 2 ** int(rng.integers(MOST + 1)))
        weights[made] *= np.exp(rng.choice((0.3, 1.0, 3.0, 6.0)) * rng.standard_normal(made.size))
        begin = int(rng.integers(lead.stuck))
        return begin, min(lead.route.runs.size, begin + 2 ** int(rng.integers(3, 12)))

    def _made_from(self, op: int, count: int) -> Ints:
        """What ``count`` ops from ``op`` on make."""
        walk = self._walk
        return walk.outputs[walk.out_rows[op] : walk.out_rows[min(op + count, self._ops)]]


def _compile() -> None:
    one, rows = np.zeros(1, np.int64), np.zeros(2, np.int64)
    _dearer(one, 1.0, np.ones(1), one, rows, one, rows, one)
    _wanted_since(0, rows, one, rows, one)


@untyped
def _dearer(chosen, factor, weights, runs, out_rows, outputs, use_rows, uses):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Multiply the weights of what the chosen runs make; the position of the earliest last use before."""
    since = chosen[0]
    for i in chosen:
        op = runs[i]
        for a in range(out_rows[op], out_rows[op + 1]):
            v = outputs[a]
            weights[v] *= factor
            k = use_from(v, 2 * i + 1, use_rows, uses)
            if k > use_rows[v]:
                since = min(since, uses[k - 1] // 2)
    return since


@untyped
def _wanted_since(at, use_rows, uses, old_rows, old_uses):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The earliest last use, before ``at``, of a value that a route has in memory there and an older one has not; else ``at``."""
    since = at
    for v in range(use_rows.size - 1):
        k = use_from(v, 2 * at, use_rows, uses)
        if k > use_rows[v] and is_read(k, use_rows[v + 1], uses):
            old = use_from(v, 2 * at, old_rows, old_uses)
            if not is_read(old, old_rows[v + 1], old_uses):
                since = min(since, uses[k - 1] // 2)
    return since
