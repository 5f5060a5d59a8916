"""Every private torch name the project uses, behind names of our own: what may change between releases changes here. [torch]"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._decomp  # registers the replacements that _eager_kernels takes away
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import CodeGen, _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

__all__ = [
    "DATA_DEPENDENT",
    "BoxedCodeGen",
    "CodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "Joint",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "UnsupportedOperatorException",
    "fuse_bernoulli",
    "is_operator",
    "is_traceable_wrapper_subclass",
    "keystr",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "storage_bytes",
    "storage_key",
    "to_fake",
    "trace_joint",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_unflatten",
]

BoxedCodeGen = _BoxedCodeGen  # forward(list): takes its inputs out of the list, so that they too can be freed

# What tracing raises where a shape or a branch depends on the content of a tensor.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor, fake ones included; valid as long as the tensor lives."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage of a tensor."""
    return tensor.untyped_storage().nbytes()


def to_fake(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Stand-ins without data, all of one fake mode (that of the tensors, where they are fake already); static shapes."""
    tensors = list(tensors)
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)  # real constants of the model are let in
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]


@dataclass(frozen=True, slots=True)
class Joint:
    """Forward, loss and backward as one flat functional graph.

    module   the graph, with the plain calling convention: one argument a placeholder, one flat list of outputs
    sources  for each placeholder: ("state", i), ("input", i) or ("tangent", 0)
    results  for each output: ("loss", 0), ("gradient", i) of state i, ("state", i) or ("input", i): its new content, or
             None where there is nothing
    """

    module: fx.GraphModule
    sources: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int] | None, ...]


class _Body(nn.Module):
    """Gives the tracer a module whose parameters and buffers are exactly ``state``, each once."""

    def __init__(self, body: Callable[[list[Tensor], list[Tensor]], Tensor], state: Sequence[Tensor]) -> None:
        super().__init__()
        self.body = body
        self.names = [f"state{i}" for i in range(len(state))]
        for name, tensor in zip(self.names, state, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body([getattr(self, name) for name in self.names], list(inputs))


def trace_joint(body: Callable[[list[Tensor], list[Tensor]], Tensor], state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Joint:
    """Trace ``loss = body(state, inputs)`` and its gradients, without decompositions and without running a kernel.

    state   fake parameters and buffers, all distinct; gradients are those of the parameters that require one
    inputs  fake tensors

    Raises whatever ``body`` and the tracer raise.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_eager_kernels())
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # its fused LSTM hides how much memory it takes
        joint = aot_export_joint_with_descriptors(stack, _Body(body, state), tuple(inputs))
        module = joint.graph_module
    sources = tuple(_source(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder"))
    results = tuple(_result(desc) for desc in module.graph.output_node().meta["desc"])
    module.graph.set_codegen(CodeGen())
    return Joint(module, sources, results)


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager execution runs.

    For about forty operators (dropout, upsampling, recurrent layers, one_hot) the tracer has replacements in Python, which differ
    from eager in rounding and in memory. They are taken away while the trace lasts. Those of batch norm stay: they are what makes
    its running statistics outputs of the graph.
    """
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    taken: list[tuple[OpOverload, Any, Any]] = []
    try:
        for op in _replaced_operators():
            taken += [(op, key, op.py_kernels.pop(key)) for key in keys if key in op.py_kernels]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@functools.cache
def _replaced_operators() -> tuple[OpOverload, ...]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "batch_norm" not in name)
    overloads = (getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads())
    return tuple(op for op in overloads if op.py_kernels)


# Dropout draws its mask in place, into memory laid out like its input; the functional operator draws into contiguous memory, where
# the same generator gives another mask. This operator is the draw as eager does it, in one piece and with no input.
_library = torch.library.Library("belady", "DEF")
_library.define(
    "bernoulli(int[] size, int[] stride, float p, float divisor, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _bernoulli(
    size: list[int], stride: list[int], p: float, divisor: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    drawn = torch.empty_strided(size, stride, dtype=dtype, device=device).bernoulli_(p)
    return drawn if divisor == 1 else drawn.div_(divisor)


@torch.library.register_fake("belady::bernoulli", lib=_library)
def _bernoulli_fake(
    size: list[int], stride: list[int], p: float, divisor: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_library.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")


def fuse_bernoulli(graph: fx.Graph) -> None:
    """Replace draws into fresh memory, and their scaling where there is one, by ``belady::bernoulli``."""
    aten = torch.ops.aten
    fresh = (aten.empty_like.default, aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default)
    for draw in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        memory, p = draw.args
        if memory.target not in fresh or len(memory.users) > 1 or draw.kwargs:
            continue
        last, divisor = draw, 1.0
        scaling = next(iter(draw.users), None)
        if len(draw.users) == 1 and scaling.target == aten.div.Scalar:
            last, divisor = scaling, float(scaling.args[1])
        like = memory.meta["val"]
        with graph.inserting_before(last):
            fused = graph.call_function(
                torch.ops.belady.bernoulli.default,
                (list(like.shape), list(like.stride()), p, divisor),
                {"dtype": like.dtype, "device": like.device},
            )
        fused.meta = {**draw.meta, "val": like}
        last.replace_all_uses_with(fused)
        for node in dict.fromkeys((last, draw, memory)):
            graph.erase_node(node)


def _source(desc: Any) -> tuple[str, int]:
    if isinstance(desc, ParamAOTInput | BufferAOTInput):
        return "state", int(desc.target.removeprefix("state"))
    if isinstance(desc, PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, TangentAOTInput):
        return "tangent", 0
    raise NotImplementedError(f"the traced graph has an input of the kind {type(desc).__name__}")


def _result(desc: Any) -> tuple[str, int] | None:
    if desc is None:
        return None
    if isinstance(desc, PlainAOTOutput):
        return "loss", 0
    if isinstance(desc, GradAOTOutput):
        return "gradient", _source(desc.grad_of)[1]
    if isinstance(desc, InputMutationAOTOutput):
        return _source(desc.mutated_input)
    raise NotImplementedError(f"the traced graph has an output of the kind {type(desc).__name__}")


def is_operator(target: object) -> bool:
    """Whether an FX call target is a torch operator, a higher-order one included (and not a Python function)."""
    return isinstance(target, OpOverload | HigherOrderOperator)
