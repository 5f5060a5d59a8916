"""What WORKLOAD stands for: a training step with its inputs, or a graph from a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.collection import SIZES, chosen, is_own
from graphs.errors import InputError
from graphs.ir import Graph
from planner.plan import check_numbers, with_costs
from planner.result import is_saved_plan

from .steps import step_name

if TYPE_CHECKING:
    from graphs.capture import Step

OF_MODELS = (*SIZES, "device", "costs")  # options that a graph from a file has no use for


def _is_graph_file(name: str) -> bool:
    return name.endswith((".json", ".json.gz", ".log", ".log.gz"))


def is_plan_file(name: str) -> bool:
    """Whether it is a file that ``Plan.save`` wrote."""
    return name.endswith((".json", ".json.gz")) and os.path.isfile(name) and is_saved_plan(name)  # a pipe is read once


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
            if is_plan_file(name):
                raise InputError(f"{name} is a saved plan, not a graph; belady info {name} tells what it says")
            status(f"reading {name}")
            self.graph: Graph = load(name)
            check_numbers(self.graph)
            if getattr(arguments, "execute", False):
                self.executable()
            return
        sizes = {size: getattr(arguments, size) for size in SIZES}
        if not is_own(name):
            chosen(name, **sizes)  # before torch is loaded, which takes seconds
        status(f"building {name}")
        from graphs.capture import capture
        from graphs.workloads import load_workload

        try:
            device = "meta" if _is_only_planned(arguments) else arguments.device
            model, self.inputs, loss = load_workload(name, device=device, **sizes)
        except SystemExit as error:  # raised by the user's function
            raise InputError(f"{name} called sys.exit({error.code!r})") from error
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            raise InputError(f"{name} cannot be built: {str(error).strip().partition(chr(10))[0] or 'out of memory'}") from error
        status(f"capturing {name}")
        step = capture(model, self.inputs, loss=loss, name=step_name(Path(name).stem if ":" in name else name, sizes))
        if getattr(arguments, "execute", False):
            step.check_runs()
        if arguments.costs is None and getattr(arguments, "plan", None):
            self.step, self.graph = step, step.graph  # with a saved plan come the costs that it was made with
            return
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


def _is_only_planned(arguments: argparse.Namespace) -> bool:
    """Whether no op will run, so that one of our own workloads needs no weights. A GPU's kernels are known only on it."""
    import torch

    runs = getattr(arguments, "execute", False) or arguments.costs == "measured" or is_own(arguments.workload)
    return not runs and (arguments.device == "cpu" or (arguments.device is None and not torch.cuda.is_available()))


def graphs_of(arguments: argparse.Namespace, status: Callable[[str], None]) -> Iterator[Graph]:
    """The graph of each of several WORKLOADs, each once, no model kept. Graph files beside models take no options of models."""
    mixed = not all(map(_is_graph_file, arguments.workload))
    for name in dict.fromkeys(arguments.workload):
        of_models = dict.fromkeys(OF_MODELS) if mixed and _is_graph_file(name) else {}
        yield Loaded(argparse.Namespace(**{**vars(arguments), "workload": name, **of_models}), status).graph
