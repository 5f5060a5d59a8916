"""What to evict next: one storage, or all of a range of addresses.

The scores are those of a ``Pool``. Coop (Zhang et al., NeurIPS 2023) evicts the cheapest *window*: neighbouring pieces, none of
which must stay, that are large enough together. So one search makes room for sure, and holes already there count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graphs.errors import InputError
from online.allocators import FREE, Allocator, Arena
from online.heuristics import Heuristic, Pool

Victims = Callable[[int], list[int]]  # of the clock; storages to evict now, none where nothing can go


def victims(heuristic: Heuristic, pool: Pool, allocator: Allocator | None) -> Victims:
    """How that heuristic chooses. Raises InputError where it needs addresses that are not there."""
    if heuristic.window:
        if not isinstance(allocator, Arena):
            raise InputError("this heuristic evicts ranges of addresses of one arena; no other allocator will do")
        return Window(pool, allocator)
    if heuristic.holes:
        if allocator is None:
            raise InputError("this heuristic looks at the holes beside a storage; it needs an allocator with addresses")
        return WithHoles(pool, allocator)
    return lambda clock: [pool.pick(clock)] if pool else []


class WithHoles:
    """The smallest score, where a storage counts with the free pieces beside it (DTE, after MegTaiChi)."""

    def __init__(self, pool: Pool, allocator: Allocator) -> None:
        self._pool, self._allocator = pool, allocator

    def __call__(self, clock: int) -> list[int]:
        members = self._pool.members()
        for s in members:
            self._pool.resize(s, self._allocator.size_with_holes(s))
        self._allocator.inspected += 3 * len(members)
        return [self._pool.pick(clock)] if members else []


class Window:
    """All storages of the cheapest window that holds the block an arena is short of."""

    def __init__(self, pool: Pool, arena: Arena) -> None:
        self._pool, self._arena = pool, arena

    def __call__(self, clock: int) -> list[int]:
        arena, pieces = self._arena, list(self._arena.pieces())
        arena.inspected += len(pieces)
        owners, sizes = [p.owner for p in pieces], [p.size for p in pieces]
        best = self._pool.window(clock, owners, sizes, arena.short)
        if best is None:
            prices = self._pool.prices(clock) | {FREE: 0}
            best = cheapest_window(zip(sizes, map(prices.get, owners), strict=True), arena.short)
        return [] if best is None else [owner for owner in owners[best[0] : best[1]] if owner != FREE]


def cheapest_window(pieces: Iterable[tuple[int, int | None]], need: int) -> tuple[int, int] | None:
    """The cheapest run of neighbouring pieces of at least ``need`` bytes in all, as (first, one past the last).

    pieces  (bytes, price >= 0 of evicting it) in address order; price 0 for a free piece, None for one that must stay

    Of equals the one that ends first. One pass: prices are not negative, so of all windows with the same right end the shortest
    that suffices is the cheapest, and its left end only moves to the right. None where no run is large enough.
    """
    run: list[tuple[int, int | None]] = []
    best: tuple[int, int] | None = None
    lowest = size = price = start = 0
    for end, piece in enumerate(pieces):
        run.append(piece)
        if piece[1] is None:
            start, size, price = end + 1, 0, 0
            continue
        size += piece[0]
        price += piece[1]
        while size - run[start][0] >= need:
            size -= run[start][0]
            price -= run[start][1] or 0
            start += 1
        if size >= need and (best is None or price < lowest):
            best, lowest = (start, end + 1), price
    return best
