"""The command line: tables, rows, pictures, errors, exit codes."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from belady.arguments import parser
from belady.cli import main
from belady.entry import BAD_INPUT, DONE, INTERRUPTED, NOTHING_FOUND, PIPE_CLOSED
from belady.workload import Loaded
from graphs.ir import Graph, Op, Value
from graphs.serialize import save_graph
from graphs.synthetic import random_training
from online import run
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS
from planner.bounds import least_bytes
from planner.schedule import Schedule, keep_all
from planner.simulate import simulate
from tests.interruption import interrupted
from tests.test_compare import training_chain

MLP = ["mlp", "--batch", "2048", "--depth", "8", "--device", "cpu"]


@pytest.fixture
def chain_file(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    save_graph(training_chain(8), path)
    return str(path)


def rows(text: str) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in text.splitlines()]


def test_diff_executes_and_agrees_with_pytorch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, out = tmp_path / "sub" / "p.png", tmp_path / "rows.jsonl"
    arguments = ["diff", *MLP, "--budget", "0.8", "--budget", "0.7", "--execute", "--plot", str(picture), "--json", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "cutting_stages" in shown and "online:demand" in shown and "grad error" in shown
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    found = rows(out.read_text())
    assert [row["method"] for row in found] == ["keep_all"] + ["cutting_stages", "online:demand"] * 2
    for row in found:
        assert row["max_grad_error"] == 0.0
        assert row["measured_time_ns"] > 0
        assert row["measured_peak_bytes"] <= row["budget_bytes"]
        # This rule lets go of nothing before it must, but an output that no op reads is not even stored.
        least = 0.9 if row["method"] == "online:demand" else 0.98
        assert least * row["peak_bytes"] <= row["measured_peak_bytes"] <= 1.02 * row["peak_bytes"]
        assert row["versions"]["torch"]
    assert found[1]["overhead"] > 0 and found[1]["gap"] <= 0.01


def test_json_on_standard_output_is_nothing_but_rows(chain_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", chain_file, "--budget", "0.5", "--heuristic", "dtr", "--heuristic", "lru", "--json", "-"]) == 0
    assert [row["method"] for row in rows(capsys.readouterr().out)] == ["keep_all", "cutting_stages", "online:dtr", "online:lru"]


def test_plan_is_saved_and_run_too(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planner import load_plan

    graph = training_chain(8)
    for command, method in (("plan", "cutting_stages"), ("run", "online:demand")):
        out = tmp_path / f"{command}.json"
        assert main([command, chain_file, "--budget", "500", "--out", str(out)]) == 0
        assert load_plan(out, graph).method == method
    shown = capsys.readouterr().out
    assert "OPTIMAL" in shown and f"plan written to {tmp_path / 'run.json'}" in shown


def test_a_saved_plan_is_told_and_checked_against_its_graph(
    chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, of_plan = str(tmp_path / "plan.json"), tmp_path / "row.jsonl"
    assert main(["plan", chain_file, "--budget", "500", "--out", saved, "--json", str(of_plan)]) == 0
    (planned,) = rows(of_plan.read_text())
    for more, valid, said in (
        ([saved], None, f"belady info WORKLOAD --plan {saved} checks it against its graph"),
        ([chain_file, "--plan", saved], True, "The plan is valid for chain"),
    ):
        capsys.readouterr()
        assert main(["info", *more, "--json", "-"]) == 0
        (row,) = rows(capsys.readouterr().out)
        assert row["valid"] is valid and row["ops"] == 17 and row["notes"]
        assert {key: row[key] for key in planned if key in row} == {key: planned[key] for key in planned if key in row}
        assert {"overhead", "gap", "peak_bytes", "device", "status"} <= row.keys()
        assert main(["info", *more]) == 0
        assert said in capsys.readouterr().out
    other = tmp_path / "other.json"
    save_graph(training_chain(6), other)
    for command, message in (
        (["info", str(other), "--plan", saved], "plan again"),
        (["info", str(other), "--plan", str(other)], "is not a belady-plan-1 file"),
        (["info", saved, "--min-budget", "1"], "--min-budget has no meaning for the saved plan"),
        (["info", saved, "--batch", "1"], "--batch has no meaning for the saved plan"),
        (["info", chain_file, "--plan", saved, "--json", saved], "which is read: it would be overwritten"),
        (["plan", saved, "--budget", "0.5"], "is a saved plan, not a graph; belady info"),
        (["sweep", saved, "--budget", "0.5"], "is a saved plan, not a graph; belady info"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    Path(saved).write_text(Path(saved).read_text()[:-9])
    for more in ([saved], ["gpt2", "--plan", saved]):  # told before a model is built
        assert main(["info", *more]) == 2
        assert capsys.readouterr().err.startswith(f"belady: {saved} is not JSON: ")


@pytest.mark.parametrize("command", ["plan", "diff"])
def test_what_an_error_says_is_searched_for_within_the_time_limit(
    command: str, chain_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_s: list[float] = []

    def nothing_smaller(graph: Graph, *, time_limit_s: float) -> list[tuple[int, Schedule]]:
        given_s.append(time_limit_s)
        return []

    monkeypatch.setattr(sys.modules["planner.plan"], "smaller_and_smaller", nothing_smaller)
    assert main([command, chain_file, "--budget", "1B", "--time-limit", "2"]) == 2
    assert "the smallest budget known to work" in capsys.readouterr().err
    assert len(given_s) == 1 and given_s[0] <= 2


def test_info_and_workloads(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.json"
    assert main(["info", chain_file, "--json", "-", "--save-graph", str(copy)]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["ops"], row["keep_all_peak_bytes"], row["proved_minimum_bytes"]) == (17, 1000, 300)
    assert copy.read_text() == Path(chain_file).read_text()
    assert main(["info", chain_file]) == 0
    shown = capsys.readouterr().out
    assert "keep_all_peak_bytes" in shown and "The smallest budget is 300 bytes (300 B): a schedule needs no more" in shown
    assert main(["workloads"]) == 0
    shown = capsys.readouterr().out
    for name in ("mlp", "resnet50", "vgg16", "mobilenet_v2", "unet", "vit", "bert", "gpt2", "llama", "lstm"):
        assert name in shown


def test_what_is_between_the_smallest_known_and_the_proved_budget_is_said_to_be_open(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, hint in (([], "--min-budget 30 searches for longer"), (["--min-budget", "0"], "a longer --min-budget may tell")):
        assert main(["info", str(data / "dtr_logs" / "resnet32.log.gz"), *more]) == 0
        shown = capsys.readouterr().out
        assert "The smallest budget known to work is " in shown and "every schedule needs at least " in shown and hint in shown


def test_a_users_own_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))\n"
        "    return net, (torch.randn(256, 8), torch.randint(0, 2, (256,))), nn.CrossEntropyLoss()\n"
    )
    assert main(["diff", f"{script}:make", "--budget", "0.9", "--execute", "--json", "-"]) == 0
    assert rows(capsys.readouterr().out)[1]["max_grad_error"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "resnet51", "--budget", "0.5"], "resnet51"),
        (["plan", "CHAIN", "--budget", "200"], "every schedule needs at least 300"),
        (["diff", "CHAIN", "--budget", "200", "--budget", "500"], "every schedule needs at least 300"),
        (["run", "CHAIN", "--budget", "200"], "every schedule needs at least 300"),
        (["plan", "CHAIN", "--budget", "half"], "give bytes"),
        (["plan", "CHAIN", "--budget", "0.5", "--method", "magic"], "unknown method 'magic'"),
        (["run", "CHAIN", "--budget", "0.5", "--heuristic", "magic"], "unknown heuristic 'magic'"),
        (["diff", "CHAIN", "--budget", "0.5", "--execute"], "not executed"),
        (["info", "CHAIN", "--batch", "3"], "--batch has no meaning"),
        (["plan", "CHAIN", "--budget", "0.5", "--costs", "roofline"], "--costs has no meaning"),
        (["info", "nowhere.json"], "nowhere.json"),
        (["info", "nowhere.py:make"], "nowhere.py"),
        (["diff", "CHAIN", "--budget", "0.5", "--plot", "picture.doc"], "must end in one of"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, chain_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([chain_file if word == "CHAIN" else word for word in arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("belady: ") and message in error
    assert "\n" not in error


def test_damaged_graph_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"schema": "belady-graph-1", "ops": [')
    assert main(["info", str(path)]) == 2
    assert "graph.json" in capsys.readouterr().err


def test_a_model_that_cannot_be_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "branchy.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        y = self.a(x)\n        return (y if y.sum() > 0 else -y).sum()\n"
        "def make():\n    return Net(), torch.randn(2, 4)\n"
    )
    assert main(["info", f"{script}:make"]) == 2
    assert "branches on data" in capsys.readouterr().err


def test_nothing_found_is_exit_code_3(chain_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", chain_file, "--budget", "0.5", "--method", "keep_all"]) == 3
    assert "did not rule one out; try a larger --budget or another --method" in capsys.readouterr().err


BELADY = Path(sys.executable).with_name("belady")


def test_rows_on_a_pipe_are_not_mixed_with_what_solvers_print(tmp_path: Path) -> None:
    command = [BELADY, "diff", "mlp", "--batch", "2048", "--depth", "8", "--budget", "0.7", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [row["method"] for row in rows(done.stdout)] == ["keep_all", "cutting_stages", "online:demand"]


@pytest.mark.parametrize("command", [[BELADY], [sys.executable, "-m", "belady"]], ids=["script", "module"])
def test_the_command_is_installed(command: list[str]) -> None:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"})
    for word in ("usage: belady ", "diff", "plan", "run", "sweep", "workloads", "info", "examples:", "Exit codes"):
        assert word in done.stdout


def test_the_module_runs_sweeps_in_processes_of_their_own(chain_file: str) -> None:
    command = [sys.executable, "-m", "belady", "sweep", chain_file, "--budget=0.5", "--jobs=2", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [row["method"] for row in rows(done.stdout)] == ["cutting_stages", "online:demand"]


def test_help_lists_every_exit_code() -> None:
    of_help = parser().format_help().partition("Exit codes: ")[2]
    of_readme = (Path(__file__).parents[1] / "README.md").read_text().partition("Exit codes:")[2].partition("\n\n**")[0]
    codes = {str(code) for code in (DONE, BAD_INPUT, NOTHING_FOUND, INTERRUPTED, PIPE_CLOSED)}
    assert set(re.findall(r"\b\d+\b", of_help)) == set(re.findall(r"\b\d+\b", of_readme)) == codes


# A solver that has been running for a moment when Ctrl-C comes, on a program it cannot solve within the time limit.
CTRL_C = """
import os, random, signal, sys, threading
from belady.cli import main
from planner.solvers import milp
from planner.stages import model as stage_model

stage_model.SAT_VARIABLES = stage_model.SAT_RERUNS = 0  # HiGHS even for small models: it is the one that nothing can stop
draw, hard = random.Random(0), milp.Milp()
chosen = [hard.binary(draw.uniform(1, 2)) for _ in range(400)]
for _ in range(400):
    hard.at_least(3, draw.sample(chosen, 20))
solve, times = milp._highs, iter([None] * int(sys.argv.pop(1)))

def interrupted(proto, parameters, left):
    if next(times, proto) is not None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        proto, parameters = hard.proto(), milp._parameters(300.0, 0.0, float("inf"), None, 0)
    return solve(proto, parameters, left)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with the signal ignored
milp._highs = interrupted
sys.exit(main())
"""


@pytest.mark.parametrize(("solves_before", "methods"), [(0, ["cutting_stages"]), (1, ["cutting_stages"] * 2)])
def test_an_interruption_is_said_and_leaves_the_rows_so_far(
    solves_before: int, methods: list[str], chain_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["diff", chain_file, "--budget=0.7", "--budget=0.5", "--budget=0.4", "--json", out]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(solves_before), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stderr.strip() == "belady: interrupted; this is what was found until then"
    assert done.returncode == 130
    assert time.monotonic() - began < 60  # and not the 300 that the solver goes on
    assert [row["method"] for row in rows(out.read_text()) if "online" not in row["method"]] == ["keep_all", *methods]
    assert "cutting_stages" in done.stdout


def test_an_interrupted_plan_is_saved_and_said(chain_file: str, tmp_path: Path) -> None:
    from planner import load_plan

    out = tmp_path / "new" / "plan.json"
    arguments = ["plan", chain_file, "--budget=0.5", "--out", out]
    done = subprocess.run([sys.executable, "-c", CTRL_C, "0", *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (130, "belady: interrupted; this is what was found until then")
    assert load_plan(out, training_chain(8)).notes["stopped"] == "interrupted"


def test_a_second_ctrl_c_at_once_does_not_tear_what_is_written_because_of_the_first(chain_file: str, tmp_path: Path) -> None:
    out, table = tmp_path / "plan.json", tmp_path / "rows.jsonl"
    script = CTRL_C.replace("from belady.cli", "from belady.entry").replace(
        "milp._highs = interrupted",
        """
from belady import results

def again(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    saved(*arguments)
    os.kill(os.getpid(), signal.SIGINT)

saved, results.save_plan = results.save_plan, again
milp._highs = interrupted
""",
    )
    arguments = ["plan", chain_file, "--budget=0.5", "--out", out, "--json", table]
    done = subprocess.run([sys.executable, "-c", script, "0", *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (130, "belady: interrupted; this is what was found until then")
    assert "cutting_stages" in done.stdout
    assert out.exists() and len(rows(table.read_text())) == 1


def test_ctrl_c_as_the_command_ends_is_no_traceback(chain_file: str) -> None:
    script = (
        CTRL_C.partition("signal.signal")[0].replace("from belady.cli", "from belady.entry")
        + """
from belady import cli

def late(argv, ended=cli._main):
    code = ended(argv)
    signal.raise_signal(signal.SIGINT)
    return code

signal.signal(signal.SIGINT, signal.default_int_handler)
cli._main = late
code = main()
signal.raise_signal(signal.SIGINT)
sys.exit(code)
"""
    )
    done = subprocess.run([sys.executable, "-c", script, "0", "info", chain_file], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "belady: interrupted\n")
    assert "ops" in done.stdout


def test_a_script_that_was_interrupted_ends_after_its_solver() -> None:
    """The thread that HiGHS is left on must not come back to an interpreter that is gone: that would abort the process."""
    script = CTRL_C.partition("signal.signal")[0].replace("int(sys.argv.pop(1))", "0").replace("300.0", "1.5") + (
        "milp._highs = interrupted\n"
        "try:\n    hard.minimise(time_limit_s=1.5)\nexcept KeyboardInterrupt:\n    print(milp.solving())\n"
    )
    # What is registered first runs last: after the wait for the solver.
    first = "import atexit, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    last = "atexit.register(lambda: print(milp.solving()))\n"
    done = subprocess.run([sys.executable, "-c", first + last + script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nFalse\n", "")


@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [
        (">/dev/full", 2, "belady: cannot write to standard output: No space left on device"),
        (">&-", 2, "belady: standard output is closed; send it to /dev/null where it is not wanted"),
        (">&- 2>&-", 2, ""),
        ("--json - >/dev/full", 2, "belady: cannot write to standard output: No space left on device"),
    ],
)
def test_results_that_cannot_be_written_are_one_sentence(redirected: str, code: int, message: str, chain_file: str) -> None:
    command = f"{BELADY} plan {chain_file} --budget 0.5 {redirected}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (code, message, "")


def test_an_error_that_nobody_can_be_told_has_its_exit_code() -> None:
    assert subprocess.run(f"{BELADY} info nosuch.json 2>/dev/full", shell=True, timeout=120).returncode == BAD_INPUT


@pytest.mark.parametrize("command", ["info", "plan --budget 0.5"])
def test_a_graph_may_come_through_a_pipe_of_any_name(command: str, chain_file: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat {chain_file} > {pipe}"]) as writer:
        try:
            assert subprocess.run(f"{BELADY} {command} {pipe}", shell=True, timeout=60).returncode == DONE
        finally:
            writer.kill()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["workloads"], 0), (["plan", "resnet51", "--budget", "0.5"], 2), (["run", "mlp", "--budget", "0.5", "--seq", "9"], 2)],
)
def test_what_there_is_to_choose_is_known_without_torch(arguments: list[str], code: int) -> None:
    """It takes seconds to load."""
    program = f"import sys; sys.modules['torch'] = None; from belady.cli import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and ("resnet50" in done.stdout + done.stderr or "no seq" in done.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "CHAIN", "--budget", "0.5"], ["workloads", "--json", "-"]])
def test_a_reader_that_has_gone_is_no_error(arguments: list[str], chain_file: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [BELADY, *(chain_file if word == "CHAIN" else word for word in arguments)]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_names_that_standard_output_cannot_encode_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(replace(training_chain(2), name="\udce4 and \u00e4"), path)
    for more in ([], ["--json", "-"]):
        command = [BELADY, "plan", path, "--budget=1.0", *more]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stderr) == (0, "") and r"\udce4 and " in done.stdout


def test_brackets_and_colons_in_names_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: status lines and bars, too
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "[" / "b].json"
    path.parent.mkdir()
    save_graph(replace(training_chain(4), name="[bold]x[/y] :star:"), path)
    budget = ["--budget", "0.9"]
    for command in (["info"], ["plan", *budget], ["run", *budget], ["diff", *budget], ["sweep", *budget, "--rule", "none"]):
        assert main([command[0], str(path), *command[1:]]) == 0
        assert "[bold]x[/y] :star:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["diff", "run"])
def test_help_names_every_rule(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert words >= {*HEURISTICS, *ADDRESS_HEURISTICS}


@pytest.mark.parametrize("factor", [2**62, 10**400], ids=["64 bits", "floats"])
def test_files_with_numbers_that_nothing_can_hold_are_refused(
    factor: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, graph = tmp_path / "graph.json", training_chain(8)
    for wide in (
        graph.with_costs([factor * op.time_ns for op in graph.ops]),
        replace(graph, values=tuple(Value(value.name, factor * value.size_bytes) for value in graph.values)),
    ):
        save_graph(wide, path)
        for command in (["info"], *([name, "--budget", "0.9"] for name in ("plan", "run", "diff", "sweep"))):
            assert main([command[0], str(path), *command[1:]]) == 2
            assert "below 2^62 is needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", [r"a$\frac{$b", "\udce4", "\x07\x1b\t"])
def test_any_name_can_be_the_title_of_a_picture_and_of_a_table(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    save_graph(replace(training_chain(4), name=name), path)
    for command in (["diff"], ["sweep", "--rule", "none"]):
        picture = tmp_path / f"{command[0]}.svg"
        assert main([command[0], str(path), *command[1:], "--budget", "0.9", "--plot", str(picture)]) == 0
        assert picture.stat().st_size > 1000
    capsys.readouterr()
    for command in (["diff", "--budget", "0.9"], ["sweep", "--rule", "none", "--budget", "0.9"], ["info"]):
        assert main([command[0], str(path), *command[1:]]) == 0
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--plot", "--out"])
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(Loaded, "__init__", lambda *_: pytest.fail("something was computed"))
    command = ["plan" if option == "--out" else "diff", *MLP, "--budget", "0.8"]
    long = f"{300 * 'a'}.png"
    for target, why in (
        ("file/missing/rows.png", "Not a directory"),
        ("folder.png", "Is a directory"),
        (long, "File name too long"),
        (f"new/{long}", "File name too long"),
    ):
        assert main([*command, option, str(tmp_path / target)]) == 2
        assert capsys.readouterr().err == f"belady: cannot write {tmp_path / target}: {why}\n"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "folder.png"]


def test_two_results_in_one_file_are_refused(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, link = tmp_path / "rows.jsonl", tmp_path / "link"
    sweep = ["sweep", chain_file, "--rule", "none", "--out", str(out)]
    assert main([*sweep, "--budget", "0.7:0.9:0.1"]) == 0
    before, _ = out.read_text(), capsys.readouterr()
    link.symlink_to(out)
    for same in (out, link):
        assert main([*sweep, "--budget", "0.9", "--json", str(same)]) == 2
        message = f"belady: --json and --out name the same file, {out}: one would take the place of the other\n"
        assert capsys.readouterr().err == message
    assert out.read_text() == before
    assert main([*sweep, "--budget", "0.9", "--json", "-"]) == 0
    assert main(["plan", chain_file, "--budget", "0.9", "--json", "/dev/null", "--out", "/dev/null"]) == 0


def test_standard_output_takes_one_result_and_then_nothing_else(
    chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, schema in (
        (["plan", "--budget", "500", "--out", "-"], "belady-plan-1"),
        (["run", "--budget", "500", "--out", "-"], "belady-plan-1"),
        (["info", "--save-graph", "-"], "belady-graph-1"),
    ):
        name, *options = command
        assert main([name, chain_file, *options, "--json", "rows.jsonl"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == schema
        assert len(rows(Path("rows.jsonl").read_text())) == 1
        assert main([name, chain_file, *options, "--json", "-"]) == 2
        assert (
            capsys.readouterr().err == f"belady: --json and {options[-2]} both name standard output (-): only one can have it\n"
        )
    assert main(["diff", chain_file, "--budget", "500", "--plot", "-"]) == 2
    assert capsys.readouterr().err == "belady: --plot needs a file: no picture goes to standard output (-)\n"
    assert main(["sweep", chain_file, "--budget", "500", "--plot", "-"]) == 2
    assert not Path("-").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--budget", "0.9", "--out"],
        ["run", "--budget", "0.9", "--out"],
        ["plan", "--budget", "0.9", "--json"],
        ["sweep", "--budget", "0.9", "--rule", "none", "--json"],
        ["info", "--save-graph"],
    ],
    ids=" ".join,
)
def test_the_name_of_standard_output_is_standard_output(
    command: list[str], chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    link = tmp_path / "out"
    link.symlink_to("/dev/stdout")
    for same in ("/dev/stdout", "/dev/fd/1", str(link)):
        assert main([name, chain_file, *options, same]) == 0
        written = capsys.readouterr()
        assert json.loads(written.out) and written.err == "" and link.is_symlink()
    assert main(["plan", chain_file, "--budget", "0.9", "--json", "-", "--out", "/dev/stdout"]) == 2
    assert "both name standard output" in capsys.readouterr().err


def test_a_log_that_standard_output_goes_to_is_added_to(chain_file: str, tmp_path: Path) -> None:
    command = f"(echo before; {BELADY} plan {chain_file} --budget 500 --out NAME; echo after) > {tmp_path / 'log'} 2>&1"
    for name, table in (("/dev/stdout", False), ("/dev/stderr", True)):
        subprocess.run(command.replace("NAME", name), shell=True, check=True, timeout=120)
        first, *more, last = (tmp_path / "log").read_text().splitlines()
        assert (first, json.loads(more[0])["schema"], last) == ("before", "belady-plan-1", "after")
        assert (more[-1] == f"plan written to {name}") is (len(more) > 1) is table


def test_a_file_name_stays_on_its_line(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", chain_file, "--budget", "0.9", "--out", str(tmp_path / "two\nlines.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"plan written to {tmp_path}/two\\nlines.json"


def test_a_budget_of_many_digits_is_no_share_of_many_digits(chain_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", chain_file, "--budget", "9e99"]) == 0
    assert "9e+98% 8.19e+87 TiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--budget", "0.9", "--json"],
        ["plan", "--budget", "0.9", "--out"],
        ["run", "--budget", "0.9", "--json"],
        ["diff", "--budget", "0.9", "--json"],
        ["sweep", "--budget", "0.9", "--json"],
        ["info", "--json"],
    ],
    ids=" ".join,
)
def test_what_was_found_is_printed_though_a_file_cannot_be_written(
    command: list[str], chain_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    assert main([name, chain_file, *options, "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "keep_all_peak_bytes" in printed.out or "cutting_stages" in printed.out or "online:" in printed.out
    assert "written to" not in printed.out
    assert printed.err == "belady: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--budget", "0.9", "--out"],
        ["run", "--budget", "0.9", "--json"],
        ["sweep", "--budget", "0.9", "--rule", "none", "--out"],
        ["info", "--save-graph"],
    ],
    ids=lambda command: command[0],
)
def test_the_graph_that_is_read_is_not_overwritten(
    command: list[str], chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, before = tmp_path / "link.json", Path(chain_file).read_bytes()
    link.symlink_to(chain_file)
    name, *options = command
    for target in (chain_file, str(link)):
        assert main([name, chain_file, *options, target]) == 2
        told = f"belady: {options[-1]} names {target}, which is read: it would be overwritten\n"
        assert capsys.readouterr().err == told
    assert Path(chain_file).read_bytes() == before


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from belady.plots import save

    (tmp_path / "p.svg").write_text("old")

    def interrupted(self: Figure, target: Any, **_: Any) -> None:
        with open(target, "wb") if isinstance(target, str) else target as file:
            file.write(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(Figure(), str(tmp_path / "p.svg"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("command", ["diff", "sweep"])
def test_pictures_of_no_kind_are_refused_before_anything_is_computed(
    command: str, chain_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loaded, "__init__", lambda *_: pytest.fail("something was computed"))
    assert main([command, chain_file, "--budget", "0.9", "--plot", "picture.xyz"]) == 2
    assert "picture.xyz: its name must end in one of" in capsys.readouterr().err


@pytest.mark.parametrize("ops", [0, 1])
def test_a_graph_that_holds_nothing_and_takes_no_time(ops: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "empty.json", tmp_path / "p.png"
    values = tuple(Value(f"v{i}", 0) for i in range(ops))
    save_graph(Graph("empty", tuple(Op(f"op{i}", (), (i,), 0) for i in range(ops)), values, frozenset(), frozenset()), path)
    for command in (["info"], ["plan", "--budget", "0.5"], ["run", "--budget", "0.5"], ["diff", "--budget=0.5", "--budget=5"]):
        assert main([command[0], str(path), *command[1:]]) == 0
        assert "empty" in capsys.readouterr().out
    assert main(["diff", str(path), "--budget", "0.5", "--json", "-", "--plot", str(picture)]) == 0
    assert {(row["overhead"], row["budget_fraction"], row["gap"]) for row in rows(capsys.readouterr().out)} == {(None, None, 0.0)}
    assert picture.stat().st_size > 0


def test_what_a_users_file_prints_is_not_among_the_rows(tmp_path: Path) -> None:
    script = tmp_path / "loud.py"
    script.write_text(
        "import torch\nfrom torch import nn\nprint('imported')\n"
        "def make():\n    print('made')\n    return nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), lambda out: out.sum()\n"
    )
    command = [BELADY, "plan", f"{script}:make", "--device=cpu", "--budget=1.0", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [row["status"] for row in rows(done.stdout)] == ["OPTIMAL"]
    assert done.stderr == "imported\nmade\n"


def test_the_saved_plan_of_a_model_fits_its_module(tmp_path: Path) -> None:
    """Under this budget the cheapest schedule lets go of running statistics and makes them again; a module cannot."""
    from planner import load_plan
    from planner.schedule import hold_early
    from planner.simulate import simulate

    script, out = tmp_path / "norms.py", tmp_path / "plan.json"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    layers = [[nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()] for _ in range(3)]\n"
        "    return nn.Sequential(*sum(layers, [])), torch.randn(16, 8), lambda out: out.sum()\n"
    )
    command = ["plan", f"{script}:make", "--device=cpu", "--budget=0.8", "--out", str(out)]
    assert main(command) == 0
    step = Loaded(parser().parse_args(command), lambda words: None).executable()
    plan = load_plan(out, step)
    assert plan.schedule == hold_early(step.graph, plan.schedule) and plan.row()["recomputed_ops"]
    assert simulate(step.graph, plan.schedule).peak_bytes <= plan.budget_bytes
    plan.module()


def test_a_plan_too_tight_to_train_with_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss of as many bytes as the output: the schedule makes it again at the end, a module keeps it.

    The comparison plans from an online run, which drops the loss, too.
    """
    script = tmp_path / "regression.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Linear(64, 64), (torch.randn(96, 64), torch.randn(96, 64)), nn.MSELoss()\n"
    )
    told = "runs as one piece only, without a module"
    for command in ("plan", "diff"):
        assert main([command, f"{script}:make", "--device=cpu", "--budget=131588", "--execute"]) == 0
        written = capsys.readouterr()
        assert "OPTIMAL" in written.out and f"the plan for 131,588 bytes {told}" in " ".join(written.err.split())
        enough = re.search(r"plan for ([\d,]+) bytes, which are known", written.err)
        assert enough is not None
        assert main([command, f"{script}:make", "--device=cpu", f"--budget={enough[1].replace(',', '')}", "--execute"]) == 0
        assert told not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(7)", "called sys.exit(7)"),
        ("return nn.Linear(4, 4), torch.empty(2**60), None", "memory"),
        ("raise ValueError('not\\nthis')", "mine.py:make failed: ValueError: not, at "),
        ("int(\n'x')", "mine.py:4: int("),
        ("return 1 +", "mine.py cannot be imported: SyntaxError: invalid syntax (mine.py, line 4)\n"),
    ],
)
def test_a_users_function_that_ends_or_bursts(
    body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(f"import torch\nfrom torch import nn\ndef make():\n    {body}\n")
    assert main(["info", f"{script}:make", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_workload_too_large_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Only what is to run needs its memory."""
    large = ["mlp", "--batch", str(10**12), "--device", "cpu"]
    assert main(["info", *large, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["keep_all_peak_bytes"] > 10**15
    assert main(["plan", *large, "--budget", "1.0", "--execute"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("belady: mlp cannot be built: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "CHAIN", "--budget", "0.5", "--budget", "0.4"], "--budget: may be given only once"),
        (["plan", "CHAIN", "--budget", "0.5", "--out", ""], "--out: a file name cannot be empty"),
        (["diff", "CHAIN", "--budget", "0.5", "--json", ""], "--json: a file name cannot be empty"),
        (["info", "CHAIN", "--min-budget", "-1"], "--min-budget: seconds must be a number from 0 to 10,000,000, not '-1'"),
        (["plan", "CHAIN", "--budget", "0.5", "--time-limit", "nan"], "--time-limit: seconds must be a number from 0 to"),
        (["sweep", "CHAIN", "--budget", "0.5", "--time-limit", "5m"], "--time-limit: seconds must be a number from 0 to"),
        (["info", "mlp", "--costs", "free"], "--costs: invalid choice: 'free'"),
    ],
)
def test_misused_options_are_usage_errors(
    arguments: list[str], message: str, chain_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([chain_file if word == "CHAIN" else word for word in arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_any_order_is_for_the_method_that_knows_it(chain_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", chain_file, "--budget", "0.7", "--any-order", "--json", "-"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row["time_ns"] is not None
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert main(["plan", chain_file, "--budget", "0.7", "--any-order", "--method", "chen_sqrt"]) == 2
    assert "chen_sqrt has no option 'any_order'" in capsys.readouterr().err


def test_an_interruption_while_the_program_is_loaded_is_one_sentence() -> None:
    script = (
        "import builtins, contextlib, io, time\nreal = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'cli':\n        print('ready', flush=True)\n        time.sleep(1)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = slow\nfrom belady.entry import main\nsaid = io.StringIO()\n"
        "with contextlib.redirect_stderr(said):\n    code = main()\n"
        "print(code, said.getvalue().strip())\n"
    )
    assert interrupted(script, after_s=0.3) == "130 belady: interrupted"


NORMS = """
import torch
from torch import nn

def make():
    layers = [[nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()] for _ in range(6)]
    return nn.Sequential(*sum(layers, [])), torch.randn(512, 8), lambda out: out.sum()
"""


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_graph_without_a_model_is_not_planned_to_be_executed(
    command: str, chain_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("belady.commands.solve_halves", lambda *_, **__: pytest.fail("something was computed"))
    monkeypatch.setattr("belady.commands.run", lambda *_, **__: pytest.fail("something was computed"))
    assert main([command, chain_file, "--budget", "0.5", "--execute"]) == 2
    assert "it can be planned, but not executed" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_interrupted_execution_leaves_the_plan(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("online.trial.measure", interrupt)
    (script := tmp_path / "norms.py").write_text(NORMS)
    out, found = tmp_path / "plan.json", tmp_path / "rows.jsonl"
    more = ["--device=cpu", "--budget=0.8", "--execute", "--out", str(out), "--json", str(found)]
    assert main([command, f"{script}:make", *more]) == 130
    assert capsys.readouterr().err == "belady: interrupted; this is what was found until then\n"
    (row,) = rows(found.read_text())
    assert row["time_ns"] and row["measured_time_ns"] is None and out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--budget", "abc"], "budget 'abc': give bytes"),
        (["plan", "--budget", "0"], "budget '0': give bytes"),
        (["diff", "--budget", "0.5", "--budget", "1.5"], "budget '1.5': give bytes"),
        (["plan", "--budget", "0.5", "--method", "checkmat"], "unknown method 'checkmat'"),
        (["plan", "--budget", "0.5", "--gap", "2"], "gap must be"),
        (["plan", "--budget", "0.5", "--method", "revolve", "--any-order"], "method revolve has no option 'any_order'"),
        (["run", "--budget", "0.5", "--heuristic", "dtrr"], "unknown heuristic 'dtrr'"),
        (["diff", "--budget", "0.5", "--heuristic", "dtr", "--heuristic", "dtr+foo"], "foo"),
        (["sweep", "--budget", "abc"], "budget 'abc': give bytes"),
        (["sweep", "--budget", "0.5", "--gap", "2"], "gap must be"),
        (["sweep", "--budget", "0.5", "--out", "-"], "standard output (-) does not take"),
        (["sweep", "--budget", "0.5", "--out", "rows.gz"], "leave out .gz"),
        (
            ["sweep", "--budget", "0.5", "--retry"],
            "--retry makes rows of a file again whose cell failed; name that file with --out",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_model_is_built(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Loaded, "__init__", lambda *_: pytest.fail("built"))
    assert main([arguments[0], "gpt2", *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("belady: ") and message in error and error.count("\n") == 1


def test_versions_are_those_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.match(r"belady \d+\.\d+.*; python 3\.\d+", capsys.readouterr().out)


@pytest.mark.parametrize(("name", "value"), [("COLUMNS", "40"), ("TERM", "dumb")])
def test_a_narrow_terminal_cuts_no_number_short(
    name: str, value: str, chain_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["diff", chain_file, "--budget", "0.5"]) == 0
    assert main(["sweep", chain_file, "--budget", "0.5"]) == 0
    assert main(["info", chain_file]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count("cutting_stages") >= 2 and "online:demand" in shown


def test_an_online_run_that_stopped_is_told(
    chain_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["online.compare"], "run", partial(run, thrash_limit=1.0))
    assert main(["diff", chain_file, "--budget", "600", "--heuristic", "dtr"]) == 0
    assert capsys.readouterr().err == "belady: online dtr in 600 bytes (600 B) recomputed without end\n"


def test_an_online_run_that_ran_out_of_memory_says_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, graph = str(tmp_path / "graph.json"), random_training(9, 0)
    save_graph(graph, path)

    def told(rule: str, budget: str) -> str:
        assert main(["run", path, "--heuristic", rule, "--budget", budget]) == 3
        return capsys.readouterr().err

    enough = re.search(r"ran out of memory at .*; try --budget (\d+) \(.* B\), which is", told("dtr", str(least_bytes(graph))))
    assert enough is not None and int(enough[1]) < simulate(graph, keep_all(graph)).peak_bytes
    assert main(["run", path, "--heuristic", "dtr", "--budget", enough[1]]) == 0
    assert "ran out of memory" in told("dtr", str(int(0.98 * int(enough[1]))))
    assert "; try a larger --budget or belady plan" in told("dtr+arena", "0.9")  # whose blocks of 512 bytes never fit


def test_what_only_one_piece_could_have_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from belady.results import tell_dearer
    from planner import plan

    found = plan(training_chain(4), 1.0)
    tell_dearer(found)
    assert not capsys.readouterr().err
    tell_dearer(replace(found, notes={**found.notes, "one_piece_time_ns": found.time_ns}))
    assert not capsys.readouterr().err
    tell_dearer(replace(found, time_ns=100, notes={**found.notes, "one_piece_time_ns": 99}))
    assert "in one piece, as online runs are, an overhead of 10.00% would do" in capsys.readouterr().err


def test_a_saved_plan_is_checked_with_the_costs_that_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mlp = str(tmp_path / "plan.json"), ["mlp", "--batch", "64", "--depth", "2", "--device", "cpu"]
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path / "times"))
    assert main(["plan", *mlp, "--budget", "1.0", "--costs", "measured", "--out", path]) == 0
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path / "none"))  # measured anew, ops would take another time
    assert main(["info", *mlp, "--plan", path]) == 0
    assert "The plan is valid for mlp" in capsys.readouterr().out
    assert main(["info", *mlp, "--plan", path, "--costs", "roofline"]) == 2
    assert "the same ops had other costs (measured, cpu) than now (roofline, cpu)" in capsys.readouterr().err
