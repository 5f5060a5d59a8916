"""Errors come through pools of processes whole."""

from __future__ import annotations

import copy
import pickle

import pytest

from graphs import errors
from graphs.errors import BeladyError, BranchChanged, BudgetExceeded, InfeasibleBudget, NoScheduleFound

MADE: dict[type[BeladyError], BeladyError] = {
    BranchChanged: BranchChanged(" in forward", 1, 2, by_example=True),
    BudgetExceeded: BudgetExceeded("mm", 500, 400, "nothing else is in memory"),
    InfeasibleBudget: InfeasibleBudget("too small", budget_bytes=1, proved_bytes=2, works_bytes=3),
    NoScheduleFound: NoScheduleFound("stopped", works_bytes=3),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BeladyError)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_or_copied_error_is_the_same(kind: type[BeladyError]) -> None:
    error = MADE[kind] if kind in MADE else kind("said")
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind and again is not error
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
