"""Schedules on real tensors: the same answer to the last bit, the same peak to the last byte."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import itertools
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture import Step, capture
from graphs.errors import BudgetExceeded, InputError, InvalidSchedule
from graphs.ir import Graph, Op
from graphs.torch_private.tensors import negated_view, storage_key
from online import run as online_run
from online.trial import Trials
from planner.early import in_halves
from planner.execute import PlannedModule, PlannedStep, StepResult, lower, run_step
from planner.execution.draws import drawn, generator_state, repeat_draw, undone_on_failure
from planner.execution.halves import copied_bytes
from planner.execution.statistics import updates_with_room
from planner.execution.undo import Undo
from planner.measure import StorageMeter, measure, resident_before_backward
from planner.plan import plan as plan_of
from planner.plan import with_costs
from planner.schedule import Compute, Free, Schedule, computes, keep_all, with_frees
from planner.simulate import simulate

PLENTY = 1 << 40


# Models. Each returns its own loss.


class Mlp(nn.Module):
    """Dropout, batch norm, residuals."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.gelu(norm(layer(x))), 0.3, self.training)
        return F.cross_entropy(self.head(x), y)


class Block(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Block(8, 1), nn.MaxPool2d(2), Block(8, 2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), y)


class Transformer(nn.Module):
    """Attention with dropout, tied embedding, several outputs of one op."""

    def __init__(self, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.1, self.training)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).split(d, dim=2)
        q, k, v = (z.view(b, t, 2, d // 2).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        best, _ = x.topk(4, dim=2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + best.var()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            h = F.dropout(h, 0.2)
        return self.head(h).square().mean()


class PowerIteration(nn.Module):
    """A buffer that changes during the forward and is read before and after, as in spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("u", F.normalize(torch.randn(6), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        old = self.u * 2
        with torch.no_grad():
            self.u.copy_(F.normalize(self.weight.mv(self.u), dim=0))
        sigma = self.weight.mv(self.u).norm()
        return (F.relu(x @ (self.weight / sigma)) * self.u * old.sin()).exp().mean()


def _mlp() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return Mlp(), (torch.randn(12, 16), torch.randint(5, (12,))), None


def _mlp_autocast() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return Mlp(), (torch.randn(12, 16), torch.randint(5, (12,))), torch.bfloat16


def _conv() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return ConvNet(), (torch.randn(2, 3, 8, 8), torch.randint(5, (2,))), None


def _transformer() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return Transformer(), (torch.randint(20, (2, 7)),), None


def _recurrent() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return Recurrent(), (torch.randn(3, 4, 6),), None


def _power() -> tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]:
    return PowerIteration(), (torch.randn(5, 6),), None


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], torch.dtype | None]]] = {
    "mlp": _mlp,
    "mlp-autocast": _mlp_autocast,
    "conv": _conv,
    "transformer": _transformer,
    "recurrent": _recurrent,
    "power": _power,
}


class Case:
    """A captured model and what plain PyTorch makes of it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.inputs, self.autocast = MODELS[name]()
        self.start = copy.deepcopy(self.model.state_dict())
        self.step = capture(self.model, self.inputs, name=name, autocast=self.autocast)
        self.graph = self.step.graph
        twin = copy.deepcopy(self.model)
        self.prepare()
        self.loss = self.plain(twin)
        self.loss.backward()
        self.generator_end = torch.get_rng_state()
        self.gradients = {n: p.grad for n, p in twin.named_parameters()}
        self.buffers = dict(twin.named_buffers())

    def plain(self, model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            loss: Tensor = model(*self.inputs)
        return loss

    def prepare(self) -> None:
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)

    def check(self, result: StepResult) -> None:
        assert torch.equal(result.loss, self.loss)
        _same(result.gradients, self.gradients)
        _same(result.buffers, {n: b for n, b in self.buffers.items() if n in result.buffers})
        assert torch.equal(torch.get_rng_state(), self.generator_end)

    def check_model(self) -> None:
        _same({n: p.grad for n, p in self.model.named_parameters()}, self.gradients)
        _same(dict(self.model.named_buffers()), self.buffers)
        assert torch.equal(torch.get_rng_state(), self.generator_end)


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@functools.cache
def _case(name: str) -> Case:
    return Case(name)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = _case(request.param)
    found.prepare()
    yield found
    found.prepare()


@pytest.fixture
def mlp() -> Iterator[Case]:
    found = _case("mlp")
    found.prepare()
    yield found
    found.prepare()


# Schedules.


def rematerializing(graph: Graph, seed: int, share: float = 0.06) -> Schedule:
    """Run the graph in order, forget values at random, and make again, with all it takes, what is missing."""
    chance = random.Random(seed)
    order: list[int] = []
    present: set[int] = set()

    def make(op: int) -> None:
        for v in graph.ops[op].inputs:
            if v not in graph.resident and v not in present:
                make(graph.producer[v])
        order.append(op)
        present.update(graph.ops[op].outputs)

    for op in range(len(graph.ops)):
        make(op)
        for v in sorted(present):
            if chance.random() < share and len(order) < 20 * len(graph.ops):
                present.discard(v)
    for v in sorted(graph.outputs - graph.resident):
        if v not in present:
            make(graph.producer[v])
    return with_frees(graph, order)


def dawdling(schedule: Schedule, seed: int) -> Schedule:
    """The same runs, with some frees left out: values stay longer, and are there when they are made again."""
    chance = random.Random(seed)
    return tuple(s for s in schedule if isinstance(s, Compute) or chance.random() < 0.6)


def memory_while_running(step: Step, schedule: Schedule, inputs: Any) -> list[int]:
    """Bytes in memory during each op that makes something, as the storages themselves tell."""
    seen: list[int] = []

    class Watch(StorageMeter):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            births = self.births
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.births > births:
                seen.append(step.graph.resident_bytes + self.live_bytes)
            return result

        births = 0

        def _meet(self, tensor: Tensor, *, born: bool) -> None:
            before = self._known.get(storage_key(tensor))
            super()._meet(tensor, born=born)
            self.births += born and self._known[storage_key(tensor)] is not before

    planned = PlannedStep(step, schedule)
    with Watch():
        planned(inputs)
    return seen


# The same answer, within the same bytes.


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_step_is_plain_pytorch_to_the_last_bit_and_byte(case: Case, seed: int | None) -> None:
    graph = case.graph
    schedule = keep_all(graph) if seed is None else rematerializing(graph, seed)
    assert seed is None or simulate(graph, schedule).recomputed_ops > 0
    planned = PlannedStep(case.step, schedule)
    measured = measure(lambda: planned(case.inputs), case.step.device, graph.resident_bytes, prepare=case.prepare)
    case.check(measured.result)
    assert measured.peak_bytes == planned.peak_bytes == simulate(graph, schedule).peak_bytes
    _same(case.model.state_dict(), case.start)  # nothing was written


@pytest.mark.parametrize("seed", [0, 1])
def test_storages_follow_the_schedule_op_by_op(case: Case, seed: int) -> None:
    schedule = rematerializing(case.graph, seed)
    held = simulate(case.graph, schedule).memory_bytes
    ops, values = case.graph.ops, case.graph.values
    planned = [(s.op, held[at]) for at, s in enumerate(schedule) if isinstance(s, Compute) and ops[s.op].outputs]
    found = memory_while_running(case.step, schedule, case.inputs)
    for (op, held_bytes), found_bytes in zip(planned, found, strict=True):
        less = held_bytes - found_bytes  # a batch norm makes no statistics where nobody reads them before it runs again
        assert not less or (_makes_statistics(ops[op]) and less == sum(values[v].size_bytes for v in ops[op].outputs[3:]))


def _makes_statistics(op: Op) -> bool:
    return "batch_norm_legit_functional" in op.kind


def test_batch_norm_run_again_makes_no_statistics_that_nobody_reads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())])
    x = torch.randn(8, 4, 8, 8)
    plan = plan_of(model, 0.6, inputs=x, loss=lambda out: out.square().mean(), time_limit_s=3)
    assert plan.schedule is not None
    again = [op for op in computes(plan.schedule) if _makes_statistics(plan.graph.ops[op])]
    code = plan.module().code
    assert 4 < len(again) == code.count("torch._native_batch_norm_legit(")
    assert code.count("tensors_copied(") == 1  # for the four first runs
    assert "batch_norm_legit_functional.default(" not in code


class NormedTwice(nn.Module):
    """Batch norms of many channels, so that statistics count; ``shared`` runs twice, from its own new statistics."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        self.shared = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=True):
            x = norm(lin(x)).relu()
        return self.shared(self.shared(x) + 1).square().mean()


@pytest.mark.parametrize("room", [4, 3, 1, 0])
def test_statistics_are_copied_together_where_that_adds_nothing_to_the_peak(room: int) -> None:
    """``room``: for how many the first op leaves any; the second run of what runs twice reads what the first one makes."""
    torch.manual_seed(0)
    x = torch.randn(4, 512)
    step = capture(NormedTwice(), x)
    size = 2 * 512 * 4
    plain, first = simulate(step.graph, keep_all(step.graph)), step.graph.ops[0]
    workspace_bytes = plain.peak_bytes - plain.memory_bytes[0] - room * size
    step = replace(step, graph=replace(step.graph, ops=(replace(first, workspace_bytes=workspace_bytes), *step.graph.ops[1:])))
    schedule, peak_bytes = in_halves(step.graph, keep_all(step.graph), copied_bytes(step))
    assert peak_bytes is not None
    cut = next(at for at, s in enumerate(schedule) if isinstance(s, Compute) and step.graph.ops[s.op].backward)
    updates = updates_with_room(step, schedule, cut)
    held = simulate(step.graph, schedule)
    for op in updates:
        assert _makes_statistics(step.graph.ops[op])
    missing = len(updates) * size
    for s, held_bytes in zip(schedule, held.memory_bytes, strict=True):
        missing -= size * (isinstance(s, Compute) and s.op in updates)
        assert held_bytes + missing <= held.peak_bytes
    assert len(updates) == room
    module, twin = PlannedModule(step, schedule, peak_bytes), copy.deepcopy(step.model)
    for _ in range(2):
        module(x).backward()
        twin(x).backward()
    _same({n: p.grad for n, p in step.model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(dict(step.model.named_buffers()), dict(twin.named_buffers()))
    step.model.zero_grad()
    resident_bytes = resident_before_backward(step)
    found = measure(lambda: module(x).backward(), step.device, resident_bytes, prepare=step.model.zero_grad)
    assert found.peak_bytes <= module.peak_bytes


class SeveralTimes(nn.Module):
    """One batch norm, whose later calls read what the ones before have made, and instance norms, which read what is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norm = nn.BatchNorm2d(8)
        self.norms = nn.ModuleList(nn.InstanceNorm2d(8, affine=True, track_running_stats=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(self.norm(conv(x)).relu()).tanh()
        return x.square().mean()


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_statistics_that_nobody_reads_are_not_handed_to_the_backward(share: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8, 12, 12)
    found = plan_of(SeveralTimes(), share, inputs=x, time_limit_s=2)
    step, module = found.step, found.module()
    twin = copy.deepcopy(step.model)
    resident_bytes = resident_before_backward(step)
    measured = measure(lambda: module(x).backward(), step.device, resident_bytes, prepare=step.model.zero_grad)
    assert measured.peak_bytes <= module.peak_bytes <= found.budget_bytes
    for _ in range(2):  # as often as above
        twin.zero_grad()
        twin(x).backward()
    _same({n: p.grad for n, p in step.model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(dict(step.model.named_buffers()), dict(twin.named_buffers()))


def test_buffers_are_copied_in_lists_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    step = capture(model, x, loss=lambda out: out.square().sum())
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    copy_list, copied = torch._foreach_copy_, []

    def recorded(targets: list[Tensor], contents: list[Tensor]) -> None:
        copied.append([tensor.dtype for tensor in (*targets, *contents)])
        copy_list(targets, contents)

    monkeypatch.setattr(torch, "_foreach_copy_", recorded)
    module(x)
    assert all(len(set(types)) == 1 for types in copied)
    # Targets and contents: statistics of two for the batch norms to write to; then theirs and the counts, old and new.
    assert sorted(map(len, copied)) == [4, 4, 8, 8, 8]


class Mirrored(nn.Module):
    """Changes a buffer that is read as the conjugate, or the negative, of what is there, beside an ordinary one."""

    def __init__(self, mirrored: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mirrored: Tensor
        self.count: Tensor
        self.register_buffer("mirrored", mirrored)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mirrored.mul_(0.5)
        self.count.add_(1)
        return (y * self.mirrored.abs()).sum()


@pytest.mark.parametrize("mirrored", [torch.randn(4, dtype=torch.complex64).conj(), negated_view(torch.randn(4))])
def test_buffers_that_are_mirrored_change_as_they_do_in_plain_pytorch(mirrored: Tensor) -> None:
    assert mirrored.is_conj() or mirrored.is_neg()
    model, x = Mirrored(mirrored), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    for _ in range(2):
        module(x).backward()
        plain(x).backward()
    assert torch.equal(model.mirrored.resolve_conj().resolve_neg(), plain.mirrored.resolve_conj().resolve_neg())
    assert model.count.tolist() == [2.0] * 3
    assert model.layer.weight.grad is not None
    assert plain.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)


class Plain(nn.Module):
    """Batch norms without weights: what type their kernel computes in depends on the running statistics alone."""

    def __init__(self, statistics: Callable[[], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16, affine=False) for _ in range(5))
        for norm in self.norms if statistics is not None else ():
            norm.running_mean = statistics()

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x.float().square().mean()


def test_batch_norm_of_mixed_types_run_again_is_the_same() -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(256, 16)
    plain = copy.deepcopy(model)
    plan = plan_of(model, 0.5, inputs=x, autocast=torch.bfloat16, time_limit_s=3)
    assert plan.schedule is not None
    assert sum(_makes_statistics(plan.graph.ops[op]) for op in computes(plan.schedule)) > 5
    for each in (plan.module(), plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x)
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_batch_norm_with_statistics_that_have_gaps_keeps_its_operator() -> None:
    torch.manual_seed(0)
    plan = plan_of(Plain(lambda: torch.zeros(32)[::2]), 0.5, inputs=torch.randn(256, 16), time_limit_s=3)
    assert plan.schedule is not None
    again = [op for op in computes(plan.schedule) if _makes_statistics(plan.graph.ops[op])]
    assert plan.module().code.count("batch_norm_legit_functional.default(") == len(again) > 5


@pytest.mark.parametrize("seed", [0, 1])
def test_frees_that_come_late_or_never_cost_no_more_than_planned(case: Case, seed: int) -> None:
    schedule = dawdling(rematerializing(case.graph, seed), seed)
    planned = PlannedStep(case.step, schedule)
    case.prepare()
    with StorageMeter() as meter:
        result = planned(case.inputs)
    case.check(result)
    assert case.graph.resident_bytes + meter.peak_bytes <= planned.peak_bytes


GENERATOR = torch.Generator()


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.rand(16, 8, generator=GENERATOR)
        return x.sum()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_draws_from_a_given_generator_are_repeated(seed: int | None) -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(16, 8)
    step = capture(model, x)
    graph = step.graph
    drawing = {i for i, op in enumerate(graph.ops) if op.random}
    schedule = keep_all(graph) if seed is None else rematerializing(graph, seed, share=0.2)
    runs = [op for op in computes(schedule) if op in drawing]
    assert len(drawing) == 3 and (len(runs) > 3) == (seed is not None)
    GENERATOR.manual_seed(3)
    wanted = model(x)
    wanted.backward()
    gradients, end = {n: p.grad for n, p in model.named_parameters()}, GENERATOR.get_state()
    GENERATOR.manual_seed(3)
    result = run_step(step, schedule, x)
    assert torch.equal(result.loss, wanted)
    _same(result.gradients, gradients)
    assert torch.equal(GENERATOR.get_state(), end)


@torch.library.custom_op("belady_tests::thinned", mutates_args=())
def thinned(x: Tensor) -> Tensor:
    """Dropout that has no tag to say that it draws."""
    return x * (torch.rand_like(x) > 0.3)


thinned.register_fake(torch.empty_like)
thinned.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("belady_tests::blurred_", mutates_args=("x",))
def blurred_(x: Tensor) -> None:
    """The same for one that writes to its argument."""
    x.add_(torch.rand_like(x))


class ForeignDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(thinned(layer(x)))
            noise = x.detach().clone()
            blurred_(noise)
            x = x * noise
        return x.square().mean()


@pytest.mark.parametrize("seed", range(4))
def test_operators_that_draw_without_saying_so_repeat_their_draws(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = ForeignDraws(), torch.randn(16, 8)
    step = capture(model, x)
    drawing = {i for i, op in enumerate(step.graph.ops) if op.random}
    schedule = rematerializing(step.graph, seed, share=0.3)
    assert len(drawing) == 6 < sum(op in drawing for op in computes(schedule))
    before = torch.get_rng_state()
    loss = model(x)
    loss.backward()
    gradients, end = {n: p.grad for n, p in model.named_parameters()}, torch.get_rng_state()
    torch.set_rng_state(before)
    result = run_step(step, schedule, x)
    assert torch.equal(result.loss, loss)
    _same(result.gradients, gradients)
    assert torch.equal(torch.get_rng_state(), end)


told: list[float] = []


@torch.library.custom_op("belady_tests::tell", mutates_args=())
def tell(x: Tensor) -> None:
    told.append(float(x.sum()))


tell.register_fake(lambda x: None)


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            thinned(x)
            x = F.dropout(torch.tanh(layer(x)), 0.2)
            tell(x.detach())
        return x.square().mean()


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_foreign_operators_that_nobody_reads_run_once(seed: int) -> None:
    """They may draw, so that later draws depend on them, or act on the outside world."""
    torch.manual_seed(seed)
    model, x = Unread(), torch.randn(16, 8)
    step = capture(model, x)
    assert sum(op.effect for op in step.graph.ops) == 3 and sum(op.random for op in step.graph.ops) == 6
    before = torch.get_rng_state()
    told.clear()
    loss, said = model(x), told.copy()
    end = torch.get_rng_state()
    torch.set_rng_state(before)
    told.clear()
    result = run_step(step, rematerializing(step.graph, seed, share=0.3), x)
    assert torch.equal(result.loss, loss) and told == said and len(said) == 3
    assert torch.equal(torch.get_rng_state(), end)


def test_draws_from_several_generators_are_repeated_together() -> None:
    """On CUDA an operator of somebody else's may draw on the host too."""
    where = one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def draw() -> tuple[Tensor, Tensor]:
        return torch.rand(3, generator=one), torch.rand(3, generator=other)

    before = generator_state(where)
    first = draw()
    states = drawn(before, where)
    second = draw()
    now = one.get_state(), other.get_state()
    again = repeat_draw(states, where, draw)
    assert all(map(torch.equal, again, first)) and not any(map(torch.equal, first, second))
    assert all(map(torch.equal, now, (one.get_state(), other.get_state())))


def test_what_an_interrupt_has_left_half_way_does_not_move_the_generator_later() -> None:
    """Between two lines of contextlib's, Ctrl-C leaves the context as it is, to be collected with the traceback."""
    left = undone_on_failure((torch.default_generator,))
    left.__enter__()
    torch.randn(5)
    now = torch.get_rng_state()
    del left
    gc.collect()
    assert torch.equal(torch.get_rng_state(), now)


def test_draws_of_another_thread_are_noticed() -> None:
    where = torch.device("cpu")
    for stranger in (0, 1, 2):
        before = generator_state(where)
        if stranger == 1:
            torch.rand(3)
        torch.rand(5)
        if stranger == 2:
            torch.rand(1)
        states = drawn(before, where)
        now = torch.get_rng_state()
        if stranger:
            with pytest.raises(InputError, match="another thread has drawn random numbers from the default generator of cpu"):
                repeat_draw(states, where, torch.rand, 5)
        else:
            repeat_draw(states, where, torch.rand, 5)
        assert torch.equal(torch.get_rng_state(), now)


class Edited(nn.Module):
    """Draws, has statistics, and a number of its own; ``speaks``: tells the outside world, too."""

    def __init__(self, speaks: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.scale, self.speaks = nn.Linear(8, 8), nn.BatchNorm1d(8), 2.0, speaks

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.linear(x)), 0.3) * self.scale
        if self.speaks:
            tell(x.detach())
        return x.square().mean()


@pytest.mark.parametrize("speaks", [False, True])
def test_a_call_that_finds_the_model_edited_has_not_happened(speaks: bool) -> None:
    """Calls like one before look for edits beside the forward, unless something outside would see that."""
    torch.manual_seed(0)
    model, x = Edited(speaks), torch.randn(16, 8)
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), 10**9)
    module(x).backward()
    model.zero_grad()
    before, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    told.clear()
    seen: list[int] = []
    check = step.fingerprint.check
    step.fingerprint.check = lambda: (seen.append(torch.equal(torch.get_rng_state(), before)), check())  # type: ignore[method-assign]
    model.scale = 3.0
    for gradients in (True, False):
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises(InputError, match=r"scale is 3\.0, but the step was captured with 2\.0"),
        ):
            module(x)
        assert torch.equal(torch.get_rng_state(), before) and not told
        assert all(map(torch.equal, model.buffers(), buffers)) and all(p.grad is None for p in model.parameters())
    assert seen == [speaks] * 2  # nothing was drawn before it looked
    model.scale = 2.0
    loss = module(x)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(old)
    assert torch.equal(model(x), loss) and torch.equal(torch.get_rng_state(), after)


def test_memory_given_between_the_halves_is_refused() -> None:
    """Eager PyTorch's backward reads the old memory where an op has saved a view."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    step = capture(model, x, loss=lambda y: y.square().mean())
    module = PlannedModule(step, keep_all(step.graph), 10**9)
    loss = module(x)
    model[2].weight.data = model[2].weight.data * 0.5
    with pytest.raises(
        InputError, match=r"^2\.weight was given other memory after the forward \(\.data = \.\.\.\), but backward reads"
    ):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    module(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).square().mean().backward()
    assert len(expected) == 4 and all(map(torch.equal, expected, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_batched_gradients_are_made_where_no_draw_is_repeated(share: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(256, 8)
    step = capture(model, x, loss=lambda y: y.square().mean())
    module = PlannedModule(step, plan_of(step, share, gap=0.2).schedule, 10**9)
    loss, weights, tangents = module(x), list(model.parameters()), torch.tensor([2.0, 3.0])
    if share == 1:
        batched = torch.autograd.grad(loss, weights, grad_outputs=tangents, is_grads_batched=True)
        assert all(torch.allclose(1.5 * two, three) for two, three in batched)
        return
    with pytest.raises(InputError, match=r"is_grads_batched=True .* cannot repeat their draws; call torch.autograd.grad once"):
        torch.autograd.grad(loss, weights, grad_outputs=tangents, is_grads_batched=True)


def gradients_of_two(run: Callable[..., Any], model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(x), tuple(model.parameters()), torch.tensor([2.0, 3.0]), is_grads_batched=True)


def test_batched_gradients_of_a_pool_to_one_element() -> None:
    """Channels last, PyTorch makes its result with ``as_strided``."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    step = capture(model, x, loss=lambda y: y.square().mean())
    ours = gradients_of_two(PlannedModule(step, keep_all(step.graph), 10**9), model, x)
    theirs = gradients_of_two(lambda x: model(x).square().mean(), model, x)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain)


def test_batched_gradients_of_what_is_frozen() -> None:
    """The gradient is a part of that of all the channels."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained = nn.ModuleList(nn.Conv2d(3, 8, 3) for _ in range(2))
            self.frozen = nn.Conv2d(8, 4, 1).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.frozen(F.silu(layer(x))) for layer in self.trained], 1).square().mean()

    model, x = Beside().to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8)
    step = capture(model, x)
    trained = tuple(model.trained.parameters())
    ours, theirs = (
        torch.autograd.grad(run(x), trained, torch.tensor([2.0, 3.0]), is_grads_batched=True)
        for run in (PlannedModule(step, keep_all(step.graph), 10**9), model)
    )
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain)


class Corners(nn.Module):
    def __init__(self, offset: int | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        return (y.as_strided((2, 3), (8, 1), self.offset).sin() * y.as_strided((3, 4), (8, 2)).mean()).sum()


@pytest.mark.parametrize("offset", [None, 0, 1])
def test_batched_gradients_of_what_is_strided(offset: int | None) -> None:
    model, x = Corners(offset), torch.randn(4, 8)
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), 10**9)
    if offset == 1:
        with pytest.raises(
            InputError, match="is_grads_batched=True the backward runs under vmap, where the gradient of as_strided "
        ):
            gradients_of_two(module, model, x)
        return
    for mine, plain in zip(gradients_of_two(module, model, x), gradients_of_two(model, model, x), strict=True):
        torch.testing.assert_close(mine, plain)


class Leaving(nn.Module):
    """Leaves an auxiliary loss and features for others to find."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.losses: list[Tensor] = []
        self.features: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(x))
        self.auxiliary, self.both = hidden.mean(), (hidden, x)
        self.losses.append(hidden.sum())
        self.features["hidden"] = hidden
        return self.last(hidden).square().mean()


USES: dict[str, Callable[[Any, Tensor], object]] = {
    "added": lambda model, loss: loss + model.auxiliary,
    "scaled": lambda model, loss: model.auxiliary * 0.1,
    "read": lambda model, loss: model.auxiliary.item(),
    "by a function": lambda model, loss: torch.add(loss, model.auxiliary),
    "entry of a tuple": lambda model, loss: model.both[0],
    "summed": lambda model, loss: loss + sum(model.losses),
    "stacked": lambda model, loss: torch.stack(model.losses),
    "entry of a dict": lambda model, loss: model.features["hidden"].mean(),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("use", USES)
def test_what_a_forward_leaves_beside_its_loss_is_not_taken_for_the_planned_steps(use: str, called: bool) -> None:
    torch.manual_seed(0)
    model, x = Leaving(), torch.randn(16, 8)
    if called:
        model(x)
        del model.losses[:]
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), 10**9)
    for gradients in (True, True, False):
        with torch.set_grad_enabled(gradients):
            loss = module(2 * x)
            with pytest.raises(InputError, match="a planned step gives its loss alone"):
                USES[use](model, loss)
    assert "which a planned step does not make" in repr(model.auxiliary) and len(model.losses) == 1
    copied = copy.deepcopy(model)
    with pytest.raises(InputError, match="a planned step gives its loss alone"):
        USES[use](copied, loss)
    del model.losses[:]
    want = model(2 * x)
    assert torch.equal(want, loss)
    USES[use](model, want)
    module(x)  # what the plain model has put there is no edit


class Dropouts(nn.Module):
    """With all weights one, the loss is the sum of squares of what is left, and each weight's gradients sum to twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(200_000)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.dropout(x * weight, 0.5) * 0.5
        return x.square().sum()


def test_gradients_are_right_or_refused_beside_a_thread_that_draws() -> None:
    model, x = Dropouts(), torch.ones(200_000)
    step = capture(model, x)
    module = PlannedModule(step, rematerializing(step.graph, 0), PLENTY)
    assert "repeat_draw" in module.code
    done = threading.Event()

    def prefetch() -> None:
        while not done.is_set():
            torch.randn(1000)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        for _ in range(20):
            model.zero_grad()
            try:
                loss = module(x)
                loss.backward()
            except InputError:
                continue
            for weight in model.weights:
                assert weight.grad is not None
                assert float(weight.grad.double().sum() / loss.detach().double()) == pytest.approx(2, rel=1e-3)
    finally:
        done.set()
        thread.join()


class NoisyGradient(torch.autograd.Function):
    """Its backward draws before it looks at its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (x + torch.randn(x.shape)) * gradient


class NoisyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return NoisyGradient.apply(F.dropout(self.linear(x).tanh()))  # type: ignore[no-any-return]


def test_what_a_backward_draws_is_drawn_in_the_backward() -> None:
    model, x = NoisyLoss(), torch.randn(4, 8)
    step = capture(model, x)

    def found(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.no_grad():
            made = [run(x), torch.rand(2)]
        losses = run(x), run(x)
        made += [*losses, torch.rand(2)]
        for loss in reversed(losses):
            loss.backward()
        return [*made, torch.rand(2), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    plain = found(model)
    for schedule in (keep_all(step.graph), rematerializing(step.graph, 0), rematerializing(step.graph, 1)):
        planned = found(PlannedModule(step, schedule, PLENTY))
        assert len(plain) == len(planned) == 8
        assert all(map(torch.equal, plain, planned))


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h.tanh() if torch.is_grad_enabled() else h.sigmoid()).square().mean()


def test_a_call_without_gradients_is_refused_where_the_forward_asks_for_them() -> None:
    model, x = AsksForGradients(), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x).module()
    assert torch.equal(module(x), model(x))
    with torch.no_grad(), pytest.raises(InputError, match=r"asks whether they are recorded \(in tests\.test_execute\); without"):
        module(x)
    with torch.no_grad():  # in evaluation a call is the model's
        assert torch.equal(module.eval()(x), model(x))
    plain = plan_of(Mlp(), 1.0, inputs=(torch.randn(4, 16), torch.randint(5, (4,)))).module()
    with torch.no_grad():
        assert plain(torch.randn(4, 16), torch.randint(5, (4,))).isfinite()


def test_attention_in_evaluation_asks_for_gradients() -> None:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    module = plan_of(model, 1.0, inputs=x, loss=lambda out: out.square().sum()).module()
    with torch.no_grad(), pytest.raises(InputError, match=r"in torch\.nn\.modules\.activation, torch\.nn\.modules\.transformer"):
        module(x)


def test_frozen_attention_may_be_called_without_gradients() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False).eval()
    model, x = nn.Sequential(layer, nn.Linear(8, 4)), torch.randn(2, 3, 8)
    module = plan_of(model, 1.0, inputs=x, loss=lambda out: out.square().sum()).module()
    with torch.no_grad():
        assert torch.equal(module(x), model(x).square().sum())


def test_another_thread_may_ask_for_gradients_during_a_capture() -> None:
    done = threading.Event()

    def asks() -> None:
        while not done.is_set():
            torch.is_grad_enabled()

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        assert capture(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda out: out.sum()).askers == ()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_module_is_plain_pytorch_to_the_last_bit(case: Case, seed: int | None) -> None:
    schedule = keep_all(case.graph) if seed is None else rematerializing(case.graph, seed)
    module = PlannedModule(case.step, schedule, PLENTY)
    loss = module(*case.inputs)
    assert torch.equal(loss, case.loss)
    _same(dict(case.model.named_buffers()), case.buffers)  # written once, by the call
    loss.backward()
    case.check_model()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_module_and_autograd_together_stay_within_the_plan(case: Case, seed: int | None) -> None:
    """Autograd takes over the gradients without copying them; the new buffers go once they are written."""
    graph = case.graph
    schedule = keep_all(graph) if seed is None else rematerializing(graph, seed)
    module = PlannedModule(case.step, schedule, PLENTY)

    def run() -> None:
        module(*case.inputs).backward()

    resident_bytes = resident_before_backward(case.step)
    assert resident_bytes == graph.resident_bytes - case.loss.nbytes
    measured = measure(run, case.step.device, resident_bytes, prepare=case.prepare)
    written = sum(b.nbytes for b in case.buffers.values())
    case.check_model()
    assert module.peak_bytes - written - case.loss.nbytes <= measured.peak_bytes <= module.peak_bytes
    if not written:
        assert measured.peak_bytes == module.peak_bytes


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(48, 64).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 5, 6).permute(1, 2, 0),
        torch.randn(6, 8)[:, ::2],
    ],
    ids=["columns", "channels last", "channels last in 3d", "permuted", "with gaps"],
)
def test_gradients_are_laid_out_as_autograd_wants_them(weight: Tensor) -> None:
    """It would copy them otherwise, beside what the plan counts."""

    class Shrunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.sum(0) * x).sum()  # the gradient is a view of x's

    model, x = Shrunk(), torch.randn(weight.shape[1:])
    twin = copy.deepcopy(model)
    twin(x).backward()
    wanted = twin.weight.grad
    assert wanted is not None
    step = capture(model, x)
    gradient = run_step(step, keep_all(step.graph), x).gradients["weight"]
    assert torch.equal(gradient, wanted)
    assert gradient.stride() == wanted.stride()
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    measured = measure(lambda: module(x).backward(), step.device, resident_before_backward(step), prepare=model.zero_grad)
    assert measured.peak_bytes == module.peak_bytes


def test_module_peak_is_exact_where_no_buffer_is_written() -> None:
    assert not _case("transformer").buffers, "the test above is exact on this model"


def test_gradients_are_handed_over_not_copied(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    made: list[int] = []
    run = module._run_backward

    def spy(*args: Any) -> list[Tensor]:
        gradients = run(*args)
        made.extend(g.data_ptr() for g in gradients)
        return gradients

    module.__dict__["_run_backward"] = spy
    module(*mlp.inputs).backward()
    assert sorted(made) == sorted(p.grad.data_ptr() for p in mlp.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "recurrent"])
def test_ten_optimizer_steps_give_the_same_losses(name: str) -> None:
    case = _case(name)
    case.prepare()
    twin = copy.deepcopy(case.model)
    module = PlannedModule(case.step, rematerializing(case.graph, 5), PLENTY)

    def train(parameters: Any, loss_of: Callable[[], Tensor]) -> list[float]:
        torch.manual_seed(11)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train(twin.parameters(), lambda: case.plain(twin))
    assert train(module.parameters(), lambda: module(*case.inputs)) == plain
    assert len(set(plain)) == 10
    _same(module.state_dict(), twin.state_dict())
    case.prepare()


def test_a_step_leaves_no_memory_behind(mlp: Case) -> None:
    module = PlannedModule(mlp.step, rematerializing(mlp.graph, 2), PLENTY)
    left = []
    with StorageMeter() as meter:
        for _ in range(3):
            mlp.model.zero_grad(set_to_none=True)
            module(*mlp.inputs).backward()
            left.append(meter.live_bytes)
        loss = module(*mlp.inputs)
        waiting = meter.live_bytes
        del loss
    gradients = sum(p.nbytes for p in mlp.model.parameters())
    assert left == [gradients] * 3
    assert waiting > left[0]
    assert meter.live_bytes == gradients, "a loss that is dropped takes its values along"


# Training as with any module.


def test_gradients_accumulate_and_scale_like_those_of_the_model(mlp: Case) -> None:
    twin = copy.deepcopy(mlp.model)
    module = PlannedModule(mlp.step, rematerializing(mlp.graph, 4), PLENTY)
    for run in (lambda: twin(*mlp.inputs), lambda: module(*mlp.inputs)):
        torch.manual_seed(5)
        for scale in (1024.0, 3.0):
            (run() * scale / 2).backward()
    _same({n: p.grad for n, p in mlp.model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(mlp.model.state_dict(), twin.state_dict())


def test_two_losses_may_wait_for_one_backward(mlp: Case) -> None:
    twin = copy.deepcopy(mlp.model)
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    for run in (lambda: twin(*mlp.inputs), lambda: module(*mlp.inputs)):
        torch.manual_seed(5)
        (run() + 2 * run()).backward()
    _same({n: p.grad for n, p in mlp.model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(mlp.model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4)])
def test_batch_norm_may_run_twice_before_one_backward(norm: nn.Module) -> None:
    """Its backward is handed the running statistics, but does not read them in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.LazyLinear(1), nn.Flatten(0))
    a, b = torch.randn(2, 1, 3, 6, 6)
    model(a)
    a, b = (x.expand(5, 3, 6, 6) * torch.randn(5, 3, 6, 6) for x in (a, b))
    twin = copy.deepcopy(model)
    step = capture(model, a, loss=lambda y: y.sum())
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    (twin(a).sum() + 2 * twin(b).sum()).backward()
    (module(a) + 2 * module(b)).backward()
    _same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(model.state_dict(), twin.state_dict())


def test_the_backward_may_read_the_old_content_of_an_assigned_buffer_through_a_view() -> None:
    class Replaces(nn.Module):
        b: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("b", torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) * self.b[0]
            self.b = self.b + 1
            return y.sin().sum()

    torch.manual_seed(0)
    model, x = Replaces(), torch.randn(5, 4)
    twin, step = copy.deepcopy(model), capture(model, x)
    PlannedModule(step, keep_all(step.graph), PLENTY)(x).backward()
    twin(x).backward()
    _same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    _same(model.state_dict(), twin.state_dict())


def test_old_and_new_content_of_a_buffer_may_both_be_read_late() -> None:
    """The new content is a view, so the old one cannot change places with it: that costs a copy, which counts."""

    class Drift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))
            self.register_buffer("b", torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = (self.w * (self.b * 2)).sin()
            self.b.t().add_(1)
            return (x * y * self.b).exp().sum()

    torch.manual_seed(0)
    model, x = Drift(), torch.randn(3, 4)
    step = capture(model, x)
    start, twin = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    wanted = twin(x)
    wanted.backward()
    schedules = [keep_all(step.graph), *(rematerializing(step.graph, seed, 0.3) for seed in range(10))]
    extra = set()
    for schedule in schedules:
        model.load_state_dict(start)
        module = PlannedModule(step, schedule, PLENTY)
        model.zero_grad()
        with StorageMeter() as meter:
            loss = module(x)
            loss.backward()
        assert torch.equal(loss, wanted)
        _same({"w": model.w.grad, "b": model.b}, {"w": twin.w.grad, "b": twin.b})
        assert step.graph.resident_bytes - loss.nbytes + meter.peak_bytes <= module.peak_bytes
        extra.add(module.peak_bytes - PlannedStep(step, schedule).peak_bytes)
        with pytest.raises(BudgetExceeded):
            PlannedModule(step, schedule, module.peak_bytes - 1)
    assert max(extra) > 0


def test_a_region_around_the_call_is_that_of_the_capture(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputError, match=r"captured outside of autocast, but is called under autocast of torch.bfloat16"),
    ):
        module(*mlp.inputs)
    step = with_costs(capture(mlp.model, mlp.inputs, autocast=torch.bfloat16), "roofline")
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    torch.manual_seed(0)
    loss = module(*mlp.inputs)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # nothing is cast twice
        assert torch.equal(module(*mlp.inputs), loss)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(InputError, match=r"captured under autocast of torch.bfloat16"),
    ):
        module(*mlp.inputs)


def test_without_gradients_only_the_loss_is_computed(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    with torch.no_grad(), StorageMeter() as meter:
        loss = module(*mlp.inputs)
        assert meter.live_bytes == loss.nbytes
    assert torch.equal(loss, mlp.loss)
    assert not loss.requires_grad
    _same(dict(mlp.model.named_buffers()), mlp.buffers)


def test_everything_else_is_the_models_own(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    model = mlp.model
    assert list(module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in module.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(module.modules()) == [module, *list(model.modules())[1:]]
    assert list(module.children()) == list(model.children())
    assert module.get_parameter("head.weight") is model.head.weight
    assert module.head is model.head
    assert "Mlp" in repr(module)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018
    module.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not any(p.any() for p in model.parameters())
    module.apply(lambda part: setattr(part, "visited", True))
    assert model.visited
    assert module.to(torch.float32) is module
    module.note = "kept by the model"
    assert model.note == "kept by the model"
    del module.note
    assert not hasattr(model, "note")
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InputError, match="can be neither copied nor pickled"):
            take(module)
    assert module(*mlp.inputs).isfinite()


class OddBuffers(nn.Module):
    """Buffers that are rather parameters: one gets a gradient, one changes, one is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4, requires_grad=True))
        self.register_buffer("seen", nn.Parameter(torch.zeros(4), requires_grad=False))
        self.register_buffer("shift", nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0))
        return (self.layer(x) * self.scale + self.shift + self.seen).tanh().sum()


def test_buffers_may_require_a_gradient_and_be_parameters() -> None:
    model = OddBuffers()
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    for _ in range(2):
        module(x).backward()
        twin(x).backward()
    assert torch.equal(model.seen, twin.seen)
    for name in ("layer.weight", "layer.bias", "scale", "shift"):
        ours, theirs = attrgetter(name)(model).grad, attrgetter(name)(twin).grad
        assert ours is not None and torch.equal(ours, theirs), name


class Follower(nn.Module):
    """A teacher that follows the model, changed in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = self.teacher(x + 1)
        return nn.functional.mse_loss(self.student(x), target)


def test_a_teacher_that_follows_the_model_does_so_once_a_step() -> None:
    model, x = Follower(), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    planned = plan_of(model, 0.8, inputs=x)
    assert planned.overhead is not None and planned.overhead > 0
    module, step = planned.module(), planned.step
    assert step is not None
    for trained in (module, twin):
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(x).backward()
            optimizer.step()
    _same(model.state_dict(), twin.state_dict())
    online = online_run(step, planned.budget_bytes, execute=True, inputs=x)
    assert online.outcome is not None
    optimizer.zero_grad()
    model.zero_grad()
    assert torch.equal(online.outcome.write(model), twin(x).detach())
    _same(model.state_dict(), twin.state_dict())
    trials = Trials(step, x)
    assert trials.planned(planned).max_grad_error == 0
    _same(model.state_dict(), twin.state_dict())
    first, second = (cast(Any, model.teacher[i])[0] for i in (0, 1))
    own, second.weight = second.weight, first.weight
    with pytest.raises(InputError, match="shares its memory with"):
        module(x)
    second.weight = own
    first.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"teacher\.0\.0\.weight requires a gradient, but did not"):
        module(x)


class Averaging(nn.Module):
    """Each forward puts another tensor in the place of a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).relu()
        self.seen = 0.9 * self.seen + 0.1 * hidden.detach().mean(0)
        return hidden.square().sum()


def test_trials_begin_from_the_same_buffers_and_leave_them() -> None:
    model, x = Averaging(), torch.randn(16, 8)
    before, content = model.seen, model.seen.clone()
    planned = plan_of(model, 1.0, inputs=x)
    assert planned.step is not None
    trials = Trials(planned.step, x)
    assert trials.planned(planned).max_grad_error == 0
    assert trials.online(planned.budget_bytes, "dtr").max_grad_error == 0
    assert model.seen is before and torch.equal(before, content)


class Bounded(nn.Module):
    """Weights with gradients that the forward bounds: in place (an embedding's norms, by ``.data``) and by other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, max_norm=0.5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for i, layer in enumerate(self.layers):
            weight = cast(nn.Linear, layer).weight
            if i % 2:
                weight.data.clamp_(-0.2, 0.2)
            else:
                weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
            x = layer(x).sin()
        return x.square().mean()


def test_weights_that_the_forward_bounds_are_bounded_once_a_step_and_trained() -> None:
    model, ids = Bounded(), torch.randint(0, 50, (400,))
    twin = copy.deepcopy(model)
    planned = plan_of(model, 0.7, inputs=ids)
    assert planned.overhead is not None and planned.overhead > 0
    module, step = planned.module(), planned.step
    assert step is not None and set(step.buffers) == {"words.weight", *(f"layers.{i}.weight" for i in range(6))}
    momenta = []
    for trained in (module, twin):
        optimizer = torch.optim.SGD(trained.parameters(), lr=5.0, momentum=0.9)
        for shift in range(4):
            optimizer.zero_grad()
            trained((ids + shift) % 50).backward()
            optimizer.step()
        momenta.append([optimizer.state[p]["momentum_buffer"] for p in trained.parameters()])
    _same(model.state_dict(), twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        assert torch.equal(module(ids), twin(ids))
    _same(model.state_dict(), twin.state_dict())
    assert all((weight != before[name]).any() for name, weight in step.buffers.items())
    online = online_run(step, planned.budget_bytes, execute=True, inputs=ids)
    assert online.outcome is not None
    for either in (model, twin):
        either.zero_grad()
    loss = twin(ids)
    loss.backward()
    assert torch.equal(online.outcome.write(model), loss)
    _same(model.state_dict(), twin.state_dict())
    _same({name: p.grad for name, p in model.named_parameters()}, {name: p.grad for name, p in twin.named_parameters()})


def test_what_is_added_to_a_module_is_the_models_and_no_part_of_the_plan() -> None:
    model, inputs, _ = _mlp()
    step = capture(model, inputs)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    names = list(model.state_dict())
    module.register_buffer("more", torch.zeros(2))
    module.register_parameter("bias", nn.Parameter(torch.zeros(2)))
    assert [n for n in module.state_dict() if n not in names] == ["bias", "more"]
    assert module(*inputs).isfinite()  # no forward reads them
    forward = module.forward
    module.forward = lambda *inputs: forward(*inputs) * 2  # as training libraries wrap it
    assert "forward" not in vars(model)
    del module.forward
    module.extra = nn.Linear(2, 2)
    assert "extra.weight" in dict(module.named_parameters())
    assert module.extra in module.modules()
    with pytest.raises(InputError, match="the modules in the model are others"):
        module(*inputs)
    del module.extra
    module.add_module("head", nn.Linear(16, 5))
    with pytest.raises(InputError, match="the modules in the model are others"):
        module(*inputs)


def test_attributes_of_its_own_are_not_given_away(mlp: Case) -> None:
    """A count of steps set on the module would take the place of what it runs."""
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    with pytest.raises(InputError, match="step is the planned module's own; set that of the model on the model itself"):
        module.step = 5
    module(*mlp.inputs).backward()


class Named(nn.Module):
    """What it registers has names that a planned module has attributes of."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.register_parameter("code", nn.Parameter(torch.randn(16, 8)))
        self.register_buffer("step", torch.zeros(()))
        self.register_module("planned", nn.Linear(8, 8))
        self.register_buffer(changes, torch.ones(()))
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        self.step: Tensor
        self.step += 1
        return (self.planned(x @ self.code) * self.get_buffer(self.changes) / self.step).square().mean()


@pytest.mark.parametrize("name", ["peak_bytes", "runs_a_plan", "one_at_a_time"])
def test_what_a_model_registers_has_its_name(name: str) -> None:
    """Libraries look for parameters by their names, on the module itself (FSDP2 does)."""
    model, x = Named(name), torch.randn(4, 16)
    twin = copy.deepcopy(model)
    module = plan_of(model, 1.0, inputs=x).module()
    replanning = plan_of(model, 1.0, inputs=x).module(replan=True)
    for planned in (module, replanning):
        assert planned.get_parameter("code") is model.code
        assert planned.get_buffer("step") is model.step
        assert planned.get_submodule("planned") is model.planned
        assert planned.get_buffer(name) is model.get_buffer(name)
    module(x).backward()
    twin(x).backward()
    assert torch.equal(model.code.grad, twin.code.grad)
    assert torch.equal(model.step, twin.step) and model.step == 1
    module.step = torch.zeros(())
    assert model.step == 0
    replanning(x[:2]).backward()


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


class Grey(nn.Module):
    """Of images of one channel; ``flat``: with a view behind the convolutions."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 100 if flat else 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(self.first(x)).relu())
        return squares(self.last(y.view(4, -1) if self.flat else y.mean((2, 3))))


def grey(last: bool) -> Tensor:
    return torch.randn(4, 14, 14, 1).permute(0, 3, 1, 2) if last else torch.randn(4, 1, 14, 14)


@pytest.mark.parametrize("replan", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_strides_of_single_elements_choose_kernels_as_in_plain_pytorch(last: bool, replan: bool) -> None:
    """Images of one channel are contiguous and channels last at once, and convolutions go by the strides."""
    model = Grey(flat=False)
    twin = copy.deepcopy(model)
    module = plan_of(model, 400_000, inputs=grey(not last)).module(replan=replan)
    for batch in (grey(last), grey(not last), grey(last)):
        assert batch.is_contiguous()
        module(batch).backward()
        twin(batch).backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None and torch.equal(ours.grad, plain.grad)
    assert getattr(module, "planned", 2) == 2


def test_where_strides_of_single_elements_do_not_fit_a_view_it_is_said() -> None:
    model = Grey(flat=True)
    module = plan_of(model, 400_000, inputs=grey(False)).module()
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        module(grey(True))
    assert "inputs: by the strides of a dimension of one element, channels last now" in caught.value.__notes__[0]
    assert torch.equal(module(batch := grey(False)), model(batch))


class Gamma(nn.Module):
    """Parameters of one place for each channel, in no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(1, 8, 1, 1)), nn.Parameter(torch.rand(1, 8, 1, 1))
        self.point = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.point((x * self.gamma + self.beta).relu()))


def test_parameters_may_become_channels_last_where_that_moves_no_element() -> None:
    model, x = Gamma(), torch.randn(2, 8, 5, 5)
    twin = copy.deepcopy(model)
    module = plan_of(model, 1.0, inputs=x).module()
    for each in (model, twin):
        each.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module(x).backward()
    twin(x).backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None and torch.equal(ours.grad, plain.grad)


class ByPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided((3, 4), (2, 1), x.storage_offset())).square().mean()


class Strided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided((3, 4), (2, 1))).square().mean()


def test_what_is_read_by_its_place_in_a_storage_has_to_be_there() -> None:
    data = torch.randn(3, 16)
    model = ByPlace(4, 4)
    module = plan_of(model, 1.0, inputs=data[1]).module()
    assert torch.equal(module(data[1]), model(data[1]))
    with pytest.raises(InputError, match=r"inputs begins at element 32 of its storage, but at 16 when .* \(as_strided\)"):
        module(data[2])
    strided = Strided(4, 4)
    module = plan_of(strided, 1.0, inputs=data[1]).module()
    for row in data:
        assert torch.equal(module(row), strided(row))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("at", range(1, 4))
def test_an_exchange_of_contents_that_is_interrupted_is_taken_back(
    at: int, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in inference mode, where nobody counts writes."""
    xor, calls = Tensor.bitwise_xor_, itertools.count(1)

    def interrupted(a: Tensor, b: Tensor) -> Tensor:
        if next(calls) == at:
            raise KeyboardInterrupt
        return xor(a, b)

    monkeypatch.setattr(Tensor, "bitwise_xor_", interrupted)
    buffer, undo = torch.arange(4.0), Undo(())
    with torch.inference_mode(inference), torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            undo.exchange(buffer, torch.full((4,), 7.0))
        monkeypatch.undo()
        undo.undo()
    assert torch.equal(buffer, torch.arange(4.0))


def test_the_flag_of_training_is_the_models(mlp: Case) -> None:
    model = copy.deepcopy(mlp.step.model)
    module = plan_of(model, 1.0, inputs=mlp.inputs).module()
    module.training = False
    assert not model.training


class Frozen(nn.Linear):
    """A model that cannot be switched, as frozen ones are written."""

    def train(self, mode: bool = True) -> Frozen:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return squares(super().forward(x))


def test_a_model_that_is_not_switched_stays_as_it_is() -> None:
    model, x = Frozen(4, 4), torch.randn(3, 4)
    for training in (True, False):
        model.training = training
        module = plan_of(model, 1.0, inputs=x).module()
        module.train(not training)
        assert module.training is model.training is training
        assert torch.equal(module(x), model(x))


def test_what_libraries_note_about_the_module_stays_with_it(mlp: Case) -> None:
    """Accelerate keeps the ``forward`` it has wrapped, and that it has prepared the module."""
    model = copy.deepcopy(mlp.step.model)
    model._known = 1
    step = capture(model, mlp.inputs)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    module._original_forward, module._is_prepared, module._known, module.shown = module.forward, True, 2, 3
    assert not {"_original_forward", "_is_prepared"} & vars(model).keys() and (model._known, model.shown) == (2, 3)
    assert module._is_prepared and module._original_forward == module.forward
    copy.deepcopy(model)
    del module._is_prepared
    assert not hasattr(module, "_is_prepared")


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * getattr(self, "_factor", 1.0)


def test_what_a_forward_asks_for_is_set_on_the_model() -> None:
    model, x = Asking(), torch.randn(4, 8)
    step = capture(model, x)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    module._factor = 2.0
    assert vars(model)["_factor"] == 2.0
    with pytest.raises(InputError, match="_factor was set after the step was captured"):
        module(x)


def test_hooks_of_state_dicts_are_the_models(mlp: Case) -> None:
    model = copy.deepcopy(mlp.step.model)
    step = capture(model, mlp.inputs)
    module, called = PlannedModule(step, keep_all(step.graph), PLENTY), []
    handles = [
        getattr(module, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    ]
    module.load_state_dict(model.state_dict())
    assert called == ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
    for handle in handles:
        handle.remove()
    model.load_state_dict(module.state_dict())
    assert len(called) == 4


def test_evaluation_runs_the_plain_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    step = capture(model, (x, y), loss=F.mse_loss)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    assert module(x, y).shape == ()
    module.eval()
    assert not model.training
    assert not module.training
    assert not model[2].training
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(module(x), model(x))
    _same(model.state_dict(), before)
    assert module.train() is module
    assert model[2].training
    assert module(x, y).requires_grad


def test_inputs_come_as_they_were_captured() -> None:
    class Named(nn.Linear):
        def forward(self, a: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return (super().forward(a) * scale).sum()

    torch.manual_seed(0)
    model = Named(3, 2)
    a, scale = torch.randn(4, 3), torch.randn(2)
    wanted = model(a, scale)
    for inputs in ((a, scale), {"a": a, "scale": scale}):
        step = capture(model, inputs)
        module = PlannedModule(step, keep_all(step.graph), PLENTY)
        assert torch.equal(module(inputs), wanted)
        if isinstance(inputs, dict):
            assert torch.equal(module(scale=scale, a=a), wanted)
            with pytest.raises(InputError, match="as keywords or as one dict"):
                module(a, scale=scale)
        else:
            assert torch.equal(module(a, scale), wanted)
            with pytest.raises(InputError, match="by position"):
                module(a=a, scale=scale)
            with pytest.raises(InputError, match="2 input"):
                module(a, scale, a)
    single = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    step = capture(single, a[:1])
    assert torch.equal(PlannedModule(step, keep_all(step.graph), PLENTY)(a[:1]), single(a[:1]))


@pytest.mark.parametrize("inputs", [([torch.ones(2, 3)],), ([torch.ones(2, 3)], 2), {}, (), {"xs": [torch.ones(2, 3)]}])
def test_inputs_may_be_nested_or_none_at_all(inputs: Any) -> None:
    class Listed(nn.Linear):
        def forward(self, xs: Any = None, scale: int = 1) -> Tensor:  # type: ignore[override]
            return (self.weight if xs is None else super().forward(xs[0]) * scale).square().sum()

    torch.manual_seed(0)
    model = Listed(3, 2)
    step = capture(model, inputs)
    module = PlannedModule(step, keep_all(step.graph), PLENTY)
    wanted = step.eager(inputs)
    assert torch.equal(module(inputs), wanted)
    assert torch.equal(module(**inputs) if isinstance(inputs, dict) else module(*inputs), wanted)
    if isinstance(inputs, tuple) and inputs:
        assert torch.equal(module(list(inputs)), wanted)
    with pytest.raises(InputError):
        module(torch.ones(2, 3), 1, 1)


# Failure.


def test_other_shapes_are_refused_naming_both(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    x, y = mlp.inputs
    with pytest.raises(InputError, match=r"\(11, 16\).*\(12, 16\)"):
        module(x[:11], y)
    with pytest.raises(InputError, match=r"\(11, 16\).*\(12, 16\)"):
        run_step(mlp.step, keep_all(mlp.graph), (x[:11], y))


def test_backward_of_a_loss_runs_once(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    loss = module(*mlp.inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="backward ran before on this loss, and its values are gone, which retain_graph=True"):
        loss.backward()


def test_second_derivatives_are_refused(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    loss = module(*mlp.inputs)
    with pytest.raises(InputError, match="no second derivative"):
        torch.autograd.grad(loss, list(mlp.model.parameters()), create_graph=True)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch loads its formulas with it
def test_forward_mode_derivatives_are_refused(gradients: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 1)), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=lambda y: y.sum()).module()
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        assert torch.equal(module(x), model(x).sum())
        with pytest.raises(InputError, match=r"inputs has a tangent .* call the model itself"):
            module(forward_ad.make_dual(x, x))
        with pytest.raises(InputError, match="weight has a tangent"):
            weight = model[0].weight.detach().requires_grad_()
            torch.func.functional_call(module, {"0.weight": forward_ad.make_dual(weight, weight)}, x)
    replanning = plan_of(model, 1.0, inputs=x, loss=lambda y: y.sum()).module(replan=True)
    for each in (module, replanning):
        for transform in (torch.func.grad(each), torch.func.vmap(each), lambda x, each=each: torch.func.jvp(each, (x,), (x,))):
            with pytest.raises(InputError, match=r"inputs belongs to a transform of torch\.func"):
                transform(x)


FACTOR = 1.0
CALLS = 0
SETTINGS = {"factor": 1.0, "epoch": 0}
ARGUMENTS = SimpleNamespace(factor=1.0, epoch=0)


class Scaled(nn.Module):
    shrinking = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.settings = SimpleNamespace(factor=1.0, epoch=0)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.scaled(self.linear(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * FACTOR * self.shrinking * self.settings.factor


class Squares:
    def __init__(self) -> None:
        self.factor, self.epoch = 1.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.by_name(x)

    def by_name(self, x: Tensor) -> Tensor:
        return x.square().sum() * self.factor


def annealed() -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    factor = 1.0

    def loss(x: Tensor) -> Tensor:
        return x.square().sum() * factor

    def anneal() -> None:
        nonlocal factor
        factor = 0.5

    return loss, anneal


@pytest.mark.parametrize(
    "kind", ["global", "class", "configuration", "dict", "arguments", "object", "method", "held", "partial", "closure"]
)
def test_numbers_that_come_from_outside_of_modules_may_not_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    squares, (closure, anneal) = Squares(), annealed()
    given = functools.partial(lambda x, factor: x.square().sum() * factor, factor=1.0)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "dict": lambda x: x.square().sum() * SETTINGS["factor"],
        "arguments": lambda x: x.square().sum() * ARGUMENTS.factor,
        "object": squares,
        "method": squares.by_name,
        "held": lambda x: squares(x) + 1,
        "partial": given,
        "closure": closure,
    }
    edits: dict[str, Callable[[], None]] = {
        "global": lambda: monkeypatch.setitem(globals(), "FACTOR", 0.5),
        "class": lambda: monkeypatch.setattr(Scaled, "shrinking", 0.5),
        "configuration": lambda: setattr(model.settings, "factor", 0.5),
        "dict": lambda: monkeypatch.setitem(SETTINGS, "factor", 0.5),
        "arguments": lambda: monkeypatch.setattr(ARGUMENTS, "factor", 0.5),
        "object": lambda: setattr(squares, "factor", 0.5),
        "method": lambda: setattr(squares, "factor", 0.5),
        "held": lambda: setattr(squares, "factor", 0.5),
        "partial": lambda: given.keywords.update(factor=0.5),
        "closure": anneal,
    }
    model, x = Scaled(), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=losses.get(kind, squares)).module()
    for epoch in range(2):  # what no code of the step names may change, and so may what its forward itself changes
        monkeypatch.setitem(SETTINGS, "epoch", epoch)
        ARGUMENTS.epoch = squares.epoch = model.settings.epoch = epoch
        model(x)
        module(x).backward()
    edits[kind]()
    with pytest.raises(InputError, match=r"(?i)(factor|shrinking) is 0\.5, but was 1\.0 when the step was captured"):
        module(x)


class Knob:
    factor = 1.0  # an object gets its own when it is turned
    epoch = 0


class SlottedKnob:
    __slots__ = ("epoch", "factor")

    def __init__(self) -> None:
        self.factor, self.epoch = 1.0, 0


class Dashboard:
    def __init__(self, knob: Any) -> None:
        self._knob = knob

    @property
    def factor(self) -> Any:
        return self._knob.factor

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * TURNED.factor


class Wall:
    knob: Any


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient * TURNED.factor


TURNED: Any = Knob()


def losses_of(knob: Any) -> dict[str, Callable[..., Tensor]]:
    """Losses that come to a knob by different ways."""
    holder, listed, by_name = SimpleNamespace(inner=SimpleNamespace(knob=knob)), [knob], {"a": knob}
    dashboard = Dashboard(knob)
    Wall.knob = knob
    return {
        "object in an object": lambda x: x.square().sum() * holder.inner.knob.factor,
        "default": lambda x, knob=knob: x.square().sum() * knob.factor,
        "argument": functools.partial(lambda knob, x: x.square().sum() * knob.factor, knob),
        "keyword": functools.partial(lambda x, knob: x.square().sum() * knob.factor, knob=knob),
        "entry of a list": lambda x: torch.stack([x.square().sum() * knob.factor for knob in listed]).sum(),
        "computed key": lambda x: torch.stack([x.square().sum() * by_name[key].factor for key in by_name]).sum(),
        "all entries": lambda x: torch.stack([x.square().sum() * knob.factor for knob in by_name.values()]).sum(),
        "property": lambda x: x.square().sum() * dashboard.factor,
        "static method": lambda x: dashboard.scaled(x.square().sum()),
        "class": lambda x: x.square().sum() * Wall.knob.factor,
        "backward": lambda x: Reversed.apply(x.square().sum()),  # type: ignore[no-untyped-call]
    }


@pytest.mark.parametrize("kind", [Knob, SlottedKnob])
@pytest.mark.parametrize("way", [*losses_of(Knob()), "hook", "forward of its own", "dict of a part"])
def test_numbers_are_noticed_whatever_way_leads_to_them(way: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = kind()
    monkeypatch.setitem(globals(), "TURNED", knob)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    if way == "hook":
        model.register_forward_hook(lambda _, inputs, output: output * knob.factor)
    elif way == "forward of its own":
        inner = model.forward
        model.forward = lambda x: inner(x) * knob.factor  # type: ignore[method-assign]
    elif way == "dict of a part":
        model = Scaled()
        monkeypatch.setattr(Scaled, "scaled", lambda self, x: x * self.knobs["one"].factor)
        model.knobs = {"one": knob}
    module = plan_of(model, 1.0, inputs=x, loss=losses_of(knob).get(way, lambda x: x.square().sum())).module()
    knob.epoch = 1
    module(x).backward()
    knob.factor = 0.5
    with pytest.raises(InputError, match=r"factor is 0\.5, but was 1\.0 when the step was captured"):
        module(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("of", ["Doubled.forward", "Doubled.twice", "ReLU.forward", "Reversed.backward"])
def test_other_code_of_a_class_is_noticed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Doubled()), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=losses_of(Knob())["backward"]).module()
    kind, _, name = of.partition(".")
    owner = nn.ReLU if kind == "ReLU" else globals()[kind]
    if kind == "Doubled":
        source, defined = (
            f"def {name}(self, x):\n    return {'self.twice(x)' if name == 'forward' else 'x * 2'}",
            dict[str, Any](),
        )
        for again in (False, True):  # a notebook's cell that is run once more is no change
            exec(source, globals(), defined)
            monkeypatch.setattr(owner, name, defined[name])
            if not again:
                module = plan_of(model, 1.0, inputs=x, loss=losses_of(Knob())["backward"]).module()
    module(x).backward()
    other = staticmethod(lambda ctx, gradient: gradient) if kind == "Reversed" else lambda self, x: x
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(InputError, match=rf"{kind}\.{name} is no longer .*, as when the step was captured"):
        module(x)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_are_noticed(kind: str) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=lambda x: x.square().sum()).module()
    module(x).backward()
    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    refused = pytest.raises(InputError, match=r"the hooks for all modules .* are others than when the step was captured")
    with register(lambda *_: None), refused:
        module(x)
    module(x).backward()


def test_numbers_of_numpy_are_compared_like_others() -> None:
    factor = np.float32(1.0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=lambda x: x.square().sum() * float(factor)).module()
    factor = np.float32(1.0)  # by a schedule that is still where it was
    module(x).backward()
    factor = np.float32(0.5)
    with pytest.raises(InputError, match=r"factor is .*0\.5.*, but was .*1\.0"):
        module(x)


def test_a_teacher_that_is_called_without_gradients_may_require_them() -> None:
    x, teacher = torch.randn(8, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()

    def loss(out: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (out - target).square().sum()

    def step(student: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = []
        for _ in range(3):
            student.zero_grad()
            run(x).backward()
            found += [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]
            with torch.no_grad():  # a moving average, say
                for parameter in teacher.parameters():
                    parameter.mul_(1.25)
        return found

    student = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    before = copy.deepcopy(teacher.state_dict())
    plain = step(student, lambda x: loss(student(x)))
    teacher.load_state_dict(before)
    planned = step(student, plan_of(student, 1.0, inputs=x, loss=loss).module())
    assert len(plain) == len(planned) == 12 and all(map(torch.equal, plain, planned))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())


class Shifted(torch.autograd.Function):
    """x + y, whose y is nobody's; its context has an attribute of the name that leaves of autograd have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.variable = y
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.variable, None


def test_what_a_function_keeps_is_no_leaf() -> None:
    model, x, y = nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4)

    def loss(out: Tensor) -> Tensor:
        return cast(Tensor, Shifted.apply(out, y)).square().sum()

    loss(model(x)).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plan_of(model, 1.0, inputs=x, loss=loss).module()(x).backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)


class Reduction(enum.Enum):
    SUM = 1
    MEAN = 2


def teaching(change: Callable[[dict[str, Any]], object]) -> tuple[Callable[[Tensor], Tensor], Callable[[], object]]:
    """A loss with several things around it, and a change of one of them."""
    teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval().requires_grad_(False)
    criterion, queue, weights = nn.CrossEntropyLoss(), torch.randn(6, 8), [1.0, 2.0]
    unread, activation, reduction = torch.ones(3), torch.tanh, Reduction.SUM

    def loss(x: Tensor) -> Tensor:
        distance = (x - teacher(x)).square().sum() + (activation(x) @ queue.t()).logsumexp(1).sum()
        assert unread is not None and reduction is Reduction.SUM
        return weights[0] * distance + weights[1] * criterion(x, torch.arange(4))

    def edit() -> None:
        nonlocal queue, unread, teacher, activation, reduction
        unread = torch.ones(4)
        around = {"queue": queue, "teacher": teacher, "criterion": criterion, "weights": weights}
        around |= {"activation": activation, "reduction": reduction}
        change(around)
        queue, teacher, activation, reduction = (around[name] for name in ("queue", "teacher", "activation", "reduction"))

    return loss, edit


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda around: around.update(queue=around["queue"] * 2), "queue is another tensor than"),
        (lambda around: around["teacher"].train(), r"teacher\.(0\.|1\.)?training is True, but was False"),
        (lambda around: around["teacher"][0].load_state_dict(nn.Linear(8, 8).state_dict()), None),
        (lambda around: setattr(around["criterion"], "label_smoothing", 0.2), r"label_smoothing is 0\.2, but was 0\.0"),
        (lambda around: around["weights"].reverse(), "weights is another list than"),
        (lambda around: around.update(activation=torch.relu), "activation is no longer tanh, as when"),
        (lambda around: around.update(reduction=Reduction.MEAN), r"reduction is no longer Reduction\.SUM, as when"),
        (lambda around: around.update(teacher=copy.deepcopy(around["teacher"])), "teacher is no longer Sequential, as when"),
        (lambda around: None, None),
    ],
)
def test_what_is_around_a_loss_may_change_where_the_step_sees_it(
    change: Callable[[dict[str, Any]], object], words: str | None
) -> None:
    loss, edit = teaching(change)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    module = plan_of(model, 1.0, inputs=x, loss=loss).module()
    module(x).backward()
    edit()
    with pytest.raises(InputError, match=words) if words else contextlib.nullcontext():
        assert torch.equal(module(x), loss(model(x)))


def test_the_planned_module_may_take_the_name_of_the_model() -> None:
    model: nn.Module = nn.Linear(8, 8)

    def loss(y: Tensor) -> Tensor:
        return y.square().sum() + sum(p.square().sum() for p in model.parameters())

    x = torch.randn(4, 8)
    before = loss(model(x))
    model = plan_of(model, 1.0, inputs=x, loss=loss).module()
    assert torch.equal(model(x), before)


def test_functions_may_be_defined_again_as_they_were() -> None:
    """As by a cell of a notebook that is run once more."""
    cell = """
def around(scale):
    def outer(x, power=2):
        return inner(x.pow(power)) if power else outer(x)
    def inner(x, *, shift=1.0):
        return scale * x + shift if x.requires_grad else outer(x)
    return outer
helper = around(2.0)
"""
    names: dict[str, Any] = {}
    exec(cell, names)
    loss = eval("lambda x: helper(x).sum()", names)
    x = torch.randn(4, 8)
    module = plan_of(nn.Linear(8, 8), 1.0, inputs=x, loss=loss).module()
    module(x)
    exec(cell, names)
    module(x)
    for before, after in (("(2.0)", "(3.0)"), ("power=2", "power=3"), ("shift=1.0", "shift=2.0"), ("x + shift", "x - shift")):
        exec(cell.replace(before, after), names)
        with pytest.raises(InputError, match="helper is no longer outer, as when the step was captured"):
            module(x)
    exec(cell, names)
    module(x)


def test_other_tensors_may_take_the_place_of_the_models_own_for_a_call() -> None:
    """As in training by way of an inner step (MAML), whose result is no parameter."""
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    model.register_buffer("moving", torch.ones(1))
    module = plan_of(model, 1.0, inputs=x, loss=lambda y: y.sin().sum() * model.moving.squeeze()).module()
    stepped = {name: parameter * 2 for name, parameter in model.named_parameters()} | {"moving": torch.full((1,), 3.0)}
    torch.func.functional_call(module, stepped, x).backward(retain_graph=True)  # that of the inner step
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (torch.func.functional_call(model, stepped, x).sin().sum() * 3).backward()
    assert all(torch.equal(got, p.grad) for got, p in zip(found, model.parameters(), strict=True))
    assert module.weight is model.weight and model.moving.item() == 1


@torch.library.custom_op("belady_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(0.02)  # other threads run meanwhile
    return x.clone()


slow.register_fake(torch.empty_like)
slow.register_autograd(lambda _, gradient: gradient)


class SlowNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return slow(F.dropout(self.norm(x))).square().mean()


@pytest.mark.parametrize("replan", [False, True])
def test_threads_lose_no_update_of_a_buffer(replan: bool) -> None:
    model = SlowNorm()
    module = plan_of(model, 1.0, inputs=torch.randn(99, 8)).module(replan=replan)
    sizes = (99, 99, 60, 60) if replan else (99, 99, 99, 99)
    threads = [threading.Thread(target=lambda rows=rows: module(torch.randn(rows, 8)).backward()) for rows in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.norm.num_batches_tracked == 4
    assert getattr(module, "planned", 1) == 1 + replan


def test_what_backward_reads_must_not_change_in_between(mlp: Case) -> None:
    module = PlannedModule(mlp.step, keep_all(mlp.graph), PLENTY)
    loss = module(*mlp.inputs)
    with torch.no_grad():
        mlp.model.head.weight.add_(1)
    with pytest.raises(InputError, match=r"head\.weight was changed in place"):
        loss.backward()


def test_schedule_and_budget_are_checked_before_anything_runs(mlp: Case) -> None:
    schedule = keep_all(mlp.graph)
    peak = simulate(mlp.graph, schedule).peak_bytes
    assert PlannedModule(mlp.step, schedule, peak).peak_bytes == peak
    for make in (PlannedModule, PlannedStep):
        with pytest.raises(BudgetExceeded) as caught:
            make(mlp.step, schedule, peak - 1)
        assert caught.value.budget_bytes == peak - 1
        assert caught.value.asked_bytes == peak
        assert caught.value.op in {op.name for op in mlp.graph.ops}
        with pytest.raises(InvalidSchedule):
            make(mlp.step, schedule[1:], PLENTY)
    with pytest.raises(InvalidSchedule):
        lower(mlp.step, (*schedule[:-1], Compute(len(mlp.graph.ops))))


def test_new_buffers_are_kept_within_the_budget(mlp: Case) -> None:
    """A plan may drop the new buffers and make them again with the rest of their op; a call cannot."""
    for seed in range(50):
        schedule = rematerializing(mlp.graph, seed)
        plan, module = PlannedStep(mlp.step, schedule), PlannedModule(mlp.step, schedule, PLENTY)
        if module.peak_bytes > plan.peak_bytes:
            break
    assert module.peak_bytes <= plan.peak_bytes + mlp.loss.nbytes + sum(b.nbytes for b in mlp.buffers.values())
    with pytest.raises(BudgetExceeded, match=f"the new buffers until its end; plan for {module.peak_bytes:,} bytes with start="):
        PlannedModule(mlp.step, schedule, module.peak_bytes - 1)
    assert plan_of(mlp.step, module.peak_bytes, start=schedule).module().peak_bytes <= module.peak_bytes


def test_a_backward_before_the_loss_runs_only_as_one_step() -> None:
    """An order that is valid, but that no forward and backward can be cut from."""

    class TwoParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sum() + (self.w.exp() * x).sum()

    torch.manual_seed(0)
    model, x = TwoParts(), torch.randn(4)
    step = capture(model, x)
    graph = step.graph
    loss = next(o for r, o in zip(step.results, step.module.graph.output_node().args[0], strict=True) if r.kind == "loss")
    needed = {graph.producer[step.value_of[loss]]}
    for op in range(len(graph.ops) - 1, -1, -1):
        if op in needed:
            needed.update(graph.producer[v] for v in graph.ops[op].inputs if v not in graph.resident)
    read_later = {v for op in set(range(len(graph.ops))) - needed for v in graph.ops[op].inputs}
    first = sorted(
        (i for i in range(len(graph.ops)) if i not in needed or set(graph.ops[i].outputs) & read_later),
    )
    order = first + sorted(needed - set(first))
    schedule = with_frees(graph, order)
    with pytest.raises(InvalidSchedule, match=r"the loss is not made by then.*with PlannedStep, or plan for a larger budget"):
        PlannedModule(step, schedule, PLENTY)
    wanted = model(x)
    wanted.backward()
    result = run_step(step, schedule, x)
    assert torch.equal(result.loss, wanted)
    assert torch.equal(result.gradients["w"], model.w.grad)


class Fail(TorchDispatchMode):
    """An allocation that fails: in the n-th call of an operator that makes something."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory")
            self.left -= 1
        return func(*args, **(kwargs or {}))


def test_a_failure_anywhere_leaves_everything_as_it_was(mlp: Case) -> None:
    schedule = rematerializing(mlp.graph, 1)
    planned, module = PlannedStep(mlp.step, schedule), PlannedModule(mlp.step, schedule, PLENTY)
    before = torch.get_rng_state()
    total = sum(1 for _ in computes(schedule))
    failures = 0
    for at in range(0, total, 5):
        for run in (lambda: planned(mlp.inputs), lambda: module(*mlp.inputs)):
            try:
                with Fail(at):
                    run()
            except torch.OutOfMemoryError:
                failures += 1
                assert torch.equal(torch.get_rng_state(), before)
                _same(mlp.model.state_dict(), mlp.start)
                assert all(p.grad is None for p in mlp.model.parameters())
            mlp.prepare()
    assert failures > 20
    mlp.check(planned(mlp.inputs))


def test_a_failed_backward_is_repeated_from_the_forward(mlp: Case) -> None:
    module = PlannedModule(mlp.step, rematerializing(mlp.graph, 1), PLENTY)
    loss = module(*mlp.inputs)
    with pytest.raises(torch.OutOfMemoryError), Fail(20):
        loss.backward()
    assert all(p.grad is None for p in mlp.model.parameters())
    mlp.prepare()
    module(*mlp.inputs).backward()
    mlp.check_model()


# The code.


def test_code_is_straight_and_drops_what_is_done() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0))
    step = capture(model, torch.randn(1, 3))
    graph = step.graph
    tanh = next(i for i, op in enumerate(graph.ops) if op.kind == "aten.tanh")
    first_backward = next(i for i, op in enumerate(graph.ops) if op.backward)
    order = [*range(first_backward), tanh, *range(first_backward, len(graph.ops))]
    schedule = with_frees(graph, order)
    assert Free(graph.ops[tanh].outputs[0]) in schedule[: schedule.index(Compute(first_backward))]
    code = lower(step, schedule).code
    assert code.count("tanh(") == 2
    lines = code.splitlines()
    makes = [i for i, line in enumerate(lines) if "tanh(" in line]
    drops = [i for i, line in enumerate(lines) if line.endswith("None") and ("tanh = " in line or " tanh " in line)]
    assert any(makes[0] < i < makes[1] for i in drops), "the first copy is gone before the second is made"
    assert "for " not in code
    assert list(computes(schedule)) == order


def test_a_duplicate_of_what_is_still_there_dies_at_once() -> None:
    """One of two outputs was freed, the other kept; making both again must not hold a second copy of the latter."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(50))

        def forward(self, x: Tensor) -> Tensor:
            best, _ = (self.w * x).topk(40)
            return (best.exp() * best).sum()

    torch.manual_seed(0)
    model, x = Two(), torch.randn(50)
    step = capture(model, x)
    graph = step.graph
    topk = next(i for i, op in enumerate(graph.ops) if op.kind == "aten.topk")
    _, indices = graph.ops[topk].outputs
    source = graph.producer[graph.ops[topk].inputs[0]]
    schedule: list[Compute | Free] = []
    for s in keep_all(graph):
        if isinstance(s, Compute) and indices in graph.ops[s.op].inputs:
            schedule += [Compute(source), Compute(topk), Free(graph.ops[source].outputs[0])]
        schedule.append(s)
        if s == Compute(topk):
            schedule.append(Free(indices))
    assert simulate(graph, tuple(schedule)).recomputed == {source: 1, topk: 1}
    planned = [
        bytes_
        for s, bytes_ in zip(schedule, simulate(graph, tuple(schedule)).memory_bytes, strict=True)
        if isinstance(s, Compute)
    ]
    found = memory_while_running(step, tuple(schedule), x)
    assert found[-1] <= planned[-1]
    assert all(a <= b for a, b in zip(found, planned, strict=True))


def test_results_can_be_written_back(mlp: Case) -> None:
    result = run_step(mlp.step, keep_all(mlp.graph), mlp.inputs)
    _same(mlp.model.state_dict(), mlp.start)
    result.write_buffers(mlp.model)
    _same(dict(mlp.model.named_buffers()), mlp.buffers)


@pytest.mark.slow
def test_gpt2_of_transformers_trains_alike() -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.randint(40, (2, 12))
        batch = {"input_ids": ids, "labels": ids}
        step = capture(model, batch)
    twin = copy.deepcopy(model)
    schedule = rematerializing(step.graph, 0, 0.02)
    module = PlannedModule(step, schedule, PLENTY)
    torch.manual_seed(1)
    wanted = twin(**batch).loss
    wanted.backward()
    torch.manual_seed(1)
    loss = module(**batch)
    loss.backward()
    assert torch.equal(loss, wanted)
    _same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", [None, 0])
def test_step_is_plain_pytorch_on_cuda(seed: int | None) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Mlp(256).to(device)
    inputs = (torch.randn(1024, 256, device=device), torch.randint(5, (1024,), device=device))
    twin = copy.deepcopy(model)
    step = capture(model, inputs)
    schedule = keep_all(step.graph) if seed is None else rematerializing(step.graph, seed)
    planned = PlannedStep(step, schedule)

    def prepare() -> None:
        torch.cuda.manual_seed(3)

    measured = measure(lambda: planned(inputs), device, step.graph.resident_bytes, prepare=prepare, repeats=3)
    prepare()
    loss = twin(*inputs)
    loss.backward()
    assert torch.equal(measured.result.loss, loss)
    _same(measured.result.gradients, {n: p.grad for n, p in twin.named_parameters()})
    assert measured.peak_bytes <= 1.02 * planned.peak_bytes
