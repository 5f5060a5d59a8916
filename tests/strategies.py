"""Random valid graphs and budgets that bite, for hypothesis (``graphs``, ``graphs_and_budgets``) and for seeded loops.

    @given(graphs())                                 def test_...(graph)
    @given(graphs_and_budgets(keep_order=True))      def test_...(case): graph, budget_bytes = case
    @pytest.mark.parametrize("seed", range(50))      graph = random_graph(seed); budget_bytes = random_budget(graph, seed)

All graphs have several kinds of trouble at once: ops with two or three outputs, workspace, values of no bytes, ops of no time,
values that nobody reads, several outputs, resident inputs. They are small enough for ``tests.oracles``.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import strategies as st

from graphs.ir import Graph, Op, Value
from planner.schedule import keep_all
from planner.simulate import simulate
from tests.oracles import least_budget

Pick = Callable[[int, int], int]  # an integer between two others, both included


@st.composite
def graphs(draw: st.DrawFn, *, max_ops: int = 6, random: bool = False, effect: bool = False) -> Graph:
    """Valid graphs of 1 to ``max_ops`` ops; ``random`` and ``effect`` allow such ops."""
    return build(lambda low, high: draw(st.integers(low, high)), max_ops=max_ops, random=random, effect=effect)


@st.composite
def graphs_and_budgets(
    draw: st.DrawFn, *, keep_order: bool, max_ops: int = 6, random: bool = False, effect: bool = False
) -> tuple[Graph, int]:
    """Graphs and budgets from the least feasible one (for ``keep_order``) to the keep-all peak."""
    graph = draw(graphs(max_ops=max_ops, random=random, effect=effect))
    low, high = budget_range(graph, keep_order=keep_order)
    return graph, draw(st.integers(low, high))


@st.composite
def sequences(draw: st.DrawFn, graph: Graph, *, max_repeats: int = 4) -> list[int]:
    """Op sequences that are valid for ``graph`` with the right frees: every op once in graph order, some again in between."""
    return sequence(graph, lambda low, high: draw(st.integers(low, high)), max_repeats=max_repeats)


def random_graph(seed: int, *, max_ops: int = 6, random: bool = False, effect: bool = False) -> Graph:
    """One graph of the same kind, of at least ``max_ops - 2`` ops, from a seed."""
    return build(
        Random(seed).randint, min_ops=max(1, max_ops - 2), max_ops=max_ops, random=random, effect=effect, name=f"random_{seed}"
    )


def random_budget(graph: Graph, seed: int, *, keep_order: bool = True) -> int:
    """A budget from the least feasible one to the keep-all peak, from a seed."""
    return Random(seed).randint(*budget_range(graph, keep_order=keep_order))


def budget_range(graph: Graph, *, keep_order: bool) -> tuple[int, int]:
    """The least feasible budget, and the highest that still bites: one byte below the keep-all peak, where that is feasible."""
    low = least_budget(graph, keep_order)
    return low, max(low, simulate(graph, keep_all(graph)).peak_bytes - 1)


def build(pick: Pick, *, max_ops: int, random: bool, effect: bool, min_ops: int = 1, name: str = "random") -> Graph:
    """A valid graph from a source of integers."""
    values = [Value(f"r{v}", pick(0, 6)) for v in range(pick(0, 2))]
    resident = frozenset(range(len(values)))
    ops: list[Op] = []
    n = pick(min_ops, max_ops)
    training = pick(0, 2) > 0  # the second half reads the first half backwards: long lifetimes make a budget bite
    for i in range(n):
        reads = {len(values) - pick(1, min(2 if training else 4, len(values)))} if values else set()
        if training and 2 * i >= n:
            reads.add(ops[n - 1 - i].outputs[0])
        elif values and pick(0, 3) == 0:
            reads.add(pick(0, len(values) - 1))
        made = len(values)
        for o in range(pick(1, 3) if pick(0, 2) == 0 else 1):
            values.append(Value(f"v{i}.{o}", pick(0, 9) if pick(0, 4) else 0))
        ops.append(
            Op(
                f"op{i}",
                tuple(sorted(reads)),
                tuple(range(made, len(values))),
                time_ns=pick(0, 9),
                workspace_bytes=pick(1, 5) if pick(0, 3) == 0 else 0,
                random=random and pick(0, 3) == 0,
                effect=effect and pick(0, 5) == 0,
            )
        )
    outputs = {len(values) - 1} | {v for v in range(len(values)) if pick(0, 5) == 0}
    return Graph(name, tuple(ops), tuple(values), resident, frozenset(outputs))


def sequence(graph: Graph, pick: Pick, *, max_repeats: int = 4) -> list[int]:
    """Every op once in graph order, and now and then some earlier op again, once all it reads has been made."""
    ops: list[int] = []
    repeats = pick(0, max_repeats)
    for i in range(len(graph.ops)):
        ops.append(i)
        while repeats and pick(0, 2) == 0:
            repeats -= 1
            again = pick(0, i)
            if not graph.ops[again].effect:
                ops.append(again)
    return ops
