"""The stages of a rank: each rank of the pipeline axis keeps some blocks of a converted model, and their optimizer states.

The first stage also keeps the modules before the blocks, as embeddings, the last one those behind them (`split.py`). The whole
model is converted first, so each parameter has the random streams, the codecs and the name that it has without stages. Modules
that a rank lacks are None in its model. Weights that are tied, as those of an embedding and a head, are held by the first and
the last rank: both add up both gradients, take the same step, and stay equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker.common.wrap import wrapper_of
from octet.worker.fp8.accelerator import AutocastForward
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.gradient import norms_of
from octet.worker.mesh import Axis
from octet.worker.mesh.neighbours import swap
from octet.worker.models.model import Part, TrainedModel
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.clip import clip_by
from octet.worker.parallel.pipeline.split import ModelSplit


@dataclass(eq=False)
class Stages:
    """This rank's stages of a model, in ascending order.

    absent: prefixes of the names that this rank lacks. numbers: of its parameters, counted in the whole model. num_parameters:
    tensors of the whole model. places: for each group of the optimizer, the indices of this rank's parameters in the whole
    group. num_in_groups: parameters of each whole group. tied: this rank's parameters that the first and
    the last rank both hold and train.
    """

    split: ModelSplit
    layout: Layout
    pipeline: Axis
    parts: dict[int, Part]
    absent: tuple[str, ...]
    numbers: dict[Tensor, int]
    num_parameters: int
    places: list[list[int]]
    num_in_groups: list[int]
    tied: tuple[Tensor, ...]

    def counts(self, parameter: Tensor) -> bool:
        """Return True if this rank's copy counts in a norm: that of a tied weight does on the first rank."""
        return self.pipeline.is_first or all(parameter is not tied for tied in self.tied)

    def follow(self, replaced: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the parameters that this rank holds now in the place of its old ones."""
        self.numbers = {replaced[parameter]: number for parameter, number in self.numbers.items()}
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
        held = [parameter for parameter in self.numbers if parameter.grad is not None]
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        norms = torch.zeros(self.num_parameters, device=self.pipeline.device)
        for parameter, norm in zip(held, norms_of(gradients), strict=True):
            if self.counts(parameter):
                norms[self.numbers[parameter]] = norm
        norm = torch.linalg.vector_norm(self.pipeline.sum_(norms))
        clip_by(gradients, norm, max_norm)
        return norm


def keep_stages(split: ModelSplit, optimizer: torch.optim.Optimizer, layout: Layout, pipeline: Axis) -> Stages:
    """Let this rank keep its stages of a whole converted model. All ranks hold the same whole before.

    The optimizer has taken no step. Raises ValueError, before anything is changed, for stages without parameters, and for
    parameters that other ranks than the first and the last share.
    """
    model, num_blocks = split.model, len(split.blocks)
    ranks = [_parts(layout, rank, num_blocks) for rank in range(pipeline.size)]
    tied, parts = _tied(split, ranks), ranks[pipeline.rank]
    whole = list(model.parameters())
    groups = [list(group["params"]) for group in optimizer.param_groups]
    num_elements, absent = sum(map(Tensor.numel, whole)), split.absent(parts.values())
    for name in absent:
        holder, _, attribute = name.rpartition(".")
        model.get_submodule(holder)._modules[attribute] = None
    kept = set(model.parameters())
    _remove(optimizer, [parameter for parameter in whole if parameter not in kept])
    _forget_layers(model)
    split.attach()
    if isinstance(model, TrainedModel):
        model.num_parameters_elsewhere = num_elements - sum(map(Tensor.numel, kept))
    return Stages(
        split,
        layout,
        pipeline,
        parts,
        tuple(f"{name}." for name in absent),
        {parameter: number for number, parameter in enumerate(whole) if parameter in kept},
        len(whole),
        [[index for index, parameter in enumerate(group) if parameter in kept] for group in groups],
        [len(group) for group in groups],
        tuple(parameter for parameter in whole if parameter in tied and parameter in kept),
    )


def _parts(layout: Layout, rank: int, num_blocks: int) -> dict[int, Part]:
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


def _remove(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Remove parameters that this rank lacks from an optimizer. The others keep their random streams."""
    dropped = set(parameters)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in dropped]
    for parameter in dropped:
        if isinstance(optimizer, LowBitOptimizer):
            optimizer.forget(parameter)
        else:
            optimizer.state.pop(parameter, None)


def _forget_layers(model: nn.Module) -> None:
    """Keep in a model's report and in its casts only the layers that are left."""
    report = getattr(model, "octet_report", None)
    layers = dict(model.named_modules())
    if isinstance(report, ConversionReport):
        if report.health is not None:
            report.health.layers = {name: layer for name, layer in report.health.layers.items() if name in layers}
        model.octet_report = replace(report, converted=tuple(name for name in report.converted if name in layers))  # type: ignore[assignment]
    for module in layers.values():
        if (forward := wrapper_of(module, AutocastForward)) is not None:
            converted = (layer for layer in module.modules() if getattr(layer, "returns_16_bits", False))
            forward.layer = next(converted, forward.layer)
