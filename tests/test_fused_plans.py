"""torch.compile with our backend and Inductor's kernels: Inductor's answer, in less memory."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

from belady.bench_eager import Convolutions
from belady.gpu_rivals import profiled
from graphs.capture import capture
from planner import compile_backend
from planner.compile_backend import belady
from planner.execution.lowering import Code

from .test_compile_backend import (
    TIGHT,
    CallsCounted,
    Mlp,
    Turns,
    Watched,
    Weights,
    first,
    fresh,
    lines,
    planned_bytes,
    train,
    transformer,
)

__all__ = ["fresh", "lines"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler"),
]
FUSED: dict[str, Any] = {**TIGHT, "kernels": "inductor"}


@pytest.fixture(autouse=True)
def compiled_here() -> Iterator[None]:
    """In this process: a pool of others would outlive the test."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def small(depth: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Each fused kernel takes seconds to compile."""
    return Mlp(32, depth), (torch.randn(512, 32), torch.randint(5, (512,)))


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def loss_of(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_(*inputs: Tensor) -> Any:
        output = call(*inputs)
        return output.square().mean() if isinstance(output, Tensor) and output.dim() else output

    return call_


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (lambda: small(1), 0.5),  # batch norms and dropout
        (lambda: transformer(1), 0.7),  # attention with dropout, a tied embedding
        (lambda: (Watched("largest"), (torch.randn(64, 16),)), 0.9),  # the backward writes to a buffer
    ],
    ids=["norms", "transformer", "watched"],
)
def test_training_is_that_of_inductor(make: Any, budget: float, lines: pytest.LogCaptureFixture) -> None:
    """Random numbers included: both draw the same seeds."""
    model, inputs = make()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=belady, options={**FUSED, "budget": budget}, dynamic=False)
    found = train(loss_of(compiled), model, inputs)
    torch._dynamo.reset()
    close(found, train(loss_of(torch.compile(twin, dynamic=False)), twin, inputs))
    (said,) = planned_bytes(lines)
    assert said["again"] > 0


def test_weights_may_change_after_a_use(lines: pytest.LogCaptureFixture) -> None:
    """The answer of eager execution: where weights change, Inductor alone may have another."""
    model, inputs = Weights("bounded", 1), (torch.randn(64, 16),)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=belady, options={**FUSED, "budget": 0.4}, dynamic=False)
    close(train(compiled, model, inputs), train(twin, twin, inputs))
    (said,) = planned_bytes(lines)
    assert said["again"] > 0


def measured_bytes(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], budget: float) -> int:
    """The peak of a step that is compiled for a budget, residents included."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = make()
    resident = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), *inputs])
    call = loss_of(torch.compile(model, backend=belady, options={**FUSED, "budget": budget}, dynamic=False))

    def once() -> Tensor:
        model.zero_grad()
        loss = first(call(*inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    once()
    return resident + profiled(once)[1]


def test_a_compiled_step_holds_no_more_than_planned(lines: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, inputs = small(3)
        return model.eval(), inputs

    found_bytes = measured_bytes(make, 0.5)
    (said,) = planned_bytes(lines)
    assert found_bytes <= said["budget"]


def test_runs_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing they read is made in the backward: else Inductor fuses those of one op, and all are in memory at once."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return Convolutions(4, 16), (torch.randn(4, 3, 24, 24),)

    found_bytes = measured_bytes(make, 0.45)
    monkeypatch.setattr(compile_backend, "put_after", lambda *_: None)
    assert found_bytes < 0.7 * measured_bytes(make, 0.45)


class Shifted(nn.Module):
    """Its backward reads the buffer only to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("shift", torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x) + self.shift)
        return x.square().mean()


def test_a_buffer_may_be_written_before_the_backward(lines: pytest.LogCaptureFixture) -> None:
    model, x = Shifted(), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=belady, options={**FUSED, "budget": 0.6}, dynamic=False)
    for part, call in ((model, compiled), (twin, twin)):
        loss = call(x)
        part.shift.zero_()
        loss.backward()
    close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    (said,) = planned_bytes(lines)
    assert said["again"] > 0


def test_options_of_inductor_are_taken(lines: pytest.LogCaptureFixture) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with pytest.raises(BackendCompilerFailed, match='takes kernels of "eager" execution or of "inductor", not \'triton\''):
        torch.compile(layer, backend=belady, options={"budget": 1.0, "kernels": "triton"})(x)
    for options in ({"max_autotune": False}, {"kernels": "inductor", "max_autotunes": False}):
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match=r"has no option 'max_autotunes?'"):
            torch.compile(layer, backend=belady, options={"budget": 1.0, **options})(x).sum().backward()
    torch._dynamo.reset()
    call = torch.compile(layer, backend=belady, options={"budget": 1.0, "kernels": "inductor", "max_autotune": False})
    close(call(x), layer(x))
    assert len(planned_bytes(lines)) == 1
    with torch.no_grad():
        close(call(x), layer(x))
    assert len(planned_bytes(lines)) == 1  # nothing is planned where there is no backward


def test_another_budget_is_another_plan(lines: pytest.LogCaptureFixture) -> None:
    """Not that of an earlier compilation, which PyTorch keeps on the disk."""
    model, x = Shifted(), torch.randn(256, 32)
    for budget in (1.0, 0.6, 1.0):
        torch._dynamo.reset()
        compile_backend._known.clear()
        torch.compile(model, backend=belady, options={**FUSED, "budget": budget}, dynamic=False)(x).backward()
    assert [said["again"] > 0 for said in planned_bytes(lines)] == [False, True, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [(Turns, "the memory of another input"), (CallsCounted, "takes the place of another output")],
    ids=["turns", "counted"],
)
def test_what_inductor_gets_wrong_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    model = make()
    x = torch.randn(4, 8) if isinstance(model, Turns) else torch.randn(16, 16)
    compiled = torch.compile(model, backend=belady, options={**FUSED, "budget": 1.0}, dynamic=False)
    with pytest.raises(BackendCompilerFailed, match=f"{words}.*only with kernels of eager execution"):
        compiled(x).sum().backward()


def _calls(saved: Tensor, tangent: Tensor) -> Tensor:
    mm, neg, sin = torch.ops.aten.mm.default, torch.ops.aten.neg.default, torch.ops.aten.sin.default
    a = neg(tangent)
    b = sin(saved)
    c = mm(b, b)
    d = mm(a, c)
    e = mm(c, c)
    f = sin(saved)
    g = mm(f, e)
    h = sin(saved)  # read by no product
    return mm(mm(a, c), h + mm(d, g))


def test_runs_that_could_come_first_wait() -> None:
    """For the last call in front of them that has its place, unless they read what waits for that."""
    code = Code(capture(nn.Linear(2, 2), torch.randn(2, 2), loss=lambda y: y.sum()), ())
    module = fx.symbolic_trace(_calls)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    code.ran = dict(zip(nodes, [10, 0, 1, 11, 2, 0, 3, 0, 11, 12, 13, 14], strict=True))  # 10 to 14 are of the backward
    waiting = compile_backend._waiting(module, code, set(range(10, 15)))
    assert {nodes.index(node): nodes.index(other) for node, other in waiting.items()} == {5: 3, 8: 3}  # f and the second mm(a, c)
