"""DTR as the paper writes it, for graphs: recursive, every score computed anew. Slow and plain; the engine is held against it."""

from __future__ import annotations

import math

from graphs.ir import Graph
from online.heuristics import Heuristic
from planner.schedule import Compute, Free, Schedule, Step


class NothingToEvict(Exception):
    """Out of memory."""


class PlainDtr:
    """One run under ``budget_bytes``; ``eager``: whether a released value is evicted at once."""

    def __init__(self, graph: Graph, budget_bytes: int, rule: Heuristic, *, eager: bool) -> None:
        self.graph, self.budget_bytes, self.rule, self.eager = graph, budget_bytes, rule, eager
        self.size = [value.size_bytes for value in graph.values]
        self.present = set(graph.resident)
        self.made: set[int] = set()
        self.pinned = set(graph.resident) | {v for op in graph.ops if op.effect for v in op.outputs}
        self.locks = dict.fromkeys(range(len(self.size)), 0)
        self.pool: list[int] = []
        self.last = dict.fromkeys(range(len(self.size)), 0)
        self.clock = 1
        self.steps: list[Step] = []
        self.component: dict[int, list[int]] = {}  # of an evicted value: a shared list that holds the sum

    def run(self) -> Schedule | None:
        """The schedule; None out of memory."""
        graph = self.graph
        try:
            for i, op in enumerate(graph.ops):
                self.materialize(i, op.outputs[0])
                for v in op.outputs:
                    self.last[v] = self.clock
                for v in (*op.inputs, *op.outputs):
                    dead = max((*graph.consumers[v], graph.producer[v])) == i and v not in graph.outputs
                    if self.eager and dead and v in self.present and v not in self.pinned:
                        self.evict(v)
            for v in sorted(graph.outputs - graph.resident, key=lambda v: (graph.producer[v], v)):
                if v not in self.present:
                    self.materialize(graph.producer[v], v)
                self.lock(v)
        except NothingToEvict:
            return None
        return tuple(self.steps)

    def materialize(self, i: int, wanted: int) -> None:
        op = self.graph.ops[i]
        inputs = [v for v in op.inputs if v not in self.graph.resident]
        for v in inputs:
            self.last[v] = self.clock
        missing = [v for v in inputs if v not in self.present]
        for v in inputs:
            if v not in missing:
                self.lock(v)
        for v in missing:
            if v not in self.present:
                self.materialize(self.graph.producer[v], v)
            self.lock(v)
        needed = sum(self.size[v] for v in op.outputs) + op.workspace_bytes
        while sum(self.size[v] for v in self.present) + needed > self.budget_bytes:
            self.evict(self.victim())
        self.steps.append(Compute(i))
        self.clock += op.time_ns
        new = [v for v in op.outputs if v not in self.present and v != wanted]
        for v in (*new, *([wanted] if wanted not in self.present else [])):
            if v in self.made:
                self.leave_component(v)
            self.made.add(v)
            self.present.add(v)
            if v not in self.pinned:
                self.pool.append(v)
        for v in inputs:
            self.locks[v] -= 1
            if not self.locks[v] and v not in self.pinned:
                self.pool.append(v)

    def lock(self, v: int) -> None:
        if not self.locks[v] and v in self.pool:
            self.pool.remove(v)
        self.locks[v] += 1

    def victim(self) -> int:
        best, lowest = -1, math.inf
        for v in self.pool:
            local = self.graph.ops[self.graph.producer[v]].time_ns
            score = self.rule.score(local, self.neighbourhood_ns(v), self.size[v], self.clock - self.last[v])
            if score <= lowest:
                best, lowest = v, score
                if score == 0:
                    break
        if best < 0:
            raise NothingToEvict
        return best

    def evict(self, v: int) -> None:
        self.present.remove(v)
        self.pool.remove(v)
        self.steps.append(Free(v))
        self.join_components(v)

    # What an evicted neighbourhood costs

    def parents(self, v: int) -> list[int]:
        return [u for u in self.graph.ops[self.graph.producer[v]].inputs if u not in self.pinned]

    def children(self, v: int) -> list[int]:
        return [u for i in self.graph.consumers[v] for u in self.graph.ops[i].outputs if u in self.made]

    def gone(self, v: int) -> bool:
        return v in self.made and v not in self.present

    def neighbourhood_ns(self, v: int) -> int:
        if self.rule.cost == "union_find":
            near = {id(self.component[u]): self.component[u][0] for u in (*self.parents(v), *self.children(v)) if self.gone(u)}
            return sum(near.values())
        halves = {"neighborhood": [self.parents, self.children], "ancestors": [self.parents]}.get(self.rule.cost, [])
        total = 0
        for step in halves:
            found: set[int] = set()
            todo = [v]
            while todo:
                for u in step(todo.pop()):
                    if self.gone(u) and u not in found:
                        found.add(u)
                        todo.append(u)
            total += sum(self.graph.ops[self.graph.producer[u]].time_ns for u in found)
        return total

    def join_components(self, v: int) -> None:
        joined = [self.component[u] for u in (*self.parents(v), *self.children(v)) if self.gone(u) and u != v]
        distinct = {id(c): c for c in joined}.values()
        whole = [self.graph.ops[self.graph.producer[v]].time_ns + sum(c[0] for c in distinct)]
        self.component = {u: whole if any(c is d for d in distinct) else c for u, c in self.component.items()} | {v: whole}

    def leave_component(self, v: int) -> None:
        self.component[v][0] -= self.graph.ops[self.graph.producer[v]].time_ns
        del self.component[v]
