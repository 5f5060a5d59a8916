"""Captured steps for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphs.ir import Graph

if TYPE_CHECKING:
    from graphs.workloads import Built


def step_name(workload: str, sizes: Mapping[str, int | None]) -> str:
    """What rows and files call a workload with the sizes that are asked for: "gpt2-depth96", as ``graphs.workloads.build`` knows
    it."""
    return "-".join([workload, *(f"{size}{number}" for size, number in sizes.items() if number is not None)])


def step_graph(name: str) -> Graph:
    """The training step of a workload, whose name may have sizes ("gpt2-depth96"), with the roofline's costs."""
    from graphs.workloads import build  # torch takes time to load, and some do without

    return graph_of(name, build(name, device="meta"))


def graph_of(name: str, built: Built) -> Graph:
    """The training step of a model, its inputs and its loss, with the roofline's costs."""
    from graphs.capture import capture
    from planner.plan import with_costs

    model, inputs, loss = built
    return with_costs(capture(model, inputs, loss=loss, name=name), "roofline").graph
