"""Plans: status and gap follow from the numbers; saved plans come back, and damaged or foreign ones are refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import Graph, GraphMismatch, InputError
from graphs.synthetic import chain
from planner import plan as planned
from planner.result import Plan, Status, is_saved_plan, load_plan, saved_row
from planner.schedule import Compute, Schedule, keep_all, with_frees
from planner.simulate import simulate
from tests.strategies import graphs, sequences


@pytest.fixture
def chain_2() -> Graph:
    """Ops 0 ... 4, value i made by op i; 3 reads 2 and 1, 4 reads 3 and 0. Keep-all: time 5, peak 4 (values 0, 1, 2, 3)."""
    return chain(2)


RERUN = [0, 1, 2, 3, 0, 4]  # value 0 dropped after op 1 and made again: time 6, peak 3


def found(graph: Graph, schedule: Schedule | None, budget_bytes: int = 100, **more: Any) -> Plan:
    return Plan.of(graph, budget_bytes, schedule, method="test", wall_s=0.25, **more)


def test_time_and_peak_come_from_simulate(chain_2: Graph) -> None:
    plan = found(chain_2, with_frees(chain_2, RERUN), 3)
    assert (plan.time_ns, plan.peak_bytes) == (6, 3)
    assert plan.overhead == pytest.approx(0.2)
    assert plan.row()["recomputed_ops"] == 1


@pytest.mark.parametrize(
    ("bounds", "asked_gap", "status", "gap"),
    [
        ({}, 0.5, Status.FEASIBLE, None),
        ({"bound_ns": 6}, 0.0, Status.OPTIMAL, 0.0),
        ({"bound_ns": 5}, 0.0, Status.FEASIBLE, 1 / 6),
        ({"bound_ns": 5}, 0.16, Status.FEASIBLE, 1 / 6),
        ({"bound_ns": 5}, 0.17, Status.OPTIMAL, 1 / 6),
        # What holds in the restricted space only proves nothing about schedules outside of it.
        ({"bound_ns": 5, "restricted_bound_ns": 6}, 0.0, Status.FEASIBLE, 1 / 6),
        ({"restricted_bound_ns": 7}, 0.0, Status.FEASIBLE, None),
    ],
)
def test_status_and_gap_follow_from_the_bounds(
    chain_2: Graph, bounds: dict[str, int], asked_gap: float, status: Status, gap: float | None
) -> None:
    plan = found(chain_2, with_frees(chain_2, RERUN), gap=asked_gap, **bounds)
    assert plan.status is status
    assert plan.gap == (gap if gap is None else pytest.approx(gap))


def test_without_a_schedule(chain_2: Graph) -> None:
    unknown, ruled_out = found(chain_2, None, bound_ns=5), found(chain_2, None, infeasible=True)
    assert (unknown.status, ruled_out.status) == (Status.UNKNOWN, Status.INFEASIBLE)
    for plan in (unknown, ruled_out):
        assert plan.time_ns is plan.peak_bytes is plan.gap is plan.overhead is None
        row = plan.row()
        assert [row[key] for key in ("time_ns", "peak_bytes", "overhead", "gap", "recomputed_ops")] == [None] * 5


@pytest.mark.parametrize(
    ("budget_bytes", "more", "message"),
    [
        (2, {}, "peak 3 above the budget 2"),
        (3, {"bound_ns": 7}, "bound 7 above the time 6"),
        (3, {"infeasible": True}, "proved infeasible"),
    ],
)
def test_methods_that_contradict_themselves_are_bugs(
    chain_2: Graph, budget_bytes: int, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        found(chain_2, with_frees(chain_2, RERUN), budget_bytes, **more)


def test_row_has_what_the_readme_promises(chain_2: Graph) -> None:
    row = found(replace(chain_2, device="cpu"), with_frees(chain_2, RERUN), 3, bound_ns=6).row()
    assert json.loads(json.dumps(row)) == row == {
        "graph": "chain_2", "method": "test", "seed": 0, "budget_bytes": 3, "budget_fraction": 0.75, "status": "OPTIMAL",
        "time_ns": 6, "keep_all_time_ns": 5, "overhead": pytest.approx(0.2), "bound_ns": 6, "restricted_bound_ns": None,
        "any_order_bound_ns": None, "gap": 0.0, "peak_bytes": 3, "recomputed_ops": 1, "wall_s": 0.25, "device": "cpu",
        "costs": None, "measured_time_ns": None, "measured_peak_bytes": None, "max_grad_error": None,
    }  # fmt: skip


@given(st.data())
def test_saved_plans_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    graph = data.draw(graphs(random=True))
    schedule = with_frees(graph, data.draw(sequences(graph)))
    try:
        peak = simulate(graph, schedule).peak_bytes
    except InputError as error:
        raise AssertionError("the sequence is not valid") from error
    plan = found(graph, schedule, peak, bound_ns=graph.keep_all_time_ns, restricted_bound_ns=None, notes={"cuts": [1, 2]})
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert load_plan(path, graph) == plan


def test_what_is_proved_of_all_orders_comes_back_and_older_files_do_not_say(chain_2: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = found(chain_2, with_frees(chain_2, RERUN), 3, bound_ns=6, any_order_bound_ns=5)
    plan.save(path)
    assert load_plan(path, chain_2) == plan and plan.gap == 0.0 and plan.any_order_gap == pytest.approx(1 / 6)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"any_order_bound_ns": 7}))
    with pytest.raises(InputError, match="its bound of 7 ns is above its time of 6 ns"):
        load_plan(path, chain_2)
    path.write_text(json.dumps(content | {"any_order_bound_ns": 6, "bound_ns": 5}))
    with pytest.raises(InputError, match="its bound for any order is above that for its own"):
        load_plan(path, chain_2)
    del content["any_order_bound_ns"]
    path.write_text(json.dumps(content))
    assert load_plan(path, chain_2) == replace(plan, any_order_bound_ns=None)
    assert found(chain_2, None, 1, any_order_bound_ns=5).any_order_gap is None
    with pytest.raises(AssertionError, match="bound 7 above the time 6 found"):
        found(chain_2, with_frees(chain_2, RERUN), 3, any_order_bound_ns=7)


@pytest.mark.parametrize("infeasible", [True, False])
def test_plans_without_a_schedule_come_back(chain_2: Graph, tmp_path: Path, infeasible: bool) -> None:
    plan = found(chain_2, None, 1, infeasible=infeasible, seed=3)
    plan.save(tmp_path / "plan.json.gz")
    assert load_plan(tmp_path / "plan.json.gz", chain_2) == plan


def test_a_plan_for_another_graph_is_refused(chain_2: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found(chain_2, keep_all(chain_2)).save(path)
    for other in (chain(3), chain(2, size_bytes=2), chain_2.with_costs([1, 1, 1, 1, 2])):
        with pytest.raises(GraphMismatch, match=rf"{path} was made for the graph 'chain_2' \(\w+\), not for '{other.name}'"):
            load_plan(path, other)
    assert load_plan(path, replace(chain_2, name="renamed")).schedule == keep_all(chain_2)


@pytest.mark.parametrize(
    ("entry", "found_there", "message"),
    [
        ("schedule", [0, 1, 2, "x"], "step 3: expected an integer"),
        ("schedule", [0, 1, 2], "at the end value 4 .* is not in memory"),
        ("schedule", [4], "step 0: .* which is not in memory"),
        ("schedule", "all", "its entry 'schedule' is 'all'"),
        ("schedule", None, "status OPTIMAL without a schedule"),
        ("budget_bytes", 3, "its schedule needs 4 bytes, more than its budget"),
        ("budget_bytes", "4", "its entry 'budget_bytes' is '4'"),
        ("budget_bytes", None, "its entry 'budget_bytes' is None"),
        ("bound_ns", 6, "its bound of 6 ns is above its time of 5 ns"),
        ("budget_bytes", -4, "its entry 'budget_bytes' is -4"),
        ("bound_ns", 4.5, "its entry 'bound_ns' is 4.5"),
        ("bound_ns", -1, "its entry 'bound_ns' is -1"),
        ("bound_ns", None, "status OPTIMAL without a bound"),
        ("bound_ns", 10**400, r"its entry 'bound_ns' is 10{76}\.\.\.$"),
        ("restricted_bound_ns", 10**400, r"its entry 'restricted_bound_ns' is 10{76}\.\.\.$"),
        ("restricted_bound_ns", True, "its entry 'restricted_bound_ns' is True"),
        ("status", "BEST", "'BEST' is not a valid Status"),
        ("status", "INFEASIBLE", "status INFEASIBLE with a schedule"),
        ("status", 1, "its entry 'status' is 1"),
        ("method", None, "its entry 'method' is None"),
        ("seed", "x", "its entry 'seed' is 'x'"),
        ("wall_s", "long", "its entry 'wall_s' is 'long'"),
        ("wall_s", -5.0, "its entry 'wall_s' is -5.0"),
        ("notes", [], r"its entry 'notes' is \[\]"),
    ],
)
def test_damaged_entries_are_named(chain_2: Graph, tmp_path: Path, entry: str, found_there: object, message: str) -> None:
    path = tmp_path / "plan.json"
    found(chain_2, keep_all(chain_2), 4, bound_ns=5).save(path)
    content = json.loads(path.read_text())
    assert entry in content
    path.write_text(json.dumps(content | {entry: found_there}))
    with pytest.raises(InputError, match=f"plan.json is damaged: .*{message}"):
        load_plan(path, chain_2)


def test_every_missing_entry_is_named(chain_2: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found(chain_2, keep_all(chain_2), 4).save(path)
    content = json.loads(path.read_text())
    for entry in content.keys() - {"schema", "graph", "figures", "op_costs", "any_order_bound_ns"}:
        path.write_text(json.dumps({key: value for key, value in content.items() if key != entry}))
        with pytest.raises(InputError, match=f"plan.json is damaged: it has no entry '{entry}'"):
            load_plan(path, chain_2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"schema": "belady-plan-1"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"schema": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"schema": "belady-plan-1", "wall_s": NaN}', "is not JSON: NaN is no finite number"),
        ('{"schema": "belady-plan-1", "wall_s": -1e999}', "is not JSON: -1e999 is no finite number"),
        ('{"schema": "belady-plan-2"}', r"is not a belady-plan-1 file \(its schema entry is 'belady-plan-2'\)"),
        ("[1]", r"is not a belady-plan-1 file \(its schema entry is None\)"),
        ('{"schema": "belady-graph-1"}', r"is not a belady-plan-1 file \(its schema entry is 'belady-graph-1'\)"),
    ],
)
def test_files_that_hold_no_plan(chain_2: Graph, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"plan.json {message}"):
        load_plan(path, chain_2)


def test_a_saved_plan_tells_its_row_without_its_graph(chain_2: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for plan in (
        found(replace(chain_2, device="cpu"), with_frees(chain_2, RERUN), 3, bound_ns=6, notes={"cuts": [1]}),
        found(chain_2, None, 1, infeasible=True),
    ):
        plan.save(path)
        measured = {"measured_time_ns", "measured_peak_bytes", "max_grad_error"}
        row = {key: cell for key, cell in plan.row().items() if key not in measured}
        of_graph = {"fingerprint": plan.graph.fingerprint(), "ops": None if plan.schedule is None else 5}
        assert saved_row(path) == row | of_graph | {"notes": plan.notes}


def test_a_plan_saved_without_figures_is_read_all_the_same(chain_2: Graph, tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", found(chain_2, with_frees(chain_2, RERUN), 3, bound_ns=6)
    plan.save(path)
    content = json.loads(path.read_text())
    del content["figures"]
    path.write_text(json.dumps(content, indent=1))
    assert load_plan(path, chain_2) == plan and is_saved_plan(path)
    for schema, is_one in (("belady-plan-2", True), ("belady-plan-10", True), ("belady-plan-", False), ("belady-graph-1", False)):
        path.write_text(json.dumps(content | {"schema": schema}))
        assert is_saved_plan(path) is is_one
    path.write_text(json.dumps(content))
    row = saved_row(path)
    assert (row["ops"], row["bound_ns"], row["time_ns"], row["peak_bytes"], row["gap"]) == (5, 6, None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figures": 3}, "its entry 'figures' is 3"),
        ({"figures": {}}, "it has no entry 'device'"),
        ({"fingerprint": None}, "its entry 'fingerprint' is None"),
        ({"schedule": [0, "x"]}, "step 1: expected an integer"),
        ({"status": "BEST"}, "'BEST' is not a valid Status"),
        ({"status": "UNKNOWN"}, "status UNKNOWN with a schedule"),
        ({"figures": 999 * "x"}, r"its entry 'figures' is 'x{76}\.\.\.$"),
        ({"wall_s": [999 * "x"]}, r"its entry 'wall_s' is \['x{75}\.\.\.$"),
        ({"status": 999 * "x"}, r"'x{76}\.\.\. is not a valid Status$"),
        ({"schedule": [999 * "x"]}, r"step 0: expected an integer, found 'x{76}\.\.\.$"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_damaged_figures_are_named(chain_2: Graph, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    found(chain_2, keep_all(chain_2), 4, bound_ns=5).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=f"plan.json is damaged: {message}"):
        saved_row(path)


def test_a_budget_beyond_all_floats_is_planned_for_and_saved(chain_2: Graph, tmp_path: Path) -> None:
    rich = planned(chain_2, 10**400)
    assert rich.row()["budget_fraction"] is None and rich.row()["budget_bytes"] == 10**400
    rich.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", chain_2).budget_bytes == saved_row(tmp_path / "plan.json")["budget_bytes"] == 10**400


def test_files_that_cannot_be_read_or_written(chain_2: Graph, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nowhere\.json: No such file or directory"):
        load_plan(tmp_path / "nowhere.json", chain_2)
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        load_plan(tmp_path, chain_2)
    plan = found(chain_2, keep_all(chain_2))
    with pytest.raises(InputError, match=r"cannot write .*missing/plan\.json: No such file or directory"):
        plan.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(InputError, match=r"cannot write .*: Is a directory"):
        plan.save(tmp_path)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"plan\.json is damaged: .*utf-8"):
        load_plan(tmp_path / "plan.json", chain_2)
    assert not [path for path in tmp_path.iterdir() if path.name != "plan.json"]  # no temporary file is left behind


def test_writing_keeps_links_and_goes_into_pipes(chain_2: Graph, tmp_path: Path) -> None:
    plan = found(chain_2, keep_all(chain_2))
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to("target.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_plan(tmp_path / "target.json", chain_2) == plan
    reader, writer = os.pipe()
    plan.save(f"/dev/fd/{writer}")
    assert json.loads(os.read(reader, 10_000))["graph"] == "chain_2"
    os.close(reader)
    os.close(writer)


def test_an_interrupted_write_leaves_the_old_file(chain_2: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan = found(chain_2, keep_all(chain_2))
    plan.save(path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        replace(plan, seed=9).save(path)
    assert load_plan(path, chain_2) == plan
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_for_a_graph_alone_trains_nothing(chain_2: Graph) -> None:
    with pytest.raises(InputError, match="chain_2 has no captured model behind it"):
        found(chain_2, (*keep_all(chain_2), Compute(0))).module()


def test_a_plan_is_told_in_a_line(chain_2: Graph) -> None:
    plan = found(chain_2, with_frees(chain_2, RERUN), 3, bound_ns=6)
    costs = "overhead 20.00%, peak 3 bytes, 1 ops recomputed"
    assert repr(plan) == f"Plan({chain_2.name} in 3 bytes, OPTIMAL by test, {costs}, proved within 0.00%)"
    assert repr(found(chain_2, None, 1)) == f"Plan({chain_2.name} in 1 bytes, UNKNOWN by test)"
