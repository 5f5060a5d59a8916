"""What has to be in memory: the engine's steps under the budget, and contents that stay. [torch]"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

from torch import UntypedStorage

from graphs.errors import BudgetExceeded, NoScheduleFound
from graphs.torch_private.tensors import in_no_tensor
from online.blocks.recipes import Content, Gone
from online.blocks.storages import Storages
from online.engines.engine import OutOfMemory, Thrashed
from online.engines.growing import GrowingEngine
from online.runtime import Failure


def _made_outside(content: Content) -> UntypedStorage | None:
    """The storage of a content that cannot be made again, if the program still has it."""
    return None if content.made_by is not None or content.at is None else content.at()


class Keeper:
    """Has contents in memory, for a while or from now on.

    failure   what did not fit; thrashed: the limit of time was reached
    fixed     whether contents have been fixed since somebody last set this to False
    opened    numbers of contents that others may change unseen
    """

    def __init__(self, engine: GrowingEngine, storages: Storages, budget_bytes: int | None) -> None:
        self._engine = engine
        self._storages = storages
        self._budget_bytes = budget_bytes
        self.failure: Failure | None = None
        self.thrashed = False
        self.fixed = False
        self.opened: set[int] = set()
        self._freeing = False  # inputs, under way

    def guarded(self, name: str, step: Callable[[int], None], number: int) -> None:
        """A step of the engine for an operator of that name. Whatever fails, nothing stays locked.

        The engine knows what the program has dropped, and nothing more is dropped by the garbage collector meanwhile: a rebuild
        must not find gone what was counted as there. Where another thread has dropped it (autograd's, on CUDA, is not done yet
        when the backward is), the step is tried again.
        """
        storages = self._storages
        collecting = gc.isenabled()
        if collecting:
            gc.disable()
        try:
            if storages.died or storages.dead or storages.unread:
                storages.bury()
            step(number)
        except OutOfMemory as error:
            self._engine.give_up()
            if self._free_inputs() or self._free_cycles():
                self.guarded(name, step, number)
                return
            asked, held = error.asked_bytes, []
            for s in error.held:
                live = storages.at_number(s)
                held.append(("dropped" if live is None else f"storage {s}", self._engine.size_bytes[s]))
            failure = Failure(name, asked, tuple(sorted(held, key=lambda entry: -entry[1])))
            assert self._budget_bytes is not None
            self.failure = failure
            raise BudgetExceeded(name, asked, self._budget_bytes, str(failure)) from None
        except Gone:
            self._engine.give_up()
            if not storages.died:
                raise
            self.guarded(name, step, number)
        except Thrashed:
            self._engine.give_up()
            self.thrashed = True
            raise NoScheduleFound(
                f"recomputation for {name} makes the block take more than {self._engine.thrash_limit:g} times as long as without "
                f"the budget of {self._budget_bytes:,} bytes; give it more memory, a higher thrash_limit or another heuristic"
            ) from None
        except BaseException:
            self._engine.give_up()
            raise
        finally:
            if collecting:
                gc.enable()

    @contextlib.contextmanager
    def held(self, name: str, numbers: Iterable[int]) -> Iterator[None]:
        """Have storages of the engine in memory together for a while."""
        held = []
        try:
            for s in numbers:
                self.guarded(name, self._engine.hold, s)
                held.append(s)
            yield
        finally:
            for s in held:
                self._engine.let_go(s)

    def keep(self, content: Content, name: str) -> None:
        """From now on a content stays in memory until the program drops it."""
        engine, number = self._engine, content.number
        if number in engine.kept:
            return
        if engine.resident[number]:  # nothing has to go for it
            engine.keep_until_dropped(number)
        else:
            self.guarded(name, engine.keep_until_dropped, number)

    def fix(self, content: Content, name: str) -> None:
        """A content is about to be written over without a new version of it: it, and what can be made again only from what it
        holds now, stays from now on."""
        storages = self._storages
        found = storages.made_from(content)
        storage = _made_outside(content)
        if storage is not None:
            for other in storages.given.around(storage.data_ptr()):  # an array's memory may be that of several tensors
                found |= storages.made_from(other)
        for each in found:
            if each.at is not None:
                self.keep(each, name)
        self.fixed = True
        for each in found:
            storages.fix(each)  # only now: where something did not fit, it may be tried again

    def open(self, content: Content, name: str) -> None:
        """A content is about to be shared with others, who may change it unseen: as ``fix``. What is made later from one that the
        block has made stays, too; they may also give it back as another tensor, over the same memory."""
        self.fix(content, name)
        storages = self._storages
        storage = _made_outside(content)
        if storage is None or content.number in storages.met or content.number in self.opened:
            return
        if content.size_bytes:
            assert content.at is not None
            storages.given.add(content.at.known, storage.data_ptr(), content.size_bytes)
        self.opened.add(content.number)

    def _free_inputs(self) -> bool:
        """Something does not fit: let go of inputs that are there only to make smaller things from them again, which then stay;
        whether that has freed bytes. Without it a loop would have all its batches in memory for the sake of a number each."""
        if self._freeing:
            return False
        storages = self._storages
        self._freeing, failed = True, (self.failure, self.thrashed)
        before = self._engine.used_bytes
        try:
            for content in list(storages.by_key.values()):
                storage = _made_outside(content)
                if storage is None or not in_no_tensor(storage):
                    continue
                made = [each.size_bytes for each in storages.made_from(content) if each.at is not None]
                if sum(made) < 2 * content.size_bytes:  # it is one of them
                    with contextlib.suppress(BudgetExceeded, NoScheduleFound):
                        self.fix(content, "")
            storage = None
            storages.bury()
        finally:
            self._freeing, (self.failure, self.thrashed) = False, failed
        return self._engine.used_bytes < before

    def _free_cycles(self) -> bool:
        """Something does not fit: have Python free what the program has dropped in cycles; whether that has freed bytes."""
        if self._freeing:
            return False
        before = self._engine.used_bytes
        gc.collect()
        self._storages.bury()
        return self._engine.used_bytes < before
