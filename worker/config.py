"""What a rank runs, resolved once from the `JobSpec` and its place in the world. Nothing downstream defaults again."""

from dataclasses import dataclass

from api_schemas import DataSpec, JobSpec, ModelSizes, OptimizerSpec, PrecisionSpec


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Which rank this is, and where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    accelerator: str = "cpu"
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every number that the training loop reads. Batch sizes count sequences."""

    precision: PrecisionSpec
    sizes: ModelSizes
    data: DataSpec
    env: RankEnv
    steps: int
    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    sequence_length: int
    learning_rate: float
    optimizer: OptimizerSpec
    warmup_steps: int
    final_fraction: float
    gradient_clip: float | None
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    seed: int

    @property
    def rank_batch_size(self) -> int:
        """Sequences that one rank reads per optimizer step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


def resolve(spec: JobSpec, env: RankEnv) -> TrainConfig:
    """The spec as this rank runs it. Raises ValueError where the world has another size than the spec asks for."""
    if env.world_size != spec.resources.workers:
        raise ValueError(
            f"the world must have as many ranks as the spec has workers; got {env.world_size} ranks and "
            f"resources.workers {spec.resources.workers}. Start that many ranks or change resources.workers."
        )
    training = spec.training
    return TrainConfig(
        precision=spec.precision,
        sizes=spec.model.sizes,
        data=spec.data,
        env=env,
        steps=training.steps,
        global_batch_size=training.global_batch_size,
        micro_batch_size=spec.micro_batch_size,
        num_micro_batches=training.global_batch_size // (spec.micro_batch_size * env.world_size),
        sequence_length=training.sequence_length,
        learning_rate=training.optimizer.learning_rate,
        optimizer=training.optimizer,
        warmup_steps=training.schedule.warmup_steps,
        final_fraction=training.schedule.final_fraction,
        gradient_clip=training.gradient_clip,
        eval_every=training.eval_every,
        eval_batches=training.eval_batches,
        checkpoint_every=training.checkpoint_every,
        seed=training.seed,
    )
