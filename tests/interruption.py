"""Ctrl-C in a program under test."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A parent in the background may have the signal ignored, and that would be inherited.
HEARS = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


def interrupted(script: str, *, after_s: float) -> str:
    """The last line of a Python script that is sent SIGINT so long after its line ``ready``; it has to end well by itself."""
    if os.name != "posix":
        pytest.skip("sends SIGINT")
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", HEARS + script], stdout=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(after_s)
            child.send_signal(signal.SIGINT)
            out, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0
    return out.splitlines()[-1]
