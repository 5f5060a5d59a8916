"""Ctrl-C while code is being loaded comes through, and only when it is loaded; what is compiled can be compiled beforehand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import pytest

from planner.process import compiled
from planner.process.clock import now_s
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


def test_the_clock_of_time_limits_stands_still_while_code_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled._tell_compiling.cache_clear()

    def inner(n: int) -> int:
        return sum([i * i for i in range(n)])

    squares = compiled.njit(inner)

    def outer(n: int) -> int:
        return squares(n) + squares(n + 1)

    both, others = compiled.njit(outer), numba.njit(lambda n: n + 1)
    numba.njit(lambda n: n - 1)(1)  # loads the compiler
    began, counted = time.perf_counter(), now_s()
    assert both(3) == 5 + 14
    took_s, counted_s = time.perf_counter() - began, now_s() - counted
    assert 0 <= counted_s < 0.5 * took_s
    assert [record.message for record in caplog.records if record.name == "belady"] == [
        "compiling code for this machine, once: it may take a minute, which no time limit counts"
    ]
    began, counted = time.perf_counter(), now_s()
    assert both(4) == 14 + 30
    assert now_s() - counted == pytest.approx(time.perf_counter() - began, abs=0.01), "and goes on"
    began, counted = time.perf_counter(), now_s()
    assert others(1) == 2
    assert now_s() - counted == pytest.approx(time.perf_counter() - began, abs=0.01), "other people's code counts"


def test_nothing_is_left_to_compile_after_all_has_been() -> None:
    script = """
from numba.extending import is_jitted
from graphs.synthetic import random_layered, random_training
from online import heuristics, run
from online.engines import compiled_searches
from online.on_demand import compile_all
from planner import keep_all, simulate
from planner.least import pebbling_sets
from planner.least.pebbling import fitting, least_peak
from planner.plan import solve
from planner.stages import exhaustive_states
from planner.walks import annealing_moves, list_walk, walk_search

def compiled():
    modules = compiled_searches, list_walk, walk_search, annealing_moves, pebbling_sets, exhaustive_states
    return sum(len(it.overloads) for module in modules for it in vars(module).values() if is_jitted(it))

compile_all()
before = compiled()
for graph, share, method in (
    (random_training(60, 1), 0.7, "cutting_stages"),
    (random_training(60, 2), 0.6, "cutting_stages"),
    (random_layered("RL1", 3), 0.8, "cutting_stages"),
    (random_layered("RL1", 3), 0.9, "annealing"),
):
    budget_bytes = int(share * simulate(graph, keep_all(graph)).peak_bytes)
    solve(graph, budget_bytes, method=method, gap=0.0, time_limit_s=3)
    least_peak(graph, time_limit_s=1)
    next(fitting(graph, budget_bytes, time_limit_s=1), None)
heuristics.WORTH_LOADING = 0
for rule in heuristics.HEURISTICS:
    run(random_training(60, 1), 0.5, heuristic=rule)
print(before, compiled())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    before, after = map(int, done.stdout.split())
    assert before == after > 5
