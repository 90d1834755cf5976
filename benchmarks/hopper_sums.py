"""Imitates on a CPU how the tensor cores of a Hopper GPU sum products of FP8 codes.

They keep about 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Here each 32 products of a sum, as many as an
instruction of theirs adds, are added up in fp32 and to the accumulator, which is then cut, towards zero, to 13 bits after the
leading one. With fast accumulation that goes on over the whole sum; without it the accumulator is added to a sum in fp32 and
emptied after each 128 products, as our Triton kernels do; cuBLASLt's own interval is not published. The hardware also cuts
each product to the largest exponent of the 32, which is left out.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels import LinearFormats, Operand, ScaledCodes, ScaleKind, reference
from octet.worker.kernels.linear import gradients_by, output_by

STEP, EMPTIED_AFTER = 32, 128
_KEPT_BITS = -1 << (23 - 13)


def short_sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a @ b.T of fp32 values (M, N), its accumulator cut after every STEP products."""
    sums_MN = a_MK.new_zeros(len(a_MK), len(b_NK))
    for a, b in zip(a_MK.split(STEP, 1), b_NK.split(STEP, 1), strict=True):
        sums_MN.addmm_(a, b.t())
        sums_MN.view(torch.int32).bitwise_and_(_KEPT_BITS)
    return sums_MN


def matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """Take the place of `reference.matmul` for scales of tensors; AssertionError for others."""
    assert a_MK.kind is b_NK.kind is ScaleKind.TENSOR
    a, b = a_MK.codes.float(), b_NK.codes.float()
    length = a.shape[1] if fast_accumulation else EMPTIED_AFTER
    parts = zip(a.split(length, 1), b.split(length, 1), strict=True)
    out_MN = short_sums(*next(parts))
    for part in parts:
        out_MN += short_sums(*part)
    return out_MN.mul_(a_MK.dequant_scale * b_NK.dequant_scale).to(out_dtype)


@contextmanager
def hopper_sums() -> Iterator[None]:
    """Inside, products of converted layers on the CPU are summed as above, by the way in which each asks for its sum."""
    kernels = SimpleNamespace(**{**vars(reference), "matmul": matmul})
    output, gradients = output_by(kernels), gradients_by(kernels)

    def linear_output(*arguments: Any) -> list[Tensor]:
        return output(*_operands(arguments[:6]), LinearFormats.parse(arguments[6]), *arguments[7:])

    def linear_gradients(*arguments: Any) -> list[Tensor]:
        return gradients(*_operands(arguments[:12]), LinearFormats.parse(arguments[12]), *arguments[13:])

    ops = torch.library.Library("octet", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it is asked to override
            ops.impl("linear_output", linear_output, "CPU", allow_override=True)
            ops.impl("linear_gradients", linear_gradients, "CPU", allow_override=True)
        yield
    finally:
        ops._destroy()


def _operands(flat: tuple[Any, ...]) -> list[Operand | None]:
    """Return operands of the three arguments that an op takes for each."""
    threes = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return [None if data is None else Operand(data, scale, amax) for data, scale, amax in threes]
