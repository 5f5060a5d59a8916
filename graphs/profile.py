"""Op times and workspaces measured on the device: each distinct op alone, once, remembered in a file. [torch]"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from graphs.costs import signature
from graphs.errors import InputError
from graphs.files import read_json, write_whole
from graphs.rewriting.nodes import attribute, reads_seed_on_host
from graphs.rewriting.sizes import cuda_bytes
from graphs.torch_private.names import OpOverload, tree_leaves, tree_map_only
from graphs.torch_private.stand_ins import really
from graphs.torch_private.tensors import storage_bytes, storage_key

if TYPE_CHECKING:
    from graphs.capture import Step

SCHEMA = "belady-times-1"
LONG_ENOUGH_S = 0.5  # an op is not repeated beyond this, once it was timed FEWEST times
FEWEST = 3

Times = dict[str, list[int]]  # by signature: time_ns, workspace_bytes
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
          took from the allocator beside its outputs
    CPU   time by the clock, with torch's current number of threads; workspace is 0: the memory measured on a CPU is that of live
          storages, and what an op allocates and frees inside itself is none of them

    Ops with an outside effect are not run; they keep the time they have. The global random generators are left alone.

    cache_dir  folder of the cache files, one a device; None: $BELADY_CACHE, else belady in the user's cache folder
    progress   called with the number of ops measured and to measure; None: a bar where standard error is a terminal

    Raises InputError where the cache cannot be used and where an op cannot be run alone.
    """
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, not {repeats}")
    cache = _Cache(step.device, _folder(cache_dir))
    times = cache.read()
    acts = [op.effect for op in step.graph.ops]
    keys = ["" if act else signature(node) for node, act in zip(step.calls, acts, strict=True)]
    missing = {key: node for key, node in zip(keys, step.calls, strict=True) if key and key not in times}
    if missing:
        found: Times = {}
        try:
            with _quiet_generators(step.device), _shown(progress) as report:
                for done, (key, node) in enumerate(missing.items()):
                    report(done, len(missing))
                    found[key] = list(_measure(node, step.device, repeats))
                report(len(missing), len(missing))
        finally:  # an interruption keeps what was measured
            if found:
                times = cache.add(found)
    ops = step.graph.ops
    measurements = [times[key] if key else [op.time_ns, op.workspace_bytes] for key, op in zip(keys, ops, strict=True)]
    return step.with_costs([t for t, _ in measurements], [w for _, w in measurements])


# The cache.


class _Cache:
    """One file a device; in it, one table for each set of versions and settings."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device = _device_name(device)
        self._setting = _setting(device)
        self._path = folder / f"{re.sub(r'[^a-z0-9]+', '-', self._device.lower()).strip('-')}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the cache folder {folder}: {error.strerror or error}; set BELADY_CACHE") from error

    def read(self) -> Times:
        return self._tables().get(self._setting, {})

    def add(self, found: Times) -> Times:
        """Write measurements beside those in the file by now: another process may have added some."""
        tables = self._tables()
        times = tables.setdefault(self._setting, {})
        times.update(found)
        write_whole(self._path, json.dumps({"schema": SCHEMA, "device": self._device, "times": tables}, indent=1) + "\n")
        return times

    def _tables(self) -> dict[str, Times]:
        if not self._path.exists():
            return {}
        try:
            tables = read_json(self._path, schema=SCHEMA).get("times")
        except InputError as error:
            raise InputError(f"{error}; delete this file of measured op times to measure them again") from error
        if not isinstance(tables, dict) or not all(map(_is_table, tables.values())):
            raise InputError(f"{self._path} is damaged; delete this file of measured op times to measure them again")
        return tables


def _is_table(table: object) -> bool:
    return isinstance(table, dict) and all(
        isinstance(entry, list) and len(entry) == 2 and all(type(number) is int and number >= 0 for number in entry)
        for entry in table.values()
    )


def _folder(given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given)
    if own := os.environ.get("BELADY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "belady"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _setting(device: torch.device) -> str:
    """What decides, beside device and arguments, which kernel runs."""
    parts = [f"torch {torch.__version__}", f"deterministic {torch.are_deterministic_algorithms_enabled()}"]
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        parts += [
            f"cuda {torch.version.cuda}",
            f"cudnn {cudnn.version()}",  # type: ignore[no-untyped-call]
            f"benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic}",
            f"float32 matmul {torch.backends.cuda.matmul.fp32_precision}",
            f"float32 convolution {cudnn.conv.fp32_precision}",  # type: ignore[attr-defined]
        ]
    return ", ".join(parts)


# One op.


def _measure(node: fx.Node, device: torch.device, repeats: int) -> tuple[int, int]:
    """Time in ns (at least 1) and workspace in bytes of one call."""
    target: Any = node.target
    try:
        with really(), torch.no_grad(), torch.autocast(device.type, enabled=False):  # casts are ops of the graph already
            args, kwargs = _arguments(node, device)
            call = functools.partial(target, *args, **kwargs)
            return _on_cuda(call, device, repeats) if device.type == "cuda" else (_on_cpu(call, repeats), 0)
    except Exception as error:  # a kernel or a custom operator may raise anything
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{node.name} ({target}) cannot be timed alone: {type(error).__name__}: {reason}; use the roofline costs instead"
        ) from error


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


# Arguments.


def _arguments(node: fx.Node, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real tensors in the place of the fake ones, which share storages where those do.

    Numbers are drawn from [0.1, 1), which every operator can take (roots, logarithms, probabilities); integers are 0, or drawn
    where they are indices and their range is known; pivots exchange no rows.
    """
    generators: dict[torch.device, torch.Generator] = {}
    limit, on_host, pivots = _index_limit(node), _on_host(node), node.target in _READ_PIVOTS
    storages: dict[int, torch.UntypedStorage] = {}

    def real(fake: Tensor, where: torch.device) -> Tensor:
        key = storage_key(fake)
        if key not in storages:
            if where not in generators:
                generators[where] = torch.Generator(where).manual_seed(0)
            size = storage_bytes(fake) // fake.element_size()
            content = torch.empty(size, dtype=fake.dtype, device=where)
            storages[key] = _filled(content, generators[where], limit).untyped_storage()
        empty = torch.empty(0, dtype=fake.dtype, device=where)
        tensor = empty.set_(storages[key], int(fake.storage_offset()), fake.shape, fake.stride())
        if pivots and tensor.dtype == torch.int32:  # counted from 1: kernels write past the matrix where one is 0
            once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
            once.copy_(torch.arange(1, once.shape[-1] + 1, device=where))
        return tensor

    def value(argument: fx.Node) -> Any:
        if argument.op == "get_attr":  # subgraph of a higher-order operator
            return attribute(argument)
        where = torch.device("cpu") if argument in on_host else device
        return tree_map_only(Tensor, functools.partial(real, where=where), argument.meta["val"])

    return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)


def _filled(content: Tensor, generator: torch.Generator, limit: int) -> Tensor:
    if content.is_complex():
        torch.view_as_real(content).uniform_(0.1, 1, generator=generator)
    elif content.dtype == torch.bool:
        content.bernoulli_(0.5, generator=generator)
    elif content.is_floating_point() and content.element_size() > 1:
        content.uniform_(0.1, 1, generator=generator)
    elif content.is_floating_point() or limit == 1:  # 8-bit floats cannot be drawn
        content.zero_()
    else:
        content.random_(0, min(limit, torch.iinfo(content.dtype).max), generator=generator)
    return content


def _index_limit(node: fx.Node) -> int:
    """Integer arguments of this call may be anything from 0 to below this."""
    target = node.target
    name = target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""
    args: tuple[Any, ...] = node.args
    if name == "embedding":
        return int(args[0].meta["val"].shape[0])
    if name == "embedding_dense_backward":
        return int(args[2])
    if name in ("index", "index_put", "index_select", "gather", "scatter", "scatter_add", "index_add"):
        return max(1, int(min(args[0].meta["val"].shape, default=1)))  # valid whichever dimension is indexed
    return 1


_READ_PIVOTS = frozenset(
    {torch.ops.aten.linalg_lu_solve.default, torch.ops.aten.lu_unpack.default, torch.ops.aten.linalg_ldl_solve.default}
)


def _on_host(node: fx.Node) -> list[fx.Node]:
    """Arguments that lie on the host although their fakes do not say so: seed and offset of what reads them there."""
    if not isinstance(node.target, OpOverload) or not reads_seed_on_host(node.target):
        return []
    named = zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)
    given = [argument for name, argument in (*named, *node.kwargs.items()) if name in ("philox_seed", "philox_offset")]
    return [argument for argument in given if isinstance(argument, fx.Node)]


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
