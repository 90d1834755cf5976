"""Micro-batches of samples with differing numbers of targets weigh as many targets as they have."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from octet.api_schemas import BatchDivision
from octet.worker.data.source import Batch, loss_divisor

NUM_TARGETS = (1, 7, 2, 30, 4, 4, 9, 3)
LOSS_SUMS = (0.5, 21.0, 1.0, 15.0, 8.0, 2.0, 0.9, 6.0)
"""By sample."""


class Completions:
    """A source of eight samples with differing numbers of targets."""

    facts: Mapping[str, float] = {}
    num_train_samples = len(NUM_TARGETS)

    def train_batch(self, position: int, batch_size: int) -> Batch:
        return {"tokens": torch.arange(position, position + batch_size)}

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        yield from ()

    def num_targets(self, position: int, batch_size: int) -> int:
        return sum(NUM_TARGETS[position : position + batch_size])


@pytest.mark.parametrize(("micro_batch_size", "num_data_ranks"), [(8, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)])
def test_the_ranks_mean_of_divided_losses_is_the_mean_over_all_targets(micro_batch_size: int, num_data_ranks: int) -> None:
    batch = BatchDivision(global_batch_size=8, micro_batch_size=micro_batch_size, num_data_ranks=num_data_ranks)
    sums = []
    for data_rank in range(num_data_ranks):
        losses = []
        for index in range(batch.num_micro_batches):
            first = batch.first_sample(0, data_rank, index)
            samples = slice(first, first + micro_batch_size)
            mean_loss = sum(LOSS_SUMS[samples]) / sum(NUM_TARGETS[samples])
            losses.append(mean_loss / loss_divisor(Completions(), batch, 0, first))
        sums.append(sum(losses))
    assert sum(sums) / num_data_ranks == pytest.approx(sum(LOSS_SUMS) / sum(NUM_TARGETS))
