"""What storages hold, and how the ops that made it run again. It knows no budget. [torch]"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from graphs.errors import InputError
from graphs.torch_private.names import without_autocast
from graphs.torch_private.tensors import negated_view
from online.blocks.kinds import NESTED
from planner.execution.draws import repeat_draw


class Gone(Exception):
    """The program has dropped, in another thread, what was counted as there."""


class WithoutMemory(Exception):
    """A tensor on the device "meta" has turned up: there is nothing to count or to evict."""


class Content:
    """What a storage holds from one write to the next: a storage of the engine.

    number      in the engine
    size_bytes  as counted
    made_by     how to make it again; None: it cannot be made again
    at          the storage of the program that holds it; None once the program has dropped or overwritten it
    floating    where it lies while it is in memory without being at one of the program's storages
    """

    __slots__ = ("__weakref__", "at", "floating", "made_by", "number", "size_bytes")

    def __init__(self, number: int, size_bytes: int, made_by: Recipe | None) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.made_by = made_by
        self.at: Notice | None = None
        self.floating: UntypedStorage | None = None

    def storage(self) -> UntypedStorage:
        """Where it lies now. Raises Gone."""
        storage = None if self.at is None else self.at()
        if storage is None:
            storage = self.floating
        if storage is None:
            raise Gone
        return storage


class Known(weakref.ref[Content]):
    """Refers to a content, and says when nobody needs it any more; ``number``: of that content."""

    __slots__ = ("number",)
    number: int


class Notice(weakref.ref[UntypedStorage]):
    """Refers to a storage of the program, and says when that is dropped; ``key``: of the storage, ``known``: what it holds."""

    __slots__ = ("key", "known")
    key: int
    known: Known


class View(tuple[Any, ...]):
    """A tensor argument, without the tensor: enough to make one like it.

    It has: content, shape, stride, offset, dtype, whether it is conjugate, whether it is negated; and the storage itself where
    that cannot be made again, as it then has to live as long as it may be read.
    """

    __slots__ = ()

    @property
    def content(self) -> Content:
        """What it shows."""
        content: Content = self[0]
        return content

    @property
    def keeps(self) -> UntypedStorage | None:
        """The storage, where it cannot be made again."""
        storage: UntypedStorage | None = self[7]
        return storage

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The argument again, over ``storage``."""
        _, shape, stride, offset, dtype, conjugate, negated, _ = self
        made = torch.empty(0, dtype=dtype, device=storage.device)
        made.set_(storage, offset, shape, stride)
        if conjugate:
            made = made.conj()
        return negated_view(made) if negated else made


class Recipe:
    """How to run an op again.

    args, kwargs  as given, each tensor a View
    written       for each content the op writes over: the old one; its outputs begin with the new ones
    scratch       contents it writes to without what it returns depending on them: run again, it writes to a copy
    makes         what it made (weakly: a recipe lives as long as something made by it may be needed)
    draws         of a random op: where it draws (a generator or a device) and the states around the draw, as ``drawn`` gives them
    with_grad     whether gradients were enabled: some kernels (oneDNN's recurrent layers) make more then
    """

    __slots__ = ("__weakref__", "args", "default_dtype", "draws", "func", "kwargs", "makes", "scratch", "with_grad", "written")

    def __init__(self, func: Any, args: Any, kwargs: Any, written: list[Content], scratch: list[Content]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.written = written
        self.scratch = scratch
        self.makes: list[Known] = []
        self.draws: list[tuple[torch.device | torch.Generator, Tensor]] = []
        self.with_grad = torch.is_grad_enabled()
        self.default_dtype = torch.get_default_dtype()

    def hold_fixed(self) -> None:
        """Hold the storages of arguments that cannot be made again any more since they were described."""
        self.args = [_holding(argument) for argument in self.args]
        self.kwargs = {name: _holding(argument) for name, argument in self.kwargs.items()}

    def run(self) -> list[UntypedStorage]:
        """Run the op once more: the storages it makes, those of new contents it writes first."""
        own = {content: _copy(content.storage()) for content in (*self.written, *self.scratch)}
        old: set[int] = set()
        args = [_filled(argument, own, old) for argument in self.args]
        kwargs = {name: _filled(argument, own, old) for name, argument in self.kwargs.items()}
        # No argument requires a gradient, so nothing is recorded.
        with without_autocast(), torch.set_grad_enabled(self.with_grad), _by_default(self.default_dtype):
            call = self.func
            for where, states in self.draws:
                call = functools.partial(repeat_draw, states, where, call)
            result = call(*args, **kwargs)
        return [own[content] for content in self.written] + new_storages(result, old)


@contextlib.contextmanager
def _set_default(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)


def _by_default(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Have floating-point tensors of this type where none is given."""
    return _NOTHING if dtype is torch.get_default_dtype() else _set_default(dtype)


_NOTHING = contextlib.nullcontext()


def _filled(argument: Any, own: dict[Content, UntypedStorage], old: set[int]) -> Any:
    """An argument of a recipe with tensors in place of its views; ``own``: where they lie instead, ``old``: keys of storages."""
    if type(argument) is View:
        storage = own.get(argument.content) or argument.keeps or argument.content.storage()
        old.add(storage._cdata)
        return argument.tensor(storage)
    return [_filled(entry, own, old) for entry in argument] if type(argument) is list else argument


def _holding(argument: Any) -> Any:
    """An argument of a recipe, with the storages of what cannot be made again."""
    if type(argument) is View:
        if argument.keeps is None and argument.content.made_by is None:
            return View((*argument[:-1], argument.content.storage()))
        return argument
    return [_holding(entry) for entry in argument] if type(argument) is list else argument


def _copy(storage: UntypedStorage) -> UntypedStorage:
    copy = UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
    copy.copy_(storage)
    return copy


def new_storages(result: Any, old: Any) -> list[UntypedStorage]:
    """Storages in a result that are none of those with the keys ``old``, each once, in order."""
    if isinstance(result, Tensor) and result.layout is STRIDED:  # most are a single one
        storage = result.untyped_storage()
        return [] if storage._cdata in old else [storage]
    found: dict[int, UntypedStorage] = {}
    for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ():
        if isinstance(tensor, Tensor):
            check_layout(tensor)
            storage = tensor.untyped_storage()
            if storage._cdata not in old:
                found[storage._cdata] = storage
        elif isinstance(tensor, tuple | list):
            found.update((storage._cdata, storage) for storage in new_storages(tensor, old))
    return list(found.values())


STRIDED = torch.strided


def check_layout(tensor: Tensor) -> None:
    """InputError for what has no storage, or one that does not tell what is in it."""
    if tensor.is_nested and tensor.layout is STRIDED:
        raise InputError(NESTED)
    if tensor.layout is not STRIDED:
        raise InputError(f"a {tensor.layout} tensor turned up in a block under a budget; only strided ones can be counted")
