"""A model in stages: `Parallel` with norms, skipped steps and checkpoints over the pipeline axis.

A checkpoint has the names, numbers and whole tensors of the model without stages: the first rank is told which rank holds what,
and any layout reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.mesh import Axis, Cut, SavedStates, TensorInPieces
from worker.models.model import Losses
from worker.optim import LowBitOptimizer
from worker.parallel.axes import Axes
from worker.parallel.norm import clip_together
from worker.parallel.parallelize import Parallel
from worker.parallel.pipeline import PipelineRun
from worker.parallel.scales import all_finite_on
from worker.parallel.stages import Stages
from worker.parallel.tensor import TensorShards


class StagedParallel(Parallel):
    """One rank's stages and their optimizer. At stage 1 of ZeRO the data ranks divide each stage's states."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        axes: Axes,
        stages: Stages,
        *,
        zero_stage: int,
        wide_dtype: torch.dtype,
        shards: TensorShards,
    ) -> None:
        """shards: of the stages that this rank holds."""
        super().__init__(model, optimizer, axes, zero_stage=zero_stage, wide_dtype=wide_dtype, shards=shards)
        self.stages, self._world = stages, axes.world
        self.pipeline: PipelineRun = PipelineRun(stages, shards.token_shares)
        self._first_rank = stages.layout.group("stage", axes.world.rank)[0]
        if self._sharded is not None:
            self._sharded.whole, self._sharded.counts = axes.world, self._counts
        elif isinstance(optimizer, LowBitOptimizer):  # data ranks hold the same gradients; so do tensor ranks without shards
            optimizer.all_ranks_finite = partial(all_finite_on, axes.world if shards.cuts else stages.pipeline)

    def clip_grad_norm_(self, max_norm: float = torch.inf) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most max_norm. Returns the norm before, fp32 ()."""
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_(max_norm)
        if not self.shards.cuts:
            return self.stages.clip(max_norm)
        gradients = {parameter: parameter.grad for parameter in self.stages.numbers if parameter.grad is not None}
        return clip_together(gradients, max_norm, lambda held: self.data.is_first and self._counts(held), self._world)

    def _counts(self, parameter: Tensor) -> bool:
        """Whether this rank's copy counts where all ranks add up what they hold."""
        return self.stages.counts(parameter) and self.shards.counts(parameter)

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Losses:
        """The losses of an evaluation batch, in the last stage; the ranks of the pipeline call it together."""
        assert model is self.model
        return self.pipeline.losses(batch)

    def state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dicts of the whole model and optimizer: of what other ranks hold, the place. All ranks call it together."""
        model, optimizer = super().state_dicts()
        groups = [
            group | {"params": list(range(first, first + size))}
            for group, first, size in zip(
                optimizer["param_groups"], self._first_numbers(), self.stages.num_in_groups, strict=True
            )
        ]
        numbers = [first + place for first, places in self._numbered_places() for place in places]
        own = {
            "model": self._in_pieces(dict(model)),
            "state": {numbers[number]: self._in_pieces(state) for number, state in optimizer["state"].items()},
        }
        found: dict[str, dict[Any, Any]] = {"model": {}, "state": {}}
        for described in _gather_text(self.stages.pipeline, json.dumps(_described(own))):
            for kind, entries in _read(json.loads(described)).items():
                found[kind] |= entries
        for kind, entries in own.items():
            found[kind] |= entries
        return found["model"], optimizer | {"state": found["state"], "param_groups": groups}

    def own_part(self, model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the part of whole state dicts that this rank's stages hold."""
        kept = {name: held for name, held in model.items() if not name.startswith(self.stages.absent)}
        groups = [
            group | {"params": [group["params"][place] for place in places]}
            for group, places in zip(optimizer["param_groups"], self.stages.places, strict=True)
        ]
        keys = [key for group in groups for key in group["params"] if key in optimizer["state"]]
        saved = optimizer["state"]
        states = saved.only(keys) if isinstance(saved, SavedStates) else {key: saved[key] for key in keys}
        return super().own_part(kept, optimizer | {"state": states, "param_groups": groups})

    def _first_numbers(self) -> list[int]:
        """The number of each whole group's first parameter."""
        return [sum(self.stages.num_in_groups[:index]) for index in range(len(self.stages.num_in_groups))]

    def _numbered_places(self) -> list[tuple[int, list[int]]]:
        return list(zip(self._first_numbers(), self.stages.places, strict=True))

    def _in_pieces(self, value: Any) -> Any:
        """The value with each tensor as the piece of the rank that writes it: the stage's first, or all that divide it."""
        if isinstance(value, TensorInPieces):
            return replace(value, first_rank=self._first_rank)
        if isinstance(value, Tensor):
            own = value.detach().reshape(-1)
            places = ((0, own.numel()),)
            return TensorInPieces(
                own if self.stage.is_first else own[:0], tuple(value.shape), places, first_rank=self._first_rank
            )
        if isinstance(value, dict):
            return {key: self._in_pieces(item) for key, item in value.items()}
        return value


def _described(value: Any) -> Any:
    """A tree of pieces as JSON, without their entries."""
    if isinstance(value, TensorInPieces):
        cut = None if value.cut is None else asdict(value.cut)
        return {"piece": [value.shape, value.places, value.stride, cut, value.first_rank]}
    if isinstance(value, dict):
        return {"dict": [[key, _described(item)] for key, item in value.items()]}
    return {"value": value}


def _read(described: Any) -> Any:
    """The tree that `_described` has written; pieces hold no entries."""
    ((kind, content),) = described.items()
    if kind == "piece":
        shape, places, stride, described_cut, first_rank = content
        cut = None if described_cut is None else Cut(**described_cut | {"shape": tuple(described_cut["shape"])})
        return TensorInPieces(
            torch.empty(0), tuple(shape), tuple((first, length) for first, length in places), stride, cut, first_rank
        )
    return {key: _read(item) for key, item in content} if kind == "dict" else content


def _gather_text(axis: Axis, text: str) -> list[str]:
    """Every rank's text, by rank. A collective."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(axis.device)
    length = int(axis.max_(torch.tensor(float(own.numel()), dtype=torch.float64, device=axis.device)))
    padded = torch.full((length,), ord(" "), dtype=torch.uint8, device=axis.device)
    padded[: own.numel()] = own
    return [bytes(row.tolist()).decode() for row in axis.start_gather(padded).wait().cpu()]
