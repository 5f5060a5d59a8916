"""A Schedule becomes code: straight-line FX graphs that run it, and a module that trains with them. [torch]

``lower`` turns a captured step and a schedule into one ``fx.GraphModule``: the calls of the schedule in its order, repeated
where it repeats them, each value dropped where it is freed or at its last use, if that comes before. There is no interpreter
and there are no free instructions: the generated code says ``x = None``, and reads as if written by hand.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphs.capture import Inputs, Step, bind
from graphs.errors import BudgetExceeded, InputError, InvalidSchedule
from graphs.torch_private import BoxedCodeGen, storage_key, tree_leaves
from planner.calls import quickest
from planner.schedule import Compute, Free, Schedule, computes
from planner.simulate import simulate


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step computes. Parameters and buffers of the model are as before.

    loss       detached
    gradients  by parameter name (the first one, for tied weights); parameters the loss does not depend on are missing
    buffers    new content of those the step changes, by buffer name
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @torch.no_grad()
    def write_buffers(self, model: nn.Module) -> None:
        """Give the buffers of ``model`` their new content."""
        for name, content in self.buffers.items():
            model.get_buffer(name).copy_(content)


def lower(step: Step, schedule: Schedule) -> fx.GraphModule:
    """The straight-line code of a schedule.

    ``lower(step, schedule).forward(bind(step, inputs))``, under ``torch.no_grad``, returns the list of what ``step.results``
    names. The call empties the list it is given (boxed convention), so that it holds nothing the code has dropped.

    At every moment the storages alive are at most those that ``simulate`` counts. A random op that runs again repeats its
    first draw: the state of its generator is kept on the host (5 KB an op on CPU, 16 bytes on CUDA; bookkeeping, no part of
    the budget) and afterwards the generator is as after plain PyTorch.

    Raises InvalidSchedule where the schedule breaks a rule of ``simulate``.
    """
    simulate(step.graph, schedule)
    code = _Code(step, _repeated_draws(step, schedule))
    for node in _placeholders(step):
        code.receive(node)
    code.run(schedule)
    return code.finish([code.result(i) for i in range(len(step.results))], "PlannedStep")


class PlannedStep:
    """A schedule ready to run on a captured step.

    module      the generated code
    peak_bytes  what it may hold at most, from ``simulate``

    Raises InvalidSchedule for an invalid schedule, BudgetExceeded for one that needs more than ``budget_bytes``.
    """

    def __init__(self, step: Step, schedule: Schedule, budget_bytes: int | None = None) -> None:
        self.step = step
        self.peak_bytes = _checked_peak(step, schedule, budget_bytes)
        self.module = lower(step, schedule)
        self._tangent = _ones(step)
        self._generators = _generators(step)

    def __call__(self, inputs: Inputs, tangent: Tensor | None = None) -> StepResult:
        """Run the step: ``inputs`` in the form ``capture`` was given, ``tangent`` the gradient of the loss (ones).

        Raises InputError where the inputs or the model differ from what was captured.
        """
        bound = bind(self.step, inputs, self._tangent if tangent is None else tangent)
        with _as_captured(self.step), _draws_undone_on_failure(self._generators):
            outputs = self.module.forward(bound)
        loss: Tensor | None = None
        gradients: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for result, tensor in zip(self.step.results, outputs, strict=True):
            if result.kind == "loss":
                loss = tensor
            else:
                (gradients if result.kind == "gradient" else buffers)[result.name] = tensor
        assert loss is not None
        return StepResult(loss, gradients, buffers)


def run_step(step: Step, schedule: Schedule, inputs: Inputs) -> StepResult:
    """Run one training step by a schedule. For more than one step keep a ``PlannedStep``: lowering takes a while."""
    return PlannedStep(step, schedule)(inputs)


class PlannedModule(nn.Module):
    """Trains a model by a schedule: ``loss = m(*inputs); loss.backward(); optimizer.step()``.

    ``m(...)`` takes the inputs ``capture`` was given, targets of the loss included: positional, as keywords, or as the one
    tuple or dict. It returns the loss; ``backward`` fills ``.grad`` of the model's own parameters, adding to what is there.
    Everything else (``state_dict``, ``parameters``, ``to``, attributes) is the model's own, under the same names.

    Buffers change once a call, at its end. The part of the schedule before the backward runs in the call, the rest in
    ``backward``; what is in memory between the two is held by the loss and dropped with it. Without gradients
    (``torch.no_grad``) only the first part runs. A second ``backward`` of one loss, and one with ``create_graph=True``, raise
    InputError; so does one after a tensor it reads was changed in place. After ``eval()`` the call is that of the plain model,
    without loss and plan (unless the model was captured in evaluation mode). Forward hooks of the model itself do not run.

    peak_bytes  the most a step may hold, from ``simulate``; at most the budget. Gradients kept from an earlier step are not
                in it: gradient accumulation needs their bytes on top.

    Raises InvalidSchedule for an invalid schedule, and for one in which the backward starts before the loss and the new
    buffers are there; BudgetExceeded for one that needs more than ``budget_bytes``.
    """

    def __init__(self, step: Step, schedule: Schedule, budget_bytes: int) -> None:
        super().__init__()
        self.training = step.model.training
        self.step = step
        _checked_peak(step, schedule, budget_bytes)
        # The new buffers are written once the loss is there, so none may be given up before and made again.
        early = {_result_value(step, i) for i, result in enumerate(step.results) if result.kind != "gradient"}
        schedule = tuple(s for s in schedule if not (isinstance(s, Free) and s.value in early))
        self._halves = _halves(step, schedule)
        self.peak_bytes = _peak_in_halves(step, schedule, budget_bytes, self._halves)
        index = {(source.kind, source.name): i for i, source in enumerate(step.sources)}
        self._trained = tuple(index["parameter", result.name] for result in step.results if result.kind == "gradient")
        self._generators = _generators(step)
        self._no_tangent = torch.empty(0)

    @property
    def code(self) -> str:
        """The generated code: what a call runs, then what ``backward`` runs."""
        return f"{self._halves.forward.code}\n{self._halves.backward.code}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.step.modes[0] and not self.step.model.training:
            return self.step.model(*args, **kwargs)
        bound = bind(self.step, _inputs(self.step, args, kwargs), detached=False)
        for i, source in enumerate(self.step.sources):
            if source.kind == "tangent":
                bound[i] = self._no_tangent  # autograd brings the real one, and one is all the plan counts
        if not torch.is_grad_enabled():
            return self._run_forward(bound)[0]
        return _Train.apply(self, bound, *(bound[i] for i in self._trained))  # type: ignore[no-untyped-call]

    def _run_forward(self, bound: list[Tensor]) -> tuple[Tensor, _Kept]:
        """Run the first half: the loss, and what the second needs."""
        halves = self._halves
        with _as_captured(self.step), _draws_undone_on_failure(self._generators):
            outputs = halves.forward.forward([bound[i] for i in halves.forward_reads])
            loss, *contents = outputs[: 1 + len(halves.buffers)]
            given = outputs[1 + len(halves.buffers) :] + [bound[i] for i in halves.backward_reads]
            watched = {at: self.step.sources[i].name for at, i in enumerate(halves.backward_reads, len(halves.handed))}
            for buffer, new in zip(halves.buffers, contents, strict=True):
                if buffer.old_at is None:
                    bound[buffer.source].copy_(new)
                    continue
                name = watched.pop(buffer.old_at)  # the backward reads the old content
                if buffer.cloned:
                    given[buffer.old_at] = bound[buffer.source].clone()
                    bound[buffer.source].copy_(new)
                    continue
                _swap(bound[buffer.source], new)
                given[buffer.old_at] = new
                if buffer.new_at is not None:
                    given[buffer.new_at] = bound[buffer.source]
                    watched[buffer.new_at] = name
            if halves.loss_at is not None:
                watched[halves.loss_at] = "the loss"
        return loss.detach(), _Kept(given, [(name, given[at]) for at, name in watched.items()])

    def _run_backward(self, kept: _Kept, tangent: Tensor) -> list[Tensor]:
        """Run the second half: the gradients."""
        given = kept.release()
        if self._halves.tangent_at is not None:
            given[self._halves.tangent_at] = tangent
        with _as_captured(self.step), _draws_undone_on_failure(self._generators):
            gradients: list[Tensor] = self._halves.backward.forward(given)
        return gradients

    # Everything else is the model's.

    def __getattr__(self, name: str) -> Any:
        if "step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.step.model, name)

    def __deepcopy__(self, memo: object) -> PlannedModule:
        raise InputError("a planned module is tied to its model and cannot be copied; copy the model and plan for the copy")

    def extra_repr(self) -> str:
        graph = self.step.graph
        return f"{type(self.step.model).__name__}, {len(graph.ops)} ops, peak {self.peak_bytes:,} bytes"

    def train(self, mode: bool = True) -> PlannedModule:
        self.training = mode
        self.step.model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> PlannedModule:
        self.step.model.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PlannedModule:
        self.step.model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.step.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.step.model.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.step.model.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.model.named_modules(*args, **kwargs)


class _Train(torch.autograd.Function):
    """Ties the two halves of a schedule to autograd: one node between the parameters and the loss."""

    @staticmethod
    def forward(ctx: Any, module: PlannedModule, bound: list[Tensor], *parameters: Tensor) -> Tensor:
        loss, ctx.kept = module._run_forward(bound)
        ctx.module = module
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError("a planned step has no second derivative: call backward without create_graph=True")
        if ctx.kept is None:
            raise InputError("backward ran before on this loss, and its values are gone; run the forward again first")
        kept, ctx.kept = ctx.kept, None
        # No reference to a gradient may stay behind, or autograd would copy it into ``.grad``.
        return None, None, *ctx.module._run_backward(kept, tangent)


class _Kept:
    """What the second half needs, from the end of the first until it starts.

    given    all of it, in the order of the second half
    watched  what in it the caller can reach too, with its name: nobody may change it in the meantime
    """

    def __init__(self, given: list[Tensor], watched: list[tuple[str, Tensor]]) -> None:
        self.given = given
        self.watched = [(name, tensor, _version(tensor)) for name, tensor in watched]

    def release(self) -> list[Tensor]:
        """Everything, for one use; nothing stays here. Raises InputError where something was changed in place."""
        for name, tensor, version in self.watched:
            if _version(tensor) != version:
                raise InputError(f"{name} was changed in place after the forward, but backward reads it; run the forward again")
        given, self.given, self.watched = self.given, [], []
        return given


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _swap(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two tensors of one shape and dtype without memory for a third."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.view(word), b.view(word)
    a.bitwise_xor_(b)
    b.bitwise_xor_(a)
    a.bitwise_xor_(b)


def _inputs(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a call in the form ``capture`` was given."""
    form = step.form
    if form.names is not None:
        if bool(kwargs) == bool(args) or len(args) > 1:
            raise InputError(f"give the inputs {list(form.names)} as keywords or as one dict, as in the captured step")
        return kwargs or args[0]
    if kwargs:
        raise InputError("give the inputs by position, as in the captured step, not as keywords")
    children = 1 if form.spec.is_leaf() else form.spec.num_children
    if len(args) == 1 and (form.spec.is_leaf() or (isinstance(args[0], tuple | list) and len(args[0]) == children)):
        return args[0]
    if len(args) != children:
        raise InputError(f"the step was captured with {children} input(s), not {len(args)}")
    return args


# Two halves: what a call of the module runs, and what its backward runs.


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A buffer the step changes.

    source  index of its placeholder in the captured step
    old_at  where the second half takes its old content; None where it does not read it
    new_at  where the second half takes its new content; likewise
    cloned  the old content needs memory of its own. Otherwise it changes places with the new one, in the tensor that brought
            that; and where the second half reads both, it takes the new content from the buffer
    """

    source: int
    old_at: int | None
    new_at: int | None
    cloned: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Halves:
    """A schedule cut where the backward starts.

    cut             index in the schedule of the first step of the second half
    forward         takes the placeholders ``forward_reads``; returns the loss, the new content of ``buffers``, ``handed``
    backward        takes ``handed`` and the placeholders ``backward_reads``; returns the gradients in the order of results
    handed          names of the values and generator states that go from one to the other
    loss_at         where the second half takes the loss; None where it does not read it
    tangent_at      where it takes the gradient of the loss; likewise
    """

    cut: int
    forward: fx.GraphModule
    forward_reads: tuple[int, ...]
    backward: fx.GraphModule
    backward_reads: tuple[int, ...]
    handed: tuple[str, ...]
    buffers: tuple[_Buffer, ...]
    loss_at: int | None
    tangent_at: int | None


def _halves(step: Step, schedule: Schedule) -> _Halves:
    """Cut a schedule before the first op that depends on the gradient of the loss, and lower both parts."""
    sources = _placeholders(step)
    loss, *others = sorted(range(len(step.results)), key=lambda i: step.results[i].kind != "loss")
    buffers = [i for i in others if step.results[i].kind == "buffer"]
    gradients = [i for i in others if step.results[i].kind == "gradient"]
    cut = _cut(step, schedule, (loss, *buffers))
    before, after = schedule[:cut], schedule[cut:]
    repeated = _repeated_draws(step, schedule)

    first = _Code(step, repeated)
    for node in sources:
        first.receive(node)
    first.run(before)
    early_results = (loss, *buffers)
    values = sorted(_needed(step, after, gradients, {_result_value(step, i) for i in early_results}))
    draws = sorted(first.states.keys() & set(computes(after)))
    early = [first.result(i) for i in early_results]
    handed = [first.value(v) for v in values] + [first.states[op] for op in draws]
    forward_reads = first.drop_unread(sources, [*early, *handed])
    forward = first.finish([*early, *handed], "Forward")

    second = _Code(step, repeated)
    for v in values:
        second.receive(second.maker[v])
    for op in draws:
        second.receive_state(op)
    for node in sources:
        second.receive(node)
    second.run(after)
    returned = [second.result(i) for i in gradients]
    backward_reads = second.drop_unread(sources, returned)
    backward = second.finish(returned, "Backward")

    at = {v: i for i, v in enumerate(values)}
    source_at = {source: len(handed) + i for i, source in enumerate(backward_reads)}
    index = {(source.kind, source.name): i for i, source in enumerate(step.sources)}

    def buffer(i: int) -> _Buffer:
        source = index["buffer", step.results[i].name]
        value = _result_value(step, i)
        old_at, new_at = source_at.get(source), at.get(value)
        # Only a tensor that is all of a storage of its own can take over the old content.
        own = second.maker.get(value) is _results(step)[i] and [_result_value(step, j) for j in early_results].count(value) == 1
        return _Buffer(source, old_at, new_at, old_at is not None and not own)

    return _Halves(
        cut,
        forward,
        forward_reads,
        backward,
        backward_reads,
        tuple(node.name for node in handed),
        tuple(buffer(i) for i in buffers),
        at.get(_result_value(step, loss)),
        source_at.get(index.get(("tangent", ""), -1)),
    )


def _cut(step: Step, schedule: Schedule, early: Iterable[int]) -> int:
    """The first step of the schedule that depends on the gradient of the loss. The results ``early`` must be made by then."""
    graph = step.graph
    depends = {step.value_of[n] for n, s in zip(_placeholders(step), step.sources, strict=True) if s.kind == "tangent"}
    late = set()
    for i, op in enumerate(graph.ops):
        if not depends.isdisjoint(op.inputs):
            depends.update(op.outputs)
            late.add(i)
    cut, begun = next(
        ((at, s.op) for at, s in enumerate(schedule) if isinstance(s, Compute) and s.op in late), (len(schedule), -1)
    )
    ran = set(computes(schedule[:cut]))
    for i in early:
        value = _result_value(step, i)
        if value not in graph.resident and graph.producer[value] not in ran:
            result = step.results[i]
            what = "the loss" if result.kind == "loss" else f"the new content of {result.name}"
            raise InvalidSchedule(
                f"step {cut}: {graph.ops[begun].name} belongs to the backward, but {what} is not made by then, so "
                f"this schedule cannot be cut into a forward and a backward; run it as one with PlannedStep"
            )
    return cut


def _needed(step: Step, schedule: Schedule, results: Iterable[int], kept: Set[int]) -> set[int]:
    """Values that must be there before a part of a schedule: it reads them, or returns them, before it makes them.

    Those in ``kept`` stay in memory from before; one of them that is made again is still read from the first copy.
    """
    resident = step.graph.resident
    needed = {_result_value(step, i) for i in results} - resident
    for s in reversed(schedule):
        if isinstance(s, Compute):
            op = step.graph.ops[s.op]
            needed.difference_update(v for v in op.outputs if v not in kept)
            needed.update(v for v in op.inputs if v not in resident)
    return needed


# Code generation.


class _Code:
    """A straight-line FX graph under construction.

    graph   the code so far
    maker   for each Value an op makes and somebody reads: the node of the captured graph that holds it first
    states  for random ops that run again: the node that holds the state of the generator before the first draw

    Freeing is left to FX's code generation, which drops each name right after its last use, or at once where there is none.
    Names of a value, those of its views included, are used only while the schedule has the value in memory; so nothing
    outlives its Free. A view is made once for each time its value is made, and not at all where it is what it views.
    """

    def __init__(self, step: Step, repeated: frozenset[int]) -> None:
        self.step = step
        self.graph = fx.Graph()
        self.maker = {v: node for op in range(len(step.calls)) for v, node in step.made_by(op).items()}
        self.states: dict[int, fx.Node] = {}
        self._repeated = repeated
        self._made = frozenset(step.calls).union(self.maker.values())
        self._holders: dict[fx.Node, fx.Node] = {}  # of the captured graph -> of this one, as long as its value is there
        self._placed: dict[
            tuple[Any, ...], fx.Node
        ] = {}  # what they hold, by its placement in memory: the same view is made once
        self._present: defaultdict[int, list[fx.Node]] = defaultdict(list)  # by Value: its keys in _holders

    def receive(self, node: fx.Node) -> None:
        """Take what ``node`` of the captured graph holds as an argument."""
        copy = self.graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        self._hold(node, copy)

    def receive_state(self, op: int) -> None:
        """Take the state of the generator before the first draw of ``op`` as an argument."""
        self.states[op] = self.graph.placeholder(f"{self.step.calls[op].name}_state")

    def run(self, schedule: Schedule) -> None:
        for s in schedule:
            if isinstance(s, Compute):
                self._compute(s.op)
            else:
                for node in self._present.pop(s.value, ()):
                    del self._holders[node]
                    self._placed.pop(_placement(node), None)

    def value(self, v: int) -> fx.Node:
        return self._holders[self.maker[v]]

    def result(self, i: int) -> fx.Node:
        """The node that holds entry ``i`` of the captured results."""
        return self._holder(_results(self.step)[i])

    def finish(self, outputs: list[fx.Node], name: str) -> fx.GraphModule:
        """The code, returning the list ``outputs``."""
        self.graph.output(outputs)
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:  # made again with others, not read this time
                self.graph.erase_node(node)
        self.graph.set_codegen(BoxedCodeGen())
        self.graph.lint()
        return fx.GraphModule(self.step.module, self.graph, name)

    def _compute(self, op: int) -> None:
        call = self.step.calls[op]
        copy = self._call(op, call)
        # What is still there stays; its second copy gets no name, so it dies with the call.
        made = {v: node for v, node in self.step.made_by(op).items() if v not in self._present}
        for node in made.values():
            self._hold(node, copy if node is call else self.graph.node_copy(node, lambda _: copy))

    def _call(self, op: int, call: fx.Node) -> fx.Node:
        if op not in self._repeated:
            return self._copy(call)
        where = self._draws_from(call)
        if op not in self.states:
            self.states[op] = self.graph.create_node("call_function", generator_state, (where,), name=f"{call.name}_state")
            return self._copy(call)
        args, kwargs = fx.map_arg((call.args, call.kwargs), self._holder)
        given: Any = (self.states[op], where, call.target, *args)
        copy = self.graph.create_node("call_function", repeat_draw, given, kwargs, name=call.name)
        copy.meta = dict(call.meta)
        return copy

    def _draws_from(self, call: fx.Node) -> fx.Node | torch.device:
        """Where a random call takes its numbers from: the generator it is given, or that of its device."""
        where = _generator_of(call)
        return where if isinstance(where, torch.device) else self._holder(where)

    def _hold(self, node: fx.Node, copy: fx.Node) -> None:
        self._holders[node] = copy
        if node in self.step.value_of:
            self._placed.setdefault(_placement(node), copy)
            value = self.step.value_of[node]
            if value not in self.step.graph.resident:
                self._present[value].append(node)

    def _holder(self, node: fx.Node) -> fx.Node:
        """The node of this code that holds what ``node`` holds; a view is made here where it is not there yet."""
        if node not in self._holders:
            assert node not in self._made, f"{node} is read, but not in memory"
            self._hold(node, self._placed.get(_placement(node)) or self._copy(node))
        return self._holders[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._holder)
        op, target = quickest(node)
        copy = self.graph.create_node(op, target, args, kwargs, node.name)
        copy.meta = dict(node.meta)
        return copy

    def drop_unread(self, sources: Sequence[fx.Node], outputs: Iterable[fx.Node]) -> tuple[int, ...]:
        """Remove the arguments for ``sources`` that nobody reads; the indices of the others."""
        kept = set(outputs)
        reads = []
        for i, node in enumerate(sources):
            copy = self._holders[node]
            if copy.users or copy in kept:
                reads.append(i)
            else:
                self.graph.erase_node(copy)
        return tuple(reads)


def _placement(node: fx.Node) -> tuple[Any, ...]:
    """Where in memory the tensor of a captured node lies; the node itself for what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return (node,)
    signs = value.is_conj(), value.is_neg()
    return storage_key(value), value.shape, value.stride(), value.storage_offset(), value.dtype, signs


def generator_state(where: torch.device | torch.Generator) -> Tensor:
    """State of a generator (of the default one of a device), on the host. Called by generated code."""
    return _generator(where).get_state()


def repeat_draw(state: Tensor, where: torch.device | torch.Generator, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call again with the generator in the state of its first run; the generator is as before afterwards.

    Called by generated code.
    """
    generator = _generator(where)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return call(*args, **kwargs)
    finally:
        generator.set_state(now)


def _generator(where: torch.device | torch.Generator) -> torch.Generator:
    if isinstance(where, torch.Generator):
        return where
    if where.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # the default generators exist only after it
        return torch.cuda.default_generators[torch.cuda.current_device() if where.index is None else where.index]
    return torch.default_generator


def _generator_of(call: fx.Node) -> fx.Node | torch.device:
    """The ``get_attr`` node of the generator a random call is given, or the device whose default generator it uses."""
    for node in call.all_input_nodes:
        if node.op == "get_attr" and isinstance(_attribute(node), torch.Generator):
            return node
    device: torch.device = next(leaf.device for leaf in tree_leaves(call.meta["val"]) if isinstance(leaf, Tensor))
    return device


def _attribute(node: fx.Node) -> object:
    assert isinstance(node.target, str)
    found: object = operator.attrgetter(node.target)(node.graph.owning_module)
    return found


def _generators(step: Step) -> tuple[torch.Generator, ...]:
    """All generators the step draws from."""
    found: dict[torch.Generator, None] = {}
    for i, op in enumerate(step.graph.ops):
        if op.random:
            where = _generator_of(step.calls[i])
            given = where if isinstance(where, torch.device) else _attribute(where)
            assert isinstance(given, torch.device | torch.Generator)
            found[_generator(given)] = None
    return tuple(found)


def _repeated_draws(step: Step, schedule: Schedule) -> frozenset[int]:
    """Random ops that run more than once."""
    return frozenset(i for i, count in Counter(computes(schedule)).items() if count > 1 and step.graph.ops[i].random)


# Shared by PlannedStep and PlannedModule.


def _checked_peak(step: Step, schedule: Schedule, budget_bytes: int | None) -> int:
    """Peak of a schedule. Raises InvalidSchedule where it is none, BudgetExceeded where it needs more than the budget."""
    trace = simulate(step.graph, schedule)
    if budget_bytes is not None and trace.peak_bytes > budget_bytes:
        where = _op_at(step, schedule, trace.peak_step)
        raise BudgetExceeded(where, trace.peak_bytes, budget_bytes, "nothing ran; plan for a larger budget")
    return trace.peak_bytes


def _peak_in_halves(step: Step, schedule: Schedule, budget_bytes: int, halves: _Halves) -> int:
    """Peak of a schedule that keeps its early results, clones of buffers included. Raises BudgetExceeded as above."""
    memory = list(simulate(step.graph, schedule).memory_bytes)
    sources = _placeholders(step)
    cloned = sum(step.graph.values[step.value_of[sources[b.source]]].size_bytes for b in halves.buffers if b.cloned)
    for at in range(max(halves.cut - 1, 0), len(memory)):
        memory[at] += cloned
    worst = max(range(len(memory)), key=memory.__getitem__)
    if memory[worst] > budget_bytes:
        raise BudgetExceeded(
            _op_at(step, schedule, worst),
            memory[worst],
            budget_bytes,
            f"a call keeps the loss and the new buffers until its end; plan for {memory[worst] - budget_bytes:,} bytes less",
        )
    return memory[worst]


def _op_at(step: Step, schedule: Schedule, at: int) -> str:
    return next((step.graph.ops[s.op].name for s in schedule[at:] if isinstance(s, Compute)), step.graph.name)


def _placeholders(step: Step) -> list[fx.Node]:
    return list(step.module.graph.find_nodes(op="placeholder"))


def _results(step: Step) -> tuple[fx.Node, ...]:
    nodes: Any = step.module.graph.output_node().args[0]
    return tuple(nodes)


def _result_value(step: Step, i: int) -> int:
    """The Value of entry ``i`` of the captured results."""
    return step.value_of[_results(step)[i]]


def _ones(step: Step) -> Tensor | None:
    """Gradient of the loss where the caller gives none; None where the step does not read it."""
    for node, source in zip(_placeholders(step), step.sources, strict=True):
        if source.kind == "tangent":
            like: Tensor = node.meta["val"]
            return torch.ones(like.shape, dtype=like.dtype, device=step.device)
    return None


@contextlib.contextmanager
def _as_captured(step: Step) -> Iterator[None]:
    """No gradients, and no autocast on top of the casts that are in the graph."""
    with torch.no_grad():
        if torch.is_autocast_enabled(step.device.type):
            with torch.autocast(step.device.type, enabled=False):
                yield
        else:
            yield


@contextlib.contextmanager
def _draws_undone_on_failure(generators: tuple[torch.Generator, ...]) -> Iterator[None]:
    """Where the run fails, put the generators back, so that it can be repeated."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise
