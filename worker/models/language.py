"""The losses of models that predict the next token."""

from torch import Tensor

from worker.models.cross_entropy import cross_entropy
from worker.models.model import Losses


def next_token_losses(logits_BTV: Tensor, targets_BT: Tensor, *, with_metrics: bool) -> Losses:
    """Return the mean cross entropy in nats and, if requested, `token_accuracy`: the share of targets with the top logit.

    The backward pass overwrites the logits, so it can run only once.
    """
    logits_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    metrics = {"token_accuracy": (logits_NV.argmax(-1) == targets_N).float().mean()} if with_metrics else {}
    return Losses(cross_entropy(logits_NV, targets_N), targets_N.numel(), metrics)
