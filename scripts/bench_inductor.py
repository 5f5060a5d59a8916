"""Compiled steps in less memory: the compiler's own recomputation beside plans, both with Inductor's kernels: result rows.

    python -m belady.bench_inductor

For each model ``torch.compile`` with some ratios of its memory budget (``inductor``), then the backend ``belady`` with kernels of
Inductor (``planned``), for shares of the peak that the compiled step has where nothing is asked of it. Each is compiled anew,
which takes half a minute on two cores; peaks and times are those of the compiled steps that follow.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.capture import capture
from graphs.errors import InfeasibleBudget, NoScheduleFound
from graphs.torch_private.partitioned import activation_memory_budget

from .bench_eager import CASES, Chain
from .bench_whole import bench_models
from .gpu_rivals import Bench, Trial
from .output import heeded

RATIOS = (1.0, 0.5, 0.25, 0.1, 0.05)
SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
TIME_LIMIT_S = 10.0  # of a plan
REPEATS = 9


class Transformer(nn.Module):
    """Blocks of attention and two layers, as GPT-2 has them, without dropout: the compiler's budget draws it anew."""

    def __init__(self, depth: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.qkvs = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for i, (qkv, out, up, down) in enumerate(zip(self.qkvs, self.outs, self.ups, self.downs, strict=True)):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(self.norms[2 * i](x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(a.transpose(1, 2).flatten(-2))
            x = x + down(F.gelu(up(self.norms[2 * i + 1](x))))
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer-depth4-width128-batch8-seq128": (Transformer, lambda: torch.randn(8, 128, 128)),
    "convolutions-depth8-batch8-size48": CASES["convolutions-depth8-batch8-size48"],
    "chain-depth12-width64-batch4096": (lambda: Chain(12, 64), lambda: torch.randn(4096, 64)),
}


def rows(name: str) -> list[dict[str, Any]]:
    """One row a ratio, then one a share."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    make, given = MODELS[name]
    inputs = given()
    bench = Bench(capture(make(), inputs, name=name), inputs, repeats=REPEATS)
    found = []

    def note(method: str, share: float, budget_bytes: int | None, run: Callable[[], Trial]) -> None:
        row: dict[str, Any] = {
            "graph": name,
            "device": "cpu",
            "method": method,
            "budget_fraction": share,
            "budget_bytes": budget_bytes,
            "measured_eager_time_ns": bench.plain.time_ns,
            "measured_eager_peak_bytes": bench.plain.peak_bytes,
        }
        print(f"  {method} {share}", file=sys.stderr, flush=True)
        try:
            with heeded():
                trial = run()
        except Exception as error:
            inner = getattr(error, "inner_exception", error)  # the compiler wraps what a backend raises
            if not isinstance(inner, InfeasibleBudget | NoScheduleFound):
                raise
            row |= {"status": type(inner).__name__, "reason": str(inner)}
        else:
            row |= {"status": "MEASURED", "measured_time_ns": trial.time_ns, "measured_peak_bytes": trial.peak_bytes}
            row["max_grad_error"] = trial.grad_error
        found.append(row)

    for ratio in RATIOS:
        with activation_memory_budget(ratio) if ratio < 1 else contextlib.nullcontext():
            note("inductor", ratio, None, lambda: bench.compiled("inductor"))
    whole_bytes = found[0]["measured_peak_bytes"]
    for share in SHARES:
        options = {"budget": int(share * whole_bytes), "kernels": "inductor", "time_limit_s": TIME_LIMIT_S}
        note("planned", share, int(share * whole_bytes), lambda: bench.compiled("belady", options))  # noqa: B023 runs at once
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the rows; return the exit code."""
    return bench_models("bench_inductor", __doc__, "benchmarks/inductor_cpu.jsonl", MODELS, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
