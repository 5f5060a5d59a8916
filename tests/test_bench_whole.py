"""Benchmarks whose file is written when all is done: what is made anew, what stays, and what is checked before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from belady import bench_eager, bench_least, bench_whole
from belady.rows import put_in_place, read_rows, write_rows

Rows = list[dict[str, Any]]


def test_rows_are_put_where_those_of_their_graph_were() -> None:
    before: Rows = [{"graph": g, "was": n} for n, g in enumerate(["a", "b", "c", "b"])]
    assert put_in_place(before, [{"graph": "b"}, {"graph": "d"}, {"graph": "b"}]) == [
        before[0], {"graph": "b"}, {"graph": "b"}, before[2], {"graph": "d"}
    ]  # fmt: skip


@pytest.mark.parametrize("bench", [bench_eager, bench_least])
def test_one_made_anew_leaves_the_others(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(bench_eager.CASES) if bench is bench_eager else ["bert", "gpt2", "llama"]
    if bench is bench_eager:
        monkeypatch.setattr(bench_eager, "rows", lambda name: [{"graph": name, "new": True}])
    else:
        monkeypatch.setattr(bench_whole, "step_graph", lambda name: name)
        monkeypatch.setattr(bench_least, "row_of", lambda name: {"graph": name, "new": True})
    out = tmp_path / "rows.jsonl"
    write_rows(str(out), [{"graph": name, "commit": "old"} for name in names])
    before = read_rows(out)
    assert bench.main(["--out", str(out), "--only", names[1], "--only", names[1]]) == 0
    first, anew, *rest = read_rows(out)
    assert [first, *rest] == [before[0], *before[2:]] and anew["new"] and anew["commit"] != "old"


@pytest.mark.parametrize("place", ["/proc/nope.jsonl", "torn"])
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_eager, "rows", lambda name: pytest.fail("measured"))
    (tmp_path / "torn").write_text('{"graph": ')
    assert bench_eager.main(["--out", str(tmp_path / place), "--only", next(iter(bench_eager.CASES))]) == 2
    assert capsys.readouterr().err.startswith("bench_eager: ")
