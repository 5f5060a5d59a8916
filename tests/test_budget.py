"""Budgets as users write them, and bytes as people read them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from graphs import InputError
from planner.budget import format_bytes, format_share, is_share, resolve_budget, share_of

PEAK = 1_000_003


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (1, 1),
        (6442450944, 6442450944),
        ("6442450944", 6442450944),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no float in between
        ("6GiB", 6 * 2**30),
        ("6 GiB", 6 * 2**30),
        (" 6gib ", 6 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("500 MB", 500_000_000),
        ("0.1GB", 100_000_000),  # exact, where 0.1 * 1e9 happens to be too
        ("2.3 TiB", 23 * 2**40 // 10),
        ("3KiB", 3072),
        ("3kB", 3000),
        ("17 B", 17),
        ("2B", 2),
        ("1B", 1),
        ("1.5e9", 1_500_000_000),
        ("1e6", 1_000_000),
        ("2e-1 kB", 200),
        (0.5, 500_001),
        ("0.5", 500_001),
        (".5", 500_001),
        ("5e-1", 500_001),
        (1.0, PEAK),
        ("1.0", PEAK),
        ("1", PEAK),
        ("50%", 500_001),
        (" 12.5 % ", PEAK // 8),
        ("100%", PEAK),
        (1e-6, 1),
        (np.int64(7), 7),
        (np.float64(0.5), 500_001),
        (np.float32(0.5), 500_001),
        (np.float16(0.5), 500_001),
        (np.uint8(7), 7),
        (Fraction(1, 2), 500_001),
    ],
)
def test_budgets_in_bytes(budget: int | float | str, size_bytes: int) -> None:
    found = resolve_budget(budget, PEAK)
    assert found == size_bytes and type(found) is int


@pytest.mark.parametrize("peak_bytes", [2**53 - 1, 2**53 + 1, 2**60 + 1, 2**61 - 1, pytest.param(10**400 + 1, id="10**400")])
def test_shares_of_more_bytes_than_floats_hold_are_exact(peak_bytes: int) -> None:
    assert [resolve_budget(whole, peak_bytes) for whole in (1.0, "1.0", "100%", np.float64(1))] == [peak_bytes] * 4
    assert resolve_budget(0.5, peak_bytes) == peak_bytes // 2


@pytest.mark.parametrize(
    "budget",
    [
        0, -1, 0.0, -0.5, 1.0001, 2.0, float("nan"), float("inf"), float("-inf"), True, False, None, [0.5], b"5",
        np.float32(0), np.float32(1.5), np.float32("nan"), np.bool_(True), Fraction(3, 2), 1j,
        "", "GiB", "six", "6 XB", "6GiBs", "6 Gi B", "-1", "-6GiB", "0", "0.0", "0 GiB", "1.5", "2.0", "0.3B",
        "1e999", "1e400GiB", "nan", "inf", "0%", "101%", "-5%", "%", "50%%", "50 % B", "5,000", "0x10", "1_000", "6.", "1e",
        "9" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_would_do(budget: object) -> None:
    with pytest.raises(InputError, match=r"give bytes \(6442450944 or '6GiB'\) or a share of the keep-all peak in \(0, 1\]"):
        resolve_budget(budget, PEAK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (999 * 1024, "999 KiB"),
        (999 * 1024 + 600, "0.976 MiB"),  # not "1e+03 KiB"
        (1536 * 2**20, "1.5 GiB"),
        (123 * 2**30, "123 GiB"),
        (5 * 2**40, "5 TiB"),
        (-2048, "-2 KiB"),
        pytest.param(10**400, "9.09e+387 TiB", id="digits"),
    ],
)
def test_bytes_as_text(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_a_graph_that_holds_nothing_needs_nothing() -> None:
    assert resolve_budget(0.5, 0) == resolve_budget(0, 0) == 0
    with pytest.raises(InputError, match="give bytes"):
        resolve_budget(-1, 0)


@pytest.mark.parametrize(
    ("budget", "share"), [(0.5, True), ("0.5", True), (1.0, True), (1, False), ("1", True), ("6GiB", False), (2, False)]
)
def test_shares_are_told_from_bytes(budget: int | float | str, share: bool) -> None:
    assert is_share(budget) == share


@pytest.mark.parametrize("budget", ["9" * 5000, [0.5] * 5000, pytest.param(10**5000, id="digits")])
def test_of_what_is_long_the_beginning_is_told(budget: object) -> None:
    with pytest.raises(InputError, match="give bytes") as caught:
        resolve_budget(budget, PEAK)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_shares_of_any_size() -> None:
    assert [format_share(share) for share in (0.005, 0.5, 1.0, 12.345, 9e97)] == ["0%", "50%", "100%", "1234%", "9e+99%"]
    assert (share_of(1, 2), share_of(1, 0), share_of(10**400, 1)) == (0.5, None, None)
