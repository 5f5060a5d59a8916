"""Instances of Checkmate's MILP as graphs: one output per op, costs of a profile, parameters as one resident value.

Source of the instances: Shah et al., "Memory Optimization for Deep Networks" (ICLR 2021), whose authors ran the MILP of Jain et
al., "Checkmate" (MLSys 2020), on them. Fields used: ``n``, ``edges`` ([u, v]: op v reads the output of op u), ``mem_bytes``,
``time_ms``, ``op``, ``fixed_bytes_last`` and ``loss``; ``workspace_mb`` (units of 2**20 bytes) on request.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from graphs.errors import InputError, InvalidGraph, quoted
from graphs.files import read_text
from graphs.ir import Graph, Op, Value

COST_UNIT_NS = 10_000  # published costs are round(100 * milliseconds), so in units of 10 us
_LISTS = {"mem_bytes": int, "time_ms": int | float, "op": str}


def load_checkmate(path: str | os.PathLike[str], *, workspace: bool = False) -> Graph:
    """Read an instance.

    workspace  count the scratch memory of the ops, which the published runs ignored. For ops that ran in place the file has a
               number below 0, which counts as none.

    Times are multiples of ``COST_UNIT_NS``, so a schedule's ``time_ns // COST_UNIT_NS`` is its published cost. The value
    "fixed" is resident: a published budget counts it too. The last op makes the graph's output. Raises InputError naming the
    file and the field.
    """
    return parse_checkmate(read_text(path), path, workspace=workspace)


def parse_checkmate(text: str, path: str | os.PathLike[str], *, workspace: bool = False) -> Graph:
    """The same from the text of the file."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("no object at the top")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no Checkmate instance: {error}") from error
    try:
        return from_instance(content, Path(path).stem, workspace=workspace)
    except KeyError as error:
        raise InputError(f"{path} is no Checkmate instance: it has no field {error}") from error
    except InvalidGraph as error:
        raise InvalidGraph(f"{path} holds no valid graph: {error}") from error
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def from_instance(content: dict[str, Any], name: str, *, workspace: bool = False) -> Graph:
    """The graph of a decoded instance. Raises KeyError for a missing field, others for a wrong one."""
    n = content["n"]
    if not _is(n, int) or n < 1:
        raise ValueError(f"n must be a positive integer, not {quoted(n)}")
    for key, kind in (_LISTS | {"workspace_mb": int | float} if workspace else _LISTS).items():
        if not isinstance(content[key], list) or len(content[key]) != n:
            raise ValueError(f"{key} must be a list of {n} entries")
        for i, entry in enumerate(content[key]):
            if not _is(entry, kind) or (isinstance(entry, float) and not math.isfinite(entry)):
                raise ValueError(f"{key}[{i}] is {quoted(entry)}")
    inputs: list[list[int]] = [[] for _ in range(n)]
    if not isinstance(content["edges"], list):
        raise ValueError(f"edges must be a list of pairs, not {quoted(content['edges'])}")
    for edge in content["edges"]:
        if not isinstance(edge, list) or len(edge) != 2 or not all(_is(v, int) and 0 <= v < n for v in edge):
            raise ValueError(f"edge {quoted(edge)} does not join two of the ops 0 to {n - 1}")
        inputs[edge[1]].append(edge[0])
    fixed_bytes, loss = content["fixed_bytes_last"], content.get("loss", n)
    for key, number in (("fixed_bytes_last", fixed_bytes), ("loss", loss)):
        if not _is(number, int):
            raise ValueError(f"{key} must be an integer, not {quoted(number)}")
    ops = tuple(
        Op(
            f"{kind}:{i}",
            tuple(dict.fromkeys(inputs[i])),
            (i,),
            round(100 * content["time_ms"][i]) * COST_UNIT_NS,
            max(0, round(content["workspace_mb"][i] * 2**20)) if workspace else 0,
            kind,
            backward=i > loss,
        )
        for i, kind in enumerate(content["op"])
    )
    values = (*(Value(op.name, size) for op, size in zip(ops, content["mem_bytes"], strict=True)), Value("fixed", fixed_bytes))
    return Graph(str(content.get("name", name)), ops, values, frozenset({n}), frozenset({n - 1}))


def _is(entry: object, kind: Any) -> bool:
    return isinstance(entry, kind) and not isinstance(entry, bool)
