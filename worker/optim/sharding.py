"""Let an optimizer hold parts of a model's parameters: pieces of them (ZeRO), or shards that ranks share (tensor parallelism).

A piece is a 1-D parameter that shares memory with the model's, so that a step writes into the model. It keeps the origin of
the whole: it draws the same random numbers and has the same codecs. States of pieces, put together, are those of the whole.
A shard is a parameter of its own, in memory of its own. It keeps the parameter's index and codecs, and draws random numbers
that no other shard draws. Parameters that had no memory when the optimizer was made get their states once they are divided.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.common.deferred import sliceable
from octet.worker.fp8.weight import is_float8_weight, stored
from octet.worker.mesh import Cut, SavedStates
from octet.worker.optim.codecs import CODECS, select_entries, zeros
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.weights import QuantizedWeight, link_master, master_of


def cut_into_pieces(optimizer: LowBitOptimizer, elements: Mapping[nn.Parameter, range]) -> None:
    """Replace parameters by pieces in the optimizer's groups; `optimizer.pieces` tells which. Other parameters stay.

    elements: those that each piece holds, maybe none; they start at a multiple of 128. Raises ValueError, before anything is
    changed, for a parameter that is not contiguous.
    """
    for parameter in elements:
        if not parameter.is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; allowed: contiguous ones, "
                "which can be cut by elements. Make it contiguous, or use zero_stage=0."
            )
    for group in optimizer.param_groups:
        group["params"] = [_cut(optimizer, held, elements[held]) if held in elements else held for held in group["params"]]


def make_piece(parameter: nn.Parameter, elements: range) -> nn.Parameter:
    """Some elements of a contiguous parameter as a parameter, 1-D, in the same memory."""
    with sliceable(stored(parameter)) as held:
        piece = nn.Parameter(held.detach().view(-1)[elements.start : elements.stop], parameter.requires_grad)
    piece.grad_dtype = parameter.grad_dtype
    return piece


def shares_memory(piece: Tensor, parameter: Tensor, first_element: int) -> bool:
    """Return True if a piece still lies in the parameter's memory; a move to another device, or an assignment, ends that."""
    held = stored(parameter)
    return piece.numel() == 0 or piece.data_ptr() == held.data_ptr() + first_element * held.element_size()


def _cut(optimizer: LowBitOptimizer, parameter: nn.Parameter, elements: range) -> nn.Parameter:
    """Make a piece of a parameter, and hold it in the parameter's place."""
    piece, held = make_piece(parameter, elements), optimizer.held(parameter)
    state = {
        name: _copied(select_entries(value, elements)) if isinstance(value, dict) else value
        for name, value in held.state.items()
    }
    weight = None if held.weight is None else QuantizedWeight(held.weight.weight, piece, elements)
    if weight is not None:
        weight.weight.state.elements = elements
        if "master_weights" in state:
            link_master(weight, state["master_weights"])
    optimizer.hold(piece, parameter, held.origin._replace(first_element=elements.start), weight, state)
    optimizer.pieces[parameter] = piece
    return piece


def _copied(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy parts, so that the memory of the whole is released."""
    return {name: part.clone() for name, part in parts.items()}


def check_unused(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that has taken steps: its states are of whole parameters."""
    num_steps = max((int(state.get("step", 1)) for state in optimizer.state.values() if state), default=0)
    if num_steps:
        raise ValueError(
            f"the optimizer has taken {num_steps} steps with whole parameters; allowed with a tensor, pipeline or expert "
            "degree: a new one. Make the model parallel first, then load the states."
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
        if isinstance(optimizer, LowBitOptimizer):
            _hold_shard(optimizer, whole, shard, cuts[whole], rank)
        else:
            optimizer.state.pop(whole, None)


def _hold_shard(optimizer: LowBitOptimizer, whole: nn.Parameter, shard: nn.Parameter, cut: Cut, rank: int) -> None:
    if whole not in optimizer.origins:  # a parameter of the model that nobody trains
        optimizer.state.pop(whole, None)
        return
    state = optimizer.state.get(whole)
    weight = QuantizedWeight(shard) if is_float8_weight(shard) else None
    origin = optimizer.origins[whole]._replace(num_elements=shard.numel(), shard=rank, num_shards=cut.num_shards)
    optimizer.hold(shard, whole, origin, weight, None)
    if state:
        new = optimizer.zero_states(shard, optimizer.held(shard).group)
        if (master := state.get("master_weights")) is not None:
            assert weight is not None
            codes = cut.shard(master["codes"].view(cut.whole_shape), rank).view(-1)
            new["master_weights"] = link_master(weight, {"codes": codes, "dequant_scale": master["dequant_scale"].clone()})
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


def allocate_states(optimizer: LowBitOptimizer) -> None:
    """Allocate the states that are missing, in the order of the groups, without master weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                state = optimizer.zero_states(parameter, group)
                if optimizer.host_states is not None:
                    optimizer.host_states.hold(state)
                optimizer.state[parameter] = state


@torch.no_grad()
def make_master(optimizer: LowBitOptimizer, parameter: Tensor, values: Tensor, amax: Tensor) -> None:
    """Make a parameter's master weight of its fp32 values, flat. amax: of the whole weight, ()."""
    optimizer.state[parameter]["master_weights"] = master_of(optimizer.quantized[parameter], values, amax)


def state_bytes(optimizer: LowBitOptimizer, parameter: Tensor, group: Group) -> int:
    """Return the bytes of a parameter's states, without its master weight and its count of steps."""
    codecs = (optimizer.codec(parameter, group, name) for name in optimizer.rule.of(group).state_codecs)
    parts = (zeros(codec, parameter.numel(), torch.device("meta")) for codec in codecs)
    return sum(tensor.nbytes for stored in parts for tensor in stored.values())
