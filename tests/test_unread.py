"""What an operator of the backward is given but does not read is not kept for it, and gradients have the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn

import planner.compile_backend  # noqa: F401  (the backend "belady")
from graphs.capture import Step, capture
from graphs.rewriting import settling
from graphs.rewriting.unread import UNREAD
from graphs.workloads import build
from planner import plan
from planner.measure import measure, resident_before_backward
from planner.schedule import keep_all
from planner.simulate import simulate

Layer = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """A convolution that is trained, something whose derivative takes its input, the layer, and another such."""

    def __init__(self, layer: Layer, before: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(F.silu(self.before(x)))
        return F.gelu(y).float().square().mean()


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def batch_norm(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Module:
    """In evaluation, with statistics; its weight is frozen."""
    layer = nn.BatchNorm2d(8, dtype=dtype).eval()
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(bias)
    for name, low in (("running_mean", -1.0), ("running_var", 0.5), ("weight", 0.5), ("bias", -1.0)):
        getattr(layer, name).data.uniform_(low, 2.0)
    return layer


def images() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1)


def lines() -> nn.Module:
    return nn.Conv1d(3, 8, 3, padding=1)


def volumes() -> nn.Module:
    return nn.Conv3d(3, 8, 3, padding=1)


# What is not kept for each: a layer, and what comes before it.
LAYERS: dict[str, tuple[Callable[[], Layer], Callable[[], nn.Module]]] = {
    "convolution": (lambda: frozen(nn.Conv2d(8, 8, 3, padding=1)), images),
    "convolution, the bias trained": (lambda: only_bias(nn.Conv2d(8, 8, 3, padding=1)), images),
    "convolution to more channels": (lambda: frozen(nn.Conv2d(8, 24, 1)), images),
    "convolution to fewer channels": (lambda: frozen(nn.Conv2d(8, 4, 1)), images),
    "convolution with a stride": (lambda: frozen(nn.Conv2d(8, 8, 3, stride=2, padding=1)), images),
    "convolution with a stride, the bias trained": (lambda: only_bias(nn.Conv2d(8, 8, 3, stride=2)), images),
    "convolution, depthwise": (lambda: frozen(nn.Conv2d(8, 8, 3, padding=1, groups=8)), images),
    "convolution, transposed": (lambda: frozen(nn.ConvTranspose2d(8, 8, 2, stride=2)), images),
    "convolution of lines": (lambda: frozen(nn.Conv1d(8, 8, 3, padding=1)), lines),
    "convolution of lines with a stride": (lambda: frozen(nn.Conv1d(8, 8, 3, stride=2)), lines),
    "convolution of volumes": (lambda: frozen(nn.Conv3d(8, 8, 3, padding=1)), volumes),
    "batch norm": (batch_norm, images),
    "batch norm, the bias trained": (lambda: batch_norm(bias=True), images),
    "batch norm behind a sum": (lambda: nn.Sequential(batch_norm(), Summed()), images),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), images),
    "average pool of volumes": (lambda: nn.AvgPool3d(2), volumes),
    "average pool to a size": (lambda: nn.AdaptiveAvgPool2d((4, 3)), images),
    "average pool of volumes to a size": (lambda: nn.AdaptiveAvgPool3d(2), volumes),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), images),
    "max pool of volumes": (lambda: nn.MaxPool3d(2), volumes),
    "max pool to a size": (lambda: nn.AdaptiveMaxPool2d((4, 3)), images),
    "max pool of volumes to a size": (lambda: nn.AdaptiveMaxPool3d(2), volumes),
    "reflected": (lambda: nn.ReflectionPad2d(2), images),
    "reflected line": (lambda: nn.ReflectionPad1d(2), lines),
    "reflected volume": (lambda: nn.ReflectionPad3d(1), volumes),
    "repeated": (lambda: nn.ReplicationPad2d(2), images),
    "repeated line": (lambda: nn.ReplicationPad1d(2), lines),
    "repeated volume": (lambda: nn.ReplicationPad3d(1), volumes),
}
aten = torch.ops.aten
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SIZES = {4: (2, 3, 11, 10), 3: (2, 3, 11), 5: (2, 3, 6, 7, 5)}


class Summed(nn.Module):
    """Its gradient is one number, expanded."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3))


def only_bias(layer: nn.Module) -> nn.Module:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == "bias")
    return layer


def built(name: str, *, last: bool = False, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer, before = LAYERS[name]
    first = before()
    model = Around(layer(), first).to(dtype)
    x = torch.randn(SIZES[first.weight.dim()], dtype=dtype)
    if last:
        return model.to(memory_format=LAST[x.dim()]), x.contiguous(memory_format=LAST[x.dim()])
    return model, x


def kept_for_the_backward(step: Step) -> set[str]:
    """The operators whose results the backward reads, but those that read parameters and inputs only."""
    ops = step.graph.ops
    made = {v: op for op in ops if not op.backward for v in op.outputs}
    return {made[v].kind.removeprefix("aten.") for op in ops if op.backward for v in op.inputs if v in made}


def unread_calls(step: Step) -> Iterator[fx.Node]:
    for node in step.calls:
        if node.target in UNREAD and UNREAD[node.target](node.args):
            yield node


def assert_same_gradients(model: nn.Module, inputs: Any, run: Callable[..., Tensor]) -> None:
    """Bits and layouts."""
    plain = copy.deepcopy(model)
    loss = plain(inputs)
    loss.backward()
    ours = run(inputs)
    ours.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(ours, loss)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad, theirs.grad) and mine.grad.stride() == theirs.grad.stride(), name


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_is_given_is_not_kept_and_gradients_are_the_same(name: str) -> None:
    model, x = built(name)
    p = plan(model, 1.0, inputs=x)
    assert p.step is not None
    assert "silu" not in kept_for_the_backward(p.step)
    assert_same_gradients(model, x, p.module())


def test_every_operator_that_is_known_is_among_these_layers() -> None:
    found = {call.target for name in LAYERS for call in unread_calls(capture(*built(name)))}
    assert found == set(UNREAD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name", ["convolution", "convolution to more channels", "convolution with a stride", "batch norm", "average pool", "max pool"]
)
def test_in_other_types_too(name: str, dtype: torch.dtype) -> None:
    model, x = built(name, dtype=dtype)
    p = plan(model, 1.0, inputs=x)
    assert p.step is not None
    assert "silu" not in kept_for_the_backward(p.step)
    assert_same_gradients(model, x, p.module())


@pytest.mark.parametrize("name", [name for name, (_, before) in LAYERS.items() if before is not lines])
def test_with_channels_last_gradients_are_the_same(name: str) -> None:
    """A stand-in of one element has no such layout."""
    model, x = built(name, last=True)
    p = plan(model, 1.0, inputs=x)
    assert p.step is not None
    assert "silu" not in kept_for_the_backward(p.step)
    assert_same_gradients(model, x, p.module())


def test_in_mixed_precision() -> None:
    torch.manual_seed(0)
    model = Around(nn.Sequential(nn.Conv2d(8, 8, 1).requires_grad_(False), batch_norm()), images())
    x = torch.randn(2, 3, 12, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = plan(model, 1.0, inputs=x)
        assert p.step is not None
        (norm,) = [call for call in unread_calls(p.step) if call.target is aten.native_batch_norm_backward.default]
        assert norm.args[1] is norm.args[0]
        assert_same_gradients(model, x, p.module())


class Two(nn.Module):
    """What the frozen convolution reads is read by the derivative of ``function`` as well."""

    def __init__(self, function: Layer, layer: nn.Module) -> None:
        super().__init__()
        self.before = images()
        self.function = function
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(self.before(x))).sin().mean()


@pytest.mark.parametrize(
    ("function", "layer"),
    [
        (F.relu, frozen(nn.Conv2d(8, 8, 3, padding=1))),  # the derivative of relu asks its result
        (F.silu, nn.Conv2d(8, 8, 3, padding=1)),
        (F.silu, nn.BatchNorm2d(8).eval()),
        (F.silu, frozen(nn.BatchNorm2d(8))),  # by the statistics of the batch
        (F.silu, nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (12, 10)), nn.Conv2d(8, 8, 3))),  # read through a view
    ],
)
def test_what_is_read_is_kept(function: Layer, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Two(function, layer), torch.randn(2, 3, 12, 10)
    step = capture(model, x)
    monkeypatch.setattr(settling, "let_go_of_unread", lambda graph: None)
    assert step.graph == capture(model, x).graph


def test_a_view_of_what_is_not_read_is_not_kept_either() -> None:
    layer = nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (12, 10)), frozen(nn.Conv2d(8, 8, 3, padding=1)))
    model, x = Two(F.silu, layer), torch.randn(2, 3, 12, 10)
    p = plan(model, 1.0, inputs=x)
    assert p.step is not None
    assert "silu" not in kept_for_the_backward(p.step)
    assert_same_gradients(model, x, p.module())


def norms(model: nn.Module) -> None:
    """As detectors have it: batch norms in evaluation, and frozen."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval().requires_grad_(False)


def all_but_the_first(model: nn.Module) -> None:
    frozen(model.eval())
    next(model.parameters()).requires_grad_(True)


@pytest.mark.parametrize(("name", "freeze", "share"), [("resnet50", norms, 0.6), ("mobilenet_v2", all_but_the_first, 0.4)])
def test_a_network_with_frozen_parts_takes_much_less(
    name: str, freeze: Callable[[nn.Module], None], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak_bytes() -> int:
        model, inputs, loss = build(name, device="meta")
        freeze(model)
        graph = capture(model, inputs, loss=loss).graph
        return simulate(graph, keep_all(graph)).peak_bytes

    without = peak_bytes()
    monkeypatch.setattr(settling, "let_go_of_unread", lambda graph: None)
    assert without < share * peak_bytes()


class Block(nn.Module):
    """An inverted residual, or a bottleneck where it is narrower inside."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(channels, inside, 1, bias=False),
            nn.BatchNorm2d(inside),
            nn.SiLU(),
            nn.Conv2d(inside, inside, 3, padding=1, groups=inside, bias=False),
            nn.BatchNorm2d(inside),
            nn.SiLU(),
            nn.Conv2d(inside, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.parts(x)
        return y


class Blocks(nn.Module):
    """A trained stem and head around frozen blocks."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.stem = images()
        self.blocks = nn.Sequential(*(Block(8, inside) for _ in range(3))).eval().requires_grad_(False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(F.gelu(self.blocks(self.stem(x))), 2)
        scores: Tensor = self.head(y.mean((2, 3)))
        return scores.square().mean()


class Shown(nn.Module):
    """Returns what the frozen convolution is given, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.before = images()
        self.layer = frozen(nn.Conv2d(8, 4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.silu(self.before(x))
        return self.layer(features).sin().mean(), features


def test_what_a_step_returns_is_there_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.Graph] = []
    let_go = settling.let_go_of_unread
    monkeypatch.setattr(settling, "let_go_of_unread", lambda graph: (let_go(graph), graphs.append(graph)))
    torch._dynamo.reset()
    model = Shown()
    loss, _ = torch.compile(model, backend="belady", options={"budget": 1.0})(torch.randn(2, 3, 11, 10))
    loss.backward()
    (graph,) = graphs
    (call,) = [c for c in graph.find_nodes(op="call_function", target=aten.convolution_backward.default) if not c.args[10][1]]
    assert call.args[1].target is aten.silu.default


@pytest.mark.parametrize("size", [4, 16])
def test_the_gradient_of_a_frozen_weight_that_nobody_asked_for_counts(size: int) -> None:
    """oneDNN makes it with the gradient of the bias."""
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Tanh(), only_bias(nn.Conv2d(64, 64, 3, padding=1)), nn.Tanh())
    x = torch.randn(2, 3, size, size)
    p = plan(model, 1.0, inputs=x, loss=lambda y: y.mean())
    assert p.step is not None
    module = p.module()
    found = measure(lambda: module(x).backward(), p.step.device, resident_before_backward(p.step), prepare=model.zero_grad)
    assert found.peak_bytes <= p.peak_bytes
    if size == 4:  # the weight is most of it
        assert found.peak_bytes == p.peak_bytes


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("inside", "share"), [(16, 1.0), (16, 0.8), (16, 0.6), (4, 1.0), (4, 0.8), (4, 0.7)])
def test_a_plan_takes_its_bytes_and_has_the_bits(inside: int, share: float, last: bool) -> None:
    torch.manual_seed(0)
    model, x = Blocks(inside), torch.randn(4, 3, 16, 16)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    p = plan(model, share, inputs=x, time_limit_s=5)
    assert p.step is not None
    module = p.module()
    assert_same_gradients(model, x, module)
    model.zero_grad()
    found = measure(lambda: module(x).backward(), p.step.device, resident_before_backward(p.step), prepare=model.zero_grad)
    assert found.peak_bytes <= p.budget_bytes


def test_a_compiled_model_has_the_bits() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Blocks(4), torch.randn(4, 3, 16, 16)
    assert_same_gradients(model, x, torch.compile(model, backend="belady", options={"budget": 0.7}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "layer", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((4, 3)), nn.ReflectionPad2d(2), frozen(nn.Conv2d(8, 4, 3))]
)
def test_inductor_compiles_what_stands_in(layer: nn.Module) -> None:
    torch._dynamo.reset()
    model, x = Around(layer, images()), torch.randn(2, 3, 12, 10)
    twin = copy.deepcopy(model)
    torch.compile(twin, backend="belady", options={"budget": 1.0, "kernels": "inductor"})(x).backward()
    model(x).backward()
    for ours, plain in zip(twin.before.parameters(), model.before.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None
        torch.testing.assert_close(ours.grad, plain.grad)
