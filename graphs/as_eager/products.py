"""Derivatives of ``prod`` and ``cumprod``, which look at their data: a trace would take other formulas than a step. [torch]"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphs.errors import CaptureError
from graphs.rewriting.operators import define_operator
from graphs.torch_private.kernels import below_autograd, differentiated_by, with_autograd
from graphs.torch_private.tensors import storage_key

aten = torch.ops.aten


def _prod(input: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    made: Tensor = aten.prod(input, dtype=dtype) if dim is None else aten.prod(input, dim, keepdim, dtype=dtype)
    return made


def _prod_backward(grad: Tensor, input: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return _backward(_prod, _prod_backward_fake, grad, input, dim, keepdim, dtype)


def _prod_backward_fake(grad: Tensor, input: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """The derivative where no factor is zero."""
    made = _prod(input, dim if input.dim() else None, True, dtype)
    grad = grad if dim is None or keepdim or not input.dim() else grad.unsqueeze(dim)
    return (grad * (made / input.to(made.dtype)).conj()).resolve_conj().to(input.dtype)


def _cumprod(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    made: Tensor = aten.cumprod(input, dim, dtype=dtype)
    return made


def _cumprod_backward(grad: Tensor, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return _backward(_cumprod, _cumprod_backward_fake, grad, input, dim, dtype)


def _cumprod_backward_fake(grad: Tensor, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """The derivative where no factor is zero."""
    products = _cumprod(input, dim, dtype).conj() * grad
    made: Tensor = (products.flip(dim).cumsum(dim).flip(dim) / input.conj()).resolve_conj().to(input.dtype)
    return made


def _backward(product: Callable[..., Tensor], fake: Callable[..., Tensor], grad: Tensor, input: Tensor, *args: Any) -> Tensor:
    """PyTorch's own, of a product that is made once more; where it finds zeros, laid out as where it does not."""
    with torch.enable_grad(), with_autograd():
        leaf = input.detach().requires_grad_()
        (made,) = torch.autograd.grad(product(leaf, *args), leaf, grad)
    made = made.resolve_conj()
    is_new = storage_key(made) != storage_key(grad)
    if is_new and input.is_contiguous() and grad.is_contiguous() and made.is_contiguous():
        return made
    like = fake(grad.to("meta"), input.to("meta"), *args)
    if is_new and made.stride() == like.stride():
        return made
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=made.device).copy_(made)


define_operator(
    "prod_backward(Tensor grad, Tensor input, int? dim, bool keepdim, ScalarType? dtype) -> Tensor",
    _prod_backward,
    _prod_backward_fake,
)
define_operator(
    "cumprod_backward(Tensor grad, Tensor input, int dim, ScalarType? dtype) -> Tensor",
    _cumprod_backward,
    _cumprod_backward_fake,
)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(input)
        ctx.options = dim, keepdim, dtype
        with below_autograd():
            return _prod(input, dim, keepdim, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_order("prod")
        return torch.ops.belady.prod_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


class _CumulativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(input)
        ctx.options = dim, dtype
        with below_autograd():
            return _cumprod(input, dim, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_order("cumprod")
        return torch.ops.belady.cumprod_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


def _check_first_order(name: str) -> None:
    if torch.is_grad_enabled():
        raise CaptureError(
            f"the gradient of {name} is differentiated again (create_graph=True), for which PyTorch looks at the data; multiply "
            f"step by step, or take the exponential of a sum of logarithms"
        )


def _prod_of_all(input: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _Product.apply(input, None, False, dtype)  # type: ignore[no-untyped-call]


def _prod_along(input: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _Product.apply(input, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


def _cumprod_along(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return _CumulativeProduct.apply(input, dim, dtype)  # type: ignore[no-untyped-call]


def _cumprod_in_place(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return input.copy_(_cumprod_along(input.clone(), dim, dtype=dtype))  # its derivative needs what it is written over


def products_traced() -> contextlib.AbstractContextManager[None]:
    """Let a trace hold the derivatives of products that a step has, inside."""
    return differentiated_by(
        {
            aten.prod.default: _prod_of_all,
            aten.prod.dim_int: _prod_along,
            aten.cumprod.default: _cumprod_along,
            aten.cumprod_.default: _cumprod_in_place,
        }
    )
