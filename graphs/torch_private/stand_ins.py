"""Fake tensors, and the calls a trace makes on them. [torch]"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from graphs.torch_private.names import tree_leaves, tree_map_only
from graphs.torch_private.patching import patched
from graphs.torch_private.tensors import storage_key


def to_fake(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Stand-ins without data, all of one fake mode (that of the tensors, where they are fake already); static shapes."""
    tensors = list(tensors)
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)  # real constants of the model are let in
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]


def forgetful_mode() -> FakeTensorMode:
    """A fake mode that keeps no results for calls to come: keeping them takes time, for nothing where no call comes twice."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def stand_in(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor of the mode, laid out the same, with memory of its own: made without an operator, which would take far longer."""
    inner = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, inner, tensor.device)


def has_memory(tensor: Tensor) -> bool:
    """Whether there is data behind it."""
    return not (on_meta(tensor) or isinstance(tensor, FakeTensor))


def on_meta(tensor: Tensor) -> bool:
    """Whether it is on the meta device, which a fake tensor says of itself only where that is what it stands for."""
    return tensor.device.type == "meta"


def of_the_cpu(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor of the mode that stands for one on the CPU, for a tensor on the meta device; those that share their memory there
    do so here. A parameter stays one."""
    fake: Any = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True
    return cast(Tensor, fake.requires_grad_(tensor.requires_grad))


class Given:
    """What a traced call assigns to the ``.data`` of the stand-ins of parameters and buffers: like in eager execution they have
    other memory from then on, and what lies in the old one keeps it.

    stand_ins  of parameters and buffers, by name
    others     stand-ins of what else was there before the call
    """

    def __init__(self, stand_ins: Mapping[str, Tensor], others: Iterable[Tensor]) -> None:
        self._name_of = {id(tensor): name for name, tensor in stand_ins.items()}
        self._old: dict[str, tuple[Any, Any]] = {}
        # What memory may not be given (again), by its key. It is kept: else other memory could come to have the same key.
        self._taken = {storage_key(inner): inner for inner in map(_inner, (*stand_ins.values(), *others))}

    def name_of(self, one: Tensor) -> str | None:
        """The name that the model has for it, if it is the stand-in of a parameter or buffer."""
        name = self._name_of.get(id(one))
        return None if name is None else name.removeprefix("model.")

    def give(self, one: Tensor, value: Any) -> str | None:
        """``one.data = value``; what would be wrong with it, where it means another layout, or memory that something else has."""
        own, new = self.name_of(one), _inner(value)
        if own is None:
            return "that of a tensor which is no parameter or buffer of the model"
        if new is None or _layout(value) != _layout(one):
            return f"{own} gets another shape, layout or type by it, and a plan is for those that it had"
        if storage_key(new) == storage_key(_inner(one)):
            return None if value.storage_offset() == one.storage_offset() else f"{own} gets another part of its own memory"
        if storage_key(new) in self._taken:
            return f"{own} gets memory that another tensor has, too, and both would change together"
        self._taken[storage_key(new)] = new
        self._old.setdefault(self._name_of[id(one)], (one, _inner(one)))
        cast(Any, one).elem = new
        return None

    def write(self, keep: Collection[str]) -> set[str]:
        """At the end of the call: write what was given into the old memory, but for these names, whose memory may still be read.
        The tracer finds out there what a call writes to, and takes what it holds after another call. Returns all names."""
        for name, (one, old) in self._old.items():
            if name not in keep:
                new = one.detach()
                cast(Any, one).elem = old
                with torch.no_grad():
                    one.copy_(new)
        return set(self._old)


def _inner(tensor: Any) -> Any:
    return tensor.elem if isinstance(tensor, FunctionalTensor) else None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Run operators as eager execution does, on real tensors, while a compiler traces: it has stand-ins made by then, and looks
    for replacements at each call."""
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():
        yield


@contextlib.contextmanager
def quiet_stand_ins() -> Iterator[None]:
    """Keep back what fake tensors log where an operator cannot run on them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def noting_traced() -> Iterator[list[weakref.ref[Tensor]]]:
    """The tensors that a trace makes meanwhile, to see which of them are there afterwards."""
    made: list[weakref.ref[Tensor]] = []
    new: Any = FunctionalTensor.__new__

    def noted(kind: Any, *args: Any, **kwargs: Any) -> Any:
        one = new(kind, *args, **kwargs)
        made.append(weakref.ref(one))
        return one

    with patched(FunctionalTensor, "__new__", staticmethod(noted)):
        yield made


@contextlib.contextmanager
def values_laid_out(lay_out: Callable[[Any, Any, Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """Have operators that are traced inside read ``lay_out(operator, kwargs, tensor, value)``, where that is a tensor, in place
    of ``value``: what the tracer has made of the writes to ``tensor`` so far, where its strides are others than the tensor's."""
    original: Any = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead: dict[int, FunctionalTensor] = {}
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) is FunctionalTensor:
                torch._functionalize_sync(tensor.elem)  # writes through other views are waiting
                value = torch._from_functional_tensor(tensor.elem)
                if value.layout == torch.strided and value.stride() != tensor.stride():
                    laid_out = lay_out(func, kwargs or {}, tensor, value)
                    if laid_out is not None:
                        with mode:
                            instead[id(tensor)] = FunctionalTensor.to_functional(laid_out)
        if not instead:
            return original(mode, func, types, args, kwargs)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and id(given) in instead:
                torch._functionalize_replace(given.elem, torch._from_functional_tensor(instead.pop(id(given)).elem))
                torch._functionalize_commit_update(given.elem)
                torch._functionalize_sync(given.elem)
        args, kwargs = tree_map_only(FunctionalTensor, lambda tensor: instead.get(id(tensor), tensor), (args, kwargs))
        return original(mode, func, types, args, kwargs)

    with patched(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


@contextlib.contextmanager
def calls_replaced(call: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Have what is traced inside run ``call(operator, args, kwargs)`` in place of an operator call, where that returns a function
    without arguments, before the tracer makes writes into results."""
    original: Any = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = call(func, args, kwargs or {})
        if instead is None:
            return original(mode, func, types, args, kwargs)
        with mode:
            return instead()

    with patched(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


@contextlib.contextmanager
def stand_ins_by(call: Callable[[FakeTensorMode, Any, Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have ``call(mode, operator, args, kwargs, plain)`` return what calls on fake tensors give; ``plain()`` does without it.

    It does not see the calls that a stand-in makes in turn, nor those it makes itself.
    """
    original: Any = FakeTensorMode.__torch_dispatch__
    inside = False

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal inside
        plain = functools.partial(original, mode, func, types, args, kwargs or {})
        if inside:
            return plain()
        inside = True
        try:
            return call(mode, func, args, kwargs or {}, plain)
        finally:
            inside = False

    with patched(FakeTensorMode, "__torch_dispatch__", dispatch):
        yield
