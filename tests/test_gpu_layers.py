"""Layer by layer on a CUDA device: a planned step has the bits of plain PyTorch and takes the planned bytes.

The kernels there are others than a CPU's, and so are layouts, saved tensors and workspaces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphs.capture import Step, capture
from graphs.profile import measured
from planner.early import in_halves
from planner.execute import PlannedModule
from planner.execution.halves import copied_bytes
from planner.measure import measure, resident_before_backward
from planner.schedule import keep_all

from .test_gpu import SLACK_BYTES, assert_same, call, deterministic, needs_cuda, trained

__all__ = ["deterministic"]

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Function = Callable[..., Tensor]
Case = tuple[nn.Module, tuple[Any, ...]]


class Around(nn.Module):
    """``before``, then what is tested, then something whose derivative depends on its output; the function gets the module."""

    def __init__(self, before: nn.Module, layer: nn.Module | Function) -> None:
        super().__init__()
        self.before = before
        self.layer: Any = layer
        self.functional = not isinstance(layer, nn.Module)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y = self.before(x)
        y = self.layer(self, y, *rest) if self.functional else self.layer(y, *rest)
        if isinstance(y, tuple):
            y = y[0]
        y = torch.view_as_real(y) if y.is_complex() else y
        return y.float().sin().square().mean()


def image(layer: nn.Module | Function, *, last: bool = False) -> Case:
    """Of 16 channels, 24 × 20."""
    model, x = Around(nn.Conv2d(16, 16, 3, padding=1), layer), torch.randn(8, 16, 24, 20)
    if last:
        return model.to(memory_format=torch.channels_last), (x.contiguous(memory_format=torch.channels_last),)
    return model, (x,)


def words(layer: nn.Module | Function, *rest: Any) -> Case:
    """Of 64 features, 48 positions."""
    return Around(nn.Linear(64, 64), layer), (torch.randn(8, 48, 64), *rest)


def matrix(layer: Function) -> Case:
    """Square ones, 32 × 32."""
    return Around(nn.Linear(32, 32), lambda m, y: layer(y)), (torch.randn(4, 32, 32),)


def attention(m: Around, y: Tensor, *, dropout: float = 0.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (y, y.sin(), y.cos()))
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal).transpose(1, 2).flatten(-2)


def half(layer: Function, dtype: torch.dtype = torch.bfloat16) -> Function:
    """In a type of 16 bits."""
    return lambda m, y, *rest: layer(m, y.to(dtype), *rest)


class ToHalf(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.bfloat16()


def own_function(m: Around, y: Tensor) -> Tensor:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x.square() * grad

    cubed: Tensor = Cube.apply(y)  # type: ignore[no-untyped-call]
    return cubed


def unrolled(m: Around, y: Tensor) -> Tensor:
    state: Any = None
    for x in y[:, :6].unbind(1):
        state = m.cell(x, state)
    return state[0] if isinstance(state, tuple) else state


def cell_case(cell: nn.Module) -> Case:
    model, inputs = words(unrolled)
    model.cell = cell
    return model, inputs


def experts(m: Around, y: Tensor) -> Tensor:
    gates, chosen = y.softmax(-1).topk(2, -1)
    made = [F.gelu(y * (i + 1)) * torch.where(chosen == i, gates, 0.0).sum(-1, keepdim=True) for i in range(3)]
    return torch.stack(made).sum(0)


def penalty(m: Around, y: Tensor) -> Tensor:
    z = y.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(m.before(z).tanh().sum(), z, create_graph=True)
    return gradient


def written(m: Around, y: Tensor) -> Tensor:
    z = y.clone()
    z[:, 1:3] = 0
    return z.mul_(2).add_(y).sigmoid_()


targets = torch.arange(8 * 48).view(8, 48) % 64
LAYERS: dict[str, Callable[[], Case]] = {
    "conv 1d": lambda: words(lambda m, y: F.conv1d(y.mT, m.before.weight[..., None].expand(-1, -1, 3))),
    "conv, grouped and dilated": lambda: image(nn.Conv2d(16, 32, 3, groups=4, dilation=2, stride=2)),
    "conv, depthwise": lambda: image(nn.Conv2d(16, 16, 5, groups=16, padding="same")),
    "conv, depthwise, channels last": lambda: image(nn.Conv2d(16, 16, 5, groups=16, padding="same"), last=True),
    "conv, circular": lambda: image(nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular")),
    "conv, transposed": lambda: image(nn.ConvTranspose2d(16, 8, 3, stride=2, output_padding=1)),
    "conv, transposed, channels last": lambda: image(nn.ConvTranspose2d(16, 8, 3, stride=2), last=True),
    "conv 3d": lambda: image(lambda m, y: F.conv3d(y.unflatten(1, (4, 4)), m.before.weight[:4, :4, None])),
    "conv, bf16": lambda: image(lambda m, y: F.conv2d(y.bfloat16(), m.before.weight.bfloat16())),
    "conv, fp16, channels last": lambda: image(lambda m, y: F.conv2d(y.half(), m.before.weight.half()), last=True),
    "conv, frozen": lambda: image(nn.Conv2d(16, 16, 3, padding=1).requires_grad_(False)),
    "conv, frozen, channels last": lambda: image(nn.Conv2d(16, 32, 3, padding=1).requires_grad_(False), last=True),
    "conv, frozen, to less": lambda: image(nn.Conv2d(16, 8, 3, stride=2).requires_grad_(False)),
    "conv, frozen, to less, channels last": lambda: image(nn.Conv2d(16, 8, 3, stride=2).requires_grad_(False), last=True),
    "conv, frozen, transposed": lambda: image(nn.ConvTranspose2d(16, 16, 2, stride=2).requires_grad_(False)),
    "batch norm": lambda: image(nn.BatchNorm2d(16)),
    "batch norm, channels last": lambda: image(nn.BatchNorm2d(16), last=True),
    "batch norm, evaluation": lambda: image(nn.BatchNorm2d(16).eval()),
    "batch norm, frozen": lambda: image(nn.BatchNorm2d(16).eval().requires_grad_(False)),
    "batch norm, frozen, channels last": lambda: image(nn.BatchNorm2d(16).eval().requires_grad_(False), last=True),
    "batch norm, of the batch": lambda: image(nn.BatchNorm2d(16, track_running_stats=False)),
    "batch norm, bf16": lambda: image(lambda m, y: F.batch_norm(y.bfloat16(), None, None, training=True)),
    "batch norm 1d, between dimensions": lambda: words(lambda m, y: F.batch_norm(y.mT, None, None, training=True)),
    "instance norm": lambda: image(nn.InstanceNorm2d(16, affine=True)),
    "instance norm with statistics": lambda: image(nn.InstanceNorm2d(16, affine=True, track_running_stats=True)),
    "group norm": lambda: image(nn.GroupNorm(4, 16)),
    "group norm, channels last": lambda: image(nn.GroupNorm(4, 16), last=True),
    "layer norm": lambda: words(nn.LayerNorm(64)),
    "layer norm, bf16": lambda: words(half(lambda m, y: F.layer_norm(y, (64,)))),
    "layer norm, permuted": lambda: words(lambda m, y: F.layer_norm(y.mT, (48,)).mT),
    "rms norm": lambda: words(nn.RMSNorm(64)),
    "rms norm, bf16": lambda: words(half(lambda m, y: F.rms_norm(y, (64,)))),
    "max pool": lambda: image(nn.MaxPool2d(2)),
    "max pool, channels last": lambda: image(nn.MaxPool2d(3, stride=2, padding=1), last=True),
    "average pool": lambda: image(nn.AvgPool2d(3, stride=2)),
    "average pool to one": lambda: image(nn.AdaptiveAvgPool2d(1)),
    "norm pool": lambda: image(nn.LPPool2d(2, 2)),
    "nearest": lambda: image(nn.Upsample(scale_factor=2)),
    "pixel shuffle": lambda: image(nn.PixelShuffle(2)),
    "unfold and fold": lambda: image(lambda m, y: F.fold(F.unfold(y, 3).tanh(), y.shape[2:], 3)),
    "reflected": lambda: image(nn.ReflectionPad2d(2)),
    "padded": lambda: image(lambda m, y: F.pad(F.pad(y, (1, 2, 0, 1)), (1, 1), value=0.5)),
    "prelu": lambda: image(nn.PReLU(16)),
    "rrelu": lambda: image(nn.RReLU()),
    "glu": lambda: words(nn.GLU()),
    "gelu, tanh": lambda: words(nn.GELU("tanh")),
    "in place": lambda: words(
        nn.Sequential(nn.SiLU(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Dropout(0.2, inplace=True))
    ),
    "written": lambda: words(written),
    "dropout": lambda: words(nn.Dropout(0.3)),
    "dropout, bf16": lambda: words(half(lambda m, y: F.dropout(y, 0.3))),
    "dropout of channels": lambda: image(nn.Dropout2d(0.3)),
    "dropout, alpha": lambda: words(nn.AlphaDropout(0.3)),
    "gumbel": lambda: words(lambda m, y: F.gumbel_softmax(y, hard=True)),
    "noise": lambda: words(lambda m, y: y + torch.randn_like(y) * torch.rand(64, device=y.device).bernoulli(0.5)),
    "permutation": lambda: words(lambda m, y: y[:, torch.randperm(48, device=y.device)]),
    "embedding": lambda: words(lambda m, y, i: y + F.embedding(i, m.before.weight, padding_idx=3), targets),
    "cross entropy": lambda: words(lambda m, y, i: F.cross_entropy(y.mT, i, label_smoothing=0.1, reduction="none"), targets),
    "cross entropy, ignoring": lambda: words(lambda m, y, i: F.cross_entropy(y[0], i[0], ignore_index=3), targets),
    "cross entropy, bf16": lambda: words(half(lambda m, y, i: F.cross_entropy(y.flatten(0, 1), i.flatten())), targets),
    "binary cross entropy": lambda: words(lambda m, y: F.binary_cross_entropy_with_logits(y, y.detach().sigmoid())),
    "divergence": lambda: words(lambda m, y: F.kl_div(y.log_softmax(-1), y.detach().softmax(-1), reduction="none")),
    "huber, permuted": lambda: words(lambda m, y: F.huber_loss(y.mT, torch.ones_like(y.mT))),
    "cosine": lambda: words(lambda m, y: F.cosine_similarity(y, y.flip(1), dim=-1)),
    "triplets": lambda: words(lambda m, y: F.triplet_margin_loss(y, y.flip(1), y.roll(1, 1))),
    "distances": lambda: words(lambda m, y: torch.cdist(y, y.flip(1) + 1)),
    "attention": lambda: words(attention),
    "attention, causal": lambda: words(lambda m, y: attention(m, y, causal=True)),
    "attention, masked": lambda: words(lambda m, y: attention(m, y, mask=torch.ones(48, 48, device=y.device).tril().bool())),
    "attention, dropout": lambda: words(lambda m, y: attention(m, y, dropout=0.2)),
    "attention, bf16": lambda: words(half(lambda m, y: attention(m, y, causal=True))),
    "attention, bf16, dropout": lambda: words(half(lambda m, y: attention(m, y, dropout=0.2))),
    "attention, fp16, masked": lambda: words(
        half(lambda m, y: attention(m, y, mask=torch.ones(48, 48, device=y.device).tril().bool()), torch.float16)
    ),
    "multi-head": lambda: words(lambda m, y: m.heads(y, y, y, need_weights=False)[0]),
    "multi-head with weights": lambda: words(lambda m, y: m.heads(y, y, y)[0]),
    "encoder layer": lambda: words(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)),
    "bilinear": lambda: words(lambda m, y: F.bilinear(y, y.tanh(), m.before.weight.expand(3, 64, 64))),
    "einsum": lambda: words(lambda m, y: torch.einsum("bid,bjd,de->bije", y[:, :8], y[:, :4], m.before.weight)),
    "experts": lambda: words(experts),
    "sort": lambda: words(lambda m, y: y.sort(-1).values * torch.linspace(0, 1, 64, device=y.device)),
    "top": lambda: words(lambda m, y: y.topk(5, -1).values),
    "gather": lambda: words(lambda m, y, i: y.gather(2, i[..., None].expand(-1, -1, 4)), targets),
    "indexed": lambda: words(lambda m, y, i: y[torch.arange(8, device=y.device)[:, None], i % 48], targets),
    "index add": lambda: words(lambda m, y, i: torch.zeros_like(y[0]).index_add(0, i[0] % 48, y[0]), targets),
    "masked fill": lambda: words(lambda m, y: y.masked_fill(y.detach() > 0.5, -1.0).softmax(-1)),
    "spectrum": lambda: words(lambda m, y: torch.fft.rfft(y, dim=1)),
    "back from the spectrum": lambda: words(lambda m, y: torch.fft.irfft2(torch.fft.rfft2(y) * 2)),
    "norms": lambda: words(lambda m, y: y / y.norm(dim=-1, keepdim=True) + torch.linalg.vector_norm(y, 3)),
    "sums over all": lambda: words(lambda m, y: y.logsumexp(-1) + y.var(-1) + y.amax(-1) + y.prod(-1) + y.std((1, 2))[:, None]),
    "solve": lambda: matrix(lambda a: torch.linalg.solve(a + 8 * torch.eye(32, device=a.device), a)),
    "inverse": lambda: matrix(lambda a: torch.linalg.inv(a + 8 * torch.eye(32, device=a.device))),
    "cholesky": lambda: matrix(lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(32, device=a.device))),
    "determinant": lambda: matrix(lambda a: torch.linalg.slogdet(a + 8 * torch.eye(32, device=a.device)).logabsdet),
    "orthogonal": lambda: matrix(lambda a: torch.linalg.qr(a).Q),
    "eigenvalues": lambda: matrix(lambda a: torch.linalg.eigvalsh(a + a.mT)),
    "exponential": lambda: matrix(lambda a: torch.linalg.matrix_exp(a / 8)),
    "lstm": lambda: words(nn.LSTM(64, 32, num_layers=2, bidirectional=True, batch_first=True)),
    "lstm, projected": lambda: words(nn.LSTM(64, 32, proj_size=16, batch_first=True)),
    "lstm, bf16": lambda: words(nn.Sequential(ToHalf(), nn.LSTM(64, 32, dtype=torch.bfloat16))),
    "lstm, autocast": lambda: layers_in_region(nn.LSTM(64, 32), torch.float16),
    "gru, autocast": lambda: layers_in_region(nn.GRU(64, 32, bias=False), torch.bfloat16),
    "lstm, not flat": lambda: layers_in_region(nn.LSTM(64, 32), None),
    "gru": lambda: words(nn.GRU(64, 32, num_layers=2, bias=False)),
    "rnn": lambda: words(nn.RNN(64, 32, nonlinearity="relu")),
    "lstm cell": lambda: cell_case(nn.LSTMCell(64, 32)),
    "gru cell": lambda: cell_case(nn.GRUCell(64, 32)),
    "weight norm": lambda: words(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))),
    "spectral norm": lambda: image(nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 16, 3))),
    "own function": lambda: words(own_function),
    "checkpointed": lambda: words(lambda m, y: checkpoint(lambda z: F.dropout(m.before(z), 0.2).tanh(), y, use_reentrant=False)),
    "gradient penalty": lambda: words(penalty),
    "mapped": lambda: words(lambda m, y: torch.func.vmap(torch.func.grad(lambda z: m.before(z).tanh().sum()))(y)),
    "autocast inside": lambda: words(regions),
}  # fmt: skip


def layers_in_region(layer: nn.RNNBase, dtype: torch.dtype | None) -> Case:
    """Called twice, with weights that do not lie together where there is no autocast."""

    def run(m: Around, y: Tensor) -> Tensor:
        with torch.autocast(y.device.type, dtype=dtype or torch.float16, enabled=dtype is not None):
            return m.inner(y)[0].float() + m.inner(y.sin())[0].float()

    model, inputs = words(run)
    model.inner = layer
    return model, inputs


def regions(m: Around, y: Tensor) -> Tensor:
    with torch.autocast(y.device.type, dtype=torch.bfloat16):
        z = m.before(y).relu()
        with torch.autocast(y.device.type, enabled=False):
            z = m.before(z.float())
        return m.before(z)


def built(name: str, device: str) -> Case:
    torch.manual_seed(0)
    model, inputs = LAYERS[name]()
    if name.startswith("multi-head"):
        model.heads = nn.MultiheadAttention(64, 4, batch_first=True, dropout=0.1)
    model = model.to(device)
    if name.endswith("not flat"):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model, tuple(each.to(device) if isinstance(each, Tensor) else each for each in inputs)


def assert_plain_in_the_planned_bytes(step: Step, inputs: Any, folder: Path) -> None:
    """Three steps of training by a plan that keeps all have the bits of plain ones, and take the planned bytes at most."""
    step = measured(step, repeats=1, cache_dir=folder)
    schedule, peak_bytes = in_halves(step.graph, keep_all(step.graph), copied_bytes(step))
    assert peak_bytes is not None
    module = PlannedModule(step, schedule, peak_bytes)
    assert_same(trained(step, lambda: call(module, inputs)), trained(step, lambda: step.eager(inputs)))
    step.model.zero_grad()
    found = measure(
        lambda: call(module, inputs).backward(),  # type: ignore[no-untyped-call]
        step.device,
        resident_before_backward(step),
        prepare=step.model.zero_grad,
    )
    assert found.peak_bytes <= peak_bytes + SLACK_BYTES


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_plain_pytorch_in_the_planned_bytes(name: str, tmp_path: Path) -> None:
    model, inputs = built(name, "cuda")
    assert_plain_in_the_planned_bytes(capture(model, inputs), inputs, tmp_path)
