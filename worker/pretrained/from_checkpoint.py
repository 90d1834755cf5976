"""The model of a job's checkpoint, at its level and with its average, and what its folder has besides weights."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, FamilySpec, Files, ModelSpec, OptimizerSpec, PrecisionSpec
from octet.api_schemas.data.jsonl import TOKENIZER_FILES, TOKENIZER_SETTINGS
from octet.api_schemas.training import AdapterSpec
from octet.worker.checkpoint.resume import load_model, names_by_key
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.models import build_model
from octet.worker.models.huggingface import build_without_values
from octet.worker.models.initial import parameters_on_meta
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.prepare.adapters import add_adapters, attach_adapters, with_frozen
from octet.worker.prepare.average import AveragedModel
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained.start import start_model

GENERATION_CONFIG = "generation_config.json"


def trained(state: dict[str, Any], files: Files = ANY_FILE) -> nn.Module:
    """Build the model of a checkpoint on the CPU, with its master weights.

    No fp32 copy of the model exists: it is built on `meta`, and each layer has zeros until the level's form of it is loaded.
    files: those that may be read of the folder that the model began from. ValueError for a checkpoint that does not name its
    job.
    """
    if "job" not in state:
        raise ValueError(
            "the checkpoint does not say which model it is of: an earlier version wrote it. Continue its job with this "
            "version, and export the checkpoint that it writes."
        )
    job = state["job"]
    spec = TypeAdapter(OptimizerSpec).validate_python(job["optimizer"])
    family = TypeAdapter[FamilySpec](ModelSpec).validate_python(job["model"])
    with parameters_on_meta():
        network = build_model(family, job["seed"]) if family.files is None else build_without_values(family, files)
    precision, zeros = PrecisionSpec.model_validate(job["precision"]), Zeros()
    unstack_experts(network, precision)
    optimizer = build_optimizer(parameter_groups(network, spec), spec)
    model = prepare(network, None, precision, seed=job["seed"], source=zeros).model
    zeros.finish(model, optimizer)
    load_model(model, optimizer, state["model"], state["optimizer"])
    for name, key in names_by_key(model, optimizer, state["optimizer"]).items():
        weight = model.get_parameter(name)
        if is_float8_weight(weight):
            weight.state.master = state["optimizer"]["state"].get(key, {}).get("master_weights")
    return model


def adapted(state: dict[str, Any], files: Files = ANY_FILE, start_change: float = 0.0) -> nn.Module:
    """Build the frozen model of a checkpoint with its adapters on the CPU, as the trainer evaluates it.

    files: those that may be read of the model's folder. start_change: as the job had it. Raises InvalidConfig for a folder
    that is not the model's any more.
    """
    job = state["job"]
    family = TypeAdapter[FamilySpec](ModelSpec).validate_python(job["model"])
    precision, spec = PrecisionSpec.model_validate(job["precision"]), AdapterSpec.model_validate(job["adapter"])
    network, source = start_model(family, job["seed"], files, precision=precision, start_change=start_change)
    add_adapters(network, spec, precision, job["seed"], torch.device("cpu"))
    model = prepare(network, None, precision, seed=job["seed"], source=source).model
    attach_adapters(model)
    model.load_state_dict(with_frozen(model, state["model"]))
    return model


class Zeros:
    """A source of weights that gives zeros, which a checkpoint's values then replace."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._given: dict[nn.Parameter, nn.Parameter] = {}

    def fill(self, layer: nn.Module) -> None:
        """Put zeros in the place of a layer's own parameters on `meta`; parameters that are shared stay shared."""
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if parameter not in self._given:
                    self._given[parameter] = nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad)
                setattr(layer, name, self._given[parameter])

    def dequant_scale(self, weight: Tensor) -> Tensor | None:
        """Return None: zeros are codes at any scale."""
        return None

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill what is still on `meta`, and give the optimizer the new parameters."""
        for module in model.modules():
            self.fill(module)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"] = [self._given.get(parameter, parameter) for parameter in group["params"]]


def averaged(state: dict[str, Any], model: nn.Module) -> nn.Module:
    """Return the moving average of the weights where the checkpoint has one, else the model."""
    if not state.get("average"):
        return model
    average = AveragedModel(model)
    average.load_state_dict(state["average"])
    return average.module


def copy_settings(model: dict[str, Any], folder: Path, files: Files = ANY_FILE) -> None:
    """Copy the tokenizer, its chat template and the settings of generation of a model that began from a folder.

    An export can then be used as that folder was. files: those that may be read. Raises SpecConflict, and OSError.
    """
    origin = TypeAdapter[FamilySpec](ModelSpec).validate_python(model).files
    if origin is None:
        return
    for name in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS, GENERATION_CONFIG):
        with suppress(FileNotFoundError), files.open(Path(origin) / name) as source, (folder / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
