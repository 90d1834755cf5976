"""The kernels of CUDA devices, in Triton: each equals its twin in `worker/kernels/reference.py` bit for bit.
Attention is torch's.

Loaded by `library.py` for a tensor on such a device, and by the tests, which run it under Triton's interpreter on a CPU.
"""

from torch import sqrt  # which is IEEE's on a CUDA device

from octet.worker.kernels.cuda.amax import all_finite, compute_amax
from octet.worker.kernels.cuda.attention import document_attention, document_attention_backward
from octet.worker.kernels.cuda.gates import activate, activate_backward
from octet.worker.kernels.cuda.gemm import matmul
from octet.worker.kernels.cuda.gradient_norms import clip_, norms, total_norm
from octet.worker.kernels.cuda.gradients import accumulate_, clamp_, mean_of_shards
from octet.worker.kernels.cuda.grouped import (
    amax_of_each,
    amax_of_runs,
    grouped_gradients,
    grouped_output,
    quantize_gradients,
    sum_runs,
)
from octet.worker.kernels.cuda.known_scale import complete
from octet.worker.kernels.cuda.measurement import measure
from octet.worker.kernels.cuda.normalization import normalize
from octet.worker.kernels.cuda.quantization import quantize
from octet.worker.kernels.cuda.rescale import dequantize, encode, split_dequantize
from octet.worker.kernels.cuda.tensor_scales import (
    activate_operand,
    quantize_delayed,
    quantize_gradient,
    quantize_operand,
    requantize,
)

__all__ = [
    "accumulate_",
    "activate",
    "activate_backward",
    "activate_operand",
    "all_finite",
    "amax_of_each",
    "amax_of_runs",
    "clamp_",
    "clip_",
    "complete",
    "compute_amax",
    "dequantize",
    "document_attention",
    "document_attention_backward",
    "encode",
    "grouped_gradients",
    "grouped_output",
    "matmul",
    "mean_of_shards",
    "measure",
    "normalize",
    "norms",
    "quantize",
    "quantize_delayed",
    "quantize_gradient",
    "quantize_gradients",
    "quantize_operand",
    "requantize",
    "split_dequantize",
    "sqrt",
    "sum_runs",
    "total_norm",
]
