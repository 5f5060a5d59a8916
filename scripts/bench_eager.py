"""What a step costs on the host beside plain eager PyTorch, planned or under ``online.budget``: result rows.

    python -m belady.bench_eager

Beside plain PyTorch (``eager``) runs a dispatch mode that does nothing (``dispatch_mode``): no interposition in Python can cost
less. ``planned`` is a module with the plan that keeps everything, ``lowered`` the same plan without autograd, and ``online.run``
the captured graph under a rule: its time over that of ``lowered``, for each op it ran, is what deciding costs. Times are means
of processor time, pauses of Python's garbage collector among them; they are comparable within one run. Searches are timed by
the wall clock.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from graphs.capture import Step, capture
from graphs.costs import roofline
from graphs.errors import BudgetExceeded, InfeasibleBudget, NoScheduleFound
from graphs.ir import Graph
from graphs.torch_private.names import TorchDispatchMode
from online.eager import budget
from online.runtime import Run, run
from planner.execute import PlannedModule, PlannedStep
from planner.schedule import Compute, Schedule, keep_all

from .bench_whole import bench_models

REPEATS = 9
SHARES = (None, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
RULES = ("dtr_eq", "lru")
RUN_SHARES = (1.0, 0.8, 0.6)  # of executed runs


class Chain(nn.Module):
    """Many small ops: what an op costs beside its work."""

    def __init__(self, depth: int = 60, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 2
        return x.square().mean()


class Norms(nn.Module):
    """Small ops with batch norm, whose buffers change in every call."""

    def __init__(self, depth: int = 8, width: int = 16) -> None:
        super().__init__()
        parts = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable(parts))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


class Convolutions(nn.Module):
    """Few large ops, with batch norm."""

    def __init__(self, depth: int = 8, channels: int = 32) -> None:
        super().__init__()
        sizes = [3, *[channels] * depth]
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in itertools.pairwise(sizes))
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "chain-depth60-width64-batch64": (Chain, lambda: torch.randn(64, 64)),
    "chain-depth250-width16-batch64": (lambda: Chain(250, 16), lambda: torch.randn(64, 16)),  # 1,000 live storages
    "norms-depth8-width16-batch8": (Norms, lambda: torch.randn(8, 16)),
    "convolutions-depth8-batch8-size48": (Convolutions, lambda: torch.randn(8, 3, 48, 48)),
}


class Empty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forwards every operator call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _step(model: nn.Module, x: Tensor, block: contextlib.AbstractContextManager[Any], times: int = 1) -> float:
    """CPU seconds of one forward and backward."""
    took_s = 0.0
    gc.collect()  # what others have left to the garbage collector is not its own
    for _ in range(times):
        model.zero_grad()
        begin = time.process_time()
        with block:
            model(x).backward()
        took_s += time.process_time() - begin
    return took_s / times


def live_storages(graph: Graph, schedule: Schedule) -> int:
    """The most storages that are in memory at once."""
    live = most = len(graph.resident)
    for step in schedule:
        live += len(graph.ops[step.op].outputs) if isinstance(step, Compute) else -1
        most = max(most, live)
    return most


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    gc.collect()
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def _executed(step: Step, x: Tensor, plain_s: float) -> list[dict[str, Any]]:
    """The captured graph, lowered with everything kept and executed while a rule decides: in turn, the first round left out.

    What a run checks before, and what it writes down, counts too.
    """
    lowered = PlannedStep(step, keep_all(step.graph))
    lowered_s = []
    found: dict[tuple[str, float], list[tuple[float, Run]]] = {(rule, share): [] for rule in RULES for share in RUN_SHARES}
    for _ in range(1 + REPEATS):  # the first writes the code of the ops
        lowered_s.append(_timed(lambda: lowered(x))[0])
        for (rule, share), done in found.items():
            with contextlib.suppress(BudgetExceeded, NoScheduleFound, InfeasibleBudget):
                call = functools.partial(run, step, share, heuristic=rule, execute=True, inputs=x)
                done.append(_timed(call))
    base_s = statistics.mean(lowered_s[1:])
    row: dict[str, Any] = {"method": "lowered", "budget_fraction": None, "measured_time_ns": round(base_s * 1e9)}
    table = [row | {"measured_overhead": base_s / plain_s - 1}]
    for (rule, share), done in found.items():
        row = {"method": "online.run", "heuristic": rule, "budget_fraction": share}
        if not done:
            table.append({**row, "status": "UNKNOWN"})
            continue
        mean_s, last = statistics.mean(took_s for took_s, _ in done[1:]), done[-1][1]
        counters = last.counters
        search_s = statistics.mean(each.counters.search_s for _, each in done[1:])
        row |= {
            "status": "FEASIBLE",
            "budget_bytes": last.budget_bytes,
            "peak_bytes": last.peak_bytes,
            "measured_time_ns": round(mean_s * 1e9),
            "measured_overhead": mean_s / plain_s - 1,
            "recomputed_ops": counters.recomputations,
            "evictions": counters.evictions,
            "search_ns": round(search_s * 1e9),
            "extra_ns_per_execution": round((mean_s - plain_s) / counters.executions * 1e9),
            "extra_over_lowered_ns_per_execution": round((mean_s / counters.executions - base_s / len(step.graph.ops)) * 1e9),
        }
        table.append(row)
    return table


def rows(name: str) -> list[dict[str, Any]]:
    """One row a budget; the first, without one, is plain PyTorch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, x = make(), inputs()
    times_s: dict[float | str | None, list[float]] = {method: [] for method in ("dispatch_mode", "planned", *SHARES)}
    step = roofline(capture(model, x))
    planned = PlannedModule(step, keep_all(step.graph), 1 << 40)
    with budget(None, holding=(model, x)) as whole:
        model(x).backward()
    keep_all_bytes = whole.peak_bytes
    found = {}
    times = max(1, min(20, round(0.1 / _step(model, x, contextlib.nullcontext(), times=2))))  # short steps run in one go
    for _ in range(REPEATS):  # in turn, so that what else the machine does falls on all of them
        times_s["dispatch_mode"].append(_step(model, x, cast(Any, Empty)(), times=times))
        times_s["planned"].append(_step(planned, x, contextlib.nullcontext(), times=times))
        for share in SHARES:
            if share is None:
                times_s[None].append(_step(model, x, contextlib.nullcontext(), times=times))
                continue
            block = budget(int(share * keep_all_bytes), holding=(model, x))
            with contextlib.suppress(BudgetExceeded, NoScheduleFound):
                times_s[share].append(_step(model, x, block))
                found[share] = block
    plain_s = statistics.mean(times_s[None])
    ops = len(whole.graph.ops)
    common: dict[str, Any] = {
        "graph": name,
        "device": "cpu",
        "heuristic": whole.record().rule,
        "ops": ops,
        "clock": "process_time",
        "threads": 1,
    }
    common["live_storages"] = live_storages(whole.graph, whole.schedule)
    table = [{**common, "method": "eager", "budget_fraction": None, "measured_time_ns": round(plain_s * 1e9)}]
    for method in ("dispatch_mode", "planned"):
        took_s = statistics.mean(times_s[method])
        row: dict[str, Any] = {"method": method, "budget_fraction": None, "measured_time_ns": round(took_s * 1e9)}
        row |= {"measured_overhead": took_s / plain_s - 1, "extra_ns_per_execution": round((took_s - plain_s) / ops * 1e9)}
        table.append({**common, **row})
    table += [{**common, **row} for row in _executed(step, x, plain_s)]
    for share in SHARES[1:]:
        if len(times_s[share]) < REPEATS:
            table.append({**common, "method": "online.budget", "budget_fraction": share, "status": "UNKNOWN"})
            continue
        took_s = statistics.mean(times_s[share])
        block = found[share]
        executions = block.counters.executions
        table.append(
            {
                **common,
                "method": "online.budget",
                "budget_fraction": share,
                "status": "FEASIBLE",
                "budget_bytes": block.budget_bytes,
                "peak_bytes": block.peak_bytes,
                "measured_time_ns": round(took_s * 1e9),
                "measured_overhead": took_s / plain_s - 1,
                "recomputed_ops": block.counters.recomputations,
                "evictions": block.counters.evictions,
                "search_ns": round(block.counters.search_s * 1e9),
                "extra_ns_per_execution": round((took_s - plain_s) / executions * 1e9) if executions else None,
            }
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the rows; return the exit code."""
    return bench_models("bench_eager", __doc__, "benchmarks/eager_cpu.jsonl", CASES, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
