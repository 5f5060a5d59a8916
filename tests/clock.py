"""A clock for time limits: what a program takes whatever else the machine is doing."""

import os
import time
from collections.abc import Callable


def stopwatch() -> Callable[[], float]:
    """Seconds from now on, by the clock or of CPU time (with threads and ended children), whichever are fewer.

    Where others are at work the clock counts their share too, and where a solver left behind is, CPU time counts that.
    """
    began_s, began_cpu_s = time.perf_counter(), sum(os.times()[:4])
    return lambda: min(time.perf_counter() - began_s, sum(os.times()[:4]) - began_cpu_s)
