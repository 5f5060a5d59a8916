"""Ways to run one stage of a chain: solved exactly for a few budgets, once for stages that are alike.

A stage's problem is a graph of its own: its forward ops, a stop, its backward ops. The later stages run at the stop: it reads
the stage's output, makes the gradients that they send back, and runs once (it has an effect). What the stage reads from outside
counts nothing in it. Two budgets limit a way to run it: its peak, and what it holds at the stop. For each pair the least time is
found with the MILP of ``planner.stages.model``, with one event at the stop, and more of them where the solution, walked,
overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from graphs.ir import Graph, Op, Value
from planner.chains.chain import Chain, held_throughout, left_for
from planner.chains.chain_dp import Way
from planner.least.pebbling import least_peak
from planner.on_demand import sat_minimise
from planner.process.clock import now_s
from planner.schedule import Compute, keep_all, with_frees
from planner.simulate import Trace, simulate
from planner.solvers.milp import Outcome
from planner.stages.events import missing
from planner.stages.model import Event, stage_model, walk, with_end
from planner.stages.spans import add_spans
from planner.walks.list_walk import ListWalk

ROUNDS = 30  # MILPs for one pair of budgets at most
STILL_EXACT = 1e-4  # gap of a MILP, relative to the stage's time
PEBBLE_WORK = 80_000  # ops times sets of values to visit, for how little memory a stage can do with


@dataclass(frozen=True)
class Block:
    """One stage as a graph.

    graph  its ops, with the stop between forward and backward
    ops    the op of the whole graph behind each op, -1 for the stop
    stop   number of the stop
    """

    graph: Graph
    ops: tuple[int, ...]
    stop: int

    @cached_property
    def fingerprint(self) -> str:
        """That of its graph: blocks that share it can be run in the same ways."""
        return self.graph.fingerprint()

    def split(self, runs: Sequence[int]) -> Way:
        """The way that a sequence of the block's ops stands for."""
        at = runs.index(self.stop)
        return Way(tuple(self.ops[i] for i in runs[:at]), tuple(self.ops[i] for i in runs[at + 1 :]))


def blocks(chain: Chain) -> list[Block]:
    """The stages as graphs of their own. Stages that are alike give graphs with the same fingerprint."""
    always, left = held_throughout(chain), left_for(chain)
    last = len(chain.stages) - 1
    found = []
    for at in range(len(chain.stages)):
        output = chain.stages[at + 1].inputs if at < last else frozenset[int]()
        found.append(_block(chain, at, output, left[at], left[at - 1] if at else left[-1], always))
    return found


def _block(
    chain: Chain, at: int, output: frozenset[int], left: frozenset[int], later: frozenset[int], always: frozenset[int]
) -> Block:
    graph, stage = chain.graph, chain.stages[at]
    made = {v for i in (*stage.forward, *stage.backward) for v in graph.ops[i].outputs}
    read = {v for i in stage.backward for v in graph.ops[i].inputs}
    gradients = (read & left) - made
    number: dict[int, int] = {}
    values: list[Value] = []
    resident: set[int] = set()

    def local(v: int) -> int:
        """The block's number of a value, given in the order in which values turn up, so that like blocks are numbered alike."""
        if v not in number:
            number[v] = len(values)
            outside = v not in made and v not in gradients
            counts = not outside and v not in always
            values.append(Value(graph.values[v].name, graph.values[v].size_bytes if counts else 0))
            if outside:
                resident.add(number[v])
        return number[v]

    def copied(i: int) -> Op:
        op = graph.ops[i]
        inputs, outputs = tuple(local(v) for v in op.inputs), tuple(local(v) for v in op.outputs)
        return Op(op.name, inputs, outputs, op.time_ns, op.workspace_bytes, op.kind, op.random, op.effect, op.backward)

    ops = [copied(i) for i in stage.forward]
    tail = [copied(i) for i in stage.backward]  # before the stop, whose gradients are numbered as their readers name them
    stop = Op("stop", tuple(sorted(number[v] for v in output)), tuple(sorted(number[v] for v in gradients)), 0, effect=True)
    outputs = {number[v] for v in made & (later | graph.outputs)}
    whole = Graph(
        f"{graph.name}_stage_{at}",
        (*ops, stop, *tail),
        tuple(values),
        frozenset(resident),
        frozenset(outputs),
    )
    return Block(whole, (*stage.forward, -1, *stage.backward), len(ops))


@dataclass
class BlockSolver:
    """Finds ways to run blocks, and remembers them by the block's fingerprint.

    room_bytes     no way with a higher peak is of use
    peaks, saves   how many budgets of each kind
    deadline       ``now_s()`` at which to stop solving
    solved, exact  pairs of budgets looked at, and how many of them were solved to the end
    cut_short      whether the clock ended something: the same again may then give other ways
    distinct       different blocks seen
    """

    room_bytes: int
    peaks: int
    saves: int
    deadline: float
    seed: int
    solved: int = 0
    exact: int = 0
    cut_short: bool = False
    _found: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def distinct(self) -> int:
        return len(self._found)

    def ways(self, block: Block, share_s: float) -> list[Way]:
        """Ways to run a block, each of use for some budgets; keeping all is among them. ``share_s``: time to solve at most."""
        key = block.fingerprint
        if key not in self._found:
            self._found[key] = self._solve(block, min(self.deadline, now_s() + share_s))
        return [block.split(runs) for runs in self._found[key]]

    def _solve(self, block: Block, deadline: float) -> list[list[int]]:
        graph = block.graph
        everything = list(range(len(graph.ops)))
        whole = simulate(graph, keep_all(graph))
        found = [everything]
        done: list[tuple[int, int, Trace, int]] = []  # budgets, and trace and saved bytes of the least time for them
        most = min(whole.peak_bytes, self.room_bytes)
        least, _ = least_peak(graph, states=PEBBLE_WORK // len(everything), time_limit_s=deadline - now_s())
        for peak_bytes in _grid(least, most, self.peaks):
            for saved_bytes in _grid(_output_bytes(block), _saved(block, whole, everything), self.saves):
                if now_s() > deadline:
                    self.cut_short = True
                    break
                # Least for wider budgets and within these: least for these too.
                if any(
                    p >= peak_bytes and s >= saved_bytes and trace.peak_bytes <= peak_bytes and saved <= saved_bytes
                    for p, s, trace, saved in done
                ):
                    continue
                runs, exact = self.least(block, peak_bytes, saved_bytes, deadline)
                self.solved += 1
                self.exact += exact
                if runs is None and not exact:
                    walk = ListWalk(graph, peak_bytes)
                    walked = walk.follow(walk.route(everything))
                    runs = walked.runs[:-1].tolist() if walked.complete else None
                if runs is None:
                    break  # with fewer bytes saved it is harder still
                if runs not in found:
                    found.append(runs)
                if exact:
                    trace = simulate(graph, with_frees(graph, runs))
                    done.append((peak_bytes, saved_bytes, trace, _saved(block, trace, runs)))
        return found

    def least(self, block: Block, peak_bytes: int, saved_bytes: int, deadline: float) -> tuple[list[int] | None, bool]:
        """The least time within two budgets: a sequence of the block's ops (None: none found), and whether that is exact."""
        graph = block.graph
        closed = with_end(graph)
        events = [Event(block.stop)]
        for _ in range(ROUNDS):
            model = stage_model(closed, peak_bytes, events)
            keep = model.keep[events.index(Event(block.stop))]
            unit = max(1, saved_bytes)
            counted = [(k, graph.values[x].size_bytes / unit) for x, k in keep.items() if graph.producer[x] != block.stop]
            model.milp.at_most(saved_bytes / unit, counted)
            gap = STILL_EXACT * graph.keep_all_time_ns / model.unit_ns
            add_spans(model)
            minimise = partial(sat_minimise(), model.milp) if model.is_for_sat else model.milp.minimise
            answer = minimise(time_limit_s=max(0.01, deadline - now_s()), gap=gap, seed=self.seed)
            self.cut_short |= answer.outcome is Outcome.STOPPED
            if answer.values is None:
                return None, answer.outcome is Outcome.INFEASIBLE
            found = walk(model, answer.values)
            runs = found.runs
            trace = simulate(graph, with_frees(graph, runs))
            if trace.peak_bytes <= peak_bytes:
                return runs, answer.outcome is Outcome.SOLVED
            more, _ = missing(model, graph, found, peak_bytes, 1)
            if not more:
                break
            events = sorted((*events, *more))
            if now_s() > deadline:
                self.cut_short = True
                break
        return None, False


def _grid(low: int, high: int, count: int) -> list[int]:
    """So many numbers from ``high`` down to ``low``, evenly spaced."""
    if high <= low or count == 1:
        return [max(low, high)]
    return sorted({low + (high - low) * k // (count - 1) for k in range(count)}, reverse=True)


def _output_bytes(block: Block) -> int:
    return sum(block.graph.values[v].size_bytes for v in block.graph.ops[block.stop].inputs)


def _saved(block: Block, trace: Trace, runs: Sequence[int]) -> int:
    """Bytes held at the stop, gradients not counted."""
    schedule = with_frees(block.graph, runs)
    at = next(s for s, step in enumerate(schedule) if step == Compute(block.stop))
    return trace.memory_bytes[at] - sum(block.graph.values[v].size_bytes for v in block.graph.ops[block.stop].outputs)
