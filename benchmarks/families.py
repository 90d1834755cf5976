"""Compare every level with fp32 in jobs of the four families of the papers, at tiny size on real data, paired by seed.

    python -m benchmarks.families --seeds 5 --runs build/families

GPT and RoBERTa read the source text of Python's package `email`, byte by byte; DeiT and Swin the digits that scikit-learn
ships. A run is a whole job: the trainer of a rank, its optimizer, schedule and evaluation on the held-out part. Runs of one
seed share initial values and batches. Finished runs are kept in the folder of --runs, so that a stopped benchmark goes on
where it was. The table says what was not run. The test suite runs a short version.
"""

import argparse
import email
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from api_schemas import JobSpec, ReportBody, StepReport
from api_schemas.levels import LEVELS
from benchmarks.digits import read_digits
from benchmarks.paired import MAX_VALUES, Interval, gaps
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.train import Trainer

RESULTS = Path(__file__).parent / "results"
SIDE = 16
TEXT = {"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2}, "training": {"sequence_length": 64}}
ADAMW_OF_VISION = {"learning_rate": 3e-3, "betas": [0.9, 0.999], "weight_decay": 0.05}
DIGITS = {"image_size": SIDE, "num_channels": 1, "num_classes": 10}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {
        "model": {**TEXT["model"], "family": "gpt", "vocab_size": 256, "max_sequence_length": 64},
        "training": {**TEXT["training"], "optimizer": {"learning_rate": 3e-3}},
    },
    "roberta": {
        "model": {**TEXT["model"], "preset": "roberta-tiny"},
        "training": {**TEXT["training"], "optimizer": {"learning_rate": 3e-3, "betas": [0.9, 0.98], "eps": 1e-6}},
    },
    "deit": {
        "model": {**DIGITS, "preset": "deit-tiny", "hidden_size": 64, "num_layers": 2, "num_heads": 2},
        "training": {"global_batch_size": 64, "optimizer": ADAMW_OF_VISION},
    },
    "swin": {
        "model": {**DIGITS, "preset": "swin-tiny", "patch_size": 2, "depths": [1, 1]},
        "training": {"global_batch_size": 64, "optimizer": ADAMW_OF_VISION},
    },
}
"""A job of each family, without what all have in common."""


@dataclass(frozen=True)
class Run:
    """A finished job. losses: of every step. metrics: of the last evaluation, by name."""

    losses: list[float]
    evaluation_loss: float
    metrics: dict[str, float]


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


def job_of(family: str, level: str, seed: int, steps: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's job. FP8 layers multiply in FP8, although layers this small gain nothing from it."""
    own = FAMILIES[family]
    training = {
        "steps": steps,
        "global_batch_size": 16,
        "schedule": {"warmup_steps": max(1, steps // 10)},
        "seed": seed,
        **own["training"],
    }
    precision = {"level": level} | ({"auto_filter": False} if LEVELS[level].has_own_fp8 else {})
    return {"name": f"{family}-{level}", "model": own["model"], "precision": precision, "data": data, "training": training}


def train(document: Mapping[str, Any]) -> Run:
    """Run a job in this process on one CPU thread."""
    config, reporter = resolve(JobSpec.model_validate(document), RankEnv()), _Losses()
    with tempfile.TemporaryDirectory() as folder, Mesh(config.env, torch.device("cpu")) as mesh:
        summary = Trainer(config, mesh, reporter, Path(folder)).run()  # type: ignore[arg-type]
    return Run(reporter.losses, summary.evaluation_loss, summary.evaluation_metrics)


def kept_run(folder: Path, document: Mapping[str, Any]) -> Callable[[], Run | None]:
    """Return a function that reads the finished run of a job, or returns None if there is none."""
    kept = _file_of(folder, document)
    return lambda: Run(**json.loads(kept.read_text())) if kept.exists() else None


def run_once(folder: Path, document: Mapping[str, Any]) -> Run:
    """Return the run of a job, trained now unless it is kept in the folder."""
    if (found := kept_run(folder, document)()) is not None:
        return found
    run, kept = train(document), _file_of(folder, document)
    unfinished = kept.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(run)))
    unfinished.rename(kept)
    return run


def _file_of(folder: Path, document: Mapping[str, Any]) -> Path:
    setting = {name: part for name, part in document.items() if name != "data"}  # the same data may lie in another folder
    digest = sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{document['name']}-seed{document['training']['seed']}-{digest}.json"


def table(family: str, by_level: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Format a family's rows. by_level: the finished runs by level and seed; levels without a run of fp32's seeds say so."""
    references = by_level.get("fp32", {})
    name = next((next(iter(run.metrics)) for runs in by_level.values() for run in runs.values()), "metric")
    lines = [
        f"## {family}",
        "",
        f"| level | seeds | evaluation loss | gap to fp32 | {name} | difference to fp32, points |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for level, runs in by_level.items():
        seeds = sorted(runs.keys() & references.keys())
        if not seeds:
            lines.append(f"| {level} | 0 | not run | | | |")
            continue
        own, base = [runs[seed] for seed in seeds], [references[seed] for seed in seeds]
        measured = f"{statistics.fmean(run.evaluation_loss for run in own):.4f}"
        accuracy = f"{100 * statistics.fmean(run.metrics[name] for run in own):.2f} %"
        if level == "fp32" or len(seeds) < 2:
            gap, points = ("", "") if level == "fp32" else ("one seed: no interval", "")
        else:
            gap = str(Interval.of(gaps([run.evaluation_loss for run in own], [run.evaluation_loss for run in base])))
            points = str(Interval.of([a.metrics[name] - b.metrics[name] for a, b in zip(own, base, strict=True)]))
            points = points.removesuffix(" %")
        lines.append(f"| {level} | {len(seeds)} | {measured} | {gap} | {accuracy} | {points} |")
    return [*lines, ""]


def report(command: str, steps: int, num_seeds: int, found: Mapping[str, Mapping[str, Mapping[int, Run]]]) -> str:
    """Format the whole report in Markdown. found: the finished runs by family, level and seed."""
    num_found = sum(len(runs) for by_level in found.values() for runs in by_level.values())
    num_wanted = num_seeds * sum(len(by_level) for by_level in found.values())
    lines = [
        f"# The families at every level, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`{command}` on {platform.machine()}, {os.cpu_count()} cores, shared and loaded, one thread; torch "
        f"{torch.__version__}, Python {platform.python_version()}. {steps} steps of 16 sequences or 64 images. Evaluation "
        "loss: on the held-out part after the last step, nats. Gaps are paired by seed: mean ± 95 % interval, Student's t; "
        "a positive gap of the loss is worse, a positive difference of the accuracy is better.",
        "",
        f"{num_found} of {num_wanted} runs are finished. Rows with fewer than {num_seeds} seeds: the rest was not run.",
        "",
    ]
    for family, by_level in found.items():
        lines += table(family, by_level)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, seed by seed, then print and write the report. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--levels", default=",".join(LEVELS), help="fp32 is always among them")
    parser.add_argument("--runs", type=Path, required=True, help="folder of data and finished runs; these are not repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    parser.add_argument("--report-only", action="store_true", help="train nothing: report the runs that are finished")
    options = parser.parse_args(arguments)
    families, levels = options.families.split(","), list(dict.fromkeys(["fp32", *options.levels.split(",")]))
    for name, given, allowed in (("families", families, FAMILIES), ("levels", levels, LEVELS)):
        if unknown := sorted(set(given) - set(allowed)):
            parser.error(f"--{name} has {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    if not 1 <= options.seeds <= MAX_VALUES:
        parser.error(f"--seeds is {options.seeds}; allowed: 1 to {MAX_VALUES}")
    torch.set_num_threads(1)
    data = write_data(options.runs)
    found: dict[str, dict[str, dict[int, Run]]] = {family: {level: {} for level in levels} for family in families}
    for seed in range(options.seeds):  # whoever stops it has whole seeds of all families
        for family in families:
            for level in levels:
                document = job_of(family, level, seed, options.steps, data[family])
                run = kept_run(options.runs, document)() if options.report_only else run_once(options.runs, document)
                if run is not None:
                    found[family][level][seed] = run
                    sys.stderr.write(f"seed {seed}, {family}, {level}: {run.evaluation_loss:.4f}\n")
    command = f"python -m benchmarks.families --seeds {options.seeds} --steps {options.steps} --runs build/families"
    text = report(command, options.steps, options.seeds, found)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{datetime.now(UTC):%Y-%m-%d}-families.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
