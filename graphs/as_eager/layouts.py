"""The layouts that kernels give their results, where those of their stand-ins in a trace differ. [torch]

A trace runs on tensors without data, and what stands in for a kernel there does not always give its result the strides that the
kernel does: the kernel of ``mse_loss_backward`` on the CPU makes contiguous memory whatever its inputs are, its stand-in keeps
their order of dimensions. Autograd then decides by the wrong strides whether a reshape copies. So kernels are asked: each call
with an input that is not plainly contiguous runs for real, on tensors small in every dimension and laid out alike.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.as_eager.ctc import CTC_BACKWARDS
from graphs.rewriting.nodes import reads_seed_on_host
from graphs.torch_private.kernels import takes_cudnn_batch_norm
from graphs.torch_private.names import (
    FakeTensorMode,
    OpOverload,
    disable_fake_tensor_cache,
    no_dispatch,
    no_python_dispatcher,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_autocast,
)
from graphs.torch_private.stand_ins import quiet_stand_ins, stand_ins_by
from graphs.torch_private.tensors import extent, storage_key

aten = torch.ops.aten

KEPT = 8  # sizes up to this stay: windows, groups, heads, channels of an image
LITTLE = 1 << 12  # elements of a call that runs as it is
MOST = 1 << 20  # elements of any call that runs

_CONVOLUTIONS = aten.convolution.default, aten.convolution_backward.default
_VIEWS = aten.view.default, aten._unsafe_view.default, aten.expand.default

Strides = tuple[int, ...]
_Layout = tuple[Strides, Strides] | None  # shape and strides; None: no tensor


@contextlib.contextmanager
def kernels_layouts() -> Iterator[None]:
    """Give the results of what is traced inside the strides that the kernels of their device would give them.

    A call that cannot be made small keeps the strides of its stand-in. Generators stay as they are.
    """
    with stand_ins_by(_Layouts().call):
        yield


class _Layouts:
    """Asks kernels; what was asked once is remembered for the trace."""

    def __init__(self) -> None:
        self._known: dict[object, list[Strides | None]] = {}
        self._tried: dict[object, list[_Layout] | None] = {}  # by calls made small

    def call(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
        """What the stand-in returns, with the strides of the kernel."""
        if func in _CONVOLUTIONS:
            with disable_fake_tensor_cache(mode):  # it may have one that was made without oneDNN, or with it
                return plain()
        result = plain()
        if func in _VIEWS:
            return _as_viewed(mode, func, args[0], result)
        if not _is_asked(func):
            return result
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(map(_is_plain, read)) or not all(map(_can_be_built, read)):
            return result
        made, spec = tree_flatten(result)
        keys = [storage_key(t) for t in (*read, *made) if isinstance(t, Tensor) and _can_be_built(t)]
        places = [
            i
            for i, t in enumerate(made)
            if isinstance(t, Tensor) and _has_layout(t) and keys.count(storage_key(t)) == 1  # neither view nor given twice
        ]
        if not places:
            return result
        key = func, _key(args), _key(kwargs)
        if key not in self._known:
            self._known[key] = self._ask(mode, func, args, kwargs, made)
        for i in places:
            strides, old = self._known[key][i], made[i]
            if strides is not None and strides != old.stride():
                with mode:
                    made[i] = torch.empty_strided(old.shape, strides, dtype=old.dtype, device=old.device)
        return tree_unflatten(made, spec)

    def _ask(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, made: Sequence[Any]) -> list[Strides | None]:
        """Strides that the kernel gives each result; None where that could not be found out."""
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        elements = sum(t.numel() for t in (*read, *made) if isinstance(t, Tensor))
        sizes = {n for t in (*read, *made) if isinstance(t, Tensor) for n in t.shape}
        same, smaller = {n: n for n in sizes}, _smaller(sizes)
        candidates = [same] if elements <= LITTLE else [smaller, same] if elements <= MOST else [smaller]
        for small in candidates:
            found = self._try(mode, func, args, kwargs, small)
            if found is not None and len(found) == len(made):
                return [
                    _like(f, t, small) if isinstance(t, Tensor) and _has_layout(t) else None
                    for f, t in zip(found, made, strict=True)
                ]
        return [None] * len(made)

    def _try(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, small: Mapping[int, int]) -> list[_Layout] | None:
        """Shape and strides of the results of a call with other sizes; None where it makes no sense with them."""

        def stand_in(tensor: Tensor) -> Tensor:
            shape = [small[n] for n in tensor.shape]
            strides = _relaid(tensor.shape, tensor.stride(), shape)
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

        args, kwargs = tree_map_only(int, lambda n: n if isinstance(n, bool) else small.get(n, n), (args, kwargs))
        args, kwargs = tree_map_only(torch.Generator, lambda _: None, (args, kwargs))
        try:
            with mode:
                args, kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
        except ValueError:
            return None
        key = func, _key(args), _key(kwargs)
        if key not in self._tried:
            try:
                self._tried[key] = self._run(mode, func, args, kwargs)
            except Exception:  # many ops check how sizes go together
                self._tried[key] = None
        return self._tried[key]

    def _run(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> list[_Layout] | None:
        """Shape and strides of the results of a call, from the kernel; None where the call is too large."""
        with quiet_stand_ins(), mode:
            expected = tree_leaves(func(*args, **kwargs))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if sum(t.numel() for t in (*read, *expected) if isinstance(t, Tensor)) > MOST:
            return None
        devices = {t.device for t in read if t.device.type == "cuda"}
        random = torch.Tag.nondeterministic_seeded in func.tags
        with no_dispatch(), torch.no_grad(), without_autocast(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.random.fork_rng(devices, enabled=random):
                args, kwargs = tree_map_only(Tensor, _real, (args, kwargs))
                found = tree_leaves(_as_eager(func, args, kwargs))
        return [(tuple(t.shape), t.stride()) if isinstance(t, Tensor) else None for t in found]


def _as_viewed(mode: FakeTensorMode, func: Any, source: Tensor, result: Tensor) -> Tensor:
    """A stand-in's view of another shape, with the strides that eager execution gives dimensions of one element: by those it is
    chosen whether a product of many matrices is one of two."""
    if not all(type(n) is int for n in result.shape) or 1 not in result.shape or not _can_be_built(source):
        return result
    with no_dispatch(), no_python_dispatcher():  # which would take the stand-in's formula again
        strides = func(
            torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), result.shape
        ).stride()
    if strides == result.stride():
        return result
    with mode:
        return result.as_strided(result.shape, strides)


@functools.cache
def _is_asked(func: Any) -> bool:
    """Whether an op is to run on made-up tensors: one of PyTorch's own that only computes new tensors.

    Not so convolutions: their sizes do not go together when made small, and their stand-ins choose as the kernels do. Nor the
    backward of the CTC loss, which believes lengths that made-up sizes do not go together with. Nor what reads a seed on the
    host, which made-up tensors have on the device; its stand-ins are laid out as the kernel does it.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return False
    if func in (*_CONVOLUTIONS, *CTC_BACKWARDS) or reads_seed_on_host(func):
        return False
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not depends & set(func.tags) and all(each.alias_info is None for each in func._schema.returns)


def _plain_strides(shape: Sequence[int]) -> Strides:
    """Those of contiguous memory."""
    return tuple(itertools.accumulate((max(n, 1) for n in shape[:0:-1]), lambda a, b: a * b, initial=1))[::-1][: len(shape)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.stride() == _plain_strides(tensor.shape)


def _can_be_built(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and all(type(n) is int for n in tensor.shape)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _has_layout(tensor: Tensor) -> bool:
    """Whether there is more than one way to lay it out."""
    return _can_be_built(tensor) and tensor.numel() > 0 and sum(n > 1 for n in tensor.shape) > 1


def _real(tensor: Tensor) -> Tensor:
    """A real tensor for a stand-in. Ones are probabilities and divisors, zeros are indices."""
    value = 1 if tensor.is_floating_point() or tensor.is_complex() else 0
    memory = torch.full((extent(tensor.shape, tensor.stride()),), value, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride())


def _as_eager(func: Any, args: Any, kwargs: Any) -> Any:
    """Results of a call. Batch norm takes cuDNN's kernels where they take the place of the traced ones later."""
    if func is aten._native_batch_norm_legit_functional.default:
        data, weight, bias, mean, var, training, momentum, eps = args
        if training and takes_cudnn_batch_norm(data, weight, bias, mean, var, eps):
            results = aten._batch_norm_with_update_functional.default(data, weight, bias, mean, var, momentum, eps)
            return (*results[:3], *results[4:])
    if func is aten._native_batch_norm_legit.no_stats:
        data, weight, bias, training, momentum, eps = args
        if training and takes_cudnn_batch_norm(data, weight, bias, weight, weight, eps):
            return aten.cudnn_batch_norm.default(data, weight, bias, None, None, True, momentum, eps)[:3]
    if func is aten.native_batch_norm_backward.default:
        gradient, data, weight, mean, var, *saved, training, eps, mask = args
        if training and takes_cudnn_batch_norm(data, weight, weight, weight, weight, eps):
            reserve = aten._batch_norm_with_update_functional.default(data, weight, weight, weight, weight, 0.1, eps)[3]
            return aten.batch_norm_backward.default(gradient, data, weight, mean, var, *saved, True, eps, mask, reserve)
    return func(*args, **kwargs)


def _like(found: _Layout, tensor: Tensor, small: Mapping[int, int]) -> Strides | None:
    """Strides for a result from those that the kernel gave it when it was small; None where they do not say."""
    if found is None or found[0] != tuple(small[n] for n in tensor.shape):
        return None
    dense = extent(*found) == math.prod(found[0])
    return _relaid(*found, tensor.shape) if dense else None


def _key(argument: Any) -> object:
    """What of an argument the layout of results may depend on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, tuple | list):
        return tuple(map(_key, argument))
    if isinstance(argument, Mapping):
        return tuple((name, _key(each)) for name, each in sorted(argument.items()))
    return type(argument), argument


def _smaller(sizes: set[int]) -> dict[int, int]:
    """Other sizes for these: distinct, in the same order, and twice as large where they were (halves are split off)."""
    small = {0: 0}
    for n in sorted(sizes):
        least = max(KEPT, *small.values()) + 1
        small[n] = n if n <= KEPT else max(least, 2 * small.get(n // 2, 0) if n % 2 == 0 else 0)
    return small


def _relaid(shape: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> Strides:
    """Strides that lay out the shape ``other`` as ``strides`` do ``shape``: dimensions in the same order, with gaps, or one on
    another, where they are. Raises ValueError where dimensions overlap otherwise."""
    unit, other_unit = 1, 1  # what the dimensions so far take
    units = {0: 0, 1: 1}
    result = [0] * len(shape)
    for d in sorted(range(len(shape)), key=lambda d: strides[d]):
        if shape[d] == 1 or strides[d] == 0:
            continue
        if strides[d] < unit:
            raise ValueError("dimensions overlap")
        result[d] = other_unit if strides[d] == unit else 2 * other_unit
        unit, other_unit = strides[d] * shape[d], result[d] * other[d]
        units[unit] = other_unit
    for d, n in enumerate(shape):
        if n == 1:  # never stepped over, but looked at where a kernel tells the order of dimensions
            result[d] = units[max(u for u in units if u <= strides[d])]
    return tuple(result)
