"""Storages of a traced step become Values, and the calls that allocate become Ops. [torch]"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphs.errors import CaptureError
from graphs.ir import Graph, Op, Value
from graphs.rewriting.nodes import is_effect, is_random, tensors_of
from graphs.rewriting.sizes import cuda_bytes, real_bytes, unasked_bytes
from graphs.torch_private.names import OpOverload, is_operator
from graphs.torch_private.tensors import storage_bytes, storage_key


class Numbering:
    """Makes storages into Values and the calls that allocate into Ops, in the order of the graph."""

    def __init__(self, name: str, where: torch.device) -> None:
        self.name = name
        self.where = where
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.calls: list[fx.Node] = []
        self.value_of: dict[fx.Node, int] = {}
        self._residents = 0
        self._constants: set[fx.Node] = set()
        self._of_real: dict[int, int] = {}  # by key of the real storage: placeholders that alias one count once
        self._of_fake: dict[int, int] = {}  # by key of the fake storage
        self._reads: dict[fx.Node, tuple[int, ...]] = {}  # values that must be there for a node to be read
        self._entries: dict[fx.Node, list[int | None]] = {}  # values of a call with several outputs

    def resident(self, node: fx.Node, label: str, tensor: Tensor | None, *, constant: bool = False) -> None:
        """Number a placeholder bound to ``tensor`` (None: a tensor made for the occasion)."""
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            raise CaptureError(f"{self.name}: the traced graph has an input that is no tensor ({fake!r}); shapes must be fixed")
        if tensor is None:
            value = self._new(label, storage_bytes(fake), fake.device)
        elif (key := storage_key(tensor)) in self._of_real:
            value = self._of_real[key]
        else:
            value = self._of_real[key] = self._new(label, storage_bytes(tensor), tensor.device)
        self._residents = len(self.values)
        self._of_fake[storage_key(fake)] = value
        if constant:
            self._constants.add(node)
        self._hold(node, value, (value,))

    def call(self, node: fx.Node) -> None:
        """Number a call: an entry of a call with several outputs, a view, or an op."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and parent in self._entries:
            value = self._entries[parent][cast(int, node.args[1])]
            if value is None or value in (self.value_of.get(item) for item in parent.users):
                raise CaptureError(f"{self.name}: entry {node.args[1]} of {parent.name} is no tensor of its own")
            self._hold(node, value, (value,))
            return
        if any(parent in self._entries for parent in node.all_input_nodes):
            raise CaptureError(f"{self.name}: {node.name} ({node.target}) reads a list of tensors whole")
        inputs = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in self._reads.get(n, ())))
        tensors = tensors_of(node)
        if isinstance(node.target, OpOverload) and node.target.is_view:
            source = node.all_input_nodes[0]
            if source in self._constants:  # the tracer makes another fake of a constant wherever it is read
                self._of_fake[storage_key(tensors[0])] = self.value_of[source]
        old = {self._of_fake.get(storage_key(t)) for t in tensors}
        if len(old) == 1 and old <= set(inputs):
            self._hold(node, cast(int, old.pop()), inputs)
            return
        self._check(node, tensors, old)
        self._op(node, inputs)

    def graph(self, outputs: Sequence[fx.Node]) -> Graph:
        """The numbered graph."""
        ids = frozenset(self.value_of[node] for node in outputs)
        device = "cpu" if self.where.type == "cpu" else torch.cuda.get_device_name(self.where)
        return Graph(self.name, tuple(self.ops), tuple(self.values), frozenset(range(self._residents)), ids, device)

    def _op(self, node: fx.Node, inputs: tuple[int, ...]) -> None:
        held: Any = node.meta.get("val")  # none where an operator returns nothing
        several = isinstance(held, tuple | list)
        entries: list[int | None] = []
        for i, tensor in enumerate(held if several else [held]):
            if not isinstance(tensor, Tensor):
                entries.append(None)
                continue
            key = storage_key(tensor)
            if key not in self._of_fake:
                size = real_bytes(node, i, tensor, lambda n: self.values[self.value_of[n]].size_bytes)
                self._of_fake[key] = self._new(f"{node.name}.{i}" if several else node.name, size, tensor.device)
            entries.append(self._of_fake[key])
        outputs = tuple(dict.fromkeys(v for v in entries if v is not None))
        if unasked := unasked_bytes(node):
            outputs += (self._new(f"{node.name}.unasked", unasked, self.where),)
        if several:
            self._entries[node] = entries
        elif outputs:
            self._hold(node, outputs[0], outputs)
        self.calls.append(node)
        self.ops.append(
            Op(
                node.name,
                inputs,
                outputs,
                time_ns=0,
                kind=str(node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target),
                random=is_random(node),
                effect=is_effect(node),
                backward=node.meta.get("partitioner_tag") == "is_backward",
            )
        )

    def _hold(self, node: fx.Node, value: int, reads: tuple[int, ...]) -> None:
        self.value_of[node] = value
        self._reads[node] = reads

    def _new(self, label: str, size_bytes: int, device: torch.device) -> int:
        if device != self.where:  # a number on the host beside a CUDA step
            size_bytes = 0
        elif device.type == "cuda":
            size_bytes = cuda_bytes(size_bytes)
        self.values.append(Value(label, size_bytes))
        return len(self.values) - 1

    def _check(self, node: fx.Node, tensors: Sequence[Tensor], old: set[int | None]) -> None:
        """Refuse calls that a Graph has no words for."""
        what = f"{self.name}: {node.name} ({node.target})"
        if not is_operator(node.target):
            raise CaptureError(f"{what} is no torch operator; a step cannot contain it")
        if not tensors and node.users:
            raise CaptureError(f"{what} returns no tensor, but others read its result; a step cannot contain it")
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable and not is_effect(node):
            raise CaptureError(f"{what} changes a tensor in place; make it a custom operator that declares what it changes")
        if old - {None}:
            raise CaptureError(f"{what} returns views of its inputs among other things; a step cannot contain it")
