"""The command ``belady`` as the shell calls it: what it is made of is loaded where Ctrl-C cannot come in between.

Exit codes: 0 done; 2 bad input, a budget proved too small among it; 3 no schedule found though none was ruled out, or a cell of a
sweep failed; 130 interrupted; 141 nobody reads standard output any more.
"""

from __future__ import annotations

import math
import signal
import sys
import time

AGAIN_S = 2.0  # a second Ctrl-C so soon after one is the same one
DONE, BAD_INPUT, NOTHING_FOUND, INTERRUPTED, PIPE_CLOSED = 0, 2, 3, 130, 141


def main() -> int:
    """Load the command line and run it; its exit code. Ctrl-C before it can listen ends it in one sentence, too."""
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    listens = before is signal.default_int_handler  # in the background of some shells the signal is ignored
    if listens:
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        from .cli import main as run
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)
    if heard:
        print("belady: interrupted", file=sys.stderr)
        return INTERRUPTED
    if listens:
        signal.signal(signal.SIGINT, _Patient())
    return run()


class _Patient:
    """Raises KeyboardInterrupt at Ctrl-C, but not again at once: the second would tear what is written because of the first."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        if time.monotonic() - self._last > AGAIN_S:
            self._last = time.monotonic()
            raise KeyboardInterrupt
