"""Tensors that a forward leaves on its model beside the loss: a planned step does not make them, and must not seem to. [torch]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphs.errors import InputError


class NotMade:
    """Stands where plain PyTorch's forward would have left a tensor: whoever uses it is told."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}, which a planned step does not make>"

    def _refuse(self, *_: object, **__: object) -> Any:
        raise InputError(
            f"{self._what} is a tensor that a plain forward leaves there, and a planned step gives its loss alone: "
            f"add what depends on it to the loss inside of the step, or call the plain model for it"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying, pickling and printing ask
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        pending = [*args, *(kwargs or {}).values()]
        for given in pending:
            if isinstance(given, cls):
                given._refuse()
            elif isinstance(given, list | tuple):
                pending += given
        return NotImplemented


_BINARY = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"
_UNARY = "neg", "pos", "abs", "bool", "float", "int", "index", "array", "len", "iter"
_OTHER = "lt", "le", "gt", "ge", "getitem", "setitem"
for _name in (*_BINARY, *(f"{side}{name}" for name in _BINARY for side in "ri"), *_UNARY, *_OTHER):
    setattr(NotMade, f"__{_name}__", NotMade._refuse)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A place that a call of the model's forward gives a tensor, without having read what was there.

    holder  the attributes of a module, or a dict, list or set among these
    key     in a dict; lists and sets are added to
    mark    what is put there
    """

    holder: Any
    key: Any
    mark: NotMade

    @property
    def grows(self) -> bool:
        """Whether each call adds to the holder."""
        return not isinstance(self.holder, dict)

    def after_step(self) -> None:
        """Have it say that a planned step has made none."""
        holder = self.holder
        if not self.grows:
            holder[self.key] = self.mark
        elif not any(isinstance(entry, NotMade) for entry in holder):  # one is enough
            holder.append(self.mark) if isinstance(holder, list) else holder.add(self.mark)


def leftovers_in(box: dict[Any, Any] | list[Any] | set[Any], before: Sequence[Any], name: str) -> list[Leftover]:
    """Of a container of the model's that held ``before`` (``content_of``) before a call, and now more or others."""
    known = set(map(id, before))
    if isinstance(box, dict):
        new = [key for key, value in box.items() if holds_tensor(value) and id(value) not in known]
        return [Leftover(box, key, NotMade(f"{name}[{key!r}]")) for key in new]
    if any(holds_tensor(entry) and id(entry) not in known for entry in box):
        return [Leftover(box, None, NotMade(f"an entry of {name}"))]
    return []


def holds_tensor(value: object) -> bool:
    """Whether it is a tensor, or a container with one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, list | tuple | set) and any(isinstance(x, Tensor) for x in value))
