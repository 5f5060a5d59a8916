"""A planned step as two CUDA graphs, one for the call and one for its backward: replayed, so that no op costs host time. [torch]

A schedule is straight-line code of fixed shapes, so it can be captured. What a graph needs beyond that is here: inputs in
buffers whose addresses stay, draws that repeat without reading a generator on the host, and gradients whose memory the next
call writes to again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from graphs.capture import Step
from graphs.errors import InputError
from graphs.rewriting.nodes import read_by_place
from graphs.torch_private.running import end_failed_capture
from graphs.torch_private.tensors import extent, in_place, is_batched_gradient
from graphs.tracing.binding import looks_channels_last
from planner.execute import Kept, PlannedModule, as_captured, placeholders, unit_tangent
from planner.execution.draws import repeats_by
from planner.execution.graph_draws import GraphRepeats
from planner.execution.undo import Undo
from planner.process.pauses import no_collections
from planner.schedule import Schedule

Run = Callable[[list[Tensor]], list[Tensor]]  # empties the list it is given


class Recorder(Protocol):
    """What turns code into something that can be replayed."""

    def repeats(self) -> GraphRepeats | None:
        """What makes draws again while recording; None: code reads and sets the state of generators as it does without."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once as usual, where ``capture`` will run: libraries allocate and choose kernels at their first call."""

    def capture(
        self, run: Run, given: list[Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        """Record ``run(given)``: what it returned, in memory that stays, and what repeats it into that memory.

        generators  those it draws from beside the default one
        """

    def wait(self) -> None:
        """Until all that was replayed is done: the memory of what was recorded may be given up."""


class CudaRecorder:
    """Records CUDA graphs that run on the caller's stream; those recorded after one ``warm_up`` share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def repeats(self) -> GraphRepeats | None:
        return GraphRepeats()

    def warm_up(self, run: Callable[[], object]) -> None:
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are all gone takes no others
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    run()
            finally:  # where it fails, what it takes back is written there
                torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()

    def capture(
        self, run: Run, given: list[Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            graph = self._graph_of(generators)
            try:
                # The graph of a module dropped in a reference cycle may wait for the garbage collector, and where one is
                # destroyed during a capture, that fails. From torch 2.9 on PyTorch does not collect garbage before a capture.
                with (
                    no_collections(),
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    made = run(given)
            except BaseException:
                self._recover(outside, generators)
                raise
        return made, graph.replay

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _graph_of(self, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        return graph

    def _recover(self, outside: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
        """After a capture that failed: PyTorch stays on its stream and keeps its memory, and before torch 2.13 its generators
        believe to be in it, and refuse to draw, until another one ends."""
        end_failed_capture(self._device, self._pool)
        with (
            contextlib.suppress(RuntimeError),  # the device is lost
            no_collections(),
            torch.cuda.graph(self._graph_of(generators), stream=self._stream, capture_error_mode="thread_local"),
        ):
            torch.empty(1, device=self._device).zero_()
        torch.cuda.set_stream(outside)


@dataclass(slots=True)
class _Recorded:
    """Both graphs, and what lies where.

    bound              the tensors of the placeholders they were recorded with
    places             their addresses
    loss, gradients    what a replay writes
    old                buffers the call changes, each with the memory that has its old content after the call
    names, watched     what the backward reads and the caller can reach too
    forward, backward  replay one half
    repeats            the draws made again in each half
    """

    bound: list[Tensor]
    places: list[int]
    loss: Tensor
    old: list[tuple[Tensor, Tensor]]
    names: tuple[str, ...]
    watched: list[Tensor]
    gradients: list[Tensor]
    forward: Callable[[], object]
    backward: Callable[[], object]
    repeats: tuple[GraphRepeats | None, GraphRepeats | None]


class _Pending(Kept):
    """A call whose backward has not run; what it needs lies in the memory of the graphs.

    starts  seeds and offsets of the generators before the call
    """

    def __init__(self, names: tuple[str, ...], watched: list[Tensor], undo: Undo, starts: list[tuple[int, int]]) -> None:
        super().__init__([], names, watched, undo)
        self.starts = starts


class GraphedModule(PlannedModule):
    """``PlannedModule`` with each half of the schedule captured once as a CUDA graph and replayed from then on.

    The first call runs the step once as usual, takes it back, and captures; so does the first one after a parameter or buffer
    got other memory (``to``) or was replaced (also by one in the same memory). The answers are those of the module without
    graphs, draws included. What differs:

    - Inputs are copied into ``static_inputs``, buffers that stay. They are the inputs the plan counts; the caller's own copies
      come on top, unless he writes his batches into ``static_inputs`` and calls with those.
    - Beside the plan there are 1 KiB (the loss and its gradient, once more each) and, for each run of draws that is made again,
      what PyTorch keeps of a generator on the device, another KiB.
    - All memory of the step stays with the module (``release`` gives it up), inside of a pool no other code can use.
    - Gradients lie in that memory: those in ``.grad`` are moved out of it by the next call (gradient accumulation), at the cost
      of a copy; references to them kept elsewhere are overwritten.
    - One step at a time: after a second call the first one's loss has no backward any more (InputError).

    recorder  what captures; default: CUDA graphs

    Raises InputError where the step is not on a CUDA device or cannot be captured, and as PlannedModule does.
    """

    def __init__(self, step: Step, schedule: Schedule, budget_bytes: int, *, recorder: Recorder | None = None) -> None:
        self._recorded: _Recorded | None = None
        self._pending: _Pending | None = None
        self._failed: str | None = None
        self._recorder = _cuda(step) if recorder is None else recorder
        if step.answers:
            raise InputError(
                f"{step.graph.name} asks its data, which takes the host, and a CUDA graph runs without it "
                f"({step.answers[0][1]}); {_PLAIN}"
            )
        acts = next((op.name for op in step.graph.ops if op.effect), None)
        if acts is not None:
            raise InputError(f"{acts} of {step.graph.name} has an outside effect, which a CUDA graph would not repeat; {_PLAIN}")
        super().__init__(step, schedule, budget_bytes)
        kinds = [source.kind for source in step.sources]
        self._inputs = [i for i, kind in enumerate(kinds) if kind == "input"]
        captured = [node.meta["val"] for node in placeholders(step)]
        begin = next((i for i in read_by_place(step.module.graph) if i in self._inputs and captured[i].storage_offset()), None)
        if begin is not None:
            raise InputError(
                f"{step.graph.name} reads {step.sources[begin].name} by its place in its storage (as_strided), and a copy "
                f"has none; {_PLAIN}"
            )
        self._strides = {i: captured[i].stride() for i in self._inputs}
        self._gaps = {i: length for i in self._inputs if (length := _length_with_gaps(captured[i])) is not None}
        self._stay = [i for i, kind in enumerate(kinds) if kind not in ("input", "tangent")]
        self._staying = operator.itemgetter(self._stay[0], *self._stay)  # of two or more it gives a tuple
        # What operators that are none of PyTorch's own may draw from on the host; see ``_warm_up``.
        self._on_host = tuple(each for each in self._generators if each.device.type != step.device.type)
        self._generators = tuple(each for each in self._generators if each.device.type == step.device.type)

    @property
    def static_inputs(self) -> tuple[Tensor, ...]:
        """The buffers the inputs are copied into, in the order of the flattened inputs; none before the first call."""
        if self._recorded is None:
            return ()
        pairs = zip(self._step.sources, self._recorded.bound, strict=True)
        return tuple(tensor for source, tensor in pairs if source.kind == "input")

    def release(self) -> None:
        """Give up the graphs and their memory; the next call captures again. Gradients in ``.grad`` are moved out of it first."""
        if self._recorded is not None:
            self._move_gradients(self._recorded, self._recorded.bound)
            # The allocator waits for the stream of the capture at most, and replays run on the caller's.
            self._recorder.wait()
            self._recorded = self._pending = None

    def _move_gradients(self, recorded: _Recorded, bound: list[Tensor]) -> None:
        """No ``.grad`` of these parameters may lie in memory the graphs write to."""
        ours: set[int] = set()
        for i in self._trained:
            parameter = bound[i]
            if parameter.grad is not None:
                ours = ours or {gradient.data_ptr() for gradient in recorded.gradients}
                if parameter.grad.data_ptr() in ours:
                    with torch.inference_mode(False):
                        parameter.grad = parameter.grad.detach().clone()

    def _run_forward(self, bound: list[Tensor], undo: Undo, check: Callable[[], None] | None = None) -> tuple[Tensor, Kept]:
        if self._step.reformatted is not None:
            self._check_formats(bound)
        ready = self._recorded is not None and self._is_recorded_with(self._recorded, bound)
        if check is not None and (self._pending is not None or not ready):
            check()  # a call that is refused leaves the one before its backward
            check = None
        if self._recorded is not None and not ready:
            self._move_gradients(self._recorded, bound)
            self.release()
        self._pending = None
        if self._recorded is None:
            with torch.inference_mode(False), torch.no_grad():  # what is recorded serves other calls as well
                self._recorded = self._record(bound)
        recorded = self._recorded
        self._move_gradients(recorded, recorded.bound)
        with torch.no_grad():
            for i in self._inputs:
                if bound[i].data_ptr() != recorded.bound[i].data_ptr():
                    self._in_memory(i, recorded.bound[i]).copy_(self._in_memory(i, bound[i]), non_blocking=True)
            starts = []
            if recorded.repeats[0] is not None:
                starts = [(generator.initial_seed(), generator.get_offset()) for generator in self._generators]
                recorded.repeats[0].seek(starts)
            recorded.forward()
            for buffer, old in recorded.old:
                undo.wrote(buffer, old)
            if check is not None:
                check()  # beside the device, which has begun; else buffers get their old content back
            undo.seal()
            loss = recorded.loss.clone()
        self._pending = _Pending(recorded.names, recorded.watched, undo, starts)
        return loss, self._pending

    def _is_recorded_with(self, recorded: _Recorded, bound: list[Tensor]) -> bool:
        """Whether parameters, buffers and constants are those that the graphs were recorded with, and where they were. Others in
        the same memory have gradients and versions of their own."""
        return all(map(operator.is_, self._staying(bound), self._staying(recorded.bound))) and in_place(
            bound, recorded.places, self._stay
        )

    def _check_formats(self, bound: list[Tensor]) -> None:
        """Refuse inputs of another memory format: the buffers that they are copied into have the captured one."""
        for i in self._inputs:
            shape, now, then = bound[i].shape, bound[i].stride(), self._strides[i]
            if looks_channels_last(shape, now) != looks_channels_last(shape, then):
                raise InputError(f"{self._step.reformatted}; or {_PLAIN}")

    def _in_memory(self, i: int, tensor: Tensor) -> Tensor:
        """An input as it lies in memory, with what is in its gaps."""
        length = self._gaps.get(i)
        return tensor if length is None else tensor.as_strided((length,), (1,))

    def _static(self, i: int, tensor: Tensor) -> Tensor:
        """A buffer for an input, laid out as it is."""
        copy = self._in_memory(i, tensor).clone()
        return copy.as_strided(tensor.shape, tensor.stride()) if i in self._gaps else copy

    def _run_backward(self, kept: Kept, tangent: Tensor) -> list[Tensor]:
        recorded = self._recorded
        if not isinstance(kept, _Pending) or kept is not self._pending or recorded is None:
            raise InputError(
                "the values this backward needs are gone: a later call has taken their memory. A module with CUDA graphs holds "
                f"one step at a time: call backward before the next call, or {_PLAIN}"
            )
        if is_batched_gradient(tangent):
            raise InputError(f"a CUDA graph makes the gradients of one loss: with is_grads_batched=True, {_PLAIN}")
        self._pending = None
        kept.release()
        with torch.no_grad():
            for i in self._tangents:
                recorded.bound[i].copy_(tangent)
            if recorded.repeats[1] is not None:
                recorded.repeats[1].seek(kept.starts)
            recorded.backward()
            # New tensor objects on the same memory: autograd puts these into ``.grad`` without a copy.
            return [gradient.detach() for gradient in recorded.gradients]

    def _record(self, bound: list[Tensor]) -> _Recorded:
        """Run the step once, take it back, capture it."""
        if self._failed is not None:
            raise InputError(self._failed)
        static = list(bound)
        with torch.no_grad():
            for i, source in enumerate(self._step.sources):
                if source.kind == "input":
                    static[i] = self._static(i, bound[i])
                elif source.kind == "tangent":
                    static[i] = cast(Tensor, unit_tangent(self._step))
        repeats = self._recorder.repeats(), self._recorder.repeats()
        try:
            self._recorder.warm_up(lambda: self._warm_up(static, repeats))
            return self._capture(static, repeats)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what torch says of anything that cannot be captured
            # Ending a capture that has failed raises once more.
            reason = str(error.__context__ if isinstance(error.__context__, RuntimeError) else error).partition("\n")[0]
            self._failed = f"{self._step.graph.name} cannot be captured as a CUDA graph: {reason}; {_PLAIN}"
            raise InputError(self._failed) from error

    def _warm_up(self, static: list[Tensor], repeats: tuple[GraphRepeats | None, GraphRepeats | None]) -> None:
        first, second = repeats
        offsets = [0 if first is None else generator.get_offset() for generator in self._generators]
        undo = Undo((*self._generators, *self._on_host))
        before = [generator.get_state() for generator in self._on_host]
        try:
            with repeats_by(first.observing(self._generators, offsets) if first is not None else None):
                loss, kept = super()._run_forward(static, undo)
            with repeats_by(second.observing(self._generators, offsets) if second is not None else None):
                super()._run_backward(kept, torch.ones_like(loss))
            if not all(map(torch.equal, before, [generator.get_state() for generator in self._on_host])):
                raise RuntimeError("an operator of it draws on the host, and every replay would repeat that draw")
        finally:
            undo.undo()

    def _capture(self, static: list[Tensor], repeats: tuple[GraphRepeats | None, GraphRepeats | None]) -> _Recorded:
        run_forward, halves = super()._run_forward, self._halves
        buffers: list[Tensor] = []

        def forward(given: list[Tensor]) -> list[Tensor]:
            undo = Undo(())  # nobody may look at a generator during a capture
            with repeats_by(repeats[0].recording() if repeats[0] is not None else None):
                loss, kept = run_forward(given, undo)
            buffers[:] = [buffer for buffer, _ in undo.written]
            return [loss, *kept.given, *(old for _, old in undo.written)]

        def backward(given: list[Tensor]) -> list[Tensor]:
            with repeats_by(repeats[1].recording() if repeats[1] is not None else None), as_captured(self._step):
                gradients: list[Tensor] = halves.backward.forward(given)
                return gradients

        made, replay_forward = self._recorder.capture(forward, list(static), self._drawn_from(repeats[0]))
        old = list(zip(buffers, made[len(made) - len(buffers) :], strict=True))
        loss, *given = made[: len(made) - len(buffers)]
        names, places = self._watched
        watched = [given[i] for i in places]
        if halves.tangent_at is not None:
            given[halves.tangent_at] = static[self._tangents[0]]
        del made
        gradients, replay_backward = self._recorder.capture(backward, given, self._drawn_from(repeats[1]))
        addresses = [tensor.data_ptr() for tensor in static]
        return _Recorded(static, addresses, loss, old, names, watched, gradients, replay_forward, replay_backward, repeats)

    def _drawn_from(self, repeats: GraphRepeats | None) -> list[torch.Generator]:
        """The generators a half draws from."""
        return [*self._generators, *(repeats.generators if repeats is not None else ())]


def _length_with_gaps(tensor: Tensor) -> int | None:
    """Elements from the first to the last of a tensor with gaps in memory, or whose places share it; None of others."""
    if not tensor.numel() or torch.empty_like(tensor).stride() == tensor.stride():
        return None
    return extent(tensor.shape, tensor.stride())


def _cuda(step: Step) -> Recorder:
    if step.device.type != "cuda":
        raise InputError(f"CUDA graphs need a CUDA device, and {step.graph.name} was captured on {step.device}; {_PLAIN}")
    return CudaRecorder(step.device)


_PLAIN = "use module() without cuda_graph"
