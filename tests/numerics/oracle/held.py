"""Read what a converted model holds, as raw bytes, and decode it with the oracle: nothing of the worker interprets a code."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.numerics.oracle.formats import decode, decode_split

NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.float16: "float16"}


def values(codes: Tensor, dequant_scale: Tensor) -> np.ndarray:
    """The values, fp64, of codes with one scale ()."""
    raw = codes.detach().contiguous().view(torch.uint16 if codes.dtype == torch.float16 else torch.uint8)
    return decode(raw.numpy(), NAMES[codes.dtype]) * float(dequant_scale)


def operand_weight(layer: nn.Module) -> np.ndarray:
    """The values, fp64, that a layer's products start from: of a residual or a master they see nothing."""
    weight: Any = layer.get_parameter("weight")
    return values(weight.codes, weight.dequant_scale) if hasattr(weight, "codes") else weight.detach().double().numpy()


def refined_weight(layer: nn.Module) -> np.ndarray:
    """The values, fp64, that a layer holds itself: codes with their residual, if there is one."""
    weight: Any = layer.get_parameter("weight")
    if getattr(weight, "residual", None) is None:
        return operand_weight(layer)
    raw = weight.codes.view(torch.uint8).numpy()
    return decode_split(raw, weight.residual.numpy()) * float(weight.dequant_scale)


def trained_weight(layer: nn.Module, optimizer: torch.optim.Optimizer) -> np.ndarray:
    """The values, fp64, that the optimizer steps: the master's, or else the layer's."""
    weight = layer.get_parameter("weight")
    master: dict[str, Any] | None = optimizer.state[weight].get("master_weights")
    if master is None:
        return refined_weight(layer)
    return values(master["codes"], master["dequant_scale"]).reshape(weight.shape)


def gradient(parameter: nn.Parameter) -> np.ndarray:
    """The values, fp64, of a gradient, which may be codes with one scale."""
    held: Any = parameter.grad
    return values(held.codes, held.dequant_scale) if hasattr(held, "codes") else held.double().numpy()
