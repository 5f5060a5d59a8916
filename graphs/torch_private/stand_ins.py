"""Fake tensors, and the calls a trace makes on them. [torch]"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from graphs.torch_private.names import tree_leaves, tree_map_only
from graphs.torch_private.patching import patched


def to_fake(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Stand-ins without data, all of one fake mode (that of the tensors, where they are fake already); static shapes."""
    tensors = list(tensors)
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)  # real constants of the model are let in
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]


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
