"""What a trace answers a model that asks its data, and the check that a run would be answered the same. [torch]"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from graphs.errors import BranchChanged
from graphs.rewriting.operators import define_operator
from graphs.torch_private.names import no_dispatch
from graphs.tracing.checks import passes_with
from graphs.tracing.constants import Constants, KnownFor
from graphs.tracing.refusals import innermost, place_among

aten = torch.ops.aten


def _check(asked: Tensor, answer: list[int], place: str, by_example: bool) -> None:
    """What ``belady::answered`` runs."""
    now = asked.reshape(-1).tolist()
    if now != answer:
        raise BranchChanged(place, _as_asked(answer, asked), _as_asked(now, asked), by_example=by_example)


def _check_fake(asked: Tensor, answer: list[int], place: str, by_example: bool) -> None:
    """Nothing is made."""


define_operator("answered(Tensor asked, int[] answer, str place, bool by_example) -> ()", _check, _check_fake)
fx.has_side_effect(torch.ops.belady.answered.default)

# Questions of numbers, with the answer where they are finite.
_IF_FINITE: Mapping[Any, bool] = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
}

# Comparisons of a draw from [0, 1) with 0, with the answer where it is another number, as nearly all are.
_UNLESS_ZERO: Mapping[Any, bool] = {aten.gt.Scalar: True, aten.le.Scalar: False}

_OF_TRUTH_VALUES = {
    aten.bitwise_and,
    aten.bitwise_not,
    aten.bitwise_or,
    aten.bitwise_xor,
    aten.eq,
    aten.logical_and,
    aten.logical_not,
    aten.logical_or,
    aten.logical_xor,
    aten.mul,
    aten.ne,
}


class Answers(Constants):  # type: ignore[no-untyped-call]
    """Answers what depends on the data, too: as checks want it, as for finite numbers, and as for the example. With each such
    answer ``belady::answered`` gets into the graph and refuses a run that needs another one: a guess may be useless, never wrong.

    Answered are truth values and a few integers, how many places a mask chooses among them. What depends on draws or on the
    values of parameters stays unknown otherwise.
    """

    def __init__(self, examples: Iterable[tuple[Tensor, Tensor]], integers: KnownFor, is_left: Callable[[], bool]) -> None:
        """``examples``: stand-ins, each with the tensor of the example that it stands for. ``integers``: for which calls their
        integers and truth values are known; other numbers differ in each batch, and only tell which guesses are useless.
        ``is_left``: whether a question is better not answered where it is asked now."""
        super().__init__()
        self._is_left = is_left
        self._not_always: MutableMapping[Tensor, KnownFor] = WeakIdKeyDictionary()
        self._integers = 0  # that were asked for
        # By the content of a mask, until it is written to. Only indexing sees these places, so nothing writes to them.
        self._chosen_by: MutableMapping[Tensor, Sequence[Tensor]] = WeakIdKeyDictionary()
        with no_dispatch():
            for stand_in, real in examples:
                if real.numel() <= self.LIMIT:
                    is_number = real.is_floating_point() or real.is_complex()
                    self._know(stand_in, real.detach().clone(), KnownFor.THE_EXAMPLE if is_number else integers)

    def _known_for(self, tensors: Iterable[Tensor]) -> KnownFor:
        kinds = (self._not_always.get(t, KnownFor.EVERY_CALL) if t in self._real else KnownFor.ASSUMED for t in tensors)
        return min(kinds, default=KnownFor.EVERY_CALL)

    def _wrote(self, tensors: Sequence[Tensor], known_for: KnownFor) -> None:
        for tensor in self._sharing(tensors):
            self._chosen_by.pop(self._real[tensor], None)
            if known_for is not KnownFor.EVERY_CALL:
                self._not_always[tensor] = min(known_for, self._known_for([tensor]))

    def _know(self, tensor: Tensor, content: Tensor, known_for: KnownFor = KnownFor.EVERY_CALL) -> None:
        super()._know(tensor, content)
        for each in (tensor, getattr(tensor, "elem", None)):
            if isinstance(each, Tensor) and known_for is not KnownFor.EVERY_CALL:
                self._not_always[each] = known_for

    def _answer(self, func: Any, args: Any, kwargs: Any, asked: Sequence[Tensor], *, known: bool) -> Any:
        known_for = self._known_for(asked)
        answer = super()._answer(func, args, kwargs, asked, known=known)
        if known and known_for is KnownFor.EVERY_CALL:
            return answer
        is_number = func is aten._local_scalar_dense.default
        if not known or known_for is KnownFor.THE_EXAMPLE:
            known_for = KnownFor.ASSUMED
            frames = traceback.extract_stack()
            answer = None if is_number and asked[0].dtype != torch.bool else passes_with(frames, innermost(frames))
        if not isinstance(answer, int) or not self._few([answer]):
            return None
        if is_number:
            self._ask(asked[0], [answer], known_for)
        elif asked[0].shape == asked[1].shape:
            alike = torch.eq(*asked) if func is aten.equal.default else torch.isclose(*args, **kwargs)
            self._ask(alike.all(), [answer], known_for)
        else:
            return None
        return answer

    def _sized(self, func: Any, args: Any, kwargs: Any, read: Sequence[Tensor], *, known: bool) -> Any:
        if known and self._sizes_asked(read):
            return super()._sized(func, args, kwargs, read, known=known)
        if func is aten.nonzero.default:
            return self._counted(args[0])
        if func is aten.masked_select.default and args[1] in self._real:
            data, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            with no_dispatch():
                content = self._real[args[1]].expand(mask.shape)
            self._know(mask, content, self._known_for([args[1]]))
            places = self._counted(mask)
            return None if places is None else data[places.unbind(1)]
        return None

    def sizes_in(self, tensor: Tensor) -> Tensor | None:
        return super().sizes_in(tensor) if tensor in self._real and self._sizes_asked([tensor]) else None

    def _chosen(self, mask: Tensor) -> Sequence[Tensor] | None:
        constant = super()._chosen(mask)
        if constant is not None or mask not in self._real:
            return constant
        content = self._real[mask]
        if content not in self._chosen_by:
            rows = self._counted(mask)
            if rows is None:
                return None
            with no_dispatch():
                contents = self._real[rows].unbind(1)
            self._chosen_by[content] = rows.unbind(1)
            for place, where in zip(self._chosen_by[content], contents, strict=True):
                self._know(place, where, self._known_for([rows]))
        return self._chosen_by[content]  # the same in the derivative

    def _counted(self, mask: Tensor) -> Tensor | None:
        """The places that a mask chooses, one a row. How many is asked for, and which stays data; None where it is not known."""
        known_for = self._known_for([mask])
        if mask not in self._real or not 0 < mask.numel() <= self.LIMIT or known_for is KnownFor.THE_EXAMPLE:
            return None
        with no_dispatch():
            chosen = self._real[mask].nonzero()
        if not self._few([len(chosen)]):
            return None
        self._ask(aten.count_nonzero.default(mask), [len(chosen)], known_for)
        places: Tensor = aten.nonzero_static.default(mask, size=len(chosen))
        self._know(places, chosen, known_for)
        return places

    def _sizes_asked(self, tensors: Iterable[Tensor]) -> bool:
        """Whether shapes may follow from what is in these tensors: a few sizes are asked for, and constants from then on."""
        asked = [tensor for tensor in tensors if self._known_for([tensor]) is not KnownFor.EVERY_CALL]
        if any(tensor.numel() > self.MOST_INTEGERS or self._known_for([tensor]) is KnownFor.THE_EXAMPLE for tensor in asked):
            return False
        with no_dispatch():
            contents = [self._real[tensor].reshape(-1).tolist() for tensor in asked]
        sizes = list(itertools.chain.from_iterable(contents))
        if not all(type(size) is int for size in sizes) or not self._few(sizes):
            return False
        for tensor, content in zip(asked, contents, strict=True):
            if tensor in self._not_always:  # not twice
                self._ask(tensor, content, self._not_always.pop(tensor))
        return True

    def _few(self, answers: Sequence[int]) -> bool:
        """Whether no more integers than sizes were asked for, with these answers, operators can take them, and they are given."""
        self._integers += sum(type(answer) is int for answer in answers)
        return (
            self._integers <= self.MOST_INTEGERS and all(-(2**63) <= answer < 2**63 for answer in answers) and not self._is_left()
        )

    def _ask(self, tensor: Tensor, answer: Sequence[int], known_for: KnownFor) -> None:
        ask(tensor, answer, by_example=known_for is KnownFor.LIKE_EXAMPLE)

    def _contents(
        self, func: Any, args: Any, kwargs: Any, read: Sequence[Tensor], made: Sequence[Tensor], *, known: bool
    ) -> tuple[list[Tensor], KnownFor] | None:
        usual = self._usual(func, args)
        if usual is not None and not known:
            with no_dispatch():
                return [self._spread(torch.tensor(usual, device=made[0].device), made[0])], KnownFor.ASSUMED
        if known and any(map(self._is_spread, read)):
            element = self._of_elements(func, args, kwargs, made)
            return None if element is None else ([element], self._known_for(read))
        found = super()._contents(func, args, kwargs, read, made, known=known)
        if usual is not None and found is not None and found[1] is KnownFor.THE_EXAMPLE:
            with no_dispatch():
                if bool((found[0][0] == usual).all()):  # the example does not speak against it
                    return found[0], KnownFor.ASSUMED
        return found

    def _usual(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What a call nearly always returns, in each element; None of other calls."""
        if func in _UNLESS_ZERO and args[0] in self._drawn and self._as_compared(*args) == 0:
            return _UNLESS_ZERO[func]
        return _if_finite(func, args)

    # Truth values of large tensors of which all are assumed to be the same, such as whether each number is finite.

    def _spread(self, element: Tensor, like: Tensor) -> Tensor:
        """One truth value as all of a tensor, in memory of its own: one element of it where the tensor is large."""
        spread = element.clone().expand(like.shape)
        return spread.clone() if like.numel() <= self.LIMIT else spread

    def _is_spread(self, tensor: Tensor) -> bool:
        content = self._real[tensor]
        strides = zip(content.shape, content.stride(), strict=True)
        assumed = content.dtype == torch.bool and self._known_for([tensor]) is KnownFor.ASSUMED
        return assumed and content.numel() > 1 and all(n == 1 or stride == 0 for n, stride in strides)

    def _of_elements(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> Tensor | None:
        """What a call makes of tensors that are one truth value each; None of calls that are not known to make one again."""
        read = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable or len(made) != 1 or not all(self._is_spread(t) or t.numel() == 1 for t in read):
            return None
        with no_dispatch(), torch.no_grad():
            elements = [self._real[tensor].as_strided((), ()) for tensor in read]
            if func.is_view and made[0].dtype == torch.bool:  # in the same memory
                return elements[0].expand(made[0].shape)
            if func.overloadpacket in (aten.any, aten.all, aten.clone):
                return self._spread(elements[0], made[0])
            if func.overloadpacket in (aten.sum, aten.count_nonzero) and not elements[0]:
                return torch.zeros(made[0].shape, dtype=made[0].dtype, device=made[0].device)
            if func.overloadpacket in _OF_TRUTH_VALUES and made[0].dtype == torch.bool and len(read) == len(args):
                return self._spread(func(*elements), made[0])
        return None


def ask(tensor: Tensor, answer: Sequence[int], *, by_example: bool = False) -> None:
    """Have each run compare the answer."""
    place = place_among(traceback.extract_stack())
    torch.ops.belady.answered(tensor, list(map(int, answer)), place, by_example)


def _if_finite(func: Any, args: Sequence[Any]) -> bool | None:
    """What a call returns, in each element, of numbers that are neither infinite nor NaN; None of other calls."""
    if func in _IF_FINITE:
        return _IF_FINITE[func]
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.eq.Scalar, aten.ne.Scalar) and isinstance(args[1], float) and not math.isfinite(args[1]):
        return bool(func is aten.ne.Scalar)
    return None


def _as_asked(answer: Sequence[int], asked: Tensor) -> bool | tuple[int, ...]:
    return bool(answer[0]) if asked.dtype == torch.bool else tuple(answer)


def answer_and_place(node: fx.Node) -> tuple[bool | tuple[int, ...], str]:
    """What the model is told by one of the calls that compare answers, and where it asks."""
    asked, answer, place, _ = node.args
    return _as_asked(cast(Sequence[int], answer), cast(fx.Node, asked).meta["val"]), str(place).removeprefix(", at ")


def asked_in(graph: fx.Graph) -> list[fx.Node]:
    """The calls that compare answers with those in the trace."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.belady.answered.default))
