"""Make FP8 gradients, and work on them without making them wide: norms, clipping, additions, and the mean of ranks' shards.

Check, op and fake of each. R ranks, S elements of one rank's shard.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octet.worker.kernels import gradient_reference
from octet.worker.kernels.library import define as define_op

define = partial(define_op, twins=gradient_reference)


def _fake_mean(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    return codes_RS.new_empty(codes_RS.shape[1], dtype=torch.float32), scales_R.new_empty(())


_norms_op = define(
    "norms(Tensor[] gradients, Tensor[] scaled, float order) -> Tensor",
    fake=lambda gradients, _scaled, _order: gradients[0].new_empty(len(gradients), dtype=torch.float32),
)
_total_norm_op = define(
    "total_norm(Tensor[] gradients, Tensor[] scaled, float order) -> Tensor",
    fake=lambda gradients, _scaled, _order: gradients[0].new_empty((), dtype=torch.float32),
)
_clip_op = define(
    "clip_(Tensor[] gradients, Tensor(a!)[] scaled, Tensor norm, float max_norm) -> ()", fake=lambda *_arguments: None
)
_accumulate_op = define(
    "accumulate_(Tensor(a!) codes, Tensor(b!) dequant_scale, Tensor other, float alpha, int[] draw, Tensor(c!)? count=None, "
    "int stride=1) -> ()",
    fake=lambda *_arguments: None,
)
_clamp_op = define(
    "clamp_(Tensor(a!) codes, Tensor(b!) dequant_scale, float[] bounds, int[] draw, Tensor(c!)? count=None, "
    "int stride=1) -> ()",
    fake=lambda *_arguments: None,
)
_quantize_op = define_op(
    "quantize_gradient(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
    fake=lambda x, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty((), dtype=torch.float32)),
)
_mean_op = define("mean_of_shards(Tensor codes_RS, Tensor scales_R) -> (Tensor, Tensor)", _fake_mean)


def norms(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norms of N gradients, fp32 (N,).

    gradients: codes in E4M3, or fp32 values; at least one. scaled, order: as for `total_norm`. On a device two launches; on a
    CPU torch's bits.
    """
    values = [each.detach() if each.requires_grad else each for each in gradients]
    norms_N: Tensor = _norms_op(values, list(scaled), order)
    return norms_N


def total_norm(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector: fp32 () on a device; on a CPU torch's bits and dtype, of norms in this order.

    gradients: codes in E4M3, or values of any floating dtype; at least one. scaled: for codes their dequant_scale (), for
    values themselves. order: above 0, or infinity. All lie on one device. Two launches.
    """
    found: Tensor = _total_norm_op(list(gradients), list(scaled), order)
    return found


def clip_(gradients: Sequence[Tensor], scaled: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply `scaled` by min(max_norm / (norm + 1e-6), 1), torch's formula, in place: one launch.

    gradients, scaled: as for `total_norm`. norm: fp32 (), on their device.
    """
    _clip_op(list(gradients), list(scaled), norm, max_norm)


def quantize_gradient(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Contiguous codes of values of any floating dtype, rounded to nearest, and their dequant_scale, fp32 ().

    The scale is NaN where a value is not finite.
    """
    codes, dequant_scale = _quantize_op(values.detach() if values.requires_grad else values, dtype)
    return codes, dequant_scale


def accumulate_(
    codes: Tensor,
    dequant_scale: Tensor,
    other: Tensor,
    alpha: float,
    draw: tuple[int, int, int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """codes × dequant_scale += alpha · other, with a new scale () and stochastic rounding, in place.

    codes: E4M3, contiguous. other: fp32, bf16 or fp16 of the same shape. draw: seed, step and stream of the random numbers.
    count: int64 (), on the codes' device, becomes one more; the step is then step + stride · count, unknown to the host.
    The scale becomes NaN where the sum is not finite.
    """
    if not codes.is_contiguous():
        raise ValueError(f"accumulate_ writes contiguous codes; got strides {codes.stride()} for {tuple(codes.shape)}.")
    _accumulate_op(codes, dequant_scale, other.detach(), alpha, draw, count, stride)


def clamp_(
    codes: Tensor,
    dequant_scale: Tensor,
    bounds: tuple[float, float, float],
    draw: tuple[int, int, int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """Clamp codes × dequant_scale in place; codes and scale stay as they are where no value is beyond.

    bounds: the lowest value, the highest, and the larger magnitude of the two that is finite. The new scale () is this times a
    power of two, so that it is one of the codes; other values are stochastically rounded. codes, draw, count, stride: as for
    `accumulate_`.
    """
    if not codes.is_contiguous():
        raise ValueError(f"clamp_ writes contiguous codes; got strides {codes.stride()} for {tuple(codes.shape)}.")
    _clamp_op(codes, dequant_scale, bounds, draw, count, stride)


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 mean over ranks (S,) of E4M3 codes, summed in the ranks' order, and its amax ()."""
    mean_S, amax = _mean_op(codes_RS, scales_R)
    return mean_S, amax
