"""Export what a job with adapters trained: in the format of the package peft, or merged into the model that it began from.

    adapter_config.json          LoraConfig, and the path of the base model
    adapter_model.safetensors    base_model.model.{layer}.lora_A.weight (R, K), ….lora_B.weight (N, R)

Source: github.com/huggingface/peft, version 0.21, `utils/save_and_load.py` and `tuners/lora/config.py`.
Shape suffixes: R rank, K in features, N out features.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, FamilySpec, Files, ModelSpec
from octet.api_schemas.training import AdapterSpec
from octet.worker.fp8.layout import layout_of
from octet.worker.models.huggingface import build_without_values
from octet.worker.models.initial import parameters_on_meta
from octet.worker.prepare.adapters import NAME, SEPARATOR, adapters_of
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.folder import ShardWriter, new_folder

WEIGHTS = "adapter_model.safetensors"
_TASKS = {"next_token": "CAUSAL_LM"}
"""peft's words for tasks; others are read without one."""


class Trained(NamedTuple):
    """An adapter's matrices: a (R, K), b (N, R)."""

    a: Tensor
    b: Tensor


def export_adapter(
    job: Mapping[str, Any],
    state: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype | None,
    files: Files = ANY_FILE,
) -> None:
    """Write adapters as peft reads them.

    dtype: default: in which they were trained. files: those that may be read. Raises OSError, and ValueError for a folder
    that is not empty.
    """
    spec, model = AdapterSpec.model_validate(job["adapter"]), _model(job)
    adapters = trained_adapters(state)
    kinds = set(_transposed(model, adapters, files).values())
    if len(kinds) > 1:
        raise ValueError("adapters of nn.Linear and of Conv1D layers are mixed; peft holds one kind. Export with --merge.")
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.read_sizes().task),
        "base_model_name_or_path": model.files,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": [_their_name(name) for name in adapters],
        "fan_in_fan_out": kinds == {True},
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    tensors = {}
    for name, adapter in adapters.items():
        for part, tensor in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            tensors[f"base_model.model.{_their_name(name)}.{part}.weight"] = tensor.to(dtype or tensor.dtype).contiguous()
    with new_folder(folder) as unfinished:
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_merged(
    job: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, allowed: Files = ANY_FILE
) -> None:
    """Write the model's folder with adapted weights, W + (alpha / rank) · b · a, summed in fp32, everything in `dtype`.

    W are the folder's values, not the level's codes of them. Holds one tensor and a shard at a time. allowed: the files that
    may be read. Raises ValueError for a folder whose tensors have other names than the network's.
    """
    spec, model = AdapterSpec.model_validate(job["adapter"]), _model(job)
    trained = trained_adapters(state)
    adapters = {f"{_their_name(name)}.weight": adapter for name, adapter in trained.items()}
    transposed = {f"{_their_name(name)}.weight" for name, found in _transposed(model, trained, allowed).items() if found}
    assert model.files is not None
    files = PretrainedFiles(Path(model.files), allowed)
    if missing := [name for name in adapters if name not in files]:
        raise ValueError(
            f"{model.files} has no {missing[0]}, which an adapter changes; allowed: a folder with the network's own names. "
            "Export without merging, and merge with peft."
        )

    def merged() -> Iterator[tuple[str, Tensor]]:
        for name in files.names:
            tensor = files.read(name)
            if name in adapters:
                delta_NK = (spec.alpha / spec.rank) * adapters[name].b.float() @ adapters[name].a.float()
                tensor = tensor.float() + (delta_NK.t() if name in transposed else delta_NK)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    with new_folder(folder) as unfinished:
        writer = ShardWriter(unfinished)
        for name, tensor in merged():
            writer.add(name, tensor)
        writer.finish()
        config = files.config | {"dtype": str(dtype).removeprefix("torch.")}
        for name in ("torch_dtype", "quantization_config"):
            config.pop(name, None)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def read_adapters(model: nn.Module, folder: Path) -> None:
    """Put the adapters that a folder has for peft in the place of those of a model, which has them in fp32."""
    tensors = load_file(folder / WEIGHTS)
    for name, adapter in adapters_of(model).items():
        for part, parameter in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            parameter.copy_(tensors[f"base_model.model.{_their_name(name)}.{part}.weight"])


def trained_adapters(state: Mapping[str, Tensor]) -> dict[str, Trained]:
    """Return the adapters in a checkpoint's model state, by the names of their layers."""
    names = [
        name.removeprefix(f"{NAME}.").removesuffix(".a") for name in state if name.startswith(NAME) and name.endswith(".a")
    ]
    return {name.replace(SEPARATOR, "."): Trained(state[f"{NAME}.{name}.a"], state[f"{NAME}.{name}.b"]) for name in names}


def _model(job: Mapping[str, Any]) -> FamilySpec:
    return TypeAdapter[FamilySpec](ModelSpec).validate_python(job["model"])


def _their_name(layer: str) -> str:
    """The name in transformers' network of a layer of our wrapper."""
    return layer.removeprefix("network.")


def _transposed(model: FamilySpec, adapters: Mapping[str, Trained], files: Files) -> dict[str, bool]:
    """Return, by adapted layer, whether it holds its weight as (K, N), as GPT-2's do."""
    with parameters_on_meta():
        network = build_without_values(model, files)
    found = {}
    for name in adapters:
        layout = layout_of(network.get_submodule(name))
        assert layout is not None
        found[name] = layout.is_transposed
    return found
