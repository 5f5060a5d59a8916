"""Whether code that asks its data is a check, and with which answer it passes."""

from __future__ import annotations

import ast
import functools
import linecache
import traceback
from collections.abc import Sequence

_VALIDATION = "torch/distributions/distribution.py"  # asks of its arguments only whether they are valid


def passes_with(frames: Sequence[traceback.FrameSummary], asking: traceback.FrameSummary | None) -> bool | None:
    """The answer with which a check passes that is asked in ``frames``, ``asking`` the innermost one that is not PyTorch's: with
    which an assertion holds, or the condition of a ``raise`` does not. None where no check asks, or it is not clear."""
    if any(frame.filename.endswith(_VALIDATION) for frame in frames):
        return True
    if asking is None or asking.lineno is None:
        return None
    answers = set[bool]()
    for test, passes in _checks("".join(linecache.getlines(asking.filename))):
        if test.lineno <= asking.lineno <= (test.end_lineno or test.lineno):
            answers |= _answers(test, passes)
    return answers.pop() if len(answers) == 1 else None


@functools.lru_cache(maxsize=8)
def _checks(source: str) -> list[tuple[ast.expr, bool]]:
    """The conditions of checks in a file, and whether they are to hold."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # cells of notebooks may have commands in them
        return []
    asserted = [(node.test, True) for node in nodes if isinstance(node, ast.Assert)]
    raised = [(node.test, False) for node in nodes if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)]
    return asserted + raised


def _answers(test: ast.expr, passes: bool) -> set[bool]:
    """Answers to the questions in a condition, for it to be ``passes``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answers(test.operand, not passes)
    if isinstance(test, ast.BoolOp):
        return set[bool]().union(*(_answers(each, passes) for each in test.values))
    return {passes}
