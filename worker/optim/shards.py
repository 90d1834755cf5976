"""Let an optimizer hold shards of parameters that the ranks of the tensor axis share.

A shard is a parameter of its own, in memory of its own. It keeps the parameter's index and codecs, and draws random numbers
that no other shard draws.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.mesh import Cut, SavedStates
from worker.optim.codecs import CODECS
from worker.optim.optimizer import LowBitOptimizer


def check_unused(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that has taken steps: its states are of whole parameters."""
    num_steps = max((int(state.get("step", 1)) for state in optimizer.state.values() if state), default=0)
    if num_steps:
        raise ValueError(
            f"the optimizer has taken {num_steps} steps with whole parameters; allowed with a tensor degree or a "
            "pipeline: a new one. Make the model parallel first, then load the states."
        )


def hold_shards(
    optimizer: torch.optim.Optimizer, shards: Mapping[nn.Parameter, nn.Parameter], cuts: Mapping[nn.Parameter, Cut], rank: int
) -> None:
    """Replace whole parameters by shards in the optimizer's groups, with states of zeros and shards of master weights.

    shards: of each whole parameter. cuts: by which the shard of number `rank` was cut from it.
    """
    for group in optimizer.param_groups:
        group["params"] = [shards.get(held, held) for held in group["params"]]
    for whole, shard in shards.items():
        state = optimizer.state.pop(whole, None)
        if isinstance(optimizer, LowBitOptimizer):
            _hold_shard(optimizer, whole, shard, cuts[whole], rank, state)


def _hold_shard(
    optimizer: LowBitOptimizer, whole: nn.Parameter, shard: nn.Parameter, cut: Cut, rank: int, state: dict[str, Any] | None
) -> None:
    if whole not in optimizer._origins:  # a parameter of the model that nobody trains
        return
    origin = optimizer._origins.pop(whole)
    optimizer._origins[shard] = origin._replace(num_elements=shard.numel(), shard=rank, num_shards=cut.num_shards)
    weight = optimizer._quantized.pop(whole, None)
    if weight is not None:
        optimizer._quantized[shard] = weight  # it reads the layer, which holds the shard by now
    if state:
        master = state.get("master_weights")
        group = next(group for group in optimizer.param_groups if any(held is shard for held in group["params"]))
        new = optimizer._zero_states(shard, group)
        if master is not None:
            codes = cut.shard(master["codes"].view(cut.whole_shape), rank).view(-1)
            new["master_weights"] = {"codes": codes, "dequant_scale": master["dequant_scale"].clone()}
        optimizer.state[shard] = new


def decoded(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole optimizer's state dict with every state in fp32, 1-D, under codecs that say so.

    Values that are put together, or cut, at other places than those of their blocks have to be encoded again.
    """
    groups: list[dict[str, Any]] = []
    changes: dict[Any, Callable[[Any], Any]] = {}
    for group in optimizer_state["param_groups"]:
        codecs = {name: codec for name, codec in group.items() if name.endswith("_codec")}
        changes |= dict.fromkeys(group["params"], partial(_decoded_state, names=set(codecs)))
        groups.append(group | dict.fromkeys(codecs, "fp32"))
    states = optimizer_state["state"]
    if isinstance(states, SavedStates):
        states = states.changed(changes)
    else:
        states = {key: changes[key](state) if key in changes else state for key, state in states.items()}
    return optimizer_state | {"state": states, "param_groups": groups}


def _decoded_state(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """One parameter's states. names: of the codecs of its group."""
    return {name: {"codes": values_of(value)} if f"{name}_codec" in names else value for name, value in state.items()}


def values_of(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the fp32 values of a stored state, 1-D. A codec is known by its parts and the dtype of its codes."""
    for codec in CODECS.values():
        if set(codec.parts) == set(parts) and codec.parts["codes"].dtype == parts["codes"].dtype:
            return codec.decode(parts)
    raise ValueError(
        f"a saved state consists of {', '.join(parts)} with codes of {parts['codes'].dtype}; allowed: what a codec of this "
        "version stores. Continue at the tensor degree that saved it."
    )
