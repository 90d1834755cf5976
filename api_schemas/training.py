"""Length, batch sizes and recipe of a run: all that the training loop is told besides model, data and precision."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal
from api_schemas.optimization import OptimizerSpec, ScheduleSpec
from api_schemas.training_presets import TrainingPreset, with_training_preset

DEFAULT_SEQUENCE_LENGTH = 256


class TrainingSpec(Contract):
    """One optimizer step reads `global_batch_size` sequences of `sequence_length` tokens, over all ranks.

    The length is either `steps` or `epochs`. A rank counts the steps of the epochs once it has opened the data.
    """

    preset: TrainingPreset | None = Field(
        default=None, description="the recipe of a paper, which gives every field that the job does not set"
    )
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
    label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="share of each target that all classes divide equally; for images"
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="keep an exponential moving average of the weights, which is evaluated and exported; null: none",
    )
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only after the last step")
    eval_batches: int = Field(default=16, ge=1, le=100_000, description="batches of global_batch_size sequences per evaluation")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only after the last step")
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compile each repeated block of the model, for static shapes; auto: on CUDA, and not with "
        "parallelism.sequence or context",
    )
    cuda_graph: Literal["auto", "off"] = Field(
        default="auto",
        description="record a step's launches once and replay them, so that the host launches a few graphs a step; auto: "
        "where nothing forbids it on CUDA, else an event says why",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what the backward pass computes again of each repeated block: nothing; all but matrix products and "
        "attention; everything",
    )
    saved_activations: Literal["exact", "fp8"] = Field(
        default="exact",
        description="what repeated blocks keep for the backward pass; fp8: E4M3 codes with a scale for each row, for half the "
        "bytes; the forward pass stays exact, compiled or not",
    )
    residual_stream: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="dtype of the hidden states that repeated blocks add to and pass on; bf16: half their bytes, each sum is "
        "rounded, and norms between them return bf16",
    )
    fused_loss: bool = Field(
        default=False,
        description="compute the loss of a model that predicts tokens from pieces of its logits, which never exist as a whole; "
        "the backward pass computes them again",
    )
    gradient_release: bool = Field(
        default=False,
        description="step each parameter in the backward pass as soon as its gradient is complete, and free the gradient; on "
        "one rank, without clipping and accumulation",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="keep the optimizer's states in host memory, and bring each parameter's to the device while it is stepped",
    )
    deterministic: bool = Field(
        default=False,
        description="compute to the same bits in every run on a GPU too, so that a resumed run equals one that went through; "
        "slower, and refuses operations that have no such algorithm. On a CPU runs are bit-identical without it",
    )
    collective_timeout_s: float = Field(
        default=600.0,
        ge=1.0,
        le=86_400.0,
        description="longest wait of a rank for others, which then name the one that hangs and fail; a single rank never waits",
    )
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, training: Any) -> Any:
        return with_training_preset(training)

    @model_validator(mode="after")
    def _sgd_is_clipped(self) -> Self:
        if self.optimizer.name == "sgd" and self.gradient_clip is None:
            raise refusal(
                "gradient_clip",
                got=None,
                allowed="a largest norm: with the optimizer sgd it bounds a step, and stored weights are scaled by the bound",
                change="Set training.gradient_clip, or choose another training.optimizer.name.",
            )
        return self

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
