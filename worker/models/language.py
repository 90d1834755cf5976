"""The losses of models that predict tokens, and the check of a sequence's length."""

from collections.abc import Mapping

from torch import Tensor

from octet.worker.mesh import Axis
from octet.worker.models.context import ContextPart
from octet.worker.models.cross_entropy import IGNORED, cross_entropy
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.models.model import Losses
from octet.worker.models.vocabulary import is_largest, vocabulary_cross_entropy


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
