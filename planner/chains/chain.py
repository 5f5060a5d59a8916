"""A training graph as a chain of stages: forward pass and backward pass, separators, checkpointing's view of a graph.

The forward pass is cut after separators: ops through whose outputs alone the ops so far feed the later ones (1-separators;
in a graph in which every op lies between the first and the last they are the articulation points of its undirected form).
What lies between two cuts is a stage. A backward op belongs to the last stage at which all it reads can be there, so the stages'
backward passes, run from the last stage to the first, are a valid order of the backward pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from graphs.errors import InputError
from graphs.ir import Graph

SMALL = 0.01  # share of the bytes of all forward values that may be held throughout, so that there are more separators


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of a chain.

    forward   its ops of the forward pass, in graph order
    backward  its ops of the backward pass, in graph order
    inputs    values it reads from the stage before: the outputs of one op, or what crosses a narrow place (empty for the first
              stage)
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in the order of the forward pass.

    carried  forward values that are read across cuts and held all the time for it
    """

    graph: Graph
    stages: tuple[Stage, ...]
    carried: frozenset[int]


def forward_count(graph: Graph) -> int:
    """How many ops the forward pass has: all before the first op marked as backward."""
    return next((i for i, op in enumerate(graph.ops) if op.backward), len(graph.ops))


def separators(graph: Graph, *, carried: Collection[int] = frozenset()) -> list[tuple[int, int]]:
    """Where the forward pass can be cut: pairs (op made last before the cut, separator), ascending, each separator once.

    carried  values that may cross a cut all the same
    """
    count = forward_count(graph)
    last = _last_forward_readers(graph, count)
    crossing: dict[int, int] = {}  # producer: how many of its values cross
    ends: dict[int, list[int]] = {}
    cuts: list[tuple[int, int]] = []
    for at in range(count):
        for v in graph.ops[at].outputs:
            if last[v] > at and v not in carried:
                crossing[at] = crossing.get(at, 0) + 1
                ends.setdefault(last[v], []).append(at)
        for maker in ends.pop(at, ()):
            crossing[maker] -= 1
            if not crossing[maker]:
                del crossing[maker]
        if len(crossing) == 1:
            (separator,) = crossing
            if not cuts or cuts[-1][1] != separator:
                cuts.append((at, separator))
    return cuts


def chain_of_blocks(graph: Graph, *, carried: Collection[int] = frozenset(), most_ops: float = math.inf) -> Chain:
    """The graph cut at all its separators. A graph without any is a chain of one stage.

    most_ops  a stage of more forward ops is cut further, where it can be: where few bytes cross (``_narrow``)
    """
    cuts = [at for at, _ in separators(graph, carried=carried)]
    large = [(a, b) for a, b in pairwise((-1, *cuts, forward_count(graph) - 1)) if b - a > most_ops]
    if large:
        held, oldest = _crossing(graph, carried)
        cuts = sorted((*cuts, *(at for a, b in large for at in _narrow(held, oldest, a, b))))
    return _cut(graph, cuts, frozenset(carried))


def chain_of_ops(graph: Graph) -> Chain:
    """The graph as a chain with one op a stage, not counting ops that depend on resident values alone (say, dropout masks), which
    belong to the stage of their only reader.

    Raises InputError naming the op that breaks the chain.
    """
    count = forward_count(graph)
    if count == len(graph.ops):
        raise InputError(f"{graph.name} has no backward pass (no op is marked as backward), so there is no chain to reverse")
    if not count:
        raise InputError(
            f"{graph.name} has no forward pass (its first op is marked as backward), so there is no chain to reverse"
        )
    side: set[int] = set()
    main: list[int] = []
    for i in range(count):
        made = {graph.producer[v] for v in graph.ops[i].inputs} - {-1}
        if main and made <= side:
            side.add(i)
            continue
        known = side | ({main[-1]} if main else set())
        if strange := sorted(made - known):
            raise _broken(graph, i, f"it reads an output of {_named(graph, strange[0])}")
        main.append(i)
    place = {op: at for at, op in enumerate(main)}
    # A side op goes to the stage of the main op that it feeds, directly or through other side ops.
    stage_of = dict(place)
    for i in sorted(side, reverse=True):
        fed = sorted({stage_of[c] for v in graph.ops[i].outputs for c in graph.consumers[v] if c < count})
        if len(fed) > 1:
            other = next(c for v in graph.ops[i].outputs for c in graph.consumers[v] if c < count and stage_of[c] == fed[1])
            raise _broken(graph, other, f"it reads what {_named(graph, i)} made for {_named(graph, main[fed[0]])}")
        stage_of[i] = fed[0] if fed else next((at for at, op in enumerate(main) if op > i), len(main) - 1)
    drawn = [stage_of[i] for i in range(count) if graph.ops[i].random or graph.ops[i].effect]
    if drawn != sorted(drawn):
        i = next(i for i in range(count) if (graph.ops[i].random or graph.ops[i].effect) and stage_of[i] > min(drawn))
        raise _broken(graph, i, "random ops and ops with effects stand in another order than the ops they feed")
    stages: list[list[int]] = [[] for _ in main]
    for i in range(count):
        stages[stage_of[i]].append(i)
    chain = _chain(graph, stages, frozenset())
    for at, stage in enumerate(chain.stages):
        for i in stage.backward:
            for v in graph.ops[i].inputs:
                maker = graph.producer[v]
                if 0 <= maker < count and stage_of[maker] != at and v not in stage.inputs:
                    raise _broken(graph, i, f"it needs an output of {_named(graph, maker)} beyond its backward stage")
    return chain


def held_throughout(chain: Chain) -> frozenset[int]:
    """Values that chain methods count all the time: outputs of the graph that the forward pass makes, and carried ones."""
    graph = chain.graph
    made = (v for stage in chain.stages for i in stage.forward for v in graph.ops[i].outputs)
    return chain.carried | {v for v in made if v in graph.outputs}


def left_for(chain: Chain) -> list[frozenset[int]]:
    """For each stage, what later stages leave for it and for earlier ones: made by their backward ops, or saved by their
    forward ops and still wanted. One entry more at the end: what is left in the end, outputs of the graph.
    """
    graph = chain.graph
    count = forward_count(graph)
    made_at: dict[int, int] = {}
    home: dict[int, int] = {}
    for at, stage in enumerate(chain.stages):
        made_at.update((v, at) for i in stage.backward for v in graph.ops[i].outputs)
        home.update((v, at) for i in stage.forward for v in graph.ops[i].outputs)
    last_at: dict[int, int] = {}  # the last stage to run backward that wants the value; -1: the end
    for at, stage in enumerate(chain.stages):
        for i in stage.backward:
            for v in graph.ops[i].inputs:
                last_at[v] = min(at, last_at.get(v, at))
    for v in graph.outputs:
        if graph.producer[v] >= count:
            last_at[v] = -1
    live: list[set[int]] = [set() for _ in range(len(chain.stages) + 1)]
    for v, end in last_at.items():
        begin = made_at.get(v, home.get(v))
        if begin is None or v in chain.carried:
            continue
        for at in range(max(end, 0), begin):
            live[at].add(v)
        if end < 0:
            live[-1].add(v)
    return [frozenset(values) for values in live]


def small_crossing(graph: Graph, share: float = SMALL) -> frozenset[int]:
    """Forward values to carry across cuts: of the smallest ones, together at most this share of all, those that cross some cut.

    Positions, masks and the like are read by every block of a network; without this they would leave no separator.
    """
    count = forward_count(graph)
    last = _last_forward_readers(graph, count)
    sizes = sorted((graph.values[v].size_bytes, v) for i in range(count) for v in graph.ops[i].outputs if last[v] >= 0)
    room = share * sum(size for size, _ in sizes)
    small: set[int] = set()
    for size, v in sizes:
        room -= size
        if room < 0:
            break
        small.add(v)
    cuts = [*(at for at, _ in separators(graph, carried=small)), count]
    return frozenset(v for v in small if cuts[bisect_left(cuts, graph.producer[v])] < last[v])


def _broken(graph: Graph, i: int, why: str) -> InputError:
    return InputError(f"{graph.name} is not a chain at {_named(graph, i)}: {why}; method rockmate takes any graph")


def _named(graph: Graph, i: int) -> str:
    return f"op {i} ({graph.ops[i].name})"


def _last_forward_readers(graph: Graph, count: int) -> list[int]:
    """For each value, the last op of the forward pass that reads it; -1 where none does."""
    last = [-1] * len(graph.values)
    for i in range(count):
        for v in graph.ops[i].inputs:
            last[v] = i
    return last


def _crossing(graph: Graph, carried: Collection[int]) -> tuple[list[int], list[int]]:
    """For each op of the forward pass, of the values that it and ops before it make for later ones of it: all their bytes, and
    the first op that made one of them (the op itself where there are none). Values that are ``carried`` do not count.
    """
    last = _last_forward_readers(graph, forward_count(graph))
    ends: dict[int, int] = {}
    waiting: list[tuple[int, int]] = []  # a heap of pairs (maker, last reader)
    held: list[int] = []
    oldest: list[int] = []
    now = 0
    for at in range(forward_count(graph)):
        for v in graph.ops[at].outputs:
            if last[v] > at and v not in carried:
                now += graph.values[v].size_bytes
                ends[last[v]] = ends.get(last[v], 0) + graph.values[v].size_bytes
                heappush(waiting, (at, last[v]))
        now -= ends.pop(at, 0)
        while waiting and waiting[0][1] <= at:
            heappop(waiting)
        held.append(now)
        oldest.append(waiting[0][0] if waiting else at)
    return held, oldest


def _narrow(held: Sequence[int], oldest: Sequence[int], begin: int, end: int) -> list[int]:
    """Where to cut the stage from after op ``begin`` to op ``end``: after ops where fewer bytes cross than next to them.

    What crosses a cut must have been made since the one before, since a stage reads from the one before it alone. So a recurrent
    network is cut into its time steps, and a block with a skip connection around it is not cut.
    """
    cuts = [begin]
    for at in range(begin + 1, end):
        is_least = 0 < held[at] <= held[at + 1] and (at - 1 == cuts[-1] or held[at] < held[at - 1])
        if is_least and oldest[at] > cuts[-1]:
            cuts.append(at)
    while len(cuts) > 1 and oldest[end] <= cuts[-1]:
        cuts.pop()
    return cuts[1:]


def _cut(graph: Graph, cuts: Sequence[int], carried: frozenset[int]) -> Chain:
    edges = [-1, *cuts, forward_count(graph) - 1]
    if len(edges) > 2 and edges[-1] == edges[-2]:
        edges.pop()
    return _chain(graph, [list(range(a + 1, b + 1)) for a, b in pairwise(edges)], carried)


def _chain(graph: Graph, forwards: Iterable[Sequence[int]], carried: frozenset[int]) -> Chain:
    """Add the inputs and the backward ops to stages that are lists of forward ops."""
    forward = [tuple(ops) for ops in forwards]
    stage_of = {i: at for at, ops in enumerate(forward) for i in ops}
    inputs: list[frozenset[int]] = []
    for at, ops in enumerate(forward):
        read = {v for i in ops for v in graph.ops[i].inputs if stage_of.get(graph.producer[v], at) != at and v not in carried}
        inputs.append(frozenset(read))
    backward: list[list[int]] = [[] for _ in forward]
    levels = _levels(graph, stage_of, inputs, carried)
    for i in sorted(levels):
        backward[levels[i]].append(i)
    stages = tuple(Stage(f, tuple(b), x) for f, b, x in zip(forward, backward, inputs, strict=True))
    return Chain(graph, stages, carried)


class _Lowest:
    """The lowest level of each gradient's readers, while these get their final levels from the last one on.

    readers  the levels of each gradient's readers, in graph order
    """

    def __init__(self, readers: dict[int, list[int]]) -> None:
        # Of the readers before each one; then of those after the one at hand.
        self._before = {v: [math.inf, *accumulate(levels[:-1], min)] for v, levels in readers.items() if levels}
        self._after = dict.fromkeys(self._before, math.inf)

    def but_the_last(self, v: int) -> float:
        """Of all readers but the last without a final level; infinite where there is no other."""
        return min(self._before[v][-1], self._after[v])

    def set_last(self, v: int, level: int) -> None:
        """Give that one its final level."""
        self._before[v].pop()
        self._after[v] = min(self._after[v], level)


def _levels(graph: Graph, stage_of: dict[int, int], inputs: Sequence[frozenset[int]], carried: Collection[int]) -> dict[int, int]:
    """The stage of each backward op: the last one at which all it reads can be there.

    Ops that read resident values only go with their first reader; ops that read gradients only wait while those are held anyway.
    Random ops and ops with effects keep their order.
    """
    count, last = forward_count(graph), len(inputs) - 1
    level: dict[int, int] = {}
    loose: dict[int, None] = {}
    latest = last  # stage of the last random op or op with an effect
    for i in range(count, len(graph.ops)):
        op = graph.ops[i]
        at = last
        for v in op.inputs:
            maker = graph.producer[v]
            if maker >= count:
                at = min(at, level[maker])
            elif maker >= 0 and v not in carried:
                home = stage_of[maker]
                at = min(at, home + 1 if home < last and v in inputs[home + 1] else home)
        if op.random or op.effect:
            at = latest = min(at, latest)
        elif all(graph.producer[v] < 0 or graph.producer[v] in loose for v in op.inputs):
            loose[i] = None
        level[i] = at
    others = _Lowest({v: [level[c] for c in graph.consumers[v]] for i in level for v in graph.ops[i].outputs})
    for i in reversed(range(count, len(graph.ops))):
        op = graph.ops[i]
        gradients = [v for v in op.inputs if graph.producer[v] >= count]
        latest = max((level[c] for v in op.outputs for c in graph.consumers[v]), default=0)
        if i in loose:
            level[i] = latest
        elif not op.random and not op.effect and all(graph.producer[v] < 0 or graph.producer[v] >= count for v in op.inputs):
            # Gradients that others read later are held till then: the op loses nothing by waiting for them, and its outputs gain.
            level[i] = int(min(level[i], max(latest, *map(others.but_the_last, gradients))))
        for v in gradients:
            others.set_last(v, level[i])
    return level
