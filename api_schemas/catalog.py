"""The models that a job can name: families, presets, and the bytes that each preset takes at each level (`GET /v1/models`)."""

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.formats import converted_weight_bytes, plain_parameter_bytes
from octet.api_schemas.inputs import METRICS, Task
from octet.api_schemas.levels import LEVELS, Level
from octet.api_schemas.models import FAMILIES, FamilySizes, FamilySpec, ModelSizes


class ModelPreset(Contract):
    """A network with published or small sizes, by name."""

    name: str
    sizes: ModelSizes
    num_parameters: int
    num_block_weights: int = Field(description="elements of the weight matrices that a level converts")
    bytes_by_level: dict[str, int] = Field(
        description="weights, master weights, gradients and AdamW's states on one rank, by level; without activations"
    )


class ModelFamily(Contract):
    """A value of `model.family`. Metrics are what an evaluation measures besides the loss, by task."""

    family: str
    metrics: dict[Task, tuple[str, ...]]
    presets: tuple[ModelPreset, ...] = Field(description="empty if jobs name an architecture of transformers instead")
    architectures: dict[Task, tuple[str, ...]] = Field(description="values of model.architecture, by task")


def model_families() -> list[ModelFamily]:
    """List every family.

    Family huggingface has architectures in place of presets, and python the user's entry points; only a rank counts their
    parameters.
    """
    return [_family(name, spec) for name, spec in FAMILIES.items()]


def bytes_at(level: Level, sizes: FamilySizes) -> int:
    """Bytes that a network's weights, gradients and AdamW states take on one rank.

    All converted weights count as one tensor, and all other parameters as another, so the scales of single tensors and the
    fp32 states of small ones are left out: less than 1 % for every preset but the tiny ones.
    """
    assert sizes.num_parameters is not None
    assert sizes.num_block_weights is not None
    converted = converted_weight_bytes(level, sizes.num_block_weights)
    plain = plain_parameter_bytes(level, sizes.num_parameters - sizes.num_block_weights)
    return sum(converted.values()) + sum(plain.values())


def _family(name: str, spec: type[FamilySpec]) -> ModelFamily:
    presets = tuple(_preset(preset, sizes) for preset, sizes in spec.presets.items())
    tasks = {sizes.task for sizes in spec.presets.values()} | set(spec.architectures)
    metrics = {task: METRICS[task] for task in METRICS if task in tasks}
    return ModelFamily(family=name, metrics=metrics, presets=presets, architectures=dict(spec.architectures))


def _preset(name: str, sizes: FamilySizes) -> ModelPreset:
    assert sizes.num_parameters is not None
    assert sizes.num_block_weights is not None
    return ModelPreset(
        name=name,
        sizes=sizes,  # type: ignore[arg-type]
        num_parameters=sizes.num_parameters,
        num_block_weights=sizes.num_block_weights,
        bytes_by_level={level.name: bytes_at(level, sizes) for level in LEVELS.values()},
    )
