"""Take over a torch optimizer: its parameter groups, and its states if it has stepped."""

from collections.abc import Iterable

import torch

from worker.optim.adamw import Hyperparameters, LowBitAdamW
from worker.optim.weights import QuantizedWeight

REPRESENTABLE = (torch.optim.AdamW, torch.optim.Adam)
_UNREPRESENTABLE_OPTIONS = ("amsgrad", "differentiable")
_IMPLEMENTATION_OPTIONS = ("foreach", "capturable", "fused")  # how torch computes; the result is the same


def adopt(
    optimizer: torch.optim.Optimizer,
    exp_avg_codec: str,
    exp_avg_sq_codec: str,
    *,
    quantized: Iterable[QuantizedWeight] = (),
    seed: int = 0,
) -> LowBitAdamW:
    """A LowBitAdamW with the groups, hyperparameters and states of torch's Adam or AdamW, moments stored by the codecs.

    A group may name codecs of its own (`exp_avg_codec`, `exp_avg_sq_codec`). Raises ValueError for what cannot be represented.
    """
    if type(optimizer) not in REPRESENTABLE:
        allowed = ", ".join(f"torch.optim.{known.__name__}" for known in REPRESENTABLE)
        raise ValueError(
            f"{type(optimizer).__name__} cannot hold its states in few bits; allowed: {allowed}. "
            "Use one of these, or a level that keeps fp32 states."
        )
    groups = []
    for group in optimizer.param_groups:
        for option in _UNREPRESENTABLE_OPTIONS:
            if group.get(option):
                raise ValueError(f"{option}=True is not supported with low-bit states; allowed: False. Switch it off.")
        dropped = (*_UNREPRESENTABLE_OPTIONS, *_IMPLEMENTATION_OPTIONS)
        groups.append({name: value for name, value in group.items() if name not in dropped})
    defaults = Hyperparameters(
        decoupled_weight_decay=isinstance(optimizer, torch.optim.AdamW),
        exp_avg_codec=exp_avg_codec,
        exp_avg_sq_codec=exp_avg_sq_codec,
    )
    adopted = LowBitAdamW(groups, defaults, quantized=quantized, seed=seed)
    if optimizer.state:
        adopted.load_state_dict(optimizer.state_dict())
    return adopted
