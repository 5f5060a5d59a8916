"""What is compiled when it is first used, of the planner too."""

from __future__ import annotations

from online.neighborhood import Relations
from planner import on_demand


def compile_all() -> None:
    """Compile all of it now, and keep it on disk: some twenty seconds that no time limit counts and no run waits for."""
    from online.engines.compiled_searches import Compiled

    on_demand.compile_all()
    Compiled(Relations(), None)
