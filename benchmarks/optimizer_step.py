"""Time an optimizer step for the storage of each level, relative to torch.optim.AdamW on fp32, on a small GPT's parameters.

    python -m benchmarks.optimizer_step [--hidden-size 128] [--num-layers 4] [--repeats 10] [--write]

Uses one thread. Times are medians of the thread's CPU clock; the storages take turns, so other processes disturb them little.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from worker import kernels
from worker.fp8.gradient import Float8Gradient, RoundingPosition
from worker.optim import Hyperparameters, LowBitAdamW, QuantizedWeight

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Storage:
    """How a level stores a converted layer. weight: fp32, fp16, split or master; the codecs are those of the moments."""

    weight: str
    exp_avg_codec: str
    exp_avg_sq_codec: str


STORAGES = {
    "fp32": Storage("fp32", "fp32", "fp32"),
    "O1": Storage("fp16", "fp32", "fp32"),
    "O2": Storage("fp16", "fp8-dre", "fp16-block"),
    "O3": Storage("master", "fp8-dre", "fp16-block"),
    "O3-split": Storage("split", "fp8-dre", "fp16-block"),
    "O2-8bit": Storage("fp16", "int8-companded", "uint8-companded"),
    "O3-split-8bit": Storage("split", "int8-companded", "uint8-companded"),
    "MS-AMP's O2": Storage("fp16", "fp8-tensor", "fp16-tensor"),
}


def layer_shapes(hidden_size: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's linear layers and their biases."""
    shapes: list[tuple[int, ...]] = []
    for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
        shapes += [(rows * hidden_size, columns * hidden_size), (rows * hidden_size,)]
    return shapes * num_layers


def stored_weight(values: Tensor, weight: str) -> QuantizedWeight:
    """Store the values in a level's format."""
    codes, dequant_scale = kernels.quantize(values, torch.float16 if weight == "fp16" else E4M3)
    parameter = nn.Parameter(codes)
    parameter.grad_dtype = torch.float32
    residual = torch.zeros(codes.shape, dtype=torch.int8) if weight == "split" else None
    return QuantizedWeight(parameter, dequant_scale, residual, initial_values=values if weight == "master" else None)


def prepare(storage: Storage, shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """Return an optimizer step on random weights and gradients. Weights stored in codes get FP8 gradients."""
    parameters: list[Tensor] = []
    quantized: list[QuantizedWeight] = []
    for shape in shapes:
        values, gradient = torch.randn(shape) * 0.02, torch.randn(shape) * 1e-3
        if storage.weight == "fp32" or len(shape) == 1:
            parameter: Tensor = nn.Parameter(values)
            parameter.grad = gradient
        else:
            quantized.append(stored_weight(values, storage.weight))
            parameter = quantized[-1].codes
            parameter.grad = Float8Gradient.quantize(gradient, RoundingPosition(0, 0))
        parameters.append(parameter)
    codecs = Hyperparameters(exp_avg_codec=storage.exp_avg_codec, exp_avg_sq_codec=storage.exp_avg_sq_codec)
    return LowBitAdamW(parameters, codecs, quantized=quantized).step


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
    arguments.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = layer_shapes(options.hidden_size, options.num_layers)
    steps: dict[str, Callable[[], object]] = {"torch.optim.AdamW": prepare_torch(shapes)}
    steps |= {name: prepare(storage, shapes) for name, storage in STORAGES.items()}
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats + 1):  # the first warms up
        for name, step in steps.items():
            start_s = time.thread_time()
            step()
            times_s[name].append(time.thread_time() - start_s)
    report = table(times_s, sum(torch.Size(shape).numel() for shape in shapes))
    sys.stdout.write(report)
    if options.write:
        (Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-optimizer-step.md").write_text(report)


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
