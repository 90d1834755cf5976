"""A gradient that presents as fp32 and holds FP8 codes and a scale: value = codes * dequant_scale.

Autograd accumulates an fp32 gradient into a parameter; the hook of `keep_gradient_in_fp8` replaces it at once, so that at
most one layer's gradient is ever held wide. What torch does to gradients works on the codes: `clip_grad_norm_` multiplies
the scale, a further micro-batch is added with stochastic rounding (round-to-nearest would lose every contribution smaller
than 1/16 of the running sum). Any other op reads the decoded fp32 values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from worker import kernels
from worker.kernels import ScaledCodes, ScaleKind
from worker.kernels.formats import E4M3

aten = torch.ops.aten


@dataclass
class RoundingPosition:
    """Where one parameter's gradient stands in the random stream: `count` additions were rounded so far."""

    seed: int
    stream: int
    count: int = 0

    def next_draw(self) -> tuple[int, int, int]:
        """Seed, step and stream of random numbers that were never drawn before."""
        self.count += 1
        return self.seed, self.count, self.stream


class Float8Gradient(Tensor):
    """E4M3 codes with one dequant_scale (), seen by torch as an fp32 tensor of the same shape.

    The dequant_scale is NaN where a value is not finite: nobody has to read the codes to know.
    """

    codes: Tensor
    dequant_scale: Tensor
    position: RoundingPosition

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: Tensor, dequant_scale: Tensor, position: RoundingPosition) -> "Float8Gradient":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, dequant_scale: Tensor, position: RoundingPosition) -> None:
        self.codes, self.dequant_scale, self.position = codes, dequant_scale, position

    @classmethod
    def quantize(cls, values: Tensor, position: RoundingPosition) -> "Float8Gradient":
        """Round values of any floating dtype to nearest, with one scale."""
        amax = kernels.compute_amax(values)
        codes, dequant_scale = kernels.quantize(values, E4M3.dtype, amax=amax)
        return cls(codes, torch.where(amax.isfinite(), dequant_scale, torch.nan), position)

    def dequantize(self) -> Tensor:
        """The fp32 values."""
        return kernels.values_of(ScaledCodes(self.codes, self.dequant_scale, ScaleKind.TENSOR))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Gradient(shape={tuple(self.shape)}, codes={self.codes.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], RoundingPosition]:
        return ["codes", "dequant_scale"], self.position

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], position: RoundingPosition, size: torch.Size, stride: tuple[int, ...]
    ) -> "Float8Gradient":
        return Float8Gradient(parts["codes"], parts["dequant_scale"], position)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ON_CODES:
            return _ON_CODES[func](*args, **kwargs)
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} would write into an FP8 gradient; allowed in place: add_, mul_, zero_. "
                "Read param.grad.dequantize() and assign a new param.grad instead."
            )
        args, kwargs = tree_map_only(Float8Gradient, Float8Gradient.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def keep_gradient_in_fp8(parameter: nn.Parameter, position: RoundingPosition) -> None:
    """Make a parameter hold each gradient that arrives as a `Float8Gradient`."""
    parameter.register_post_accumulate_grad_hook(partial(_quantize_gradient, position=position))


def open_port(parameter: nn.Parameter) -> Tensor:
    """An fp32 leaf of the parameter's shape (and 4 bytes) through which a compiled graph sends the parameter's gradient.

    A graph of torch.compile casts each gradient to the dtype of the tensor it belongs to, whatever `grad_dtype` says: one
    of codes would be rounded as if it were codes.
    """
    port = torch.zeros((), device=parameter.device).expand(parameter.shape).requires_grad_()
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
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def _quantize_gradient(parameter: Tensor, position: RoundingPosition) -> None:
    if parameter.grad is not None and not isinstance(parameter.grad, Float8Gradient):  # None: there was no gradient
        parameter.grad = Float8Gradient.quantize(parameter.grad, position)


def _map_codes(op: Callable[[Tensor], Tensor]) -> Callable[..., Float8Gradient]:
    def on_codes(gradient: Float8Gradient, **_options: Any) -> Float8Gradient:
        return Float8Gradient(op(gradient.codes), op(gradient.dequant_scale), gradient.position)

    return on_codes


def _add_(gradient: Float8Gradient, other: Tensor, *, alpha: float = 1.0) -> Float8Gradient:
    """gradient += alpha * other, with a new scale and stochastic rounding."""
    other = other.dequantize() if isinstance(other, Float8Gradient) else other
    kernels.accumulate_(gradient.codes, gradient.dequant_scale, other, alpha, gradient.position.next_draw())
    return gradient


def _mul_(gradient: Float8Gradient, factor: Tensor | float) -> Float8Gradient:
    gradient.dequant_scale.mul_(factor)
    return gradient


def _zero_(gradient: Float8Gradient) -> Float8Gradient:
    gradient.codes.zero_()
    gradient.dequant_scale.fill_(1.0)  # clipping may have left a NaN there
    return gradient


def _foreach_mul_(gradients: list[Tensor], factor: Tensor | float) -> None:
    scaled = [gradient.dequant_scale if isinstance(gradient, Float8Gradient) else gradient for gradient in gradients]
    torch._foreach_mul_(scaled, factor)


def _foreach_norm(gradients: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """In as few launches as there are kinds of gradients; by another order than 2, FP8 ones are decoded one at a time."""
    in_codes = [gradient for gradient in gradients if _is_normed_in_codes(gradient, order)]
    plain = [gradient for gradient in gradients if not isinstance(gradient, Float8Gradient)]
    of_codes = iter(kernels.norms([(gradient.codes, gradient.dequant_scale) for gradient in in_codes]))
    of_plain = iter(torch._foreach_norm(plain, order) if plain else ())
    norms = []
    for gradient in gradients:
        if not isinstance(gradient, Float8Gradient):
            norms.append(next(of_plain))
        elif _is_normed_in_codes(gradient, order):
            norms.append(next(of_codes))
        else:
            norms.append(torch.linalg.vector_norm(gradient, order))
    return norms


def _is_normed_in_codes(gradient: Tensor, order: float) -> TypeGuard["Float8Gradient"]:
    return isinstance(gradient, Float8Gradient) and order == 2


_ON_CODES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _map_codes(Tensor.detach),
    aten.clone.default: _map_codes(Tensor.clone),
    aten.add_.Tensor: _add_,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten._foreach_mul_.Tensor: _foreach_mul_,
    aten._foreach_mul_.Scalar: _foreach_mul_,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.zero_.default: _zero_,
}
