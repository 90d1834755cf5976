"""The network of a traced job, built by the runtime's own code and without values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octet.api_schemas import JobSpec
from octet.api_schemas.inputs import ImageInput
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.huggingface import HuggingFaceSpec, NetworkShapes
from octet.api_schemas.models.shapes import ParameterShape
from octet.worker.fp8.experts import experts_of, has_experts, unstack_experts
from octet.worker.fp8.layout import layout_of
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.huggingface import build_shallow
from octet.worker.models.initial import parameters_on_meta
from octet.worker.parallel.tensor_plan import plan_of, roles_of

NUM_DOCUMENTS = 16
"""Documents of a packed row. The data, which is not read here, has other numbers; tensors of a step hardly depend on them."""
PREDICTED_SHARE = 0.15
"""The share of a sequence's tokens that a masked model predicts (`worker/data/targets.py`)."""
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
        if num_blocks is None:
            return build_model(spec.model, spec.training.seed)
        sizes = spec.model.sizes.model_copy(update={"num_layers": num_blocks})
        fields = {name: value for name, value in sizes if name in type(spec.model).model_fields}
        return build_model(type(spec.model).model_validate({"family": spec.model.family, **fields}), spec.training.seed)


def batch_of(spec: JobSpec, sizes: FamilySizes, num_sequences: int, device: torch.device) -> dict[str, Tensor]:
    """Return a batch as a job's data gives it, without its values."""
    takes = sizes.takes
    if isinstance(takes, ImageInput):
        shape = (num_sequences, takes.num_channels, takes.image_size, takes.image_size)
        labels = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        return {"images": torch.empty(shape, device=device), "labels": labels}
    num_tokens = spec.training.sequence_length
    if sizes.task == "masked_token":
        tokens_BT = torch.randint(0, 2, (num_sequences, num_tokens), device=device)
        positions_BP = tokens_BT[:, : max(1, round(PREDICTED_SHARE * num_tokens))].clone()
        return {"tokens": tokens_BT, "positions": positions_BP, "targets": positions_BP.clone()}
    tokens_BT = torch.randint(0, 2, (num_sequences, num_tokens + 1), device=device)
    batch = {"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}
    if spec.data.is_packed:
        batch["documents"] = torch.zeros(num_sequences, NUM_DOCUMENTS, dtype=torch.int32, device=device)
    return batch


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
    vocabulary = {id(layer._parameters.get("weight")) for layer in model.vocabulary_layers}
    linear = {f"{name}.weight" for name, module in model.named_modules() if layout_of(module) is not None}
    experts, shapes, first_names = experts_of(model), [], dict[int, str]()
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
                experts.get(name.rpartition(".")[0]),
                id(parameter) in vocabulary,
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
