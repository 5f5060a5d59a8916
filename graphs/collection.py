"""The workloads that there are: names, sizes and descriptions. ``graphs.workloads`` builds them, which needs torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from graphs.errors import InputError, check_positive

SIZES = ("batch", "seq", "depth", "size", "vocab")
_SIZED = re.compile(rf"({'|'.join(SIZES)})([0-9]{{1,9}})")


@dataclass(frozen=True)
class Workload:
    """One model of the collection.

    name         what users call it
    description  one line for people
    sizes        what can be chosen, with the defaults: "batch" (examples), "seq" (tokens or time steps of each), "depth" (layers,
                 in the sense of the description), "size" (side of the image in pixels), "vocab" (tokens in the vocabulary)
    """

    name: str
    description: str
    sizes: Mapping[str, int]

    def row(self) -> dict[str, Any]:
        """Name, default sizes (None: the model has no such size) and description, for a table."""
        return {"name": self.name, **{size: self.sizes.get(size) for size in SIZES}, "description": self.description}


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("mlp", "depth hidden layers of 512, ReLU", {"batch": 4096, "depth": 12}),
            Workload(
                "resnet50",
                "ResNet of depth 14, 26, 50, 101 or 152 layers, 1000 classes",
                {"batch": 32, "depth": 50, "size": 128},
            ),
            Workload(
                "vgg16",
                "VGG of depth 11, 13, 16 or 19 layers, 1000 classes",
                {"batch": 64, "depth": 16, "size": 64},
            ),
            Workload("mobilenet_v2", "MobileNetV2 1.0, 1000 classes", {"batch": 8, "size": 128}),
            Workload(
                "unet",
                "U-Net with depth halvings, 32 channels at the top, 21 classes",
                {"batch": 8, "depth": 4, "size": 128},
            ),
            Workload(
                "vit",
                "ViT-Small, patches of 16, depth layers, 1000 classes",
                {"batch": 8, "depth": 12, "size": 224},
            ),
            Workload(
                "bert",
                "BERT-Base masked language model, depth layers, vocabulary cut from 30522",
                {"batch": 6, "seq": 256, "depth": 12, "vocab": 8192},
            ),
            Workload(
                "gpt2",
                "GPT-2 small, depth layers, vocabulary cut from 50257",
                {"batch": 6, "seq": 256, "depth": 12, "vocab": 8192},
            ),
            Workload(
                "llama",
                "Llama of width 512 with grouped-query attention, depth layers",
                {"batch": 8, "seq": 256, "depth": 8, "vocab": 8192},
            ),
            Workload(
                "lstm",
                "LSTM of width 512 unrolled over seq time steps, depth layers",
                {"batch": 256, "seq": 32, "depth": 1},
            ),
        )
    }
)


def chosen(name: str, **sizes: int | None) -> tuple[str, dict[str, int]]:
    """The plain name of a workload, and all of its sizes.

    name   one of ``WORKLOADS``, which may have sizes ("gpt2-depth96-seq512")
    sizes  those of ``SIZES`` that are asked for beside these; None: not asked for

    Raises InputError for an unknown name, and for a size that the model does not have or that is not a positive integer.
    """
    plain, *parts = name.split("-")
    workload, named = WORKLOADS.get(plain), [_SIZED.fullmatch(part) for part in parts]
    if workload is None or not all(named):
        raise InputError(
            f"unknown workload {name!r}; there are: {', '.join(WORKLOADS)}, also with sizes (gpt2-depth24-seq64); your own is "
            f"path.py:function, and graph files end in .json, .json.gz, .log or .log.gz"
        )
    asked = asked_for(**sizes)
    for part in filter(None, named):
        what, number = part.groups()
        if what in asked:
            raise InputError(f"workload {name} is asked for with {what} {number} and with {what} {asked[what]}; give one")
        asked |= asked_for(**{what: int(number)})
    for what in asked.keys() - workload.sizes.keys():
        raise InputError(f"workload {plain} has no {what} to choose; it has: {', '.join(workload.sizes)}")
    return plain, {**workload.sizes, **asked}


def asked_for(**sizes: int | None) -> dict[str, int]:
    """The sizes that are given. Raises InputError for one that is not a positive integer."""
    given = {what: number for what, number in sizes.items() if number is not None}
    check_positive(**given)
    return given


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own workload, path.py:function."""
    return ":" in name or name.endswith(".py")
