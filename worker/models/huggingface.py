"""Any network of transformers, built from its configuration or from the weights of a folder.

Nothing here loads code: no remote code, no pickles, no hub. A folder's configuration is read by the rules for data (`Files`),
and transformers is handed the tensors. Initial values depend only on the seed.
"""

import difflib
import importlib.util
import re
from collections.abc import Mapping
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
MAX_NAMES_SHOWN = 5
_READ_FIELD = re.compile(r"""(?:\bconfig\.|getattr\(\s*(?:self\.)?config,\s*["'])([a-z]\w*)""")
"""A field that the code of a network reads of its configuration."""


def build(spec: HuggingFaceSpec, seed: int, files: Files = ANY_FILE) -> TrainedModel:
    """Build the network of an architecture on the CPU in fp32. Raises InvalidConfig if transformers refuses its configuration.

    The network of a folder is built by `worker/pretrained/start.py`, which reads its weights.
    """
    try:
        sizes = spec.read_sizes(files)
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None
    assert spec.path is None
    assert sizes.architecture is not None
    config = make_config(sizes.architecture, dict(spec.config))
    return wrap(from_random_values(config, sizes.task, seed), sizes.task)


def build_without_values(spec: FamilySpec, files: Files = ANY_FILE) -> TrainedModel:
    """Build the network of a folder with meaningless values. Raises InvalidConfig as `build` does."""
    config, task = _config_of_folder(spec, files)
    return wrap(from_random_values(config, task, seed=0), task)


def build_shallow(spec: HuggingFaceSpec, config: Mapping[str, Any] | None, num_blocks: int | None) -> TrainedModel:
    """Build a network with meaningless values and so many of its blocks; None: all. Raises InvalidConfig as `build` does.

    config: what config.json says in the folder, which is not opened; None for an architecture with fields of the spec.
    """
    try:
        sizes = spec.sizes if config is None else spec.sizes_of(config)
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None
    assert sizes.architecture is not None
    if config is None:
        made = make_config(sizes.architecture, dict(spec.config))
    else:
        made = _config_class(sizes.architecture).from_dict(_without_closed(dict(config)))
    if num_blocks is not None:
        depth, made.num_hidden_layers = made.num_hidden_layers, num_blocks
        for name, value in vars(made).items():
            if isinstance(value, list) and len(value) == depth:  # an entry for each block
                setattr(made, name, value[:num_blocks])
    return wrap(from_random_values(made, sizes.task, seed=0), sizes.task)


def build_from(spec: FamilySpec, weights: dict[str, Tensor], files: Files = ANY_FILE) -> TrainedModel:
    """Build the network of a folder on the CPU in fp32 from its weights. Raises InvalidConfig as `build` does."""
    config, task = _config_of_folder(spec, files)
    assert spec.files is not None
    return wrap(_from_weights(Path(spec.files), config, task, weights), task)


def _config_of_folder(spec: FamilySpec, files: Files) -> tuple[Any, Task]:
    """Return transformers' configuration of a folder, and its task. Raises InvalidConfig."""
    assert isinstance(spec, HuggingFaceSpec), "no other family has files"
    try:
        sizes = spec.read_sizes(files)
        assert sizes.architecture is not None
        return _config_class(sizes.architecture).from_dict(_without_closed(spec.read_config(files))), sizes.task
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None


def make_config(architecture: str, fields: dict[str, Any]) -> Any:
    """Make a configuration of transformers. Raises InvalidConfig for unknown fields and for values that it refuses."""
    config_class = _config_class(architecture)
    try:
        known = fields_of(config_class)
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


def fields_of(config_class: Any) -> set[str]:
    """Return the fields of a configuration: those that it declares, and those that its network's code reads, as `head_dim`."""
    declared = {name for name in (*vars(config_class()), *config_class.attribute_map, "num_labels") if not name.startswith("_")}
    found = importlib.util.find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    code = "" if found is None or found.origin is None else Path(found.origin).read_text()
    return declared | {name for name in _READ_FIELD.findall(code) if not hasattr(config_class, name)}


def from_random_values(config: Any, task: Task, seed: int) -> Any:
    """Build a network in fp32 whose values transformers draws. They depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return _auto_class(task).from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, ZeroDivisionError) as error:
            message = f"model.config: transformers cannot build {config.model_type} from it: {error}. Change model.config."
            raise InvalidConfig(message) from error


def _from_weights(folder: Path, config: Any, task: Task, weights: dict[str, Tensor]) -> Any:
    """Build on `meta` and fill in the folder's weights, as fp32."""
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


def _without_closed(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what would load code, choose kernels or set a dtype: precision and code are the job's."""
    closed = ("auto_map", "dtype", "torch_dtype", "attn_implementation", "quantization_config")
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
