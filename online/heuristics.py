"""Which storage to evict: eviction heuristics as data, and the pool that finds the smallest score.

Source: Kirisame et al., ICLR 2021, sections 2 and 4.1, appendix D.1. A score is ``cost / (size * staleness)``, where each of
the three may be left out; the storage with the smallest score goes. A zero denominator gives an infinite score: such a
storage goes only where nothing better is left.

Ties: of equal scores the storage that joined the pool last goes, except for scores of exactly 0, where the one that joined
first goes. Storages join when they come into memory (after one op in output order, the one that was asked for last) and
again whenever the last op that holds them lets go. This is the order of the authors' simulator.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from online.neighborhood import Demand, Exact, Neighborhood, Producers, Relations, UnionFind, fits_compiled
from planner.process.loading import undisturbed

if TYPE_CHECKING:
    from online.engines.compiled_searches import Compiled, Slots

Cost = Literal["neighborhood", "ancestors", "union_find", "producers", "demand", "local", "none"]

SPARED = 2.0**-200  # what a rebuild under way will read counts as that much smaller: it goes where nothing else is left
SMALL = 0.01  # of the mean size: what the prototype of the DTR authors never evicts to make room
WORTH_LOADING = 3_000_000  # scores and storages looked at: takes about as long as to load what is compiled
LOADED_ALREADY = 100  # times less is worth it where it is loaded
_REFINED = 30  # to raise a lower bound takes as long as to look at so many storages
_UNWRITTEN = -2


@dataclass(frozen=True, slots=True)
class Heuristic:
    """One eviction rule.

    cost       what stands above the line: c0 alone ("local"); c0 plus the sum over e* ("neighborhood"), over its ancestor half
               ("ancestors"), or plus the union-find estimate of it ("union_find") or of Coop ("producers"); what losing it
               costs those that want it ("demand", see ``online.neighborhood.Demand``); 1 ("none")
    size       whether to divide by the bytes of the storage
    staleness  whether to divide by the time since its last access
    random     a uniformly random choice; the rest does not count
    holes      the free bytes beside a storage count as its own; needs addresses
    by_program only first runs are accesses, and staleness is the time of first runs since then: rebuilding something does not
               make it fresh, nor everything else stale
    capped     staleness counts up to the median of the pool's: it tells what may be wanted soon from the rest, and among the
               rest what is cheapest goes, however old; of equals the oldest. Known next uses are not capped
    window     evict the cheapest range of addresses that is large enough, by the sum of scores; needs an arena
    """

    cost: Cost
    size: bool
    staleness: bool
    random: bool = False
    holes: bool = False
    window: bool = False
    by_program: bool = False
    capped: bool = False

    def score(self, local_ns: int, neighborhood_ns: int, size_bytes: int, stale_ns: float) -> float:
        """Score of one storage; smallest goes.

        local_ns         c0: time of the ops that made views of it
        neighborhood_ns  the sum over e* that ``cost`` speaks of; 0 where it speaks of none; "demand": the product, c0 in it, as
                         ``Demand.cost_ns`` has it
        stale_ns         clock now minus clock at the last access; where it is capped, not above the cap
        """
        above = 1 if self.cost == "none" else neighborhood_ns + (0 if self.cost == "demand" else local_ns)
        below = (size_bytes if self.size else 1) * (stale_ns if self.staleness else 1)
        return above / below if below else float("inf")


HEURISTICS = {
    "dtr": Heuristic("neighborhood", size=True, staleness=True),  # h_DTR
    "dtr_eq": Heuristic("union_find", size=True, staleness=True),  # h_DTR^eq
    "local": Heuristic("local", size=True, staleness=True),  # h_DTR^local
    "lru": Heuristic("none", size=False, staleness=True),
    "size": Heuristic("none", size=True, staleness=False),  # GreedyRemat of TensorFlow XLA
    "msps": Heuristic("ancestors", size=True, staleness=False),  # after Capuchin
    "e_star": Heuristic("neighborhood", size=True, staleness=False),  # |e*| + 1 where costs and sizes are 1 (Theorem 3.1)
    "random": Heuristic("none", size=False, staleness=False, random=True),
    "demand": Heuristic("demand", size=True, staleness=True, by_program=True, capped=True),  # ours
}
DEFAULT_RULE = "demand"

# Rules that look at addresses. Coop leaves the size to the window; DTE is MegTaiChi's, as Coop's authors have it.
ADDRESS_HEURISTICS = {
    "coop": Heuristic("producers", size=False, staleness=True, window=True),
    "coop_e_star": Heuristic("neighborhood", size=False, staleness=True, window=True),
    "dte": Heuristic("producers", size=True, staleness=True, holes=True),
}


def ablation() -> dict[str, Heuristic]:
    """The 16 rules of appendix D.1: every cost with and without size and staleness; the one with nothing is random."""
    costs: dict[str, Cost] = {"e_star": "neighborhood", "eq": "union_find", "local": "local", "none": "none"}
    return {
        f"{name}{'/size' * size}{'/staleness' * staleness}": Heuristic(
            cost, size=size, staleness=staleness, random=cost == "none" and not size and not staleness
        )
        for name, cost in costs.items()
        for size in (True, False)
        for staleness in (True, False)
    }


class Pool:
    """Evictable storages, scored in bulk.

    Every storage in memory that is not pinned has a slot in flat arrays. Most accesses are never looked at, since there is
    room, so they go to lists, and to the arrays where a search is about to read them. Numerators of neighbourhood heuristics
    are lower bounds: ``pick`` makes exact only those that stand at the minimum, until the minimum itself is exact.

    size_bytes   bytes of each storage (shared with the caller, grows with it)
    next_use     staleness is ``due`` minus ``now`` instead
    skip_small   storages below SMALL of the mean size of all that came into memory so far never join
    sample       a pick looks at every k-th member in the order of joining, each k uniform in 1 .. sqrt(members)
    evaluations  scores that a scan of the pool would have computed, as in the authors' counters
    compiled     what searches faster where there is much to search; None: nothing
    """

    _is_loaded: ClassVar[bool] = False  # what is compiled, in this process

    def __init__(
        self,
        heuristic: Heuristic,
        relations: Relations,
        size_bytes: list[int],
        *,
        seed: int = 0,
        next_use: bool = False,
        skip_small: bool = False,
        sample: bool = False,
    ) -> None:
        self.heuristic = heuristic
        self.relations = relations
        self.size_bytes = size_bytes
        self.evaluations = 0
        self.neighborhood: Neighborhood | None = None
        self._demand: Demand | None = None
        if not heuristic.random:
            if heuristic.cost == "neighborhood":
                self.neighborhood = Exact(relations)
            elif heuristic.cost == "ancestors":
                self.neighborhood = Exact(relations, descendants=False)
            elif heuristic.cost == "union_find":
                self.neighborhood = UnionFind(relations)
            elif heuristic.cost == "producers":
                self.neighborhood = Producers(relations)
            elif heuristic.cost == "demand":
                self.neighborhood = self._demand = Demand(relations)
        self._costs = heuristic.cost not in ("none", "demand")  # c0 alone is a lower bound of the numerator
        self._least = 1 if heuristic.cost == "none" else 0  # elsewhere this is
        self.now = 0
        self._next_use = next_use
        self._due: list[float] = []  # of each storage, like the next
        self._spared: list[bool] = []
        self._skipped: set[int] = set()  # in memory, but too small to join
        self._skip_small, self._sample = skip_small, sample
        self._sizes = self._arrivals = 0
        self._looked_at = 0  # by the last pick, where it samples
        self._rng = np.random.default_rng(seed)
        self._members = 0
        self._joined = 0
        self._changes = 0  # evictions and rebuilds so far: a numerator is exact if it was computed at this count
        self._slot: list[int] = []  # of each storage, -1 without one
        self._last: list[int] = []  # clock at the last access, of each storage
        self._order: list[int] = []  # when it joined, of each storage; -1 while it is no member
        self._outdated: set[int] = set()  # storages whose slots are to be written before they are read
        self._free: list[int] = []
        self._used = 0
        self._at = array("q")  # storage in each slot
        self._exact_at = array("q")  # _UNWRITTEN: nothing about its storage has been written to that slot yet
        self._columns = np.empty((0, 0))
        self._slots: Slots | None = None  # the arrays above, for ``compiled``
        self.compiled: Compiled | None = None
        self._refined = 0  # bounds
        self._written_only = heuristic.random or sample
        self._grow(256)

    def __len__(self) -> int:
        return self._members

    @property
    def visits(self) -> int:
        """Storages looked at to keep neighbourhood sums."""
        return (self.neighborhood.visits if self.neighborhood else 0) + (self.compiled.visits if self.compiled else 0)

    def hasten(self) -> None:
        """Search by compiled code from now on, if searches have taken as long as to load it: it finds and counts the same."""
        if self.compiled is None:
            enough = WORTH_LOADING // (LOADED_ALREADY if Pool._is_loaded else 1)
            if self.evaluations + self.visits + _REFINED * self._refined > enough and not self._written_only:
                self._written_only = not fits_compiled(self.relations, self.neighborhood)
                if not self._written_only:
                    self.compiled = undisturbed(self._load)
                    if self.neighborhood is not None:
                        self.neighborhood.compiled = self.compiled
        elif not self.compiled.is_exact:
            self.unlinked()

    def unlinked(self) -> None:
        """A storage was taken out of the relations, or costs have grown too large, and compiled code follows neither: searches go
        on with what is written here."""
        if self.compiled is not None:
            self._written_only = True
            if self.neighborhood is not None:
                self.neighborhood.visits += self.compiled.visits
                self.neighborhood.compiled = None
            if isinstance(self.neighborhood, UnionFind):
                self.neighborhood.unflatten()
            self.compiled = None

    def skips(self, s: int) -> bool:
        """Whether ``s`` is in memory and too small to be evicted for others."""
        return s in self._skipped

    def _load(self) -> Compiled:
        from online.engines.compiled_searches import Compiled  # imports numba, which takes time

        found = Compiled(self.relations, self.neighborhood)
        Pool._is_loaded = True
        return found

    def add(self, count: int = 1) -> None:
        """New storages, the next numbers."""
        self._slot += [-1] * count
        self._last += [0] * count
        self._order += [-1] * count
        self._due += [np.inf] * count
        self._spared += [False] * count
        if self.compiled is not None:
            self.compiled.grow(len(self._slot))

    def enter(self, s: int) -> None:
        """``s`` has come into memory and can be evicted from now on."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used
            if slot == len(self._at):
                self._grow(2 * slot)
            self._used += 1
        self._slot[s] = slot
        self._at[slot] = s
        self._exact_at[slot] = _UNWRITTEN
        if self._skip_small:
            self._sizes += self.size_bytes[s]
            self._arrivals += 1
            if self.size_bytes[s] * self._arrivals < SMALL * self._sizes:
                self._skipped.add(s)
                return
        self._order[s] = self._joined
        self._joined += 1
        self._members += 1
        self._outdated.add(s)

    def leave_memory(self, s: int) -> None:
        """``s`` leaves memory, or can never be evicted again."""
        slot = self._slot[s]
        self._slot[s] = -1
        self._free.append(slot)
        if self._order[s] >= 0:
            self._order[s] = -1
            self._members -= 1
        if self._exact_at[slot] != _UNWRITTEN:
            self._barrier[slot] = np.inf
        self._outdated.discard(s)
        if self._skipped:
            self._skipped.discard(s)

    def join(self, s: int) -> None:
        """Nothing holds ``s`` any more."""
        if s not in self._skipped:
            self._order[s] = self._joined
            self._joined += 1
            self._members += 1
            self._outdated.add(s)

    def leave(self, s: int) -> None:
        """Something holds ``s``, so it must not go."""
        if s not in self._skipped:
            self._order[s] = -1
            self._members -= 1
            self._outdated.add(s)

    def touch(self, s: int, clock: int) -> None:
        """``s`` is accessed."""
        self._last[s] = clock
        if self._order[s] >= 0:
            self._outdated.add(s)

    def read(self, storages: Iterable[int], clock: int) -> None:
        """An op accesses these one after the other, holds those that are members, and lets go of them in the same order."""
        last, order, outdated, joined = self._last, self._order, self._outdated, self._joined
        for s in storages:
            last[s] = clock
            if order[s] >= 0:
                order[s] = joined
                joined += 1
                outdated.add(s)
        self._joined = joined

    def due(self, s: int, at: float) -> None:
        """The next use of ``s`` comes when ``now`` is ``at``; infinity: never."""
        self._due[s] = at
        if self._order[s] >= 0:
            self._outdated.add(s)

    def spare(self, s: int, yes: bool) -> None:
        """The rebuild under way will read ``s``, or will not any more. Only the rule "demand" minds."""
        if self._demand is not None:
            self._spared[s] = yes
            slot = self._slot[s]
            if slot >= 0 and self._exact_at[slot] != _UNWRITTEN:
                self._size[slot] = self.size_bytes[s] * (SPARED if yes else 1.0)

    def dropped(self, s: int) -> None:
        """The program holds no reference to ``s`` any more: what is there for its sake can be worth less."""
        if self._demand is not None:
            if self.compiled is not None:
                self.compiled.net.dropped[s] = True
            for u in self._demand.around(s) if self.relations.evicted[s] else [s]:
                self._worth_less(u)
            self._changes += 1

    def costlier(self, s: int, time_ns: int) -> None:
        """c0 of ``s`` has grown by a new view."""
        if self.compiled is not None:
            self.compiled.costlier(s, time_ns)
        slot = self._slot[s]
        if slot < 0 or self._exact_at[slot] == _UNWRITTEN:
            return
        if self._costs:
            self._local[slot] += time_ns
            self._numerator[slot] += time_ns
        else:
            self._exact_at[slot] = -1

    def evicted(self, s: int) -> None:
        """``s`` has become a member of E: sums can only have grown."""
        if self.neighborhood is not None:
            if self.compiled is not None:
                self.compiled.net.evicted[s] = True
            self.neighborhood.evicted(s)
            self._changes += 1

    def awaiting(self, reads: list[int], cost_ns: int) -> None:
        """See ``Exact.awaiting``: only for a rule that sums over both halves of e*."""
        assert isinstance(self.neighborhood, Exact)
        fallen = self.neighborhood.awaiting(reads, cost_ns)
        for u in fallen:
            self._worth_less(u)
        self._changes += bool(fallen)

    def restored(self, s: int) -> None:
        """``s`` is a member of E no more: lower the bounds to what is certain."""
        if self.neighborhood is None:
            return
        if self.compiled is not None:
            self.compiled.net.evicted[s] = False
        suspects, loss = self.neighborhood.restored(s)
        if loss:
            numerator, local = self._numerator[: self._used], self._local[: self._used]
            np.subtract(numerator, loss, out=numerator)
            np.maximum(numerator, local, out=numerator)
        for u in suspects:
            self._worth_less(u)
        self._changes += 1

    def _worth_less(self, s: int) -> None:
        slot = self._slot[s]
        if slot >= 0:
            self._numerator[slot] = self._local[slot]

    def _write(self) -> None:
        """Bring the slots up to date."""
        slots, exact_at, order = self._slot, self._exact_at, self._order
        accessed, ordered, barrier = self._accessed, self._ordered, self._barrier
        for s in self._outdated:
            slot = slots[s]
            if exact_at[slot] == _UNWRITTEN:
                exact_at[slot] = -1
                self._local[slot] = self._numerator[slot] = self.relations.cost_ns[s] if self._costs else self._least
                if self.heuristic.size:
                    self._size[slot] = self.size_bytes[s] * (SPARED if self._spared[s] else 1.0)
            accessed[slot] = -self._due[s] if self._next_use else self._last[s]
            ordered[slot] = order[s]
            barrier[slot] = 0.0 if order[s] >= 0 else np.inf
        self._outdated.clear()

    def pick(self, clock: int) -> int:
        """The member to evict now. The pool must not be empty."""
        self._write()
        used, heuristic = self._used, self.heuristic
        if self.compiled is not None:
            now = -float(self.now) if self._next_use else float(clock)
            slot, scores = self.compiled.pick(
                self._columns_of(self.compiled), used, now, self._changes, self._members,
                heuristic.staleness, heuristic.capped and not self._next_use, heuristic.capped, heuristic.size,
            )  # fmt: skip
            self.evaluations += scores
            return self._at[slot]
        barrier, weight, score = self._barrier[:used], self._weight[:used], self._score[:used]
        if heuristic.random:
            members = np.flatnonzero(barrier == 0.0)
            nth = int(self._rng.integers(len(members)))  # by when they joined: slots follow the order in which tensors die
            self.evaluations += self._members
            return self._at[int(members[np.argpartition(self._ordered[members], nth)[nth]])]
        with np.errstate(divide="ignore", invalid="ignore"):
            if heuristic.staleness:
                np.subtract(-float(self.now) if self._next_use else float(clock), self._accessed[:used], out=weight)
                if heuristic.capped and not self._next_use:
                    np.minimum(weight, np.median(weight[barrier == 0.0]), out=weight)
                if heuristic.size:
                    np.multiply(weight, self._size[:used], out=weight)
            else:
                weight[:] = self._size[:used]
            np.divide(self._numerator[:used], weight, out=score)
            np.add(score, barrier, out=score)
        if self._sample:
            self._leave_out(score)
        best = int(score.argmin())
        if score[best] != score[best]:  # 0 / 0
            score[np.isnan(score)] = np.inf
            best = int(score.argmin())
        lowest = float(score[best])
        equals = np.flatnonzero(score == lowest)
        while self.neighborhood is not None and lowest < np.inf:
            if lowest == 0.0:  # the first of these goes if it is 0 indeed, whatever the others are
                equals = equals[[self._ordered[equals].argmin()]]
            unsure = [slot for slot in equals.tolist() if self._exact_at[slot] != self._changes]
            if not unsure:
                break
            self._refine(unsure, score, weight)
            lowest = float(score.min())
            equals = np.flatnonzero(score == lowest)
        return self._choose(lowest, equals)

    def _columns_of(self, compiled: Compiled) -> Slots:
        if self._slots is None:
            self._slots = compiled.slots([*self._columns, self._weight, self._score], self._at, self._exact_at)
        return self._slots

    def window(self, clock: int, owners: Sequence[int], sizes: Sequence[int], need: int) -> tuple[int, int] | None:
        """The cheapest run of pieces that has ``need`` bytes, by ``prices``, as (first, one past the last): see ``victims``.

        None where that has to be found there; (0, 0) where no run is large enough.
        """
        if self.compiled is None or self.heuristic.size:
            return None
        self._write()
        found = self.compiled.window(
            self._columns_of(self.compiled), self._used, clock, np.array(owners, np.int64), np.array(sizes, np.int64), need,
            self.heuristic.staleness,
        )  # fmt: skip
        if found is not None:
            self.evaluations += self._members
        return found

    def _leave_out(self, score: npt.NDArray[np.float64]) -> None:
        """Sampling: no score for those that are not looked at."""
        members = np.flatnonzero(self._barrier[: self._used] == 0.0)
        members = members[self._ordered[members].argsort()]
        longest = max(1, math.isqrt(len(members)))
        at = np.cumsum(self._rng.integers(1, longest, size=len(members), endpoint=True)) - 1
        looked_at = members[at[at < len(members)]]
        kept = score[looked_at]
        score[:] = np.inf
        score[looked_at] = kept
        self._looked_at = len(looked_at)

    def members(self) -> list[int]:
        """Storages that can be evicted now."""
        self._write()
        return [self._at[slot] for slot in np.flatnonzero(self._barrier[: self._used] == 0.0).tolist()]

    def resize(self, s: int, size_bytes: int) -> None:
        """From now on ``s`` counts as that large."""
        self._size[self._slot[s]] = size_bytes

    def prices(self, clock: int) -> dict[int, int]:
        """The score of every member in units of 2**-32, rounded down: integers, so that sums are exact.

        A staleness or size of 0 counts as 1, so that no score is infinite.
        """
        members, heuristic = self.members(), self.heuristic
        self.evaluations += len(members)
        found = {}
        for s in members:
            above = self.relations.cost_ns[s] if self._costs else self._least
            if self.neighborhood is not None:
                above += self.neighborhood.cost_ns(s, float("inf"))[0]
            below = max(1, clock - self._last[s]) if heuristic.staleness else 1
            if heuristic.size:
                below *= max(1, self.size_bytes[s])
            found[s] = (above << 32) // below
        return found

    def _refine(self, slots: list[int], score: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> None:
        """Raise lower bounds that stand at the minimum: to the exact value, or well past the smallest other score."""
        assert self.neighborhood is not None
        for slot in slots:
            score[slot] = np.inf
        rival = float(score.min())
        self._refined += len(slots)
        for slot in slots:
            local, below = float(self._local[slot]), float(weight[slot])
            # Twice as far as needed, so that bounds refined again and again do not walk the same storages too often.
            enough = 2.0 * max(rival * below, float(self._numerator[slot])) - local
            total, exact = self.neighborhood.cost_ns(self._at[slot], enough)
            if exact:
                self._exact_at[slot] = self._changes
            self._numerator[slot] = local + total
            score[slot] = (local + total) / below

    def _choose(self, lowest: float, equals: npt.NDArray[np.intp]) -> int:
        """Apply the rule for ties, and count what a scan would have evaluated."""
        if lowest == np.inf:
            equals = np.flatnonzero(self._barrier[: self._used] == 0.0)
        if lowest == 0.0:
            slot = int(equals[self._ordered[equals].argmin()])
            earlier = (self._ordered[: self._used] <= self._ordered[slot]) & (self._barrier[: self._used] == 0.0)
            self.evaluations += min(int(np.count_nonzero(earlier)), self._looked_at if self._sample else self._members)
        else:
            if self.heuristic.capped and len(equals) > 1 and lowest < np.inf:
                accessed = self._accessed[equals]
                equals = equals[accessed == accessed.min()]
            slot = int(equals[self._ordered[equals].argmax()]) if len(equals) > 1 else int(equals[0])
            self.evaluations += self._looked_at if self._sample else self._members
        return self._at[slot]

    def _grow(self, slots: int) -> None:
        """Make room for ``slots`` slots."""
        before = self._columns
        self._slots = None
        self._columns = np.zeros((6, slots))
        self._columns[:, : before.shape[1]] = before[:6] if before.size else 0.0
        self._numerator, self._local, self._size, self._accessed, self._barrier, self._ordered = self._columns
        if not before.size:
            self._size[:] = 1.0
        self._barrier[before.shape[1] :] = np.inf
        self._size[before.shape[1] :] = 1.0
        self._weight, self._score = np.empty(slots), np.empty(slots)
        self._at.extend([-1] * (slots - len(self._at)))
        self._exact_at.extend([-1] * (slots - len(self._exact_at)))
