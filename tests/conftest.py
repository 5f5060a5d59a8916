"""Shared by all tests: repeatable hypothesis runs, the data folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Tests run side by side, and torch would start a thread per core in each; set before anything imports it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For the tests with deterministic kernels: looked at once, at the first matrix product of the process on CUDA.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# In a checkout that is not installed the scripts have the name of their folder.
if importlib.util.find_spec("belady") is None:
    sys.modules["belady"] = importlib.import_module("scripts")

_LOOK_THROUGH_ALL = {"test_leftovers", "test_capture"}

# The same examples in every run, none timed: other work on the machine must not fail a test.
settings.register_profile("belady", deadline=None, derandomize=True, database=None)
settings.load_profile("belady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First those that look through all objects there are: their number doubles while tests run."""
    items.sort(key=lambda item: item.path.stem not in _LOOK_THROUGH_ALL)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with operator logs and Checkmate instances, named by the environment variable BELADY_DATA."""
    folder = os.environ.get("BELADY_DATA")
    if not folder:
        pytest.skip("BELADY_DATA names no data folder")
    if not Path(folder).is_dir():
        pytest.fail(f"BELADY_DATA={folder} is no folder")
    return Path(folder)
