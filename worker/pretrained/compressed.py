"""Linear weights in FP8 as the package compressed-tensors defines them: E4M3 codes and their dequantization scales.

    value = {layer}.weight (float8_e4m3fn, (N, K)) × {layer}.weight_scale (fp32)

With static activations a layer also has {layer}.input_scale (fp32, one number), by which servers scale its inputs.
The strategies of scales are those of `api_schemas/models/weight_files.py`. `config.json` names the layers, under
`quantization_config`. Source: github.com/vllm-project/compressed-tensors, version 0.20, `compressors/naive_quantized` and
`quantization/quant_args.py`.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.recipe import E4M3
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.kernels.formats import BLOCK, SCALE_EXPONENT_MAX

KINDS: Mapping[str, ScaleKind] = {
    "tensor": ScaleKind.TENSOR,
    "channel": ScaleKind.ROW,
    "block": ScaleKind.BLOCK_128X128,
}
"""The kind of scale of each strategy."""

LAYOUTS = ("compressed-tensors", "hf-fp8-block")
ACTIVATIONS = ("none", "dynamic", "static")
INPUT_SCALE = "input_scale"
"""The name of the scale of a layer's inputs, for static activations."""
ACTIVATION_MAX = 448.0
"""The largest E4M3 value, to which servers scale the largest magnitude of activations."""


class Fp8Form(NamedTuple):
    """The form in which FP8 weights are written for a server.

    layout: compressed-tensors, or that of DeepSeek and transformers' `quant_method: fp8`, blocks of 128 × 128 with
    `weight_scale_inv`. activations: none, so that a server multiplies in 16 bits; dynamic: it scales the inputs of converted
    layers by token (in the second layout by 128 values of one, and needs multiples of them) and multiplies in FP8; static: it
    scales all inputs of a layer by one number. input_scales: these numbers by layer, as `Calibration` finds them.
    """

    layout: str = "compressed-tensors"
    activations: str = "none"
    input_scales: Mapping[str, float] = MappingProxyType({})

    @property
    def is_of_blocks(self) -> bool:
        """True for the layout of DeepSeek and transformers."""
        return self.layout == "hf-fp8-block"

    @property
    def scale_name(self) -> str:
        """The name of a weight's scales in its layer."""
        return "weight_scale_inv" if self.is_of_blocks else "weight_scale"

    def as_served(self, input_TK: Tensor, static_scale: float | None = None) -> Tensor:
        """Return the values of a layer's input that a server multiplies with, in the input's dtype.

        static_scale: of the layer, with static activations. What is larger than its codes can be is clamped.
        """
        if self.activations == "none":
            return input_TK
        if static_scale is not None:
            codes = (input_TK.float() / static_scale).clamp(-ACTIVATION_MAX, ACTIVATION_MAX).to(E4M3)
            return (codes.float() * static_scale).to(input_TK.dtype)
        groups = input_TK.float().unflatten(-1, (-1, BLOCK if self.is_of_blocks else input_TK.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / ACTIVATION_MAX
        return ((groups / scale).to(E4M3).float() * scale).flatten(-2).to(input_TK.dtype)


WEIGHTS_ONLY = Fp8Form()
PIECE_ELEMENTS = 1 << 22
"""Elements that are decoded at a time, so that temporaries do not grow with the weight."""


class CompressedWeight(NamedTuple):
    """codes: float8_e4m3fn (N, K). scale: fp32, in the shape of the strategy."""

    codes: Tensor
    scale: Tensor


def compress(values_NK: Tensor, strategy: str) -> CompressedWeight:
    """Quantize a weight to nearest, at the power-of-two scales of its own largest magnitudes."""
    kind = KINDS[strategy]
    codes, dequant_scale = kernels.quantize(values_NK, E4M3, kind.granularity, block=kind.block)
    return CompressedWeight(codes, dequant_scale.reshape(1) if kind is ScaleKind.TENSOR else dequant_scale)


def decompress(codes_NK: Tensor, scale: Tensor, strategy: str) -> Tensor:
    """Return the fp32 values of E4M3 codes. Apart from them this takes temporaries of PIECE_ELEMENTS elements.

    scale: in the strategy's shape, of any floating-point dtype.
    """
    num_rows, num_columns = codes_NK.shape
    kind, scale = KINDS[strategy], scale.to(torch.float32)
    scale = scale.reshape(()) if kind is ScaleKind.TENSOR else scale.reshape(scale.shape[0], -1)
    values_NK = torch.empty(num_rows, num_columns)
    step = BLOCK * max(1, PIECE_ELEMENTS // (BLOCK * max(1, num_columns)))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        if kind is ScaleKind.TENSOR:
            own = scale
        elif kind is ScaleKind.ROW:
            own = scale[rows]
        else:
            own = scale[first // BLOCK : -(-(first + step) // BLOCK)]
        values_NK[rows] = kernels.values_of(ScaledCodes(codes_NK[rows], own, kind))
    return values_NK


def is_power_of_two(scale: Tensor) -> bool:
    """Return True for a scale () as a level's own codes have it."""
    mantissa, exponent = torch.frexp(scale)
    return bool((mantissa == 0.5) & ((exponent - 1).abs() <= SCALE_EXPONENT_MAX))


def over_blocks(weight: CompressedWeight) -> CompressedWeight:
    """Repeat the one scale of a weight (N, K) for each of its blocks; the codes stay."""
    blocks = [-(-size // BLOCK) for size in weight.codes.shape]
    return CompressedWeight(weight.codes, weight.scale.reshape(1, 1).expand(blocks))


def quantization_config(strategy: str, ignored: Collection[str], form: Fp8Form = WEIGHTS_ONLY) -> dict[str, Any]:
    """Return the block of `config.json`: all linear layers but the `ignored` ones hold codes."""
    if form.is_of_blocks:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": form.activations,
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(ignored),
        }
    is_dynamic = form.activations == "dynamic"
    inputs = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs |= {"strategy": "token" if is_dynamic else "tensor", "dynamic": is_dynamic}
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if form.activations == "none" else inputs,
                "output_activations": None,
                "format": "float-quantized",
            }
        },
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
