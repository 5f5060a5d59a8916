"""The README's example runs, and its numbers come from committed rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from planner import plan

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def example(beginning: str = "") -> str:
    """The first example, or the first that begins so."""
    return next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if block.startswith(beginning))


def test_the_eager_example_goes_on_from_the_first(tmp_path: Path) -> None:
    code = f"{example()}\n{example('from online import budget')}\nprint(block.peak_bytes)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "online dtr_eq+counted" in done.stdout
    assert 0 < int(done.stdout.splitlines()[-1]) <= 24 << 20


def test_the_example_runs_and_ends_in_a_number(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example()], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"(\d+\.\d+)% more time for 40% less memory", done.stdout.strip().splitlines()[-1])
    assert match is not None, done.stdout
    assert 0 < float(match[1]) < 50


def test_a_model_that_no_machine_holds_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    batch = torch.randn(2048, 256), torch.randint(0, 10, (2048,))
    exec(example("from graphs.capture import capture"), {"torch": torch, "nn": nn, "plan": plan, "batch": batch})
    assert re.search(r"in 128,849,018,880 bytes, OPTIMAL .* overhead \d+\.\d\d%", capsys.readouterr().out)


def test_the_results_are_drawn_from_committed_rows() -> None:
    from belady import readme_tables

    assert readme_tables.main(["--check"]) == 0, "run python -m belady.readme_tables"


def test_every_command_in_the_readme_parses() -> None:
    from belady.arguments import parser

    commands = re.findall(r"^belady (.*?)(?:#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        parser().parse_args(command.split())
