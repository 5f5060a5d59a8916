"""The last of a traced graph before it is numbered: what a Graph has no words for is refused, the rest rewritten. [torch]"""

from __future__ import annotations

import torch
from torch import fx

from graphs.errors import CaptureError
from graphs.rewriting.nodes import running_statistics, tensors_of
from graphs.rewriting.rewrites import (
    choose_batch_norm,
    drop_unread_statistics,
    fold_conjugates,
    fuse_bernoulli,
    leave_out_own_offsets,
    settle_draws,
)
from graphs.rewriting.unread import let_go_of_unread
from graphs.torch_private.tensors import storage_key

aten = torch.ops.aten


def settle(name: str, graph: fx.Graph) -> None:
    """Refuse what a Graph has no words for, and have calls in the form in which they are run."""
    _refuse_sparse(name, graph)
    _refuse_unsaid_writes(name, graph)
    _refuse_shared_statistics(name, graph)
    _refuse_mixed_products(name, graph)
    _refuse_unsized_observers(name, graph)
    fuse_bernoulli(graph)
    settle_draws(graph)
    fold_conjugates(graph)
    leave_out_own_offsets(graph)
    choose_batch_norm(graph)
    drop_unread_statistics(graph)
    let_go_of_unread(graph)


# They write to running statistics, and no replacement in a trace makes these results.
_STATISTICS = (
    aten.batch_norm_update_stats.default,
    aten.batch_norm_gather_stats.default,
    aten.batch_norm_gather_stats_with_counts.default,
)


def _refuse_unsaid_writes(name: str, graph: fx.Graph) -> None:
    for target in _STATISTICS:
        for node in graph.find_nodes(op="call_function", target=target):
            if any(isinstance(node.args[at], fx.Node) for at in running_statistics(target)):
                raise CaptureError(
                    f"{name} calls {target}, which changes running statistics without saying so, and would do it again with each "
                    f"recomputation; use F.batch_norm, or give it none and change them yourself"
                )


def _refuse_shared_statistics(name: str, graph: fx.Graph) -> None:
    """A batch norm writes to them while it reads the others; in a trace it makes new ones, each of its own."""
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        *others, mean, variance = (_begin(each) for each in node.args[:5])
        if node.args[5] is not False and (mean == variance or not {mean, variance}.isdisjoint(others)):
            raise CaptureError(
                f"{name} gives a batch norm one tensor as running mean or variance and as something else, which it reads while "
                f"it writes there; give each its own"
            )


def _begin(node: object) -> tuple[int, int] | None:
    """Where a tensor begins in memory."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta["val"]
    return storage_key(value), int(value.storage_offset())


def _refuse_sparse(name: str, graph: fx.Graph) -> None:
    sparse = next((node for node in graph.nodes if any(t.layout != torch.strided for t in tensors_of(node))), None)
    if sparse is not None:
        raise CaptureError(f"{name}: {sparse.name} ({sparse.target}) makes a sparse tensor; use dense gradients (sparse=False)")


# Their stand-ins take factors of different dtypes, their kernels do not.
_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.mv.default,
    aten.addmv.default,
)


def _refuse_mixed_products(name: str, graph: fx.Graph) -> None:
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            factors = [t.dtype for factor in node.args[-2:] if isinstance(factor, fx.Node) for t in tensors_of(factor)]
            if len(set(factors)) > 1:
                raise CaptureError(
                    f"{name} multiplies matrices of {' and '.join(map(str, factors))} ({target}), which must have one dtype; "
                    f"convert the inputs to the dtype of the parameters"
                )


_OBSERVER = aten._fused_moving_avg_obs_fq_helper_functional.default


def _refuse_unsized_observers(name: str, graph: fx.Graph) -> None:
    """The kernel gives what it has seen of each channel a size in the first call; its stand-in does not."""
    for node in graph.find_nodes(op="call_function", target=_OBSERVER):
        seen = node.args[3]
        if isinstance(seen, fx.Node) and any(t.numel() == 0 for t in tensors_of(seen)):
            raise CaptureError(
                f"{name} has an observer of quantization that finds the sizes of its buffers in its first call; run the model "
                f"once before"
            )
