"""One graph, the same bytes: the optimum and the online rules side by side, and where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphs.errors import GraphMismatch, InputError, a_kind
from graphs.ir import Graph
from online.engines.engine import Option
from online.heuristics import DEFAULT_RULE
from online.runtime import Run, rule, rule_named, run
from planner.bounds import least_bytes
from planner.budget import format_bytes, format_share, listed, resolve_budget, share_of
from planner.live import line_of
from planner.plan import check_options, copied_bytes_of, graph_of, solve, solve_halves
from planner.result import Plan
from planner.schedule import Schedule, computes, keep_all, with_frees
from planner.simulate import simulate

if TYPE_CHECKING:
    from graphs.capture import Step
    from online.trial import Trial

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpDifference:
    """How often one op ran again in each schedule, and the time the online run spent on it beyond the plan."""

    op: int
    name: str
    kind: str
    planned_runs: int
    online_runs: int
    extra_ns: int


@dataclass(frozen=True)
class Split:
    """What the distance of one online run to the optimum is made of; each part against the run itself, all else equal.

    The parts are differences of two greedy runs, not shares of a whole: they need not add up, and each can be below 0, where the
    rule that knows less or has less room happens to do better.

    told       the same rule with next uses known: not online. None where the rule has no staleness that they could replace
    addressed  the same rule in one range of addresses of the same size, or counting bytes where ``run`` is in one already
    search_s   wall time that ``run`` spent choosing what to evict; in no schedule's time
    """

    run: Run
    told: Run | None
    addressed: Run
    search_s: float

    @property
    def foresight_ns(self) -> int | None:
        """Time that knowing next uses would save this rule; None where either run stopped."""
        if self.told is None or self.run.time_ns is None or self.told.time_ns is None:
            return None
        return self.run.time_ns - self.told.time_ns

    @property
    def fragmentation_ns(self) -> int | None:
        """Time that a budget of addresses costs this rule beyond one of bytes; None where either run stopped."""
        if self.run.time_ns is None or self.addressed.time_ns is None:
            return None
        more = self.addressed.time_ns - self.run.time_ns
        return more if self.run.allocator == "bytes" else -more

    def row(self) -> dict[str, Any]:
        """Entries for the result row of ``run``."""
        return {
            "foresight_ns": self.foresight_ns,
            "foresight_status": None if self.told is None else str(self.told.status),
            "fragmentation_ns": self.fragmentation_ns,
            "fragmentation_status": str(self.addressed.status),
            "search_s": self.search_s,
        }

    def __str__(self) -> str:
        addresses = "in one range of addresses" if self.run.allocator == "bytes" else "counting bytes alone"
        other = "the same rule" if self.addressed.heuristic == self.run.heuristic else self.addressed.heuristic
        return (
            f"    the same rule with next uses known (not online): {_against(self.run, self.told)}\n"
            f"    {other} {addresses}: {_against(self.run, self.addressed)}\n"
            f"    choosing what to evict took {self.search_s * 1e3:.3f} ms, which no time above has in it"
        )


def split(run_: Run) -> Split:
    """Run the same rule again with next uses known, and with the other kind of budget (simulated). Raises InputError for what is
    no Run."""
    if not isinstance(run_, Run):
        raise InputError(f"split takes a Run (of online.run), not {a_kind(run_)}")
    heuristic, others = rule(run_.heuristic), run_.options - {Option.NEXT_USE}

    def again(allocator: str | None, options: Collection[Option], named: str = run_.heuristic) -> Run:
        return run(
            run_.graph, run_.budget_bytes, heuristic=named, allocator=allocator, release=run_.release,
            reclaim=run_.reclaim, options=options, seed=run_.seed, thrash_limit=run_.thrash_limit,
        )  # fmt: skip

    told = again(run_.allocator, others | {Option.NEXT_USE}) if heuristic.staleness and not heuristic.window else None
    # A rule that chooses by addresses cannot count bytes alone; h_DTR stands in for it.
    if run_.allocator == "bytes":
        return Split(run_, told, again("arena", run_.options), run_.counters.search_s)
    if heuristic.window or heuristic.holes:
        return Split(run_, told, again(None, (), "dtr"), run_.counters.search_s)
    return Split(run_, told, again("bytes", run_.options), run_.counters.search_s)


def _against(run_: Run, other: Run | None) -> str:
    if other is None:
        return "does not apply"
    if run_.time_ns is None or other.time_ns is None:
        return f"{other.status}" + ("" if other.overhead is None else f", overhead {other.overhead:.2%}")
    base = run_.graph.keep_all_time_ns
    return f"{(other.time_ns - run_.time_ns) / 1e6:+.3f} ms" + (
        f" ({(other.time_ns - run_.time_ns) / base:+.2%} of keep-all)" if base else ""
    )


@dataclass(frozen=True)
class Difference:
    """The optimum and one online run under one budget. ``print`` it."""

    plan: Plan
    run: Run

    def split(self) -> Split:
        """What the distance is made of. Runs the rule two more times."""
        return split(self.run)

    @property
    def distance(self) -> float | None:
        """Online time / proved bound - 1: at most this far from what any schedule of this order can do."""
        bound = self.plan.bound_ns
        return None if self.run.time_ns is None or not bound else self.run.time_ns / bound - 1

    @property
    def extra_ns(self) -> int | None:
        """Online time minus planned time; None where either has no complete schedule."""
        if self.run.time_ns is None or self.plan.time_ns is None:
            return None
        return self.run.time_ns - self.plan.time_ns

    def ops(self) -> list[OpDifference]:
        """Every op that the two run a different number of times, the online run's largest extra time first."""
        planned, online = _runs(self.plan.schedule), _runs(self.run.schedule)
        graph = self.plan.graph
        rows = [
            OpDifference(i, op.name, op.kind, planned[i], online[i], (online[i] - planned[i]) * op.time_ns)
            for i, op in enumerate(graph.ops)
            if planned[i] != online[i]
        ]
        return sorted(rows, key=lambda row: (-row.extra_ns, row.op))

    def __str__(self) -> str:
        graph, plan_, run_ = self.plan.graph, self.plan, self.run
        lines = [
            f"{graph.name} in {format_bytes(plan_.budget_bytes)}",
            f"  {plan_.method:<18} {_describe(plan_.time_ns, plan_.peak_bytes, graph, plan_.schedule)}"
            + (f", proved within {plan_.gap:.2%}" if plan_.gap is not None else f", {plan_.status}"),
            f"  online {run_.rule:<11} {_describe(run_.time_ns, run_.peak_bytes, graph, run_.schedule)}"
            + (f", {self.distance:.2%} above the bound" if self.distance is not None else f", {run_.status}"),
        ]
        lines.append(str(self.split()))
        extra = self.extra_ns
        if extra:
            shown = [row for row in self.ops()[:5] if row.extra_ns > 0]
            lines.append(
                f"  the online run takes {abs(extra) / 1e6:.3f} ms {'more' if extra > 0 else 'less'} than the plan"
                + "; what it spends most on, reruns in the plan -> online:" * bool(shown)
            )
            names = max((len(row.name) for row in shown), default=0)
            kinds = max((len(row.kind) for row in shown), default=0)
            lines += [
                f"    {row.name:<{names}}  {row.kind:<{kinds}}  {row.planned_runs - 1:>3} -> {row.online_runs - 1:>3}  "
                f"{row.extra_ns / 1e6:+.3f} ms"
                for row in shown
            ]
        return "\n".join(lines)


def diff(plan: Plan, run: Run) -> Difference:
    """Compare a plan with an online run of the same graph under the same budget.

    Raises GraphMismatch where the two are of different graphs or budgets.
    """
    for thing, kind, place in ((plan, Plan, "first"), (run, Run, "second")):
        if not isinstance(thing, kind):
            raise InputError(f"diff takes a Plan, then a Run; {place} came a {type(thing).__name__}")
    if plan.graph is not run.graph and plan.graph.fingerprint() != run.graph.fingerprint():
        raise GraphMismatch(f"the plan is for {plan.graph.name}, the run for {run.graph.name}: not the same graph")
    if plan.budget_bytes != run.budget_bytes:
        raise GraphMismatch(
            f"the plan has {plan.budget_bytes:,} bytes, the run {run.budget_bytes:,}: compare under the same budget"
        )
    return Difference(plan, run)


@dataclass(frozen=True)
class Block:
    """Everything found for one budget. Rows are made by ``Comparison.rows``."""

    budget_bytes: int
    plan: Plan
    runs: tuple[Run, ...]
    trials: dict[str, Trial] = field(default_factory=dict)  # by method, as in the rows
    splits: tuple[Split, ...] = ()  # of each run, where they were asked for

    @property
    def differences(self) -> list[Difference]:
        """The plan against each online run."""
        return [Difference(self.plan, run) for run in self.runs]


@dataclass(frozen=True)
class Comparison:
    """The optimum and the online rules on one graph, for several budgets. ``print`` it.

    interrupted  Ctrl-C ended it early: what is there is complete, but for the last block, and budgets may be missing
    """

    graph: Graph
    keep_all: Plan
    blocks: tuple[Block, ...]
    plain: Trial | None = None
    interrupted: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """Result rows: keep-all once, then for each budget the plan and every online run."""
        rows = [_with_trial(self.keep_all.row(), self.plain)]
        for block in self.blocks:
            rows.append(_with_trial(block.plan.row(), block.trials.get(block.plan.method)))
            for number, run_ in enumerate(block.runs):
                row = run_.row() | (block.splits[number].row() if block.splits else {})
                # The plan's bound holds for every schedule in this order of first executions, so for this one too.
                row["bound_ns"] = block.plan.bound_ns
                if row["time_ns"] is not None and block.plan.bound_ns is not None:
                    row["gap"] = (row["time_ns"] - block.plan.bound_ns) / row["time_ns"] if row["time_ns"] else 0.0
                rows.append(_with_trial(row, block.trials.get(row["method"])))
        return rows

    def __str__(self) -> str:
        lines = [f"{self.graph.name}: {len(self.graph.ops)} ops, keep-all {self.graph.keep_all_time_ns / 1e6:.3f} ms"]
        head = ("budget", "method", "status", "overhead", "bound", "gap", "peak", "recomputed")
        lines.append("  {:>18}  {:<24} {:<13} {:>9} {:>9} {:>8} {:>9} {:>10}".format(*head))
        base = self.graph.keep_all_time_ns
        for row in self.rows():
            share = "" if row["budget_fraction"] is None else f"{format_share(row['budget_fraction'])} "
            bound = None if row["bound_ns"] is None or not base else row["bound_ns"] / base - 1
            lines.append(
                f"  {share + format_bytes(row['budget_bytes']):>18}  {row['method']:<24} {row['status']:<13} "
                f"{_percent(row['overhead']):>9} {_percent(bound):>9} {_percent(row['gap']):>8} "
                f"{'-' if row['peak_bytes'] is None else format_bytes(row['peak_bytes']):>9} "
                f"{'-' if row['recomputed_ops'] is None else row['recomputed_ops']:>10}"
            )
        for block in self.blocks:
            for part in block.splits:
                lines.append(f"  {format_bytes(block.budget_bytes)}, online {part.run.rule}:\n{part}")
        return "\n".join(lines + ["  interrupted: budgets may be missing"] * self.interrupted)


def compare(
    target: Step | Graph,
    budgets: Sequence[int | float | str] | int | float | str,
    *,
    heuristics: Sequence[str] | str = (DEFAULT_RULE,),
    method: str = "cutting_stages",
    gap: float = 0.005,
    time_limit_s: float = 60.0,
    seed: int = 0,
    execute: bool = False,
    inputs: Any = None,
    splits: bool = False,
    progress: Progress | None = None,
    solver_progress: Callable[..., None] | None = None,
) -> Comparison:
    """Plan and run online under each budget; with ``execute`` also do both for real on the step's device.

    budgets, heuristics  several, each counted once, or one
    inputs           arguments of one training step, as given to ``capture``; needed to execute
    splits           also find what the distance of each online run is made of (``Split``)
    progress         called with a short sentence before each part, and with what is known of a plan while it is sought
    solver_progress  passed to the planning method instead

    Ctrl-C ends it early: the comparison then has what was found so far, and says ``interrupted``.
    Raises InputError for what cannot be used, and as ``run`` and ``solve`` do.
    """
    check_options({"progress": progress})
    if isinstance(heuristics, str) or not isinstance(heuristics, Iterable):
        heuristics = (heuristics,)
    say = progress or (lambda _: None)
    graph = graph_of(target, "compare")
    if execute and not isinstance(target, Graph):
        target = replace(target, graph=graph)  # with its costs
    budgets = listed(budgets, "compare")
    heuristics = list(dict.fromkeys(map(rule_named, heuristics)))
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    resolved = list(dict.fromkeys(resolve_budget(budget, peak_bytes) for budget in budgets))  # 0.5 and "50%" are one budget
    whole = solve(graph, peak_bytes, method="keep_all")
    trials, copied_bytes = None, None
    if execute:
        if isinstance(target, Graph):
            raise InputError(f"{graph.name} is a graph without a model behind it: it can be planned, but not executed")
        from online.trial import Trials

        copied_bytes = copied_bytes_of(target)
        say("plain PyTorch")
        trials = Trials(target, inputs, seed=seed)

    blocks: list[Block] = []
    interrupted = False
    try:
        for budget_bytes in resolved:
            share = share_of(budget_bytes, peak_bytes)
            where = format_bytes(budget_bytes) + ("" if share is None else f" ({format_share(share)})")
            runs = []
            for heuristic in heuristics if budget_bytes >= least_bytes(graph) else ():
                say(f"online {heuristic} in {where}")
                runs.append(run(graph, budget_bytes, heuristic=heuristic, seed=seed))
            told = line_of(f"{method} in {where}", graph, say)
            options: dict[str, Any] = {"gap": gap, "time_limit_s": time_limit_s, "seed": seed}
            options["progress"] = solver_progress or told
            # What an online run found, the planner must not miss.
            cheapest = min((r for r in runs if r.completed), key=lambda r: r.time_ns or 0, default=None)
            # A rule may hold what is dead until room is needed; a plan has no reason to.
            start = with_frees(graph, list(computes(cheapest.schedule))) if cheapest else None
            plan = solve_halves(graph, budget_bytes, copied_bytes=copied_bytes, method=method, start=start, **options)
            measured: dict[str, Trial] = {}
            parts = tuple(map(split, runs)) if splits else ()
            blocks.append(Block(budget_bytes, plan, tuple(runs), measured, parts))
            if interrupted := plan.interrupted:
                break
            if trials is not None and plan.schedule is not None and "halves" not in plan.notes:
                say(f"executing the plan for {where}")
                measured[plan.method] = trials.planned(plan)
            for run_ in runs:
                if trials is not None and run_.completed:
                    say(f"executing online {run_.rule} in {where}")
                    measured[run_.plan().method] = trials.online(budget_bytes, run_.rule)
    except KeyboardInterrupt:
        interrupted = True
    return Comparison(graph, whole, tuple(blocks), trials.plain if trials else None, interrupted)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _with_trial(row: dict[str, Any], trial: Trial | None) -> dict[str, Any]:
    return row if trial is None else row | trial.row()


def _runs(schedule: Schedule | None) -> Counter[int]:
    return Counter(computes(schedule or ()))


def _describe(time_ns: int | None, peak_bytes: int | None, graph: Graph, schedule: Schedule | None) -> str:
    if time_ns is None or peak_bytes is None:
        return "no complete schedule"
    overhead = time_ns / graph.keep_all_time_ns - 1 if graph.keep_all_time_ns else 0.0
    again = sum(_runs(schedule).values()) - len(graph.ops)
    return f"overhead {overhead:7.2%}, peak {format_bytes(peak_bytes)}, {again} ops recomputed"
