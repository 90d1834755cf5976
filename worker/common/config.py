"""The configuration of a rank, resolved once from the `JobSpec` and the rank's environment. Later code sets no defaults."""

from dataclasses import dataclass
from typing import Any

from octet.api_schemas import (
    ANY_FILE,
    BatchDivision,
    DataSpec,
    FamilySizes,
    Files,
    JobSpec,
    Layout,
    ModelSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
    SpecConflict,
    TrainingSpec,
    check_data,
    tokens_per_sample,
)
from octet.api_schemas.layout import ParallelismSpec
from octet.api_schemas.rules.table import check_without_effect, reason_against
from octet.api_schemas.training import AdapterSpec

ALLOCATOR = "expandable_segments:True"
"""Settings of torch's allocator in every rank, in the words of PYTORCH_ALLOC_CONF."""


@dataclass(frozen=True, slots=True)
class RankEnv:
    """The rank's number, and the address where the ranks meet. num_nodes: those on which the ranks are, as far as is known."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    accelerator: str = "cpu"
    num_threads: int = 1
    num_nodes: int = 1

    @property
    def reports(self) -> bool:
        """True if this rank reports for all ranks to whoever started the job."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every number that the training loop reads. Batch sizes count samples of `sequence_length` tokens each.

    training: gives the number of steps for a number of samples, which only an open source has.
    """

    precision: PrecisionSpec
    model: ModelSpec
    adapter: AdapterSpec | None
    sizes: FamilySizes
    data: DataSpec
    readable_files: Files
    env: RankEnv
    layout: Layout
    parallelism: ParallelismSpec
    batch: BatchDivision
    training: TrainingSpec
    sequence_length: int
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    gradient_clip: float | None
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    seed: int
    spec: JobSpec
    not_compiled: str | None = None
    """The reason why blocks are not compiled where the job leaves it open; None where they are."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one optimizer step."""
        return self.batch.global_batch_size * self.sequence_length

    @property
    def tokens_per_pass(self) -> int:
        """Tokens that a layer of one rank sees in one forward pass."""
        return self.batch.micro_batch_size * self.sequence_length // self.layout.context


def trained_job(config: TrainConfig) -> dict[str, Any]:
    """Return the part of a job that a checkpoint holds, as JSON: what it takes to build the model and its optimizer again."""
    adapter = None if config.adapter is None else config.adapter.model_dump(mode="json")
    return {
        "model": config.model.model_dump(mode="json"),
        "adapter": adapter,
        "precision": config.precision.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "seed": config.seed,
    }


def resolve(spec: JobSpec, env: RankEnv, files: Files = ANY_FILE) -> TrainConfig:
    """Resolve the spec for this rank. Raises ValueError if it does not fit the number of ranks or the model's files.

    files: those that the job's data and model must be among.
    """
    layout = spec.layout
    if env.world_size != layout.num_ranks:
        raise ValueError(
            f"the world must have as many ranks as the spec has workers; got {env.world_size} ranks and "
            f"resources.workers {layout.num_ranks}. Start that many ranks or change resources.workers."
        )
    if conflict := check_without_effect(spec):
        raise conflict
    if not spec.precision.is_resolved:
        raise SpecConflict("precision.level", "auto", "a level: only a service chooses one", "Name a level.")
    training = spec.training
    not_compiled = reason_against("training.compile", spec) if training.compile == "auto" else None  # "on" is refused there
    if not_compiled is not None:
        training = training.model_copy(update={"compile": "off"})
    sizes = _read_sizes(spec, files)
    return TrainConfig(
        precision=spec.resolved_precision,
        model=spec.model,
        adapter=spec.adapter,
        sizes=sizes,
        data=spec.data.with_model(spec.model.files),
        readable_files=files,
        env=env,
        layout=layout,
        parallelism=spec.parallelism,
        batch=spec.batch,
        training=training,
        sequence_length=tokens_per_sample(sizes.takes, training.sequence_length),
        optimizer=training.optimizer,
        schedule=training.schedule,
        gradient_clip=training.gradient_clip,
        eval_every=training.eval_every,
        eval_batches=training.eval_batches,
        checkpoint_every=training.checkpoint_every,
        seed=training.seed,
        spec=spec,
        not_compiled=not_compiled,
    )


def _read_sizes(spec: JobSpec, files: Files) -> FamilySizes:
    """Return the model's sizes, completed from its files. Raises SpecConflict if the files are wrong or do not fit the data."""
    try:
        sizes = spec.model.read_sizes(files)
    except OSError as error:
        folder = error.filename or spec.model.files
        raise ValueError(f"cannot read {folder}: {error.strerror}. Mount it, make it readable or change model.path.") from error
    if conflict := check_data(sizes.takes, spec.data, spec.training.sequence_length):
        raise conflict
    return sizes
