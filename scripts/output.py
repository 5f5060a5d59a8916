"""Standard output is for results alone, and says in one sentence where they cannot be written."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from graphs.errors import BeladyError
from planner.live import on_terminal

from .entry import BAD_INPUT, INTERRUPTED


class OutputLost(BeladyError):
    """Standard output does not take what is written to it."""


class _Raw(io.FileIO):
    """File descriptor 1, its errors told apart from those of other files."""

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)
        self.lost = False

    def write(self, data: Any, /) -> int:
        if self.lost:  # said once; what is still buffered goes nowhere
            return len(memoryview(data).cast("B"))
        try:
            return super().write(data)
        except OSError as error:
            self.lost = True
            raise OutputLost(f"cannot write to standard output: {error.strerror or error}") from error


@contextmanager
def standard_output() -> Iterator[None]:
    """Within, failing to write to ``sys.stdout`` raises OutputLost; all is written when it ends. Raises it at once where it is
    closed, before anything is computed for nobody.
    """
    if sys.stdout is None:
        raise OutputLost("standard output is closed; send it to /dev/null where it is not wanted")
    if sys.stdout is not sys.__stdout__:  # somebody else has taken it over
        yield
        return
    before = sys.__stdout__
    before.flush()
    buffer = io.BufferedWriter(_Raw())
    # What the terminal's encoding does not have is written escaped, as on standard error.
    sys.stdout = io.TextIOWrapper(buffer, before.encoding, "backslashreplace", line_buffering=before.isatty())
    try:
        yield
    finally:
        written, sys.stdout = sys.stdout, before
        written.close()


@contextmanager
def computing() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, silence elsewhere. Within, whatever libraries or a user's own code print goes to standard
    error: compiled ones to file descriptor 1, Python's to ``sys.stdout``.
    """
    with redirect_stdout(sys.stderr), _descriptor_1_is_stderr(), on_terminal("starting") as status:
        yield status


def printable(text: str) -> str:
    """Text of a line with what cannot be printed escaped, as what sets colours or ends lines of a terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def tell(sentence: object) -> None:
    """Say something on standard error, as the command ``belady``; nothing where that takes nothing."""
    with suppress(OSError):
        print(f"belady: {sentence}", file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    """A bar on a terminal, silence elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:], MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _descriptor_1_is_stderr() -> Iterator[None]:
    try:
        real = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # an embedding program without these descriptors; nothing to protect
        yield
        return
    try:
        yield
    finally:
        os.dup2(real, 1)
        os.close(real)


@contextmanager
def heeded() -> Iterator[None]:
    """Where Ctrl-C comes within, raise KeyboardInterrupt at the end, even if a search then made do with its best until then.

    For what does not say whether its plan is such a one, as a compiled step.
    """
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if callable(before):
            before(number, frame)

    if callable(before):  # in the background of some shells the signal is ignored
        signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def ended(program: str, work: Callable[[], int], *, goes_on: bool = True) -> int:
    """Do ``work``; the exit code it returns. What was wrong, or that it was interrupted, is one sentence on standard error.

    goes_on  whether what was done until then is not done again
    """
    try:
        return work()
    except BeladyError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{program}: interrupted" + "; the same command goes on from here" * goes_on, file=sys.stderr)
        return INTERRUPTED
