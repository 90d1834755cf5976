"""Loops of one's own whose model is divided into stages: `step` runs torch's schedule, all else is as in other loops."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from api_schemas import Layout
from worker.mesh import Axis
from worker.models.model import Part
from worker.optim import LowBitOptimizer
from worker.optim.shards import check_unused
from worker.parallel.axes import Axes
from worker.parallel.data_parallel import broadcast_parameters
from worker.parallel.degrees import Degrees, check_level
from worker.parallel.draws import OwnDraws
from worker.parallel.own_loop import LossFunction, OwnLoop, broadcast_masters
from worker.parallel.pipeline import Border
from worker.parallel.plans import Plan, held_part
from worker.parallel.staged import StagedParallel
from worker.parallel.stages import split
from worker.parallel.staging import FamilyStaging, Inputs, Staging, staging_of
from worker.parallel.tensor import cut_model
from worker.prepare import share_rounding
from worker.saved_activations import SavingForward
from worker.savings import LaterHead


class StagedLoop(OwnLoop, StagedParallel):
    """One rank's stages, and their optimizer, in a loop of one's own."""

    has_sharded_logits = False
    """Whether the ranks of a tensor axis each have the logits of some tokens of the vocabulary."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parts = self.stages.parts.values()
        self.is_first_stage, self.is_last_stage = any(part.is_first for part in parts), any(part.is_last for part in parts)
        self._found: tuple[Any, dict[int, Border]] | None = None
        self._has_passed = self._is_finished = False
        self.model.register_forward_pre_hook(self._check_call, prepend=True)

    @property
    def schedule(self) -> Schedule1F1B | ScheduleInterleaved1F1B | None:
        """torch's schedule of the newest step; None before the first one."""
        return self.pipeline.schedule

    def step(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Run the passes of a batch through all stages; returns None on ranks without the last one. See `OwnLoop.step`."""
        batches = self.micro_batches(inputs, targets, loss_fn)
        if self._is_finished:
            raise RuntimeError(
                "step was called after gradients were clipped or exchanged; allowed: optimizer.step() or optimizer.zero_grad() "
                "in between. Call it before clip_grad_norm_."
            )
        divisors, borders = self._divisors(batches, loss_fn), self._borders(batches[0][0])

        def compute(index: int, part: Part, hidden: Tensor | None) -> Tensor:
            output = self._pass(part, hidden, *batches[index], loss_fn)
            return output / divisors[index] if part.is_last else output

        self._has_passed = True
        with self.no_sync(), torch.enable_grad():
            loss = self.pipeline.run(compute, len(batches), borders)
        return loss if self.is_last_stage else None

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Return the mean loss of a batch, as `OwnLoop.evaluate` does; None on ranks without the last stage."""
        self._check(inputs, targets, loss_fn)
        return self.pipeline.pass_once(lambda part, hidden: self._pass(part, hidden, inputs, targets, loss_fn))[0]

    def _pass(
        self, part: Part, hidden: Tensor | None, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None
    ) -> Tensor:
        """What a stage returns; the loss from the last one."""
        staging = self.stages.staging
        if part.is_last and isinstance(inputs, Mapping) and loss_fn is None:
            return staging.loss(part, inputs, hidden).loss
        output = staging.output(part, inputs, hidden)
        return loss_fn(output, targets) if part.is_last and loss_fn is not None and targets is not None else output

    def _borders(self, inputs: Inputs) -> dict[int, Border]:
        """What travels for a micro-batch: known of our models, and found by a pass without gradients for others."""
        if self.stages.staging.hidden_shape(inputs) is not None:
            return self.pipeline.borders(inputs)
        assert isinstance(inputs, Tensor)
        key = inputs.shape, inputs.dtype, torch.is_autocast_enabled(inputs.device.type)
        if self._found is None or self._found[0] != key:
            modes = {module: module.training for module in self.model.modules()}
            self.model.eval()
            try:
                _, borders = self.pipeline.pass_once(lambda part, hidden: self.stages.staging.output(part, inputs, hidden))
            finally:
                for module, is_training in modes.items():
                    module.training = is_training
            self._found = key, borders
        return self._found[1]

    def _check(self, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None) -> int:
        if self.has_sharded_logits and loss_fn is not None:
            raise ValueError(
                "got loss_fn and the ranks of the tensor degree each have the logits of some tokens of the vocabulary; "
                "allowed: the model's own loss. Give a batch of tensors by name without loss_fn, or a plan without the head."
            )
        return super()._check(inputs, targets, loss_fn)

    def _check_call(self, _model: nn.Module, _arguments: Any) -> None:
        if not self.stages.staging.is_running:
            raise RuntimeError(
                f"this rank holds {len(self.stages.parts)} of {self.pipeline.layout.num_stages} stages of the model; allowed: "
                "Parallel.step and Parallel.evaluate, which all ranks of the pipeline call together. Call one of them."
            )

    def _after_step(self, *step: Any) -> None:
        self._is_finished = False
        super()._after_step(*step)

    def _zero_grad(self, *arguments: Any, **options: Any) -> None:
        self._has_passed = self._is_finished = False
        super()._zero_grad(*arguments, **options)

    def _finish(self) -> None:
        """Add up and exchange gradients, once for each step of the optimizer: the schedule has run all backward passes."""
        if self._is_finished:
            return
        if self._has_passed:
            self.stages.add_tied_gradients()
        self.gradients.finish()
        self._has_passed, self._is_finished = False, True


def start_staged_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    axes: Axes,
    zero_stage: int,
    wide_dtype: torch.dtype,
    plan: Plan,
    degrees: Degrees,
) -> StagedLoop:
    """Let this rank keep its stages of a model and of its optimizer. Raises ValueError for what cannot be divided."""
    layout = Layout(axes.world.size, axes.tensor.size, axes.pipeline.size, stages_per_rank=degrees["stages_per_rank"])
    staging = staging_of(model, degrees.get("blocks"))
    _check_staging(staging, optimizer, layout, degrees)
    broadcast_parameters(model, axes.world)
    broadcast_masters(optimizer, axes)
    share_rounding(model, axes.replicas.rank, axes.replicas.size)
    stages = split(staging, optimizer, layout, axes.pipeline)
    whole, parts = list(model.parameters()), list(stages.parts.values())
    shards = cut_model(model, optimizer, axes, held_part(plan, model), sequence=degrees["sequence"], parts=parts)
    stages.follow(dict(zip(whole, model.parameters(), strict=True)))
    loop = StagedLoop(model, optimizer, axes, stages, zero_stage=zero_stage, wide_dtype=wide_dtype, shards=shards)
    loop.has_sharded_logits = "head" in plan.values()
    number, size = axes.pipeline.rank * axes.replicas.size + axes.replicas.rank, axes.pipeline.size * axes.replicas.size
    OwnDraws(Axis("draws", size, number, axes.world.device)).around(model)
    loop.hook(degrees["micro_batches"])
    return loop


def _check_staging(staging: Staging, optimizer: torch.optim.Optimizer, layout: Layout, degrees: Degrees) -> None:
    """Raise ValueError for a model or an optimizer that cannot be divided into these stages."""
    model: nn.Module = staging.model
    check_unused(optimizer)
    check_level(model)
    if len(staging.blocks) < layout.num_stages:
        raise ValueError(
            f"the model has {len(staging.blocks)} blocks and the pipeline {layout.num_stages} stages; allowed: at least one "
            "block for each stage. Lower pipeline or stages_per_rank, or take a deeper model."
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            "the model, or a part of it, is compiled; allowed with pipeline: models that are not, since a stage's compiled "
            "blocks have not been proven. Leave compile out."
        )
    kinds = {type(vars(module).get("forward")) for module in model.modules()}
    is_released = isinstance(optimizer, LowBitOptimizer) and (optimizer.released or optimizer.host_states)
    if is_released or kinds & {LaterHead, SavingForward}:
        raise ValueError(
            "the model or its optimizer saves memory by fuse_loss, keep_activations_in_fp8, release_gradients or "
            "offload_optimizer; allowed with pipeline: none of them, which have not been proven for stages. Leave it out."
        )
    if degrees["sequence"] and not isinstance(staging, FamilyStaging):
        raise ValueError(
            f"sequence is set and the model a {type(model).__name__}; allowed with pipeline: a gpt or llama of ours. Leave "
            "sequence out."
        )
