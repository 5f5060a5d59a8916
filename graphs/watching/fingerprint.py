"""What a captured step took from its model beside tensors, so that a later edit is noticed. [torch]"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphs.errors import InputError
from graphs.torch_private.patching import ABSENT
from graphs.torch_private.running import hooks_of_all_modules

# The parts of every nn.Module that hold its tensors, its children and its mode; each has its own check.
OWN = frozenset({"__class__", "__dict__", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_COPIED_BYTES = 1 << 16  # of larger arrays no copy is kept, which would be made again at each call
_FRACTIONS = float, complex, np.inexact
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)


@dataclass(frozen=True, slots=True)
class _Part:
    """One module as it was: its class and the attributes the forward read (``absent``: those that were not its own)."""

    path: str
    module: nn.Module
    kind: type
    size: int
    get: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    absent: frozenset[str]


class Fingerprint:
    """The modules of a tree, their modes, hooks and the attributes their forward read; hooks of all modules, the default dtype.

    An attribute that nobody read may change, and so may one that the forward itself changes. Of attributes that are containers
    (lists, dicts, sets, deques, bytearrays, small arrays of numpy) the entries count too; what lies deeper, in objects, is for
    ``surroundings``.

    surroundings  checks what functions of the step name outside of modules (``graphs.watching.surroundings``)
    constants     the memory of the step's constants: what is written to arrays there is seen anyway

    ``check`` costs less than a microsecond a module.
    """

    def __init__(
        self,
        body: nn.Module,
        reads: Mapping[str, Set[str]],
        changed: Set[tuple[str, str]],
        surroundings: Callable[[], None] = lambda: None,
        constants: Sequence[range] = (),
    ) -> None:
        self._surroundings = surroundings
        self._parts: list[_Part] = []
        self._boxes: list[tuple[str, str, Any, Any]] = []  # containers with entries, and these
        self._empty: list[Any] = []  # containers without
        self._empty_names: list[tuple[str, str]] = []
        for path, module in body.named_modules():
            attributes = vars(module)
            read = {key for key in reads.get(path, ()) if (path, key) not in changed} - set(_HOOKS)
            present = tuple(sorted(read & attributes.keys()))
            tensors = () if path.partition(".")[0] == "model" else ("_parameters", "_buffers")  # those of the loss are constants
            keys = (*present, "_modules", *_HOOKS, *tensors)
            values = tuple(attributes[key] for key in keys)
            absent = frozenset(read - attributes.keys())
            get = operator.itemgetter(*keys)
            self._parts.append(_Part(path, module, type(module), len(attributes), get, keys, values, absent))
            for key, value in zip(keys, values, strict=True):
                if not is_box(value) or (isinstance(value, np.ndarray) and lies_in(value, constants)):
                    continue
                if content := content_of(value):
                    self._boxes.append((path, key, value, content))
                else:
                    self._empty.append(value)
                    self._empty_names.append((path, key))
        self._default = torch.get_default_dtype()
        self._everywhere = hooks_of_all_modules()
        self._tied = _tied(body)
        self._modes = tuple(part.module.training for part in self._parts)

    def asked_for(self, name: str) -> bool:
        """Whether the forward of some module has read its attribute ``name``, or looked for one."""
        return any(name in part.keys or name in part.absent for part in self._parts)

    def check(self) -> None:
        """Raises InputError naming what differs."""
        for part in self._parts:
            now = part.module.__dict__
            if type(part.module) is not part.kind:
                if type(part.module).__name__ == f"FSDP{part.kind.__name__}":
                    raise InputError(
                        f"{_module(part.path)} was sharded after the step was captured, and a plan needs whole tensors; shard "
                        f"the planned module instead: fully_shard(plan.module())"
                    )
                raise InputError(f"{_module(part.path)} was of class {part.kind.__name__} when the step was captured; {_AGAIN}")
            try:
                found = part.get(now)
            except KeyError as error:
                raise InputError(f"{label(part.path, error.args[0])} was removed after the step was captured; {_AGAIN}") from None
            if not all(map(operator.is_, found, part.values)):
                self._compare(part, found)
            if len(now) != part.size and not now.keys().isdisjoint(part.absent):
                key = min(now.keys() & part.absent)
                raise InputError(f"{label(part.path, key)} was set after the step was captured; {_AGAIN}")
        if any(self._empty):
            raise InputError(_edited(*next(name for name, box in zip(self._empty_names, self._empty, strict=True) if box)))
        if tuple([part.module.training for part in self._parts]) != self._modes:
            raise InputError(f"a module was switched between training and evaluation after the step was captured; {_AGAIN}")
        if torch.get_default_dtype() is not self._default:
            raise InputError(
                f"the default dtype is {torch.get_default_dtype()}, but was {self._default} when the step was captured; {_AGAIN}"
            )
        if hooks_of_all_modules() != self._everywhere:
            raise InputError(
                f"the hooks for all modules (register_module_forward_hook and the like) are others than when the step was "
                f"captured; remove them or {_AGAIN}"
            )
        for path, key, box, content in self._boxes:
            if not same_content(content_of(box), content):
                raise InputError(_edited(path, key))
        self._surroundings()
        for (name, holder, key), (first, other, other_key) in self._tied:
            if holder.get(key) is not other.get(other_key):
                raise InputError(f"{name} and {first} were one tensor when the step was captured, and now are not; {_AGAIN}")

    def _compare(self, part: _Part, found: Sequence[Any]) -> None:
        for key, now, then in zip(part.keys, found, part.values, strict=True):
            if now is then or same_plain(now, then):
                continue
            if is_box(then):
                # ``nn.Sequential`` renumbers its parts in a dict of another class.
                if (type(now) is type(then) or key == "_modules") and same_content(content_of(now), content_of(then)):
                    continue
                raise InputError(_edited(part.path, key))
            raise InputError(
                f"{label(part.path, key)} is {described(now)}, but the step was captured with {described(then)}; {_AGAIN}"
            )


_AGAIN = "capture it again"


def _tied(body: nn.Module) -> list[tuple[tuple[str, dict[str, Any], str], tuple[str, dict[str, Any], str]]]:
    """The further names of parameters and buffers that have several, each with the first."""
    first: dict[int, tuple[str, dict[str, Any], str]] = {}
    pairs = []
    for path, module in body.named_modules():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                place = label(path, key), holder, key
                if first.setdefault(id(tensor), place) is not place:
                    pairs.append((place, first[id(tensor)]))
    return pairs


def _edited(path: str, key: str) -> str:
    if key == "_modules":
        return f"the modules in {_module(path)} are others than when the step was captured; {_AGAIN}"
    if key in ("_parameters", "_buffers"):
        return f"the tensors of {_module(path)} are others than when the step was captured; {_AGAIN}"
    if key in _HOOKS:
        return f"{_module(path)} has other hooks than when the step was captured; remove them or {_AGAIN}"
    return f"the entries of {label(path, key)} are others than when the step was captured; {_AGAIN}"


def _module(path: str) -> str:
    """What messages call a part of model and loss."""
    return {"": "the step", "model": "the model"}.get(path, path.removeprefix("model."))


def label(path: str, key: str) -> str:
    """What messages call the attribute ``key`` of a part of model and loss."""
    return f"{path}.{key}".removeprefix("model.")


def described(value: object) -> str:
    """A value in a message."""
    if isinstance(value, _PLAIN) or value is ABSENT:
        return repr(value)
    return "another tensor" if isinstance(value, Tensor) else f"another {type(value).__name__}"


def is_box(value: object) -> bool:
    """Whether it is a container whose entries are compared."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _COPIED_BYTES and not value.dtype.hasobject
    if isinstance(value, bytearray | collections.deque):
        return len(value) <= _COPIED_BYTES // 8
    return isinstance(value, dict | list | set)


def lies_in(array: np.ndarray[Any, Any], memory: Sequence[range]) -> bool:
    """Whether all of an array is there."""
    ways = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    at = int(array.__array_interface__["data"][0])
    first, end = at + sum(way for way in ways if way < 0), at + sum(way for way in ways if way > 0) + array.itemsize
    return any(part.start <= first and end <= part.stop for part in memory)


def content_of(box: Any) -> list[Any]:
    """The entries of a container, flat."""
    if isinstance(box, np.ndarray):
        return [box.shape, str(box.dtype), box.tobytes()]
    if isinstance(box, bytearray):
        return [bytes(box)]
    return [*box.keys(), *box.values()] if isinstance(box, dict) else list(box)


def same_content(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two flat contents have the same entries: the same objects, or equal plain values."""
    if len(a) != len(b):
        return False
    return all(map(operator.is_, a, b)) or all(x is y or same_plain(x, y) for x, y in zip(a, b, strict=True))


def same_plain(a: object, b: object) -> bool:
    """Whether two values are plain, or tuples of plain ones, and equal (NaN equals NaN, and 0.0 is another one than -0.0)."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(x is y or same_plain(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b) or not isinstance(a, _PLAIN):
        return False
    if isinstance(a, _FRACTIONS) and a is not b:
        return repr(a) == repr(b)
    return bool(a == b or (a != a and b != b))
