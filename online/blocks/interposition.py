"""What an eager block sees of the program: operator calls, and reads and writes past them. [torch]"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphs.errors import InputError
from graphs.torch_private.names import (
    PADS_PACKED,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    classes_handle,
    without_torch_function,
)
from graphs.torch_private.running import kept_from_compiler
from graphs.torch_private.tensors import unwrapped
from online.blocks.block import Block
from online.blocks.keeping import Keeper
from online.blocks.outside import Outside
from online.blocks.padding import pad_packed
from online.blocks.recipes import WithoutMemory
from online.blocks.tensors import ORDINARY, takes_calls_apart, tensors_in


def _without_frames(error: BaseException) -> BaseException:
    """The same error once more; with frames, and so with the tensors they hold, it could not be kept."""
    kind = type(error)
    try:
        copy = kind.__new__(kind, *error.args)
    except Exception:  # made from more than its arguments
        return RuntimeError(f"{kind.__name__}: {error}")
    vars(copy).update(vars(error))
    return copy


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator call of the block, those of the backward pass among them."""

    refuses_capture = "this is inside of a block under a budget (online.budget); plan before the block, or after it"

    def __init__(self, block: Block, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self._call: Callable[[Any, Any, Any], Any] | None = call
        self._said = False
        if _LEFT_ALONE:
            self.__torch_dispatch__ = self._handle  # type: ignore[method-assign]

    def let_through(self) -> None:
        """From now on do nothing, but say so once."""
        self._call = None

    def close(self) -> None:
        """After the block: be in no reference cycle."""
        self._call = None
        vars(self).pop("__torch_dispatch__", None)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._said:
            self._said = True
            self._block.warn_without_budget()
        return func(*args, **(kwargs or {}))

    supports_higher_order_operators = True  # they come here to be refused in our words

    def _handle(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise InputError(f"{func} cannot run under a budget, as its parts are the compiler's; use Python's own if and while")
        if types and any(takes_calls_apart(each) for each in types):
            return NotImplemented  # what the tensor does with those it is made of comes here in turn
        with without_torch_function():  # what is done here to a tensor is no reading of the program's
            try:
                return (self._call or self._plain)(func, args, kwargs)
            except WithoutMemory:
                return func(*args, **(kwargs or {}))
            except BaseException as error:
                self._block.raised = _without_frames(error)
                if not isinstance(error, Exception):  # Ctrl-C, or what else a signal's handler raises
                    self._block.interrupted()
                raise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, types, args, kwargs)


# What the class has PyTorch wraps, to tell the compiler to stay out, and that takes 2 us a call; telling it once takes none.
_LEFT_ALONE = kept_from_compiler(cast(FunctionType, Operators._handle))

# Methods that read a tensor without an operator call: those that leave something behind through which anybody may go on reading
# it, and write to it (``numpy()`` arrays, kernels that are given an address), and the others.
_OPENS = {
    getattr(Tensor, name)
    for name in ("__array__", "__dlpack__", "data_ptr", "numpy", "share_memory_", "storage", "untyped_storage")
}
_OPENS.add(cast(Any, Tensor.__cuda_array_interface__).__get__)  # an address for other libraries; the getter asks for it unseen
# Those that hand the memory to arrays of the program's; the others are asked for by PyTorch itself, too, also of parameters.
_SHARES = {getattr(Tensor, name) for name in ("__array__", "__dlpack__", "numpy")}
_SHARES.add(cast(Any, Tensor.__cuda_array_interface__).__get__)
_READS = {getattr(Tensor, name) for name in ("__deepcopy__", "__format__", "__reduce_ex__", "__repr__", "tolist")}
_WRITES = {getattr(Tensor, name) for name in ("apply_", "map2_", "map_")}  # to the first of the tensors they read

# Functions that may read any tensor they are given so, those in lists too; and those that read such in lists alone.
_GATHERS = {getattr(Tensor, name) for name in ("new", "new_tensor", "tensor_split")}
_GATHERS |= {torch.tensor, torch.as_tensor, torch.asarray, torch.tensor_split}
_INDEXES = {Tensor.__getitem__, Tensor.__setitem__}

# Recurrent layers of packed sequences take the lengths of their steps from a tensor of integers, while their own operators run.
_RECURRENT: set[Any] = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}

_CALLS_BACK: set[Any] = {F.triplet_margin_with_distance_loss, torch.lobpcg}  # they call functions of the program's
_NOTED = _OPENS | _READS | _WRITES | _GATHERS | _INDEXES | PADS_PACKED | _RECURRENT | _CALLS_BACK  # all others pass

# Operators that are called as such: which of several is meant is found out by trying, and where one does not take an argument its
# value is written down for an error message.
_OPERATORS = frozenset({type(torch.ops.aten.add), OpOverload})

_PLACES = ORDINARY | {int, bool, slice, type(None), type(Ellipsis)}  # what most indices are made of
_NUMBERS = frozenset({int, float, bool})  # what most long lists are made of


def _holds_list(index: object) -> bool:
    """Whether an index may have a list in it, or another sequence: its numbers, which may be tensors, are read past the
    dispatcher. A tuple has an entry for each dimension; one inside of it is such a sequence."""
    if isinstance(index, tuple):
        return not all(type(entry) in _PLACES for entry in index)
    return type(index) not in _PLACES


def _listed(argument: object, within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Tensors in sequences, however deep; ``within``: ids of those this one is in, as one may be in itself."""
    if isinstance(argument, Tensor):
        yield from tensors_in(unwrapped(argument))
    elif isinstance(argument, list | tuple | deque) and id(argument) not in within:
        for entry in argument:
            if type(entry) not in _NUMBERS:
                yield from _listed(entry, (*within, id(argument)))


_AS_ALL: Any = Tensor.__torch_function__


def _handle_themselves(kinds: tuple[type, ...]) -> bool:
    """Whether a class of tensors, none of PyTorch's own, handles the functions that are called with it."""
    handlers = [getattr(cast(Any, kind).__torch_function__, "__func__", None) for kind in kinds]
    return None not in handlers and any(
        handler is not _AS_ALL.__func__ and not kind.__module__.startswith("torch.")
        for kind, handler in zip(kinds, handlers, strict=True)
    )


class RawReads(TorchFunctionMode):
    """Reads and writes past the dispatcher: the tensor is there meanwhile, or from then on.

    PyTorch has a mode step aside while it handles a function. What is the program's own there is given back to it: functions that
    are called back, classes of tensors that handle functions, and the parts of what is copied.
    """

    def __init__(self, block: Block, outside: Outside, keeper: Keeper) -> None:
        super().__init__()
        self._block = block
        self._outside = outside
        self._keeper = keeper

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func not in _NOTED and type(func) not in _OPERATORS) or self._block.torn:
            if types and not ORDINARY.issuperset(types):
                return self._passed_on(func, types, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in PADS_PACKED:
            if self._block.budget_bytes is not None:
                return self._pad_packed(*args, **kwargs)
        elif func in _CALLS_BACK:
            args, kwargs = tuple(map(self._seen, args)), {name: self._seen(argument) for name, argument in kwargs.items()}
        elif func in _OPENS:
            with self._block.noting():
                for tensor in tensors_in(unwrapped(args[0])):
                    if self._outside.knows_bytes(tensor):
                        (self._keeper.open if func in _SHARES else self._keeper.fix)(self._outside.content(tensor), func.__name__)
        elif func not in _INDEXES or _holds_list(args[1]):
            given = [*args, *kwargs.values()]
            if func in _RECURRENT:
                given = [tensor for tensor in given if isinstance(tensor, Tensor) and not tensor.is_floating_point()]
            elif func is Tensor.__deepcopy__:
                self._copy_parts(*given)
            with self._block.noting():
                read = [self._outside.content(tensor) for tensor in _listed(given)]
                if func in _WRITES and read:
                    self._keeper.fix(read[0], func.__name__)
                if func is Tensor.__reduce_ex__:  # torch.save writes the storages of all tensors when it is through with the rest
                    for content in read:
                        self._keeper.keep(content, func.__name__)
                with self._keeper.held(func.__name__, [content.number for content in read]):
                    return self._passed_on(func, types, args, kwargs)
        return self._passed_on(func, types, args, kwargs)

    def _passed_on(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``; what classes of the program's do with it is seen here."""
        # A block has the last of these ask for modes of the program's alone: those from before the block come before the classes.
        if types and _handle_themselves(types) and classes_handle() and not torch.overrides.has_torch_function(()):
            for kind in types:
                with self:
                    result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)

    def _seen(self, argument: Any) -> Any:
        """An argument; where it is a function, what that does is seen here."""
        if not callable(argument) or isinstance(argument, Tensor):
            return argument

        def seen(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return seen

    def _copy_parts(self, tensor: Tensor, memo: dict[int, Any]) -> None:
        """Copy what a tensor is copied along with, so that ``Tensor.__deepcopy__`` finds it has been: each of its tensors is read
        past the dispatcher in turn."""
        if not tensor.is_leaf or id(tensor) in memo:
            return
        parts = [tensor.grad]
        for kind in type(tensor).__mro__ if type(tensor) is not Tensor else ():
            slots = vars(kind).get("__slots__", ())
            parts += [getattr(tensor, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
        cast(Any, tensor)._clear_non_serializable_cached_data()  # as it does before it copies the rest
        with torch.no_grad(), self:
            for part in (*parts, vars(tensor)):
                copy.deepcopy(part, memo)

    def _pad_packed(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        sizes = self.__torch_function__(Tensor.tolist, (Tensor,), (batch_sizes,))
        return pad_packed(data, sizes, batch_first, padding_value, total_length)
