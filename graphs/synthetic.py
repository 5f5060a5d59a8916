"""Graphs made from a few numbers: chains with known optima, random layered graphs, small random training steps.

All sizes are bytes, all times nanoseconds; "unit" means 1 of each. The same arguments give the same graph on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal

from graphs.errors import InputError
from graphs.ir import Graph, Op, Value


def chain(layers: int, *, size_bytes: int = 1, time_ns: int = 1, backward_time_ns: int | None = None) -> Graph:
    """Training chain of Checkmate (Jain et al., MLSys 2020): n = 2 * layers + 1 ops, op i makes value i.

    Forward ops 0 ... layers - 1, the loss, then the backward ops. Op i reads value i - 1, and the backward op 2 * layers - i
    reads value i too, for i < layers. With unit sizes and times and 8 layers, the least times for the budgets 3 ... 10 are
    45, 26, 22, 21, 20, 19, 18, 17.
    """
    _at_least(1, layers=layers)
    n = 2 * layers + 1
    ops = []
    for i in range(n):
        reads = {i - 1} if i else set()
        if i > layers:
            reads.add(2 * layers - i)
        time = backward_time_ns if backward_time_ns is not None and i > layers else time_ns
        name = f"forward_{i}" if i < layers else "loss" if i == layers else f"backward_{2 * layers - i}"
        ops.append(Op(name, tuple(sorted(reads)), (i,), time, kind=name.split("_")[0], backward=i > layers))
    values = tuple(Value(op.name, size_bytes) for op in ops)
    return Graph(f"chain_{layers}", tuple(ops), values, frozenset(), frozenset({n - 1}))


def linear_network(layers: int, *, size_bytes: int = 1, time_ns: int = 1) -> Graph:
    """The network of DTR's upper bound (Kirisame et al., ICLR 2021, Theorem 3.1): 2 * layers ops, the input free.

    t_1 = f_1(), t_i = f_i(t_{i-1}); g_N = F_N(t_{N-1}), g_i = F_i(t_{i-1}, g_{i+1}) for N > i > 1, g_1 = F_1(g_2). Value i - 1
    is t_i, value 2 * layers - i is g_i; the output is g_1.
    """
    _at_least(2, layers=layers)
    ops = [Op(f"f_{i}", (i - 2,) if i > 1 else (), (i - 1,), time_ns, kind="forward") for i in range(1, layers + 1)]
    for i in range(layers, 0, -1):
        reads = ((i - 2,) if i > 1 else ()) + ((2 * layers - i - 1,) if i < layers else ())
        ops.append(Op(f"F_{i}", reads, (2 * layers - i,), time_ns, kind="backward", backward=True))
    names = [f"t_{i}" for i in range(1, layers + 1)] + [f"g_{i}" for i in range(layers, 0, -1)]
    values = tuple(Value(name, size_bytes) for name in names)
    return Graph(f"linear_{layers}", tuple(ops), values, frozenset(), frozenset({2 * layers - 1}))


@dataclass(frozen=True, slots=True)
class Layered:
    """Parameters of a random layered graph (Gagrani et al., NeurIPS 2022; the letters are those of the published file names).

    ops             n: ops, source and sink among them
    width           w: about 2.1 * width * sqrt(ops) ops a layer
    width_spread    nlv: layer widths are uniform within this share of that
    edge_density    ed: share of the edges between adjacent layers beyond the fewest that join every op
    skip_share      scd: share of skip edges among all edges
    """

    ops: int
    width: float
    width_spread: float = 0.75
    edge_density: float = 0.2
    skip_share: float = 0.14


PRESETS = {
    "RL1": Layered(100, 0.27),
    "RL2": Layered(250, 0.43),
    "RL3": Layered(500, 0.36),
    "RL4": Layered(1000, 0.31),
}


def random_layered(which: str | Layered, seed: int, *, order: Literal["random", "layers"] = "random") -> Graph:
    """A random layered graph like RL1 to RL4 of the Moccasin paper (Bartan et al., ICML 2023).

    Their generator is unpublished; this one was fitted to their four files, so graphs are like theirs, not equal to them.

    which  a preset ("RL1" ... "RL4": 100, 250, 500, 1000 ops) or parameters of one's own
    order  "random": the ops in a random topological order, as theirs are (a poor order: much of what recomputation saves in
           theirs, reordering saves too); "layers": layer by layer

    One output per op; one source, one sink, which is the output. Sizes are multiples of 10 up to about 8,000 (median about
    1,480), times uniform in 0 ... 999.
    """
    if isinstance(which, str) and which not in PRESETS:
        raise InputError(f"unknown layered graph {which!r}; there are {', '.join(PRESETS)}")
    shape = PRESETS[which] if isinstance(which, str) else which
    _at_least(3, ops=shape.ops)
    rng = Random(seed)
    layers = _layers(shape, rng)
    edges: set[tuple[int, int]] = set()
    for upper, lower in pairwise(layers):
        edges.update((upper[i], lower[j]) for i, j in _adjacent(len(upper), len(lower), shape.edge_density))
    inner = layers[1:-1]
    adjacent = len(edges)
    if len(inner) > 2:
        for _ in range(round(shape.skip_share / (1 - shape.skip_share) * adjacent)):
            start = rng.randrange(len(inner) - 2)
            stop = rng.randrange(start + 2, len(inner))
            edges.add((rng.choice(inner[start]), rng.choice(inner[stop])))
    reads: list[list[int]] = [[] for _ in range(shape.ops)]
    for u, v in edges:
        reads[v].append(u)
    sizes = [_size(rng) for _ in range(shape.ops)]
    times = [0, *(rng.randrange(1000) for _ in range(shape.ops - 2)), 0]
    places = _random_order(reads, rng) if order == "random" else list(range(shape.ops))
    rank = {node: at for at, node in enumerate(places)}
    ops = tuple(Op(f"n{node}", tuple(sorted(rank[u] for u in reads[node])), (at,), times[node]) for at, node in enumerate(places))
    values = tuple(Value(f"n{node}", sizes[node]) for node in places)
    name = f"{which if isinstance(which, str) else f'layered_{shape.ops}'}_seed{seed}"
    return Graph(name, ops, values, frozenset(), frozenset({rank[shape.ops - 1]}))


def random_training(layers: int, seed: int, *, skip_share: float = 0.3) -> Graph:
    """A small random training step: layers with resident weights, skip connections, and a backward pass as autograd makes it.

    A backward op reads what its layer read and the gradient of what it made; it makes the gradients of the layer's inputs and of
    its weight at once. Gradients of an activation read by several layers are summed by ops of their own. Sizes, times and
    workspaces are random. Outputs are the loss and the gradients of the weights.

    skip_share  share of the layers that also read an earlier activation
    """
    _at_least(1, layers=layers)
    rng = Random(seed)
    values: list[Value] = []
    ops: list[Op] = []

    def value(name: str, size_bytes: int) -> int:
        values.append(Value(name, size_bytes))
        return len(values) - 1

    def op(name: str, inputs: Sequence[int], outputs: Sequence[int], time_ns: int, *, backward: bool = False) -> None:
        workspace_bytes = rng.choice((0, 0, rng.randint(1, 40)))
        kind = name.partition("_")[0]
        ops.append(Op(name, tuple(inputs), tuple(outputs), time_ns, workspace_bytes, kind, backward=backward))

    activations = [value("input", rng.randint(20, 100))]
    weights = [value(f"weight_{i}", rng.randint(1, 30)) for i in range(1, layers + 1)]
    resident = frozenset({*activations, *weights})
    read: list[list[int]] = []  # activations each layer reads
    times: list[int] = []
    for i in range(1, layers + 1):
        reads = [activations[-1]]
        if i > 1 and rng.random() < skip_share:
            reads.append(rng.choice(activations[:-1]))
        read.append(reads)
        times.append(rng.randint(1, 100))
        activations.append(value(f"activation_{i}", rng.randint(20, 100)))
        op(f"forward_{i}", [*reads, weights[i - 1]], activations[-1:], times[-1])
    loss = value("loss", 1)
    op("loss", activations[-1:], [loss], rng.randint(1, 10))

    gradient = {activations[-1]: value(f"d_activation_{layers}", values[activations[-1]].size_bytes)}
    op("backward_loss", [activations[-1], loss], [gradient[activations[-1]]], rng.randint(1, 10), backward=True)
    outputs = {loss}
    for i in range(layers, 0, -1):
        asked = [a for a in read[i - 1] if a not in resident]
        parts = [value(f"part_{i}_{a}" if a in gradient else f"d_{values[a].name}", values[a].size_bytes) for a in asked]
        outputs.add(value(f"d_weight_{i}", values[weights[i - 1]].size_bytes))
        reads = [*read[i - 1], weights[i - 1], gradient.pop(activations[i])]
        op(f"backward_{i}", reads, [*parts, len(values) - 1], 2 * times[i - 1], backward=True)
        for a, part in zip(asked, parts, strict=True):
            if a in gradient:
                summed = value(f"d_{values[a].name}_{i}", values[a].size_bytes)
                op(f"add_{i}_{a}", [gradient[a], part], [summed], rng.randint(1, 10), backward=True)
                part = summed
            gradient[a] = part
    return Graph(f"training_{layers}_seed{seed}", tuple(ops), tuple(values), resident, frozenset(outputs))


def _layers(shape: Layered, rng: Random) -> list[list[int]]:
    """Nodes of each layer, numbered layer by layer: the source, random widths until the nodes are used, the sink."""
    mean = 2.1 * shape.width * math.sqrt(shape.ops)
    low = max(1, math.ceil(mean * (1 - shape.width_spread)))
    high = max(low, math.floor(mean * (1 + shape.width_spread)))
    widths = []
    left = shape.ops - 2
    while left:
        widths.append(min(left, rng.randint(low, high)))
        left -= widths[-1]
    layers, first = [], 0
    for width in (1, *widths, 1):
        layers.append(list(range(first, first + width)))
        first += width
    return layers


def _adjacent(a: int, b: int, density: float) -> list[tuple[int, int]]:
    """Edges between layers of widths a and b, the pairs nearest to the diagonal; every node has at least one.

    max(a, b) edges join each node of the wider layer to the nearest of the other; ``density`` of the rest are added.
    """
    joined = [(j * a // b, j) for j in range(b)] if b >= a else [(i, i * b // a) for i in range(a)]
    others = sorted(
        {(i, j) for i in range(a) for j in range(b)} - set(joined),
        key=lambda pair: (abs((2 * pair[0] + 1) * b - (2 * pair[1] + 1) * a), pair),
    )
    return joined + others[: round(density * (a * b - max(a, b)))]


def _size(rng: Random) -> int:
    """A multiple of 10: a mixture of two normal distributions, fitted to the quantiles of the published graphs."""
    size = rng.gauss(900, 600) if rng.random() < 0.6 else rng.gauss(3700, 1100)
    return max(10, round(size / 10) * 10)


def _random_order(reads: list[list[int]], rng: Random) -> list[int]:
    """A random topological order: at each place any of the nodes whose inputs have been placed, all equally likely."""
    waiting = [len(inputs) for inputs in reads]
    readers: list[list[int]] = [[] for _ in reads]
    for v in range(len(reads)):
        for u in reads[v]:
            readers[u].append(v)
    for found in readers:
        found.sort()
    ready = [v for v, count in enumerate(waiting) if not count]
    placed = []
    while ready:
        at = rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        placed.append(ready.pop())
        for v in readers[placed[-1]]:
            waiting[v] -= 1
            if not waiting[v]:
                ready.append(v)
    return placed


def _at_least(least: int, **number: int) -> None:
    for name, found in number.items():
        if found < least:
            raise InputError(f"{name} must be at least {least}, not {found}")
