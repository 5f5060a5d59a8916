"""Tensors and their storages: identity, memory, content, what they stand for. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor, fake ones included; valid as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


# The same for a tensor of no subclass, in a quarter of the time where PyTorch has it.
storage_address: Callable[[Tensor], int] = getattr(torch._C, "_storage_address", storage_key)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def memory_of(tensor: Tensor) -> range:
    """Addresses from the first to the last element of a tensor; none for one without data."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return range(0)
    span = extent(tensor.shape, tensor.stride())
    return range(tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage of a tensor."""
    return tensor.untyped_storage().nbytes()


def in_no_tensor(storage: UntypedStorage) -> bool:
    """Whether no tensor lies in a storage any more."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1  # what Python has of it


class SameTensors:
    """Whether tensors are like those remembered: class, shape, strides, dtype, device, ``requires_grad``. One call for all.

    A false alarm is possible (under a dispatch mode, say), so what differs is for others to find out.
    """

    def __init__(self) -> None:
        self._guards: Any = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """From now on these; they are not kept alive."""
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def match(self, tensors: Sequence[object]) -> bool:
        """Whether as many tensors, in the same order, are like those remembered."""
        return self._guards is not None and bool(self._guards.check(*tensors))


def in_place(tensors: list[Tensor], addresses: list[int], which: list[int]) -> bool:
    """Whether these of the tensors lie at these of the addresses."""
    quick = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only where PyTorch was built for CUDA
    if quick is not None:
        return bool(quick(tensors, addresses, which))
    return all(tensors[i].data_ptr() == addresses[i] for i in which)


def copy_all(targets: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    """``target.copy_(content)`` for each pair; none may overlap another.

    Those of one type go together, as a GPU copies tensors of several types one after the other.
    """
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, content in zip(targets, contents, strict=True):
        pairs = alike.setdefault(target.dtype, ([], []))
        pairs[0].append(target)
        pairs[1].append(content)
    for pairs in alike.values():
        torch._foreach_copy_(*pairs)


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors that do not overlap, made together."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(made, tensors)
    return made


REPLACES_IN_PLACE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # from torch 2.12 on


def replace_content(storage: UntypedStorage, content: UntypedStorage) -> None:
    """Give an empty storage the memory of another one, which is empty afterwards. All tensors on it see the content.

    Before torch 2.12 the content is copied, and both are in memory for a moment (not ``REPLACES_IN_PLACE``).
    """
    if REPLACES_IN_PLACE:
        storage._swap_data_ptr_(content)  # type: ignore[attr-defined]  # missing in torch's own stubs
    else:
        storage.resize_(content.nbytes())
        storage.copy_(content)
        content.resize_(0)


def is_functional(tensor: Tensor) -> bool:
    """Whether a tensor is what ``FunctionalTensor`` wraps: of no class of its own, and without data to look at."""
    return bool(torch._is_functional_tensor(tensor))


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for another one inside of ``torch.func.grad``, ``vmap`` and the like; it has no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether a tensor stands for many gradients at once, as in a backward with ``is_grads_batched=True``."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """What a tensor stands for inside of ``torch.func.grad``, ``vmap`` and the like; itself elsewhere."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def in_forward_mode() -> bool:
    """Whether there may be tensors with tangents (``torch.autograd.forward_ad``)."""
    return forward_ad._current_level >= 0


def negated_view(tensor: Tensor) -> Tensor:
    """A view that reads as the negative: what ``imag`` of a conjugate view is."""
    return torch._neg_view(tensor)


def is_zero_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor stands for zeros without having any memory, as forward-mode derivatives do."""
    return tensor._is_zerotensor()
