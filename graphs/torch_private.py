"""Every private torch name the project uses, behind names of our own: what may change between releases changes here. [torch]"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
from torch._ops import HigherOrderOperator, OpOverload
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
        joint = aot_export_joint_with_descriptors(stack, _Body(body, state), tuple(inputs))
        module = joint.graph_module
    sources = tuple(_source(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder"))
    results = tuple(_result(desc) for desc in module.graph.output_node().meta["desc"])
    module.graph.set_codegen(CodeGen())
    return Joint(module, sources, results)


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
