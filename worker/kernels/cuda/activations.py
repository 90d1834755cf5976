"""Triton device functions of the activations in `worker/kernels/activations.py`, for kernels that apply one as they read.

The result is rounded to the input's dtype before it is used, as an activation that is written down would be. ReLU equals
torch's bit for bit; the others are within the last bits of exp and erf, so that a code may differ by one from the twin's.
"""

import triton
import triton.language as tl

from octet.worker.kernels.cuda import language

ROOT_HALF = tl.constexpr(0.7071067811865476)
TANH_RATE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / pi): 0.5 · (1 + tanh(u)) is the logistic function of 2 · u
TANH_CUBIC = tl.constexpr(0.044715)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # of the standard normal distribution: 1 / sqrt(2 · pi)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """fp32 values of x, or of an activation of x, which is rounded to the dtype of x. All map 0 to 0, so masks stay."""
    values = x.to(tl.float32)
    if ACTIVATION is None:
        return values
    elif ACTIVATION == "relu":
        return tl.where(values <= 0, 0.0, values)  # a NaN stays
    else:
        tl.static_assert(ACTIVATION == "gelu" or ACTIVATION == "gelu-tanh" or ACTIVATION == "silu")
        if ACTIVATION == "gelu":
            result = values * 0.5 * (1.0 + tl.erf(values * ROOT_HALF))
        elif ACTIVATION == "silu":
            result = values / (1.0 + tl.exp(-values))
        else:
            cubic = values * values * values
            result = values / (1.0 + tl.exp((values + cubic * TANH_CUBIC) * -TANH_RATE))
        return language.cast(result, x.dtype).to(tl.float32)


@triton.jit
def times_derivative(grad, x, ACTIVATION: tl.constexpr):
    """fp32: grad, fp32, times the derivative of an activation at x."""
    values = x.to(tl.float32)
    if ACTIVATION == "relu":
        return tl.where(values <= 0, 0.0, grad)  # that of torch at a NaN, too
    else:
        tl.static_assert(ACTIVATION == "gelu" or ACTIVATION == "gelu-tanh" or ACTIVATION == "silu")
        if ACTIVATION == "gelu":
            density = tl.exp(values * values * -0.5) * DENSITY_AT_0
            return grad * (0.5 * (1.0 + tl.erf(values * ROOT_HALF)) + values * density)
        elif ACTIVATION == "silu":
            logistic = 1.0 / (1.0 + tl.exp(-values))
            return grad * logistic * (1.0 + values * (1.0 - logistic))
        else:
            square = values * values
            logistic = 1.0 / (1.0 + tl.exp((values + values * square * TANH_CUBIC) * -TANH_RATE))
            rate = TANH_RATE * (1.0 + 3.0 * TANH_CUBIC * square)  # the derivative of what the logistic function is taken of
            return grad * (logistic + values * logistic * (1.0 - logistic) * rate)
