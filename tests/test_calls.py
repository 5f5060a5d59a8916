"""Quicker calls are the same calls."""

import pytest
import torch
from torch import Tensor, nn

from graphs.capture import Step, bind, capture
from graphs.rewriting.rewrites import bernoulli
from graphs.torch_private.names import OpOverload, TorchDispatchMode, tree_leaves
from planner.execute import lower
from planner.execution.calls import quickest
from planner.schedule import keep_all


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x).relu() * 2 + torch.ones(6)).transpose(0, 1)
        best, _ = (y - 1.5).abs().topk(2, dim=0)
        return torch.where(best > 0.1, best, best.pow(2)).sum() + torch.cat([y, y * y]).std() + y.clamp(min=0.0).mean()


@pytest.fixture(scope="module")
def step() -> Step:
    torch.manual_seed(0)
    return capture(Zoo(), torch.randn(4, 6))


def _calls(step: Step, kind: str) -> list[tuple[str, object]]:
    nodes = step.module.graph.nodes
    return [quickest(n) for n in nodes if isinstance(n.target, OpOverload) and n.target.name().startswith(kind)]


def test_known_calls(step: Step) -> None:
    assert ("call_method", "relu") in _calls(step, "aten::relu")
    assert ("call_function", torch.native_layer_norm) in _calls(step, "aten::native_layer_norm")
    assert ("call_method", "transpose") in _calls(step, "aten::transpose")
    assert ("call_function", torch.cat) in _calls(step, "aten::cat")


def test_our_own_operator_is_called_without_the_dispatcher() -> None:
    step = capture(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), torch.randn(4, 6), loss=lambda out: out.sum())
    assert _calls(step, "belady::bernoulli") == [("call_function", bernoulli)]


def test_what_would_end_elsewhere_stays(step: Step) -> None:
    """``x * 2`` is mul.Tensor to Python, so mul.Scalar has no other name; a factory would ask for the default device."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = step.module.graph.find_nodes(op="placeholder")[0].meta["val"]
    times = graph.call_function(torch.ops.aten.mul.Scalar, (x, 2))
    assert quickest(times) == ("call_function", torch.ops.aten.mul.Scalar)
    assert quickest(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))) == ("call_method", "mul")
    ones = graph.call_function(torch.ops.aten.ones.default, ([3],))
    assert quickest(ones) == ("call_function", torch.ops.aten.ones.default)


def test_lowered_code_makes_the_captured_calls(step: Step) -> None:
    """Operator by operator, arguments included, views aside (those may be shared)."""
    seen: list[tuple[str, list[object]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            if not func.is_view:
                seen.append((func.name(), [tuple(a.shape) if isinstance(a, Tensor) else a for a in tree_leaves((args, kwargs))]))
            return func(*args, **(kwargs or {}))

    inputs = torch.randn(4, 6)
    module = lower(step, keep_all(step.graph))
    assert "torch.ops.aten.native_layer_norm.default" not in module.code
    with torch.no_grad(), Record():
        plain = step.module(*bind(step, inputs))
        first = seen.copy()
        seen.clear()
        quick = module.forward(bind(step, inputs))
    assert seen == first
    assert all(torch.equal(a, b) for a, b in zip(plain, quick, strict=True))
