"""Bring gradients to parameters held in few bits: a hook that quantizes, the port of compiled graphs, and zeros."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.kernels.torch_private import hooks_after_accumulation, let_foreach_take


def keep_gradient_in_fp8(parameter: nn.Parameter, position: RoundingPosition) -> None:
    """Make a parameter hold each gradient that arrives as a `Float8Gradient`."""
    let_foreach_take(Float8Gradient)  # else torch clips one by one
    parameter.grad_dtype = None  # autograd widens nothing that is rounded at once
    parameter.register_post_accumulate_grad_hook(partial(_quantize_gradient, position=position))


def product_dtype(weight: Tensor, position: RoundingPosition | None) -> torch.dtype:
    """The dtype in which the product makes a weight's gradient. position: the gradient is held in FP8.

    bf16 on an accelerator for a gradient that is rounded to E4M3 at once: the product writes, and the two passes of rounding
    read, 6 bytes an element instead of 12. Rounding twice changes 3 % of the codes, by one, and raises the error of E4M3 by
    0.6 % (tests/numerics/test_gradient_dtype.py). bf16 also for a bf16 parameter, since autograd wants such a gradient for it.
    Else fp32.
    """
    is_rounded = is_accelerator(weight.device) and position is not None
    return torch.bfloat16 if weight.dtype == torch.bfloat16 or is_rounded else torch.float32


def open_port(parameter: nn.Parameter, position: RoundingPosition | None) -> Tensor:
    """A leaf of the parameter's shape (and 4 bytes at most) through which a compiled graph sends the parameter's gradient.

    A graph of torch.compile casts each gradient to the dtype of the tensor it belongs to, whatever `grad_dtype` says: one
    of codes would be rounded as if it were codes. The port's dtype is therefore the gradient's, see `product_dtype`.
    """
    dtype = product_dtype(parameter, position)
    port = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape).requires_grad_()
    port.register_post_accumulate_grad_hook(partial(_deliver, parameter=parameter))
    return port


def _deliver(port: Tensor, parameter: nn.Parameter) -> None:
    """Do with the gradient what autograd does with one that comes straight to the parameter."""
    gradient, port.grad = port.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    parameter.octet_has_delivery = True
    for hook in hooks_after_accumulation(parameter):
        hook(parameter)
    parameter.octet_has_delivery = False


def has_new_gradient(parameter: Tensor) -> bool:
    """Return True if a hook after accumulation is called for a gradient, and not for the lack of one.

    A parameter that has a port is an input of the compiled graph, too, which has no gradient for
    it. Autograd calls the parameter's hooks nevertheless, before or after the delivery.
    """
    return parameter.grad is not None and getattr(parameter, "octet_has_delivery", True)


def _quantize_gradient(parameter: Tensor, position: RoundingPosition) -> None:
    gradient = parameter.grad
    if gradient is not None and type(gradient) is not Float8Gradient:  # None: there was no gradient
        parameter.grad = Float8Gradient.quantize(gradient, position)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second differentiation, as torch's decorator does, without entering `no_grad` needlessly.

    torch's own enters it in every call, although an ordinary backward pass has autograd off
    already.
    """
    refuses_second = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (refuses_second if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def zero_gradients(ctx: Any, grad_output_TN: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of an empty batch: zeros, as autograd gives them for an `nn.Linear`."""
    input_shape, weight_shape = ctx.shapes
    shapes_and_dtypes = (
        (input_shape, ctx.input_dtype),
        (weight_shape, ctx.grad_weight_dtype),
        (grad_output_TN.shape[1:], torch.float32),
    )
    zeros = [
        grad_output_TN.new_zeros(shape, dtype=dtype) if is_needed else None
        for is_needed, (shape, dtype) in zip(ctx.needs_input_grad[:3], shapes_and_dtypes, strict=True)
    ]
    return (*zeros, None, None)
