"""DTR for any eager model: every operator call passes here before it reads, and bytes leave and return under the tensors. [torch]

A tensor is evicted by emptying its storage and comes back by running its op again and handing the result's memory to that same
storage. Tensors, views, autograd's saved tensors and version counters are left alone: they are plain PyTorch's own objects
throughout, and Python control flow, hooks and optimizers see nothing of it.

What is evicted, and when, is the engine's business (``online.engines``). Its storages are *versions* of content: an operator that
writes in place makes a new version of the storage it writes to, computed from the old one (Kirisame et al., ICLR 2021,
appendix C.6). What cannot be computed again stays: parameters, buffers, whatever was made outside the block, what somebody reads
past the dispatcher (``numpy()``), and what was computed from the old content of one of these before it was overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphs.errors import InputError, quoted
from graphs.ir import Graph
from graphs.torch_private.kernels import attention_as_eager
from graphs.torch_private.running import around_backwards, around_packing, before_fused, called_back_here, is_active
from online.blocks.block import Block
from online.blocks.calls import Calls
from online.blocks.interposition import Operators, RawReads
from online.blocks.keeping import Keeper
from online.blocks.outside import Outside
from online.blocks.record import Record
from online.blocks.runs import Runs
from online.blocks.storages import Storages
from online.blocks.tensors import tensors_in
from online.engines.engine import Counters, Option, Release
from online.engines.growing import GrowingEngine
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS
from online.runtime import Run, RunStatus, check_thrash_limit
from planner.budget import is_share, resolve_budget
from planner.plan import check_options
from planner.process.pauses import rare_collections
from planner.schedule import Schedule, to_json
from planner.simulate import simulate

Holding = Tensor | nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]

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
    fit together; NoScheduleFound at the thrash limit; InputError for what cannot be used: sparse tensors (gradients of
    ``nn.Embedding(sparse=True)`` among them), nested ones that are not ``torch.jagged``, operators on quantized ones,
    ``torch.cond`` and the like, and code that PyTorch has fused. Everything alive at the end of the block is in memory
    afterwards; after an error, whatever the budget. Where Ctrl-C (or a signal whose handler ends the program) comes in the middle
    of what is noted about an op and the program goes on inside of the block, it does so without the budget, as a RuntimeWarning
    says.

    Not counted: what an op that draws keeps so that it can draw the same again (some 10 KB each on the CPU, 32 bytes on CUDA),
    and workspace inside of ops on the CPU.

    An array that a tensor was made from (``torch.from_numpy``) must not be written to within the block once that has read the
    tensor: such a write is no operator, and what was made from the tensor may be made again. Arrays that were made from a tensor
    of the block (``numpy()``) may be written to.

    The forward belongs in the block: what a backward finds of one from before it has come from outside, and is not evicted. A
    custom operator must give the same answer when it is run again, but for what it draws from PyTorch's generators.

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
    heuristic, plus, extra = heuristic.partition("+")
    if plus and extra not in ("reclaim", "counted"):
        raise InputError(f"nothing but one of +reclaim and +counted can stand behind a heuristic here, not {plus + extra!r}")
    if heuristic not in HEURISTICS:
        is_known, takes = heuristic in ADDRESS_HEURISTICS, ", ".join(HEURISTICS)
        why = f"{heuristic} looks at addresses, which no block knows" if is_known else f"unknown heuristic {heuristic!r}"
        raise InputError(f"{why}; a block takes: {takes}")
    if not isinstance(holding, Tensor | nn.Module | torch.optim.Optimizer | Mapping | Iterable) or isinstance(
        holding, str | bytes
    ):
        raise InputError(
            f"holding takes modules, optimizers, tensors and containers of these, not what is of type {type(holding).__name__}"
        )
    if costs not in (None, "measured", "modelled"):
        raise InputError(f"costs must be 'measured' or 'modelled', not {costs!r}")
    check_thrash_limit(thrash_limit)
    check_options({"seed": seed})
    budget_bytes = None if budget is None else _bytes_of(budget)
    reclaim, options = extra == "reclaim", frozenset([Option.COUNTED] if extra == "counted" else ())
    engine = GrowingEngine(
        budget_bytes, HEURISTICS[heuristic], thrash_limit=thrash_limit, seed=seed, reclaim=reclaim, options=options
    )
    return EagerRun(engine, budget_bytes, heuristic, seed, holding, costs, reclaim=reclaim, options=options)


def _bytes_of(budget: int | str) -> int:
    """Bytes of a budget that is no share. Raises InputError."""
    why = ""
    with contextlib.suppress(InputError):  # which offers shares
        if not is_share(budget):
            return resolve_budget(budget, 0)
        why = "; what a share is of is not known beforehand"
    raise InputError(f"budget {quoted(budget)}: give bytes (6442450944 or '6GiB'){why}")


class _Noting(contextlib.AbstractContextManager[None]):
    """Around what a block notes down outside of operators; entered within another one, too."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            self._block.interrupted()


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
        self._storages = Storages(engine)
        self._keeper = Keeper(engine, self._storages, budget_bytes)
        self._record = Record(engine)
        self._interposed, self._whole = contextlib.ExitStack(), contextlib.ExitStack()
        block = cast(EagerRun, weakref.proxy(self))
        self._outside = Outside(block, engine, self._storages, self._keeper, self._record, self._interposed)
        self._runs = Runs(engine, self._storages, self._keeper, self._record, costs)
        self._calls = Calls(engine, self._storages, self._keeper, self._outside, self._runs)
        self._operators = Operators(block, self._calls.call)
        self._noting = _Noting(block)
        self._wall_s = 0.0
        self._alive: list[int] | None = None  # storages of the engine that are in memory at the end; None: not there yet
        self.torn = False  # Ctrl-C or another signal came in the middle of what is noted here
        self.raised: BaseException | None = None  # the latest error for an operator, without the frames it came through
        engine.driver = self._runs

    def __repr__(self) -> str:
        rule = "+".join([self.heuristic, *["reclaim"] * self._reclaim, *sorted(self._options)])
        allowed = "without a budget" if self.budget_bytes is None else f"under {self.budget_bytes:,} bytes"
        ran = f"{self._engine.ops:,} ops, {self.counters.recomputations:,} recomputations, peak {self.peak_bytes:,} bytes"
        return f"EagerRun({allowed} with {rule}: {ran})"

    def __enter__(self) -> EagerRun:
        if _UNDER_WAY:
            raise InputError("a block under a budget cannot hold another one, and there can be one at a time")
        if self._alive is not None:
            raise InputError("this run is over; call budget() again for another one")
        try:
            _UNDER_WAY.append(self)
            self._whole.enter_context(rare_collections())
            self._calls.begin()
            for tensor in tensors_in(self._holding):
                self._outside.meet(tensor, resident=True)
            self._outside.check_start()
            self._holding = ()
            self._interposed.enter_context(cast(Any, register_module_forward_pre_hook(self._outside.meet_module)))
            self._interposed.callback(register_optimizer_step_post_hook(self._outside.keep_state).remove)
            reads = RawReads(self, self._outside, self._keeper)
            self._interposed.enter_context(reads)
            for around in (around_backwards, around_packing):
                self._interposed.enter_context(around(lambda: reads if self.is_here() else contextlib.nullcontext()))
            self._interposed.enter_context(attention_as_eager())
            self._interposed.enter_context(called_back_here(self.is_here))
            if self.budget_bytes is not None:
                self._interposed.enter_context(before_fused(self._refuse_fused))
            self._interposed.enter_context(self._operators)
        except BaseException:
            self._interposed.close()
            self._end()
            raise
        self._wall_s = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._interposed.close()
            self._wall_s = time.perf_counter() - self._wall_s
            self._settle(failed=error is not None)
            if error is None:  # what did not fit was seen to
                self._keeper.failure, self._keeper.thrashed = None, False
        except BaseException as failed:
            if self._alive is None or not isinstance(failed, Exception):
                self.interrupted(self._interposed.close)
            raise
        finally:
            self._end()
        if self.raised is not None and _is_nameless(error):
            raise self.raised from error

    def _end(self) -> None:
        _UNDER_WAY.clear()
        self._whole.close()

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

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Around what notes something down outside of operators."""
        return self._noting

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
            self._storages.bury()
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
        if self._keeper.failure is not None or self._keeper.thrashed:
            status = RunStatus.THRASHED if self._keeper.thrashed else RunStatus.OUT_OF_MEMORY
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
            self._keeper.failure,
            self._wall_s,
            options=self._options,
        )

    def is_here(self) -> bool:
        """Whether this thread runs the block, or a backward for it: the hooks of torch are those of all threads."""
        return not self.torn and is_active(self._operators)

    def _refuse_fused(self, what: str, instead: str) -> None:
        if self.is_here():
            raise InputError(f"{what} cannot run under a budget, as its kernels pass by PyTorch's operators; {instead}")

    def _settle(self, *, failed: bool) -> None:
        """Bring back all that is alive, and write the run down."""
        engine, storages, keeper = self._engine, self._storages, self._keeper
        if self._alive is not None:
            return
        storages.bury()
        problem: Exception | None = None
        alive = list(storages.by_key.values())
        if failed:
            engine.lift()
        for content in alive:
            storages.bury()
            if content.at is None:  # collected meanwhile
                continue
            try:
                keeper.keep(content, "what the block leaves alive")
            except Exception as error:  # no tensor must stay empty: nothing looks after it any more
                problem = problem or error
                engine.lift()
                try:
                    keeper.keep(content, "what the block leaves alive")
                except Exception as again:
                    problem = again
        storages.bury()  # what has been collected meanwhile
        self._alive = [content.number for content in storages.by_key.values()]
        storages.clear()
        self._outside.forget_modules()
        storages.bury()
        self._operators.close()
        self._engine.driver = None  # which refers to the engine
        if problem is not None:
            raise problem
        if self._runs.over is not None and not failed:
            name, asked_bytes = self._runs.over
            warnings.warn(
                f"{name} has had up to {asked_bytes:,} bytes in memory, above the budget of {self.budget_bytes:,}: what it takes "
                f"could not be known before it ran",
                RuntimeWarning,
                stacklevel=3,
            )

    @functools.cached_property
    def _recorded(self) -> tuple[Graph, Schedule]:
        """Graph and schedule. Written when asked for: training loops do not ask."""
        if self.torn:
            raise InputError("the block was interrupted in the middle of an operator; what it did is not known to the end")
        if self._alive is None:
            now = "is still under way" if self in _UNDER_WAY else "has not been entered yet"
            raise InputError(f"the block {now}; its graph is complete afterwards")
        return self._record.written(self._alive)


def _is_nameless(error: object) -> bool:
    """Whether it is what TorchScript makes of an error in Python, of which it leaves nothing."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")
