"""What is decided while running. Imports graphs and planner; importing this room does not import torch."""

from online.allocators import ALLOCATORS, AddressUse
from online.compare import Comparison, Difference, compare, diff
from online.engine import Release
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS, Heuristic, ablation
from online.portfolio import Portfolio, best_run
from online.replay import Replay, baseline_peak_bytes, replay_log
from online.runtime import Failure, Run, RunStatus, run

__all__ = [
    "ADDRESS_HEURISTICS",
    "ALLOCATORS",
    "HEURISTICS",
    "AddressUse",
    "Comparison",
    "Difference",
    "Failure",
    "Heuristic",
    "Portfolio",
    "Release",
    "Replay",
    "Run",
    "RunStatus",
    "ablation",
    "baseline_peak_bytes",
    "best_run",
    "compare",
    "diff",
    "replay_log",
    "run",
]
