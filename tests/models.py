"""Captured workloads at small sizes, once a process."""

from __future__ import annotations

from functools import cache

from graphs.capture import capture
from graphs.costs import roofline
from graphs.ir import Graph
from graphs.workloads import build

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 16, "seq": 256, "depth": 3, "vocab": 64},
    "mlp": {"batch": 16384, "depth": 8},
    "resnet50": {"batch": 64, "size": 64},
    "unet": {"batch": 8, "depth": 3, "size": 64},
    "vgg16": {"batch": 64, "size": 64},
}
MODELS = sorted(SIZES)


@cache
def graph_of(name: str) -> Graph:
    """The graph of one training step, with modelled times."""
    model, inputs, loss = build(name, **SIZES[name])
    return roofline(capture(model, inputs, loss=loss)).graph
