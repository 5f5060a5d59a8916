"""What an op makes, and what it costs, without running it. [torch]"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.flop_counter import flop_registry

from graphs.costs import flops_of
from graphs.devices import DEVICES, DeviceDescription, device_called
from graphs.errors import InputError
from graphs.rewriting.sizes import cuda_bytes
from graphs.torch_private.names import tree_leaves, tree_map_only
from graphs.torch_private.stand_ins import forgetful_mode, quiet_stand_ins, stand_in
from online.blocks.recipes import new_storages
from planner.process.pauses import no_collections

MOST_KINDS = 100_000  # of calls that are remembered


class Alike:
    """All calls of one operator with the same shapes, strides, dtypes, devices and other arguments.

    sizes    bytes of the storages they make; None: not known
    varies   whether that depends on the content of tensors
    is_kept  whether this is remembered; else it is of one call alone
    """

    __slots__ = ("_formulas", "_time_ns", "is_kept", "sizes", "varies")

    def __init__(self, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.sizes: tuple[int, ...] | None = None
        self.varies = False
        self._time_ns = self._formulas = 0

    def time_ns(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """What one of them costs by the roofline: looked up, but where it depends on what came out of it."""
        if self.varies or self._formulas != len(flop_registry):  # the program may have given a formula meanwhile
            self._time_ns, self._formulas = _modelled_ns(func, args, kwargs, result), len(flop_registry)
        return self._time_ns


_alike: dict[tuple[Any, ...], Alike] = {}  # in this process: a loop makes a block of each step


def alike(key: tuple[Any, ...]) -> Alike:
    """The calls with this key, in which nothing lives that is not to stay."""
    found = _alike.get(key)
    if found is None:
        if len(_alike) >= MOST_KINDS:
            _alike.clear()
        found = _alike[key] = Alike(is_kept=True)
    return found


BOUNDS: Mapping[str, Callable[..., int]] = {  # the most an op can make whose result depends on what it reads
    "aten.nonzero": lambda t: t.numel() * t.dim() * 8,
    "aten.masked_select": lambda t, mask: _together(t, mask) * t.element_size(),
}


def _together(*tensors: Tensor) -> int:
    """Elements of tensors that are broadcast against each other."""
    return math.prod(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]


def foreseen(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Bytes of the storages a call would make, from a run on tensors without data; None where that cannot be told."""
    if any(isinstance(leaf, Tensor) and leaf.is_quantized for leaf in tree_leaves((args, kwargs))):
        raise InputError("a quantized tensor turned up in a block under a budget; its scale would be lost with its bytes")
    mode = forgetful_mode()
    with no_collections(), quiet_stand_ins():  # the program's finalizers are not to run on tensors without data
        try:
            args, kwargs = tree_map_only(Tensor, functools.partial(stand_in, mode), (args, kwargs))
            old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            with mode:
                return tuple(counted_bytes(storage) for storage in new_storages(func(*args, **kwargs), old))
        except Exception:  # whatever is wrong with the call, the call itself will say it
            return None


def counted_bytes(storage: UntypedStorage) -> int:
    """Bytes of a storage, as the allocator gives them out."""
    size_bytes, device = storage.nbytes(), storage.device
    return cuda_bytes(size_bytes) if device != _CPU and device.type == "cuda" else size_bytes


_CPU = torch.device("cpu")  # comparing with it takes a fraction of the time of asking for the type


def _modelled_ns(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """What a call costs by the roofline of ``graphs.costs``."""
    touched = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    if not touched:
        return 1
    device = _described(touched[0].device)
    flops = flops_of(func, args, kwargs, result)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in touched if t.dtype.is_floating_point]
    rate = device.peak_flops.get(dtypes[0] if dtypes else "float32", device.peak_flops["float32"])
    moved = sum(t.numel() * t.element_size() for t in touched)
    return max(1, round(max(flops / rate, moved / device.bandwidth_bytes_per_s) * 1e9) + device.launch_ns)


@functools.cache
def _described(device: torch.device) -> DeviceDescription:
    """The description that fits a device best; of a GPU that has none, that of the slowest."""
    if device.type != "cuda":
        return DEVICES["cpu"]
    return device_called(torch.cuda.get_device_name(device)) or DEVICES["t4"]
