"""Graph files: exact round trips; damaged and foreign files refused by name."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import Graph, InputError, InvalidGraph, Op, Value
from graphs.serialize import from_dict, load_graph, save_graph, to_dict
from tests.strategies import graphs

FULL = Graph(
    'a "full" gräph',
    (Op("a", (0,), (1, 2), 5, 3, "aten.mm", random=True), Op("b", (1,), (3,), 0, effect=True, backward=True)),
    (Value("p", 3), Value("", 0), Value("y\n", 2**60), Value("z", 1)),
    frozenset({0}),
    frozenset({3, 0}),
    "NVIDIA H200",
)


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_everything_comes_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_graph(FULL, path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith("gz")
    assert load_graph(path) == FULL
    assert load_graph(path).fingerprint() == FULL.fingerprint()


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"save_graph takes a Graph \(that of a captured Step is step.graph\), not "):
        save_graph(SimpleNamespace(graph=FULL), tmp_path / "g.json")
    assert not list(tmp_path.iterdir())


def test_an_empty_graph_comes_back(tmp_path: Path) -> None:
    empty = Graph("", (), (), frozenset(), frozenset())
    save_graph(empty, tmp_path / "g.json")
    assert load_graph(tmp_path / "g.json") == empty


@given(graph=graphs(random=True, effect=True))
def test_random_graphs_come_back(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    path = tmp_path_factory.mktemp("graphs") / "g.json"
    save_graph(graph, path)
    again = load_graph(path)
    assert again == graph
    assert from_dict(to_dict(graph)) == graph
    first = path.read_bytes()
    save_graph(again, path)
    assert path.read_bytes() == first


def changed(at: tuple[str | int, ...], entry: Any) -> dict[str, Any]:
    """The content of FULL with one entry replaced (removed where ``entry`` is ...)."""
    content = copy.deepcopy(to_dict(FULL))
    place: Any = content
    for key in at[:-1]:
        place = place[key]
    if entry is ...:
        del place[at[-1]]
    else:
        place[at[-1]] = entry
    return content


@pytest.mark.parametrize(
    ("at", "entry", "message"),
    [
        (("ops",), ..., "is damaged: the graph has no entry 'ops'"),
        (("device",), ..., "is damaged: the graph has no entry 'device'"),
        (("name",), 3, "is damaged: the graph: name must be str, not 3"),
        (("owner",), "me", "is damaged: the graph has an unknown entry 'owner'"),
        (("values", 2), ["y"], r"is damaged: value 2 must be \[name, size_bytes\], not \['y'\]"),
        (("values", 2), ["y", 1.5], r"is damaged: value 2 must be"),
        (("values", 2), ["y", True], r"is damaged: value 2 must be"),
        (("values", 2), "y1", r"is damaged: value 2 must be"),
        (("values", 2, 1), -4, r"holds no valid graph: value 2 \(y\n\): size_bytes must be an int >= 0, not -4"),
        (("resident",), [0, "1"], "is damaged: resident: expected value numbers, found '1'"),
        (("outputs",), [False], "is damaged: outputs: expected value numbers, found False"),
        (("outputs",), [7], "holds no valid graph: outputs names value 7"),
        (("ops", 0), [], r"is damaged: op 0 must be an object, not \[\]"),
        (("ops", 0, "time_ns"), ..., r"is damaged: op 0 \(a\) has no entry 'time_ns'"),
        (("ops", 0, "time_ns"), 1.0, r"is damaged: op 0 \(a\): time_ns must be int, not 1.0"),
        (("ops", 0, "time_ns"), True, r"is damaged: op 0 \(a\): time_ns must be int, not True"),
        (("ops", 0, "random"), 1, r"is damaged: op 0 \(a\): random must be bool, not 1"),
        (("ops", 0, "colour"), 1, r"is damaged: op 0 \(a\) has an unknown entry 'colour'"),
        (("ops", 1, "inputs"), [None], r"is damaged: inputs of op 1 \(b\): expected value numbers, found None"),
        (("ops", 1, "inputs"), [3], r"holds no valid graph: op 1 \(b\): a value stands twice"),
        (("ops", 1, "inputs"), [["x" * 999]], r"is damaged: inputs of op 1 \(b\): expected value numbers, found \['x{75}\.\.\.$"),
        (("ops", 1), {"name": "x" * 999}, r"is damaged: op 1 \(x{77}\.\.\.\) has no entry 'inputs'"),
        (("x" * 999,), 1, r"is damaged: the graph has an unknown entry 'x{76}\.\.\.$"),
        (("ops", 1, "name"), "a", r"holds no valid graph: op 1 \(a\): another op has this name"),
    ],
)
def test_damage_is_named(tmp_path: Path, at: tuple[str | int, ...], entry: object, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(changed(at, entry)))
    with pytest.raises(InputError, match=f"graph.json {message}") as caught:
        load_graph(path)
    assert isinstance(caught.value, InvalidGraph) == ("no valid graph" in message)


@given(st.data())
def test_no_change_of_a_file_gives_another_kind_of_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut, overwritten or spliced: a file is either a graph or refused with its name."""
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    save_graph(FULL, path)
    text = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 6, len(text))))
    text[start:stop] = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"null", b"-1", b"1e9", b"[]", b'"', b"99"])))
    path.write_bytes(bytes(text))
    try:
        load_graph(path)
    except InputError as error:
        assert "graph.json" in str(error)


def test_truncated_or_false_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    save_graph(FULL, path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], whole[:30] + b"\0\0\0\0" + whole[34:], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"graph\.json\.gz"):
            load_graph(path)


def test_what_is_no_dict_is_refused() -> None:
    for content in (None, [], "graph"):
        with pytest.raises(InputError, match="a graph is a dict, as to_dict makes it, not a"):
            from_dict(content)  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", [None, ["x" * 999], "belady-graph-2", "belady-plan-1", 1])
def test_other_schemas_are_refused(tmp_path: Path, schema: object) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(to_dict(FULL) | {"schema": schema}))
    with pytest.raises(InputError, match=r"graph\.json is not a belady-graph-1 file \(its schema entry is .{1,80}\)$"):
        load_graph(path)
    with pytest.raises(InputError, match=r"schema.{1,100}$"):
        from_dict(to_dict(FULL) | {"schema": schema})


def test_a_schema_in_a_gzip_written_elsewhere_is_read(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    path.write_bytes(gzip.compress(json.dumps(to_dict(FULL), indent=2).encode()))
    assert load_graph(path) == FULL
