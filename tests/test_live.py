"""Lines on a terminal that say what a search has found so far."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphs.ir import Graph, Op, Value
from graphs.serialize import save_graph
from graphs.synthetic import Layered, chain, random_layered, random_training
from planner import keep_all, min_budget, plan, plans, simulate
from planner.live import line_of, on_terminal, shown

ROOT = Path(__file__).resolve().parents[1]


def on_a_terminal(*arguments: str, code: int = 0) -> list[str]:
    """What a command writes to standard error where that is a terminal, line by line, without control sequences."""
    if os.name != "posix":
        pytest.skip("needs a pseudo-terminal")
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, env=environment) as child:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # nobody has it open any more
                break
            if not part:
                break
            written += part
        assert child.stdout is not None
        printed = child.stdout.read()
    os.close(ours)
    assert child.returncode == code, written
    assert b"\x1b" not in printed and b"overhead" in printed
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()))


def test_a_line_says_what_is_known() -> None:
    said = list[str]()
    graph = Graph("one", (Op("one", (), (0,), 100),), (Value("x", 1),), frozenset(), frozenset({0}))
    progress = line_of("solving", graph, said.append)
    progress(time_ns=None, bound_ns=100, phase="bound")
    progress(time_ns=200, bound_ns=None, phase="list walk")
    progress(time_ns=200, bound_ns=150, phase="bound")
    progress(time_ns=200, bound_ns=201, phase="bound")
    assert said == [
        "solving",
        "solving: no plan yet, bound 0.00%",
        "solving: overhead 100.00%",
        "solving: overhead 100.00%, bound 50.00%, gap 25.00%",
        "solving: overhead 100.00%, bound 100.00%, gap 0.00%",
    ]
    empty = Graph("empty", (), (), frozenset(), frozenset())
    line_of("nothing", empty, said.append)(time_ns=0, bound_ns=0, phase="keep all")
    assert said[-1] == "nothing"


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nothing_is_shown_where_there_is_no_terminal(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with on_terminal("working") as show:
        show("still working")
    assert plan(chain(6), 0.9, time_limit_s=2).schedule is not None
    assert stream is None or not stream.getvalue()


def test_a_progress_that_is_given_is_the_one() -> None:
    told = list[object]()
    with shown(told.append, "solving", chain(3)) as progress:
        assert progress == told.append


def test_the_command_shows_plan_bound_and_gap_while_it_looks(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    save_graph(random_training(40, seed=3), path)
    lines = on_a_terminal(sys.executable, "-m", "belady", "plan", str(path), "--budget", "0.6", "--time-limit", "2")
    told = re.compile(r"cutting_stages in .*: overhead \d+\.\d\d%, bound \d+\.\d\d%, gap \d+\.\d\d% .*0:00:0\d")
    assert any(map(told.search, lines))


def test_the_command_shows_that_it_looks_for_what_to_say_of_a_budget_that_is_too_small(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    save_graph(random_training(40, seed=3), path)
    lines = on_a_terminal(sys.executable, "-m", "belady", "plan", str(path), "--budget", "0.01", code=2)
    assert any("cannot be; looking for a budget that works" in line for line in lines)
    assert any("every schedule needs at least" in line for line in lines)


def test_python_shows_them_too_and_a_budget_among_many() -> None:
    script = (
        "from graphs.synthetic import random_training\nfrom planner import min_budget, plan, plans\n"
        "graph = random_training(40, seed=3)\n"
        "print(plan(graph, 0.6, time_limit_s=1).overhead, 'overhead')\n"
        "plans(graph, [0.9, 0.7], time_limit_s=1)\nmin_budget(graph, time_limit_s=2)\n"
    )
    lines = "\n".join(on_a_terminal(sys.executable, "-c", script))
    assert re.search(r"cutting_stages in \S+ \S+: overhead", lines)
    assert "(1 of 2)" in lines and "(2 of 2)" in lines
    assert re.search(r"smallest budget: \S+ \S+ works, \S+ \S+ is needed at least", lines)


def test_each_of_many_budgets_tells_its_progress() -> None:
    told = list[dict[str, object]]()
    plans(random_training(20, seed=1), [0.7, 0.9], time_limit_s=2, progress=lambda **now: told.append(now))
    assert told and all(now.keys() == {"time_ns", "bound_ns", "phase"} for now in told)


def test_the_smallest_budget_tells_what_works_and_what_is_needed() -> None:
    graph, told = random_training(30, seed=2), list[tuple[int, int]]()
    found = min_budget(graph, time_limit_s=4, progress=lambda works, proved: told.append((works, proved)))
    works, proved = zip(*told, strict=True)
    assert works[0] == simulate(graph, keep_all(graph)).peak_bytes
    assert list(works) == sorted(works, reverse=True) and list(proved) == sorted(proved)
    assert told[-1] == (found.works_bytes, found.proved_bytes) and len(set(told)) > 3


@pytest.mark.parametrize("any_order", [False, True])
def test_no_bound_is_told_that_another_order_beats(any_order: bool) -> None:
    """What is proved for the graph's order, or for another one, is no bound on a plan in a third."""
    graph, told = random_layered(Layered(25, 0.3), seed=8), list[dict[str, int | None]]()
    budget_bytes = int(0.65 * simulate(graph, keep_all(graph)).peak_bytes)  # nothing fits in graph order
    found = plan(graph, budget_bytes, time_limit_s=3, any_order=any_order, progress=lambda **now: told.append(now))
    assert "order" in found.notes
    for now in told:
        assert now["bound_ns"] is not None and (now["time_ns"] is None or now["bound_ns"] <= now["time_ns"])
    assert told[-1]["time_ns"] == found.time_ns and told[-1]["bound_ns"] == found.bound_ns == found.any_order_bound_ns
