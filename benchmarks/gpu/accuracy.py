"""Compare the losses of levels with bf16-amp: GPT 125 M, 2,000 steps on the Python standard library's source, on one GPU.

    python -m benchmarks.gpu.accuracy [--out FOLDER] [--runs FOLDER] [--smoke]

writes a dated table and the curves. Initial values, batches and their order are the same for every level. Finished levels are
kept in --runs and not repeated. Schedule, text and smoothing are those of `benchmarks/curves.py`.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from api_schemas.models.gpt import gpt_sizes
from benchmarks.curves import Run, Setting, draw, gap, load_source_text
from benchmarks.gpu.networks import in_fp8
from benchmarks.gpu.report import Report, Row, Target
from benchmarks.gpu.session import Case, Section, Session, parser, run
from worker import initialize, memory_report
from worker.data.windows import TokenWindows
from worker.models.gpt import GPT

REFERENCE = "bf16-amp"
TARGETS = {
    "O2": Target(0.005, 0.0025, lower_is_better=True, style=".2%"),
    "O3-split": Target(0.007, 0.004, lower_is_better=True, style=".2%"),
}
STEPS = 2000
SIZES = gpt_sizes(1024, 10, 16, 256, 512)
SETTING = Setting(SIZES, batch_size=16, steps=STEPS, warmup_steps=100, learning_rate=6e-4)
SMOKE = Setting(
    gpt_sizes(32, 2, 2, 256, 32),
    batch_size=2,
    steps=10,
    warmup_steps=2,
)
LEVEL_S = 100.0
"""Roughly the time of one level on an H200; a level does not start if less time is left."""


def sections(session: Session, report: Report) -> list[Section]:
    """Return one case per level, then the curves."""
    setting = SMOKE if session.smoke else replace(SETTING, steps=session.options.steps)
    data = load_source_text(setting.sizes.max_sequence_length)
    num_tokens = setting.steps * setting.batch_size * setting.sizes.max_sequence_length
    num_bytes = data.facts["train_bytes"]
    num_parameters = GPT(setting.sizes).num_parameters
    report.header += [
        "",
        f"GPT of {num_parameters:,} parameters; {setting.steps} steps of {setting.batch_size} × "
        f"{setting.sizes.max_sequence_length} tokens: {num_tokens:,}, {num_tokens / num_bytes:.2f} times the {num_bytes:,.0f} "
        f"bytes of the Python standard library's source. Learning rate {setting.learning_rate:g}, seed {setting.seed}. "
        "Final loss: mean of the last tenth of the steps, nats per byte.",
    ]
    runs: list[Run] = []
    levels = (REFERENCE, *(level for level in session.options.levels.split(",") if level != REFERENCE))
    cases = [Case(level, partial(_level, session, level, setting, data, runs), LEVEL_S) for level in levels]
    return [Section("Loss", [*cases, Case("curves", partial(_curves, report, runs))], share=1)]


def train_curve(level: str, setting: Setting, data: TokenWindows, device: torch.device, *, compiled: bool) -> Run:
    """Train one level and return its losses. The host waits for the device only every 50 steps."""
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
    began = time.perf_counter()
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate_at(step)
        batch = data.train_batch(step * setting.batch_size, setting.batch_size)
        optimizer.zero_grad()
        loss = model.loss({name: part.to(device, non_blocking=True) for name, part in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 and not math.isfinite(loss.item()):
            raise ValueError(f"the loss of step {step} is {loss.item()}")
    values = torch.stack(losses).tolist()
    held = sum(memory_report(model, optimizer, converted_only=True).values())
    step_s = (time.perf_counter() - began) / setting.steps
    return Run(level, values, held / model.octet_report.num_converted_parameters, step_s)


def _level(session: Session, level: str, setting: Setting, data: TokenWindows, runs: list[Run]) -> Iterator[Row]:
    kept: Path = session.options.runs / f"{level}-{setting.steps}.json"
    if kept.exists():
        done = Run(**json.loads(kept.read_text()))
    else:
        compiled = not (session.options.eager or session.smoke)
        done = train_curve(level, setting, data, session.device, compiled=compiled)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(done)))
    runs.append(done)
    measured = f"final loss {done.final_loss:.4f}"
    note = f"{done.bytes_per_parameter:.2f} bytes per parameter of converted layers, {done.step_time_s * 1e3:.0f} ms a step"
    if level == REFERENCE or runs[0].level != REFERENCE:
        yield Row(level, measured, note=note)
        return
    yield Row(f"{level}: gap", measured, f"{REFERENCE} {runs[0].final_loss:.4f}", gap(done, runs[0]), TARGETS.get(level), note)


def _curves(report: Report, runs: list[Run]) -> Iterator[Row]:
    path = report.path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, path)
    report.closing += [f"![curves]({path.name})", ""]
    yield Row("curves", path.name, note=", ".join(done.level for done in runs))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=Path, default=Path("build/gpu-accuracy"), help="folder of finished levels")
    arguments.add_argument("--levels", default="O2,O3-split", help=f"levels to run; {REFERENCE} always runs, as the first")
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--eager", action="store_true", help="do not compile the blocks")
    return run("accuracy", "Loss against bf16-amp on one GPU", arguments.parse_args(), sections)


if __name__ == "__main__":
    raise SystemExit(main())
