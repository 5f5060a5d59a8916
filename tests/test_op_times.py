"""Measured op times are remembered whatever happens, and only for what they are true of."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import graphs.op_times as op_times
import graphs.profile as profile
from graphs.capture import Step, capture
from graphs.errors import InputError
from graphs.op_times import OpTimes, cache_folder
from graphs.profile import measured

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step() -> Step:
    return capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4), loss=lambda out: out.sum())


def adding(folder: Path, which: int) -> None:
    for i in range(20):
        OpTimes(CPU, folder).add({f"{which} {i}": [1, 0]})


def test_several_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=adding, args=(tmp_path, which)) for which in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert OpTimes(CPU, tmp_path).read() == {f"{which} {i}": [1, 0] for which in range(3) for i in range(20)}


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("{")], ids=["deleted", "damaged"])
def test_a_file_that_goes_away_meanwhile_loses_no_measurement(
    step: Step, tmp_path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    other = capture(nn.Linear(4, 3), torch.randn(3, 4), loss=lambda out: out.square().sum())
    measured(step, cache_dir=tmp_path, repeats=1)
    file = OpTimes(CPU, tmp_path).path
    priced = measured(other, cache_dir=tmp_path, repeats=1, progress=lambda done, total: done or spoil(file))
    assert all(op.time_ns > 0 for op in priced.graph.ops)
    told = [record.getMessage() for record in caplog.records if record.name == "belady"]
    assert len(told) == (spoil is not Path.unlink) and all("were measured but are not remembered" in line for line in told)


def test_it_is_told_before_measuring_that_nothing_can_be_kept(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise InputError(f"cannot write {path}: Read-only file system")

    def never(*_: object) -> None:
        raise AssertionError("an op was measured")

    monkeypatch.setattr(op_times, "check_writable", refuse)
    monkeypatch.setattr(profile, "_measure", never)
    with pytest.raises(InputError, match=r"Read-only file system; name another folder .*BELADY_CACHE"):
        measured(step, cache_dir=tmp_path)


def test_what_is_measured_is_kept_as_it_comes(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SAVE_EVERY_S", 0.0)
    kept: list[int] = []
    measured(step, cache_dir=tmp_path, repeats=1, progress=lambda done, total: kept.append(len(OpTimes(CPU, tmp_path).read())))
    assert kept == list(range(len(kept))) and len(kept) > 3


def test_times_of_another_device_or_of_no_time_are_refused(tmp_path: Path) -> None:
    known = OpTimes(CPU, tmp_path)
    known.add({"a": [1, 0]})
    content = json.loads(known.path.read_text())
    known.path.write_text(json.dumps(content | {"device": "another machine"}))
    with pytest.raises(InputError, match=r"is of another device, another machine, not of .*; delete this file"):
        known.read()
    (setting,) = content["times"]
    for entry in ([0, 0], [1, -1], [1.5, 0], [True, 0]):
        known.path.write_text(json.dumps(content | {"times": {setting: {"a": entry}}}))
        with pytest.raises(InputError, match="is damaged; delete this file"):
            known.read()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_what_chooses_kernels_is_part_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OpTimes(CPU, tmp_path).add({"a": [1, 0]})
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        assert OpTimes(CPU, tmp_path).read() == {}
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert OpTimes(CPU, tmp_path).read() == {}
    assert OpTimes(CPU, tmp_path).read() == {"a": [1, 0]}


def test_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BELADY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(None) == tmp_path / ".cache" / "belady"
    assert cache_folder("~/own") == tmp_path / "own"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder(None) == tmp_path / "caches" / "belady"
    monkeypatch.setenv("BELADY_CACHE", "~/elsewhere")
    assert cache_folder(None) == tmp_path / "elsewhere"
    with pytest.raises(InputError, match="there is no home folder for ~nobody-at-all/x; name another one"):
        cache_folder("~nobody-at-all/x")


def test_a_long_measurement_can_be_killed(step: Step, tmp_path: Path) -> None:
    """Nothing is asked of the process that is killed: what it has measured lies on the disk."""

    def dawdle(done: int, total: int) -> None:
        if done == 3:
            time.sleep(60)

    def run() -> None:
        profile.SAVE_EVERY_S = 0.0
        measured(step, cache_dir=tmp_path, repeats=1, progress=dawdle)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    until = time.monotonic() + 60
    while len(OpTimes(CPU, tmp_path).read()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert len(OpTimes(CPU, tmp_path).read()) == 3
