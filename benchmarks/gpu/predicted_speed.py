"""Predict, from bytes and rates, the speeds that `make gpu-day` measures on an H100 or an H200.

    python -m benchmarks.gpu.predicted_speed [--out FOLDER]

Nothing here has been measured on a GPU. Products take the times of `roofline.py` with the device's bandwidth, all else that a
step does the time of its bytes, each layer eagerly with current scaling, as in `benchmarks/scaling.py`. The optimizer's bytes
are those that a step holds. The host is taken to be fast enough, as it is under CUDA graphs or compiled blocks at these sizes.

Each row has three figures: one by the rates at which Octet's own kernels run, and both ends: FP8 products as fast as published
with fast accumulation in all three, and as slow as peers' measured steps say. `roofline.ASSUMPTIONS` has them in words. Goals
come from the benchmarks that measure the same, and so do the figures' names, by which `make gpu-day` finds a prediction.
"""

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch

from benchmarks import scaling
from benchmarks.figures import OUT, PREDICTIONS, Figure, add_write_option, write
from benchmarks.gpu import accuracy, linear, optimizer, quantization, train
from benchmarks.gpu.networks import build_gpt
from benchmarks.gpu.report import Row, unused
from benchmarks.gpu.roofline import (
    ASSUMPTIONS,
    COPY_BYTES_PER_S,
    GEMM_FLOPS_PER_S,
    GEMM_S,
    H200_COPY_BYTES_PER_S,
    LAUNCH_S,
    PLAIN_BF16,
    Rates,
    fp8_work,
    rates_of,
)
from benchmarks.scaling import Run
from octet.api_schemas import GPTSizes
from octet.worker.kernels import ScaleKind

DEVICES = {"H100": COPY_BYTES_PER_S, "H200": H200_COPY_BYTES_PER_S}
"""Bandwidths of the devices that a table is predicted for. A device's name is part of what torch calls it."""
COLUMNS = ("figure", "predicted", "compared with", "ratio", "slowest to fastest", "ship", "ahead", "met", "note")
Predicted = Mapping[str, Row]
"""The row of one figure by each of ASSUMPTIONS."""


def step_s(sizes: GPTSizes, num_tokens: int, level: str, rates: Rates) -> float:
    """Seconds of a step of one micro-batch, with its optimizer."""
    return scaling.compute_s(sizes, level, num_tokens, rates) + scaling.optimizer_s(sizes, Run(level, 0), 1, rates)


def by_assumption(row_of: Callable[[Rates], Row], device: str) -> Predicted:
    """Return the row of each assumption on a device."""
    return {name: row_of(rates_of(name, DEVICES[device])) for name in ASSUMPTIONS}


def steps(device: str) -> Iterator[Predicted]:
    """GPTs' steps: tokens per second, each level's gain, and the 6.7 B step's TFLOP/s."""
    for size in train.SIZES:
        for level in ("bf16-amp", "O2"):
            yield by_assumption(lambda rates, size=size, level=level: _speed_row(size, level, rates), device)
        yield by_assumption(lambda rates, size=size: _step_row(size, "O2", rates), device)
        for level in ("O3-split", "te", "O1"):
            yield by_assumption(lambda rates, size=size, level=level: _step_row(size, level, rates), device)
        yield by_assumption(lambda rates, size=size: _peer_row(size, rates), device)
        if size.name == "6.7 B":
            yield by_assumption(lambda rates, size=size: _flops_row(size, rates), device)


def _tokens(size: train.Size) -> int:
    return size.batch_size * size.config.max_sequence_length


def _speed_row(size: train.Size, level: str, rates: Rates) -> Row:
    seconds = step_s(size.config, _tokens(size), level, rates)
    return Row(f"GPT {size.name}, {level}: speed", f"{_tokens(size) / seconds:,.0f} tokens/s, step {seconds * 1e3:.1f} ms")


def _step_row(size: train.Size, level: str, rates: Rates) -> Row:
    base_s, own_s = (step_s(size.config, _tokens(size), each, rates) for each in ("bf16-amp", level))
    note = f"{_flops(size) / own_s / 1e12:.0f} TFLOP/s at 6 per parameter and token"
    target = size.speed if level == "O2" else None
    figure = f"GPT {size.name}, {level}: speed"
    return Row(figure, f"{own_s * 1e3:.1f} ms", f"bf16-amp {base_s * 1e3:.1f} ms", base_s / own_s, target, note)


def _peer_row(size: train.Size, rates: Rates) -> Row:
    """O2 against torchao's layer by tensor scales, which multiplies as level te does and steps torch's AdamW."""
    base_s, own_s = (step_s(size.config, _tokens(size), level, rates) for level in ("te", "O2"))
    reference = f"{train.AO_TENSORWISE.name} {base_s * 1e3:.1f} ms"
    return Row(f"GPT {size.name}, O2: speed", f"{own_s * 1e3:.1f} ms", reference, base_s / own_s, train.AGAINST_AO)


def _flops(size: train.Size) -> float:
    return 6 * build_gpt(size.config, torch.device("meta")).num_parameters * _tokens(size)


def _flops_row(size: train.Size, rates: Rates) -> Row:
    seconds = step_s(size.config, _tokens(size), "O2", rates)
    figure, flops_per_s = f"GPT {size.name}, O2: model TFLOP/s", _flops(size) / seconds / 1e12
    return Row(figure, f"{seconds * 1e3:.1f} ms", train.IN_TFLOPS, flops_per_s, train.FLOPS)


def layers(device: str) -> Iterator[Predicted]:
    """A linear layer that holds a bf16 weight, forward and backward, against bf16."""
    for shape in linear.SHAPES:
        for kind in ("tensor", "block", "row"):
            yield by_assumption(lambda rates, shape=shape, kind=kind: _layer_row(shape, kind, rates), device)


def _layer_row(shape: tuple[int, int, int], kind: str, rates: Rates) -> Row:
    base_s, own_s = (work.seconds(*shape, rates) for work in (PLAIN_BF16, fp8_work("bf16", kind)))
    figure, target = f"linear {linear.text(shape)}, {kind}", linear.WAYS[kind][2]
    return Row(figure, f"{own_s * 1e6:.0f} µs", f"bf16 {base_s * 1e6:.0f} µs", base_s / own_s, target)


def updates(device: str) -> Iterator[Predicted]:
    """AdamW at each level against torch's, by the bytes that each has to move."""
    for level in optimizer.LEVELS:
        yield by_assumption(lambda rates, level=level: _update_row(level, rates), device)


def _update_row(level: str, rates: Rates) -> Row:
    base_s, own_s = (scaling.optimizer_s(optimizer.SIZES, Run(each, 0), 1, rates) for each in ("bf16-amp", level))
    figure, target = f"AdamW {level} against {optimizer.TORCH}", optimizer.FASTER if level == "O2" else None
    return Row(figure, f"{own_s * 1e3:.2f} ms", f"theirs {base_s * 1e3:.2f} ms", base_s / own_s, target)


def time_to_loss(device: str) -> Iterator[Predicted]:
    """The time to the same loss, where both levels need as many steps."""

    def row_of(rates: Rates) -> Row:
        setting = accuracy.LARGE
        num_tokens = setting.batch_size * setting.sizes.max_sequence_length
        base_s, own_s = (step_s(setting.sizes, num_tokens, level, rates) for level in (accuracy.REFERENCE, accuracy.TIMED))
        texts = (f"{seconds * setting.steps:.1f} s" for seconds in (own_s, base_s))
        own, base = texts
        return Row(accuracy.TO_LOSS, own, f"{accuracy.REFERENCE} {base}", base_s / own_s, accuracy.TIME_TO_LOSS)

    yield by_assumption(row_of, device)


def bandwidths(device: str) -> Iterator[Predicted]:
    """Shares of a copy's bandwidth: that of the bytes, less the fixed time of a launch."""
    for shape, (name, kind, *sides) in product(quantization.SHAPES, quantization.WAYS):
        for verb, element_bytes in zip(quantization.VERBS, sides, strict=True):
            num_launches = 3 if "current" in name or (kind is ScaleKind.ROW and verb != quantization.VERBS[0]) else 1
            moved_s = element_bytes * shape[0] * shape[1] / DEVICES[device]
            share, text = moved_s / (moved_s + num_launches * LAUNCH_S), f"{moved_s * 1e6:.0f} µs"
            row = Row(f"{verb} {name}, {shape[0]}×{shape[1]}", text, "copy", share)
            yield dict.fromkeys(ASSUMPTIONS, row)


def rows_of(device: str) -> list[Predicted]:
    """Return every row for a device."""
    return [*steps(device), *layers(device), *updates(device), *time_to_loss(device), *bandwidths(device)]


def result(device: str, row: Predicted) -> Figure:
    """Return the row of RESULTS.md: the figure at our kernels' rates, and both ends as its interval."""
    found = {name: each.result(f"speed, predicted for an {device}") for name, each in row.items()}
    ends = sorted((found[name].value.split(" ")[0] for name in ASSUMPTIONS), key=lambda text: float(text.replace(",", "")))
    own = found["own"]
    interval = "" if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"
    return Figure(own.figure, own.value, interval, own.goal)


def table(device: str, rows: Sequence[Predicted]) -> list[str]:
    """Format one device's rows in Markdown."""
    lines = [f"## {device}", "", f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    for row in rows:
        figure, measured, reference, ratio, *rest = row["own"].cells()
        ends = result(device, row).interval
        lines.append(f"| {' | '.join((figure, measured, reference, ratio, ends, *rest))} |")
    return [*lines, ""]


def report(rows: Mapping[str, Sequence[Predicted]]) -> str:
    """Return the document."""
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in GEMM_FLOPS_PER_S.items())
    copies = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in DEVICES.items())
    lines = [
        f"# Speed on an H100 and an H200, predicted, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`make bench-predicted-speed`, torch {torch.__version__}, Python {platform.python_version()}. No GPU was used.",
        f"TFLOP/s of products: {rates}. GB/s of copies: {copies}. Besides, a product takes {GEMM_S * 1e6:.0f} µs and another "
        f"launch {LAUNCH_S * 1e6:.0f} µs. Sources: `benchmarks/gpu/roofline.py`.",
        "",
        "The ratio is by the rates of Octet's own kernels, between the slowest and the fastest of these:",
        "",
        *(f"- {name}: {text}." for name, text in ASSUMPTIONS.items()),
        "",
        "What peers have measured: llm.q (its README, one H100) 1.24 at 1.5 B, 1.29 at 3 B, 1.36 at 7 B and 1.48 at 14 B; "
        "torchao with torchtitan (pytorch/ao#1793, eight H100) 1.25 at Llama 3 8 B; torchtitan (its "
        "`benchmarks/llama3_h100_202412_torchtitan.md`, eight H100 of 500 W) 1.28. The slowest assumption is the one that "
        "fits llm.q's two nearest sizes.",
        "",
    ]
    for device, each in rows.items():
        lines += table(device, each)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the table")
    add_write_option(parser)
    options = parser.parse_args()
    path = unused(options.out / f"{datetime.now(UTC):%Y-%m-%d}-gpu-predicted-speed.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {device: rows_of(device) for device in DEVICES}
    path.write_text(report(rows), "utf-8")
    if options.write:
        figures = [result(device, row) for device, each in rows.items() for row in each]
        where = ("make bench-predicted-speed", "no GPU (predicted)")
        write(options.write, [figure for figure in figures if figure.goal], *where, is_timed=False)
        write(options.write.with_name(PREDICTIONS.name), figures, *where, is_timed=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
