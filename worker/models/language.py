"""The losses of models that predict tokens, and the check of a sequence's length."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octet.worker.mesh import Axis
from octet.worker.models.context import ContextPart
from octet.worker.models.cross_entropy import IGNORED, chunks, cross_entropy
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.models.model import Losses, TrainedModel


class LanguageModel(TrainedModel):
    """Base of our networks that map tokens to logits of the next token."""

    token_embedding: nn.Module
    head: nn.Module

    @property
    def vocabulary_layers(self) -> Sequence[nn.Module]:
        """The embedding and the head, tied or not."""
        return self.token_embedding, self.head

    def loss(self, batch: Mapping[str, Tensor], **of_part: Any) -> Losses:
        """Mean cross entropy in nats per token, computed in fp32. Its backward pass can run only once.

        of_part: `part` and `hidden_BTD` of `forward`, for the last part.
        """
        logits_BTV = self(batch["tokens"], batch.get("documents"), **of_part)
        return next_token_losses(
            logits_BTV, batch, with_metrics=not self.training, vocabulary=self.vocabulary, context=self.context
        )


def next_token_losses(
    logits_BTV: Tensor | DeferredLogits,
    batch: Mapping[str, Tensor],
    *,
    with_metrics: bool,
    vocabulary: Axis | None = None,
    context: ContextPart | None = None,
) -> Losses:
    """Return the mean cross entropy in nats and, if requested, `token_accuracy`: the share of targets with the top logit.

    Both are over the targets that count. The backward pass overwrites the logits, so it can run only once. With metrics the
    logits are a tensor.
    vocabulary: the ranks that each have the logits of a shard of the tokens; they call it together.
    context: this rank's tokens, which the logits and the results are of. Where targets are ignored, a loss in training is the
    sum over the rank's targets by the mean number of the ranks', so that the mean of the ranks' losses is that of all targets.
    """
    targets_BT = batch["targets"] if context is None else context.own(batch["targets"])
    if vocabulary is None and "num_targets" not in batch:
        return token_losses(logits_BTV, targets_BT, "token_accuracy" if with_metrics else None)
    logits_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    num_targets, mean_over, has_ignored = targets_N.numel(), None, "num_targets" in batch
    if has_ignored:
        num_counted = batch["num_targets"].sum()
        if context is not None:
            num_counted = (targets_N != IGNORED).sum() if with_metrics else num_counted / context.axis.size
            mean_over = num_counted.clamp(min=1)
        if with_metrics:  # int() waits for a GPU; the trainer reads this number only while it evaluates
            num_targets = int(num_counted)
    metrics = {}
    if with_metrics:  # before the loss: its backward pass overwrites the logits
        assert isinstance(logits_NV, Tensor)
        top = logits_NV.argmax(-1) == targets_N if vocabulary is None else is_largest(logits_NV, targets_N, vocabulary)
        metrics["token_accuracy"] = (top & (targets_N != IGNORED)).sum() / max(num_targets, 1)
    if vocabulary is None:
        loss = cross_entropy(logits_NV, targets_N, has_ignored=True, num_targets=mean_over)
    else:
        assert isinstance(logits_NV, Tensor)
        loss = vocabulary_cross_entropy(logits_NV, targets_N, vocabulary, has_ignored=has_ignored, num_targets=mean_over)
    return Losses(loss, num_targets, metrics)


def token_losses(logits_BPV: Tensor | DeferredLogits, targets_BP: Tensor, accuracy_name: str | None) -> Losses:
    """Return the mean cross entropy in nats and, under `accuracy_name` if given, the share of targets with the top logit."""
    logits_NV, targets_N = logits_BPV.flatten(0, 1), targets_BP.flatten()
    metrics = {}
    if accuracy_name:
        assert isinstance(logits_NV, Tensor)
        metrics[accuracy_name] = (logits_NV.argmax(-1) == targets_N).float().mean()
    return Losses(cross_entropy(logits_NV, targets_N), targets_N.numel(), metrics)


def checked_length(tokens_BT: Tensor, max_sequence_length: int) -> int:
    """Return the number of tokens in each sequence. Raises ValueError for more than the model has positions."""
    num_tokens = tokens_BT.shape[1]
    if num_tokens > max_sequence_length:
        raise ValueError(
            f"got {num_tokens} tokens; at most max_sequence_length {max_sequence_length}. "
            "Shorten the sequences or raise max_sequence_length."
        )
    return num_tokens


# Cross entropy of logits that ranks hold by shards of the vocabulary. No rank ever holds the logits of all tokens.
#
# Each rank adds up the exponentials of its own shard; the ranks then exchange two numbers for each token: a partial
# logarithm of the sum and the target's logit (Shoeybi et al., Megatron-LM, 2019, section 3). As in `cross_entropy.py`, few
# rows are in fp32 at a time and the gradient overwrites the logits.
# Shape suffixes: N tokens, V vocabulary of one shard. Rank r holds the tokens from r · V on.


def vocabulary_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, axis: Axis, *, has_ignored: bool = False, num_targets: Tensor | None = None
) -> Tensor:
    """Mean cross entropy in nats over the tokens, the same on each rank. All ranks of the axis call it together.

    Backward overwrites the logits, so it runs only once. has_ignored: the mean is over the targets that are not `IGNORED`.
    num_targets: what the sum over these is divided by instead of their number, ().
    """
    counts_N = targets_N != IGNORED if has_ignored else torch.ones_like(targets_N, dtype=torch.bool)
    weights_N = counts_N / (counts_N.sum() if num_targets is None else num_targets)
    loss: Tensor = _VocabularyCrossEntropy.apply(logits_NV, targets_N.where(counts_N, 0), weights_N, axis)
    return loss


@torch.no_grad()
def is_largest(logits_NV: Tensor, targets_N: Tensor, axis: Axis) -> Tensor:
    """Tell of each target whether it has the largest logit of the whole vocabulary: bool (N). The first of equals counts."""
    largest_N, places_N = logits_NV.float().max(-1)
    first = axis.rank * logits_NV.shape[1]
    top_N = axis.max_(largest_N.clone())
    unseen = axis.size * logits_NV.shape[1]
    own_N = (places_N + first).where(largest_N == top_N, unseen)
    first_top_N = -axis.max_(-own_N.double())
    return first_top_N.long() == targets_N


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, axis: Axis) -> Tensor:
        own_log_sums_N = torch.empty(len(logits_NV), device=logits_NV.device)
        for rows in chunks(logits_NV):
            own_log_sums_N[rows] = logits_NV[rows].float().logsumexp(-1)
        places_N, is_own_N = _places(targets_N, logits_NV.shape[1], axis)
        target_logits_N = logits_NV.gather(1, places_N[:, None]).squeeze(1).float().where(is_own_N, 0.0)
        # One gather: what every rank knows of its shard, added in the order of the ranks, so that all have the same bits.
        shards = axis.start_gather(torch.stack((own_log_sums_N, target_logits_N))).wait()
        log_sums_N = shards[:, 0].logsumexp(0)
        ctx.save_for_backward(logits_NV, places_N, is_own_N, log_sums_N, weights_N)
        return ((log_sums_N - shards[:, 1].sum(0)) * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, places_N, is_own_N, log_sums_N, weights_N = ctx.saved_tensors
        grad_N1 = (grad_output * weights_N).float()[:, None]
        own_N1 = -grad_N1.where(is_own_N[:, None], 0.0)
        for rows in chunks(logits_NV):
            grad_nV = (logits_NV[rows].float() - log_sums_N[rows, None]).exp_().mul_(grad_N1[rows])
            grad_nV.scatter_add_(1, places_N[rows, None], own_N1[rows])
            logits_NV[rows] = grad_nV
        return logits_NV, None, None, None


def _places(targets_N: Tensor, num_own: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """The targets' places in the own shard, 0 for those of other ranks, and which are the own shard's."""
    places_N = targets_N - axis.rank * num_own
    is_own_N = (places_N >= 0) & (places_N < num_own)
    return places_N.where(is_own_N, 0), is_own_N
