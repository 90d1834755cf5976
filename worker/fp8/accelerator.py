"""Let a converted model enter autocast by itself on an accelerator, where its layers return 16 bits.

On an accelerator FP8 and 16-bit layers return 16 bits, while norms, embeddings and convolutions hold fp32. CUDA refuses a
LayerNorm of bf16 with fp32 weights, and attention of two dtypes. `torch.autocast` brings such operands together, so a converted
model runs inside it: each module that holds a converted layer enters autocast when it is called, unless it is on already. A
user's own autocast wins, and a part of the model that is called by itself behaves as it does inside the model.
On CPU nothing enters autocast, and layers return the dtype of their input, unless the residual stream is in bf16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from octet.worker.common.wrap import Nesting, Wrapper, wrap

_cpu_is_accelerator = False


def is_accelerator(device: torch.device) -> bool:
    """Return whether layers on this device return 16 bits. True for all devices but the CPU; see `cpu_as_accelerator`."""
    return device.type != "cpu" or _cpu_is_accelerator


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Inside, converted models on the CPU compute as they do on an accelerator: natively in 16 bits, under autocast."""
    global _cpu_is_accelerator
    before, _cpu_is_accelerator = _cpu_is_accelerator, True
    try:
        yield
    finally:
        _cpu_is_accelerator = before


class AutocastForward(Wrapper):
    """Calls one module's forward under autocast, if its device is an accelerator.

    is_on_cpu_too: on any device, for a model with hidden states (`residual_stream.py`) or norms in bf16.
    """

    nesting = Nesting.AUTOCAST

    def __init__(self, layer: nn.Module, dtype: torch.dtype, *, is_on_cpu_too: bool = False) -> None:
        """layer: a converted layer inside the module; its weight has the device, wherever the model is moved."""
        self.layer, self.dtype, self.is_on_cpu_too = layer, dtype, is_on_cpu_too

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer._parameters.get("weight")  # a parametrization computes `self.layer.weight` at each read
        device = (next(self.layer.parameters()) if weight is None else weight).device
        if not (self.is_on_cpu_too or is_accelerator(device)) or torch.is_autocast_enabled(device.type):
            return self.run(*args, **kwargs)
        with torch.autocast(device.type, dtype=self.dtype):
            return self.run(*args, **kwargs)


def run_under_autocast(model: nn.Module, dtype: torch.dtype, *, is_on_cpu_too: bool = False) -> None:
    """Let each module of a converted model that holds converted layers enter autocast of `dtype`, on an accelerator.

    is_on_cpu_too: on any device; torch's CPU ops take no mixture of fp32 and 16 bits without it.

    In a list of modules `forward` becomes the wrapper's method, so that blocks share graphs of torch.compile; elsewhere the
    wrapper itself, which has the signature of the module's own forward.
    """
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    listed = {
        part for holder in model.modules() if isinstance(holder, lists) for part in holder.modules() if part is not holder
    }
    for module in model.modules():
        layers = (part for part in module.modules() if part is not module and getattr(part, "returns_16_bits", False))
        layer = next(layers, None)
        if layer is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            wrap(module, AutocastForward(layer, dtype, is_on_cpu_too=is_on_cpu_too), as_object=module not in listed)
