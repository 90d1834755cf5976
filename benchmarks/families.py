"""Compare every level with fp32 in jobs of the four families of the papers, at tiny size on real data, paired by seed.

    python -m benchmarks.families --seeds 5 --runs build/families

GPT and RoBERTa read the source text of Python's package `email`, byte by byte; DeiT and Swin the digits that scikit-learn
ships. A run is a whole job: the trainer of a rank, its optimizer, schedule and evaluation on the held-out part. Runs of one
seed share initial values and batches; a further run of fp32 starts from values that are changed by 1e-3, and shows what chance
does. Finished runs are kept in the folder of --runs, so that a stopped benchmark goes on where it was. The table says what was
not run. The test suite runs a short version.
"""

import argparse
import email
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from api_schemas import JobSpec, ReportBody, StepReport
from api_schemas.levels import LEVELS
from benchmarks import curves
from benchmarks.curves import change_start, draw_rows
from benchmarks.digits import read_digits
from benchmarks.paired import MAX_VALUES, Interval, gaps
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.pretrained.start import StartedModel
from worker.train import Trainer

RESULTS = Path(__file__).parent / "results"
CHANGED_START, START_CHANGE = "fp32, start changed", 1e-3
SIDE = 16
GAP_LIMIT = 3.0
"""Percent that the plot of gaps shows to either side."""
DIGITS = {"image_size": SIDE, "num_channels": 1, "num_classes": 10}
ADAMW_OF_VISION = {"betas": [0.9, 0.999], "weight_decay": 0.05}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {
        "model": {
            "family": "gpt",
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 256,
            "max_sequence_length": 64,
        },
        "training": {"steps": 60, "sequence_length": 64, "optimizer": {"learning_rate": 3e-3}},
    },
    "roberta": {
        "model": {"preset": "roberta-tiny", "hidden_size": 128, "num_layers": 1, "num_heads": 2},
        "training": {
            "steps": 200,
            "global_batch_size": 128,
            "sequence_length": 8,  # two layers on 64 bytes had not begun to learn after 200 steps of 32 sequences
            "optimizer": {"learning_rate": 2e-3, "betas": [0.9, 0.98], "eps": 1e-6},
        },
    },
    "deit": {
        "model": {**DIGITS, "preset": "deit-tiny", "hidden_size": 64, "num_layers": 2, "num_heads": 2},
        "training": {"steps": 160, "global_batch_size": 32, "optimizer": {**ADAMW_OF_VISION, "learning_rate": 7e-4}},
    },
    "swin": {
        "model": {**DIGITS, "preset": "swin-tiny", "patch_size": 2, "depths": [1, 1]},
        "training": {"steps": 60, "global_batch_size": 64, "optimizer": {**ADAMW_OF_VISION, "learning_rate": 3e-3}},
    },
}
"""A job of each family, without what all have in common."""


@dataclass(frozen=True)
class Run:
    """A finished job. losses: of every step. metrics: of the last evaluation, by name."""

    losses: list[float]
    evaluation_loss: float
    metrics: dict[str, float]


class _ChangedStart(Trainer):
    """Trains from initial values that differ by START_CHANGE of each."""

    def _prepare(self, started: StartedModel) -> None:
        change_start(started.model, START_CHANGE, self.config.seed)
        super()._prepare(started)


class _Losses:
    """A reporter that keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        """Keep a step's loss; other reports are of no interest here."""
        if isinstance(body, StepReport):
            self.losses.append(float("nan") if body.loss is None else body.loss)

    def check(self) -> None:
        """Nobody stops a run."""


def write_data(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the digits to a .npz file; returns a job's `data` by family."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = read_digits()
    wide = images.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
    np.savez_compressed(folder / "digits.npz", images=wide, labels=labels)
    text = {"source": "text", "path": str(Path(email.__file__).parent), "include": ["**/*.py"]}
    digits = {"source": "images", "path": str(folder / "digits.npz"), "evaluation_fraction": 0.2}
    return {"gpt": text, "roberta": text, "deit": digits, "swin": digits}


def job_of(family: str, variant: str, seed: int, steps: int | None, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's job. FP8 layers multiply in FP8, although layers this small gain nothing from it.

    variant: a level, or CHANGED_START. steps: None for the family's own.
    """
    own, level = FAMILIES[family], "fp32" if variant == CHANGED_START else variant
    training = {"global_batch_size": 16, "seed": seed, **own["training"]}
    training["steps"] = steps or training["steps"]
    training["schedule"] = {"warmup_steps": max(1, training["steps"] // 10)}
    precision = {"level": level} | ({"auto_filter": False} if LEVELS[level].has_own_fp8 else {})
    name = f"{family}-{variant.replace(', ', '-').replace(' ', '-')}"
    return {"name": name, "model": own["model"], "precision": precision, "data": data, "training": training}


def train(document: Mapping[str, Any], *, start_changed: bool = False) -> Run:
    """Run a job in this process on one CPU thread."""
    config, reporter = resolve(JobSpec.model_validate(document), RankEnv()), _Losses()
    make = _ChangedStart if start_changed else Trainer
    with tempfile.TemporaryDirectory() as folder, Mesh(config.env, torch.device("cpu")) as mesh:
        summary = make(config, mesh, reporter, Path(folder)).run()  # type: ignore[arg-type]
    return Run(reporter.losses, summary.evaluation_loss, summary.evaluation_metrics)


def kept_run(folder: Path, document: Mapping[str, Any]) -> Run | None:
    """Return the finished run of a job, or None if there is none."""
    kept = _file_of(folder, document)
    return Run(**json.loads(kept.read_text())) if kept.exists() else None


def run_once(folder: Path, document: Mapping[str, Any], *, start_changed: bool = False) -> Run:
    """Return the run of a job, trained now unless it is kept in the folder."""
    if (found := kept_run(folder, document)) is not None:
        return found
    run, kept = train(document, start_changed=start_changed), _file_of(folder, document)
    unfinished = kept.with_suffix(f".{os.getpid()}.part")  # two processes may share the folder
    unfinished.write_text(json.dumps(asdict(run)))
    unfinished.rename(kept)
    return run


def _file_of(folder: Path, document: Mapping[str, Any]) -> Path:
    setting = {name: part for name, part in document.items() if name != "data"}  # the same data may lie in another folder
    digest = sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{document['name']}-seed{document['training']['seed']}-{digest}.json"


def table(family: str, steps: int | None, by_variant: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Format a family's rows. by_variant: the finished runs by variant and seed; one without a run of fp32's seeds says so."""
    references = by_variant.get("fp32", {})
    name = next((next(iter(run.metrics)) for runs in by_variant.values() for run in runs.values()), "metric")
    training = job_of(family, "fp32", 0, steps, {})["training"]
    lines = [
        f"## {family}",
        "",
        f"{training['steps']} steps of {training['global_batch_size']} "
        + (f"sequences of {training['sequence_length']} bytes" if "sequence_length" in training else "images")
        + f", learning rate {training['optimizer']['learning_rate']:g}.",
        "",
        f"| level | seeds | evaluation loss | gap to fp32 | {name} | difference to fp32, points |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for variant, runs in by_variant.items():
        seeds = sorted(runs.keys() & references.keys())
        if not seeds:
            lines.append(f"| {variant} | 0 | not run | | | |")
            continue
        own, base = [runs[seed] for seed in seeds], [references[seed] for seed in seeds]
        measured = f"{statistics.fmean(run.evaluation_loss for run in own):.4f}"
        accuracy = f"{100 * statistics.fmean(run.metrics[name] for run in own):.2f} %"
        if variant == "fp32" or len(seeds) < 2:
            gap, points = ("", "") if variant == "fp32" else ("one seed: no interval", "")
        else:
            gap = str(Interval.of(gaps([run.evaluation_loss for run in own], [run.evaluation_loss for run in base])))
            points = str(Interval.of([a.metrics[name] - b.metrics[name] for a, b in zip(own, base, strict=True)]))
            points = points.removesuffix(" %")
        lines.append(f"| {variant} | {len(seeds)} | {measured} | {gap} | {accuracy} | {points} |")
    return [*lines, ""]


def report(command: str, steps: int | None, num_seeds: int, found: Mapping[str, Mapping[str, Mapping[int, Run]]]) -> str:
    """Format the whole report in Markdown. found: the finished runs by family, variant and seed."""
    num_found = sum(len(runs) for by_variant in found.values() for runs in by_variant.values())
    num_wanted = num_seeds * sum(len(by_variant) for by_variant in found.values())
    lines = [
        f"# The families at every level, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`{command}` on {platform.machine()}, {os.cpu_count()} cores, shared and loaded, one thread; torch "
        f"{torch.__version__}, Python {platform.python_version()}. Evaluation loss: on the held-out part after the last step, "
        "nats. Gaps are paired by seed: mean ± 95 % interval, Student's t; a positive gap of the loss is worse, a positive "
        f"difference of the accuracy is better. The row `{CHANGED_START}` shows what chance does: its initial values differ "
        f"by {START_CHANGE:g} of each.",
        "",
        f"{num_found} of {num_wanted} runs are finished. Rows with fewer than {num_seeds} seeds: the rest was not run.",
        "",
    ]
    for family, by_variant in found.items():
        lines += table(family, steps, by_variant)
    return "\n".join(lines)


def mean_curves(by_variant: Mapping[str, Mapping[int, Run]]) -> list[curves.Run]:
    """The mean loss of each step over the seeds that a variant and fp32 both have; variants without any are left out."""
    references, found = by_variant.get("fp32", {}), []
    for variant, runs in by_variant.items():
        shared = [runs[seed].losses for seed in sorted(runs.keys() & references.keys())]
        if shared:
            found.append(curves.Run(variant, [statistics.fmean(each) for each in zip(*shared, strict=True)], 0.0, 0.0))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, seed by seed, then print and write the report, and draw the curves. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: each family's own")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--levels", default=",".join(LEVELS), help="fp32 is always among them, from two starts")
    parser.add_argument("--runs", type=Path, required=True, help="folder of data and finished runs; these are not repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the plot")
    parser.add_argument("--report-only", action="store_true", help="train nothing: report the runs that are finished")
    options = parser.parse_args(arguments)
    families, levels = options.families.split(","), options.levels.split(",")
    for name, given, allowed in (("families", families, FAMILIES), ("levels", levels, LEVELS)):
        if unknown := sorted(set(given) - set(allowed)):
            parser.error(f"--{name} has {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    if not 1 <= options.seeds <= MAX_VALUES:
        parser.error(f"--seeds is {options.seeds}; allowed: 1 to {MAX_VALUES}")
    torch.set_num_threads(1)
    data = write_data(options.runs)
    variants = list(dict.fromkeys(["fp32", CHANGED_START, *levels]))
    found: dict[str, dict[str, dict[int, Run]]] = {family: {variant: {} for variant in variants} for family in families}
    for seed in range(options.seeds):  # whoever stops it has whole seeds of all families
        for family in families:
            for variant in variants:
                document = job_of(family, variant, seed, options.steps, data[family])
                run = kept_run(options.runs, document)
                if run is None and not options.report_only:
                    run = run_once(options.runs, document, start_changed=variant == CHANGED_START)
                if run is not None:
                    found[family][variant][seed] = run
                    sys.stderr.write(f"seed {seed}, {family}, {variant}: {run.evaluation_loss:.4f}\n")
    command = f"python -m benchmarks.families --seeds {options.seeds} --runs build/families"
    if options.steps is not None:
        command += f" --steps {options.steps}"
    text = report(command, options.steps, options.seeds, found)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.now(UTC):%Y-%m-%d}-families"
    rows = {f"{family}: training loss (nats, smoothed)": mean_curves(by_variant) for family, by_variant in found.items()}
    if drawn := {title: means for title, means in rows.items() if means}:
        draw_rows(drawn, options.out / f"{name}.png", GAP_LIMIT)
        text += f"\n![curves]({name}.png)\n"
    (options.out / f"{name}.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
