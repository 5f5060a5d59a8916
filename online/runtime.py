"""``run``: one graph under one budget, decided online. Every run writes down its Schedule."""

from __future__ import annotations

import contextlib
import enum
import functools
import time
import weakref
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphs.errors import BudgetExceeded, InputError, NoScheduleFound, check_name, quoted
from graphs.ir import Graph, Op, Value
from graphs.program import Program, program_of
from online.allocators import ALLOCATORS, ARENAS, AddressUse, Arena, new_allocator
from online.engines.engine import Counters, Driver, Engine, Option, OutOfMemory, Release, Thrashed
from online.heuristics import ADDRESS_HEURISTICS, DEFAULT_RULE, HEURISTICS, Heuristic
from planner.bounds import least_bytes
from planner.budget import format_bytes, resolve_budget
from planner.plan import check_numbers, check_options, graph_of, infeasible
from planner.process.pauses import rare_collections
from planner.result import Plan, in_a_line
from planner.schedule import Schedule, from_json, keep_all
from planner.simulate import simulate

if TYPE_CHECKING:
    from graphs.capture import Inputs, Step
    from online.executor import Outcome


AT_START = "the start"  # in place of an op, where it does not fit
UPDATES = 2  # steps that come before the one of a run whose allocator moves the residents between steps
RUNS_PER_OP = 1000  # a run that recomputes more often than this, on average, is given up: costs may be 0, so time says nothing


class RunStatus(enum.StrEnum):
    """How an online run ended."""

    COMPLETED = "COMPLETED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"  # an op did not fit beside what must not be evicted at that moment
    THRASHED = "THRASHED"  # recomputation passed its limit


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run ran out of memory.

    op           name of the op that did not fit, or ``AT_START``
    asked_bytes  bytes in use if it had run
    held         what was in memory and must not be evicted: (name, bytes), largest first
    short_bytes  with an allocator: the block that could not be had in one piece
    """

    op: str
    asked_bytes: int
    held: tuple[tuple[str, int], ...]
    short_bytes: int | None = None

    def __str__(self) -> str:
        largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in self.held[:3])
        row = "" if self.short_bytes is None else f"no {self.short_bytes:,} bytes in a row can be made free; "
        if not self.held:
            return f"{row}nothing else is in memory"
        return f"{row}{len(self.held)} storages cannot be evicted now, the largest: {largest}"


@dataclass(frozen=True, repr=False)
class Run:
    """One online run.

    steps                what happened, in time order: ``op``, or ``-1 - value`` for one that left memory
    told                 time and peak bytes by the engine's own account, with which ``simulate`` has to agree
    counters             what it did, the searches for a victim among it
    failure              where it ran out of memory, if it did
    wall_s               wall time of the run
    outcome              loss, gradients and buffers of an executed run
    allocator            name of what decided whether something fits
    addresses            what the run did to the address space; None for "bytes"

    The schedule is written out, and simulated, when somebody asks for it: training loops that execute their runs do not.
    """

    graph: Graph
    budget_bytes: int
    heuristic: str
    release: Release
    reclaim: bool
    seed: int
    status: RunStatus
    steps: tuple[int, ...] = field(repr=False)
    told: tuple[int, int]
    counters: Counters
    failure: Failure | None
    wall_s: float
    step: Step | None = field(default=None, repr=False, compare=False)
    outcome: Outcome | None = field(default=None, repr=False, compare=False)
    allocator: str = "bytes"
    addresses: AddressUse | None = None
    options: frozenset[Option] = frozenset()
    thrash_limit: float = 10.0

    def __repr__(self) -> str:
        """What happened, in a line. The fields have all of it."""
        return in_a_line("Run", self, f"{self.status} with {self.rule}", self.schedule)

    @property
    def completed(self) -> bool:
        """Whether the whole graph ran."""
        return self.status is RunStatus.COMPLETED

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Every compute and free in time order; of a run that stopped, those until then."""
        return from_json(self.steps)

    @functools.cached_property
    def _simulated(self) -> tuple[int, int]:
        trace = simulate(self.graph, self.schedule)
        assert (trace.time_ns, trace.peak_bytes) == self.told, "the engine and simulate disagree"
        return trace.time_ns, trace.peak_bytes

    @property
    def time_ns(self) -> int | None:
        """Time of the schedule, from ``simulate``; None where the run did not complete."""
        return self._simulated[0] if self.completed else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the schedule, from ``simulate``; None where the run did not complete."""
        return self._simulated[1] if self.completed else None

    @property
    def is_online(self) -> bool:
        """Whether the rule could decide while running: not where it was told what will be used next."""
        return Option.NEXT_USE not in self.options

    @property
    def overhead(self) -> float | None:
        """Time / keep-all time - 1; None for a run that stopped or a graph that takes no time."""
        base, time_ns = self.graph.keep_all_time_ns, self.time_ns
        return None if time_ns is None or not base else time_ns / base - 1

    @property
    def rule(self) -> str:
        """The heuristic, with what differs from the default options behind plus signs; ``run`` takes it back."""
        parts = [self.heuristic]
        if self.allocator != default_allocator(rule(self.heuristic)):
            parts.append(self.allocator)
        if self.reclaim:
            parts.append("reclaim")
        parts += sorted(self.options)
        if self.release != Release.EAGER:
            parts.append(self.release)
        return "+".join(parts)

    def plan(self) -> Plan:
        """The recorded schedule as a Plan: FEASIBLE, or UNKNOWN where the run stopped. Nothing is proved by it.

        Its method is ``online:`` and the rule.
        """
        notes = {"status": str(self.status)} | asdict(self.counters)
        notes["metadata_accesses"] = self.counters.metadata_accesses
        if not self.is_online:
            notes["foresight"] = "next uses were known: not an online run"
        if self.failure is not None:
            notes |= {"op": self.failure.op, "asked_bytes": self.failure.asked_bytes}
        if self.addresses is not None:
            notes |= {"allocator": self.allocator} | asdict(self.addresses)
        plan = Plan.of(
            self.graph,
            self.budget_bytes,
            self.schedule if self.completed else None,
            method=f"online:{self.rule}",
            seed=self.seed,
            wall_s=self.wall_s,
            notes=notes,
        )
        return replace(plan, step=self.step)

    def row(self) -> dict[str, Any]:
        """The result row of ``plan()``."""
        return self.plan().row()


def run(
    target: Graph | Step,
    budget: int | float | str,
    *,
    heuristic: str = DEFAULT_RULE,
    allocator: str | None = None,
    release: Release | str = Release.EAGER,
    reclaim: bool = False,
    options: Collection[Option | str] = (),
    thrash_limit: float = 10.0,
    seed: int = 0,
    execute: bool = False,
    inputs: Inputs | None = None,
) -> Run:
    """Run a graph online: ops in graph order, storages evicted when the next op would not fit, rebuilt when they are read.

    budget        bytes (int, "6GiB") or a share of the keep-all peak (float in (0, 1]); counts everything the graph holds
    heuristic     a name of ``online.HEURISTICS`` or of ``online.ADDRESS_HEURISTICS``; "+reclaim", "+ignore", "+banish",
                  "+" a name of an allocator and "+" an option behind it set the next four
    allocator     a name of ``online.ALLOCATORS``: whether a storage fits is decided byte for byte ("bytes", what most rules
                  take), by PyTorch's caching allocator ("caching"), or by one arena of ``budget`` bytes ("arena", and "coop",
                  which partitions it and is what the rule "coop" takes; "_moving" behind these: the residents lie where two
                  updates by copying have put them). Blocks are multiples of 512 bytes
    release       what to do with a value after its last read: "eager" (evict it), "ignore", "banish" (free it for
                  good). What an op with an outside effect makes stays to the end, as it cannot be made again
    reclaim       evict such a value again as soon as the rebuild that needed it is done with it (not in the DTR paper)
    options       "counted": as ``reclaim``, but what the rebuild under way will read again stays; "yield": where nothing can be
                  evicted, ops that wait for a rebuild let go of what they hold, instead of a run that is out of memory;
                  "next_use": staleness is the time until the next use, for comparison: no online rule can know it;
                  "skip_small", "sample": the shortcuts of the DTR authors' prototype
    thrash_limit  stop when all runs take this many times the keep-all time, or a thousand runs per op
    seed          of the random heuristic
    execute       run the ops of a captured Step for real, on its device, under this budget; decisions go by the costs in the
                  graph, so they are those of the run that does not execute
    inputs        of the step, in the form ``capture`` was given; needed to execute

    A run that stops is returned with its status. With ``execute`` it raises BudgetExceeded or NoScheduleFound instead, before
    the op that would break the budget is run. Raises InfeasibleBudget where no schedule at all fits, InputError for what
    cannot be used.
    """
    graph = graph_of(target, "run")
    check_options({"seed": seed})
    asked = Spelled.of(heuristic, allocator, release, reclaim, options)
    evict = asked.rule
    check_thrash_limit(thrash_limit)
    step = None if isinstance(target, Graph) else target
    known = _known_of(graph)
    budget_bytes = resolve_budget(budget, known.keep_all_peak_bytes)
    if budget_bytes < known.least_bytes:
        raise infeasible(graph, budget_bytes)

    execution = None
    if execute:
        if step is None:
            raise InputError(f"{graph.name} is a graph without a model behind it: it can be run online, but not executed")
        if inputs is None:
            raise InputError(f"executing {graph.name} needs inputs=")
        from online.executor import Execution

        execution = Execution(step, inputs)
    program = known.program
    allocator = default_allocator(evict) if asked.allocator is None else asked.allocator

    def new_engine(layout: dict[int, int], driver: Driver | None = None) -> Engine:
        return Engine(
            budget_bytes,
            evict,
            seed=seed,
            release=asked.release,
            reclaim=asked.reclaim,
            options=asked.options,
            limit_ns=(thrash_limit - 1) * known.keep_all_time_ns,
            limit_runs=RUNS_PER_OP * len(graph.ops),
            allocator=new_allocator(allocator, budget_bytes, program, layout=layout),
            driver=driver,
        )

    outcome = None
    layout: dict[int, int] = {}
    start = time.perf_counter()
    with rare_collections(), execution or contextlib.nullcontext():
        for _ in range(UPDATES if allocator in ARENAS and not ARENAS[allocator].in_place else 0):
            engine = new_engine(layout)
            status, failure = play(engine, program, known.declared)
            if status is not RunStatus.COMPLETED:  # so no later step is reached
                break
            assert isinstance(engine.allocator, Arena)
            layout = engine.allocator.rewritten(sorted(graph.resident), graph.outputs)
        else:
            engine = new_engine(layout, execution)
            status, failure = play(engine, program, known.declared)
        wall_s = time.perf_counter() - start
        if execution is not None:
            if failure is not None and failure.short_bytes is not None:
                what = "what is there from the start" if failure.op == AT_START else failure.op
                raise NoScheduleFound(
                    f"{what} does not fit in {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) with the allocator "
                    f"{allocator}: {failure}; give it more memory"
                )
            if failure is not None:
                raise BudgetExceeded(failure.op, failure.asked_bytes, budget_bytes, str(failure))
            if status is not RunStatus.COMPLETED:
                raise NoScheduleFound(
                    f"online {asked.heuristic} needs more than {thrash_limit:g} times the keep-all time of {graph.name} in "
                    f"{budget_bytes:,} bytes ({format_bytes(budget_bytes)}) and was stopped; give it more memory or a higher "
                    f"thrash_limit"
                )
            outcome = execution.outcome()

    assert engine.peak_bytes <= budget_bytes, "the engine went over its budget"
    done = Run(
        graph, budget_bytes, asked.heuristic, asked.release, asked.reclaim, seed, status, tuple(engine.steps),
        (engine.clock - 1, engine.peak_bytes), engine.counters, failure, wall_s, step, outcome, allocator,
        engine.allocator.use if engine.allocator else None, asked.options, thrash_limit,
    )  # fmt: skip
    if execution is None and done.completed:
        _ = done.time_ns  # does simulate agree?
    return done


class _Known:
    """What every run of a graph asks of it.

    declared  an engine that has declared the program and runs nothing, for others to take that from
    """

    def __init__(self, graph: Graph) -> None:
        check_numbers(graph)
        self.keep_all_peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
        self.keep_all_time_ns = graph.keep_all_time_ns
        self.least_bytes = least_bytes(graph)
        self.program = program_of(graph)
        self.declared = Engine(None, HEURISTICS["lru"])
        self.declared.declare_program(self.program)


_known: dict[int, tuple[weakref.ref[Graph], _Known]] = {}  # by id: graphs are immutable, and hash as slowly as they are large


def _known_of(graph: Graph) -> _Known:
    key = id(graph)
    if key not in _known:
        _known[key] = weakref.ref(graph, lambda _: _known.pop(key)), _Known(graph)
    return _known[key][1]


def play(engine: Engine, program: Program, declared: Engine | None = None) -> tuple[RunStatus, Failure | None]:
    """Run ``program`` on a new engine (``declared``: see ``Engine.play``); how it ended."""
    try:
        engine.play(program, declared)
    except OutOfMemory as error:
        named = ((program.names[s], program.size_bytes[s]) for s in error.held)
        held = tuple(sorted(named, key=lambda entry: -entry[1]))
        name = program.calls[error.op].name if error.op >= 0 else AT_START
        return RunStatus.OUT_OF_MEMORY, Failure(name, error.asked_bytes, held, error.short_bytes)
    except Thrashed:
        return RunStatus.THRASHED, None
    return RunStatus.COMPLETED, None


def rule(heuristic: str) -> Heuristic:
    """The eviction rule of that name. Raises InputError naming those there are."""
    known = HEURISTICS | ADDRESS_HEURISTICS
    check_name("heuristic", heuristic, known)
    return known[heuristic]


@dataclass(frozen=True, slots=True)
class Spelled:
    """What is asked for by the name of a rule and what is behind it, and by arguments.

    allocator  None: what the rule takes
    """

    heuristic: str
    allocator: str | None
    release: Release
    reclaim: bool
    options: frozenset[Option]

    @property
    def rule(self) -> Heuristic:
        """How victims are chosen."""
        return rule(self.heuristic)

    @classmethod
    def of(
        cls, heuristic: object, allocator: object, release: object, reclaim: object, options: Collection[Option | str]
    ) -> Spelled:
        """As arguments of ``run``; what is behind the name of the rule counts. Raises InputError for what is none."""
        if not isinstance(heuristic, str):
            raise InputError(f"heuristic must be a name ({', '.join(HEURISTICS)}), not {quoted(heuristic)}")
        if reclaim not in (False, True):
            raise InputError(f"reclaim must be True or False, not {quoted(reclaim)}")
        reclaim = bool(reclaim)
        if isinstance(options, str) or not isinstance(options, Iterable):
            raise InputError(f"options must be names in a list ({', '.join(Option)}), not {quoted(options)}")
        heuristic, *extras = heuristic.split("+")
        names = list(options)
        for extra in extras:
            if extra == "reclaim":
                reclaim = True
            elif extra in ALLOCATORS:
                allocator = extra
            elif extra in tuple(Option):
                names.append(extra)
            elif extra in tuple(Release):
                release = extra
            else:
                known = ("reclaim", *Release, *ALLOCATORS, *Option)
                raise InputError(f"{quoted(extra)} cannot be behind {heuristic}; there are: {', '.join(known)}")
        if allocator is not None:
            check_name("allocator", allocator, ALLOCATORS)
            assert isinstance(allocator, str)
        return cls(heuristic, allocator, release_policy(release), reclaim, options_of(names, rule(heuristic)))


def rule_named(name: str) -> str:
    """A rule as its runs have it: several spellings of ``heuristic`` are one. Raises InputError for what ``run`` cannot use."""
    tiny = Graph("tiny", (Op("op", (), (0,), 1),), (Value("value", 512),), frozenset(), frozenset({0}))
    return run(tiny, 2**20, heuristic=name).rule


def options_of(names: Collection[Option | str], heuristic: Heuristic) -> frozenset[Option]:
    """The options of these names. Raises InputError naming those there are, or where the rule cannot have one."""
    for name in names:
        check_name("option", name, tuple(Option))
    options = frozenset(Option(name) for name in names)
    if Option.NEXT_USE in options and (heuristic.window or not heuristic.staleness):
        raise InputError("next_use replaces the staleness of a rule that scores storage by storage; this one has none")
    if heuristic.window and options & {Option.SAMPLE, Option.SKIP_SMALL}:
        raise InputError("a rule that evicts ranges of addresses looks at all storages; sample and skip_small are not for it")
    return options


def default_allocator(heuristic: Heuristic) -> str:
    """What a rule runs with where nothing else is asked for."""
    return "coop" if heuristic.window else "arena" if heuristic.holes else "bytes"


def check_thrash_limit(limit: float) -> None:
    """Raises InputError for what is no limit."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
        raise InputError(f"thrash_limit must be at least 1 (no recomputation at all), not {limit!r}")


def release_policy(name: object) -> Release:
    """The release policy of that name. Raises InputError naming those there are."""
    check_name("release policy", name, tuple(Release))
    return Release(str(name))
