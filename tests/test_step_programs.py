"""Random training steps, captured: what a schedule leaves behind is plain PyTorch's to the last bit, within the planned bytes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from graphs.capture import capture
from graphs.costs import roofline
from graphs.errors import BudgetExceeded, CaptureError, InfeasibleBudget, InvalidSchedule, NoScheduleFound
from online import run
from planner.execute import PlannedModule, PlannedStep, StepResult
from planner.measure import StorageMeter, resident_before_backward
from planner.schedule import keep_all
from planner.simulate import simulate
from tests.functions import Dirty
from tests.test_execute import PLENTY, dawdling, rematerializing

Dice = random.Random
Made = list[Callable[[], Any]]


class Pair(torch.autograd.Function):
    """Two results, of which one may get no gradient; keeps a tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.kept = a.sin()
        ctx.set_materialize_grads(False)
        return a * 2, a.exp().clamp_max(3)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor:  # type: ignore[override]
        result = ctx.kept * 0
        for gradient in (first, second):
            if gradient is not None:
                result = result + gradient * ctx.kept
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(F.gelu(self.norm(self.layer(x))))
        return out


@dataclass
class Given:
    """What a statement can read beside the model."""

    pool: list[Tensor]
    ids: Tensor
    mask: Tensor


def take(s: Given, r: Dice, *shape: int) -> Tensor:
    """A tensor of the pool in this shape, a view of it where that can be."""
    found, size = r.choice(s.pool), math.prod(shape)
    if found.numel() == size:
        return found.t() if found.shape == shape[::-1] and len(shape) == 2 else found.reshape(shape)
    flat = found.reshape(-1)
    flat = flat.repeat(-(-size // flat.numel()))
    return flat[:size].view(shape) if r.random() < 0.5 else flat[-size:].view(shape)


def put(s: Given, r: Dice, made: Tensor) -> None:
    """Take into the pool, in the place of another one as a rule."""
    made = torch.view_as_real(made.resolve_conj()) if made.is_complex() else made.float()
    made = made if made.numel() <= 400 else made.reshape(-1)[:384]
    if len(s.pool) < 6 and r.random() < 0.5:
        s.pool.append(made)
    else:
        s.pool[r.randrange(len(s.pool))] = made


def viewed(t: Tensor, r: Dice) -> Tensor:
    views: Made = [
        lambda: t.transpose(0, -1),
        lambda: t[..., ::2],
        lambda: t.chunk(2)[-1],
        lambda: t.detach(),
        lambda: t.diagonal() if t.dim() >= 2 else t,
        lambda: t.as_strided((2, 2), (2, 1)) if t.is_contiguous() and t.numel() > 3 else t,
        lambda: t.narrow(-1, 0, 1),
        lambda: t.movedim(0, -1),
        lambda: t.select(0, 0) if t.dim() > 1 else t,
    ]
    view: Tensor = r.choice(views)()
    return view


def compute(m: Program, s: Given, r: Dice) -> None:
    a, b = take(s, r, 6, 8), take(s, r, 6, 8)
    made: Made = [
        lambda: a.sin() * b,
        lambda: a @ m.weights[0],
        lambda: torch.einsum("ij,kj,kl->il", a, b, m.weights[1][:6]),
        lambda: torch.cat([part.tanh() for part in a.split(3, 1)], 1),
        lambda: torch.stack([row * 2 for row in a.unbind(1)]),
        lambda: F.pad(a[None], (2, 1), mode="reflect")[0],
        lambda: a.expand(2, 6, 8).softmax(-1),
        lambda: F.glu(a.t(), 0),
    ]
    put(s, r, r.choice(made)())


def view(m: Program, s: Given, r: Dice) -> None:
    put(s, r, viewed(viewed(r.choice(s.pool), r), r))


def write(m: Program, s: Given, r: Dice) -> None:
    base = r.choice(s.pool) * 1
    t = base
    for _ in range(r.randrange(3)):
        t = viewed(t, r)
    v = take(s, r, *t.shape).clone()
    writes: Made = [
        lambda: t.mul_(1.5),
        lambda: t.copy_(v),
        lambda: t.masked_fill_(t > 0, 0.5),
        lambda: t.normal_(),
        lambda: t.bernoulli_(0.4),
        lambda: t.tanh_(),
        lambda: t.index_add_(0, torch.tensor([0]), v[:1]) if t.dim() else t.zero_(),
        lambda: t.index_put_((torch.tensor([0, 0]),), v[:1], accumulate=True) if t.dim() else t.exp_(),
        lambda: F.dropout(t, 0.3, inplace=True),
        lambda: Dirty.apply(t),
        lambda: torch._foreach_mul_([t], 2.0),
        lambda: t.unsqueeze_(0),
    ]
    r.choice(writes)()
    put(s, r, base)
    put(s, r, t)


def index(m: Program, s: Given, r: Dice) -> None:
    a, b, rows = take(s, r, 6, 8), take(s, r, 6, 8), s.ids % 6
    places = (rows[:, None] + torch.arange(8)) % 6
    made: Made = [
        lambda: a[rows],
        lambda: a.gather(0, places),
        lambda: torch.zeros_like(a).scatter_add(0, places, b),
        lambda: a.scatter_reduce(0, places, b, "prod"),
        lambda: torch.where(s.mask[:, None], a, b),
        lambda: a.index_put((rows,), b, accumulate=True),
        lambda: m.embedding(s.ids),
        lambda: m.frequent(s.ids),
        lambda: F.embedding_bag(s.ids, m.embedding.weight, torch.tensor([0, 2]), mode="max"),
    ]
    put(s, r, r.choice(made)())


def reduce(m: Program, s: Given, r: Dice) -> None:
    a, b = take(s, r, 6, 8), take(s, r, 6, 8)
    made: Made = [
        lambda: a.prod(-1),
        lambda: a.cumsum(0),
        lambda: a.norm(dim=-1),
        lambda: a.logsumexp(0),
        lambda: a.var(0),
        lambda: a.median(-1)[0],
        lambda: a.topk(3)[0],
        lambda: a.sort(-1)[0],
        lambda: F.cross_entropy(a, s.ids % 8, label_smoothing=0.1),
        lambda: F.mse_loss(a.t(), b.t()),
        lambda: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum"),
        lambda: torch.linalg.solve(a[:, :6] @ a[:, :6].mT + 4 * torch.eye(6), b),
    ]
    put(s, r, r.choice(made)())


def draw(m: Program, s: Given, r: Dice) -> None:
    a = take(s, r, 6, 8)
    a = a.t() if r.random() < 0.4 else a
    image = take(s, r, 2, 6, 2, 2)
    made: Made = [
        lambda: F.dropout(a, 0.4),
        lambda: F.dropout2d(image, 0.5),
        lambda: F.feature_alpha_dropout(image, 0.2, training=True),
        lambda: F.rrelu(a, training=True),
        lambda: F.gumbel_softmax(a, hard=True),
        lambda: a * torch.bernoulli(torch.full_like(a, 0.3)),
        lambda: a + torch.normal(a.detach(), 0.1),
        lambda: a[torch.randperm(a.shape[0])],
        lambda: a + torch.randn(a.shape, generator=m.generator),
        lambda: a * torch.empty_like(a).uniform_(0.5, 1),
        lambda: torch.distributions.Gamma(a.abs() + 0.5, a.abs() + 1, validate_args=False).rsample(),
    ]
    put(s, r, r.choice(made)())


def layer(m: Program, s: Given, r: Dice) -> None:
    a, image = take(s, r, 6, 8), take(s, r, 2, 4, 4, 4)
    image = image.to(memory_format=torch.channels_last) if r.random() < 0.5 else image
    query, key, value = (take(s, r, 2, 2, 3, 4) for _ in range(3))
    made: Made = [
        lambda: m.block(m.block(a)),
        lambda: m.instance(image),
        lambda: m.group(image.transpose(2, 3)),
        lambda: m.convolution(image),
        lambda: m.transposed(image),
        lambda: F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2),
        lambda: F.interpolate(image, size=3, mode="bilinear"),
        lambda: F.grid_sample(image, take(s, r, 2, 3, 3, 2), align_corners=False),
        lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.3),
        lambda: m.attention(a[None], a[None], a[None])[0],
        lambda: m.normalized(a),
        lambda: m.spectral(a),
        lambda: m.tied(a),
        lambda: m.frozen(a),
        lambda: m.hooked(a),
    ]
    put(s, r, r.choice(made)())


def differentiate(m: Program, s: Given, r: Dice) -> None:
    a = take(s, r, 6, 8)
    made: Made = [
        lambda: torch.autograd.grad((a @ m.weights[0]).tanh().sum(), m.weights[0], create_graph=True)[0],
        lambda: (torch.func.grad(lambda x: (x.sin() @ m.weights[1]).sum())(a).norm(dim=1, keepdim=True) - 1) ** 2 * a,
        lambda: Pair.apply(a)[r.randrange(2)],
        lambda: checkpoint(lambda x: F.dropout(x @ m.weights[0], 0.2).tanh(), a, use_reentrant=False),
    ]
    made_now = r.choice(made)()
    if made_now.requires_grad:
        made_now.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) + made_now.detach() * 0.01)
    put(s, r, made_now)


def remember(m: Program, s: Given, r: Dice) -> None:
    """Changes a buffer that is read before or after."""
    a = take(s, r, 6, 8)
    kind = r.randrange(5)
    if kind == 0:
        m.mean.mul_(0.9).add_(a.detach().mean(0), alpha=0.1)
    elif kind == 1:
        a = a + m.mean
        m.mean = a.detach()[0]
    elif kind == 2:
        m.count += 1
        a = a / m.count
    elif kind == 3:
        m.queue[2:] = m.queue[:-2].clone()
        m.queue.t()[:, :2] = a[:2].detach().t()
        a = a * m.queue
    else:
        m.queue.normal_()
    put(s, r, a * m.mean)


def convert(m: Program, s: Given, r: Dice) -> None:
    a, b = take(s, r, 6, 8), take(s, r, 6, 8)
    kind = r.randrange(4)
    if kind == 0:
        put(s, r, a.double() @ b.double().t())
    elif kind == 1:
        put(s, r, torch.complex(a, b).conj() * m.phases)
    elif kind == 2:
        put(s, r, torch.fft.irfft(torch.fft.rfft(a) * (1 + 2j)))
    else:
        with torch.autocast("cpu", torch.bfloat16):
            put(s, r, m.block(a) + a @ m.weights[0])


STATEMENTS = [compute, compute, view, write, write, index, reduce, draw, layer, layer, differentiate, remember, convert]


class Program(nn.Module):
    """The training step of a seed. It returns its loss in one of the ways there are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dice = Dice(seed)
        self.statements = [(dice.choice(STATEMENTS), dice.random()) for _ in range(9)]
        self.form = seed % 3
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.scale, self.phases = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.block = Block()
        self.instance, self.group = nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)
        self.convolution = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.embedding, self.frequent = nn.Embedding(10, 8, padding_idx=0), nn.Embedding(10, 8, scale_grad_by_freq=True)
        self.normalized = parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.tied, self.frozen, self.hooked = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.tied.weight = self.weights[1]
        self.hooked.register_forward_hook(lambda module, given, output: output * 1.5)
        self.register_buffer("mean", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("queue", torch.randn(6, 8))

    def forward(self, x: Tensor, ids: Tensor, more: dict[str, Tensor]) -> Any:
        s = Given([x.sin(), x * self.scale, self.weights[0][:6] * 1.0, more["y"]], ids, more["mask"])
        for statement, seed in self.statements:
            statement(self, s, Dice(seed))
        loss = sum((t.tanh().mean() for t in s.pool), (self.weights[0] * 0.01).sum())
        return (loss, {"loss": loss, "pool": s.pool}, (loss, s.pool[0]))[self.form]


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    return loss


class Case:
    """The program of a seed, what it starts from, and what plain PyTorch makes of it."""

    def __init__(self, seed: int) -> None:
        self.model = Program(seed)
        self.inputs = torch.randn(6, 8), torch.randint(10, (6,)), {"y": torch.randn(6, 8), "mask": torch.rand(6) > 0.5}
        self.start = copy.deepcopy(self.model.state_dict())

    def reset(self) -> None:
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        self.model.generator.manual_seed(1)
        torch.manual_seed(1)

    def left(self, loss: Tensor) -> dict[str, Tensor]:
        gradients = {f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        states = {"default draws": torch.get_rng_state(), "own draws": self.model.generator.get_state()}
        found = {"loss": loss.detach(), **gradients, **dict(self.model.named_buffers()), **states}
        return {name: tensor.clone() for name, tensor in found.items()}

    def left_of(self, result: StepResult) -> dict[str, Tensor]:
        gradients = {f"{name}.grad": gradient for name, gradient in result.gradients.items()}
        return self.left(result.loss) | gradients | result.buffers

    def train(self, module: nn.Module) -> list[dict[str, Tensor]]:
        """Three steps of an optimizer; the last two add up their gradients."""
        self.reset()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, foreach=True)
        found = []
        for at in range(3):
            loss = loss_of(module(*self.inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(self.left(loss))
            optimizer.step()
            if at == 0:
                optimizer.zero_grad()
        return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) or torch.allclose(found[name], tensor, 0, 0, equal_nan=True), f"{what}: {name}"


@pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of some of the statements
@pytest.mark.parametrize("part", range(4))
def test_steps_have_the_same_answer_within_the_bytes(part: int) -> None:
    ran = recomputed = 0
    for seed in range(5 * part, 5 * part + 5):
        case = Case(seed)
        try:
            wanted = case.train(case.model)
        except (RuntimeError, IndexError):  # no program of PyTorch's
            continue
        case.reset()
        try:
            step = roofline(capture(case.model, case.inputs))
        except CaptureError as refusal:
            assert "\n" not in str(refusal)
            continue
        ran += 1
        graph, resident_bytes = step.graph, step.graph.resident_bytes
        exact = rematerializing(graph, seed) if seed % 2 else keep_all(graph)
        for schedule in (exact, dawdling(rematerializing(graph, seed + 1), seed)):
            what = f"seed {seed}, {'exact' if schedule is exact else 'dawdling'}"
            recomputed += simulate(graph, schedule).recomputed_ops
            planned = PlannedStep(step, schedule)
            case.reset()
            with StorageMeter() as meter:
                planned(case.inputs)
            assert resident_bytes + meter.peak_bytes <= planned.peak_bytes, what
            assert schedule is not exact or resident_bytes + meter.peak_bytes == planned.peak_bytes, what
            case.reset()
            same(case.left_of(planned(case.inputs)), wanted[0], what)
            try:
                module = PlannedModule(step, schedule, PLENTY)
            except InvalidSchedule as error:
                assert "backward starts before" in str(error), what
                continue
            for found, want in zip(case.train(module), wanted, strict=True):
                same(found, want, what)
            case.reset()
            with StorageMeter() as meter:
                module(*case.inputs).backward()
            assert resident_before_backward(step) + meter.peak_bytes <= module.peak_bytes, what
        for share in (1.0, 0.8) if seed % 2 else (1.0, 0.9, 0.7):
            case.reset()
            try:
                with StorageMeter() as meter:
                    online = run(step, share, heuristic="random", seed=seed, execute=True, inputs=case.inputs)
            except (InfeasibleBudget, BudgetExceeded, NoScheduleFound):
                break
            assert online.outcome is not None
            what, recomputed = f"seed {seed}, online at {share}", recomputed + online.counters.recomputations
            same(case.left_of(online.outcome), wanted[0], what)
            assert share == 1 or resident_bytes + meter.peak_bytes <= online.peak_bytes, what  # the first makes what all keep
    assert ran >= 3 and recomputed > 0
