"""Pipeline stages: each rank of the pipeline axis keeps some blocks of a converted model, and their optimizer states.

The first stage also keeps the embeddings, the last one the final norm and the head. The whole model is converted first, so each
parameter has the random streams, the codecs and the name that it has without stages. What a rank lacks is None in its model.
A tied weight is held by the first and the last rank: both add up both gradients, take the same step, and stay equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from api_schemas import Layout
from worker.fp8.accelerator import AutocastForward
from worker.fp8.convert import ConversionReport
from worker.fp8.gradient_ops import norms_of
from worker.mesh import Axis
from worker.mesh.neighbours import swap
from worker.models.model import Part
from worker.optim import LowBitOptimizer
from worker.optim.clip import clip_by

FIRST, LAST = ("token_embedding", "position_embedding"), ("final_norm", "head")
"""Modules of our language models that only the first stage, and only the last stage, needs."""


@dataclass(eq=False)
class Stages:
    """This rank's stages of a model, in ascending order.

    absent: prefixes of the names that this rank lacks. numbers: of its parameters, counted in the whole model. num_parameters:
    tensors of the whole model. places: for each group of the optimizer, the indices of this rank's parameters in the whole
    group. num_in_groups: parameters of each whole group. tied: the weight that the first and the last rank both hold.
    """

    pipeline: Axis
    parts: dict[int, Part]
    absent: tuple[str, ...]
    numbers: dict[Tensor, int]
    num_parameters: int
    places: list[list[int]]
    num_in_groups: list[int]
    tied: nn.Parameter | None

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank's copy counts in a norm: of a tied weight, the first rank's."""
        return parameter is not self.tied or self.pipeline.is_first

    def follow(self, held: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the shards that this rank holds now in the place of its parameters. held: each parameter's."""
        self.numbers = {held[parameter]: number for parameter, number in self.numbers.items()}
        self.tied = None if self.tied is None else held[self.tied]

    @torch.no_grad()
    def add_tied_gradients(self) -> None:
        """Give the first and the last rank the sum of their gradients of the tied weight: the first rank's plus the last's."""
        if self.tied is None:
            return
        own = self.tied.grad
        assert own is not None  # the embedding and the head see each micro-batch
        other = swap(self.pipeline, own, self.pipeline.size - 1 if self.pipeline.is_first else 0)
        self.tied.grad = own + other if self.pipeline.is_first else other + own

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale whole gradients so that their norm over all stages is at most max_norm. Returns the norm before, fp32 ().

        Norms of single gradients are put in the order of the whole model, so the bits are those of one process.
        """
        held = [parameter for parameter in self.numbers if parameter.grad is not None]
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        norms = torch.zeros(self.num_parameters, device=self.pipeline.device)
        for parameter, norm in zip(held, norms_of(gradients), strict=True):
            if self.counts(parameter):
                norms[self.numbers[parameter]] = norm
        norm = torch.linalg.vector_norm(self.pipeline.sum_(norms))
        clip_by(gradients, norm, max_norm)
        return norm


def split(model: Any, optimizer: LowBitOptimizer, layout: Layout, pipeline: Axis) -> Stages:
    """Let this rank keep its stages of a whole converted model. All ranks hold the same whole before.

    The optimizer has taken no step.
    """
    parts = {
        stage: Part(layout.blocks(stage, len(model.blocks)), stage == 0, stage == layout.num_stages - 1)
        for stage in layout.stages(pipeline.rank)
    }
    whole = list(model.parameters())
    groups = [list(group["params"]) for group in optimizer.param_groups]
    num_elements, is_tied = sum(map(Tensor.numel, whole)), model.head.weight is model.token_embedding.weight
    kept_blocks = {index for part in parts.values() for index in part.blocks}
    absent = [f"blocks.{index}" for index in range(len(model.blocks)) if index not in kept_blocks]
    absent += [name for name in FIRST if hasattr(model, name) and not any(part.is_first for part in parts.values())]
    absent += [name for name in LAST if not any(part.is_last for part in parts.values())]
    for name in absent:
        holder, _, attribute = name.rpartition(".")
        model.get_submodule(holder)._modules[attribute] = None
    kept = set(model.parameters())
    _drop(optimizer, [parameter for parameter in whole if parameter not in kept])
    _follow(model)
    model.num_parameters_elsewhere = num_elements - sum(map(Tensor.numel, kept))
    ends = model.token_embedding or model.head
    return Stages(
        pipeline,
        parts,
        tuple(f"{name}." for name in absent),
        {parameter: number for number, parameter in enumerate(whole) if parameter in kept},
        len(whole),
        [[index for index, parameter in enumerate(group) if parameter in kept] for group in groups],
        [len(group) for group in groups],
        ends.weight if is_tied and ends is not None else None,
    )


def _drop(optimizer: LowBitOptimizer, parameters: Iterable[Tensor]) -> None:
    """Let an optimizer forget parameters that this rank lacks. The others keep their random streams."""
    dropped = set(parameters)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in dropped]
    for parameter in dropped:
        optimizer.state.pop(parameter, None)
        for known in (optimizer._origins, optimizer._quantized):
            known.pop(parameter, None)


def _follow(model: nn.Module) -> None:
    """Let what follows the layers of a model follow those that are left."""
    report: Any = model.octet_report
    assert isinstance(report, ConversionReport)
    layers = dict(model.named_modules())
    if report.health is not None:
        report.health.layers = {name: layer for name, layer in report.health.layers.items() if name in layers}
    model.octet_report = replace(report, converted=tuple(name for name in report.converted if name in layers))  # type: ignore[assignment]
    forward: Any = vars(model).get("forward")
    if isinstance(forward, AutocastForward):
        converted = (layer for layer in model.modules() if getattr(layer, "returns_16_bits", False))
        forward.layer = next(converted, forward.layer)
