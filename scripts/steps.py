"""Captured steps for benchmarks."""

from __future__ import annotations

from typing import Any

from graphs.ir import Graph


def step_name(workload: str, **sizes: int) -> str:
    """What rows call a workload: with the sizes that are not its default ones."""
    return "-".join([workload, *(f"{size}{number}" for size, number in sizes.items())])


def step_graph(workload: str, **sizes: int) -> Graph:
    """The training step of a workload, with the roofline's costs."""
    from graphs.capture import capture  # torch takes time to load, and some do without
    from graphs.workloads import build
    from planner.plan import with_costs

    model, inputs, loss = build(workload, **dict[str, Any](sizes))
    step = capture(model, inputs, loss=loss, name=step_name(workload, **sizes))
    return with_costs(step, "roofline").graph
