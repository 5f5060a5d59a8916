"""Operator logs of the DTR authors as graphs of storages.

The format and its rules: Kirisame et al., ICLR 2021, appendix C.6; ``graphs.importers.dtr_program`` reads the file. From a
program to a graph:

- A storage is a Value. Constants (parameters, inputs) are resident from the start, as in every Graph here; the log itself creates
  them one by one.
- A call all of whose results are views of its arguments is no op: it vanishes, and with it its time (``views_ns``), because
  views cost nothing in a Graph. What reads a view reads its storage. A call with views among its results makes only its new
  storages.
- A mutation is an op that reads the old storage and makes a new one, as large as the whole old one.
- Graph outputs are the storages with a live reference at the end of the log.
- Releases are not kept: a Schedule says when a value is freed. The framework often holds a storage longer than its last use.
"""

from __future__ import annotations

import os

from graphs.importers.dtr_program import read_program
from graphs.ir import Graph, Op, Value
from graphs.program import Call, Program


def load_dtr_log(path: str | os.PathLike[str]) -> Graph:
    """Read a log (JSON lines, gunzipped where the name ends in ``.gz``). Raises InputError naming file and line."""
    return graph_of(read_program(path))


def graph_of(program: Program) -> Graph:
    """The graph of a log's program; ops are named ``name:number of the call``, values by the first name of the storage."""
    storage = _storages(program)
    resident = _constants(program)
    ops = []
    made: set[int] = set(resident)
    for i, call in enumerate(program.calls):
        makes = tuple(dict.fromkeys(s for s in call.makes if s not in made))
        made.update(makes)
        if not makes and call.makes:
            continue
        ops.append(
            Op(
                f"{call.name}:{i}",
                tuple(dict.fromkeys(storage[t] for t in call.inputs)),
                makes,
                call.time_ns,
                call.workspace_bytes,
                kind=call.name,
                backward=program.backward_at is not None and i >= program.backward_at,
            )
        )
    values = tuple(Value(name, size) for name, size in zip(program.names, program.size_bytes, strict=True))
    outputs = frozenset(storage[t] for t in program.kept) - resident
    return Graph(program.name, tuple(ops), values, resident, outputs)


def views_ns(program: Program) -> int:
    """Time of the calls that make nothing but views: part of ``base_time_ns``, but of no Graph."""
    made: set[int] = set()
    total = 0
    for call in program.calls:
        if call.makes and made.issuperset(call.makes):
            total += call.time_ns
        made.update(call.makes)
    return total


def _storages(program: Program) -> list[int]:
    """The storage of each tensor."""
    return [s for call in program.calls for s in call.makes]


def _constants(program: Program) -> frozenset[int]:
    """Storages that calls without cost or argument declare: a program starts without them, a graph has them from the start."""
    return program.resident | frozenset(s for call in program.calls if _declares(program, call) for s in call.makes)


def _declares(program: Program, call: Call) -> bool:
    return not call.inputs and program.pinned.issuperset(call.makes)
