"""The page of GPU results: what it claims follows from the rows, and it is the one drawn from the committed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from belady import gpu_doc
from belady.gpu_doc import Measured, budgets, of_rows, rivals, summary, worst
from belady.page import END, ROOT
from belady.rows import write_rows


def row(method: str, share: float | None, time_ns: int | None, measured_bytes: int | None, **more: Any) -> dict[str, Any]:
    status = "MEASURED" if time_ns is not None else "UNKNOWN"
    row = {"graph": "net", "device": "D", "method": method, "share": share, "status": status, "reason": None}
    row |= {"measured_time_ns": time_ns, "measured_peak_bytes": measured_bytes, "measured_eager_time_ns": 1000}
    return {**row, "overhead": None, "gap": None, "peak_bytes": None, "budget_bytes": None, **more}


def plan(method: str, share: float | None, time_ns: int, measured_bytes: int, overhead: float) -> dict[str, Any]:
    planned = {"overhead": overhead, "gap": 0.0, "peak_bytes": 500, "budget_bytes": 512}
    return row(method, share, time_ns, measured_bytes, **planned)


ROWS = [
    {"graph": None, "device": "D", "method": "tests", "share": None, "status": "PASSED", "reason": None},
    row("eager", None, 1000, 1000),
    plan("optimum", 0.5, 1100, 500, 0.08),
    plan("optimum+cuda_graph", 0.5, 1050, 524, 0.08),
    row("checkpoint:1", None, 1300, 600),
    plan("optimum=checkpoint:1", None, 1080, 600, 0.05),
    row("online:dtr", 0.5, 1500, 510),
    row("online:lru", 0.5, None, None, reason="THRASHED: recomputed too much"),
    row("compile", 0.5, 1070, 550, measured_sweep=[[0.5, 550, 1070], [0.9, 400, 1900]]),
]


def test_every_figure_follows_from_the_rows() -> None:
    (found,) = of_rows(ROWS)
    assert summary([found], [0.5]).splitlines()[-1] == (
        "| net | 0.0 ms, 0.977 KiB | 8.00 % / 10.00 % / 5.00 % | 30.00 % → 8.00 % (600 B) |"
    )
    promised = worst([found]).splitlines()
    assert "2 planned steps ran" in promised[0] and "2.00 points apart" in promised[0] and "3.00 points" in promised[0]
    assert "at most 0 bytes" in promised[1] and "0 are above the budget" in promised[1] and "at most 24 bytes" in promised[1]
    # The compiled step at 550 bytes is faster than the plan at 500; at 400 bytes there is no plan.
    assert (
        promised[2].startswith("- 2 checkpointed or compiled")
        and "of these plans 1 took longer. 0 others do not count" in promised[2]
    )
    assert "| 50 % (512 B) | 8.00 % (gap 0.00 %) | 10.00 % | 5.00 % | 500 / 500 | 50.00 % | - | thrashes | - | - |" in budgets(
        found
    )
    assert [line.split(" | ")[2:] for line in rivals(found).splitlines()[2:]] == [
        ["30.00 %", "600 B", "8.00 % |"],
        ["90.00 %", "-", "- |"],
        ["7.00 %", "500 B", "10.00 % |"],
    ]


def test_overheads_are_over_the_fastest_plain_step() -> None:
    slow = [{**each, "measured_eager_time_ns": 2000} if each["method"] == "eager" else each for each in ROWS[1:]]
    assert Measured(slow).overhead(1100) == pytest.approx(0.1)


def test_compiled_plans_are_held_against_compiled_rivals_only() -> None:
    (found,) = of_rows([*ROWS, row("optimum=compile", None, 1060, 390)])
    assert worst([found]).splitlines()[2].startswith("- 3 checkpointed or compiled")
    assert "of these plans 0 took longer." in worst([found])
    assert [line.split(" | ")[2:] for line in rivals(found).splitlines()[2:]] == [
        ["30.00 %", "600 B", "8.00 % |"],
        ["90.00 %", "390 B", "6.00 % |"],
        ["7.00 %", "390 B", "6.00 % |"],
    ]


def test_a_broken_budget_is_said() -> None:
    (found,) = of_rows([*ROWS, plan("optimum", 0.4, 1200, 513, 0.2)])
    assert "at most 13 bytes above the planned ones, and 1 are above the budget" in worst([found])


def test_budgets_are_those_of_the_plans() -> None:
    """Those shown were shares of plain PyTorch's measured peak, which is another one than the keep-all peak."""
    refused = row("optimum", 0.3, None, None, status="INFEASIBLE", budget_bytes=307)
    (found,) = of_rows([*ROWS, refused, row("online:lru", 0.2, 1500, 200, budget_bytes=205), row("compile", 0.1, None, None)])
    starts = [line.split(" | ")[0] for line in budgets(found).splitlines()[2:]]
    assert starts == ["| 50 % (512 B)", "| 30 % (307 B)", "| 20 % (205 B)", "| 10 %"]


def test_rivals_that_beat_themselves_or_take_more_than_plain_pytorch_do_not_count() -> None:
    sweep = [[0.5, 550, 1070], [0.7, 600, 1070], [0.8, 550, 1200], [0.9, 400, 1900]]
    more = row("compile", 0.9, 1070, 550, measured_sweep=sweep), row("checkpoint:4", None, 1200, 1001)
    (found,) = of_rows([*ROWS, *more])
    said = worst([found]).splitlines()[2]
    assert said.startswith("- 2 checkpointed or compiled") and "of these plans 1 took longer. 3 others do not count: " in said


@pytest.mark.parametrize("rows", [[], ROWS[:1], [*ROWS[:1], {**ROWS[1], "status": "FAILED", "measured_peak_bytes": None}]])
def test_no_page_is_drawn_from_nothing(rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, page = tmp_path / "rows.jsonl", tmp_path / "gpu.md"
    page.write_text(f"{gpu_doc.BEGIN}\nold\n{END}\n")
    write_rows(str(given), rows)
    both = tmp_path / "both.jsonl"
    write_rows(str(both), [*ROWS, {**ROWS[-1], "measured_backend": "inductor"}])
    for path, said in (
        (given, "holds no measured steps of gpu_check"),
        (both, "has compiled steps of several backends (aot_eager_decomp_partition, inductor)"),
        (ROOT / "benchmarks" / "eager_cpu.jsonl", "holds rows of another kind: row 1 has no entry 'share'"),
        (tmp_path / "none.jsonl", "cannot read"),
    ):
        assert gpu_doc.main(["--rows", str(path), "--page", str(page)]) == 2
        assert said in capsys.readouterr().err
        assert page.read_text() == f"{gpu_doc.BEGIN}\nold\n{END}\n" and not page.with_suffix(".png").exists()


def test_the_page_is_drawn_and_checked(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.jsonl", tmp_path / "gpu.md"
    write_rows(str(rows), ROWS)
    page.write_text(f"before\n{gpu_doc.BEGIN}\n{END}\nafter\n")
    command = ["--rows", str(rows), "--page", str(page)]
    assert gpu_doc.main([*command, "--check"]) == 2
    assert gpu_doc.main(command) == 0 == gpu_doc.main([*command, "--check"])
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert page.with_suffix(".png").stat().st_size > 1000


def test_the_committed_page_is_up_to_date() -> None:
    assert (ROOT / "benchmarks" / "gpu.jsonl").exists()
    assert gpu_doc.main(["--check"]) == 0, "run python -m belady.gpu_doc"
