"""The fine grid of budgets: a row for each, monotone, and the smallest budget."""

from __future__ import annotations

from dataclasses import replace

from belady.bench_grid import rows_of
from belady.readme_tables import stepped
from graphs.synthetic import linear_network


def test_rows_of_a_graph() -> None:
    graph = replace(linear_network(10), name="chain")
    *rows, least = rows_of(graph, step=0.05, time_limit_s=5.0)
    assert rows[0]["budget_bytes"] == least["keep_all_peak_bytes"]
    assert least["proved_bytes"] <= least["works_bytes"] <= rows[-1]["budget_bytes"]
    assert rows[-1]["budget_bytes"] - least["works_bytes"] <= 0.05 * least["keep_all_peak_bytes"] + 1
    times_ns = [row["time_ns"] for row in rows]
    assert times_ns == sorted(times_ns)
    assert times_ns[0] < times_ns[-1]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in rows)

    line = stepped([*rows, least]).splitlines()[-1]
    assert line.startswith(f"| chain | {len(graph.ops)} | {len(rows)} | yes |")
    assert "| no |" in stepped([*rows[:-1], {**rows[-1], "time_ns": 1}, least])
