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
from octet.worker.mesh import Axes
from octet.worker.parallel.context import ContextParallel
from octet.worker.parallel.pipeline.parallel import PipelineParallel
from octet.worker.parallel.strategy import DividedModel, Division, Strategy
from octet.worker.parallel.tensor import TensorParallel
from octet.worker.prepare.convert import share_rounding

STRATEGIES: tuple[Strategy, ...] = (ContextParallel(), PipelineParallel(), TensorParallel())
DEGREES = tuple(field.name for field in fields(Layout) if field.name != "num_ranks")
"""The options of `parallelize` that lay out the ranks; each is 1 by default."""


class DivisionOptions(TypedDict, total=False):
    """The options as `parallelize` documents them: tensor, context, pipeline are 1 by default, sequence is False.

    micro_batches: 1 without a pipeline, which needs it. schedule: 1f1b. stages_per_rank: 1, and 2 with interleaved. blocks: of
    models that are not ours.
    """

    tensor: int
    sequence: bool
    context: int
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
