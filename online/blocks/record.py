"""What a block did, as a graph and a schedule of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphs.ir import Graph, Op, Value
from online.engines.growing import GrowingEngine
from planner.schedule import Compute, Free, Schedule

if TYPE_CHECKING:
    from online.blocks.kinds import Entry


def enter(table: list[Any], number: int, entry: Any) -> None:
    """Enter something under its number; numbers left out (of ops that failed) stay empty."""
    if number == len(table):
        table.append(entry)
    else:
        table += [None] * (number + 1 - len(table))
        table[number] = entry


class Record:
    """What is noted of the ops of the engine while they run; steps and numbers are the engine's own.

    log       of each op of the engine
    resident  storages of the engine that are there from the start
    """

    def __init__(self, engine: GrowingEngine) -> None:
        self._engine = engine
        self.log: list[Entry] = []
        self.resident: list[int] = []

    def declare(
        self, entry: Entry, reads: tuple[int, ...], sizes: tuple[int, ...], workspace_bytes: int, time_ns: int = 0
    ) -> int:
        """A new op and its storages, in the engine and here."""
        enter(self.log, self._engine.ops, entry)
        return self._engine.declare(reads, sizes, workspace_bytes, time_ns)

    def written(self, alive: list[int]) -> tuple[Graph, Schedule]:
        """Graph and schedule, with storages and ops numbered without gaps; ``alive``: storages that are in memory at the end."""
        engine = self._engine
        ran = {step for step in engine.steps if step >= 0}
        log = [(op, *entry) for op, entry in enumerate(self.log) if op in ran]
        made = [s for op, *_ in log for s in engine.outputs(op)]
        numbers = {s: v for v, s in enumerate([*self.resident, *made])}
        ops = {op: i for i, (op, *_) in enumerate(log)}
        values = [Value(f"resident_{v}", engine.size_bytes[s]) for v, s in enumerate(self.resident)]
        listed = []
        for op, kind, acts, backward in log:
            time_ns, workspace_bytes = engine.cost(op)
            name = f"{kind.name.removeprefix('aten.')}_{ops[op]}"
            makes = engine.outputs(op)
            values += [Value(name, engine.size_bytes[s]) for s in makes]
            listed.append(
                Op(
                    name,
                    tuple(dict.fromkeys(map(numbers.__getitem__, engine.inputs(op)))),
                    tuple(map(numbers.__getitem__, makes)),
                    time_ns,
                    workspace_bytes,
                    kind=kind.kind,
                    random=kind.random,
                    effect=acts,
                    backward=backward,
                )
            )
        resident = frozenset(numbers[s] for s in self.resident)
        outputs = frozenset(numbers[s] for s in alive) - resident
        graph = Graph("eager", tuple(listed), tuple(values), resident, outputs)
        steps = (Compute(ops[step]) if step >= 0 else Free(numbers[-1 - step]) for step in engine.steps)
        return graph, tuple(steps)
