"""Recurrent layers as cuDNN's kernel, with a stand-in for the kernel on the CPU: everything but the kernel itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.as_eager import cudnn_recurrent
from graphs.capture import capture
from graphs.errors import CaptureError
from graphs.torch_private.tensors import storage_key
from planner import plan
from planner.schedule import computes

from .test_recurrent import Model, layers, mean_square, packed, same_as_plain

RESERVE = torch.arange(64, dtype=torch.uint8)
PADDING = 3  # elements of its weights that belong to none of them


def flatten(weights: list[Tensor], stride: int, width: int, *options: Any) -> Tensor:
    """Biases first, as no module has them."""
    flat = torch.zeros(sum(weight.numel() for weight in weights) + PADDING, dtype=weights[0].dtype)
    at = PADDING
    for weight in sorted(weights, key=Tensor.dim):
        place = flat.as_strided(weight.shape, torch.empty(weight.shape).stride(), at)
        with torch.no_grad():
            place.copy_(weight)
        weight.data = place
        at += weight.numel()
    return flat


class Kernel:
    """What ``aten._cudnn_rnn`` and its backward do, in a thread of its own, where no trace sees it."""

    def __init__(self) -> None:
        self.apart = ThreadPoolExecutor(1)

    @staticmethod
    def _forward(
        input: Tensor, weights: Sequence[Tensor], stride: int, flat: Tensor, h: Tensor, c: Tensor | None, mode: int, *rest: Any
    ) -> tuple[Tensor, ...]:
        hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional, batch_sizes, state = rest
        assert dropout == 0 and state is None and (h if c is None else c).shape[2] == hidden_size
        assert proj_size == (0 if c is None or c.shape[2] == h.shape[2] else h.shape[2])
        twins = [weight.detach().clone() for weight in weights]
        assert torch.equal(flat, flatten(twins, stride, input.shape[-1]))
        name = {number: name for name, number in cudnn_recurrent.MODES.items()}[mode]
        data = (torch.tensor(batch_sizes),) if batch_sizes else ()
        options = stride - bool(proj_size) == 4, num_layers, 0.0, train, bidirectional, *(() if batch_sizes else (batch_first,))
        made = getattr(torch, name)(input, *data, h if c is None else [h, c], list(weights), *options)
        return made if c is not None else (*made, h.new_empty(0))

    def forward(self, *args: Any) -> tuple[Any, ...]:
        def run() -> tuple[Any, ...]:
            made = self._forward(args[0].detach().requires_grad_(), *args[1:])  # as where there will be a derivative
            return *(each.detach() for each in made), RESERVE.clone() if args[12] else RESERVE[:0].clone(), args[3]

        return self.apart.submit(run).result()

    def backward(self, *args: Any) -> tuple[Any, ...]:
        input, weights, stride, flat, h, c, output, grad_output, grad_h, grad_c, *options, reserve, wanted = args
        if not options[6]:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        assert torch.equal(reserve, RESERVE)  # nobody has worked in it
        reserve.zero_()

        def run() -> tuple[Any, ...]:
            given = [None if each is None else each.detach().requires_grad_() for each in (input, h, c, *weights)]
            made = self._forward(given[0], given[3:], stride, flat, given[1], given[2], *options)
            assert torch.equal(made[0], output)
            pairs = [(a, b) for a, b in zip(made, (grad_output, grad_h, grad_c), strict=True) if b is not None]
            leaves = [each for each in given if each is not None]
            found = torch.autograd.grad([a for a, _ in pairs], leaves, [b for _, b in pairs])
            rest = list(found)
            gradients = [None if each is None else rest.pop(0) for each in given]
            of_weights = [each.clone() for each in gradients[3:] if each is not None]
            flatten(of_weights, stride, input.shape[-1])
            states = [each if want else None for each, want in zip(gradients[:3], wanted, strict=False)]
            return *states, of_weights if wanted[3] else []

        return self.apart.submit(run).result()


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = Kernel()

    def moved(*args: Any) -> Tensor:
        return made.apart.submit(flatten, *args).result()

    operators = {"_cudnn_rnn": made.forward, "_cudnn_rnn_backward": made.backward, "_cudnn_rnn_flatten_weight": moved}
    stand_ins = {name: SimpleNamespace(default=function) for name, function in operators.items()}
    monkeypatch.setattr(cudnn_recurrent, "aten", SimpleNamespace(**stand_ins))
    monkeypatch.setattr(cudnn_recurrent, "computes_in", lambda input: input.dtype)
    caches = cudnn_recurrent._asked, cudnn_recurrent._places
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


KINDS = [nn.LSTM, nn.GRU, nn.RNN]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "num_layers": 2},
        {"dtype": torch.float64, "dropout": 0.5},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_layers_have_the_same_answer(kind: Callable[..., nn.RNNBase], options: dict[str, Any]) -> None:
    model = layers(kind, 8, 7, **options).to(options.get("dtype", torch.float))
    step = same_as_plain(model, (torch.randn(4, 3, 8, dtype=options.get("dtype")),))
    kinds = [op.kind for op in step.graph.ops]
    assert kinds.count("belady.cudnn_rnn") == kinds.count("belady.cudnn_rnn_backward") == 1
    gradients = {step.value_of[n] for n, r in zip(outputs(step), step.results, strict=True) if r.name.startswith("inner")}
    assert len(gradients) == 1  # views of one piece of memory, as the kernel makes them


def outputs(step: Any) -> list[Any]:
    return list(step.module.graph.output_node().args[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections() -> None:
    same_as_plain(layers(nn.LSTM, 8, 7, proj_size=3, num_layers=2), (torch.randn(4, 3, 8),))


def test_rectified() -> None:
    same_as_plain(layers(nn.RNN, 8, 7, nonlinearity="relu"), (torch.randn(4, 3, 8),))


def test_weights_that_lie_together_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(nn.LSTM, 8, 7, num_layers=2)
    flatten([p.data for p in model.inner.parameters()], 4, 8)
    flat = flatten(list(model.inner.parameters()), 4, 8)
    assert {storage_key(p) for p in model.inner.parameters()} == {storage_key(flat)}
    step = same_as_plain(model, (torch.randn(4, 3, 8),))
    calls = []
    monkeypatch.setattr(cudnn_recurrent, "_flatten", lambda *args: calls.append(args))
    weights = list(model.inner.parameters())
    node = next(n for n in step.module.graph.nodes if n.target is torch.ops.belady.cudnn_rnn.default)
    options = cudnn_recurrent._Options.of(node.args[4:])
    assert storage_key(cudnn_recurrent._flat(weights, 8, options)) == storage_key(weights[0]) and not calls


def test_states_are_given_and_returned() -> None:
    torch.manual_seed(0)

    def run(inner: nn.LSTM, x: Tensor, c: Tensor) -> Tensor:
        output, (last_h, last_c) = inner(x, (x[:1, :, :7].contiguous(), c))
        return output.mean() + last_c.square().mean() + last_h[0, 0, 0]

    same_as_plain(Model(nn.LSTM(8, 7), run), (torch.randn(4, 3, 8), torch.randn(1, 3, 7)))
    same_as_plain(Model(nn.GRU(8, 7), lambda inner, x: inner(x)[1].square().mean()), (torch.randn(4, 3, 8),))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_run_again_where_memory_is_short(kind: Callable[..., nn.RNNBase]) -> None:
    torch.manual_seed(0)
    inner = nn.ModuleList(kind(8, 8) for _ in range(4))

    def chain(parts: nn.ModuleList, x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)[0].tanh()
        return x.square().mean()

    model, x = Model(inner, chain), torch.randn(24, 16, 8)
    same_as_plain(model, (x,), (0.8, 0.6))
    found = plan(model, 0.6, inputs=(x,), time_limit_s=3)
    names = [found.graph.ops[i].kind for i in computes(found.schedule)]
    assert names.count("belady.cudnn_rnn") > 4


def test_a_backward_may_run_again() -> None:
    model, x = layers(nn.GRU, 8, 7), torch.randn(4, 3, 8)
    step = capture(model, x)
    node = next(n for n in step.module.graph.nodes if n.target is torch.ops.belady.cudnn_rnn_backward.default)
    input, h, weights = torch.randn(4, 3, 8), torch.zeros(1, 3, 7), [p.detach() for p in model.inner.parameters()]
    forward = torch.ops.belady.cudnn_rnn(input, weights, h, None, *node.args[9:-1])
    given = input, weights, h, None, forward[0], forward[3], torch.ones_like(forward[0]), None, None, *node.args[9:]
    first, second = (torch.ops.belady.cudnn_rnn_backward(*given) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences(kind: Callable[..., nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    model = Model(kind(8, 7, 2, batch_first=batch_first, bidirectional=True), packed)
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    step = same_as_plain(model, (x, torch.tensor([5, 4, 1])))
    assert sum(op.kind == "belady.cudnn_rnn" for op in step.graph.ops) == 1
    assert [answer for answer, _ in step.answers] == [(5, 4, 1)]


def test_frozen_layers_and_those_without_gradients() -> None:
    torch.manual_seed(0)

    def teach(inner: nn.GRU, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = inner(x.detach())[0]
        return (inner(x)[0] - 2 * target).square().mean()

    model = Model(nn.GRU(8, 8).requires_grad_(False), teach)
    step = capture(model, torch.randn(4, 3, 8))
    (backward,) = (n for n in step.module.graph.nodes if n.target is torch.ops.belady.cudnn_rnn_backward.default)
    assert backward.args[-1] == [True, False, False, False]
    x, made = torch.randn(4, 3, 8), plan(step, 1.0, time_limit_s=3).module()
    made(x).backward()
    ours = [p.grad for p in model.linear.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(map(torch.equal, ours, [p.grad for p in model.linear.parameters()]))


def test_weights_are_as_they_were_after_a_capture() -> None:
    model = layers(nn.LSTM, 8, 7)
    before = model.inner._flat_weights, [p.data_ptr() for p in model.parameters()]
    capture(model, torch.randn(4, 3, 8))
    assert model.inner._flat_weights is before[0] and not model.inner._weights_have_changed()
    assert [p.data_ptr() for p in model.parameters()] == before[1]


def test_what_cannot_be_run_again_is_refused() -> None:
    x = torch.randn(4, 3, 8)
    with pytest.raises(CaptureError, match=r"dropout between the layers of one module \(lstm\).*nn.Dropout between them"):
        capture(layers(nn.LSTM, 8, 7, num_layers=2, dropout=0.5), x)
    with pytest.raises(CaptureError, match="training mode"):  # as PyTorch says, too
        capture(layers(nn.GRU, 8, 7, num_layers=2, dropout=0.5).eval(), x)

    def penalty(inner: nn.RNNBase, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(inner(x)[0].sum(), x, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(CaptureError, match=r"differentiated again.*nn\.LSTMCell"):
        capture(Model(nn.GRU(8, 7), penalty), x)

    def transformed(inner: nn.RNNBase, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: mean_square(inner(y)))(x).sum()

    with pytest.raises(CaptureError, match=r"inside of a transform of torch\.func"):
        capture(Model(nn.GRU(8, 7), transformed), x)
