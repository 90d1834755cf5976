"""The models that a job can name: families, presets, and the bytes that each preset takes at each level (`GET /v1/models`)."""

from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp
from octet.api_schemas.inputs import METRICS, Task
from octet.api_schemas.job import JobSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import FAMILIES, FamilySizes, FamilySpec, ModelSizes
from octet.api_schemas.planned_states import states_of


class ModelPreset(Contract):
    """A network with published or small sizes, by name."""

    name: str
    sizes: ModelSizes
    num_parameters: int
    num_block_weights: int = Field(description="elements of the weight matrices that a level converts")
    bytes_by_level: dict[str, int] = Field(
        description="what one rank holds between steps with AdamW, by level, as a plan counts it; without activations"
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


@lru_cache(maxsize=len(FAMILIES))
def _family(name: str, spec: type[FamilySpec]) -> ModelFamily:
    presets = tuple(_preset(name, preset, sizes) for preset, sizes in spec.presets.items())
    tasks = {sizes.task for sizes in spec.presets.values()} | set(spec.architectures)
    metrics = {task: METRICS[task] for task in METRICS if task in tasks}
    return ModelFamily(family=name, metrics=metrics, presets=presets, architectures=dict(spec.architectures))


def _preset(family: str, name: str, sizes: FamilySizes) -> ModelPreset:
    assert sizes.num_parameters is not None
    assert sizes.num_block_weights is not None
    return ModelPreset(
        name=name,
        sizes=sizes,  # type: ignore[arg-type]
        num_parameters=sizes.num_parameters,
        num_block_weights=sizes.num_block_weights,
        bytes_by_level={level: _bytes_held(family, name, sizes, level) for level in LEVELS},
    )


def _bytes_held(family: str, preset: str, sizes: FamilySizes, level: str) -> int:
    """Plan the states of a job on one rank that leaves all else at its default."""
    job: dict[str, Any] = {
        "name": preset,
        "model": {"family": family, "preset": preset},
        "precision": {"level": level},
        "data": {"source": sizes.takes.kind, "path": "/data"},  # the states do not depend on it
        "training": {"steps": 1},
    }
    return sum(states_of(JobSpec.model_validate(job), sizes).held.values())


AlertName = Literal[
    "OctetNoLeader",
    "OctetLoopStalled",
    "OctetLeaseStorm",
    "OctetJobStuckInQueue",
    "OctetJobNoHeartbeat",
    "OctetCheckpointTooOld",
]
Severity = Literal["critical", "warning"]


class Alert(Contract):
    """A rule of `deploy/prometheus/rules/octet.yml` that fires now. `job_id`, `pool` or `loop` is what it fires for."""

    object: Literal["alert"] = "alert"
    name: AlertName
    severity: Severity
    since: Timestamp | None = Field(
        description="when it began: the job was queued, the last report, checkpoint or renewal came; null if nothing says so"
    )
    job_id: str | None = None
    job_name: str | None = None
    pool: str | None = None
    loop: str | None = None
    summary: str
    runbook: str = Field(description="what to do: a link where the operator has set one, or else the place in the repository")
