"""What torch's ops do to FP8 gradients: in their codes and scales where that is enough, else on the decoded values.

An op that writes into a gradient, or into a view of one, works on decoded values, which are then encoded again.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from worker import kernels
from worker.fp8.clipping import codes_of, note_writes, scales_of
from worker.fp8.gradient import Float8Gradient, GradientView
from worker.fp8.torch_clipping import known_norms, takes_part

aten = torch.ops.aten
Handler = Callable[..., Any]
"""Runs an op whose first argument is an FP8 gradient, or a list with one; returns NotImplemented to have values decoded."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op of torch with an FP8 gradient, or a view of one, among its arguments."""
    first = args[0] if args else None
    is_list = isinstance(first, list | tuple) and not any(isinstance(part, GradientView) for part in first)
    if func in _ON_CODES and (is_list or isinstance(first, Float8Gradient)):
        result = _ON_CODES[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view and isinstance(first, Float8Gradient | GradientView):
        return _view(func, args, kwargs)
    if func._schema.is_mutable and is_list:
        return _write_each(func, args, kwargs)
    return _on_values(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, rest = args[0], args[1:]
    gradient, outer = (source, None) if isinstance(source, Float8Gradient) else (source.gradient, source.as_view)

    def take(values: Tensor) -> Any:
        return func(values if outer is None else outer(values), *rest, **kwargs)

    examples = take(torch.empty(gradient.shape, device="meta"))
    if isinstance(examples, Tensor):
        return GradientView(gradient, take, examples)
    return [GradientView(gradient, partial(_nth, take, index), example) for index, example in enumerate(examples)]


def _nth(take: Callable[[Tensor], Any], index: int, values: Tensor) -> Tensor:
    nth: Tensor = take(values)[index]
    return nth


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on fp32 values; encode again the gradients that it has written into."""
    bases: dict[int, tuple[Float8Gradient, Tensor]] = {}
    originals: dict[int, tuple[Tensor, Tensor]] = {}

    def decode(argument: Any) -> Any:
        if not _is_encoded(argument):
            return argument
        gradient = argument if isinstance(argument, Float8Gradient) else argument.gradient
        _, base = bases.setdefault(id(gradient), (gradient, gradient.dequantize()))
        values = base if argument is gradient else argument.as_view(base)
        originals[id(values)] = (argument, values)
        return values

    result = func(*tree_map(decode, args), **tree_map(decode, kwargs))
    if not func._schema.is_mutable:
        return result
    for argument in _written(func, args, kwargs):
        if _is_encoded(argument):
            gradient, base = bases[id(getattr(argument, "gradient", argument))]
            gradient.overwrite(base)
    return tree_map_only(Tensor, lambda tensor: originals.get(id(tensor), (tensor,))[0], result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the op writes into."""
    written: list[Any] = []
    for number, parameter in enumerate(func._schema.arguments):
        if parameter.is_write:
            written += tree_leaves(args[number] if number < len(args) else kwargs.get(parameter.name))
    return written


def _is_encoded(argument: Any) -> bool:
    return isinstance(argument, Float8Gradient | GradientView)


def _write_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a foreach op that writes: once where all is plain, else for one tensor at a time, so that one at most is wide."""
    ones = {index: _picked(args, [index]) for index in range(len(args[0]))}
    plain = [index for index, one in ones.items() if not any(map(_is_encoded, tree_leaves((one, kwargs))))]
    if plain:
        func(*_picked(args, plain), **kwargs)
    for index in ones.keys() - plain:
        one = ones[index]
        if func in _SINGLE and isinstance(one[0][0], Float8Gradient):
            _SINGLE[func](*(part[0] if isinstance(part, list) else part for part in one), **kwargs)
        else:
            _on_values(func, tuple(one), kwargs)


def _picked(args: Sequence[Any], indices: list[int]) -> list[Any]:
    """The arguments with some entries of each list."""
    return [[arg[index] for index in indices] if isinstance(arg, list | tuple) else arg for arg in args]


def _map_codes(op: Callable[[Tensor], Tensor]) -> Handler:
    def on_codes(gradient: Float8Gradient, **_options: Any) -> Float8Gradient:
        return Float8Gradient(op(gradient.codes), op(gradient.dequant_scale), gradient.position)

    return on_codes


def _add_(gradient: Float8Gradient, other: Any, *, alpha: float = 1.0) -> Any:
    """gradient += alpha * other, with a new scale and stochastic rounding."""
    if not isinstance(other, Tensor) or other.shape != gradient.shape:
        return NotImplemented
    other = other.dequantize() if isinstance(other, Float8Gradient) else other
    other = other if other.dtype in (torch.float32, torch.bfloat16, torch.float16) else other.float()
    gradient.position.accumulate_(gradient.codes, gradient.dequant_scale, other, alpha)
    return gradient


def _sub_(gradient: Float8Gradient, other: Any, *, alpha: float = 1.0) -> Any:
    return _add_(gradient, other, alpha=-alpha)


def _on_scale(op: Any) -> Handler:
    """The op, a product or quotient by one number, on the scale."""

    def on_scale(gradient: Float8Gradient, *factor: Any) -> Any:
        if not all(_is_one_number(number) for number in factor):
            return NotImplemented
        op(gradient.dequant_scale, *(number.reshape(()) if isinstance(number, Tensor) else number for number in factor))
        return gradient

    return on_scale


def _foreach_on_scales(op: Any) -> Handler:
    """The op, products or quotients by one number for each gradient, on the scales and on the plain tensors."""

    def on_scales(gradients: list[Tensor], *factors: Any) -> Any:
        if not all(map(_is_one_number, tree_leaves(factors))):
            return NotImplemented
        result = op(scales_of(gradients), *factors)
        note_writes(gradients)
        return result

    return on_scales


def _is_one_number(factor: Any) -> bool:
    return not isinstance(factor, Tensor) or (factor.numel() == 1 and factor.ndim <= 1 and not _is_encoded(factor))


def _unscale_(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply by the inverse of GradScaler's loss scale; found_inf becomes 1 if one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(scales_of(gradients), found_inf, inverse_scale)


def _zero_(gradient: Float8Gradient) -> Float8Gradient:
    gradient.codes.zero_()
    gradient.dequant_scale.fill_(1.0)  # clipping may have left a NaN there
    return gradient


def _copy_(gradient: Float8Gradient, source: Tensor, _non_blocking: bool = False) -> Float8Gradient:
    """New values, rounded to nearest as those of a backward pass are."""
    if not isinstance(source, Float8Gradient):
        values = source.to(gradient.device).expand(gradient.shape)
        source = Float8Gradient.quantize(values + 0 if isinstance(values, GradientView) else values, gradient.position)
    gradient.codes.copy_(source.codes)
    gradient.dequant_scale.copy_(source.dequant_scale)
    return gradient


def _clip(func: Any) -> Handler:
    """An op that limits values: nothing changes if none is beyond the limits, and a limit that is a number is held exactly."""
    names = ("min", "max") if "clamp_." in str(func) else ("min",) if "min" in str(func) else ("max",)

    def clip(gradient: Float8Gradient, *limits: Any, **named_limits: Any) -> Float8Gradient:
        given = dict(zip(names, limits, strict=False)) | named_limits
        if not any(isinstance(limit, Tensor) for limit in given.values()):
            low, high = given.get("min"), given.get("max")
            bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
            gradient.position.clamp_(gradient.codes, gradient.dequant_scale, *bounds)
            return gradient
        values = gradient.dequantize()
        clipped = func(values.clone(), *limits, **named_limits)
        is_changed = (clipped != values).any() & clipped.isfinite().all()
        gradient.overwrite_clipped(clipped, is_changed, kernels.compute_amax(clipped))
        return gradient

    return clip


def norms_of(gradients: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """In one op for FP8 and fp32 gradients, if any is in FP8; by an order that is not above 0, FP8 ones are decoded in turn."""
    together = [gradient for gradient in gradients if takes_part(gradient)] if order > 0 else []
    norms: dict[int, Tensor] = {}
    if together:
        norms_N, again_N1, total = kernels.norms(codes_of(together), scales_of(together), float(order))
        if len(together) == len(gradients) and dtype is None:
            return known_norms(gradients, norms_N, again_N1, total, order)
        norms |= zip(map(id, together), norms_N.unbind(), strict=True)
    apart = [gradient for gradient in gradients if id(gradient) not in norms]
    plain = [gradient for gradient in apart if not isinstance(gradient, Float8Gradient)]
    norms |= zip(map(id, plain), torch._foreach_norm(plain, order) if plain else (), strict=True)
    for gradient in apart:
        if isinstance(gradient, Float8Gradient):
            norms[id(gradient)] = torch.linalg.vector_norm(gradient.dequantize(), order)
    return [norms[id(gradient)] if dtype is None else norms[id(gradient)].to(dtype) for gradient in gradients]


def _vector_norm(
    gradient: Float8Gradient, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The norm of a whole gradient, from its codes."""
    is_whole = dim is None and not keepdim and dtype in (None, torch.float32) and order > 0
    return kernels.norms([gradient.codes], [gradient.dequant_scale], float(order))[0][0] if is_whole else NotImplemented


_CLIPS = (
    aten.clamp_.default, aten.clamp_.Tensor, aten.clamp_min_.default, aten.clamp_min_.Tensor,
    aten.clamp_max_.default, aten.clamp_max_.Tensor,
)  # fmt: skip
_PRODUCTS = (
    aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_mul_.ScalarList, aten._foreach_mul_.List,
    aten._foreach_div_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.ScalarList, aten._foreach_div_.List,
    aten._foreach_neg_.default,
)  # fmt: skip
_ON_CODES: dict[Any, Handler] = {
    aten.detach.default: _map_codes(Tensor.detach),
    aten.clone.default: _map_codes(Tensor.clone),
    aten.add_.Tensor: _add_,
    aten.sub_.Tensor: _sub_,
    **{op: _on_scale(op) for op in (aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg_.default)},
    **{op: _foreach_on_scales(op) for op in _PRODUCTS},
    aten._foreach_norm.Scalar: norms_of,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
    aten.zero_.default: _zero_,
    aten.copy_.default: _copy_,
    **{op: _clip(op) for op in _CLIPS},
}
_SINGLE: dict[Any, Handler] = {
    aten._foreach_zero_.default: _zero_,
    aten._foreach_copy_.default: _copy_,
    aten._foreach_add_.List: _add_,
    aten._foreach_sub_.List: _sub_,
    **{
        op: _clip(clip)
        for op, clip in (
            (aten._foreach_clamp_min_.Scalar, aten.clamp_min_.default),
            (aten._foreach_clamp_max_.Scalar, aten.clamp_max_.default),
        )
    },
}
"""Foreach ops that are made of an op on one gradient."""
