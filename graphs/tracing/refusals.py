"""What to say where a trace fails. [torch]"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from graphs.errors import CaptureError
from graphs.torch_private.compiling import is_of_the_model
from graphs.torch_private.names import (
    DATA_DEPENDENT,
    LOOKS_FOR_CAUSAL,
)
from graphs.tracing.constants import Constants
from graphs.watching.calls import written_elsewhere


def refusal(name: str, error: Exception) -> CaptureError:
    """What to say where a trace fails."""
    if any(frame.name == LOOKS_FOR_CAUSAL for frame in traceback.extract_tb(error.__traceback__)):
        return CaptureError(
            f"{name} gives a mask to PyTorch's transformer layers, which look into it to see whether it is causal"
            f"{_place(error)}; say so in that call (is_causal=, for the mask of a target tgt_is_causal=): True where it is, else "
            f"False"
        )
    if isinstance(error, DATA_DEPENDENT) or "its data is not allocated yet" in str(error):  # that is read past the dispatcher
        if "aten.equal" in str(error) and "istft" in _place(error):
            remedy = "give istft a window that is made in the forward (torch.hann_window), since it checks what that sums up to"
        elif "aten._pack_padded_sequence" in str(error):
            remedy = (
                f"up to {Constants.MOST_INTEGERS} lengths in a tensor are asked for in each call; give more of them as a list, "
                f"which is the same in each call, or train without a plan, in a block of online.budget"
            )
        elif "aten.nonzero" in str(error) and not _place(error):
            remedy = (
                "that is in a derivative; where it is that of an embedding with padding_idx, use dense gradients (sparse=False), "
                "where it is that of x[mask] = value, torch.where"
            )
        elif re.search(r":\d+: assert\b", _place(error)):
            remedy = "that is a check of numbers: let it compare tensors, as in assert (x > 0).all(), or leave it out"
        elif re.search(r"layer_?drop|dropout_prob|\brand\(", _place(error)):
            remedy = (
                "where that leaves layers out by chance, each step has another graph: set the probability (layerdrop) to 0, or "
                "train without a plan, in a block of online.budget"
            )
        else:
            remedy = (
                "rewrite that part with torch.where or masks of fixed shape, give the model what it computes there, or "
                "train without a plan, in a block of online.budget"
            )
        return CaptureError(
            f"{name} branches on data, or has shapes that depend on it ({_first_line(error)}{_place(error)}); {remedy}"
        )
    if leaves_torch(error):
        return CaptureError(
            f"{name} computes with numpy in its forward or loss{_place(error)}, which a captured step cannot do again; compute "
            f"with torch, give what comes of it as an input, or train without a plan, in a block of online.budget"
        )
    if isinstance(error, SyntaxError) and "aten.random.from(" in (error.text or ""):  # ``from`` is a keyword
        return CaptureError(f"{name} calls random_ with two bounds, which PyTorch's tracer cannot write down; call torch.randint")
    if isinstance(error, TypeError) and "cannot assign" in str(error) and "as parameter" in str(error):
        return CaptureError(
            f"{name} assigns a parameter in its forward{_place(error)}; write into it in place, under torch.no_grad() and by a "
            f"method (parameter.mul_(0.9))"
        )
    if "entirely functional graph" in str(error):
        return CaptureError(written_elsewhere(name))
    if "ViewBaseAOTInput" in str(error) or "non-differentiable view input mutations" in str(error):
        return CaptureError(
            f"{name} changes a tensor in its forward whose memory another buffer, parameter or input has too; give each its own"
        )
    if reads_an_earlier_call(error):
        return CaptureError(
            f"{name} does not do the same in every call (it reads a tensor that an earlier call has made{_place(error)}), as a "
            f"captured step would; where the first call fills a cache, run the model once before"
        )
    nested = str(Path(torch.nested.__file__).parent)
    if any(frame.filename.startswith(nested) for frame in traceback.extract_tb(error.__traceback__)):
        return CaptureError(
            f"{name} makes a nested tensor{_place(error)}, which cannot be captured; pad it, or train without a plan, in a block "
            f"of online.budget"
        )
    targets = isinstance(error, TypeError) and "forward() takes" in str(error)
    remedy = "; where the last inputs are targets, give the loss that takes them as loss=" if targets else ""
    return CaptureError(f"{name} cannot be traced: {told(error)}{remedy}")


def leaves_torch(error: BaseException) -> bool:
    """Whether a call makes an array of numpy of a tensor that it has computed."""
    return isinstance(error, RuntimeError) and ".numpy() is not supported" in str(error)


def reads_an_earlier_call(error: BaseException) -> bool:
    """Whether a call reads a tensor that an earlier one has made. From torch 2.13 on it can, and the calls are seen to differ."""
    return "in tensor_tracker" in str(error)


def told(error: Exception) -> str:
    """An error of somebody else's code, in one line: what it is, and where it comes from."""
    return f"{type(error).__name__}: {_first_line(error)}{_place(error)}"


def _place(error: Exception) -> str:
    """Where in the model or its libraries an error comes from, for a message."""
    return place_among(traceback.extract_tb(error.__traceback__))


def place_among(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost of these frames that is in the model or its libraries, for a message."""
    frame = innermost(frames)
    return "" if frame is None else f", at {frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}: {frame.line}"


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost of these frames that is in the model or its libraries."""
    others = (frame for frame in reversed(frames) if is_of_the_model(frame.filename))
    return next(others, None)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def written_late(name: str, what: str) -> str:
    """What to say where a backward writes to what a step has from before it."""
    return (
        f"{name} changes {what} in its backward (in a hook or a function of its own), and a captured step changes buffers in its "
        f"forward only; change it there, or outside of the step"
    )
