"""Run what converted layers need between two optimizer steps: close amax windows, collect samples, demote layers by rule.

A demoted layer comes back to FP8 where the limits have a `recovery`: its samples then tell how FP8 would hold its operands.

On an accelerator a sample is read `STEPS_LATE` optimizer steps after it was taken, when it has long arrived on the host, so
that no step waits. A state dict, a copy and `fp8_statistics` read what is still under way. On the CPU it is read at once.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octet.api_schemas.precision import DemotionSpec
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import advance
from octet.worker.kernels.torch_private import foreach_copy_
from octet.worker.metrics.readback import HostCopy
from octet.worker.metrics.table import OperandSample

STEPS_LATE = 4
"""The host is rarely further ahead of a device: a step has hundreds of launches, and a CUDA stream queues 1024."""


@dataclass(frozen=True)
class LayerDemoted:
    """The event: from `step` on, `layer` computes in bf16."""

    step: int
    layer: str
    operand: str
    reason: str


@dataclass(frozen=True)
class LayerRecovered:
    """The event: from `step` on, `layer` multiplies in FP8 again."""

    step: int
    layer: str


HealthEvent = LayerDemoted | LayerRecovered


@dataclass(frozen=True)
class _UnderWay:
    """Samples that are copied to the host: where each was taken, and when to read them. step: optimizer steps so far."""

    step: int
    places: list[tuple[int, str, str]]
    copy: HostCopy


class StepKeeper:
    """Runs after every optimizer step of a converted model. What must last is in the layers."""

    def __init__(
        self,
        layers: dict[str, Float8Linear],
        limits: DemotionSpec | None = None,
        on_event: Callable[[HealthEvent], None] | None = None,
    ) -> None:
        """limits: what a layer must break to be demoted. on_event: called with each demotion and each recovery."""
        self.layers, self.limits, self.on_event = layers, limits, on_event
        for layer in layers.values():
            layer.may_recover = limits is not None and limits.recovery > 0
        self.samples: list[OperandSample] = []
        """The newest samples that were read."""
        self.counts_steps = True
        """True if `after_step` calls `count_step`. While a step is recorded, its caller does, as after each replay."""
        self.follows = False
        """True if an optimizer's steps call `after_step`."""
        self._is_rehearsing = False
        self._under_way: deque[_UnderWay] = deque()

    def after_step(self) -> None:
        """Close the step that the optimizer has just taken or skipped."""
        quantizing = (layer for layer in self.layers.values() if layer.fallback is not Fallback.TOO_SMALL)
        advance(scaling for layer in quantizing for scaling in layer.scalings().values())
        if self.counts_steps:
            self.count_step()

    def count_step(self) -> None:
        """Do the host's part: collect samples, and set in each layer whether the next step is sampled."""
        self._collect()
        for layer in self.layers.values():
            layer.start_step(layer.num_steps + 1)

    def rehearse(self) -> None:
        """Let the next step take samples that count for nothing: a compiler then sees such a step when a run is resumed."""
        layers = [layer for layer in self.layers.values() if layer.statistics_every]
        if not any(layer.is_sampled for layer in layers):
            self._is_rehearsing = bool(layers)
            for layer in layers:
                layer.sample_step()

    def read_all(self) -> None:
        """Read the samples that are under way. Waits for the device."""
        while self._under_way:
            self._read(self._under_way.popleft())

    def _collect(self) -> None:
        """Read the samples that are due, and start to copy those that this step has taken."""
        step = max((layer.num_steps for layer in self.layers.values()), default=0)
        while self._under_way and self._under_way[0].step + STEPS_LATE <= step:
            self._read(self._under_way.popleft())
        taken = [
            (layer.num_steps, name, operand, scaling.sample)
            for name, layer in self.layers.items()
            for operand, scaling in layer.scalings().items()
            if scaling.is_sampled
        ]
        if not taken:
            return
        places = [(step_taken, name, operand) for step_taken, name, operand, _ in taken]
        samples = [sample for *_, sample in taken]
        if not self._is_rehearsing:
            self._under_way.append(_UnderWay(step, places, HostCopy(torch.stack(samples))))
        self._is_rehearsing = False
        foreach_copy_(samples, [torch.full_like(samples[0], torch.nan)] * len(samples))
        if not is_accelerator(samples[0].device):
            self.read_all()

    def _read(self, under_way: _UnderWay) -> None:
        rows = under_way.copy.read()
        samples = [OperandSample(*place, *row) for place, row in zip(under_way.places, rows, strict=True)]
        samples = [sample for sample in samples if not math.isnan(sample.dequant_scale)]  # NaN: nothing was quantized
        if not samples:
            return
        self.samples = samples
        if self.limits is not None:
            self._judge_by(self.limits)

    def _judge_by(self, limits: DemotionSpec) -> None:
        for name, layer in self.layers.items():
            found = [(sample, _breach(sample, limits)) for sample in self.samples if sample.layer == name]
            breaches = [(sample.operand, reason) for sample, reason in found if reason]
            if layer.fallback is Fallback.DEMOTED:
                if found:
                    self._count_calm(name, layer, limits.recovery, is_calm=not breaches)
                continue
            layer.num_breaches = layer.num_breaches + 1 if breaches else 0
            if layer.num_breaches >= limits.patience and layer.fallback is Fallback.NONE:
                layer.fallback = Fallback.DEMOTED
                self._tell(LayerDemoted(layer.num_steps, name, *breaches[0]))

    def _count_calm(self, name: str, layer: Float8Linear, recovery: int, *, is_calm: bool) -> None:
        """Count a sample of a demoted layer, and bring the layer back after enough calm ones in a row."""
        layer.num_breaches = min(layer.num_breaches, 0) - 1 if is_calm else 0
        if layer.num_breaches <= -recovery:
            for scaling in layer.scalings().values():
                scaling.restart()
            layer.num_breaches, layer.fallback = 0, Fallback.NONE
            self._tell(LayerRecovered(layer.num_steps, name))

    def _tell(self, event: HealthEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model does not report to the original's listener."""
        self.read_all()
        return {**self.__dict__, "on_event": None}


def _breach(sample: OperandSample, limits: DemotionSpec) -> str | None:
    """Return the limit that a sample breaks, with the numbers; None if it breaks none."""
    if sample.overflow_ratio > limits.max_overflow_ratio:
        return f"overflow_ratio {sample.overflow_ratio:.2g} > {limits.max_overflow_ratio:.2g}"
    if sample.underflow_ratio > limits.max_underflow_ratio:
        return f"underflow_ratio {sample.underflow_ratio:.2g} > {limits.max_underflow_ratio:.2g}"
    if not sample.sqnr_db >= limits.min_sqnr_db:
        return f"sqnr_db {sample.sqnr_db:.1f} < {limits.min_sqnr_db:.1f}"
    return None
