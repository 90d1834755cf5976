"""Measure what it costs in loss to send gradients that are not in FP8 in bf16 instead of fp32, over real ranks (gloo).

    python -m benchmarks.wide_communication --levels bf16-amp te

trains the same GPT on the Python standard library's source with both dtypes, paired by seed, and writes a dated table to
benchmarks/results/: the mean relative gap of the final loss over five seeds with its 95 % interval. A third run, in fp32 from
initial weights that differ by a thousandth, shows how far chance moves the loss.
"""

import argparse
import json
import platform
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from api_schemas import GPTSizes, TextSpec
from tests.ports import free_port
from worker import initialize, parallelize
from worker.data.text import open_source
from worker.data.windows import TokenWindows
from worker.models.gpt import GPT

RESULTS = Path(__file__).parent / "results"
SIZES = GPTSizes(hidden_size=64, num_layers=2, num_heads=4, vocab_size=256, max_sequence_length=64)
NUM_RANKS, BATCH_SIZE, WARMUP_STEPS, LEARNING_RATE = 2, 8, 20, 1e-3
VARIANTS = {"fp32": ("fp32", 0.0), "bf16": ("bf16", 0.0), "other start": ("fp32", 1e-3)}
"""The dtype that gradients travel in, and the relative change of the initial weights."""
STUDENT_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided quantiles of Student's t, by the number of samples."""


@cache
def read_text(seed: int) -> TokenWindows:
    spec = TextSpec(path=sysconfig.get_path("stdlib"), include=("**/*.py",), exclude=("site-packages/**",))
    return open_source(spec, SIZES.max_sequence_length, seed=seed)


def train(level: str, variant: str, seed: int, steps: int) -> float:
    """Train on this rank and the others; the mean loss over all ranks of the last tenth of the steps, nats per byte."""
    wide_communication, change = VARIANTS[variant]
    rank, data = dist.get_rank(), read_text(seed)
    model = GPT(SIZES, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + change * torch.randn(parameter.shape, generator=noise))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = initialize(model, optimizer, opt_level=level, seed=seed)
    parallel = parallelize(model, optimizer, wide_communication=wide_communication)
    own_batch_size, losses = BATCH_SIZE // NUM_RANKS, []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / steps)
        loss = model.loss(data.train_batch(step * BATCH_SIZE + rank * own_batch_size, own_batch_size)).loss
        loss.backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    [total] = parallel.data.sum(float(torch.stack(losses[-(steps // 10) :]).mean()))
    return total / NUM_RANKS


def work(rank: int, port: int, options: argparse.Namespace, found_path: str) -> None:
    """Train all levels, variants and seeds as one of the ranks; rank 0 writes down each loss when it has it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    found: dict[str, list[float]] = {}
    for level in options.levels:
        for seed in range(options.seeds):
            for variant in VARIANTS:
                found.setdefault(f"{level}, {variant}", []).append(train(level, variant, seed, options.steps))
                if rank == 0:
                    Path(found_path).write_text(json.dumps(found))
    dist.destroy_process_group()


def gaps(losses: Sequence[float], references: Sequence[float]) -> str:
    """The mean relative gap, paired by seed, with its 95 % interval, in percent."""
    found = [100 * (loss / reference - 1) for loss, reference in zip(losses, references, strict=True)]
    half_width = STUDENT_T_95[len(found)] * statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.fmean(found):+.3f} ± {half_width:.3f}"


def table(found: dict[str, list[float]], options: argparse.Namespace) -> str:
    """Format the report in Markdown."""
    lines = [
        f"# Gradients sent in bf16, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.wide_communication --levels {' '.join(options.levels)} --steps {options.steps} --seeds "
        f"{options.seeds}` on {platform.machine()} ({NUM_RANKS} ranks, gloo); torch {torch.__version__}.",
        f"GPT of {GPT(SIZES).num_parameters:,} parameters, {options.steps} steps of {BATCH_SIZE} x "
        f"{SIZES.max_sequence_length} bytes of the standard library's source, learning rate {LEARNING_RATE}. Gap of the final "
        "loss (mean of the last tenth of the steps) to gradients sent in fp32, paired by seed: mean and 95 % interval. Another "
        "start: fp32 again, from initial weights that differ by a thousandth.",
        "",
        "| level | final loss, fp32 | gap of bf16 (%) | gap of another start (%) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for level in options.levels:
        fp32, bf16, other = (found[f"{level}, {variant}"] for variant in VARIANTS)
        lines.append(f"| {level} | {statistics.fmean(fp32):.4f} | {gaps(bf16, fp32)} | {gaps(other, fp32)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", nargs="+", default=["bf16-amp", "te", "ao"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(STUDENT_T_95))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found_path = Path(folder, "losses.json")
        torch.multiprocessing.spawn(work, (free_port(), options, str(found_path)), NUM_RANKS)
        report = table(json.loads(found_path.read_text()), options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{datetime.now(UTC):%Y-%m-%d}-wide-communication.md").write_text(report)
    sys.stdout.write(report)


if __name__ == "__main__":
    main()
