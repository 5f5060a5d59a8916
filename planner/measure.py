"""Real time and real peak memory of a run, held against what ``simulate`` says. [torch]"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage

from graphs.capture import Step
from graphs.torch_private.names import TorchDispatchMode, tree_leaves
from graphs.torch_private.tensors import storage_key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """What a run took.

    result          what it returned
    peak_bytes      most bytes in memory at once, the resident ones included
    time_ns         median of the timed runs
    reserved_bytes  most the allocator held from the driver, its cache included; None where there is none (CPU)
    """

    result: T
    peak_bytes: int
    time_ns: int
    reserved_bytes: int | None


def resident_before_backward(step: Step) -> int:
    """Bytes that are there before ``loss.backward()``: what the graph calls resident but the gradient of the loss, made by it."""
    placeholders = step.module.graph.find_nodes(op="placeholder")
    tangents = {step.value_of[n] for n, s in zip(placeholders, step.sources, strict=True) if s.kind == "tangent"}
    return step.graph.resident_bytes - sum(step.graph.values[v].size_bytes for v in tangents)


def measure(
    run: Callable[[], T],
    device: torch.device,
    resident_bytes: int,
    *,
    prepare: Callable[[], object] = lambda: None,
    repeats: int = 1,
) -> Measured[T]:
    """Run ``run`` a few times: ``repeats`` times for its time, then once for its peak.

    resident_bytes  of what is there before each run and stays: ``graph.resident_bytes`` where a ``PlannedStep`` runs,
                    ``resident_before_backward`` where autograd does
    prepare         called before each run, neither timed nor counted: seeds the generators, drops old gradients

    CUDA: one more run before the timed ones (libraries allocate at their first call). Time by events; the peak is the
    allocator's, above what was allocated when the run began, which includes each op's workspace.
    CPU: the peak is that of live storages (``StorageMeter``); what ops allocate and free inside themselves is not in it. The
    meter slows a run down, so it counts in a run of its own.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    if device.type == "cuda":
        return _measure_cuda(run, device, resident_bytes, prepare, repeats)
    time_ns = wall_time_ns(run, prepare=prepare, repeats=repeats)
    prepare()
    with StorageMeter() as meter:
        result = run()
    return Measured(result, resident_bytes + meter.peak_bytes, time_ns, None)


def wall_time_ns(run: Callable[[], object], *, prepare: Callable[[], object] = lambda: None, repeats: int = 1) -> int:
    """The median of ``repeats`` runs on a CPU, with nothing in their way; ``prepare`` before each of them is not timed."""
    times = []
    for _ in range(repeats):
        prepare()
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return round(statistics.median(times))


def _measure_cuda(
    run: Callable[[], T], device: torch.device, resident_bytes: int, prepare: Callable[[], object], repeats: int
) -> Measured[T]:
    times = []
    with torch.cuda.device(device):
        prepare()
        run()
        for _ in range(repeats):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(round(begin.elapsed_time(end) * 1e6))
        prepare()
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        reserved = torch.cuda.max_memory_reserved(device)
    return Measured(result, resident_bytes + peak, round(statistics.median(times)), reserved)


class _Death(weakref.ref[UntypedStorage]):
    """Refers to a storage, and says when it is gone; ``key``: of the storage, ``size_bytes``: what is counted of it."""

    __slots__ = ("key", "size_bytes")
    key: int
    size_bytes: int


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the live storages born while it is active. Those that existed before weigh nothing.

    live_bytes, peak_bytes  now, and the most so far

    Every operator call is seen, in the backward too, on any device; a storage is counted from the end of the call that
    made it until its last tensor is gone. What an op allocates and frees inside itself is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, _Death] = {}  # by storage key
        # A notice that referred to the meter would leave both to the garbage collector; CPython 3.11 ends in a segmentation fault
        # where that takes notices of a storage just as it dies.
        self._died: list[_Death] = []

    @property
    def live_bytes(self) -> int:
        """Bytes counted now."""
        while self._died:
            death = self._died.pop()
            del self._known[death.key]
            self._live_bytes -= death.size_bytes
        return self._live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._meet(leaf, born=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf, born=True)
        return result

    def _meet(self, tensor: Tensor, *, born: bool) -> None:
        live_bytes, key = self.live_bytes, storage_key(tensor)  # which may have been that of one that has died
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        self._known[key] = death = _Death(storage, self._died.append)
        death.key, death.size_bytes = key, storage.nbytes() if born else 0
        self._live_bytes += death.size_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes + death.size_bytes)
