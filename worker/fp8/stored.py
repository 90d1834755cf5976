"""A linear layer's weight in a state dict: values under the names of a plain layer, or exact parts where they are asked for.

`model.state_dict()` has the names and the values of a plain model. What a layer remembers besides (its scale, counts, windows
of delayed scaling) travels in the state dict's metadata, where torch keeps the versions of modules: whoever loads the dict as
it is continues exactly, and whoever does not know of it finds nothing strange.

`exact_state_dict(model)` has the parts: `weight_codes`, with `weight_dequant_scale`, `weight_amax`, `weight_residual`, and the
rest under names of its own. Checkpoints are made of it. A layer of any level reads all of this.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.fsdp import holds_codes, is_shard, load_into_shard, values_of_shard
from octet.worker.fp8.weight import Float8Weight

CODES = "weight_codes"
PARTS = ("weight_dequant_scale", "weight_amax", "weight_residual")
WIDE = "weight_wide"
_IS_ASSIGNED = "is_assigned"
"""The name in metadata of a weight's flag, which is kept if its values are finer than the codes, and wait for a step."""
_SCALINGS = ("input_scaling.", "weight_scaling.", "grad_output_scaling.")
_EXTRA_STATE = "_extra_state"
_OWN_METADATA = "octet"
_is_exact: ContextVar[bool] = ContextVar("exact_state_dict", default=False)


class Layer(Protocol):
    """A layer that may hold its weight as codes."""

    weight: nn.Parameter
    _parameters: Any

    @property
    def encoded(self) -> Float8Weight | None:
        """The weight, if it is held as codes."""


def exact_state_dict(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Return a state dict with codes, scales and all that layers remember under names of their own.

    A converted model loads it as it loads any state dict, bit for bit at the same level. options: of `nn.Module.state_dict`.
    """
    with exact_names():
        state: dict[str, Any] = model.state_dict(**options)
        return state


def is_exact() -> bool:
    """Return True inside of `exact_names`."""
    return _is_exact.get()


@contextmanager
def exact_names() -> Iterator[None]:
    """Inside, state dicts of converted models have exact parts."""
    token = _is_exact.set(True)
    try:
        yield
    finally:
        _is_exact.reset(token)


def keep_in_metadata(destination: dict[str, Any], prefix: str, names: tuple[str, ...]) -> None:
    """Move a module's entries of a state dict into its metadata, unless exact names are asked for."""
    if _is_exact.get():
        return
    held = {name: destination.pop(prefix + name) for name in names if prefix + name in destination}
    note_in_metadata(destination, prefix, held)


def note_in_metadata(destination: dict[str, Any], prefix: str, held: dict[str, Any]) -> None:
    """Keep tensors of a module beside its version in a state dict; a dict of a caller's own may have no place for them."""
    places = getattr(destination, "_metadata", None)
    if places is not None and held:
        own = places.setdefault(prefix[:-1], {}).setdefault(_OWN_METADATA, {})
        own.update({name: part.detach().clone() for name, part in held.items()})


def kept_in_metadata(metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return what `keep_in_metadata` has kept for a module."""
    kept: dict[str, Tensor] = metadata.get(_OWN_METADATA, {})
    return kept


def save_layer(layer: Layer, save: Callable[..., None], destination: dict[str, Any], prefix: str, *, keep_vars: bool) -> None:
    """Save a layer's own tensors. save: torch's method, which does it for a plain layer."""
    weight, parameters = layer.encoded, layer._parameters
    layer._parameters = {name: held for name, held in parameters.items() if weight is None or name != "weight"}
    try:
        if weight is not None:  # in its place, before the bias
            destination[prefix + "weight"] = None
        save(destination, prefix, keep_vars)
    finally:
        layer._parameters = parameters
    shard = destination.get(prefix + "weight")
    if weight is None and is_shard(shard) and holds_codes(shard):
        if _is_exact.get():
            raise ValueError(
                f"exact_state_dict got {prefix}weight, which FSDP2 has cut; allowed: a whole one. Call get_state_dict(model, "
                "optimizer) of torch.distributed.checkpoint.state_dict: it brings back the same codes."
            )
        if not keep_vars:
            destination[prefix + "weight"] = values_of_shard(shard)
    if weight is None:
        keep_in_metadata(destination, prefix, (_EXTRA_STATE,))
    elif _is_exact.get():
        _name_parts(destination, prefix, weight, keep_vars=keep_vars)
    else:
        destination[prefix + "weight"] = weight if keep_vars else weight.entry()
        held = {_numbers(weight): torch.stack([weight.dequant_scale, weight.values_amax])}
        if weight.state.wide is not None:
            held[_IS_ASSIGNED] = torch.tensor(weight.state.is_assigned)
        note_in_metadata(destination, prefix, held)
        keep_in_metadata(destination, prefix, (_EXTRA_STATE,))


def _name_parts(destination: dict[str, Any], prefix: str, weight: Float8Weight, *, keep_vars: bool) -> None:
    own = {name: destination.pop(name) for name in [name for name in destination if name.startswith(prefix)]}
    extra = own.pop(prefix + _EXTRA_STATE, None)
    del own[prefix + "weight"]
    destination[prefix + CODES] = weight.codes if keep_vars else weight.codes.detach()
    destination.update(own)
    for name, part in zip(PARTS, (weight.dequant_scale, weight.values_amax, weight.residual), strict=True):
        if part is not None:
            destination[prefix + name] = part if keep_vars else part.detach()
    if weight.state.wide is not None:
        destination[prefix + WIDE] = weight.state.wide
    if extra is not None:
        destination[prefix + _EXTRA_STATE] = extra


def read_weight(layer: Layer, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], errors: list[str]) -> bool:
    """Load a layer's weight from what a layer of any level, or a plain one, has saved. Torch loads the rest afterwards.

    Returns True if the weight came as values. Raises ValueError for codes without their scale.
    """
    own = take_weight(state_dict, prefix)
    came_as_values = "weight" in own
    kept = kept_in_metadata(metadata)
    if _EXTRA_STATE in kept:
        state_dict.setdefault(prefix + _EXTRA_STATE, kept[_EXTRA_STATE])
    elif not isinstance(state_dict.get(prefix + _EXTRA_STATE, torch.empty(0)), Tensor):
        del state_dict[prefix + _EXTRA_STATE]  # torch's distributed checkpoints put a mark where they have none
    weight = layer.encoded
    if weight is None and own:
        state_dict[prefix + "weight"] = own["weight"] if came_as_values else decode(own)
        _load_shard(layer.weight, state_dict, prefix + "weight")
    elif weight is not None and own:
        _load_weight(weight, own, kept, prefix, errors)
        state_dict[prefix + "weight"] = weight  # torch copies it into itself, and keeps it where it would assign
    return came_as_values


@torch.no_grad()
def _load_shard(shard: nn.Parameter, state_dict: dict[str, Any], name: str) -> None:
    """Write values into a shard of codes, which torch then copies into itself, and keeps where it would assign."""
    values = state_dict[name]
    if holds_codes(shard) and is_shard(values) and values.shape == shard.shape:
        load_into_shard(shard, values)
        state_dict[name] = shard


def _load_weight(weight: Float8Weight, own: dict[str, Tensor], kept: dict[str, Tensor], prefix: str, errors: list[str]) -> None:
    shape = own.get(CODES, own.get("weight", weight)).shape
    if shape != weight.shape:
        errors.append(
            f"size mismatch for {prefix}weight: copying a param with shape {shape} from checkpoint, the shape in current "
            f"model is {weight.shape}."
        )
        return
    if CODES in own and _is_same_storage(weight, own):
        weight.assign_codes(own[CODES], own[PARTS[0]], own[PARTS[1]], own.get(PARTS[2]))
        if WIDE in own:
            weight.state.wide, weight.state.is_assigned = own[WIDE].to(weight.device, copy=True), False
    else:
        values = own["weight"] if "weight" in own else decode(own)
        weight.assign(values, *kept.get(_numbers(weight), ()))
        if _IS_ASSIGNED in kept:
            weight.state.wide = values.to(weight.device, torch.float32, copy=True)
            weight.state.is_assigned = bool(kept[_IS_ASSIGNED])


def _numbers(weight: Float8Weight) -> str:
    """The name in metadata of a weight's scale and amax, which serve weights of the same storage alone."""
    return f"scale and amax of {weight.codes.dtype}"


def take_weight(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Take what belongs to a weight out of a state dict: `weight`, or codes with their parts, under names of today.

    Raises ValueError for codes without their scale.
    """
    names = ("weight", CODES, *PARTS, WIDE)
    own = {name: state.pop(prefix + name) for name in names if prefix + name in state}
    if CODES not in own and PARTS[0] in own and "weight" in own:
        own[CODES] = own.pop("weight")  # as saved before codes had a name of their own
    if CODES in own and PARTS[0] not in own:
        raise ValueError(f"{prefix}{CODES} came without {prefix}{PARTS[0]}; allowed: both, or {prefix}weight.")
    return own


def make_plain(state: dict[str, Any], prefix: str) -> None:
    """Change a layer's part of a state dict into that of a plain layer."""
    put_values(state, prefix)
    drop_history(state, prefix)


def put_values(state: dict[str, Any], prefix: str, values: Tensor | None = None) -> None:
    """Replace a layer's codes in a state dict by fp32 values, if it has any. values: finer ones than those of the codes."""
    own = take_weight(state, prefix)
    if CODES in own:
        own["weight"] = decode(own) if values is None else values
    if "weight" in own:
        state[prefix + "weight"] = own["weight"]


def drop_history(state: dict[str, Any], prefix: str) -> None:
    """Remove what a layer with scales remembers from the part of a layer that remembers nothing."""
    for name in list(state):
        if name.startswith(tuple(prefix + scaling for scaling in _SCALINGS)) or name == prefix + _EXTRA_STATE:
            del state[name]


def _is_same_storage(weight: Float8Weight, own: dict[str, Tensor]) -> bool:
    return own[CODES].dtype == weight.codes.dtype and (PARTS[2] in own) == (weight.residual is not None)


def decode(own: dict[str, Tensor]) -> Tensor:
    """Return the fp32 values of exact parts."""
    if WIDE in own:
        return own[WIDE]
    if PARTS[2] in own:
        return kernels.split_dequantize(own[CODES], own[PARTS[2]], own[PARTS[0]])
    return kernels.dequantize(own[CODES], own[PARTS[0]])
