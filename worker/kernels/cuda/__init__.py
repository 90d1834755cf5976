"""The kernels of CUDA devices, in Triton: each equals its twin in `worker/kernels/reference.py` bit for bit.

Loaded by `library.py` for a tensor on such a device, and by the tests, which run it under Triton's interpreter on a CPU.
"""

from torch import sqrt  # which is IEEE's on a CUDA device

from worker.kernels.cuda.ahead import complete
from worker.kernels.cuda.amax import all_finite, compute_amax
from worker.kernels.cuda.gates import activate, activate_backward
from worker.kernels.cuda.gemm import matmul
from worker.kernels.cuda.gradient_norms import clip_, norms, total_norm
from worker.kernels.cuda.gradients import accumulate_, clamp_, mean_of_shards
from worker.kernels.cuda.linear import (
    linear_gradients,
    linear_output,
    linear_product,
    quantize_delayed,
    quantize_gradient,
    quantize_operand,
)
from worker.kernels.cuda.measurement import measure
from worker.kernels.cuda.normalization import normalize
from worker.kernels.cuda.quantization import activate_operand, quantize, requantize
from worker.kernels.cuda.rescale import dequantize, encode, split_dequantize

__all__ = [
    "accumulate_",
    "activate",
    "activate_backward",
    "activate_operand",
    "all_finite",
    "clamp_",
    "clip_",
    "complete",
    "compute_amax",
    "dequantize",
    "encode",
    "linear_gradients",
    "linear_output",
    "linear_product",
    "matmul",
    "mean_of_shards",
    "measure",
    "normalize",
    "norms",
    "quantize",
    "quantize_delayed",
    "quantize_gradient",
    "quantize_operand",
    "requantize",
    "split_dequantize",
    "sqrt",
    "total_norm",
]
