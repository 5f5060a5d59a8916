"""numba with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """``numba.njit``, cached, with the types of the function; numba's own say that what it compiles takes nothing.

    Other threads may go on meanwhile: solvers do.
    """
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    return cast(F, compiled)
