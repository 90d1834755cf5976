"""A gradient that presents as fp32 and holds FP8 codes and a scale: value = codes * dequant_scale.

Autograd accumulates an fp32 gradient into a parameter; the hook of `keep_gradient_in_fp8` replaces it at once, so that at
most one layer's gradient is ever held wide. What torch does to gradients works on the codes: `clip_grad_norm_` and
`GradScaler.unscale_` multiply the scale, a further micro-batch is added with stochastic rounding (round-to-nearest would
lose every contribution smaller than 1/16 of the running sum). Any other op reads the decoded fp32 values; one that writes,
into the gradient or a view of it, has the changed values encoded again. The ops with a rule of their own are the table
`_ON_CODES` at the end.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8 import collectives
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.kernels import ScaledCodes, ScaleKind, finite_or_nan
from octet.worker.kernels.formats import E4M3
from octet.worker.kernels.torch_private import (
    disabled_torch_function,
    foreach_norm,
    foreach_unscale_,
    make_wrapper_subclass,
    raise_for_raw_pointers,
    schema_of,
    tree_leaves,
    tree_map,
    tree_map_only,
)

aten = torch.ops.aten
Handler = Callable[..., Any]
"""Runs an op whose first argument is an FP8 gradient, or a list with one; returns NotImplemented to have values decoded."""


class Float8Gradient(Tensor):
    """E4M3 codes with one dequant_scale (), seen by torch as an fp32 tensor of the same shape.

    The dequant_scale is NaN where a value is not finite: nobody has to read the codes to know.
    """

    codes: Tensor
    dequant_scale: Tensor
    position: RoundingPosition

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: Tensor, dequant_scale: Tensor, position: RoundingPosition) -> "Float8Gradient":
        made: Float8Gradient = make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        return made

    def __init__(self, codes: Tensor, dequant_scale: Tensor, position: RoundingPosition) -> None:
        self.codes, self.dequant_scale, self.position = codes, dequant_scale, position
        raise_for_raw_pointers(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Gradient":
        """Copy the parts; torch's own would ask for a pointer to values."""
        position = deepcopy(self.position, memo)
        copied = Float8Gradient(deepcopy(self.codes, memo), deepcopy(self.dequant_scale, memo), position)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return Float8Gradient, (self.codes, self.dequant_scale, self.position)

    @classmethod
    def quantize(cls, values: Tensor, position: RoundingPosition) -> "Float8Gradient":
        """Round values of any floating dtype to nearest, with one scale."""
        return cls(*kernels.quantize_gradient(values, E4M3.dtype), position)

    def dequantize(self) -> Tensor:
        """The fp32 values."""
        return kernels.values_of(ScaledCodes(self.codes, self.dequant_scale, ScaleKind.TENSOR))

    def overwrite(self, values: Tensor) -> None:
        """Hold other values, fp32 of the same shape: stochastically rounded, as codes of the same values are among them."""
        self.codes.zero_()
        self.dequant_scale.fill_(1.0)
        self.position.accumulate_(self.codes, self.dequant_scale, values, 1.0)

    def overwrite_clipped(self, values: Tensor, is_changed: Tensor, limit: Tensor) -> None:
        """Hold clipped values, fp32, if is_changed (): the limit () exactly, other values stochastically rounded.

        The scale is the limit times a power of two, so that one of the codes is the limit.
        """
        unit = torch.where(limit > 0, limit, 1.0)
        dequant_scale = finite_or_nan(kernels.compute_amax(values) / unit, E4M3.dtype) * unit
        random_numbers = kernels.random_bits(*self.position.next_draw(values.device), range(values.numel()), values.device)
        codes = kernels.stochastic_round(values / dequant_scale, E4M3, random_numbers.view(values.shape))
        held = self.codes.view(torch.uint8)
        held.copy_(torch.where(is_changed, codes.view(torch.uint8), held))
        self.dequant_scale.copy_(torch.where(is_changed, dequant_scale, self.dequant_scale))

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
        return _run(func, tuple(args), kwargs or {})


class GradientView(Tensor):
    """A view of a gradient's values. It holds none: each read decodes the gradient, each write encodes it again."""

    gradient: Float8Gradient
    as_view: Callable[[Tensor], Tensor]

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradient: Float8Gradient, as_view: Callable[[Tensor], Tensor], example: Tensor) -> "GradientView":
        """as_view: makes the view of the gradient's fp32 values. example: such a view, for its shape and strides."""
        made: GradientView = make_wrapper_subclass(
            cls, example.shape, example.stride(), example.storage_offset(), dtype=example.dtype, device=gradient.device
        )
        return made

    def __init__(self, gradient: Float8Gradient, as_view: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self.gradient, self.as_view = gradient, as_view
        raise_for_raw_pointers(self)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientView(shape={tuple(self.shape)}, of={self.gradient})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return Float8Gradient.__torch_dispatch__(func, types, args, kwargs)


def note_writes(gradients: Iterable[Tensor]) -> None:
    """Record writes into the plain ones of some gradients: autograd counts no write that happens below it, as ours do."""
    plain = [gradient for gradient in gradients if type(gradient) is not Float8Gradient and not gradient.is_inference()]
    torch.autograd.graph.increment_version(plain)


def codes_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The codes of FP8 gradients, and the others as they are."""
    # Of a tensor, asking for its type takes a third of the time of isinstance.
    return [gradient.codes if type(gradient) is Float8Gradient else gradient for gradient in gradients]


def scales_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The scales of FP8 gradients, and the others as they are."""
    return [gradient.dequant_scale if type(gradient) is Float8Gradient else gradient for gradient in gradients]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op of torch with an FP8 gradient, or a view of one, among its arguments."""
    if collectives.is_collective(func):
        return _run_collective(func, args, kwargs)
    first = args[0] if args else None
    is_list = isinstance(first, list | tuple) and not any(isinstance(part, GradientView) for part in first)
    if func in _ON_CODES and (is_list or isinstance(first, Float8Gradient)):
        result = _ON_CODES[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view and isinstance(first, Float8Gradient | GradientView):
        return _view(func, args, kwargs)
    if schema_of(func).is_mutable and is_list:
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


class _Decoded:
    """The fp32 values of the FP8 gradients, and of the views, among an op's arguments; each gradient is decoded once."""

    def __init__(self) -> None:
        self.values_of: dict[int, Tensor] = {}
        """By the id of a gradient."""
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def decode(self, argument: Any) -> Any:
        """Return the values of a gradient or a view, and any other argument as it is."""
        if not _is_encoded(argument):
            return argument
        gradient = argument if isinstance(argument, Float8Gradient) else argument.gradient
        if id(gradient) not in self.values_of:
            self.values_of[id(gradient)] = gradient.dequantize()
        base = self.values_of[id(gradient)]
        values = base if argument is gradient else argument.as_view(base)
        self._originals[id(values)] = (argument, values)
        return values

    def original(self, result: Tensor) -> Tensor:
        """Return the argument that a tensor was decoded from, and any other tensor as it is."""
        return self._originals.get(id(result), (result,))[0]


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on fp32 values; encode again the gradients that it has written into."""
    decoded = _Decoded()
    result = func(*tree_map(decoded.decode, args), **tree_map(decoded.decode, kwargs))
    if not schema_of(func).is_mutable:
        return result
    for gradient in _gradients_in(_written(func, args, kwargs)):
        gradient.overwrite(decoded.values_of[id(gradient)])
    return tree_map_only(Tensor, decoded.original, result)


def _run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on fp32 values, and round what it has written to nearest.

    To nearest, with a scale of the result's own amax: ranks that got the same values then hold the same codes, which
    stochastic rounding by each rank's own numbers would make different.
    """
    decoded = _Decoded()

    def encode(written: Float8Gradient | GradientView) -> None:
        [gradient] = _gradients_in([written])
        _copy_(gradient, decoded.values_of[id(gradient)])

    return collectives.run_collective(func, args, kwargs, decoded.decode, encode)


def _gradients_in(arguments: Any) -> list[Float8Gradient]:
    """Return the FP8 gradients that are arguments, or have a view among them; each gradient once."""
    encoded = [leaf for leaf in tree_leaves(arguments) if _is_encoded(leaf)]
    found = [leaf if isinstance(leaf, Float8Gradient) else leaf.gradient for leaf in encoded]
    return list({id(gradient): gradient for gradient in found}.values())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the op writes into."""
    written: list[Any] = []
    for number, parameter in enumerate(schema_of(func).arguments):
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
    return [[arg[index] for index in indices] if isinstance(arg, list | tuple) and arg else arg for arg in args]


def _detach(gradient: Float8Gradient) -> Float8Gradient:
    return Float8Gradient(gradient.codes.detach(), gradient.dequant_scale.detach(), gradient.position)


def _clone(gradient: Float8Gradient, *, memory_format: Any = None) -> Tensor:
    """Return a snapshot as a plain tensor: torch's SGD keeps one as its momentum, which codes would round at each step."""
    values = gradient.dequantize()
    return values if memory_format in (None, torch.preserve_format) else values.contiguous(memory_format=memory_format)


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
    foreach_unscale_(scales_of(gradients), found_inf, inverse_scale)


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
    """Return the norms of gradients: one op for those in FP8 and in fp32. Orders up to 0 decode the FP8 ones in turn."""
    together = [gradient for gradient in gradients if _is_taken_together(gradient)] if order > 0 else []
    norms: dict[int, Tensor] = {}
    if together:
        norms_N = kernels.norms(codes_of(together), scales_of(together), float(order))
        norms |= zip(map(id, together), norms_N.unbind(), strict=True)
    apart = [gradient for gradient in gradients if id(gradient) not in norms]
    plain = [gradient for gradient in apart if not isinstance(gradient, Float8Gradient)]
    norms |= zip(map(id, plain), foreach_norm(plain, order) if plain else (), strict=True)
    for gradient in apart:
        if isinstance(gradient, Float8Gradient):
            norms[id(gradient)] = torch.linalg.vector_norm(gradient.dequantize(), order)
    return [norms[id(gradient)] if dtype is None else norms[id(gradient)].to(dtype) for gradient in gradients]


def _is_taken_together(gradient: Tensor) -> bool:
    """Return whether one launch takes a gradient together with those in FP8: it is one, or in fp32 and no other subclass."""
    return isinstance(gradient, Float8Gradient) or (
        gradient.dtype == torch.float32 and gradient.layout == torch.strided and not hasattr(gradient, "__tensor_flatten__")
    )


def _vector_norm(
    gradient: Float8Gradient, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The norm of a whole gradient, from its codes."""
    is_whole = dim is None and not keepdim and dtype in (None, torch.float32) and order > 0
    return kernels.norms([gradient.codes], [gradient.dequant_scale], float(order))[0] if is_whole else NotImplemented


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
    aten.detach.default: _detach,
    aten.clone.default: _clone,
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
