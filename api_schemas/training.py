"""Length, batch sizes and recipe of a run: all that the training loop reads besides model, data and precision."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract
from octet.api_schemas.inputs import DEFAULT_SEQUENCE_LENGTH
from octet.api_schemas.optimization import OptimizerSpec, ScheduleSpec
from octet.api_schemas.rules.parts import TRAINING

# The published recipes of four papers, as fields of a job's `training`. A job names one and overrides what it wants otherwise.
#
# Lengths, batches and warm-ups are those of the papers' data; a job on other data sets its own.

TrainingPreset = Literal["gpt3-125m", "roberta-base", "deit", "swin"]

_ADAMW_OF_VISION = {"learning_rate": 1.0e-3, "betas": (0.9, 0.999), "weight_decay": 0.05}
_EMBEDDINGS_OF_VISION = ("*cls_token", "*position_embeddings")

TRAINING_PRESETS: Mapping[TrainingPreset, Mapping[str, Any]] = {
    # Brown et al. 2020, arXiv 2005.14165, table 2.1 and appendix B: 300 B tokens in batches of 0.5 M, warm-up over 375 M.
    "gpt3-125m": {
        "steps": 572_000,
        "global_batch_size": 256,
        "sequence_length": 2048,
        "optimizer": {"learning_rate": 6.0e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "schedule": {"warmup_steps": 715, "final_fraction": 0.1},
        "gradient_clip": 1.0,
    },
    # Liu et al. 2019, arXiv 1907.11692, table 9.
    "roberta-base": {
        "steps": 500_000,
        "global_batch_size": 8192,
        "sequence_length": 512,
        "optimizer": {"learning_rate": 6.0e-4, "betas": (0.9, 0.98), "eps": 1.0e-6, "weight_decay": 0.01},
        "schedule": {"name": "linear", "warmup_steps": 24_000, "final_fraction": 0.0},
        "gradient_clip": None,
    },
    # Touvron et al. 2021, arXiv 2012.12877, table 9: 5e-4 × batch / 512, 5 epochs of warm-up on ImageNet-1k, down to 1e-5.
    # Class token and positions do not decay in the authors' code. Their repeated augmentation is not done.
    "deit": {
        "epochs": 300,
        "global_batch_size": 1024,
        "optimizer": {**_ADAMW_OF_VISION, "no_decay": _EMBEDDINGS_OF_VISION},
        "schedule": {"warmup_steps": 6256, "final_fraction": 0.01},
        "gradient_clip": None,
        "label_smoothing": 0.1,
    },
    # Liu et al. 2021, arXiv 2103.14030, appendix A2.1: 20 epochs of warm-up on ImageNet-1k, down to 1e-5 in the authors' code,
    # where tables of relative positions do not decay.
    "swin": {
        "epochs": 300,
        "global_batch_size": 1024,
        "optimizer": {**_ADAMW_OF_VISION, "no_decay": ("*relative_position_bias_table",)},
        "schedule": {"warmup_steps": 25_023, "final_fraction": 0.01},
        "gradient_clip": 1.0,
        "label_smoothing": 0.1,
    },
}


def with_training_preset(training: Any) -> Any:
    """Return a job's `training` with its preset's fields where it sets none; anything else as it is.

    Fields of optimizer and schedule are merged one by one, unless the job names another optimizer or schedule: then the
    preset's numbers do not belong to it. A job that sets steps or epochs keeps its own length.
    """
    preset = training.get("preset") if isinstance(training, Mapping) else None
    # By comparison: a document may have a list there, which no table takes as a key.
    of_preset = next((fields for name, fields in TRAINING_PRESETS.items() if name == preset), None)
    if of_preset is None:
        return training
    merged = dict(of_preset)
    if training.get("steps") is not None or training.get("epochs") is not None:
        merged = {name: value for name, value in merged.items() if name not in ("steps", "epochs")}
    for name, default in (("optimizer", "adamw"), ("schedule", "cosine")):
        own, published = training.get(name), merged.get(name, {})
        if isinstance(own, Mapping) and own.get("name", published.get("name", default)) == published.get("name", default):
            merged[name] = {**published, **own}
        elif own is not None:
            merged[name] = own
    return {**merged, **{name: value for name, value in training.items() if name not in ("optimizer", "schedule")}}


TargetGlob = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]


# A few trained weights next to the frozen weights of a model: LoRA, Hu et al. 2021, arXiv 2106.09685.
class AdapterSpec(Contract):
    """output = frozen(input) + (alpha / rank) · b · a · input, with a (rank, in) and b (out, rank) for each adapted layer.

    The model itself is frozen and held as the level holds weights that need no update: at O3 as FP8 codes, a byte each.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0.0, le=65_536.0)
    targets: tuple[TargetGlob, ...] = Field(
        default=("*",),
        min_length=1,
        max_length=64,
        description="globs over the names of linear layers, or last parts of their names, such as q_proj; heads are left out",
    )
    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="of the adapters; bf16 is rounded stochastically")


class KeepSpec(Contract):
    """The checkpoints of a job that stay. Each new one removes those that no field keeps."""

    last: int = Field(default=3, ge=1, le=1000, description="the newest checkpoints")
    best: int = Field(default=1, ge=0, le=1000, description="those of the lowest evaluation loss, of steps that were evaluated")
    every: int = Field(default=0, ge=0, description="those of all multiples of so many steps; 0: none for that reason")

    def surplus(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """Select the steps, in order, of checkpoints that do not stay. losses: of the evaluations, by step."""
        best = sorted((losses[step], step) for step in steps if step in losses)[: self.best]
        kept = {*sorted(steps)[-self.last :], *(step for _, step in best)}
        return [step for step in sorted(steps) if step not in kept and not (self.every and step % self.every == 0)]


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
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps between checkpoints; 0: only by time and after the last step"
    )
    checkpoint_every_minutes: float = Field(
        default=15.0, ge=0.0, description="longest time without a checkpoint, whatever checkpoint_every says; 0: no limit"
    )
    keep: KeepSpec = KeepSpec()
    on_divergence: Literal["stop", "continue"] = Field(
        default="stop",
        description="what a loss does that stays infinite or NaN, or far above the first one; stop: it ends the job, whose "
        "newest checkpoint is from before it; continue: an event warns of it",
    )
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
    attention_kernel: Literal["torch", "fa3"] = Field(
        default="torch",
        description="what computes attention on CUDA; torch: FlashAttention-2, or what torch prefers; fa3: FlashAttention-3 of "
        "the package flash_attn_3, which the ranks need, on compute capability 9.0; it sums in another order",
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
    start_change: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="change each initial value by a random share of it, normal with this standard deviation; shows how far "
        "chance alone moves a loss",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, training: Any) -> Any:
        return with_training_preset(training)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        TRAINING.check_part("training", self)
        return self

    @property
    def num_decay_steps(self) -> int:
        """The last steps of a run with `steps`, over which warmup_stable_decay goes down."""
        assert self.steps is not None
        return self.schedule.num_decay_steps(self.steps)

    @property
    def most_warmup_steps(self) -> int:
        """The steps of a run with `steps` before warmup_stable_decay goes down."""
        assert self.steps is not None
        return self.steps - self.num_decay_steps

    def in_steps(self, num_steps: int) -> Self:
        """Return the same training with its length in steps."""
        return self.model_copy(update={"steps": num_steps, "epochs": None})

    def steps_for(self, num_samples: int) -> int:
        """Return the number of optimizer steps, given the number of training samples in one epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * num_samples / self.global_batch_size))
