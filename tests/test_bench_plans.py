"""The benchmark of plans: what it refuses, what it leaves out, and how it ends on Ctrl-C, as all do that solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belady import bench_grid, bench_layered, bench_least, bench_others, bench_plans, bench_whole
from belady.rows import read_rows
from graphs.ir import Graph
from graphs.synthetic import linear_network, random_layered
from planner.frontier import MinBudget, min_budget, plans
from planner.plan import solve
from planner.result import Plan


def stopped(plan: Plan) -> Plan:
    return replace(plan, notes={**plan.notes, "stopped": "interrupted"})


def interrupted(graph: Graph, *_: object, **options: Any) -> Plan:
    """What ``solve`` returns on Ctrl-C."""
    return stopped(solve(graph, 10**15))


def least_interrupted(graph: Graph, **_: object) -> MinBudget:
    return replace(min_budget(graph), interrupted=True)


def plans_interrupted(graph: Graph, budgets: list[int], *, done: Callable[[Plan], None], **options: Any) -> list[Plan]:
    found = [stopped(plan) for plan in plans(graph, budgets[:2], **options)]
    for plan in found:
        done(plan)
    return found


@pytest.mark.parametrize(
    ("bench", "replaced", "arguments"),
    [
        (bench_plans, "solve", ["--only", "RL1"]),
        (bench_layered, "solve", ["--kind", "RL1", "--share", "0.9"]),
        (bench_least, "solve", ["--only", "mlp"]),
        (bench_least, "min_budget", ["--only", "mlp"]),
        (bench_grid, "plans", ["--only", "vgg16"]),
        (bench_others, "solve", ["--only", "mixer"]),
    ],
)
def test_what_ctrl_c_leaves_of_a_plan_is_no_row(
    bench: Any,
    replaced: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    instead = {"solve": interrupted, "min_budget": least_interrupted, "plans": plans_interrupted}
    solver = bench_plans if bench is bench_others else bench
    monkeypatch.setattr(solver, replaced, instead[replaced])
    monkeypatch.setattr(bench_whole, "step_graph", lambda name: replace(linear_network(4), name=name))
    monkeypatch.setattr(bench_others, "other_graph", lambda name: replace(linear_network(4), name=name))
    out = tmp_path / "rows.jsonl"
    assert bench.main(["--out", str(out), *arguments]) == 130
    assert not out.exists() or read_rows(out) == []
    assert "interrupted" in capsys.readouterr().err


def test_no_time_is_no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def timed(graph: Graph, budget_bytes: int, *, time_limit_s: float, **_: object) -> Plan:
        limits.append(time_limit_s)
        return Plan.of(graph, budget_bytes, None, method="none", wall_s=0.0)

    monkeypatch.setattr(bench_plans, "solve", timed)
    monkeypatch.setattr(bench_layered, "solve", timed)
    monkeypatch.setattr(bench_layered, "SEEDS", 1)
    assert bench_plans.main(["--out", str(tmp_path / "plans.jsonl"), "--only", "RL1", "--time-limit", "0"]) == 0
    assert bench_layered.main(["--out", str(tmp_path / "layered.jsonl"), "--kind", "RL1", "--time-limit", "0"]) == 0
    assert len(limits) == 9 and set(limits) == {0.0}


@pytest.mark.parametrize(
    ("name", "said"), [("nosuch", "unknown graph 'nosuch'; there are: vgg16_176,"), ("log_unet", "log_unet is published")]
)
def test_names_that_nothing_would_be_made_for_are_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BELADY_DATA", raising=False)
    out = tmp_path / "plans.jsonl"
    assert bench_plans.main(["--out", str(out), "--only", name]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def test_rows_of_another_benchmark_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plans.jsonl"
    row = solve(random_layered("RL1", 0), 10**15).row()
    for bench, missing, arguments in ((bench_plans, "ops", ["--only", "RL1"]), (bench_layered, "order", ["--kind", "RL1"])):
        bench_whole.write_rows(str(out), [row])
        before = out.read_text()
        assert bench.main(["--out", str(out), *arguments]) == 2
        assert f"{out} holds rows of another kind: row 1 has no entry {missing!r}" in capsys.readouterr().err
        assert out.read_text() == before
