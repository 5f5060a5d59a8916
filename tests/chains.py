"""Random training chains for the tests of chain methods."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from graphs.ir import Graph, Op, Value


def random_chain(layers: int, seed: int, *, plain: bool = False) -> Graph:
    """A chain of unequal layers: forward ops, the loss, backward ops that read their op's input, output, a saved extra, or some.

    plain  no weights, no workspaces, no extras: only values of the chain itself
    """
    rng = Random(seed)
    values: list[Value] = []
    ops: list[Op] = []

    def value(name: str, size: int) -> int:
        values.append(Value(name, size))
        return len(values) - 1

    def workspace() -> int:
        return 0 if plain else rng.choice((0, 0, rng.randint(1, 4)))

    resident = set()
    outputs = set()
    weights: dict[int, int] = {}
    if not plain:
        for i in range(layers):
            if rng.random() < 0.5:
                weights[i] = value(f"weight_{i}", rng.randint(1, 3))
                resident.add(weights[i])
    outs: list[int] = []
    extras: list[int | None] = []
    for i in range(layers):
        reads = [outs[-1]] if outs else []
        if i in weights:
            reads.append(weights[i])
        outs.append(value(f"x_{i + 1}", rng.randint(1, 6)))
        extra = value(f"extra_{i}", rng.randint(1, 5)) if not plain and rng.random() < 0.3 else None
        extras.append(extra)
        made = [outs[-1]] if extra is None else [outs[-1], extra]
        ops.append(Op(f"forward_{i}", tuple(reads), tuple(made), rng.randint(1, 9), workspace()))
    loss = value("loss", rng.randint(0, 1))
    outputs.add(loss)
    ops.append(Op("loss", (outs[-1],), (loss,), 1))
    gradient = value("d_loss", rng.randint(1, 6))
    ops.append(Op("backward_loss", (loss, outs[-1]), (gradient,), rng.randint(1, 9), backward=True))
    for i in range(layers - 1, -1, -1):
        reads = [gradient]
        kind = rng.randrange(3)
        if i and kind != 1:
            reads.append(outs[i - 1])
        if kind != 0:
            reads.append(outs[i])
        extra = extras[i]
        if extra is not None:
            reads.append(extra)
        gradient = value(f"d_{i}", rng.randint(1, 6))
        made = [gradient]
        if i in weights:
            made.append(value(f"d_weight_{i}", values[weights[i]].size_bytes))
            outputs.add(made[-1])
            reads.append(weights[i])
        ops.append(Op(f"backward_{i}", tuple(reads), tuple(made), rng.randint(1, 9), workspace(), backward=True))
    outputs.add(gradient)
    return Graph(f"chain_{layers}_seed{seed}", tuple(ops), tuple(values), frozenset(resident), frozenset(outputs))


def vgg19() -> Graph:
    """VGG19 at batch 1 as Checkmate's authors made it from Keras: 25 layers, FLOPs as times, 4 bytes a number."""
    return vgg("vgg19", (2, 2, 4, 4, 4))


def vgg(name: str, depths: Sequence[int], *, batch: int = 1) -> Graph:
    """A VGG network with so many convolutions before each pooling, made in the same way."""
    shapes: list[tuple[int, int]] = []  # numbers in the output, FLOPs
    side, channels = 224, 3
    for width, convolutions in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(convolutions):
            shapes.append((side * side * width, 9 * channels * side * side * width))
            channels = width
        side //= 2
        shapes.append((side * side * channels, 0))
    shapes.append((side * side * channels, 0))  # flatten
    for width in (4096, 4096, 1000):
        shapes.append((width, shapes[-1][0] * width))
    count = len(shapes)
    values = [Value(f"x_{i}", 4 * batch * numel) for i, (numel, _) in enumerate(shapes)]
    ops = [Op(f"layer_{i}", (i - 1,) if i else (), (i,), batch * flops) for i, (_, flops) in enumerate(shapes)]
    values.append(Value("loss", 4 * batch))
    ops.append(Op("loss", (count - 1,), (count,), 0))
    for i in range(count - 1, -1, -1):
        reads = (i, 2 * count - i - 1) if i == count - 1 else (i, i + 1, 2 * count - i - 1)
        values.append(Value(f"d_{i}", 4 * batch * shapes[i][0]))
        ops.append(Op(f"backward_{i}", reads, (2 * count - i,), 2 * batch * shapes[i][1], backward=True))
    return Graph(name, tuple(ops), tuple(values), frozenset(), frozenset({2 * count}))


def shared_among_layers(layers: int) -> Graph:
    """A chain whose layers all read one small value, and whose last gradients are as many and all read one gradient."""
    values, ops = [Value("x", 8)], list[Op]()

    def made(*reads: int, size: int, backward: bool = False) -> int:
        values.append(Value(f"v_{len(values)}", size))
        ops.append(Op(f"op_{len(ops)}", tuple(dict.fromkeys(reads)), (len(values) - 1,), 10, backward=backward))
        return len(values) - 1

    positions = made(0, size=4)
    forward = [0]
    for i in range(layers):
        forward.append(made(forward[-1], positions, size=1 + 37 * i % 100))
    scale = made(forward[-1], size=4, backward=True)
    gradient = forward[-1]
    for i in range(layers):
        gradient = made(gradient, forward[-1 - i], size=1 + 53 * i % 100, backward=True)
    total = made(scale, size=4, backward=True)
    for _ in range(layers):
        total = made(scale, total, size=4, backward=True)
    return Graph("shared_among_layers", tuple(ops), tuple(values), frozenset({0}), frozenset({gradient, total}))
