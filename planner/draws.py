"""Random ops that run again repeat their draws, and afterwards the generators are as if nothing had run twice. [torch]"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from graphs.capture import Step
from graphs.rewrite import attribute, tensors_of
from graphs.torch_private import no_dispatch


def generator_state(where: torch.device | torch.Generator) -> Tensor:
    """State of a generator (of the default one of a device), on the host. Called by generated code."""
    repeats = _repeats.get()
    return _generator(where).get_state() if repeats is None else repeats.first(_generator(where))


def repeat_draw(state: Tensor, where: torch.device | torch.Generator, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call again with the generator in the state of its first run; the generator is as before afterwards.

    Called by generated code.
    """
    generator = _generator(where)
    if (repeats := _repeats.get()) is not None:
        return repeats.again(state, generator, functools.partial(call, *args, **kwargs))
    now = generator.get_state()
    generator.set_state(state)
    try:
        return call(*args, **kwargs)
    finally:
        generator.set_state(now)


def generator_state_like(call: fx.Node) -> Tensor:
    """What ``generator_state`` returns for a random call, as a fake tensor beside those of the call."""
    node = generator_node(call)
    where = draws_from(call) if node is None else attribute(node)
    with no_dispatch():
        size = generator_state(where).shape
    with tensors_of(call)[0].fake_mode:  # type: ignore[attr-defined]
        return torch.empty(size, dtype=torch.uint8)


def _generator(where: torch.device | torch.Generator) -> torch.Generator:
    if isinstance(where, torch.Generator):
        return where
    if where.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # the default generators exist only after it
        return torch.cuda.default_generators[torch.cuda.current_device() if where.index is None else where.index]
    return torch.default_generator


def generator_node(call: fx.Node) -> fx.Node | None:
    """The ``get_attr`` node of the generator a random call is given, if it is given one."""
    nodes = (node for node in call.all_input_nodes if node.op == "get_attr")
    return next((node for node in nodes if isinstance(attribute(node), torch.Generator)), None)


def draws_from(call: fx.Node) -> torch.device | torch.Generator:
    """The generator a random call draws from, or the device whose default generator it uses."""
    node = generator_node(call)
    if node is None:
        return tensors_of(call)[0].device
    given: torch.Generator = attribute(node)
    return given


def generators_of(step: Step) -> tuple[torch.Generator, ...]:
    """All generators the step draws from."""
    random = (call for call, op in zip(step.calls, step.graph.ops, strict=True) if op.random)
    return tuple(dict.fromkeys(_generator(draws_from(call)) for call in random))


@contextlib.contextmanager
def undone_on_failure(generators: tuple[torch.Generator, ...]) -> Iterator[None]:
    """Where the run fails, put the generators back, so that it can be repeated."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise


class Repeats(Protocol):
    """Another way to make repeated draws, where a generator cannot be read on the host (CUDA graphs)."""

    def first(self, generator: torch.Generator) -> Tensor:
        """In place of ``generator_state``."""

    def again(self, state: Tensor, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        """In place of ``repeat_draw``."""


_repeats: ContextVar[Repeats | None] = ContextVar("repeats", default=None)


@contextlib.contextmanager
def repeats_by(repeats: Repeats | None) -> Iterator[None]:
    """Have generated code that runs inside make its repeated draws so; None: as always."""
    token = _repeats.set(repeats)
    try:
        yield
    finally:
        _repeats.reset(token)
