"""Export a job's checkpoint: what `octet export` runs in a process of its own, because it needs torch.

python -m octet.worker.pretrained runs/first/checkpoints/step_0000000100 --format bf16 --out exported
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from octet.api_schemas import FamilySpec, ModelSpec, OptimizerSpec, PrecisionSpec
from octet.api_schemas.data.jsonl import TOKENIZER_FILES, TOKENIZER_SETTINGS
from octet.api_schemas.models import families_with
from octet.worker.checkpoint import BadCheckpoint, load_folder
from octet.worker.checkpoint.resume import load_model, names_by_key
from octet.worker.common.errors import RankError
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.models import build_model
from octet.worker.models.huggingface import build_without_values
from octet.worker.models.meta import parameters_on_meta
from octet.worker.optim import build_optimizer
from octet.worker.optim.average import AveragedModel
from octet.worker.optim.schedule import parameter_groups
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained.adapter import export_adapter, export_merged
from octet.worker.pretrained.compressed import KINDS
from octet.worker.pretrained.write import FORMATS, PLAIN_DTYPES, export


def main(arguments: list[str] | None = None) -> int:
    """Export, and print the folder. Exit status: 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m octet.worker.pretrained", description="Export a checkpoint of a job.")
    parser.add_argument("checkpoint", type=Path, help="a folder step_…")
    parser.add_argument("--format", choices=FORMATS, help="default: bf16; of adapters, as they were trained")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--strategy", choices=KINDS, help="of FP8 scales; default: as the weights were trained")
    parser.add_argument("--plain-dtype", choices=PLAIN_DTYPES, default="bf16", help="with fp8: of everything that is not FP8")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the model that they belong to")
    options = parser.parse_args(arguments)
    try:
        state = load_folder(options.checkpoint)
        if state.get("job", {}).get("adapter") is not None:
            export_adapters(state, options)
        else:
            export_model(state, options)
    except (BadCheckpoint, RankError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out}\n")
    return 0


def export_model(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the model of a job that trained all of it."""
    if options.merge:
        raise ValueError("--merge was given and the job trained no adapters; allowed: with adapters. Leave it out.")
    if state.get("job", {}).get("model", {}).get("family") in families_with("users_code"):
        raise ValueError(
            "the model is of family python, which has no form in transformers and whose code is not run here; allowed: other "
            "families. Read the checkpoint's tensors.safetensors."
        )
    model = averaged(state, trained(state))
    plain_dtype, format = PLAIN_DTYPES[options.plain_dtype], options.format or "bf16"
    export(model, None, options.out, format=format, strategy=options.strategy, plain_dtype=plain_dtype)
    copy_tokenizer(state["job"]["model"], options.out)


def export_adapters(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Write a job's adapters for peft, or the model that they are merged into."""
    if options.format == "fp8" or options.strategy is not None:
        raise ValueError("adapters are exported in fp8; allowed: bf16 or fp32, without --strategy. Change --format.")
    dtype = PLAIN_DTYPES.get(options.format)
    if options.merge:
        export_merged(state["job"], state["model"], options.out, dtype or torch.bfloat16)
    else:
        export_adapter(state["job"], state["model"], options.out, dtype)
    copy_tokenizer(state["job"]["model"], options.out)


def trained(state: dict[str, Any]) -> nn.Module:
    """Build the model of a checkpoint on the CPU, with its master weights.

    No fp32 copy of the model exists: it is built on `meta`, and each layer has zeros until the level's form of it is loaded.
    ValueError for a checkpoint that does not name its job.
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
        network = build_model(family, job["seed"]) if family.files is None else build_without_values(family)
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


def copy_tokenizer(model: dict[str, Any], folder: Path) -> None:
    """Copy the tokenizer of a model that began from a folder, so that the export can be used as that folder was."""
    origin = TypeAdapter[FamilySpec](ModelSpec).validate_python(model).files
    if origin is None:
        return
    for name in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS):
        if (Path(origin) / name).is_file():
            shutil.copyfile(Path(origin) / name, folder / name)


if __name__ == "__main__":
    sys.exit(main())
