"""Batch norms copy their running statistics no more often than they must. [torch]

In a captured graph a batch norm makes new statistics: it copies the old ones, and its kernel writes to the copies. Where nobody
reads them, here it makes none. Where somebody does, those of some batch norms are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from graphs.capture import Step
from graphs.rewriting.nodes import outputs_of
from planner.schedule import Compute, Schedule
from planner.simulate import simulate

aten = torch.ops.aten
AT_ONCE = 8  # batch norms whose statistics are copied together: a device waits for the first ones, and has work for the others
_MEAN, _VARIANCE = 3, 4  # arguments: the old statistics
_TRAINING = 5


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """A batch norm that makes new running statistics.

    first     which of its outputs is the first of these; they are the last two
    alone     the call that makes the outputs before them alone: target and arguments
    in_place  the operator that writes to the old ones, and returns the outputs before
    """

    first: int
    alone: Callable[..., tuple[Any, tuple[Any, ...]]]
    in_place: Any


_BATCH_NORMS: dict[Any, _BatchNorm] = {
    aten._native_batch_norm_legit_functional.default: _BatchNorm(
        3,
        lambda data, weight, bias, mean, var, training, momentum, eps: (
            aten._native_batch_norm_legit.no_stats,
            (data, weight, bias, training, momentum, eps),
        ),
        aten._native_batch_norm_legit.default,
    ),
    aten._batch_norm_with_update_functional.default: _BatchNorm(  # in a graph only where it takes cuDNN's kernel
        4,
        lambda data, weight, bias, mean, var, momentum, eps: (
            aten.cudnn_batch_norm.default,
            (data, weight, bias, None, None, True, momentum, eps),
        ),
        aten._batch_norm_with_update.default,
    ),
}


def without_statistics(call: fx.Node) -> tuple[Any, tuple[Any, ...], int] | None:
    """A batch norm that makes what is read of another one, ``call``, but no new running statistics: target, arguments and number
    of outputs; None where ``call`` is none, or where statistics are among what is read.

    It is the same kernel, without copies of the old statistics for it to write to. Most runs again are for the output alone.
    """
    if call.target not in _BATCH_NORMS:
        return None
    kind = _BATCH_NORMS[call.target]
    args, read = call.args, [cast(int, user.args[1]) for user in call.users]
    if not read or max(read) >= kind.first or args[_TRAINING] is False:  # in evaluation it reads the old ones
        return None
    given: list[Any] = [argument.meta["val"] if isinstance(argument, fx.Node) else None for argument in args[:5]]
    data, weight, bias, *statistics = given
    # What type it computes in, and in which layout, the kernel decides by all that it is given.
    mixed = (weight is None or bias is None) and any(each.dtype != data.dtype for each in statistics)
    return None if mixed or not all(each.is_contiguous() for each in statistics) else (*kind.alone(*args), kind.first)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A batch norm whose first run may write its new statistics into copies of the old ones that are there before.

    target    the operator that writes to what it is given as old statistics
    old, new  nodes of the captured graph, mean and variance: the buffers, and what is their new content
    """

    target: Any
    old: tuple[fx.Node, fx.Node]
    new: tuple[fx.Node, fx.Node]


def updates_with_room(step: Step, schedule: Schedule, cut: int) -> dict[int, Update]:
    """The ops of a schedule that is cut at ``cut`` whose statistics may be copied at its beginning, without a higher peak; in the
    order in which they run."""
    graph, calls = step.graph, step.calls
    kinds = {op: _BATCH_NORMS[call.target] for op, call in enumerate(calls) if call.target in _BATCH_NORMS}
    if not kinds:
        return {}
    results = zip(step.results, outputs_of(step.module.graph), strict=True)
    made = {result.name: node for result, node in results if result.kind == "buffer"}
    names = {
        n: s.name for n, s in zip(step.module.graph.find_nodes(op="placeholder"), step.sources, strict=True) if s.kind == "buffer"
    }
    memory = np.array(simulate(graph, schedule).memory_bytes, dtype=np.int64)
    room = memory.max() - memory[:cut]
    updates = {}
    for at, act in enumerate(schedule[:cut]):
        if not isinstance(act, Compute) or act.op not in kinds:
            continue
        call, kind = calls[act.op], kinds.pop(act.op)
        old = call.args[_MEAN : _VARIANCE + 1]
        new = tuple(made.get(names.get(cast(fx.Node, each), "")) for each in old)
        parts = [node.args[1] if node is not None and node.args[:1] == (call,) else None for node in new]
        if parts != [kind.first, kind.first + 1] or call.args[_TRAINING] is False or not _plain(old):
            continue
        size = sum(graph.values[step.value_of[node]].size_bytes for node in cast(Any, new))
        if (room[:at] >= size).all():
            room[:at] -= size
            updates[act.op] = Update(kind.in_place, cast(Any, old), cast(Any, new))
    return updates


def _plain(nodes: tuple[Any, ...]) -> bool:
    """Whether copies are laid out as what they are copied from."""
    values = [cast(Tensor, node.meta["val"]) for node in nodes]
    return all(value.is_contiguous() and not value.is_conj() and not value.is_neg() for value in values)
