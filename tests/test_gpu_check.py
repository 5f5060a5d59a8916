"""The GPU check at its small sizes on the CPU: what it promises of every row, and its handling of time, plans and failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

from belady import gpu_check
from belady.gpu_check import (
    INTERPOSED,
    LARGE,
    MATCHED,
    ONLINE,
    PLANNED,
    SMALL,
    Guard,
    OutOfTime,
    budget_of,
    main,
    plan_file,
    run_tests,
)
from belady.gpu_rivals import Trial, blocks, wrapped
from belady.page import ROOT
from belady.rows import RowFile, provenance, read_rows, write_rows
from belady.steps import step_name
from graphs.capture import capture
from graphs.costs import roofline
from graphs.errors import GraphMismatch
from graphs.ir import Graph
from graphs.workloads import build
from planner.plan import solve_halves
from planner.result import Plan

TINY = {
    "unet": {"batch": 4, "size": 64, "depth": 2},
    "vit": {"batch": 16, "size": 96, "depth": 2},
    "llama": {"batch": 8, "seq": 64, "depth": 2, "vocab": 64},
    "resnet50": {"batch": 16, "size": 64, "depth": 14},
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SMALL", TINY)


def check(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = folder / "rows.jsonl"
    code = main(["--small", "--tests", "", "--steps", "3", "--out", str(out), *arguments])
    return code, read_rows(out)


def chosen(*methods: str) -> list[str]:
    return [part for method in methods for part in ("--method", method)]


@pytest.mark.parametrize("name", TINY)
def test_planned_steps_keep_their_promises(name: str, tmp_path: Path) -> None:
    """Bit for bit the gradients and buffers of plain PyTorch; the measured peak in the budget and within 2 % of the plan's."""
    shares = {"unet": (0.8, 0.5), "vit": (0.9, 0.8), "llama": (0.9, 0.8), "resnet50": (0.9, 0.7)}[name]
    budgets = [part for share in shares for part in ("--budget", str(share))]
    code, rows = check(tmp_path, "--only", name, *budgets, *chosen("optimum"))
    assert code == 0 and [(r["method"], r["share"]) for r in rows] == [("eager", None), *(("optimum", share) for share in shares)]
    eager, *planned = rows
    for row in planned:
        assert row["status"] in ("OPTIMAL", "FEASIBLE"), row["reason"]
        assert row["max_grad_error"] == row["max_buffer_error"] == row["max_loss_error"] == 0
        assert row["measured_peak_bytes"] <= row["budget_bytes"] < eager["measured_peak_bytes"]
        assert row["measured_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.02)
        assert (
            row["recomputed_ops"] > 0
            and row["device"] == "cpu"
            and torch.__version__.startswith(row["versions"]["torch"].partition("+")[0])
        )
        assert row["measured_overhead"] == pytest.approx(row["measured_time_ns"] / eager["measured_time_ns"] - 1)


def test_every_rival_runs(tmp_path: Path) -> None:
    code, rows = check(tmp_path, "--only", "unet", "--budget", "0.7", "--ratios", "2")
    assert code == 0
    found = {row["method"]: row for row in rows}
    assert list(found) == [cell.method for cell in gpu_check.cells(gpu_check.METHODS, [0.7])]
    eager = found["eager"]["measured_peak_bytes"]
    assert found["optimum+cuda_graph"]["status"] == "UNAVAILABLE"
    for method in ("checkpoint:1", "checkpoint:2", "selective:1"):
        assert found[method]["status"] == "MEASURED" and found[method]["max_grad_error"] == 0
    assert found["checkpoint:1"]["measured_peak_bytes"] < found["checkpoint:4"]["measured_peak_bytes"] <= eager
    remat = found["torch_remat:1"]
    assert remat["status"] in ("UNAVAILABLE", "MEASURED") and (remat["reason"] is None) == (remat["status"] == "MEASURED")
    for method in ("optimum", *ONLINE):
        assert found[method]["max_grad_error"] == 0 and found[method]["measured_peak_bytes"] <= found[method]["budget_bytes"]
    interposed = found[INTERPOSED]  # what ops on a CPU allocate inside themselves is measured and not counted
    assert interposed["max_grad_error"] == 0 and interposed["peak_bytes"] <= interposed["budget_bytes"]
    assert interposed["measured_peak_bytes"] < eager and interposed["recomputed_ops"] > 0
    for method, rival in MATCHED.items():
        assert found[method]["max_grad_error"] == 0 and found[method]["budget_bytes"] == found[rival]["measured_peak_bytes"]
        assert found[method]["measured_peak_bytes"] <= found[method]["budget_bytes"]
    compiled = found["compile"]
    assert compiled["status"] in ("MEASURED", "UNKNOWN")
    assert compiled["measured_target_bytes"] == found["optimum"]["measured_peak_bytes"]
    peaks = [peak for _, peak, _ in compiled["measured_sweep"]]
    assert len(set(peaks)) == 2 and eager not in peaks  # it is compiled code that was measured
    both = found[gpu_check.BOTH_COMPILED]
    assert both["max_grad_error"] == 0 and both["budget_bytes"] == min(peaks)


def test_plans_for_what_the_compiler_captures_take_no_more_than_the_compilers(tmp_path: Path) -> None:
    """With a model whose ops allocate nothing inside themselves, on a CPU."""
    arguments = ["--only", "vit", "--budget", "0.9", "--ratios", "1"]
    code, rows = check(tmp_path, *arguments, *chosen("compile"))
    assert code == 0 and [row["method"] for row in rows] == ["eager", "compile"]
    code, rows = check(tmp_path, *arguments, *chosen("compile", gpu_check.BOTH_COMPILED))
    eager, compiled, both = rows  # the peak comes from the row
    assert code == 0 and both["budget_bytes"] == compiled["measured_sweep"][0][1] < eager["measured_peak_bytes"]
    assert both["max_grad_error"] == 0 and both["measured_peak_bytes"] <= both["budget_bytes"]


def test_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "unet", "--budget", "0.8", *chosen("optimum", "online:lru")]
    code, rows = check(tmp_path, *arguments, "--seconds", "0")
    assert (code, rows) == (3, [])
    assert "left out for lack of time: unet" in capsys.readouterr().err
    code, rows = check(tmp_path, *arguments[:-2])
    assert code == 0 and [r["method"] for r in rows] == ["eager", "optimum"]
    code, rows = check(tmp_path, *arguments)
    assert code == 0 and [r["method"] for r in rows] == ["eager", "optimum", "online:lru"]
    begin = time.process_time()
    assert check(tmp_path, *arguments) == (0, rows)
    assert time.process_time() - begin < 1  # nothing was captured


def test_plans_made_before_need_no_solver(tmp_path: Path) -> None:
    """Graphs are written here, solved elsewhere, and run in a process that has neither ortools nor pulp nor numba."""
    plans = tmp_path / "plans"
    arguments = ["--small", "--only", "unet", "--budget", "0.7"]
    assert main([*arguments, "--make-graphs", str(plans)]) == 0
    assert [path.name for path in plans.iterdir()] == [f"{step_name('unet', TINY['unet'])}.graph.json"]
    graph = next(plans.iterdir())
    content = json.loads(graph.read_text())
    for op in content["ops"]:
        op["time_ns"] = op["time_ns"] * 3 + 1000  # as if measured on another machine
    graph.write_text(json.dumps(content))
    assert main([*arguments, "--make-plans", str(plans)]) == 0
    plan = next(plans.glob("*.plan.json"))
    before = plan.read_text()
    assert main([*arguments, "--make-plans", str(plans)]) == 0 and plan.read_text() == before
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ortools", "pulp", "numba"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from belady import gpu_check
gpu_check.SMALL = {TINY!r}
methods = ["--method", "optimum", "--method", "online:dtr_eq"]
folders = ["--plans", {str(plans)!r}, "--out", {str(tmp_path / "rows.jsonl")!r}]
sys.exit(gpu_check.main([*{arguments!r}, *methods, "--tests", "", *folders]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert rows["optimum"]["max_grad_error"] == rows["online:dtr_eq"]["max_grad_error"] == 0
    assert rows["optimum"]["keep_all_time_ns"] == sum(op["time_ns"] for op in content["ops"])


def test_plans_for_another_graph_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = tmp_path / "plans"
    assert main(["--small", "--only", "unet", "--make-graphs", str(plans)]) == 0
    path = next(plans.iterdir())
    content = json.loads(path.read_text())
    content["values"][0][1] += 512
    path.write_text(json.dumps(content))
    code, rows = check(tmp_path, "--only", "unet", "--plans", str(plans))
    assert code == 1 and rows[-1]["status"] == "FAILED" and "was made for another graph" in rows[-1]["reason"]


def test_what_fails_in_a_cell_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise RuntimeError("no such kernel\nmore lines")

    from belady import gpu_rivals

    monkeypatch.setitem(gpu_rivals.CHECKPOINTS, "selective", broken)
    arguments = ["--only", "unet", *chosen("selective:1", "checkpoint:1")]
    code, rows = check(tmp_path, *arguments)
    assert code == 1 and {r["method"]: r["status"] for r in rows} == {
        "eager": "MEASURED",
        "checkpoint:1": "MEASURED",
        "selective:1": "FAILED",
    }
    assert next(r for r in rows if r["status"] == "FAILED")["reason"] == "RuntimeError: no such kernel"
    said = (tmp_path / "rows.jsonl.log").read_text()
    assert "selective:1" in said and "in broken" in said and "more lines" in said
    assert "failed: unet" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(gpu_check, "SMALL", TINY)
    assert check(tmp_path, *arguments)[0] == 0  # not again by itself
    code, rows = check(tmp_path, *arguments, "--retry")
    assert code == 0 and rows[-1]["method"] == "selective:1" and rows[-1]["status"] == "MEASURED"


def test_a_workload_without_a_step_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu_check.captured

    def full(name: str, *rest: Any) -> Any:
        if name == "vit":
            raise torch.OutOfMemoryError("no memory\nmore lines")
        return before(name, *rest)

    monkeypatch.setattr(gpu_check, "captured", full)
    code, rows = check(tmp_path, "--only", "vit", "--only", "unet", *chosen("checkpoint:1"))
    assert code == 1 and [(r["method"], r["status"]) for r in rows] == [
        ("capture", "FAILED"),
        ("eager", "MEASURED"),
        ("checkpoint:1", "MEASURED"),
    ]
    assert rows[0]["reason"] == "OutOfMemoryError: no memory"


def test_nothing_is_blamed_on_what_comes_after_a_lost_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    from belady import gpu_rivals

    monkeypatch.setitem(gpu_rivals.CHECKPOINTS, "checkpoint", broken)
    monkeypatch.setattr(gpu_check, "answers", lambda device: False)
    code, rows = check(tmp_path, "--only", "unet", "--only", "vit", *chosen("checkpoint:1", "checkpoint:2"))
    assert code == 1 and [(r["method"], r["status"]) for r in rows] == [("eager", "MEASURED"), ("checkpoint:1", "FAILED")]
    said = " ".join(capsys.readouterr().err.split())
    assert "because the device stopped answering: unet-batch4-size64-depth2: checkpoint:2" in said
    assert "stopped answering: vit-batch16-size96-depth2: eager, checkpoint:1, checkpoint:2" in said


def test_the_guard_interrupts_what_takes_too_long() -> None:
    guard = Guard(0.2)
    begin = time.monotonic()
    with pytest.raises(OutOfTime), guard.limit():
        while time.monotonic() < begin + 20:
            pass
    assert time.monotonic() < begin + 10
    with pytest.raises(OutOfTime), guard.limit():
        pytest.fail("the time was over before")
    with Guard(60).limit():
        pass


def test_the_gpu_tests_are_run_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TEST_PROCESSES", 1)
    folder = tmp_path / "tests"
    folder.mkdir()
    assert run_tests(folder, 60)["status"] == "UNAVAILABLE"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    test = "import pytest\n@pytest.mark.gpu\ndef test_it(): assert {}\ndef test_other(): assert False\n"
    (folder / "test_a.py").write_text(test.format("True"))
    (folder / "test_unrelated.py").write_text("import nothing_there\n")
    row = run_tests(folder, 60)
    assert (row["status"], row["tests"], row["files"]) == ("PASSED", {"passed": 1, "deselected": 1}, 1)
    (folder / "test_b.py").write_text(test.format("1 == 2"))
    said: list[str] = []
    row = run_tests(folder, 60, said.append)
    assert row["status"] == "FAILED" and "test_b.py::test_it" in row["reason"] and "assert 1 == 2" in said.pop()
    (folder / "test_b.py").write_text("import pytest, time\n@pytest.mark.gpu\ndef test_it(): time.sleep(60)\n")
    row = run_tests(folder, 1, said.append)
    assert row["status"] == "UNKNOWN" and row["reason"] == "stopped after 1 s" and len(said) == 1


def test_tests_that_are_stopped_leave_no_process_behind(tmp_path: Path) -> None:
    folder, begun = tmp_path / "tests", tmp_path / "begun"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    code = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(60)"
    (folder / "test_a.py").write_text(
        f"import pytest, subprocess, sys\n@pytest.mark.gpu\ndef test_it(): subprocess.run([sys.executable, '-c', {code!r}])\n"
    )
    limit_s = 2.0
    while not begun.exists():  # a busy machine takes longer to begin
        limit_s *= 2
        began = time.monotonic()
        assert run_tests(folder, limit_s)["status"] == "UNKNOWN"
        assert time.monotonic() - began < limit_s + 10
    time.sleep(1)
    state = Path(f"/proc/{begun.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_the_gpu_tests_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each waits for the other. Of a folder named from the current one none was found."""
    monkeypatch.chdir(tmp_path.parent)
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    (folder / "test_both.py").write_text(
        """
import time
from pathlib import Path
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one", "other"])
def test_it(name):
    here = Path(__file__).parent
    (here / name).touch()
    end = time.monotonic() + 20
    while not all((here / each).exists() for each in ("one", "other")):
        assert time.monotonic() < end
        time.sleep(0.01)
"""
    )
    assert run_tests(folder.relative_to(tmp_path.parent), 100)["status"] == "PASSED"


def test_tests_that_were_stopped_are_left_out_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = "UNKNOWN"

    def ran(*_: object) -> dict[str, Any]:
        return {"graph": None, "method": "tests", "share": None, "reason": None, "status": status}

    monkeypatch.setattr(gpu_check, "run_tests", ran)
    arguments = ["--only", "unet", "--method", "eager", "--tests", str(tmp_path)]
    code, rows = check(tmp_path, *arguments)
    assert code == 3 and [row["method"] for row in rows] == ["tests", "eager"]
    assert "left out for lack of time: GPU tests: tests" in capsys.readouterr().err
    status = "PASSED"
    for _ in range(2):
        code, rows = check(tmp_path, *arguments)
        assert code == 0 and [row["status"] for row in rows] == ["UNKNOWN", "MEASURED", "PASSED"]


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--tests", "nosuch", "there is no folder 'nosuch'"),
        ("--steps", "-1", "'-1' is no whole number from 0 on"),
        ("--repeats", "-1", "'-1' is no whole number from 1 on"),
        ("--ratios", "0", "'0' is no whole number from 1 on"),
        ("--seconds", "nan", "'nan' is no number of seconds from 0 to 10,000,000"),
        ("--seconds", "inf", "'inf' is no number of seconds"),
        ("--plan-seconds", "-1", "'-1' is no number of seconds"),
        ("--budget", "1.1", "'1.1' is no share"),
    ],
)
def test_what_makes_no_sense_is_refused(
    option: str, given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "rows.jsonl"), option, given])
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_rows_of_another_benchmark_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other in ("diff_gpt2_cpu", "eager_cpu", "coop"):
        (tmp_path / "rows.jsonl").write_bytes((ROOT / "benchmarks" / f"{other}.jsonl").read_bytes())
        assert main(["--small", "--tests", "", "--out", str(tmp_path / "rows.jsonl")]) == 2
        assert "holds rows of another kind: row 1 has no entry" in capsys.readouterr().err


def session(folder: Path, rows: list[dict[str, Any]], *arguments: str) -> gpu_check.Session:
    """A run to which these rows are known."""
    (folder / "rows.jsonl").unlink(missing_ok=True)
    write_rows(str(folder / "rows.jsonl"), [{"graph": "net", "device": "cpu", "reason": None, **row} for row in rows])
    asked = gpu_check._parser().parse_args(["--out", str(folder / "rows.jsonl"), "--method", "compile", *arguments])
    asked.budget = asked.budget or [0.5]
    with contextlib.closing(RowFile(asked.out, gpu_check.ENTRIES)) as file:
        return gpu_check.Session(file, Guard(1.0), "cpu", Console(), asked)


def test_rows_made_otherwise_are_not_those_asked_for(tmp_path: Path) -> None:
    compiled = {"method": "compile", "share": 0.5, "status": "MEASURED", "measured_peak_bytes": 9, "measured_backend": "inductor"}
    rows = [{"method": "eager", "share": None, "status": "MEASURED", "measured_peak_bytes": 10}, compiled]
    named = ["--backend", "inductor"]

    def missing(rows: list[dict[str, Any]], *arguments: str) -> list[str]:
        return [cell.method for cell in session(tmp_path, rows, *arguments).missing("net")]

    assert missing(rows, *named) == [] and missing(rows) == ["compile"]
    failed = {**compiled, "status": "FAILED", "measured_backend": "inductor"}
    assert missing([rows[0], failed], *named) == [] and missing([rows[0], failed]) == ["compile"]
    old = {name: entry for name, entry in compiled.items() if name != "measured_backend"}
    assert missing([rows[0], old]) == [] and missing([rows[0], old], *named) == ["compile"]
    assert missing(rows, *named, "--deterministic") == ["eager", "compile"]
    same = [{**row, "deterministic": True} for row in rows]
    assert missing(same, *named, "--deterministic") == [] and missing(same, *named) == ["eager", "compile"]


def test_rows_of_another_torch_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"graph": step_name("unet", TINY["unet"]), "device": "cpu", "method": "eager", "share": None, "status": "MEASURED"}
    row |= {"reason": None, "measured_peak_bytes": 10}
    for version, said in (("1.0", "1 rows in"), (provenance()["versions"]["torch"], "")):
        write_rows(str(tmp_path / "rows.jsonl"), [{**row, "versions": {"torch": version}}])
        assert check(tmp_path, "--only", "unet", "--method", "eager")[0] == 0
        told = " ".join(capsys.readouterr().err.split())
        assert told.startswith(said) and ("are of torch 1.0 and are not made again" in told) == bool(said)


def stopped(graph: Graph, budget_bytes: int, **options: Any) -> Plan:
    """What ``solve_halves`` returns on Ctrl-C."""
    plan = Plan.of(graph, budget_bytes, None, method="none", wall_s=0.0)
    return replace(plan, notes={"stopped": "interrupted"})


def test_what_ctrl_c_leaves_of_a_plan_is_neither_a_row_nor_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "unet", "--budget", "0.7"]
    plans = tmp_path / "plans"
    assert main(["--small", *arguments, "--make-graphs", str(plans)]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(gpu_check, "solve_halves", stopped)
        assert check(tmp_path, *arguments, *chosen("optimum", "checkpoint:1"))[0] == 130
        assert [row["method"] for row in read_rows(tmp_path / "rows.jsonl")] == ["eager"]
        assert "gpu_check: interrupted; the same command goes on from here" in capsys.readouterr().err
        assert main(["--small", *arguments, "--make-plans", str(plans)]) == 130
    assert [path.suffixes for path in plans.iterdir()] == [[".graph", ".json"]]


def test_what_ctrl_c_leaves_of_a_compiled_step_is_no_row() -> None:
    """The backend makes do with the best plan until then, and the compiler says nothing of it."""
    step = roofline(capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(64, 8), loss=lambda out: out.square().mean()))
    plain = Trial(1000, 10**6, None, 0.0, 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def compiled(*_: object) -> Trial:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return plain

    asked: Any = {"backend": "aot_eager", "ratios": 5, "steps": 0, "matched": set(), "rivals": {"compile": 10**6}}
    bench = cast(Any, SimpleNamespace(plain=plain, compiled=compiled))
    work = gpu_check.Workload("net", step, bench, cast(Any, None), **asked, left_s=lambda: 60.0, log=print)
    try:
        with pytest.raises(KeyboardInterrupt):
            work.row(gpu_check.Cell("optimum=compile", None))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_plans_in_a_folder_are_those_of_the_budget_and_not_interrupted(tmp_path: Path) -> None:
    step = roofline(capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(64, 8), loss=lambda out: out.square().mean()))
    budget_bytes = budget_of(step.graph, 0.9)
    whole = solve_halves(step.graph, budget_bytes)
    assert plan_file(tmp_path, "net", 0.9).name == "net-0900.plan.json" != plan_file(tmp_path, "net", 0.8996).name
    path = plan_file(tmp_path, "net", 0.9)
    known: list[tuple[Plan, str | None]] = [
        (whole, None),
        (replace(whole, budget_bytes=budget_bytes + 1), f"was made for {budget_bytes + 1:,} bytes, not for {budget_bytes:,}"),
        (replace(whole, notes={"stopped": "interrupted"}), "until its search was interrupted"),
    ]
    for plan, said in known:
        plan.save(path)
        assert gpu_check._fits(path, step.graph, 0.9) == (said is None)
        with contextlib.nullcontext() if said is None else pytest.raises(GraphMismatch, match=said):
            assert gpu_check.Plans(step, "net", [0.9], folder=tmp_path, pool=None)[0.9].schedule == whole.schedule


@pytest.mark.parametrize(
    ("target", "tried"),
    [(0.97, [0.5, 0.25, 0.75, 0.875, 0.9375]), (0.2, [0.5, 0.25, 0.75, 0.125, 0.1875]), (0.6, [0.5, 0.25, 0.75, 0.625, 0.5625])],
)
def test_ratios_are_looked_for_up_to_all_and_down_to_nothing(target: float, tried: list[float]) -> None:
    """Nothing above 0.75 or below 0.25 was ever tried. Here the peak of a ratio is that share of what the plan takes at 1."""
    import torch._functorch.config as functorch

    step = roofline(capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(64, 8), loss=lambda out: out.square().mean()))
    plain = Trial(1000, 10**6, None, 0.0, 0.0)
    ratios: list[float] = []

    def compiled(backend: str) -> Trial:
        ratios.append(functorch.activation_memory_budget)
        return replace(plain, peak_bytes=int(ratios[-1] * 10**6), time_ns=2000 - int(1000 * ratios[-1]))

    asked: Any = {"backend": "aot_eager", "ratios": 5, "steps": 0, "matched": set(), "rivals": {}}
    bench = cast(Any, SimpleNamespace(plain=plain, compiled=compiled))
    work = gpu_check.Workload("net", step, bench, cast(Any, None), **asked, left_s=lambda: 60.0, log=print)
    work._peaks[0.5] = int(target * 10**6)
    row = work.row(gpu_check.Cell("compile", 0.5))
    assert ratios == tried and row["measured_backend"] == "aot_eager"
    fitting = [ratio for ratio in tried if ratio <= target]
    assert row["status"] == ("MEASURED" if fitting else "UNKNOWN") and row.get("measured_ratio") == max(fitting, default=None)


@pytest.mark.parametrize("name", LARGE)
def test_the_blocks_of_every_workload_are_known(name: str) -> None:
    model, inputs, loss = build(name, **dict[str, Any](SMALL[name]))
    found = blocks(name, model)
    assert len(found) >= 2
    ran: list[object] = []

    def wrap(forward: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            ran.append(forward)
            return forward(*args, **kwargs)

        return inside

    model.eval()
    with torch.no_grad():
        plain = model(**inputs).loss if loss is None else loss(model(inputs[0]), inputs[1])
        with wrapped(found[::2], wrap):
            again = model(**inputs).loss if loss is None else loss(model(inputs[0]), inputs[1])
    assert len(ran) == len(found[::2]) and torch.equal(plain, again)
    assert not any("forward" in vars(part) for part in model.modules())


def test_sizes_and_methods_are_complete() -> None:
    assert list(LARGE) == ["resnet50", "vgg16", "unet", "vit", "bert", "gpt2", "llama"] == list(SMALL)
    methods = [cell.method for cell in gpu_check.cells(gpu_check.METHODS, gpu_check.SHARES)]
    assert set(methods) == set(gpu_check.METHODS) and len(methods) == 6 + 5 * (len(PLANNED) + len(ONLINE) + 2) + len(MATCHED) + 1


def test_a_plan_held_against_a_rival_has_that_measured_first() -> None:
    """Asked for alone it was left out without a word."""
    found = [cell.method for cell in gpu_check.cells(["optimum=compile", "optimum=checkpoint:2"], [0.7])]
    assert found == ["eager", "checkpoint:2", "optimum=checkpoint:2", "compile", "optimum=compile"]


@pytest.mark.parametrize("at_once", [False, True])
def test_plans_are_solved_here_where_a_solver_process_was_ended(at_once: bool) -> None:
    step = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(64, 8), loss=lambda out: out.square().mean())

    class Ended:
        def submit(self, *_: object) -> Future[Plan]:
            if at_once:
                raise BrokenProcessPool("a process was ended")
            coming: Future[Plan] = Future()
            coming.set_exception(BrokenProcessPool("a process was ended"))
            return coming

    plans = gpu_check.Plans(roofline(step), "net", [1.0], folder=None, pool=cast(Any, Ended()))
    assert plans[1.0].schedule is not None
