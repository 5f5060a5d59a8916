"""The inputs of a training step: in which forms they come, and which of them go to the loss. [torch]"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError, InputError
from graphs.torch_private.names import (
    TreeSpec,
    is_traceable_wrapper_subclass,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from graphs.watching.fingerprint import same_plain

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Loss = Callable[..., Tensor]
_Plain = Tensor | tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputForm:
    """The form in which inputs were given: others bound to the step must have the same.

    spec    their tree
    labels  what messages call each leaf: "inputs[0]", "inputs['labels']"
    names   keys of the outermost dict in their order, None where it is not one
    fixed   leaves that are no tensors, by index; they are part of the graph
    alone   indices of tensors that the forward differentiates, none of which may be given twice
    """

    spec: TreeSpec
    labels: tuple[str, ...]
    names: tuple[str, ...] | None
    fixed: Mapping[int, object]
    alone: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the model is called with, and what the loss is called with after the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    named_targets: dict[str, Any]


def plain(inputs: Inputs) -> _Plain:
    """A tensor, a tuple or a plain dict."""
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    raise CaptureError(
        f"inputs must be a tensor, a tuple or list of positional arguments, or a dict of keyword arguments, not "
        f"{type(inputs).__name__}"
    )


def flatten(inputs: _Plain) -> tuple[list[Any], InputForm]:
    """Flat leaves of the inputs, and their form."""
    pairs, spec = tree_flatten_with_path(inputs)
    leaves = [leaf for _, leaf in pairs]
    labels = tuple(f"inputs{keystr(path)}" for path, _ in pairs)
    names = tuple(inputs) if isinstance(inputs, dict) else None
    return leaves, InputForm(spec, labels, names, {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})


def is_of(form: InputForm, inputs: tuple[Any, ...]) -> bool:
    """Whether positional inputs have this form; their leaves may differ."""
    return tree_flatten(inputs)[1] == form.spec


def in_order(form: InputForm, inputs: Inputs) -> _Plain:
    """Plain inputs; those of the captured names come in the captured order."""
    given = plain(inputs)
    if isinstance(given, dict) and form.names is not None and given.keys() == set(form.names):
        return {key: given[key] for key in form.names}
    return given


def leaves_like(form: InputForm, inputs: Inputs) -> list[Any]:
    """Flat leaves of inputs that must have the captured form."""
    given = in_order(form, inputs)
    if isinstance(given, dict) and form.names is not None and given.keys() != set(form.names):
        raise InputError(f"the step was captured with the inputs {sorted(form.names)}, not {sorted(given)}")
    leaves, spec = tree_flatten(given)
    if spec != form.spec:
        labels = [f"inputs{keystr(path)}" for path, _ in tree_flatten_with_path(given)[0]]
        if tuple(labels) == form.labels:
            raise InputError(
                f"the inputs are {_outline(spec)}, but the step was captured with {_outline(form.spec)}; a model may see the "
                f"difference, so give them in the same containers"
            )
        if sorted(labels) == sorted(form.labels):
            raise InputError(
                f"the entries of a dict among the inputs come in another order ({', '.join(labels)}) than when the step was "
                f"captured ({', '.join(form.labels)}), which a model may see; give them in that order"
            )
        found = "one tensor" if isinstance(given, Tensor) else f"a {type(given).__name__} of {len(given)}"
        raise InputError(
            f"the inputs have another form than the captured ones: {found}, but the step was captured with "
            f"{', '.join(form.labels)}"
        )
    for i, captured in form.fixed.items():
        if same_plain(leaves[i], captured):
            continue
        found = "a tensor" if isinstance(leaves[i], Tensor) else repr(leaves[i])
        raise InputError(f"{form.labels[i]} is {found}, but the step was captured with {captured!r}; capture it again")
    if (why := given_twice(form, leaves)) is not None:
        raise InputError(why)
    return leaves


def given_twice(form: InputForm, leaves: Sequence[Any]) -> str | None:
    """What is wrong where a tensor that the forward differentiates is given twice: its derivative goes through both."""
    for i in form.alone:
        other = next((j for j, leaf in enumerate(leaves) if leaf is leaves[i] and j != i), None)
        if other is not None:
            return (
                f"{form.labels[i]}, which the forward differentiates, is also {form.labels[other]}, and a captured step takes "
                f"them for two; give a copy of it as one of them"
            )
    return None


def _outline(spec: TreeSpec) -> str:
    """The containers of a form, with dots for what is in them."""
    return repr(tree_unflatten([...] * spec.num_leaves, spec)).replace("Ellipsis", "...")


def check_input(label: str, leaf: object, where: torch.device) -> None:
    """Refuse what cannot be an input of a captured step."""
    if not isinstance(leaf, Tensor):
        if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return
        raise CaptureError(
            f"{label} is of type {type(leaf).__name__}; inputs are tensors, numbers, text or None, in tuples, lists and dicts"
        )
    check_tensor(label, leaf)
    if leaf.requires_grad:
        raise CaptureError(
            f"{label} requires a gradient, but only parameters get one; give it detached or make it a parameter of the model"
        )
    if leaf.device != where:
        raise CaptureError(f"{label} is on {leaf.device}, the model on {where}; move one of them")


def check_tensor(label: str, tensor: Tensor) -> None:
    """Refuse tensors that are no dense memory on a device."""
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise CaptureError(f"{label} has no shape yet; run the model once before capturing it")
    if type(tensor).__name__ == "DTensor":
        raise CaptureError(
            f"{label} is sharded (a DTensor), and a plan needs whole tensors; plan the model before it is sharded, and shard the "
            f"planned module: fully_shard(plan.module())"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        raise CaptureError(f"{label} is a nested, sparse, quantized or wrapped tensor; only plain dense ones can be captured")
    if tensor.device.type == "meta":
        raise CaptureError(
            f"{label} is on the meta device, and the model is not; put the model there too, or {label} where it is"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise CaptureError(f"{label} is on {tensor.device}; only cpu and cuda are supported")


def own_example(model: nn.Module, *, with_labels: bool) -> Inputs:
    """The example inputs a model brings along, with labels added where a transformers model needs them to return a loss."""
    for attribute in ("example_input_array", "dummy_inputs"):
        example = getattr(model, attribute, None)
        if example is None or (isinstance(example, Mapping) and getattr(model, "main_input_name", None) not in (None, *example)):
            continue  # transformers gives text to every model, vision models included
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        leaves, spec = tree_flatten(plain(example))
        example = tree_unflatten([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        if with_labels and isinstance(example, dict) and "labels" in inspect.signature(model.forward).parameters:
            labels = _dummy_labels(type(model).__name__, example)
            if labels is not None:
                example.setdefault("labels", labels)
        return example
    raise CaptureError(
        f"{type(model).__name__} brings no example inputs (dummy_inputs or example_input_array); give inputs=, for instance "
        f"one batch"
    )


def _dummy_labels(name: str, example: Mapping[str, Any]) -> Tensor | None:
    """Labels of the shape that transformers' heads expect, told by the class name; None for others."""
    ids = example.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    if name.endswith(("LM", "LMHeadModel", "ForConditionalGeneration")):
        return ids
    if name.endswith("ForTokenClassification"):
        return torch.zeros_like(ids)
    if name.endswith("ForSequenceClassification"):
        return ids.new_zeros(ids.shape[0])
    return None


def splitter(loss: Loss | None, inputs: _Plain) -> Callable[[Any], Arguments]:
    """How inputs are shared out between the model and the loss."""
    count, names = (0, []) if loss is None else _targets(loss)
    if isinstance(inputs, dict):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise CaptureError(f"the loss requires {missing[0]!r}, which is not among the inputs {sorted(inputs)}")
        return lambda now: Arguments((), {k: v for k, v in now.items() if k not in names}, (), {k: now[k] for k in names})
    if len(names) > (count or 0):
        raise CaptureError(f"the loss requires the keyword {names[-1]!r}: give the inputs as a dict")
    if isinstance(inputs, Tensor):
        if count:
            raise CaptureError(f"the loss requires {count} more argument(s) beside the output: give inputs=(..., target)")
        return lambda now: Arguments((now,), {}, (), {})
    if count is None:
        if len(inputs) > 1:
            raise CaptureError(
                "the loss takes any number of arguments, so it does not say which inputs are its targets; name them, as in "
                "def loss(output, target)"
            )
        count = 0
    if count > len(inputs):
        raise CaptureError(f"the loss requires {count} target(s) beside the output, but there are only {len(inputs)} inputs")
    cut = len(inputs) - count
    return lambda now: Arguments(tuple(now[:cut]), {}, tuple(now[cut:]), {})


def _targets(loss: Loss) -> tuple[int | None, list[str]]:
    """Arguments a loss requires beside the output: how many positional ones (None: any number), and the names of all."""
    if isinstance(loss, type):
        raise CaptureError(f"the loss is the class {loss.__name__}; give one of its objects: loss={loss.__name__}(...)")
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError) as error:
        raise CaptureError(f"cannot see which arguments the loss {loss!r} takes; wrap it in a function") from error
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    anything = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not positional and not anything:
        raise CaptureError("the loss takes no positional argument; its first one must be the output of the model")
    required = [p.name for p in positional[1:] if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return None if anything and not positional else len(required), required + keywords
