"""``torch.compile(model, backend="belady", options={"budget": 0.5})``: plans for what the compiler captures. [torch]

AOTAutograd traces forward and backward of each graph that Dynamo captures into one, and asks for two graphs: a forward that
returns what it saves, and a backward. Here the joint graph is planned, the schedule is cut where the backward starts, and both
parts are written out in the schedule's own order, so a plan is carried whole: what is saved, what is computed again in the
backward and also in the forward, and when each value is dropped. Kernels run as in eager execution; nothing is fused.

With ``options={"kernels": "inductor"}`` both parts are compiled by Inductor, as ``torch.compile(model)`` would. Its operators are
planned, with costs and bytes as if each ran alone. It fuses them, so what is saved and what is computed again are the plan's, but
neither time nor peak: a kernel that does many ops takes less of both, except that all it reads and writes is in memory at once.
Products and the like that run several times wait for their turn, as otherwise all of them could come first. Random ops draw from
seeds, as Inductor's do, so their numbers are those of ``torch.compile(model)``, not of eager execution.

What a plan for a captured graph cannot know:

* A graph break makes several graphs. Each is planned alone, and what the others hold is in none of their budgets. A share is met
  by each of them or, where no schedule of one is known to need so little, is the least that this one can have; a warning says
  so. Bytes are met by all or refused.
* What the model returns counts until the backward is done, whether the caller keeps it or not.
* Buffers, inputs and what the graph returns (to the caller, or to the graph behind a break) may change between forward and
  backward: what eager execution would not read any more then, but the plan does, is copied, and counts. Parameters may not,
  frozen ones among them; a step in between raises what autograd raises, which does not see what is written through ``.data``.
* A backward with ``retain_graph=True`` drops nothing that was saved for it, and each forward before one backward saves its own:
  that is outside of the budget.
* From its ninth variant of one function on (``torch._dynamo.config.recompile_limit``), Dynamo runs it as it is, without a plan:
  other shapes, other numbers. ``torch._dynamo.config.fail_on_recompile_limit_hit`` makes that an error.
* Gradients of earlier steps (gradient accumulation) and the optimizer's state are outside, as for every plan.
* Outputs that nobody uses get gradients of zeros (AOTAutograd), and so do parameters that only those depend on, where eager
  execution leaves None.
* New content of buffers is computed beside the old one and written at the end of the forward. Unlike ``PlannedModule``, a failed
  step is not taken back.
* Gradients that come from outside are laid out as the outputs they belong to (before torch 2.13: contiguous or channels last)
  before the backward gets them (AOTAutograd), in memory of its own that no budget counts. Where eager execution meets another
  layout, results may differ in the last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphs.as_eager.draws_in_place import draws_laid_out
from graphs.as_eager.layouts import kernels_layouts
from graphs.as_eager.recurrent import recurrent_layers_traced
from graphs.capture import Step, numbered
from graphs.costs import formula_of
from graphs.errors import CaptureError, InfeasibleBudget, InputError, InvalidSchedule, NoScheduleFound
from graphs.ir import Graph
from graphs.rewriting.nodes import outputs_of, tensors_of
from graphs.rewriting.operators import IN_MEMORY
from graphs.torch_private.names import ONE_TRACE_AT_A_TIME, BoxedCodeGen
from graphs.torch_private.partitioned import (
    backward_is_traced_again,
    changed_inputs,
    compile_fused,
    compile_partitioned,
    inductor_options,
    is_unwatched,
    parameter_inputs,
    passed_over,
    put_after,
)
from graphs.tracing.refusals import refusal
from planner.budget import format_bytes, is_share, resolve_budget
from planner.execution.draws import generator_state_like
from planner.execution.halves import first_late, late_ops, needed_from_before, not_made
from planner.execution.lowering import Code, placeholders
from planner.live import shown
from planner.plan import METHOD, checked_method, plan_halves, with_costs
from planner.result import Plan
from planner.schedule import Free, Schedule, computes, keep_all
from planner.simulate import simulate

log = logging.getLogger("belady")


def belady(module: fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The backend: what ``torch.compile`` calls for each graph it captures.

    options  ``budget`` as ``planner.plan`` takes it (bytes, "6GiB", or a share of the keep-all peak of that graph, or the least
             it can have), and any other option of ``planner.plan`` (``costs``, ``method``, ``gap``, ``time_limit_s``, ``seed``,
             and those of the method). ``kernels``: those of "eager" execution (default) or of "inductor", and with these any
             option of Inductor's

    One line about each graph is logged (logger "belady", level INFO; WARNING where a share is not met). A graph without backward
    runs as it is.

    Raises, inside of what torch.compile raises: InputError for options that cannot be used, dynamic shapes and compiled autograd,
    InfeasibleBudget, NoScheduleFound and CaptureError as ``plan`` does.
    """
    options = dict(options or {})
    if "budget" not in options:
        raise InputError('the backend "belady" needs a budget: torch.compile(model, backend="belady", options={"budget": 0.5})')
    if any(isinstance(example, torch.SymInt | torch.SymFloat) or _symbolic(example) for example in examples):
        raise InputError(
            'the backend "belady" plans for fixed shapes: call torch.compile(..., dynamic=False), which plans once per shape'
        )
    if any(_symbolic(node.meta.get("example_value")) for node in module.graph.nodes):
        raise InputError(
            'the backend "belady" plans for fixed shapes, and this graph has some that depend on data; with '
            "torch._dynamo.config.capture_dynamic_output_shape_ops = False it is divided there"
        )
    if backward_is_traced_again():
        raise InputError(
            'the backend "belady" plans forward and backward together, and compiled autograd would trace the backward again, in '
            "another order; set torch._dynamo.config.compiled_autograd = False"
        )
    budget = options.pop("budget")
    fused = _is_fused(options.pop("kernels", "eager"))
    of_inductor = {name: options.pop(name) for name in inductor_options() & options.keys()} if fused else {}
    is_share(budget)  # what cannot be used is refused in a graph without backward, too
    checked_method(options.get("method", METHOD), {name: options[name] for name in options.keys() - {"costs", "method"}})

    def partition(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        return _partition(joint, forward_outputs, budget, options, examples, fused=fused)

    with ONE_TRACE_AT_A_TIME:
        try:
            if fused:
                return compile_fused(module, examples, partition, of_inductor)
            with kernels_layouts(), draws_laid_out(), recurrent_layers_traced():
                return compile_partitioned(module, examples, partition, _boxed)
        except passed_over() as error:
            raise refusal("compiled_graph", error) from error


def _symbolic(example: object) -> bool:
    return isinstance(example, Tensor) and any(isinstance(n, torch.SymInt) for n in example.shape)


def _is_fused(kernels: object) -> bool:
    if kernels not in ("eager", "inductor"):
        raise InputError(f'the backend "belady" takes kernels of "eager" execution or of "inductor", not {kernels!r}')
    return kernels == "inductor"


def _boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    """A function that takes a list of inputs and empties it, so that they can be dropped while it runs."""
    graph.graph.set_codegen(BoxedCodeGen())
    graph.recompile()

    def run(inputs: list[Any]) -> Any:
        return graph.forward(inputs)

    return run


@dataclass(frozen=True, slots=True)
class _Joint:
    """A joint graph with its numbering.

    forward   entries of the output that the forward returns; ``backward``: the others. None and numbers among them stand for
              themselves
    tangents  placeholders of the gradients the backward is given
    primals   the other placeholders
    copied    Values of primals and of what the forward returns that the backward, where it reads them, takes from a copy
    """

    step: Step
    forward: list[Any]
    backward: list[Any]
    primals: list[fx.Node]
    tangents: list[fx.Node]
    copied: frozenset[int]

    def values(self, entries: Iterable[Any]) -> list[int]:
        value_of = self.step.value_of
        return [value_of[node] for node in entries if isinstance(node, fx.Node) and node in value_of]

    def copied_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the copies that these ops of the backward read."""
        graph = self.step.graph
        read = {v for op in ops for v in graph.ops[op].inputs} & self.copied
        given = self.values(self.primals)
        return sum(graph.values[v].size_bytes for v in (*given, *read.difference(given)) if v in read)


def _partition(
    module: fx.GraphModule,
    forward_outputs: int,
    budget: int | float | str,
    options: Mapping[str, Any],
    examples: Sequence[Any],
    *,
    fused: bool,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, by a plan for it; for a compiler that fuses them, or to run as they are."""
    devices = {t.device for node in module.graph.find_nodes(op="placeholder") for t in tensors_of(node)}
    device = min(devices, key=lambda d: (d.type == "cpu", str(d)), default=torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f"compiled_graph: it is on the device {device.type}, and plans are for cpu and cuda")
    options = dict(options)
    step = with_costs(numbered("compiled_graph", module, device), str(options.pop("costs", "auto")))
    outputs: list[Any] = [*outputs_of(module.graph)]
    sources = placeholders(step)
    primals = [node for node in sources if not node.name.startswith("tangents")]
    tangents = [node for node in sources if node.name.startswith("tangents")]
    step = _with_late_ops_backward(step, tangents)
    if fused:
        step = _drawn_once(step)
    joint = _Joint(step, outputs[:forward_outputs], outputs[forward_outputs:], primals, tangents, frozenset())
    joint = replace(joint, copied=_copied(joint, changed_inputs(module), parameter_inputs(module, examples)))
    planned = _planned(joint, budget, options)
    forward, backward, saved = _cut(joint, planned.schedule, fused=fused)
    log.info(
        "planned a graph of %d ops with %s: peak %s bytes of the budget of %s bytes (%s to keep all), %d ops run again for "
        "%.2f %% more time, %d tensors saved for the backward",
        len(step.graph.ops), planned.plan.method, f"{planned.peak_bytes:,}", f"{planned.budget_bytes:,}",
        f"{_keep_all_bytes(step):,}", simulate(step.graph, planned.schedule).recomputed_ops,
        100 * (planned.plan.overhead or 0.0), saved,
    )  # fmt: skip
    return forward, backward


def _with_late_ops_backward(step: Step, tangents: list[fx.Node]) -> Step:
    """The compiler does not say of all ops of the backward that they are: not of one somebody wrote (``autograd.Function``)."""
    late = late_ops(step.graph, [step.value_of[node] for node in tangents])
    ops = tuple(replace(op, backward=True) if i in late else op for i, op in enumerate(step.graph.ops))
    return replace(step, graph=replace(step.graph, ops=ops))


def _drawn_once(step: Step) -> Step:
    """A compiler that fuses makes random numbers its own way, out of seeds that the graph draws: those run once, and what is made
    of them is like any other op."""
    ops = tuple(replace(op, effect=True, random=False) if op.random else op for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _copied(joint: _Joint, changed: list[fx.Node], parameters: list[fx.Node]) -> frozenset[int]:
    """Values that may have other content by the time the backward runs, with nothing wrong about that.

    Those are the ones the forward itself changes, and others that the backward reads only to compute again: eager execution
    does not look at them any more, so buffers, inputs and what is returned may be written to. Parameters are not: an optimizer
    changes them after the backward, and copies of them would be dear.
    """
    graph = joint.step.graph
    schedule = keep_all(graph)
    read = {v for op in computes(schedule[_start_of_backward(joint, schedule) :]) for v in graph.ops[op].inputs}
    written = set(joint.values(joint.backward)) & graph.resident  # by the backward itself: what it is given must be the tensor
    twice = written.intersection(joint.values(changed))
    if twice:
        raise CaptureError(
            f"{graph.name}: {graph.values[min(twice)].name} is written in the forward and again in the backward, which a plan "
            f"has no words for; write to it in only one of them, or keep it out of what is compiled"
        )
    kept = read | written | set(joint.values(parameters))
    seen = {*joint.values(joint.primals), *joint.values(joint.forward)}
    return frozenset(seen - kept).union(joint.values(changed))


def _keep_all_bytes(step: Step) -> int:
    return simulate(step.graph, keep_all(step.graph)).peak_bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan for a joint graph, and how it is carried out.

    schedule      without the frees of what the forward returns, which stays in memory from when it is made
    peak_bytes    of this schedule, copies that the backward reads included
    budget_bytes  what it is planned for
    """

    plan: Plan
    schedule: Schedule
    peak_bytes: int
    budget_bytes: int


def _planned(joint: _Joint, budget: int | float | str, options: Mapping[str, Any]) -> _Planned:
    """What ``_found`` finds, remembered: the compiler captures a graph again where a number in it has changed, or a flag.

    The best of an interrupted search is not remembered: who captures the graph again may wait for a better one.
    """
    graph = joint.step.graph
    structure = graph.fingerprint(), tuple(op.backward for op in graph.ops), joint.copied
    places = tuple(tuple(joint.values(nodes)) for nodes in (joint.forward, joint.primals, joint.tangents))
    key = (*structure, *places, repr(budget), repr(sorted(options.items())))
    found = _known.get(key) or _found(joint, budget, options)
    if not found.plan.interrupted:
        while len(_known) >= _REMEMBERED and key not in _known:
            del _known[next(iter(_known))]
        _known[key] = found
    whole_bytes = _keep_all_bytes(joint.step)
    if found.budget_bytes > resolve_budget(budget, whole_bytes):
        log.warning(
            "a graph of %d ops is planned for %s bytes, the fewest that are known to work (%.3g of what keeping all takes), "
            "not for the share of %s; a budget in bytes would be refused",
            len(graph.ops), f"{found.budget_bytes:,}", found.budget_bytes / whole_bytes, budget,
        )  # fmt: skip
    return found


_REMEMBERED = 100  # plans
_known: dict[tuple[Any, ...], _Planned] = {}


def _found(joint: _Joint, budget: int | float | str, options: Mapping[str, Any]) -> _Planned:
    """What ``_fitting`` finds in the budget or, where that is a share it finds nothing in, in the fewest bytes known to work."""
    whole_bytes = _keep_all_bytes(joint.step)
    budget_bytes = resolve_budget(budget, whole_bytes)
    while True:
        try:
            return _fitting(joint, budget_bytes, options)
        except (InfeasibleBudget, NoScheduleFound) as error:
            works_bytes = error.works_bytes
            if not is_share(budget) or works_bytes is None or works_bytes <= budget_bytes:
                raise
            budget_bytes = works_bytes


def _fitting(joint: _Joint, budget_bytes: int, options: Mapping[str, Any]) -> _Planned:
    """A plan that fits with the copies its backward reads.

    Where there is no room for copies, ops that read what would be copied run once.
    """
    graph = _outputs_made_once(joint.step.graph)
    copied_bytes = 0
    try:
        while True:
            found = _plan(graph, budget_bytes, copied_bytes, options)
            schedule, peak_bytes, needed_bytes = _with_copies(joint, found)
            if peak_bytes <= budget_bytes:
                return _Planned(found, schedule, peak_bytes, budget_bytes)
            if found.interrupted:
                raise KeyboardInterrupt  # what was found until then does not fit, and who stops a search wants no other one
            assert needed_bytes > copied_bytes, "there was room for as many copies"
            copied_bytes = needed_bytes
    except (InfeasibleBudget, NoScheduleFound) as error:
        if not copied_bytes:
            raise
        works_bytes = error.works_bytes
    once = tuple(op if joint.copied.isdisjoint(op.inputs) else replace(op, effect=True) for op in graph.ops)
    try:
        found = _plan(replace(graph, ops=once), budget_bytes, 0, options)
        schedule, peak_bytes, _ = _with_copies(joint, found)
        if peak_bytes <= budget_bytes:
            return _Planned(found, schedule, peak_bytes, budget_bytes)
    except (InfeasibleBudget, NoScheduleFound) as error:
        if works_bytes is not None and error.works_bytes is not None:
            works_bytes = min(works_bytes, error.works_bytes)
    enough = "" if works_bytes is None else f"; {works_bytes:,} bytes are known to be enough"
    raise NoScheduleFound(
        f"no schedule of {graph.name} was found in {budget_bytes:,} bytes, neither with copies of the inputs it reads in the "
        f"backward ({copied_bytes:,} bytes) nor without reading them there{enough}",
        works_bytes=works_bytes,
    )


def _outputs_made_once(graph: Graph) -> Graph:
    """The graph, for a plan that keeps what its forward returns. Planning knows that by the ops of the backward; where there is
    none, since gradients are handed on as they come, what is returned is made once."""
    if any(op.backward for op in graph.ops):
        return graph
    ops = tuple(op if graph.outputs.isdisjoint(op.outputs) else replace(op, effect=True) for op in graph.ops)
    return replace(graph, ops=ops)


def _plan(graph: Graph, budget_bytes: int, copied_bytes: int, options: Mapping[str, Any]) -> Plan:
    """A plan that can be cut into a forward and a backward, with room for as many bytes in the backward."""
    with shown(options.get("progress"), f"planning {graph.name} in {format_bytes(budget_bytes)}", graph) as told:
        found = plan_halves(graph, budget_bytes, copied_bytes=copied_bytes, **{**options, "progress": told})
    if "halves" in found.notes:
        works_bytes = int(str(found.notes["halves_bytes"]))
        raise NoScheduleFound(
            f"{found.method} found no schedule of {graph.name} in {budget_bytes:,} bytes that can be cut into a forward and a "
            f"backward, with what the forward returns in memory in both; {works_bytes:,} bytes are known to be enough",
            works_bytes=works_bytes,
        )
    return found


def _with_copies(joint: _Joint, found: Plan) -> tuple[Schedule, int, int]:
    """The schedule of a plan with what the forward returns kept, its peak with copies, and the bytes of the copies."""
    assert found.schedule is not None
    kept = set(joint.values(joint.forward))
    schedule = tuple(s for s in found.schedule if not (isinstance(s, Free) and s.value in kept))
    memory = simulate(joint.step.graph, schedule).memory_bytes
    cut = _start_of_backward(joint, schedule)
    copied_bytes = joint.copied_bytes(computes(schedule[cut:]))
    late = max(cut - 1, 0)
    return schedule, max([*memory[:late], *(m + copied_bytes for m in memory[late:])], default=0), copied_bytes


def _start_of_backward(joint: _Joint, schedule: Schedule) -> int:
    return first_late(joint.step.graph, schedule, joint.values(joint.tangents))


def _cut(joint: _Joint, schedule: Schedule, *, fused: bool) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """The code of both parts of a schedule, and how many tensors go from one to the other."""
    step = joint.step
    graph = step.graph
    cut = _start_of_backward(joint, schedule)
    before, after = schedule[:cut], schedule[cut:]
    missing = not_made(graph, before, joint.values(joint.forward))
    if missing:
        raise InvalidSchedule(
            f"step {cut}: the backward starts before {graph.values[missing[0]].name} is made, which the forward returns, so this "
            f"schedule cannot be cut into a forward and a backward; plan for a larger budget, or with another method"
        )

    first = Code(step, schedule, as_captured=fused)
    for node in joint.primals:
        first.receive(node)
    tangents = [first.receive(node) for node in joint.tangents]
    first.run(before)
    kept = set(joint.values(joint.forward))
    values = sorted(needed_from_before(graph, after, joint.values(joint.backward), kept))
    draws = sorted(first.states.keys() & set(computes(after)))
    for op in draws:
        first.states[op].meta["val"] = generator_state_like(step.calls[op])
    returned = [first.holder(node) if isinstance(node, fx.Node) else node for node in joint.forward]

    # The compiler takes what it does not watch for changes (a custom backward has it as an attribute) from the end.
    given = sorted([*(first.maker[v] for v in values), *joint.primals], key=is_unwatched)
    second = Code(step, schedule, as_captured=fused)
    for op in draws:
        second.receive_state(op).meta = dict(first.states[op].meta)
    arguments = [second.receive(node) for node in given]
    for node in joint.tangents:
        second.receive(node)
    second.run(after)
    second.returns([second.holder(node) if isinstance(node, fx.Node) else node for node in joint.backward])

    saved = [first.states[op] for op in draws]
    for node in [given[i] for i in second.drop_unread(arguments)]:
        saved.append(first.copied(node) if step.value_of[node] in joint.copied else first.holder(node))
    first.returns([*returned, *saved])
    first.drop_unread(tangents)
    forward, backward = first.finish("Forward"), second.finish("Backward")
    if fused:
        put_after(forward, _waiting(forward, first, set(range(len(graph.ops)))), IN_MEMORY)
        put_after(backward, _waiting(backward, second, late_ops(graph, joint.values(joint.tangents))), IN_MEMORY)
    return forward, backward, len(saved)


def _waiting(module: fx.GraphModule, code: Code, bound: set[int]) -> dict[fx.Node, fx.Node]:
    """Calls that a compiler might make earlier than the schedule does, and the call that each of them has to wait for.

    Where an op runs several times in this part, and nothing it reads is made here, all of its runs could come first, as one
    kernel. From the second on they wait for the last call in front of them that has its place by what it reads (the first run of
    an op in ``bound``), unless what they read waits for that already. That holds for products and the like, and for what they
    read, which lies in memory for them; all else is left to be fused.
    """
    waiting: dict[fx.Node, fx.Node] = {}
    behind: dict[fx.Node, int] = {}  # how many of these calls are known to come before a node
    places: list[fx.Node] = []
    seen: set[int] = set()
    for node in module.graph.nodes:
        behind[node] = max((behind[other] for other in node.all_input_nodes), default=0)
        if node not in code.ran:
            continue
        op = code.ran[node]
        again = op in seen
        seen.add(op)
        if op in bound and not again:
            places.append(node)
            behind[node] = len(places)
        elif again and behind[node] < len(places) and any(map(_is_heavy, (node, *node.users))):
            waiting[node] = places[-1]
            behind[node] = len(places)
    return waiting


def _is_heavy(node: fx.Node) -> bool:
    """Whether it is a product, a convolution, an attention or a recurrent layer, which no other op is fused with."""
    return formula_of(node.target) is not None
