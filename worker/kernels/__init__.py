"""The public operations on codes and scales. `value = codes × dequant_scale`, always.

Arguments are checked against CUDA's rules on every device, so that what passes on a CPU runs on a GPU. The work is
done by the implementation for the tensor's device (`dispatch.py`); `reference.py` is the specification that each
equals bit for bit.
"""

from worker.kernels.activations import ACTIVATIONS
from worker.kernels.formats import finite_or_nan
from worker.kernels.gemm import matmul
from worker.kernels.gradients import accumulate_, mean_of_shards, norms
from worker.kernels.ops import activate_again
from worker.kernels.quantization import (
    all_finite,
    compute_amax,
    dequant_scale_from_amax,
    dequantize,
    encode,
    quantize,
    quantize_operand,
    split_dequantize,
    sqrt,
)
from worker.kernels.rounding import random_bits, split_decode, split_encode, stochastic_round

__all__ = [
    "ACTIVATIONS",
    "accumulate_",
    "activate_again",
    "all_finite",
    "compute_amax",
    "dequant_scale_from_amax",
    "dequantize",
    "encode",
    "finite_or_nan",
    "matmul",
    "mean_of_shards",
    "norms",
    "quantize",
    "quantize_operand",
    "random_bits",
    "split_decode",
    "split_dequantize",
    "split_encode",
    "sqrt",
    "stochastic_round",
]
