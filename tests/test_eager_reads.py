"""Reads past PyTorch's dispatcher under a budget: whatever can be evicted has been, before each of them."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphs.errors import InputError
from online.blocks.calls import Calls
from online.blocks.keeping import Keeper
from online.blocks.storages import Storages
from online.eager import EagerRun, budget
from online.engines.growing import GrowingEngine
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS


def evict_all(engine: GrowingEngine, storages: Storages) -> None:
    """Evict what can be evicted now."""
    storages.bury()
    for s in range(engine._declared):
        if engine.size_bytes[s] and engine.resident[s] and not engine._locks[s] and not engine._pinned[s]:
            engine._evict(s)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks evict all they can before each operator, and before each storage they bring back."""
    call, guarded = Calls.call, Keeper.guarded
    evicts = False

    def called(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        evict_all(self._engine, self._storages)
        return call(self, func, args, kwargs)

    def brought(self: Any, name: str, step: Callable[[int], None], number: int) -> None:
        nonlocal evicts
        if not evicts:
            evicts = True
            try:
                evict_all(self._engine, self._storages)
            finally:
                evicts = False
        guarded(self, name, step, number)

    monkeypatch.setattr(Calls, "call", called)
    monkeypatch.setattr(Keeper, "guarded", brought)


def push(x: Tensor) -> None:
    """An operator: what was made before it is evicted."""
    _ = x * 7


def block(holding: Any = ()) -> EagerRun:
    return budget("1000GiB", holding=holding, thrash_limit=1e12)


X = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def read_as(x: Tensor) -> tuple[Any, ...]:
    """What is in it, to the last bit."""
    return x.shape, x.dtype, x.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8).tolist()


def recurrent(layer: Callable[..., Any], x: Tensor, *, batch_sizes: Callable[[Tensor], Tensor], **options: Any) -> list[Tensor]:
    """Results and gradients of a recurrent layer, with batch sizes that are computed."""
    torch.manual_seed(0)
    made = layer(4, 5, **options)
    data = (x[:28] * 2).view(7, 4).requires_grad_()
    out = made(nn.utils.rnn.PackedSequence(data, batch_sizes(x)))[0]
    return [
        out.data,
        *nn.utils.rnn.pad_packed_sequence(out),
        *torch.autograd.grad(out.data.square().sum(), [*made.parameters(), data]),
    ]


def by_cumsum(x: Tensor) -> Tensor:
    return (x[:3] * 0).long() + torch.tensor([3, 2, 2])


def cloned(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence((x[:36] * 2).view(4, 3, 3), torch.tensor([4, 2, 1])).batch_sizes.clone()


def by_name(x: Tensor) -> list[Tensor]:
    """Which operator of that name is meant is found out by trying, and what does not fit is written down for a message."""
    torch.manual_seed(0)
    gru, hidden = nn.GRU(4, 5), torch.zeros(1, 3, 5) + x[0]
    given = (x[:28] * 2).view(7, 4), by_cumsum(x), hidden, list(gru.parameters()), True, 1, 0.0, False, False
    return [*torch.ops.aten.gru(*given), *torch.ops.aten.gru.data(*given)]


def refused(x: Tensor) -> list[Tensor]:
    order = x * 1
    push(x)
    with pytest.raises(Exception, match="permute"):
        torch.ops.aten.permute(x, order)
    return [order]


def drawn(generator: torch.Generator | None, states: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Two draws from the same state, which an operator has made."""
    if generator is None:
        torch.manual_seed(3)
        state = states(torch.get_rng_state())
    else:
        state = states(generator.manual_seed(3).get_state())
    first = torch.rand(3, generator=generator)
    push(x)
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)
    second = torch.rand(3, generator=generator)
    assert torch.equal(first, second)
    return [first]


def set_at(x: Tensor, index: Any) -> list[Tensor]:
    written = (x * 1).view(10, 100)
    written[index] = 0.0
    return [written]


def with_gradient(x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (leaf * x).sum().backward()
    return leaf


def copied(x: Tensor) -> list[Tensor]:
    """The gradient of a gradient's owner and attributes are copied with them, each once."""
    leaf: Any = with_gradient(x)
    leaf.grad.aux, leaf.more = x * 3, [x * 4, {"a": x * 5}, leaf.grad]
    push(x)
    both = copy.deepcopy([leaf, leaf.grad])
    copy_of: Any = both[0]
    assert copy_of.grad is both[1] is copy_of.more[2] and copy_of.more[0] is not leaf.more[0]
    return [copy_of, copy_of.grad, copy_of.grad.aux, copy_of.more[0], copy_of.more[1]["a"]]


def pickled(x: Tensor) -> list[Tensor]:
    leaf: Any = with_gradient(x)
    leaf.aux = x * 3
    push(x)
    again, gradient = pickle.loads(pickle.dumps((leaf, leaf.grad)))
    return [again, again.aux, gradient]


def saved(x: Tensor) -> list[Tensor]:
    """Their storages are written when all tensors have been gone through. Those with attributes are asked in another way."""
    several: list[Any] = [x * i for i in range(2, 5)]
    several[0].label = several[1].label = "labelled"
    file = io.BytesIO()
    torch.save(several, file)
    file.seek(0)
    return list(torch.load(file))


def by_numpy(p: Tensor, q: Tensor) -> Tensor:
    return torch.from_numpy(np.abs(p.numpy() - q.numpy()).sum(1))


def by_lists(p: Tensor, q: Tensor) -> Tensor:
    return torch.tensor(
        [sum(abs(a - b) for a, b in zip(*rows, strict=True)) for rows in zip(p.tolist(), q.tolist(), strict=True)]
    )


def triplet(x: Tensor, distance: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    anchor, positive, negative = ((x * i).view(10, 100) for i in (2, 3, 5))
    return [F.triplet_margin_with_distance_loss(anchor, positive, negative, distance_function=distance, margin=50.0)]


class SineByNumpy(Tensor):
    """Its sine leaves PyTorch, all else is as with other tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sin:
            plain = args[0].as_subclass(Tensor)
            twice = plain * 2
            push(plain)
            return torch.from_numpy(np.sin(twice.numpy()))
        return super().__torch_function__(func, types, args, kwargs or {})


def of_a_class(x: Tensor) -> list[Tensor]:
    special = (x * 2).as_subclass(SineByNumpy)
    sine = torch.sin(special)
    push(x)
    special.__repr__()
    return [sine, torch.tensor(special.tolist()), (special + 1).as_subclass(Tensor)]


READS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "tuple in an index": lambda x, i, j: [(x * 2).view(10, 100)[(i % 10, j % 10), :], (x * 2)[((i, j),)]],
    "tuple in a list in an index": lambda x, i, j: [(x * 2)[[(i, j), [j, i]],]],
    "deque in an index": lambda x, i, j: [(x * 2).view(1, -1)[0, deque([i, j])]],
    "write at a tuple": lambda x, i, j: set_at(x, ((i % 10, j % 10), slice(None))),
    "write at a tuple of one": lambda x, i, j: set_at(x, ((i % 10, j % 10),)),
    "LSTM": lambda x, i, j: recurrent(nn.LSTM, x, batch_sizes=by_cumsum, num_layers=2, bidirectional=True),
    "GRU": lambda x, i, j: recurrent(nn.GRU, x, batch_sizes=by_cumsum),
    "RNN": lambda x, i, j: recurrent(nn.RNN, x, batch_sizes=cloned),
    "RNN with ReLU": lambda x, i, j: recurrent(nn.RNN, x, batch_sizes=cloned, nonlinearity="relu"),
    "operators by name": lambda x, i, j: by_name(x),
    "error of an operator": lambda x, i, j: refused(x),
    "state": lambda x, i, j: drawn(None, Tensor.clone, x),
    "state of many": lambda x, i, j: drawn(None, lambda state: torch.stack([state] * 20)[0], x),
    "state of a generator": lambda x, i, j: drawn(torch.Generator(), lambda state: torch.cat([state]), x),
    "copy": lambda x, i, j: copied(x),
    "pickle": lambda x, i, j: pickled(x),
    "file": lambda x, i, j: saved(x),
    "distance by NumPy": lambda x, i, j: triplet(x, by_numpy),
    "distance by lists": lambda x, i, j: triplet(x, by_lists),
    "class of tensors": lambda x, i, j: of_a_class(x),
}


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("name", READS)
def test_what_is_read_past_the_dispatcher_is_there(name: str) -> None:
    def step() -> list[Tensor]:
        i, j = (X * 2).argmax(), (X * 2).argmin()
        push(X)
        return READS[name](X, i, j)

    want = list(map(read_as, step()))
    with block(X) as run:
        got = step()
    assert list(map(read_as, got)) == want
    assert run.counters.recomputations > 0


@pytest.mark.usefixtures("greedy")
def test_a_sequence_in_itself_is_refused_in_pytorchs_words() -> None:
    endless: list[Any] = [0]
    endless.append(endless)
    with block(X), pytest.raises(TypeError, match="self-referential"):
        (X * 2)[(endless,)]


class Refusing(Tensor):
    """Leaves it to others to handle functions, and there are none."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_what_no_class_handles_is_an_error_as_outside() -> None:
    refusing = X.as_subclass(Refusing)
    for around in (contextlib.nullcontext(), block(X)):
        with around, pytest.raises(TypeError, match=r"failed for 'torch\.sin'"):
            torch.sin(refusing)


@pytest.mark.parametrize("heuristic", ["best", "", *ADDRESS_HEURISTICS])
def test_a_rule_a_block_does_not_take_is_refused_with_those_it_takes(heuristic: str) -> None:
    with pytest.raises(InputError, match=f"a block takes: {', '.join(HEURISTICS)}$"):
        budget("1GiB", heuristic=heuristic)


def test_a_plus_with_nothing_behind_it_is_shown() -> None:
    with pytest.raises(InputError, match=r"stand behind a heuristic here, not '\+'$"):
        budget("1GiB", heuristic="dtr+")


class ByNumpy(TorchFunctionMode):
    """A mode that takes sines outside of PyTorch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.from_numpy(np.sin(args[0].numpy())) if func is torch.sin else func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("greedy")
def test_an_array_that_nobody_saw_taken_is_told_of() -> None:
    with (
        ByNumpy(),
        pytest.raises(InputError, match=r"given to an array \(numpy\(\)\) where a block .* does not see it"),
        block(X),
    ):
        twice = X * 2
        torch.sin(twice)
        push(X)


def test_containers_may_hold_themselves() -> None:
    inner: dict[str, Any] = {"x": X}
    inner["again"] = [inner]
    with block([inner, inner]) as run:
        assert run.live_bytes == 4000
