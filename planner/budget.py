"""Budgets: bytes as users write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real

from graphs.errors import InputError, quoted

EXACT = 2**53  # every whole number up to here is a float
MOST = 10**300  # no whole number up to here is too large for a float
WRITTEN = 10**1000  # Python writes whole numbers up to here, and some beyond
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def resolve_budget(budget: int | float | str, keep_all_peak_bytes: int) -> int:
    """Bytes of a budget.

    budget  bytes as an int or as text with a unit ("6GiB", "500 MB", "1.5e9"), or a float (or its text, "0.5" or "50%") in
            (0, 1]: that share of the keep-all peak, rounded down. Any integers and reals will do, as numpy's

    Raises InputError on anything else.
    """
    given = _parsed(budget)
    if isinstance(given, float):  # beyond 2**53 bytes, a product of floats would not be whole bytes
        return int((given if keep_all_peak_bytes <= EXACT else Fraction(given)) * keep_all_peak_bytes)
    if given <= 0 and not given == keep_all_peak_bytes == 0:  # a graph that holds nothing needs nothing
        raise _unusable(budget)
    return given


def listed(budgets: Iterable[int | float | str] | int | float | str, what: str) -> list[int | float | str]:
    """Several budgets, or one, as a list. Raises InputError for what cannot be used; ``what`` names the function it was given."""
    if isinstance(budgets, Real | str):
        budgets = [budgets]
    if not isinstance(budgets, Iterable) or isinstance(budgets, bytes | bytearray) or getattr(budgets, "ndim", 1) == 0:
        raise InputError(f"{what} takes a list of budgets, not {quoted(budgets)}")
    budgets = list(budgets)
    for budget in budgets:
        is_share(budget)
    return budgets


def is_share(budget: int | float | str) -> bool:
    """Whether a budget is a share of the keep-all peak. Raises InputError as ``resolve_budget`` does."""
    return isinstance(_parsed(budget), float)


def _parsed(budget: int | float | str) -> int | float:
    """Bytes, or a share."""
    if isinstance(budget, bool) or not isinstance(budget, Real | str):
        raise _unusable(budget)
    if isinstance(budget, str):
        if share := re.fullmatch(r"\s*([0-9]{0,3}\.?[0-9]{1,30})\s*%\s*", budget):
            if not 0 < Fraction(share[1]) <= 100:
                raise _unusable(budget)
            return float(Fraction(share[1]) / 100)
        match = re.fullmatch(r"\s*([0-9]{0,30}\.?[0-9]{1,30}(?:e[+-]?[0-9]{1,2})?)\s*([a-z]*)\s*", budget.lower())
        if match is None or match[2] not in _UNITS:
            raise _unusable(budget)
        number = Fraction(match[1])  # exact, also beyond 2**53
        if not match[2] and number <= 1:
            if not number:
                raise _unusable(budget)
            return float(number)
        if not match[2] and (number.denominator != 1 or re.fullmatch(r"[0-9]*\.[0-9]*", match[1])):
            raise _unusable(budget)  # "1.5" is neither bytes nor a share; nor is "2.0", which looks like one
        budget = int(number * _UNITS[match[2]])
    if isinstance(budget, Integral):
        if budget > WRITTEN:
            raise _unusable(budget)
        return int(budget)
    if not 0 < budget <= 1:
        raise _unusable(budget)
    return float(budget)


def _unusable(budget: object) -> InputError:
    return InputError(
        f"budget {quoted(budget)}: give bytes (6442450944 or '6GiB') or a share of the keep-all peak in (0, 1] (0.5)"
    )


def format_bytes(size_bytes: int) -> str:
    """Three significant digits in the binary unit that fits: "1.53 GiB"."""
    if size_bytes > MOST:
        return f"{Decimal(size_bytes) / 2**40:.3g} TiB"
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def share_of(size_bytes: int, whole_bytes: int) -> float | None:
    """Bytes as a share of others; None where those are none, and for numbers of hundreds of digits."""
    return size_bytes / whole_bytes if whole_bytes and size_bytes <= MOST else None


def format_share(share: float) -> str:
    """Whole per cent: "50%"; no more digits than tell something."""
    return f"{share:.0%}" if share < 100 else f"{100 * share:.3g}%"
