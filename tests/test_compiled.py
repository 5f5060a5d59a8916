"""Compiled code whose machine code cannot be kept, or is damaged, on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="limits the size of files")
ROOT = Path(__file__).resolve().parents[1]
MODULE = """
from planner.process.compiled import njit

@njit
def twice(x: int) -> int:
    return 2 * x
"""
COMPILING = "compiling code for this machine, once: it may take a minute, which no time limit counts"
SCRIPT = "import doubled; print(doubled.twice(21), len(doubled.twice.stats.cache_hits))"


def run(folder: Path, cache: Path, *, most_bytes: int = resource.RLIM_INFINITY) -> tuple[str, str]:
    """What a process prints that compiles the function, on both outputs; files may have so many bytes."""
    if not (folder / "doubled.py").exists():  # numba before 0.68 goes by when it was written
        (folder / "doubled.py").write_text(MODULE)
    where = {"PYTHONPATH": f"{ROOT}:{folder}", "NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **where, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def test_a_second_process_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    assert run(tmp_path / "code", tmp_path / "cache") == ("42 0", COMPILING)
    assert run(tmp_path / "code", tmp_path / "cache") == ("42 1", "")


@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
def test_what_is_damaged_is_compiled_again(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    run(tmp_path / "code", tmp_path / "cache")
    (kept,) = (tmp_path / "cache").rglob(pattern)
    for damaged in (b"", kept.read_bytes()[:60], b"\0" * 100):
        kept.write_bytes(damaged)
        assert run(tmp_path / "code", tmp_path / "cache") == ("42 0", COMPILING)
        assert run(tmp_path / "code", tmp_path / "cache") == ("42 1", "")


def test_a_full_disk_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for _ in range(2):
        out, err = run(tmp_path / "code", tmp_path / "cache", most_bytes=100)
        first, then = err.splitlines()
        assert out == "42 0" and first == COMPILING and "NUMBA_CACHE_DIR" in then


def test_no_folder_to_write_to_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    nowhere = tmp_path / "file"  # a folder that cannot be made, whoever asks
    nowhere.write_text("")
    (tmp_path / "code" / "__pycache__").write_text("")
    out, err = run(tmp_path / "code", nowhere / "cache")
    first, then = err.splitlines()
    assert out == "42 0" and "NUMBA_CACHE_DIR" in first and then == COMPILING
