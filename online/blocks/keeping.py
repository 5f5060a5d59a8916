"""What has to be in memory: the engine's steps under the budget, and contents that stay. [torch]"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import UntypedStorage

from graphs.errors import BudgetExceeded, NoScheduleFound
from graphs.torch_private.tensors import in_no_tensor
from online.blocks.recipes import Content, Gone
from online.blocks.storages import Storages
from online.engines.engine import OutOfMemory, Thrashed
from online.engines.growing import GrowingEngine
from online.runtime import Failure

LOOK_SHARE = 0.125  # of the budget: once inputs of so many bytes have come, earlier ones are looked at


def _made_outside(content: Content) -> UntypedStorage | None:
    """The storage of a content that cannot be made again, if the program still has it."""
    return None if content.made_by is not None or content.at is None else content.at()


def _is_given_up(content: Content) -> bool:
    """Whether the program has no tensor any more of a content that was made outside."""
    storage = _made_outside(content)
    return storage is not None and in_no_tensor(storage)


def _bytes(contents: Iterable[Content]) -> int:
    return sum(content.size_bytes for content in contents)


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
        self._given_bytes = 0  # of inputs since somebody last looked whether some can go

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
            if self._free_inputs(error.held) or self._free_cycles():
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
            self.guarded(name, lambda s: engine.keep_until_dropped(s) if content.at is not None else None, number)

    def fix(self, content: Content, name: str) -> None:
        """A content is about to be written over without a new version of it: it, and what can be made again only from what it
        holds now, stays from now on."""
        storage = _made_outside(content)
        # An array's memory may be that of several tensors.
        others = () if storage is None else self._storages.given.around(storage.data_ptr())
        self._fix(self._storages.made_from(content, *others), name)

    def _fix(self, found: Iterable[Content], name: str) -> None:
        """Contents with all that can be made again only from them stay from now on."""
        kept: list[int] = []
        try:
            for each in found:
                if each.at is not None and each.number not in self._engine.kept:
                    self.keep(each, name)
                    kept.append(each.number)
        except Exception:  # what is not fixed need not stay
            for number in kept:
                self._engine.keep_no_longer(number)
            raise
        self.fixed = True
        for each in found:
            self._storages.fix(each)  # only now: where something did not fit, it may be tried again

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

    def given_more(self, size_bytes: int) -> None:
        """One more input comes. Now and then look whether earlier ones can go: once something does not fit, what they are there
        for has gone first, and it may take all that were ever given to make it again."""
        self._given_bytes += size_bytes
        if self._budget_bytes is not None and self._given_bytes > LOOK_SHARE * self._budget_bytes:
            self._given_bytes = 0
            self._free_inputs(())

    def _free_inputs(self, needed: Collection[int]) -> bool:
        """Let go of inputs that are there only to make what is no larger from them again, which then stays; whether that frees
        bytes. Without it a loop would have all its batches in memory for the sake of a number each, or of what they add to.

        needed  numbers of what has to be in memory now in any case
        """
        if self._freeing:
            return False
        storages = self._storages
        self._freeing, failed = True, (self.failure, self.thrashed)
        try:
            inputs = self._fix_instead_of_inputs(needed)
            storages.bury()
        finally:
            self._freeing, (self.failure, self.thrashed) = False, failed
        return any(storages.at_number(number) is None for number in inputs)

    def _fix_instead_of_inputs(self, needed: Collection[int]) -> list[int]:
        """The numbers of those that nothing is made from any more."""
        free: list[int] = []
        storages, kept = self._storages, self._engine.kept
        given = [content for content in storages.by_key.values() if _is_given_up(content)]
        together = defaultdict[frozenset[Content], list[Content]](list)  # inputs that are there for the same
        for content, alive in storages.alive_from(given).items():
            together[alive].append(content)
        for alive, inputs in sorted(together.items(), key=lambda entry: -_bytes(entry[1])):
            if _bytes(each for each in alive if each.number not in kept and each.number not in needed) <= _bytes(inputs):
                with contextlib.suppress(BudgetExceeded, NoScheduleFound):
                    self._fix(storages.made_from(*inputs), "")
                    free += [each.number for each in inputs]
        return free

    def _free_cycles(self) -> bool:
        """Something does not fit: have Python free what the program has dropped in cycles; whether that has freed bytes."""
        if self._freeing:
            return False
        before = self._engine.used_bytes
        gc.collect()
        self._storages.bury()
        return self._engine.used_bytes < before
