"""What converted layers do between two optimizer steps: close amax windows, collect samples, fall back to bf16 by rule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from api_schemas.precision import DemotionSpec
from worker.fp8.linear import Fallback, Float8Linear
from worker.fp8.statistics import OperandSample


@dataclass(frozen=True)
class LayerDemoted:
    """The event: from `step` on, `layer` computes in bf16."""

    step: int
    layer: str
    operand: str
    reason: str


class StepKeeper:
    """Runs after every optimizer step of a converted model. It remembers nothing: what must last is in the layers."""

    def __init__(
        self,
        layers: dict[str, Float8Linear],
        limits: DemotionSpec | None = None,
        on_event: Callable[[LayerDemoted], None] | None = None,
    ) -> None:
        """limits: what a layer must break to be demoted. on_event: told of each demotion."""
        self.layers, self.limits, self.on_event = layers, limits, on_event
        self.samples: list[OperandSample] = []

    def after_step(self) -> None:
        """Close the step that the optimizer has just taken or skipped."""
        self._collect()
        for layer in self.layers.values():
            if layer.fallback is not Fallback.FILTERED:  # a filtered layer quantizes nothing
                for scaling in layer.scalings().values():
                    scaling.advance()
            layer.start_step(layer.num_steps + 1)

    def _collect(self) -> None:
        taken = [
            (layer.num_steps, name, operand, scaling.sample)
            for name, layer in self.layers.items()
            for operand, scaling in layer.scalings().items()
            if scaling.is_sampled
        ]
        if not taken:
            return
        numbers = torch.stack([sample for *_, sample in taken]).tolist()  # the only wait for the device
        samples = [
            OperandSample(step, name, operand, *row) for (step, name, operand, _), row in zip(taken, numbers, strict=True)
        ]
        for *_, sample in taken:
            sample.fill_(torch.nan)
        samples = [sample for sample in samples if not math.isnan(sample.dequant_scale)]  # NaN: nothing was quantized
        if not samples:
            return
        self.samples = samples
        if self.limits is not None:
            self._demote_by(self.limits)

    def _demote_by(self, limits: DemotionSpec) -> None:
        for name, layer in self.layers.items():
            found = [(sample, _breach(sample, limits)) for sample in self.samples if sample.layer == name]
            breaches = [(sample.operand, reason) for sample, reason in found if reason]
            layer.num_breaches = layer.num_breaches + 1 if breaches else 0
            if layer.num_breaches >= limits.patience and layer.fallback is Fallback.NONE:
                layer.fallback = Fallback.DEMOTED
                if self.on_event is not None:
                    self.on_event(LayerDemoted(layer.num_steps, name, *breaches[0]))

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model does not report to the original's listener."""
        return {**self.__dict__, "on_event": None}


def _breach(sample: OperandSample, limits: DemotionSpec) -> str | None:
    """Say which limit a sample breaks, with the numbers; None if it breaks none."""
    if sample.overflow_ratio > limits.max_overflow_ratio:
        return f"overflow_ratio {sample.overflow_ratio:.2g} > {limits.max_overflow_ratio:.2g}"
    if sample.underflow_ratio > limits.max_underflow_ratio:
        return f"underflow_ratio {sample.underflow_ratio:.2g} > {limits.max_underflow_ratio:.2g}"
    if not sample.sqnr_db >= limits.min_sqnr_db:
        return f"sqnr_db {sample.sqnr_db:.1f} < {limits.min_sqnr_db:.1f}"
    return None
