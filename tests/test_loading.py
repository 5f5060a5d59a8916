"""Ctrl-C while code is being loaded comes through, and only when it is loaded."""

from __future__ import annotations

import threading

import pytest

from planner.process.loading import undisturbed
from tests.interruption import interrupted


def test_what_comes_of_the_work_is_handed_over() -> None:
    assert undisturbed(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        undisturbed(lambda: 1 // 0)
    found: list[threading.Thread] = []
    other = threading.Thread(target=lambda: found.append(undisturbed(threading.current_thread)))
    other.start()
    other.join()
    assert found == [other], "Ctrl-C does not reach other threads anyway"


def test_a_method_is_imported_whole_before_an_interruption_comes_through() -> None:
    script = (
        "import importlib, time\nfrom planner.methods import method\nreal, done = importlib.import_module, []\n"
        "def slow(name):\n"
        "    print('ready', flush=True)\n    time.sleep(1)\n    done.append(real(name))\n    return done[-1]\n"
        "importlib.import_module = slow\n"
        "try:\n    method('cutting_stages')\nexcept KeyboardInterrupt:\n    print('interrupted', bool(done))\n"
    )
    assert interrupted(script, after_s=0.3) == "interrupted True"


def test_a_second_interruption_comes_through_at_once() -> None:
    script = (
        "import os, signal, threading, time\nfrom planner.process.loading import undisturbed\n"
        "def work():\n"
        "    print('ready', flush=True)\n    time.sleep(1)\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(20)\n"
        "began = time.perf_counter()\n"
        "try:\n    undisturbed(work)\nexcept KeyboardInterrupt:\n    print(time.perf_counter() - began < 10)\n"
    )
    assert interrupted(script, after_s=0.3) == "True"
