"""Graphs from files: our own JSON, operator logs of the DTR authors, instances of Checkmate's MILP.

checkmate  instances of the MILP
dtr_log    operator logs as graphs (``dtr_program``: as programs, with views and releases)
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from graphs.errors import InputError
from graphs.files import read_text
from graphs.importers.checkmate import load_checkmate, parse_checkmate
from graphs.importers.dtr_log import graph_of, load_dtr_log
from graphs.importers.dtr_program import parse_program
from graphs.ir import Graph
from graphs.serialize import load_graph, parse_graph

__all__ = ["load", "load_checkmate", "load_dtr_log", "load_graph"]


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a graph file, its format found from its content; ``.gz`` files of any format are unzipped.

    A file whose first line is a JSON object with an INSTRUCTION is an operator log; any other JSON object with a ``schema`` is
    one of our graphs, and one with ``edges`` a Checkmate instance. The file is read once: it may be a pipe. Raises InputError
    naming the file and what is wrong.
    """
    text = read_text(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if Path(path).name.removesuffix(".gz").endswith(".log") or _is_instruction(first):
        return graph_of(parse_program(text, path))
    expected = "expected our own JSON, an operator log (one JSON instruction a line) or a Checkmate instance"
    try:
        keys = _keys(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no graph file: {error}; {expected}") from error
    if "schema" in keys:
        return parse_graph(text, path)
    if keys >= {"n", "edges"}:
        return parse_checkmate(text, path)
    raise InputError(f"{path} is no graph file: {expected}")


def _is_instruction(line: str) -> bool:
    try:
        return "INSTRUCTION" in _keys(line)
    except (ValueError, RecursionError):
        return False


def _keys(text: str) -> set[str]:
    content = json.loads(text)
    return set(content) if isinstance(content, dict) else set()
