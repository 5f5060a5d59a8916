"""The clock that time limits go by: it stands still while code is compiled, which happens once on a machine.

Else the first plans of an installation would have half of their time, or none.
"""

from __future__ import annotations

import time

# Seconds that went into compiling so far, and when the compilation that is going on began: one object, for other threads to read.
_compiled: tuple[float, float | None] = (0.0, None)


def now_s() -> float:
    """Seconds since some moment, less those that went into compiling: as ``time.perf_counter``, for limits and deadlines."""
    compiled_s, since = _compiled
    return (time.perf_counter() if since is None else since) - compiled_s


def stand_still() -> None:
    """A compilation begins."""
    global _compiled
    _compiled = _compiled[0], time.perf_counter()


def go_on() -> None:
    """It has ended."""
    global _compiled
    compiled_s, since = _compiled
    if since is not None:
        _compiled = compiled_s + time.perf_counter() - since, None
