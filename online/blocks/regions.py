"""Memory that tensors share without sharing a storage: NumPy arrays lend the same bytes to several."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from online.blocks.recipes import Content, Known


def _is_there(known: Known) -> bool:
    """Whether the program still has the storage, so that its memory can be no other's yet."""
    content = known()
    return content is not None and content.at is not None and content.at() is not None


class Regions:
    """Disjoint regions of memory in the order of their addresses, each with the contents that lie in it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._known: list[list[Known]] = []

    def add(self, known: Known, start: int, size_bytes: int) -> None:
        """A content of ``size_bytes`` bytes at the address ``start``: one region with those it overlaps."""
        end = start + size_bytes
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)
        together = [known]
        for i in range(first, last):
            there = [other for other in self._known[i] if _is_there(other)]
            if there:
                start, end = min(start, self._starts[i]), max(end, self._ends[i])
                together += there
        self._starts[first:last], self._ends[first:last], self._known[first:last] = [start], [end], [together]

    def around(self, address: int) -> list[Content]:
        """The contents of the region with this address."""
        i = bisect.bisect_right(self._starts, address) - 1
        contents = [known() for known in self._known[i]] if i >= 0 and address < self._ends[i] else []
        return [content for content in contents if content is not None]

    def clear(self) -> None:
        """Forget all of them."""
        self._starts.clear()
        self._ends.clear()
        self._known.clear()
