"""Plans for networks that are no workloads; one result row for each budget.

    python -m belady.bench_others

What the planner is tuned on shows how well it was tuned; these networks (``scripts/others.py``) show how it does elsewhere. Rows
that are in the file already are not made again, so an interrupted run goes on where it stopped. Nothing is executed: costs are
the roofline's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .bench_plans import STEP_LIMIT_S, Case, solve_all
from .others import OTHERS, other_graph
from .output import ended

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/others.jsonl", help="rows are added to this file (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=list(OTHERS), help="one network; several times")
    parser.add_argument(
        "--time-limit", type=float, default=STEP_LIMIT_S, metavar="S", help="for each budget (default: %(default)g)"
    )
    arguments = parser.parse_args(argv)

    def work() -> int:
        names = arguments.only or OTHERS
        solve_all(arguments.out, (Case(other_graph(name), SHARES, arguments.time_limit) for name in names))
        return 0

    return ended("bench_others", work)


if __name__ == "__main__":
    sys.exit(main())
