"""The garbage collector during runs: away from old objects, and as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from online.pauses import old_objects_left_alone


class Node:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_old_objects_are_frozen_until_the_outermost_block_ends() -> None:
    old = weakref.ref(Node())
    with pytest.raises(ZeroDivisionError), old_objects_left_alone():
        assert gc.get_freeze_count() > 0
        new = weakref.ref(Node())
        with old_objects_left_alone():
            pass
        assert gc.get_freeze_count() > 0
        gc.collect()
        assert new() is None, "garbage of the block itself is collected in it"
        assert old() is not None
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None
    with old_objects_left_alone():
        assert gc.get_freeze_count() > 0


def test_what_others_have_frozen_stays_so() -> None:
    code = """
import gc
from online.pauses import old_objects_left_alone
gc.freeze()
before = gc.get_freeze_count()
for _ in range(2):
    with old_objects_left_alone():
        assert gc.get_freeze_count() == before
assert gc.get_freeze_count() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
