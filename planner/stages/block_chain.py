"""A schedule from blocks: the forward pass cut into a chain, its blocks solved one by one, combined by a dynamic program.

The forward pass is cut at its separators, and blocks that are large all the same (a recurrent network is one) where few bytes
cross. For each distinct block the least time is found on a grid of two budgets: the peak
inside the block, and the bytes held between its forward and its backward pass. Blocks that are alike are solved once. Rotor's
dynamic program then chooses for every block in which of these ways to run it, and when to run it again as a whole (Zhao et
al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from graphs.ir import Graph
from planner.chains.chain import Chain, chain_of_blocks, held_throughout, small_crossing
from planner.chains.chain_dp import SLOTS, ChainProgram, solve_chain, too_long
from planner.process.clock import now_s
from planner.schedule import Schedule
from planner.stages.blocks import Block, BlockSolver, blocks

MOST_OPS = 40  # of the forward pass in a block, where it can be cut into smaller ones
DISTINCT = 1 / 3  # share of the ops that distinct blocks have, at most, where most are alike


class BlockSchedule(NamedTuple):
    """What blocks and dynamic program give.

    schedule  the cheapest that fits, None where none does
    notes     on how it came about; where the clock ended something, ``cut_short`` (for MILPs) or ``stopped`` is among them
    program   which may be asked for more; None where the chain is too long
    """

    schedule: Schedule | None
    notes: dict[str, Any]
    program: ChainProgram | None = None


def block_schedule(
    graph: Graph, budget_bytes: int, *, time_limit_s: float, seed: int, peaks: int = 4, saves: int = 6, slots: int = SLOTS
) -> BlockSchedule:
    """The cheapest schedule that blocks and dynamic program give.

    time_limit_s  for the blocks' MILPs; the dynamic program comes on top, and may take as long again, and a second
    peaks, saves  budgets for each block: of its peak, and of what it holds between forward and backward pass
    slots         memory units of the dynamic program at most
    """
    deadline = now_s() + time_limit_s
    chain = _chain(graph)
    if (notes := too_long(len(chain.stages))) is not None:
        return BlockSchedule(None, notes)
    problems = blocks(chain)
    fixed = graph.resident_bytes + sum(graph.values[v].size_bytes for v in held_throughout(chain))
    solver = BlockSolver(max(0, budget_bytes - fixed), peaks, saves, deadline, seed)
    # Each distinct block gets its share of the time by its size, so that one hard block leaves the others theirs.
    total = _distinct_ops(problems)
    ways = [solver.ways(block, time_limit_s * len(block.graph.ops) / total) for block in problems]
    program = ChainProgram(chain, ways)
    left_s = deadline + time_limit_s + 1 - now_s()
    schedule, notes = solve_chain(program, budget_bytes, slots, time_limit_s=left_s)
    notes.update(distinct=solver.distinct, solved=solver.solved, exact=solver.exact, ways=sum(map(len, ways)))
    if solver.cut_short:
        notes["cut_short"] = True
    return BlockSchedule(schedule, notes, program)


def is_chain(graph: Graph) -> bool:
    """Whether it has a backward pass, and blocks worth speaking of: none is more than half of the forward pass."""
    return any(op.backward for op in graph.ops) and _is_cut(_chain(graph))


def repeats(graph: Graph) -> bool:
    """Whether it is a chain of blocks of which most are alike, as time steps are, so that solving them takes little time."""
    if not any(op.backward for op in graph.ops) or not _is_cut(chain := _chain(graph)) or too_long(len(chain.stages)):
        return False
    problems = blocks(chain)
    return _distinct_ops(problems) <= DISTINCT * sum(len(block.graph.ops) for block in problems)


def _is_cut(chain: Chain) -> bool:
    sizes = [len(stage.forward) for stage in chain.stages]
    return 0 < 2 * max(sizes) <= sum(sizes)


def _distinct_ops(problems: Iterable[Block]) -> int:
    """The ops of the blocks, those that are alike counted once."""
    return sum({block.fingerprint: len(block.graph.ops) for block in problems}.values())


def _chain(graph: Graph) -> Chain:
    """The chain of blocks; small values cross cuts where that gives more of them."""
    plain = chain_of_blocks(graph, most_ops=MOST_OPS)
    more = chain_of_blocks(graph, carried=small_crossing(graph), most_ops=MOST_OPS)
    return more if len(more.stages) > len(plain.stages) else plain
