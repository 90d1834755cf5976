"""A linear layer's weight in a state dict: under a name that says what it is, and read whatever level saved it.

`weight` are values. `weight_codes` are codes, with `weight_dequant_scale`, `weight_amax` and `weight_residual`: a plain layer
finds no `weight` there, and says so. A layer of any level reads both: values are encoded as the layer holds its weight, codes
of another storage are decoded first.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.weights import EncodedWeight

CODES = "weight_codes"
PARTS = ("weight_dequant_scale", "weight_amax", "weight_residual")
_SCALINGS = ("input_scaling.", "weight_scaling.", "grad_output_scaling.")
_EXTRA_STATE = "_extra_state"

Encode = Callable[[Tensor], EncodedWeight]
"""Makes what a layer holds of fp32 values."""


def name_codes(layer: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """After a layer has saved its tensors: say that its weight are codes, in the place where it stands."""
    if layer._buffers.get("weight_dequant_scale") is not None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[prefix + CODES if name == prefix + "weight" else name] = state.pop(name)


def read_weight(layer: nn.Module, state: dict[str, Any], prefix: str, encode: Encode | None = None) -> bool:
    """Change a layer's part of a state dict into what the layer copies. Returns whether the weight came as values.

    encode: of a layer that holds codes. Raises ValueError for codes without their scale.
    """
    own = {name: state[prefix + name] for name in ("weight", CODES, *PARTS) if prefix + name in state}
    if CODES not in own and "weight_dequant_scale" in own and "weight" in own:
        own[CODES] = own.pop("weight")  # as saved before codes had a name of their own
    if CODES in own and "weight_dequant_scale" not in own:
        raise ValueError(f"{prefix}{CODES} came without {prefix}weight_dequant_scale; allowed: both, or {prefix}weight.")
    if CODES in own and encode is not None and _is_same_storage(layer, own):
        loaded, came_as_values = {("weight" if name == CODES else name): part for name, part in own.items()}, False
    elif own:
        values, came_as_values = _decode(own) if CODES in own else own["weight"], CODES not in own
        loaded = {"weight": values} if encode is None else _parts(encode(values))
    else:
        return False
    for name in ("weight", *own):
        state.pop(prefix + name, None)
    state.update({prefix + name: part for name, part in loaded.items()})
    return came_as_values


def make_plain(state: dict[str, Any], prefix: str) -> None:
    """Change a layer's part of a state dict into that of a plain layer."""
    put_values(state, prefix)
    drop_history(state, prefix)


def put_values(state: dict[str, Any], prefix: str, values: Tensor | None = None) -> None:
    """Replace a layer's codes in a state dict by fp32 values, if it has any. values: finer ones than those of the codes."""
    own = {name: state.pop(prefix + name) for name in (CODES, *PARTS) if prefix + name in state}
    if CODES in own:
        state[prefix + "weight"] = _decode(own) if values is None else values


def drop_history(state: dict[str, Any], prefix: str) -> None:
    """Remove what a layer with scales remembers from the part of a layer that remembers nothing."""
    for name in list(state):
        if name.startswith(tuple(prefix + scaling for scaling in _SCALINGS)) or name == prefix + _EXTRA_STATE:
            del state[name]


def _is_same_storage(layer: nn.Module, own: dict[str, Tensor]) -> bool:
    has_residual = layer._buffers.get("weight_residual") is not None
    return own[CODES].dtype == layer.get_parameter("weight").dtype and ("weight_residual" in own) == has_residual


def _decode(own: dict[str, Tensor]) -> Tensor:
    """The fp32 values."""
    if "weight_residual" in own:
        return kernels.split_dequantize(own[CODES], own["weight_residual"], own["weight_dequant_scale"])
    return kernels.dequantize(own[CODES], own["weight_dequant_scale"])


def _parts(encoded: EncodedWeight) -> dict[str, Tensor]:
    parts = zip(("weight", *PARTS), encoded, strict=True)
    return {name: part for name, part in parts if part is not None}
