"""Online runs on real tensors: the same answer, the same decisions and the same bytes as the simulated run."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from graphs.capture import capture
from graphs.costs import roofline
from graphs.errors import BudgetExceeded, InputError, NoScheduleFound
from online import RunStatus, run
from online.engines.engine import Engine
from online.executor import Execution
from online.heuristics import HEURISTICS
from planner.bounds import least_bytes
from planner.measure import StorageMeter, measure
from planner.schedule import Compute, keep_all
from planner.simulate import simulate
from tests.test_execute import MODELS, Case, OddBuffers


@functools.cache
def priced(name: str) -> Case:
    case = Case(name)
    case.step = roofline(case.step)
    case.graph = case.step.graph
    return case


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = priced(request.param)
    found.prepare()
    yield found
    found.prepare()


@pytest.fixture
def mlp() -> Iterator[Case]:
    found = priced("mlp")
    found.prepare()
    yield found
    found.prepare()


def budgets(case: Case) -> list[int]:
    """From the keep-all peak down to what the largest op needs."""
    low, high = least_bytes(case.graph), simulate(case.graph, keep_all(case.graph)).peak_bytes
    return [high - (high - low) * part // 40 for part in range(41)]


@functools.cache
def tightest(case: Case, heuristic: str, *, reclaim: bool = False) -> int:
    """Smallest of ``budgets`` with which the simulated run completes. Feasibility need not be monotone, so all are tried."""
    return min(b for b in budgets(case) if run(case.graph, b, heuristic=heuristic, reclaim=reclaim, thrash_limit=4).completed)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_an_online_step_is_plain_pytorch_to_the_last_bit_and_byte(case: Case, heuristic: str) -> None:
    budget_bytes = tightest(case, heuristic)
    simulated = run(case.graph, budget_bytes, heuristic=heuristic)
    if heuristic in ("size", "random") and not simulated.counters.evictions:
        pytest.skip(f"{heuristic} runs {case.graph.name} only where nothing has to be evicted")
    assert simulated.counters.recomputations > 0

    def once() -> object:
        return run(case.step, budget_bytes, heuristic=heuristic, execute=True, inputs=case.inputs)

    measured = measure(once, case.step.device, case.graph.resident_bytes, prepare=case.prepare)
    done = measured.result
    assert done.outcome is not None  # type: ignore[attr-defined]
    case.check(done.outcome)  # type: ignore[attr-defined]
    assert done.schedule == simulated.schedule  # type: ignore[attr-defined]
    assert measured.peak_bytes == simulated.peak_bytes <= budget_bytes


@pytest.mark.parametrize("heuristic", ["coop", "dtr+arena"])
def test_address_budgets_hold_on_real_tensors(mlp: Case, heuristic: str) -> None:
    case = mlp
    high = 2 * simulate(case.graph, keep_all(case.graph)).peak_bytes
    low = least_bytes(case.graph)
    ways = [run(case.graph, low + (high - low) * part // 60, heuristic=heuristic) for part in range(61)]
    simulated = next(done for done in ways if done.completed)
    assert simulated.counters.evictions > 0 and simulated.addresses is not None
    budget_bytes = simulated.budget_bytes

    def once() -> object:
        return run(case.step, budget_bytes, heuristic=heuristic, execute=True, inputs=case.inputs)

    measured = measure(once, case.step.device, case.graph.resident_bytes, prepare=case.prepare)
    done = measured.result
    case.check(done.outcome)  # type: ignore[attr-defined]
    assert done.schedule == simulated.schedule  # type: ignore[attr-defined]
    assert measured.peak_bytes == simulated.peak_bytes <= simulated.addresses.reserved_bytes <= budget_bytes
    short = next(way for way in ways if way.status is RunStatus.OUT_OF_MEMORY)
    where = rf"does not fit in .* with the allocator {short.allocator}: no [\d,]+ bytes in a row can be made free; "
    with pytest.raises(NoScheduleFound, match=where):
        run(case.step, short.budget_bytes, heuristic=heuristic, execute=True, inputs=case.inputs)


def test_reclaim_changes_the_schedule_and_not_the_answer(case: Case) -> None:
    budget_bytes = tightest(case, "dtr", reclaim=True)
    done = run(case.step, budget_bytes, heuristic="dtr", reclaim=True, execute=True, inputs=case.inputs)
    assert done.outcome is not None
    case.check(done.outcome)


def test_dropout_runs_again_with_its_first_mask() -> None:
    case = priced("transformer")
    case.prepare()
    done = run(case.step, tightest(case, "lru"), heuristic="lru", execute=True, inputs=case.inputs)
    drawn = [step.op for step in done.schedule if isinstance(step, Compute) and case.graph.ops[step.op].random]
    assert len(drawn) > len(set(drawn)) > 1
    assert done.outcome is not None
    case.check(done.outcome)


def test_gradients_of_buffers_are_written_too() -> None:
    model, x = OddBuffers(), torch.randn(3, 4)
    step = capture(model, x)
    done = run(step, 10**6, execute=True, inputs=x)
    assert done.outcome is not None
    done.outcome.write(model)
    assert model.scale.grad is not None and model.scale.grad.any()


def test_written_results_are_those_of_a_training_step(case: Case) -> None:
    done = run(case.step, tightest(case, "dtr"), heuristic="dtr", execute=True, inputs=case.inputs)
    assert done.outcome is not None
    assert torch.equal(done.outcome.write(case.model), case.loss)
    case.check_model()
    gradients = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    done.outcome.write(case.model)  # gradients add up
    assert all(torch.equal(p.grad, 2 * gradients[n]) for n, p in case.model.named_parameters() if p.grad is not None)


def test_an_op_that_would_break_the_budget_does_not_run(case: Case) -> None:
    failing = [b for b in budgets(case) if run(case.graph, b, heuristic="lru").status is RunStatus.OUT_OF_MEMORY]
    if not failing:
        pytest.skip(f"{case.graph.name} completes wherever its largest op fits")
    before = torch.get_rng_state()
    simulated = run(case.graph, failing[0], heuristic="lru")
    assert simulated.failure is not None
    with Execution(case.step, case.inputs):
        pass  # makes the gradient of the loss, which stays with the step and is among what is resident
    with StorageMeter() as meter, pytest.raises(BudgetExceeded) as caught:
        run(case.step, failing[0], heuristic="lru", execute=True, inputs=case.inputs)
    assert case.graph.resident_bytes + meter.peak_bytes <= failing[0]
    assert (caught.value.op, caught.value.asked_bytes) == (simulated.failure.op, simulated.failure.asked_bytes)
    assert caught.value.budget_bytes == failing[0] < caught.value.asked_bytes
    assert simulated.failure.op in str(caught.value)
    assert "cannot be evicted now, the largest: " in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)  # and the step can be repeated
    assert all(p.grad is None for p in case.model.parameters())


def test_nothing_is_left_behind(mlp: Case) -> None:
    budget_bytes = tightest(mlp, "dtr")
    run(mlp.step, budget_bytes, heuristic="dtr", execute=True, inputs=mlp.inputs)
    with StorageMeter() as meter:
        done = run(mlp.step, budget_bytes, heuristic="dtr", execute=True, inputs=mlp.inputs)
        assert done.outcome is not None
        results = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(done.outcome)}
        assert meter.live_bytes == sum(results.values())
        del done
        assert meter.live_bytes == 0


def _tensors(outcome: object) -> list[Tensor]:
    return [outcome.loss, *outcome.gradients.values(), *outcome.buffers.values()]  # type: ignore[attr-defined]


def test_what_is_remembered_for_a_step_dies_with_it() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)), torch.randn(4, 8)
    step = capture(model, (x,), loss=lambda out: out.sum())
    assert run(step, 1.0, execute=True, inputs=(x,)).outcome is not None
    module = weakref.ref(step.module)
    del step
    gc.collect()
    assert module() is None


def test_thrashing_is_said(mlp: Case) -> None:
    with pytest.raises(NoScheduleFound, match=r"online lru needs more than 1 times the keep-all time of mlp in "):
        run(mlp.step, tightest(mlp, "lru"), heuristic="lru", thrash_limit=1, execute=True, inputs=mlp.inputs)


def test_executing_needs_inputs_of_the_captured_form(mlp: Case) -> None:
    with pytest.raises(InputError, match="executing mlp needs inputs="):
        run(mlp.step, 1.0, execute=True)
    with pytest.raises(InputError, match="shape"):
        run(mlp.step, 1.0, execute=True, inputs=(mlp.inputs[0][:5], mlp.inputs[1][:5]))


class Breaks(nn.Module):
    """Fails in the middle of a run where an input is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        hidden = torch.nn.functional.dropout(x @ self.weight, 0.5)
        return hidden.index_select(0, index).square().sum()


def test_a_failing_op_leaves_the_generators_as_they_were() -> None:
    good, bad = (torch.randn(3, 4), torch.tensor([0, 2])), (torch.randn(3, 4), torch.tensor([0, 9]))
    step = roofline(capture(Breaks(), good))
    before = torch.get_rng_state()
    with pytest.raises(IndexError):
        run(step, 1.0, execute=True, inputs=bad)
    assert torch.equal(torch.get_rng_state(), before)
    assert run(step, 1.0, execute=True, inputs=good).outcome is not None
    assert not torch.equal(torch.get_rng_state(), before)


def test_evicted_values_are_dropped_at_once(mlp: Case) -> None:
    """The engine's bytes and the live storages agree after every single op."""
    engine_bytes: list[int] = []
    live_bytes: list[int] = []

    class Watched(Execution):
        def compute(self, op: int) -> None:
            engine_bytes.append(engine.used_bytes)
            live_bytes.append(mlp.graph.resident_bytes + meter.live_bytes)
            super().compute(op)

    execution = Watched(mlp.step, mlp.inputs)
    engine = Engine(tightest(mlp, "dtr"), HEURISTICS["dtr"], driver=execution)
    from graphs.program import program_of

    with StorageMeter() as meter, execution:
        engine.play(program_of(mlp.graph))
    assert engine.counters.evictions > 0
    assert live_bytes == engine_bytes
