"""The optimizer and the schedule of a job: their names, their numbers, and which number belongs to which name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract
from octet.api_schemas.precision import Globs
from octet.api_schemas.rules.parts import LEARNING_RATE, OPTIMIZER

OptimizerName = Literal["adamw", "adam", "lion", "muon", "sgd"]
OPTIMIZER_STATES: Mapping[OptimizerName, tuple[Literal["exp_avg", "exp_avg_sq"], ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("exp_avg", "exp_avg_sq"),
    "sgd": ("exp_avg",),
}
"""The states of each optimizer, each stored by the codec in the level's column of the same name."""
MATRIX_STATES: Mapping[OptimizerName, tuple[Literal["exp_avg"], ...]] = {"muon": ("exp_avg",)}
"""The states of hidden matrices, where an optimizer has another rule for them."""
MUON_MOMENTUM = 0.95
"""The momentum of Jordan et al. 2024 and Liu et al. 2025."""
ScheduleName = Literal["cosine", "linear", "constant", "polynomial", "warmup_stable_decay"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSpec(Contract):
    """The optimizer's rule and its numbers. Defaults are AdamW's. Biases and norms never decay.

    adamw: Loshchilov and Hutter 2019, eps outside the root as in torch. adam: Kingma and Ba 2015, with weight decay in the
    gradient (L2). lion: Chen et al. 2023; it wants a learning rate 3 to 10 times smaller. muon: Jordan et al. 2024, with the
    factor of Liu et al. 2025 (arXiv 2502.16982) for hidden matrices, so that AdamW's learning rate and decay carry over; AdamW,
    with betas and eps, for all other parameters. sgd: momentum as in torch (Sutskever et al. 2013), with weight decay in the
    gradient; it needs training.gradient_clip, by which stored weights are scaled.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0.0, le=10.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    momentum: Fraction = Field(default=0.9, description="of sgd, and of muon, where it is 0.95 unless it is set")
    no_decay: Globs = Field(default=(), max_length=100, description="names of further parameters that do not decay, as globs")
    layer_decay: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="factor of the learning rate from each block to the one below it; embeddings lie below the first block",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_momentum(cls, data: Any) -> Any:
        """Give Muon the momentum of its authors, where none is set."""
        is_muon = isinstance(data, Mapping) and data.get("name") == "muon"
        return {"momentum": MUON_MOMENTUM, **data} if is_muon else data

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        OPTIMIZER.check_part("training.optimizer", self)
        return self


class ScheduleSpec(Contract):
    """Linear warm-up to the learning rate, then a way down to `final_fraction` of it at the last step.

    cosine: half a cosine. linear: a line. polynomial: (1 - share done) ** power. constant: no way down.
    warmup_stable_decay: the learning rate stays, then a line over the last `decay_fraction` of the steps (Hu et al. 2024,
    arXiv 2404.06395, section 4; the line is that of Hägele et al. 2024, arXiv 2405.18392).
    """

    name: ScheduleName = "cosine"
    warmup_steps: int = Field(default=0, ge=0, le=100_000_000)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    power: float = Field(default=1.0, gt=0.0, le=100.0)
    decay_fraction: float = Field(default=0.1, gt=0.0, le=1.0)

    def num_decay_steps(self, num_steps: int) -> int:
        """Return the number of steps over which warmup_stable_decay goes down, in a run of `num_steps`."""
        return max(1, round(self.decay_fraction * num_steps))

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        LEARNING_RATE.check_part("training.schedule", self)
        return self
