"""What a trace knows of its data beside the traced graph. [torch]"""

from __future__ import annotations

import enum
from collections.abc import Iterable, MutableMapping, Sequence
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
from graphs.torch_private.tensors import storage_key
from graphs.watching.calls import written

aten = torch.ops.aten
# istft compares what its window sums up to.
_ASKS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}
_FROM_ZERO_TO_ONE = {aten.rand.default, aten.rand.generator, aten.rand_like.default}  # draws from [0, 1)
_SOME_OF_THEM = {
    aten.detach.default,
    aten.view.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
}
# Of a draw with a number: what it gives where the number is less than any draw, and where it is greater.
_COMPARISONS = {
    aten.lt.Scalar: (False, True),
    aten.le.Scalar: (False, True),
    aten.gt.Scalar: (True, False),
    aten.ge.Scalar: (True, False),
}
_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put}


class KnownFor(enum.IntEnum):
    """For which calls of a step the content of a tensor is known: those with the inputs of the example, those whose numbers are
    as assumed, those whose integers and truth values are like the example's, or all."""

    THE_EXAMPLE = 0
    ASSUMED = 1
    LIKE_EXAMPLE = 2
    EVERY_CALL = 3


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes beside the trace what depends on no input, such as positions, so that a model may branch on it."""

    supports_higher_order_operators = True
    LIMIT = 1 << 20  # elements; larger tensors are no counters or masks to ask about
    MOST_INTEGERS = 128  # of an input, that are asked for: a few are sizes, more are data

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._drawn: MutableMapping[Tensor, None] = WeakIdKeyDictionary()  # from [0, 1), and nothing was written to since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", None) in _INDEX:
            args = args[0], self._places(args[0], args[1]), *args[2:]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten.lift_fresh.default:  # a literal tensor
            return self._literal(read[0])
        # Operators of somebody's own may draw without saying so.
        known = isinstance(func, OpOverload) and func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
        known = known and all(tensor in self._real for tensor in read)
        if func in _ASKS:
            answer = self._answer(func, args, kwargs, read, known=known)
            if answer is not None:
                return answer
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            sized = self._sized(func, args, kwargs, read, known=known)
            if sized is None:
                raise
            return sized
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._note_draws(func, read, made)
        found = self._contents(func, args, kwargs, read, made, known=known)
        if found is None:
            self._forget(read if _may_alias(func) else written(func, args, kwargs))
            return result
        contents, known_for = found
        self._wrote(list(written(func, args, kwargs)), known_for)
        for tensor, content in zip(made, contents, strict=True):
            self._know(tensor, content, known_for)
        return result

    def sizes_in(self, tensor: Tensor) -> Tensor | None:
        """What is in a tensor of sizes, from which shapes follow; None where that is not known for every call."""
        return self._real.get(tensor)

    def _contents(
        self, func: Any, args: Any, kwargs: Any, read: Sequence[Tensor], made: Sequence[Tensor], *, known: bool
    ) -> tuple[list[Tensor], KnownFor] | None:
        """What is in the tensors that a call made, and for which calls; None where that is not known."""
        compared = self._compared(func, args)
        if compared is not None and made[0].numel() <= self.LIMIT:
            with no_dispatch():
                return [torch.full(made[0].shape, compared, device=made[0].device)], KnownFor.EVERY_CALL
        if not known or any(tensor.numel() > self.LIMIT for tensor in made):
            return None
        known_for = self._known_for(read)  # before it is written to
        return [leaf for leaf in tree_leaves(self._really(func, args, kwargs)) if isinstance(leaf, Tensor)], known_for

    def _note_draws(self, func: Any, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        plain = isinstance(func, OpOverload) and func.namespace == "aten" and not func._schema.is_mutable
        drawn = func in _FROM_ZERO_TO_ONE and made[0].dtype in (torch.float, torch.double)
        if drawn or (func in _SOME_OF_THEM and read[0] in self._drawn):
            for tensor in made:
                self._drawn[tensor] = None
        elif self._drawn and not plain:
            self._drawn.clear()

    def _compared(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What a draw from [0, 1) gives, compared with a number that it cannot reach, as layers are dropped with probability 0;
        None of other calls."""
        if func not in _COMPARISONS or args[0] not in self._drawn:
            return None
        number = self._as_compared(*args)
        below, above = _COMPARISONS[func]
        if number < 0 or (number == 0 and func in (aten.lt.Scalar, aten.ge.Scalar)):
            return below
        return above if number >= 1 else None

    def _as_compared(self, tensor: Tensor, number: float) -> float:
        with no_dispatch():
            return float(torch.tensor(number, dtype=tensor.dtype))

    def _known_for(self, tensors: Iterable[Tensor]) -> KnownFor:
        """For which calls that is what is in these tensors."""
        return KnownFor.EVERY_CALL

    def _wrote(self, tensors: Sequence[Tensor], known_for: KnownFor) -> None:
        """What was written to, and what shares its memory, is another now, and known for these calls at most."""

    def _sized(self, func: Any, args: Any, kwargs: Any, read: Sequence[Tensor], *, known: bool) -> Any:
        """The result of a call whose shape depends on data, as ``nonzero`` of a mask; None where that is not known.

        Where all is known, tensors like those in the code."""
        return tree_map_only(Tensor, self._literal, self._really(func, args, kwargs)) if known else None

    def _answer(self, func: Any, args: Any, kwargs: Any, asked: Sequence[Tensor], *, known: bool) -> Any:
        """What the model is told that asks these tensors; None where that is left to the trace."""
        return self._really(func, args, kwargs) if known else None

    def _places(self, data: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices, with the places that masks choose in their stead, where as many are in each call. Indexing does the same."""
        places: list[Tensor | None] = []
        at = 0  # dimension of the data
        for index in indices:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            chosen = self._chosen(index) if index is not None and is_mask and index.dim() else None
            if index is not None and chosen is not None:
                if data.shape[at : at + index.dim()] != index.shape:
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} does not match that of the indexed tensor "
                        f"{list(data.shape)} at dimension {at}"
                    )
                places += chosen
            else:
                places.append(index)
            at += index.dim() if index is not None and is_mask else 1
        return places

    def _chosen(self, mask: Tensor) -> Sequence[Tensor] | None:
        """The places that a mask chooses, a tensor for each of its dimensions; None where it is not known how many there are."""
        if mask not in self._real or self._known_for([mask]) is not KnownFor.EVERY_CALL:
            return None
        with no_dispatch():  # apart, as literals may not share their memory
            places = [place.clone() for place in self._real[mask].nonzero(as_tuple=True)]
        return list(map(self._literal, places))

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        """What was written to is known no longer, and neither is what shares its memory."""
        for tensor in self._sharing(tensors):
            del self._real[tensor]

    def _sharing(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The known ones among these, and what else is known in their memory: what is known of it shares memory, too."""
        keys = {storage_key(self._real[tensor]) for tensor in tensors if tensor in self._real}
        return [tensor for tensor, content in self._real.items() if storage_key(content) in keys] if keys else []

    def _know(self, tensor: Tensor, content: Tensor, known_for: KnownFor = KnownFor.EVERY_CALL) -> None:
        self._real[tensor] = content
        inner = getattr(tensor, "elem", None)  # a wrapper's own ``tolist`` asks what it wraps
        if isinstance(inner, Tensor):
            self._real[inner] = content

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns whose tensors are all known."""
        args, kwargs = tree_map_only(Tensor, self._real.__getitem__, (args, kwargs))
        with no_dispatch(), torch.no_grad():
            return func(*args, **kwargs)

    def _literal(self, content: Tensor) -> Tensor:
        tensor: Tensor = aten.lift_fresh.default(content)
        with no_dispatch():
            self._know(tensor, content.clone())  # the graph has the other one, and the code may write to this one
        return tensor


def _may_alias(func: Any) -> bool:
    """Whether what a call returns or writes to may share the memory of what it only reads."""
    if not isinstance(func, OpOverload) or func.overloadpacket is aten.set_:
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
