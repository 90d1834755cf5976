"""Linear weights in FP8 as the package compressed-tensors defines them: E4M3 codes and their dequantization scales.

    value = {layer}.weight (float8_e4m3fn, (N, K)) × {layer}.weight_scale (fp32)

    strategy    shape of weight_scale                 elements that share a scale
    tensor      (1,)                                  the weight
    channel     (N, 1)                                a row: an output feature
    block       (ceil(N / 128), ceil(K / 128))        128×128

`config.json` names the layers, under `quantization_config`. Source: github.com/vllm-project/compressed-tensors, version 0.20,
`compressors/naive_quantized` and `quantization/quant_args.py`.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.recipe import E4M3
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.kernels.formats import BLOCK

KINDS: Mapping[str, ScaleKind] = {
    "tensor": ScaleKind.TENSOR,
    "channel": ScaleKind.ROW,
    "block": ScaleKind.BLOCK_128X128,
}
"""The kind of scale of each strategy."""

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""The names of a weight's dequantization scale: in compressed-tensors; in DeepSeek-V3 and the block-scaled models since."""


class CompressedWeight(NamedTuple):
    """codes: float8_e4m3fn (N, K). scale: fp32, in the shape of the strategy."""

    codes: Tensor
    scale: Tensor


def compress(values_NK: Tensor, strategy: str) -> CompressedWeight:
    """Quantize a weight to nearest, at the power-of-two scales of its own largest magnitudes."""
    kind = KINDS[strategy]
    codes, dequant_scale = kernels.quantize(values_NK, E4M3, kind.granularity, block=kind.block)
    return CompressedWeight(codes, dequant_scale.reshape(1) if kind is ScaleKind.TENSOR else dequant_scale)


def decompress(codes: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return the fp32 values of E4M3 codes (N, K); the strategy follows from the scale's shape.

    name: of the weight, for the ValueError that a scale of any other shape raises.
    """
    num_rows, num_columns = codes.shape
    scale = scale.to(torch.float32)
    blocks = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
    if scale.numel() == 1:
        scaled = ScaledCodes(codes, scale.reshape(()), ScaleKind.TENSOR)
    elif scale.shape == (num_rows, 1) or scale.shape == (num_rows,):
        scaled = ScaledCodes(codes, scale.reshape(num_rows, 1), ScaleKind.ROW)
    elif scale.shape == blocks:
        scaled = ScaledCodes(codes, scale, ScaleKind.BLOCK_128X128)
    else:
        raise ValueError(
            f"the scale of {name}, {num_rows}×{num_columns}, has shape {tuple(scale.shape)}; allowed: one element, "
            f"({num_rows}, 1), or 128×128 blocks, {blocks}. Dequantize the checkpoint with the program that wrote it."
        )
    return kernels.values_of(scaled)


def quantization_config(strategy: str, ignored: Collection[str]) -> dict[str, Any]:
    """Return the block of `config.json`: all linear layers but the `ignored` ones hold codes; inputs are not quantized."""
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
                "input_activations": None,
                "output_activations": None,
                "format": "float-quantized",
            }
        },
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
