"""The smallest budget of a graph, and what a plan costs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from belady import bench_grid, bench_least, bench_whole
from belady.bench_least import row_of
from belady.readme_tables import smallest
from belady.rows import read_rows
from graphs.synthetic import chain, linear_network


def test_row_of_a_graph() -> None:
    row = row_of(replace(chain(12), name="chain"), time_limit_s=2.0)
    assert row["proved_bytes"] == row["works_bytes"] == row["budget_bytes"] == 3
    assert row["peak_bytes"] <= 3 < row["keep_all_peak_bytes"]
    assert row["overhead"] > 1
    assert smallest([row]).splitlines()[-1].startswith("| chain | 25 | 21.43 % (3 B) | 21.43 % | 0.00 % |")


@pytest.mark.parametrize(("bench", "rows"), [(bench_least, 1), (bench_grid, 2)])
def test_rows_of_workloads_are_written_when_all_is_done(
    bench: ModuleType, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(name: str) -> Any:
        return replace(linear_network(4), name=name)

    def interrupted(name: str) -> Any:
        if name == "gpt2":
            raise KeyboardInterrupt
        return small(name)

    out = tmp_path / "rows.jsonl"
    arguments = ["--out", str(out), "--only", "vgg16", "--only", "gpt2"]
    step_of: Callable[[str], Any]
    for step_of, code, said in ((interrupted, 130, f"{bench.__name__.partition('.')[2]}: interrupted\n"), (small, 0, "")):
        assert not out.exists()
        monkeypatch.setattr(bench_whole, "step_graph", step_of)
        assert bench.main(arguments) == code
        assert capsys.readouterr().err == said
    graphs = [row["graph"] for row in read_rows(out)]
    assert graphs == sorted(graphs, reverse=True) and len(set(graphs)) == 2 and len(graphs) >= 2 * rows
