"""What is true of every call of an operator. [torch]"""

from __future__ import annotations

from typing import Any

import torch

from graphs.errors import InputError
from graphs.rewriting.nodes import is_foreign, running_statistics

NESTED = (
    "a nested tensor turned up in a block under a budget; make it with layout=torch.jagged, or pad it (attention makes one of "
    "jagged tensors, too); or make the nn.TransformerEncoder that it comes from with enable_nested_tensor=False"
)


class Kind:
    """What is true of every call of an operator.

    name     for people and reports; kind: with the overload
    looks    makes nothing but views and numbers
    of_first  the only tensor it is given is its first argument
    written  places of arguments it writes to (a name where it is given by keyword)
    scratch  places of arguments it writes to although what it returns does not depend on them
    blank    makes a tensor without content, which somebody is to write
    gives_back  returns nothing but the tensors it writes to
    random   draws random numbers
    foreign  none of PyTorch's own: it may draw without saying so, and is ``random`` once it did
    acts     on the outside world, so that it must not run twice
    collective  goes on once it has returned, in a thread of its own that reads and writes what it was given
    moves    puts a tensor on another storage or changes the size of one
    entries  entries[acts][in_backward]: what is noted of a call; each made once
    """

    __slots__ = (
        "acts",
        "blank",
        "collective",
        "entries",
        "foreign",
        "func",
        "gives_back",
        "kind",
        "looks",
        "moves",
        "name",
        "of_first",
        "random",
        "scratch",
        "written",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its id is not given again
        self.entries = self._entries()
        self.kind = str(func)
        schema = func._schema
        packet = func.name().partition(".")[0]
        self.name = packet.replace("::", ".")
        self.scratch: tuple[int, ...] = ()
        writes = [at for at, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if packet in _BATCH_NORMS:  # most schemas do not say that running statistics are written
            self.scratch = running_statistics(func)
            writes = [at for at in writes if at not in self.scratch]
        elif packet in _WRITTEN_BY_RNNS:
            writes.append([argument.name for argument in schema.arguments].index(_WRITTEN_BY_RNNS[packet]))
        elif func.namespace == "c10d":  # nor that what other processes send is written to what is given
            given = [(at, a.name) for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
            writes = [at for at, name in given if not name.startswith("input")]
        self.written = tuple((at, schema.arguments[at].name) for at in writes)
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        self.gives_back = bool(self.written) and (
            func.namespace == "c10d" or all(r.alias_info is not None for r in schema.returns)
        )
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.foreign = is_foreign(func)
        self.collective = func.namespace in _COLLECTIVES
        self.acts = (not self.written and not schema.returns) or self.collective
        self.moves = packet in ("aten::set_", "aten::resize_", "aten::resize_as_")
        self.blank = packet in _BLANK
        tensors = [at for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
        self.of_first = tensors == [0] and str(schema.arguments[0].type) == "Tensor"
        makes_views = func.is_view or torch.Tag.inplace_view in func.tags
        has_none = not tensors and not gives_tensors  # say, marks for the profiler
        has_none = has_none or packet == "aten::_efficientzerotensor"  # a stand-in without memory
        self.looks = not self.moves and (makes_views or has_none or not (gives_tensors or self.written or self.acts))

    def _entries(self) -> tuple[tuple[Entry, Entry], ...]:
        return tuple(((self, acts, False), (self, acts, True)) for acts in (False, True))


Entry = tuple[Kind, bool, bool]  # a call: its kind, whether it acts on the world, whether it is in the backward
_BATCH_NORMS = frozenset(
    f"aten::{name}"
    for name in (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
    )
)
_BLANK = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})  # namespaces of operators of several processes
# What schemas do not say: cuDNN draws from a state of its own, and its backward works in what it was handed by the forward.
_WRITTEN_BY_RNNS = {
    f"aten::{library}_rnn{which}": written
    for library in ("_cudnn", "miopen")
    for which, written in (("", "dropout_state"), ("_backward", "reserve"))
}
# Attention makes such of jagged ones. Refused later, within the functions that ask for their sizes, they would end the process.
_NESTED = frozenset(
    f"aten.{name}"
    for name in (
        "_nested_from_padded",
        "_nested_from_padded_and_nested_example",
        "_nested_tensor_from_mask",
        "_nested_tensor_from_tensor_list",
        "_nested_view_from_buffer",
    )
)
_kinds: dict[int, Kind] = {}  # by id: operators hash slowly


def kind_of(func: Any) -> Kind:
    """What is true of every call of an operator. Raises InputError for those that make tensors which cannot be counted."""
    kind = _kinds.get(id(func))
    if kind is None:
        kind = Kind(func)
        if kind.name in _NESTED:
            raise InputError(NESTED)
        _kinds[id(func)] = kind
    return kind


class _Given(Kind):
    """An input, as if an operator had made it."""

    def __init__(self) -> None:
        self.name = self.kind = "input"
        self.entries = self._entries()
        self.random = False


GIVEN = _Given()
