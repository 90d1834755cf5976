"""Continue from a checkpoint that was made at any level.

Where both levels hold the weights in the same way, everything is loaded bit for bit. Otherwise a weight's finest values (of its
master weight, or of codes with their residual) are encoded as the new level holds them, and the moments by its codecs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from worker import kernels
from worker.fp8.bf16 import HalfLinear
from worker.fp8.layout import layout_of
from worker.fp8.linear import Float8Linear
from worker.fp8.loss_scaling import STATE_BUFFER
from worker.fp8.stored import CODES, drop_history, put_values
from worker.optim import LowBitOptimizer


def resume(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved_model: dict[str, Any], saved_optimizer: dict[str, Any]
) -> None:
    """Load the state dicts of a model and its optimizer into a model of the same network at this level or another.

    The state dicts are those of whole tensors; ranks that hold pieces (ZeRO) call this together, and each keeps its own.
    Steps, learning rates and the seed of rounding are those of the checkpoint. What delayed scaling remembers, and which layers
    were demoted, is kept where the new level has it too. Raises ValueError for the states of another optimizer rule.
    """
    has_same_storage = load_model(model, optimizer, saved_model, saved_optimizer)
    optimizer.load_state_dict(saved_optimizer)
    if not has_same_storage:
        make_masters(optimizer)


def load_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved_model: dict[str, Any], saved_optimizer: dict[str, Any]
) -> bool:
    """Load a model's state dict of any level, before the optimizer's. Returns whether both levels hold the weights alike.

    optimizer: says which of the saved states are whose; it is not changed.
    """
    has_same_storage = _tensors_by_name(saved_model) == _tensors_by_name(model.state_dict())
    if not has_same_storage:
        saved_model = _for_level_of(model, saved_model, saved_optimizer, names_by_key(model, optimizer, saved_optimizer))
    model.load_state_dict(saved_model)
    return has_same_storage


def make_masters(optimizer: torch.optim.Optimizer) -> None:
    """Make the master weights of what was loaded now, so that no fp32 values wait for the first step."""
    if isinstance(optimizer, LowBitOptimizer):
        for parameter in list(optimizer.state):
            optimizer.follow_weight(parameter)


def _tensors_by_name(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in state.items()}


def names_by_key(model: nn.Module, optimizer: torch.optim.Optimizer, saved_optimizer: dict[str, Any]) -> dict[str, int]:
    """The key of each parameter's states, by the parameter's name; groups list their parameters in the same order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})  # held instead of parameters under ZeRO
    names |= {id(piece): names[id(parameter)] for parameter, piece in pieces.items()}
    return {
        names[id(parameter)]: key
        for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True)
        for parameter, key in zip(group["params"], saved_group["params"], strict=True)
    }


def _for_level_of(
    model: nn.Module, saved_model: dict[str, Any], saved_optimizer: dict[str, Any], keys: dict[str, int]
) -> dict[str, Any]:
    """The saved state with values in the place of codes, and without what the model's layers do not remember."""
    state = dict(saved_model)
    for name in saved_model:
        if name.rpartition(".")[2] == CODES:
            prefix = name.removesuffix(CODES)
            saved_states = saved_optimizer["state"].get(keys.get(prefix + "weight"), {})
            put_values(state, prefix, _master_values(saved_states, saved_model[name].shape))
    for name, module in model.named_modules(remove_duplicate=False):
        if layout_of(module) is not None and not isinstance(module, (Float8Linear, HalfLinear)):
            drop_history(state, f"{name}." if name else "")
    own_scaling = model.state_dict().get(STATE_BUFFER)
    if own_scaling is None:
        state.pop(STATE_BUFFER, None)
    elif STATE_BUFFER not in state:
        state[STATE_BUFFER] = own_scaling.clone()
        state[STATE_BUFFER][2] = saved_optimizer.get("num_skipped_steps", 0)  # skipped before: no reason to halve the scale
    return state


def _master_values(saved_states: dict[str, Any], shape: torch.Size) -> Tensor | None:
    master = saved_states.get("master_weights")
    return None if master is None else kernels.dequantize(master["codes"], master["dequant_scale"]).view(shape)
