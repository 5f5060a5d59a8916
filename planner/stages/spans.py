"""What holds for several stages in a row: rows that say nothing new about whole numbers, but much about fractions.

An op that runs again by halves in two stages satisfies the rows of each stage with half of its inputs, so a relaxation with
more events may be weaker than one with fewer. What cures that holds for the stages i to j taken as one: with z[v] ≤ 1 for
"v runs again in some of them",

    z[v] ≤ z of the stages i to j - 1 + M[j] + R[j, v]         M[j] only where u_j = v
    K[i, x] + z[prod(x)] ≥ 1                                   x that an op reads which runs for the first time in these stages
    K[i, x] + z[prod(x)] ≥ z[v]                                x an input of v
    K[i, x] + z[prod(x)] + M[j+1] ≥ K[j+1, x]                  x made before stage i; M[j+1] only where u_{j+1} = prod(x)

A solver that branches is the faster for all of it (``add_spans``). A large relaxation is better off without the z: they can be
chosen if and only if no path of this kind is too short. It begins with a value that is asked for and its K[i]. At an op it either
pays the op's R in its last stage, and M at that stage's beginning (rows leave it out where the path turns to an input there), and
goes on with the stages before that, or pays the K[i] of an input and goes on with the op that makes it; it ends where no stage is
left, or at an op that cannot run again. What it has paid is at least 1, or the K[j+1] that asks, less its M[j+1]:

    f(v, j) = min( f(v, j - 1) + M[j] + R[j, v],  min over inputs x of v:  K[i, x] + f(prod(x), j) )      M[j] as above
    f(v, i) = min( R[i, v],  the same )

A few hundred of these rows bind where there are tens of thousands of z, and each says the same where there are more events.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from planner.process import turns
from planner.solvers.milp import Answer, Left
from planner.stages.model import Event, StageModel, use_and_carry

# z of one model at most, where a solver branches and in a relaxation; the longest spans come first, then the shortest
SPAN_VARIABLES, FEW_VARIABLES = 15_000, 9_000
BROKEN = 1e-3  # what a path may fall short by
MOST_ROWS = 1_000  # added at a time, those that are broken most first; of one value at one event the first only
FEW_ROWS, WORST = 200, 0.3  # of more than so few, only what falls short by this share of the most
PATIENCE = 3  # solves within which the cost has to rise for other rows to be looked for


def add_spans(model: StageModel) -> None:
    """Give a model its spans, each with variables of its own; once."""
    if model.spans:
        return
    count = len(model.events)
    spans = sorted(_between_first_runs(model), key=lambda s: (s[1] < count - 1, s[1] - s[0], s[0]))
    room = SPAN_VARIABLES
    chosen = model.spans
    for i, j in spans:
        room -= len(model.rerun[i])
        if room < 0:
            break
        chosen.add((i, j))
    for i in range(count):
        shorter = {v: [r] for v, r in model.rerun[i].items()}  # what z up to the stage before may not exceed
        for j in range(i + 1, count):
            for v, parts in shorter.items():
                if v in model.rerun[j]:
                    parts.append(model.rerun[j][v])
                if v == model.events[j].again:
                    parts.append(model.happens[j])
            if (i, j) in chosen:
                span = {v: model.milp.fraction() for v in shorter}
                for v, z in span.items():
                    model.milp.at_least(0.0, shorter[v], [z])
                use_and_carry(model, i, j, span)
                shorter = {v: [z] for v, z in span.items()}


def _between_first_runs(model: StageModel) -> list[tuple[int, int]]:
    """The spans of two stages and more that neither begin nor end with a re-run: others help little, and solvers pay for them."""
    first_runs = [j for j, event in enumerate(model.events) if not event.is_rerun]
    ends = [*(j - 1 for j in first_runs), len(model.events) - 1]
    return [(i, j) for i in first_runs for j in ends if i < j]


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A path: its K and R are together at least 1, or as much as a later K.

    start   the event whose K are summed
    kept    their values
    runs    ops and the events between which their R and M are summed. What runs at the first of the two has its inputs at the end
            of the stage before, so that its M need not be paid as well
    wanted  value and event of the later K; None where an op reads the value that runs for the first time
    """

    start: Event
    kept: tuple[int, ...]
    runs: tuple[tuple[int, Event, Event], ...]
    wanted: tuple[int, Event] | None


def relax(
    model: StageModel,
    rows: Iterable[SpanRow] = (),
    *,
    time_limit_s: float,
    least_rise: float = 0.0,
    meanwhile: Callable[[threading.Event], None] | None = None,
    left: Left | None = None,
) -> tuple[Answer, list[SpanRow]]:
    """Solve the relaxation of a model with its spans: with all of them where they are few, else with the rows that matter.

    rows        to begin with, as found for other models of the graph; those that bind come with the answer
    least_rise  no other rows are looked for once ``PATIENCE`` solves have raised the cost by no more than this
    meanwhile, left  as for ``Milp.relax``
    """
    solve = partial(model.milp.relax, time_limit_s=time_limit_s, meanwhile=meanwhile, left=left)
    if sum(len(model.rerun[i]) for i, _ in _between_first_runs(model)) <= FEW_VARIABLES:
        with turns.first():
            add_spans(model)
        return solve(), list(rows)
    with turns.first():
        spans = Spans(model)
        spans.add(rows)
    costs: list[float] = []

    def more(values: list[float]) -> bool:
        costs.append(model.milp.cost_of(values))
        is_flat = len(costs) > PATIENCE and costs[-1] - costs[-1 - PATIENCE] <= least_rise
        return not is_flat and spans.add(spans.broken(values)) > 0

    answer = solve(more=more)
    duals = answer.duals or []
    return answer, [row for row, at in spans.rows.items() if at < len(duals) and duals[at] > 0]


class Spans:
    """The rows on spans of one model.

    rows  those that are in it, with their numbers
    """

    def __init__(self, model: StageModel) -> None:
        self.model = model
        self.rows: dict[SpanRow, int] = {}
        graph, events = model.graph, model.events
        self._stage = {t: j for j, t in enumerate(events)}
        self._ends = (*events[1:], Event(len(graph.ops) - 1))  # of the stages
        self._keep = np.full((len(events), len(graph.values)), -1)  # variables, -1 for none
        self._rerun = np.full((len(events), len(graph.ops)), -1)
        for j, (keep, rerun) in enumerate(zip(model.keep, model.rerun, strict=True)):
            self._keep[j, list(keep)] = list(keep.values())
            self._rerun[j, list(rerun)] = list(rerun.values())
        self._happens = np.full((len(events), len(graph.ops)), -1)
        for j, event in enumerate(events):
            if event.is_rerun:
                self._happens[j, event.again] = model.happens[j]
        is_kept = np.any(self._keep >= 0, axis=0)
        self._ops = np.flatnonzero(np.any(self._rerun >= 0, axis=0)).tolist()  # that can run again
        self._place = np.full(len(graph.ops), -1)  # of an op among these, -1 for others
        self._place[self._ops] = range(len(self._ops))
        # Inputs of each of them that a path may go on through, with the places of their makers.
        self._inputs = [[(x, int(self._place[graph.producer[x]])) for x in graph.ops[v].inputs if is_kept[x]] for v in self._ops]
        self._asked = self._demands()

    def _demands(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Spans i to j of two stages and more, values asked for in them, and the variable of the K that asks, -1 for a read."""
        graph, count = self.model.graph, len(self.model.events)
        first = np.full(self._keep.shape, count)  # the stage of the first read that is another op's first run
        found: list[tuple[npt.NDArray[np.int64], ...]] = []

        def ask(i: int, j: int, values: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> None:
            found.append((np.full(len(values), i), np.full(len(values), j), values, wanted))

        can_rerun = self._place[list(graph.producer)] >= 0
        can_rerun[np.array(graph.producer) < 0] = False
        ends = [event.done for event in self._ends]
        for i, (event, keep) in enumerate(zip(self.model.events, self.model.keep, strict=True)):
            for x in keep:
                readers = graph.consumers[x]
                at = bisect_right(readers, event.done)
                if at < len(readers):
                    first[i, x] = int(np.searchsorted(ends, readers[at]))
            for j in range(i + 1, count):
                read = np.flatnonzero((self._keep[i] >= 0) & (first[i] == j) & can_rerun)
                ask(i, j, read, np.full(len(read), -1))
                if j + 1 < count:
                    later = np.flatnonzero((self._keep[i] >= 0) & (self._keep[j + 1] >= 0) & (first[i] > j) & can_rerun)
                    ask(i, j, later, self._keep[j + 1, later])
        return tuple(np.concatenate(part) for part in zip(*found, strict=True)) if found else ()

    def broken(self, values: list[float]) -> list[SpanRow]:
        """Rows that a solution breaks, the worst first."""
        if not self._asked:
            return []
        x = np.array([*values, 0.0, np.inf])  # the last two for what has no variable: no run, and no way to keep
        kept, again = x[np.where(self._keep < 0, -1, self._keep)], x[np.where(self._rerun < 0, -2, self._rerun)]
        happens = x[np.where(self._happens < 0, -2, self._happens)]
        paid = self._paid(kept, again, happens)
        i, j, asked, wanted = self._asked
        op = np.array(self.model.graph.producer)[asked]
        maker = self._place[op]
        at_end = np.where(wanted < 0, 0.0, happens[np.minimum(j + 1, len(happens) - 1), op])
        short = np.where(wanted < 0, 1.0, x[wanted]) - at_end - kept[i, asked] - paid[maker, i, j]
        worst = np.argsort(-short, kind="stable")[: np.count_nonzero(short > BROKEN)]
        rows: dict[tuple[int, int], SpanRow] = {}
        for n in worst.tolist():
            if len(rows) == MOST_ROWS or (len(rows) > FEW_ROWS and short[n] < WORST * short[worst[0]]):
                break
            start, value = int(i[n]), int(asked[n])
            if (start, value) not in rows:
                kept_on, runs = self._path(kept[start], again, happens, paid[:, start], start, int(j[n]), int(maker[n]))
                later = (value, self.model.events[j[n] + 1]) if wanted[n] >= 0 else None
                rows[start, value] = SpanRow(self.model.events[start], (value, *kept_on), runs, later)
        return list(rows.values())

    def _paid(
        self, kept: npt.NDArray[np.float64], again: npt.NDArray[np.float64], happens: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """f, by op, first and last stage. Within a span, f(v, j) = C(j) + min(R(i) - C(i), min over l ≤ j: b(l) - C(l)) with sums
        C of R and M over stages and b what the inputs cost."""
        count = len(again)
        paid = np.zeros((len(self._ops), count, count))
        stages = np.arange(count)
        sums = np.cumsum(again + happens, axis=0)
        for n, (v, inputs) in enumerate(zip(self._ops, self._inputs, strict=True)):
            through = np.full((count, count), np.inf)
            for x, maker in inputs:
                np.minimum(through, kept[:, x, None] + (paid[maker] if maker >= 0 else 0.0), out=through)
            through -= sums[:, v]
            through[stages[:, None] > stages] = np.inf
            through[stages, stages] = np.minimum(through[stages, stages], again[:, v] - sums[:, v])
            paid[n] = sums[:, v] + np.minimum.accumulate(through, axis=1)
        return paid

    def _path(
        self,
        kept: npt.NDArray[np.float64],
        again: npt.NDArray[np.float64],
        happens: npt.NDArray[np.float64],
        paid: npt.NDArray[np.float64],
        i: int,
        j: int,
        n: int,
    ) -> tuple[list[int], tuple[tuple[int, Event, Event], ...]]:
        """The path that costs least from the op at place n on, in the stages i to j: the values it keeps, and what it runs.

        kept, paid  K and f of the spans that begin with stage i
        """
        events = self.model.events
        values, runs = list[int](), list[tuple[int, Event, Event]]()
        last = j
        while j >= i and n >= 0:
            v = self._ops[n]
            least, x, maker = min(
                ((kept[x] + (paid[maker, j] if maker >= 0 else 0.0), x, maker) for x, maker in self._inputs[n]),
                default=(np.inf, -1, -1),
            )
            goes_on = (paid[n, j - 1] + happens[j, v] if j > i else 0.0) + again[j, v] > least
            if not goes_on:
                j -= 1
            if last > j and (goes_on or j < i):
                runs.append((v, events[j + 1], self._ends[last]))
            if goes_on:
                values.append(x)
                n, last = maker, j
        return values, tuple(runs)

    def add(self, rows: Iterable[SpanRow]) -> int:
        """Put rows into the model, those that speak of events which are there; how many are new."""
        before = len(self.rows)
        for row in rows:
            if row not in self.rows and (terms := self._terms(row)) is not None:
                self.rows[row] = len(self.model.milp.row_lower)
                self.model.milp.at_least(0.0 if row.wanted is not None else 1.0, *terms)
        return len(self.rows) - before

    def _terms(self, row: SpanRow) -> tuple[list[int], list[int]] | None:
        """Variables of a row, those that are subtracted apart; None where the model has not got them."""
        if row.start not in self._stage:
            return None
        keep = self.model.keep[self._stage[row.start]]
        if any(x not in keep for x in row.kept):
            return None
        plus, minus = [keep[x] for x in row.kept], list[int]()
        for v, begin, end in row.runs:
            stages = zip(self.model.rerun, self.model.events, self._ends, strict=True)
            plus += [rerun[v] for rerun, t, until in stages if t < end and until > begin and v in rerun]
            events = zip(self.model.happens, self.model.events, strict=True)
            plus += [m for m, t in events if begin < t < end and t.again == v]
        if row.wanted is not None:
            x, event = row.wanted
            if event not in self._stage or x not in self.model.keep[self._stage[event]]:
                return None
            if event.again == self.model.graph.producer[x]:
                plus.append(self.model.happens[self._stage[event]])
            minus.append(self.model.keep[self._stage[event]][x])
        return plus, minus
