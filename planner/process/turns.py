"""Who runs Python when a solver's thread has something to do before, between or after solves: that thread, not the search.

The compiled code of the search beside it keeps the interpreter's lock, so the other thread gets it back late each time it has
lost it: rows that take 20 ms to look for took up to 270.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_turn = threading.Lock()


@contextlib.contextmanager
def first() -> Iterator[None]:
    """Be waited for, for as long as this takes."""
    with _turn:
        yield


def give_way() -> None:
    """Wait for those that go first; for whoever runs long, now and then."""
    if _turn.locked():
        with _turn:
            pass
