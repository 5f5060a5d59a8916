"""Result rows: one JSON object a line, the same for files and for ``--json -``."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from graphs.errors import InputError
from graphs.files import read_text, write_whole


@cache
def provenance() -> dict[str, Any]:
    """Versions of what matters for a number, and the commit of the checkout the command runs from (None outside one)."""
    versions = {"python": platform.python_version()}
    for package in ("belady", "torch", "ortools", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {"versions": versions, "commit": commit}


def write_rows(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with their provenance to a file, whole or not at all; ``-`` is standard output."""
    text = "".join(json.dumps({**row, **provenance()}) + "\n" for row in rows)
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        make_folder(path)
        write_whole(path, text)


def append_row(path: str, row: dict[str, Any]) -> None:
    """Add one row with its provenance to a file, so that a long run can be interrupted and resumed."""
    make_folder(path)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({**row, **provenance()}) + "\n")


def make_folder(path: str) -> None:
    """Make the folder that a file is to be written to. Raises InputError naming the file."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a file. Raises InputError naming the line that is damaged."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows
