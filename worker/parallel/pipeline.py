"""The passes of one step through the stages of a pipeline, by torch's schedules (`torch.distributed.pipelining`).

Each rank reads the micro-batches of its data rank; only hidden states and their gradients travel. Each stage accumulates in the
order of the micro-batches, as one process does, so gradients, rounded or not, have one process's bits. Gradients are
exchanged over the data axis after the last micro-batch. An evaluation passes batches of any shape from stage to stage.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from api_schemas import Layout
from worker.mesh.neighbours import ForeignWaits, count_sent, receive, send
from worker.metrics.activations import activations_counted_once
from worker.metrics.table import Metrics
from worker.models.model import Losses, Part
from worker.parallel.stages import Stages

Batch = Mapping[str, Tensor]


class PipelineRun:
    """One rank's part in the passes of a model that is divided into stages."""

    def __init__(self, model: Any, stages: Stages, layout: Layout, token_shares: int) -> None:
        """token_shares: into how many shares of the tokens hidden states are divided; each tensor rank sends its own."""
        self.token_shares = token_shares
        self.model, self.stages, self.axis, self.layout = model, stages, stages.pipeline, layout
        self.hidden_size: int = model.sizes.hidden_size
        self.hidden_dtype: torch.dtype = model.residual_dtype
        self.batches: Sequence[Batch] = ()
        self.divisors: Sequence[float] = ()
        self.metrics = Metrics()
        self._waits = ForeignWaits(self.axis, "pipeline schedule")
        self._schedules: dict[tuple[int, tuple[int, ...]], Schedule1F1B | ScheduleInterleaved1F1B] = {}

    def forward_backward(self, batches: Sequence[Batch], divisors: Sequence[float], metrics: Metrics) -> Tensor:
        """Accumulate the gradients of this rank's stages. Returns the sum of the losses, fp32 (): zero outside the last stage.

        batches: the micro-batches, all of one shape. divisors: of their losses. metrics: told of the saved activations once.
        """
        self.batches, self.divisors, self.metrics = batches, divisors, metrics
        key = (len(batches), tuple(batches[0]["tokens"].shape))
        if key not in self._schedules:
            self._schedules = {key: self._make_schedule(*key)}
        losses: list[Tensor] = []
        with self._waits.waiting():
            self._schedules[key].step(target=torch.zeros(len(batches)), losses=losses, return_outputs=False)
        self.batches = ()
        self.stages.add_tied_gradients()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.axis.device)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Losses:
        """Return the losses of an evaluation batch in the last stage. Elsewhere all are zero, of no targets.

        The ranks of the pipeline call it together, with the same batch.
        """
        shape = self._hidden_shape(batch["tokens"].shape)
        size, rank = self.axis.size, self.axis.rank
        for part in self.stages.parts.values():
            hidden_BTD = None
            if not part.is_first:
                hidden_BTD = receive(self.axis, self._empty_hidden(shape), (rank - 1) % size)
            if part.is_last:
                found: Losses = self.model.loss(batch, part=part, hidden_BTD=hidden_BTD)
                return found
            hidden_BTD = self.model(batch["tokens"], batch.get("documents"), part=part, hidden_BTD=hidden_BTD)
            send(self.axis, hidden_BTD, (rank + 1) % size)
        zero = torch.zeros((), device=self.axis.device)
        return Losses(zero, 0, dict.fromkeys(self.model.sizes.metrics, zero))

    def _hidden_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape of what a rank sends of the hidden states of tokens of a shape, (B, T)."""
        num_sequences, num_tokens = shape
        return num_sequences, num_tokens // self.token_shares, self.hidden_size

    def _empty_hidden(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.hidden_dtype, device=self.axis.device)

    def _make_schedule(self, num_micro_batches: int, shape: Sequence[int]) -> Schedule1F1B | ScheduleInterleaved1F1B:
        hidden_BTD = self._empty_hidden(self._hidden_shape(shape)).requires_grad_()
        loss = torch.empty((), device=self.axis.device).requires_grad_()
        made: list[Any] = [
            _Stage(
                StagePasses(self, part),
                stage,
                self.layout.num_stages,
                self.axis.device,
                input_args=() if part.is_first else (hidden_BTD,),
                output_args=(loss if part.is_last else hidden_BTD,),
                group=self.axis._group,
            )
            for stage, part in self.stages.parts.items()
        ]
        # The losses are divided before; torch would divide gradients by the micro-batches, which those in FP8 refuse.
        options: dict[str, Any] = {"loss_fn": _loss_of, "scale_grads": False}
        if self.layout.stages_per_rank == 1:
            return Schedule1F1B(made[0], num_micro_batches, **options)
        return ScheduleInterleaved1F1B(made, num_micro_batches, **options)

    def compute(self, call: Callable[[], Any]) -> Any:
        """Run a pass of torch's, whose errors are this rank's own, and taken out of torch's RuntimeError around them."""
        with self._waits.computing():
            try:
                return call()
            except Exception as error:
                if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise


class StagePasses(nn.Module):
    """What torch's schedule calls: one stage, for the micro-batch that `micro_batch` says. It registers no parameters."""

    def __init__(self, run: PipelineRun, part: Part) -> None:
        super().__init__()
        self.run, self.part = run, part
        self.micro_batch = 0

    def forward(self, hidden_BTD: Tensor | None = None) -> Tensor:
        """Return the hidden state for the next stage (B, T, D), or in the last stage the micro-batch's share of the loss ()."""
        run, batch = self.run, self.run.batches[self.micro_batch]
        options: dict[Literal["part", "hidden_BTD"], Any] = {"part": self.part, "hidden_BTD": hidden_BTD}
        with activations_counted_once(run.model, run.metrics):
            if self.part.is_last:
                loss: Tensor = run.model.loss(batch, **options).loss / run.divisors[self.micro_batch]
                return loss
            output: Tensor = run.model(batch["tokens"], batch.get("documents"), **options)
            return output


class _Stage(PipelineStage):
    """torch's stage, which tells what this rank computes, for which micro-batch, and what it sends."""

    submod: StagePasses

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id
        forward = super().forward_one_chunk
        return self.submod.run.compute(lambda: forward(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        backward = super().backward_one_chunk
        self.submod.run.compute(lambda: backward(*args, **kwargs))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[Any]) -> list[Any]:
        for operation in operations:
            count_sent(self.submod.run.axis, operation.tensor)
        return operations


def _loss_of(output: Tensor, _target: Tensor) -> Tensor:
    """The last stage has computed the loss, so that no logits wait for the end of the step."""
    return output
