"""The optimizer and the schedule of a job: their names, their numbers, and which number belongs to which name."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal
from api_schemas.data.unfit import Unfit
from api_schemas.precision import Globs

OptimizerName = Literal["adamw", "adam", "lion", "sgd"]
ScheduleName = Literal["cosine", "linear", "constant", "polynomial", "warmup_stable_decay"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

_READ_BY: Mapping[str, tuple[str, ...]] = {
    "betas": ("adamw", "adam", "lion"),
    "eps": ("adamw", "adam"),
    "momentum": ("sgd",),
    "final_fraction": ("cosine", "linear", "polynomial", "warmup_stable_decay"),
    "power": ("polynomial",),
    "decay_fraction": ("warmup_stable_decay",),
}
"""The names that read a field. Other fields are read by all."""


class _Named(Contract):
    """A spec whose `name` decides which of its other fields have an effect."""

    name: str

    @model_validator(mode="after")
    def _every_number_has_an_effect(self) -> Self:
        fields = type(self).model_fields
        for field, readers in _READ_BY.items():
            # The default says nothing: a stored spec has every field.
            if field in fields and self.name not in readers and self._is_set(field):
                part = self._part()
                raise refusal(
                    field,
                    got=f"{getattr(self, field)} with the {part} {self.name}",
                    allowed=f"{field} with the {part} {' or '.join(readers)}",
                    change=f"Remove training.{part}.{field}, or choose another training.{part}.name.",
                )
        return self

    def _is_set(self, field: str) -> bool:
        return bool(getattr(self, field) != type(self).model_fields[field].default)

    @classmethod
    def _part(cls) -> str:
        return cls.__name__.removesuffix("Spec").lower()


class OptimizerSpec(_Named):
    """The optimizer's rule and its numbers. Defaults are AdamW's. Biases and norms never decay.

    adamw: Loshchilov and Hutter 2019, eps outside the root as in torch. adam: Kingma and Ba 2015, with weight decay in the
    gradient (L2). lion: Chen et al. 2023; it wants a learning rate 3 to 10 times smaller. sgd: momentum as in torch (Sutskever
    et al. 2013), with weight decay in the gradient; it needs training.gradient_clip, by which stored weights are scaled.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0.0, le=10.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    momentum: Fraction = 0.9
    no_decay: Globs = Field(default=(), max_length=100, description="names of further parameters that do not decay, as globs")
    layer_decay: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="factor of the learning rate from each block to the one below it; embeddings lie below the first block",
    )


class ScheduleSpec(_Named):
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

    def misfit(self, num_steps: int) -> Unfit | None:
        """Return the rule that the schedule breaks in a run of `num_steps`, or None."""
        if self.warmup_steps and self.warmup_steps >= num_steps:
            allowed = f"fewer than training.steps, {num_steps}"
            change = "Shorten the warm-up or train for more steps."
            return Unfit("training.schedule.warmup_steps", self.warmup_steps, allowed, change)
        num_decay_steps = self.num_decay_steps(num_steps) if self.name == "warmup_stable_decay" else 0
        if self.warmup_steps and self.warmup_steps + num_decay_steps > num_steps:
            allowed = f"at most {num_steps - num_decay_steps}: the last {num_decay_steps} of {num_steps} steps are the decay"
            change = "Shorten the warm-up or lower training.schedule.decay_fraction."
            return Unfit("training.schedule.warmup_steps", self.warmup_steps, allowed, change)
        return None
