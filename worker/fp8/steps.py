"""What converted layers do between two optimizer steps: close amax windows, collect samples, fall back to bf16 by rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.fp8.linear import Float8Linear
from worker.fp8.statistics import OperandSample

NAME = "octet_steps"
"""The submodule's name in a converted model; what it remembers is in the model's `state_dict`."""


@dataclass(frozen=True)
class DemotionRule:
    """A layer goes to bf16 for good when one of its operands breaches a limit in `patience` samples in a row."""

    max_overflow_ratio: float
    max_underflow_ratio: float
    min_sqnr_db: float
    patience: int

    def breach(self, sample: OperandSample) -> str | None:
        """What is out of bounds, with the numbers."""
        if sample.overflow_ratio > self.max_overflow_ratio:
            return f"overflow_ratio {sample.overflow_ratio:.2g} > {self.max_overflow_ratio:.2g}"
        if sample.underflow_ratio > self.max_underflow_ratio:
            return f"underflow_ratio {sample.underflow_ratio:.2g} > {self.max_underflow_ratio:.2g}"
        if not sample.sqnr_db >= self.min_sqnr_db:
            return f"sqnr_db {sample.sqnr_db:.1f} < {self.min_sqnr_db:.1f}"
        return None


@dataclass(frozen=True)
class LayerDemoted:
    """The event: from `step` on, `layer` computes in bf16."""

    step: int
    layer: str
    operand: str
    reason: str


class StepKeeper(nn.Module):
    """Runs after every optimizer step of a converted model."""

    samples: list[OperandSample]

    def __init__(
        self,
        layers: dict[str, Float8Linear],
        sample_every: int = 0,
        rule: DemotionRule | None = None,
        on_event: Callable[[LayerDemoted], None] | None = None,
    ) -> None:
        """sample_every: optimizer steps between two samples, 0 for none. on_event: told of each demotion."""
        super().__init__()
        self.layers = layers  # a plain dict: they are submodules of the model already
        self.sample_every, self.rule, self.on_event = sample_every, rule, on_event
        self.num_steps = 0
        self.samples = []
        self._choose_whether_to_sample()

    def after_step(self) -> None:
        """Close the step that the optimizer has just taken or skipped."""
        for layer in self.layers.values():
            for scaling in layer.scalings().values():
                scaling.advance()
        self._collect()
        self.num_steps += 1
        self._choose_whether_to_sample()

    def _collect(self) -> None:
        taken: list[tuple[str, str, Tensor]] = []
        for name, layer in self.layers.items():
            for operand, scaling in layer.scalings().items():
                if scaling.sample is not None:
                    taken.append((name, operand, scaling.sample))
                    scaling.sample = None
        if not taken:
            return
        numbers = torch.stack([sample for _, _, sample in taken]).tolist()  # the only wait for the device
        self.samples = [
            OperandSample(self.num_steps, name, operand, *row) for (name, operand, _), row in zip(taken, numbers, strict=True)
        ]
        if self.rule is not None:
            self._demote_by(self.rule)

    def _demote_by(self, rule: DemotionRule) -> None:
        for name, layer in self.layers.items():
            found = [(sample, rule.breach(sample)) for sample in self.samples if sample.layer == name]
            breaches = [(sample.operand, reason) for sample, reason in found if reason]
            layer.num_breaches = layer.num_breaches + 1 if breaches else 0
            if layer.num_breaches >= rule.patience and not layer.is_demoted:
                layer.is_demoted = True
                if self.on_event is not None:
                    self.on_event(LayerDemoted(self.num_steps, name, *breaches[0]))

    def _choose_whether_to_sample(self) -> None:
        is_due = self.sample_every > 0 and self.num_steps % self.sample_every == 0
        for layer in self.layers.values():
            for scaling in layer.scalings().values():
                scaling.is_sampled = is_due

    def get_extra_state(self) -> Tensor:
        """The number of optimizer steps, so that a resumed run samples the same ones."""
        return torch.tensor(self.num_steps)

    def set_extra_state(self, state: Tensor) -> None:
        self.num_steps = int(state)
        self._choose_whether_to_sample()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model does not report to the original's listener."""
        return {**self.__dict__, "on_event": None}


def keep_steps(model: nn.Module, optimizer: torch.optim.Optimizer | None, keeper: StepKeeper) -> None:
    """Attach the keeper to the model, and to the end of the optimizer's step."""
    model.register_module(NAME, keeper)
    if optimizer is not None:
        optimizer.register_step_post_hook(lambda *_: keeper.after_step())
