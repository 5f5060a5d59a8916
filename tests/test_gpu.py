"""On a CUDA device: planned, captured, online, eager and compiled steps compute what plain PyTorch computes, in their bytes.

No solver is needed: schedules are those of online runs.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import online
from belady.gpu_rivals import Bench
from graphs.capture import Step, capture
from graphs.costs import roofline
from graphs.errors import BranchChanged, BudgetExceeded, InputError
from graphs.profile import measured
from graphs.torch_private.tensors import REPLACES_IN_PLACE
from graphs.workloads import build
from online.runtime import run
from planner.compile_backend import belady
from planner.execute import PlannedModule
from planner.execution.cuda_graph import GraphedModule
from planner.measure import measure, resident_before_backward
from planner.result import Plan
from planner.schedule import Compute, Schedule, hold_early, keep_all
from planner.simulate import simulate

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORKLOADS = {
    "resnet50": {"batch": 16, "size": 64, "depth": 14},
    "vgg16": {"batch": 16, "size": 64, "depth": 11},
    "unet": {"batch": 8, "size": 64, "depth": 2},
    "vit": {"batch": 16, "size": 96, "depth": 3},
    "bert": {"batch": 8, "seq": 128, "depth": 2, "vocab": 64},
    "gpt2": {"batch": 8, "seq": 128, "depth": 2, "vocab": 64},
    "llama": {"batch": 8, "seq": 128, "depth": 3, "vocab": 64},
    "lstm": {"batch": 256, "seq": 8, "depth": 1},
}
SLACK_BYTES = 1 << 20  # that a block of the allocator may have unused, where it has no expandable segments


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in every run. cuBLAS is told by conftest: it cannot be told any more by now."""
    if not torch.cuda.is_available():
        yield
        return
    kernels: Any = torch.utils.deterministic  # a property on the module, of which types say nothing
    before, filled = torch.are_deterministic_algorithms_enabled(), kernels.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    kernels.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        kernels.fill_uninitialized_memory = filled


def by_pixel(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.permute(0, 2, 3, 1).flatten(0, 2), target.flatten())


def captured(name: str, **kwargs: Any) -> tuple[Step, Any]:
    model, inputs, loss = build(name, device="cuda", **dict[str, Any](WORKLOADS[name]))
    if name == "unet":
        loss = by_pixel  # the loss of images has no deterministic kernel
    return roofline(capture(model, inputs, loss=loss, name=name, **kwargs)), inputs


def recomputing(step: Step, *, of_the_way: float = 0.5) -> tuple[Schedule, int]:
    """A schedule that runs in two halves and its peak, for a budget between what is resident and the keep-all peak."""
    most, least = simulate(step.graph, keep_all(step.graph)).peak_bytes, step.graph.resident_bytes
    for share in (of_the_way, 0.6, 0.7, 0.8, 0.9, 0.95):
        try:
            found = run(step, round(least + share * (most - least)), heuristic="dtr_eq")
        except Exception as error:
            if "every schedule needs" in str(error):
                continue
            raise
        if found.completed:
            schedule = hold_early(step.graph, found.schedule)
            return schedule, simulate(step.graph, schedule).peak_bytes
    raise AssertionError(f"{step.graph.name} runs in no budget below its keep-all peak")


def call(module: Callable[..., Any], inputs: Any) -> Tensor:
    loss: Tensor = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    return loss


Ends = tuple[list[Tensor], dict[str, Tensor], Tensor]


def trained(step: Step, forward: Callable[[], Tensor], *, steps: int = 3, scaled: bool = False) -> Ends:
    """Losses, state and generator after some steps of an optimizer; the model is as before afterwards."""
    model = step.model
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().clone())
    ends = losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.cuda.get_rng_state()
    optimizer.zero_grad()
    model.load_state_dict(start)
    return ends


def assert_same(ours: Ends, plain: Ends) -> None:
    for a, b in zip(ours[0], plain[0], strict=True):
        assert torch.equal(a, b), (a.item(), b.item())
    for name, tensor in plain[1].items():
        assert torch.equal(ours[1][name], tensor), name
    assert torch.equal(ours[2], plain[2])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "cuda_graph"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_planned_step_trains_as_plain_pytorch(name: str, graph: bool) -> None:
    step, inputs = captured(name)
    schedule, peak_bytes = recomputing(step)
    module = (GraphedModule if graph else PlannedModule)(step, schedule, peak_bytes)
    ours = trained(step, lambda: call(module, inputs))
    assert_same(ours, trained(step, lambda: step.eager(inputs)))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_in_mixed_precision_too(name: str, dtype: torch.dtype, scaled: bool) -> None:
    step, inputs = captured(name, autocast=dtype)
    schedule, peak_bytes = recomputing(step)
    for kind in (PlannedModule, GraphedModule):
        module = kind(step, schedule, peak_bytes)
        ours = trained(step, lambda module=module: call(module, inputs), scaled=scaled)  # type: ignore[misc]
        assert_same(ours, trained(step, lambda: step.eager(inputs), scaled=scaled))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_measured_peak_is_the_planned_one(name: str, tmp_path: Path) -> None:
    """Workspaces as measured; what the allocator adds to large blocks, at most a MiB each, is granted."""
    step, inputs = captured(name)
    step = measured(step, repeats=1, cache_dir=tmp_path)
    expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    large = sum(value.size_bytes >= SLACK_BYTES for value in step.graph.values)
    for schedule, tight in ((keep_all(step.graph), True), (recomputing(step)[0], False)):  # an online run frees late
        peak_bytes = simulate(step.graph, schedule).peak_bytes
        module = PlannedModule(step, schedule, peak_bytes)
        found = measure(
            lambda module=module: call(module, inputs).backward(),  # type: ignore[misc]
            step.device,
            resident_before_backward(step),
            prepare=step.model.zero_grad,
        )
        step.model.zero_grad()
        assert found.peak_bytes <= peak_bytes + (0 if expandable else large * SLACK_BYTES)
        assert not tight or found.peak_bytes >= 0.98 * peak_bytes
        assert found.time_ns > 0


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["resnet50", "bert"])
def test_a_cuda_graph_holds_no_more_beside_the_plan_than_it_says(name: str, tmp_path: Path) -> None:
    step, inputs = captured(name)
    step = measured(step, repeats=1, cache_dir=tmp_path)
    schedule, peak_bytes = recomputing(step)
    runs = Counter(act.op for act in schedule if isinstance(act, Compute))
    again = sum(runs[i] - 1 for i, op in enumerate(step.graph.ops) if op.random)
    expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    large = sum(value.size_bytes >= SLACK_BYTES for value in step.graph.values)
    found = Plan.of(step.graph, peak_bytes, schedule, method="online", wall_s=0.0)
    trial = Bench(step, inputs, repeats=1).planned(found, cuda_graph=True)
    assert trial.grad_error == trial.buffer_error == 0
    assert trial.peak_bytes <= peak_bytes + 1024 * (1 + again) + (0 if expandable else large * SLACK_BYTES)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rule", ["dtr_eq", "lru", "coop"])
def test_an_online_run_is_plain_pytorch(rule: str) -> None:
    step, inputs = captured("gpt2")
    _, peak_bytes = recomputing(step, of_the_way=0.7)
    torch.manual_seed(3)
    loss = step.eager(inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    plain = {name: p.grad for name, p in step.model.named_parameters()}
    step.model.zero_grad()
    torch.manual_seed(3)
    done = run(step, round(1.1 * peak_bytes), heuristic=rule, execute=True, inputs=inputs)
    assert done.outcome is not None and torch.equal(done.outcome.loss, loss.detach())
    for name, gradient in done.outcome.gradients.items():
        assert torch.equal(gradient, plain[name]), name


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_any_model_under_a_budget_is_plain_pytorch(name: str) -> None:
    step, inputs = captured(name)
    twin = copy.deepcopy(step.model)
    with online.budget(None) as free:
        torch.manual_seed(3)
        step.eager(inputs).backward()  # type: ignore[no-untyped-call]
    plain = {name: p.grad for name, p in step.model.named_parameters()}
    step.model.zero_grad()
    step.model.load_state_dict(twin.state_dict())
    budget_bytes = math.ceil(0.8 * free.peak_bytes)
    torch.cuda.synchronize()
    with online.budget(budget_bytes, holding=[step.model]) as tight:
        torch.manual_seed(3)
        step.eager(inputs).backward()  # type: ignore[no-untyped-call]
    assert tight.peak_bytes <= budget_bytes
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_cuda
def test_workspace_inside_of_eager_ops_is_learned() -> None:
    x = torch.randn(1 << 20, device="cuda")
    counted = 0 if REPLACES_IN_PLACE else x.nbytes  # of what takes none, by any op
    kinds = {}
    for _ in range(3):
        with online.budget(None, holding=[x]) as run_:
            torch.sort(x)
            torch.mul(x, 2)
        kinds = {op.kind: op for op in run_.graph.ops}
    assert kinds["aten.sort.default"].workspace_bytes > 2 * counted  # its indices are of 8 bytes each
    assert kinds["aten.mul.Tensor"].workspace_bytes == counted


class Net(nn.Module):
    """Convolutions, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.dropout(F.gelu(norm(conv(x))), 0.2, self.training)
        return x.square().mean()


@pytest.mark.gpu
@needs_cuda
def test_a_compiled_model_is_plain_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model = Net().cuda()
    twin = copy.deepcopy(model)
    x = torch.randn(16, 16, 32, 32, device="cuda")
    compiled = torch.compile(model, backend=belady, options={"budget": 1.0})  # by name it is known only once it is installed
    try:
        for each, function in ((model, compiled), (twin, twin)):
            torch.manual_seed(3)
            for _ in range(2):
                function(x).backward()
            assert all(p.grad is not None for p in each.parameters())
    finally:
        torch.compiler.reset()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), name


class Guarded(Net):
    """Asks whether its numbers are finite."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if torch.isfinite(x).all() and torch.isfinite(y) else y.nan_to_num()


@pytest.mark.gpu
@needs_cuda
def test_a_model_that_asks_its_data_is_plain_pytorch_or_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Guarded().cuda()
    twin = copy.deepcopy(model)
    x = torch.randn(16, 16, 32, 32, device="cuda")
    step = roofline(capture(model, x))
    schedule, peak_bytes = recomputing(step)
    module = PlannedModule(step, schedule, peak_bytes)
    for each, function in ((model, module), (twin, twin)):
        torch.manual_seed(3)
        function(x).backward()
        assert all(p.grad is not None for p in each.parameters())
    with pytest.raises(BranchChanged, match=r"told True, at .*isfinite\(x\).*now it is False"):
        module(torch.full_like(x, torch.nan))
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(InputError, match=r"asks its data, which takes the host, and a CUDA graph runs without it \(.*isfinite"):
        GraphedModule(step, schedule, peak_bytes)


class Recurrent(nn.Module):
    """Recurrent layers over sequences, all as long as the input or packed."""

    def __init__(self, kind: Callable[..., nn.RNNBase], lengths: list[int] | None, depth: int = 4) -> None:
        super().__init__()
        self.lengths = lengths
        self.layers = nn.ModuleList(kind(128, 64, bidirectional=True, batch_first=True) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.lengths is None:
                x = layer(x)[0].relu()
            else:
                packed = nn.utils.rnn.pack_padded_sequence(x, self.lengths, batch_first=True)
                x = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0].relu()
        return x.square().mean()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("lengths", [None, [48] * 8 + [31] * 16 + [9] * 8], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_plain_pytorch_in_the_planned_bytes(
    kind: Callable[..., nn.RNNBase], lengths: list[int] | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 48, 128, device="cuda")
    step = measured(capture(Recurrent(kind, lengths).cuda(), x), repeats=1, cache_dir=tmp_path)
    schedule, peak_bytes = recomputing(step)
    module = PlannedModule(step, schedule, peak_bytes)
    assert_same(trained(step, lambda: call(module, (x,))), trained(step, lambda: step.eager(x)))
    prepare = step.model.zero_grad
    prepare()
    resident_bytes = resident_before_backward(step)
    found = measure(lambda: call(module, (x,)).backward(), step.device, resident_bytes, prepare=prepare)  # type: ignore[no-untyped-call]
    assert found.peak_bytes <= peak_bytes + SLACK_BYTES


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("lengths", [None, [48] * 8 + [31] * 16 + [9] * 8], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_under_a_budget_are_plain_pytorch(kind: Callable[..., nn.RNNBase], lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 48, 128, device="cuda")
    model = Recurrent(kind, None if lengths is None else [n for n in lengths for _ in range(4)], depth=10).cuda()
    model(x).backward()  # libraries take their memory
    model.zero_grad()
    with online.budget(None, holding=[model, x]) as free:
        model(x).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.cuda.synchronize()
    budget_bytes = math.ceil(0.8 * free.peak_bytes)
    with online.budget(budget_bytes, holding=[model, x]) as tight:
        model(x).backward()
    assert tight.peak_bytes <= budget_bytes
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_cuda
def test_a_step_survives_a_limit_of_the_driver_that_plain_pytorch_does_not() -> None:
    """What the process may hold is limited: plain PyTorch runs out of memory there, and the planned step trains."""
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.GELU()))).cuda()
    x = torch.randn(1 << 16, 256, device="cuda")  # 64 MiB, and as much again for each layer
    step = roofline(capture(model, x, loss=lambda out: out.square().mean()))
    schedule, peak_bytes = recomputing(step, of_the_way=0.4)
    module = PlannedModule(step, schedule, peak_bytes)
    keep_all_bytes = simulate(step.graph, keep_all(step.graph)).peak_bytes
    assert peak_bytes < 0.7 * keep_all_bytes
    call(module, (x,)).backward()  # type: ignore[no-untyped-call]  # libraries take their memory
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved() - step.graph.resident_bytes + 1.15 * peak_bytes + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step.eager(x).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        torch.cuda.empty_cache()
        for _ in range(3):
            call(module, (x,)).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        with pytest.raises(BudgetExceeded):
            PlannedModule(step, keep_all(step.graph), peak_bytes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
