"""What is decided before running. Imports graphs; importing this room does not import torch."""

from planner.frontier import MinBudget, min_budget, plans
from planner.plan import plan, solve
from planner.result import Plan, Status, load_plan
from planner.schedule import Compute, Free, Schedule, keep_all
from planner.simulate import Trace, simulate

__all__ = [
    "Compute",
    "Free",
    "MinBudget",
    "Plan",
    "Schedule",
    "Status",
    "Trace",
    "keep_all",
    "load_plan",
    "min_budget",
    "plan",
    "plans",
    "simulate",
    "solve",
]
