"""Threads of our own, and waiting for them, so that Ctrl-C comes through as what it is."""

from __future__ import annotations

import _thread
import threading


class Done(threading.Event):
    """An event that one thread sets once and another waits for.

    The wait of ``threading.Event`` takes locks in Python: Ctrl-C that comes while it does, or a second one while the first one
    leaves it, becomes ``RuntimeError: release unlocked lock``. Here it is the interpreter that waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unset = _thread.allocate_lock()
        self._unset.acquire()

    def set(self) -> None:
        """Let whoever waits go on."""
        if not self.is_set():
            super().set()
            self._unset.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, for so many seconds at most; whether it is set."""
        if not self.is_set() and self._unset.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._unset.release()
        return self.is_set()


# begin(work, ()) runs ``work()`` on a thread that nothing waits for at the end, and returns at once. As the first statement of a
# ``try`` it has been called, or nothing there has happened, whenever Ctrl-C comes. ``threading.Thread`` waits until its thread
# runs, and Ctrl-C in that wait leaves nobody who knows of it.
begin = _thread.start_new_thread
