"""numba with types, and with a cache on disk that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

log = logging.getLogger("belady")
F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """``numba.njit``, cached where that can be, with the function's types; numba's own say that what it compiles takes nothing.

    It keeps the interpreter's lock: without it, Ctrl-C that comes when compiled code ends becomes a SystemError.
    """
    compiled: Any = numba.njit(function)
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


untyped: Any = njit  # the same for functions without types


@cache
def _tell_uncached() -> None:
    log.warning(
        "compiled code cannot be kept on disk, so each process takes some seconds to make it again: "
        "set NUMBA_CACHE_DIR to a folder with room that can be written to"
    )
