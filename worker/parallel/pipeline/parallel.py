"""Pipeline parallelism: each rank of the pipeline axis holds stages of the model, and passes micro-batches on.

`PipelineParallel` divides a model, `PipelinedModel` is its share of a step: gradients of tied weights, norms, checkpoints.
A checkpoint is that of the model without stages (`held_part.py`).

The other modules: `split.py` has the modules of each stage and calls one stage, `stage.py` one rank's stages, `schedule.py` the
passes of a step by torch's schedules, `loop.py` the passes of somebody's own loop.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octet.worker.common.wrap import wrappers_of
from octet.worker.fp8.convert import ConversionReport
from octet.worker.mesh import Axes
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.sharding import check_unused
from octet.worker.parallel.held_part import in_pieces, joined_over
from octet.worker.parallel.pipeline.split import FamilySplit, split_of
from octet.worker.parallel.pipeline.stage import Stages, keep_stages
from octet.worker.parallel.strategy import DividedModel, Division, Strategy, check_compiled, check_rules
from octet.worker.prepare.memory_options import DeferredHead
from octet.worker.prepare.saved_activations import SavingForward

if TYPE_CHECKING:
    from octet.worker.parallel.pipeline.schedule import PipelineRun


class PipelineParallel(Strategy):
    """Ranks hold consecutive blocks of the model, one run of them or several."""

    axis = "pipeline"

    def check(self, division: Division) -> None:
        """Refuse models and optimizers that have not been proven in stages."""
        model, layout = division.model, division.axes.layout
        split = split_of(model, division.blocks)
        is_ours = isinstance(split, FamilySplit)
        check_unused(division.optimizer)
        check_level(model)
        if len(split.blocks) < layout.num_stages:
            raise ValueError(
                f"the model has {len(split.blocks)} blocks and the pipeline {layout.num_stages} stages; allowed: at least one "
                "block for each stage. Lower pipeline or stages_per_rank, or take a deeper model."
            )
        check_compiled(model, "pipeline", allows_blocks=is_ours)
        _check_memory_options(model, division.optimizer)
        if division.sequence and not is_ours:
            raise ValueError(
                f"sequence is set and the model a {type(model).__name__}; allowed with pipeline: a gpt or llama of ours. Leave "
                "sequence out."
            )

    def apply(self, division: Division) -> None:
        """Keep this rank's stages of the model."""
        from octet.worker.parallel.pipeline.schedule import PipelineRun  # loads torch's pipelining, which takes a second

        axes = division.axes
        stages = keep_stages(split_of(division.model, division.blocks), division.optimizer, axes.layout, axes.pipeline)
        division.runs = list(stages.parts.values())
        run = PipelineRun(stages, axes.tensor.size if division.sequence else 1)
        division.parts.append(PipelinedModel(axes, stages, run))


class PipelinedModel(DividedModel):
    """One rank's stages of a model."""

    axis_name = "pipeline"

    def __init__(self, axes: Axes, stages: Stages, run: "PipelineRun") -> None:
        self.stages, self.run = stages, run
        self.clip_alone = stages.clip
        self._stage = axes.stage
        self._first_rank = axes.layout.group("stage", axes.world.rank)[0]

    def follow(self, replaced: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the shards of this rank's parameters."""
        self.stages.follow(replaced)

    def counts(self, parameter: Tensor) -> bool:
        """Return True but for the last rank's copy of a tied weight."""
        return self.stages.counts(parameter)

    def before_exchange(self) -> None:
        """Add up the gradients of tied weights, once after the passes of a step."""
        if self.run.has_passed:
            self.stages.add_tied_gradients()
        self.run.has_passed = False

    def mark(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts of the whole model and optimizer, with the places of what other ranks hold."""
        numbered = self.stages.held.numbered(optimizer_state)
        own = {
            kind: in_pieces(dict(held), self._stage, self._first_rank)
            for kind, held in (("model", model), ("state", numbered["state"]))
        }
        whole = joined_over(self.stages.pipeline, own)
        return whole["model"], numbered | {"state": whole["state"]}

    def own_part(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the part of whole state dicts that this rank's stages hold."""
        return self.stages.held.own_state(model, optimizer_state)


def check_level(model: nn.Module) -> None:
    """Raise ValueError for a model of a level that has not been proven in stages."""
    report = getattr(model, "octet_report", None)
    if isinstance(report, ConversionReport):
        check_rules({"pipeline": 2}, report.level)


def _check_memory_options(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for options that have not been proven in stages."""
    kinds = {type(wrapper) for module in model.modules() for wrapper in wrappers_of(module)}
    is_released = isinstance(optimizer, LowBitOptimizer) and (optimizer.released or optimizer.host_states)
    if is_released or kinds & {DeferredHead, SavingForward}:
        raise ValueError(
            "the model or its optimizer saves memory by fuse_loss, keep_activations_in_fp8, release_gradients or "
            "offload_optimizer; allowed with pipeline: none of them, which have not been proven for stages. Leave it out."
        )
