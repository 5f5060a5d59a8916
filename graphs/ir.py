"""The compute graph: what is computed, from what, at what cost. Plain integers, no torch.

A graph is a list of ops in a valid order. It says nothing about when anything is freed or run again; that is a
Schedule (``planner.schedule``), and what a Schedule costs is ``planner.simulate``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from graphs.errors import InputError, InvalidGraph, a_kind, quoted, shortened

WRITTEN_OUT = 12  # ops
T = TypeVar("T")


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
    costs     where the op times come from ("roofline", "measured", "given"; "" where nobody says); equal graphs may
              differ in it

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
    costs: str = field(default="", compare=False)
    producer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    consumers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    resident_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("ops", tuple), ("values", tuple), ("resident", frozenset), ("outputs", frozenset)):
            if type(given := getattr(self, name)) is not kind:
                object.__setattr__(self, name, _made(kind, given, name))
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

    def with_costs(self, time_ns: Iterable[int], workspace_bytes: Iterable[int] | None = None, *, costs: str = "given") -> Graph:
        """The same graph with other op times (and workspaces, where given), one per op; ``costs`` says where they come from."""
        times = _one_per_op(self, "time_ns", time_ns)
        kept = (op.workspace_bytes for op in self.ops)
        spaces = _one_per_op(self, "workspace_bytes", kept if workspace_bytes is None else workspace_bytes)
        ops = (replace(op, time_ns=t, workspace_bytes=w) for op, t, w in zip(self.ops, times, spaces, strict=True))
        return replace(self, ops=tuple(ops), costs=costs)

    def in_order(self, order: Sequence[int]) -> Graph:
        """The same graph with its ops in another order: op ``order[i]`` becomes op i. Values keep their numbers."""
        try:
            return replace(self, ops=tuple(self.ops[v] for v in order))
        except (IndexError, TypeError) as error:
            raise InvalidGraph(f"an order has each of the ops 0 to {len(self.ops) - 1} once, not {quoted(order)}") from error


def check_graph(graph: object, what: str) -> None:
    """Refuse what is no Graph. Raises InputError; ``what`` names the function that was given it."""
    if not isinstance(graph, Graph):
        raise InputError(f"{what} takes a Graph (that of a captured Step is step.graph), not {a_kind(graph)}")


def _made(kind: Callable[[Any], T], given: object, what: str) -> T:
    """What is given, as a tuple or a frozenset: a Graph may be built from lists and sets, but has none that can change."""
    try:
        return kind(given)
    except TypeError as error:
        raise InvalidGraph(f"{what} must be a {getattr(kind, '__name__', kind)}, not {quoted(given)}") from error


def _one_per_op(graph: Graph, what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    found: tuple[int, ...] = _made(tuple, numbers, what)
    if len(found) != len(graph.ops):
        how = "shorter" if len(found) < len(graph.ops) else "longer"
        raise InvalidGraph(f"{what} is {how} than the ops of {graph.name}: {len(found):,} numbers for {len(graph.ops):,} ops")
    return found


def _check(graph: Graph) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Check every rule of the classes above; return producer and consumers. A search builds large graphs often: what a message
    needs is made only for a message.
    """
    values, resident = graph.values, graph.resident
    _check_kinds(graph)
    n_values = len(values)
    for v, value in enumerate(values):
        if type(value.size_bytes) is not int or value.size_bytes < 0:
            raise InvalidGraph(f"{_value(graph, v)}: size_bytes must be an int >= 0, not {quoted(value.size_bytes)}")
    for what, ids in (("resident", resident), ("outputs", graph.outputs)):
        for v in ids:
            if type(v) is not int or not 0 <= v < n_values:
                raise InvalidGraph(f"{what} names value {quoted(v)}, but values are numbered 0 to {n_values - 1}")

    producer = [-1] * n_values
    consumers: list[list[int]] = [[] for _ in range(n_values)]
    names: set[str] = set()
    for i, op in enumerate(graph.ops):
        if op.name in names:
            raise InvalidGraph(f"{_op(graph, i)}: another op has this name; names must be unique")
        names.add(op.name)
        if type(op.time_ns) is not int or op.time_ns < 0:
            raise InvalidGraph(f"{_op(graph, i)}: time_ns must be an int >= 0, not {quoted(op.time_ns)}")
        if type(op.workspace_bytes) is not int or op.workspace_bytes < 0:
            raise InvalidGraph(f"{_op(graph, i)}: workspace_bytes must be an int >= 0, not {quoted(op.workspace_bytes)}")
        touched = op.inputs + op.outputs
        for v in touched:
            if type(v) is not int or not 0 <= v < n_values:
                raise InvalidGraph(f"{_op(graph, i)}: names value {quoted(v)}, but values are numbered 0 to {n_values - 1}")
        if len(set(touched)) != len(touched):
            raise InvalidGraph(f"{_op(graph, i)}: a value stands twice among its inputs and outputs {quoted(touched)}")
        for v in op.inputs:
            if producer[v] < 0 and v not in resident:
                raise InvalidGraph(f"{_op(graph, i)}: reads {_value(graph, v)}, which no earlier op makes")
            consumers[v].append(i)
        for v in op.outputs:
            if v in resident:
                raise InvalidGraph(f"{_op(graph, i)}: makes {_value(graph, v)}, which is resident")
            if producer[v] >= 0:
                raise InvalidGraph(f"{_op(graph, i)}: makes {_value(graph, v)}, already made by op {producer[v]}")
            producer[v] = i
    for v, p in enumerate(producer):
        if p < 0 and v not in resident:
            raise InvalidGraph(f"{_value(graph, v)}: neither resident nor made by any op")
    return tuple(producer), tuple(map(tuple, consumers))


def _check_kinds(graph: Graph) -> None:
    """Ops, values, names and lists of ids are what they are said to be."""
    for what, text in (("name", graph.name), ("device", graph.device), ("costs", graph.costs)):
        if not isinstance(text, str):
            raise InvalidGraph(f"the {what} of a graph must be a str, not {quoted(text)}")
    for v, value in enumerate(graph.values):
        if not isinstance(value, Value):
            raise InvalidGraph(f"value {v} must be a Value, not {quoted(value)}")
        if not isinstance(value.name, str):
            raise InvalidGraph(f"value {v}: its name must be a str, not {quoted(value.name)}")
    for i, op in enumerate(graph.ops):
        if not isinstance(op, Op):
            raise InvalidGraph(f"op {i} must be an Op, not {quoted(op)}")
        if not isinstance(op.name, str):
            raise InvalidGraph(f"op {i}: its name must be a str, not {quoted(op.name)}")
        if not isinstance(op.kind, str):
            raise InvalidGraph(f"{_op(graph, i)}: its kind must be a str, not {quoted(op.kind)}")
        for what, flag in (("random", op.random), ("effect", op.effect), ("backward", op.backward)):
            if type(flag) is not bool:
                raise InvalidGraph(f"{_op(graph, i)}: {what} must be True or False, not {quoted(flag)}")
        if type(op.inputs) is not tuple or type(op.outputs) is not tuple:
            what, ids = ("outputs", op.outputs) if type(op.inputs) is tuple else ("inputs", op.inputs)
            raise InvalidGraph(f"{_op(graph, i)}: {what} must be a tuple of numbers of values, not {quoted(ids)}")


def _op(graph: Graph, i: int) -> str:
    return f"op {i} ({shortened(graph.ops[i].name)})"


def _value(graph: Graph, v: int) -> str:
    return f"value {v} ({shortened(graph.values[v].name)})"
