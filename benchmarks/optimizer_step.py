"""Time of an optimizer step as each level stores it, against torch.optim.AdamW on fp32, for the parameters of a small GPT.

    python -m benchmarks.optimizer_step [--hidden-size 128] [--num-layers 4] [--repeats 10] [--write]

One thread. Times are medians of the thread's own CPU clock, the cases taken in turn: other processes disturb them little.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from torch import Tensor, nn

from benchmarks.figures import Figure, add_write_option, command_line, write
from octet.api_schemas.levels import LEVELS, Level
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight, hold_encoded
from octet.worker.fp8.weights import encode_weight
from octet.worker.optim import LowBitAdamW, LowBitLion, LowBitOptimizer

LEVEL_NAMES = ("fp32", "O1", "O2", "O3", "O3-split", "O2-8bit", "O3-split-8bit")
CASES: dict[str, tuple[type[LowBitOptimizer], Level]] = {
    **{name: (LowBitAdamW, LEVELS[name]) for name in LEVEL_NAMES},
    **{f"Lion, {name}": (LowBitLion, LEVELS[name]) for name in ("fp32", "O2", "O3-split-8bit")},
}


def layer_shapes(hidden_size: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's linear layers and their biases."""
    shapes: list[tuple[int, ...]] = []
    for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
        shapes += [(rows * hidden_size, columns * hidden_size), (rows * hidden_size,)]
    return shapes * num_layers


def stored_weight(values: Tensor, level: Level) -> nn.Parameter:
    """Return a parameter of the values as the level holds them."""
    parameter, encoded = nn.Parameter(values), encode_weight(values, level)
    if encoded is not None:
        hold_encoded(parameter, encoded)
    return parameter


def prepare(optimizer: type[LowBitOptimizer], level: Level, shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """An optimizer step on random weights and gradients, FP8 gradients for what is stored in codes."""
    parameters: list[Tensor] = []
    for shape in shapes:
        values, gradient = torch.randn(shape) * 0.02, torch.randn(shape) * 1e-3
        parameter = stored_weight(values, level) if len(shape) == 2 else nn.Parameter(values)
        is_stored = type(parameter) is Float8Weight
        parameter.grad = Float8Gradient.quantize(gradient, RoundingPosition(0, 0)) if is_stored else gradient
        parameters.append(parameter)
    codecs = {f"{state}_codec": getattr(level, state) for state in optimizer.rule.state_codecs}
    return optimizer(parameters, optimizer.rule.defaults(**codecs)).step


def prepare_torch(shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """Return torch's own optimizer step on fp32."""
    parameters = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape) * 1e-3
    return torch.optim.AdamW(parameters).step


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hidden-size", type=int, default=128)
    arguments.add_argument("--num-layers", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=10)
    add_write_option(arguments)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = layer_shapes(options.hidden_size, options.num_layers)
    steps: dict[str, Callable[[], object]] = {"torch.optim.AdamW": prepare_torch(shapes)}
    steps |= {name: prepare(*case, shapes) for name, case in CASES.items()}
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats + 1):  # the first warms up
        for name, step in steps.items():
            start_s = time.thread_time()
            step()
            times_s[name].append(time.thread_time() - start_s)
    report = table(times_s, sum(torch.Size(shape).numel() for shape in shapes))
    sys.stdout.write(report)
    if options.write:
        write(options.write, figures(times_s), command_line("benchmarks.optimizer_step", sys.argv[1:]))


def figures(times_s: dict[str, list[float]]) -> list[Figure]:
    """Return the ratio of each case to torch's step."""
    medians = {name: statistics.median(times[1:]) for name, times in times_s.items()}
    baseline_s = medians.pop("torch.optim.AdamW")
    return [
        Figure(f"optimizer on CPU: {name}, step / torch.optim.AdamW", f"{median_s / baseline_s:.1f}")
        for name, median_s in medians.items()
    ]


def table(times_s: dict[str, list[float]], num_parameters: int) -> str:
    """Format milliseconds and the ratio to torch's step as a Markdown table."""
    medians = {name: statistics.median(times[1:]) for name, times in times_s.items()}
    baseline_s = medians["torch.optim.AdamW"]
    lines = [
        f"# The optimizer's step on CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.optimizer_step {' '.join(sys.argv[1:])}` on {platform.machine()}, 1 thread; torch "
        f"{torch.__version__}; {num_parameters:,} parameters.",
        "",
    ]
    lines += ["| storage | step (ms) | ns per parameter | ratio to torch |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {median_s * 1e3:.1f} | {median_s / num_parameters * 1e9:.1f} | {median_s / baseline_s:.1f} |"
        for name, median_s in medians.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
