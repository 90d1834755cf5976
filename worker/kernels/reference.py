"""Plain-torch definition of every kernel: what CPUs run, and what faster implementations equal bit for bit.

`value = codes × dequant_scale`, always. Shapes of a dequant_scale, for x of shape (..., K) with M rows before K:
  tensor ()   ·   row (..., 1)   ·   block 1×N (..., ceil(K/N))   ·   block N×N (ceil(M/N), ceil(K/N))
Block 1×32 is OCP's MXFP8: its scale, a power of two within ±126, is one that E8M0 holds exactly.
A 1-D x has one row. Non-finite elements become NaN codes (one positive NaN per format, Inf included), finite ones
never do: they are clamped before the cast, whose own overflow differs between torch versions.
Times in comments: 2 M elements, one thread of an AVX-512 CPU, torch 2.13.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.formats import SCALED_FORMATS, dequant_scale_from_amax
from octet.worker.kernels.rounding import split_decode
from octet.worker.kernels.sampling import MOST_DECIBELS, sampled_rows
from octet.worker.kernels.scales import ScaledCodes, ScaleKind, empty_operand_scale, scale_shape

AMAX_STRIDE = 4
"""Elements from one amax of an op to the next, 16 bytes: a kernel that reads one is compiled for aligned addresses."""


def compute_amax(x: Tensor, kind: ScaleKind) -> Tensor:
    """Largest magnitude per scale, fp32, in the dequant_scale's shape; NaN or Inf where the group has one."""
    if x.numel() == 0:
        return x.new_zeros(scale_shape(x.shape, kind), dtype=torch.float32)
    if kind is ScaleKind.TENSOR:
        return x.abs().amax().float()
    if kind is ScaleKind.ROW:
        return x.abs().amax(-1, keepdim=True).float()
    block_rows, block_columns = kind.block
    if x.shape[-1] % block_columns:
        x = F.pad(x, (0, -x.shape[-1] % block_columns))
    amax = x.reshape(*x.shape[:-1], -1, block_columns).abs().amax(-1).float()
    if block_rows == 1:
        return amax
    amax_rows = amax.reshape(-1, amax.shape[-1])
    amax_rows = F.pad(amax_rows, (0, 0, 0, -amax_rows.shape[0] % block_rows))
    return amax_rows.view(-1, block_rows, amax.shape[-1]).amax(1)


def quantize(x: Tensor, dtype: torch.dtype, kind: ScaleKind, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes, dequant_scale) of x, from its own amaxes or from one that is given."""
    if amax is None:
        amax = compute_amax(x, kind)
    dequant_scale = dequant_scale_from_amax(amax, dtype, margin)
    return encode(x, dequant_scale, kind, dtype), dequant_scale


def quantize_operand(
    x_MN: Tensor,
    dtype: torch.dtype,
    kind: ScaleKind,
    margin: int,
    sides: str,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
) -> list[Tensor]:
    """x as an operand of products: [codes (M, N), dequant_scale] and [codes (N, M), dequant_scale] of x.T, then an amax.

    sides: "rows" asks for the first pair, "columns" for the second, "both" for both. All codes are contiguous, scales laid
    out as by scales.empty_operand_scale.
    amax: to scale by, for the kind TENSOR. uses_amax, a bool (): whether to; where it is false the scale comes from x's own
    amax. With uses_amax x's own amax is returned in the last place.
    """
    own_amax = None
    if uses_amax is not None:
        assert amax is not None
        own_amax = compute_amax(x_MN, kind)
        amax = torch.where(uses_amax, amax, own_amax)
    parts: list[Tensor] = []
    if kind.is_transposable:
        rows = quantize(x_MN, dtype, kind, margin, amax)
        parts += rows if sides != "columns" else ()
        parts += [part.t().clone(memory_format=torch.contiguous_format) for part in rows] if sides != "rows" else ()
    else:
        parts += _quantize_rows(x_MN, dtype, kind, margin) if sides != "columns" else ()
        parts += _quantize_rows(x_MN.t(), dtype, kind, margin) if sides != "rows" else ()
    return parts if own_amax is None else [*parts, own_amax]


def requantize(stored: ScaledCodes, amax: Tensor, dtype: torch.dtype, margin: int, sides: str) -> list[Tensor]:
    """Stored codes with a scale () in another format as an operand, as by `quantize_operand`. amax: of the values."""
    parts = quantize_operand(stored.codes, dtype, stored.kind, margin, sides, amax / stored.dequant_scale)
    parts[1::2] = [dequant_scale * stored.dequant_scale for dequant_scale in parts[1::2]]
    return parts


def quantize_gradient(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of x and their dequant_scale (), which is NaN where a value is not finite. amax: of x, if it is known."""
    amax = compute_amax(x, ScaleKind.TENSOR) if amax is None else amax
    codes, dequant_scale = quantize(x, dtype, ScaleKind.TENSOR, 0, amax)
    return codes, dequant_scale + amax * 0.0


def activate_operand(x_MN: Tensor, activation: str, dtype: torch.dtype, kind: ScaleKind, *scaling: Any) -> list[Tensor]:
    """An activation of x, rounded to its dtype, as an operand of products; its amax comes last where it was looked for.

    scaling: as for `quantize_operand`, and then a tensor that does not matter here.
    """
    margin, sides, amax, uses_amax = (*scaling, None, None)[:4]
    values_MN = ACTIVATIONS[activation].forward(x_MN)
    if kind is not ScaleKind.TENSOR or amax is not None:
        return quantize_operand(values_MN, dtype, kind, margin, sides, amax, uses_amax)
    amax = compute_amax(values_MN, kind)
    return [*quantize_operand(values_MN, dtype, kind, margin, sides, amax), amax]


def activate(x: Tensor, gated: Tensor | None, activation: str, *known_scale: Any) -> list[Tensor]:
    """An activation of x, times what it gates, each rounded to the dtype of x; its amax; and codes."""
    output = ACTIVATIONS[activation].forward(x)
    output = (output if gated is None else output * gated).contiguous()
    return [output, compute_amax(output, ScaleKind.TENSOR), *_codes_at_known_scale(output, *known_scale)]


def _codes_at_known_scale(
    x: Tensor,
    dtype: torch.dtype | None = None,
    margin: int = 0,
    amax: Tensor | None = None,
    _uses_amax: Tensor | None = None,
) -> list[Tensor]:
    """Codes of x by a given amax, none without a dtype. Where the amax is not used nobody reads them before `complete`."""
    if dtype is None:
        return []
    assert amax is not None
    return [quantize(x, dtype, ScaleKind.TENSOR, margin, amax)[0]]


def quantize_delayed(
    x_MN: Tensor, step_amax: Tensor, window_amax: Tensor, num_finite_steps: Tensor, *settings: Any
) -> list[Tensor]:
    """Return the tensors of `quantize_operand`, then the amax that codes are scaled by; step_amax is raised in place."""
    amax, dtype, history_length, margin, sides, activation, remembers = settings
    values_MN = x_MN if activation is None else ACTIVATIONS[activation].forward(x_MN)
    amax = compute_amax(values_MN, ScaleKind.TENSOR) if amax is None else amax
    if remembers:
        step_amax.copy_(torch.maximum(step_amax, amax))
    amax = torch.where(num_finite_steps >= history_length, window_amax, amax)
    return [*quantize_operand(values_MN, dtype, ScaleKind.TENSOR, margin, sides, amax, None), amax]


def complete(
    codes: Tensor, x: Tensor, own_amax: Tensor, margin: int, amax: Tensor, uses_amax: Tensor, columns: bool
) -> tuple[Tensor, Tensor]:
    """The scale () of codes, and codes (N, M) of x.T, or (0): of the codes, or, unless *uses_amax, all by x's own amax."""
    made, scale = quantize(x, codes.dtype, ScaleKind.TENSOR, margin, torch.where(uses_amax, amax, own_amax))
    codes.view(torch.uint8).copy_(torch.where(uses_amax, codes.view(torch.uint8), made.view(torch.uint8)))
    return scale, codes.t().clone(memory_format=torch.contiguous_format) if columns else codes.new_empty(0)


def activate_backward(grad: Tensor, x: Tensor, gated: Tensor | None, activation: str, *known_scales: Any) -> list[Tensor]:
    """The gradients of x and of what it gates; their amaxes, in the first column of fp32 (gradients, AMAX_STRIDE); codes.

    known_scales: how `_codes_at_known_scale` makes codes of the first, and then of the second.
    """
    forward, backward = ACTIVATIONS[activation]
    gradients = [backward(grad if gated is None else grad * gated, x).contiguous()]
    if gated is not None:
        gradients.append((grad * forward(x)).contiguous())
    amaxes = torch.zeros((len(gradients), AMAX_STRIDE), device=x.device)
    for row, gradient in zip(amaxes, gradients, strict=True):
        row[0] = compute_amax(gradient, ScaleKind.TENSOR)
    codes = [
        part
        for index, gradient in enumerate(gradients)
        for part in _codes_at_known_scale(gradient, *known_scales[4 * index : 4 * index + 4])
    ]
    return [*gradients, amaxes, *codes]


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer_norm: bool,
    dtype: torch.dtype,
    *known_scale: Any,
) -> list[Tensor]:
    """Torch's norm of the rows of x in dtype; mean, of LayerNorm, and rstd, fp32 (..., 1); the amax of the output; codes."""
    output, *statistics = normalize_rows(x.contiguous(), weight, bias, eps, is_layer_norm, dtype)
    return [output, *statistics, compute_amax(output, ScaleKind.TENSOR), *_codes_at_known_scale(output, *known_scale)]


def normalize_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer_norm: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Return torch's norm of the rows of x in dtype; mean, of LayerNorm, and rstd, fp32 (..., 1)."""
    wide = norm_dtype(x, weight, dtype)
    x, weight, bias = x.to(wide), *(None if part is None else part.to(wide) for part in (weight, bias))
    if is_layer_norm:
        output, *statistics = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    else:
        # The ops of torch's rms_norm on a CPU, which does not return the inverse root.
        statistics = [torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)]
        output = x.float() * statistics[0]
        output = (output if weight is None else output * weight).to(wide)
    return [output.to(dtype), *(part.float() for part in statistics)]


def norm_dtype(x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's norm is computed: that of all operands and the result, or else fp32."""
    return dtype if x.dtype == dtype and (weight is None or weight.dtype == dtype) else torch.float32


def encode(x: Tensor, dequant_scale: Tensor, kind: ScaleKind, dtype: torch.dtype) -> Tensor:
    """Codes of x at a given dequant_scale: nearest even, saturating; non-finite elements become NaN. 1.3 ms (E4M3)."""
    limit = SCALED_FORMATS[dtype].max
    scaled = _inf_to_nan(x.float())
    _multiply_by_scale_(scaled, dequant_scale.reciprocal(), kind)
    return scaled.clamp_(-limit, limit).to(dtype).contiguous()


def dequantize(quantized: ScaledCodes, dtype: torch.dtype) -> Tensor:
    """codes × dequant_scale, rounded once to dtype."""
    return _values(quantized).to(dtype).contiguous()


def split_dequantize(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes with their INT8 residual, × dequant_scale (), rounded once to dtype."""
    return split_decode(codes, residual).mul_(dequant_scale).to(dtype)


def decode(codes: Tensor) -> Tensor:
    """The fp32 values of the codes themselves, in a new tensor with the codes' strides.

    Both FP8 formats are read as FP16 (E5M2 is its upper byte; E4M3 shifted by 7 is FP16 with an exponent bias 8 too
    high): 0.8 ms, where torch's own E4M3 to fp32 cast takes 4.9 ms.
    """
    if codes.dtype == torch.float8_e5m2:
        return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if codes.dtype == torch.float8_e4m3fn:
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)  # the sign fills bits 15 and 14
        carry = (bits & 0x3F80).add_(0x80).bitwise_and_(0x4000)  # only NaN, all ones, carries into bit 14: FP16's NaN
        return bits.bitwise_and_(~0x4000).bitwise_or_(carry).view(torch.float16).float().mul_(2.0**8)
    return codes.to(torch.float32, copy=True)


def all_finite(x: Tensor) -> Tensor:
    """Return a 0-dim bool tensor on x's device: True if no element is NaN or Inf. FP8 codes are read as bytes."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.dtype.itemsize > 1:
        smallest, largest = torch.aminmax(x)  # needs no temporary; NaN where there is one
        return (smallest > -torch.inf) & (largest < torch.inf)
    first_nonfinite_code = 0x7F if x.dtype == torch.float8_e4m3fn else 0x7C
    return (x.view(torch.uint8) & 0x7F).amax() < first_nonfinite_code


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root of an fp32 tensor. torch's own on a CPU is one code off for 15 % of all numbers."""
    return x.double().sqrt_().float()


def matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The scaled GEMM a @ b.T of FP8 codes, (M, N), accumulated in fp32, which a CPU always does precisely.

    Tensor and row scales multiply the product, as CUDA's epilogue does; block scales multiply the operands. Decoding and an
    fp32 matmul take 0.6 of the time of torch._scaled_mm on a CPU, which has no block scales.
    The largest fp32 number has an E4M3 code of 256 at 2^120. Its value, 2^128, saturates before a matmul could make NaN of
    it, as Inf · 0; where scales multiply the product, both do at once, or the first alone could make Inf of it.
    Autocast stays outside, as it does of CUDA's kernels: in fp16 the sums of unscaled codes are Inf, and in bf16 torch adds
    in another order than in a graph, which is traced without it.
    """
    is_blockwise = a_MK.kind.is_blockwise or b_NK.kind.is_blockwise
    with torch.autocast("cpu", enabled=False):
        if is_blockwise:
            out_MN = _saturated_values(a_MK) @ _saturated_values(b_NK).t()
        else:
            out_MN = decode(a_MK.codes) @ decode(b_NK.codes).t()
    if not is_blockwise:
        out_MN.mul_(a_MK.dequant_scale * b_NK.dequant_scale.t())
    return out_MN.to(out_dtype)


def _quantize_rows(x_MN: Tensor, dtype: torch.dtype, kind: ScaleKind, margin: int) -> tuple[Tensor, Tensor]:
    codes, dequant_scale = quantize(x_MN, dtype, kind, margin, None)
    return codes, empty_operand_scale(x_MN.shape, kind, x_MN.device).copy_(dequant_scale)


def _values(quantized: ScaledCodes) -> Tensor:
    values = decode(quantized.codes)
    _multiply_by_scale_(values, quantized.dequant_scale, quantized.kind)
    return values


def _saturated_values(quantized: ScaledCodes) -> Tensor:
    limit = torch.finfo(torch.float32).max
    return _values(quantized).clamp_(-limit, limit)


def measure(x_MN: Tensor, quantized: ScaledCodes, stored_scale: Tensor | None, out: Tensor) -> None:
    """Five numbers of a sample of rows, see `measurement.measure`. Counts and squares are summed in float64."""
    if x_MN.numel() == 0:
        out.fill_(torch.nan)
        return
    largest, sample = SCALED_FORMATS[quantized.codes.dtype].max, quantized.every(sampled_rows(*x_MN.shape).step)
    values, stored = _values(sample), decode(sample.codes).abs()
    wide = x_MN[:: sampled_rows(*x_MN.shape).step].float()
    magnitude = wide.abs()
    is_clamped = (stored == largest) & (magnitude > values.abs())
    counts = (is_clamped, (stored == 0) & (magnitude > 0), wide.square(), (wide - values).square())
    num_clamped, num_lost, signal, noise = torch.stack([count.sum(dtype=torch.float64) for count in counts]).float()
    factor = 1.0 if stored_scale is None else stored_scale
    decibels = torch.where(noise == 0, MOST_DECIBELS, 10 * torch.log10(signal / noise))
    largest_scale = sample.dequant_scale.amax() * factor
    shares = (num_clamped / wide.numel(), num_lost / wide.numel())
    out.copy_(torch.stack((magnitude.amax() * factor, largest_scale, *shares, decibels)))


def _inf_to_nan(x: Tensor) -> Tensor:
    """A copy of x in which every non-finite element is the positive NaN."""
    return torch.nan_to_num(x, nan=torch.nan, posinf=torch.nan, neginf=torch.nan)


def _multiply_by_scale_(x: Tensor, scale: Tensor, kind: ScaleKind) -> None:
    """x *= scale in place, each scale spread over its group."""
    if not kind.is_blockwise:
        x.mul_(scale)
        return
    num_rows, (block_rows, block_columns) = x.shape[:-1].numel(), kind.block
    if block_rows > 1:
        scale = scale.repeat_interleave(block_rows, 0)[:num_rows].reshape(*x.shape[:-1], scale.shape[1])
    if x.shape[-1] % block_columns:
        x.mul_(scale.repeat_interleave(block_columns, -1)[..., : x.shape[-1]])
    else:
        x.view(*scale.shape, block_columns).mul_(scale.unsqueeze(-1))


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Torch's attention on a CPU, with a mask of documents. Returns the output, and logarithms of sums (H, B·q)."""
    key, value = (_repeat_heads(heads, query) for heads in (key, value))
    mask = _document_mask(query, key, query_starts, key_starts, window)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = run(query, key, value, attn_mask=mask, scale=scale)
    return output.transpose(1, 2).contiguous().transpose(1, 2), logsumexp.float().transpose(0, 1).flatten(1).contiguous()


def document_attention_backward(
    grad: Tensor, heads: list[Tensor], output: Tensor, logsumexp: Tensor, *where: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in whose memory all heads of a token are neighbours.

    where: query_starts, key_starts, scale and window of the forward pass.
    """
    query, key, value = heads
    query_starts, key_starts, scale, window = where
    alone = query, *(_repeat_heads(shared, query) for shared in (key, value))
    mask = _document_mask(query, key, query_starts, key_starts, window)
    logsumexp = logsumexp.unflatten(1, (len(query), -1)).movedim(0, 2).contiguous().transpose(1, 2)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = run(grad, *alone, output, logsumexp, 0.0, False, attn_mask=mask, scale=scale)
    grads = [part.transpose(1, 2) for part in found]
    shared = [part.unflatten(2, (of.shape[1], -1)).sum(3) for part, of in zip(grads[1:], (key, value), strict=True)]
    return tuple(part.contiguous().transpose(1, 2) for part in (grads[0], *shared))


def _document_mask(query: Tensor, key: Tensor, query_starts: Tensor, key_starts: Tensor, window: int) -> Tensor:
    """Return 0 where a query may attend to a key, and else minus infinity, (B, 1, q, k), in the dtype of the query."""
    of_queries, of_keys = (
        torch.searchsorted(starts, torch.arange(len(heads) * heads.shape[2], dtype=torch.int32), right=True)
        for heads, starts in ((query, query_starts), (key, key_starts))
    )
    is_same = of_queries.view(len(query), -1, 1) == of_keys.view(len(key), 1, -1)
    own_key = key.shape[2] - query.shape[2]
    is_same = is_same.tril(own_key)
    if window:
        is_same = is_same.triu(own_key - window + 1)
    return torch.zeros(is_same.shape, dtype=query.dtype).masked_fill_(~is_same, -torch.inf)[:, None]


def _repeat_heads(heads: Tensor, query: Tensor) -> Tensor:
    num_groups = query.shape[1] // heads.shape[1]
    return heads if num_groups == 1 else heads.repeat_interleave(num_groups, dim=1)
