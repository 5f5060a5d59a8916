"""What functions of a step take from outside of modules: globals, closures, objects, so that a later edit is noticed. [torch]"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import InputError
from graphs.torch_private.patching import ABSENT
from graphs.torch_private.tensors import storage_key
from graphs.watching.fingerprint import described, same_plain

_Read = Callable[[], Any]
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "transformers"}  # what they name changes no step
_LASTING = types.FunctionType, types.BuiltinFunctionType, type, enum.Enum, nn.Module  # nobody makes these anew for each call


class Surroundings:
    """Plain values (numbers, text, dtypes), tensors, functions and modules that loss and forward name outside of the model: a
    factor that a schedule sets, a queue of past outputs.

    Found by the names in their code: globals, variables of the functions around them, class attributes, and entries of the
    objects, modules and dicts among these, and of objects that a part has as attributes (a configuration); in methods of the
    same class and functions of the same file that they name, too. Of a module that is no part of model and loss (a teacher) all
    attributes count. What a part has in its own attributes is the fingerprint's.

    What is there when this is made counts, so it is made before a trace; what the trace itself changes does not.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._places: list[tuple[str, _Read, Any]] = []
        self._names_in = functools.cache(_Names)
        self._seen: set[object] = set()
        self._labels: set[tuple[int, str]] = set()
        self._parts = dict.fromkeys(part for root in (model, loss) if isinstance(root, nn.Module) for part in root.modules())
        for part in self._parts:
            self._look(type(part).forward, type(part), part)
        if loss is not None and not isinstance(loss, nn.Module):
            self._look(loss, None)

    def settle(self, constants: Iterable[Tensor]) -> None:
        """After the trace: forget what it has changed, as each call of the forward may, and tensors the step does not read."""
        used = {storage_key(tensor) for tensor in constants}
        self._places = [
            (name, read, then)
            for name, read, then in self._places
            if (_is_in(used, then) and read() is then if isinstance(then, Tensor) else _is_alike(read(), then))
        ]

    def check(self) -> None:
        """Raises InputError naming what differs."""
        for name, read, then in self._places:
            now = read()
            if not _is_alike(now, then):
                raise InputError(
                    f"{name} is {_compared(now, then)} when the step was captured, which is a part of it; capture it again, or "
                    f"make it a buffer or an input"
                )

    def _look(self, function: object, owner: type | None, of: object = None) -> None:
        """A function, and what it names. ``owner``: the class that it is a method of; ``of``: its object."""
        if isinstance(function, functools.partial):
            self._note_entries(function.keywords, function.keywords.keys(), "the argument ")
            self._look(function.func, None)
            return
        if isinstance(function, types.MethodType):
            self._look_at_method(function.__func__, function.__self__)
            return
        if not isinstance(function, types.FunctionType):
            call = inspect.getattr_static(type(function), "__call__", None)
            if isinstance(call, types.FunctionType):  # an object that can be called
                self._look_at_method(call, function)
            return
        if (function.__code__, owner, id(of)) in self._seen or (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        self._seen.add((function.__code__, owner, id(of)))
        code, around = self._names_in(function.__code__), function.__globals__
        for name in sorted(code.globals & around.keys()):
            self._note(id(around), name, functools.partial(around.get, name, ABSENT), code, around)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note(id(cell), name, functools.partial(_content, cell), code, None)
        if isinstance(of, nn.Module) and of in self._parts:
            for name in sorted(code.attributes & vars(of).keys()):
                self._enter(f"{type(of).__name__}.{name}", vars(of)[name], code, around)
        else:
            self._note_entries(_attributes(of), code.attributes, f"{type(of).__name__}.")
        for kind in owner.__mro__ if owner is not None else ():
            if kind.__module__.partition(".")[0] in _LIBRARIES:
                break
            for name in sorted(code.attributes & vars(kind).keys()):
                found = vars(kind)[name]
                if isinstance(found, types.FunctionType):
                    self._look(found, owner, of)
                elif _counts(found):
                    self._note_entries(vars(kind), [name], f"{kind.__name__}.")

    def _look_at_method(self, function: object, of: object) -> None:
        if isinstance(function, types.FunctionType) and not (isinstance(of, nn.Module) and of in self._parts):
            self._look(function, type(of), of)

    def _note(self, holder: int, name: str, read: _Read, code: _Names, around: dict[str, Any] | None) -> None:
        """What a function names: a plain value, or one that has such, or another function. ``around``: its globals, where it is
        one of these."""
        value = read()
        if isinstance(value, _LASTING) and value not in self._parts:  # ``model = plan(model, ...).module()`` is no change
            self._add(holder, name, read, value)
        if _counts(value):
            self._add(holder, name, read, value)
        else:
            self._enter(name, value, code, around)

    def _enter(self, name: str, value: object, code: _Names, around: dict[str, Any] | None) -> None:
        """What is in something that is named ``name``."""
        if _counts(value):
            return
        if isinstance(value, types.FunctionType):
            if around is None or value.__globals__ is around:
                self._look(value, None)
        elif isinstance(value, functools.partial | types.MethodType):
            self._look(value, None)
        elif type(value) is list:
            if same_plain(tuple(value), tuple(value)):
                self._add(id(value), name, functools.partial(tuple, value), tuple(value))
        elif isinstance(value, nn.Module):
            for path, part in value.named_modules() if value not in self._parts else ():
                for entries in (vars(part), part._parameters, part._buffers):
                    self._note_entries(entries, entries.keys(), f"{name}.{path}." if path else f"{name}.")
                self._look(type(part).forward, type(part))
        elif type(value) is dict:
            self._note_entries(value, code.texts, f"{name}: ")
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                self._note_entries(vars(value), code.attributes, f"{name}.")
        elif not isinstance(value, type):
            self._note_entries(_attributes(value), code.attributes, f"{name}.")
            for method in ("__call__", *sorted(code.attributes)):
                self._look_at_method(inspect.getattr_static(type(value), method, None), value)

    def _note_entries(self, holder: Any, keys: Any, before: str) -> None:
        """Those of the named entries of a dict that count."""
        for key in keys:
            value = holder.get(key, ABSENT)
            if _counts(value):
                self._add(id(holder), f"{before}{key}", functools.partial(holder.get, key, ABSENT), value)

    def _add(self, holder: int, name: str, read: _Read, value: Any) -> None:
        if (holder, name) not in self._labels:
            self._labels.add((holder, name))
            self._places.append((name, read, value))


def _is_in(used: set[int], tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and storage_key(tensor) in used


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) or same_plain(value, value)


def _is_alike(now: object, then: object, within: tuple[tuple[object, object], ...] = ()) -> bool:
    """Whether it is the same, or an equal plain value, or a function defined again as it was: by a notebook's cell that is run
    once more. ``within``: functions that have got these, one of which may be among them again."""
    if now is then or same_plain(now, then) or (now, then) in within:
        return True
    if not (isinstance(now, types.FunctionType) and isinstance(then, types.FunctionType)):
        return False
    if now.__code__ != then.__code__ or now.__globals__ is not then.__globals__:
        return False
    a, b = _taken(now), _taken(then)
    return a.keys() == b.keys() and all(_is_alike(a[key], b[key], (*within, (now, then))) for key in a)


def _taken(function: types.FunctionType) -> dict[int | str, object]:
    """What a function has got when it was defined: defaults, and variables around it."""
    taken: dict[int | str, object] = dict(enumerate(function.__defaults__ or ()))
    taken.update(function.__kwdefaults__ or {})
    taken.update(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))
    return taken


def _compared(now: object, then: object) -> str:
    """Two values in a message, up to "when"."""
    if isinstance(then, Tensor | tuple):
        return f"another {'tensor' if isinstance(then, Tensor) else 'list'} than"
    if same_plain(then, then):
        return f"{described(now)}, but was {described(then)}"
    return f"no longer {then if isinstance(then, enum.Enum) else getattr(then, '__name__', type(then).__name__)}, as"


def _attributes(value: object) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else {}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ABSENT


class _Names:
    """Globals and attributes that a function and those in it read, and the texts in them, which may be keys."""

    def __init__(self, code: types.CodeType) -> None:
        self.globals: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: set[str] = set()
        codes = [code]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            self.texts |= {constant for constant in code.co_consts if isinstance(constant, str)}
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    self.globals.add(instruction.argval)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                    self.attributes.add(instruction.argval)
