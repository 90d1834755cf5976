"""Compare the losses of all levels with fp32: the same GPT, seed and batches, on the Python standard library's source.

    python -m benchmarks.accuracy --steps 1000 --runs FOLDER

writes to benchmarks/results/ a dated table (gap of the smoothed final loss to fp32, bytes per parameter) and a plot of the
curves. The test suite runs a short version of the same `train_curve`.
"""

import argparse
import json
import platform
import statistics
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from api_schemas import GPTSizes, TextSpec
from api_schemas.levels import LEVELS
from api_schemas.models.gpt import gpt_sizes
from worker import initialize, memory_report
from worker.data.text import open_source
from worker.data.windows import TokenWindows
from worker.models.gpt import GPT

RESULTS = Path(__file__).parent / "results"
LIMITS = {"O3": 0.007, "O3-split": 0.007, "O3-split-8bit": 0.007}
DEFAULT_LIMIT = 0.005


@dataclass(frozen=True)
class Setting:
    """One network and one schedule, the same for every level."""

    sizes: GPTSizes
    batch_size: int = 8
    steps: int = 1000
    warmup_steps: int = 50
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * (1 - step / self.steps)


@dataclass(frozen=True)
class Run:
    """The results of one level."""

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


def train_curve(level: str, setting: Setting, data: TokenWindows) -> Run:
    """Train one level and return its losses."""
    model = GPT(setting.sizes, seed=setting.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=setting.weight_decay
    )
    model, optimizer = initialize(model, optimizer, opt_level=level, seed=setting.seed)
    losses: list[float] = []
    step_times_s: list[float] = []
    for step in range(setting.steps):
        started_at = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate_at(step)
        optimizer.zero_grad()
        loss = model.loss(data.train_batch(step * setting.batch_size, setting.batch_size)).loss
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


def table(runs: list[Run], setting: Setting) -> str:
    """Format the report in Markdown."""
    num_parameters = GPT(setting.sizes).num_parameters
    lines = [
        f"# Accuracy of the levels, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.accuracy --steps {setting.steps}` on {platform.machine()}, {torch.get_num_threads()} thread; "
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        f"GPT of {num_parameters:,} parameters, {setting.steps} steps of {setting.batch_size} x "
        f"{setting.sizes.max_sequence_length} bytes of the standard library's source, learning rate {setting.learning_rate}, "
        f"seed {setting.seed}. Final loss: mean of the last tenth of the steps, nats per byte.",
        "",
        "| level | final loss | gap to fp32 | limit | bytes/param in converted layers | median step (s) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        limit = LIMITS.get(run.level, DEFAULT_LIMIT)
        lines.append(
            f"| {run.level} | {run.final_loss:.4f} | {gap(run, runs[0]):+.2%} | {limit:.1%} "
            f"| {run.bytes_per_parameter:.2f} | {run.step_time_s:.3f} |"
        )
    return "\n".join(lines) + "\n"


def draw(runs: list[Run], path: Path) -> None:
    """Plot the curves, and their relative distance from the first curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, gaps) = plt.subplots(1, 2, figsize=(14, 5))
    reference = smooth(runs[0].losses)
    for run in runs:
        smoothed = smooth(run.losses)
        curves.plot(smoothed, label=run.level, linewidth=1)
        gaps.plot([100 * (a / b - 1) for a, b in zip(smoothed, reference, strict=True)], label=run.level, linewidth=1)
    curves.set(xlabel="step", ylabel="training loss (nats per byte, smoothed)", yscale="log")
    gaps.set(xlabel="step", ylabel=f"gap to {runs[0].level} (%)", ylim=(-2, 2))
    gaps.legend(ncols=2)
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


def main() -> int:
    """Run every level, print and write the report. Returns 1 if a gap is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--levels", default=",".join(LEVELS), help="levels to run; fp32 always runs, as the first")
    parser.add_argument("--name", default=f"{datetime.now(UTC):%Y-%m-%d}-accuracy")
    parser.add_argument("--runs", type=Path, required=True, help="folder of finished runs; these are not repeated")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = Setting(gpt_sizes(128, 5, 4, 256, 128), steps=options.steps)
    data = load_source_text(setting.sizes.max_sequence_length)
    options.runs.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for level in dict.fromkeys(["fp32", *options.levels.split(",")]):
        kept = options.runs / f"{level}-{setting.steps}.json"
        if kept.exists():
            runs.append(Run(**json.loads(kept.read_text())))
        else:
            runs.append(train_curve(level, setting, data))
            kept.write_text(json.dumps(asdict(runs[-1])))
        sys.stderr.write(f"{level}: final loss {runs[-1].final_loss:.4f}, gap {gap(runs[-1], runs[0]):+.2%}\n")
    report = table(runs, setting)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.md").write_text(report + f"\n![curves]({options.name}.png)\n")
    draw(runs, RESULTS / f"{options.name}.png")
    sys.stdout.write(report)
    return int(any(gap(run, runs[0]) > LIMITS.get(run.level, DEFAULT_LIMIT) for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
