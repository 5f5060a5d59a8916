"""What the parts of an eager block ask of the block itself."""

from __future__ import annotations

import contextlib
from typing import Protocol


class Block(Protocol):
    """The block. Its parts refer to it weakly, so that it goes with the last who holds it, without a garbage collector.

    torn    interrupted in the middle of something: from then on all is plain PyTorch's
    raised  the latest error for an operator
    """

    budget_bytes: int | None
    torn: bool
    raised: BaseException | None

    def is_here(self) -> bool:
        """Whether this thread runs the block, or a backward for it: the hooks of torch are those of all threads."""

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Around what notes something down outside of operators."""

    def interrupted(self) -> None:
        """Ctrl-C, or what else a signal's handler raises, has cut off something in the midst of what is noted."""

    def warn_without_budget(self) -> None:
        """Say that the block goes on without its budget."""
