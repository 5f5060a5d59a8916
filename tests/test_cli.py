"""The command line: tables, rows, pictures, errors, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from belady.cli import main
from graphs.serialize import save_graph
from tests.test_compare import training_chain

MLP = ["mlp", "--batch", "4096", "--depth", "12", "--device", "cpu"]


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
    assert "cutting_stages" in shown and "online:dtr" in shown and "grad error" in shown
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    found = rows(out.read_text())
    assert [row["method"] for row in found] == ["keep_all"] + ["cutting_stages", "online:dtr"] * 2
    for row in found:
        assert row["max_grad_error"] == 0.0
        assert row["measured_time_ns"] > 0
        assert row["measured_peak_bytes"] <= row["budget_bytes"]
        assert row["measured_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.02)
        assert row["versions"]["torch"]
    assert found[1]["overhead"] > 0 and found[1]["gap"] <= 0.01


def test_json_on_standard_output_is_nothing_but_rows(chain_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", chain_file, "--budget", "0.5", "--heuristic", "dtr", "--heuristic", "lru", "--json", "-"]) == 0
    assert [row["method"] for row in rows(capsys.readouterr().out)] == ["keep_all", "cutting_stages", "online:dtr", "online:lru"]


def test_plan_is_saved_and_run_too(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planner import load_plan

    graph = training_chain(8)
    for command, method in (("plan", "cutting_stages"), ("run", "online:dtr")):
        out = tmp_path / f"{command}.json"
        assert main([command, chain_file, "--budget", "500", "--out", str(out)]) == 0
        assert load_plan(out, graph).method == method
    assert "OPTIMAL" in capsys.readouterr().out


def test_info_and_workloads(chain_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.json"
    assert main(["info", chain_file, "--json", "-", "--save-graph", str(copy)]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["ops"], row["keep_all_peak_bytes"], row["proved_minimum_bytes"]) == (17, 1000, 300)
    assert copy.read_text() == Path(chain_file).read_text()
    assert main(["info", chain_file]) == 0
    assert "keep_all_peak_bytes" in capsys.readouterr().out
    assert main(["workloads"]) == 0
    shown = capsys.readouterr().out
    for name in ("mlp", "resnet50", "vgg16", "mobilenet_v2", "unet", "vit", "bert", "gpt2", "llama", "lstm"):
        assert name in shown


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
    assert "did not rule one out" in capsys.readouterr().err


BELADY = Path(sys.executable).with_name("belady")


def test_rows_on_a_pipe_are_not_mixed_with_what_solvers_print(tmp_path: Path) -> None:
    command = [BELADY, "diff", "mlp", "--batch", "2048", "--depth", "8", "--budget", "0.8", "--budget", "0.7", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [row["method"] for row in rows(done.stdout)] == ["keep_all"] + ["cutting_stages", "online:dtr"] * 2


def test_the_command_is_installed() -> None:
    done = subprocess.run([BELADY, "--help"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"})
    for word in ("diff", "plan", "run", "workloads", "info", "examples:", "exit codes"):
        assert word in done.stdout
