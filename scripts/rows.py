"""Result rows: one JSON object a line, the same for files and for ``--json -``."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from graphs.errors import InputError
from graphs.files import from_json, is_open_file, place_of, read_text, write_whole


@cache
def provenance() -> dict[str, Any]:
    """Versions of what matters for a number, and the commit of the checkout the command runs from (None outside one)."""
    from importlib import metadata  # takes time to load, and --help needs none

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
    text = "".join(json.dumps({**row, **provenance(), **row}) + "\n" for row in rows)  # rows read from a file have their own
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        make_folder(path)
        write_whole(path, text)


BEGIN = '{"graph": '  # of every row


class RowFile:
    """A file of rows that is added to row by row: each is on the disk, whole, when ``append`` returns.

    rows      those that were there
    repaired  whether the last line was there in part (a machine that stopped while writing); it is cut off

    One process at a time. Raises InputError where another has the file, where it cannot be written or is gzipped, and naming the
    line that is damaged; the file is then as it was.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        check_row_file(path)
        make_folder(path)
        try:
            self._file = self._locked()
            while not self._is_there():  # between opening and locking it was replaced
                self.close()
                self._file = self._locked()
        except BlockingIOError as error:
            raise InputError(f"{path} is being written by another process") from error
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            self.rows, self.repaired = self._read()
        except BaseException:
            self.close()
            raise

    def _locked(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InputError(f"{self.path} is no regular file: rows that are there already could not be read back")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        return file

    def _read(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows that are there, and whether a part of one was cut off."""
        text = read_text(self.path)
        end = text.rfind("\n") + 1
        rows, rest, torn = _rows(text[:end], self.path), text[end:], False
        try:
            rows += _rows(rest, self.path)
        except InputError:
            torn = True
            if rest.strip("\0") and not BEGIN.startswith(rest[: len(BEGIN)]):  # of another kind of file, not ours to cut
                raise InputError(f"{self.path}, line {len(rows) + 1}: expected a row, found {rest[:40]!r}") from None
        if rows and ("graph" not in rows[0] or "schema" in rows[0]):  # the latter as in a saved plan, which is a line
            raise InputError(f"{self.path} holds no result rows, to which some could be added: it begins with {text[:40]!r}")
        if torn:
            os.truncate(self._file, len(text[:end].encode()))
        elif rest:
            os.write(self._file, b"\n")
        return rows, torn

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row with its provenance; that row. Raises InputError where it cannot be, or the file is not there any more."""
        row = {**row, **provenance()}
        self._check_there()
        line = (json.dumps(row) + "\n").encode()
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        return row

    def keep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Have the file hold just these rows: where it does not yet, they take its place at once, and then nothing more can be
        appended. Raises InputError as ``append`` does."""
        self._check_there()
        if read_rows(self.path) != rows:
            self.replace(rows)

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Put other rows in place of all, at once; then nothing more can be appended."""
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def _is_there(self) -> bool:
        """Whether the name still leads to the open file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return False

    def _check_there(self) -> None:
        if not self._is_there():
            raise InputError(
                f"{self.path} was deleted or replaced while rows were added to it; the same command makes them again"
            )

    def close(self) -> None:
        """Let another process have the file."""
        os.close(self._file)


def check_row_file(path: str) -> None:
    """Raises InputError where its name shows already that rows cannot be added to a file."""
    if path == "-":
        raise InputError("rows are added to a file and read back from it, which standard output (-) does not take; name a file")
    if is_open_file(path):
        raise InputError(f"{path}: rows are added to a file and replaced in the end, which no open file can be; name it itself")
    if Path(path).suffix == ".gz":
        raise InputError(f"{path}: rows are added one by one, which a gzipped file does not take; leave out .gz")


def make_folder(path: str) -> None:
    """Make the folder that a file is to be written to, that of its target for a link. Raises InputError naming the file."""
    try:
        Path(place_of(path)).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a file. Raises InputError naming the line that is damaged."""
    return _rows(read_text(path), path)


def _rows(text: str, path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = from_json(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows
