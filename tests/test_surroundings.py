"""What a loss takes from around it, by whatever way, is part of a step: a planned call is refused when it has changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphs.errors import InputError
from planner.plan import plan
from tests import factors
from tests.clock import stopwatch

Loss = Callable[[Tensor], Tensor]


def squares(x: Tensor) -> Tensor:
    return x.square().sum()


def of_another_file() -> tuple[Loss, Callable[[], object]]:
    return lambda x: factors.scaled(squares(x)), lambda: setattr(factors, "GAMMA", 0.5)


def of_an_array() -> tuple[Loss, Callable[[], object]]:
    weights = np.array([1.0, 2.0])
    return lambda x: float(weights[0]) * squares(x), lambda: weights.__setitem__(0, 0.5)


def of_an_array_of_one() -> tuple[Loss, Callable[[], object]]:
    weight = np.array(1.0)
    return lambda x: weight.item() * squares(x), lambda: weight.fill(0.5)


def of_a_set() -> tuple[Loss, Callable[[], object]]:
    terms = {"first"}
    return lambda x: squares(x) + (x.sum() if "second" in terms else 0), lambda: terms.add("second")


def of_a_frozen_set() -> tuple[Loss, Callable[[], object]]:
    terms = frozenset({"first"})

    def change() -> None:
        nonlocal terms
        terms = frozenset({"second"})

    return lambda x: squares(x) + (x.sum() if "second" in terms else 0), change


def by_getattr() -> tuple[Loss, Callable[[], object]]:
    arguments = SimpleNamespace(factor=1.0)
    return lambda x: getattr(arguments, "factor") * squares(x), lambda: setattr(arguments, "factor", 0.5)  # noqa: B009


def by_vars() -> tuple[Loss, Callable[[], object]]:
    arguments = SimpleNamespace(factor=1.0)
    return lambda x: vars(arguments)["factor"] * squares(x), lambda: setattr(arguments, "factor", 0.5)


def of_a_scheduler() -> tuple[Loss, Callable[[], object]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step() -> None:
        optimizer.step()
        scheduler.step()

    return lambda x: scheduler.get_last_lr()[0] * squares(x), step


def of_a_length() -> tuple[Loss, Callable[[], object]]:
    queue = factors.Queue()
    return lambda x: len(queue) * squares(x), lambda: queue.items.append(1.0)


def of_a_shape() -> tuple[Loss, Callable[[], object]]:
    rows = torch.ones(4)
    return lambda x: rows.shape[0] * squares(x), lambda: rows.resize_(8)


def by_keyword() -> tuple[Loss, Callable[[], object]]:
    def loss(x: Tensor, *, factor: float = 1.0) -> Tensor:
        return factor * squares(x)

    assert loss.__kwdefaults__ is not None
    return loss, lambda: loss.__kwdefaults__.__setitem__("factor", 0.5)


def of_a_function() -> tuple[Loss, Callable[[], object]]:
    def loss(x: Tensor) -> Tensor:
        factor: float = loss.factor  # type: ignore[attr-defined]
        return factor * squares(x)

    loss.factor = 1.0  # type: ignore[attr-defined]
    return loss, lambda: setattr(loss, "factor", 0.5)


WAYS = {
    of_another_file: "GAMMA is 0.5, but was 1.0",
    of_an_array: "the content of weights is another array than",
    of_an_array_of_one: "the content of weight is another array than",
    of_a_set: "the content of terms is another set than",
    of_a_frozen_set: "the content of terms is another set than",
    by_getattr: "arguments.factor is 0.5, but was 1.0",
    by_vars: "arguments.factor is 0.5, but was 1.0",
    of_a_scheduler: "scheduler._last_lr is another list than",
    of_a_length: "Queue.items is another list than",
    of_a_shape: "the shape of rows is another shape than",
    by_keyword: "factor is 0.5, but was 1.0",
    of_a_function: "loss.factor is 0.5, but was 1.0",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_factor_is_noticed_whatever_way_leads_to_it(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "GAMMA", 1.0)
    loss, change = way()
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    module = plan(model, 1.0, inputs=x, loss=loss).module()
    assert torch.equal(module(x), loss(model(x)))
    change()
    with pytest.raises(InputError, match=WAYS[way]):
        module(x)


class Counts:
    """A library's, as far as one can see from its name."""

    __module__ = "torch.counts"

    def __init__(self) -> None:
        self.calls = 0

    def note(self) -> None:
        """One more."""
        self.calls += 1


def test_what_a_loss_itself_changes_or_does_not_read_may_change() -> None:
    """Counters, sets and arrays that each call writes to, memory that the step reads as it is, and what only a loop uses."""
    meter, seen, count, table = Counts(), set[int](), np.zeros(1), np.ones(8, np.float32)
    Counts.note.__module__ = "torch.counts"
    loop = SimpleNamespace(epoch=0, factor=1.0, history=[0.0])

    def loss(x: Tensor) -> Tensor:
        meter.note()
        seen.add(len(seen))
        count[0] += 1
        return squares(x * torch.from_numpy(table)) * loop.factor

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    module = plan(model, 1.0, inputs=x, loss=loss).module()
    for epoch in range(3):
        loop.epoch = epoch
        loop.history.append(1.0)
        table[:] = epoch
        assert torch.equal(module(x), loss(model(x)))


def test_looking_at_what_is_around_takes_no_long() -> None:
    """In each call."""
    loss, _ = of_an_array()
    module = plan(nn.Linear(8, 8), 1.0, inputs=torch.randn(4, 8), loss=loss).module()
    checks = module.step.fingerprint.check
    checks()
    took_s = stopwatch()
    for _ in range(1000):
        checks()
    assert took_s() < 0.2
