"""Operator logs and Checkmate instances as graphs: rules by hand, published figures, damaged files."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from graphs import Graph, InputError, InvalidGraph, Op, Value
from graphs.importers import load, load_checkmate, load_dtr_log
from graphs.importers.checkmate import COST_UNIT_NS
from graphs.importers.dtr_log import graph_of, views_ns
from graphs.importers.dtr_program import read_program
from graphs.program import Program
from graphs.serialize import save_graph
from planner.schedule import Compute, Free, Step, keep_all
from planner.simulate import simulate

# Operator logs


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"INSTRUCTION": kind} | fields)


def constant(name: str, size_bytes: int) -> list[str]:
    return [line("CONSTANT", NAME=name), line("MEMORY", NAME=name, MEMORY=str(size_bytes))]


def call(name: str, reads: list[str], makes: dict[str, tuple[int, int]], time_ns: int) -> list[str]:
    """makes: name -> (bytes, index of the argument it is a view of, or -1)."""
    lines = [line("CALL", NAME=name, ARGS=reads, RESULT=list(makes), TIME=str(time_ns))]
    for result, (size_bytes, alias) in makes.items():
        lines += [line("MEMORY", NAME=result, MEMORY=str(size_bytes)), line("ALIAS", NAME=result, ALIAS=str(alias))]
    return lines


def mutate(name: str, reads: list[str], which: list[int], time_ns: int) -> list[str]:
    return [line("MUTATE", NAME=name, ARGS=reads, MUTATE=which, TIME=str(time_ns))]


def release(*names: str) -> list[str]:
    return [line("RELEASE", NAME=name) for name in names]


START = line("ANNOTATE", ANNOTATION="START")
BACKWARD = line("ANNOTATE", ANNOTATION="BACKWARD")


def graph_from(tmp_path: Path, *parts: list[str] | str) -> Graph:
    path = tmp_path / "tiny.log"
    path.write_text("\n".join("\n".join(part) if isinstance(part, list) else part for part in parts))
    return load_dtr_log(path)


def test_constants_views_several_outputs_and_ends(tmp_path: Path) -> None:
    graph = graph_from(
        tmp_path,
        constant("early", 9),  # before START: not there
        START,
        constant("w", 100),
        call("mm", ["w", "w"], {"a": (40, -1)}, 7),
        call("t", ["a"], {"at": (0, 0)}, 1),  # a view: no op
        call("split", ["at"], {"l": (0, 0), "b": (16, -1), "c": (8, -1)}, 5),  # one more view, two storages
        BACKWARD,
        call("add", ["at", "l", "b"], {"d": (4, -1)}, 3),
        release("a", "at", "l", "b", "c"),
    )
    assert graph == Graph(
        "tiny",
        (
            Op("mm:1", (0,), (1,), 7, kind="mm"),
            Op("split:3", (1,), (2, 3), 5, kind="split"),
            Op("add:4", (1, 2), (4,), 3, kind="add", backward=True),
        ),
        (Value("w", 100), Value("a", 40), Value("b", 16), Value("c", 8), Value("d", 4)),
        frozenset({0}),
        frozenset({4}),
    )


def test_references_decide_what_must_be_there_at_the_end(tmp_path: Path) -> None:
    graph = graph_from(
        tmp_path,
        START,
        *(call("f", [], {name: (1, -1)}, 1) for name in "abcde"),
        call("view", ["b"], {"vb": (0, 0)}, 1),
        [line("COPY", DST="a2", SRC="a")],
        [line("COPY_FROM", DST="d", SRC="e")],  # d's storage has no name left; e's has two
        release("a", "b", "c", "e", "unknown"),
    )
    # a lives through its copy, b through its view, e through d
    assert {graph.values[v].name for v in graph.outputs} == {"a", "b", "e"}
    assert not any(op.backward for op in graph.ops)


def test_a_mutation_makes_a_new_whole_storage(tmp_path: Path) -> None:
    graph = graph_from(
        tmp_path,
        START,
        constant("w", 30),
        call("f", [], {"a": (64, -1)}, 1),
        call("view", ["a"], {"v": (0, 0)}, 1),
        mutate("add_", ["v", "w"], [0], 5),  # through the view: still all 64 bytes
        mutate("mul_", ["w", "a"], [0, 1], 6),  # of a constant too; a is the old storage
        call("g", ["v", "w", "a"], {"r": (1, -1)}, 2),
        release("a", "v", "w"),
    )
    assert [(op.name, op.inputs, op.outputs, op.time_ns) for op in graph.ops] == [
        ("f:1", (), (1,), 1),
        ("add_:3", (1, 0), (2,), 5),
        ("mul_:4", (0, 1), (3, 4), 6),
        ("g:5", (2, 3, 4), (5,), 2),
    ]
    assert [value.size_bytes for value in graph.values] == [30, 64, 64, 30, 64, 1]
    assert graph.resident == {0} and graph.outputs == {5}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (mutate("add_", ["a"], [-1], 1), "line 5: -1 is no index of its 1 arguments"),
        (mutate("add_", ["a"], [1], 1), "line 5: 1 is no index of its 1 arguments"),
        (call("view", ["a"], {"v": (0, -2)}, 1), "line 7: -2 is no index of its 1 arguments"),
        ([call("g", [], {"b": (1, -1)}, 1)[0], *call("g", [], {"c": (1, -1)}, 1)[1:]], "line 7: the sizes and aliases of g"),
        ([line("CALL", NAME=["g"], ARGS=["a"], RESULT=["b"], TIME="1")], r"line 5: NAME must be a name, not \['g'\]"),
        ([line("CALL", NAME=None, ARGS=["a"], RESULT=["b"], TIME="1")], "line 5: NAME must be a name, not None"),
        ([line("CALL", NAME="g", ARGS="a", RESULT=["b"], TIME="1")], "line 5: ARGS must be a list of names, not 'a'"),
        ([line("CALL", NAME="g", ARGS=["a"], RESULT=None, TIME="1")], "line 5: RESULT must be a list of names, not None"),
        ([line("CALL", NAME="g", ARGS=["a"], RESULT=["b"], TIME=1.5)], "line 5: expected a whole number, found 1.5"),
        ([line("MUTATE", NAME="add_", ARGS=["a"], MUTATE=None, TIME="1")], "line 5: MUTATE must be a list of indices, not None"),
        ([line("RELEASE", NAME=["a"])], r"line 5: NAME must be a name, not \['a'\]"),
        ([line("CONSTANT", NAME="c"), line("MEMORY", NAME="c", MEMORY=None)], "line 6: expected a whole number, found None"),
    ],
)
def test_indices_and_sizes_that_mean_nothing_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        graph_from(tmp_path, START, call("f", [], {"a": (1, -1)}, 1), lines)


def test_an_op_that_makes_nothing_is_an_op(tmp_path: Path) -> None:
    graph = graph_from(tmp_path, START, call("f", [], {"a": (1, -1)}, 1), call("check", ["a"], {}, 4))
    assert graph.ops[1] == Op("check:1", (0,), (), 4, kind="check")


def random_log(seed: int) -> list[str]:
    """A log with everything in it, of about 60 instructions."""
    rng = Random(seed)
    live: list[str] = []
    lines = [START]
    for at in range(60):
        what = rng.choice(["constant", "call", "call", "call", "view", "mutate", "copy", "copy_from", "release", "release"])
        reads = [rng.choice(live) for _ in range(rng.randint(1, 3))] if live else []
        if what == "constant":
            lines += constant(f"c{at}", rng.randint(0, 9))
            live.append(f"c{at}")
        elif what == "call":
            makes = {f"x{at}.{o}": (rng.randint(0, 9), rng.randrange(-1, len(reads))) for o in range(rng.randint(1, 3))}
            lines += call("f", reads, makes, rng.randint(0, 9))
            live += makes
        elif not live:
            continue
        elif what == "view":
            lines += call("view", reads[:1], {f"v{at}": (0, 0)}, rng.randint(0, 9))
            live.append(f"v{at}")
        elif what == "mutate":
            reads = list(dict.fromkeys(reads))
            lines += mutate("m_", reads, rng.sample(range(len(reads)), rng.randint(1, len(reads))), rng.randint(0, 9))
        elif what == "copy":
            lines.append(line("COPY", DST=f"y{at}", SRC=reads[0]))
            live.append(f"y{at}")
        elif what == "copy_from":
            lines.append(line("COPY_FROM", DST=reads[0], SRC=reads[-1]))
        else:
            live.remove(reads[0])
            lines += release(reads[0])
    return [*lines, *call("last", live[:1], {"end": (1, -1)}, 1)]


def as_released(program: Program, graph: Graph) -> tuple[Step, ...]:
    """The log's own schedule: every op once, every storage freed when its last reference goes."""
    number = {op.name: i for i, op in enumerate(graph.ops)}
    steps: list[Step] = []
    for event in program.events:
        if event < 0:
            if -1 - event not in graph.resident:
                steps.append(Free(-1 - event))
        elif (name := f"{program.calls[event].name}:{event}") in number:
            steps.append(Compute(number[name]))
    return tuple(steps)


@pytest.mark.parametrize("seed", range(40))
def test_the_logs_own_schedule_is_valid_and_ours_needs_no_more(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "random.log"
    path.write_text("\n".join(random_log(seed)))
    program, graph = read_program(path), load(path)
    theirs, ours = simulate(graph, as_released(program, graph)), simulate(graph, keep_all(graph))
    assert theirs.time_ns == ours.time_ns == program.base_time_ns - views_ns(program)
    assert ours.peak_bytes <= theirs.peak_bytes


def test_released_too_early_would_be_noticed(tmp_path: Path) -> None:
    """The schedules above can be invalid: dropping a storage before its last reader is."""
    lines = [START, *call("f", [], {"a": (1, -1)}, 1), *call("g", ["a"], {"b": (1, -1)}, 1)]
    graph = graph_from(tmp_path, lines)
    with pytest.raises(InputError, match="g:1 reads value 0"):
        simulate(graph, (Compute(0), Free(0), Compute(1)))


# name: ops without views, time of all calls and of views alone (ns), peak of keep-all here, peak where every storage stays until
# the log releases it, and the peak the DTR authors' simulator reports (which frees constants too)
LOGS = {
    "unet": (201, 435_278_292, 61_734, 8_409_694_648, 8_415_764_928, 8_415_764_640),
    "resnet32": (270, 291_905_487, 28_254, 10_061_177_400, 10_061_179_648, 10_061_179_152),
    "transformer": (1_310, 276_259_118, 1_964_683, 9_346_753_088, 9_864_405_576, 9_864_405_000),
    "lstm": (5_239, 769_458_833, 4_718_997, 4_279_082_928, 5_595_127_736, 5_595_127_736),
}


@pytest.mark.parametrize("name", LOGS)
def test_published_logs(data: Path, name: str) -> None:
    n_ops, time_ns, view_time_ns, keep_all_peak, released_peak, published_peak = LOGS[name]
    program = read_program(data / "dtr_logs" / f"{name}.log.gz")
    graph = graph_of(program)
    assert (graph.name, len(graph.ops)) == (name, n_ops)
    assert (program.base_time_ns, views_ns(program)) == (time_ns, view_time_ns)
    ours, theirs = simulate(graph, keep_all(graph)), simulate(graph, as_released(program, graph))
    assert ours.time_ns == theirs.time_ns == time_ns - view_time_ns
    assert (ours.peak_bytes, theirs.peak_bytes) == (keep_all_peak, released_peak)
    # Theirs is ours, with later frees and without the constants that the log drops before the peak.
    assert 0 <= released_peak - published_peak < 1000
    assert keep_all_peak <= released_peak


def test_published_u_net_log_in_detail(data: Path) -> None:
    graph = load(data / "dtr_logs" / "unet.log.gz")
    assert len(graph.resident) == 152 and round(graph.resident_bytes / 1e6, 1) == 93.4
    non_resident = [[v for v in (*op.inputs, *op.outputs) if v not in graph.resident] for op in graph.ops]
    assert round(max(sum(graph.values[v].size_bytes for v in held) for held in non_resident) / 1e6) == 1943
    backward_ns = sum(op.time_ns for op in graph.ops if op.backward)
    assert backward_ns == pytest.approx(273.3e6, rel=0.001)
    assert sum(len(op.outputs) > 1 for op in graph.ops) == 59


# Checkmate instances


def instance(**change: Any) -> dict[str, Any]:
    """Three ops: conv -> relu -> loss; the loss reads both."""
    return {
        "name": "tiny", "n": 3, "loss": 1, "edges": [[0, 1], [1, 2], [0, 2], [0, 2]], "mem_bytes": [100, 50, 8],
        "time_ms": [1.5, 0.004, 0.0151], "workspace_mb": [0.5, -0.25, 2.0], "fixed_bytes_last": 7,
        "op": ["conv", "relu", "conv"],
    } | change  # fmt: skip


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(content))
    return path


def test_an_instance_by_hand(tmp_path: Path) -> None:
    path = write(tmp_path, instance())
    assert load_checkmate(path) == Graph(
        "tiny",
        (
            Op("conv:0", (), (0,), 1_500_000, kind="conv"),
            Op("relu:1", (0,), (1,), 0, kind="relu"),  # 0.4 units of 10 us are none
            Op("conv:2", (1, 0), (2,), 20_000, kind="conv", backward=True),  # 1.51 units are two
        ),
        (Value("conv:0", 100), Value("relu:1", 50), Value("conv:2", 8), Value("fixed", 7)),
        frozenset({3}),
        frozenset({2}),
    )
    assert [op.workspace_bytes for op in load_checkmate(path, workspace=True).ops] == [2**19, 0, 2**21]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "is damaged: n must be a positive integer, not 0"),
        ({"n": 2}, "is damaged: mem_bytes must be a list of 2 entries"),
        ({"mem_bytes": [1, 2, 3.5]}, r"is damaged: mem_bytes\[2\] is 3.5"),
        ({"time_ms": [1, 2, "3"]}, r"is damaged: time_ms\[2\] is '3'"),
        ({"time_ms": [1, 2, float("nan")]}, r"is damaged: time_ms\[2\] is nan"),
        ({"time_ms": [1, 2, float("inf")]}, r"is damaged: time_ms\[2\] is inf"),
        ({"time_ms": [1, -2, 3]}, r"holds no valid graph: op 1 .*time_ns must be an int >= 0"),
        ({"op": None}, "is damaged: op must be a list of 3 entries"),
        ({"edges": [[0, 3]]}, r"is damaged: edge \[0, 3\] does not join two of the ops 0 to 2"),
        ({"edges": [[0]]}, r"is damaged: edge \[0\] does not join"),
        ({"edges": [[2, 1]]}, r"holds no valid graph: op 1 \(relu:1\): reads value 2 \(conv:2\), which no earlier op makes"),
        ({"edges": 5}, r"is damaged: edges must be a list of pairs, not 5"),
        ({"edges": [["x" * 999]]}, r"is damaged: edge \['x{75}\.\.\. does not join"),
        ({"loss": None}, r"is damaged: loss must be an integer, not None"),
        ({"fixed_bytes_last": True}, r"is damaged: fixed_bytes_last must be an integer, not True"),
        ({"fixed_bytes_last": -1}, r"holds no valid graph: value 3 \(fixed\)"),
    ],
)
def test_damaged_instances_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"instance.json {message}") as caught:
        load_checkmate(write(tmp_path, instance(**change)))
    assert isinstance(caught.value, InvalidGraph) == ("no valid graph" in message)


@pytest.mark.parametrize("field", ["n", "edges", "mem_bytes", "time_ms", "op", "fixed_bytes_last"])
def test_missing_fields_are_named(tmp_path: Path, field: str) -> None:
    content = instance()
    del content[field]
    with pytest.raises(InputError, match=f"instance.json is no Checkmate instance: it has no field '{field}'"):
        load_checkmate(write(tmp_path, content))


def test_workspace_is_needed_only_when_asked_for(tmp_path: Path) -> None:
    content = instance()
    del content["workspace_mb"]
    path = write(tmp_path, content)
    assert load_checkmate(path).ops[0].workspace_bytes == 0
    with pytest.raises(InputError, match="it has no field 'workspace_mb'"):
        load_checkmate(path, workspace=True)


@pytest.mark.parametrize(
    ("name", "n_ops", "n_edges", "base_cost", "peak_gib", "largest_gib"),
    [
        ("vgg16_176", 97, 133, 245_618, 19.96, 6.32),
        ("unet_11", 154, 219, 188_252, 17.49, 3.32),
        ("resnet50_184", 405, 592, 101_898, 21.29, 2.75),
    ],
)
def test_published_instances(
    data: Path, name: str, n_ops: int, n_edges: int, base_cost: int, peak_gib: float, largest_gib: float
) -> None:
    graph = load(data / "checkmate_instances" / f"{name}.json")
    trace = simulate(graph, keep_all(graph))
    assert (graph.name, len(graph.ops), sum(len(op.inputs) for op in graph.ops)) == (name, n_ops, n_edges)
    assert trace.time_ns == base_cost * COST_UNIT_NS
    assert round(trace.peak_bytes / 2**30, 2) == peak_gib
    largest = max(sum(graph.values[v].size_bytes for v in (*op.inputs, *op.outputs)) for op in graph.ops)
    assert round(largest / 2**30, 2) == largest_gib
    assert load_checkmate(data / "checkmate_instances" / f"{name}.json", workspace=True).ops != graph.ops


# Any graph file


def test_load_finds_the_format_from_the_content(tmp_path: Path) -> None:
    log = "\n".join([START, *call("f", [], {"a": (1, -1)}, 1)])
    expected = {"ours": load(write(tmp_path, instance())), "log": graph_from(tmp_path, log)}
    save_graph(expected["ours"], tmp_path / "ours.json")
    files = {
        "ours.json": (tmp_path / "ours.json").read_bytes(),
        "ours.dat.gz": gzip.compress((tmp_path / "ours.json").read_bytes()),
        "instance.json.gz": gzip.compress((tmp_path / "instance.json").read_bytes()),
        "tiny.log": log.encode(),
        "tiny.log.gz": gzip.compress(log.encode()),
        "tiny": b"\n" + log.encode(),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert load(path) == expected["log" if "tiny" in name else "ours"], name


@pytest.mark.parametrize("name", ["ours.json", "instance.json", "tiny"])
def test_a_pipe_is_read_once(name: str, tmp_path: Path) -> None:
    save_graph(load(write(tmp_path, instance())), tmp_path / "ours.json")
    (tmp_path / "tiny").write_text("\n".join([START, *call("f", [], {"a": (1, -1)}, 1)]))
    pipe = tmp_path / ("pipe" + Path(name).suffix)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes((tmp_path / name).read_bytes()), daemon=True)
    writer.start()
    assert load(pipe).ops == load(tmp_path / name).ops
    writer.join()


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    path = write(tmp_path, instance())
    graph = load(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path) == graph


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.json", "", r"is no graph file: Expecting value.*; expected our own JSON, an operator log .* or a Checkmate instance"),
        ("g.json", '{"schema": "belady-gr', r"is no graph file: Unterminated string .*; expected"),
        ("g.json", "[1, 2]", "is no graph file: expected"),
        ("g.json", '{"edges": []}', "is no graph file: expected"),
        ("g.json", '{"schema": "belady-plan-1"}', "is not a belady-graph-1 file"),
        ("g.log", "hello", r"is damaged at line 1: "),
        (
            "g.log",
            START + '\n{"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [], "RESULT": ["x"], "TIME": 1e999}',
            r"is damaged at line \d: expected a whole number, found inf",
        ),
        ("g.log", START, "holds no operator call that makes anything after a START mark; it may have been cut short"),
        ("g.log", "\n".join([START, *constant("w", 8)]), "holds no operator call that makes anything"),
        ("g.log", "\n".join([START, *constant("w", 8), *call("t", ["w"], {"v": (0, 0)}, 1)]), "holds no operator call that"),
        ("g.txt", '{"INSTRUCTION": "CALL"}\n{"INSTRUCTION": 5', r"is damaged at line 2: "),
    ],
)
def test_files_that_hold_no_graph(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=f"{path} {message}"):
        load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nothing\.json: No such file or directory"):
        load(tmp_path / "nothing.json")
