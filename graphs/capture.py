"""A torch training step becomes a Graph, and keeps the FX graph it came from. [torch]"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from graphs.errors import CaptureError, InputError
from graphs.fingerprint import Fingerprint
from graphs.inputs import InputForm, Inputs, Loss, check_input, flatten, leaves_like, own_example, plain, splitter
from graphs.ir import Graph
from graphs.rewriting.nodes import outputs_of, tensors_of
from graphs.rewriting.numbering import Numbering
from graphs.rewriting.rewrites import (
    lift_constants,
    own_gradients,
    remove_dead,
)
from graphs.rewriting.settling import settle
from graphs.torch_private.joint import Joint
from graphs.torch_private.names import ONE_TRACE_AT_A_TIME
from graphs.torch_private.running import refusal_to_capture
from graphs.torch_private.tensors import SameTensors, in_forward_mode, is_functorch_wrapped, memory_of, storage_key
from graphs.tracing import Body, device_of, region_of, state_of, trace, written_late

__all__ = ["InputForm", "Inputs", "Loss", "Result", "Source", "Step", "bind", "capture", "numbered"]


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
            raise InputError(f"{label} is of type {type(tensor).__name__}, but the step was captured with a tensor")
        if tensor.shape != self.shape:
            raise InputError(f"{label} has shape {tuple(tensor.shape)}, but the step was captured with {tuple(self.shape)}")
        if tensor.dtype != self.dtype:
            raise InputError(f"{label} has dtype {tensor.dtype}, but the step was captured with {self.dtype}")
        if tensor.device != self.device:
            raise InputError(f"{label} is on {tensor.device}, but the step was captured on {self.device}")
        if tensor.stride() != self.strides and not _same_layout(self.shape, tensor.stride(), self.strides):
            like = torch.empty_strided(self.shape, self.strides, device="meta")
            raise InputError(
                f"{label} has strides {tensor.stride()}, but the step was captured with {self.strides}: "
                f"give it with the captured layout{', .contiguous()' if like.is_contiguous() else ''}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A captured training step: the Graph, the FX graph it came from, and how one maps to the other. It belongs to its model, so
    it can be neither copied nor pickled (InputError).

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
    body       model and loss as they were traced
    fingerprint  of both: notices what was edited since
    autocast   dtype of the autocast region around both; None without one

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
    constants: Mapping[str, Tensor]
    form: InputForm
    modes: tuple[bool, ...]
    body: Body
    fingerprint: Fingerprint
    autocast: torch.dtype | None

    def __repr__(self) -> str:
        return f"Step({type(self.model).__name__} on {self.device}, {self.graph!r})"

    def eager(self, inputs: Inputs) -> Tensor:
        """The loss as plain PyTorch computes it, ready for ``backward()``: what every executor is held against."""
        with contextlib.nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast):
            loss: Tensor = self.body(plain(inputs))
        return loss

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            f"the captured step of {self.graph.name} belongs to its model and can be neither copied nor pickled; capture the "
            f"copy, or save the plan (plan.save) and load it for a step captured anew"
        )

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
    def _places(self) -> tuple[tuple[Mapping[str, Tensor], str] | None, ...]:
        """For each source, where the model holds it: a dict of one of its modules, and the key."""

        def place(source: Source) -> tuple[Mapping[str, Tensor], str] | None:
            if source.kind not in ("parameter", "buffer"):
                return None
            path, _, key = source.name.rpartition(".")
            part = self.model.get_submodule(path)
            return cast(Any, part._parameters if source.kind == "parameter" else part._buffers), key

        return tuple(map(place, self.sources))

    @functools.cached_property
    def _given(self) -> tuple[tuple[int, Source], ...]:
        """The sources that are not the model's, with their indices."""
        return tuple((i, source) for i, source in enumerate(self.sources) if source.kind not in ("parameter", "buffer"))

    @functools.cached_property
    def _like_before(self) -> SameTensors:
        """What was bound last and found right."""
        return SameTensors()

    @functools.cached_property
    def _shared(self) -> tuple[tuple[int, int], ...]:
        """Pairs of placeholders whose tensors were one storage and count once."""
        first: dict[int, int] = {}
        values = [self.value_of[node] for node in self.module.graph.find_nodes(op="placeholder")]
        return tuple((first[v], i) for i, v in enumerate(values) if first.setdefault(v, i) != i)

    @functools.cached_property
    def _written(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The placeholders of buffers that change, and of what else may lie there (no parameters), with their Values."""
        new = {result.name for result in self.results if result.kind == "buffer"}
        values = [self.value_of[node] for node in self.module.graph.find_nodes(op="placeholder")]
        written, others = [], []
        for i, (source, value) in enumerate(zip(self.sources, values, strict=True)):
            if source.kind == "buffer" and source.name in new:
                written.append((i, value))
            elif source.kind in ("buffer", "input", "constant"):
                others.append((i, value))
        return tuple(written), tuple(others)

    @functools.cached_property
    def _wanted(self) -> tuple[_Want, ...]:
        return tuple(_Want.of(node.meta["val"]) for node in self.module.graph.find_nodes(op="placeholder"))


def _same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two strides place the elements alike: strides of dimensions of one element do not count."""
    return 0 in shape or all(a == b for n, a, b in zip(shape, strides, others, strict=True) if n != 1)


def capture(
    model: nn.Module,
    inputs: Inputs | None = None,
    *,
    loss: Loss | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    gradient_hooks: bool = False,
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
    gradient_hooks  allow hooks of parameters: no part of the step, they are called by autograd where it runs the step

    Op times and workspaces of the graph are 0 (see ``graphs.costs``); Values are rounded up to 512 bytes on CUDA. Gradients
    are those of the parameters that require one; inputs get none. Random ops are kept even where nobody reads them: their
    draws move the generator.

    Raises CaptureError where the model, the loss or the inputs cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, not a {type(model).__name__}")
    if (why := refusal_to_capture()) is not None:
        raise CaptureError(f"{type(model).__name__} cannot be captured here: {why}")
    name = type(model).__name__ if name is None else name
    state = state_of(model, loss, gradient_hooks=gradient_hooks)
    where = device_of(model, state, device)
    given = plain(own_example(model, with_labels=loss is None) if inputs is None else inputs)
    leaves, form = flatten(given)
    for label, leaf in zip(form.labels, leaves, strict=True):
        check_input(label, leaf, where)
    autocast = region_of(autocast, where)

    body = Body(model, loss, splitter(loss, given))
    with ONE_TRACE_AT_A_TIME:
        joint, watch = trace(name, body, state, leaves, form.spec, where, autocast)
    graph = joint.module.graph
    sources, tensors = _sources(joint, state, leaves, form)
    for node, tensor in lift_constants(joint.module):
        if tensor.requires_grad:
            raise CaptureError(
                f"{name} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but is no parameter of the "
                f"model; register it as an nn.Parameter or detach it"
            )
        sources.append(Source("constant", node.name))
        tensors.append(tensor)
    results = _results(name, joint, state, leaves, form)
    _refuse_late_writes(name, graph, sources, results)
    _refuse_shared_constants(name, sources, tensors, results)

    remove_dead(graph)
    settle(name, graph)
    gradient_at = {result.name: i for i, result in enumerate(results) if result.kind == "gradient"}
    own_gradients(graph, {i: state[parameter] for parameter, i in gradient_at.items()})
    graph.lint()
    joint.module.recompile()

    numbering = Numbering(name, where)
    for node, source, bound in zip(graph.find_nodes(op="placeholder"), sources, tensors, strict=True):
        numbering.resident(node, source.name or source.kind, bound, constant=source.kind == "constant")
    for node in graph.nodes:
        if node.op == "call_function":
            numbering.call(node)
    return Step(
        numbering.graph(outputs_of(graph)),
        joint.module,
        model,
        where,
        tuple(numbering.calls),
        numbering.value_of,
        tuple(sources),
        tuple(results),
        {s.name: t for s, t in zip(sources, tensors, strict=True) if s.kind == "constant" and t is not None},
        form,
        tuple(part.training for part in model.modules()),
        body,
        Fingerprint(body, watch.reads, watch.changed),
        autocast,
    )


def numbered(name: str, module: fx.GraphModule, device: torch.device) -> Step:
    """A step made of a functional joint graph that somebody else traced: it can be priced, planned and lowered, but neither bound
    nor run as plain PyTorch, and its ``results`` are empty.

    Entries of the output node that are no tensors made here (None, numbers) are left as they are. Raises CaptureError where the
    graph contains what a Graph has no words for.
    """
    graph = module.graph
    remove_dead(graph)
    settle(name, graph)
    graph.lint()
    module.recompile()
    numbering = Numbering(name, device)
    sources = []
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        numbering.resident(node, node.name, node.meta["val"])
        sources.append(Source("input", node.name, i))
    for node in graph.nodes:
        if node.op == "call_function":
            numbering.call(node)
    body = Body(module, None, splitter(None, ()))
    return Step(
        numbering.graph([node for node in outputs_of(graph) if node in numbering.value_of]),
        module,
        module,
        device,
        tuple(numbering.calls),
        numbering.value_of,
        tuple(sources),
        (),
        {},
        flatten(())[1],
        (),
        body,
        Fingerprint(body, {}, set()),
        None,
    )


def bind(step: Step, inputs: Inputs, tangent: Tensor | None = None, *, detached: bool = True) -> list[Tensor]:
    """The tensors of the placeholders of ``step.module``, in order: the model's own, the inputs, the tangent.

    inputs    in the form ``capture`` was given
    tangent   gradient of the loss; ones by default
    detached  parameters and buffers come as tensors without gradient; otherwise as what the model holds

    Raises InputError naming what differs from the captured step: shape, dtype, device, layout, an argument that is no tensor, or
    one that a transform has wrapped (torch.func) or given a tangent, a parameter frozen since, tensors that shared their memory
    then, something in the memory of a buffer that changes, and what ``step.fingerprint`` notices: modules replaced or switched
    between training and evaluation, hooks, attributes.
    """
    leaves = leaves_like(step.form, inputs)
    step.fingerprint.check()
    places = step._places
    bound: list[Any] = [None if place is None else place[0].get(place[1]) for place in places]
    for i, source in step._given:
        if source.kind == "input":
            bound[i] = leaves[source.index]
        elif source.kind == "constant":
            bound[i] = step.constants[source.name]
        elif tangent is None:
            want = step._wanted[i]
            bound[i] = torch.ones(want.shape, dtype=want.dtype, device=want.device)
        else:
            bound[i] = tangent
    # Most calls are like the one before, which one quick look tells; one by one they are only looked at to say what differs.
    if not step._like_before.match(bound):
        _check_one_by_one(step, bound)
        step._like_before.remember(bound)
    if in_forward_mode():
        _check_tangents(step, bound)
    if detached:
        bound = [tensor if place is None else tensor.detach() for place, tensor in zip(places, bound, strict=True)]
    for i, j in step._shared:
        if storage_key(bound[i]) != storage_key(bound[j]):
            names = f"{step.sources[i].name} and {step.sources[j].name}"
            raise InputError(f"{names} shared their memory when the step was captured, and now do not; capture it again")
    if step._written[0]:
        _check_apart(step, bound)
    return bound


def _check_apart(step: Step, bound: list[Tensor]) -> None:
    """Refuse that something lies in the memory of a buffer that changes, where it did not when the step was captured."""
    written, others = step._written
    changing: dict[int, tuple[int, int]] = {}
    for i, value in written:
        j, known = changing.setdefault(storage_key(bound[i]), (i, value))
        if known != value:
            raise InputError(_apart(step, j, i))
    for i, value in others:
        j, known = changing.get(storage_key(bound[i]), (i, value))
        if known != value:
            raise InputError(_apart(step, j, i))


def _apart(step: Step, buffer: int, other: int) -> str:
    names = [step.sources[i].name for i in (buffer, other)]
    return (
        f"{names[0]}, which the step changes, shares its memory with {names[1]}, but did not when the step was captured; give "
        f"each its own"
    )


def _check_one_by_one(step: Step, bound: list[Any]) -> None:
    """Refuse what differs from the captured step in a way the graph depends on."""
    for source, want, tensor in zip(step.sources, step._wanted, bound, strict=True):
        if isinstance(tensor, Tensor) and is_functorch_wrapped(tensor):
            raise InputError(
                f"{source.name or source.kind} belongs to a transform of torch.func (grad, jvp, vmap), in which a captured step "
                f"takes no part; transform the model itself"
            )
        if source.kind in ("parameter", "buffer"):
            if tensor is None:
                raise InputError(f"{source.name} was removed after the step was captured; capture it again")
            if tensor.requires_grad != source.trainable:
                raise InputError(f"{source.name} was frozen or unfrozen after the step was captured; capture it again")
        elif source.kind == "input" and isinstance(tensor, Tensor) and tensor.requires_grad:
            raise InputError(f"{source.name} requires a gradient, but inputs get none; give it detached")
        want.check(source.name or source.kind, tensor)


def _check_tangents(step: Step, bound: list[Tensor]) -> None:
    for source, tensor in zip(step.sources, bound, strict=True):
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise InputError(
                f"{source.name or source.kind} has a tangent (torch.autograd.forward_ad), which a captured step would drop; call "
                f"the model itself for forward-mode derivatives"
            )


def _sources(
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


def _results(name: str, joint: Joint, state: Mapping[str, Tensor], leaves: Sequence[Any], form: InputForm) -> list[Result]:
    """What the outputs are; those that are nothing leave the graph."""
    names = list(state)
    results: list[Result] = []
    nodes: list[fx.Node] = []
    for node, found in zip(outputs_of(joint.module.graph), joint.results, strict=True):
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
        if kind == "loss":
            results.append(Result("loss"))
        else:
            results.append(Result("gradient" if kind == "gradient" else "buffer", names[i]))
        nodes.append(node)
    if {"loss", "gradient"} - {result.kind for result in results}:
        given = {storage_key(t) for n in joint.module.graph.find_nodes(op="placeholder") for t in tensors_of(n)}
        at = next((n for n, found in zip(nodes, results, strict=True) if found.kind == "loss"), None)
        if at is None or any(storage_key(t) in given for t in tensors_of(at)):
            raise CaptureError(f"the loss of {name} is one of its parameters, or a view of one: there is nothing to compute")
        raise CaptureError(f"the loss of {name} depends on none of its parameters that require a gradient")
    joint.module.graph.output_node().args = (tuple(nodes),)
    return results


def _refuse_late_writes(name: str, graph: fx.Graph, sources: Sequence[Source], results: Sequence[Result]) -> None:
    """Refuse a backward that writes to what was there before the step. Where it alone does, that is a call that nobody reads;
    where the forward does too, the new content is made in the backward."""
    places = dict(zip(graph.find_nodes(op="placeholder"), sources, strict=True))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in places:
            raise CaptureError(written_late(name, places[node.args[0]].name))
    for node, result in zip(outputs_of(graph), results, strict=True):
        if result.kind == "buffer" and node.meta.get("partitioner_tag") == "is_backward":
            raise CaptureError(written_late(name, result.name))


def _refuse_shared_constants(
    name: str, sources: Sequence[Source], tensors: Sequence[Tensor | None], results: Sequence[Result]
) -> None:
    """Refuse that a tensor the tracer knows nothing of shows what a buffer holds that changes: a step would read the old content
    where the forward reads the new one. Parts of one memory that do not overlap may be used."""
    new = {result.name for result in results if result.kind == "buffer"}
    found = [(source, memory_of(tensor)) for source, tensor in zip(sources, tensors, strict=True) if tensor is not None]
    for buffer, lies in found:
        for other, reads in found if buffer.kind == "buffer" and buffer.name in new else ():
            if other.kind == "constant" and max(lies.start, reads.start) < min(lies.stop, reads.stop):
                raise CaptureError(
                    f"{name} changes its buffer {buffer.name} in its forward, and reads a tensor in the same memory that is "
                    f"neither parameter nor buffer; take that from the buffer in the forward"
                )


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
