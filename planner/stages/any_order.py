"""Bounds for schedules in any order of first executions.

Most bounds of cutting stages hold for one order. But events that depend on each other, each an ancestor of the next, come one
after the other whatever the order: a training step's first op of the backward pass, say, comes after all of the forward pass
and before nearly all of the backward one. So stages between such events are the same in all orders, but for what runs for the
first time in them. That is known of the ancestors of the event that ends a stage, of the descendants of the one that begins it,
and of all others a solution decides; a gradient of weights may be made at once, or when its turn comes in the next stage.

Stage 0 is what happens before the first event t_1, stage i what happens between t_i and t_{i+1}. Of an op v, ``first(v)`` are the
stages in which it may run for the first time.

    K[i, x] ∈ {0, 1}   value x is in memory when t_i has just run, its inputs not yet freed
    F[i, v] ∈ {0, 1}   op v runs in stage i; 1 where that is its only stage in first(v)

    minimise   Σ time(v) · (Σ_i F[i, v] - 1)                                  runs beyond one each
    memory     Σ_x bytes(x) · K[i, x] + workspace(t_i) + resident ≤ budget    each i
    running    K[i, x] = 1                              inputs and outputs x of t_i
    once       Σ_{i in first(v)} F[i, v] ≥ 1
    use        K[i, x] + F[i, prod(x)] ≥ F[i, v]        x an input of v; ≥ 1 for those of t_{i+1}
    carry      K[i, x] + F[i, prod(x)] ≥ K[i+1, x]      K[0, x] = 0

Every schedule that fits satisfies all rows, in whatever order its ops run for the first time. With one event, at the tightest
moment, the relaxation is nearly the optimum of the same event in graph order, for transformers to some hundredths of a percent;
more events make it weaker, as in ``planner.stages.spans``, so they are for models that a MILP solver gets through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphs.ir import Graph
from planner.on_demand import sat_minimise
from planner.process.clock import now_s
from planner.solvers.milp import Answer, Milp
from planner.stages.events import tightest
from planner.stages.model import MOST_TINY, SAT_VARIABLES, TINY, proved_ns, tiny_values, unit_of, with_end
from planner.stages.search import StageSearch

# Of the relaxations that are solved to see which event says most: squares of their variables in all (a second or so), how often
# the graph is halved to spread them, and the share of the time left for all of it.
WORK, HALVINGS, SHARE = 50_000_000, 5, 0.1
TINY_GAP = 0.1  # share of the budget that values without variables take, per gap
EFFORT = 0.5  # of CP-SAT, for the MILP of several events
LARGEST = 20_000  # ops: beyond, a single relaxation may take longer than the schedule took


@dataclass(frozen=True, slots=True)
class AnyOrderModel:
    """The MILP of events that come one after the other in every order.

    unit_ns  nanoseconds per unit of cost
    free     cost of one run of each op that has a variable where it may run for the first time: nothing is paid for that
    """

    graph: Graph
    milp: Milp
    unit_ns: float
    free: float

    def bound_ns(self, answer: Answer) -> int | None:
        """Proved least time of any schedule, rounded so that it stays a bound; None where nothing was proved."""
        return proved_ns(self.graph, answer.bound, self.unit_ns, self.free)


def any_order_model(graph: Graph, budget_bytes: int, events: Sequence[int], *, tiny_share: float = TINY) -> AnyOrderModel:
    """Build the MILP of a graph with an end (``planner.stages.model.with_end``) for some events.

    events      ops, ascending, each an ancestor of the next (``in_a_row``); at least one
    tiny_share  of the budget, what all values without variables may take together
    """
    return _Builder(graph, budget_bytes, events, tiny_share).built()


def prove_in_any_order(search: StageSearch, events: Sequence[int] = ()) -> None:
    """Look for a bound on schedules in any order that closes the gap: by relaxations of one event each, then by a MILP.

    events  first executions that matter in graph order: those of them that come in a row in any order are the MILP's
    """
    graph = search.graph
    if search.nested or len(graph.ops) > LARGEST or search.closed_in_any_order() or now_s() >= search.deadline:
        return
    until, work = now_s() + SHARE * search.left_s, WORK
    closed_graph, tiny_share = with_end(graph), min(TINY_GAP * search.gap, MOST_TINY)
    proved = search.proved_by
    for t in _worth_trying(search):
        model = any_order_model(closed_graph, search.budget_bytes, [t], tiny_share=tiny_share)
        work -= len(model.milp.cost) ** 2
        if work < 0 and proved:
            break
        if now_s() >= until:
            search.tell_cut_short(True)
            return
        answer = model.milp.relax(time_limit_s=until - now_s())
        proved[t] = model.bound_ns(answer) or search.base
        search.raise_any_order_bound(proved[t])
        if search.closed_in_any_order():
            return
    row = in_a_row(closed_graph, dict.fromkeys((max(proved, key=lambda t: proved[t]), *events)))
    if len(row) == 1:
        return
    model = any_order_model(closed_graph, search.budget_bytes, row, tiny_share=tiny_share)
    if len(model.milp.cost) <= SAT_VARIABLES:
        answer = sat_minimise()(model.milp, time_limit_s=max(0.0, until - now_s()), effort=EFFORT, seed=search.seed)
        search.tell_cut_short(now_s() >= until)
        search.raise_any_order_bound(model.bound_ns(answer))


def _worth_trying(search: StageSearch) -> Iterator[int]:
    """Ops to take for an event that have not been tried so far: where graph order is tightest, where the backward pass begins,
    all over the graph, and next to the one that says most."""
    graph, proved = search.graph, search.proved_by
    count = len(graph.ops)
    first = [tightest(graph).done, next((v for v, op in enumerate(graph.ops) if op.backward), 0)]
    spread = [count * i // 2**d for d in range(1, HALVINGS + 1) for i in range(1, 2**d, 2)]
    yield from (t for t in dict.fromkeys((*first, *spread)) if t not in proved)
    step = count >> HALVINGS
    while step > 1:
        step //= 2
        best = max(proved, key=lambda t: proved[t])
        yield from (t for t in (best - step, best + step) if 0 <= t < count and t not in proved)


def in_a_row(graph: Graph, events: Iterable[int]) -> list[int]:
    """Of some ops, those that come one after the other in every order: the first of them, and each that depends on all that are
    taken before it in op order, or they on it."""
    above: dict[int, set[int]] = {}  # of those taken
    for t in events:
        before = _ancestors(graph, t)
        if t not in above and all(s in before or t in others for s, others in above.items()):
            above[t] = before
    return sorted(above)


class _Builder:
    """Variables and rows of one model.

    first  of each op, the first and the last stage in which it may run for the first time
    keep   for each event, the variable of each value's K
    runs   for each stage, that of each op's F; None where it runs there anyway
    """

    def __init__(self, graph: Graph, budget_bytes: int, events: Sequence[int], tiny_share: float) -> None:
        self._graph, self._budget_bytes, self._events = graph, budget_bytes, list(events)
        self._size = [value.size_bytes for value in graph.values]
        self._tiny = tiny_values(graph, tiny_share * budget_bytes)
        self._unit_ns = unit_of((op.time_ns for op in graph.ops), graph.keep_all_time_ns)
        self._milp = Milp()
        last = len(events)
        self._first = [[0, last] for _ in graph.ops]
        for i, t in enumerate(events, start=1):
            for v in _ancestors(graph, t):
                self._first[v][1] = min(self._first[v][1], i - 1)
            for v in _descendants(graph, t):
                self._first[v][0] = i
        self._first[-1] = [last, last]
        for i, t in enumerate(events, start=1):
            self._first[t] = [i, i]
        self._keep: list[dict[int, int]] = [{}]
        self._runs: list[dict[int, int | None]] = []

    def built(self) -> AnyOrderModel:
        graph, milp = self._graph, self._milp
        needed = [self._needed(i) for i in range(len(self._events) + 1)]
        for i, need in enumerate(needed):
            self._runs.append(self._runs_in(i, need))
            if i:
                self._at_event(i, need)
        free = self._once()
        for i, runs in enumerate(self._runs):
            for v, run in runs.items():
                for x in graph.ops[v].inputs:
                    if (have := self._have(i, x)) is not None:
                        milp.at_least(1.0, have) if run is None else milp.at_least(0.0, have, [run])
            if i < len(self._events):
                self._carry(i)
        return AnyOrderModel(graph, milp, self._unit_ns, free)

    def _needed(self, stage: int) -> Collection[int]:
        """Values made before a stage begins that something in it or later can need, be it through any number of re-runs."""
        graph, need = self._graph, set[int]()
        event = self._events[stage - 1] if stage else -1
        todo = [x for v, (_, last) in enumerate(self._first) if last >= stage and v != event for x in graph.ops[v].inputs]
        while todo and stage:
            x = todo.pop()
            maker = graph.producer[x]
            if maker < 0 or x in need or x in self._tiny or (self._first[maker][0] >= stage and maker != event):
                continue
            need.add(x)
            if not graph.ops[maker].effect:
                todo.extend(graph.ops[maker].inputs)
        return need

    def _runs_in(self, stage: int, need: Collection[int]) -> dict[int, int | None]:
        """Which ops may run in a stage: for the first time, or for what was made before and may be missing."""
        graph, runs = self._graph, dict[int, int | None]()
        again = {graph.producer[x] for x in need}
        for v, op in enumerate(graph.ops):
            begin, end = self._first[v]
            is_event = v in self._events
            if begin == end == stage and not is_event:
                runs[v] = None
            elif (begin <= stage <= end and not is_event) or (v in again and not op.effect):
                runs[v] = self._milp.binary(cost=op.time_ns / self._unit_ns)
        return runs

    def _at_event(self, i: int, need: Collection[int]) -> None:
        """K at an event, with the row of its memory."""
        op, milp, size = self._graph.ops[self._events[i - 1]], self._milp, self._size
        running = {x for x in (*op.inputs, *op.outputs) if self._graph.producer[x] >= 0}
        self._keep.append({x: milp.binary(lower=float(x in running)) for x in sorted(need)})
        # What is dead as soon as it is made has no variable, but is there.
        extra_bytes = op.workspace_bytes + sum(size[x] for x in running.difference(need))
        unit_bytes = unit_of(size, self._budget_bytes)
        room_bytes = self._budget_bytes - self._graph.resident_bytes - extra_bytes
        milp.at_most(room_bytes / unit_bytes, [(k, size[x] / unit_bytes) for x, k in self._keep[i].items()])

    def _once(self) -> float:
        """Each op runs; the cost of doing so once, for those that have variables for it."""
        free = 0.0
        for v, (begin, end) in enumerate(self._first):
            if begin < end:
                self._milp.at_least(1.0, [run for i in range(begin, end + 1) if (run := self._runs[i][v]) is not None])
                free += self._graph.ops[v].time_ns / self._unit_ns
        return free

    def _have(self, stage: int, value: int) -> list[int] | None:
        """Of these variables one has to be 1 for a value to be in memory at some time in a stage; None: it is there."""
        maker = self._graph.producer[value]
        if maker < 0 or value in self._tiny:
            return None
        have = [k] if (k := self._keep[stage].get(value)) is not None else []
        if maker in self._runs[stage]:
            if (run := self._runs[stage][maker]) is None:
                return None
            have.append(run)
        return have

    def _carry(self, stage: int) -> None:
        """What the event that ends a stage reads or keeps was kept at the one before, or made in between."""
        event = self._graph.ops[self._events[stage]]
        for x in event.inputs:
            if (have := self._have(stage, x)) is not None:
                self._milp.at_least(1.0, have)
        for x, later in self._keep[stage + 1].items():
            if x not in (*event.inputs, *event.outputs) and (have := self._have(stage, x)) is not None:
                self._milp.at_least(0.0, have, [later])


def _ancestors(graph: Graph, op: int) -> set[int]:
    """The ops that have to run before one."""
    found, todo = set[int](), [op]
    while todo:
        for x in graph.ops[todo.pop()].inputs:
            maker = graph.producer[x]
            if maker >= 0 and maker not in found:
                found.add(maker)
                todo.append(maker)
    return found


def _descendants(graph: Graph, op: int) -> set[int]:
    """The ops that have to run after one."""
    found, todo = set[int](), [op]
    while todo:
        for x in graph.ops[todo.pop()].outputs:
            for reader in graph.consumers[x]:
                if reader not in found:
                    found.add(reader)
                    todo.append(reader)
    return found
