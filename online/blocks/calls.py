"""Every operator call of a block: what it reads and writes, and what it is to do about that. [torch]"""

from __future__ import annotations

from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from graphs.errors import BudgetExceeded, InputError
from graphs.torch_private.names import tree_leaves
from graphs.torch_private.running import current_stream, in_backward
from graphs.torch_private.tensors import is_zero_stand_in
from online.blocks.estimates import BOUNDS, Alike, alike, foreseen
from online.blocks.keeping import Keeper
from online.blocks.kinds import Kind, kind_of
from online.blocks.outside import Outside
from online.blocks.recipes import STRIDED, Content, Recipe, View, WithoutMemory, check_layout
from online.blocks.runs import META, Runs, check_sizes
from online.blocks.storages import Storages
from online.engines.growing import GrowingEngine
from planner.execution.draws import drawn, generator_state

_NONE: dict[str, Any] = {}  # arguments by name of most calls
_COMMON = frozenset({int, bool, type(None)})  # classes of most arguments that are no tensors
# And of the others that may be kept for good, to know calls by.
_PLAIN = frozenset({float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format})

_STATE_BYTES = 5_056  # in the state of a generator of the CPU; one of a GPU has 16
_FEW_BYTES = 1_024


class Calls:
    """What the operator calls of a block become: looks at what is there, or ops of the engine."""

    def __init__(self, engine: GrowingEngine, storages: Storages, keeper: Keeper, outside: Outside, runs: Runs) -> None:
        self._engine = engine
        self._storages = storages
        self._contents = storages.by_key
        self._died, self._dead, self._unread = storages.died, storages.dead, storages.unread
        self._keeper = keeper
        self._opened = keeper.opened
        self._outside, self._content = outside, outside.content
        self._runs = runs
        self._blank: set[int] = set()  # contents that no operator has written or read since they were allocated, held
        self._stream = self._thread = 0
        self._is_known = True  # whether all arguments of the call under way are such that it can be known by them

    def begin(self) -> None:
        """The block begins, on the stream of this thread."""
        self._stream, self._thread = current_stream(), get_ident()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``func(*args, **kwargs)`` does, under the budget; ``kwargs`` may be None.

        Raises InputError for what comes from another thread than the block's or a backward's; WithoutMemory, with nothing done,
        for what reads or makes tensors on the device "meta".
        """
        if self._died or self._dead or self._unread:
            self._storages.bury()
        if get_ident() != self._thread and not in_backward():  # only TorchScript's threads have the block of another one
            raise InputError(
                "torch.jit.fork cannot run under a budget, as what it leads to comes at the same time; call the function itself"
            )
        kind = kind_of(func)
        if kind.looks:
            return self._look(kind, func, args, kwargs)
        scratch: list[Content] = []
        if kind.scratch and (len(args) < 6 or args[5] is not False):  # training
            scratch = [self._content(args[at]) for at in kind.scratch if args[at] is not None]
            for content in scratch:  # it is written to, so what was computed from it before cannot be made again
                self._keeper.fix(content, kind.name)
        self._keeper.fixed = False
        self._is_known = True
        read: list[Content] = []
        key: list[Any] = [kind]
        rest: list[Any] = [] if kind.gives_back else key  # nothing but tensors decides about calls that make nothing
        described = self._described
        views: list[Any] = []
        for argument in args:
            if type(argument) in _COMMON:
                rest += (type(argument), argument)
                views.append(argument)
            else:
                views.append(described(argument, read, key, rest))
        named = _NONE
        if kwargs:
            named = {}
            for name, argument in kwargs.items():
                rest.append(name)
                named[name] = described(argument, read, key, rest)
            if kwargs.get("device") == META:
                raise WithoutMemory
        else:
            kwargs = named
        if kind.moves:
            for content in read:
                self._keeper.keep(content, kind.name)
            result = func(*args, **kwargs)
            given = self._contents.get(args[0].untyped_storage()._cdata)  # set_ makes a storage larger where it is too small
            check_sizes(read if given is None else [*read, given])
            return result
        written = self._written(kind, args, kwargs) if kind.written else []
        if self._blank:
            self._keep_filled(kind, read, written)

        calls = alike(tuple(key)) if self._is_known else Alike()
        sizes: tuple[int, ...] | None = ()
        if not kind.gives_back:
            sizes = calls.sizes
            if sizes is None:
                sizes = (BOUNDS[kind.name](*args),) if kind.name in BOUNDS else foreseen(func, args, kwargs)
                calls.sizes, calls.varies = sizes, sizes is None or kind.name in BOUNDS
            if sizes == () and not written and not kind.acts:
                return self._look(kind, func, args, kwargs)

        acts = kind.acts
        if current_stream() != self._stream:
            # What is evicted gives its memory to the next op of the stream that made it; others may still be at work on it then.
            for content in read:
                self._keeper.keep(content, kind.name)
            acts = True  # what it makes stays, too
        elif kind.collective:
            for content in read:
                self._keeper.keep(content, kind.name)
        if self._opened and not self._opened.isdisjoint([content.number for content in read]):
            acts = True  # read again, it may be another content
        if written:
            acts = acts or any(content.made_by is None or content.number in self._engine.kept for content in written)
        recipe: Recipe | None = None
        before: list[tuple[torch.device | torch.Generator, Tensor]] = []
        overwritten: list[Content] = []
        if acts:
            for content in written:
                self._keeper.fix(content, kind.name)
            written, overwritten = [], written
        else:
            recipe = Recipe(func, views, named, written, scratch)
            if kind.random or kind.foreign:
                before = [(where, generator_state(where)) for where in _drawn_from(kind, args, kwargs)]
        if scratch:
            read = [content for content in read if content not in scratch]
        self._runs.begun = False
        try:
            try:
                result = self._runs.run(kind, calls, sizes, read, written, scratch, recipe, func, args, kwargs)
                fits = True
            except BudgetExceeded:
                if self._runs.begun or not written:
                    raise
                fits = False
            if not fits:  # the old content and the new one together: it has one from now on
                for content in written:
                    self._keeper.fix(content, kind.name)
                written, overwritten, recipe = [], written, None
                result = self._runs.run(kind, calls, sizes, read, written, scratch, recipe, func, args, kwargs)
                self._keeper.failure = None
        except BaseException as error:
            if self._runs.begun and written:
                for content in written:
                    self._storages.disown(content)
                if isinstance(error, Exception):  # the block may go on under its budget, where they count
                    self._written(kind, args, kwargs)
            if self._runs.begun and kind.foreign and isinstance(error, Exception):
                self._keep_unresizable(kind, args, kwargs)
            raise
        if kind.foreign:
            self._keep_unresizable(kind, args, kwargs)
        if before and recipe is not None:
            if kind.foreign:
                before = [(where, state) for where, state in before if not torch.equal(state, generator_state(where))]
                kind.random = kind.random or bool(before)
            recipe.draws = [(where, drawn(state, where)) for where, state in before]
        if overwritten:
            check_sizes([content for content in overwritten if content.size_bytes])
        if kind.written and not all(content.size_bytes for content in written or overwritten):
            self._count_filled(kind, args, kwargs)
        if kind.blank:
            blank = self._content(result).number
            self._engine.hold(blank)
            self._blank.add(blank)
        if kind.name == "aten._pack_padded_sequence":  # recurrent layers and unpacking read the batch sizes past the dispatcher
            self._keeper.keep(self._content(result[1]), kind.name)
        elif type(result) is Tensor and result.dtype is torch.uint8 and _may_be_state(result):
            self._keeper.keep(self._content(result), kind.name)
        return result

    def _look(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Any:
        """Make views or read numbers: nothing is allocated, but what is read has to be there."""
        if kind.of_first and args and isinstance(args[0], Tensor):  # else a number, that PyTorch takes for a tensor
            tensors = args[:1]
        else:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(tensors) == 1:
            s = self._content(tensors[0]).number
            if not self._engine.accessed(s):
                self._keeper.guarded(kind.name, self._engine.bring, s)
            return func(*args, **kwargs) if kwargs else func(*args)
        with self._keeper.held(kind.name, [self._content(tensor).number for tensor in tensors]):
            return func(*args, **(kwargs or {}))

    def _described(self, argument: Any, read: list[Content], key: list[Any], rest: list[Any]) -> Any:
        """An argument with views in place of its tensors; adds what is read, and what decides about the sizes of results: of
        tensors to ``key``, of others to ``rest``."""
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage() if argument.layout is STRIDED else None
            content = self._contents.get(storage._cdata) if storage is not None else None
            if content is None:
                content = self._content(argument)
            read.append(content)
            try:
                shape, stride, dtype = argument.shape, argument.stride(), argument.dtype
            except RuntimeError:
                check_layout(argument)
                raise
            key += (shape, stride, dtype, argument.get_device())
            conjugate, negated = dtype.is_complex and argument.is_conj(), argument.is_neg()
            keeps = None
            if content.made_by is None:
                keeps = storage
                if not content.size_bytes and is_zero_stand_in(argument):
                    return argument
            return View((content, shape, stride, argument.storage_offset(), dtype, conjugate, negated, keeps))
        if isinstance(argument, list | tuple):
            if all(type(entry) is int for entry in argument):
                rest += (int, tuple(argument))
                return list(argument)
            rest.append(len(argument))
            return [self._described(entry, read, key, rest) for entry in argument]
        if isinstance(argument, torch.Generator):
            rest += (torch.Generator, argument.device)
        elif isinstance(argument, float) and read and not key[0].foreign:  # decides about no size in PyTorch's own
            rest += (float, None)
        elif type(argument) in _COMMON or type(argument) in _PLAIN:
            rest += (type(argument), argument)
        else:
            self._is_known = False
        return argument

    def _written(self, kind: Kind, args: Any, kwargs: Any) -> list[Content]:
        """The contents an op writes over, each once."""
        return list(dict.fromkeys(map(self._content, _written_to(kind, args, kwargs))))

    def _count_filled(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """What an op was given to write to without any bytes (``out=torch.empty(0)``) may have some now: it is counted as if it
        came from outside, and stays."""
        for tensor in _written_to(kind, args, kwargs):
            content, size_bytes = self._content(tensor), tensor.untyped_storage().nbytes()
            if size_bytes and not content.size_bytes:
                self._runs.note(kind.name, self._engine.used_bytes + size_bytes)
                self._storages.disown(content)
                self._outside.meet(tensor, name=kind.name)

    def _keep_filled(self, kind: Kind, read: list[Content], written: list[Content]) -> None:
        """What was allocated without content and is read now was written past the dispatcher, by functions of PyTorch (the CTC
        loss, with the lengths it is given) or of an extension. Run again, the op that allocated it would not bring that back, so
        it was held, and stays; where it is written to now, it need not."""
        for content in read:
            if content.number in self._blank:
                self._blank.remove(content.number)
                self._engine.let_go(content.number)
                if content not in written:
                    self._keeper.fix(content, kind.name)

    def _keep_unresizable(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """A storage whose memory a kernel has given to an array (``numpy()``) cannot be emptied any more: what it holds stays."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not leaf.is_meta and not leaf.untyped_storage().resizable():
                self._keeper.keep(self._content(leaf), kind.name)


def _written_to(kind: Kind, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    for at, name in kind.written:
        argument = args[at] if at < len(args) else kwargs.get(name)
        for tensor in (argument,) if isinstance(argument, Tensor) else argument or ():
            yield from (tensor,) if isinstance(tensor, Tensor) else tensor  # one list of outputs for each input


def _may_be_state(tensor: Tensor) -> bool:
    """Whether bytes may be states of generators: on the CPU. ``Generator.set_state`` reads such where nobody sees it."""
    size_bytes = tensor.numel()
    return tensor.is_cpu and (size_bytes <= _FEW_BYTES or not size_bytes % _STATE_BYTES)


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
