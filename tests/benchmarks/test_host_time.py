"""The benchmark of the host's time runs our kernels' host code to the launch, and counts what a step issues."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parent.parent.parent
MOST_LAUNCHES, MOST_OPS = 407, 1320
"""Triton launches and torch ops of an O2 step of 12 layers. More of them take the host more time on any machine."""


@pytest.mark.matrix
def test_an_o2_step_issues_no_more_than_it_did() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--levels", "O2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG_S)
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in done.stdout.splitlines() if line.startswith("|")}
    assert {"bf16-amp", "O2"} <= rows.keys(), done.stderr
    num_launches, num_ops = (int(cell) for cell in rows["O2"][-2:])
    assert 0 < num_launches <= MOST_LAUNCHES
    assert 0 < num_ops <= MOST_OPS
    assert int(rows["bf16-amp"][-2]) == 0
