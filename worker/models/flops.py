"""Count the operations of a network, by its contract or, if its code is not ours, from its linear layers."""

from torch import nn

from octet.api_schemas import FamilySizes


def flops_per_token(sizes: FamilySizes, model: nn.Module, sequence_length: int) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation. Call it before conversion."""
    counted = sizes.flops_per_token(sequence_length)
    return linear_flops_per_token(model) if counted is None else counted


def linear_flops_per_token(model: nn.Module) -> float:
    """FLOPs of the linear layers for one token, forward and backward: 6 for each element of a weight, 4 of a frozen one.

    An expert counts by the share of the tokens that it sees. Attention's products with each other, convolutions and experts of
    other classes than transformers' are not counted, so a utilization computed from this number is too low rather than too
    high. Call it before conversion.
    """
    shares = {module.weight: 1.0 for module in model.modules() if isinstance(module, nn.Linear)}
    for module in model.modules():
        if (share := _share_of_tokens(module)) is not None:
            named = module.named_parameters()
            shares |= {weight: share for name, weight in named if weight.dim() > 1 and not name.endswith("bias")}
    return sum((6.0 if weight.requires_grad else 4.0) * share * weight.numel() for weight, share in shares.items())


def _share_of_tokens(module: nn.Module) -> float | None:
    """Return the share that each of a mixture's experts sees, on average; None for other modules than transformers' experts."""
    num_of_token = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    return num_of_token / module.num_experts if num_of_token and {"num_experts", "has_gate"} <= vars(module).keys() else None
