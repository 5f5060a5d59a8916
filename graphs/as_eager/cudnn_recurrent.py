"""Recurrent layers on a CUDA device are traced as cuDNN's kernel, which eager execution runs: all layers in one operator. [torch]

What stands in for it in PyTorch does not know the memory that it keeps for the derivative. That is asked of the kernel itself,
once for each shape. Its backward works in that memory, so here it works in a copy and can run again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphs.errors import CaptureError
from graphs.rewriting.operators import define_operator
from graphs.torch_private.kernels import below_autograd, under_transform
from graphs.torch_private.names import no_dispatch, without_autocast
from graphs.torch_private.tensors import storage_bytes, storage_key

aten = torch.ops.aten

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t

_OPTIONS = (
    "int stride, int mode, int hidden_size, int proj_size, int num_layers, bool batch_first, bool train, bool bidirectional, "
    "int[] batch_sizes"
)


class _Options(NamedTuple):
    """What a call is given beside tensors, in the order of the operators' schemas.

    stride       number of weights of one layer and direction
    batch_sizes  of packed sequences; else empty
    """

    stride: int
    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    train: bool
    bidirectional: bool
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> _Options:
        """From the arguments of our operators."""
        return cls._make((*args[:-1], tuple(args[-1])))

    def of_kernels(self) -> tuple[Any, ...]:
        """As arguments of PyTorch's operators, from ``mode`` on; no dropout."""
        shape = self.mode, self.hidden_size, self.proj_size, self.num_layers, self.batch_first
        return *shape, 0.0, self.train, self.bidirectional, list(self.batch_sizes), None


# The kernels, on tensors with data.


def _flatten(weights: list[Tensor], width: int, options: _Options) -> Tensor:
    """Move weights into one piece of memory, laid out as cuDNN reads it, which is returned."""
    o = options
    shape = o.hidden_size, o.proj_size, o.num_layers, o.batch_first, o.bidirectional
    flat: Tensor = aten._cudnn_rnn_flatten_weight.default(weights, o.stride, width, o.mode, *shape)
    return flat


@functools.cache
def _places(
    shapes: Sequence[torch.Size], like: tuple[torch.dtype, torch.device], width: int, options: _Options
) -> tuple[list[int], int]:
    """Where in that memory each weight lies, and how many elements there are."""
    weights = [torch.empty(shape, dtype=like[0], device=like[1]) for shape in shapes]
    flat = _flatten(weights, width, options)
    return [int(weight.storage_offset()) for weight in weights], flat.numel()


def _flat(weights: Sequence[Tensor], width: int, options: _Options) -> Tensor:
    """The memory of the weights, where they lie as cuDNN reads them (``flatten_parameters``); else a copy that is laid out so."""
    first, shapes = weights[0], tuple(weight.shape for weight in weights)
    offsets, length = _places(shapes, (first.dtype, first.device), width, options)
    storage = first.untyped_storage()
    together = storage.nbytes() == length * first.element_size() and all(
        storage_key(weight) == storage_key(first) and weight.storage_offset() == offset and weight.is_contiguous()
        for weight, offset in zip(weights, offsets, strict=True)
    )
    if together:
        return _whole(first, length)
    return _flatten([weight.detach() for weight in weights], width, options)


def _layers(input: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Output, last h and c (else empty), and what the derivative reads: ``belady::cudnn_rnn``."""
    options = _Options.of(args)
    with below_autograd(), without_autocast(), torch.no_grad():
        flat = _flat(weights, input.shape[-1], options)
        made: tuple[Tensor, ...] = aten._cudnn_rnn.default(input, weights, options.stride, flat, h, c, *options.of_kernels())
    return *made[:3], input.new_empty(0, dtype=torch.uint8) if made[3] is None else made[3]


def _layers_backward(
    input: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, output: Tensor, reserve: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """The derivatives by input, h and c, and by all weights in one piece of memory, laid out as these: empty where they are not
    wanted. ``belady::cudnn_rnn_backward``."""
    gradients, options, wanted = args[:3], _Options.of(args[3:-1]), args[-1]
    with below_autograd(), without_autocast(), torch.no_grad():
        flat = _flat(weights, input.shape[-1], options)
        given = input, weights, options.stride, flat, h, c, output, *gradients, *options.of_kernels(), reserve.clone(), wanted
        *states, of_weights = aten._cudnn_rnn_backward.default(*given)
        made = [*states, _whole(of_weights[0], flat.numel()) if of_weights else None]
        return tuple(input.new_empty(0) if each is None else each for each in made)


def _whole(part: Tensor, length: int) -> Tensor:
    """What a tensor is a part of."""
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(part.untyped_storage(), 0, (length,), (1,))


# On tensors without data.


@dataclass(frozen=True, slots=True)
class _Layout:
    """Of a tensor; ``storage``: the number of its storage among those of a call, of ``length`` elements."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    length: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> tuple[_Layout | None, ...]:
        numbers: dict[int, int] = {}
        return tuple(
            None
            if tensor is None
            else cls(
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
                numbers.setdefault(storage_key(tensor), len(numbers)),
                storage_bytes(tensor) // tensor.element_size(),
            )
            for tensor in tensors
        )


def _zeros(layouts: Sequence[_Layout | None], device: torch.device) -> list[Tensor | None]:
    storages: dict[int, Tensor] = {}
    made: list[Tensor | None] = []
    for each in layouts:
        if each is None:
            made.append(None)
            continue
        if each.storage not in storages:
            storages[each.storage] = torch.zeros(each.length, dtype=each.dtype, device=device)
        made.append(storages[each.storage].as_strided(each.shape, each.stride, each.offset))
    return made


@functools.cache
def _asked(
    given: Sequence[_Layout | None], options: _Options, device: torch.device, wanted: tuple[bool, ...] | None
) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """How the kernel lays out its results, or (``wanted``) those of its derivative; asked on zeros."""
    with no_dispatch(), torch.no_grad(), without_autocast():
        input, h, c, *weights = _zeros(given, device)
        places: Any = input, weights, h, c
        made: Sequence[Tensor] = _layers(*places, *options)
        if wanted is not None:
            output, last_h, last_c, reserve = made
            gradients = torch.zeros_like(output), torch.zeros_like(last_h), None if c is None else torch.zeros_like(last_c)
            made = _layers_backward(*places, output, reserve, *gradients, *options, list(wanted))
        return [(each.shape, each.stride(), each.dtype) for each in made]


def _stand_in(
    input: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, options: _Options, wanted: tuple[bool, ...] | None
) -> tuple[Tensor, ...]:
    layouts = _asked(_Layout.of((input, h, c, *weights)), options, input.device, wanted)
    return tuple(torch.empty_strided(shape, stride, dtype=dtype, device=input.device) for shape, stride, dtype in layouts)


def _layers_stand_in(input: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return _stand_in(input, weights, h, c, _Options.of(args), None)


def _layers_backward_stand_in(
    input: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, output: Tensor, reserve: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return _stand_in(input, weights, h, c, _Options.of(args[3:-1]), tuple(args[-1]))


define_operator(
    f"cudnn_rnn(Tensor input, Tensor[] weights, Tensor h, Tensor? c, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _layers,
    _layers_stand_in,
)
define_operator(
    "cudnn_rnn_backward(Tensor input, Tensor[] weights, Tensor h, Tensor? c, Tensor output, Tensor reserve, "
    f"Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, {_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _layers_backward,
    _layers_backward_stand_in,
)


# In a trace.


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, input: Tensor, h: Tensor, c: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            output, last_h, last_c, reserve = torch.ops.belady.cudnn_rnn(input, weights, h, c, *options)
        ctx.options = options
        ctx.save_for_backward(input, h, c, output, reserve, *weights)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reserve, *(() if c is not None else (last_c,)))
        return output, last_h, last_c, reserve

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise CaptureError(
                "the gradient of a recurrent layer of cuDNN is differentiated again (create_graph=True), which PyTorch does not "
                "do; use cells (nn.LSTMCell), or turn cuDNN off (torch.backends.cudnn.flags(enabled=False))"
            )
        input, h, c, output, reserve, *weights = ctx.saved_tensors
        options, of_states = ctx.options, ctx.needs_input_grad[1:4]
        wanted = [*of_states, any(ctx.needs_input_grad[4:])]
        places = input, weights, h, c, output, reserve
        *states, flat = torch.ops.belady.cudnn_rnn_backward(*places, *gradients[:3], *options, wanted)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if wanted[3]:
            like = weights[0].dtype, weights[0].device
            with no_dispatch(), torch.no_grad():
                offsets, _ = _places(tuple(weight.shape for weight in weights), like, input.shape[-1], options)
            of_weights = [flat.as_strided(w.shape, w.stride(), at) for w, at in zip(weights, offsets, strict=True)]
        return None, *(made if want else None for made, want in zip(states, of_states, strict=True)), *of_weights


def recurrent(
    name: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] = (),
) -> Any:
    """What ``aten::NAME`` (``MODES``) returns where cuDNN takes its input (``computes_in``)."""
    if under_transform():
        raise CaptureError(
            f"a recurrent layer of cuDNN ({name}) inside of a transform of torch.func cannot be captured; use cells "
            f"(nn.LSTMCell), or turn cuDNN off (torch.backends.cudnn.flags(enabled=False))"
        )
    if dropout and train and num_layers > 1:
        raise CaptureError(
            f"dropout between the layers of one module ({name}) draws from a state of cuDNN's own, from which nothing can be "
            f"drawn again; use modules of one layer each, and nn.Dropout between them"
        )
    h, c = (hx, None) if isinstance(hx, Tensor) else hx
    dtype = computes_in(input)
    assert dtype is not None
    if dtype != input.dtype:  # autocast
        input, h, *weights = (each.to(dtype) for each in (input, h, *weights))
        c = None if c is None else c.to(dtype)
    projected = c is not None and c.shape[2] != h.shape[2]
    hidden_size, proj_size = ((h if c is None else c).shape[2], h.shape[2] if projected else 0)
    shape = hidden_size, proj_size, num_layers, batch_first, train, bidirectional
    options = _Options((4 if has_biases else 2) + projected, MODES[name], *shape, tuple(batch_sizes))
    output, last_h, last_c, _ = _Layers.apply(options, input, h, c, *weights)  # type: ignore[no-untyped-call]
    return (output, last_h) if c is None else (output, last_h, last_c)


def computes_in(input: Tensor) -> torch.dtype | None:
    """The type in which eager execution has cuDNN compute recurrent layers of an input; None where cuDNN does not take it."""
    if input.device.type != "cuda" or not input.numel():
        return None
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return _type_on(input.device, input.dtype, autocast, torch.backends.cudnn.enabled)


@functools.cache
def _type_on(device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None, enabled: bool) -> torch.dtype | None:
    """The same, found out by a small layer in a thread of its own, which no trace looks at."""

    def ask() -> torch.dtype | None:
        def tensor(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            state, weights = [tensor(1, 1, 1), tensor(1, 1, 1)], [tensor(4, 1), tensor(4, 1)]
            try:
                with torch.no_grad():
                    _flatten(weights, 1, _Options(2, MODES["lstm"], 1, 0, 1, False, True, False, ()))  # or it warns
                output = torch.lstm(tensor(1, 1, 1), state, weights, False, 1, 0.0, True, False, False)[0]
            except RuntimeError:  # no kernel takes this type
                return None
        nodes = [output.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None:
                if "CudnnRnn" in node.name():
                    return output.dtype
                nodes += [inner for inner, _ in node.next_functions]
        return None

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(ask).result()
