"""Measured costs: every op is timed once, remembered under what decides its time, and nothing else is touched."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import graphs.made_up as made_up
import graphs.profile as profile
from graphs.capture import Step, capture
from graphs.collection import WORKLOADS
from graphs.costs import roofline, signature
from graphs.errors import InputError
from graphs.made_up import arguments_of
from graphs.op_times import OpTimes
from graphs.profile import measured, taken_beside
from graphs.torch_private.tensors import storage_key
from graphs.workloads import build


class Net(nn.Module):
    """Embedding, attention, batch norm, dropout: kernels that do not take just any content."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2).unsqueeze(1)
        x = F.dropout(F.scaled_dot_product_attention(x, x, x, is_causal=True), 0.3)
        out: Tensor = self.out(x.squeeze(1))
        return out


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tests that run side by side would wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def step() -> Step:
    return small_step(batch=3)


def small_step(batch: int) -> Step:
    return capture(Net(), (torch.zeros(batch, 5, dtype=torch.long), torch.zeros(batch, 5, dtype=torch.long)), loss=loss)


@pytest.fixture
def nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an op was measured")

    monkeypatch.setattr(profile, "_measure", refuse)


def distinct(step: Step) -> int:
    return len({signature(node) for node in step.calls})


def counts(step: Step, folder: Path) -> list[tuple[int, int]]:
    """What ``measured`` reports while it measures."""
    seen: list[tuple[int, int]] = []
    measured(step, cache_dir=folder, repeats=1, progress=lambda done, total: seen.append((done, total)))
    return seen


def test_every_op_gets_a_time_and_equal_calls_the_same(step: Step, tmp_path: Path) -> None:
    priced = measured(step, cache_dir=tmp_path, repeats=3)
    assert [op.name for op in priced.graph.ops] == [op.name for op in step.graph.ops]
    assert priced.graph.values == step.graph.values
    assert all(op.time_ns >= 1 and op.workspace_bytes == 0 for op in priced.graph.ops)
    by_key: dict[str, set[int]] = {}
    for op, node in zip(priced.graph.ops, priced.calls, strict=True):
        by_key.setdefault(signature(node), set()).add(op.time_ns)
    assert all(len(times) == 1 for times in by_key.values())


def test_times_are_those_of_the_work(tmp_path: Path) -> None:
    layer = nn.Linear(512, 512, bias=False)
    priced = measured(capture(layer, (torch.ones(2048, 512),), loss=lambda out: out.sum()), cache_dir=tmp_path)
    products = [op.time_ns for op in priced.graph.ops if op.kind == "aten.mm"]
    others = [op.time_ns for op in priced.graph.ops if all(priced.graph.values[v].size_bytes == 4 for v in op.outputs)]
    assert products and others
    assert min(products) > 10 * min(others), "a billion FLOPs take longer than making one number"


def test_a_second_call_measures_nothing(step: Step, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = measured(step, cache_dir=tmp_path, repeats=1)
    request.getfixturevalue("nothing_may_run")
    again = measured(step, cache_dir=tmp_path, repeats=1)
    assert again.graph == first.graph


def test_progress_counts_distinct_ops(step: Step, tmp_path: Path) -> None:
    total = distinct(step)
    assert total < len(step.calls)
    assert counts(step, tmp_path) == [(done, total) for done in range(total + 1)]
    assert counts(step, tmp_path) == []


def test_other_shapes_are_measured_anew_and_equal_ones_are_not(step: Step, tmp_path: Path) -> None:
    counts(step, tmp_path)
    other = small_step(batch=4)
    known = {signature(node) for node in step.calls}
    new = {signature(node) for node in other.calls} - known
    assert 0 < len(new) <= distinct(other)
    assert counts(other, tmp_path)[-1] == (len(new), len(new))


def test_other_settings_and_devices_are_measured_anew(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = (distinct(step), distinct(step))
    assert counts(step, tmp_path)[-1] == everything
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        assert counts(step, tmp_path)[-1] == everything
    assert len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert counts(step, tmp_path)[-1] == everything
    assert len(list(tmp_path.iterdir())) == 2
    assert counts(step, tmp_path) == []


def test_an_interruption_keeps_what_was_measured(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = profile._measure, 0

    def interrupted(*arguments: object) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(profile, "_measure", interrupted)
        counts(step, tmp_path)
    assert counts(step, tmp_path)[-1] == (distinct(step) - 3, distinct(step) - 3)


def test_the_generators_are_left_alone_and_nothing_is_printed(
    step: Step, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert any(op.random for op in step.graph.ops)
    before = torch.get_rng_state()
    measured(step, cache_dir=tmp_path, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"schema": "another-1"}',
        '{"schema": "belady-times-1", "times": []}',
        '{"schema": "belady-times-1", "times": {"torch": {"aten.mm": [1]}}}',
        '{"schema": "belady-times-1", "times": {"torch": {"aten.mm": [-1, 0]}}}',
    ],
)
@pytest.mark.usefixtures("nothing_may_run")
def test_a_damaged_cache_is_refused_and_kept(step: Step, tmp_path: Path, content: str, request: pytest.FixtureRequest) -> None:
    path = OpTimes(step.device, tmp_path).path
    path.write_text(content)
    with pytest.raises(InputError, match=f"{path.name}.*delete this file"):
        measured(step, cache_dir=tmp_path)
    assert path.read_text() == content


def test_the_cache_is_readable_and_lives_where_it_is_told(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELADY_CACHE", str(tmp_path / "a" / "b"))
    measured(step, repeats=1)
    (path,) = (tmp_path / "a" / "b").iterdir()
    content = json.loads(path.read_text())
    ((setting, times),) = content["times"].items()
    assert f"torch {torch.__version__}" in setting
    assert times.keys() == {signature(node) for node in step.calls}
    monkeypatch.delenv("BELADY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured(step, repeats=1)
    assert (tmp_path / "cache" / "belady" / path.name).exists()


def test_a_cache_folder_that_cannot_be_is_refused(step: Step, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the cache folder"):
        measured(step, cache_dir=tmp_path / "file" / "folder")


def test_repeats_must_be_positive(step: Step, tmp_path: Path) -> None:
    for repeats in (0, 2.5, "3"):
        with pytest.raises(InputError, match=f"repeats must be a whole number of at least 1, not '?{repeats}"):
            measured(step, cache_dir=tmp_path, repeats=repeats)  # type: ignore[arg-type]
    for other in (step.graph, step.model):
        with pytest.raises(InputError, match=r"measured takes a captured Step, as .* not a (Graph|Net)"):
            measured(other)  # type: ignore[arg-type]


def test_arguments_are_laid_out_as_captured_and_valid(step: Step) -> None:
    """Same dtype, shape, strides and sharing as in the graph; numbers in [0.1, 1); indices in range."""
    for node in step.calls:
        args, kwargs = arguments_of(node, step.device)
        fakes = [n.meta["val"] for n in node.all_input_nodes]
        reals = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
        reals += [t for a in args if isinstance(a, list | tuple) for t in a if isinstance(t, Tensor)]
        layouts = {(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in fakes if isinstance(t, Tensor)}
        assert {(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in reals} == layouts
        assert len({t.untyped_storage().data_ptr() for t in reals}) == len({storage_key(t) for t in fakes})
        for tensor in reals:
            if tensor.is_floating_point():
                assert tensor.min() >= 0.1 - 1e-6 and tensor.max() < 1
            else:
                assert tensor.min() >= 0 and tensor.max() < 50
    (lookup,) = (node for node in step.calls if str(node.target) == "aten.embedding.default")
    assert arguments_of(lookup, step.device)[0][1].unique().numel() > 1, "lookups of one row only would be too fast"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_op_of_the_collection_can_be_measured(name: str, tmp_path: Path) -> None:
    if name not in {"mlp", "vgg16", "unet", "lstm"}:
        pytest.importorskip("transformers")
    sizes = {"batch": 2, "seq": 8, "depth": {"resnet50": 14, "vgg16": 11}.get(name, 1), "size": 32, "vocab": 64}
    model, inputs, own_loss = build(name, **{size: sizes[size] for size in WORKLOADS[name].sizes})
    priced = measured(capture(model, inputs, loss=own_loss), cache_dir=tmp_path, repeats=1)
    assert all(op.time_ns >= 1 for op in priced.graph.ops)


@torch.library.custom_op("belady_tests::only_ones", mutates_args=())
def only_ones(x: Tensor) -> Tensor:
    if not bool((x == 1).all()):
        raise ValueError("not all ones")
    return x.clone()


@only_ones.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("belady_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class Lambda(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.linear(x), x)  # type: ignore[operator]
        return out


def test_pivots_are_places_of_rows(tmp_path: Path) -> None:
    """They are counted from 1: with another one a kernel reads past the matrix, and on CUDA the process loses the device."""

    class Solving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + 8 * torch.eye(8)
            solved = torch.linalg.solve(y, x.mT).square().mean() + torch.linalg.slogdet(y).logabsdet.mean()
            factors, pivots = torch.linalg.lu_factor(y)
            return solved + torch.lu_unpack(factors, pivots)[2].square().mean()

    step = capture(Solving(8, 8), torch.randn(3, 8, 8))
    reads = {node.target: node for node in step.calls if node.target in made_up.READ_PIVOTS}
    assert set(reads) == {torch.ops.aten.linalg_lu_solve.default, torch.ops.aten.lu_unpack.default}
    for node in reads.values():
        (pivots,) = (each for each in arguments_of(node, step.device)[0] if getattr(each, "dtype", None) == torch.int32)
        assert torch.equal(pivots, torch.arange(1, 9, dtype=torch.int32).expand(3, 8))
    assert measured(step, cache_dir=tmp_path, repeats=1).graph.keep_all_time_ns > 0

    class Shared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            factors, pivots = torch.linalg.lu_factor(self.weight + 8 * torch.eye(8))
            return torch.linalg.lu_solve(factors.expand(3, 8, 8), pivots.expand(3, 8), x).square().mean()

    shared = measured(capture(Shared(8, 8), torch.randn(3, 8, 8)), cache_dir=tmp_path, repeats=1)
    assert shared.graph.keep_all_time_ns > 0


def test_an_op_with_an_outside_effect_is_not_run(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acting = next(i for i, op in enumerate(step.graph.ops) if op.kind == "aten.embedding")
    ops = list(step.graph.ops)
    ops[acting] = replace(ops[acting], effect=True, time_ns=11, workspace_bytes=22)
    step = replace(step, graph=replace(step.graph, ops=tuple(ops)))
    real, ran = profile._measure, []

    def noted(node: torch.fx.Node, *rest: object) -> tuple[int, int]:
        ran.append(node)
        return real(node, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(profile, "_measure", noted)
    priced = measured(step, cache_dir=tmp_path, repeats=1)
    assert ran and step.calls[acting] not in ran
    assert priced.graph.ops[acting] == ops[acting]


def test_an_op_that_cannot_run_alone_is_named_and_modelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = capture(Lambda(lambda h, x: (h * only_ones(x)).sum()), torch.ones(4, 4))
    alike = [i for i, op in enumerate(step.graph.ops) if "only_ones" in op.kind]
    for _ in range(2):  # it is not remembered
        caplog.clear()
        priced = measured(step, cache_dir=tmp_path, repeats=1).graph
        (told,) = (record.getMessage() for record in caplog.records if record.name == "belady")
        assert re.fullmatch(
            r"1 kinds of ops cannot be timed alone and have modelled times: only_ones .*: ValueError: not all ones", told
        )
        modelled = roofline(step).graph
        assert alike and all(priced.ops[i].time_ns == modelled.ops[i].time_ns for i in alike)
        assert priced.ops != modelled.ops and priced.costs == "measured"
    monkeypatch.setattr(profile, "described", unknown)
    with pytest.raises(InputError, match=r"only_ones .*cannot be timed alone: ValueError: not all ones; there is no description"):
        measured(step, cache_dir=tmp_path, repeats=1)


@torch.library.custom_op("belady_tests::warned", mutates_args=())
def warned(x: Tensor) -> Tensor:
    warnings.warn("may change at any time", UserWarning, stacklevel=1)
    return x.clone()


warned.register_fake(torch.empty_like)


def test_an_op_that_warns_is_timed_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warnings are errors in these tests: PyTorch warns of `index_reduce` and others, each once in a process."""
    step = capture(Lambda(lambda h, x: (h * warned(x)).sum()), torch.ones(4, 4))
    assert any("warned" in op.kind for op in step.graph.ops)
    measured(step, cache_dir=tmp_path, repeats=1)
    assert not [record for record in caplog.records if record.name == "belady"]


def unknown(_: Step) -> None:
    raise InputError("there is no description of the device")


def test_other_programs_are_measured_each_time_and_pytorchs_once(tmp_path: Path) -> None:
    step = capture(Lambda(lambda h, x: doubled(h * x).sum()), torch.ones(4, 4))
    names = [str(node.target) for node in step.calls]
    assert "belady_tests.doubled.default" in names and len(set(names)) > 2
    assert counts(step, tmp_path)[-1] == (distinct(step), distinct(step))
    assert counts(step, tmp_path)[-1] == (names.count("belady_tests.doubled.default"),) * 2
    assert "doubled" not in OpTimes(step.device, tmp_path).path.read_text()


def statistics(*at_once: int, blocks: Sequence[int] = ()) -> tuple[dict[str, int], dict[str, int]]:
    """The allocator's, before and after a call that has blocks of these sizes at once; ``blocks``: what it is given."""
    given = blocks or [-(-size // 512) * 512 for size in at_once]
    before = {"allocated_bytes.all.current": 5120, "requested_bytes.all.current": 5000, "allocation.all.allocated": 7}
    peaks = {"allocated_bytes.all.peak": 5120 + sum(given), "requested_bytes.all.peak": 5000 + sum(at_once)}
    return before, {**peaks, "allocation.all.allocated": 7 + len(at_once)}


def test_workspace_is_counted_in_the_granules_of_the_allocator() -> None:
    """Each request is rounded up: three of 8 bytes take three granules. What a large block has too much does not count."""
    assert taken_beside(*statistics(4000, 8, 8, 8), [4000]) == 3 * 512
    assert taken_beside(*statistics(4000, 700, 100_000), [4000]) == 1024 + 100_352
    assert taken_beside(*statistics(4000), [4000]) == taken_beside(*statistics(), []) == 0
    mib = 1 << 20
    assert taken_beside(*statistics(2 * mib, blocks=[3 * mib]), [2 * mib]) == 0
    assert taken_beside(*statistics(2 * mib, 2 * mib, blocks=[2 * mib, 3 * mib]), [2 * mib]) == 2 * mib


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_workspace_on_cuda_is_what_an_op_holds_beside_its_outputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()).cuda()
    step = capture(model, torch.randn(8, 16, 64, 64, device="cuda"), loss=lambda out: out.square().mean())
    priced = measured(step, cache_dir=tmp_path)
    assert all(op.time_ns >= 1 and op.workspace_bytes % 512 == 0 for op in priced.graph.ops)
    assert all(op.workspace_bytes == 0 for op in priced.graph.ops if op.kind == "aten.relu"), "it makes its output, nothing else"
    assert counts(step, tmp_path) == []


def test_seeds_of_attention_are_given_on_the_host_where_its_backward_reads_them() -> None:
    schema = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default._schema
    graph = fx.Graph()
    given = {a.name: graph.placeholder(a.name) for a in schema.arguments if isinstance(a.type, torch.TensorType)}
    arguments = [given.get(a.name, 0.1) for a in schema.arguments if not a.kwarg_only]
    call = graph.call_function(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, tuple(arguments))
    assert made_up._on_host(call) == [given["philox_seed"], given["philox_offset"]]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert made_up._on_host(graph.call_function(flash, tuple(given.values()))) == []
