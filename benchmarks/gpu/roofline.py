"""Compute the speedup of linear layers in FP8 over bf16 from rates. It is shipped until the kernels benchmark measures it.

    python -m benchmarks.gpu.roofline > worker/fp8/speedups.json

A GEMM takes a fixed time plus the time of its operations or of its bytes, whichever is longer. All other work takes the time
of its bytes plus a fixed time per launch. Launches and bytes are those of `worker/fp8/linear.py` on `worker/kernels/cuda`,
run eagerly with current scaling. Rates that nobody has measured use the less favourable figure.
Shape suffixes: M tokens, K in features, N out features.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from octet.worker.fp8.speedups import KINDS, WEIGHTS, SpeedupTable

TOKENS = (512, 2048, 8192, 32768)
FEATURES = (512, 1024, 2048, 4096, 8192)

COPY_BYTES_PER_S = 0.92 * 3.35e12
H200_COPY_BYTES_PER_S = 0.92 * 4.8e12
"""An H100 SXM: 3.35 TB/s by its data sheet, times the share that torchao's roofline_utils assumes. An H200 has 4.8 TB/s."""

GEMM_FLOPS_PER_S = {"bf16": 785e12, "tensor": 1425e12, "row": 1275e12, "block": 1075e12, "triton": 1075e12 / 1.3}
"""Rates of large products on random data. bf16: 769 to 798 measured on an H200 SXM. FP8: published rates, reduced to the power
limit (cuBLASLt with tensor scales: 1142 on an H200 NVL that reaches 599 in bf16; CUTLASS: 1125 by rows and 870 by blocks on an
H100 of 500 W that reaches 585 in bf16). triton: by blocks, takes 1.1 to 1.5 times as long as cuBLASLt (vllm #49932)."""

GEMM_S, LAUNCH_S = 6e-6, 2e-6
"""Fixed times. GEMM: fits 28 us for a product of 2048^3 in bf16. Launch: another kernel, mostly waiting time."""

LONGER_ACCUMULATION = 1.2
"""A product by tensor scales takes 1.1 to 1.2 times as long without fast accumulation (pytorch/ao#2377); here the longer."""

PEERS_FP8_TO_BF16 = 1.65
"""The rate of FP8 products by tensor scales to bf16's with which steps gain what a peer has measured: llm.q (the README of
IST-DASLab/llmq, one H100) trains in FP8 1.24 times as fast as in bf16 at 1.5 B, 1.29 at 3 B and 1.36 at 7 B. Published rates of
large products alone give 1.82."""


@dataclass(frozen=True)
class Rates:
    """The rates that a prediction assumes: a copy's bytes per second, products' FLOP/s by name.

    backward: times by which the two products of the backward pass take longer in FP8 by tensor scales.
    """

    copy_bytes_per_s: float = COPY_BYTES_PER_S
    gemm_flops_per_s: dict[str, float] = field(default_factory=lambda: dict(GEMM_FLOPS_PER_S))
    backward: float = 1.0

    def product_s(self, name: str, flops: float, num_bytes: float, *, is_backward: bool) -> float:
        """Return the seconds of a product: the longer of its operations and of its bytes, and a fixed time."""
        longer = self.backward if is_backward and name == "tensor" else 1.0
        return GEMM_S + max(flops / self.gemm_flops_per_s[name] * longer, num_bytes / self.copy_bytes_per_s)


def rates_of(assumption: str, copy_bytes_per_s: float = COPY_BYTES_PER_S) -> Rates:
    """Return the rates of one of ASSUMPTIONS on a device with this bandwidth."""
    flops, backward = GEMM_FLOPS_PER_S, 1.0 if assumption == "fast" else LONGER_ACCUMULATION
    if assumption == "peers":
        flops = flops | {"tensor": PEERS_FP8_TO_BF16 * flops["bf16"]}
    return Rates(copy_bytes_per_s, dict(flops), backward)


ASSUMPTIONS = {
    "fast": "published FP8 rates and fast accumulation in all three products of a layer",
    "own": "published FP8 rates; by tensor scales the two products of the backward pass, which run without fast accumulation, "
    f"take {LONGER_ACCUMULATION} times as long (pytorch/ao#2377)",
    "peers": f"as before, and FP8 products by tensor scales at {PEERS_FP8_TO_BF16} times bf16's rate, with which the measured "
    "steps of llm.q agree",
}
"""The assumptions, from the fastest to the slowest. Octet's kernels run as "own" says: `worker/kernels/linear.py`."""


DEFAULT_RATES = rates_of("own")
"""An H100 at the rates of Octet's kernels: what the shipped table of speedups is computed from."""


@dataclass(frozen=True)
class Work:
    """The work of one forward and backward pass besides its products: bytes per element of each operand, and launches.

    gemms: names of the rates of output, grad_input and grad_weight. operand_bytes: bytes of an element in a product.
    """

    gemms: tuple[str, str, str]
    operand_bytes: int
    grad_weight_bytes: int
    input_bytes: int
    grad_output_bytes: int
    weight_bytes: int
    num_launches: int

    def seconds(self, m: int, k: int, n: int, rates: Rates = DEFAULT_RATES) -> float:
        output, grad_input, grad_weight = self.gemms
        products = ((output, m, k, n, 2), (grad_input, m, n, k, 2), (grad_weight, n, m, k, self.grad_weight_bytes))
        products_s = 0.0
        for number, (name, num_rows, num_summed, num_columns, out_bytes) in enumerate(products):
            num_bytes = self.operand_bytes * num_summed * (num_rows + num_columns) + out_bytes * num_rows * num_columns
            flops = 2 * num_rows * num_summed * num_columns
            products_s += rates.product_s(name, flops, num_bytes, is_backward=number > 0)
        num_bytes = self.input_bytes * m * k + self.grad_output_bytes * m * n + self.weight_bytes * k * n
        return products_s + num_bytes / rates.copy_bytes_per_s + self.num_launches * LAUNCH_S


PLAIN_BF16 = Work(("bf16",) * 3, 2, 2, 0, 0, 0, 0)
"""A layer with weight and weight gradient in bf16, the reference of published speedups."""


def bf16_work(weights: str) -> Work:
    """Cast or decode the weight, again in the backward pass; convert the weight gradient to fp32."""
    if weights == "fp32":
        return replace(PLAIN_BF16, weight_bytes=6 + 6, num_launches=2)
    return replace(PLAIN_BF16, weight_bytes=2 * 4 + 6, num_launches=3)


def fp8_work(weights: str, kind: str) -> Work:
    """Quantize the weight in both passes, and the input and the output gradient once each for both of their products.

    weights: fp32; scaled, held as codes or in 16 bits with a scale; or bf16, whose gradient is bf16 too.
    An amax takes one launch to clear it, one to find it, and a second read of the tensor. The amax of codes is known.
    """
    held = 4 if weights == "fp32" else 2
    num_units = 2 if weights == "scaled" else 0  # the scale of the codes times the scale of the weight that they encode
    if kind == "tensor":  # the input's codes are transposed in the backward pass
        reads, num_launches = (1, 2) if weights == "scaled" else (2, 3)  # the known amax is divided by the scale
        gemms, scalings = ("tensor",) * 3, (5 + 2, 6, 2 * (reads * held + 1), 3 + 1 + 3 + 2 * num_launches)
    elif kind == "row":  # amaxes of columns take a second read; amaxes of rows do not
        gemms, scalings = ("row",) * 3, (6, 6, (held + 1) + (2 * held + 1), 3 + 3 + 1 + 3)
    else:  # one launch each; the scales of 128×128 are padded and copied for cuBLASLt
        gemms = ("block",) * 3 if kind == "block" else ("block", "triton", "triton")
        scalings = (4, 4, 2 * (held + 1), 4 + 2)
    *operand_bytes, num_launches = scalings
    return Work(gemms, 1, 2 if weights == "bf16" else 4, *operand_bytes, num_launches + num_units)


def speedup(m: int, k: int, n: int, weights: str, kind: str, rates: Rates = DEFAULT_RATES) -> float:
    return bf16_work(weights).seconds(m, k, n, rates) / fp8_work(weights, kind).seconds(m, k, n, rates)


def computed_table() -> SpeedupTable:
    """Compute the table for compute capability 9.0. Assumptions differ in products by tensor scales alone."""

    def grid(weights: str, kind: str, assumption: str = "own") -> list[list[list[float]]]:
        rates = rates_of(assumption)
        return [[[round(speedup(m, k, n, weights, kind, rates), 3) for n in FEATURES] for k in FEATURES] for m in TOKENS]

    return SpeedupTable(
        (9, 0),
        "computed",
        "",
        "",
        "",
        TOKENS,
        FEATURES,
        speedups={weights: {kind: grid(weights, kind) for kind in KINDS} for weights in WEIGHTS},
        assumptions=ASSUMPTIONS,
        slowest_to_fastest={
            weights: {"tensor": [grid(weights, "tensor", name) for name in ("peers", "fast")]} for weights in WEIGHTS
        },
    )


def as_text(tables: Iterable[SpeedupTable]) -> str:
    """Format the file that `octet.worker.fp8.speedups` reads, with each innermost list on one line."""
    text = json.dumps([asdict(table) for table in tables], indent=1) + "\n"
    return re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)


if __name__ == "__main__":
    sys.stdout.write(as_text([computed_table()]))
