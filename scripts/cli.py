"""The command ``belady``: what recomputation really has to cost, from the shell.

Exit codes: 0 done; 2 bad input, a budget proved too small among it; 3 no schedule found though none was ruled out, or a cell of a
sweep failed; 130 interrupted; 141 nobody reads standard output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from graphs.collection import SIZES, WORKLOADS, chosen, is_own
from graphs.errors import BeladyError, InfeasibleBudget, InputError, NoScheduleFound
from graphs.files import check_writable
from graphs.ir import Graph
from graphs.serialize import save_graph, to_text
from online.heuristics import ADDRESS_HEURISTICS, DEFAULT_RULE, HEURISTICS
from planner.budget import format_bytes, is_share, resolve_budget
from planner.live import line_of, on_terminal, smallest_line
from planner.methods import METHODS
from planner.plan import (
    COSTS,
    check_numbers,
    check_options,
    checked_method,
    copied_bytes_of,
    infeasible,
    solve_halves,
    with_costs,
)
from planner.result import Plan, Status, is_saved_plan, load_plan, saved_row
from planner.schedule import keep_all
from planner.simulate import simulate
from planner.solvers.milp import solving

from .entry import INTERRUPTED
from .output import OutputLost, computing, progress_bar, standard_output
from .rows import RowFile, check_row_file, make_folder, provenance, read_rows, write_rows
from .steps import step_name

if TYPE_CHECKING:
    from graphs.capture import Step
    from online.compare import Comparison
    from online.runtime import Run
    from online.trial import Trial, Trials

OF_MODELS = (*SIZES, "device", "costs")  # options that a graph from a file has no use for
WRITTEN = ("json", "out", "plot", "save_graph")  # options that name a file
RULES = ", ".join((*HEURISTICS, *ADDRESS_HEURISTICS))
STDOUT = "- is standard output (then no table)"
DONE, BAD_INPUT, NOTHING_FOUND, PIPE_CLOSED = 0, 2, 3, 141
WAY_OUT_S, WAY_OUT_SHARE = 2.0, 0.01  # to find a budget in which an online run completes; to within this share
PLAN_FACTS = (
    "graph", "device", "ops", "fingerprint", "method", "seed", "status", "budget_bytes", "budget_fraction", "time_ns",
    "keep_all_time_ns", "overhead", "bound_ns", "restricted_bound_ns", "gap", "peak_bytes", "recomputed_ops", "wall_s",
)  # fmt: skip

EXAMPLES = """\
examples:
  belady workloads                                   the models that come with the program
  belady info gpt2                                   ops, bytes, peak, smallest budgets
  belady info resnet50 --min-budget 30               how small a budget can be, with a proof
  belady info graph.json                             a saved graph, an operator log, a Checkmate instance
  belady plan resnet50 --budget 0.5 --out plan.json  the optimal schedule for half the memory, with its proof
  belady info plan.json                              what a saved plan costs, and what is proved of it
  belady run resnet50 --budget 0.5 --heuristic dtr   the same graph, decided online
  belady diff resnet50 --budget 0.7 --budget 0.5 --execute --plot overhead.png
  belady diff train.py:make_step --budget 6GiB       your own: a function returning model, inputs, loss
  belady sweep gpt2 model.log --budget 0.3:0.9:0.1 --rule dtr --jobs 2 --out rows.jsonl

Budgets are bytes (6442450944, 6GiB) or a share of the keep-all peak (0.5, 50%). They count everything
the step holds: parameters, inputs, gradients, activations and workspace.

Exit codes: 0 done; 2 bad input or a budget proved too small; 3 nothing found, nothing ruled out, or a cell
of a sweep failed; 130 interrupted, what was found is written; 141 nobody reads standard output any more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    if sys.stderr is None:  # closed: nobody reads it, and no file may take its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    code = _main(argv)
    if argv is None and solving():  # the process is ours: do not wait for a solver that was interrupted
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    try:
        with standard_output():
            arguments = parser().parse_args(argv)
            _check_targets(arguments)
            _check_asked(arguments)
            return int(arguments.run(arguments))
    except OutputLost as error:
        if isinstance(error.__cause__, BrokenPipeError):  # whoever read it has read enough
            return PIPE_CLOSED
        print(f"belady: {error}", file=sys.stderr)
        return BAD_INPUT
    except NoScheduleFound as error:
        print(f"belady: {error}", file=sys.stderr)
        return NOTHING_FOUND
    except BeladyError as error:
        print(f"belady: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("belady: interrupted", file=sys.stderr)
        return INTERRUPTED


def _check_targets(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be written, two results in one file, and pictures of no kind, before anything is computed."""
    options: dict[str, str] = {}  # by the file they write to
    asked = getattr(arguments, "workload", None) or []
    read = [*([asked] if isinstance(asked, str) else asked), *filter(None, [getattr(arguments, "plan", None)])]
    sources = {os.path.realpath(path) for name in read for path in (name, name.rpartition(":")[0]) if os.path.isfile(path)}
    for target in WRITTEN:
        if path := getattr(arguments, target, None):
            option = "--" + target.replace("_", "-")
            if target == "out" and arguments.run is _sweep:
                check_row_file(path)
            if path == "-":
                if target == "plot":
                    raise InputError("--plot needs a file: no picture goes to standard output (-)")
                if (other := options.setdefault(path, option)) != option:
                    raise InputError(f"{other} and {option} both name standard output (-): only one can have it")
                continue
            check_writable(path)
            if os.path.realpath(path) in sources:
                raise InputError(f"{option} names {path}, which is read: it would be overwritten")
            other = options.setdefault(os.path.realpath(path), option)
            if other != option and (not os.path.exists(path) or os.path.isfile(path)):  # a device takes both
                raise InputError(f"{other} and {option} name the same file, {path}: one would take the place of the other")
    if getattr(arguments, "plot", None):
        from .plots import writable

        writable(arguments.plot)


def _check_asked(arguments: argparse.Namespace) -> None:
    """Refuse budgets, methods, rules and options that cannot be used, before a model is built and captured."""
    asked = vars(arguments)
    if asked.get("retry") and not asked["out"]:
        raise InputError("--retry makes rows of a file again whose cell failed; name that file with --out")
    if arguments.run is _sweep or "budget" not in asked:  # a sweep knows ranges, and all and none
        return
    for budget in [asked["budget"]] if isinstance(asked["budget"], str) else asked["budget"]:
        is_share(budget)
    if "method" in asked:
        options = {"gap": asked["gap"], "time_limit_s": asked["time_limit"], "seed": asked["seed"]}
        checked_method(asked["method"], options | ({"any_order": True} if asked.get("any_order") else {}))
    if rules := asked.get("heuristic"):
        from .sweep import rule_named

        for rule in [rules] if isinstance(rules, str) else rules:
            rule_named(rule)


def parser() -> argparse.ArgumentParser:
    """The command line, one subcommand each."""
    top = argparse.ArgumentParser(
        prog="belady",
        description="What recomputation really has to cost: the optimal schedule of a training step under a memory\n"
        "budget, an online run of the same graph under the same bytes, and the difference.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show the program's version and those of what it runs on")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = _command(commands, "diff", _diff, "compare the optimum with online rules under the same budgets")
    _target(command)
    _budget(command, several=True)
    command.add_argument(
        "--heuristic",
        action="append",
        metavar="RULE",
        help=f"online rule: {RULES}; +reclaim evicts rebuilt dead values at once (dtr+reclaim); may be given several times "
        f"(default: {DEFAULT_RULE})",
    )
    command.add_argument(
        "--split",
        action="store_true",
        help="for --json: split what an online rule loses, as the text does: foresight_ns (time it would save if it knew when "
        "each value is used next), fragmentation_ns (time that a budget of one range of addresses costs it beyond the same "
        "bytes), search_s (seconds spent choosing what to evict). Runs each rule twice more",
    )
    _solver(command)
    command.add_argument("--execute", action="store_true", help="also train one step each way and measure time, peak, gradients")
    command.add_argument(
        "--plot", metavar="FILE", type=_file, help="draw overhead against budget, and memory over time (.png, .svg, .pdf)"
    )
    _json(command)

    command = _command(commands, "plan", _plan, "find the optimal schedule for a budget")
    _target(command)
    _budget(command)
    _solver(command)
    command.add_argument(
        "--any-order",
        action="store_true",
        help="try other orders of first executions too (cutting_stages; annealing always does)",
    )
    command.add_argument("--execute", action="store_true", help="also train one step with the plan and measure it")
    command.add_argument("--out", metavar="FILE", type=_file, help=f"save the plan as JSON (belady info reads it); {STDOUT}")
    _json(command)

    command = _command(commands, "run", _run, "run an online rule under a budget")
    _target(command)
    _budget(command)
    command.add_argument(
        "--heuristic",
        default=DEFAULT_RULE,
        metavar="RULE",
        help=f"online rule: {RULES}; +reclaim evicts rebuilt dead values at once (dtr+reclaim) (default: {DEFAULT_RULE})",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    command.add_argument("--execute", action="store_true", help="run on real tensors and measure")
    command.add_argument("--out", metavar="FILE", type=_file, help=f"save the recorded schedule as a plan; {STDOUT}")
    _json(command)

    command = _command(
        commands, "sweep", _sweep, "all graphs under all budgets with all methods and rules, in parallel; may be interrupted"
    )
    _target(command, several=True)
    command.add_argument(
        "--budget",
        action="append",
        required=True,
        help="bytes (6GiB), share of the keep-all peak (0.5), or a range of either (0.2:0.9:0.05); may be given several times",
    )
    command.add_argument(
        "--rule",
        action="append",
        metavar="RULE",
        help=f"online rule, such as dtr, lru, dtr+reclaim; all; none (default: {DEFAULT_RULE})",
    )
    _solver(command, several=True)
    command.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, of one thread each (default: 1)")
    command.add_argument(
        "--out",
        metavar="FILE",
        type=_file,
        help="add each row to this file as soon as it is there; rows that are in it already are not made again",
    )
    command.add_argument("--retry", action="store_true", help="make those rows of --out again whose cell failed")
    command.add_argument(
        "--plot", metavar="FILE", type=_file, help="draw overhead against budget, a panel for each graph (.png, .svg, .pdf)"
    )
    _json(command)

    command = _command(commands, "workloads", _workloads, "list the models that come with the program")
    _json(command)

    command = _command(commands, "info", _info, "ops, bytes, peak and smallest budgets of a graph, or what a saved plan says")
    _target(command, plans=True)
    command.add_argument(
        "--plan", metavar="FILE", type=_file, help="check this saved plan against the graph, and say what it costs there"
    )
    command.add_argument("--save-graph", metavar="FILE", type=_file, help=f"write the graph as JSON; {STDOUT}")
    command.add_argument(
        "--min-budget", metavar="SECONDS", type=_seconds, help="search for the smallest budget and its proof for at most so long"
    )
    _json(command)
    return top


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help_text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text + ".")
    command.set_defaults(run=run)
    return command


def _target(command: argparse.ArgumentParser, *, several: bool = False, plans: bool = False) -> None:
    command.add_argument(
        "workload",
        metavar="WORKLOAD",
        nargs="+" if several else None,
        help="name (see belady workloads), which may have sizes (gpt2-depth24-seq64), path.py:function, or a graph file (.json, "
        ".log, .log.gz)" + ", or a saved plan (.json)" * plans,
    )
    group = command.add_argument_group("the training step")
    group.add_argument("--batch", type=int, help="batch size")
    group.add_argument("--seq", type=int, help="sequence length, where the model has one")
    group.add_argument("--depth", type=int, help="layers, where the model can be made deeper")
    group.add_argument("--size", type=int, help="side of the image in pixels, where there is one")
    group.add_argument("--vocab", type=int, help="tokens in the vocabulary, where there is one")
    group.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    group.add_argument(
        "--costs",
        choices=COSTS,
        help="op times: roofline (modelled), measured (each distinct op timed, with its workspace; cached) or auto (default): "
        "measured on CUDA, else roofline",
    )


class _Version(argparse.Action):
    """Versions as result rows have them, and the commit of a checkout."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        found = provenance()
        versions = dict(found["versions"])
        commit = f" (commit {found['commit']})" if found["commit"] else ""
        print(f"belady {versions.pop('belady', 'unknown')}{commit}; {', '.join(map(' '.join, versions.items()))}")
        parser.exit()


class _Once(argparse.Action):
    """An option that has one value: given twice, it is refused."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "may be given only once")
        setattr(namespace, self.dest, values)


def _file(name: str) -> str:
    if not name:
        raise argparse.ArgumentTypeError("a file name cannot be empty")
    return name


def _seconds(text: str) -> float:
    try:
        check_options({"time_limit_s": float(text)})
    except ValueError as error:  # InputError is one
        raise argparse.ArgumentTypeError(f"seconds must be a number from 0 to 10,000,000, not {text!r}") from error
    return float(text)


def _budget(command: argparse.ArgumentParser, *, several: bool = False) -> None:
    command.add_argument(
        "--budget",
        action="append" if several else _Once,
        required=True,
        help="bytes (6GiB) or share of the keep-all peak (0.5)" + ("; may be given several times" if several else ""),
    )


def _solver(command: argparse.ArgumentParser, *, several: bool = False) -> None:
    group = command.add_argument_group("solving")
    if several:
        group.add_argument("--method", action="append", help="planning method; all; none (default: cutting_stages)")
    else:
        group.add_argument(
            "--method", default="cutting_stages", help=f"planning method (default: cutting_stages); {', '.join(METHODS)}"
        )
    group.add_argument(
        "--gap", type=float, default=0.005, help="stop when proved within this share of the optimum (default: 0.005)"
    )
    group.add_argument("--time-limit", type=_seconds, default=60.0, metavar="S", help="seconds for each budget (default: 60)")
    group.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", type=_file, help=f"write result rows as JSON lines; {STDOUT}")


def _is_graph_file(name: str) -> bool:
    return name.endswith((".json", ".json.gz", ".log", ".log.gz"))


def _is_plan_file(name: str) -> bool:
    return name.endswith((".json", ".json.gz")) and is_saved_plan(name)


class Loaded:
    """What a WORKLOAD argument stands for: a Step with its inputs, or a Graph from a file."""

    def __init__(self, arguments: argparse.Namespace, status: Callable[[str], None]) -> None:
        name: str = arguments.workload
        self.step: Step | None = None
        self.inputs: Any = None
        if _is_graph_file(name):
            from graphs.importers import load

            for option in OF_MODELS:
                if getattr(arguments, option) is not None:
                    raise InputError(f"--{option} has no meaning for the graph file {name}")
            if _is_plan_file(name):
                raise InputError(f"{name} is a saved plan, not a graph; belady info {name} tells what it says")
            status(f"reading {name}")
            self.graph: Graph = load(name)
            check_numbers(self.graph)
            return
        sizes = {size: getattr(arguments, size) for size in SIZES}
        if not is_own(name):
            chosen(name, **sizes)  # before torch is loaded, which takes seconds
        status(f"building {name}")
        from graphs.capture import capture
        from graphs.workloads import load_workload

        try:
            model, self.inputs, loss = load_workload(name, device=arguments.device, **sizes)
        except SystemExit as error:  # raised by the user's function
            raise InputError(f"{name} called sys.exit({error.code!r})") from error
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            raise InputError(f"{name} cannot be built: {str(error).strip().partition(chr(10))[0] or 'out of memory'}") from error
        status(f"capturing {name}")
        step = capture(model, self.inputs, loss=loss, name=step_name(Path(name).stem if ":" in name else name, sizes))
        costs = "auto" if arguments.costs is None else arguments.costs
        status(f"pricing {len(step.graph.ops)} ops ({costs})")
        self.step = with_costs(step, costs, progress=lambda done, total: status(f"timing distinct ops: {done} of {total}"))
        self.graph = self.step.graph

    @property
    def target(self) -> Step | Graph:
        """The Step where there is one, else the Graph."""
        return self.graph if self.step is None else self.step

    def executable(self) -> Step:
        """The Step. Raises InputError for a graph file."""
        if self.step is None:
            raise InputError(f"{self.graph.name} is a graph without a model behind it: it can be planned, but not executed")
        return self.step


def _diff(arguments: argparse.Namespace) -> int:
    from online.compare import compare

    with computing() as status:
        loaded = Loaded(arguments, status)
        if arguments.execute:
            loaded.executable()
        comparison = compare(
            loaded.target,
            arguments.budget,
            heuristics=arguments.heuristic or [DEFAULT_RULE],
            method=arguments.method,
            gap=arguments.gap,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            execute=arguments.execute,
            inputs=loaded.inputs,
            splits=arguments.split,
            progress=status,
        )
        if arguments.plot:
            from .plots import draw_comparison

            status("drawing")
            draw_comparison(comparison, arguments.plot)
    if _has_table(arguments):  # before anything is written, which may fail
        _print_comparison(comparison)
    if arguments.json:
        write_rows(arguments.json, comparison.rows())
    _tell_written(arguments, "rows", arguments.json)
    _tell_written(arguments, "picture", arguments.plot)
    statuses = {block.plan.status for block in comparison.blocks}
    for block in comparison.blocks:
        if block.plan.status is Status.INFEASIBLE:
            print(f"belady: {_too_small(block.plan, None, arguments.time_limit - block.plan.wall_s)}", file=sys.stderr)
        for stopped in (run for run in block.runs if not run.completed):
            print(f"belady: {_unfinished(stopped)}", file=sys.stderr)
        _tell_halves(block.plan.budget_bytes, block.plan.notes)
    if comparison.interrupted:
        return _interrupted()
    return BAD_INPUT if Status.INFEASIBLE in statuses else NOTHING_FOUND if Status.UNKNOWN in statuses else DONE


def _plan(arguments: argparse.Namespace) -> int:
    with computing() as status:
        loaded = Loaded(arguments, status)
        if arguments.execute:
            loaded.executable()
        graph = loaded.graph
        budget_bytes = resolve_budget(arguments.budget, simulate(graph, keep_all(graph)).peak_bytes)
        copied_bytes = copied_bytes_of(loaded.target)
        plan = solve_halves(
            graph,
            budget_bytes,
            copied_bytes=copied_bytes,
            method=arguments.method,
            gap=arguments.gap,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            progress=line_of(f"{arguments.method} in {format_bytes(budget_bytes)}", graph, status),
            **({"any_order": True} if arguments.any_order else {}),
        )
        row = plan.row()
        interrupted = plan.notes.get("stopped") == "interrupted"
        unwritten: list[InputError] = []
        _save(plan, arguments.out, unwritten)
        if plan.schedule is not None and arguments.execute and "halves" not in plan.notes and not interrupted:
            status("executing")
            measured = _measured(loaded, arguments.seed, lambda trials: trials.planned(replace(plan, step=loaded.step)))
            interrupted = measured is None
            row |= measured or {}
    _tell_found(arguments, plan, row, unwritten)
    _tell_halves(plan.budget_bytes, plan.notes)
    if unwritten:
        raise unwritten[0]
    return _interrupted() if interrupted else _outcome(plan, copied_bytes, arguments.time_limit - plan.wall_s)


@contextmanager
def _told_later(unwritten: list[InputError]) -> Iterator[None]:
    """Note that a file could not be written, and go on: what was found is printed first."""
    try:
        yield
    except InputError as error:
        unwritten.append(error)


def _save(plan: Plan, path: str | None, unwritten: list[InputError]) -> None:
    """Save a plan that has a schedule; before it is executed, which may fail."""
    if plan.schedule is not None and path and path != "-":
        with _told_later(unwritten):
            make_folder(path)
            plan.save(path)


def _tell_found(arguments: argparse.Namespace, plan: Plan, row: dict[str, Any], unwritten: list[InputError]) -> None:
    """Print the row of a plan, and write what is asked for; a file that cannot be written does not keep from printing."""
    if _has_table(arguments):
        _print_rows(plan.graph, [row])
    if plan.schedule is not None and not unwritten:
        if arguments.out == "-":
            sys.stdout.write(plan.to_text())
        _tell_written(arguments, "plan", arguments.out)
    with _told_later(unwritten):
        if arguments.json:
            write_rows(arguments.json, [row])
            _tell_written(arguments, "rows", arguments.json)


def _has_table(arguments: argparse.Namespace) -> bool:
    """Whether standard output is for people, and not for what an option sends there."""
    return all(getattr(arguments, target, None) != "-" for target in WRITTEN)


def _tell_written(arguments: argparse.Namespace, what: str, path: str | None) -> None:
    """Say, where standard output is for people, what was written to a file, if anything was."""
    if path and _has_table(arguments):
        print(f"{what} written to {path}")


def _measured(loaded: Loaded, seed: int, trial: Callable[[Trials], Trial]) -> dict[str, Any] | None:
    """The measured entries of a result row; None where Ctrl-C came."""
    from online.trial import Trials

    try:
        return trial(Trials(loaded.executable(), loaded.inputs, seed=seed)).row()
    except KeyboardInterrupt:
        return None


def _interrupted() -> int:
    print("belady: interrupted; this is what was found until then", file=sys.stderr)
    return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    from online.runtime import run

    with computing() as status:
        loaded = Loaded(arguments, status)
        if arguments.execute:
            loaded.executable()
        graph = loaded.graph
        budget_bytes = resolve_budget(arguments.budget, simulate(graph, keep_all(graph)).peak_bytes)
        status(f"online {arguments.heuristic} in {format_bytes(budget_bytes)}")
        found = run(graph, budget_bytes, heuristic=arguments.heuristic, seed=arguments.seed)
        plan = found.plan()
        row = plan.row()
        interrupted = False
        unwritten: list[InputError] = []
        _save(plan, arguments.out, unwritten)
        if found.completed and arguments.execute:
            status("executing")
            measured = _measured(loaded, arguments.seed, lambda trials: trials.online(budget_bytes, arguments.heuristic))
            interrupted = measured is None
            row |= measured or {}
        if not found.completed:
            status("looking for a budget in which it completes")
            enough_bytes = _enough(found)
    _tell_found(arguments, plan, row, unwritten)
    if unwritten:
        raise unwritten[0]
    if not found.completed:
        raise NoScheduleFound(f"{_unfinished(found)}; {_way_out(enough_bytes)}")
    return _interrupted() if interrupted else DONE


def _enough(stopped: Run) -> int | None:
    """A budget in which the rule of a run that stopped completes, little above the smallest such; None where none was found."""
    from online.runtime import run

    def completes(budget_bytes: int) -> bool:
        return run(stopped.graph, budget_bytes, heuristic=stopped.rule, seed=stopped.seed).completed

    enough, missed = None, stopped.budget_bytes
    whole, deadline = simulate(stopped.graph, keep_all(stopped.graph)).peak_bytes, time.perf_counter() + WAY_OUT_S
    with suppress(KeyboardInterrupt):
        if missed < whole and completes(whole):
            enough = whole
            while enough - missed > max(1, WAY_OUT_SHARE * enough) and time.perf_counter() < deadline:
                middle = (enough + missed) // 2
                if completes(middle):
                    enough = middle
                else:
                    missed = middle
    return enough


def _way_out(enough_bytes: int | None) -> str:
    """What helps where an online run stopped."""
    larger = "a larger --budget"
    if enough_bytes is not None:
        larger = f"--budget {enough_bytes} ({format_bytes(enough_bytes)}), which is enough for it,"
    return f"try {larger} or belady plan for these bytes; belady info --min-budget tells the least that any schedule needs"


def _unfinished(run: Run) -> str:
    """Why an online run stopped."""
    why = f"ran out of memory at {run.failure.op}: {run.failure}" if run.failure else "recomputed without end"
    return f"online {run.rule} in {run.budget_bytes:,} bytes ({format_bytes(run.budget_bytes)}) {why}"


def _sweep(arguments: argparse.Namespace) -> int:
    from . import sweep

    if arguments.jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {arguments.jobs}")
    methods = sweep.methods_of(arguments.method or ["cutting_stages"])
    rules = sweep.rules_of(arguments.rule or [DEFAULT_RULE])
    sweep.budgets_of(arguments.budget, 1)  # what cannot be used is refused before a model is built
    check_options({"gap": arguments.gap, "seed": arguments.seed})
    graphs: dict[str, Graph] = {}
    budgets: dict[str, list[int]] = {}
    with computing() as status:
        mixed = not all(map(_is_graph_file, arguments.workload))
        for name in arguments.workload:
            of_models = dict.fromkeys(OF_MODELS) if mixed and _is_graph_file(name) else {}
            graph = Loaded(argparse.Namespace(**{**vars(arguments), "workload": name, **of_models}), status).graph
            fingerprint = graph.fingerprint()
            graphs[fingerprint] = graph
            budgets[fingerprint] = sweep.budgets_of(arguments.budget, simulate(graph, keep_all(graph)).peak_bytes)
    cells = sweep.cells_of(budgets, methods, rules, gap=arguments.gap, time_limit_s=arguments.time_limit, seed=arguments.seed)
    if not cells:
        raise InputError("there is nothing to do: --method none and --rule none")
    file = RowFile(arguments.out) if arguments.out else None
    if file is not None and file.repaired:
        print(f"belady: the last line of {file.path} was not whole and is cut off", file=sys.stderr)
    found = list(file.rows) if file is not None else []
    made = {sweep.key_of(row) for row in found if not (arguments.retry and row.get("status") == sweep.FAILED)}
    missing = [cell for cell in cells if cell.key not in made]
    interrupted = False
    try:
        with progress_bar() as bar, closing(sweep.work(graphs, missing, arguments.jobs)) as work:
            task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
            for cell, row in work:
                found.append(row if file is None else file.append(row))
                bar.update(task, advance=1, description=f"{graphs[cell.fingerprint].name} {cell.method}")
    except KeyboardInterrupt:
        interrupted = True
        if file is not None:  # it may have come between a row's way to the file and to the list
            found = read_rows(file.path)
    settled = sweep.settle(found)
    if file is not None:
        others = [row for row in found if sweep.key_of(row) is None]
        if not interrupted and [*others, *settled] != found:
            file.replace([*others, *settled])
        file.close()
    by_key = {sweep.key_of(row): row for row in settled}
    places = {fingerprint: place for place, fingerprint in enumerate(graphs)}
    cells.sort(key=lambda cell: (places[cell.fingerprint], -cell.budget_bytes))  # methods stay in the order asked for
    rows = [by_key[cell.key] for cell in cells if cell.key in by_key]
    if _has_table(arguments):
        for graph in graphs.values():
            if of_graph := [row for row in rows if row["fingerprint"] == graph.fingerprint()]:
                _print_sweep(graph, of_graph)
    if rows:  # interrupted before the first, there is nothing to write or to draw
        if arguments.plot:
            from .plots import draw_sweep

            draw_sweep(rows, arguments.plot)
        if arguments.json:
            write_rows(arguments.json, rows)
        for what, path in (("rows", arguments.out), ("rows", arguments.json), ("picture", arguments.plot)):
            _tell_written(arguments, what, path)
    failed = [row for row in rows if row["status"] == sweep.FAILED]
    for row in failed:
        where = f"{row['graph']}, {row['method']}, {row['budget_bytes']:,} bytes"
        print(f"belady: {where}: {row['reason']}", file=sys.stderr)
    if interrupted:
        more = f"; {len(cells) - len(rows)} of {len(cells)} rows are missing, the same command goes on" if arguments.out else ""
        print(f"belady: interrupted{more}", file=sys.stderr)
        return INTERRUPTED
    return NOTHING_FOUND if failed else DONE


def _print_sweep(graph: Graph, rows: Sequence[dict[str, Any]]) -> None:
    """Overhead by budget (down) and method (across), with what is proved."""
    from .sweep import proved

    title = f"{graph.name}: {len(graph.ops)} ops, keep-all {graph.keep_all_time_ns / 1e6:.3f} ms; overhead"
    table = Table(header_style="bold", box=None)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for column in ("budget", "proved", *methods):
        table.add_column(column, justify="right", no_wrap=True)
    ground = proved(rows).get(graph.fingerprint(), {})
    base = graph.keep_all_time_ns
    by_budget: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_budget.setdefault(row["budget_bytes"], {})[row["method"]] = row
    for budget_bytes, at in by_budget.items():
        share = _cell(next(iter(at.values()))["budget_fraction"], "{:.0%}")
        bound = ground[budget_bytes] / base - 1 if budget_bytes in ground and base else None
        infeasible_ = any(row["status"] == Status.INFEASIBLE for row in at.values())
        cells = [f"{share} {format_bytes(budget_bytes)}", "infeasible" if infeasible_ else _cell(bound, "{:.2%}")]
        for method in methods:
            row = at.get(method, {"status": "", "overhead": None, "notes": {}})
            how = str(row["notes"].get("status", row["status"]))  # an online run says how it ended
            cells.append(how.lower().replace("_", " ") if row["overhead"] is None else f"{row['overhead']:.2%}")
        table.add_row(*cells)
    _console().print(title, style="italic", highlight=False, soft_wrap=True)
    _print_whole(table)


def _workloads(arguments: argparse.Namespace) -> int:
    rows = [workload.row() for workload in WORKLOADS.values()]
    if arguments.json:
        write_rows(arguments.json, rows)
    if _has_table(arguments):
        table = Table(box=None, header_style="bold")
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*("" if cell is None else str(cell) for cell in row.values()))
        _console().print(table)
    return DONE


def _info(arguments: argparse.Namespace) -> int:
    if arguments.plan or _is_plan_file(arguments.workload):
        return _info_of_plan(arguments)
    from planner.bounds import least_bytes
    from planner.frontier import min_budget
    from planner.least.smallest import smallest_known

    with computing() as status:
        loaded = Loaded(arguments, status)
        graph = loaded.graph
        status("measuring the graph")
        trace = simulate(graph, keep_all(graph))
        if arguments.min_budget is not None:
            smallest = min_budget(graph, time_limit_s=arguments.min_budget, progress=smallest_line(status))
            proved_bytes, works_bytes, interrupted = smallest.proved_bytes, smallest.works_bytes, smallest.interrupted
        else:
            proved_bytes, works_bytes, interrupted = least_bytes(graph), smallest_known(graph)[0], False
        row = {
            "graph": graph.name,
            "device": graph.device or None,
            "ops": len(graph.ops),
            "backward_ops": sum(op.backward for op in graph.ops),
            "random_ops": sum(op.random for op in graph.ops),
            "values": len(graph.values),
            "keep_all_time_ns": trace.time_ns,
            "keep_all_peak_bytes": trace.peak_bytes,
            "resident_bytes": graph.resident_bytes,
            "output_bytes": sum(graph.values[v].size_bytes for v in graph.outputs),
            "proved_minimum_bytes": proved_bytes,
            "smallest_known_bytes": works_bytes,
            "fingerprint": graph.fingerprint(),
        }
    if _has_table(arguments):
        _print_facts(row, trace.peak_bytes)
        print(_smallest_told(works_bytes, proved_bytes, arguments.min_budget))
    if arguments.save_graph == "-":
        sys.stdout.write(to_text(graph))
    elif arguments.save_graph:
        make_folder(arguments.save_graph)
        save_graph(graph, arguments.save_graph)
    if arguments.json:
        write_rows(arguments.json, [row])
    _tell_written(arguments, "graph", arguments.save_graph)
    _tell_written(arguments, "rows", arguments.json)
    return _interrupted() if interrupted else DONE


def _smallest_told(works_bytes: int, proved_bytes: int, searched_s: float | None) -> str:
    """How small a budget can be, in a sentence."""
    works, proved = (f"{number:,} bytes ({format_bytes(number)})" for number in (works_bytes, proved_bytes))
    if works_bytes == proved_bytes:
        return f"The smallest budget is {works}: a schedule needs no more, and it is proved that none needs less."
    more = "--min-budget 30 searches for longer" if searched_s is None else "a longer --min-budget may tell"
    return (
        f"The smallest budget known to work is {works}; it is proved that every schedule needs at least {proved}. "
        f"What is between them may work or not: {more}."
    )


def _info_of_plan(arguments: argparse.Namespace) -> int:
    """What a saved plan says of itself; with its graph, what is found anew."""
    path = arguments.plan or arguments.workload
    for option in ("save_graph", "min_budget", *(() if arguments.plan else OF_MODELS)):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} has no meaning for the saved plan {path}")
    found, valid = saved_row(path), None  # a damaged file is told before a model is built
    if arguments.plan:
        with computing() as status:
            plan = load_plan(path, Loaded(arguments, status).target)
        found |= plan.row() | {"ops": len(plan.graph.ops)}
        valid = None if plan.schedule is None else True
    row = {key: found[key] for key in PLAN_FACTS} | {"valid": valid}
    if _has_table(arguments):
        _print_facts(row, 0)
        if arguments.plan:
            print(f"The plan is valid for {row['graph']}; its time and peak are simulated." if valid else "There is no schedule.")
        else:
            print(
                f"This is what the file says; belady info WORKLOAD --plan {path} checks it against its graph, which is not in it."
            )
    if arguments.json:
        write_rows(arguments.json, [row | {"notes": found["notes"]}])
    _tell_written(arguments, "rows", arguments.json)
    _tell_halves(row["budget_bytes"], found["notes"])
    return DONE


def _print_facts(row: dict[str, Any], whole_bytes: int) -> None:
    """A line an entry, with what people read more easily. ``whole_bytes``: of the keep-all peak; 0: no shares."""
    table = Table(box=None, show_header=False)
    for key, cell in row.items():
        read = share = ""
        text = f"{cell:,}" if type(cell) is int else _cell(cell, "{:.4g}" if isinstance(cell, float) else "{}")
        if cell is not None and key.endswith("_bytes"):
            read = format_bytes(cell)
            share = f"{cell / whole_bytes:.1%} of the keep-all peak" if whole_bytes else ""
        elif cell is not None and key.endswith("_ns"):
            read = f"{cell / 1e6:,.3f} ms"
        elif isinstance(cell, float) and not key.endswith("_s"):
            read = f"{cell:.2%}"
        table.add_row(key, text, read, share)
    _print_whole(table)


def _tell_halves(budget_bytes: int, notes: Mapping[str, Any]) -> None:
    """Say where a plan is too tight to train with."""
    if "halves" in notes:
        print(f"belady: the plan for {budget_bytes:,} bytes {notes['halves']}", file=sys.stderr)


def _too_small(plan: Plan, copied_bytes: int | None, left_s: float) -> InfeasibleBudget:
    with on_terminal(f"{format_bytes(plan.budget_bytes)} cannot be; looking for a budget that works"):
        return infeasible(plan.graph, plan.budget_bytes, plan, time_limit_s=left_s, copied_bytes=copied_bytes)


def _outcome(plan: Plan, copied_bytes: int | None, left_s: float) -> int:
    """The exit code. ``left_s`` of the time limit is left, for what an error says."""
    if plan.status is Status.INFEASIBLE:
        raise _too_small(plan, copied_bytes, left_s)
    if plan.status is Status.UNKNOWN:
        stopped = plan.notes.get("stopped")
        reason = "" if stopped is None else f" ({stopped})"
        longer = "a longer --time-limit" if stopped == "time limit" else "a larger --budget"
        raise NoScheduleFound(
            f"{plan.method} found no schedule of {plan.graph.name} in {plan.budget_bytes:,} bytes within {plan.wall_s:.1f} s"
            f"{reason}, but did not rule one out; try {longer} or another --method"
        )
    return DONE


def _print_comparison(comparison: Comparison) -> None:
    _print_rows(comparison.graph, comparison.rows())
    console = _console()
    for block in comparison.blocks:
        for difference in block.differences:
            if difference.extra_ns:
                console.print()
                console.print(str(difference), highlight=False, soft_wrap=True)


def _print_rows(graph: Graph, rows: Sequence[dict[str, Any]]) -> None:
    """One table: a line a row, a rule between budgets; measured columns only where something was measured."""
    measured = any(row["measured_time_ns"] is not None for row in rows)
    title = f"{graph.name}: {len(graph.ops)} ops, keep-all {graph.keep_all_time_ns / 1e6:.3f} ms"
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    columns = ["budget", "method", "status", "overhead", "bound", "gap", "peak", "recomputed", "wall s"]
    columns += ["step ms", "measured peak", "grad error"] if measured else []
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if 0 < number < 3 else "right", no_wrap=True)
    base = graph.keep_all_time_ns
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [
            f"{_cell(row['budget_fraction'], '{:.0%}')} {format_bytes(row['budget_bytes'])}",
            row["method"],
            row["status"],
            _cell(row["overhead"], "{:.2%}"),
            _cell(row["bound_ns"] / base - 1 if row["bound_ns"] is not None and base else None, "{:.2%}"),
            _cell(row["gap"], "{:.2%}"),
            _cell(row["peak_bytes"], format_bytes),
            _cell(row["recomputed_ops"], "{}"),
            _cell(row["wall_s"], "{:.2f}"),
        ]
        if measured:
            cells += [
                _cell(row["measured_time_ns"], lambda ns: f"{ns / 1e6:.1f}"),
                _cell(row["measured_peak_bytes"], format_bytes),
                _cell(row["max_grad_error"], "{:.3g}"),
            ]
        table.add_row(*cells, end_section=following is not None and following["budget_bytes"] != row["budget_bytes"])
    _print_whole(table)


def _console(width: int | None = None) -> Console:
    """Standard output, as wide as the terminal where none is given; names are written as they are."""
    width = width if width is not None or sys.stdout.isatty() else 160
    height = None if width is None else 25  # a terminal that can do nothing is else taken to be 80 wide whatever is asked
    return Console(width=width, height=height, markup=False, emoji=False)


def _print_whole(table: Table) -> None:
    """Print a table as wide as it needs to be: a terminal that is narrower wraps its lines, and no number is cut short."""
    console = _console()
    wanted = Measurement.get(console, console.options.update(max_width=1 << 14), table).maximum
    _console(max(console.width, wanted)).print(table)


def _cell(number: Any, form: str | Callable[[Any], str]) -> str:
    if number is None:
        return "-"
    return form.format(number) if isinstance(form, str) else form(number)


if __name__ == "__main__":
    sys.exit(main())
