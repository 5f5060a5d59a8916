"""Quicker ways to call the same operator from Python. [torch]

``torch.ops.aten.mm.default(a, b)`` converts its arguments by the operator's schema, one after the other; ``torch.mm(a, b)`` and
``a.mm(b)`` do it in code made for that operator, in about half the time. Host time is what small ops are made of, so lowered
code uses the latter wherever a trial shows that they end in the very same operator with the very same arguments.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, fx

from graphs.rewriting.rewrites import bernoulli
from graphs.torch_private.names import OpOverload, TorchDispatchMode, tree_leaves
from graphs.torch_private.stand_ins import quiet_stand_ins

aten = torch.ops.aten
_known: dict[tuple[Any, ...], tuple[str, Any]] = {}


def quickest(node: fx.Node) -> tuple[str, Any]:
    """Opcode and target of an FX node that does what the call ``node`` does, with the same arguments.

    That is ``("call_method", name)``, ``("call_function", torch.name)``, or those of ``node`` itself where neither is the same;
    of our own operator, the function it runs.
    Factories (calls without a tensor) stay as they are: the default device would change what ``torch.zeros`` means.
    """
    same = node.op, node.target
    if node.target is torch.ops.belady.bernoulli.default:  # an operator written in Python: its function without the dispatcher
        return "call_function", bernoulli
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return same
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
        return same
    key = node.target, _kinds(args), _kinds(kwargs)
    if key not in _known:
        _known[key] = _find(node.target, args, kwargs) or same
    return _known[key]


def _find(call: OpOverload, args: Any, kwargs: Any) -> tuple[str, Any] | None:
    name = call._schema.name.removeprefix("aten::")
    method = getattr(torch.Tensor, name, None)
    first = call._schema.arguments[0].name if call._schema.arguments else ""
    if isinstance(method, types.MethodDescriptorType) and first == "self" and _ends_in(call, method, args, kwargs):
        return "call_method", name
    function = getattr(torch, name, None)
    if isinstance(function, types.BuiltinFunctionType) and _ends_in(call, function, args, kwargs):
        return "call_function", function
    return None


def _ends_in(call: OpOverload, candidate: Any, args: Any, kwargs: Any) -> bool:
    """Whether a candidate called with (fake) arguments makes exactly this call with exactly these arguments."""
    with torch.no_grad(), quiet_stand_ins(), _Recorder() as recorder:
        try:
            candidate(*args, **kwargs)
        except (TypeError, RuntimeError):  # it takes other arguments
            return False
    made = [made for made in recorder.made if made[0].namespace != "prim"]
    return len(made) == 1 and made[0][0] is call and _by_name(call, *made[0][1:]) == _by_name(call, args, kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_name(call: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name, without those that are the default; tensors by identity."""
    named = dict(zip((argument.name for argument in call._schema.arguments), args, strict=False)) | dict(kwargs)
    defaults = {argument.name: argument.default_value for argument in call._schema.arguments if argument.has_default_value()}
    plain = {name: _plain(value) for name, value in named.items()}
    return {name: value for name, value in plain.items() if name not in defaults or value != _plain(defaults[name])}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", id(value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return type(value), value


def _kinds(value: Any) -> Any:
    """All that the choice between the overloads of a function can depend on."""
    if isinstance(value, Tensor):
        return "tensor", value.dim() == 0, value.dtype
    if isinstance(value, tuple | list):
        return tuple(dict.fromkeys(map(_kinds, value)))
    if isinstance(value, dict):
        return tuple((name, _kinds(entry)) for name, entry in value.items())
    return type(value)
