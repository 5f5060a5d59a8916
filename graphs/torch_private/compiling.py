"""Who asks torch whether it is being compiled, and who is told so. [torch]

Libraries leave checks and shortcuts that look at data to eager execution: ``if not is_compiling() and mask.all()``.
Told everybody, the same answer may choose another computation somewhere else. So only those functions are told so in which a
trace has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

import graphs
from graphs.torch_private.patching import patched

_ROOM = Path(graphs.__file__).parent
# torchvision is not torch; the last are imports
_OURS = (*(f"{room}{os.sep}" for room in (Path(torch.__file__).parent, _ROOM, _ROOM.with_name("planner"))), "<frozen")
NEAR = 6  # functions inside of each other: who is further out asks for reasons of its own
_PASSES_ON = re.compile("compiling|exporting|tracing|dynamo")  # what functions are called that only ask for others


def is_of_the_model(filename: str) -> bool:
    """Whether code in this file is of the model or its libraries, not torch's or ours."""
    return not filename.startswith(_OURS)


class _Flag:
    """In place of the flag that ``is_compiling`` returns, under whatever name it was imported: who looks at it, asks."""

    def __init__(self, is_told: Callable[[], bool]) -> None:
        self._is_told = is_told

    def __bool__(self) -> bool:
        return self._is_told()

    def __and__(self, other: bool) -> bool:
        return bool(self) & other

    def __or__(self, other: bool) -> bool:
        return bool(self) | other

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    __rand__, __ror__, __hash__ = __and__, __or__, object.__hash__


@contextlib.contextmanager
def told_to_compile(told: Collection[CodeType], asking: set[CodeType]) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true for the functions that are ``told`` so, and note all those that ask.

    Checks of data that they then leave to the compiler (``torch._check_tensor_all``) become operators, which check at run time.
    """
    check: Any = torch._check_tensor_all_with

    def is_told() -> bool:
        code = _asking(sys._getframe(2))
        if code is not None:
            asking.add(code)
        return code in told

    def check_when_run(error: type[Exception], condition: Tensor, message: Callable[[], object] | None = None) -> None:
        if is_told():
            _check_when_run(error, condition, message)
        else:
            check(error, condition, message)

    flag = _Flag(is_told)
    with patched(torch.compiler, "_is_compiling_flag", flag), patched(torch, "_check_tensor_all_with", check_when_run):
        yield


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """The same for everybody, threads of others among them."""
    with patched(torch.compiler, "_is_compiling_flag", True), patched(torch, "_check_tensor_all_with", _check_when_run):
        yield


def next_to_tell(error: BaseException, asking: Collection[CodeType], told: Collection[CodeType]) -> CodeType | None:
    """Of the functions that an error comes from, the innermost that asks and is not told."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((code for code in _innermost(reversed(frames)) if code in asking and code not in told), None)


def places_of(error: BaseException) -> list[tuple[CodeType, int]]:
    """The functions of the model and its libraries that an error comes through, and their lines."""
    places = ((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [place for place in places if is_of_the_model(place[0].co_filename)]


def is_to_be_told(asking: Collection[CodeType], told: Collection[CodeType]) -> bool:
    """Whether this is called for a function that asks and is not told."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(code in asking and code not in told for code in _innermost(frames))


def _innermost(frames: Iterable[FrameType]) -> Iterator[CodeType]:
    """Functions of the model and its libraries: the one that looks at data, and those that may have called it for that."""
    codes = (frame.f_code for frame in frames)
    return itertools.islice((code for code in codes if is_of_the_model(code.co_filename)), NEAR)


def _asking(frame: FrameType) -> CodeType | None:
    """The function of the model or its libraries that asks, not the ones that it asks by."""
    codes = (caller.f_code for caller, _ in traceback.walk_stack(frame))
    return next((code for code in codes if is_of_the_model(code.co_filename) and not _PASSES_ON.search(code.co_name)), None)


def _check_when_run(error: type[Exception], condition: Tensor, message: Callable[[], object] | None = None) -> None:
    torch._assert_async(condition.all(), "a check of data failed" if message is None else str(message()))
