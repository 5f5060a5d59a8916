"""Which kernels and which derivatives an operator has. [torch]"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch._decomp  # registers the replacements that eager_kernels takes away
from torch import Tensor
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._ops import OpOverload, OpOverloadPacket

from graphs.torch_private.patching import patched


def takes_cudnn_batch_norm(
    data: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float
) -> bool:
    """Whether eager execution gives these (fake) tensors to cuDNN's batch norm, in training."""
    if data.device.type != "cuda" or weight is None or bias is None:
        return False
    backend: Any = torch._C._select_batch_norm_backend(data, weight, bias, mean, var, True, eps)
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def like_grouped_product(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Memory laid out like what ``grouped_mm`` of these returns."""
    product: Tensor = _create_grouped_mm_output_tensor(a, b, offs, out_dtype)  # type: ignore[no-untyped-call]
    return product


def onednn_enabled() -> bool:
    """Whether kernels of oneDNN are taken."""
    return torch._C._get_mkldnn_enabled()


def _has_torch_function(tensors: tuple[object, ...]) -> bool:
    """``torch.overrides.has_torch_function``, for which the modes of a trace and of a block under a budget do not count."""
    disabled: Any = torch._C._disabled_torch_function_impl

    def overrides(one: object) -> bool:
        return type(one) is not Tensor and getattr(type(one), "__torch_function__", disabled) is not disabled

    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if not all(type(mode).__module__.startswith(("torch.fx.", "graphs.", "online.")) for mode in stack):
        return True
    return torch._C._is_torch_function_enabled() and any(map(overrides, tensors))


@contextlib.contextmanager
def attention_as_eager() -> Iterator[None]:
    """Have ``nn.MultiheadAttention`` and encoder layers choose their kernels as eager execution does. In evaluation, where they
    are frozen, they take a fast path, but not where there is a tracer or a torch-function mode."""
    with (
        patched(torch.overrides, "has_torch_function", _has_torch_function),
        patched(torch.nn.modules.activation, "_is_make_fx_tracing", lambda: False),
    ):
        yield


def under_transform() -> bool:
    """Whether a transform of torch.func is on, as in ``torch.func.grad``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def onednn_takes(tensors: Sequence[Tensor]) -> bool:
    """Whether eager execution runs oneDNN's recurrent layers on an input, the first of these, with the others."""
    dtype = tensors[0].dtype
    takes_dtype = (
        dtype is torch.float
        or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        or (dtype is torch.half and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    )
    return takes_dtype and tensors[0].numel() != 0 and all(each.device.type == "cpu" for each in tensors)


_COMPOSITE, _AUTOGRAD = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
_AUTOGRAD_KEYS = _COMPOSITE, _AUTOGRAD
_ours: set[tuple[Any, Any]] = set()  # functions of ``differentiated_by``


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager execution runs.

    For about forty operators (dropout, upsampling, recurrent layers, one_hot) the tracer has replacements in Python, which differ
    from eager in rounding and in memory. They are taken away while the trace lasts. Those of batch norm stay: they are what makes
    its running statistics outputs of the graph.
    """
    taken: list[tuple[OpOverload[..., Any], Any, Any]] = []
    try:
        for op in _replaced_operators():
            keys = [key for key in _AUTOGRAD_KEYS if key in op.py_kernels and (op, key) not in _ours]
            taken += [(op, key, op.py_kernels.pop(key)) for key in keys]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def differentiated_by(functions: Mapping[OpOverload[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Have these functions, which autograd can differentiate, traced in place of operators."""
    _replaced_operators()  # before these are
    places = [(op, key) for op in functions for key in _AUTOGRAD_KEYS if key == _AUTOGRAD or _is_composite(op)]
    before = {(op, key): op.py_kernels.get(key) for op, key in places}
    try:
        for op, key in places:
            op.py_kernels[key] = functions[op]
            op._dispatch_cache.clear()
        _ours.update(places)
        yield
    finally:
        _ours.difference_update(places)
        for (op, key), kernel in before.items():
            if kernel is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _is_composite(op: OpOverload[..., Any]) -> bool:
    return op.has_kernel_for_dispatch_key(_COMPOSITE)


def in_parts(op: OpOverload[..., Any], *args: Any) -> Any:
    """What PyTorch's own kernel returns of an operator that is made of others, which are traced; also where another function is
    traced in place of it."""
    return op._op_dk(_COMPOSITE, *args)


def below_autograd() -> contextlib.AbstractContextManager[object]:
    """Call operators themselves, past autograd, inside."""
    return torch._C._AutoDispatchBelowAutograd()


def with_autograd() -> contextlib.AbstractContextManager[object]:
    """Differentiate what is called inside, within operators too, which are called past autograd."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set().add(keys.ADInplaceOrView), excluded)


@functools.cache
def _replaced_operators() -> tuple[OpOverload[..., Any], ...]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "batch_norm" not in name)
    overloads = (getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in cast(Any, p).overloads())
    return tuple(op for op in overloads if any(key in op.py_kernels for key in _AUTOGRAD_KEYS))
