"""Train a small network at a level and keep its losses: what the accuracy benchmarks and the tests of learning share."""

import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octet.api_schemas import GPTSizes, TextSpec
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import initialize, keep_activations_in_fp8, keep_residual_in_bf16, memory_report
from octet.worker.data.text import open_source
from octet.worker.data.windows import TokenWindows
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama
from octet.worker.pretrained.values import change_start


@dataclass(frozen=True)
class Setting:
    """One network and one schedule, the same for every level.

    seed: of the initial values and of stochastic rounding; each seed trains on the next part of the text. start_change: the
    relative change of each initial value, normally distributed.
    """

    sizes: GPTSizes | LlamaSizes
    batch_size: int = 8
    steps: int = 1000
    warmup_steps: int = 50
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0
    start_change: float = 0.0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * (1 - step / self.steps)

    def build_model(self) -> GPT | Llama:
        """Build the network at its start."""
        model = (Llama if isinstance(self.sizes, LlamaSizes) else GPT)(self.sizes, seed=self.seed)  # type: ignore[arg-type]
        change_start(model, self.start_change, self.seed)
        return model


@dataclass(frozen=True)
class Run:
    """The results of one level with one seed."""

    level: str
    losses: list[float]
    bytes_per_parameter: float
    step_time_s: float

    @property
    def final_loss(self) -> float:
        """Mean loss over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def load_source_text(sequence_length: int) -> TokenWindows:
    """Read the Python source files of the standard library, as bytes."""
    spec = TextSpec(path=sysconfig.get_path("stdlib"), include=("**/*.py",), exclude=("site-packages/**",))
    return open_source(spec, sequence_length, seed=0)


def train_curve(
    level: str,
    setting: Setting,
    data: TokenWindows,
    *,
    saves_in_fp8: bool = False,
    residual_in_bf16: bool = False,
    **options: Any,
) -> Run:
    """Train one level and return its losses.

    saves_in_fp8: what blocks keep is in FP8. residual_in_bf16: what they pass on is in bf16. options: of `initialize`.
    """
    model = setting.build_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=setting.weight_decay
    )
    model, optimizer = initialize(model, optimizer, opt_level=level, seed=setting.seed, **options)
    if residual_in_bf16:
        keep_residual_in_bf16(model)
    if saves_in_fp8:
        keep_activations_in_fp8(model)
    losses: list[float] = []
    step_times_s: list[float] = []
    for step in range(setting.steps):
        started_at = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate_at(step)
        optimizer.zero_grad()
        position = (setting.seed * setting.steps + step) * setting.batch_size
        loss = model.loss(data.train_batch(position, setting.batch_size)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step_times_s.append(time.perf_counter() - started_at)
    held = sum(memory_report(model, optimizer, converted_only=True).values())
    return Run(level, losses, held / model.octet_report.num_converted_parameters, statistics.median(step_times_s))


def gap(run: Run, reference: Run) -> float:
    """Relative gap of the smoothed final loss to the reference; a positive gap is worse."""
    return run.final_loss / reference.final_loss - 1


def mean_curve(runs: Sequence[Run]) -> Run:
    """One run whose losses are the means over the seeds."""
    losses = [statistics.fmean(each) for each in zip(*(run.losses for run in runs), strict=True)]
    return replace(runs[0], losses=losses)


def draw(runs: Sequence[Run], path: Path, gap_limit: float = 2.0) -> None:
    """Plot the curves, and their relative distance from the first curve in percent, up to `gap_limit`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, distances) = plt.subplots(1, 2, figsize=(14, 5))
    reference = smooth(runs[0].losses)
    for run in runs:
        smoothed = smooth(run.losses)
        curves.plot(smoothed, label=run.level, linewidth=1)
        distances.plot([100 * (a / b - 1) for a, b in zip(smoothed, reference, strict=True)], label=run.level, linewidth=1)
    curves.set(xlabel="step", ylabel="training loss (nats per byte, smoothed)", yscale="log")
    distances.set(xlabel="step", ylabel=f"gap to {runs[0].level} (%)", ylim=(-gap_limit, gap_limit))
    distances.legend(ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(losses: list[float], decay: float = 0.95) -> list[float]:
    """Exponential moving average with bias correction for the first steps."""
    average, weight, smoothed = 0.0, 0.0, []
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        smoothed.append(average / weight)
    return smoothed
