"""Graph: each rule broken once, and what is derived from it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from graphs import Graph, InputError, InvalidGraph, Op, Value
from graphs.synthetic import chain
from tests.strategies import graphs


@pytest.fixture
def diamond() -> Graph:
    """p (resident) -> a -> (x, y); b reads x, c reads y and p; d reads both results."""
    return Graph(
        "diamond",
        (
            Op("a", (0,), (1, 2), 10),
            Op("b", (1,), (3,), 20, workspace_bytes=7),
            Op("c", (2, 0), (4,), 30),
            Op("d", (3, 4), (5,), 40),
        ),
        (Value("p", 100), Value("x", 1), Value("y", 2), Value("u", 3), Value("w", 4), Value("z", 5)),
        frozenset({0}),
        frozenset({5}),
    )


def test_derived_facts(diamond: Graph) -> None:
    assert diamond.producer == (-1, 0, 0, 1, 2, 3)
    assert diamond.consumers == ((0, 2), (1,), (2,), (3,), (3,), ())
    assert diamond.resident_bytes == 100
    assert diamond.keep_all_time_ns == 100


def with_op(graph: Graph, i: int, **change: object) -> Graph:
    ops = list(graph.ops)
    ops[i] = replace(ops[i], **change)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(
    ("i", "change", "message"),
    [
        (1, {"name": "a"}, r"op 1 \(a\): another op has this name"),
        (2, {"time_ns": -1}, r"op 2 \(c\): time_ns must be an int >= 0, not -1"),
        (2, {"time_ns": 1.5}, r"op 2 \(c\): time_ns must be an int >= 0, not 1.5"),
        (2, {"workspace_bytes": -8}, r"op 2 \(c\): workspace_bytes must be an int >= 0, not -8"),
        (3, {"inputs": (3, 3)}, r"op 3 \(d\): a value stands twice among its inputs and outputs \(3, 3, 5\)"),
        (3, {"inputs": (3, 5)}, r"op 3 \(d\): a value stands twice among its inputs and outputs \(3, 5, 5\)"),
        (3, {"inputs": (3, 6)}, r"op 3 \(d\): names value 6, but values are numbered 0 to 5"),
        (3, {"inputs": (3, -1)}, r"op 3 \(d\): names value -1, but values are numbered 0 to 5"),
        (1, {"inputs": (4,)}, r"op 1 \(b\): reads value 4 \(w\), which no earlier op makes"),
        (1, {"outputs": (3, 0)}, r"op 1 \(b\): makes value 0 \(p\), which is resident"),
        (2, {"outputs": (4, 3)}, r"op 2 \(c\): makes value 3 \(u\), already made by op 1"),
        (0, {"outputs": (1,)}, r"op 2 \(c\): reads value 2 \(y\), which no earlier op makes"),
        (1, {"inputs": [1]}, r"op 1 \(b\): inputs must be a tuple of numbers of values, not \[1\]"),
        (1, {"inputs": None}, r"op 1 \(b\): inputs must be a tuple of numbers of values, not None"),
        (1, {"outputs": [3]}, r"op 1 \(b\): outputs must be a tuple of numbers of values, not \[3\]"),
        (1, {"inputs": ([1],)}, r"op 1 \(b\): names value \[1\], but values are numbered 0 to 5"),
        (1, {"inputs": (True,)}, r"op 1 \(b\): names value True, but values are numbered 0 to 5"),
        (2, {"time_ns": True}, r"op 2 \(c\): time_ns must be an int >= 0, not True"),
        (1, {"name": ["b"]}, r"op 1: its name must be a str, not \['b'\]"),
        (1, {"kind": None}, r"op 1 \(b\): its kind must be a str, not None"),
        (1, {"random": 1}, r"op 1 \(b\): random must be True or False, not 1"),
        (1, {"effect": "no"}, r"op 1 \(b\): effect must be True or False, not 'no'"),
        (1, {"backward": None}, r"op 1 \(b\): backward must be True or False, not None"),
        (1, {"name": 300 * "b", "time_ns": -1}, r"op 1 \(b{77}\.\.\.\): time_ns must be an int >= 0, not -1$"),
    ],
)
def test_each_rule_for_ops_broken_once(diamond: Graph, i: int, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        with_op(diamond, i, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": (Value("p", -1),)}, r"value 0 \(p\): size_bytes must be an int >= 0, not -1"),
        ({"values": (Value("p", 0.5),)}, r"value 0 \(p\): size_bytes must be an int >= 0, not 0.5"),
        ({"resident": frozenset({0, 6})}, r"resident names value 6, but values are numbered 0 to 5"),
        ({"outputs": frozenset({-1})}, r"outputs names value -1, but values are numbered 0 to 5"),
        ({"outputs": frozenset({"z"})}, r"outputs names value 'z', but values are numbered 0 to 5"),
        ({"outputs": [[5]]}, r"outputs must be a frozenset, not \[\[5\]\]"),
        ({"outputs": 5}, r"outputs must be a frozenset, not 5"),
        ({"ops": None}, r"ops must be a tuple, not None"),
        ({"ops": ({},)}, r"op 0 must be an Op, not \{\}"),
        ({"values": (("p", 1),)}, r"value 0 must be a Value, not \('p', 1\)"),
        ({"values": (Value(None, 1),)}, r"value 0: its name must be a str, not None"),
        ({"name": None}, r"the name of a graph must be a str, not None"),
        ({"resident": frozenset()}, r"op 0 \(a\): reads value 0 \(p\), which no earlier op makes"),
    ],
)
def test_each_rule_for_values_broken_once(diamond: Graph, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        replace(diamond, **change)  # type: ignore[arg-type]


def test_a_value_must_come_from_somewhere(diamond: Graph) -> None:
    with pytest.raises(InvalidGraph, match=r"value 6 \(stray\): neither resident nor made by any op"):
        replace(diamond, values=(*diamond.values, Value("stray", 1)))


def test_invalid_graph_is_an_input_error_and_a_value_error() -> None:
    assert issubclass(InvalidGraph, InputError) and issubclass(InvalidGraph, ValueError)


def test_a_graph_cannot_be_changed(diamond: Graph) -> None:
    with pytest.raises(FrozenInstanceError):
        diamond.name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        diamond.ops[0].time_ns = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"time_ns": 11},
        {"workspace_bytes": 1},
        {"random": True},
        {"effect": True},
        {"inputs": ()},
        {"outputs": (2, 1)},
    ],
)
def test_fingerprint_sees_whatever_a_schedule_depends_on(diamond: Graph, change: dict[str, object]) -> None:
    assert with_op(diamond, 0, **change).fingerprint() != diamond.fingerprint()


def test_fingerprint_sees_sizes_and_ends_but_no_names(diamond: Graph) -> None:
    same = replace(diamond, name="other", device="elsewhere", values=tuple(replace(v, name="v") for v in diamond.values))
    same = with_op(with_op(same, 0, name="first"), 1, kind="aten.mm", backward=True)
    assert same.fingerprint() == diamond.fingerprint()
    assert replace(diamond, outputs=frozenset({4, 5})).fingerprint() != diamond.fingerprint()
    bigger = (*diamond.values[:5], Value("z", 6))
    assert replace(diamond, values=bigger).fingerprint() != diamond.fingerprint()
    unread = replace(diamond, values=(*diamond.values, Value("q", 1)), resident=frozenset({0, 6}))
    assert unread.fingerprint() != diamond.fingerprint()


def test_with_costs_replaces_times_and_workspaces_only(diamond: Graph) -> None:
    other = diamond.with_costs([1, 2, 3, 4])
    assert [op.time_ns for op in other.ops] == [1, 2, 3, 4]
    assert [op.workspace_bytes for op in other.ops] == [0, 7, 0, 0]
    assert diamond.with_costs([1, 2, 3, 4], [5, 6, 7, 8]).ops[3].workspace_bytes == 8
    assert other.with_costs([10, 20, 30, 40]) == diamond
    with pytest.raises(ValueError, match="shorter"):
        diamond.with_costs([1, 2, 3])


def test_costs_and_orders_that_do_not_fit_the_ops_are_told(diamond: Graph) -> None:
    for times, spaces, message in (
        ([1, 2, 3], None, "time_ns is shorter than the ops of diamond: 3 numbers for 4 ops"),
        ([1, 2, 3, 4], [5] * 5, "workspace_bytes is longer than the ops of diamond: 5 numbers for 4 ops"),
        (7, None, "time_ns must be a tuple, not 7"),
    ):
        with pytest.raises(InvalidGraph, match=message):
            diamond.with_costs(times, spaces)  # type: ignore[arg-type]
    for order in ([0, 1, 2, 4], ["a"], None):
        with pytest.raises(InvalidGraph, match="an order has each of the ops 0 to 3 once"):
            diamond.in_order(order)  # type: ignore[arg-type]


def test_lists_and_sets_are_made_what_cannot_change(diamond: Graph) -> None:
    given = replace(diamond, ops=list(diamond.ops), values=list(diamond.values), resident=[0, 0], outputs={5})  # type: ignore[arg-type]
    assert given == diamond and hash(given) == hash(diamond)
    assert given.resident_bytes == 100 and given.fingerprint() == diamond.fingerprint()


@given(graphs(random=True, effect=True))
def test_producers_and_consumers_are_inverse_to_ops(graph: Graph) -> None:
    for v in range(len(graph.values)):
        assert [i for i, op in enumerate(graph.ops) if v in op.inputs] == list(graph.consumers[v])
        makers = [i for i, op in enumerate(graph.ops) if v in op.outputs]
        assert makers == ([] if v in graph.resident else [graph.producer[v]])
        assert (graph.producer[v] < 0) == (v in graph.resident)


def test_a_small_graph_is_written_out_and_a_large_one_named(diamond: Graph) -> None:
    assert eval(repr(diamond)) == diamond
    large = repr(chain(50))
    assert large == "Graph(chain_50, 101 ops, 101 values, 0 bytes resident, keep-all 0.000 ms)"
