"""The roofline on ops small enough to work out by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._higher_order_ops.map import map as higher_order_map

from graphs.capture import Step, capture
from graphs.costs import flops, modelled_ns, moved_bytes, roofline, signature
from graphs.devices import DEVICES, DeviceDescription, device_called
from graphs.errors import InputError
from graphs.workloads import build

# 1 GFLOP/s and 1 GB/s: a time in ns is a number of FLOPs or bytes.
UNIT = DeviceDescription("unit", {"float32": 1e9, "float64": 0.5e9, "tf32": 4e9}, 1e9, launch_ns=7)


def only(step: Step, kind: str, *, backward: bool = False) -> tuple[int, fx.Node]:
    """The one op of this kind in the forward (or backward), with its number."""
    found = [(i, step.calls[i]) for i, op in enumerate(step.graph.ops) if op.kind == kind and op.backward == backward]
    assert len(found) == 1, [op.kind for op in step.graph.ops]
    return found[0]


class OneOp(nn.Module):
    """Applies a function to a parameter and the inputs."""

    def __init__(self, function: object, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(*shape, dtype=dtype))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.function(self.w, *inputs)  # type: ignore[operator]
        return result.sum()


def test_a_matrix_product_takes_its_flops() -> None:
    step = capture(OneOp(torch.mm, 20, 30), (torch.randn(30, 50),))
    i, node = only(step, "aten.mm")
    assert flops(node) == 2 * 20 * 30 * 50
    assert moved_bytes(node) == 4 * (20 * 30 + 30 * 50 + 20 * 50)
    assert roofline(step, UNIT).graph.ops[i].time_ns == 60_000 + 7


def test_an_elementwise_op_takes_its_bytes() -> None:
    step = capture(OneOp(torch.add, 20, 30), (torch.randn(20, 30),))
    i, node = only(step, "aten.add")
    assert flops(node) == 0
    assert moved_bytes(node) == 3 * 4 * 600
    assert roofline(step, UNIT).graph.ops[i].time_ns == 7_200 + 7


def test_the_rate_is_that_of_the_operands() -> None:
    step = capture(OneOp(torch.mm, 20, 30, dtype=torch.float64), (torch.randn(30, 50, dtype=torch.float64),))
    i, _ = only(step, "aten.mm")
    assert roofline(step, UNIT).graph.ops[i].time_ns == 60_000 * 2 + 7
    half = capture(OneOp(torch.mm, 20, 30, dtype=torch.float16), (torch.randn(30, 50, dtype=torch.float16),))
    i, _ = only(half, "aten.mm")
    assert roofline(half, UNIT).graph.ops[i].time_ns == 60_000 + 7, "not listed: the rate of float32"


def test_float32_convolutions_run_in_tf32_where_there_is_one() -> None:
    step = capture(OneOp(lambda w, x: F.conv2d(x, w), 8, 8, 3, 3), (torch.randn(2, 8, 12, 12),))
    i, node = only(step, "aten.convolution")
    assert flops(node) == 2 * (2 * 8 * 10 * 10) * (8 * 3 * 3)
    assert roofline(step, UNIT).graph.ops[i].time_ns == flops(node) // 4 + 7


def test_one_op_takes_at_least_a_nanosecond() -> None:
    step = capture(OneOp(torch.add, 1), (torch.randn(1),))
    fast = DeviceDescription("fast", {"float32": 1e30}, 1e30, launch_ns=0)
    assert {op.time_ns for op in roofline(step, fast).graph.ops} == {1}


@pytest.mark.parametrize(("function", "kind", "moved"), [
    (lambda w, x: w + x.expand(20, 30), "aten.add", 4 * (600 + 30 + 600)),  # an expanded tensor is read once
    (lambda w, x: torch.mul(w, w), "aten.mul", 4 * (600 + 600)),  # so is one given twice
    (lambda w, x: torch.cat([w[:10], w[5:]]), "aten.cat", 4 * (600 + 750)),  # and where two views overlap
    (lambda w, x: torch.cat([w[:5], w[15:]]), "aten.cat", 4 * (300 + 300)),  # but only what they show
    (lambda w, x: F.embedding(torch.tensor([1, 2]), w), "aten.embedding", 16 + 4 * (60 + 60)),  # a gather reads rows
    (lambda w, x: w * torch.ones_like(w), "aten.ones_like", 4 * 600),
])  # fmt: skip
def test_bytes_are_those_really_moved(function: object, kind: str, moved: int) -> None:
    step = capture(OneOp(function, 20, 30), (torch.randn(30),))
    assert moved_bytes(only(step, kind)[1]) == moved


def test_attention_counts_its_products_on_every_device() -> None:
    def attend(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(w, k, v)

    step = capture(OneOp(attend, 2, 4, 16, 8), (torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24, 8)))
    kind = "aten._scaled_dot_product_flash_attention_for_cpu"
    product = 2 * 2 * 4 * 16 * 24 * 8
    assert flops(only(step, kind)[1]) == 2 * product
    assert flops(only(step, f"{kind}_backward", backward=True)[1]) == 5 * product


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_an_lstm_counts_the_products_of_its_steps(bias: bool) -> None:
    model = nn.LSTM(8, 16, bias=bias)
    step = capture(model, torch.randn(5, 3, 8), loss=lambda made: made[0].sum())
    products = 2 * 5 * 3 * (8 + 16) * 4 * 16
    assert flops(only(step, "belady.lstm_layer")[1]) == products
    assert flops(only(step, "belady.lstm_layer_backward", backward=True)[1]) == 2 * products


def test_a_whole_model_is_priced_fast_and_backward_costs_twice_forward() -> None:
    pytest.importorskip("transformers")
    model, inputs, loss = build("gpt2", batch=1, seq=64, vocab=512)
    step = capture(model, inputs, loss=loss)
    start = time.perf_counter()
    priced = roofline(step, "h200")
    assert time.perf_counter() - start < 5
    assert all(op.time_ns >= DEVICES["h200"].launch_ns for op in priced.graph.ops)
    assert [op.workspace_bytes for op in priced.graph.ops] == [op.workspace_bytes for op in step.graph.ops]
    forward = sum(flops(node) for op, node in zip(step.graph.ops, step.calls, strict=True) if not op.backward)
    both = sum(map(flops, step.calls))
    tokens, weights = 64, 12 * 12 * 768**2 + 512 * 768
    attention = 12 * 2 * 2 * tokens**2 * 768
    assert forward == 2 * tokens * weights + attention
    assert both == 3 * forward


def test_the_device_of_the_step_is_the_default_and_another_is_named_in_the_graph() -> None:
    step = capture(OneOp(torch.mm, 20, 30), (torch.randn(30, 50),))
    assert roofline(step).graph.fingerprint() == roofline(step, "cpu").graph.fingerprint()
    assert roofline(step).graph.device == step.graph.device
    assert roofline(step, "v100").graph.device == "V100"


def test_an_unknown_device_is_refused() -> None:
    step = capture(OneOp(torch.mm, 2, 2), (torch.randn(2, 2),))
    with pytest.raises(InputError, match="unknown device 'abacus'; there are descriptions of: cpu, titan_v"):
        roofline(step, "abacus")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA TITAN V", "titan_v"),
        ("NVIDIA TITAN Xp", None),
    ],
)
def test_a_cuda_device_is_found_by_the_name_torch_gives_it(name: str, expected: str | None) -> None:
    step = capture(OneOp(torch.mm, 20, 30), (torch.randn(30, 50),))
    there = replace(step, device=torch.device("cuda"), graph=replace(step.graph, device=name))
    if expected is None:
        with pytest.raises(InputError, match="no description of the device 'NVIDIA TITAN Xp'"):
            roofline(there)
    else:
        assert roofline(there).graph.fingerprint() == roofline(step, expected).graph.fingerprint()


def test_signatures_tell_calls_apart_that_do_other_work() -> None:
    def signatures(function: object, *inputs: Tensor) -> list[str]:
        return [signature(node) for node in capture(OneOp(function, 4, 4), inputs).calls]

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    same = signatures(lambda w, x: torch.mm(w, x) * 2, x)
    assert same == signatures(lambda w, x: torch.mm(w, x) * 2, y)
    for other in (
        signatures(lambda w, x: torch.mm(w, x) * 3, x),  # another number
        signatures(lambda w, x: torch.mm(w, x.t()) * 2, x),  # other strides
        signatures(lambda w, x: torch.mm(w, w) * 2, x),  # one tensor twice
        signatures(lambda w, x: torch.mm(w, x[:, :3]) * 2, x),  # another shape
    ):
        assert other != same


def mapped(inner: Callable[[Tensor], Tensor]) -> Step:
    """A step that takes a function to each of four slices of three numbers."""
    return capture(OneOp(lambda w, x: higher_order_map(lambda each: inner(each), w * x), 4, 3), (torch.randn(4, 3),))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_higher_order_op_takes_what_its_calls_take_as_often_as_they_run() -> None:
    def calls(step: Step) -> list[fx.Node]:
        return [node for node in step.calls if str(node.target) == "map_impl"]

    fast = DeviceDescription("fast", {"float32": 1e30}, 1e30, launch_ns=7)  # a call takes 8 ns: 7, and less than 1 rounded up
    forward, _ = calls(mapped(lambda each: each.view(3, 1).sin().exp().sum()))
    assert modelled_ns(forward, fast) == 4 * 3 * 8 + 7, "a view takes nothing"
    nested, _ = calls(mapped(lambda each: higher_order_map(lambda one: one.sin(), each).sum()))
    assert modelled_ns(nested, fast) == 4 * ((3 * 8 + 7) + 8) + 7
    other, _ = calls(mapped(lambda each: higher_order_map(lambda one: one.cos(), each).sum()))
    assert signature(nested) != signature(other)


def test_linear_algebra_counts_cubes() -> None:
    step = capture(OneOp(lambda w: torch.linalg.inv(w + 8 * torch.eye(6)), 2, 6, 6), ())
    assert flops(only(step, "aten.linalg_inv_ex")[1]) == 2 * 2 * 6**3
    right = torch.ones(6, 4)
    step = capture(OneOp(lambda w: torch.linalg.solve_triangular(w + 8 * torch.eye(6), right, upper=True), 2, 6, 6), ())
    assert flops(only(step, "aten.linalg_solve_triangular")[1]) == 2 * 6 * 6 * 4
    step = capture(OneOp(lambda w: torch.linalg.solve(w + 8 * torch.eye(6), right), 2, 6, 6), ())
    assert flops(only(step, "aten._linalg_solve_ex")[1]) == 2 * (2 * 6**3 // 3) + 2 * (2 * 6 * 6 * 4)
    step = capture(OneOp(lambda w: torch.linalg.qr(w).R, 9, 5), ())
    assert flops(only(step, "aten.linalg_qr")[1]) == 4 * 9 * 5**2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak_flops": {"bfloat16": 1e12}}, "odd: peak_flops needs the rate of 'float32'"),
        ({"peak_flops": {"float32": -1e12}}, r"odd: peak_flops\['float32'\] must be a number above 0, not -1"),
        ({"peak_flops": {"float32": float("nan")}}, "must be a number above 0, not nan"),
        ({"bandwidth_bytes_per_s": 0}, "odd: bandwidth_bytes_per_s must be a number above 0, not 0"),
        ({"launch_ns": 2.5}, "odd: launch_ns must be an int >= 0, not 2.5"),
    ],
)
def test_a_device_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DeviceDescription(**{"name": "odd", "peak_flops": {"float32": 1e12}, "bandwidth_bytes_per_s": 1e9, **wrong})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100_40gb"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_known_by_their_names(name: str, key: str | None) -> None:
    assert device_called(name) is (DEVICES[key] if key else None)


def test_the_roofline_is_for_steps() -> None:
    with pytest.raises(InputError, match=r"roofline takes a captured Step, as .* not a Linear"):
        roofline(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_times_do_not_depend_on_what_was_captured_before() -> None:
    """Results that fake tensors remember may lie in less memory than those of the first call."""

    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x @ self.weight.real) * self.weight[0, :9]).abs().square().mean()

    first, second = (roofline(capture(Filtered(), torch.randn(8, 6, 16))).graph for _ in range(2))
    assert first.ops == second.ops and first.fingerprint() == second.fingerprint()
