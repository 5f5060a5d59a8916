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
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.errors import InputError
from graphs.files import from_json, is_open_file, place_of, read_text, write_whole

if TYPE_CHECKING:
    from planner.result import Plan


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


def finished(plan: Plan) -> Plan:
    """The plan. Raises KeyboardInterrupt where Ctrl-C ended its search: the best until then is no row of a benchmark."""
    if plan.interrupted:
        raise KeyboardInterrupt
    return plan


def write_rows(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with their provenance to a file, whole or not at all; ``-`` is standard output."""
    text = "".join(json.dumps({**row, **provenance(), **row}) + "\n" for row in rows)  # rows read from a file have their own
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        make_folder(path)
        write_whole(path, text)


def put_in_place(rows: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with those of some graphs made anew: the new ones of a graph come where its first was, else at the end."""
    new: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        new.setdefault(row["graph"], []).append(row)
    placed: list[dict[str, Any]] = []
    left = dict(new)
    for row in rows:
        placed += left.pop(row["graph"], []) if row["graph"] in new else [row]
    return [*placed, *(row for rest in left.values() for row in rest)]


BEGIN = '{"graph": '  # of every row


class RowFile:
    """A file of rows that is added to row by row: each is on the disk, whole, when ``append`` returns.

    having    entries that every row has to have which is there; others are of another kind
    rows      those that were there
    repaired  whether the last line was there in part (a machine that stopped while writing); it is cut off

    One process at a time. Raises InputError where another has the file, where it cannot be written or is gzipped, and naming the
    line that is damaged or the row that is of another kind; the file is then as it was.
    """

    def __init__(self, path: str, having: Collection[str] = ()) -> None:
        self.path, self._having = path, having
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
        _check_entries(rows, self._having, self.path)
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


def read_rows(path: str | Path, having: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows of a file. Raises InputError naming the line that is damaged, or the row without one of the entries it has to have."""
    rows = _rows(read_text(path), path)
    _check_entries(rows, having, path)
    return rows


def _check_entries(rows: Sequence[dict[str, Any]], having: Collection[str], path: str | Path) -> None:
    for number, row in enumerate(rows, start=1):
        for name in having:
            if name not in row:
                raise InputError(f"{path} holds rows of another kind: row {number} has no entry {name!r}")


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
