"""A comparison as the user asks for it (`ComparisonSpec`) and as the API shows it: one job in several arms, paired by seed.

An arm changes fields of the job. Its children are ordinary jobs, one for each seed: children of the same seed have the same
initial values and read the same data in the same order. `comparison_report.py` says what their outcomes show.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from octet.api_schemas.base import Contract, JsonScalar, Timestamp, merge_patch, refusal
from octet.api_schemas.job import JobSpec, JobSummary
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.paired import START_CHANGE
from octet.api_schemas.precision import LevelName
from octet.api_schemas.problem import explain
from octet.api_schemas.states import FailureReason, JobState

MAX_ARMS, MAX_SEEDS, MAX_POINTS = 32, 30, 64
DEFAULT_TOLERANCE = 0.0025
NOISE = -1
"""The number of the arm that measures noise: the baseline from a changed start. The others count from 0."""
NUM_NOISE_SEEDS = 2
_LEVEL = "precision.level"
_OF_CHILDREN = ("name", "labels", "priority", "training.seed")
"""Fields that no arm varies: they name children, or pair them."""
_LABELS = ("comparison", "arm", "seed")

OutcomeKind = Literal["succeeded", "diverged", "failed", "left_out"]
FieldPath = Annotated[str, Field(max_length=200, pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$")]


class Arm(Contract):
    """One variant of the job. change: fields by path that differ from the job's; null: the field's default."""

    name: str
    change: dict[str, JsonScalar]


class ComparisonSpec(Contract):
    """The document that a user submits. Levels and varied fields are combined: each with each."""

    job: JobSpec
    levels: tuple[LevelName, ...] = Field(default=(), max_length=len(LEVELS), description="the same as varying precision.level")
    vary: dict[FieldPath, tuple[JsonScalar, ...]] = Field(
        default_factory=dict,
        max_length=8,
        description="values by the path of a field, such as training.optimizer.learning_rate",
    )
    baseline: str | None = Field(default=None, max_length=256, description="an arm's name; default: the first")
    seeds: int = Field(default=5, ge=2, le=MAX_SEEDS, description="the most of each arm, from training.seed on")
    least_seeds: int = Field(default=2, ge=2, le=MAX_SEEDS, description="of each arm, before its answer can be certain")
    at_once: int = Field(default=2, ge=1, le=1000, description="the most children that wait or run at a time")
    tolerance: float = Field(
        default=DEFAULT_TOLERANCE,
        gt=0.0,
        le=1.0,
        description="share of the baseline's evaluation loss that an arm may lose",
    )
    budget_slot_hours: float | None = Field(
        default=None,
        gt=0.0,
        le=1e9,
        description="hours of slots that its jobs may take together; once they are used, it ends with what is known",
    )

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms in their order, the last field fastest."""
        return arms_of({_LEVEL: self.levels, **self.vary} if self.levels else self.vary)

    @property
    def baseline_index(self) -> int:
        """The number of the arm that the others are compared with."""
        return 0 if self.baseline is None else [arm.name for arm in self.arms].index(self.baseline)

    @property
    def noise(self) -> Arm:
        """The arm that measures noise."""
        change = self.arms[self.baseline_index].change
        return Arm(name="noise", change={**change, "training.start_change": START_CHANGE})

    @property
    def child_seeds(self) -> range:
        """The seeds of an arm's children, in their order."""
        return range(self.job.training.seed, self.job.training.seed + self.seeds)

    def child(self, arm: int, seed: int, comparison_id: str) -> JobSpec:
        """Return the job of an arm (or of NOISE) with a seed. Raises ValidationError for an arm that is no valid job."""
        chosen = self.noise if arm == NOISE else self.arms[arm]
        # Without defaults: some follow from fields that an arm changes, as the format of block scales does.
        document: dict[str, Any] = self.job.model_dump(mode="json", exclude_unset=True)
        for path, value in chosen.change.items():
            document = merge_patch(document, nested(path, value))
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", chosen.name)
        labels = dict(zip(_LABELS, (comparison_id, chosen.name, str(seed)), strict=True))
        own = {
            "name": f"{self.job.name[:50]}-{slug[:25]}-s{seed}",
            "labels": labels,
            "training": {"seed": seed},
            "precision": {"ladder": []},  # an arm stays at its level
        }
        return JobSpec.model_validate(merge_patch(document, own))

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        for path in self.vary:
            if any(path == kept or path.startswith(f"{kept}.") for kept in _OF_CHILDREN) or (path == _LEVEL and self.levels):
                kept_words = "levels has them" if path == _LEVEL else "it names or pairs the children"
                raise refusal("vary", got=path, allowed=f"another field: {kept_words}", change=f"Remove {path} from vary.")
            if path == "training.preset":
                allowed = "another field: a preset gives way to fields that the job has"
                raise refusal("vary", got=path, allowed=allowed, change="Vary the fields in which the presets differ.")
        if self.least_seeds > self.seeds:
            raise refusal(
                "least_seeds",
                got=self.least_seeds,
                allowed=f"2 to {self.seeds}, which is seeds",
                change="Raise seeds, or lower it.",
            )
        num_arms = (len(self.levels) or 1) * math.prod(len(values) for values in self.vary.values())
        if not 2 <= num_arms <= MAX_ARMS:
            change = "Give at least two levels, or two values of a field; fewer of them where each is combined with each."
            raise refusal("vary", got=f"{num_arms} arms", allowed=f"2 to {MAX_ARMS}", change=change)
        names = [arm.name for arm in self.arms]
        if repeated := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise refusal("vary", got=f"{repeated} twice", allowed="each arm once", change="Remove one of them.")
        if self.baseline not in (None, *names):
            raise refusal("baseline", got=self.baseline, allowed=", ".join(names), change="Name one of the arms.")
        if self.child_seeds[-1] >= 2**63:
            raise refusal(
                "job.training.seed", got=self.job.training.seed, allowed="below 2^63 for all seeds", change="Lower it."
            )
        if taken := [key for key in _LABELS if key in self.job.labels]:
            change = "Remove it: each child gets it from the comparison."
            raise refusal(
                f"job.labels.{taken[0]}", got=self.job.labels[taken[0]], allowed="labels of other keys", change=change
            )
        for number in (*range(len(names)), NOISE):
            self._check_child(number)
        return self

    def _check_child(self, number: int) -> None:
        """Raise the first violation of an arm's job as one of the comparison."""
        try:
            self.child(number, self.child_seeds[-1], "cmp_".ljust(30, "0"))
        except ValidationError as error:
            violation, name = explain(error, JobSpec)[0], (self.noise if number == NOISE else self.arms[number]).name
            allowed = violation.allowed or "a valid job"
            change = f"Arm {name} is no valid job. {violation.message}"
            raise refusal(f"job.{violation.field}", got=violation.got, allowed=allowed, change=change) from None


def arms_of(axes: Mapping[str, Sequence[JsonScalar]]) -> tuple[Arm, ...]:
    """Combine the values of fields, each with each, the last field fastest. axes: values by the path of their field."""
    lasts = [path.rpartition(".")[2] for path in axes]
    labels = {path: last if lasts.count(last) == 1 else path for path, last in zip(axes, lasts, strict=True)}
    return tuple(_arm(dict(zip(axes, values, strict=True)), labels) for values in product(*axes.values()))


def _arm(change: Mapping[str, JsonScalar], labels: Mapping[str, str]) -> Arm:
    texts = {path: value if isinstance(value, str) else json.dumps(value) for path, value in change.items()}
    name = ", ".join(text if path == _LEVEL else f"{labels[path]}={text}" for path, text in texts.items())
    return Arm(name=name, change=dict(change))


def nested(path: str, value: object) -> dict[str, Any]:
    """Return a document with a value at a path, such as `training.steps`."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


class EvaluatedPoint(Contract):
    """An evaluation of a child."""

    step: int
    loss: float | None
    metrics: dict[str, float | None]


class Outcome(Contract):
    """The end of a child, as a comparison keeps it: the job may be deleted after that."""

    kind: OutcomeKind
    why: str | None = Field(default=None, description="why there are no figures")
    summary: JobSummary | None = None
    points: tuple[EvaluatedPoint, ...] = Field(default=(), description=f"evaluations in order, at most {MAX_POINTS}")

    @property
    def has_failed(self) -> bool:
        """True if the job failed, by the arm's doing or not."""
        return self.kind in ("failed", "diverged")


def outcome_of(
    state: JobState | None,
    summary: JobSummary | None,
    reason: FailureReason | None,
    message: str | None,
    points: Sequence[EvaluatedPoint],
) -> Outcome:
    """Return the outcome of a job that is over. state: None for a job that was deleted."""
    if state is JobState.SUCCEEDED and summary is not None and summary.evaluation_loss:
        stride = -(-len(points) // MAX_POINTS) or 1
        return Outcome(kind="succeeded", summary=summary, points=tuple(points[::-1][::stride][::-1]))
    if state is JobState.FAILED:
        has_diverged = reason in (FailureReason.DIVERGED, FailureReason.NON_FINITE_LOSS)
        return Outcome(kind="diverged" if has_diverged else "failed", why=f"{reason}: {message or ''}".removesuffix(": "))
    whys = {None: "its job was deleted", JobState.CANCELLED: "its job was cancelled"}
    return Outcome(kind="left_out", why=whys.get(state, "its job reported no evaluation loss, or one of zero"))


class ComparisonState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    TOO_WILD = "too_wild"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self not in {ComparisonState.RUNNING, ComparisonState.PAUSED}


class Child(Contract):
    """A job of a comparison."""

    job_id: str
    arm: str
    seed: int
    state: JobState | None = Field(description="null: it was deleted")
    outcome: OutcomeKind | None = Field(description="null until it is over, or if it ended after the comparison")


class Comparison(Contract):
    """A comparison as lists show it."""

    object: Literal["comparison"] = "comparison"
    id: str
    name: str
    tenant: str
    state: ComparisonState
    message: str | None = Field(description="why it is over; null until then")
    created_at: Timestamp
    finished_at: Timestamp | None
    spec: ComparisonSpec
