"""Operator calls of an eager program: what they read, make and cost, and how they run again. It knows no budget. [torch]"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.flop_counter import FlopCounterMode

from graphs.costs import DEVICES, DeviceDescription
from graphs.errors import InputError
from graphs.rewriting.nodes import is_foreign, running_statistics
from graphs.rewriting.sizes import cuda_bytes
from graphs.torch_private.names import FakeTensorMode, tree_leaves, tree_map_only, without_autocast
from graphs.torch_private.stand_ins import quiet_stand_ins
from graphs.torch_private.tensors import negated_view
from planner.execution.draws import repeat_draw
from planner.process.pauses import no_collections


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
    draws         each generator (or the device whose default one it is) and its state before the draw, of a random op
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
            for where, state in self.draws:
                call = functools.partial(repeat_draw, state, where, call)
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
        raise InputError("a nested tensor turned up in a block under a budget; make it with layout=torch.jagged, or pad it")
    if tensor.layout is not STRIDED:
        raise InputError(f"a {tensor.layout} tensor turned up in a block under a budget; only strided ones can be counted")


class Kind:
    """What is true of every call of an operator.

    name     for people and reports; kind: with the overload
    looks    makes nothing but views and numbers
    of_first  the only tensor it is given is its first argument
    written  places of arguments it writes to (a name where it is given by keyword)
    scratch  places of arguments it writes to although what it returns does not depend on them
    blank    makes a tensor without content, which somebody is to write
    gives_back  returns nothing but the tensors it writes to
    random   draws random numbers
    foreign  none of PyTorch's own: it may draw without saying so, and is ``random`` once it did
    acts     on the outside world, so that it must not run twice
    collective  goes on once it has returned, in a thread of its own that reads and writes what it was given
    moves    puts a tensor on another storage or changes the size of one
    entries  entries[acts][in_backward]: what is noted of a call; each made once
    """

    __slots__ = (
        "acts",
        "blank",
        "collective",
        "entries",
        "foreign",
        "func",
        "gives_back",
        "kind",
        "looks",
        "moves",
        "name",
        "of_first",
        "random",
        "scratch",
        "written",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its id is not given again
        self.entries = self._entries()
        self.kind = str(func)
        schema = func._schema
        packet = func.name().partition(".")[0]
        self.name = packet.replace("::", ".")
        self.scratch: tuple[int, ...] = ()
        writes = [at for at, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if packet in _BATCH_NORMS:  # most schemas do not say that running statistics are written
            self.scratch = running_statistics(func)
            writes = [at for at in writes if at not in self.scratch]
        elif packet in _RNN_BACKWARDS:  # nor that cuDNN works in what it was handed by the forward
            writes.append([argument.name for argument in schema.arguments].index("reserve"))
        elif func.namespace == "c10d":  # nor that what other processes send is written to what is given
            given = [(at, a.name) for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
            writes = [at for at, name in given if not name.startswith("input")]
        self.written = tuple((at, schema.arguments[at].name) for at in writes)
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        self.gives_back = bool(self.written) and (
            func.namespace == "c10d" or all(r.alias_info is not None for r in schema.returns)
        )
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.foreign = is_foreign(func)
        self.collective = func.namespace in _COLLECTIVES
        self.acts = (not self.written and not schema.returns) or self.collective
        self.moves = packet in ("aten::set_", "aten::resize_", "aten::resize_as_")
        self.blank = packet in _BLANK
        tensors = [at for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
        self.of_first = tensors == [0] and str(schema.arguments[0].type) == "Tensor"
        makes_views = func.is_view or torch.Tag.inplace_view in func.tags
        has_none = not tensors and not gives_tensors  # say, marks for the profiler
        has_none = has_none or packet == "aten::_efficientzerotensor"  # a stand-in without memory
        self.looks = not self.moves and (makes_views or has_none or not (gives_tensors or self.written or self.acts))

    def _entries(self) -> tuple[tuple[Entry, Entry], ...]:
        return tuple(((self, acts, False), (self, acts, True)) for acts in (False, True))


Entry = tuple[Kind, bool, bool]  # a call: its kind, whether it acts on the world, whether it is in the backward

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
        "batch_norm_update_stats",
    )
)

_BLANK = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})  # namespaces of operators of several processes

_RNN_BACKWARDS = frozenset({"aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward"})

_kinds: dict[int, Kind] = {}  # by id: operators hash slowly


def kind_of(func: Any) -> Kind:
    """What is true of every call of an operator."""
    kind = _kinds.get(id(func))
    if kind is None:
        kind = _kinds[id(func)] = Kind(func)
    return kind


class _Given(Kind):
    """An input, as if an operator had made it."""

    def __init__(self) -> None:
        self.name = self.kind = "input"
        self.entries = self._entries()
        self.random = False


GIVEN = _Given()


# What an op makes, and what it costs, without running it.

Key = tuple[Any, ...]
sizes_of: dict[Key, tuple[int, ...]] = {}  # bytes of the storages that calls with this key made
MOST_KEYS = 100_000
BOUNDS: Mapping[str, Callable[..., int]] = {  # the most an op can make whose result depends on what it reads
    "aten.nonzero": lambda t: t.numel() * t.dim() * 8,
    "aten.masked_select": lambda t, mask: _together(t, mask) * t.element_size(),
}


def _together(*tensors: Tensor) -> int:
    """Elements of tensors that are broadcast against each other."""
    return math.prod(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]


def remember(key: Key, sizes: tuple[int, ...]) -> None:
    """Note what a call with this key made."""
    if len(sizes_of) >= MOST_KEYS:
        sizes_of.clear()
    sizes_of[key] = sizes


def foreseen(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Bytes of the storages a call would make, from a run on tensors without data; None where that cannot be told."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if any(isinstance(leaf, Tensor) and leaf.is_quantized for leaf in tree_leaves((args, kwargs))):
        raise InputError("a quantized tensor turned up in a block under a budget; its scale would be lost with its bytes")

    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    with no_collections(), quiet_stand_ins(), mode:  # the program's finalizers are not to run on tensors without data
        try:
            args, kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
            old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            return tuple(counted_bytes(storage) for storage in new_storages(func(*args, **kwargs), old))
        except Exception:  # whatever is wrong with the call, the call itself will say it
            return None


def counted_bytes(storage: UntypedStorage) -> int:
    """Bytes of a storage, as the allocator gives them out."""
    size_bytes, device = storage.nbytes(), storage.device
    return cuda_bytes(size_bytes) if device != _CPU and device.type == "cuda" else size_bytes


_CPU = torch.device("cpu")  # comparing with it takes a fraction of the time of asking for the type


class CostModel:
    """Modelled op times: the roofline of ``graphs.costs``, computed once for each kind of call."""

    def __init__(self) -> None:
        self._formulas = FlopCounterMode(display=False).flop_registry
        self._known: dict[Key, int] = {}

    def time_ns(self, key: Key, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Of a call with this key, and with the others like it."""
        if key not in self._known:
            if len(self._known) >= MOST_KEYS:
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
