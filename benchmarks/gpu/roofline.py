"""How much faster a linear layer is in FP8 than in bf16, computed from rates; shipped until the kernels benchmark measures it.

    python -m benchmarks.gpu.roofline > worker/fp8/speedups.json

A GEMM takes a fixed time and then that of its operations or its bytes, whichever is longer; everything else the bytes it
moves and a time for each launch. Launches and bytes are those of `worker/fp8/linear.py` on `worker/kernels/cuda`, run
eagerly, with tensor scales from the tensor at hand. Where nothing is measured the less favourable figure is taken.
Shape suffixes: M tokens, K in features, N out features.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from worker.fp8.speedups import KINDS, WEIGHTS, SpeedupTable

TOKENS = (512, 2048, 8192, 32768)
FEATURES = (512, 1024, 2048, 4096, 8192)

COPY_BYTES_PER_S = 0.92 * 3.35e12
"""Of an H100 SXM (data sheet: 3.35 TB/s), by the share that torchao's roofline_utils allows. An H200 has 4.8 TB/s."""

GEMM_FLOPS_PER_S = {"bf16": 785e12, "tensor": 1425e12, "row": 1275e12, "block": 1075e12, "triton": 1075e12 / 1.3}
"""Of large products on random data. bf16: seen on an H200 SXM, 769 to 798. FP8: what its power limit should leave of published
rates (cuBLASLt 1142 with tensor scales on an H200 NVL whose bf16 is 599; CUTLASS 1125 by rows and 870 by blocks on an H100 of
500 W whose bf16 is 585). triton: by blocks, 1.1 to 1.5 times cuBLASLt's time (vllm #49932)."""

GEMM_S, LAUNCH_S = 6e-6, 2e-6
"""Fixed times: of a GEMM, as makes one of 2048^3 in bf16 take 28 us; of another kernel, which is mostly waited for."""


@dataclass(frozen=True)
class Work:
    """What one forward and backward pass does beside its products: bytes for each element of an operand, and launches.

    gemms: the rates of output, grad_input and grad_weight. operand_bytes: of an element in a product.
    """

    gemms: tuple[str, str, str]
    operand_bytes: int
    grad_weight_bytes: int
    input_bytes: int
    grad_output_bytes: int
    weight_bytes: int
    num_launches: int

    def seconds(self, m: int, k: int, n: int) -> float:
        output, grad_input, grad_weight = self.gemms
        products_s = (
            self._gemm_s(output, m, k, n, 2)
            + self._gemm_s(grad_input, m, n, k, 2)
            + self._gemm_s(grad_weight, n, m, k, self.grad_weight_bytes)
        )
        num_bytes = self.input_bytes * m * k + self.grad_output_bytes * m * n + self.weight_bytes * k * n
        return products_s + num_bytes / COPY_BYTES_PER_S + self.num_launches * LAUNCH_S

    def _gemm_s(self, rate: str, num_rows: int, num_summed: int, num_columns: int, out_bytes: int) -> float:
        num_bytes = self.operand_bytes * num_summed * (num_rows + num_columns) + out_bytes * num_rows * num_columns
        operations_s = 2 * num_rows * num_summed * num_columns / GEMM_FLOPS_PER_S[rate]
        return GEMM_S + max(operations_s, num_bytes / COPY_BYTES_PER_S)


PLAIN_BF16 = Work(("bf16",) * 3, 2, 2, 0, 0, 0, 0)
"""A layer whose weight and its gradient are bf16: what published speedups are over."""


def bf16_work(weights: str) -> Work:
    """Casts of the weight, or its decoding, once more in the backward pass; the weight gradient becomes fp32."""
    if weights == "fp32":
        return replace(PLAIN_BF16, weight_bytes=6 + 6, num_launches=2)
    return replace(PLAIN_BF16, weight_bytes=2 * 4 + 6, num_launches=3)


def fp8_work(weights: str, kind: str) -> Work:
    """Of the weight, quantized in both passes; of the input for both products at once; of the output's gradient likewise.

    An amax takes a launch to clear it and one to find it, and a second read of what is quantized. That of codes is known.
    """
    held = 4 if weights == "fp32" else 2
    num_units = 2 if weights == "scaled" else 0  # a scale of codes times that of what they encode
    if kind == "tensor":  # the input's codes are transposed when they are needed
        reads, num_launches = (2, 3) if weights == "fp32" else (1, 2)  # the known amax is divided by the scale
        gemms, scalings = ("tensor",) * 3, (5 + 2, 6, 2 * (reads * held + 1), 3 + 1 + 3 + 2 * num_launches)
    elif kind == "row":  # columns' amaxes take a second read; rows' do not
        gemms, scalings = ("row",) * 3, (6, 6, (held + 1) + (2 * held + 1), 3 + 3 + 1 + 3)
    else:  # a launch each; the scales of 128×128 are padded and copied for cuBLASLt
        gemms = ("block",) * 3 if kind == "block" else ("block", "triton", "triton")
        scalings = (4, 4, 2 * (held + 1), 4 + 2)
    *operand_bytes, num_launches = scalings
    return Work(gemms, 1, 4, *operand_bytes, num_launches + num_units)


def speedup(m: int, k: int, n: int, weights: str, kind: str) -> float:
    return bf16_work(weights).seconds(m, k, n) / fp8_work(weights, kind).seconds(m, k, n)


def computed_table() -> SpeedupTable:
    """That of compute capability 9.0."""
    speedups = {
        weights: {
            kind: [[[round(speedup(m, k, n, weights, kind), 3) for n in FEATURES] for k in FEATURES] for m in TOKENS]
            for kind in KINDS
        }
        for weights in WEIGHTS
    }
    return SpeedupTable((9, 0), "computed", "", "", "", TOKENS, FEATURES, speedups)


def as_text(tables: Iterable[SpeedupTable]) -> str:
    """The file that `worker.fp8.speedups` reads, with the innermost lists on a line each."""
    text = json.dumps([asdict(table) for table in tables], indent=1) + "\n"
    return re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)


if __name__ == "__main__":
    sys.stdout.write(as_text([computed_table()]))
