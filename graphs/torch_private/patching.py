"""Other attributes of classes and modules for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

ABSENT: Any = type("absent", (), {"__repr__": lambda self: "absent"})()  # an attribute that is not there


@contextlib.contextmanager
def patched(owner: object, name: str, by: object) -> Iterator[None]:
    """Have a class or module another attribute, or none; it has its own again afterwards."""
    before = vars(owner).get(name, ABSENT)
    if by is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, by)
    try:
        yield
    finally:
        if before is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
