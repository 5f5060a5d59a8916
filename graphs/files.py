"""Files are written whole or not at all, and read with one clear sentence when they are damaged."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from graphs.errors import InputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises InputError where it shows already that no file can be written to ``path``. Makes nothing, not even folders."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        is_possible = target.is_file() or os.access(target, os.W_OK)  # a file is replaced, a device written to
        why = errno.EACCES
    else:
        folder = next(folder for folder in target.parents if folder.exists())
        why = errno.EISDIR if target.is_dir() else errno.EACCES if folder.is_dir() else errno.ENOTDIR
        is_possible = why == errno.EACCES and os.access(folder, os.W_OK)
    if not is_possible:
        raise InputError(f"cannot write {path}: {os.strerror(why)}")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file beside it: an interruption leaves the old file or none.

    Gzipped where the name ends in ``.gz``. A link stays a link; a device or pipe is written to as it is. Raises InputError
    naming the file where it cannot be written.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # no time stamp: the same content is the same file
    temporary = ""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a result is as readable as any other
        os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file, gunzipped where its name ends in ``.gz``. Raises InputError naming the file."""
    source = Path(path)
    try:
        data = source.read_bytes()
        return (gzip.decompress(data) if source.suffix == ".gz" else data).decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{source} is damaged: {error}") from error


def read_json(path: str | os.PathLike[str], *, schema: str) -> dict[str, Any]:
    """A JSON object whose ``schema`` entry is the expected one. Raises InputError naming the file."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema or not isinstance(content, dict):
        raise InputError(f"{path} is not a {schema} file (its schema entry is {found!r})")
    return content
