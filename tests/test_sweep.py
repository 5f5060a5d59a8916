"""Sweeps: what is asked for, cells, rows that help each other, resuming, interruption, processes that die."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from belady import sweep
from belady.cli import main
from belady.plots import draw_overhead
from belady.rows import RowFile, read_rows, write_rows
from belady.sweep import Cell, Row, budgets_of, cells_of, key_of, methods_of, proved, row_of, rules_of, settle, work
from graphs import Graph, InputError, Op, Value
from graphs.serialize import save_graph
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS
from planner import plan
from planner.methods import METHODS
from tests.strategies import random_graph
from tests.test_compare import training_chain

BELADY = Path(sys.executable).with_name("belady")


@pytest.fixture(scope="module")
def chain() -> Graph:
    return training_chain(8)


@pytest.fixture
def chain_file(chain: Graph, tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    save_graph(chain, path)
    return str(path)


def cells(graph: Graph, budgets: list[int], *names: str, time_limit_s: float = 2.0) -> list[Cell]:
    methods = [name for name in names if not name.startswith("online:")]
    rules = [name for name in names if name.startswith("online:")]
    return cells_of({graph.fingerprint(): budgets}, methods, rules, gap=0.0, time_limit_s=time_limit_s, seed=0)


def untimed(rows: list[Row]) -> list[Row]:
    plain = ({**strip(row, "wall_s", "cpu_s"), "notes": strip(row["notes"], "search_s")} for row in rows)
    return sorted(plain, key=lambda row: str(key_of(row)))


def strip(row: Row, *names: str) -> Row:
    return {name: entry for name, entry in row.items() if name not in names}


# What is asked for.


@pytest.mark.parametrize(
    ("asked", "size_bytes"),
    [
        (["0.5"], [500]),
        (["0.2:0.9:0.1"], [200, 300, 400, 500, 600, 700, 800, 900]),
        (["0.2:0.9:0.3"], [200, 500, 800]),  # the last is not met
        (["0.7:0.7:0.1"], [700]),
        ([".1:1:.45"], [100, 550, 1000]),
        (["20%:90.5%:35%"], [200, 550, 900]),
        (["7%:0.21:7%"], [70, 140, 210]),
        (["100:300:100"], [100, 200, 300]),
        (["100:102:1"], [100, 101, 102]),
        (["1KiB:3KiB:1KiB", "0.5", "500B"], [500, 1024, 2048, 3072]),
    ],
)
def test_budgets(asked: list[str], size_bytes: list[int]) -> None:
    assert budgets_of(asked, 1000) == size_bytes


def test_a_range_has_the_budgets_that_are_written_one_by_one() -> None:
    # Steps are exact: adding 0.05 up as floats misses bytes, and the last budget.
    one_by_one = [f"{hundredths / 100}" for hundredths in range(20, 91, 5)]
    assert budgets_of(["0.2:0.9:0.05"], 10**15 + 7) == budgets_of(one_by_one, 10**15 + 7)


@pytest.mark.parametrize(
    "text",
    [
        "0.2:0.9",
        "0.9:0.2:0.1",
        "0.2:0.9:0",
        "0.2:2GiB:0.1",
        "1GiB:2GiB:0.5",
        "0:1:0.1",
        "::",
        "a:b:c",
        "0.2:0.9:0.1:1",
        "-1:1:.1",
    ],
)
def test_unusable_ranges(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        budgets_of([text], 1000)


def test_a_range_of_millions_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="more than 10,000 budgets"):
        budgets_of(["0.1:0.9:0.000000000001"], 1000)


def test_names_of_methods_and_rules() -> None:
    assert methods_of(["keep_all", "cutting_stages", "keep_all"]) == ["keep_all", "cutting_stages"]
    assert methods_of(["all"]) == list(METHODS)
    assert rules_of(["lru", "dtr+reclaim", "lru+eager"]) == ["online:lru", "online:dtr+reclaim"]
    assert rules_of(["all"]) == ["online:" + name for name in (*HEURISTICS, *ADDRESS_HEURISTICS)]
    assert methods_of(["none"]) == rules_of(["none"]) == []
    with pytest.raises(InputError, match="unknown method 'magic'"):
        methods_of(["magic"])
    with pytest.raises(InputError, match="unknown heuristic 'magic'"):
        rules_of(["magic"])
    with pytest.raises(InputError, match="'magic' cannot be behind "):
        rules_of(["dtr+magic"])


# Cells.


def test_a_cells_row_is_that_of_its_plan_or_run(chain: Graph) -> None:
    plan, run, small, stuck = (
        row_of(chain, cell)
        for cell in [
            *cells(chain, [500], "cutting_stages", "online:lru"),
            *cells(chain, [200], "online:lru"),
            *cells(chain, [500], "keep_all"),
        ]
    )
    assert (plan["status"], plan["time_ns"], plan["options"]) == ("OPTIMAL", 220, {"gap": 0.0, "time_limit_s": 2.0})
    assert run["status"] == "FEASIBLE" and run["time_ns"] > 220 and run["options"] == {} and run["notes"]["evictions"] > 0
    assert (small["status"], small["reason"]) == ("INFEASIBLE", "every schedule needs at least 300 bytes")
    assert (stuck["status"], stuck["reason"]) == ("UNKNOWN", "keeping everything does not fit the budget")
    for row in (plan, run, small, stuck):
        assert json.loads(json.dumps(row)) == row and row["fingerprint"] == chain.fingerprint()
        assert row.keys() == plan.keys() and row["cpu_s"] >= 0


def test_an_error_is_a_row_with_its_reason(chain: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status, reason in (
        (AssertionError("two and two"), "FAILED", "AssertionError: two and two"),
        (MemoryError(), "FAILED", "MemoryError: "),
        (InputError("not a chain"), "REFUSED", "not a chain"),
    ):

        def broken(*arguments: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(sweep, "solve", broken)
        row = row_of(chain, cells(chain, [500], "cutting_stages")[0])
        assert (row["status"], row["reason"], row["time_ns"], row["method"]) == (status, reason, None, "cutting_stages")


def test_processes_make_the_same_rows_as_one(chain: Graph) -> None:
    asked = cells(chain, [300, 500, 700], "cutting_stages", "keep_all", "online:dtr", "online:lru", time_limit_s=20.0)
    asked = [cell for cell in asked if (cell.method, cell.budget_bytes) != ("cutting_stages", 300)]  # stopped by the clock
    for jobs in (1, 3):
        done = dict(work({chain.fingerprint(): chain}, asked, jobs))
        assert untimed(list(done.values())) == untimed([row_of(chain, cell) for cell in asked])


class Deadly:
    """Does something to the process that receives it."""

    def __init__(self, how: Any, *arguments: object) -> None:
        self.how = how, arguments

    def __reduce__(self) -> Any:
        return self.how


def test_a_process_that_dies_fails_its_cell_alone(chain: Graph) -> None:
    fingerprint = chain.fingerprint()
    fine = cells(chain, [700, 600, 500], "online:lru")
    deadly = [
        Cell(fingerprint, "cutting_stages", 501, 0, {"gap": Deadly(os._exit, 3)}),
        Cell(fingerprint, "cutting_stages", 502, 0, {"gap": Deadly(signal.raise_signal, signal.SIGKILL)}),
    ]
    rows = {cell.budget_bytes: row for cell, row in work({fingerprint: chain}, [deadly[0], *fine, deadly[1]], 2)}
    assert {rows[cell.budget_bytes]["status"] for cell in fine} == {"FEASIBLE"}
    assert [(rows[b]["status"], rows[b]["reason"]) for b in (501, 502)] == [
        ("FAILED", "its process ended with exit code 3"), ("FAILED", "its process ended with SIGKILL"),
    ]  # fmt: skip


def at_work(path: str) -> None:
    """What a method does: it works for long, and puts its house in order when it is interrupted."""
    try:
        Path(path).write_text("at work")
        time.sleep(100)
    except KeyboardInterrupt:
        Path(path).write_text("left in order")


def test_methods_can_put_their_house_in_order(chain: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "GRACE_S", 30.0)  # the machine may be busy
    path = tmp_path / "house"
    slow = Cell(chain.fingerprint(), "cutting_stages", 500, 0, {"gap": Deadly(at_work, str(path))})
    rows = work({chain.fingerprint(): chain}, [slow, *cells(chain, [500], "online:lru")], 2)
    assert next(rows)[0].method == "online:lru"
    while not path.exists():
        time.sleep(0.01)
    began = time.monotonic()
    rows.close()
    assert path.read_text() == "left in order" and time.monotonic() - began < sweep.GRACE_S


def test_leaving_early_leaves_no_process(chain: Graph) -> None:
    rows = work({chain.fingerprint(): chain}, cells(chain, list(range(300, 900)), "online:lru"), 2)
    next(rows)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    rows.close()
    assert len(before - set(children.read_text().split())) == 2


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_a_sweep_that_is_killed(end: signal.Signals, tmp_path: Path) -> None:
    code = f"""
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests run under nohup
from belady.sweep import Cell, work
from tests.test_sweep import Deadly, at_work
from tests.test_compare import training_chain
graph = training_chain(8)
fingerprint = graph.fingerprint()
asked = [Cell(fingerprint, "keep_all", 500 + i, 0, {{"gap": Deadly(at_work, f"{tmp_path}/{{i}}")}}) for i in range(2)]
for _ in work({{fingerprint: graph}}, asked, 2):
    pass
"""
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        members = session(process.pid)
        process.send_signal(end)
    assert len(members) >= 3
    deadline = time.monotonic() + 30
    while session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not session(process.pid)


def session(number: int) -> list[str]:
    """The living processes of a session."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if of == str(number) and state != "Z":
            members.append(path.parent.name)
    return members


# Rows that help each other.


def test_a_plan_for_less_is_one_for_more(chain: Graph) -> None:
    rows = [row_of(chain, cell) for cell in cells(chain, [500, 600, 700, 800], "cutting_stages")]
    times = [row["time_ns"] for row in rows]
    assert times == [220, 210, 200, 190]
    worse = [row | {"time_ns": 400, "status": "FEASIBLE"} if row["budget_bytes"] >= 700 else row for row in rows]
    worse[3] = worse[3] | {"time_ns": None, "status": "UNKNOWN", "reason": "time limit"}
    settled = settle(worse)
    assert settled[:2] == rows[:2]
    for row, own, time_ns, status in zip(settled[2:], rows[2:], (400, None), ("FEASIBLE", "UNKNOWN"), strict=True):
        assert (row["time_ns"], row["peak_bytes"], row["recomputed_ops"]) == (210, rows[1]["peak_bytes"], 4)
        assert row["overhead"] == pytest.approx(210 / 170 - 1)
        assert row["bound_ns"] == own["bound_ns"] == own["time_ns"]  # its own
        assert row["gap"] == pytest.approx(1 - own["bound_ns"] / 210) and row["status"] == "FEASIBLE" and row["reason"] is None
        told = {"reused_from_budget_bytes": 600, "own_time_ns": time_ns, "own_status": status}
        assert told.items() <= row["notes"].items()
    assert settle(settled) == settled


def test_what_is_within_the_gap_is_optimal_and_what_failed_stays_so(chain: Graph) -> None:
    small, large = (row_of(chain, cell) for cell in cells(chain, [500, 600], "cutting_stages"))
    loose = large["options"] | {"gap": 0.05}
    small, large = small | {"options": loose}, large | {"options": loose, "time_ns": 400}
    assert settle([small, large])[1]["status"] == "OPTIMAL"  # 220 against the bound 210
    failed = large | {"status": "FAILED", "time_ns": None}
    assert settle([small, failed])[1] == failed
    wrong = settle([small, large | {"status": "INFEASIBLE", "time_ns": None}])[1]
    assert wrong["status"] == "FAILED" and "500 bytes are enough" in wrong["reason"]


def test_of_a_plan_in_another_order_the_bound_of_any_order_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In 20 bytes nothing fits in graph order; in 25 something does, but takes longer than the plan for 20 in another order."""
    ops = (
        Op("p", (), (0,), 5),
        Op("a", (), (1,), 1, effect=True),
        Op("b", (), (2,), 1, effect=True),
        Op("c", (1,), (3,), 1),
        Op("d", (2,), (4,), 1),
        Op("e", (0, 3, 4), (5,), 1),
    )
    graph = Graph("g", ops, tuple(Value("v", size) for size in (8, 10, 10, 1, 1, 1)), frozenset(), frozenset({5}))
    rows = [row_of(graph, cell) for cell in cells(graph, [20, 25], "cutting_stages")]
    assert [(row["time_ns"], row["bound_ns"]) for row in rows] == [(10, 10), (15, 15)]
    settled = settle(rows)
    assert [(row["time_ns"], row["bound_ns"], row["status"]) for row in settled] == [(10, 10, "OPTIMAL")] * 2
    assert settled[1]["notes"]["order_bound_ns"] == 15 and settled[1]["notes"]["order"] == rows[0]["notes"]["order"]
    assert settle(settled) == settled
    online = row_of(graph, cells(graph, [25], "online:lru")[0])
    assert settle([*rows, online])[-1]["bound_ns"] == 15  # it keeps to graph order
    save_graph(graph, tmp_path / "g.json")
    assert main(["sweep", str(tmp_path / "g.json"), "--budget", "20", "--budget", "25", "--rule", "lru"]) == 0
    assert re.findall(r"\d+ B +(\S+) +(\S+)", capsys.readouterr().out) == [("0.00%", "0.00%")] * 2


def test_other_methods_seeds_options_and_graphs_are_not_mixed(chain: Graph) -> None:
    small, large = (row_of(chain, cell) for cell in cells(chain, [500, 600], "cutting_stages"))
    worse = large | {"time_ns": 400}
    for other in ({"method": "keep_all"}, {"seed": 1}, {"options": {"gap": 0.1}}, {"fingerprint": "another"}):
        assert settle([small | other, worse])[1] == worse


def test_the_last_row_of_a_cell_counts_and_other_rows_are_left_out(chain: Graph) -> None:
    first, second = (row_of(chain, cell) for cell in cells(chain, [500, 600], "cutting_stages"))
    assert settle([first | {"status": "FAILED"}, {"graph": "of another program"}, second, first]) == [first, second]


@pytest.mark.parametrize("seed", range(12))
def test_curves_fall_and_nobody_is_below_the_ground(seed: int) -> None:
    graph = random_graph(seed, max_ops=6)
    budgets = budgets_of(["0.3:1:0.1"], max(10, sum(value.size_bytes for value in graph.values)))
    rows = settle(
        [row_of(graph, c) for c in cells(graph, budgets, "cutting_stages", "online:dtr", "online:lru", time_limit_s=0.2)]
    )
    ground = proved(rows).get(graph.fingerprint(), {})
    assert [ground[b] for b in sorted(ground)] == sorted(ground.values(), reverse=True)
    planned = {row["budget_bytes"]: row for row in rows if row["method"] == "cutting_stages"}
    times = [planned[b]["time_ns"] for b in budgets if planned[b]["time_ns"] is not None]
    assert times == sorted(times, reverse=True)
    for row in rows:
        assert row["status"] != "FAILED", row["reason"]
        if row["time_ns"] is not None:
            assert ground.get(row["budget_bytes"], 0) <= row["time_ns"] and row["peak_bytes"] <= row["budget_bytes"]
    assert settle(rows) == rows


@given(st.lists(st.tuples(st.integers(1, 9), st.one_of(st.none(), st.integers(10, 30)), st.integers(1, 10)), max_size=8))
def test_settled_rows_are_monotone(found: list[tuple[int, int | None, int]]) -> None:
    rows = [
        {
            "fingerprint": "f", "method": "m", "seed": 0, "options": {"gap": 0.1}, "notes": {}, "budget_bytes": budget_bytes,
            "time_ns": time_ns, "bound_ns": bound_ns, "status": "UNKNOWN" if time_ns is None else "FEASIBLE", "reason": None,
            "overhead": None, "peak_bytes": budget_bytes, "recomputed_ops": 0, "gap": None, "graph": "g",
            "budget_fraction": None, "keep_all_time_ns": 10,
        }
        for budget_bytes, time_ns, bound_ns in found
    ]  # fmt: skip
    settled = settle(rows)
    last = {row["budget_bytes"]: row for row in rows}
    assert len(settled) == len(last)
    for row in settled:
        assert row["bound_ns"] == last[row["budget_bytes"]]["bound_ns"]
        smaller = [last[b]["time_ns"] for b in last if b <= row["budget_bytes"] and last[b]["time_ns"] is not None]
        assert row["time_ns"] == min(smaller, default=None) and row["peak_bytes"] <= row["budget_bytes"]
    assert settle(settled) == settled


# The file.


def test_rows_are_whole_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "rows.jsonl")
    file = RowFile(path)
    with pytest.raises(InputError, match="another process"):
        RowFile(path)
    for number in range(3):
        assert file.append({"graph": "g", "number": number}) == read_rows(path)[-1]
    file.close()
    whole = Path(path).read_text()
    for torn in (whole[:-20], whole[: whole.rindex('{"graph"') + 1], whole[: whole.rindex('{"graph"')] + 9 * "\0"):
        Path(path).write_text(torn)
        file = RowFile(path)
        assert file.repaired and [row["number"] for row in file.rows] == [0, 1]
        file.append({"graph": "g", "number": 2})
        file.close()
        assert [row["number"] for row in read_rows(path)] == [0, 1, 2]


def test_rows_do_not_go_to_a_file_that_has_just_been_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "rows.jsonl")
    first, lock = RowFile(path), fcntl.flock

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        first.replace([{"graph": "g", "number": 1}])
        first.close()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = RowFile(path)
    second.append({"number": 2})
    second.close()
    assert [row["number"] for row in read_rows(path)] == [1, 2]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(InputError, match="line 2: not JSON"):
        RowFile(str(damaged))
    for unreadable in ("[" * 100_000, "9" * 5000):
        damaged.write_text(f'{{"a": 1}}\n{{"a": {unreadable}}}\n')
        with pytest.raises(InputError, match="line 2: not JSON"):
            RowFile(str(damaged))
    with pytest.raises(InputError, match="cannot write"):
        RowFile(str(tmp_path))
    with pytest.raises(InputError, match="no regular file"):
        RowFile("/dev/null")
    with damaged.open() as opened, pytest.raises(InputError, match="name it itself"):
        RowFile(f"/dev/fd/{opened.fileno()}")
    with pytest.raises(InputError, match=r"leave out \.gz"):
        RowFile(str(tmp_path / "new" / "rows.jsonl.gz"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"one\ntwo", b'{"a": 1}\ntwo', b"two", b'{"a": 1}\n{"a"\n{"a', b"\x1f\x8b\n\xff{"])
def test_a_file_of_another_kind_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    for _ in range(2):  # and nobody keeps it
        with pytest.raises(InputError, match=r"line \d|damaged"):
            RowFile(str(path))
    assert path.read_bytes() == content


def test_rows_are_not_added_to_a_graph_or_plan(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(training_chain(2), path)
    for content in (path.read_bytes(), json.dumps(json.loads(path.read_bytes())).encode() + b"\n", b'{"schema": "belady-gr'):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"holds no result rows, .*: it begins with '\{\"schema\"|not JSON|expected a row"):
            RowFile(str(path))
        assert path.read_bytes() == content


def test_a_last_row_that_only_lacks_its_end_of_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"graph": 1}\n\n{"b": "\u2028"}')  # nor do an empty line and what is no end of a line matter
    file = RowFile(str(path))
    assert not file.repaired and file.rows == [{"graph": 1}, {"b": "\u2028"}]
    file.append({"c": 3})
    file.close()
    assert [*map(list, read_rows(path))][:2] == [["graph"], ["b"]] and len(read_rows(path)) == 3


@pytest.mark.parametrize(
    "content",
    [
        '{"INSTRUCTION": "MEMORY", "NAME": "x"}\n{"NAME": "y"}\n',
        '{"a": 1}',
        '{"nodes": [1',
        "{name: mine, secret: 42}\n",
        "{x",
        pytest.param(plan(training_chain(2), 1.0).to_text(), id="a plan"),  # which says how long it took
    ],
)
def test_files_of_other_kinds_are_not_added_to_nor_cut(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"holds no result rows|expected a row, found|not JSON"):
        RowFile(str(path))
    assert path.read_text() == content


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_goes_away_under_a_sweep_is_told(
    how: str, chain_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, append = tmp_path / "rows.jsonl", RowFile.append

    def later(file: RowFile, row: Row) -> Row:
        if len(read_rows(path)) == 1:
            if how == "deleted":
                path.unlink()
            else:
                path.with_name("copy").write_bytes(path.read_bytes())
                path.with_name("copy").rename(path)
        return append(file, row)

    monkeypatch.setattr(RowFile, "append", later)
    command = ["sweep", chain_file, "--budget", "0.8:1:0.1", "--method", "keep_all", "--rule", "none", "--out", str(path)]
    assert main(command) == 2
    told = capsys.readouterr()
    assert "was deleted or replaced while rows were added to it" in told.err and "rows written" not in told.err
    assert "keep_all" in told.out  # the table has what was found
    monkeypatch.undo()
    assert main(command) == 0 and len(read_rows(path)) == 3


def test_a_full_disk_costs_no_table(
    chain_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise InputError("cannot write rows: No space left on device")

    command = ["sweep", chain_file, "--budget", "1.0", "--method", "keep_all", "--rule", "none", "--out", str(tmp_path / "rows")]
    for way in ("append", "keep"):
        with monkeypatch.context() as patch:
            patch.setattr(RowFile, way, full)
            assert main(command) == 2
        told = capsys.readouterr()
        assert "No space left" in told.err and "0.00%" in told.out.replace(" ", "")


def test_rows_that_contradict_each_other_have_failed(chain: Graph) -> None:
    rows = [row_of(chain, cell) for cell in cells(chain, [1300, 1400], "cutting_stages", "online:lru")]
    assert settle(rows) == settle(settle(rows)) and not any(row["status"] == sweep.FAILED for row in settle(rows))
    online = next(row for row in rows if row["method"] == "online:lru" and row["time_ns"] is not None)
    planned = next(row for row in rows if row["method"] == "cutting_stages" and row["budget_bytes"] == online["budget_bytes"])
    dear = planned | {"bound_ns": online["time_ns"] + 1, "time_ns": online["time_ns"] + 1}
    (_, found) = settle([dear, online])
    assert found["status"] == sweep.FAILED and "less than the" in found["reason"]
    nothing = planned | {"status": "INFEASIBLE", "time_ns": None, "overhead": None, "peak_bytes": None}
    (found, _) = settle([nothing, online])
    assert found["status"] == sweep.FAILED and "called infeasible, but online:lru fits" in found["reason"]
    assert settle([found, online])[0] == found


def test_what_is_refused_for_no_bytes_is_not_drawn_as_refused_for_all(chain: Graph) -> None:
    rows = [row_of(chain, cell) for cell in cells(chain, [1, 1000, 1700], "cutting_stages")]
    assert rows[0]["status"] == "INFEASIBLE"
    axes = Figure().add_subplot()
    draw_overhead(axes, [rows[0] | {"budget_fraction": 0.0}, *rows[1:]])
    (refused,) = (patch for patch in axes.patches if patch.get_label() == "proved: no schedule fits")
    assert refused.get_extents().transformed(axes.transData.inverted()).x1 == pytest.approx(0.0)


def test_a_row_is_of_the_same_cell_whoever_wrote_its_numbers(chain: Graph) -> None:
    row = row_of(chain, cells(chain, [6], "keep_all")[0])
    options = {name: int(value) if value == int(value) else value for name, value in row["options"].items()}
    assert key_of(row | {"options": options}) == key_of(row) and any(type(value) is int for value in options.values())


def test_the_folder_of_a_links_target_is_made(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("new/rows.jsonl")
    write_rows(str(tmp_path / "link.jsonl"), [{"a": 1}])
    assert read_rows(tmp_path / "new" / "rows.jsonl")[0]["a"] == 1


# The command.


def test_a_graph_that_comes_twice_is_told_and_has_one_row_a_cell(
    chain: Graph, chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_graph(replace(chain, name="other"), tmp_path / "other.json")
    out, other = str(tmp_path / "rows.jsonl"), str(tmp_path / "other.json")
    told = "belady: {} is the same graph as {}, in ops, bytes and times: the rows of {} are for both\n"
    command = ["--budget", "0.9", "--rule", "none", "--out", out]
    for again, first, name in ((chain_file, other, "other"), (other, chain_file, chain.name)):  # the second makes no row anew
        assert main(["sweep", first, first, again, *command]) == 0
        printed = capsys.readouterr()
        assert printed.err == told.format(again, first, name) and printed.out.startswith(f"{name}: ")
        assert [row["graph"] for row in read_rows(out)] == ["other"]


def sweep_of(chain_file: str, out: Path | str, *more: str) -> list[str]:
    return ["sweep", chain_file, "--budget=0.3:0.9:0.2", "--budget=0.4", "--rule=dtr", "--rule=lru", "--out", str(out), *more]


def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a row does not have from others."""
    return [{key: cell for key, cell in row.items() if key not in ("bound_ns", "gap")} for row in rows]


def test_rows_that_are_not_whole_are_left_as_they_are(chain_file: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["sweep", chain_file, "--budget=0.9", "--rule=none", "--out", str(out)]
    assert main(command) == 0
    (row,) = read_rows(out)
    lacking = [{key: cell for key, cell in row.items() if key != name} for name in ("time_ns", "overhead", "keep_all_time_ns")]
    wrong = (
        {"budget_bytes": "x"},
        {"options": None},
        {"notes": 1},
        {"method": 2},
        {"budget_fraction": []},
        {"graph": 3},
        {"bound_ns": 10**400},
        {"overhead": 10**400},
        {"budget_fraction": 10**400},
    )
    damaged = [*lacking, *(row | entry for entry in wrong)]
    out.write_text("".join(json.dumps(one) + "\n" for one in damaged))
    assert main([*command, "--plot", str(tmp_path / "curves.svg")]) == 0
    again = read_rows(out)
    assert again[:-1] == damaged and key_of(again[-1]) == key_of(row)


def test_a_sweep_is_resumed_not_repeated(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"graph": "a row from elsewhere"}\n')
    assert main(sweep_of(chain_file, out, "--time-limit=0.5", "--jobs=2")) == 0
    table = capsys.readouterr().out
    for word in ("proved", "cutting_stages", "online:dtr", "online:lru", "90% 900 B", "30% 300 B", f"rows written to {out}"):
        assert word in table
    whole = read_rows(out)
    assert whole[0] == {"graph": "a row from elsewhere"} and len(whole) == 1 + 3 * 5
    assert len({key_of(row) for row in whole[1:]}) == 15
    # Seven rows and a half are left: those are kept as they are, to the microsecond, and the others made again. Only the bounds
    # of online rows are the planner's, who finds what the time limit lets it find.
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:8]) + lines[8][:40])
    assert main(sweep_of(chain_file, out, "--time-limit=0.5", "--json=-")) == 0
    printed = capsys.readouterr()
    assert "the last line" in printed.err and len(printed.out.splitlines()) == 15
    again = read_rows(out)
    assert own(again[:8]) == own(whole[:8]) and len(again) == 16
    assert sorted(printed.out.splitlines()) == sorted(json.dumps(row) for row in again[1:])
    # Nothing to do, then only what is new.
    before = out.read_bytes()
    assert main(sweep_of(chain_file, out, "--time-limit=0.5")) == 0 and out.read_bytes() == before
    assert main(sweep_of(chain_file, out, "--time-limit=0.5", "--seed=1")) == 0
    both = read_rows(out)
    assert len(both) == 31
    # A better bound, proved with the other seed, holds for the same online runs too.
    assert [strip(row, "bound_ns", "gap") for row in both[:16]] == [strip(row, "bound_ns", "gap") for row in again]
    assert [row for row in both[:16] if row.get("method") == "cutting_stages"] == [r for r in again if r.get("options")]


def test_several_graphs_and_a_picture(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, picture = tmp_path / "other.json", tmp_path / "new" / "curves.pdf"
    save_graph(training_chain(6), other)
    assert main(["sweep", chain_file, str(other), "--budget=0.2:1:0.4", "--time-limit=0.5", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "chain: 17 ops" in shown and "chain: 13 ops" in shown and "infeasible" in shown
    assert picture.read_bytes().startswith(b"%PDF")


def test_failed_cells_are_told_and_made_again_when_asked(
    chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    made: list[Cell] = []

    def failing(graphs: dict[str, Graph], asked: list[Cell], jobs: int) -> Iterator[tuple[Cell, Row]]:
        for cell in asked:
            made.append(cell)
            yield cell, sweep.failed_row(graphs[cell.fingerprint], cell, "its process ended with SIGKILL", 1.0)

    command = ["sweep", chain_file, "--budget=0.5", "--method=none", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "work", failing)
        for _ in range(2):  # a failed cell is a row like any other
            assert main(command) == 3
            assert capsys.readouterr().err == "belady: chain, online:demand, 500 bytes: its process ended with SIGKILL\n"
        assert len(made) == 1
    assert main([*command, "--retry"]) == 0
    assert [row["status"] for row in read_rows(out)] == ["FEASIBLE"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--jobs=0"], "--jobs must be at least 1"),
        (["--rule=magic"], "unknown heuristic 'magic'"),
        (["--method=magic"], "unknown method 'magic'"),
        (["--method=none", "--rule=none"], "nothing to do"),
        (["--plot=curves.doc"], "must end in one of"),
        (["--gap=2"], "gap must be"),
        (["--out=/dev/null"], "no regular file"),
        (["--out=-"], "which standard output (-) does not take"),
        (["--out=rows.jsonl.gz"], "leave out .gz"),
        (["--retry"], "name that file with --out"),
        (["--budget=1:2:3:4"], "a range is FIRST:LAST:STEP"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    more: list[str], message: str, chain_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "work", lambda *arguments: pytest.fail("it ran"))
    assert main(["sweep", chain_file, "--budget=0.5", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("belady: ") and message in error and error.count("\n") == 1


def test_a_sweep_interrupted_before_its_first_row_leaves_what_was_there(
    chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Generator[tuple[Cell, Row]]:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "work", interrupt)
    out, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    other.write_text("{}\n")
    arguments = ["sweep", chain_file, "--budget=0.5", "--out", str(out), "--json", str(other), "--plot", str(tmp_path / "p.png")]
    assert main(arguments) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "belady: interrupted; 2 of 2 rows are missing, the same command goes on\n"
    assert other.read_text() == "{}\n"


def tell_blocked(line: Connection) -> None:
    line.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_ctrl_c_is_blocked_in_the_very_first_process() -> None:
    code = """
import multiprocessing
from belady.sweep import start_quietly
from tests.test_sweep import tell_blocked
context = multiprocessing.get_context("spawn")
ours, theirs = context.Pipe()
start_quietly(context.Process(target=tell_blocked, args=(theirs,)))
print(ours.recv())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "True\n", done.stderr


def test_an_interrupted_sweep_goes_on(chain_file: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [BELADY, "sweep", chain_file, "--budget=300:900:1", "--method=none", "--rule=lru", "--jobs=2", "--out", out]
    # As at a terminal: Ctrl-C goes to every process of the group. (A background job starts with the signal ignored.)
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", start, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        shown, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    done = read_rows(out)
    assert 0 < len(done) < 601
    assert error == f"belady: interrupted; {601 - len(done)} of 601 rows are missing, the same command goes on\n"
    assert "online:lru" in shown
    # In the same file, by another command: what is there is not made again.
    assert main([str(word) for word in command[1:] if word != "--jobs=2"]) == 0
    assert len(read_rows(out)) == 601 and read_rows(out)[: len(done)] == done


def test_how_a_process_ended_is_told_whatever_ended_it() -> None:
    assert [sweep._exit(code) for code in (-9, -35, 1, None)] == ["SIGKILL", "signal 35", "exit code 1", "exit code None"]


def test_a_process_that_cannot_be_started_is_told(chain: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sweep, "start_quietly", too_many)
    with pytest.raises(InputError, match="cannot start one more process: Too many open files; fewer --jobs need fewer"):
        list(work({chain.fingerprint(): chain}, cells(chain, [1700], "keep_all"), 1))
