"""The optimizer step of many parameters in two launches, without the host: decode, update in fp32 registers, round, encode.

`prepare_kernel` makes this step's fp32 constants of each parameter's hyperparameters, step and largest weight, and counts
the step; `update_kernel` reads and writes every byte of weight, gradient and states once. Both return at once where a
gradient is not finite. The twin is `worker/optim/adamw.py` with `codecs.py` and `weights.py`: the same numbers, bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.cuda import adamw_storage as storage
from worker.kernels.cuda import adamw_tables as tables
from worker.kernels.cuda import language
from worker.kernels.formats import BLOCK

NUM_BLOCKS = 16
"""Of 128 elements each, that a program updates."""
CHUNK = NUM_BLOCKS * BLOCK
NUM_WARPS = 4
ALIGNMENT = 16
"""Bytes, and elements, of which addresses and sizes are multiples for 16-byte loads."""

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def prepare_kernel(table, groups, constants, finite, WEIGHT: tl.constexpr, SLACK: tl.constexpr, MAX: tl.constexpr):
    """One program per parameter. The constants are those of `adam_` and `bound_after_step`: fp64, rounded once to fp32."""
    if tl.load(finite).to(tl.int32) == 0:
        return
    row = table + tl.program_id(0) * tables.NUM_PARAMETER_COLUMNS
    group = groups + tl.load(row + tables.GROUP) * tables.NUM_GROUP_COLUMNS
    out = constants + tl.program_id(0) * tables.NUM_CONSTANT_COLUMNS
    steps = tl.load(row + tables.STEP).to(tl.pointer_type(tl.int64))
    step = tl.load(steps) + 1
    tl.store(steps, step)
    lr, beta1, beta2 = tl.load(group + tables.LR), tl.load(group + tables.BETA1), tl.load(group + tables.BETA2)
    power1 = tl.exp(tl.load(group + tables.LOG_BETA1) * step.to(tl.float64))
    power2 = tl.exp(tl.load(group + tables.LOG_BETA2) * step.to(tl.float64))
    kept = 1.0 - lr * tl.load(group + tables.DECOUPLED_DECAY)
    tl.store(out + tables.KEPT, kept.to(tl.float32))
    tl.store(out + tables.GRADIENT_DECAY, tl.load(group + tables.L2_DECAY).to(tl.float32))
    tl.store(out + tables.KEPT1, beta1.to(tl.float32))
    tl.store(out + tables.ADDED1, (1.0 - beta1).to(tl.float32))
    tl.store(out + tables.KEPT2, beta2.to(tl.float32))
    tl.store(out + tables.ADDED2, (1.0 - beta2).to(tl.float32))
    tl.store(out + tables.ROOT_CORRECTION, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32))
    tl.store(out + tables.EPSILON, tl.load(group + tables.EPS).to(tl.float32))
    tl.store(out + tables.RATE, (lr / (1.0 - power1)).to(tl.float32))
    tl.store(out + tables.GRADIENT_SIGN, tl.load(group + tables.SIGN).to(tl.float32))
    if WEIGHT == "fp16-scaled" or WEIGHT == "split" or WEIGHT == "master":
        square1 = beta1 * beta1
        is_bounded = square1 < beta2
        ratio = tl.where(is_bounded, square1 / beta2, 0.0)
        ratio_power = tl.where(is_bounded, power1 * power1 / power2, 0.0)
        corrected = tl.sqrt((1.0 - power2) / (1.0 - beta2)) * (1.0 - beta1) / (1.0 - power1)
        update = tl.minimum(SLACK * corrected * tl.sqrt((1.0 - ratio_power) / (1.0 - ratio)), MAX)
        update = tl.where(is_bounded, update, MAX)
        amax = tl.load(row + tables.AMAX).to(tl.pointer_type(tl.float32))
        bound = tl.load(amax) * tl.abs(kept).to(tl.float32) + (lr * update).to(tl.float32)
        tl.store(amax, 0.0)  # update_kernel raises it
        scale = tl.load(row + tables.WEIGHT_SCALE).to(tl.pointer_type(tl.float32))
        if WEIGHT == "master":
            rounded_scale = language.dequant_scale_from_amax(bound, tl.load(scale), 448.0, 0)
            tl.store(out + tables.ROUNDED_SCALE, rounded_scale)
            tl.store(scale, rounded_scale)
            scale = tl.load(row + tables.MASTER_SCALE).to(tl.pointer_type(tl.float32))
        old_scale = tl.load(scale)
        new_scale = language.dequant_scale_from_amax(bound, old_scale, 448.0 if WEIGHT == "split" else 65504.0, 0)
        tl.store(out + tables.OLD_SCALE, old_scale)
        tl.store(out + tables.NEW_SCALE, new_scale)
        tl.store(scale, new_scale)


@triton.jit(do_not_specialize=["seed"])
def update_kernel(
    table,
    chunks,
    constants,
    finite,
    seed,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """One program per chunk of NUM_BLOCKS · 128 elements. chunks: (parameter's row, which of its chunks), int32."""
    if tl.load(finite).to(tl.int32) == 0:
        return
    parameter = tl.load(chunks + 2 * tl.program_id(0))
    first_row = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * NUM_BLOCKS
    row, constant = table + parameter * tables.NUM_PARAMETER_COLUMNS, constants + parameter * tables.NUM_CONSTANT_COLUMNS
    num_elements = tl.load(row + tables.NUM_ELEMENTS)
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
    rows = first_row + tl.arange(0, NUM_BLOCKS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, has_row = at < num_elements, rows * _BLOCK < num_elements
    values = storage.read_weight(row, constant, at, inside, WEIGHT, ALIGNED)
    gradient = storage.read_gradient(row, at, rows, inside, has_row, GRADIENT, ALIGNED)
    average = storage.read_moment(row, at, rows, inside, has_row, EXP_AVG, tables.EXP_AVG, ALIGNED)
    square = storage.read_moment(row, at, rows, inside, has_row, EXP_AVG_SQ, tables.EXP_AVG_SQ, ALIGNED)

    gradient = gradient * tl.load(constant + tables.GRADIENT_SIGN)
    values = values * tl.load(constant + tables.KEPT)
    if L2:
        gradient = gradient + values * tl.load(constant + tables.GRADIENT_DECAY)
    average = average * tl.load(constant + tables.KEPT1) + gradient * tl.load(constant + tables.ADDED1)
    square = square * tl.load(constant + tables.KEPT2) + gradient * gradient * tl.load(constant + tables.ADDED2)
    denominator = tl.sqrt_rn(square) * tl.load(constant + tables.ROOT_CORRECTION) + tl.load(constant + tables.EPSILON)
    update = tl.div_rn(average, tl.where(inside, denominator, 1.0))
    values = values - update * tl.load(constant + tables.RATE)

    # Random words as worker/optim/adamw.py draws them: a stream for each purpose.
    seed, step = tl.cast(seed, tl.int64), tl.load(tl.load(row + tables.STEP).to(tl.pointer_type(tl.int64)))
    stream, first_word = tl.load(row + tables.STREAM), (tl.load(row + tables.FIRST_ELEMENT) + first_row * _BLOCK) // 4
    words = at
    if WEIGHT != "fp32":
        words = language.random_words(seed, step, stream, first_word, NUM_BLOCKS, _BLOCK)
    storage.write_weight(row, constant, values, words, at, inside, WEIGHT, ALIGNED)
    if EXP_AVG == "bf16-sr":
        words = language.random_words(seed, step, stream + 1, first_word, NUM_BLOCKS, _BLOCK)
    storage.write_moment(row, average, words, at, rows, inside, has_row, EXP_AVG, tables.EXP_AVG, ALIGNED)
    if EXP_AVG_SQ == "bf16-sr" or EXP_AVG_SQ == "uint8-companded":
        words = language.random_words(seed, step, stream + 2, first_word, NUM_BLOCKS, _BLOCK)
    storage.write_moment(row, square, words, at, rows, inside, has_row, EXP_AVG_SQ, tables.EXP_AVG_SQ, ALIGNED)


class Formats(NamedTuple):
    """What the kernels are compiled for: the formats of weight, gradient and moments, by the names in adamw_storage.py.

    l2: weight decay is part of the gradient. aligned: all addresses and sizes are multiples of ALIGNMENT.
    """

    weight: str
    gradient: str
    exp_avg: str
    exp_avg_sq: str
    l2: bool
    aligned: bool


class Tables(NamedTuple):
    """On the parameters' device. parameters: int64, groups: fp64, with the columns of adamw_tables.py. chunks: int32 (n, 2)."""

    parameters: Tensor
    groups: Tensor
    chunks: Tensor


def launch(formats: Formats, on_device: Tables, finite: Tensor, seed: int, *, slack: float, max_update: float) -> None:
    """One step of all parameters in the tables, which have the same formats.

    finite: bool (); where it is false nothing changes.
    slack, max_update: see worker/optim/update.py.
    """
    parameters, groups, chunks = on_device
    num_parameters = len(parameters)
    constants = torch.empty(num_parameters, tables.NUM_CONSTANT_COLUMNS.value, device=parameters.device)
    prepare_kernel[(num_parameters,)](
        parameters, groups, constants, finite, formats.weight, slack, max_update, num_warps=1, enable_fp_fusion=False
    )
    update_kernel[(len(chunks),)](
        parameters,
        chunks,
        constants,
        finite,
        seed,
        *formats,
        NUM_BLOCKS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
