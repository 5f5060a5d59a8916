"""A captured step computes what plain PyTorch computes, bit for bit, and its Graph says how much memory that takes."""

import contextlib
import copy
import functools
import gc
import operator
import os
import pickle
import random
import sys
import threading
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.compiler import is_compiling as is_compiling_by_name
from torch.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphs.as_eager.layouts import _relaid, _smaller, kernels_layouts
from graphs.capture import Inputs, Loss, Step, bind, capture
from graphs.errors import BranchChanged, CaptureError, InputError
from graphs.torch_private.names import FakeTensorMode, FunctionalTensor
from graphs.tracing.refusals import place_among
from graphs.watching.fingerprint import same_plain
from online import budget
from planner.execute import PlannedModule, run_step
from planner.plan import plan
from planner.process.pauses import no_collections
from planner.schedule import keep_all
from planner.simulate import simulate
from tests.onednn import onednn_as


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order: results are compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


class Lambda(nn.Module):
    """A model from a function of (module, *inputs); has a Linear, a buffer and a plain tensor attribute."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("moving", torch.zeros(8))
        self.plain = torch.full((8,), 0.5)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Cells(nn.Module):
    """An LSTMCell loop: weights used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.cell = nn.LSTMCell(16, 16)
        self.drop = nn.Dropout(0.15)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = c = torch.zeros(ids.shape[0], 16)
        states = []
        for t in range(ids.shape[1]):
            h, c = self.cell(self.drop(self.embedding(ids[:, t])), (h, c))
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


class Tied(nn.Module):
    """One matrix under three names, its uses interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return square(self.a(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))))


@dataclass
class Case:
    """A model, its inputs and the plain PyTorch step with which the captured one is compared."""

    model: nn.Module
    inputs: Inputs
    plain: Callable[[nn.Module], Tensor]
    loss: Loss | None = None
    autocast: torch.dtype | None = None


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.42), nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def image_case(**kwargs: Any) -> Case:
    x, y = torch.randn(4, 3, 17, 17), torch.randint(0, 10, (4,))
    return Case(cnn(), (x, y), lambda model: F.cross_entropy(model(x), y), nn.CrossEntropyLoss(), **kwargs)


def channels_last_case() -> Case:
    x, y = torch.randn(4, 3, 17, 17).to(memory_format=torch.channels_last), torch.randint(0, 10, (4,))
    model = cnn().to(memory_format=torch.channels_last)
    return Case(model, (x, y), lambda model: F.cross_entropy(model(x), y), F.cross_entropy)


def mlp_case(**kwargs: Any) -> Case:
    x, y = torch.randn(16, 12), torch.randint(0, 5, (16,))
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(0.1), nn.Linear(24, 5))
    return Case(model, {"input": x, "target": y}, lambda model: F.cross_entropy(model(x), y), F.cross_entropy, **kwargs)


def cells_case(**kwargs: Any) -> Case:
    ids = torch.randint(0, 20, (3, 5))
    return Case(Cells(), {"ids": ids, "labels": ids}, lambda model: model(ids, ids), **kwargs)


def tied_case(**kwargs: Any) -> Case:
    x = torch.randn(4, 8)
    return Case(Tied(), x, lambda model: model(x), **kwargs)


class InTwoPlaces(nn.Module):
    """One module in two places, whose weight another one shares, and a buffer that is a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"words": nn.Embedding(20, 8), "norm": nn.BatchNorm1d(8)})
        self.words, self.norm = self.body["words"], self.body["norm"]
        self.head = nn.Linear(8, 20)
        self.head.weight = self.words.weight
        self.register_buffer("bias", self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.body["norm"](self.words(ids)) + self.body["words"](ids)
        return self.head(self.norm(y)) * self.bias


def two_places_case() -> Case:
    ids = torch.randint(0, 20, (6,))
    return Case(InTwoPlaces(), ids, lambda model: square(model(ids)), square)


class Follower(nn.Module):
    """A teacher that follows the model, changed in its own forward, and a codebook that is no buffer either."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.codes = nn.Embedding(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            nearest = torch.cdist(y, self.codes.weight).argmin(1)
            self.codes.weight.index_add_(0, nearest, 0.1 * y)
        return F.mse_loss(y, self.teacher(x)) + F.mse_loss(y, self.codes(nearest))


def follower_case() -> Case:
    x = torch.randn(5, 8)
    return Case(Follower(), x, lambda model: model(x))


class Bounded(nn.Module):
    """Weights that the forward bounds or moves, with gradients or without: in place, through ``.data``, and by other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8, max_norm=0.5)
        self.clamped, self.scaled, self.renormed, self.follows = (nn.Linear(8, 8) for _ in range(4))
        self.follows.requires_grad_(False)
        self.rows = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.renormed(self.words(ids))  # what autograd keeps of this call is memory, not the parameter
        x = self.rows(x[:, None]).tanh()[:, 0]  # and here the parameter
        self.clamped.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.scaled.weight.mul_(0.9)
        for layer in (self.renormed, self.rows, *[self.renormed] * 5):
            layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.9)
        self.follows.weight.data = 0.9 * self.follows.weight.data + 0.1 * self.scaled.weight.data
        self.clamped.weight.data = self.clamped.weight.data  # nothing changes
        x = self.rows(x[:, None])[:, 0]
        return square(self.follows(self.renormed(self.scaled(self.clamped(x)).sin())))


def bounded_case() -> Case:
    ids = torch.tensor([1, 5, 1, 0])
    return Case(Bounded(), ids, lambda model: model(ids))


def encoder_case() -> Case:
    x = torch.randn(3, 5, 8)  # attention drops out along a transposed activation
    return Case(nn.TransformerEncoderLayer(8, 2, 16, 0.15), x, lambda model: square(model(x)), square)


def lambda_case(function: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Case:
    return Case(Lambda(function), inputs, lambda model: model(*inputs), **kwargs)


def frozen_case() -> Case:
    case = mlp_case()
    case.model[0].requires_grad_(False)
    return case


def evaluation_case() -> Case:
    case = image_case()
    case.model.eval()
    return case


def looks_for_padding_case() -> Case:
    """A model of transformers that another branch for compilers does not work for."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.NystromformerConfig(**small, segment_means_seq_len=8, num_landmarks=2, max_position_embeddings=16)
    model, ids = transformers.NystromformerForMaskedLM(config), torch.randint(2, 50, (2, 8))
    return Case(model.train(), {"input_ids": ids, "labels": ids}, lambda model: model(input_ids=ids, labels=ids).loss)


def transformers_case(name: str, masked: bool = False, cached: bool = True, **kwargs: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 50, (2, 12))
    tiny = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    small = {**tiny, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if name == "resnet":
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=5)
        model = transformers.ResNetForImageClassification(config)
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 4])}
    else:
        model = {
            "gpt2": lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, loss_type="ForCausalLM", **tiny)
            ),
            "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small)),
            "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
        }[name]()
        batch = {"input_ids": ids, "labels": ids}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids).tril(3)
        if not cached:  # it then looks at the positions: are there several texts in a row?
            batch["use_cache"] = False
    return Case(model.train(), batch, lambda model: model(**batch).loss, **kwargs)


def moving_average(model: Lambda, x: Tensor) -> Tensor:
    model.moving = 0.9 * model.moving + x.mean(0)
    return square(model.linear(x) * model.moving)


def changing_places(model: Lambda, x: Tensor) -> Tensor:
    before = model.moving
    model.moving, model.other = model.other, model.moving
    return square(model.linear(x) * model.moving * before.exp())


def places_case() -> Case:
    case = lambda_case(changing_places, x8)
    case.model.register_buffer("other", torch.linspace(0, 1, 8))
    return case


def average_read_before_and_after(model: Lambda, x: Tensor) -> Tensor:
    y = model.linear(x) * (1 + model.moving)
    model.moving = 0.9 * model.moving + 0.1 * y.detach().mean(0)
    return square(y * model.moving)


class ByModule(torch.autograd.Function):
    """A matrix product that takes its weight from a module in the backward, instead of saving it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x @ module.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.module.weight.mT, None


def weight_of_a_module(model: Lambda, x: Tensor) -> Tensor:
    return square(ByModule.apply(model.linear(x), model.linear))


def hook_that_reads_a_new_buffer(model: Lambda, x: Tensor) -> Tensor:
    model.moving.add_(1)
    y = model.linear(x)
    y.register_hook(lambda gradient: gradient * model.moving + model.linear.bias.detach())
    return square(y)


def two_branches(model: Lambda, x: Tensor) -> Tensor:
    return square(torch.cond(x.sum() > 0, lambda t: model.linear(t), lambda t: 2 * t, (x,)) + model.linear(x))


def draws_in_place(model: Lambda, x: Tensor) -> Tensor:
    """Into memory of another order of dimensions, fresh or not, and into parts of a tensor."""
    y = model.linear(x).t()
    noise = torch.zeros(4, 8)
    noise[:, 1:6].normal_(0.5, 2.0)
    noise.t()[6:].bernoulli_()
    masks = torch.empty_like(y).bernoulli_(0.4) + torch.ones_like(y).bernoulli_(0.4)
    return square(y * masks * noise.t()) + F.dropout(y, 0.3).sum()


def branch_on_positions(model: Lambda, x: Tensor) -> Tensor:
    places = torch.arange(4)
    places[1:] += torch.tensor([3, 3, 3])
    return square(model.linear(x)) if (places.diff() > 0).all() and places.sum().item() == 15 else x.sum()


def lists_of_positions(model: Lambda, x: Tensor) -> Tensor:
    y = model.linear(x)
    for row in torch.arange(6).view(2, 3).tolist():
        y = y * (1 + row[1]) + torch.tensor([0.5, 0.25]).tolist()[row[0] // 3]
    return square(y[:, torch.ones(3, dtype=torch.long).cumsum(0).tolist()])


def places_of_a_mask(model: Lambda, x: Tensor) -> Tensor:
    mask = torch.ones(4, 8).tril(2).bool()
    rows, columns = mask.nonzero(as_tuple=True)
    places = torch.arange(32.0).view(4, 8)[mask]
    places.mul_(0.1)  # what is written is not what the next call begins with
    kinds, counts = torch.unique(columns, return_counts=True)
    return square(model.linear(x)[rows, columns] * places) + model.linear(x)[:, kinds[counts > 1]].sum()


def masks_of_constants(model: Lambda, x: Tensor) -> Tensor:
    """Data is chosen and written by masks that are the same in every call."""
    y, out = model.linear(x), torch.zeros(4, 8)
    rows, both = torch.arange(4) % 2 == 0, torch.ones(4, 8).triu(1) > 0
    out[rows] = y[rows] * 2
    out[both] = y[both].flip(0)
    out[~rows, 3:] = 0.5
    out[None, rows] += y[None, rows]
    return square(out) + square(y.view(4, 2, 4)[rows, :, 1]) + square(y[torch.tensor(True)])


def literals_written_to(model: Lambda, x: Tensor) -> Tensor:
    """What is written to a literal is not what the next call begins with."""
    factor, rows = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True, False])
    y = model.linear(x) * factor.sum()
    found = square(y * torch.where(rows, 1.0, 2.0)[:, None])
    factor.add_(1)
    rows.logical_not_()
    return found + square(y[rows, : int(factor[0])] * factor.sum())


def sizes_beside_writes(model: Lambda, x: Tensor) -> Tensor:
    """What is known stays known where something else is written to."""
    sizes, out = torch.tensor([3, 5, 4, 2]), torch.zeros(4, 8)
    for i in range(4):
        size = sizes[i].item()
        out[i, :size] = model.linear(x[i])[:size]
    sizes[0] = 7
    return square(out[:, : sizes.max().item()])


def experts(model: Lambda, x: Tensor) -> Tensor:
    """A mixture of experts in single precision."""
    order = x.sum(1).argsort()
    parts = F.grouped_mm(x[order], torch.stack([model.linear.weight, model.linear.weight.t()]), offs=torch.tensor([1, 4]).int())
    return square(parts[:, :3])


def cast_to_what_it_is(model: Lambda, x: Tensor) -> Tensor:
    model.linear = model.linear.to(torch.float32)
    return square(model.linear(x))


def shares_by_set(x: Tensor) -> Tensor:
    known, other = torch.zeros(4), x[:, 0].clone()
    other.set_(known)
    other.add_(x[:, 0])
    return known > 0


def shares_by_a_large_view(x: Tensor) -> Tensor:
    known = torch.zeros(4)
    known.expand(2**19, 4)[0].add_(x[:, 0])
    return known > 0


@torch.library.custom_op("belady_test::drawn_mask", mutates_args=())
def drawn_mask(like: Tensor) -> Tensor:
    return torch.rand(like.shape) > 0.5


drawn_mask.register_fake(lambda like: torch.empty(like.shape, dtype=torch.bool))


def branch_on_what_was_a_constant(model: Lambda, x: Tensor) -> Tensor:
    places = torch.zeros(2, 8)
    row = places[0]
    places.copy_(x[:2])
    return square(model.linear(x)) if row.sum() > 0 else x.sum()


def bags_to_the_last(model: Lambda, x: Tensor) -> Tensor:
    ends = torch.tensor([0, 3, 3, 8])
    return square(F.embedding_bag((x[0] * 9).long() % 8, model.linear.weight, ends, mode="max", include_last_offset=True))


def complex_numbers(model: Lambda, x: Tensor) -> Tensor:
    """Products and quotients whose backward takes the conjugates of numbers."""
    y = torch.exp(1j * model.linear(x)) * (1 + 2j)
    return square(torch.view_as_real(y / (3 - 1j) + (2j * y.conj()).mul_(1j)))


def back_from_the_spectrum(model: Lambda, x: Tensor) -> Tensor:
    window = torch.hann_window(8)
    spectrum = torch.stft(model.linear(x).flatten(), 8, 4, window=window, return_complex=True)
    return square(torch.istft(spectrum * spectrum.abs(), 8, 4, window=window))


def products(model: Lambda, x: Tensor) -> Tensor:
    """Some have zeros among their factors."""
    y = model.linear(x)
    parts = y.prod(), y.prod(0), y.t().prod(1, keepdim=True), y.relu().prod(1), y.prod(1, dtype=torch.float64), y[0, 0].prod()
    return sum(square(part) for part in (*parts, y.cumprod(0), y.relu().cumprod(1), (y * 2).cumprod_(1)))


def updates_statistics(model: Lambda, x: Tensor) -> Tensor:
    mean, _ = torch.batch_norm_update_stats(x, model.moving, None, 0.1)
    return square(model.linear(x - mean))


def penalty_on(product: Callable[[Tensor], Tensor]) -> Callable[[Lambda, Tensor], Tensor]:
    def run(model: Lambda, x: Tensor) -> Tensor:
        y = model.linear(x)
        (gradient,) = torch.autograd.grad(product(y).sum(), y, create_graph=True)
        return square(y) + square(gradient)

    return run


def gradient_penalty(model: Lambda, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(model.linear(x).tanh().sum(), model.linear.weight, create_graph=True)
    return square(gradient)


def checkpointed(model: Lambda, x: Tensor) -> Tensor:
    """A part of which all but the matrix products is to be computed again, with draws."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def part(x: Tensor) -> Tensor:
        return model.linear(F.dropout(model.linear(x).sin(), 0.5))

    return square(checkpoint(part, x, use_reentrant=False, context_fn=contexts))


def checks_data(model: Lambda, x: Tensor) -> Tensor:
    """As libraries do: a check that branches, and while they are compiled one that does not."""
    if torch.compiler.is_compiling():
        torch._check_tensor_all(x < 100)
    elif not (x < 100).all():
        raise ValueError("100 or more")
    return square(model.linear(x))


def regions_inside(model: Lambda, x: Tensor) -> Tensor:
    """Casts that one region keeps, that two make anew, that are kept across one without autocast, and that nobody keeps."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.linear(model.linear(x))
        with torch.autocast("cpu", enabled=False):
            y = model.linear(y.float())
        y = model.linear(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.linear(y)
    weight = model.linear.weight
    return square(F.linear(F.linear(y.bfloat16(), weight.bfloat16()), weight.bfloat16()).float())


def ctc_case(
    input_lengths: Any, target_lengths: Any, batch: int = 2, autocast: torch.dtype | None = None, **options: Any
) -> Case:
    """Targets as long as the longest one says; logits of another order of dimensions than the loss takes."""
    torch.manual_seed(0)
    x, targets = torch.randn(max(1, batch), 7, 8), torch.randint(1, 8, (max(1, batch), 3))
    loss = nn.CTCLoss(**options)

    def forward(model: Lambda, x: Tensor, targets: Tensor, *lengths: Any) -> Tensor:
        return loss(model.linear(x).log_softmax(-1).movedim(-2, 0), targets, *lengths).sum()

    if not batch:
        x, targets = x[0], targets[0]
    return lambda_case(forward, x, targets, input_lengths, target_lengths, autocast=autocast)


def listed_numbers(m: Lambda, x: Tensor) -> Tensor:
    """A list of numbers and of tensors with one element each, of several types; no gradient comes through."""
    y = m.linear(x)
    pairs = torch.tensor([[y.detach().max(), 2], [x.argmax(), y.detach()[:1, 0]]], dtype=torch.double, requires_grad=True)
    kinds = torch.tensor([x.argmax(), 1.5, True]).dtype, torch.tensor((x[0, 0].bfloat16(), False)).dtype
    assert kinds == (torch.float, torch.bfloat16) and pairs.shape == (2, 2) and pairs.requires_grad
    counts = torch.as_tensor([x.argmax() for _ in range(3)])
    assert torch.tensor([]).numel() == 0 and counts.dtype == torch.long
    return square(y * pairs.detach().float().sum() + counts.sum())


def layers_dropped_always_or_never(m: Lambda, x: Tensor) -> Tensor:
    """Any draw from [0, 1) compares alike with these numbers."""
    for low, high in ((0.0, 1.0), (-0.5, 3), (0, 1)):
        if torch.rand([]) < low or torch.rand(1).squeeze(0) >= high or not torch.rand(()) <= high or not torch.rand(2)[1] > -1:
            return x.sum()
        x = m.linear(x)
    return square(x)


class FrozenProduct(nn.Module):
    """Rows that are apart are not folded into one matrix, unless the weight is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.trained(x).tanh().view(4, 2, 2, 32)
        return square(self.frozen(y[:, ::2, ::2].reshape(4, -1, 32)))


large: Tensor = torch.linspace(-1, 1, 1 << 21).view(-1, 8)
x8 = torch.arange(32.0).reshape(4, 8) / 16 - 1
CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp_case,
    "mlp bf16": lambda: mlp_case(autocast=torch.bfloat16),
    "cnn": image_case,
    "cnn bf16": lambda: image_case(autocast=torch.bfloat16),
    "cnn channels last": channels_last_case,
    "cnn evaluation": evaluation_case,
    "frozen": frozen_case,
    "lstm cells": cells_case,
    "lstm cells bf16": lambda: cells_case(autocast=torch.bfloat16),
    "tied": tied_case,
    "tied bf16": lambda: tied_case(autocast=torch.bfloat16),
    "in two places": two_places_case,
    "follower": follower_case,
    "bounded weights": bounded_case,
    "encoder layer": encoder_case,
    "gpt2": lambda: transformers_case("gpt2"),
    "gpt2 bf16": lambda: transformers_case("gpt2", autocast=torch.bfloat16),
    "bert": lambda: transformers_case("bert"),
    "bert masked": lambda: transformers_case("bert", masked=True),
    "llama": lambda: transformers_case("llama"),
    "llama without cache bf16": lambda: transformers_case("llama", cached=False, autocast=torch.bfloat16),
    "resnet": lambda: transformers_case("resnet"),
    "looks for padding to warn of": looks_for_padding_case,
    "masks of constants": lambda: lambda_case(masks_of_constants, x8),
    "literals written to": lambda: lambda_case(literals_written_to, x8),
    "sizes beside writes": lambda: lambda_case(sizes_beside_writes, x8),
    "experts": lambda: lambda_case(experts, x8),
    "cast to what it is": lambda: lambda_case(cast_to_what_it_is, x8),
    "constants": lambda: lambda_case(lambda m, x: square(m.linear(x) * m.plain + torch.tensor([1.0, 2.0] * 4)), x8),
    "layers dropped always or never": lambda: lambda_case(layers_dropped_always_or_never, x8),
    "unread draw": lambda: lambda_case(lambda m, x: (torch.rand(5), square(F.dropout(m.linear(x), 0.3)))[1], x8),
    "draws of many kinds": lambda: lambda_case(
        lambda m, x: square(m.linear(x) + torch.randn_like(x) + torch.randperm(8) + torch.empty(8).uniform_()), x8
    ),
    "assigned buffer": lambda: lambda_case(moving_average, x8),
    "assigned buffer, read before": lambda: lambda_case(average_read_before_and_after, x8),
    "buffers changing places": places_case,
    "nested inputs": lambda: lambda_case(
        lambda m, xs, extra: square(m.linear(xs[0]) * extra["n"] + extra["y"]), [x8, 3], {"y": x8 + 1, "n": 2, "none": None}
    ),
    "draws in place": lambda: lambda_case(draws_in_place, x8),
    "branch on positions": lambda: lambda_case(branch_on_positions, x8),
    "lists of positions": lambda: lambda_case(lists_of_positions, x8),
    "places of a mask": lambda: lambda_case(places_of_a_mask, x8),
    "split": lambda: lambda_case(lambda m, x: square(torch.cat([t.tanh() for t in m.linear(x).split(3, 1)], 1)), x8),
    "in place": lambda: lambda_case(lambda m, x: square(m.linear(x).add_(1).mul_(2).t()[2:4]), x8),
    "bags": lambda: lambda_case(
        lambda m, x: square(F.embedding_bag((x * 9).long() % 8, m.linear.weight, mode="mean")) + bags_to_the_last(m, x), x8
    ),
    "mse": lambda: lambda_case(lambda m, x: F.mse_loss(m.linear(x), x), x8),
    "written slice": lambda: lambda_case(lambda m, x: (h := m.linear(x).clone(), h[1:2].zero_(), square(h))[2], x8),
    "effect": lambda: lambda_case(lambda m, x: square(torch.linalg.inv(m.linear(x).mT @ x + 9 * torch.eye(8))), x8),
    "autograd inside": lambda: lambda_case(gradient_penalty, x8),
    "weight of a module": lambda: lambda_case(weight_of_a_module, x8),
    "hook that reads a new buffer": lambda: lambda_case(hook_that_reads_a_new_buffer, x8),
    "condition": lambda: lambda_case(two_branches, x8),
    "shared gradient": lambda: lambda_case(lambda m, x: (m.linear.weight[0] + m.linear.bias + m.moving).sum() + 0 * x.sum(), x8),
    "one number in a list": lambda: lambda_case(lambda m, x: m.linear(x).sum().reshape(1), x8),
    "tuple": lambda: lambda_case(lambda m, x: square(m.linear(x)), x8),
    "bilinear outside of autocast": lambda: lambda_case(bilinear_outside, x8, autocast=torch.bfloat16),
    "randomized leaks of a transposed input": lambda: lambda_case(
        lambda m, x: F.rrelu(m.linear(x).t(), training=True).mean(), torch.linspace(-2, 2, 48).sin().view(6, 8)
    ),
    "selective checkpoint": lambda: lambda_case(checkpointed, x8),
    "regions of autocast inside": lambda: lambda_case(regions_inside, x8),
    "regions of autocast inside bf16": lambda: lambda_case(regions_inside, x8, autocast=torch.bfloat16),
    "check of data": lambda: lambda_case(lambda m, x: (torch._assert_async(x.sum() < 100, "100"), square(m.linear(x)))[1], x8),
    "distribution": lambda: lambda_case(lambda m, x: square(Normal(m.linear(x), 1.0, validate_args=False).rsample()), x8),
    "distribution that looks": lambda: lambda_case(
        lambda m, x: square(Normal(m.linear(x), m.linear(x).exp(), validate_args=True).rsample()), x8
    ),
    "assertion about data": lambda: lambda_case(asserts_on_data, x8),
    "what is done where numbers are not finite": lambda: lambda_case(clamps_infinities, x8),
    "the same of large tensors": lambda: lambda_case(clamps_infinities, large),
    "checks in other ways": lambda: lambda_case(checks_in_other_ways, x8),
    "counts of an input": lambda: lambda_case(counts, x8, torch.tensor([1, 0, 2])),
    "branches on integers of the example": lambda: lambda_case(as_many_as_asked, x8, torch.tensor([2, 3]), torch.tensor([1, 0])),
    "complex numbers": lambda: lambda_case(complex_numbers, x8),
    "window": lambda: lambda_case(back_from_the_spectrum, x8),
    "products": lambda: lambda_case(products, x8),
    "integers in bounds": lambda: lambda_case(lambda m, x: square(m.linear(x) * torch.randint(5, x.shape)), x8),
    "check of data in a library": lambda: lambda_case(checks_data, x8),
    "gaussian loss": lambda: lambda_case(lambda m, x: F.gaussian_nll_loss(m.linear(x), x, m.linear(x).exp(), full=True), x8),
    "gaussian loss of one variance": lambda: lambda_case(lambda m, x: nn.GaussianNLLLoss()(m.linear(x), x, 0.5), x8),
    "ctc of numbers": lambda: ctc_case([7, 4], [3, 2]),
    "ctc of numbers, ruled out": lambda: ctc_case((3, 2), (3, 3), zero_infinity=True),  # no path is so short
    "ctc of numbers, summed": lambda: ctc_case((7, 4), (3, 2), reduction="sum"),
    "ctc of numbers, kept apart": lambda: ctc_case((7, 4), (3, 2), reduction="none"),
    "ctc of numbers bf16": lambda: ctc_case((7, 4), (3, 2), autocast=torch.bfloat16),
    "ctc of tensors bf16": lambda: ctc_case(torch.tensor([7, 4]), torch.tensor([3, 2]), autocast=torch.bfloat16),
    "ctc of tensors": lambda: ctc_case(torch.tensor([7, 4]), torch.tensor([3, 2])),
    "tensor of a list": lambda: lambda_case(listed_numbers, x8),
    "ctc of one": lambda: ctc_case((7,), (3,), batch=0),
    "ctc of one, in tensors": lambda: ctc_case(torch.tensor([7]), torch.tensor([3]), batch=0),
}  # fmt: skip


class StorageMeter(TorchDispatchMode):
    """Counts bytes of live storages that are born inside, from outside of any executor."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}

    def _add(self, tensor: Tensor, born: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        self.seen[key] = storage.nbytes() if born else 0
        self.live += self.seen[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self.seen.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._add(leaf, born=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, born=True)
        return result


@dataclass
class Answer:
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generator: Tensor


def plain_answer(case: Case) -> Answer:
    """What plain PyTorch computes, on a copy of the model."""
    model = copy.deepcopy(case.model)
    torch.manual_seed(7)
    with contextlib.nullcontext() if case.autocast is None else torch.autocast("cpu", case.autocast):
        loss = case.plain(model)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Answer(loss.detach(), gradients, without_gradients(model), torch.get_rng_state())


def without_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that have none."""
    return {**dict(model.named_buffers()), **{name: p for name, p in model.named_parameters() if not p.requires_grad}}


def answer_of(step: Step, outputs: list[Tensor]) -> Answer:
    """Outputs by what they are; buffers the step does not change are the model's."""
    named = {
        kind: {r.name: t for r, t in zip(step.results, outputs, strict=True) if r.kind == kind} for kind in ("gradient", "buffer")
    }
    (loss,) = (t for r, t in zip(step.results, outputs, strict=True) if r.kind == "loss")
    return Answer(loss, named["gradient"], without_gradients(step.model) | named["buffer"], torch.get_rng_state())


def assert_same(ours: Answer, plain: Answer) -> None:
    assert torch.equal(ours.loss, plain.loss)
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name
        assert ours.gradients[name].stride() == gradient.stride(), name
    for name, buffer in plain.buffers.items():
        assert torch.equal(ours.buffers[name], buffer), name
    assert torch.equal(ours.generator, plain.generator)


def captured(case: Case) -> Step:
    return capture(case.model, case.inputs, loss=case.loss, autocast=case.autocast)


def run_by_ops(step: Step, inputs: Inputs) -> list[Tensor]:
    """Run the step from nothing but what Step says of each op: its views, its call, what it makes."""
    values = dict(zip(step.module.graph.find_nodes(op="placeholder"), bind(step, inputs), strict=True))
    made = {step.value_of[node]: (node, tensor) for node, tensor in values.items()}
    for node in step.module.graph.find_nodes(op="get_attr"):
        values[node] = operator.attrgetter(node.target)(step.module)
    fixed = dict(values)

    def evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        return node.target(*args, **kwargs)

    def known_to(views: tuple[fx.Node, ...], op_inputs: frozenset[int]) -> dict[fx.Node, Any]:
        known = fixed | {node: tensor for v, (node, tensor) in made.items() if v in op_inputs}
        for view in views:
            known[view] = evaluate(view, known)
        return known

    for i, op in enumerate(step.graph.ops):
        result = evaluate(step.calls[i], known_to(step.views(i), frozenset(op.inputs)))
        for v, node in step.made_by(i).items():
            made[v] = (node, result if node is step.calls[i] else result[node.args[1]])
    known = known_to(step.result_views(), step.graph.outputs)
    return [known[node] for node in step.module.graph.output_node().args[0]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from tracing torch.cond
def test_step_computes_what_plain_pytorch_computes(name):
    torch.manual_seed(1)
    case = CASES[name]()
    plain = plain_answer(case)
    step = captured(case)
    with torch.no_grad():
        torch.manual_seed(7)
        bound = bind(step, case.inputs)
        with StorageMeter() as meter:
            outputs = step.module(*bound)  # its code drops every value after its last use
        assert_same(answer_of(step, list(outputs)), plain)
        trace = simulate(step.graph, keep_all(step.graph))
        assert trace.peak_bytes - step.graph.resident_bytes == meter.peak
        torch.manual_seed(7)
        assert_same(answer_of(step, run_by_ops(step, case.inputs)), plain)
    assert_layouts(step, case.inputs, least=1)


def test_batch_norm_takes_the_operator_that_chooses_cudnn_where_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that operator runs the same kernel as without cuDNN, so the answer stays that of plain PyTorch."""
    torch.manual_seed(1)
    case = image_case()
    plain = plain_answer(case)
    # the first of two
    monkeypatch.setattr("graphs.rewriting.rewrites.takes_cudnn_batch_norm", lambda data, *_: data.shape[2] == 17)
    step = captured(case)
    found = Counter(op.kind for op in step.graph.ops if "batch_norm" in op.kind)
    assert found == {
        "aten._batch_norm_with_update_functional": 1,
        "aten.batch_norm_backward": 1,
        "aten._native_batch_norm_legit_functional": 1,
        "aten.native_batch_norm_backward": 1,
    }
    with torch.no_grad():
        torch.manual_seed(7)
        assert_same(answer_of(step, list(step.module(*bind(step, case.inputs)))), plain)
        torch.manual_seed(7)
        assert_same(answer_of(step, run_by_ops(step, case.inputs)), plain)


@pytest.mark.parametrize(
    "name", ["cnn bf16", "lstm cells", "bert", "gpt2", "assigned buffer", "in two places", "follower", "bounded weights"]
)
def test_capture_changes_nothing(name):
    torch.manual_seed(1)
    case = CASES[name]()
    model = case.model
    state = {key: (tensor, tensor.clone()) for key, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {key: dict(vars(part)) for key, part in model.named_modules()}
    generator = torch.get_rng_state()
    captured(case)
    assert torch.equal(torch.get_rng_state(), generator)
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys()
    for key, (tensor, content) in state.items():
        assert now[key] is tensor, key
        assert torch.equal(tensor, content), key
        assert tensor.grad is None, key
    for key, part in model.named_modules():
        assert vars(part).keys() == attributes[key].keys(), key
        assert all(vars(part)[k] is v for k, v in attributes[key].items()), key


def test_what_a_forward_assigns_is_undone():
    def forward(model, x):
        model.plain = model.linear(x)
        model.extra = [x]
        model.seen.append(x)
        return square(model.plain)

    model = Lambda(forward)
    model.seen = []
    plain = model.plain
    capture(model, x8)
    assert model.plain is plain
    assert model.seen == []
    assert not hasattr(model, "extra")


def test_a_configuration_that_nobody_may_write_to_is_left_alone():
    class Frozen(dict[str, int]):
        """As configurations of diffusers: ``clear`` is forgotten."""

        def update(self, *_: Any, **__: Any) -> None:
            raise TypeError("frozen")

        __setitem__ = __delitem__ = update

    model = Lambda(lambda model, x: model.config["scale"] * square(model.linear(x)))
    model.config = Frozen(scale=2)
    capture(model, x8)
    assert model.config == {"scale": 2}


def test_model_is_not_allocated_again():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    parameters_bytes = sum(p.nbytes for p in model.parameters())
    capture(model, torch.randn(2, 1024), loss=square)  # whatever is set up once
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        capture(model, torch.randn(2, 1024), loss=square)
    events = profile.profiler.kineto_results.events()
    asked = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    assert asked, "the profiler saw no allocation at all"
    assert sum(asked) < parameters_bytes / 100


def test_graph_says_what_the_step_is():
    torch.manual_seed(1)
    case = image_case()
    step = capture(case.model, case.inputs, loss=case.loss, name="net")
    graph = step.graph
    assert (graph.name, graph.device) == ("net", "cpu")
    state = sum(t.nbytes for t in case.model.state_dict().values())
    tangent_bytes = 4
    assert graph.resident_bytes == state + sum(t.nbytes for t in case.inputs) + tangent_bytes
    assert [op.kind for op in graph.ops if op.random] == ["belady.bernoulli"]
    assert not any(op.effect for op in graph.ops)
    backward = [op.backward for op in graph.ops]
    assert backward == sorted(backward) and 0 < sum(backward) < len(backward)
    assert all(op.time_ns == 0 and op.workspace_bytes == 0 for op in graph.ops)
    kinds = {op.kind for op in graph.ops}
    assert {"aten.convolution", "aten.convolution_backward", "aten.mm"} <= kinds
    assert not kinds & {"aten.t", "aten.view", "aten.detach", "aten.expand", "getitem"}
    statistics = {r.name for r in step.results if r.kind == "buffer"}
    assert statistics == {f"{i}.{what}" for i in (1, 6) for what in ("running_mean", "running_var", "num_batches_tracked")}
    assert {r.name for r in step.results if r.kind == "gradient"} == {name for name, _ in case.model.named_parameters()}


def test_bind_tells_dicts_that_come_in_another_order() -> None:
    model, more = Lambda(lambda m, x, more: square(m.linear(x) + more["a"] * more["b"])), {"a": x8, "b": x8 + 1}
    step = capture(model, {"x": x8, "more": more})
    bind(step, {"more": more, "x": x8})  # by name
    with pytest.raises(InputError, match=r"another order \(.*'b'.*'a'.*\) than .* captured \(.*'a'.*'b'.*give them in that"):
        bind(step, {"x": x8, "more": {"b": x8 + 1, "a": x8}})


def test_bind_tells_containers_of_other_types() -> None:
    step = capture(Lambda(lambda m, x, more: square(m.linear(x) + more[0] * more[1])), (x8, [x8, 2]))
    bind(step, (x8, [x8, 2]))
    with pytest.raises(InputError, match=r"^the inputs are .* captured with .* give them in the same containers$") as refusal:
        bind(step, (x8, (x8, 2)))
    assert "are (..., (..., ...)), but" in str(refusal.value) and "with (..., [..., ...]);" in str(refusal.value)


class Energy(nn.Module):
    """A force field: the gradient of its input is a part of the loss. ``unused``: its first parameter."""

    def __init__(self, *, forces: bool, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if unused:
            self.first = nn.Parameter(torch.randn(8, 8))
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.forces = forces

    def forward(self, x: Tensor, z: dict[str, Tensor]) -> Tensor:
        z["z"].requires_grad_()
        energy = square(self.b(self.a(z["z"]).tanh() + x))
        if not self.forces:
            return energy
        (force,) = torch.autograd.grad(energy, z["z"], create_graph=True)
        return energy + square(force)


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("size", [8, 3])
def test_inputs_that_a_forward_differentiates_have_no_gradient_in_the_step(forces: bool, unused: bool, size: int) -> None:
    """The tracer takes them for what the step is to have gradients of."""
    model = Energy(forces=forces, unused=unused)
    x, z = torch.randn(size, 8), torch.randn(size, 8)
    step = capture(model, (x, {"z": z}))
    assert {r.name for r in step.results if r.kind == "gradient"} == {"a.weight", "b.weight"}
    with torch.no_grad():
        answer = answer_of(step, step.module(*bind(step, (x, {"z": z}))))
    assert not z.requires_grad and z.grad is None
    loss = model(x, {"z": z.clone()})
    loss.backward()
    assert torch.equal(answer.loss, loss.detach())
    for name in ("a.weight", "b.weight"):
        assert torch.equal(answer.gradients[name], model.get_parameter(name).grad)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_a_planned_force_field_trains_as_eager(share: float) -> None:
    model = Energy(forces=True, unused=False)
    model.a = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 8))
    twin, inputs = copy.deepcopy(model), (torch.randn(64, 8), {"z": torch.randn(64, 8)})
    found = plan(model, share, inputs=inputs, gap=0.1)
    assert (found.overhead > 0) == (share < 1)
    module = found.module()
    for _ in range(2):
        torch.manual_seed(1)
        loss = module(*inputs)
        loss.backward()
        torch.manual_seed(1)
        wanted = twin(inputs[0], {"z": inputs[1]["z"].clone()})
        wanted.backward()
        assert torch.equal(loss, wanted)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_what_is_differentiated_is_given_once() -> None:
    model, x, z = Energy(forces=True, unused=False), torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"^Energy: inputs\[1\]\['z'\], which the forward differentiates, is also inputs\[0\]"):
        capture(model, (z, {"z": z}))
    step = capture(model, (x, {"z": z}))
    bind(step, (z.clone(), {"z": z}))
    with pytest.raises(InputError, match=r"^inputs\[1\]\['z'\], which the forward differentiates, is also inputs\[0\]"):
        bind(step, (z, {"z": z}))


@pytest.mark.parametrize("how", [lambda x: x.requires_grad_(), lambda x: x.detach().requires_grad_()])
def test_reentrant_checkpoints_are_refused(how):
    model = Lambda(lambda m, x: square(m.linear(checkpoint(m.linear, how(x), use_reentrant=True))))
    with pytest.raises(CaptureError, match=r"^Lambda has a reentrant checkpoint, .* call checkpoint with use_reentrant=False"):
        capture(model, x8)


@pytest.mark.parametrize("name", ["reads a gradient", "branch on data"])
def test_gradients_may_be_looked_at_after_a_refusal(name):
    with pytest.raises(CaptureError):
        REFUSED[name][0]()
    assert "grad" not in vars(Tensor) and linear().weight.grad is None


def test_costs_leave_the_mapping():
    step = captured(mlp_case())
    times, spaces = list(range(len(step.calls))), [8] * len(step.calls)
    priced = step.with_costs(times, spaces)
    assert [op.time_ns for op in priced.graph.ops] == times
    assert [op.workspace_bytes for op in priced.graph.ops] == spaces
    assert (priced.calls, priced.value_of, priced.module) == (step.calls, step.value_of, step.module)


def test_tied_weights_count_once():
    step = captured(tied_case())
    names = [s.name for s in step.sources if s.kind == "parameter"]
    assert names == ["a.weight", "a.bias", "b.bias", "c.bias"]
    assert [r.name for r in step.results if r.kind == "gradient"].count("a.weight") == 1


def test_modules_in_two_places_count_once():
    step = captured(two_places_case())
    held = [s.name for s in step.sources if s.kind in ("parameter", "buffer")]
    assert [name for name in held if "running" not in name and "batches" not in name] == [
        "body.words.weight", "body.norm.weight", "body.norm.bias", "head.bias",
    ]  # fmt: skip


def test_parameters_in_one_storage_count_once():
    model = Lambda(lambda m, x: square(m.linear(x) + m.other))
    model.other = nn.Parameter(model.linear.weight.detach()[0])
    step = capture(model, x8)
    sizes = [64 * 4, 8 * 4, 8 * 4, x8.nbytes, 4]  # weight with other, bias, buffer, input, tangent
    assert step.graph.resident_bytes == sum(sizes)
    model.other.data = model.other.detach().clone()
    with pytest.raises(InputError, match=r"other and linear.weight shared their memory"):
        bind(step, x8)


def test_weights_are_cast_once_under_autocast():
    step = captured(cells_case(autocast=torch.bfloat16))
    weights = [
        n for n, s in zip(step.module.graph.find_nodes(op="placeholder"), step.sources, strict=True) if s.kind == "parameter"
    ]
    casts = [sum(user.target == torch.ops.aten._to_copy.default for user in weight.users) for weight in weights]
    assert max(casts) == 1


def test_ambient_autocast_is_kept_from_the_backward():
    case = mlp_case()
    with torch.autocast("cpu", torch.bfloat16):
        ambient = captured(case)
        assert torch.is_autocast_enabled("cpu")
    assert ambient.graph.fingerprint() == captured(mlp_case(autocast=torch.bfloat16)).graph.fingerprint()
    assert ambient.graph.fingerprint() != captured(case).graph.fingerprint()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_capture_inside_another_context(context):
    case = mlp_case()
    with context():
        step = captured(case)
    assert step.graph.fingerprint() == captured(case).graph.fingerprint()


def test_unread_draws_stay_in_the_graph():
    step = captured(CASES["unread draw"]())
    assert [op.kind for op in step.graph.ops if op.random] == ["aten.rand", "belady.bernoulli"]


def test_effects_stay_in_the_graph():
    if torch.__version__ < "2.13":
        pytest.skip("this torch leaves checks of linear algebra out of a trace")
    step = captured(CASES["effect"]())
    (effect,) = (op for op in step.graph.ops if op.effect)
    assert effect.kind == "aten._linalg_check_errors" and not effect.outputs


def test_checks_of_data_are_made_when_the_step_runs():
    step = captured(CASES["check of data in a library"]())
    with pytest.raises(RuntimeError, match="a check of data failed"):
        step.module(*bind(step, (x8 + 100,)))


def test_variances_are_checked_when_the_step_runs():
    step = captured(lambda_case(lambda m, x, var: F.gaussian_nll_loss(m.linear(x), x, var), x8, torch.ones(4)))
    with pytest.raises(RuntimeError, match="var has negative"):
        step.module(*bind(step, (x8, torch.tensor([1.0, 1.0, 1.0, -1.0]))))
    with pytest.raises(ValueError, match="var has negative"):
        F.gaussian_nll_loss(x8, x8, -x8.exp())


def test_dropout_of_attention_is_random_only_where_it_drops():
    def attention(p):
        return Lambda(lambda m, x: square(F.scaled_dot_product_attention(m.linear(x), x, x, dropout_p=p)))

    x = torch.randn(2, 2, 4, 8)
    assert not any(op.random for op in capture(attention(0.0), x).graph.ops)
    assert any(op.random for op in capture(attention(0.5), x).graph.ops)


def test_custom_operator_is_one_op():
    with torch.library._scoped_library("belady_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
        torch.library.register_fake("belady_test::double", lambda x: torch.empty_like(x), lib=library)
        double = torch.ops.belady_test.double
        torch.library.register_autograd("belady_test::double", lambda ctx, g: double(g), lib=library)
        step = capture(Lambda(lambda m, x: square(double(m.linear(x)))), x8)
    assert [op.backward for op in step.graph.ops if op.kind == "belady_test.double"] == [False, True]


def test_models_bring_their_own_example():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=20, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    step = capture(transformers.GPT2LMHeadModel(config).train())
    assert {s.name for s in step.sources if s.kind == "input"} == {"inputs['input_ids']", "inputs['labels']"}
    model = Lambda(lambda m, x: m.linear(x))
    model.example_input_array = x8
    assert [s.name for s in capture(model, loss=square).sources if s.kind == "input"] == ["inputs"]


class Scored(NamedTuple):
    score: Tensor
    loss: Tensor


@pytest.mark.parametrize("output", [lambda y: SimpleNamespace(loss=square(y)), lambda y: {"loss": square(y), "logits": y},
                                    lambda y: (square(y), y), lambda y: Scored(y.mean(), square(y)), square])  # fmt: skip
def test_where_a_model_may_put_its_loss(output):
    step = capture(Lambda(lambda m, x: output(m.linear(x))), x8)
    with torch.no_grad():
        assert torch.equal(step.module(*bind(step, x8))[0], square(step.model.linear(x8)))


def test_how_inputs_are_shared_between_model_and_loss():
    def loss(output, low, high, weight=1.0):
        return weight * ((output - low) * (high - output)).sum()

    by_position = capture(Lambda(lambda m, a, b: m.linear(a + b)), (x8, x8 + 1, x8 + 2, x8 + 3), loss=loss)
    by_name = capture(
        Lambda(lambda m, a, b: m.linear(a + b)), {"a": x8, "low": x8 + 2, "b": x8 + 1, "high": x8 + 3}, loss=loss
    )  # fmt: skip
    want = loss(by_name.model.linear(x8 + x8 + 1), x8 + 2, x8 + 3)
    with torch.no_grad():
        assert torch.equal(by_position.module(*bind(by_position, (x8, x8 + 1, x8 + 2, x8 + 3)))[0], want)
        shuffled = {"high": x8 + 3, "low": x8 + 2, "b": x8 + 1, "a": x8}
        assert torch.equal(by_name.module(*bind(by_name, shuffled))[0], want)


def test_fake_models_are_captured_without_memory():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model, x = nn.Linear(100_000, 100_000), torch.randn(4, 100_000)  # 40 GB
    step = capture(model, x, loss=square)
    assert step.graph.resident_bytes > 4e10


class Centred(nn.Module):
    """A loss with a buffer, which a function of (module, output) changes."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))
        self.change = change

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.change(self, output)
        return F.mse_loss(output - self.centre, target)


def as_torchscript(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.trace(module, x8)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def with_hook() -> nn.Module:
    model = linear()
    model.weight.register_hook(lambda gradient: gradient)
    return model


def grown(model, x):
    model.moving = torch.cat([model.moving, x[0]])
    return square(model.linear(x))


def stretched(model, x):
    model.moving.unsqueeze_(0)
    return square(model.linear(x))


def observed(model, x):
    on, lowest, highest, scale = (
        torch.ones(1, dtype=torch.long),
        model.moving[:0].clone(),
        model.moving[:0].clone(),
        torch.ones(1),
    )
    quantized = torch.fused_moving_avg_obs_fake_quant(
        model.linear.weight, on, on, lowest, highest, scale, torch.zeros(1, dtype=torch.int), 0.1, -128, 127, 0, True
    )
    return square(F.linear(x, quantized))


def counted(model, x):
    model.plain.add_(1)
    return square(model.linear(x))


def reads_beside(how: str) -> Step:
    """A model that changes its buffer and then reads, as a plain attribute, what lies in its memory or beside it."""

    def forward(model, x):
        model.moving.add_(1)
        beside = model.beside if isinstance(model.beside, Tensor) else torch.from_numpy(model.beside)
        return square(model.linear(x) * beside)

    model, memory = Lambda(forward), torch.zeros(16)
    model.moving = memory[:8]
    model.beside = {"view": model.moving[2:3], "array": model.moving.numpy(), "apart": memory[8:]}[how]
    return capture(model, x8)


def test_what_lies_beside_a_buffer_that_changes_may_be_read() -> None:
    assert any(source.kind == "constant" for source in reads_beside("apart").sources)


UNREGISTERED = torch.ones(8, requires_grad=True)
TEACHER = nn.Linear(8, 8)


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, mask: Tensor, is_causal: bool | None = None) -> Tensor:
        return square(self.encoder(x, mask, is_causal=is_causal))


class PaddedEncoder(nn.Module):
    """A frozen encoder in evaluation, under a head that is trained; padded on the right."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).requires_grad_(False).eval()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= torch.tensor([[3], [5]])
        return square(self.head(self.encoder(x, src_key_padding_mask=padding)))


class FrozenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False).eval()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return square(self.head(self.attention(x, x, x)[0]))


class FrozenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.layers = nn.Sequential(*layers).requires_grad_(False).eval()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return square(self.head(self.layers(x)))


FROZEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (FrozenAttention, "aten._native_multi_head_attention"),
    "layers": (FrozenLayers, "aten._transformer_encoder_layer_fwd"),
    "padded encoder": (lambda: PaddedEncoder(nested=False), "aten._transformer_encoder_layer_fwd"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_attention_takes_its_fast_path_as_in_eager_execution(name: str) -> None:
    build, fast = FROZEN[name]
    model, x = build(), torch.randn(2, 5, 8)
    # A torch-function mode of the program's has eager execution leave that path.
    for mode, taken in ((contextlib.nullcontext(), True), (torch.device("cpu"), False)):
        with mode:
            model.zero_grad()
            step = capture(model, x)
            assert (fast in {op.kind for op in step.graph.ops}) is taken
            loss = step.eager(x)
            loss.backward()
            found = run_step(step, keep_all(step.graph), x)
        assert torch.equal(found.loss, loss)
        for key, gradient in found.gradients.items():
            wanted = model.get_parameter(key).grad
            assert wanted is not None and torch.equal(gradient, wanted), key


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_an_encoder_that_leaves_nothing_out_is_captured(shape: tuple[int, ...]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()

    def forward(model: Lambda, x: Tensor) -> Tensor:
        return square(model.linear(model.encoder(x, src_key_padding_mask=torch.arange(5).expand(shape[:-1]) > 3)))

    model, x = Lambda(forward), torch.randn(shape)
    model.encoder = encoder
    with torch.device("cpu") if len(shape) == 3 else contextlib.nullcontext():  # a mode of the program's
        step = capture(model, x)
        assert torch.equal(run_step(step, keep_all(step.graph), x).loss, step.eager(x))


@pytest.mark.parametrize("first", ["block", "capture"])
def test_a_capture_and_a_block_in_two_threads_put_everything_back(first: str) -> None:
    activation = sys.modules["torch.nn.modules.activation"]
    before = torch.overrides.has_torch_function, vars(activation)["_is_make_fx_tracing"]
    inside, go_on = threading.Event(), threading.Event()

    def waits(model: Lambda, x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(20)
        return square(model.linear(x))

    thread = threading.Thread(target=lambda: capture(Lambda(waits), x8))
    block = budget(None)
    if first == "block":
        with block:
            thread.start()
            assert inside.wait(20)
        go_on.set()
        thread.join()
    else:
        thread.start()
        assert inside.wait(20)
        with block:
            go_on.set()
            thread.join()
    assert (torch.overrides.has_torch_function, vars(activation)["_is_make_fx_tracing"]) == before


def ctc_in_a_row(lengths_as: Callable[[list[int]], Any]) -> Step:
    targets, lengths = torch.tensor([1, 2, 3, 4, 5]), (lengths_as([7, 4]), lengths_as([3, 2]))
    model = Lambda(lambda m, x, t, *n: F.ctc_loss(m.linear(x).log_softmax(-1), t, *n))
    return capture(model, (torch.randn(7, 2, 8), targets, *lengths))


def with_attribute(function: Callable[..., Any], **attributes: Any) -> Step:
    model = Lambda(function)
    for key, value in attributes.items():
        setattr(model, key, value)
    return capture(model, x8)


def counts_calls(model, x):
    model.n += 1
    return square(model.linear(x) * model.n)


def counts_calls_for_later(model, x):  # nothing shows in two calls, but something will
    model.n += 1
    return square(model.linear(x)) * (2.0 if model.n > 100 else 1.0)


def first_call_differs(model, x):
    scale = 1.0 if model.started else 3.0
    model.started = True
    return square(model.linear(x) * scale)


def data_refused(content: Callable[[Any, Tensor], Tensor]) -> Step:
    """Captures a step in which the forward gives a parameter this memory."""

    def forward(model, x):
        model.linear.weight.data = content(model, x)
        return square(model.other(model.linear(x)))

    model = Lambda(forward)
    model.other = nn.Linear(8, 8)
    return capture(model, x8)


def assigns_to_both(model, x):
    model.other.weight.data = 2 * model.linear.weight.data
    return model.other.weight.data


def assigns_an_input(model, x):
    model.linear.weight.data = x
    return square(model.linear(x))


def assigns_to_an_activation(model, x):
    y = model.linear(x)
    y.data = 2 * y.data
    return square(y)


def halves_late(model, x):
    y = model.linear(model.linear(x).tanh())
    with torch.no_grad():
        model.linear.weight.mul_(0.5)
    return square(y)


def seeds(model, x):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.randn(8)
    return square(model.linear(x) + noise)


class DrawsAgain(torch.autograd.Function):
    """Dropout that draws its mask again instead of saving it."""

    @staticmethod
    def forward(ctx, x):
        ctx.state = torch.get_rng_state()
        return x * (torch.rand_like(x) > 0.3)

    @staticmethod
    def backward(ctx, gradient):
        torch.set_rng_state(ctx.state)
        return gradient * (torch.rand_like(gradient) > 0.3)


def draws_again(model, x):
    return square(DrawsAgain.apply(model.linear(x)))


class DrawsAgainItself(DrawsAgain):
    @staticmethod
    def backward(ctx, gradient):
        torch.default_generator.set_state(ctx.state)
        return gradient * (torch.rand_like(gradient) > 0.3)


def draws_again_itself(model, x):
    return square(DrawsAgainItself.apply(model.linear(x)))


def hooked(hook: Callable[[Lambda, Tensor], object], model: Lambda, x: Tensor) -> Tensor:
    """With a hook for the gradient of what is in the middle; what the hook returns is left alone."""
    y = model.linear(x)
    y.register_hook(lambda gradient: (hook(model, gradient), None)[1])
    return square(y * (1 + model.moving) * model.scale)


def with_a_hook(hook: Callable[[Lambda, Tensor], object]) -> Step:
    return with_attribute(functools.partial(hooked, hook), scale=1.0, n=0)


def counts_gradients(model: Lambda, gradient: Tensor) -> None:
    model.n += 1


def moves_average(model: Lambda, gradient: Tensor) -> None:
    model.moving = 0.9 * model.moving + 0.1 * gradient.norm(dim=0)


def writes_to_a_buffer_in_both(model: Lambda, x: Tensor) -> Tensor:
    model.moving.mul_(0.5)
    return hooked(lambda m, gradient: m.moving.add_(gradient.norm(dim=0)), model, x)


class Reversible(torch.autograd.Function):
    """Computes again in its backward, and has autograd add to the gradients of the parameters."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(gradient)
        return x.grad, None


OWN = torch.Generator()


def makes_a_generator(model, x):
    return square(model.linear(x) * torch.rand(8, generator=torch.Generator().manual_seed(5)))


def seeds_its_own(model, x):
    OWN.manual_seed(3)
    return square(model.linear(x) + torch.randn(8, generator=OWN))


def takes_draws_back(model, x):  # the next step draws the same
    with torch.random.fork_rng():
        return square(F.dropout(model.linear(x)))


def planned() -> nn.Module:
    return plan(Lambda(lambda m, x: square(m.linear(x))), 1.0, inputs=x8).module()


def packs(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return square(model.linear(x))


def flips(model, x):  # nothing shows in the ops
    model.flag = not model.flag
    return square(model.linear(x))


def uses_latest(m, x):
    y = m.linear(x)
    before, m.latest = m.latest, y.detach().mean()
    return square(y + before if isinstance(before, Tensor) else y)


def keeps_in_turn(m, x):
    y = m.linear(x)
    m.latest = y.detach().mean(0) if m.latest is None or not m.latest.dim() else y.detach().mean()
    return square(y)


def keeps_average(model, x):
    y = model.linear(x)
    model.plain = 0.9 * model.plain + 0.1 * y.detach().mean(0)
    return square(y * model.plain)


def remembers(model, x):
    model.memory.append(model.linear(x))
    return square(torch.stack(model.memory))


def caches_lazily(model, x):
    if model.cache is None:
        model.cache = torch.arange(8.0)
    return square(model.linear(x) * model.cache)


def caches_in_a_dict(model, x):
    if "cache" not in model.memory:
        model.memory["cache"] = torch.arange(8.0)
    return square(model.linear(x) * model.memory["cache"])


OUTSIDE = SimpleNamespace(n=0, numbers=np.random.default_rng(0), python=random.Random(0))


def counts_outside(model, x):
    OUTSIDE.n += 1
    return square(model.linear(x) * OUTSIDE.n)


def overlapping() -> nn.Module:
    """One of two buffers in one storage changes."""
    model = Lambda(lambda m, x: (m.moving.add_(1), square(m.linear(x) * m.other))[1])
    memory = torch.zeros(12)
    model.moving = memory[:8]
    model.register_buffer("other", memory[4:])
    return model


def asserts_on_data(model, x):
    assert (x < 5).all(), "a: b"
    return square(model.linear(x))


def asserts_of_numbers(model, x):
    assert x.max().item() < 5
    return square(model.linear(x))


def clamps_infinities(model, x):
    """The usual ways in which libraries ask."""
    y = model.linear(x)
    if torch.isinf(y).any() or torch.isnan(y).any() or (y != y).any() or torch.isnan(y).sum() > 0:
        y = y.clamp(-1, 1)
    if not torch.isfinite(y).all() or not (~y.isposinf() & ~torch.isneginf(y)).view(-1).all():
        y = y.clamp(-1, 1)
    return square(y)


def wants_infinities(m, x):
    y = m.linear(x)
    if not torch.isinf(y).any():
        raise ValueError("no padding")
    return square(y)


def writes_large_truth_values(m, x):
    y = m.linear(x)
    infinite = torch.isinf(y)
    infinite[:, 0] = False
    if infinite.any():
        y = y.clamp(-1, 1)
    return square(y)


# Large tensors of one element each, whose other elements one would be wrong to take for the same, or to compute as such.


def overflows_in_eight_bits(m, x):
    large = torch.full((1,), 100, dtype=torch.int8).expand(2048, 1024) * torch.tensor(2)
    return square(m.linear(x)) if large[0, 0] > 0 else m.linear(x).sum()


def overflows_in_half(m, x):
    large = torch.ones(1, dtype=torch.float16).expand(2048, 1024) * torch.tensor(70000.0)
    return square(m.linear(x)) if torch.isinf(large).all() else m.linear(x).sum()


def writes_a_view_of_a_copy(m, x):
    large = torch.zeros((), dtype=torch.bool).expand(2048, 1024).clone()
    large[0].fill_(True)
    return square(m.linear(x)) if large[1, 0] else m.linear(x).sum()


def writes_columns_of_a_copy(m, x):
    large = torch.ones(1, 1).expand(1025, 1024).clone()
    large[:, 5:].zero_()
    return square(m.linear(x)) if large[0, 0] != 0 else m.linear(x).sum()


def checks_in_other_ways(m, x):
    y = m.linear(x)
    if not (y < 1e6).all() or not (y > -1e6).all():
        raise ValueError("too large")
    if (y > 1e6).any():
        raise ValueError("too large")
    assert not (y > 1e6).any()
    assert torch.allclose(y, y + 1e-9) and torch.equal(y, y + 0), "differs"
    assert torch.equal(
        y,
        y + 0,
    )
    return square(y)


def counts(m, x, i):
    return square(m.linear(x)) * torch.bincount(i, i).sum()


def every_other_call(m, x):
    if "calls" not in m._buffers:
        m.register_buffer("calls", torch.tensor(0))
    if m.calls % 2 == 0:
        x = -x
    m.calls += 1
    return square(m.linear(x))


def called_once(model):
    model(x8)
    return model


def as_many_as_asked(model, x, sizes, mask):
    """Sizes as numbers and as a shape, and a mask that is not full."""
    first, second = sizes.tolist()
    y = model.linear(x)[:first].repeat_interleave(second, 0)
    starts = torch.repeat_interleave(sizes, sizes)
    return square(y) if mask.bool().all() else square(y) * starts.sum() * starts.numel()


def branches_in_two_ways(model, x):
    """The second is left out where a compiler asks, and so is what the step then fails without."""
    shift = None if torch.compiler.is_compiling() else 0.0
    if not torch.compiler.is_compiling() and 0 in x.long():
        shift = 1.0
    return square(model.linear(x) + shift)


def writes_by_a_mask(model, x):
    y = model.linear(x)
    y[x > 0] = model.linear.bias.sum()
    return square(y)


def in_double(model, x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(before)  # no harm
    torch.set_default_dtype(torch.float64)
    try:
        scale = torch.ones(8).cumsum(0) / 3
    finally:
        torch.set_default_dtype(before)
    return square(model.linear(x) * scale)


def input_is_the_buffer() -> Step:
    model = Lambda(lambda m, x: (m.moving.add_(1), square(m.linear(x) * m.moving))[1])
    return capture(model, model.moving.expand(4, 8))


def bilinear(model: Lambda, x: Tensor) -> Tensor:
    return F.bilinear(x, model.linear(x).float(), model.linear.weight[None])


def bilinear_outside(model: Lambda, x: Tensor) -> Tensor:
    y = model.linear(x).float()
    with torch.autocast("cpu", enabled=False):
        return square(F.bilinear(x, y, model.linear.weight[None]))


def averaging_norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(8, momentum=None))


def frozen_refused(change: Callable[[Any], object]) -> Step:
    """Captures a step in which a parameter without a gradient changes like this."""

    def forward(model, x):
        change(model)
        return square(model.other(model.linear(x)))

    model = Lambda(forward)
    model.other = nn.Linear(8, 8).requires_grad_(False)
    return capture(model, x8)


def deletes(model: Any) -> None:
    weight = model.other.weight
    del model.other.weight
    model.other.weight = weight * 0.9


def multiplies(model: Any) -> None:
    with torch.no_grad():
        model.other.weight *= 0.9


def one_name_refused(name: str) -> Step:
    """Captures a step that gives a buffer of two names another tensor under one of them."""

    def forward(model, x):
        setattr(model, name, getattr(model, name) + 1)
        return square(model.linear(x) * model.moving * model.same)

    model = Lambda(forward)
    model.register_buffer("same", model.moving)
    return capture(model, x8)


def with_expanded() -> nn.Module:
    def forward(model, x):
        model.wide[0].add_(1)
        return square(model.linear(x) * model.wide)

    model = Lambda(forward)
    model.register_buffer("wide", torch.zeros(1, 8).expand(4, 8))
    return model


REFUSED: dict[str, tuple[Callable[[], Step], str]] = {
    "padding left out": (lambda: capture(PaddedEncoder(nested=True), torch.randn(2, 5, 8)), "only what is not padded"),
    "places of a split in a tensor": (
        lambda: capture(Lambda(lambda m, x: sum(map(square, m.linear(x).tensor_split(torch.tensor([2, 5]), dim=1)))), x8),
        "branches on data",
    ),
    "layers dropped at random": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if torch.rand([]) < 0.5 else x)), x8),
        r"branches on data.*set the probability \(layerdrop\) to 0",
    ),
    "draws read as other numbers": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if (torch.rand(4).view(torch.int32) >= 1).any() else x)), x8),
        "branches on data",
    ),
    "more than was drawn": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if torch.rand(1).as_strided((), (), 0) < 0 else x)), x8),
        "branches on data",
    ),
    "a draw and what is not quite zero": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if torch.rand([]) <= 1e-40 else x)), x8),
        "branches on data",
    ),
    "statistics that are a weight": (
        lambda: capture(
            Lambda(lambda m, x: square(F.batch_norm(m.linear(x), m.moving, s := m.moving + 1, s, None, training=True))), x8
        ),
        "gives a batch norm one tensor as running mean or variance and as something else",
    ),
    "one tensor for both statistics": (
        lambda: capture(Lambda(lambda m, x: square(F.batch_norm(m.linear(x), m.moving, m.moving, training=True))), x8),
        "gives a batch norm one tensor as running mean or variance and as something else",
    ),
    "a draw that was written to": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if torch.rand([]).mul_(2) < 1 else x)), x8),
        "branches on data",
    ),
    "a draw that was written to elsewhere": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if (d := torch.rand([]), d.view(1).add_(1))[0] < 1 else x)), x8),
        "branches on data",
    ),
    "reads a gradient": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) if m.linear.bias.grad is None else m.linear(x).sum()), x8),
        r"^Lambda reads the gradient of linear.bias \(.grad\) in its forward",
    ),
    "sets a gradient": (
        lambda: capture(Lambda(lambda m, x: (setattr(m.linear.bias, "grad", torch.ones(8)), square(m.linear(x)))[1]), x8),
        r"^Lambda sets the gradient of linear.bias \(.grad\) in its forward",
    ),
    "drops a gradient": (
        lambda: capture(Lambda(lambda m, x: (delattr(m.linear.bias, "grad"), square(m.linear(x)))[1]), x8),
        r"^Lambda sets the gradient of linear.bias \(.grad\) in its forward",
    ),
    "an optimizer in the forward": (
        lambda: capture(Lambda(lambda m, x: (torch.optim.SGD(m.parameters()).step(), square(m.linear(x)))[1]), x8),
        "^Lambda reads the gradient of linear",
    ),
    "clears gradients": (
        lambda: capture(Lambda(lambda m, x: (m.zero_grad(), square(m.linear(x)))[1]), x8), "^Lambda reads the gradient of linear"
    ),
    "transposes a buffer": (
        lambda: capture(Lambda(lambda m, x: (m.moving.as_strided_((8,), (0,)), square(m.linear(x) + m.moving))[1]), x8),
        r"^Lambda has its buffer moving show its own memory in another way .*: moving.copy_\(",
    ),
    "arrays of numpy": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) * float(x.numpy().sum())), x8),
        r"^Lambda computes with numpy in its forward or loss, at .*test_capture.py:\d+: .*; compute with torch",
    ),
    "arrays of numpy behind a branch": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) * (x.isfinite().all() and float(x.numpy().sum()))), x8),
        "^Lambda computes with numpy in its forward or loss",
    ),
    "no module": (lambda: capture(square, x8), "expected a torch.nn.Module, not a function"),
    "no inputs": (lambda: capture(linear()), "Linear brings no example inputs.*give inputs="),
    "targets without loss": (lambda: capture(linear(), (x8, x8)), "takes 2 .*where the last inputs are targets, give"),
    "no loss": (lambda: capture(linear(), x8), r"Linear returns a tensor of shape \(4, 8\), but a loss is one number; give"),
    "output without loss": (lambda: capture(Lambda(lambda m, x: {"y": m.linear(x)}), x8), "Lambda returns a dict, not a loss"),
    "integer loss": (lambda: capture(linear(), x8, loss=lambda y: (y > 0).sum()), "number of dtype torch.int64, which"),
    "detached loss": (lambda: capture(linear(), x8, loss=lambda y: y.detach().sum()), "does not depend on any parameter"),
    "parameter as loss": (lambda: capture(Lambda(lambda m, x: m.linear.bias[0]), x8), "is one of its parameters"),
    "loss wants target": (lambda: capture(linear(), x8, loss=F.mse_loss), r"requires 1 more argument.*inputs=\(..., target\)"),
    "loss wants more": (lambda: capture(linear(), (x8,), loss=lambda y, a, b: a), "requires 2 target.*only 1 input"),
    "loss wants name": (lambda: capture(linear(), {"input": x8}, loss=F.mse_loss), "requires 'target', which is not among"),
    "loss wants keyword": (lambda: capture(linear(), (x8, x8), loss=lambda y, *, w: w), "requires the keyword 'w'"),
    "loss without signature": (lambda: capture(linear(), x8, loss=torch.sum), "cannot see which arguments the loss"),
    "loss with parameters": (lambda: capture(linear(), x8, loss=linear()), "has parameters of its own"),
    "branch on data": (lambda: capture(Lambda(lambda m, x: m.linear(x).sum() if x.sum() > 0 else x), x8), "branches on data"),
    "integers in bounds": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) * torch.empty_like(x).random_(0, 5))), x8), "call torch.randint"
    ),
    "check of numbers": (lambda: capture(Lambda(asserts_of_numbers), x8), r"let it compare tensors, as in assert \(x > 0\).all"),
    "branch on data after one in a library": (lambda: capture(Lambda(branches_in_two_ways), x8), "branches on data.* in x.long"),
    "branch on a size that overflows": (
        lambda: capture(
            Lambda(lambda m, x, i: square(m.linear(x)) * (i.item() > 2**63)), (x8, torch.tensor(2**64 - 1, dtype=torch.uint64))
        ),
        "branches on data",
    ),
    "infinities in the example": (
        lambda: capture(
            Lambda(lambda m, x, mask: square(m.linear(x) + mask) if torch.isinf(mask).any() else m.linear(x).sum()),
            (x8, torch.full((8,), -torch.inf)),
        ),
        "branches on data",
    ),
    "error where numbers are finite": (lambda: capture(Lambda(wants_infinities), x8), r"branches on data.*if not .*isinf"),
    "large truth values written to": (lambda: capture(Lambda(writes_large_truth_values), large), "branches on data.*if infinite"),
    "places in large tensors": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)[torch.isfinite(m.linear(x))])), large), "branches on data"
    ),
    "large constant": (lambda: capture(Lambda(overflows_in_eight_bits), x8), "branches on data.*if large"),
    "large copy": (lambda: capture(Lambda(writes_a_view_of_a_copy), x8), "branches on data.*if large"),
    "columns of a large copy": (lambda: capture(Lambda(writes_columns_of_a_copy), x8), "branches on data.*if large"),
    "branch on a counter that it moves": (
        lambda: capture(called_once(Lambda(every_other_call)), x8),
        r"branches on its buffer calls, which it changes, at .*if m.calls % 2",
    ),
    "more integers than sizes": (
        lambda: capture(Lambda(lambda m, x, y: square(m.linear(x)) * sum(y.tolist())), (x8, torch.arange(129))),
        "branches on data",
    ),
    "branch on a number of the example spread out": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) if (x[3:, 7:] > 0).expand(4, 1).any() else x.sum()), x8),
        "branches on data",
    ),
    "branch on a draw": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) if torch.rand(()) > 0.5 else x)), x8), "branches on data"
    ),
    "data chosen by a mask": (lambda: capture(Lambda(writes_by_a_mask), x8), r"x\[mask\] = value, torch.where"),
    "mask that somebody's operator draws": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)[drawn_mask(torch.ones(4))])), x8), "branches on data"
    ),
    "mask in memory shared by set_": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)[shares_by_set(x)])), x8), "branches on data"
    ),
    "mask in memory shared by a large view": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)[shares_by_a_large_view(x)])), x8), "branches on data"
    ),
    "mask of another shape": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)[torch.tensor([True, False])])), x8), r"mask \[2\] does not match"
    ),
    "branch on a constant overwritten": (lambda: capture(Lambda(branch_on_what_was_a_constant), x8), "branches on data"),
    "mask that may be causal": (
        lambda: capture(TransformerBlock(), (torch.randn(1, 5, 8), torch.randn(5, 5))),
        r"PyTorch's transformer layers, .* is causal, at .*test_capture.py:\d+: .*; say so in that call \(is_causal=,",
    ),
    "ctc of targets in a row": (
        lambda: ctc_in_a_row(torch.tensor), "by the longest target.* give targets padded, of shape .* all lengths as numbers"
    ),
    "shape from data": (lambda: capture(Lambda(lambda m, x: m.linear(x)[x > 0].sum()), x8), "branches on data"),
    "frozen": (lambda: capture(linear().requires_grad_(False), x8, loss=square), "no parameter of Linear requires a gradient"),
    "no such device": (lambda: capture(linear(), x8, loss=square, device="banana"), "there is no device 'banana'"),
    "input elsewhere": (lambda: capture(linear(), x8.to("meta"), loss=square), "inputs is on the meta device"),
    "input wants gradient": (lambda: capture(linear(), x8.clone().requires_grad_(), loss=square), "inputs requires a gradient"),
    "strange input": (lambda: capture(linear(), (object(),), loss=square), r"inputs\[0\] is of type object"),
    "strange inputs": (lambda: capture(linear(), {1}, loss=square), "inputs must be a tensor, a tuple or list"),
    "sparse input": (lambda: capture(linear(), x8.to_sparse(), loss=square), "only plain dense ones"),
    "sparse gradient": (
        lambda: capture(nn.Embedding(4, 8, sparse=True), torch.tensor([1]), loss=square), "makes a sparse tensor"
    ),
    "sparse gradient with padding": (
        lambda: capture(nn.Embedding(4, 8, sparse=True, padding_idx=0), torch.tensor([1]), loss=square),
        "makes a sparse tensor; use dense gradients",
    ),
    "wrong shape": (lambda: capture(linear(), torch.randn(4, 9), loss=square), "Linear cannot be traced: RuntimeError"),
    "lazy": (lambda: capture(nn.LazyLinear(8), x8, loss=square), "has no shape yet"),
    "input in place": (lambda: capture(Lambda(lambda m, x: square(m.linear(x.relu_()))), x8.clone()), "changes inputs in place"),
    "parameter in place with a gradient": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) * m.linear.bias.mul_(0.9))), x8), "a leaf Variable that requires"
    ),
    "parameter in place after its use": (
        lambda: capture(Lambda(halves_late), x8), "needed for gradient computation has been modified by an inplace operation"
    ),
    "buffers of one storage": (lambda: capture(overlapping(), x8), "memory another buffer, parameter or input has too"),
    "buffer that is the input": (input_is_the_buffer, "memory another buffer, parameter or input has too"),
    "buffer replaced": (lambda: capture(Lambda(grown), x8), "replaces moving in its forward"),
    "buffer of another shape": (lambda: capture(Lambda(stretched), x8), r"moving the shape \(1, 8\).* place of \(8,\)"),
    "observer without a size": (lambda: capture(Lambda(observed), x8), "finds the sizes of its buffers.*run the model once"),
    "statistics updated alone": (
        lambda: capture(Lambda(updates_statistics), x8),
        "batch_norm_update_stats.* changes running statistics without saying so.*use F.batch_norm",
    ),
    "gradient of prod's": (
        lambda: capture(Lambda(penalty_on(lambda y: y.prod(1))), x8),
        "gradient of prod is differentiated again",
    ),
    "gradient of cumprod's": (
        lambda: capture(Lambda(penalty_on(lambda y: y.cumprod(1))), x8),
        "gradient of cumprod is differentiated again",
    ),
    "buffer of the loss in place": (
        lambda: capture(linear(), (x8, x8), loss=Centred(lambda c, o: c.centre.lerp_(o.detach().mean(0), 0.1))),
        "buffers of a loss: .* make the loss a part of the model",
    ),
    "buffer of the loss replaced": (
        lambda: capture(linear(), (x8, x8), loss=Centred(lambda c, o: setattr(c, "centre", c.centre + o.detach().mean(0)))),
        "the loss of Linear gives its buffers other tensors; .* make the loss a part of the model",
    ),
    "view of a buffer that changes": (lambda: reads_beside("view"), "changes its buffer moving .* the same memory"),
    "array of a buffer that changes": (lambda: reads_beside("array"), "changes its buffer moving .* take that from the buffer"),
    "attribute in place": (lambda: capture(Lambda(counted), x8), "neither parameter nor buffer.*register_buffer"),
    "counter": (lambda: with_attribute(counts_calls, n=3), r"its attribute n in its forward \(from 3 to 4\).*in a buffer"),
    "counter for later": (lambda: with_attribute(counts_calls_for_later, n=0), "changes its attribute n in its forward"),
    "first call": (lambda: with_attribute(first_call_differs, started=False), "attribute started.*run the model once before"),
    "flag that flips": (lambda: with_attribute(flips, flag=False), "attribute flag in its forward .from False to True"),
    "buffer written in the backward": (
        lambda: with_a_hook(lambda m, gradient: m.moving.copy_(gradient.norm(dim=0))), "changes moving in its backward"
    ),
    "buffer replaced in the backward": (lambda: with_a_hook(moves_average), "changes moving in its backward"),
    "buffer written in both": (
        lambda: with_attribute(writes_to_a_buffer_in_both, scale=1.0), "changes moving in its backward"
    ),
    "counter in the backward": (lambda: with_a_hook(counts_gradients), "attribute n and changes it in its backward .from 0 to 1"),
    "attribute of the backward, read by the next forward": (
        lambda: with_a_hook(lambda m, gradient: setattr(m, "scale", gradient.norm())), "attribute scale and changes it"
    ),
    "data assigned in the backward": (
        lambda: with_a_hook(lambda m, gradient: setattr(m.linear.bias, "data", gradient[0])), "assigns a .data in its backward"
    ),
    "python's random in the backward": (
        lambda: with_a_hook(lambda m, gradient: random.random()), r"Python's generator \(random\) in its backward"
    ),
    "backward in the backward": (
        lambda: capture(Lambda(lambda m, x: square(Reversible.apply(m.linear(x), m.linear))), x8), "use torch.autograd.grad"
    ),
    "data of another shape": (lambda: data_refused(lambda m, x: x[:0, :0]), "linear.weight gets another shape, layout or type"),
    "data laid out otherwise": (lambda: data_refused(lambda m, x: (2 * m.linear.weight).t()), "gets another shape, layout"),
    "data of another parameter": (lambda: data_refused(lambda m, x: m.other.weight.data), "linear.weight gets memory that"),
    "data of an input": (lambda: capture(Lambda(assigns_an_input), torch.ones(8, 8)), "gets memory that another"),
    "one memory for two": (lambda: data_refused(assigns_to_both), "gets memory that another tensor has"),
    "data of an activation": (lambda: capture(Lambda(assigns_to_an_activation), x8), "no parameter or buffer"),
    "frozen parameter replaced": (
        lambda: frozen_refused(lambda m: setattr(m.other, "weight", nn.Parameter(m.other.weight * 0.9))), "replaces other.weight",
    ),
    "frozen parameter deleted": (lambda: frozen_refused(deletes), "replaces other.weight"),
    "frozen parameter by an operator": (lambda: frozen_refused(multiplies), r"assigns a parameter in its forward.*mul_\(0.9\)"),
    "frozen parameter takes on a gradient": (
        lambda: frozen_refused(lambda m: m.other.weight.mul_(0.9).add_(m.linear.weight)), "other.weight require a gradient",
    ),
    "gradient asked for": (lambda: frozen_refused(lambda m: m.other.weight.requires_grad_()), "other.weight require a gradient"),
    "one name of a buffer": (lambda: one_name_refused("moving"), "replaces moving"),
    "other name of a buffer": (lambda: one_name_refused("same"), "replaces moving"),
    "expanded buffer": (lambda: capture(with_expanded(), x8), r"changes wide, which is expanded.*contiguous\(\)"),
    "default dtype": (lambda: capture(Lambda(in_double), x8), "sets another default dtype in its forward.*its dtype"),
    "default dtype in the backward": (
        lambda: with_a_hook(lambda m, gradient: torch.set_default_dtype(torch.float64)), "default dtype in its backward"
    ),
    "seed": (lambda: capture(Lambda(seeds), x8), "seeds a generator or sets"),
    "state of a generator": (lambda: capture(Lambda(draws_again), x8), "seeds a generator or sets its state"),
    "state of the generator itself": (lambda: capture(Lambda(draws_again_itself), x8), "seeds a generator or sets its state"),
    "seed of a generator of its own": (lambda: capture(Lambda(seeds_its_own), x8), "seeds a generator or sets its state"),
    "generator made in each call": (lambda: capture(Lambda(makes_a_generator), x8), "a generator that it makes in its forward"),
    "draws taken back": (lambda: capture(Lambda(takes_draws_back), x8), "seeds a generator or sets its state"),
    "seed after all draws": (
        lambda: capture(Lambda(lambda m, x: (square(m.linear(x)), torch.manual_seed(1))[0]), x8), "seeds a generator or sets"
    ),
    "planned": (lambda: capture(nn.Sequential(planned()), x8), "^0 is a planned module; plan with the model"),
    "hooks of saved tensors": (lambda: capture(Lambda(packs), x8), "packs saved tensors by hooks"),
    "latest in an attribute": (
        lambda: with_attribute(uses_latest, latest=None), "latest in its forward .*where only the first call changes it"
    ),
    "latest of other kinds in turn": (
        lambda: with_attribute(keeps_in_turn, latest=None), "latest in its forward .from None to another tensor"
    ),
    "tensor in place of an array": (
        lambda: with_attribute(uses_latest, latest=np.zeros(2)), "latest in its forward .from another ndarray to another tensor"
    ),
    "list with a large tensor": (
        lambda: capture(Lambda(lambda m, x: torch.tensor([m.linear(x), 1]).sum()), x8), "only one element"
    ),
    "list cut to a smaller type": (
        lambda: capture(Lambda(lambda m, x: m.linear(x).sum() * torch.tensor([x.argmax()], dtype=torch.int32).sum()), x8),
        "data is not allocated",
    ),
    "average in an attribute": (lambda: capture(Lambda(keeps_average), x8), "changes its attribute plain .*keep it in a buffer"),
    "memory": (lambda: with_attribute(remembers, memory=[]), "from one call to the next in its attribute memory"),
    "lazy cache": (lambda: with_attribute(caches_lazily, cache=None), "attribute cache .*run the model once before"),
    "lazy cache in a dict": (lambda: with_attribute(caches_in_a_dict, memory={}), "attribute memory.*run the model once before"),
    "state elsewhere": (lambda: capture(Lambda(counts_outside), x8), "does not do the same in every call"),
    "python's random": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) * random.random()), x8), r"Python's generator \(random\)"
    ),
    "numpy's random": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) * np.random.rand()), x8),  # noqa: NPY002
        r"numpy's global generator \(numpy.random\)",
    ),
    "a generator of python": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x)) * OUTSIDE.python.random()), x8), "not do the same in every call"
    ),
    "data of numpy": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) * torch.from_numpy(OUTSIDE.numbers.random((4, 8)))).float()), x8),
        "does not do the same in every call",
    ),
    "loss class": (lambda: capture(linear(), (x8, x8), loss=nn.MSELoss), r"the class MSELoss; give .*loss=MSELoss\(\.\.\.\)"),
    "loss of anything": (lambda: capture(linear(), (x8, x8), loss=lambda *a: F.mse_loss(*a)), "does not say which inputs"),
    "loss of its own": (
        lambda: capture(linear(), x8, loss=lambda y: torch.ones(1, requires_grad=True)), "depends on none of its parameters"
    ),
    "bilinear under autocast": (
        lambda: capture(Lambda(lambda m, x: square(bilinear(m, x))), x8, autocast=torch.bfloat16), "F.bilinear under autocast"
    ),
    "momentum of None": (lambda: capture(averaging_norm(), x8, loss=square), "^1 averages .*give it a momentum"),
    "attribute wants gradient": (
        lambda: capture(Lambda(lambda m, x: square(m.linear(x) * UNREGISTERED)), x8),
        r"requires a gradient but is no parameter .*detach it",
    ),
    "teacher wants gradient": (
        lambda: capture(linear(), x8, loss=lambda y: square(y - TEACHER(y))), "requires a gradient but is no parameter"
    ),
    "gradient hook": (lambda: capture(with_hook(), x8, loss=square), "weight has a gradient hook"),
    "wrapped": (lambda: capture(nn.DataParallel(linear()), x8, loss=square), "wraps another module; capture that one"),
    "two dtypes": (
        lambda: capture(linear(), x8.double(), loss=square), "matrices of torch.float64 and torch.float32 .*convert the inputs"
    ),
    "TorchScript": (
        lambda: capture(nn.Sequential(as_torchscript(linear())), x8, loss=square), "^0 is TorchScript.*that it was made of"
    ),
    "autocast": (lambda: capture(linear(), x8, loss=square, autocast=torch.int8), "give torch.bfloat16 or torch.float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_in_one_sentence(name):
    attempt, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as refusal:
        attempt()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "forward", [lambda m, x: square(m.linear(x)) * random.random(), counted, remembers, seeds, seeds_its_own]
)
def test_refusal_changes_nothing_either(forward):
    model = Lambda(forward)
    model.memory = []
    OWN.manual_seed(3)  # as one of them does; what it was before that no trace could know
    drawn, own = torch.get_rng_state(), OWN.get_state()
    plain, python, numpy = model.plain.clone(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(CaptureError):
        capture(model, x8)
    assert torch.equal(model.plain, plain)
    assert model.memory == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(OWN.get_state(), own)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()  # noqa: NPY002
    assert "__getattribute__" not in vars(nn.Module)


def test_masks_said_to_be_causal_or_not_are_captured():
    for is_causal in (True, False):
        block = TransformerBlock()
        mask = nn.Transformer.generate_square_subsequent_mask(5) if is_causal else torch.randn(5, 5)
        inputs = torch.randn(1, 5, 8), mask, is_causal
        case = Case(block, inputs, lambda model, inputs=inputs: model(*inputs))
        step, plain = captured(case), plain_answer(case)
        with torch.no_grad():
            torch.manual_seed(7)
            assert_same(answer_of(step, list(step.module(*bind(step, inputs)))), plain)


def test_lengths_in_tensors_are_planned_for_as_long_as_targets_are_padded():
    full, shorter = torch.tensor([3, 2]), torch.tensor([1, 2])
    case = ctc_case(torch.tensor([7, 4]), shorter)
    step, padded, plain = captured(case), captured(ctc_case(torch.tensor([7, 4]), full)), plain_answer(case)
    assert step.graph.fingerprint() == padded.graph.fingerprint()
    with torch.no_grad():
        torch.manual_seed(7)
        assert_same(answer_of(step, list(step.module(*bind(step, case.inputs)))), plain)
    assert ctc_in_a_row(tuple).graph.ops


def test_what_a_selective_checkpoint_keeps_is_left_to_the_plan():
    whole = Lambda(lambda m, x: square(m.linear(F.dropout(m.linear(x).sin(), 0.5))))
    chosen = capture(Lambda(checkpointed), x8).graph
    assert [op.name for op in chosen.ops] == [op.name for op in capture(whole, x8).graph.ops]


def test_a_cache_that_is_filled_is_captured():
    for forward, attributes in ((caches_lazily, {"cache": None}), (caches_in_a_dict, {"memory": {}})):
        model = Lambda(forward)
        vars(model).update(attributes)
        wanted = model(x8)
        step = capture(model, x8)
        assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, wanted)


def test_what_the_first_call_sets_up_stays_where_the_ops_are_the_same():
    """As transformers does, which records hidden states by hooks."""
    seen: list[Any] = []

    def adds_hooks(model, x):
        if not model.hooked:
            model.linear.register_forward_hook(lambda linear, given, output: seen.append(output))
            model.hooked = True
        model.linear(x)
        return square(seen.pop())

    model = Lambda(adds_hooks)
    model.hooked = False
    step = capture(model, x8)
    assert model.hooked and len(model.linear._forward_hooks) == 1
    for _ in range(2):  # the step is the model's before and after other calls of it
        loss = answer_of(step, step.module(*bind(step, x8))).loss
        assert torch.equal(loss, model(x8))


CACHE: dict[int, Tensor] = {}


class Remembered:
    tensor: Tensor | None = None


@functools.lru_cache(maxsize=4)
def remembered_mask(size: int) -> Tensor:
    return torch.full((size, size), -1e9).triu(1)


def of_a_function(model, size):
    return remembered_mask(size)


def of_python_module(model, size):
    if size not in CACHE:
        CACHE[size] = torch.full((size, size), -1e9).triu(1)
    return CACHE[size]


def of_an_object(model, size):
    if model.remembered.tensor is None:
        model.remembered.tensor = torch.full((size, size), -1e9).triu(1)
    return model.remembered.tensor


@pytest.mark.parametrize("mask", [of_a_function, of_python_module, of_an_object])
def test_caches_outside_of_a_model_hold_nothing_of_a_refused_trace(mask):
    remembered_mask.cache_clear()
    CACHE.clear()
    model = Lambda(lambda m, x: square((m.linear(x) @ m.linear(x).T + mask(m, 4)).softmax(-1) + mask(m, 4).view(-1).sum()))
    model.remembered = Remembered()
    with pytest.raises(CaptureError, match=r"does not do the same in every call.*run the model once before"):
        capture(model, x8)
    wanted = model(x8)  # which fills the cache
    step = capture(model, x8)
    assert sum(source.kind == "constant" for source in step.sources) == 1
    assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, wanted)


@functools.lru_cache
def remembered_box() -> dict[str, Tensor]:
    return {}


@pytest.mark.parametrize("known", [False, True])
def test_a_function_that_forgets_by_itself_is_looked_at(known):
    def boxed(model, x):
        remembered_box.cache_clear()
        box = remembered_box()
        if model.fills:
            box["made"] = model.linear(x)
        return square(model.linear(x))

    model = Lambda(boxed)
    model.fills = False
    if known:
        capture(model, x8)
    model.fills = True
    capture(model, x8)
    assert not any(type(value) is FunctionalTensor for value in remembered_box().values())


def test_a_function_that_remembers_again_is_looked_at_again():
    model = Lambda(lambda m, x: square((m.linear(x) @ m.linear(x).T + remembered_mask(4)).softmax(-1)))
    for _ in range(3):
        remembered_mask.cache_clear()
        with pytest.raises(CaptureError, match="does not do the same in every call"):
            capture(model, x8)
        assert not remembered_mask.cache_info().currsize


@pytest.mark.parametrize(("imports", "scans"), [(False, 1), (True, 4)])  # as many as there are attempts
def test_all_objects_are_looked_through_once_unless_something_is_imported(imports, scans, monkeypatch):
    found, referrers = [], gc.get_referrers

    def looked_through(*things):
        if things == (type(remembered_mask),):
            found.append(None)
        return referrers(*things)

    monkeypatch.setattr(gc, "get_referrers", looked_through)

    def branches(model, x):
        if imports:
            monkeypatch.setitem(sys.modules, f"made_up_{len(found)}", SimpleNamespace())
        return square(model.linear(x)) if x.sum() > 0 else square(x)

    with pytest.raises(CaptureError, match="branches on data"):  # in several attempts
        capture(Lambda(branches), x8)
    assert len(found) == scans


def test_where_nothing_is_left_nothing_is_looked_for(monkeypatch):
    """A trace that ends has dropped all of its tensors by itself; to collect garbage took longer than the rest of a small one."""
    asked, collect = [], gc.collect
    monkeypatch.setattr(gc, "get_referrers", lambda *_: asked.append("who refers to it") or [])
    monkeypatch.setattr(gc, "collect", lambda *_: asked.append("all garbage") if gc.get_freeze_count() < 100_000 else collect())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    capture(model, (x8, torch.arange(len(x8))), loss=F.cross_entropy)
    assert not asked
    with no_collections():  # but for those that are asked for
        capture(Lambda(drops_a_ring), x8)
    assert not asked


def drops_a_ring(model, x):
    y = model.linear(x)
    ring = [y]
    ring.append(ring)
    return square(y)


LOOP: list[object] = []


class _Unhashable(type):
    __hash__ = None

    def __eq__(cls, other):
        return cls is other


class Contrary(metaclass=_Unhashable):
    @property
    def __class__(self):
        raise RuntimeError("there is none")


@functools.lru_cache
def remembered_contrary() -> Contrary:
    return Contrary()


CONTRARY: list[object] = []


def test_objects_may_answer_nothing():
    CONTRARY[:] = [Contrary(), (remembered_contrary(),)]

    def fails(model, x):
        CACHE[0] = model.linear(x)
        raise ValueError("as it is")

    CACHE.clear()
    with pytest.raises(CaptureError, match="ValueError: as it is"):
        capture(Lambda(fails), x8)
    assert not CACHE
    CONTRARY.clear()
    remembered_contrary.cache_clear()


@pytest.mark.parametrize("fails", [False, True])
def test_lists_may_hold_themselves(fails):
    LOOP[:] = [LOOP, (LOOP,)]

    def forward(model, x):
        CACHE[0] = model.linear(x)
        if fails:
            raise ValueError("as it is")
        return square(CACHE[0])

    CACHE.clear()
    with pytest.raises(CaptureError, match="ValueError: as it is") if fails else contextlib.nullcontext():
        capture(Lambda(forward), x8)
    assert not CACHE and LOOP[0] is LOOP


def test_views_of_a_constant_take_no_memory():
    constant = torch.arange(8.0)

    def forward(model, x):
        return square(model.linear(x) * constant.view(1, 8)) + square(model.linear(x) * constant.view(1, 8))

    graph = capture(Lambda(forward), x8).graph
    assert not any("view" in op.name and not op.backward for op in graph.ops)


def test_what_a_call_gives_another_value_first_is_not_read():
    def forward(model, x):
        model.aux = None
        for _ in range(2):
            loss = square(model.linear(x))
            model.aux = loss if model.aux is None else model.aux + loss
        return model.aux

    model = Lambda(forward)
    model.aux = None
    step = capture(model, x8)
    assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, model(x8))


def test_libraries_may_have_another_way_where_a_fake_kernel_refuses():
    def forward(model, x):
        if not torch.compiler.is_compiling():
            raise RuntimeError("no fake of this kernel")
        return square(model.linear(x))

    assert capture(Lambda(forward), x8).graph.ops


def checks_data_beside(condition: Tensor) -> None:
    if not torch.compiler.is_compiling() and not condition.all():
        raise ValueError("100 or more")
    torch._check_tensor_all(condition)


def checks_all(condition: Tensor) -> None:
    if is_torchdynamo_compiling():
        torch._check_tensor_all(condition)
    elif not condition.all():
        raise ValueError("100 or more")


def is_torchdynamo_compiling() -> bool:
    return torch.compiler.is_compiling()


def is_tracing() -> bool:
    is_one_of_them = is_torchdynamo_compiling()
    is_one_of_them |= torch.jit.is_tracing()
    return is_one_of_them


def checks_all_as_transformers_do(condition: Tensor) -> None:
    if is_tracing():
        torch._check_tensor_all(condition)
    elif not condition.all():
        raise ValueError("100 or more")


def masked_unless_eager(h: Tensor) -> Tensor:
    mask = torch.ones(h.shape[1], h.shape[1]).tril().bool() if torch.compiler.is_compiling() else None
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)


def checks_all_by_name(condition: Tensor) -> None:
    if not is_compiling_by_name() and not condition.all():
        raise ValueError("100 or more")
    torch._check_tensor_all(condition)


def checks_all_in_two_places(condition: Tensor) -> None:
    """Each asks, and calls the same function if it is not compiled."""
    for _ in range(2):
        if not (torch.compiler.is_compiling() or False):
            raise_unless(condition)
    checks_all(condition)


def raise_unless(condition: Tensor) -> None:
    if not condition.all():
        raise ValueError("100 or more")


@pytest.mark.parametrize(
    "looks_at_data",
    [checks_data_beside, checks_all, checks_all_as_transformers_do, checks_all_by_name, checks_all_in_two_places],
)
def test_only_who_looks_at_data_is_told_that_it_is_compiled(looks_at_data):
    """transformers' PaliGemma checks its images' tokens in one function, and in another takes no mask unless it is compiled."""

    def forward(model, x):
        looks_at_data(x < 100)
        return square(masked_unless_eager(model.linear(x).unflatten(0, (2, -1))))

    model = Lambda(forward)
    step = capture(model, x8)
    assert not step.answers
    assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, model(x8))
    with pytest.raises((RuntimeError, ValueError)):
        step.module(*bind(step, x8 + 100))


def test_who_looks_at_data_even_where_it_is_told_has_asked_for_another_reason():
    """It is not told. The question is answered then, and each run compares the answer."""

    def forward(model, x, mask):
        raise_unless(x < 100)
        y = square(model.linear(x)) * (2 if torch.compiler.is_compiling() else 1)
        return y * 3 if mask.all() else y

    def forward_asking(model, x, mask):
        factor = 2 if torch.compiler.is_compiling() else 1
        raise_unless(x < 100)
        y = square(model.linear(x)) * factor
        return y * 3 if mask.all() else y

    batch = x8, torch.ones(3, dtype=torch.bool)
    for each in (forward, forward_asking):
        model = Lambda(each)
        step = capture(model, batch)
        assert [answer for answer, _ in step.answers] == [True, True]
        assert torch.equal(answer_of(step, step.module(*bind(step, batch))).loss, model(*batch))


def raise_unless_deep_inside(depth: int, condition: Tensor) -> None:
    if depth:
        raise_unless_deep_inside(depth - 1, condition)
    else:
        raise_unless(condition)


@pytest.mark.parametrize(("depth", "answers"), [(2, []), (9, [True])])
def test_who_asks_far_from_where_data_is_looked_at_is_not_told(depth, answers):
    def forward(model, x):
        if not torch.compiler.is_compiling():
            raise_unless_deep_inside(depth, x < 100)
        return square(model.linear(x))

    model = Lambda(forward)
    step = capture(model, x8)
    assert [answer for answer, _ in step.answers] == answers
    assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, model(x8))


def test_what_is_written_into_a_constant_is_asked_for():
    def forward(model, x, mask):
        answers = torch.zeros(2, dtype=torch.bool)
        view = answers[1:]
        answers[1] = mask.all()
        return square(model.linear(x)) if view.any() else model.linear(x).sum()

    full, empty = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    for taken, other in ((full, empty), (empty, full)):
        step = capture(Lambda(forward), (x8, taken))
        assert [answer for answer, _ in step.answers] == [bool(taken[0])]
        step.module(*bind(step, (x8, taken)))
        with pytest.raises(BranchChanged, match=f"told {bool(taken[0])}, at .*view.any.*now it is {bool(other[0])}"):
            step.module(*bind(step, (x8, other)))


def test_sizes_asked_for_are_compared():
    step = capture(Lambda(as_many_as_asked), (x8, torch.tensor([2, 3]), torch.tensor([1, 0])))
    assert [answer for answer, _ in step.answers] == [(2,), (3,), (2, 3), False]
    for sizes, mask, message in (
        ([2, 4], [1, 0], r"told \(3,\), at .*tolist.*now it is \(4,\)"),
        ([2, 3], [1, 1], "told False, at .*mask.bool.*now it is True"),
    ):
        with pytest.raises(BranchChanged, match=message):
            step.module(*bind(step, (x8, torch.tensor(sizes), torch.tensor(mask))))


def selects(m, x, mask):
    return square(m.linear(x).masked_select(mask[:, None]))


def indexes(m, x, mask):
    y = m.linear(x)
    y[mask] = m.linear.bias * 2
    y[mask, 3:] = y[mask, 3:] + y[mask][:, :5]
    return square(y)


def names_places(m, x, mask):
    y, rows, (places,) = m.linear(x), mask.nonzero(), torch.where(mask)
    return square(y.index_add(0, places, y[rows[:, 0]])) * len(rows)


def changes_its_mask(m, x, mask):
    mask, y = mask.clone(), m.linear(x)
    first = square(y.detach()[mask])
    mask[0] = False
    return first + square(y[mask])


def changes_places(m, x, mask):
    y, places = m.linear(x), mask.nonzero()
    places.clamp_(max=1)
    return square(y[mask]) + square(y[places[:, 0]]) + square(y[mask.nonzero()[:, 0]])


@pytest.mark.parametrize("forward", [selects, indexes, names_places, changes_its_mask, changes_places])
def test_of_a_mask_only_the_number_is_asked(forward):
    model = Lambda(forward)
    mask, other, more = (torch.tensor(each, dtype=torch.bool) for each in ([1, 0, 1, 0], [1, 0, 0, 1], [1, 1, 1, 0]))
    step = capture(model, (x8, mask))
    assert len(step.answers) == {changes_its_mask: 2, names_places: 2, changes_places: 3}.get(forward, 1)
    for given in (mask, other):
        case = lambda_case(forward, x8, given)
        case.model = model
        torch.manual_seed(7)
        assert_same(answer_of(step, step.module(*bind(step, (x8, given)))), plain_answer(case))
    with pytest.raises(BranchChanged, match=r"told \((2|16),\), at .*test_capture"):
        step.module(*bind(step, (x8, more)))


class NamesProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_product_with_what_is_frozen_takes_the_kernel_of_eager_execution():
    """Before torch 2.15 that of many matrices."""
    model, x = FrozenProduct(), torch.randn(4, 4, 32)
    step = capture(model, x)
    with NamesProducts() as plain:
        model(x).backward()
    model.zero_grad()
    assert sorted(plain.names) == sorted(str(node.target) for node in step.calls if "mm" in str(node.target))
    torch.manual_seed(7)
    assert_same(answer_of(step, step.module(*bind(step, x))), plain_answer(Case(model, x, lambda m: m(x))))


def test_layouts_are_those_with_onednn_or_without_whatever_was_traced_before():
    """PyTorch remembers stand-ins, and not whether there was oneDNN."""
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.Tanh()).to(memory_format=torch.channels_last_3d)
    x = torch.randn(4, 3, 4, 6, 4).contiguous(memory_format=torch.channels_last_3d)
    for enabled in (True, False, True):
        with onednn_as(enabled):
            step = capture(model, x, loss=square)
            (call,) = (node for node in step.calls if node.target is torch.ops.aten.convolution.default)
            assert call.meta["val"].stride() == model[0](x).stride()


def test_a_wrong_guess_is_refused_when_run():
    """Half precision overflows here, in tensors too large to be computed beside the trace."""
    step = capture(Lambda(overflows_in_half), x8)
    with pytest.raises(BranchChanged, match=r"told False, at .*isinf\(large\)"):
        step.module(*bind(step, x8))


class DrawsZero(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        drawn = func(*args, **(kwargs or {}))
        return drawn.zero_() if func is torch.ops.aten.rand.default else drawn


@pytest.mark.parametrize(
    ("dropped", "told"), [(lambda: not torch.rand(1) > 0.0, True), (lambda: torch.rand([]) <= -1e-60, False)]
)  # -1e-60 is zero as it is compared
def test_no_draw_is_zero_but_where_it_is(dropped, told):
    """As adapters ask for each of them, whether it is dropped."""

    def forward(model, x):
        return x.sum() if dropped() else square(model.linear(x))

    step = capture(Lambda(forward), x8)
    assert [answer for answer, _ in step.answers] == [told]
    case = lambda_case(forward, x8)
    torch.manual_seed(7)
    assert_same(answer_of(step, step.module(*bind(step, x8))), plain_answer(case))
    with DrawsZero(), pytest.raises(BranchChanged, match=f"told {told}, at .*now it is {not told}"):
        step.module(*bind(step, x8))


def test_what_compilers_need_not_ask_is_not_asked():
    """Else a step for full masks would be refused others, although it need not be."""

    def forward(model, x, mask, sizes):
        y = model.linear(x)[: sizes.tolist()[0]]
        if torch.compiler.is_compiling() or not mask.all():
            y = torch.where(mask, y, 0)
        return square(y)

    step = capture(Lambda(forward), (x8, torch.ones(8, dtype=torch.bool), torch.tensor([3])))
    assert [answer for answer, _ in step.answers] == [(3,)]


def test_refusals_name_the_line():
    with pytest.raises(CaptureError, match=r"branches on data.*test_capture.py:\d+: .*if x.sum\(\) > 0"):
        REFUSED["branch on data"][0]()
    with pytest.raises(CaptureError, match=r"cannot be traced.*test_capture.py:\d+: "):
        capture(Lambda(lambda m, x: square(m.linear(x) @ m.linear(x))), x8)


def test_refusals_name_the_line_of_a_library_called_like_torch():
    of_torch = traceback.FrameSummary(f"{Path(torch.__file__).parent}{os.sep}functional.py", 1, "f", line="of torch")
    of_library = traceback.FrameSummary(f"{Path(torch.__file__).parent}vision{os.sep}transform.py", 2, "f", line="of torchvision")
    of_user = traceback.FrameSummary("train.py", 3, "f", line="of the user")
    assert place_among([of_user, of_library, of_torch]).endswith("transform.py:2: of torchvision")
    assert place_among([of_user, of_torch]).endswith("train.py:3: of the user")


def test_a_first_call_that_differs_sets_up_nothing():
    model = Lambda(first_call_differs)
    model.started = False
    with pytest.raises(CaptureError, match="started"):
        capture(model, x8)
    assert not model.started


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_absent_device_is_named():
    with pytest.raises(CaptureError, match="no CUDA device is available"):
        capture(linear(), x8, loss=square, device="cuda")


def test_a_trace_that_ends_in_the_backward_says_nothing_but_the_error():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(CaptureError, match="seeds a generator"):
            capture(Lambda(draws_again), x8)
    assert not said


def elsewhere(do):
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def test_other_threads_may_set_the_state_of_generators():
    """As checkpoints of theirs do."""
    states = []

    def forward(model, x):
        states.append(torch.get_rng_state())
        x = F.dropout(model.linear(x))
        elsewhere(lambda: torch.manual_seed(7))
        elsewhere(lambda: torch.set_rng_state(states.pop()))  # as it was found by a thread, in the trace
        return square(F.dropout(x))

    model = Lambda(forward)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    capture(model, x8)
    assert torch.equal(torch.get_rng_state(), before)
    model = Lambda(lambda m, x: (square(m.linear(x)), elsewhere(lambda: torch.set_rng_state(before)))[0])
    torch.manual_seed(4)
    capture(model, x8)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_is_refused_though_another_thread_sets_one_afterwards():
    def forward(model, x):
        torch.manual_seed(1)
        elsewhere(lambda: torch.manual_seed(2))
        return square(F.dropout(model.linear(x)))

    with pytest.raises(CaptureError, match="seeds a generator or sets its state"):
        capture(Lambda(forward), x8)


def test_what_is_refused_to_a_forward_is_not_to_other_threads():
    other, seen = nn.Parameter(torch.ones(3)), []

    def train() -> None:
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                other.square().sum().backward()
            other.data = other.data + 1
        except Exception as error:
            seen.append(error)

    def forward(m: Lambda, x: Tensor) -> Tensor:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        return square(m.linear(x))

    step = capture(Lambda(forward), x8)
    assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, step.eager(x8).detach())
    assert not seen and not torch.equal(other, torch.ones(3))


def test_captures_of_several_threads_wait_for_each_other():
    steps: list[Step] = []
    threads = [threading.Thread(target=lambda: steps.append(capture(linear(), x8, loss=square))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({step.graph.fingerprint() for step in steps}) == 1
    assert len(steps) == 4


def test_refusal_keeps_its_cause():
    with pytest.raises(CaptureError) as refusal:
        REFUSED["branch on data"][0]()
    assert isinstance(refusal.value.__cause__, torch._subclasses.fake_tensor.DataDependentOutputException)


def test_bind_names_what_differs():
    step = capture(Lambda(lambda m, x, scale: square(m.linear(x) * scale)), (x8, 2))
    for inputs, message in [
        ((x8[:3], 2), r"inputs\[0\] has shape \(3, 8\), but the step was captured with \(4, 8\)"),
        ((x8.double(), 2), r"inputs\[0\] has dtype torch.float64, but .* torch.float32"),
        ((x8.to("meta"), 2), r"inputs\[0\] is on meta, but the step was captured on cpu"),
        ((x8.t().contiguous().t(), 2), r"inputs\[0\] has strides \(1, 4\), but the step was captured with \(8, 1\)"),
        ((x8.clone().requires_grad_(), 2), r"inputs\[0\] requires a gradient"),
        ((x8, 3), r"inputs\[1\] is 3, but the step was captured with 2"),
        ((2, x8), r"inputs\[1\] is a tensor, but the step was captured with 2"),
        ((2, 2), r"inputs\[0\] is of type int, but the step was captured with a tensor"),
        ((x8,), "another form"),
        ({"x": x8, "scale": 2}, "another form"),
    ]:
        with pytest.raises(InputError, match=message):
            bind(step, inputs)
    with pytest.raises(InputError, match=r"tangent has shape \(2,\)"):
        bind(step, (x8, 2), torch.ones(2))
    half = torch.tensor(0.5)
    with torch.no_grad():
        whole = answer_of(step, step.module(*bind(step, (x8, 2))))
        scaled = answer_of(step, step.module(*bind(step, (x8, 2), half)))
    assert torch.equal(scaled.gradients["linear.bias"], whole.gradients["linear.bias"] / 2)
    step.model.eval()
    with pytest.raises(InputError, match="between training and evaluation"):
        bind(step, (x8, 2))
    step.model.train()
    step.model.linear.bias.requires_grad_(False)
    with pytest.raises(InputError, match=r"linear.bias requires no gradient, but did when the step was captured"):
        bind(step, (x8, 2))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_neither_copied_nor_pickled(take):
    step = capture(linear(), x8, loss=square)
    with pytest.raises(InputError, match="the captured step of Linear belongs to its model"):
        take(step)
    assert answer_of(step, step.module(*bind(step, x8))).loss.isfinite()


def test_nan_among_the_inputs_is_itself():
    step = capture(Lambda(lambda m, x, fill: square(m.linear(x).nan_to_num(fill))), (x8, float("nan")))
    bind(step, (x8, float("nan")))
    with pytest.raises(InputError, match=r"inputs\[1\] is 0.0, but the step was captured with nan"):
        bind(step, (x8, 0.0))


def test_zeros_of_another_sign_are_other_numbers():
    step = capture(Lambda(lambda m, x, sign: square(m.linear(x) * torch.copysign(x8, torch.tensor(sign)))), (x8, 0.0))
    bind(step, (x8, float("0")))
    with pytest.raises(InputError, match=r"inputs\[1\] is -0.0, but the step was captured with 0.0"):
        bind(step, (x8, -0.0))
    for zero, other in ((0.0, -0.0), (1 + 0j, complex(1, -0.0)), (np.float32(0), np.float32(-0.0))):
        assert same_plain(zero, type(zero)(zero)) and not same_plain(zero, other)


def test_dtypes_and_devices_may_be_inputs():
    step = capture(Lambda(lambda m, x, d, at: square(m.linear(x).to(at, d).float())), (x8, torch.float64, torch.device("cpu")))
    bind(step, (x8, torch.float64, torch.device("cpu")))
    with pytest.raises(InputError, match=r"inputs\[1\] is torch.float32, but the step was captured with torch.float64"):
        bind(step, (x8, torch.float32, torch.device("cpu")))


class Editable(nn.Module):
    """Everything a forward can depend on and a user can edit afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[0].weight
        self.offset = torch.ones(8)
        self.scale = 2.0
        self.options = {"shift": 1.0}
        self.table = np.ones(3)
        self.factor = np.array(2.0)
        self.code = bytearray(b"12")
        self.recent = deque([1.0, 2.0])
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.tied(self.layers(self.drop(x))) * self.scale + self.offset * self.table[0] * self.recent[0]
        y = y * float(self.factor) * self.code[0]
        self.last = y.detach()
        return y + self.options["shift"]


def edit(owner: str, key: str, value: Any) -> Callable[[Editable], None]:
    return lambda model: setattr(model.get_submodule(owner), key, value)


EDITS: dict[str, tuple[Callable[[Editable], object], str]] = {
    "dropout": (edit("drop", "p", 0.5), r"drop\.p is 0\.5, but the step was captured with 0\.25"),
    "number": (edit("", "scale", 3.0), r"^scale is 3\.0, but the step was captured with 2\.0; capture it again"),
    "tensor": (edit("", "offset", torch.zeros(8)), "^offset is another tensor"),
    "module": (edit("", "drop", nn.Dropout(0.25)), "the modules in the model are others"),
    "deep module": (lambda m: m.layers.append(nn.ReLU()), "the modules in layers are others"),
    "deleted module": (lambda m: m.layers.__delitem__(1), "the modules in layers are others"),
    "class": (edit("layers.1", "__class__", nn.Tanh), r"layers\.1 was of class ReLU"),
    "forward": (edit("layers.1", "forward", lambda x: x), r"layers\.1\.forward was set"),
    "hook": (lambda m: m.layers.register_forward_hook(lambda *_: None), "layers has other hooks"),
    "early hook": (lambda m: m.tied.register_forward_pre_hook(lambda *_: None), "tied has other hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *_: None), "the model has other hooks"),
    "option": (lambda m: m.options.update(shift=2.0), "the entries of options are others"),
    "array": (lambda m: m.table.__setitem__(0, 2.0), "the entries of table are others"),
    "array of no dimension": (lambda m: m.factor.__setitem__((), 3.0), "the entries of factor are others"),
    "bytes": (lambda m: m.code.__setitem__(0, 3), "the entries of code are others"),
    "deque": (lambda m: m.recent.appendleft(3.0), "the entries of recent are others"),
    "deleted option": (lambda m: delattr(m, "scale"), "scale was removed"),
    "untied": (edit("tied", "weight", nn.Parameter(torch.ones(8, 8))), r"tied\.weight and layers\.0\.weight were one tensor"),
    "parameter": (edit("tied", "bias", None), r"tied\.bias was removed"),
    "mode": (lambda m: m.drop.eval(), "switched between training and evaluation"),
}


@pytest.mark.parametrize("name", EDITS)
def test_bind_notices_what_was_edited(name):
    model = Editable()
    step = capture(model, x8, loss=square)
    bind(step, x8)
    change, message = EDITS[name]
    change(model)
    with pytest.raises(InputError, match=message) as refusal:
        bind(step, x8)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", [lambda m: delattr(m, "layers"), edit("", "layers", None), lambda m: m._modules.pop("layers")])
def test_a_part_may_be_gone_before_the_first_call(change):
    model = Editable()
    step = capture(model, x8, loss=square)
    module = PlannedModule(step, keep_all(step.graph), 10**9)
    change(model)
    with pytest.raises(InputError, match="the modules in the model are others"):
        bind(step, x8)
    with pytest.raises(InputError, match=r"^layers\.0\.weight was removed after the step was captured; capture it again$"):
        module(x8)


def test_what_the_forward_writes_to_an_array_is_no_edit():
    def forward(m: Lambda, x: Tensor) -> Tensor:
        m.calls[0] += 1
        m.recent.append(1)
        return square(m.linear(x))

    model = Lambda(forward)
    model.calls, model.recent = np.zeros(2), deque([0])
    step = capture(model, x8)
    model(x8)
    bind(step, x8)


def test_an_array_of_which_a_constant_shows_a_part_is_watched():
    model = Lambda(lambda m, x: square(m.linear(x) * torch.from_numpy(m.table[:8])) * float(m.table[9]))
    model.table = np.ones(16, dtype=np.float32)
    step = capture(model, x8)
    model.table[9] = 3
    with pytest.raises(InputError, match="the entries of table are others"):
        bind(step, x8)


@pytest.mark.parametrize("read", [torch.from_numpy, torch.tensor])
def test_what_is_written_to_an_array_that_a_constant_shows_is_seen(read):
    model = Lambda(lambda m, x: square(m.linear(x) * read(m.table)))
    model.table = np.ones(16, dtype=np.float32)[::2]
    step = capture(model, x8)
    model.table[1] = 3
    with torch.no_grad():
        assert torch.equal(answer_of(step, step.module(*bind(step, x8))).loss, model(x8))


def test_a_part_that_is_added_and_taken_away_again_is_no_edit():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    step = capture(model, x8, loss=square)
    model.append(nn.ReLU())
    with pytest.raises(InputError, match="the modules in the model are others"):
        bind(step, x8)
    del model[-1]
    bind(step, x8)


def test_bind_notices_an_edited_loss():
    loss = nn.CrossEntropyLoss(weight=torch.ones(8), label_smoothing=0.1)
    target = torch.arange(4)
    step = capture(linear(), (x8, target), loss=loss)
    with torch.no_grad():
        before = answer_of(step, step.module(*bind(step, (x8, target)))).loss
        loss.weight[1] = 3.0  # in place: the same tensor
        after = answer_of(step, step.module(*bind(step, (x8, target)))).loss
    assert torch.equal(after, step.eager((x8, target)).detach())
    assert not torch.equal(before, after)
    loss.weight = torch.full((8,), 2.0)
    with pytest.raises(InputError, match="the tensors of loss are others"):
        bind(step, (x8, target))


def test_bind_notices_another_default_dtype() -> None:
    step = capture(Lambda(lambda m, x: square(m.linear(x) * torch.ones(8))), x8)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(InputError, match=r"^the default dtype is torch\.float64, but was torch\.float32 when"):
            bind(step, x8)
    finally:
        torch.set_default_dtype(torch.float32)
    bind(step, x8)


def test_bind_notices_what_lies_in_the_memory_of_a_buffer_that_changes() -> None:
    def forward(model: Lambda, x: Tensor) -> Tensor:
        model.moving.add_(1)
        return square(model.linear(x) * model.moving * model.other)

    model, memory = Lambda(forward), torch.zeros(16)
    model.moving = memory[:8]
    model.register_buffer("other", memory[8:])
    step = capture(model, x8[:1])
    bind(step, x8[:1])  # side by side in one memory, as they were
    with pytest.raises(InputError, match=r"^moving, which the step changes, shares its memory with inputs, but did not"):
        bind(step, model.moving[None])
    model.other = torch.ones(8)
    apart = capture(model, x8)
    model.other = model.moving
    with pytest.raises(InputError, match=r"^moving, which the step changes, shares its memory with other, but did not"):
        bind(apart, x8)
    model.other = torch.ones(8, requires_grad=True)
    trainable = capture(model, x8)
    model.other = model.moving.detach().requires_grad_()
    with pytest.raises(InputError, match=r"^moving, which the step changes, shares its memory with other, but did not"):
        bind(trainable, x8)


def test_bind_ignores_what_no_forward_read():
    model = Editable()
    model.layers[0].register_forward_hook(lambda *_: None)
    step = capture(model, x8, loss=square)
    model(x8)  # sets self.last
    model.epoch = 7
    model.note = "seen"
    model.scale = float("2")
    model.layers = model.layers
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    bind(step, x8)
    handle = model.register_forward_hook(lambda *_: None)
    handle.remove()
    bind(step, x8)


def test_bind_reads_the_model_as_it_is_now():
    case = mlp_case()
    step = captured(case)
    with torch.no_grad():
        before = answer_of(step, step.module(*bind(step, case.inputs)))
        for p in case.model.parameters():
            p.mul_(1.5)
        torch.manual_seed(7)
        after = answer_of(step, step.module(*bind(step, case.inputs)))
    assert_same(after, plain_answer(case))
    assert not torch.equal(before.loss, after.loss)


def test_a_call_that_differs_from_the_one_before_is_looked_at_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    step = capture(model, (x, y), loss=F.mse_loss)
    weight = model[0].weight

    def bind_twice() -> None:
        for _ in range(2):
            assert [t.shape for t in bind(step, (x, y))] == [
                n.meta["val"].shape for n in step.module.graph.find_nodes(op="placeholder")
            ]

    bind_twice()
    for wrong, words in (
        ((x[:5], y), r"shape \(5, 4\)"),
        ((x.double(), y), "dtype"),
        ((x.clone().requires_grad_(), y), "requires a gradient"),
        ((x.to("meta"), y), "is on meta"),
        ((x.t().contiguous().t(), y), "strides"),
    ):
        with pytest.raises(InputError, match=words):
            bind(step, wrong)
        bind_twice()
    weight.requires_grad_(False)
    with pytest.raises(InputError, match="requires no gradient, but did"):
        bind(step, (x, y))
    weight.requires_grad_(True)
    before, weight.data = weight.data, torch.zeros(4, 5)
    with pytest.raises(InputError, match=r"0\.weight has shape \(4, 5\)"):
        bind(step, (x, y))
    weight.data = before.double()
    with pytest.raises(InputError, match=r"0\.weight has dtype"):
        bind(step, (x, y))
    weight.data = before
    bind_twice()
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    bind_twice()
    assert any(t.equal(torch.ones(4, 4)) for t in bind(step, (x, y)))
    model[1].running_mean = None
    with pytest.raises(InputError, match="running_mean"):
        bind(step, (x, y))


class Permuted(nn.Module):
    """A linear layer whose output goes through ``between`` with its last two dimensions exchanged."""

    def __init__(self, between: nn.Module, width: int, *, back: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.between = between
        self.last = nn.Linear(width, 4) if back else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.first(x).transpose(1, 2))
        return y if self.last is None else self.last(y.transpose(1, 2).reshape(-1, y.shape[1]))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.normal(x.detach(), x.detach().abs())


def assert_trains_as_plain_pytorch(model: nn.Module, inputs: Any, loss: Loss) -> None:
    """One planned training step gives the loss, gradients and buffers of plain PyTorch; its tensors are laid out as planned."""
    plain = copy.deepcopy(model)
    planned = plan(model, 1.0, inputs=inputs, loss=loss)
    x, *targets = inputs if isinstance(inputs, tuple) else (inputs,)
    torch.manual_seed(5)
    expected = loss(plain(x), *targets)
    expected.backward()
    torch.manual_seed(5)
    found = planned.module()(x, *targets)
    found.backward()
    assert torch.equal(found, expected)
    for (name, parameter), twin in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad), name
    for (name, buffer), twin in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, twin), name
    assert_layouts(planned.step, inputs)


def assert_layouts(step: Step, inputs: Inputs, *, least: int = 2) -> None:
    """Every tensor of the step is laid out as its node says, in dimensions of at least so many elements."""

    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "call_function" or result is None:
                return result
            for tensor, stand_in in zip(tree_leaves(result), tree_leaves(n.meta["val"]), strict=True):
                if isinstance(tensor, Tensor):
                    assert tensor.shape == stand_in.shape
                    pairs = zip(tensor.shape, tensor.stride(), stand_in.stride(), strict=True)
                    assert all(a == b for size, a, b in pairs if size >= least), (
                        n.format_node(),
                        tensor.stride(),
                        stand_in.stride(),
                    )
            return result

    with torch.no_grad():
        Check(step.module).run(*bind(step, inputs))


SHAPES = [(2, 6, 8), (4, 40, 96)]  # the second is too large to ask the kernels about as it is


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_of_a_permuted_output(loss: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
    """The kernels of their backward make contiguous gradients, unlike their stand-ins in a trace."""
    a, b, c = shape
    model = Permuted(nn.Identity(), c, back=False)
    assert_trains_as_plain_pytorch(model, (torch.randn(a, b, c), torch.randn(a, c, b)), loss)


BETWEEN = {
    "batch norm": nn.BatchNorm1d,
    "batch norm in evaluation": lambda width: nn.BatchNorm1d(width).eval(),
    "log sigmoid": lambda width: nn.LogSigmoid(),
    "normal": lambda width: Noise(),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BETWEEN)
def test_ops_on_permuted_dimensions(name: str, shape: tuple[int, int, int]) -> None:
    assert_trains_as_plain_pytorch(Permuted(BETWEEN[name](shape[-1]), shape[-1]), torch.randn(shape), square)


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 6, 20, 64)])
def test_gated_units_of_permuted_images(shape: tuple[int, ...]) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(shape[-1], shape[-1])

        def forward(self, x: Tensor) -> Tensor:
            return F.glu(self.linear(x).permute(0, 3, 1, 2), 1).transpose(-1, -2).reshape(-1)

    assert_trains_as_plain_pytorch(Gated(), torch.randn(shape), square)


def test_batch_norm_of_a_batch_alone_is_that_of_cudnn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel runs on CUDA only: here the graph is looked at."""
    monkeypatch.setattr("graphs.rewriting.rewrites.takes_cudnn_batch_norm", lambda data, *_: data.dim() == 4)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.InstanceNorm2d(4, affine=True)
    )
    step = capture(model, torch.randn(2, 3, 8, 8), loss=square)
    aten = torch.ops.aten
    calls = [node for node in step.calls if "batch_norm" in str(node.target)]
    first, second = (node for node in calls if node.target is aten.cudnn_batch_norm.default)
    of_second, of_first = (node for node in calls if node.target is aten.batch_norm_backward.default)
    assert len(calls) == 4
    for forward, backward in ((first, of_first), (second, of_second)):
        assert backward.args[-1].args == (forward, 3)  # what cuDNN keeps for its own backward


def test_batch_norm_of_cudnn_is_asked_where_it_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its operators run PyTorch's own kernels."""
    asked = []
    for module in ("rewriting.rewrites", "as_eager.layouts"):
        monkeypatch.setattr(f"graphs.{module}.takes_cudnn_batch_norm", lambda *given: asked.append(given) or True)
    assert_trains_as_plain_pytorch(Permuted(nn.BatchNorm1d(96), 96), torch.randn(4, 40, 96), square)
    assert len(asked) >= 3  # for the graph, and for the layouts of both directions


def test_convolutions_choose_their_layout_as_they_do_outside_of_a_trace() -> None:
    """A trace takes oneDNN away for the sake of recurrent layers; convolutions of 16 images or more then have another layout."""
    model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.BatchNorm2d(8), nn.Hardtanh(), nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    assert_trains_as_plain_pytorch(model, torch.randn(16, 3, 24, 24).contiguous(memory_format=torch.channels_last), square)


def test_kernels_are_asked_on_little_memory_and_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, *args, **kwargs: allocated.append(size[0]) or full(size, *args, **kwargs))
    model, x = Permuted(Noise(), 96, back=False), torch.randn(64, 80, 96)
    before = torch.get_rng_state()
    capture(model, x, loss=square)
    assert torch.equal(torch.get_rng_state(), before)
    assert allocated and max(allocated) < 1 << 14


def test_the_backward_of_attention_that_reads_its_seed_on_the_host_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stand-ins have the seed on the device, whose address would end the process."""
    asked: list[Any] = []
    monkeypatch.setattr("graphs.as_eager.layouts._Layouts._ask", lambda self, mode, func, *rest: asked.append(func) or [None] * 4)
    aten = torch.ops.aten
    with kernels_layouts(), FakeTensorMode():
        q, k, v, gradient = (torch.empty(2, 64, 4, 16, device="cuda").transpose(1, 2) for _ in range(4))
        out, *saved = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)
        assert saved[1].device.type == "cuda"
        rest = out, *saved, 0.1, [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(gradient, q, k, v, None, *rest)
    assert asked == [aten._scaled_dot_product_efficient_attention.default]
    assert all(made.stride() == q.stride() for made in gradients[:3])  # as the kernel lays them out


def test_sizes_made_small_keep_their_order_and_halves() -> None:
    small = _smaller({0, 1, 3, 8, 30, 32, 64, 197})
    assert [small[n] for n in (0, 1, 3, 8)] == [0, 1, 3, 8]
    assert 8 < small[30] < small[32] < small[64] == 2 * small[32] < small[197]


@pytest.mark.parametrize(
    ("shape", "strides", "other", "expected"),
    [
        ((4, 40, 96), (3840, 96, 1), (4, 9, 10), (90, 10, 1)),
        ((4, 96, 40), (3840, 1, 96), (4, 10, 9), (90, 1, 10)),
        ((4, 96, 1, 40), (3840, 1, 96, 96), (4, 10, 1, 9), (90, 1, 10, 10)),  # of one element: as its neighbour
        ((4, 40, 96), (0, 192, 1), (4, 9, 10), (0, 20, 1)),  # expanded, and every other row of something
    ],
)
def test_layouts_are_the_same_in_other_sizes(shape: Any, strides: Any, other: Any, expected: Any) -> None:
    assert _relaid(shape, strides, other) == expected
