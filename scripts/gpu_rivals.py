"""One training step in many ways, measured from the same state and held against plain PyTorch: cells of ``gpu_check``. [torch]"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphs.capture import Step
from graphs.errors import InputError
from graphs.rewriting.sizes import cuda_bytes
from online.eager import EagerRun
from online.eager import budget as eager_budget
from online.runtime import run
from planner.execute import PlannedModule
from planner.execution.cuda_graph import GraphedModule
from planner.measure import measure, resident_before_backward, wall_time_ns
from planner.result import Plan

Once = Callable[[], Tensor]  # one step: fills ``.grad`` and the buffers, returns the loss


@dataclass(frozen=True, slots=True)
class Trial:
    """What one way to run the step took.

    time_ns         device time on CUDA, wall time on CPU; median
    peak_bytes      most that was in memory, residents included
    reserved_bytes  most the allocator held from the driver (CUDA)
    grad_error      largest absolute difference of loss and gradients to plain PyTorch; 0.0 is bit for bit
    buffer_error    the same of the buffers after the step
    """

    time_ns: int
    peak_bytes: int
    reserved_bytes: int | None
    grad_error: float
    buffer_error: float


class Bench:
    """Runs one training step in several ways from the same parameters, buffers, inputs and generator state.

    Plain PyTorch runs first, and is what everything else is compared with, kept on the step's device. It is measured twice, as
    libraries may still load in the first runs of a process: ``plain`` has the faster time, and its own difference from one to
    the other, which is 0 where all kernels are deterministic.
    """

    def __init__(self, step: Step, inputs: Any, *, repeats: int, seed: int = 0) -> None:
        self.step, self.inputs = step, inputs
        self._repeats, self._seed = repeats, seed
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in step.buffers.values()]
        self._reference: dict[str, Tensor] | None = None
        self._losses: list[Tensor] = []
        self._resident_bytes = resident_before_backward(step)
        first, again = self.trial(self.eager), self.trial(self.eager)
        self.plain = replace(again, time_ns=min(first.time_ns, again.time_ns))

    def eager(self) -> Tensor:
        """One step of plain PyTorch."""
        return _backward(self.step.eager(self.inputs))

    def planned(self, plan: Plan, *, cuda_graph: bool = False) -> Trial:
        """One step with a plan through its module; with ``cuda_graph`` captured before it is timed."""
        assert plan.schedule is not None
        if not cuda_graph:
            module = PlannedModule(self.step, plan.schedule, plan.budget_bytes)
            return self.trial(lambda: _backward(self._call(module)))
        graphed = GraphedModule(self.step, plan.schedule, plan.budget_bytes)
        try:
            return self._graphed(graphed)
        finally:
            graphed.release()

    def loss_error(self, plan: Plan, steps: int) -> float:
        """Train some steps with a plan: the largest difference of a loss to those of plain PyTorch; 0.0 is bit for bit."""
        assert plan.schedule is not None
        if len(self._losses) != steps:
            self._losses = self._train(lambda: self.step.eager(self.inputs), steps)
        module = PlannedModule(self.step, plan.schedule, plan.budget_bytes)
        found = self._train(lambda: self._call(module), steps)
        return largest_difference(dict(enumerate(self._losses)), dict(enumerate(found)))

    def online(self, budget_bytes: int, rule: str) -> Trial:
        """One step decided online; raises BudgetExceeded or NoScheduleFound where it does not get through."""

        def once() -> Tensor:
            done = run(self.step, budget_bytes, heuristic=rule, seed=self._seed, execute=True, inputs=self.inputs)
            assert done.outcome is not None
            return done.outcome.write(self.step.model)

        return self.trial(once, self.step.graph.resident_bytes)

    def interposed(self, budget_bytes: int) -> tuple[Trial, EagerRun]:
        """One step of plain PyTorch under ``online.budget``, and the record of one; raises as a block under it does."""
        model = self.step.model
        runs: list[EagerRun] = []

        def once() -> Tensor:
            with eager_budget(budget_bytes, holding=(model, self.inputs)) as run_:
                loss = self.eager()
            runs[:] = [run_]
            return loss

        return self.trial(once, by_allocator=True), runs[0]

    def checkpointed(self, name: str, every: int, kind: str) -> Trial:
        """One step with every n-th block of the workload ``name`` under a checkpoint of a kind of ``CHECKPOINTS``."""
        model = self.step.model
        with _out_of_place(model, kind == "selective"), wrapped(blocks(name, model)[::every], CHECKPOINTS[kind]()):
            return self.trial(self.eager)

    def compiled(self, backend: str | Callable[..., Any], options: dict[str, Any] | None = None) -> Trial:
        """One step compiled, which is not timed."""
        torch.compiler.reset()  # else what was compiled before is used, whatever the settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = torch.compile(self.step.body, backend=backend, options=options)
            inputs = self.inputs

            def once() -> Tensor:
                return _backward(function(inputs))

            self._as_at_first()
            once()  # compiles
            try:
                return self.trial(once, by_allocator=True)
            finally:
                torch.compiler.reset()

    def trial(self, once: Once, resident_bytes: int | None = None, *, by_allocator: bool = False) -> Trial:
        """Measure one way to run the step.

        by_allocator  on a CPU, take the peak from the allocator's events: under a meter compiled code does not run, nor ever
                      again, and what ``online.budget`` evicts is a storage without bytes
        """
        resident = self._resident_bytes if resident_bytes is None else resident_bytes
        device = self.step.device
        if by_allocator and device.type == "cpu":
            time_ns = wall_time_ns(once, prepare=self._as_at_first, repeats=self._repeats)
            self._as_at_first()
            loss, above = profiled(once)
            return self._compared(loss, time_ns, resident + above, None)
        measured = measure(once, device, resident, prepare=self._as_at_first, repeats=self._repeats)
        return self._compared(measured.result, measured.time_ns, measured.peak_bytes, measured.reserved_bytes)

    def _train(self, call: Once, steps: int) -> list[Tensor]:
        """Losses of some steps of an optimizer; parameters and buffers are as before afterwards."""
        parameters = list(self.step.model.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        self._as_at_first()
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(_backward(call()))
            optimizer.step()
        with torch.no_grad():
            for parameter, content in zip(parameters, start, strict=True):
                parameter.copy_(content)
        self._as_at_first()
        return losses

    def _graphed(self, module: GraphedModule) -> Trial:
        """A replay allocates nothing: the peak is that of the capture, and what stays reserved is the price."""
        device = self.step.device

        def once() -> Tensor:
            return _backward(self._call(module))

        # Libraries allocate at their first call on the stream of the captures, as they do before any other measurement.
        self._as_at_first()
        once()
        module.release()
        self._as_at_first()
        gc.collect()
        torch.cuda.empty_cache()
        before, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        once()
        torch.cuda.synchronize(device)
        # The plan counts the inputs once.
        copies = sum(cuda_bytes(tensor.untyped_storage().nbytes()) for tensor in module.static_inputs)
        peak = self._resident_bytes + torch.cuda.max_memory_allocated(device) - before - copies
        torch.cuda.empty_cache()
        reserved = self._resident_bytes + torch.cuda.memory_reserved(device) - held - copies
        measured = measure(once, device, self._resident_bytes, prepare=self._as_at_first, repeats=self._repeats)
        return self._compared(measured.result, measured.time_ns, peak, reserved)

    def _compared(self, loss: Tensor, time_ns: int, peak_bytes: int, reserved_bytes: int | None) -> Trial:
        model = self.step.model
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found = {"loss": loss.detach()} | {f"grad {n}": g for n, g in grads.items()}
        buffers = {f"buffer {n}": b for n, b in self.step.buffers.items()}
        if self._reference is None:
            self._reference = {n: t.detach().clone() for n, t in (found | buffers).items()}
        wanted = self._reference
        here = {n: t for n, t in wanted.items() if not n.startswith("buffer ")}
        kept = {n: t for n, t in wanted.items() if n.startswith("buffer ")}
        errors = largest_difference(here, found), largest_difference(kept, buffers)
        self._as_at_first()
        return Trial(time_ns, peak_bytes, reserved_bytes, *errors)

    @torch.no_grad()
    def _as_at_first(self) -> None:
        for buffer, content in self._buffers:
            buffer.copy_(content)
        for parameter in self.step.model.parameters():
            parameter.grad = None
        torch.manual_seed(self._seed)

    def _call(self, module: nn.Module) -> Tensor:
        given = self.inputs
        loss: Tensor = (
            module(**given) if isinstance(given, Mapping) else module(*given) if isinstance(given, tuple) else module(given)
        )
        return loss


def _backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def largest_difference(wanted: Mapping[Any, Tensor], found: Mapping[Any, Tensor]) -> float:
    """Over all tensors; infinite where one is missing or is not a number."""
    if wanted.keys() != found.keys():
        return float("inf")
    largest = 0.0
    for name, tensor in wanted.items():
        if not torch.equal(tensor, found[name]):
            difference = (tensor.double() - found[name].double()).abs().nan_to_num(nan=float("inf"))
            largest = max(largest, float(difference.max()))
    return largest


def profiled(once: Once) -> tuple[Tensor, int]:
    """Run once on the CPU: the loss, and the most the allocator held above the start."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profile:
        loss = once()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and "CPU" in str(e.device_type()))
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return loss, peak


# Checkpoints by hand.

_CLASSES = {
    "resnet50": "ResNetBottleNeckLayer",
    "vit": "ViTLayer",
    "bert": "BertLayer",
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
}

Forward = Callable[..., Any]
Block = tuple[nn.Module, slice | None]  # a module, or a slice of a Sequential


def blocks(name: str, model: nn.Module) -> list[Block]:
    """What one would put under a checkpoint by hand: layers of a transformer, bottlenecks, what lies between two poolings."""
    if name == "vgg16":
        ends = [at + 1 for at, part in enumerate(model.children()) if isinstance(part, nn.MaxPool2d)]
        cuts = [0, *ends, len(list(model.children()))]
        return [(model, slice(a, b)) for a, b in itertools.pairwise(cuts)]
    if name == "unet":
        return [(part, None) for side in ("down", "join") for part in model.get_submodule(side).children()]
    found: list[Block] = [(part, None) for part in model.modules() if type(part).__name__ == _CLASSES.get(name)]
    if not found:
        raise InputError(f"nobody said what the blocks of {name} are")
    return found


@contextlib.contextmanager
def wrapped(chosen: list[Block], wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Put ``wrap`` around the forward of these blocks."""
    models = {id(part): part for part, _ in chosen}
    try:
        for part in models.values():
            if (cuts := [cut for whose, cut in chosen if whose is part and cut is not None]) != []:
                part.forward = functools.partial(_in_pieces, part, cuts, wrap)
            else:
                part.forward = wrap(part.forward)
        yield
    finally:
        for part in models.values():
            del part.forward


@contextlib.contextmanager
def _out_of_place(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Activations that write over their input would write over what a selective checkpoint has saved."""
    changed = [part for part in model.modules() if wanted and getattr(part, "inplace", False) is True]
    try:
        for part in changed:
            part.inplace = False  # type: ignore[assignment]
        yield
    finally:
        for part in changed:
            part.inplace = True  # type: ignore[assignment]


def _in_pieces(whole: Any, cuts: list[slice], wrap: Callable[[Forward], Forward], x: Tensor) -> Tensor:
    """A Sequential with some of its slices wrapped."""
    at = 0
    for cut in cuts:
        for part in whole[at : cut.start]:
            x = part(x)
        x = wrap(whole[cut])(x)
        at = cut.stop
    for part in whole[at:]:
        x = part(x)
    return x


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def _plainly() -> Callable[[Forward], Forward]:
    return lambda forward: functools.partial(checkpoint, forward, use_reentrant=False)


def _selectively() -> Callable[[Forward], Forward]:
    """Save what matrix products, convolutions and attention return, recompute the rest of the block."""
    aten = torch.ops.aten
    kept = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution]
    kept += [getattr(aten, f"_scaled_dot_product_{kind}") for kind in _ATTENTION]
    saved = [packet.default for packet in kept]
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    return lambda forward: functools.partial(checkpoint, forward, use_reentrant=False, context_fn=context)


def _torch_remat() -> Callable[[Forward], Forward]:
    if importlib.util.find_spec("torch_remat") is None:
        raise ModuleNotFoundError("torch_remat is not installed")
    library: Any = importlib.import_module("torch_remat")

    def wrap(forward: Forward) -> Forward:
        inside: Forward = library.checkpoint()(forward)
        return inside

    return wrap


CHECKPOINTS: dict[str, Callable[[], Callable[[Forward], Forward]]] = {
    "checkpoint": _plainly,
    "selective": _selectively,
    "torch_remat": _torch_remat,
}
