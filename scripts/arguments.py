"""The arguments of the command: its options and their helps, and what is refused before anything is computed."""

from __future__ import annotations

import argparse
import os
from typing import Any

from graphs.devices import DEVICES
from graphs.errors import InputError, quoted
from graphs.files import check_writable, descriptor_of
from online.heuristics import ADDRESS_HEURISTICS, DEFAULT_RULE, HEURISTICS
from online.runtime import rule_named
from planner.budget import is_share
from planner.methods import METHODS
from planner.plan import COSTS, check_options, checked_method

from .results import FILES
from .rows import check_row_file, provenance

RULE = f"online rule: {', '.join((*HEURISTICS, *ADDRESS_HEURISTICS))}; +reclaim evicts rebuilt dead values at once (dtr+reclaim)"
STDOUT = "- is standard output (then no table)"

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
In a sweep, what is proved too small or not found is a row, and no error.
"""


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
    commands = top.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    command = _command(commands, "diff", "compare the optimum with online rules under the same budgets")
    _target(command)
    _budget(command, several=True)
    command.add_argument(
        "--heuristic",
        action="append",
        metavar="RULE",
        help=f"{RULE}; may be given several times (default: {DEFAULT_RULE})",
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
    _file(command, "--plot", "draw overhead against budget, and memory over time (.png, .svg, .pdf)")
    _json(command)

    command = _command(commands, "plan", "find the optimal schedule for a budget")
    _target(command)
    _budget(command)
    _solver(command)
    command.add_argument(
        "--any-order",
        action="store_true",
        help="try other orders of first executions too (cutting_stages; annealing always does)",
    )
    command.add_argument("--execute", action="store_true", help="also train one step with the plan and measure it")
    _file(command, "--out", f"save the plan as JSON (belady info reads it); {STDOUT}")
    _json(command)

    command = _command(commands, "run", "run an online rule under a budget")
    _target(command)
    _budget(command)
    command.add_argument("--heuristic", default=DEFAULT_RULE, metavar="RULE", help=f"{RULE} (default: {DEFAULT_RULE})")
    _seed(command)
    command.add_argument("--execute", action="store_true", help="run on real tensors and measure")
    _file(command, "--out", f"save the recorded schedule as a plan; {STDOUT}")
    _json(command)

    command = _command(
        commands,
        "sweep",
        "all graphs under all budgets with all methods and rules that are named, in parallel; may be interrupted",
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
    _file(command, "--out", "add each row to this file as soon as it is there; rows that are in it already are not made again")
    command.add_argument("--retry", action="store_true", help="make those rows of --out again whose cell failed")
    _file(command, "--plot", "draw overhead against budget, a panel for each graph (.png, .svg, .pdf)")
    _json(command)

    command = _command(commands, "workloads", "list the models that come with the program")
    _json(command)

    command = _command(commands, "info", "ops, bytes, peak and smallest budgets of a graph, or what a saved plan says")
    _target(command, plans=True)
    command.add_argument(
        "--plan", metavar="FILE", type=_named, help="check this saved plan against the graph, and say what it costs there"
    )
    _file(command, "--save-graph", f"write the graph as JSON; {STDOUT}")
    command.add_argument(
        "--min-budget", metavar="SECONDS", type=_seconds, help="search for the smallest budget and its proof for at most so long"
    )
    _json(command)
    return top


def _command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text + ".")
    return command


def _target(command: argparse.ArgumentParser, *, several: bool = False, plans: bool = False) -> None:
    command.add_argument(
        "workload",
        metavar="WORKLOAD",
        nargs="+" if several else None,
        help="name (see belady workloads), which may have sizes (gpt2-depth24-seq64), path.py:function, or a graph file (.json, "
        ".log, both also .gz)" + ", or a saved plan (.json)" * plans,
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
        choices=(*COSTS, *DEVICES),
        metavar="COSTS",
        help="op times: roofline (modelled), measured (each distinct op timed, with its workspace; remembered "
        "in ~/.cache/belady or the folders that XDG_CACHE_HOME or BELADY_CACHE name) or auto (default): "
        f"measured on CUDA, else roofline; or modelled for another device: {', '.join(DEVICES)}",
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


def _named(name: str) -> str:
    if not name:
        raise argparse.ArgumentTypeError("a file name cannot be empty")
    return name


def _written(name: str) -> str:
    """The name of a file to be written. ``/dev/stdout`` is ``-``: its descriptor leads elsewhere while results are computed."""
    try:
        return "-" if descriptor_of(_named(name)) == 1 else name
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        check_options({"time_limit_s": float(text)})
    except ValueError as error:  # InputError is one
        raise argparse.ArgumentTypeError(f"seconds must be a number from 0 to 10,000,000, not {quoted(text)}") from error
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
    group.add_argument(
        "--time-limit",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds for each budget (default: 60); up to half as long again where a step's plan must be made to fit its "
        "two halves",
    )
    _seed(group)


def _seed(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of searches, random rules and draws in an executed step (default: 0); weights and inputs are the same for all",
    )


def _file(command: argparse.ArgumentParser, option: str, help_text: str) -> None:
    command.add_argument(option, metavar="FILE", type=_written, help=help_text)


def _json(command: argparse.ArgumentParser) -> None:
    _file(command, "--json", f"write result rows as JSON lines; {STDOUT}")


def solver_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is asked of a planning method, as ``planner.solve`` takes it."""
    options = {"gap": arguments.gap, "time_limit_s": arguments.time_limit, "seed": arguments.seed}
    return options | ({"any_order": True} if getattr(arguments, "any_order", False) else {})


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError for what shows already, before a model is built and captured, that it cannot be done."""
    _check_files(arguments)
    _check_asked(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be written, two results in one file, and pictures of no kind."""
    options: dict[str, str] = {}  # by the file they write to
    read = [*_each(getattr(arguments, "workload", None)), *_each(getattr(arguments, "plan", None))]
    sources = {os.path.realpath(path) for name in read for path in (name, name.rpartition(":")[0]) if os.path.isfile(path)}
    for target in FILES:
        if path := getattr(arguments, target, None):
            option = "--" + target.replace("_", "-")
            if target == "out" and arguments.command == "sweep":
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
    """Refuse budgets, methods, rules and options that cannot be used."""
    asked = vars(arguments)
    if asked.get("retry") and not asked["out"]:
        raise InputError("--retry makes rows of a file again whose cell failed; name that file with --out")
    if arguments.command == "sweep" or "budget" not in asked:  # a sweep knows ranges, and all and none
        return
    for budget in _each(asked["budget"]):
        is_share(budget)
    if "method" in asked:
        checked_method(asked["method"], solver_options(arguments))
    for rule in _each(asked.get("heuristic")):
        rule_named(rule)


def _each(given: list[str] | str | None) -> list[str]:
    """What an option that may be given several times, or once, was given."""
    return [given] if isinstance(given, str) else given or []
