"""One training step for real: plain PyTorch, a plan, or an online run; measured and held against plain PyTorch. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphs.capture import Step
from graphs.errors import InputError
from online.runtime import run
from planner.measure import measure, resident_before_backward
from planner.result import Plan


@dataclass(frozen=True, slots=True)
class Trial:
    """What one executed step took.

    time_ns         wall time of the step (device time on CUDA), median of the repeats
    peak_bytes      measured peak: everything the step holds, residents included
    max_grad_error  largest absolute difference to plain PyTorch's loss, gradients and new buffers; 0.0 is bit for bit
    """

    time_ns: int
    peak_bytes: int
    max_grad_error: float

    def row(self) -> dict[str, Any]:
        """The measured entries of a result row."""
        return {
            "measured_time_ns": self.time_ns,
            "measured_peak_bytes": self.peak_bytes,
            "max_grad_error": self.max_grad_error,
        }


class Trials:
    """Runs one training step in several ways from the same state: parameters, buffers, inputs, random generators.

    Plain PyTorch runs first; ``plain`` is its trial and its loss, gradients and buffers are the reference, kept on the host.
    The model (buffers, gradients) and the generators are afterwards as they were before.
    """

    def __init__(self, step: Step, inputs: Any, *, seed: int = 0, repeats: int = 1) -> None:
        if inputs is None:
            raise InputError(f"executing {step.graph.name} needs the inputs of one training step")
        self._step, self._inputs, self._seed, self._repeats = step, inputs, seed, repeats
        self._reference: dict[str, Tensor] | None = None
        self._resident_before_backward = resident_before_backward(step)
        if step.device.type != "cuda":  # where ``measure`` sees to it: what the first step of a process sets up is no part of one
            with _as_before(step):
                torch.manual_seed(seed)
                _backward(step.eager(inputs))
        self.plain = self._try(lambda: _backward(step.eager(inputs)), self._resident_before_backward)

    def planned(self, plan: Plan) -> Trial:
        """One step with a plan, through the module that ``plan.module()`` returns."""
        assert plan.schedule is not None
        module = replace(plan, step=self._step).module()
        return self._try(lambda: _backward(_call(module, self._inputs)), self._resident_before_backward)

    def online(self, budget_bytes: int, heuristic: str) -> Trial:
        """One step decided online on real tensors; raises BudgetExceeded where it does not get through."""

        def once() -> Tensor:
            done = run(self._step, budget_bytes, heuristic=heuristic, seed=self._seed, execute=True, inputs=self._inputs)
            assert done.outcome is not None
            return done.outcome.write(self._step.model)

        return self._try(once, self._step.graph.resident_bytes)

    def _try(self, once: Callable[[], Tensor], resident_bytes: int) -> Trial:
        model = self._step.model
        with _as_before(self._step) as restore:

            def prepare() -> None:
                restore()
                torch.manual_seed(self._seed)

            measured = measure(once, self._step.device, resident_bytes, prepare=prepare, repeats=self._repeats)
            found = {"loss": measured.result.detach().to("cpu", copy=True)}
            found |= {f"grad {n}": p.grad.to("cpu", copy=True) for n, p in model.named_parameters() if p.grad is not None}
            found |= {f"buffer {n}": b.to("cpu", copy=True) for n, b in self._step.buffers.items()}
        if self._reference is None:
            self._reference = found
        return Trial(measured.time_ns, measured.peak_bytes, _largest_difference(self._reference, found))


def _backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _call(module: torch.nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return module(**inputs)  # type: ignore[no-any-return]
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)  # type: ignore[no-any-return]


def _largest_difference(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    if wanted.keys() != found.keys():
        return float("inf")
    largest = 0.0
    for name, tensor in wanted.items():
        if not torch.equal(tensor, found[name]):
            difference = (tensor.double() - found[name].double()).abs()
            largest = max(largest, float(difference.nan_to_num(nan=float("inf")).max()))
    return largest


@contextmanager
def _as_before(step: Step) -> Iterator[Callable[[], None]]:
    """Gives a function that puts buffers back and drops gradients; at the end all is as it was, generators too."""
    model = step.model
    registered = [(part, dict(part.named_buffers(recurse=False))) for part in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in step.buffers.values()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    @torch.no_grad()
    def restore() -> None:
        for part, by_name in registered:
            for name, buffer in by_name.items():
                if getattr(part, name) is not buffer:  # eager execution has put another one there
                    setattr(part, name, buffer)
        for buffer, content in buffers:
            if not torch.equal(buffer, content):
                buffer.copy_(content)
        for parameter, _ in gradients:
            parameter.grad = None

    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        try:
            yield restore
        finally:
            restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
