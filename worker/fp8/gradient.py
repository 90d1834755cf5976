"""A gradient that presents as fp32 and holds FP8 codes and a scale: value = codes * dequant_scale.

Autograd accumulates an fp32 gradient into a parameter; the hook of `keep_gradient_in_fp8` replaces it at once, so that at
most one layer's gradient is ever held wide. What torch does to gradients works on the codes: `clip_grad_norm_` and
`GradScaler.unscale_` multiply the scale, a further micro-batch is added with stochastic rounding (round-to-nearest would
lose every contribution smaller than 1/16 of the running sum). Any other op reads the decoded fp32 values; one that writes,
into the gradient or a view of it, has the changed values encoded again (`gradient_ops.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from worker import kernels
from worker.kernels import ScaledCodes, ScaleKind, finite_or_nan
from worker.kernels.formats import E4M3


@dataclass
class RoundingPosition:
    """Where one parameter's gradient stands in the random stream: `count` additions were rounded so far on this rank.

    share, num_shares: the part of the batch that this rank accumulates, and how many there are. Each part draws numbers of its
    own, so that the rounding errors of different ranks average out; with the same numbers they would add up.
    The count is on the gradient's device and the host does not follow it, so the replay of a CUDA graph draws new numbers.
    """

    seed: int
    stream: int
    share: int = 0
    num_shares: int = 1
    _count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu"), compare=False, repr=False)

    @property
    def count(self) -> int:
        """The additions so far. Waits for the device."""
        return int(self._count)

    @count.setter
    def count(self, count: int) -> None:
        self._count.fill_(count)

    def with_count(self, state: Tensor, index: int) -> Tensor:
        """Return state (int64, on the host) with the count at an index, on the device that counts: the host does not wait."""
        if self._count.is_cuda:
            state = state.pin_memory().to(self._count.device, non_blocking=True)
        state[index] = self._count
        return state

    def counter_on(self, device: torch.device) -> Tensor:
        """Return the count itself, int64 (), which moves to the device of the gradients."""
        if self._count.device != device:
            self._count = self._count.to(device)
        return self._count

    def next_draw(self, device: torch.device) -> tuple[int, Tensor, int]:
        """Seed, step (int64, ()) and stream of random numbers that were never drawn before, on any rank."""
        return self.seed, self.counter_on(device).add_(1) * self.num_shares + self.share, self.stream

    def accumulate_(self, codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float) -> None:
        """codes × dequant_scale += alpha · other, rounded with the next draw; shapes and dtypes as `kernels.accumulate_`."""
        draw, count = (self.seed, self.share, self.stream), self.counter_on(codes.device)
        kernels.accumulate_(codes, dequant_scale, other, alpha, draw, count, self.num_shares)

    def clamp_(self, codes: Tensor, dequant_scale: Tensor, low: float, high: float) -> None:
        """codes × dequant_scale clamped to low … high, rounded with the next draw where a value is beyond."""
        limit = max((abs(bound) for bound in (low, high) if abs(bound) < math.inf), default=0.0)
        draw, count = (self.seed, self.share, self.stream), self.counter_on(codes.device)
        kernels.clamp_(codes, dequant_scale, (low, high, limit), draw, count, self.num_shares)


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
        from worker.fp8.gradient_ops import run  # it knows both classes below by name

        return run(func, tuple(args), kwargs or {})


class GradientView(Tensor):
    """A view of a gradient's values. It holds none: each read decodes the gradient, each write encodes it again."""

    gradient: Float8Gradient
    as_view: Callable[[Tensor], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradient: Float8Gradient, as_view: Callable[[Tensor], Tensor], example: Tensor) -> "GradientView":
        """as_view: makes the view of the gradient's fp32 values. example: such a view, for its shape and strides."""
        return Tensor._make_wrapper_subclass(
            cls, example.shape, example.stride(), example.storage_offset(), dtype=example.dtype, device=gradient.device
        )

    def __init__(self, gradient: Float8Gradient, as_view: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self.gradient, self.as_view = gradient, as_view

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientView(shape={tuple(self.shape)}, of={self.gradient})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return Float8Gradient.__torch_dispatch__(func, types, args, kwargs)
