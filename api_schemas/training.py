"""Length, batch sizes and learning rate of a run: the loop, the optimizer and the schedule."""

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Contract

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSpec(Contract):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019); eps is added outside the root, as in torch."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0.0, le=10.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)


class ScheduleSpec(Contract):
    """Linear warm-up, then half a cosine down to `final_fraction` of the learning rate at the last step."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0, le=100_000_000)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)


class TrainingSpec(Contract):
    """One optimizer step reads `global_batch_size` sequences of `sequence_length` tokens, over all ranks."""

    steps: int = Field(ge=1, le=100_000_000)
    global_batch_size: int = Field(default=16, ge=1, le=1_048_576)
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="sequences per rank and forward pass; default: all sequences of the rank",
    )
    sequence_length: int = Field(default=256, ge=2, le=1_048_576)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    gradient_clip: float | None = Field(
        default=1.0, gt=0.0, description="largest global L2 norm of the gradients; null: no clipping"
    )
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only after the last step")
    eval_batches: int = Field(default=16, ge=1, le=100_000, description="batches of global_batch_size sequences per evaluation")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only after the last step")
    seed: int = Field(default=0, ge=0, lt=2**63)
