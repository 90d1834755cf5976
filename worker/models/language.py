"""What models that predict tokens have in common."""

from torch import Tensor

from worker.models.cross_entropy import cross_entropy
from worker.models.model import Losses


def next_token_losses(logits_BTV: Tensor, targets_BT: Tensor, *, with_metrics: bool) -> Losses:
    """Return the mean cross entropy in nats and, if requested, `token_accuracy`: the share of targets with the top logit.

    The backward pass overwrites the logits, so it can run only once.
    """
    return token_losses(logits_BTV, targets_BT, "token_accuracy" if with_metrics else None)


def token_losses(logits_BPV: Tensor, targets_BP: Tensor, accuracy_name: str | None) -> Losses:
    """Return the mean cross entropy in nats and, under `accuracy_name` if given, the share of targets with the top logit."""
    logits_NV, targets_N = logits_BPV.flatten(0, 1), targets_BP.flatten()
    metrics = {accuracy_name: (logits_NV.argmax(-1) == targets_N).float().mean()} if accuracy_name else {}
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
