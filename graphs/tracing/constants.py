"""What a trace knows of its data beside the traced graph. [torch]"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphs.torch_private.names import (
    DynamicOutputShapeException,
    OpOverload,
    TorchDispatchMode,
    no_dispatch,
    tree_leaves,
    tree_map_only,
)

aten = torch.ops.aten


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes beside the trace what depends on no input, such as positions, so that a model may branch on it."""

    supports_higher_order_operators = True
    LIMIT = 1 << 20  # elements; larger tensors are no counters or masks to ask about

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten.lift_fresh.default:  # a literal tensor
            result = func(*args, **kwargs)
            self._know(result, read[0])
            return result
        known = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded not in func.tags
        known = known and all(tensor in self._real for tensor in read)
        if known and func is aten._local_scalar_dense.default:
            with no_dispatch():
                return self._real[read[0]].item()
        if known and func is aten.equal.default:  # as istft compares what its window sums up to
            with no_dispatch():
                return torch.equal(*(self._real[tensor] for tensor in read))
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            if not known:
                raise
            return self._as_literals(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if known and all(tensor.numel() <= self.LIMIT for tensor in made):
            real = tree_leaves(self._really(func, args, kwargs))
            for tensor, content in zip(made, (leaf for leaf in real if isinstance(leaf, Tensor)), strict=True):
                self._know(tensor, content)
        elif isinstance(func, OpOverload) and func._schema.is_mutable and any(tensor in self._real for tensor in read):
            self._real.clear()  # something known was written to, and who shares its memory is not recorded
        return result

    def _know(self, tensor: Tensor, content: Tensor) -> None:
        self._real[tensor] = content
        inner = getattr(tensor, "elem", None)  # a wrapper's own ``tolist`` asks what it wraps
        if isinstance(inner, Tensor):
            self._real[inner] = content

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns whose tensors are all known."""
        args, kwargs = tree_map_only(Tensor, self._real.__getitem__, (args, kwargs))
        with no_dispatch(), torch.no_grad():
            return func(*args, **kwargs)

    def _as_literals(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call whose shape depends on known data, as ``nonzero`` of a mask: tensors like those in the code."""

        def literal(content: Tensor) -> Tensor:
            tensor: Tensor = aten.lift_fresh.default(content)
            with no_dispatch():
                self._know(tensor, content.clone())  # the graph has the other one, and the code may write to this one
            return tensor

        return tree_map_only(Tensor, literal, self._really(func, args, kwargs))
