"""The network of a traced job, built by the runtime's own code and without values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from octet.api_schemas import JobSpec
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.huggingface import HuggingFaceSpec, NetworkShapes
from octet.api_schemas.models.shapes import ParameterShape
from octet.worker.fp8.experts import has_experts, unstack_experts
from octet.worker.fp8.layout import layout_of
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.huggingface import build_shallow
from octet.worker.models.initial import parameters_on_meta
from octet.worker.parallel.tensor_plan import plan_of, roles_of

DIVIDED_DIMS = {"column": 0, "column of 3": 0, "embedding": 0, "head": 0, "row": 1}


class Found(NamedTuple):
    """A network of transformers. depth: of its blocks, where all are alike and a configuration sets their number; else None."""

    shapes: NetworkShapes
    depth: int | None


def sizes_of(spec: JobSpec, config: Mapping[str, Any] | None) -> FamilySizes:
    """Return the sizes of a job's network. config: what config.json says in its folder, if it has one."""
    model = spec.model
    return model.sizes if config is None or not isinstance(model, HuggingFaceSpec) else model.sizes_of(config)


def build(spec: JobSpec, config: Mapping[str, Any] | None, num_blocks: int | None) -> TrainedModel:
    """Build a job's network with its parameters on `meta`. num_blocks: None for all that it has."""
    with parameters_on_meta():
        if isinstance(spec.model, HuggingFaceSpec):
            model = build_shallow(spec.model, config, num_blocks)
            unstack_experts(model, spec.resolved_precision)
            return model
        sizes = spec.model.sizes.model_copy(update={"num_layers": num_blocks})
        fields = {name: value for name, value in sizes if name in type(spec.model).model_fields}
        return build_model(type(spec.model).model_validate({"family": spec.model.family, **fields}), spec.training.seed)


def to_device(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters and buffers of a network on a device. What was shared stays so."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            holder, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(holder), attribute, model.get_parameter(first))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def look_at(spec: JobSpec, config: Mapping[str, Any] | None) -> Found:
    """Return what a plan has to know of a network of transformers."""
    model: Any = build(spec, config, None)
    blocks = repeated_blocks(model)
    homes = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    roles = roles_of(model, plan_of(model)) if spec.parallelism.tensor > 1 else {}
    linear = {f"{name}.weight" for name, module in model.named_modules() if layout_of(module) is not None}
    shapes, first_names = [], dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = roles.get(name.rpartition(".")[0])
        is_whole = role is None or (role == "row" and parameter.dim() == 1)
        shapes.append(
            ParameterShape(
                name,
                tuple(parameter.shape),
                name in linear,
                None if is_whole else DIVIDED_DIMS.get(role or ""),
                homes.get(id(parameter)),
                first_names.get(id(parameter)),
            )
        )
        first_names.setdefault(id(parameter), name)
    depth = getattr(model.network.config, "num_hidden_layers", None)
    found = NetworkShapes(
        parameters=tuple(shapes),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        is_of_level=has_experts(model) or any(parameter.dim() == 3 for parameter in model.parameters()),
    )
    return Found(found, depth if isinstance(depth, int) and depth == len(blocks) > 1 else None)
