"""A linear layer that multiplies in bf16 or fp16, as torch.autocast would, and keeps its parameters as they are.

On an accelerator the operands are cast and the result stays 16 bits wide. On CPU the operands, the result and both
gradients are rounded to 16 bits but multiplied and stored in fp32: the values are those of a 16-bit product, while
native bf16 products run from 4x faster to 6x slower than fp32 depending on the CPU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class HalfLinear(nn.Module):
    """Takes over the parameters of an `nn.Linear`; ties stay, dtypes stay."""

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.compute_dtype = compute_dtype
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return linear_16bit(input, self.weight, self.bias, self.compute_dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, gemm={self.compute_dtype}"


def linear_16bit(input: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> Tensor:
    """`input @ weight.T + bias` with 16-bit operands and fp32 accumulation."""
    operands = [None if operand is None else operand.to(compute_dtype) for operand in (input, weight, bias)]
    if input.device.type != "cpu":
        return functional.linear(*operands)
    wide = [None if operand is None else operand.float() for operand in operands]
    return functional.linear(*wide).to(compute_dtype).to(input.dtype)
