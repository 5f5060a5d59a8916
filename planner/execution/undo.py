"""What a call of a planned module changes, and how it is taken back where the call or its backward fails. [torch]"""

from __future__ import annotations

import torch
from torch import Tensor

from graphs.torch_private.tensors import copied, copy_all


class Undo:
    """Takes back draws and new buffers.

    Until ``seal`` (the end of the call) everything is taken back. After it: a buffer only where nobody else has written to it
    since, a generator only where nobody else has drawn from it since. A signal may arrive between any two lines here.
    """

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._generators = generators
        self._before = [generator.get_state() for generator in generators]
        self._after: list[Tensor] | None = None
        self._copied: list[tuple[Tensor, Tensor]] = []  # buffers and their old content
        self._swapped: list[tuple[Tensor, Tensor, int]] = []  # the same, and the sum of their versions before
        self._sealed: tuple[list[int], list[int]] | None = None  # versions of both kinds of buffers at the end of the call

    def replace(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write ``new`` into a buffer; returns a copy of its old content."""
        old = buffer.clone()
        self._copied.append((buffer, old))
        buffer.copy_(new)
        return old

    def replace_all(self, buffers: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """``replace`` for buffers that do not overlap, at once: with all copies in memory beside what is new."""
        old = copied(buffers)
        self._copied += zip(buffers, old, strict=True)
        copy_all(buffers, new)
        return old

    def exchange(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Exchange the contents of a buffer and of ``new``, without memory for a third; returns what has the old one now."""
        with torch.inference_mode(False), torch.no_grad():  # nobody counts versions in inference mode
            a, b = _words(buffer), _words(new)
        self._swapped.append((a, b, version(a) + version(b)))
        a.bitwise_xor_(b)
        b.bitwise_xor_(a)
        a.bitwise_xor_(b)
        return new

    @property
    def written(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers and what holds their old content, at the end of a call."""
        return self._copied + [(a, b) for a, b, _ in self._swapped]

    def wrote(self, buffer: Tensor, old: Tensor) -> None:
        """A buffer was written to where its version counter does not see it (a CUDA graph); ``old`` holds its old content."""
        torch.autograd.graph.increment_version(buffer)
        self._copied.append((buffer, old))

    def seal(self) -> None:
        """The call is done."""
        self._after = [generator.get_state() for generator in self._generators]
        self._sealed = versions([b for b, _ in self._copied]), versions([b for b, _, _ in self._swapped])

    @torch.no_grad()
    def undo(self) -> None:
        """Make everything as before the call."""
        for i, (buffer, old) in enumerate(self._copied):
            if self._sealed is None or self._sealed[0][i] == version(buffer):
                buffer.copy_(old)
        for i, (a, b, start) in enumerate(self._swapped):
            if self._sealed is not None:
                if self._sealed[1][i] == version(a):
                    a.copy_(b)
                continue
            done = version(a) + version(b) - start  # how many of the three steps
            if done == 3:
                a.copy_(b)
            elif done == 2:
                b.bitwise_xor_(a)
            if done in (1, 2):
                a.bitwise_xor_(b)
        for i, generator in enumerate(self._generators):
            if self._after is None or torch.equal(self._after[i], generator.get_state()):
                generator.set_state(self._before[i])


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def versions(tensors: list[Tensor]) -> list[int]:
    """``version`` of each."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of an inference tensor
        return [version(tensor) for tensor in tensors]


def _words(tensor: Tensor) -> Tensor:
    """A tensor as integers."""
    if tensor.is_inference():
        own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor = own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
