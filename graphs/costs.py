"""Op times from a model of the device, without the device: the roofline (Williams et al., CACM 2009). [torch]

    time = max(FLOPs / peak FLOP/s, bytes moved / memory bandwidth) + launch overhead

FLOPs are counted by the formulas of ``torch.utils.flop_counter`` (multiply and add are two): matrix products, convolutions,
attention; by our own: recurrent layers and linear algebra. All other ops count none; their time is that of the bytes they move.
Views are no ops and cost nothing. A higher-order op takes what the calls of its subgraph take, as often as they run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from graphs.devices import DEVICES, DeviceDescription, device_called
from graphs.errors import InputError, a_kind
from graphs.rewriting.nodes import attribute, calls_in, subgraphs_of, tensors_of
from graphs.torch_private.names import OpOverload
from graphs.torch_private.tensors import storage_key

if TYPE_CHECKING:
    from graphs.capture import Step


def roofline(step: Step, device: DeviceDescription | str | None = None) -> Step:
    """The step with modelled op times: whole ns, at least 1. Workspaces stay as they are.

    device  a description, or the name of one of ``DEVICES``; None: the one of the device the step was captured on

    Raises InputError for a name that is not there, and where the device of the step has no description.
    """
    check_step(step, "roofline")
    if isinstance(device, DeviceDescription):
        model = device
    else:
        model = described(step) if device is None else _description(device)
    known: dict[str, int] = {}
    times: list[int] = []
    for node in step.calls:
        key = signature(node)
        if key not in known:
            known[key] = modelled_ns(node, model)
        times.append(known[key])
    step = step.with_costs(times, costs="roofline")
    if device is None:
        return step
    return dataclasses.replace(step, graph=dataclasses.replace(step.graph, device=model.name))


def check_step(step: object, what: str) -> None:
    """Raises InputError for what is no captured step; ``what`` names the function that takes one."""
    from graphs.capture import Step

    if not isinstance(step, Step):
        raise InputError(f"{what} takes a captured Step, as capture(model, inputs, loss=...) makes it, not {a_kind(step)}")


def _description(name: str) -> DeviceDescription:
    if name not in DEVICES:
        raise InputError(f"unknown device {name!r}; there are descriptions of: {', '.join(DEVICES)}")
    return DEVICES[name]


def described(step: Step) -> DeviceDescription:
    """The description of the device of a step. Raises InputError where there is none."""
    found = DEVICES["cpu"] if step.device.type == "cpu" else device_called(step.graph.device)
    if found is None:
        raise InputError(
            f"there is no description of the device {step.graph.device!r}; name a similar one ({', '.join(DEVICES)}), or give "
            f"a DeviceDescription, or measure the ops instead"
        )
    return found


def modelled_ns(node: fx.Node, device: DeviceDescription) -> int:
    """What one call takes by the roofline: whole ns, at least 1."""
    busy_s = max(flops(node) / _rate(node, device), moved_bytes(node) / device.bandwidth_bytes_per_s)
    # Which branch of a condition is taken is not known, nor how often a loop runs: the dearest, once.
    inside_ns = max(
        (sum(modelled_ns(call, device) for call in calls_in(each) if _takes_time(call)) for each in subgraphs_of(node)), default=0
    )
    return max(1, max(math.ceil(busy_s * 1e9), inside_ns * _repeats(node)) + device.launch_ns)


def _rate(node: fx.Node, device: DeviceDescription) -> float:
    """FLOP/s for the operands of a call."""
    operands = [t.dtype for n in node.all_input_nodes for t in tensors_of(n) if t.dtype.is_floating_point]
    dtype = str(operands[0]).removeprefix("torch.") if operands else "float32"
    if dtype == "float32" and "convolution" in _packet(node):
        dtype = "tf32"
    return device.peak_flops.get(dtype, device.peak_flops["float32"])


def _takes_time(call: fx.Node) -> bool:
    """Whether a call in a subgraph is an op: neither a view nor the choice of an output."""
    return bool(subgraphs_of(call)) or (isinstance(call.target, OpOverload) and not call.target.is_view)


def _repeats(node: fx.Node) -> int:
    """How often the subgraph of a higher-order operator runs: a map and a scan take it to each slice of their first inputs."""
    args, _ = _values(node)
    name = _packet(node)
    over = args[1] if name == "map_impl" else args[2] if name == "scan" else ()
    return int(over[0].shape[0]) if over else 1


# What an op computes.


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; a causal mask is not taken into account."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Scores again, and the gradients of values, scores, queries and keys."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _recurrent(input: Tensor, *given: Any, **_: Any) -> int:
    """The products of each step with the matrices of a layer, or with those of all layers, given in a list."""
    weights: Sequence[Tensor] = given[0] if isinstance(given[0], list | tuple) else given[:2]
    return 2 * math.prod(input.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_backward(*args: Any, **_: Any) -> int:
    """The gradients of both factors of each product."""
    return 2 * _recurrent(*args)


_RECURRENT = "aten._cudnn_rnn", "aten.mkldnn_rnn_layer", "belady.lstm_layer", "belady.cudnn_rnn"


def _cubes(factor: float) -> Callable[..., int]:
    """FLOPs of a dense method on (..., rows, columns): a multiple of the longer side times the square of the shorter one."""

    def count(matrix: Tensor, *_: Any, **__: Any) -> int:
        *batch, rows, columns = matrix.shape
        return round(factor * math.prod(batch) * max(rows, columns) * min(rows, columns) ** 2)

    return count


def _triangular(*_: Any, out_val: Tensor, **__: Any) -> int:
    """A triangular system of equations for each column of the solution; which side its rows are on is not looked at."""
    return out_val.numel() * out_val.shape[-2]


def _solved(*_: Any, out_val: Tensor, **__: Any) -> int:
    """One for each of two factors."""
    return 2 * _triangular(out_val=out_val)


def _factored_and_solved(matrix: Tensor, *_: Any, out_val: Sequence[Tensor], **__: Any) -> int:
    """The right side may be a vector."""
    return _cubes(2 / 3)(matrix) + 2 * out_val[0].numel() * matrix.shape[-1]


# Golub and Van Loan, Matrix Computations, 4th edition: LU and Cholesky 3.2.9 and 4.2.5, QR 5.2.2 (with the orthogonal factor),
# symmetric eigenvalues 8.3.3 and singular values 8.6.3 with vectors, others by the QR iteration 7.5.6, the exponential 9.3.1.
_LINEAR_ALGEBRA: Mapping[str, Callable[..., int]] = {
    "linalg_lu_factor_ex": _cubes(2 / 3),
    "linalg_ldl_factor_ex": _cubes(1 / 3),
    "linalg_cholesky_ex": _cubes(1 / 3),
    "cholesky_inverse": _cubes(2 / 3),
    "linalg_inv_ex": _cubes(2),
    "_linalg_det": _cubes(2 / 3),
    "_linalg_slogdet": _cubes(2 / 3),
    "_linalg_solve_ex": _factored_and_solved,
    "linalg_qr": _cubes(4),
    "_linalg_eigh": _cubes(9),
    "_linalg_svd": _cubes(21),
    "linalg_eig": _cubes(25),
    "linalg_matrix_exp": _cubes(20),
    "linalg_lu_solve": _solved,
    "linalg_ldl_solve": _solved,
    "linalg_solve_triangular": _triangular,
    "cholesky_solve": _solved,
}

# torch has formulas for most kinds of attention, but not in every release: grouped queries and the kernel of the CPU came later.
_OWN_FORMULAS: Mapping[str, Callable[..., int]] = {
    **{f"aten._scaled_dot_product_{name}": _attention for name in _ATTENTION},
    **{f"aten._scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTION},
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys((f"{name}_backward" for name in _RECURRENT), _recurrent_backward),
    **{f"aten.{name}": formula for name, formula in _LINEAR_ALGEBRA.items()},
}


def flops(node: fx.Node) -> int:
    """Floating-point operations of one call, by the shapes of its fake values; 0 for an op without a formula."""
    args, kwargs = _values(node)
    return flops_of(node.target, args, kwargs, node.meta.get("val"))


def flops_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of a call of an operator, by the shapes of tensors; 0 for one without a formula."""
    formula = formula_of(target)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def formula_of(target: Any) -> Callable[..., int] | None:
    """How the operations of an operator are counted; products, convolutions, attention and recurrent layers have a formula."""
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return _OWN_FORMULAS.get(str(packet)) or flop_registry.get(packet)


# What an op moves.


_SHAPE_ONLY = re.compile(r"aten\.(\w+_like|new_\w+)")  # the content of their first argument is not read
_UNWRITTEN = frozenset(f"aten.{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"))
_GATHERS = frozenset(f"aten.{name}" for name in ("embedding", "index", "index_select", "gather"))


def moved_bytes(node: fx.Node) -> int:
    """Bytes one call reads and writes: every element of its tensors once, also where a tensor is given twice or is expanded.

    A gather reads from its source as many bytes as it writes. What a kernel holds inside is not counted.
    """
    name = _packet(node)
    written = 0 if name in _UNWRITTEN else _distinct_bytes(tensors_of(node))
    sources = list(node.all_input_nodes)
    read = 0
    if sources and name in _GATHERS:
        read = min(written, _distinct_bytes(tensors_of(sources.pop(0))))
    elif sources and _SHAPE_ONLY.fullmatch(name):
        del sources[0]
    return written + read + _distinct_bytes([t for source in sources for t in tensors_of(source)])


def _distinct_bytes(tensors: list[Tensor]) -> int:
    """Bytes of all elements of some tensors, each counted once: per storage no more than lie between its ends."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_storage.setdefault(storage_key(tensor), []).append(tensor)
    total = 0
    for views in by_storage.values():
        elements = sum(math.prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s) for t in views)
        first = min(int(t.storage_offset()) for t in views)
        last = max(int(t.storage_offset()) + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in views)
        total += min(elements, last - first + 1) * views[0].element_size()
    return total


# What makes two calls the same.


def signature(node: fx.Node) -> str:
    """Text that is equal for two calls that do the same work: operator, all arguments, of tensors dtype, shape and strides.

    Tensors that share a storage have the same number, and their distance in elements.
    """
    storages: dict[int, tuple[int, int]] = {}

    def written(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            argument = _value(argument)
        if isinstance(argument, Tensor):
            offset = int(argument.storage_offset())
            number, first = storages.setdefault(storage_key(argument), (len(storages), offset))
            dtype = str(argument.dtype).removeprefix("torch.")
            return f"{dtype}{list(argument.shape)}{list(argument.stride())}@{number}{offset - first:+d}"
        if isinstance(argument, fx.GraphModule):  # of a higher-order operator, which may have others inside
            return repr([each.code for each in argument.modules() if isinstance(each, fx.GraphModule)])
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(written, argument))}]"
        return repr(argument)

    arguments = [written(a) for a in node.args] + [f"{name}={written(a)}" for name, a in sorted(node.kwargs.items())]
    return f"{node.target}({', '.join(arguments)})"


def _packet(node: fx.Node) -> str:
    """Operator without its overload."""
    return str(node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target)


def _values(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the fake values of their nodes."""
    return fx.map_arg(node.args, _value), fx.map_arg(node.kwargs, _value)


def _value(node: fx.Node) -> Any:
    return attribute(node) if node.op == "get_attr" else node.meta["val"]
