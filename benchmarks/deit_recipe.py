"""Train a tiny DeiT with the whole published recipe on the digits that scikit-learn ships, and print its curve.

    python -m benchmarks.deit_recipe --steps 4000 --variants published,no-mixup --runs build/deit

The recipe: random crops, mirroring, RandAugment, mixup, CutMix, random erasing, label smoothing, drop path and AdamW with a
cosine schedule (Touvron et al. 2021, table 9). The network and the data are small, so the batch, the learning rate and the
steps are this benchmark's own. `plain` has no augmentation; `no-mixup` is the recipe without mixup, which upstream advises for
small data; `digits` is that without mirroring, and with crops that keep at least half of an image of 8 × 8 real pixels.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from api_schemas import EvaluationReport, JobSpec, ReportBody, StepReport
from benchmarks.digits import write_digits
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.train import Trainer

RESULTS = Path(__file__).parent / "results"
SIDE = 16
NUM_POINTS = 10
MODEL = {"preset": "deit-tiny", "hidden_size": 64, "num_layers": 4, "num_heads": 4, "image_size": SIDE, "patch_size": 4}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "published": {"preset": "deit"},
    "no-mixup": {"preset": "deit", "mixup": 0.0},
    "digits": {"preset": "deit", "mixup": 0.0, "flip": 0.0, "crop_area": [0.5, 1.0]},
}
"""The `data.augmentation` of each variant. Without augmentation there is no smoothing and no drop path either."""


@dataclass(frozen=True)
class Curve:
    """What a run reported. evaluations: step, loss in nats, share of right classes. seconds: of processor."""

    variant: str
    seed: int
    steps: int
    seconds: float
    losses: list[float]
    evaluations: list[tuple[int, float, float]]


class _Points:
    """A reporter that keeps losses and evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float, float]] = []

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        """Keep a step's loss and an evaluation; other reports are of no interest here."""
        if isinstance(body, StepReport):
            self.losses.append(float("nan") if body.loss is None else body.loss)
        elif isinstance(body, EvaluationReport):
            self.evaluations.append((body.step, float(body.loss or "nan"), body.metrics["top1_accuracy"]))

    def check(self) -> None:
        """Nobody stops a run."""


def job_of(variant: str, seed: int, steps: int, folder: Path, level: str = "fp32") -> dict[str, Any]:
    """Return the job of a run over the images in a folder."""
    is_plain = variant == "plain"
    data = {"source": "images", "path": str(folder), "evaluation_fraction": 0.2, "augmentation": VARIANTS[variant]}
    training = {
        "preset": "deit",
        "epochs": None,
        "steps": steps,
        "global_batch_size": 64,
        "schedule": {"warmup_steps": steps // 20, "final_fraction": 0.01},
        "label_smoothing": 0.0 if is_plain else 0.1,
        "eval_every": max(1, steps // NUM_POINTS),
        "eval_batches": 6,
        "seed": seed,
    }
    model = MODEL | {"num_channels": 1, "num_classes": 10, "drop_path_rate": 0.0 if is_plain else 0.1}
    precision = {"level": level} | ({} if level == "fp32" else {"auto_filter": False})
    return {"name": f"deit-{variant}", "model": model, "precision": precision, "data": data, "training": training}


def train(variant: str, seed: int, steps: int, folder: Path) -> Curve:
    """Run a job in this process on one CPU thread."""
    points, started_s = _Points(), time.process_time()
    config = resolve(JobSpec.model_validate(job_of(variant, seed, steps, folder)), RankEnv())
    with tempfile.TemporaryDirectory() as job_dir, Mesh(config.env, torch.device("cpu")) as mesh:
        Trainer(config, mesh, points, Path(job_dir)).run()  # type: ignore[arg-type]
    return Curve(variant, seed, steps, time.process_time() - started_s, points.losses, points.evaluations)


def report(command: str, curves: Sequence[Curve]) -> str:
    """Format the curves in Markdown."""
    lines = [
        f"# Tiny DeiT with the published recipe on digits, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`{command}` on {platform.machine()}, {os.cpu_count()} cores, shared and loaded, one thread; torch "
        f"{torch.__version__}, Python {platform.python_version()}. {MODEL['num_layers']} layers of width "
        f"{MODEL['hidden_size']}, images of {SIDE} × {SIDE} pixels, batches of 64. Losses of training are of smoothed "
        "targets, and of mixed ones where the variant mixes. Evaluation is on held-out "
        "images as they are, loss in nats (guessing: 2.303).",
    ]
    for curve in curves:
        lines += [
            "",
            f"## {curve.variant}, seed {curve.seed}: {curve.seconds:.0f} s of processor",
            "",
            "| step | training loss | evaluation loss | top-1 |",
            "| ---: | ---: | ---: | ---: |",
        ]
        for step, loss, accuracy in curve.evaluations:
            near = curve.losses[max(0, step - 50) : step] or curve.losses[:1]
            lines.append(f"| {step} | {sum(near) / len(near):.3f} | {loss:.3f} | {100 * accuracy:.1f} % |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, then print and write the report. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--runs", type=Path, required=True, help="folder of data and finished runs; these are not repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the report")
    options = parser.parse_args(arguments)
    variants = options.variants.split(",")
    if unknown := sorted(set(variants) - set(VARIANTS)):
        parser.error(f"--variants has {', '.join(unknown)}; allowed: {', '.join(VARIANTS)}")
    torch.set_num_threads(1)
    folder = (options.runs / "digits").resolve()
    if not folder.exists():
        write_digits(folder, size=SIDE)
    curves = []
    for seed in range(options.seeds):
        for variant in variants:
            kept = options.runs / f"{variant}-seed{seed}-{options.steps}.json"
            if not kept.exists():
                kept.write_text(json.dumps(asdict(train(variant, seed, options.steps, folder))))
            curves.append(Curve(**json.loads(kept.read_text())))
            sys.stderr.write(f"{variant}, seed {seed}: {curves[-1].evaluations[-1]}\n")
    command = f"python -m benchmarks.deit_recipe --steps {options.steps} --seeds {options.seeds} --variants {options.variants}"
    text = report(f"{command} --runs build/deit", curves)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{datetime.now(UTC):%Y-%m-%d}-deit-recipe.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
