"""The benchmark of online rules: rows, and the page drawn from them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from belady import bench_online, online_doc
from belady.page import ROOT, latest
from belady.rows import read_rows
from belady.sweep import ONLINE
from online import DEFAULT_RULE


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("online") / "online.jsonl"
    command = ["--out", str(path), "--graph", "mlp", "--rule", "dtr", "--rule", "demand", "--rule", "demand+next_use", "--method"]
    assert bench_online.main([*command, "none"]) == 0
    return path


def test_rows_are_made_once(rows: Path) -> None:
    before = rows.read_text()
    found = read_rows(rows)
    budgets = {row["budget_bytes"] for row in found}
    assert len(found) == 3 * len(budgets) and len(budgets) >= 4
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in found if row["time_ns"] is not None)
    assert bench_online.main(["--out", str(rows), "--graph", "mlp", "--rule", "dtr", "--method", "none"]) == 0
    assert rows.read_text() == before


def test_the_page_is_drawn_from_the_rows(rows: Path, tmp_path: Path) -> None:
    page = tmp_path / "online.md"
    page.write_text(f"before\n{online_doc.BEGIN}\n{online_doc.END}\nafter\n")
    command = ["--rows", str(rows), "--page", str(page)]
    assert online_doc.main([*command, "--check"]) == 2
    assert online_doc.main(command) == 0
    assert online_doc.main([*command, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and (tmp_path / "online.png").stat().st_size > 0
    found = {(row["method"], row["budget_fraction"]): row for row in read_rows(rows)}
    share = max(share for _, share in found)
    line = next(line for line in text.splitlines() if line.startswith(f"| {share:.0%} "))
    for method in (online_doc.DTR, online_doc.OURS, online_doc.TOLD):
        assert f"{found[method, share]['overhead']:.1%}" in line


def test_unknown_names_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_online.main(["--graph", "nothing", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "unknown graph 'nothing'" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_default_rule_is_closer_to_the_optimum_on_every_committed_graph() -> None:
    means: dict[tuple[str, str], list[float]] = {}
    for row in latest(read_rows(ROOT / "benchmarks" / "online.jsonl")):
        over = 7.0 if row["overhead"] is None else min(row["overhead"], 7.0)
        means.setdefault((row["graph"], row["method"]), []).append(math.log1p(over))
    graphs = {graph for graph, _ in means}
    assert len(graphs) >= 14
    for graph in graphs:
        ours, theirs = means[graph, ONLINE + DEFAULT_RULE], means[graph, online_doc.DTR]
        assert len(ours) == len(theirs) and sum(ours) < sum(theirs), graph


def test_the_committed_page_is_up_to_date() -> None:
    assert online_doc.main(["--check"]) == 0
