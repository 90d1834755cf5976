"""Tensors that were saved as shards of a tensor degree: one rank's, or put together for whoever has another degree.

Weights, residuals and master weights have one scale in all shards, so their codes are put together as they are. The moments of
the optimizer have a scale for each block of a shard's elements: they are decoded to fp32, and whoever loads them encodes them.
"""

from functools import partial
from typing import Any

from torch import Tensor

from octet.worker.mesh import Axis, SavedShards, SavedStates, SavedTensor
from octet.worker.optim.sharding import decoded, values_of


def own_shards(state: dict[str, Any], tensor: Axis) -> dict[str, Any]:
    """Return the state with this rank's shards, bit for bit, or with whole tensors if another degree has saved it."""
    degrees = {held.cut.num_shards for held in _leaves(state) if isinstance(held, SavedShards)}
    if degrees != {tensor.size}:
        return put_together(state)
    own: dict[str, Any] = _replaced(state, lambda held: SavedTensor(held.shape, held.dtype, partial(held.read, tensor.rank)))
    return own


def put_together(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint with whole tensors in the place of shards."""
    if not any(isinstance(held, SavedShards) for held in _leaves(state)):
        return state
    others = {name: part for name, part in state.items() if name != "optimizer"}
    whole: dict[str, Any] = _replaced(others, _joined)
    if "optimizer" in state:
        optimizer = state["optimizer"]
        states = SavedStates({key: partial(_whole_state, parts) for key, parts in optimizer["state"].items()})
        whole["optimizer"] = decoded(optimizer | {"state": states})
    return whole


def _joined(held: SavedShards) -> SavedTensor:
    return SavedTensor(held.cut.whole_shape, held.dtype, lambda: held.cut.join(held.all()))


def _whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """One parameter's states, whole."""
    state = {name: _read_pieces(part) for name, part in state.items()}
    cut = next((held.cut for held in _leaves(state) if isinstance(held, SavedShards)), None)
    if cut is None:
        return state
    whole = {}
    for name, parts in state.items():
        if not isinstance(parts, dict):
            whole[name] = parts
        elif name == "master_weights":
            whole[name] = parts | {"codes": cut.join(parts["codes"].all()).view(-1)}
        else:
            shards = [_of_shard(parts, shard) for shard in range(cut.num_shards)]
            whole[name] = {"codes": cut.join([values_of(shard) for shard in shards]).view(-1)}
    return whole


def _read_pieces(value: Any) -> Any:
    """The value with what was saved in pieces, but not as shards, as tensors."""
    if isinstance(value, dict):
        return {key: _read_pieces(item) for key, item in value.items()}
    return value.read() if isinstance(value, SavedTensor) else value


def _of_shard(parts: dict[str, Any], shard: int) -> dict[str, Tensor]:
    return {name: held.read(shard) if isinstance(held, SavedShards) else held for name, held in parts.items()}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _replaced(value: Any, replace: Any) -> Any:
    """The value with what `replace` makes of each tensor that was saved as shards."""
    if isinstance(value, SavedShards):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, replace) for item in value)
    return value
