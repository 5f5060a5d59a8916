"""Graphs as JSON: one file says everything a Graph says, and reading it back gives an equal Graph.

    {"schema": "belady-graph-1", "name": ..., "device": ...,
     "values": [[name, size_bytes], ...],          numbered from 0 in this order
     "resident": [value, ...], "outputs": [value, ...],
     "ops": [{"name": ..., "inputs": [value, ...], "outputs": [value, ...], "time_ns": ...}, ...]}

A graph may also have ``costs``, an op ``workspace_bytes``, ``kind``, ``random``, ``effect`` and ``backward``; what is left out is
0, "" or false.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from graphs.errors import InputError, InvalidGraph, a_kind, quoted, shortened
from graphs.files import parse_json, read_text, write_whole
from graphs.ir import Graph, Op, Value, check_graph

SCHEMA = "belady-graph-1"

_GRAPH_ENTRIES = {"schema": str, "name": str, "device": str, "values": list, "resident": list, "outputs": list, "ops": list}
_OP_ENTRIES = {"name": str, "inputs": list, "outputs": list, "time_ns": int}
_OP_OPTIONS: dict[str, tuple[type, int | str]] = {
    "workspace_bytes": (int, 0),
    "kind": (str, ""),
    "random": (bool, False),
    "effect": (bool, False),
    "backward": (bool, False),
}


def to_dict(graph: Graph) -> dict[str, Any]:
    """What is in a file of ``save_graph``, as plain lists, strings and numbers."""
    ops = []
    for op in graph.ops:
        entry: dict[str, Any] = {"name": op.name, "inputs": list(op.inputs), "outputs": list(op.outputs), "time_ns": op.time_ns}
        entry |= {key: found for key, (_, usual) in _OP_OPTIONS.items() if (found := getattr(op, key)) != usual}
        ops.append(entry)
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "device": graph.device,
        **({"costs": graph.costs} if graph.costs else {}),
        "values": [[value.name, value.size_bytes] for value in graph.values],
        "resident": sorted(graph.resident),
        "outputs": sorted(graph.outputs),
        "ops": ops,
    }


def from_dict(content: dict[str, Any]) -> Graph:
    """Inverse of ``to_dict``. Raises InputError saying which entry is wrong, InvalidGraph where a rule of Graph is broken."""
    if not isinstance(content, dict):
        raise InputError(f"a graph is a dict, as to_dict makes it, not {a_kind(content)}")
    _check(content, _GRAPH_ENTRIES, {"costs": str}, "the graph")
    if content["schema"] != SCHEMA:
        raise InputError(f"expected the schema {SCHEMA!r}, found {quoted(content['schema'])}")
    values = []
    for v, entry in enumerate(content["values"]):
        match entry:
            case [str(name), int(size_bytes)] if not isinstance(size_bytes, bool):
                values.append(Value(name, size_bytes))
            case _:
                raise InputError(f"value {v} must be [name, size_bytes], not {quoted(entry)}")
    ops = []
    for i, entry in enumerate(content["ops"]):
        if not isinstance(entry, dict):
            raise InputError(f"op {i} must be an object, not {quoted(entry)}")
        where = f"op {i} ({shortened(str(entry.get('name')))})"
        _check(entry, _OP_ENTRIES, {key: kind for key, (kind, _) in _OP_OPTIONS.items()}, where)
        ends = {key: tuple(_ids(entry[key], f"{key} of {where}")) for key in ("inputs", "outputs")}
        ops.append(Op(**entry | ends))
    resident, outputs = (frozenset(_ids(content[key], key)) for key in ("resident", "outputs"))
    return Graph(content["name"], tuple(ops), tuple(values), resident, outputs, content["device"], content.get("costs", ""))


def to_text(graph: Graph) -> str:
    """What ``save_graph`` writes: JSON, one op a line."""
    lines = []
    for key, entry in to_dict(graph).items():
        text = json.dumps(entry)
        if key == "ops" and entry:
            text = "[\n" + ",\n".join(json.dumps(op) for op in entry) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{" + ",\n".join(lines) + "}\n"


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write ``graph`` as JSON, gzipped where the name ends in ``.gz``. Raises InputError for what is no Graph."""
    check_graph(graph, "save_graph")
    write_whole(path, to_text(graph))


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read what ``save_graph`` wrote. Raises InputError naming the file and what is wrong with it."""
    return parse_graph(read_text(path), path)


def parse_graph(text: str, path: str | os.PathLike[str]) -> Graph:
    """The same from the text of the file."""
    content = parse_json(text, path, schema=SCHEMA)
    try:
        return from_dict(content)
    except InvalidGraph as error:
        raise InvalidGraph(f"{path} holds no valid graph: {error}") from error
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _check(entry: Mapping[str, Any], needed: Mapping[str, type], optional: Mapping[str, type], where: str) -> None:
    """Every needed key, no unknown one, each of its type. A bool is no int here."""
    for key in needed:
        if key not in entry:
            raise InputError(f"{where} has no entry {key!r}")
    for key, found in entry.items():
        kind = needed.get(key) or optional.get(key)
        if kind is None:
            raise InputError(f"{where} has an unknown entry {quoted(key)}")
        if type(found) is not kind:
            raise InputError(f"{where}: {key} must be {kind.__name__}, not {quoted(found)}")


def _ids(entries: list[Any], where: str) -> list[int]:
    for entry in entries:
        if type(entry) is not int:
            raise InputError(f"{where}: expected value numbers, found {quoted(entry)}")
    return entries
