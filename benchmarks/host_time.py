"""Time the host's share of a training step at each level, with launches stubbed, relative to bf16-amp.

    python -m benchmarks.host_time [--levels O2,te] [--family llama] [--compile] [--recorded] [--windows] [--write]

`stubbed_launches.py` says what runs. The levels take turns step by step, so that other load affects all of them equally; times
are of the process's CPU. bf16-amp has torch's fused AdamW. The limits: O2 takes at most the host time
of bf16-amp with compiled blocks, and 1.25 times that eagerly.
--recorded: steps of the levels, and of bf16-amp once more, are replayed as CUDA graphs, as a job's are (`step_graph.py`), where
a replay is one call; bf16-amp's launched step stays the reference.
On a loaded machine medians of steps tell little: --windows adds up the least times of each block's passes instead.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures import Figure, add_write_option, command_line, write
from benchmarks.gpu.networks import Way, in_fp8, prepare
from benchmarks.stubbed_launches import as_cuda_tensors, counted_launches, stubbed_launches, triton_blocks
from octet.api_schemas.models.gpt import gpt_sizes
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker.metrics.table import Metrics
from octet.worker.models import gpt, llama
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.clip import clip_grad_norm_
from octet.worker.prepare.blocks import WARM_UP_STEPS, compile_blocks
from octet.worker.train.step_graph import StepGraph

REFERENCE = "bf16-amp"
LEVELS = ("te", "O2", "O3-split")
LIMITED, LIMIT_OF_EAGER, LIMIT_OF_COMPILED = "O2", 1.25, 1.0
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (gpt.GPT, gpt.Block, gpt_sizes(64, 12, 2, 256, 16)),
    "llama": (
        llama.Llama,
        llama.Block,
        LlamaSizes(
            hidden_size=64,
            intermediate_size=176,
            num_layers=12,
            num_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_sequence_length=16,
            rope_theta=1e4,
            tie_embeddings=False,
        ),
    ),
}
"""The model, the class of its blocks, and sizes."""
PHASES = ("forward", "backward", "optimizer")
RECORDED = ", recorded"
_WARM_UP_ROUNDS = WARM_UP_STEPS + 1
"""Rounds before a recorded step is replayed for the first time."""

Phases = dict[str, Callable[[], Any]]


class Ops(TorchDispatchMode):
    """Counts torch's dispatches: how many ops a step issues."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls: of functions in Python, and of functions in C from Python."""

    def __init__(self) -> None:
        self.num_python = self.num_c = 0

    def __call__(self, _frame: Any, event: str, _argument: Any) -> None:
        self.num_python += event == "call"
        self.num_c += event == "c_call"


class StubbedRecorder:
    """Stands for CUDA graphs: it records what work returns, and a replay is a call that does nothing."""

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run work once. Returns its result and the replay."""
        return work(), lambda: None

    def forget(self) -> None:
        """Release nothing."""


def phases_of(name: str, family: str = "gpt", *, compiled: bool) -> Phases:
    """Return the three phases of a training step of a fresh model. name: a level, or one with RECORDED behind it."""
    level = name.removesuffix(RECORDED)
    build, _, sizes = FAMILIES[family]
    torch.manual_seed(0)
    way = Way(level, level, own_optimizer=level != REFERENCE, options=in_fp8(level), graphed=name != level)
    with as_cuda_tensors():
        model, optimizer = prepare(build(sizes), way, sizes.max_sequence_length)
    if compiled:
        compile_blocks(model)
    parameters = list(model.parameters())
    tokens = torch.randint(0, 256, (1, sizes.max_sequence_length + 1))
    samples = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    losses: list[torch.Tensor] = []

    def clip(max_norm: float) -> Tensor:
        if isinstance(optimizer, LowBitOptimizer):
            return clip_grad_norm_(parameters, max_norm)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

    def forward() -> None:
        losses.append(model.loss(samples).loss)  # type: ignore[operator]

    def step() -> None:
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    if name.endswith(RECORDED):
        return _replayed(StepGraph(model, optimizer, recorder=StubbedRecorder()), samples, clip)
    return {"forward": forward, "backward": lambda: losses.pop().backward(), "optimizer": step}


def _replayed(graph: StepGraph, samples: dict[str, Tensor], clip: Callable[[float], Tensor]) -> Phases:
    """Return the phases of a step that is recorded and replayed: its passes, which are one recording, and the update."""
    metrics = Metrics()

    def passes() -> None:
        graph.begin_step()
        graph.forward_backward(samples, 1.0, metrics, is_first=True)

    def step() -> None:
        graph.update(clip, 1.0)
        graph.optimizer.zero_grad()
        graph.after_step()

    return {"forward": passes, "backward": lambda: None, "optimizer": step}


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


def measure_windows(steps: dict[str, Phases], family: str, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of each phase of each level's step: the sum of the least times of its windows.

    A window ends where a block's forward pass begins, or the gradient of the block's input is there: so it lasts a millisecond,
    which another process disturbs less often than it does a step.
    """
    found: dict[str, dict[str, list[float]]] = {level: {} for level in steps}
    with _noted(FAMILIES[family][1]) as marks:
        for round in range(num_rounds + _WARM_UP_ROUNDS):
            for level, phases in steps.items():
                for phase in PHASES:
                    with as_cuda_tensors() if phase == "optimizer" else nullcontext():
                        marks[:] = [time.thread_time()]
                        phases[phase]()
                        marks.append(time.thread_time())
                    windows = [end - start for start, end in pairwise(marks)]
                    if round >= _WARM_UP_ROUNDS:
                        least = found[level].setdefault(phase, windows)
                        found[level][phase] = [min(pair) for pair in zip(least, windows, strict=True)]
    return {level: {phase: sum(windows) for phase, windows in phases.items()} for level, phases in found.items()}


@contextmanager
def _noted(block: Any) -> Iterator[list[float]]:
    """Inside, the times at which blocks begin a pass, and at which their backward passes end, are added to the list."""
    marks: list[float] = []
    own = block.forward

    def forward(self: Any, hidden: Tensor, *others: Any) -> Tensor:
        marks.append(time.thread_time())
        if hidden.requires_grad:
            hidden.register_hook(lambda _gradient: marks.append(time.thread_time()))
        output: Tensor = own(self, hidden, *others)
        return output

    with mock.patch.object(block, "forward", forward):
        yield marks


def count(phases: Phases, *, compiled: bool) -> dict[str, int | str]:
    """Return how many Triton launches, torch ops and calls a step has; ops inside compiled blocks are not seen.

    Calls of compiled blocks are not counted: Dynamo compiles them once more for whoever listens.
    """
    calls = Calls()
    for phase in () if compiled else PHASES:
        with as_cuda_tensors() if phase == "optimizer" else nullcontext():
            sys.setprofile(calls)
            phases[phase]()
            sys.setprofile(None)
    with counted_launches() as launches:
        take(phases)
    with Ops() as ops:
        take(phases)
    of_host = {"Python": "", "C": ""} if compiled else {"Python": calls.num_python, "C": calls.num_c}
    return {**of_host, "launches": launches.num_launches, "ops": ops.num_ops}


def ratio_of(found: dict[str, dict[str, float]], level: str) -> float:
    """Return the host's time of a level's step over bf16-amp's."""
    return sum(found[level].values()) / sum(found[REFERENCE].values())


def limit(*, compiled: bool) -> float:
    """Return the largest ratio to bf16-amp's step that is allowed."""
    return LIMIT_OF_COMPILED if compiled else LIMIT_OF_EAGER


def figures(found: dict[str, dict[str, float]], family: str, *, compiled: bool) -> list[Figure]:
    """Return each level's ratio to bf16-amp's step."""
    network = f"{FAMILIES[family][0].__name__}, {'compiled blocks' if compiled else 'eager'}"
    names = [(f"host time: {network}, step at {level} / {REFERENCE}", level) for level in found if level != REFERENCE]
    goal = f"<= {limit(compiled=compiled):.2f}"
    return [Figure(name, f"{ratio_of(found, level):.2f}", goal=goal) for name, level in names]


def table(found: dict[str, dict[str, float]], counts: dict[str, dict[str, int | str]], family: str, what: str) -> str:
    """Format the times as a page. what: they are."""
    reference, sizes = sum(found[REFERENCE].values()), FAMILIES[family][2]
    columns = [*(f"{phase} (ms)" for phase in PHASES), "step (ms)", f"÷ {REFERENCE}"]
    columns += ["Python calls", "C calls", "Triton launches", "torch ops"]
    lines = [
        f"# Host time of a training step, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.host_time {' '.join(sys.argv[1:])}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread, {os.cpu_count()} cores. {family} of {sizes.num_layers} layers, hidden "
        f"size {sizes.hidden_size}, {sizes.max_sequence_length} tokens; launches stubbed. {what}.",
        "",
        f"| level | {' | '.join(columns)} |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for level, phases in found.items():
        whole = sum(phases.values())
        cells = [f"{phases[phase] * 1e3:.2f}" for phase in PHASES] + [f"{whole * 1e3:.2f}", f"{whole / reference:.2f}"]
        cells += [str(number) for number in counts[level].values()]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print and write the table. Returns 1 if O2 is above the limit."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default=",".join(LEVELS), help="separated by commas; compared with bf16-amp")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--family", default="gpt", choices=sorted(FAMILIES))
    parser.add_argument("--windows", action="store_true", help="add up the least times of each block's passes, eagerly")
    parser.add_argument("--compile", action="store_true", help="compile each block, as jobs do on CUDA")
    parser.add_argument("--recorded", action="store_true", help="replay the levels' steps, as a job on CUDA does")
    add_write_option(parser)
    options = parser.parse_args()
    if options.windows and (options.compile or options.recorded):
        parser.error("--windows with --compile or --recorded: blocks have no place to note the time; allowed: --windows alone.")
    torch.set_num_threads(1)
    with stubbed_launches(), triton_blocks() if options.compile else nullcontext():
        levels = [REFERENCE, *options.levels.split(",")]
        if options.recorded:
            levels = [REFERENCE, *(level + RECORDED for level in levels)]
        steps = {level: phases_of(level, options.family, compiled=options.compile) for level in levels}
        if options.windows:
            found, what = measure_windows(steps, options.family, options.rounds), f"Least windows of {options.rounds} steps"
        else:
            found, what = measure(steps, options.rounds), f"Median CPU time of {options.rounds} steps"
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if options.compile else 0
        counts = {level: count(phases, compiled=options.compile) for level, phases in steps.items()}
    report = table(found, counts, options.family, what)
    if options.compile:
        report += f"\nCompiled graphs: {num_graphs}, for all levels together.\n"
    sys.stdout.write(report)
    if options.write:
        command = command_line("benchmarks.host_time", sys.argv[1:])
        write(options.write, figures(found, options.family, compiled=options.compile), command)
    limited = LIMITED + RECORDED * options.recorded
    return int(limited in found and ratio_of(found, limited) > limit(compiled=options.compile))


if __name__ == "__main__":
    raise SystemExit(main())
