"""Length, batch sizes and learning rate of a run: the loop, the optimizer and the schedule."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal
from api_schemas.data.unfit import Unfit

_EPS = 1e-8
DEFAULT_SEQUENCE_LENGTH = 256

OptimizerName = Literal["adamw", "lion"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSpec(Contract):
    """The optimizer's rule and its numbers, with decoupled weight decay. Defaults are AdamW's.

    adamw: Loshchilov and Hutter 2019, eps outside the root as in torch. lion: Chen et al. 2023; it has no eps, and wants a
    learning rate 3 to 10 times smaller.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0.0, le=10.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=_EPS, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _eps_has_an_effect(self) -> Self:
        if self.name == "lion" and self.eps != _EPS:  # the default says nothing: a stored spec has every field
            raise refusal(
                "eps",
                got=f"{self.eps} with the optimizer lion",
                allowed="eps with the optimizer adamw",
                change="Remove training.optimizer.eps, or choose another training.optimizer.name.",
            )
        return self


class ScheduleSpec(Contract):
    """Linear warm-up, then half a cosine down to `final_fraction` of the learning rate at the last step."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0, le=100_000_000)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)

    def misfit(self, num_steps: int) -> Unfit | None:
        """Return the rule that the schedule breaks in a run of `num_steps`, or None."""
        if self.warmup_steps == 0 or self.warmup_steps < num_steps:
            return None
        allowed = f"fewer than training.steps, {num_steps}"
        return Unfit(
            "training.schedule.warmup_steps", self.warmup_steps, allowed, "Shorten the warm-up or train for more steps."
        )


class TrainingSpec(Contract):
    """One optimizer step reads `global_batch_size` sequences of `sequence_length` tokens, over all ranks.

    The length is either `steps` or `epochs`. A rank counts the steps of the epochs once it has opened the data.
    """

    steps: int | None = Field(default=None, ge=1, le=100_000_000)
    epochs: float | None = Field(
        default=None, gt=0.0, le=100_000.0, description="times that each training sample is read; in place of steps"
    )
    global_batch_size: int = Field(default=16, ge=1, le=1_048_576)
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="sequences per rank and forward pass; default: all sequences of the rank",
    )
    sequence_length: int = Field(default=DEFAULT_SEQUENCE_LENGTH, ge=2, le=1_048_576)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    gradient_clip: float | None = Field(
        default=1.0, gt=0.0, description="largest global L2 norm of the gradients; null: no clipping"
    )
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only after the last step")
    eval_batches: int = Field(default=16, ge=1, le=100_000, description="batches of global_batch_size sequences per evaluation")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only after the last step")
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="compile each repeated block of the model, for static shapes; auto: on CUDA"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what the backward pass computes again of each repeated block: nothing; all but matrix products and "
        "attention; everything",
    )
    deterministic: bool = Field(
        default=False,
        description="compute to the same bits in every run on a GPU too, so that a resumed run equals one that went through; "
        "slower, and refuses operations that have no such algorithm. On a CPU runs are bit-identical without it",
    )
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise refusal(
                "steps",
                got=self.steps if self.steps is None else f"steps {self.steps} and epochs {self.epochs:g}",
                allowed="one of training.steps and training.epochs",
                change="Set training.steps or training.epochs, not both.",
            )
        return self

    def steps_for(self, num_samples: int) -> int:
        """Return the number of optimizer steps, given the number of training samples in one epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * num_samples / self.global_batch_size))
