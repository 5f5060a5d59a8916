"""Compiled steps beside each other: the rows, and the table drawn from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from belady import bench_inductor
from belady.bench_inductor import main
from belady.readme_tables import compiled
from belady.rows import read_rows


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_rows_of_a_model_and_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)), nn.Linear(16, 1), nn.Flatten(0))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.chain(x).square().mean())

    monkeypatch.setattr(bench_inductor, "MODELS", {"small": (Mean, lambda: torch.randn(512, 16))})
    monkeypatch.setattr(bench_inductor, "RATIOS", (1.0, 0.5))
    monkeypatch.setattr(bench_inductor, "SHARES", (0.7, 0.01))
    monkeypatch.setattr(bench_inductor, "REPEATS", 1)
    out = tmp_path / "rows.jsonl"
    with config.patch(compile_threads=1):
        assert main(["--out", str(out)]) == 0
    rows = read_rows(out)
    assert [(row["method"], row["budget_fraction"]) for row in rows] == [
        ("inductor", 1.0), ("inductor", 0.5), ("planned", 0.7), ("planned", 0.01)
    ]  # fmt: skip
    assert [row["status"] for row in rows] == ["MEASURED"] * 3 + ["InfeasibleBudget"]
    assert all(row["max_grad_error"] < 1e-5 for row in rows[:3])
    assert rows[2]["measured_peak_bytes"] <= rows[2]["budget_bytes"] < rows[0]["measured_peak_bytes"]
    assert "every schedule needs at least" in rows[3]["reason"]
    assert compiled(rows).splitlines()[-1].startswith("| small | ")
    assert compiled(rows).splitlines()[-1].endswith(" | infeasible |")
