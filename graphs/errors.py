"""Every error a user can meet, in one tree.

    BeladyError
    ├── InputError (a ValueError)     the caller's input cannot be used; exit code 2
    │   ├── InvalidGraph              a graph breaks a rule of ``graphs.ir``
    │   ├── InvalidSchedule           a schedule breaks a rule of ``planner.simulate``
    │   ├── CaptureError              a model cannot be turned into a graph
    │   ├── GraphMismatch             a plan belongs to another graph
    │   ├── BranchChanged             data takes a model elsewhere than when its step was captured
    │   └── InfeasibleBudget          the budget is proved too small; carries the two numbers that help
    ├── NoScheduleFound               stopped without a schedule, though none was ruled out; exit code 3
    └── BudgetExceeded                a run would need more than its budget; nothing more was allocated

Bugs of our own are ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MOST_QUOTED = 80  # characters


class BeladyError(Exception):
    """Root of all errors raised on purpose. They can be pickled, as pools of processes do, whatever they are made with."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[BeladyError], args: tuple[object, ...], entries: dict[str, object]) -> BeladyError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(entries)
    return error


class InputError(BeladyError, ValueError):
    """The input cannot be used; the message says what, where, and what to do."""


class InvalidGraph(InputError):
    """A graph breaks a rule of ``graphs.ir``."""


class InvalidSchedule(InputError):
    """A schedule breaks a rule of ``planner.simulate``."""


class CaptureError(InputError):
    """A model cannot be turned into a graph."""


class GraphMismatch(InputError):
    """A plan was made for another graph."""


class BranchChanged(InputError):
    """A model asks its data, and would do something else now than when its step was captured. A call that raises this has changed
    nothing, nor has a backward, but for what later calls took from the buffers that its own call had changed.

    by_example  a step captured with the batch at hand would do what the model does now
    """

    def __init__(self, place: str, then: object, now: object, *, by_example: bool) -> None:
        super().__init__(
            f"the step was captured for data of which the model is told {then}{place}; now it is {now}. Give such a batch to the "
            f"model itself (module.step.model)" + (", or capture the step with one" if by_example else "")
        )
        self.by_example = by_example


class InfeasibleBudget(InputError):
    """No schedule can fit the budget.

    budget_bytes   what was asked
    proved_bytes   no schedule of this graph fits in less than this
    works_bytes    smallest budget for which a schedule is in hand
    """

    def __init__(self, message: str, *, budget_bytes: int, proved_bytes: int, works_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.proved_bytes = proved_bytes
        self.works_bytes = works_bytes


class NoScheduleFound(BeladyError):
    """The search stopped with nothing in hand and nothing ruled out.

    works_bytes  smallest budget for which a schedule is in hand; None where that was not looked for
    """

    def __init__(self, message: str, *, works_bytes: int | None = None) -> None:
        super().__init__(message)
        self.works_bytes = works_bytes


class BudgetExceeded(BeladyError):
    """An op would take the run over its budget; raised before anything is allocated for it.

    op            name of the op that could not run
    asked_bytes   bytes in use if it had run: everything held, its outputs and its workspace
    budget_bytes  the limit
    """

    def __init__(self, op: str, asked_bytes: int, budget_bytes: int, detail: str = "") -> None:
        super().__init__(
            f"{op} needs {asked_bytes:,} bytes in memory at once, {asked_bytes - budget_bytes:,} more than the budget of "
            f"{budget_bytes:,} bytes" + (f": {detail}" if detail else "")
        )
        self.op = op
        self.asked_bytes = asked_bytes
        self.budget_bytes = budget_bytes


def a_kind(thing: object) -> str:
    """What a message calls something of the wrong kind: "an int", "a Step"."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def quoted(thing: object) -> str:
    """What a message quotes, as Python writes it, shortened."""
    try:
        return shortened(repr(thing))
    except ValueError:  # an int of thousands of digits
        return a_kind(thing)


def shortened(text: str) -> str:
    """A name as a message has it; of a long one the beginning, for a message is a sentence whatever is in a damaged file."""
    return text if len(text) <= MOST_QUOTED else text[: MOST_QUOTED - 3] + "..."


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Refuse what is none of the names there are. Raises InputError naming them."""
    if not isinstance(name, str):
        raise InputError(f"{what} must be a name ({', '.join(known)}), not {quoted(name)}")
    if name not in known:
        raise InputError(f"unknown {what} {quoted(name)}; there are: {', '.join(known)}")


def check_positive(**given: object) -> None:
    """Refuse what is no positive integer, by its name. Raises InputError."""
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{name} must be a positive integer, not {number!r}")
