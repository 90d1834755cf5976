"""Folders with FP8 models as other programs write them, made by numpy alone, and the values that a server multiplies.

The encoder and the decoder are a table of E4M3's values, built from its definition (OCP OFP8, version 1.0); scales are
amax / 448, as DeepSeek-V3 and llm-compressor have them, or powers of two.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from octet.worker.models.huggingface import transformers

BLOCK = 128
LLAMA = {
    "vocab_size": 256,
    "hidden_size": 160,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""Whole blocks and parts of blocks in each direction."""
QWEN3 = LLAMA | {"head_dim": 64}
Array = NDArray[np.float32]


class Form(NamedTuple):
    """A form of FP8: the block of `config.json`, the end of a scale's name, and the blocks of a weight by its shape."""

    config: dict[str, Any]
    scale_end: str
    block: Callable[[int, int], tuple[int, int]]
    is_flat: bool = False


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a model in compressed-tensors that a server multiplies in FP8."""
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": kind, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
FORMS = {
    "deepseek": Form(DEEPSEEK, "_scale_inv", lambda _rows, _columns: (BLOCK, BLOCK)),
    "tensor": Form(compressed("tensor"), "_scale", lambda rows, columns: (rows, columns), is_flat=True),
    "channel": Form(compressed("channel"), "_scale", lambda _rows, columns: (1, columns)),
    "block": Form(compressed("block", block_structure=[BLOCK, BLOCK]), "_scale", lambda _rows, _columns: (BLOCK, BLOCK)),
}


def e4m3_values() -> Array:
    """Return the value of each code that is no NaN and not negative, in order: codes 0 to 126."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)


def encode(values: Array, scales: Array) -> NDArray[np.uint8]:
    """Return the nearest codes of values divided by scales of their own shape."""
    table, wanted = e4m3_values(), np.abs(values / scales)
    middles = (table[1:] + table[:-1]) / 2
    return (np.searchsorted(middles, wanted) | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def decode(codes: NDArray[np.uint8], scales: Array) -> Array:
    """Return codes times scales of their own shape."""
    magnitudes = e4m3_values()[codes & 0x7F]
    return np.where(codes & 0x80, -magnitudes, magnitudes) * scales


def spread(scales: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Repeat each scale over its block."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def scales_of(values: Array, block: tuple[int, int], *, power_of_two: bool) -> Array:
    """Return a scale for each block: amax / 448, or twice the power of two above it, which leaves a binade of E4M3 unused."""
    rows, columns = -(-values.shape[0] // block[0]), -(-values.shape[1] // block[1])
    padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    scales = padded.reshape(rows, block[0], columns, block[1]).max((1, 3)) / np.float32(448)
    return (2.0 ** (np.ceil(np.log2(scales)) + 1) if power_of_two else scales).astype(np.float32)


def network(architecture: str, sizes: dict[str, Any]) -> Any:
    """Return a network of transformers with random values in bf16's precision, as fp32."""
    torch.manual_seed(0)
    config = transformers().CONFIG_MAPPING[architecture](**sizes)
    made = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4).copy_(parameter.bfloat16().float())
    return made.eval()


def save_fp8(
    folder: Path, model: Any, form: Form, ignored: Collection[str] = (), *, power_of_two: bool = False
) -> dict[str, Tensor]:
    """Write a model with its linear layers in FP8, but the head and the ignored ones. The rest is bf16.

    Returns all tensors by the file's names, as the values that a server multiplies. The model then holds them too.
    """
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head", *ignored}
    tensors, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        if name.removesuffix(".weight") not in linears:
            tensors[name] = tensor.bfloat16()
            values[name] = tensors[name].float()
            continue
        array = tensor.numpy()
        block = form.block(*array.shape)
        scales = scales_of(array, block, power_of_two=power_of_two)
        wide = spread(scales, block, array.shape)
        codes = encode(array, wide)
        tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        tensors[name + form.scale_end] = torch.from_numpy(scales.reshape(-1) if form.is_flat else scales)
        values[name] = torch.from_numpy(decode(codes, wide))
    model.load_state_dict(values)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = form.config | ({"ignore": ["lm_head", *ignored]} if "ignore" in form.config else {})
    config = model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": quantization}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    return values
