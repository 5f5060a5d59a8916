"""What a trace answers a model that asks its data, and the check that a run would be answered the same. [torch]"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from graphs.errors import BranchChanged
from graphs.torch_private.names import no_dispatch, tree_map_only
from graphs.tracing.constants import Constants, KnownFor
from graphs.tracing.refusals import is_check, place_among

aten = torch.ops.aten

_library = torch.library.Library("belady", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("answered(Tensor asked, int[] answer, str place, bool by_example) -> ()")  # type: ignore[no-untyped-call]


def _check(asked: Tensor, answer: list[int], place: str, by_example: bool) -> None:
    """What ``belady::answered`` runs."""
    now = asked.reshape(-1).tolist()
    if now != answer:
        raise BranchChanged(place, _as_asked(answer, asked), _as_asked(now, asked), by_example=by_example)


def _check_fake(asked: Tensor, answer: list[int], place: str, by_example: bool) -> None:
    """Nothing is made."""


_library.impl("answered", _check, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("belady::answered", _check_fake, lib=_library)
fx.has_side_effect(torch.ops.belady.answered.default)

# Questions of numbers, with the answer where they are finite.
_IF_FINITE: Mapping[Any, bool] = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
}

_CHECKS = "torch/distributions/distribution.py"  # a file that asks of arguments only whether they are valid


class Answers(Constants):  # type: ignore[no-untyped-call]
    """Answers what depends on the data, too: as for the example inputs, as checks want it, as for finite numbers. With each such
    answer ``belady::answered`` gets into the graph, which refuses a run that needs another one.

    Answered are truth values and a few integers. What depends on draws or on the values of parameters stays unknown otherwise.
    """

    MOST_INTEGERS = 128  # a few are sizes, more are data

    def __init__(self, examples: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """``examples``: stand-ins, each with the tensor of the example that it stands for. Integers and truth values count; other
        numbers differ from batch to batch."""
        super().__init__()
        self._not_always: MutableMapping[Tensor, KnownFor] = WeakIdKeyDictionary()
        self._integers = 0  # that were asked for
        with no_dispatch():
            for stand_in, real in examples:
                if real.numel() <= self.LIMIT and not (real.is_floating_point() or real.is_complex()):
                    self._know(stand_in, real.detach().clone(), KnownFor.EXAMPLE)

    def _known_for(self, tensors: Iterable[Tensor]) -> KnownFor:
        kinds = (self._not_always.get(t, KnownFor.EVERY_CALL) if t in self._real else KnownFor.ASSUMED for t in tensors)
        return min(kinds, default=KnownFor.EVERY_CALL)

    def _doubt(self, tensors: Iterable[Tensor], known_for: KnownFor) -> None:
        for tensor in self._sharing(tensors):
            self._not_always[tensor] = min(known_for, self._known_for([tensor]))

    def _know(self, tensor: Tensor, content: Tensor, known_for: KnownFor = KnownFor.EVERY_CALL) -> None:
        super()._know(tensor, content)
        for each in (tensor, getattr(tensor, "elem", None)):
            if isinstance(each, Tensor) and known_for is not KnownFor.EVERY_CALL:
                self._not_always[each] = known_for

    def _answer(self, func: Any, asked: Sequence[Tensor], *, known: bool) -> Any:
        answer = super()._answer(func, asked, known=known)
        if answer is not None and all(map(self._is_constant, asked)):
            return answer
        if func is aten.equal.default:
            return None
        known_for = self._known_for(asked)
        if answer is None and asked[0].dtype == torch.bool:
            answer = self._wanted()
        if not isinstance(answer, int) or not self._few([answer]):
            return None
        self._ask(asked[0], [answer], known_for)
        return answer

    def _shapes_asked(self, tensors: Iterable[Tensor]) -> bool:
        """A few sizes are asked for, and constants from then on."""
        asked = [tensor for tensor in tensors if not self._is_constant(tensor)]
        if any(tensor.numel() > self.MOST_INTEGERS for tensor in asked):
            return False
        with no_dispatch():
            contents = [self._real[tensor].reshape(-1).tolist() for tensor in asked]
        sizes = list(itertools.chain.from_iterable(contents))
        if not all(type(size) is int for size in sizes) or not self._few(sizes):
            return False
        for tensor, content in zip(asked, contents, strict=True):
            self._ask(tensor, content, self._known_for([tensor]))
            del self._not_always[tensor]
        return True

    def _few(self, answers: Sequence[int]) -> bool:
        """Whether no more integers than sizes were asked for, with these answers."""
        self._integers += sum(type(answer) is int for answer in answers)
        return self._integers <= self.MOST_INTEGERS

    def _ask(self, tensor: Tensor, answer: Sequence[int], known_for: KnownFor) -> None:
        """Have each run compare the answer."""
        place = place_among(traceback.extract_stack())
        torch.ops.belady.answered(tensor, list(map(int, answer)), place, known_for is KnownFor.EXAMPLE)

    def _wanted(self) -> bool | None:
        """The answer with which a check passes, where a check asks."""
        frames = traceback.extract_stack()
        return True if is_check(place_among(frames)) or any(frame.filename.endswith(_CHECKS) for frame in frames) else None

    def _contents(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor], *, known: bool) -> list[Tensor] | None:
        if not known and (answer := _if_finite(func, args)) is not None:
            with no_dispatch():
                content = torch.tensor(answer, device=made[0].device)
                return [self._spread(content, made[0])]
        if not known or len(made) != 1 or made[0].numel() <= self.LIMIT or func._schema.is_mutable:
            return super()._contents(func, args, kwargs, made, known=known)
        # Large ones are known where all their elements are one.
        if func.is_view:
            return [self._really(func, args, kwargs)]
        read = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
        if torch.Tag.pointwise not in func.tags or not all(map(_is_one_element, map(self._real.__getitem__, read))):
            return None
        with no_dispatch(), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, lambda tensor: _first(self._real[tensor]), (args, kwargs))
            return [self._spread(func(*args, **kwargs), made[0])]

    def _spread(self, element: Tensor, like: Tensor) -> Tensor:
        """One element as all of a tensor: in memory of its own, unless that is large."""
        spread = element.expand(like.shape)
        return spread.clone() if like.numel() <= self.LIMIT else spread


def _if_finite(func: Any, args: Sequence[Any]) -> bool | None:
    """What a call returns, in each element, of numbers that are neither infinite nor NaN; None of other calls."""
    if func in _IF_FINITE:
        return _IF_FINITE[func]
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.eq.Scalar, aten.ne.Scalar) and isinstance(args[1], float) and not math.isfinite(args[1]):
        return bool(func is aten.ne.Scalar)
    return None


def _is_one_element(content: Tensor) -> bool:
    return all(n == 1 or stride == 0 for n, stride in zip(content.shape, content.stride(), strict=True))


def _first(content: Tensor) -> Tensor:
    return content.as_strided((), ())


def _as_asked(answer: Sequence[int], asked: Tensor) -> bool | tuple[int, ...]:
    return bool(answer[0]) if asked.dtype == torch.bool else tuple(answer)


def answer_and_place(node: fx.Node) -> tuple[bool | tuple[int, ...], str]:
    """What the model is told by one of the calls that compare answers, and where it asks."""
    asked, answer, place, _ = node.args
    return _as_asked(cast(Sequence[int], answer), cast(fx.Node, asked).meta["val"]), str(place).removeprefix(", at ")


def asked_in(graph: fx.Graph) -> list[fx.Node]:
    """The calls that compare answers with those in the trace."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.belady.answered.default))
