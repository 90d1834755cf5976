"""The arithmetic of each optimizer rule for `optimizer.py`: this step's constants, and the direction that a weight moves in.

The twins are the rules in `worker/optim` (`adam.py`, `lion.py`, `sgd.py`): the same operations in the same order, each rounded
once.
A rule adds a branch to each function here; the chain of `if` is decided when a kernel is compiled.
"""

import triton
import triton.language as tl

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda import optimizer_tables as tables

_SMALLEST_ROOTED, _LARGEST = tl.constexpr(2.0**-100), tl.constexpr(3.4028234663852886e38)

# Columns of Adam and Lion, from tables.GROUP_RULE and tables.CONSTANT_RULE on.
_BETA1, _BETA2 = tl.constexpr(tables.GROUP_RULE.value), tl.constexpr(tables.GROUP_RULE.value + 1)
_LOG_BETA1, _LOG_BETA2 = tl.constexpr(tables.GROUP_RULE.value + 2), tl.constexpr(tables.GROUP_RULE.value + 3)
_EPS = tl.constexpr(tables.GROUP_RULE.value + 4)
_SLACK, _MAX_UPDATE = tl.constexpr(tables.GROUP_RULE.value + 5), tl.constexpr(tables.GROUP_RULE.value + 6)
_KEPT1, _ADDED1 = tl.constexpr(tables.CONSTANT_RULE.value), tl.constexpr(tables.CONSTANT_RULE.value + 1)  # beta1, 1 - beta1
_KEPT2, _ADDED2 = tl.constexpr(tables.CONSTANT_RULE.value + 2), tl.constexpr(tables.CONSTANT_RULE.value + 3)
_ROOT_CORRECTION = tl.constexpr(tables.CONSTANT_RULE.value + 4)
_EPSILON = tl.constexpr(tables.CONSTANT_RULE.value + 5)
_LARGEST_DIRECTION = tl.constexpr(tables.CONSTANT_RULE.value + 6)

# Columns of SGD, which has its own.
_MOMENTUM, _MAX_GRADIENT = _BETA1, _BETA2
_MAX_DIRECTION = _LOG_BETA1
_KEPT_MOMENTUM, _LARGEST_GRADIENT = _KEPT1, _ADDED1
_LARGEST_MOMENTUM = _KEPT2


@triton.constexpr_function
def is_signed(RULE, INDEX):
    """Return True if a rule's state may be negative."""
    return (RULE, INDEX) != ("adam", 1)


@triton.jit
def prepare(group, out, step, RULE: tl.constexpr):
    """Store the rule's constants at `out`, fp64 rounded once to fp32.

    group: the row of hyperparameters. step: int64, from 1. Returns, in fp64, what the direction is multiplied by and the bound
    on the change of a weight without decay.
    """
    if RULE == "sgd":
        return _prepare_sgd(group, out)
    else:
        return _prepare_averages(group, out, step, RULE)


@triton.jit
def _prepare_sgd(group, out):
    lr, largest = tl.load(group + tables.LR), tl.load(group + _MAX_DIRECTION)
    tl.store(out + _KEPT_MOMENTUM, tl.load(group + _MOMENTUM).to(tl.float32))
    tl.store(out + _LARGEST_GRADIENT, tl.load(group + _MAX_GRADIENT).to(tl.float32))
    tl.store(out + _LARGEST_MOMENTUM, largest.to(tl.float32))
    return lr, lr * largest


@triton.jit
def _prepare_averages(group, out, step, RULE: tl.constexpr):
    """Adam and Lion, which have two betas."""
    lr, beta1, beta2 = tl.load(group + tables.LR), tl.load(group + _BETA1), tl.load(group + _BETA2)
    tl.store(out + _KEPT1, beta1.to(tl.float32))
    tl.store(out + _ADDED1, (1.0 - beta1).to(tl.float32))
    tl.store(out + _KEPT2, beta2.to(tl.float32))
    tl.store(out + _ADDED2, (1.0 - beta2).to(tl.float32))
    if RULE == "adam":
        power1 = tl.exp(tl.load(group + _LOG_BETA1) * step.to(tl.float64))
        power2 = tl.exp(tl.load(group + _LOG_BETA2) * step.to(tl.float64))
        tl.store(out + _ROOT_CORRECTION, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32))
        tl.store(out + _EPSILON, tl.load(group + _EPS).to(tl.float32))
        square1 = beta1 * beta1
        is_bounded = square1 < beta2
        ratio = tl.where(is_bounded, square1 / beta2, 0.0)
        ratio_power = tl.where(is_bounded, power1 * power1 / power2, 0.0)
        corrected = tl.sqrt((1.0 - power2) / (1.0 - beta2)) * (1.0 - beta1) / (1.0 - power1)
        update = tl.load(group + _SLACK) * corrected * tl.sqrt((1.0 - ratio_power) / (1.0 - ratio))
        update = tl.where(is_bounded, update, float("inf"))
        tl.store(out + _LARGEST_DIRECTION, (update * (1.0 - power1)).to(tl.float32))
        return lr / (1.0 - power1), lr * tl.minimum(update, tl.load(group + _MAX_UPDATE))
    else:
        tl.static_assert(RULE == "lion", "unknown rule")
        return lr, lr


@triton.jit
def advance(states, gradient, constant, RULE: tl.constexpr):
    """The direction, in units of the rate, and the new states, from fp32 states (a tuple) and the fp32 gradient."""
    if RULE == "adam":
        average, square = states
        average = average * constant[_KEPT1] + gradient * constant[_ADDED1]
        square = square * constant[_KEPT2] + gradient * gradient * constant[_ADDED2]
        root = language.sqrt(tl.minimum(tl.maximum(square, _SMALLEST_ROOTED), _LARGEST))
        denominator = root * constant[_ROOT_CORRECTION] + constant[_EPSILON]
        direction, largest = language.divide(average, denominator), constant[_LARGEST_DIRECTION]
        return tl.clamp(direction, -largest, largest, propagate_nan=tl.PropagateNan.ALL), (average, square)
    elif RULE == "sgd":
        (average,) = states
        largest, largest_momentum = constant[_LARGEST_GRADIENT], constant[_LARGEST_MOMENTUM]
        clamped = tl.clamp(gradient, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        average = average * constant[_KEPT_MOMENTUM] + clamped
        return tl.clamp(average, -largest_momentum, largest_momentum, propagate_nan=tl.PropagateNan.ALL), (average,)
    else:
        tl.static_assert(RULE == "lion", "unknown rule")
        (average,) = states
        mixed = average * constant[_KEPT1] + gradient * constant[_ADDED1]
        sign = tl.where(mixed > 0, 1.0, 0.0) - tl.where(mixed < 0, 1.0, 0.0)
        return sign + mixed * 0.0, (average * constant[_KEPT2] + gradient * constant[_ADDED2],)  # NaN unless mixed is finite
