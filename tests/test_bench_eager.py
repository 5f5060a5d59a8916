"""What a step costs on the host: the rows, and the table drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from belady import bench_eager
from belady.bench_eager import CASES, main
from belady.readme_tables import hosted
from belady.rows import read_rows
from tests.garbage import frozen_before

SMALLEST = "norms-depth8-width16-batch8"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows_of_a_model_and_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_eager, "REPEATS", 2)
    out = tmp_path / "rows.jsonl"
    with frozen_before():  # it collects garbage before whatever it times
        assert main(["--only", SMALLEST, "--out", str(out)]) == 0
    rows = read_rows(out)
    assert {row["method"] for row in rows} == {"eager", "dispatch_mode", "planned", "lowered", "online.run", "online.budget"}
    assert all(row["measured_time_ns"] > 0 for row in rows if row.get("status") != "UNKNOWN")
    kept = next(row for row in rows if row["method"] == "online.budget" and row["budget_fraction"] == 1.0)
    assert kept["status"] == "FEASIBLE" and kept["recomputed_ops"] == 0 and kept["peak_bytes"] <= kept["budget_bytes"]
    line = hosted(rows).splitlines()[-1]
    assert line.startswith(f"| {SMALLEST} | {rows[0]['ops']} | ") and line.count(" times, ") >= 4


def test_an_interrupted_benchmark_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> list[dict[str, object]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_eager, "rows", interrupted)
    out = tmp_path / "rows.jsonl"
    out.write_text("before")
    assert main(["--out", str(out)]) == 130
    assert out.read_text() == "before"
    assert capsys.readouterr().err.splitlines() == [next(iter(CASES)), "bench_eager: interrupted"]
