"""Rows of random layered graphs, and the table drawn from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from belady import bench_layered
from belady.bench_layered import row_of
from belady.readme_tables import layered
from belady.rows import read_rows
from graphs.synthetic import random_layered


@pytest.mark.parametrize("order", ["free", "kept"])
def test_rows_of_a_graph(order: str) -> None:
    graph = random_layered("RL1", 0)
    row = row_of(graph, 0.9, order, time_limit_s=5.0)
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["ops"] == 100 and row["order"] == order and row["cpu_s"] > 0
    if order == "kept":
        assert row["order_kept"]

    drawn = layered([{**row, "overhead": share} for share in (0.01, 0.02, 0.04)] + [{**row, "time_ns": None}]).splitlines()
    assert len(drawn) == 3
    assert drawn[-1].startswith(f"| RL1 | 100 | {order} | 90 % | 3 of 4 | 2.00 % / 4.00 % |")


def test_shares_asked_for_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_layered, "SEEDS", 2)
    out = tmp_path / "rows.jsonl"
    arguments = ["--out", str(out), "--kind", "RL1", "--order", "kept", "--time-limit", "0.1", "--share", "0.9"]
    for more, shares in (([], [0.9, 0.9]), (["--share", "0.7"], [0.9, 0.9, 0.7, 0.7])):
        assert bench_layered.main([*arguments, *more]) == 0
        assert [row["budget_fraction"] for row in read_rows(out)] == pytest.approx(shares, abs=1e-3)


def test_budgets_and_orders_are_lines_of_their_own() -> None:
    row = row_of(random_layered("RL1", 0), 0.9, "free", time_limit_s=5.0)
    nothing = {**row, "order": "kept", "time_ns": None, "overhead": None, "gap": None, "order_kept": None}
    moved = {**row, "order": "kept", "order_kept": False}
    drawn = layered([nothing, {**row, "budget_fraction": 0.8}, row, moved]).splitlines()[2:]
    assert [line.split(" | ")[2:4] for line in drawn] == [["free", "90 %"], ["free", "80 %"], ["kept", "90 %"]]
    assert "| 1 of 2, 1 in another order |" in drawn[-1]
    assert "| 0 of 1 | - | - |" in layered([nothing])
