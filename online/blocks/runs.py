"""The ops of a block: each runs for the first time under the budget, and again when the engine asks for it. [torch]"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import UntypedStorage

from graphs.errors import InputError
from graphs.torch_private.names import no_dispatch
from graphs.torch_private.running import in_backward
from graphs.torch_private.tensors import REPLACES_IN_PLACE, replace_content
from online.blocks.estimates import BOUNDS, Alike, counted_bytes
from online.blocks.keeping import Keeper
from online.blocks.kinds import Kind, kind_of
from online.blocks.recipes import Content, Recipe, new_storages
from online.blocks.record import Record, enter
from online.blocks.storages import Storages
from online.blocks.workspace import Workspace, learned_workspaces
from online.engines.growing import GrowingEngine

META = torch.device("meta")


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
    calls: Alike
    func: Any
    args: Any
    kwargs: Any
    sizes: tuple[int, ...]
    workspace: Workspace | None
    other_bytes: int


class Runs:
    """Runs ops: what the engine asks for (``online.engines.engine.Driver``), and the first run of each.

    begun       whether the op under way may have written to its arguments
    over        the first op whose workspace, not known before, broke the budget; bytes then
    workspaces  what is learned of them; None: nothing
    """

    def __init__(self, engine: GrowingEngine, storages: Storages, keeper: Keeper, record: Record, costs: str | None) -> None:
        self._engine = engine
        self._storages = storages
        self._contents = storages.by_key
        self._died = storages.died
        self._keeper = keeper
        self._record = record
        self._log = record.log
        self._costs = costs
        self.workspaces = learned_workspaces()
        self.begun = False
        self.over: tuple[str, int] | None = None
        self._running: _Running | None = None
        self._result: Any = None
        self._made: list[UntypedStorage] = []

    def run(
        self,
        kind: Kind,
        calls: Alike,
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
        workspace = None if self.workspaces is None or not calls.is_kept else self.workspaces.of(calls)
        workspace_bytes = other_bytes if workspace is None else other_bytes + workspace.size_bytes
        entry = kind.entries[recipe is None][in_backward()]
        has_run = False
        if sizes is None:
            with self._keeper.held(kind.name, reads):
                result, _, _, took_ns = self._timed(calls, workspace, func, args, kwargs)
            has_run = True
        elif engine.fits(reads, sum(all_sizes) + workspace_bytes):
            result, made, made_bytes, took_ns = self._timed(calls, workspace, func, args, kwargs)
            if made_bytes == sizes:
                if workspace is not None and other_bytes + workspace.size_bytes > workspace_bytes:
                    workspace_bytes = other_bytes + workspace.size_bytes
                    self.note(kind.name, engine.used_bytes + sum(all_sizes) + workspace_bytes)
                enter(self._log, engine.ops, entry)
                op = engine.ran(reads, all_sizes, workspace_bytes, took_ns)
                self._bind(op, written, made, recipe)
                return result
            has_run = True
        if not has_run:
            assert sizes is not None
            op = self._record.declare(entry, reads, all_sizes, workspace_bytes)
            self._running = _Running(op, calls, func, args, kwargs, sizes, workspace, other_bytes)
            try:
                self._keeper.guarded(kind.name, engine.call, op)
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
            op = self._record.declare(entry, reads, before + sizes, workspace_bytes, took_ns)
            self.note(kind.name, engine.used_bytes + sum(sizes) + (0 if workspace is None else workspace.size_bytes))
            self._keeper.guarded(kind.name, engine.call, op)
            if kind.name not in BOUNDS:
                calls.sizes = sizes
        self._bind(op, written, made, recipe)
        return result

    def _timed(
        self, calls: Alike, workspace: Workspace | None, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[UntypedStorage], tuple[int, ...], int]:
        """Run an op for the first time: its result, the new storages in it, their bytes, and the time it takes."""
        before = None if workspace is None else workspace.before(args, kwargs)
        self.begun = True
        begin = time.perf_counter_ns()
        result = func(*args, **kwargs)
        took_ns = time.perf_counter_ns() - begin
        made = self._new_storages(result)
        sizes = (counted_bytes(made[0]),) if len(made) == 1 else tuple([counted_bytes(storage) for storage in made])
        if self._costs == "modelled" or (self._costs is None and made and made[0].device.type == "cuda"):
            took_ns = calls.time_ns(func, args, kwargs, result)
        if workspace is not None and before is not None:
            workspace.learn(before, sum([storage.nbytes() for storage in made]), len(made))
        return result, made, sizes, took_ns

    def _new_storages(self, result: Any) -> list[UntypedStorage]:
        if self._died:  # what died meanwhile may have left its place, and with it its key, to what was made
            self._storages.forget()
        return new_storages(result, self._contents)

    def note(self, name: str, asked_bytes: int) -> None:
        """An operator has had so many bytes in memory."""
        if self.over is None and asked_bytes > self._engine.budget_bytes:
            self.over = name, asked_bytes

    def _bind(self, op: int, written: list[Content], made: list[UntypedStorage], recipe: Recipe | None) -> None:
        """After an op ran: its outputs are where the program has them."""
        if self._keeper.fixed and recipe is not None:  # to make room for it
            recipe.hold_fixed()
            self._storages.add_reader(op)  # forgotten there, if it was declared by then
            if any(old.made_by is None for old in written):  # it is written over by now
                recipe = None
        outs = self._engine.outputs(op)
        self._storages.set_recipe(op, recipe)
        replaced = []
        for old, s in zip(written, outs, strict=False):
            assert old.at is not None
            storage = old.at()
            assert storage is not None
            replaced.append(self._storages.add(s, old.size_bytes, recipe, storage))
            old.at = None
            self._engine.drop(old.number)
        sizes = self._engine.size_bytes
        for storage, s in zip(made, outs[len(written) :], strict=True):
            content = self._storages.add(s, sizes[s], recipe, storage)
            if recipe is None or not storage.resizable() or storage.device == META:
                self._keeper.keep(content, "")
        if recipe is None:
            for content in replaced:
                self._keeper.keep(content, "")
        if replaced:
            check_sizes([content for content in replaced if content.size_bytes])  # those without bytes may get some

    def compute(self, op: int) -> None:
        """Run an op, for the first time or again."""
        engine = self._engine
        running = self._running
        if running is not None and running.op == op:
            func, workspace = running.func, running.workspace
            call = self._timed(running.calls, workspace, func, running.args, running.kwargs)
            self._result, self._made, made_bytes, took_ns = call
            if made_bytes != running.sizes:
                raise _Surprise(self._result, took_ns)
            engine.took(op, took_ns)
            if workspace is not None:
                self.note(kind_of(func).name, engine.needed(op, running.other_bytes + workspace.size_bytes))
            return
        recipe = self._storages.recipe(op)
        if recipe is None:  # its result is already there
            return
        with no_dispatch():  # where a rebuild begins outside of operators (``tolist``, hooks), its own are not the program's
            for known_, storage in zip(recipe.makes, recipe.run(), strict=True):
                content = known_()
                if engine.resident[known_.number]:
                    continue
                if content is None:
                    self._storages.unread.append(known_)
                elif content.at is None or (place := content.at()) is None:
                    content.floating = storage
                else:
                    try:
                        replace_content(place, storage)
                    except RuntimeError as error:
                        if place.resizable():
                            raise
                        raise _given_away() from error

    def free(self, storage: int) -> None:
        """Let go of the bytes of a content."""
        content = self._storages.at_number(storage)
        if content is None:
            return
        content.floating = None
        if content.at is not None:
            lies_in = content.at()
            if lies_in is not None:
                try:
                    lies_in.resize_(0)
                except RuntimeError as error:
                    raise _given_away() from error


def _given_away() -> InputError:
    return InputError(
        "the memory of a tensor was given to an array (numpy()) where a block under a budget does not see it: by a "
        "torch-function mode from before the block, or by an extension; give it a clone()"
    )


def check_sizes(written: list[Content]) -> None:
    """InputError where what an operator has written to has other bytes than were counted."""
    for content in written:
        storage = None if content.at is None else content.at()
        if storage is not None and counted_bytes(storage) != content.size_bytes:
            raise InputError(
                "an operator changed the size of a tensor it was to write to; give out= one of the right size, make a new tensor "
                "and not resize_, or call what finds its sizes in the first call (an observer of quantization) before the block"
            )
