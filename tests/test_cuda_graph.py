"""A planned step as CUDA graphs: everything but the capture itself on the CPU, the capture where there is a device."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.capture import capture
from graphs.costs import roofline
from graphs.errors import InputError
from graphs.torch_private.tensors import storage_key
from planner.execute import PlannedModule
from planner.execution.cuda_graph import CudaRecorder, GraphedModule, Run
from planner.execution.graph_draws import GraphRepeats
from planner.plan import plan


class HostRecorder:
    """Stands in for CUDA graphs: a replay runs the code again on the tensors it was recorded with and copies what it makes to
    where the first run left it. Code that would read anything else than those tensors fails here too."""

    def __init__(self) -> None:
        self.captures = 0

    def repeats(self) -> None:
        return None

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def capture(
        self, run: Run, given: list[Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        self.captures += 1
        kept = list(given)
        contents = [tensor.untyped_storage().clone() for tensor in given]
        states = [generator.get_state() for generator in generators]
        made = run(given)
        for tensor, content in zip(kept, contents, strict=True):  # a capture runs nothing
            tensor.untyped_storage().copy_(content)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        places = list(made)

        @torch.no_grad()
        def replay() -> None:
            for place, tensor in zip(places, run(list(kept)), strict=True):
                if place.data_ptr() != tensor.data_ptr():
                    place.data.copy_(tensor)  # as a kernel writes: no version counter sees it

        return made, replay

    def wait(self) -> None:
        pass


class Net(nn.Module):
    """Batch norm and dropout, deep enough to be cut."""

    def __init__(self, width: int = 32, depth: int = 5, p: float = 0.3) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.p = p

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=True):
            x = F.dropout(F.gelu(norm(lin(x))), self.p, self.training)
        return F.cross_entropy(x, y)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(256, 32, generator=generator), torch.randint(32, (256,), generator=generator)


def graphed(model: nn.Module, budget: float = 0.7) -> tuple[GraphedModule, HostRecorder]:
    step = roofline(capture(model, next(batches(1))))
    found = plan(step, budget)
    assert found.schedule is not None
    recorder = HostRecorder()
    return GraphedModule(step, found.schedule, found.budget_bytes, recorder=recorder), recorder


def state(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach().clone() for n, t in [*model.state_dict().items(), *grads.items()]}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a), [n for n in a if not torch.equal(a[n], b[n])]


def test_what_takes_the_host_is_refused() -> None:
    class Asking(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = F.cross_entropy(super().forward(x), target)
            return y if torch.isfinite(y) else y.nan_to_num()

    with pytest.raises(InputError, match=r"Asking asks its data, .* without it \(.*if torch.isfinite\(y\).*without cuda_graph"):
        graphed(Asking(32, 32), 1.0)


def test_trains_as_plain_pytorch_does() -> None:
    torch.manual_seed(0)
    plain = Net()
    module, recorder = graphed(copy.deepcopy(plain))
    ends = []
    for model in (plain, module):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x, y in batches(6):
            optimizer.zero_grad()
            loss = model(x, y)
            (loss * 2).backward()  # the gradient of the loss is not one, as with a GradScaler
            optimizer.step()
            losses.append(loss.item())
        ends.append((losses, state(model), torch.get_rng_state()))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])
    assert recorder.captures == 2


def test_gradients_add_up_over_calls() -> None:
    torch.manual_seed(0)
    plain = Net()
    module, _ = graphed(copy.deepcopy(plain))
    for model in (plain, module):
        torch.manual_seed(5)
        for x, y in batches(3):
            model(x, y).backward()
    assert_same(state(plain), state(module))


def test_gradients_lie_in_the_memory_of_the_graph_until_the_next_call() -> None:
    module, _ = graphed(Net())
    x, y = next(batches(1))
    module(x, y).backward()
    first = [p.grad for p in module.parameters()]
    ours = {storage_key(g) for g in module._recorded.gradients}
    assert all(storage_key(g) in ours for g in first)  # no copy
    contents = [g.clone() for g in first]
    loss = module(x, y)
    assert all(storage_key(p.grad) not in ours for p in module.parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), contents, strict=True))
    loss.backward()


def test_a_loss_whose_values_were_taken_has_no_backward() -> None:
    module, _ = graphed(Net())
    x, y = next(batches(1))
    first, second = module(x, y), module(x, y)
    with pytest.raises(InputError, match="a later call has taken their memory"):
        first.backward()
    second.backward()
    with pytest.raises(InputError, match="backward ran before"):
        second.backward()


def test_a_parameter_changed_between_call_and_backward_is_noticed() -> None:
    module, _ = graphed(Net())
    loss = module(*next(batches(1)))
    with torch.no_grad():
        module.step.model.lins[2].weight.mul_(2)
    with pytest.raises(InputError, match=r"lins.2.weight was changed in place"):
        loss.backward()


class Counting(Net):
    """Counts its steps, in a buffer that has the name of what a planned module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, *inputs: Any) -> Any:
        self.step: Tensor
        self.step += 1
        return super().forward(*inputs)


def test_a_buffer_may_be_called_step() -> None:
    module, _ = graphed(Counting())
    for x, y in batches(3):
        module(x, y).backward()
    assert module.get_buffer("step") == 3


def test_a_failed_backward_takes_buffers_and_draws_back() -> None:
    module, _ = graphed(Net())
    x, y = next(batches(1))
    module(x, y).backward()
    before, generator = state(module), torch.get_rng_state()
    loss = module(x, y)
    assert not torch.equal(module.step.model.norms[0].running_mean, before["norms.0.running_mean"])
    with torch.no_grad():
        module.step.model.lins[2].weight.add_(0)
    with pytest.raises(InputError):
        loss.backward()
    assert_same(before, state(module))
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("waiting", [False, True])
def test_a_call_that_is_refused_changes_nothing(waiting: bool) -> None:
    """What was edited is looked for beside the device, when buffers are written; a step that waits for its backward keeps it."""
    module, _ = graphed(Net())
    x, y = next(batches(1))
    module(x, y).backward()
    loss = module(x, y) if waiting else None
    before, generator = state(module), torch.get_rng_state()
    module.step.model.norms[1].momentum = 0.5
    with pytest.raises(InputError, match="momentum"):
        module(x, y)
    assert_same(before, state(module))
    assert torch.equal(generator, torch.get_rng_state())
    module.step.model.norms[1].momentum = 0.1
    if loss is not None:
        loss.backward()
    module(x, y).backward()
    assert not torch.equal(module.step.model.norms[1].running_mean, before["norms.1.running_mean"])


def test_captures_again_only_where_memory_moved() -> None:
    module, recorder = graphed(Net())
    x, y = next(batches(1))
    module(x, y).backward()
    module.load_state_dict(module.state_dict())
    module(x, y).backward()
    assert recorder.captures == 2
    module.step.model.lins[0].weight.data = module.step.model.lins[0].weight.data.clone()
    module(x, y).backward()
    assert recorder.captures == 4
    module.release()
    assert module.static_inputs == ()
    module(x, y)
    assert recorder.captures == 6


def test_memory_is_given_up_once_the_replays_are_done() -> None:
    module, recorder = graphed(Net())
    module(*next(batches(1))).backward()
    seen: list[bool] = []
    recorder.wait = lambda: seen.append(module._recorded is not None)  # type: ignore[method-assign]
    module.release()
    module.release()
    assert seen == [True] and module._recorded is None
    module(*next(batches(1)))
    module.step.model.lins[0].weight.data = module.step.model.lins[0].weight.data.clone()
    module(*next(batches(1)))
    assert seen == [True, True]


def test_static_inputs_are_used_where_they_are() -> None:
    module, _ = graphed(Net(p=0.0))
    (x, y), (x2, y2) = batches(2)
    module(x, y)
    static = module.static_inputs
    assert [t.shape for t in static] == [x.shape, y.shape]
    for place, content in zip(static, (x2, y2), strict=True):
        place.copy_(content)
    assert torch.equal(module(*static), module(x2, y2))
    assert all(a is b for a, b in zip(static, module.static_inputs, strict=True))


def graphed_alone(model: nn.Module, x: Tensor) -> GraphedModule:
    """Of a model that returns its loss."""
    step = roofline(capture(model, x))
    found = plan(step, 1.0)
    assert found.schedule is not None
    return GraphedModule(step, found.schedule, found.budget_bytes, recorder=HostRecorder())


class Squares(nn.Module):
    def __init__(self, width: int, inner: Callable[[Tensor], Tensor] = Tensor.sigmoid) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.lin(self.inner(x)) * x.sum()).square().mean()
        return loss


@pytest.mark.parametrize(
    ("x", "width", "inner"),
    [
        (torch.linspace(-1, 1, 301 * 64).view(301, 64)[:, :37], 37, Tensor.sigmoid),
        (torch.linspace(-1, 1, 8).expand(64, 8), 8, Tensor.sigmoid),
        (torch.linspace(-1, 1, 32).view(4, 8)[:, :5], 4, lambda x: x.as_strided((3, 4), (8, 1))),
        (torch.linspace(-1, 1, 32).view(4, 8)[:, :5], 5, lambda x: x.as_strided((3, 5), (8, 1)) + x.as_strided((1,), (1,), 7)),
    ],
)
def test_static_inputs_are_laid_out_as_the_captured_ones(x: Tensor, width: int, inner: Callable[[Tensor], Tensor]) -> None:
    """With gaps, which a view may read, or expanded, at no more bytes."""
    model = Squares(width, inner)
    twin = copy.deepcopy(model)
    module = graphed_alone(model, x)
    others = torch.cat((torch.linspace(2, 3, 7), torch.linspace(3, 5, x.untyped_storage().nbytes() // 4)))
    again = others[7:].as_strided(x.shape, x.stride(), 0 if inner is not Tensor.sigmoid else 7)
    for batch in (x, again, x):
        module(batch).backward()
        twin(batch).backward()
        assert torch.equal(module(batch), twin(batch))
    assert_same(state(model), state(twin))
    (static,) = module.static_inputs
    assert static.stride() == x.stride() and static.untyped_storage().nbytes() <= x.untyped_storage().nbytes()
    assert torch.equal(module(static), twin(x))


def test_an_input_read_by_its_place_in_its_storage_is_refused() -> None:
    x = torch.randn(40)[3:].view(37, 1)[:30].view(5, 6)
    model = Squares(6, lambda x: x.as_strided((5, 6), (6, 1), x.storage_offset() + 1))
    with pytest.raises(InputError, match=r"reads inputs by its place in its storage \(as_strided\), .* without cuda_graph"):
        graphed_alone(model, x)


def test_an_input_of_another_memory_format_is_refused() -> None:
    """The buffer that it is copied into has the captured one."""

    class Grey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.conv(x).square().mean()
            return loss

    module = graphed_alone(Grey(), torch.randn(2, 1, 6, 6))
    with pytest.raises(InputError, match=r"inputs: by the strides of a dimension of one element, .*; or use module\(\) without"):
        module(torch.randn(2, 6, 6, 1).permute(0, 3, 1, 2))
    module(torch.randn(2, 1, 6, 6)).backward()


def renewed(model: nn.Module, way: str) -> None:
    """Other parameters in the same memory."""
    if way == "assigned":
        model.load_state_dict(model.state_dict(), assign=True)
    elif way == "of the data":
        for part in model.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    setattr(part, name, nn.Parameter(parameter.data))
    else:  # with their gradients, as ``to`` has it where parameters are overwritten
        for part in model.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    other = nn.Parameter(parameter.data)
                    other.grad = parameter.grad
                    setattr(part, name, other)


@pytest.mark.parametrize("way", ["assigned", "of the data", "with their gradients"])
def test_gradients_of_renewed_parameters_add_up(way: str) -> None:
    """They lie where the old ones did, and the graphs write to the memory of gradients all the same."""
    torch.manual_seed(0)
    plain = Net(p=0.0)
    model = copy.deepcopy(plain)
    module, recorder = graphed(model)
    data = list(batches(3))
    for i, batch in enumerate(data):
        for part, call in ((plain, plain), (model, module)):
            call(*batch).backward()
            if not i:
                renewed(part, way)
    assert_same(state(model), state(plain))
    assert recorder.captures == 4


def test_a_renewed_parameter_changed_between_call_and_backward_is_noticed() -> None:
    module, _ = graphed(Net(p=0.0))
    batch = next(batches(1))
    module(*batch).backward()
    renewed(module.step.model, "of the data")
    loss = module(*batch)
    with torch.no_grad():
        module.step.model.lins[1].weight.mul_(2)
    with pytest.raises(InputError, match=r"lins\.1\.weight was changed in place after the forward"):
        loss.backward()


@pytest.mark.parametrize("first", [True, False])
def test_a_call_in_inference_mode_leaves_others_as_they_are(first: bool) -> None:
    """What is recorded in it, and gradients that are moved in it, are no tensors of it."""
    torch.manual_seed(0)
    plain = Net(p=0.0)
    module, _ = graphed(copy.deepcopy(plain))
    batch = next(batches(1))
    if not first:
        for each in (plain, module):
            each(*batch).backward()
    with torch.inference_mode():
        assert torch.equal(module(*batch), plain(*batch))
    for _ in range(2):
        for each in (plain, module):
            each(*batch).backward()
    assert_same(state(module.step.model), state(plain))


def test_without_gradients_and_in_evaluation() -> None:
    torch.manual_seed(0)
    plain = Net(p=0.0)
    module, _ = graphed(copy.deepcopy(plain))
    x, y = next(batches(1))
    with torch.no_grad():
        assert torch.equal(module(x, y), plain(x, y))
    module.eval(), plain.eval()
    assert torch.equal(module(x, y), plain(x, y))


def test_what_cannot_be_captured_is_said_once_and_for_all() -> None:
    class Refusing(HostRecorder):
        def capture(self, run: Run, given: list[Tensor], generators: Sequence[torch.Generator]) -> Any:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be ...")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    step = roofline(capture(Net(), next(batches(1))))
    found = plan(step, 1.0)
    assert found.schedule is not None
    module = GraphedModule(step, found.schedule, found.budget_bytes, recorder=Refusing())
    before, generator = state(module), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"Net cannot be captured as a CUDA graph: operation not permitted .* use module\(\)"
        ):
            module(*next(batches(1)))
    assert_same(before, state(module))
    assert torch.equal(generator, torch.get_rng_state())


def test_what_draws_on_the_host_cannot_be_captured() -> None:
    step = roofline(capture(Net(), next(batches(1))))
    found = plan(step, 1.0)
    assert found.schedule is not None
    module = GraphedModule(step, found.schedule, found.budget_bytes, recorder=HostRecorder())
    module._on_host, module._generators = module._generators, ()  # as if the step were on another device
    before, generator = state(module), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be captured as a CUDA graph: an operator of it draws on the host"):
            module(*next(batches(1)))
    assert_same(before, state(module))
    assert torch.equal(generator, torch.get_rng_state())


def test_gradients_come_one_by_one() -> None:
    class Plain(nn.Linear):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(super().forward(input), target)

    module, _ = graphed(Plain(32, 32), 1.0)
    loss, weights = module(*next(batches(1))), list(module.parameters())
    with pytest.raises(InputError, match=r"a CUDA graph makes the gradients of one loss: with is_grads_batched=True, use module"):
        torch.autograd.grad(loss, weights, grad_outputs=torch.ones(2), is_grads_batched=True)


def test_needs_a_cuda_device() -> None:
    found = plan(Net(), 1.0, inputs=next(batches(1)))
    with pytest.raises(InputError, match="CUDA graphs need a CUDA device, and Net was captured on cpu"):
        found.module(cuda_graph=True)


class FakeCuda:
    """What CUDA graphs are made with, on the host. A capture that fails is left as PyTorch leaves it: its stream is the current
    one, its memory is in use, and its generators do not draw (before torch 2.13) until another one ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.waits = "outside", []
        self.pools: dict[int, int] = {}  # those in use: by how many graphs
        self.under_way: list[int] = []
        self.capturing: set[object] = set()
        self.valid = True
        fake = self

        class Stream(str):
            def wait_stream(self, other: str) -> None:
                fake.waits.append((str(self), str(other)))

        @contextlib.contextmanager
        def stream(chosen: str) -> Iterator[None]:
            before, fake.current = fake.current, chosen
            try:
                yield
            finally:
                fake.current = before

        class Graph:
            def __init__(self) -> None:
                self.generators: list[object] = ["default"]

            def register_generator_state(self, generator: object) -> None:
                self.generators.append(generator)

            def replay(self) -> None:
                raise NotImplementedError

        @contextlib.contextmanager
        def graph(made: Graph, pool: int = 0, stream: str = "", capture_error_mode: str = "global") -> Iterator[None]:
            before, fake.current, fake.valid = fake.current, stream, True
            fake.pools[pool] = fake.pools.get(pool, 0) + 1
            fake.under_way.append(pool)
            fake.capturing |= set(made.generators)
            try:
                yield
            finally:
                if not fake.valid:
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.under_way.remove(pool)
                fake.capturing -= set(made.generators)
                fake.current = before

        def end(device: int, pool: int) -> None:
            if pool not in fake.under_way:
                raise RuntimeError("not currently recording")
            fake.under_way.remove(pool)

        handles = itertools.count(1)
        replaced = {
            "device": lambda _: contextlib.nullcontext(),
            "graph_pool_handle": lambda: next(handles),
            "Stream": lambda _: Stream("inside"),
            "current_stream": lambda: Stream(fake.current),
            "set_stream": lambda chosen: setattr(fake, "current", str(chosen)),
            "stream": stream,
            "synchronize": lambda: None,
            "CUDAGraph": Graph,
            "graph": graph,
        }
        for name, stand_in in replaced.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda _, pool: fake.pools.update({pool: fake.pools[pool] - 1}), raising=False
        )
        monkeypatch.setattr("planner.execution.cuda_graph.torch.empty", lambda size, device: torch.zeros(size))


def test_after_a_capture_that_fails_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.warm_up(lambda: None)

    def synchronizes(_: list[Tensor]) -> list[Tensor]:
        fake.valid = False
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.capture(synchronizes, [], ["own"])  # type: ignore[list-item]
    assert (fake.current, fake.under_way, fake.capturing) == ("outside", [], set())
    assert fake.pools[recorder._pool] == 0

    def has_no_memory(_: list[Tensor]) -> list[Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    recorder.warm_up(lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.capture(has_no_memory, [], [])
    assert (fake.current, fake.under_way, fake.capturing) == ("outside", [], set())
    assert fake.pools[recorder._pool] == 1  # that of the graph, which gives it up when it is gone
    made, _ = recorder.capture(lambda given: [given[0] + 1], [torch.zeros(2)], [])
    assert made[0].tolist() == [1, 1]


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph in it would be destroyed, which CUDA allows in no capture."""
    FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.warm_up(lambda: None)
    destroyed: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            destroyed.append("graph")

    def makes_many_objects(given: list[Tensor]) -> list[Tensor]:
        Cycle()
        objects: list[list[None]] = [[] for _ in range(100_000)]  # the collector would have come long before these are all there
        assert len(objects) == 100_000 and not destroyed
        return given

    assert gc.isenabled()
    recorder.capture(makes_many_objects, [], [])
    assert gc.isenabled()

    def fails(_: list[Tensor]) -> list[Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.capture(fails, [], [])
    assert gc.isenabled()
    gc.collect()
    assert destroyed


def test_what_a_failed_warm_up_takes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))

    def fails() -> None:
        assert fake.current == "inside"
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.warm_up(fails)
    assert fake.current == "outside" and fake.waits == [("inside", "outside"), ("outside", "inside")]


class Philox:
    """The part of a CUDA generator that matters: a seed, an offset, a state that can be swapped."""

    device = torch.device("cpu")

    def __init__(self, _: object = None) -> None:
        self.at = {"seed": 0, "offset": 0}

    def get_state(self) -> Any:
        return dict(self.at)

    def set_state(self, state: dict[str, int]) -> None:
        self.at.update(state)

    def manual_seed(self, seed: int) -> None:
        self.at.update(seed=seed, offset=0)

    def get_offset(self) -> int:
        return self.at["offset"]

    def set_offset(self, offset: int) -> None:
        self.at["offset"] = offset

    def graphsafe_get_state(self) -> Any:
        other = Philox()
        other.at = self.at
        return other

    def graphsafe_set_state(self, other: Philox) -> None:
        self.at = other.at

    def draw(self, length: int) -> tuple[int, int]:
        drawn = self.at["seed"], self.at["offset"]
        self.at["offset"] += length
        return drawn


def test_draws_inside_a_graph_repeat_from_where_they_were_first_made() -> None:
    """Three draws of lengths 4, 8, 4, made again in the order 1, 2, 0, 1: draws 1 and 2 follow each other, as do 0 and 1."""
    lengths, order = (4, 8, 4), (1, 2, 0, 1)

    def code(generator: Philox, how: Any) -> tuple[list[Any], list[Any]]:
        states, first = [], []
        for length in lengths:
            states.append(how.first(generator))
            first.append(generator.draw(length))
        return first, [how.again(states[i], generator, lambda i=i: generator.draw(lengths[i])) for i in order]

    generator = Philox()
    generator.manual_seed(7)
    generator.draw(100)
    repeats = GraphRepeats(Philox)  # type: ignore[arg-type]
    first, again = code(generator, repeats.observing((generator,), [100]))  # type: ignore[arg-type]
    assert again == [first[i] for i in order] and generator.get_offset() == 116
    assert len(repeats.generators) == 2
    for seed, offset in ((7, 116), (9, 40)):
        generator.manual_seed(seed)
        generator.set_offset(offset)
        repeats.seek([(seed, offset)])
        first, again = code(generator, repeats.recording())
        assert first == [(seed, offset), (seed, offset + 4), (seed, offset + 12)]
        assert again == [first[i] for i in order]
        assert generator.get_offset() == offset + 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_on_cuda_trains_as_without_graphs(budget: float) -> None:
    pytest.importorskip("ortools", reason="needs a solver")
    torch.manual_seed(0)
    modules: list[PlannedModule] = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = Net().cuda()
        found = plan(model, budget, inputs=tuple(t.cuda() for t in next(batches(1))))
        modules.append(found.module(cuda_graph=graph))
    ends = []
    for module in modules:
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for at, batch in enumerate(batches(6)):
            if at % 2 == 0:
                optimizer.zero_grad()
            loss = module(*(t.cuda() for t in batch))
            loss.backward()
            losses.append(loss.item())
            if at % 2:
                optimizer.step()
        ends.append((losses, state(module), torch.cuda.get_rng_state()))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])
