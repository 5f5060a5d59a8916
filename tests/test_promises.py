"""What every plan of every workload promises: plain PyTorch's numbers to the last bit, in exactly the planned bytes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import workloads
from graphs.capture import capture
from graphs.costs import roofline
from graphs.workloads import WORKLOADS
from planner.measure import measure, resident_before_backward
from planner.plan import plan
from planner.schedule import hold_early, keep_all
from planner.simulate import simulate
from planner.smallest import smallest_known

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

    library = workloads._transformers()
    monkeypatch.setattr(workloads, "_transformers", Library)
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


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


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
