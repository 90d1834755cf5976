"""Read and write weights, gradients and states for `update_kernel`, in each of their formats.

`row` is a parameter's row of addresses, `at` the elements of a chunk (rows of 128), `rows` its
blocks. `inside` masks `at` and `has_row` masks `rows`: where they are false, zeros are read and
nothing is written.
The codecs of states are named as in `worker/optim/codecs.py`; a chain of `if` is decided when a kernel is compiled.
"""

import triton
import triton.language as tl

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda import optimizer_tables as tables
from octet.worker.kernels.formats import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def place(row, start, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a parameter's row.

    ALIGNED: 8 elements are loaded and stored at a time, at most 16 bytes. All formats then lie in registers alike; with 16
    bytes of each, codes of one and of two bytes would have to be exchanged between threads.
    """
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 8 if DTYPE.primitive_bitwidth == 8 else 16)
    return pointer


@triton.jit
def weight_places(row, start, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to a weight's values or codes, and to what refines them (the same pointer if nothing does)."""
    if FORMAT == "fp32":
        values = place(row, start, tables.WEIGHT, tl.float32, ALIGNED)
        return values, values
    elif FORMAT == "bf16":
        values = place(row, start, tables.WEIGHT, tl.bfloat16, ALIGNED)
        return values, values
    elif FORMAT == "fp16" or FORMAT == "fp16-scaled":
        values = place(row, start, tables.WEIGHT, tl.float16, ALIGNED)
        return values, values
    elif FORMAT == "master":
        return place(row, start, tables.WEIGHT, tl.uint8, ALIGNED), place(row, start, tables.REFINEMENT, tl.float16, ALIGNED)
    else:
        tl.static_assert(FORMAT == "split", "unknown format of a weight")
        return place(row, start, tables.WEIGHT, tl.uint8, ALIGNED), place(row, start, tables.REFINEMENT, tl.int8, ALIGNED)


@triton.jit
def gradient_place(row, start, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a gradient."""
    if FORMAT == "fp32":
        return place(row, start, tables.GRADIENT, tl.float32, ALIGNED)
    elif FORMAT == "bf16":
        return place(row, start, tables.GRADIENT, tl.bfloat16, ALIGNED)
    elif FORMAT == "fp16":
        return place(row, start, tables.GRADIENT, tl.float16, ALIGNED)
    else:
        tl.static_assert(FORMAT == "fp8", "unknown format of a gradient")
        return place(row, start, tables.GRADIENT, tl.uint8, ALIGNED)


@triton.constexpr_function
def num_states(STATES):
    """Return the number of codecs in a string that separates them by spaces."""
    return len(STATES.split())


@triton.constexpr_function
def codec(STATES, INDEX):
    """Return one codec. STATES is a string and no tuple: Triton 3.6 passes no strings on from a constexpr tuple."""
    return STATES.split()[INDEX]


@triton.constexpr_function
def draws(CODEC):
    """Return True if a codec rounds stochastically."""
    return CODEC == "uint8-companded"


@triton.jit
def state_places(row, start, STATES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to the states: a tuple with (codes, scales, steps) for each."""
    places = (state_place(row, start, codec(STATES, 0), tables.STATES, ALIGNED),)
    for index in tl.static_range(1, num_states(STATES)):
        column = tables.STATES + index * tables.NUM_STATE_COLUMNS
        next_place = (state_place(row, start, codec(STATES, index), column, ALIGNED),)
        places = places + next_place  # type: ignore[assignment]
    return places


@triton.jit
def state_place(row, start, CODEC: tl.constexpr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to a state: codes, scales and steps."""
    scales = place(row, start // _BLOCK, COLUMN + 1, tl.float32, False)
    steps = place(row, start // _BLOCK, COLUMN + 2, tl.int16, False)
    if CODEC == "fp32":
        return place(row, start, COLUMN, tl.float32, ALIGNED), scales, steps
    elif CODEC == "fp16-block":
        return place(row, start, COLUMN, tl.float16, ALIGNED), scales, steps
    elif CODEC == "int8-companded":
        return place(row, start, COLUMN, tl.int8, ALIGNED), scales, steps
    else:
        tl.static_assert(CODEC == "fp8-dre" or CODEC == "uint8-companded", "unknown codec")
        return place(row, start, COLUMN, tl.uint8, ALIGNED), scales, steps


@triton.constexpr_function
def min_exponent(FORMAT):
    """Return the exponent of the smallest normal number in the format that a weight is rounded to."""
    return {"split": -6, "bf16": -126, "fp32": -126}.get(FORMAT, -14)


@triton.jit
def read(pointer, at, inside):
    """Load the elements at `at`; zero where `inside` is false."""
    if inside is None:
        return tl.load(pointer + at)
    else:
        return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def write(pointer, at, inside, codes):
    tl.store(pointer + at, codes.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def read_gradient(held, at, inside, FORMAT: tl.constexpr):
    """fp32 values; those of codes in units of their scale."""
    if FORMAT == "fp8":
        return language.decode(read(held, at, inside), "e4m3")
    else:
        return read(held, at, inside).to(tl.float32)


@triton.jit
def read_weight(places, at, inside, FORMAT: tl.constexpr):
    """fp32 values; those of codes in units of their scale."""
    held, refinement = places
    if FORMAT == "split":
        return language.split_decode(read(held, at, inside), read(refinement, at, inside))
    elif FORMAT == "master":
        return read(refinement, at, inside).to(tl.float32)
    else:
        return read(held, at, inside).to(tl.float32)


@triton.jit
def write_weight(places, bits, scaled, constant, numbers, at, inside, FORMAT: tl.constexpr):
    """scaled: fp32 in units of the new scale. bits: their roundable bits; numbers: random, one each; fp32 uses neither."""
    held, refinement = places
    sign = scaled.to(tl.int32, bitcast=True) >> 31
    if FORMAT == "fp32":
        write(held, at, inside, scaled)
    elif FORMAT == "split":
        fine = language.stochastic_codes(bits, numbers, 11, 0x7E00)
        codes = (fine + 128) >> 8
        write(refinement, at, inside, fine - (codes << 8))
        write(held, at, inside, codes | (sign & 0x80))
    elif FORMAT == "bf16" or FORMAT == "fp16":
        write(held.to(tl.pointer_type(tl.int16)), at, inside, sixteen_bits(scaled, bits, numbers, FORMAT))
    else:
        codes = (language.stochastic_codes(bits, numbers, 10, 0x7BFF) | (sign & 0x8000)).to(tl.int16)
        if FORMAT == "master":
            write(refinement.to(tl.pointer_type(tl.int16)), at, inside, codes)
            stored = codes.to(tl.float16, bitcast=True).to(tl.float32) * constant[tables.NEW_SCALE]
            write(held, at, inside, language.encode_scaled(stored, language.inverse(constant[tables.ROUNDED_SCALE]), "e4m3"))
        else:
            write(held.to(tl.pointer_type(tl.int16)), at, inside, codes)


@triton.jit
def sixteen_bits(values, bits, numbers, FORMAT: tl.constexpr):
    """int16 codes of fp32 values, stochastically rounded; NaN where a value is not finite."""
    if FORMAT == "bf16":
        codes = tl.where(bits < 0x7F800000, language.stochastic_codes(bits, numbers, 7, 0x7F7F), 0x7FC0)
    else:
        codes = tl.where(bits < 0x7F800000, language.stochastic_codes(bits, numbers, 10, 0x7BFF), 0x7E00)
    return codes | ((values.to(tl.int32, bitcast=True) >> 31) & 0x8000)


@triton.jit
def read_states(places, at, rows, inside, has_row, STATES: tl.constexpr):
    """A tuple of fp32 values, one for each state."""
    values = (read_state(places[0], at, rows, inside, has_row, codec(STATES, 0)),)
    for index in tl.static_range(1, num_states(STATES)):
        next_values = (read_state(places[index], at, rows, inside, has_row, codec(STATES, index)),)
        values = values + next_values  # type: ignore[assignment]
    return values


@triton.jit
def read_state(places, at, rows, inside, has_row, CODEC: tl.constexpr):
    held, scales, steps = places
    if CODEC == "fp32":
        values = read(held, at, inside).to(tl.float32)
    elif CODEC == "fp8-dre":
        step = read(steps, rows, has_row).to(tl.int32)
        values = language.expansion_decode(read(held, at, inside), step, read(scales, rows, has_row))
    else:
        if CODEC == "fp16-block":
            codes = read(held, at, inside).to(tl.float32)
        else:
            codes = language.companded_decode(read(held, at, inside), CODEC == "int8-companded")
        values = codes * read(scales, rows, has_row)[:, None]
    return values


@triton.jit
def write_state(places, values, numbers, at, rows, inside, has_row, CODEC: tl.constexpr, IS_SIGNED: tl.constexpr):
    """numbers: random, one for each element; only a codec that `draws` reads them."""
    held, scales, steps = places
    if CODEC == "fp32":
        write(held, at, inside, values)
    else:
        if IS_SIGNED:
            amax = language.amax(values, 1)
        else:
            amax = tl.max(values.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        if CODEC == "fp16-block":
            scale = language.scale_from_amax(amax, "fp16", 0)
            write(held, at, inside, values * language.inverse(scale)[:, None])  # nothing saturates at this scale
            scale = tl.where(amax < language.INFINITY, scale, float("nan"))
        elif CODEC == "fp8-dre":
            scale = amax
            codes, step = language.expansion_encode(values, amax)
            tl.store(steps + rows, step.to(tl.int16), mask=has_row)
            write(held, at, inside, codes)
        else:
            scale = amax
            write(held, at, inside, language.companded_encode(values, numbers, amax, CODEC == "int8-companded"))
        tl.store(scales + rows, scale, mask=has_row)
