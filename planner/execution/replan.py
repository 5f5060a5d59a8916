"""A planned module that plans again for inputs of other shapes. [torch]"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor

from graphs.capture import Inputs, capture
from graphs.errors import BranchChanged
from graphs.torch_private.names import tree_flatten
from graphs.torch_private.running import left_to_run
from graphs.torch_private.tensors import is_functorch_wrapped, storage_key
from graphs.tracing.binding import looks_channels_last
from graphs.tracing.inputs import in_order, plain
from planner.execute import PlannedModule, check_region, inputs_of_call
from planner.plan import COSTS, plan, with_costs
from planner.result import Plan

log = logging.getLogger("belady")


class ReplanningModule(PlannedModule):
    """``PlannedModule`` that keeps one plan per input shape, all for the same model and the same bytes.

    Inputs of a shape that is new are captured and planned for when they come first, with ``options`` (of ``planner.plan``;
    by default the method, the seed and the kind of costs of the first plan), and one line about it is logged (logger "belady",
    level INFO). A number or text among the inputs that is new counts as a new shape, and so do inputs of which others share their
    memory. A shape has several plans, at most ``MOST_BRANCHES``, where the model asks its inputs in its forward and goes on
    otherwise than for the example; the one used last is tried first.
    ``code`` and ``peak_bytes`` are those of the first plan; ``planned`` is how many there are.

    A call raises what ``plan`` raises for its inputs: InfeasibleBudget where they need more than the budget, CaptureError.
    """

    planned: int

    MOST_BRANCHES = 8
    _OWN = {**PlannedModule._OWN, "planned": "_planned"}  # noqa: RUF012
    _plans: dict[Hashable, list[PlannedModule | None]] = {}  # noqa: RUF012  # every object has its own; None: this module itself
    _plan: Plan | None = None
    _options: Mapping[str, Any] = {}

    def __init__(self, first: Plan, options: Mapping[str, Any]) -> None:
        step, schedule = first.step, first.schedule
        assert step is not None and schedule is not None
        super().__init__(step, schedule, first.budget_bytes)
        self._plan = first
        costs = step.graph.costs if step.graph.costs in COSTS else "auto"  # those that the caller gave are for these shapes
        self._options = {"method": first.method, "seed": first.seed, "costs": costs, **options}
        like: dict[int, Tensor] = {}
        memory: dict[int, int] = {}
        for source, node in zip(step.sources, step.module.graph.find_nodes(op="placeholder"), strict=True):
            if source.kind == "input":
                like[source.index], memory[source.index] = node.meta["val"], step.value_of[node]
        leaves = range(len(step.form.labels))
        kinds = (_kind(like.get(i, step.form.fixed.get(i))) for i in leaves)
        self._plans = {(str(step.form.spec), *kinds, _sharing(map(memory.get, leaves))): [None]}

    @property
    def _planned(self) -> int:
        return sum(map(len, self._plans.values()))

    @left_to_run
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._step.modes[0] and not self._step.model.training:
            return super().forward(*args, **kwargs)
        check_region(self._step)  # a new shape would be captured for the region around this call
        self._check_sharding()  # other plans are not what is sharded
        inputs = in_order(self._step.form, inputs_of_call(self._step, args, kwargs))
        leaves, spec = tree_flatten(inputs)
        if any(isinstance(leaf, Tensor) and is_functorch_wrapped(leaf) for leaf in leaves):
            return super().forward(*args, **kwargs)  # which refuses them
        shape: Hashable = (str(spec), *map(_kind, leaves), _sharing(map(_memory, leaves)))
        with self._one_at_a_time:
            plans = self._plans.setdefault(shape, [])
            for i, other in enumerate(plans):
                try:
                    loss = super().forward(*args, **kwargs) if other is None else other(*args, **kwargs)
                except BranchChanged as changed:
                    if not changed.by_example or i + 1 == self.MOST_BRANCHES:
                        raise
                else:
                    plans.insert(0, plans.pop(i))
                    return loss
            new = self._plan_for(inputs)
            plans.insert(0, new)
        return new(*args, **kwargs)

    def _plan_for(self, inputs: Inputs) -> PlannedModule:
        before, options = cast(Plan, self._plan), dict(self._options)
        self._step.fingerprint.check()  # what else was edited is no matter of shapes
        name, loss = self._step.graph.name, self._step.body.loss
        # Autograd hands the gradients to the hooks of parameters here, as it does with the first plan.
        step = capture(self._step.model, inputs, loss=loss, name=name, autocast=self._step.autocast, gradient_hooks=True)
        step = with_costs(step, options.pop("costs"))
        found = plan(step, before.budget_bytes, **options)
        module = found.module()
        sizes = ", ".join(str(tuple(leaf.shape)) for leaf in tree_flatten(plain(inputs))[0] if isinstance(leaf, Tensor))
        log.info(
            "planned %s again for inputs of shape %s: %s bytes of the same budget of %s bytes, %.2f %% overhead, found in "
            "%.1f s; %d plans now",
            name, sizes, f"{module.peak_bytes:,}", f"{before.budget_bytes:,}", 100 * (found.overhead or 0), found.wall_s,
            self._planned + 1,
        )  # fmt: skip
        return module


def _kind(leaf: object) -> Hashable:
    """What a step is captured for: shape, dtype and layout of a tensor, a number or text itself."""
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    last = looks_channels_last(leaf.shape, leaf.stride())  # also where it is contiguous
    return tuple(leaf.shape), leaf.dtype, None if leaf.is_contiguous() else leaf.stride(), last


def _memory(leaf: object) -> int | None:
    return storage_key(leaf) if isinstance(leaf, Tensor) else None


def _sharing(memory: Iterable[int | None]) -> Hashable:
    """Which tensors share their memory, which a step counts once: for each the place of the first that has the same."""
    first: dict[int | None, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(memory))
