"""A program: what a run of a graph or of an operator log asks of an online runtime, call by call.

A Graph says what is computed. A Program also says in which order it is asked for and when each storage is let go, and it may
have views: its ops work on *tensors*, each a view of one *storage*. A Graph has one tensor per storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphs.ir import Graph


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call.

    name             for messages
    inputs           tensors in argument order, repeats included
    makes            for each output, in order, the storage it lives in: a new one, or an older one (then it is a view)
    time_ns          of one execution
    workspace_bytes  scratch held only while it runs
    """

    name: str
    inputs: tuple[int, ...]
    makes: tuple[int, ...]
    time_ns: int
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Program:
    """Calls and releases in program order. Tensors are numbered in the order in which calls make them.

    names, size_bytes  of each storage
    resident           storages in memory from the start to the end; no call makes them, and calls do not list them
    pinned             storages that must not be evicted once made: constants of a log, results of ops with outside effects
    calls              in program order
    events             what happens, in order: the number of a call, or ``-1 - storage`` where the last reference to it goes
    kept               tensors that must be in memory at the end, in the order in which they are brought back
    backward_at        number of the first call of the backward pass, where that is known
    """

    name: str
    names: tuple[str, ...]
    size_bytes: tuple[int, ...]
    resident: frozenset[int]
    pinned: frozenset[int]
    calls: tuple[Call, ...]
    events: tuple[int, ...]
    kept: tuple[int, ...]
    backward_at: int | None = None

    @property
    def base_time_ns(self) -> int:
        """Time of running every call once."""
        return sum(call.time_ns for call in self.calls)


def program_of(graph: Graph) -> Program:
    """Every op of ``graph`` in graph order, every value released after its last read, the graph outputs kept.

    Storages and calls have the numbers of the graph's values and ops. A value that nobody reads is released after its op.
    """
    tensor: dict[int, int] = {}
    calls = []
    for op in graph.ops:
        reads = tuple(tensor[v] for v in op.inputs if v not in graph.resident)
        calls.append(Call(op.name, reads, op.outputs, op.time_ns, op.workspace_bytes))
        for v in op.outputs:
            tensor[v] = len(tensor)
    pinned = frozenset(v for op in graph.ops if op.effect for v in op.outputs)
    stay = graph.resident | graph.outputs | pinned
    last = [readers[-1] if readers else graph.producer[v] for v, readers in enumerate(graph.consumers)]
    events: list[int] = []
    for i, op in enumerate(graph.ops):
        events.append(i)
        events.extend(-1 - v for v in (*op.inputs, *op.outputs) if last[v] == i and v not in stay)
    return Program(
        name=graph.name,
        names=tuple(value.name for value in graph.values),
        size_bytes=tuple(value.size_bytes for value in graph.values),
        resident=graph.resident,
        pinned=pinned,
        calls=tuple(calls),
        events=tuple(events),
        kept=tuple(tensor[v] for v in sorted(graph.outputs, key=lambda v: (graph.producer[v], v)) if v in tensor),
    )
