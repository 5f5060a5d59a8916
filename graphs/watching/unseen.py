"""What changes a step's numbers and is no operator call, so that a trace would leave it out. [torch]"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.torch_private.patching import patched
from graphs.torch_private.stand_ins import Given


@contextlib.contextmanager
def unseen_refused(name: str, where: str, given: Given | None = None) -> Iterator[None]:
    """Refuse what changes a step's numbers and is no operator call, so that a trace would leave it out.

    ``given``: takes what a forward assigns to ``.data``; None in a backward, where nothing can be assigned.

    What the program's other threads do meanwhile is no matter of the step, but for the default dtype, which all have in common.
    """
    here = threading.get_ident()

    def refusal(what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(f"{name} {what}")

        return refuse

    def instead(refuse: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (plain if is_another(here) else refuse)(*args, **kwargs)

    def assign(one: Tensor, value: Any) -> None:
        if value is one:  # ``Module.to``, of that type already
            return
        why = "that of a tensor, as a captured step cannot do after it" if given is None else given.give(one, value)
        if why is not None:
            raise CaptureError(f"{name} assigns a .data in its {where}: {why}; write into the tensor in place")

    def look(one: Tensor, *value: Any) -> Any:
        whose = None if given is None else given.name_of(one)
        if whose is not None and not _looks_for_torch(sys._getframe(2)):
            raise CaptureError(
                f"{name} {'sets' if value else 'reads'} the gradient of {whose} (.grad) in its {where}, which a captured step "
                f"knows nothing of; do that outside of the step"
            )
        return grad.__set__(one, *value) if value else grad.__get__(one)

    packs = refusal(
        f"packs saved tensors by hooks (saved_tensors_hooks) in its {where}, which a captured step would not call; take them "
        f"away, a plan saves memory in their place"
    )
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_known(one: Any) -> None:
        (packs if type(one) is hooks else enter)(one)  # checkpoints and the like, which change no numbers, have their own class

    sets_dtype = refusal(
        f"sets another default dtype in its {where}, which a captured step would not see; give each tensor its dtype"
    )
    set_dtype = torch.set_default_dtype

    def set_same(dtype: torch.dtype) -> None:
        (set_dtype if dtype is torch.get_default_dtype() else sets_dtype)(dtype)

    rounds = refusal(
        f"calls F.bilinear under autocast in its {where}, which rounds inside of that operator where a captured step, with its "
        f"casts in the graph, would not; leave the region for that call (torch.autocast(..., enabled=False))"
    )

    def bilinear(input1: Tensor, *others: Any, **named: Any) -> Tensor:
        known = not torch.is_autocast_enabled(input1.device.type)
        result: Tensor = (torch_bilinear if known else rounds)(input1, *others, **named)
        return result

    torch_bilinear = torch.bilinear
    data: Any = Tensor.data
    grad: Any = Tensor.grad
    drop = instead(look, grad.__set__)
    with (
        patched(torch, "bilinear", instead(bilinear, torch_bilinear)),
        patched(nn.functional, "bilinear", instead(bilinear, torch_bilinear)),
        patched(Tensor, "data", property(data.__get__, instead(assign, data.__set__))),
        patched(Tensor, "grad", property(instead(look, grad.__get__), instead(look, grad.__set__), lambda one: drop(one, None))),
        patched(hooks, "__enter__", instead(enter_known, enter)),
        patched(torch, "set_default_dtype", set_same),
    ):
        yield


@contextlib.contextmanager
def gradient_mode_noted(askers: set[str]) -> Iterator[None]:
    """Note which Python modules ask inside whether gradients are recorded, so that a call without them may do something else.

    Of PyTorch's own that is its attention, which has a fast path, where it asks about tensors that require a gradient: what else
    asks, as checkpoints do, computes the same.
    """
    original, here = torch.is_grad_enabled, threading.get_ident()

    def is_grad_enabled() -> bool:
        if threading.get_ident() == here:
            frame = sys._getframe(1)
            asker = str(frame.f_globals.get("__name__"))
            about = frame.f_locals.get("tensor_args", ()) if asker.startswith("torch.nn.modules.") else ()
            differs = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in about)
            if differs or asker.partition(".")[0] not in ("torch", "graphs"):
                askers.add(asker)
        return original()

    with patched(torch, "is_grad_enabled", is_grad_enabled):
        yield


def _looks_for_torch(frame: FrameType) -> bool:
    """Whether this is PyTorch's own look at a gradient, which changes no numbers: the tracer's, or that of ``Module.to``."""
    asker = str(frame.f_globals.get("__name__"))
    return asker.startswith(("torch._", "torch.fx.")) or (asker == "torch.nn.modules.module" and frame.f_code.co_name == "_apply")


def is_another(thread: int) -> bool:
    """Whether this thread is one that the program has started, and not that one; nor one of autograd's, which run backwards on
    other devices than the CPU, and which Python's ``threading`` does not know."""
    now = threading.get_ident()
    started = (each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread))
    return now != thread and now in started
