"""Record a step's work once and replay it: a micro-batch's forward and backward pass, and the optimizer's step.

Ranks record their collectives, too: the exchange of gradients with the step's last pass, so that nothing is under way between
two recordings, and the gathers of ZeRO in one of their own. All ranks record and replay in the same steps, as NCCL demands
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html): they agree on the samples that decide on
demotions. What a rank counts of its collectives, a replay counts again.

A replay repeats every launch with the numbers that the host gave when it was recorded. So what changes from step to step lies
on the device: samples and the loss divisor are copied into tensors that stay, the table of groups holds the learning rate,
kernels count their own draws, and torch's generator gives a replay the seed of the moment. What the host decides (whether a
step is sampled, which layers are demoted) selects the recording. On CUDA a recording is a CUDA graph. All share one memory
pool, since they run one after the other. Between steps no gradient exists in Python: it lies in the pool, where the next
replay writes it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octet.api_schemas import EventReport
from octet.api_schemas.rules.table import reason_against
from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.health import StepKeeper
from octet.worker.fp8.linear import Float8Linear
from octet.worker.kernels.held import holding
from octet.worker.mesh import Axes
from octet.worker.mesh.waits import DEVICE, Waits
from octet.worker.metrics.activations import activations_counted_once
from octet.worker.metrics.table import Metrics
from octet.worker.optim import LowBitOptimizer
from octet.worker.prepare.blocks import WARM_UP_STEPS

Work = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes samples and returns one number, fp32 ()."""
logger = logging.getLogger(__name__)

State = tuple[tuple[int, bool], ...]
"""The host's decisions for each FP8 layer: its fallback, and whether its operands are sampled."""


class Recorder(Protocol):
    """Runs work and remembers the launches."""

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which all steps run, recorded or not."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run work once. Returns its result and what runs it again, with the result in the same tensor."""

    def forget(self) -> None:
        """Release what recordings share. They are all dropped."""


class CudaRecorder:
    """Records CUDA graphs (torch.cuda.CUDAGraph) in one memory pool.

    All steps run in one stream that is not the default one: a capture may not depend on that, and autograd's nodes remember the
    stream in which they were made (https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs").
    """

    def __init__(self, device: torch.device, waits: Waits | None = None) -> None:
        """waits: of the rank, whose device may wait for other ranks before a capture begins."""
        self._waits = waits or Waits()
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Give the memory of dropped graphs back. The next ones get a new pool: torch does not open one again that was left."""
        self._wait()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run what is inside in the stream of the graphs, after all that was given to the present one."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture work, which runs nothing, and replay it. Other threads, which read batches and write checkpoints, go on."""
        graph = torch.cuda.CUDAGraph()
        self._wait()  # torch would do it itself, and nothing could say where this rank is
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"a step could not be recorded as a CUDA graph: {error}. Set training.cuda_graph to off, and please report it."
            ) from error
        graph.replay()
        return result, graph.replay

    def _wait(self) -> None:
        with self._waits.call("end of the work before a recording", DEVICE):
            torch.cuda.synchronize(self._stream.device)


class _Recording:
    """Work that was recorded: its inputs, its result, what it reads by address, and what it adds to counters."""

    def __init__(self, recorder: Recorder, work: Work, samples: Mapping[str, Tensor], counters: Sequence[Counter[Any]]) -> None:
        self.samples = {name: tensor.clone() for name, tensor in samples.items()}
        self._counters, before = counters, [counter.copy() for counter in counters]
        with holding() as self.held:
            self.result, self._replay = recorder.record(lambda: work(self.samples))
        self._counted = [counter - was for counter, was in zip(counters, before, strict=True)]

    def replay(self, samples: Mapping[str, Tensor]) -> None:
        for name, tensor in samples.items():
            kept = self.samples.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                was = "missing" if kept is None else f"{kept.dtype} {tuple(kept.shape)}"
                raise InvalidConfig(
                    f"{name!r} of a micro-batch is {tensor.dtype} {tuple(tensor.shape)}, and was {was} when the step was "
                    "recorded; allowed: one shape. Set training.cuda_graph to off."
                )
            kept.copy_(tensor, non_blocking=True)
        for counter, counted in zip(self._counters, self._counted, strict=True):
            counter.update(counted)
        self._replay()


class StepGraph:
    """Runs the parts of a job's steps by their names: as they are, or, with a recorder, recorded after a warm-up.

    A part is recorded in the second step that finds the layers in its state, so that kernels are compiled and loaded by then.
    A state that is new drops all recordings: they would hold their memory while it runs as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        health: StepKeeper | None = None,
        recorder: Recorder | None = None,
        reason: str | None = None,
        axes: Axes | None = None,
    ) -> None:
        """health: what runs after each step of the optimizer. reason: why there is no recorder. axes: of the ranks."""
        self.model, self.optimizer, self.health, self.recorder, self.reason = model, optimizer, health, recorder, reason
        self._has_ranks = axes is not None and axes.world.size > 1
        self._waits = Waits() if axes is None else axes.world.waits
        self._counters = [] if axes is None else axes.counters()
        self._layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
        self._recordings: dict[tuple[State, str], _Recording] = {}
        self._seen: set[State] = set()
        self._state: State = ()
        self._fallbacks: tuple[int, ...] = ()
        self._is_recorded = False
        self._num_steps, self._num_new = 0, 0
        self._divisor = torch.ones((), device=next(model.parameters()).device)

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which a job runs all of its steps."""
        return nullcontext() if self.recorder is None else self.recorder.stream()

    def close(self) -> None:
        """Drop all recordings. NCCL waits for that, without end, before it destroys a communicator that one of them uses."""
        self._recordings.clear()

    @property
    def num_warm_up_steps(self) -> int:
        """The steps of a start that take longer than the rest, with the one that is recorded; 0 without a recorder."""
        return 0 if self.recorder is None else WARM_UP_STEPS + 1

    def start_events(self) -> tuple[EventReport, ...]:
        """Return what to report of a start: why a job on CUDA that did not ask for it runs without graphs."""
        if self.reason is None:
            return ()
        return (EventReport(type="training.not_graphed", message=f"steps run without CUDA graphs: {self.reason}"),)

    def begin_step(self) -> None:
        """Decide how the parts of this step run. The learning rate of the step is set."""
        if self.recorder is None:
            return
        self._fallbacks = self._present_fallbacks()
        are_sampled = (layer.input_scaling.is_sampled for layer in self._layers)
        self._state = tuple(zip(self._fallbacks, are_sampled, strict=True))
        self._is_recorded = self._state in self._seen and self._num_steps >= WARM_UP_STEPS
        if self._state not in self._seen:
            if self._recordings:
                self._recordings.clear()
                self.recorder.forget()
            self._seen.add(self._state)
        if self._is_recorded and isinstance(self.optimizer, LowBitOptimizer):
            self.optimizer.send_hyperparameters()

    def forward_backward(
        self,
        samples: Mapping[str, Tensor],
        divisor: float,
        metrics: Metrics,
        *,
        is_first: bool,
        context: AbstractContextManager[None] = nullcontext(),  # noqa: B008  it may be entered again
        exchange: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run a micro-batch forward and backward. Returns its loss over the divisor, fp32 (): its part of the step's loss.

        is_first: there are no gradients yet; a later one adds to them. context: in which it runs. exchange: what the ranks do
        with the gradients after the step's last pass. It is recorded with this one; without a recording, `exchange` runs it.
        """
        recorded_exchange = exchange if self._records_exchange else None

        def work(samples: Mapping[str, Tensor]) -> Tensor:
            with context:
                with activations_counted_once(self.model, metrics):
                    loss = self.model.loss(samples).loss / self._divisor  # type: ignore[operator]
                loss.backward()
            if recorded_exchange is not None:
                recorded_exchange()
            part: Tensor = loss.detach()
            return part

        self._divisor.fill_(divisor)  # a tensor with graphs and without: a GPU multiplies by the inverse of a number
        name = "first pass" if is_first else "further pass"
        return self._run(name if recorded_exchange is None else f"{name} with its exchange", work, samples)

    def exchange(self, exchange: Callable[[], None]) -> None:
        """Let the ranks exchange their gradients, unless the last pass was recorded with it."""
        if not self._records_exchange:
            exchange()

    def update(self, clip: Callable[[float], Tensor], max_norm: float) -> Tensor:
        """Clip the gradients to a norm of max_norm, and step the optimizer. Returns the norm before, fp32 ()."""

        def work(_samples: Mapping[str, Tensor]) -> Tensor:
            norm = clip(max_norm)
            self.optimizer.step()
            return norm

        health = self.health if self._is_recorded else None
        if health is None:
            return self._run("update", work)
        health.counts_steps = False
        try:
            norm = self._run("update", work)
        finally:
            health.counts_steps = True
        health.count_step()
        return norm

    def publish(self, publish: Callable[[], None]) -> None:
        """Give every rank the weights that the ranks have stepped (ZeRO).

        It is launched where the step has demoted a layer, whose residual the ranks put together then.
        """

        def work(_samples: Mapping[str, Tensor]) -> Tensor:
            publish()
            return self._divisor

        if self._is_recorded and self._present_fallbacks() == self._fallbacks:
            self._run("publishing", work)
        else:
            publish()

    def after_step(self) -> tuple[EventReport, ...]:
        """Return what to report of a step: that its parts were recorded."""
        self._num_steps, num_new, self._num_new = self._num_steps + 1, self._num_new, 0
        if not num_new:
            return ()
        message = f"step {self._num_steps} of this attempt was recorded as {num_new} CUDA graphs; steps like it replay them"
        return (EventReport(type="training.graphed", message=message, data={"graphs": num_new}),)

    def _run(self, name: str, work: Work, samples: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """Run a part of the step. Returns its result, which no later replay changes."""
        if self.recorder is None or not self._is_recorded:
            return work(samples)
        recording = self._recordings.get((self._state, name))
        if recording is None:
            recording = self._recordings[self._state, name] = _Recording(self.recorder, work, samples, self._counters)
            self._num_new += 1
        else:
            with self._waits.call(f"replay of the {name}", DEVICE):  # where the launches before it are too many
                recording.replay(samples)
        return recording.result.clone()

    @property
    def _records_exchange(self) -> bool:
        return self._is_recorded and self._has_ranks

    def _present_fallbacks(self) -> tuple[int, ...]:
        return tuple(int(layer.fallback) for layer in self._layers)


def step_graph_of(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    health: StepKeeper | None,
    device: torch.device,
    axes: Axes,
) -> StepGraph:
    """Make the graph of a job's steps. It records nothing where a rule, or a rank's optimizer, forbids it.

    All ranks call it together.
    """
    if device.type != "cuda" or config.training.cuda_graph == "off":
        logger.info(
            "steps run without CUDA graphs: the device is a %s, training.cuda_graph is %s",
            device.type,
            config.training.cuda_graph,
        )
        return StepGraph(model, optimizer, health, axes=axes)
    reason = reason_against("training.cuda_graph", config)
    (num_waiting,) = axes.world.sum(float(not _steps_by_kernels(optimizer)))  # all ranks record, or none
    if reason is None and num_waiting:
        reason = (
            "the host waits for the optimizer: it steps some parameters without its kernels, as those that are not contiguous"
        )
    return StepGraph(model, optimizer, health, CudaRecorder(device, axes.world.waits) if reason is None else None, reason, axes)


def _steps_by_kernels(optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(optimizer, LowBitOptimizer):
        return False
    return all(optimizer.is_fused(parameter) for group in optimizer.param_groups for parameter in group["params"])
