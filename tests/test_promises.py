"""What every plan of every workload promises: plain PyTorch's numbers to the last bit, in exactly the planned bytes."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import workloads
from graphs.capture import capture
from graphs.collection import WORKLOADS
from graphs.costs import roofline
from graphs.errors import BudgetExceeded, InvalidSchedule
from planner import Plan, min_budget
from planner.execute import PlannedStep, StepResult, run_step
from planner.least.smallest import smallest_known
from planner.measure import measure, resident_before_backward
from planner.plan import plan
from planner.schedule import hold_early, keep_all
from planner.simulate import simulate

STEPS = 10
BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.0)  # of the way from the smallest peak known to work to the keep-all peak
SIZES: dict[str, dict[str, int]] = {  # narrow (see below), so that activations are most of the bytes and a step takes 10 to 50 ms
    "mlp": {"batch": 512, "depth": 4},
    "resnet50": {"batch": 4, "size": 64, "depth": 14},
    "vgg16": {"batch": 8, "size": 32, "depth": 11},
    "unet": {"batch": 1, "size": 32, "depth": 2},
    "mobilenet_v2": {"batch": 2, "size": 64},
    "vit": {"batch": 8, "size": 64, "depth": 2},
    "bert": {"batch": 4, "seq": 48, "depth": 2, "vocab": 48},
    "gpt2": {"batch": 4, "seq": 48, "depth": 2, "vocab": 48},
    "llama": {"batch": 4, "seq": 48, "depth": 2, "vocab": 48},
    "lstm": {"batch": 128, "seq": 5, "depth": 1},
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32]},
    "MobileNetV2Config": {"depth_multiplier": 0.2},
    "ViTConfig": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    "BertConfig": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    "GPT2Config": {"n_embd": 32, "n_head": 2},
    "LlamaConfig": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def narrow(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any, Callable[..., Tensor] | None]:
    """A workload with the layers it always has, an eighth as wide or less."""

    class Library:
        def __getattr__(self, name: str) -> Any:
            found = getattr(library, name)
            return (lambda **given: found(**(given | CONFIGURED[name]))) if name in CONFIGURED else found

    library = workloads.transformers_library()
    monkeypatch.setattr(workloads, "transformers_library", Library)
    monkeypatch.setattr(workloads, "CLASSES", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs, loss = workloads.build(name, **dict[str, Any](SIZES[name]))
    if name in ("mlp", "vgg16", "lstm"):
        torch.manual_seed(0)
        for path, part in list(model.named_modules()):
            if isinstance(part, nn.Linear):
                model.set_submodule(path, nn.Linear(eighth(part.in_features), eighth(part.out_features)))
            elif isinstance(part, nn.Conv2d):
                model.set_submodule(path, nn.Conv2d(eighth(part.in_channels), eighth(part.out_channels), 3, padding=1))
            elif isinstance(part, nn.LSTMCell):
                model.set_submodule(path, nn.LSTMCell(eighth(part.input_size), eighth(part.hidden_size)))
        x, target = inputs
        inputs = x[..., : eighth(x.shape[-1])].contiguous() if name != "vgg16" else x, target % 10
    return model, inputs, loss


def eighth(width: int) -> int:
    """Only of widths, not of the numbers of classes or colours."""
    return width // 8 if width % 64 == 0 else width


class Training:
    """Ten steps from the same start: losses, gradients and buffers after the first, everything after the last."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.start = copy.deepcopy(model.state_dict())

    def reset(self) -> None:
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)

    def first(self, call: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Loss, gradients and buffers of one step from the start."""
        loss = call()
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.detach(), **self.gradients(), **dict(self.model.named_buffers())}

    def gradients(self) -> dict[str, Tensor]:
        return {f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def steps(self, call: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Losses of the steps of an optimizer, and what it leaves behind."""
        self.reset()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = call()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        assert len({loss.item() for loss in losses}) == STEPS, "the model learns"
        return {"losses": torch.stack(losses), "draw": torch.rand(1), **self.gradients(), **self.model.state_dict()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def vars_of(result: StepResult) -> dict[str, Tensor]:
    return {"loss": result.loss, **result.gradients, **{f"{name} (new)": new for name, new in result.buffers.items()}}


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Regression(nn.Module):
    """Its loss takes as many bytes as its output (on a CPU), and the backward reads it nowhere."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)), nn.Linear(64, 64))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x).view(4, 24, 64), wanted)


class Drift(nn.Module):
    """The new content of its buffer is a view, so the old one needs bytes beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 40))
        self.register_buffer("content", torch.randn(30, 40))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight * (self.content * 2)).sin()
        self.content.t().add_(1)
        return (x * y * self.content).exp().mean()


def normed(layers: int) -> nn.Module:
    parts = [[nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()] for _ in range(layers)]
    return nn.Sequential(*itertools.chain(*parts))


def tight_models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor] | None]]:
    return {
        "regression": (Regression(0), (torch.randn(96, 64), torch.randn(4, 24, 64)), None),
        "deep regression": (Regression(2), (torch.randn(96, 64), torch.randn(4, 24, 64)), None),
        "batch norm": (normed(3), (torch.randn(16, 8),), lambda out: out.sum()),
        "drift": (Drift(), (torch.randn(30, 40),), None),
    }


@pytest.mark.parametrize(("name", "any_order"), [*((name, False) for name in tight_models()), ("regression", True)])
def test_tight_plans_train_or_say_truly_what_does(name: str, any_order: bool) -> None:
    torch.manual_seed(0)
    model, inputs, loss = tight_models()[name]
    step = roofline(capture(model, inputs, loss=loss, name=name))
    training = Training(model)
    training.reset()
    wanted = clones(training.first(lambda: step.eager(inputs)))

    def train(planned: Plan) -> None:
        module = planned.module()
        resident_bytes = resident_before_backward(step)
        measured = measure(lambda: training.first(lambda: module(*inputs)), step.device, resident_bytes, prepare=training.reset)
        same(measured.result, wanted)
        assert measured.peak_bytes <= module.peak_bytes <= planned.budget_bytes

    options: dict[str, Any] = {"gap": 0.02, "time_limit_s": 2, "any_order": any_order}
    least_bytes = min_budget(step.graph, time_limit_s=5).works_bytes
    most_bytes = simulate(step.graph, keep_all(step.graph)).peak_bytes
    advised = set()
    for share in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0):
        budget_bytes = least_bytes + int(share * (most_bytes - least_bytes))
        planned = plan(step, budget_bytes, **options)
        if "halves" not in planned.notes:
            train(planned)
            continue
        with pytest.raises((BudgetExceeded, InvalidSchedule), match="as one piece only") as refused:
            planned.module()
        same(vars_of(PlannedStep(step, planned.schedule or ())(inputs)), vars_of(run_step(step, keep_all(step.graph), inputs)))
        advice = re.search(r"plan for ([\d,]+) bytes, which are known to be enough$", str(refused.value))
        assert advice is not None
        advised.add(int(advice[1].replace(",", "")))
        assert budget_bytes < min(advised) <= most_bytes
    assert len(advised) == 1, "something does not fit in halves, and it is the same bytes that are known to work"
    train(plan(step, advised.pop(), **options))


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_budget_of_every_workload(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, loss = narrow(name, monkeypatch)
    step = roofline(capture(model, inputs, loss=loss, name=name))
    training = Training(model)
    training.reset()
    wanted_first = clones(training.first(lambda: step.eager(inputs)))
    wanted = clones(training.steps(lambda: step.eager(inputs)))
    start = hold_early(step.graph, smallest_known(step.graph)[1])
    least_bytes = simulate(step.graph, start).peak_bytes
    most_bytes = simulate(step.graph, keep_all(step.graph)).peak_bytes
    assert least_bytes < 0.85 * most_bytes
    for share in BUDGETS:
        budget_bytes = least_bytes + int(share * (most_bytes - least_bytes))
        planned = plan(step, budget_bytes, gap=0.02, time_limit_s=0.3, start=start)
        assert planned.schedule is not None and planned.peak_bytes is not None
        module = planned.module()

        def call(module: nn.Module = module) -> Tensor:
            result: Tensor = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            return result

        resident_bytes = resident_before_backward(step)
        measured = measure(lambda: training.first(call), step.device, resident_bytes, prepare=training.reset)
        same(measured.result, wanted_first)
        assert measured.peak_bytes <= module.peak_bytes == planned.peak_bytes <= budget_bytes
        assert measured.peak_bytes >= 0.98 * planned.peak_bytes
        same(training.steps(call), wanted)
