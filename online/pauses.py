"""Fewer pauses of Python's garbage collector in what makes many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_frozen_by: str | None = None  # "us" inside of the outermost block, "others" once others are known to


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keep Python's garbage collector away from what is there already.

    Every op of a run leaves Python objects behind, so the collector soon wants to go through all there are, torch's own among
    them, and that took half of the time of a run. Where somebody else has frozen objects, they are his to thaw.
    """
    global _frozen_by
    if _frozen_by is None and gc.get_freeze_count():  # counting many takes long, so it is done once
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
