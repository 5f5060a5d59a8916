"""What ``online.budget`` costs per operator call beside plain eager PyTorch, and what a budget costs: rows on standard output.

python -m belady.bench_eager > benchmarks/eager_cpu.jsonl
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import BudgetExceeded, NoScheduleFound
from online.eager import budget

from .rows import write_rows

REPEATS = 7
SHARES = (None, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


class Chain(nn.Module):
    """Many small ops: what an op costs beside its work."""

    def __init__(self, depth: int = 60, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 2
        return x.square().mean()


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
    "convolutions-depth8-batch8-size48": (Convolutions, lambda: torch.randn(8, 3, 48, 48)),
}


def _step(model: nn.Module, x: Tensor, block: contextlib.AbstractContextManager[Any]) -> float:
    """CPU seconds of one forward and backward."""
    model.zero_grad()
    begin = time.process_time()
    with block:
        model(x).backward()
    return time.process_time() - begin


def rows(name: str) -> list[dict[str, Any]]:
    """One row a budget; the first, without one, is plain PyTorch."""
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, x = make(), inputs()
    times_s: dict[float | None, list[float]] = {share: [] for share in SHARES}
    with budget(None, holding=(model, x)) as whole:
        model(x).backward()
    keep_all_bytes = whole.peak_bytes
    found = {}
    for _ in range(REPEATS):  # in turn, so that what else the machine does falls on all of them
        for share in SHARES:
            if share is None:
                times_s[None].append(_step(model, x, contextlib.nullcontext()))
                continue
            run = budget(int(share * keep_all_bytes), holding=(model, x))
            with contextlib.suppress(BudgetExceeded, NoScheduleFound):
                times_s[share].append(_step(model, x, run))
                found[share] = run
    plain_s = statistics.median(times_s[None])
    ops = len(whole.graph.ops)
    common = {"graph": name, "device": "cpu", "heuristic": "dtr_eq", "ops": ops, "clock": "process_time", "threads": 1}
    table = [{**common, "method": "eager", "budget_fraction": None, "measured_time_ns": round(plain_s * 1e9)}]
    for share in SHARES[1:]:
        if len(times_s[share]) < REPEATS:
            table.append({**common, "method": "online.budget", "budget_fraction": share, "status": "UNKNOWN"})
            continue
        took_s = statistics.median(times_s[share])
        run = found[share]
        executions = run.counters.executions
        table.append(
            {
                **common,
                "method": "online.budget",
                "budget_fraction": share,
                "status": "FEASIBLE",
                "budget_bytes": run.budget_bytes,
                "peak_bytes": run.peak_bytes,
                "measured_time_ns": round(took_s * 1e9),
                "measured_overhead": took_s / plain_s - 1,
                "recomputed_ops": run.counters.recomputations,
                "evictions": run.counters.evictions,
                "search_ns": round(run.counters.search_s * 1e9),
                "extra_ns_per_execution": round((took_s - plain_s) / executions * 1e9) if executions else None,
            }
        )
    return table


def main() -> None:
    torch.set_num_threads(1)
    write_rows("-", [row for name in CASES for row in rows(name)])


if __name__ == "__main__":
    main()
