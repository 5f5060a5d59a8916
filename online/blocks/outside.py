"""What a block finds: tensors made outside of it, and those that parameters and optimizers hold on to. [torch]"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from graphs.errors import BudgetExceeded
from graphs.torch_private.names import without_torch_function
from graphs.torch_private.running import in_backward
from graphs.torch_private.tensors import is_functorch_wrapped, is_zero_stand_in
from online.blocks.block import Block
from online.blocks.estimates import counted_bytes
from online.blocks.keeping import Keeper
from online.blocks.kinds import GIVEN
from online.blocks.recipes import STRIDED, Content, WithoutMemory, check_layout
from online.blocks.record import Record
from online.blocks.storages import Storages
from online.blocks.tensors import modules_in, parameters_in, tensors_in
from online.engines.growing import GrowingEngine


class Outside:
    """Finds the contents of tensors, and counts storages that were made outside the block when it first meets them.

    interposed  what is undone at the end of the block
    """

    def __init__(
        self,
        block: Block,
        engine: GrowingEngine,
        storages: Storages,
        keeper: Keeper,
        record: Record,
        interposed: contextlib.ExitStack,
    ) -> None:
        self._block = block
        self._engine = engine
        self._storages = storages
        self._contents = storages.by_key
        self._died = storages.died
        self._keeper = keeper
        self._record = record
        self._interposed = interposed
        self._seen_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[Any] = []  # on parameters, removed at the end

    def content(self, tensor: Tensor) -> Content:
        """What the storage of a tensor holds now; a storage not seen before was made outside the block. Raises WithoutMemory."""
        if tensor.layout is not STRIDED:
            check_layout(tensor)
        if self._died:
            self._storages.forget()
        content = self._contents.get(tensor.untyped_storage()._cdata)
        if content is not None:
            return content
        if tensor.is_meta:
            raise WithoutMemory
        return self.meet(tensor)

    def knows_bytes(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor has bytes, or had them until they were evicted. One that has none yet may be made
        larger past the dispatcher (FSDP2 does so with whole parameters), and is met once an operator gets it."""
        if tensor.layout is not STRIDED:
            return True
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 or storage._cdata in self._contents

    def meet(self, tensor: Tensor, *, resident: bool = False, name: str = "an input") -> Content:
        """Count a storage that was made outside the block; it is never evicted.

        resident  from the start
        name      of what needs its bytes, for an error
        """
        if tensor.layout is not STRIDED:
            check_layout(tensor)
        storage = tensor.untyped_storage()
        content = self._contents.get(storage._cdata)
        if content is not None:
            return content
        size, engine = 0 if is_zero_stand_in(tensor) else counted_bytes(storage), self._engine
        if resident and not engine.steps:
            s = engine.holds(size)
            self._record.resident.append(s)
            content = self._storages.add(s, size, None, storage)
        else:
            self._keeper.given_more(size)
            op = self._record.declare(GIVEN.entries[True][in_backward()], (), (size,), 0)
            self._keeper.guarded(name, engine.call, op)
            (s,) = engine.outputs(op)
            content = self._storages.add(s, size, None, storage)
            engine.keep_until_dropped(s)
        self._storages.met.add(s)
        if size:
            assert content.at is not None
            given, opened = self._storages.given, self._keeper.opened
            given.add(content.at.known, storage.data_ptr(), size)
            if opened and not opened.isdisjoint([each.number for each in given.around(storage.data_ptr())]):
                opened.add(s)  # an array of what was opened comes back
        if tensor.is_leaf and tensor.requires_grad:
            if not self._hooks:
                self._interposed.callback(self._remove_hooks)
            self._hooks.append(tensor.register_post_accumulate_grad_hook(self._keep_gradient))  # type: ignore[no-untyped-call]
        return content

    def check_start(self) -> None:
        """Refuse a budget that is too small for what is there from the start, once all of it is counted."""
        engine = self._engine
        if not engine.steps and engine.used_bytes > engine.budget_bytes:
            assert self._block.budget_bytes is not None
            raise BudgetExceeded("what is there from the start", engine.used_bytes, self._block.budget_bytes)

    def meet_module(self, module: nn.Module, inputs: Any) -> None:
        """At the first call of a module: all it holds is in memory from now on at the latest."""
        if module in self._seen_modules or not self._block.is_here():
            return
        with self._block.noting(), without_torch_function():
            self._seen_modules.update(modules_in(module))
            for tensor in tensors_in(module):
                if not is_functorch_wrapped(tensor):  # what it stands for is met where operators read it
                    self.meet(tensor, resident=True)
            self.check_start()
            for parameter in parameters_in(module):
                for gradient in () if is_lazy(parameter) or parameter.grad is None else tensors_in(parameter.grad):
                    self.meet(gradient)

    def keep_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step of an optimizer: its state stays, as it could be made again only from the gradients of all steps."""
        with self._block.noting(), without_torch_function():
            for tensor in tensors_in(optimizer.state) if self._block.is_here() else ():
                self._keeper.fix(self.content(tensor), "the state of an optimizer")

    def _keep_gradient(self, leaf: Tensor) -> None:
        """A gradient has reached its parameter. It is to be there at the end, and what it came from is about to go."""
        with without_torch_function():
            grad = leaf.grad
            if grad is not None and grad.layout is STRIDED and self._block.is_here():
                with self._block.noting():
                    for gradient in tensors_in(grad):
                        self._keeper.keep(self.content(gradient), "a gradient")

    def _remove_hooks(self) -> None:
        """Again and again, if that is interrupted."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def forget_modules(self) -> None:
        """At the end of the block."""
        self._remove_hooks()
        self._seen_modules.clear()
