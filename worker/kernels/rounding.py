"""Stochastic rounding from a counter-based generator, in plain torch.

A random number depends on (seed, step, stream, element) alone, so any sharding and any device draw the same bits, and
only seed and step are saved. The generator is Philox-4x32-7 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011: seven rounds are the fewest that pass BigCrush, and two thirds of the work of ten).
"""

import torch
from torch import Tensor

from octet.worker.kernels.formats import E4M3, Format

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 7
NUM_BITS = 16  # of a random number: more than FP16 and BF16 drop
NUMBERS_PER_DRAW = 8

# E4M3 with eight more mantissa bits: what an E4M3 weight and its INT8 residual hold together.
E4M11 = Format(E4M3.dtype, E4M3.mantissa_bits + 8, E4M3.min_exponent, E4M3.max, E4M3.nan_code << 8)


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Seven rounds. counter: four int64 tensors of 32-bit words. Returns int64 words of shape (..., 4)."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]  # exact modulo 2**64
        # Only words 0 and 2 enter a product, so only they must be free of higher bits.
        word0 = (product1 >> 32).bitwise_xor_(word1).bitwise_xor_(key0).bitwise_and_(_WORD)
        word2 = (product0 >> 32).bitwise_xor_(word3).bitwise_xor_(key1).bitwise_and_(_WORD)
        word1, word3 = product1, product0
        key0, key1 = (key0 + _KEY_INCREMENTS[0]) & _WORD, (key1 + _KEY_INCREMENTS[1]) & _WORD
    return torch.stack((word0, word1, word2, word3), dim=-1).bitwise_and_(_WORD)


def random_bits(seed: int, step: int | Tensor, stream: int, elements: range, device: torch.device) -> Tensor:
    """A number of 16 bits, int32, for each element in the range (of step 1). step: a number, or an int64 () on any device.

    Element e has half e % 2 (the lower is 0) of word e // 2 % 4 of draw e // 8.
    """
    first_draw, end_draw = elements.start // NUMBERS_PER_DRAW, -(-elements.stop // NUMBERS_PER_DRAW)
    draw = torch.arange(first_draw, end_draw, device=device)
    steps = step.to(device).expand_as(draw) if isinstance(step, Tensor) else torch.full_like(draw, step)
    counter = (draw & _WORD, draw >> 32, torch.full_like(draw, stream), steps)
    words = philox_4x32(counter, (seed & _WORD, seed >> 32 & _WORD)).view(-1)
    numbers = torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(-1)
    return numbers[elements.start - NUMBERS_PER_DRAW * first_draw :][: len(elements)].to(torch.int32)


def stochastic_codes(x: Tensor, format: Format, random_numbers: Tensor) -> Tensor:
    """int32 magnitude codes of fp32 x, saturating, each rounded up with the probability of its place in between.

    Scaled so that the format's smallest normal number is fp32's, a value's bits are its code followed by the bits to
    drop, for normal and subnormal numbers alike; so it is enough to add random bits in the place of those and truncate.
    E4M3 and E5M2 drop more than the 16 bits that are drawn: the last ones count as half of the lowest drawn.
    """
    num_dropped_bits = 23 - format.mantissa_bits
    num_missing_bits = num_dropped_bits - NUM_BITS
    magnitude = torch.nan_to_num(x, nan=torch.nan, posinf=torch.nan, neginf=torch.nan).abs_().clamp_(max=format.max)
    bits = magnitude.mul_(2.0 ** (-126 - format.min_exponent)).view(torch.int32)
    if num_missing_bits > 0:
        bits += (random_numbers << num_missing_bits) + (1 << (num_missing_bits - 1))
    else:
        bits += random_numbers >> -num_missing_bits
    return bits.bitwise_right_shift_(num_dropped_bits).clamp_(max=format.nan_code)


def stochastic_round(x: Tensor, format: Format, random_numbers: Tensor) -> Tensor:
    """fp32 x in the format, rounded to one of its two neighbours. random_numbers: from random_bits, one per element."""
    codes = stochastic_codes(x, format, random_numbers)
    num_bits = 8 * format.dtype.itemsize
    codes |= (x.view(torch.int32) >> (32 - num_bits)) & (1 << (num_bits - 1))
    return codes.to(torch.uint8 if num_bits == 8 else torch.int16).view(format.dtype)


def split_encode(x: Tensor, random_numbers: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes of fp32 x and the INT8 position of x in each code's rounding interval, stochastically rounded.

    Together they are a number with 11 mantissa bits; the codes alone are that number rounded to the nearest E4M3.
    """
    fine = stochastic_codes(x, E4M11, random_numbers)
    codes = (fine + 128) >> 8
    residual = (fine - (codes << 8)).to(torch.int8)
    codes |= (x.view(torch.int32) >> 24) & 0x80
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), residual


def split_decode(codes: Tensor, residual: Tensor) -> Tensor:
    """The fp32 value of E4M3 codes with their INT8 residual."""
    signed = codes.view(torch.int8).to(torch.int32)
    carry = (signed & 0x7F).add_(1).bitwise_and_(0x80)  # only NaN, all ones, carries
    fine = ((signed & 0x7F) << 8).add_(residual)
    bits = fine.bitwise_left_shift_(12).bitwise_or_(carry * 0xF00000)  # a NaN gets fp32's exponent of all ones
    bits |= signed & -0x80000000
    return bits.view(torch.float32).mul_(2.0 ** (126 + E4M11.min_exponent))
