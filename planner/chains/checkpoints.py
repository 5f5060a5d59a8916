"""Checkpoint sets: which forward ops may be checkpoints, and the schedule that a set of them stands for.

Source of the rules for general graphs: Jain et al., "Checkmate" (MLSys 2020), appendix B. On a chain they are those of Chen et
al., "Training deep nets with sublinear memory cost" (2016): keep what the checkpoints made, drop the rest, and run a segment
again as a whole when the backward pass gets to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from graphs.errors import InputError
from graphs.ir import Graph
from planner.chains.chain import forward_count, separators
from planner.incumbent import Incumbent
from planner.schedule import Schedule, makers, with_frees
from planner.simulate import simulate

KINDS = ("articulation", "linearized")


def candidates_of(graph: Graph, kind: str) -> list[int]:
    """Forward ops that may be checkpoints, ascending.

    kind  "articulation": separators of the forward pass, from whose outputs alone all later ops can be made; "linearized": every
          op of the forward pass, as if it read only the op before it
    """
    return [op for _, op in separators(graph)] if kind == "articulation" else list(range(forward_count(graph)))


def kinds(asked: str) -> tuple[str, ...]:
    """The kinds of candidates that an option names. Raises InputError for others."""
    if asked == "both":
        return KINDS
    if asked not in KINDS:
        raise InputError(f"candidates must be 'articulation', 'linearized' or 'both', not {asked!r}")
    return (asked,)


def runs(graph: Graph, checkpoints: Collection[int]) -> list[int]:
    """The ops in the order they run, repeats included, where these forward ops are checkpoints.

    A segment is the forward ops after one checkpoint up to the next. After the forward pass there are: what the checkpoints made,
    what ops with an effect made, the graph's outputs, and the last segment. Before a backward op that misses something of a
    segment, all that the rest of the backward pass reads of this segment is made again, from what is there. Gradients are made
    once and held.
    """
    count = forward_count(graph)
    producer = graph.producer
    last_read = [-1] * len(graph.values)  # last backward op that reads a forward value
    for i in range(count, len(graph.ops)):
        for v in graph.ops[i].inputs:
            last_read[v] = i
    chosen = set(checkpoints)
    segment = [0] * count
    members: list[list[int]] = [[]]  # values the backward pass reads, by segment
    for i in range(count):
        segment[i] = len(members) - 1
        members[-1].extend(v for v in graph.ops[i].outputs if last_read[v] >= 0)
        if i in chosen:
            members.append([])
    present = set(graph.resident)
    for i in range(count):
        op = graph.ops[i]
        if i in chosen or op.effect or segment[i] == len(members) - 1:
            present.update(op.outputs)
        else:
            present.update(v for v in op.outputs if v in graph.outputs)
    order = list(range(count))
    for b in range(count, len(graph.ops)):
        missing = {segment[producer[v]] for v in graph.ops[b].inputs if v not in present}
        if missing:
            wanted = [v for s in missing for v in members[s] if v not in present and last_read[v] >= b]
            order.extend(makers(graph, wanted, present))
            present.update(wanted)
        order.append(b)
        present.update(graph.ops[b].outputs)
    return order


@dataclass
class Trials:
    """The cheapest of several checkpoint sets whose schedule fits the budget of a search.

    schedule, checkpoints  the best one so far, None and empty without any
    needs_bytes            the least peak of all that were tried
    """

    search: Incumbent
    schedule: Schedule | None = None
    checkpoints: frozenset[int] = frozenset()
    time_ns: int = 0
    peak_bytes: int = 0
    needs_bytes: int | None = None
    _seen: set[frozenset[int]] = field(default_factory=set)

    def take(self, checkpoints: Iterable[int]) -> bool:
        """Try a set, where there is time to; whether it is now the best."""
        graph, chosen = self.search.graph, frozenset(checkpoints)
        if chosen in self._seen:
            return False
        sequence = runs(graph, chosen)
        if not self.search.in_time(sequence):
            return False
        self._seen.add(chosen)
        schedule = with_frees(graph, sequence)
        trace = simulate(graph, schedule)
        if self.needs_bytes is None or trace.peak_bytes < self.needs_bytes:
            self.needs_bytes = trace.peak_bytes
        better = self.schedule is None or (trace.time_ns, trace.peak_bytes) < (self.time_ns, self.peak_bytes)
        if trace.peak_bytes > self.search.budget_bytes or not better:
            return False
        self.schedule, self.checkpoints = schedule, chosen
        self.time_ns, self.peak_bytes = trace.time_ns, trace.peak_bytes
        return True

    @property
    def count(self) -> int:
        """How many different sets were tried."""
        return len(self._seen)


def every_root(graph: Graph, kind: str) -> Iterator[int]:
    """Chen's square-root rule: of n candidates every k-th, k the integer root of n."""
    found = candidates_of(graph, kind)
    step = int(len(found) ** 0.5)
    return iter(found[step - 1 :: step] if step else ())
