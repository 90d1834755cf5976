"""Products in bf16 or fp16, as torch.autocast would make them, and a linear layer of them that keeps its parameters.

On an accelerator the operands are cast and the result stays 16 bits wide (`accelerator.py`). On CPU the operands, the result
and both gradients are rounded to 16 bits but multiplied and stored in fp32: the values are those of a 16-bit product, while
native bf16 products run from 4x faster to 6x slower than fp32 depending on the CPU.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.stored import drop_history, put_values


class HalfLinear(nn.Module):
    """Takes over the parameters of an `nn.Linear` or a `Conv1D`; ties stay, dtypes stay."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    returns_16_bits: ClassVar[bool] = True
    shared_cast: Tensor | None = None
    """The weight in 16 bits for several passes of a step; None: each pass casts it, and keeps that for its backward pass."""

    def __init__(self, linear: nn.Module, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        layout = layout_of(linear)
        assert layout is not None
        self.in_features, self.out_features, self.is_transposed = layout
        self.weight, self.bias = linear.get_parameter("weight"), linear.bias  # type: ignore[assignment]
        self.compute_dtype = compute_dtype
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight if self.shared_cast is None else self.shared_cast
        return half_linear(input, weight.t() if self.is_transposed else weight, self.bias, self.compute_dtype)

    def share_cast(self) -> None:
        """Cast the weight now, on an accelerator, for all passes until `drop_cast`. It may not change before."""
        if is_accelerator(self.weight.device):
            self.shared_cast = self.weight.to(self.compute_dtype)

    def drop_cast(self) -> None:
        """Let each pass cast the weight again."""
        vars(self).pop("shared_cast", None)  # not set to None: compiled code would guard on another attribute

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Read what a layer of any level has saved."""
        put_values(state_dict, prefix)
        drop_history(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, gemm={self.compute_dtype}"


class HalfNNLinear(HalfLinear, nn.Linear):  # type: ignore[misc]
    """Takes the place of an `nn.Linear`, and is one for code that looks for them, as PEFT does."""

    def _get_name(self) -> str:
        return HalfLinear.__name__


def half_linear(input: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> Tensor:
    """`input @ weight.T + bias` with 16-bit operands and fp32 accumulation."""
    bias = None if bias is None else bias.to(compute_dtype)
    if is_accelerator(input.device):
        return functional.linear(input.to(compute_dtype), weight.to(compute_dtype), bias)
    input_rounded, weight_rounded = input.to(compute_dtype).float(), weight.to(compute_dtype).float()
    output = functional.linear(input_rounded, weight_rounded, None if bias is None else bias.float())
    return output.to(compute_dtype).to(input.dtype)


def half_to_save(activation: Tensor) -> Tensor:
    """Return an activation in bf16, for a function that keeps it for its backward pass.

    Autograd follows nothing inside of a function, so the cast is marked as an activation for `saved_activations.py`.
    """
    if activation.dtype == torch.bfloat16:
        return activation
    half = activation.to(torch.bfloat16)
    if not torch.compiler.is_compiling():
        half.octet_is_activation = True
    return half


def is_marked_activation(saved: Tensor) -> bool:
    """Return True for a tensor of `half_to_save`."""
    return hasattr(saved, "octet_is_activation")


def activation_dtype(input: Tensor) -> torch.dtype:
    """The dtype that an FP8 layer returns: autocast's; else the input's, with at most 16 bits on an accelerator."""
    device_type = input.device.type  # torch formats the string at each read
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.bfloat16 if is_accelerator(input.device) and input.dtype != torch.float16 else input.dtype


def half_matmul(a_MK: Tensor, b_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a @ b.T` with bf16 operands, accumulated in fp32."""
    return half_linear(a_MK, b_NK, None, torch.bfloat16).to(out_dtype)
