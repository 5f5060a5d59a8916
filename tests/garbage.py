"""Collections of garbage that go through what a test makes alone."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_before() -> Iterator[None]:
    """Where nothing fits Python's collector is asked each time, and would go through all that was imported before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
