"""The table of Coop against DTR, and what it is not drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from belady.bench_coop import main
from belady.page import ROOT


def test_the_table_is_drawn_from_its_own_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", "--out", str(ROOT / "benchmarks" / "coop.jsonl")]) == 0
    assert "| resnet50 | DTR, bytes |" in capsys.readouterr().out
    assert main(["--table", "--out", str(tmp_path / "none.jsonl")]) == 2
    assert "bench_coop: cannot read" in capsys.readouterr().err
    for rest in (["--table"], []):
        assert main([*rest, "--out", str(ROOT / "benchmarks" / "plans.jsonl")]) == 2
        assert "holds rows of another kind: row 1 has no entry 'label'" in capsys.readouterr().err
