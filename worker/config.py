"""The configuration of a rank, resolved once from the `JobSpec` and the rank's environment. Later code sets no defaults."""

from dataclasses import dataclass
from pathlib import Path

from api_schemas import (
    ANY_FILE,
    BatchDivision,
    DataSpec,
    Files,
    JobSpec,
    Layout,
    ModelSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
)


@dataclass(frozen=True, slots=True)
class RankEnv:
    """The rank's number, and the address where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    accelerator: str = "cpu"
    num_threads: int = 1

    @property
    def reports(self) -> bool:
        """True if this rank reports for all ranks to whoever started the job."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every number that the training loop reads. Batch sizes count sequences."""

    precision: PrecisionSpec
    model: ModelSpec
    data: DataSpec
    readable_files: Files
    env: RankEnv
    layout: Layout
    zero_stage: int
    batch: BatchDivision
    steps: int
    sequence_length: int
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    gradient_clip: float | None
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    seed: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one optimizer step."""
        return self.batch.global_batch_size * self.sequence_length


def resolve(spec: JobSpec, env: RankEnv, data_roots: tuple[str, ...] | None = None) -> TrainConfig:
    """Resolve the spec for this rank. Raises ValueError if the number of ranks differs from the spec's.

    data_roots: the folders that the job's data must lie in; None allows any file.
    """
    layout = spec.layout
    if env.world_size != layout.num_ranks:
        raise ValueError(
            f"the world must have as many ranks as the spec has workers; got {env.world_size} ranks and "
            f"resources.workers {layout.num_ranks}. Start that many ranks or change resources.workers."
        )
    if unfit := spec.without_effect():
        raise unfit
    training = spec.training
    return TrainConfig(
        precision=spec.precision,
        model=spec.model,
        data=spec.data,
        readable_files=ANY_FILE if data_roots is None else Files.below(tuple(map(Path, data_roots))),
        env=env,
        layout=layout,
        zero_stage=spec.parallelism.zero_stage,
        batch=spec.batch,
        steps=training.steps,
        sequence_length=training.sequence_length,
        optimizer=training.optimizer,
        schedule=training.schedule,
        gradient_clip=training.gradient_clip,
        eval_every=training.eval_every,
        eval_batches=training.eval_batches,
        checkpoint_every=training.checkpoint_every,
        seed=training.seed,
    )
