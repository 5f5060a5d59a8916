"""Recurrent layers are traced as the kernels that eager execution runs: layers of LSTMs on the CPU as oneDNN's. [torch]

PyTorch does not take it for tensors without data, and what stands in for it does not know the memory that it keeps for the
derivative. That is asked of the kernel itself, once for each shape.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphs.as_eager import cudnn_recurrent
from graphs.errors import CaptureError
from graphs.rewriting.operators import define_operator
from graphs.torch_private.kernels import (
    below_autograd,
    differentiated_by,
    in_parts,
    onednn_enabled,
    onednn_takes,
    under_transform,
)
from graphs.torch_private.names import no_dispatch, without_autocast
from graphs.torch_private.patching import patched

aten = torch.ops.aten

_OPTIONS = "bool reverse, int hidden_size, int num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train"
_GIVEN = "Tensor input, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c"
_LSTM = 2  # ideep::rnn_kind::LSTM
_GIVEN_COUNT = 7  # tensors that a layer gets

_Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _layer(*args: Any) -> _Results:
    """Output, last h and c, and what the derivative reads: ``belady::lstm_layer``."""
    *given, reverse, hidden, layers, biases, both, first, train, differentiable = args
    # By this the kernel decides whether there will be a derivative.
    with below_autograd(), without_autocast(), torch.set_grad_enabled(differentiable):
        output, last_h, last_c, workspace = aten.mkldnn_rnn_layer.default(
            *given, reverse, [], _LSTM, hidden, layers, biases, both, first, train
        )
    return output, last_h, last_c, torch.empty(0, dtype=torch.uint8) if workspace is None else workspace


def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """The derivatives by what the layer was given: ``belady::lstm_layer_backward``."""
    given, (output, last_h, last_c, workspace, *grads) = args[:_GIVEN_COUNT], args[_GIVEN_COUNT : _GIVEN_COUNT + 7]
    reverse, hidden, layers, biases, both, first, train = args[_GIVEN_COUNT + 7 :]
    with below_autograd(), without_autocast():
        made: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(
            *given,
            output,
            last_h,
            last_c,
            *grads,
            reverse,
            _LSTM,
            hidden,
            layers,
            biases,
            train,
            both,
            [],
            first,
            workspace,
        )
    return made


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


@functools.cache
def _layouts(given: Sequence[_Layout], options: Sequence[Any], differentiable: bool, backward: bool) -> list[_Layout]:
    """How the kernel lays out its results, or those of its derivative."""
    with no_dispatch(), torch.no_grad(), without_autocast():
        zeros = [torch.empty_strided(*layout[:2], dtype=layout[2], device="cpu").zero_() for layout in given]
        made: Sequence[Tensor] = _layer(*zeros, *options, differentiable)
        if backward:
            made = _layer_backward(*zeros, *made, *map(torch.zeros_like, made[:3]), *options)
        return list(map(_layout, made))


def _fake(args: Sequence[Any], options: Sequence[Any], differentiable: bool, backward: bool) -> tuple[Tensor, ...]:
    layouts = _layouts(tuple(map(_layout, args[:_GIVEN_COUNT])), tuple(options), differentiable, backward)
    return tuple(torch.empty_strided(shape, stride, dtype=dtype, device="cpu") for shape, stride, dtype in layouts)


def _layer_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake(args, args[_GIVEN_COUNT:-1], args[-1], backward=False)


def _layer_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake(args, args[_GIVEN_COUNT + 7 :], differentiable=True, backward=True)


define_operator(
    f"lstm_layer({_GIVEN}, {_OPTIONS}, bool differentiable) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
)
define_operator(
    f"lstm_layer_backward({_GIVEN}, Tensor output, Tensor last_h, Tensor last_c, Tensor workspace, Tensor? grad_output, "
    f"Tensor? grad_h, Tensor? grad_c, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer_backward,
    _layer_backward_fake,
)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> _Results:
        with below_autograd():
            results: _Results = torch.ops.belady.lstm_layer(*args)
        ctx.options = args[_GIVEN_COUNT:-1]
        ctx.biases = args[_GIVEN_COUNT + 3]
        ctx.save_for_backward(*args[:_GIVEN_COUNT], *results)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise CaptureError(
                "the gradient of an nn.LSTM is differentiated again (create_graph=True), for which PyTorch takes other formulas; "
                "use nn.LSTMCell, or train without a plan, in a block of online.budget"
            )
        saved = ctx.saved_tensors
        grads = torch.ops.belady.lstm_layer_backward(*saved, grad_output, grad_h, grad_c, *ctx.options)
        *weights, b_ih, b_hh, h, c = grads
        biases = (b_ih, b_hh) if ctx.biases else (None, None)
        return (*weights, *biases, h, c, *(None for _ in ctx.options), None)


def _traced_layer(*args: Any) -> Any:
    """``aten::mkldnn_rnn_layer``, once autocast has given its tensors their types."""
    *given, reverse, _, _, hidden, layers, biases, both, first, train = args
    options = reverse, hidden, layers, biases, both, first, train
    return _Layer.apply(*given, *options, torch.is_grad_enabled())  # type: ignore[no-untyped-call]


def _lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """``aten::lstm.input``, by layers where PyTorch runs oneDNN's (``at::native::mkldnn_rnn``)."""
    h_0, c_0 = hx
    options = has_biases, num_layers, dropout, train, bidirectional, batch_first
    if cudnn_recurrent.computes_in(input) is not None:
        return cudnn_recurrent.recurrent("lstm", input, hx, params, *options)
    if not (onednn_enabled() and onednn_takes([input, *hx, *params])):
        return in_parts(aten.lstm.input, input, hx, params, *options)
    if under_transform() or h_0.shape[2] != c_0.shape[2]:  # functions of autograd are no part of those of torch.func in a trace
        return _cells(input, hx, params, *options)
    now = (input.transpose(0, 1) if batch_first else input).contiguous()
    h_0, c_0 = h_0.contiguous(), c_0.contiguous()
    directions, count = 1 + bidirectional, 2 + 2 * has_biases
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for reverse in (False, True)[:directions]:
            index = len(last)
            w_ih, w_hh, *biases = params[index * count : (index + 1) * count]
            b_ih, b_hh = biases or map(torch.zeros_like, (w_ih, w_hh))
            given = now, w_ih, w_hh, b_ih, b_hh, h_0[index], c_0[index]
            settings = num_layers, has_biases, bidirectional, batch_first, train
            output, last_h, last_c, _ = aten.mkldnn_rnn_layer.default(*given, reverse, [], _LSTM, h_0.shape[2], *settings)
            outputs.append(output)
            last.append((last_h, last_c))
        now = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            now = torch.dropout(now, dropout, train=True)
    h, c = (torch.stack(each, 0) for each in zip(*last, strict=True))
    return now.transpose(0, 1) if batch_first else now, h, c


def _cells(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::lstm.input`` on the CPU, by cells: call for call what PyTorch runs without oneDNN.

    PyTorch's own function asks whether oneDNN is on, which is one answer for all threads, and would take its layer where it is,
    or warn of projections, for which there is none.
    """
    now = input.transpose(0, 1) if batch_first else input
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    directions, count = 1 + bidirectional, len(params) // len(states)
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for reverse in (False, True)[:directions]:
            index = len(last)
            output, state = _one_direction(now, states[index], params[index * count : (index + 1) * count], has_biases, reverse)
            outputs.append(output)
            last.append(state)
        now = torch.cat(outputs, outputs[0].dim() - 1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            now = torch.dropout(now, dropout, train=True)
    hs, cs = zip(*last, strict=True)
    c, h = torch.stack(cs, 0), torch.stack(hs, 0)
    return now.transpose(0, 1) if batch_first else now, h, c


def _one_direction(
    input: Tensor, state: tuple[Tensor, Tensor], params: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The output of one layer in one direction, by cells, and its last h and c."""
    w_ih, w_hh, *others = params
    b_ih, b_hh = others[:2] if has_biases else (None, None)
    projection = others[2 * has_biases :]
    steps = torch.nn.functional.linear(input, w_ih, b_ih).unbind(0)
    if not steps:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    h, c = state
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        gates = torch.nn.functional.linear(h, w_hh, b_hh).add_(step)
        in_gate, forget_gate, cell_gate, out_gate = gates.unsafe_chunk(4, 1)
        in_gate, forget_gate = in_gate.sigmoid_(), forget_gate.sigmoid_()
        cell_gate, out_gate = cell_gate.tanh_(), out_gate.sigmoid_()
        c = (forget_gate * c).add_(in_gate * cell_gate)
        h = out_gate * c.tanh()
        if projection:
            h = torch.matmul(h, projection[0].t())
        outputs.append(h)
    return torch.stack(outputs[::-1] if reverse else outputs, 0), (h, c)


def _other(name: str, input: Tensor, *args: Any) -> Any:
    """``aten::NAME.input``, but for LSTMs."""
    if cudnn_recurrent.computes_in(input) is not None:
        return cudnn_recurrent.recurrent(name, input, *args)
    return in_parts(getattr(aten, name).input, input, *args)


def _changed(layers: nn.RNNBase) -> bool:
    """Whether a layer has to list its weights anew: it does in a trace, which has others. What is computed whenever it is asked
    for, as by a parametrization, is asked for as often as eager execution does: twice, up to the first that is new."""
    for name in layers._flat_weights_names:
        if hasattr(layers, name) and getattr(layers, name) is not layers._parameters.get(name):
            break
    return True


@contextlib.contextmanager
def recurrent_layers_traced() -> Iterator[None]:
    """Let a trace hold the recurrent layers that eager execution runs, and as many computations of weights, inside."""
    functions: dict[Any, Any] = {getattr(aten, name).input: functools.partial(_other, name) for name in cudnn_recurrent.MODES}
    functions[aten.lstm.input] = _lstm
    functions[aten.mkldnn_rnn_layer.default] = _traced_layer
    with (
        differentiated_by(functions),
        patched(nn.RNNBase, "_weights_have_changed", _changed),
        patched(nn.RNNBase, "flatten_parameters", lambda layers: None),  # stand-ins lie nowhere
    ):
        yield
