"""Branch and bound on the relaxation of a stage model, while the bound is far below the best schedule.

Near the least budget all that is in memory beside a few large values is small. A relaxation keeps half of a value and makes it
again by halves, so it pays next to nothing where a schedule has to do the one or the other and has no room left either way. Which
it is, for some of the largest values, settles much of what follows: a few dozens of nodes prove what MILP solvers, which branch
on any of thousands of variables, do not come to.

So variables count by their bytes: those of a value that is kept, of what an op that is an event reads and makes, and, for less,
of what an op that runs again makes. Of those that weigh most by how far they are from whole, each is tried both ways
(strong branching), and the one that raises the lower side most is branched on. The node with the lowest bound is next. Rows on
spans that its solution breaks are added for all nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.process import turns
from planner.process.clock import now_s
from planner.solvers.milp import Answer, Left, Outcome, Relaxation
from planner.stages.model import Event, StageModel
from planner.stages.spans import SpanRow, Spans

TRIED = 5  # variables at each node
RERUN = 0.3  # what the bytes of a re-run's largest output count, which are in memory at no known moment
WHOLE = 1e-4  # weight times distance from whole of a variable that is not worth a branch
LOWER, UPPER = 5.0, 1.0  # what a rise counts on the side that rises less, and on the other
RISES = 0.001  # share of the bound: where the lower side of a branch rises by it, the variable is tried sooner from then on
TOLD = 0.5  # by this weight each time
ROUNDS, MOST_ROWS = 3, 40  # of rows on spans for a node, and how many in one
FLAT = 0.002  # share of the bound: where they raise it by less, they are the last ones

Told = dict[tuple[str, Event, int], float]


@dataclass(order=True, slots=True)
class _Node:
    """What is fixed, and the relaxation's solution for it; the lowest bound first."""

    bound: float
    number: int
    fixed: dict[int, float] = field(compare=False)
    values: npt.NDArray[np.float64] = field(compare=False)


class Branching:
    """The open nodes of one stage model. To be used on a solver's thread.

    solves   relaxations solved so far
    told     of variables, by what they stand for: how much sooner they are tried; serves the next model too
    is_stuck  whether the lowest node has no variable worth a branch
    """

    def __init__(self, model: StageModel, rows: Iterable[SpanRow], left: Left, told: Told) -> None:
        with turns.first():
            self.model, self.told = model, told
            self.solves, self.is_stuck = 0, False
            self._left = left
            self._spans = Spans(model)
            self._spans.add(rows)
            self._names, self._weights = _weights(model)
            for x, name in self._names.items():
                self._weights[x] += told.get(name, 0.0)
            self._relaxation = Relaxation(model.milp, left)
        self._open: list[_Node] = []
        self._numbers = 0

    @property
    def answer(self) -> Answer:
        """The bound so far, with the solution of the node that has it; INFEASIBLE where no node is left."""
        if not self._numbers:
            return Answer(Outcome.STOPPED, None, math.inf, -math.inf)
        if not self._open:
            return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
        lowest = self._open[0]
        values = lowest.values.tolist()
        return Answer(Outcome.STOPPED, values, self.model.milp.cost_of(values), lowest.bound)

    def go_on(self, solves: int, *, cutoff: float, deadline: float) -> None:
        """Branch until there were about so many more relaxations, the bound is at the cutoff, or time is up."""
        until = self.solves + solves
        if not self._numbers:
            self._put({}, self._solve({}, deadline), -math.inf)
        while self._open and self.solves < until and not self._is_over(deadline):
            if self._open[0].bound >= cutoff or not self._branch(deadline):
                break

    def _is_over(self, deadline: float) -> bool:
        return self._left.is_set() or now_s() >= deadline

    def _solve(self, fixed: dict[int, float], deadline: float) -> Answer:
        self.solves += 1
        return self._relaxation.solve(fixed, time_limit_s=max(0.0, deadline - now_s()))

    def _put(self, fixed: dict[int, float], answer: Answer, bound: float) -> None:
        """A node with this solution; nothing is known of one that was stopped, which is not put."""
        if answer.values is not None:
            self._numbers += 1
            heapq.heappush(self._open, _Node(max(bound, answer.bound), self._numbers, fixed, np.array(answer.values)))

    def _branch(self, deadline: float) -> bool:
        """Put the two sides of the best branch in the place of the lowest node; False where there is none, or no time."""
        node = self._open[0]
        bound = self._with_rows(node, deadline)
        if self._is_over(deadline) or not self._open or self._open[0] is not node:
            return not self._is_over(deadline)
        with turns.first():
            weight = np.minimum(node.values, 1 - node.values) * self._weights
            worth = [x for x in np.argsort(-weight, kind="stable")[:TRIED].tolist() if weight[x] > WHOLE]
        self.is_stuck = not worth
        best: tuple[float, int, list[tuple[dict[int, float], Answer]]] = (-1.0, -1, [])
        for x in worth:
            sides = [({**node.fixed, x: side}, self._solve({**node.fixed, x: side}, deadline)) for side in (0.0, 1.0)]
            if any(answer.outcome is Outcome.STOPPED for _, answer in sides):
                if self._is_over(deadline):
                    return False
                continue  # nothing is known of one side, so the branch would prove nothing
            low, high = sorted(min(answer.bound, 2 * bound + 1) - bound for _, answer in sides)
            if (score := LOWER * low + UPPER * high) > best[0]:
                best = score, x, sides
            if low > RISES * bound:
                self._tell(x)
        if not best[2]:
            self.is_stuck = True
            return False
        heapq.heappop(self._open)
        for fixed, answer in best[2]:
            self._put(fixed, answer, bound)
        return True

    def _with_rows(self, node: _Node, deadline: float) -> float:
        """Add rows that the lowest node's solution breaks and solve it anew; its bound then. It may be the lowest no more."""
        for _ in range(ROUNDS):
            with turns.first():
                is_new = self._spans.add(self._spans.broken(node.values.tolist())[:MOST_ROWS]) > 0
            if not is_new or self._is_over(deadline):
                break
            answer = self._solve(node.fixed, deadline)
            if answer.outcome is Outcome.STOPPED:
                break
            heapq.heappop(self._open)
            if answer.outcome is Outcome.INFEASIBLE:
                break
            rise = answer.bound - node.bound
            node.bound = max(node.bound, answer.bound)
            node.values = np.array(answer.values)
            heapq.heappush(self._open, node)
            if self._open[0] is not node or rise <= FLAT * node.bound:
                break
        return node.bound

    def _tell(self, variable: int) -> None:
        name = self._names[variable]
        self.told[name] = self.told.get(name, 0.0) + TOLD
        self._weights[variable] += TOLD

    def rows(self) -> list[SpanRow]:
        """The rows on spans that it has."""
        return list(self._spans.rows)


def _weights(model: StageModel) -> tuple[dict[int, tuple[str, Event, int]], npt.NDArray[np.float64]]:
    """What variables stand for, and their bytes as a share of all values' largest ones."""
    graph = model.graph
    size = [0 if x in graph.resident else value.size_bytes for x, value in enumerate(graph.values)]
    most = max(1, *size)
    names: dict[int, tuple[str, Event, int]] = {}
    weights = np.zeros(len(model.milp.cost))
    for event, keep, rerun, happens in zip(model.events, model.keep, model.rerun, model.happens, strict=True):
        for x, k in keep.items():
            names[k], weights[k] = ("keep", event, x), size[x] / most
        for v, r in rerun.items():
            names[r], weights[r] = ("rerun", event, v), RERUN * max((size[x] for x in graph.ops[v].outputs), default=0) / most
        if happens >= 0:
            op = graph.ops[event.op]
            names[happens], weights[happens] = (
                ("happens", event, event.op),
                sum(size[x] for x in (*op.inputs, *op.outputs)) / most,
            )
    return names, weights
