"""Fewer pauses of Python's garbage collector in what makes many objects."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

NEW_OBJECTS = 200_000  # since the last collection, which a search waits for; Python's own number is 700 to 2,000

# Python 3.12 counts objects of its own that live forever among the frozen ones, some 400; whoever freezes has many more.
_PYTHONS_OWN = 1_000

_frozen_by: str | None = None  # "us" inside of the outermost block, "others" once others are known to


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keep Python's garbage collector away from what is there already.

    Every op of a run leaves Python objects behind, so the collector soon wants to go through all there are, torch's own among
    them, and that took half of the time of a run. Where somebody else has frozen objects, they are his to thaw.
    """
    global _frozen_by
    if _frozen_by is None and gc.get_freeze_count() > _PYTHONS_OWN:  # counting many takes long, so it is done once
        _frozen_by = "others"
    if _frozen_by is not None:
        yield
        return
    _frozen_by = "us"
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _frozen_by = None


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
_searches = 0  # under way
_thresholds = gc.get_threshold()  # before them


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Have Python's garbage collector wait for many new objects.

    A search makes millions that are in no cycle, and every few hundred of them set the collector off: beside torch's objects that
    took a fifth of its time. Where somebody else has it off, it stays so.
    """
    global _searches, _thresholds
    with _lock:
        if _searches == 0:
            _thresholds = gc.get_threshold()
            if _thresholds[0]:
                gc.set_threshold(max(NEW_OBJECTS, _thresholds[0]), *_thresholds[1:])
        _searches += 1
    try:
        yield
    finally:
        with _lock:
            _searches -= 1
            if _searches == 0:
                gc.set_threshold(*_thresholds)
