"""Time the host's share of a training step at each level, with launches stubbed, relative to bf16-amp.

    python -m benchmarks.host_time [--levels O2,te] [--compile] [--profile LEVEL] [--write]

`stubbed_launches.py` says what runs. The levels take turns step by step, so that other load affects all of them equally; times
are of the process's CPU. bf16-amp has torch's fused AdamW. The limit: O2 takes at most 1.2 times the host time of bf16-amp.
"""

import argparse
import cProfile
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from api_schemas.models.gpt import gpt_sizes
from benchmarks.gpu.networks import Way, in_fp8, prepare
from benchmarks.stubbed_launches import as_cuda_tensors, counted_launches, stubbed_launches
from worker.blocks import compile_blocks
from worker.models.gpt import GPT
from worker.optim import LowBitOptimizer
from worker.optim.clip import clip_grad_norm_

REFERENCE = "bf16-amp"
LEVELS = ("te", "O2", "O3-split")
LIMITED, LIMIT = "O2", 1.2
SIZES = gpt_sizes(64, 12, 2, 256, 16)
PHASES = ("forward", "backward", "optimizer")
_WARM_UP_ROUNDS = 3

Phases = dict[str, Callable[[], Any]]


class Ops(TorchDispatchMode):
    """Counts torch's dispatches: how many ops a step issues."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def phases_of(level: str, *, compiled: bool) -> Phases:
    """Return the three phases of a training step of a fresh model at the level."""
    torch.manual_seed(0)
    way = Way(level, level, own_optimizer=level != REFERENCE, options=in_fp8(level))
    with as_cuda_tensors():
        model, optimizer = prepare(GPT(SIZES), way, SIZES.max_sequence_length)
    if compiled:
        compile_blocks(model)
    parameters = list(model.parameters())
    tokens = torch.randint(0, 256, (1, SIZES.max_sequence_length + 1))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss)  # type: ignore[operator]

    def step() -> None:
        if isinstance(optimizer, LowBitOptimizer):
            clip_grad_norm_(parameters, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "backward": lambda: losses.pop().backward(), "optimizer": step}


def take(phases: Phases) -> dict[str, float]:
    """Take one step; returns the CPU seconds of each phase."""
    taken = {}
    for name in PHASES:
        with as_cuda_tensors() if name == "optimizer" else nullcontext():
            began = time.process_time()
            phases[name]()
            taken[name] = time.process_time() - began
    return taken


def measure(steps: dict[str, Phases], num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the median CPU seconds of each phase of each level's step."""
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(num_rounds + _WARM_UP_ROUNDS):
        rounds.append({level: take(phases) for level, phases in steps.items()})
    kept = rounds[_WARM_UP_ROUNDS:]
    return {level: {phase: statistics.median(each[level][phase] for each in kept) for phase in PHASES} for level in steps}


def count(phases: Phases) -> dict[str, int]:
    """Return how many Triton launches and torch ops a step has; ops inside compiled blocks are not seen."""
    with counted_launches() as launches:
        take(phases)
    with Ops() as ops:
        take(phases)
    return {"launches": launches.num_launches, "ops": ops.num_ops}


def profile(level: str, num_steps: int, *, compiled: bool) -> None:
    """Print where the Python time of a level's steps goes."""
    phases = phases_of(level, compiled=compiled)
    for _ in range(_WARM_UP_ROUNDS):
        take(phases)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        take(phases)
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(45)


def table(found: dict[str, dict[str, float]], counts: dict[str, dict[str, int]], num_rounds: int) -> str:
    """Format the medians as a page."""
    reference = sum(found[REFERENCE].values())
    columns = [*(f"{phase} (ms)" for phase in PHASES), "step (ms)", f"÷ {REFERENCE}", "Triton launches", "torch ops"]
    lines = [
        f"# Host time of a training step, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.host_time {' '.join(sys.argv[1:])}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread, 2 shared and loaded cores. GPT of {SIZES.num_layers} layers, hidden size "
        f"{SIZES.hidden_size}, {SIZES.max_sequence_length} tokens; launches stubbed. Median CPU time of {num_rounds} steps.",
        "",
        f"| level | {' | '.join(columns)} |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for level, phases in found.items():
        whole = sum(phases.values())
        cells = [f"{phases[phase] * 1e3:.2f}" for phase in PHASES] + [f"{whole * 1e3:.2f}", f"{whole / reference:.2f}"]
        cells += [str(counts[level]["launches"]), str(counts[level]["ops"])]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print and write the table. Returns 1 if O2 is above the limit."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default=",".join(LEVELS), help="separated by commas; compared with bf16-amp")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="compile each block, as jobs do on CUDA")
    parser.add_argument("--profile", help="print the profile of this level's steps instead of the table")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with stubbed_launches():
        if options.profile:
            profile(options.profile, options.rounds, compiled=options.compile)
            return 0
        levels = [REFERENCE, *options.levels.split(",")]
        steps = {level: phases_of(level, compiled=options.compile) for level in levels}
        found = measure(steps, options.rounds)
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if options.compile else 0
        counts = {level: count(phases) for level, phases in steps.items()}
    report = table(found, counts, options.rounds)
    if options.compile:
        report += f"\nCompiled graphs: {num_graphs}, for all levels together.\n"
    sys.stdout.write(report)
    if options.write:
        name = f"{datetime.now(UTC):%Y-%m-%d}-host-time{'-compiled' if options.compile else ''}.md"
        (Path(__file__).parent / "results" / name).write_text(report)
    ratio = sum(found[LIMITED].values()) / sum(found[REFERENCE].values()) if LIMITED in found else 0.0
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
