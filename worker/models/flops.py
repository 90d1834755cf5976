"""Count the operations of a network whose code is not ours, from its linear layers."""

from torch import nn


def linear_flops_per_token(model: nn.Module) -> float:
    """FLOPs of the linear layers for one token, forward and backward: 6 for each element of a weight.

    Attention's products with each other, convolutions and experts that no `nn.Linear` holds are not counted, so a utilization
    computed from this number is too low rather than too high. Call it before conversion.
    """
    return 6.0 * sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
