"""A torch training step becomes a Graph, and keeps the FX graph it came from. [torch]"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn

from graphs.errors import CaptureError, InputError
from graphs.ir import Graph, Op, Value
from graphs.torch_private import (
    DATA_DEPENDENT,
    Joint,
    OpOverload,
    TreeSpec,
    fuse_bernoulli,
    is_operator,
    is_traceable_wrapper_subclass,
    keystr,
    storage_bytes,
    storage_key,
    to_fake,
    trace_joint,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Loss = Callable[..., Tensor]

CUDA_GRANULE_BYTES = 512  # the caching allocator rounds every storage up to this


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensor of one placeholder comes from at run time.

    kind    "parameter" and "buffer" of the model (``name`` is its qualified name), "input" (``index`` into the flattened
            inputs, ``name`` for messages), "constant" (``name`` in ``Step.constants``: a tensor the model or its loss uses
            that is neither parameter nor buffer), "tangent" (gradient of the loss, ones unless the caller says otherwise)
    trainable  a parameter that requires a gradient
    """

    kind: Literal["parameter", "buffer", "input", "constant", "tangent"]
    name: str = ""
    index: int = -1
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What one entry of the FX output node is.

    kind   "loss", "gradient" of the parameter ``name``, "buffer": new content of the buffer ``name``
    """

    kind: Literal["loss", "gradient", "buffer"]
    name: str = ""


@dataclass(frozen=True, slots=True)
class InputForm:
    """The form in which inputs were given: others bound to the step must have the same.

    spec    their tree
    labels  what messages call each leaf: "inputs[0]", "inputs['labels']"
    names   keys of the outermost dict in their order, None where it is not one
    fixed   leaves that are no tensors, by index; they are part of the graph
    """

    spec: TreeSpec
    labels: tuple[str, ...]
    names: tuple[str, ...] | None
    fixed: Mapping[int, object]


@dataclass(frozen=True, slots=True)
class _Want:
    """What a tensor bound to a placeholder must be."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Want:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def check(self, label: str, tensor: object) -> None:
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label} is a {type(tensor).__name__}, but the step was captured with a tensor")
        if tensor.shape != self.shape:
            raise InputError(f"{label} has shape {tuple(tensor.shape)}, but the step was captured with {tuple(self.shape)}")
        if tensor.dtype != self.dtype:
            raise InputError(f"{label} has dtype {tensor.dtype}, but the step was captured with {self.dtype}")
        if tensor.device != self.device:
            raise InputError(f"{label} is on {tensor.device}, but the step was captured on {self.device}")
        if tensor.stride() != self.strides and not _same_layout(self.shape, tensor.stride(), self.strides):
            raise InputError(
                f"{label} has strides {tensor.stride()}, but the step was captured with {self.strides}: "
                f"give it with the captured layout"
            )


@dataclass(frozen=True, eq=False)
class Step:
    """A captured training step: the Graph, the FX graph it came from, and how one maps to the other.

    graph      what planners and the online runtime see
    module     functional joint graph (forward, loss, backward): placeholders, calls, one output node, and ``get_attr`` nodes
               only for the subgraphs of higher-order operators; ``module(*bind(step, inputs))`` is the flat list of results
    model      the user's own model; parameters and buffers are read from it when the step runs
    device     the device all tensors are on
    calls      calls[i] is the ``call_function`` node of graph.ops[i]
    value_of   Value id of every node that holds one tensor, and of view nodes that hold a list of views of one storage:
               placeholders, single-output calls, ``getitem`` of multi-output calls, views. A multi-output call itself is
               not in it.
    sources    one per placeholder, in order
    results    one per entry of the FX output, in order
    constants  tensors of the sources of kind "constant"
    form       of the inputs
    modes      train/eval flag of every module of the model, in the order of ``model.modules()``: the graph is for these

    Parameters and buffers with several names (tied weights) are one placeholder under their first name, with one gradient.
    """

    graph: Graph
    module: fx.GraphModule
    model: nn.Module
    device: torch.device
    calls: tuple[fx.Node, ...]
    value_of: Mapping[fx.Node, int]
    sources: tuple[Source, ...]
    results: tuple[Result, ...]
    constants: Mapping[str, Tensor] = field(repr=False)
    form: InputForm = field(repr=False)
    modes: tuple[bool, ...] = field(repr=False)

    def views(self, op: int) -> tuple[fx.Node, ...]:
        """The view nodes that the arguments of op ``op`` need, in an order in which they can be made."""
        return self._views(self.calls[op])

    def result_views(self) -> tuple[fx.Node, ...]:
        """The view nodes that the FX output needs, in an order in which they can be made."""
        return self._views(self.module.graph.output_node())

    def made_by(self, op: int) -> Mapping[int, fx.Node]:
        """For each Value that op ``op`` makes and somebody reads: the node that holds it (the call or a ``getitem``)."""
        call = self.calls[op]
        if call in self.value_of:
            return {self.value_of[call]: call} if call.users else {}
        return {self.value_of[item]: item for item in call.users if item.users}

    def with_costs(self, time_ns: Iterable[int], workspace_bytes: Iterable[int] | None = None) -> Step:
        """The same step with other op times (and workspaces, where given), one per op."""
        return dataclasses.replace(self, graph=self.graph.with_costs(time_ns, workspace_bytes))

    def _views(self, reader: fx.Node) -> tuple[fx.Node, ...]:
        needed = _views_behind(reader.all_input_nodes, self._bases)
        return tuple(sorted(needed, key=self._position.__getitem__))

    @functools.cached_property
    def _bases(self) -> frozenset[fx.Node]:
        made = {node for op in range(len(self.calls)) for node in self.made_by(op).values()}
        return frozenset(made.union(self.module.graph.find_nodes(op="placeholder")))

    @functools.cached_property
    def _position(self) -> Mapping[fx.Node, int]:
        return {node: at for at, node in enumerate(self.module.graph.nodes)}

    @functools.cached_property
    def _getters(self) -> tuple[Callable[[nn.Module], Tensor] | None, ...]:
        state = ("parameter", "buffer")
        return tuple(operator.attrgetter(s.name) if s.kind in state else None for s in self.sources)

    @functools.cached_property
    def _wanted(self) -> tuple[_Want, ...]:
        return tuple(_Want.of(node.meta["val"]) for node in self.module.graph.find_nodes(op="placeholder"))


def capture(
    model: nn.Module,
    inputs: Inputs | None = None,
    *,
    loss: Loss | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
) -> Step:
    """Trace one training step of ``model`` (forward, loss, backward) without running it and without a second copy of it.

    inputs    a tensor (one positional argument), a tuple or list (positional), a dict (keywords); shapes and whatever is not a
              tensor become part of the graph. None: the model's own example (``dummy_inputs``, ``example_input_array``)
    loss      None: the model returns its loss (a scalar, or ``.loss``, ``["loss"]``, or the first entry of a tuple). Otherwise
              ``loss(output, *targets)``: as many targets as it requires beside the output are the last positional inputs
              (for a dict: the entries of those names) and are not given to the model
    name      of the graph; the model's class by default
    device    where the model and the inputs are expected to be; by default where the model is
    autocast  dtype of an autocast region around model and loss; by default the one active around this call, if any

    Op times and workspaces of the graph are 0 (see ``graphs.costs``); Values are rounded up to 512 bytes on CUDA. Gradients
    are those of the parameters that require one; inputs get none. Random ops are kept even where nobody reads them: their
    draws move the generator.

    Raises CaptureError where the model, the loss or the inputs cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, not a {type(model).__name__}")
    name = type(model).__name__ if name is None else name
    state, where = _state(model, None if device is None else torch.device(device))
    inputs = _plain(_own_example(model, with_labels=loss is None) if inputs is None else inputs)
    leaves, form = _flatten(inputs)
    for label, leaf in zip(form.labels, leaves, strict=True):
        _check_input(label, leaf, where)

    body = _Body(model, loss, _splitter(loss, inputs))
    joint = _trace(name, body, state, leaves, form.spec, where, autocast)
    module = joint.module
    sources, tensors = _route_sources(joint, state, leaves, form)
    for node, tensor in _lift_constants(module):
        if tensor.requires_grad:
            raise CaptureError(
                f"{name} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but is no parameter of the "
                f"model; register it as an nn.Parameter or detach it"
            )
        sources.append(Source("constant", node.name))
        tensors.append(tensor)
    results = _route_results(name, joint, state, leaves, form)
    fuse_bernoulli(module.graph)
    _clean(module)
    _own_gradients(module, results, state)
    module.graph.lint()
    module.recompile()

    graph, calls, value_of = _number(name, module, sources, tensors, where)
    constants = {s.name: t for s, t in zip(sources, tensors, strict=True) if s.kind == "constant" and t is not None}
    modes = tuple(part.training for part in model.modules())
    return Step(graph, module, model, where, calls, value_of, tuple(sources), tuple(results), constants, form, modes)


def bind(step: Step, inputs: Inputs, tangent: Tensor | None = None) -> list[Tensor]:
    """The tensors of the placeholders of ``step.module``, in order: the model's own, the inputs, the tangent.

    inputs   in the form ``capture`` was given
    tangent  gradient of the loss; ones by default

    Raises InputError naming what differs from the captured step: shape, dtype, device, layout, an argument that is no tensor,
    a parameter frozen since, a module switched between training and evaluation.
    """
    leaves = _leaves_like(step.form, inputs)
    if tuple(part.training for part in step.model.modules()) != step.modes:
        raise InputError("a module was switched between training and evaluation after the step was captured; capture it again")
    bound: list[Tensor] = []
    for source, getter, want in zip(step.sources, step._getters, step._wanted, strict=True):
        if getter is not None:
            tensor = getter(step.model)
            if tensor.requires_grad != source.trainable:
                raise InputError(f"{source.name} was frozen or unfrozen after the step was captured; capture it again")
            tensor = tensor.detach()
        elif source.kind == "input":
            tensor = leaves[source.index]
            if tensor.requires_grad:
                raise InputError(f"{source.name} requires a gradient, but inputs get none; give it detached")
        elif source.kind == "constant":
            tensor = step.constants[source.name]
        elif tangent is None:
            tensor = torch.ones(want.shape, dtype=want.dtype, device=want.device)
        else:
            tensor = tangent
        want.check(source.name or source.kind, tensor)
        bound.append(tensor)
    return bound


# Inputs: their form, and which of them go to the loss.


def _plain(inputs: Inputs) -> Inputs:
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


def _flatten(inputs: Inputs) -> tuple[list[Any], InputForm]:
    """Flat leaves of the inputs, and their form."""
    pairs, spec = tree_flatten_with_path(inputs)
    leaves = [leaf for _, leaf in pairs]
    labels = tuple(f"inputs{keystr(path)}" for path, _ in pairs)
    names = tuple(inputs) if isinstance(inputs, dict) else None
    return leaves, InputForm(spec, labels, names, {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})


def _leaves_like(form: InputForm, inputs: Inputs) -> list[Any]:
    """Flat leaves of inputs that must have the captured form."""
    plain = _plain(inputs)
    if isinstance(plain, dict) and form.names is not None:
        if plain.keys() != set(form.names):
            raise InputError(f"the step was captured with the inputs {sorted(form.names)}, not {sorted(plain)}")
        plain = {key: plain[key] for key in form.names}
    leaves, spec = tree_flatten(plain)
    if spec != form.spec:
        raise InputError(f"the inputs have another form than the captured ones: {spec} instead of {form.spec}")
    for i, captured in form.fixed.items():
        if leaves[i] is not captured and (type(leaves[i]) is not type(captured) or leaves[i] != captured):
            raise InputError(f"{form.labels[i]} is {leaves[i]!r}, but the step was captured with {captured!r}; capture it again")
    return leaves


def _check_input(label: str, leaf: object, where: torch.device) -> None:
    if not isinstance(leaf, Tensor):
        if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return
        raise CaptureError(
            f"{label} is a {type(leaf).__name__}; inputs are tensors, numbers, text or None, in tuples, lists and dicts"
        )
    _check_tensor(label, leaf)
    if leaf.requires_grad:
        raise CaptureError(
            f"{label} requires a gradient, but only parameters get one; give it detached or make it a parameter of the model"
        )
    if leaf.device != where:
        raise CaptureError(f"{label} is on {leaf.device}, the model on {where}; move one of them")


def _check_tensor(label: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise CaptureError(f"{label} has no shape yet; run the model once before capturing it")
    if tensor.layout != torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        raise CaptureError(f"{label} is a {type(tensor).__name__} of layout {tensor.layout}; only plain dense tensors work")
    if tensor.device.type == "meta":
        raise CaptureError(f"{label} is on the meta device, which has no kernels to plan for; move it to cpu or cuda")
    if tensor.device.type not in ("cpu", "cuda"):
        raise CaptureError(f"{label} is on {tensor.device}; only cpu and cuda are supported")


def _own_example(model: nn.Module, *, with_labels: bool) -> Inputs:
    """The example inputs a model brings along, with labels added where a transformers model needs them to return a loss."""
    for attribute in ("example_input_array", "dummy_inputs"):
        example = getattr(model, attribute, None)
        if example is None:
            continue
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        leaves, spec = tree_flatten(_plain(example))
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


def _splitter(loss: Loss | None, inputs: Inputs) -> Callable[[Inputs], _Arguments]:
    """How inputs are shared out between the model and the loss."""
    count, names = (0, []) if loss is None else _targets(loss)
    if isinstance(inputs, dict):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise CaptureError(f"the loss requires {missing[0]!r}, which is not among the inputs {sorted(inputs)}")
        return lambda now: _Arguments((), {k: v for k, v in now.items() if k not in names}, (), {k: now[k] for k in names})
    if len(names) > count:
        raise CaptureError(f"the loss requires the keyword {names[-1]!r}: give the inputs as a dict")
    if isinstance(inputs, Tensor):
        if count:
            raise CaptureError(f"the loss requires {count} more argument(s) beside the output: give inputs=(..., target)")
        return lambda now: _Arguments((now,), {}, (), {})
    if count > len(inputs):
        raise CaptureError(f"the loss requires {count} target(s) beside the output, but there are only {len(inputs)} inputs")
    cut = len(inputs) - count
    return lambda now: _Arguments(tuple(now[:cut]), {}, tuple(now[cut:]), {})


def _targets(loss: Loss) -> tuple[int, list[str]]:
    """Arguments a loss requires beside the output: how many positional ones, and the names of all."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError) as error:
        raise CaptureError(f"cannot see which arguments the loss {loss!r} takes; wrap it in a function") from error
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise CaptureError("the loss takes no positional argument; its first one must be the output of the model")
    required = [p.name for p in positional[1:] if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return len(required), required + keywords


# The model: its state, and the function that is traced.


def _state(model: nn.Module, device: torch.device | None) -> tuple[dict[str, Tensor], torch.device]:
    """Distinct parameters and buffers under their first names, and the one device they are on."""
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise CaptureError("no CUDA device is available; capture on cpu")
    who = type(model).__name__
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not any(p.requires_grad for p in model.parameters()):
        raise CaptureError(f"no parameter of {who} requires a gradient, so there is nothing to train")
    for name, tensor in state.items():
        _check_tensor(name, tensor)
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"{name} has a gradient hook, which a captured step would not call; remove it")
    homes = {tensor.device: name for name, tensor in state.items()}
    if len(homes) > 1:
        places = ", ".join(f"{name} on {home}" for home, name in homes.items())
        raise CaptureError(f"{who} is spread over several devices ({places}); move it to one")
    where = next(iter(homes))
    if device is not None and (device.type != where.type or device.index not in (None, where.index)):
        raise CaptureError(f"{who} is on {where}, not on {device}; move it there first: model.to({str(device)!r})")
    return state, where


class _Body(nn.Module):
    """Model and loss in one module, so that parameters of the model that the loss also reads are swapped with it."""

    def __init__(self, model: nn.Module, loss: Loss | None, split: Callable[[Inputs], _Arguments]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.split = split

    def forward(self, inputs: Inputs) -> Tensor:
        given = self.split(inputs)
        output = self.model(*given.args, **given.kwargs)
        if self.loss is not None:
            output = self.loss(output, *given.targets, **given.named_targets)
        return _scalar(output, f"the loss {_called(self.loss)}" if self.loss else type(self.model).__name__)


@dataclass(frozen=True, slots=True)
class _Arguments:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    named_targets: dict[str, Any]


def _called(loss: object) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _scalar(output: Any, who: str) -> Tensor:
    """The loss in what a model or a loss function returned."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"{who} returns a {type(output).__name__} without a loss; give loss=, or the inputs (labels) with which it returns one"
        )
    if found.numel() != 1:
        raise CaptureError(f"{who} returns a tensor of shape {tuple(found.shape)}, but a loss is one number; give loss=")
    if not found.is_floating_point():
        raise CaptureError(f"{who} returns a loss of dtype {found.dtype}, which has no gradient")
    if not found.requires_grad:
        raise CaptureError(f"the loss that {who} returns does not depend on any parameter that requires a gradient")
    return found


def _region(where: torch.device, dtype: torch.dtype | None) -> tuple[bool, torch.dtype]:
    """Whether autocast is on around model and loss, and its dtype: as asked, else as around the caller."""
    if dtype is None:
        return torch.is_autocast_enabled(where.type), torch.get_autocast_dtype(where.type)
    return True, dtype


def _trace(
    name: str,
    body: _Body,
    state: Mapping[str, Tensor],
    leaves: list[Any],
    spec: TreeSpec,
    where: torch.device,
    dtype: torch.dtype | None,
) -> Joint:
    """Trace the body; the model is as before afterwards, whatever its forward assigns."""
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    enabled, dtype = _region(where, dtype)

    def run(state_now: list[Tensor], tensors_now: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for i, tensor in zip(slots, tensors_now, strict=True):
            filled[i] = tensor
        given = {f"model.{key}": tensor for key, tensor in zip(state, state_now, strict=True)}
        after = dict(given)
        # The backward stays outside of the region, as it does in a training loop.
        with torch.autocast(where.type, dtype=dtype, enabled=enabled):
            loss = torch.func.functional_call(body, after, (tree_unflatten(filled, spec),))
        for key, tensor in given.items():
            if after[key] is not tensor:
                _assigned(name, key.removeprefix("model."), tensor, after[key])
        return loss

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(where.type, enabled=False))
        stack.enter_context(_untouched(body, where))
        try:
            fakes = to_fake([*state.values(), *(leaves[i].detach() for i in slots)])
            return trace_joint(run, fakes[: len(state)], fakes[len(state) :])
        except CaptureError:
            raise
        except DATA_DEPENDENT as error:
            raise CaptureError(
                f"{name} branches on data, or has shapes that depend on it ({_first_line(error)}); rewrite that part with "
                f"torch.where or masks of fixed shape"
            ) from error
        except Exception as error:
            raise CaptureError(f"{name} cannot be traced: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _assigned(name: str, key: str, before: Tensor, after: Tensor) -> None:
    """A forward that assigns a buffer anew means the same as one that writes into it."""
    if (
        isinstance(before, nn.Parameter)
        or not isinstance(after, Tensor)
        or (after.shape, after.dtype) != (before.shape, before.dtype)
    ):
        raise CaptureError(f"{name} replaces {key} in its forward by something else; write into it in place")
    with torch.no_grad():
        before.copy_(after)


@contextlib.contextmanager
def _untouched(model: nn.Module, where: torch.device) -> Iterator[None]:
    """Undo what a traced forward leaves behind: attributes of modules, and draws from the random generators."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    held = [
        (box, list(box.items()) if isinstance(box, dict) else list(box))
        for _, attributes in saved
        for box in attributes.values()
        if isinstance(box, dict | list | set)
    ]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, attributes in saved:
            now = vars(module)
            for key in now.keys() - attributes.keys():
                del now[key]
            now.update(attributes)
        for box, content in held:
            box.clear()
            box.extend(content) if isinstance(box, list) else box.update(content)


# The traced graph: made plain, then numbered.


def _lift_constants(module: fx.GraphModule) -> list[tuple[fx.Node, Tensor]]:
    """Turn the ``get_attr`` nodes of tensors into placeholders behind the others; the new nodes and their tensors."""
    lifted: dict[str, tuple[fx.Node, Tensor]] = {}
    body = next(node for node in module.graph.nodes if node.op != "placeholder")
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = operator.attrgetter(node.target)(module)
        if not isinstance(tensor, Tensor):
            continue
        if node.target not in lifted:
            with module.graph.inserting_before(body):
                placeholder = module.graph.placeholder(node.target.replace(".", "_"))
            placeholder.meta["val"] = node.meta["val"]
            lifted[node.target] = placeholder, tensor
        node.replace_all_uses_with(lifted[node.target][0])
        module.graph.erase_node(node)
    for target in lifted:
        delattr(module, target)
    return list(lifted.values())


def _route_sources(
    joint: Joint, state: Mapping[str, Tensor], leaves: Sequence[Any], form: InputForm
) -> tuple[list[Source], list[Tensor | None]]:
    """What the placeholders are, and their real tensors where there are any."""
    names = list(state)
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    sources: list[Source] = []
    tensors: list[Tensor | None] = []
    for kind, i in joint.sources:
        if kind == "state":
            tensor = state[names[i]]
            is_parameter = isinstance(tensor, nn.Parameter)
            sources.append(Source("parameter" if is_parameter else "buffer", names[i], trainable=tensor.requires_grad))
            tensors.append(tensor)
        elif kind == "input":
            sources.append(Source("input", form.labels[slots[i]], slots[i]))
            tensors.append(leaves[slots[i]])
        else:
            sources.append(Source("tangent"))
            tensors.append(None)
    return sources, tensors


def _route_results(name: str, joint: Joint, state: Mapping[str, Tensor], leaves: Sequence[Any], form: InputForm) -> list[Result]:
    """What the outputs are; those that are nothing leave the graph."""
    names = list(state)
    output = joint.module.graph.output_node()
    results: list[Result] = []
    nodes: list[fx.Node] = []
    for node, found in zip(output.args[0], joint.results, strict=True):
        if node is None or found is None:
            continue
        kind, i = found
        if kind == "input":
            label = [label for label, leaf in zip(form.labels, leaves, strict=True) if isinstance(leaf, Tensor)][i]
            raise CaptureError(f"{name} changes {label} in place; let it work on a copy")
        if kind == "state" and isinstance(state[names[i]], nn.Parameter):
            raise CaptureError(
                f"{name} changes its parameter {names[i]} in place during the forward; do that outside of the step"
            )
        results.append(
            {"loss": Result("loss"), "gradient": Result("gradient", names[i]), "state": Result("buffer", names[i])}[kind]
        )
        nodes.append(node)
    output.args = (tuple(nodes),)
    output.meta.pop("desc", None)
    return results


def _tensors(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; a call of a higher-order operator does where its subgraph does."""
    if not isinstance(node.target, OpOverload):
        subgraphs = (operator.attrgetter(n.target)(n.graph.owning_module) for n in node.all_input_nodes if n.op == "get_attr")
        return any(is_random(n) for sub in subgraphs for n in sub.graph.find_nodes(op="call_function"))
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":  # attention carries the tag even where nothing is dropped
            given = node.args[i] if len(node.args) > i else node.kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


def _is_effect(node: fx.Node) -> bool:
    """Whether a call acts on the outside world: an operator that returns no tensor."""
    return is_operator(node.target) and not _tensors(node)


def _clean(module: fx.GraphModule) -> None:
    """Remove what nobody reads, profiler marks, and second ``getitem`` nodes of one entry."""
    graph = module.graph
    for node in reversed(graph.nodes):
        profiling = isinstance(node.target, OpOverload) and node.target.namespace == "profiler"
        acts = node.op == "call_function" and not profiling and (is_random(node) or _is_effect(node))
        if node.op in ("get_attr", "call_function") and not node.users and not acts:
            graph.erase_node(node)
    items: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        value = node.meta["val"]
        if isinstance(value, Tensor):  # some operators return one tensor twice
            what = (node.args[0], storage_key(value), value.shape, value.stride(), value.storage_offset())
        else:
            what = node.args
        first = items.setdefault(what, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two strides place the elements alike: strides of dimensions of one element do not count."""
    return 0 in shape or all(a == b for n, a, b in zip(shape, strides, others, strict=True) if n != 1)


def _own_gradients(module: fx.GraphModule, results: Sequence[Result], state: Mapping[str, Tensor]) -> None:
    """Give each parameter a gradient of its own where it would share elements with another result or a placeholder.

    Autograd makes the same copies when it fills ``.grad``, and for gradients laid out otherwise than their parameter.
    """
    output = module.graph.output_node()
    resident = {storage_key(t) for node in module.graph.find_nodes(op="placeholder") for t in _tensors(node)}
    taken: dict[int, list[tuple[int, int]]] = {}
    nodes = list(output.args[0])
    for at, (node, result) in enumerate(zip(nodes, results, strict=True)):
        value: Tensor = node.meta["val"]
        key = storage_key(value)
        start = value.storage_offset()
        stop = start + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        if result.kind == "gradient":
            parameter = state[result.name]
            shared = key in resident or any(start < b and a < stop for a, b in taken.get(key, ()))
            if shared or not _same_layout(value.shape, value.stride(), parameter.stride()):
                nodes[at] = _copied(node, parameter)
                continue
        taken.setdefault(key, []).append((start, stop))
    output.args = (tuple(nodes),)


def _copied(node: fx.Node, like: Tensor) -> fx.Node:
    """A new node after ``node`` (at the end, where that is a placeholder): its copy in the layout of ``like``."""
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    else:
        layout = torch.contiguous_format
    clone = torch.ops.aten.clone.default
    graph = node.graph
    with graph.inserting_before(graph.output_node() if node.op == "placeholder" else node.next):
        copy = graph.call_function(clone, (node,), {"memory_format": layout})
    with torch.no_grad():
        copy.meta = {"val": clone(node.meta["val"], memory_format=layout), "partitioner_tag": "is_backward"}
    return copy


def _number(
    name: str, module: fx.GraphModule, sources: Sequence[Source], tensors: Sequence[Tensor | None], where: torch.device
) -> tuple[Graph, tuple[fx.Node, ...], dict[fx.Node, int]]:
    """Make storages into Values and calls that allocate into Ops."""
    values: list[Value] = []
    value_of: dict[fx.Node, int] = {}
    of_storage: dict[int, int] = {}  # by key of the fake storage

    def new_value(label: str, tensor: Tensor) -> int:
        size = storage_bytes(tensor)
        if tensor.device != where:  # a number on the host beside a CUDA step
            size = 0
        elif where.type == "cuda":
            size = -(-size // CUDA_GRANULE_BYTES) * CUDA_GRANULE_BYTES
        values.append(Value(label, size))
        return len(values) - 1

    shared: dict[int, int] = {}  # by key of the real storage: placeholders that alias one count once
    for node, source, tensor in zip(module.graph.find_nodes(op="placeholder"), sources, tensors, strict=True):
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            raise CaptureError(f"{name}: the traced graph has an input that is no tensor ({fake!r}): shapes must be fixed")
        if tensor is None:
            value = new_value(source.kind, fake)
        else:
            key = storage_key(tensor)
            if key not in shared:
                shared[key] = new_value(source.name, tensor)
            value = shared[key]
        value_of[node] = of_storage[storage_key(fake)] = value
    resident = frozenset(value_of.values())

    reads: dict[fx.Node, tuple[int, ...]] = {node: (value,) for node, value in value_of.items()}
    ops: list[Op] = []
    calls: list[fx.Node] = []
    of_call: dict[fx.Node, list[int | None]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if source in of_call:  # one of several outputs
            value = of_call[source][node.args[1]]
            if value is None:
                raise CaptureError(f"{name}: output {node.args[1]} of {source.name} is no tensor of its own")
            value_of[node] = value
            reads[node] = (value,)
            continue
        inputs = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in reads.get(n, ())))
        made = _tensors(node)
        keys = dict.fromkeys(storage_key(t) for t in made)
        old = [of_storage[key] for key in keys if key in of_storage]
        if made and len(old) == len(keys) and set(old) <= set(inputs):  # a view, or a list of views
            if len(keys) > 1 or not (is_operator(node.target) or node.target is operator.getitem):
                raise CaptureError(f"{name}: {node.name} ({node.target}) makes views of several storages at once")
            value_of[node] = old[0]
            reads[node] = inputs
            continue
        _check_call(name, node, made, old)
        several = not isinstance(node.meta["val"], Tensor)
        outputs: list[int | None] = []
        for entry in node.meta["val"] if several and made else made:
            if not isinstance(entry, Tensor):
                outputs.append(None)
                continue
            of_storage[storage_key(entry)] = new_value(f"{node.name}.{len(outputs)}" if several else node.name, entry)
            outputs.append(of_storage[storage_key(entry)])
        if several:
            of_call[node] = outputs
        else:
            value_of[node] = of_storage[storage_key(made[0])]
            reads[node] = (value_of[node],)
        calls.append(node)
        ops.append(
            Op(
                node.name,
                inputs,
                tuple(v for v in outputs if v is not None),
                time_ns=0,
                kind=_kind(node),
                random=is_random(node),
                effect=_is_effect(node),
                backward=node.meta.get("partitioner_tag") == "is_backward",
            )
        )
    results = frozenset(value_of[node] for node in module.graph.output_node().args[0])
    label = "cpu" if where.type == "cpu" else torch.cuda.get_device_name(where)
    return Graph(name, tuple(ops), tuple(values), resident, results, label), tuple(calls), value_of


def _check_call(name: str, node: fx.Node, made: Sequence[Tensor], old: Sequence[int]) -> None:
    """Refuse calls that the Graph has no words for."""
    what = f"{name}: {node.name} ({node.target})"
    if not is_operator(node.target):
        raise CaptureError(f"{what} is not a torch operator; the step cannot contain it")
    if not made and node.users:
        raise CaptureError(f"{what} returns no tensor, but others read its result; the step cannot contain it")
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        raise CaptureError(f"{what} changes a tensor in place; wrap it in a custom operator that declares what it changes")
    if old:
        raise CaptureError(f"{what} returns views of its inputs together with new tensors; the step cannot contain it")
    if len({storage_key(t) for t in made}) != len(made):
        raise CaptureError(f"{what} returns several views of one new tensor; the step cannot contain it")


def _kind(node: fx.Node) -> str:
    """Operator name without its overload: "aten.mm"."""
    return str(node.target.overloadpacket) if isinstance(node.target, OpOverload) else str(node.target)


def _views_behind(nodes: Iterable[fx.Node], bases: frozenset[fx.Node]) -> set[fx.Node]:
    """All call nodes from which ``nodes`` are made, ``nodes`` included, up to and without ``bases``."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in bases and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
