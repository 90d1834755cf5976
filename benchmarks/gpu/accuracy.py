"""Compare the losses of levels with bf16-amp on one GPU: GPTs on the Python standard library's source.

    python -m benchmarks.gpu.accuracy [--out FOLDER] [--runs FOLDER] [--seeds 5] [--smoke]

writes a dated table and the curves. Section "Loss": each level with several seeds at 30 M parameters, and the mean gap with its
95 % interval. Section "Time to the same loss": bf16-amp and O2 once at 125 M. Initial values, batches and their order are
the same for every level. Finished runs are kept in --runs and not repeated. Schedule, text and smoothing are those of
`benchmarks/curves.py`.
"""

import importlib.util
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from benchmarks.curves import Run, Setting, draw, load_source_text, mean_curve, smooth
from benchmarks.gpu.networks import in_fp8
from benchmarks.gpu.report import NOT_REACHED, Report, Row, Target
from benchmarks.gpu.session import Case, Section, Session, missing, parser, run
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.gpt import gpt_sizes
from octet.api_schemas.paired import Interval, gaps
from octet.worker import initialize, memory_report
from octet.worker.data.windows import TokenWindows
from octet.worker.models.gpt import GPT

REFERENCE = "bf16-amp"
TARGETS = {
    "O2": Target(0.005, 0.0025, lower_is_better=True, style=".2%"),
    "O3-split": Target(0.007, 0.004, lower_is_better=True, style=".2%"),
}
STEPS = 2000
TIMED = "O2"
TO_LOSS = f"{TIMED}: time to the same loss"
TIME_TO_LOSS = Target(1.10, 1.20)
SMALL = Setting(gpt_sizes(512, 8, 8, 256, 512), batch_size=16, steps=1000, warmup_steps=100, learning_rate=6e-4)
LARGE = Setting(gpt_sizes(1024, 10, 16, 256, 512), batch_size=16, steps=STEPS, warmup_steps=100, learning_rate=6e-4)
SMOKE = Setting(
    gpt_sizes(32, 2, 2, 256, 32),
    batch_size=2,
    steps=10,
    warmup_steps=2,
)
SMALL_S, LARGE_S = 15.0, 100.0
"""Roughly the time of one run on an H200, estimated, at 125 M of STEPS steps; a run does not start if less time is left."""
Key = tuple[str, int]
"""Level and seed."""


def sections(session: Session, report: Report) -> list[Section]:
    """Return a case for each run, seed by seed, so that a run that is stopped has whole seeds; then the comparisons."""
    options = session.options
    small = SMOKE if session.smoke else SMALL
    large = SMOKE if session.smoke else replace(LARGE, steps=options.steps)
    data = load_source_text(small.sizes.max_sequence_length)
    levels = (REFERENCE, *(level for level in options.levels.split(",") if level != REFERENCE))
    report.header += ["", _said("Loss", small, data), "", _said("Time to the same loss", large, data)]
    runs: dict[Key, Run] = {}
    timed: dict[Key, Run] = {}
    cases = [
        Case(f"{level}, seed {seed}", partial(_train, session, level, replace(small, seed=seed), data, runs), SMALL_S)
        for seed in range(options.seeds)
        for level in levels
    ]
    cases += [Case("gaps", partial(_gaps, runs, levels), 0.0), Case("curves", partial(_curves, report, runs, levels), 0.0)]
    large_s = LARGE_S * options.steps / STEPS
    to_loss = [Case(level, partial(_train, session, level, large, data, timed), large_s) for level in (REFERENCE, TIMED)]
    to_loss.append(Case("time to the same loss", partial(_time_to_loss, timed), 0.0))
    shares_s = sum(case.expected_s for case in cases), sum(case.expected_s for case in to_loss)
    return [Section("Loss", cases, shares_s[0]), Section("Time to the same loss", to_loss, shares_s[1])]


def _said(name: str, setting: Setting, data: TokenWindows) -> str:
    num_tokens = setting.steps * setting.batch_size * setting.sizes.max_sequence_length
    num_bytes = data.facts["train_bytes"]
    return (
        f"{name}: GPT of {setting.build_model().num_parameters:,} parameters; {setting.steps} steps of {setting.batch_size} × "
        f"{setting.sizes.max_sequence_length} tokens: {num_tokens:,}, {num_tokens / num_bytes:.2f} times the {num_bytes:,.0f} "
        f"bytes of the Python standard library's source. Learning rate {setting.learning_rate:g}. "
        "Final loss: mean of the last tenth of the steps, nats per byte."
    )


def train_curve(level: str, setting: Setting, data: TokenWindows, device: torch.device, *, compiled: bool) -> Run:
    """Train one level and return its losses. The host waits for the device only every 50 steps; the first 50 are not timed."""
    model: nn.Module = GPT(setting.sizes, seed=setting.seed).to(device)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=setting.weight_decay
    )
    model, optimizer = initialize(model, adamw, opt_level=level, seed=setting.seed, statistics_every=0, **in_fp8(level))
    assert optimizer is not None
    if compiled:
        torch.compiler.reset()
        for block in model.get_submodule("blocks").children():
            block.compile(dynamic=False)
    losses: list[Tensor] = []
    began, num_untimed = time.perf_counter(), 0
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate_at(step)
        batch = data.train_batch((setting.seed * setting.steps + step) * setting.batch_size, setting.batch_size)
        optimizer.zero_grad()
        loss = model.loss({name: part.to(device, non_blocking=True) for name, part in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 and not math.isfinite(loss.item()):
            raise ValueError(f"the loss of step {step} is {loss.item()}")
        if step in (0, 50):  # the device is at rest, and the blocks are compiled
            began, num_untimed = time.perf_counter(), step + 1
    values = torch.stack(losses).tolist()
    held = sum(memory_report(model, optimizer, converted_only=True).values())
    step_s = (time.perf_counter() - began) / (setting.steps - num_untimed)
    return Run(level, values, held / model.octet_report.num_converted_parameters, step_s)


def _train(session: Session, level: str, setting: Setting, data: TokenWindows, runs: dict[Key, Run]) -> Iterator[Row]:
    """Train a level with a seed, or take the run that is kept."""
    name = f"{level}-{setting.sizes.hidden_size}-{setting.steps}-seed-{setting.seed}.json"
    kept: Path = session.options.runs / name
    if kept.exists():
        done = Run(**json.loads(kept.read_text()))
    else:
        compiled = not (session.options.eager or session.smoke)
        done = train_curve(level, setting, data, session.device, compiled=compiled)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(done)))
    runs[level, setting.seed] = done
    note = f"{done.bytes_per_parameter:.2f} bytes per parameter of converted layers, {done.step_time_s * 1e3:.0f} ms a step"
    yield Row(f"{level}, seed {setting.seed}", f"final loss {done.final_loss:.4f}", note=note)


def _gaps(runs: dict[Key, Run], levels: Sequence[str]) -> Iterator[Row]:
    """Compare each level with the reference over the seeds that both have."""
    for level in levels[1:]:
        seeds = [seed for of, seed in runs if of == level and (REFERENCE, seed) in runs]
        if not seeds:
            yield Row(f"{level}: gap", NOT_REACHED, note="no seed was trained at both levels")
            continue
        losses, references = ([runs[of, seed].final_loss for seed in seeds] for of in (level, REFERENCE))
        found = gaps(losses, references)
        interval = Interval.of(found) if len(seeds) > 1 else None
        measured = f"mean final loss {fmean(losses):.4f}, gap {interval or 'without an interval: one seed'}"
        note = f"{len(seeds)} seeds: {', '.join(f'{100 * each:+.2f}' for each in found)} %"
        if interval and level in TARGETS:
            note += f"; the interval against {TARGETS[level].ship:.2%}: {interval.verdict(TARGETS[level].ship)}"
        reference = f"{REFERENCE} {fmean(references):.4f}"
        yield Row(f"{level}: gap", measured, reference, fmean(found), TARGETS.get(level), note, style=".2%")


def _time_to_loss(runs: dict[Key, Run]) -> Iterator[Row]:
    """Compare the times at which both have reached the loss that both reach."""
    figure = TO_LOSS
    if (REFERENCE, 0) not in runs or (TIMED, 0) not in runs:
        yield Row(figure, NOT_REACHED, note=f"it needs {REFERENCE} and {TIMED}")
        return
    ours, reference = runs[TIMED, 0], runs[REFERENCE, 0]
    loss, (our_s, reference_s) = time_to_same_loss(ours, reference)
    note = f"to a smoothed loss of {loss:.4f}, the lowest that both reach; without the first 50 steps' compilation"
    yield Row(figure, f"{our_s:.1f} s", f"{REFERENCE} {reference_s:.1f} s", reference_s / our_s, TIME_TO_LOSS, note)


def time_to_same_loss(*runs: Run) -> tuple[float, tuple[float, ...]]:
    """Return the lowest smoothed loss that all runs reach, and the seconds that each trains to get there."""
    curves = [smooth(run.losses) for run in runs]
    loss = max(min(curve) for curve in curves)
    steps = [next(step for step, value in enumerate(curve, start=1) if value <= loss) for curve in curves]
    return loss, tuple(num_steps * run.step_time_s for num_steps, run in zip(steps, runs, strict=True))


def _curves(report: Report, runs: dict[Key, Run], levels: Sequence[str]) -> Iterator[Row]:
    if importlib.util.find_spec("matplotlib") is None:
        yield missing("curves", "matplotlib")
        return
    path = report.path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    by_level = {level: [run for (of, _), run in runs.items() if of == level] for level in levels}
    draw([mean_curve(each) for each in by_level.values() if each], path)
    report.closing += [f"![curves]({path.name})", ""]
    yield Row("curves", path.name, note=", ".join(level for level, each in by_level.items() if each))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=Path, default=Path("build/gpu-accuracy"), help="folder of finished levels")
    arguments.add_argument("--levels", default="O2,O3-split", help=f"levels to run; {REFERENCE} always runs, as the first")
    arguments.add_argument("--seeds", type=int, default=5, help="2 or more for an interval")
    arguments.add_argument("--steps", type=int, default=STEPS, help="of the runs at 125 M")
    arguments.add_argument("--eager", action="store_true", help="do not compile the blocks")
    options = arguments.parse_args()
    if options.seeds < 1:
        arguments.error(f"--seeds is {options.seeds}; allowed: 1 or more.")
    unknown = sorted(set(options.levels.split(",")) - set(LEVELS))
    if unknown:
        arguments.error(f"--levels has {', '.join(unknown)}; allowed: {', '.join(LEVELS)}.")
    return run("accuracy", "Loss against bf16-amp on one GPU", options, sections)


if __name__ == "__main__":
    raise SystemExit(main())
