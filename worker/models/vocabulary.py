"""Cross entropy of logits that ranks hold by shards of the vocabulary. No rank ever holds the logits of all tokens.

Each rank adds up the exponentials of its own shard; the ranks then exchange two numbers for each token: a partial logarithm of
the sum and the target's logit (Shoeybi et al., Megatron-LM, 2019, section 3). As in `cross_entropy.py`, few rows are in fp32 at
a time and the gradient overwrites the logits.
Shape suffixes: N tokens, V vocabulary of one shard. Rank r holds the tokens from r · V on.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octet.worker.mesh import Axis
from octet.worker.models.cross_entropy import IGNORED, chunks


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
