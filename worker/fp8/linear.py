"""The FP8 linear layer and its three matrix products.

    output_TN      = input_TK @ weight_NK.T             e4m3 x e4m3
    grad_input_TK  = grad_output_TN @ weight_NK         e5m2 x e4m3
    grad_weight_NK = grad_output_TN.T @ input_TK        e5m2 x e4m3

What waits for the backward pass is the input's FP8 codes and scale, never the input itself. The weight is quantised
again from its parameter: cheaper than a second copy of every weight between forward and backward.

Shape suffixes: T tokens (all leading dimensions), K in features, N out features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from worker import kernels
from worker.fp8.gradient import RoundingPosition, keep_gradient_in_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Linear(nn.Module):
    """Takes over the parameters of an `nn.Linear` and multiplies in FP8.

    `weight` holds values, or codes with `value = weight * weight_dequant_scale`; its gradient is that of the value.
    """

    weight_dequant_scale: Tensor | None

    def __init__(
        self, linear: nn.Linear, weight_codes: torch.dtype | None, gradient_position: RoundingPosition | None
    ) -> None:
        """weight_codes: format to hold the weight in, None keeps its values. gradient_position: hold gradients in FP8."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.gradient_position = gradient_position
        self.register_buffer("weight_dequant_scale", None)
        if weight_codes is not None:
            self.weight.data, self.weight_dequant_scale = kernels.quantize(self.weight, weight_codes)
        self._prepare_gradient()
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        input_TK = input.reshape(-1, self.in_features)
        output_TN = Float8Matmuls.apply(input_TK, self.weight, self.weight_dequant_scale)
        if self.bias is not None:
            output_TN = output_TN + self.bias.to(output_TN.dtype)
        return output_TN.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, weight={self.weight.dtype}"

    def get_extra_state(self) -> Tensor:
        """What `state_dict` keeps beside parameters and buffers: how many roundings the gradient went through."""
        return torch.tensor(self.gradient_position.count if self.gradient_position else 0)

    def set_extra_state(self, state: Tensor) -> None:
        if self.gradient_position:
            self.gradient_position.count = int(state)

    def _prepare_gradient(self) -> None:
        if self.weight_dequant_scale is not None:
            self.weight.grad_dtype = torch.float32
        if self.gradient_position is not None:
            keep_gradient_in_fp8(self.weight, self.gradient_position)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what a copied or unpickled parameter loses: the dtype of its gradient and the hook."""
        super().__setstate__(state)
        self._prepare_gradient()

    def _apply(self, fn: Any, recurse: bool = True) -> "Float8Linear":
        """Move to another device. A cast is refused: codes in another dtype are other values."""
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        if self.weight_dequant_scale is not None and fn(probe).dtype != probe.dtype:
            raise ValueError(
                f"a converted layer holds its weight as {probe.dtype} codes and cannot be cast; allowed: another "
                "device. Cast the model before worker.initialize."
            )
        return super()._apply(fn, recurse)


class Float8Matmuls(torch.autograd.Function):
    """The three products, each with operands whose last dimension is the one summed over."""

    @staticmethod
    def forward(ctx: Any, input_TK: Tensor, weight_NK: Tensor, weight_dequant_scale: Tensor | None) -> Tensor:
        input_codes_TK, input_dequant_scale = kernels.quantize(input_TK, E4M3)
        ctx.save_for_backward(input_codes_TK, input_dequant_scale, weight_NK, weight_dequant_scale)
        weight = quantize_weight(weight_NK, weight_dequant_scale)
        return kernels.matmul(input_codes_TK, input_dequant_scale, *weight, input_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input_codes_TK, input_dequant_scale, weight_NK, weight_dequant_scale = ctx.saved_tensors
        grad_codes_TN, grad_dequant_scale = kernels.quantize(grad_output_TN, E5M2)
        grad_input_TK = grad_weight_NK = None
        if ctx.needs_input_grad[0]:
            weight_codes_NK, weight_code_scale = quantize_weight(weight_NK, weight_dequant_scale)
            grad_input_TK = kernels.matmul(
                grad_codes_TN, grad_dequant_scale, weight_codes_NK.t(), weight_code_scale, grad_output_TN.dtype
            )
        if ctx.needs_input_grad[1]:
            grad_weight_NK = kernels.matmul(
                grad_codes_TN.t(), grad_dequant_scale, input_codes_TK.t(), input_dequant_scale, torch.float32
            )
        return grad_input_TK, grad_weight_NK, None


def quantize_weight(weight_NK: Tensor, weight_dequant_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """E4M3 codes and dequant_scale of a weight held as values, or as codes of a scale."""
    codes_NK, dequant_scale = kernels.quantize(weight_NK, E4M3)
    if weight_dequant_scale is not None:
        dequant_scale = dequant_scale * weight_dequant_scale
    return codes_NK, dequant_scale
