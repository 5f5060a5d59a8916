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
from graphs.errors import InputError
from graphs.rewriting.nodes import attribute, calls_foreign, tensors_of
from graphs.torch_private.names import no_dispatch

# What a call draws from: a generator, or the default one of a device, or several of them.
Where = torch.device | torch.Generator | tuple[torch.device | torch.Generator, ...]


def generator_state(where: Where) -> Tensor:
    """State of what a call draws from, on the host; of several, one after the other. Called by generated code."""
    repeats = _repeats.get()
    if repeats is not None:  # code that draws on the host is not recorded
        return repeats.first(_generators(where)[0])
    if isinstance(where, tuple):
        with no_dispatch():  # bookkeeping; who looks on has no part in it
            return torch.cat([generator.get_state() for generator in _generators(where)])
    return _generator(where).get_state()


def drawn(before: Tensor, where: Where) -> Tensor:
    """What ``repeat_draw`` needs to know of a first draw: the state before it, and the one it has left, which is the one now.
    Called by generated code."""
    if _repeats.get() is not None:
        return before
    now = generator_state(where)
    with no_dispatch():
        return torch.cat((before, now))


def repeat_draw(states: Tensor, where: Where, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call again with the generators in the state of its first run; they are as before afterwards.

    states  as ``drawn`` gives them

    Called by generated code. Raises InputError where this leaves the generators in another state than the first run did: another
    thread has drawn from them meanwhile, now or then.
    """
    generators = _generators(where)
    if (repeats := _repeats.get()) is not None:
        return repeats.again(states, generators[0], functools.partial(call, *args, **kwargs))
    now = [generator.get_state() for generator in generators]
    before, after = _apart(states, [each.numel() for each in now])
    try:
        for generator, each in zip(generators, before, strict=True):
            generator.set_state(each)
        result = call(*args, **kwargs)
        left = generator_state(where)
    finally:
        for generator, each in zip(generators, now, strict=True):
            generator.set_state(each)
    with no_dispatch():
        same = torch.equal(after, left)
    if not same:
        raise InputError(
            f"another thread has drawn random numbers from the default generator of {generators[0].device} while this step drew "
            f"from it, so the step cannot draw the same numbers again; give that thread a torch.Generator of its own"
        )
    return result


def generator_state_like(call: fx.Node) -> Tensor:
    """What ``drawn`` returns for a random call, as a fake tensor beside those of the call."""
    node = generator_node(call)
    where = draws_from(call) if node is None else attribute(node)
    with no_dispatch():
        size = 2 * generator_state(where).numel()
    with tensors_of(call)[0].fake_mode:  # type: ignore[attr-defined]
        return torch.empty(size, dtype=torch.uint8)


def _apart(states: Tensor, sizes: list[int]) -> tuple[list[Tensor], Tensor]:
    """The states of each generator before a draw, each at the beginning of a storage, where ``set_state`` reads; and all of them
    after it, one after the other."""
    size = sum(sizes)
    with no_dispatch():
        before, after = states.narrow(0, 0, size), states.narrow(0, size, size)
        if len(sizes) == 1:
            return [before], after
        return [state.clone() for state in before.split(sizes)], after  # type: ignore[no-untyped-call]


def _generators(where: Where) -> list[torch.Generator]:
    return list(map(_generator, where if isinstance(where, tuple) else (where,)))


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


def draws_from(call: fx.Node) -> Where:
    """The generator a random call draws from, or the device whose default generator it uses; operators that are none of PyTorch's
    own may draw on the host too."""
    node = generator_node(call)
    if node is None:
        device, host = tensors_of(call)[0].device, torch.device("cpu")
        return (device, host) if device != host and calls_foreign(call) else device
    given: torch.Generator = attribute(node)
    return given


def generators_of(step: Step) -> tuple[torch.Generator, ...]:
    """All generators the step draws from."""
    random = (call for call, op in zip(step.calls, step.graph.ops, strict=True) if op.random)
    return tuple(dict.fromkeys(generator for call in random for generator in _generators(draws_from(call))))


@contextlib.contextmanager
def undone_on_failure(generators: tuple[torch.Generator, ...]) -> Iterator[None]:
    """Where the run fails, put the generators back, so that it can be repeated."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except GeneratorExit:  # this was left by an interrupt between two lines of Python's own, and is collected only now
        raise
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise


class Repeats(Protocol):
    """Another way to make repeated draws, where a generator cannot be read on the host (CUDA graphs)."""

    def first(self, generator: torch.Generator) -> Tensor:
        """In place of ``generator_state``."""

    def again(self, state: Tensor, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        """In place of ``repeat_draw``; ``state`` as ``first`` gave it."""


_repeats: ContextVar[Repeats | None] = ContextVar("repeats", default=None)


@contextlib.contextmanager
def repeats_by(repeats: Repeats | None) -> Iterator[None]:
    """Have generated code that runs inside make its repeated draws so; None: as always."""
    token = _repeats.set(repeats)
    try:
        yield
    finally:
        _repeats.reset(token)
