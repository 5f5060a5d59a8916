"""numba with types, and with a cache on disk that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.event import Event, Listener, register

from planner.process import clock

log = logging.getLogger("belady")
F = TypeVar("F", bound=Callable[..., object])
_own: set[Callable[..., object]] = set()


def njit(function: F) -> F:
    """``numba.njit``, cached where that can be, with the function's types; numba's own say that what it compiles takes nothing.

    It keeps the interpreter's lock: without it, Ctrl-C that comes when compiled code ends becomes a SystemError.
    """
    compiled: Any = numba.njit(function)
    _own.add(function)
    try:
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # neither beside the source nor in the user's folders: a container with another user, say
        _tell_uncached()
    return cast(F, compiled)


class _Cache(FunctionCache):
    """Machine code on disk. numba would raise where what is there is damaged, or the disk is full."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # damaged pickles raise almost anything
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None  # it is compiled again

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            _tell_uncached()


class _Compilations(Listener):
    """Stops the clock of time limits while numba compiles what ``njit`` was given, and tells of the first time."""

    depth = 0  # functions are compiled within others

    def on_start(self, event: Event) -> None:
        if _is_own(event):
            if self.depth == 0:
                _tell_compiling()
                clock.stand_still()
            self.depth += 1

    def on_end(self, event: Event) -> None:
        if _is_own(event):
            self.depth -= 1
            if self.depth == 0:
                clock.go_on()


def _is_own(event: Event) -> bool:
    return event.data["dispatcher"].py_func in _own


register("numba:compile", _Compilations())  # type: ignore[no-untyped-call]
untyped: Any = njit  # the same for functions without types


@cache
def _tell_compiling() -> None:
    log.warning("compiling code for this machine, once: it may take a minute, which no time limit counts")


@cache
def _tell_uncached() -> None:
    log.warning(
        "compiled code cannot be kept on disk, so each process takes some seconds to make it again: "
        "set NUMBA_CACHE_DIR to a folder with room that can be written to"
    )
