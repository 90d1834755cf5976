"""The mean cross entropy of a language model's logits, without fp32 copies of them.

torch's own cross entropy holds the log-softmax and two gradients in fp32 at once: 12 bytes per logit in addition to the 2 of
bf16, while every activation is still alive. At 8192 tokens and 50304 logits that was 4.6 GiB of a step's peak of 23 GiB.
Here only a few rows are in fp32 at a time, and the gradient overwrites the logits.
Shape suffixes: N tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octet.worker.models.linear_cross_entropy import DeferredLogits, linear_cross_entropy

CHUNK_ELEMENTS = 1 << 24
"""Logits that are in fp32 at the same time: 64 MiB."""


IGNORED = -100
"""The target of a token that does not count, as in torch."""


def cross_entropy(
    logits_NV: Tensor | DeferredLogits, targets_N: Tensor, *, has_ignored: bool = False, num_targets: Tensor | None = None
) -> Tensor:
    """Mean cross entropy in nats over the tokens, computed in fp32. Backward overwrites the logits, so it runs only once.

    logits_NV: of a model whose loss is fused, what they are computed of. has_ignored: the mean is over the targets that are
    not `IGNORED`, at least one. num_targets: what the sum over these is divided by instead of their number, ().
    """
    weights_N = None
    if has_ignored:
        counts_N = targets_N != IGNORED
        targets_N = targets_N.where(counts_N, 0)
        weights_N = counts_N / (counts_N.sum() if num_targets is None else num_targets)
    if isinstance(logits_NV, DeferredLogits):
        return linear_cross_entropy(logits_NV, targets_N, weights_N)
    loss: Tensor = _CrossEntropy.apply(logits_NV, targets_N, weights_N)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor | None) -> Tensor:
        log_sums_N = torch.empty(len(logits_NV), device=logits_NV.device)
        for rows in chunks(logits_NV):
            log_sums_N[rows] = logits_NV[rows].float().logsumexp(-1)
        ctx.save_for_backward(logits_NV, targets_N, log_sums_N, weights_N)
        losses_N = log_sums_N - logits_NV.gather(1, targets_N[:, None]).squeeze(1).float()
        return losses_N.mean() if weights_N is None else (losses_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        # torch raises on a second call: the logits have changed
        logits_NV, targets_N, log_sums_N, weights_N = ctx.saved_tensors
        if weights_N is None:
            grad_N1 = (grad_output / len(logits_NV)).float().expand(len(logits_NV), 1)
        else:
            grad_N1 = (grad_output * weights_N).float()[:, None]
        for rows in chunks(logits_NV):
            grad_nV = (logits_NV[rows].float() - log_sums_N[rows, None]).exp_().mul_(grad_N1[rows])
            grad_nV.scatter_add_(1, targets_N[rows, None], -grad_N1[rows])
            logits_NV[rows] = grad_nV
        return logits_NV, None, None


def chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield rows of at most `CHUNK_ELEMENTS` logits together."""
    num_rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
    for start in range(0, len(logits_NV), num_rows):
        yield slice(start, start + num_rows)
