"""What a traced forward does to Python state: the attributes it reads and changes, the generators it draws from. [torch]

A captured step does the same in every call. A forward that does not (because it counts its calls, keeps something from one call
to the next outside of buffers, or draws from generators that are not torch's) would be frozen as its first call; it is refused.
What the first call alone does, such as adding hooks and setting a flag that they are there, is no harm where all calls run the
same ops: it then stays, as after any call.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.fingerprint import OWN, content_of, described, label, same_content, same_plain
from graphs.torch_private.names import FakeTensorMode, OpOverload, TorchDispatchMode, no_dispatch, tree_leaves
from graphs.torch_private.patching import ABSENT, patched
from graphs.torch_private.stand_ins import stand_ins_by

_FIRST_SEED = 0x5EED << 48  # of those that draws of a trace leave behind; unlike any that somebody gives
_GENERATORS = "Python's generator (random)", "numpy's global generator (numpy.random)"
_LOSS = "only those of the model may change in a step, so make the loss a part of the model, which then returns it"


def written_elsewhere(name: str) -> str:
    """What to say where a step writes to memory that is there before and after it, but is none of its model's."""
    return (
        f"{name} changes a tensor in place that is neither parameter nor buffer of the model; make it one with register_buffer "
        f"(buffers of a loss: {_LOSS})"
    )


class Watch:
    """Watches calls of a module and undoes what they leave behind.

    name     what messages call the model
    reads    for each part of the module, by its path: the attributes of its own ``__dict__`` (or that could be there and hide one
             of its class) that a call read as they were before it
    changed  (path, attribute) of what a call left changed
    """

    def __init__(self, name: str, body: nn.Module) -> None:
        self.name = name
        self.reads: dict[str, set[str]] = {}
        self.changed: set[tuple[str, str]] = set()
        self._parts = dict(body.named_modules())
        self._before = {path: dict(vars(part)) for path, part in self._parts.items()}
        self._paths = {id(part): path for path, part in self._parts.items()}
        self._boxes = [
            (path, key, box, content_of(box))
            for path, attributes in self._before.items()
            for key, box in attributes.items()
            if isinstance(box, dict | list | set)
        ]
        self._contents = [(box, dict(box) if isinstance(box, dict) else list(box)) for _, _, box, _ in self._boxes]
        self._calls: list[tuple[Any, ...]] | None = None
        self._set_up: dict[tuple[str, str], Any] = {}  # plain attributes that the first call has read and changed
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # of modules, and what they held after that
        self._again = False  # whether there was another call
        self._given: set[tuple[str, str]] = set()  # attributes that the latest call, or its backward, has given a value

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around each call. Raises CaptureError where the call depends on what another call may have changed."""
        numbers = _numbers_now()
        calls = _Calls(self.name)
        self._given = set()
        with self._reading(), _unseen_refused(self.name, "forward"), calls, _compiled_apart(calls):
            yield
        self._compare_numbers(numbers, "forward")
        self._again = self._calls is not None
        self._compare_attributes("forward")
        if self._calls is not None and self._calls != calls.made:
            raise CaptureError(self._unsteady(self._calls, calls.made))
        self._calls = calls.made
        calls.forget()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of the latest call, where hooks and functions of somebody's own run. Raises CaptureError where it
        depends on what another step may have changed, or changes what another one reads."""
        numbers = _numbers_now()
        with self._reading(), _unseen_refused(self.name, "backward"):
            yield
        self._compare_numbers(numbers, "backward")
        self._compare_attributes("backward")

    def settle(self) -> None:
        """After ``undo``, put back what the first call alone has set up. Raises CaptureError where there was no other call."""
        for (path, key), value in self._set_up.items():
            if not self._again:
                raise CaptureError(self._changes(path, key, value))
            self._parts[path].__dict__[key] = value
        if self._set_up:
            for box, content in self._hooks:
                box.update(content)

    def explain(self) -> str | None:
        """Why a later call may have failed: a container that an earlier one changed; None where there is none."""
        changed = [(path, key) for path, key, box, content in self._boxes if not same_content(content_of(box), content)]
        if not changed or self._calls is None:
            return None
        path, key = changed[0]
        if key == "_buffers" and path.partition(".")[0] == "loss":
            return f"the loss of {self.name} gives its buffers other tensors; {_LOSS}"
        return (
            f"{self.name} keeps something from one call to the next in its attribute {label(path, key)}, but a captured step "
            f"does the same in every call; keep it in buffers, or, where only the first call fills it, run the model once before"
        )

    def undo(self) -> None:
        """Put back the attributes of all modules, and what is in their lists, dicts and sets."""
        for path, part in self._parts.items():
            now, before = part.__dict__, self._before[path]
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        for box, content in self._contents:
            box.clear()
            box.extend(content) if isinstance(box, list) else box.update(content)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Notes the attributes that are read before the call has given them another value."""
        given = self._given

        def read(part: nn.Module, key: str) -> Any:
            path = self._paths.get(id(part))
            if path is not None and key not in OWN and not _is_derived(part, key):
                mine = object.__getattribute__(part, "__dict__")
                if mine.get(key, ABSENT) is self._before[path].get(key, ABSENT) and (path, key) not in given:
                    self.reads.setdefault(path, set()).add(key)
            return super(nn.Module, part).__getattribute__(key)

        def write(part: nn.Module, key: str, value: Any) -> None:
            given.add((self._paths.get(id(part), ""), key))
            assign(part, key, value)

        assert "__getattribute__" not in vars(nn.Module), "two captures at once"
        assign = nn.Module.__setattr__
        with patched(nn.Module, "__getattribute__", read), patched(nn.Module, "__setattr__", write):
            yield

    def _compare_numbers(self, before: tuple[object, ...], where: str) -> None:
        for generator, then, now in zip(_GENERATORS, before, _numbers_now(), strict=True):
            if then != now:
                raise CaptureError(
                    f"{self.name} draws from {generator} in its {where}, and a captured step would repeat one draw for ever; "
                    f"draw with torch"
                )

    def _compare_attributes(self, where: str) -> None:
        for path, part in self._parts.items():
            now, before = vars(part), self._before[path]
            for key in now.keys() | before.keys():
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if old is new or key in OWN or _is_derived(part, key) or same_plain(old, new):
                    continue
                self.changed.add((path, key))
                if key in self.reads.get(path, ()) and not (old is ABSENT and callable(new)):
                    if not self._again and same_plain(new, new):
                        self._set_up[path, key] = new
                    elif (path, key) not in self._set_up:
                        raise CaptureError(self._changes(path, key, new, where))
        for (path, key), value in self._set_up.items():
            if not same_plain(vars(self._parts[path]).get(key, ABSENT), value):
                raise CaptureError(self._changes(path, key, value))
        if not self._again:
            self._hooks = [
                (box, dict(box)) for _, key, box, _ in self._boxes if key.startswith("_forward_") and isinstance(box, dict)
            ]

    def _changes(self, path: str, key: str, new: object, where: str = "forward") -> str:
        values = f"from {described(self._before[path].get(key, ABSENT))} to {described(new)}"
        if where == "backward":
            return (
                f"{self.name} reads its attribute {label(path, key)} and changes it in its backward ({values}), in a hook or a "
                f"function of its own, but a captured step does the same in every call; change it outside of the step"
            )
        return (
            f"{self.name} reads and changes its attribute {label(path, key)} in its forward ({values}), but a captured step does "
            f"the same in every call; keep it in a buffer, or, where only the first call changes it, run the model once before"
        )

    def _unsteady(self, first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> str:
        for (path, key), value in self._set_up.items():
            return self._changes(path, key, value)
        kept = self.explain()
        if kept is not None:
            return kept
        for a, b in zip(first, second, strict=False):
            if a != b:
                pairs = zip(a, b, strict=False)
                if a[0] is b[0] and any(i is not j and isinstance(i, torch.Generator) for i, j in pairs):
                    return (
                        f"{self.name} draws from a generator that it makes in its forward, and a captured step would go on with "
                        f"its draws instead of beginning anew; keep what is drawn, or make the generator before the step"
                    )
                what = f"it calls {a[0]} once and {b[0]} the next time" if a[0] is not b[0] else f"{a[0]} gets other arguments"
                break
        else:
            what = f"it makes {len(first)} operator calls once and {len(second)} the next time"
        once = "; where the first call fills a cache, run the model once before" if len(first) > len(second) else ""
        return (
            f"{self.name} does not do the same in every call ({what}), as a captured step would; draw random numbers with torch, "
            f"and keep what changes in buffers{once}"
        )


def _is_derived(part: nn.Module, key: str) -> bool:
    """Whether an attribute lists the module's own parameters, and is made anew where these are others, as while tracing."""
    return key in ("_flat_weights", "_flat_weight_refs") and isinstance(part, nn.RNNBase)


@contextlib.contextmanager
def _compiled_apart(calls: _Calls) -> Iterator[None]:
    """Leave unwatched what is handed to the compiler, as torch.cond does with its branches: it cannot compile the watching."""
    compile_ = torch.compile

    def compile_unwatched(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_(*args, **kwargs)
        if not isinstance(compiled, types.FunctionType):
            return compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            with patched(nn.Module, "__getattribute__", ABSENT), calls.suspended():
                return compiled(*args, **kwargs)

        return run

    with patched(torch, "compile", compile_unwatched):
        yield


@contextlib.contextmanager
def seeding_refused(name: str, where: torch.device) -> Iterator[Callable[[], None]]:
    """Refuse that what is traced seeds a generator or sets its state, which is no operator call. To be called at its end.

    Nothing is drawn in a trace, and a state put back would be the one that is there. So each draw gives the generators another
    seed, and looks whether they still have the one from before. Afterwards they are as they were.
    """
    seed = _FIRST_SEED
    before: dict[torch.Generator, Tensor] = {}

    def watch(generators: Iterable[torch.Generator]) -> None:
        nonlocal seed
        for generator in generators:
            if generator not in before:
                before[generator] = generator.get_state()
        seed += 1
        for generator in before:
            generator.manual_seed(seed)

    def look() -> None:
        if any(generator.initial_seed() != seed for generator in before):
            raise CaptureError(
                f"{name} seeds a generator or sets its state, but a captured step would draw other numbers; keep what is drawn, "
                f"or seed before the step"
            )

    def call(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
        if isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            look()
            watch(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        return plain()

    try:
        on_cuda = torch.cuda.default_generators if where.type == "cuda" else ()  # none where there is no such device
        watch([torch.default_generator, *on_cuda])
        with stand_ins_by(call):
            yield look
    finally:
        for generator, state in before.items():
            generator.set_state(state)


@contextlib.contextmanager
def _unseen_refused(name: str, where: str) -> Iterator[None]:
    """Refuse what changes a step's numbers and is no operator call, so that a trace would leave it out."""

    def refusal(what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(f"{name} {what}")

        return refuse

    assigns = refusal(
        f"assigns the .data of a tensor in its {where}, which a captured step would not see; write into the tensor in place"
    )
    packs = refusal(
        f"packs saved tensors by hooks (saved_tensors_hooks) in its {where}, which a captured step would not call; take them "
        f"away, a plan saves memory in their place"
    )
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_known(one: Any) -> None:
        (packs if type(one) is hooks else enter)(one)  # checkpoints and the like, which change no numbers, have their own class

    sets_dtype = refusal(
        f"sets another default dtype in its {where}, which a captured step would not see; give each tensor its dtype"
    )
    set_dtype = torch.set_default_dtype

    def set_same(dtype: torch.dtype) -> None:
        (set_dtype if dtype is torch.get_default_dtype() else sets_dtype)(dtype)

    rounds = refusal(
        f"calls F.bilinear under autocast in its {where}, which rounds inside of that operator where a captured step, with its "
        f"casts in the graph, would not; leave the region for that call (torch.autocast(..., enabled=False))"
    )

    def bilinear(input1: Tensor, *others: Any, **named: Any) -> Tensor:
        known = not torch.is_autocast_enabled(input1.device.type)
        result: Tensor = (torch_bilinear if known else rounds)(input1, *others, **named)
        return result

    torch_bilinear = torch.bilinear
    data: Any = Tensor.data
    with (
        patched(torch, "bilinear", bilinear),
        patched(nn.functional, "bilinear", bilinear),
        patched(Tensor, "data", property(data.__get__, assigns)),
        patched(hooks, "__enter__", enter_known),
        patched(torch, "set_default_dtype", set_same),
    ):
        yield


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator call and its arguments; tensors by the order in which they appear, real ones by content, and
    generators themselves."""

    supports_higher_order_operators = True
    LIMIT = 1 << 20  # elements; larger tensors are data, not something made up in a forward

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.made: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # no id is given twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.made.append((func, *map(self._sign, tree_leaves((args, kwargs)))))
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._number(leaf)
        return result

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Out of the way for a while; no other mode may have been entered since."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Let the tensors go."""
        self._alive.clear()

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def _check_writes(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write into memory that is there before and after the step, before it is done."""
        for i, argument in enumerate(func._schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if any(type(leaf) in (Tensor, nn.Parameter) for leaf in tree_leaves(given)):
                raise CaptureError(written_elsewhere(self.name))

    def _sign(self, leaf: object) -> object:
        if isinstance(leaf, torch.Generator):
            return leaf
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, bool | int | float | complex | str | None) else type(leaf).__name__
        new = id(leaf) not in self._numbers
        number = self._number(leaf)
        if new and type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.numel() <= self.LIMIT:
            with no_dispatch():
                return number, leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return number


def _numbers_now() -> tuple[object, ...]:
    """States of the generators that are not torch's: Python's own, numpy's where it is there."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), (kind, key.tobytes(), *rest)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators that are not torch's back afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
