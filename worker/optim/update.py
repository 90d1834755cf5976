"""The arithmetic of one step on fp32 values: Adam's update, and the bound on it that weights are scaled by.

Each operation is one rounding, in the order written, so that a kernel can repeat it bit for bit: no fused multiply-add, and
roots from `kernels.sqrt`.
"""

from typing import Any

import torch
from torch import Tensor

from worker import kernels

ROUNDING_SLACK = 1.25
"""By how much an update from rounded moments may exceed what one from exact moments could be."""
MAX_UPDATE = 100.0
"""In units of lr, where the betas allow no bound."""
ROOTED = (2.0**-100, torch.finfo(torch.float32).max)
"""What second moments are clamped to before the root: within it a GPU's root needs no case apart. Its root, 1e-15, is next
to nothing beside eps, and where eps is 0 a gradient that never was anything else moves no weight instead of making it NaN."""


def adam_(values: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: dict[str, Any]) -> None:
    """One step on fp32 tensors: values and moments in place, the gradient is left alone."""
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        values.mul_(1 - group["lr"] * group["weight_decay"])
    elif group["weight_decay"]:
        gradient = gradient + values * group["weight_decay"]
    exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
    denominator = kernels.sqrt(exp_avg_sq.clamp(*ROOTED)).mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
    values.sub_((exp_avg / denominator).mul_(group["lr"] / (1 - beta1**step)))


def bound_after_step(amax: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    """What no weight exceeds after the step, given the largest magnitude before it; fp32, in amax's shape.

    |exp_avg| <= (1 - beta1) / sqrt(1 - beta2) · sqrt(sum of (beta1² / beta2)^i, i < step) · sqrt(exp_avg_sq), by Cauchy and
    Schwarz over the gradients that both are sums of: an update is at most lr in the first step, 7.3 lr later (at betas of
    0.9 and 0.999). Where beta1² >= beta2 there is no such bound; what exceeds MAX_UPDATE · lr saturates there.
    """
    beta1, beta2 = group["betas"]
    update = MAX_UPDATE
    if beta1**2 < beta2:
        ratio = beta1**2 / beta2
        corrected = ((1 - beta2**step) / (1 - beta2)) ** 0.5 * (1 - beta1) / (1 - beta1**step)
        update = min(update, ROUNDING_SLACK * corrected * ((1 - ratio**step) / (1 - ratio)) ** 0.5)
    kept = 1 - group["lr"] * group["weight_decay"] if group["decoupled_weight_decay"] else 1.0
    return amax * abs(kept) + group["lr"] * update
