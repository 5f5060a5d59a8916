"""Measured op times, remembered: one file a device; in it, one table for each set of versions and settings. [torch]"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from graphs.errors import InputError
from graphs.files import check_writable, read_json, write_whole

SCHEMA = "belady-times-1"

Times = dict[str, list[int]]  # by signature: time_ns (at least 1), workspace_bytes


class OpTimes:
    """The file for a device, in a folder that is made; ``read`` and ``add`` are for the settings of torch there are now.

    Several processes may add to it at once. Raises InputError where the folder cannot be made.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device = _device_name(device)
        self._setting = _setting(device)
        self.path = folder / f"{re.sub(r'[^a-z0-9]+', '-', self._device.lower()).strip('-')}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the cache folder {folder}: {error.strerror or error}; name another one (environment variable "
                f"BELADY_CACHE)"
            ) from error

    def read(self) -> Times:
        """Those that are known. Raises InputError where the file is damaged."""
        return self._tables().get(self._setting, {})

    def check_writable(self) -> None:
        """Raises InputError where it shows already that nothing can be added."""
        try:
            check_writable(self.path)
        except InputError as error:
            raise InputError(f"{error}; name another folder for measured op times (environment variable BELADY_CACHE)") from error

    def add(self, found: Times) -> None:
        """Write measurements beside those in the file by now. Raises InputError where that cannot be done."""
        with self._alone():
            tables = self._tables()
            tables.setdefault(self._setting, {}).update(found)
            write_whole(self.path, json.dumps({"schema": SCHEMA, "device": self._device, "times": tables}, indent=1) + "\n")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process is between reading and writing: a lock on the folder, since the file is replaced."""
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"cannot read the cache folder {self.path.parent}: {error.strerror or error}") from error
        try:
            with contextlib.suppress(OSError):  # a file system without locks: what another process adds now may be lost
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _tables(self) -> dict[str, Times]:
        if not self.path.exists():
            return {}
        again = "delete this file of measured op times to measure them again"
        try:
            content = read_json(self.path, schema=SCHEMA)
        except InputError as error:
            raise InputError(f"{error}; {again}") from error
        tables, device = content.get("times"), content.get("device", self._device)
        if not isinstance(tables, dict) or not all(map(_is_table, tables.values())):
            raise InputError(f"{self.path} is damaged; {again}")
        if device != self._device:
            raise InputError(f"{self.path} is of another device, {device}, not of {self._device}; {again}")
        return tables


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Where the files are: ``given``, else $BELADY_CACHE, else belady in the user's cache folder."""
    own = os.environ.get("XDG_CACHE_HOME", "")
    usual = Path(own if os.path.isabs(own) else "~/.cache") / "belady"  # the standard has relative ones ignored
    folder = Path(given or os.environ.get("BELADY_CACHE") or usual)
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise InputError(f"there is no home folder for {folder}; name another one (environment variable BELADY_CACHE)") from error


def _is_table(table: object) -> bool:
    return isinstance(table, dict) and all(
        isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry) and entry[0] > 0 <= entry[1]
        for entry in table.values()
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@functools.cache
def _processor() -> str:
    """Its name; that of a virtual machine may say little, so family and model stand beside it."""
    with contextlib.suppress(OSError):  # not Linux
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
        first: dict[str, str] = {}
        for key, _, value in lines:
            first.setdefault(key.strip(), value.strip())
        if name := first.get("model name"):
            return ", ".join([name, *(f"{key} {first[key]}" for key in ("cpu family", "model", "stepping") if key in first)])
    return platform.processor() or platform.machine()


def _setting(device: torch.device) -> str:
    """What decides, beside device and arguments, which kernel runs."""
    parts = [f"torch {torch.__version__}", f"deterministic {torch.are_deterministic_algorithms_enabled()}"]
    backends = torch.backends
    if device.type == "cuda":
        cudnn = backends.cudnn
        parts += [
            f"cuda {torch.version.cuda}",
            f"cudnn {cudnn.version() if cudnn.enabled else 'off'}",  # type: ignore[no-untyped-call]
            f"benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic}",
            f"float32 matmul {backends.cuda.matmul.fp32_precision}",
            f"float32 convolution {cudnn.conv.fp32_precision}",  # type: ignore[attr-defined]
            f"libraries {backends.cuda.preferred_blas_library()}, {backends.cuda.preferred_linalg_library()}",
        ]
    else:
        parts += [
            f"instructions {backends.cpu.get_cpu_capability()}",
            f"mkldnn {backends.mkldnn.enabled}",
            f"float32 matmul {backends.mkldnn.matmul.fp32_precision}",  # type: ignore[attr-defined]
            f"float32 convolution {backends.mkldnn.conv.fp32_precision}",  # type: ignore[attr-defined]
        ]
    return ", ".join(parts)
