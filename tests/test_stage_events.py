"""Events between stages, first executions and re-runs: the bound is never wrong, and what is missing is found."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

import planner.stages.model
from graphs.ir import Graph, Op, Value
from graphs.synthetic import chain
from planner.schedule import with_frees
from planner.simulate import simulate
from planner.solvers import pseudo_boolean
from planner.solvers.milp import Answer, Outcome
from planner.stages.events import missing, next_first_runs, tightest
from planner.stages.model import Event, StageModel, Walk, stage_model, walk, with_end
from planner.stages.spans import add_spans, relax
from tests.oracles import least_time
from tests.strategies import budget_range, random_graph


def solution(model: StageModel) -> list[float]:
    values = solved(model).values
    assert values is not None
    return values


def solved(model: StageModel) -> Answer:
    return pseudo_boolean.minimise(model.milp, time_limit_s=20.0)


def with_reruns(graph: Graph, draw: Random, count: int) -> list[Event]:
    """All first executions, and so many re-runs put anywhere between them, one after the other."""
    closed = with_end(graph)
    events = [Event(t) for t in range(len(closed.ops))]
    for _ in range(count):
        j = draw.randrange(len(events) - 1)
        begin, end = events[j].at, events[j + 1].at
        makers = [v for v in range(events[j].done + 1) if not closed.ops[v].effect]
        if makers:
            events.insert(j + 1, Event((begin + end) / 2, draw.choice(makers), end))
    return events


def until_nothing_is_missing(graph: Graph, budget_bytes: int, events: list[Event]) -> tuple[StageModel, Answer, Walk | None]:
    """The last model, its solution, and the walk along it."""
    closed = with_end(graph)
    while True:
        model = stage_model(closed, budget_bytes, events)
        add_spans(model)
        answer = solved(model)
        if answer.values is None:
            return model, answer, None
        found = walk(model, answer.values)
        more, _ = missing(model, graph, found, budget_bytes, 2)
        assert not set(more) & set(events)
        if not more:
            return model, answer, found
        events = sorted((*events, *more))


@pytest.mark.parametrize(
    ("start", "seeds"), [("every-op", range(100)), ("tightest", range(100, 200)), ("reruns", range(200, 300))], ids=str
)
def test_no_event_rules_out_an_optimum(start: str, seeds: range) -> None:
    """With events for all that is missing, the bound is never above brute force's optimum, and walks nearly always attain it."""
    raised = attained = checked = infeasible = 0
    for seed in seeds:
        graph = random_graph(seed, max_ops=7, random=seed % 7 == 0, effect=seed % 5 == 0)
        draw = Random(seed)
        low, high = budget_range(graph, keep_order=True)
        budget_bytes = draw.randint(low - 1, max(low, (2 * low + high) // 3))
        best = least_time(graph, budget_bytes, keep_order=True)
        events = with_reruns(graph, draw, draw.randint(1, 12) if start == "reruns" else 0)
        plain = stage_model(with_end(graph), budget_bytes, [event for event in events if not event.is_rerun])
        plain_ns = plain.bound_ns(solved(plain))
        if start == "tightest":
            events = [tightest(graph)]
        model, answer, found = until_nothing_is_missing(graph, budget_bytes, events)
        if best is None or answer.outcome is Outcome.INFEASIBLE or found is None:
            assert best is None, seed
            infeasible += 1
            continue
        checked += 1
        bound_ns = model.bound_ns(answer)
        relaxed, _ = relax(stage_model(with_end(graph), budget_bytes, model.events), time_limit_s=20.0)
        relaxed_ns = model.bound_ns(relaxed)
        assert plain_ns is not None and bound_ns is not None and relaxed_ns is not None
        assert relaxed_ns <= bound_ns <= best[0], seed
        assert start == "tightest" or plain_ns <= bound_ns, seed
        raised += bound_ns > plain_ns
        trace = simulate(graph, with_frees(graph, found.runs))
        attained += trace.peak_bytes <= budget_bytes and trace.time_ns == best[0]
    assert checked >= 35 and infeasible >= 15
    assert raised >= 1 and attained >= 0.95 * checked


def random_runs(graph: Graph, draw: Random) -> list[int]:
    """First executions in graph order, each after re-runs of what it lacks; after each run values are lost at random."""
    runs, present = list[int](), set(graph.resident)
    stays = graph.resident.union(*(op.outputs for op in graph.ops if op.effect))

    def make(v: int, held: frozenset[int]) -> None:
        op = graph.ops[v]
        held = held.union(op.inputs)
        for x in op.inputs:
            if x not in present:
                make(graph.producer[x], held)
        runs.append(v)
        present.update(op.outputs)
        present.difference_update({x for x in present - stays - held if x not in op.outputs and draw.random() < 0.3})

    for v in range(len(graph.ops)):
        make(v, frozenset())
    for x in sorted(graph.outputs):
        if x not in present:
            make(graph.producer[x], graph.outputs)
    return runs


def encoded(model: StageModel, graph: Graph, sequence: list[int]) -> list[float]:
    """What the variables of a model without spans are for a schedule, but for re-runs that only make what is tiny."""
    runs, held = list[int](), [graph.outputs]  # from the end on; what is held right after each run, inputs and all
    needed = graph.outputs - model.tiny
    for i, v in reversed(list(enumerate(sequence))):
        op = graph.ops[v]
        if v not in sequence[:i] or not needed.isdisjoint(op.outputs):
            runs.append(v)
            held.append(frozenset({*needed, *op.inputs, *op.outputs}))
            needed = needed - {*op.outputs} | {*op.inputs} - model.tiny
    runs, held = runs[::-1], held[::-1]
    place = {float(t): runs.index(t) for t in range(len(graph.ops))} | {float(len(graph.ops)): len(runs)}
    kept = {at: held[i] for at, i in place.items()}
    happens = dict.fromkeys(place, False)
    for event in sorted(model.events, key=lambda event: event.at - event.until):
        if event.is_rerun:
            since, until = place[event.since], place[event.until]
            last = max((i for i in range(since + 1, until) if runs[i] == event.again), default=None)
            happens[event.at] = last is not None
            place[event.at], kept[event.at] = (since, kept[event.since]) if last is None else (last, held[last])
    values = [0.0] * len(model.milp.cost)
    ends = [*(place[event.at] for event in model.events[1:]), len(runs)]
    for event, keep, rerun, m, end in zip(model.events, model.keep, model.rerun, model.happens, ends, strict=True):
        begin = place[event.at]
        if m >= 0:
            values[m] = float(happens[event.at])
        for x, k in keep.items():
            values[k] = float(x in kept[event.at])
        for v, r in rerun.items():
            values[r] = float(v in [runs[i] for i in range(begin + 1, end) if i != runs.index(v)])
    return values


def together(other: StageModel, model: StageModel, values: list[float]) -> list[float]:
    """A solution of a model for another one with fewer events and values."""
    taken = [0.0] * len(other.milp.cost)
    stage = -1
    for event, keep, rerun, m in zip(model.events, model.keep, model.rerun, model.happens, strict=True):
        ran = {v: values[r] for v, r in rerun.items()}
        if event in other.events:
            stage = other.events.index(event)
            if m >= 0:
                taken[other.happens[stage]] = values[m]
            for x, k in other.keep[stage].items():
                taken[k] = values[keep[x]]
        elif m >= 0:
            ran[event.again] = max(ran.get(event.again, 0.0), values[m])
        if stage >= 0:
            for v, r in other.rerun[stage].items():
                taken[r] = max(taken[r], ran.get(v, 0.0))
    return taken


def broken_rows(model: StageModel, values: list[float]) -> list[int]:
    milp = model.milp
    sums = [0.0] * len(milp.row_lower)
    for row, x, a in milp.entries:
        sums[row] += a * values[x]
    sides = zip(milp.row_lower, sums, milp.row_upper, strict=True)
    bounds = zip(milp.lower, values, milp.upper, strict=True)
    rows = [row for row, (low, total, high) in enumerate(sides) if not low - 1e-6 <= total <= high + 1e-6]
    return rows + [-1 - x for x, (low, value, high) in enumerate(bounds) if not low <= value <= high]


def test_schedules_satisfy_all_rows_also_with_stages_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And cost no more than they take: a re-run counts once a stage."""
    monkeypatch.setattr(planner.stages.model, "_passing", lambda _: {})
    dearer = twice = nested = 0
    for seed in range(300):
        draw = Random(seed)
        graph = random_graph(seed, max_ops=9, effect=seed % 5 == 0)
        runs = random_runs(graph, draw)
        trace = simulate(graph, with_frees(graph, runs))
        first_runs = with_reruns(graph, draw, 0)
        reruns = [event for event in with_reruns(graph, draw, draw.randint(0, 8)) if event.is_rerun]
        reruns.sort(key=lambda event: event.at - event.until)  # as they have come
        models = list[StageModel]()
        tiny_share = 0.0
        for _ in range(2):
            around = {t for event in reruns for t in (event.done, event.done + 1)}
            first_runs = [event for event in first_runs if event.at in around or draw.random() < 0.7] or [tightest(graph)]
            events = sorted({*first_runs, *reruns})
            models.append(stage_model(with_end(graph), trace.peak_bytes, events, tiny_share=tiny_share))
            reruns = reruns[: draw.randint(0, len(reruns))]
            tiny_share = draw.choice((0.0, 0.1, 0.3))
        model, other = models
        values = encoded(model, graph, runs)
        assert not broken_rows(model, values) and not broken_rows(other, encoded(other, graph, runs)), seed
        cost_ns = graph.keep_all_time_ns + model.milp.cost_of(values) * model.unit_ns
        assert cost_ns <= trace.time_ns + 1e-6, seed
        assert other.refines(model) == (model.events == other.events and model.tiny == other.tiny), seed
        twice += cost_ns < trace.time_ns - 1e-6
        if model.refines(other):
            fewer = together(other, model, values)
            fewer_ns = graph.keep_all_time_ns + other.milp.cost_of(fewer) * other.unit_ns
            assert not broken_rows(other, fewer) and fewer_ns <= cost_ns + 1e-6, seed
            dearer += fewer_ns < cost_ns - 1e-6
            nested += any(event.is_rerun for event in other.events)
    assert dearer >= 50 and twice >= 20 and nested >= 50


def two_heavy_reruns() -> Graph:
    """a and b are made from x by ops that need much, and are read again when y has come and gone, which leaves room for x."""
    values = (Value("x", 2), Value("a", 3), Value("b", 3), Value("y", 10), Value("z", 1), Value("last", 1))
    ops = (
        Op("x", (), (0,), 1),
        Op("a", (0,), (1,), 1, workspace_bytes=4),
        Op("b", (0,), (2,), 1, workspace_bytes=6),
        Op("y", (), (3,), 1),
        Op("z", (3,), (4,), 1),
        Op("last", (1, 2, 4), (5,), 1),
    )
    return Graph("two", ops, values, frozenset(), frozenset({5}))


# With z there, b first: x 2 + b 3 + workspace 6 + z 1, then x 2 + b 3 + a 3 + workspace 4 + z 1 = 13. a first: 15 bytes.
LEAST_BYTES = 13


def test_an_overflow_asks_for_the_first_execution_then_that_before_it_then_the_rerun() -> None:
    graph = two_heavy_reruns()
    closed = with_end(graph)
    events, asked = [Event(3)], list[Event]()
    while True:
        model = stage_model(closed, LEAST_BYTES, events)
        found = walk(model, solution(model))
        more, _ = missing(model, graph, found, LEAST_BYTES, 2)
        if not more:
            break
        asked += more
        events = sorted((*events, *more))
    assert asked == [Event(5), Event(4), Event(4.5, 2, 5)]  # in op order, a would be there when b runs
    assert found.runs == [0, 1, 2, 3, 4, 2, 1, 5]
    assert found.stages == [0, 0, 0, 0, 1, 2, 3, 3]
    assert simulate(graph, with_frees(graph, found.runs)).peak_bytes == LEAST_BYTES
    _, answer, found_in_less = until_nothing_is_missing(graph, LEAST_BYTES - 1, events)
    assert found_in_less is None and answer.outcome is Outcome.INFEASIBLE
    assert least_time(graph, LEAST_BYTES - 1, keep_order=True) is None


def test_a_rerun_has_its_inputs_and_outputs_in_memory_and_is_the_last_of_its_op() -> None:
    """One that was put before another happens only where that does."""
    graph = two_heavy_reruns()
    events = [Event(4), Event(4.25, 1, 4.5), Event(4.5, 2, 5.0), Event(4.75, 0, 5.0), Event(5)]
    model = stage_model(with_end(graph), 100, events)
    again = model.happens
    assert again[0] == again[4] == -1 and min(again[1:4]) >= 0
    assert [model.milp.upper[rerun[2]] for rerun in model.rerun] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [model.milp.upper[rerun[1]] for rerun in model.rerun] == [1.0, 0.0, 1.0, 1.0, 1.0]
    for happens in itertools.product((0.0, 1.0), repeat=3):
        for m, fixed in zip(again[1:4], happens, strict=True):
            model.milp.lower[m] = model.milp.upper[m] = fixed
        answer = solved(model)
        assert (answer.outcome is Outcome.SOLVED) == (happens[0] <= happens[1])
        if answer.values is not None:
            kept = model.kept(answer.values)
            assert model.happening(answer.values) == [True, *(fixed == 1.0 for fixed in happens), True]
            for j, reads_and_makes in ((1, {0, 1}), (2, {0, 2}), (3, {0})):
                assert not happens[j - 1] or reads_and_makes <= kept[j]


def bounds_ns(graph: Graph, budget_bytes: int, events: list[Event], reruns: list[Event]) -> list[float]:
    """Of the model with these events, and with one re-run after the other put between them."""
    bounds = list[float]()
    for count in range(len(reruns) + 1):
        model = stage_model(with_end(graph), budget_bytes, sorted((*events, *reruns[:count])), tiny_share=0.0)
        answer = solved(model)
        bound_ns = model.bound_ns(answer)
        assert bound_ns is not None or answer.outcome is Outcome.INFEASIBLE
        bounds.append(math.inf if bound_ns is None else bound_ns)
    return bounds


def test_no_event_lowers_the_bound() -> None:
    """Not even where it is put before a re-run that does not happen."""
    ops = (Op("a", (0,), (1, 2, 3), 5), Op("b", (3,), (4,), 2, 8), Op("c", (1, 3), (5,), 4))
    values = tuple(Value(f"x{x}", size) for x, size in enumerate((3, 9, 6, 1, 1, 0)))
    graph = Graph("nested", ops, values, frozenset({0}), frozenset({1, 2, 4, 5}))
    first_runs = [Event(t) for t in range(4)]
    assert bounds_ns(graph, 19, first_runs, [Event(2.5, 1, 3), Event(2.25, 0, 2.5)]) == [18, 21, 21]
    put = 0
    for seed in range(100):
        graph = random_graph(seed, max_ops=7)
        low, _ = budget_range(graph, keep_order=True)
        first_runs = [Event(t) for t in range(len(graph.ops) + 1)]
        model, _, _ = until_nothing_is_missing(graph, low, first_runs)
        reruns = [event for event in model.events if event.is_rerun]
        draw = Random(seed)
        for outer in reruns:
            more = [Event(outer.at - (outer.at - outer.since) / 2**n, draw.randint(0, outer.done), outer.at) for n in (1, 2, 3)]
            more = [event for event in more if event.at not in [rerun.at for rerun in reruns]]
            bounds = bounds_ns(graph, low, [*first_runs, *reruns], more)
            assert bounds == sorted(bounds), seed
            put += len(more)
    assert put >= 15


def test_walks_keep_what_only_an_effect_made() -> None:
    """Though a half solution keeps nothing at all."""
    read_again = 0
    for seed in range(50):
        graph = random_graph(seed, max_ops=9, effect=True)
        closed = with_end(graph)
        model = stage_model(closed, graph.resident_bytes + 1, [Event(t) for t in range(1, len(graph.ops))])
        sequence = walk(model, [0.0] * len(model.milp.cost)).runs
        once = [v for v, op in enumerate(graph.ops) if op.effect]
        assert all(sequence.count(v) == 1 for v in once), seed
        read_again += any(len(graph.consumers[x]) > 1 for v in once for x in graph.ops[v].outputs)
    assert read_again >= 10


def test_a_large_overflow_asks_for_an_event_where_most_of_it_is_past() -> None:
    graph = chain(40)
    closed = with_end(graph)
    for budget_bytes, is_large in ((8, True), (30, False)):
        model = stage_model(closed, budget_bytes, [Event(40)])
        found = walk(model, solution(model))
        schedule = with_frees(graph, found.runs)
        held_bytes, coming = simulate(graph, schedule).memory_bytes, next_first_runs(graph, schedule)
        assert (max(held_bytes) > 2 * budget_bytes) == is_large
        events, seconds = missing(model, graph, found, budget_bytes, 2)
        assert len(events) == 1 + is_large and seconds == events[1:]
        assert missing(model, graph, found, budget_bytes, 1)[0] == events[:1]
        if is_large:
            worst = {w: max(h for h, u in zip(held_bytes, coming, strict=True) if u == w) - budget_bytes for w in set(coming)}
            untils = (events[1].at - 1, events[1].at, len(graph.ops))
            past = [sum(max(0, e) for w, e in worst.items() if w <= until) for until in untils]
            assert past[0] < 2 / 3 * past[2] <= past[1]


def test_reruns_wait_where_first_executions_are_asked_for() -> None:
    waited = 0
    for seed in (*range(30), *range(70, 90)):  # brute force takes seconds for others
        graph = random_graph(seed, max_ops=9)
        low, _ = budget_range(graph, keep_order=True)
        middle = len(graph.ops) // 2
        model = stage_model(with_end(graph), low, [Event(t) for t in range(middle, middle + 3)])
        answer = solved(model)
        if answer.values is None:
            continue
        found = walk(model, answer.values)
        both, late = (missing(model, graph, found, low, 9, reruns_last=last)[0] for last in (False, True))
        first_runs, reruns = [e for e in both if not e.is_rerun], [e for e in both if e.is_rerun]
        assert late == (first_runs or reruns), seed
        waited += bool(first_runs and reruns)
    assert waited >= 3
