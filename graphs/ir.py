"""The compute graph: what is computed, from what, at what cost. Plain integers, no torch.

A graph is a list of ops in a valid order. It says nothing about when anything is freed or run again; that is a
Schedule (``planner.schedule``), and what a Schedule costs is ``planner.simulate``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from graphs.errors import InputError, InvalidGraph, a_kind

WRITTEN_OUT = 12  # ops


@dataclass(frozen=True, slots=True)
class Value:
    """One storage: bytes that live and die together. All views of it are this same Value.

    name        for people; need not be unique
    size_bytes  >= 0, already rounded to the allocator's granularity where the device has one
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call; costs are those of a single execution.

    name             unique in its graph; the key in files and messages
    inputs, outputs  ids of Values; no id twice, none in both; running the op makes all outputs at once
    time_ns          measured or modelled run time, >= 0
    workspace_bytes  scratch held only while the op runs, >= 0
    kind             operator name, for reports ("aten.mm")
    random           draws random numbers: run again, it repeats its first draw
    effect           acts on the outside world: runs exactly once
    backward         belongs to the backward pass; no cost and no schedule's validity depends on it
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time_ns: int
    workspace_bytes: int = 0
    kind: str = ""
    random: bool = False
    effect: bool = False
    backward: bool = False


@dataclass(frozen=True, repr=False)
class Graph:
    """Ops in a valid order over Values; checked when built, immutable after.

    name      for people and result rows
    ops       every op reads only resident values and outputs of earlier ops
    values    each is resident or the output of exactly one op
    resident  ids in memory from the start to the end: parameters, buffers, inputs; never freed, always counted
    outputs   ids that must be in memory at the end: loss, gradients, updated buffers
    device    what the costs and sizes were made for ("cpu", "NVIDIA H200", "" where it does not matter)

    Derived, computed once:
    producer        producer[v]: index of the op that makes value v, -1 for a resident value
    consumers       consumers[v]: indices of the ops that read v, ascending
    resident_bytes  bytes of all resident values

    Raises InvalidGraph where a rule is broken.
    """

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    resident: frozenset[int]
    outputs: frozenset[int]
    device: str = ""
    producer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    consumers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    resident_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        producer, consumers = _check(self)
        object.__setattr__(self, "producer", producer)
        object.__setattr__(self, "consumers", consumers)
        object.__setattr__(self, "resident_bytes", sum(self.values[v].size_bytes for v in self.resident))

    def __repr__(self) -> str:
        """What it is, in a line; a small graph, as in a test, is written out whole."""
        if len(self.ops) <= WRITTEN_OUT:
            shown = (f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self) if entry.repr)
            return f"Graph({', '.join(shown)})"
        counts = f"{len(self.ops):,} ops, {len(self.values):,} values, {self.resident_bytes:,} bytes resident"
        return f"Graph({self.name}, {counts}, keep-all {self.keep_all_time_ns / 1e6:.3f} ms)"

    @property
    def keep_all_time_ns(self) -> int:
        """Time of running every op once: the least any schedule can take."""
        return sum(op.time_ns for op in self.ops)

    def fingerprint(self) -> str:
        """Hash of everything a schedule depends on: structure, sizes, costs, flags. Names do not count."""
        content = [
            [[op.inputs, op.outputs, op.time_ns, op.workspace_bytes, op.random, op.effect] for op in self.ops],
            [value.size_bytes for value in self.values],
            sorted(self.resident),
            sorted(self.outputs),
        ]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]

    def with_costs(self, time_ns: Iterable[int], workspace_bytes: Iterable[int] | None = None) -> Graph:
        """The same graph with other op times (and workspaces, where given), one per op."""
        times = list(time_ns)
        spaces = [op.workspace_bytes for op in self.ops] if workspace_bytes is None else list(workspace_bytes)
        ops = (replace(op, time_ns=t, workspace_bytes=w) for op, t, w in zip(self.ops, times, spaces, strict=True))
        return replace(self, ops=tuple(ops))

    def in_order(self, order: Sequence[int]) -> Graph:
        """The same graph with its ops in another order: op ``order[i]`` becomes op i. Values keep their numbers."""
        return replace(self, ops=tuple(self.ops[v] for v in order))


def check_graph(graph: object, what: str) -> None:
    """Refuse what is no Graph. Raises InputError; ``what`` names the function that was given it."""
    if not isinstance(graph, Graph):
        raise InputError(f"{what} takes a Graph (that of a captured Step is step.graph), not {a_kind(graph)}")


def _check(graph: Graph) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Check every rule of the classes above; return producer and consumers."""
    n_values = len(graph.values)
    for v, value in enumerate(graph.values):
        if not isinstance(value.size_bytes, int) or value.size_bytes < 0:
            raise InvalidGraph(f"value {v} ({value.name}): size_bytes must be an int >= 0, not {value.size_bytes!r}")
    for what, ids in (("resident", graph.resident), ("outputs", graph.outputs)):
        for v in ids:
            if not isinstance(v, int) or not 0 <= v < n_values:
                raise InvalidGraph(f"{what} names value {v!r}, but values are numbered 0 to {n_values - 1}")

    producer = [-1] * n_values
    consumers: list[list[int]] = [[] for _ in range(n_values)]
    names: set[str] = set()
    for i, op in enumerate(graph.ops):
        where = f"op {i} ({op.name})"
        if op.name in names:
            raise InvalidGraph(f"{where}: another op has this name; names must be unique")
        names.add(op.name)
        for what, number in (("time_ns", op.time_ns), ("workspace_bytes", op.workspace_bytes)):
            if not isinstance(number, int) or number < 0:
                raise InvalidGraph(f"{where}: {what} must be an int >= 0, not {number!r}")
        touched = op.inputs + op.outputs
        if len(set(touched)) != len(touched):
            raise InvalidGraph(f"{where}: a value stands twice among its inputs and outputs {touched}")
        for v in touched:
            if not isinstance(v, int) or not 0 <= v < n_values:
                raise InvalidGraph(f"{where}: names value {v!r}, but values are numbered 0 to {n_values - 1}")
        for v in op.inputs:
            if v not in graph.resident and producer[v] < 0:
                raise InvalidGraph(f"{where}: reads value {v} ({graph.values[v].name}), which no earlier op makes")
            consumers[v].append(i)
        for v in op.outputs:
            if v in graph.resident:
                raise InvalidGraph(f"{where}: makes value {v} ({graph.values[v].name}), which is resident")
            if producer[v] >= 0:
                raise InvalidGraph(f"{where}: makes value {v} ({graph.values[v].name}), already made by op {producer[v]}")
            producer[v] = i
    for v, p in enumerate(producer):
        if p < 0 and v not in graph.resident:
            raise InvalidGraph(f"value {v} ({graph.values[v].name}): neither resident nor made by any op")
    return tuple(producer), tuple(map(tuple, consumers))
