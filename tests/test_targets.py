"""Targets of a CTC loss that a mask chooses from padded labels: each batch of that shape runs, and computes what eager execution
does."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.errors import BranchChanged, CaptureError
from planner.plan import plan

STEPS, CLASSES = 9, 8
LABELS = torch.tensor([[1, 2, 3, 4], [5, -100, 2, -100], [7, -100, -100, -100]])
OTHERS = torch.tensor([[-100, 2, 3, -100], [-100, -100, -100, -100], [1, -100, 1, 1]]), torch.full((3, 4), 2)
Choose = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order: results are compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Speech(nn.Module):
    """What it says of each step, and the loss, as transformers' models take it from labels that are padded by -100."""

    def __init__(self, choose: Choose = Tensor.masked_select, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(CLASSES, CLASSES)
        self.choose, self.options = choose, options

    def lengths(self, mask: Tensor) -> Tensor:
        return mask.sum(-1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels = labels.clone()
        mask = labels >= 0
        lengths, targets = self.lengths(mask), self.choose(labels, mask)
        labels.fill_(3), mask.fill_(True)  # what was chosen before is what it was
        log_probs, steps = self.linear(x).log_softmax(-1), torch.full((x.shape[1],), STEPS)
        return F.ctc_loss(log_probs, targets, steps, lengths, zero_infinity=True, **self.options).sum()


class OtherLengths(Speech):
    """Of which only the sum is right."""

    def lengths(self, mask: Tensor) -> Tensor:
        return mask.sum(-1).flip(0)


class Counts(Speech):
    """Asks how many labels there are, and takes their sum."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chosen = labels[labels >= 0]
        return super().forward(x, labels) / chosen.numel() + chosen.sum() * self.linear.bias.sum()


def speech(batch: int = 3) -> Tensor:
    return torch.randn(STEPS, batch, CLASSES, generator=torch.Generator().manual_seed(batch))


def same(planned: nn.Module, model: nn.Module, *inputs: Tensor) -> bool:
    """Loss and gradients, to the bit."""
    found = []
    for call in (planned, model):
        model.zero_grad()
        loss = call(*inputs)
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in model.parameters() if each.requires_grad)])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("choose", [Tensor.masked_select, lambda each, by: torch.masked_select(each, mask=by), operator.getitem])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_that_a_mask_chooses_stay_padded(batch: int, choose: Choose, reduction: str) -> None:
    """As many or fewer, at the end of rows or not."""
    model, x = Speech(choose, reduction=reduction), speech(batch)
    p = plan(model, 1.0, inputs=(x, LABELS[:batch]))
    assert [answer for answer, _ in p.step.answers] == [True]
    for labels in (LABELS, *OTHERS):
        assert same(p.module(), model, x, labels[:batch])


def test_targets_are_as_long_as_their_mask_says() -> None:
    """Of other lengths with the same sum, the plain loss takes targets from other rows."""
    model, x, even = OtherLengths(), speech(2), torch.tensor([[1, 2, -100], [3, 4, -100]])
    module = plan(model, 1.0, inputs=(x, even)).module()
    assert same(module, model, x, even)
    with pytest.raises(BranchChanged, match=r"told True, at .*F.ctc_loss.*now it is False"):
        module(x, LABELS[1:, :3].contiguous())


@pytest.mark.parametrize(
    "choose",
    [
        lambda labels, mask: labels.masked_select(mask).add_(0),
        lambda labels, mask: (chosen := labels.masked_select(mask), chosen.clamp_(max=5))[0],
        lambda labels, mask: (chosen := labels.masked_select(mask))[: chosen.numel()],
        lambda labels, mask: labels.flatten().masked_select(mask.flatten()),
    ],
)
def test_targets_that_something_else_reads_are_made(choose: Choose) -> None:
    """How long the longest is, nobody knows then."""
    with pytest.raises(CaptureError, match=r"takes memory by the longest target.* give targets padded"):
        plan(Speech(choose), 1.0, inputs=(speech(), LABELS))


def test_what_a_mask_chooses_beside_targets_is_made() -> None:
    """How many there are is answered by the example, and compared."""
    model, x = Counts(), speech()
    p = plan(model, 1.0, inputs=(x, LABELS))
    assert [answer for answer, _ in p.step.answers] == [True, (7,)]
    assert same(p.module(), model, x, LABELS) and same(p.module(), model, x, LABELS.flip(0))
    with pytest.raises(BranchChanged, match=r"told \(7,\), at .*numel"):
        p.module()(x, OTHERS[0])


class Encoded(Speech):
    """Through a frozen encoder, which takes its fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(CLASSES, 2, 16, batch_first=True).eval().requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(self.encoder(x), labels)


def test_frozen_attention_takes_its_fast_path_all_the_same() -> None:
    model, x = Encoded(), speech()
    p = plan(model, 1.0, inputs=(x, LABELS))
    assert "aten._transformer_encoder_layer_fwd" in {op.kind for op in p.graph.ops}
    assert same(p.module(), model, x, LABELS)
