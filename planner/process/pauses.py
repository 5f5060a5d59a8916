"""Fewer pauses of Python's garbage collector in what makes many objects."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

NEW_OBJECTS = 50_000  # since the last collection, which is waited for; Python's own number is 700 to 2,000


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's garbage collector off: what it runs (finalizers, callbacks) would run in the midst of this."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_lock = threading.Lock()
_users = 0  # under way
_thresholds = gc.get_threshold()  # before them


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Have Python's garbage collector wait for many new objects.

    A search makes millions that are in no cycle, and every op of a run leaves some behind, which stay. Every few hundred of them
    set the collector off: beside torch's objects that took a fifth of a search's time and half of a run's. Freezing what is there
    already (``gc.freeze``) costs no less, and all garbage among it then waits for a full collection, which seldom comes. Where
    somebody else has the collector off, it stays so.
    """
    global _users, _thresholds
    with _lock:
        if _users == 0:
            _thresholds = gc.get_threshold()
            if _thresholds[0]:
                gc.set_threshold(max(NEW_OBJECTS, _thresholds[0]), *_thresholds[1:])
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_thresholds)
