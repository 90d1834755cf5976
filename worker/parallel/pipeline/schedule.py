"""The passes of one step through the stages of a pipeline, by torch's schedules (`torch.distributed.pipelining`).

Each rank reads the micro-batches of its data rank; only hidden states and their gradients travel. Each stage accumulates in the
order of the micro-batches, as one process does, so gradients, rounded or not, have one process's bits. Gradients are
exchanged over the data axis after the last micro-batch. An evaluation passes batches of any shape from stage to stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.operand import OperandScaling
from octet.worker.kernels.torch_private import keeping_versions
from octet.worker.mesh.neighbours import ForeignWaits, count_sent, receive, receive_described, send, send_described
from octet.worker.metrics.activations import activations_counted_once
from octet.worker.metrics.table import Metrics
from octet.worker.models.model import Losses, Part
from octet.worker.parallel.batches import Inputs
from octet.worker.parallel.pipeline.stage import Stages

Batch = Mapping[str, Tensor]
Compute = Callable[[int, Part, Tensor | None], Tensor]
"""A stage's pass of a micro-batch, by its number, with what the stage before returned. The last stage returns its share of the
loss ()."""


class Border(NamedTuple):
    """The tensor that travels from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineRun:
    """One rank's part in the passes of a model that is divided into stages."""

    def __init__(self, stages: Stages, token_shares: int) -> None:
        """token_shares: shares into which the tokens of hidden states are divided; each tensor rank sends its own."""
        self.token_shares = token_shares
        self.stages, self.split, self.axis, self.layout = stages, stages.split, stages.pipeline, stages.layout
        self.pass_of: Compute
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None
        """torch's schedule of the newest step."""
        self.has_passed = False
        """True while gradients of passes have not been completed (`PipelinedModel.before_exchange`)."""
        scalings = [module for module in stages.split.model.modules() if isinstance(module, OperandScaling)]
        self._remembered = tuple(buffer for scaling in scalings for buffer in scaling.buffers())
        self._half_layers = [layer for layer in stages.split.model.modules() if isinstance(layer, HalfLinear)]
        self._waits = ForeignWaits(self.axis, "pipeline schedule")
        self._key: tuple[int, Mapping[int, Border]] | None = None

    def forward_backward(self, batches: Sequence[Batch], divisors: Sequence[float], metrics: Metrics) -> Tensor:
        """Accumulate the gradients of this rank's stages. Returns the sum of the losses, fp32 (): zero outside the last stage.

        batches: the micro-batches, all of one shape. divisors: of their losses. metrics: get the bytes of saved activations.
        """

        def compute(index: int, part: Part, hidden_BTD: Tensor | None) -> Tensor:
            with activations_counted_once(self.split.model, metrics):
                if part.is_last:
                    return self.split.loss(part, batches[index], hidden_BTD).loss / divisors[index]
                return self.split.output(part, batches[index], hidden_BTD)

        return self.run(compute, len(batches), self.borders(batches[0]))

    def run(self, compute: Compute, num_micro_batches: int, borders: Mapping[int, Border]) -> Tensor:
        """Run a step's passes, forward and backward. Returns the sum of the losses, fp32 (): zero outside the last stage.

        borders: of this rank's stages, each by the number of the stage that receives.
        """
        if self._key != (num_micro_batches, borders):
            self.schedule, self._key = self._make_schedule(num_micro_batches, borders), (num_micro_batches, borders)
        assert self.schedule is not None
        losses: list[Tensor] = []
        for layer in self._half_layers:  # else each micro-batch in flight would keep the stage's weights in 16 bits
            layer.share_cast()
        self.pass_of, self.has_passed = compute, True
        try:
            with self._waits.waiting():
                self.schedule.step(target=torch.zeros(num_micro_batches), losses=losses, return_outputs=False)
        finally:
            del self.pass_of
            for layer in self._half_layers:
                layer.drop_cast()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.axis.device)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Losses:
        """Return the losses of an evaluation batch in the last stage. Elsewhere all are zero, of no targets.

        The ranks of the pipeline call it together, with the same batch.
        """
        zero = torch.zeros((), device=self.axis.device)
        losses = Losses(zero, 0, dict.fromkeys(self.split.model.sizes.metrics, zero))

        def compute(part: Part, hidden_BTD: Tensor | None) -> Tensor:
            nonlocal losses
            if not part.is_last:
                return self.split.output(part, batch, hidden_BTD)
            losses = self.split.loss(part, batch, hidden_BTD)
            return losses.loss

        self.pass_once(compute, self.borders(batch))
        return losses

    @torch.no_grad()
    def pass_once(
        self, compute: Callable[[Part, Tensor | None], Tensor], borders: Mapping[int, Border] | None = None
    ) -> tuple[Tensor | None, dict[int, Border]]:
        """Pass a batch of any shape from stage to stage. Returns the last stage's result, and this rank's borders.

        borders: where they are known; else each rank sends a description ahead, for which the host waits.

        The ranks of the pipeline call it together. Raises ValueError for a stage that does not return one tensor of floats.
        """
        seen: dict[int, Border] = {}
        size, rank = self.axis.size, self.axis.rank
        for stage, part in self.stages.parts.items():
            hidden = None
            if not part.is_first:
                source = (rank - 1) % size
                if borders is None:
                    hidden = receive_described(self.axis, source)
                else:
                    shape, dtype = borders[stage]
                    hidden = receive(self.axis, torch.empty(shape, dtype=dtype, device=self.axis.device), source)
                seen[stage] = Border(tuple(hidden.shape), hidden.dtype)
            output = compute(part, hidden)
            if part.is_last:
                return output, seen
            _check_output(output, stage)
            if borders is None:
                send_described(self.axis, output, (rank + 1) % size)
            else:
                send(self.axis, output, (rank + 1) % size)
            seen[stage + 1] = Border(tuple(output.shape), output.dtype)
        return None, seen

    def borders(self, inputs: Inputs) -> dict[int, Border]:
        """This rank's borders for a micro-batch of a language model of ours."""
        shape = self.split.hidden_shape(inputs)
        assert shape is not None
        num_sequences, num_tokens, hidden_size = shape
        border = Border((num_sequences, num_tokens // self.token_shares, hidden_size), self.split.hidden_dtype)
        return dict.fromkeys((number for stage in self.stages.parts for number in (stage, stage + 1)), border)

    def _make_schedule(self, num_micro_batches: int, borders: Mapping[int, Border]) -> Schedule1F1B | ScheduleInterleaved1F1B:
        def example(border: Border) -> Tensor:
            return torch.empty(border.shape, dtype=border.dtype, device=self.axis.device).requires_grad_()

        loss = Border((), torch.float32)
        made: list[Any] = [
            _Stage(
                StagePasses(self, part),
                stage,
                self.layout.num_stages,
                self.axis.device,
                input_args=() if part.is_first else (example(borders[stage]),),
                output_args=(example(loss if part.is_last else borders[stage + 1]),),
                group=self.axis.group,
            )
            for stage, part in self.stages.parts.items()
        ]
        # The losses are divided before; torch would divide gradients by the micro-batches, which those in FP8 refuse.
        options: dict[str, Any] = {"loss_fn": _loss_of, "scale_grads": False}
        if self.layout.stages_per_rank == 1:
            return Schedule1F1B(made[0], num_micro_batches, **options)
        return ScheduleInterleaved1F1B(made, num_micro_batches, **options)

    @contextmanager
    def computing(self, around: AbstractContextManager[None]) -> Iterator[None]:
        """Around a pass of torch's, whose errors are this rank's own, and taken out of torch's RuntimeError around them."""
        # A compiled block that is computed again saves the samples and windows that its forward pass writes to. It does not
        # use what they held, but another micro-batch has written to them by then.
        with self._waits.computing(), around, keeping_versions(self._remembered):
            try:
                yield
            except Exception as error:
                if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise


class StagePasses(nn.Module):
    """One stage as a module for torch's schedule, which calls it for `micro_batch`. It registers no parameters."""

    def __init__(self, run: PipelineRun, part: Part) -> None:
        super().__init__()
        self.run, self.part = run, part
        self.micro_batch = 0

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        """Return the output for the next stage, or in the last stage the micro-batch's share of the loss ()."""
        return self.run.pass_of(self.micro_batch, self.part, hidden).contiguous()


class _Stage(PipelineStage):
    """torch's stage, with the micro-batch of each pass, this rank's waits and the bytes that it sends."""

    submod: StagePasses

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run, self.submod.micro_batch = self.submod.run, fwd_chunk_id
        with run.computing(run.split.within(self.submod.part)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        run = self.submod.run
        with run.computing(run.split.showing(self.submod.part)):
            super().backward_one_chunk(*args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[Any]) -> list[Any]:
        for operation in operations:
            count_sent(self.submod.run.axis, operation.tensor)
        return operations


def _loss_of(output: Tensor, _target: Tensor) -> Tensor:
    """Return the output: the last stage has computed the loss, so that no logits wait for the end of the step."""
    return output


def _check_output(output: Any, stage: int) -> None:
    """Raise ValueError for a stage that does not return one tensor of floating-point numbers."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return
    got = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ValueError(
        f"stage {stage} of the pipeline returned {got}; allowed between stages: one tensor of floating-point "
        "numbers. Return one, or divide the model elsewhere."
    )
