"""Loading code where Ctrl-C cannot come in between.

In the middle of an import, an interruption leaves half of a package behind, which may fail when it is imported again. While numba
loads compiled code it is worse: the interruption is printed and lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from graphs.ir import Graph, Op, Value
from planner.process.waiting import Done, begin

T = TypeVar("T")
TINY = Graph("tiny", (Op("op", (), (0,), 1),), (Value("value", 1),), frozenset(), frozenset({0}))  # to try compiled code on
_begun: set[Callable[[], object]] = set()


def load_once(work: Callable[[], object]) -> None:
    """Do ``work``, which loads compiled code by using it, ``undisturbed``: the first time only. It may ask for itself again."""
    if work not in _begun:
        _begun.add(work)
        undisturbed(work)


def undisturbed(work: Callable[[], T]) -> T:
    """What ``work`` returns, done on a thread of its own: Ctrl-C reaches only the main thread.

    Ctrl-C is raised when the work is done, a second one at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []
    done = Done()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the caller below
            errors.append(error)
        finally:
            done.set()

    try:
        begin(run, ())
        done.wait()
    except KeyboardInterrupt:
        done.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]
