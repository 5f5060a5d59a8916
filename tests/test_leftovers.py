"""What a step leaves beside its loss: nothing of a trace, and nothing that passes for what a planned call has not made."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from graphs.capture import capture
from graphs.errors import CaptureError, InputError
from graphs.watching.calls import Calls
from graphs.watching.outside import referrers_of
from planner.execute import PlannedModule
from planner.schedule import keep_all

PLENTY = 1 << 40
NOTES: dict[str, Any] = {}
LOSSES: list[Any] = []
LAST: Any = None
BOX: list[Any] = [1, None]


@dataclass
class Outputs:
    hidden: Tensor | None = None


class Slotted:
    __slots__ = ("last", "other")

    def __init__(self) -> None:
        self.last = None


class Leaving(nn.Module):
    """Leaves what it is told to."""

    shared: ClassVar[Any] = None

    def __init__(self, leave: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.leave = leave
        self.losses: list[Tensor] = []
        self.notes: dict[str, Any] = {}
        self.nested: dict[str, dict[str, Tensor]] = {"first": {}}
        self.history: deque[Tensor] = deque([torch.zeros(())] * 3, maxlen=3)
        self.lists: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.outputs, self.space = Outputs(), SimpleNamespace(inner=SimpleNamespace())
        self.meters: defaultdict[str, Outputs] = defaultdict(Outputs)
        self.box: list[Any] = [None, 2]
        self.records = [{"a": 1.0}, {"a": 2.0}]
        self.callbacks, self.slotted, self.numbers = [Outputs(), Outputs()], Slotted(), {"a": 0.0, "b": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(x))
        self.leave(self, hidden.detach().mean())
        return self.last(hidden).square().mean()


def anew(model: Leaving, value: Tensor) -> None:
    model.losses.clear()
    model.losses.append(value)


def globally(_: Leaving, value: Tensor) -> None:
    global LAST
    LAST = value


class Place:
    """Where something is left: how, how it is read, and what a training loop does before each step."""

    def __init__(
        self,
        leave: Callable[[Any, Any], object],
        read: Callable[[Any], Any],
        before: Callable[[Any], object] = lambda model: None,
    ) -> None:
        self.leave, self.read, self.before = leave, read, before


def total(values: list[Tensor]) -> Tensor:
    return torch.zeros(()) + sum(values)


PLACES = {
    "attribute": Place(lambda m, v: setattr(m, "auxiliary", v), lambda m: m.auxiliary + 0),
    "tuple in a list": Place(lambda m, v: setattr(m, "auxiliary", [(v, 1)]), lambda m: m.auxiliary[0][0] + 0),
    "dict in a dict": Place(lambda m, v: setattr(m, "auxiliary", {"a": {"b": v}}), lambda m: m.auxiliary["a"]["b"] + 0),
    "new object": Place(lambda m, v: setattr(m, "auxiliary", Outputs(v)), lambda m: m.auxiliary.hidden + 0),
    "list": Place(lambda m, v: m.losses.append(v), lambda m: total(m.losses), lambda m: m.losses.clear()),
    "new list": Place(lambda m, v: m.losses.append(v), lambda m: total(m.losses), lambda m: setattr(m, "losses", [])),
    "list that the forward clears": Place(anew, lambda m: m.losses[0] + 0),
    "dict": Place(lambda m, v: m.notes.update(a=v), lambda m: m.notes["a"] + 0),
    "new dict": Place(lambda m, v: m.notes.update(a=v), lambda m: m.notes["a"] + 0, lambda m: setattr(m, "notes", {})),
    "dict that was there in a dict": Place(lambda m, v: m.nested["first"].update(a=v), lambda m: m.nested["first"]["a"] + 0),
    "deque": Place(lambda m, v: m.history.append(v), lambda m: m.history[-1] + 0),
    "default dict": Place(lambda m, v: m.lists["a"].append(v), lambda m: total(m.lists["a"]), lambda m: m.lists.clear()),
    "object": Place(lambda m, v: setattr(m.outputs, "hidden", v), lambda m: m.outputs.hidden + 0),
    "object in an object": Place(lambda m, v: setattr(m.space.inner, "a", v), lambda m: m.space.inner.a + 0),
    "class": Place(lambda m, v: setattr(type(m), "shared", v), lambda m: m.shared + 0),
    "global dict": Place(lambda m, v: NOTES.update(a=v), lambda m: NOTES["a"] + 0),
    "dict in a global dict": Place(lambda m, v: NOTES.setdefault("b", {}).update(c=v), lambda m: NOTES["b"]["c"] + 0),
    "tuple in a global dict": Place(lambda m, v: NOTES.update(a=(1, [v])), lambda m: NOTES["a"][1][0] + 0),
    "global list": Place(lambda m, v: LOSSES.append(v), lambda m: total(LOSSES), lambda m: LOSSES.clear()),
    "new global list": Place(
        lambda m, v: LOSSES.append(v), lambda m: total(LOSSES), lambda m: globals().update(LOSSES=[])
    ),
    "record in a global list": Place(
        lambda m, v: LOSSES.append(SimpleNamespace(a=v)), lambda m: torch.zeros(()) + LOSSES[-1].a, lambda m: LOSSES.clear()
    ),
    "global variable": Place(globally, lambda m: LAST + 0),
    "new list in a global dict": Place(lambda m, v: NOTES.update(a=[v, 1]), lambda m: NOTES["a"][0] + 0),
    "entry of a list": Place(lambda m, v: operator.setitem(m.box, 0, v), lambda m: m.box[0] + 0),
    "entry of a global list": Place(lambda m, v: operator.setitem(BOX, 1, v), lambda m: BOX[1] + 0),
    "record that was there in a list": Place(lambda m, v: m.records[-1].update(b=v), lambda m: m.records[-1]["b"] + 0),
    "object in a list": Place(
        lambda m, v: [setattr(each, "hidden", v) for each in m.callbacks], lambda m: m.callbacks[0].hidden + 0
    ),
    "object that is made when first asked for": Place(
        lambda m, v: setattr(m.meters["a"], "hidden", v), lambda m: m.meters["a"].hidden + 0
    ),
    "object that a loop replaces": Place(
        lambda m, v: setattr(m.outputs, "hidden", v), lambda m: m.outputs.hidden + 0, lambda m: setattr(m, "outputs", Outputs())
    ),
    "newest first": Place(lambda m, v: m.history.appendleft(v), lambda m: m.history[0] + 0),
    "front of a list": Place(lambda m, v: LOSSES.insert(0, v), lambda m: LOSSES[0] + 0),
    "slot": Place(lambda m, v: setattr(m.slotted, "last", v), lambda m: m.slotted.last + 0),
    "where a number was": Place(lambda m, v: m.numbers.update(a=v), lambda m: m.numbers["a"] + 0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name, value in (("NOTES", {}), ("LOSSES", []), ("LAST", None), ("BOX", [1, None])):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Leaving, "shared", None)


def shown(model: Any) -> str:
    """All there is to be left alone."""
    kept = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    return repr([kept, vars(model.outputs), model.slotted.last, Leaving.shared, NOTES, LOSSES, LAST, BOX])


def planned(model: nn.Module, x: Tensor, **options: Any) -> PlannedModule:
    step = capture(model, x, **options)
    return PlannedModule(step, keep_all(step.graph), PLENTY)


def hooked(place: Place, on: str) -> nn.Module:
    """A model that leaves a value there in its forward, in a hook or in the hook of a backward."""

    def keep(gradient: Tensor) -> None:
        place.leave(model, gradient.mean())

    model = Leaving(place.leave if on == "forward" else lambda *_: None)
    if on == "hook":
        model.linear.register_forward_hook(lambda part, given, made: keep(made.detach()))
    elif on == "hook of a gradient":
        model.linear.register_forward_hook(lambda part, given, made: made.register_hook(keep) and None)
    return model


ON = ("forward", "hook", "hook of a gradient")
OF_EACH_KIND = ("attribute", "list", "dict", "object", "global list", "entry of a list", "list that the forward clears")


def ways() -> Iterator[object]:
    """Every place in a first forward and in a later backward; a place of each kind in all ways."""
    for name, on, called in itertools.product(PLACES, ON, (False, True)):
        if name not in OF_EACH_KIND and (on, called) not in (("forward", False), ("hook of a gradient", True)):
            continue
        if (name, on, called) == ("list that the forward clears", "hook of a gradient", False):
            continue  # one backward is traced, and the list is empty before: it could as well grow
        yield pytest.param(name, on, called, id=f"{name}, {on}{', called before' * called}")


@pytest.mark.parametrize(("name", "on", "called"), [*ways()])
def test_what_a_step_leaves_somewhere_is_not_taken_for_the_planned_steps(name: str, on: str, called: bool) -> None:
    place = PLACES[name]
    model, x = hooked(place, on), torch.randn(16, 8)
    place.before(model)
    if called:
        model(x).backward()
        kept = float(place.read(model))
    before = shown(model)
    module = planned(model, x)
    assert shown(model) == before  # planning has left everything alone
    if called:
        assert float(place.read(model)) == kept
    for factor in (2, 3):
        place.before(model)
        module(factor * x).backward()
        with pytest.raises(InputError, match="a planned step gives its loss alone"):
            place.read(model)
        place.before(model)
        model(4 * x).backward()  # what the plain model has put there is no edit
        got = float(place.read(model))
        place.before(model)
        twin = hooked(place, on)
        twin.load_state_dict(model.state_dict())
        twin(4 * x).backward()
        assert got == pytest.approx(float(place.read(twin)))


def test_a_loss_may_note_its_terms() -> None:
    terms: dict[str, Tensor] = {}

    def loss(out: Tensor) -> Tensor:
        terms["square"] = out.square().mean().detach()
        return terms["square"] * 0 + out.square().mean()

    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    loss(model(x))
    before = terms["square"]
    module = planned(model, x, loss=loss)
    assert terms["square"] is before
    module(x)
    with pytest.raises(InputError, match=r"square.* is a tensor that a plain forward leaves there"):
        print(f"{terms['square']:.3f}")
    with pytest.raises(InputError, match="a planned step gives its loss alone"):
        _ = terms["square"] == 0
    loss(model(x))
    print(f"{terms['square']:.3f}")


def test_a_trace_leaves_nothing_in_a_variable() -> None:
    last: Tensor | None = None

    def loss(out: Tensor) -> Tensor:
        nonlocal last
        last = out.sum()
        return out.square().mean()

    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    module = planned(model, x, loss=loss)
    module(x)
    with pytest.raises(InputError, match="a variable of the step is a tensor that a plain forward leaves there"):
        _ = last + 1  # type: ignore[operator]


@contextlib.contextmanager
def walks_noted() -> Iterator[list[None]]:
    """Walks through all objects there are, an entry each."""
    walks: list[None] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        is_walk = event == "c_call" and (called is gc.get_referrers or called is gc.get_objects)
        if is_walk and frame.f_code.co_name != "_now" and frame.f_globals["__name__"] == "graphs.watching.outside":
            walks.append(None)

    sys.setprofile(note)
    try:
        yield walks
    finally:
        sys.setprofile(None)


def test_many_tensors_left_take_no_long_look() -> None:
    """One walk through all objects for each would take seconds."""
    seen: list[Tensor] = []

    def keep(part: nn.Module, given: Any, made: Tensor) -> None:
        seen.append(made)

    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), torch.randn(2, 4)
    for part in model:
        part.register_forward_hook(keep)
    with walks_noted() as walks:
        step = capture(model, x, loss=lambda out: out.sum())
    assert not seen and len(step.leftovers) == 1
    assert 0 < len(walks) <= 3


@pytest.mark.parametrize("count", [1, 64, 65, 500])
def test_what_refers_to_many_things_is_what_refers_to_each(count: int) -> None:
    things = [[i] for i in range(count)]
    held = [{"a": things[i // 2]} if i % 3 else (things[i // 2], SimpleNamespace(b=things[-1])) for i in range(count)]
    found = {id(one) for one in referrers_of(things)}
    assert {id(one) for one in (things, *held)} <= found
    assert found - {id(one) for one in gc.get_referrers(*things)} == set()
    assert {id(one) for one in gc.get_referrers(*things) if not isinstance(one, FrameType)} - found <= {id(found)}


@pytest.mark.parametrize(
    ("name", "most"), [("dict", 2), ("object", 4), ("global list", 2), ("dict in a global dict", 3), ("global variable", 1)]
)
def test_walks_through_all_objects_are_few(name: str, most: int) -> None:
    """One for the tensors and one for each level of what they lie in, none twice, up to what has a name of its own."""
    with walks_noted() as walks:
        step = capture(Leaving(PLACES[name].leave), torch.randn(16, 8))
    assert len(step.leftovers) == 1
    assert 0 < len(walks) <= most


class Trainer:
    """Its loss is a method, and notes things in what it has."""

    def __init__(self) -> None:
        self.history = [{"epoch": 0, "loss": torch.zeros(())}, {"epoch": 1}]
        self.callbacks = [Outputs(), Outputs()]
        self.last: Tensor | None = torch.full((), 7.0)
        self.best = 3.0

    def loss(self, out: Tensor) -> Tensor:
        loss = out.square().mean()
        self.history[-1]["loss"] = loss.detach()
        for callback in self.callbacks:
            callback.hidden = loss.detach()
        self.last = loss.detach()
        return loss * self.best


def test_a_trainers_own_things_stay_its_own() -> None:
    trainer, model, x = Trainer(), nn.Linear(8, 4), torch.randn(16, 8)
    callbacks, records = [*trainer.callbacks], [*trainer.history]
    module = planned(model, x, loss=trainer.loss)
    assert trainer.history == [{"epoch": 0, "loss": torch.zeros(())}, {"epoch": 1}] and trainer.last == 7
    for _ in range(2):
        module(x).backward()
        assert all(map(operator.is_, trainer.callbacks, callbacks)) and all(map(operator.is_, trainer.history, records))
        assert trainer.history[0] == {"epoch": 0, "loss": torch.zeros(())} and trainer.history[1]["epoch"] == 1
        for use in (trainer.history[1]["loss"], trainer.callbacks[0].hidden, trainer.callbacks[1].hidden, trainer.last):
            with pytest.raises(InputError, match="a planned step gives its loss alone"):
                _ = use + 1
        trainer.loss(model(x))
        assert trainer.last == trainer.callbacks[1].hidden == trainer.history[1]["loss"]
    trainer.best = 2.0
    with pytest.raises(InputError, match=r"best is 2\.0, but was 3\.0"):
        module(x)


def test_planning_again_with_what_a_planned_call_has_marked() -> None:
    model, x = nn.Linear(8, 4), torch.randn(16, 8)

    def loss(out: Tensor) -> Tensor:
        LOSSES.append(out.detach().mean())
        return out.square().mean()

    for _ in range(3):
        module = planned(model, x, loss=loss)
        module(x)
        loss(model(x))
        module(x)
        LOSSES.clear()
        module(x)
        assert len(LOSSES) == 1


def test_an_interrupted_capture_leaves_nothing() -> None:
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    NOTES["a"] = 3.0

    def loss(out: Tensor) -> Tensor:
        NOTES.update(a=out.mean(), b=out.sum())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(model, x, loss=loss)
    assert NOTES == {"a": 3.0} and gc.get_freeze_count() < 10_000


def test_one_object_for_each_part_is_found() -> None:
    recorders = [Outputs() for _ in range(80)]
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in recorders)), torch.randn(2, 4)
    for part, recorder in zip(model, recorders, strict=True):
        part.register_forward_hook(lambda part, given, made, recorder=recorder: setattr(recorder, "hidden", made.detach()))
    module = planned(model, x, loss=lambda out: out.sum())
    assert all(recorder.hidden is None for recorder in recorders)
    module(x)
    for recorder in recorders:
        with pytest.raises(InputError, match=r"Outputs\.hidden is a tensor that a plain forward leaves there"):
            _ = recorder.hidden + 1


def test_a_proxy_that_answers_nothing_is_passed_over() -> None:
    class Proxy:
        def __init__(self, of: object) -> None:
            object.__setattr__(self, "_of", of)

        @property
        def __class__(self) -> type:
            raise RuntimeError("outside of a request")

    kept: list[Any] = []
    model, x = nn.Linear(8, 4), torch.randn(16, 8)

    def loss(out: Tensor) -> Tensor:
        kept.append(Proxy(out.detach()))
        return out.sum()

    module = planned(model, x, loss=loss)
    assert not kept
    module(x)
    assert len(kept) == 1


def test_a_program_that_has_frozen_its_objects_keeps_them_frozen() -> None:
    notes: dict[str, Tensor] = {}
    model, x = nn.Linear(8, 4), torch.randn(16, 8)

    def loss(out: Tensor) -> Tensor:
        notes["a"] = out.detach().mean()
        return out.sum()

    gc.freeze()
    try:
        module = planned(model, x, loss=loss)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
    module(x)
    with pytest.raises(InputError, match="a planned step gives its loss alone"):
        _ = notes["a"] + 1
    planned(model, x, loss=loss)
    assert gc.get_freeze_count() < 10_000


class DoublesFromTheThirdCallOn(nn.Module):
    """The first two calls run the same ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.latest = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.latest is not None and self.latest.requires_grad:
            y = 2 * y
        self.latest = y.detach().requires_grad_(self.latest is not None)
        return y.square().mean()


def test_what_a_call_looks_for_and_replaces_is_refused() -> None:
    with pytest.raises(CaptureError, match="reads and changes its attribute latest"):
        capture(DoublesFromTheThirdCallOn(), torch.randn(3, 4))


class AddsLatest(nn.Module):
    """Keeps its output for the next call, which adds it."""

    def __init__(self, latest: Tensor | None, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.latest, self.take = nn.Linear(4, 4), latest, take

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before, self.latest = self.take(self.latest), y.detach()
        return y.square().mean() if before is None else (y + before).square().mean()


@pytest.mark.parametrize("latest", [None, torch.ones(3, 4)], ids=["none", "one"])
@pytest.mark.parametrize("take", [lambda t: t, lambda t: None if t is None else t.data], ids=["itself", "its data"])
def test_what_a_call_uses_and_replaces_is_refused(latest: Tensor | None, take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its content is too large to be compared, so that two calls look alike."""
    monkeypatch.setattr(Calls, "LIMIT", 0)
    with pytest.raises(CaptureError, match="latest"):
        capture(AddsLatest(latest, take), torch.randn(3, 4))
