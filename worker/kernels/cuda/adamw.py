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

CHUNK = 64 * BLOCK
"""Elements that a program updates."""
NUM_BLOCKS = 16 if language.INTERPRETED.value else 2
"""Of 128 elements, that it updates at a time: 8 elements a thread. The interpreter takes as long for many as for few."""
NUM_TURNS = CHUNK // (NUM_BLOCKS * BLOCK)
NUM_WARPS = 1
"""So no barrier holds up a program: all that its threads exchange is exchanged within a warp."""
ALIGNMENT = 16
"""Bytes, and elements, of which addresses and sizes are multiples for 16-byte loads."""

_BLOCK = tl.constexpr(BLOCK)
_SMALLEST_ROOTED, _LARGEST = tl.constexpr(2.0**-100), tl.constexpr(3.4028234663852886e38)


@triton.jit
def prepare_kernel(
    table,
    groups,
    constants,
    finite,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    SLACK: tl.constexpr,
    MAX: tl.constexpr,
):
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
    unit, to_new_unit = 1.0, 1.0  # what the codes are in units of, and how many of the next are one
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
        unit = tl.load(scale)
        new_unit = language.dequant_scale_from_amax(bound, unit, 448.0 if WEIGHT == "split" else 65504.0, 0)
        to_new_unit = language.inverse(new_unit)
        tl.store(scale, new_unit)
        tl.store(out + tables.NEW_SCALE, new_unit)
    tl.store(out + tables.KEPT, kept.to(tl.float32) * (unit * to_new_unit))
    tl.store(out + tables.GRADIENT_DECAY, tl.load(group + tables.L2_DECAY).to(tl.float32) * unit)
    tl.store(out + tables.KEPT1, beta1.to(tl.float32))
    tl.store(out + tables.ADDED1, (1.0 - beta1).to(tl.float32))
    tl.store(out + tables.KEPT2, beta2.to(tl.float32))
    tl.store(out + tables.ADDED2, (1.0 - beta2).to(tl.float32))
    tl.store(out + tables.ROOT_CORRECTION, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32))
    tl.store(out + tables.EPSILON, tl.load(group + tables.EPS).to(tl.float32))
    tl.store(out + tables.RATE, (lr / (1.0 - power1)).to(tl.float32) * to_new_unit)
    gradient_unit = tl.load(group + tables.SIGN).to(tl.float32)
    if GRADIENT == "fp8-tensor":
        gradient_unit *= tl.load(tl.load(row + tables.GRADIENT_SCALE).to(tl.pointer_type(tl.float32)))
    tl.store(out + tables.GRADIENT_UNIT, gradient_unit)


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
    NUM_TURNS: tl.constexpr,
):
    """One program per chunk of NUM_TURNS · NUM_BLOCKS · 128 elements. chunks: (parameter's row, which of its chunks), int32."""
    if tl.load(finite).to(tl.int32) == 0:
        return
    TURN: tl.constexpr = NUM_BLOCKS * _BLOCK
    parameter = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (NUM_TURNS * TURN)
    row = table + parameter * tables.NUM_PARAMETER_COLUMNS
    places = (
        storage.weight_places(row, start, WEIGHT, ALIGNED),
        storage.gradient_places(row, start, GRADIENT, ALIGNED),
        storage.moment_places(row, start, EXP_AVG, tables.EXP_AVG, ALIGNED),
        storage.moment_places(row, start, EXP_AVG_SQ, tables.EXP_AVG_SQ, ALIGNED),
    )
    constant = _load_constants(constants + parameter * tables.NUM_CONSTANT_COLUMNS)
    # Random numbers as worker/optim/adamw.py draws them: a stream for each purpose.
    step = tl.load(tl.load(row + tables.STEP).to(tl.pointer_type(tl.int64)))
    first_draw = (tl.load(row + tables.FIRST_ELEMENT) + start) // language.NUMBERS_PER_DRAW
    draw = (tl.cast(seed, tl.int64), step, tl.load(row + tables.STREAM), first_draw)

    num_elements = tl.minimum(tl.load(row + tables.NUM_ELEMENTS) - start, NUM_TURNS * TURN).to(tl.int32)
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
    num_whole = num_elements // TURN
    largest = tl.zeros((NUM_BLOCKS, _BLOCK // 8), tl.int32)
    for turn in tl.range(0, num_whole):
        bits = _update(places, constant, draw, turn, None, WEIGHT, GRADIENT, EXP_AVG, EXP_AVG_SQ, L2, NUM_BLOCKS)
        largest = tl.maximum(largest, tl.max(tl.reshape(bits, (NUM_BLOCKS, _BLOCK // 8, 8)), 2))
    if num_elements % TURN > 0:
        bits = _update(places, constant, draw, num_whole, num_elements, WEIGHT, GRADIENT, EXP_AVG, EXP_AVG_SQ, L2, NUM_BLOCKS)
        largest = tl.maximum(largest, tl.max(tl.reshape(bits, (NUM_BLOCKS, _BLOCK // 8, 8)), 2))
    if WEIGHT == "fp16-scaled" or WEIGHT == "split" or WEIGHT == "master":
        amax = language.from_roundable(tl.max(tl.max(largest, 1), 0), storage.min_exponent(WEIGHT)) * constant[tables.NEW_SCALE]
        language.atomic_amax(tl.load(row + tables.AMAX).to(tl.pointer_type(tl.float32)), amax)
        is_bad = amax >= language.INFINITY or amax != amax
        tl.store(tl.load(row + tables.WEIGHT_SCALE).to(tl.pointer_type(tl.float32)), float("nan"), mask=is_bad)
        if WEIGHT == "master":
            tl.store(tl.load(row + tables.MASTER_SCALE).to(tl.pointer_type(tl.float32)), float("nan"), mask=is_bad)


@triton.jit
def _load_constants(pointer):
    """In the order of their columns."""
    return (
        tl.load(pointer + 0), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3),
        tl.load(pointer + 4), tl.load(pointer + 5), tl.load(pointer + 6), tl.load(pointer + 7),
        tl.load(pointer + 8), tl.load(pointer + 9), tl.load(pointer + 10), tl.load(pointer + 11),
    )  # fmt: skip


@triton.jit
def _update(
    places,
    constant,
    draw,
    turn,
    num_elements,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    L2: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Step NUM_BLOCKS blocks of a chunk; the roundable bits of their weights. num_elements: of the chunk, None if all exist."""
    weight_places, gradient_places, exp_avg_places, exp_avg_sq_places = places
    rows = turn * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, has_row = None, None
    if num_elements is not None:
        inside, has_row = at < num_elements, rows * _BLOCK < num_elements
    codes = storage.read_weight(weight_places, at, inside, WEIGHT)
    gradient = storage.read_gradient(gradient_places, at, rows, inside, has_row, GRADIENT) * constant[tables.GRADIENT_UNIT]
    average = storage.read_moment(exp_avg_places, at, rows, inside, has_row, EXP_AVG)
    square = storage.read_moment(exp_avg_sq_places, at, rows, inside, has_row, EXP_AVG_SQ)

    if L2:
        gradient += codes * constant[tables.GRADIENT_DECAY]
    average = average * constant[tables.KEPT1] + gradient * constant[tables.ADDED1]
    square = square * constant[tables.KEPT2] + gradient * gradient * constant[tables.ADDED2]
    root = language.sqrt(tl.minimum(tl.maximum(square, _SMALLEST_ROOTED), _LARGEST))
    denominator = root * constant[tables.ROOT_CORRECTION] + constant[tables.EPSILON]
    scaled = codes * constant[tables.KEPT] - language.divide(average, denominator) * constant[tables.RATE]
    bits = language.roundable(scaled, storage.min_exponent(WEIGHT))

    seed, step, stream, first_draw = draw
    first_draw += turn * (NUM_BLOCKS * _BLOCK // language.NUMBERS_PER_DRAW)
    numbers = at
    if WEIGHT != "fp32":
        numbers = language.random_numbers(seed, step, stream, first_draw, NUM_BLOCKS, _BLOCK)
    storage.write_weight(weight_places, bits, scaled, constant, numbers, at, inside, WEIGHT)
    if EXP_AVG == "bf16-sr":
        numbers = language.random_numbers(seed, step, stream + 1, first_draw, NUM_BLOCKS, _BLOCK)
    storage.write_moment(exp_avg_places, average, numbers, at, rows, inside, has_row, EXP_AVG, True)
    if EXP_AVG_SQ == "bf16-sr" or EXP_AVG_SQ == "uint8-companded":
        numbers = language.random_numbers(seed, step, stream + 2, first_draw, NUM_BLOCKS, _BLOCK)
    storage.write_moment(exp_avg_sq_places, square, numbers, at, rows, inside, has_row, EXP_AVG_SQ, False)
    return bits


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
        parameters, groups, constants, finite, formats.weight, formats.gradient, slack, max_update,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    update_kernel[(len(chunks),)](
        parameters,
        chunks,
        constants,
        finite,
        seed,
        *formats,
        NUM_BLOCKS,
        NUM_TURNS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
