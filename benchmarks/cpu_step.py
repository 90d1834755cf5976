"""Time a training step of the demo's model at each level on one CPU thread, relative to fp32.

    python -m benchmarks.cpu_step --levels O2,O3-split --write

The levels take turns step by step, so that other load on the machine affects all of them equally. The limit: O2 takes less
than 1.6 times the step of fp32.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from api_schemas.models.gpt import gpt_sizes
from worker import initialize
from worker.models.gpt import GPT

SIZES = gpt_sizes(128, 4, 4, 256, 256)
BATCH_SIZE = 16
LIMIT = 1.6


def step_of(level: str) -> Callable[[], None]:
    """Return a training step of a fresh model at the level."""
    model = GPT(SIZES)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level)
    tokens = torch.randint(0, 256, (BATCH_SIZE, SIZES.max_sequence_length + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(levels: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each level, without the first rounds, which allocate memory."""
    steps = {level: step_of(level) for level in levels}
    times_s: dict[str, list[float]] = {level: [] for level in levels}
    for round_number in range(num_rounds + 2):
        for level, step in steps.items():
            started_at = time.perf_counter()
            step()
            if round_number >= 2:
                times_s[level].append(time.perf_counter() - started_at)
    return times_s


def main() -> int:
    """Print and write the table. Returns 1 if O2 is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default="O2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times_s = measure(list(dict.fromkeys(["fp32", *options.levels.split(",")])), options.rounds)
    ratio = {
        level: statistics.median(a / b for a, b in zip(times, times_s["fp32"], strict=True)) for level, times in times_s.items()
    }
    lines = [
        f"# A training step on CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.cpu_step {' '.join(sys.argv[1:])}` on {platform.machine()}, 1 thread; "
        f"torch {torch.__version__}. GPT of hidden 128,",
        f"4 layers, 4 heads; {BATCH_SIZE} x {SIZES.max_sequence_length} tokens; {options.rounds} steps of each level in turn.",
        "",
        "| level | median step (s) | fastest (s) | median of step / fp32 step |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {level} | {statistics.median(times):.3f} | {min(times):.3f} | {ratio[level]:.2f} |"
        for level, times in times_s.items()
    ]
    report = "\n".join(lines) + "\n"
    sys.stdout.write(report)
    if options.write:
        (Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-cpu-step.md").write_text(report)
    return int(ratio.get("O2", 0) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
