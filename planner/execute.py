"""A Schedule becomes code: straight-line FX graphs that run it, and a module that trains with them. [torch]

``lower`` turns a captured step and a schedule into one ``fx.GraphModule``: the calls of the schedule in its order, repeated
where it repeats them, each value dropped where it is freed or at its last use, if that comes before. There is no interpreter
and there are no free instructions: the generated code says ``x = None``, and reads as if written by hand.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from graphs.capture import Inputs, Step, bind, bind_again, check_late
from graphs.errors import InputError
from graphs.rewriting.nodes import offset_named, outputs_of
from graphs.torch_private.running import apply_function, left_to_run
from graphs.torch_private.tensors import is_batched_gradient, storage_address
from graphs.tracing.body import region_of
from graphs.tracing.inputs import is_of
from planner.execution.draws import generators_of, repeat_draw, undone_on_failure
from planner.execution.halves import Halves, checked_peak, cut_in_halves, fit_halves
from planner.execution.lowering import Code, placeholders, result_value
from planner.execution.undo import Undo, versions
from planner.schedule import Free, Schedule
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

    @classmethod
    def of(cls, step: Step, outputs: Sequence[Tensor]) -> Self:
        """From the tensors that ``step.results`` names, in that order."""
        loss: Tensor | None = None
        gradients: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for result, tensor in zip(step.results, outputs, strict=True):
            if result.kind == "loss":
                loss = tensor
            else:
                (gradients if result.kind == "gradient" else buffers)[result.name] = tensor
        assert loss is not None
        return cls(loss, gradients, buffers)

    @torch.no_grad()
    def write_buffers(self, model: nn.Module) -> None:
        """Give the buffers of ``model`` their new content."""
        for name, content in self.buffers.items():
            operator.attrgetter(name)(model).copy_(content)


def lower(step: Step, schedule: Schedule) -> fx.GraphModule:
    """The straight-line code of a schedule.

    ``lower(step, schedule).forward(bind(step, inputs))``, under ``torch.no_grad``, returns the list of what ``step.results``
    names. The call empties the list it is given (boxed convention), so that it holds nothing the code has dropped.

    At every moment the storages alive are at most those that ``simulate`` counts. A random op that runs again repeats its
    first draw: the states of its generator around it are kept on the host (10 KB an op on CPU, 32 bytes on CUDA; bookkeeping,
    no part of the budget) and afterwards the generator is as after plain PyTorch.

    Raises InvalidSchedule where the schedule breaks a rule of ``simulate``.
    """
    simulate(step.graph, schedule)
    code = Code(step, schedule)
    for node in placeholders(step):
        code.receive(node)
    code.run(schedule)
    code.returns([code.result(i) for i in range(len(step.results))])
    return code.finish("PlannedStep")


class PlannedStep:
    """A schedule ready to run on a captured step.

    module      the generated code
    peak_bytes  what it may hold at most, from ``simulate``

    Raises InvalidSchedule for an invalid schedule, BudgetExceeded for one that needs more than ``budget_bytes``.
    """

    def __init__(self, step: Step, schedule: Schedule, budget_bytes: int | None = None) -> None:
        self.step = step
        self.peak_bytes = checked_peak(step, schedule, budget_bytes)
        self.module = lower(step, schedule)
        self._tangent = unit_tangent(step)
        self._generators = generators_of(step)

    def __call__(self, inputs: Inputs, tangent: Tensor | None = None) -> StepResult:
        """Run the step: ``inputs`` in the form ``capture`` was given, ``tangent`` the gradient of the loss (ones).

        Raises InputError where the inputs or the model differ from what was captured.
        """
        bound = bind(self.step, inputs, self._tangent if tangent is None else tangent)
        with as_captured(self.step), undone_on_failure(self._generators):
            return StepResult.of(self.step, self.module.forward(bound))


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
    (``torch.no_grad``) only the first part runs; where the forward asks whether there are any (``torch.is_grad_enabled()``), such
    a call is refused (InputError). A second ``backward`` of one loss, and one with ``create_graph=True``, raise InputError; so
    does one after a tensor it reads was changed in place. Where a call fails (no memory, Ctrl-C), buffers and generators are as
    before it; where its backward fails, too, unless something else has changed them in between. After ``eval()`` the call is that
    of the plain model, without loss and plan (unless the model was captured in evaluation mode). Forward hooks of the model
    itself do not run, and ``torch.compile`` leaves a call as it is. Where the model's forward leaves tensors in attributes (an
    auxiliary loss), there is after a call what raises InputError when used. Threads may call it: calls and backwards of one model
    run one after the other.

    step        what was captured
    code        the generated code: what a call runs, then what ``backward`` runs
    peak_bytes  the most a step may hold, from ``simulate``; at most the budget. Gradients kept from an earlier step are not
                in it: gradient accumulation needs their bytes on top.

    Raises InvalidSchedule for an invalid schedule, and for one in which the backward starts before the loss and the new
    buffers are there; BudgetExceeded for one that needs more than ``budget_bytes``.
    """

    step: Step
    peak_bytes: int
    code: str

    _runs_a_plan = True  # so it is not captured as a part of another model
    _OWN: ClassVar[Mapping[str, str]] = {"step": "_step", "peak_bytes": "_peak_bytes", "code": "_code"}

    def __init__(self, step: Step, schedule: Schedule, budget_bytes: int) -> None:
        super().__init__()
        self.training = step.model.training
        self._step = step
        # ``torch.func.functional_call`` puts others in here for a call.
        self._parameters, self._buffers = step.model._parameters, step.model._buffers
        checked_peak(step, schedule, budget_bytes)
        # The new buffers are written once the loss is there, so none may be given up before and made again.
        early = {result_value(step, i) for i, result in enumerate(step.results) if result.kind != "gradient"}
        schedule = tuple(s for s in schedule if not (isinstance(s, Free) and s.value in early))
        cut = cut_in_halves(step, schedule)
        self._halves, self._peak_bytes, room_bytes = fit_halves(step, schedule, budget_bytes, cut)
        sources = placeholders(step)
        sizes = [step.graph.values[step.value_of[sources[buffer.source]]].size_bytes for buffer in cut.buffers]
        self._room_for_one = room_bytes >= max(sizes, default=0)
        # What shares memory with something else is written one by one, in order, and so is what is read as the conjugate or the
        # negative of what is there: PyTorch copies no lists of those.
        written = [sources[buffer.source].meta["val"] for buffer in cut.buffers]
        written += [outputs_of(step.module.graph)[i].meta["val"] for i, r in enumerate(step.results) if r.kind == "buffer"]
        one_by_one = any(b.cloned for b in cut.buffers) or any(t.is_conj() or t.is_neg() for t in written)
        self._room_for_all = 0 < sum(sizes) <= room_bytes and not one_by_one
        self._watched = _watched(step, self._halves)
        index = {source.name: i for i, source in enumerate(step.sources) if source.kind in ("parameter", "buffer")}
        self._trained = tuple(index[step.results[i].name] for i in cut.gradients)
        self._generators = generators_of(step)
        self._unbatched = _unbatched(step, self._halves)
        self._tangents = tuple(i for i, source in enumerate(step.sources) if source.kind == "tangent")
        self._no_tangent = torch.empty(0)
        # Nothing outside has seen the forward until its results are written, so what is edited may be looked for beside it.
        self._checks_late = not any(op.effect for op in step.graph.ops)
        parameters = dict(step.model.named_parameters())
        self._changed = next((r.name for r in step.results if r.kind == "buffer" and r.name in parameters), None)
        self._one_at_a_time = _LOCKS.setdefault(step.model, threading.RLock())
        self._built = True

    @property
    def _code(self) -> str:
        return f"{self._halves.forward.code}\n{self._halves.backward.code}"

    @left_to_run  # a compiler would fuse the ops and put them in another order: neither bytes nor bits would be the plan's
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._step.modes[0] and not self._step.model.training:
            return self._step.model(*args, **kwargs)
        check_region(self._step)
        self._check_sharding()
        if not torch.is_grad_enabled():
            check_gradient_mode(self._step)
        with self._one_at_a_time:
            inputs = inputs_of_call(self._step, args, kwargs)
            unchecked = bind_again(self._step, inputs) if self._checks_late else None
            bound = bind(self._step, inputs, detached=False) if unchecked is None else unchecked
            check = None if unchecked is None else functools.partial(check_late, self._step, bound)
            for i in self._tangents:
                bound[i] = self._no_tangent  # autograd brings the real one, and one is all the plan counts
            undo = Undo(self._generators)
            try:
                if torch.is_grad_enabled():
                    loss = apply_function(_Train, self, undo, check, bound, *[bound[i] for i in self._trained])
                else:
                    loss = self._run_forward(bound, undo, check)[0]
                for leftover in self._step.leftovers:
                    leftover.after_step()
                return loss
            except BaseException as error:
                undo.undo()
                if isinstance(error, RuntimeError) and (why := self._step.reformatted) is not None:
                    error.add_note(why)
                raise

    def _check_sharding(self) -> None:
        if self._changed is not None and any(kind.__name__ == "FSDPModule" for kind in type(self).__mro__):
            raise InputError(
                f"{self._step.graph.name} changes {self._changed} in its forward, which fully_shard would undo: it shards what "
                f"was there before; make that change after the step, on the sharded parameter, or use DistributedDataParallel"
            )

    def _run_forward(self, bound: list[Tensor], undo: Undo, check: Callable[[], None] | None = None) -> tuple[Tensor, Kept]:
        """Run the first half: the loss, and what the second needs. ``check``: whether that counts, before anything is written."""
        halves = self._halves
        with as_captured(self._step):
            outputs = halves.forward.forward([bound[i] for i in halves.forward_reads])
            if check is not None:
                check()
            loss = outputs[0]
            given = outputs[1 + len(halves.buffers) :] + [bound[i] for i in halves.backward_reads]
            contents = outputs[len(halves.buffers) : 0 : -1]
            del outputs
            places = [bound[buffer.source] for buffer in halves.buffers]
            copies = undo.replace_all(places, contents[::-1]) if self._room_for_all else None
            for i, buffer in enumerate(halves.buffers):
                place, new = places[i], contents.pop()
                if buffer.new_at is not None and not buffer.cloned:  # the backward takes the new content from the buffer
                    given[buffer.new_at] = place
                if copies is not None:
                    old = copies[i]
                else:
                    old = undo.replace(place, new) if buffer.cloned or self._room_for_one else undo.exchange(place, new)
                del new
                if buffer.old_at is not None:
                    given[buffer.old_at] = old
            undo.seal()
        names, at = self._watched
        return loss.detach(), Kept(given, names, [given[i] for i in at], undo)

    def _run_backward(self, kept: Kept, tangent: Tensor) -> list[Tensor]:
        """Run the second half: the gradients."""
        given = kept.release()
        if self._halves.tangent_at is not None:
            given[self._halves.tangent_at] = tangent
        undone = undone_on_failure(self._generators) if self._generators else _NOTHING
        with as_captured(self._step), undone:
            gradients: list[Tensor] = self._halves.backward.forward(given)
            return gradients

    # Everything else is the model's, and what it registers under one of these names, too: libraries look for it here.

    def __getattr__(self, name: str) -> Any:
        if "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self, self._OWN[name]) if self._is_own(name) else getattr(self._step.model, name)

    def _is_own(self, name: str) -> bool:
        model = self._step.model
        registered = name in model._parameters or name in model._buffers or name in model._modules
        return name in self._OWN and not registered

    def __setattr__(self, name: str, value: Any) -> None:
        if "_built" in self.__dict__ and self._is_own(name):
            raise InputError(f"{name} is the planned module's own; set that of the model on the model itself")
        if "_built" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            if name == "training" and "_built" in self.__dict__:
                self._step.model.training = bool(value)
        elif self._is_a_note(name, value):
            self.__dict__[name] = value
        else:
            setattr(self._step.model, name, value)

    def _is_a_note(self, name: str, value: object) -> bool:
        """Whether it is what a library notes about this module: that it has prepared it, the ``forward`` it has wrapped."""
        model = self._step.model
        known = not name.startswith("_") or hasattr(model, name) or self._step.fingerprint.asked_for(name)
        return not known and not isinstance(value, Tensor | nn.Module)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._step.model, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._step.model.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._step.model.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._step.model.add_module(name, module)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            "a planned module is tied to its model and can be neither copied nor pickled; copy the model and plan for the copy, "
            "or save its state_dict() and the plan (plan.save)"
        )

    def extra_repr(self) -> str:
        graph = self._step.graph
        return f"{type(self._step.model).__name__}, {len(graph.ops)} ops, peak {self._peak_bytes:,} bytes"

    def train(self, mode: bool = True) -> PlannedModule:
        self._step.model.train(mode)
        self.training = self._step.model.training
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> PlannedModule:
        self._step.model.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PlannedModule:
        self._step.model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.model.load_state_dict(*args, **kwargs)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        return self._step.model.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        return self._step.model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        return self._step.model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        return self._step.model.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """As a part of another module, whose ``load_state_dict`` looks for parts where this one has none of its own."""

        def load(part: nn.Module, prefix: str) -> None:
            part._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            for name, child in part._modules.items():
                if child is not None:
                    load(child, f"{prefix}{name}.")

        load(self._step.model, prefix)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._step.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._step.model.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._step.model.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This module, then the parts of the model."""
        for name, part in self._step.model.named_modules(*args, **kwargs):
            yield name, self if part is self._step.model else part


# One for each model: its buffers are read at the beginning of a call and written at its end, and draws made again set generators
# back for a moment. A call, or a backward, of another thread waits.
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


class _Train(torch.autograd.Function):
    """Ties the two halves of a schedule to autograd: one node between the parameters and the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        module: PlannedModule,
        undo: Undo,
        check: Callable[[], None] | None,
        bound: list[Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        loss, ctx.kept = module._run_forward(bound, undo, check)
        ctx.module = module
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.module._one_at_a_time:
            kept = ctx.kept
            try:
                if torch.is_grad_enabled():
                    raise InputError("a planned step has no second derivative: call backward without create_graph=True")
                if ctx.module._unbatched is not None and is_batched_gradient(tangent):
                    raise InputError(
                        f"with is_grads_batched=True the backward runs under vmap, where {ctx.module._unbatched}; call "
                        f"torch.autograd.grad once for each of the gradients"
                    )
                if kept is None:
                    raise InputError(
                        "backward ran before on this loss, and its values are gone, which retain_graph=True does not change "
                        "here; run the forward again first"
                    )
                ctx.kept = None
                # No reference to a gradient may stay behind, or autograd would copy it into ``.grad``.
                return None, None, None, None, *ctx.module._run_backward(kept, tangent)
            except BaseException:
                ctx.kept = None
                if kept is not None:
                    kept.undo.undo()
                raise


class Kept:
    """What the second half needs, from the end of the first until it starts.

    given           all of it, in the order of the second half
    names, watched  what in it the caller can reach too: nobody may change it in the meantime
    undo            takes the call back
    """

    def __init__(self, given: list[Tensor], names: tuple[str, ...], watched: list[Tensor], undo: Undo) -> None:
        self.given = given
        self.undo = undo
        self.names = names
        self.watched = watched
        self._versions = versions(watched)
        self._storages = list(map(storage_address, watched))

    def release(self) -> list[Tensor]:
        """Everything, for one use; nothing stays here. Raises InputError where something was changed in place, or given another
        storage: PyTorch's own backward then reads the old one where an op has saved a view, and the new one elsewhere."""
        for before, now, what in (
            (self._versions, versions(self.watched), "changed in place after the forward"),
            (self._storages, list(map(storage_address, self.watched)), "given other memory after the forward (.data = ...)"),
        ):
            if now != before:
                name = next(n for n, a, b in zip(self.names, now, before, strict=True) if a != b)
                raise InputError(f"{name} was {what}, but backward reads it; run the forward again")
        given, self.given, self.watched = self.given, [], []
        return given


def inputs_of_call(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a call in the form ``capture`` was given."""
    form = step.form
    if form.names is not None:
        if (args and (kwargs or len(args) > 1 or not isinstance(args[0], Mapping))) or not (args or kwargs or not form.names):
            raise InputError(f"give the inputs {list(form.names)} as keywords or as one dict, as in the captured step")
        return args[0] if args else kwargs
    if kwargs:
        raise InputError("give the inputs by position, as in the captured step, not as keywords")
    if len(args) == 1 and (isinstance(args[0], Tensor) if form.spec.is_leaf() else not is_of(form, args)):
        return args[0]  # all of them as one
    children = 1 if form.spec.is_leaf() else form.spec.num_children
    if len(args) != children:
        raise InputError(f"the step was captured with {children} input(s), not {len(args)}")
    return args


def unit_tangent(step: Step) -> Tensor | None:
    """Gradient of the loss where the caller gives none; None where the step does not read it."""
    for node, source in zip(placeholders(step), step.sources, strict=True):
        if source.kind == "tangent":
            like: Tensor = node.meta["val"]
            return torch.ones(like.shape, dtype=like.dtype, device=step.device)
    return None


def _watched(step: Step, halves: Halves) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What the second half takes that the caller can reach too: names, and places among what it takes."""
    watched = {at: step.sources[i].name for at, i in enumerate(halves.backward_reads, len(halves.handed))}
    for buffer in halves.buffers:
        if buffer.new_at is not None and not buffer.cloned:
            watched[buffer.new_at] = step.sources[buffer.source].name
        if buffer.old_at is not None:
            del watched[buffer.old_at]
    if halves.loss_at is not None:
        watched[halves.loss_at] = "the loss"
    return tuple(watched.values()), tuple(watched)


def _unbatched(step: Step, halves: Halves) -> str | None:
    """Why a backward cannot make many gradients at once, if it cannot."""
    if any(node.target is repeat_draw for node in halves.backward.graph.nodes):
        return "the random ops that this plan runs again cannot repeat their draws"
    scatter = torch.ops.aten.as_strided_scatter.default
    backward = (call for op, call in zip(step.graph.ops, step.calls, strict=True) if op.backward)
    if any(call.target is scatter and offset_named(call) is not None for call in backward):
        return "the gradient of as_strided from a given offset on has wrong numbers"
    return None


_NOTHING = contextlib.nullcontext()


def check_region(step: Step) -> None:
    """Refuse another autocast region than the one captured: the casts are in the graph. Raises InputError."""
    now = region_of(None, step.device)
    if now not in (None, step.autocast):
        then = "outside of autocast" if step.autocast is None else f"under autocast of {step.autocast}"
        raise InputError(
            f"{step.graph.name} was captured {then}, but is called under autocast of {now}; plan it in that region "
            f"(autocast={now}), or leave the region for the call"
        )


def check_gradient_mode(step: Step) -> None:
    """Refuse a call without gradients where the forward may do something else then. Raises InputError."""
    if step.askers:
        raise InputError(
            f"{step.graph.name} is planned as it computes with gradients, and its forward asks whether they are recorded (in "
            f"{', '.join(step.askers)}); without gradients call the model itself, which is the step's: module.step.model"
        )


def as_captured(step: Step) -> contextlib.AbstractContextManager[None]:
    """No gradients, and no autocast on top of the casts that are in the graph."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(step.device.type):
        return _plainly(step)
    return _NOTHING  # as in most calls: autograd has seen to it


@contextlib.contextmanager
def _plainly(step: Step) -> Iterator[None]:
    with torch.no_grad():
        if torch.is_autocast_enabled(step.device.type):
            with torch.autocast(step.device.type, enabled=False):
                yield
        else:
            yield
