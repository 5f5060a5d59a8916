"""Where storages lie: allocators that hand out ranges of addresses, for runs under an *address* budget.

The engine counts bytes by itself; without an allocator, what fits in bytes fits. With one, a storage needs bytes in a row.
Two models: a caching allocator as PyTorch's for CUDA (c10/cuda/CUDACachingAllocator.cpp, default settings), and the arena of
Coop (Zhang et al., NeurIPS 2023, with the sources of OneFlow). Both cut address space into *pieces*, each free or handed out.
"""

from __future__ import annotations

import abc
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphs.errors import check_name
from graphs.program import Program

GRAIN_BYTES = 512  # sizes are rounded up to this
FAR = 64  # bits: beyond all sizes, so that ranges of addresses of different numbers do not meet

FREE = -1  # owner of a free piece
HELD = -2  # owner of what the op under way has been given

Block = tuple[int, int, int]  # storage, bytes (more than 0), time of the op that makes it; workspace belongs to storage HELD


@dataclass(frozen=True, slots=True)
class AddressUse:
    """What a run did to the address space.

    reserved_bytes  most address space held: segments of the caching allocator, bytes of the arena that were ever handed out
    shortages       requests for a block for which something had to be evicted
    fragmentation   free bytes / budget, mean over those requests, once they have their block; None without any
    frag_published  the same before they have it, so that the request itself counts as free, as Coop's authors measure it
    """

    reserved_bytes: int
    shortages: int
    fragmentation: float | None
    frag_published: float | None


class Piece:
    """A range of addresses in one segment; free, or handed out to ``owner``."""

    __slots__ = ("left", "offset", "owner", "right", "size")

    def __init__(self, offset: int, size: int, left: Piece | None = None, right: Piece | None = None) -> None:
        self.offset = offset
        self.size = size
        self.owner = FREE
        self.left = left
        self.right = right


class FreeList:
    """Free pieces by size, then address: best fit."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._at: dict[int, Piece] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter([self._at[offset] for _, offset in self._keys])

    def add(self, piece: Piece) -> None:
        """``piece`` is free from now on."""
        insort(self._keys, (piece.size, piece.offset))
        self._at[piece.offset] = piece

    def remove(self, piece: Piece) -> None:
        """``piece`` is free no more, or will have another size."""
        del self._keys[bisect_left(self._keys, (piece.size, piece.offset))]
        del self._at[piece.offset]

    def best(self, size: int, *, last: bool = False) -> Piece | None:
        """The smallest piece of at least ``size`` bytes; of equals the lowest address, or the highest."""
        at = bisect_left(self._keys, (size, -1))
        if at == len(self._keys):
            return None
        if last:
            at = bisect_right(self._keys, (self._keys[at][0] + 1, -1)) - 1
        return self._at[self._keys[at][1]]


class Allocator(abc.ABC):
    """Hands out pieces. Storages and what the op under way makes are told apart: ``take``, then ``settle``, then ``free``.

    budget_bytes    address space there is, a multiple of 512
    handed_bytes    bytes handed out now, with what rounding adds
    reserved_bytes  see ``AddressUse``
    short           the request that did not find a block in the last ``take``: its rounded size; 0 where all did
    inspected       pieces looked at in searches for something to evict (counted by those who search)
    """

    def __init__(self, budget_bytes: int, *, grain_bytes: int = GRAIN_BYTES, debug: bool = False) -> None:
        self.budget_bytes = budget_bytes // grain_bytes * grain_bytes
        self.handed_bytes = 0
        self.reserved_bytes = 0
        self.short = 0
        self.inspected = 0
        self._grain = grain_bytes
        self._debug = debug
        self._piece: dict[int, Piece] = {}  # of each storage that is in memory and has bytes
        self._taken: list[tuple[int, Piece]] = []  # storage and piece, for the op under way
        self._shortages = 0
        self._free_after = self._free_before = 0  # bytes, summed over shortages

    @property
    def use(self) -> AddressUse:
        """What has been done so far."""
        n = self._shortages
        whole = n * self.budget_bytes
        return AddressUse(
            self.reserved_bytes, n, self._free_after / whole if n else None, self._free_before / whole if n else None
        )

    def preload(self, storage: int, size_bytes: int) -> bool:
        """A storage that is in memory from the start; False where it does not fit."""
        fits = self.take([(storage, size_bytes, 0)] if size_bytes else [])
        self.settle()
        return fits

    def take(self, blocks: Sequence[Block]) -> bool:
        """Find a piece for each block of one op; False: not for all yet. What has one keeps it until ``settle``."""
        taken = self._taken
        while len(taken) < len(blocks):
            storage, size_bytes, time_ns = blocks[len(taken)]
            size = self._rounded(size_bytes)
            before = self.budget_bytes - self.handed_bytes
            piece = self._place(size, time_ns / size_bytes)
            if piece is None:
                self.short = size
                return False
            if self.short:
                self.short = 0
                self._shortages += 1
                self._free_before += before
                self._free_after += before - piece.size
            piece.owner = HELD
            self.handed_bytes += piece.size
            taken.append((storage, piece))
        if self._debug:
            self.check()
        return True

    def settle(self, spare: Sequence[int] = ()) -> None:
        """The op has run: its workspace goes, what it made stays, but for second copies of the storages ``spare``."""
        for storage, piece in self._taken:
            if storage == HELD or storage in spare:
                self._give_back(piece)
            else:
                piece.owner = storage
                self._piece[storage] = piece
        self._taken.clear()
        if self._debug:
            self.check()

    def free(self, storage: int) -> None:
        """``storage`` leaves memory."""
        piece = self._piece.pop(storage, None)
        if piece is not None:  # one of 0 bytes has none
            self._give_back(piece)
            if self._debug:
                self.check()

    def size_with_holes(self, storage: int) -> int:
        """Bytes of the piece of ``storage`` and of the free pieces beside it; 0 for a storage without bytes."""
        piece = self._piece.get(storage)
        if piece is None:
            return 0
        return piece.size + sum(side.size for side in (piece.left, piece.right) if side is not None and side.owner == FREE)

    @abc.abstractmethod
    def check(self) -> None:
        """Assert every invariant."""

    @abc.abstractmethod
    def _place(self, size: int, density: float) -> Piece | None:
        """A piece of at least ``size`` bytes, free no more, for a storage that costs ``density`` ns per byte."""

    @abc.abstractmethod
    def _free_list(self, piece: Piece) -> FreeList:
        """Where the piece belongs while it is free."""

    def _give_back(self, piece: Piece) -> None:
        """Free a piece; free neighbours become one."""
        self.handed_bytes -= piece.size
        free = self._free_list(piece)
        piece.owner = FREE
        left, right = piece.left, piece.right
        if right is not None and right.owner == FREE:
            free.remove(right)
            self._absorb_right(piece)
        if left is not None and left.owner == FREE:
            free.remove(left)
            self._absorb_right(left)
            piece = left
        free.add(piece)

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._grain) * self._grain

    def _absorb_right(self, piece: Piece) -> None:
        right = piece.right
        assert right is not None
        piece.size += right.size
        piece.right = right.right
        if right.right is not None:
            right.right.left = piece

    def _split(self, piece: Piece, size: int) -> Piece:
        """Cut a piece that is in no free list after ``size`` bytes; the part behind."""
        rest = Piece(piece.offset + size, piece.size - size, piece, piece.right)
        if piece.right is not None:
            piece.right.left = rest
        piece.right = rest
        piece.size = size
        return rest

    def _check_row(self, first: Piece, size: int) -> None:
        """Pieces from ``first`` on tile ``size`` bytes, free ones are merged, owners know their pieces."""
        offset, last = first.offset, None
        piece: Piece | None = first
        while piece is not None:
            assert piece.size > 0 and piece.offset == offset, "a gap or an overlap"
            assert piece.left is last, "neighbours disagree"
            assert not (piece.owner == FREE and last is not None and last.owner == FREE), "two free neighbours"
            if piece.owner >= 0:
                assert self._piece[piece.owner] is piece, "an owner with another piece"
            offset += piece.size
            last, piece = piece, piece.right
        assert offset - first.offset == size, "pieces do not fill the segment"


class CachingAllocator(Allocator):
    """PyTorch's allocator for CUDA with default settings, the budget being what it may reserve.

    Memory is reserved in segments: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB, else the request rounded up to
    2 MiB. Freed blocks stay reserved and serve later requests: best fit among those of the small or of the large segments,
    split where 512 bytes (small) or more than 1 MiB (large) are left. When a new segment would exceed the budget, all segments
    without a used block are given back first.
    """

    SMALL_BYTES = 1 << 20
    SMALL_SEGMENT_BYTES = 2 << 20
    LARGE_SEGMENT_BYTES = 20 << 20
    LARGE_BYTES = 10 << 20
    ROUND_BYTES = 2 << 20

    def __init__(self, budget_bytes: int, *, debug: bool = False) -> None:
        super().__init__(budget_bytes, debug=debug)
        self._small, self._large = FreeList(), FreeList()
        self._segments: dict[int, tuple[Piece, int, FreeList]] = {}  # by number: first piece, bytes, its free list
        self._numbers = 0
        self._now_reserved = 0

    def _place(self, size: int, density: float) -> Piece | None:
        small = size <= self.SMALL_BYTES
        free = self._small if small else self._large
        piece = free.best(size)
        if piece is None:
            if not self._reserve(size, free):
                return None
            piece = free.best(size)
            assert piece is not None
        free.remove(piece)
        left_over = piece.size - size
        if left_over >= GRAIN_BYTES if small else left_over > self.SMALL_BYTES:
            free.add(self._split(piece, size))
        return piece

    def _free_list(self, piece: Piece) -> FreeList:
        return self._segments[piece.offset >> FAR][2]

    def _reserve(self, size: int, free: FreeList) -> bool:
        if size <= self.SMALL_BYTES:
            segment = self.SMALL_SEGMENT_BYTES
        elif size < self.LARGE_BYTES:
            segment = self.LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // self.ROUND_BYTES) * self.ROUND_BYTES
        if self._now_reserved + segment > self.budget_bytes:
            self._release_idle()
        if self._now_reserved + segment > self.budget_bytes:
            return False
        # Every segment has its own far-off range of addresses: pieces of two segments are never neighbours.
        first = Piece(self._numbers << FAR, segment)
        self._segments[self._numbers] = (first, segment, free)
        self._numbers += 1
        free.add(first)
        self._now_reserved += segment
        self.reserved_bytes = max(self.reserved_bytes, self._now_reserved)
        return True

    def _release_idle(self) -> None:
        """Give back every segment without a used block."""
        for number, (first, size, free) in list(self._segments.items()):
            if first.owner == FREE and first.right is None:
                free.remove(first)
                del self._segments[number]
                self._now_reserved -= size

    def check(self) -> None:
        """See ``Allocator``."""
        assert sum(size for _, size, _ in self._segments.values()) == self._now_reserved <= self.budget_bytes
        assert self._now_reserved <= self.reserved_bytes
        free: dict[int, list[int]] = {id(self._small): [], id(self._large): []}
        handed = 0
        for first, size, pool in self._segments.values():
            self._check_row(first, size)
            for piece in row(first):
                if piece.owner == FREE:
                    free[id(pool)].append(piece.offset)
                else:
                    handed += piece.size
        for pool in (self._small, self._large):
            assert sorted(free[id(pool)]) == sorted(piece.offset for piece in pool), "a free piece not in its list, or a used one"
        assert handed == self.handed_bytes


class Arena(Allocator):
    """Coop's memory: one range of ``budget_bytes`` that never grows. Best fit; free neighbours are one piece.

    cheap_below  storages that cost less than this many ns per byte are placed from the right end of the free piece they are
                 given, all others from the left, so that cheap ones lie together and a cheap window exists (Coop's
                 partitioning with two groups). None: everything from the left.
    layout       offsets of storages that are preloaded; others lie where best fit puts them
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        cheap_below: float | None = None,
        layout: dict[int, int] | None = None,
        grain_bytes: int = GRAIN_BYTES,
        debug: bool = False,
    ) -> None:
        super().__init__(budget_bytes, grain_bytes=grain_bytes, debug=debug)
        self.cheap_below = cheap_below
        self._layout = layout or {}
        self._free = FreeList()
        self._touched: list[tuple[int, int]] = []  # ranges that were ever handed out, in order, apart
        self._first = Piece(0, self.budget_bytes)
        if self.budget_bytes:
            self._free.add(self._first)

    def pieces(self) -> Iterator[Piece]:
        """All pieces in address order."""
        return row(self._first)

    def preload(self, storage: int, size_bytes: int) -> bool:
        """See ``Allocator``."""
        offset = self._layout.get(storage)
        if offset is None or not size_bytes:
            return super().preload(storage, size_bytes)
        size = self._rounded(size_bytes)
        piece = next((p for p in self._free if p.offset <= offset and offset + size <= p.offset + p.size), None)
        assert piece is not None, "the layout overlaps itself"
        self._free.remove(piece)
        piece = self._cut(piece, offset - piece.offset, size)
        piece.owner = storage
        self._piece[storage] = piece
        self.handed_bytes += size
        return True

    def rewritten(self, storages: Sequence[int], beside: Container[int] = ()) -> dict[int, int]:
        """Where these lie after each has been written anew, one by one: into another block, then the old one goes.

        What an update of parameters does that is not in place, while the storages ``beside`` (gradients) are in memory and
        nothing else is. One that finds no second block stays where it is.
        """
        for s in self._piece.keys() - set(storages):
            if s not in beside:
                self.free(s)
        for s in storages:
            old = self._piece.get(s)
            if old is not None:
                new = self._place(old.size, float("inf"))
                if new is not None:
                    new.owner = s
                    self.handed_bytes += new.size
                    self._give_back(old)
                    self._piece[s] = new
        return {s: self._piece[s].offset for s in storages if s in self._piece}

    def _place(self, size: int, density: float) -> Piece | None:
        right = self.cheap_below is not None and density < self.cheap_below
        piece = self._free.best(size, last=right)
        if piece is None:
            return None
        self._free.remove(piece)
        return self._cut(piece, piece.size - size if right else 0, size)

    def _cut(self, piece: Piece, skip: int, size: int) -> Piece:
        """``size`` bytes of a piece, after its first ``skip`` bytes; what remains left and right is free."""
        if skip:
            behind = self._split(piece, skip)
            self._free.add(piece)
            piece = behind
        if piece.size > size:
            self._free.add(self._split(piece, size))
        self._touch(piece.offset, piece.offset + size)
        return piece

    def _free_list(self, piece: Piece) -> FreeList:
        return self._free

    def _touch(self, start: int, end: int) -> None:
        """Note that [start, end) is handed out; ``reserved_bytes`` counts every address once."""
        ranges = self._touched
        low = bisect_left(ranges, start, key=lambda r: r[1])  # the first that reaches start
        high = bisect_right(ranges, end, key=lambda r: r[0])
        met = ranges[low:high]
        if met:
            start, end = min(start, met[0][0]), max(end, met[-1][1])
        ranges[low:high] = [(start, end)]
        self.reserved_bytes += end - start - sum(b - a for a, b in met)

    def check(self) -> None:
        """See ``Allocator``."""
        if self.budget_bytes:
            self._check_row(self._first, self.budget_bytes)
        pieces = list(self.pieces()) if self.budget_bytes else []
        free = [(p.size, p.offset) for p in pieces if p.owner == FREE]
        assert sorted(free) == [(p.size, p.offset) for p in self._free], "a free piece not in the list, or a used one"
        used = [p for p in pieces if p.owner != FREE]
        assert sum(p.size for p in used) == self.handed_bytes
        assert {p.owner for p in used if p.owner >= 0} == self._piece.keys()
        assert all(a[1] < b[0] for a, b in pairwise(self._touched))
        assert sum(b - a for a, b in self._touched) == self.reserved_bytes
        assert all(any(a <= p.offset and p.offset + p.size <= b for a, b in self._touched) for p in used)


@dataclass(frozen=True, slots=True)
class Placement:
    """How an arena is used: two of Coop's three parts, each of which can be left out.

    partitioned  cheap and expensive storages are placed from opposite ends (``cheap_below``)
    in_place     residents are placed first, side by side, and stay there; otherwise an update between steps writes each of them
                 into another block (``Arena.rewritten``), as copying on write does, so that they lie scattered
    """

    partitioned: bool
    in_place: bool


ARENAS = {
    "coop": Placement(partitioned=True, in_place=True),
    "arena": Placement(partitioned=False, in_place=True),
    "coop_moving": Placement(partitioned=True, in_place=False),
    "arena_moving": Placement(partitioned=False, in_place=False),
}
ALLOCATORS = ("bytes", "caching", *ARENAS)  # "bytes": none


def new_allocator(
    name: str, budget_bytes: int, program: Program, *, layout: dict[int, int] | None = None, debug: bool = False
) -> Allocator | None:
    """The allocator of that name for ``program``; ``layout`` as for ``Arena``. Raises InputError naming those there are."""
    if name == "bytes":
        return None
    if name == "caching":
        return CachingAllocator(budget_bytes, debug=debug)
    check_name("allocator", name, ALLOCATORS)
    cheap = cheap_below(program) if ARENAS[name].partitioned else None
    return Arena(budget_bytes, cheap_below=cheap, layout=layout, debug=debug)


def row(first: Piece) -> Iterator[Piece]:
    """A piece and all to its right."""
    piece: Piece | None = first
    while piece is not None:
        yield piece
        piece = piece.right


def cheap_below(program: Program) -> float:
    """Where Coop's partitioning cuts: the cost density, in ns per byte, that a quarter of all bytes are below.

    A storage's density is the time of the op that makes it / its bytes. The times are those of a profile, so this is known
    before the run; the order of calls does not enter.
    """
    densities = []
    seen = set(program.resident)
    for call in program.calls:
        for s in call.makes:
            if s not in seen and program.size_bytes[s]:
                seen.add(s)
                densities.append((call.time_ns / program.size_bytes[s], program.size_bytes[s]))
    densities.sort()
    left = sum(size for _, size in densities) / 4
    for density, size in densities:
        left -= size
        if left < 0:
            return density
    return 0.0
