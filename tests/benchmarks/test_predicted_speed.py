"""Predicted speeds follow the sizes, the rates and the goals of the benchmarks that measure the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import linear, train
from benchmarks.gpu.predicted_speed import layers
from benchmarks.gpu.roofline import COPY_BYTES_PER_S, H200_COPY_BYTES_PER_S, fp8_work


def test_every_shape_is_compared_with_its_goal() -> None:
    rows = list(layers())
    assert len(rows) == 3 * len(linear.SHAPES)
    assert [row.target for row in rows[:2]] == [linear.WAYS[kind][2] for kind in ("tensor", "block")]
    ratios = [row.ratio for row in rows if "tensor" in row.figure]
    assert min(filter(None, ratios)) == ratios[0], "the smallest product gains least"


def test_a_faster_memory_saves_the_time_of_bytes_alone() -> None:
    """At this size no product waits for memory, so a quantization's bytes are all that an H200 does faster."""
    m, k, n = 8192, 8192, 8192
    work = fp8_work("bf16", "tensor")
    num_bytes = work.input_bytes * m * k + work.grad_output_bytes * m * n + work.weight_bytes * k * n
    saved_s = work.seconds(m, k, n, COPY_BYTES_PER_S) - work.seconds(m, k, n, H200_COPY_BYTES_PER_S)
    assert saved_s == pytest.approx(num_bytes / COPY_BYTES_PER_S - num_bytes / H200_COPY_BYTES_PER_S)
    assert work.weight_bytes == 10, "two bytes read twice and one written, in both passes"
    assert work.grad_weight_bytes == 2


@pytest.mark.system
def test_the_report_has_every_size_and_shape(tmp_path: Path) -> None:
    """In a process of its own: the fake ranks that count the optimizer's bytes stay registered for the rest of a process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.predicted_speed", "--out", str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    (report,) = tmp_path.glob("*-gpu-predicted-speed.md")
    found = [
        line.split(" | ")[0].removeprefix("| ") for line in report.read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    assert found[2:] == [f"GPT {size.name}, O2: speed" for size in train.SIZES] + [row.figure for row in layers()]
