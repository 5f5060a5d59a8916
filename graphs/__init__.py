"""What is computed and what it costs. Imports neither planner nor online; importing this room does not import torch."""

from graphs.errors import (
    BeladyError,
    BranchChanged,
    BudgetExceeded,
    CaptureError,
    GraphMismatch,
    InfeasibleBudget,
    InputError,
    InvalidGraph,
    InvalidSchedule,
    NoScheduleFound,
)
from graphs.ir import Graph, Op, Value

__all__ = [
    "BeladyError",
    "BranchChanged",
    "BudgetExceeded",
    "CaptureError",
    "Graph",
    "GraphMismatch",
    "InfeasibleBudget",
    "InputError",
    "InvalidGraph",
    "InvalidSchedule",
    "NoScheduleFound",
    "Op",
    "Value",
]
