"""What is compiled when it is first used, of the planner too."""

from __future__ import annotations

from online.neighborhood import Relations
from planner import on_demand


def compile_all() -> None:
    """Compile all of it now, and keep it on disk: it may take a minute, which no plan and no run waits for then."""
    from online.engines.compiled_searches import Compiled

    on_demand.compile_all()
    Compiled(Relations(), None)
