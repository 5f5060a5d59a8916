"""Recurrent layers and sequences of different lengths in captured steps: the same numbers as plain PyTorch, at any budget."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from graphs.capture import Step, capture
from graphs.errors import BranchChanged, CaptureError
from planner import plan
from planner.schedule import computes
from tests.onednn import onednn_as


class Model(nn.Module):
    """A linear layer before what is looked at, so that there is a gradient by its input."""

    def __init__(self, inner: nn.Module, function: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.inner = inner
        self.function = function

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.function(self.inner, self.linear(x), *rest)


def mean_square(made: Tensor | tuple[Any, ...]) -> Tensor:
    """Of an output, or of it and states."""
    tensors = [made] if isinstance(made, Tensor) else [made[0], *([made[1]] if isinstance(made[1], Tensor) else made[1])]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def same_as_plain(model: nn.Module, inputs: Sequence[Any], budgets: Sequence[float] = (1.0,)) -> Step:
    """Two planned steps at each budget against plain ones, weights changing in between; the captured step."""
    step, plain = capture(model, tuple(inputs)), copy.deepcopy(model)
    for share in budgets:
        made = plan(step, share, time_limit_s=3)
        assert made.peak_bytes <= made.budget_bytes
        ours = made.module()
        for seed in range(2):
            answers = []
            for one in (ours, plain):
                torch.manual_seed(seed)
                one.zero_grad()
                loss = one(*inputs)
                loss.backward()
                answers.append((loss.detach(), [p.grad for p in one.parameters()]))
            assert all(map(torch.equal, ours.buffers(), plain.buffers()))
            assert torch.equal(answers[0][0], answers[1][0])
            for mine, gradient in zip(answers[0][1], answers[1][1], strict=True):
                assert gradient is not None and mine is not None and torch.equal(mine, gradient)
            with torch.no_grad():
                for p in (*model.parameters(), *plain.parameters()):
                    p.mul_(0.9)
    return step


def layers(kind: Callable[..., nn.RNNBase], *args: Any, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(kind(*args, **options), lambda inner, x: mean_square(inner(x)))


@pytest.mark.parametrize("hidden", [1, 7, 32, 40])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_have_the_same_answer(kind: Callable[..., nn.RNNBase], hidden: int) -> None:
    same_as_plain(layers(kind, 8, hidden), (torch.randn(5, 3, 8),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True, "batch_first": True},
        {"dropout": 0.5, "bidirectional": True},
        {"bias": False},
        {"dtype": torch.bfloat16, "batch_first": True},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_options_of_layers_count(kind: Callable[..., nn.RNNBase], options: dict[str, Any]) -> None:
    model = layers(kind, 8, 7, **{"num_layers": 2} | options).to(options.get("dtype", torch.float))
    same_as_plain(model, (torch.randn(3, 2, 8, dtype=options.get("dtype")),))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_are_cells() -> None:
    step = same_as_plain(layers(nn.LSTM, 8, 7, proj_size=3), (torch.randn(4, 3, 8),))
    assert not any(op.kind.startswith("belady.lstm_layer") for op in step.graph.ops)


def test_an_lstm_in_evaluation_and_one_without_a_batch() -> None:
    model = layers(nn.LSTM, 8, 7, num_layers=2, dropout=0.5).eval()
    same_as_plain(model, (torch.randn(4, 3, 8),))
    same_as_plain(layers(nn.LSTM, 8, 7, num_layers=2), (torch.randn(4, 8),))


def test_a_frozen_lstm_without_gradients_keeps_nothing_for_a_derivative() -> None:
    torch.manual_seed(0)

    def teach(inner: nn.LSTM, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = inner(x.detach())[0]
        return (x - target).square().mean()

    model = Model(nn.LSTM(8, 8).requires_grad_(False), teach)
    step = capture(model, torch.randn(4, 3, 8))
    (layer,) = (node for node in step.module.graph.nodes if node.target is torch.ops.belady.lstm_layer.default)
    assert layer.meta["val"][3].numel() == 0
    x = torch.randn(4, 3, 8)
    loss = plan(model, 1.0, inputs=(x,), time_limit_s=3).module()(x)
    assert torch.equal(loss.detach(), model(x).detach())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_autocast_casts_the_weights_of_two_calls_once(kind: Callable[..., nn.RNNBase]) -> None:
    torch.manual_seed(0)

    def twice(inner: nn.RNNBase, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(inner(x)) + mean_square(inner(2 * x))

    model, x = Model(kind(8, 7), twice), torch.randn(4, 3, 8)
    try:
        model(x)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("plain PyTorch has no kernel for this layer in bfloat16 on this processor")
    same_as_plain(model, (x,))


def test_the_kernel_is_not_taken_where_the_program_takes_none() -> None:
    model, x = layers(nn.LSTM, 8, 7), torch.randn(4, 3, 8)
    with onednn_as(False):
        step = same_as_plain(model, (x,))
    assert not any(op.kind.startswith("belady.lstm_layer") for op in step.graph.ops)
    step = capture(model, x)
    assert sum(op.kind.startswith("belady.lstm_layer") for op in step.graph.ops) == 2


def test_layers_run_again_where_memory_is_short() -> None:
    torch.manual_seed(0)
    inner = nn.ModuleList(nn.LSTM(8, 8) for _ in range(4))

    def chain(parts: nn.ModuleList, x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)[0].tanh()
        return x.square().mean()

    model, x = Model(inner, chain), torch.randn(12, 8, 8)
    step = same_as_plain(model, (x,), (0.8, 0.6))
    names = [step.graph.ops[i].kind for i in computes(plan(model, 0.6, inputs=(x,), time_limit_s=3).schedule)]
    assert names.count("belady.lstm_layer") > 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_computed_weights_are_computed_as_often(kind: Callable[..., nn.RNNBase]) -> None:
    """Each is a power iteration, which changes buffers. A copy would begin with fewer, as it refers to the copied weights."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.utils.parametrizations.spectral_norm(kind(8, 7), "weight_hh_l0")

    ours, plain, x = made(), made(), torch.randn(4, 3, 8)
    planned = plan(ours, 1.0, inputs=x, loss=mean_square, time_limit_s=3).module()
    for _ in range(3):
        assert torch.equal(planned(x).detach(), mean_square(plain(x)).detach())
        assert all(map(torch.equal, ours.buffers(), plain.buffers()))


def test_a_derivative_of_a_derivative_is_refused() -> None:
    def penalty(inner: nn.LSTM, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(inner(x)[0].sum(), x, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(CaptureError, match=r"differentiated again.*nn\.LSTMCell"):
        capture(Model(nn.LSTM(8, 7), penalty), torch.randn(4, 3, 8))


def test_layers_under_a_transform_of_torch_func_are_cells() -> None:
    torch.manual_seed(0)

    def gradients(inner: nn.LSTM, x: Tensor) -> Tensor:
        weights = {name: p.detach() for name, p in inner.named_parameters()}
        found = torch.func.grad(lambda w: torch.func.functional_call(inner, w, (x.detach(),))[0].square().mean())(weights)
        return inner(x)[0].square().mean() + torch.stack([each.square().sum() for each in found.values()]).sum()

    step = capture(Model(nn.LSTM(8, 7), gradients), torch.randn(4, 3, 8))
    assert sum(op.kind == "belady.lstm_layer" for op in step.graph.ops) == 1


class Looks(nn.Module):
    """Has another thread compute while it is traced."""

    def __init__(self, part: nn.Module, transformed: bool) -> None:
        super().__init__()
        self.part, self.transformed = part, transformed

    def forward(self, x: Tensor) -> Tensor:
        elsewhere(note)

        def run(x: Tensor) -> Tensor:
            out = self.part(x)
            return mean_square(out[0] if isinstance(out, tuple) else out)

        loss = run(x)
        if self.transformed:
            loss = loss + torch.func.grad(run)(x).square().sum()
        return loss


noted: list[Tensor] = []
conv, image = nn.Conv2d(3, 8, 3, padding=1), torch.randn(4, 3, 12, 12)


def note() -> None:
    noted.append(conv(image).detach())


def elsewhere(do: Callable[[], None]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize(
    "part", [lambda: nn.Linear(8, 8), lambda: nn.Conv1d(3, 3, 3), lambda: nn.LSTM(8, 7), lambda: nn.LSTM(8, 7, proj_size=3)]
)
def test_other_threads_keep_their_kernels_during_a_capture(
    part: Callable[[], nn.Module], transformed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether oneDNN is on is one answer for all threads."""
    noted.clear()
    note()
    monkeypatch.setattr(torch._C, "_set_mkldnn_enabled", lambda enabled: pytest.fail("a capture switches oneDNN"))
    capture(Looks(part(), transformed), torch.randn(4, 3, 8))
    assert len(noted) == 3  # the forward is traced twice
    assert all(torch.equal(each, noted[0]) for each in noted)


class Transformed(nn.Module):
    def __init__(self, layers: nn.LSTM) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            out, (_, c) = self.layers(x)
            return mean_square(out) + c.sum()

        return torch.func.grad(run)(x).square().sum()


def as_text(step: Step) -> list[str]:
    return [f"{node.target} {node.args} {node.kwargs} {node.meta.get('val')}" for node in step.module.graph.nodes]


@pytest.mark.parametrize("projected", [0, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False, "batch_first": True}, {"num_layers": 2, "dropout": 0.3}])
def test_cells_beside_onednn_are_those_without_it(projected: int, bidirectional: bool, options: dict[str, Any]) -> None:
    """Layers that oneDNN does not take, while it is on."""
    layers = nn.LSTM(8, 6, proj_size=projected, bidirectional=bidirectional, **options)
    model, x = Transformed(layers), torch.randn(4, 3, 8)
    with onednn_as(False):
        without = capture(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_text(capture(model, x)) == as_text(without)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("hidden", [3, 33, 64])
def test_cells_have_the_same_answer(kind: Callable[..., nn.RNNCellBase], hidden: int) -> None:
    torch.manual_seed(0)

    def unrolled(cell: nn.RNNCellBase, x: Tensor) -> Tensor:
        state: Any = None
        for step in x:
            state = cell(step, state)
        return mean_square(state[0] if isinstance(state, tuple) else state)

    same_as_plain(Model(kind(8, hidden), unrolled), (torch.randn(4, 5, 8),))


@pytest.mark.parametrize("write", ["sigmoid_", "exp2_", "sinh_"])
@pytest.mark.parametrize("rows", [5, 1])
def test_writes_between_gaps_go_row_by_row(write: str, rows: int) -> None:
    """Rows that do not fill a kernel's vectors are computed otherwise at their ends."""
    torch.manual_seed(0)

    def gates(inner: nn.Linear, x: Tensor) -> Tensor:
        first, second = inner(x).unsafe_chunk(2, 1)
        written = getattr(first.mul_(0.9), write)()
        return (written + second.mul_(0.5).sigmoid()).square().mean()

    same_as_plain(Model(nn.Linear(8, 46), gates), (torch.randn(rows, 8),))


class Averaged(nn.Module):
    """Writes to all of a buffer that has gaps, then to some rows of it, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.arange(96.0).view(8, 12)[:, 3:8])

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(2)
        self.mean[1:4].mul_(0.5)
        return (self.linear(x) * self.mean.sum().sin()).mean()


def test_writes_through_views_are_read_too() -> None:
    torch.manual_seed(0)
    same_as_plain(Averaged(), (torch.randn(5, 8),))


def test_sums_of_what_was_written_between_gaps_are_added_up_in_the_same_order() -> None:
    torch.manual_seed(0)

    def sums(inner: nn.Linear, x: Tensor) -> Tensor:
        first, _ = inner(x).unsafe_chunk(2, 1)
        first.add_(1)
        return first.sum().sin() + (first @ torch.ones(23)).mean()

    same_as_plain(Model(nn.Linear(8, 46), sums), (torch.randn(200, 8),))


# Sequences of different lengths.


def packed(inner: nn.RNNBase, x: Tensor, lengths: Any, sort: bool = False, total: int | None = None) -> Tensor:
    rows = pack_padded_sequence(x, lengths, inner.batch_first, enforce_sorted=not sort)
    padded, again = pad_packed_sequence(inner(rows)[0], inner.batch_first, 0.25, total)
    assert again.shape == (x.shape[0 if inner.batch_first else 1],)
    return mean_square(padded * torch.arange(padded.numel()).view(padded.shape))


@pytest.mark.parametrize(("kind", "batch_first"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True), (nn.RNN, False)])
def test_packed_sequences_have_the_same_answer(kind: Callable[..., nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    model = Model(kind(8, 7, 2, batch_first=batch_first, bidirectional=True, dropout=0.5), packed)
    x = torch.randn(3, 4, 8) if batch_first else torch.randn(4, 3, 8)
    step = same_as_plain(model, (x, torch.tensor([4, 3, 1])))
    assert [answer for answer, _ in step.answers] == [(4, 3, 1)]


@pytest.mark.parametrize(("sort", "total", "lengths"), [(True, None, [2, 4, 2]), (False, 5, [4, 4, 2]), (True, 4, [2, 3, 3])])
def test_sequences_are_sorted_and_padded_further(sort: bool, total: int | None, lengths: list[int]) -> None:
    torch.manual_seed(0)
    same_as_plain(Model(nn.GRU(8, 7), packed), (torch.randn(4, 3, 8), torch.tensor(lengths), sort, total))


def test_lengths_in_a_list_are_the_same_in_each_call() -> None:
    torch.manual_seed(0)
    model = Model(nn.GRU(8, 7), lambda inner, x: packed(inner, x, [4, 2]))
    assert not same_as_plain(model, (torch.randn(4, 2, 8),), (1.0, 0.9)).answers


def test_other_lengths_are_another_step() -> None:
    torch.manual_seed(0)
    model, x = Model(nn.GRU(8, 7), packed), torch.randn(5, 3, 8)
    planned = plan(model, 1.0, inputs=(x, torch.tensor([5, 4, 1])), time_limit_s=3).module()
    with pytest.raises(BranchChanged, match="pack_padded_sequence"):
        planned(x, torch.tensor([5, 3, 1]))
    sorted_by_us = plan(model, 1.0, inputs=(x, torch.tensor([4, 5, 1]), True), time_limit_s=3).module()
    for lengths in ([1, 5, 4], [5, 4, 1]):  # the same in another order
        given = x, torch.tensor(lengths), True
        assert torch.equal(sorted_by_us(*given).detach(), model(*given).detach())


def test_more_lengths_than_sizes_are_data_and_what_to_do_is_said() -> None:
    torch.manual_seed(0)
    model, x = Model(nn.GRU(8, 7), packed), torch.randn(2, 130, 8)
    lengths = [2] * 65 + [1] * 65
    with pytest.raises(CaptureError, match=r"up to 128 lengths in a tensor are asked for.*give more of them as a list"):
        capture(model, (x, torch.tensor(lengths)))
    same_as_plain(Model(nn.GRU(8, 7), lambda inner, x: packed(inner, x, lengths)), (x,))


def test_what_is_packed_already_can_be_given() -> None:
    torch.manual_seed(0)

    def run(inner: nn.GRU, x: Tensor, batch_sizes: Tensor) -> Tensor:
        return mean_square(inner(PackedSequence(x, batch_sizes))[0].data)

    same_as_plain(Model(nn.GRU(8, 7), run), (torch.randn(6, 8), torch.tensor([3, 2, 1])))


@pytest.mark.parametrize(
    ("lengths", "total", "words"),
    [
        ([2, 5, 1], None, "sorted in decreasing order"),
        ([5, 2, 0], None, "greater than 0"),
        ([5, 2], None, "to be equal to batch_size"),
        ([5, 2, 1], 3, "total_length"),
    ],
)
def test_lengths_that_make_no_sense_are_told_as_pytorch_does(lengths: list[int], total: int | None, words: str) -> None:
    torch.manual_seed(0)
    model = Model(nn.GRU(8, 7), lambda inner, x: packed(inner, x, lengths, total=total))
    x = torch.randn(5, 3, 8)
    with pytest.raises((RuntimeError, ValueError), match=words):
        model(x)
    with pytest.raises(CaptureError, match=words):
        capture(model, x)
