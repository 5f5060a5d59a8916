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
import gc
import os
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphs.errors import BudgetExceeded, InputError, NoScheduleFound
from graphs.ir import Graph, Op, Value
from graphs.torch_private.names import no_dispatch, tree_leaves, without_torch_function
from graphs.torch_private.running import (
    around_backwards,
    around_packing,
    called_back_here,
    current_stream,
    in_backward,
    is_active,
)
from graphs.torch_private.tensors import REPLACES_IN_PLACE, in_no_tensor, is_functorch_wrapped, is_zero_stand_in, replace_content
from online.blocks.estimates import BOUNDS, CostModel, Key, counted_bytes, foreseen, remember, sizes_of
from online.blocks.interposition import Operators, RawReads
from online.blocks.kinds import GIVEN, Entry, Kind, kind_of
from online.blocks.recipes import STRIDED, Content, Gone, Known, Notice, Recipe, View, WithoutMemory, check_layout, new_storages
from online.blocks.tensors import tensors_in
from online.blocks.workspace import Workspace, learned_workspaces
from online.engine import Counters, Option, OutOfMemory, Release, Thrashed
from online.growing import GrowingEngine
from online.heuristics import HEURISTICS
from online.runtime import Failure, Run, RunStatus, check_thrash_limit, rule
from planner.budget import is_share, resolve_budget
from planner.execution.draws import generator_state
from planner.process.pauses import old_objects_left_alone
from planner.schedule import Compute, Free, Schedule, to_json
from planner.simulate import simulate

Holding = Tensor | nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]

_META = torch.device("meta")
_NONE: dict[str, Any] = {}  # arguments by name of most calls
_UNDER_WAY: list[EagerRun] = []  # the run that is under way, if one is


def _lift_in_child() -> None:
    """A process forked inside of a block (a worker of a loader) has memory of its own, which no budget is for."""
    for run in _UNDER_WAY:
        run._engine.lift()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lift_in_child)


def budget(
    budget: int | str | None,
    *,
    heuristic: str = "dtr_eq+counted",
    holding: Holding = (),
    costs: str | None = None,
    thrash_limit: float = 10.0,
    seed: int = 0,
) -> EagerRun:
    """Run the block under a byte budget: ``with budget("6GiB") as run: loss = model(x); loss.backward()``.

    budget     bytes (int, "6GiB"); None: unlimited, the run is only recorded. It covers what the block reads and makes:
               parameters and buffers of every module it calls from the first call of that module, tensors made before
               (inputs) from their first use, and everything made inside, gradients and optimizer state among it
    heuristic  a name of ``online.HEURISTICS``; "+counted" behind it evicts what only a rebuild needed as soon as the rebuild has
               read it for the last time, "+reclaim" as soon as it has read it. "demand+counted" often recomputes less than the
               default where memory is tight, and takes longer to decide
    holding    what to count from the start, as it is in memory then: modules, optimizers (their state), tensors, containers
               of these
    costs      "measured": an op costs what its first run takes by the clock (the default on the CPU); "modelled": what the
               roofline of ``graphs.costs`` says, the same in every run (the default on CUDA, where a clock would have to wait)
    thrash_limit  stop when all runs of ops take this many times what their first runs took until then
    seed       of the random heuristic

    Raises BudgetExceeded before an op runs that would not fit, or at the end of the block where what it leaves alive does not
    fit together; NoScheduleFound at the thrash limit; InputError for what cannot be used. Everything alive at the end of the
    block is in memory afterwards; after an error, whatever the budget. Where Ctrl-C (or a signal whose handler ends the program)
    comes in the middle of what is noted about an op and the program goes on inside of the block, it does so without the budget,
    as a RuntimeWarning says.

    What other threads of the program run is outside of the block. What they read of the block's tensors may be evicted, and then
    is empty: clone it in the block's thread, and hand them that once the block is over.

    CUDA: workspace inside of an op is learned when a call with these shapes and dtypes first runs in this process, and room is
    made for it from then on. That first run may break the budget, as may a run of an op whose result has a size that depends on
    data; a RuntimeWarning at the end of the block names the op then. ``peak_bytes`` counts the workspace, the first one too. What
    libraries keep for good (cuBLAS) is not in the budget. What ops on another stream than that of the block read and make is not
    evicted.
    """
    if not isinstance(heuristic, str):
        raise InputError(f"heuristic must be a name ({', '.join(HEURISTICS)}), not {heuristic!r}")
    heuristic, *extras = heuristic.split("+")
    if extras not in ([], ["reclaim"], ["counted"]):
        raise InputError(f"nothing but one of +reclaim and +counted can stand behind a heuristic here, not {'+'.join(extras)!r}")
    evict = rule(heuristic)
    if not isinstance(holding, Tensor | nn.Module | torch.optim.Optimizer | Mapping | Iterable) or isinstance(
        holding, str | bytes
    ):
        raise InputError(
            f"holding takes modules, optimizers, tensors and containers of these, not what is of type {type(holding).__name__}"
        )
    if costs not in (None, "measured", "modelled"):
        raise InputError(f"costs must be 'measured' or 'modelled', not {costs!r}")
    check_thrash_limit(thrash_limit)
    budget_bytes = None if budget is None else _bytes_of(budget)
    reclaim, options = extras == ["reclaim"], frozenset([Option.COUNTED] if extras == ["counted"] else ())
    engine = GrowingEngine(budget_bytes, evict, thrash_limit=thrash_limit, seed=seed, reclaim=reclaim, options=options)
    return EagerRun(engine, budget_bytes, heuristic, seed, holding, costs, reclaim=reclaim, options=options)


def _bytes_of(budget: int | str) -> int:
    """Bytes of a budget that is no share. Raises InputError."""
    with contextlib.suppress(InputError):  # which offers shares
        if not is_share(budget):
            return resolve_budget(budget, 0)
    raise InputError(f"budget {budget!r}: give bytes (6442450944 or '6GiB'); what a share is of is not known beforehand")


class _Surprise(Exception):
    """An op has made other storages than were foreseen."""

    def __init__(self, result: Any, took_ns: int) -> None:
        super().__init__(result, took_ns)
        self.result = result
        self.took_ns = took_ns


@dataclass(slots=True)
class _Running:
    """An op that the engine makes room for: its number, the call, what it is to make, and workspace that is none of its own."""

    op: int
    key: Key
    func: Any
    args: Any
    kwargs: Any
    sizes: tuple[int, ...]
    workspace: Workspace | None
    other_bytes: int


class EagerRun(contextlib.AbstractContextManager["EagerRun"]):
    """The block of ``with budget(...) as run``, and its record.

    budget_bytes          None: unlimited
    counters              what the run did: evictions, recomputations, time spent searching, ...
    peak_bytes            most bytes in memory at once so far
    live_bytes            bytes in memory now
    graph, schedule       after the block: what it computed, and every compute and free in time order
    """

    def __init__(
        self,
        engine: GrowingEngine,
        budget_bytes: int | None,
        heuristic: str,
        seed: int,
        holding: Holding,
        costs: str | None,
        *,
        reclaim: bool,
        options: frozenset[Option],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.heuristic = heuristic
        self.seed = seed
        self._engine = engine
        self._reclaim, self._options = reclaim, options
        self._holding = holding
        self._costs = costs
        self._model = CostModel()
        self._interposed = contextlib.ExitStack()
        self._operators = Operators(self)
        self._contents: dict[int, Content] = {}  # by the key of the storage of the program that holds them
        self._given: defaultdict[int, weakref.WeakSet[Content]] = defaultdict(weakref.WeakSet)  # made outside, by address
        self._seen_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._died: list[Notice] = []  # of storages the program has dropped
        self._dead: list[int] = []  # contents of such storages
        self._unread: list[Known] = []  # contents nobody needs any more
        self._blank: set[int] = set()  # contents that no operator has written or read since they were allocated, held
        self._content_of: list[Known | None] = []  # of each storage of the engine
        self._recipe_of: list[weakref.ref[Recipe] | None] = []  # of each op of the engine
        self._log: list[Entry] = []  # of each op of the engine
        self._readers_of: defaultdict[int, list[int]] = defaultdict(list)  # of each storage of the engine; see _readers
        self._ops_seen = 0
        self._resident: list[int] = []
        self._workspaces = learned_workspaces()
        self._stream = 0  # that of the thread that entered the block
        self._over: tuple[str, int] | None = None  # the first op whose workspace, not known before, broke the budget; bytes then
        self._running: _Running | None = None
        self._begun = False  # whether the op under way may have written to its arguments
        self._freeing = False  # see _free_inputs
        self._fixed = False  # whether contents have been fixed since the arguments of the call under way were described
        self._result: Any = None
        self._made: list[UntypedStorage] = []
        self._wall_s = 0.0
        self._alive: list[int] | None = None  # storages of the engine that are in memory at the end; None: not there yet
        self._failure: Failure | None = None
        self._thrashed = False
        self.torn = False  # Ctrl-C or another signal came in the middle of what is noted here
        self.raised: BaseException | None = None  # the latest error for an operator, without the frames it came through
        engine.driver = self

    def __repr__(self) -> str:
        rule = "+".join([self.heuristic, *["reclaim"] * self._reclaim, *sorted(self._options)])
        allowed = "without a budget" if self.budget_bytes is None else f"under {self.budget_bytes:,} bytes"
        ran = f"{self._engine.ops:,} ops, {self.counters.recomputations:,} recomputations, peak {self.peak_bytes:,} bytes"
        return f"EagerRun({allowed} with {rule}: {ran})"

    # The block

    def __enter__(self) -> EagerRun:
        if _UNDER_WAY:
            raise InputError("a block under a budget cannot hold another one, and there can be one at a time")
        if self._alive is not None:
            raise InputError("this run is over; call budget() again for another one")
        try:
            _UNDER_WAY.append(self)
            self._stream = current_stream()
            for tensor in tensors_in(self._holding):
                self._meet(tensor, resident=True)
            self._check_start()
            self._holding = ()
            self._interposed.enter_context(cast(Any, register_module_forward_pre_hook(self._meet_module)))
            self._interposed.callback(register_optimizer_step_post_hook(self._keep_state).remove)
            reads = RawReads(self)
            self._interposed.enter_context(reads)
            for around in (around_backwards, around_packing):
                self._interposed.enter_context(around(lambda: reads if self._is_here() else contextlib.nullcontext()))
            self._interposed.enter_context(called_back_here(self._is_here))
            self._interposed.enter_context(self._operators)
            self._interposed.enter_context(old_objects_left_alone())
        except BaseException:
            self._interposed.close()
            _UNDER_WAY.clear()
            raise
        self._wall_s = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._interposed.close()
            self._wall_s = time.perf_counter() - self._wall_s
            self._settle(failed=error is not None)
        except BaseException as failed:
            if self._alive is None or not isinstance(failed, Exception):
                self.interrupted(self._interposed.close)
            raise
        finally:
            _UNDER_WAY.clear()
        if self.raised is not None and _is_nameless(error):
            raise self.raised from error

    def interrupted(self, *before: Callable[[], None]) -> None:
        """Ctrl-C, or what else a signal's handler raises (``sys.exit``), has cut off something here: what is noted may be half of
        what has happened. Bring back all that is alive, and let the rest of the block be plain PyTorch's. ``before``: what is to
        be done first."""
        while True:  # however often somebody asks: reading an empty tensor is a crash
            try:
                self.torn = True
                self._operators.let_through()
                for step in before:
                    step()
                self._settle(failed=True)
                return
            except Exception:
                raise
            except BaseException:
                continue

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around what notes something down outside of operators."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupted()
            raise

    def warn_without_budget(self) -> None:
        """Say that the block goes on without its budget."""
        if self.budget_bytes is not None:
            warnings.warn(
                f"interrupted in the middle of an operator, the block goes on without its budget of {self.budget_bytes:,} bytes; "
                f"leave it and enter another one to have a budget again",
                RuntimeWarning,
                stacklevel=3,
            )

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
        with self.noting():
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
            self._reclaim,
            self.seed,
            status,
            tuple(to_json(schedule)),
            (trace.time_ns, trace.peak_bytes),
            self._engine.counters,
            self._failure,
            self._wall_s,
            options=self._options,
        )

    # Every operator call

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``func(*args, **kwargs)`` does, under the budget; ``kwargs`` may be None.

        Raises WithoutMemory, with nothing done, for what reads or makes tensors on the device "meta".
        """
        if self._died or self._dead or self._unread:
            self._bury()
        kind = kind_of(func)
        if kind.looks:
            return self._look(kind, func, args, kwargs)
        scratch: list[Content] = []
        if kind.scratch and (len(args) < 6 or args[5] is not False):  # training
            scratch = [self.content(args[at]) for at in kind.scratch if args[at] is not None]
            for content in scratch:  # it is written to, so what was computed from it before cannot be made again
                self.fix(content, kind.name)
        self._fixed = False
        read: list[Content] = []
        key: list[Any] = [kind]
        described = self._described
        views = [described(argument, read, key) for argument in args]
        named = _NONE
        if kwargs:
            named = {name: described(argument, read, key) for name, argument in kwargs.items()}
            if kwargs.get("device") == _META:
                raise WithoutMemory
        else:
            kwargs = named
        if kind.moves:
            for content in read:
                self._keep(content, kind.name)
            result = func(*args, **kwargs)
            given = self._contents.get(args[0].untyped_storage()._cdata)  # set_ makes a storage larger where it is too small
            _check_sizes(read if given is None else [*read, given])
            return result
        written = self._written(kind, args, kwargs) if kind.written else []
        if self._blank:
            self._keep_filled(kind, read, written)

        full = tuple(key)
        sizes: tuple[int, ...] | None = ()
        if not kind.gives_back:
            sizes = sizes_of.get(full)
            if sizes is None:
                sizes = (BOUNDS[kind.name](*args),) if kind.name in BOUNDS else foreseen(func, args, kwargs)
                if sizes is not None:
                    remember(full, sizes)
            if sizes == () and not written and not kind.acts:
                return self._look(kind, func, args, kwargs)

        acts = kind.acts
        if current_stream() != self._stream:
            # What is evicted gives its memory to the next op of the stream that made it; others may still be at work on it then.
            for content in read:
                self._keep(content, kind.name)
            acts = True  # what it makes stays, too
        elif kind.collective:
            for content in read:
                self._keep(content, kind.name)
        if written:
            acts = acts or any(content.made_by is None or content.number in self._engine.kept for content in written)
        recipe: Recipe | None = None
        overwritten: list[Content] = []
        if acts:
            for content in written:
                self.fix(content, kind.name)
            written, overwritten = [], written
        else:
            recipe = Recipe(func, views, named, written, scratch)
            if kind.random or kind.foreign:
                recipe.draws = [(where, generator_state(where)) for where in _drawn_from(kind, args, kwargs)]
        if scratch:
            read = [content for content in read if content not in scratch]
        self._begun = False
        try:
            result = self._run(kind, full, sizes, read, written, scratch, recipe, func, args, kwargs)
        except BaseException as error:
            if self._begun and written:
                for content in written:
                    self._disown(content)
                if isinstance(error, Exception):  # the block may go on under its budget, where they count
                    self._written(kind, args, kwargs)
            raise
        if kind.foreign and recipe is not None:
            recipe.draws = [(where, state) for where, state in recipe.draws if not torch.equal(state, generator_state(where))]
            kind.random = kind.random or bool(recipe.draws)
        if overwritten:
            _check_sizes(overwritten)
        if kind.blank:
            blank = self.content(result).number
            self._engine.hold(blank)
            self._blank.add(blank)
        if kind.name == "aten._pack_padded_sequence":  # recurrent layers and unpacking read the batch sizes past the dispatcher
            self._keep(self.content(result[1]), kind.name)
        return result

    def _run(
        self,
        kind: Kind,
        key: Key,
        sizes: tuple[int, ...] | None,
        read: list[Content],
        written: list[Content],
        scratch: list[Content],
        recipe: Recipe | None,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run an op for the first time: at once or after making room for it; where its size is unknown, room is made then."""
        engine = self._engine
        reads = tuple([content.number for content in read])
        before = tuple([content.size_bytes for content in written]) if written else ()
        copies_bytes = sum([content.size_bytes for content in scratch]) if scratch else 0
        all_sizes = before + sizes if sizes is not None else ()
        other_bytes = copies_bytes if REPLACES_IN_PLACE else copies_bytes + max(all_sizes, default=0)
        workspace = None if self._workspaces is None else self._workspaces.of(key)
        workspace_bytes = other_bytes if workspace is None else other_bytes + workspace.size_bytes
        entry = kind.entries[recipe is None][in_backward()]
        has_run = False
        if sizes is None:
            with self.held(kind.name, reads):
                result, _, _, took_ns = self._timed(key, workspace, func, args, kwargs)
            has_run = True
        elif engine.fits(reads, sum(all_sizes) + workspace_bytes):
            result, made, made_bytes, took_ns = self._timed(key, workspace, func, args, kwargs)
            if made_bytes == sizes:
                if workspace is not None and other_bytes + workspace.size_bytes > workspace_bytes:
                    workspace_bytes = other_bytes + workspace.size_bytes
                    self._note(kind.name, engine.used_bytes + sum(all_sizes) + workspace_bytes)
                self._place(self._log, engine.ops, entry)
                op = engine.ran(reads, all_sizes, workspace_bytes, took_ns)
                self._bind(op, written, made, recipe)
                return result
            has_run = True
        if not has_run:
            assert sizes is not None
            op = self._declare(entry, reads, all_sizes, workspace_bytes)
            self._running = _Running(op, key, func, args, kwargs, sizes, workspace, other_bytes)
            try:
                self._guarded(kind.name, engine.call, op)
            except _Surprise as caught:
                has_run, result, took_ns = True, caught.result, caught.took_ns
            else:
                result, made = self._result, self._made
            finally:
                self._running, self._result, self._made = None, None, []
        if has_run:  # now that its sizes are known, what it made is counted and made room for
            made = self._new_storages(result)
            sizes = tuple(map(counted_bytes, made))
            other_bytes = copies_bytes if REPLACES_IN_PLACE else copies_bytes + max(before + sizes, default=0)
            workspace_bytes = other_bytes if workspace is None else other_bytes + workspace.size_bytes
            op = self._declare(entry, reads, before + sizes, workspace_bytes, took_ns)
            self._note(kind.name, engine.used_bytes + sum(sizes) + (0 if workspace is None else workspace.size_bytes))
            self._guarded(kind.name, engine.call, op)
            if kind.name not in BOUNDS:
                remember(key, sizes)
        self._bind(op, written, made, recipe)
        return result

    def _disown(self, content: Content) -> None:
        """Nobody knows whether a content has been written over. What lies there is the program's; where something is to be made
        again from the content, that is made again, too."""
        notice = content.at
        if notice is None or not self._engine.resident[content.number]:
            return
        content.at = None
        if self._contents.get(notice.key) is content:
            del self._contents[notice.key]
        self._engine.drop(content.number)

    def _timed(
        self, key: Key, workspace: Workspace | None, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[UntypedStorage], tuple[int, ...], int]:
        """Run an op for the first time: its result, the new storages in it, their bytes, and the time it takes."""
        before = None if workspace is None else workspace.before(args, kwargs)
        self._begun = True
        begin = time.perf_counter_ns()
        result = func(*args, **kwargs)
        took_ns = time.perf_counter_ns() - begin
        made = self._new_storages(result)
        sizes = (counted_bytes(made[0]),) if len(made) == 1 else tuple([counted_bytes(storage) for storage in made])
        if self._costs == "modelled" or (self._costs is None and made and made[0].device.type == "cuda"):
            took_ns = self._model.time_ns(key, func, args, kwargs, result)
        if workspace is not None and before is not None:
            workspace.learn(before, sum([storage.nbytes() for storage in made]), len(made))
        return result, made, sizes, took_ns

    def _new_storages(self, result: Any) -> list[UntypedStorage]:
        if self._died:  # what died meanwhile may have left its place, and with it its key, to what was made
            self._forget()
        return new_storages(result, self._contents)

    def _look(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Any:
        """Make views or read numbers: nothing is allocated, but what is read has to be there."""
        if kind.of_first and args:
            tensors = args[:1]
        else:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(tensors) == 1:
            s = self.content(tensors[0]).number
            if not self._engine.accessed(s):
                self._guarded(kind.name, self._engine.bring, s)
            return func(*args, **kwargs) if kwargs else func(*args)
        with self.held(kind.name, [self.content(tensor).number for tensor in tensors]):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def held(self, name: str, storages: Iterable[int]) -> Iterator[None]:
        """Have storages of the engine in memory together for a while."""
        held = []
        try:
            for s in storages:
                self._guarded(name, self._engine.hold, s)
                held.append(s)
            yield
        finally:
            for s in held:
                self._engine.let_go(s)

    def _described(self, argument: Any, read: list[Content], key: list[Any]) -> Any:
        """An argument with views in place of its tensors; adds what is read, and what decides about the sizes of results."""
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage() if argument.layout is STRIDED else None
            content = self._contents.get(storage._cdata) if storage is not None else None
            if content is None:
                content = self.content(argument)
            read.append(content)
            try:
                shape, stride, dtype = argument.shape, argument.stride(), argument.dtype
            except RuntimeError:
                check_layout(argument)
                raise
            key += (shape, stride, dtype, argument.is_cuda)
            conjugate, negated = dtype.is_complex and argument.is_conj(), argument.is_neg()
            keeps = None
            if content.made_by is None:
                keeps = storage
                if not content.size_bytes and is_zero_stand_in(argument):
                    return argument
            return View((content, shape, stride, argument.storage_offset(), dtype, conjugate, negated, keeps))
        if isinstance(argument, list | tuple):
            key.append(len(argument))
            return [self._described(entry, read, key) for entry in argument]
        key += (type(argument), None) if isinstance(argument, float) and read else (type(argument), argument)
        return argument

    def content(self, tensor: Tensor) -> Content:
        """What the storage of a tensor holds now; a storage not seen before was made outside the block. Raises WithoutMemory."""
        if tensor.layout is not STRIDED:
            check_layout(tensor)
        if self._died:
            self._forget()
        content = self._contents.get(tensor.untyped_storage()._cdata)
        if content is not None:
            return content
        if tensor.is_meta:
            raise WithoutMemory
        return self._meet(tensor)

    def knows_bytes(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor has bytes, or had them until they were evicted. One that has none yet may be made
        larger past the dispatcher (FSDP2 does so with whole parameters), and is met once an operator gets it."""
        if tensor.layout is not STRIDED:
            return True
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 or storage._cdata in self._contents

    def _written(self, kind: Kind, args: Any, kwargs: Any) -> list[Content]:
        """The contents an op writes over, each once."""
        found: dict[Content, None] = {}
        for at, name in kind.written:
            argument = args[at] if at < len(args) else kwargs.get(name)
            for tensor in (argument,) if isinstance(argument, Tensor) else argument or ():
                for each in (tensor,) if isinstance(tensor, Tensor) else tensor:  # one list of outputs for each input
                    found[self.content(each)] = None
        return list(found)

    def _declare(
        self, entry: Entry, reads: tuple[int, ...], sizes: tuple[int, ...], workspace_bytes: int, time_ns: int = 0
    ) -> int:
        """A new op and its storages, in the engine; ``_bind`` says the rest."""
        self._place(self._log, self._engine.ops, entry)
        return self._engine.declare(reads, sizes, workspace_bytes, time_ns)

    def _note(self, name: str, asked_bytes: int) -> None:
        """An operator has had so many bytes in memory."""
        if self._over is None and asked_bytes > self._engine.budget_bytes:
            self._over = name, asked_bytes

    def _guarded(self, name: str, step: Callable[[int], None], number: int) -> None:
        """A step of the engine for an operator of that name. Whatever fails, nothing stays locked.

        The engine knows what the program has dropped, and nothing more is dropped by the garbage collector meanwhile: a rebuild
        must not find gone what was counted as there. Where another thread has dropped it (autograd's, on CUDA, is not done yet
        when the backward is), the step is tried again.
        """
        collecting = gc.isenabled()
        if collecting:
            gc.disable()
        try:
            if self._died or self._dead or self._unread:
                self._bury()
            step(number)
        except OutOfMemory as error:
            self._engine.give_up()
            if self._free_inputs():
                self._guarded(name, step, number)
                return
            asked, held = error.asked_bytes, []
            for s in error.held:
                live = self._at_number(s)
                held.append(("dropped" if live is None else f"storage {s}", self._engine.size_bytes[s]))
            failure = Failure(name, asked, tuple(sorted(held, key=lambda entry: -entry[1])))
            assert self.budget_bytes is not None
            self._failure = failure
            raise BudgetExceeded(name, asked, self.budget_bytes, str(failure)) from None
        except Gone:
            self._engine.give_up()
            if not self._died:
                raise
            self._guarded(name, step, number)
        except Thrashed:
            self._engine.give_up()
            self._thrashed = True
            raise NoScheduleFound(
                f"recomputation for {name} makes the block take more than {self._engine.thrash_limit:g} times as long as without "
                f"the budget of {self.budget_bytes:,} bytes; give it more memory, a higher thrash_limit or another heuristic"
            ) from None
        except BaseException:
            self._engine.give_up()
            raise
        finally:
            if collecting:
                gc.enable()

    def _at_number(self, s: int) -> Content | None:
        """The content of that number, if somebody still needs it."""
        known = self._content_of[s] if s < len(self._content_of) else None
        return None if known is None else known()

    def _bind(self, op: int, written: list[Content], made: list[UntypedStorage], recipe: Recipe | None) -> None:
        """After an op ran: its outputs are where the program has them."""
        if self._fixed and recipe is not None:  # to make room for it
            recipe.hold_fixed()
            for s in self._engine.inputs(op):
                self._readers_of[s].append(op)  # forgotten there, if it was declared by then
            if any(old.made_by is None for old in written):  # it is written over by now
                recipe = None
        outs = self._engine.outputs(op)
        self._place(self._recipe_of, op, None if recipe is None else weakref.ref(recipe))
        replaced = []
        for old, s in zip(written, outs, strict=False):
            assert old.at is not None
            storage = old.at()
            assert storage is not None
            replaced.append(self._new_content(s, old.size_bytes, recipe, storage))
            old.at = None
            self._engine.drop(old.number)
        sizes = self._engine.size_bytes
        for storage, s in zip(made, outs[len(written) :], strict=True):
            content = self._new_content(s, sizes[s], recipe, storage)
            if recipe is None or not storage.resizable() or storage.device == _META:
                self._keep(content, "")
        if recipe is None:
            for content in replaced:
                self._keep(content, "")
        if replaced:
            _check_sizes(replaced)

    def _new_content(self, s: int, size_bytes: int, recipe: Recipe | None, storage: UntypedStorage) -> Content:
        """What has come to be at a storage of the program."""
        content = Content(s, size_bytes, recipe)
        known = Known(content, self._unread.append)
        known.number = s
        if s == len(self._content_of):
            self._content_of.append(known)
        else:
            self._place(self._content_of, s, known)
        if recipe is not None:
            recipe.makes.append(known)
        content.at = notice = Notice(storage, self._died.append)
        notice.key, notice.known = storage._cdata, known
        self._contents[notice.key] = content
        return content

    @staticmethod
    def _place(table: list[Any], number: int, entry: Any) -> None:
        """Enter something under its number; numbers left out (of ops that failed) stay empty."""
        if number == len(table):
            table.append(entry)
        else:
            table += [None] * (number + 1 - len(table))
            table[number] = entry

    def _forget(self) -> None:
        """Storages the program has dropped since hold nothing any more."""
        while self._died:
            notice = self._died.pop()
            content = notice.known()
            if content is not None and content.at is notice:
                content.at = None
                self._dead.append(content.number)
                if self._contents.get(notice.key) is content:
                    del self._contents[notice.key]

    def _bury(self) -> None:
        """Tell the engine what the program has dropped since."""
        engine = self._engine
        self._forget()
        while self._dead:
            engine.drop(self._dead.pop())
        while self._unread:
            engine.discard(self._unread.pop().number)

    # What stays

    def _meet(self, tensor: Tensor, *, resident: bool = False) -> Content:
        """Count a storage that was made outside the block; it is never evicted. ``resident``: from the start."""
        storage = tensor.untyped_storage()
        content = self._contents.get(storage._cdata)
        if content is not None:
            return content
        size, engine = 0 if is_zero_stand_in(tensor) else counted_bytes(storage), self._engine
        if resident and not engine.steps:
            s = engine.holds(size)
            self._resident.append(s)
            content = self._new_content(s, size, None, storage)
        else:
            op = self._declare(GIVEN.entries[True][in_backward()], (), (size,), 0)
            self._guarded("an input", engine.call, op)
            (s,) = engine.outputs(op)
            content = self._new_content(s, size, None, storage)
            engine.keep_until_dropped(s)
        if size:
            self._given[storage.data_ptr()].add(content)
        if tensor.is_leaf and tensor.requires_grad:
            handle = tensor.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]
            self._interposed.callback(handle.remove)
        return content

    def _check_start(self) -> None:
        """Refuse a budget that is too small for what is there from the start, once all of it is counted."""
        engine = self._engine
        if not engine.steps and engine.used_bytes > engine.budget_bytes:
            assert self.budget_bytes is not None
            raise BudgetExceeded("what is there from the start", engine.used_bytes, self.budget_bytes)

    def _is_here(self) -> bool:
        """Whether this thread runs the block, or a backward for it: the hooks of torch are those of all threads."""
        return not self.torn and is_active(self._operators)

    def _keep_gradient(self, leaf: Tensor) -> None:
        """A gradient has reached its parameter. It is to be there at the end, and what it came from is about to go."""
        if leaf.grad is not None and leaf.grad.layout is torch.strided and self._is_here():
            with self.noting(), without_torch_function():
                for gradient in tensors_in(leaf.grad):
                    self._keep(self.content(gradient), "a gradient")

    def _keep_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step of an optimizer: its state stays, as it could be made again only from the gradients of all steps."""
        with self.noting(), without_torch_function():
            for tensor in tensors_in(optimizer.state) if self._is_here() else ():
                self.fix(self.content(tensor), "the state of an optimizer")

    def _meet_module(self, module: nn.Module, inputs: Any) -> None:
        """At the first call of a module: all it holds is in memory from now on at the latest."""
        if module in self._seen_modules or not self._is_here():
            return
        with self.noting(), without_torch_function():
            for part in module.modules():
                self._seen_modules.add(part)
            for tensor in tensors_in(module):
                if not is_functorch_wrapped(tensor):  # what it stands for is met where operators read it
                    self._meet(tensor, resident=True)
            self._check_start()
            for parameter in module.parameters():
                for gradient in () if is_lazy(parameter) or parameter.grad is None else tensors_in(parameter.grad):
                    self._meet(gradient)

    def _keep(self, content: Content, name: str) -> None:
        """From now on a content stays in memory until the program drops it."""
        engine = self._engine
        if content.number not in engine.kept:
            self._guarded(name, engine.keep_until_dropped, content.number)

    def fix(self, content: Content, name: str) -> None:
        """A content is about to be written over without a new version of it: it, and what can be made again only from what it
        holds now, stays from now on."""
        found = self._made_from(content)
        storage = None if content.made_by is not None or content.at is None else content.at()
        if storage is not None:
            for other in list(self._given.get(storage.data_ptr(), ())):  # the memory of an array may be that of several tensors
                found |= self._made_from(other)
        for each in found:
            if each.at is not None:
                self._keep(each, name)
        self._fixed = True
        for each in found:
            each.made_by = None
            self._readers_of.pop(each.number, None)  # only now: where something did not fit, it may be tried again

    def _keep_filled(self, kind: Kind, read: list[Content], written: list[Content]) -> None:
        """What was allocated without content and is read now was written past the dispatcher, by functions of PyTorch (the CTC
        loss, with the lengths it is given) or of an extension. Run again, the op that allocated it would not bring that back, so
        it was held, and stays; where it is written to now, it need not."""
        for content in read:
            if content.number in self._blank:
                self._blank.remove(content.number)
                self._engine.let_go(content.number)
                if content not in written:
                    self.fix(content, kind.name)

    def _made_from(self, content: Content) -> dict[Content, None]:
        """It, and all that can be made again only from what it holds now."""
        found = {content: None}
        stack = [content]
        while stack:
            reader = stack.pop()
            for op in self._readers(reader):
                known = self._recipe_of[op] if op < len(self._recipe_of) else None
                recipe = known() if known is not None else None
                for made in recipe.makes if recipe is not None else ():
                    other = made()
                    if other is not None and other not in found:
                        found[other] = None
                        stack.append(other)
        return found

    def _free_inputs(self) -> bool:
        """Something does not fit: let go of inputs that are there only to make smaller things from them again, which then stay;
        whether that has freed bytes. Without it a loop would have all its batches in memory for the sake of a number each."""
        if self._freeing:
            return False
        self._freeing, failed = True, (self._failure, self._thrashed)
        before = self._engine.used_bytes
        try:
            for content in list(self._contents.values()):
                storage = None if content.made_by is not None or content.at is None else content.at()
                if storage is None or not in_no_tensor(storage):
                    continue
                made = [each.size_bytes for each in self._made_from(content) if each.at is not None]
                if sum(made) < 2 * content.size_bytes:  # it is one of them
                    with contextlib.suppress(BudgetExceeded, NoScheduleFound):
                        self.fix(content, "")
            storage = None
            self._bury()
        finally:
            self._freeing, (self._failure, self._thrashed) = False, failed
        return self._engine.used_bytes < before

    def _readers(self, content: Content) -> list[int]:
        """The ops that have read it since it was last fixed. Found when asked for: most blocks never write to what stays."""
        engine, readers = self._engine, self._readers_of
        for op in range(self._ops_seen, engine.ops):
            for s in engine.inputs(op):
                readers[s].append(op)
        self._ops_seen = engine.ops
        return readers.get(content.number, [])

    # What the engine asks for (``online.engine.Driver``)

    def compute(self, op: int) -> None:
        """Run an op, for the first time or again."""
        engine = self._engine
        running = self._running
        if running is not None and running.op == op:
            func, workspace = running.func, running.workspace
            call = self._timed(running.key, workspace, func, running.args, running.kwargs)
            self._result, self._made, made_bytes, took_ns = call
            if made_bytes != running.sizes:
                raise _Surprise(self._result, took_ns)
            engine.took(op, took_ns)
            if workspace is not None:
                self._note(kind_of(func).name, engine.needed(op, running.other_bytes + workspace.size_bytes))
            return
        known = self._recipe_of[op] if op < len(self._recipe_of) else None
        recipe = known() if known is not None else None
        if recipe is None:  # its result is already there
            return
        with no_dispatch():  # where a rebuild begins outside of operators (``tolist``, hooks), its own are not the program's
            for known_, storage in zip(recipe.makes, recipe.run(), strict=True):
                content = known_()
                if engine.resident[known_.number]:
                    continue
                if content is None:
                    self._unread.append(known_)
                elif content.at is None or (place := content.at()) is None:
                    content.floating = storage
                else:
                    replace_content(place, storage)

    def free(self, storage: int) -> None:
        """Let go of the bytes of a content."""
        content = self._at_number(storage)
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
        if self._alive is not None:
            return
        self._bury()
        problem: Exception | None = None
        alive = list(self._contents.values())
        if failed:
            engine.lift()
        for content in alive:
            self._bury()
            if content.at is None:  # collected meanwhile
                continue
            try:
                self._keep(content, "what the block leaves alive")
            except Exception as error:  # no tensor must stay empty: nothing looks after it any more
                problem = problem or error
                engine.lift()
                try:
                    self._keep(content, "what the block leaves alive")
                except Exception as again:
                    problem = again
        self._bury()  # what has been collected meanwhile
        self._alive = [content.number for content in self._contents.values()]
        self._contents.clear()
        self._given.clear()
        self._seen_modules.clear()
        self._bury()
        if problem is not None:
            raise problem
        if self._over is not None and not failed:
            name, asked_bytes = self._over
            warnings.warn(
                f"{name} has had up to {asked_bytes:,} bytes in memory, above the budget of {self.budget_bytes:,}: what it takes "
                f"could not be known before it ran",
                RuntimeWarning,
                stacklevel=3,
            )

    @functools.cached_property
    def _recorded(self) -> tuple[Graph, Schedule]:
        """Graph and schedule, with storages and ops numbered without gaps. Written when asked for: training loops do not ask."""
        engine, alive = self._engine, self._alive
        if self.torn:
            raise InputError("the block was interrupted in the middle of an operator; what it did is not known to the end")
        if alive is None:
            raise InputError("the block is still under way; its graph is complete afterwards")
        ran = {step for step in engine.steps if step >= 0}
        log = [(op, *entry) for op, entry in enumerate(self._log) if op in ran]
        made = [s for op, *_ in log for s in engine.outputs(op)]
        numbers = {s: v for v, s in enumerate([*self._resident, *made])}
        ops = {op: i for i, (op, *_) in enumerate(log)}
        values = [Value(f"resident_{v}", engine.size_bytes[s]) for v, s in enumerate(self._resident)]
        listed = []
        for op, kind, acts, backward in log:
            time_ns, workspace_bytes = engine.cost(op)
            name = f"{kind.name.removeprefix('aten.')}_{ops[op]}"
            makes = engine.outputs(op)
            values += [Value(name, engine.size_bytes[s]) for s in makes]
            listed.append(
                Op(
                    name,
                    tuple(dict.fromkeys(map(numbers.__getitem__, engine.inputs(op)))),
                    tuple(map(numbers.__getitem__, makes)),
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


def _check_sizes(written: list[Content]) -> None:
    """InputError where what an operator has written to has other bytes than were counted."""
    for content in written:
        storage = None if content.at is None else content.at()
        if storage is not None and counted_bytes(storage) != content.size_bytes:
            raise InputError("an operator changed the size of a tensor it was to write to; give out= one of the right size")


def _drawn_from(kind: Kind, args: Any, kwargs: Any) -> set[torch.device | torch.Generator]:
    """Where an op draws: from the generator it is given, or on the device of its first tensor or the one it is given.

    One that is none of PyTorch's own may draw a seed on the host as well.
    """
    leaves = tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Generator):
            return {leaf}
    cpu = torch.device("cpu")
    host: set[torch.device | torch.Generator] = {cpu} if kind.foreign else set()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return {leaf.device} | host
    device = kwargs.get("device")
    return {cpu if device is None else torch.device(device)} | host


def _is_nameless(error: object) -> bool:
    """Whether it is what TorchScript makes of an error in Python, of which it leaves nothing."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")
