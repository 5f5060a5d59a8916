"""Draws that repeat inside a CUDA graph. [torch]

A capture may not read or set a generator's offset on the host, but it may swap the state that a generator draws from. So repeated
draws that follow each other get a state of their own, registered with the graph, and before a replay it is put where the first
draws of that step were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.execution.draws import Repeats


@dataclass(slots=True)
class _Range:
    """Draws made again that follow each other: where the first of them lies, and the state they are drawn from.

    source     index of the generator of the first draws
    begin, end  offsets relative to where that generator stood before the step
    draws      how many
    """

    source: int
    begin: int
    end: int
    draws: int
    generator: torch.Generator


class GraphRepeats:
    """The draws that a straight-line piece of code makes again, on CUDA.

    Run the code once inside ``observing``: it notes the offsets. Record it inside ``recording``: draws come from ``generators``,
    which the CUDA graph must know. Call ``seek`` before each replay.

    make  makes a generator
    """

    def __init__(self, make: Callable[[torch.device], torch.Generator] = torch.Generator) -> None:
        self._make = make
        self._ranges: list[_Range] = []

    @property
    def generators(self) -> list[torch.Generator]:
        return [each.generator for each in self._ranges]

    def observing(self, generators: tuple[torch.Generator, ...], offsets: list[int]) -> Repeats:
        """``offsets``: of the generators before the step."""
        return _Observing(self, generators, offsets)

    def recording(self) -> Repeats:
        return _Recording([each.generator for each in self._ranges for _ in range(each.draws)])

    def seek(self, starts: list[tuple[int, int]]) -> None:
        """Make the next replay repeat the draws of a step before which the generators had these seeds and offsets."""
        for each in self._ranges:
            seed, offset = starts[each.source]
            each.generator.manual_seed(seed)
            each.generator.set_offset(offset + each.begin)

    def note(self, source: int, begin: int, end: int, device: torch.device) -> None:
        last = self._ranges[-1] if self._ranges else None
        if last is not None and (last.source, last.end) == (source, begin):
            last.end = end
            last.draws += 1
        else:
            self._ranges.append(_Range(source, begin, end, 1, self._make(device)))


class _Observing:
    def __init__(self, repeats: GraphRepeats, generators: tuple[torch.Generator, ...], offsets: list[int]) -> None:
        self._repeats = repeats
        self._generators = generators
        self._offsets = offsets

    def first(self, generator: torch.Generator) -> Tensor:
        return generator.get_state()

    def again(self, state: Tensor, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        source = next(i for i, each in enumerate(self._generators) if each is generator)
        now = generator.get_state()
        generator.set_state(state)
        try:
            begin = generator.get_offset()
            result = call()
            start = self._offsets[source]
            self._repeats.note(source, begin - start, generator.get_offset() - start, generator.device)
            return result
        finally:
            generator.set_state(now)


class _Recording:
    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = iter(generators)
        self._no_state = torch.empty(0)

    def first(self, generator: torch.Generator) -> Tensor:
        return self._no_state

    def again(self, state: Tensor, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        now = generator.graphsafe_get_state()
        generator.graphsafe_set_state(next(self._generators))
        try:
            return call()
        finally:
            generator.graphsafe_set_state(now)
