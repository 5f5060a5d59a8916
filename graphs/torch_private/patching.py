"""Other attributes of classes and modules for a while."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

ABSENT: Any = type("absent", (), {"__repr__": lambda self: "absent"})()  # an attribute that is not there

# For each attribute, what those who have replaced it found there, in the order in which they did. A block and a capture in two
# threads may end in any order.
_FOUND: defaultdict[tuple[int, str], list[list[object]]] = defaultdict(list)
_LOCK = threading.RLock()


@contextlib.contextmanager
def patched(owner: object, name: str, by: object) -> Iterator[None]:
    """Have a class or module another attribute, or none; once nobody has replaced it any more, it has its own again."""
    key = id(owner), name
    with _LOCK:
        found = [vars(owner).get(name, ABSENT)]
        _put(owner, name, by)
        _FOUND[key].append(found)
    try:
        yield
    finally:
        with _LOCK:
            layers = _FOUND[key]
            at = next(i for i, layer in enumerate(layers) if layer is found)
            del layers[at]
            if at < len(layers):  # somebody has replaced it since
                layers[at][0] = found[0]
            else:
                _put(owner, name, found[0])
            if not layers:
                del _FOUND[key]


def _put(owner: object, name: str, value: object) -> None:
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
