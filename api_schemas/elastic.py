"""Elastic jobs: the numbers of ranks with which a job can go on at the same global batch, by other numbers of micro-batches."""

from typing import TYPE_CHECKING

from api_schemas.data import Unfit
from api_schemas.layout import BatchDivision
from api_schemas.resources import ParallelismSpec, ResourceSpec

if TYPE_CHECKING:
    from api_schemas.job import JobSpec


def counts_of(spec: "JobSpec") -> tuple[int, ...]:
    """Return the numbers of ranks that an attempt of a job may have, largest first: one unless the job is elastic."""
    return worker_counts(spec.resources, spec.parallelism, spec.batch)


def with_workers(spec: "JobSpec", workers: int) -> "JobSpec":
    """Return the spec of an attempt with one of `counts_of` ranks: as many samples in a forward pass, so more of these."""
    if workers == spec.resources.workers and spec.resources.min_workers is None:
        return spec
    resources = spec.resources.model_copy(update={"workers": workers, "min_workers": None})
    training = spec.training.model_copy(update={"micro_batch_size": spec.batch.micro_batch_size})
    return spec.model_copy(update={"resources": resources, "training": training})


def worker_counts(resources: ResourceSpec, parallelism: ParallelismSpec, batch: BatchDivision) -> tuple[int, ...]:
    """Return the numbers of ranks that a job may have, largest first: one unless it is elastic.

    batch: that of all `resources.workers`. Each number is a multiple of the ranks that hold one model together, and its data
    ranks read whole micro-batches of the global batch.
    """
    if resources.min_workers is None:
        return (resources.workers,)
    group = parallelism.tensor
    num_micro_batches = batch.global_batch_size // batch.micro_batch_size
    most, least = resources.workers // group, -(-resources.min_workers // group)
    return tuple(group * num_data for num_data in range(most, least - 1, -1) if num_micro_batches % num_data == 0)


def misfit_of_elastic(resources: ResourceSpec, parallelism: ParallelismSpec, batch: BatchDivision) -> Unfit | None:
    """Return the rule that an elastic job's smallest number of ranks breaks, or None. batch: one that fits all ranks."""
    smallest = resources.min_workers
    if smallest is None:
        return None
    field = "resources.min_workers"
    for name in ("pipeline", "context"):
        if getattr(parallelism, name) > 1:
            allowed = f"null with parallelism.{name}: going on with other ranks has been proven for data and tensor ranks"
            return Unfit(field, smallest, allowed, f"Remove {field}, or set parallelism.{name} to 1.")
    if smallest > resources.workers:
        return Unfit(field, smallest, f"at most resources.workers, {resources.workers}", "Lower resources.min_workers.")
    counts = worker_counts(resources.model_copy(update={"min_workers": 1}), parallelism, batch)
    if smallest in counts:
        return None
    several = f", in groups of parallelism.tensor {parallelism.tensor}" if parallelism.tensor > 1 else ""
    allowed = (
        f"{', '.join(map(str, counts))}: training.global_batch_size {batch.global_batch_size} in micro-batches of "
        f"{batch.micro_batch_size} divides among so many ranks{several}"
    )
    return Unfit(field, smallest, allowed, "Change resources.min_workers or training.global_batch_size.")
