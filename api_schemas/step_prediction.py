"""Predict a step's time as a range: products at achieved rates, the bytes that other work reads and writes, and the wire.

Nothing here was measured by this project on a GPU: each end of the range takes the more or the less favourable published
figure. Steps of gpt and llama are predicted. On ranks that divide layers, tokens or the depth between them, that takes the
bytes they send each other, which a trace counts.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from octet.api_schemas.devices import DEVICES, DeviceRates
from octet.api_schemas.job import JobSpec
from octet.api_schemas.job_plan import StepRange
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.gpt import GPTSizes
from octet.api_schemas.models.llama import LlamaSizes
from octet.api_schemas.models.shapes import ParameterShape
from octet.api_schemas.planned_states import States, converted_weights
from octet.api_schemas.resources import PoolConfig


class _Rates(NamedTuple):
    """Shares of the device's peaks, bytes per element of each memory-bound pass, and what a step cannot hide.

    recomputed: forward passes that selective checkpointing repeats. input_, grad_output_bytes: of quantization.
    fast_product: the time of a product with fast accumulation, in FP8, as a share of the product's time by `fp8`.
    """

    bf16: float
    fp8: float
    attention: float
    memory: float
    link: float
    activation_bytes: int
    logits_bytes: int
    input_bytes: int
    grad_output_bytes: int
    recomputed: int
    hides_wire: bool
    launch_s: float
    fast_product: float


_BEST = _Rates(0.79, 0.72, 0.75, 1.0, 1.0, 78, 8, 3, 3, 0, True, 0.0, 1.0)
_WORST = _Rates(0.59, 0.44, 0.35, 0.92, 0.8, 192, 26, 7, 6, 1, False, 2e-6, 1 / 1.1)
"""Sources, of the best and the worst figure.

bf16: 785 of 989 TFLOP/s on an H200 SXM, and 585 on an H100 of 500 W (`benchmarks/gpu/roofline.py`).
fp8: 1,425 of 1,979 TFLOP/s with fast accumulation, and 870 without, by blocks on that H100 (the same file).
attention: FlashAttention-3 and -2 on an H100 (abstract of arXiv 2407.08608).
memory: the data sheet, and the share that torchao's roofline_utils assumes. link: the sheet, and four fifths (assumed).
activation_bytes: norms, residual and activation of a block by token and hidden element, fused at FP8 (`benchmarks/scaling.py`);
twice that file's 96 at bf16 for eager kernels, rotation and a wider MLP (assumed).
logits_bytes: by token and word of the vocabulary, 8 in `benchmarks/scaling.py`; 26 where the loss copies them to fp32.
input_bytes, grad_output_bytes: read once and written; `benchmarks/gpu/roofline.py` with an amax and a transposed copy.
launch_s: `benchmarks/gpu/roofline.py`; a GPU under graphs does not wait for its host.
fast_product: none faster than `fp8`, and the least gain in pytorch/ao#2377 (1.1 to 1.2 times as fast).
"""
WEIGHT_BYTES = 12
"""Read in fp32 and written in bf16, in both passes of a micro-batch (`bf16_work` of `benchmarks/gpu/roofline.py`)."""
ATTENTION_FLOPS = 7 / 12
"""The share of 12·L·D·T computed. Causal attention computes half, 2 forward and 5 backward, which computes scores again."""
NODE, PORT_BYTES_PER_S = 8, 50e9
"""Ranks of a node, and one 400 Gb/s port for each GPU, as DGX H100 has."""
LAUNCHES_OF_A_BLOCK = 422
"""Ops of a Llama's block at bf16-amp in a traced step, 137 forward and 285 backward."""


Exchanged = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Bytes that a rank sends in a step to others than its replicas, by axis, collective and dtype (`Peak.exchanged`)."""


def step_prediction(
    spec: JobSpec, sizes: FamilySizes, states: States, pool: PoolConfig, exchanged: Exchanged | None
) -> StepRange | None:
    """Return the range of a job's step in a pool; None without a device, or for steps that the module does not predict.

    exchanged: None if nothing was traced. Then only ranks that exchange with their replicas alone are predicted.
    """
    is_divided = max(spec.parallelism.tensor, spec.parallelism.context, spec.parallelism.pipeline) > 1
    if pool.device is None or (is_divided and exchanged is None) or not isinstance(sizes, GPTSizes | LlamaSizes):
        return None
    device = DEVICES[pool.device]
    least_s, most_s = (_step_s(spec, sizes, states, device, exchanged or {}, rates) for rates in (_BEST, _WORST))
    return StepRange(least_s=least_s, most_s=most_s)


def _step_s(
    spec: JobSpec, sizes: GPTSizes | LlamaSizes, states: States, device: DeviceRates, exchanged: Exchanged, rates: _Rates
) -> float:
    parallelism, num_passes = spec.parallelism, spec.batch.num_micro_batches
    computed_s = _products_s(spec, sizes, device, rates)
    computed_s += _bytes_of_work(spec, sizes, states, rates) / (device.memory * rates.memory)
    computed_s += num_passes * sizes.num_layers / parallelism.pipeline * LAUNCHES_OF_A_BLOCK * rates.launch_s
    computed_s *= 1 + (parallelism.pipeline - 1) / (num_passes * spec.layout.stages_per_rank)  # waits at both ends
    wire_s = sum(
        _sent(by_collective) / (rates.link * _link(axis, spec, device, rates))
        for axis, by_collective in {**exchanged, "replicas": states.sent}.items()
    )
    return max(computed_s, wire_s) if rates.hides_wire else computed_s + wire_s


def _products_s(spec: JobSpec, sizes: GPTSizes | LlamaSizes, device: DeviceRates, rates: _Rates) -> float:
    """Return the seconds of a rank's matrix products, which all ranks share out evenly."""
    num_fp8 = sum(math.prod(shape.shape) for shape in _fp8_shapes(spec, sizes))
    linear, full = sizes.flops_per_token(0), sizes.flops_per_token(spec.training.sequence_length)
    per_weight = 6 if spec.adapter is None else 4
    recipe = spec.precision.resolved_recipe
    grad_input = rates.fast_product if recipe is not None and recipe.fast_grad_input else 1.0
    in_fp8_s = (per_weight - 2 + 2 * grad_input) * num_fp8 / (device.flops * device.fp8 * rates.fp8)
    in_bf16_s = per_weight * (linear / 6 - num_fp8) / (device.flops * rates.bf16)
    attention_s = (full - linear) * ATTENTION_FLOPS / (device.flops * rates.attention)
    return _tokens(spec) * _again(spec, rates) * (in_fp8_s + in_bf16_s + attention_s)


def _bytes_of_work(spec: JobSpec, sizes: GPTSizes | LlamaSizes, states: States, rates: _Rates) -> float:
    """Return the bytes that a rank reads and writes beside its products."""
    parallelism = spec.parallelism
    # Norms and residual of all tokens on each rank of the axis, unless these divide the tokens.
    repeated = 1 if rates.hides_wire or parallelism.sequence else parallelism.tensor
    token_bytes: float = repeated * rates.activation_bytes * sizes.num_layers * sizes.hidden_size * _again(spec, rates)
    # The last rank of a pipeline has the logits of all of its replica's tokens.
    token_bytes += rates.logits_bytes * sizes.vocab_size * (1 if rates.hides_wire else parallelism.pipeline)
    for shape in _fp8_shapes(spec, sizes):
        token_bytes += rates.grad_output_bytes * shape.shape[0] + rates.input_bytes * shape.shape[1]
    num_weights = sizes.flops_per_token(0) / 6 / parallelism.tensor / parallelism.pipeline
    update = 2 * sum(states.held.values()) - states.held["gradients"]
    return _tokens(spec) * token_bytes + spec.batch.num_micro_batches * WEIGHT_BYTES * num_weights + update


def _tokens(spec: JobSpec) -> float:
    return spec.training.global_batch_size * spec.tokens_per_sample / spec.resources.workers


def _again(spec: JobSpec, rates: _Rates) -> float:
    repeated = {"none": 0, "selective": rates.recomputed, "full": 1}[spec.training.activation_checkpointing]
    return 1 + repeated / 3  # a forward pass is a third of a step's products


def _sent(by_collective: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(by_dtype.values()) for by_dtype in by_collective.values())


def _link(axis: str, spec: JobSpec, device: DeviceRates, rates: _Rates) -> float:
    """Return the bytes per second of an axis's link. Ranks of the tensor axis are neighbours, on one node up to its size."""
    within_node = spec.resources.workers <= NODE or (axis in ("tensor", "stage") and spec.parallelism.tensor <= NODE)
    return device.link if rates.hides_wire or within_node else min(PORT_BYTES_PER_S, device.link)


def _fp8_shapes(spec: JobSpec, sizes: FamilySizes) -> list[ParameterShape]:
    if spec.precision.storage.gemm != "fp8":
        return []
    shapes = list(sizes.parameters() or ())
    converted = converted_weights(shapes, spec.resolved_precision)
    return [shape for shape in shapes if shape.name in converted]
