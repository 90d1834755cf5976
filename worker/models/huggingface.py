"""Any network of transformers, built from its configuration or read from a folder.

Nothing here loads code: no remote code, no pickles, no hub. A folder's files are opened by the rules for data (`Files`), and
transformers is handed the tensors. Initial values depend only on the seed.
"""

import difflib
import importlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octet.api_schemas import ANY_FILE, FamilySpec, Files, SpecConflict, Task
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.models.model import TrainedModel
from octet.worker.models.wrapped import wrap

AUTO_CLASSES: dict[Task, str] = {
    "next_token": "AutoModelForCausalLM",
    "masked_token": "AutoModelForMaskedLM",
    "image_class": "AutoModelForImageClassification",
}
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_NAMES_SHOWN = 5
UNDECLARED_FIELDS = {"deberta-v2": {"conv_act", "conv_kernel_size", "norm_rel_ebd", "position_buckets", "share_att_key"}}
"""Fields that a network of transformers reads and its configuration class does not declare."""


def build(spec: HuggingFaceSpec, seed: int, files: Files = ANY_FILE) -> TrainedModel:
    """Build the network on the CPU in fp32. Raises InvalidConfig if transformers cannot use its configuration or weights."""
    try:
        sizes = spec.read_sizes(files)
        assert sizes.architecture is not None
        if spec.path is None:
            config = make_config(sizes.architecture, dict(spec.config))
            return wrap(from_random_values(config, sizes.task, seed), sizes.task)
        config = _config_class(sizes.architecture).from_dict(_without_closed(spec.read_config(files)))
        return wrap(_from_folder(Path(spec.path), config, sizes.task, files), sizes.task)
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None


def build_without_values(spec: FamilySpec, files: Files = ANY_FILE) -> TrainedModel:
    """Build the network of a folder with meaningless values. Raises InvalidConfig as `build` does."""
    assert isinstance(spec, HuggingFaceSpec), "no other family has files"
    try:
        sizes = spec.read_sizes(files)
        assert sizes.architecture is not None
        config = _config_class(sizes.architecture).from_dict(_without_closed(spec.read_config(files)))
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None
    return wrap(from_random_values(config, sizes.task, seed=0), sizes.task)


def make_config(architecture: str, fields: dict[str, Any]) -> Any:
    """Make a configuration of transformers. Raises InvalidConfig for unknown fields and for values that it refuses."""
    config_class = _config_class(architecture)
    try:
        config = config_class()
        declared = {name for name in (*vars(config), *config_class.attribute_map, "num_labels") if not name.startswith("_")}
        known = declared | UNDECLARED_FIELDS.get(architecture, set())
        unknown = sorted(fields.keys() - known)
        if unknown:
            close = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InvalidConfig(
                f"model.config.{unknown[0]}: {architecture} has no such field; allowed: {', '.join(sorted(known))}.{hint} "
                "Remove it or correct its name."
            )
        return config_class(**fields)
    except InvalidConfig:
        raise
    except Exception as error:
        message = f"model.config: transformers refuses it for {architecture}: {error}. Change model.config."
        raise InvalidConfig(message) from error


def from_random_values(config: Any, task: Task, seed: int) -> Any:
    """Build a network in fp32 whose values transformers draws. They depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return _auto_class(task).from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, ZeroDivisionError) as error:
            message = f"model.config: transformers cannot build {config.model_type} from it: {error}. Change model.config."
            raise InvalidConfig(message) from error


def _from_folder(folder: Path, config: Any, task: Task, files: Files) -> Any:
    """Build on `meta` and fill in the folder's weights, as fp32."""
    with ExitStack() as stack:
        weights = _read_weights(folder, files, stack)
        network_class = type(_on_meta(config, task))
        network, loading = network_class.from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
        )
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has unknown")):
        names = sorted(loading[kind])
        if names:
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", …" if len(names) > MAX_NAMES_SHOWN else "")
            raise InvalidConfig(
                f"model.path {folder} {what} {len(names)} weights of {network_class.__name__}: {shown}; allowed: a folder that "
                f"save_pretrained of {network_class.__name__} wrote. Save that model, or change model.path."
            )
    return network.train()


def _on_meta(config: Any, task: Task) -> Any:
    with torch.device("meta"):
        return _auto_class(task).from_config(config, dtype=torch.float32)


def _read_weights(folder: Path, files: Files, stack: ExitStack) -> dict[str, Tensor]:
    """Map all weights of a folder. They are read when they are copied. Raises InvalidConfig."""
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Tensor] = {}
    try:
        for name in _weight_files(folder, files):
            # The link leads to the file that was opened and checked, whatever its path leads to by now.
            file = stack.enter_context(files.open(folder / name))
            opened = stack.enter_context(safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt"))
            weights |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict).replace("data.path", "model.path")) from None
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"model.path {folder}: cannot read {name}: {error}. Save the model again.") from error
    return weights


def _weight_files(folder: Path, files: Files) -> list[str]:
    """List the files of weights: one, or those of an index."""
    try:
        files.num_bytes(folder / WEIGHTS_NAME)
        return [WEIGHTS_NAME]
    except FileNotFoundError:
        pass
    try:
        index = json.loads(files.read(folder / INDEX_NAME, MAX_INDEX_BYTES))
        names = sorted(set(index["weight_map"].values()))
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidConfig(
            f"model.path {folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; allowed: weights as safetensors. Save the model "
            "with save_pretrained."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"model.path {folder}: {INDEX_NAME} is not an index: {error}. Save the model again.") from error
    if any(not isinstance(name, str) or "/" in name for name in names):
        raise InvalidConfig(f"model.path {folder}: {INDEX_NAME} names files outside the folder. Save the model again.")
    return names


def _without_closed(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what would load code, choose kernels or set a dtype: precision and code are the job's."""
    if "quantization_config" in config:
        raise InvalidConfig(
            f"model.path: the weights are quantized ({config['quantization_config']}); allowed: bf16, fp16 or fp32. "
            "Save the model dequantized."
        )
    closed = ("auto_map", "dtype", "torch_dtype", "attn_implementation")
    return {name: value for name, value in config.items() if name not in closed and not name.startswith("_")}


def _config_class(architecture: str) -> Any:
    mapping = transformers().CONFIG_MAPPING
    if architecture not in mapping:
        raise InvalidConfig(
            f"transformers {transformers().__version__} on this node does not know {architecture}. Install a later version, or "
            "change model.architecture."
        )
    return mapping[architecture]


def _auto_class(task: Task) -> Any:
    return getattr(transformers(), AUTO_CLASSES[task])


def transformers() -> Any:
    """Import transformers, which takes seconds. Raises InvalidConfig if this node does not have it."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        message = (
            "this node has no transformers, which builds this model. Install octet-fp8[models], or use family gpt or llama."
        )
        raise InvalidConfig(message) from error
