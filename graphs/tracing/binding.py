"""Which tensors the placeholders of a captured step stand for, in each of its calls. [torch]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from graphs.errors import InputError
from graphs.torch_private.tensors import SameTensors, in_forward_mode, is_functorch_wrapped, storage_key


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensor of one placeholder comes from at run time.

    kind    "parameter" and "buffer" of the model (``name`` is its qualified name; a parameter that the forward changes counts
            as a buffer), "input" (``index`` into the flattened inputs, ``name`` for messages),
            "constant" (``name`` in ``Step.constants``: a tensor the model or its loss uses that is neither parameter nor
            buffer), "tangent" (gradient of the loss, ones unless the caller says otherwise)
    trainable  it requires a gradient
    """

    kind: Literal["parameter", "buffer", "input", "constant", "tangent"]
    name: str = ""
    index: int = -1
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class _Want:
    """What a tensor bound to a placeholder must be."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Want:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def check(self, label: str, tensor: object) -> None:
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label} is of type {type(tensor).__name__}, but the step was captured with a tensor")
        if tensor.shape != self.shape:
            raise InputError(f"{label} has shape {tuple(tensor.shape)}, but the step was captured with {tuple(self.shape)}")
        if tensor.dtype != self.dtype:
            raise InputError(f"{label} has dtype {tensor.dtype}, but the step was captured with {self.dtype}")
        if tensor.device != self.device:
            raise InputError(f"{label} is on {tensor.device}, but the step was captured on {self.device}")
        if tensor.stride() != self.strides and not _same_layout(self.shape, tensor.stride(), self.strides):
            like = torch.empty_strided(self.shape, self.strides, device="meta")
            raise InputError(
                f"{label} has strides {tensor.stride()}, but the step was captured with {self.strides}: "
                f"give it with the captured layout{', .contiguous()' if like.is_contiguous() else ''}"
            )


def looks_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """What convolutions ask of a layout (``is_channels_last_strides`` of PyTorch): strides of dimensions of one element count."""
    if len(shape) not in (4, 5) or not strides[1]:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if not shape[d] or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * shape[d]
    return True


def _same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two strides place the elements alike: strides of dimensions of one element do not count."""
    return 0 in shape or all(a == b for n, a, b in zip(shape, strides, others, strict=True) if n != 1)


class Binding:
    """Finds the tensors for a call, and refuses those that differ from what the step was captured with.

    model, sources, constants  of the step
    captured   the (fake) tensors of the placeholders
    values     their Values: two of one Value were one storage
    changed    names of the buffers that the step changes
    fixed      for placeholders of which the step knows where they begin in their storages: these places
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Sequence[Source],
        constants: Mapping[str, Tensor],
        captured: Sequence[Tensor],
        values: Sequence[int],
        changed: Set[str],
        fixed: Mapping[int, int],
    ) -> None:
        self._sources = sources
        self._constants = constants
        self._wanted = [_Want.of(tensor) for tensor in captured]
        self._places = [_place(model, source) for source in sources]
        self._given = [(i, source) for i, source in enumerate(sources) if source.kind not in ("parameter", "buffer")]
        first: dict[int, int] = {}
        self._shared = [(first[v], i) for i, v in enumerate(values) if first.setdefault(v, i) != i]
        # Buffers that change, and what else may lie there, with their Values. Parameters with gradients lie nowhere but with
        # other parameters.
        self._written: list[tuple[int, int]] = []
        self._beside: list[tuple[int, int]] = []
        written = [source.kind == "buffer" and source.name in changed for source in sources]
        holders = [place[0].get(place[1]) for w, place in zip(written, self._places, strict=True) if w and place is not None]
        everywhere = any(isinstance(tensor, nn.Parameter) for tensor in holders)
        for i, (source, value) in enumerate(zip(sources, values, strict=True)):
            if written[i]:
                self._written.append((i, value))
            elif source.kind != "tangent" and (everywhere or source.kind != "parameter" or not source.trainable):
                self._beside.append((i, value))
        self._fixed = fixed
        self._reformatted: tuple[str, ...] = ()  # what was bound last and is channels last, or is not, by strides of one element
        self._like_before = SameTensors()  # what was bound last and found right, the tangent aside
        self._tangent = next((i for i, source in enumerate(sources) if source.kind == "tangent"), None)

    def of(self, leaves: Sequence[Any], tangent: Tensor | None, *, detached: bool) -> list[Tensor]:
        """The tensors for inputs with these leaves, in the order of the placeholders: see ``graphs.capture.bind``."""
        bound = self._found(leaves)
        if self._tangent is not None:
            want = self._wanted[self._tangent]
            ones = torch.ones(want.shape, dtype=want.dtype, device=want.device) if tangent is None else tangent
            bound[self._tangent] = ones
        # Most calls are like the one before, which one quick look tells; one by one they are only looked at to say what differs.
        if not self._like_before.match(self._without_tangent(bound)):
            self._check_one_by_one(bound)
            self._like_before.remember(self._without_tangent(bound))
        elif self._tangent is not None:
            self._wanted[self._tangent].check("tangent", bound[self._tangent])
        self._check_together(bound)
        self.check_apart(bound)
        if detached:
            bound = [tensor if place is None else tensor.detach() for place, tensor in zip(self._places, bound, strict=True)]
        return bound

    def again(self, leaves: Sequence[Any]) -> list[Tensor] | None:
        """The same, not detached and without a tangent, where all is like in a call before; else None. ``check_apart`` has to
        follow."""
        bound = self._found(leaves)
        if not self._like_before.match(self._without_tangent(bound)):
            return None
        try:
            self._check_together(bound)
        except InputError:
            return None
        return bound

    @property
    def reformatted(self) -> str | None:
        """What may be wrong where the latest call fails within the step: the captured views are of another memory format."""
        if not self._reformatted:
            return None
        return (
            f"{', '.join(self._reformatted)}: by the strides of a dimension of one element, channels last now or when the step "
            f"was captured, not both, and convolutions choose their memory format by them; give the captured strides "
            f"(as_strided), use module(replan=True), or capture the step again"
        )

    def _without_tangent(self, bound: list[Any]) -> list[Any]:
        at = self._tangent
        return bound if at is None else bound[:at] + bound[at + 1 :]

    def _found(self, leaves: Sequence[Any]) -> list[Any]:
        bound: list[Any] = [None if place is None else place[0].get(place[1]) for place in self._places]
        for i, source in self._given:
            if source.kind == "input":
                bound[i] = leaves[source.index]
            elif source.kind == "constant":
                bound[i] = self._constants[source.name]
        return bound

    def _check_together(self, bound: list[Tensor]) -> None:
        """What shares its memory, and what has a tangent of forward mode."""
        if in_forward_mode():
            self._check_tangents(bound)
        for i, j in self._shared:
            if storage_key(bound[i]) != storage_key(bound[j]):
                names = f"{self._sources[i].name} and {self._sources[j].name}"
                raise InputError(f"{names} shared their memory when the step was captured, and now do not; capture it again")
        for i, offset in self._fixed.items():
            if bound[i].storage_offset() != offset:
                raise InputError(
                    f"{self._sources[i].name} begins at element {bound[i].storage_offset()} of its storage, but at {offset} when "
                    f"the step was captured, which reads it by its place there (as_strided); give one that begins at {offset}, "
                    f"or leave the offset out"
                )

    def check_apart(self, bound: Sequence[Tensor]) -> None:
        """Refuse that something lies in the memory of a buffer that changes, where it did not when the step was captured."""
        if not self._written:
            return
        changing: dict[int, tuple[int, int]] = {}
        for i, value in self._written:
            j, known = changing.setdefault(storage_key(bound[i]), (i, value))
            if known != value:
                raise InputError(self._apart(j, i))
        for i, value in self._beside:
            j, known = changing.get(storage_key(bound[i]), (i, value))
            if known != value:
                raise InputError(self._apart(j, i))

    def _apart(self, buffer: int, other: int) -> str:
        names = [self._sources[i].name for i in (buffer, other)]
        return (
            f"{names[0]}, which the step changes, shares its memory with {names[1]}, but did not when the step was captured; "
            f"give each its own"
        )

    def _check_one_by_one(self, bound: list[Any]) -> None:
        """Refuse what differs from the captured step in a way the graph depends on."""
        reformatted: list[str] = []
        for source, want, tensor in zip(self._sources, self._wanted, bound, strict=True):
            if isinstance(tensor, Tensor) and is_functorch_wrapped(tensor):
                raise InputError(
                    f"{source.name or source.kind} belongs to a transform of torch.func (grad, jvp, vmap), in which a captured "
                    f"step takes no part; transform the model itself"
                )
            if source.kind in ("parameter", "buffer"):
                if tensor is None:
                    raise InputError(_removed(source.name))
                if tensor.requires_grad != source.trainable:
                    now, then = ("requires a", "did not") if tensor.requires_grad else ("requires no", "did")
                    raise InputError(f"{source.name} {now} gradient, but {then} when the step was captured; capture it again")
            elif source.kind == "input" and isinstance(tensor, Tensor) and tensor.requires_grad:
                raise InputError(f"{source.name} requires a gradient, but inputs get none; give it detached")
            want.check(source.name or source.kind, tensor)
            if looks_channels_last(want.shape, tensor.stride()) != looks_channels_last(want.shape, want.strides):
                reformatted.append(source.name or source.kind)
        self._reformatted = tuple(reformatted)

    def _check_tangents(self, bound: list[Any]) -> None:
        for source, tensor in zip(self._sources, bound, strict=True):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                raise InputError(
                    f"{source.name or source.kind} has a tangent (torch.autograd.forward_ad), which a captured step would drop; "
                    f"call the model itself for forward-mode derivatives"
                )


def _removed(name: str) -> str:
    return f"{name} was removed after the step was captured; capture it again"


def _place(model: nn.Module, source: Source) -> tuple[Mapping[str, Tensor], str] | None:
    """Where the model holds what a source stands for: a dict of one of its modules, and the key."""
    if source.kind not in ("parameter", "buffer"):
        return None
    path, _, key = source.name.rpartition(".")
    try:
        part = model.get_submodule(path)
    except AttributeError:
        raise InputError(_removed(source.name)) from None
    return cast(Any, part._parameters if key in part._parameters else part._buffers), key
