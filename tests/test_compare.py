"""The optimum and the online rules side by side."""

import pytest

from graphs import Graph, GraphMismatch, InputError, Op, Value
from online import compare, diff, run
from planner import Status, plan, simulate


def training_chain(layers: int) -> Graph:
    """Unit chain of ``layers`` forward ops, then the backward, each backward op reading its forward value and the gradient."""
    n = 2 * layers + 1
    edges = [(i - 1, i) for i in range(1, n)] + [(i, 2 * layers - i) for i in range(layers)]
    reads: list[set[int]] = [set() for _ in range(n)]
    for u, v in edges:
        if u != v:
            reads[v].add(u)
    ops = tuple(Op(f"op{i}", tuple(sorted(reads[i])), (i,), 10, kind="f" if i < layers else "b") for i in range(n))
    return Graph("chain", ops, tuple(Value(f"v{i}", 100) for i in range(n)), frozenset(), frozenset({n - 1}))


@pytest.fixture(scope="module")
def chain() -> Graph:
    return training_chain(8)


def test_rows_tell_the_same_story_as_simulate(chain: Graph) -> None:
    found = compare(chain, [0.8, 0.5], heuristics=("dtr", "lru"))
    rows = found.rows()
    assert [row["method"] for row in rows] == ["keep_all"] + ["cutting_stages", "online:dtr", "online:lru"] * 2
    for block, plan_row, *run_rows in ((b, *rows[1 + 3 * i : 4 + 3 * i]) for i, b in enumerate(found.blocks)):
        assert block.plan.schedule is not None
        assert plan_row["time_ns"] == simulate(chain, block.plan.schedule).time_ns
        for run_, row in zip(block.runs, run_rows, strict=True):
            trace = simulate(chain, run_.schedule)
            assert (row["time_ns"], row["peak_bytes"]) == (trace.time_ns, trace.peak_bytes)
            assert row["peak_bytes"] <= row["budget_bytes"]
            # One bound for all of a budget's rows, and nobody beats it.
            assert plan_row["bound_ns"] == row["bound_ns"] <= row["time_ns"]
            assert row["gap"] == pytest.approx(1 - row["bound_ns"] / row["time_ns"])


def test_unit_chain_costs_what_is_known_of_it(chain: Graph) -> None:
    # Optimal runs of the 8-layer unit chain by budget: 10 -> 17, 7 -> 20, 5 -> 22, in units of one op.
    blocks = compare(chain, [1000, 700, 500], heuristics=()).blocks
    assert [block.plan.time_ns for block in blocks] == [170, 200, 220]


def test_difference_names_the_ops_the_online_run_repeats(chain: Graph) -> None:
    p = plan(chain, 500)
    o = run(chain, 500, heuristic="lru")
    d = diff(p, o)
    assert d.extra_ns is not None and p.time_ns is not None and o.time_ns is not None
    assert d.extra_ns == o.time_ns - p.time_ns == sum(row.extra_ns for row in d.ops())
    assert d.extra_ns > 0
    assert d.distance == pytest.approx(o.time_ns / p.bound_ns - 1)  # type: ignore[operator]
    text = str(d)
    assert "chain in 500 B" in text
    assert d.ops()[0].name in text
    assert f"{d.distance:.2%} above the bound" in text


def test_difference_needs_one_graph_and_one_budget(chain: Graph) -> None:
    with pytest.raises(GraphMismatch, match="under the same budget"):
        diff(plan(chain, 500), run(chain, 600))
    with pytest.raises(GraphMismatch, match="not the same graph"):
        diff(plan(chain, 500), run(training_chain(7), 500))


def test_infeasible_budget_is_a_row_not_an_exception(chain: Graph) -> None:
    block, other = compare(chain, [200, 500]).blocks
    assert block.plan.status is Status.INFEASIBLE and block.runs == ()
    assert other.plan.status is Status.OPTIMAL


def test_the_plan_is_never_worse_than_an_online_run(chain: Graph) -> None:
    for block in compare(chain, [0.6, 0.5, 0.4, 0.3], heuristics=("dtr", "lru", "size"), time_limit_s=1e-3).blocks:
        for run_ in block.runs:
            if run_.time_ns is not None:
                assert block.plan.time_ns is not None and block.plan.time_ns <= run_.time_ns


def test_a_graph_cannot_be_executed(chain: Graph) -> None:
    with pytest.raises(InputError, match="not executed"):
        compare(chain, [0.5], execute=True)


def test_progress_is_told(chain: Graph) -> None:
    said: list[str] = []
    compare(chain, [0.5], progress=said.append)
    assert said == ["online dtr in 500 B (50%)", "cutting_stages in 500 B (50%)"]
