"""What the training loop needs of a network: the loss of a batch, and what else an evaluation measures."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn


class Losses(NamedTuple):
    """What a model says of one batch.

    loss: the mean over the batch's targets in nats, fp32 (). num_targets: how many the means are over. metrics: means over the
    same targets by the names of the family's contract, fp32 (); empty while training.
    """

    loss: Tensor
    num_targets: int
    metrics: Mapping[str, Tensor]


class TrainedModel(nn.Module):
    """Base of the networks that a job can train. They know nothing of precision: a level converts their layers from outside."""

    @abstractmethod
    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """The loss of a batch of the source's tensors. Its backward pass runs once."""
