"""The optimum and the online rules side by side."""

import sys

import numpy as np
import pytest

from graphs import Graph, GraphMismatch, InputError, Op, Value
from graphs.synthetic import linear_network
from online import compare, diff, run, split
from planner import Plan, Status, plan, simulate


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
    for i, block in enumerate(found.blocks):
        plan_row, *run_rows = rows[1 + 3 * i : 4 + 3 * i]
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


def test_one_budget_and_one_rule_need_no_list(chain: Graph) -> None:
    for one, several in ((0.5, [0.5]), ("500", ["500"]), (500, [500]), (np.int64(500), [np.float32(0.5)])):
        found = compare(chain, one, heuristics="lru")
        assert [row["method"] for row in found.rows()] == ["keep_all", "cutting_stages", "online:lru"]
        assert [b.budget_bytes for b in found.blocks] == [b.budget_bytes for b in compare(chain, several, heuristics=()).blocks]


def test_a_budget_or_rule_that_is_given_twice_counts_once(chain: Graph) -> None:
    found = compare(chain, [0.5, 700, "50%", 500, 0.7], heuristics=["lru", "dtr", "lru"])
    assert [block.budget_bytes for block in found.blocks] == [500, 700]
    assert [[run_.rule for run_ in block.runs] for block in found.blocks] == [["lru", "dtr"]] * 2
    (block,) = compare(chain, 0.5, heuristics=["dtr+eager+reclaim", "dtr+reclaim", "dtr", "dtr+bytes"]).blocks
    assert [run_.rule for run_ in block.runs] == ["dtr+reclaim", "dtr"]  # spellings of two rules


def test_a_comparison_prints_its_rows(chain: Graph) -> None:
    found = compare(chain, [0.5, 200], heuristics=("lru",))
    title, head, *lines = str(found).splitlines()
    assert title == "chain: 17 ops, keep-all 0.000 ms"
    assert head.split() == ["budget", "method", "status", "overhead", "bound", "gap", "peak", "recomputed"]
    assert [line.split()[3:5] for line in lines] == [
        ["keep_all", "OPTIMAL"], ["cutting_stages", "OPTIMAL"], ["online:lru", "FEASIBLE"], ["cutting_stages", "INFEASIBLE"],
    ]  # fmt: skip
    assert lines[1].split()[:3] == ["50%", "500", "B"] and "29.41%" in lines[1]  # 22 runs instead of 17
    assert lines[3].split()[5:] == ["-", "0.00%", "-", "-", "-"]  # no schedule, and no bound above the keep-all time


def test_a_comparison_that_was_interrupted_has_what_was_found(chain: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["online.compare"]  # the name of the module is also that of its function
    solve = module.solve_halves

    def interrupted(graph: Graph, budget_bytes: int, **options: object) -> Plan:
        if budget_bytes == 500:
            raise KeyboardInterrupt
        return solve(graph, budget_bytes, **options)

    monkeypatch.setattr(module, "solve_halves", interrupted)
    found = compare(chain, [700, 500, 400])
    assert found.interrupted and [block.budget_bytes for block in found.blocks] == [700]
    assert str(found).endswith("interrupted: budgets may be missing")
    assert not compare(chain, [700]).interrupted


def test_misuse_is_told_in_one_sentence(chain: Graph) -> None:
    p, o = plan(chain, 500), run(chain, 500)
    with pytest.raises(InputError, match="diff takes a Plan, then a Run; first came a Run"):
        diff(o, p)  # type: ignore[arg-type]
    for wrong in (p, "resnet50", None):
        with pytest.raises(InputError, match=r"compare takes a captured Step or a Graph, not a \w+; capture\(model"):
            compare(wrong, [0.5])  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"run takes a captured Step or a Graph, not a \w+; capture\(model"):
            run(wrong, 0.5)  # type: ignore[arg-type]
    for limit in ("x", None, True, 0.5, float("nan")):
        with pytest.raises(InputError, match="thrash_limit must be at least 1"):
            run(chain, 500, thrash_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="heuristic must be a name"):
        run(chain, 500, heuristic=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="heuristic must be a name"):
        compare(chain, 0.5, heuristics=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="progress must be a function or None, not 5"):
        compare(chain, 0.5, progress=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"split takes a Run \(of online.run\), not an int"):
        split(5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed must be"):
        run(chain, 500, heuristic="random", seed=-1)


def test_a_split_is_of_runs_with_the_same_limit() -> None:
    """With the usual one, the runs beside it would have been stopped."""
    graph = linear_network(200, size_bytes=512)
    done = run(graph, 512 * 12, heuristic="lru", thrash_limit=1000)
    assert done.completed and (done.overhead or 0) > 10
    assert split(done).addressed.completed
    stopped = run(graph, 512 * 12, heuristic="lru+arena", thrash_limit=2)
    assert not split(stopped).addressed.completed and split(stopped).addressed.thrash_limit == 2


def test_progress_is_told(chain: Graph) -> None:
    said: list[str] = []
    compare(chain, [0.5], progress=said.append)
    assert said[:2] == ["online demand in 500 B (50%)", "cutting_stages in 500 B (50%)"]
    assert said[-1].startswith("cutting_stages in 500 B (50%): overhead ") and len(said) > 2


def test_the_distance_is_split_into_what_it_is_made_of(chain: Graph) -> None:
    comparison = compare(chain, 0.5, heuristics=["dtr", "dtr+arena", "size"], time_limit_s=5, splits=True)
    base, there, size = comparison.blocks[0].splits
    told = run(chain, 0.5, heuristic="dtr+next_use")
    assert base.told is not None and base.told.schedule == told.schedule and not told.is_online
    assert base.foresight_ns == base.run.time_ns - told.time_ns  # type: ignore[operator]
    assert there.addressed.schedule == base.run.schedule and base.addressed.schedule == there.run.schedule
    assert base.fragmentation_ns == there.fragmentation_ns
    assert size.told is None and size.foresight_ns is None
    row = next(row for row in comparison.rows() if row["method"] == "online:dtr")
    assert row["foresight_ns"] == base.foresight_ns and row["search_s"] == base.run.counters.search_s
    assert "next uses known (not online)" in str(comparison)
