"""Check and measure everything that runs on a GPU: the GPU tests, then the benchmark of planned steps and their rivals.

    python -m belady.gpu_check --out benchmarks/gpu.jsonl      (in a checkout that is not installed: python -m scripts.gpu_check)

Stops in time (``--seconds``) and says what was left out; the same command goes on from there: a row is known by device, workload,
method, share of the memory, ``--deterministic`` and, where it is of compiled code, ``--backend``. What failed is in the file of
rows in one line, and beside it (``.log``) with all it said. Without CUDA (or with ``--small``) the same at small sizes.

On CUDA the allocator gets expandable segments, unless PYTORCH_ALLOC_CONF says otherwise: without them a block above 1 MiB may
come with up to 1 MiB that nobody asked for, which no plan can foresee.

The solver may run elsewhere: ``--make-graphs DIR`` on the machine with the GPU writes the graphs with the op times measured
there, ``--make-plans DIR`` anywhere solves them, and ``--plans DIR`` takes these plans, so that no solver is needed but for
plans of as many bytes as a rival takes (``optimum=...``).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from graphs.errors import BeladyError, BudgetExceeded, GraphMismatch, InfeasibleBudget, InputError, NoScheduleFound
from graphs.ir import Graph
from graphs.serialize import load_graph, save_graph
from planner.plan import check_options, solve_halves
from planner.result import Plan, Status, load_plan
from planner.schedule import keep_all
from planner.simulate import simulate

from .output import ended, heeded
from .rows import RowFile, finished, provenance
from .steps import step_name

if TYPE_CHECKING:
    from graphs.capture import Step

    from .gpu_rivals import Bench, Trial

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
LARGE: dict[str, dict[str, int]] = {  # several GB each, a step of 0.04 to 0.15 s on an H200
    "resnet50": {"batch": 128, "size": 224},
    "vgg16": {"batch": 96, "size": 224},
    "unet": {"batch": 32, "size": 256},
    "vit": {"batch": 128},
    "bert": {"batch": 16, "seq": 512},
    "gpt2": {"batch": 8, "seq": 1024},
    "llama": {"batch": 16, "seq": 1024},
}
SMALL: dict[str, dict[str, int]] = {  # activations are still a good part of the bytes, and a step takes a second
    "resnet50": {"batch": 16, "size": 64, "depth": 14},
    "vgg16": {"batch": 8, "size": 64, "depth": 11},
    "unet": {"batch": 4, "size": 64, "depth": 2},
    "vit": {"batch": 16, "size": 96, "depth": 3},
    "bert": {"batch": 4, "seq": 128, "depth": 2, "vocab": 64},
    "gpt2": {"batch": 4, "seq": 128, "depth": 2, "vocab": 64},
    "llama": {"batch": 4, "seq": 128, "depth": 3, "vocab": 64},
}
WHOLE = ("eager", "checkpoint:1", "checkpoint:2", "checkpoint:4", "selective:1", "torch_remat:1")
PLANNED = ("optimum", "optimum+cuda_graph")
ONLINE = ("online:dtr", "online:dtr_eq", "online:lru", "online:coop")
MATCHED = {f"optimum={rival}": rival for rival in WHOLE[1:5]}  # the plan for as many bytes as that rival's measured peak
INTERPOSED = "online.budget"  # any eager model, nothing captured
COMPILED = "compile"
BOTH_COMPILED = f"optimum={COMPILED}"  # the backend "belady", for as many bytes as the least peak of any ratio
HELD_AGAINST = {**MATCHED, BOTH_COMPILED: COMPILED}
METHODS = (*WHOLE, *PLANNED, *ONLINE, *MATCHED, INTERPOSED, COMPILED, BOTH_COMPILED)
RIVALS = (*MATCHED.values(), COMPILED)
BACKED = (COMPILED, BOTH_COMPILED)  # what depends on --backend
BACKEND = "aot_eager_decomp_partition"
ENTRIES = ("graph", "device", "method", "share", "status", "reason")  # of every row
FIRST_RATIOS = (0.5, 0.25, 0.75)  # of the compiler's memory budget, measured for every workload
PLAN_S = 15.0  # solving one budget
_GPU_TEST = re.compile(r"^\s*@pytest\.mark\.gpu", re.MULTILINE)
TESTS_SHARE = 0.25  # of the time, at most, for the tests
TEST_PROCESSES = 12  # of them at once; each takes some hundred MB of the device for itself


class OutOfTime(BaseException):
    """The time for everything is over; no cell may take it for a failure of its own."""


class DeviceLost(BaseException):
    """The device does not answer any more in this process; nothing that comes now would be a failure of its own."""


@dataclass
class Guard:
    """Knows how long everything may take, and interrupts what takes longer."""

    seconds: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.begin + self.seconds - time.monotonic()

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Raise OutOfTime inside when the time is over."""
        if self.left_s <= 0:
            raise OutOfTime

        def stop(*_: object) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.left_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Cell:
    """One row to be made; ``share`` of the keep-all peak, None where the method takes no budget."""

    method: str
    share: float | None

    def __str__(self) -> str:
        return self.method if self.share is None else f"{self.method} at {self.share:g}"


def cells(methods: Sequence[str], shares: Sequence[float]) -> list[Cell]:
    """Of one workload, what matters most first; a plan held against a rival after the rival, which has to be measured, too."""
    methods = [*methods, *(HELD_AGAINST[method] for method in methods if method in HELD_AGAINST)]
    found = [Cell("eager", None)]
    found += [Cell(method, share) for share in shares for method in PLANNED if method in methods]
    found += [Cell(method, None) for method in WHOLE[1:] if method in methods]
    found += [Cell(method, share) for share in shares for method in ONLINE if method in methods]
    found += [Cell(method, None) for method in MATCHED if method in methods]
    found += [Cell(method, share) for method in (INTERPOSED, COMPILED) if method in methods for share in shares]
    return found + [Cell(BOTH_COMPILED, None)] * (BOTH_COMPILED in methods)


# Plans.


def solved(graph: Graph, budget_bytes: int, time_limit_s: float) -> Plan:
    """The plan of one budget, of whatever status. Runs in a process of its own, too. Raises KeyboardInterrupt as ``finished``."""
    return finished(solve_halves(graph, budget_bytes, gap=0.005, time_limit_s=time_limit_s))


def budget_of(graph: Graph, share: float) -> int:
    return int(share * simulate(graph, keep_all(graph)).peak_bytes)


def graph_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.graph.json"


def plan_file(folder: Path, name: str, share: float) -> Path:
    return folder / f"{name}-{share * 1000:04g}.plan.json"


def make_plans(folder: Path, shares: Sequence[float], *, names: Sequence[str], seconds: float, console: Console) -> int:
    """Solve every graph in a folder for every share; plans that are there and fit their graph stay. The exit code."""
    files = [graph_file(folder, name) for name in names if graph_file(folder, name).exists()]
    if not files:
        raise InputError(f"{folder} holds none of the graphs asked for; write them with --make-graphs first")
    for path in files:
        graph = load_graph(path)
        name = path.name.removesuffix(".graph.json")
        for share in shares:
            target = plan_file(folder, name, share)
            if target.exists() and _fits(target, graph, share):
                continue
            plan = solved(graph, budget_of(graph, share), seconds)
            plan.save(target)
            overhead = "-" if plan.overhead is None else f"{plan.overhead:.2%}"
            console.print(f"{name:<36} {share:>4g} {plan.status!s:<10} {overhead:>8} {plan.wall_s:6.1f} s")
    return 0


def _made(path: Path, graph: Graph | Step, budget_bytes: int) -> Plan:
    """A plan in a folder. Raises GraphMismatch where it was made for something else, or its search was interrupted."""
    plan = load_plan(path, graph)
    if plan.budget_bytes != budget_bytes:
        raise GraphMismatch(f"{path} was made for {plan.budget_bytes:,} bytes, not for {budget_bytes:,}")
    if plan.interrupted:
        raise GraphMismatch(f"{path} is the best until its search was interrupted; make it again with --make-plans")
    return plan


def _fits(path: Path, graph: Graph, share: float) -> bool:
    try:
        _made(path, graph, budget_of(graph, share))
    except GraphMismatch:
        return False
    return True


class Plans:
    """The plans of one captured step: read from a folder, or solved here, in other processes while the first cells run."""

    def __init__(
        self, step: Step, name: str, shares: Sequence[float], *, folder: Path | None, pool: ProcessPoolExecutor | None
    ) -> None:
        self._step, self._name, self._folder, self._pool = step, name, folder, pool
        self._made: dict[int, Plan] = {}
        self._coming: dict[int, Future[Plan]] = {}
        if folder is None:
            for share in shares:
                self.ask(budget_of(step.graph, share))

    def ask(self, budget_bytes: int) -> None:
        """This plan will be wanted."""
        if self._pool is not None and budget_bytes not in self._coming:
            with contextlib.suppress(BrokenProcessPool):
                self._coming[budget_bytes] = self._pool.submit(solved, self._step.graph, budget_bytes, PLAN_S)

    def __getitem__(self, share: float) -> Plan:
        budget_bytes = budget_of(self._step.graph, share)
        if self._folder is not None and budget_bytes not in self._made:
            plan = _made(plan_file(self._folder, self._name, share), self._step, budget_bytes)
            self._made[budget_bytes] = replace(plan, step=self._step)
        return self.of_bytes(budget_bytes)

    def of_bytes(self, budget_bytes: int) -> Plan:
        """Solved here, whatever is in the folder."""
        if budget_bytes not in self._made:
            self._made[budget_bytes] = replace(self._solved(budget_bytes), step=self._step)
        return self._made[budget_bytes]

    def _solved(self, budget_bytes: int) -> Plan:
        if budget_bytes in self._coming:
            with contextlib.suppress(BrokenProcessPool):  # a solver was ended, for lack of memory perhaps, and the others with it
                return self._coming[budget_bytes].result()
        return solved(self._step.graph, budget_bytes, PLAN_S)


# The benchmark.


def captured(name: str, sizes: dict[str, int], device: str, folder: Path | None) -> tuple[Step, Any]:
    """The step of a workload and its inputs; op times measured on a GPU, modelled on a CPU, or those in a folder's graph."""
    from graphs.capture import capture
    from graphs.workloads import build
    from planner.plan import with_costs

    model, inputs, loss = build(name, device=device, **dict[str, Any](sizes))
    step = capture(model, inputs, loss=loss, name=step_name(name, sizes))
    if folder is None:
        # Without a bar of its own: there is one already, and a terminal shows one at a time.
        return with_costs(step, "measured" if device == "cuda" else "roofline", progress=lambda done, total: None), inputs
    path = graph_file(folder, step.graph.name)
    costed = load_graph(path)
    if len(costed.ops) == len(step.graph.ops):
        times, spaces = ([getattr(op, cost) for op in costed.ops] for cost in ("time_ns", "workspace_bytes"))
        own = step.with_costs(times, spaces, costs=costed.costs)
        if own.graph.fingerprint() == costed.fingerprint():
            return own, inputs
    raise GraphMismatch(f"{path} was made for another graph than {step.graph.name} has here: other versions or device")


class Workload:
    """The cells of one workload, run one by one."""

    def __init__(
        self,
        name: str,
        step: Step,
        bench: Bench,
        plans: Plans,
        *,
        backend: str,
        ratios: int,
        steps: int,
        matched: set[str],
        rivals: dict[str, int],
        left_s: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._name, self._step, self._bench, self._plans = name, step, bench, plans
        self._matched = matched  # rivals that a plan is to be held against
        self._rivals: dict[str, int] = {}  # their measured peaks
        for rival, peak_bytes in rivals.items():
            self._measured_rival(rival, peak_bytes)
        self._backend, self._ratios, self._steps = backend, ratios, steps
        self._left_s, self._log = left_s, log
        self._compiling_s = 0.0  # the longest
        self._compiled: dict[float, Trial] = {}  # by ratio
        self._peaks: dict[float, int] = {}  # by share: where the plan's measured peak was

    def row(self, cell: Cell) -> dict[str, Any]:
        """Run one cell; what goes wrong in it is in the row."""
        begin = time.perf_counter()
        graph = self._step.graph
        nothing = Plan.of(graph, 0, None, method=cell.method, wall_s=0.0).row()
        row = {**nothing, "budget_bytes": None, "budget_fraction": None, "share": cell.share}
        row |= {"fingerprint": graph.fingerprint(), "reason": None, "measured_eager_time_ns": self._bench.plain.time_ns}
        row["measured_eager_peak_bytes"] = self._bench.plain.peak_bytes
        if cell.method in BACKED:
            row["measured_backend"] = self._backend
        try:
            row |= self._run(cell)
        except InfeasibleBudget as error:
            row |= {"status": "INFEASIBLE", "reason": str(error)}
        except ModuleNotFoundError as error:
            row |= {"status": "UNAVAILABLE", "reason": str(error)}
        except Exception as error:  # of any rival's code or the device's; one cell must not cost the others
            row |= {"status": "FAILED", "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:500]}
            self._log(f"{graph.name}: {cell}\n{traceback.format_exc()}")
        row["wall_s"] = time.perf_counter() - begin
        return row

    def costs_nothing(self, cell: Cell) -> bool:
        """Whether there is an answer to a cell from what was measured for others."""
        return cell.method == COMPILED and bool(self._compiled)

    def _run(self, cell: Cell) -> dict[str, Any]:
        kind, _, option = cell.method.partition(":")
        if cell.method == "eager":
            return self._measured(self._bench.plain)
        if kind in ("checkpoint", "selective", "torch_remat"):
            trial = self._bench.checkpointed(self._name, int(option), kind)
            self._measured_rival(cell.method, trial.peak_bytes)
            return self._measured(trial)
        rival = HELD_AGAINST.get(cell.method)
        if rival is not None:
            if rival not in self._rivals:
                return {"status": "UNAVAILABLE", "reason": f"{rival} has no measured peak"}
            if rival == COMPILED:
                return self._both_compiled(self._rivals[rival])
            return self._planned(self._plans.of_bytes(self._rivals[rival]))
        assert cell.share is not None
        if cell.method in PLANNED:
            if cell.method != "optimum" and self._step.device.type != "cuda":
                return {"status": "UNAVAILABLE", "reason": "CUDA graphs need a CUDA device"}
            return self._planned(self._plans[cell.share], cell.share, cuda_graph=cell.method != "optimum")
        if kind == "online":
            return self._online(cell.share, option)
        if cell.method == INTERPOSED:
            return self._interposed(cell.share)
        return self._compile(cell.share)

    def _measured_rival(self, rival: str, peak_bytes: int) -> None:
        self._rivals[rival] = peak_bytes
        if rival in self._matched:
            self._plans.ask(peak_bytes)

    def _planned(self, plan: Plan, share: float | None = None, *, cuda_graph: bool = False) -> dict[str, Any]:
        row = {k: v for k, v in plan.row().items() if k not in ("method", "measured_time_ns", "measured_peak_bytes")}
        if plan.schedule is None:
            return {**row, "reason": str(plan.notes.get("infeasible") or plan.notes.get("stopped") or "no schedule found")}
        trial = self._bench.planned(plan, cuda_graph=cuda_graph)
        if not cuda_graph:
            if share is not None:
                self._peaks[share] = trial.peak_bytes
            if self._steps:
                row |= {"training_steps": self._steps, "max_loss_error": self._bench.loss_error(plan, self._steps)}
        return {**row, **self._measured(trial), "status": str(plan.status)}

    def _online(self, share: float, rule: str) -> dict[str, Any]:
        from online.runtime import run

        budget_bytes = budget_of(self._step.graph, share)
        done = run(self._step, budget_bytes, heuristic=rule)
        row = {k: v for k, v in done.row().items() if k not in ("method", "measured_time_ns", "measured_peak_bytes")}
        row["measured_search_ns"] = round(done.counters.search_s * 1e9)
        if not done.completed:
            return {**row, "reason": f"{done.status}: {done.failure or 'recomputed too much'}"}
        return {**row, **self._measured(self._bench.online(budget_bytes, rule)), "status": str(Status.FEASIBLE)}

    def _interposed(self, share: float) -> dict[str, Any]:
        budget_bytes = budget_of(self._step.graph, share)
        row: dict[str, Any] = {"budget_bytes": budget_bytes}
        try:
            trial, done = self._bench.interposed(budget_bytes)
        except (BudgetExceeded, NoScheduleFound) as error:
            return {**row, "status": str(Status.UNKNOWN), "reason": f"{type(error).__name__}: {error}"}
        row |= {"peak_bytes": done.peak_bytes, "recomputed_ops": done.counters.recomputations}
        row["measured_search_ns"] = round(done.counters.search_s * 1e9)
        return {**row, **self._measured(trial), "status": str(Status.FEASIBLE)}

    def _compile(self, share: float) -> dict[str, Any]:
        """The fastest ratio whose measured peak is at most the plan's: some all over, then bisected where peaks cross it.

        Up to 1 where all of them are low enough, and down to 0 where none is. Peaks are not monotone in the ratio, so everything
        measured for any budget counts.
        """
        target = self._peaks.get(share, budget_of(self._step.graph, share))
        row: dict[str, Any] = {"budget_bytes": target, "measured_target_bytes": target}
        for ratio in FIRST_RATIOS[: self._ratios]:
            if self._compiled and self._left_s() < self._compiling_s:
                break
            self._ratio(ratio)
        for _ in range(self._ratios - len(FIRST_RATIOS)):
            if self._left_s() < self._compiling_s:
                break
            low = {0.0: True, 1.0: False} | {ratio: trial.peak_bytes <= target for ratio, trial in self._compiled.items()}
            crossing = [(a, b) for a, b in itertools.pairwise(sorted(low)) if low[a] != low[b]]
            self._ratio(sum(crossing[-1]) / 2)  # the highest ratio recomputes least
        sweep = sorted((ratio, trial.peak_bytes, trial.time_ns) for ratio, trial in self._compiled.items())
        row["measured_sweep"] = sweep
        self._measured_rival(COMPILED, min(peak for _, peak, _ in sweep))
        fitting = [ratio for ratio, peak, _ in sweep if peak <= target]
        if not fitting:
            return {**row, "status": "UNKNOWN", "reason": "no ratio tried has a measured peak that low"}
        ratio = min(fitting, key=lambda r: self._compiled[r].time_ns)
        random = any(op.random for op in self._step.graph.ops)
        told = "random ops are drawn anew, so gradients cannot be compared" if random else None
        return {**row, **self._measured(self._compiled[ratio]), "measured_ratio": ratio, "reason": told}

    def _both_compiled(self, budget_bytes: int) -> dict[str, Any]:
        """What the compiler captures may have other ops than plain PyTorch runs, so plans for that are held against it, too."""
        from planner.compile_backend import belady

        options: dict[str, Any] = {"budget": budget_bytes, "gap": 0.005, "time_limit_s": PLAN_S}
        if self._backend == "inductor":
            options["kernels"] = "inductor"
        with heeded():
            trial = self._bench.compiled(belady, options)
        return {"budget_bytes": budget_bytes, **self._measured(trial)}

    def _ratio(self, ratio: float) -> Trial:
        from graphs.torch_private.partitioned import activation_memory_budget

        if ratio not in self._compiled:
            begin = time.monotonic()
            with activation_memory_budget(ratio):
                self._compiled[ratio] = self._bench.compiled(self._backend)
            self._compiling_s = max(self._compiling_s, time.monotonic() - begin)
        return self._compiled[ratio]

    def _measured(self, trial: Trial) -> dict[str, Any]:
        return {
            "status": "MEASURED",
            "measured_time_ns": trial.time_ns,
            "measured_peak_bytes": trial.peak_bytes,
            "measured_reserved_bytes": trial.reserved_bytes,
            "measured_overhead": trial.time_ns / self._bench.plain.time_ns - 1,
            "max_grad_error": trial.grad_error,
            "max_buffer_error": trial.buffer_error,
        }


def run_tests(folder: Path, limit_s: float, log: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The GPU tests of a folder in a process of their own; a row. What they say goes to ``log`` where not all pass."""
    folder = folder.resolve()  # they run in another one
    files = sorted(str(path) for path in folder.glob("test_*.py") if _GPU_TEST.search(path.read_text(encoding="utf-8")))
    row: dict[str, Any] = {"graph": None, "method": "tests", "share": None, "reason": None, "files": len(files)}
    if not files:
        return {**row, "status": "UNAVAILABLE", "reason": f"no GPU tests in {folder}"}
    begin = time.perf_counter()
    # What drivers and libraries of this machine warn of is no failure of a test.
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", *files]
    processes = min(TEST_PROCESSES, os.cpu_count() or 1)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:  # most of the time goes into captures, on one core each
        command += ["-n", str(processes)]
    with subprocess.Popen(
        command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            said, errors = process.communicate(timeout=limit_s)
        except BaseException as error:  # Ctrl-C too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own processes would go on beside what is measured next
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            log(error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout))
            return {**row, "status": "UNKNOWN", "reason": f"stopped after {limit_s:.0f} s", "wall_s": time.perf_counter() - begin}
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", last)}
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.returncode not in (0, 1, 5) and not failed:
        failed = [line for line in errors.splitlines() if line.strip()][-1:]
    code = process.returncode
    status = "PASSED" if code == 0 and counts.get("passed") else "SKIPPED" if code in (0, 5) else "FAILED"
    reason = "; ".join(failed)[:2000] or None
    if status != "PASSED":
        log(f"{said}\n{errors}")
    return {**row, "status": status, "tests": counts, "reason": reason, "wall_s": time.perf_counter() - begin}


def answers(device: str) -> bool:
    """Whether the device still does what it is told: after some failures (an illegal address) it never does in this process."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def settings(device: str) -> dict[str, Any]:
    """What decides about speed beside versions."""
    import torch

    found: dict[str, Any] = {"measured_threads": torch.get_num_threads()}
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        found["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    return found


@dataclass
class Session:
    """One run of the command.

    left_out  cells that were not run, by workload
    failed    cells that failed
    lost      whether the device stopped answering
    others    versions of torch that rows in the file were made with beside this one, and how many
    """

    file: RowFile
    guard: Guard
    device: str
    console: Console
    arguments: argparse.Namespace
    left_out: dict[str, list[Cell]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    lost: bool = False

    def __post_init__(self) -> None:
        self._name, self._settings = device_name(self.device), settings(self.device)
        self._settings["deterministic"] = self.arguments.deterministic
        rows = [row for row in self.file.rows if self._is_alike(row)]
        retry = ("FAILED", "UNAVAILABLE", "UNKNOWN") if self.arguments.retry else ()
        done = [r for r in rows if r["status"] not in retry and (r["method"], r["status"]) != ("tests", "UNKNOWN")]
        self._done = {(r["graph"], r["method"], r["share"]) for r in done}
        self.others = Counter(row["versions"].get("torch") for row in done if "versions" in row)
        del self.others[provenance()["versions"].get("torch")]
        self._peaks = {(r["graph"], r["method"]): r["measured_peak_bytes"] for r in rows if r["status"] == "MEASURED"}
        for row in rows:
            if sweep := row.get("measured_sweep"):
                self._peaks[row["graph"], COMPILED] = min(peak for _, peak, _ in sweep)

    def _is_alike(self, row: dict[str, Any]) -> bool:
        """Whether a row was made as those of this run are; older rows do not say what was the default."""
        same = row["device"] == self._name and row.get("deterministic", False) == self.arguments.deterministic
        return same and (row["method"] not in BACKED or row.get("measured_backend", BACKEND) == self.arguments.backend)

    def add(self, row: dict[str, Any]) -> None:
        if row["status"] == "FAILED":
            self.failed.append(f"{row['graph'] or 'tests'}, {row['method']}: {row['reason']}")
        self.file.append({**row, "device": self._name, **self._settings})

    def tests(self, folder: Path) -> None:
        if (None, "tests", None) not in self._done:
            row = run_tests(folder, TESTS_SHARE * self.guard.seconds, self.log)
            self.add(row)
            if row["status"] == "UNKNOWN":  # stopped
                self.left_out["GPU tests"] = [Cell("tests", None)]

    def log(self, text: str) -> None:
        """What a row is too short for."""
        with Path(f"{self.arguments.out}.log").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def missing(self, name: str) -> list[Cell]:
        """Cells of a workload with no row yet. A missing row of plain PyTorch is made with the others."""
        wanted = cells(self.arguments.method, self.arguments.budget)
        return [cell for cell in wanted if (name, cell.method, cell.share) not in self._done]

    def workload(
        self, name: str, sizes: dict[str, int], limit_s: float, pool: ProcessPoolExecutor | None, tick: Callable[[str], None]
    ) -> None:
        """Run what is missing of one workload, as far as ``limit_s`` goes."""
        import torch

        from .gpu_rivals import Bench

        begin = time.monotonic()
        graph_name = step_name(name, sizes)
        todo = self.missing(graph_name)
        at = 0
        try:
            with self.guard.limit():
                tick("capture")
                if self.arguments.deterministic:
                    # Only a warning where the loss has no such kernel; attention does not choose one for a mere warning.
                    torch.use_deterministic_algorithms(True, warn_only=name == "unet")
                folder = Path(self.arguments.plans) if self.arguments.plans else None
                step, inputs = captured(name, sizes, self.device, folder)
                tick("eager")
                bench = Bench(step, inputs, repeats=self.arguments.repeats)  # everything is held against it: no solver runs yet
                plans = Plans(step, graph_name, self.arguments.budget, folder=folder, pool=pool)
                work = Workload(
                    name,
                    step,
                    bench,
                    plans,
                    backend=self.arguments.backend,
                    ratios=self.arguments.ratios,
                    steps=self.arguments.steps,
                    matched={MATCHED[cell.method] for cell in todo if cell.method in MATCHED},
                    rivals={m: peak for (graph, m), peak in self._peaks.items() if graph == graph_name and m in RIVALS},
                    left_s=lambda: limit_s - (time.monotonic() - begin),
                    log=self.log,
                )
                longest_s = 0.0
                while at < len(todo):
                    spent_s = time.monotonic() - begin
                    if spent_s + longest_s > limit_s and at and not work.costs_nothing(todo[at]):
                        break
                    tick(str(todo[at]))
                    row = work.row(todo[at])
                    longest_s = max(longest_s, time.monotonic() - begin - spent_s)
                    self.add(row)
                    at += 1
                    if row["status"] == "FAILED" and not answers(self.device):
                        raise DeviceLost
        except OutOfTime:
            pass
        except DeviceLost:
            self.lost = True
        except Exception as error:  # no step or no memory for plain PyTorch, so no cells; the other workloads may have
            reason = str(error) if isinstance(error, BeladyError) else f"{type(error).__name__}: {error}".partition("\n")[0][:500]
            self.add({"graph": graph_name, "method": "capture", "share": None, "status": "FAILED", "reason": reason})
            self.log(f"{graph_name}: capture\n{traceback.format_exc()}")
            self.lost = not answers(self.device)
        if at < len(todo):
            self.left_out[graph_name] = todo[at:]


def run_all(session: Session, sizes: dict[str, dict[str, int]], tests: Path | None) -> None:
    """Tests, then the workloads, each with its part of the time that is left."""
    arguments, console = session.arguments, session.console
    todo = {name: chosen for name, chosen in sizes.items() if session.missing(step_name(name, chosen))}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal, transient=True))
        bar = progress.add_task("tests", total=len(todo))
        if tests is not None:
            session.tests(tests)
        pool = None
        if session.device == "cuda" and not arguments.plans and todo:
            pool = stack.enter_context(contextlib.closing(_Pool(min(len(arguments.budget), (os.cpu_count() or 2) - 1)))).pool
        for at, (name, chosen) in enumerate(todo.items()):
            if session.guard.left_s <= 0 or session.lost:
                session.left_out[step_name(name, chosen)] = session.missing(step_name(name, chosen))
                continue
            limit_s = session.guard.left_s / (len(todo) - at)
            session.workload(name, chosen, limit_s, pool, functools.partial(_tell, progress, bar, name))
            progress.advance(bar)
            _forget(session.device)


def _tell(progress: Progress, bar: TaskID, name: str, what: str) -> None:
    progress.update(bar, description=f"{name}: {what}")


class _Pool:
    """Solver processes that leave the processor to what is measured, and are not waited for at the end."""

    def __init__(self, count: int) -> None:
        self.pool = ProcessPoolExecutor(max(1, count), mp_context=get_context("spawn"), initializer=os.nice, initargs=(10,))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 all rows there, 1 tests or cells failed, 3 rows left out for lack of time."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    return ended("gpu_check", lambda: _main(arguments, console), goes_on=not arguments.make_graphs)


def _main(arguments: argparse.Namespace, console: Console) -> int:
    import torch

    arguments.budget = arguments.budget or list(SHARES)
    arguments.method = arguments.method or list(METHODS)
    device = "cpu" if arguments.small or not torch.cuda.is_available() else "cuda"
    known = SMALL if device == "cpu" and not arguments.large else LARGE
    sizes = {name: known[name] for name in arguments.only or known}
    arguments.repeats = arguments.repeats or (3 if device == "cuda" else 1)
    if arguments.steps is None:
        arguments.steps = 0 if device == "cuda" else 10
    if device == "cuda" and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read when the first memory is asked for
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would be timed
    if arguments.make_graphs:
        folder = Path(arguments.make_graphs)
        folder.mkdir(parents=True, exist_ok=True)
        for name, chosen in sizes.items():
            step, _ = captured(name, chosen, device, None)
            save_graph(step.graph, graph_file(folder, step.graph.name))
            console.print(f"{step.graph.name}: {len(step.graph.ops)} ops")
    if arguments.make_plans:
        names = [step_name(name, s[name]) for s in (SMALL, LARGE) for name in arguments.only or s]
        return make_plans(
            Path(arguments.make_plans), arguments.budget, names=names, seconds=arguments.plan_seconds, console=console
        )
    if arguments.make_graphs:
        return 0
    file = RowFile(arguments.out, ENTRIES)
    try:
        session = Session(file, Guard(arguments.seconds), device, console, arguments)
        for version, count in session.others.items():
            console.print(f"{count} rows in {arguments.out} are of torch {version} and are not made again", highlight=False)
        run_all(session, sizes, arguments.tests)
    finally:
        file.close()
    for line in session.failed:
        console.print(f"failed: {line}", highlight=False, markup=False)
    why = "because the device stopped answering" if session.lost else "for lack of time"
    for name, rest in session.left_out.items():
        console.print(f"left out {why}: {name}: {', '.join(map(str, rest))}", highlight=False, markup=False)
    if session.left_out:
        console.print(f"{sum(map(len, session.left_out.values()))} cells left out; the same command goes on with them")
    return 1 if session.failed else 3 if session.left_out else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", default="benchmarks/gpu.jsonl", help="rows are added to this file (default: %(default)s)")
    add("--seconds", type=_seconds, default=510.0, help="for everything (default: %(default)g)")
    add("--only", action="append", choices=list(LARGE), help="one workload; several times")
    add("--method", action="append", choices=METHODS, help="one method, beside plain PyTorch; several times")
    add("--budget", action="append", type=_share, metavar="SHARE", help="of the keep-all peak; several times")
    add("--repeats", type=_some, help="timed steps a cell (default: 3, on a CPU 1)")
    add(
        "--steps",
        type=_whole,
        help="training steps with each plan, losses held against plain PyTorch's (default: 0, on a CPU 10)",
    )
    add(
        "--backend",
        default=BACKEND,
        help="of torch.compile, and of its plans if inductor (default: %(default)s)",
    )
    add(
        "--ratios",
        type=_some,
        default=5,
        help="of torch.compile's memory budget, tried for each budget (default: %(default)s)",
    )
    add("--small", action="store_true", help="small sizes on the CPU, even where there is a GPU")
    add("--large", action="store_true", help="the sizes for a GPU, even on a CPU")
    add("--deterministic", action="store_true", help="kernels that give the same bits in every run, where there are any")
    own = Path(__file__).resolve().parents[1] / "tests"  # not there where the scripts are installed
    add("--tests", type=_folder, default=own if own.is_dir() else None, help="folder of the GPU tests; empty: none")
    add("--retry", action="store_true", help="run cells again that failed, that nothing was found for, or something was missing")
    add("--plans", metavar="DIR", help="take graphs and plans from there instead of measuring and solving")
    add("--make-graphs", metavar="DIR", help="only write the graphs there, with op times of this device")
    add("--make-plans", metavar="DIR", help="only solve the graphs there (with --make-graphs: after writing them)")
    add("--plan-seconds", type=_seconds, default=60.0, help="for each plan of --make-plans (default: %(default)g)")
    return parser


def _folder(text: str) -> Path | None:
    if text and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text) if text else None


def _whole(text: str, least: int = 0) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _some(text: str) -> int:
    return _whole(text, 1)


def _seconds(text: str) -> float:
    try:
        check_options({"time_limit_s": float(text)})
    except ValueError as error:  # InputError is one
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 10,000,000") from error
    return float(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the memory above 0 and up to 1")
    return share


if __name__ == "__main__":
    sys.exit(main())
