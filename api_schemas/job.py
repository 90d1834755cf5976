"""A job as the user asks for it (`JobSpec`) and as the API shows it (`Job`)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from octet.api_schemas.accelerate import is_accelerate, precision_from_accelerate
from octet.api_schemas.base import Contract, Timestamp, merge_patch, refusal
from octet.api_schemas.data import DataSpec
from octet.api_schemas.evaluation import EvaluationSpec
from octet.api_schemas.export import ExportSpec, MismatchCard
from octet.api_schemas.inputs import tokens_per_sample
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.layout import BatchDivision, Layout, ParallelismSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import ModelSizes, ModelSpec
from octet.api_schemas.precision import LevelName, PrecisionSpec
from octet.api_schemas.quotas import NORMAL_PRIORITY, Priority
from octet.api_schemas.recipe import RecipeSpec
from octet.api_schemas.resources import LabelKey, Limit, ResourceSpec
from octet.api_schemas.rules.table import check_job
from octet.api_schemas.states import DesiredState, FailureReason, JobState
from octet.api_schemas.tracking import TrackersSpec
from octet.api_schemas.training import AdapterSpec, TrainingSpec

JobName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
LabelText = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Labels = dict[LabelKey, LabelText]


MAX_SPEC_BYTES = 64 << 10
MAX_SPEC_VALUES = 2000
"""The most of a job as JSON: bytes, and values in it, each mapping, list, key and scalar. A job has some dozens."""


class RetrySpec(Contract):
    """The number of further attempts after failures.

    Faults of the platform do not count in `max_failures`: each of their reasons has a number of its own.
    """

    max_failures: int = Field(default=0, ge=0, le=1000, description="after failures of the job's own, such as a rank that dies")
    by_reason: dict[FailureReason, Annotated[int, Field(ge=0, le=1000)]] = Field(
        default_factory=dict, description="for reasons with a number of their own, such as lease_expired: 20"
    )

    @field_validator("by_reason")
    @classmethod
    def _are_retryable(cls, by_reason: dict[FailureReason, int]) -> dict[FailureReason, int]:
        for reason in by_reason:
            if not reason.retryable:
                allowed = ", ".join(each for each in FailureReason if each.retryable)
                change = f"Remove it: a job is not tried again after {reason.value}, which would only occur again."
                raise refusal("", got=reason.value, allowed=allowed, change=change)
        return by_reason


class JobSpec(Contract):
    """The document that a user submits. `_parts_fit` checks all rules that tie two parts together."""

    name: JobName
    model: ModelSpec
    adapter: AdapterSpec | None = Field(default=None, description="train adapters of a frozen model; default: the whole model")
    precision: PrecisionSpec = PrecisionSpec()
    data: DataSpec
    training: TrainingSpec
    parallelism: ParallelismSpec = ParallelismSpec()
    resources: ResourceSpec = ResourceSpec()
    priority: Priority = Field(
        default=NORMAL_PRIORITY, description="100 goes first; how high it may be depends on the key's role"
    )
    retry: RetrySpec = RetrySpec()
    export: ExportSpec | None = Field(default=None, description="write what was trained for servers of models; default: no")
    evaluation: EvaluationSpec | None = Field(default=None, description="run tasks of a suite on what is exported; default: no")
    labels: Labels = Field(default_factory=dict, max_length=64)
    trackers: TrackersSpec = Field(
        default=TrackersSpec(), description="programs that show the job's curves; an operator's of a kind takes its place"
    )

    @field_validator("model", mode="before")
    @classmethod
    def _read_preset(cls, model: Any) -> Any:
        """Accept the name of a preset in place of a `model`."""
        return {"preset": model} if isinstance(model, str) else model

    @field_validator("precision", mode="before")
    @classmethod
    def _read_precision(cls, precision: Any) -> Any:
        """Accept a level's name, an Accelerate `fp8_config` block, or its whole config.yaml, in place of a `precision`."""
        if isinstance(precision, str | int):
            return {"level": precision}
        if not isinstance(precision, Mapping) or not is_accelerate(precision):
            return precision
        try:
            return precision_from_accelerate(precision)
        except ValidationError:
            raise
        except ValueError as error:
            raise refusal("", got=dict(precision), allowed="an Accelerate FP8 configuration", change=str(error)) from None

    @property
    def layout(self) -> Layout:
        """The degrees of parallelism of the job's ranks. Raises ValueError if they do not divide the ranks."""
        return Layout(self.resources.workers, **self.parallelism.degrees)

    @property
    def batch(self) -> BatchDivision:
        """The division of an optimizer step's sequences over ranks and forward passes."""
        num_data_ranks, training = self.layout.data, self.training
        micro_batch_size = training.micro_batch_size or training.global_batch_size // num_data_ranks
        return BatchDivision(training.global_batch_size, micro_batch_size, num_data_ranks)

    @property
    def runs_users_code(self) -> bool:
        """True if ranks run code of the user's: an own model's, or the templates and functions of tasks."""
        return self.model.sizes.capabilities.users_code or self.evaluation is not None

    @property
    def resolved_precision(self) -> PrecisionSpec:
        """The precision with the format of gradients between micro-batches settled.

        From ZeRO stage 2 on a rank adds up the means over ranks in fp32 and holds no sum of its own, so one is counted.
        """
        return self.precision.resolved(1 if self.parallelism.zero_stage >= 2 else self.batch.num_micro_batches)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample: those of a sequence, or those that the model takes from an image."""
        return tokens_per_sample(self.model.sizes.takes, self.training.sequence_length)

    @property
    def possible_worker_counts(self) -> tuple[int, ...]:
        """The numbers of ranks at which the job's global batch can be read, largest first.

        Each is a multiple of the ranks that hold one model together, and its data ranks read whole micro-batches.
        """
        group, batch = self.parallelism.tensor, self.batch
        num_micro_batches = batch.global_batch_size // batch.micro_batch_size
        most = self.resources.workers // group
        return tuple(group * num_data for num_data in range(most, 0, -1) if num_micro_batches % num_data == 0)

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that an attempt may have, largest first: one unless the job is elastic."""
        fewest = self.resources.min_workers
        if fewest is None:
            return (self.resources.workers,)
        return tuple(count for count in self.possible_worker_counts if count >= fewest)

    def with_workers(self, workers: int) -> Self:
        """Return the spec of an attempt with one of `worker_counts`: as many samples in a forward pass, so more of these."""
        if workers == self.resources.workers and self.resources.min_workers is None:
            return self
        resources = self.resources.model_copy(update={"workers": workers, "min_workers": None})
        training = self.training.model_copy(update={"micro_batch_size": self.batch.micro_batch_size})
        return self.model_copy(update={"resources": resources, "training": training})

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if conflict := check_job(self):
            raise conflict.as_refusal()
        if self.precision.ladder:
            self._check_next_rung()
        return self

    @property
    def next_rung(self) -> dict[str, Any]:
        """The merge patch with which the job goes on at the next level of its ladder."""
        level, *ladder = self.precision.ladder
        limits = {} if LEVELS[level].has_own_fp8 else {"demotion": None}  # nothing is in FP8 there that could leave it
        return {"precision": {"level": level, "ladder": ladder, **limits}}

    def _check_next_rung(self) -> None:
        """Refuse a ladder with a level at which the rest of the job could not run."""
        try:
            type(self).model_validate(merge_patch(self.model_dump(mode="json"), self.next_rung))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            refused, level = first["ctx"], self.precision.ladder[0]  # only rules that tie fields together can be broken
            field = ".".join(map(str, (*first["loc"], refused["field"])))
            change = refused["change"] if field == "precision.ladder" else f"For {level}: {field}. {refused['change']}"
            raise refusal("precision.ladder", got=refused["got"], allowed=refused["allowed"], change=change) from None


class LevelChange(Contract):
    """The level at which a job goes on."""

    level: LevelName


class LimitChange(Contract):
    """New limits of what a job may take."""

    max_slot_hours: Limit = Field(default=None, description="null: no limit")
    max_hours: Limit = Field(default=None, description="null: no limit")
    max_cost: Limit = Field(default=None, description="null: no limit")


class JobChange(Contract):
    """A change of a job that is stored, as a JSON merge patch: what is left out stays as it is."""

    priority: Priority | None = Field(default=None, description="100 goes first; of a job that is not over")
    labels: dict[LabelKey, LabelText | None] | None = Field(
        default=None, max_length=64, description="labels to set; null removes one"
    )
    precision: LevelChange | None = Field(
        default=None,
        description="go on at another level, with all values kept; a job that runs saves a checkpoint and starts again",
    )

    resources: LimitChange | None = Field(default=None, description="limits of a job, also of one that has reached them")

    @field_validator("precision", mode="before")
    @classmethod
    def _read_level(cls, precision: Any) -> Any:
        """Accept a level's name in place of a mapping, as a job does."""
        return {"level": precision} if isinstance(precision, str) else precision


_RECIPE = "how the operands of FP8 products are scaled, from the spec or else the level; null if no product is in FP8"


class ValidatedJob(Contract):
    """A valid spec, resolved to what a job would run."""

    object: Literal["validated_job"] = "validated_job"
    spec: JobSpec = Field(description="with every default filled in")
    sizes: ModelSizes
    num_parameters: int | None = Field(description="null if only a rank can count: families huggingface, python")
    recipe: RecipeSpec | None = Field(description=_RECIPE)
    num_block_weights: int | None = Field(description="elements of the weight matrices that the level converts; null as above")
    micro_batch_size: int
    gradient_accumulation: Literal["fp8", "fp32"] | None = Field(
        description="format in which a rank holds gradients of converted weights between micro-batches; null at level auto"
    )
    tokens_per_step: int
    states: dict[str, int] | None = Field(
        default=None, description="bytes of the rank that holds most, by class; null if only a rank knows them"
    )


class QueuePlace(Contract):
    """The position of a queued job, and what it waits for."""

    position: int = Field(description="1 is next, within the pool")
    why: str
    missing_slots: int | None = Field(
        default=None,
        description="slots that have to come back for this job and for those ahead of it; null if it waits for something else, "
        "or is far behind",
    )
    starts_at: Timestamp | None = Field(
        default=None,
        description="an estimate: at the latest then, if running jobs go on as fast as now; null if it is not known, as while "
        "running jobs have no step yet",
    )


class Progress(Contract):
    """The last numbers that a job's training reported."""

    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    remaining_s: float | None
    reported_at: Timestamp


class StartTimes(Contract):
    """When the current attempt reached each phase of its start, in order. `warmed_up_at`: null where nothing is compiled."""

    accepted_at: Timestamp
    placed_at: Timestamp | None = None
    process_up_at: Timestamp | None = None
    torch_imported_at: Timestamp | None = None
    model_built_at: Timestamp | None = None
    first_step_at: Timestamp | None = None
    warmed_up_at: Timestamp | None = None


class JobSummary(Contract):
    """The result of a job that succeeded. Losses are in nats per token; bytes are counted from live tensors on rank 0."""

    steps: int
    final_loss: float = Field(description="mean training loss of the last tenth of the steps, at least 10 steps")
    evaluation_loss: float
    evaluation_perplexity: float = Field(description="exp(evaluation_loss)")
    evaluation_metrics: dict[str, float] = Field(
        default_factory=dict,
        description="other values that the model's family measures on the evaluation data, and scores of `evaluation`, by name",
    )
    tokens: int
    tokens_per_s: float = Field(description="mean over the last 1,000 steps, without an attempt's first")
    train_time_s: float
    step_time_s: float | None = Field(
        default=None, description="median over the same steps as tokens_per_s; null of jobs from before it was counted"
    )
    num_parameters: int
    num_converted_parameters: int
    memory_bytes: dict[str, int] = Field(description="by class, as octet.worker.memory_report counts them")
    converted_memory_bytes: dict[str, int] = Field(description="as memory_bytes, for the converted layers' weights only")
    host_memory_bytes: int = Field(default=0, description="states in host memory, by training.offload_optimizer; 0 on cpu")
    peak_memory_bytes: int | None = Field(description="device peak on cuda; null on cpu")
    reserved_memory_bytes: int | None = Field(default=None, description="peak of torch's allocator on cuda; null on cpu")
    sent_bytes: dict[str, dict[str, int]] = Field(default_factory=dict, description="by rank 0, by collective and dtype")
    mismatch: MismatchCard | None = Field(default=None, description="of the newest export; null without one")
    data: dict[str, float] = Field(description="facts of the data: bytes, files, unigram entropy in nats per byte")


class FailureCount(Contract):
    """The failures of a job for one reason, since it was submitted or last retried."""

    reason: FailureReason
    count: int
    retries: int | None = Field(
        description="failures that are tried again; null: all. Reasons of the job's own share retry.max_failures, unless "
        "retry.by_reason names them"
    )


class Job(Contract):
    """A job as the API shows it."""

    object: Literal["job"] = "job"
    id: str
    name: str
    tenant: str = Field(default="default", description="tenant that owns the job; 'default' if API keys have no names")
    state: JobState
    desired_state: DesiredState
    priority: int
    labels: dict[str, str]
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    reason: FailureReason | None
    message: str | None
    hint: str | None
    num_attempts: int
    num_failures: int
    failures: tuple[FailureCount, ...] = Field(default=(), description="by reason")
    current_attempt_id: str | None
    num_ranks: int | None = Field(default=None, description="of the current attempt; fewer than workers if it had to shrink")
    queue: QueuePlace | None
    progress: Progress | None
    start: StartTimes | None
    summary: JobSummary | None
    recipe: RecipeSpec | None = Field(default=None, description=_RECIPE)
    plan: JobPlan | None = Field(default=None, description="null until it is made, and in pools that state no memory")
    measured_to_planned: float | None = Field(
        default=None,
        description="measured over planned bytes: of the peak on cuda, of what is held on cpu; of a job that succeeded",
    )
    trace_id: str | None = Field(
        default=None,
        description="the trace of the request that submitted it, the one of its traceparent; ranks have it in TRACEPARENT",
    )
    step_time_to_planned: float | None = Field(
        default=None,
        description="median measured step over the middle of the predicted range; of a job that succeeded and has both",
    )
    spec: JobSpec
