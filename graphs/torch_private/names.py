"""Classes, functions and constants that are used as they are, from wherever torch keeps them. [torch]"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _BoxedCodeGen
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "DATA_DEPENDENT",
    "LOOKS_FOR_CAUSAL",
    "ONE_TRACE_AT_A_TIME",
    "PADS_PACKED",
    "BoxedCodeGen",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "classes_handle",
    "disable_fake_tensor_cache",
    "is_operator",
    "is_traceable_wrapper_subclass",
    "keystr",
    "no_dispatch",
    "no_python_dispatcher",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "without_autocast",
    "without_torch_function",
]

BoxedCodeGen = _BoxedCodeGen  # forward(list): takes its inputs out of the list, so that they too can be freed

# What tracing raises where a shape or a branch depends on the content of a tensor.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

LOOKS_FOR_CAUSAL = "_detect_is_causal_mask"  # the function of nn.Transformer and its parts that compares a mask with a causal one

# What torch.nn.utils.rnn.pad_packed_sequence calls, and its operator.
PADS_PACKED: frozenset[Any] = frozenset({cast(Any, torch)._VF._pad_packed_sequence, torch.ops.aten._pad_packed_sequence})

# A trace changes what all threads use, attributes of torch among it, so that of another thread waits. The lock is the compiler's
# own, which holds it when it calls a backend and takes it for parts of some traces (torch.cond): a second lock could tie a knot.
ONE_TRACE_AT_A_TIME = compile_lock

without_autocast = torch._C._DisableAutocast  # a context: operators run in the types they are given
classes_handle = torch._C._is_torch_function_enabled  # whether classes of tensors handle functions now, in this thread
without_torch_function = torch._C.DisableTorchFunction  # a context: torch-function modes and subclasses see nothing


def is_operator(target: object) -> bool:
    """Whether an FX call target is a torch operator, a higher-order one included (and not a Python function)."""
    return isinstance(target, OpOverload | HigherOrderOperator)
