"""The optimizer step of many parameters in two launches, without the host: decode, update in fp32 registers, round, encode.

`prepare_kernel` makes this step's fp32 constants of each parameter's hyperparameters, step and largest weight, and counts
the step; `update_kernel` reads and writes every byte of weight, gradient and states once. Both return at once where a
gradient is not finite. What a format stores is in `optimizer_storage.py`, what a rule computes in `optimizer_rules.py`.
The twin is `worker/optim/optimizer.py` with its rules, `codecs.py` and `weights.py`: the same numbers, bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda import optimizer_rules as rules
from octet.worker.kernels.cuda import optimizer_storage as storage
from octet.worker.kernels.cuda import optimizer_tables as tables
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.formats import BLOCK

CHUNK = 64 * BLOCK
"""Elements that a program updates."""
NUM_BLOCKS = 32 if language.INTERPRETED.value else 2
"""Blocks of 128 elements that it updates at a time, 8 elements a thread. The interpreter takes as long for many as for few."""
NUM_TURNS = CHUNK // (NUM_BLOCKS * BLOCK)
NUM_WARPS = 1
"""One, so that no barrier holds up a program: its threads exchange values within a warp only."""
ALIGNMENT = 16
"""16-byte loads need addresses that are multiples of this many bytes, and sizes that are multiples of this many elements."""

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def prepare_kernel(table, groups, constants, finite, RULE: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr):
    """One program per parameter: count the step, compute the constants of weight, gradient and rule, choose the next scales.

    fp64 rounded once to fp32, as in `Rule.step_` and `Rule.bound_after_step`.
    """
    if tl.load(finite).to(tl.int32) == 0:
        return
    row = table + tl.program_id(0) * tables.NUM_PARAMETER_COLUMNS
    group = groups + tl.load(row + tables.GROUP) * tables.NUM_GROUP_COLUMNS
    out = constants + tl.program_id(0) * tables.NUM_CONSTANT_COLUMNS
    steps = tl.load(row + tables.STEP).to(tl.pointer_type(tl.int64))
    step = tl.load(steps) + 1
    tl.store(steps, step)
    rate, largest_change = rules.prepare(group, out, step, RULE)
    kept = 1.0 - tl.load(group + tables.LR) * tl.load(group + tables.DECOUPLED_DECAY)
    unit, to_new_unit = 1.0, 1.0  # the scale of the codes, and the factor from it to the next scale
    if WEIGHT == "fp16-scaled" or WEIGHT == "split" or WEIGHT == "master":
        amax = tl.load(row + tables.AMAX).to(tl.pointer_type(tl.float32))
        bound = tl.load(amax) * tl.abs(kept).to(tl.float32) + largest_change.to(tl.float32)
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
    tl.store(out + tables.RATE, rate.to(tl.float32) * to_new_unit)
    gradient_unit = tl.load(group + tables.SIGN).to(tl.float32)
    if GRADIENT == "fp8":
        gradient_unit *= tl.load(tl.load(row + tables.GRADIENT_SCALE).to(tl.pointer_type(tl.float32)))
    tl.store(out + tables.GRADIENT_UNIT, gradient_unit)


@triton.jit(do_not_specialize=["seed"])
def update_kernel(
    table,
    chunks,
    constants,
    finite,
    seed,
    RULE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATES: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_TURNS: tl.constexpr,
):
    """One program per chunk of NUM_TURNS · NUM_BLOCKS · 128 elements. chunks: int32, (parameter's row, index of the chunk)."""
    if tl.load(finite).to(tl.int32) == 0:
        return
    TURN: tl.constexpr = NUM_BLOCKS * _BLOCK
    parameter = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (NUM_TURNS * TURN)
    row = table + parameter * tables.NUM_PARAMETER_COLUMNS
    places = (
        storage.weight_places(row, start, WEIGHT, ALIGNED),
        storage.gradient_place(row, start, GRADIENT, ALIGNED),
        storage.state_places(row, start, STATES, ALIGNED),
    )
    constant = _load_constants(constants + parameter * tables.NUM_CONSTANT_COLUMNS)
    # Random numbers as worker/optim/optimizer.py draws them: the weight and each state have their own stream.
    step = tl.load(tl.load(row + tables.STEP).to(tl.pointer_type(tl.int64)))
    first_draw = (tl.load(row + tables.FIRST_ELEMENT) + start) // language.NUMBERS_PER_DRAW
    draw = (tl.cast(seed, tl.int64), step, tl.load(row + tables.STREAM), first_draw)

    num_elements = tl.minimum(tl.load(row + tables.NUM_ELEMENTS) - start, NUM_TURNS * TURN).to(tl.int32)
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
    num_whole = num_elements // TURN
    largest = tl.zeros((NUM_BLOCKS, _BLOCK // 8), tl.int32)
    for turn in tl.range(0, num_whole):
        bits = _update(places, constant, draw, turn, None, RULE, WEIGHT, GRADIENT, STATES, L2, NUM_BLOCKS)
        largest = tl.maximum(largest, tl.max(tl.reshape(bits, (NUM_BLOCKS, _BLOCK // 8, 8)), 2))
    if num_elements % TURN > 0:
        bits = _update(places, constant, draw, num_whole, num_elements, RULE, WEIGHT, GRADIENT, STATES, L2, NUM_BLOCKS)
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
        tl.load(pointer + 8), tl.load(pointer + 9), tl.load(pointer + 10), tl.load(pointer + 11), tl.load(pointer + 12),
    )  # fmt: skip


@triton.jit
def _update(
    places,
    constant,
    draw,
    turn,
    num_elements,
    RULE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATES: tl.constexpr,
    L2: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Step NUM_BLOCKS blocks of a chunk; returns the roundable bits of their weights.

    num_elements: how many elements the chunk has, None if every element of these blocks exists.
    """
    weight_places, gradient_place, state_places = places
    rows = turn * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, has_row = None, None
    if num_elements is not None:
        inside, has_row = at < num_elements, rows * _BLOCK < num_elements
    codes = storage.read_weight(weight_places, at, inside, WEIGHT)
    gradient = storage.read_gradient(gradient_place, at, inside, GRADIENT) * constant[tables.GRADIENT_UNIT]
    states = storage.read_states(state_places, at, rows, inside, has_row, STATES)

    if L2:
        gradient += codes * constant[tables.GRADIENT_DECAY]
    direction, new_states = rules.advance(states, gradient, constant, RULE)
    scaled = codes * constant[tables.KEPT] - direction * constant[tables.RATE]
    bits = language.roundable(scaled, storage.min_exponent(WEIGHT))

    seed, step, stream, first_draw = draw
    first_draw += turn * (NUM_BLOCKS * _BLOCK // language.NUMBERS_PER_DRAW)
    numbers = at
    if WEIGHT != "fp32":
        numbers = language.random_numbers(seed, step, stream, first_draw, NUM_BLOCKS, _BLOCK)
    storage.write_weight(weight_places, bits, scaled, constant, numbers, at, inside, WEIGHT)
    for index in tl.static_range(storage.num_states(STATES)):
        if storage.draws(storage.codec(STATES, index)):
            numbers = language.random_numbers(seed, step, stream + (1 + index), first_draw, NUM_BLOCKS, _BLOCK)
        storage.write_state(
            state_places[index], new_states[index], numbers, at, rows, inside, has_row,
            storage.codec(STATES, index), rules.is_signed(RULE, index),
        )  # fmt: skip
    return bits


_launch_prepare = Launcher(prepare_kernel, num_warps=1, enable_fp_fusion=False)
_launch_update = Launcher(update_kernel, num_warps=NUM_WARPS, enable_fp_fusion=False)


class Formats(NamedTuple):
    """The constants that the kernels are compiled for: the rule, and the formats of weight, gradient and states.

    optimizer_storage.py names the formats.

    states: the codecs of the rule's states in their order, separated by spaces. l2: weight decay is part of the gradient.
    aligned: all addresses and sizes are multiples of ALIGNMENT.
    """

    rule: str
    weight: str
    gradient: str
    states: str
    l2: bool
    aligned: bool


class Tables(NamedTuple):
    """On the parameters' device; columns as in optimizer_tables.py. parameters: int64, groups: fp64, chunks: int32 (n, 2)."""

    parameters: Tensor
    groups: Tensor
    chunks: Tensor


def launch(formats: Formats, on_device: Tables, finite: Tensor, seed: int) -> None:
    """Step all parameters in the tables, which share their formats. finite: bool (); where it is false nothing changes."""
    parameters, groups, chunks = on_device
    num_parameters = len(parameters)
    constants = torch.empty(num_parameters, tables.NUM_CONSTANT_COLUMNS.value, device=parameters.device)
    rule, weight, gradient, *_ = formats
    _launch_prepare(num_parameters, parameters, groups, constants, finite, rule, weight, gradient)
    _launch_update(len(chunks), parameters, chunks, constants, finite, seed, *formats, NUM_BLOCKS, NUM_TURNS)
