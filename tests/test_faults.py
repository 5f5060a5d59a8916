"""A step that fails anywhere has not happened: it can be repeated, and gives what it would have given."""

from __future__ import annotations

import contextlib
import copy
import gc
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from graphs import BudgetExceeded
from graphs.capture import capture
from planner.execute import PlannedModule, PlannedStep
from planner.schedule import Schedule, computes, keep_all, with_frees
from planner.simulate import simulate

PLENTY = 1 << 40


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Dropout, batch norm, and a buffer whose old and new content the backward reads."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("u", F.normalize(torch.randn(width), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.3, self.training)
        x = self.norm(x)
        old = self.u * 2
        with torch.no_grad():
            self.u.copy_(F.normalize(self.weight.mv(self.u), dim=0))
        return (F.relu(x @ self.weight) * self.u * old.sin()).exp().mean()


class Training:
    """A model in training: one optimizer step is done, gradients are cleared, the generator stands somewhere."""

    def __init__(self, schedule_of: Callable[[Any], Schedule], tight: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x = Net(), torch.randn(8, 6)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step = capture(self.model, self.x)
        self.schedule = schedule_of(self.step.graph)
        self.module = PlannedModule(self.step, self.schedule, PLENTY)
        if tight:
            for budget in range(simulate(self.step.graph, self.schedule).peak_bytes, self.module.peak_bytes + 1):
                try:
                    self.module = PlannedModule(self.step, self.schedule, budget)
                    break
                except BudgetExceeded:
                    pass
        self.run()
        self.optimizer.zero_grad()
        self.before = copy.deepcopy(self.state())
        self.wanted = self.run()
        self.after = copy.deepcopy(self.state())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": torch.get_rng_state(),
            "gradients": {name: p.grad for name, p in self.model.named_parameters()},
        }

    def restore(self) -> None:
        self.model.load_state_dict(self.before["model"])
        self.optimizer.load_state_dict(copy.deepcopy(self.before["optimizer"]))
        torch.set_rng_state(self.before["generator"])
        self.optimizer.zero_grad()

    def run(self, around: Any = None) -> Tensor:
        with around or contextlib.nullcontext():
            loss: Tensor = self.module(self.x)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sweep(self, around: Callable[[int], Any], expected: type[BaseException], stride: int = 1) -> int:
        """Fail everywhere, one place after the other; the number of places."""
        for at in range(0, 1 << 20, stride):
            self.restore()
            try:
                self.run(around(at))
                return at
            except expected:
                pass
            assert_same(self.state(), self.before, f"failure {at}")
            if at % 7 == 0:
                assert torch.equal(self.run(), self.wanted)
                assert_same(self.state(), self.after, f"repetition after failure {at}")
        raise AssertionError("it never ends")


def assert_same(found: Any, wanted: Any, where: str) -> None:
    assert type(found) is type(wanted), where
    if isinstance(found, Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(found, dict):
        assert found.keys() == wanted.keys(), where
        for key in found:
            assert_same(found[key], wanted[key], f"{where}: {key}")
    elif isinstance(found, list):
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_same(a, b, f"{where}: {i}")
    else:
        assert found == wanted, where


def rematerializing(graph: Any) -> Schedule:
    """Every forward op that may run twice does, right before its first use in the backward."""
    first = next(i for i, op in enumerate(graph.ops) if op.backward)
    again = [i for i in range(first) if not graph.ops[i].effect]
    return with_frees(graph, [*range(first), *again, *range(first, len(graph.ops))])


class Fail(TorchDispatchMode):
    """No memory in the n-th call of an operator that makes something.

    The gradient of the loss is made between the module's call and its backward: a failure there finds the call done.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.ones_like.default or func.is_view or func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if self.left == 0:
            self.left = -1
            raise torch.OutOfMemoryError("no memory")
        self.left -= 1
        return func(*args, **(kwargs or {}))


class Interrupt:
    """Ctrl-C before the n-th line that runs in the planner's files or in generated code (in ``undo.py``: the n-th bytecode).

    Python takes no signal on its way into and out of ``try`` and ``with``, and before the first line of the backward nothing has
    begun.
    """

    NOT_AT = "try:", "with ", "kept = ctx.kept"
    OURS = str(Path(planner.__file__).parent)

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "undo" or not name.startswith((self.OURS, "<eval_with_key>")):
            return None
        frame.f_trace_opcodes = name.endswith("undo.py")
        return self._line

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        wanted = "opcode" if frame.f_trace_opcodes else "line"
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event != wanted or line.startswith(self.NOT_AT):
            return self._line
        if self.left == 0:
            self.left = -1
            sys.settrace(None)
            raise KeyboardInterrupt
        self.left -= 1
        return self._line


@pytest.fixture(scope="module", params=[("once", False), ("once", True), ("again", False), ("again", True)], ids=str)
def training(request: pytest.FixtureRequest) -> Training:
    name, tight = request.param
    return Training(keep_all if name == "once" else rematerializing, tight)


def test_a_failed_allocation_leaves_everything_as_before_the_step(training: Training) -> None:
    places = training.sweep(Fail, torch.OutOfMemoryError)
    assert places > len(list(computes(training.schedule)))


def test_an_interrupt_leaves_everything_as_before_the_step(training: Training) -> None:
    assert training.sweep(Interrupt, KeyboardInterrupt, stride=2) > 200


def test_a_step_without_module_leaves_the_generator_as_before(training: Training) -> None:
    planned = PlannedStep(training.step, training.schedule)
    for around, expected in ((Fail, torch.OutOfMemoryError), (Interrupt, KeyboardInterrupt)):
        training.restore()
        wanted = planned(training.x).loss
        for at in range(0, 1 << 20, 3):
            training.restore()
            try:
                with around(at):
                    planned(training.x)
                break
            except expected:
                assert_same(training.state(), training.before, f"failure {at}")
        assert at > 30
        training.restore()
        assert torch.equal(planned(training.x).loss, wanted)


@pytest.mark.slow
def test_ten_thousand_steps_take_no_more_memory_than_a_thousand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    twin, x, y = copy.deepcopy(model), torch.randn(6, 4), torch.randn(6, 1)
    step = capture(model, (x, y), loss=F.mse_loss)
    schedule = rematerializing(step.graph)
    module = PlannedModule(step, schedule, PLENTY)
    module = PlannedModule(step, schedule, module.peak_bytes)

    def train(parameters: Any, loss_of: Callable[[], Tensor]) -> tuple[list[float], list[int], list[int]]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        losses, blocks, resident = [], [], []
        for i in range(10_000):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if i % 1_000 == 999:
                gc.collect()
                blocks.append(sys.getallocatedblocks() - len(losses))
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
        return losses, blocks, resident

    losses, blocks, resident = train(module.parameters(), lambda: module(x, y))
    assert abs(blocks[-1] - blocks[1]) < 500
    assert resident[-1] - resident[1] < 1 << 20
    wanted, *_ = train(twin.parameters(), lambda: F.mse_loss(twin(x), y))
    assert losses == wanted
