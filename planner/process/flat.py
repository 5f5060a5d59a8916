"""A graph as flat arrays, for compiled code. Imports no numba, which takes time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graphs.ir import Graph

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def begins(lengths: Ints) -> Ints:
    """Where rows of these lengths begin in one array, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists of numbers as where each list begins (and the last one ends) in one array, and that array."""
    lengths = np.array([len(numbers) for numbers in lists], np.int64)
    return begins(lengths), np.array([number for numbers in lists for number in numbers], np.int64)


def reads_and_makes(graph: Graph) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """in_rows, inputs, out_rows, outputs, producer, size.

    Op v reads inputs[in_rows[v] : in_rows[v + 1]], each once and resident values left out, and makes outputs[out_rows[v] :
    out_rows[v + 1]]. The size of a value is 0 where it is resident.
    """
    made = [producer >= 0 for producer in graph.producer]
    return (
        *rows([tuple(dict.fromkeys(x for x in op.inputs if made[x])) for op in graph.ops]),
        *rows([op.outputs for op in graph.ops]),
        np.array(graph.producer, np.int64),
        np.array([0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)], np.int64),
    )
