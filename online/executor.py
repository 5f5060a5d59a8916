"""The online engine on real tensors: the ops of a captured step run as it decides, under its budget. [torch]

Each op becomes one Python function, generated once per step: it makes the views its arguments need from the stored tensors,
calls the operator and stores the tensors that somebody reads. Views and tuples die with the call, so what is stored is
exactly what the engine counts; evicting a value drops its tensors.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphs.capture import Inputs, Step, bind
from graphs.rewriting.nodes import attribute, outputs_of
from planner.execute import StepResult, as_captured, unit_tangent
from planner.execution.calls import quickest
from planner.execution.draws import Where, drawn, draws_from, generator_state, generators_of, repeat_draw, undone_on_failure
from planner.execution.lowering import placement

Store = list[Tensor | None]  # tensors of placeholders and of what ops made, by place; None while not in memory


@dataclass(frozen=True, slots=True)
class Outcome(StepResult):
    """What one training step computed; see ``StepResult``."""

    @torch.no_grad()
    def write(self, model: nn.Module) -> Tensor:
        """Do to ``model`` what a plain step does: add to ``.grad``, change the buffers. Returns the loss."""
        for name, gradient in self.gradients.items():
            parameter = operator.attrgetter(name)(model)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.write_buffers(model)
        return self.loss


class Execution(contextlib.AbstractContextManager["Execution"]):
    """Drives the ops of one training step for an ``Engine``. Enter it around the run; ``outcome`` gives the results.

    Random ops keep the states their generator had before and after their first draw (on the host: 10 KB an op on CPU, 32 bytes on
    CUDA; no part of the budget) and repeat that draw when they run again. Where the run fails the generators are put back.

    Raises InputError where the inputs or the model differ from what was captured.
    """

    def __init__(self, step: Step, inputs: Inputs, tangent: Tensor | None = None) -> None:
        self._step = step
        self._code = _code_of(step)
        self._places = self._code.places
        self._runs = self._code.runs.copy()
        for op, where in self._code.draws_from.items():
            self._runs[op] = functools.partial(self._draw, op, where)
        self._store: Store = [None] * self._code.size
        self._store[: len(step.sources)] = bind(step, inputs, self._code.ones if tangent is None else tangent)
        self._states: dict[int, Tensor] = {}
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Execution:
        self._context.enter_context(as_captured(self._step))
        self._context.enter_context(undone_on_failure(self._code.generators))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._store.clear()
        return self._context.__exit__(*error)

    def compute(self, op: int) -> None:
        """See ``online.engines.engine.Driver``."""
        self._runs[op](self._store)

    def _draw(self, op: int, where: Where, store: Store) -> None:
        """Run a random op."""
        run = self._code.runs[op]
        if op in self._states:
            repeat_draw(self._states[op], where, run, store)
        else:
            before = generator_state(where)
            run(store)
            self._states[op] = drawn(before, where)

    def free(self, storage: int) -> None:
        """See ``online.engines.engine.Driver``."""
        for place in self._places[storage]:
            self._store[place] = None

    def outcome(self) -> Outcome:
        """Loss, gradients and buffers, once everything has run."""
        return Outcome.of(self._step, self._code.results(self._store))


class _Code:
    """One generated function for each op of a step.

    size        places in the store; the first are those of the placeholders
    places      for each value that is not resident, where the tensors are stored that hold it
    draws_from  for each random op, what it draws from
    generators  all generators it draws from
    runs        runs[op](store) runs the op
    results     results(store): the entries of the captured output
    ones        gradient of the loss where the caller gives none: part of what is resident, so made once and kept
    """

    def __init__(self, step: Step) -> None:
        self.places: list[tuple[int, ...]] = [()] * len(step.graph.values)
        self.generators = generators_of(step)
        self.draws_from: dict[int, Where] = {}
        self.ones = unit_tangent(step)
        self._constants: dict[str, object] = {}
        self._held: dict[fx.Node, str] = {}  # expression for what a node holds
        self._lying: dict[tuple[Any, ...], str] = {}  # the same for stored tensors, by where in memory they lie
        bases = list(step.module.graph.find_nodes(op="placeholder"))
        bases += [node for op in range(len(step.calls)) for node in step.made_by(op).values()]
        for place, node in enumerate(bases):
            self._held[node] = self._lying[placement(node)] = f"s[{place}]"
            value = step.value_of[node]
            if value not in step.graph.resident:
                self.places[value] += (place,)
        self.size = len(bases)
        for node in step.module.graph.find_nodes(op="get_attr"):
            self._held[node] = self._constant(attribute(node))

        lines: list[str] = []
        for op, call in enumerate(step.calls):
            if step.graph.ops[op].random:
                self.draws_from[op] = draws_from(call)
            lines += [f"def op{op}(s):  # {call.name}", *self._views(step.views(op)), *self._run(step, op)]
        lines += ["def results(s):", *self._views(step.result_views())]
        lines += [f"    return {self._expression(outputs_of(step.module.graph))}"]
        space = dict(self._constants)
        exec(compile("\n".join(lines), f"<online {step.graph.name}>", "exec"), space)
        self.runs: list[Callable[[Store], None]] = [space[f"op{op}"] for op in range(len(step.calls))]  # type: ignore[misc]
        self.results: Callable[[Store], list[Tensor]] = space["results"]  # type: ignore[assignment]
        self._held.clear()  # nodes know their module, and what is remembered for a module must not keep it alive
        self._lying.clear()

    def _views(self, nodes: tuple[fx.Node, ...]) -> list[str]:
        """Lines that make views in local variables, each once; what lies just as a stored tensor is that tensor."""
        lines = []
        made: dict[tuple[Any, ...], str] = {}
        for at, node in enumerate(nodes):
            where = placement(node)
            held = self._lying.get(where) or made.get(where)
            if held is None:
                held = made[where] = f"v{at}"
                lines.append(f"    {held} = {self._called(node)}")
            self._held[node] = held
        return lines

    def _run(self, step: Step, op: int) -> list[str]:
        """Lines that run an op and store what somebody reads."""
        call, made = step.calls[op], step.made_by(op).values()
        if list(made) == [call]:
            return [f"    {self._held[call]} = {self._called(call)}"]
        lines = [f"    r = {self._called(call)}"]
        for item in made:  # what is still there stays, and its second copy dies with r
            lines.append(f"    if {self._held[item]} is None: {self._held[item]} = r[{item.args[1]!r}]")
        return lines

    def _called(self, node: fx.Node) -> str:
        kind, target = quickest(node)
        arguments = [self._expression(argument) for argument in node.args]
        arguments += [f"{name}={self._expression(argument)}" for name, argument in node.kwargs.items()]
        if kind == "call_method":
            return f"{arguments[0]}.{target}({', '.join(arguments[1:])})"
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _expression(self, argument: object) -> str:
        """Python for an argument of a call."""
        if isinstance(argument, fx.Node):
            return self._held[argument]
        if isinstance(argument, tuple | list):
            inside = ", ".join(self._expression(entry) for entry in argument)
            return f"[{inside}]" if isinstance(argument, list) else f"({inside},)" if inside else "()"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{key!r}: {self._expression(entry)}" for key, entry in argument.items()) + "}"
        if isinstance(argument, slice):
            return f"slice({', '.join(self._expression(e) for e in (argument.start, argument.stop, argument.step))})"
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, content: object) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = content
        return name


_codes: weakref.WeakKeyDictionary[fx.GraphModule, _Code] = weakref.WeakKeyDictionary()


def _code_of(step: Step) -> _Code:
    """Generated once for all steps that share a module: they differ in costs only."""
    if step.module not in _codes:
        _codes[step.module] = _Code(step)
    return _codes[step.module]
