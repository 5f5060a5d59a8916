"""What a traced forward does to Python state: the attributes it reads and changes, the generators it draws from. [torch]

A captured step does the same in every call. A forward that does not (because it counts its calls, keeps something from one call
to the next outside of buffers, or draws from generators that are not torch's) would be frozen as its first call; it is refused.
What the first call alone does, such as adding hooks and setting a flag that they are there, is no harm where all calls run the
same ops: it then stays, as after any call.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.torch_private.patching import ABSENT, patched
from graphs.torch_private.stand_ins import Given
from graphs.watching.calls import OF_THE_MODEL, Calls
from graphs.watching.fingerprint import OWN, content_of, described, is_box, label, same_content, same_plain
from graphs.watching.generators import numbers_now
from graphs.watching.leftovers import Leftover, NotMade, deeper, holds_tensor, leftovers_in
from graphs.watching.unseen import gradient_mode_noted, unseen_refused

_GENERATORS = "Python's generator (random)", "numpy's global generator (numpy.random)"


class Watch:
    """Watches calls of a module and undoes what they leave behind.

    name     what messages call the model
    reads    for each part of the module, by its path: the attributes of its own ``__dict__`` (or that could be there and hide one
             of its class) that a call read as they were before it
    changed  (path, attribute) of what a call left changed
    askers   Python modules that asked in a call whether gradients are recorded
    """

    def __init__(self, name: str, body: nn.Module) -> None:
        self.name = name
        self.reads: dict[str, set[str]] = {}
        self.changed: set[tuple[str, str]] = set()
        self.askers: set[str] = set()
        self._leftovers: dict[Hashable, Leftover] = {}  # by place
        self._parts = dict(body.named_modules())
        self._before = {path: dict(vars(part)) for path, part in self._parts.items()}
        self._paths = {id(part): path for path, part in self._parts.items()}
        self._boxes = [
            (path, key, box, content_of(box))
            for path, attributes in self._before.items()
            for key, box in attributes.items()
            if isinstance(box, dict | list | set)
        ]
        # Deques and what holds numbers are not put back; where a call changes one, it is no matter of the step.
        self._others = [
            (path, key, box, content_of(box))
            for path, attributes in self._before.items()
            for key, box in attributes.items()
            if is_box(box) and not isinstance(box, dict | list | set)
        ]
        self._contents = [(box, dict(box) if isinstance(box, dict) else list(box)) for _, _, box, _ in self._boxes]
        self._latest: dict[int, list[Any]] = {}  # what containers held after the latest call; by their places in ``_boxes``
        self._calls: list[tuple[Any, ...]] | None = None
        self._set_up: dict[tuple[str, str], Any] = {}  # plain attributes that the first call has read and changed
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # of modules, and what they held after that
        self._again = False  # whether there was another call
        self._given: set[tuple[str, str]] = set()  # attributes that the latest call, or its backward, has given a value

    @contextlib.contextmanager
    def call(self, given: Given) -> Iterator[None]:
        """Around each call. Raises CaptureError where the call depends on what another call may have changed. ``given``: as
        ``unseen_refused`` has it."""
        numbers = numbers_now()
        calls = Calls(self.name)
        self._given = set()
        noted = gradient_mode_noted(self.askers)
        with self._reading(), unseen_refused(self.name, "forward", given), noted, calls, _compiled_apart(calls):
            yield
        self._compare_numbers(numbers, "forward")
        self._again = self._calls is not None
        self._compare_attributes("forward")
        self._find_leftovers()
        if self._calls is not None and self._calls != calls.made:
            raise CaptureError(self._unsteady(self._calls, calls.made))
        self._calls = calls.made
        calls.forget()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of the latest call, where hooks and functions of somebody's own run. Raises CaptureError where it
        depends on what another step may have changed, or changes what another one reads."""
        numbers = numbers_now()
        with self._reading(), unseen_refused(self.name, "backward"):
            yield
        self._compare_numbers(numbers, "backward")
        self._compare_attributes("backward")
        self._find_leftovers(once=True)

    def settle(self) -> None:
        """After ``undo``, put back what the first call alone has set up. Raises CaptureError where there was no other call."""
        self.changed |= {(path, key) for path, key, box, content in self._others if not same_content(content_of(box), content)}
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
            return f"the loss of {self.name} gives its buffers other tensors; {OF_THE_MODEL}"
        return (
            f"{self.name} keeps something from one call to the next in its attribute {label(path, key)}, but a captured step "
            f"does the same in every call; keep it in buffers, or, where only the first call fills it, run the model once before"
        )

    def undo(self) -> None:
        """Put back the attributes of all modules, and what is in their lists, dicts and sets.

        Containers that hold what they held are left alone: a dict that nobody may write to is emptied by ``clear`` all the same.
        """
        for path, part in self._parts.items():
            now, before = part.__dict__, self._before[path]
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        for (_, _, box, held), (_, content) in zip(self._boxes, self._contents, strict=True):
            holds = content_of(box)
            if len(holds) != len(held) or not all(map(operator.is_, holds, held)):
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
        for generator, then, now in zip(_GENERATORS, before, numbers_now(), strict=True):
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

    def _find_leftovers(self, *, once: bool = False) -> None:
        found = []
        for path, key in self.changed:
            attributes = self._parts[path].__dict__
            if key not in self.reads.get(path, ()) and holds_tensor(attributes.get(key)):
                found.append(Leftover(attributes, (key,), (), NotMade(label(path, key))))
        for i, (path, key, box, held) in enumerate(self._boxes):
            if key in OWN or _is_derived(self._parts[path], key):
                continue
            latest = self._latest.get(i, held)
            if isinstance(box, dict) and i in self._latest:
                self._look_deeper(box, set(map(id, latest)), key)
            inside = leftovers_in(self._parts[path].__dict__, key, box, latest, label(path, key), once=once)
            if inside:
                found += inside
                self.changed.add((path, key))  # its entries are no matter of the step
            self._latest[i] = content_of(box)
        self._leftovers.update({leftover.place: leftover for leftover in found})

    def _look_deeper(self, box: dict[Any, Any], known: set[int], key: str) -> None:
        """What an earlier call has put in a dict may be there to be filled by each."""
        for place, leftover in list(self._leftovers.items()):
            value = box.get(leftover.keys[-1]) if leftover.keys[:-1] == (key,) and len(leftover.keys) == 2 else None
            if value is not None and not isinstance(value, Tensor | tuple) and id(value) in known and leftover.container() is box:
                del self._leftovers[place]
                self._leftovers.update({one.place: one for one in deeper(leftover, value)})

    @property
    def leftovers(self) -> list[Leftover]:
        """Where a call, or its backward, leaves tensors in the model that the captured step does not make."""
        return list(self._leftovers.values())

    def own(self) -> list[int]:
        """Ids of what this holds of the program's."""
        held = [*self._before.values(), *self._latest.values()]
        boxes = [*self._boxes, *self._others]
        return [*map(id, held), *(id(content) for *_, content in boxes), *(id(copy) for _, copy in self._contents)]

    def pass_over(self, leftover: Leftover) -> None:
        """What lies in something of the model's, to which a call adds, is no matter of the step."""
        for path, part in self._parts.items():
            if leftover.holder is part and leftover.keys:
                self.changed.add((path, leftover.keys[0]))

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
def _compiled_apart(calls: Calls) -> Iterator[None]:
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
