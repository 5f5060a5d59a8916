"""The benchmark of networks that are no workloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from belady import bench_others
from belady.others import OTHERS, other_graph
from belady.rows import read_rows
from graphs.errors import InputError
from graphs.workloads import build

pytest.importorskip("transformers")


def test_rows_of_a_network_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "others.jsonl"
    asked = ["--out", str(out), "--only", "mixer", "--time-limit", "2"]
    assert bench_others.main(asked) == 0
    rows = read_rows(out)
    assert [row["graph"] for row in rows] == ["mixer"] * len(bench_others.SHARES)
    assert rows[0]["status"] == "OPTIMAL"
    assert capsys.readouterr().out.count("mixer") == len(rows)
    assert bench_others.main(asked) == 0
    assert read_rows(out) == rows


def test_a_network_is_the_same_every_time_and_no_generator_has_moved() -> None:
    before = torch.get_rng_state()
    first, again = other_graph("mixer"), other_graph("mixer")
    assert first.fingerprint() == again.fingerprint()
    assert torch.equal(before, torch.get_rng_state())


def test_none_of_them_is_a_workload() -> None:
    for name in OTHERS:
        with pytest.raises(InputError, match="unknown"):
            build(name)


def test_unknown_networks_are_named() -> None:
    with pytest.raises(InputError, match="unknown network 'alexnet'; there are: densenet, inception"):
        other_graph("alexnet")
