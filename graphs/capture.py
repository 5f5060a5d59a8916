"""A torch training step becomes a Graph, and keeps the FX graph it came from. [torch]"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from graphs.errors import CaptureError, InputError
from graphs.ir import Graph
from graphs.rewriting.nodes import outputs_of, read_by_place, storages_of, tensors_of
from graphs.rewriting.numbering import Numbering
from graphs.rewriting.rewrites import lift_constants, own_gradients, remove_dead
from graphs.rewriting.settling import settle
from graphs.torch_private.joint import Joint
from graphs.torch_private.names import ONE_TRACE_AT_A_TIME
from graphs.torch_private.running import refusal_to_capture
from graphs.torch_private.tensors import memory_of, storage_key
from graphs.tracing.answers import answer_and_place, asked_in
from graphs.tracing.binding import Binding, Source
from graphs.tracing.body import Body, device_of, region_of, state_of
from graphs.tracing.inputs import (
    InputForm,
    Inputs,
    Loss,
    check_input,
    flatten,
    given_twice,
    leaves_like,
    own_example,
    plain,
    splitter,
)
from graphs.tracing.memoryless import as_on_cpu, check_constant, explained, is_on_meta, runs
from graphs.tracing.refusals import written_late
from graphs.tracing.trace import trace
from graphs.watching.fingerprint import Fingerprint
from graphs.watching.leftovers import Leftover
from graphs.watching.surroundings import Surroundings

__all__ = ["InputForm", "Inputs", "Loss", "Result", "Source", "Step", "bind", "capture", "numbered"]


@dataclass(frozen=True, slots=True)
class Result:
    """What one entry of the FX output node is.

    kind   "loss", "gradient" of the parameter (or buffer) ``name``, "buffer": new content of the buffer ``name``, or of a
           parameter that has no gradient
    """

    kind: Literal["loss", "gradient", "buffer"]
    name: str = ""


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
    leftovers  where plain PyTorch's forward leaves tensors beside the loss
    askers     Python modules that the forward passes through which ask whether gradients are recorded: without, they may do
               something else than the graph does

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
    leftovers: tuple[Leftover, ...] = ()
    askers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Step({type(self.model).__name__} on {self.device}, {self.graph!r})"

    def eager(self, inputs: Inputs) -> Tensor:
        """The loss as plain PyTorch computes it, ready for ``backward()``: what every executor is held against."""
        self.check_runs()
        with contextlib.nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast):
            loss: Tensor = self.body(plain(inputs))
        return loss

    def check_runs(self) -> None:
        """Raises InputError where the model has no data, as on the meta device."""
        if not self._runs:
            raise InputError(
                f"the step of {self.graph.name} was captured from a model without data (on the meta device, or of fake tensors): "
                f"it can be planned, but not run; capture the model again where it has its weights"
            )

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

    def with_costs(self, time_ns: Iterable[int], workspace_bytes: Iterable[int] | None = None, *, costs: str = "given") -> Step:
        """The same step with other op times (and workspaces, where given), one per op; ``costs`` says where they come from."""
        return dataclasses.replace(self, graph=self.graph.with_costs(time_ns, workspace_bytes, costs=costs))

    def _views(self, reader: fx.Node) -> tuple[fx.Node, ...]:
        needed = _calls_behind(reader.all_input_nodes, self._bases)
        return tuple(sorted(needed, key=self._position.__getitem__))

    @property
    def answers(self) -> tuple[tuple[bool | tuple[int, ...], str], ...]:
        """What the model is told that asks its data, and where it asks; a run that needs another answer raises BranchChanged."""
        return tuple(answer_and_place(node) for node in asked_in(self.module.graph))

    @property
    def reformatted(self) -> str | None:
        """What may be wrong where a call fails whose tensors were bound last; None: nothing that is known."""
        return self._binding.reformatted

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers of the model by name, and the parameters that its forward changes."""
        changed = {name: operator.attrgetter(name)(self.model) for name in _changed(self.results)}
        return {**dict(self.model.named_buffers()), **changed}

    @functools.cached_property
    def _runs(self) -> bool:
        return runs(self.model)

    @functools.cached_property
    def _bases(self) -> frozenset[fx.Node]:
        made = {node for op in range(len(self.calls)) for node in self.made_by(op).values()}
        return frozenset(made.union(self.module.graph.find_nodes(op="placeholder")))

    @functools.cached_property
    def _position(self) -> Mapping[fx.Node, int]:
        return {node: at for at, node in enumerate(self.module.graph.nodes)}

    @functools.cached_property
    def _binding(self) -> Binding:
        placeholders = self.module.graph.find_nodes(op="placeholder")
        values = [self.value_of[node] for node in placeholders]
        wanted = [node.meta["val"] for node in placeholders]
        fixed = {i: int(wanted[i].storage_offset()) for i in read_by_place(self.module.graph)}
        return Binding(self.model, self.sources, self.constants, wanted, values, _changed(self.results), fixed)


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
    device    where the model and the inputs are expected to be; by default where the model is. A model on the meta device is
              captured as if it (a copy of it) and inputs on that device were on the CPU: its step can be planned, but not run
    autocast  dtype of an autocast region around model and loss; by default the one active around this call, if any
    gradient_hooks  allow hooks of parameters: no part of the step, they are called by autograd where it runs the step

    Op times and workspaces of the graph are 0 (see ``graphs.costs``); Values are rounded up to 512 bytes on CUDA. Gradients
    are those of the parameters (and buffers) that require one; inputs get none. Random ops are kept even where nobody reads
    them: their draws move the generator.

    Other threads should not draw at random meanwhile: that is taken for the model's, or comes twice.

    A model may branch on what depends on no input. Where it asks its data for a truth value, it is told that numbers are finite
    and what lets a check pass (an assertion, a condition before ``raise``, validation of distributions); of integers and truth
    values among inputs and buffers, what holds for the example, and likewise a few integers (sizes). Each such question is an op
    of the step, with the outside effect that a run with another answer ends there (BranchChanged), as if it had not begun.

    Raises CaptureError where the model, the loss or the inputs cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, not a {type(model).__name__}")
    if (why := refusal_to_capture()) is not None:
        raise CaptureError(f"{type(model).__name__} cannot be captured here: {why}")
    name = type(model).__name__ if name is None else name
    beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_on_meta(model):
        model, loss, inputs = as_on_cpu(model, loss, inputs, device, gradient_hooks=gradient_hooks)
        device, beside = None if str(device) == "meta" else device, explained()
    state = state_of(model, loss, gradient_hooks=gradient_hooks)
    where = device_of(model, state, device)
    given = plain(own_example(model, with_labels=loss is None) if inputs is None else inputs)
    leaves, form = flatten(given)
    for label, leaf in zip(form.labels, leaves, strict=True):
        check_input(label, leaf, where)
    autocast = region_of(autocast, where)

    body = Body(model, loss, splitter(loss, given))
    surroundings = Surroundings(model, loss)
    with ONE_TRACE_AT_A_TIME, beside:
        joint, watch, leftovers, alone = trace(name, body, state, leaves, form.spec, where, autocast)
    form = replace(form, alone=alone)
    if (why := given_twice(form, leaves)) is not None:
        raise CaptureError(f"{name}: {why}")
    graph = joint.module.graph
    names = list(state)
    changed = {names[i] for kind, i in filter(None, joint.results) if kind == "state"}
    # A parameter that is registered as a buffer is one, and so is one that the forward changes: that of a teacher that follows
    # the model, or of a layer that bounds its weights.
    parameters = {key for key, _ in model.named_parameters() if key not in changed}
    sources, tensors = _sources(joint, state, parameters, leaves, form)
    for node, tensor in lift_constants(joint.module):
        check_constant(name, tensor)
        sources.append(Source("constant", node.name))
        tensors.append(tensor)
    surroundings.settle(
        (tensor for source, tensor in zip(sources, tensors, strict=True) if source.kind == "constant" and tensor is not None),
        leftovers,
    )
    results = _results(name, joint, state, leaves, form)
    _refuse_late_writes(name, graph, sources, results)
    _refuse_shared_constants(name, sources, tensors, results)
    _refuse_turns(name, graph, sources, results)

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
    constants = {s.name: t for s, t in zip(sources, tensors, strict=True) if s.kind == "constant" and t is not None}
    return Step(
        numbering.graph(outputs_of(graph)),
        joint.module,
        model,
        where,
        tuple(numbering.calls),
        numbering.value_of,
        tuple(sources),
        tuple(results),
        constants,
        form,
        tuple(part.training for part in model.modules()),
        body,
        Fingerprint(body, watch.reads, watch.changed, surroundings.check, list(map(memory_of, constants.values()))),
        autocast,
        tuple(leftovers),
        tuple(sorted(watch.askers)),
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
    between training and evaluation, hooks, attributes, numbers that loss and forward take from elsewhere.
    """
    step.check_runs()
    leaves = leaves_like(step.form, inputs)
    step.fingerprint.check()
    return step._binding.of(leaves, tangent, detached=detached)


def bind_again(step: Step, inputs: Inputs) -> list[Tensor] | None:
    """``bind`` for a call whose tensors are like those of one before, not detached; None where something differs.

    ``check_late`` has to follow before results count. That takes as long as some ops, and a device can have work meanwhile.
    """
    return step._binding.again(leaves_like(step.form, inputs))


def check_late(step: Step, bound: Sequence[Tensor]) -> None:
    """What ``bind_again`` leaves open: whether the model was edited, and whether something lies in the memory of a buffer that
    changes. Raises InputError."""
    step.fingerprint.check()
    step._binding.check_apart(bound)


def _sources(
    joint: Joint, state: Mapping[str, Tensor], parameters: Set[str], leaves: Sequence[Any], form: InputForm
) -> tuple[list[Source], list[Tensor | None]]:
    """What the placeholders are, and their real tensors where there are any."""
    names = list(state)
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    sources: list[Source] = []
    tensors: list[Tensor | None] = []
    for kind, i in joint.sources:
        if kind == "state":
            tensor = state[names[i]]
            sources.append(Source("parameter" if names[i] in parameters else "buffer", names[i], trainable=tensor.requires_grad))
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
    own = dict(zip(joint.sources, joint.module.graph.find_nodes(op="placeholder"), strict=False))  # constants come behind
    results: list[Result] = []
    nodes: list[fx.Node] = []
    for node, found in zip(outputs_of(joint.module.graph), joint.results, strict=True):
        if node is None or found is None:
            continue
        kind, i = found
        if kind == "input":
            label = [label for label, leaf in zip(form.labels, leaves, strict=True) if isinstance(leaf, Tensor)][i]
            raise CaptureError(f"{name} changes {label} in place; let it work on a copy")
        if kind == "state" and any(s == 0 < n - 1 for s, n in zip(state[names[i]].stride(), state[names[i]].shape, strict=True)):
            raise CaptureError(f"{name} changes {names[i]}, which is expanded (places share memory); make it contiguous()")
        if kind == "state" and (shape := node.meta["val"].shape) != state[names[i]].shape:
            raise CaptureError(
                f"{name} gives its buffer {names[i]} the shape {tuple(shape)} in its forward, in place of "
                f"{tuple(state[names[i]].shape)}, and a captured step keeps shapes; where only the first call does so, run the "
                f"model once before"
            )
        if kind == "state" and node is not own[found] and storage_key(node.meta["val"]) == storage_key(own[found].meta["val"]):
            raise CaptureError(
                f"{name} has its buffer {names[i]} show its own memory in another way (t_, transpose_, as_strided_) in its "
                f"forward, and a captured step keeps layouts; write what it is to hold into it: {names[i]}.copy_(...)"
            )
        if kind == "loss":
            results.append(Result("loss"))
        else:
            results.append(Result("gradient" if kind == "gradient" else "buffer", names[i]))
        nodes.append(node)
    if {"loss", "gradient"} - {result.kind for result in results}:
        given = storages_of(joint.module.graph.find_nodes(op="placeholder"))
        at = next((n for n, found in zip(nodes, results, strict=True) if found.kind == "loss"), None)
        if at is None or any(storage_key(t) in given for t in tensors_of(at)):
            raise CaptureError(f"the loss of {name} is one of its parameters, or a view of one: there is nothing to compute")
        raise CaptureError(f"the loss of {name} depends on none of its parameters that require a gradient")
    joint.module.graph.output_node().args = (tuple(nodes),)
    return results


def _changed(results: Iterable[Result]) -> set[str]:
    """Names of the buffers that get new content."""
    return {result.name for result in results if result.kind == "buffer"}


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
    new = _changed(results)
    found = [(source, memory_of(tensor)) for source, tensor in zip(sources, tensors, strict=True) if tensor is not None]
    for buffer, lies in found:
        for other, reads in found if buffer.kind == "buffer" and buffer.name in new else ():
            if other.kind == "constant" and max(lies.start, reads.start) < min(lies.stop, reads.stop):
                raise CaptureError(
                    f"{name} changes its buffer {buffer.name} in its forward, and reads a tensor in the same memory that is "
                    f"neither parameter nor buffer; take that from the buffer in the forward"
                )


def _refuse_turns(name: str, graph: fx.Graph, sources: Sequence[Source], results: Sequence[Result]) -> None:
    """Refuse an answer of the example that the step itself changes: the next call is told another one."""
    new = _changed(results)
    changed = {n: s.name for n, s in zip(graph.find_nodes(op="placeholder"), sources, strict=True) if s.name in new}
    for asked in asked_in(graph) if changed else ():
        for call in _calls_behind([asked], frozenset()) if asked.args[3] else ():
            for node in changed.keys() & call.all_input_nodes:
                raise CaptureError(
                    f"{name} branches on its buffer {changed[node]}, which it changes{asked.args[2]}; where only the first call "
                    f"does something else, run the model once before"
                )


def _calls_behind(nodes: Iterable[fx.Node], bases: frozenset[fx.Node]) -> set[fx.Node]:
    """All call nodes from which ``nodes`` are made, ``nodes`` included, up to and without ``bases``."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in bases and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
