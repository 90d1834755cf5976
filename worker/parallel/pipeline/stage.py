"""The stages of a rank: each rank of the pipeline axis keeps some blocks of a converted model, and their optimizer states.

The first stage also keeps the modules before the blocks, as embeddings, the last one those behind them (`split.py`). The whole
model is converted first, and what a rank lacks is None in its model (`held_part.py`). Weights that are tied, as those of an
embedding and a head, are held by the first and the last rank: both add up both gradients, take the same step, and stay equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker.fp8.gradient import norms_of
from octet.worker.mesh import Axis
from octet.worker.mesh.neighbours import swap
from octet.worker.models.model import Part
from octet.worker.optim.clip import clip_by
from octet.worker.parallel.held_part import HeldPart, keep_part
from octet.worker.parallel.pipeline.split import ModelSplit


@dataclass(eq=False)
class Stages:
    """This rank's stages of a model, in ascending order.

    held: what it keeps of the model and its optimizer. tied: this rank's parameters that the first and the last rank both hold
    and train.
    """

    split: ModelSplit
    layout: Layout
    pipeline: Axis
    parts: dict[int, Part]
    held: HeldPart
    tied: tuple[Tensor, ...]

    def counts(self, parameter: Tensor) -> bool:
        """Return True if this rank's copy counts in a norm: that of a tied weight does on the first rank."""
        return self.pipeline.is_first or all(parameter is not tied for tied in self.tied)

    def follow(self, replaced: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the parameters that this rank holds now in the place of its old ones."""
        self.held.follow(replaced)
        self.tied = tuple(replaced[tied] for tied in self.tied)

    @torch.no_grad()
    def add_tied_gradients(self) -> None:
        """Give the first and the last rank the sum of their gradients of tied weights: the first rank's plus the last's."""
        for tied in self.tied:
            own = torch.zeros_like(tied) if tied.grad is None else tied.grad
            other = swap(self.pipeline, own, self.pipeline.size - 1 if self.pipeline.is_first else 0)
            tied.grad = own + other if self.pipeline.is_first else other + own

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale whole gradients so that their norm over all stages is at most max_norm. Returns the norm before, fp32 ().

        Norms of single gradients are put in the order of the whole model, so on a CPU the bits are those of one process.
        """
        numbers = self.held.numbers
        held = [parameter for parameter in numbers if parameter.grad is not None]
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        norms = torch.zeros(self.held.num_parameters, device=self.pipeline.device)
        for parameter, norm in zip(held, norms_of(gradients), strict=True):
            if self.counts(parameter):
                norms[numbers[parameter]] = norm
        norm = torch.linalg.vector_norm(self.pipeline.sum_(norms))
        clip_by(gradients, norm, max_norm)
        return norm


def keep_stages(split: ModelSplit, optimizer: torch.optim.Optimizer, layout: Layout, pipeline: Axis) -> Stages:
    """Let this rank keep its stages of a whole converted model. All ranks hold the same whole before.

    The optimizer has taken no step. Raises ValueError, before anything is changed, for stages without parameters, and for
    parameters that other ranks than the first and the last share.
    """
    model, num_blocks = split.model, len(split.blocks)
    ranks = [parts_of(layout, rank, num_blocks) for rank in range(pipeline.size)]
    tied, parts = _tied(split, ranks), ranks[pipeline.rank]
    held = keep_part(model, optimizer, split.absent(parts.values()))
    split.attach()
    return Stages(
        split,
        layout,
        pipeline,
        parts,
        held,
        tuple(parameter for parameter in held.numbers if parameter in tied),
    )


def parts_of(layout: Layout, rank: int, num_blocks: int) -> dict[int, Part]:
    """Return the stages of a rank of the pipeline axis."""
    return {
        stage: Part(layout.blocks(stage, num_blocks), stage == 0, stage == layout.num_stages - 1)
        for stage in layout.stages(rank)
    }


def _tied(split: ModelSplit, ranks: list[dict[int, Part]]) -> set[Tensor]:
    """Return the trained parameters that the first and the last rank both hold."""
    holders: dict[Tensor, list[int]] = {}
    for rank, parts in enumerate(ranks):
        for stage, part in parts.items():
            held = [parameter for name in split.names(part) for parameter in split.model.get_submodule(name).parameters()]
            if not held:
                raise ValueError(
                    f"stage {stage} of the pipeline, {', '.join(split.names(part)) or 'of no block'}, holds no parameters; "
                    "allowed: stages that train some. Lower pipeline or stages_per_rank, or divide the model otherwise."
                )
            for parameter in held:
                holders.setdefault(parameter, []).append(rank)
    shared = {parameter: set(ranks_of) for parameter, ranks_of in holders.items() if len(set(ranks_of)) > 1}
    for parameter, ranks_of in shared.items():
        if ranks_of != {0, len(ranks) - 1}:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is shared by ranks {sorted(ranks_of)} of the pipeline; "
                f"allowed: 0 and {len(ranks) - 1}, as of an embedding and a head. Untie it, or change pipeline."
            )
    return {parameter for parameter in shared if parameter.requires_grad}
