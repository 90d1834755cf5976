"""Export what was trained as a state dict with the names and values of a plain model, for any other program."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.stored import CODES, PARTS, make_plain
from octet.worker.fp8.weights import decode_values
from octet.worker.optim.weights import QuantizedWeight, is_rounding


def plain_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state dict that the model would have without `initialize`: weights are values.

    optimizer: its master weights are taken where it has any; without it an O3 weight has the precision of E4M3.
    dtype: of the weights that are held as codes; what is held as values keeps its dtype. The weights of codes are new tensors.
    """
    return dict(plain_tensors(model, optimizer, dtype=dtype))


def plain_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of `plain_state_dict`; a weight of codes is decoded when its turn comes."""
    state, layers = model.state_dict(), layers_of_codes(model)
    for name, _ in layers:
        drop_codes(state, join(name, ""))
    yield from as_plain(model, state).items()
    for name, layer in layers:
        yield join(name, "weight"), finest_values(layer, optimizer, dtype)


def finest_values(layer: Float8Linear, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a layer's weight in dtype, in its shape: those of its master weight if the optimizer holds one.

    A master weight that is older than the layer's codes, because codes were loaded since, does not count.
    """
    if layer.initial_values is not None:
        return layer.initial_values.to(dtype)
    master = optimizer.state.get(layer.weight, {}).get("master_weights") if optimizer is not None else None
    if master is None or (layer.has_new_codes and not is_rounding(QuantizedWeight(layer), master)):
        if layer.weight_dequant_scale is None:
            return layer.weight_values(dtype)
        layer.check_residual()
        return decode_values(layer.weight.detach(), layer.weight_dequant_scale, layer.weight_residual, dtype)
    return decode_values(master["codes"].view_as(layer.weight), master["dequant_scale"], None, dtype)


def drop_codes(state: dict[str, Any], prefix: str) -> None:
    """Remove the weight of a layer of codes, with what belongs to it, from a state dict."""
    for name in (CODES, *PARTS):
        state.pop(prefix + name, None)


def as_plain(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict of an initialized model in the names and values of a plain one; one that is plain already is copied."""
    plain = dict(state)
    plain.pop(STATE_BUFFER, None)
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, Float8Linear):
            make_plain(plain, join(name, ""))
    return plain


class PlainSaving:
    """Takes the place of a transformers model's `save_pretrained`: what it writes, `from_pretrained` loads as a plain model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, state_dict: dict[str, Any] | None = None, **options: Any) -> Any:
        held = self.model.state_dict() if state_dict is None else state_dict
        save: Any = type(self.model).save_pretrained
        return save(self.model, save_directory, *args, state_dict=as_plain(self.model, held), **options)


def save_plainly(model: nn.Module) -> None:
    """Let `save_pretrained`, where a model has it, write values instead of codes."""
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = PlainSaving(model)  # type: ignore[assignment]


def layers_of_codes(model: nn.Module) -> list[tuple[str, Float8Linear]]:
    """The layers that hold their weight as codes, under every name each is known by."""
    layers = model.named_modules(remove_duplicate=False)
    return [
        (name, layer) for name, layer in layers if isinstance(layer, Float8Linear) and layer.weight_dequant_scale is not None
    ]


def join(name: str, attribute: str) -> str:
    """The full name of a module's attribute; the root module's name is empty."""
    return f"{name}.{attribute}" if name else attribute
