"""The methods benchmark on tiny graphs: rows, resuming, guards; the page and the figure drawn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belady import methods_doc, online_doc
from belady.bench_methods import Case, bench, cases, cells_of, graph_names, isolated, main, method_names, row_of
from belady.page import ROOT, latest
from belady.rows import read_rows
from belady.sweep import Cell
from graphs.errors import InputError
from graphs.ir import Graph
from graphs.synthetic import chain, random_training
from online import HEURISTICS, best_run
from planner.methods import METHODS
from planner.plan import solve
from planner.schedule import keep_all
from planner.simulate import simulate

METHODS_TRIED = ("cutting_stages", "keep_all", "revolve", "twremat", "online:dtr", "online:best")
OPTIONS = {"gap": 0.001, "time_limit_s": 20.0}


def tiny_cases() -> list[Case]:
    return [Case(chain(6), (6,)), Case(skips(), (SKIPS_BYTES,))]


def skips() -> Graph:
    """No chain: a layer reads an activation from further back."""
    return random_training(6, 0, skip_share=1.0)


SKIPS_BYTES = simulate(skips(), keep_all(skips())).peak_bytes - 1


def run_tiny(path: Path, **options: object) -> int:
    given = {"gap": 0.001, "time_limit_s": 20.0, "seed": 0} | options
    return bench(str(path), iter(tiny_cases()), METHODS_TRIED, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "methods.jsonl"
    assert run_tiny(path) == 2 * len(METHODS_TRIED)
    return path


def cell(graph: Graph, method: str, budget_bytes: int) -> Cell:
    return Cell(graph.fingerprint(), method, budget_bytes, 0, OPTIONS)


def test_every_method_and_rule_is_in_the_benchmark() -> None:
    names = method_names([])
    assert set(names) == {*METHODS, *(f"online:{rule}" for rule in HEURISTICS), "online:best"}
    assert graph_names([])[:5] == ["RL1", "RL2", "RL3", "RL4", "vgg16_176"]
    assert graph_names(["unet", "RL1", "unet"]) == ["unet", "RL1"]
    with pytest.raises(InputError, match="nonsense"):
        method_names(["nonsense"])
    with pytest.raises(InputError, match="nonsense"):
        graph_names(["nonsense"])


def test_rows_say_what_the_methods_say(rows_file: Path) -> None:
    rows = {(row["graph"], row["budget_bytes"], row["method"]): row for row in read_rows(rows_file)}
    graph, other = chain(6), skips()
    cells = (("chain_6", 6), (other.name, SKIPS_BYTES))
    assert set(rows) == {(*found, method) for found in cells for method in METHODS_TRIED}
    for method in ("cutting_stages", "revolve", "twremat"):
        plan = solve(graph, 6, method=method, gap=0.001, time_limit_s=20.0)
        row = rows["chain_6", 6, method]
        assert (row["time_ns"], row["status"], row["bound_ns"]) == (plan.time_ns, str(plan.status), plan.bound_ns)
        assert row["reason"] is None
        assert 0 <= row["found_s"] <= row["wall_s"] + 5  # the process has to start first
    best = best_run(graph, 6).plan()
    assert rows["chain_6", 6, "online:best"]["time_ns"] == best.time_ns
    assert rows["chain_6", 6, "online:best"]["notes"]["rule"] == best.notes["rule"]
    for row in rows.values():
        assert row["ops"] in (len(graph.ops), len(other.ops))
        assert row["rss_bytes"] > 0 and row["cpu_s"] > 0
        assert row["commit"] is None or isinstance(row["commit"], str)
        assert (row["time_ns"] is None) == (row["found_s"] is None) == (row["reason"] is not None)


def test_what_a_method_cannot_do_is_a_row_with_the_reason(rows_file: Path) -> None:
    rows = {(row["graph"], row["budget_bytes"], row["method"]): row for row in read_rows(rows_file)}
    refused = rows[skips().name, SKIPS_BYTES, "revolve"]
    assert refused["status"] == "REFUSED"
    assert "not a chain" in refused["reason"]
    kept = rows["chain_6", 6, "keep_all"]
    assert (kept["status"], kept["reason"]) == ("UNKNOWN", "keeping everything does not fit the budget")


def test_better_schedules_are_timed_as_they_come() -> None:
    graph = random_training(30, 2)
    budget_bytes = best_run(graph, 0.8).runs[0].budget_bytes
    row = row_of(graph, cell(graph, "twremat", budget_bytes))
    times = [time_ns for _, time_ns in row["found"]]
    seconds = [at for at, _ in row["found"]]
    assert len(times) > 1
    assert times == sorted(times, reverse=True) and seconds == sorted(seconds)
    assert row["time_ns"] == times[-1]
    assert row["found_s"] == seconds[-1] <= row["wall_s"] + 0.1


def test_a_benchmark_goes_on_where_it_stopped(tmp_path: Path, rows_file: Path) -> None:
    lines = rows_file.read_text().splitlines(keepends=True)
    path = tmp_path / "methods.jsonl"
    path.write_text("".join(lines[:9]) + lines[9][:40])  # stopped while writing a row
    assert run_tiny(path) == len(lines) - 9
    assert path.read_text().startswith("".join(lines[:9]))
    assert [(row["graph"], row["budget_bytes"], row["method"]) for row in read_rows(path)] == [
        (row["graph"], row["budget_bytes"], row["method"]) for row in map(json.loads, lines)
    ]
    assert run_tiny(path) == 0
    assert run_tiny(path, again=("keep_all",)) == 2


def test_another_time_limit_is_another_question_for_planners_only() -> None:
    case = tiny_cases()[0]
    one, other = (cells_of(case, METHODS_TRIED, gap=0.001, time_limit_s=limit, seed=0) for limit in (20.0, 19.0))
    same = {a.method for a, b in zip(one, other, strict=True) if a.key == b.key}
    assert same == {"online:dtr", "online:best"}


def test_a_process_that_does_not_stop_is_ended() -> None:
    graph = chain(6)
    row = isolated(graph, cell(graph, "keep_all", 6), guard_bytes=6 * 2**30, wall_limit_s=0.001)
    assert row["status"] == "FAILED"
    assert "time limit" in row["reason"]
    assert row["time_ns"] is None and row["found_s"] is None


def test_a_process_that_takes_too_much_memory_fails_alone() -> None:
    graph = chain(6)
    row = isolated(graph, cell(graph, "cutting_stages", 6), guard_bytes=64 * 2**20, wall_limit_s=60)
    assert row["status"] == "FAILED"
    assert row["reason"]


def test_layered_graphs_have_the_published_budgets() -> None:
    first, second = cases(["RL1"], seeds=2)
    assert (first.graph.name, second.graph.name) == ("RL1_seed0", "RL1_seed1")
    assert len(first.budgets) == 2


def test_published_instances(data: Path) -> None:
    (case,) = cases(["vgg16_176"], data=str(data))
    assert case.graph.name == "vgg16_176"
    assert case.budgets == (10 * 2**30, 9 * 2**30, 8 * 2**30)
    assert not list(cases(["vgg16_176"]))


@pytest.mark.slow
def test_captured_steps_have_budgets_that_can_be_met() -> None:
    (case,) = cases(["unet"])
    assert case.graph.name == "unet-batch8-size128"
    assert len(case.budgets) >= 3


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "rows.jsonl"), "--graph", "nonsense"]) == 2
    assert "unknown graph 'nonsense'" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "rows.jsonl"), "--graph", "RL1", "--time-limit", "-1"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--memory-gib", "0"], "--memory-gib must be above 0"),
        (["--memory-gib", "nan"], "--memory-gib must be above 0"),
        (["--graph", "vgg16_176"], "vgg16_176 is a published instance"),
    ],
)
def test_what_would_run_nothing_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BELADY_DATA", raising=False)
    assert main(["--out", str(tmp_path / "rows.jsonl"), "--method", "keep_all", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_command_writes_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert main(["--out", str(path), "--graph", "RL1", "--method", "keep_all", "--time-limit", "1"]) == 0
    assert [row["method"] for row in read_rows(path)] == ["keep_all"] * 2


# The page.


def page(tmp_path: Path) -> Path:
    path = tmp_path / "methods.md"
    path.write_text(f"before\n\n{methods_doc.BEGIN}\nold\n{methods_doc.END}\n\nafter\n")
    return path


def test_the_page_and_the_figure_come_from_rows(tmp_path: Path, rows_file: Path) -> None:
    path = page(tmp_path)
    arguments = ["--rows", str(rows_file), "--page", str(path)]
    assert methods_doc.main([*arguments, "--check"]) == 2
    assert methods_doc.main(arguments) == 0
    text = path.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n")
    assert "old" not in text
    assert methods_doc.main([*arguments, "--check"]) == 0
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    for method in METHODS_TRIED:
        assert f"| `{method}` |" in text
    assert "### chain_6" in text
    # chain_6: revolve finds the optimum, so nothing above our bound; keep_all finds nothing.
    (line,) = [line for line in text.split("### chain_6")[1].split("###")[0].splitlines() if "`revolve`" in line]
    assert line.count("0.00 %") == 1


def test_cost_is_over_the_best_bound_of_the_same_cell() -> None:
    base = {
        "graph": "g",
        "fingerprint": "f",
        "budget_bytes": 5,
        "budget_fraction": 0.5,
        "seed": 0,
        "options": {},
        "keep_all_time_ns": 80,
        "overhead": None,
        "peak_bytes": 5,
        "recomputed_ops": 1,
        "status": "FEASIBLE",
        "notes": {},
    }
    rows = [
        {**base, "method": "cutting_stages", "time_ns": 120, "bound_ns": 100},
        {**base, "method": "keep_all", "time_ns": None, "bound_ns": 80},
        {**base, "method": "twremat", "time_ns": 150, "bound_ns": 80},
        {**base, "method": "twremat", "time_ns": 130, "bound_ns": 80},  # run again: this one counts
        {**base, "method": "free_order", "time_ns": 90, "bound_ns": None},
    ]
    found = methods_doc.cells(rows)
    over = {row["method"]: found.over(row) for row in found.rows}
    assert over == pytest.approx({"cutting_stages": 0.2, "keep_all": None, "twremat": 0.3, "free_order": -0.1})
    assert found.methods[0] == "cutting_stages"


def test_random_graphs_of_one_size_stand_together_as_medians(rows_file: Path) -> None:
    rows = [row for row in read_rows(rows_file) if row["graph"] == "chain_6"]
    seeds = [{**row, "graph": f"RL1_seed{seed}", "fingerprint": str(seed)} for row in rows for seed in range(3)]
    seeds[0] |= {"time_ns": None, "status": "UNKNOWN", "found_s": None}
    text = methods_doc.by_graph(methods_doc.cells(seeds))
    assert text.count("###") == 1
    assert "3 random graphs" in text
    assert ", 2 of 3 |" in text


@pytest.mark.parametrize("document", [methods_doc, online_doc])
def test_no_page_is_drawn_from_nothing(document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, empty = tmp_path / "page.md", tmp_path / "empty.jsonl"
    path.write_text(f"{document.BEGIN}\nold\n{document.END}\n")
    before = path.read_text()
    empty.touch()
    rows = ROOT / "benchmarks"
    for given, said in (
        (tmp_path / "none.jsonl", "cannot read"),
        (empty, "holds no rows of bench_"),
        (rows / "gpu.jsonl", "rows of another kind"),
        (rows / "plans.jsonl", "holds no rows of bench_" if document is online_doc else "rows of another kind"),
    ):
        assert document.main(["--rows", str(given), "--page", str(path)]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
        assert path.read_text() == before and list(tmp_path.glob("*.png")) == []


def test_a_graph_captured_anew_counts_as_it_is_now(rows_file: Path) -> None:
    """Another version of torch may capture another graph by the same name; both were on the page, as if they were random ones."""
    rows = [row for row in read_rows(rows_file) if row["graph"] == "chain_6"]
    anew = [{**row, "fingerprint": "anew", "budget_bytes": row["budget_bytes"] + 1} for row in rows]
    assert latest([*rows, *anew[:2]]) == anew[:2]
    assert latest([*anew, *rows]) == rows
    assert "random graphs" not in methods_doc.by_graph(methods_doc.cells([*rows, *anew]))


def test_a_page_without_markers(tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = page(tmp_path)
    path.write_text("no markers")
    assert methods_doc.main(["--rows", str(rows_file), "--page", str(path)]) == 2
    assert "no section" in capsys.readouterr().err


def test_the_committed_page_is_up_to_date() -> None:
    assert methods_doc.main(["--check"]) == 0
