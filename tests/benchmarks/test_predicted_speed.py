"""Predicted speeds follow the sizes, the rates and the goals of the benchmarks that measure the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import PREDICTIONS
from benchmarks.gpu import linear, train
from benchmarks.gpu.predicted_speed import layers, result
from benchmarks.gpu.roofline import ASSUMPTIONS, H200_COPY_BYTES_PER_S, LONGER_ACCUMULATION, Rates, fp8_work, rates_of


def test_every_shape_is_compared_with_its_goal() -> None:
    rows = [row["own"] for row in layers("H200")]
    assert len(rows) == 3 * len(linear.SHAPES)
    assert [row.target for row in rows[:2]] == [linear.WAYS[kind][2] for kind in ("tensor", "block")]
    ratios = [row.ratio for row in rows if "tensor" in row.figure]
    assert min(filter(None, ratios)) == ratios[0], "the smallest product gains least"


def test_a_row_has_both_ends_and_our_own_rates_between_them() -> None:
    for row in layers("H100"):
        fast, own, peers = (row[name].ratio or 0.0 for name in ASSUMPTIONS)
        assert peers <= own <= fast
        if "tensor" in row["own"].figure:
            figure = result("H100", row)
            assert figure.interval == f"{peers:.2f} to {fast:.2f}"
            assert figure.value.startswith(f"{own:.2f} (")
        else:
            assert peers == own == fast, "scales of rows and blocks have no fast accumulation"


def test_two_of_three_products_run_without_fast_accumulation() -> None:
    """At this size no product waits for memory."""
    shape, work = (16384, 8192, 8192), fp8_work("bf16", "tensor")
    product_s = 2 * 16384 * 8192 * 8192 / Rates().gemm_flops_per_s["tensor"]
    longer_s = work.seconds(*shape, rates_of("own")) - work.seconds(*shape, rates_of("fast"))
    assert longer_s == pytest.approx(2 * (LONGER_ACCUMULATION - 1) * product_s)


def test_a_faster_memory_saves_the_time_of_bytes_alone() -> None:
    """At this size no product waits for memory, so a quantization's bytes are all that an H200 does faster."""
    m, k, n = 8192, 8192, 8192
    work, h100, h200 = fp8_work("bf16", "tensor"), Rates(), Rates(H200_COPY_BYTES_PER_S)
    num_bytes = work.input_bytes * m * k + work.grad_output_bytes * m * n + work.weight_bytes * k * n
    saved_s = work.seconds(m, k, n, h100) - work.seconds(m, k, n, h200)
    assert saved_s == pytest.approx(num_bytes / h100.copy_bytes_per_s - num_bytes / h200.copy_bytes_per_s)
    assert work.weight_bytes == 10, "two bytes read twice and one written, in both passes"
    assert work.grad_weight_bytes == 2


@pytest.mark.system
def test_the_report_and_both_files_of_figures_have_every_size_and_shape(tmp_path: Path) -> None:
    """In a process of its own: the fake ranks that count the optimizer's bytes stay registered for the rest of a process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.predicted_speed", "--out", str(tmp_path)]
    subprocess.run([*command, "--write", str(tmp_path / "RESULTS.md")], env=environment, check=True)
    (report,) = tmp_path.glob("*-gpu-predicted-speed.md")
    found = [line.split(" | ")[0].removeprefix("| ") for line in report.read_text("utf-8").splitlines()]
    for figure in (*(f"GPT {size.name}, O2: speed" for size in train.SIZES), *(row["own"].figure for row in layers("H100"))):
        assert found.count(figure) >= 2, "once for each device"
    _, with_goals, _ = figures.read(tmp_path / "RESULTS.md")
    _, predicted, _ = figures.read(tmp_path / PREDICTIONS.name)
    assert all(row.goal for row in with_goals.values())
    assert set(with_goals) < set(predicted)
    assert predicted["speed, predicted for an H200: GPT 1.3 B, O2: speed / bf16-amp"].interval == "1.20 to 1.33"
