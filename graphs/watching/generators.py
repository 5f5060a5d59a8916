"""Random generators while a forward is traced: nothing is drawn, and none may be seeded. [torch]"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs.errors import CaptureError
from graphs.torch_private.names import FakeTensorMode, OpOverload, tree_leaves
from graphs.torch_private.stand_ins import stand_ins_by

_FIRST_SEED = 0x5EED << 48  # of those that draws of a trace leave behind; unlike any that somebody gives


@contextlib.contextmanager
def seeding_refused(name: str, where: torch.device) -> Iterator[Callable[[], None]]:
    """Refuse that what is traced seeds a generator or sets its state, which is no operator call. To be called at its end.

    Nothing is drawn in a trace, and a state put back would be the one that is there. So each draw gives the generators another
    seed, and looks whether they still have the one from before. Afterwards they are as they were.
    """
    seed = _FIRST_SEED
    before: dict[torch.Generator, Tensor] = {}

    def watch(generators: Iterable[torch.Generator]) -> None:
        nonlocal seed
        for generator in generators:
            if generator not in before:
                before[generator] = generator.get_state()
        seed += 1
        for generator in before:
            generator.manual_seed(seed)

    def look() -> None:
        if any(generator.initial_seed() != seed for generator in before):
            raise CaptureError(
                f"{name} seeds a generator or sets its state, but a captured step would draw other numbers; keep what is drawn, "
                f"or seed before the step"
            )

    def call(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
        if isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            look()
            watch(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        return plain()

    try:
        on_cuda = torch.cuda.default_generators if where.type == "cuda" else ()  # none where there is no such device
        watch([torch.default_generator, *on_cuda])
        with stand_ins_by(call):
            yield look
    finally:
        for generator, state in before.items():
            generator.set_state(state)


def numbers_now() -> tuple[object, ...]:
    """States of the generators that are not torch's: Python's own, numpy's where it is there."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), (kind, key.tobytes(), *rest)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators that are not torch's back afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
