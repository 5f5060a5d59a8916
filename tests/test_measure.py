"""Peak and time of real runs."""

import gc
import weakref

import pytest
import torch

from planner.measure import Measured, StorageMeter, measure

CPU = torch.device("cpu")


def test_meter_counts_what_is_born_inside_until_its_last_tensor_dies():
    x = torch.zeros(100)
    with StorageMeter() as meter:
        a = x + 1
        assert meter.live_bytes == 400
        view = a[10:20]
        del a
        assert meter.live_bytes == 400, "a view keeps the whole storage"
        b = view + 1
        assert meter.live_bytes == 440
        del view
        assert meter.live_bytes == 40
        x.view(10, 10).t()
        x.add_(1)
        assert meter.live_bytes == 40, "what was there before weighs nothing, nor do its views"
    del b
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 440


def test_meter_sees_the_backward():
    w = torch.zeros(50, requires_grad=True)
    with StorageMeter() as meter:
        loss = (w * 2).exp().sum()
        before = meter.live_bytes
        loss.backward()
    assert before == 4 + 200, "the loss, and what exp saves"
    assert w.grad is not None
    del loss
    assert meter.live_bytes == 200, "the gradient"


def test_meter_counts_an_expanded_tensor_as_its_storage():
    with StorageMeter() as meter:
        a = torch.ones(1).expand(1000)
        assert meter.live_bytes == 4
    del a


def test_measure_adds_the_resident_bytes_and_keeps_the_result():
    x = torch.zeros(250)

    def run() -> torch.Tensor:
        return ((x + 1) * 2).sum()

    measured = measure(run, CPU, resident_bytes=1000)
    assert isinstance(measured, Measured)
    assert measured.result.item() == 500
    assert measured.peak_bytes == 1000 + 2000
    assert measured.time_ns > 0
    assert measured.reserved_bytes is None


def test_measure_prepares_every_run_uncounted():
    seen: list[float] = []
    prepared = 0

    def prepare() -> None:
        nonlocal prepared
        prepared += 1
        torch.manual_seed(7)
        torch.zeros(10_000)

    def run() -> None:
        seen.append(torch.rand(()).item())

    measured = measure(run, CPU, 0, prepare=prepare, repeats=3)
    assert prepared == 4
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert measured.peak_bytes == 4


def test_measure_wants_a_run():
    with pytest.raises(ValueError, match="at least 1"):
        measure(lambda: None, CPU, 0, repeats=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measure_on_cuda_asks_the_allocator():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1 << 20, device=device)
    measured = measure(lambda: ((x + 1) * 2).sum(), device, resident_bytes=4 << 20, repeats=2)
    assert 12 << 20 <= measured.peak_bytes <= (12 << 20) + 4096
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes
    assert measured.time_ns > 0


def test_a_meter_leaves_nothing_to_the_garbage_collector() -> None:
    """Its notices would stay with the storages until that comes around."""
    weight = torch.ones(100)
    gc.disable()
    try:
        with StorageMeter() as meter:
            kept = weight * 2
            assert weakref.getweakrefcount(weight.untyped_storage()) == 1
        del meter
        assert weakref.getweakrefcount(weight.untyped_storage()) == 0
        assert weakref.getweakrefcount(kept.untyped_storage()) == 0
    finally:
        gc.enable()
