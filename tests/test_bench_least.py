"""The smallest budget of a graph, and what a plan costs there."""

from __future__ import annotations

from dataclasses import replace

from belady.bench_least import row_of
from belady.readme_tables import smallest
from graphs.synthetic import chain


def test_row_of_a_graph() -> None:
    row = row_of(replace(chain(12), name="chain"), time_limit_s=2.0)
    assert row["proved_bytes"] == row["works_bytes"] == row["budget_bytes"] == 3
    assert row["peak_bytes"] <= 3 < row["keep_all_peak_bytes"]
    assert row["overhead"] > 1
    assert smallest([row]).splitlines()[-1].startswith("| chain | 25 | 21.43 % (3 B) | 21.43 % | 0.00 % |")
