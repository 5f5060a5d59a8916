"""What ops are timed on makes kernels do their usual work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.capture import Step, capture
from graphs.made_up import arguments_of
from graphs.profile import measured


class Using(nn.Module):
    """A linear layer, and then what is to be timed."""

    def __init__(self, function: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.linear, self.table, self.function = nn.Linear(width, width), nn.Parameter(torch.randn(20, width)), function

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(self, self.linear(x), *others).square().mean()


def given(step: Step, name: str) -> dict[str, Any]:
    """The made-up arguments of the first call of an operator, by name."""
    node = next(node for node in step.calls if str(node.target).startswith(f"aten.{name}."))
    args, kwargs = arguments_of(node, step.device)
    return {argument.name: value for argument, value in zip(node.target._schema.arguments, args, strict=False)} | kwargs  # type: ignore[union-attr]


def check(step: Step, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    priced = measured(step, cache_dir=tmp_path, repeats=1)
    assert all(op.time_ns > 0 for op in priced.graph.ops)
    assert not [record for record in caplog.records if record.name == "belady"], "every op runs alone"


def test_lengths_are_as_long_as_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def ctc(m: Any, h: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return F.ctc_loss(h.log_softmax(-1), targets, lengths, target_lengths)

    targets = torch.randint(1, 8, (2, 5)), torch.full((2,), 30), torch.full((2,), 5)
    step = capture(Using(ctc), (torch.randn(30, 2, 8), *targets))
    for name in ("_ctc_loss", "_ctc_loss_backward"):
        made = given(step, name)
        assert made["input_lengths"].tolist() == [30, 30] and made["target_lengths"].tolist() == [5, 5]
        assert made["targets"].unique().numel() > 2 and made["targets"].min() >= 0 and made["targets"].max() < 8
    check(step, tmp_path, caplog)


@pytest.mark.parametrize(
    ("name", "function", "index", "below"),
    [
        ("take", lambda m, h, i: h.take(i), "index", 24),
        ("put", lambda m, h, i: h.put(i, h.flatten()[:12].clone(), accumulate=True), "index", 24),
        ("scatter_reduce", lambda m, h, i: h.scatter_reduce(0, i[:, None].expand(-1, 8) % 3, h.repeat(4, 1), "amax"), "index", 3),
        ("gather", lambda m, h, i: h.gather(1, i.view(3, 4) % 8), "index", 8),
        ("index_select", lambda m, h, i: m.table.index_select(0, i), "index", 20),
        ("index_reduce", lambda m, h, i: h.index_reduce(0, i % 3, h.repeat(4, 1), "amax"), "index", 3),
        ("_embedding_bag", lambda m, h, i: F.embedding_bag(i, m.table, torch.tensor([0, 5, 8])) + h, "indices", 20),
    ],
)
def test_indices_are_drawn_from_all_there_are(
    name: str, function: Any, index: str, below: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = capture(Using(function), (torch.randn(3, 8), torch.arange(12)))
    made = given(step, name)[index]
    assert made.unique().numel() > min(below, 6) / 2 and made.min() >= 0 and made.max() < below
    check(step, tmp_path, caplog)


def test_bags_and_segments_share_all_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bags(m: Any, h: Tensor, indices: Tensor) -> Tensor:
        return F.embedding_bag(indices, m.table, torch.tensor([0, 5, 8, 12]), include_last_offset=True) + h

    step = capture(Using(bags), (torch.randn(3, 8), torch.arange(12)))
    assert given(step, "_embedding_bag")["offsets"].tolist() == [0, 4, 8, 12]
    check(step, tmp_path, caplog)

    def segments(m: Any, h: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(h, "mean", lengths=lengths)

    step = capture(Using(segments), (torch.randn(7, 8), torch.tensor([3, 3, 1])))
    assert given(step, "segment_reduce")["lengths"].tolist() == [2, 2, 3]
    check(step, tmp_path, caplog)

    def repeated(m: Any, h: Tensor, repeats: Tensor) -> Tensor:
        return h.repeat_interleave(repeats, dim=0, output_size=8)

    step = capture(Using(repeated), (torch.randn(3, 8), torch.tensor([5, 2, 1])))
    assert given(step, "repeat_interleave")["repeats"].tolist() == [2, 3, 3]
    check(step, tmp_path, caplog)


def test_views_are_filled_and_not_all_that_lies_around_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def repeated(m: Any, h: Tensor, repeats: Tensor) -> Tensor:
        return h.repeat_interleave(repeats[1:4], dim=0, output_size=8)

    step = capture(Using(repeated), (torch.randn(3, 8), torch.tensor([9, 5, 2, 1, 9])))
    assert given(step, "repeat_interleave")["repeats"].tolist() == [2, 3, 3]
    check(step, tmp_path, caplog)

    def bags(m: Any, h: Tensor, both: Tensor) -> Tensor:
        return F.embedding_bag(both[:12], m.table, both[12:]) + h

    step = capture(Using(bags), (torch.randn(2, 8), torch.tensor([*range(12), 0, 5])))
    made = given(step, "_embedding_bag")
    assert made["offsets"].tolist() == [0, 6] and made["indices"].unique().numel() > 3
    check(step, tmp_path, caplog)
