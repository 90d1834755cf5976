"""The strategies that divide a model over an axis of its own, in the order in which they divide it.

Data parallel and ZeRO are not among them: they share what is left on each rank over its replicas (`parallel.py`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TypedDict

import torch
from torch import nn

from octet.api_schemas import AxisName, Layout
from octet.worker.mesh import Axes, Axis
from octet.worker.models.context import CausalAttention, ContextPart
from octet.worker.parallel.expert import ExpertParallel
from octet.worker.parallel.pipeline.parallel import PipelineParallel
from octet.worker.parallel.strategy import DividedModel, Division, Strategy, check_compiled, check_loss_scaling
from octet.worker.parallel.tensor import TensorParallel
from octet.worker.prepare.convert import share_rounding


class ContextParallel(Strategy):
    """Parameters stay whole: the ranks are replicas that average gradients, as data ranks are."""

    axis = "context"

    def check(self, division: Division) -> None:
        """Refuse models that scale their losses, and compiled ones."""
        check_loss_scaling(division.model, "a context degree")
        check_compiled(division.model, "a context degree")

    def apply(self, division: Division) -> None:
        """Let the model's attention gather the keys and values of all ranks."""
        divide_sequences(division.model, division.axes.context)


def divide_sequences(model: nn.Module, axis: Axis) -> None:
    """Let a model of ours read this rank's tokens of each sequence. Raises ValueError for another model."""
    attentions = [module for module in model.modules() if isinstance(module, CausalAttention)]
    if not attentions or not hasattr(model, "context"):
        raise ValueError(
            f"{type(model).__name__} cannot divide sequences over {axis.size} ranks; allowed: gpt and llama, whose attention "
            "gathers keys and values. Change the model, or set the context degree to 1."
        )
    part = ContextPart(axis)
    model.context = part  # type: ignore[assignment]
    for attention in attentions:
        attention.context = part


STRATEGIES: tuple[Strategy, ...] = (ContextParallel(), PipelineParallel(), TensorParallel(), ExpertParallel())
DEGREES = tuple(field.name for field in fields(Layout) if field.name != "num_ranks")
"""The options of `parallelize` that lay out the ranks; each is 1 by default."""


class DivisionOptions(TypedDict, total=False):
    """The options as `parallelize` documents them: degrees are 1 by default, sequence is False.

    micro_batches: 1 without a pipeline, which needs it. schedule: 1f1b. stages_per_rank: 1, and 2 with interleaved. blocks: of
    models that are not ours.
    """

    tensor: int
    sequence: bool
    context: int
    expert: int
    pipeline: int
    micro_batches: int
    schedule: str
    stages_per_rank: int
    blocks: str


class CannotDivide(ValueError):
    """A strategy's refusal of a model. axis: the strategy's."""

    def __init__(self, axis: AxisName, message: str) -> None:
        super().__init__(message)
        self.axis = axis


def divide(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    axes: Axes,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    blocks: str | None = None,
) -> list[DividedModel]:
    """Divide a model and its optimizer by every strategy whose axis has several ranks. Options as in `Division`.

    All ranks call it together, with the same whole model. Raises CannotDivide, mostly before anything is changed.
    """
    division = Division(model, optimizer, axes, plan, sequence, blocks)
    used = [strategy for strategy in STRATEGIES if axes[strategy.axis].size > 1]
    for strategy in used:
        with _refusals_of(strategy):
            strategy.check(division)
    if axes.replicas.size != axes.world.size:  # `initialize` gives each rank of the world numbers of its own
        share_rounding(model, axes.replicas.rank, axes.replicas.size)
    for strategy in used:
        with _refusals_of(strategy):
            strategy.apply(division)
    return division.parts


@contextmanager
def _refusals_of(strategy: Strategy) -> Iterator[None]:
    """Name the strategy in what it refuses."""
    try:
        yield
    except ValueError as error:
        raise CannotDivide(strategy.axis, str(error)) from error
