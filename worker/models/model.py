"""The training loop's view of a network: the loss of a batch, and the further values of an evaluation."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from octet.worker.mesh import Axis
from octet.worker.models.context import ContextPart
from octet.worker.models.initial import Initial

TensorRole = Literal["column", "column of 3", "row", "embedding", "head", "partial-gradients"]
"""The ways in which ranks of the tensor axis divide a layer: by outputs, by outputs of three matrices in one, by inputs, and
(embedding, head) by tokens of the vocabulary. partial-gradients: the layer is not divided, but each rank applies it to its own
part of the input, so gradients are added up."""


class Losses(NamedTuple):
    """The results of a model for one batch.

    loss: mean over the batch's targets in nats, fp32 (). metrics: further means over the same targets, fp32 (), with the names
    of the family's contract; empty while training. num_targets: number of targets in the means; while training it also counts
    the targets that are ignored.
    """

    loss: Tensor
    num_targets: int
    metrics: Mapping[str, Tensor]


class Part(NamedTuple):
    """The part of a model that one stage of a pipeline computes: some blocks, and what lies before or behind all blocks."""

    blocks: range
    is_first: bool = True
    is_last: bool = True


class TrainedModel(nn.Module):
    """Base of the networks that a job can train. They know nothing of precision: a level converts layers from outside.

    Calling the model returns logits, and `loss` calls it: hooks of the whole model, as fp16's loss scaling, see both passes.
    vocabulary: the ranks that each have the logits of some tokens, where the model is divided like this. context: this rank's
    tokens of each sequence, where ranks divide them; logits and losses are then of these. residual_dtype: of the hidden state
    that blocks pass on where layers return 16 bits (`residual_stream.py`).
    """

    vocabulary: Axis | None = None
    context: ContextPart | None = None
    residual_dtype: torch.dtype = torch.float32
    num_parameters_elsewhere = 0
    """Parameters of the whole model that other ranks of a pipeline hold."""

    def own_tokens(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return what belongs to this rank's tokens, of all tokens of a sequence. dim: of the tokens."""
        return whole if self.context is None else self.context.own(whole, dim)

    def own_ranges(self, num_tokens: int) -> Sequence[tuple[int, int]]:
        """Return the first token and the end of each range of this rank's tokens, in sequences of so many tokens."""
        return [(0, num_tokens)] if self.context is None else self.context.ranges(num_tokens)

    @property
    def tensor_plan(self) -> Mapping[str, TensorRole]:
        """The roles of the layers that ranks may divide, by globs of names; empty for a model that they cannot divide."""
        return {}

    @property
    def vocabulary_layers(self) -> Sequence[nn.Module]:
        """The layers whose weight has a row for each token, which nothing but their calls reads: the embedding, the head."""
        return ()

    def initial(self, name: str, num_dims: int) -> Initial | None:
        """Return the initial values of a parameter by its name and number of dimensions; None where only its class can draw.

        A model that returns them draws all parameters in the order of `named_parameters`, from one generator of its seed.
        """
        return None

    @abstractmethod
    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a batch from the source. The backward pass can run only once."""
