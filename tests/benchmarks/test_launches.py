"""Count a step's GPU launches on the fake GPU, in a process whose Triton does not interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def found_by(program: str) -> Any:
    """Run an expression over the names of `benchmarks.gpu.launches` and return its value through JSON."""
    # It ends at once: an interpreter taken down with torch's threads sometimes ends in an abort (worker/__main__.py).
    lines = f"import json, os\nfrom benchmarks.gpu.launches import *\nprint(json.dumps({program}), flush=True)\nos._exit(0)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", lines]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.system
def test_clipping_fp8_gradients_launches_no_more_for_more_layers() -> None:
    """At each level that holds gradients in FP8: ours in three launches, torch's function in as many as it needs for values."""
    ways = "(clip_grad_norm_, nn.utils.clip_grad_norm_)"
    levels = ("O1", "O2", "O3-split", "O2-8bit")
    ours, torchs = found_by(
        f"[[clipping(layers, level, clip)[0].by_name for level in {levels} for layers in (1, 5)] for clip in {ways}]"
    )
    assert ours == [{"norm_parts_kernel": 1, "total_norm_kernel": 1, "clip_kernel": 1}] * 8
    on_one_number = dict.fromkeys(("stack", "linalg_vector_norm", "add", "reciprocal", "mul", "clamp"), 1)
    assert torchs == [{"norm_parts_kernel": 1, "norms_kernel": 1, **on_one_number, "_foreach_mul_": 1}] * 8


@pytest.mark.system
@pytest.mark.parametrize("level", ["te", "O2"])
def test_statistics_are_a_launch_for_each_operand_and_below_1_percent(level: str) -> None:
    """By launches, and by bytes, of all steps between two samples. A block of a GPT has four layers."""
    program = "[block('gpt', LEVEL, {}, 1).by_name['_measure_sample'], sampling('gpt', LEVEL, {}).shares]"
    num_measured, shares = found_by(program.replace("LEVEL", repr(level)))
    assert num_measured == 4 * 3
    assert 0 < max(shares) < 0.01


@pytest.mark.system
def test_an_optimizer_s_step_launches_no_more_for_more_layers() -> None:
    """At each level that has our optimizer. te has one format of parameters, and closes the windows of delayed scaling."""
    program = "{level: [optimizer_step(layers, level).by_name for layers in (1, 4)] for level in OPTIMIZER_LEVELS}"
    found = found_by(program)
    assert {"te", "O1", "O2", "O3", "O3-split", "O2-8bit", "O3-split-8bit"} == set(found)
    for level, (few, many) in found.items():
        assert few == many, level
        assert many["update_kernel"] == many["prepare_kernel"] == (1 if level == "te" else 2), level
        assert sum(many.values()) <= (45 if level == "te" else 25), level


@pytest.mark.system
def test_experts_launch_no_more_for_more_of_them() -> None:
    """At each of our levels: 6 products, and what makes their operands; at te also what reads and fills windows."""
    program = "{level: [experts(level, number).by_name for number in (4, 32)] for level in OPTIMIZER_LEVELS}"
    found = found_by(program)
    assert {"te", "O1", "O2", "O3", "O3-split", "O2-8bit", "O3-split-8bit"} == set(found)
    for level, (few, many) in found.items():
        assert few == many, level
        assert many["matmul_kernel"] == 6, level
        assert sum(many.values()) <= (87 if level == "te" else 39), level
