"""Models on the meta device: planned without their memory, as if they were on the CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import graphs.workloads as workloads
from graphs.capture import bind, capture
from graphs.costs import roofline
from graphs.errors import CaptureError, InputError
from graphs.profile import measured
from graphs.torch_private.names import FakeTensorMode
from graphs.tracing.body import device_of
from graphs.workloads import build
from online import run
from planner import load_plan, plan
from scripts.cli import main
from tests.models import MODELS, SIZES, graph_of

BATCH = torch.randn(32, 16), torch.randint(0, 4, (32,))


class Net(nn.Module):
    """Tied weights, batch norms, a buffer, a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()) for _ in range(6)))
        self.layers[5][0].weight = self.layers[0][0].weight
        self.register_buffer("shift", torch.ones(16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.dropout(self.layers(x) + self.shift, 0.2))
        return out


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("name", [*MODELS, "lstm"])
def test_the_graph_is_that_of_the_model_with_its_weights(name: str) -> None:
    sizes = SIZES.get(name, {"batch": 2, "depth": 3})
    with_weights = graph_of(name) if name in SIZES else roofline(capture_of(name, sizes, "cpu")).graph
    without = roofline(capture_of(name, sizes, "meta")).graph
    assert without.fingerprint() == with_weights.fingerprint()
    assert without.ops == with_weights.ops


def capture_of(name: str, sizes: dict[str, int], device: str):  # type: ignore[no-untyped-def]
    model, inputs, loss = build(name, device=device, **sizes)
    return capture(model, inputs, loss=loss)


@pytest.mark.parametrize("inputs", ["on the CPU", "on meta", "fake"])
def test_a_plan_is_made_kept_and_used_where_the_weights_are(inputs: str, tmp_path: Path) -> None:
    batch: tuple[Tensor, ...] = BATCH
    model = on_meta()
    if inputs == "on meta":
        batch = tuple(each.to("meta") for each in batch)
    elif inputs == "fake":  # what torch itself offers: a model built under a fake mode
        with FakeTensorMode():
            model, batch = Net(), (torch.randn(32, 16), torch.zeros(32, dtype=torch.long))
    before = {name: (id(each), each.device) for name, each in model.named_parameters()}
    p = plan(model, 0.8, inputs=batch, loss=nn.CrossEntropyLoss())
    assert {name: (id(each), each.device) for name, each in model.named_parameters()} == before
    assert 0 < p.overhead < 1 and p.step is not None
    assert run(p.step, p.budget_bytes).status == "COMPLETED"
    for needs_data in (p.module, lambda: p.step.eager(BATCH), lambda: bind(p.step, BATCH), lambda: p.module(replan=True)):
        with pytest.raises(InputError, match=r"captured from a model without data .* capture the model again where it has its"):
            needs_data()

    p.save(tmp_path / "plan.json")
    torch.manual_seed(0)
    real = Net()
    used = load_plan(tmp_path / "plan.json", capture(real, BATCH, loss=nn.CrossEntropyLoss(), name=p.graph.name)).module()
    torch.manual_seed(1)
    used(*BATCH).backward()
    found = [parameter.grad for parameter in real.parameters()]
    torch.manual_seed(0)
    twin = Net()
    torch.manual_seed(1)
    F.cross_entropy(twin(BATCH[0]), BATCH[1]).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in twin.parameters()], rtol=0, atol=0)


class Holding(nn.Linear):
    """Holds something that is neither parameter nor buffer."""

    def __init__(self, held: Any) -> None:
        super().__init__(16, 4, device="meta")
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.held(x) if callable(self.held) else self.held)


def tensor_on_meta() -> Any:
    return torch.ones(4, device="meta")


def scalar_on_meta() -> Any:
    return torch.ones((), device="meta")


def hidden_teacher() -> Any:
    teacher = nn.Linear(16, 4, device="meta").requires_grad_(False)
    return lambda x: teacher(x.to("meta")).to(x.device)


@pytest.mark.parametrize("held", [tensor_on_meta, scalar_on_meta, hidden_teacher])
def test_what_has_no_data_and_is_no_part_of_the_model_is_refused(held: Callable[[], Any]) -> None:
    """It would count for nothing, and what is made of it too."""
    with pytest.raises(CaptureError, match="meta device"):
        capture(Holding(held()), BATCH, loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("model", ["on meta", "with its data"])
def test_losses_reach_no_data_elsewhere(model: str) -> None:
    mine = nn.Linear(16, 4, device="meta" if model == "on meta" else "cpu")
    teacher = nn.Linear(16, 4, device="meta").requires_grad_(False)

    def distance(out: Tensor, x: Tensor) -> Tensor:
        return (out - teacher(x.to("meta")).to("cpu")).square().mean()

    with pytest.raises(CaptureError, match=r"a tensor of shape .* on the meta device that is neither"):
        capture(mine, (BATCH[0], BATCH[0]), loss=distance)
    if model == "on meta":
        with pytest.raises(CaptureError, match="refer to the model itself do not reach the copy"):
            capture(mine, BATCH[0], loss=lambda out: out.mean() + mine.weight.norm())
    with torch.device("meta"):
        weighted = nn.CrossEntropyLoss(weight=torch.ones(4))
    with pytest.raises(CaptureError, match="meta"):
        capture(mine, BATCH, loss=weighted)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_is_held_for_nothing_is_no_matter() -> None:
    """As the weight that a hook makes anew before each call."""
    with torch.device("meta"):
        normed = nn.utils.weight_norm(nn.Linear(16, 4))
    step = capture(normed, BATCH, loss=nn.CrossEntropyLoss())
    real = capture(nn.utils.weight_norm(nn.Linear(16, 4)), BATCH, loss=nn.CrossEntropyLoss())
    assert step.graph.fingerprint() == real.graph.fingerprint()


def test_the_compiler_refuses_meta() -> None:
    model = nn.Sequential(nn.Linear(16, 4, device="meta"))
    with pytest.raises(BackendCompilerFailed, match="plans are for cpu and cuda"):
        torch.compile(model, backend="belady", options={"budget": 0.9})(BATCH[0].to("meta"))


def test_ops_may_be_timed_all_the_same(tmp_path: Path) -> None:
    """Each is given tensors made up for it."""
    step = measured(capture(on_meta(), BATCH, loss=nn.CrossEntropyLoss()), cache_dir=tmp_path, repeats=1)
    assert step.graph.costs == "measured" and step.graph.keep_all_time_ns > 0


def test_times_may_be_those_of_another_device() -> None:
    step = capture(on_meta(), BATCH, loss=nn.CrossEntropyLoss())
    assert roofline(step, "h100").graph.keep_all_time_ns < roofline(step).graph.keep_all_time_ns


def test_a_loss_with_weights_and_a_part_with_memory() -> None:
    """The rest of a model may have its data already, which is not copied."""
    model = on_meta()
    model.out = nn.Linear(16, 4)
    step = capture(model, BATCH, loss=nn.CrossEntropyLoss(weight=torch.ones(4)))
    assert step.model is not model
    assert step.model.out.weight is model.out.weight
    real = capture(Net(), BATCH, loss=nn.CrossEntropyLoss(weight=torch.ones(4)))
    assert step.graph.fingerprint() == real.graph.fingerprint()


def test_what_cannot_be_is_said() -> None:
    model = on_meta()
    with pytest.raises(CaptureError, match=r"as the CPU runs it, not cuda; .*costs="):
        capture(model, BATCH, loss=nn.CrossEntropyLoss(), device="cuda")
    model.lock = threading.Lock()
    with pytest.raises(CaptureError, match=r"is on the meta device, and cannot be copied to be captured: .*lock"):
        capture(model, BATCH, loss=nn.CrossEntropyLoss())
    with pytest.raises(CaptureError, match=r"inputs\[0\] is on the meta device, and the model is not"):
        capture(Net(), (BATCH[0].to("meta"), BATCH[1]), loss=nn.CrossEntropyLoss())
    with torch.device("meta"):
        lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match="has no shape yet"):
        capture(lazy, BATCH, loss=nn.CrossEntropyLoss())
    model = on_meta()
    with torch.device("meta"), pytest.raises(CaptureError, match="while meta is the default device"):
        capture(model, BATCH, loss=nn.CrossEntropyLoss())
    model.out.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(CaptureError, match=r"out.weight has a gradient hook"):
        capture(model, BATCH, loss=nn.CrossEntropyLoss())
    capture(model, BATCH, loss=nn.CrossEntropyLoss(), gradient_hooks=True)
    with pytest.raises(CaptureError, match="there is no device 'banana'"):
        capture(on_meta(), BATCH, loss=nn.CrossEntropyLoss(), device="banana")
    with pytest.raises(CaptureError, match=r"is spread over several devices \(a on cpu, b on meta\)"):
        device_of(model, {"a": torch.ones(1), "b": torch.ones(1, device="meta")}, None)


@pytest.mark.parametrize(
    ("command", "device"),
    [
        ("info mlp", "meta"),
        ("plan mlp --budget 1.0", "meta"),
        ("diff mlp --budget 1.0", "meta"),
        ("plan mlp --budget 1.0 --execute", None),
        ("info mlp --costs measured", None),
        ("info mlp --device cpu", "meta"),
    ],
)
def test_the_command_builds_no_weights_where_nothing_runs(
    command: str, device: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[object] = []

    def noted(name: str, **options: Any) -> Any:
        built.append(options["device"])
        return load(name, **options)

    load = workloads.load_workload
    monkeypatch.setattr(workloads, "load_workload", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path))
    assert main([*command.split(), "--batch", "64", "--depth", "3"]) == 0
    assert built == [device]


def test_a_users_own_model_may_be_on_meta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(depth=4):\n"
        "    with torch.device('meta'):\n"
        "        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(depth)))\n"
        "        x = torch.empty(1 << 16, 4096)\n"
        "    return model, x, lambda out: out.square().mean()\n"
    )
    own = f"{tmp_path}/own.py:make"
    assert main(["plan", own, "--depth", "12", "--budget", "0.7", "--costs", "h100", "--json", "-"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["device"] == "H100" and row["costs"] == "roofline" and 0 < row["overhead"] < 1
    assert row["budget_bytes"] > 10 << 30
    assert main(["plan", own, "--budget", "0.7", "--execute"]) == 2
    assert "captured from a model without data" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", own, "--budget", "0.7", "--costs", "pocket"])
    assert "h100" in capsys.readouterr().err
