"""torchao's own Float8Linear, chosen by a precision's recipe. torchao is loaded only where a level asks for it."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from octet.api_schemas.precision import PrecisionSpec, TorchaoSpec


def torchao_converter(precision: PrecisionSpec, device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that makes torchao's layer from a linear layer and keeps its parameters.

    On the CPU torchao emulates the products. ValueError where torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise ValueError(
            f"level {precision.level} needs torchao, which is not installed: pip install --no-deps torchao==0.18.0"
        )
    from torchao.float8 import Float8LinearConfig

    from octet.worker.fp8.torchao_layer import TorchaoLinear

    options = precision.torchao or TorchaoSpec()
    config = replace(
        Float8LinearConfig.from_recipe_name(precision.torchao_recipe),
        pad_inner_dim=options.pad_inner_dim,
        enable_fsdp_float8_all_gather=options.fsdp_float8_all_gather,
        emulate=device.type == "cpu",
    )
    return lambda linear: TorchaoLinear.from_float(linear, config).train(linear.training)
