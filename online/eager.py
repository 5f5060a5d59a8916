"""DTR for any eager model: every operator call passes here before it reads, and bytes leave and return under the tensors. [torch]

A tensor is evicted by emptying its storage and comes back by running its op again and handing the result's memory to that same
storage. Tensors, views, autograd's saved tensors and version counters are left alone: they are plain PyTorch's own objects
throughout, and Python control flow, hooks and optimizers see nothing of it.

What is evicted, and when, is the engine's business (``online.engine``). Its storages are *versions* of content: an operator that
writes in place makes a new version of the storage it writes to, computed from the old one (Kirisame et al., ICLR 2021,
appendix C.6). What cannot be computed again stays: parameters, buffers, whatever was made outside the block, what somebody reads
past the dispatcher (``numpy()``), and what was computed from the old content of one of these before it was overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from graphs.costs import DEVICES, DeviceDescription
from graphs.errors import BudgetExceeded, InputError, NoScheduleFound
from graphs.ir import Graph, Op, Value
from graphs.torch_private import (
    REPLACES_IN_PLACE,
    FakeTensorMode,
    TorchDispatchMode,
    in_backward,
    quiet_stand_ins,
    replace_content,
    tree_leaves,
    tree_map_only,
    without_autocast,
)
from online.engine import Counters, Engine, OutOfMemory, Release, Thrashed
from online.pauses import old_objects_left_alone
from online.runtime import Failure, Run, RunStatus, rule
from planner.budget import resolve_budget
from planner.draws import generator_state, repeat_draw
from planner.schedule import Compute, Free, Schedule, to_json
from planner.simulate import simulate

Holding = Tensor | nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]

_UNDER_WAY: list[EagerRun] = []  # the run that is under way, if one is


def budget(
    budget: int | str | None,
    *,
    heuristic: str = "dtr_eq",
    holding: Holding = (),
    costs: str | None = None,
    thrash_limit: float = 10.0,
    seed: int = 0,
) -> EagerRun:
    """Run the block under a byte budget: ``with budget("6GiB") as run: loss = model(x); loss.backward()``.

    budget     bytes (int, "6GiB"); None: unlimited, the run is only recorded. It covers what the block reads and makes:
               parameters and buffers of every module it calls from the first call of that module, tensors made before
               (inputs) from their first use, and everything made inside, gradients and optimizer state among it
    heuristic  a name of ``online.HEURISTICS``; "+reclaim" behind it evicts what only a rebuild needed as soon as it is done
    holding    what to count from the start, as it is in memory then: modules, optimizers (their state), tensors, containers
               of these
    costs      "measured": an op costs what its first run takes by the clock (the default on the CPU); "modelled": what the
               roofline of ``graphs.costs`` says, the same in every run (the default on CUDA, where a clock would have to wait)
    thrash_limit  stop when all runs of ops take this many times what their first runs took until then
    seed       of the random heuristic

    Raises BudgetExceeded before an op runs that would not fit, or at the end of the block where what it leaves alive does not
    fit together; NoScheduleFound at the thrash limit; InputError for what cannot be used. Everything alive at the end of the
    block is in memory afterwards; after an error, whatever the budget.
    """
    heuristic, *extras = heuristic.split("+")
    if extras not in ([], ["reclaim"]):
        raise InputError(f"nothing but +reclaim can stand behind a heuristic here, not {'+'.join(extras)!r}")
    evict = rule(heuristic)
    if isinstance(budget, float) or (isinstance(budget, str) and resolve_budget(budget, 0) == 0):
        raise InputError(f"budget {budget!r}: give bytes (6442450944 or '6GiB'); what a share is of is not known beforehand")
    if costs not in (None, "measured", "modelled"):
        raise InputError(f"costs must be 'measured' or 'modelled', not {costs!r}")
    if not thrash_limit >= 1:
        raise InputError(f"thrash_limit must be at least 1 (no recomputation at all), not {thrash_limit!r}")
    budget_bytes = None if budget is None else resolve_budget(budget, 0)
    engine = _Engine(budget_bytes, evict, seed=seed, reclaim=bool(extras))
    engine.thrash_limit = thrash_limit
    return EagerRun(engine, budget_bytes, heuristic, seed, holding, costs)


class _Engine(Engine):
    """The engine, with the few steps it needs where the program is not known beforehand.

    kept          storages that stay in memory until the program drops them
    thrash_limit  stop when all runs take this many times what the first runs took until then
    """

    kept: set[int]
    thrash_limit: float

    def accessed(self, tensor: int) -> bool:
        """A tensor is read; whether it is in memory."""
        self.pool.touch(self._storage[tensor], self.clock)
        return self._defined[tensor]

    def bring(self, tensor: int) -> None:
        """Have a tensor in memory now. Raises OutOfMemory."""
        if not self.accessed(tensor):
            self._materialize(self._producer[tensor], tensor, first=False)

    def hold(self, tensor: int) -> None:
        """Have a tensor in memory until ``let_go``. Raises OutOfMemory."""
        self.bring(tensor)
        self._lock(self._storage[tensor])

    def let_go(self, tensor: int) -> None:
        """Undo one ``hold``."""
        self._unlock(self._storage[tensor])

    def present(self, tensor: int) -> bool:
        """Whether a tensor is in memory."""
        return self._defined[tensor]

    def discard(self, s: int) -> None:
        """Nothing will read storage ``s`` again."""
        if self.resident[s] and not self._locks[s] and not self._pinned[s]:
            self._counters.released += 1
            self._evict(s)

    def took(self, op: int, time_ns: int) -> None:
        """The time of an op that is running for the first time."""
        self._time_ns[op] = time_ns
        first_ns = self.clock - 1 - self._counters.recomputed_ns + time_ns
        self.limit_ns = (self.thrash_limit - 1) * first_ns

    def first_output(self, op: int) -> int:
        """Its first tensor; the others follow."""
        return self._outputs[op][0]

    def output_storage(self, op: int, at: int) -> int:
        """The storage of its output number ``at``."""
        return self._storage[self._outputs[op][at]]

    def cost(self, op: int) -> tuple[int, int]:
        """Time and workspace of an op."""
        return self._time_ns[op], self._workspace_bytes[op]

    def let_go_of_all(self) -> None:
        """After an op that failed: nothing is under way any more, so nothing is held but what is kept."""
        for s, count in enumerate(self._locks):
            usual = 1 if s in self.kept else 0
            if count > usual:
                self._locks[s] = usual
                if not usual and self.resident[s] and not self._pinned[s]:
                    self.pool.join(s)


class _Content:
    """What a storage holds from one write to the next: a storage of the engine.

    number, tensor  in the engine
    size_bytes      as counted
    made_by         how to make it again; None: it cannot be made again
    at              the storage of the program that holds it; None once the program has dropped or overwritten it
    floating        where it lies while it is in memory without being at one of the program's storages
    readers         the ops that would read it if they ran again
    """

    __slots__ = ("__weakref__", "at", "floating", "made_by", "number", "readers", "size_bytes", "tensor", "unread")

    def __init__(self, number: int, tensor: int, size_bytes: int, made_by: _Recipe | None, unread: list[int]) -> None:
        self.number = number
        self.tensor = tensor
        self.size_bytes = size_bytes
        self.made_by = made_by
        self.at: weakref.ref[UntypedStorage] | None = None
        self.floating: UntypedStorage | None = None
        self.readers: list[weakref.ref[_Recipe]] = []
        self.unread = unread  # where the engine hears that nobody needs it any more

    def __del__(self) -> None:
        self.unread.append(self.number)

    def storage(self) -> UntypedStorage:
        """Where it lies now."""
        storage = self.floating if self.at is None else self.at()
        assert storage is not None, "read while it is not in memory"
        return storage


class _Notice(weakref.ref[UntypedStorage]):
    """Says when the program has dropped a storage; ``key``: of that storage."""

    __slots__ = ("key",)
    key: int


class _View:
    """A tensor argument, without the tensor: enough to make one like it.

    keeps  the storage itself where it cannot be made again: it has to live as long as it may be read
    """

    __slots__ = ("conjugate", "content", "dtype", "keeps", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, content: _Content, keeps: UntypedStorage | None) -> None:
        self.content = content
        self.keeps = keeps
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.conjugate = self.dtype.is_complex and tensor.is_conj()

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The argument again, over ``storage``."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.shape, self.stride)
        return made.conj() if self.conjugate else made


class _Recipe:
    """How to run an op again.

    args, kwargs  as given, each tensor a _View
    written       for each content the op writes over: the old one; its outputs begin with the new ones
    scratch       contents it writes to without what it returns depending on them: run again, it writes to a copy
    makes         what it made (weakly: a recipe lives as long as something made by it may be needed)
    draw          the generator (or the device whose default one it is) and its state before the draw, of a random op
    """

    __slots__ = ("__weakref__", "args", "draw", "func", "kwargs", "makes", "scratch", "written")

    def __init__(self, func: Any, args: Any, kwargs: Any, written: list[_Content], scratch: list[_Content]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.written = written
        self.scratch = scratch
        self.makes: list[weakref.ref[_Content]] = []
        self.draw: tuple[torch.device | torch.Generator, Tensor] | None = None

    def run(self) -> list[UntypedStorage]:
        """Run the op once more: the storages it makes, those of new contents it writes first."""
        own = {content: _copy(content.storage()) for content in (*self.written, *self.scratch)}
        old: set[int] = set()

        def argument(view: _View) -> Tensor:
            storage = own.get(view.content) or view.keeps or view.content.storage()
            old.add(storage._cdata)
            return view.tensor(storage)

        args, kwargs = tree_map_only(_View, argument, (self.args, self.kwargs))
        with without_autocast():
            if self.draw is None:
                result = self.func(*args, **kwargs)
            else:
                where, state = self.draw
                result = repeat_draw(state, where, self.func, *args, **kwargs)
        return [own[content] for content in self.written] + _new_storages(result, old)


def _copy(storage: UntypedStorage) -> UntypedStorage:
    copy = UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
    copy.copy_(storage)
    return copy


def _new_storages(result: Any, old: Any) -> list[UntypedStorage]:
    """Storages in a result that are none of those with the keys ``old``, each once, in order."""
    if isinstance(result, Tensor) and result.layout is _STRIDED:  # most are a single one
        storage = result.untyped_storage()
        return [] if storage._cdata in old else [storage]
    found: dict[int, UntypedStorage] = {}
    for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ():
        if isinstance(tensor, Tensor):
            if tensor.layout is not _STRIDED:
                _check_layout(tensor)
            storage = tensor.untyped_storage()
            if storage._cdata not in old:
                found[storage._cdata] = storage
        elif isinstance(tensor, tuple | list):
            found.update((storage._cdata, storage) for storage in _new_storages(tensor, old))
    return list(found.values())


_STRIDED = torch.strided


def _check_layout(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise InputError(f"a {tensor.layout} tensor turned up in a block under a budget; only strided ones can be counted")


class _Surprise(Exception):
    """An op has made other storages than were foreseen."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


class _Kind:
    """What is true of every call of an operator.

    name     for people and reports; kind: with the overload
    looks    makes nothing but views and numbers; views: but views
    written  places of arguments it writes to (a name where it is given by keyword)
    scratch  places of arguments it writes to although what it returns does not depend on them
    gives_back  returns nothing but the tensors it writes to
    random   draws random numbers
    acts     on the outside world, so that it must not run twice
    moves    puts a tensor on another storage or changes the size of one
    """

    __slots__ = ("acts", "func", "gives_back", "kind", "looks", "moves", "name", "random", "scratch", "views", "written")

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its id is not given again
        self.kind = str(func)
        schema = func._schema
        packet = func.name().partition(".")[0]
        self.name = packet.replace("::", ".")
        self.scratch: tuple[int, ...] = ()
        writes = [at for at, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if packet in _BATCH_NORMS:  # most schemas do not say that running statistics are written
            self.scratch = (3, 4)
            writes = [at for at in writes if at not in self.scratch]
        self.written = tuple((at, schema.arguments[at].name) for at in writes)
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        self.gives_back = bool(self.written) and all(r.alias_info is not None for r in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.acts = (not self.written and not schema.returns) or func.namespace in ("c10d", "_c10d_functional")
        self.moves = packet in ("aten::set_", "aten::resize_", "aten::resize_as_")
        self.views = func.is_view
        makes_views = func.is_view or torch.Tag.inplace_view in func.tags
        self.looks = not self.moves and (makes_views or not (gives_tensors or self.written or self.acts))


_BATCH_NORMS = frozenset(
    f"aten::{name}"
    for name in (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
)


_kinds: dict[int, _Kind] = {}  # by id: operators hash slowly


def _kind(func: Any) -> _Kind:
    kind = _kinds.get(id(func))
    if kind is None:
        kind = _kinds[id(func)] = _Kind(func)
    return kind


class _Given(_Kind):
    """An input, as if an operator had made it."""

    def __init__(self) -> None:
        self.name = self.kind = "input"
        self.random = False


_GIVEN = _Given()


# What an op makes, and what it costs, without running it.

_Key = tuple[Any, ...]
_sizes_of: dict[_Key, tuple[int, ...]] = {}  # bytes of the storages that calls with this key made
_MOST_KEYS = 100_000
_BOUNDS: Mapping[str, Callable[[Tensor], int]] = {  # the most an op can make whose result depends on what it reads
    "aten.nonzero": lambda t: t.numel() * t.dim() * 8,
    "aten.masked_select": lambda t: t.numel() * t.element_size(),
}


def _remember(key: _Key, sizes: tuple[int, ...]) -> None:
    if len(_sizes_of) >= _MOST_KEYS:
        _sizes_of.clear()
    _sizes_of[key] = sizes


def _foreseen(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Bytes of the storages a call would make, from a run on tensors without data; None where that cannot be told."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    with quiet_stand_ins(), mode:
        try:
            args, kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
            old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            return tuple(_counted_bytes(storage) for storage in _new_storages(func(*args, **kwargs), old))
        except Exception:  # whatever is wrong with the call, the call itself will say it
            return None


def _counted_bytes(storage: UntypedStorage) -> int:
    """Bytes of a storage, as the allocator gives them out."""
    size_bytes = storage.nbytes()
    return -(-size_bytes // 512) * 512 if storage.device.type == "cuda" else size_bytes


class _Model:
    """Modelled op times: the roofline of ``graphs.costs``, computed once for each kind of call."""

    def __init__(self) -> None:
        self._formulas = FlopCounterMode(display=False).flop_registry
        self._known: dict[_Key, int] = {}

    def time_ns(self, key: _Key, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        if key not in self._known:
            if len(self._known) >= _MOST_KEYS:
                self._known.clear()
            self._known[key] = self._compute_ns(func, args, kwargs, result)
        return self._known[key]

    def _compute_ns(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        touched = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if not touched:
            return 1
        device = _described(touched[0].device)
        formula = self._formulas.get(func.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        dtypes = [str(t.dtype).removeprefix("torch.") for t in touched if t.dtype.is_floating_point]
        rate = device.peak_flops.get(dtypes[0] if dtypes else "float32", device.peak_flops["float32"])
        moved = sum(t.numel() * t.element_size() for t in touched)
        return max(1, round(max(flops / rate, moved / device.bandwidth_bytes_per_s) * 1e9) + device.launch_ns)


@functools.cache
def _described(device: torch.device) -> DeviceDescription:
    """The description that fits a device best; of a GPU that has none, that of the slowest."""
    if device.type != "cuda":
        return DEVICES["cpu"]
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    fitting = [each for each in DEVICES.values() if each.words and each.words <= words]
    return max(fitting, key=lambda each: len(each.words), default=DEVICES["t4"])


_Entry = tuple[_Kind, tuple[int, ...], bool, bool]  # kind, inputs; acts on the world, in the backward


class EagerRun(contextlib.AbstractContextManager["EagerRun"]):
    """The block of ``with budget(...) as run``, and its record.

    budget_bytes          None: unlimited
    counters              what the run did: evictions, recomputations, time spent searching, ...
    peak_bytes            most bytes in memory at once so far
    live_bytes            bytes in memory now
    graph, schedule       after the block: what it computed, and every compute and free in time order
    """

    def __init__(
        self, engine: _Engine, budget_bytes: int | None, heuristic: str, seed: int, holding: Holding, costs: str | None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.heuristic = heuristic
        self.seed = seed
        self._engine = engine
        self._holding = holding
        self._costs = costs
        self._model = _Model()
        self._on_death = self._died
        self._interposed = contextlib.ExitStack()
        self._contents: dict[int, _Content] = {}  # by the key of the storage of the program that holds them
        self._seen_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._dead: list[int] = []  # contents whose storage the program has dropped
        self._unread: list[int] = []  # contents nobody needs any more
        self._content_of: list[weakref.ref[_Content] | None] = []  # of each storage of the engine
        self._recipe_of: list[weakref.ref[_Recipe] | None] = []  # of each op of the engine
        self._log: list[tuple[_Entry, tuple[int, ...]]] = []  # of each op of the engine, with its outputs
        self._resident: list[int] = []
        self._running: tuple[int, Any, Any, Any, tuple[int, ...], _Key] | None = None
        self._result: Any = None
        self._made: list[UntypedStorage] = []
        self._wall_s = 0.0
        self._alive: list[int] | None = None  # storages of the engine that are in memory at the end; None: not there yet
        self._failure: Failure | None = None
        self._thrashed = False
        engine.kept = set()
        engine.driver = self

    # The block

    def __enter__(self) -> EagerRun:
        if _UNDER_WAY:
            raise InputError("a block under a budget cannot hold another one")
        if self._alive is not None:
            raise InputError("this run is over; call budget() again for another one")
        _UNDER_WAY.append(self)
        try:
            for tensor in _tensors_in(self._holding):
                self._meet(tensor, resident=True)
            self._holding = ()
            self._interposed.enter_context(cast(Any, register_module_forward_pre_hook(self._meet_module)))
            self._interposed.callback(register_optimizer_step_post_hook(self._keep_state).remove)
            self._interposed.enter_context(_RawReads(self))
            self._interposed.enter_context(_Operators(self))
            self._interposed.enter_context(old_objects_left_alone())
        except BaseException:
            self._interposed.close()
            _UNDER_WAY.remove(self)
            raise
        self._wall_s = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._interposed.close()
        self._wall_s = time.perf_counter() - self._wall_s
        try:
            self._settle(failed=error is not None)
        finally:
            _UNDER_WAY.remove(self)

    @property
    def counters(self) -> Counters:
        """Counts so far."""
        return self._engine.counters

    @property
    def peak_bytes(self) -> int:
        """Most bytes in memory at once so far; after the block, those of ``schedule``."""
        return self._engine.peak_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes in memory now, as far as the block has to do with them."""
        self._bury()
        return self._engine.used_bytes

    @property
    def graph(self) -> Graph:
        """What the block computed. InputError while it is under way."""
        return self._recorded[0]

    @property
    def schedule(self) -> Schedule:
        """Every compute and free in time order, a schedule of ``graph``."""
        return self._recorded[1]

    def record(self) -> Run:
        """The run as one of ``online.run``: to compare, to plan from, to write as a row."""
        graph, schedule = self._recorded
        trace = simulate(graph, schedule)
        limit = trace.peak_bytes if self.budget_bytes is None else self.budget_bytes
        status = RunStatus.COMPLETED
        if self._failure is not None or self._thrashed:
            status = RunStatus.THRASHED if self._thrashed else RunStatus.OUT_OF_MEMORY
        return Run(
            graph,
            limit,
            self.heuristic,
            Release.EAGER,
            self._engine.reclaim,
            self.seed,
            status,
            tuple(to_json(schedule)),
            (trace.time_ns, trace.peak_bytes),
            self._engine.counters,
            self._failure,
            self._wall_s,
        )

    # Every operator call

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``func(*args, **kwargs)`` does, under the budget."""
        if self._dead or self._unread:
            self._bury()
        kind = _kind(func)
        if kind.looks:
            return self._look(kind, func, args, kwargs)
        read: list[_Content] = []
        key: list[Any] = [kind]
        described = self._described
        views = (
            [described(argument, read, key) for argument in args],
            {name: described(argument, read, key) for name, argument in kwargs.items()} if kwargs else kwargs,
        )
        if kind.moves:
            for content in read:
                self._keep(content, kind.name)
            return func(*args, **kwargs)
        written = self._written(kind, args, kwargs) if kind.written else []
        scratch: list[_Content] = []
        if kind.scratch and args[5] is not False:  # training
            scratch = [self._content(args[at]) for at in kind.scratch if args[at] is not None]

        full = tuple(key)
        sizes: tuple[int, ...] | None = ()
        if not kind.gives_back:
            sizes = _sizes_of.get(full)
            if sizes is None:
                sizes = _foreseen(func, args, kwargs)
                if sizes is not None:
                    _remember(full, sizes)
            if sizes == () and not written and not kind.acts:
                return self._look(kind, func, args, kwargs)

        for content in scratch:  # it is written to, so what was computed from it before cannot be made again
            self._fix(content, kind.name)
        acts = kind.acts or any(content.made_by is None or content.number in self._engine.kept for content in written)
        recipe: _Recipe | None = None
        if acts:
            for content in written:
                self._fix(content, kind.name)
            written = []
        else:
            recipe = _Recipe(func, *views, written, scratch)
            if kind.random:
                where = kwargs.get("generator") or _device_of(args, kwargs)
                recipe.draw = where, generator_state(where)
        return self._run(kind, full, sizes, read, written, scratch, recipe, func, args, kwargs)

    def _run(
        self,
        kind: _Kind,
        key: _Key,
        sizes: tuple[int, ...] | None,
        read: list[_Content],
        written: list[_Content],
        scratch: list[_Content],
        recipe: _Recipe | None,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run an op for the first time: if possible after making room for it, else (size unknown) at once."""
        engine = self._engine
        inputs = [c for c in dict.fromkeys(read) if c not in scratch]
        reads = [c.tensor for c in inputs if c.tensor >= 0]
        if sizes is None:
            first = args[0] if args and isinstance(args[0], Tensor) else None
            if first is not None and kind.name in _BOUNDS:
                sizes = (_BOUNDS[kind.name](first),)
        before = tuple([content.size_bytes for content in written]) if written else ()
        copies_bytes = sum([content.size_bytes for content in scratch]) if scratch else 0
        surprise: _Surprise | None = None
        entry = kind, tuple([c.number for c in inputs]), recipe is None, in_backward()
        if sizes is not None:
            op, outs = self._declare(entry, reads, before + sizes, copies_bytes)
            self._running = op, func, args, kwargs, sizes, key
            try:
                self._engine_call(op, kind.name)
            except _Surprise as caught:
                surprise = caught
        else:
            for tensor in reads:
                self._guarded(kind.name, engine.hold, tensor)
            try:
                surprise = _Surprise(func(*args, **kwargs))
            finally:
                engine.let_go_of_all()
        if surprise is not None:  # the op has run; now that its sizes are known, what it made is counted and made room for
            self._result = surprise.result
            self._made = _new_storages(surprise.result, self._contents)
            sizes = tuple(map(_counted_bytes, self._made))
            op, outs = self._declare(entry, reads, before + sizes, copies_bytes)
            self._engine_call(op, kind.name)
            _remember(key, sizes)
        assert sizes is not None
        result, made, self._result, self._made = self._result, self._made, None, []
        self._bind(op, outs, written, made, recipe)
        if recipe is not None:
            reader = weakref.ref(recipe)
            self._recipe_of[op] = reader
            for content in inputs:
                content.readers.append(reader)
        return result

    def _look(self, kind: _Kind, func: Any, args: Any, kwargs: Any) -> Any:
        """Make views or read numbers: nothing is allocated, but what is read has to be there."""
        if kind.views and args and isinstance(args[0], Tensor):  # of its first argument, as a rule
            tensors = [argument for argument in args if isinstance(argument, Tensor)]
        else:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(tensors) == 1:
            tensor = self._content(tensors[0]).tensor
            if tensor >= 0 and not self._engine.accessed(tensor):
                self._guarded(kind.name, self._engine.bring, tensor)
            return func(*args, **kwargs)
        held = [content.tensor for content in map(self._content, tensors) if content.tensor >= 0]
        with self._held(kind.name, held):
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def _held(self, name: str, tensors: list[int]) -> Iterator[None]:
        """Have tensors in memory together for a while."""
        for tensor in tensors:
            self._guarded(name, self._engine.hold, tensor)
        try:
            yield
        finally:
            for tensor in tensors:
                self._engine.let_go(tensor)

    def _described(self, argument: Any, read: list[_Content], key: list[Any]) -> Any:
        """An argument with views in place of its tensors; adds what is read, and what decides about the sizes of results."""
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage() if argument.layout is _STRIDED else None
            content = self._contents.get(storage._cdata) if storage is not None else None
            if content is None:
                content = self._content(argument)
            read.append(content)
            view = _View(argument, content, storage if content.made_by is None else None)
            key += (view.shape, view.stride, view.dtype)
            return view
        if isinstance(argument, list | tuple):
            key.append(len(argument))
            return [self._described(entry, read, key) for entry in argument]
        key += (type(argument), None) if isinstance(argument, float) and read else (type(argument), argument)
        return argument

    def _content(self, tensor: Tensor) -> _Content:
        """What the storage of a tensor holds now; a storage not seen before was made outside the block."""
        if tensor.layout is not _STRIDED:
            _check_layout(tensor)
        content = self._contents.get(tensor.untyped_storage()._cdata)
        return self._meet(tensor) if content is None else content

    def _written(self, kind: _Kind, args: Any, kwargs: Any) -> list[_Content]:
        """The contents an op writes over, each once."""
        found: dict[_Content, None] = {}
        for at, name in kind.written:
            argument = args[at] if at < len(args) else kwargs.get(name)
            for tensor in (argument,) if isinstance(argument, Tensor) else argument or ():
                found[self._content(tensor)] = None
        return list(found)

    def _declare(
        self, entry: _Entry, reads: list[int], sizes: tuple[int, ...], workspace_bytes: int = 0
    ) -> tuple[int, tuple[int, ...]]:
        """A new op and its storages, in the engine."""
        engine = self._engine
        outs = tuple([engine.add_storage(size) for size in sizes])
        self._content_of.extend([None] * len(outs))
        if not REPLACES_IN_PLACE:
            workspace_bytes += max(sizes, default=0)
        op, _ = engine.add_op(reads, outs, 0, workspace_bytes)
        self._recipe_of.append(None)
        self._log.append((entry, outs))
        return op, outs

    def _engine_call(self, op: int, name: str) -> None:
        try:
            self._guarded(name, self._engine.call, op)
        finally:
            self._running = None

    def _guarded(self, name: str, step: Callable[[int], None], number: int) -> None:
        """A step of the engine for an operator of that name. Whatever fails, nothing stays locked."""
        try:
            step(number)
        except OutOfMemory as error:
            self._engine.let_go_of_all()
            asked, held = error.asked_bytes, []
            for s in error.held:
                content = self._content_of[s]
                live = content() if content is not None else None
                held.append((self._name_of(s) if live is not None else "dropped", self._engine.size_bytes[s]))
            failure = Failure(name, asked, tuple(sorted(held, key=lambda entry: -entry[1])))
            assert self.budget_bytes is not None
            self._failure = failure
            raise BudgetExceeded(name, asked, self.budget_bytes, str(failure)) from None
        except Thrashed:
            self._engine.let_go_of_all()
            self._thrashed = True
            raise NoScheduleFound(
                f"recomputation for {name} makes the block take more than {self._engine.thrash_limit:g} times as long as without "
                f"the budget of {self.budget_bytes:,} bytes; give it more memory, a higher thrash_limit or another heuristic"
            ) from None
        except BaseException:
            self._engine.let_go_of_all()
            raise

    def _name_of(self, s: int) -> str:
        return f"storage {s}"

    def _bind(
        self, op: int, outs: tuple[int, ...], written: list[_Content], made: list[UntypedStorage], recipe: _Recipe | None
    ) -> None:
        """After an op ran: its outputs are where the program has them."""
        engine = self._engine
        first = self._engine.first_output(op) if outs else -1
        resized = False
        for at, (old, s) in enumerate(zip(written, outs, strict=False)):
            new = _Content(s, first + at, old.size_bytes, recipe, self._unread)
            assert old.at is not None
            storage = old.at()
            assert storage is not None
            resized = resized or _counted_bytes(storage) != old.size_bytes
            self._attach(new, storage)
            old.at = None
            engine.drop(old.number)
            self._note(new, recipe)
        for at, (storage, s) in enumerate(zip(made, outs[len(written) :], strict=True), start=len(written)):
            new = _Content(s, first + at, engine.size_bytes[s], recipe, self._unread)
            self._attach(new, storage)
            self._note(new, recipe)
            if recipe is None or not storage.resizable():
                self._keep(new, "")
        if resized:
            raise InputError("an operator changed the size of a tensor it was to write to; give out= one of the right size")

    def _note(self, content: _Content, recipe: _Recipe | None) -> None:
        known = weakref.ref(content)
        self._content_of[content.number] = known
        if recipe is not None:
            recipe.makes.append(known)

    def _attach(self, content: _Content, storage: UntypedStorage) -> None:
        key = storage._cdata
        content.at = notice = _Notice(storage, self._on_death)
        notice.key = key
        self._contents[key] = content

    def _died(self, notice: _Notice) -> None:
        content = self._contents.get(notice.key)
        if content is not None and content.at is notice:
            del self._contents[notice.key]
            content.at = None
            self._dead.append(content.number)

    def _bury(self) -> None:
        """Tell the engine what the program has dropped since."""
        engine = self._engine
        while self._dead:
            s = self._dead.pop()
            engine.kept.discard(s)
            engine.drop(s)
        while self._unread:
            engine.discard(self._unread.pop())

    # What stays

    def _meet(self, tensor: Tensor, *, resident: bool = False) -> _Content:
        """Count a storage that was made outside the block; it is never evicted. ``resident``: from the start."""
        storage = tensor.untyped_storage()
        content = self._contents.get(storage._cdata)
        if content is not None:
            return content
        size, engine = _counted_bytes(storage), self._engine
        if resident and not engine.steps:
            s = engine.add_storage(size, pinned=True)
            engine.preload(s)
            self._resident.append(s)
            self._content_of.append(None)
            content = _Content(s, -1, size, None, self._unread)
            if engine.used_bytes > engine.budget_bytes:
                assert self.budget_bytes is not None
                raise BudgetExceeded("what is there from the start", engine.used_bytes, self.budget_bytes)
        else:
            op, outs = self._declare((_GIVEN, (), True, in_backward()), [], (size,))
            self._engine_call(op, "an input")
            content = _Content(outs[0], engine.first_output(op), size, None, self._unread)
            engine.hold(content.tensor)
            engine.kept.add(content.number)
        self._note(content, None)
        self._attach(content, storage)
        if tensor.is_leaf and tensor.requires_grad:
            handle = tensor.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]
            self._interposed.callback(handle.remove)
        return content

    def _keep_gradient(self, leaf: Tensor) -> None:
        """A gradient has reached its parameter. It is to be there at the end, and what it came from is about to go."""
        if leaf.grad is not None and leaf.grad.layout is torch.strided:
            self._keep(self._content(leaf.grad), "a gradient")

    def _keep_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step of an optimizer: its state stays, as it could be made again only from the gradients of all steps."""
        for tensor in _tensors_in(optimizer.state):
            self._fix(self._content(tensor), "the state of an optimizer")

    def _meet_module(self, module: nn.Module, inputs: Any) -> None:
        """At the first call of a module: all it holds is in memory from now on at the latest."""
        if module in self._seen_modules:
            return
        for part in module.modules():
            self._seen_modules.add(part)
        for tensor in _tensors_in(module):
            self._meet(tensor, resident=True)
        for parameter in module.parameters():
            if parameter.grad is not None:
                self._meet(parameter.grad)

    def _keep(self, content: _Content, name: str) -> None:
        """From now on a content stays in memory until the program drops it."""
        engine = self._engine
        if content.tensor >= 0 and content.number not in engine.kept:
            self._guarded(name, engine.hold, content.tensor)
            engine.kept.add(content.number)

    def _fix(self, content: _Content, name: str) -> None:
        """A content is about to be written over without a new version of it: it, and what can be made again only from what it
        holds now, stays from now on."""
        found = {content: None}
        stack = [content]
        while stack:
            reader = stack.pop()
            for known in reader.readers:
                recipe = known()
                for made in recipe.makes if recipe is not None else ():
                    other = made()
                    if other is not None and other not in found:
                        found[other] = None
                        stack.append(other)
            reader.readers = []
        for each in found:
            if each.at is not None:
                self._keep(each, name)
        for each in found:
            each.made_by = None

    # What the engine asks for (``online.engine.Driver``)

    def compute(self, op: int) -> None:
        """Run an op, for the first time or again."""
        engine = self._engine
        if self._running is not None and self._running[0] == op:
            _, func, args, kwargs, sizes, key = self._running
            begin = time.perf_counter_ns()
            result = func(*args, **kwargs)
            took_ns = time.perf_counter_ns() - begin
            made = _new_storages(result, self._contents)
            if [_counted_bytes(storage) for storage in made] != [*sizes]:
                raise _Surprise(result)
            self._result, self._made = result, made
            if self._costs == "modelled" or (self._costs is None and made and made[0].device.type == "cuda"):
                took_ns = self._model.time_ns(key, func, args, kwargs, result)
            engine.took(op, took_ns)
            return
        known = self._recipe_of[op]
        recipe = known() if known is not None else None
        if recipe is None:  # its result is already there
            return
        for at, (made_, storage) in enumerate(zip(recipe.makes, recipe.run(), strict=True)):
            content = made_()
            if engine.present(engine.first_output(op) + at):
                continue
            if content is None:
                self._unread.append(engine.output_storage(op, at))
            elif content.at is None:
                content.floating = storage
            else:
                replace_content(content.storage(), storage)

    def free(self, storage: int) -> None:
        """Let go of the bytes of a content."""
        known = self._content_of[storage]
        content = known() if known is not None else None
        if content is None:
            return
        content.floating = None
        if content.at is not None:
            lies_in = content.at()
            if lies_in is not None:
                lies_in.resize_(0)

    # The end

    def _settle(self, *, failed: bool) -> None:
        """Bring back all that is alive, and write the run down."""
        engine = self._engine
        self._bury()
        problem: BudgetExceeded | NoScheduleFound | None = None
        alive = [c for c in self._contents.values() if c.tensor >= 0]
        if failed:
            engine.budget_bytes = engine.limit_ns = float("inf")
        for content in alive:
            try:
                self._keep(content, "what the block leaves alive")
            except (BudgetExceeded, NoScheduleFound) as error:  # no tensor must stay empty: nothing looks after it any more
                problem = error
                engine.budget_bytes = engine.limit_ns = float("inf")
                self._keep(content, "what the block leaves alive")
        self._alive = [c.number for c in alive]
        self._contents.clear()
        self._seen_modules.clear()
        self._bury()
        if problem is not None:
            raise problem

    @functools.cached_property
    def _recorded(self) -> tuple[Graph, Schedule]:
        """Graph and schedule, with storages and ops numbered without gaps. Written when asked for: training loops do not ask."""
        engine, alive = self._engine, self._alive
        if alive is None:
            raise InputError("the block is still under way; its graph is complete afterwards")
        ran = {step for step in engine.steps if step >= 0}
        log = [(op, *entry) for op, entry in enumerate(self._log) if op in ran]
        made = [s for _, _, outs in log for s in outs]
        numbers = {s: v for v, s in enumerate([*self._resident, *made])}
        ops = {op: i for i, (op, _, _) in enumerate(log)}
        values = [Value(f"resident_{v}", engine.size_bytes[s]) for v, s in enumerate(self._resident)]
        listed = []
        for op, (kind, inputs, acts, backward), outs in log:
            time_ns, workspace_bytes = engine.cost(op)
            name = f"{kind.name.removeprefix('aten.')}_{ops[op]}"
            values += [Value(name, engine.size_bytes[s]) for s in outs]
            reads, makes = tuple(map(numbers.__getitem__, inputs)), tuple(map(numbers.__getitem__, outs))
            listed.append(
                Op(
                    name,
                    reads,
                    makes,
                    time_ns,
                    workspace_bytes,
                    kind=kind.kind,
                    random=kind.random,
                    effect=acts,
                    backward=backward,
                )
            )
        resident = frozenset(numbers[s] for s in self._resident)
        outputs = frozenset(numbers[s] for s in alive) - resident
        graph = Graph("eager", tuple(listed), tuple(values), resident, outputs)
        steps = (Compute(ops[step]) if step >= 0 else Free(numbers[-1 - step]) for step in engine.steps)
        return graph, tuple(steps)


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Where an op without a generator of its own draws: on the device of its first tensor, or the one it is given."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf.device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


def _tensors_in(holding: Any) -> Iterator[Tensor]:
    """Tensors of a module, of the state of an optimizer, of containers of these."""
    if isinstance(holding, Tensor):
        yield holding
    elif isinstance(holding, nn.Module):
        yield from holding.parameters()
        yield from holding.buffers()
    elif isinstance(holding, torch.optim.Optimizer):
        yield from _tensors_in(holding.state)
    elif isinstance(holding, Mapping):
        yield from _tensors_in(holding.values())
    elif isinstance(holding, Iterable) and not isinstance(holding, str | bytes):
        for entry in holding:
            yield from _tensors_in(entry)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator call of the block, those of the backward pass among them."""

    def __init__(self, run: EagerRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = run.call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


# Methods that read a tensor without an operator call: those that leave something behind that goes on reading, and the others.
_OPENS = {
    getattr(Tensor, name)
    for name in ("__array__", "__dlpack__", "data_ptr", "numpy", "share_memory_", "storage", "untyped_storage")
}
_READS = {getattr(Tensor, name) for name in ("__deepcopy__", "__format__", "__reduce_ex__", "__repr__", "tolist")}


class _RawReads(TorchFunctionMode):
    """Reads past the dispatcher: the tensor is there meanwhile, or from then on."""

    def __init__(self, run: EagerRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPENS:
            run = self._run
            run._keep(run._content(args[0]), func.__name__)
        elif func in _READS:
            run = self._run
            content = run._content(args[0])
            with run._held(func.__name__, [content.tensor] if content.tensor >= 0 else []):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
