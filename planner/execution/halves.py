"""A schedule in two halves: what a call of the module runs, and what its backward runs. [torch]"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from graphs.capture import Step
from graphs.errors import BudgetExceeded, InvalidSchedule
from graphs.ir import Graph
from graphs.rewriting.nodes import outputs_of
from graphs.torch_private.running import order_of_leaves
from planner.execution.lowering import Code, placeholders, result_value
from planner.execution.statistics import updates_with_room
from planner.schedule import Compute, Schedule, computes
from planner.simulate import simulate


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A buffer the step changes.

    source  index of its placeholder in the captured step
    old_at  where the second half takes its old content; None where it does not read it
    new_at  where the second half takes its new content; likewise
    cloned  the old content needs memory of its own. Otherwise it changes places with the new one, in the tensor that brought
            that; and where the second half reads the new content, it takes that from the buffer
    """

    source: int
    old_at: int | None
    new_at: int | None
    cloned: bool


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A schedule cut where the backward starts.

    cut             index in the schedule of the first step of the second half
    forward         takes the placeholders ``forward_reads``; returns the loss, the new content of ``buffers``, ``handed``
    backward        takes ``handed`` and the placeholders ``backward_reads``; returns the gradients
    gradients       indices of their results, in the order that has autograd hand them on as it does without a plan
    handed          names of the values and generator states that go from one to the other
    loss_at         where the second half takes the loss; None where it does not read it
    tangent_at      where it takes the gradient of the loss; likewise
    """

    cut: int
    forward: fx.GraphModule
    forward_reads: tuple[int, ...]
    backward: fx.GraphModule
    backward_reads: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    loss_at: int | None
    tangent_at: int | None


def cut_in_halves(step: Step, schedule: Schedule) -> Halves:
    """Cut a schedule before the first op that belongs to the backward (``late_ops``), and lower both parts."""
    sources = placeholders(step)
    loss, *others = sorted(range(len(step.results)), key=lambda i: step.results[i].kind != "loss")
    buffers = [i for i in others if step.results[i].kind == "buffer"]
    gradients = _as_plain(step, [i for i in others if step.results[i].kind == "gradient"])
    cut = _cut(step, schedule, (loss, *buffers))
    before, after = schedule[:cut], schedule[cut:]

    first = Code(step, schedule)
    of_first = [first.receive(node) for node in sources]
    first.copy_statistics(updates_with_room(step, schedule, cut))
    first.run(before)
    early_results = (loss, *buffers)
    values = sorted(
        needed_from_before(
            step.graph, after, (result_value(step, i) for i in gradients), {result_value(step, i) for i in early_results}
        )
    )
    draws = sorted(first.states.keys() & set(computes(after)))

    second = Code(step, schedule)
    of_values = [second.receive(second.maker[v]) for v in values]
    for op in draws:
        second.receive_state(op)
    of_second = [second.receive(node) for node in sources]
    second.run(after)
    second.returns([second.result(i) for i in gradients])
    values = [values[i] for i in second.drop_unread(of_values)]  # a batch norm run again does not read all that the op is given
    backward_reads = second.drop_unread(of_second)
    backward = second.finish("Backward")

    handed = [first.value(v) for v in values] + [first.states[op] for op in draws]
    first.returns([*(first.result(i) for i in early_results), *handed])
    forward_reads = first.drop_unread(of_first)
    forward = first.finish("Forward")

    own = _own_content(step)
    at = {v: i for i, v in enumerate(values)}
    source_at = {source: len(handed) + i for i, source in enumerate(backward_reads)}
    index = {(source.kind, source.name): i for i, source in enumerate(step.sources)}

    def buffer(i: int) -> Buffer:
        source = index["buffer", step.results[i].name]
        value = result_value(step, i)
        return Buffer(source, source_at.get(source), at.get(value), i not in own)

    return Halves(
        cut,
        forward,
        forward_reads,
        backward,
        backward_reads,
        tuple(gradients),
        tuple(node.name for node in handed),
        tuple(buffer(i) for i in buffers),
        at.get(result_value(step, loss)),
        source_at.get(index.get(("tangent", ""), -1)),
    )


def _as_plain(step: Step, gradients: Sequence[int]) -> list[int]:
    """Gradients in the order in which the backward has to return them, so that autograd hands them on as without a plan: as they
    were made when the step was traced. DistributedDataParallel lays its buckets out by that, and where three or more processes
    add up, an element's place decides the order of the sum."""
    outputs = outputs_of(step.module.graph)
    at = {node: i for i, node in enumerate(step.module.graph.nodes)}
    placed = list(gradients)
    for i, place in zip(sorted(gradients, key=lambda i: at[outputs[i]]), order_of_leaves(len(gradients)), strict=True):
        placed[place] = i
    return placed


def _own_content(step: Step) -> set[int]:
    """The results that are new content of a buffer and all of a storage of their own, which can take over the old content."""
    maker = {v: node for op in range(len(step.calls)) for v, node in step.made_by(op).items()}
    early = Counter(result_value(step, i) for i, result in enumerate(step.results) if result.kind != "gradient")
    outputs = outputs_of(step.module.graph)
    return {
        i
        for i, result in enumerate(step.results)
        if result.kind == "buffer" and maker.get(v := result_value(step, i)) is outputs[i] and early[v] == 1
    }


def copied_bytes(step: Step) -> int:
    """What halves need beside their schedule from the end of the first one on: the old content of buffers that the new content
    cannot take over."""
    own = _own_content(step)
    changed = {result.name for i, result in enumerate(step.results) if result.kind == "buffer" and i not in own}
    return sum(
        step.graph.values[step.value_of[node]].size_bytes
        for node, source in zip(placeholders(step), step.sources, strict=True)
        if source.kind == "buffer" and source.name in changed
    )


def late_ops(graph: Graph, tangents: Iterable[int]) -> set[int]:
    """The ops that depend on one of these Values; draws and effects of the backward, which eager execution makes there, whether
    they depend on one or not; and what depends on these."""
    depends = set(tangents)
    late = set()
    for i, op in enumerate(graph.ops):
        if (op.backward and (op.random or op.effect)) or not depends.isdisjoint(op.inputs):
            depends.update(op.outputs)
            late.add(i)
    return late


def first_late(graph: Graph, schedule: Schedule, tangents: Iterable[int]) -> int:
    """Index of the first step of a schedule that runs one of ``late_ops``; the length of the schedule where none does."""
    late = late_ops(graph, tangents)
    return next((at for at, s in enumerate(schedule) if isinstance(s, Compute) and s.op in late), len(schedule))


def not_made(graph: Graph, schedule: Schedule, values: Iterable[int]) -> list[int]:
    """Those of the Values that a part of a schedule, run from the start, does not make."""
    ran = set(computes(schedule))
    return [v for v in values if v not in graph.resident and graph.producer[v] not in ran]


def _cut(step: Step, schedule: Schedule, early: Iterable[int]) -> int:
    """The first step of the schedule that belongs to the backward. The results ``early`` must be made by then."""
    graph = step.graph
    tangents = [step.value_of[n] for n, s in zip(placeholders(step), step.sources, strict=True) if s.kind == "tangent"]
    cut = first_late(graph, schedule, tangents)
    begun = next((s.op for s in schedule[cut:] if isinstance(s, Compute)), -1)
    for i in early:
        if not_made(graph, schedule[:cut], [result_value(step, i)]):
            result = step.results[i]
            what = "the loss" if result.kind == "loss" else f"the new content of {result.name}"
            raise InvalidSchedule(
                f"step {cut}: {graph.ops[begun].name} belongs to the backward, but {what} is not made by then, so "
                f"this schedule cannot be cut into a forward and a backward; run it as one with PlannedStep, or plan for a "
                f"larger budget"
            )
    return cut


def needed_from_before(graph: Graph, schedule: Schedule, results: Iterable[int], kept: Set[int]) -> set[int]:
    """Values that must be there before a part of a schedule: it reads them, or returns them, before it makes them.

    Those in ``kept`` stay in memory from before; one of them that is made again is still read from the first copy.
    """
    resident = graph.resident
    needed = set(results) - resident
    for s in reversed(schedule):
        if isinstance(s, Compute):
            op = graph.ops[s.op]
            needed.difference_update(v for v in op.outputs if v not in kept)
            needed.update(v for v in op.inputs if v not in resident)
    return needed


def checked_peak(step: Step, schedule: Schedule, budget_bytes: int | None) -> int:
    """Peak of a schedule. Raises InvalidSchedule where it is none, BudgetExceeded where it needs more than the budget."""
    trace = simulate(step.graph, schedule)
    if budget_bytes is not None and trace.peak_bytes > budget_bytes:
        where = _op_at(step, schedule, trace.peak_step)
        raise BudgetExceeded(where, trace.peak_bytes, budget_bytes, "nothing ran; plan for a larger budget")
    return trace.peak_bytes


def fit_halves(step: Step, schedule: Schedule, budget_bytes: int, halves: Halves) -> tuple[Halves, int, int]:
    """The halves of a schedule that keeps its early results, their peak, and how many bytes there is room for at the end of the
    first.

    The old content of a buffer is kept until the backward is done, in the place of its new one, so that a step can be taken back.
    Buffers with a further copy (``cloned``) count; where the budget allows it, those are all whose new content the backward
    reads: a later call may then change the buffer before. Raises BudgetExceeded as ``checked_peak`` does.
    """
    memory = list(simulate(step.graph, schedule).memory_bytes)
    sources = placeholders(step)
    start = max(halves.cut - 1, 0)
    highest = max(memory[start:], default=0)
    order = {buffer.source: i for i, buffer in enumerate(halves.buffers)}
    cloned = 0
    buffers = []
    for buffer in sorted(halves.buffers, key=lambda b: not b.cloned):
        size = step.graph.values[step.value_of[sources[buffer.source]]].size_bytes
        keep = buffer.cloned or (buffer.new_at is not None and highest + cloned + size <= budget_bytes)
        cloned += size if keep else 0
        buffers.append(replace(buffer, cloned=keep))
    buffers.sort(key=lambda b: order[b.source])  # as before
    for at in range(start, len(memory)):
        memory[at] += cloned
    worst = max(range(len(memory)), key=memory.__getitem__)
    if memory[worst] > budget_bytes:
        raise BudgetExceeded(
            _op_at(step, schedule, worst),
            memory[worst],
            budget_bytes,
            f"a call keeps the loss and the new buffers until its end; plan for {memory[worst]:,} bytes with start=schedule",
        )
    return replace(halves, buffers=tuple(buffers)), memory[worst], memory[worst] - memory[start] if memory else 0


def _op_at(step: Step, schedule: Schedule, at: int) -> str:
    return next((step.graph.ops[s.op].name for s in schedule[at:] if isinstance(s, Compute)), step.graph.name)
