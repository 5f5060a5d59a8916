"""Files are written whole or not at all, and read with one clear sentence when they are damaged."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphs.errors import InputError, a_kind, quoted, shortened

MOST_LINKS = 40  # in a row, as in Linux
_OPEN = re.compile("(/dev/fd|/proc/[0-9]+(/task/[0-9]+)?/fd)/[0-9]+")  # the names of open files


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises InputError where it shows already that nothing can be written to ``path``. Leaves nothing, not even folders."""
    place = place_of(path)
    with _told("write", path):
        found = _mode(place)
        if found is not None and not _is_replaced(place):
            _check_open(place, found)
            return
        folder = os.path.dirname(place)
        while _mode(folder) is None:
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder):
            raise _os_error(errno.ENOTDIR)
        if max(len(os.fsencode(part)) for part in Path(place).relative_to(folder).parts) > os.pathconf(folder, "PC_NAME_MAX"):
            raise _os_error(errno.ENAMETOOLONG)
        with tempfile.TemporaryFile(dir=folder):  # as a file is written; whoever is root is told that all is allowed
            pass
        if found is not None:
            _check_removable(place, folder)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file beside it: an interruption leaves the old file or none.

    Gzipped where the name ends in ``.gz``. A link stays a link; a device, a pipe or an open file is written to as it is. Raises
    InputError naming the file where it cannot be written.
    """
    place = place_of(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if Path(place).suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # no time stamp: the same content is the same file
    with _told("write", path):
        if not _is_replaced(place):
            with os.fdopen(_opened(place), "wb") as file:
                file.write(data)
            return
        # A short name: that of the file itself can be as long as the file system takes.
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".belady-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a result is as readable as any other
            os.replace(temporary, place)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file, gunzipped where its name ends in ``.gz``. Raises InputError naming the file."""
    source = Path(_name(path))
    try:
        with _told("read", source):
            data = source.read_bytes()
        # Editors on Windows begin a file with a byte order mark.
        return (gzip.decompress(data) if source.suffix == ".gz" else data).decode("utf-8-sig")
    except MemoryError as error:
        raise InputError(f"{source} is larger than the memory that is left") from error
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{source} is damaged: {error}") from error


def read_json(path: str | os.PathLike[str], *, schema: str) -> dict[str, Any]:
    """A JSON object whose ``schema`` entry is the expected one. Raises InputError naming the file."""
    return parse_json(read_text(path), path, schema=schema)


def parse_json(text: str, path: str | os.PathLike[str], *, schema: str) -> dict[str, Any]:
    """The same from the text of the file, which may be a pipe and so can be read only once."""
    try:
        content = from_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema or not isinstance(content, dict):
        raise InputError(f"{path} is not a {schema} file (its schema entry is {quoted(found)})")
    return content


def from_json(text: str) -> Any:
    """``json.loads`` without NaN and infinities: Python writes them by names that other readers refuse. Raises ValueError."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is no finite number")
    return number


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raises InputError where there is no file at ``path``, or one in a folder that may not be entered."""
    name = _name(path)
    with _told("read", path):
        found = _mode(name)
    if found is None or not stat.S_ISREG(found):
        raise InputError(f"there is no file {path}")


def place_of(path: str | os.PathLike[str]) -> str:
    """Where a path leads when links are followed, but for those to open files, as ``/dev/stdout``: what is written there goes
    where the file has come to, and a file that took its place would be another. Raises InputError for what names no file.
    """
    place = name = _name(path)
    try:
        for _ in range(MOST_LINKS):
            folder, last = os.path.split(place)
            place = os.path.join(os.path.realpath(folder), last)
            if _OPEN.fullmatch(place):
                return place
            place = os.path.join(os.path.dirname(place), os.readlink(place))
    except OSError:  # no link, or nothing there
        pass
    with _told("find", path):  # the current folder can be gone
        return os.path.realpath(name)


def is_open_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for a file that this process or another has open."""
    return _OPEN.fullmatch(place_of(path)) is not None


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """Which open file of this process a path stands for: 1 for ``/dev/stdout`` and ``/dev/fd/1``, None for all but such names."""
    folder, number = os.path.split(place := place_of(path))
    own = map(os.path.realpath, ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd"))
    return int(number) if _OPEN.fullmatch(place) and folder in own else None


def _name(path: object) -> str:
    """A path as text. Raises InputError for what no file can be named."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise InputError(f"a file is named by a str or a Path, not by {a_kind(path)}")
    try:
        if b"\0" not in os.fsencode(name):
            return name
    except UnicodeEncodeError:
        pass
    raise InputError(f"no file can have the name {quoted(name)}")


def _is_replaced(place: str) -> bool:
    """Whether a new file takes the place of what is there, if anything is; all else is written to as it is."""
    found = _mode(place)
    return found is None or (stat.S_ISREG(found) and not _OPEN.fullmatch(place))


def _mode(place: str) -> int | None:
    """Kind and rights of what is there; None where nothing is. Raises OSError where that cannot be told."""
    try:
        return os.stat(place).st_mode
    except FileNotFoundError:
        return None


def _check_open(place: str, mode: int) -> None:
    """Raises OSError where nothing can be written to what is no file, or one that is open."""
    if stat.S_ISDIR(mode):
        raise _os_error(errno.EISDIR)
    if (number := descriptor_of(place)) is not None:
        os.write(number, b"")  # raises where it is open for reading
    elif not os.access(place, os.W_OK):
        raise _os_error(errno.EACCES)


def _check_removable(place: str, folder: str) -> None:
    """Raises OSError for a file of somebody else in a folder where everybody may only remove what is theirs, as in /tmp."""
    owners = {0, os.stat(place).st_uid, os.stat(folder).st_uid}
    if os.stat(folder).st_mode & stat.S_ISVTX and os.geteuid() not in owners:
        raise _os_error(errno.EPERM)


def _opened(place: str) -> int:
    """A descriptor for writing to what is there as it is, at the end or where an open file has come to."""
    number = descriptor_of(place)
    return os.open(place, os.O_WRONLY | os.O_APPEND) if number is None else os.dup(number)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@contextmanager
def _told(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Tell an error of the system as an InputError that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot {what} {path}: {error.strerror or error}") from error
