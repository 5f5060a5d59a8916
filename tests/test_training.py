"""Planned modules in training loops as people write them: the same numbers as plain PyTorch, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.errors import BranchChanged, BudgetExceeded, CaptureError, InfeasibleBudget, InputError
from planner import plan
from planner.execution.replan import ReplanningModule
from planner.result import Plan

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


class Net(nn.Module):
    """Dropout and batch norm; two inputs, and two outputs of which the loss takes both."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        x = x + shift
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.gelu(norm(layer(x))), 0.2, self.training)
        return self.head(x), x


def loss_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    scores, hidden = output
    return F.cross_entropy(scores, target) + 0.01 * hidden.square().mean()


def batches(count: int, size: int = 256, width: int = 32) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(torch.randn(size, width), torch.randn(width), torch.randint(5, (size,))) for _ in range(count)]


def planned(model: nn.Module, batch: tuple[Tensor, ...], budget: float = 0.5, **options: Any) -> Plan:
    return plan(model, budget, inputs=batch, loss=loss_of, gap=0.1, time_limit_s=10, **options)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


Loop = Callable[[Callable[..., Tensor], nn.Module, list[tuple[Tensor, ...]]], list[Tensor]]


def both(loop: Loop, data: list[tuple[Tensor, ...]], **options: Any) -> None:
    """Run a training loop with a planned module and with plain PyTorch: losses and all state are the same."""
    model = Net()
    twin = copy.deepcopy(model)
    module = planned(model, data[0], **options).module()
    results = []
    for call, part in ((lambda *b: loss_of(twin(*b[:-1]), b[-1]), twin), (module, module)):
        torch.manual_seed(7)
        losses = loop(call, part, data)
        state = {**part.state_dict(), **{f"{n}.grad": p.grad for n, p in part.named_parameters()}}
        results.append((losses, state, torch.get_rng_state()))
    same(results[1], results[0])


def test_gradients_accumulate_over_micro_batches() -> None:
    def loop(call: Callable[..., Tensor], part: nn.Module, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
        losses = []
        for i, batch in enumerate(data):
            loss = call(*batch)
            (loss / 3).backward()
            losses.append(loss.detach())
            if i % 3 == 2:
                nn.utils.clip_grad_norm_(part.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        call(*data[0]).backward()  # gradients are compared too
        return losses

    both(loop, batches(6))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["region when planning", "region in the loop too"])
def test_bf16_autocast_with_and_without_scaler(scaled: bool, inside: bool) -> None:
    data = batches(4)
    model = Net()
    twin = copy.deepcopy(model)
    module = planned(model, data[0], budget=0.6, autocast=torch.bfloat16).module()
    results = []
    for call, part in ((lambda *b: loss_of(twin(*b[:-1]), b[-1]), twin), (module, module)):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**20, growth_interval=2)
        losses, scales = [], []
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=part is twin or inside):
                loss = call(*batch)
            if i == 1:
                loss = loss * torch.inf  # an overflow: the scaler skips the step
            scaler.scale(loss).backward()
            if scaled or i != 1:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
        results.append((losses, scales, part.state_dict()))
        assert not scaled or min(scales) < scales[0]
    same(results[1], results[0])


def test_modes_switch_back_and_forth_and_the_state_is_the_models(tmp_path: Path) -> None:
    def loop(call: Callable[..., Tensor], part: nn.Module, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        results = []
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            call(*batch).backward()
            optimizer.step()
            if i == 1:  # an epoch ends: evaluate, save, load
                part.eval()
                with torch.no_grad():
                    results += list(part(*batch[:-1])) if part is not call else list(call(*batch[:-1]))
                part.train()
                path = tmp_path / f"{type(part).__name__}.pt"
                torch.save({"model": part.state_dict(), "optimizer": optimizer.state_dict()}, path)
                content = torch.load(path)
                part.load_state_dict(content["model"])
                optimizer.load_state_dict(content["optimizer"])
                assert list(content["model"]) == list(Net().state_dict())
        return results

    both(loop, batches(4))


# Other shapes.


def test_other_shapes_are_refused_with_both_shapes() -> None:
    (batch,) = batches(1)
    module = planned(Net(), batch).module()
    with pytest.raises(InputError, match=r"inputs\[0\] has shape \(255, 32\), but the step was captured with \(256, 32\)"):
        module(batch[0][1:], batch[1], batch[2][1:])


def test_planning_again_in_too_few_bytes_says_how_many_work() -> None:
    """The larger batch fits as one piece, but its loss, which takes as much as its output, does not fit where it stays."""
    model = nn.Linear(64, 64)
    small, large = (tuple(torch.randn(size, 64) for _ in range(2)) for size in (32, 96))
    module = plan(model, 131_588, inputs=small, loss=nn.MSELoss()).module(replan=True)
    module(*small).backward()
    with pytest.raises(BudgetExceeded, match=r"of 131,588 bytes: .* plan for 139,524 bytes, which are known to be enough"):
        module(*large)
    assert plan(model, 139_524, inputs=large, loss=nn.MSELoss()).module().peak_bytes <= 139_524


def test_planning_again_keeps_one_plan_per_shape_in_the_same_bytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="belady")
    data = [batch for size in (256, 192, 256, 128, 192) for batch in batches(1, size)]
    model = Net()
    twin = copy.deepcopy(model)
    first = planned(model, data[0], budget=0.6)
    module = first.module(replan={"gap": 0.1, "time_limit_s": 5})
    assert isinstance(module, ReplanningModule)
    results = []
    for call, part in ((lambda *b: loss_of(twin(*b[:-1]), b[-1]), twin), (module, module)):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = call(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append((losses, part.state_dict()))
    same(results[1], results[0])
    assert module.planned == 3
    said = [m for m in caplog.messages if "again for inputs of shape" in m]
    assert len(said) == 2
    assert "(192, 32), (32,), (192,)" in said[0]
    assert f"{first.budget_bytes:,} bytes" in said[0]
    peaks = [other.peak_bytes for plans in module._plans.values() for other in plans if other is not None]
    assert all(peak <= first.budget_bytes for peak in peaks)
    (large,) = batches(1, 4096)
    with pytest.raises(InfeasibleBudget, match=f"cannot run in {first.budget_bytes:,} bytes"):
        module(*large)
    assert module.planned == 3
    module.eval()
    same(module(*data[1][:-1]), model(*data[1][:-1]))


def test_a_new_shape_in_another_region_of_autocast_is_refused() -> None:
    """Planned for there, it would compute in that region's type for good."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    module = plan(model, 40_000, inputs=torch.randn(8, 16), loss=lambda y: y.square().mean()).module(replan=True)
    x = torch.randn(12, 16)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
        pytest.raises(InputError, match=r"captured outside of autocast, but is called under autocast of torch\.bfloat16"),
    ):
        module(x)
    assert torch.equal(module(x), model(x).square().mean()) and module.planned == 2


def test_named_inputs_come_in_any_order() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return (super().forward(x) - y).square().mean()

    x, y = torch.randn(5, 4), torch.randn(5, 3)
    model = Named(4, 3)
    module = plan(model, 1.0, inputs={"x": x, "y": y}).module(replan=True)
    assert torch.equal(module(y=y, x=x), model(x, y)) and module.planned == 1


def test_hooks_of_parameters_are_called_whatever_the_shape() -> None:
    """They are set once the module is there; inputs of another shape are planned for all the same."""
    data = [batch for size in (256, 192, 256) for batch in batches(1, size)]
    model = Net()
    twin = copy.deepcopy(model)
    module = planned(model, data[0]).module(replan={"gap": 0.1, "time_limit_s": 5})
    results = []
    for call, part in ((lambda *b: loss_of(twin(*b[:-1]), b[-1]), twin), (module, module)):
        torch.manual_seed(7)
        called: list[int] = []
        for p in part.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            p.register_post_accumulate_grad_hook(lambda p, called=called: called.append(p.numel()))  # type: ignore[misc]
        losses = []
        for batch in data:
            loss = call(*batch)
            loss.backward()
            losses.append(loss.detach())
        results.append((losses, [p.grad for p in part.parameters()], sorted(called)))
    same(results[1], results[0])
    assert module.planned == 2


class Scored(nn.Module):
    """Its own loss of inputs, a number and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor, power: int, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x) ** power, y)


def test_inputs_that_share_their_memory_have_a_plan_of_their_own() -> None:
    """As the labels do that are given as the inputs once more."""
    model = Scored()
    x, y = torch.randn(2, 64, 32)
    module = plan(model, 0.95, inputs=(x, 3, x), time_limit_s=5).module(replan={"time_limit_s": 5})
    for given in ((x, 3, x), (x, 3, y), (x.clone(), 3, y.clone()), (y, 3, y)):
        same(module(*given), model(*given))
    assert module.planned == 2


def test_inputs_laid_out_otherwise_have_a_plan_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    images = torch.randn(2, 3, 8, 8)
    module = plan(model, 1.0, inputs=images, loss=lambda y: y.square().mean()).module(replan=True)
    for given, plans in ((images, 1), (images.to(memory_format=torch.channels_last), 2), (images.clone(), 2)):
        same(module(given), model(given).square().mean())
        assert module.planned == plans


class Asking(nn.Module):
    """Asks its mask, and whether its numbers are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.layers(self.norm(x))
        if not mask.all():
            y = torch.where(mask, y, 0)
        if not torch.isfinite(y).all():
            y = y.nan_to_num()
        return y.square().mean()


def test_what_goes_another_way_by_its_data_is_planned_for_when_it_comes() -> None:
    model = Asking()
    twin = copy.deepcopy(model)
    x = torch.randn(64, 32)
    full, half = torch.ones(64, 1, dtype=torch.bool), torch.arange(64).view(64, 1) > 30
    first = plan(model, 0.9, inputs=(x, full), time_limit_s=5)
    assert [answer for answer, _ in first.step.answers] == [True, True]
    with pytest.raises(BranchChanged, match=r"told True, at .*if not mask.all\(\):; now it is False.*or capture the step with"):
        first.module()(x, half)
    module = first.module(replan={"time_limit_s": 5})
    results = []
    for call, part in ((twin, twin), (module, module)):
        torch.manual_seed(7)
        losses = []
        for mask in (full, half, full, ~half):
            losses.append(call(x, mask))
            losses[-1].backward()
        results.append((losses, [p.grad for p in part.parameters()], part.state_dict()))
    same(results[1], results[0])
    assert module.planned == 2
    x[3, 4] = torch.inf
    for mask in (full, half):
        with pytest.raises(BranchChanged, match=r"isfinite\(y\).all\(\):; now it is False. Give such a batch to the model"):
            module(x, mask)
    assert module.planned == 2


def test_plans_for_answers_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model asks for another number in each batch, as many are planned for as may pay."""

    class Cut(nn.Linear):
        def forward(self, x: Tensor, longest: Tensor) -> Tensor:
            return super().forward(x)[: int(longest)].square().mean()

    monkeypatch.setattr(ReplanningModule, "MOST_BRANCHES", most := 3)
    model, x = Cut(8, 8), torch.randn(16, 8)
    module = plan(model, 1.0, inputs=(x, torch.tensor(1))).module(replan=True)
    for longest in (1, 2, 3, 2, 1):
        same(module(x, torch.tensor(longest)), model(x, torch.tensor(longest)))
    with pytest.raises(BranchChanged, match=r"now it is \(9,\)"):
        module(x, torch.tensor(9))
    assert module.planned == most


@pytest.mark.parametrize("in_backward", [False, True])
def test_another_answer_takes_the_call_back(in_backward: bool) -> None:
    """Buffers, generator and gradients are as before it, and the next batch trains as if it had not been."""

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient if torch.isfinite(gradient).all() else gradient.nan_to_num()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU())

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            y = self.layers(x)
            if in_backward:
                return (Asked.apply(y) * scale).sum()
            return (y.clamp(-1, 1) if torch.isnan(y).any() else y * scale).sum()

    model, x, scale = Model(), torch.randn(64, 32), torch.tensor(2.0)
    for budget in (1.0, 0.9):
        module = plan(model, budget, inputs=(x, scale), time_limit_s=5).module()
        module(x, scale).backward()
        before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()))
        if in_backward:
            loss = module(x, torch.tensor(torch.inf))
            with pytest.raises(BranchChanged, match="told True"):
                loss.backward()
        else:
            with pytest.raises(BranchChanged, match="told False"):
                module(x.clone().fill_(torch.nan), scale)
        same((model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()), before)


def test_planning_again_is_for_shapes_and_not_for_edits() -> None:
    (batch, other), model = [batches(1)[0], batches(1, 32)[0]], Net()
    module = planned(model, batch, 0.7).module(replan=True)
    model.layers[0].weight.requires_grad_(False)
    with pytest.raises(InputError, match="requires no gradient, but did"):
        module(*batch)
    model.layers[0].weight.requires_grad_(True)
    model.norms[0] = nn.BatchNorm1d(32)
    with pytest.raises(InputError, match="the modules"):
        module(*other)
    with pytest.raises(InputError, match="exclude each other"):
        planned(model, batch, 0.7).module(replan=True, cuda_graph=True)


# Several processes.


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        return loss_of(self.model(*batch[:-1]), batch[-1])


def steps(call: nn.Module, part: nn.Module, data: list[tuple[Tensor, Tensor, Tensor]], accumulate: bool = False) -> Any:
    """Losses, last gradients and state of some steps; every process draws its own masks."""
    torch.manual_seed(7 + torch.distributed.get_rank())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i, batch in enumerate(data):
        last = not accumulate or i % 2 == 1
        with contextlib.nullcontext() if last else call.no_sync():
            loss = call(*batch)
            loss.backward()
        losses.append(loss.detach())
        if last:
            optimizer.step()
            if i + 1 < len(data):
                optimizer.zero_grad()
    gradients = [p.grad for p in part.parameters()]
    return losses, [local(t) for t in gradients], [local(t) for t in part.parameters()], list(part.buffers())


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Bounded(Net):
    """A network that bounds a weight in its forward."""

    def forward(self, *inputs: Any) -> Any:
        with torch.no_grad():
            cast(nn.Linear, self.layers[0]).weight.clamp_(-0.1, 0.1)
        return super().forward(*inputs)


class Outer(nn.Module):
    """Has a step as a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones(4))

    def forward(self, *inputs: Any) -> Tensor:
        return cast(Tensor, self.part(*inputs)) * self.scale.mean()


def with_ddp(data: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for accumulate in (False, True):
        torch.manual_seed(0)
        model = Net()
        twin = WithLoss(copy.deepcopy(model))
        module = planned(model, data[0]).module()
        results = [steps(nn.parallel.DistributedDataParallel(part), part, data, accumulate) for part in (twin, module)]
        same(results[1], results[0])
        reduced = [torch.zeros_like(results[1][1][0]) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(reduced, results[1][1][0])
        assert all(torch.equal(each, reduced[0]) for each in reduced)  # the gradients are those of all processes


def with_fsdp2(data: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    from torch.distributed.fsdp import fully_shard

    for reshard in (False, True):
        torch.manual_seed(0)
        model = Net()
        twin = WithLoss(copy.deepcopy(model))
        module = planned(model, data[0]).module()
        results = []
        for part in (twin, module):
            sharded = fully_shard(part, reshard_after_forward=reshard)
            results.append(steps(sharded, part, data))
        assert type(next(module.parameters())).__name__ == "DTensor"
        assert results[1][1][0].shape[0] == 16  # half of a gradient each
        same(results[1], results[0])
    # As a part of what is sharded: the parameters are gathered into the same storages again for the backward.
    torch.manual_seed(0)
    model = Net()
    twin = WithLoss(copy.deepcopy(model))
    found = []
    for part in (twin, planned(model, data[0]).module()):
        outer = fully_shard(Outer(part), reshard_after_forward=True)
        torch.manual_seed(1)
        for _ in range(2):
            outer(*data[0]).backward()
        found.append([local(cast(Tensor, p.grad)) for p in part.parameters()])
    same(found[1], found[0])
    with pytest.raises(CaptureError, match=r"is sharded .* fully_shard\(plan.module\(\)\)"):
        planned(model, data[0])
    for replan in (False, True):
        bounded = planned(Bounded(), data[0]).module(replan=replan)
        fully_shard(bounded)
        with pytest.raises(InputError, match=r"changes layers\.0\.weight in its forward, which fully_shard would undo"):
            bounded(*data[0])
    for part_of in (lambda m: m, lambda m: m.layers[0]):
        model = Net()
        module = planned(model, data[0]).module()
        fully_shard(part_of(model))
        with pytest.raises(InputError, match=r"was sharded .* fully_shard\(plan.module\(\)\)"):
            module(*data[0])


Trains = Callable[[list[tuple[Tensor, Tensor, Tensor]]], None]


def in_process(rank: int, port: int, count: int, train: Trains) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        torch.manual_seed(20 + rank)
        train(batches(4))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch is built without gloo"
)
@pytest.mark.parametrize(("count", "train"), [(3, with_ddp), (2, with_fsdp2)])  # two numbers have one sum, in whatever order
def test_processes_train_as_with_plain_ddp_and_fsdp2(count: int, train: Trains) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_process, args=(port, count, train), nprocs=count)


class Images(nn.Module):
    """Reads parameters more than once, in another order than that in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(3, 1, 1))
        self.first, self.norm, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.norm(self.first(x))).relu() * self.scale + self.first(x) + self.scale
        return cast(Tensor, self.last(out)).square().mean()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Images(), torch.randn(2, 3, 8, 8)),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Flatten(0), nn.Linear(32, 1)), torch.randn(4, 8)),
    ],
)
def test_gradients_come_in_the_order_of_plain_pytorch(model: nn.Module, x: Tensor) -> None:
    """By that DistributedDataParallel lays its buckets out."""
    module = plan(model, 1.0, inputs=(x,), loss=lambda out: out.sum()).module()
    came: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))  # type: ignore[misc]
    model(x).sum().backward()
    plain = came.copy()
    came.clear()
    module(x).backward()
    assert came == plain


# The examples in docs/examples.


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300, check=False, cwd=EXAMPLES.parents[1]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_of_the_examples_runs() -> None:
    assert "same losses as plain PyTorch: True" in run_example("plain_loop.py")


def test_the_trainer_of_the_examples_runs() -> None:
    pytest.importorskip("transformers")
    assert "same losses as the plain Trainer: True" in run_example("trainer.py")


def test_a_planned_module_as_a_part_loads_what_it_saved() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.Flatten(0))
            self.inner = plan(model, 1.0, inputs=(torch.randn(4, 8), torch.zeros(4)), loss=nn.MSELoss()).module()
            self.scale = nn.Parameter(torch.ones(()))

    whole = Whole()
    saved = {name: tensor + 1 for name, tensor in whole.state_dict().items()}
    assert len(saved) == 10
    whole.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole.state_dict().items())
    # num_batches_tracked has a default where the dict does not tell its version.
    missing, unexpected = whole.load_state_dict({"scale": torch.zeros(()), "inner.9.weight": torch.zeros(())}, strict=False)
    assert len(missing) == 8 and unexpected == ["inner.9.weight"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler itself looks at
def test_a_compiler_leaves_planned_calls_as_they_are() -> None:
    """Fused, a plan would keep neither its bytes nor its bits."""

    class Whole(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.inner(x * 2) * 3
            return loss

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1), nn.Flatten(0))
    x, target = torch.randn(4, 8), torch.zeros(4)
    planned = plan(nn.Sequential(model), 1.0, inputs=(x, target), loss=nn.MSELoss())
    seen: list[str] = []

    def watching(graph: torch.fx.GraphModule, _: object) -> Any:
        seen.extend(getattr(node.target, "__name__", "") for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    for module, replanned in ((planned.module(), False), (planned.module(replan=True), True)):
        torch._dynamo.reset()
        seen.clear()
        compiled = torch.compile(module, backend=watching)
        torch.manual_seed(1)
        loss = compiled(x, target)
        loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        torch.manual_seed(1)
        plain = nn.functional.mse_loss(model(x), target)
        plain.backward()
        assert torch.equal(loss, plain)
        assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True) if b.grad is not None)
        assert not seen and len(found) == 4, replanned
        model.zero_grad()
    torch._dynamo.reset()
    whole = Whole(plan(model, 1.0, inputs=x, loss=lambda out: out.mean()).module())
    torch.compile(whole, backend=watching)(x).backward()
    torch._dynamo.reset()
    assert seen == ["mul", "mul"]  # what is around it is compiled
