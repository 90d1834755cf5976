"""How layers of 16 bits behave on an accelerator, and the autocast that a converted model enters there by itself.

On an accelerator FP8 and 16-bit layers return 16 bits, while norms, embeddings and convolutions hold fp32. CUDA refuses a
LayerNorm of bf16 with fp32 weights, and attention of two dtypes. `torch.autocast` brings such operands together, so a converted
model runs inside it: each module that holds a converted layer enters autocast when it is called, unless it is on already. A
user's own autocast wins, and a part of the model that is called by itself behaves as it does inside the model.
On CPU nothing enters autocast, and layers return the dtype of their input, unless the residual stream is in bf16.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_cpu_is_accelerator = False


def is_accelerator(device: torch.device) -> bool:
    """Whether layers on this device return 16 bits. True for all devices but the CPU; see `cpu_as_accelerator`."""
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


class AutocastForward:
    """Takes the place of one module's `forward`: calls it under autocast, if its device is an accelerator.

    is_on_cpu_too: on any device, for a model with hidden states in bf16 (`residual_stream.py`).
    """

    is_on_cpu_too = False

    def __init__(self, module: nn.Module, layer: nn.Module, dtype: torch.dtype) -> None:
        """layer: a converted layer inside the module; its weight tells the device, wherever the model is moved."""
        self.module, self.layer, self.dtype = module, layer, dtype
        self.replaced = vars(module).get("forward")  # what somebody else has put in the place of the class's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device: Any = self.layer.weight.device
        if not (self.is_on_cpu_too or is_accelerator(device)) or torch.is_autocast_enabled(device.type):
            return self._run(*args, **kwargs)
        with torch.autocast(device.type, dtype=self.dtype):
            return self._run(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the forward that it stands for: transformers finds the names of a model's inputs by it."""
        if self.replaced is not None:
            return inspect.signature(self.replaced)
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def run_under_autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Let each module of a converted model that holds converted layers enter autocast of `dtype`, on an accelerator.

    In a list of modules a method takes the place of `forward`, elsewhere the object. A graph of torch.compile is made for one
    object, but for the methods of all objects of a class: else each block of a model would be compiled for itself, and those
    after torch's limit of eight would not be compiled at all.
    """
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    listed = {
        part for holder in model.modules() if isinstance(holder, lists) for part in holder.modules() if part is not holder
    }
    for module in model.modules():
        layers = (part for part in module.modules() if part is not module and getattr(part, "returns_16_bits", False))
        layer = next(layers, None)
        if layer is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            forward = AutocastForward(module, layer, dtype)
            module.forward = forward.__call__ if module in listed else forward
