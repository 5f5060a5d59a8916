"""Workspace inside of operators of eager runs: learned from an allocator (an invented one here), reserved from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.errors import BudgetExceeded
from online.blocks.estimates import counted_bytes
from online.blocks.kinds import kind_of
from online.blocks.workspace import Requested, Workspace, Workspaces, learned_workspaces
from online.eager import EagerRun, budget
from planner.simulate import simulate
from tests.test_eager import EXACT, Meter

CPU = torch.device("cpu")
INSIDE = {"aten.addmm": 3.0, "aten.mm": 2.0, "aten.tanh_backward": 4.0, "aten.add_": 0.5}  # workspace, as a part of what is made


class Device(Meter):
    """A device whose operators take workspace: its statistics, and the peak that only it sees.

    choosing    factor on the workspace of the first run of an op, while a library looks for the best kernel
    handle_bytes  taken by the first op that takes any workspace, and never given back
    """

    def __init__(self, *held: Any, choosing: float = 1.0, handle_bytes: int = 0) -> None:
        super().__init__(*held)
        self.choosing = choosing
        self.handle_bytes = handle_bytes
        self.taken_bytes = self.ever_bytes = 0
        self.asked = 0
        self.chosen: set[Any] = set()

    def statistics(self, device: torch.device) -> Requested:
        self.asked += 1
        return Requested(self.live_bytes() + self.taken_bytes, self.peak_bytes, self.ever_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before_bytes, known = self.live_bytes(), {key for key, ref in self.storages.items() if ref() is not None}
        result = func(*args, **(kwargs or {}))
        part = INSIDE.get(kind_of(func).name, 0.0)
        if isinstance(result, Tensor):
            key = result.untyped_storage()._cdata
            self.see(result)
            self.ever_bytes += 0 if key in known else counted_bytes(result.untyped_storage())
            if part:
                self.taken_bytes += self.handle_bytes
                self.ever_bytes += self.handle_bytes
                self.handle_bytes = 0
                shapes = (func, *(t.shape for t in args if isinstance(t, Tensor)))
                factor = 1.0 if shapes in self.chosen else self.choosing
                self.chosen.add(shapes)
                inside = int(part * factor * result.nbytes)
                self.ever_bytes += inside
                self.peak_bytes = max(self.peak_bytes, self.live_bytes() + self.taken_bytes + inside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes() + self.taken_bytes, before_bytes + self.taken_bytes)
        return result


class Net:
    """A few layers, what they are fed, and steps of training under a budget on a device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())))
        self.x = torch.randn(512, 32)

    def step(self, device: Device, workspaces: Workspaces | None, budget_bytes: int | None) -> tuple[EagerRun, int]:
        """The run, and the peak of the device in it."""
        self.model.zero_grad()
        device.peak_bytes = device.live_bytes() + device.taken_bytes
        run = budget(budget_bytes, holding=(self.model, self.x), costs="modelled")
        run._runs.workspaces = workspaces
        with device, run:
            self.model(self.x).square().mean().backward()
        return run, device.peak_bytes

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@EXACT
def test_the_budget_holds_with_workspace_once_it_is_known() -> None:
    net = Net()
    device = Device(net.model, net.x)
    free, _ = net.step(device, None, None)
    want = net.gradients
    budget_bytes = int(0.85 * free.peak_bytes)
    blind, peak_bytes = net.step(device, None, budget_bytes)
    assert blind.peak_bytes <= budget_bytes < peak_bytes  # what was wrong

    workspaces = Workspaces(device.statistics, "cpu")
    with pytest.warns(RuntimeWarning, match=rf"aten.\w+ has had up to [\d,]+ bytes .* above the budget of {budget_bytes:,}"):
        first, first_bytes = net.step(device, workspaces, budget_bytes)
    assert first.peak_bytes >= first_bytes > budget_bytes  # it is not hidden
    for _ in range(3):
        later, later_bytes = net.step(device, workspaces, budget_bytes)
        assert later_bytes <= later.peak_bytes <= budget_bytes
        assert later.counters.recomputations > blind.counters.recomputations
        assert all(map(torch.equal, net.gradients, want))
        trace = simulate(later.graph, later.schedule)
        assert (trace.peak_bytes, trace.recomputed_ops) == (later.peak_bytes, later.counters.recomputations)
    makes = {op.kind: op for op in later.graph.ops}
    addmm = makes["aten.addmm.default"]
    assert addmm.workspace_bytes == 3 * later.graph.values[addmm.outputs[0]].size_bytes


@EXACT
def test_a_budget_too_small_for_known_workspace_is_refused_before_the_op() -> None:
    net = Net()
    device = Device(net.model, net.x)
    workspaces = Workspaces(device.statistics, "cpu")
    net.step(device, workspaces, None)
    resident = sum(t.nbytes for t in (*net.model.parameters(), net.x))
    made = 512 * 32 * 4
    with pytest.raises(BudgetExceeded, match=r"aten.addmm needs") as caught:
        net.step(device, workspaces, resident + 3 * made)
    assert caught.value.asked_bytes >= resident + 4 * made
    assert device.peak_bytes <= resident + 3 * made


def test_the_allocator_is_asked_about_two_runs_only() -> None:
    net = Net()
    device = Device(net.model, net.x)
    workspaces = Workspaces(device.statistics, "cpu")
    net.step(device, workspaces, None)
    net.step(device, workspaces, None)
    asked = device.asked
    assert asked > 0
    for _ in range(2):
        net.step(device, workspaces, None)
    assert device.asked == asked


def test_choosing_kernels_and_handles_are_no_workspace() -> None:
    net = Net()
    plain = Device(net.model, net.x)
    known = Workspaces(plain.statistics, "cpu")
    for _ in range(2):
        want, _ = net.step(plain, known, None)
    device = Device(net.model, net.x, choosing=20.0, handle_bytes=1 << 22)
    workspaces = Workspaces(device.statistics, "cpu")
    for _ in range(3):
        got, _ = net.step(device, workspaces, None)
    assert [op.workspace_bytes for op in got.graph.ops] == [op.workspace_bytes for op in want.graph.ops]
    assert got.peak_bytes == want.peak_bytes


def test_what_the_statistics_tell() -> None:
    cases = [
        ((100, 100, 0), (1124, 3172, 3072), 1024, 2048),  # a new peak
        ((100, 9000, 0), (1124, 9000, 3072), 1024, 2048),  # an old one, and all requests
        ((100, 1600, 0), (1124, 1600, 1 << 20), 1024, 512),  # an old one bounds it
        ((100, 100, 0), (5220, 5220, 5120), 1024, 0),  # a library keeps the rest
        ((5000, 5000, 0), (1000, 5000, 0), 0, 0),  # something was given back meanwhile
        ((100, 100, 0), (1124, 1125, 1025), 1024, 512),  # whole granules
        ((100, 100, 0, 7), (1124, 3172, 3072, 9), 1024, 2048),  # one request inside
        ((100, 100, 0, 7), (1124, 3172, 3072, 12), 1024, 2048 + 3 * 512),  # four of them
        ((100, 100, 0, 7), (1124, 1124, 1024, 8), 1024, 0),  # none
    ]
    for then, now, made_bytes, inside in cases:
        said = [Requested(*then), Requested(*now)]
        workspace = Workspace(Workspaces(lambda device, said=said: said.pop(0), "cpu"))  # type: ignore[misc]
        before = workspace.before((torch.ones(3),), {})
        assert before is not None
        workspace.learn(before, made_bytes)
        assert workspace.size_bytes == inside, (then, now)


def test_the_smaller_of_two_looks_counts() -> None:
    for first, second, want in ((1000, 3000, 1024), (3000, 1000, 1024), (3000, 0, 0)):
        said = [Requested(), Requested(0, first, first), Requested(0, first, first), Requested(0, 1 << 20, first + second)]
        workspace = Workspace(Workspaces(lambda device, said=said: said.pop(0), "cpu"))  # type: ignore[misc]
        for _ in range(2):
            before = workspace.before((torch.ones(3),), {})
            assert before is not None
            workspace.learn(before, 0)
        assert workspace.size_bytes == want
        assert workspace.before((torch.ones(3),), {}) is None


def test_without_cuda_nothing_is_asked() -> None:
    if not torch.cuda.is_available():
        assert learned_workspaces() is None
    workspace = Workspaces(lambda device: pytest.fail("the allocator was asked about a call on the CPU")).of(())
    assert workspace.before((torch.ones(3), [torch.ones(2)]), {"device": CPU}) is None
    assert workspace.before((torch.ones(3),), {}) is None


def test_a_bound_of_a_size_holds_for_every_run() -> None:
    """The second mask of a shape may choose more than the first one."""
    mask = torch.zeros(999, dtype=torch.bool)
    with budget(999 * 17, holding=mask):
        mask.nonzero()
    mask.fill_(True)
    with budget(4000, holding=mask) as run, pytest.raises(BudgetExceeded, match=r"aten.nonzero needs"):
        mask.nonzero()
    assert run.peak_bytes <= 4000


@EXACT
def test_a_size_known_late_may_break_the_budget_but_not_in_silence() -> None:
    x, mask = torch.arange(997.0), torch.ones(997, dtype=torch.bool)
    with (
        pytest.warns(RuntimeWarning, match=r"aten.index has had up to 12,961 bytes in memory, above the budget of 9,500"),
        budget(9500, holding=(x, mask)) as run,
    ):
        double = x * 2
        chosen = x[mask]
        del double
    assert torch.equal(chosen, x)
    assert run.counters.evictions == 1


def test_arguments_need_not_have_a_hash_and_nothing_is_learned_of_a_call_that_is_not_remembered() -> None:
    library = torch.library.Library("belady_test_forgotten", "FRAGMENT")
    library.define("scale_(Tensor(a!) x, Dict(str, int) by) -> ()")

    def scale(x: Tensor, by: dict[str, int]) -> None:
        x.mul_(by["k"])

    library.impl("scale_", scale, "CompositeExplicitAutograd")
    x = torch.ones(3)
    workspaces = Workspaces(lambda device: Requested(), "cpu")
    run = budget("1MiB")
    run._runs.workspaces = workspaces
    with run:
        x.mul_(2)
        known = len(workspaces._known)
        for _ in range(5):
            torch.ops.belady_test_forgotten.scale_(x, {"k": 3})
    assert len(workspaces._known) == known > 0
    assert x.tolist() == [2.0 * 3**5] * 3
