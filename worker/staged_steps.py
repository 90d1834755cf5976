"""The passes of one step where ranks hold stages of the model: read all micro-batches, then run the pipeline's schedule."""

import torch
from torch import Tensor

from api_schemas import BatchDivision
from worker.data import Source, loss_divisor
from worker.data.prefetch import Prefetcher
from worker.metrics.table import Metrics
from worker.parallel import Parallel


def staged_step(
    parallel: Parallel, source: Source, batches: Prefetcher, batch: BatchDivision, position: int, metrics: Metrics
) -> tuple[Tensor, float]:
    """Accumulate this rank's gradients over its micro-batches, which begin at `position`, without exchanging them.

    Returns the mean loss (), zero outside the last stage, and the seconds spent on data. All stages of a data rank read the
    same samples: small, next to the hidden states that travel.
    """
    assert parallel.pipeline is not None
    taken, divisors, data_wait_s = [], list[float](), 0.0
    for index in range(batch.num_micro_batches):
        with metrics.timed("data_wait") as wait:
            taken.append(batches.take(position, index))
        data_wait_s += wait.seconds
        first = batch.first_sample(position, parallel.data.rank, index)
        divisors.append(loss_divisor(source, batch, position, first))
    with parallel.no_sync(), torch.enable_grad():
        return parallel.pipeline.forward_backward(taken, divisors, metrics), data_wait_s
