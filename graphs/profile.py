"""Op times and workspaces measured on the device: each distinct op alone, once, remembered in a file. [torch]"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from graphs.costs import check_step, described, modelled_ns, signature
from graphs.errors import InputError, quoted
from graphs.made_up import arguments_of
from graphs.op_times import OpTimes, Times, cache_folder
from graphs.rewriting.nodes import calls_foreign, calls_in, subgraphs_of
from graphs.rewriting.sizes import cuda_bytes
from graphs.torch_private.names import tree_leaves
from graphs.torch_private.stand_ins import really
from graphs.torch_private.tensors import storage_bytes, storage_key

if TYPE_CHECKING:
    from graphs.capture import Step

SAVE_EVERY_S = 5.0
LONG_ENOUGH_S = 0.5  # an op is not repeated beyond this, once it was timed FEWEST times
FEWEST = 3

log = logging.getLogger("belady")

Progress = Callable[[int, int], None]  # ops measured, ops to measure


def measured(
    step: Step,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    repeats: int = 10,
    progress: Progress | None = None,
) -> Step:
    """The step with the time and the workspace of every op as measured on the device of the step.

    Each distinct call (``graphs.costs.signature``) is run alone on made-up tensors of the right dtypes, shapes and strides, after
    a warm-up; its time is the median of ``repeats`` timings (fewer where it takes long). Calls measured before on this device,
    with these versions and settings of torch, are read from the cache file and not run.

    CUDA  time by events around several calls, so that small ops take what it takes to launch them; workspace is the most the op
          took from the allocator beside its outputs, whose statistics of peaks are reset for that
    CPU   time by the clock, with torch's current number of threads; workspace is 0: the memory measured on a CPU is that of live
          storages, and what an op allocates and frees inside itself is none of them

    Ops with an outside effect are not run; they keep the time they have. An op that cannot be run alone gets the time that the
    roofline says, and one line names it (logger "belady", level WARNING). What operators that are not PyTorch's own take is not
    remembered, since it may be other code the next time. PyTorch's global generators are left alone.

    cache_dir  folder of the cache files, one a device; None: $BELADY_CACHE, else belady in the user's cache folder
    progress   called with the number of ops measured and to measure; None: a bar where standard error is a terminal

    Raises InputError where the cache cannot be used, and where an op cannot be run alone on a device without a description.
    """
    check_step(step, "measured")
    if type(repeats) is not int or repeats < 1:
        raise InputError(f"repeats must be a whole number of at least 1, not {quoted(repeats)}")
    known = OpTimes(step.device, cache_folder(cache_dir))
    times = known.read()
    acts = [op.effect for op in step.graph.ops]
    keys = ["" if act else signature(node) for node, act in zip(step.calls, acts, strict=True)]
    missing = {key: node for key, node in zip(keys, step.calls, strict=True) if key and key not in times}
    if missing:
        known.check_writable()
        times |= _measured(missing, step, repeats, progress, known)
    ops = step.graph.ops
    measurements = [times[key] if key else [op.time_ns, op.workspace_bytes] for key, op in zip(keys, ops, strict=True)]
    return step.with_costs([t for t, _ in measurements], [w for _, w in measurements], costs="measured")


def _measured(missing: Mapping[str, fx.Node], step: Step, repeats: int, progress: Progress | None, known: OpTimes) -> Times:
    """Each call by its signature; they are remembered as they come, so that whatever ends this loses seconds only."""
    found: Times = {}
    new: Times = {}  # to be remembered
    alone: dict[str, str] = {}  # why a call could not be timed
    saved_s = time.monotonic()
    try:
        with _quiet_generators(step.device), _shown(progress) as report:
            for done, (key, node) in enumerate(missing.items()):
                report(done, len(missing))
                try:
                    found[key] = list(_measure(node, step.device, repeats))
                except _CannotRun as error:
                    alone[f"{node.name} ({node.target})"] = str(error)
                    found[key] = [_modelled_ns(node, step, str(error)), 0]
                    continue
                if _stays_the_same(node):
                    new[key] = found[key]
                if new and time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    with contextlib.suppress(InputError):  # it is told in the end
                        known.add(new)
                        new = {}
            report(len(missing), len(missing))
    finally:
        if new:
            _remember(known, new)
    if alone:
        log.warning(
            "%d kinds of ops cannot be timed alone and have modelled times: %s",
            len(alone), "; ".join(f"{name}: {why}" for name, why in list(alone.items())[:3]),
        )  # fmt: skip
    return found


def _remember(known: OpTimes, new: Times) -> None:
    """Where that fails what was measured is used all the same, and what else went wrong is told."""
    try:
        known.add(new)
    except InputError as error:
        log.warning("%d op times were measured but are not remembered: %s", len(new), error)


def _modelled_ns(node: fx.Node, step: Step, why: str) -> int:
    try:
        return modelled_ns(node, described(step))
    except InputError as error:
        raise InputError(f"{node.name} ({node.target}) cannot be timed alone: {why}; {error}") from error


def _stays_the_same(node: fx.Node) -> bool:
    """Whether a call is of PyTorch's operators, whose version is noted: others may be another program tomorrow."""
    return not calls_foreign(node) and all(_stays_the_same(call) for sub in subgraphs_of(node) for call in calls_in(sub))


# One op.


def _measure(node: fx.Node, device: torch.device, repeats: int) -> tuple[int, int]:
    """Time in ns (at least 1) and workspace in bytes of one call."""
    target: Any = node.target
    try:
        with really(), torch.no_grad(), torch.autocast(device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself gives them; casts are ops of the graph already
            args, kwargs = arguments_of(node, device)
            call = functools.partial(target, *args, **kwargs)
            return _on_cuda(call, device, repeats) if device.type == "cuda" else (_on_cpu(call, repeats), 0)
    except Exception as error:  # a kernel or a custom operator may raise anything
        raise _CannotRun(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error


class _CannotRun(Exception):
    """Why a call cannot be run alone."""


def _on_cpu(call: Callable[[], Any], repeats: int) -> int:
    call()  # the first call of a kernel may compile it
    times: list[int] = []
    while len(times) < repeats and (len(times) < FEWEST or sum(times) < LONG_ENOUGH_S * 1e9):
        begin = time.perf_counter_ns()
        result = call()
        times.append(time.perf_counter_ns() - begin)
        del result
    return max(1, round(statistics.median(times)))


def _on_cuda(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[int, int]:
    with torch.cuda.device(device):
        for _ in range(3):  # libraries choose kernels and allocate at their first calls
            call()
        once_ns = _events_ns(call, 1)
        count = max(1, min(50, round(1e6 / max(once_ns, 1))))  # about a ms between two events
        times: list[float] = []
        while len(times) < repeats and (len(times) < FEWEST or sum(times) * count < LONG_ENOUGH_S * 1e9):
            times.append(_events_ns(call, count))
        return max(1, round(statistics.median(times))), _workspace_bytes(call, device)


def _events_ns(call: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6 / count


def _workspace_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes an op takes from the allocator during a call, its outputs aside."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    made = {storage_key(t): storage_bytes(t) for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_cuda}
    return taken_beside(before, torch.cuda.memory_stats(device), [size for size in made.values() if size])


def taken_beside(before: Mapping[str, int], after: Mapping[str, int], made: Sequence[int]) -> int:
    """Most bytes taken at once between two looks at the allocator's statistics, storages of the sizes ``made`` aside.

    What is given out, in granules, where that is exact (expandable segments). Elsewhere a large block may be handed out with up
    to 1 MiB unused, which is no property of the op: at most what is asked for, and a granule for each request that is rounded up.
    """
    given = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"] - sum(map(cuda_bytes, made))
    asked = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"] - sum(made)
    requests = after["allocation.all.allocated"] - before["allocation.all.allocated"] - len(made)
    return max(0, min(given, cuda_bytes(asked) + cuda_bytes(1) * max(0, requests - 1)))


# Around the measuring.


@contextlib.contextmanager
def _quiet_generators(device: torch.device) -> Iterator[None]:
    """Random ops draw from the global generators; give these their states back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = TextColumn("measuring ops"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
