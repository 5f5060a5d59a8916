"""The online engine: by hand, against the theory, and on random graphs under biting budgets."""

from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.errors import InfeasibleBudget, InputError
from graphs.ir import Graph, Op, Value
from graphs.synthetic import random_training
from online import HEURISTICS, Release, RunStatus, run, runtime
from online.engines.engine import Engine, Option
from planner.bounds import least_bytes
from planner.result import Status
from planner.schedule import Compute, Free, Schedule, keep_all
from planner.simulate import simulate
from tests.oracles import least_time, naive_peak, naive_time
from tests.plain_dtr import PlainDtr
from tests.strategies import graphs, graphs_and_budgets, random_graph


def chain(n: int) -> Graph:
    """The network of Theorem 3.1: t1 .. tn, then gn from t(n-1), gi from t(i-1) and g(i+1), g1 from g2; all units."""
    t, g = list(range(n)), list(range(n, 2 * n))  # t[i - 1] is ti
    ops = [Op("f1", (), (t[0],), 1)]
    ops += [Op(f"f{i}", (t[i - 2],), (t[i - 1],), 1) for i in range(2, n + 1)]
    ops += [Op(f"F{n}", (t[n - 2],), (g[n - 1],), 1)]
    ops += [Op(f"F{i}", (t[i - 2], g[i]), (g[i - 1],), 1) for i in range(n - 1, 1, -1)]
    ops += [Op("F1", (g[1],), (g[0],), 1)]
    values = [Value(f"t{i}", 1) for i in range(1, n + 1)] + [Value(f"g{i}", 1) for i in range(1, n + 1)]
    return Graph(f"chain_{n}", tuple(ops), tuple(values), frozenset(), frozenset({g[0]}))


def skip(workspace_bytes: int = 10) -> Graph:
    """f0 -> t0 -> f1 -> t1 -> f2 -> t2 -> f3 -> t3 -> f4, which reads t0 again; 10 bytes each, f3 has a workspace."""
    ops = (
        Op("f0", (), (0,), 1),
        Op("f1", (0,), (1,), 2),
        Op("f2", (1,), (2,), 4),
        Op("f3", (2,), (3,), 8, workspace_bytes=workspace_bytes),
        Op("f4", (3, 0), (4,), 16),
    )
    return Graph("skip", ops, tuple(Value(f"t{i}", 10) for i in range(5)), frozenset(), frozenset({4}))


# By hand


def test_an_eviction_and_its_rebuild() -> None:
    done = run(skip(), 30, heuristic="dtr")
    # f0 f1 f2: t0, t1, t2 fill the 30 bytes. t1 has had its last read. f3 needs t2, t3 and 10 bytes of workspace: t0 is all that
    # may go. t2 has had its last read. f4 needs t3 and t0: f0 runs again. Then t3 and t0 have had their last read.
    assert done.schedule == (
        *(Compute(0), Compute(1), Compute(2), Free(1)),
        *(Free(0), Compute(3), Free(2)),
        *(Compute(0), Compute(4), Free(3), Free(0)),
    )
    assert done.status is RunStatus.COMPLETED
    assert (done.time_ns, done.peak_bytes) == (32, 30)
    assert (done.counters.evictions, done.counters.recomputations, done.counters.recomputed_ns) == (1, 1, 1)
    assert done.counters.released == 4
    assert done.counters.deepest == 2  # f4 waits for f0


def test_the_engine_is_held_against_simulate_when_numbers_are_asked_for() -> None:
    done = run(skip(), 30, heuristic="dtr")
    with pytest.raises(AssertionError, match="disagree"):
        _ = replace(done, told=(32, 29)).peak_bytes
    with pytest.raises(AssertionError, match="disagree"):
        _ = replace(done, told=(31, 30)).overhead


def test_what_is_known_of_a_graph_goes_with_it() -> None:
    graph = skip()
    number = id(graph)
    assert run(graph, 30, heuristic="dtr").schedule == run(graph, 30, heuristic="dtr").schedule
    assert number in runtime._known
    del graph
    gc.collect()
    assert number not in runtime._known


def test_without_pressure_it_is_keep_all() -> None:
    done = run(skip(), 40, heuristic="dtr")
    assert done.schedule == keep_all(skip())
    assert done.overhead == 0
    assert done.counters.evictions == done.counters.evaluations == done.counters.visits == 0


VICTIMS = Graph(
    # Before fg the clock is at 39 and memory holds a (15 bytes, cost 30, untouched for 8), b (10, 1, 7), c (20, 2, 5) and d,
    # which fg reads. fg makes 1 byte and has a workspace of 9, one more than 55 bytes can hold: one of a, b, c must go.
    "victims",
    (
        Op("fa", (), (0,), 30),
        Op("fb", (), (1,), 1),
        Op("fc", (), (2,), 2),
        Op("fd", (), (3,), 5),
        Op("fg", (3,), (4,), 1, workspace_bytes=9),
        Op("fh", (0, 1, 2, 4), (5,), 1),
    ),
    (Value("a", 15), Value("b", 10), Value("c", 20), Value("d", 1), Value("g", 1), Value("h", 1)),
    frozenset(),
    frozenset({5}),
)


@pytest.mark.parametrize(
    ("heuristic", "victim"),
    [
        ("lru", 0),  # untouched for longest
        ("size", 2),  # largest
        ("local", 1),  # 30 / (15 * 8) = 0.25, 1 / (10 * 7) = 0.014, 2 / (20 * 5) = 0.02
        ("dtr", 1),  # the same: nothing is evicted yet
        ("dtr_eq", 1),
        ("msps", 2),  # 2, 0.1, 0.1: a tie, c joined the pool last
        ("e_star", 2),
    ],
)
def test_the_rules_disagree(heuristic: str, victim: int) -> None:
    done = run(VICTIMS, 55, heuristic=heuristic)
    assert done.schedule[4:6] == (Free(victim), Compute(4))
    assert done.counters.evaluations == 3
    assert done.time_ns == VICTIMS.keep_all_time_ns + VICTIMS.ops[victim].time_ns


def test_a_second_copy_of_a_sibling_counts_while_the_op_runs() -> None:
    # f0 makes x (4 bytes, read by f3) and y (4, read by f2 and f3); f1 has room only if one of them goes: x, by the tie rule the
    # output asked for joins last, and a first run asks for output 0. f3 then rebuilds x beside a second y.
    graph = Graph(
        "siblings",
        (
            Op("f0", (), (0, 1), 1),
            Op("f1", (), (2,), 1, workspace_bytes=3),
            Op("f3", (0, 1, 2), (3,), 1),
        ),
        (Value("x", 4), Value("y", 4), Value("z", 1), Value("out", 0)),
        frozenset(),
        frozenset({3}),
    )
    done = run(graph, 13, heuristic="msps")
    assert done.schedule == keep_all(graph)
    done = run(graph, 11, heuristic="msps")
    # 4 + 4 + 1 + 3 = 12 > 11. Rebuilding x: y, z and both outputs again = 13 > 11, and y is locked. Nothing can go.
    assert done.schedule == (Compute(0), Free(0), Compute(1))
    assert done.status is RunStatus.OUT_OF_MEMORY
    assert done.failure is not None
    assert (done.failure.op, done.failure.asked_bytes, done.failure.held) == ("f0", 13, (("y", 4), ("z", 1)))
    assert done.time_ns is done.peak_bytes is done.overhead is None
    plan = done.plan()
    assert plan.status is Status.UNKNOWN
    assert plan.schedule is None
    assert plan.notes["status"] == "OUT_OF_MEMORY"
    assert plan.notes["asked_bytes"] == 13


def test_results_of_effects_stay_and_effects_run_once() -> None:
    # send (an effect) makes a, which only f1 reads. f2 needs more than is left while a stays: it must take b instead.
    graph = Graph(
        "effect",
        (
            Op("send", (), (0,), 1, effect=True),
            Op("f1", (0,), (1,), 9),
            Op("f2", (), (2,), 1, workspace_bytes=5),
            Op("f3", (1, 2), (3,), 1),
        ),
        (Value("a", 4), Value("b", 4), Value("c", 1), Value("d", 1)),
        frozenset(),
        frozenset({3}),
    )
    for heuristic in HEURISTICS:
        done = run(graph, 12, heuristic=heuristic)
        assert done.schedule[:6] == (Compute(0), Compute(1), Free(1), Compute(2), Compute(1), Compute(3))
        assert set(done.schedule[6:]) <= {Free(1), Free(2)}  # "demand" lets go of nothing before it must


def test_an_evicted_output_is_brought_back_at_the_end() -> None:
    graph = Graph(
        "outputs",
        (Op("f0", (), (0,), 3), Op("f1", (), (1,), 5, workspace_bytes=7)),
        (Value("x", 4), Value("y", 4)),
        frozenset(),
        frozenset({0, 1}),
    )
    assert run(graph, 11).schedule == (Compute(0), Free(0), Compute(1), Compute(0))


def test_rebuilds_may_be_deeper_than_the_interpreter_allows() -> None:
    # Every t but the last is released on the way; `room` then drives out t(n-2), and `last` needs the whole chain again.
    n = 3 * sys.getrecursionlimit()
    ops = [Op("f0", (), (0,), 1)] + [Op(f"f{i}", (i - 1,), (i,), 1) for i in range(1, n)]
    ops += [Op("room", (n - 1,), (n,), 1, workspace_bytes=6), Op("last", (n, n - 2), (n + 1,), 1)]
    values = tuple(Value(f"t{i}", 1) for i in range(n + 2))
    done = run(Graph("deep", tuple(ops), values, frozenset(), frozenset({n + 1})), 8)
    assert done.completed
    assert done.counters.deepest == n
    assert done.counters.recomputations == n - 1


def test_reclaim_frees_what_a_rebuild_needed_in_passing() -> None:
    # t0 -> t1 -> t2; t0 is released after f1, t1 is read last by `last`, and `room` drives it out. Rebuilding it makes t0 again.
    ops = (
        Op("f0", (), (0,), 1),
        Op("f1", (0,), (1,), 1),
        Op("room", (), (2,), 1, workspace_bytes=6),
        Op("last", (1, 2), (3,), 1),
    )
    graph = Graph("reclaim", ops, tuple(Value(f"t{i}", 2) for i in range(4)), frozenset(), frozenset({3}))
    start = (Compute(0), Compute(1), Free(0), Free(1), Compute(2), Compute(0), Compute(1))
    assert run(graph, 8, heuristic="dtr").schedule == (*start, Compute(3), Free(1), Free(2))  # t0 stays to the end
    assert run(graph, 8, reclaim=True, heuristic="dtr").schedule == (*start, Free(0), Compute(3), Free(1), Free(2))


def test_reclaim_keeps_no_sibling_that_nobody_needs() -> None:
    # f0 makes a and b; b is released after f1, a is driven out by `room`. Rebuilding a makes b again, which goes at once.
    ops = (
        Op("f0", (), (0, 1), 1),
        Op("f1", (1,), (2,), 1),
        Op("room", (), (3,), 1, workspace_bytes=6),
        Op("last", (0, 2, 3), (4,), 1),
    )
    graph = Graph("siblings", ops, tuple(Value(name, 2) for name in "abcde"), frozenset(), frozenset({4}))
    start = (Compute(0), Compute(1), Free(1), Free(0), Compute(2), Compute(0))
    assert run(graph, 10, heuristic="lru").schedule == (*start, Compute(3), Free(0), Free(2), Free(3))
    assert run(graph, 10, heuristic="lru", reclaim=True).schedule == (*start, Free(1), Compute(3), Free(0), Free(2), Free(3))


def test_ignored_releases_leave_values_in_the_pool() -> None:
    # f3 would need 50 bytes. With "size" all score alike, and t1 joined the pool after t0, which f2 did not touch.
    steps = (Compute(0), Compute(1), Compute(2), Free(1), Compute(3))
    assert run(skip(), 40, heuristic="size", release="ignore").schedule[:5] == steps
    assert run(skip(), 50, release="ignore").schedule == tuple(Compute(i) for i in range(5))


def test_what_is_dead_goes_first_though_the_rest_takes_no_time() -> None:
    # When f3 needs room, t1 is dead, t0 is not, and making either takes no time.
    ops = (
        Op("f0", (), (0,), 0),
        Op("f1", (0,), (1,), 0),
        Op("f2", (1,), (2,), 0),
        Op("f3", (2,), (3,), 0),
        Op("f4", (0, 3), (4,), 0),
    )
    graph = Graph("free", ops, tuple(Value(f"t{i}", 2) for i in range(5)), frozenset(), frozenset({4}))
    for heuristic in ("demand", "demand+counted", "demand+next_use"):
        done = run(graph, 1.0, heuristic=heuristic)
        assert done.completed and done.counters.recomputations == 0


def test_banishing_pins_what_can_no_longer_be_rebuilt() -> None:
    # t1 goes for good after f2, so t2 is pinned; f3 then has only t0 to evict, and t0 can be rebuilt. t2 goes after f3, which
    # pins t3. In 30 bytes the run is that of eager eviction.
    assert run(skip(), 30, release="banish", heuristic="dtr").schedule == run(skip(), 30, heuristic="dtr").schedule
    # Without t0's last read at the end it is banished after f1, t1 is pinned, and f3 has nothing to evict but t1's successor.
    ops = (
        Op("f0", (), (0,), 1),
        Op("f1", (0,), (1,), 1),
        Op("room", (), (2,), 1, workspace_bytes=6),
        Op("last", (1, 2), (3,), 1),
    )
    graph = Graph("pinned", ops, tuple(Value(f"t{i}", 2) for i in range(4)), frozenset(), frozenset({3}))
    assert run(graph, 8, heuristic="dtr").completed
    stopped = run(graph, 8, release="banish", heuristic="dtr")
    assert (stopped.status, stopped.schedule) == (RunStatus.OUT_OF_MEMORY, (Compute(0), Compute(1), Free(0)))
    assert stopped.failure is not None
    assert stopped.failure.held == (("t1", 2),)


def test_what_is_banished_goes_again_where_it_is_made_along_with_a_sibling() -> None:
    # Nobody reads t0, which is banished at once. t1 is evicted for "room" and made again for "last": with it comes t0.
    ops = (
        Op("both", (), (0, 1), 1),
        Op("room", (), (2,), 9, workspace_bytes=5),
        Op("last", (1, 2), (3,), 1, workspace_bytes=3),
    )
    graph = Graph(
        "siblings", ops, tuple(Value(f"t{i}", size) for i, size in enumerate((4, 1, 1, 1))), frozenset(), frozenset({3})
    )
    for heuristic in ("lru", "demand"):
        done = run(graph, 6, release="banish", heuristic=heuristic)
        assert done.schedule[:7] == (Compute(0), Free(0), Free(1), Compute(1), Compute(0), Free(0), Compute(2))


# What cannot be used


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        run(skip(), 29)
    assert (caught.value.budget_bytes, caught.value.proved_bytes) == (29, 30)
    assert caught.value.works_bytes >= 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heuristic": "best"}, r"unknown heuristic 'best'; there are: dtr, "),
        ({"release": "never"}, r"unknown release policy 'never'; there are: eager, ignore, banish"),
        ({"release": []}, r"release policy must be a name \(eager, ignore, banish\), not \[\]"),
        ({"heuristic": []}, r"heuristic must be a name \(dtr, .*\), not \[\]"),
        ({"heuristic": "dtr+"}, r"'' cannot be behind dtr; there are: reclaim, eager, .*, bytes, .*, counted, "),
        ({"allocator": {}}, r"allocator must be a name \(bytes, caching, .*\), not \{\}"),
        ({"allocator": "heap"}, r"unknown allocator 'heap'; there are: bytes, caching, "),
        ({"options": None}, r"options must be names in a list \(.*\), not None"),
        ({"options": "counted"}, r"options must be names in a list \(.*\), not 'counted'"),
        ({"options": ["count"]}, r"unknown option 'count'; there are: "),
        ({"options": [[]]}, r"option must be a name \(.*\), not \[\]"),
        ({"reclaim": "no"}, r"reclaim must be True or False, not 'no'"),
        ({"thrash_limit": 0.5}, r"thrash_limit must be at least 1"),
        ({"execute": True}, r"a graph without a model behind it"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(skip(), 0.9, **options)  # type: ignore[arg-type]


def test_options_may_be_any_iterable() -> None:
    assert run(skip(), 0.9, heuristic="dtr", options=iter(["yield"])).rule == "dtr+yield"  # type: ignore[arg-type]


@pytest.mark.parametrize(("more_ns", "more_bytes", "what"), [(1 << 62, 0, "times"), (0, 10**400, "bytes")])
def test_numbers_beyond_64_bits_are_refused(more_ns: int, more_bytes: int, what: str) -> None:
    graph = skip()
    ops = tuple(replace(op, time_ns=op.time_ns + more_ns) for op in graph.ops)
    values = tuple(replace(value, size_bytes=value.size_bytes + more_bytes) for value in graph.values)
    with pytest.raises(InputError, match=rf"its {what} add up to 2\^\d+ \w+ or more; below 2\^62 is needed"):
        run(replace(graph, ops=ops, values=values), 1.0)


@pytest.mark.parametrize("rule", ["dtr", "demand", "demand+counted+yield"])
def test_small_values_that_are_dropped_go_though_none_is_chosen(rule: str) -> None:
    """A rule that lets the dropped stay until room is needed would keep those that it never looks at for good."""
    ops: list[Op] = []
    values: list[Value] = []
    last: tuple[int, ...] = ()
    for _ in range(300):
        made = (len(values), len(values) + 1)
        values += (Value(f"v{made[0]}", 1000), Value(f"v{made[1]}", 4))
        ops.append(Op(f"op{len(ops)}", last, made, 1))
        last = made
    graph = Graph("pairs", tuple(ops), tuple(values), frozenset(), frozenset(last))
    done = run(graph, 1.0, heuristic=f"{rule}+skip_small")
    assert done.completed and not done.counters.recomputations
    if rule != "dtr":
        assert not run(graph, 1.0, heuristic=f"{rule}+skip_small+ignore").completed  # which lets nothing go


def test_thrashing_stops_a_run() -> None:
    slow = run(chain(100), 20, heuristic="lru", thrash_limit=100)
    assert slow.completed  # 355 recomputations of 200 ops
    stopped = run(chain(100), 20, heuristic="lru", thrash_limit=2)
    assert stopped.status is RunStatus.THRASHED
    assert stopped.counters.recomputed_ns == 201  # twice the 200 ns is the limit: the first run above it ended it
    assert stopped.schedule == slow.schedule[: len(stopped.schedule)]
    assert stopped.plan().schedule is None
    free = replace(chain(100), ops=tuple(replace(op, time_ns=0) for op in chain(100).ops))
    assert run(free, 20).completed  # no time passes, so no limit on time is reached


def test_runs_repeat() -> None:
    graph = chain(64)
    for heuristic in HEURISTICS:
        assert run(graph, 16, heuristic=heuristic, seed=3).schedule == run(graph, 16, heuristic=heuristic, seed=3).schedule
    assert run(graph, 16, heuristic="random", seed=3).schedule != run(graph, 16, heuristic="random", seed=4).schedule


def test_a_run_is_a_plan() -> None:
    done = run(chain(64), 0.5, heuristic="dtr")
    plan = done.plan()
    assert (plan.method, plan.status, plan.schedule) == ("online:dtr", Status.FEASIBLE, done.schedule)
    assert (plan.time_ns, plan.peak_bytes, plan.bound_ns) == (done.time_ns, done.peak_bytes, None)
    assert done.row() == plan.row()
    assert run(chain(64), 0.5, reclaim=True, release="ignore", heuristic="dtr").plan().method == "online:dtr+reclaim+ignore"
    assert done.row()["recomputed_ops"] == done.counters.recomputations
    assert done.budget_bytes == simulate(chain(64), keep_all(chain(64))).peak_bytes // 2


def test_the_simulated_driver_needs_no_torch() -> None:
    code = "import online, sys; online.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# The theory (Kirisame et al., ICLR 2021, section 3 and appendices A and B)

RULES = ("e_star", "dtr", "dtr_eq", "msps", "lru", "local")
# N: recomputations with budget 2 * ceil(sqrt(N)) under each of RULES
RECOMPUTATIONS = {
    16: (13, 8, 8, 9, 11, 11),
    64: (74, 49, 49, 60, 161, 161),
    100: (108, 80, 80, 100, 355, 355),
    200: (212, 173, 173, 226, 1218, 1218),
    400: (642, 360, 360, 515, 4525, 4525),
}


@pytest.mark.parametrize("n", RECOMPUTATIONS)
def test_recomputations_on_a_chain(n: int) -> None:
    budget_bytes = 2 * math.ceil(math.sqrt(n))
    found = [run(chain(n), budget_bytes, heuristic=rule, thrash_limit=100) for rule in RULES]
    assert tuple(done.counters.recomputations for done in found) == RECOMPUTATIONS[n]
    # Theorem 3.1: O(N) executions where the rule knows of chains
    assert all(done.counters.executions <= 2 * 2 * n for done in found[:4])
    assert run(chain(n), budget_bytes, heuristic="e_star", release="banish").counters.executions <= 2 * 2 * n


def longest_gap(graph: Graph, schedule: Schedule, n: int) -> int:
    """Longest run of evicted values among t1 .. tn after the forward pass."""
    there: set[int] = set()
    for step in schedule:
        if isinstance(step, Free):
            there.discard(step.value)
        elif step.op == n:
            break
        else:
            there.update(graph.ops[step.op].outputs)
    gaps = "".join("." if v in there else "x" for v in range(n - 1)).split(".")
    return max(map(len, gaps))


@pytest.mark.parametrize(("n", "budget_bytes", "gap"), [(16, 8, 2), (64, 16, 6), (200, 30, 7), (200, 15, 19), (400, 20, 31)])
def test_gaps_after_the_forward_pass(n: int, budget_bytes: int, gap: int) -> None:
    graph = chain(n)
    schedule = run(graph, budget_bytes, heuristic="e_star", thrash_limit=100).schedule
    assert longest_gap(graph, schedule, n) == gap <= 2 * (n - 2) / (budget_bytes - 1)  # Lemma A.1
    forward = [step.op for step in schedule if isinstance(step, Compute)][:n]
    assert forward == list(range(n))  # nothing runs twice


@pytest.mark.parametrize("heuristic", ["dtr", "dtr_eq", "e_star", "lru"])
@pytest.mark.parametrize(("nodes", "budget_bytes"), [(64, 4), (128, 8), (256, 8), (256, 16)])
def test_the_adversary(heuristic: str, nodes: int, budget_bytes: int) -> None:
    # Theorem 3.2: a root, `budget` paths from it, memory for the root and one storage less than there are paths. Extending the
    # shortest path of which nothing is in memory costs that whole path, so N nodes cost N (N / B + 1) / 2.
    engine = Engine(budget_bytes, HEURISTICS[heuristic])
    root, tensors = engine.add_op((), [engine.add_storage(1, pinned=True)], 0)
    engine.call(root)
    paths: list[list[int]] = [[] for _ in range(budget_bytes)]  # tensors; storage number = tensor number here
    for _ in range(nodes):
        path = min((p for p in paths if not any(engine.resident[t] for t in p)), key=len)
        op, made = engine.add_op([path[-1] if path else tensors[0]], [engine.add_storage(1)], 1)
        engine.call(op)
        path.append(made[0])
    assert {len(path) for path in paths} == {nodes // budget_bytes}
    assert engine.clock - 1 == nodes * (nodes // budget_bytes + 1) // 2


# Random graphs


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, int]:
    """A graph and a budget that bites: any between what its largest op needs, feasible or not, and what keep-all needs."""
    graph = draw(graphs(max_ops=10, random=True, effect=True))
    low, high = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes - 1
    return graph, draw(st.integers(low, max(low, high)))


@given(cases(), st.sampled_from(list(HEURISTICS)), st.sampled_from(list(Release)), st.booleans(), st.integers(0, 3))
@settings(max_examples=300)
def test_every_run_is_what_it_says(case: tuple[Graph, int], heuristic: str, release: Release, reclaim: bool, seed: int) -> None:
    graph, budget_bytes = case
    done = run(graph, max(1, budget_bytes), heuristic=heuristic, release=release, reclaim=reclaim, seed=seed)
    assert naive_peak(graph, done.schedule) <= max(1, budget_bytes)
    if done.completed:
        trace = simulate(graph, done.schedule)  # raises where the schedule is not valid
        assert (done.time_ns, done.peak_bytes) == (trace.time_ns, trace.peak_bytes)
        assert (done.time_ns, done.peak_bytes) == (naive_time(graph, done.schedule), naive_peak(graph, done.schedule))
        assert graph.keep_all_time_ns + done.counters.recomputed_ns == done.time_ns
        assert done.counters.recomputations == trace.recomputed_ops
    else:
        assert done.status is RunStatus.OUT_OF_MEMORY
        assert done.failure is not None
        assert done.failure.asked_bytes > budget_bytes
        held = sum(size for _, size in done.failure.held)
        op = next(op for op in graph.ops if op.name == done.failure.op)
        assert done.failure.asked_bytes == held + sum(graph.values[v].size_bytes for v in op.outputs) + op.workspace_bytes


@pytest.mark.parametrize("release", ["eager", "ignore"])
@pytest.mark.parametrize("heuristic", [name for name, rule in HEURISTICS.items() if not rule.random and name != "demand"])
def test_the_engine_does_what_the_paper_says(heuristic: str, release: str) -> None:
    stopped = rebuilt = 0
    for seed in range(60):
        graph = random_graph(seed, max_ops=40, random=True, effect=seed % 3 == 0)
        low, high = least_bytes(graph), simulate(graph, keep_all(graph)).peak_bytes
        budget_bytes = high - (high - low) * (seed % 5 + 1) // 6
        done = run(graph, budget_bytes, heuristic=heuristic, release=release, thrash_limit=1000)
        wanted = PlainDtr(graph, budget_bytes, HEURISTICS[heuristic], eager=release == "eager").run()
        assert (done.schedule if done.completed else None) == wanted, f"seed {seed}"
        stopped += wanted is None
        rebuilt += done.completed and done.counters.recomputations > 0
    assert stopped > 5 and rebuilt > 5


@given(graphs_and_budgets(keep_order=True, random=True, effect=True), st.sampled_from(list(HEURISTICS)))
@settings(max_examples=150)
def test_no_run_beats_the_optimum(case: tuple[Graph, int], heuristic: str) -> None:
    graph, budget_bytes = case
    done = run(graph, max(1, budget_bytes), heuristic=heuristic)
    best = least_time(graph, max(1, budget_bytes), keep_order=True)
    assert best is not None
    if done.time_ns is not None:
        assert best[0] <= done.time_ns


def test_a_rule_names_its_options() -> None:
    graph = chain(8)
    named, spelt = run(graph, 0.6, heuristic="dtr+reclaim"), run(graph, 0.6, heuristic="dtr", reclaim=True)
    assert named.schedule == spelt.schedule and named.rule == spelt.rule == "dtr+reclaim"
    assert named.plan().method == "online:dtr+reclaim"
    assert run(graph, 1.0, heuristic="lru+banish").rule == "lru+banish"
    with pytest.raises(InputError, match="'never' cannot be behind "):
        run(graph, 1.0, heuristic="dtr+never")


@given(cases(), st.sampled_from(["dtr", "demand", "local"]), st.sets(st.sampled_from(list(Option))), st.booleans())
@settings(max_examples=150)
def test_options_leave_a_run_what_it_says(case: tuple[Graph, int], heuristic: str, options: set[Option], reclaim: bool) -> None:
    graph, budget_bytes = case
    done = run(graph, max(1, budget_bytes), heuristic=heuristic, options=options, reclaim=reclaim)
    assert naive_peak(graph, done.schedule) <= max(1, budget_bytes)
    if done.completed:
        assert (done.time_ns, done.peak_bytes) == (naive_time(graph, done.schedule), naive_peak(graph, done.schedule))
    assert run(graph, max(1, budget_bytes), heuristic=done.rule).schedule == done.schedule


def test_counting_spares_what_a_rebuild_reads_twice() -> None:
    # t0 -> a and t0 -> b -> c; last reads a and c. With a, c and t0 gone, t0 is rebuilt once if it is kept for its second read.
    ops = (
        Op("f0", (), (0,), 100),
        Op("fa", (0,), (1,), 1),
        Op("fb", (0,), (2,), 1),
        Op("fc", (2,), (3,), 1),
        Op("big", (), (4,), 1, workspace_bytes=20),
        Op("drop", (4,), (5,), 1),
        Op("last", (1, 3, 5), (6,), 1),
    )
    values = (*(Value(f"v{i}", 10) for i in range(4)), Value("v4", 10), Value("v5", 1), Value("v6", 1))
    graph = Graph("shared", ops, values, frozenset(), frozenset({6}))
    plain, counted = (run(graph, 34, heuristic=rule) for rule in ("dtr+reclaim", "dtr+counted"))
    assert plain.counters.recomputed_ns - counted.counters.recomputed_ns == 100
    assert simulate(graph, counted.schedule).peak_bytes <= 34


@pytest.mark.parametrize(("seed", "share", "heuristic"), [(0, 0.7, "lru"), (1, 0.675, "lru"), (4, 0.575, "demand")])
def test_what_waits_yields_where_nothing_else_can_go(seed: int, share: float, heuristic: str) -> None:
    graph = random_training(20, seed=seed)
    stuck, done = (run(graph, share, heuristic=heuristic + option) for option in ("", "+yield"))
    assert stuck.status is RunStatus.OUT_OF_MEMORY and done.completed
    assert simulate(graph, done.schedule).peak_bytes <= done.budget_bytes


@given(cases(), st.sampled_from(list(HEURISTICS)), st.booleans())
def test_yielding_changes_nothing_where_it_is_not_needed(case: tuple[Graph, int], heuristic: str, reclaim: bool) -> None:
    graph, budget_bytes = case
    plain, yielding = (run(graph, max(1, budget_bytes), heuristic=heuristic + more, reclaim=reclaim) for more in ("", "+yield"))
    assert plain.status is RunStatus.OUT_OF_MEMORY or yielding.steps == plain.steps
    if yielding.status is RunStatus.OUT_OF_MEMORY:
        assert plain.status is RunStatus.OUT_OF_MEMORY


def test_a_run_is_told_in_a_line() -> None:
    graph = chain(10)
    costs = r"overhead \d+\.\d\d%, peak \d bytes, \d+ ops recomputed"
    assert re.fullmatch(rf"Run\({graph.name} in 8 bytes, COMPLETED with dtr, {costs}\)", repr(run(graph, 8, heuristic="dtr")))
    stopped = repr(run(graph, 8, heuristic="random", thrash_limit=1.0))
    assert stopped == f"Run({graph.name} in 8 bytes, THRASHED with random)"
