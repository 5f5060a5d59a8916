"""A torch training step becomes a Graph, and keeps the FX graph it came from. [torch]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn

from graphs.ir import Graph


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensor of one placeholder comes from at run time.

    kind    "parameter" and "buffer" of the model (``name`` is its qualified name), "input" (``index`` into the flattened
            inputs), "tangent" (gradient of the loss, a scalar one unless the caller says otherwise)
    """

    kind: Literal["parameter", "buffer", "input", "tangent"]
    name: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True)
class Result:
    """What one entry of the FX output node is.

    kind   "loss", "gradient" of the parameter ``name``, "buffer": new content of the buffer ``name``, "none": not used
    """

    kind: Literal["loss", "gradient", "buffer", "none"]
    name: str = ""


@dataclass(frozen=True, eq=False)
class Step:
    """A captured training step: the Graph, the FX graph it came from, and how one maps to the other.

    graph     what planners and the online runtime see
    module    functional joint graph (forward, loss, backward): placeholders, calls, one output node
    model     the user's own model; parameters and buffers are read from it when the step runs
    device    the device all tensors are on
    calls     calls[i] is the ``call_function`` node of graph.ops[i]
    value_of  Value id of every node that holds one tensor, and of view nodes that hold a list of views of one storage:
              placeholders, single-output calls, ``getitem`` of multi-output calls, views. A multi-output call itself is
              not in it. Nodes that hold no tensor (a ``getitem`` of an int) are not in it either: they cost nothing.
    sources   one per placeholder, in order
    results   one per entry of the FX output, in order
    """

    graph: Graph
    module: fx.GraphModule
    model: nn.Module
    device: torch.device
    calls: tuple[fx.Node, ...]
    value_of: Mapping[fx.Node, int]
    sources: tuple[Source, ...]
    results: tuple[Result, ...]

    def views(self, op: int) -> tuple[fx.Node, ...]:
        """The view nodes that the arguments of op ``op`` need, in an order in which they can be made."""
        raise NotImplementedError

    def made_by(self, op: int) -> Mapping[int, fx.Node]:
        """For each Value that op ``op`` makes and somebody reads: the node that holds it (the call or a ``getitem``)."""
        raise NotImplementedError
