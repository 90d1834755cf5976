"""How `update_kernel` reads and writes weights, gradients and moments, for each of their formats.

`row` is a parameter's row of addresses, `at` the elements of a chunk (rows of 128), `rows` its blocks, `inside` and `has_row`
what exists of both: elsewhere what is read is zero, and stays zero.
The formats are named as in `worker/optim/codecs.py`; a chain of `if` is decided when a kernel is compiled.
"""

import triton
import triton.language as tl

from worker.kernels.cuda import adamw_tables as tables
from worker.kernels.cuda import language

_TINY = tl.constexpr(2.0**-126)
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added to an fp32 and subtracted again, it rounds to the nearest even integer."""


@triton.jit
def address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a parameter's row. Only with the promise that it is aligned are 16 bytes loaded at a time."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(row, at, inside, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.load(address(row, COLUMN, DTYPE, ALIGNED) + at, mask=inside, other=0)


@triton.jit
def write(row, at, inside, codes, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    tl.store(address(row, COLUMN, DTYPE, ALIGNED) + at, codes.to(DTYPE), mask=inside)


@triton.jit
def read_gradient(row, at, rows, inside, has_row, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    if FORMAT == "fp32":
        values = read(row, at, inside, tables.GRADIENT, tl.float32, ALIGNED)
    elif FORMAT == "bf16":
        values = read(row, at, inside, tables.GRADIENT, tl.bfloat16, ALIGNED).to(tl.float32)
    elif FORMAT == "fp16":
        values = read(row, at, inside, tables.GRADIENT, tl.float16, ALIGNED).to(tl.float32)
    else:
        tl.static_assert(FORMAT == "fp8-tensor" or FORMAT == "fp8-block", "unknown format of a gradient")
        values = language.decode(read(row, at, inside, tables.GRADIENT, tl.uint8, ALIGNED), "e4m3")
        scales = address(row, tables.GRADIENT_SCALE, tl.float32, False)
        if FORMAT == "fp8-tensor":
            values = values * tl.load(scales)
        else:
            values = values * tl.load(scales + rows, mask=has_row, other=1.0)[:, None]
    return values


@triton.jit
def read_weight(row, constant, at, inside, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    if FORMAT == "fp32":
        values = read(row, at, inside, tables.WEIGHT, tl.float32, ALIGNED)
    elif FORMAT == "bf16":
        values = read(row, at, inside, tables.WEIGHT, tl.bfloat16, ALIGNED).to(tl.float32)
    elif FORMAT == "fp16":
        values = read(row, at, inside, tables.WEIGHT, tl.float16, ALIGNED).to(tl.float32)
    else:
        if FORMAT == "fp16-scaled":
            codes = read(row, at, inside, tables.WEIGHT, tl.float16, ALIGNED).to(tl.float32)
        elif FORMAT == "master":
            codes = read(row, at, inside, tables.REFINEMENT, tl.float16, ALIGNED).to(tl.float32)
        else:
            tl.static_assert(FORMAT == "split", "unknown format of a weight")
            residual = read(row, at, inside, tables.REFINEMENT, tl.int8, ALIGNED)
            codes = language.split_decode(read(row, at, inside, tables.WEIGHT, tl.uint8, ALIGNED), residual)
        values = codes * tl.load(constant + tables.OLD_SCALE)
    return values


@triton.jit
def write_weight(row, constant, values, words, at, inside, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """words: random, one per element; not looked at for fp32."""
    sign = values.to(tl.int32, bitcast=True) >> 31
    if FORMAT == "fp32":
        write(row, at, inside, values, tables.WEIGHT, tl.float32, ALIGNED)
    elif FORMAT == "bf16":
        codes = language.stochastic_codes(values, words, 7, -126, 0x7F7F, 0x7FC0) | (sign & 0x8000)
        write(row, at, inside, codes, tables.WEIGHT, tl.int16, ALIGNED)
    elif FORMAT == "fp16":
        codes = language.stochastic_codes(values, words, 10, -14, 0x7BFF, 0x7E00) | (sign & 0x8000)
        write(row, at, inside, codes, tables.WEIGHT, tl.int16, ALIGNED)
    else:
        amax = language.amax(language.amax(values, 1), 0)
        language.atomic_amax(address(row, tables.AMAX, tl.float32, False), amax)
        new_scale = tl.load(constant + tables.NEW_SCALE)
        scaled = values * (1.0 / new_scale)  # exact: a power of two
        if FORMAT == "split":
            fine = language.stochastic_codes(scaled, words, 11, -6, 0x7E00, 0x7F00)
            codes = (fine + 128) >> 8
            write(row, at, inside, fine - (codes << 8), tables.REFINEMENT, tl.int8, ALIGNED)
            write(row, at, inside, codes | (sign & 0x80), tables.WEIGHT, tl.uint8, ALIGNED)
        else:
            codes = (language.stochastic_codes(scaled, words, 10, -14, 0x7BFF, 0x7E00) | (sign & 0x8000)).to(tl.int16)
            if FORMAT == "fp16-scaled":
                write(row, at, inside, codes, tables.WEIGHT, tl.int16, ALIGNED)
            else:
                write(row, at, inside, codes, tables.REFINEMENT, tl.int16, ALIGNED)
                stored = codes.to(tl.float16, bitcast=True).to(tl.float32) * new_scale
                rounded = language.encode_scaled(stored, 1.0 / tl.load(constant + tables.ROUNDED_SCALE), "e4m3")
                write(row, at, inside, rounded, tables.WEIGHT, tl.uint8, ALIGNED)


@triton.jit
def read_moment(row, at, rows, inside, has_row, CODEC: tl.constexpr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    if CODEC == "fp32":
        values = read(row, at, inside, COLUMN, tl.float32, ALIGNED)
    elif CODEC == "bf16-sr":
        values = read(row, at, inside, COLUMN, tl.bfloat16, ALIGNED).to(tl.float32)
    elif CODEC == "fp8-dre":
        amax = tl.load(address(row, COLUMN + 1, tl.float32, False) + rows, mask=has_row, other=0.0)
        levels = tl.load(address(row, COLUMN + 2, tl.uint8, False) + rows, mask=has_row, other=8).to(tl.int32)
        values = language.expansion_decode(read(row, at, inside, COLUMN, tl.uint8, ALIGNED), levels, amax)
    else:
        if CODEC == "fp16-block":
            codes = read(row, at, inside, COLUMN, tl.float16, ALIGNED).to(tl.float32)
        elif CODEC == "fp8-block":
            codes = language.decode(read(row, at, inside, COLUMN, tl.uint8, ALIGNED), "e4m3")
        elif CODEC == "int8-companded":
            root = tl.div_rn(read(row, at, inside, COLUMN, tl.int8, ALIGNED).to(tl.float32), 127.0)
            square = root * root
            codes = tl.where(root < 0, -(square * square), square * square)
        else:
            tl.static_assert(CODEC == "uint8-companded", "unknown codec")
            root = tl.div_rn(read(row, at, inside, COLUMN, tl.uint8, ALIGNED).to(tl.float32), 255.0)
            square = root * root
            codes = square * square
        scales = tl.load(address(row, COLUMN + 1, tl.float32, False) + rows, mask=has_row, other=1.0)
        values = codes * scales[:, None]
    return values


@triton.jit
def write_moment(
    row, values, words, at, rows, inside, has_row, CODEC: tl.constexpr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr
):
    """words: random, one per element; looked at by the codecs that draw."""
    if CODEC == "fp32":
        write(row, at, inside, values, COLUMN, tl.float32, ALIGNED)
    elif CODEC == "bf16-sr":
        sign = values.to(tl.int32, bitcast=True) >> 31
        codes = language.stochastic_codes(values, words, 7, -126, 0x7F7F, 0x7FC0) | (sign & 0x8000)
        write(row, at, inside, codes, COLUMN, tl.int16, ALIGNED)
    else:
        amax = language.amax(values, 1)
        if CODEC == "fp16-block":
            scale = language.scale_from_amax(amax, "fp16", 0)
            codes = language.encode_scaled(language.nan_unless_finite(values), (1.0 / scale)[:, None], "fp16")
            write(row, at, inside, codes, COLUMN, tl.float16, ALIGNED)
        elif CODEC == "fp8-block":
            scale = language.scale_from_amax(amax, "e4m3", 0)
            codes = language.encode_scaled(language.nan_unless_finite(values), (1.0 / scale)[:, None], "e4m3")
            write(row, at, inside, codes, COLUMN, tl.uint8, ALIGNED)
        elif CODEC == "fp8-dre":
            scale = amax
            codes, levels = language.expansion_encode(values, amax)
            tl.store(address(row, COLUMN + 2, tl.uint8, False) + rows, levels.to(tl.uint8), mask=has_row)
            write(row, at, inside, codes, COLUMN, tl.uint8, ALIGNED)
        else:
            scale = amax
            ratio = tl.div_rn(tl.abs(values), tl.maximum(amax, _TINY)[:, None])
            if CODEC == "int8-companded":
                root = tl.sqrt_rn(tl.sqrt_rn(ratio)) * 127.0
                levels = (root + _TO_INTEGER) - _TO_INTEGER
                write(row, at, inside, tl.where(values < 0, -levels, levels), COLUMN, tl.int8, ALIGNED)
            else:
                tl.static_assert(CODEC == "uint8-companded", "unknown codec")
                root = tl.sqrt_rn(tl.sqrt_rn(ratio)) * 255.0
                levels = tl.minimum(tl.floor(root + (words & 0xFFFF).to(tl.float32) * 2.0**-16), 255.0)
                write(row, at, inside, levels, COLUMN, tl.uint8, ALIGNED)
        tl.store(address(row, COLUMN + 1, tl.float32, False) + rows, scale, mask=has_row)
