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
_users: list[bool] = []  # those under way: whether each lets full collections come
_thresholds = gc.get_threshold()  # before them
_NEVER = 2**31 - 1  # collections of younger objects before a full one


@contextlib.contextmanager
def rare_collections(*, full: bool = True) -> Iterator[None]:
    """Have Python's garbage collector wait for many new objects.

    A search makes millions that are in no cycle, and every op of a run leaves some behind, which stay. Every few hundred of them
    set the collector off: beside torch's objects that took a fifth of a search's time and half of a run's. Freezing what is there
    already (``gc.freeze``) costs no less, and all garbage among it then waits for a full collection, which seldom comes. Where
    somebody else has the collector off, it stays so.

    full  whether full collections still come; they go through all that the process has, a second for some millions of objects,
          and what is under a time limit cannot stop them
    """
    global _thresholds
    with _lock:
        if not _users:
            _thresholds = gc.get_threshold()
        _users.append(full)
        _set_thresholds()
    try:
        yield
    finally:
        with _lock:
            _users.remove(full)
            _set_thresholds()


def _set_thresholds() -> None:
    """For all that are under way together."""
    youngest, younger, old = _thresholds
    if _users and youngest:
        youngest = max(NEW_OBJECTS, youngest)
        old = old if all(_users) else _NEVER
    gc.set_threshold(youngest, younger, old)
