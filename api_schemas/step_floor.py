"""The least time of a step: what a job computes, moves and sends, at the rates of its pool's devices. No step is faster.

Products run at the device's dense peak, in FP8 where the level multiplies so; the optimizer reads and writes its states at the
peak of the memory; gradients travel while others are computed. Nothing is added for norms, activations, quantization, launches
or waiting, so real steps take longer.
"""

import math

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.devices import DEVICES
from octet.api_schemas.job import JobSpec
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.planned_states import States, converted_weights
from octet.api_schemas.resources import PoolConfig

FLOPS_OF_A_WEIGHT, FLOPS_OF_A_FROZEN_WEIGHT = 6, 4
"""For each token and element, forward and backward."""


class StepFloor(Contract):
    """Lower bounds, in seconds of a step: max(products_s, sent_s) + update_s."""

    step_s: float
    products_s: float = Field(description="products of linear layers and attention, at the device's dense peak")
    update_s: float = Field(description="reading gradients, reading and writing moments and masters")
    sent_s: float = Field(description="gradients and weights sent to replicas, over the device's fastest link")
    peak_share: float = Field(description="most of the dense bf16 peak that the model's FLOPs can reach, as a share")
    hours: float | None = Field(default=None, description="of all steps; null for a job in epochs")
    price: float | None = Field(default=None, description="hours · workers · the pool's slot_hour_price; null without one")


def step_floor(spec: JobSpec, sizes: FamilySizes, states: States, pool: PoolConfig) -> StepFloor | None:
    """Return the least time of a job's step in a pool; None if the pool names no device, or only a rank counts the FLOPs."""
    rates = None if pool.device is None else DEVICES[pool.device]
    flops, linear_flops = sizes.flops_per_token(spec.training.sequence_length), sizes.flops_per_token(0)
    if rates is None or flops is None or linear_flops is None:
        return None
    of_weights, of_attention = _least_flops(spec, sizes, linear_flops, rates.fp8), flops - linear_flops
    workers, held = spec.resources.workers, states.held
    tokens = spec.training.global_batch_size * spec.tokens_per_sample / workers
    moved = 2 * (held["exp_avg"] + held["exp_avg_sq"] + held["master_weights"]) + held["gradients"]
    products_s = (of_weights + of_attention / 2) * tokens / rates.flops  # causal attention: half of what the formula counts
    sent_s = sum(sum(by_dtype.values()) for by_dtype in states.sent.values()) / rates.link
    update_s = moved / rates.memory
    step_s = max(products_s, sent_s) + update_s
    hours = None if spec.training.steps is None else spec.training.steps * step_s / 3600
    return StepFloor(
        step_s=step_s,
        products_s=products_s,
        update_s=update_s,
        sent_s=sent_s,
        peak_share=flops * tokens / (step_s * rates.flops),
        hours=hours,
        price=None if hours is None or pool.slot_hour_price is None else hours * workers * pool.slot_hour_price,
    )


def _least_flops(spec: JobSpec, sizes: FamilySizes, linear_flops: float, fp8: float) -> float:
    """Return the FLOPs of products with weights for a token, in FLOPs of bf16. fp8: the rate of FP8 over that of bf16."""
    per_element = FLOPS_OF_A_WEIGHT if spec.adapter is None else FLOPS_OF_A_FROZEN_WEIGHT
    linear_flops *= per_element / FLOPS_OF_A_WEIGHT
    if spec.precision.storage.gemm != "fp8":
        return linear_flops
    shapes = list(sizes.parameters() or ())
    converted = converted_weights(shapes, spec.resolved_precision)
    num_elements = sum(math.prod(shape.shape) for shape in shapes if shape.name in converted)
    in_fp8 = min(linear_flops, float(per_element * num_elements))
    return linear_flops - in_fp8 + in_fp8 / fp8
