"""What takes long to load and many budgets do without, imported when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.process.loading import undisturbed

if TYPE_CHECKING:
    from planner.least.cuts import MinCuts
    from planner.solvers.milp import Answer
    from planner.walks.annealed_walks import AnnealedWalks
    from planner.walks.walk_search import WalkSearch


def walk_search() -> type[WalkSearch]:
    """The list walks: their compiled code takes half a second."""
    return undisturbed(_walk_search)


def _walk_search() -> type[WalkSearch]:
    from planner.walks.walk_search import WalkSearch

    return WalkSearch


def annealed_walks() -> type[AnnealedWalks]:
    """The same with annealing."""
    return undisturbed(_annealed_walks)


def _annealed_walks() -> type[AnnealedWalks]:
    from planner.walks.annealed_walks import AnnealedWalks

    return AnnealedWalks


def sat_minimise() -> Callable[..., Answer]:
    """``Milp.minimise`` by CP-SAT."""
    return undisturbed(_sat_minimise)


def _sat_minimise() -> Callable[..., Answer]:
    from planner.solvers.pseudo_boolean import minimise

    return minimise


def min_cuts() -> type[MinCuts]:
    """Minimum cuts, by OR-Tools."""
    return undisturbed(_min_cuts)


def _min_cuts() -> type[MinCuts]:
    from planner.least.cuts import MinCuts

    return MinCuts


def last_runs_peak() -> Callable[..., int]:
    """What last runs and cuts prove of the least bytes, by OR-Tools too."""
    return undisturbed(_last_runs_peak)


def _last_runs_peak() -> Callable[..., int]:
    from planner.least.last_runs import last_runs_peak

    return last_runs_peak


def halve() -> Callable[..., None]:
    """Twremat's sequences, by NetworkX."""
    return undisturbed(_halve)


def _halve() -> Callable[..., None]:
    from planner.walks.halving import halve

    return halve


def compile_all() -> None:
    """Compile what is compiled when it is first used, and keep it on disk, so that the first plan does not wait for it."""
    from planner.least.pebbling import least_peak
    from planner.process.loading import TINY
    from planner.stages.exhaustive import cheapest
    from planner.walks.annealing import Annealer

    walk_search()(TINY, 1, 0)
    Annealer(TINY, range(1), 1, 0, keep_order=True)
    least_peak(TINY)
    cheapest(TINY, 1)
