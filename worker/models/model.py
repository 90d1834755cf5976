"""The training loop's view of a network: the loss of a batch, and the further values of an evaluation."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn


class Losses(NamedTuple):
    """The results of a model for one batch.

    loss: mean over the batch's targets in nats, fp32 (). metrics: further means over the same targets, fp32 (), with the names
    of the family's contract; empty while training. num_targets: number of targets in the means; while training it also counts
    the targets that are ignored.
    """

    loss: Tensor
    num_targets: int
    metrics: Mapping[str, Tensor]


class TrainedModel(nn.Module):
    """Base of the networks that a job can train. They know nothing of precision: a level converts layers from outside.

    Calling the model returns logits, and `loss` calls it: hooks of the whole model, as fp16's loss scaling, see both passes.
    """

    @abstractmethod
    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a batch from the source. The backward pass can run only once."""
