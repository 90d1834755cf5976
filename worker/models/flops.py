"""Count the operations of a network, by its contract or, if its code is not ours, from its linear layers."""

from torch import nn

from octet.api_schemas import FamilySizes


def flops_per_token(sizes: FamilySizes, model: nn.Module, sequence_length: int) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation. Call it before conversion."""
    counted = sizes.flops_per_token(sequence_length)
    return linear_flops_per_token(model) if counted is None else counted


def linear_flops_per_token(model: nn.Module) -> float:
    """FLOPs of the linear layers for one token, forward and backward: 6 for each element of a weight, 4 of a frozen one.

    Attention's products with each other, convolutions and experts that no `nn.Linear` holds are not counted, so a utilization
    computed from this number is too low rather than too high. Call it before conversion.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return sum((6.0 if weight.requires_grad else 4.0) * weight.numel() for weight in weights)
