"""What is decided while running. Imports graphs and planner; importing this room does not import torch."""

from typing import TYPE_CHECKING, Any

from online.allocators import ALLOCATORS, AddressUse
from online.compare import Comparison, Difference, Split, compare, diff, split
from online.engines.engine import Option, Release
from online.heuristics import ADDRESS_HEURISTICS, DEFAULT_RULE, HEURISTICS, Heuristic, ablation
from online.portfolio import Portfolio, best_run
from online.replay import Replay, baseline_peak_bytes, replay_log
from online.runtime import Failure, Run, RunStatus, run

if TYPE_CHECKING:
    from online.eager import budget

__all__ = [
    "ADDRESS_HEURISTICS",
    "ALLOCATORS",
    "DEFAULT_RULE",
    "HEURISTICS",
    "AddressUse",
    "Comparison",
    "Difference",
    "Failure",
    "Heuristic",
    "Option",
    "Portfolio",
    "Release",
    "Replay",
    "Run",
    "RunStatus",
    "Split",
    "ablation",
    "baseline_peak_bytes",
    "best_run",
    "budget",
    "compare",
    "diff",
    "replay_log",
    "run",
    "split",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """What needs torch, once it is asked for."""
    if name == "budget":
        from online.eager import budget

        return budget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
