"""The losses of models that predict one class for each image."""

from torch import Tensor
from torch.nn import functional

from octet.worker.models.cross_entropy import cross_entropy
from octet.worker.models.model import Losses

TOP = 5


def class_losses(logits_BK: Tensor, labels: Tensor, *, with_metrics: bool) -> Losses:
    """Return the mean cross entropy in nats and, if requested, `top1_accuracy` and `top5_accuracy`.

    labels: classes, int64 (B,); or, without metrics, each class's share of the target, fp32 (B, K).

    Top-5 accuracy is the share of images whose class is among the five (or all, if there are fewer) largest logits. The
    backward pass overwrites the logits, so it can run only once.
    """
    if labels.is_floating_point():
        return Losses(functional.cross_entropy(logits_BK.float(), labels), len(labels), {})
    metrics = {}
    if with_metrics:
        hits_Bk = logits_BK.topk(min(TOP, logits_BK.shape[1]), dim=-1).indices == labels[:, None]
        metrics = {"top1_accuracy": hits_Bk[:, 0].float().mean(), "top5_accuracy": hits_Bk.any(-1).float().mean()}
    return Losses(cross_entropy(logits_BK, labels), labels.numel(), metrics)
