"""A model, its loss and its inputs become one traced graph; the model stays as it is. [torch]"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn

from graphs.as_eager.attention import padding_refused
from graphs.as_eager.ctc import TargetsInARow, ctc_traced
from graphs.as_eager.draws_in_place import draws_laid_out
from graphs.as_eager.grouped import grouped_products_traced
from graphs.as_eager.layouts import kernels_layouts
from graphs.as_eager.listed import lists_traced
from graphs.as_eager.packed import packed_traced
from graphs.as_eager.products import products_traced
from graphs.as_eager.recurrent import recurrent_layers_traced
from graphs.as_eager.variances import variances_checked_later
from graphs.as_eager.written import writes_laid_out
from graphs.errors import CaptureError
from graphs.rewriting.nodes import calls_foreign
from graphs.rewriting.rewrites import read_sources_directly
from graphs.torch_private.compiling import as_if_compiling, is_to_be_told, next_to_tell, places_of, told_to_compile
from graphs.torch_private.joint import Joint, selective_checkpoints_off, trace_joint
from graphs.torch_private.kernels import attention_as_eager
from graphs.torch_private.names import DATA_DEPENDENT, FakeTensor, FunctionalTensor, TreeSpec, tree_unflatten
from graphs.torch_private.patching import patched
from graphs.torch_private.running import around_backwards, holding
from graphs.torch_private.stand_ins import Given, noting_traced, to_fake
from graphs.tracing.answers import Answers
from graphs.tracing.body import Body
from graphs.tracing.constants import Constants, KnownFor
from graphs.tracing.refusals import leaves_torch, reads_an_earlier_call, refusal, written_late
from graphs.tracing.targets import PaddedTargets
from graphs.watching.generators import generators_kept, seeding_refused
from graphs.watching.leaks import Caches
from graphs.watching.leftovers import Leftover
from graphs.watching.outside import Since, left_outside
from graphs.watching.watch import Watch

Beside = contextlib.AbstractContextManager[object]

_GRADIENT = cast(Any, Tensor.grad).__get__  # a forward may not read it


def trace(
    name: str,
    body: Body,
    state: Mapping[str, Tensor],
    leaves: list[Any],
    spec: TreeSpec,
    where: torch.device,
    autocast: torch.dtype | None,
) -> tuple[Joint, Watch, list[Leftover], frozenset[int]]:
    """Trace forward, loss and backward of ``body`` on the inputs with these leaves; ``state`` is that of its model. What comes
    last are the indices of inputs that the forward makes require a gradient.

    Nothing is changed: not the model, whatever its forward assigns, and no generator; but for what any first call sets up (see
    ``graphs.watching``). Raises CaptureError.
    """
    attempts = _Attempts(name, body, state, leaves, spec, where, autocast)
    try:
        found = _by_some_way(name, attempts)
    except TargetsInARow:
        attempts.pads_targets = True
        found = _by_some_way(name, attempts)
    return *found, frozenset(attempts.differentiated)


def _by_some_way(name: str, attempts: _Attempts) -> tuple[Joint, Watch, list[Leftover]]:
    ways = _Ways(attempts)
    for beside, told in ways:
        try:
            with as_if_compiling() if told is None else told_to_compile(told, ways.asking):
                return attempts.once(beside)
        except Exception as error:
            ways.note(error)
    assert ways.failed is not None
    raise refusal(name, ways.failed) from ways.failed


class _Ways:
    """Ways to trace, one after the other: what is known of the data, and which functions are told that they are compiled.

    Those that are leave out checks and shortcuts for which they look at data, and kernels whose fakes refuse what they take.
    Answered data comes last: a step that asks nothing is for every batch, one that asks what only the example answers for few.
    """

    def __init__(self, attempts: _Attempts) -> None:
        self.failed: Exception | None = None  # what to tell where all have failed
        self.asking: set[CodeType] = set()  # functions that ask whether they are compiled
        self._attempts = attempts
        self._told: set[CodeType] = set()
        self._in_vain: set[CodeType] = set()  # who looks at the same data when told
        self._latest: Exception | None = None  # how the latest attempt failed
        self._leaves = self._has_left = False  # whether a question has been left to such a function, in this attempt and in any
        self._is_constant = False  # whether that was with constants known and nobody told

    def __iter__(self) -> Iterator[tuple[Callable[[], Beside], Collection[CodeType] | None]]:
        """What is around the calls of an attempt, and whom to tell; None: everybody."""
        answers = self._attempts.answers
        assumed = functools.partial(answers, KnownFor.THE_EXAMPLE)
        yield contextlib.nullcontext, ()
        self._is_constant = True
        yield Constants, ()
        self._is_constant = False
        yield from self._telling(Constants)
        if not self._is_of_data:  # and whoever knows another way has to be told, wherever that is
            yield Constants, None
            return
        yield assumed, ()
        if self._told:
            yield assumed, self._told
        yield from self._telling(assumed)
        leaving = functools.partial(answers, KnownFor.LIKE_EXAMPLE, self._is_left)
        yield leaving, self._told
        yield from self._telling(leaving)
        if self._told or self._has_left:
            yield functools.partial(answers, KnownFor.LIKE_EXAMPLE), ()

    def note(self, error: Exception) -> None:
        """Take in how the latest attempt failed. Raises where no other will do."""
        if self._is_of_data and isinstance(error, CaptureError):
            raise error
        says_more = isinstance(error, DATA_DEPENDENT) or leaves_torch(error) or self._is_constant
        if self.failed is None or (self._is_of_data and says_more and not self._leaves):
            self.failed = error
        self._latest, self._leaves = error, False

    @property
    def _is_of_data(self) -> bool:
        """Whether attempts have failed at data that the model asks for."""
        return self.failed is None or isinstance(self.failed, DATA_DEPENDENT)

    def _is_left(self) -> bool:
        """Whether a question is left to a function that asks less where it is told that it is compiled."""
        is_left = is_to_be_told(self.asking, self._told | self._in_vain)
        if is_left:
            self._leaves = self._has_left = True
        return is_left

    def _telling(self, beside: Callable[[], Beside]) -> Iterator[tuple[Callable[[], Beside], Collection[CodeType]]]:
        """Tell one function more after each failure, for as long as there is one; not if it fails there all the same: then it has
        asked for another reason."""
        while (failed := self._latest) is not None:
            code = next_to_tell(failed, self.asking, self._told | self._in_vain)
            if code is None:
                return
            self._told.add(code)
            yield beside, self._told
            assert self._latest is not None  # else there would be no other attempt
            if places_of(self._latest) == places_of(failed):
                self._told.remove(code)
                self._in_vain.add(code)


class _OthersDifferentiated(Exception):
    """A forward makes inputs require a gradient of which that was not known."""


class _Attempts:
    """Attempts at one trace, each with a new record of what the forward does to its model."""

    def __init__(
        self,
        name: str,
        body: Body,
        state: Mapping[str, Tensor],
        leaves: list[Any],
        spec: TreeSpec,
        where: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self.name = name
        self.body = body
        self.state = state
        self.leaves = leaves
        self.spec = spec
        self.where = where
        self.autocast = autocast
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._parameters = {key for key, _ in body.model.named_parameters()}
        self._watch, self._caches = Watch(name, body), Caches(body)
        # Buffers that the forward gives other tensors. It may read the old ones: these are kept apart.
        self._assigned: set[str] = set()
        self._given: set[str] = set()  # what the forward has given other memory, through ``.data``
        self.differentiated: set[int] = set()  # slots of inputs that the forward makes require a gradient
        self._held: dict[str, Tensor] = {}  # what the model holds during the latest call and its backward
        self._in_call = False
        self._since: Since | None = None
        self._here = threading.get_ident()
        self._examples: list[tuple[Tensor, Tensor]] = []  # stand-ins of the latest call, with what they stand for
        self._knowing: Callable[[], Beside] = contextlib.nullcontext
        self._beside: Beside = contextlib.nullcontext()  # that of the latest call
        self.pads_targets = False  # whether labels that a mask chooses are padded for a CTC loss

    def answers(self, integers: KnownFor, is_left: Callable[[], bool] = lambda: False) -> Answers:
        """Around a call: the model may branch on its data. ``integers``: for which calls those of the example are known."""
        return Answers(self._examples, integers, is_left)

    def _sizes_in(self, tensor: Tensor) -> Tensor | None:
        """What is in a tensor of a few sizes; None where that is not known."""
        return self._beside.sizes_in(tensor) if isinstance(self._beside, Constants) else None

    @contextlib.contextmanager
    def _as_eager(self) -> Iterator[None]:
        """What is traced computes what eager execution does."""
        with contextlib.ExitStack() as stack:
            for each in (
                ctc_traced(of_one_in_a_row=self.pads_targets),
                PaddedTargets() if self.pads_targets else contextlib.nullcontext(),
                recurrent_layers_traced(),
                lists_traced(),
                packed_traced(self._sizes_in),
                grouped_products_traced(),
                products_traced(),
                variances_checked_later(),
                kernels_layouts(),
                draws_laid_out(),
                writes_laid_out(),
                selective_checkpoints_off(),
                attention_as_eager(),
                padding_refused(self.name),
                _padding_not_warned_of(),
            ):
                stack.enter_context(each)
            yield

    def once(self, beside: Callable[[], Beside] = contextlib.nullcontext) -> tuple[Joint, Watch, list[Leftover]]:
        """Trace. ``beside``: what is known of the data around a call, and so what the model may branch on."""
        while True:
            with contextlib.suppress(_OthersDifferentiated):
                return self._once(beside)

    def _once(self, beside: Callable[[], Beside]) -> tuple[Joint, Watch, list[Leftover]]:
        watch = self._watch = Watch(self.name, self.body)
        self._knowing = beside
        self._given = set()
        with (
            _plain_context(self.where),
            _untouched(watch),
            self._as_eager(),
            around_backwards(self._backward),
            noting_traced() as made,
            Since(made) as since,
            seeding_refused(self.name, self.where) as look_at_generators,
        ):
            count = len(self.state)
            fakes = to_fake([*self.state.values(), *(self.leaves[i].detach() for i in self._slots)])
            try:
                self._since = since
                joint = trace_joint(self._forward, fakes[:count], fakes[count:], look_at_generators, calls_foreign)
                self._held, self._examples = {}, []  # else what they hold is looked for as if it were left somewhere
                since.end()
            except BaseException as error:
                since.thaw()  # what remembers was there before
                failed = isinstance(error, Exception)  # and not interrupted
                kept = watch.explain() if failed and reads_an_earlier_call(error) else None  # before its containers are put back
                self._caches.forget_traced()
                kept = kept or watch.explain()
                if kept is None or not failed or isinstance(error, CaptureError | _OthersDifferentiated):
                    raise
                raise CaptureError(kept) from error
        changed = {list(self.state)[i] for kind, i in filter(None, joint.results) if kind == "state"}
        assert self._given <= {f"model.{key}" for key in changed}, "the tracer called the forward more often than twice"
        watch.settle()
        outside = left_outside(since, [*watch.own(), *self._caches.own()], self._caches.lengths())
        if outside.traced:
            self._caches.forget_traced(outside.traced | outside.doubtful)
            outside.take_out()
            for leftover in outside.leftovers:
                watch.pass_over(leftover)
        if self._assigned:
            read_sources_directly(joint.module.graph)
        return joint, watch, [*watch.leftovers, *outside.leftovers]

    def _forward(self, state_now: list[Tensor], tensors_now: list[Tensor]) -> Tensor:
        """The loss, with these stand-ins for state and inputs."""
        filled = list(self.leaves)
        # What requires a gradient in the tracer's eyes gets one of the step, as only parameters should.
        tensors_now = [t.detach() if i in self.differentiated else t for i, t in zip(self._slots, tensors_now, strict=True)]
        for i, tensor in zip(self._slots, tensors_now, strict=True):
            filled[i] = tensor
        given = {f"model.{key}": tensor for key, tensor in zip(self.state, state_now, strict=True)}
        self._held = given
        buffers = [(given[f"model.{key}"], t) for key, t in self.state.items() if not isinstance(t, nn.Parameter)]
        self._examples = [*zip(tensors_now, (self.leaves[i] for i in self._slots), strict=True), *buffers]
        passed = {key: tensor.clone() if key in self._assigned else tensor for key, tensor in given.items()}
        after = dict[str, Any](passed)
        # The backward stays outside of the region, as it does in a training loop.
        region = contextlib.nullcontext() if self.autocast is None else torch.autocast(self.where.type, dtype=self.autocast)
        self._in_call = True
        if self._since is not None:
            self._since.call()
        try:
            self._beside = self._knowing()
            contents = Given(passed, tensors_now)
            with region, self._beside, self._watch.call(contents), holding(self.body, after):
                loss = self.body(tree_unflatten(filled, self.spec))
        finally:
            self._in_call = False
        assert isinstance(loss, Tensor)
        differentiated = {i for i, tensor in zip(self._slots, tensors_now, strict=True) if tensor.requires_grad}
        if not differentiated <= self.differentiated:
            self.differentiated |= differentiated
            raise _OthersDifferentiated
        _refuse_other_gradients(self.name, loss)
        self._given |= contents.write(self._given)
        for key in given:
            own = key.removeprefix("model.")
            if after[key] is not passed[key]:
                _assigned(self.name, own, given[key], after[key], is_parameter=own in self._parameters)
                self._assigned.add(key)
            elif passed[key].requires_grad and not self.state[own].requires_grad:
                raise CaptureError(
                    f"{self.name} makes {own} require a gradient in its forward, or changes it by what requires one; change it "
                    f"under torch.no_grad(), and call requires_grad_ outside of the step"
                )
        return loss

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        """Around each pass of autograd: that of the step, in which hooks and functions of somebody's own find in the model what
        the forward found there, and others inside of it or of a forward."""
        if threading.get_ident() != self._here:  # somebody else trains meanwhile
            yield
            return
        name, held = self.name, self._held
        gradients = {key: _GRADIENT(tensor) for key, tensor in held.items() if tensor.is_leaf}
        if self._in_call:
            yield
        else:
            self._in_call, now = True, dict(held)
            if self._since is not None:
                self._since.backward = len(self._since.made)
            try:
                with self._beside, self._watch.backward(), holding(self.body, now):
                    yield
            finally:
                self._in_call = False
            for key, tensor in held.items():
                if now[key] is not tensor:
                    raise CaptureError(written_late(name, key.removeprefix("model.")))
        for key, gradient in gradients.items():
            if held[key].is_leaf and _GRADIENT(held[key]) is not gradient:
                raise CaptureError(
                    f"{name} calls backward in its forward or in a backward of its own, which adds to the gradient of "
                    f"{key.removeprefix('model.')} where a captured step would not see it; use torch.autograd.grad, and return "
                    f"what belongs to a parameter from the backward"
                )


def _refuse_other_gradients(name: str, loss: Tensor) -> None:
    """A step has the gradients of its parameters only, which are stand-ins here. From the loss, a teacher that was called without
    gradients is not reached."""
    seen, todo = set[Any](), list[Any]([loss.grad_fn])
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise CaptureError(
                f"{name} has a reentrant checkpoint, whose backward begins another one that a captured step would not see; call "
                f"checkpoint with use_reentrant=False, or leave it out: a plan saves memory in its place"
            )
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None  # functions may have any attribute
        if leaf is not None and not isinstance(leaf, FunctionalTensor | FakeTensor):
            raise CaptureError(
                f"{name} uses a tensor of shape {tuple(leaf.shape)} that requires a gradient but is no parameter of the model; "
                f"register it as an nn.Parameter, or detach it (on the parameters of a teacher: requires_grad_(False))"
            )


def _assigned(name: str, key: str, before: Tensor, after: object, *, is_parameter: bool) -> None:
    """A forward that assigns a buffer anew means the same as one that writes into it. A new parameter may require a gradient, and
    with a tensor of several names that are not all given the new one, these are no more one."""
    same = isinstance(after, Tensor) and (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device)
    if is_parameter or not same or not isinstance(after, Tensor):
        raise CaptureError(f"{name} replaces {key} in its forward by something else; write into it in place")
    with torch.no_grad():
        before.copy_(after)


@contextlib.contextmanager
def _plain_context(where: torch.device) -> Iterator[None]:
    """Gradients on, autocast off."""
    ambient = torch.is_autocast_enabled(where.type)
    torch.set_autocast_enabled(where.type, False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_enabled(where.type, ambient)


@contextlib.contextmanager
def _padding_not_warned_of() -> Iterator[None]:
    """Have models of transformers go without a look into their token ids, to warn of padding for which no mask is given: a trace
    has none to look into."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        yield
        return
    with patched(library.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args, **kwargs: None):
        yield


@contextlib.contextmanager
def _untouched(watch: Watch) -> Iterator[None]:
    """Undo what a traced forward leaves behind: attributes of modules, and draws from the generators that are not torch's."""
    with generators_kept():
        try:
            yield
        finally:
            watch.undo()
