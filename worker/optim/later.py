"""The states of parameters that had no memory when the optimizer was made, and so could be divided over ranks before.

They are made for what this rank steps alone: `allocate_states` before there are values, `make_master` with a weight's values.
"""

import torch
from torch import Tensor

from worker.optim.codecs import zeros
from worker.optim.optimizer import LowBitOptimizer
from worker.optim.rule import Group
from worker.optim.weights import master_of


def allocate_states(optimizer: LowBitOptimizer) -> None:
    """Allocate the states that are missing, in the order of the groups, without master weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                state = optimizer._zero_states(parameter, group)
                if optimizer.host_states is not None:
                    optimizer.host_states.hold(state)
                optimizer.state[parameter] = state


@torch.no_grad()
def make_master(optimizer: LowBitOptimizer, parameter: Tensor, values: Tensor, amax: Tensor) -> None:
    """Make a parameter's master weight of its fp32 values, flat. amax: of the whole weight, ()."""
    optimizer.state[parameter]["master_weights"] = master_of(optimizer._quantized[parameter], values, amax)


def state_bytes(optimizer: LowBitOptimizer, parameter: Tensor, group: Group) -> int:
    """Return the bytes of a parameter's states, without its master weight and its count of steps."""
    codecs = (optimizer._codec(parameter, group, name) for name in optimizer.rule.state_codecs)
    parts = (zeros(codec, parameter.numel(), torch.device("meta")) for codec in codecs)
    return sum(tensor.nbytes for stored in parts for tensor in stored.values())
