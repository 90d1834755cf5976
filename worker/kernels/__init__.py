"""The public operations on codes and scales. `value = codes × dequant_scale`, always.

Arguments are checked against CUDA's rules on every device, so that what passes on a CPU runs on a GPU. torch picks the
implementation by the tensor's device (`library.py`); `reference.py` is the specification that each equals bit for bit.
"""

from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.attention import document_attention
from octet.worker.kernels.elementwise import activate_again, all_finite, sqrt
from octet.worker.kernels.formats import finite_or_nan
from octet.worker.kernels.gates import WrittenGradient, activate, activate_backward
from octet.worker.kernels.gemm import matmul
from octet.worker.kernels.gradients import accumulate_, clamp_, clip_, mean_of_shards, norms, quantize_gradient, total_norm
from octet.worker.kernels.grouped import (
    amax_of_each,
    amax_of_runs,
    grouped_gradients,
    grouped_output,
    quantize_gradients,
    sum_runs,
)
from octet.worker.kernels.known_scale import KnownScale, complete
from octet.worker.kernels.linear import count_flops, linear_gradients, linear_output
from octet.worker.kernels.normalization import Normalized, normalize, normalize_backward
from octet.worker.kernels.operands import (
    QuantizedOperand,
    Window,
    activate_operand,
    quantize_delayed,
    quantize_operand,
)
from octet.worker.kernels.quantization import (
    compute_amax,
    dequant_scale_from_amax,
    dequantize,
    encode,
    measure,
    quantize,
    split_dequantize,
    values_of,
)
from octet.worker.kernels.rounding import random_bits, split_decode, split_encode, stochastic_round
from octet.worker.kernels.scales import LinearFormats, Operand, Operands, ScaledCodes, ScaleKind

__all__ = [
    "ACTIVATIONS",
    "KnownScale",
    "LinearFormats",
    "Normalized",
    "Operand",
    "Operands",
    "QuantizedOperand",
    "ScaleKind",
    "ScaledCodes",
    "Window",
    "WrittenGradient",
    "accumulate_",
    "activate",
    "activate_again",
    "activate_backward",
    "activate_operand",
    "all_finite",
    "amax_of_each",
    "amax_of_runs",
    "clamp_",
    "clip_",
    "complete",
    "compute_amax",
    "count_flops",
    "dequant_scale_from_amax",
    "dequantize",
    "document_attention",
    "encode",
    "finite_or_nan",
    "grouped_gradients",
    "grouped_output",
    "linear_gradients",
    "linear_output",
    "matmul",
    "mean_of_shards",
    "measure",
    "normalize",
    "normalize_backward",
    "norms",
    "quantize",
    "quantize_delayed",
    "quantize_gradient",
    "quantize_gradients",
    "quantize_operand",
    "random_bits",
    "split_decode",
    "split_dequantize",
    "split_encode",
    "sqrt",
    "stochastic_round",
    "sum_runs",
    "total_norm",
    "values_of",
]
