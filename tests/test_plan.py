"""The entry ``plan``: budgets, errors, options."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphs import Graph, GraphMismatch, InfeasibleBudget, InputError, InvalidSchedule, NoScheduleFound, Op, Value
from graphs.capture import Step, capture
from graphs.synthetic import linear_network, random_training
from online import compare, run
from planner import Compute, Plan, Status, keep_all, load_plan, min_budget, plan, plans, simulate, solve
from planner.early import in_halves, with_early_kept
from planner.least.smallest import smaller_and_smaller
from planner.plan import solve_halves, with_costs
from planner.schedule import Free, hold_early


@pytest.fixture
def ladder() -> Graph:
    """Forward a, b, c (10 bytes each), backward reads b, then a: dropping a and making it again saves 10 bytes for 5 ns.

    in memory while keep-all runs: a 10, ab 20, abc 30, then d: b c d + a = 40, then e: a d e = 30
    """
    return Graph(
        "ladder",
        (
            Op("a", (), (0,), 5),
            Op("b", (0,), (1,), 50),
            Op("c", (1,), (2,), 5),
            Op("d", (1, 2), (3,), 5),
            Op("e", (0, 3), (4,), 5),
        ),
        tuple(Value(name, 10) for name in "abcde"),
        frozenset(),
        frozenset({4}),
    )


def test_keeping_all_is_optimal_where_it_fits(ladder: Graph) -> None:
    found = plan(ladder, 1.0)
    assert (found.status, found.time_ns, found.bound_ns, found.peak_bytes) == (Status.OPTIMAL, 70, 70, 40)


def test_ten_bytes_less_cost_one_rerun_of_a(ladder: Graph) -> None:
    found = plan(ladder, 30)
    assert (found.status, found.time_ns, found.bound_ns, found.peak_bytes) == (Status.OPTIMAL, 75, 75, 30)
    assert found.overhead == pytest.approx(5 / 70)
    assert found.row()["recomputed_ops"] == 1


def with_a_buffer() -> Graph:
    """As the ladder, but a makes a new buffer s too, which is 4 bytes; d and e are the backward."""
    ops = (
        Op("a", (), (0, 5), 5),
        Op("b", (0,), (1,), 50),
        Op("c", (1,), (2,), 5),
        Op("d", (1, 2), (3,), 5, backward=True),
        Op("e", (0, 3), (4,), 5, backward=True),
    )
    sizes = {"a": 10, "b": 10, "c": 10, "d": 12, "e": 6, "s": 4}
    return Graph("ladder", ops, tuple(Value(*v) for v in sizes.items()), frozenset(), frozenset({4, 5}))


def test_what_the_forward_gives_back_stays() -> None:
    """Making a again makes s again, so it may go in between: d takes 32 bytes then, and 36 with s kept."""
    graph = with_a_buffer()
    whole = solve_halves(graph, 36)
    assert whole.schedule == hold_early(graph, whole.schedule) and (whole.time_ns, whole.peak_bytes) == (75, 36)
    alone = solve_halves(graph, 34)
    assert alone.schedule is not None and alone.schedule != hold_early(graph, alone.schedule)
    assert (alone.time_ns, alone.peak_bytes, alone.notes["halves_bytes"]) == (75, 32, 36)
    assert alone.notes["halves"].endswith("plan for 36 bytes, which are known to be enough")
    assert simulate(graph, hold_early(graph, alone.schedule)).peak_bytes == 36
    by_rule = solve_halves(graph, 34, method="keep_all", copied_bytes=7)
    assert by_rule.status is Status.UNKNOWN
    copied = solve_halves(graph, 36, copied_bytes=7)
    assert copied.notes["halves_bytes"] == 43 and "halves" not in solve_halves(graph, 43, copied_bytes=7).notes


def test_ctrl_c_leaves_a_plan_that_says_whether_it_has_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in its own search, or in that for the smallest budget."""
    graph, module = with_a_buffer(), import_module("planner.plan")

    def interrupted(*arguments: Any, **options: Any) -> Plan:
        found = solve(*arguments, **options)
        return replace(found, notes=found.notes | {"stopped": "interrupted"})

    with monkeypatch.context() as patch:
        patch.setattr(module, "solve", interrupted)
        for budget_bytes, is_told in ((34, True), (36, False)):
            found = solve_halves(graph, budget_bytes)
            assert found.interrupted and ("halves" in found.notes) is is_told
            assert not is_told or found.notes["halves"].endswith("plan for 36 bytes, which are known to be enough")

    def smaller(*_: Any, **__: Any) -> Iterator[tuple[int, Any]]:
        yield 40, keep_all(graph)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "smaller_and_smaller", smaller)
    found = solve_halves(graph, 34)
    assert found.interrupted and found.schedule is not None and "halves" in found.notes


def test_what_hardly_exceeds_its_halves_is_where_the_search_for_them_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network at a fifth of its peak, whose loss and buffers are ten thousandths of the budget: 48 % instead of 23."""
    graph = random_training(12, 0)
    forward = [v for op in graph.ops if not op.backward for v in op.outputs]
    graph = replace(graph, outputs=graph.outputs | set(Random(0).sample(forward, 3)))
    budget_bytes = int(0.8 * simulate(graph, keep_all(graph)).peak_bytes)
    starts: list[Any] = []
    found: list[Plan] = []

    def noted(graph: Graph, budget_bytes: int, *, start: Any = None, **options: Any) -> Plan:
        starts.append(start)
        found.append(solve(graph, budget_bytes, start=start, **options))
        return found[-1]

    def needs_more(graph: Graph, schedule: Any, copied_bytes: int | None = 0) -> tuple[Any, int]:
        return schedule, budget_bytes + (len(starts) == 1)

    module = import_module("planner.plan")
    monkeypatch.setattr(module, "solve", noted)
    monkeypatch.setattr(module, "in_halves", needs_more)
    solve_halves(graph, budget_bytes, gap=0.1, time_limit_s=20.0)
    assert starts == [None, found[0].schedule] and found[0].schedule is not None


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_with_early_values_counted_throughout_fits_in_halves(seed: int) -> None:
    """Whatever the schedule; and what is found there for the budgets in between fits, too."""
    graph = random_training(8, seed)
    forward = [v for op in graph.ops if not op.backward for v in op.outputs]
    graph = replace(graph, outputs=graph.outputs | set(Random(seed).sample(forward, 3)))
    kept = with_early_kept(graph)
    needed = []
    for peak_bytes, schedule in smaller_and_smaller(kept, time_limit_s=1):
        held, needs_bytes = in_halves(graph, schedule)
        assert needs_bytes is not None and simulate(graph, held).peak_bytes == needs_bytes <= peak_bytes
        needed.append(needs_bytes)
    least, most = min(needed), max(needed)
    for budget_bytes in (least, (least + most) // 2, most):
        found = solve_halves(graph, budget_bytes, gap=0.1, time_limit_s=4)
        assert found.schedule is not None and "halves" not in found.notes
        assert found.schedule == hold_early(graph, found.schedule)


def test_a_refused_budget_is_below_the_proved_minimum() -> None:
    """While c runs, a is there too, which is an output and made once; what is proved for all orders knows only of b."""
    ops = (Op("a", (), (0,), 1, effect=True), Op("b", (0,), (1,), 1), Op("c", (1,), (2,), 1, workspace_bytes=5))
    graph = Graph(
        "line", ops, tuple(Value(name, size) for name, size in zip("abc", (5, 1, 1), strict=True)), frozenset(), frozenset({0, 2})
    )
    with pytest.raises(InfeasibleBudget, match=r"at least 12 bytes, .* known to work is 12") as caught:
        plan(graph, 11)
    assert (caught.value.proved_bytes, caught.value.works_bytes) == (12, 12)


def test_budget_below_the_minimum_is_refused_with_both_numbers(ladder: Graph) -> None:
    # d alone holds b, c and d
    with pytest.raises(
        InfeasibleBudget, match=r"ladder cannot run in 29 bytes .* at least 30 bytes, .* known to work is 30"
    ) as caught:
        plan(ladder, 29)
    assert (caught.value.budget_bytes, caught.value.proved_bytes, caught.value.works_bytes) == (29, 30, 30)
    assert solve(ladder, 29).status is Status.INFEASIBLE


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.5, "many", "0.5 B %", True, None])
def test_unusable_budgets_are_refused(ladder: Graph, budget: object) -> None:
    with pytest.raises(InputError, match="give bytes"):
        plan(ladder, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("annealing", {"keep_order": "yes"}, "keep_order must be a bool, not 'yes'"),
        ("annealing", {"moves": 1e6}, "moves must be an int"),
        ("checkmate", {"presolve": None}, "presolve must be a bool"),
        ("checkmate", {"solver": ["cbc"]}, "solver must be a str"),
        ("rockmate", {"peaks": "4"}, "peaks must be an int"),
        ("twremat", {"variants": 0}, "variants must be a bool"),
        ("keep_all", {"progress": 5}, "progress must be a function or None, not 5"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(ladder: Graph, method: str, option: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        solve(ladder, 40, method=method, **option)


@pytest.mark.parametrize("method", ["annealing", "checkmate", "keep_all", "moccasin", "rotor"])
def test_numbers_beyond_64_bits_are_refused(ladder: Graph, method: str) -> None:
    huge = Graph("huge", ladder.ops, (Value("a", 2**62), *ladder.values[1:]), ladder.resident, ladder.outputs)
    with pytest.raises(InputError, match=r"huge: its bytes add up to 2\^62 bytes or more"):
        solve(huge, 2**63, method=method)
    with pytest.raises(InputError, match=r"huge: its bytes add up to 2\^62 bytes or more"):
        min_budget(huge)
    with pytest.raises(InputError, match=r"ladder: its times add up to 2\^1063 ns or more"):
        solve(ladder.with_costs([10**320, 1, 1, 1, 1]), 40, method=method)


def test_keep_all_below_the_minimum_is_infeasible(ladder: Graph) -> None:
    assert solve(ladder, 29, method="keep_all").status is Status.INFEASIBLE
    with pytest.raises(NoScheduleFound, match="keeping everything does not fit the budget"):
        plan(ladder, 35, method="keep_all")


def test_unknown_method_and_option_name_the_known_ones(ladder: Graph) -> None:
    with pytest.raises(InputError, match=r"unknown method 'best'; there are: .*cutting_stages, .*keep_all"):
        plan(ladder, 1.0, method="best")
    with pytest.raises(InputError, match=r"method keep_all has no option 'depth'; it has: gap"):
        plan(ladder, 1.0, method="keep_all", depth=3)


@pytest.mark.parametrize(
    "option",
    [{"gap": -1}, {"gap": float("nan")}, {"gap": None}, {"time_limit_s": float("inf")}, {"time_limit_s": -1}, {"seed": -1}],
)
def test_unusable_options_are_refused(ladder: Graph, option: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        solve(ladder, 30, **option)


@pytest.mark.parametrize(
    "option",
    [{"inputs": torch.ones(1)}, {"loss": torch.sum}, {"device": "cpu"}, {"autocast": torch.bfloat16}, {"costs": "measured"}],
    ids=lambda option: next(iter(option)),
)
def test_what_is_for_models_is_refused_for_what_is_captured(ladder: Graph, option: dict[str, object]) -> None:
    model = nn.Linear(2, 2)
    step = capture(model, torch.ones(2, 2), loss=lambda y: y.sum())
    for target, kind in ((ladder, "Graph"), (with_costs(step, "roofline") if "costs" in option else step, "Step")):
        with pytest.raises(InputError, match=rf"{next(iter(option))}= has no meaning for a {kind}, .* it is for a model"):
            plan(target, 1.0, **option)  # type: ignore[arg-type]
    assert min_budget(step).works_bytes == min_budget(step.graph).works_bytes
    with pytest.raises(InputError, match=r"replan must be True, False or a dict of options for plan, not 3"):
        plan(step, 1.0).module(replan=3)  # type: ignore[arg-type]


def test_a_step_as_it_was_captured_is_planned_with_costs(tmp_path: Path) -> None:
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(32, 4)), torch.randn(256, 32)
    step = capture(model, x, loss=lambda y: y.square().sum())
    assert step.graph.keep_all_time_ns == 0
    found, wanted = plan(step, 0.7), plan(model, 0.7, inputs=x, loss=lambda y: y.square().sum())
    assert found.time_ns == wanted.time_ns and found.overhead == wanted.overhead is not None
    assert found.graph.keep_all_time_ns > 0
    assert run(step, 0.8).time_ns == run(found.step, 0.8).time_ns > found.graph.keep_all_time_ns
    wanted.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", step).time_ns == wanted.time_ns
    compared = compare(step, 0.8, heuristics=("dtr",), execute=True, inputs=x)
    assert compared.plain is not None and compared.blocks[0].trials.keys() == {"cutting_stages", "online:dtr"}


def test_a_step_as_it_was_captured_takes_costs() -> None:
    step = capture(nn.Linear(64, 64), torch.randn(256, 64), loss=lambda y: y.square().sum())
    found = plan(step, 1.0, costs="measured")
    assert 0 < found.graph.keep_all_time_ns != plan(step, 1.0, costs="roofline").graph.keep_all_time_ns
    assert plan(found.step, 1.0).time_ns == found.time_ns
    assert [one.graph for one in plans(step, [1.0, 1.0], costs="roofline")] == [with_costs(step, "roofline").graph] * 2


def test_an_invalid_start_is_the_callers_mistake(ladder: Graph) -> None:
    with pytest.raises(InvalidSchedule, match="b reads value 0"):
        plan(ladder, 30, start=(Compute(1),))


@pytest.mark.parametrize(
    ("start", "named"),
    [("PLAN", "not a Plan"), ("RUN", "not a Run"), ([1, 2, 3], "not a list of other things"), (5, "not an int")],
)
def test_a_start_that_is_no_schedule_is_told_what_is(ladder: Graph, start: object, named: str) -> None:
    start = {"PLAN": plan(ladder, 30), "RUN": run(ladder, 30)}.get(str(start), start)
    with pytest.raises(InputError, match=rf"start must be a schedule, .* is its \.schedule\), {named}$"):
        plan(ladder, 30, start=start)  # type: ignore[arg-type]


def test_a_start_may_be_a_list(ladder: Graph) -> None:
    assert plan(ladder, 40, start=list(keep_all(ladder))).time_ns == 70  # type: ignore[arg-type]


def test_one_is_a_byte_and_the_message_says_so(ladder: Graph) -> None:
    for attempt in (plan, run):
        with pytest.raises(InfeasibleBudget, match=r"in 1 bytes .*; an int is bytes, the whole keep-all peak is 1\.0$"):
            attempt(ladder, 1)


def test_solve_wants_a_graph_and_bytes(ladder: Graph) -> None:
    with pytest.raises(InputError, match=r"solve takes a Graph .*, not a str"):
        solve("ladder", 30)  # type: ignore[arg-type]
    for budget in (0.5, "30", None, True, -1, np.float32(30)):
        with pytest.raises(InputError, match="solve takes a budget in whole bytes"):
            solve(ladder, budget)  # type: ignore[arg-type]
    assert type(solve(ladder, np.int64(30)).budget_bytes) is int  # type: ignore[arg-type]


def test_where_a_graph_is_wanted_a_step_is_told_where_its_graph_is() -> None:
    step = capture(nn.Linear(2, 2), torch.ones(2, 2), loss=lambda y: y.sum())
    for attempt in (keep_all, lambda it: simulate(it, ()), lambda it: solve(it, 30)):
        with pytest.raises(InputError, match=r"^\w+ takes a Graph \(that of a captured Step is step\.graph\), not a Step$"):
            attempt(step)  # type: ignore[arg-type]


def test_a_saved_plan_brings_the_costs_that_it_was_made_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def captured() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
        return capture(model, torch.randn(64, 16), loss=lambda y: y.square().sum())

    step, path = captured(), tmp_path / "plan.json"
    found = plan(step.with_costs(times := range(100, 100 + len(step.calls))), 0.8)
    assert found.graph.costs == "given" and found.row()["costs"] == "given"
    found.save(path)
    loaded = load_plan(path, captured())
    assert loaded.step is not None and [op.time_ns for op in loaded.step.graph.ops] == [*times]
    assert loaded.graph.costs == "given" and loaded.time_ns == found.time_ns
    loaded.module()(torch.randn(64, 16)).backward()
    modelled = with_costs(captured(), "roofline")
    with pytest.raises(
        GraphMismatch, match=r"the same ops had other costs \(given, cpu\) than now \(roofline, cpu\); plan again, or load"
    ):
        load_plan(path, modelled)
    with pytest.raises(GraphMismatch, match="other shapes or device; plan again"):
        load_plan(path, capture(nn.Linear(3, 3), torch.randn(2, 3), loss=lambda y: y.sum()))
    told = [record.getMessage() for record in caplog.records if record.name == "belady"]
    assert not told
    elsewhere = replace(modelled.graph, device="NVIDIA H200")
    plan(elsewhere, 1.0).save(path)
    assert load_plan(path, captured()).graph == modelled.graph
    (told_now,) = (record.getMessage() for record in caplog.records if record.name == "belady")
    assert told_now == f"{path} was planned with op times of NVIDIA H200; on cpu its overhead may be another"


def test_costs_of_nothing_are_costs() -> None:
    step = capture(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda y: y.sum())
    found = plan(step.with_costs([0] * len(step.calls)), 1.0)
    assert found.graph.keep_all_time_ns == found.time_ns == 0


def test_plans_for_other_shapes_have_costs_of_the_same_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    kinds: list[str] = []

    def noted(step: Step, kind: str) -> Step:
        kinds.append(kind)
        return with_costs(step, kind)

    monkeypatch.setattr("planner.execution.replan.with_costs", noted)
    for costs in ("measured", "roofline"):
        plan(model, 1.0, inputs=x, loss=lambda y: y.sum(), costs=costs).module(replan=True)(torch.randn(3, 8))
    assert kinds == ["measured", "roofline"]


def test_plans_may_start_from_a_schedule_and_refuse_what_they_cannot_use(ladder: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = [0.8, 1.0]
    one = plan(ladder, 0.8)
    assert [each.time_ns for each in plans(ladder, budgets, start=one.schedule)] == [
        each.time_ns for each in plans(ladder, budgets)
    ]
    too_large = plans(ladder, [one.peak_bytes, 1.0], start=keep_all(ladder))
    assert too_large[0].peak_bytes is not None and too_large[0].peak_bytes <= one.budget_bytes
    graph = random_training(30, 3)
    known = plan(graph, 0.8, time_limit_s=2)
    assert known.peak_bytes is not None
    without, (_, started) = (
        plans(graph, [0.62, known.peak_bytes], time_limit_s=0, **given) for given in ({}, {"start": known.schedule})
    )
    assert known.time_ns is not None and started.time_ns is not None and started.time_ns <= known.time_ns
    assert without[0].time_ns is not None and without[1].time_ns is not None and without[1].time_ns > known.time_ns

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was captured")

    monkeypatch.setattr("graphs.capture.capture", never)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for options, message in (
        ({"method": "x"}, "unknown method 'x'"),
        ({"method": ["x"]}, r"unknown method \['x'\]"),
        ({"gap": 3}, "gap must be"),
        ({"nonsense": 3}, "no option 'nonsense'"),
        ({"done": 3}, "done must be a function that takes a Plan, not 3"),
    ):
        with pytest.raises(InputError, match=message):
            plans(model, [0.5], inputs=x, **options)  # type: ignore[arg-type]
    for budgets_ in (b"0.5", np.array(0.5), 3j):
        with pytest.raises(InputError, match="plans takes a list of budgets, not"):
            plans(ladder, budgets_)  # type: ignore[arg-type]


def test_a_saved_plan_is_for_its_graph_only(ladder: Graph, tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = plan(ladder, 30)
    found.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", ladder) == found
    slower = ladder.with_costs([6, 50, 5, 5, 5])
    with pytest.raises(GraphMismatch, match="plan again"):
        load_plan(tmp_path / "plan.json", slower)
    with pytest.raises(InputError, match=r"load_plan takes a captured Step or a Graph, not a Linear"):
        load_plan(tmp_path / "plan.json", nn.Linear(2, 2))  # type: ignore[arg-type]


def test_plan_of_a_graph_has_nothing_to_train(ladder: Graph) -> None:
    with pytest.raises(InputError, match="no captured model"):
        plan(ladder, 1.0).module()


def test_time_and_peak_are_simulated(ladder: Graph) -> None:
    found = plan(ladder, 30)
    assert found.schedule is not None
    trace = simulate(ladder, found.schedule)
    assert (trace.time_ns, trace.peak_bytes) == (found.time_ns, found.peak_bytes)
    assert simulate(ladder, keep_all(ladder)).peak_bytes == 40


@pytest.mark.parametrize("step", [Compute("a"), Compute(None), Compute(0.0), Free("x")])  # type: ignore[arg-type]
def test_a_start_with_steps_that_name_no_number_is_refused(step: Compute | Free) -> None:
    with pytest.raises(InputError, match="start must be a schedule"):
        solve(linear_network(3), 5, start=(step,))


@pytest.mark.parametrize(("device", "used"), [("cuda", "measured"), ("cpu", "roofline")])
def test_ops_are_measured_where_workspace_counts(device: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a plan without workspace would break its budget; elsewhere there is none to measure."""
    called: list[str] = []
    monkeypatch.setattr("graphs.profile.measured", lambda step, progress=None: called.append("measured"))
    monkeypatch.setattr("graphs.costs.roofline", lambda step: called.append("roofline"))
    with_costs(SimpleNamespace(device=torch.device(device)), "auto")  # type: ignore[arg-type]
    assert called == [used]


class Untouched(nn.Module):
    """A model whose capture would be noticed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("captured")


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        ("abc", {}),
        (1.5, {}),
        (0.5, {"method": "checkmat"}),
        (0.5, {"gap": 2.0}),
        (0.5, {"metod": 1}),
        (0.5, {"costs": "free"}),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_model_is_captured(budget: float | str, more: dict[str, object]) -> None:
    with pytest.raises(InputError):
        plan(Untouched(), budget, inputs=torch.ones(2), **more)  # type: ignore[arg-type]


def test_a_plan_is_no_model(ladder: Graph) -> None:
    with pytest.raises(InputError, match=r"not a Plan; its \.step or \.graph is one"):
        plan(plan(ladder, 40), 0.9)  # type: ignore[arg-type]
