"""Pipeline parallelism: each rank of the pipeline axis holds stages of the model, and passes micro-batches on.

`PipelineParallel` divides a model, `PipelinedModel` is its share of a step: gradients of tied weights, norms, checkpoints.
A checkpoint has the names, numbers and whole tensors of the model without stages: the ranks describe to each other what each
holds, and any layout reads it.

The other modules: `split.py` has the modules of each stage and calls one stage, `stage.py` one rank's stages, `schedule.py` the
passes of a step by torch's schedules, `loop.py` the passes of somebody's own loop.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octet.worker.common.wrap import wrappers_of
from octet.worker.fp8.convert import ConversionReport
from octet.worker.mesh import Axes, Cut, SavedStates, TensorInPieces
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.sharding import check_unused
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
        groups = [
            group | {"params": list(range(first, first + size))}
            for group, first, size in zip(
                optimizer_state["param_groups"], self._first_numbers(), self.stages.num_in_groups, strict=True
            )
        ]
        numbers = [first + place for first, places in self._numbered_places() for place in places]
        own = {
            "model": self._in_pieces(dict(model)),
            "state": {numbers[number]: self._in_pieces(state) for number, state in optimizer_state["state"].items()},
        }
        whole: dict[str, dict[Any, Any]] = {"model": {}, "state": {}}
        for described in self.stages.pipeline.gather_texts(json.dumps(_described(own))):
            for kind, held in _read(json.loads(described)).items():
                whole[kind] |= held
        for kind, held in own.items():
            whole[kind] |= held
        return whole["model"], optimizer_state | {"state": whole["state"], "param_groups": groups}

    def own_part(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the part of whole state dicts that this rank's stages hold."""
        kept = {name: held for name, held in model.items() if not name.startswith(self.stages.absent)}
        groups = [
            group | {"params": [group["params"][place] for place in places]}
            for group, places in zip(optimizer_state["param_groups"], self.stages.places, strict=True)
        ]
        saved = optimizer_state["state"]
        keys = [key for group in groups for key in group["params"] if key in saved]
        states = saved.only(keys) if isinstance(saved, SavedStates) else {key: saved[key] for key in keys}
        return kept, optimizer_state | {"state": states, "param_groups": groups}

    def _first_numbers(self) -> list[int]:
        """Return the number of each whole group's first parameter."""
        return [sum(self.stages.num_in_groups[:index]) for index in range(len(self.stages.num_in_groups))]

    def _numbered_places(self) -> list[tuple[int, list[int]]]:
        return list(zip(self._first_numbers(), self.stages.places, strict=True))

    def _in_pieces(self, value: Any) -> Any:
        """Return the value with each tensor as a piece of the ranks that write it: the stage's first, or all that divide it."""
        if isinstance(value, TensorInPieces):
            return replace(value, first_rank=self._first_rank)
        if isinstance(value, Tensor):
            own = value.detach().reshape(-1)
            places = ((0, own.numel()),)
            return TensorInPieces(
                own if self._stage.is_first else own[:0], tuple(value.shape), places, first_rank=self._first_rank
            )
        if isinstance(value, dict):
            return {key: self._in_pieces(item) for key, item in value.items()}
        return value


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


def _described(value: Any) -> Any:
    """Return a tree of pieces as JSON, without their numbers."""
    if isinstance(value, TensorInPieces):
        cut = None if value.cut is None else asdict(value.cut)
        return {"piece": [value.shape, value.places, value.stride, cut, value.first_rank]}
    if isinstance(value, dict):
        return {"dict": [[key, _described(item)] for key, item in value.items()]}
    return {"value": value}


def _read(described: Any) -> Any:
    """Return the tree that `_described` has written; pieces hold no numbers."""
    ((kind, content),) = described.items()
    if kind == "piece":
        shape, places, stride, described_cut, first_rank = content
        cut = None if described_cut is None else Cut(**described_cut | {"shape": tuple(described_cut["shape"])})
        return TensorInPieces(
            torch.empty(0), tuple(shape), tuple((first, length) for first, length in places), stride, cut, first_rank
        )
    return {key: _read(item) for key, item in content} if kind == "dict" else content
