"""What a planner returns: a Plan says which schedule was found and exactly what was proved about it."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphs.errors import BudgetExceeded, GraphMismatch, InputError, InvalidSchedule, quoted, shortened
from graphs.files import read_json, read_text, write_whole
from graphs.ir import Graph
from planner.budget import share_of
from planner.schedule import Schedule, computes, from_json, keep_all, to_json
from planner.simulate import simulate

if TYPE_CHECKING:
    from graphs.capture import Step
    from planner.execute import PlannedModule

SCHEMA = "belady-plan-1"
OTHER_ORDER = "first executions are not in graph order"  # what notes["order"] begins with
LARGEST_NS = 2**100  # more than re-runs can come to; a float takes it, as budgets may be beyond all floats

log = logging.getLogger("belady")


class Status(enum.StrEnum):
    """What a planner can say about a budget."""

    OPTIMAL = "OPTIMAL"  # a schedule, proved within the asked gap
    FEASIBLE = "FEASIBLE"  # a schedule, no such proof
    INFEASIBLE = "INFEASIBLE"  # proved: no schedule fits
    UNKNOWN = "UNKNOWN"  # stopped with nothing found and nothing ruled out


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule under a budget, and what was proved.

    graph                the graph it is for
    budget_bytes         every moment of the schedule fits in this
    status               see Status
    schedule             None where none was found
    time_ns, peak_bytes  of the schedule, from ``simulate``; None without one
    bound_ns             no schedule with the graph's order of first executions takes less (None: nothing proved)
    restricted_bound_ns  the same for fewer schedules (None where nothing beyond ``bound_ns`` was proved): for a schedule in
                         another order of first executions those with that order, else Checkmate's space, where between two
                         first executions every op runs again at most once, in graph order
    any_order_bound_ns   no schedule takes less, in whatever order of first executions; no more than ``bound_ns`` (None: nobody
                         has looked)
    method, seed         what found it
    wall_s               how long that took, without compiling, which happens once on a machine
    step                 the captured step, where the graph came from a model
    notes                what the method wants said: events, rounds, limits
    """

    graph: Graph
    budget_bytes: int
    status: Status
    schedule: Schedule | None
    time_ns: int | None
    peak_bytes: int | None
    bound_ns: int | None
    method: str
    seed: int
    wall_s: float
    restricted_bound_ns: int | None = None
    any_order_bound_ns: int | None = None
    step: Step | None = field(default=None, repr=False, compare=False)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: Graph,
        budget_bytes: int,
        schedule: Schedule | None,
        *,
        method: str,
        seed: int = 0,
        wall_s: float,
        bound_ns: int | None = None,
        restricted_bound_ns: int | None = None,
        any_order_bound_ns: int | None = None,
        gap: float = 0.0,
        infeasible: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> Plan:
        """Build a Plan whose time and peak come from ``simulate`` and whose status follows from the numbers.

        gap         asked relative gap: OPTIMAL where (time - bound) / time is at most this; the restricted bound proves nothing
                    about schedules outside of its space, so it does not count
        infeasible  the method proved that no schedule fits; only without a schedule

        Raises AssertionError where the schedule exceeds the budget or beats its bound: a bug in the method.
        """
        time_ns = peak_bytes = None
        if schedule is None:
            status = Status.INFEASIBLE if infeasible else Status.UNKNOWN
        else:
            trace = simulate(graph, schedule)
            time_ns, peak_bytes = trace.time_ns, trace.peak_bytes
            assert not infeasible, f"{method} found a schedule for a budget it proved infeasible"
            assert peak_bytes <= budget_bytes, f"{method}: peak {peak_bytes} above the budget {budget_bytes}"
            for proved_ns in (bound_ns, any_order_bound_ns):
                assert proved_ns is None or proved_ns <= time_ns, f"{method}: bound {proved_ns} above the time {time_ns} found"
            proved = bound_ns is not None and time_ns - bound_ns <= gap * time_ns
            status = Status.OPTIMAL if proved else Status.FEASIBLE
        return cls(
            graph, budget_bytes, status, schedule, time_ns, peak_bytes, bound_ns, method, seed, wall_s,
            restricted_bound_ns, any_order_bound_ns, notes=notes or {},
        )  # fmt: skip

    def __repr__(self) -> str:
        """What was found and proved, in a line. The fields have all of it."""
        proved = None if self.gap is None else f"proved within {self.gap:.2%}"
        return in_a_line("Plan", self, f"{self.status} by {self.method}", self.schedule, *([proved] if proved else []))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search, so that this is the best until then."""
        return self.notes.get("stopped") == "interrupted"

    @property
    def overhead(self) -> float | None:
        """Time / keep-all time - 1; None without a schedule or where the graph takes no time."""
        base = self.graph.keep_all_time_ns
        return None if self.time_ns is None or not base else self.time_ns / base - 1

    @property
    def gap(self) -> float | None:
        """(time - bound) / time; None where either is unknown."""
        return gap_of(self.time_ns, self.bound_ns)

    @property
    def any_order_gap(self) -> float | None:
        """(time - bound) / time with the bound of all orders; None where either is unknown."""
        return gap_of(self.time_ns, self.any_order_bound_ns)

    def row(self) -> dict[str, Any]:
        """The result row (see README): what is unknown is None."""
        trace = simulate(self.graph, self.schedule) if self.schedule is not None else None
        whole = simulate(self.graph, keep_all(self.graph)).peak_bytes
        return {
            "graph": self.graph.name,
            "method": self.method,
            "seed": self.seed,
            "budget_bytes": self.budget_bytes,
            "budget_fraction": share_of(self.budget_bytes, whole),
            "status": str(self.status),
            "time_ns": self.time_ns,
            "keep_all_time_ns": self.graph.keep_all_time_ns,
            "overhead": self.overhead,
            "bound_ns": self.bound_ns,
            "restricted_bound_ns": self.restricted_bound_ns,
            "any_order_bound_ns": self.any_order_bound_ns,
            "gap": self.gap,
            "peak_bytes": self.peak_bytes,
            "recomputed_ops": trace.recomputed_ops if trace else None,
            "wall_s": self.wall_s,
            "device": self.graph.device or None,
            "costs": self.graph.costs or None,
            "measured_time_ns": None,
            "measured_peak_bytes": None,
            "max_grad_error": None,
        }

    def module(self, *, cuda_graph: bool = False, replan: bool | Mapping[str, Any] = False) -> PlannedModule:
        """An ``nn.Module`` that trains with this plan. Needs a captured model and a schedule.

        A plan whose notes have ``halves`` runs as one piece only (``planner.execute.PlannedStep``). For that this raises
        BudgetExceeded, or InvalidSchedule where its order is the reason, and says how many bytes are known to be enough.

        replan      plan again, for the same bytes, when inputs of other shapes come, with these options of ``planner.plan`` (see
                    ``planner.execution.replan.ReplanningModule``); otherwise they are refused
        cuda_graph  capture the step once and replay it, so that ops cost no host time (see
                    ``planner.execution.cuda_graph.GraphedModule``)
        """
        if self.step is None:
            raise InputError(f"the plan for {self.graph.name} has no captured model behind it, so there is nothing to train")
        if self.schedule is None:
            raise InputError(f"no schedule was found for {self.graph.name} in {self.budget_bytes:,} bytes: nothing to run")
        self.step.check_runs()
        try:
            return self._module(self.step, self.schedule, cuda_graph=cuda_graph, replan=replan)
        except (BudgetExceeded, InvalidSchedule) as error:
            if "halves" not in self.notes:
                raise
            why = f"this plan {self.notes['halves']}"
            if isinstance(error, InvalidSchedule):
                raise InvalidSchedule(f"{error}: {why}") from None
            raise BudgetExceeded(error.op, error.asked_bytes, error.budget_bytes, why) from None

    def _module(self, step: Step, schedule: Schedule, *, cuda_graph: bool, replan: bool | Mapping[str, Any]) -> PlannedModule:
        if not isinstance(replan, bool | Mapping):
            raise InputError(f"replan must be True, False or a dict of options for plan, not {replan!r}")
        if replan is not False:
            if cuda_graph:
                raise InputError("replan and cuda_graph exclude each other: every shape would keep memory of its own")
            from planner.execution.replan import ReplanningModule

            return ReplanningModule(self, {} if replan is True else replan)
        if cuda_graph:
            from planner.execution.cuda_graph import GraphedModule

            return GraphedModule(step, schedule, self.budget_bytes)
        from planner.execute import PlannedModule

        return PlannedModule(step, schedule, self.budget_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; of the graph only its fingerprint, what its ops cost, and figures for people are in it."""
        write_whole(path, self.to_text())

    def to_text(self) -> str:
        """What ``save`` writes."""
        row = self.row()
        content = {
            "schema": SCHEMA,
            "graph": self.graph.name,
            "fingerprint": self.graph.fingerprint(),
            "budget_bytes": self.budget_bytes,
            "status": str(self.status),
            "bound_ns": self.bound_ns,
            "restricted_bound_ns": self.restricted_bound_ns,
            "any_order_bound_ns": self.any_order_bound_ns,
            "method": self.method,
            "seed": self.seed,
            "wall_s": self.wall_s,
            "notes": self.notes,
            "figures": {key: row[key] for key in _FIGURES},
            "op_costs": {
                "costs": self.graph.costs,
                "time_ns": [op.time_ns for op in self.graph.ops],
                "workspace_bytes": [op.workspace_bytes for op in self.graph.ops],
            },
            "schedule": None if self.schedule is None else to_json(self.schedule),
        }
        return json.dumps(content) + "\n"


def gap_of(time_ns: int | None, bound_ns: int | None) -> float | None:
    """(time - bound) / time, 0 where both are nothing; None where either is unknown."""
    if time_ns is None or bound_ns is None:
        return None
    return max(0.0, (time_ns - bound_ns) / time_ns) if time_ns else 0.0


def in_a_line(kind: str, found: Any, how: str, schedule: Schedule | None, *more: str) -> str:
    """A Plan or a Run for people: graph, budget, how it ended, and what its schedule costs where there is one."""
    parts = [f"{found.graph.name} in {found.budget_bytes:,} bytes", how]
    if found.peak_bytes is not None and schedule is not None:
        parts += [] if found.overhead is None else [f"overhead {found.overhead:.2%}"]
        again = sum(1 for _ in computes(schedule)) - len(found.graph.ops)
        parts += [f"peak {found.peak_bytes:,} bytes", f"{again:,} ops recomputed"]
    return f"{kind}({', '.join([*parts, *more])})"


def load_plan(path: str | os.PathLike[str], graph: Graph | Step) -> Plan:
    """Read a plan for ``graph``; time and peak are simulated anew. A step that was captured and has no costs yet gets those that
    the plan was made with; where they are of another device, one line says so (logger "belady", level WARNING).

    Raises GraphMismatch where the plan was made for another graph, InputError where the file is damaged or ``graph`` is none.
    """
    from planner.plan import captured, is_priced, priced  # here, since that imports this file

    step = None if isinstance(graph, Graph) else captured(graph, "load_plan")
    content = read_json(path, schema=SCHEMA)
    with _told_as_damage(path):
        costs = _costs_in(content)
        if step is not None:
            if not is_priced(step):
                step = step.with_costs(**costs) if costs and len(costs["time_ns"]) == len(step.calls) else priced(step)
            graph = step.graph
        assert isinstance(graph, Graph)
        made_on = _device_in(content)
        if content["fingerprint"] != graph.fingerprint():
            raise _mismatch(path, content, costs, made_on, graph)
        plan = _read(content, graph)
    if made_on and graph.device and made_on != graph.device:
        log.warning("%s was planned with op times of %s; on %s its overhead may be another", path, made_on, graph.device)
    return replace(plan, step=step)


def _mismatch(
    path: str | os.PathLike[str], content: dict[str, Any], costs: dict[str, Any] | None, made_on: str | None, graph: Graph
) -> GraphMismatch:
    what = "other shapes, costs or device; plan again"
    if costs is not None:
        alike = len(costs["time_ns"]) == len(graph.ops) and graph.with_costs(**costs).fingerprint() == content["fingerprint"]
        then, now = (", ".join(filter(None, words)) for words in ((costs["costs"], made_on), (graph.costs, graph.device)))
        again = f"the same ops had other costs ({then}) than now ({now}); plan again, or load it for a step without costs"
        what = again if alike else "other shapes or device; plan again"
    return GraphMismatch(
        f"{path} was made for the graph {quoted(content['graph'])} ({shortened(str(content['fingerprint']))}), not for "
        f"{quoted(graph.name)} ({graph.fingerprint()}): {what}"
    )


def _device_in(content: dict[str, Any]) -> str | None:
    """What a plan's costs are of; its figures are for people, so that nothing else is asked of them."""
    figures = content.get("figures")
    device = figures.get("device") if isinstance(figures, dict) else None
    return device if isinstance(device, str) else None


def _costs_in(content: dict[str, Any]) -> dict[str, Any] | None:
    """What the ops of a saved plan's graph cost, as ``with_costs`` takes it; None in older files."""
    costs = content.get("op_costs")
    if costs is None:
        return None
    if not isinstance(costs, dict) or set(costs) != {"costs", "time_ns", "workspace_bytes"}:
        raise TypeError(f"its entry 'op_costs' is {quoted(costs)}")
    times, spaces = costs["time_ns"], costs["workspace_bytes"]
    lists = isinstance(times, list) and isinstance(spaces, list) and len(times) == len(spaces)
    if not lists or not isinstance(costs["costs"], str) or any(type(n) is not int or n < 0 for n in (*times, *spaces)):
        raise TypeError(f"its entry 'op_costs' is {quoted(costs)}")
    return costs


def is_saved_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as ``Plan.save`` writes it, in whatever version. Raises InputError where it cannot be read."""
    return re.match(rf'\s*{{\s*"schema"\s*:\s*"{SCHEMA.rstrip(string.digits)}\d+"', read_text(path)) is not None


def saved_row(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved plan says of itself without its graph, which is not in the file: its result row, with ``ops``,
    ``fingerprint`` and ``notes``. Nothing is simulated; what the file does not have is None.

    Raises InputError where the file is damaged or holds no plan.
    """
    content = read_json(path, schema=SCHEMA)
    with _told_as_damage(path):
        _, schedule = _checked(content)
        _check_kinds(content, {"graph": str, "fingerprint": str})
        figures = content.get("figures", dict.fromkeys(_FIGURES))  # older files have none
        if not isinstance(figures, dict):
            raise TypeError(f"its entry 'figures' is {quoted(figures)}")
        figures = {"costs": None, **figures}  # older files have none
        _check_kinds(figures, _FIGURES)
    # Every op runs at least once.
    ops = None if schedule is None else len(set(computes(schedule)))
    told = {key: content[key] for key in ("graph", "fingerprint", *_ENTRIES) if key != "schedule"}
    return told | {"ops": ops} | {key: figures[key] for key in _FIGURES}


@contextmanager
def _told_as_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Tell what is wrong with the content of a file as an InputError that names it."""
    try:
        yield
    except GraphMismatch:
        raise
    except KeyError as error:
        raise InputError(f"{path} is damaged: it has no entry {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _check_kinds(entries: dict[str, Any], kinds: Mapping[str, Any]) -> None:
    for key, kind in kinds.items():
        entry = entries[key]
        right = isinstance(entry, kind) and not isinstance(entry, bool)
        if right and isinstance(entry, int | float) and key.endswith(("_bytes", "_ns", "_s")):
            right = entry >= 0 and not (key.endswith("_ns") and entry > LARGEST_NS)
        if not right:
            raise TypeError(f"its entry {key!r} is {quoted(entry)}")


def _checked(content: dict[str, Any]) -> tuple[Status, Schedule | None]:
    """Status and schedule in a file, with everything checked that can be without the graph."""
    content.setdefault("any_order_bound_ns", None)  # older files have none
    _check_kinds(content, _ENTRIES)
    if content["status"] not in list(Status):
        raise ValueError(f"{quoted(content['status'])} is not a valid Status")
    status, schedule = Status(content["status"]), content["schedule"]
    if (schedule is None) != (status in (Status.INFEASIBLE, Status.UNKNOWN)):
        raise ValueError(f"status {status} {'without' if schedule is None else 'with'} a schedule")
    if status is Status.OPTIMAL and content["bound_ns"] is None:
        raise ValueError(f"status {status} without a bound")
    return status, None if schedule is None else from_json(schedule)


def _read(content: dict[str, Any], graph: Graph) -> Plan:
    """The plan in a file, with everything checked that can be; raises KeyError, TypeError or ValueError."""
    status, schedule = _checked(content)
    trace = None if schedule is None else simulate(graph, schedule)
    if trace is not None and trace.peak_bytes > content["budget_bytes"]:
        raise ValueError(f"its schedule needs {trace.peak_bytes:,} bytes, more than its budget")
    for proved_ns in (content["bound_ns"], content["any_order_bound_ns"]):
        if trace is not None and proved_ns is not None and proved_ns > trace.time_ns:
            raise ValueError(f"its bound of {proved_ns:,} ns is above its time of {trace.time_ns:,} ns")
    if (content["any_order_bound_ns"] or 0) > (content["bound_ns"] or LARGEST_NS):
        raise ValueError("its bound for any order is above that for its own")
    return Plan(
        graph, content["budget_bytes"], status, schedule, trace.time_ns if trace else None,
        trace.peak_bytes if trace else None, content["bound_ns"], content["method"], content["seed"], content["wall_s"],
        content["restricted_bound_ns"], content["any_order_bound_ns"], notes=content["notes"],
    )  # fmt: skip


_ENTRIES = {
    "budget_bytes": int,
    "status": str,
    "bound_ns": int | None,
    "restricted_bound_ns": int | None,
    "any_order_bound_ns": int | None,
    "method": str,
    "seed": int,
    "wall_s": int | float,
    "notes": dict,
    "schedule": list | None,
}

# Of a result row, what the graph is needed for: for people, since ``load_plan`` simulates anew.
_FIGURES = {
    "device": str | None,
    "costs": str | None,
    "budget_fraction": int | float | None,
    "keep_all_time_ns": int | None,
    "time_ns": int | None,
    "overhead": int | float | None,
    "gap": int | float | None,
    "peak_bytes": int | None,
    "recomputed_ops": int | None,
}
