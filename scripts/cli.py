"""The command ``belady``: what recomputation really has to cost, from the shell."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from graphs.errors import BeladyError, NoScheduleFound
from planner.solvers.milp import solving

from .arguments import check, parser
from .commands import diff_command, plan_command, run_command, sweep_command, workloads_command
from .entry import BAD_INPUT, INTERRUPTED, NOTHING_FOUND, PIPE_CLOSED
from .info import info_command
from .output import OutputLost, standard_output, tell

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "diff": diff_command,
    "plan": plan_command,
    "run": run_command,
    "sweep": sweep_command,
    "workloads": workloads_command,
    "info": info_command,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    if sys.stderr is None:  # closed: nobody reads it, and no file may take its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _main(argv)
        if argv is None:  # the process is ours, and there is nothing left that Ctrl-C could end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        tell("interrupted")
        code = INTERRUPTED
    if argv is None and solving():  # do not wait for a solver that was interrupted
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    try:
        with standard_output():
            arguments = parser().parse_args(argv)
            check(arguments)
            return COMMANDS[arguments.command](arguments)
    except OutputLost as error:
        if isinstance(error.__cause__, BrokenPipeError):  # whoever read it has read enough
            return PIPE_CLOSED
        tell(error)
        return BAD_INPUT
    except NoScheduleFound as error:
        tell(error)
        return NOTHING_FOUND
    except BeladyError as error:
        tell(error)
        return BAD_INPUT
