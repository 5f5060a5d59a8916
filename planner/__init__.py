"""What is decided before running. Imports graphs; importing this room does not import torch."""

from planner.plan import plan, solve
from planner.result import Plan, Status, load_plan
from planner.schedule import Compute, Free, Schedule, keep_all
from planner.simulate import Trace, simulate

__all__ = ["Compute", "Free", "Plan", "Schedule", "Status", "Trace", "keep_all", "load_plan", "plan", "simulate", "solve"]
