"""From the steps of a Schedule to the nodes of a straight-line FX graph. [torch]"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphs.capture import Step
from graphs.rewriting.nodes import outputs_of
from graphs.torch_private.names import BoxedCodeGen
from graphs.torch_private.tensors import copied, extent, storage_key
from planner.execution.calls import quickest
from planner.execution.draws import drawn, draws_from, generator_node, generator_state, repeat_draw
from planner.execution.statistics import AT_ONCE, Update, without_statistics
from planner.schedule import Compute, Schedule, computes


class Code:
    """A straight-line FX graph under construction, for a schedule or a part of it (``schedule`` is all of it, which tells
    which random ops run again).

    as_captured  call each operator as the captured graph does, for a compiler that reads the code; otherwise in the quickest way

    graph   the code so far
    maker   for each Value an op makes and somebody reads: the node of the captured graph that holds it first
    states  for random ops that run again: the node that holds what ``drawn`` says of the first draw
    ran     the op of each node that runs one

    Freeing is left to FX's code generation, which drops each name right after its last use, or at once where there is none.
    Names of a value, those of its views included, are used only while the schedule has the value in memory; so nothing
    outlives its Free. A view is made once for each time its value is made, and not at all where it is what it views.
    """

    def __init__(self, step: Step, schedule: Schedule, *, as_captured: bool = False) -> None:
        self.step = step
        self._as_captured = as_captured
        self.graph = fx.Graph()
        self.maker = {v: node for op in range(len(step.calls)) for v, node in step.made_by(op).items()}
        self.states: dict[int, fx.Node] = {}
        self.ran: dict[fx.Node, int] = {}
        runs = Counter(computes(schedule))
        self._repeated = frozenset(op for op, count in runs.items() if count > 1 and step.graph.ops[op].random)
        self._made = frozenset(step.calls).union(self.maker.values())
        self._holders: dict[fx.Node, fx.Node] = {}  # of the captured graph -> of this one, as long as its value is there
        self._placed: dict[tuple[Any, ...], fx.Node] = {}  # the same, by placement in memory: equal views are made once
        self._present: defaultdict[int, list[fx.Node]] = defaultdict(list)  # by Value: its keys in _holders
        self._updates: dict[int, Update] = {}  # by op, until its first run
        self._copies: dict[int, tuple[fx.Node, ...]] = {}  # the statistics that it writes to

    def receive(self, node: fx.Node) -> fx.Node:
        """Take what ``node`` of the captured graph holds as an argument, which is returned."""
        copy = self.graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        self._hold(node, copy)
        return copy

    def receive_state(self, op: int) -> fx.Node:
        """Take what ``drawn`` says of the first draw of ``op`` as an argument."""
        self.states[op] = self.graph.placeholder(f"{self.step.calls[op].name}_state")
        return self.states[op]

    def copy_statistics(self, updates: Mapping[int, Update]) -> None:
        """Have batch norms write their new statistics, in their first runs, into copies of the old ones that are made for some of
        them at once. The ops in the order in which they run."""
        self._updates = dict(updates)

    def run(self, schedule: Schedule) -> None:
        """Write the code of these steps."""
        for s in schedule:
            if isinstance(s, Compute):
                self._compute(s.op)
            else:
                for node in self._present.pop(s.value, ()):
                    del self._holders[node]
                    self._placed.pop(placement(node), None)

    def value(self, v: int) -> fx.Node:
        """The node that holds Value ``v``."""
        return self._holders[self.maker[v]]

    def result(self, i: int) -> fx.Node:
        """The node that holds entry ``i`` of the captured results."""
        return self.holder(outputs_of(self.step.module.graph)[i])

    def holder(self, node: fx.Node) -> fx.Node:
        """The node of this code that holds what ``node`` holds; a view is made here where it is not there yet."""
        if node not in self._holders:
            assert node not in self._made, f"{node} is read, but not in memory"
            self._hold(node, self._placed.get(placement(node)) or self._copy(node))
        return self._holders[node]

    def copied(self, node: fx.Node) -> fx.Node:
        """A copy of what ``node`` holds, in memory of its own and laid out alike."""
        holder = self.holder(node)
        value: Tensor = holder.meta["val"]
        if torch.empty_like(value).stride() == value.stride():
            copy = self.graph.call_function(torch.ops.aten.clone.default, (holder,))
        else:  # with the gaps between its elements, or those that lie on one another once
            length = extent(value.shape, value.stride())
            span = self.graph.call_function(torch.ops.aten.as_strided.default, (holder, (length,), (1,)))
            held = self.graph.call_function(torch.ops.aten.clone.default, (span,))
            layout = list(value.shape), list(value.stride()), 0
            copy = self.graph.call_function(torch.ops.aten.as_strided.default, (held, *layout))
        copy.meta["val"] = value
        return copy

    def returns(self, outputs: list[Any]) -> None:
        """That is all the code, and it returns the list ``outputs``."""
        self.graph.output(outputs)
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:  # made again with others, not read this time
                self.graph.erase_node(node)
        if self._as_captured:
            return
        for node in self.graph.nodes:
            if (other := without_statistics(node)) is not None:
                target, args, count = other
                with self.graph.inserting_before(node):
                    alone = self.graph.call_function(target, args)
                alone.op, alone.target = quickest(alone)
                alone.meta = {**node.meta, "val": node.meta["val"][:count]}
                node.replace_all_uses_with(alone)
                self.graph.erase_node(node)

    def drop_unread(self, arguments: Sequence[fx.Node]) -> tuple[int, ...]:
        """Remove those of these arguments that nobody reads, which would stay in memory until the code returns; the indices of
        the others."""
        reads = tuple(i for i, argument in enumerate(arguments) if argument.users)
        for argument in arguments:
            if not argument.users:
                self.graph.erase_node(argument)
        return reads

    def finish(self, name: str) -> fx.GraphModule:
        """The code as a module."""
        if not self._as_captured:
            self.graph.set_codegen(BoxedCodeGen())
        self.graph.lint()
        return fx.GraphModule(self.step.module, self.graph, name)

    def _compute(self, op: int) -> None:
        call = self.step.calls[op]
        update, copies = self._updates.get(op), self._statistics_for(op)
        copy = self._call(op, call) if update is None else self._update(call, update, copies)
        self.ran[copy] = op
        # What is still there stays; its second copy gets no name, so it dies with the call.
        made = {v: node for v, node in self.step.made_by(op).items() if v not in self._present}
        self._updates.pop(op, None)
        there = {} if update is None else dict(zip(update.new, copies, strict=True))
        for node in made.values():
            self._hold(node, there.get(node) or (copy if node is call else self.graph.node_copy(node, lambda _: copy)))

    def _statistics_for(self, op: int) -> tuple[fx.Node, ...]:
        """The copies of statistics that ``op`` writes to; none where it makes its own."""
        if op not in self._updates:
            return ()
        if op not in self._copies:
            some = [each for each in self._updates if each not in self._copies][:AT_ONCE]
            old = [self.holder(node) for each in some for node in self._updates[each].old]
            made = self.graph.call_function(copied, (old,))
            parts = [self.graph.call_function(operator.getitem, (made, i)) for i in range(len(old))]
            for part, node in zip(parts, old, strict=True):
                part.meta = dict(node.meta)
            self._copies.update((each, tuple(parts[2 * i : 2 * i + 2])) for i, each in enumerate(some))
        return self._copies[op]

    def _update(self, call: fx.Node, update: Update, statistics: tuple[fx.Node, ...]) -> fx.Node:
        """A batch norm that writes its new statistics to these."""
        given = dict(zip(update.old, statistics, strict=True))
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda node: given.get(node) or self.holder(node))
        copy = self.graph.create_node("call_function", update.target, args, kwargs, call.name)
        copy.op, copy.target = quickest(copy)
        copy.meta = dict(call.meta)
        return copy

    def _call(self, op: int, call: fx.Node) -> fx.Node:
        if op not in self._repeated:
            return self._copy(call)
        given_generator = generator_node(call)
        where: Any = draws_from(call) if given_generator is None else self.holder(given_generator)
        if op not in self.states:
            before = self.graph.create_node("call_function", generator_state, (where,), name=f"{call.name}_before")
            copy = self._copy(call)
            self.states[op] = self.graph.create_node("call_function", drawn, (before, where), name=f"{call.name}_state")
            return copy
        args, kwargs = fx.map_arg((call.args, call.kwargs), self.holder)
        given: Any = self.states[op], where, call.target, *args
        copy = self.graph.create_node("call_function", repeat_draw, given, kwargs, name=call.name)
        copy.meta = dict(call.meta)
        return copy

    def _hold(self, node: fx.Node, copy: fx.Node) -> None:
        self._holders[node] = copy
        if node in self.step.value_of:
            self._placed.setdefault(placement(node), copy)
            value = self.step.value_of[node]
            if value not in self.step.graph.resident:
                self._present[value].append(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.holder)
        op, target = (node.op, node.target) if self._as_captured else quickest(node)
        copy = self.graph.create_node(op, target, args, kwargs, node.name)
        copy.meta = dict(node.meta)
        return copy


def placement(node: fx.Node) -> tuple[Any, ...]:
    """Where in memory the tensor of a captured node lies; the node itself for what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return (node,)
    signs = value.is_conj(), value.is_neg()
    return storage_key(value), value.shape, value.stride(), value.storage_offset(), value.dtype, signs


def placeholders(step: Step) -> list[fx.Node]:
    return list(step.module.graph.find_nodes(op="placeholder"))


def result_value(step: Step, i: int) -> int:
    """The Value of entry ``i`` of the captured results."""
    return step.value_of[outputs_of(step.module.graph)[i]]
