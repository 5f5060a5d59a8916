"""Random generators while a forward is traced: nothing is drawn, and none may be seeded. [torch]"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphs.errors import CaptureError
from graphs.torch_private.names import FakeTensorMode, OpOverload, tree_leaves
from graphs.torch_private.patching import patched
from graphs.torch_private.stand_ins import stand_ins_by
from graphs.watching.unseen import is_another

_FIRST_SEED = 0x5EED << 48  # of those that draws of a trace leave behind; unlike any that somebody gives
# What sets the states of the generators that all threads have in common. Methods of the generators cannot be replaced.
_SEEDS = (
    (torch, "manual_seed"),
    (torch, "set_rng_state"),
    (torch.random, "manual_seed"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch.cuda.random, "set_rng_state"),
)


@contextlib.contextmanager
def seeding_refused(name: str, where: torch.device) -> Iterator[Callable[[], None]]:
    """Refuse that what is traced seeds a generator or sets its state, which is no operator call. To be called at its end.

    Nothing is drawn in a trace, and a state put back would be the one that is there. So each draw gives the generators another
    seed, and looks whether they still have the one from before. Afterwards they are as they were.

    Other threads may set states by PyTorch's functions, as their checkpoints do: those are what is put back.
    """
    seed, here, lock = _FIRST_SEED, threading.get_ident(), threading.RLock()
    before: dict[torch.Generator, Tensor] = {}  # what the program has in them
    left: dict[torch.Generator, int] = {}  # the seed each was left with
    behind: dict[tuple[torch.Generator, int], Tensor] = {}  # what the program had when that seed was given
    seeded = False

    def watch(generators: Iterable[torch.Generator]) -> None:
        nonlocal seed
        with lock:
            for generator in generators:
                if generator not in before:
                    before[generator] = generator.get_state()
            seed += 1
            for generator, state in before.items():
                generator.manual_seed(seed)
                left[generator], behind[generator, seed] = seed, state

    def notice() -> None:
        nonlocal seeded
        seeded = seeded or any(generator.initial_seed() != left[generator] for generator in before)

    def look() -> None:
        with lock:
            notice()
        if seeded:
            raise CaptureError(
                f"{name} seeds a generator or sets its state, but a captured step would draw other numbers; keep what is drawn, "
                f"or seed before the step"
            )

    def call(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
        if isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            look()
            watch(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        return plain()

    def by_others(original: Callable[..., Any]) -> Callable[..., Any]:
        def seeds(*args: Any, **kwargs: Any) -> Any:
            if not is_another(here):
                return original(*args, **kwargs)
            with lock:
                notice()
                result = original(*args, **kwargs)
                for generator in before:
                    left[generator] = now = generator.initial_seed()
                    before[generator] = behind[generator, now] if (generator, now) in behind else generator.get_state()
            return result

        return seeds

    try:
        on_cuda = torch.cuda.default_generators if where.type == "cuda" else ()  # none where there is no such device
        watch([torch.default_generator, *on_cuda])
        with contextlib.ExitStack() as stack:
            for owner, attribute in _SEEDS:
                stack.enter_context(patched(owner, attribute, by_others(getattr(owner, attribute))))
            stack.enter_context(stand_ins_by(call))
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
