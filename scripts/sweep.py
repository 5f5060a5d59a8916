"""Graphs x budgets x methods and rules in parallel processes: a cell each, one row a cell, to be gone on with at any time.

A cell does not depend on any other, nor on how many run beside it. What one cell knows that helps another is put into the
rows once all are there (``settle``): a plan for a smaller budget is one for a larger too, and a bound holds for online runs.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, cast

from graphs.errors import BeladyError, InputError, quoted
from graphs.ir import Graph
from online.heuristics import ADDRESS_HEURISTICS, HEURISTICS
from online.runtime import rule_named, run
from planner.bounds import least_bytes
from planner.budget import EXACT, resolve_budget
from planner.methods import METHODS
from planner.methods import method as method_named
from planner.plan import check_options, solve
from planner.result import LARGEST_NS, Plan, Status, gap_of

ONLINE = "online:"
FAILED = "FAILED"  # the cell ended in an error of ours, or its process did
REFUSED = "REFUSED"  # the method or rule cannot be used for this graph
MOST_BUDGETS = 10_000
MOST_WRITTEN = 1_000  # characters of a range
GRACE_S = 2.0  # for a process to end by itself when the work is left
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Row = dict[str, Any]
Key = tuple[str, str, int, int, str]


@dataclass(frozen=True)
class Cell:
    """One method or rule on one graph under one budget.

    method   a planning method, or an online rule behind ``online:``
    options  what else the row depends on; for the row and for ``planner.solve``
    """

    fingerprint: str
    method: str
    budget_bytes: int
    seed: int
    options: Mapping[str, Any] = field(hash=False)

    @property
    def key(self) -> Key:
        """Rows with the same key are of the same cell."""
        return self.fingerprint, self.method, self.budget_bytes, self.seed, _text(self.options)


# What every row of a sweep has, as far as anything is made of it here, in the table and in the figure.
_ENTRIES = {
    "graph": str,
    "fingerprint": str,
    "method": str,
    "budget_bytes": int,
    "budget_fraction": int | float | None,
    "seed": int,
    "options": dict,
    "status": str,
    "keep_all_time_ns": int,
    "time_ns": int | None,
    "overhead": int | float | None,
    "peak_bytes": int | None,
    "recomputed_ops": int | None,
    "bound_ns": int | None,
    "notes": dict,
}


_SHARES = "budget_fraction", "overhead"  # of sums of bytes and times


def key_of(row: Row) -> Key | None:
    """The key of the cell that a row is of; None for rows that are not from a sweep."""
    if not all(name in row and isinstance(row[name], kinds) for name, kinds in _ENTRIES.items()):
        return None
    if any(abs(row[name] or 0) > LARGEST_NS for name in _ENTRIES if name.endswith("_ns") or name in _SHARES):
        return None
    return row["fingerprint"], row["method"], row["budget_bytes"], row["seed"], _text(row["options"])


def _text(options: Mapping[str, Any]) -> str:
    """As text, the same for 60 and 60.0."""
    numbers = {name: float(v) if type(v) is int and abs(v) <= EXACT else v for name, v in options.items()}
    return json.dumps(numbers, sort_keys=True)


# What is asked for.


def budgets_of(asked: Sequence[str], keep_all_peak_bytes: int) -> list[int]:
    """Bytes of budgets, ascending, each once. Each is one for ``resolve_budget``, or a range of them, FIRST:LAST:STEP.

    A range of shares (0.2:0.9:0.05) or of bytes (2GiB:6GiB:512MiB) has its last budget in it where the steps meet it.
    Raises InputError on anything else.
    """
    found: set[int] = set()
    for text in asked:
        if ":" not in text:
            found.add(resolve_budget(text, keep_all_peak_bytes))
            continue
        parts = text.split(":")
        wanted = (
            f"budget {quoted(text)}: a range is FIRST:LAST:STEP, all shares (0.2:0.9:0.05, 20%:90%:5%) or all bytes "
            f"(2GiB:6GiB:512MiB), FIRST at most LAST and STEP above 0"
        )
        if len(parts) != 3 or len(text) > MOST_WRITTEN:
            raise InputError(wanted)
        shares = [share for share in map(_exact_share, parts) if share is not None]
        in_shares = len(shares) == len(parts)
        if in_shares:
            first, last, step = shares
        else:  # 1 is one byte here; of a graph without bytes a share is 0, so that shares among them are refused below
            first, last, step = (Fraction(part if re.fullmatch(r"[0-9]+", part) else resolve_budget(part, 0)) for part in parts)
        if not 0 < first <= last or step <= 0:
            raise InputError(wanted)
        if (last - first) / step > MOST_BUDGETS:
            raise InputError(f"budget {text!r} is more than {MOST_BUDGETS:,} budgets")
        for number in range(int((last - first) / step) + 1):
            budget = first + number * step
            found.add(resolve_budget(float(budget) if in_shares else int(budget), keep_all_peak_bytes))
    return sorted(found)


def _exact_share(text: str) -> Fraction | None:
    """A share as it is written, 0.2 or 20%; None for bytes."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text)
    share = None if match is None else Fraction(match[1]) / (100 if match[2] else 1)
    return share if share is not None and share <= 1 else None


def methods_of(asked: Sequence[str]) -> list[str]:
    """Planning methods by name, each once; ``all`` and ``none`` are names too. Raises InputError for an unknown one."""
    names = _each(asked, METHODS)
    for name in names:
        method_named(name)
    return names


def rules_of(asked: Sequence[str]) -> list[str]:
    """Online rules by name as rows have them, each once; ``all`` and ``none`` are names too. Raises InputError likewise."""
    names = map(rule_named, _each(asked, HEURISTICS | ADDRESS_HEURISTICS))  # two spellings can be one rule
    return [ONLINE + name for name in dict.fromkeys(names)]


def chosen(kind: str, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Each of the known names that are asked for once; all of them where none is. Raises InputError for an unknown one."""
    for name in asked:
        if name not in known:
            raise InputError(f"unknown {kind} {name!r}; there are: {', '.join(known)}")
    return list(dict.fromkeys(asked or known))


def _each(asked: Sequence[str], known: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys(name for word in asked if word != "none" for name in (known if word == "all" else [word])))


def cells_of(
    budgets: Mapping[str, Sequence[int]],
    methods: Sequence[str],
    rules: Sequence[str],
    *,
    gap: float,
    time_limit_s: float,
    seed: int,
) -> list[Cell]:
    """All cells, those that take longest first: planning methods, small budgets.

    budgets  for each graph (by its fingerprint), in bytes
    """
    options = {"gap": gap, "time_limit_s": time_limit_s}
    check_options({**options, "seed": seed})
    of_each = [(name, options) for name in methods] + [(name, dict[str, Any]()) for name in rules]
    return [
        Cell(fingerprint, name, budget_bytes, seed, given)
        for name, given in of_each
        for fingerprint, some in budgets.items()
        for budget_bytes in sorted(some)
    ]


# One cell.


def row_of(graph: Graph, cell: Cell) -> Row:
    """Run a cell: its row, whatever comes of it.

    The row is that of ``Plan.row`` with ``fingerprint, options, reason, notes, cpu_s``: why there is no schedule, what the
    method said, and the processor time of this process.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    try:
        plan, reason = _online(graph, cell) if cell.method.startswith(ONLINE) else _planned(graph, cell)
        row, notes = plan.row(), plan.notes
    except Exception as error:  # a cell that fails is a row that says so; the others go on
        mine = isinstance(error, BeladyError)
        reason = str(error) if mine else f"{type(error).__name__}: {error}"
        row = failed_row(graph, cell, reason, time.perf_counter() - began, status=REFUSED if mine else FAILED)
        notes = {}
    row |= {"method": cell.method, "fingerprint": cell.fingerprint, "options": dict(cell.options), "reason": reason}
    return row | {"notes": notes, "cpu_s": time.process_time() - cpu_began}


def failed_row(graph: Graph, cell: Cell, reason: str, wall_s: float, *, status: str = FAILED) -> Row:
    """The row of a cell that has no result."""
    plan = Plan.of(graph, cell.budget_bytes, None, method=cell.method, seed=cell.seed, wall_s=wall_s)
    told = {"fingerprint": cell.fingerprint, "options": dict(cell.options), "reason": reason, "notes": {}, "cpu_s": None}
    return plan.row() | {"status": status} | told


def _planned(graph: Graph, cell: Cell) -> tuple[Plan, str | None]:
    options = {**cell.options, "seed": cell.seed}
    if "workers" in inspect.signature(method_named(cell.method)).parameters:
        options["workers"] = 1  # the cells are what is parallel
    plan = solve(graph, cell.budget_bytes, method=cell.method, **options)
    if plan.status is Status.INFEASIBLE:
        return plan, str(plan.notes.get("infeasible", "proved too small"))
    if plan.status is Status.UNKNOWN:
        return plan, str(plan.notes.get("stopped") or plan.notes.get("reason") or "nothing found, nothing ruled out")
    return plan, None


def _online(graph: Graph, cell: Cell) -> tuple[Plan, str | None]:
    if cell.budget_bytes < (needed := least_bytes(graph)):
        plan = Plan.of(graph, cell.budget_bytes, None, method=cell.method, seed=cell.seed, wall_s=0.0, infeasible=True)
        return plan, f"every schedule needs at least {needed:,} bytes"
    found = run(graph, cell.budget_bytes, heuristic=cell.method.removeprefix(ONLINE), seed=cell.seed)
    if found.completed:
        return found.plan(), None
    why = f"{found.status}" + (f" at {found.failure.op}: {found.failure}" if found.failure else "")
    return found.plan(), why


# Many cells.


def work(graphs: Mapping[str, Graph], cells: Sequence[Cell], jobs: int) -> Generator[tuple[Cell, Row], None, None]:
    """Run cells in ``jobs`` processes; rows come as they are done. However it is left, no process stays behind.

    Processes are spawned, have one thread each, ignore Ctrl-C, and are replaced where they die: their cell has then FAILED.
    """
    waiting = deque(cells)
    busy: dict[Connection, tuple[SpawnProcess, Cell, float]] = {}
    idle: list[tuple[SpawnProcess, Connection]] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                process, line = idle.pop() if idle else _started(graphs)
                busy[line] = process, waiting.popleft(), time.perf_counter()
                with suppress(OSError):  # it died: the end of the line says so below
                    line.send(busy[line][1])
            for line in cast(list[Connection], wait(list(busy))):
                process, cell, began = busy[line]
                try:
                    row = line.recv()
                except (EOFError, OSError):
                    process.join()
                    reason = f"its process ended with {_exit(process.exitcode)}"
                    row = failed_row(graphs[cell.fingerprint], cell, reason, time.perf_counter() - began)
                    line.close()
                else:
                    idle.append((process, line))
                del busy[line]
                yield cell, row
    finally:
        left = [*idle, *((process, line) for line, (process, _, _) in busy.items())]
        for process, line in left:  # told to stop first: a process that finds its line closed may begin to complain
            process.terminate()
            line.close()
        for process, _ in left:
            process.join(GRACE_S)
            _kill(process)


def _started(graphs: Mapping[str, Graph]) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, dict(graphs)), daemon=True)
        try:
            start_quietly(process)
        finally:
            theirs.close()
    except OSError as error:
        raise InputError(f"cannot start one more process: {error.strerror or error}; fewer --jobs need fewer") from error
    return process, ours


def start_quietly(process: SpawnProcess) -> None:
    """Start a process with one thread and Ctrl-C blocked, which is for the parent alone.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile; the process is told to end.
    """
    resource_tracker.ensure_running()  # Python starts it with the first process, and then unblocks Ctrl-C
    before = {name: os.environ.get(name) for name in THREADS}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread may take the signal nevertheless; halfway through, the process would complain about what it is not told.
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        os.environ.update(dict.fromkeys(THREADS, "1"))
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if interrupts:
        process.terminate()
        raise KeyboardInterrupt


def _serve(line: Connection, graphs: dict[str, Graph]) -> None:
    """The life of a process: a cell comes, its row goes, until the line is closed."""
    os.setpgid(0, 0)  # ``_kill`` ends whatever it has started
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True
        signal.default_int_handler(number, frame)  # methods put their house in order when they are interrupted

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what solvers print
    try:
        signal.signal(signal.SIGTERM, end)  # within, as it may come at once
        while True:
            cell = line.recv()
            line.send(row_of(graphs[cell.fingerprint], cell))
    except (EOFError, OSError):
        pass
    except BaseException:  # in the middle of an import, an interruption comes as another error
        if not ended:
            raise
    os._exit(128 + signal.SIGTERM if ended else 0)  # without waiting for a solver that was interrupted


def _end_with_the_parent() -> None:
    """End this process, and those of its group, when the parent is killed: it is told nothing then, and nobody reads its rows."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _kill(process: SpawnProcess) -> None:
    """End a process that is still there, and those of its group."""
    with suppress(ProcessLookupError, PermissionError):
        if process.pid is not None and process.exitcode is None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
    return f"exit code {code}"


# All rows.


def settle(rows: Sequence[Row]) -> list[Row]:
    """Rows of the same cells, each cell once (the last row), with what one knows that helps another:

    - A plan for a smaller budget is also one for a larger. Where it is cheaper than what was found there, it takes its place;
      ``notes`` then have ``reused_from_budget_bytes`` and the row's ``own_time_ns`` and ``own_status``; its bound stays its own,
      that of any order where the plan has another than the graph.
    - A bound proved for a budget holds for the online runs of the same graph under the same budget or a smaller one.

    Rows that contradict each other (a schedule where none should fit, an online run that takes less than was proved) are FAILED.
    Settled rows stay as they are when they are settled again. Rows that are not from a sweep are left out.
    """
    latest = {key: row for row in rows if (key := key_of(row)) is not None}
    order = {key: number for number, key in enumerate(latest)}
    settled: dict[Key, Row] = {}
    cheapest: dict[tuple[str, str, int, str], Row] = {}
    for key, row in sorted(latest.items(), key=lambda item: item[0][2]):
        fingerprint, method, _, seed, options = key
        settled[key] = row
        if method.startswith(ONLINE) or row["status"] in (FAILED, REFUSED):
            continue
        line = fingerprint, method, seed, options
        if line in cheapest:
            settled[key] = _reused(row, cheapest[line])
        if settled[key]["time_ns"] is not None:
            cheapest[line] = settled[key]
    fits: dict[str, Row] = {}  # of each graph, the row of a schedule for the smallest budget
    for row in sorted(settled.values(), key=lambda row: (row["budget_bytes"], row["method"], row["seed"]), reverse=True):
        if row["time_ns"] is not None:
            fits[row["fingerprint"]] = row
    ground = proved(list(settled.values()))
    for key, row in settled.items():
        bound_ns, fitting = ground.get(key[0], {}).get(key[2]), fits.get(key[0])
        if row["status"] == Status.INFEASIBLE and fitting is not None and fitting["budget_bytes"] <= row["budget_bytes"]:
            reason = f"called infeasible, but {fitting['method']} fits {fitting['budget_bytes']:,} bytes: a bug in one of them"
            settled[key] = row = row | {"status": FAILED, "reason": reason}
        if key[1].startswith(ONLINE) and bound_ns is not None:
            settled[key] = row | {"bound_ns": bound_ns, "gap": gap_of(row["time_ns"], bound_ns)}
            if row["time_ns"] is not None and row["time_ns"] < bound_ns:
                reason = f"takes {row['time_ns']:,} ns, less than the {bound_ns:,} ns that are proved: a bug in one of them"
                settled[key] |= {"status": FAILED, "reason": reason}
    return [settled[key] for key in sorted(settled, key=lambda key: order[key])]


def _reused(row: Row, cheaper: Row) -> Row:
    """A row with the schedule of a smaller budget's row, where that one is cheaper."""
    time_ns = cheaper["time_ns"]
    if row["time_ns"] is not None and row["time_ns"] <= time_ns:
        return row
    if row["status"] == Status.INFEASIBLE:
        reason = f"called infeasible, but {cheaper['budget_bytes']:,} bytes are enough: a bug in {row['method']}"
        return row | {"status": FAILED, "reason": reason}
    notes = {"own_time_ns": row["time_ns"], "own_status": row["status"], **row["notes"]}
    notes["reused_from_budget_bytes"] = cheaper["notes"].get("reused_from_budget_bytes", cheaper["budget_bytes"])
    bound_ns = row["bound_ns"]
    if "order" in cheaper["notes"]:  # bounds but those of all orders hold for no other
        if "order" not in notes:
            notes["order_bound_ns"], bound_ns = bound_ns, row.get("any_order_bound_ns")
        notes["order"] = cheaper["notes"]["order"]
    elif notes.pop("order", None) is not None:
        bound_ns = notes.pop("order_bound_ns", bound_ns)
    proved_ = bound_ns is not None and 0 <= time_ns - bound_ns <= row["options"].get("gap", 0.0) * time_ns
    return row | {
        "status": str(Status.OPTIMAL if proved_ else Status.FEASIBLE),
        "reason": None,
        "bound_ns": bound_ns,
        "gap": gap_of(time_ns, bound_ns),
        **{name: cheaper[name] for name in ("time_ns", "overhead", "peak_bytes", "recomputed_ops")},
        "notes": notes,
    }


def proved(rows: Sequence[Row]) -> dict[str, dict[int, int]]:
    """For each graph (by fingerprint) and budget, the best proved bound; what holds for a budget holds for every smaller one."""
    ground: dict[str, dict[int, int]] = {}
    for row in rows:
        of_graph = ground.setdefault(row["fingerprint"], {})
        own = 0 if row["bound_ns"] is None or row["method"].startswith(ONLINE) else row["bound_ns"]
        own = max(own, row.get("notes", {}).get("order_bound_ns") or 0)  # where the plan has another order than the graph
        of_graph[row["budget_bytes"]] = max(own, of_graph.get(row["budget_bytes"], 0))
    for fingerprint, of_graph in ground.items():
        best = 0
        for budget_bytes in sorted(of_graph, reverse=True):
            best = of_graph[budget_bytes] = max(best, of_graph[budget_bytes])
        ground[fingerprint] = {budget_bytes: bound for budget_bytes, bound in of_graph.items() if bound}
    return ground


def proved_of_all(rows: Sequence[Row]) -> dict[str, dict[int, int]]:
    """``proved``, but nowhere above a plan in another order of first executions than the graph's, of which it says nothing."""
    ground = proved(rows)
    for row in rows:
        if row["time_ns"] is not None and "order" in row["notes"]:
            of_graph = ground[row["fingerprint"]]
            for budget_bytes in [b for b in of_graph if b >= row["budget_bytes"]]:
                of_graph[budget_bytes] = min(of_graph[budget_bytes], row["time_ns"])
    return ground
