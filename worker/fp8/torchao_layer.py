"""torchao's Float8Linear, which takes empty batches too. Importing this module loads torchao."""

from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.float8.float8_linear import Float8Linear


class TorchaoLinear(Float8Linear):
    """torchao's layer; a batch without elements, whose amax torchao cannot take, goes through `nn.Linear`'s product."""

    returns_16_bits: ClassVar[bool] = True

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == 0:
            return F.linear(input, self.weight, self.bias)
        device_type = input.device.type
        is_autocast = torch.is_autocast_enabled(device_type)  # torchao itself asks for CUDA's autocast, whatever the device
        if is_autocast:
            input = input.to(torch.get_autocast_dtype(device_type))
        # In inference mode autocast would cast torchao's operands by an op that they refuse.
        with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
            output: Tensor = super().forward(input)
        return output
