"""The tensors of a saved model by the headers of its safetensors files, and the forms of FP8 in which they may be.

    value = {name} (F8_E4M3, (N, K)) × {name}_scale, or {name}_scale_inv

    strategy    shape of the scale                    elements that share it
    tensor      (), (1,) or (1, 1)                    the weight
    channel     (N, 1) or (N,)                        a row: an output feature
    block       (ceil(N / 128), ceil(K / 128))        128×128

A stack of weights (E, N, K), as of experts, has E such scales: (E,), (E, 1), and so on.
`quantization_config` in `config.json` is that of compressed-tensors (version 0.20), or of `quant_method: fp8`, as DeepSeek-V3
and transformers have it. A submission and the rank check a folder by the same functions; no tensor is read.
"""

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octet.api_schemas.base import SpecConflict
from octet.api_schemas.data.files import ANY_FILE, Files

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
MAX_INDEX_BYTES = 32 << 20
"""An index of 300,000 tensors."""
MAX_HEADER_BYTES = 8 << 20
"""A header of 60,000 tensors. Python reads 30 MB of JSON in a second, in which no other thread of a server runs."""
CODES = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
"""Dtypes of values and of whole numbers in buffers; no quantized weight has them."""
SCALE_ENDS = ("_scale", "_scale_inv")
SERVER_ENDS = tuple(f".{name}" for name in ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale"))
"""Scales of activations and of the cache of keys and values, which only a server has."""
STRATEGIES = ("tensor", "channel", "block")
BLOCK = 128
COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")


class StoredTensor(NamedTuple):
    """A tensor as a header describes it. dtype: by safetensors' name, such as BF16."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class StoredScale(NamedTuple):
    """The dequantization scale of a weight: its name, and its strategy."""

    name: str
    strategy: str


def check_folder(folder: Path, config: Mapping[str, Any], files: Files = ANY_FILE) -> None:
    """Check the weights of a folder whose `config.json` says that they are quantized. Raises SpecConflict or OSError."""
    if config.get("quantization_config") is not None:
        find_scales(config, read_headers(folder, files))


def read_headers(folder: Path, files: Files = ANY_FILE) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by name. Raises SpecConflict or OSError."""
    found: dict[str, StoredTensor] = {}
    ends_at = None if files.timeout_s is None else time.monotonic() + files.timeout_s
    for path in _paths(folder, files):
        if ends_at is not None and time.monotonic() > ends_at:
            allowed = f"weights whose headers can be read within {files.timeout_s:g} s (data_check_timeout_s)"
            change = "Save the model in fewer files, or have the operator raise the limit."
            raise SpecConflict("model.path", folder, allowed, change)
        try:
            num_bytes = int.from_bytes(files.read(path, 8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {num_bytes} bytes; allowed: {MAX_HEADER_BYTES}")
            header = json.loads(files.read(path, num_bytes, 8))
            header.pop("__metadata__", None)
            tensors = {name: StoredTensor(path, str(of["dtype"]), tuple(map(int, of["shape"]))) for name, of in header.items()}
        except SpecConflict:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise SpecConflict("model.path", path, "every file that the index names", "Download it again.") from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            got = f"{path}, which cannot be read as safetensors: {error}"
            raise SpecConflict("model.path", got, "files with a header of safetensors", "Download it again.") from None
        found |= tensors
    return found


def find_scales(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredScale]:
    """Return the scale of each FP8 weight by the weight's name.

    Raises SpecConflict for weights that are quantized in another way, and for scales that are missing or have another shape.
    Folders without `quantization_config` and without FP8 pass.
    """
    strategies = _declared(config.get("quantization_config"))
    found: dict[str, StoredScale] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == CODES:
            scale = next((name + end for end in SCALE_ENDS if name + end in tensors), None)
            if scale is None:
                got, allowed = f"{name} in {tensor.path} is float8_e4m3fn without a scale", f"{name}_scale or {name}_scale_inv"
                raise SpecConflict("model.path", got, allowed, "Save the model with the scales of its weights.")
            found[name] = StoredScale(scale, _strategy(name, tensor, scale, tensors[scale], strategies))
    scales = {scale.name for scale in found.values()}
    if not found and config.get("quantization_config") is None:
        return {}
    for name, tensor in tensors.items():
        if name not in found and name not in scales:
            _check_plain(name, tensor)
    return found


def is_of_server(name: str) -> bool:
    """Return True for a scale that serves activations or the cache of keys and values."""
    return name.endswith(SERVER_ENDS)


def _paths(folder: Path, files: Files) -> list[Path]:
    """List the files of weights: the one of its name, or those of the index, or else all of the folder."""
    try:
        files.num_bytes(folder / WEIGHTS_NAME)
        return [folder / WEIGHTS_NAME]
    except FileNotFoundError:
        pass
    try:
        weight_map = json.loads(files.read(folder / INDEX_NAME, MAX_INDEX_BYTES))["weight_map"]
        names = sorted(set(weight_map.values()))
    except FileNotFoundError:
        names = sorted(name for name, _ in files.list_below(folder, lambda _: False) if name.endswith(".safetensors"))
    except SpecConflict:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        got = f"{folder / INDEX_NAME}, which is no index: {error}"
        raise SpecConflict("model.path", got, "weight_map: the file of each tensor", "Save the model again.") from None
    if any(not isinstance(name, str) or "/" in name for name in names):
        raise SpecConflict("model.path", folder / INDEX_NAME, "an index of files in its folder", "Save the model again.")
    if not names:
        got = f"{folder}, which has no safetensors file"
        raise SpecConflict("model.path", got, "a folder with weights as safetensors", "Save the model with save_pretrained.")
    return [folder / name for name in names]


def _declared(quantization: Any) -> Collection[str]:
    """Return the strategies that a `quantization_config` allows; all of them where there is none. Raises SpecConflict."""
    if quantization is None:
        return STRATEGIES
    if not isinstance(quantization, Mapping):
        raise _refused("", quantization, "an object")
    method = quantization.get("quant_method")
    if method == "fp8":
        return _of_fp8(quantization)
    if method == "compressed-tensors":
        return _of_compressed_tensors(quantization)
    raise _refused("quant_method", method, "fp8 or compressed-tensors, with weights in FP8")


def _of_fp8(quantization: Mapping[str, Any]) -> Collection[str]:
    fmt, block = quantization.get("fmt", "e4m3"), quantization.get("weight_block_size")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fmt", fmt, "e4m3")
    if block is None:
        return STRATEGIES
    if block != [BLOCK, BLOCK]:
        raise _refused("weight_block_size", block, f"[{BLOCK}, {BLOCK}], or null")
    return ("block",)


def _of_compressed_tensors(quantization: Mapping[str, Any]) -> Collection[str]:
    groups, strategies = quantization.get("config_groups"), set[str]()
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups, "an object with at least one group")
    for name, group in groups.items():
        weights, where = group.get("weights") if isinstance(group, Mapping) else group, f"config_groups.{name}.weights"
        if not isinstance(weights, Mapping):
            raise _refused(where, weights, "an object with num_bits, type and strategy")
        if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
            got = f"num_bits {weights.get('num_bits')} of type {weights.get('type')}"
            raise _refused(where, got, "num_bits 8 of type float")
        if not weights.get("symmetric", True):
            raise _refused(f"{where}.symmetric", False, "true")
        strategy, block = weights.get("strategy"), weights.get("block_structure")
        if strategy not in STRATEGIES:
            raise _refused(f"{where}.strategy", strategy, ", ".join(STRATEGIES))
        if strategy == "block" and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            raise _refused(f"{where}.block_structure", block, f"[{BLOCK}, {BLOCK}]")
        strategies.add(strategy)
    format = quantization.get("format", COMPRESSED_FORMATS[0])
    if format not in COMPRESSED_FORMATS:
        raise _refused("format", format, " or ".join(COMPRESSED_FORMATS))
    sparsity = quantization.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparsity_config", sparsity, "format dense")
    if quantization.get("transform_config"):
        raise _refused("transform_config", quantization["transform_config"], "none: weights in the network's own basis")
    return strategies


def _strategy(name: str, codes: StoredTensor, scale_name: str, scale: StoredTensor, strategies: Collection[str]) -> str:
    """Return the strategy of a scale by its shape. Raises SpecConflict."""
    if len(codes.shape) not in (2, 3):
        got = f"{name} in {codes.path}, FP8 of shape {codes.shape}"
        raise SpecConflict("model.path", got, "FP8 in matrices, or in stacks of them", "Save this tensor in bf16.")
    if scale.dtype not in SCALE_DTYPES:
        got = f"{scale_name} in {scale.path} of dtype {scale.dtype}"
        raise SpecConflict("model.path", got, ", ".join(SCALE_DTYPES), "Save the scale in F32.")
    *stacked, num_rows, num_columns = codes.shape
    shapes = {
        "tensor": ((1,), (), (1, 1)),
        "channel": ((num_rows, 1), (num_rows,)),
        "block": ((-(-num_rows // BLOCK), -(-num_columns // BLOCK)),),
    }
    shapes = {strategy: tuple((*stacked, *shape) for shape in allowed) for strategy, allowed in shapes.items()}
    for strategy in STRATEGIES:
        if strategy in strategies and scale.shape in shapes[strategy]:
            return strategy
    allowed = " or ".join(f"{shapes[strategy][0]} ({strategy})" for strategy in STRATEGIES if strategy in strategies)
    got = f"{scale_name} in {scale.path}, the scale of a {'×'.join(map(str, codes.shape))} weight, has shape {scale.shape}"
    change = "Correct quantization_config, or save the weight with a scale of that shape."
    raise SpecConflict("model.path", got, allowed, change)


def _check_plain(name: str, tensor: StoredTensor) -> None:
    """Refuse a tensor that is neither FP8, a scale of such a weight, nor plain values."""
    if is_of_server(name):
        return
    if tensor.dtype not in PLAIN_DTYPES:
        got = f"{name} in {tensor.path} of dtype {tensor.dtype}"
        raise SpecConflict("model.path", got, f"{CODES} with a scale, or {', '.join(PLAIN_DTYPES)}", "Save it in bf16.")
    if name.endswith(tuple(f"weight{end}" for end in SCALE_ENDS)):
        got = f"{name} in {tensor.path}, a scale without FP8 codes"
        raise SpecConflict("model.path", got, f"scales of weights of dtype {CODES}", "Remove it, or save its weight in FP8.")


def _refused(field: str, got: object, allowed: str) -> SpecConflict:
    where = f"quantization_config.{field}".rstrip(".")
    change = "Save the model in bf16, or quantized to FP8 like that."
    return SpecConflict("model.path", f"{where} {got!r} in config.json", allowed, change)
