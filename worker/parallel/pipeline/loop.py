"""The passes of somebody's own loop whose model is divided into stages: `ParallelLoop.step` and `evaluate` run them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.models.model import Part
from octet.worker.parallel.batches import Inputs, LossFunction, MicroBatch
from octet.worker.parallel.pipeline.schedule import Border, PipelineRun


class PipelinePasses:
    """The passes through one rank's stages. Gradients are exchanged once, after those of all micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        run: PipelineRun,
        no_sync: Callable[[], AbstractContextManager[None]],
        has_sharded_logits: bool,
    ) -> None:
        """has_sharded_logits: the ranks of a tensor axis each have the logits of some tokens of the vocabulary."""
        self.model, self.pipeline, self.stages, self.split = model, run, run.stages, run.split
        self.no_sync, self.has_sharded_logits = no_sync, has_sharded_logits
        parts = self.stages.parts.values()
        self.is_first_stage, self.is_last_stage = any(part.is_first for part in parts), any(part.is_last for part in parts)
        self._seen: tuple[Any, dict[int, Border]] | None = None
        """Borders that a pass has shown, with the shape, dtype and autocast of its inputs."""
        self._is_exchanged = False
        model.register_forward_pre_hook(self._check_call, prepend=True)

    def run(self, batches: list[MicroBatch], divisors: list[float], loss_fn: LossFunction | None) -> Tensor:
        """Run the passes of all micro-batches. Returns the sum of the divided losses, fp32 (): zero outside the last stage."""
        if self._is_exchanged:
            raise RuntimeError(
                "step was called after gradients were clipped or exchanged; allowed: optimizer.step() or optimizer.zero_grad() "
                "in between. Call it before clip_grad_norm_."
            )
        borders = self._borders(batches[0][0])

        def compute(index: int, part: Part, hidden: Tensor | None) -> Tensor:
            output = self._pass(part, hidden, batches[index], loss_fn)
            return output / divisors[index] if part.is_last else output

        with self.no_sync(), torch.enable_grad():
            return self.pipeline.run(compute, len(batches), borders)

    def evaluate(self, batch: MicroBatch, loss_fn: LossFunction | None) -> Tensor | None:
        """Return the mean loss of a batch, fp32 (); None on ranks without the last stage."""
        return self.pipeline.pass_once(lambda part, hidden: self._pass(part, hidden, batch, loss_fn))[0]

    def check(self, loss_fn: LossFunction | None) -> None:
        """Raise ValueError for a loss of logits that no rank has."""
        if self.has_sharded_logits and loss_fn is not None:
            raise ValueError(
                "got loss_fn and the ranks of the tensor degree each have the logits of some tokens of the vocabulary; "
                "allowed: the model's own loss. Give a batch of tensors by name without loss_fn, or a plan without the head."
            )

    def needs_exchange(self) -> bool:
        """Return True once for each step of the optimizer: the schedule has run all backward passes."""
        return not self._is_exchanged

    def note_exchange(self) -> None:
        """Take note that gradients are means now."""
        self._is_exchanged = True

    def forget(self, *, drops_gradients: bool) -> None:
        """Begin a new step. drops_gradients: it was not taken."""
        self._is_exchanged = False
        if drops_gradients:
            self.pipeline.has_passed = False

    def _pass(self, part: Part, hidden: Tensor | None, batch: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
        """Return the output of a stage, and the loss from the last one."""
        inputs, targets = batch
        if part.is_last and isinstance(inputs, Mapping) and loss_fn is None:
            return self.split.loss(part, inputs, hidden).loss
        output = self.split.output(part, inputs, hidden)
        return loss_fn(output, targets) if part.is_last and loss_fn is not None and targets is not None else output

    def _borders(self, inputs: Inputs) -> dict[int, Border]:
        """Return the borders of a micro-batch: known for our models, and shown by a pass without gradients for others."""
        if self.split.hidden_shape(inputs) is not None:
            return self.pipeline.borders(inputs)
        assert isinstance(inputs, Tensor)
        key = inputs.shape, inputs.dtype, torch.is_autocast_enabled(inputs.device.type)
        if self._seen is None or self._seen[0] != key:
            modes = {module: module.training for module in self.model.modules()}
            self.model.eval()
            try:
                _, borders = self.pipeline.pass_once(lambda part, hidden: self.split.output(part, inputs, hidden))
            finally:
                for module, is_training in modes.items():
                    module.training = is_training
            self._seen = key, borders
        return self._seen[1]

    def _check_call(self, _model: nn.Module, _arguments: Any) -> None:
        if not self.split.is_running:
            raise RuntimeError(
                f"this rank holds {len(self.stages.parts)} of {self.pipeline.layout.num_stages} stages of the model; allowed: "
                "Parallel.step and Parallel.evaluate, which all ranks of the pipeline call together. Call one of them."
            )
