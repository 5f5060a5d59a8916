"""What operators take for themselves while they run, learned from statistics of the CUDA allocator by kind of call. [torch]"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphs.rewriting.sizes import cuda_bytes
from graphs.torch_private.names import tree_leaves
from online.blocks.estimates import MOST_KINDS, Alike

_LOOKS = 2


class Requested(NamedTuple):
    """Bytes asked from the allocator: now, the most at once since somebody last reset that, and of all requests ever, with their
    number."""

    current_bytes: int = 0
    peak_bytes: int = 0
    ever_bytes: int = 0
    requests: int = 0


Allocator = Callable[[torch.device], Requested]


def requested(device: torch.device) -> Requested:
    """What the CUDA allocator says of a device. The host knows it, so nothing has to wait."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:  # before the first use of CUDA
        return Requested()
    of_all = found["requested_bytes"]["all"]
    return Requested(of_all["current"], of_all["peak"], of_all["allocated"], found["allocation"]["all"]["allocated"])


class Workspace:
    """Of all calls that are alike: ``size_bytes``, which they take beside what they make (0 until the first has run).

    Two runs are looked at, and the smaller counts: what the statistics tell is an upper bound, and at the first run libraries
    choose kernels, which may take more than the chosen one does.
    """

    __slots__ = ("_all", "_looks", "size_bytes")

    def __init__(self, of_all: Workspaces) -> None:
        self.size_bytes = 0
        self._looks = _LOOKS
        self._all = of_all

    def before(self, args: Any, kwargs: Any) -> tuple[torch.device, Requested] | None:
        """What is needed to learn from a call that is about to run; None where nothing is to be learned any more."""
        if not self._looks:
            return None
        for leaf in tree_leaves((args, kwargs)):
            device = leaf.device if isinstance(leaf, Tensor) else leaf
            if isinstance(device, torch.device) and device.type == self._all.device_type:
                return device, self._all.allocator(device)
        self._looks = 0
        return None

    def learn(self, before: tuple[torch.device, Requested], made_bytes: int, made: int = 1) -> None:
        """From a run that made so many storages, of so many bytes in all.

        The most at once inside is the new peak, if there is one. If not, it is at most the old one, and at most what was asked
        for in all. No peak is reset for it: that of ``torch.cuda.max_memory_allocated`` is the user's. What stays although it is
        in no storage has been taken once and for all by some library (cuBLAS, handles); that is no workspace of the op. Each
        request is given whole granules, so there is one more for each but the first.
        """
        device, then = before
        now = self._all.allocator(device)
        at_once = min(now.ever_bytes - then.ever_bytes, now.peak_bytes - then.current_bytes)
        stays = max(now.current_bytes - then.current_bytes, made_bytes)
        found = cuda_bytes(max(0, at_once - stays))
        if found:
            found += cuda_bytes(1) * max(0, now.requests - then.requests - made - 1)
        self.size_bytes = found if self._looks == _LOOKS else min(found, self.size_bytes)
        self._looks -= 1


class Workspaces:
    """The workspace of every kind of call, as far as it is known.

    allocator    asked before and after a run that is looked at
    device_type  of the calls that are looked at
    """

    def __init__(self, allocator: Allocator = requested, device_type: str = "cuda") -> None:
        self.allocator = allocator
        self.device_type = device_type
        self._known: dict[Alike, Workspace] = {}

    def of(self, calls: Alike) -> Workspace:
        """Of calls that are alike."""
        workspace = self._known.get(calls)
        if workspace is None:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            workspace = self._known[calls] = Workspace(self)
        return workspace


_learned = Workspaces()  # in this process: a loop makes a block of each step


def learned_workspaces() -> Workspaces | None:
    """What has been learned so far; None without CUDA, where there is no allocator to ask."""
    return _learned if torch.cuda.is_available() else None
