"""Operator logs of the DTR authors as programs: calls over views of storages, and the moments storages are let go.

A Graph (``graphs.importers.dtr_log``) has no views and frees by liveness. A Program keeps what the log says: every view, every
mutation (as a pure op that makes a new storage, as large as the whole one it replaces), and where the framework dropped its
last reference. Constants are made by calls that take no time and read nothing. Source of the format and of the rules:
Kirisame et al., ICLR 2021, appendix C.6.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphs.errors import InputError, quoted, shortened
from graphs.files import read_text
from graphs.program import Call, Program


def read_program(path: str | os.PathLike[str]) -> Program:
    """Read a log (JSON lines, gunzipped where the name ends in ``.gz``). Raises InputError naming file and line."""
    return parse_program(read_text(path), path)


def parse_program(text: str, path: str | os.PathLike[str]) -> Program:
    """The same from the text of the file."""
    source = Path(path)
    reader = _Reader()
    started = False
    try:
        for reader.line, written in enumerate(text.splitlines(), start=1):
            if not written.strip():
                continue
            entry = json.loads(written)
            if not isinstance(entry, dict) or "INSTRUCTION" not in entry:
                raise ValueError("not an instruction of an operator log")
            if started:
                _check_names(entry)
                reader.read(entry)
            else:
                started = entry["INSTRUCTION"] == "ANNOTATE" and entry["ANNOTATION"] == "START"
        reader.close()
    except KeyError as error:
        raise InputError(f"{source} is damaged at line {reader.line}: the instruction has no field {error}") from error
    except (IndexError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{source} is damaged at line {reader.line}: {error}") from error
    if len(reader.size_bytes) == len(reader.constants):
        raise InputError(f"{source} holds no operator call that makes anything after a START mark; it may have been cut short")
    name = source.name.removesuffix(".gz").removesuffix(".log")
    return reader.program(name)


class _Reader:
    """Resolves names to tensors and counts references."""

    def __init__(self) -> None:
        self.line = 0  # read last
        self.names: list[str] = []  # of each storage: the first name of its first tensor
        self.size_bytes: list[int] = []
        self.constants: set[int] = set()
        self.calls: list[Call] = []
        self.events: list[int] = []
        self._storage: list[int] = []  # of each tensor
        self._uses: list[int] = []  # of each storage: references to any of its views
        self._names: dict[str, int] = {}
        self._open: tuple[str, list[int], list[str], int] | None = None  # a call whose results are being described
        self._memory: list[int] = []
        self._alias: list[int] = []
        self._sized: list[str] = []  # whose these are
        self._aliased: list[str] = []
        self._constant = ""
        self._backward_at: int | None = None

    def read(self, entry: dict[str, Any]) -> None:
        """Take in one instruction."""
        kind = entry["INSTRUCTION"]
        if kind == "MEMORY":
            self._memory.append(_count(entry["MEMORY"]))
            self._sized.append(entry["NAME"])
            if self._constant:
                if entry["NAME"] != self._constant:
                    raise ValueError(f"expected the size of {shortened(self._constant)}")
                self._sized.clear()
                s = self._new_storage(self._constant, self._memory.pop())
                self.constants.add(s)
                self._names[self._constant] = self._call("constant", [], [s], 0)[0]
                self._constant = ""
            return
        if kind == "ALIAS":
            self._alias.append(_whole(entry["ALIAS"]))
            self._aliased.append(entry["NAME"])
            return
        self.close()
        if kind == "CONSTANT":
            self._constant = entry["NAME"]
        elif kind == "CALL":
            arguments = [self._tensor(name) for name in entry["ARGS"]]
            self._open = entry["NAME"], arguments, entry["RESULT"], _count(entry["TIME"])
        elif kind == "MUTATE":
            self._mutate(entry)
        elif kind == "COPY":
            self._names[entry["DST"]] = self._refer(self._tensor(entry["SRC"]))
        elif kind == "COPY_FROM":
            old = self._tensor(entry["DST"])
            self._names[entry["DST"]] = self._refer(self._tensor(entry["SRC"]))
            self._release(old)
        elif kind == "RELEASE":
            if entry["NAME"] in self._names:
                self._release(self._names.pop(entry["NAME"]))
        elif kind == "ANNOTATE":
            if entry["ANNOTATION"] == "BACKWARD":
                self._backward_at = len(self.calls)
        else:
            raise ValueError(f"unknown instruction {quoted(kind)}")

    def close(self) -> None:
        """Finish the call whose results have just been described."""
        if self._constant:
            raise ValueError(f"the size of {shortened(self._constant)} is missing")
        if self._open is None:
            if self._memory or self._alias:
                raise ValueError("a size or an alias that belongs to no call")
            return
        name, arguments, results, time_ns = self._open
        if not len(results) == len(self._memory) == len(self._alias):
            found = f"{len(results)} results, {len(self._memory)} sizes and {len(self._alias)} aliases"
            raise ValueError(f"{shortened(name)} has {found}")
        if not results == self._sized == self._aliased:
            raise ValueError(f"the sizes and aliases of {shortened(name)} are not those of its results, in their order")
        makes = [
            self._new_storage(result, size) if alias == -1 else self._storage[arguments[_place(alias, arguments)]]
            for result, size, alias in zip(results, self._memory, self._alias, strict=True)
        ]
        self._open, self._memory, self._alias, self._sized, self._aliased = None, [], [], [], []
        for result, tensor in zip(results, self._call(name, arguments, makes, time_ns), strict=True):
            self._names[result] = tensor

    def program(self, name: str) -> Program:
        """What has been read. Tensors that still have a name at the end are kept."""
        return Program(
            name=name,
            names=tuple(self.names),
            size_bytes=tuple(self.size_bytes),
            resident=frozenset(),
            pinned=frozenset(self.constants),
            calls=tuple(self.calls),
            events=tuple(self.events),
            kept=tuple(dict.fromkeys(self._names.values())),
            backward_at=self._backward_at,
        )

    def _tensor(self, name: str) -> int:
        if name not in self._names:
            raise ValueError(f"{shortened(name)} names no tensor here")
        return self._names[name]

    def _mutate(self, entry: dict[str, Any]) -> None:
        """Inputs -> new tensors, each as large as the whole storage it replaces; the names then mean the new ones."""
        if not isinstance(entry["MUTATE"], list):
            raise ValueError(f"MUTATE must be a list of indices, not {quoted(entry['MUTATE'])}")
        names = [entry["ARGS"][_place(_whole(i), entry["ARGS"])] for i in entry["MUTATE"]]
        arguments = [self._tensor(name) for name in entry["ARGS"]]
        makes = [self._new_storage(name, self.size_bytes[self._storage[self._tensor(name)]]) for name in names]
        made = self._call(entry["NAME"], arguments, makes, _count(entry["TIME"]))
        for name, tensor in zip(names, made, strict=True):
            old = self._names[name]
            self._names[name] = tensor
            self._release(old)

    def _new_storage(self, name: str, size_bytes: int) -> int:
        self.names.append(name)
        self.size_bytes.append(size_bytes)
        self._uses.append(0)
        return len(self.size_bytes) - 1

    def _call(self, name: str, arguments: list[int], makes: list[int], time_ns: int) -> range:
        first = len(self._storage)
        for s in makes:
            self._storage.append(s)
            self._uses[s] += 1
        self.events.append(len(self.calls))
        self.calls.append(Call(name, tuple(arguments), tuple(makes), time_ns))
        return range(first, len(self._storage))

    def _refer(self, tensor: int) -> int:
        self._uses[self._storage[tensor]] += 1
        return tensor

    def _release(self, tensor: int) -> None:
        s = self._storage[tensor]
        self._uses[s] -= 1
        if not self._uses[s]:
            self.events.append(-1 - s)


def _place(index: int, arguments: Sequence[object]) -> int:
    """An index into a call's arguments."""
    if not 0 <= index < len(arguments):
        raise ValueError(f"{index} is no index of its {len(arguments)} arguments")
    return index


def _check_names(entry: dict[str, Any]) -> None:
    """Raise ValueError where something else stands in the place of a name or of a list of names."""
    for key in ("NAME", "SRC", "DST"):
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{key} must be a name, not {quoted(entry[key])}")
    for key in ("ARGS", "RESULT"):
        names = entry.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} must be a list of names, not {quoted(names)}")


def _whole(number: object) -> int:
    """A decimal integer, as a number or as text."""
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise ValueError(f"expected a whole number, found {quoted(number)}")
    return int(number)


def _count(text: object) -> int:
    """A decimal number of bytes or nanoseconds."""
    number = _whole(text)
    if number < 0:
        raise ValueError(f"{text} is negative")
    return number
