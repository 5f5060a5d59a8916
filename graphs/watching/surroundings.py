"""What functions of a step take from outside of modules: globals, closures, objects, so that a later edit is noticed. [torch]"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from graphs.errors import InputError
from graphs.torch_private.patching import ABSENT
from graphs.torch_private.tensors import memory_of, storage_key
from graphs.watching.fingerprint import content_of, described, is_box, lies_in, same_plain
from graphs.watching.leftovers import Leftover, NotMade

_Read = Callable[[], Any]
# What they name changes no step; the last are our own.
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "transformers", "graphs", "planner", "online"}
_NO_CODE = compile("None", "", "eval")  # of what is not written in Python
_SHORT = 64  # entries of a list or dict; a longer one is data
# Methods that no code names where it uses an object.
_UNNAMED = tuple(f"__{name}__" for name in ("len", "getitem", "iter", "contains", "bool", "float", "int", "mul", "rmul"))
_SHAPES = {"shape", "size", "numel"}
_LASTING = types.FunctionType, types.BuiltinFunctionType, type, enum.Enum, nn.Module  # nobody makes these anew for each call


class Surroundings:
    """Plain values (numbers, text, dtypes), tensors, functions and modules that loss and forward name outside of the model: a
    factor that a schedule sets, a queue of past outputs.

    Found by the names in their code: globals, variables of the functions around them, what they have as defaults or (``partial``)
    are given, and from there on attributes and entries that the code names, of objects in objects, classes, modules, dicts and
    short lists, all entries of short sets and small arrays, the shapes of tensors, and objects that a part has as attributes (a
    configuration); in methods and properties of the same class, functions of the same file or of others that are not of an
    installed package, and autograd functions that they name, too. Of a module that is no part of model and loss (a teacher) all
    attributes count. So do functions of classes, which these may be given others for. What a part has in its own attributes is
    the fingerprint's. In the code of installed packages objects in objects do not count: these are such packages' own matters;
    nor is it looked into, but for which attributes of an object a method reads that is called on it (``get_last_lr``).

    What is there when this is made counts, so it is made before a trace; what the trace itself changes does not.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._places: list[tuple[str, _Read, Any]] = []
        self._names_in = functools.cache(_Names)
        self._seen: set[object] = set()
        self._labels: set[tuple[int, str]] = set()
        self._parts = dict.fromkeys(part for root in (model, loss) if isinstance(root, nn.Module) for part in root.modules())
        for part in self._parts:
            kind = type(part)
            self._add(id(kind), f"{kind.__name__}.forward", functools.partial(getattr, kind, "forward"), kind.forward)
            self._look(kind.forward, kind, part)
            for function in (vars(part).get("forward"), *part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                self._look(function, None)
        if loss is not None and not isinstance(loss, nn.Module):
            self._look(loss, None)

    def settle(self, constants: Iterable[Tensor], leftovers: Iterable[Leftover]) -> None:
        """After the trace: forget what it has changed, as each call of the forward may, what changes where a planned call says
        what it has not made, and tensors the step does not read."""
        constants = list(constants)
        used, memory = {storage_key(tensor) for tensor in constants}, list(map(memory_of, constants))
        leftovers, changed = list(leftovers), set[int]()
        for there in (True, False):
            with contextlib.ExitStack() as stack:
                for leftover in leftovers:
                    stack.enter_context(leftover.shown(there))
                changed |= {i for i, (_, read, then) in enumerate(self._places) if not _is_alike(read(), then)}
        self._places = [
            (name, read, then)
            for i, (name, read, then) in enumerate(self._places)
            if i not in changed
            and not _is_array_in(read, memory)  # of which the step sees what it has now
            and (_is_in(used, then) and read() is then if isinstance(then, Tensor) else _is_alike(read(), then))
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
            code = self._names_in(_code(function))
            self._note_all(function.keywords, function.keywords, "the argument ", code)
            self._note_all(function, dict(enumerate(function.args)), "the argument ", code)
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
        for name in _defaults(function):
            self._note(id(function), name, functools.partial(_default, function, name), code, None)
        for name in sorted(code.attributes & _attributes(of).keys()):
            label, read = f"{type(of).__name__}.{name}", functools.partial(_attribute, of, name)
            if isinstance(of, nn.Module) and of in self._parts:
                self._enter(label, read, code, around)
            else:
                self._note(id(of), label, read, code, around)
        holder = owner if of is None or (isinstance(of, nn.Module) and of in self._parts) else of
        for kind in _own_classes(owner):
            for name in sorted(code.attributes & vars(kind).keys()):
                if (found := _function(vars(kind)[name])) is not None:
                    self._note_code(kind, name)
                    self._look(found, owner, of)
                else:
                    self._note(id(holder), f"{kind.__name__}.{name}", functools.partial(_attribute, holder, name), code, around)

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
        if isinstance(value, Tensor) and not value.is_nested and (code.attributes & _SHAPES or "len" in code.globals):
            self._add(holder, f"the shape of {name}", functools.partial(_shape, read), _shape(read))
        if _has_entries(value):
            self._add(id(value), f"the content of {name}", functools.partial(_entries, read), _entries(read))
        self._enter(name, read, code, around)

    def _note_all(self, holder: object, values: Mapping[Any, Any], before: str, code: _Names) -> None:
        """What a function has got by its definition."""
        for key in values:
            self._note(id(holder), f"{before}{key}", functools.partial(values.get, key, ABSENT), code, None)

    def _enter(self, name: str, read: _Read, code: _Names, around: dict[str, Any] | None) -> None:
        """What is in something that is named ``name``."""
        value = read()
        if isinstance(value, Tensor) or (not isinstance(value, tuple) and same_plain(value, value)):
            return
        if (id(value), code) in self._seen:
            return
        self._seen.add((id(value), code))
        if isinstance(value, types.FunctionType):
            if around is None or value.__globals__ is around or not self._names_in(value.__code__).installed:
                self._look(value, None)
            self._note_attributes(name, read, code, around)
        elif isinstance(value, functools.partial | types.MethodType):
            self._look(value, None)
        elif type(value) in (list, tuple):
            if type(value) is list:
                self._add(id(value), name, functools.partial(_as_tuple, read), tuple(value))
            for i in range(len(value) if len(value) <= _SHORT else 0):
                self._note_in(value, f"{name}[{i}]", functools.partial(_item, read, i), code, around)
        elif isinstance(value, nn.Module):
            for path, part in value.named_modules() if value not in self._parts else ():
                for entries in (vars(part), part._parameters, part._buffers):
                    for key in entries:
                        if _counts(entries[key]):
                            label = f"{name}.{path}.{key}" if path else f"{name}.{key}"
                            self._add(id(entries), label, functools.partial(entries.get, key, ABSENT), entries[key])
                self._look(type(part).forward, type(part))
        elif isinstance(value, dict):
            whole = name.rpartition(".")[2] in code.whole and len(value) <= _SHORT
            if whole:
                self._add(id(value), f"list({name})", functools.partial(_as_tuple, read), tuple(value))
            named = code.keys if type(value) is dict else code.keys | code.attributes
            for key in value if whole else sorted(value.keys() & named, key=str):
                self._note_in(value, f"{name}: {key}", functools.partial(_item, read, key), code, around)
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                self._note_attributes(name, read, code, around)
        elif isinstance(value, type):
            if not issubclass(value, enum.Enum):
                self._note_attributes(name, read, code, around)
                steps = {"forward", "setup_context", "backward"} if issubclass(value, torch.autograd.Function) else set()
                for kind in _own_classes(value):
                    for key in sorted((code.attributes | steps) & vars(kind).keys()):
                        if (found := _function(vars(kind)[key])) is not None:
                            self._note_code(kind, key)
                            self._look(found, value)
        else:
            self._note_attributes(name, read, code, around)
            for method in ("__call__", *sorted(code.attributes)):
                found = _function(inspect.getattr_static(type(value), method, None))
                if found is not None and (found.__module__ or "").partition(".")[0] in _LIBRARIES:
                    self._note_read_by(found, name, read)
                else:
                    self._look_at_method(found, value)
            for method in _UNNAMED:
                found = _function(inspect.getattr_static(type(value), method, None))
                if found is not None and not self._names_in(found.__code__).installed:
                    self._look_at_method(found, value)

    def _note_attributes(self, name: str, read: _Read, code: _Names, around: dict[str, Any] | None) -> None:
        value = read()
        has = set(_attributes(value))
        for kind in _own_classes(value if isinstance(value, type) else type(value)):
            has |= {key for key, found in vars(kind).items() if _function(found) is None}
        for key in sorted(code.attributes & has):
            self._note_in(value, f"{name}.{key}", functools.partial(_attribute_of, read, key), code, around)

    def _note_read_by(self, method: types.FunctionType, name: str, read: _Read) -> None:
        """The plain attributes of an object, and short lists of plain values, that a method of a library reads."""
        value = read()
        for key in sorted(self._names_in(method.__code__).attributes & _attributes(value).keys()):
            attribute = functools.partial(_attribute_of, read, key)
            found = attribute()
            if type(found) is list and len(found) <= _SHORT:
                attribute = functools.partial(_as_tuple, attribute)
                found = tuple(found)
            if same_plain(found, found):
                self._add(id(value), f"{name}.{key}", attribute, found)

    def _note_code(self, kind: type, name: str) -> None:
        """A function of a class, which may be given another."""
        self._add(id(kind), f"{kind.__name__}.{name}", functools.partial(vars(kind).get, name, ABSENT), vars(kind)[name])

    def _note_in(self, holder: object, name: str, read: _Read, code: _Names, around: dict[str, Any] | None) -> None:
        """What is in something else."""
        if not code.installed:
            self._note(id(holder), name, read, code, around)
        elif _counts(value := read()):
            self._add(id(holder), name, read, value)

    def _add(self, holder: int, name: str, read: _Read, value: Any) -> None:
        if (holder, name) not in self._labels:
            self._labels.add((holder, name))
            self._places.append((name, read, value))


def _has_entries(value: object) -> bool:
    """Whether it is a container whose entries no code names one by one, and not too large to compare them in each call."""
    if type(value) in (set, frozenset):
        return len(cast(Set[Any], value)) <= _SHORT
    return isinstance(value, np.ndarray) and is_box(value)


class _Array(tuple[Any, ...]):
    """What is in an array."""


def _entries(read: _Read) -> Any:
    value = read()
    if not _has_entries(value):
        return value
    return _Array(content_of(value)) if isinstance(value, np.ndarray) else frozenset(value)


def _is_array_in(read: _Read, memory: Sequence[range]) -> bool:
    """Whether it reads the content of an array that lies there."""
    value = read.args[0]() if isinstance(read, functools.partial) and read.func is _entries else None
    return isinstance(value, np.ndarray) and lies_in(value, memory)


def _shape(read: _Read) -> Any:
    value = read()
    return value.shape if isinstance(value, Tensor) and not value.is_nested else value


def _is_in(used: set[int], tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and storage_key(tensor) in used


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) or same_plain(value, value)


def _is_alike(now: object, then: object, within: tuple[tuple[object, object], ...] = ()) -> bool:
    """Whether it is the same, or an equal plain value, or a function defined again as it was: by a notebook's cell that is run
    once more. ``within``: functions that have got these, one of which may be among them again."""
    if now is then or same_plain(now, then):
        return True
    if isinstance(now, frozenset) and isinstance(then, frozenset):
        return now == then
    if not (isinstance(now, types.FunctionType) and isinstance(then, types.FunctionType)):
        return False
    if (now, then) in within:
        return True
    if now.__code__ != then.__code__ or now.__globals__ is not then.__globals__:
        return False
    a, b = _taken(now), _taken(then)
    return a.keys() == b.keys() and all(_is_alike(a[key], b[key], (*within, (now, then))) for key in a)


def _taken(function: types.FunctionType) -> dict[str, object]:
    """What a function has got when it was defined: defaults, and variables around it."""
    around = zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    return {**_defaults(function), **dict(around)}


def _compared(now: object, then: object) -> str:
    """Two values in a message, up to "when"."""
    for kind, name in ((Tensor, "tensor"), (frozenset, "set"), (_Array, "array"), (torch.Size, "shape"), (tuple, "list")):
        if isinstance(then, kind):
            return f"another {name} than"
    if same_plain(then, then):
        return f"{described(now)}, but was {described(then)}"
    return f"no longer {then if isinstance(then, enum.Enum) else getattr(then, '__name__', type(then).__name__)}, as"


def _attributes(value: object) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    if type(found) is dict:
        return found
    members = [vars(kind).items() for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    slots = [name for entries in members for name, found in entries if isinstance(found, types.MemberDescriptorType)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _own_classes(kind: type | None) -> Iterable[type]:
    """A class and those it inherits from, up to the first of a library."""
    return itertools.takewhile(lambda each: each.__module__.partition(".")[0] not in _LIBRARIES, kind.__mro__ if kind else ())


def _attribute(value: object, key: str) -> Any:
    """An attribute of an object, else of its class, or of a class."""
    own = _attributes(value)
    if key in own:
        return own[key]
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        if key in vars(kind):
            return vars(kind)[key]
    return ABSENT


def _attribute_of(read: _Read, key: str) -> Any:
    return _attribute(read(), key)


def _item(read: _Read, key: Any) -> Any:
    value = read()
    if type(value) is NotMade:
        return ABSENT
    try:
        return dict.get(value, key, ABSENT) if isinstance(value, dict) else value[key]  # no default is made
    except (TypeError, LookupError):  # something else is there now
        return ABSENT


def _as_tuple(read: _Read) -> Any:
    value = read()
    return tuple(value) if isinstance(value, list | dict) else value


def _function(found: object) -> types.FunctionType | None:
    """The function of a method or property that a class has."""
    found = found.fget if isinstance(found, property) else found
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return found if isinstance(found, types.FunctionType) else None


def _code(function: object) -> types.CodeType:
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__code__", None)
    if found is None:
        found = getattr(inspect.getattr_static(type(function), "__call__", None), "__code__", None)
    return found if isinstance(found, types.CodeType) else _NO_CODE


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    given, names = function.__defaults__ or (), function.__code__.co_varnames[: function.__code__.co_argcount]
    return {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}


def _default(function: types.FunctionType, name: str) -> Any:
    return _defaults(function).get(name, ABSENT)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ABSENT


class _Names:
    """Globals and attributes that a function and those in it read, and the texts and numbers in them, which may be keys.

    whole      names of what is gone through, or asked for keys that are no constants
    installed  whether it is the code of an installed package
    """

    def __init__(self, code: types.CodeType) -> None:
        self.globals: set[str] = set()
        self.attributes: set[str] = set()
        self.keys: set[Any] = set()
        self.whole: set[str] = set()
        self.installed = "site-packages" in code.co_filename or "dist-packages" in code.co_filename  # the latter are Debian's
        codes = [code]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            self.keys |= {constant for constant in code.co_consts if isinstance(constant, str | int)}
            instructions = list(dis.get_instructions(code))
            for i, instruction in enumerate(instructions):
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    self.globals.add(instruction.argval)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                    self.attributes.add(instruction.argval)
                if instruction.opname.startswith("LOAD_") and _is_whole(instructions[i + 1 : i + 3]):
                    self.whole.add(str(instruction.argval))
        if self.globals & {"getattr", "vars"}:
            self.attributes |= {key for key in self.keys if isinstance(key, str)}


def _is_whole(following: Sequence[dis.Instruction]) -> bool:
    """Whether what comes after a name takes all entries of what it stands for, or one that is not known beforehand."""
    names = [instruction.opname for instruction in following]
    if names[:1] == ["GET_ITER"] or following[0].argval in ("items", "values"):
        return True
    if len(names) < 2 or not names[0].startswith("LOAD_") or names[0] in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    return names[1] == "BINARY_SUBSCR" or following[1].argrepr == "[]"  # from Python 3.14 on
