"""Predict, from bytes and rates, the speeds that `make bench-gpu-train` and `bench-gpu-kernels` measure on an H200.

    python -m benchmarks.gpu.predicted_speed [--out FOLDER]

Nothing here has been measured on a GPU. Products take the times of `roofline.py` with an H200's bandwidth, all else that a step
does the time of its bytes, each layer eagerly with current scaling, as in `benchmarks/scaling.py`. The optimizer's bytes are
those that a step holds. The host is taken to be fast enough, as it is under CUDA graphs or compiled blocks at these sizes.
Goals come from the benchmarks that measure the same.
"""

import argparse
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import scaling
from benchmarks.figures import OUT, add_write_option, write
from benchmarks.gpu import linear, train
from benchmarks.gpu.networks import build_gpt
from benchmarks.gpu.report import COLUMNS, Row, unused
from benchmarks.gpu.roofline import GEMM_FLOPS_PER_S, GEMM_S, H200_COPY_BYTES_PER_S, LAUNCH_S, PLAIN_BF16, fp8_work
from benchmarks.scaling import Run


def step_s(size: train.Size, level: str) -> float:
    """Seconds of a step of one micro-batch, with its optimizer."""
    num_tokens = size.batch_size * size.config.max_sequence_length
    computed_s = scaling.compute_s(size.config, level, num_tokens, H200_COPY_BYTES_PER_S)
    return computed_s + scaling.optimizer_s(size.config, Run(level, 0), 1, H200_COPY_BYTES_PER_S)


def steps() -> Iterator[Row]:
    """A GPT's step at O2 against bf16-amp's."""
    for size in train.SIZES:
        base_s, own_s = step_s(size, "bf16-amp"), step_s(size, "O2")
        num_tokens = size.batch_size * size.config.max_sequence_length
        num_parameters = build_gpt(size.config, torch.device("meta")).num_parameters
        note = f"{6 * num_parameters * num_tokens / own_s / 1e12:.0f} TFLOP/s at 6 per parameter and token"
        figure = f"GPT {size.name}, O2: speed"
        yield Row(figure, f"{own_s * 1e3:.1f} ms", f"bf16-amp {base_s * 1e3:.1f} ms", base_s / own_s, size.speed, note)


def layers() -> Iterator[Row]:
    """A linear layer that holds a bf16 weight, forward and backward, against bf16."""
    for m, k, n in linear.SHAPES:
        base_s = PLAIN_BF16.seconds(m, k, n, H200_COPY_BYTES_PER_S)
        for kind in ("tensor", "block", "row"):
            own_s = fp8_work("bf16", kind).seconds(m, k, n, H200_COPY_BYTES_PER_S)
            figure, target = f"linear {m} × {k} × {n}, {kind}", linear.WAYS[kind][2]
            yield Row(figure, f"{own_s * 1e6:.0f} µs", f"bf16 {base_s * 1e6:.0f} µs", base_s / own_s, target)


def report(rows: Sequence[Row]) -> str:
    """Return the document."""
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in GEMM_FLOPS_PER_S.items())
    lines = [
        f"# Speed on an H200, predicted, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`make bench-predicted-speed`, torch {torch.__version__}, Python {platform.python_version()}. No GPU was used.",
        f"TFLOP/s of products: {rates}. Copies: {H200_COPY_BYTES_PER_S / 1e9:,.0f} GB/s. Besides, a product takes "
        f"{GEMM_S * 1e6:.0f} µs and another launch {LAUNCH_S * 1e6:.0f} µs. Sources: `benchmarks/gpu/roofline.py`.",
        "",
        "| " + " | ".join(COLUMNS).replace("measured", "predicted").replace(", in the same run", "") + " |",
        "| " + " | ".join("---" for _ in COLUMNS) + " |",
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the table")
    add_write_option(parser)
    options = parser.parse_args()
    path = unused(options.out / f"{datetime.now(UTC):%Y-%m-%d}-gpu-predicted-speed.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [*steps(), *layers()]
    path.write_text(report(rows), "utf-8")
    if options.write:
        figures = [row.result("speed, predicted") for row in rows if row.target is not None]
        write(options.write, figures, "make bench-predicted-speed", "no GPU (predicted for an H200)", is_timed=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
