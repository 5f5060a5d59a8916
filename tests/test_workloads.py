"""Every workload builds, repeats under its seed, and captures; a user's own is loaded or refused in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs import workloads
from graphs.capture import capture
from graphs.collection import SIZES, WORKLOADS
from graphs.errors import InputError
from graphs.workloads import build, load_workload

TINY = {"batch": 2, "seq": 8, "depth": 1, "size": 32, "vocab": 64}
SHALLOWEST = {"resnet50": 14, "vgg16": 11}
FROM_TRANSFORMERS = {"resnet50", "mobilenet_v2", "vit", "bert", "gpt2", "llama"}


@pytest.fixture(params=WORKLOADS)
def tiny(request: pytest.FixtureRequest) -> tuple[str, dict[str, int]]:
    name: str = request.param
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    sizes = {size: TINY[size] for size in WORKLOADS[name].sizes}
    if name in SHALLOWEST:
        sizes["depth"] = SHALLOWEST[name]
    return name, sizes


def test_the_collection_has_what_it_promises() -> None:
    wanted = {"mlp", "resnet50", "vgg16", "mobilenet_v2", "unet", "vit", "bert", "gpt2", "llama", "lstm"}
    assert wanted <= WORKLOADS.keys() == workloads._BUILDERS.keys()
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert set(workload.sizes) <= set(SIZES)
        assert workload.row()["batch"] == workload.sizes["batch"]


def test_builds_the_same_model_for_the_same_seed_and_leaves_the_generator_alone(tiny: tuple[str, dict[str, int]]) -> None:
    name, sizes = tiny
    before = torch.get_rng_state()
    model, inputs, _ = build(name, seed=3, **sizes)
    torch.rand(5)
    again, same_inputs, _ = build(name, seed=3, **sizes)
    other, _, _ = build(name, seed=4, **sizes)
    torch.set_rng_state(before)
    build(name, seed=3, **sizes)
    assert torch.equal(torch.get_rng_state(), before)

    assert all(module.training for module in model.modules())
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert all(map(torch.equal, pytree.tree_leaves(inputs), pytree.tree_leaves(same_inputs)))
    assert not all(map(torch.equal, model.parameters(), other.parameters()))


def test_captures_a_step_whose_gradients_reach_every_parameter(
    tiny: tuple[str, dict[str, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    name, sizes = tiny
    model, inputs, loss = build(name, **sizes)
    step = capture(model, inputs, loss=loss, name=name)
    got = [result.name for result in step.results if result.kind == "gradient"]
    assert sorted(got) == sorted(name for name, _ in model.named_parameters())
    assert any(op.backward for op in step.graph.ops)
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


def test_sizes_reach_the_model(tiny: tuple[str, dict[str, int]]) -> None:
    name, sizes = tiny
    model, inputs, _ = build(name, **sizes)
    tensors = pytree.tree_leaves(inputs)
    assert all(tensor.shape[0] == sizes["batch"] for tensor in tensors)
    for what, axis in (("seq", 1), ("size", -1)):
        if what in sizes:
            assert any(tensor.dim() > 1 and tensor.shape[axis] == sizes[what] for tensor in tensors)
    if "depth" in sizes:
        deeper = {"resnet50": 26, "vgg16": 13}.get(name, sizes["depth"] + 1)
        more, _, _ = build(name, **{**sizes, "depth": deeper})
        assert len(list(more.parameters())) > len(list(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet51"}, "unknown workload 'resnet51'; there are: mlp, resnet50"),
        ({"name": "mlp-deep"}, r"unknown workload 'mlp-deep'; there are: .* also with sizes \(gpt2-depth24-seq64\)"),
        ({"name": "mlp-depth"}, "unknown workload 'mlp-depth'"),
        ({"name": "mlp-batch2-depth4", "depth": 3}, "mlp-batch2-depth4 is asked for with depth 4 and with depth 3; give one"),
        ({"name": "mlp-depth4-depth4"}, "asked for with depth 4 and with depth 4"),
        ({"name": "mlp-depth0"}, "depth must be a positive integer, not 0"),
        ({"name": "mlp-seq4"}, "mlp has no seq to choose; it has: batch, depth"),
        ({"name": "mlp", "seq": 4}, "mlp has no seq to choose; it has: batch, depth"),
        ({"name": "mlp", "batch": 0}, "batch must be a positive integer, not 0"),
        ({"name": "vgg16", "depth": 12}, "depth must be one of 11, 13, 16, 19, not 12"),
        ({"name": "vgg16", "size": 40}, "multiple of 32 pixels, not 40"),
        ({"name": "unet", "size": 24}, "multiple of 16 pixels, not 24"),
        ({"name": "mlp", "device": "abacus"}, "unknown device 'abacus'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**arguments)  # type: ignore[arg-type]


def test_a_name_may_have_sizes() -> None:
    model, (batch, _), _ = build("mlp-depth3-batch5", seed=7)
    same, _, _ = build("mlp", depth=3, batch=5, seed=7)
    assert [p.shape for p in model.parameters()] == [p.shape for p in same.parameters()]
    assert batch.shape[0] == 5
    assert build("mlp-depth3", batch=5)[1][0].shape[0] == 5


def test_a_language_model_needs_two_tokens() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="at least 2, not 1"):
        build("gpt2", seq=1)


def test_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'belady\[zoo\]'"):
        build("gpt2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(InputError, match="no CUDA device is available"):
        build("mlp", device="cuda")


OWN = """
import torch
from torch import nn
import neighbour

def model(batch=2, device="cpu"):
    return nn.Linear(neighbour.WIDTH, 3, device=device), torch.randn(batch, neighbour.WIDTH), lambda out: out.square().mean()

def returns_its_loss():
    net, x, _ = model()
    net.eval()
    return net, (x,)

def wrong_count():
    return nn.Linear(1, 1)

def wrong_model():
    return 1, torch.ones(1)

def wrong_loss():
    return nn.Linear(1, 1), torch.ones(1), "mse"

def fails():
    raise RuntimeError("no data")

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_loads_a_function_of_ones_own(own: Path) -> None:
    before = torch.get_rng_state()
    path = list(sys.path)
    model, inputs, loss = load_workload(f"{own}:model", batch=7, device="cpu")
    again, _, _ = load_workload(f"{own}:model", device="cpu")
    assert isinstance(model, nn.Linear)
    assert torch.equal(model.weight, again.weight)
    assert inputs.shape == (7, 5)
    assert loss is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert sys.path == path
    model, _, loss = load_workload(f"{own}:returns_its_loss", device="cpu")
    assert loss is None
    assert not model.training


def test_loads_a_workload_by_name() -> None:
    model, inputs, loss = load_workload("mlp", batch=2, depth=1, device="cpu")
    assert capture(model, inputs, loss=loss).graph.ops


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ("nothing", "has no function nothing"),
        ("number", "has no function number"),
        ("wrong_count", r"must return \(model, inputs\) or \(model, inputs, loss\), not a Linear"),
        ("wrong_model", r"must return a torch.nn.Module first, not a int"),
        ("wrong_loss", "must return a loss function third, not a str"),
        ("fails", "fails failed: RuntimeError: no data"),
    ],
)
def test_a_function_of_ones_own_that_cannot_be_used_is_refused(own: Path, called: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_workload(f"{own}:{called}", device="cpu")


def test_a_size_that_ones_own_function_does_not_take_is_refused(own: Path) -> None:
    with pytest.raises(InputError, match="has no parameter 'depth'"):
        load_workload(f"{own}:model", depth=3, device="cpu")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        load_workload(f"{broken}:f", device="cpu")
    with pytest.raises(InputError, match="there is no file"):
        load_workload(f"{tmp_path / 'absent.py'}:f", device="cpu")
    with pytest.raises(InputError, match=r"cannot read .*: File name too long"):
        load_workload(f"{tmp_path / (300 * 'a')}.py:f", device="cpu")
    for name in ("net.py", "net:f", "net.py:"):
        with pytest.raises(InputError, match=r"path\.py:function"):
            load_workload(name, device="cpu")


def test_a_file_may_change_where_modules_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    path.write_text("import sys, torch\nsys.path.pop(0)\ndef make(): return torch.nn.Linear(2, 1), (torch.ones(3, 2),)\n")
    assert load_workload(f"{path}:make")[1][0].shape == (3, 2)


def test_a_file_that_changes_directory_does_not_move_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(before := Path.cwd())
    path = tmp_path / "mine.py"
    making = "def make(): return torch.nn.Linear(2, 1), (torch.ones(3, 2),)\n"
    path.write_text(f"import os, torch\nos.chdir({str(tmp_path)!r})\n{making}")
    load_workload(f"{path}:make")
    assert Path.cwd() == before
