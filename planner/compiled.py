"""numba with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """``numba.njit``, cached, with the types of the function; numba's own say that what it compiles takes nothing.

    It keeps the interpreter's lock: without it, Ctrl-C that comes when compiled code ends becomes a SystemError.
    """
    compiled: Any = numba.njit(cache=True)(function)
    return cast(F, compiled)
