"""What a search by cutting stages knows so far: the incumbent, list walks, the order that was solved for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from planner.incumbent import Incumbent
from planner.on_demand import annealed_walks, walk_search
from planner.process.clock import now_s
from planner.schedule import computes, first_runs, in_graph_order, with_frees
from planner.stages.coarsening import Coarse, coarsen
from planner.stages.exhaustive import Exhaustive
from planner.walks.second_passes import second_passes

if TYPE_CHECKING:
    from planner.stages.branching import Told
    from planner.walks.walk_search import WalkSearch

SECOND_SHARE = 0.1  # of the time left, for second passes
IDLE_PASSES = 3  # so many of them in a row that lead to nothing better, where something fits, are the last ones
BEYOND_WORK = 200_000  # of list walks between two looks at the clock
APART = 1_000_000_000  # between their seed and that of others
# Shares of the keep-all time and of the budget that an op of the coarser graph may lose, and of the time left for making that.
LOST, EXTRA, COARSEN_SHARE = 5e-4, 0.02, 0.1
# A* looks through graphs of so many ops; what share of what is proved it has to prove to be asked again.
SMALL_OPS, FAIR = 150, 0.5
FAR_AWAY, NEAR = 0.05, 0.025  # shares of the keep-all time that are a long and a short way from the bound to the best schedule
DEAR = 3.0  # keep-all times: what takes more is what walks end with where next to nothing fits


@dataclass(kw_only=True)
class StageSearch(Incumbent):
    """The incumbent of the search, and its list walks."""

    seed: int
    any_order: bool = False
    nested: bool = False  # in another order than that of the graph that is asked about, or in a coarser graph
    begun: bool = field(default=False, init=False)
    reordered: bool = field(default=False, init=False)  # whether other orders have been searched
    chained: bool = field(default=False, init=False)  # whether a chain of blocks has been tried
    blocks_miss: bool = field(default=False, init=False)  # and no schedule of it fitted
    # Walks from a schedule in several passes, in an order of their own, and that order.
    passes: tuple[WalkSearch, list[int]] | None = field(default=None, init=False)
    leaves: bool = field(default=False, init=False)  # whether all is left that has to do with graph order
    passed: bool = field(default=False, init=False)  # whether passes have led to no better order than the graph's
    coarsened: bool = field(default=False, init=False)  # whether a coarser graph has been solved
    annealings: int = field(default=0, init=False)  # how many there have been, each with a seed of its own
    looks: int = field(default=0, init=False)  # nodes that A* may have looked at so far
    relaxes: bool = field(default=True, init=False)  # whether relaxations are worth their time
    stalled: int = field(default=0, init=False)  # how many of them in a row have hardly raised the bound
    branches: bool = field(default=True, init=False)  # whether branch and bound is
    told: Told = field(default_factory=dict, init=False)  # which variables were worth a branch
    climbed: float = field(default=0.0, init=False)  # how far the last one raised it, as a share of what is left to the incumbent
    proved_by: dict[int, int] = field(default_factory=dict, init=False)  # of any order, by single events
    events: list[int] = field(default_factory=list, init=False)  # first executions that were the last model's events
    least_bytes: int = field(default=0, init=False)  # every schedule needs so many, whatever its order
    # List walks that go on for as long as a solver takes. How far they get depends on the machine, so what they find counts only
    # where the clock or Ctrl-C ends the search: then nothing would repeat anyway.
    beyond: WalkSearch | None = field(default=None, init=False)
    # What ``restricted_bound_ns`` is of, where that is not the graph's order.
    solved_order: list[int] = field(default_factory=list, init=False)

    @cached_property
    def walks(self) -> WalkSearch:
        """The list walks, with annealing in graphs without a backward pass.

        Made when first asked for: many budgets need none, and their compiled code takes time to load.
        """
        search = walk_search() if self.trained else annealed_walks()
        return search(self.graph, self.budget_bytes, self.seed)

    @cached_property
    def exhaustive(self) -> Exhaustive:
        """A* over what is in memory, for small graphs."""
        return Exhaustive(self.graph, self.budget_bytes)

    @property
    def exhaustive_keeps_up(self) -> bool:
        """Whether A* has been asked, and has proved a fair share of what is proved beyond the keep-all time."""
        return self.looks > 0 and self.exhaustive.bound_ns - self.base >= FAIR * (self.searched_ns - self.base)

    @cached_property
    def trained(self) -> bool:
        """Whether the graph has a backward pass."""
        return any(op.backward for op in self.graph.ops)

    @cached_property
    def coarser(self) -> Coarse:
        """A coarser graph, which may lose little at a time."""
        until = now_s() + COARSEN_SHARE * self.left_s
        coarse = coarsen(self.graph, LOST * self.base, EXTRA * self.budget_bytes, deadline=until)
        self.tell_cut_short(now_s() >= until)
        return coarse

    @property
    def base(self) -> int:
        return self.graph.keep_all_time_ns

    @property
    def left_s(self) -> float:
        return max(0.01, self.deadline - now_s())

    @property
    def order_of_best(self) -> list[int]:
        """First executions of the best schedule."""
        return [] if self.best is None else first_runs(computes(self.best))

    @property
    def elsewhere(self) -> bool:
        """Whether the best schedule has another order of first executions than the graph."""
        return not in_graph_order(self.order_of_best)

    @property
    def shown_bound_ns(self) -> int:
        """The one that holds for the order of the best schedule."""
        return self.any_order_bound_ns if self.best is not None and self.elsewhere else self.searched_ns

    @property
    def is_poor(self) -> bool:
        """Whether there is no schedule, or a dear one that a chain of blocks had no part in, none of whose schedules fitted."""
        return self.time_ns is None or (self.blocks_miss and self.time_ns > DEAR * self.base)

    @property
    def is_far(self) -> bool:
        """Whether the bound is far from the best schedule."""
        return self.distance_ns > FAR_AWAY * self.base

    @property
    def is_near(self) -> bool:
        """Whether it is so near that small models are the ones to close the gap."""
        return self.distance_ns <= NEAR * self.base

    @property
    def distance_ns(self) -> float:
        """From the best bound to the best schedule; without a schedule, 1 % of the keep-all time."""
        return 0.01 * self.base if self.time_ns is None else self.time_ns - self.searched_ns

    def begin_walks(self, deadline: float) -> None:
        """Walk along the graph order, once."""
        if not self.begun:
            self.walks.start(deadline=deadline)
            self.begun = True
            self.take_walk()

    def follow(self, sequence: Sequence[int], work: int = 0, until: float = math.inf) -> None:
        """Let list walks begin from a sequence with first executions in graph order: of others nothing is proved."""
        if in_graph_order(sequence):
            self.walks.follow(sequence, work, deadline=min(until, self.deadline))
            self.take_walk()

    def pass_again(self) -> None:
        """Let list walks begin from second passes, for a share of the time left."""
        until = now_s() + SECOND_SHARE * self.left_s
        idle = 0
        for runs in second_passes(self.graph, self.budget_bytes):
            if now_s() >= until or idle == IDLE_PASSES:
                break
            before_ns = self.walks.time_ns
            self.walks.follow(runs, held=True, deadline=until)
            if self.walks.time_ns < before_ns:
                idle = 0
            elif before_ns < math.inf:
                idle += 1
        self.tell_cut_short(now_s() >= until)
        self.take_walk()

    def walk_beyond(self, solved: threading.Event, until: float, more: Callable[[], Sequence[int] | None]) -> None:
        """Go on until a solver is done, or that time comes, from the sequences that ``more`` has, too."""
        if self.beyond is None:
            self.beyond = self.walks.apart(self.seed + APART)
        self.beyond.join(self.walks)
        self.beyond.stop = solved
        while not solved.is_set() and now_s() < until:
            sequence = more()
            if sequence is not None and in_graph_order(sequence):
                self.beyond.follow(sequence, deadline=self.deadline)
            self.beyond.go_on(BEYOND_WORK, deadline=self.deadline)

    def take_beyond(self) -> None:
        """Offer the best of it, and go on from there."""
        if self.beyond is not None:
            self.walks.join(self.beyond)
        self.take_walk()

    def take_last(self) -> None:
        """Take what the part under way has found, where the clock or Ctrl-C has ended it."""
        if self.notes.get("stopped") in ("time limit", "interrupted"):
            self.take_beyond()

    def take_walk(self) -> None:
        """Offer the best list walk, where it is news and there is time to."""
        if "walks" not in self.__dict__:  # none so far, and none are made for that
            return
        if self.walks.runs is not None and self.wants(self.budget_bytes, self.walks.time_ns):
            runs = self.walks.runs.tolist()
            if self.is_replayable(runs):
                self.offer(with_frees(self.graph, runs), "list walk")
            else:
                self.tell_cut_short(True)
        self.tell_cut_short(self.walks.hurried)
